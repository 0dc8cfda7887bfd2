"""The judges that a flag can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from sim.cost.estimate import estimation
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Judge
from sim.spec.reading import InputError, nearest

JudgeMaker: TypeAlias = Callable[[Cluster, Job, int], Judge]

SIMULATE, ESTIMATE = "simulate", "estimate"
"""Only the simulation has devices of different speeds."""

JUDGES: Mapping[str, JudgeMaker] = {
    SIMULATE: simulation,
    ESTIMATE: lambda cluster, job, seed: estimation(cluster, job),
}
"""By name, what makes a judge for a cluster, a job and a seed."""


def judge_named(name: str) -> JudgeMaker:
    """What makes the judge of this name. Raises InputError with the nearest name and all of them."""
    if name not in JUDGES:
        raise InputError(f"unknown judge {name!r}; accepted: {', '.join(JUDGES)}{nearest(name, JUDGES)}")
    return JUDGES[name]
