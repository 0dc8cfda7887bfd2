"""Where the runs of a sweep are executed: in this process, in several on this machine, or on a Ray cluster. By joblib.

Whichever it is, tasks begin in their order, one at a time in each process, and what is done is handed over as soon as it is.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from experiments.parallel import cores, end_with
from partition.parallel import interrupts_held
from sim.spec.reading import InputError

Task = TypeVar("Task")
Done = TypeVar("Done")

RAY = "ray://"
_RAY_PATIENCE_S = {"RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "2", "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "2"}
"""Ray tries three times, each time waiting so long."""


@dataclass(frozen=True)
class Died:
    """What is known of a task whose process ended before the task did."""

    why: str
    seconds: float


@dataclass(frozen=True)
class Workers:
    """Processes that work on tasks: `processes` at most (None: one per core), here or `on` a Ray cluster."""

    processes: int | None = None
    on: str | None = None

    def __post_init__(self) -> None:
        if self.on is not None:
            host, _, port = self.on.removeprefix(RAY).rpartition(":")
            if not self.on.startswith(RAY) or not host or not port.isdecimal():
                raise InputError(f"--on: expected ray://HOST:PORT, such as ray://head:10001, but got {self.on!r}")
            if find_spec("ray") is None:
                raise InputError(f"--on: {self.on} needs Ray: pip install 'motley[ray]'")

    def work(self, function: Callable[[Task], Done], tasks: Sequence[Task]) -> Generator[tuple[Task, Done | Died], None, None]:
        """Each task with what the function returned for it, in the order they are done.

        Function, tasks and results must be picklable. A task that ends its process is `Died`; on Ray that ends the work with
        ChildProcessError. Raises what the function raises, and InputError where the Ray cluster does not answer.
        """
        processes = min(len(tasks), self.processes or cores())
        if not tasks:
            return
        if self.on is not None:
            yield from self._on_ray(function, tasks, self.on)
        elif processes == 1:
            yield from ((task, function(task)) for task in tasks)
        else:
            yield from _here(function, tasks, processes)

    def _on_ray(self, function: Callable[[Task], Done], tasks: Sequence[Task], address: str) -> Iterator[tuple[Task, Done]]:
        with _ray(address) as there:
            processes = max(2, min(len(tasks), self.processes or there))  # joblib would take one to be this one
            options = {"num_cpus": min(1.0, there / processes)}
            for i, done in _in_parallel(function, tasks, "ray", processes, ray_remote_args=options):
                yield tasks[i], done


def _in_parallel(
    function: Callable[[Task], Done], tasks: Sequence[Task], backend: str, processes: int, **options: Any
) -> Iterator[tuple[int, Done]]:
    """The place of each task with what the function returned for it, in the order they are done."""
    from joblib import Parallel, delayed, parallel_config  # takes long to import
    from joblib.externals.loky.backend import resource_tracker as resource_tracker_of_joblib

    # A process that has come to keep 300 MB more than after its first task is ended, and another one begins: nothing is lost.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor", UserWarning)
    with parallel_config(backend, n_jobs=processes, **options):
        # One task a batch: what is done in a batch would be lost with it, and a task takes long enough.
        pool = Parallel(return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs", max_nbytes=None)
        # Processes of their own, which Python starts with the first one else, and lets Ctrl-C through afterwards.
        with _quiet_trackers():
            resource_tracker.ensure_running()
            resource_tracker_of_joblib.ensure_running()
        work: Generator[tuple[int, Done], None, None] | None = None
        try:
            # Here the first processes are started; those of a Ray cluster, which may take their time, are not of this terminal.
            with interrupts_held() if backend == "loky" else nullcontext():
                work = pool(delayed(_numbered)(function, i, task) for i, task in enumerate(tasks))
            for each in work:  # noqa: UP028 - `yield from` would close it before what follows
                yield each
        finally:
            if work is not None:  # it gives out tasks for as long as it is open, even to processes that have ended
                with _ending():
                    work.close()


@contextmanager
def _quiet_trackers() -> Iterator[None]:
    """While the processes begin that clean up after others: what ended ones left is nothing that a user has to know."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker:UserWarning"]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextmanager
def _ending() -> Iterator[None]:
    """While processes are ended: further interrupts say nothing new, and neither does joblib of tasks that are not done."""
    told = threading.excepthook

    def tell(failure: threading.ExceptHookArgs) -> None:
        if failure.thread is None or failure.thread.name != "ExecutorManagerThread":  # which looks for tasks taken from it
            told(failure)

    threading.excepthook = tell
    try:
        with interrupts_held(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        threading.excepthook = told


def _numbered(function: Callable[[Task], Done], i: int, task: Task) -> tuple[int, Done]:
    return i, function(task)


# --- On this machine -------------------------------------------------------------------------------------------------


def _here(function: Callable[[Task], Done], tasks: Sequence[Task], processes: int) -> Iterator[tuple[Task, Done | Died]]:
    """As `Workers.work`. After a process has died, the tasks that may have been its last are done one by one, to know which."""
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    left, suspects = dict(enumerate(tasks)), 0
    options = {"initializer": _begin_worker, "initargs": (os.getpid(),)}
    try:
        while left:
            chosen = list(left)[:1] if suspects else list(left)
            began = time.perf_counter()
            try:
                # Two processes at least, for joblib would take one to be this one.
                for at, done in _in_parallel(function, [left[i] for i in chosen], "loky", max(2, processes), **options):
                    yield left.pop(chosen[at]), done
                suspects = max(0, suspects - 1)
            except TerminatedWorkerError:
                if len(chosen) > 1:
                    suspects = 3 * processes  # so many are given out at most
                else:
                    yield left.pop(chosen[0]), Died("killed, perhaps because memory ran out", time.perf_counter() - began)
                    suspects -= 1
    finally:
        with _ending():
            get_reusable_executor().shutdown(wait=True, kill_workers=True)


def _begin_worker(parent: int) -> None:
    """Prepares a process on this machine: Ctrl-C is answered by its parent alone, and it ends when its parent has been killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)


# --- On a Ray cluster ------------------------------------------------------------------------------------------------


@contextmanager
def _ray(address: str) -> Iterator[int]:
    """How many CPUs the Ray cluster has; while this lasts, joblib's backend `ray` works on it, with Motley as it is here."""
    for name, value in _RAY_PATIENCE_S.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from joblib import register_parallel_backend
        from ray.exceptions import RayError
        from ray.util.joblib.ray_backend import RayBackend
    except ImportError as error:
        raise InputError(f"--on: {address} needs Ray: pip install 'motley[ray]' ({error})") from None

    class Backend(RayBackend):  # type: ignore[misc,unused-ignore]
        """Ray's own, which tells of every task when it is done."""

        supports_return_generator = True

    register_parallel_backend("ray", Backend)
    house = Path(__file__).resolve().parents[1]
    modules = [str(house / name) for name in ("sim", "partition", "experiments")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ray.init(
                address,
                runtime_env={"py_modules": modules, "excludes": ["__pycache__"]},
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except Exception as error:
            if isinstance(error, ConnectionError):
                raise InputError(f"--on: no Ray cluster answers at {address}") from None
            raise ChildProcessError(f"the Ray cluster at {address} cannot be used: {error}") from None
    try:
        there = int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call,unused-ignore]
        if there < 1:
            raise ChildProcessError(f"the Ray cluster at {address} has no CPU to work on")
        yield there
    except (RayError, ConnectionError) as error:
        raise ChildProcessError(f"the Ray cluster at {address} failed: {' '.join(str(error).split())}") from None
    finally:
        ray.shutdown()
