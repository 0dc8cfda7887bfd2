"""Metrics of hand-made traces, computed by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.price import dollars, energy_j
from sim.metrics import (
    DeviceUse,
    LinkLoad,
    cost,
    covered_s,
    infeasible_report,
    lane_use,
    recompute_flop,
    report,
    report_json,
)
from sim.spec.cluster import Cluster, Intra, Nic, Node
from sim.spec.gpu import NOMINAL_EFFICIENCY, GpuKind
from sim.spec.judge import Infeasible
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import (
    Backward,
    Forward,
    Instruction,
    OptimizerStep,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
)
from sim.spec.reading import InputError
from sim.spec.trace import LinkUse, Span, Trace
from sim.spec.transformer import Transformer


def kind(name: str, peak: float, idle: float, busy: float, price: float | None) -> GpuKind:
    return GpuKind(name, 10**9, {"bf16": peak}, 1e9, None, idle, busy, price, NOMINAL_EFFICIENCY)


FAST = kind("FAST", 10_000.0, 10.0, 100.0, 3.6)
SLOW = kind("SLOW", 5_000.0, 5.0, 50.0, None)
NIC = Nic("ethernet", 1e9)
CLUSTER = Cluster("mixed", (Node("a", FAST, 4, Intra("pcie4", 24e9), NIC), Node("b", SLOW, 2, Intra("pcie4", 24e9), NIC)))

# 15 tokens. A layer: 2 x 15 x (4 x (8 + 8) + 3 x 4 x 8) = 4800 FLOP with its weights, 4 x 15 x 5 x 4 = 1200 in attention.
# The head: 2 x 15 x 10 x 4 = 1200.
MODEL = Transformer("tiny", layers=2, hidden=4, ffn=8, heads=2, vocab=10)
LAYER_FLOP, ATTENTION_FLOP, HEAD_FLOP = 6000, 1200, 1200
MODEL_FLOP = 3 * (2 * LAYER_FLOP + HEAD_FLOP)
PLAN = Plan(
    cluster="mixed",
    model=MODEL,
    sequence_length=5,
    global_batch=3,
    pipelines=(
        Pipeline(
            3,
            1,
            (
                Stage((Replica(("a/0",), 3),), ((0, 1),), recompute="full"),
                Stage((Replica(("a/1", "a/2"), 3),), ((1, 2),), recompute="selective"),
            ),
        ),
    ),
)


def span(lane: str, instruction: Instruction, start_s: float, end_s: float) -> Span:
    return Span(lane, instruction, start_s, end_s)


# seconds   0    1    2    3    4    5    6    7    8    9    10
# p0s0      F----------wait----------------B---------------STEP--      busy 2 + 3 + 1, waiting 4
#                      send-
# p0s1      wait-----------F----B---------..STEP-                      busy 1 + 2 + 1; 3 waiting, 0.5 sending; idle 2.5
#                                         send-
TRACE = Trace(
    plan=PLAN,
    cluster="mixed",
    origin="simulated",
    iteration_s=10.0,
    lanes={"p0s0": ("a/0",), "p0s1": ("a/1", "a/2")},
    spans=(
        span("p0s0", Forward(0, (0, 1)), 0.0, 2.0),
        span("p0s0", SendActivation(0, 1, "p0s1", (0, 3)), 2.0, 3.0),
        span("p0s1", RecvActivation(0, 1, "p0s0", (0, 3)), 0.0, 3.0),
        span("p0s1", Forward(0, (1, 2)), 3.0, 4.0),
        span("p0s1", Backward(0, (1, 2)), 4.0, 6.0),
        span("p0s0", RecvGradient(0, 1, "p0s1", (0, 3)), 2.0, 6.0),
        span("p0s1", SendGradient(0, 1, "p0s0", (0, 3)), 6.0, 7.0),
        span("p0s1", OptimizerStep(), 6.5, 7.5),
        span("p0s0", Backward(0, (0, 1)), 6.0, 9.0),
        span("p0s0", OptimizerStep(), 9.0, 10.0),
    ),
    peak_bytes={"a/0": 700, "a/1": 800, "a/2": 900},
    links=(LinkUse("a>", 50.0, 100.0), LinkUse("b>", math.inf, 5.0)),
)


def test_the_whole_report_of_two_lanes_is_as_computed_by_hand() -> None:
    found = report(TRACE, CLUSTER, wall_s=0.25)
    assert found.iteration_s == 10.0
    assert found.tokens_per_s == 1.5
    assert found.mfu == pytest.approx(MODEL_FLOP / (10 * 50_000))
    assert found.mfu_used == pytest.approx(MODEL_FLOP / (10 * 30_000))
    assert found.hfu == pytest.approx((MODEL_FLOP + LAYER_FLOP + ATTENTION_FLOP) / (10 * 50_000))
    assert found.bubble == pytest.approx(1 - (6 + 4) / (2 * 10))
    assert found.peak_bytes == {"a/0": 700, "a/1": 800, "a/2": 900}
    assert found.infeasible is None
    # a/0: 6 s busy; a/1 and a/2: 4 s each; a/3, b/0 and b/1 only idle.
    assert found.energy_j == pytest.approx((600 + 40) + 2 * (400 + 60) + 100 + 2 * 50)
    assert found.dollars == pytest.approx(4 * 3.6 * 10 / 3600)
    assert found.wall_s == 0.25
    assert found.devices == (
        # p0s0 waits for a gradient that is not on its way before it arrives: idle. p0s1 waits a second for one that is.
        DeviceUse("a/0", "p0s0", 6.0, 1.0, 3.0),
        DeviceUse("a/1", "p0s1", 4.0, 1.5, 4.5),
        DeviceUse("a/2", "p0s1", 4.0, 1.5, 4.5),
        DeviceUse("a/3", None, 0.0, 0.0, 10.0),
        DeviceUse("b/0", None, 0.0, 0.0, 10.0),
        DeviceUse("b/1", None, 0.0, 0.0, 10.0),
    )
    assert found.links == (LinkLoad("a>", 0.2, 100.0), LinkLoad("b>", 0.0, 5.0))


def test_other_peaks_change_the_utilisation_of_their_kind_only() -> None:
    found = report(TRACE, CLUSTER, peaks={"SLOW": 20_000.0, "ABSENT": 1.0})
    assert found.mfu == pytest.approx(MODEL_FLOP / (10 * (4 * 10_000 + 2 * 20_000)))
    assert found.mfu_used == report(TRACE, CLUSTER).mfu_used


def test_without_recomputation_hfu_is_mfu() -> None:
    stages = tuple(replace(stage, recompute="none") for stage in PLAN.pipelines[0].stages)
    trace = replace(TRACE, plan=replace(PLAN, pipelines=(replace(PLAN.pipelines[0], stages=stages),)))
    found = report(trace, CLUSTER)
    assert found.hfu == found.mfu


def test_full_recomputation_of_every_layer_adds_a_third_of_their_flop() -> None:
    stages = tuple(replace(stage, recompute="full") for stage in PLAN.pipelines[0].stages)
    plan = replace(PLAN, pipelines=(replace(PLAN.pipelines[0], stages=stages),))
    assert recompute_flop(plan) == 2 * LAYER_FLOP
    some = tuple(replace(stage, recompute_layers=0) for stage in stages)
    assert recompute_flop(replace(PLAN, pipelines=(replace(PLAN.pipelines[0], stages=some),))) == 0


def test_a_kind_without_the_precision_leaves_utilisation_open() -> None:
    trace = replace(TRACE, plan=replace(PLAN, precision="fp8"))
    found = report(trace, CLUSTER)
    assert (found.mfu, found.mfu_used, found.hfu) == (None, None, None)
    assert cost(found).mfu == 0.0


def test_a_collective_that_work_hides_is_no_communication() -> None:
    hidden = span("p0s0", ReduceGradients((0, 1)), 6.0, 9.5)
    assert lane_use(replace(TRACE, spans=(*TRACE.spans, hidden))) == lane_use(TRACE)
    exposed = span("p0s1", ReduceGradients((0, 1)), 7.0, 9.5)
    assert lane_use(replace(TRACE, spans=(*TRACE.spans, exposed)))["p0s1"] == (4.0, 3.5, 2.5)


def test_what_lies_outside_the_iteration_does_not_count() -> None:
    around = (span("p0s0", Forward(0, (0, 1)), -1.0, 1.0), span("p0s0", OptimizerStep(), 9.0, 12.0))
    outside = (span("p0s1", OptimizerStep(), 11.0, 12.0), span("p0s1", OptimizerStep(), -3.0, -2.0))
    used = lane_use(replace(TRACE, spans=around + outside))
    assert used == {"p0s0": (2.0, 0.0, 8.0), "p0s1": (0.0, 0.0, 10.0)}


starts = st.floats(-1, 11)
placed = st.builds(
    lambda lane, instruction, ends: Span(lane, instruction, min(ends), max(ends)),
    st.sampled_from(["p0s0", "p0s1"]),
    st.sampled_from([Forward(0, (0, 1)), RecvGradient(0, 1, "p0s1", (0, 3)), ReduceGradients((0, 1)), OptimizerStep()]),
    st.tuples(starts, starts),
)


@given(st.lists(placed, max_size=12))
def test_busy_communication_and_idle_sum_to_the_iteration(made: list[Span]) -> None:
    found = report(replace(TRACE, spans=tuple(made)), CLUSTER)
    for use in found.devices:
        assert min(use.busy_s, use.communication_s, use.idle_s) >= 0
        assert use.busy_s + use.communication_s + use.idle_s == pytest.approx(10.0, abs=1e-9)
    assert found.bubble is not None
    assert -1e-12 <= found.bubble <= 1


def test_intervals_that_overlap_or_touch_are_covered_once() -> None:
    assert covered_s([(4, 6), (0, 1), (1, 2), (5, 5.5), (5, 7), (9, 8)]) == 5


def test_a_device_that_the_cluster_does_not_have_is_told() -> None:
    trace = replace(TRACE, lanes={"p0s0": ("c/0",), "p0s1": ("a/1",)})
    with pytest.raises(InputError, match="device 'c/0' is not in cluster 'mixed'"):
        report(trace, CLUSTER)


def test_an_iteration_without_time_is_told() -> None:
    with pytest.raises(InputError, match="takes more than 0 s"):
        report(replace(TRACE, iteration_s=0.0), CLUSTER)


def test_a_cluster_without_prices_has_no_price() -> None:
    free = replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], gpu=SLOW), CLUSTER.nodes[1]))
    assert dollars(free, 10.0) is None
    assert dollars(CLUSTER, 3600.0) == pytest.approx(4 * 3.6)
    found = report(TRACE, free)
    assert found.dollars is None
    assert cost(found).dollars == 0.0


def test_a_cluster_that_does_nothing_takes_its_idle_power() -> None:
    assert energy_j(CLUSTER, 10.0, {}) == 10 * (4 * 10 + 2 * 5)
    assert energy_j(CLUSTER, 10.0, {d.name: 10.0 for d in CLUSTER.devices}) == 10 * (4 * 100 + 2 * 50)


KEYS = [
    "iteration_s",
    "tokens_per_s",
    "mfu",
    "mfu_used",
    "hfu",
    "bubble",
    "peak_bytes",
    "infeasible",
    "energy_j",
    "dollars",
    "wall_s",
    "devices",
    "links",
]


def test_the_report_of_a_plan_that_cannot_run_has_the_same_keys_and_no_measures() -> None:
    why = Infeasible("a/1", "memory", 900, 800, "a/1 needs 900 B but has 800 B")
    found = json.loads(report_json(infeasible_report(why, wall_s=0.5)))
    assert list(found) == KEYS
    assert found["infeasible"] == {
        "device": "a/1",
        "reason": "memory",
        "need_bytes": 900,
        "have_bytes": 800,
        "message": "a/1 needs 900 B but has 800 B",
    }
    assert found["wall_s"] == 0.5
    assert [found[key] for key in KEYS if key not in ("infeasible", "wall_s", "devices", "links")] == [None] * 9
    with pytest.raises(ValueError, match="infeasible"):
        cost(infeasible_report(why))


def test_the_report_is_written_with_its_keys_in_one_order() -> None:
    text = report_json(report(TRACE, CLUSTER))
    found = json.loads(text)
    assert list(found) == KEYS
    assert found["infeasible"] is None
    assert found["devices"][1] == {"device": "a/1", "lane": "p0s1", "busy_s": 4.0, "communication_s": 1.5, "idle_s": 4.5}
    assert found["links"][0] == {"name": "a>", "utilisation": 0.2, "num_bytes": 100.0}


def test_the_cost_has_the_report_s_measures() -> None:
    found = report(TRACE, CLUSTER)
    verdict = cost(found)
    for name in ("iteration_s", "tokens_per_s", "mfu", "mfu_used", "hfu", "bubble", "peak_bytes", "energy_j", "dollars"):
        assert getattr(verdict, name) == getattr(found, name)
