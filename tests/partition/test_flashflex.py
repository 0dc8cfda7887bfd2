"""FlashFlex: what it makes of unequal GPUs, and that it pays."""

from __future__ import annotations

from pathlib import Path

import pytest

from partition import plan
from partition.assembly import Assembly
from partition.drafts import Settings, amount_of
from partition.pricing import Pricing
from sim.spec.cluster import read_cluster
from sim.spec.job import Job
from sim.spec.transformer import transformer
from tests.partition.small_worlds import SMALL, cluster, job, mixed, node

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def assembly(world: object, work: Job) -> Assembly:
    return Assembly(world, work, Pricing(world, work))  # type: ignore[arg-type]


def test_faster_stages_hold_more_layers() -> None:
    world = cluster(node("a", "RTX4090", 1), node("b", "RTX3090", 1))
    draft = assembly(world, job(SMALL)).draft([(("a/0",), ("b/0",))], 1, Settings())
    assert draft is not None
    fast, slow = (part.layer_count for part in draft[0].stages)
    assert fast > slow
    assert fast + slow == SMALL.layers


def test_faster_pipelines_take_more_of_the_batch() -> None:
    world = cluster(node("a", "RTX4090", 1), node("b", "RTX3090", 1))
    draft = assembly(world, job(SMALL, batch=24)).draft([(("a/0",),), (("b/0",),)], 1, Settings())
    assert draft is not None
    fast, slow = (pipeline.micro_batches for pipeline in draft)
    assert fast + slow == 24
    assert fast > slow


def test_earlier_stages_recompute_more_for_they_hold_more_micro_batches() -> None:
    world = cluster(node("a", "RTX3090", 4))
    draft = assembly(world, job(SMALL, 4096, 64)).draft([tuple((f"a/{i}",) for i in range(4))], 8, Settings())
    assert draft is not None
    assert [part.layer_count for part in draft[0].stages] == [3, 3, 3, 3]
    recomputed = [amount_of(part) for part in draft[0].stages]
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] > recomputed[-1] == 0


def test_nothing_is_recomputed_where_memory_does_not_demand_it() -> None:
    world = cluster(node("a", "A100-80GB-SXM", 4, "nvlink"))
    draft = assembly(world, job(SMALL)).draft([tuple((f"a/{i}",) for i in range(4))], 1, Settings())
    assert draft is not None
    assert all(part.recompute == "none" for part in draft[0].stages)


def test_twin_pipelines_have_the_same_cuts() -> None:
    world = mixed()
    twins = [((f"slow/{i}",), (f"fast/{i}",)) for i in range(4)]
    draft = assembly(world, job(SMALL)).draft(twins, 1, Settings())
    assert draft is not None
    assert len({tuple(part.layers for part in pipeline.stages) for pipeline in draft}) == 1


def test_layers_that_do_not_fit_make_no_draft() -> None:
    world = cluster(node("a", "RTX3080Ti", 1))
    assert assembly(world, job(SMALL)).draft([(("a/0",),)], 1, Settings()) is None


def test_more_stages_than_layers_make_no_draft() -> None:
    world = cluster(node("a", "RTX4090", 16))
    assert assembly(world, job(SMALL)).draft([tuple((f"a/{i}",) for i in range(16))], 1, Settings()) is None


@pytest.mark.parametrize(
    "cell", [pytest.param(("mixed-a", "llama-2-13b", 0.85), marks=pytest.mark.slow), ("mixed-b", "llama-2-7b", 0.85)]
)
def test_it_beats_symmetric_grids_on_the_clusters_of_its_paper(cell: tuple[str, str, float]) -> None:
    name, model, share = cell
    world = read_cluster(CLUSTERS / f"hexiscale-{name}.yaml")
    work = Job(transformer(model), 4096, 256)
    seconds = {}
    for planner in ("megatron", "flashflex"):
        result = plan(world, work, planner, budget_s=600)
        assert result.cost is not None
        seconds[planner] = result.cost.iteration_s
    assert seconds["flashflex"] < share * seconds["megatron"]
