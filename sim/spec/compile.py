"""Compiling a plan to its program, in small passes: lanes, schedule, messages, reductions.

The order of a lane's forwards and backwards is its schedule's (`sim.spec.schedules`); messages, gradient reductions and
parameter gathers are added by rules that do not know the schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from sim.spec.counts import layer_parameters
from sim.spec.plan import LayerRange, Pipeline, Plan, Stage
from sim.spec.program import (
    BackwardInput,
    BackwardWeight,
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
from sim.spec.schedules import SCHEDULES, Work, check_ranges, order_of
from sim.spec.transformer import Transformer

BUCKET_PARAMETERS = 40_000_000
"""Fewest parameters of a gradient bucket that overlaps the backward (Megatron-LM's distributed data parallel default)."""

MOST_INSTRUCTIONS = 10_000_000
"""The largest program that is compiled; to simulate it takes about three minutes and 10 GB. 16,384 GPUs need a tenth of it."""


def compile_plan(plan: Plan) -> Program:
    """The program of a plan. Raises InputError, in one line, for what a plan can say and the compiler cannot yet emit."""
    lanes, ends = lanes_of(plan)
    return Program(tuple(replace(lane, instructions=tuple(lane_instructions(plan, lane, ends))) for lane in lanes))


def lanes_of(plan: Plan) -> tuple[list[Lane], Mapping[LayerRange, set[str]]]:
    """The lanes of a plan without instructions, and what `lane_instructions` must know of the lanes that share an end.

    Raises InputError as `compile_plan` does.
    """
    _refuse_unsupported(plan)
    buckets = _buckets(plan)
    lanes = [lane for p in range(len(plan.pipelines)) for lane in pipeline_lanes(plan, p, buckets)]
    _check_shard_group(plan, lanes)
    return lanes, _shared_ends(plan, lanes)


def _refuse_unsupported(plan: Plan) -> None:
    check_experts(plan)
    for p, pipeline in enumerate(plan.pipelines):
        check_ranges(plan.schedule, pipeline, f"pipelines[{p}]")
    if plan.zero_stage >= 2:
        shapes = {(p.micro_batches, p.in_flight, tuple(stage.layers for stage in p.stages)) for p in plan.pipelines}
        if len(shapes) > 1:
            raise InputError(
                f"zero_stage {plan.zero_stage} shares parameters or gradients at every micro-batch, so that all pipelines need "
                "equal cuts, micro_batches and in_flight, but they differ; accepted: zero_stage 0 or 1"
            )
    count = instruction_estimate(plan)
    if count > MOST_INSTRUCTIONS:
        raise InputError(
            f"the plan has about {count:,} instructions in its program, but at most {MOST_INSTRUCTIONS:,} are compiled; "
            "larger micro-batches make fewer of them"
        )


def check_experts(plan: Plan) -> None:
    """Nothing. Raises InputError where experts cannot be divided as a plan says."""
    if plan.whole_experts:
        _check_whole_experts(plan)
    if plan.expert_parallel > 1:
        _check_divided_experts(plan)


def _check_divided_experts(plan: Plan) -> None:
    """Raises InputError where the experts cannot be divided over copies that are alike."""
    degree, moe = plan.expert_parallel, plan.transformer.experts
    if moe is None or moe.experts % degree:
        has = "none" if moe is None else moe.experts
        raise InputError(f"expert_parallel divides the experts evenly, but {plan.transformer.name} has {has}, and it is {degree}")
    shapes = {
        (p.in_flight, tuple((s.layers, tuple(len(r.devices) for r in s.replicas)) for s in p.stages)) for p in plan.pipelines
    }
    if len(shapes) > 1:
        raise InputError(
            f"expert_parallel {degree} needs pipelines of equal cuts, degrees and in_flight, but they differ; accepted: 1"
        )
    for s, stage in enumerate(plan.pipelines[0].stages):
        degrees = {len(replica.devices) // plan.context_parallel for replica in stage.replicas}
        copies = len(plan.pipelines) * len(stage.replicas) * plan.context_parallel
        needed = plan.expert_copies(max(degrees))
        if len(degrees) > 1 or copies % needed:
            shown = f"{copies} copies of {', '.join(map(str, sorted(degrees)))} tensor ranks"
            on_ranks = f" with whole experts on {max(degrees)} tensor ranks" if plan.whole_experts and max(degrees) > 1 else ""
            raise InputError(
                f"expert_parallel {degree}{on_ranks} needs a multiple of {needed} copies of a stage (pipelines x replicas x "
                f"context ranks) that are alike, but stage {s} has {shown}"
            )
    if plan.shard_group is not None:
        raise InputError(f"expert_parallel {degree} takes shard_group null, but got {plan.shard_group}")


def _check_whole_experts(plan: Plan) -> None:
    """Raises InputError where tensor ranks cannot have whole experts."""
    if plan.transformer.experts is None:
        raise InputError(
            f"expert_tensor_parallel 1 is of mixtures of experts, but {plan.transformer.name} is none; accepted: null"
        )
    degrees = {len(replica.devices) // plan.context_parallel for _, _, _, replica in plan.replicas()}
    if max(degrees) > 1 and not plan.sequence_parallel:
        raise InputError(
            "expert_tensor_parallel 1 needs sequence_parallel true, for each tensor rank sends its own tokens to their experts"
        )
    unfit = sorted(degree for degree in degrees if plan.expert_parallel % degree)
    if unfit:
        raise InputError(
            f"expert_tensor_parallel 1 needs an expert_parallel that all tensor-parallel degrees divide, but it is "
            f"{plan.expert_parallel}, and there are stages of {', '.join(map(str, unfit))} tensor ranks"
        )


def _check_shard_group(plan: Plan, lanes: list[Lane]) -> None:
    """Raises InputError unless the groups that ZeRO divides over are equal and complete."""
    group = plan.shard_group
    if group is None:
        return
    n = plan.transformer.layers
    for layers in [(0, 0), *common_refinement([r for lane in lanes for r in lane.layers]), (n, n)]:
        count = len(holders(lanes, layers, plan.transformer)) * plan.context_parallel
        if count % group:
            raise InputError(
                f"shard_group {group} must divide the number of replicas of every layer, but layers {layers[0]} to {layers[1]} "
                f"have {count}; accepted: null (all replicas), or a divisor"
            )


def instruction_estimate(plan: Plan) -> int:
    """How many instructions the program of a plan has, without compiling it; those that come once per iteration left out.

    Never too few of the others. Uneven replicas may have fewer messages than is assumed here.
    """
    per_bucket = bucket_layers(plan.transformer)
    halves = 2 if SCHEDULES[plan.schedule].splits_backward else 1
    total = 0
    for pipeline in plan.pipelines:
        lanes = [len(stage.replicas) for stage in pipeline.stages]
        # Of neighbours whose shares are cut at different places.
        messages = sum(lanes[a] + lanes[b] - 1 for (a, _), (b, _) in pairwise(pipeline.chunks) if a != b)
        work = 0
        for s, (start, stop) in pipeline.chunks:
            parts = max(1, -(-(stop - start) // per_bucket))
            # A forward and a backward; from ZeRO 2 on backwards and reductions by parts, under ZeRO 3 forwards and gathers too.
            work += lanes[s] * {2: 1 + (halves + 1) * parts, 3: (halves + 4) * parts}.get(plan.zero_stage, 1 + halves)
        messages *= 4  # sent and received, activations and gradients
        total += pipeline.micro_batches * plan.sequence_slices * (work + messages)
    return total


# --- Lanes -----------------------------------------------------------------------------------------------------------


def lane_name(pipeline: int, stage: int, replica: int, replicas: int) -> str:
    """The lane's name: `p0s1`, or `p0s1r2` where the stage has several replicas."""
    return f"p{pipeline}s{stage}" + (f"r{replica}" if replicas > 1 else "")


def pipeline_lanes(plan: Plan, p: int, buckets: Buckets | None = None) -> list[Lane]:
    """The lanes of the pipeline of this index with their neighbours, without instructions; if none are given, without buckets."""
    pipeline, lanes = plan.pipelines[p], []
    chunks = pipeline.chunks
    # From one chunk to the next of the same stage nothing is sent.
    crossings = [(a, b, layer) for (a, (_, layer)), (b, _) in pairwise(chunks) if a != b]
    for s, stage in enumerate(pipeline.stages):
        layers = tuple(sorted(stage.layers))
        own_buckets, split = ((), "none") if buckets is None else buckets[layers]
        for r, share in enumerate(_shares(stage)):
            previous = [edge for a, b, layer in crossings if b == s for edge in _edges(pipeline, p, a, share, layer)]
            following = [edge for a, b, layer in crossings if a == s for edge in _edges(pipeline, p, b, share, layer)]
            lane = Lane(
                name=lane_name(p, s, r, len(stage.replicas)),
                pipeline=p,
                stage=s,
                replica=r,
                devices=stage.replicas[r].devices,
                layers=layers,
                sequences=share,
                micro_batches=pipeline.micro_batches,
                embedding=s == chunks[0][0],
                head=s == chunks[-1][0],
                previous=tuple(previous),
                next=tuple(following),
                buckets=own_buckets,
                split=split,
                context_parallel=plan.context_parallel,
                sequence_slices=plan.sequence_slices,
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


def _edges(pipeline: Pipeline, p: int, neighbour: int, share: Sequences, layer: int) -> list[Edge]:
    """What a lane with this share exchanges with each replica of a neighbouring stage: the sequences both take."""
    stage = pipeline.stages[neighbour]
    edges = []
    for r, other in enumerate(_shares(stage)):
        common = (max(share[0], other[0]), min(share[1], other[1]))
        if common[0] < common[1]:
            edges.append(Edge(layer, lane_name(p, neighbour, r, len(stage.replicas)), common))
    return edges


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


def bucket_layers(transformer: Transformer) -> int:
    """Layers of a gradient bucket that overlaps the backward: the fewest, one at least, of BUCKET_PARAMETERS."""
    return -(-BUCKET_PARAMETERS // layer_parameters(transformer))


Buckets: TypeAlias = Mapping[tuple[LayerRange, ...], tuple[tuple[LayerRange, ...], str]]
"""By the layers of a lane: its `buckets` and its `split`."""


def _buckets(plan: Plan) -> Buckets:
    """The layer ranges in which the lanes' gradients are reduced, and how their backwards are split for it.

    The ranges are those of the common refinement of all pipelines' cuts. With overlap they are divided further, so that a
    reduction can begin while the backward of earlier layers goes on. ZeRO 2 and 3 always divide: they scatter gradients at
    every micro-batch, so that no more than a bucket or two of them is ever whole. Each bucket has at least
    BUCKET_PARAMETERS, but for the first layers of a range, which get what is left.
    """
    cuts: Counter[tuple[LayerRange, ...]] = Counter()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            cuts[tuple(sorted(stage.layers))] += len(stage.replicas)
    per_bucket = bucket_layers(plan.transformer)
    buckets: list[LayerRange] = []
    for start, stop in common_refinement([r for cut in cuts for r in cut]):
        copies = sum(count for cut, count in cuts.items() if any(a <= start and stop <= b for a, b in cut))
        if copies * plan.context_parallel < 2:
            continue
        if not plan.overlap_gradients and plan.zero_stage < 2:
            buckets.append((start, stop))
            continue
        # From the last layer down, as the backward goes: the smallest bucket is the first layers' one.
        bounds = [start, *sorted(range(stop, start, -per_bucket))]
        buckets += [(a, b) for a, b in pairwise(bounds)]
    split = {2: "backward", 3: "all"}.get(plan.zero_stage, "last" if plan.overlap_gradients else "none")
    owned: dict[tuple[LayerRange, ...], tuple[tuple[LayerRange, ...], str]] = {}
    for cut in cuts:
        own = tuple(b for b in buckets if any(start <= b[0] and b[1] <= stop for start, stop in cut))
        complete = sum(b - a for a, b in own) == sum(b - a for a, b in cut)
        owned[cut] = own, split if own and complete else "none"
    return owned


# --- Instructions ----------------------------------------------------------------------------------------------------


def lane_instructions(plan: Plan, lane: Lane, shared_ends: Mapping[LayerRange, set[str]]) -> Iterator[Instruction]:
    """The instructions of one lane: its schedule with the messages, reductions and gathers that its work needs."""
    pipeline = plan.pipelines[lane.pipeline]
    position = pipeline.visiting_order.index(lane.stage)
    order = order_of(plan.schedule, pipeline, position, lane.micro_batches, lane.sequence_slices)
    each = plan.zero_stage >= 2  # gradients are scattered at every micro-batch, not once for all
    ends = tuple(end for end, held_by in shared_ends.items() if lane.name in held_by)
    entering = [[(e.layer, e.peer, e.sequences) for e in lane.previous if e.layer == start] for start, _ in lane.layers]
    leaving = [[(e.layer, e.peer, e.sequences) for e in lane.next if e.layer == stop] for _, stop in lane.layers]
    last_backward = lane.last_backward
    for kind, m, chunk in order:
        layers = lane.layers[chunk]
        if kind is Forward:
            for edge in entering[chunk]:
                yield RecvActivation(m, *edge)
            yield from _forward(lane, m, layers)
            for edge in leaving[chunk]:
                yield SendActivation(m, *edge)
            continue
        sends: list[SendGradient] = []
        if kind is not BackwardWeight:
            for edge in leaving[chunk]:
                yield RecvGradient(m, *edge)
            sends = [SendGradient(m, *edge) for edge in entering[chunk]]
        last = m == last_backward
        if not (each or last):  # nothing is divided or exchanged
            yield kind(m, layers)
            yield from sends
            continue
        reduce = kind is not BackwardInput
        # The ends are whole on their lanes under every ZeRO stage, so that one sum of all micro-batches is enough.
        here = [end for end in ends if last and layers == (lane.layers[0] if end == (0, 0) else lane.layers[-1])]
        yield from _backward(lane, kind, m, layers, sends, here, reduce, m if each else None)
    yield OptimizerStep()
    if plan.zero_stage >= 1:
        # Under ZeRO 3 the layers are gathered at every micro-batch; the ends stay whole, and only their states are sharded.
        held = [*ends, *(lane.buckets if plan.zero_stage < 3 else ())]
        yield from (GatherParameters(layers) for layers in sorted(held))


def _shared_ends(plan: Plan, lanes: list[Lane]) -> dict[LayerRange, set[str]]:
    """The embedding `(0, 0)` and the head `(n, n)`, where several tensor-parallel groups hold them, with their lanes' names."""
    n = plan.transformer.layers
    held_by = {end: {lane.name for lane in holders(lanes, end, plan.transformer)} for end in ((0, 0), (n, n))}
    return {end: names for end, names in held_by.items() if len(names) * plan.context_parallel > 1}


def _forward(lane: Lane, m: int, layers: LayerRange) -> Iterator[Instruction]:
    """The forward of one chunk; under ZeRO 3 part by part, the next part's parameters gathered meanwhile."""
    if not lane.gathers(layers):
        yield Forward(m, layers)
        return
    parts = lane.parts(layers, m, backward=False)
    yield GatherParameters(parts[0], m)
    for i, part in enumerate(parts):
        if i + 1 < len(parts):
            yield GatherParameters(parts[i + 1], m)
        yield Forward(m, part)


def _backward(
    lane: Lane,
    kind: type[Work],
    m: int,
    layers: LayerRange,
    sends: list[SendGradient],
    ends: list[LayerRange],
    reduce: bool,
    label: int | None,
) -> Iterator[Instruction]:
    """The backward of one chunk, or a half of it, from its last layers to its first, each followed by what it allows to reduce.

    The gradient goes to the previous stage, which waits for it, before the last part is reduced. The weight half takes no
    parameters.
    """
    parts = lane.parts(layers, m, backward=True)[::-1]
    gathers = lane.gathers(layers) and kind is not BackwardWeight
    if gathers:
        yield GatherParameters(parts[0], m, backward=True)
    for i, (start, stop) in enumerate(parts):
        if gathers and i + 1 < len(parts):
            yield GatherParameters(parts[i + 1], m, backward=True)
        yield kind(m, (start, stop))
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
