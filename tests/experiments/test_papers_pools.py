"""The experiment after Metis and Sailor: its pools, what they cost, and which of their parts no other part beats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from experiments import peers
from experiments.papers.pools import APART, _front, apart, cluster, name_of, with_dollars, with_tensor_cores
from sim.cost.network import Network
from sim.metrics import cost_report
from sim.simulation import simulation
from sim.spec.cluster import read_cluster
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline, Plan, Replica, Stage


def test_a_pool_is_as_the_file_of_the_published_plans_says() -> None:
    known = read_cluster(Path(peers.__file__).with_name("data") / "peer_plans" / "pool-a100x8-v100x8.yaml")
    pool = {"A100": 8, "V100": 8}
    assert replace(cluster(pool), name=known.name) == known
    assert name_of(pool) == "8 A100 + 8 V100"


def test_dollars_are_the_rent_of_the_whole_pool() -> None:
    # One of the four A100 works, and all four are paid: $1.29 an hour each.
    on = cluster({"A100": 4})
    stages = (Stage((Replica(("a100-0/0",), 1),), ((0, 12),)),)
    plan = Plan(on.name, "gpt3-125m", 2048, 4, (Pipeline(1, 4, stages),), "fp16")
    cost = simulation(on, plan.job())(plan)
    assert isinstance(cost, Cost)
    row = {"dollars": cost_report(cost).dollars, "global_batch": 4, "sequence_length": 2048, "tokens_per_s": cost.tokens_per_s}
    rows = with_dollars(pandas.DataFrame([{**row, "gpus_used": 1, "stands_in": False}]))
    hours = 1e9 / cost.tokens_per_s / 3600
    assert rows.per_billion[0] == pytest.approx(4 * 1.29 * hours)


def test_what_stands_in_for_a_plan_is_not_told_as_the_planner_s() -> None:
    row = {"dollars": 1.0, "global_batch": 1, "sequence_length": 1, "tokens_per_s": 1.0, "gpus_used": 1}
    rows = with_dollars(pandas.DataFrame([{**row, "stands_in": each} for each in (True, False, None)]))
    assert rows.tokens_per_s.isna().tolist() == [True, False, False]


def test_halves_of_a_pool_talk_over_the_wide_area_alone() -> None:
    on = Network(apart(cluster(APART), 1e9))
    assert on.busiest_s(on.transfer([("a100-0/0", "a100-7/0", 1e9)])) == pytest.approx(1.0)
    assert on.busiest_s(on.transfer([("a100-0/0", "a100-3/0", 1e9)])) < 0.5


def test_in_tf32_only_gpus_that_have_it_become_faster() -> None:
    slow, fast = cluster({"A100": 4, "V100": 4}), with_tensor_cores(cluster({"A100": 4, "V100": 4}))
    assert [node.gpu.peak("fp32") for node in slow.nodes] == [19.5e12, 15.7e12]
    assert [node.gpu.peak("fp32") for node in fast.nodes] == [156e12, 15.7e12]
    assert fast.nodes[1] == slow.nodes[1]


def test_the_front_is_what_nothing_beats() -> None:
    points = [(10.0, 5.0), (10.0, 6.0), (8.0, 5.0), (7.0, 3.0), (6.0, 4.0), (1.0, 2.0), (float("nan"), 1.0)]
    rows = pandas.DataFrame(points, columns=["tokens_per_s", "per_billion"])
    assert _front(rows).index.tolist() == [0, 3, 5]
