"""Pipelines that behave alike: what one of them does stands for all, exactly as if every one ran."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim.cost.estimate
from sim.alike import Islands, alike, islands
from sim.cost.estimate import Estimate
from sim.cost.network import Network, Transfer
from sim.engine import condensed, simulate
from sim.metrics import cost, report
from sim.simulation import simulation
from sim.spec.cluster import Cluster, LinkOverride
from sim.spec.plan import Pipeline, Plan, Stage
from sim.spec.program import SendActivation
from sim.spec.trace import Trace
from sim.spec.transformer import Moe
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


def small(tensor: int = 1) -> tuple[Cluster, Plan]:
    """Two stages, one on each node, of so many tensor ranks, and three micro-batches."""
    names = (" ".join(f"n{node}/{i}" for i in range(tensor)) for node in range(2))
    return ethernet_cluster([tensor] * 2, 1e3), plan([[stage(name, (s, s + 1)) for s, name in enumerate(names)]], 3)


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


# --- Islands: known before any transfer is ---------------------------------------------------------------------------


@given(world=worlds(), copies=st.integers(2, 4), nodes_too=st.booleans())
def test_an_estimate_of_one_island_is_that_of_all(world: tuple[Cluster, Plan], copies: int, nodes_too: bool) -> None:
    cluster, plan = copied(*world, copies, nodes_too)
    found = Estimate(plan, cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.cost.estimate, "islands", lambda plan, cluster: Islands(range(len(plan.pipelines)), {}))
        true = Estimate(plan, cluster)
    assert found.iteration_s() == pytest.approx(true.iteration_s(), rel=1e-9)
    assert found.alike == true.alike and found.breakdown() == pytest.approx(true.breakdown(), rel=1e-6, abs=1e-12)
    assert found.cost().energy_j == pytest.approx(true.cost().energy_j, rel=1e-9)


def test_copies_on_nodes_of_their_own_are_islands() -> None:
    cluster, copies = copied(*small(), 3, True)
    nodes = {"n0c1": "n0c0", "n1c1": "n1c0", "n0c2": "n0c0", "n1c2": "n1c0"}
    assert islands(copies, cluster) == Islands([0, 0, 0], nodes)


def test_pipelines_that_share_a_node_are_on_one_island() -> None:
    cluster = ethernet_cluster([2, 2, 2, 2], 1e3)

    def pipeline(a: str, b: str) -> list[Stage]:
        return [stage(a, (0, 1)), stage(b, (1, 2))]

    crossed = plan([pipeline("n0/0", "n1/0"), pipeline("n0/1", "n1/1"), pipeline("n2/0", "n3/0"), pipeline("n2/1", "n3/1")], 2)
    assert islands(crossed, cluster) == Islands([0, 1, 0, 1], {"n2": "n0", "n3": "n1"})
    chained = plan([pipeline("n0/0", "n1/0"), pipeline("n1/1", "n2/0"), pipeline("n2/1", "n3/0")], 2)
    assert islands(chained, cluster) == Islands([0, 1, 2], {})
    turned = plan([pipeline("n0/0", "n1/0"), pipeline("n3/0", "n2/0")], 2)
    assert islands(turned, cluster).pipelines == [0, 1]  # the order of nodes is that in which rings go round


def test_what_tells_nodes_apart_tells_islands_apart() -> None:
    cluster, copies = copied(*small(), 2, True)
    first, *others = cluster.nodes
    own = Islands(range(2), {})
    for other in (
        replace(cluster, link_overrides=(LinkOverride("n0c0/nic0>fabric", 5e2),)),
        replace(cluster, fabric=replace(cluster.fabric, oversubscription=2.0)),
    ):
        assert islands(copies, other) == own
    assert first.nic is not None
    slow = replace(first, nic=replace(first.nic, bandwidth_bytes_per_s=500.0))
    for other in (replace(cluster, nodes=(slow, *others)), replace(cluster, device_speeds=(("n0c0/0", 0.5),))):
        assert islands(copies, other) == Islands([0, 1], {})


def test_pipelines_that_share_experts_are_on_one_island() -> None:
    cluster, copies = copied(*small(), 4, True)
    moe = replace(copies.transformer, experts=Moe(experts=2, ffn=8, top_k=1))
    copies = replace(copies, model=moe, expert_parallel=2)
    assert islands(copies, cluster).pipelines == [0, 1, 0, 1]
    assert Estimate(copies, cluster).iteration_s() == pytest.approx(simulate_every_lane(copies, cluster).iteration_s, rel=1e-9)
    # Where the two tensor ranks of a pipeline have one whole expert each, it shares none.
    cluster, pairs = copied(*small(tensor=2), 4, True)
    pairs = replace(pairs, model=moe, expert_parallel=2, expert_tensor_parallel=1, sequence_parallel=True)
    assert islands(pairs, cluster).pipelines == [0, 0, 0, 0]
    assert Estimate(pairs, cluster).iteration_s() == pytest.approx(simulate_every_lane(pairs, cluster).iteration_s, rel=1e-9)
