"""Why other plans lost: the seconds of an iteration by cause, and the cause that a plan loses most by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.alternatives import CAUSES, MOST_ALTERNATIVES, alternatives, seconds_by_cause
from partition.objective import Objective
from sim.engine import simulate
from sim.metrics import cost, report
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from tests.partition.small_worlds import TINY, cluster, job
from tests.partition.test_objective import priced

JOB = job()
PAIR = cluster(priced("a", "RTX4090", 2, 1.0), priced("b", "RTX4090", 2, 9.0))


def plan_of(*stages: tuple[str, ...], recompute: str = "none", micro_batch: int = 1) -> Plan:
    bounds = [TINY.layers * i // len(stages) for i in range(len(stages) + 1)]
    parts = tuple(
        Stage((Replica(devices, micro_batch),), ((bounds[i], bounds[i + 1]),), recompute) for i, devices in enumerate(stages)
    )
    pipelines = (Pipeline(micro_batch, JOB.global_batch // micro_batch, parts),)
    return Plan("world", TINY, JOB.sequence_length, JOB.global_batch, pipelines)


def judged(plan: Plan) -> tuple[Plan, Cost]:
    return plan, cost(report(simulate(plan, PAIR), PAIR))


BEST = plan_of(("a/0",), ("a/1",))


def test_the_causes_sum_to_the_iteration() -> None:
    for plan in (BEST, plan_of(("a/0", "a/1"), ("b/0", "b/1"), recompute="full")):
        trace = simulate(plan, PAIR)
        found = seconds_by_cause(trace, PAIR)
        assert set(found) == set(CAUSES) and sum(found.values()) == pytest.approx(trace.iteration_s)


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (plan_of(("a/0",), ("a/1",), recompute="full"), "recompute"),
        (plan_of(("a/0",), ("a/1",), micro_batch=8), "bubble"),  # 2 micro-batches of 2 stages: a third of the time
        (plan_of(("a/0", "b/0")), "network"),  # tensor parallel over 10 Gbit/s
        (plan_of(("a/0",)), "compute"),  # one GPU does the work of two
    ],
)
def test_a_plan_that_is_worse_in_one_thing_is_said_to_lose_by_that(other: Plan, cause: str) -> None:
    best = simulate(BEST, PAIR)
    (found,) = alternatives(best, [judged(other)], PAIR, Objective())
    assert found.outlay.iteration_s > best.iteration_s
    assert found.cause == cause
    own, others = seconds_by_cause(best, PAIR), seconds_by_cause(simulate(other, PAIR), PAIR)
    assert found.cause_s == pytest.approx(others[cause] - own[cause])
    assert found.cause_s == max(others[name] - own[name] for name in CAUSES)


def test_where_dollars_count_a_plan_of_dear_gpus_loses_by_their_rent() -> None:
    best = simulate(BEST, PAIR)
    twin = plan_of(("b/0",), ("b/1",))  # as fast, at nine times the rent
    (found,) = alternatives(best, [judged(twin)], PAIR, Objective("cost"))
    assert (found.cause, found.cause_s) == ("rent", None)
    assert found.outlay.dollars_per_hour == 18.0
    (found,) = alternatives(best, [judged(twin)], PAIR, Objective())
    assert (found.cause, found.cause_s) == (None, None)  # as fast as the best


def test_only_the_first_few_are_simulated() -> None:
    others = [judged(replace(BEST, zero_stage=0))] * (MOST_ALTERNATIVES + 2)
    assert len(alternatives(simulate(BEST, PAIR), others, PAIR, Objective())) == MOST_ALTERNATIVES
