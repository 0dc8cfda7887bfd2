"""Work side by side in forked processes, which begin with all that their parent knows."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import Pool
from typing import Any, Generic, TypeVar

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")
Thing = TypeVar("Thing")

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
        with _pool(count) as pool:
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
        with _pool(1) as pool:
            waiting = pool.apply_async(_answer, (0,))
            own()
            while not waiting.ready():
                waiting.wait(POLL_S)
                check()
            answer: Answer = waiting.get()
            return answer
    finally:
        _work.pop()


class News(Generic[Thing]):
    """What processes beside this one tell it while they work, in the order in which it comes.

    It is made before them. They `tell`; this process hears it by `hear`, which is for the `check` of `side_by_side`.
    """

    def __init__(self, take: Callable[[Thing], object]) -> None:
        """`take` is called in this process with all that is told, at once where this process tells it itself."""
        self._take, self._process = take, os.getpid()
        self._told = multiprocessing.get_context("fork").SimpleQueue() if cores() > 1 else None

    def tell(self, thing: Thing) -> None:
        """Nothing; the process that made this takes the thing."""
        if os.getpid() == self._process or self._told is None:
            self._take(thing)
        else:
            self._told.put(thing)

    def hear(self) -> None:
        """Nothing; takes what has been told and not heard yet."""
        while self._told is not None and not self._told.empty():
            self._take(self._told.get())


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Has Ctrl-C wait for the end of this. Processes that are started meanwhile never hear of it, not even as they begin."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _pool(count: int) -> Iterator[Pool]:
    """So many forked processes, which end with this. Ctrl-C reaches all processes of a terminal; their parent answers it.

    What they begin with is no garbage: to look for some in it would take each of them a tenth of a second, and memory of its own.
    """
    with ExitStack() as ends:
        with interrupts_held():
            pool = ends.enter_context(multiprocessing.get_context("fork").Pool(count, gc.freeze))
        yield pool


def _answer(i: int) -> Any:
    function, arguments = _work[-1]
    return function(arguments[i])
