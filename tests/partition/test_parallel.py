"""Work in processes beside this one, where there are cores for it and where there is one."""

from __future__ import annotations

import os
import time

import pytest

from partition import parallel
from partition.parallel import beside, side_by_side


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
