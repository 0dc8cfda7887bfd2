"""The plans of published programs: what they say agrees with what is written about them, and how they are judged."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import peers
from experiments.comparison import winner
from experiments.peers import AS_1F1B, AS_IT_IS, MEMORY_IGNORED, Peer, arena, judge_peer, peers_on, with_endless_memory
from partition.search import PLANNERS, Search
from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.spec.cluster import Cluster
from sim.spec.judge import Infeasible
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.stack import stack
from tests.experiments.conftest import Ran, World
from tests.worlds import ethernet_cluster

README = Path(peers.__file__).with_name("data") / "peer_plans" / "README.md"


def listed() -> list[tuple[str, str, str]]:
    """File, and the columns of pipelines and of GPUs left out (or empty), of both tables of the README."""
    found = []
    for line in README.read_text().splitlines():
        columns = [column.strip() for column in line.strip("|").split("|")]
        if len(columns) == 5:  # FlashFlex: pipelines second
            found.append((columns[0], columns[1], ""))
        elif len(columns) == 4:
            found.append((columns[0], columns[2], columns[3]))
    return [entry for entry in found if entry[0].endswith(".json")]


def test_every_plan_that_the_readme_lists_is_there_and_says_the_same() -> None:
    by_file = {f"{p.program}.{p.cluster.name}.{p.plan.model}.json": p for p in peers.peers()}
    assert len(listed()) == 25 and {name for name, _, _ in listed()} == set(by_file)
    for name, pipelines, left_out in listed():
        peer = by_file[name]
        assert len(peer.plan.pipelines) == int(pipelines)
        if left_out:
            assert len(peer.cluster.devices) - len(peer.plan.devices) == int(left_out)
        said = re.fullmatch(r".*-a100x(\d+)-v100x(\d+)", peer.cluster.name)
        if said is not None:
            kinds = Counter(device.gpu.name[:4] for device in peer.cluster.devices)
            assert kinds == {"A100": int(said[1]), "V100": int(said[2])}


def test_the_arena_is_fourteen_cells_of_mixed_nodes_and_three_pools() -> None:
    places = arena()
    pools = [(cluster, job) for cluster, job in places if cluster.name.startswith("pool-")]
    assert len(places) == 17 and len(pools) == 3
    assert {(job.global_batch, job.precision) for _, job in pools} == {(1024, "fp32")}
    assert {(job.global_batch, job.sequence_length) for c, job in places if not c.name.startswith("pool-")} == {(120, 4096)}
    assert sum(len(peers_on(*place)) for place in places) == 25


def test_a_published_plan_stands_beside_searches_for_its_own_job_alone() -> None:
    peer = next(peer for peer in peers.peers() if peer.program == "sailor")
    cluster, job = peer.cluster, peer.plan.job()
    assert peer in peers_on(cluster, job)
    assert peer in peers_on(replace(cluster, stack=stack("megatron-core")), job)
    assert peers_on(cluster, replace(job, global_batch=512)) == []
    assert peers_on(replace(cluster, nodes=cluster.nodes[1:]), job) == []
    slower = replace(cluster, fabric=replace(cluster.fabric, latency_s=1.0))
    assert peers_on(slower, job) == []


# --- How they are judged ---------------------------------------------------------------------------------------------


def two_stages(micro_batches: int) -> Plan:
    """OPT-350M on two nodes of one GPU, by GPipe: the first stage keeps all micro-batches, and by 1F1B two."""
    stages = tuple(Stage((Replica((f"n{s}/0",), 4),), ((12 * s, 12 * s + 12),)) for s in range(2))
    pipelines = (Pipeline(4, micro_batches, stages),)
    return Plan("tiny", "opt-350m", 2048, 4 * micro_batches, pipelines, schedule="gpipe", zero_stage=0)


def with_memory(num_bytes: int) -> Cluster:
    cluster = ethernet_cluster([1, 1], 10e9)
    nodes = tuple(replace(node, gpu=replace(node.gpu, memory_bytes=num_bytes)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def need(plan: Plan) -> int:
    """The bytes of its fullest device, told by what one GPU of a byte lacks."""
    reason = infeasible(plan, with_memory(1))
    assert isinstance(reason, Infeasible) and reason.need_bytes is not None
    return reason.need_bytes


def test_a_plan_is_judged_as_it_is_else_as_1f1b_else_for_time_alone() -> None:
    plan = two_stages(16)
    as_1f1b = replace(plan, schedule="1f1b")
    assert need(as_1f1b) < need(plan)
    for num_bytes, remark, judged in (
        (need(plan), AS_IT_IS, plan),
        (need(plan) - 1, AS_1F1B, as_1f1b),
        (need(as_1f1b), AS_1F1B, as_1f1b),
        (need(as_1f1b) - 1, MEMORY_IGNORED, as_1f1b),
    ):
        cluster = with_memory(num_bytes)
        outcome = judge_peer(Peer("tried", cluster, plan), cluster)
        assert (outcome.remark, outcome.plan, outcome.fits) == (remark, judged, remark != MEMORY_IGNORED)
        assert outcome.cost is not None and not outcome.searched
        assert outcome.cost.iteration_s == pytest.approx(simulate(judged, cluster).iteration_s, rel=1e-12)


def test_a_plan_that_cannot_run_for_another_reason_stays_infeasible() -> None:
    plan = replace(two_stages(2), precision="fp8")
    cluster = ethernet_cluster([1, 1], 10e9)
    outcome = judge_peer(Peer("tried", cluster, plan), cluster)
    assert outcome.remark == AS_IT_IS and outcome.plan is None
    assert outcome.why_not is not None and "fp8" in outcome.why_not


def test_a_plan_that_does_not_fit_does_not_win() -> None:
    plan = two_stages(16)
    small, large = with_memory(1), with_endless_memory(with_memory(1))
    fast = judge_peer(Peer("fast", small, plan), small)
    slow = judge_peer(Peer("slow", large, plan), large)
    assert winner([fast, slow]) is slow and winner([fast]) is None


def test_published_plans_stand_in_the_table_of_a_comparison(
    motley: Callable[..., Ran], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that answers with the published plan as it was judged has its time; the two stand beside one another."""
    peer = next(p for p in peers.peers() if p.program == "flashflex" and p.cluster.name == "mixed-b-10gbit")
    cluster_file = README.parent / "mixed-b-10gbit.yaml"

    def copier(search: Search) -> None:
        search.consider(replace(peer.plan, schedule="1f1b"))

    monkeypatch.setitem(PLANNERS, "copier", copier)
    values = ["compare", "--cluster", cluster_file, "--model", peer.plan.model, "--seq-len", 4096, "--planners", "copier"]
    ran = motley(*values, "--global-batch", 120, "--processes", 1, "--json", "-")
    assert ran.code == 0, ran.err
    rows = {row["planner"]: row for row in json.loads(ran.out)}
    assert set(rows) == {"copier", "flashflex, published"}
    assert rows["flashflex, published"]["judged_as"] == AS_1F1B and rows["copier"]["judged_as"] is None
    assert rows["flashflex, published"]["iteration_s"] == rows["copier"]["iteration_s"]
    assert rows["flashflex, published"]["ratio_to_best"] == 1.0
    assert AS_1F1B in ran.err
    ran = motley(*values, "--global-batch", 60, "--processes", 1, "--json", "-")
    assert [row["planner"] for row in json.loads(ran.out)] == ["copier"]
