"""The simulator against timelines drawn by hand, closed forms and laws that hold for every plan."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import simpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sim.prepared
from sim.cost.feasibility import infeasible
from sim.cost.network import Network, Transfer
from sim.cost.sharing import Route, routes
from sim.engine import _Flows, _Run, simulate
from sim.metrics import report
from sim.prepared import Prepared, message_key
from sim.spec.cluster import Cluster, Fabric, Intra, Nic, Node, read_cluster
from sim.spec.compile import compile_plan
from sim.spec.counts import embedding_parameters, head_parameters, layer_parameters, total_parameters
from sim.spec.gpu import gpu_kind
from sim.spec.plan import Pipeline, Plan, Replica, Stage, read_plan
from sim.spec.program import (
    INSTRUCTIONS,
    Backward,
    Compute,
    Forward,
    GatherParameters,
    OptimizerStep,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    dependencies,
    instruction_text,
    work_key,
)
from sim.spec.reading import InputError
from sim.spec.trace import Span, Trace
from sim.spec.transformer import Transformer
from tests.strategies import worlds
from tests.worlds import GivenCost, ethernet_cluster, model, plan, stage

Given = Callable[[float, float], None]

COLLECTIVES = (ReduceGradients, GatherParameters)


@pytest.fixture
def every_device_takes(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Fixes forward and backward seconds per layer for devices n0/0 ... n9/9."""

    def fix(forward_s: float, backward_s: float) -> None:
        names = [f"n{i}/{j}" for i in range(10) for j in range(10)]
        cost = GivenCost(dict.fromkeys(names, forward_s), dict.fromkeys(names, backward_s))
        monkeypatch.setattr(sim.prepared, "ComputeCost", cost)

    return fix


def drawn(trace: Trace, lane: str) -> list[tuple[str, float, float]]:
    """The computations of one lane as (text, start, end), waits left out."""
    spans = [s for s in trace.spans if s.lane == lane and isinstance(s.instruction, Compute)]
    return [(instruction_text(s.instruction), round(s.start_s, 9), round(s.end_s, 9)) for s in spans]


def one_layer_pipeline(depth: int) -> list[Stage]:
    """Stages of one layer, one per node."""
    return [stage(f"n{s}/0", (s, s + 1)) for s in range(depth)]


# --- Closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(depth=st.integers(1, 6), micro_batches=st.integers(1, 12), f=st.floats(0.1, 3), b=st.floats(0.1, 3))
def test_equal_stages_take_m_plus_p_minus_1_rounds(schedule: str, depth: int, micro_batches: int, f: float, b: float) -> None:
    names = {f"n{i}/0" for i in range(6)}
    cluster = ethernet_cluster([1] * max(depth, 2), bytes_per_s=1e30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.prepared, "ComputeCost", GivenCost(dict.fromkeys(names, f), dict.fromkeys(names, b)))
        trace = simulate(plan([one_layer_pipeline(depth)], micro_batches, schedule=schedule), cluster)
    # Huang et al. (2019), Narayanan et al. (2021): the bubble is (p-1)/(m+p-1) of the iteration.
    assert trace.iteration_s == pytest.approx((micro_batches + depth - 1) * (f + b), rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(
    depth=st.integers(1, 6),
    micro_batches=st.integers(1, 6),
    slices=st.sampled_from((2, 4)),
    f=st.floats(0.1, 3),
    b=st.floats(0.1, 3),
)
def test_slices_fill_a_pipeline_as_as_many_micro_batches_would(
    schedule: str, depth: int, micro_batches: int, slices: int, f: float, b: float
) -> None:
    """Where attention costs nothing: the bubble is (p-1)/(mk+p-1) of the iteration."""
    names = {f"n{i}/0" for i in range(6)}
    cluster = ethernet_cluster([1] * max(depth, 2), bytes_per_s=1e30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.prepared, "ComputeCost", GivenCost(dict.fromkeys(names, f), dict.fromkeys(names, b)))
        whole = plan([one_layer_pipeline(depth)], micro_batches, schedule=schedule)
        trace = simulate(replace(whole, sequence_length=8, sequence_slices=slices), cluster)
    # The last stage begins to go back only when the last slice of the first micro-batch is there.
    assert trace.iteration_s == pytest.approx((micro_batches * slices + depth - 1) * (f + b), rel=1e-12)


def looped(schedule: str, depth: int, chunks: int) -> list[Stage]:
    """Stages of so many ranges of one layer, one per node, as a schedule takes them."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(depth)]
    for k in range(depth * chunks):
        ranges[2 * depth - 1 - k if schedule == "zb-v" and k >= depth else k % depth].append((k, k + 1))
    return [stage(f"n{s}/0", *held) for s, held in enumerate(ranges)]


def idle_s(trace: Trace, lane: str) -> float:
    """Seconds between a lane's first and last computation in which it does not compute."""
    spans = [s for s in trace.spans if s.lane == lane and isinstance(s.instruction, Compute)]
    return max(s.end_s for s in spans) - min(s.start_s for s in spans) - sum(s.end_s - s.start_s for s in spans)


@pytest.mark.parametrize("latency_s", [0.0, 0.5, 1.0, 3.0])
def test_eager_1f1b_hides_messages_that_1f1b_waits_for(latency_s: float, every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    cluster = ethernet_cluster([1, 1], 1e30, latency_s=latency_s)
    for schedule, under_way in (("1f1b", 2), ("eager-1f1b", 3)):
        short, long = (
            simulate(plan([looped(schedule, 2, 1)], count, schedule=schedule), cluster).iteration_s for count in (24, 48)
        )
        # There and back a micro-batch takes F + B on both stages and two messages, and so many of them are under way at once.
        assert (long - short) / 24 == pytest.approx(max(2.0, (4.0 + 2 * latency_s) / under_way))


@pytest.mark.parametrize("latency_s", [0.0, 0.5, 1.0, 3.0])
@given(under_way=st.integers(1, 6))
def test_micro_batches_in_flight_share_the_way_there_and_back(latency_s: float, under_way: int) -> None:
    cluster = ethernet_cluster([1, 1], 1e30, latency_s=latency_s)
    names = {"n0/0": 1.0, "n1/0": 1.0}
    times = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.prepared, "ComputeCost", GivenCost(names, names))
        for count in (24, 48):
            made = plan([looped("1f1b", 2, 1)], count)
            made = replace(made, pipelines=(made.pipelines[0].holding([under_way, 1]),))
            times.append(simulate(made, cluster).iteration_s)
    # As above, with as many under way as the first stage holds: Little's law.
    assert (times[1] - times[0]) / 24 == pytest.approx(max(2.0, (4.0 + 2 * latency_s) / under_way))


@given(depth=st.integers(1, 5), chunks=st.integers(2, 3), groups=st.integers(1, 3), f=st.floats(0.1, 3), b=st.floats(0.1, 3))
@settings(max_examples=30)
def test_interleaved_has_a_bubble_of_p_minus_1_over_v_m(depth: int, chunks: int, groups: int, f: float, b: float) -> None:
    names = {f"n{i}/0" for i in range(5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.prepared, "ComputeCost", GivenCost(dict.fromkeys(names, f), dict.fromkeys(names, b)))
        given_plan = plan([looped("interleaved", depth, chunks)], groups * depth, schedule="interleaved")
        trace = simulate(given_plan, ethernet_cluster([1] * max(depth, 2), 1e30))
    # Narayanan et al. (2021), section 2.2.2: (p - 1) / v forwards and backwards of a whole stage.
    assert trace.iteration_s == pytest.approx((groups * depth * chunks + depth - 1) * (f + b), rel=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.7)])
def test_zero_bubble_schedules_have_the_bubbles_of_their_paper(depth: int, f: float, i: float, w: float) -> None:
    names, micro_batches = [f"n{s}/0" for s in range(6)], 4 * depth
    cost = GivenCost(dict.fromkeys(names, f), dict.fromkeys(names, i), weight_s=w)
    cluster, work_s = ethernet_cluster([1] * max(depth, 2), 1e30), micro_batches * (f + i + w)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.prepared, "ComputeCost", cost)
        one = simulate(plan([looped("zb-1p", depth, 1)], micro_batches, schedule="zb-1p"), cluster)
        two = simulate(plan([looped("zb-2p", depth, 1)], micro_batches, schedule="zb-2p"), cluster)
    # Qi et al. (2024), table 2, for W <= F <= I; a stage's iteration is from its first work to its last.
    assert one.iteration_s == pytest.approx(work_s + (depth - 1) * (f + i - w))
    assert max(idle_s(one, lane) for lane in one.lanes) == pytest.approx((depth - 1) * (f + i - w), abs=1e-9)
    assert max(idle_s(two, lane) for lane in two.lanes) == pytest.approx((depth - 1) * (f + i - 2 * w), abs=1e-9)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6, 8])
def test_zb_v_has_next_to_no_bubble(depth: int, every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    trace = simulate(plan([looped("zb-v", depth, 2)], 4 * depth, schedule="zb-v"), ethernet_cluster([1] * max(depth, 2), 1e30))
    work_s = 6 * 4 * depth
    # The last stage cannot begin before the forwards of the others: no order is shorter than this.
    least_s = work_s + depth - 1
    assert least_s <= trace.iteration_s <= least_s + depth // 2
    # 1F1B with the same layers would wait (p - 1)(F + I + W) of both chunks.
    assert trace.iteration_s - work_s < 6 * (depth - 1) or depth == 1


@pytest.mark.parametrize("depth", [2, 3, 4, 6, 8])
def test_zb_v_keeps_a_small_bubble_where_halves_are_unequal_and_messages_take_time(depth: int) -> None:
    # An order that fits together in instants of equal work alone loses 9 to 17 % here.
    f, i, w, latency_s = 1.0, 1.1, 0.9, 0.1
    names = [f"n{s}/0" for s in range(depth)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.prepared, "ComputeCost", GivenCost(dict.fromkeys(names, f), dict.fromkeys(names, i), weight_s=w))
        cluster = ethernet_cluster([1] * depth, 1e30, latency_s=latency_s)
        trace = simulate(plan([looped("zb-v", depth, 2)], 4 * depth, schedule="zb-v"), cluster)
    assert trace.iteration_s < 1.09 * 2 * 4 * depth * (f + i + w)


# --- Timelines drawn by hand -----------------------------------------------------------------------------------------


# Instants of one second, every piece of work takes one. a and b are a stage's first and second layer range.
SCHEDULES_DRAWN = {
    "interleaved": (2, 2, 2, """
        p0s0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a
        p0s1  .   F0a F1a F0b B0b F1b B1b B0a B1a .
    """),
    "zb-1p": (3, 1, 4, """
        p0s0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        p0s1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        p0s2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """),
    "zb-2p": (2, 1, 4, """
        p0s0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 .
        p0s1  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """),
    "zb-v": (2, 2, 2, """
        p0s0  F0a F1a .   F0b I0b F1b I1b W0b I0a W1b I1a W0a W1a
        p0s1  .   F0a F0b F1a F1b I0b I0a I1b I1a W0b W0a W1b W1a
    """),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES_DRAWN)
def test_schedules_follow_the_timelines_drawn_by_hand(schedule: str, every_device_takes: Given) -> None:
    depth, chunks, micro_batches, drawing = SCHEDULES_DRAWN[schedule]
    every_device_takes(1.0, 1.0)
    trace = simulate(
        plan([looped(schedule, depth, chunks)], micro_batches, schedule=schedule), ethernet_cluster([1] * depth, 1e30)
    )
    lines = []
    for s, held in enumerate(trace.plan.pipelines[0].stages):
        instants = ["."] * round(trace.iteration_s)
        for text, start_s, end_s in drawn(trace, f"p0s{s}"):
            assert end_s - start_s == 1 and start_s == round(start_s)
            work, _, layers = text.partition("[")
            first = int(layers.partition(":")[0])
            instants[round(start_s)] = work + ("ab"[[start for start, _ in held.layers].index(first)] if chunks > 1 else "")
        lines.append([f"p0s{s}", *instants])
    assert lines == [line.split() for line in drawing.strip().splitlines()]


def test_unequal_stages_follow_the_timeline_drawn_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # seconds  0  1  2  3     7     9  10    13    15    19    21
    # p0s0     F0 F1 .  .  .  B0    F2 .     B1    .     B2
    # p0s1     .  F0    B0    F1 B1          F2 B2
    cost = GivenCost({"n0/0": 1.0, "n1/0": 2.0}, {"n0/0": 2.0, "n1/0": 4.0})
    monkeypatch.setattr(sim.prepared, "ComputeCost", cost)
    trace = simulate(plan([one_layer_pipeline(2)], 3), ethernet_cluster([1, 1], 1e30))
    assert drawn(trace, "p0s0") == [
        ("F0[0:1]", 0, 1),
        ("F1[0:1]", 1, 2),
        ("B0[0:1]", 7, 9),
        ("F2[0:1]", 9, 10),
        ("B1[0:1]", 13, 15),
        ("B2[0:1]", 19, 21),
    ]
    assert drawn(trace, "p0s1") == [
        ("F0[1:2]", 1, 3),
        ("B0[1:2]", 3, 7),
        ("F1[1:2]", 7, 9),
        ("B1[1:2]", 9, 13),
        ("F2[1:2]", 13, 15),
        ("B2[1:2]", 15, 19),
    ]


def test_a_message_takes_its_bytes_over_the_rate_and_the_latency(every_device_takes: Given) -> None:
    # 8 bytes at 16 bytes/s and 0.25 s of latency: F [0, 1], sent [1, 1.75], F [1.75, 2.75], B [2.75, 4.75], sent, B [5.5, 7.5]
    every_device_takes(1.0, 2.0)
    trace = simulate(plan([one_layer_pipeline(2)], 1), ethernet_cluster([1, 1], bytes_per_s=16, latency_s=0.25))
    assert drawn(trace, "p0s1") == [("F0[1:2]", 1.75, 2.75), ("B0[1:2]", 2.75, 4.75)]
    assert drawn(trace, "p0s0")[-1] == ("B0[0:1]", 5.5, 7.5)


def test_a_message_has_the_bytes_of_a_slice(every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    cluster, whole = ethernet_cluster([1, 1], bytes_per_s=1e6), replace(plan([one_layer_pipeline(2)], 2), sequence_length=8)
    traces = [simulate(replace(whole, sequence_slices=slices), cluster) for slices in (1, 2)]
    sent = [[s.num_bytes for s in trace.spans if isinstance(s.instruction, SendActivation)] for trace in traces]
    assert (len(sent[0]), len(sent[1])) == (2, 4)
    assert sum(sent[0]) == sum(sent[1]) == 4 * sent[1][0]


def test_sends_do_not_block_the_computation_that_follows(every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    trace = simulate(plan([one_layer_pipeline(2)], 2, schedule="gpipe"), ethernet_cluster([1, 1], bytes_per_s=4))
    assert drawn(trace, "p0s0")[:2] == [("F0[0:1]", 0, 1), ("F1[0:1]", 1, 2)]
    assert drawn(trace, "p0s1")[:2] == [("F0[1:2]", 3, 4), ("F1[1:2]", 5, 6)]  # the second message followed the first


def test_two_pipelines_over_one_card_take_twice_as_long_for_each_message(every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    cluster = ethernet_cluster([2, 2], bytes_per_s=16)
    both = [[stage(f"n0/{i}", (0, 1)), stage(f"n1/{i}", (1, 2))] for i in range(2)]
    alone = simulate(plan([both[0]], 1), cluster)
    shared = simulate(plan(both, 1, zero_stage=0, overlap_gradients=False), cluster)
    assert drawn(alone, "p0s1")[0] == ("F0[1:2]", 1.5, 2.5)
    assert drawn(shared, "p0s1")[0] == ("F0[1:2]", 2.0, 3.0)
    assert drawn(shared, "p1s1")[0] == ("F0[1:2]", 2.0, 3.0)


def test_the_gradient_ring_moves_two_n_minus_1_over_n_of_the_bytes(every_device_takes: Given) -> None:
    every_device_takes(1.0, 2.0)
    for n in (2, 3, 4):
        replicas = [[stage(f"n{i}/0", (0, 1))] for i in range(n)]
        given_plan = plan(replicas, 1, zero_stage=0, overlap_gradients=False)
        trace = simulate(given_plan, ethernet_cluster([1] * n, bytes_per_s=100.0))
        model = given_plan.transformer
        # Embedding, layer and head follow one another on the communication stream, in fp32.
        ring_s = 2 * (n - 1) / n * 4 * total_parameters(model) / 100.0
        assert trace.iteration_s == pytest.approx(3.0 + ring_s, rel=1e-12)


def test_reductions_overlap_the_last_backward_only_where_the_plan_says_so(
    every_device_takes: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_device_takes(1.0, 2.0)
    monkeypatch.setattr("sim.spec.compile.BUCKET_PARAMETERS", 1)
    cluster = ethernet_cluster([1, 1], bytes_per_s=1e4)
    replicas = [[stage(f"n{i}/0", (0, 4))] for i in range(2)]
    end = {overlap: simulate(plan(replicas, 2, zero_stage=0, overlap_gradients=overlap), cluster) for overlap in (False, True)}
    first = {
        overlap: min(s.start_s for s in trace.spans if isinstance(s.instruction, ReduceGradients))
        for overlap, trace in end.items()
    }
    assert first[False] == pytest.approx(24.0)  # after everything: two micro-batches of 4 + 8 seconds
    assert first[True] == pytest.approx(18.0)  # after the backward of the last of the four layers
    assert end[True].iteration_s < end[False].iteration_s


def test_the_optimizer_waits_for_the_reductions(every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    replicas = [[stage(f"n{i}/0", (0, 1))] for i in range(2)]
    trace = simulate(plan(replicas, 1, zero_stage=1), ethernet_cluster([1, 1], bytes_per_s=100))
    reduced = max(s.end_s for s in trace.spans if isinstance(s.instruction, ReduceGradients))
    (step,) = [s for s in trace.spans if s.lane == "p0s0" and instruction_text(s.instruction) == "STEP"]
    gathers = [s for s in trace.spans if instruction_text(s.instruction).startswith("G[")]
    assert step.start_s == reduced
    assert min(s.start_s for s in gathers) == step.end_s


def test_sums_of_shards_hold_up_one_another_alone(every_device_takes: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two nodes of two devices, each of which is a shard group: gradients are scattered inside, and their sums cross the cards.
    #
    #  lane      B3 B2 B1 B0
    #  scatters     S3 S2 S1 S0
    #  sums            A3 A3 A3 A3 A2 A2 A2 A2 ...
    every_device_takes(1.0, 2.0)
    monkeypatch.setattr("sim.spec.compile.BUCKET_PARAMETERS", 1)
    cluster = ethernet_cluster([2, 2], bytes_per_s=100.0, intra_bytes_per_s=1e3)
    replicas = [[stage(f"n{i // 2}/{i % 2}", (0, 4))] for i in range(4)]
    trace = simulate(plan(replicas, 1, zero_stage=2, shard_group=2), cluster)
    counts = layer_parameters, embedding_parameters, head_parameters
    layer, embedding, head = (count(trace.plan.transformer) for count in counts)
    backward_s = [4 + 2.0 * (i + 1) for i in range(4)]
    # The head's gradient is there with that of the last layer, the embedding's with that of the first.
    ready = [(backward_s[0], head), *((at_s, layer) for at_s in backward_s), (backward_s[3], embedding)]
    scattered_s = summed_s = 0.0
    for at_s, parameters in ready:
        scattered_s = max(scattered_s, at_s) + 4 * parameters / 2 / 1e3
        # A shard of each of the two devices of a node goes over its card, there and back.
        summed_s = max(summed_s, scattered_s) + 2 * (4 * parameters / 2) / 100.0
    (step,) = [s for s in trace.spans if s.lane == "p0s0" and instruction_text(s.instruction) == "STEP"]
    assert summed_s > scattered_s + 4 * layer / 100.0
    assert step.start_s == pytest.approx(summed_s, rel=1e-12)


def test_parameters_are_gathered_beside_sums_of_shards(every_device_takes: Given) -> None:
    # The embedding's and the head's sums come last; those of two micro-batches hold up no gather of the second.
    every_device_takes(1.0, 2.0)
    replicas = [[stage(f"n{i // 2}/{i % 2}", (0, 1))] for i in range(4)]
    cluster = ethernet_cluster([2, 2], bytes_per_s=1.0, intra_bytes_per_s=1e12)
    trace = simulate(plan(replicas, 2, zero_stage=3, shard_group=2), cluster)
    begun_s = [span.start_s for span in compute_spans(trace) if span.lane == "p0s0" and isinstance(span.instruction, Forward)]
    assert begun_s == pytest.approx([0.0, 3.0], abs=1e-3)


# --- Flows by hand ---------------------------------------------------------------------------------------------------


def flow_ends(starts: list[tuple[float, dict[int, float]]], capacities: list[float]) -> list[float]:
    """When transfers with these start times and loads end."""
    env = simpy.Environment()
    flows = _Flows(env, capacities)
    ends = [0.0] * len(starts)
    made = routes([Transfer(tuple(load.items()), 0.0, 1) for _, load in starts], capacities)

    def begin(index: int, route: Route) -> None:
        def end() -> None:
            ends[index] = env.now

        flows.start(route, end)

    for i, ((at, _), route) in enumerate(zip(starts, made, strict=True)):
        env.timeout(at).callbacks.append(lambda _, i=i, route=route: begin(i, route))
    env.run()
    return ends


def test_a_flow_that_begins_later_halves_the_rate_while_it_lasts() -> None:
    # 10 bytes alone for 4 s at 1 byte/s; then half the rate until the 3 bytes of the other are through, at 10; 3 left.
    assert flow_ends([(0.0, {0: 10.0}), (4.0, {0: 3.0})], [1.0]) == pytest.approx([13.0, 10.0])


def test_three_flows_share_two_links_max_min_fairly() -> None:
    # Flow 0 crosses both links, 1 the first (2 bytes/s), 2 the second (1 byte/s): rates 0.5, 1.5, 0.5 until 1 ends at 2 s.
    # Then 0 stays bound by the second link. Both have 2 - 1 = 1 byte left at 0.5: they end at 4 s.
    ends = flow_ends([(0.0, {0: 2.0, 1: 2.0}), (0.0, {0: 3.0}), (0.0, {1: 2.0})], [2.0, 1.0])
    assert ends == pytest.approx([4.0, 2.0, 4.0])


def test_a_flow_is_not_disturbed_by_one_on_other_links() -> None:
    assert flow_ends([(0.0, {0: 4.0}), (1.0, {1: 9.0})], [1.0, 1.0]) == pytest.approx([4.0, 10.0])


# --- Tensor-parallel collectives -------------------------------------------------------------------------------------


def test_the_bytes_of_collectives_that_are_folded_into_seconds_are_counted_on_their_links() -> None:
    # Two devices of one NVLink node, one layer: the all-reduces of the forward and the backward cross each port.
    cluster = ethernet_cluster([2], 1.0, intra_bytes_per_s=1e9)
    pipelines = (Pipeline(1, 3, (Stage((Replica(("n0/0", "n0/1"), 1),), ((0, 1),)),)),)
    given_plan = replace(plan([[stage("n0/0", (0, 1))]], 3), pipelines=pipelines)
    trace = simulate(given_plan, cluster)
    spans = [s for s in trace.spans if isinstance(s.instruction, (Forward, Backward))]
    assert len(spans) == 6 and all(s.num_bytes > 0 for s in spans)
    assert [link.name for link in trace.links] == ["n0/0>nvlink", "nvlink>n0/1", "n0/1>nvlink", "nvlink>n0/0"]
    assert sum(link.num_bytes for link in trace.links) == pytest.approx(2 * sum(s.num_bytes for s in spans), rel=1e-2)


def test_zero_3_with_tied_embeddings_does_not_wait_for_the_other_end_at_every_micro_batch(every_device_takes: Given) -> None:
    every_device_takes(1.0, 2.0)
    pipelines = [[stage(f"n{2 * p + s}/0", (s, s + 1)) for s in range(2)] for p in range(2)]
    cluster = ethernet_cluster([1] * 4, 1e9)
    times = [simulate(plan(pipelines, 8, zero_stage=3, model=model(2, tied=tied)), cluster).iteration_s for tied in (False, True)]
    assert times[1] == pytest.approx(times[0], rel=1e-3)


# --- Coverage and determinism ----------------------------------------------------------------------------------------


def test_the_simulator_covers_every_instruction_type(every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    cluster = ethernet_cluster([1], 1.0)
    given_plan = plan([[stage("n0/0", (0, 1))]], 1)
    run = _Run(Prepared(given_plan, Network(cluster)))
    assert set(run._handlers) == set(INSTRUCTIONS)


def test_jitter_is_the_same_for_the_same_seed_and_another_for_another(every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    cluster = ethernet_cluster([1, 1], 1e30)
    given_plan = plan([one_layer_pipeline(2)], 4)
    times = [simulate(given_plan, cluster, seed=seed, jitter=0.05).iteration_s for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
    assert times[0] != simulate(given_plan, cluster).iteration_s
    assert [simulate(given_plan, cluster, 1, jitter).jitter for jitter in (0.0, 0.05)] == [0.0, 0.05]


SCRIPT = """
from sim.engine import simulate
from sim.spec.plan import parse_plan
from sim.spec.cluster import read_cluster
import sys
trace = simulate(parse_plan(open(sys.argv[1]).read()), read_cluster(sys.argv[2]))
print(repr(trace.iteration_s), hash(tuple((s.start_s, s.end_s) for s in trace.spans)))
"""


def test_two_processes_with_other_hash_seeds_give_the_same_trace() -> None:
    folder = "tests/data/peer_plans"
    files = [f"{folder}/flashflex.mixed-a-4gbit.llama-2-7b.json", f"{folder}/mixed-a-4gbit.yaml"]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, *files],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


# --- Laws ------------------------------------------------------------------------------------------------------------


def equally_quick_ways() -> tuple[Cluster, Plan]:
    """A world whose tensor ranks sum as quickly around a ring as along trees, but for rounding.

    Both ways n2's card takes longest. That of n1, which the stage before sends its messages over, has half as much again to carry
    around the ring as along the trees.
    """
    cards = (("ethernet", 4), ("infiniband", 4), ("roce", 8))
    nodes = tuple(
        Node(f"n{i}", gpu_kind("A100-80GB-SXM"), gpus, Intra("nvlink", 12e9), Nic(kind, 1.25e9))
        for i, (kind, gpus) in enumerate(cards)
    )
    stages = [stage("n1/0", (0, 0)), stage("n0/1 n0/2 n1/1 n2/0", (0, 1))]
    small = Transformer(name="small", layers=1, hidden=64, ffn=256, heads=8, kv_heads=4, vocab=96)
    given_plan = plan([stages], 2, model=small, sequence_length=16, precision="fp16", schedule="gpipe", zero_stage=0)
    return Cluster("tiny", nodes, Fabric(0.0)), given_plan


def scaled(cluster: Cluster, k: float) -> Cluster:
    """The cluster with all speeds and bandwidths times k, and neither latencies nor launch overheads."""
    nodes = []
    for node in cluster.nodes:
        gpu = replace(
            node.gpu,
            peak_flop_per_s={precision: peak * k for precision, peak in node.gpu.peak_flop_per_s.items()},
            memory_bandwidth_bytes_per_s=node.gpu.memory_bandwidth_bytes_per_s * k,
            efficiency=replace(node.gpu.efficiency, matmul_half_s=0.0, launch_s=0.0),
        )
        intra = replace(
            node.intra,
            bandwidth_bytes_per_s=node.intra.bandwidth_bytes_per_s * k,
            host_bandwidth_bytes_per_s=node.intra.host_bandwidth_bytes_per_s * k,
            latency_s=0.0,
        )
        nic = node.nic
        if nic is not None:
            other = nic.ethernet_bytes_per_s
            nic = replace(
                nic,
                bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s * k,
                ethernet_bytes_per_s=None if other is None else other * k,
            )
        nodes.append(replace(node, gpu=gpu, intra=intra, nic=nic))
    wan = tuple(replace(w, bandwidth_bytes_per_s=w.bandwidth_bytes_per_s * k, latency_s=0.0) for w in cluster.wan)
    matrix = cluster.bandwidth_matrix
    if matrix is not None:
        matrix = replace(matrix, bytes_per_s=tuple(tuple(rate * k for rate in row) for row in matrix.bytes_per_s))
    fabric = replace(cluster.fabric, latency_s=0.0)
    return replace(cluster, nodes=tuple(nodes), wan=wan, fabric=fabric, bandwidth_matrix=matrix)


def compute_spans(trace: Trace) -> list[Span]:
    """The spans of instructions that occupy their lane."""
    return [s for s in trace.spans if not isinstance(s.instruction, (SendActivation, SendGradient, *COLLECTIVES))]


@given(world=worlds())
def test_no_lane_overlaps_itself_and_every_instruction_is_executed_once(world: tuple[Cluster, Plan]) -> None:
    cluster, given_plan = world
    trace, program = simulate(given_plan, cluster), compile_plan(given_plan)
    executed = sorted((s.lane, instruction_text(s.instruction)) for s in trace.spans)
    assert executed == sorted((lane.name, instruction_text(i)) for lane in program.lanes for i in lane.instructions)
    by_lane: dict[str, list[Span]] = {}
    for span in compute_spans(trace):
        by_lane.setdefault(span.lane, []).append(span)
    for lane in program.lanes:
        spans = by_lane[lane.name]
        in_order = [i for i in lane.instructions if not isinstance(i, (SendActivation, SendGradient, *COLLECTIVES))]
        assert [s.instruction for s in spans] == in_order
        for earlier, later in pairwise(spans):
            assert earlier.end_s <= later.start_s


@given(world=worlds())
def test_nothing_begins_before_what_it_depends_on_has_ended(world: tuple[Cluster, Plan]) -> None:
    cluster, given_plan = world
    trace, program = simulate(given_plan, cluster), compile_plan(given_plan)
    spans = {(s.lane, s.instruction): s for s in trace.spans}
    for lane in program.lanes:
        for instruction in lane.instructions:
            span = spans[lane.name, instruction]
            # A receive's span is the wait, which begins earlier and ends with the message.
            moment = span.end_s if isinstance(instruction, (RecvActivation, RecvGradient)) else span.start_s
            for key in dependencies(lane, instruction):
                assert spans[key].end_s <= moment


@given(world=worlds())
def test_the_iteration_lies_between_the_busiest_lane_and_the_serial_sum(world: tuple[Cluster, Plan]) -> None:
    cluster, given_plan = world
    trace, network = simulate(given_plan, cluster), Network(cluster)
    busy: dict[str, float] = {}
    for s in trace.spans:
        if isinstance(s.instruction, (Compute, OptimizerStep)):
            busy[s.lane] = busy.get(s.lane, 0.0) + s.end_s - s.start_s
    assert max(busy.values()) <= trace.iteration_s * (1 + 1e-9)
    # Serially: every instruction and transfer after the other, nothing shared.
    prepared = Prepared(given_plan, network, condense=False)
    program, serial = prepared.program, 0.0
    for lane in program.lanes:
        works = prepared.works[lane.name]
        for i in lane.instructions:
            if isinstance(i, (Compute, OptimizerStep)):
                work = works.work[work_key(i, lane.sequence_slices)]
            elif isinstance(i, (SendActivation, SendGradient)):
                serial += network.alone_s(works.messages[message_key(i)].transfer)
                continue
            else:
                continue
            serial += work.seconds + sum(network.alone_s(shape.transfer) for shape in work.shapes)
    collectives = [*prepared.exchanges.values(), *prepared.sums.values()]
    serial += sum(network.alone_s(shape.transfer) for shape in collectives)
    assert trace.iteration_s <= serial * (1 + 1e-9)


@given(world=worlds())
def test_no_link_carries_more_than_its_capacity_allows(world: tuple[Cluster, Plan]) -> None:
    trace = simulate(world[1], world[0])
    for link in trace.links:
        assert link.num_bytes <= link.capacity_bytes_per_s * trace.iteration_s * (1 + 1e-9)


@given(world=worlds(), k=st.sampled_from([0.25, 0.5, 2.0, 8.0]))
@example(world=equally_quick_ways(), k=3.0)
def test_a_world_that_is_k_times_as_fast_takes_a_kth_of_the_time(world: tuple[Cluster, Plan], k: float) -> None:
    cluster, given_plan = world
    once, again = simulate(given_plan, scaled(cluster, 1.0)), simulate(given_plan, scaled(cluster, k))
    assert again.iteration_s == pytest.approx(once.iteration_s / k, rel=1e-9)


@given(
    starts=st.lists(
        st.tuples(
            st.floats(0, 10),
            st.dictionaries(st.integers(0, 3), st.floats(0.5, 20), min_size=1),
        ),
        min_size=1,
        max_size=8,
    ),
    capacities=st.lists(st.floats(0.5, 5), min_size=4, max_size=4),
)
def test_flows_conserve_their_bytes(starts: list[tuple[float, dict[int, float]]], capacities: list[float]) -> None:
    ends = flow_ends(starts, capacities)
    for (start, load), end in zip(starts, ends, strict=True):
        alone = max(num_bytes / capacities[link] for link, num_bytes in load.items())
        assert end >= start + alone * (1 - 1e-9)
    for link in range(4):
        users = [(start, end, load[link]) for (start, load), end in zip(starts, ends, strict=True) if link in load]
        # Whatever crosses the link within a window is no more than the link carries in it.
        for begin, _, _ in users:
            for _, stop, _ in users:
                inside = sum(num_bytes for start, end, num_bytes in users if begin <= start and end <= stop)
                if stop > begin:
                    assert inside <= capacities[link] * (stop - begin) * (1 + 1e-9)
    if len({link for _, load in starts for link in load}) == 1 and all(start == 0 for start, _ in starts):
        (link,) = starts[0][1]
        total = sum(load[link] for _, load in starts)
        assert max(ends) == pytest.approx(total / capacities[link])  # the link never rests while there is work


# --- Plans that published programs found -----------------------------------------------------------------------------

PEER_PLANS = sorted(Path("tests/data/peer_plans").glob("*.json"))


@pytest.mark.parametrize("path", PEER_PLANS, ids=lambda path: path.stem)
def test_every_published_plan_simulates_or_says_with_numbers_why_it_cannot(path: Path) -> None:
    cluster = read_cluster(path.parent / f"{path.name.split('.')[1]}.yaml")
    given_plan = read_plan(path)
    reason = infeasible(given_plan, cluster)
    if reason is not None:
        assert reason.reason == "memory"
        assert reason.need_bytes is not None and reason.have_bytes is not None and reason.need_bytes > reason.have_bytes
    trace = simulate(given_plan, cluster)  # for time alone, even where it does not fit
    assert 0 < trace.iteration_s < 3600
    flop = report(trace, cluster).hfu
    assert flop is not None and 0 < flop < 1


def test_instructions_take_the_seconds_that_are_known_of_them(every_device_takes: Given) -> None:
    # Of two stages the second one's forwards take 5 s, and not 1 s: 1 + 3 x 5 + its backward of 1 s, and then that of the first.
    every_device_takes(1.0, 1.0)
    cluster, given_plan = ethernet_cluster([1, 1], 1e12), plan([one_layer_pipeline(2)], 3, schedule="gpipe")
    free = simulate(given_plan, cluster)
    known = simulate(given_plan, cluster, known_s={("p0s1", Forward, (1, 2), 0): 5.0})
    assert [
        span.end_s - span.start_s for span in known.spans if span.lane == "p0s1" and isinstance(span.instruction, Forward)
    ] == [pytest.approx(5.0)] * 3
    assert known.iteration_s == pytest.approx(free.iteration_s + 3 * 4.0, rel=1e-6)


def test_a_program_that_deadlocks_ends_with_the_grid_of_where_its_lanes_stand(every_device_takes: Given) -> None:
    every_device_takes(1.0, 1.0)
    cluster, given_plan = ethernet_cluster([1, 1], 1.0), plan([one_layer_pipeline(2)], 1)
    program = compile_plan(given_plan)
    first = program.lanes[0]
    receives_first = sorted(first.instructions, key=lambda i: not isinstance(i, RecvGradient))
    stuck = replace(program, lanes=(replace(first, instructions=tuple(receives_first)), *program.lanes[1:]))
    with pytest.raises(InputError, match=r"deadlock: 2 of 2 lanes cannot go on(.|\n)*<-- here, waits for p0s1 SG0@1>p0s0"):
        _Run(Prepared(given_plan, Network(cluster), program=stuck)).trace()


@pytest.mark.slow
@settings(max_examples=1000)
@given(world=worlds(), k=st.floats(0.1, 10))
@example(world=equally_quick_ways(), k=3.0)
def test_the_laws_hold_for_a_thousand_worlds(world: tuple[Cluster, Plan], k: float) -> None:
    cluster, given_plan = world
    trace = simulate(given_plan, cluster)
    assert len(trace.spans) == compile_plan(given_plan).instruction_count
    assert all(0 <= s.start_s <= s.end_s <= trace.iteration_s for s in trace.spans)
    assert all(link.num_bytes <= link.capacity_bytes_per_s * trace.iteration_s * (1 + 1e-9) for link in trace.links)
    once, again = simulate(given_plan, scaled(cluster, 1.0)), simulate(given_plan, scaled(cluster, k))
    assert again.iteration_s == pytest.approx(once.iteration_s / k, rel=1e-9)
    assert simulate(given_plan, cluster).spans == trace.spans
