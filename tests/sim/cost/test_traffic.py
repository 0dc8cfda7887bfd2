"""What a software stack, context, expert and hybrid sharded parallelism put on links and add to seconds, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from sim.cost.compute import HOST_BYTES_PER_S, ComputeCost, Inside, TensorCollective, optimizer_bytes
from sim.cost.estimate import Estimate
from sim.cost.estimates import Estimates
from sim.cost.network import Network, Transfer, together
from sim.cost.traffic import Work, exchange, filled_gap_s, growth, message, ring_steps_s, sum_of_shards, work
from sim.engine import simulate
from sim.spec.cluster import Cluster, Intra
from sim.spec.compile import compile_plan
from sim.spec.counts import RECOMPUTE, layer_parameter_parts, layer_parameters
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    GatherParameters,
    Lane,
    OptimizerStep,
    ReduceGradients,
    SendActivation,
    dry_run,
    parse_program,
    program_text,
)
from sim.spec.stack import Stack
from sim.spec.transformer import Moe, Transformer
from tests.sim.cost.test_estimate import nearly
from tests.strategies import stacks, worlds
from tests.worlds import ethernet_cluster, simulate_every_lane

RATE = 1e9
LAYERS, HIDDEN, TOKENS = 4, 64, 32
MODEL = Transformer(name="small", layers=LAYERS, hidden=HIDDEN, ffn=128, heads=4, kv_heads=2, vocab=96)
MIXTURE = replace(MODEL, name="mixture", experts=Moe(experts=4, top_k=2, ffn=128))
LOSES_NOTHING = Stack("test")


def plan(*pipelines: list[str], model: Transformer = MODEL, micro_batches: int = 2, **fields: object) -> Plan:
    """Pipelines of stages of devices named in one text, with micro-batches of one sequence, cut evenly."""
    made = []
    for stages in pipelines:
        bounds = [round(i * model.layers / len(stages)) for i in range(len(stages) + 1)]
        cuts = list(pairwise(bounds))
        parts = [Stage((Replica(tuple(text.split()), 1),), (cut,)) for text, cut in zip(stages, cuts, strict=True)]
        made.append(Pipeline(1, micro_batches, tuple(parts)))
    values: dict[str, object] = {"overlap_gradients": False, "zero_stage": 0, **fields}
    return Plan("tiny", model, TOKENS, micro_batches * len(made), tuple(made), **values)  # type: ignore[arg-type]


def world(nodes: int, gpus: int = 1, stack: Stack = LOSES_NOTHING, latency_s: float = 0.0) -> Cluster:
    return replace(ethernet_cluster([gpus] * nodes, RATE, latency_s=latency_s), stack=stack)


def sent_by(network: Network, transfer: Transfer) -> Mapping[str, float]:
    """Bytes that a transfer puts on each card of a node, outwards."""
    names = {link: network.links[link].name for link, _ in transfer.loads}
    return {names[link]: num_bytes for link, num_bytes in transfer.loads if names[link].endswith(">fabric")}


def taken(plan: Plan, cluster: Cluster, instruction: object, lane: int = 0, stack: Stack | None = None) -> Work:
    cost = ComputeCost(plan, cluster, stack=stack)
    return work(Network(cluster), cost, compile_plan(plan).lanes[lane], instruction)  # type: ignore[arg-type]


# --- The software stack ----------------------------------------------------------------------------------------------


def seconds(cluster: Cluster, lane: Lane, given: Plan, instruction: object, **stack: float) -> float:
    return ComputeCost(given, cluster, stack=Stack("test", **stack)).seconds(lane, instruction)  # type: ignore[arg-type]


def test_what_a_stage_takes_besides_its_layers_comes_once_for_each_forward_and_each_backward() -> None:
    given, cluster = plan(["n0/0"]), world(1)
    lane = compile_plan(given).lanes[0]
    whole = (0, LAYERS)
    added = {
        type(i): seconds(cluster, lane, given, i, micro_batch_s=7.0) - seconds(cluster, lane, given, i)
        for i in (Forward(0, whole), Backward(0, whole), BackwardInput(0, whole), BackwardWeight(0, whole), OptimizerStep())
    }
    assert added == pytest.approx({Forward: 7.0, Backward: 7.0, BackwardInput: 7.0, BackwardWeight: 0.0, OptimizerStep: 0.0})
    parts = [Backward(1, (2, 4)), Backward(1, (0, 2))]
    divided = replace(lane, buckets=((0, 2), (2, 4)), split="last")
    found = [seconds(cluster, divided, given, i, micro_batch_s=7.0) - seconds(cluster, divided, given, i) for i in parts]
    assert found == pytest.approx([0.0, 7.0])


def test_computation_is_slower_beside_the_gradients_of_the_parts_before_it() -> None:
    given, cluster = plan(["n0/0"]), world(1)
    lane = replace(compile_plan(given).lanes[0], buckets=((0, 2), (2, 4)))

    def slower(split: str, instruction: object) -> float:
        here = replace(lane, split=split)
        return seconds(cluster, here, given, instruction, overlap_slowdown=0.25) / seconds(cluster, here, given, instruction)

    asked = (Forward(0, (0, 4)), Backward(0, (0, 4)), Backward(1, (2, 4)), Backward(1, (0, 2)))
    assert [slower("none", i) for i in asked] == [1, 1, 1, 1]
    assert [slower("last", i) for i in asked] == pytest.approx([1, 1, 1, 1.25])
    assert [slower("all", i) for i in asked] == pytest.approx([1.25] * 4)
    assert slower("all", OptimizerStep()) == 1


def test_an_optimizer_that_moves_twice_the_bytes_takes_twice_the_seconds_and_those_of_the_step_once() -> None:
    given, cluster = plan(["n0/0"]), world(1)
    lane = compile_plan(given).lanes[0]
    alone_s = seconds(cluster, lane, given, OptimizerStep())
    assert seconds(cluster, lane, given, OptimizerStep(), optimizer_traffic=2.0, step_s=3.0) == pytest.approx(3 + 2 * alone_s)


def test_kinds_and_stack_that_are_given_stand_in_the_place_of_the_clusters() -> None:
    given, cluster = plan(["n0/0"]), world(1)
    kind = cluster.nodes[0].gpu
    slow = replace(kind, peak_flop_per_s={p: rate / 2 for p, rate in kind.peak_flop_per_s.items()})
    slow = replace(slow, memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s / 2)
    lane, forward = compile_plan(given).lanes[0], Forward(0, (0, LAYERS))
    ours, theirs = ComputeCost(given, cluster), ComputeCost(given, cluster, {kind.name: slow})
    assert theirs.seconds(lane, forward) == pytest.approx(2 * ours.seconds(lane, forward))
    assert ComputeCost(given, cluster, {"other": slow}).seconds(lane, forward) == ours.seconds(lane, forward)
    assert ComputeCost(given, replace(cluster, stack=Stack("x", step_s=1.0)), stack=LOSES_NOTHING).stack.step_s == 0


@pytest.mark.parametrize(
    ("computed_s", "overlap", "expected_s"), [(10.0, 0.0, 14.0), (10.0, 0.5, 12.0), (1.0, 0.5, 4.0), (1.0, 1.0, 4.0)]
)
def test_collectives_hide_behind_computation_by_their_overlap_and_never_take_less_than_alone(
    computed_s: float, overlap: float, expected_s: float
) -> None:
    # compute |----------|            overlap 0.5, compute 10 s, collectives 4 s: two hide, two follow
    # links   |--        |--|
    given = plan(["n0/0 n1/0"])
    cluster = world(2, stack=Stack("test", tensor_overlap=overlap))
    lane, network = compile_plan(given).lanes[0], Network(cluster)

    class Given(ComputeCost):
        def seconds(self, lane: Lane, instruction: object) -> float:
            return computed_s

        def collectives(self, lane: Lane, instruction: object) -> tuple[TensorCollective, ...]:
            return (TensorCollective("all_gather", 8 * RATE, 1),)  # a half of it goes over each card

    found = work(network, Given(given, cluster), lane, Forward(0, (0, LAYERS)))
    assert found.alone_s(network) == pytest.approx(expected_s)
    assert found.beside.num_bytes + found.after.num_bytes == pytest.approx(8 * RATE)


def test_the_simulation_takes_what_the_work_takes_alone_with_overlap_too() -> None:
    given = plan(["n0/0 n1/0"], micro_batches=1)
    cluster = world(2, stack=Stack("test", tensor_overlap=0.5), latency_s=1e-3)
    network, lane, whole = Network(cluster), compile_plan(given).lanes[0], (0, LAYERS)
    cost = ComputeCost(given, cluster)
    alone_s = [work(network, cost, lane, i).alone_s(network) for i in (Forward(0, whole), Backward(0, whole), OptimizerStep())]
    assert simulate(given, cluster).iteration_s == pytest.approx(sum(alone_s), rel=1e-12)


def test_collectives_at_half_their_rate_take_twice_the_seconds_but_for_the_latency() -> None:
    given = plan(["n0/0"], ["n1/0"])
    cluster, members = world(2, latency_s=1.0), compile_plan(given).lanes
    network, reduction = Network(cluster), ReduceGradients((0, LAYERS))
    full = exchange(network, given, reduction, members)
    half = exchange(network, given, reduction, members, Stack("slow", collective_scale=0.5))
    assert network.alone_s(half) - half.latency_s == pytest.approx(2 * (network.alone_s(full) - full.latency_s))
    assert (half.latency_s, half.num_bytes) == (full.latency_s, full.num_bytes)


@pytest.mark.parametrize(("tensor_ranks", "inside"), [("n0/0 n0/1", True), ("n0/0 n1/0", False), ("n0/0 n0/1 n1/0 n1/1", False)])
def test_collectives_inside_a_layer_have_a_rate_of_their_own_where_their_ranks_share_a_node(
    tensor_ranks: str, inside: bool
) -> None:
    given, cluster = plan([tensor_ranks]), world(2, 2, latency_s=1.0)
    network, lane, wires_s = Network(cluster), compile_plan(given).lanes[0], {}
    for node_scale, scale in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.25)):
        stack = Stack("slow", node_collective_scale=node_scale, collective_scale=scale)
        found = work(network, ComputeCost(given, cluster, stack=stack), lane, Forward(0, (0, LAYERS)))
        wires_s[node_scale, scale] = network.alone_s(found.after) - found.after.latency_s
        # The estimate takes them another way than the simulation does.
        told = replace(cluster, stack=stack)
        assert Estimate(given, told).iteration_s() == pytest.approx(simulate(given, told).iteration_s, rel=1e-9)
    alone_s = wires_s[1.0, 1.0]
    assert wires_s[0.5, 1.0] == pytest.approx(alone_s * (2 if inside else 1))
    assert wires_s[1.0, 0.25] == pytest.approx(alone_s * (1 if inside else 4))


@pytest.mark.parametrize(("other", "inside"), [("n0/1", True), ("n1/0", False)])
def test_exchanges_of_gradients_have_the_rate_of_the_wires_that_they_go_over(other: str, inside: bool) -> None:
    given, cluster, wires_s = plan(["n0/0"], [other]), world(2, 2, latency_s=1.0), {}
    members, reduction = compile_plan(given).lanes, ReduceGradients((0, LAYERS))
    network = Network(cluster)
    for node_scale, scale in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.25)):
        stack = Stack("slow", node_collective_scale=node_scale, collective_scale=scale)
        found = exchange(network, given, reduction, members, stack)
        wires_s[node_scale, scale] = network.alone_s(found) - found.latency_s
        # Constants that are given, searches' arithmetic, and the simulation take them another way each.
        told = replace(cluster, stack=stack)
        simulated_s = pytest.approx(simulate(given, told).iteration_s, rel=1e-9)
        assert Estimate(given, cluster).iteration_s(stack=stack) == simulated_s
        assert Estimates(told, given.job()).iteration_s(given) == simulated_s
    alone_s = wires_s[1.0, 1.0]
    assert wires_s[0.5, 1.0] == pytest.approx(alone_s * (2 if inside else 1))
    assert wires_s[1.0, 0.25] == pytest.approx(alone_s * (1 if inside else 4))


# --- A host that is slower than the GPU ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_s", "overlap", "after_s"),
    [
        # compute |-- GPU, 6 s --|- waits -|            with collectives of 4 s the GPU works 10 s, whatever of the host is longer
        # links                          |-----|
        (0.0, 0.0, 4.0),
        (513 ** (1 / 3), 0.0, 1513 ** (1 / 3) - 9),  # 216 + 513 are the cube of 9 s; 1000 + 513
        (784 ** (1 / 3), 0.0, 1784 ** (1 / 3) - 10),
        (1e4, 0.0, 0.0),
        # Of half of them that hide behind the GPU's work already, only the other half is the GPU's: 8 s, and their cube 512.
        (513 ** (1 / 3), 0.5, 1025 ** (1 / 3) - 9),
        (0.0, 0.5, 2.0),
        (513 ** (1 / 3), 1.0, 0.0),
    ],
)
def test_tensor_collectives_are_work_of_a_gpu_that_waits_for_its_host(host_s: float, overlap: float, after_s: float) -> None:
    given = plan(["n0/0 n1/0"])
    cluster = world(2, stack=Stack("test", tensor_overlap=overlap, host_s=1e-9))
    lane, network = compile_plan(given).lanes[0], Network(cluster)

    class Given(ComputeCost):
        def _device_and_host_s(self, lane: Lane, instruction: object) -> tuple[float, float]:
            return 6.0, host_s

        def collectives(self, lane: Lane, instruction: object) -> tuple[TensorCollective, ...]:
            return (TensorCollective("all_gather", 8 * RATE, 1),)  # a half of it goes over each card

    cost = Given(given, cluster)
    found, forward = work(network, cost, lane, Forward(0, (0, LAYERS))), Forward(0, (0, LAYERS))
    assert (network.alone_s(found.beside), network.alone_s(found.after)) == pytest.approx((4 - after_s, after_s), abs=1e-4)
    assert found.alone_s(network) == pytest.approx((216 + host_s**3) ** (1 / 3) + after_s)
    assert filled_gap_s(network, cost, lane, forward) == pytest.approx(4 * (1 - overlap) - after_s, abs=1e-4)
    assert filled_gap_s(network, cost, lane, forward) <= cost.gap_s(lane, forward) + 1e-12


def test_keys_and_values_and_tokens_on_their_way_to_experts_find_no_place_there() -> None:
    ring, experts = plan(["n0/0 n1/0"], context_parallel=2), plan(["n0/0"], ["n1/0"], model=MIXTURE, expert_parallel=2)
    for given in (ring, experts):
        after = [taken(given, world(2), Backward(0, (0, LAYERS)), stack=Stack("h", host_s=host_s)).after for host_s in (0.0, 1.0)]
        assert after[1].num_bytes > 0 and after[1].num_bytes >= after[0].num_bytes * (1 - 1e-9)


@pytest.mark.parametrize("instruction", [Forward(0, (0, LAYERS)), Backward(0, (0, LAYERS)), BackwardInput(0, (0, LAYERS))])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_take_as_long_as_the_host_and_as_computation_and_collectives(
    instruction: Compute, sequence_parallel: bool
) -> None:
    # The GPU does its work, and its links theirs, one after the other, while the host launches all of it.
    given, cluster = plan(["n0/0 n1/0"], sequence_parallel=sequence_parallel), world(2, latency_s=1e-6)
    network, lane = Network(cluster), compile_plan(given).lanes[0]
    quick = ComputeCost(given, cluster)
    device_s = quick.seconds(lane, instruction)
    both_s = work(network, quick, lane, instruction).alone_s(network)
    names = {Forward: ("forward",), Backward: ("backward_input", "backward_weight"), BackwardInput: ("backward_input",)}
    kernels = sum(
        times * getattr(piece, f"{name}_kernels")
        for name in names[type(instruction)]
        for times, piece in zip((LAYERS, 1, 1), quick.pieces(lane), strict=True)
    )
    launched = kernels + sum(collective.count for collective in quick.collectives(lane, instruction))
    assert both_s > device_s

    def found(host_s: float) -> float:
        slow = ComputeCost(given, cluster, stack=Stack("slow", host_s=host_s / launched))
        return work(network, slow, lane, instruction).alone_s(network)

    # Their cubes add up, those of the host's seconds and of all that the GPU and its links do.
    for host_s in (0.0, device_s / 2, device_s, both_s, 2 * both_s, 50 * both_s):
        assert found(host_s) == pytest.approx((both_s**3 + host_s**3) ** (1 / 3), rel=1e-12)


SLOW_HOST = Stack(
    "slow host",
    host_s=30e-6,
    tensor_host_s=20e-6,
    ring_step_s=10e-6,
    micro_batch_s=1e-4,
    gradient_bytes=8.0,
    loss_traffic=2.0,
    tensor_overlap=0.2,
    node_collective_scale=0.5,
    collective_scale=0.7,
    overlap_slowdown=0.1,
    optimizer_traffic=2.0,
    step_s=1e-3,
)


@pytest.mark.parametrize(
    ("pipelines", "fields"),
    [
        ((["n0/0 n0/1", "n1/0 n1/1", "n2/0 n2/1"],), {}),
        ((["n0/0 n0/1", "n1/0 n1/1"],), {"sequence_parallel": True, "schedule": "zb-1p"}),
        ((["n0/0 n1/0"], ["n2/0 n3/0"]), {}),
        ((["n0/0"], ["n1/0"]), {"zero_stage": 3}),
    ],
)
@pytest.mark.parametrize("host_s", [0.0, 3e-6, 30e-6, 1e-3])
def test_the_estimate_is_the_simulation_however_slow_the_host(
    pipelines: tuple[list[str], ...], fields: dict[str, object], host_s: float
) -> None:
    given = plan(*pipelines, micro_batches=6, **fields)  # type: ignore[arg-type]
    cluster = world(4, 2, stack=replace(SLOW_HOST, host_s=host_s), latency_s=1e-5)
    assert Estimate(given, cluster).iteration_s() == pytest.approx(simulate(given, cluster).iteration_s, rel=1e-9)


@drawn(worlds(), stacks())
def test_the_estimate_is_the_simulation_on_any_stack(known: tuple[Cluster, Plan], any_: Stack) -> None:
    cluster, chosen = replace(known[0], stack=any_), known[1]
    estimate = Estimate(chosen, cluster)
    estimated_s = estimate.iteration_s()
    assert estimated_s == pytest.approx(simulate_every_lane(chosen, cluster).iteration_s, rel=nearly(estimate))


@drawn(
    any_=stacks(),
    groups=st.sampled_from(
        (["n0/0", "n1/0"], ["n0/0 n0/1", "n1/0 n1/1", "n2/0 n2/1"], ["n0/0 n1/0", "n2/0 n3/0"], ["n0/0 n0/1"])
    ),
    modes=st.sampled_from(list(combinations(RECOMPUTE, 2))),
    kind=st.sampled_from((Forward, Backward, BackwardInput, BackwardWeight)),
    slices=st.sampled_from((1, 2)),
    sequence_parallel=st.booleans(),
    data=st.data(),
)
def test_the_growth_of_a_pass_is_its_work_whatever_is_inside(
    any_: Stack,
    groups: list[str],
    modes: tuple[str, str],
    kind: type[Compute],
    slices: int,
    sequence_parallel: bool,
    data: st.DataObject,
) -> None:
    stack = replace(any_, ring_step_s=0.0, blocking_messages=False, message_s=0.0)
    cluster = world(4, 2, stack=stack, latency_s=1e-5)
    model = replace(MODEL, layers=9)
    given = plan(groups, model=model, sequence_parallel=sequence_parallel, schedule="split-1f1b", sequence_slices=slices)
    which = data.draw(st.integers(0, len(groups) - 1))
    stages = list(given.pipelines[0].stages)
    stages[which] = stages[which].recomputing(modes[1], data.draw(st.integers(0, stages[which].layer_count)), modes[0])
    given = replace(given, pipelines=(replace(given.pipelines[0], stages=tuple(stages)),))
    lane = replace(compile_plan(given).lanes[which], split="last")
    ((first, last),) = lane.layers
    start, stop = data.draw(
        st.tuples(st.integers(first, last - 1), st.integers(first + 1, last)).filter(lambda ab: ab[0] < ab[1])
    )
    place = data.draw(st.integers(0, slices - 1))
    again = stages[which].recomputed_within((start, stop))
    inside = Inside(
        stop - start,
        again["full"],
        again["selective"],
        again["pointwise"],
        lane.embedding and start == 0,
        lane.head and stop == 9,
    )
    network, cost = Network(cluster), ComputeCost(given, cluster)
    grown = growth(network, cost, replace(lane, embedding=False, head=False), kind, place)
    assert grown is not None
    expected = work(network, cost, lane, kind(place, (start, stop)))
    found = grown.alone_s(inside, start == first, kind is not Forward and stop < last)
    assert found == pytest.approx((expected.alone_s(network), network.alone_s(expected.after)), rel=1e-12, abs=1e-15)


# --- Exchanges in parts ----------------------------------------------------------------------------------------------


def test_a_stage_whose_messages_block_computes_nothing_meanwhile() -> None:
    # Each activation has 32 x 64 elements of two bytes; the middle stage takes one in and sends one on, forward and backward.
    given, blocking = plan(["n0/0", "n1/0", "n2/0"]), replace(LOSES_NOTHING, blocking_messages=True)
    usual, waiting = world(3), world(3, stack=blocking)
    message_s = TOKENS * HIDDEN * 2 / RATE
    lanes = compile_plan(given).lanes
    for lane, messages in zip(lanes, (1, 2, 1), strict=True):
        for kind in (Forward, Backward):
            instruction = kind(0, lane.layers[0])
            free, blocked = (taken(given, cluster, instruction, lanes.index(lane)).seconds for cluster in (usual, waiting))
            assert blocked - free == pytest.approx(messages * message_s)
    weight = BackwardWeight(0, lanes[1].layers[0])
    assert taken(given, waiting, weight, 1).seconds == taken(given, usual, weight, 1).seconds
    assert Estimate(given, waiting).iteration_s() == pytest.approx(simulate(given, waiting).iteration_s, rel=1e-9)


def test_on_so_many_nodes_each_message_keeps_its_sender_and_its_receiver() -> None:
    given = plan(["n0/0", "n1/0", "n2/0"], micro_batches=8)
    lanes = compile_plan(given).lanes
    few, many = (world(3, stack=replace(LOSES_NOTHING, message_s=3.0, message_nodes=nodes)) for nodes in (4, 3))
    for lane, messages in ((0, 1), (1, 2), (2, 1)):
        for kind in (Forward, Backward):
            usual, waiting = (taken(given, cluster, kind(0, lanes[lane].layers[0]), lane).seconds for cluster in (few, many))
            assert waiting - usual == pytest.approx(3.0 * messages)
    # Nothing else takes long: for each micro-batch one forward and one backward of the stage in the middle, six seconds each; the
    # three seconds of another stage fill the pipeline, and three drain it.
    assert simulate(given, few).iteration_s < 0.1
    assert simulate(given, many).iteration_s == pytest.approx(8 * 12.0 + 2 * 3.0, rel=1e-2)


def test_messages_of_lanes_on_so_many_nodes_keep_them_on_any_cluster() -> None:
    given = plan(["n0/0", "n1/0 n2/0", "n3/0", "n4/0"])
    lanes = compile_plan(given).lanes
    few, many = (world(5, stack=replace(LOSES_NOTHING, message_s=3.0, message_lane_nodes=nodes)) for nodes in (3, 2))
    for lane, messages in ((0, 1), (1, 2), (2, 1), (3, 0)):
        usual, waiting = (taken(given, cluster, Forward(0, lanes[lane].layers[0]), lane).seconds for cluster in (few, many))
        assert waiting - usual == pytest.approx(3.0 * messages)
    assert Estimate(given, many).iteration_s() == pytest.approx(simulate(given, many).iteration_s, rel=1e-9)


def test_steps_of_rings_over_several_nodes_take_longer() -> None:
    usual, slow = (world(6, 4, stack=replace(LOSES_NOTHING, ring_step_s=step_s)) for step_s in (0.0, 0.5))

    def more_s(given: Plan, kind: type[Compute], lane: int = 1) -> float:
        instruction = kind(0, compile_plan(given).lanes[lane].layers[0])
        return taken(given, slow, instruction, lane).after.latency_s - taken(given, usual, instruction, lane).after.latency_s

    # Of four ranks on two nodes a sum goes round twice in three steps each; each of two layers sums twice, forward and backward.
    across = ["n0/0 n0/1 n1/0 n1/1", "n2/0 n2/1 n3/0 n3/1", "n4/0 n4/1 n5/0 n5/1"]
    model = replace(MODEL, layers=6)
    whole = plan(across, model=model)
    assert more_s(whole, Forward) == more_s(whole, Backward) == pytest.approx(2 * 2 * 2 * 3 * 0.5)
    # As a scatter and a gather it takes as many, and the weight half gathers each input once more.
    parts = plan(across, model=model, sequence_parallel=True)
    assert more_s(parts, Forward) == pytest.approx(2 * 2 * 2 * 3 * 0.5)
    assert more_s(parts, BackwardWeight) == pytest.approx(2 * 2 * 3 * 0.5)
    # Inside a node there is no such step, nor between context ranks.
    assert more_s(plan(["n0/0 n0/1", "n1/0 n1/1 n1/2 n1/3", "n2/0"], model=model), Forward) == 0
    assert more_s(plan(["n0/0 n1/0", "n2/0 n3/0"], model=model, context_parallel=2), Forward) == 0
    # Of two context ranks one is on two nodes, whichever it is: two ranks, a step each way. Three layers, and the embedding or
    # three sums of the cross-entropy.
    turned = ["n0/0 n0/1 n1/0 n2/0", "n3/0 n4/0 n5/0 n5/1"]
    ranks = plan(turned, model=model, context_parallel=2)
    assert [more_s(ranks, Forward, lane) for lane in (0, 1)] == pytest.approx([(3 * 2 + 1) * 2 * 0.5, (3 * 2 + 3) * 2 * 0.5])
    for given in (whole, parts, ranks):
        assert Estimate(given, slow).iteration_s() == pytest.approx(simulate(given, slow).iteration_s, rel=1e-6)


@pytest.mark.parametrize("turned", [False, True])
def test_lanes_whose_steps_go_over_different_nodes_are_not_one(turned: bool) -> None:
    # Equal GPUs on Ethernet; of one lane the second context rank is on two nodes, of the other the first.
    cluster = world(6, 2, stack=replace(LOSES_NOTHING, ring_step_s=0.5))
    gpu = cluster.nodes[0].gpu
    cluster = replace(cluster, nodes=tuple(replace(node, gpu=gpu) for node in cluster.nodes))
    lanes = [["n0/0 n0/1 n1/0 n2/0"], ["n3/0 n4/0 n5/0 n5/1"]]
    given = plan(*(lanes[::-1] if turned else lanes), context_parallel=2)
    assert Estimate(given, cluster).iteration_s() == pytest.approx(simulate(given, cluster).iteration_s, rel=1e-6)
    one = plan(["n0/0 n0/1"], ["n1/0 n2/0"])
    assert Estimate(one, cluster).iteration_s() == pytest.approx(simulate(one, cluster).iteration_s, rel=1e-6)


# --- Context parallelism ---------------------------------------------------------------------------------------------

RANKS = ["n0/0 n0/1 n1/0 n1/1 n2/0 n2/1 n3/0 n3/1"]  # two tensor ranks on each of four context ranks


def test_the_devices_of_a_lane_are_tensor_ranks_first_then_context_ranks() -> None:
    (lane,) = compile_plan(plan(RANKS, context_parallel=4)).lanes
    assert lane.tensor_parallel == 2
    assert lane.tensor_groups == (("n0/0", "n0/1"), ("n1/0", "n1/1"), ("n2/0", "n2/1"), ("n3/0", "n3/1"))


def test_keys_and_values_go_round_the_context_ranks_once_forward_and_twice_backward() -> None:
    given, cluster = plan(RANKS, context_parallel=4), world(4, 2)
    network = Network(cluster)
    # One of 2 key-value heads of 16 on each tensor rank, keys and values, 32 / 4 tokens of 2 bytes; both tensor ranks of a
    # node send over its one card, each of 3 steps, in each of 4 layers. Tensor ranks meet inside the node.
    block = 2 * 16 * (TOKENS // 4) * 2
    for instruction, rounds in ((Forward(0, (0, LAYERS)), 1), (Backward(0, (0, LAYERS)), 2), (BackwardWeight(0, (0, LAYERS)), 0)):
        found = work(network, ComputeCost(given, cluster), compile_plan(given).lanes[0], instruction)
        bytes_out = sent_by(network, together([found.beside, found.after]))
        assert bytes_out == pytest.approx(
            {f"n{i}/nic0>fabric": LAYERS * rounds * 3 * 2 * block for i in range(4)} if rounds else {}
        )


def test_recomputed_attention_sends_its_keys_and_values_again() -> None:
    counts = {}
    for mode in ("none", "selective", "full"):
        given = plan(RANKS, context_parallel=4)
        stage = replace(given.pipelines[0].stages[0], recompute=mode)
        given = replace(given, pipelines=(replace(given.pipelines[0], stages=(stage,)),))
        found = ComputeCost(given, world(4, 2)).collectives(compile_plan(given).lanes[0], Backward(0, (0, LAYERS)))
        counts[mode] = sum(c.count for c in found if c.group == "context")
    assert counts == {"none": 2 * LAYERS, "selective": 3 * LAYERS, "full": 3 * LAYERS}


def test_what_of_the_keys_and_values_takes_longer_than_attention_is_exposed() -> None:
    # Three steps of attention out of four have a transfer beside them: 4 s of attention hide 3 of its 5 s.
    given, cluster = plan(["n0/0 n1/0 n2/0 n3/0"], context_parallel=4), world(4)
    lane, network = compile_plan(given).lanes[0], Network(cluster)

    class Given(ComputeCost):
        attention = 4.0

        def seconds(self, lane: Lane, instruction: object) -> float:
            return 6.0

        def attention_s(self, lane: Lane, instruction: object) -> float:
            return self.attention

        def collectives(self, lane: Lane, instruction: object) -> tuple[TensorCollective, ...]:
            return (TensorCollective("ring", 5 * RATE / 3, 1, "context"),)

    cost = Given(given, cluster)
    found = work(network, cost, lane, Forward(0, (0, LAYERS)))
    assert (network.alone_s(found.beside), network.alone_s(found.after)) == pytest.approx((3.0, 2.0))
    assert found.alone_s(network) == pytest.approx(8.0)
    cost.attention = 8.0
    assert work(network, cost, lane, Forward(0, (0, LAYERS))).alone_s(network) == pytest.approx(6.0)
    # Of the six steps of a backward, three of keys and values and three of their gradients, the last is beside nothing.
    assert work(network, cost, lane, Backward(0, (0, LAYERS))).alone_s(network) == pytest.approx(6.0 + 5 / 6)
    cost.attention = 4.0
    assert work(network, cost, lane, Backward(0, (0, LAYERS))).alone_s(network) == pytest.approx(8.0)


@pytest.mark.parametrize("group", ["context", "expert"])
def test_what_waits_inside_a_node_and_then_for_the_network_takes_both_times(group: str) -> None:
    # 2 s of all-reduces over NVLink ports, then 3 s over cards: neither hides behind the other, though no link is in both.
    port = 10 * RATE
    cluster = world(2, 2)
    nodes = tuple(replace(node, intra=Intra("nvlink", port)) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes, fabric=replace(cluster.fabric, protocol_efficiency={"nvlink": 1.0, "ethernet": 1.0}))
    if group == "context":
        given = plan(["n0/0 n0/1 n1/0 n1/1"], context_parallel=2)
        moved = TensorCollective("ring", 3 * RATE / 2, 1, "context")  # of both tensor ranks over one card
    else:
        given = plan(["n0/0 n0/1"], ["n1/0 n1/1"], model=MIXTURE, expert_parallel=2)
        moved = TensorCollective("all_to_all", 3 * RATE, 1, "expert")  # of each tensor rank half
    summed = TensorCollective("all_reduce", 2 * port, 1, "tensor")  # a ring of two: each port has the bytes once

    class Given(ComputeCost):
        found: tuple[TensorCollective, ...] = ()

        def seconds(self, lane: Lane, instruction: object) -> float:
            return 6.0

        def attention_s(self, lane: Lane, instruction: object) -> float:
            return 0.0

        def collectives(self, lane: Lane, instruction: object) -> tuple[TensorCollective, ...]:
            return self.found

    cost, network, lane = Given(given, cluster), Network(cluster), compile_plan(given).lanes[0]
    took = []
    for cost.found in ((), (summed,), (moved,), (summed, moved)):
        took.append(work(network, cost, lane, Forward(0, (0, LAYERS))).alone_s(network))
    assert took == pytest.approx([6.0, 8.0, 9.0, 11.0], rel=1e-3)


def test_each_context_rank_computes_its_part_of_every_sequence() -> None:
    cluster = world(4)
    whole, divided = plan(["n0/0"]), plan(["n0/0 n1/0 n2/0 n3/0"], context_parallel=4)
    for instruction in (Forward(0, (0, LAYERS)), Backward(0, (0, LAYERS))):
        one, four = (ComputeCost(p, cluster).seconds(compile_plan(p).lanes[0], instruction) for p in (whole, divided))
        assert four == pytest.approx(one / 4)


def test_tensor_collectives_are_of_the_tokens_of_each_context_rank() -> None:
    lane = compile_plan(plan(RANKS, context_parallel=4)).lanes[0]
    found = ComputeCost(plan(RANKS, context_parallel=4), world(4, 2)).collectives(lane, Forward(0, (0, 2)))
    inside = [c for c in found if c.group == "tensor" and c.kind == "all_reduce" and c.count > 1]
    assert inside[0].num_bytes == TOKENS // 4 * HIDDEN * 2


def test_context_ranks_sum_their_gradients_as_replicas_do() -> None:
    # One pipeline of two context ranks: as two pipelines of one device each.
    ranks, copies = plan(["n0/0 n1/0"], context_parallel=2), plan(["n0/0"], ["n1/0"])
    cluster, reduction = world(2), ReduceGradients((0, LAYERS))
    programs = [compile_plan(p) for p in (ranks, copies)]
    assert all(reduction in program.lanes[0].instructions for program in programs)
    network = Network(cluster)
    found = [exchange(network, p, reduction, program.lanes) for p, program in zip((ranks, copies), programs, strict=True)]
    assert found[0] == found[1]
    # A ring of two sends the whole sum once over each card.
    assert sent_by(network, found[0])["n0/nic0>fabric"] == LAYERS * layer_parameters(MODEL) * 4


def test_each_context_rank_sends_its_part_to_its_like() -> None:
    given, cluster = plan(["n0/0 n1/0", "n2/0 n3/0"], context_parallel=2), world(4)
    sender, receiver = compile_plan(given).lanes
    network = Network(cluster)
    found = message(network, given, sender, receiver, SendActivation(0, 2, receiver.name, (0, 1)))
    part = TOKENS * HIDDEN * 2 / 2
    assert sent_by(network, found) == {"n0/nic0>fabric": part, "n1/nic0>fabric": part}


def test_programs_with_context_parallelism_round_trip() -> None:
    program = compile_plan(plan(["n0/0 n1/0", "n2/0 n3/0"], context_parallel=2, zero_stage=1, overlap_gradients=True))
    dry_run(program)
    assert parse_program(program_text(program)) == program


# --- Expert parallelism ----------------------------------------------------------------------------------------------

COPIES = (["n0/0"], ["n1/0"], ["n2/0"], ["n3/0"])


def test_every_token_goes_to_its_experts_and_back() -> None:
    given, cluster = plan(*COPIES, model=MIXTURE, expert_parallel=4), world(4)
    forward = taken(given, cluster, Forward(0, (0, LAYERS)))
    backward = taken(given, cluster, Backward(0, (0, LAYERS)))
    each = 2 * LAYERS * TOKENS * 2 * HIDDEN * 2 * 3 / 4  # there and back; 2 experts a token; 2 bytes; a quarter stays
    assert forward.after.num_bytes == pytest.approx(each)
    assert backward.after.num_bytes == pytest.approx(each)
    assert taken(given, cluster, BackwardWeight(0, (0, LAYERS))).after.num_bytes == 0


def test_what_arrived_for_experts_is_gathered_by_the_tensor_ranks_that_sent_parts_of_the_tokens() -> None:
    given, cluster = plan(["n0/0 n0/1"], ["n1/0 n1/1"], model=MIXTURE, expert_parallel=2, sequence_parallel=True), world(2, 2)
    of_stream = 2 * TOKENS * HIDDEN * 2  # of two layers without embedding and head; 2 bytes
    routed = 2 * of_stream  # 2 experts a token
    # There and back, each rank half of the tokens, of which half stay; gathered before the experts, and scattered behind them.
    each = 2 * routed / 2 + routed + routed
    for instruction in (Forward(0, (1, 3)), BackwardInput(0, (1, 3))):
        # What the stack hides of tensor ranks are the sums of attention, a gather and a scatter, not this.
        told = taken(given, cluster, instruction, stack=Stack("hides", tensor_overlap=1.0))
        assert told.after.num_bytes == pytest.approx(each)
        assert told.beside.num_bytes == pytest.approx(2 * of_stream)
    # Of the inputs of both halves only that of attention was not kept whole.
    weights = taken(given, cluster, BackwardWeight(0, (1, 3)))
    assert weights.after.num_bytes == pytest.approx(of_stream)


def test_what_goes_to_experts_and_what_is_gathered_for_them_are_each_slowed_by_their_own_scale() -> None:
    """The all-to-all goes over cards, at RATE, and the gathers stay in a node, at twice as much: neither hides the other."""
    given, bare = plan(["n0/0 n0/1"], ["n1/0 n1/1"], model=MIXTURE, expert_parallel=2, sequence_parallel=True), world(2, 2)
    cluster = replace(
        bare, nodes=tuple(replace(node, intra=replace(node.intra, bandwidth_bytes_per_s=2 * RATE)) for node in bare.nodes)
    )

    def after_s(**scales: float) -> float:
        network, software = Network(cluster), Stack("slow", tensor_overlap=1.0, **scales)
        told = work(network, ComputeCost(given, cluster, stack=software), compile_plan(given).lanes[0], Forward(0, (1, 3)))
        return network.alone_s(told.after)

    routed = 2 * TOKENS * 2 * HIDDEN * 2  # of two layers; 2 experts a token; 2 bytes
    # There and back half of the tokens over one card; each of two ranks sends half, before the experts and behind them.
    dispatched_s, gathered_s = 2 * routed / 2 / RATE, 2 * routed / 2 / (2 * RATE)
    assert after_s() == pytest.approx(dispatched_s + gathered_s)
    assert after_s(collective_scale=0.5) == pytest.approx(2 * dispatched_s + gathered_s)
    assert after_s(node_collective_scale=0.5) == pytest.approx(dispatched_s + 2 * gathered_s)


def test_gathers_for_experts_are_collectives_of_tensor_ranks() -> None:
    across = (["n0/0 n1/0"], ["n2/0 n3/0"])
    plans = [plan(*across, model=MIXTURE, expert_parallel=n, sequence_parallel=True) for n in (1, 2)]
    rounds, hosts = [], []
    for given in plans:
        cost, lane = ComputeCost(given, world(4), stack=Stack("s", tensor_host_s=1.0)), compile_plan(given).lanes[0]
        collectives = cost.collectives(lane, Forward(0, (1, 3)))
        rounds.append(ring_steps_s(Network(world(4)), Stack("s", ring_step_s=1.0), lane.tensor_groups, collectives))
        hosts.append(sum(one.count for one in collectives if one.among_tensor_ranks))
    # A gather and a scatter of attention and of the MLP, or of what arrived for the experts.
    assert rounds[0] == rounds[1] == 2 * 4
    assert hosts == [2 * 4, 2 * 4]


def test_experts_of_every_token_are_summed_as_a_dense_mlp_beside_the_others() -> None:
    both = replace(MIXTURE, experts=Moe(experts=4, top_k=2, ffn=128, shared_experts=1, shared_ffn=64))
    counts = []
    for model in (MIXTURE, both):
        given = plan(["n0/0 n0/1"], ["n1/0 n1/1"], model=model, expert_parallel=2, sequence_parallel=True)
        cost, lane = ComputeCost(given, world(2, 2)), compile_plan(given).lanes[0]
        counts.append({(one.kind, one.group): one.count for one in cost.collectives(lane, Forward(0, (1, 3)))})
    routed = {("all_gather", "routed"): 2, ("reduce_scatter", "routed"): 2, ("all_to_all", "expert"): 4}
    assert counts[0] == {("all_gather", "tensor"): 2, ("reduce_scatter", "tensor"): 2, **routed}
    assert counts[1] == {("all_gather", "tensor"): 4, ("reduce_scatter", "tensor"): 4, **routed}


WHOLE = {"model": MIXTURE, "expert_tensor_parallel": 1, "sequence_parallel": True}


def test_tensor_ranks_with_whole_experts_send_their_own_tokens_and_gather_none() -> None:
    of_stream = 2 * TOKENS * HIDDEN * 2  # of two layers without embedding and head; 2 bytes
    for degree, elsewhere, crossing in ((2, 1 / 2, 0), (4, 3 / 4, 1 / 2)):
        given, cluster = plan(["n0/0 n0/1"], ["n1/0 n1/1"], **WHOLE, expert_parallel=degree), world(2, 2)  # type: ignore[arg-type]
        cost, lane = ComputeCost(given, cluster), compile_plan(given).lanes[0]
        network = Network(cluster)
        found = {(one.kind, one.group): one for one in cost.collectives(lane, Forward(0, (1, 3)))}
        assert {key: one.count for key, one in found.items()} == {
            ("all_gather", "tensor"): 2,
            ("reduce_scatter", "tensor"): 2,
            ("all_to_all", "expert"): 4,
        }
        # There and back, of two ranks half of the tokens each, and 2 experts a token.
        told = work(network, ComputeCost(given, cluster, stack=Stack("hides", tensor_overlap=1.0)), lane, Forward(0, (1, 3)))
        assert told.after.num_bytes == pytest.approx(2 * 2 * of_stream * elsewhere)
        loads = {network.links[link].name: num_bytes for link, num_bytes in told.after.loads}
        out = sum(num_bytes for name, num_bytes in loads.items() if name.endswith(">fabric"))
        assert out == pytest.approx(2 * 2 * of_stream * crossing)


def test_software_may_send_a_token_to_a_node_once() -> None:
    given, cluster = plan(["n0/0 n0/1"], ["n1/0 n1/1"], **WHOLE, expert_parallel=4), world(2, 2)  # type: ignore[arg-type]
    found = [
        taken(given, cluster, Forward(0, (1, 3)), stack=Stack("s", tensor_overlap=1.0, node_dispatch=way))
        for way in (False, True)
    ]
    of_stream = 2 * TOKENS * HIDDEN * 2  # of two layers; 2 bytes; all tokens of both ranks together
    # Of two of four experts, one a rank, a given one is chosen in 1 of 2 cases, and one of two in 5 of 6: a token goes to the
    # rank beside its own, to the other node, and from its first rank there to the second.
    assert found[0].after.num_bytes == pytest.approx(2 * of_stream * 2 * 3 / 4)
    assert found[1].after.num_bytes == pytest.approx(2 * of_stream * (1 / 2 + 5 / 6 + 1 / 2))


def test_gradients_of_whole_experts_are_summed_over_those_that_hold_the_same_ones() -> None:
    parts = layer_parameter_parts(MIXTURE)
    dense, experts = LAYERS * (parts.total - parts.experts), LAYERS * parts.experts
    # Two copies of everything but, where the ranks of both share them, of experts: a ring of two sends each byte once.
    for degree, copies in ((2, 2), (4, 1)):
        given, cluster = plan(["n0/0 n0/1"], ["n1/0 n1/1"], **WHOLE, expert_parallel=degree), world(2, 2)  # type: ignore[arg-type]
        found = exchange(Network(cluster), given, ReduceGradients((0, LAYERS)), compile_plan(given).lanes)
        assert found.num_bytes == pytest.approx(4 * 2 * (dense + experts * (copies - 1)))


def test_lanes_that_share_experts_take_what_their_own_tokens_take_alone() -> None:
    # All four send at once, each over its own card: 3 of 4 parts out, and as much in.
    given, cluster = plan(*COPIES, model=MIXTURE, expert_parallel=4, micro_batches=1), world(4)
    each = 2 * LAYERS * TOKENS * 2 * HIDDEN * 2 * 3 / 4
    spans = {(s.lane, type(s.instruction)): s for s in simulate(given, cluster).spans}
    forward = spans["p2s0", Forward]
    computed_s = ComputeCost(given, cluster).seconds(compile_plan(given).lanes[2], Forward(0, (0, LAYERS)))
    assert forward.end_s - forward.start_s == pytest.approx(computed_s + each / RATE)


def test_only_neighbours_in_the_plan_share_experts() -> None:
    given, cluster = plan(*COPIES, model=MIXTURE, expert_parallel=2), world(4)
    network = Network(cluster)
    cost, lane = ComputeCost(given, cluster), compile_plan(given).lanes[2]
    found = work(network, cost, lane, Forward(0, (0, 1))).after
    names = {network.links[link].name for link, _ in found.loads}
    assert {name for name in names if "fabric" in name} == {"n2/nic0>fabric", "fabric>n3/nic0"}


def test_gradients_of_experts_are_summed_over_those_that_hold_the_same_ones() -> None:
    given, cluster = plan(*COPIES, model=MIXTURE, expert_parallel=2), world(4)
    network = Network(cluster)
    found = exchange(network, given, ReduceGradients((0, LAYERS)), compile_plan(given).lanes)
    parts = layer_parameter_parts(MIXTURE)
    dense, experts = LAYERS * (parts.total - parts.experts), LAYERS * parts.experts
    # A ring of n sends 2 (n - 1) / n: the rest over four devices; half the experts over two.
    assert found.num_bytes == pytest.approx(4 * (4 * (dense * 2 * 3 / 4 + experts / 2 * 2 * 1 / 2)))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (plan(*COPIES, expert_parallel=2), "divides the experts evenly, but small has none, and it is 2"),
        (plan(*COPIES, model=MIXTURE, expert_parallel=3), "divides the experts evenly, but mixture has 4, and it is 3"),
        (
            plan(*COPIES[:3], model=MIXTURE, expert_parallel=2),
            "needs a multiple of 2 copies of a stage .* but stage 0 has 3 copies of 1 tensor ranks",
        ),
        (plan(["n0/0"], ["n1/0", "n2/0"], model=MIXTURE, expert_parallel=2), "needs pipelines of equal cuts, degrees and"),
        (
            plan(["n0/0 n0/1"], ["n1/0 n1/1"], ["n2/0 n2/1"], **WHOLE, expert_parallel=4),  # type: ignore[arg-type]
            "4 with whole experts on 2 tensor ranks needs a multiple of 2 copies .* but stage 0 has 3 copies of 2 tensor",
        ),
        (
            plan(["n0/0 n0/1"], ["n1/0 n1/1"], **{**WHOLE, "sequence_parallel": False}, expert_parallel=4),  # type: ignore[arg-type]
            "expert_tensor_parallel 1 needs sequence_parallel true",
        ),
        (
            plan(["n0/0 n0/1"], ["n1/0 n1/1"], **WHOLE),  # type: ignore[arg-type]
            "all tensor-parallel degrees divide, but it is 1, and there are stages of 2 tensor ranks",
        ),
        (plan(*COPIES, expert_tensor_parallel=1), "is of mixtures of experts, but small is none; accepted: null"),
        (plan(*COPIES, model=MIXTURE, expert_parallel=2, shard_group=2), "takes shard_group null, but got 2"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(given: Plan, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        compile_plan(given)


# --- Hybrid sharding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_shard_groups_scatter_inside_and_sum_across(zero_stage: int) -> None:
    given = plan(*COPIES, zero_stage=zero_stage, shard_group=2)
    cluster, members = world(4), compile_plan(given).lanes
    network, parameters = Network(cluster), LAYERS * layer_parameters(MODEL)
    # Inside a pair a device sends half of the gradients, and of the half that it then has, all to its equal: 2 x 1/2 x 1/2.
    reduction = ReduceGradients((0, LAYERS))
    for moved in (exchange(network, given, reduction, members), sum_of_shards(network, given, reduction, members)):
        assert moved is not None
        assert sent_by(network, moved) == pytest.approx({f"n{i}/nic0>fabric": 4 * parameters / 2 for i in range(4)})
    gathered = exchange(network, given, GatherParameters((0, LAYERS)), members)
    assert sent_by(network, gathered) == pytest.approx({f"n{i}/nic0>fabric": 2 * parameters / 2 for i in range(4)})
    whole = replace(given, shard_group=None)
    assert sum_of_shards(network, given, GatherParameters((0, LAYERS)), members) is None
    assert sum_of_shards(network, whole, reduction, members) is None
    assert sent_by(network, exchange(network, whole, GatherParameters((0, LAYERS)), members)) == pytest.approx(
        {f"n{i}/nic0>fabric": 2 * parameters * 3 / 4 for i in range(4)}
    )


def test_a_shard_group_of_all_replicas_is_no_group() -> None:
    given = plan(*COPIES, zero_stage=3)
    cluster = world(4)
    assert simulate(replace(given, shard_group=4), cluster).iteration_s == simulate(given, cluster).iteration_s


def test_shard_groups_must_divide_the_replicas() -> None:
    with pytest.raises(
        ValueError, match="shard_group 3 must divide the number of replicas of every layer, but layers 0 to 0 have 4"
    ):
        compile_plan(plan(*COPIES, zero_stage=3, shard_group=3))


# --- Offloading ------------------------------------------------------------------------------------------------------


def test_an_offloaded_step_takes_what_its_own_host_does_whichever_lane_comes_first() -> None:
    # A GPU that has a host to itself, and one of eight.
    nodes = tuple(replace(ethernet_cluster([gpus], RATE, kind="pcie4").nodes[0], name=f"n{i}") for i, gpus in enumerate((1, 8)))
    nodes = tuple(replace(one, gpus=gpus) for one, gpus in zip(nodes, (1, 8), strict=True))
    cluster = replace(ethernet_cluster([2, 2], RATE, kind="pcie4"), nodes=nodes, stack=LOSES_NOTHING)
    seconds = {
        simulate(plan([first], [second], zero_stage=1, offload_optimizer=True), cluster).iteration_s
        for first, second in (("n0/0", "n1/0"), ("n1/0", "n0/0"))
    }
    assert len({round(one, 12) for one in seconds}) == 1
    spans = simulate(plan(["n0/0"], ["n1/0"], zero_stage=1, offload_optimizer=True), cluster).spans
    steps = [span.end_s - span.start_s for span in spans if isinstance(span.instruction, OptimizerStep)]
    assert max(steps) > 2 * min(steps)


def test_an_offloaded_step_moves_gradients_down_and_parameters_up_and_updates_on_the_host() -> None:
    given = plan(["n0/0"], ["n0/1"], zero_stage=1, offload_optimizer=True)
    cluster = replace(ethernet_cluster([2], RATE, intra_bytes_per_s=2e9, kind="pcie4"), stack=LOSES_NOTHING)
    # What PCIe carries among GPUs is no matter: nothing goes from one to another here.
    cluster = replace(cluster, fabric=replace(cluster.fabric, protocol_efficiency=(("pcie", 0.5),)))
    lane = compile_plan(given).lanes[0]
    ends = 2 * 96 * HIDDEN + HIDDEN
    held = (LAYERS * layer_parameters(MODEL) + ends) / 2  # the other device has the other half
    # Two devices share the switch's uplink, and the processors; a node of more shares them further, whoever is used.
    moved_s = held * (4 + 2) * 2 / 2e9
    host_s = held * optimizer_bytes("bf16", "fp32", "adamw") * 2 / HOST_BYTES_PER_S
    assert ComputeCost(given, cluster).seconds(lane, OptimizerStep()) == pytest.approx(moved_s + host_s)
    larger = replace(cluster, nodes=tuple(replace(node, gpus=8) for node in cluster.nodes))  # of two switches of four
    assert ComputeCost(given, larger).seconds(lane, OptimizerStep()) == pytest.approx(2 * moved_s + 4 * host_s)
