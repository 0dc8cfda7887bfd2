"""From groups of devices to a draft: how many layers each stage holds, what it recomputes, how the batch is divided.

A stage gets as many layers as its memory holds and its speed deserves. Its memory is counted with the micro-batches that
it holds, more in earlier stages; where they do not fit, as little as makes room is recomputed, and the
time of that counts for the stage's speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeAlias

from partition.batches import Pace, split_batch
from partition.drafts import Draft, Settings, recomputed, stage
from partition.layers import ranges, split_layers
from partition.pricing import Course, Pricing, ahead_of
from partition.room import Room
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.plan import Pipeline, Stage
from sim.spec.schedules import in_flight

Groups: TypeAlias = tuple[tuple[str, ...], ...]
"""The tensor-parallel groups of a pipeline, in stage order."""

WAIT_SHARES = (1.0, 0.5, 0.0)
"""Parts of a stage's messages that count as its own time when layers are split; the split with the best pace is kept.

Where two stages wait for each other's messages, the period is the mean of both with the messages: lighter stages at a slow
link pay for it. How much lighter depends on what layers, as whole numbers, allow.
"""


@dataclass(frozen=True)
class _Cut:
    """Layers of each stage of a pipeline, how much it recomputes, and its pace."""

    counts: tuple[int, ...]
    amounts: tuple[int, ...]
    pace: Pace
    least_fill_s: float
    """Of what it takes once, the part up to the slowest stage: the stages behind that one fill and drain beside it."""


@dataclass(frozen=True)
class Dealt:
    """Groups, how each pipeline of them is cut, and how many micro-batches it takes."""

    pipelines: Sequence[Groups]
    micro_batch: int
    settings: Settings
    cuts: Sequence[_Cut]
    micro_batches: Sequence[int]
    step_s: float
    """Of an optimizer step in the hosts' memory."""

    @property
    def pace_s(self) -> float:
        """When the last pipeline ends its last backward by its pace, and a step after it: a first guess at the iteration."""
        return self.paced_s(1)

    @property
    def least_s(self) -> float:
        """The same with no more of what each takes once than is certain: about the least that it can be."""
        ends = [cut.least_fill_s + n * cut.pace.period_s for cut, n in zip(self.cuts, self.micro_batches, strict=True)]
        return max(ends) + self.step_s

    def paced_s(self, chunks: int) -> float:
        """The same where pipelines fill and drain in so small a part of the time, as stages of so many ranges of layers may."""
        ends = [cut.pace.fill_s / chunks + n * cut.pace.period_s for cut, n in zip(self.cuts, self.micro_batches, strict=True)]
        return max(ends) + self.step_s


class Assembly:
    """Makes drafts for one job on one cluster. What it finds out of stages it keeps for the next draft."""

    def __init__(self, cluster: Cluster, job: Job, pricing: Pricing) -> None:
        self._cluster, self._job, self._pricing = cluster, job, pricing
        self._room = Room(cluster, job)
        self._stages: dict[object, Callable[[int], tuple[float, int]]] = {}
        self._cuts: dict[object, _Cut | None] = {}
        self._built: dict[object, tuple[Stage, ...]] = {}

    def draft(self, pipelines: Sequence[Groups], micro_batch: int, settings: Settings) -> Draft | None:
        """The draft with these stages, or None where layers do not fit or micro-batches do not sum to the batch."""
        dealt = self.dealt(pipelines, micro_batch, settings)
        return None if dealt is None else self.built(dealt)

    def dealt(self, pipelines: Sequence[Groups], micro_batch: int, settings: Settings) -> Dealt | None:
        """How layers and batch are divided among these stages; None where either cannot be."""
        if micro_batch * len(pipelines) > self._job.global_batch or self._job.global_batch % micro_batch:
            return None
        number = len(pipelines)
        signs = [self._sign(groups, micro_batch, settings) for groups in pipelines]
        twins: dict[object, int] = {}
        for sign in signs:
            twins[sign] = twins.get(sign, 0) + 1
        cuts: dict[object, _Cut] = {}
        for groups, sign in zip(pipelines, signs, strict=True):
            if sign not in cuts:
                # Pipelines on nodes that differ in their names alone, with as many twins, have one cut.
                key = self._pricing.alike(groups), tuple([held[1:] for held in sign]), number, twins[sign], micro_batch, settings
                if key not in self._cuts:
                    self._cuts[key] = self._find_cut(groups, number, twins[sign], micro_batch, settings)
                cut = self._cuts[key]
                if cut is None:
                    return None
                cuts[sign] = cut
        chosen = [cuts[sign] for sign in signs]
        counts = split_batch(self._job.global_batch, [cut.pace for cut in chosen])
        if counts is None:
            return None
        step_s = 0.0
        if settings.offload_optimizer:
            unlike = {id(cut): zip(groups, cut.counts, strict=True) for groups, cut in zip(pipelines, chosen, strict=True)}
            step_s = self._pricing.offloaded_step_s(unlike.values(), number, settings)
        return Dealt(pipelines, micro_batch, settings, chosen, counts, step_s)

    def built(self, dealt: Dealt) -> Draft | None:
        """The draft of what was dealt; None where the pipeline with the most micro-batches does not fit."""
        size = dealt.micro_batch
        draft = tuple(
            [
                Pipeline(size, n, self._stages_of(groups, cut.counts, cut.amounts, size, dealt.settings))
                for groups, cut, n in zip(dealt.pipelines, dealt.cuts, dealt.micro_batches, strict=True)
            ]
        )
        # Memory was counted with the mean number of micro-batches; a fast pipeline takes more, and may hold more at once.
        more = max(dealt.micro_batches) > self._number(len(draft), size)
        return None if more and not self._room.fits(draft, dealt.settings) else draft

    def _stages_of(
        self, groups: Groups, counts: tuple[int, ...], amounts: tuple[int, ...], micro_batch: int, settings: Settings
    ) -> tuple[Stage, ...]:
        """The stages of a pipeline that hold these numbers of layers, and recompute so much."""
        key = (groups, counts, amounts, micro_batch, settings.ahead)
        found = self._built.get(key)
        if found is None:
            flying = settings.in_flight(groups) or [None] * len(groups)
            found = self._built[key] = tuple(
                stage(devices, layers, micro_batch, amount=amount, in_flight=most)
                for devices, layers, amount, most in zip(groups, ranges(counts), amounts, flying, strict=True)
            )
        return found

    def _number(self, pipelines: int, micro_batch: int) -> int:
        """Micro-batches of each of so many pipelines, if all took as many."""
        return max(1, -(-self._job.global_batch // (micro_batch * pipelines)))

    def _sign(self, groups: Groups, micro_batch: int, settings: Settings) -> tuple[tuple[str, int, float], ...]:
        """What twins have in common: the nodes, degrees and speeds of their stages."""
        device, stage_s = self._cluster.device, self._pricing.stage
        return tuple(
            [
                (device(devices[0]).node.name, len(devices), stage_s(devices, micro_batch, settings).layer_forward_s)
                for devices in groups
            ]
        )

    def _find_cut(self, groups: Groups, pipelines: int, twins: int, micro_batch: int, settings: Settings) -> _Cut | None:
        """The cut of a pipeline that has so many twins, itself among them; None where its layers do not fit."""
        depth, layers = len(groups), self._job.model.layers
        if depth > layers:
            return None
        slices = settings.sequence_slices
        number = self._number(pipelines, micro_batch) * slices
        tables, own = [], settings.in_flight(groups)
        for s, devices in enumerate(groups):
            flying = in_flight(settings.schedule, depth, s, number) if own is None else own[s]
            flying = min(flying + slices - 1, number)
            tables.append(self._table(devices, pipelines, micro_batch, settings, flying, s == 0, s == depth - 1))
        ahead = () if own is None else ahead_of(own)
        message, pieces = self._pricing.message_alike, [self._pricing.stage(names, micro_batch, settings) for names in groups]
        messages = tuple([(message(a, b, settings), message(b, a, settings)) for a, b in pairwise(groups)])
        size = self._pricing.activation_bytes(micro_batch, slices)
        waits = [0.0] * depth
        for s, ways in enumerate(messages):
            for way in ways:
                seconds = way.seconds(size, twins) / 2
                waits[s] += seconds
                waits[s + 1] += seconds
        best: tuple[float, _Cut] | None = None
        tried: list[list[int]] = []
        for share in WAIT_SHARES if settings.schedule != "gpipe" and any(waits) else (0.0,):

            def cost(s: int, count: int, share: float = share) -> float:
                return tables[s](count)[0] + share * waits[s]

            counts = split_layers(layers, depth, cost)
            if counts is None:
                return None
            if counts in tried:
                continue
            tried.append(counts)
            amounts = tuple([tables[s](count)[1] for s, count in enumerate(counts)])
            forward, backward, weight = [], [], []
            for s, (piece, count, amount) in enumerate(zip(pieces, counts, amounts, strict=True)):
                modes = recomputed(count, amount)
                forward.append(piece.forward_s(count, s == 0, s == depth - 1))
                backward.append(piece.backward_s(modes, s == 0, s == depth - 1))
                if settings.schedule == "split-1f1b":
                    weight.append(piece.weight_s(modes, s == depth - 1))
            passes = tuple(forward), tuple(backward)
            course = Course(settings.schedule, number, *passes, messages, size, ahead, tuple(weight))
            fill_s, period_s = course.ends(twins)
            seconds = fill_s + number * period_s
            if best is None or seconds < best[0]:
                least_fill_s = min(fill_s, course.least_fill_s())
                pace = Pace(micro_batch, fill_s, period_s * slices)
                best = seconds, _Cut(tuple(counts), amounts, pace, least_fill_s)
        assert best is not None
        return best[1]

    def _table(
        self,
        devices: tuple[str, ...],
        pipelines: int,
        micro_batch: int,
        settings: Settings,
        flying: float,
        first: bool,
        last: bool,
    ) -> Callable[[int], tuple[float, int]]:
        """A function of layers: a stage's seconds for one micro-batch, infinite where they do not fit, and its recomputation."""
        pieces, capacity_bytes = self._pricing.stage(devices, micro_batch, settings), self._room.capacity_bytes(devices)
        key = id(pieces), capacity_bytes, len(devices), pipelines, micro_batch, settings, flying, first, last
        found = self._stages.get(key)
        if found is None:
            held = self._room.stage(pipelines, len(devices), micro_batch, settings, first, last)

            @cache
            def seconds(layers: int) -> tuple[float, int]:
                amount = held.least_recomputation(capacity_bytes, layers, flying)
                if amount is None:
                    return math.inf, 0
                backward_s = pieces.backward_s(recomputed(layers, amount), first, last)
                return pieces.forward_s(layers, first, last) + backward_s, amount

            found = self._stages[key] = seconds
        return found
