"""The planners on the clusters and models of FlashFlex's published runs: what the demo shows, held as a test."""

from __future__ import annotations

import pytest

from experiments.hexiscale import cells, cluster_folder
from partition import plan
from sim.simulation import simulation
from sim.spec.judge import Cost, Judge, Verdict
from sim.spec.plan import Plan


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_flashflex_beats_random_and_is_no_slower_than_grids(number: int) -> None:
    """Than grids without interleaving, which its paper does not have; motley is no slower than those with it, either."""
    searches = {cell.planner: cell for cell in cells(cluster_folder(), budget_s=60.0)[number][1]}
    seconds, plain = {}, []
    for name, cell in searches.items():
        judge = simulation(cell.cluster, cell.job)

        def recording(asked: Plan, judge: Judge = judge) -> Verdict:
            verdict = judge(asked)
            if isinstance(verdict, Cost) and asked.schedule == "1f1b":
                plain.append(verdict.iteration_s)
            return verdict

        told = recording if name == "megatron" else judge
        result = plan(cell.cluster, cell.job, name, judge=told, budget_s=cell.budget_s, seed=cell.seed)
        assert result.cost is not None
        assert name == "motley" or result.stopped == "finished"  # motley goes on for longer
        seconds[name] = result.cost.iteration_s
    assert seconds["motley"] <= seconds["flashflex"] * 1.005
    assert seconds["motley"] <= seconds["megatron"]
    assert seconds["flashflex"] <= min(plain) * 1.005
    assert seconds["flashflex"] < seconds["random"] * 0.8
