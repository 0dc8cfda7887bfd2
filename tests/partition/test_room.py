"""The room for layers is what the memory model says of whole plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.drafts import Settings, make_plan, stage
from partition.layers import ranges
from partition.room import Room
from sim.cost.feasibility import infeasible
from sim.cost.memory import lane_parts
from sim.spec.plan import Pipeline
from sim.spec.schedules import in_flight
from sim.spec.transformer import Transformer, presets
from tests.partition.small_worlds import TINY, cluster, job, node

WORLD = cluster(node("a", "A100-80GB-SXM", 128, "nvlink"))
NAMES = [f"a/{i}" for i in range(128)]


@given(
    model=st.sampled_from([TINY, replace(TINY, name="tied", tied_embeddings=True), presets()["gpt3-125m"]]),
    depth=st.integers(1, 4),
    pipelines=st.integers(1, 7),
    degree=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1, 2]),
    micro_batches=st.integers(1, 6),
    settings=st.builds(
        Settings,
        schedule=st.sampled_from(["1f1b", "gpipe"]),
        zero_stage=st.sampled_from([0, 1]),
        sequence_parallel=st.booleans(),
        offload_optimizer=st.booleans(),
    ),
    data=st.data(),
)
def test_bytes_agree_with_the_memory_model(
    model: Transformer,
    depth: int,
    pipelines: int,
    degree: int,
    size: int,
    micro_batches: int,
    settings: Settings,
    data: st.DataObject,
) -> None:
    counts = [1] * depth
    for _ in range(model.layers - depth):
        counts[data.draw(st.integers(0, depth - 1))] += 1
    full = [data.draw(st.integers(0, count)) for count in counts]
    names = iter(NAMES)
    draft = tuple(
        Pipeline(
            size,
            micro_batches,
            tuple(
                stage([next(names) for _ in range(degree)], cut, size, full=n)
                for cut, n in zip(ranges(counts), full, strict=True)
            ),
        )
        for _ in range(pipelines)
    )
    work = job(model, 512, pipelines * size * micro_batches)
    room = Room(WORLD, work)
    for p, s, _, parts in lane_parts(make_plan(WORLD, work, draft, settings)):
        held = room.stage(pipelines, degree, size, settings, s == 0, s == depth - 1)
        flying = in_flight(settings.schedule, depth, s, micro_batches)
        assert held.total(flying, counts[s], full[s]) == pytest.approx(parts.total, rel=1e-6), (p, s)


def test_the_fewest_layers_that_make_room_are_recomputed() -> None:
    held = Room(WORLD, job()).stage(1, 1, 1, Settings(), first=False, last=False)
    exact = held.total(in_flight=8, layers=6, recomputed=2)
    assert held.fewest_recomputed(exact, layers=6, in_flight=8) == 2
    assert held.fewest_recomputed(exact - 1, layers=6, in_flight=8) == 3
    assert held.fewest_recomputed(held.total(8, 6, 0), layers=6, in_flight=8) == 0
    assert held.fewest_recomputed(held.total(8, 6, 6) - 1, layers=6, in_flight=8) is None


def test_a_draft_fits_where_its_plan_is_feasible() -> None:
    world = cluster(node("a", "RTX3080Ti", 8))
    for layers in (8, 40, 60, 80, 120):
        work = job(replace(TINY, layers=layers))
        for mode in ("none", "selective", "full"):
            parts = tuple(
                stage([name], cut, 1, mode) for name, cut in zip(["a/0", "a/1"], ranges([layers // 2] * 2), strict=True)
            )
            draft = (Pipeline(1, work.global_batch, parts),)
            feasible = infeasible(make_plan(world, work, draft, Settings()), world) is None
            assert Room(world, work).fits(draft, Settings()) == feasible
