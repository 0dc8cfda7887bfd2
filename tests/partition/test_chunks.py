"""Several ranges of layers a stage: drafts that are made of others keep what these have, and win where filling takes long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.chunks import CHUNKS, chunked
from partition.drafts import Draft, Settings, make_plan, stage, usable_nodes
from partition.planners.motley import Layout, _Hunt
from partition.search import Search
from sim.cost.estimate import Estimate
from sim.simulation import simulation
from sim.spec.cluster import Cluster, Fabric, Nic
from sim.spec.job import Job
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline
from sim.spec.transformer import Transformer
from tests.partition.small_worlds import cluster, node


def world(bytes_per_s: float) -> Cluster:
    """Eight A100, each on a node of its own."""
    nodes = [replace(node(f"n{i}", "A100-80GB-SXM", 1), nic=Nic("infiniband", bytes_per_s)) for i in range(8)]
    return replace(cluster(*nodes), fabric=Fabric(5e-6))


def job_of(layers: int, batch: int) -> Job:
    return Job(Transformer("own", layers, 2048, 5504, 16, 32000), 2048, batch, "bf16")


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=2).filter(
        lambda cuts: len({sum(cut) for cut in cuts}) == 1 and sum(map(len, cuts)) <= 8
    )
)
def test_stages_keep_their_layers_and_visits_are_those_of_the_schedule(cuts: list[list[int]]) -> None:
    where, at = world(12.5e9), 0
    pipelines = []
    for cut in cuts:
        stages, first = [], 0
        for count in cut:
            stages.append(stage([f"n{at}/0"], (first, first + count), 1, amount=3 * count // 2))
            first, at = first + count, at + 1
        pipelines.append(Pipeline(1, 4, tuple(stages)))
    draft: Draft = tuple(pipelines)
    made = list(chunked(draft, Settings()))
    fewest, depth = min(map(min, cuts)), max(map(len, cuts))
    moved = [max(1, cut[0] - cut[-1]) if len(cut) > 1 else 0 for cut in cuts]
    for_head = fewest >= 2 and all(cut[0] - count >= 2 for cut, count in zip(cuts, moved, strict=True))
    ranges = [] if depth == 1 else [2] * (fewest >= 2) + [2] * for_head + [count for count in CHUNKS if count <= fewest]
    assert [len(found[0].stages[0].layers) for found, _ in made] == ranges
    for number, (found, settings) in enumerate(made):
        plan = make_plan(where, job_of(sum(cuts[0]), 4 * len(cuts)), found, settings)  # which checks the order of visits
        Estimate(plan, where)
        for cut, count, ours, theirs in zip(cuts, moved, found, draft, strict=True):
            assert [one.layer_count for one in ours.stages] == (
                [cut[0] - count, *cut[1:-1], cut[-1] + count] if for_head and number == 1 and len(cut) > 1 else cut
            )
            for one, other in zip(ours.stages, theirs.stages, strict=True):
                assert (one.replicas, one.recompute) == (other.replicas, other.recompute)
    assert not list(chunked(draft, Settings(zero_stage=2)))


def chunked_best(bytes_per_s: float) -> tuple[bool, Search, float]:
    """Whether several ranges were better than one, in eight stages with few micro-batches; the search; the seconds of one."""
    where, job = world(bytes_per_s), job_of(32, 8)
    search = Search(where, job, simulation(where, job), 0, 1e9)
    hunt = _Hunt(search, usable_nodes(search))
    layout = Layout((tuple((device.name,) for device in where.devices),), 1, Settings())
    draft = hunt.assembly.draft(layout.pipelines, 1, layout.settings)
    assert draft is not None
    (seconds,) = hunt.judged([(draft, layout.settings)])
    return hunt.chunk([(seconds, draft, layout.settings)], seconds), search, seconds


def test_where_filling_takes_long_and_links_are_fast_several_ranges_win() -> None:
    won, search, seconds = chunked_best(50e9)
    assert won and search.best is not None
    plan, cost = search.best
    assert plan.schedule in ("interleaved", "zb-v") and len(plan.pipelines[0].stages[0].layers) > 1
    assert cost.iteration_s < 0.95 * seconds
    verdict = simulation(search.cluster, search.job)(plan)
    assert isinstance(verdict, Cost) and verdict.iteration_s == pytest.approx(cost.iteration_s)


def test_grids_are_tried_with_several_ranges_too() -> None:
    where, job = world(50e9), job_of(32, 8)
    search = Search(where, job, simulation(where, job), 0, 1e9)
    hunt = _Hunt(search, usable_nodes(search))
    drafts = hunt._chunked_grids(1e9, 1e9, 1e9)
    assert drafts and all(len(draft[0].stages) > 1 and settings.zero_stage == 1 for draft, settings in drafts)
    (seconds,) = hunt.judged(drafts[:1])
    assert hunt._try_chunked(drafts, seconds, 1e9) and search.best is not None
    assert search.best[0].schedule in ("interleaved", "zb-v") and search.best[1].iteration_s < seconds
    assert not hunt._try_chunked(drafts, seconds, 0.0) and search.cut  # the time for it is over


def test_a_heavy_head_makes_the_first_stage_of_a_v_shorter() -> None:
    """Four stages, and a head about as heavy as five layers: cut for one range, the last stage has fewer layers."""
    where = replace(world(50e9), nodes=world(50e9).nodes[:4])
    job = replace(job_of(28, 16), model=replace(job_of(28, 16).model, vocab=120_000, padded_vocab=120_000))
    stages = [stage([f"n{i}/0"], held, 1, "none") for i, held in enumerate(((0, 8), (8, 16), (16, 23), (23, 28)))]
    made = list(chunked((Pipeline(1, 16, tuple(stages)),), Settings()))
    same, moved = (Estimate(make_plan(where, job, *made[i]), where).iteration_s() for i in range(2))
    assert [part.layer_count for part in made[1][0][0].stages] == [5, 8, 7, 8]
    assert moved < 0.95 * same


def test_where_links_are_slow_one_range_stays() -> None:
    won, search, seconds = chunked_best(0.125e9)
    assert not won and search.best is not None and search.best[1].iteration_s == seconds
