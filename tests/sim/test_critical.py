"""The critical path against timelines drawn by hand, and the laws that hold for every plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

import sim.critical
import sim.prepared
from sim.cost.compute import ComputeCost
from sim.critical import (
    COMPUTE,
    HOST,
    INSIDE,
    LATENCY,
    LAUNCHES,
    LINK,
    MESSAGE,
    ONCE,
    RECOMPUTE,
    REDUCTION,
    WAITING,
    CriticalPath,
    critical_path,
)
from sim.engine import simulate
from sim.metrics import lane_use
from sim.spec.cluster import Cluster
from sim.spec.compile import compile_plan
from sim.spec.plan import Plan, Stage
from sim.spec.program import Backward, Forward, OptimizerStep
from sim.spec.reading import InputError
from sim.spec.stack import Stack, stack
from tests.strategies import stacks, worlds
from tests.worlds import GivenCost, ethernet_cluster, plan, stage

Taking = Callable[..., None]


@pytest.fixture
def devices_take(monkeypatch: pytest.MonkeyPatch) -> Taking:
    """Fixes the seconds of a forward of one layer by device, backwards taking twice as long."""

    def fix(**forward_s: float) -> None:
        by_device = {f"{node}/{index}": seconds for node, seconds in forward_s.items() for index in range(2)}
        cost = GivenCost(by_device, {name: 2 * seconds for name, seconds in by_device.items()})
        monkeypatch.setattr(sim.prepared, "ComputeCost", cost)
        monkeypatch.setattr(sim.critical, "ComputeCost", cost)

    return fix


def told(path: CriticalPath) -> list[tuple[float, float, str, str]]:
    """The path as (start, end, cause, place)."""
    return [(round(s.start_s, 9), round(s.end_s, 9), s.cause, s.place) for s in path.segments]


def of(given_plan: Plan, cluster: Cluster) -> CriticalPath:
    return critical_path(simulate(given_plan, cluster), cluster)


# --- Drawn by hand ---------------------------------------------------------------------------------------------------


def test_one_device_is_its_own_path(devices_take: Taking) -> None:
    #  n0  F0 B0 F1 B1
    devices_take(n0=1.0)
    path = of(plan([[stage("n0/0", (0, 1))]], 2), ethernet_cluster([1], 1e9))
    assert told(path) == [
        (0, 1, COMPUTE, "p0s0"),
        (1, 3, COMPUTE, "p0s0"),
        (3, 4, COMPUTE, "p0s0"),
        (4, 6, COMPUTE, "p0s0"),
    ]
    assert path.seconds_by_cause[COMPUTE] == 6 and sum(segment.bubble_s for segment in path.segments) == 0


def test_the_path_of_an_uneven_pipeline_goes_through_the_slow_stage(devices_take: Taking) -> None:
    # Messages of 8 bytes at 8 bytes/s take 1 s.
    #
    #       0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
    #  n0   F0 F1                   B0 B0 -> ...             B1 B1
    #  wire    F0 F1
    #  n1         F0 F0 F0 B0 ... (9 s a micro-batch)
    devices_take(n0=1.0, n1=3.0)
    stages: list[Stage] = [stage("n0/0", (0, 1)), stage("n1/0", (1, 2))]
    path = of(plan([stages], 2), ethernet_cluster([1, 1], 8.0))
    assert told(path) == [
        (0, 1, COMPUTE, "p0s0"),
        (1, 2, LINK, "n0/nic0>fabric"),
        (2, 5, COMPUTE, "p0s1"),
        (5, 11, COMPUTE, "p0s1"),
        (11, 14, COMPUTE, "p0s1"),
        (14, 20, COMPUTE, "p0s1"),
        (20, 21, LINK, "n1/nic0>fabric"),
        (21, 23, COMPUTE, "p0s0"),
    ]
    assert path.busiest_lane == "p0s1"
    shares = {(share.cause, share.place, share.activity): share for share in path.shares}
    assert shares[COMPUTE, "p0s1", "backward"].seconds == 12 and shares[COMPUTE, "p0s1", "backward"].bubble_s == 0
    assert shares[COMPUTE, "p0s0", "backward"].bubble_s == 2  # the slow stage has nothing left to do
    assert shares[LINK, "n0/nic0>fabric", MESSAGE].bubble_s == 1
    assert sum(share.bubble_s for share in path.shares) == 23 - 18


def test_a_message_behind_another_waits_for_its_link_and_not_for_its_arrival(devices_take: Taking) -> None:
    # n0 sends 3 messages of 4 s each, one after another; each arrives 1 s after its last byte has left.
    #
    #       0  1    5    9    13 14
    #  n0   F0 F1 F2
    #  wire    0000 1111 2222 .
    #  n1            F0 B0
    devices_take(n0=1.0, n1=0.5)
    stages = [stage("n0/0", (0, 1)), stage("n1/0", (1, 2))]
    path = of(plan([stages], 3, schedule="gpipe"), ethernet_cluster([1, 1], 2.0, latency_s=1.0))
    first = [entry for entry in told(path) if entry[1] <= 14]
    assert first == [
        (0, 1, COMPUTE, "p0s0"),
        (1, 5, LINK, "n0/nic0>fabric"),
        (5, 9, LINK, "n0/nic0>fabric"),
        (9, 13, LINK, "n0/nic0>fabric"),
        (13, 14, LATENCY, "n0/nic0>fabric"),
    ]


def test_the_gradient_reduction_of_the_slow_pipeline_ends_the_iteration(devices_take: Taking) -> None:
    devices_take(n0=1.0, n1=3.0)
    pipelines = [[stage("n0/0", (0, 1))], [stage("n1/0", (0, 1))]]
    path = of(plan(pipelines, 1, zero_stage=0), ethernet_cluster([1, 1], 1e3))
    assert told(path)[:2] == [(0, 3, COMPUTE, "p1s0"), (3, 9, COMPUTE, "p1s0")]
    rest = [segment for segment in path.segments if segment.start_s >= 9]
    assert rest and all(segment.cause == LINK and segment.activity == REDUCTION for segment in rest)


def test_sums_of_shards_that_follow_one_another_end_the_iteration(devices_take: Taking, monkeypatch: pytest.MonkeyPatch) -> None:
    # The timeline is that of tests/sim/test_engine.py: from the first scatter on the cards are always busy.
    monkeypatch.setattr("sim.spec.compile.BUCKET_PARAMETERS", 1)
    devices_take(n0=1.0, n1=1.0)
    replicas = [[stage(f"n{i // 2}/{i % 2}", (0, 4))] for i in range(4)]
    cluster = ethernet_cluster([2, 2], bytes_per_s=100.0, intra_bytes_per_s=1e3)
    path = of(plan(replicas, 1, zero_stage=2, shard_group=2), cluster)
    after = [(segment.place, segment.activity) for segment in path.segments if segment.start_s >= 6]
    sums = [place for place, activity in after if activity == REDUCTION]
    # The scatter of the head, and the sums of the head, four layers and the embedding.
    assert sums == ["n0/0>nvlink", *["n0/nic0>fabric"] * 6]


def test_of_links_that_are_shared_the_one_that_holds_a_message_up_is_named(devices_take: Taking) -> None:
    # Two messages of 1 s alone come to one card at once, and take 2 s.
    devices_take(n0=1.0, n1=1.0, n2=1.0)
    cluster = ethernet_cluster([1, 1, 2], 8.0)
    pipelines = [[stage(f"n{p}/0", (0, 1)), stage(f"n2/{p}", (1, 2))] for p in range(2)]
    path = of(plan(pipelines, 1), cluster)
    assert told(path)[:2] == [(0, 1, COMPUTE, "p0s0"), (1, 3, LINK, "fabric>n2/nic0")]


def test_collectives_that_work_does_not_hide_are_told_apart() -> None:
    cluster = ethernet_cluster([2], 1e9, intra_bytes_per_s=1e6)
    made = plan([[stage("n0/0 n0/1", (0, 2))]], 3)
    path = of(made, cluster)
    (lane,) = compile_plan(made).lanes
    cost = ComputeCost(made, cluster)
    alone_s = sum(cost.seconds(lane, i) for i in lane.instructions if isinstance(i, Forward | Backward | OptimizerStep))
    inside_s = sum(share.seconds for share in path.shares if share.activity == INSIDE)
    assert 0 < inside_s == pytest.approx(path.iteration_s - alone_s, rel=1e-9)
    assert path.seconds_by_cause[COMPUTE] == pytest.approx(alone_s, rel=1e-9)


def test_a_gap_of_a_measured_trace_is_waiting(devices_take: Taking) -> None:
    devices_take(n0=1.0)
    cluster = ethernet_cluster([1], 1e9)
    trace = simulate(plan([[stage("n0/0", (0, 1))]], 1), cluster)
    # The backward begins half a second late.
    late = [
        span if span.start_s < 1 else span._replace(start_s=span.start_s + 0.5, end_s=span.end_s + 0.5) for span in trace.spans
    ]
    path = critical_path(replace(trace, spans=tuple(late), iteration_s=trace.iteration_s + 0.5, origin="measured"), cluster)
    assert told(path) == [(0, 1, COMPUTE, "p0s0"), (1, 1.5, WAITING, "p0s0"), (1.5, 3.5, COMPUTE, "p0s0")]


def test_recomputation_is_told_apart() -> None:
    cluster = ethernet_cluster([1], 1e9)
    bare = plan([[stage("n0/0", (0, 2))]], 2)
    (pipeline,) = bare.pipelines
    again = replace(bare, pipelines=(replace(pipeline, stages=(replace(pipeline.stages[0], recompute="full"),)),))
    spent = of(again, cluster).seconds_by_cause
    more = simulate(again, cluster).iteration_s - simulate(bare, cluster).iteration_s
    assert spent[RECOMPUTE] == pytest.approx(more, rel=1e-9) and more > 0
    assert of(bare, cluster).seconds_by_cause[RECOMPUTE] == 0


def test_what_a_gpu_waits_for_its_host_is_told_apart() -> None:
    # Kernels that take the GPU next to nothing: it waits for the host nearly all the time, but for the optimizer.
    fast = ethernet_cluster([1], 1e9)
    late = replace(fast, stack=replace(fast.stack, host_s=1.0, micro_batch_s=3.0, step_s=7.0))
    bare = plan([[stage("n0/0", (0, 2))]], 2)
    (pipeline,) = bare.pipelines
    again = replace(bare, pipelines=(replace(pipeline, stages=(replace(pipeline.stages[0], recompute="full"),)),))
    for made in (bare, again):
        cost = ComputeCost(made, late)
        (lane,) = compile_plan(made).lanes
        instructions = {type(one): one for one in lane.instructions if isinstance(one, (Forward, Backward))}
        kernels = sum(cost.launched(lane, kind, cost._inside(lane, one.layers))[1] for kind, one in instructions.items())
        path, at_once = of(made, late), of(made, fast)
        shares = {share.activity: share.seconds for share in path.shares if share.cause == HOST}
        # Two micro-batches, each with what comes once for its forward and its backward, and the step. What layers that are
        # recomputed launch once more is the host's, too.
        assert shares == {LAUNCHES: pytest.approx(2 * kernels, rel=1e-6), ONCE: pytest.approx(2 * 2 * 3.0 + 7.0, rel=1e-6)}
        for cause in (COMPUTE, RECOMPUTE):
            assert path.seconds_by_cause[cause] == pytest.approx(at_once.seconds_by_cause[cause], rel=1e-6)


def test_an_optimizer_step_in_host_memory_is_the_hosts() -> None:
    cluster = ethernet_cluster([1], 1e9)
    own = plan([[stage("n0/0", (0, 2))]], 2)
    offloading = replace(own, offload_optimizer=True)
    more_s = simulate(offloading, cluster).iteration_s - simulate(own, cluster).iteration_s
    for made, cause in ((own, COMPUTE), (offloading, HOST)):
        assert [share.cause for share in of(made, cluster).shares if share.activity == "optimizer"] == [cause]
    assert of(offloading, cluster).seconds_by_cause[HOST] > more_s > 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("intra_bytes_per_s", [1e9, 1e12])
@pytest.mark.parametrize("name", ["nemo", "megatron-deepspeed", "deepspeed-amp"])
def test_launches_are_what_a_host_that_takes_no_time_would_save(name: str, intra_bytes_per_s: float, recompute: str) -> None:
    # Where collectives of tensor ranks fill the time in which the GPU waits for its host, they would be waited for instead.
    cluster = ethernet_cluster([4], 1e9, intra_bytes_per_s=intra_bytes_per_s)
    slow = replace(cluster, stack=stack(name))
    instant = replace(cluster, stack=replace(stack(name), host_s=0.0, tensor_host_s=0.0))
    made = plan([[replace(stage("n0/0 n0/1 n0/2 n0/3", (0, 2)), recompute=recompute)]], 3)
    path = of(made, slow)
    launches_s = sum(share.seconds for share in path.shares if share.activity == LAUNCHES)
    assert launches_s == pytest.approx(path.iteration_s - of(made, instant).iteration_s, rel=1e-9, abs=1e-12)
    assert path.seconds_by_cause[LINK] + path.seconds_by_cause[LATENCY] > 0


def test_a_trace_without_spans_is_refused() -> None:
    cluster = ethernet_cluster([1], 1e9)
    trace = simulate(plan([[stage("n0/0", (0, 1))]], 1), cluster)
    with pytest.raises(InputError, match="has none"):
        critical_path(replace(trace, spans=()), cluster)
    with pytest.raises(InputError, match="lacks the instruction"):
        critical_path(replace(trace, spans=trace.spans[:1]), cluster)


# --- For every plan --------------------------------------------------------------------------------------------------


@given(world=worlds(), software=stacks())
@settings(max_examples=120)
def test_the_path_covers_the_iteration_once_and_nothing_of_it_is_waiting(world: tuple[Cluster, Plan], software: Stack) -> None:
    cluster, made = replace(world[0], stack=software), world[1]
    trace = simulate(made, cluster)
    path = critical_path(trace, cluster)
    assert path.segments[0].start_s == 0 and path.segments[-1].end_s == trace.iteration_s
    assert all(before.end_s == after.start_s for before, after in pairwise(path.segments))
    assert all(segment.end_s > segment.start_s for segment in path.segments)
    by_cause = path.seconds_by_cause
    assert math.fsum(by_cause.values()) == pytest.approx(trace.iteration_s, rel=1e-12)
    assert math.fsum(share.seconds for share in path.shares) == pytest.approx(trace.iteration_s, rel=1e-12)
    # In a simulation everything begins as soon as the last thing it waits for has ended.
    assert by_cause[WAITING] == 0
    busy_s, _, _ = lane_use(trace)[path.busiest_lane]
    assert math.fsum(share.bubble_s for share in path.shares) == pytest.approx(trace.iteration_s - busy_s, rel=1e-9, abs=1e-15)


@given(world=worlds())
@settings(max_examples=30)
def test_work_of_the_path_was_done_when_it_says(world: tuple[Cluster, Plan]) -> None:
    cluster, made = world
    trace = simulate(made, cluster, seed=1, jitter=0.1)
    for segment in critical_path(trace, cluster).segments:
        if segment.cause in (COMPUTE, RECOMPUTE):
            assert any(
                span.lane == segment.place and span.start_s <= segment.start_s and segment.end_s <= span.end_s
                for span in trace.spans
            )
