"""Waiting at the pace of an emulated device, with collectives that take their own time."""

from __future__ import annotations

import time

import pytest

from runtime import pacer as module
from runtime.pacer import Pacer
from sim.spec.program import Backward, Forward, OptimizerStep


class Clock:
    """A clock that stands still but for sleep and for what a test passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(module.time, "sleep", self.work)

    def work(self, seconds: float) -> None:
        """Lets time pass."""
        self.now_s += seconds


class Takes:
    """A collective that ends so many seconds after it is waited for."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def wait(self) -> None:
        self._clock.work(self._seconds)


class Since:
    """An exchange that ends at a moment, whether anybody waits for it or not."""

    def __init__(self, clock: Clock, ends_s: float) -> None:
        self._clock, self._ends_s = clock, ends_s

    def wait(self) -> None:
        self._clock.now_s = max(self._clock.now_s, self._ends_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_an_instruction_takes_its_pace(clock: Clock) -> None:
    pacer = Pacer({"Forward 0:2": 0.5, "OptimizerStep": 0.1})
    pacer.begin(Forward(3, (0, 2)))
    clock.work(0.2)
    pacer.end()
    assert clock.now_s == pytest.approx(100.5)
    pacer.begin(OptimizerStep())
    pacer.end()
    assert clock.now_s == pytest.approx(100.6)


def test_collectives_are_added_and_divide_the_computation_evenly(clock: Clock) -> None:
    pacer = Pacer({"Forward 0:2": 0.6})
    begun: list[float] = []

    def forward() -> None:
        pacer.begin(Forward(0, (0, 2)))
        for _ in range(2):
            clock.work(0.01)  # of mathematics
            work = pacer.collective(lambda: begun.append(clock.now_s) or Takes(clock, 0.3))
            work.wait()
        pacer.end()

    forward()  # the first time it does not know yet how many there are
    assert clock.now_s == pytest.approx(100 + 0.6 + 2 * 0.3)
    begun.clear()
    clock.now_s = 200.0
    forward()
    # 0.2 | collective 0.3 | 0.2 | collective 0.3 | 0.2
    assert begun == pytest.approx([200.2, 200.7])
    assert clock.now_s == pytest.approx(201.2)


def test_collectives_under_way_together_are_counted_once(clock: Clock) -> None:
    pacer = Pacer({"Forward 0:2": 1.0})
    pacer.begin(Forward(0, (0, 2)))
    first = pacer.collective(lambda: Takes(clock, 0.4))
    second = pacer.collective(lambda: Takes(clock, 0.1))
    first.wait()
    second.wait()
    pacer.end()
    assert clock.now_s == pytest.approx(101.5)


def test_computation_after_a_collective_has_begun_is_not_counted_as_its_time(clock: Clock) -> None:
    pacer = Pacer({"Backward 0:2": 0.9})

    def backward() -> None:
        pacer.begin(Backward(0, (0, 2)))
        gathered = pacer.collective(lambda: Takes(clock, 0.1))
        summed = pacer.collective(lambda: Takes(clock, 0.2))  # begins a third of the pace later
        gathered.wait()
        summed.wait()
        pacer.end()

    backward()
    clock.now_s = 200.0
    backward()
    assert clock.now_s == pytest.approx(200 + 0.9 + 0.1 + 0.2)


def test_computation_goes_on_beside_the_exchanges_of_a_ring(clock: Clock) -> None:
    pacer = Pacer({"Forward 0:2": 0.9, "Forward 0:2, beside its ring": 0.3})
    begun: list[float] = []

    def forward(takes_s: float) -> None:
        pacer.begin(Forward(0, (0, 2)))
        for _ in range(2):
            work = pacer.exchange(lambda: begun.append(clock.now_s) or Since(clock, clock.now_s + takes_s))
            clock.work(0.01)  # of mathematics
            work.wait()
        pacer.end()

    forward(0.1)  # the first time it does not know yet how many there are
    begun.clear()
    clock.now_s = 200.0
    forward(0.1)
    # 0.2 | 0.15, and the exchange within it | 0.2 | 0.15 | 0.2
    assert begun == pytest.approx([200.2, 200.55])
    assert clock.now_s == pytest.approx(200.9)
    begun.clear()
    clock.now_s = 300.0
    forward(0.25)
    # 0.2 | 0.15 and 0.1 of waiting | 0.2 | 0.15 and 0.1 | 0.2
    assert begun == pytest.approx([300.2, 300.65])
    assert clock.now_s == pytest.approx(301.1)


def test_mathematics_that_takes_longer_than_the_pace_is_told(clock: Clock) -> None:
    pacer = Pacer({"Forward 0:2": 0.5})
    pacer.begin(Forward(0, (0, 2)))
    clock.work(0.7)
    pacer.end()
    assert clock.now_s == pytest.approx(100.7)
    found = pacer.lateness
    assert (found.paced_s, found.late_s, found.key, found.worst_s) == (0.5, pytest.approx(0.2), "Forward 0:2", pytest.approx(0.2))
    pacer.forget()
    assert pacer.lateness.late_s == 0


def test_a_rest_ends_on_time() -> None:
    pacer = Pacer({"OptimizerStep": 0.02})
    began_s = time.perf_counter()
    pacer.begin(OptimizerStep())
    pacer.end()
    assert time.perf_counter() - began_s >= 0.02
