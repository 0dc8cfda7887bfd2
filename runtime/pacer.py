"""Waiting until an instruction has taken as long as it does on the device that is emulated."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from runtime.collectives import Pending
from sim.spec.pace import pace_key, ring_key
from sim.spec.program import Compute, OptimizerStep

PR_SET_TIMERSLACK = 29

PRIORITY = 20
"""Of the real-time scheduler, from 1 to 99, the same for all threads of a worker: gloo's thread for its sockets asks for ever for
what another one locks, and at a higher priority would keep that one from its core."""


@dataclass(frozen=True)
class Lateness:
    """How much longer than the pace a worker's own mathematics took: `late_s` in all of `paced_s`, and the worst instruction."""

    paced_s: float = 0.0
    late_s: float = 0.0
    key: str = ""
    """The instruction that was the latest, by its name in a pace file."""
    worst_s: float = 0.0
    """How much it was late."""


class Pacer:
    """Keeps one worker at the pace of its device: seconds by instruction (`sim.spec.pace`).

    An instruction ends when it has taken its pace and the time that it spent in collectives, in which it computes nothing. They
    divide its computation evenly: a rank comes to each when a part of the pace has passed, so that it is the emulated devices,
    and not the mathematics of ranks that share a core, that decide who waits for whom. Exchanges of a ring are beside a part of
    the computation, which they divide evenly among them: only what they take longer is added.
    """

    def __init__(self, seconds: Mapping[str, float], sequence_slices: int = 1) -> None:
        self._seconds, self._sequence_slices = seconds, sequence_slices
        self._key = ""
        self._parts: dict[str, tuple[int, int]] = {}  # of each instruction, as it was divided the last time; and its exchanges
        self._met = self._exchanges = self._exchanged = 0
        self._beside_s = 0.0  # of the pace that exchanges were beside so far
        self._under_way: list[_Counted] = []
        self._begun_s = self._waited_s = self._counted_s = 0.0
        self.forget()

    def go_first(self) -> None:
        """Nothing; has the kernel wake this process's threads on time, before any other work, where it may.

        Called when the training begins. What is emulated rests most of the time, so that little is taken from others.
        """
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError, AttributeError):  # else an end of a rest is put off by up to 50 us, to wake several
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        with contextlib.suppress(OSError):  # only root may
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(PRIORITY))

    def forget(self) -> None:
        """Nothing; counts anew, as after a warm-up."""
        self.lateness = Lateness()

    def begin(self, instruction: Compute | OptimizerStep) -> None:
        """Nothing; an instruction begins."""
        self._key, self._waited_s, self._beside_s = pace_key(instruction, self._sequence_slices), 0.0, 0.0
        self._met = self._exchanges = self._exchanged = 0
        self._begun_s = time.perf_counter()

    def end(self) -> None:
        """Nothing; rests until the instruction that began has taken its time."""
        pace_s, was = self._seconds[self._key], self.lateness
        late_s = max(0.0, -self._rest(pace_s))
        self._parts[self._key] = self._met + 1, self._exchanges
        worst_s, key = max((was.worst_s, was.key), (late_s, self._key))
        self.lateness = Lateness(was.paced_s + pace_s, was.late_s + late_s, key, worst_s)

    def collective(self, begin: Callable[[], Pending]) -> Pending:
        """The work of a collective inside the instruction, which it begins when the part of the pace before it has passed."""
        self._met += 1
        self._rest_here()
        began_s = time.perf_counter()
        self._under_way.append(_Counted(begin(), self, began_s))
        return self._under_way[-1]

    def exchange(self, begin: Callable[[], Pending]) -> Pending:
        """The work of an exchange of a ring, which it begins as a collective; computation goes on beside it."""
        if self._exchanges == self._exchanged:  # else it stands in attention, beside whose blocks another is under way
            self._met += 1
            self._rest_here()
        self._exchanges += 1
        _, exchanges = self._parts.get(self._key, (1, 0))
        beside_s = self._seconds.get(ring_key(self._key), 0.0) / exchanges if exchanges else 0.0
        return _Beside(begin(), self, beside_s)

    def exchanged(self, work: Pending, beside_s: float) -> None:
        """Nothing; waits for an exchange when so much more of the computation has passed, and counts what it takes longer."""
        self._beside_s += beside_s
        self._rest_here()
        self._exchanged += 1
        self.ended(work, time.perf_counter())

    def _rest_here(self) -> None:
        """Nothing; rests until the part of the pace has passed that comes before what is met here.

        Collectives that are under way end first: what passes afterwards would else be counted as theirs.
        """
        for one in list(self._under_way):
            one.wait()
        divided = self._parts.get(self._key)
        if divided is not None and self._key:
            apart_s = self._seconds[self._key] - self._seconds.get(ring_key(self._key), 0.0)
            self._rest(apart_s * min(1.0, self._met / divided[0]) + self._beside_s)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what is done meanwhile as waiting for others."""
        began_s = time.perf_counter()
        yield
        self._count(began_s)

    def ended(self, work: Pending, began_s: float) -> None:
        """Nothing; waits for what began at a moment, and counts its time."""
        work.wait()
        self._count(began_s)
        self._under_way = [one for one in self._under_way if one.work is not work]

    def _count(self, began_s: float) -> None:
        """Nothing; counts the time since a moment, as far as it is not counted yet, as spent in collectives."""
        now_s = time.perf_counter()
        self._waited_s += now_s - max(began_s, self._counted_s)
        self._counted_s = now_s

    def _rest(self, paced_s: float) -> float:
        """Rests until so much of the pace has passed; how long that was, below 0 where it had passed before."""
        rest_s = self._begun_s + paced_s + self._waited_s - time.perf_counter()
        if rest_s > 0:
            time.sleep(rest_s)
        return rest_s


class _Counted:
    """A collective whose time, from its beginning until it is waited for, a pacer counts."""

    def __init__(self, work: Pending, pacer: Pacer, began_s: float) -> None:
        self.work, self._pacer, self._began_s = work, pacer, began_s
        self._ended = False

    def wait(self) -> None:
        """Nothing; returns when the result may be used."""
        if not self._ended:
            self._ended = True
            self._pacer.ended(self.work, self._began_s)


class _Beside:
    """An exchange beside so much of the computation; a pacer counts what it takes longer."""

    def __init__(self, work: Pending, pacer: Pacer, beside_s: float) -> None:
        self._work, self._pacer, self._beside_s = work, pacer, beside_s

    def wait(self) -> None:
        """Nothing; returns when the result may be used."""
        self._pacer.exchanged(self._work, self._beside_s)
