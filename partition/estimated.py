"""Estimates for a search: `sim.cost.estimates`, whose arithmetic another process compiles while the search begins without it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path

from partition.parallel import can_fork
from sim.cost.estimates import Estimates
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.plan import Plan

MOST_WAIT_S = 600.0
"""A search without an end to its budget waits so long."""

COMPILATION_S = 60.0
"""What the compilation may take. Where no process can be beside the search, it is left out unless there is so much time."""


class Preparation:
    """The preparation of a job's estimates, by estimates of some plans.

    The first one on a machine is compiled, for half a minute; the compiled arithmetic is kept on disk, and from then on it is
    there within a second. So it happens in a process beside the search, which asks from time to time whether it is done.
    """

    def __init__(self, cluster: Cluster, job: Job, plans: Sequence[Plan]) -> None:
        self._cluster, self._job, self._plans = cluster, job, plans
        self._estimates: Estimates | None = None
        self._process: BaseProcess | None = None
        if can_fork():
            self._process = multiprocessing.get_context("fork").Process(target=self._compile, daemon=True)
            self._process.start()

    def _compile(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and that ends its children
        Estimates(self._cluster, self._job).many(self._plans)

    def estimates(self, wait_s: float = 0.0) -> Estimates | None:
        """The estimates, or None where they are not prepared within these seconds."""
        if self._estimates is None:
            if self._process is None:
                if wait_s < COMPILATION_S and not _compiled():
                    return None
            else:
                self._process.join(min(max(wait_s, 0.0), MOST_WAIT_S))
                if self._process.is_alive():
                    return None
            self._estimates = Estimates(self._cluster, self._job)
        return self._estimates

    def end(self) -> None:
        """Nothing; ends the preparation where it is not done."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()


def _compiled() -> bool:
    """Whether numba has kept the compiled arithmetic beside its source."""
    found = find_spec("sim.cost.recurrence")
    if found is None or found.origin is None:
        return False
    source = Path(found.origin)
    kept = source.parent.glob(f"__pycache__/{source.stem}.evaluate-*.nbi")
    return any(file.stat().st_mtime >= source.stat().st_mtime for file in kept)
