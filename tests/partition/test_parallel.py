"""Work in processes beside this one, where there are cores for it and where there is one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from partition import parallel
from partition.parallel import beside, side_by_side, team


@pytest.fixture(autouse=True)
def _all_processes_end() -> Iterator[None]:
    """No process that a test begins outlives it; workers of the runtime's tests may be alive beside."""
    others = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= others


def nothing() -> None: ...


class Ended(Exception):
    """What a check raises."""


def end() -> None:
    raise Ended


@pytest.mark.parametrize("cores", [1, 2])
def test_both_are_done_and_the_answer_is_that_of_the_function(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: cores)
    own: list[int] = []
    found = beside(os.getpid, lambda: own.append(os.getpid()), nothing)
    assert own == [os.getpid()]
    assert (found == os.getpid()) == (cores == 1)


def test_a_check_that_raises_ends_the_process_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    began = time.monotonic()
    with pytest.raises(Ended):
        beside(lambda: time.sleep(60), nothing, end)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("cores", [1, 3])
def test_answers_come_in_the_order_of_their_arguments(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: cores)
    assert list(side_by_side(lambda n: n * n, range(7), nothing)) == [n * n for n in range(7)]


@pytest.mark.parametrize("cores", [1, 2])
def test_what_processes_tell_is_heard_before_they_answer(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: cores)
    heard: list[tuple[int, int]] = []
    news = parallel.News[tuple[int, int]](heard.append)

    def work(n: int) -> bool:
        for i in range(3):
            news.tell((n, i))
        return cores == 1 or heard_all[n].wait(60)

    heard_all = [multiprocessing.get_context("fork").Event() for _ in range(2)]

    def check() -> None:
        news.hear()
        for n, event in enumerate(heard_all):
            if (n, 2) in heard:
                event.set()

    assert list(side_by_side(work, range(2), check)) == [True, True]
    assert [[i for n, i in heard if n == own] for own in range(2)] == [[0, 1, 2], [0, 1, 2]]


def test_news_larger_than_a_pipe_holds_are_heard_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    heard: list[bytes] = []
    news = parallel.News[bytes](heard.append)
    large = [bytes([n]) * 1_000_000 for n in range(2)]
    list(side_by_side(lambda n: news.tell(large[n]), range(2), news.hear))
    assert sorted(heard) == large


@pytest.mark.parametrize("cores", [1, 2])
def test_what_the_function_raises_is_raised_here(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: cores)

    def work(n: int) -> int:
        if n == 2:
            raise Ended("no")
        return n

    answers = side_by_side(work, range(4), nothing)
    assert [next(answers), next(answers)] == [0, 1]
    with pytest.raises(Ended, match="no"):
        list(answers)


def test_a_process_that_dies_is_told_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)

    def work(n: int) -> None:
        if n == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(ChildProcessError, match="a process beside this one died"):
        list(side_by_side(work, range(3), nothing))


@pytest.mark.parametrize("rounds", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_processes_that_are_ended_while_they_answer_keep_nobody_waiting(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 3)
    large = bytes(3_000_000)  # more than a pipe holds: they are ended in the middle of it
    for _ in range(rounds):
        answers = side_by_side(lambda _: large, range(6), nothing)
        assert next(answers) == large
        answers.close()  # type: ignore[attr-defined]  # it is a generator


SCRIPT = """
import multiprocessing, os, signal, time
from partition import parallel

parallel.cores = lambda: 2

def interrupt():  # as a terminal does: all processes of the group, those that have only begun too
    os.killpg(0, signal.SIGINT)

try:
    parallel.beside(lambda: time.sleep(60), interrupt, print)
except KeyboardInterrupt:
    print("interrupted", multiprocessing.active_children())
"""


def test_ctrl_c_ends_processes_that_say_nothing() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which shells have ignored in the background
        timeout=240,
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "interrupted []\n", "")


def test_a_team_keeps_what_it_found_out_from_one_round_to_the_next() -> None:
    met: dict[int, list[int]] = {}

    def remembered(number: int) -> tuple[int, list[int]]:
        met.setdefault(os.getpid(), []).append(number)
        return os.getpid(), met[os.getpid()]

    with team(remembered, 2) as together:
        first, second = (list(together.answers(numbers, nothing)) for numbers in (range(4), range(4, 9)))
    assert sorted(number for _, own in dict([*first, *second]).items() for number in own) == list(range(9))
    assert {pid for pid, _ in first} == {pid for pid, _ in second}
