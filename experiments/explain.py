"""Why an iteration takes as long as it does: its critical path, what one change would gain, and what one more GPU is worth.

What a change gains is not estimated from the path, which changes with it: the changed plan, or the plan on the changed cluster,
is simulated anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

from partition import plan as search_plan
from partition.drafts import Settings, amount_of, recomputing
from sim.cost.feasibility import infeasible
from sim.cost.network import Network
from sim.critical import CriticalPath, critical_path
from sim.engine import simulate
from sim.spec.cluster import BandwidthMatrix, Cluster, LinkOverride, Node
from sim.spec.compile import lane_name
from sim.spec.counts import PRECISION_BYTES, unfused_scores, with_padded_vocabulary
from sim.spec.judge import Infeasible
from sim.spec.plan import COUNTED_SCHEDULES, SLICED_SCHEDULES, Pipeline, Plan, Replica, Stage, slice_counts
from sim.spec.reading import InputError
from sim.spec.schedules import SCHEDULES
from sim.spec.trace import Trace

FASTER_LINK, FASTER_COMPUTE, FASTER_HOST = 2.0, 1.1, 2.0
"""How many times as fast a class of links, the computation of a stage or kind, or the launch of a kernel is taken to be."""

_FASTER = f"compute {(FASTER_COMPUTE - 1) * 100:.0f} % faster"

MOST_STAGES = 16
"""Of stages that differ, so many are made faster one by one: those that the critical path is longest on."""

LINKS, SPEED, RECOMPUTE, SCHEDULE, MICRO_BATCH, EXPERTS = "links", "compute", "recompute", "schedule", "micro-batch", "experts"
GROUPS = (LINKS, SPEED, RECOMPUTE, SCHEDULE, MICRO_BATCH, EXPERTS)
"""The kinds of changes."""


@dataclass(frozen=True)
class Change:
    """One change to a plan or its cluster, or `why_not` it cannot be made."""

    group: str
    name: str
    plan: Plan
    cluster: Cluster
    why_not: str | Infeasible | None = None


@dataclass(frozen=True)
class Effect:
    """What came of a change: the seconds of its iteration, or None and why there is none."""

    group: str
    name: str
    iteration_s: float | None
    why_not: str | Infeasible | None = None

    @property
    def reason(self) -> str | None:
        """Why the change cannot be made, in full."""
        return self.why_not.message if isinstance(self.why_not, Infeasible) else self.why_not


@dataclass(frozen=True)
class OneMore:
    """What one more GPU of a kind is worth, as searches of equal budgets find it: iterations without and with it."""

    kind: str
    node: str
    """The node that is given one GPU more."""
    before_s: float
    after_s: float | None
    why_not: str | None
    gpus_used: int
    """Of the plan with it."""
    dollars_per_hour: float | None
    """Of one GPU of the kind."""


@dataclass(frozen=True)
class Explanation:
    """A plan's simulated iteration with its critical path and the effects of changes, those that save most first."""

    trace: Trace
    path: CriticalPath
    effects: tuple[Effect, ...]
    left_out: int
    """Stages that were not made faster, because there are too many."""


Counting: TypeAlias = Callable[[int], AbstractContextManager[Callable[[], None]]]
"""Given how much there is to do, what counts it: `experiments.progress.count_progress`, or nothing."""


def _uncounted(total: int) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


def explain(plan: Plan, cluster: Cluster, seed: int = 0, counting: Counting = _uncounted) -> Explanation:
    """The explanation of a feasible plan.

    Raises InputError for a plan that cannot be compiled, or with devices that the cluster does not have.
    """
    network = Network(cluster)
    trace = simulate(plan, cluster, seed=seed, network=network)
    path = critical_path(trace, cluster)
    faster_stages, left_out = _faster_stages(plan, cluster, path)
    changes = [
        *_faster_links(plan, cluster, network),
        *faster_stages,
        *_faster_kinds(plan, cluster),
        *_faster_hosts(plan, cluster),
        *_fused_softmax(plan, cluster),
        *_padded_vocabulary(plan, cluster),
        *_less_recompute(plan, cluster),
        *_other_schedules(plan, cluster),
        *_more_in_flight(plan, cluster),
        *_other_slices(plan, cluster),
        *_other_micro_batches(plan, cluster),
        *_other_experts(plan, cluster),
    ]
    effects = []
    with counting(len(changes)) as one_done:
        for change in changes:
            effects.append(_effect(change, seed))
            one_done()
    effects.sort(key=lambda effect: effect.iteration_s if effect.iteration_s is not None else math.inf)
    return Explanation(trace, path, tuple(effects), left_out)


def effect_of_padding(plan: Plan, cluster: Cluster, seed: int = 0) -> Effect | None:
    """What the plan would take with its vocabulary padded; None where that changes no rank's kernels."""
    return next((_effect(change, seed) for change in _padded_vocabulary(plan, cluster)), None)


def _effect(change: Change, seed: int) -> Effect:
    """What the simulation says of a change."""
    if change.why_not is not None:
        return Effect(change.group, change.name, None, change.why_not)
    try:
        reason = infeasible(change.plan, change.cluster)
        if reason is not None:
            return Effect(change.group, change.name, None, reason)
        return Effect(change.group, change.name, simulate(change.plan, change.cluster, seed=seed).iteration_s)
    except InputError as error:
        return Effect(change.group, change.name, None, str(error))


# --- Faster links ----------------------------------------------------------------------------------------------------


def _faster_links(plan: Plan, cluster: Cluster, network: Network) -> Iterator[Change]:
    """Each class of the links that the plan's transfers can use, FASTER_LINK times as fast."""
    classes: dict[str, list[int]] = {}
    for number, link in enumerate(network.links):
        classes.setdefault(link_class(link.name, cluster), []).append(number)
    if plan.offload_optimizer and not all(cluster.device(name).node.intra.is_nvlink for name in plan.devices):
        classes.setdefault("PCIe", [])
    known = {override.name: override for override in cluster.link_overrides}
    for name, numbers in classes.items():
        changed = dict(known)
        for number in numbers:
            link = network.links[number]
            before = changed.get(link.name, LinkOverride(link.name))
            changed[link.name] = replace(before, bandwidth_bytes_per_s=FASTER_LINK * link.capacity_bytes_per_s)
        faster = replace(cluster, link_overrides=tuple(changed.values()))
        if name == "PCIe":
            # The way to the host's memory, that optimizer states in it go, has no links of its own.
            faster = replace(faster, nodes=tuple(map(_with_faster_intra, cluster.nodes)))
        yield Change(LINKS, f"{name} {FASTER_LINK:g} times as fast", plan, faster)


def _with_faster_intra(node: Node) -> Node:
    """The node with PCIe FASTER_LINK times as fast; as it is where it has NVLink."""
    if node.intra.is_nvlink:
        return node
    return replace(node, intra=replace(node.intra, bandwidth_bytes_per_s=FASTER_LINK * node.intra.bandwidth_bytes_per_s))


_CARD = re.compile(r"(?:fabric>)?(?P<node>[^/]+)/(?P<card>nic\d+|ethernet)(?:>fabric)?")


def link_class(name: str, cluster: Cluster) -> str:
    """What kind of link it is, by its name in `sim.cost.network`: those of one class are made faster together.

    The cap that a measured matrix puts on a pair belongs to the links between the two: it is made faster with them.
    """
    nodes = {node.name: node for node in cluster.nodes}
    sender, arrow, receiver = name.partition("=>")
    if arrow:
        a, b = (nodes[end.partition("/")[0]] for end in (sender, receiver))
        if a is b:
            return "NVLink" if a.intra.is_nvlink else "PCIe"
        return _cards(a.nic.kind if a.nic is not None else "")
    if name.startswith("site:"):
        return "wide-area links"
    if name.endswith(">core") or name.startswith("core>"):
        return "uplinks of racks"
    card = _CARD.fullmatch(name)
    if card is not None:
        nic = nodes[card["node"]].nic
        return _cards("ethernet" if card["card"] == "ethernet" or nic is None else nic.kind)
    return "NVLink" if "nvlink" in (name.rpartition(">")[2], name.partition(">")[0]) else "PCIe"


def _cards(kind: str) -> str:
    return {"infiniband": "InfiniBand cards", "roce": "RoCE cards"}.get(kind, "Ethernet cards")


# --- Faster computation ----------------------------------------------------------------------------------------------


def _faster_stages(plan: Plan, cluster: Cluster, path: CriticalPath) -> tuple[list[Change], int]:
    """Stages that are alike together computing FASTER_COMPUTE times as fast, and how many others were left out."""
    groups: dict[object, list[tuple[int, int]]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            kinds = tuple(tuple(cluster.device(name).gpu for name in replica.devices) for replica in stage.replicas)
            form = (pipeline.micro_batch, pipeline.micro_batches, replace(stage, replicas=()), kinds)
            groups.setdefault(form, []).append((p, s))
    if len(groups) < 2:
        return [], 0  # what a faster stage gains is then what a faster kind does
    on_path: dict[str, float] = {}
    for segment in path.segments:
        on_path[segment.lane] = on_path.get(segment.lane, 0.0) + segment.seconds

    def length(members: Sequence[tuple[int, int]]) -> float:
        names = [
            lane_name(p, s, r, len(plan.pipelines[p].stages[s].replicas))
            for p, s in members
            for r in range(len(plan.pipelines[p].stages[s].replicas))
        ]
        return -sum(on_path.get(name, 0.0) for name in names)

    chosen = sorted(groups.values(), key=length)[:MOST_STAGES]
    changes = []
    for members in chosen:
        devices = [name for p, s in members for name in plan.pipelines[p].stages[s].devices]
        name = f"stage {_stages(members)} {_FASTER}"
        changes.append(_computing(plan, cluster, devices, name))
    return changes, len(groups) - len(chosen)


def _stages(members: Sequence[tuple[int, int]]) -> str:
    """The first of some stages that are alike, and how many more there are."""
    first = f"p{members[0][0]}s{members[0][1]}"
    return first if len(members) == 1 else f"{first} and {len(members) - 1} alike"


def _faster_kinds(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """Each kind's GPUs that the plan uses computing FASTER_COMPUTE times as fast."""
    devices: dict[str, list[str]] = {}
    for name in plan.devices:
        devices.setdefault(cluster.device(name).gpu.name, []).append(name)
    for kind, names in devices.items():
        yield _computing(plan, cluster, names, f"all {len(names)} {kind} {_FASTER}")


def _faster_hosts(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """Kernels and collectives launched FASTER_HOST times as fast, where the software stack's take a host's time."""
    own = cluster.stack
    if own.host_s or own.tensor_host_s:
        faster = replace(own, host_s=own.host_s / FASTER_HOST, tensor_host_s=own.tensor_host_s / FASTER_HOST)
        yield Change(SPEED, f"hosts launch {FASTER_HOST:g} times as fast", plan, replace(cluster, stack=faster))


def _fused_softmax(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """The softmax of all lanes in one kernel, where the stack's is Megatron's and does not take the scores of some."""
    own, context = cluster.stack, plan.context_parallel
    if not own.fuses_some_softmax:
        return
    queries, keys, element_bytes = plan.slice_length // context, plan.sequence_length, PRECISION_BYTES[plan.precision]
    for *_, replica in plan.replicas():
        tensor = len(replica.devices) // context
        if unfused_scores(plan.transformer, replica.sequences, queries, keys, tensor, element_bytes):
            yield Change(SPEED, "softmax fused on all lanes", plan, replace(cluster, stack=replace(own, megatron_softmax=False)))
            return


def _padded_vocabulary(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """The vocabulary padded, where tensor cores do not take what a rank has of it as it lies, and the stack loses time by it."""
    padded = with_padded_vocabulary(plan.transformer, plan.tensor_degrees, plan.precision)
    if cluster.stack.unaligned_scale < 1 and padded is not None:
        rows, before = padded.padded_vocab, plan.transformer.padded_vocab
        yield Change(SPEED, f"vocabulary padded to {rows:,} (was {before:,})", replace(plan, model=padded), cluster)


def _computing(plan: Plan, cluster: Cluster, devices: Sequence[str], name: str) -> Change:
    speeds = dict(cluster.device_speeds)
    for device in devices:
        speeds[device] = speeds.get(device, 1.0) * FASTER_COMPUTE
    try:
        return Change(SPEED, name, plan, replace(cluster, device_speeds=tuple(speeds.items())))
    except InputError as error:
        return Change(SPEED, name, plan, cluster, str(error))


# --- Another plan ----------------------------------------------------------------------------------------------------


def _less_recompute(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """Every stage that recomputes (those of one place and setting in all pipelines together) with as little as memory allows."""
    groups: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.most_recompute != "none":
                groups.setdefault((s, stage.recompute_words), []).append((p, s))
    everything = [member for members in groups.values() for member in members]
    if len(groups) > 1:
        yield _recomputing_least(plan, cluster, everything, "all stages")
    for members in groups.values():
        yield _recomputing_least(plan, cluster, members, f"stage {_stages(members)}")


def _recomputing_least(plan: Plan, cluster: Cluster, members: Sequence[tuple[int, int]], who: str) -> Change:
    """The plan with as little recomputation in some stages as memory allows: none, or pointwise, or as few layers in full."""
    stages = [plan.pipelines[p].stages[s] for p, s in members]
    was = " and ".join(dict.fromkeys(stage.recompute_words for stage in stages))
    chosen = set(members)

    def with_amount(most: int) -> Plan:
        """With what saves as much memory as they do now, but no more than an amount of recomputation."""

        def changed(p: int, s: int, stage: Stage) -> Stage:
            return recomputing(stage, min(most, amount_of(stage))) if (p, s) in chosen and amount_of(stage) > most else stage

        return _with_stages(plan, changed)

    reason = infeasible(without := _with_mode(plan, chosen, "none"), cluster)
    if reason is None:
        return Change(RECOMPUTE, f"{who}: no recomputation (was {was})", without, cluster)
    few, enough = 0, max(amount_of(stage) for stage in stages)  # too little, and as much as now
    now = enough
    while enough - few > 1:
        middle = (few + enough) // 2
        if infeasible(with_amount(middle), cluster) is None:
            enough = middle
        else:
            few = middle
    found = with_amount(enough)
    # Without flash attention its core keeps most, and computing it again takes less than whole layers.
    selective = _with_mode(plan, chosen, "selective")
    again = [found.pipelines[p].stages[s].most_recompute for p, s in members]
    if "full" in again and infeasible(selective, cluster) is None:
        found = selective
    elif enough == now:
        return Change(RECOMPUTE, f"{who}: less recomputation (was {was})", plan, cluster, reason)
    left = " and ".join(dict.fromkeys(found.pipelines[p].stages[s].recompute_words for p, s in members))
    return Change(RECOMPUTE, f"{who}: recomputation {left} (was {was})", found, cluster)


def _with_mode(plan: Plan, chosen: Collection[tuple[int, int]], mode: str) -> Plan:
    """The plan with all layers of some stages under a mode of recomputation."""
    return _with_stages(plan, lambda p, s, stage: stage.recomputing(mode) if (p, s) in chosen else stage)


def _with_stages(plan: Plan, changed: Callable[[int, int, Stage], Stage]) -> Plan:
    pipelines = tuple(
        replace(pipeline, stages=tuple(changed(p, s, stage) for s, stage in enumerate(pipeline.stages)))
        for p, pipeline in enumerate(plan.pipelines)
    )
    return replace(plan, pipelines=pipelines)


def _other_schedules(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """The plan under each other schedule that takes its layer ranges; a pipeline of one stage has nothing to schedule."""
    ranges = {len(stage.layers) for pipeline in plan.pipelines for stage in pipeline.stages}
    if max(len(pipeline.stages) for pipeline in plan.pipelines) < 2:
        return
    for name, schedule in SCHEDULES.items():
        takes = ranges == {schedule.ranges} or (schedule.ranges is None and ranges != {1})
        if name != plan.schedule and takes:
            changed = plan.under(name)
            whole = ", whole sequences" if changed.sequence_slices < plan.sequence_slices else ""
            held = f", in flight what {name} says" if plan.holds_its_own and not changed.holds_its_own else ""
            yield Change(SCHEDULE, f"schedule {name} (is {plan.schedule}){whole}{held}", changed, cluster)


def _more_in_flight(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """The plan whose stages hold one micro-batch more for each message between nodes that is still to come."""
    if plan.schedule not in COUNTED_SCHEDULES:
        return
    pipelines = []
    for pipeline in plan.pipelines:
        stages = [pipeline.stages[s] for s in pipeline.visiting_order]
        counts = Settings(ahead=1).in_flight([stage.devices for stage in stages])
        if counts is None:
            pipelines.append(pipeline)
            continue
        more = [one - other for one, other in zip(counts, range(len(stages), 0, -1), strict=True)]
        held = dict(zip(pipeline.visiting_order, map(sum, zip(pipeline.in_flight, more, strict=True)), strict=True))
        pipelines.append(pipeline.holding([held[s] for s in range(len(stages))]))
    changed = replace(plan, pipelines=tuple(pipelines))
    if changed != plan:
        yield Change(SCHEDULE, "one micro-batch more in flight for each message between nodes", changed, cluster)


def _other_slices(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """The plan with sequences whole, and in half and twice as many slices; none where it takes no slices."""
    now, sliced = plan.sequence_slices, plan.schedule in SLICED_SCHEDULES and plan.zero_stage < 2
    if not sliced or max(plan.context_parallel, plan.expert_parallel, 2 // max(len(p.stages) for p in plan.pipelines)) > 1:
        return
    for slices in sorted({1, now // 2, 2 * now} - {0, now}):
        if slices in slice_counts(plan.sequence_length):
            name = f"sequences in {slices} slices" if slices > 1 else "whole sequences"
            was = f" (are in {now})" if now > 1 else ""
            yield Change(SCHEDULE, name + was, replace(plan, sequence_slices=slices), cluster)


def _other_micro_batches(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """The plan with micro-batches twice as large, and half as large, and as many fewer or more."""
    for name, resized in (("twice as large", _twice), ("half as large", _half)):
        name = f"micro-batches {name}"
        pipelines = []
        for p, pipeline in enumerate(plan.pipelines):
            made = resized(pipeline)
            if isinstance(made, str):
                yield Change(MICRO_BATCH, name, plan, cluster, f"pipeline {p} {made}")
                break
            pipelines.append(made)
        else:
            yield Change(MICRO_BATCH, name, replace(plan, pipelines=tuple(pipelines)), cluster)


def _other_experts(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """The plan with experts divided over half and twice as many devices; and with whole ones on each tensor rank, as many bytes
    there, or, where they are whole, with columns of each."""
    moe, degree, whole = plan.transformer.experts, plan.expert_parallel, plan.whole_experts
    if moe is None:
        return
    ranks = plan.tensor_degrees
    others = [(count, plan.expert_tensor_parallel) for count in (degree // 2, 2 * degree)]
    if len(ranks) == 1 and (tensor := max(ranks)) > 1:
        others.append((max(1, degree // tensor), None) if whole else (degree * tensor, 1))
    was = f" (was over {degree}{', whole' if whole else ''})" if degree > 1 else ""
    for count, each in others:
        if count < 1 or moe.experts % count or (each and any(count % tensor for tensor in ranks)):
            continue
        each = each if count > 1 else None
        name = f"experts {'whole, ' if each else ''}{f'over {count}' if count > 1 else 'not divided'}{was}"
        yield Change(EXPERTS, name, replace(plan, expert_parallel=count, expert_tensor_parallel=each), cluster)


def _twice(pipeline: Pipeline) -> Pipeline | str:
    if pipeline.micro_batches % 2:
        return f"has {_counted(pipeline.micro_batches, 'micro-batch', 'micro-batches')}, no even number"
    return _resized(pipeline, pipeline.micro_batch * 2, pipeline.micro_batches // 2)


def _half(pipeline: Pipeline) -> Pipeline | str:
    for stage in pipeline.stages:
        for replica in stage.replicas:
            if replica.sequences % 2:
                taken = _counted(replica.sequences, "sequence", "sequences")
                return f"has a replica that takes {taken} of each micro-batch, no even number"
    return _resized(pipeline, pipeline.micro_batch // 2, pipeline.micro_batches * 2)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _resized(pipeline: Pipeline, micro_batch: int, micro_batches: int) -> Pipeline:
    def share(replica: Replica) -> Replica:
        return replace(replica, sequences=replica.sequences * micro_batch // pipeline.micro_batch)

    stages = tuple(replace(stage, replicas=tuple(map(share, stage.replicas))) for stage in pipeline.stages)
    return replace(pipeline, micro_batch=micro_batch, micro_batches=micro_batches, stages=stages)


# --- One more GPU ----------------------------------------------------------------------------------------------------


def one_more(
    plan: Plan, cluster: Cluster, planner: str, budget_s: float, seed: int = 0, counting: Counting = _uncounted
) -> list[OneMore]:
    """What one more GPU of each kind is worth: the best plan with it, beside the best without it, both found in `budget_s`.

    The plan that is explained counts as found in every search, so that a GPU more never makes it worse but by what it changes
    in its node. Raises InputError for an unknown planner.
    """
    # The one of each kind that has fewest: of nodes of eight and seven GPUs it is the one with a place that is free.
    nodes = {node.gpu.name: node for node in sorted(reversed(cluster.nodes), key=lambda node: -node.gpus)}
    kinds = list(dict.fromkeys(node.gpu.name for node in cluster.nodes))
    found: list[tuple[OneMore, Cluster | None]] = []
    with counting(len(kinds) + 1) as one_done:
        best = _best(plan, cluster, planner, budget_s, seed)[0] or plan
        one_done()
        for kind in kinds:
            node, grown, after, after_s, why_not = nodes[kind], None, None, None, None
            try:
                if node.gpu.peak(plan.precision) is None:
                    raise InputError(f"it has no {plan.precision}")
                grown = with_one_more(cluster, node.name)
                after, why_not = _best(best, grown, planner, budget_s, seed)
                after_s = None if after is None else simulate(after, grown, seed=seed).iteration_s
            except InputError as error:
                why_not = str(error)
            if after is not None and f"{node.name}/{node.gpus}" not in after.devices:
                # It may be found without the GPU, too, and then is no gain of it.
                best = _best_of((best, after), cluster, seed) or best
            used = 0 if after is None else len(after.devices)
            found.append((OneMore(kind, node.name, 0.0, after_s, why_not, used, node.gpu.dollars_per_hour), grown))
            one_done()
    # What was found last without a GPU counts as found with each of those before, too.
    before_s, told = simulate(best, cluster, seed=seed).iteration_s, []
    for gpu, grown in found:
        if gpu.after_s is not None and grown is not None and _best_of((best,), grown, seed) is not None:
            best_s = simulate(best, grown, seed=seed).iteration_s
            if best_s < gpu.after_s:
                gpu = replace(gpu, after_s=best_s, gpus_used=len(best.devices))
        told.append(replace(gpu, before_s=before_s))
    return told


def _best(plan: Plan, cluster: Cluster, planner: str, budget_s: float, seed: int) -> tuple[Plan | None, str | None]:
    """The best of a given plan and of what a search finds, or None and why there is none."""
    result = search_plan(cluster, plan.job(), planner, budget_s=budget_s, seed=seed)
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    found = _best_of((plan, result.plan), cluster, seed)
    if found is None:
        return None, result.infeasible.message if result.infeasible is not None else None
    return found, None


def _best_of(plans: Iterable[Plan | None], cluster: Cluster, seed: int) -> Plan | None:
    """The fastest of those plans that fit; None where none does."""
    fitting = [plan for plan in plans if plan is not None and infeasible(plan, cluster) is None]
    return min(fitting, key=lambda plan: simulate(plan, cluster, seed=seed).iteration_s, default=None)


def with_one_more(cluster: Cluster, name: str) -> Cluster:
    """The cluster with one GPU more in a node. In a matrix of devices it has the rates of the node's last one.

    Where the node has several cards, its GPUs are divided over them anew.
    """
    nodes = tuple(replace(node, gpus=node.gpus + 1) if node.name == name else node for node in cluster.nodes)
    matrix = cluster.bandwidth_matrix
    node = next(node for node in cluster.nodes if node.name == name)
    last, new = f"{name}/{node.gpus - 1}", f"{name}/{node.gpus}"
    if matrix is not None and last in matrix.names:
        matrix = _with_row(matrix, last, new)
    return replace(cluster, nodes=nodes, bandwidth_matrix=matrix)


def _with_row(matrix: BandwidthMatrix, like: str, name: str) -> BandwidthMatrix:
    """The matrix with one more device after `like`, which has its rates; between the two, the best of them."""
    i = matrix.names.index(like)
    order = [*range(i + 1), i, *range(i + 1, len(matrix.names))]
    fastest = max((rate for rate in matrix.bytes_per_s[i] if rate != math.inf), default=math.inf)
    rows = []
    for a, old_a in enumerate(order):
        row = []
        for b, old_b in enumerate(order):
            between = a != b and old_a == old_b
            row.append(fastest if between else matrix.bytes_per_s[old_a][old_b])
        rows.append(tuple(row))
    names = (*matrix.names[: i + 1], name, *matrix.names[i + 1 :])
    return BandwidthMatrix(names, tuple(rows), matrix.file)


# --- As plain values -------------------------------------------------------------------------------------------------


def explanation_table(told: Explanation, more: Sequence[OneMore] | None) -> Mapping[str, object]:
    """The plain values of an explanation's file; `more` is None where it was not asked for."""
    path, now_s = told.path, told.trace.iteration_s
    return {
        "iteration_s": now_s,
        "infeasible": None,
        "critical_path": {
            "busiest_lane": path.busiest_lane,
            "seconds_by_cause": dict(path.seconds_by_cause),
            "shares": [
                {
                    "cause": share.cause,
                    "place": share.place,
                    "activity": share.activity,
                    "seconds": share.seconds,
                    "bubble_s": share.bubble_s,
                    "pieces": share.pieces,
                }
                for share in path.shares
            ],
        },
        "changes": [
            {
                "group": effect.group,
                "name": effect.name,
                "iteration_s": effect.iteration_s,
                "saves_s": None if effect.iteration_s is None else now_s - effect.iteration_s,
                "why_not": effect.reason,
            }
            for effect in told.effects
        ],
        "stages_left_out": told.left_out,
        "one_more": None
        if more is None
        else [
            {
                "kind": gpu.kind,
                "node": gpu.node,
                "before_s": gpu.before_s,
                "after_s": gpu.after_s,
                "why_not": gpu.why_not,
                "gpus_used": gpu.gpus_used,
                "dollars_per_hour": gpu.dollars_per_hour,
            }
            for gpu in more
        ],
    }
