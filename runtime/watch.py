"""A worker's watchdog: it knows what the worker does, tells in one line what ended it, and never lets it wait for ever."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sim.spec.program import Instruction, instruction_text
from sim.spec.reading import InputError, write_file

FAILURES = "MOTLEY_FAILURES"
"""The environment variable that names the folder where workers leave their failures. Without it they print them."""

LAUNCHER = "MOTLEY_LAUNCHER"
"""The environment variable with the process id of the launching process, which may have gone before the watch began."""

TRACEBACK = "MOTLEY_TRACEBACK"
"""The environment variable that is 1 where tracebacks are to be printed, too."""

GRACE_S = 2.0
"""How much longer than the timeout the watchdog waits, so that torch, whose errors say more, is the first to give up."""

LEAST_PHASE_S = 600.0
"""How long workers wait for one another at least in what is no instruction, such as saving a checkpoint."""

FIRST_TELLS_S = 5.0
"""How long the first worker has to tell of a mistake before the others do."""

_INTERVAL_S = 0.25
"""How often the watchdog looks."""

_LONGEST = 300
"""Letters of an error's text that are shown."""


def control_timeout_s(timeout_s: float) -> float:
    """How long a phase that is no instruction may take some workers longer than others, in seconds."""
    return max(10 * timeout_s, LEAST_PHASE_S)


class TrainingFailed(Exception):
    """What ends a training and concerns all its workers alike, each of which raises it: its text is all there is to tell."""


@dataclass(frozen=True)
class Failure:
    """What a worker told before it ended, in one line, with the exit code that the run should end with."""

    rank: int
    device: str
    lane: str
    code: int
    message: str
    time_s: float
    """Seconds since the epoch, by the clock of the worker's machine."""
    follows: bool
    """Whether it may follow from another worker's failure: a lost connection, a wait too long, an order to end."""


def tell(failure: Failure) -> None:
    """Nothing; leaves the failure in the folder that the launching process named, or prints it where there is none."""
    folder = os.environ.get(FAILURES)
    if folder:
        try:
            write_file(Path(folder) / f"{failure.rank}.json", json.dumps(dataclasses.asdict(failure)), replace=True)
            return
        except (OSError, InputError):
            pass  # the disk that is full may be this one
    print(f"motley: error: {failure.message}", file=sys.stderr, flush=True)


def let_first_tell(rank: int) -> None:
    """Nothing; has any worker but the first wait before it prints of what all workers find alike, as most mistakes.

    The first then tells of it, and torchrun ends the others.
    """
    if rank > 0 and FAILURES not in os.environ:
        time.sleep(FIRST_TELLS_S)


def read_failures(folder: Path) -> list[Failure]:
    """The failures that workers left in a folder, the earliest first."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("[0-9]*.json")]
    return sorted(found, key=lambda failure: (failure.time_s, failure.rank))


class Watch:
    """What a worker does at present, and a thread beside it that ends the process when it must not go on.

    The thread ends the process, with exit code 3, when an instruction has lasted longer than `timeout_s` (unless the worker is
    `alone`: otherwise others wait for this one, and none of them waits longer), when the launching process has gone, and when
    the process is told to end; with 130 when it is interrupted. It works while the main thread is blocked inside torch, too.
    """

    def __init__(self, rank: int, device: str, lane: str, timeout_s: float, alone: bool = False) -> None:
        self.rank, self.device, self.lane = rank, device, lane
        self.timeout_s, self.alone = timeout_s, alone
        self.step: int | None = None
        """The step under way, counted from 0; None before the first. People are told of it counted from 1."""
        self.instruction: Instruction | None = None
        self.peer: str | None = None
        self.since_s = time.monotonic()
        """When the instruction or the phase began, by `time.monotonic`."""
        self._phase = "starting"
        self._told = self._quiet = False
        self._telling = threading.Lock()
        self._parent = int(os.environ.get(LAUNCHER) or os.getppid())

    @property
    def phase(self) -> str:
        """What the worker does outside of instructions, such as 'starting' or 'saving a checkpoint'."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self.leave()

    def enter(self, instruction: Instruction, peer: str | None = None) -> None:
        """Nothing; notes the instruction that begins, and which other lanes and devices it waits for, if any."""
        self.since_s = time.monotonic()
        self.instruction = instruction
        self.peer = peer

    def leave(self) -> None:
        """Nothing; notes that no instruction is under way."""
        self.instruction = self.peer = None
        self.since_s = time.monotonic()

    def start(self) -> None:
        """Nothing; starts the thread and takes over SIGTERM and SIGINT. Only the main thread may call it, once."""
        _end_with_parent()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the thread, which reads of it in the pipe, does the rest
        threading.Thread(target=self._watch, args=(reader,), name="watch", daemon=True).start()

    def guard(self, work: Callable[[], None]) -> None:
        """Nothing; does the work. Where it fails, tells why and ends the process at once.

        At once, because what is left of a broken process group may wait for its peers when it is taken down.
        """
        try:
            work()
        except (Exception, KeyboardInterrupt) as error:
            code = self.tell(error)
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            self._end(code)

    def tell(self, error: BaseException) -> int:
        """The exit code for an error, after telling of it as `explain` does; nothing is told of an interruption."""
        if isinstance(error, KeyboardInterrupt):
            return 130
        if os.environ.get(TRACEBACK) == "1":
            traceback.print_exception(error)
        code = 2 if isinstance(error, InputError) else 3
        if isinstance(error, InputError | TrainingFailed):
            self._quiet = True  # until then, being told to end is no news
            let_first_tell(self.rank)
            self._quiet = False
        self._tell(code, self.explain(error), follows=_lost_connection(error) is not None)
        return code

    def explain(self, error: BaseException) -> str:
        """One line: the device, what it did or waited for, and what an error means.

        Such as 'a100/1 (lane p0s1, step 4): waited in RA3@2<p0s0[0:1] for lane p0s0 (a100/0): connection closed by the peer'.
        """
        if isinstance(error, InputError | TrainingFailed):
            return str(error)
        lost = _lost_connection(error)
        return self._line(lost or _meaning(error), waited=lost is not None)

    def _line(self, what: str, waited: bool) -> str:
        """The line of `explain`; `waited` where the worker cannot be at fault."""
        step = "" if self.step is None else f", step {self.step + 1}"
        worker = f"{self.device} (lane {self.lane}{step})"
        instruction, peer = self.instruction, self.peer
        if instruction is None:
            return f"{worker}, while {self._phase}: {what}"
        if waited and peer is not None:
            return f"{worker}: waited in {instruction_text(instruction)} for lane {peer}: {what}"
        return f"{worker}: in {instruction_text(instruction)}: {what}"

    def _watch(self, reader: int) -> None:
        """Nothing; the thread, which never ends by itself."""
        while True:
            ready, _, _ = select.select([reader], [], [], _INTERVAL_S)
            numbers = os.read(reader, 64) if ready else b""
            if signal.SIGINT in numbers:
                self._end(130)
            if signal.SIGTERM in numbers:
                self._give_up(f"was told to end after {self._lasted_s():.3g} s")
            if os.getppid() != self._parent:
                self._give_up("the process that started the workers has gone")
            limit_s = control_timeout_s(self.timeout_s) if self.instruction is None else self.timeout_s
            if not self.alone and self._lasted_s() > limit_s + GRACE_S:
                self._give_up(f"no end after {self._lasted_s():.3g} s")

    def _lasted_s(self) -> float:
        """How long the instruction or the phase has lasted, in seconds."""
        return time.monotonic() - self.since_s

    def _give_up(self, why: str) -> NoReturn:
        """Tells why and ends the process."""
        if not self._quiet:
            self._tell(3, self._line(why, waited=True), follows=True)
        self._end(3)

    def _tell(self, code: int, message: str, follows: bool) -> None:
        """Nothing; tells of the worker's failure, of the first one only."""
        with self._telling:
            if not self._told:
                self._told = True
                tell(Failure(self.rank, self.device, self.lane, code, message, time.time(), follows))

    def _end(self, code: int) -> NoReturn:
        """Ends the process here and now, whatever its other threads do."""
        os._exit(code)


def _end_with_parent() -> None:
    """Nothing; has Linux kill this process when its parent dies, be it stopped or stuck. Elsewhere the thread alone looks."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# --- What the errors of torch mean -----------------------------------------------------------------------------------

_CLOSED = re.compile(r"connection (?:closed|reset)|broken pipe|connection was likely closed|remote process exited", re.IGNORECASE)
_TIMED_OUT_AFTER = re.compile(
    r"(?:timed out waiting|timed out after|timeout after|timeout\(ms\)=)\s*(\d+) ?(ms|s)?", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"timed ?out|timeout", re.IGNORECASE)
_DISTRIBUTED = re.compile(r"gloo|nccl|ProcessGroup|TCPStore|monitoredBarrier", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(
    r"[Tt]ried to allocate ([\d.]+ \w+)(?:.*?total capacity of ([\d.]+ \w+))?(?:.*?which ([\d.]+ \w+) is free)?"
)


def _lost_connection(error: BaseException) -> str | None:
    """What went wrong between this worker and another, in a few words; None where the error is of another sort."""
    text = str(error)
    of_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # by name: not to import torch for it
    of_gloo = isinstance(error, RuntimeError) and _DISTRIBUTED.search(text) is not None  # it raises no kind of its own
    if not (of_torch or of_gloo or isinstance(error, (ConnectionError, TimeoutError))):
        return None
    if _CLOSED.search(text):
        return "connection closed by the peer"
    if "refused" in text.lower():
        return "connection refused by the peer"
    if found := _TIMED_OUT_AFTER.search(text):
        return f"timed out after {float(found[1]) / (1 if found[2] == 's' else 1000):g} s"
    if isinstance(error, TimeoutError) or _TIMED_OUT.search(text):
        return "timed out"
    return _first_line(text) if of_torch else None


def _meaning(error: BaseException) -> str:
    """What an error that concerns this worker alone means, in one line."""
    text = str(error)
    kind = type(error).__name__
    if kind == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in text:
        what = "out of GPU memory" if kind == "OutOfMemoryError" else "out of memory"
        if (found := _OUT_OF_MEMORY.search(text)) is None:
            return what
        room = ", ".join(f"{size} {of}" for size, of in ((found[2], "in all"), (found[3], "free")) if size)
        return f"{what}: tried to allocate {found[1]}" + (f" ({room})" if room else "")
    if isinstance(error, OSError) and error.strerror:
        return (f"{error.filename}: " if error.filename else "") + error.strerror.lower()
    return f"{kind}: {_first_line(text)}" if text.strip() else kind


def _first_line(text: str) -> str:
    """The first line of an error's text, without the place in torch's sources where it came from, and not too long."""
    line = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", text.strip()).split("\n")[0].strip()
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "..."
