"""Grids that divide more than optimizer states: pipelines of one cut, whose copies divide gradients (ZeRO 2), parameters, too
(ZeRO 3), the experts of a mixture (whole on each tensor rank, or columns of each), or every sequence (context parallelism).

Where memory is tight and the network fast, a fully sharded plan needs no recomputation and has no bubble: with one stage it is
what DeepSpeed and FSDP do. Where sequences are few and long, each may go over several tensor-parallel groups, whose keys
and values go round. The grids are those of `partition.planners.megatron`. All pipelines have as many micro-batches; the
sequences of each are dealt to them by their speed, so that faster GPUs take more. Of the layers those are recomputed for
which memory has no room. A grid of M micro-batches whose stages compute for C seconds takes

    max over stages (sum of C up to it + (M - 1) C), and M times the exchanges of a micro-batch

at best, whichever is longer: under ZeRO 2 and 3 one reduce-scatter of the layers' gradients, under ZeRO 3 two gathers of their
parameters, as if they hid behind the computation; what takes tokens to their experts and back counts for C. It is by this price
that they are ranked.

Sources: Rajbhandari et al. (2020), arXiv:1910.02054; Lepikhin et al. (2020), arXiv:2006.16668, for experts; Liu et al. (2023),
arXiv:2310.01889, for the ring of context ranks. Left out: stages of unlike kinds one after another, experts or sequences divided
over unlike kinds, and both together, shard groups, uneven cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, product
from typing import TypeAlias

from partition.assembly import Groups
from partition.batches import Pace, divisors, split_batch
from partition.drafts import Draft, Settings, context_degrees, expert_divisions, make_plan, most_recomputation, recomputed, stage
from partition.layers import even_split, ranges
from partition.planners.megatron import joined, parts, shapes
from partition.pricing import Devices, Pricing
from sim.cost.memory import lane_parts
from sim.spec.cluster import Cluster, Node
from sim.spec.compile import MOST_INSTRUCTIONS, instruction_estimate
from sim.spec.counts import layer_parameter_parts
from sim.spec.job import Job
from sim.spec.plan import LayerRange, Pipeline, tensor_groups

ZERO_STAGES = (1, 2, 3)

MOST_STAGES = 8
"""The deepest pipelines: each stage's copies exchange what it holds at every micro-batch, and deeper ones have more of them."""

MOST_SEQUENCES = 128
"""Of one pipeline in a micro-batch."""

FEW_DIVISORS = 4
"""Fewer, larger micro-batches count, too, where the fewest that divide a batch are so many times as many as would be enough."""

Looks: TypeAlias = tuple[int, int, int, int]
"""What decides how long a stage takes and how much it recomputes: its place, its sequences, its kind and its bytes of memory."""


@dataclass(frozen=True)
class Grid:
    """The groups that are stages, pipeline by pipeline, the sequences that each has of a micro-batch, and the number of these.

    A group is a tensor-parallel one, or as many one after another as there are context ranks.
    """

    pipelines: tuple[Groups, ...]
    shares: tuple[int, ...]
    micro_batches: int
    settings: Settings


class Grids:
    """The grids of one job on some nodes."""

    def __init__(self, cluster: Cluster, job: Job, nodes: Sequence[Node], pricing: Pricing) -> None:
        self._cluster, self._job, self._nodes, self._pricing = cluster, job, nodes, pricing
        self._gpus = sum(node.gpus for node in nodes)

    def priced(self, late: Callable[[], bool]) -> list[tuple[float, Grid]]:
        """The grids with their prices without recomputation, cheapest first; where it gets late those of the largest parts."""
        found: list[tuple[float, int, Grid]] = []
        for grid in self._grids():
            if late():
                break
            found.append((self._price_s(grid, {}), len(found), grid))
        return [(price_s, grid) for price_s, _, grid in sorted(found, key=lambda entry: entry[:2])]

    def fitted(self, grid: Grid) -> tuple[float, Draft] | None:
        """The draft of a grid that recomputes as little as memory allows, and its price; None where it does not fit, or
        its program is too long to be simulated."""
        amounts = self._recomputed(grid)
        if amounts is None:
            return None
        draft = self._draft(grid, amounts)
        if instruction_estimate(make_plan(self._cluster, self._job, draft, grid.settings)) > MOST_INSTRUCTIONS:
            return None
        return self._price_s(grid, amounts), draft

    def _numbers(self, copies: int) -> list[int]:
        """How many micro-batches so many pipelines may have of the batch: none has more than MOST_SEQUENCES in one of them.

        Where only so many do that each has few, as of 4,093 sequences, the next smaller number counts, too.
        """
        whole = [number for number in divisors(self._job.global_batch) if number * copies <= self._job.global_batch]
        least = -(-self._job.global_batch // (copies * MOST_SEQUENCES))
        found = [number for number in whole if number >= least]
        if not found or found[0] > FEW_DIVISORS * least:
            found = [number for number in whole if number < least][-1:] + found
        return found

    def _grids(self) -> Iterator[Grid]:
        """All grids of at least two pipelines, or context ranks; those that divide no sequences first."""
        job = self._job
        for pipelines, settings, unlike in chain(self._arranged(1), *map(self._arranged, context_degrees(job, self._gpus))):
            copies, ranks = len(pipelines), settings.context_parallel
            one_s = [self._pricing.stage(groups[0], 1, settings).layer_forward_s for groups in pipelines]
            for number in self._numbers(copies):
                shares = split_batch(job.global_batch // number, [Pace(1, 0.0, seconds) for seconds in one_s])
                most = max(MOST_SEQUENCES, -(-job.global_batch // (number * copies)))
                if shares is None or max(shares) > most:
                    continue
                alike = not unlike and min(shares) == max(shares)
                divisions = expert_divisions(job.model, copies, len(pipelines[0][0])) if alike and ranks == 1 else [(1, None)]
                for (degree, tensor), zero_stage in product(divisions, ZERO_STAGES):
                    if degree > 1 or zero_stage > 1 or ranks > 1:
                        chosen = replace(settings, zero_stage=zero_stage, expert_parallel=degree, expert_tensor_parallel=tensor)
                        yield Grid(pipelines, tuple(shares), number, chosen)

    def _arranged(self, ranks: int) -> Iterator[tuple[tuple[Groups, ...], Settings, bool]]:
        """The stages of all grids of so many context ranks, what holds for them, and whether pipelines are of unlike kinds."""
        for part in parts(self._nodes):
            unlike = len({node.gpu for node in part}) > 1
            for pipelines in shapes(self._job, part):
                copies, depth, tensor = len(pipelines), len(pipelines[0]), len(pipelines[0][0])
                divides = copies % ranks == 0 and self._job.sequence_length // ranks % tensor == 0
                if copies < 2 or depth > (1 if unlike else MOST_STAGES) or not divides:
                    continue
                divided = joined(pipelines, ranks)
                if ranks == 1 or not unlike or all(self._is_of_one_kind(groups[0]) for groups in divided):
                    yield divided, Settings(sequence_parallel=tensor > 1, context_parallel=ranks), unlike

    def _is_of_one_kind(self, devices: Devices) -> bool:
        return len({self._cluster.device(name).gpu for name in devices}) == 1

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
        return s, share, id(gpu), gpu.memory_bytes

    def _price_s(self, grid: Grid, amounts: dict[Looks, int]) -> float:
        """Seconds of an iteration at best; see the head of this file. With how much each stage recomputes."""
        cuts, number = self._cuts(grid), grid.micro_batches
        last = len(cuts) - 1
        stages_s = [0.0] * len(cuts)
        experts_s = self._pricing.experts_s([groups[0] for groups in grid.pipelines], grid.shares[0], grid.settings)
        for look, p in self._looks(grid).items():
            s, share = look[:2]
            count, devices = cuts[s][1] - cuts[s][0], grid.pipelines[p][s]
            pieces = self._pricing.stage(devices, share, grid.settings)
            seconds = pieces.forward_s(count, s == 0, s == last)
            seconds += pieces.backward_s(recomputed(count, amounts.get(look, 0)), s == 0, s == last)
            seconds *= self._pricing.with_fewer_experts(devices, share, grid.settings)
            stages_s[s] = max(stages_s[s], seconds + count * experts_s)
        exchange_s = self._exchange_s(grid, cuts[0][1] - cuts[0][0])
        # The first micro-batch comes through the stages before one, and its last gradient goes back there.
        ends_s = [way_s + (number - 1) * stage_s for way_s, stage_s in zip(accumulate(stages_s), stages_s, strict=True)]
        return max(*ends_s, sum(stages_s), number * exchange_s)

    def _exchange_s(self, grid: Grid, layers: int) -> float:
        """Seconds of what the copies of the first stage exchange for each micro-batch; its ends come once for all."""
        model, zero_stage, ranks = self._job.model, grid.settings.zero_stage, grid.settings.context_parallel
        copies = grid.settings.expert_copies(len(grid.pipelines[0][0]))
        lanes = tuple([one for groups in grid.pipelines for one in tensor_groups(groups[0], ranks)])
        layer = layer_parameter_parts(model)
        seconds = 0.0
        # Those that hold the same experts are one of each that have all of them together.
        everywhere = layer.total - layer.experts
        for held, members in ((everywhere, lanes), (layer.experts // copies, lanes[::copies])):
            if held and len(members) > 1 and zero_stage > 1:
                reduce_s, gather_s = self._pricing.exchange_s(members, layers * held)
                seconds += reduce_s + (2 * gather_s if zero_stage == 3 else 0.0)
        return seconds

    def _draft(self, grid: Grid, amounts: dict[Looks, int]) -> Draft:
        """The draft of a grid of which each stage recomputes so much."""
        cuts = self._cuts(grid)
        return tuple(
            Pipeline(
                share,
                grid.micro_batches,
                tuple(
                    stage(devices, cut, share, amount=amounts[self._look(s, share, devices)])
                    for s, (devices, cut) in enumerate(zip(groups, cuts, strict=True))
                ),
            )
            for groups, share in zip(grid.pipelines, grid.shares, strict=True)
        )

    def _recomputed(self, grid: Grid) -> dict[Looks, int] | None:
        """The least that each stage must recompute to fit; None where one never does."""
        cuts = self._cuts(grid)
        few = {look: -1 for look in self._looks(grid)}  # too few; `enough` is enough
        enough = {look: most_recomputation(cuts[look[0]][1] - cuts[look[0]][0]) for look in few}
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

    def _lacking(self, grid: Grid, amounts: dict[Looks, int]) -> set[Looks]:
        """The stages that do not fit if they recompute so much."""
        plan = make_plan(self._cluster, self._job, self._draft(grid, amounts), grid.settings)
        asked = {(p, look[0]): look for look, p in self._looks(grid).items()}
        found = set()
        for p, s, _, held in lane_parts(plan, self._cluster.stack):
            look = asked.pop((p, s), None)
            if look is not None and held.total > look[-1]:
                found.add(look)
            if not asked:
                break
        return found
