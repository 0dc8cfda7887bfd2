"""Pipelines that behave alike: what one of them does stands for all, exactly as if every one ran."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.alike import alike
from sim.cost.network import Network, Transfer
from sim.engine import condensed, simulate
from sim.metrics import cost, report
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.plan import Pipeline, Plan, Stage
from sim.spec.program import SendActivation
from sim.spec.trace import Trace
from tests.strategies import worlds
from tests.worlds import ethernet_cluster, plan, simulate_every_lane, stage


def copied(cluster: Cluster, one: Plan, copies: int, nodes_too: bool) -> tuple[Cluster, Plan]:
    """The plan with every pipeline so many times, on as many of each node; or on nodes with as many times the GPUs."""
    held = {node.name: node.gpus for node in cluster.nodes}

    def moved(device: str, copy: int) -> str:
        node, _, index = device.rpartition("/")
        return f"{node}c{copy}/{index}" if nodes_too else f"{node}/{int(index) + copy * held[node]}"

    def moved_stage(stage: Stage, copy: int) -> Stage:
        replicas = tuple(replace(r, devices=tuple(moved(d, copy) for d in r.devices)) for r in stage.replicas)
        return replace(stage, replicas=replicas)

    if nodes_too:
        nodes = tuple(replace(node, name=f"{node.name}c{copy}") for copy in range(copies) for node in cluster.nodes)
    else:
        nodes = tuple(replace(node, gpus=node.gpus * copies) for node in cluster.nodes)
    pipelines = tuple(
        Pipeline(p.micro_batch, p.micro_batches, tuple(moved_stage(stage, copy) for stage in p.stages))
        for p in one.pipelines
        for copy in range(copies)
    )
    return replace(cluster, nodes=nodes), replace(one, pipelines=pipelines, global_batch=one.global_batch * copies)


def assert_same(found: Trace, true: Trace) -> None:
    assert found.iteration_s == pytest.approx(true.iteration_s, rel=1e-9)
    assert found.lanes == true.lanes and found.peak_bytes == true.peak_bytes
    times = {(span.lane, span.instruction): span for span in true.spans}
    assert len(times) == len(true.spans) == len(found.spans)
    for span in found.spans:
        other = times[span.lane, span.instruction]
        assert (span.start_s, span.end_s) == pytest.approx((other.start_s, other.end_s), rel=1e-9, abs=1e-12)
        assert abs(span.num_bytes - other.num_bytes) <= 1
    assert [link.name for link in found.links] == [link.name for link in true.links]
    assert [link.num_bytes for link in found.links] == pytest.approx([link.num_bytes for link in true.links], rel=1e-9)


@given(world=worlds())
def test_any_plan_is_simulated_as_if_every_lane_ran(world: tuple[Cluster, Plan]) -> None:
    cluster, plan = world
    assert_same(simulate(plan, cluster), simulate_every_lane(plan, cluster))


@given(world=worlds(), copies=st.integers(2, 4), nodes_too=st.booleans())
def test_copies_of_a_plan_are_simulated_as_if_every_lane_ran(world: tuple[Cluster, Plan], copies: int, nodes_too: bool) -> None:
    cluster, plan = copied(*world, copies, nodes_too)
    assert_same(simulate(plan, cluster), simulate_every_lane(plan, cluster))


def small() -> tuple[Cluster, Plan]:
    """Two stages, one on each node, and three micro-batches."""
    return ethernet_cluster([1, 1], 1e3), plan([[stage("n0/0", (0, 1)), stage("n1/0", (1, 2))]], 3)


def test_of_copies_on_nodes_that_are_alike_one_runs() -> None:
    cluster, copies = copied(*small(), 8, True)
    found = condensed(copies, Network(cluster))
    assert set(found.like.values()) == {"p0s0", "p0s1"} and len(found.lanes) == 16
    assert set(found.part.lanes) == {"p0s0", "p0s1"}


def test_of_copies_that_share_cards_one_runs_and_the_cards_carry_all() -> None:
    cluster, copies = copied(*small(), 4, False)
    trace = simulate(copies, cluster)
    alone = simulate(*reversed(small()))
    assert set(condensed(copies, Network(cluster)).like.values()) == {"p0s0", "p0s1"}
    carried = {link.name: link.num_bytes for link in trace.links}
    for link in alone.links:
        assert carried[link.name] >= 4 * link.num_bytes
    sent = [span for span in trace.spans if isinstance(span.instruction, SendActivation)]
    (one,) = {span.end_s - span.start_s for span in sent if span.instruction.micro_batch == 0}
    (before,) = {
        span.end_s - span.start_s
        for span in alone.spans
        if isinstance(span.instruction, SendActivation) and span.instruction.micro_batch == 0
    }
    assert one == pytest.approx(4 * before)


def test_a_slower_card_sets_its_pipeline_apart() -> None:
    cluster, copies = copied(*small(), 4, True)
    first, second, *others = cluster.nodes
    assert second.nic is not None
    slow = replace(second, nic=replace(second.nic, bandwidth_bytes_per_s=500.0))
    cluster = replace(cluster, nodes=(first, slow, *others))
    found = condensed(copies, Network(cluster))
    assert {lane for lane, one in found.like.items() if one == "p0s0"} == {"p0s0"}
    assert_same(simulate(copies, cluster), simulate_every_lane(copies, cluster))


def test_pipelines_that_differ_in_what_they_recompute_are_not_alike() -> None:
    cluster, copies = copied(*small(), 3, True)
    first, *others = copies.pipelines
    again = replace(first, stages=tuple(replace(held, recompute="full") for held in first.stages))
    chosen = replace(copies, pipelines=(again, *others))
    assert set(condensed(chosen, Network(cluster)).like.values()) == {"p0s0", "p0s1", "p1s0", "p1s1"}
    assert_same(simulate(chosen, cluster), simulate_every_lane(chosen, cluster))


def test_what_the_judge_says_is_what_the_whole_trace_reports() -> None:
    cluster, copies = copied(*small(), 8, True)
    verdict = simulation(cluster, copies.job())(copies)
    expected = cost(report(simulate_every_lane(copies, cluster), cluster))
    for name in ("iteration_s", "mfu", "hfu", "bubble", "energy_j", "dollars"):
        assert getattr(verdict, name) == pytest.approx(getattr(expected, name), rel=1e-9)
    assert verdict.peak_bytes == expected.peak_bytes


def test_links_of_one_pipeline_that_carry_alike_are_one() -> None:
    transfers = [[Transfer(((0, 1.0), (1, 1.0), (2, 2.0)), 0.0, 4.0)], [Transfer(((3, 1.0), (4, 1.0), (5, 2.0)), 0.0, 4.0)]]
    assert alike(["a", "a"], transfers, [], [1.0] * 6) == ([0, 0], {0: 0, 1: 0, 2: 2, 3: 0, 4: 0, 5: 2})
    assert alike(["a", "b"], transfers, [], [1.0] * 6) == ([0, 1], {link: link for link in range(6)})
    assert alike(["a", "a"], transfers, [], [1.0, 1.0, 1.0, 1.0, 3.0, 1.0])[0] == [0, 1]


def test_what_two_pipelines_meet_sets_them_apart() -> None:
    one = Transfer(((0, 1.0), (9, 1.0)), 0.0, 2.0)
    other, third = replace(one, loads=((1, 1.0), (9, 1.0))), replace(one, loads=((2, 1.0), (8, 1.0)))
    assert alike(["a", "a", "a"], [[one], [other], [third]], [], [1.0] * 10)[0] == [0, 0, 2]
    shared = Transfer(((0, 1.0),), 0.0, 1.0)
    assert alike(["a", "a"], [[one], [other]], [shared], [1.0] * 10)[0] == [0, 1]
