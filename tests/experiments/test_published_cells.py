"""The planners on the clusters and models of FlashFlex's published runs: what the demo shows, held as a test."""

from __future__ import annotations

import pytest

from experiments.hexiscale import cells, cluster_folder
from partition import plan


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_flashflex_beats_random_and_is_no_slower_than_megatron(number: int) -> None:
    searches = {cell.planner: cell for cell in cells(cluster_folder(), budget_s=60.0)[number][1]}
    seconds = {}
    for name, cell in searches.items():
        result = plan(cell.cluster, cell.job, name, budget_s=cell.budget_s, seed=cell.seed)
        assert result.cost is not None
        assert name == "motley" or result.stopped == "finished"  # motley goes on for longer
        seconds[name] = result.cost.iteration_s
    assert seconds["motley"] <= seconds["flashflex"] * 1.005
    assert seconds["flashflex"] <= seconds["megatron"] * 1.005
    assert seconds["flashflex"] < seconds["random"] * 0.8
