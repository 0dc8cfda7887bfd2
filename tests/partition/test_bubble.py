"""The bound of filling and draining against closed forms, and against pipelines that use all that they have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from partition.bound import Bound, lower_bound
from partition.bubble import Division, Filling
from sim.cost.feasibility import infeasible
from sim.cost.memory import peak_bytes
from sim.cost.pieces import head_seconds, layer_seconds
from sim.engine import simulate
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node
from sim.spec.counts import RECOMPUTE
from sim.spec.gpu import GpuKind, gpu_kind
from sim.spec.job import Job
from sim.spec.plan import COUNTED_SCHEDULES, SLICED_SCHEDULES, LayerRange, Pipeline, Plan, Replica, Stage
from sim.spec.stack import Stack, stacks
from sim.spec.transformer import Moe, Transformer
from tests.strategies import in_flight
from tests.worlds import LOSSLESS, ideal_gpu

LAYERS = 8
ONE_HEAD = Transformer("one head", LAYERS, hidden=2048, ffn=8192, heads=1, vocab=8, activation="gelu")
"""No lane of it has tensor ranks; with an odd number of tokens it has no context ranks either."""
LENGTH = 4097
"""No number of slices divides it."""


def alike(kind: GpuKind, count: int, **stack: float) -> Cluster:
    """Nodes of one such GPU each on links that take no time."""
    nodes = tuple(Node(f"n{i}", kind, 1, Intra("nvlink", 1e30), Nic("ethernet", 1e30)) for i in range(count))
    return Cluster("alike", nodes, Fabric(0.0, protocol_efficiency=LOSSLESS), stack=Stack("given", **stack))  # type: ignore[arg-type]


def least_s(on: Cluster, work: Job) -> float:
    """The bound by filling and draining alone."""
    kind = on.nodes[0].gpu
    return Filling(on, work, {kind: len(on.nodes)}).least_s(0.0, 1e-9)


# --- Closed forms ----------------------------------------------------------------------------------------------------


def test_gpus_that_can_keep_nothing_wait_for_a_micro_batch_to_go_through_all_layers_and_back() -> None:
    on = alike(replace(ideal_gpu(), memory_bandwidth_bytes_per_s=1e30), 4, context_bytes=1e12)  # no memory is left
    layer = layer_seconds(on.nodes[0].gpu, on.stack, ONE_HEAD, 1, LENGTH)
    head = head_seconds(on.nodes[0].gpu, on.stack, ONE_HEAD, 1, LENGTH)
    way_s = LAYERS * (layer.forward_s + layer.backward_input_s)
    work_s = 64 * (LAYERS * (layer.forward_s + layer.backward_s) + head.forward_s + head.backward_s) / 4
    found = least_s(on, Job(ONE_HEAD, LENGTH, 64))
    assert work_s + 0.9 * way_s < found <= (work_s + way_s) * (1 + 1e-9)


@pytest.mark.parametrize("held", [1, 2, 3])
def test_what_a_gpu_keeps_shortens_the_wait_by_the_work_that_it_is(held: int) -> None:
    # A layer keeps, per token, its input twice over (2 h), query, key, value and result (4 h), and what enters the GELU (4 h) in
    # bf16; not so the results of norms and GELU, which a memory without limits computes again at once, nor the softmax's sum, as
    # selective recomputation is taken to cost nothing. Recomputing as much as would shorten the wait further would take longer,
    # with so large a batch.
    kept_bytes = LENGTH * 2 * (2 + 4 + 4) * 2048
    kind = replace(ideal_gpu(), memory_bandwidth_bytes_per_s=1e30, memory_bytes=held * kept_bytes)
    on = alike(kind, 4, context_bytes=0.0, fragmentation=0.0)
    layer = layer_seconds(kind, on.stack, ONE_HEAD, 1, LENGTH)
    head = head_seconds(kind, on.stack, ONE_HEAD, 1, LENGTH)
    forward_s, back_s, both_s = layer.forward_s, layer.backward_input_s, layer.backward_s
    wait_s = max(
        LAYERS * forward_s - held * forward_s,
        LAYERS * back_s - held * both_s,
        LAYERS * (forward_s + back_s) - held * (forward_s + both_s),
    )
    work_s = 64 * (LAYERS * (forward_s + both_s) + head.forward_s + head.backward_s) / 4
    found = least_s(on, Job(ONE_HEAD, LENGTH, 64))
    assert work_s + 0.8 * wait_s < found <= (work_s + wait_s) * (1 + 1e-9)


def test_the_best_size_of_a_micro_batch_is_between_its_overheads_and_its_wait() -> None:
    kind = ideal_gpu()
    kind = replace(kind, memory_bandwidth_bytes_per_s=1e30, efficiency=replace(kind.efficiency, launch_s=50e-6))
    on, batch = alike(kind, 4, context_bytes=1e12), 256

    def takes(share: int) -> float:
        layer = layer_seconds(kind, on.stack, ONE_HEAD, share, LENGTH)
        head = head_seconds(kind, on.stack, ONE_HEAD, batch, LENGTH)
        work_s = LAYERS * (layer.forward_s + layer.backward_s) * batch / share + head.forward_s + head.backward_s
        return work_s / 4 + LAYERS * (layer.forward_s + layer.backward_input_s)

    best = min(range(1, batch + 1), key=takes)
    assert 1 < best < batch
    assert 0.97 * takes(best) < least_s(on, Job(ONE_HEAD, LENGTH, batch)) <= takes(best) * (1 + 1e-9)


@pytest.mark.parametrize("times", [0.5, 4.0])
def test_gpus_that_can_keep_nothing_wait_for_the_exchange_if_it_takes_longer_than_the_way_back(times: float) -> None:
    on = alike(replace(ideal_gpu(), memory_bandwidth_bytes_per_s=1e30), 4, context_bytes=1e12)  # no memory is left
    kind = on.nodes[0].gpu
    layer = layer_seconds(kind, on.stack, ONE_HEAD, 1, LENGTH)
    head = head_seconds(kind, on.stack, ONE_HEAD, 1, LENGTH)
    forward_s, back_s = LAYERS * layer.forward_s, LAYERS * layer.backward_input_s
    exchange_s = times * back_s
    work_s = 64 * (LAYERS * (layer.forward_s + layer.backward_s) + head.forward_s + head.backward_s) / 4
    divided = [Division({kind: 4}, exchange_s=exchange_s)]
    found = Filling(on, Job(ONE_HEAD, LENGTH, 64), {kind: 4}).least_s(0.0, 1e-9, lambda _: divided)
    wait_s = forward_s + max(back_s, exchange_s)
    assert work_s + 0.9 * wait_s < found <= (work_s + wait_s) * (1 + 1e-9)


def test_layers_that_others_do_at_most_are_all_that_gpus_are_spared() -> None:
    on = alike(replace(ideal_gpu(), memory_bandwidth_bytes_per_s=1e30, memory_bytes=10**15), 4)
    kind, work = on.nodes[0].gpu, Job(ONE_HEAD, LENGTH, 64)
    layer = layer_seconds(kind, on.stack, ONE_HEAD, 1, LENGTH)
    head = head_seconds(kind, on.stack, ONE_HEAD, 1, LENGTH)
    others = 0.25 * 64 * LAYERS
    divided = [Division({kind: 2}, others)]
    left_s = (64 * LAYERS - others) * (layer.forward_s + layer.backward_s) + 64 * (head.forward_s + head.backward_s)
    found = Filling(on, work, {kind: 4}).least_s(0.0, 1e-9, lambda _: divided)
    assert 0.99 * left_s / 2 < found <= left_s / 2 * (1 + 1e-9)


def test_of_several_divisions_of_the_work_the_quickest_counts() -> None:
    on, work = alike(ideal_gpu(), 4), Job(ONE_HEAD, LENGTH, 64)
    kind = on.nodes[0].gpu
    filling = Filling(on, work, {kind: 4})
    slow, quick = Division({kind: 2}), Division({kind: 3})
    assert filling.least_s(0.0, 1e-9, lambda _: [slow, quick]) == filling.least_s(0.0, 1e-9, lambda _: [quick])
    assert filling.least_s(0.0, 1e-9, lambda _: [quick]) < filling.least_s(0.0, 1e-9, lambda _: [slow])


def test_without_overheads_and_with_all_the_memory_there_is_nothing_to_wait_for() -> None:
    kind = replace(ideal_gpu(), memory_bandwidth_bytes_per_s=1e30, memory_bytes=10**15)
    found = lower_bound(alike(kind, 4), Job(ONE_HEAD, LENGTH, 64))
    assert isinstance(found, Bound) and found.bubble_s == 0


def test_the_best_number_of_slices_is_between_their_overheads_and_their_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ideal_gpu()
    kind = replace(kind, memory_bandwidth_bytes_per_s=1e30, efficiency=replace(kind.efficiency, launch_s=1e-6))
    on, batch, length = alike(kind, 4, context_bytes=1e12), 16, 4095  # an odd length: no context ranks

    def takes(share: int, slices: int) -> float:
        size = length // slices
        layers = [layer_seconds(kind, on.stack, ONE_HEAD, share, size, tokens_before=i * size) for i in range(slices)]
        head = head_seconds(kind, on.stack, ONE_HEAD, batch, length)
        layers_s = LAYERS * sum(layer.forward_s + layer.backward_s for layer in layers) * batch / share
        work_s = layers_s + head.forward_s + head.backward_s
        return work_s / 4 + LAYERS * (layers[-1].forward_s + layers[-1].backward_input_s)

    choices = [(share, slices) for share in range(1, batch + 1) for slices in (1, 3, 5, 7, 9, 13, 15)]
    best = min(choices, key=lambda choice: takes(*choice))
    assert 1 < best[1] < 15
    work = Job(ONE_HEAD, length, batch)
    assert 0.97 * takes(*best) < least_s(on, work) <= takes(*best) * (1 + 1e-9)
    monkeypatch.setattr("partition.bubble.slice_counts", lambda length: [1])
    assert least_s(on, work) > takes(*best)  # what is proven of whole sequences does not hold of slices


# --- Below pipelines that use all that they have -----------------------------------------------------------------------


@st.composite
def pipelines(draw: DrawFn) -> tuple[Cluster, Plan]:
    """Pipelines of equal stages over all GPUs of a cluster, whose memory they fill to the last byte, under any stack."""
    depth, degree, replicas = draw(st.integers(1, 5)), draw(st.sampled_from((1, 1, 1, 2, 4))), draw(st.integers(1, 2))
    schedule = draw(st.sampled_from(("gpipe", "1f1b", "split-1f1b", "eager-1f1b", "interleaved", "zb-1p", "zb-2p", "zb-v")))
    chunks = 2 if schedule == "zb-v" else draw(st.integers(2, 3)) if schedule == "interleaved" and depth > 1 else 1
    each = draw(st.integers(1, 3))
    layers = depth * chunks * each
    experts = draw(st.sampled_from((None, None, Moe(8, 1, 2816), Moe(8, 2, 2816), Moe(8, 2, 2816, 1, 1024))))
    model = Transformer("piped", layers, hidden=2048, ffn=5632, heads=16, vocab=96, experts=experts)
    gpus = depth * degree * replicas
    kind = gpu_kind(draw(st.sampled_from(("A100-80GB-SXM", "RTX4090", "RTX3090"))))
    intra = draw(st.sampled_from((Intra("nvlink", 300e9), Intra("pcie4", 24e9))))
    on = Cluster("node", (Node("n", kind, gpus, intra, None),), stack=draw(st.sampled_from(list(stacks().values()))))
    share = draw(st.sampled_from((1, 1, 2, 4)))
    mode, cut = draw(st.sampled_from(("none", "none", "pointwise", "selective", "full"))), []
    for s in range(depth):
        places = [s, 2 * depth - 1 - s] if schedule == "zb-v" else [s + chunk * depth for chunk in range(chunks)]
        cut.append(tuple((place * each, (place + 1) * each) for place in places))
    fewer = draw(st.none() | st.integers(0, chunks * each)) if mode != "none" else None
    rest = draw(st.sampled_from(RECOMPUTE[: RECOMPUTE.index(mode)])) if fewer is not None else "none"

    def stage(s: int, ranges: tuple[LayerRange, ...]) -> Stage:
        first = s * replicas * degree
        lanes = [tuple(f"n/{first + r * degree + i}" for i in range(degree)) for r in range(replicas)]
        return Stage(tuple(Replica(lane, share) for lane in lanes), ranges, mode, fewer, rest)

    count = draw(st.integers(1, 40))
    piped = Pipeline(share * replicas, count, tuple(stage(s, ranges) for s, ranges in enumerate(cut)))
    if schedule in COUNTED_SCHEDULES:
        piped = piped.holding(draw(st.none() | in_flight(piped)))
    context, zero_stage = draw(st.sampled_from((1, degree))), draw(st.integers(0, 3))
    whole = experts is not None and context < degree and draw(st.booleans())
    sliced = schedule in SLICED_SCHEDULES and zero_stage < 2 and context == 1 and not whole
    plan = Plan(
        "node",
        model,
        draw(st.sampled_from((2048, 8192, 32768))),
        piped.sequences,
        (piped,),
        schedule=schedule,
        sequence_slices=draw(st.sampled_from((1, 2, 4, 8, 16))) if sliced else 1,
        zero_stage=zero_stage,
        sequence_parallel=whole or draw(st.booleans()),
        context_parallel=context,
        expert_parallel=degree // context if whole else 1,
        expert_tensor_parallel=1 if whole else None,
        gradient_precision=draw(st.sampled_from(("fp32", "bf16"))),
        offload_optimizer=draw(st.booleans()),
        optimizer="sgd",
    )
    full = replace(kind, memory_bytes=max(peak_bytes(plan, on).values()))
    return replace(on, nodes=(replace(on.nodes[0], gpu=full),)), plan


@settings(max_examples=25, deadline=None)
@given(pipelines())
def test_the_bound_is_below_pipelines_that_fill_all_memory(world: tuple[Cluster, Plan]) -> None:
    check(*world)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(pipelines())
def test_the_bound_is_below_many_pipelines_that_fill_all_memory(world: tuple[Cluster, Plan]) -> None:
    check(*world)


def check(on: Cluster, plan: Plan) -> None:
    """Compares the bound of a plan's job with what the plan takes."""
    assert infeasible(plan, on) is None
    found = lower_bound(on, plan.job())
    assert isinstance(found, Bound)
    assert found.iteration_s <= simulate(plan, on).iteration_s * (1 + 1e-9)
