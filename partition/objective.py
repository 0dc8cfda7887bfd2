"""Objectives: which of two plans is the better answer, which are no answer at all, and which GPUs are worth a try.

Three things are measured: the time of an iteration, dollars per billion tokens, joules per token. Dollars and joules count the
GPUs that a plan uses and no others: one that it leaves out is neither rented nor switched on. (A report's `dollars` and
`energy_j` count the whole cluster, as its `mfu` does; these measures are to them what `mfu_used` is to `mfu`.)

The best plan is the first in the order of its objective, and of plans that are equal there the one that is first in the other
two, so that none that was judged dominates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sim.spec.cluster import Cluster, Node
from sim.spec.job import Job
from sim.spec.judge import Cost
from sim.spec.plan import Plan
from sim.spec.reading import InputError, nearest

MEASURED_IN = {"throughput": "iteration_s", "cost": "dollars_per_billion_tokens", "energy": "joules_per_token"}
"""What each objective measures plans by: a field of `Outlay`."""

OBJECTIVES = tuple(MEASURED_IN)

MOST_PLACES = 12
"""Decimal places of a number in a message, at most."""


class Outlay(NamedTuple):
    """What training with a plan takes. Dollars are None where some GPU of the cluster has no price."""

    iteration_s: float
    tokens_per_s: float
    dollars_per_hour: float | None
    dollars_per_billion_tokens: float | None
    joules_per_token: float

    def axes(self) -> tuple[float, float, float]:
        """Time, dollars and energy, less being better; dollars that are not known are 0 for all plans alike."""
        return self.iteration_s, self.dollars_per_billion_tokens or 0.0, self.joules_per_token


class Ledger:
    """The rent and the energy of plans on one cluster, of the GPUs that they use alone."""

    def __init__(self, cluster: Cluster) -> None:
        self._prices = {device.name: device.gpu.dollars_per_hour or 0.0 for device in cluster.devices}
        self._idle_watts = {device.name: device.gpu.idle_watts for device in cluster.devices}
        self._all_idle_watts = math.fsum(self._idle_watts.values())
        self._priced = not unpriced(cluster)

    def outlay(self, plan: Plan, cost: Cost) -> Outlay:
        """What training with a plan takes, given what one iteration of it costs on the whole cluster."""
        rent = sum([self._prices[name] for name in plan.devices]) if self._priced else None
        # The GPUs that a plan leaves out are idle all the iteration long, and counted so in its cost.
        left_out_watts = self._all_idle_watts - math.fsum([self._idle_watts[name] for name in plan.devices])
        joules = cost.energy_j - left_out_watts * cost.iteration_s
        per_billion = None if rent is None else rent / 3600 / cost.tokens_per_s * 1e9
        return Outlay(cost.iteration_s, cost.tokens_per_s, rent, per_billion, joules / (cost.tokens_per_s * cost.iteration_s))


def unpriced(cluster: Cluster) -> list[str]:
    """The kinds of the cluster's GPUs that have no price, in its order."""
    return list(dict.fromkeys(node.gpu.name for node in cluster.nodes if node.gpu.dollars_per_hour is None))


class Missed(NamedTuple):
    """A constraint that a plan does not meet: by which factor, what it reaches, and what was asked for."""

    factor: float
    reached: str
    asked: str


@dataclass(frozen=True)
class Objective:
    """What makes a plan good: throughput, cost ($ per token) or energy (J per token); and what it must keep to be an answer.

    Raises InputError for an unknown name and for a constraint that is not above zero.
    """

    name: str = "throughput"
    min_tokens_per_s: float | None = None
    max_dollars_per_hour: float | None = None
    """Of the rent of the GPUs that a plan uses."""
    max_dollars_per_billion_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise InputError(f"unknown objective {self.name!r}; accepted: {known}{nearest(self.name, OBJECTIVES)}")
        for name in ("min_tokens_per_s", "max_dollars_per_hour", "max_dollars_per_billion_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} is a finite number above zero, but got {value!r}")

    @property
    def counts_dollars(self) -> bool:
        """Whether it cannot do without prices."""
        return self.name == "cost" or self.max_dollars_per_hour is not None or self.max_dollars_per_billion_tokens is not None

    @property
    def chooses_gpus(self) -> bool:
        """Whether fewer GPUs may be the better answer: it counts what they cost or take."""
        return self.name != "throughput" or self.counts_dollars

    def check(self, cluster: Cluster) -> None:
        """Nothing. Raises InputError where it counts dollars, and some GPU of the cluster has no price."""
        kinds = unpriced(cluster) if self.counts_dollars else []
        if kinds:
            raise InputError(
                f"dollars count, in the objective or in a limit, but no price is known of {', '.join(kinds)}: give one in the "
                f"cluster's file, as in gpu_kinds: {{{kinds[0]}: {{price: 1.2 $/h}}}}"
            )

    def rank(self, outlay: Outlay) -> tuple[float, float, float]:
        """What plans are sorted by, the best first: its own measure, and then the other two."""
        time, dollars, energy = outlay.axes()
        if self.name == "cost":
            return dollars, time, energy
        if self.name == "energy":
            return energy, time, dollars
        return time, dollars, energy

    def missed(self, outlay: Outlay) -> Missed | None:
        """The constraint that is missed by the largest factor; None where all are met."""
        found = []
        if self.min_tokens_per_s is not None and outlay.tokens_per_s < self.min_tokens_per_s:
            reached, asked = _told_apart(outlay.tokens_per_s, self.min_tokens_per_s, 0)
            told = f"{reached} tokens/s", f"at least {asked} tokens/s"
            found.append(Missed(self.min_tokens_per_s / outlay.tokens_per_s, *told))
        for limit, value, unit in (
            (self.max_dollars_per_hour, outlay.dollars_per_hour, "per hour"),
            (self.max_dollars_per_billion_tokens, outlay.dollars_per_billion_tokens, "per billion tokens"),
        ):
            if limit is not None and value is not None and value > limit:
                reached, asked = _told_apart(value, limit, 2)
                found.append(Missed(value / limit, f"${reached} {unit}", f"at most ${asked} {unit}"))
        return max(found, key=lambda missed: missed.factor, default=None)


def _told_apart(reached: float, asked: float, places: int) -> tuple[str, str]:
    """Both numbers with so many decimal places, or as many more as tell them apart and say the second one as it was asked."""
    while True:
        one, other = f"{reached:,.{places}f}", f"{asked:,.{places}f}"
        if (one != other and math.isclose(float(other.replace(",", "")), asked, rel_tol=1e-9)) or places >= MOST_PLACES:
            return one, other
        places += 1


def dominates(one: Outlay, other: Outlay) -> bool:
    """Whether one is as good as the other in time, dollars and energy, and better in at least one."""
    pairs = list(zip(one.axes(), other.axes(), strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


# --- Which GPUs ------------------------------------------------------------------------------------------------------


def pools(cluster: Cluster, job: Job, objective: Objective) -> list[Cluster]:
    """The parts of a cluster on which fast plans are searched, the smallest first: with them the question is which GPUs to use.

    Where GPUs cost nothing, the whole cluster alone (a planner may leave some out). Else also: the kinds that give the most
    FLOP/s for a dollar (or a watt), one more at a time; of each kind 1, 2, 4, ... GPUs of a node and 1, 2, 4, ... nodes; and
    as much as the rent allows of each kind, and of all from the best kind on. Parts that cost too much are left out: there are
    none where every GPU does.
    """
    if not objective.chooses_gpus:
        return [cluster]
    limit = objective.max_dollars_per_hour
    divisible = cluster.bandwidth_matrix is None or "/" not in cluster.bandwidth_matrix.names[0]
    by_kind: dict[str, list[Node]] = {}
    for node in cluster.nodes:
        if node.gpu.peak(job.precision) is not None:
            by_kind.setdefault(node.gpu.name, []).append(node)
    kinds = sorted(by_kind.values(), key=lambda nodes: _burden(nodes[0], job, objective))
    found: list[Sequence[Node]] = [cluster.nodes]
    found += [[node for nodes in kinds[:n] for node in nodes] for n in range(1, len(kinds) + 1)]
    for nodes in kinds:
        found += [nodes[:count] for count in _powers(len(nodes))]
        if divisible:
            found += [[replace(nodes[0], gpus=count)] for count in _powers(nodes[0].gpus)]
    if limit is not None:
        found += [_affordable(nodes, limit, divisible) for nodes in (*kinds, [node for nodes in kinds for node in nodes])]
    parts: dict[tuple[tuple[str, int], ...], Cluster] = {}
    for chosen in found:
        if chosen and (limit is None or sum(map(_rent, chosen)) <= limit):
            gpus = {node.name: node.gpus for node in chosen}
            key = tuple((node.name, gpus[node.name]) for node in cluster.nodes if node.name in gpus)
            if key not in parts and (part := _part(cluster, gpus)) is not None:
                parts[key] = part
    return sorted(parts.values(), key=lambda part: len(part.devices))


def _part(cluster: Cluster, gpus: dict[str, int]) -> Cluster | None:
    """The cluster with these nodes alone, each with so many GPUs; None where the others joined their sites."""
    try:
        part = cluster.without_nodes({node.name for node in cluster.nodes} - set(gpus))
    except InputError:
        return None
    nodes = tuple(
        node if node.gpus == gpus[node.name] else replace(node, gpus=gpus[node.name], host_gpus=node.host_gpus or node.gpus)
        for node in part.nodes
    )
    return part if nodes == part.nodes else part.with_nodes(nodes, part.wan, part.bandwidth_matrix)


def _burden(node: Node, job: Job, objective: Objective) -> float:
    """What a FLOP of a node's kind costs at its peak: joules where energy is the objective, else dollars."""
    rate = node.gpu.busy_watts if objective.name == "energy" else node.gpu.dollars_per_hour or 0.0
    return rate / (node.gpu.peak(job.precision) or 1.0)


def _rent(node: Node) -> float:
    """Dollars per hour of a node's GPUs."""
    return node.gpus * (node.gpu.dollars_per_hour or 0.0)


def _affordable(nodes: Sequence[Node], limit: float, divisible: bool) -> list[Node]:
    """The nodes, in order, whose rent together is within a limit; of one that is too dear some GPUs, where it is divisible."""
    chosen: list[Node] = []
    left = limit
    for node in nodes:
        price = node.gpu.dollars_per_hour or 0.0
        count = node.gpus if node.gpus * price <= left else math.floor(left / price) if divisible else 0
        if count:
            chosen.append(replace(node, gpus=count))
            left -= count * price
    return chosen


def _powers(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`, which comes last."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most
