"""Megatron's grid: the best of all, in Megatron's order."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from partition import plan
from partition.drafts import Settings, make_plan, stage
from partition.layers import even_split, ranges
from sim.simulation import simulation
from sim.spec.job import Job
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline, Plan
from sim.spec.transformer import Moe
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node


def grid(names: list[str], devices: int, depth: int, work: Job, micro_batch: int, mode: str) -> tuple[Pipeline, ...]:
    """Pipelines of so many stages of so many devices each, those of a stage's copies one after another."""
    data = len(names) // (devices * depth)
    cuts = ranges(even_split(work.model.layers, depth))
    return tuple(
        Pipeline(
            micro_batch,
            work.global_batch // (data * micro_batch),
            tuple(stage(names[(s * data + d) * devices :][:devices], cut, micro_batch, mode) for s, cut in enumerate(cuts)),
        )
        for d in range(data)
    )


def test_no_grid_on_a_homogeneous_cluster_is_faster() -> None:
    world, work = cluster(node("a", "RTX4090", 4), node("b", "RTX4090", 4)), job(SMALL, 2048, 16)
    judge, names = simulation(world, work), [device.name for device in world.devices]
    seconds = []
    for tensor, depth, size, mode, zero in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8), ("none", "selective", "full"), (0, 1)):
        data = 8 // (tensor * depth)
        if data * tensor * depth != 8 or 16 % (data * size):
            continue
        draft = grid(names, tensor, depth, work, size, mode)
        verdict = judge(make_plan(world, work, draft, Settings(zero_stage=zero, sequence_parallel=tensor > 1)))
        if isinstance(verdict, Cost):
            seconds.append(verdict.iteration_s)
    result = plan(world, work, "megatron", budget_s=600)
    assert result.cost is not None
    assert len(seconds) > 20
    assert result.cost.iteration_s <= min(seconds) * (1 + 1e-9)


def test_no_interleaved_grid_is_faster_where_that_is_faster_than_any_other() -> None:
    # Memory and slow tensor parallelism ask for stages, and few micro-batches make them fill and drain.
    model = replace(SMALL, name="deep", layers=24)
    world, work = cluster(node("a", "RTX3080Ti", 8)), job(model, 2048, 8)
    judge, names = simulation(world, work), [device.name for device in world.devices]
    seconds: dict[int, float] = {}
    for depth, mode, count in product((2, 4, 8), ("none", "selective", "full"), (1, 2, 3, 4, 6)):
        data, each = 8 // depth, 24 // depth
        if each % count or (8 // data) % depth:
            continue
        size = each // count
        pipelines = tuple(
            Pipeline(
                1,
                8 // data,
                tuple(
                    replace(
                        stage((names[s * data + d],), (s * each, (s + 1) * each), 1, mode),
                        layers=tuple((at * size, (at + 1) * size) for at in range(s, depth * count, depth)),
                    )
                    for s in range(depth)
                ),
            )
            for d in range(data)
        )
        schedule = "interleaved" if count > 1 else "1f1b"
        verdict = judge(make_plan(world, work, pipelines, Settings(schedule)))
        if isinstance(verdict, Cost):
            seconds[count] = min(seconds.get(count, math.inf), verdict.iteration_s)
    result = plan(world, work, "megatron", budget_s=600)
    assert result.plan is not None and result.cost is not None
    assert result.plan.schedule == "interleaved"
    assert result.cost.iteration_s <= min(seconds.values()) * (1 + 1e-9)
    assert min(seconds.values()) < 0.9 * seconds[1]


def test_no_grid_is_faster_that_divides_long_sequences() -> None:
    # Three heads, so that tensor parallelism divides nothing by 2, and fewer sequences than GPUs.
    model = replace(SMALL, name="long", layers=2, heads=3, kv_heads=3, hidden=1536, head_dim=512)
    world, work = cluster(node("a", "A100-40GB-SXM", 4, "nvlink")), job(model, 16384, 2)
    judge, names = simulation(world, work), [device.name for device in world.devices]
    seconds: dict[int, float] = {}
    for ranks, depth, size, mode, zero in product((1, 2, 4), (1, 2), (1, 2), ("none", "selective", "full"), (0, 1)):
        data = 4 // (ranks * depth)
        if data * ranks * depth != 4 or 2 % (data * size):
            continue
        draft = grid(names, ranks, depth, work, size, mode)
        verdict = judge(make_plan(world, work, draft, Settings(zero_stage=zero, context_parallel=ranks)))
        if isinstance(verdict, Cost):
            seconds[ranks] = min(seconds.get(ranks, math.inf), verdict.iteration_s)
    result = plan(world, work, "megatron", budget_s=600)
    assert result.plan is not None and result.cost is not None
    assert result.cost.iteration_s <= min(seconds.values()) * (1 + 1e-9)
    assert min(seconds[2], seconds[4]) < 0.8 * seconds[1] and result.plan.context_parallel > 1


def test_no_grid_is_faster_that_divides_experts() -> None:
    mixture = replace(SMALL, name="mixture", layers=2, experts=Moe(4, 2, SMALL.ffn))
    world, work = cluster(node("a", "A100-40GB-SXM", 4, "nvlink")), job(mixture, 2048, 8)
    judge, names = simulation(world, work), [device.name for device in world.devices]
    seconds: dict[tuple[int, int | None], float] = {}
    for tensor, depth, size, mode, zero in product((1, 2, 4), (1, 2), (1, 2, 4), ("none", "selective", "full"), (0, 1)):
        data, rest = divmod(4, tensor * depth)
        if rest or 8 % (data * size):
            continue
        cuts = ranges(even_split(2, depth))
        groups = [tuple(names[at : at + tensor]) for at in range(0, 4, tensor)]
        draft = tuple(
            Pipeline(size, 8 // (data * size), tuple(stage(groups[s * data + d], cut, size, mode) for s, cut in enumerate(cuts)))
            for d in range(data)
        )
        for degree, whole in product((1, 2, 4), (None, 1)):
            if data % degree if whole is None else (tensor == 1 or degree % tensor or data % (degree // tensor)):
                continue
            settings = Settings(
                zero_stage=zero, sequence_parallel=tensor > 1, expert_parallel=degree, expert_tensor_parallel=whole
            )
            verdict = judge(make_plan(world, work, draft, settings))
            if isinstance(verdict, Cost):
                seconds[degree, whole] = min(seconds.get((degree, whole), math.inf), verdict.iteration_s)
    assert len(seconds) == 5  # experts undivided, columns over two and four, whole ones over two and four
    result = plan(world, work, "megatron", budget_s=600)
    assert result.plan is not None and result.cost is not None
    assert result.cost.iteration_s <= min(seconds.values()) * (1 + 1e-9)
    assert min(seconds.values()) < 0.95 * seconds[1, None] and result.plan.expert_parallel > 1


def found(planner_world: str = "homogeneous") -> Plan:
    world = cluster(node("a", "RTX4090", 4), node("b", "RTX4090", 4)) if planner_world == "homogeneous" else mixed()
    result = plan(world, job(SMALL, 2048, 16), "megatron", budget_s=600)
    assert result.plan is not None
    return result.plan


@pytest.mark.parametrize("world", ["homogeneous", "mixed"])
def test_a_grid_is_symmetric(world: str) -> None:
    best = found(world)
    assert len({(p.micro_batch, p.micro_batches, len(p.stages)) for p in best.pipelines}) == 1
    assert len({len(stage.devices) for p in best.pipelines for stage in p.stages}) == 1
    assert len({tuple(stage.layers for stage in p.stages) for p in best.pipelines}) == 1


def test_ranks_go_tensor_first_then_data_then_pipeline() -> None:
    best = found()
    order = [name for s in range(len(best.pipelines[0].stages)) for p in best.pipelines for name in p.stages[s].devices]
    assert order == ["a/0", "a/1", "a/2", "a/3", "b/0", "b/1", "b/2", "b/3"][: len(order)]


def test_a_slow_kind_is_left_out_where_it_holds_the_others_up() -> None:
    # Four RTX 4090 of 165 TFLOP/s beside one T4 of 65, over 10 Gbit/s: a symmetric grid of five is no faster than one of four.
    world = cluster(node("slow", "T4", 1), node("fast", "RTX4090", 4))
    result = plan(world, job(TINY, precision="fp16"), "megatron", budget_s=600)
    assert result.plan is not None
    assert all(name.startswith("fast/") for name in result.plan.devices)
