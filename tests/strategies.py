"""Random valid worlds for hypothesis: clusters, tiny transformers, and plans of the one for the other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from partition.drafts import expert_divisions
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node, WideAreaLink
from sim.spec.compile import holders, lanes_of
from sim.spec.counts import RECOMPUTE
from sim.spec.gpu import gpu_kind
from sim.spec.plan import COUNTED_SCHEDULES, SLICED_SCHEDULES, LayerRange, Pipeline, Plan, Replica, Stage
from sim.spec.stack import Stack
from sim.spec.transformer import Moe, Transformer

DEGREES = (1, 2, 4)
"""Tensor-parallel degrees: they divide the heads, the widths and the vocabulary of every model here."""


@st.composite
def clusters(draw: DrawFn, max_nodes: int = 3) -> Cluster:
    """Clusters of one to three nodes of up to eight GPUs: any kinds and links, some with racks, some with two sites.

    All kinds support fp16 and fp32.
    """
    count = draw(st.integers(1, max_nodes))
    two_sites = count > 1 and draw(st.booleans())
    nodes = []
    for i in range(count):
        gpus = draw(st.sampled_from((1, 2, 4, 8)))
        kind, intra = draw(st.sampled_from((("A100-80GB-SXM", "nvlink"), ("V100-16GB-SXM", "nvlink"), ("RTX4090", "pcie4"))))
        rate = draw(st.sampled_from((12e9, 24e9, 300e9)))
        node = Node(
            name=f"n{i}",
            gpu=gpu_kind(kind),
            gpus=gpus,
            intra=Intra(intra, rate, gpus_per_switch=draw(st.sampled_from((2, 4))), host_bandwidth_bytes_per_s=rate / 2),
            nic=Nic(
                kind=draw(st.sampled_from(("ethernet", "roce", "infiniband"))),
                bandwidth_bytes_per_s=draw(st.sampled_from((1.25e9, 12.5e9, 50e9))),
                count=draw(st.sampled_from([n for n in (1, 2, 4) if n <= gpus])),
            ),
            site=("east", "west")[i % 2] if two_sites else "",
            rack=draw(st.sampled_from((None, "r0", "r1"))),
            host_memory_bytes=draw(st.sampled_from((None, 2**40, 503_000_000_001))),
        )
        nodes.append(node)
    fabric = Fabric(draw(st.sampled_from((0.0, 50e-6))), draw(st.sampled_from((1.0, 4.0))))
    wan = (WideAreaLink(("east", "west"), 0.125e9, 10e-3),) if two_sites else ()
    return Cluster("random", tuple(nodes), fabric, wan)


@st.composite
def models(draw: DrawFn) -> Transformer:
    """Transformers of up to eight layers. Of the wide ones a gradient bucket has one or two layers, of the others all; heads take
    less than a layer, or more."""
    hidden = draw(st.sampled_from((64, 1536, 2048)))
    return Transformer(
        name="random",
        layers=draw(st.integers(1, 8)),
        hidden=hidden,
        ffn=4 * hidden,
        heads=8,
        kv_heads=draw(st.sampled_from((4, 8))),
        vocab=draw(st.sampled_from((96, 4096))),
        tied_embeddings=draw(st.booleans()),
    )


@st.composite
def mixtures(draw: DrawFn) -> Transformer:
    """Transformers with a mixture of experts in the place of their MLPs."""
    dense = draw(models())
    shared = draw(st.integers(0, 1))
    experts = Moe(draw(st.sampled_from((2, 4, 8))), draw(st.integers(1, 2)), dense.hidden, shared, 64 * shared)
    return replace(dense, experts=experts)


@st.composite
def plans(draw: DrawFn, cluster: Cluster, model: Transformer) -> Plan:
    """Plans of up to three pipelines of up to three stages.

    The pipelines differ in stages, cuts, devices, degrees, replicas, micro-batch size and count; under ZeRO 2 and 3 all but
    cuts and counts. Stages hold as many layer ranges as the schedule takes. End stages may be empty, replicas take uneven
    shares, some devices are left over; some schedules take sequences in slices. ZeRO may divide over shard groups.
    """
    left = draw(st.permutations([device.name for device in cluster.devices]))
    zero_stage = draw(st.integers(0, 3))
    depths = [draw(st.integers(1, min(3, model.layers + 2, len(left))))]
    for _ in range(draw(st.integers(0, 2))):
        free = len(left) - sum(depths)
        depth = depths[0] if zero_stage >= 2 else draw(st.integers(1, min(3, model.layers + 2)))
        if depth <= free:
            depths.append(depth)
    spare = len(left) - sum(depths)
    folds = all(_has_room(model.layers, depth, 2) for depth in depths)
    once = ("gpipe", "1f1b", "split-1f1b", "eager-1f1b", "interleaved", "zb-1p", "zb-2p")
    schedule = draw(st.sampled_from((*once, *(("zb-v",) if folds else ()))))
    cuts: list[list[tuple[LayerRange, ...]]] = []
    counts: list[int] = []
    for p, depth in enumerate(depths):
        same = p > 0 and zero_stage >= 2
        cuts.append(cuts[0] if same else draw(_cuts(model.layers, depth, schedule)))
        counts.append(counts[0] if same else draw(st.integers(1, 5)))
    pipelines = []
    for cut, micro_batches in zip(cuts, counts, strict=True):
        micro_batch = draw(st.integers(1, 4))
        stages = []
        for layers in cut:
            wanted = draw(st.integers(1, min(3, micro_batch)))
            replicas: list[tuple[str, ...]] = []
            for r in range(wanted):
                base = 0 if r else 1  # what the stage was promised; all beyond it comes from the spare devices
                fitting = [degree for degree in DEGREES if degree - base <= spare]
                if not fitting:
                    break
                degree = draw(st.sampled_from(fitting))
                spare -= degree - base
                replicas.append(tuple(left[:degree]))
                left = left[degree:]
            shares = draw(_shares(micro_batch, len(replicas)))
            mode = draw(st.sampled_from(RECOMPUTE))
            held = sum(stop - start for start, stop in layers)
            some = draw(st.none() | st.integers(0, held)) if mode != "none" else None
            rest = "none" if some is None else draw(st.sampled_from(RECOMPUTE[: RECOMPUTE.index(mode)]))
            stages.append(Stage(tuple(map(Replica, replicas, shares)), layers, mode, some, rest))
        pipelines.append(Pipeline(micro_batch, micro_batches, tuple(stages)))
    if schedule in COUNTED_SCHEDULES and zero_stage < 2 and draw(st.booleans()):
        pipelines = [pipeline.holding(draw(in_flight(pipeline))) for pipeline in pipelines]
    sliced = schedule in SLICED_SCHEDULES and zero_stage < 2
    made = Plan(
        cluster=cluster.name,
        model=model,
        sequence_length=draw(st.sampled_from((16, 128))),
        sequence_slices=draw(st.sampled_from((1, 1, 2, 4))) if sliced else 1,
        global_batch=sum(pipeline.sequences for pipeline in pipelines),
        pipelines=tuple(pipelines),
        precision=draw(st.sampled_from(("fp16", "fp32"))),
        schedule=schedule,
        zero_stage=zero_stage,
        sequence_parallel=draw(st.booleans()),
        overlap_gradients=draw(st.booleans()),
        gradient_precision=draw(st.sampled_from(("fp32", "bf16"))),
        optimizer=draw(st.sampled_from(("adamw", "sgd"))),
    )
    return replace(made, shard_group=draw(st.sampled_from(_shard_groups(made)))) if zero_stage else made


@st.composite
def mixture_plans(draw: DrawFn, cluster: Cluster, model: Transformer) -> Plan:
    """Plans of alike pipelines, whose copies may divide the experts of a model, whole ones or their columns, and sequences."""
    names = draw(st.permutations([device.name for device in cluster.devices]))
    tensor = draw(st.sampled_from([degree for degree in DEGREES if degree <= len(names)]))
    context = draw(st.sampled_from([ranks for ranks in (1, 2) if tensor * ranks <= len(names)]))
    size = tensor * context
    depth = draw(st.integers(1, min(3, model.layers, len(names) // size)))
    replicas = draw(st.integers(1, min(2, len(names) // (size * depth))))
    count = draw(st.integers(1, min(4, len(names) // (size * depth * replicas))))
    schedule = draw(st.sampled_from(("gpipe", "1f1b", "split-1f1b", "eager-1f1b", "zb-1p", "zb-2p")))
    cuts = draw(_cuts(model.layers, depth, schedule))
    groups = iter([tuple(names[at : at + size]) for at in range(0, len(names) - size + 1, size)])
    micro_batches = draw(st.integers(1, 4))
    pipelines = tuple(
        Pipeline(
            replicas, micro_batches, tuple(Stage(tuple(Replica(next(groups), 1) for _ in range(replicas)), cut) for cut in cuts)
        )
        for _ in range(count)
    )
    divisions = expert_divisions(model, count * replicas * context, tensor)
    expert_parallel, expert_tensor_parallel = draw(st.sampled_from(divisions))
    return Plan(
        cluster=cluster.name,
        model=model,
        sequence_length=draw(st.sampled_from((16, 128))),
        global_batch=sum(pipeline.sequences for pipeline in pipelines),
        pipelines=pipelines,
        precision=draw(st.sampled_from(("fp16", "fp32"))),
        schedule=schedule,
        zero_stage=draw(st.integers(0, 3)),
        sequence_parallel=expert_tensor_parallel is not None or draw(st.booleans()),
        context_parallel=context,
        expert_parallel=expert_parallel,
        expert_tensor_parallel=expert_tensor_parallel,
        overlap_gradients=draw(st.booleans()),
    )


def _shard_groups(plan: Plan) -> list[int | None]:
    """All that divides the number of copies of every layer, and of both ends."""
    (lanes, _), n = lanes_of(plan), plan.transformer.layers
    copies = [len(holders(lanes, layers, plan.transformer)) for layers in [(0, 0), *((i, i + 1) for i in range(n)), (n, n)]]
    return [None, *(size for size in range(1, min(copies) + 1) if all(count % size == 0 for count in copies))]


@st.composite
def in_flight(draw: DrawFn, pipeline: Pipeline) -> list[int]:
    """How many micro-batches the stages of a pipeline hold under 1F1B, from one that all hold to more than there are."""
    counts: dict[int, int] = {}
    held = 1
    for s in reversed(pipeline.visiting_order):
        held += draw(st.integers(0, 3))
        counts[s] = held
    return [counts[s] for s in range(len(counts))]


def stacks() -> SearchStrategy[Stack]:
    """Software that loses time in every way that a stack can, or in none."""
    return st.builds(
        Stack,
        st.just("any"),
        flash_attention=st.booleans(),
        megatron_softmax=st.booleans(),
        blocking_messages=st.booleans(),
        host_s=st.sampled_from((0.0, 1e-6, 50e-6)),
        tensor_host_s=st.sampled_from((0.0, 1e-6, 200e-6)),
        ring_step_s=st.sampled_from((0.0, 50e-6)),
        message_s=st.sampled_from((0.0, 1e-2)),
        message_nodes=st.sampled_from((0.0, 2.0)),
        message_lane_nodes=st.sampled_from((0.0, 2.0)),
        micro_batch_s=st.sampled_from((0.0, 1e-4)),
        gradient_bytes=st.sampled_from((0.0, 8.0)),
        tensor_overlap=st.sampled_from((0.0, 0.5, 1.0)),
        node_collective_scale=st.sampled_from((0.25, 1.0)),
        collective_scale=st.sampled_from((0.5, 1.0)),
        overlap_slowdown=st.sampled_from((0.0, 0.2)),
    )


def worlds() -> SearchStrategy[tuple[Cluster, Plan]]:
    """A cluster and a plan for it (its model is `plan.transformer`)."""

    def with_plan(parts: tuple[Any, Any]) -> SearchStrategy[tuple[Cluster, Plan]]:
        cluster, model = parts
        return st.tuples(st.just(cluster), (plans if model.experts is None else mixture_plans)(cluster, model))

    return st.tuples(clusters(), models() | models() | mixtures()).flatmap(with_plan)


def _has_room(layers: int, depth: int, chunks: int) -> bool:
    """Whether so many stages can hold so many layer ranges each, of which only the first and the last may be empty."""
    return depth * chunks <= layers + (2 if depth > 1 or chunks == 1 else 0)


@st.composite
def _cuts(draw: DrawFn, layers: int, depth: int, schedule: str) -> list[tuple[LayerRange, ...]]:
    """The layer ranges of each stage of a pipeline, of which the first and the last may be empty unless one stage has both."""
    chunks = {"zb-v": 2}.get(schedule, 1)
    if schedule == "interleaved":
        chunks = draw(st.sampled_from([count for count in (1, 2, 3) if _has_room(layers, depth, count)]))
    count, least = depth * chunks, 1 if depth == 1 and chunks > 1 else 0
    inner = draw(st.sets(st.integers(least, layers - least), min_size=count - 1, max_size=count - 1))
    ranges = list(pairwise([0, *sorted(inner), layers]))
    places = [list(range(depth)), list(range(depth))[:: -1 if schedule == "zb-v" else 1]]
    visits = [stage for chunk in range(chunks) for stage in places[chunk % 2]]
    return [tuple(r for r, stage in zip(ranges, visits, strict=True) if stage == s) for s in range(depth)]


@st.composite
def _shares(draw: DrawFn, total: int, count: int) -> list[int]:
    """Whole numbers above zero that sum to the total."""
    inner = draw(st.sets(st.integers(1, max(1, total - 1)), min_size=count - 1, max_size=count - 1))
    return [b - a for a, b in pairwise([0, *sorted(inner), total])]
