"""What every planner keeps, whatever its method: one suite over all that are registered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import partition
from partition import planners
from partition.planners.exhaustive import MOST_GPUS
from sim.cost.feasibility import infeasible
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.compile import compile_plan
from sim.spec.job import Job
from sim.spec.judge import Cost, Infeasible, Judge, Verdict
from sim.spec.plan import Plan
from sim.spec.program import dry_run
from sim.spec.reading import InputError
from sim.spec.transformer import transformer
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node

ROOT = Path(__file__).parents[2]
ALL = sorted(planners.__all__)  # what other tests register is not of these

HALF = cluster(node("slow", "RTX3080Ti", 2), node("fast", "RTX4090", 2))
"""The world of two kinds with half as many GPUs, where a world need not be larger: long searches take half as long there."""

WORLDS: dict[str, tuple[Cluster, Job]] = {
    "one GPU": (cluster(node("a", "A100-40GB-SXM", 1, "nvlink")), job()),
    "two GPUs of two nodes": (cluster(node("a", "RTX4090", 1), node("b", "RTX3090", 1)), job(batch=7)),
    "two kinds": (mixed(), job(SMALL)),
    "uneven nodes, a batch that nothing divides": (
        cluster(node("a", "A100-40GB-SXM", 3, "nvlink"), node("b", "A100-40GB-SXM", 1, "nvlink"), node("c", "RTX4090", 3)),
        job(batch=13),
    ),
    "more GPUs than layers": (HALF, job(replace(TINY, name="shallow", layers=2))),
    "one sequence": (HALF, job(batch=1)),
    "tied embeddings": (mixed(), job(replace(TINY, name="tied", tied_embeddings=True))),
    "fp32 with a T4": (cluster(node("a", "V100-16GB-SXM", 2, "nvlink"), node("b", "T4", 2)), job(precision="fp32")),
    "gradients in bf16": (mixed(), replace(job(), gradient_precision="bf16")),
    "a kind without bf16": (cluster(node("a", "V100-16GB-SXM", 4, "nvlink"), node("b", "RTX4090", 2)), job()),
    "heads that few degrees divide": (mixed(), job(replace(TINY, name="odd", heads=6, kv_heads=2, head_dim=128))),
}


def refused(planner: str, on: Cluster, work: Job) -> bool:
    """Whether a planner refuses a world: the exhaustive one those of too many GPUs."""
    return planner == "exhaustive" and sum(device.gpu.peak(work.precision) is not None for device in on.devices) > MOST_GPUS


def two_kinds(planner: str) -> tuple[Cluster, Job]:
    """The world of two kinds, or a part of it for the planner that would refuse it, and for the one that searches longest."""
    on, work = WORLDS["two kinds"]
    if planner == "motley":
        return HALF, work
    if refused(planner, on, work):
        part = cluster(node("slow", "RTX3080Ti", 2), node("fast", "RTX4090", 1))
        return part, job(replace(SMALL, name="smaller", layers=4), batch=4)
    return on, work


def places() -> list[object]:
    """Every planner in every world; the longest search in worlds that are like others only where time is no matter."""
    long = {
        "gradients in bf16",
        "tied embeddings",
        "heads that few degrees divide",
        "fp32 with a T4",
        "one sequence",
        "more GPUs than layers",
    }
    found = [(world, planner) for world in WORLDS for planner in ALL]
    return [
        pytest.param(*one, marks=pytest.mark.slow, id="-".join(one)) if one[1] == "motley" and one[0] in long else one
        for one in found
    ]


@pytest.mark.parametrize(("world", "planner"), places())
def test_a_planner_ends_with_a_plan_that_runs_and_costs_what_the_judge_says(planner: str, world: str) -> None:
    on, work = two_kinds(planner) if world == "two kinds" else WORLDS[world]
    if refused(planner, on, work):
        with pytest.raises(InputError, match="at most 6 GPUs, but world has"):
            partition.plan(on, work, planner, budget_s=600)
        return
    result = in_two_kinds(planner) if world == "two kinds" else partition.plan(on, work, planner, budget_s=600)
    assert (result.planner, result.stopped, result.infeasible) == (planner, "finished", None)
    assert result.plan is not None
    assert result.plan.job() == work
    assert all(on.device(name).gpu.peak(work.precision) is not None for name in result.plan.devices)
    assert infeasible(result.plan, on) is None
    dry_run(compile_plan(result.plan))
    assert result.cost == simulation(on, work)(result.plan)
    assert result.judged >= 1


@pytest.mark.parametrize("planner", ALL)
def test_the_answer_is_the_best_of_plans_that_are_judged_once_and_can_run(planner: str) -> None:
    on, work = two_kinds(planner)
    judge, seconds = simulation(on, work), dict[Plan, float]()

    def strict(plan: Plan) -> Verdict:
        assert plan not in seconds
        verdict = judge(plan)
        assert isinstance(verdict, Cost), verdict
        seconds[plan] = verdict.iteration_s
        return verdict

    result = partition.plan(on, work, planner, judge=strict, budget_s=600)
    assert result.judged == len(seconds) > 1
    assert result.cost is not None
    assert result.cost.iteration_s == min(seconds.values())


def test_the_same_seed_gives_the_same_answers_in_a_process_with_another_hash_order() -> None:
    program = "from tests.partition.test_planner_contract import ALL, told\nfor name in ALL:\n    print(told(name))\n"
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [told(name) for name in ALL]


@cache
def in_two_kinds(planner: str) -> partition.Result:
    """A planner's answer in the world of two kinds, found once for all who look at it."""
    return partition.plan(*two_kinds(planner), planner, budget_s=600, seed=5)


def told(planner: str) -> str:
    """A planner's answer in the world of two kinds, as a line."""
    result = in_two_kinds(planner)
    assert result.plan is not None and result.cost is not None
    return f"{planner} {result.judged} {result.cost.iteration_s!r} {json.dumps(json.loads(result.plan.to_json()))}"


class Clock:
    """A clock that goes on only when it is told to."""

    def __init__(self) -> None:
        self.now_s = time.perf_counter()

    def perf_counter(self) -> float:
        return self.now_s


def slow_judge(on: Cluster, work: Job, clock: Clock) -> Judge:
    judge = simulation(on, work)

    def slow(plan: Plan) -> Verdict:
        clock.now_s += 1.0
        return judge(plan)

    return slow


@pytest.mark.parametrize("planner", ALL)
def test_the_budget_is_overdrawn_by_one_judgement_at_most(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on, work = two_kinds(planner)
    clock = Clock()
    monkeypatch.setattr("partition.search.time", clock)
    result = partition.plan(on, work, planner, judge=slow_judge(on, work, clock), budget_s=1.5)
    assert (result.stopped, result.judged) == ("budget", 2)
    assert 1.5 < result.seconds < 2.5
    assert result.plan is not None


@pytest.mark.parametrize("planner", ALL)
def test_an_interrupt_leaves_the_best_plan_so_far(planner: str) -> None:
    on, work = two_kinds(planner)
    judge, count = simulation(on, work), 0

    def interrupted(plan: Plan) -> Verdict:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return judge(plan)

    result = partition.plan(on, work, planner, judge=interrupted, budget_s=600)
    assert (result.stopped, result.judged) == ("interrupted", 1)
    assert result.plan is not None


@pytest.mark.parametrize("planner", ALL)
def test_a_model_that_fits_nowhere_is_answered_with_the_memory_that_lacks(planner: str) -> None:
    on = cluster(node("a", "RTX3080Ti", 2))
    result = partition.plan(on, job(transformer("llama-2-13b")), planner, budget_s=600)
    assert (result.plan, result.cost, result.judged, result.stopped) == (None, None, 0, "finished")
    reason = result.infeasible
    assert isinstance(reason, Infeasible)
    assert reason.reason == "memory"
    assert reason.need_bytes is not None and reason.have_bytes is not None
    assert reason.need_bytes > reason.have_bytes == on.nodes[0].gpu.memory_bytes
    assert "needs" in reason.message and "GiB" in reason.message


@pytest.mark.parametrize("planner", ALL)
def test_gpus_without_the_precision_are_answered_with_that(planner: str) -> None:
    result = partition.plan(cluster(node("a", "V100-16GB-SXM", 2, "nvlink")), job(), planner)
    assert result.plan is None
    assert result.infeasible is not None
    assert (result.infeasible.reason, result.infeasible.device) == ("precision", "a/0")
    assert "bf16" in result.infeasible.message


def test_an_unknown_planner_is_told_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown planner 'megatrom'; accepted: .*flashflex.*megatron.*random"):
        partition.plan(mixed(), job(), "megatrom")
