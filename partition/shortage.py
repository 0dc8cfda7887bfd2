"""What lacks where no plan fits in memory: the bytes that are missing under the least hungry plan, and what would make it fit.

The least hungry plan is looked for among those that recompute everything, one sequence at a time: pipelines over all GPUs, or
those that hold a layer, in a few orders, their layers cut so that the stage that lacks most lacks the least; and copies of
shorter pipelines that divide all of their state (ZeRO 3), for long sequences also with context parallelism; each with tensor
parallelism inside the nodes up to several degrees. What it does not do, as of the planners only `motley` does, is to keep states
in the hosts' memory: that is among what is tried to make it fit, beside more of the same GPUs and shorter sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from partition.drafts import Draft, Settings, all_under, context_degrees, degrees, make_plan, stage
from partition.layers import even_split, ranges, split_layers
from partition.room import Room
from partition.search import lacking_bytes
from sim.cost.feasibility import infeasible
from sim.spec.cluster import MOST_GPUS, Cluster, Nic, Node
from sim.spec.job import Job
from sim.spec.judge import Infeasible
from sim.spec.plan import Pipeline, Plan
from sim.spec.schedules import in_flight

MORE_GPUS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHORTER = (2, 4, 8, 16)
MOST_DEPTH = 8
"""Copies that divide all their state have at most so many stages."""

SPARE_NIC = Nic("ethernet", 1.25e9)
"""Of a node without one, where it is to stand beside others; memory does not depend on it."""

Group = tuple[str, ...]


def shortage(cluster: Cluster, job: Job, closest: Infeasible | None = None) -> Infeasible | None:
    """Why not even the least hungry plan fits in memory, with what would make it fit; None where memory is not the reason.

    The bytes are of the device that lacks the most. Everything that is said to make it fit was tried. `closest` is what a search
    has found to lack the fewest bytes: where that is less, or the least hungry plan does fit, it is the answer.
    """
    least = least_hungry(cluster, job)
    if least is None:
        return None
    plan, reason = least
    if reason is None:
        if closest is None:
            return None
        fits = f"{closest.message}; yet a plan of {_described(plan)} does fit: another planner may find one"
        return replace(closest, message=fits)
    if reason.reason != "memory":
        return None
    if closest is not None and lacking_bytes(closest) < lacking_bytes(reason):
        return replace(closest, message=f"{closest.message}; {_remedy(cluster, job)}")
    lack = lacking_bytes(reason)
    shown = f"{lack / 2**30:,.1f} GiB" if lack >= 2**30 / 10 else f"{lack / 2**20:,.1f} MiB"
    message = (
        f"{reason.message}: {shown} are missing there under the least hungry plan ({_described(plan)}); {_remedy(cluster, job)}"
    )
    return replace(reason, message=message)


def least_hungry(cluster: Cluster, job: Job, offload: bool = False) -> tuple[Plan, Infeasible | None] | None:
    """The plan that lacks the fewest bytes on its shortest device, and the reason why it cannot run, if it cannot.

    None where no GPU has the job's precision. With `offload` the optimizer's states are in the hosts' memory.
    """
    found: tuple[Plan, Infeasible | None] | None = None
    fewest = float("inf")
    for draft, settings in _hungry_least(cluster, job):
        plan = make_plan(cluster, job, draft, replace(settings, offload_optimizer=offload))
        reason = infeasible(plan, cluster)
        if reason is None:
            return plan, None
        if found is None or lacking_bytes(reason) < fewest:
            found, fewest = (plan, reason), lacking_bytes(reason)
    return found


def _described(plan: Plan) -> str:
    """The shape of a plan of this module in a few words."""
    pipelines, depth = len(plan.pipelines), len(plan.pipelines[0].stages)
    ranks = plan.context_parallel
    tensor = max(len(part.devices) // ranks for part in plan.pipelines[0].stages)
    copies = f"{pipelines} pipelines of " if pipelines > 1 else ""
    context = f", context parallel {ranks}" if ranks > 1 else ""
    zero = f", ZeRO {plan.zero_stage}" if pipelines * ranks > 1 else ""
    stages = "1 stage" if depth == 1 else f"{depth} stages"
    return f"{copies}{stages}, tensor parallel {tensor}{context}{zero}, full recompute, micro-batch 1"


# --- The least hungry plans ------------------------------------------------------------------------------------------


def _hungry_least(cluster: Cluster, job: Job) -> Iterator[tuple[Draft, Settings]]:
    """Plans that need little memory on each GPU, as this module's docstring says."""
    nodes = [node for node in cluster.nodes if node.gpu.peak(job.precision) is not None]
    room = Room(cluster, job)
    tried: list[list[Group]] = []
    most = max((node.gpus for node in nodes), default=0)
    for cap in (2**n for n in range(most.bit_length())):
        groups = [group for node in nodes for group in _groups(node, job, cap)]
        if groups in tried:
            continue
        tried.append(groups)
        groups = sorted(groups, key=lambda group: -room.capacity_bytes(group) * len(group))
        parallel = cap > 1 and all(job.sequence_length % len(group) == 0 for group in groups)
        settings = Settings(sequence_parallel=parallel)
        held = groups[: job.model.layers]
        holding = [group for group in held if _holds_a_layer(room, group, settings)]
        for chosen in (held, holding) if 0 < len(holding) < len(held) else (held,):
            # The first stage keeps the most micro-batches, and the ends of the model are at the ends.
            for order in ([chosen[0], *reversed(chosen[1:])], chosen, chosen[::-1])[: len(chosen)]:
                cut = _cut(job, room, order, settings)
                if cut is not None:
                    yield cut, settings
        by_degree = [[group for group in groups if len(group) == size] for size in dict.fromkeys(map(len, groups))]
        for ranks in (1, *context_degrees(job, len(groups))):
            joined = [one for alike in by_degree for one in _joined(alike, ranks)]
            parts = job.sequence_length // ranks
            divided = Settings("1f1b", 3, cap > 1 and all(parts % len(group) == 0 for group in groups), context_parallel=ranks)
            for depth in (2**n for n in range(MOST_DEPTH.bit_length())):
                copies = min(len(joined) // depth, job.global_batch)
                if copies * ranks > 1 and copies and depth <= job.model.layers:
                    yield _copies(job, joined[: copies * depth], copies, depth), divided


def _joined(groups: Sequence[Group], ranks: int) -> Iterator[Group]:
    """Groups of so many context ranks, of tensor-parallel groups of one degree."""
    for at in range(0, len(groups) - ranks + 1, ranks):
        yield tuple(chain(*groups[at : at + ranks]))


def _groups(node: Node, job: Job, cap: int) -> list[Group]:
    """A node's GPUs in tensor-parallel groups as large as the cap and the heads allow."""
    degree = max(degree for degree in degrees(job, node.gpus) if degree <= cap)
    names = [f"{node.name}/{index}" for index in range(node.gpus)]
    return [tuple(names[at : at + degree]) for at in range(0, node.gpus, degree)]


def _holds_a_layer(room: Room, group: Group, settings: Settings) -> bool:
    """Whether the group has memory for a stage of one layer in the middle of a pipeline."""
    return room.stage(1, len(group), 1, settings, False, False).total(1, all_under("full", 1)) <= room.capacity_bytes(group)


def _cut(job: Job, room: Room, order: Sequence[Group], settings: Settings) -> Draft | None:
    """One pipeline over the groups, with its layers cut so that the stage that lacks most lacks the least."""
    depth = len(order)
    held = [room.stage(1, len(group), 1, settings, s == 0, s == depth - 1) for s, group in enumerate(order)]
    flying = [in_flight(settings.schedule, depth, s, job.global_batch) for s in range(depth)]
    have = [room.capacity_bytes(group) for group in order]
    counts = split_layers(job.model.layers, depth, lambda s, count: held[s].total(flying[s], all_under("full", count)) - have[s])
    if counts is None:
        return None
    stages = tuple(stage(group, cut, 1, "full") for group, cut in zip(order, ranges(counts), strict=True))
    return (Pipeline(1, job.global_batch, stages),)


def _copies(job: Job, groups: Sequence[Group], copies: int, depth: int) -> Draft:
    """So many pipelines of equal depth, the largest groups dealt first, with the batch divided as evenly as possible."""
    cuts = ranges(even_split(job.model.layers, depth))
    batches = even_split(job.global_batch, copies)
    return tuple(
        Pipeline(1, batches[p], tuple(stage(groups[s * copies + p], cut, 1, "full") for s, cut in enumerate(cuts)))
        for p in range(copies)
    )


# --- What would make it fit ------------------------------------------------------------------------------------------


def _remedy(cluster: Cluster, job: Job) -> str:
    """What makes some plan fit, of what was tried: more of the same GPUs, states in the hosts' memory, shorter sequences."""
    found = []
    gpus = len(cluster.devices)
    for times in MORE_GPUS:
        if gpus * times > MOST_GPUS:
            break
        if _fits(_times(cluster, times), job):
            found.append(f"{times} times the GPUs ({gpus * times})")
            break
    if _fits(cluster, job, offload=True):
        found.append("the optimizer's states in the hosts' memory (offload_optimizer in a plan; --planner motley tries it)")
    for part in SHORTER:
        if job.sequence_length % part == 0 and _fits(cluster, replace(job, sequence_length=job.sequence_length // part)):
            found.append(f"sequences of {job.sequence_length // part} tokens (--seq-len)")
            break
    if not found:
        return f"neither {MORE_GPUS[-1]} times the nodes, nor offloading the optimizer, nor shorter sequences would make it fit"
    return "it would fit with " + ", or ".join(found)


def _fits(cluster: Cluster, job: Job, offload: bool = False) -> bool:
    least = least_hungry(cluster, job, offload)
    return least is not None and least[1] is None


def _times(cluster: Cluster, times: int) -> Cluster:
    """The cluster with so many of each of its nodes; only for what memory depends on."""
    nodes = [replace(node, nic=node.nic or SPARE_NIC, site="") for node in cluster.nodes]
    names = {node.name for node in nodes}
    more = [replace(node, name=_free(f"{node.name}-more{n}", names)) for n in range(1, times) for node in nodes]
    return cluster.with_nodes((*nodes, *more))


def _free(name: str, names: set[str]) -> str:
    """A name that no node has yet, and which is then taken."""
    while name in names:
        name += "+"
    names.add(name)
    return name
