"""Seconds of instructions, against sums by hand on a layer small enough to count, and against the laws they obey."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.compute import ComputeCost, TensorCollective, optimizer_bytes
from sim.cost.pieces import head_seconds, layer_seconds, slowest
from sim.spec.cluster import Cluster, Intra, Nic, Node
from sim.spec.gpu import Efficiency, GpuKind
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Forward, Lane, OptimizerStep, SendActivation
from sim.spec.reading import InputError
from sim.spec.transformer import Moe, Transformer

NEVER = 1e30  # a rate so high that nothing takes time at it

# Per layer: 4 x 8 x 8 + 3 x 8 x 16 = 640 weights in matmuls. A sequence of 4 tokens: 2 x 4 x 640 = 5120 FLOP of matmuls and
# 4 x 4 x 4 x 8 = 512 of attention, of which causality leaves half. Head: 2 x 4 x 8 x 10 = 640 FLOP.
TINY = Transformer(name="tiny", layers=4, hidden=8, ffn=16, heads=2, vocab=10)
IDEAL = Efficiency(1.0, 0.0, 1.0, 1.0, 0.0)


def kind(
    peak: float = 1.0, bandwidth: float = NEVER, efficiency: Efficiency = IDEAL, name: str = "toy", precision: str = "bf16"
) -> GpuKind:
    return GpuKind(name, 2**40, {precision: peak}, bandwidth, None, 0.0, 1.0, None, efficiency)


def cluster(*kinds: GpuKind) -> Cluster:
    """One node of a single GPU for each kind: n0/0, n1/0, ..."""
    nic = Nic("ethernet", 1e9)
    return Cluster("toy", tuple(Node(f"n{i}", gpu, 1, Intra("pcie4", 1e9), nic) for i, gpu in enumerate(kinds)))


def plan(
    stages: list[tuple[int, int]] | None = None,
    model: Transformer = TINY,
    degree: int = 1,
    recompute: str = "none",
    **fields: object,
) -> Plan:
    """One pipeline; each stage takes the next `degree` devices."""
    cuts = stages or [(0, model.layers)]
    made = tuple(
        Stage((Replica(tuple(f"n{s * degree + i}/0" for i in range(degree)), 1),), (cut,), recompute)
        for s, cut in enumerate(cuts)
    )
    return Plan("toy", model, 4, 2, (Pipeline(1, 2, made),), **fields)  # type: ignore[arg-type]


def lane(plan: Plan, stage: int = 0) -> Lane:
    stages = plan.pipelines[0].stages
    return Lane(
        name=f"p0s{stage}",
        pipeline=0,
        stage=stage,
        replica=0,
        devices=stages[stage].devices,
        layers=stages[stage].layers,
        sequences=(0, 1),
        micro_batches=2,
        embedding=stage == 0,
        head=stage == len(stages) - 1,
    )


def seconds(plan: Plan, cluster: Cluster, instruction: object, stage: int = 0) -> float:
    return ComputeCost(plan, cluster).seconds(lane(plan, stage), instruction)  # type: ignore[arg-type]


# --- By hand ---------------------------------------------------------------------------------------------------------


def test_a_forward_takes_its_flop_at_peak_where_nothing_else_takes_time() -> None:
    assert seconds(plan(), cluster(kind()), Forward(0, (0, 4))) == pytest.approx(4 * (5120 + 256) + 640)


def test_a_backward_takes_twice_the_matmuls_and_two_and_a_half_times_the_attention() -> None:
    assert seconds(plan(), cluster(kind()), Backward(0, (0, 4))) == pytest.approx(4 * (2 * 5120 + 2.5 * 256) + 2 * 640)


def test_the_input_half_has_the_attention_and_the_weight_half_has_matmuls_only() -> None:
    assert seconds(plan(), cluster(kind()), BackwardInput(0, (0, 4))) == pytest.approx(4 * (5120 + 2.5 * 256) + 640)
    assert seconds(plan(), cluster(kind()), BackwardWeight(0, (0, 4))) == pytest.approx(4 * 5120 + 640)


def test_bytes_bound_a_kind_whose_peak_is_never_reached() -> None:
    # Per token in elements of 2 bytes: norms and residuals 10 x 8, rotary 2 x 16, swiglu 3 x 16, attention 4 x 8. Head: norm
    # 2 x 8, and 10 logits of 2 + 4 bytes cast and 4 + 4 in the softmax. Embedding: 2 x 8.
    layer, norm, logits, embedding = 4 * 2 * (80 + 32 + 48 + 32), 4 * 2 * 16, 4 * 10 * 14, 4 * 2 * 16
    slow = cluster(kind(NEVER, 1.0))
    assert seconds(plan(), slow, Forward(0, (0, 4))) == pytest.approx(4 * layer + embedding + norm + logits)
    assert seconds(plan(), slow, Backward(0, (0, 4))) == pytest.approx(2 * (4 * layer + embedding + norm) + logits)


def test_each_kernel_is_launched_and_each_matmul_saturates() -> None:
    # 4 matmuls (query-key-value, output, gate-up, down), attention, 2 norms, 2 residuals, rotary, activation.
    overheads = kind(NEVER, NEVER, Efficiency(0.5, 3.0, 1.0, 1.0, 100.0))
    layer = layer_seconds(overheads, TINY, 1, 4)
    assert layer.forward_s == pytest.approx(4 * 3.0 / 0.5 + 11 * 100)
    assert layer.backward_s == pytest.approx(2 * layer.forward_s)
    assert layer.backward_weight_s == pytest.approx(4 * 3.0 / 0.5 + 4 * 100)


def test_efficiencies_divide_the_rate_they_are_about() -> None:
    ideal, half = kind(2.0, 3.0), kind(2.0, 3.0, Efficiency(0.5, 0.0, 0.5, 0.5, 0.0))
    assert layer_seconds(half, TINY, 1, 4).forward_s == pytest.approx(2 * layer_seconds(ideal, TINY, 1, 4).forward_s)


def test_a_sliding_window_leaves_the_attention_to_the_keys_it_shows() -> None:
    # Window 1 of 4 keys: each token sees itself; by the formula 1 x (1 - 1 / 8) keys, where causality alone leaves 2.
    window = layer_seconds(kind(), replace(TINY, sliding_window=1), 1, 4)
    assert window.attention_s == pytest.approx(512 / 4 * (1 - 1 / 8))
    assert layer_seconds(kind(), replace(TINY, sliding_window=4), 1, 4).attention_s == pytest.approx(256)


def test_two_tensor_parallel_ranks_halve_the_flop_of_each() -> None:
    whole, half = layer_seconds(kind(), TINY, 1, 4), layer_seconds(kind(), TINY, 1, 4, 2)
    assert half.forward_s == pytest.approx(whole.forward_s / 2)
    assert head_seconds(kind(), TINY, 1, 4, 2).forward_s == pytest.approx(head_seconds(kind(), TINY, 1, 4).forward_s / 2)


def test_only_the_chosen_experts_compute() -> None:
    experts = replace(TINY, experts=Moe(experts=4, top_k=1, ffn=16))
    router = 2 * 4 * 8 * 4
    assert layer_seconds(kind(), experts, 1, 4).forward_s == pytest.approx(5120 + 256 + router)


def test_below_16_bits_only_the_matmuls_of_the_layers_are_faster() -> None:
    both = GpuKind("toy", 2**40, {"bf16": 1.0, "fp8": 2.0}, NEVER, None, 0.0, 1.0, None, IDEAL)
    assert layer_seconds(both, TINY, 1, 4, precision="fp8").forward_s == pytest.approx(5120 / 2 + 256)
    assert head_seconds(both, TINY, 1, 4, precision="fp8").forward_s == pytest.approx(640)


def test_the_ends_belong_to_the_parts_with_the_first_and_the_last_layer() -> None:
    layer, world = 5120 + 256, cluster(kind(), kind(), kind())
    split = plan([(0, 0), (0, 4), (4, 4)])
    assert seconds(split, world, Forward(0, (0, 0)), 0) == pytest.approx(0)
    assert seconds(split, world, Forward(0, (0, 4)), 1) == pytest.approx(4 * layer)
    assert seconds(split, world, Forward(0, (4, 4)), 2) == pytest.approx(640)
    assert seconds(plan(), world, Forward(0, (0, 3))) == pytest.approx(3 * layer)
    assert seconds(plan(), world, Forward(0, (3, 4))) == pytest.approx(layer + 640)


def test_the_slowest_kind_of_a_group_decides() -> None:
    mixed, slow = cluster(kind(4.0, name="fast"), kind(1.0, name="slow")), cluster(kind(1.0), kind(1.0))
    for instruction in (Forward(0, (0, 4)), Backward(0, (0, 4)), OptimizerStep()):
        assert seconds(plan(degree=2), mixed, instruction) == seconds(plan(degree=2), slow, instruction)


def test_a_lane_takes_as_long_as_its_share_of_the_sequences() -> None:
    two = Plan("toy", TINY, 4, 6, (Pipeline(3, 2, (Stage((Replica(("n0/0",), 1), Replica(("n1/0",), 2)), ((0, 4),)),)),))
    cost = ComputeCost(two, cluster(kind(), kind()))
    one = replace(lane(two), name="p0s0r0", devices=("n0/0",), sequences=(0, 1))
    other = replace(lane(two), name="p0s0r1", replica=1, devices=("n1/0",), sequences=(1, 3))
    assert cost.seconds(other, Forward(0, (0, 4))) == pytest.approx(2 * cost.seconds(one, Forward(0, (0, 4))))


def test_the_optimizer_step_moves_30_bytes_a_parameter_of_mixed_precision_adamw() -> None:
    assert optimizer_bytes("bf16", "fp32", "adamw") == 30
    assert optimizer_bytes("fp32", "fp32", "adamw") == 28
    assert optimizer_bytes("bf16", "bf16", "sgd") == 20
    parameters = 2 * 10 * 8 + 4 * (640 + 2 * 8) + 8
    assert seconds(plan(), cluster(kind(NEVER, 1.0)), OptimizerStep()) == pytest.approx(30 * parameters)


def test_zero_divides_the_optimizer_step_over_the_lanes_that_hold_a_layer() -> None:
    def pipeline(i: int) -> Pipeline:
        return Pipeline(1, 2, (Stage((Replica((f"n{i}/0",), 1),), ((0, 4),)),))

    world = cluster(*[kind(NEVER, 1.0)] * 3)
    plans = [Plan("toy", TINY, 4, 6, tuple(map(pipeline, range(3))), zero_stage=stage) for stage in (0, 1)]
    assert seconds(plans[0], world, OptimizerStep()) == pytest.approx(3 * seconds(plans[1], world, OptimizerStep()))


# --- Recompute -------------------------------------------------------------------------------------------------------


def test_full_recompute_adds_exactly_one_forward_of_the_layers() -> None:
    world, layer = cluster(kind(3.0, 7.0)), layer_seconds(kind(3.0, 7.0), TINY, 1, 4)
    for instruction in (Backward(0, (0, 4)), BackwardInput(0, (0, 4))):
        added = seconds(plan(recompute="full"), world, instruction) - seconds(plan(), world, instruction)
        assert added == pytest.approx(4 * layer.forward_s)
    weight = BackwardWeight(0, (0, 4))
    assert seconds(plan(recompute="full"), world, weight) == seconds(plan(), world, weight)


def test_selective_recompute_adds_exactly_one_forward_of_the_attention() -> None:
    world = cluster(kind())
    for instruction in (Backward(0, (0, 4)), BackwardInput(0, (0, 4))):
        added = seconds(plan(recompute="selective"), world, instruction) - seconds(plan(), world, instruction)
        assert added == pytest.approx(4 * 256)


def test_of_a_part_only_the_layers_among_the_first_n_are_recomputed() -> None:
    base, world = plan(), cluster(kind())
    stage = replace(base.pipelines[0].stages[0], recompute="full", recompute_layers=3)
    some = replace(base, pipelines=(replace(base.pipelines[0], stages=(stage,)),))
    for part, recomputed in (((0, 2), 2), ((2, 4), 1), ((3, 4), 0), ((0, 4), 3), ((1, 3), 2)):
        added = seconds(some, world, Backward(0, part)) - seconds(base, world, Backward(0, part))
        assert added == pytest.approx(recomputed * (5120 + 256))


# --- Laws ------------------------------------------------------------------------------------------------------------

efficiencies = st.builds(
    Efficiency,
    st.floats(0.1, 1.0),
    st.floats(0.0, 1e-4),
    st.floats(0.1, 1.0),
    st.floats(0.1, 1.0),
    st.floats(0.0, 1e-4),
)
kinds = st.builds(kind, st.floats(1e6, 1e15), st.floats(1e6, 1e13), efficiencies)


@given(kinds, st.sets(st.integers(1, 7)), st.sampled_from(["none", "selective", "full"]))
def test_the_parts_of_a_split_backward_take_as_long_as_the_whole(gpu: GpuKind, inner: set[int], recompute: str) -> None:
    split = plan(model=replace(TINY, layers=8), recompute=recompute)
    bounds = [0, *sorted(inner), 8]
    cost, here = ComputeCost(split, cluster(gpu)), lane(split)
    for type_ in (Forward, Backward, BackwardInput, BackwardWeight):
        parts = sum(cost.seconds(here, type_(0, part)) for part in itertools.pairwise(bounds))
        assert parts == pytest.approx(cost.seconds(here, type_(0, (0, 8))))


@given(kinds, kinds, st.sampled_from(["none", "selective", "full"]), st.booleans())
def test_the_halves_of_a_backward_take_as_long_as_the_whole(gpu: GpuKind, other: GpuKind, recompute: str, sequence: bool) -> None:
    whole = plan(degree=2, recompute=recompute, sequence_parallel=sequence)
    cost, here = ComputeCost(whole, cluster(gpu, replace(other, name="other"))), lane(whole)
    halves = cost.seconds(here, BackwardInput(0, (0, 4))) + cost.seconds(here, BackwardWeight(0, (0, 4)))
    assert halves == pytest.approx(cost.seconds(here, Backward(0, (0, 4))))


@given(kinds, st.floats(1.1, 1000.0))
def test_a_kind_that_is_k_times_faster_in_everything_takes_one_kth(gpu: GpuKind, k: float) -> None:
    gpu = replace(gpu, efficiency=replace(gpu.efficiency, matmul_half_s=0.0, launch_s=0.0))
    fast = kind(k * gpu.peak_flop_per_s["bf16"], k * gpu.memory_bandwidth_bytes_per_s, gpu.efficiency)
    for instruction in (Forward(0, (0, 4)), Backward(0, (0, 4)), OptimizerStep()):
        taken = seconds(plan(), cluster(gpu), instruction)
        assert seconds(plan(), cluster(fast), instruction) == pytest.approx(taken / k)


@given(kinds, st.integers(1, 3))
def test_matmuls_without_attention_and_traffic_take_twice_as_long_backward(gpu: GpuKind, sequences: int) -> None:
    pure = kind(gpu.peak_flop_per_s["bf16"], NEVER, replace(gpu.efficiency, attention_fraction=1.0))
    layer = layer_seconds(pure, TINY, sequences, 4)
    attention_s = layer.attention_s - pure.efficiency.launch_s
    assert layer.backward_s - 2.5 * attention_s == pytest.approx(2 * (layer.forward_s - attention_s))


def test_slowest_takes_the_longest_of_every_column() -> None:
    a, b = layer_seconds(kind(1.0, 9.0), TINY, 1, 4), layer_seconds(kind(9.0, 1.0), TINY, 1, 4)
    both = slowest([a, b])
    assert both.forward_s == max(a.forward_s, b.forward_s)
    assert both.backward_weight_s == max(a.backward_weight_s, b.backward_weight_s)


# --- Collectives -----------------------------------------------------------------------------------------------------


def collectives(plan: Plan, instruction: object, stage: int = 0) -> dict[tuple[str, float], int]:
    cost = ComputeCost(plan, cluster(*[kind()] * 8))
    found: tuple[TensorCollective, ...] = cost.collectives(lane(plan, stage), instruction)  # type: ignore[arg-type]
    return {(c.kind, c.num_bytes): c.count for c in found}


BOUNDARY = 4 * 8 * 2  # 4 tokens of 8 elements of 2 bytes
PER_TOKEN = 4 * 4  # one value a token in fp32


def test_a_lane_of_one_device_has_no_collectives() -> None:
    assert collectives(plan(), Forward(0, (0, 4))) == {}
    assert collectives(plan(degree=2), OptimizerStep()) == {}


def test_a_layer_sums_twice_forward_and_twice_backward() -> None:
    middle = plan([(0, 1), (1, 3), (3, 4)], degree=2)
    assert collectives(middle, Forward(0, (1, 3)), 1) == {("all_reduce", BOUNDARY): 4}
    assert collectives(middle, Backward(0, (1, 3)), 1) == {("all_reduce", BOUNDARY): 4}
    assert collectives(middle, BackwardWeight(0, (1, 3)), 1) == {}
    full = plan([(0, 1), (1, 3), (3, 4)], degree=2, recompute="full")
    assert collectives(full, Backward(0, (1, 3)), 1) == {("all_reduce", BOUNDARY): 8}


def test_embedding_and_head_sum_once_and_the_cross_entropy_three_times() -> None:
    one = plan(degree=2)
    assert collectives(one, Forward(0, (0, 4))) == {("all_reduce", BOUNDARY): 8 + 1, ("all_reduce", PER_TOKEN): 3}
    assert collectives(one, Backward(0, (0, 4))) == {("all_reduce", BOUNDARY): 8 + 1}
    assert collectives(one, Forward(0, (0, 2))) == {("all_reduce", BOUNDARY): 4 + 1}


def test_sequence_parallelism_scatters_and_gathers_and_gathers_the_inputs_again() -> None:
    middle = plan([(0, 1), (1, 3), (3, 4)], degree=2, sequence_parallel=True)
    gather, scatter = ("all_gather", BOUNDARY), ("reduce_scatter", BOUNDARY)
    assert collectives(middle, Forward(0, (1, 3)), 1) == {gather: 4, scatter: 4}
    assert collectives(middle, Backward(0, (1, 3)), 1) == {gather: 8, scatter: 4}
    assert collectives(middle, BackwardInput(0, (1, 3)), 1) == {gather: 4, scatter: 4}
    assert collectives(middle, BackwardWeight(0, (1, 3)), 1) == {gather: 4}


def test_sequence_parallelism_gathers_as_much_as_it_scatters_over_a_forward() -> None:
    # An all-reduce is a reduce-scatter and an all-gather, so that both ways move the same bytes forward.
    plain, sequence = plan(degree=2), plan(degree=2, sequence_parallel=True)
    forward = Forward(0, (0, 4))
    counts = collectives(sequence, forward)
    assert (
        counts[("all_gather", BOUNDARY)]
        == counts[("reduce_scatter", BOUNDARY)]
        == collectives(plain, forward)[("all_reduce", BOUNDARY)]
    )


@given(st.booleans(), st.sampled_from(["none", "selective", "full"]), st.integers(1, 3))
def test_the_parts_and_halves_of_a_backward_have_the_collectives_of_the_whole(sequence: bool, recompute: str, cut: int) -> None:
    whole = plan(degree=2, recompute=recompute, sequence_parallel=sequence)

    def total(*instructions: object) -> dict[tuple[str, float], int]:
        sums: dict[tuple[str, float], int] = {}
        for instruction in instructions:
            for key, count in collectives(whole, instruction).items():
                sums[key] = sums.get(key, 0) + count
        return sums

    expected = total(Backward(0, (0, 4)))
    assert total(Backward(0, (cut, 4)), Backward(0, (0, cut))) == expected
    assert total(BackwardInput(0, (0, 4)), BackwardWeight(0, (0, 4))) == expected


# --- Errors ----------------------------------------------------------------------------------------------------------


def test_an_instruction_that_computes_nothing_is_refused() -> None:
    send = SendActivation(0, 4, "p0s1", (0, 1))
    with pytest.raises(TypeError, match="no compute time for SendActivation"):
        seconds(plan(), cluster(kind()), send)


def test_a_kind_without_the_precision_is_told_with_what_it_has() -> None:
    with pytest.raises(InputError, match=r"^toy has no bf16; it has fp16$"):
        seconds(plan(), cluster(kind(precision="fp16")), Forward(0, (0, 4)))
