"""What a search keeps of the plans that were judged: the best, the front, the best of every shape; and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import partition
from partition import PLANNERS, Search
from partition.objective import OBJECTIVES, Ledger, Objective, dominates
from partition.parallel import cores
from partition.search import MOST_SHAPES, BudgetSpent, shape_of
from sim.cost.feasibility import infeasible
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.judge import Cost, Forecast, Infeasible, Verdict
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError
from sim.spec.transformer import transformer
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node
from tests.partition.test_objective import priced

JOB = job()
FOUR = cluster(priced("a", "RTX4090", 2, 1.0), priced("b", "RTX3090", 2, 0.25))


def plan_of(*pipelines: tuple[tuple[str, ...], ...], micro_batch: int = 1, on: str = "world") -> Plan:
    """The plan whose pipelines have these stages; all take the same part of the batch."""
    made = []
    for stages in pipelines:
        bounds = [TINY.layers * i // len(stages) for i in range(len(stages) + 1)]
        cuts = [(bounds[i], bounds[i + 1]) for i in range(len(stages))]
        parts = tuple(Stage((Replica(devices, micro_batch),), (cut,)) for devices, cut in zip(stages, cuts, strict=True))
        made.append(Pipeline(micro_batch, JOB.global_batch // len(pipelines) // micro_batch, parts))
    return Plan(on, TINY, JOB.sequence_length, JOB.global_batch, tuple(made))


SHAPES = [
    plan_of((("a/0",), ("a/1",))),
    plan_of((("a/0", "a/1"),)),
    plan_of((("b/0",), ("b/1",))),
    plan_of((("a/0",),), (("a/1",),)),
    plan_of((("a/0",), ("b/0",))),
    plan_of((("a/0", "a/1"), ("b/0", "b/1"))),
    plan_of((("a/0", "a/1"),), (("b/0", "b/1"),)),
    plan_of((("b/0",), ("a/0",))),
    plan_of((("a/0",),)),
    plan_of((("b/0",),)),
]
"""Plans of different shapes."""


def said(iteration_s: float, energy_j: float) -> Cost:
    tokens = JOB.global_batch * JOB.sequence_length
    return Cost(iteration_s, tokens / iteration_s, 0.1, 0.1, 0.1, 0.0, {}, energy_j, 1.0)


def told(verdicts: dict[Plan, Verdict], objective: Objective | None = None, on: Cluster = FOUR) -> Search:
    """A search in which these plans were considered, and judged so."""
    search = Search(on, JOB, verdicts.__getitem__, objective=objective or Objective())
    for plan in verdicts:
        search.consider(plan)
    return search


@pytest.mark.skipif(cores() == 1, reason="nobody judges beside another")
def test_of_several_plans_those_that_take_too_long_have_no_verdict() -> None:
    quick, slow = SHAPES[:2], SHAPES[2]

    def verdict(plan: Plan) -> Verdict:
        if plan == slow:
            time.sleep(120)
        return said(1.0, 1.0)

    search = Search(FOUR, JOB, Forecast(verdict))
    found = search.consider_all([slow, *quick], until_s=1.0)
    assert found[0] is None and all(isinstance(one, Cost) for one in found[1:])
    assert search.elapsed_s < 60
    assert search.judged == 2


few = st.integers(1, 4).map(float)
"""Few values, so that plans are often equal in something."""


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OBJECTIVES), st.lists(st.tuples(few, few), min_size=1, max_size=len(SHAPES)))
def test_no_answer_is_dominated_and_the_front_is_all_that_is_not(name: str, values: list[tuple[float, float]]) -> None:
    verdicts: dict[Plan, Verdict] = {
        plan: said(time_s, 1000 * energy) for plan, (time_s, energy) in zip(SHAPES, values, strict=False)
    }
    search = told(verdicts, Objective(name))
    ledger = Ledger(FOUR)
    outlays = {plan: ledger.outlay(plan, cost) for plan, cost in verdicts.items() if isinstance(cost, Cost)}
    standing = [plan for plan in outlays if not any(dominates(other, outlays[plan]) for other in outlays.values())]
    assert search.best is not None
    assert search.best[0] in standing
    assert (
        min(outlays[plan].axes()[OBJECTIVES.index(name)] for plan in outlays)
        == (outlays[search.best[0]].axes()[OBJECTIVES.index(name)])
    )
    # Of plans that are equal in everything, one is enough.
    assert {outlays[plan].axes() for plan, _ in search.front} == {outlays[plan].axes() for plan in standing}
    assert len(search.front) == len({outlays[plan].axes() for plan in standing})
    times = [cost.iteration_s for _, cost in search.front]
    assert times == sorted(times)


def test_plans_that_miss_a_constraint_are_no_answer_and_on_no_front() -> None:
    # 2 GPUs of a rent for 2 $/h, 2 of b for 0.5 $/h.
    verdicts: dict[Plan, Verdict] = {SHAPES[0]: said(1.0, 100), SHAPES[2]: said(3.0, 100), SHAPES[9]: said(8.0, 100)}
    search = told(verdicts, Objective(max_dollars_per_hour=0.6, min_tokens_per_s=16 * 1024 / 4))
    assert search.best == (SHAPES[2], verdicts[SHAPES[2]])
    assert search.front == ((SHAPES[2], verdicts[SHAPES[2]]),) and search.others == ()


def test_where_none_keeps_the_constraints_the_closest_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {SHAPES[0]: said(1.0, 100), SHAPES[2]: said(3.0, 100)}

    def both(search: Search) -> None:
        for plan in verdicts:
            search.consider(plan)

    monkeypatch.setitem(PLANNERS, "both", both)
    aim = Objective(max_dollars_per_hour=1.0, min_tokens_per_s=16 * 1024 / 2)
    # Twice the rent, and two thirds of the tokens: that is closer.
    result = partition.plan(FOUR, JOB, "both", verdicts.__getitem__, objective=aim)
    assert (result.plan, result.cost, result.stopped) == (None, None, "finished")
    assert result.infeasible is not None
    assert "closest to the constraints has 5,461 tokens/s, but asked for is at least 8,192 tokens/s" in result.infeasible.message


def test_the_best_plans_of_other_shapes_are_kept_and_no_more_than_some() -> None:
    variants = {replace(SHAPES[0], zero_stage=stage): said(1.0 + stage, 100) for stage in (0, 1, 2)}
    verdicts: dict[Plan, Verdict] = {plan: said(10.0 - i, 100) for i, plan in enumerate(SHAPES[1:])}
    verdicts |= variants
    search = told(verdicts)
    assert search.best is not None and search.best[0].zero_stage == 0
    assert len(search.others) == MOST_SHAPES - 1
    # The fastest of each other shape; the two slowest are forgotten.
    assert [cost.iteration_s for _, cost in search.others] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert all(plan not in variants for plan, _ in search.others)


def test_a_shape_is_its_pipelines_and_their_stages_in_gpus_of_kinds() -> None:
    kinds = {device.name: device.gpu.name for device in FOUR.devices}
    assert len({shape_of(plan, kinds) for plan in SHAPES}) == len(SHAPES)
    base = plan_of((("a/0",), ("b/0",)), (("a/1",), ("b/1",)))
    swapped = plan_of((("a/1",), ("b/0",)), (("a/0",), ("b/1",)), micro_batch=2)
    assert shape_of(base, kinds) == shape_of(swapped, kinds)
    assert shape_of(base, kinds) != shape_of(plan_of((("a/0",), ("b/0",)), (("b/1",), ("a/1",))), kinds)


def test_a_plan_that_is_considered_again_is_not_judged_again_and_the_memory_of_verdicts_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("partition.search.MOST_VERDICTS", 2)
    asked: list[Plan] = []

    def judge(plan: Plan) -> Verdict:
        asked.append(plan)
        return said(1.0, 100)

    search = Search(FOUR, JOB, judge)
    assert search.consider(SHAPES[0]) is search.consider(SHAPES[0])
    assert (len(asked), search.judged) == (1, 1)
    for plan in SHAPES[1:4]:
        search.consider(plan)
    search.consider(SHAPES[3])
    search.consider(SHAPES[0])  # forgotten meanwhile
    assert asked == [*SHAPES[:4], SHAPES[0]]


def test_a_verdict_of_a_process_beside_counts_once_and_as_if_it_had_been_asked_for_here() -> None:
    def judge(plan: Plan) -> Verdict:
        raise AssertionError(plan)

    search = Search(FOUR, JOB, judge)
    for seconds in (2.0, 3.0):  # the second one is of a plan that has its verdict
        search.take(SHAPES[0], said(seconds, 100))
    search.take(SHAPES[1], said(1.0, 100))
    assert search.judged == 2
    assert search.best is not None
    assert search.best[0] == SHAPES[1]
    assert getattr(search.consider(SHAPES[0]), "iteration_s", None) == 2.0


def told_ahead(ended: type[BaseException] | None) -> tuple[Search, list[tuple[int, float]]]:
    """A search that takes two equal plans in one order and is told them in the other, and the progress that it showed."""
    shown: list[tuple[int, float]] = []

    def progress(search: Search) -> None:
        assert search.best is not None
        shown.append((search.judged, search.best[1].iteration_s))

    search = Search(FOUR, JOB, lambda plan: said(9.0, 100), progress=progress)
    search.consider(SHAPES[2])
    with suppress(*[ended] if ended else []), search.ahead() as ahead:
        for plan, seconds in ((SHAPES[1], 2.0), (SHAPES[0], 2.0), (SHAPES[4], 1.5)):
            ahead.take(plan, said(seconds, 100))
        search.take(SHAPES[0], said(2.0, 100))
        if ended:
            raise ended
        search.take(SHAPES[1], said(2.0, 100))
    search.consider(SHAPES[9])
    return search, shown


def test_what_is_told_ahead_is_shown_and_leaves_the_answer_to_the_order_of_the_search() -> None:
    search, shown = told_ahead(None)
    assert shown == [(1, 9.0), (2, 2.0), (3, 2.0), (4, 1.5), (4, 2.0)]
    assert search.judged == 4
    assert search.best is not None
    assert search.best[0] == SHAPES[0]


@pytest.mark.parametrize("ended", [KeyboardInterrupt, BudgetSpent])
def test_a_search_that_is_ended_keeps_all_that_was_told_ahead(ended: type[BaseException]) -> None:
    search, shown = told_ahead(ended)
    assert shown == [(1, 9.0), (2, 2.0), (3, 2.0), (4, 1.5), (5, 1.5)]
    assert search.best is not None
    assert search.best[0] == SHAPES[4]
    assert {plan for plan, _ in search.others} == {SHAPES[i] for i in (0, 1, 2, 9)}


# --- Which GPUs to use -----------------------------------------------------------------------------------------------


def test_cost_leaves_out_gpus_that_are_not_worth_their_rent_and_throughput_does_not() -> None:
    dear = cluster(priced("fast", "RTX4090", 2, 0.4), priced("slow", "RTX3090", 2, 40.0))
    cheapest = partition.plan(dear, job(SMALL), "megatron", budget_s=600, objective="cost")
    assert cheapest.plan is not None and {name.split("/")[0] for name in cheapest.plan.devices} == {"fast"}
    assert cheapest.stopped == "finished"
    fastest = partition.plan(dear, job(SMALL), "megatron", budget_s=600)
    assert fastest.cost is not None and cheapest.cost is not None
    assert fastest.cost.iteration_s <= cheapest.cost.iteration_s
    # What is answered does not cost more than anything that was judged.
    ledger = Ledger(dear)
    per_billion = [ledger.outlay(plan, cost).dollars_per_billion_tokens or 0.0 for plan, cost in cheapest.front]
    assert ledger.outlay(cheapest.plan, cheapest.cost).dollars_per_billion_tokens == min(per_billion)


def seen_parts(monkeypatch: pytest.MonkeyPatch, act: Callable[[Search], None]) -> list[list[str]]:
    """The names of the nodes that a planner of this name was given, one list for each time it ran."""
    seen: list[list[str]] = []

    def spying(search: Search) -> None:
        seen.append([n.name for n in search.cluster.nodes])
        act(search)

    monkeypatch.setitem(PLANNERS, "spying", spying)
    return seen


def test_a_planner_is_given_the_parts_one_after_the_other_where_gpus_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_parts(monkeypatch, lambda search: None)
    result = partition.plan(FOUR, JOB, "spying", objective="cost")
    # One GPU of each kind, two of each (the cheaper FLOP first), all four.
    assert seen == [["b"], ["a"], ["b"], ["a"], ["a", "b"]]
    assert result.plan is None and result.judged == 0
    seen.clear()
    partition.plan(FOUR, JOB, "spying")
    assert seen == [["a", "b"]]


def test_parts_for_which_time_ran_out_are_searched_again_the_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[tuple[int, float]] = []

    def slow(search: Search) -> None:
        shares.append((len(search.cluster.devices), search.budget_s))
        kind = search.cluster.nodes[0].name
        if len(search.cluster.nodes) == 1:  # of the whole cluster it has nothing judged
            search.consider(plan_of(tuple((f"{kind}/{i}",) for i in range(search.cluster.nodes[0].gpus))))
        while not search.past(search.budget_s):
            pass

    seen = seen_parts(monkeypatch, slow)
    result = partition.plan(FOUR, JOB, "spying", budget_s=0.5, objective="cost")
    assert seen[:5] == [["b"], ["a"], ["b"], ["a"], ["a", "b"]]
    assert [devices for devices, _ in shares[:5]] == [1, 1, 2, 2, 4]
    assert sum(share_s for _, share_s in shares[:5]) <= 0.3  # larger parts have more of half of the time
    assert shares[4][1] > 1.5 * shares[2][1] > 1.5 * shares[0][1]
    ledger = Ledger(FOUR)
    best = {
        (plan.devices[0][0], len(plan.devices)): ledger.outlay(plan, cost).dollars_per_billion_tokens or 0.0
        for plan, cost in [(result.plan, result.cost), *result.others]
        if plan is not None and cost is not None
    }
    again = [(names[0], devices) for names, (devices, _) in zip(seen[5:], shares[5:], strict=True) if len(names) == 1]
    assert again == sorted(best, key=lambda part: best[part])[: len(again)] and len(again) > 2
    assert all(one > other for (_, one), (_, other) in pairwise(shares[5:]))
    assert sum(share_s for _, share_s in shares) < 0.6


def test_a_planner_that_chooses_gpus_by_what_they_cost_has_the_whole_cluster_first_and_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares: list[float] = []
    seen = seen_parts(monkeypatch, lambda search: shares.append(search.budget_s))
    monkeypatch.setattr(partition.search, "CHOOSERS", {"spying"})
    partition.plan(FOUR, JOB, "spying", budget_s=60, objective="energy")
    assert seen[0] == ["a", "b"] and sorted(seen[1:]) == [["a"], ["a"], ["b"], ["b"]]
    assert 44 < shares[0] <= 45  # of what a glance at the parts leaves
    # Under a limit in dollars it makes fast plans of what the rent allows, as all others do.
    seen.clear()
    partition.plan(FOUR, JOB, "spying", objective=Objective(max_dollars_per_hour=1e6))
    assert seen[-1] == ["a", "b"] and seen[0] == ["b"]


def test_a_planner_that_chooses_gpus_has_the_best_symmetric_plans_of_the_parts_judged_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen_parts(monkeypatch, lambda search: None)
    monkeypatch.setattr(partition.search, "CHOOSERS", {"spying"})
    ledger = Ledger(FOUR)
    result = partition.plan(FOUR, JOB, "spying", budget_s=60, objective="energy")
    single = partition.plan(FOUR, JOB, "megatron", budget_s=60, objective="energy")
    assert result.plan is not None and result.cost is not None and single.plan is not None and single.cost is not None
    assert len(result.plan.devices) < 4 and result.judged <= 6
    took, other = ledger.outlay(result.plan, result.cost), ledger.outlay(single.plan, single.cost)
    assert took.joules_per_token <= other.joules_per_token * (1 + 1e-9)


def test_a_planner_that_refuses_some_parts_is_asked_about_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def small_only(search: Search) -> None:
        if len(search.cluster.devices) > 1:
            raise InputError("at most 1 GPU")
        name = search.cluster.devices[0].name
        search.consider(plan_of(((name,),)))

    seen_parts(monkeypatch, small_only)
    result = partition.plan(FOUR, JOB, "spying", objective="cost")
    assert result.plan is not None and result.judged == 2
    with pytest.raises(InputError, match="at most 1 GPU"):
        partition.plan(FOUR, JOB, "spying")


# --- How it ends -----------------------------------------------------------------------------------------------------


def idling(search: Search) -> None:
    """Thinks until the budget is spent, and has nothing judged."""
    while True:
        search.check_budget()


@pytest.mark.parametrize("budget", ["3s", -1.0, float("nan")])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    with pytest.raises(InputError, match="the budget is a number of seconds above zero, but got"):
        partition.plan(FOUR, JOB, "random", budget_s=budget)


def test_a_job_of_something_else_is_refused() -> None:
    with pytest.raises(InputError, match=r"a job's model is a Transformer, .* but got 'opt-350m'"):
        replace(JOB, model=cast("Any", "opt-350m"))
    with pytest.raises(InputError, match=r"the global batch is a whole number, at least 1 and at most 1,000,000, but got 2\.5"):
        replace(JOB, global_batch=cast("Any", 2.5))


def test_the_best_symmetric_plan_stands_in_where_the_budget_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "idling", idling)
    on, work = mixed(), job(SMALL)
    result = partition.plan(on, work, "idling", budget_s=0.01)
    assert (result.stopped, result.judged, result.stands_in) == ("budget", 1, True)
    assert result.plan is not None and infeasible(result.plan, on) is None
    assert result.cost == simulation(on, work)(result.plan)
    assert len({(p.micro_batch, p.micro_batches, len(p.stages)) for p in result.plan.pipelines}) == 1  # a grid
    assert not partition.plan(on, work, "megatron", budget_s=600).stands_in


def test_where_no_symmetric_plan_fits_the_one_that_needs_least_memory_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "idling", idling)
    small = node("a", "RTX4090", 2)
    on = cluster(replace(small, gpu=replace(small.gpu, memory_bytes=6 * 2**30)))  # 0.75 billion parameters take 13.5 GB
    result = partition.plan(on, job(SMALL), "idling", budget_s=0.01)
    assert (result.stopped, result.judged, result.stands_in) == ("budget", 1, True)
    assert result.plan is not None and result.plan.offload_optimizer and infeasible(result.plan, on) is None


def test_an_answer_that_the_clock_had_a_part_in_is_not_called_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def patient(search: Search) -> None:
        search.consider(SHAPES[0])
        while not search.past(0.02):  # it ends by itself, but by the clock
            pass

    monkeypatch.setitem(PLANNERS, "patient", patient)
    assert partition.plan(FOUR, JOB, "patient").stopped == "budget"
    assert partition.plan(mixed(), job(SMALL), "motley", budget_s=1.0).stopped == "budget"


def test_a_planner_without_a_plan_to_try_does_not_blame_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "idle", lambda search: None)
    result = partition.plan(FOUR, JOB, "idle")
    assert result.infeasible is not None and result.infeasible.reason == "devices"
    assert "the planner idle found no plan to judge for 4 GPUs, 8 layers and a batch of 16" in result.infeasible.message


def test_no_plan_stands_in_where_none_keeps_the_constraints_or_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "idling", idling)
    slow = partition.plan(mixed(), job(SMALL), "idling", budget_s=0.01, objective=Objective(min_tokens_per_s=1e9))
    assert (slow.plan, slow.stands_in) == (None, False)
    assert slow.infeasible is not None and "at least 1,000,000,000 tokens/s" in slow.infeasible.message
    large = partition.plan(mixed(), job(transformer("llama-2-70b")), "idling", budget_s=0.01)
    assert large.plan is None and isinstance(large.infeasible, Infeasible)
    assert large.infeasible.reason == "memory" and "least hungry plan" in large.infeasible.message


def test_a_rent_that_no_gpu_keeps_is_told_with_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    result = partition.plan(FOUR, JOB, "megatron", objective=Objective(max_dollars_per_hour=0.1))
    assert (result.plan, result.judged) == (None, 0)
    assert result.infeasible is not None
    assert result.infeasible.message.endswith("per hour: the cheapest, RTX3090, takes $0.25")


def test_an_interrupt_on_some_part_ends_the_search_with_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(search: Search) -> None:
        search.consider(plan_of(((search.cluster.devices[0].name,),)))
        if len(search.cluster.devices) == 2:
            raise KeyboardInterrupt

    seen = seen_parts(monkeypatch, interrupted)
    result = partition.plan(FOUR, JOB, "spying", objective="energy")
    assert (result.stopped, result.judged, len(seen)) == ("interrupted", 2, 3)
    assert result.plan is not None
