"""Work side by side in forked processes, which begin with all that their parent knows."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")

POLL_S = 0.05

_work: list[tuple[Callable[[Any], Any], Sequence[Any]]] = []
"""What the next children are forked for; they find it in their copy of the memory, so that it need not be pickled."""


_alone: list[bool] = []
"""Not empty in a process that is one of several which work side by side already."""


def stay_alone() -> None:
    """Nothing; from now on this process works by itself, because others of its kind have the other cores."""
    _alone.append(True)


def can_fork() -> bool:
    """Whether this process may have others beside it."""
    forks = "fork" in multiprocessing.get_all_start_methods()
    return forks and not _alone and not multiprocessing.current_process().daemon


def cores() -> int:
    """How many processes work side by side here: one where the system cannot fork, and in a process that is one of several."""
    if not can_fork() or multiprocessing.parent_process() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(
    function: Callable[[Argument], Answer], arguments: Sequence[Argument], check: Callable[[], None]
) -> Iterator[Answer]:
    """The function's answers to all arguments, in their order, found in parallel processes where that is possible.

    `check` is called now and then; what it raises ends the work, and the processes with it. Answers are pickled.
    """
    count = min(cores(), len(arguments))
    if count <= 1:
        for argument in arguments:
            check()
            yield function(argument)
        return
    _work.append((function, arguments))
    try:
        with multiprocessing.get_context("fork").Pool(count, _leave_interrupts) as pool:
            waiting = [pool.apply_async(_answer, (i,)) for i in range(len(arguments))]
            for one in waiting:
                while not one.ready():
                    one.wait(POLL_S)
                    check()
                yield one.get()
    finally:
        _work.pop()


def beside(function: Callable[[], Answer], own: Callable[[], None], check: Callable[[], None]) -> Answer:
    """What a function returns, found in a process of its own where that is possible, while this one does `own`.

    `check` and answers are as of `side_by_side`.
    """
    if cores() <= 1:
        found = function()
        own()
        return found
    _work.append((lambda _: function(), [None]))
    try:
        with multiprocessing.get_context("fork").Pool(1, _leave_interrupts) as pool:
            waiting = pool.apply_async(_answer, (0,))
            own()
            while not waiting.ready():
                waiting.wait(POLL_S)
                check()
            answer: Answer = waiting.get()
            return answer
    finally:
        _work.pop()


def _leave_interrupts() -> None:
    """Leaves Ctrl-C to the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer(i: int) -> Any:
    function, arguments = _work[-1]
    return function(arguments[i])
