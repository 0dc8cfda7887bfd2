"""Fully sharded grids: pipelines of one cut, whose copies divide gradients (ZeRO 2) or parameters, too (ZeRO 3).

Where memory is tight and the network fast, such a plan needs no recomputation and has no bubble: with one stage it is what
DeepSpeed and FSDP do. The grids are those of `partition.planners.megatron`. All pipelines have as many micro-batches; the
sequences of each are dealt to them by their speed, so that faster GPUs take more. Of the layers those are recomputed for
which memory has no room. A grid takes, with M micro-batches, S stages and C seconds of computation of the slowest one,

    (M + S - 1) max(C, exchanges of a micro-batch)

at best: one reduce-scatter of the gradients, and under ZeRO 3 two gathers of the parameters. It is by this price that they are
ranked; nothing else than these exchanges, as if they hid behind the computation, is in it.

Source: Rajbhandari et al. (2020), arXiv:1910.02054. Left out: stages of unlike kinds one after another, shard groups, uneven
cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from partition.assembly import Groups
from partition.batches import Pace, split_batch
from partition.drafts import SLACK, Draft, Settings, make_plan, stage
from partition.layers import even_split, ranges
from partition.planners.megatron import parts, shapes
from partition.pricing import Pricing
from sim.cost.memory import lane_parts
from sim.spec.cluster import Cluster, Node
from sim.spec.counts import embedding_parameters, head_parameters, layer_parameters
from sim.spec.job import Job
from sim.spec.plan import LayerRange, Pipeline

ZERO_STAGES = (2, 3)

MOST_STAGES = 8
"""The deepest pipelines: each stage's copies exchange what it holds at every micro-batch, and deeper ones have more of them."""

MOST_SEQUENCES = 16
"""Of one pipeline in a micro-batch."""

Looks: TypeAlias = tuple[int, int, str, int]
"""What decides how much of a stage is recomputed: its place, its sequences, its kind and its bytes of memory."""


@dataclass(frozen=True)
class Grid:
    """Tensor-parallel groups, pipeline by pipeline, the sequences that each has of a micro-batch, and the number of these."""

    pipelines: tuple[Groups, ...]
    shares: tuple[int, ...]
    micro_batches: int
    settings: Settings


class Sharded:
    """The fully sharded grids of one job on some nodes."""

    def __init__(self, cluster: Cluster, job: Job, nodes: Sequence[Node], pricing: Pricing) -> None:
        self._cluster, self._job, self._nodes, self._pricing = cluster, job, nodes, pricing

    def ranked(self, worth_s: float, late: Callable[[], bool]) -> list[tuple[float, Draft, Settings]]:
        """The grids that fit and may take less than `worth_s`, with their prices, cheapest first; fewer where it gets late."""
        priced: list[tuple[float, int, Grid]] = []
        for grid in self._grids():
            if late():
                return []
            price_s = self._price_s(grid, {})
            if price_s < worth_s:
                priced.append((price_s, len(priced), grid))
        priced.sort(key=lambda entry: entry[:2])
        found: list[tuple[float, Draft, Settings]] = []
        for price_s, _, grid in priced:
            if late() or price_s >= worth_s:
                break
            full = self._recomputed(grid)
            if full is None:
                continue
            price_s = self._price_s(grid, full)
            if price_s < worth_s:
                found.append((price_s, self._draft(grid, full), grid.settings))
                worth_s = min(worth_s, SLACK * price_s)
        return sorted((entry for entry in found if entry[0] < worth_s), key=lambda entry: entry[0])

    def _grids(self) -> Iterator[Grid]:
        """All grids of at least two pipelines."""
        job = self._job
        for part in parts(self._nodes):
            unlike = len({node.gpu for node in part}) > 1
            for pipelines in shapes(job, part):
                copies, depth, tensor = len(pipelines), len(pipelines[0]), len(pipelines[0][0])
                if copies < 2 or depth > (1 if unlike else MOST_STAGES) or job.sequence_length % tensor:
                    continue
                settings = Settings(sequence_parallel=tensor > 1)
                one_s = [self._pricing.stage(groups[0], 1, settings).layer_forward_s for groups in pipelines]
                for number in range(1, job.global_batch // copies + 1):
                    if job.global_batch % number or job.global_batch > number * copies * MOST_SEQUENCES:
                        continue
                    shares = split_batch(job.global_batch // number, [Pace(1, 0.0, seconds) for seconds in one_s])
                    if shares is not None and max(shares) <= MOST_SEQUENCES:
                        for zero_stage in ZERO_STAGES:
                            yield Grid(pipelines, tuple(shares), number, replace(settings, zero_stage=zero_stage))

    def _cuts(self, grid: Grid) -> list[LayerRange]:
        """The layers of each stage."""
        return ranges(even_split(self._job.model.layers, len(grid.pipelines[0])))

    def _looks(self, grid: Grid) -> dict[Looks, int]:
        """The stages of a grid that differ, each with a pipeline that has it."""
        found: dict[Looks, int] = {}
        for p, (groups, share) in enumerate(zip(grid.pipelines, grid.shares, strict=True)):
            for s, devices in enumerate(groups):
                found.setdefault(self._look(s, share, devices), p)
        return found

    def _look(self, s: int, share: int, devices: Sequence[str]) -> Looks:
        gpu = self._cluster.device(devices[0]).gpu
        return s, share, gpu.name, gpu.memory_bytes

    def _price_s(self, grid: Grid, full: dict[Looks, int]) -> float:
        """Seconds of an iteration at best; see the head of this file. With how many layers are recomputed in full."""
        cuts, model, pricing = self._cuts(grid), self._job.model, self._pricing
        last = len(cuts) - 1
        slowest_s = 0.0
        for look, p in self._looks(grid).items():
            s, share = look[:2]
            count = cuts[s][1] - cuts[s][0]
            pieces = pricing.stage(grid.pipelines[p][s], share, grid.settings)
            forward_s = pieces.forward_s(count, s == 0, s == last)
            slowest_s = max(slowest_s, forward_s + pieces.backward_s(count, full.get(look, 0), s == 0, s == last))
        held = (cuts[0][1] - cuts[0][0]) * layer_parameters(model) + embedding_parameters(model)
        held += head_parameters(model) if last == 0 else 0
        reduce_s, gather_s = pricing.exchange_s(tuple([groups[0] for groups in grid.pipelines]), held)
        exchange_s = reduce_s + (2 * gather_s if grid.settings.zero_stage == 3 else 0.0)
        return (grid.micro_batches + last) * max(slowest_s, exchange_s)

    def _draft(self, grid: Grid, full: dict[Looks, int]) -> Draft:
        """The draft of a grid of which so many layers of each stage are recomputed."""
        cuts = self._cuts(grid)
        return tuple(
            Pipeline(
                share,
                grid.micro_batches,
                tuple(
                    stage(devices, cut, share, full=full[self._look(s, share, devices)])
                    for s, (devices, cut) in enumerate(zip(groups, cuts, strict=True))
                ),
            )
            for groups, share in zip(grid.pipelines, grid.shares, strict=True)
        )

    def _recomputed(self, grid: Grid) -> dict[Looks, int] | None:
        """The fewest layers of each stage that must be recomputed for it to fit; None where one never does."""
        cuts = self._cuts(grid)
        few = {look: -1 for look in self._looks(grid)}  # too few; `enough` is enough
        enough = {look: cuts[look[0]][1] - cuts[look[0]][0] for look in few}
        if self._lacking(grid, enough):
            return None
        asked = dict.fromkeys(few, 0)
        while any(enough[look] - few[look] > 1 for look in few):
            lacking = self._lacking(grid, asked)
            for look, number in asked.items():
                if enough[look] - few[look] > 1:
                    (few if look in lacking else enough)[look] = number
            asked = {look: (few[look] + enough[look]) // 2 if enough[look] - few[look] > 1 else enough[look] for look in few}
        return enough

    def _lacking(self, grid: Grid, full: dict[Looks, int]) -> set[Looks]:
        """The stages that do not fit with so many layers recomputed."""
        plan = make_plan(self._cluster, self._job, self._draft(grid, full), grid.settings)
        asked = {(p, look[0]): look for look, p in self._looks(grid).items()}
        found = set()
        for p, s, _, held in lane_parts(plan, self._cluster.stack):
            look = asked.pop((p, s), None)
            if look is not None and held.total > look[-1]:
                found.add(look)
            if not asked:
                break
        return found
