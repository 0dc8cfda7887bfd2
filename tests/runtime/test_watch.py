"""The watchdog: what it says of errors, and what it ends. Processes that must end are real ones."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.watch import FAILURES, LAUNCHER, TRACEBACK, Failure, TrainingFailed, Watch, read_failures
from sim.spec.program import Forward, RecvActivation
from sim.spec.reading import InputError
from tests.runtime.processes import is_running, wait_until

ROOT = Path(__file__).parents[2]
RECEIVE = RecvActivation(3, 2, "p0s0", (0, 1))


def watch(**changes: float) -> Watch:
    made = Watch(1, "a100/1", "p0s1", timeout_s=changes.get("timeout_s", 60.0))
    made.phase = "training"
    made.step = 3
    return made


# --- What it says ----------------------------------------------------------------------------------------------------

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
TEXTS: list[tuple[Exception, str]] = [
    (
        RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:44204. This is typically caused by a crash."),
        "connection closed by the peer",
    ),
    (RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:1225: Connection reset by peer."), "connection closed by the peer"),
    (
        RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"),
        "timed out after 3 s",
    ),
    (RuntimeError(f"{GLOO}pair.cc:200] Application timeout caused pair closure"), "timed out"),
    (torch.distributed.DistStoreError("wait timeout after 1500ms, keys: /default_pg/0//x"), "timed out after 1.5 s"),
    (torch.distributed.DistStoreError("Timed out after 4 seconds waiting for clients. 1/2 joined."), "timed out after 4 s"),
    (
        torch.distributed.DistBackendError(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=60000) ran"
        ),
        "timed out after 60 s",
    ),
    (
        torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error, NCCL version 2.27"),
        "connection closed by the peer",
    ),
    (torch.distributed.DistNetworkError("The server has failed to listen.\nmore"), "The server has failed to listen."),
    (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "connection refused by the peer"),
    (TimeoutError(), "timed out"),
]


@pytest.mark.parametrize(("error", "meaning"), TEXTS)
def test_a_lost_peer_is_told_with_the_instruction_that_waited_for_it(error: Exception, meaning: str) -> None:
    told = watch()
    told.enter(RECEIVE, "p0s0 (a100/0)")
    assert told.explain(error) == f"a100/1 (lane p0s1, step 4): waited in RA3@2<p0s0[0:1] for lane p0s0 (a100/0): {meaning}"


OWN: list[tuple[Exception, str]] = [
    (
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3.10 GiB is "
            "free. Process 1 has 136.70 GiB memory in use."
        ),
        "out of GPU memory: tried to allocate 20.00 GiB (139.80 GiB in all, 3.10 GiB free)",
    ),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 96 bytes"
        ),
        "out of memory: tried to allocate 96 bytes",
    ),
    (MemoryError(), "out of memory"),
    (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x: no space left on device"),
    (KeyError("x"), "KeyError: 'x'"),
    (RuntimeError("shape '[2]' is invalid\nfor input"), "RuntimeError: shape '[2]' is invalid"),
    (RuntimeError("the step could not be restored in time"), "RuntimeError: the step could not be restored in time"),
    (ValueError("x" * 1000), f"ValueError: {'x' * 300}..."),
    (ValueError(), "ValueError"),
]


@pytest.mark.parametrize(("error", "meaning"), OWN)
def test_an_error_of_its_own_is_told_with_what_the_worker_did(error: Exception, meaning: str) -> None:
    told = watch()
    told.enter(Forward(3, (0, 8)))
    assert told.explain(error) == f"a100/1 (lane p0s1, step 4): in F3[0:8]: {meaning}"
    told.enter(RECEIVE, "p0s0 (a100/0)")  # the peer is not to blame for it
    assert told.explain(error) == f"a100/1 (lane p0s1, step 4): in RA3@2<p0s0[0:1]: {meaning}"
    told.phase = "saving the checkpoint of step 4"
    assert told.explain(error) == f"a100/1 (lane p0s1, step 4), while saving the checkpoint of step 4: {meaning}"


def test_the_error_of_the_gpu_allocator_has_the_words_that_are_looked_for() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    told = watch().explain(error.value)
    assert "out of GPU memory: tried to allocate 32768.00 GiB (" in told and told.endswith("free)")


def test_the_error_of_the_cpu_allocator_has_the_words_that_are_looked_for() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert watch().explain(error.value).endswith(f": out of memory: tried to allocate {2**60} bytes")


def test_before_the_first_step_no_step_is_told_and_after_the_last_instruction_none() -> None:
    told = Watch(0, "a100/0", "p0s0", 60.0)
    assert told.explain(KeyError("x")) == "a100/0 (lane p0s0), while starting: KeyError: 'x'"
    told.phase = "training"
    told.step = 0
    told.enter(Forward(0, (0, 1)))
    told.leave()
    assert told.explain(KeyError("x")) == "a100/0 (lane p0s0, step 1), while training: KeyError: 'x'"


@pytest.mark.parametrize("error", [InputError, TrainingFailed])
def test_what_all_workers_find_alike_is_told_as_it_is(error: type[Exception]) -> None:
    assert watch().explain(error("data.bin: holds no tokens")) == "data.bin: holds no tokens"


# --- Where it says it ------------------------------------------------------------------------------------------------

CODES: list[tuple[BaseException, int, bool]] = [
    (InputError("wrong"), 2, False),
    (OSError(errno.ENOSPC, "No space left on device"), 3, False),
    (KeyError("x"), 3, False),
    (TrainingFailed("the loss of step 4 is nan"), 3, False),
    (TEXTS[0][0], 3, True),
    (TEXTS[4][0], 3, True),
    (TimeoutError(), 3, True),
]


@pytest.mark.parametrize(("error", "code", "follows"), CODES)
def test_a_failure_is_left_in_the_folder_of_the_launching_process(
    error: Exception, code: int, follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAILURES, str(tmp_path))
    before_s = time.time()
    told = watch()
    assert told.tell(error) == code
    (left,) = read_failures(tmp_path)
    assert before_s <= left.time_s <= time.time()
    assert left == Failure(1, "a100/1", "p0s1", code, told.explain(error), left.time_s, follows)
    assert capfd.readouterr() == ("", "")


def test_only_the_first_failure_of_a_worker_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILURES, str(tmp_path))
    told = watch()
    told.tell(InputError("first"))
    told.tell(InputError("second"))
    assert [failure.message for failure in read_failures(tmp_path)] == ["first"]


def test_failures_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    for rank, time_s in ((0, 3.0), (1, 1.0), (2, 2.0)):
        failure = {"rank": rank, "device": "", "lane": "", "code": 3, "message": "", "time_s": time_s, "follows": True}
        (tmp_path / f"{rank}.json").write_text(json.dumps(failure))
    (tmp_path / ".2.json.half").write_text('{"rank"')
    assert [failure.rank for failure in read_failures(tmp_path)] == [1, 2, 0]


@pytest.mark.parametrize("folder", [None, "missing"])
def test_where_no_folder_takes_it_the_failure_is_printed(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FAILURES, raising=False)
    if folder is not None:
        (tmp_path / "file").touch()
        monkeypatch.setenv(FAILURES, str(tmp_path / "file"))
    assert watch().tell(KeyError("x")) == 3
    assert capfd.readouterr().err == "motley: error: a100/1 (lane p0s1, step 4), while training: KeyError: 'x'\n"


def test_an_interruption_is_not_told_and_a_traceback_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert watch().tell(KeyboardInterrupt()) == 130
    assert capfd.readouterr().err == ""
    monkeypatch.setenv(TRACEBACK, "1")
    watch().tell(KeyError("x"))
    assert capfd.readouterr().err.splitlines()[0] == "KeyError: 'x'"


# --- What it ends ----------------------------------------------------------------------------------------------------

HEAD = """
import ctypes, os, signal, subprocess, sys, time
from runtime import watch as module
from sim.spec.program import Forward, RecvActivation
module.GRACE_S = 0.1
watch = module.Watch(1, "a100/1", "p0s1", timeout_s=0.2, alone="alone" in sys.argv)
watch.phase = "training"
watch.step = 3

def block(seconds=60.0):
    # Outside of Python, so that no handler of a signal runs before it comes back.
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ctypes.CDLL(None).usleep(ctypes.c_uint(int(min(seconds, 0.9) * 1e6)))
"""
"""What the worker processes of these tests begin with. Their watch gives up after 0.2 s + 0.1 s."""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    yield made
    made.close()


class Process:
    """A Python process that runs a text after HEAD and says 'ready' when it has come to its blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self, text: str, *arguments: str, **variables: str) -> None:
        script = self._folder / "worker.py"
        script.write_text(HEAD + textwrap.dedent(text))
        environment = {name: value for name, value in os.environ.items() if name not in (FAILURES, LAUNCHER, TRACEBACK)}
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        )

    @property
    def running(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def line(self) -> str:
        """The next line of its output."""
        assert self.running.stdout is not None
        return self.running.stdout.readline().strip()

    def ended(self) -> tuple[int, str]:
        """Its exit code and its errors, when it has ended by itself."""
        _, errors = self.running.communicate(timeout=240)
        return self.running.returncode, errors

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def test_a_worker_that_waits_longer_than_the_timeout_ends(process: Process) -> None:
    process.start("""
        watch.start()
        watch.enter(RecvActivation(3, 2, "p0s0", (0, 1)), "p0s0 (a100/0)")
        block()
    """)
    code, errors = process.ended()
    assert code == 3
    waited = "motley: error: a100/1 (lane p0s1, step 4): waited in RA3@2<p0s0[0:1] for lane p0s0 (a100/0): no end after "
    found = re.fullmatch(re.escape(waited) + r"([\d.]+) s\n", errors)
    assert found is not None and 0.3 <= float(found[1]) < 5


def test_a_worker_that_computes_for_ever_ends_unless_it_is_alone(process: Process) -> None:
    text = """
        watch.start()
        watch.enter(Forward(0, (0, 2)))
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
    """
    process.start(text)
    code, errors = process.ended()
    assert code == 3 and errors.startswith("motley: error: a100/1 (lane p0s1, step 4): in F0[0:2]: no end after ")
    process.start(text, "alone")
    assert process.ended() == (0, "")


def test_what_goes_on_outside_of_instructions_may_last(process: Process) -> None:
    process.start("""
        watch.start()
        watch.enter(Forward(0, (0, 2)))
        watch.phase = "saving"
        block(0.6)
        watch.enter(Forward(0, (0, 2)))
        watch.leave()
        block(0.6)
    """)
    assert process.ended() == (0, "")


def test_every_instruction_has_the_whole_timeout(process: Process) -> None:
    process.start("""
        watch.start()
        for micro_batch in range(20):
            watch.enter(Forward(micro_batch, (0, 2)))
            block(0.1)
    """)
    assert process.ended() == (0, "")


def test_a_worker_that_is_told_to_end_tells_what_it_waited_for(process: Process) -> None:
    process.start("""
        watch.timeout_s = 100
        watch.start()
        watch.enter(RecvActivation(3, 2, "p0s0", (0, 1)), "p0s0 (a100/0)")
        print("ready", flush=True)
        block()
    """)
    assert process.line() == "ready"
    process.running.send_signal(signal.SIGTERM)
    code, errors = process.ended()
    assert code == 3
    assert errors.startswith(
        "motley: error: a100/1 (lane p0s1, step 4): waited in RA3@2<p0s0[0:1] for lane p0s0 (a100/0): was told to end after "
    )


def test_an_interrupted_worker_ends_quietly(process: Process) -> None:
    process.start("""
        watch.timeout_s = 100
        watch.start()
        print("ready", flush=True)
        block()
    """)
    assert process.line() == "ready"
    process.running.send_signal(signal.SIGINT)
    assert process.ended() == (130, "")


@pytest.mark.parametrize(("error", "code"), [("module.InputError('no')", 2), ("KeyError('x')", 3), ("KeyboardInterrupt", 130)])
def test_guarded_work_that_fails_ends_the_process_whatever_else_it_does(process: Process, error: str, code: int) -> None:
    process.start(f"""
        import threading
        threading.Thread(target=block).start()  # a thread that Python would wait for
        def work():
            print("working")
            raise {error}
        module.FIRST_TELLS_S = 0.0
        watch.start()
        watch.guard(work)
    """)
    assert process.line() == "working"
    assert process.ended()[0] == code


def test_a_mistake_that_all_find_is_printed_by_the_first_worker_alone(process: Process) -> None:
    text = """
        import threading
        def ready():
            while not watch._quiet:  # it waits for the first one, which is not as soon as it has raised
                time.sleep(0.01)
            print("ready", flush=True)
        def work():
            threading.Thread(target=ready, daemon=True).start()
            raise module.InputError("no such file")
        watch.rank = int(os.environ["RANK"])
        watch.start()
        watch.guard(work)
    """
    process.start(text, RANK="0")
    assert process.ended() == (2, "motley: error: no such file\n")
    process.start(text, RANK="1")
    assert process.line() == "ready"
    process.running.send_signal(signal.SIGTERM)  # as torchrun does, once the first has ended
    assert process.ended() == (3, "")


PARENT = """
    if "child" in sys.argv:
        if "unaided" in sys.argv:
            module._end_with_parent = lambda: None
        watch.timeout_s = 100
        watch.start()
        print(os.getpid(), flush=True)
        block()
    else:
        subprocess.Popen([sys.executable, __file__, "child", *sys.argv[1:]])
        block()
"""


@pytest.mark.parametrize("aid", ["unaided", "aided"])
def test_a_worker_ends_when_the_process_that_started_it_is_killed(process: Process, aid: str) -> None:
    process.start(PARENT, aid)
    child = int(process.line())
    process.running.kill()
    wait_until(lambda: not is_running(child))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a stopped process when its parent dies")
def test_even_a_stopped_worker_ends_with_the_process_that_started_it(process: Process) -> None:
    process.start(PARENT, "aided")
    child = int(process.line())
    os.kill(child, signal.SIGSTOP)
    process.running.kill()
    wait_until(lambda: not is_running(child))


def test_a_worker_whose_launching_process_went_before_its_watch_began_ends(process: Process) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process.start(
        """
        module._end_with_parent = lambda: None
        watch.timeout_s = 100
        watch.start()
        block()
        """,
        **{LAUNCHER: str(gone.pid)},
    )
    code, errors = process.ended()
    assert code == 3 and errors.endswith(", while training: the process that started the workers has gone\n")
