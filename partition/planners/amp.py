"""The planner of AMP: one grid over all GPUs, its layers cut by dynamic programming, all grids ranked by a closed-form cost.

A strategy is the degrees of tensor, pipeline and data parallelism, whose product is the number of GPUs; the micro-batch, any
divisor of a pipeline's part of the batch; the cut of the layers, uneven if need be and the same in all pipelines; and which
GPU has which rank. The ranks follow the cluster file with tensor parallelism fastest, which stays inside nodes, then data,
then pipeline. With t_s the seconds of stage s for one micro-batch, forward and backward, a pipeline of m micro-batches costs

    (m - 1) max_s t_s + sum_s t_s + the sum of its messages' seconds,

and a strategy what its slowest pipeline does, and then the longest all-reduce of a stage's gradients: 2 (n - 1) / n of their
bytes over the slowest link of the ring. The dynamic program finds the cut that makes the first cost the smallest.

Source: Li et al. (2022), "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity Awareness", NeurIPS 2022,
arXiv:2210.07297.

Done otherwise: seconds of stages are those of our cost model, where AMP profiles layers. For the cut, a stage takes the mean
of its replicas, as in the published program, but every stage by its own GPUs, where that program has one mean for all stages.
AMP learns what does not fit in memory when it tries it; here no stage is given more layers than it holds. Recomputation, of
all layers or of none, is tried like a degree, and the optimizer's state is always divided (ZeRO 1): AMP is told both. A
message is counted there and back. The best strategies, which AMP runs, are judged instead. Where no grid of all GPUs can run
(11 GPUs and a batch of 13), as few as possible are left out, the last ones of a node or of the file.

Left out: the search over placements other than that of the ranks above, which the published program holds but does not use;
layers of unequal kinds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from partition.drafts import Draft, Settings, all_under, fits_heads, judge_in_order, reject, stage, usable_nodes
from partition.graph import DeviceGraph
from partition.layers import ranges
from partition.pricing import Devices, Pricing
from partition.room import Room
from partition.search import Search, register
from sim.spec.cluster import Cluster, Node
from sim.spec.counts import PRECISION_BYTES, embedding_parameters, head_parameters, layer_parameters
from sim.spec.job import Job
from sim.spec.plan import Pipeline
from sim.spec.schedules import in_flight

Grid: TypeAlias = tuple[tuple[Devices, ...], ...]
"""The tensor-parallel groups by pipeline, then by stage."""

SETTINGS = Settings(schedule="1f1b", zero_stage=1)
RECOMPUTE = ("none", "full")


@register("amp")
def amp(search: Search) -> None:
    """Ranks all strategies on all GPUs by AMP's cost and has the best of them judged."""
    nodes = usable_nodes(search)
    if not nodes:
        return
    best_first = ranked(search, nodes)
    if not best_first:
        reject(search, [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)])
    judge_in_order(search, ((drafted(search.job, strategy), SETTINGS) for strategy in best_first))


def ranked(search: Search, nodes: Sequence[Node]) -> list[Strategy]:
    """All strategies on all GPUs, or on as many as any fits on, the one of the lowest cost by AMP's model first."""
    model = CostModel(search.cluster, search.job, nodes)
    for count in range(sum(node.gpus for node in nodes), 0, -1):
        found: list[tuple[float, int, Strategy]] = []
        for grid in grids(search.job, nodes, count):
            for strategy in strategies(search, model, grid):
                found.append((model.seconds(strategy), len(found), strategy))
        if found:
            return [strategy for _, _, strategy in sorted(found, key=lambda entry: entry[:2])]
    return []


# --- Strategies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strategy:
    """A point of AMP's search space: who works with whom, the micro-batch, and the layers of each stage."""

    grid: Grid
    micro_batch: int
    recompute: str
    layers: tuple[int, ...]


def grids(job: Job, nodes: Sequence[Node], count: int) -> Iterator[Grid]:
    """All grids of exactly so many GPUs, the first of the file, whose data-parallel degree divides the batch."""
    for tensor in range(1, max(node.gpus for node in nodes) + 1):
        if count % tensor or not fits_heads(job, tensor):
            continue
        groups = [
            tuple(f"{node.name}/{index}" for index in range(at, at + tensor))
            for node in nodes
            for at in range(0, node.gpus - tensor + 1, tensor)
        ][: count // tensor]
        for depth in range(1, min(job.model.layers, len(groups)) + 1):
            data = len(groups) // depth
            if data * depth * tensor == count and job.global_batch % data == 0:
                yield tuple(tuple(groups[s * data + d] for s in range(depth)) for d in range(data))


def strategies(search: Search, model: CostModel, grid: Grid) -> Iterator[Strategy]:
    """The strategies of a grid that fit in memory: every micro-batch and both recompute modes, with the best cut of each."""
    share = search.job.global_batch // len(grid)
    for micro_batch in (size for size in range(1, share + 1) if share % size == 0):
        search.check_budget()
        fitting = False
        for recompute in RECOMPUTE:
            counts = model.cut(grid, micro_batch, recompute)
            if counts is not None:
                fitting = True
                yield Strategy(grid, micro_batch, recompute, tuple(counts))
        if not fitting:
            return  # larger ones need as much memory or more


def drafted(job: Job, strategy: Strategy) -> Draft:
    """The pipelines of a strategy."""
    size, cuts = strategy.micro_batch, ranges(strategy.layers)
    micro_batches = job.global_batch // (len(strategy.grid) * size)
    return tuple(
        Pipeline(
            size,
            micro_batches,
            tuple(stage(devices, cut, size, strategy.recompute) for devices, cut in zip(groups, cuts, strict=True)),
        )
        for groups in strategy.grid
    )


# --- The cost model ----------------------------------------------------------------------------------------------------


class CostModel:
    """What AMP takes a strategy to cost, for one job on some nodes of a cluster."""

    def __init__(self, cluster: Cluster, job: Job, nodes: Sequence[Node]) -> None:
        self.job = job
        self.pricing, self.room = Pricing(cluster, job), Room(cluster, job)
        self.graph = DeviceGraph(self.pricing.network, nodes)

    def cut(self, grid: Grid, micro_batch: int, recompute: str) -> list[int] | None:
        """The layers of each stage for which a pipeline is fastest, or None where no cut fits in memory."""
        seconds = self.stage_seconds(grid, micro_batch, recompute).mean(axis=0)
        micro_batches = self.micro_batches(grid, micro_batch)
        for s in range(len(grid[0])):
            seconds[s, self.most_layers(grid, s, micro_batch, recompute) + 1 :] = np.inf
        return best_cut(seconds, micro_batches)

    def seconds(self, strategy: Strategy) -> float:
        """Seconds of an iteration: of the slowest pipeline, and of the longest all-reduce of a stage."""
        grid, size = strategy.grid, strategy.micro_batch
        held = self.stage_seconds(grid, size, strategy.recompute)[:, range(len(grid[0])), strategy.layers]
        later = self.micro_batches(grid, size) - 1
        pipelines = later * held.max(axis=1) + held.sum(axis=1) + [self.messages_s(groups, size) for groups in grid]
        return float(pipelines.max()) + max(self.gradients_s(grid, s, count) for s, count in enumerate(strategy.layers))

    def micro_batches(self, grid: Grid, micro_batch: int) -> int:
        """Micro-batches of each pipeline."""
        return self.job.global_batch // (len(grid) * micro_batch)

    def stage_seconds(self, grid: Grid, micro_batch: int, recompute: str) -> NDArray[np.float64]:
        """Seconds of a micro-batch, forward and backward, by pipeline, stage, and layers (infinite for none of them)."""
        layers, deepest = self.job.model.layers, len(grid[0]) - 1
        ends = np.empty((len(grid), deepest + 1, 2))  # of no layer, and of one: each further one adds as much
        for d, groups in enumerate(grid):
            for s, devices in enumerate(groups):
                part = self.pricing.stage(devices, micro_batch, SETTINGS)
                for count in (0, 1):
                    ends[d, s, count] = part.forward_s(count, s == 0, s == deepest)
                    ends[d, s, count] += part.backward_s(all_under(recompute, count), s == 0, s == deepest)
        found: NDArray[np.float64] = ends[:, :, :1] + (ends[:, :, 1:] - ends[:, :, :1]) * np.arange(layers + 1)
        found[:, :, 0] = np.inf
        return found

    def most_layers(self, grid: Grid, s: int, micro_batch: int, recompute: str) -> int:
        """The most layers for which a stage has memory on all of its GPUs."""
        depth = len(grid[0])
        held = self.room.stage(len(grid), len(grid[0][s]), micro_batch, SETTINGS, s == 0, s == depth - 1)
        flying = in_flight(SETTINGS.schedule, depth, s, self.micro_batches(grid, micro_batch))
        capacity_bytes = float(min(self.room.capacity_bytes(groups[s]) for groups in grid))

        def total(count: int) -> float:
            return held.total(flying, all_under(recompute, count))

        return max(0, bisect_right(range(self.job.model.layers + 1), capacity_bytes, key=total) - 1)

    def messages_s(self, groups: Sequence[Devices], micro_batch: int) -> float:
        """Seconds of the messages between the stages of a pipeline, there and back, over the slowest pair of ranks each."""
        num_bytes = self.pricing.activation_bytes(micro_batch)
        return sum(
            2 * num_bytes / min(self.graph.bandwidth_bytes_per_s(a, b) for a, b in zip(sender, receiver, strict=True))
            for sender, receiver in pairwise(groups)
        )

    def gradients_s(self, grid: Grid, s: int, layers: int) -> float:
        """Seconds of the all-reduce of the gradients of a stage of so many layers, over the slowest link of its rings."""
        data, tensor, model = len(grid), len(grid[0][s]), self.job.model
        if data == 1:
            return 0.0
        parameters = layers * layer_parameters(model)
        parameters += embedding_parameters(model) if s == 0 else 0
        parameters += head_parameters(model) if s == len(grid[0]) - 1 else 0
        slowest = min(
            self.graph.bandwidth_bytes_per_s(grid[d][s][rank], grid[(d + 1) % data][s][rank])
            for d in range(data)
            for rank in range(tensor)
        )
        return 2 * (data - 1) / data * parameters / tensor * PRECISION_BYTES[self.job.gradient_precision] / slowest


def best_cut(seconds: NDArray[np.float64], micro_batches: int) -> list[int] | None:
    """Layers of each stage for which (m - 1) max_s t_s + sum_s t_s is smallest, or None where no cut is allowed.

    `seconds[s, n]` is what stage s takes with n layers, infinite where it must not have them; the last n is how many there
    are. For every value that the largest t_s can have, smallest first, a dynamic program over stages finds the smallest sum.
    """
    least = _least_sum(seconds)
    if least is None:
        return None
    best_s, best = np.inf, None
    bound_s = float(seconds.min(axis=1).max())
    for limit_s in np.unique(seconds[np.isfinite(seconds) & (seconds >= bound_s)]):
        if (micro_batches - 1) * limit_s + least[0] >= best_s:
            break
        limited = np.where(seconds <= limit_s, seconds, np.inf)
        if _most_layers(limited) < seconds.shape[1] - 1:  # cheaper to find than that the program has no answer
            continue
        found = _least_sum(limited)
        if found is not None and (micro_batches - 1) * limit_s + found[0] < best_s * (1 - 1e-12):
            best_s, best = (micro_batches - 1) * limit_s + found[0], found[1]
    return best


def _most_layers(seconds: NDArray[np.float64]) -> int:
    """The most layers that the stages may have together."""
    allowed = np.isfinite(seconds)
    return int(np.where(allowed, np.arange(seconds.shape[1]), 0).max(axis=1).sum())


def _least_sum(seconds: NDArray[np.float64]) -> tuple[float, list[int]] | None:
    """The smallest sum of the stages' seconds over all cuts, and its cut, or None where none is allowed."""
    stages, width = seconds.shape
    at = np.arange(width)
    held = at[:, None] - at[None, :]  # layers of the stage that ends before layer `row` and begins at layer `column`
    best = np.full(width, np.inf)
    best[0] = 0.0
    begins = []
    for s in range(stages):
        totals = np.where(held > 0, seconds[s, np.maximum(held, 0)] + best[None, :], np.inf)
        begins.append(totals.argmin(axis=1))
        best = totals.min(axis=1)
    if not np.isfinite(best[-1]):
        return None
    counts, stop = [], width - 1
    for begin in reversed(begins):
        counts.append(int(stop - begin[stop]))
        stop = int(begin[stop])
    return float(best[-1]), counts[::-1]
