"""AMP's grids, its cuts of the layers, and its cost of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

import partition
from partition.drafts import make_plan
from partition.layers import even_split
from partition.planners.amp import SETTINGS, CostModel, Grid, Strategy, best_cut, drafted, grids
from partition.pricing import Pricing
from sim.cost.feasibility import infeasible
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.counts import layer_parameters, total_parameters
from sim.spec.job import Job
from sim.spec.judge import Verdict
from sim.spec.plan import Plan
from tests.partition.small_worlds import SMALL, TINY, cluster, job, mixed, node

ETHERNET_BYTES_PER_S = 1.25e9 * 0.92
"""What the small worlds' cards carry."""


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each stage some layers."""
    for bounds in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *bounds, layers)))


def cost_s(seconds: NDArray[np.float64], counts: tuple[int, ...] | list[int], micro_batches: int) -> float:
    held = [seconds[s, n] for s, n in enumerate(counts)]
    return float((micro_batches - 1) * max(held) + sum(held)) if np.isfinite(held).all() else np.inf


def judged(world: Cluster, work: Job) -> list[Plan]:
    """Every plan that the planner has judged."""
    judge, seen = simulation(world, work), []

    def recording(plan: Plan) -> Verdict:
        seen.append(plan)
        return judge(plan)

    partition.plan(world, work, "amp", judge=recording, budget_s=600)
    return seen


# --- The cut -----------------------------------------------------------------------------------------------------------


def test_a_stage_half_as_fast_holds_half_as_many_layers() -> None:
    #   1 s a layer:  2 layers, 2 s     ten micro-batches: 9 x 2 + 2 + 2
    #   2 s a layer:  1 layer,  2 s
    seconds = np.array([[np.inf, 1.0, 2.0, 3.0], [np.inf, 2.0, 4.0, 6.0]])
    assert best_cut(seconds, 10) == [2, 1]


def test_a_single_micro_batch_takes_the_smallest_sum() -> None:
    # No stage waits for another one, so that all but one layer go where they are cheapest.
    seconds = np.array([[np.inf, 1.0, 2.0, 3.0], [np.inf, 2.0, 4.0, 6.0]])
    assert best_cut(seconds[::-1], 1) == [1, 2]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_the_cut_is_the_best_of_all(stages: int, micro_batches: int, seed: int) -> None:
    rng, layers = np.random.default_rng(seed), 9
    # Seconds that grow by what they like; half of the time, some stages cannot hold many layers.
    seconds = np.cumsum(rng.uniform(0.2, 3.0, (stages, layers + 1)), axis=1)
    seconds[:, 0] = np.inf
    if seed % 2:
        for s in range(stages):
            seconds[s, int(rng.integers(1, layers + 2)) :] = np.inf
    best_s = min(cost_s(seconds, counts, micro_batches) for counts in cuts(layers, stages))
    found = best_cut(seconds, micro_batches)
    if np.isinf(best_s):
        assert found is None
    else:
        assert found is not None
        assert sum(found) == layers
        assert cost_s(seconds, found, micro_batches) == pytest.approx(best_s, rel=1e-9)


def test_no_even_cut_costs_less_on_equal_gpus() -> None:
    world, work = cluster(node("a", "RTX4090", 4), node("b", "RTX4090", 4)), job(SMALL, 2048, 16)
    model = CostModel(world, work, world.nodes)
    compared = 0
    for grid in grids(work, world.nodes, 8):
        for recompute in ("none", "full"):
            counts = model.cut(grid, 1, recompute)
            even = tuple(even_split(SMALL.layers, len(grid[0])))
            if counts is not None:
                cost = model.seconds(Strategy(grid, 1, recompute, tuple(counts)))
                assert cost <= model.seconds(Strategy(grid, 1, recompute, even)) * (1 + 1e-9)
                compared += 1
    assert compared > 8


# --- Strategies --------------------------------------------------------------------------------------------------------


def test_the_grids_are_all_products_of_degrees() -> None:
    world, work = cluster(node("a", "RTX4090", 4), node("b", "RTX3090", 4)), job(batch=12)
    found = {(len(g), len(g[0][0]), len(g[0])) for g in grids(work, world.nodes, 8)}
    allowed = product((1, 2, 4), (1, 2, 4), range(1, 9))  # data parallelism divides 12; groups stay in their node of 4
    assert found == {(data, tensor, depth) for data, tensor, depth in allowed if data * tensor * depth == 8}


def test_ranks_go_tensor_first_then_data_then_pipeline() -> None:
    world = cluster(node("a", "RTX4090", 4), node("b", "RTX3090", 4))
    grid = next(g for g in grids(job(), world.nodes, 8) if (len(g), len(g[0])) == (2, 2))
    assert grid == ((("a/0", "a/1"), ("b/0", "b/1")), (("a/2", "a/3"), ("b/2", "b/3")))


def test_every_plan_is_one_grid_over_all_gpus() -> None:
    seen = judged(mixed(), job(SMALL))
    assert len(seen) > 3
    for found in seen:
        assert len(found.devices) == 8
        assert len({(p.micro_batch, p.micro_batches) for p in found.pipelines}) == 1
        assert len({tuple((s.layers, s.recompute) for s in p.stages) for p in found.pipelines}) == 1
        assert len({len(stage.devices) for p in found.pipelines for stage in p.stages}) == 1


def test_slow_gpus_hold_fewer_layers() -> None:
    # The stages of the four RTX 3080 Ti come first in the ranks, those of the four RTX 4090 after them.
    for found in judged(mixed(), job(SMALL)):
        counts = [stage.layer_count for stage in found.pipelines[0].stages]
        if len(counts) % 2 == 0:
            half = len(counts) // 2
            assert sum(counts[:half]) < sum(counts[half:])


def test_as_few_gpus_as_possible_are_left_out() -> None:
    # 11 pipelines do not divide a batch of 13, and there are no 11 layers for as many stages: ten GPUs in five pairs.
    world = cluster(node("a", "A100-40GB-SXM", 3, "nvlink"), node("b", "A100-40GB-SXM", 6, "nvlink"), node("c", "RTX4090", 2))
    for found in judged(world, job(batch=13)):
        assert len(found.devices) == 10
        assert "a/2" not in found.devices


# --- The cost ----------------------------------------------------------------------------------------------------------


def layer_s(world: Cluster, work: Job, device: str) -> tuple[float, float, float]:
    """Seconds of a layer, of the embedding and of the head, forward and backward, and of nothing else."""
    part = Pricing(world, work).stage((device,), 1, SETTINGS)
    assert part.micro_batch_s == 0.0
    return (
        part.layer_forward_s + part.layer_backward_s,
        part.embedding_forward_s + part.embedding_backward_s,
        part.head_forward_s + part.head_backward_s,
    )


def test_a_pipeline_costs_its_longest_stage_for_each_micro_batch_and_all_stages_once() -> None:
    world, work = cluster(node("a", "RTX4090", 1), node("b", "RTX3090", 1)), job(batch=10)
    fast, slow = layer_s(world, work, "a/0"), layer_s(world, work, "b/0")
    first, last = 5 * fast[0] + fast[1], 3 * slow[0] + slow[2]
    activation_bytes = 1024 * TINY.hidden * 2
    expected = 9 * max(first, last) + first + last + 2 * activation_bytes / ETHERNET_BYTES_PER_S
    grid: Grid = ((("a/0",), ("b/0",)),)
    cost = CostModel(world, work, world.nodes).seconds(Strategy(grid, 1, "none", (5, 3)))
    assert cost == pytest.approx(expected, rel=1e-6)


def test_pipelines_cost_what_the_slowest_does_and_the_ring_of_their_gradients() -> None:
    world, work = cluster(node("a", "RTX4090", 1), node("b", "RTX3090", 1)), job(batch=10)
    grid: Grid = ((("a/0",),), (("b/0",),))
    model = CostModel(world, work, world.nodes)
    slow = layer_s(world, work, "b/0")
    # Five micro-batches each; two GPUs exchange all gradients of 4 bytes once: 2 (n - 1) / n = 1.
    expected = 5 * (8 * slow[0] + slow[1] + slow[2]) + 4 * total_parameters(TINY) / ETHERNET_BYTES_PER_S
    assert model.seconds(Strategy(grid, 1, "none", (8,))) == pytest.approx(expected, rel=1e-6)


def test_the_ring_of_a_stage_in_the_middle_goes_over_its_slowest_link() -> None:
    world, work = cluster(node("a", "A100-40GB-SXM", 8, "nvlink"), node("b", "A100-40GB-SXM", 1, "nvlink")), job(batch=9)
    names = [device.name for device in world.devices]
    grid: Grid = tuple(tuple((name,) for name in names[d::3]) for d in range(3))  # three pipelines of three stages
    model = CostModel(world, work, world.nodes)
    inside = model.gradients_s(grid, 1, 4)
    across = model.gradients_s((*grid[:2], (*grid[2][:1], ("b/0",), *grid[2][2:])), 1, 4)
    num_bytes = 2 * 2 / 3 * 4 * layer_parameters(TINY) * 4
    assert across == pytest.approx(num_bytes / ETHERNET_BYTES_PER_S, rel=1e-6)
    assert inside < across / 100


def test_tensor_parallel_ranks_exchange_only_their_own_gradients() -> None:
    world, work = cluster(node("a", "RTX4090", 2), node("b", "RTX4090", 2)), job()
    grid: Grid = ((("a/0", "a/1"),), (("b/0", "b/1"),))
    found = CostModel(world, work, world.nodes).gradients_s(grid, 0, 8)
    assert found == pytest.approx(4 * total_parameters(TINY) / 2 / ETHERNET_BYTES_PER_S, rel=1e-6)


def test_a_fast_gpu_holds_no_more_layers_than_fit() -> None:
    # The RTX 3080 Ti is the faster one, but has 12 GB, and the T4 16.
    world = cluster(node("fast", "RTX3080Ti", 1), node("slow", "T4", 1))
    work = job(replace(SMALL, layers=18), precision="fp16")
    model = CostModel(world, work, world.nodes)
    grid: Grid = ((("fast/0",), ("slow/0",)),)
    most = model.most_layers(grid, 0, 1, "full")
    anything_goes = best_cut(model.stage_seconds(grid, 1, "full")[0], 16)
    assert anything_goes is not None
    assert anything_goes[0] > most
    assert model.cut(grid, 1, "full") == [most, 18 - most]
    # It is indeed full: one layer more, and the plan cannot run.
    for counts, fits in (((most, 18 - most), True), ((most + 1, 17 - most), False)):
        draft = drafted(work, Strategy(grid, 1, "full", counts))
        assert (infeasible(make_plan(world, work, draft, SETTINGS), world) is None) == fits
