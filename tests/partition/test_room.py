"""The room for layers is what the memory model says of whole plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.drafts import Settings, amount_of, make_plan, most_recomputation, recomputed, recomputing, stage
from partition.layers import ranges
from partition.room import Room
from sim.cost.feasibility import infeasible
from sim.cost.memory import lane_parts
from sim.spec.counts import RECOMPUTE
from sim.spec.gpu import gpu_kind
from sim.spec.plan import Pipeline
from sim.spec.schedules import held_by
from sim.spec.transformer import Transformer, presets
from tests.partition.small_worlds import TINY, cluster, job, node

WORLD = cluster(node("a", "A100-80GB-SXM", 128, "nvlink"))
NAMES = [f"a/{i}" for i in range(128)]


@given(
    model=st.sampled_from(
        [
            TINY,
            replace(TINY, name="tied", tied_embeddings=True),
            replace(TINY, name="wide head", vocab=50_000, padded_vocab=50_000),
            presets()["gpt3-125m"],
        ]
    ),
    depth=st.integers(1, 4),
    pipelines=st.integers(1, 7),
    degree=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1, 2]),
    micro_batches=st.integers(1, 6),
    settings=st.builds(
        Settings,
        schedule=st.sampled_from(["1f1b", "gpipe", "split-1f1b"]),
        zero_stage=st.sampled_from([0, 1]),
        sequence_parallel=st.booleans(),
        offload_optimizer=st.booleans(),
        sequence_slices=st.sampled_from([1, 2, 4]),
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
    amounts = [data.draw(st.integers(0, most_recomputation(count))) for count in counts]
    names = iter(NAMES)
    draft = tuple(
        Pipeline(
            size,
            micro_batches,
            tuple(
                stage([next(names) for _ in range(degree)], cut, size, amount=n)
                for cut, n in zip(ranges(counts), amounts, strict=True)
            ),
        )
        for _ in range(pipelines)
    )
    work = job(model, 512, pipelines * size * micro_batches)
    room = Room(WORLD, work)
    for p, s, _, parts in lane_parts(make_plan(WORLD, work, draft, settings)):
        held = room.stage(pipelines, degree, size, settings, s == 0, s == depth - 1)
        flying = held_by(settings.schedule, draft[0], s, slices=settings.sequence_slices)
        assert held.total(flying, recomputed(counts[s], amounts[s])) == pytest.approx(parts.total, rel=1e-6), (p, s)


@pytest.mark.parametrize(("amount", "counts"), [(2, (4, 2, 0, 0)), (6, (0, 6, 0, 0)), (8, (0, 4, 0, 2)), (12, (0, 0, 0, 6))])
def test_as_little_is_recomputed_as_makes_room(amount: int, counts: tuple[int, ...]) -> None:
    """Of six layers: first pointwise, which costs least, then in full, with the others pointwise."""
    assert recomputed(6, amount) == counts
    held = Room(WORLD, job()).stage(1, 1, 1, Settings(), first=False, last=False)
    exact = held.total(8, counts)
    assert held.least_recomputation(exact, layers=6, in_flight=8) == amount
    assert held.least_recomputation(exact - 1, layers=6, in_flight=8) == (amount + 1 if amount < 12 else None)
    assert held.least_recomputation(held.total(8, (6, 0, 0, 0)), layers=6, in_flight=8) == 0


@pytest.mark.parametrize("amount", range(13))
def test_a_stage_says_how_much_it_recomputes(amount: int) -> None:
    made = stage(["a/0"], (3, 9), 1, amount=amount)
    assert tuple(made.recomputed().values()) == recomputed(6, amount)
    assert amount_of(made) == amount
    assert recomputing(stage(["a/0"], (3, 9), 1, "full"), amount) == made


def test_the_amount_of_a_stage_saves_what_the_stage_does() -> None:
    """With some layers in full, and the others not recomputed, as other planners lay it."""
    held = Room(WORLD, job()).stage(1, 1, 1, Settings(), first=False, last=False)
    for full in range(7):
        made = stage(["a/0"], (0, 6), 1).recomputing("full", full)
        assert held.total(3, recomputed(6, amount_of(made))) <= held.total(3, made.recomputed().values())


def test_a_draft_fits_where_its_plan_is_feasible() -> None:
    world = cluster(node("a", "RTX3080Ti", 8))
    for layers in (8, 40, 60, 80, 120):
        work = job(replace(TINY, layers=layers))
        for mode in RECOMPUTE:
            parts = tuple(
                stage([name], cut, 1, mode) for name, cut in zip(["a/0", "a/1"], ranges([layers // 2] * 2), strict=True)
            )
            draft = (Pipeline(1, work.global_batch, parts),)
            feasible = infeasible(make_plan(world, work, draft, Settings()), world) is None
            assert Room(world, work).fits(draft, Settings()) == feasible


def test_what_cpus_offload_fits_where_the_plan_is_feasible() -> None:
    """It stands in the same memory as all else: a CPU is its own host."""
    work = job(TINY, batch=4, precision="fp32")
    draft = tuple(Pipeline(1, 2, (stage((f"c/{p}",), (0, TINY.layers), 1),)) for p in range(2))
    settings = Settings(offload_optimizer=True)
    told = set()
    for gib in (x / 16 for x in range(48, 160)):
        kind = replace(gpu_kind("CPU"), memory_bytes=int(gib * 2**30))
        world = cluster(replace(node("c", "RTX4090", 2), gpu=kind))
        fits = Room(world, work).fits(draft, settings)
        assert fits == (infeasible(make_plan(world, work, draft, settings), world) is None)
        told.add(fits)
    assert told == {False, True}
