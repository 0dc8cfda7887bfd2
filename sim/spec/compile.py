"""Compiling a plan to its program, in small passes: lanes, schedule, messages, reductions.

A schedule is written once here, as the order of forwards and backwards of one lane; messages, gradient reductions and
parameter gathers are added by rules that do not know the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from sim.spec.counts import layer_parameters
from sim.spec.plan import LayerRange, Pipeline, Plan, Stage
from sim.spec.program import (
    Backward,
    Edge,
    Forward,
    GatherParameters,
    Instruction,
    Lane,
    OptimizerStep,
    Program,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    Sequences,
)
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

BUCKET_PARAMETERS = 40_000_000
"""Fewest parameters of a gradient bucket that overlaps the backward (Megatron-LM's distributed data parallel default)."""

MOST_INSTRUCTIONS = 10_000_000
"""The largest program that is compiled; to simulate it takes about three minutes and 10 GB. 16,384 GPUs need a tenth of it."""

Work: TypeAlias = Forward | Backward


def compile_plan(plan: Plan) -> Program:
    """The program of a plan. Raises InputError, in one line, for what a plan can say and the compiler cannot yet emit."""
    _refuse_unsupported(plan)
    lanes = _lanes(plan)
    lanes = _with_buckets(plan, lanes)
    ends = _shared_ends(plan, lanes)
    return Program(tuple(replace(lane, instructions=tuple(_instructions(plan, lane, ends))) for lane in lanes))


def _refuse_unsupported(plan: Plan) -> None:
    if plan.schedule not in SCHEDULES:
        raise InputError(f"the schedule {plan.schedule!r} cannot be compiled; accepted: {', '.join(SCHEDULES)}")
    for name in ("context_parallel", "expert_parallel"):
        if getattr(plan, name) != 1:
            raise InputError(f"{name} {getattr(plan, name)} cannot be compiled; accepted: 1")
    if plan.shard_group is not None:
        raise InputError(f"shard_group {plan.shard_group} cannot be compiled; accepted: null (all replicas)")
    if plan.offload_optimizer:
        raise InputError("offload_optimizer true cannot be compiled; accepted: false")
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if len(stage.layers) != 1:
                raise InputError(
                    f"pipelines[{p}].stages[{s}] has {len(stage.layers)} layer ranges, but {plan.schedule!r} takes one"
                )
    if plan.zero_stage >= 2:
        shapes = {(p.micro_batches, tuple(stage.layers for stage in p.stages)) for p in plan.pipelines}
        if len(shapes) > 1:
            raise InputError(
                f"zero_stage {plan.zero_stage} shares parameters or gradients at every micro-batch, so that all pipelines need "
                "equal cuts and micro_batches, but they differ; accepted: zero_stage 0 or 1"
            )
    count = instruction_estimate(plan)
    if count > MOST_INSTRUCTIONS:
        raise InputError(
            f"the plan has about {count:,} instructions in its program, but at most {MOST_INSTRUCTIONS:,} are compiled; "
            "larger micro-batches make fewer of them"
        )


def instruction_estimate(plan: Plan) -> int:
    """How many instructions the program of a plan has, without compiling it; those that come once per iteration left out.

    Never too few of the others. Uneven replicas may have fewer messages than is assumed here.
    """
    per_bucket = max(1, -(-BUCKET_PARAMETERS // layer_parameters(plan.transformer)))
    total = 0
    for pipeline in plan.pipelines:
        lanes = [len(stage.replicas) for stage in pipeline.stages]
        messages = sum(a + b - 1 for a, b in pairwise(lanes))  # of neighbours whose shares are cut at different places
        work = 0
        for stage, count in zip(pipeline.stages, lanes, strict=True):
            parts = max(1, -(-stage.layer_count // per_bucket))
            # A forward and a backward; from ZeRO 2 on backwards and reductions by parts, under ZeRO 3 forwards and gathers too.
            work += count * {2: 1 + 2 * parts, 3: 5 * parts}.get(plan.zero_stage, 2)
        total += pipeline.micro_batches * (work + 4 * messages)  # sent and received, activations and gradients
    return total


# --- Lanes -----------------------------------------------------------------------------------------------------------


def lane_name(pipeline: int, stage: int, replica: int, replicas: int) -> str:
    """The lane's name: `p0s1`, or `p0s1r2` where the stage has several replicas."""
    return f"p{pipeline}s{stage}" + (f"r{replica}" if replicas > 1 else "")


def _lanes(plan: Plan) -> list[Lane]:
    """The lanes with their neighbours, without instructions."""
    lanes = []
    for p, pipeline in enumerate(plan.pipelines):
        order = pipeline.visiting_order
        after = dict(pairwise(order))
        before = {later: earlier for earlier, later in after.items()}
        for s, stage in enumerate(pipeline.stages):
            for r, share in enumerate(_shares(stage)):
                previous = _edges(pipeline, p, before.get(s), share, stage.layers[0][0])
                following = _edges(pipeline, p, after.get(s), share, stage.layers[-1][1])
                lane = Lane(
                    name=lane_name(p, s, r, len(stage.replicas)),
                    pipeline=p,
                    stage=s,
                    replica=r,
                    devices=stage.replicas[r].devices,
                    layers=stage.layers,
                    sequences=share,
                    micro_batches=pipeline.micro_batches,
                    embedding=s == order[0],
                    head=s == order[-1],
                    previous=previous,
                    next=following,
                )
                lanes.append(lane)
    return lanes


def _shares(stage: Stage) -> list[Sequences]:
    """Which sequences of each micro-batch the replicas take: consecutive shares, in their order."""
    shares, at = [], 0
    for replica in stage.replicas:
        shares.append((at, at + replica.sequences))
        at += replica.sequences
    return shares


def _edges(pipeline: Pipeline, p: int, neighbour: int | None, share: Sequences, layer: int) -> tuple[Edge, ...]:
    """What a lane with this share exchanges with each replica of a neighbouring stage: the sequences both take."""
    if neighbour is None:
        return ()
    stage = pipeline.stages[neighbour]
    edges = []
    for r, other in enumerate(_shares(stage)):
        common = (max(share[0], other[0]), min(share[1], other[1]))
        if common[0] < common[1]:
            edges.append(Edge(layer, lane_name(p, neighbour, r, len(stage.replicas)), common))
    return tuple(edges)


# --- Gradient buckets ------------------------------------------------------------------------------------------------


def common_refinement(cuts: list[LayerRange]) -> list[LayerRange]:
    """The finest ranges that all given ranges are unions of, in order."""
    bounds = sorted({bound for r in cuts for bound in r})
    return [(a, b) for a, b in pairwise(bounds) if any(start <= a and b <= stop for start, stop in cuts)]


def holders(lanes: list[Lane], layers: LayerRange, transformer: Transformer) -> list[Lane]:
    """The lanes that hold these layers; `(0, 0)` is the embedding (the head's lanes too, if tied) and `(n, n)` the head."""
    start, stop = layers
    if start < stop:
        return [lane for lane in lanes if any(a <= start and stop <= b for a, b in lane.layers)]
    if start == 0:
        return [lane for lane in lanes if lane.embedding or (lane.head and transformer.tied_embeddings)]
    return [lane for lane in lanes if lane.head]


def _with_buckets(plan: Plan, lanes: list[Lane]) -> list[Lane]:
    """The lanes with the layer ranges in which their gradients are reduced, and how their backwards are split for it.

    The ranges are those of the common refinement of all pipelines' cuts. With overlap they are divided further, so that a
    reduction can begin while the backward of earlier layers goes on. ZeRO 2 and 3 always divide: they scatter gradients at
    every micro-batch, so that no more than a bucket or two of them is ever whole. Each bucket has at least
    BUCKET_PARAMETERS, but for the first layers of a range, which get what is left.
    """
    transformer = plan.transformer
    refined = common_refinement([r for lane in lanes for r in lane.layers])
    per_bucket = max(1, -(-BUCKET_PARAMETERS // layer_parameters(transformer)))
    buckets: list[LayerRange] = []
    for start, stop in refined:
        if len(holders(lanes, (start, stop), transformer)) < 2:
            continue
        if not plan.overlap_gradients and plan.zero_stage < 2:
            buckets.append((start, stop))
            continue
        # From the last layer down, as the backward goes: the smallest bucket is the first layers' one.
        bounds = [start, *sorted(range(stop, start, -per_bucket))]
        buckets += [(a, b) for a, b in pairwise(bounds)]
    split = {2: "backward", 3: "all"}.get(plan.zero_stage, "last" if plan.overlap_gradients else "none")
    result = []
    for lane in lanes:
        own = tuple(b for b in buckets if any(start <= b[0] and b[1] <= stop for start, stop in lane.layers))
        complete = sum(b - a for a, b in own) == sum(b - a for a, b in lane.layers)
        result.append(replace(lane, buckets=own, split=split if own and complete else "none"))
    return result


# --- Schedules -------------------------------------------------------------------------------------------------------


def _gpipe(lane: Lane, depth: int, position: int) -> Iterator[Work]:
    """All forwards, then all backwards (Huang et al., 2019). Backwards in order, so that gradients accumulate as in 1F1B."""
    for m in range(lane.micro_batches):
        yield Forward(m, lane.layers[0])
    for m in range(lane.micro_batches):
        yield Backward(m, lane.layers[0])


def _one_forward_one_backward(lane: Lane, depth: int, position: int) -> Iterator[Work]:
    """Warm-up forwards, then one forward and one backward in turn, then the rest (PipeDream-flush, Narayanan et al., 2021)."""
    warm_up = min(depth - position - 1, lane.micro_batches)
    for m in range(warm_up):
        yield Forward(m, lane.layers[0])
    for m in range(warm_up, lane.micro_batches):
        yield Forward(m, lane.layers[0])
        yield Backward(m - warm_up, lane.layers[0])
    for m in range(lane.micro_batches - warm_up, lane.micro_batches):
        yield Backward(m, lane.layers[0])


SCHEDULES: Mapping[str, Callable[[Lane, int, int], Iterator[Work]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
}
"""Schedule name to the order of one lane's work, given the pipeline's depth and the stage's position in it."""


def in_flight(schedule: str, depth: int, position: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage holds at once, at `position` of a pipeline of `depth` stages."""
    return micro_batches if schedule == "gpipe" else min(depth - position, micro_batches)


# --- Instructions ----------------------------------------------------------------------------------------------------


def _instructions(plan: Plan, lane: Lane, shared_ends: Mapping[LayerRange, set[str]]) -> Iterator[Instruction]:
    """The instructions of one lane: its schedule with the messages, reductions and gathers that its work needs."""
    pipeline = plan.pipelines[lane.pipeline]
    position = pipeline.visiting_order.index(lane.stage)
    each = plan.zero_stage >= 2  # gradients are scattered at every micro-batch, not once for all
    ends = tuple(end for end, held_by in shared_ends.items() if lane.name in held_by)
    for work in SCHEDULES[plan.schedule](lane, len(pipeline.stages), position):
        m, (start, stop) = work.micro_batch, work.layers
        if isinstance(work, Forward):
            yield from (RecvActivation(m, e.layer, e.peer, e.sequences) for e in lane.previous if e.layer == start)
            yield from _forward(lane, m, work.layers)
            yield from (SendActivation(m, e.layer, e.peer, e.sequences) for e in lane.next if e.layer == stop)
            continue
        yield from (RecvGradient(m, e.layer, e.peer, e.sequences) for e in lane.next if e.layer == stop)
        last = m == lane.micro_batches - 1
        sends = [SendGradient(m, e.layer, e.peer, e.sequences) for e in lane.previous if e.layer == start]
        # The ends are whole on their lanes under every ZeRO stage, so that one sum of all micro-batches is enough.
        yield from _backward(lane, m, work.layers, sends, ends if last else (), each or last, m if each else None)
    yield OptimizerStep()
    if plan.zero_stage >= 1:
        # Under ZeRO 3 the layers are gathered at every micro-batch; the ends stay whole, and only their states are sharded.
        held = [*ends, *(lane.buckets if plan.zero_stage < 3 else ())]
        yield from (GatherParameters(layers) for layers in sorted(held))


def _shared_ends(plan: Plan, lanes: list[Lane]) -> dict[LayerRange, set[str]]:
    """The embedding `(0, 0)` and the head `(n, n)`, where several lanes hold them, with the names of those lanes."""
    n = plan.transformer.layers
    held_by = {end: {lane.name for lane in holders(lanes, end, plan.transformer)} for end in ((0, 0), (n, n))}
    return {end: names for end, names in held_by.items() if len(names) > 1}


def _forward(lane: Lane, m: int, layers: LayerRange) -> Iterator[Instruction]:
    """The forward of one chunk; under ZeRO 3 part by part, the next part's parameters gathered meanwhile."""
    parts = lane.parts(layers, m, backward=False)
    if lane.split != "all":
        yield Forward(m, layers)
        return
    yield GatherParameters(parts[0], m)
    for i, part in enumerate(parts):
        if i + 1 < len(parts):
            yield GatherParameters(parts[i + 1], m)
        yield Forward(m, part)


def _backward(
    lane: Lane,
    m: int,
    layers: LayerRange,
    sends: list[SendGradient],
    ends: tuple[LayerRange, ...],
    reduce: bool,
    label: int | None,
) -> Iterator[Instruction]:
    """The backward of one chunk, from its last layers to its first, each part followed by the reductions it allows.

    The gradient goes to the previous stage, which waits for it, before the last part is reduced.
    """
    parts = lane.parts(layers, m, backward=True)[::-1]
    if lane.split == "all":
        yield GatherParameters(parts[0], m, backward=True)
    for i, (start, stop) in enumerate(parts):
        if lane.split == "all" and i + 1 < len(parts):
            yield GatherParameters(parts[i + 1], m, backward=True)
        yield Backward(m, (start, stop))
        if i == len(parts) - 1:
            yield from sends
        if not reduce:
            continue
        # The head's gradient is there after the first part of the backward, the embedding's after the last; all lanes
        # reduce in the same order, so that blocking collectives could not cross.
        if i == 0:
            yield from (ReduceGradients(end) for end in ends if end[0] > 0)
        inside = [b for b in lane.buckets if start <= b[0] and b[1] <= stop]
        yield from (ReduceGradients(bucket, label) for bucket in reversed(inside))
        if i == len(parts) - 1:
            yield from (ReduceGradients(end) for end in ends if end == (0, 0))
