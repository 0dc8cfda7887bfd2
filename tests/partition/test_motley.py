"""Motley's own planner where the contract of all planners does not look: its descents among deals."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import partition
from partition.deals import Deal
from partition.drafts import Settings, make_plan, settings_of, stage, usable_nodes
from partition.objective import Ledger
from partition.planners.megatron import grids
from partition.planners.motley import DEALT, START_SETTINGS, WALKED, _Descent, _Hunt
from partition.search import BudgetSpent, Search
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.counts import total_parameters
from sim.spec.job import Job
from sim.spec.judge import Cost, Infeasible, Verdict
from sim.spec.plan import Pipeline, Plan
from sim.spec.transformer import transformer
from tests.partition.small_worlds import SMALL, cluster, job, node
from tests.partition.test_objective import priced

ROOT = Path(__file__).parents[2]


TWO_KINDS = cluster(node("a", "A100-40GB-SXM", 4, "nvlink"), node("b", "RTX4090", 4))


def untouched(world: Cluster = TWO_KINDS, budget_s: float = 60.0) -> _Hunt:
    """A search of a small job that has done nothing yet."""
    search = Search(world, job(SMALL), simulation(world, job(SMALL)), 0, budget_s)
    return _Hunt(search, usable_nodes(search))


def descended() -> _Hunt:
    """A search that has descended among the deals of a cluster of two kinds, and done nothing else."""
    world = cluster(node("a", "A100-40GB-SXM", 2, "nvlink"), node("b", "RTX4090", 2), node("c", "RTX4090", 2))
    hunt = untouched(world, 20.0)
    hunt.begin_deals()
    hunt.deal()
    return hunt


@pytest.fixture(scope="module")
def hunt() -> _Hunt:
    """Such a search, which several tests look at."""
    return descended()


def judged_s(hunt: _Hunt, deal: Deal) -> float:
    """The judge's seconds of a deal, asked for anew."""
    drafted = hunt._drafted(deal)
    assert drafted is not None
    verdict = hunt.search.judge(make_plan(hunt.search.cluster, hunt.search.job, *drafted))
    return verdict.iteration_s if isinstance(verdict, Cost) else math.inf


def test_what_descents_end_at_is_judged_and_told_to_the_search(hunt: _Hunt) -> None:
    search = hunt.search
    assert len(hunt.ends) > 1
    assert search.best is not None
    assert search.best[1].iteration_s == min(seconds for seconds, _ in hunt.ends.values())
    assert search.judged >= len(hunt.ends)
    for pipelines, (seconds, deal) in hunt.ends.items():
        assert deal.pipelines == pipelines
        assert judged_s(hunt, deal) == seconds


def test_descents_beat_their_starts_and_are_the_same_again(hunt: _Hunt) -> None:
    assert hunt.ends == descended().ends
    starts = [judged_s(hunt, start) for start in hunt.firsts]
    assert min(seconds for seconds, _ in hunt.ends.values()) < min(starts)


OVERRUNS_S = 5e-3
"""The judge takes so long for a unit of work where descents that do not expect that ask for one verdict too many."""


def timed(monkeypatch: pytest.MonkeyPatch, expects: bool, slowness_s: float) -> tuple[_Hunt, float]:
    """A search that has descended among deals, by a clock that its judge alone moves: 10 seconds, with annealing's; its end.

    The judge takes so long for a unit of work.
    """
    world, now_s = TWO_KINDS, 0.0
    monkeypatch.setattr("partition.search.time", SimpleNamespace(perf_counter=lambda: now_s))
    forecast = simulation(world, job(SMALL))

    def slow(plan: Plan) -> Verdict:
        nonlocal now_s
        now_s += hunt._work(plan.pipelines, settings_of(plan)) * slowness_s
        return forecast(plan)

    if not expects:
        monkeypatch.setattr(_Hunt, "_expected_s", lambda hunt, draft, settings: 0.0)
    search = Search(world, job(SMALL), slow)
    search.narrow(world, 10.0 / WALKED)  # begins by that clock
    hunt = _Hunt(search, usable_nodes(search))
    for start in islice(hunt.starts, 5):
        hunt.score_s(start)
    hunt.judge_soon()
    hunt.begin_deals()
    with suppress(BudgetSpent):  # as all that it has is spent by those that do not expect it
        hunt.deal()
    return hunt, now_s


@pytest.mark.parametrize("slowness_s", [pytest.param(2e-3, marks=pytest.mark.slow), 4e-3, OVERRUNS_S, 7e-3])
def test_descents_ask_for_no_verdict_that_would_come_too_late(slowness_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    hunt, ended_s = timed(monkeypatch, True, slowness_s)
    assert hunt.search.judged > 1
    assert ended_s <= 10.0


def test_descents_that_do_not_expect_how_long_a_verdict_takes_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, False, OVERRUNS_S)[1] > 10.0


def test_ends_whose_verdicts_would_come_too_late_are_told_unjudged() -> None:
    hunt = untouched()
    hunt.begin_deals()
    start = hunt.firsts[0]
    hunt.longest = 1, 1.0  # a second for each unit of work
    found = hunt.descend(_Descent(start, [0, 0], until_s=60.0, verdicts_s=60.0), lambda told: None)
    assert not found.judged
    assert found.unjudged == [start, *(end for _, end in found.ends)]
    assert min(map(hunt.deal_s, found.unjudged)) < hunt.deal_s(start)


def test_where_no_end_is_judged_in_time_the_best_is_before_anything_else_is_tried() -> None:
    world = cluster(node("a", "A100-40GB-SXM", 2, "nvlink"), node("b", "RTX4090", 2))
    hunt = untouched(world)
    search = hunt.search
    hunt.load(60.0)
    hunt.score_s(next(iter(hunt.starts)))
    hunt.judge_soon()
    first_s, hunt.longest = hunt.least_s, (1, 100.0)  # seconds for each unit of work
    hunt.begin_deals()
    hunt.deal()
    best_s, layout, draft = hunt.ranked()[0]
    assert not hunt.ends
    assert search.best is not None and search.best[0] == make_plan(world, search.job, draft, layout.settings)
    assert search.best[1].iteration_s == hunt.least_s < first_s
    assert best_s < first_s


def test_where_no_end_is_judged_in_time_it_is_the_best_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    hunt = untouched()
    hunt.load(60.0)
    hunt.score_s(next(iter(hunt.starts)))
    hunt.judge_soon()
    hunt.begin_deals()
    best, second = sorted(hunt.firsts, key=hunt.deal_s)[:2]
    late = hunt._drafted(best)
    monkeypatch.setattr(hunt, "_expected_s", lambda *drafted: 1e3 if drafted == late else 0.1)
    hunt.found.clear()
    hunt.least_s = math.inf
    hunt._judge_one_in_time([(hunt.deal_s(deal), deal) for deal in (second, best)])
    assert hunt.least_s == judged_s(hunt, second)
    for deal in (best, second):  # the same of layouts that were met, whatever stands first among them
        layout = hunt.deals.layout(deal)
        assert layout is not None
        hunt.score_s(layout)
    hunt.least_s = math.inf
    hunt._judge_one_in_time([])
    assert hunt.least_s == judged_s(hunt, second)
    # And of finalists of which none is soon, the first that may be done in what is left.
    entries = [(hunt.deal_s(deal) / 2, *drafted) for deal in (best, second) if (drafted := hunt._drafted(deal)) is not None]
    assert hunt._one_in_time(entries) == entries[1:]
    hunt.least_s = entries[1][0]
    assert hunt._one_in_time(entries) == []
    hunt.search.best = None
    assert hunt._one_in_time(entries) == entries


@pytest.mark.parametrize(
    ("known_s", "now_s", "asks"),
    [
        (math.inf, 2.3, True),  # two seconds for the first plan that is any good
        (95.0, 2.3, True),
        (36.0, 2.3, False),  # a twentieth is not worth more than half of the time for deals
        (36.0, 0.2, True),
        (math.inf, 3.1, False),  # it would come after the end
    ],
)
def test_a_long_verdict_is_worth_all_that_is_left_where_none_is_near(
    known_s: float, now_s: float, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Following its messages takes 0.04 s, so that the judge will take 2 s; the search has 5, and 4.35 for deals."""
    hunt = untouched()
    hunt.load(60.0)
    hunt.begin_deals()
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("partition.search.time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    hunt.search.narrow(hunt.search.cluster, 5.0)
    clock.now_s = now_s

    def followed(*_: object) -> float:
        clock.now_s += 0.04
        return 34.3

    monkeypatch.setattr(hunt, "draft_s", followed)
    found_s = hunt._followed_s(34.0, hunt.firsts[0], 4.35, known_s)
    assert found_s == (34.3 if asks else math.inf)


def test_descents_begin_from_the_better_one_of_a_deal_and_the_best_random_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partition.planners.motley.DRAWN", 60)  # so few that the clock ends nothing
    world = cluster(node("a", "A100-40GB-SXM", 2, "nvlink"), node("b", "RTX4090", 2), node("c", "RTX3080Ti", 2))
    work = job(SMALL, sequence_length=2048, batch=32)
    search = Search(world, work, simulation(world, work), 0, 600.0)
    hunt = _Hunt(search, usable_nodes(search))
    hunt.load(60.0)
    hunt.begin_deals()
    for start in hunt.firsts:
        begins = hunt._begins(_Descent(start, [1], until_s=600.0), start, np.random.default_rng(1))
        assert start in begins and len(set(begins)) == len(begins) <= 2
        assert {deal.pipelines for deal in begins} == {start.pipelines}
        assert sorted(begins, key=hunt.deal_s) == begins
        drawn = [hunt.deals.drawn(start.pipelines, rng) for rng in [np.random.default_rng(1)] for _ in range(10)]
        assert min(map(hunt.deal_s, begins)) <= min(map(hunt.deal_s, [start, *drawn])) * 1.06


@pytest.mark.parametrize("loaded", [True, False])
def test_a_search_begins_with_an_answer_and_the_starts_of_its_descents(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    """Whether it has to load its estimates first or not."""
    hunt = untouched()
    hunt.preparation.estimates(60.0)
    monkeypatch.setattr("partition.estimated.Preparation.is_loaded", loaded)
    hunt.begin()
    best = hunt.search.best
    assert best is not None and best[1].iteration_s == hunt.least_s
    assert hunt.estimates is not None
    assert {deal.pipelines for deal in hunt.firsts} >= {1, 2}
    firsts_s = [hunt.deal_s(deal) for deal in hunt.firsts]
    assert firsts_s == sorted(firsts_s) and firsts_s[-1] < math.inf
    estimated = [hunt.score_s(layout) for _, layout, _ in hunt.ranked()]
    assert estimated == [seconds for seconds, _, _ in hunt.ranked()]


def test_a_search_has_its_answer_though_the_time_is_spent_on_the_starts_of_descents(monkeypatch: pytest.MonkeyPatch) -> None:
    hunt = untouched()
    hunt.load(60.0)

    def spent(*_: object) -> None:
        raise BudgetSpent

    monkeypatch.setattr(_Hunt, "begin_deals", spent)
    hunt.begin()
    assert hunt.search.best is not None


@pytest.mark.parametrize("loaded", [True, False])
def test_a_search_that_is_interrupted_as_it_begins_has_its_answer(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    """Whatever this process, or the one beside it, is at."""
    hunt = untouched(budget_s=600.0)
    hunt.preparation.estimates(60.0)

    def long(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        time.sleep(60.0)

    monkeypatch.setattr("partition.estimated.Preparation.is_loaded", loaded)
    monkeypatch.setattr(_Hunt, "begin_deals" if loaded else "load", long)
    if loaded:
        hunt.load()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            hunt.begin()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert hunt.search.best is not None


def test_deals_that_are_not_estimated_for_their_pace_are_slower_indeed() -> None:
    world = cluster(node("a", "A100-40GB-SXM", 4, "nvlink"), node("b", "RTX4090", 4), node("c", "RTX3080Ti", 4))
    work = job(SMALL, sequence_length=2048, batch=32)
    search = Search(world, work, simulation(world, work), 0, 600.0)
    hunt, other = _Hunt(search, usable_nodes(search)), _Hunt(search, usable_nodes(search))
    for one in (hunt, other):
        one.load(60.0)
    hunt.begin_deals()
    left_out = 0
    for first in hunt.firsts:
        seconds = hunt.deal_s(first)
        for deal in hunt.deals.near(first):
            worth_s = other.deal_s(deal, seconds)
            if deal not in other.dealt:
                left_out += 1
                assert worth_s > seconds
                assert hunt.deal_s(deal) > seconds
            else:
                assert worth_s == hunt.deal_s(deal)
    assert left_out > 5


def test_deals_begin_with_the_first_settings_that_fit() -> None:
    # Eight GPUs of 12 GB that share nothing: eager 1F1B holds twice as many activations, two pipelines twice the parameters.
    world = cluster(*(node(f"n{n}", "RTX3080Ti", 1) for n in range(8)))
    work = job(replace(SMALL, name="deep", layers=80), sequence_length=4096, batch=32)
    search = Search(world, work, simulation(world, work), 0, 60.0)
    hunt = _Hunt(search, usable_nodes(search))
    assert all(math.isinf(hunt.deal_s(start)) for n in (1, 2, 4, 8) for start in hunt.deals.starts(n, Settings("eager-1f1b")))
    hunt.begin_deals()
    assert [(start.pipelines, start.settings) for start in hunt.firsts] == [
        (1, Settings("split-1f1b")),
        (2, Settings("split-1f1b", offload_optimizer=True)),
    ]
    hunt.deal()
    assert search.best is not None


@pytest.mark.parametrize(("length", "host"), [(4095, None), (4096, 4 * 2**30)])
def test_starts_are_found_where_those_that_need_least_memory_cannot_be(length: int, host: int | None) -> None:
    """Sequences of an odd length come in no slices, and not over two tensor ranks; small hosts have no room for states."""
    nodes = tuple(replace(node(f"n{n}", "RTX3080Ti", 4), host_memory_bytes=host) for n in range(2))
    world = replace(cluster(node("n", "RTX3080Ti", 1)), nodes=nodes)
    for layers in (8, 16, 24, 32):
        work = job(replace(SMALL, name="deep", layers=layers), sequence_length=length, batch=32)
        search = Search(world, work, simulation(world, work), 0, 60.0)
        hunt = _Hunt(search, usable_nodes(search))
        for number in (1, 2, 4):
            found = hunt._first_start(number)
            fitting = [
                deal
                for settings in START_SETTINGS
                for deal in (*hunt.deals.starts(number, settings), *hunt.deals.few(number, settings))
                if hunt.deal_s(deal) < math.inf
            ]
            assert bool(found) == bool(fitting)
            if fitting:
                assert found[0][1].settings == fitting[0].settings


def test_states_go_to_the_host_where_no_gpu_has_room_for_them_and_stay_where_there_is_enough() -> None:
    # Parameters, gradients and states are 18 bytes of each of 0.75 billion parameters, without the states 6.
    for kind, offloaded in (("RTX3080Ti", True), ("A100-80GB-PCIe", False)):
        world, work = cluster(node("a", kind, 1)), job(SMALL)
        result = partition.plan(world, work, budget_s=3.0)
        assert result.plan is not None and result.plan.offload_optimizer == offloaded
        kept = result.plan if not offloaded else replace(result.plan, offload_optimizer=False)
        assert isinstance(simulation(world, work)(kept), Infeasible) == offloaded


def test_states_stay_on_the_gpus_where_a_host_has_no_room_for_them() -> None:
    # 0.75 billion parameters take 16 bytes each in the host, or 18 on the GPU.
    work = job(SMALL)
    need = 16 * total_parameters(SMALL)
    for have, fits in ((need, True), (need - 2**20, False)):
        world = cluster(replace(node("a", "RTX3080Ti", 1), host_memory_bytes=have))
        result = partition.plan(world, work, budget_s=3.0)
        assert (result.plan is not None) == fits
        if not fits:
            assert result.infeasible is not None and "offload" not in result.infeasible.message


def test_what_fits_only_with_states_in_hosts_and_sequences_divided_is_found() -> None:
    # Four GPUs of 12 GiB hold 9.4 GiB of parameters and gradients each; without sequence parallelism the rest is too little.
    world, work = cluster(node("a", "RTX3080Ti", 4)), Job(transformer("llama-2-7b"), 2304, 16, "bf16")
    result = partition.plan(world, work, budget_s=3.0)
    assert result.plan is not None and result.plan.offload_optimizer and result.plan.sequence_parallel
    plain = replace(result.plan, sequence_parallel=False)
    assert isinstance(simulation(world, work)(plain), Infeasible)


EQUAL = {
    "a node with NVLink": cluster(node("a", "A100-80GB-SXM", 8, "nvlink")),
    "two nodes without": cluster(node("a", "A100-80GB-PCIe", 4), node("b", "A100-80GB-PCIe", 4)),
}


@pytest.mark.parametrize("world", EQUAL.values(), ids=list(EQUAL))
def test_no_megatron_grid_is_faster_on_equal_gpus(world: Cluster) -> None:
    work = job(SMALL, sequence_length=2048, batch=32)
    judge = simulation(world, work)
    search = Search(world, work, judge)
    plans = [make_plan(world, work, *grid) for grid in grids(search, usable_nodes(search))]
    verdicts = [verdict for verdict in map(judge, plans) if isinstance(verdict, Cost)]
    assert len(verdicts) > 100
    result = partition.plan(world, work, budget_s=4.0)
    assert result.cost is not None
    assert result.cost.iteration_s <= min(verdict.iteration_s for verdict in verdicts) * (1 + 1e-9)


@pytest.mark.parametrize("batch", [128, 4 * 37])  # of which the next size after four is 37
def test_a_small_model_on_short_sequences_has_the_large_micro_batches_that_pay(batch: int) -> None:
    world, work = cluster(node("a", "A100-80GB-PCIe", 1)), job(sequence_length=256, batch=batch)
    judge = simulation(world, work)
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    drafts = {size: (Pipeline(size, batch // size, (stage(("a/0",), (0, 8), size, "none"),)),) for size in sizes}
    plans = {size: make_plan(world, work, draft, Settings()) for size, draft in drafts.items()}
    seconds = {size: getattr(judge(plan), "iteration_s", math.inf) for size, plan in plans.items()}
    result = partition.plan(world, work, budget_s=3.0)
    assert result.plan is not None and result.cost is not None
    assert result.plan.pipelines[0].micro_batch == min(seconds, key=lambda size: seconds[size]) > 16
    assert result.cost.iteration_s <= min(seconds.values()) * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["cost", pytest.param("energy", marks=pytest.mark.slow)])
def test_no_other_planner_finds_what_costs_less_where_gpus_cost(objective: str) -> None:
    world = cluster(priced("a", "RTX4090", 2, 0.5, 30.0, 450.0), priced("b", "RTX3090", 2, 0.3, 20.0, 350.0))
    work, ledger = job(SMALL, batch=32), Ledger(world)

    def took(planner: str) -> float:
        result = partition.plan(world, work, planner, budget_s=3.0, objective=objective)
        assert result.plan is not None and result.cost is not None
        outlay = ledger.outlay(result.plan, result.cost)
        return outlay.joules_per_token if objective == "energy" else outlay.dollars_per_billion_tokens or 0.0

    assert took("motley") <= min(map(took, ("megatron", "amp", "sailor", "flashflex"))) * (1 + 1e-9)


SCRIPT = """
import partition
from partition import parallel
from tests.partition.small_worlds import SMALL, cluster, job, node

parallel.cores = lambda: 2
told = []

def progress(search):
    told.append((search.judged, search.best[1].iteration_s))
    if len(told) == 4:
        print("judged", flush=True)

world = cluster(node("a", "A100-40GB-SXM", 4, "nvlink"), node("b", "RTX4090", 4), node("c", "RTX4090", 4))
result = partition.plan(world, job(SMALL), budget_s=600.0, progress=progress)
assert result.judged == told[-1][0], told
assert result.cost.iteration_s == min(seconds for _, seconds in told), told
print(result.stopped, result.judged >= 4, result.seconds < 600.0 * DEALT)
""".replace("DEALT", str(DEALT))


def test_ctrl_c_during_descents_returns_the_best_that_their_processes_have_judged() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which shells have ignored in the background
    )
    assert process.stdout is not None and process.stdout.readline() == "judged\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, errors = process.communicate(timeout=240)
    assert (process.returncode, errors, said) == (0, "", "interrupted True True\n")
    with pytest.raises(ProcessLookupError):  # none of its processes is left
        os.killpg(process.pid, 0)
