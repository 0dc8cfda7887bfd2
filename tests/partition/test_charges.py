"""What the seconds of a search count for where GPUs cost something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.charges import Charge, Charges
from partition.drafts import Settings, make_plan, stage
from partition.objective import Ledger, Objective
from partition.pricing import Pricing
from sim.simulation import simulation
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline
from tests.partition.small_worlds import TINY, cluster, job
from tests.partition.test_objective import priced

WORLD = cluster(priced("a", "RTX4090", 2, 3.0, 40.0, 440.0), priced("b", "RTX3090", 2, 1.0, 10.0, 310.0))
JOB = job(batch=32)


def charges(objective: Objective) -> Charges:
    return Charges(WORLD, JOB, objective, Pricing(WORLD, JOB))


def draft(*devices: str, recompute: str = "none", micro_batch: int = 1) -> tuple[Pipeline, ...]:
    """One pipeline of a stage on each device."""
    bounds = [TINY.layers * i // len(devices) for i in range(len(devices) + 1)]
    cuts = zip(devices, bounds, bounds[1:], strict=False)
    stages = tuple(stage((name,), (begin, end), micro_batch, recompute) for name, begin, end in cuts)
    return (Pipeline(micro_batch, JOB.global_batch // micro_batch, stages),)


DRAFTS = [
    draft("a/0"),
    draft("b/0"),
    draft("a/0", "a/1"),
    draft("a/0", "b/0"),
    draft("b/1", "b/0", "a/0", "a/1"),
    draft("a/0", "a/1", recompute="full"),
    draft("a/0", "a/1", micro_batch=8),
]


def test_nothing_is_charged_where_time_alone_counts() -> None:
    free = charges(Objective())
    assert not free.any
    assert free.of_draft(DRAFTS[0], Settings()) == Charge(0.0, 1.0)
    assert free.least_s(3.0, ["a/0"]) == 3.0


def test_under_cost_seconds_count_for_the_part_of_the_rent() -> None:
    dear = charges(Objective("cost"))
    assert dear.any
    assert dear.of_draft(draft("a/0", "b/0"), Settings()) == Charge(0.0, pytest.approx(0.5))  # $3 and $1 of $8
    assert dear.least_s(4.0, ["b/0", "b/1"]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["cost", "energy"])
def test_what_is_charged_less_is_the_better_answer(name: str) -> None:
    objective = Objective(name)
    charged, judge, ledger = charges(objective), simulation(WORLD, JOB), Ledger(WORLD)
    found = []
    for pipelines in DRAFTS:
        plan = make_plan(WORLD, JOB, pipelines, Settings())
        cost = judge(plan)
        assert isinstance(cost, Cost)
        outlay = ledger.outlay(plan, cost)
        measure = outlay.joules_per_token if name == "energy" else outlay.dollars_per_billion_tokens
        seconds = charged.judged_s(plan, cost)
        found.append((seconds, measure))
        assert charged.least_s(cost.iteration_s, plan.devices) <= seconds * (1 + 1e-9)
        # The price knows all that these GPUs do but the optimizer's step.
        guessed = charged.drafted_s(cost.iteration_s, charged.of_draft(pipelines, Settings()))
        assert guessed == pytest.approx(seconds, rel=0.03)
        assert guessed <= seconds * (1 + 1e-9)
    ratios = {round(measure / seconds, 9) for seconds, measure in found if measure}
    assert max(ratios) == pytest.approx(min(ratios))


def test_what_misses_a_constraint_counts_as_if_it_had_all_gpus() -> None:
    tokens = JOB.global_batch * JOB.sequence_length
    charged = charges(Objective("cost", min_tokens_per_s=tokens / 2.0))
    charge = charged.of_draft(draft("b/0"), Settings())
    assert charged.drafted_s(1.9, charge) == pytest.approx(1.9 / 8)
    assert charged.drafted_s(2.1, charge) == 2.1 == charged.least_s(2.1, ["b/0"])


@given(st.floats(0.0, 5.0), st.floats(0.01, 1.0), st.floats(0.0, 100.0))
def test_the_seconds_that_count_for_so_many_are_found_again(once_s: float, share: float, seconds: float) -> None:
    charge = Charge(once_s, share)
    assert charge.plain_s(charge.charged_s(seconds)) == pytest.approx(seconds, rel=1e-6, abs=1e-9 * once_s / share + 1e-12)
    assert charge.plain_s(once_s / 2) == 0.0
