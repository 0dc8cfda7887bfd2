"""Plans that the published programs of other systems found on given clusters, judged by our judges.

They lie in `data/peer_plans`, with the clusters they were found on and a README that says how they were made. Many of them do
not fit in memory as they are: their programs leave out what we count. Such a plan is judged again as 1F1B, and if it still
does not fit, for its time alone, on GPUs whose memory has no end. The outcome says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from experiments.comparison import Cell, Outcome, judged
from experiments.judges import judge_named
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.job import Job
from sim.spec.judge import Infeasible, Verdict
from sim.spec.plan import Plan, read_plan

AS_IT_IS, AS_1F1B = "as it is", "as 1F1B"
MEMORY_IGNORED = "as 1F1B, memory ignored"
ENDLESS_BYTES = 2**60
"""More memory than any plan needs."""


@dataclass(frozen=True)
class Peer:
    """A plan that a published program found, and the cluster that it was given."""

    program: str
    cluster: Cluster
    plan: Plan

    @property
    def name(self) -> str:
        """What stands in the place of a planner's name in a table."""
        return f"{self.program}, published"


@cache
def peers() -> tuple[Peer, ...]:
    """All published plans, by program, cluster and model. Raises InputError for a file that cannot be read."""
    folder = Path(__file__).with_name("data") / "peer_plans"
    clusters = {path.stem: read_cluster(path) for path in sorted(folder.glob("*.yaml"))}
    plans = {path: read_plan(path) for path in sorted(folder.glob("*.json"))}
    return tuple(Peer(path.name.split(".")[0], clusters[plan.cluster], plan) for path, plan in plans.items())


def arena() -> list[tuple[Cluster, Job]]:
    """The clusters and jobs that published plans were made for, each once."""
    return list(dict.fromkeys((peer.cluster, peer.plan.job()) for peer in peers()))


def peers_on(cluster: Cluster, job: Job) -> list[Peer]:
    """The published plans for this job on this cluster, whatever software stack trains on it."""
    return [peer for peer in peers() if replace(peer.cluster, stack=cluster.stack) == cluster and peer.plan.job() == job]


def judge_peer(peer: Peer, cluster: Cluster, judge: str = "simulate", seed: int = 0, objective: str = "throughput") -> Outcome:
    """The outcome of a published plan on a cluster (its own, or that with another stack) under the judge of this name."""
    maker, job, plan, remark = judge_named(judge), peer.plan.job(), peer.plan, AS_IT_IS
    verdict = maker(cluster, job, seed)(plan)
    if _lacks_memory(verdict):
        plan, remark = replace(plan, schedule="1f1b"), AS_1F1B
        verdict = maker(cluster, job, seed)(plan)
    if _lacks_memory(verdict):
        remark = MEMORY_IGNORED
        verdict = maker(with_endless_memory(cluster), job, seed)(plan)
    cell = Cell(cluster, job, peer.name, judge, seed=seed, objective=objective)
    return Outcome(cell, judged(peer.name, plan, verdict), remark=remark, fits=remark != MEMORY_IGNORED)


def _lacks_memory(verdict: Verdict) -> bool:
    """Whether the plan would run, had its GPUs more memory."""
    return isinstance(verdict, Infeasible) and verdict.reason == "memory"


def with_endless_memory(cluster: Cluster) -> Cluster:
    """The cluster with GPUs that every plan fits on."""
    nodes = tuple(replace(node, gpu=replace(node.gpu, memory_bytes=ENDLESS_BYTES)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)
