"""Many independent pieces of work in as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from partition.parallel import interrupts_held

Task = TypeVar("Task")
Done = TypeVar("Done")

BATCH = 8
"""How many tasks go to a process together at most."""

ORPHAN_POLL_S = 0.5
"""How often a worker process looks whether its parent is still there."""

_stop: Any = None
"""In a worker process: the event that the parent sets when it is interrupted."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with(parent: int) -> None:
    """Nothing; this process ends soon after its parent, however that ended: nobody would wait for its work any more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def check_interrupt(*_: object) -> None:
    """Nothing, or KeyboardInterrupt where the parent of this worker process was interrupted. Ignores its arguments."""
    if _stop is not None and _stop.is_set():
        raise KeyboardInterrupt


def in_processes(
    function: Callable[[Task], Done],
    tasks: Sequence[Task],
    processes: int | None = None,
    progress: Callable[[], None] | None = None,
    interrupted_within: Callable[[Done], bool] | None = None,
    batch: Callable[[Task], Hashable] | None = None,
) -> tuple[list[Done | None], bool]:
    """What the function returned for each task, in their order, and whether Ctrl-C ended the work early.

    Tasks that follow one another and have the same `batch` go to one process, BATCH of them at a time, so that what one leaves
    in memory serves the next; those of which it is None go alone.

    After an interrupt, tasks under way end as soon as they ask `check_interrupt`; what was not done is None. Function, tasks
    and results must be picklable. With one process the work is done in this one; `interrupted_within` then tells of a result
    whether the task itself answered Ctrl-C. Raises what the function raises, and ChildProcessError where a process died.
    """
    processes = min(len(tasks), processes or cores())
    results: list[Done | None] = [None] * len(tasks)
    if processes <= 1:
        return results, _in_this_process(function, tasks, results, progress, interrupted_within)
    # Forking beside other threads (the progress display, BLAS) can hang; spawned processes start clean on every system.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    interrupted = False
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin_worker, initargs=(stop, os.getpid())) as pool:
        places: dict[Future[list[Done | None]], list[int]] = {}
        try:
            with interrupts_held():  # the first tasks start the processes
                for part in _batches(tasks, batch):
                    places[pool.submit(_each, function, [tasks[i] for i in part])] = part
            for future in as_completed(places):
                for i, result in zip(places[future], future.result(), strict=True):
                    results[i] = result
                    if progress is not None:
                        progress()
        except KeyboardInterrupt:
            interrupted = True
            _end(pool, stop)
            for future, part in places.items():
                if future.done() and not future.cancelled() and future.exception() is None:
                    for i, result in zip(part, future.result(), strict=True):
                        results[i] = result
        except BrokenProcessPool:
            raise ChildProcessError("a worker process died, perhaps because memory ran out") from None
        except BaseException:
            _end(pool, stop)
            raise
    return results, interrupted


def _batches(tasks: Sequence[Task], batch: Callable[[Task], Hashable] | None) -> list[list[int]]:
    """The tasks, by number, that go to a process together."""
    found: list[list[int]] = []
    latest: Hashable = None
    for i, task in enumerate(tasks):
        key = None if batch is None else batch(task)
        if key is None or key != latest or len(found[-1]) == BATCH:
            found.append([])
        found[-1].append(i)
        latest = key
    return found


def _end(pool: ProcessPoolExecutor, stop: Any) -> None:
    """Has all tasks end. Further interrupts say nothing new: one between the event's lock and its release would lock out the
    workers, and both sides would wait for ever."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if here else None
    try:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    finally:
        if here:
            signal.signal(signal.SIGINT, before)


def _in_this_process(
    function: Callable[[Task], Done],
    tasks: Sequence[Task],
    results: list[Done | None],
    progress: Callable[[], None] | None,
    interrupted_within: Callable[[Done], bool] | None,
) -> bool:
    """Whether Ctrl-C ended the work; fills in the results."""
    try:
        for i, task in enumerate(tasks):
            result = results[i] = function(task)
            if progress is not None:
                progress()
            if interrupted_within is not None and interrupted_within(result):
                return True
    except KeyboardInterrupt:
        return True
    return False


def _begin_worker(stop: Any, parent: int) -> None:
    """Prepares a worker process: Ctrl-C reaches all processes of a terminal, and the parent alone answers it."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)


def _each(function: Callable[[Task], Done], tasks: Sequence[Task]) -> list[Done | None]:
    """What the function returns for each task."""
    return [_one(function, task) for task in tasks]


def _one(function: Callable[[Task], Done], task: Task) -> Done | None:
    """What the function returns, or None where the work was interrupted before or within it."""
    try:
        check_interrupt()
        return function(task)
    except KeyboardInterrupt:
        return None
