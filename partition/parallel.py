"""Work side by side in forked processes, which begin with all that their parent knows."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar, cast

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")
Thing = TypeVar("Thing")

POLL_S = 0.05

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

    `check` is called now and then; what it raises ends the work, and the processes with it. Arguments and answers are pickled.
    Raises what the function raises, and ChildProcessError where a process died.
    """
    with team(function, len(arguments)) as together:
        yield from together.answers(arguments, check)


class Team(Generic[Argument, Answer]):
    """Processes that answer one round of arguments after the other, and keep what they found out in between.

    Without processes, this one answers.
    """

    def __init__(self, function: Callable[[Argument], Answer], workers: Sequence[Connection]) -> None:
        self._function, self._workers = function, workers

    @property
    def alone(self) -> bool:
        """Whether this process answers."""
        return not self._workers

    def answers(self, arguments: Sequence[Argument], check: Callable[[], None]) -> Iterator[Answer]:
        """As of `side_by_side`. No round is left before its end."""
        if self.alone:
            for argument in arguments:
                check()
                yield self._function(argument)
            return
        answers: dict[int, tuple[Answer, Exception | None]] = {}
        left = iter(enumerate(arguments))
        for worker, task in zip(self._workers, left):  # noqa: B905 - as many as there are
            worker.send(task)
        for i in range(len(arguments)):
            while i not in answers:
                _take(answers, self._workers, left)
                check()
            yield _answered(*answers.pop(i))


@contextmanager
def team(function: Callable[[Argument], Answer], most: int) -> Iterator[Team[Argument, Answer]]:
    """As many processes as there are cores, but no more than `most`; they end with this. Arguments and answers are pickled."""
    count = min(cores(), most)
    if count <= 1:
        yield Team(function, [])
    else:
        with _workers(function, count) as workers:
            yield Team(function, workers)


def beside(function: Callable[[], Answer], own: Callable[[], None], check: Callable[[], None]) -> Answer:
    """What a function returns, found in a process of its own where that is possible, while this one does `own`.

    `check`, answers and errors are as of `side_by_side`.
    """
    if cores() <= 1:
        found = function()
        own()
        return found
    with _workers(lambda _: function(), 1) as workers:
        workers[0].send((0, None))
        own()
        answers: dict[int, tuple[Answer, Exception | None]] = {}
        while not answers:
            _take(answers, workers, iter(()))
            check()
        return _answered(*answers[0])


def _answered(answer: Answer, raised: Exception | None) -> Answer:
    """The answer. Raises what was raised in its place."""
    if raised is not None:
        raise raised
    return answer


def _take(
    answers: dict[int, tuple[Any, Exception | None]], workers: Sequence[Connection], left: Iterator[tuple[int, Any]]
) -> None:
    """Waits a moment for answers, or what was raised in their places; who gave one has the next argument."""
    for ready in wait(workers, POLL_S):
        worker = cast(Connection, ready)
        try:
            number, answer, raised = worker.recv()
        except (EOFError, OSError):
            raise ChildProcessError("a process beside this one died, perhaps because memory ran out") from None
        answers[number] = answer, raised
        following = next(left, None)
        if following is not None:
            worker.send(following)


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
    came: list[int] = []
    # The mask is for the processes, and of this thread alone: where there are others (of BLAS), one of them takes the signal, and
    # Python hands it to the main thread.
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _workers(function: Callable[[Any], Any], count: int) -> Iterator[list[Connection]]:
    """Connections to so many forked processes, which end with this, whatever they are at.

    Each is sent a number and an argument, and sends that number, the answer and None back, or None and what the function raised.
    They share nothing with one another: a process that is ended while it holds a lock, as those of `multiprocessing.Pool` are,
    would have all others wait for ever. Ctrl-C reaches all processes of a terminal; their parent answers it.
    """
    context = multiprocessing.get_context("fork")
    ours: list[Connection] = []
    started: list[BaseProcess] = []
    try:
        with interrupts_held():
            for _ in range(count):
                own, theirs = context.Pipe()
                ours.append(own)
                started.append(context.Process(target=_serve, args=(function, theirs, ours), daemon=True))
                started[-1].start()
                theirs.close()
        yield ours
    finally:
        for process in started:
            if process.pid is not None:  # Ctrl-C came before the last one began
                process.kill()
                process.join()
        for own in ours:
            own.close()


def _serve(function: Callable[[Any], Any], parent: Connection, others: Sequence[Connection]) -> None:
    """What a process beside does until its parent, or this, ends."""
    for other in others:  # or it would not notice that its parent is gone
        other.close()
    # What it begins with is no garbage: to look for some in it would take a tenth of a second, and memory of its own.
    gc.freeze()
    with suppress(EOFError, OSError):
        while True:
            number, argument = parent.recv()
            answer, raised = None, None
            try:
                answer = function(argument)
            except Exception as error:
                error.add_note(f"in a process beside:\n{traceback.format_exc()}")
                raised = error
            parent.send((number, answer, raised))
