"""Seconds of instructions, against sums by hand on a layer small enough to count, and against the laws they obey."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.compute import ComputeCost, TensorCollective, optimizer_bytes
from sim.cost.pieces import layer_seconds
from sim.spec.cluster import Cluster, Intra, Nic, Node
from sim.spec.counts import RECOMPUTE
from sim.spec.gpu import Efficiency, GpuKind, gpu_kind
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Forward, Lane, OptimizerStep, SendActivation
from sim.spec.reading import InputError
from sim.spec.stack import Stack
from sim.spec.transformer import Transformer

NEVER = 1e30  # a rate so high that nothing takes time at it

# Per layer: 4 x 8 x 8 + 3 x 8 x 16 = 640 weights in matmuls. A sequence of 4 tokens: 2 x 4 x 640 = 5120 FLOP of matmuls and
# 4 x 4 x 4 x 8 = 512 of attention, of which causality leaves half. Head: 2 x 4 x 8 x 10 = 640 FLOP.
TINY = Transformer(name="tiny", layers=4, hidden=8, ffn=16, heads=2, vocab=10)
ATTENTION = 512 / 2
IDEAL = Efficiency(
    matmul_fraction=1.0,
    fp32_fraction=1.0,
    matmul_half_s=0.0,
    matmul_traffic=0.0,
    attention_fraction=1.0,
    attention_keys=0.0,
    attention_rows=0.0,
    attention_width=0.0,
    memory_fraction=1.0,
    launch_s=0.0,
)
STACK = Stack("ideal")


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
    assert seconds(plan(), cluster(kind()), Forward(0, (0, 4))) == pytest.approx(4 * (5120 + ATTENTION) + 640)


def test_a_backward_takes_twice_the_matmuls_and_three_times_the_attention() -> None:
    assert seconds(plan(), cluster(kind()), Backward(0, (0, 4))) == pytest.approx(4 * (2 * 5120 + 3 * ATTENTION) + 2 * 640)


def test_the_input_half_has_the_attention_and_the_weight_half_has_matmuls_only() -> None:
    assert seconds(plan(), cluster(kind()), BackwardInput(0, (0, 4))) == pytest.approx(4 * (5120 + 3 * ATTENTION) + 640)
    assert seconds(plan(), cluster(kind()), BackwardWeight(0, (0, 4))) == pytest.approx(4 * 5120 + 640)


def test_bytes_bound_a_kind_whose_peak_is_never_reached() -> None:
    # Per token in elements of 2 bytes: norms and residuals 10 x 8, rotary 2 x 16, swiglu 3 x 16, attention 4 x 8. Head: norm
    # 2 x 8, and 10 logits of 2 + 4 bytes cast and 4 + 4 in the softmax. Embedding: 2 x 8.
    # Backward: attention twice, the logits once, the rest one and a half times.
    rest, attention, norm, logits, embedding = 4 * 2 * (80 + 32 + 48), 4 * 2 * 32, 4 * 2 * 16, 4 * 10 * 14, 4 * 2 * 16
    slow = cluster(kind(NEVER, 1.0))
    assert seconds(plan(), slow, Forward(0, (0, 4))) == pytest.approx(4 * (rest + attention) + embedding + norm + logits)
    backward = 1.5 * (4 * rest + embedding + norm) + 2 * 4 * attention + logits
    assert seconds(plan(), slow, Backward(0, (0, 4))) == pytest.approx(backward)


def test_the_ends_belong_to_the_parts_with_the_first_and_the_last_layer() -> None:
    layer, world = 5120 + ATTENTION, cluster(kind(), kind(), kind())
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


# --- The host --------------------------------------------------------------------------------------------------------

HALF = Stack("slow host", host_s=0.5)
TWICE = 2 * (5120 + ATTENTION)  # of the FLOP of a layer forward
FORWARD, BACKWARD = Forward(0, (0, 4)), Backward(0, (0, 4))


def both(plan: Plan, gpu: GpuKind, instruction: object, stack: Stack = HALF, stage: int = 0) -> tuple[float, float]:
    """The seconds of an instruction, and those of them in which the GPU waits for the host."""
    cost = ComputeCost(plan, cluster(*[gpu] * 12), stack=stack)
    here = replace(lane(plan, stage), context_parallel=plan.context_parallel)
    return cost.seconds(here, instruction), cost.gap_s(here, instruction)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("instruction", "recompute", "kernels"),
    [
        # 11 a layer forward, 18 and 4 backward; the head 4, 5 and 1, the embedding 1, 0 and 2.
        (FORWARD, "none", 4 * 11 + 1 + 4),
        (BACKWARD, "none", 4 * (18 + 4) + 2 + 5 + 1),
        (BackwardInput(0, (0, 4)), "none", 4 * 18 + 5),
        (BackwardWeight(0, (0, 4)), "none", 4 * 4 + 2 + 1),
        (BACKWARD, "full", 4 * (18 + 4 + 11) + 2 + 5 + 1),
        (BACKWARD, "selective", 4 * (18 + 4 + 1) + 2 + 5 + 1),
        (BACKWARD, "pointwise", 4 * (18 + 4 + 3) + 2 + 5 + 1),
        (BackwardWeight(0, (0, 4)), "pointwise", 4 * (4 + 3) + 2 + 1),
        (Forward(0, (1, 3)), "none", 2 * 11),
    ],
)
def test_an_instruction_takes_no_less_than_the_host_needs_for_its_kernels(
    instruction: object, recompute: str, kernels: int
) -> None:
    given = plan(recompute=recompute)
    assert both(given, kind(NEVER), instruction) == pytest.approx((kernels / 2, kernels / 2))
    # A GPU that takes just as long: the cube root of 2 times either.
    alone_s = seconds(given, cluster(kind()), instruction)
    even = (1.259921049894873 * kernels / 2, 0.259921049894873 * kernels / 2)
    assert both(given, kind(alone_s / (kernels / 2)), instruction) == pytest.approx(even)
    # Behind the work of a GPU that takes 100,000 times as long, the host costs nothing.
    assert 1000 * alone_s > 1e5 * kernels / 2
    assert both(given, kind(0.001), instruction) == pytest.approx((1000 * alone_s, 0.0), rel=1e-12, abs=1e-6)


@pytest.mark.parametrize(
    ("device_s", "expected_s"),
    [
        # 11 s of the host are 1331 s^3.
        (0.0, 11.0),
        (397 ** (1 / 3), 12.0),  # 1331 + 397 = 1728
        (11.0, 13.859131548843605),  # 11 times the cube root of 2
        (866 ** (1 / 3), 13.0),  # 1331 + 866 = 2197
        (9317 ** (1 / 3), 22.0),  # 8 times 1331, of which 7 times are the GPU's
        (34606 ** (1 / 3), 33.0),  # 27 times 1331, of which 26 times are the GPU's
    ],
)
def test_the_cubes_of_the_seconds_of_gpu_and_host_add_up(device_s: float, expected_s: float) -> None:
    # |---- host, 22 kernels of 0.5 s = 11 s ----|  |
    # |---- GPU, 7.35 s ----|----- waits ------------|  12 s
    middle, gpu = plan([(0, 1), (1, 3), (3, 4)]), kind(TWICE / device_s if device_s else NEVER)
    gap_s = expected_s - device_s
    assert both(middle, gpu, Forward(0, (1, 3)), stage=1) == pytest.approx((expected_s, gap_s))
    # The seconds of each micro-batch come besides, and are no place for collectives.
    assert both(middle, gpu, Forward(0, (1, 3)), replace(HALF, micro_batch_s=7.0), 1) == pytest.approx((expected_s + 7, gap_s))


@given(st.floats(1e-6, 0.2), st.floats(1e-6, 0.2), st.floats(1.0, 100.0))
def test_gpu_and_host_take_no_less_than_either_and_no_more_than_both_in_turn(device_s: float, host_s: float, k: float) -> None:
    middle, forward = plan([(0, 1), (1, 3), (3, 4)]), Forward(0, (1, 3))

    def taken(device_s: float, host_s: float) -> tuple[float, float]:
        return both(middle, kind(TWICE / device_s), forward, Stack("host", host_s=host_s / 22), 1)

    found_s, gap_s = taken(device_s, host_s)
    slack = 1 + 1e-12
    assert max(device_s, host_s) <= found_s * slack and found_s <= (device_s + host_s) * slack
    assert device_s + gap_s == pytest.approx(found_s, rel=1e-12)
    # Whichever of them takes longer, they take no less together; of two that change places neither counts for more.
    assert found_s <= taken(k * device_s, host_s)[0] * slack and found_s <= taken(device_s, k * host_s)[0] * slack
    assert taken(host_s, device_s)[0] == pytest.approx(found_s, rel=1e-12)
    # Where both take k times as long, all of it does.
    assert taken(k * device_s, k * host_s)[0] == pytest.approx(k * found_s, rel=1e-12)
    # Without a host the GPU alone decides, to the last bit.
    alone_s = seconds(middle, cluster(*[kind(TWICE / device_s)] * 3), forward, 1)
    assert taken(device_s, 0.0) == (alone_s, 0.0) and alone_s == pytest.approx(device_s)


def test_the_host_is_as_fast_beside_an_exchange() -> None:
    given, gpu = plan(), kind(NEVER)
    here = replace(lane(given), split="all")
    for slowdown in (0.0, 0.5):
        cost = ComputeCost(given, cluster(gpu), stack=replace(HALF, overlap_slowdown=slowdown))
        assert cost.seconds(here, FORWARD) == pytest.approx(49 / 2)


def test_the_host_launches_collectives_too() -> None:
    # One stage: 8 sums in layers, one of the embedding, three for the cross-entropy. Every layer of a ring of context ranks: one.
    assert both(plan(degree=2), kind(NEVER), FORWARD)[0] == pytest.approx((49 + 12) / 2)
    assert both(plan(degree=2, context_parallel=2), kind(NEVER), FORWARD)[0] == pytest.approx((49 + 4) / 2)


def test_tensor_collectives_are_issued_rank_by_rank_where_there_are_several_stages() -> None:
    by_rank = Stack("by rank", tensor_host_s=0.25)
    stages = [(0, 1), (1, 3), (3, 4)]
    for degree in (2, 4):
        # Two layers sum twice each.
        assert both(plan(stages, degree=degree), kind(NEVER), Forward(0, (1, 3)), by_rank, 1)[0] == pytest.approx(4 * degree / 4)
        assert both(plan(degree=degree), kind(NEVER), FORWARD, by_rank)[0] == pytest.approx(0.0)
    together = replace(by_rank, host_s=0.5)
    assert both(plan(stages, degree=2), kind(NEVER), Forward(0, (1, 3)), together, 1)[0] == pytest.approx((22 + 4) / 2 + 2)
    # On a cluster of one node they are not.
    node = Node("n0", kind(NEVER), 8, Intra("pcie4", 1e9), None)
    names = (("n0/0", "n0/1"), ("n0/2", "n0/3"))
    made = tuple(Stage((Replica(name, 1),), (cut,)) for name, cut in zip(names, [(0, 2), (2, 4)], strict=True))
    inside = Plan("toy", TINY, 4, 2, (Pipeline(1, 2, made),))
    assert ComputeCost(inside, Cluster("toy", (node,)), stack=by_rank).seconds(lane(inside), Forward(0, (0, 2))) < 1e-9
    # Context ranks exchange keys and values, which is no tensor collective.
    ring = plan(stages, degree=2, context_parallel=2)
    assert both(ring, kind(NEVER), Forward(0, (1, 3)), by_rank, 1)[0] == pytest.approx(0.0)
    # Of two tensor ranks on each of two context ranks, two take part in a collective.
    squared = plan(stages, degree=4, context_parallel=2)
    assert both(squared, kind(NEVER), Forward(0, (1, 3)), by_rank, 1)[0] == pytest.approx(4 * 2 / 4)


def test_a_stage_whose_host_is_slow_takes_hardly_longer_for_many_tokens_than_for_one() -> None:
    gpu = gpu_kind("A100-80GB-SXM")
    model = Transformer(name="llama-7b", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000)
    stages = [(0, 1), (1, 31), (31, 32)]

    def taken(length: int, host_s: float) -> float:
        given = replace(plan(stages, model), sequence_length=length)
        return both(given, gpu, Forward(0, (1, 31)), Stack("any", host_s=host_s), 1)[0]

    # The GPU is busy twice as long with 128 tokens as with one, but with neither for a half of the host's 33 ms: no more than
    # the cube root of 1 + 1/8 of them.
    launched_s = 30 * 11 * 100e-6
    assert launched_s / 2 > taken(128, 0.0) > 2 * taken(1, 0.0)
    assert launched_s < taken(1, 100e-6) < taken(128, 100e-6) < 1.0401 * launched_s
    assert taken(4096, 100e-6) > taken(4096, 0.0) > launched_s


# --- Recompute -------------------------------------------------------------------------------------------------------


def test_full_recompute_adds_exactly_one_forward_of_the_layers() -> None:
    world, layer = cluster(kind(3.0, 7.0)), layer_seconds(kind(3.0, 7.0), STACK, TINY, 1, 4)
    for instruction in (Backward(0, (0, 4)), BackwardInput(0, (0, 4))):
        added = seconds(plan(recompute="full"), world, instruction) - seconds(plan(), world, instruction)
        assert added == pytest.approx(4 * layer.forward_s)
    weight = BackwardWeight(0, (0, 4))
    assert seconds(plan(recompute="full"), world, weight) == seconds(plan(), world, weight)


def test_selective_recompute_adds_exactly_one_forward_of_the_attention() -> None:
    world = cluster(kind())
    for instruction in (Backward(0, (0, 4)), BackwardInput(0, (0, 4))):
        added = seconds(plan(recompute="selective"), world, instruction) - seconds(plan(), world, instruction)
        assert added == pytest.approx(4 * ATTENTION)


def test_pointwise_recompute_adds_the_norms_and_the_activation_to_the_weight_half() -> None:
    """Of 4 tokens two norms of 8 numbers and a SwiGLU of 32 into 16, all in 2 bytes, at a byte a second."""
    world = cluster(kind(NEVER, 1.0))
    for instruction in (Backward(0, (0, 4)), BackwardWeight(0, (0, 4))):
        added = seconds(plan(recompute="pointwise"), world, instruction) - seconds(plan(), world, instruction)
        assert added == pytest.approx(4 * 4 * (2 * 2 * 8 + 3 * 16) * 2)
    inputs = BackwardInput(0, (0, 4))
    assert seconds(plan(recompute="pointwise"), world, inputs) == seconds(plan(), world, inputs)


def test_of_a_part_only_the_layers_among_the_first_n_are_recomputed() -> None:
    base, world = plan(), cluster(kind())
    stage = replace(base.pipelines[0].stages[0], recompute="full", recompute_layers=3)
    some = replace(base, pipelines=(replace(base.pipelines[0], stages=(stage,)),))
    mixed = replace(base, pipelines=(replace(base.pipelines[0], stages=(replace(stage, recompute_rest="selective"),)),))
    for part, recomputed in (((0, 2), 2), ((2, 4), 1), ((3, 4), 0), ((0, 4), 3), ((1, 3), 2)):
        added = seconds(some, world, Backward(0, part)) - seconds(base, world, Backward(0, part))
        assert added == pytest.approx(recomputed * (5120 + ATTENTION))
        added = seconds(mixed, world, Backward(0, part)) - seconds(base, world, Backward(0, part))
        assert added == pytest.approx(recomputed * 5120 + (part[1] - part[0]) * ATTENTION)


# --- Laws ------------------------------------------------------------------------------------------------------------

fractions, overheads_s = st.floats(0.1, 1.0), st.floats(0.0, 1e-4)
efficiencies = st.builds(
    Efficiency,
    matmul_fraction=fractions,
    fp32_fraction=fractions,
    matmul_half_s=overheads_s,
    matmul_traffic=st.floats(0.0, 1.0),
    attention_fraction=fractions,
    attention_keys=st.floats(0.0, 1e3),
    attention_rows=st.floats(0.0, 1e5),
    attention_width=st.floats(0.0, 1e3),
    memory_fraction=fractions,
    launch_s=overheads_s,
)
kinds = st.builds(kind, st.floats(1e6, 1e15), st.floats(1e6, 1e13), efficiencies)


@given(kinds, st.sets(st.integers(1, 7)), st.sampled_from(RECOMPUTE))
def test_the_parts_of_a_split_backward_take_as_long_as_the_whole(gpu: GpuKind, inner: set[int], recompute: str) -> None:
    split = plan(model=replace(TINY, layers=8), recompute=recompute)
    bounds = [0, *sorted(inner), 8]
    cost, here = ComputeCost(split, cluster(gpu)), lane(split)
    for type_ in (Forward, Backward, BackwardInput, BackwardWeight):
        parts = sum(cost.seconds(here, type_(0, part)) for part in itertools.pairwise(bounds))
        assert parts == pytest.approx(cost.seconds(here, type_(0, (0, 8))))


@given(kinds, kinds, st.sampled_from(RECOMPUTE), st.booleans())
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


@given(st.booleans(), st.sampled_from(RECOMPUTE), st.integers(1, 3))
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
