"""Iterations of one plan on devices whose speeds differ by chance, drawn anew for each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from sim.cost.network import Network
from sim.engine import simulate
from sim.spec.cluster import Cluster
from sim.spec.plan import Plan
from sim.spec.trace import Trace


@dataclass(frozen=True)
class Spread:
    """The iterations of several runs, of which run i was drawn with the seed `seed` + i."""

    jitter: float
    """Standard deviation of the devices' speeds, as a fraction."""
    seed: int
    iteration_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle of all, or the mean of the two in the middle."""
        return statistics.median(self.iteration_s)

    @property
    def standard_deviation_s(self) -> float:
        """Of the runs, as a sample of all that could be drawn; 0 of a single one."""
        return statistics.stdev(self.iteration_s) if len(self.iteration_s) > 1 else 0.0

    @property
    def middle(self) -> int:
        """The run in the middle: of two, the shorter."""
        return sorted(range(len(self.iteration_s)), key=lambda i: self.iteration_s[i])[(len(self.iteration_s) - 1) // 2]

    @property
    def middle_seed(self) -> int:
        """The seed of the run in the middle."""
        return self.seed + self.middle

    def values(self) -> dict[str, Any]:
        """The plain values for a report's file."""
        return {
            "count": len(self.iteration_s),
            "median_s": self.median_s,
            "standard_deviation_s": self.standard_deviation_s,
            "least_s": min(self.iteration_s),
            "most_s": max(self.iteration_s),
            "middle_seed": self.middle_seed,
            **asdict(self),
        }


def repeated(
    plan: Plan,
    cluster: Cluster,
    seed: int,
    jitter: float,
    repeats: int,
    counting: Callable[[int], AbstractContextManager[Callable[[], None]]] = lambda total: nullcontext(lambda: None),
) -> tuple[Trace, Spread]:
    """The trace of the run in the middle, and the spread of all, of which `counting` tells that each is done.

    Raises InputError as `simulate` does.
    """
    network, times = Network(cluster), []
    with counting(repeats) as one_done:
        for i in range(repeats):
            trace = simulate(plan, cluster, seed + i, jitter, network)
            times.append(trace.iteration_s)
            one_done()
    spread = Spread(jitter, seed, tuple(times))
    if spread.middle != repeats - 1:  # traces are large: the last alone is kept
        trace = simulate(plan, cluster, spread.middle_seed, jitter, network)
    return trace, spread
