"""From groups of devices to a draft: how many layers each stage holds, what it recomputes, how the batch is divided.

A stage gets as many layers as its memory holds and its speed deserves. Its memory is counted with the micro-batches that
1F1B keeps in flight, more in earlier stages; where they do not fit, the fewest layers that make room are recomputed, and the
time of that counts for the stage's speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from partition.batches import Pace, split_batch
from partition.drafts import Draft, Settings, stage
from partition.layers import ranges, split_layers
from partition.pricing import Pricing
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


class Assembly:
    """Makes drafts for one job on one cluster. What it finds out of stages it keeps for the next draft.

    With `copies` the cluster is one of so many equal parts, on each of which the draft is to stand: ZeRO divides over all.
    """

    def __init__(self, cluster: Cluster, job: Job, pricing: Pricing, copies: int = 1) -> None:
        self._cluster, self._job, self._pricing, self._copies = cluster, job, pricing, copies
        self._room = Room(cluster, job)
        self._stages: dict[object, dict[int, tuple[float, int]]] = {}
        self._cuts: dict[object, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}
        self._built: dict[object, tuple[Stage, ...]] = {}

    def draft(self, pipelines: Sequence[Groups], micro_batch: int, settings: Settings) -> Draft | None:
        """The draft with these stages, or None where layers do not fit or micro-batches do not sum to the batch."""
        if micro_batch * len(pipelines) > self._job.global_batch or self._job.global_batch % micro_batch:
            return None
        signs = [self._sign(groups, micro_batch, settings) for groups in pipelines]
        twins = [signs.count(sign) for sign in signs]
        cuts: dict[object, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        paces: dict[object, Pace] = {}
        built = []
        for groups, sign, count in zip(pipelines, signs, twins, strict=True):
            if sign not in cuts:
                cut = self._cut(groups, sign, len(pipelines), count, micro_batch, settings)
                if cut is None:
                    return None
                cuts[sign] = cut
            stages = self._stages_of(groups, *cuts[sign], micro_batch)
            built.append(stages)
            if sign not in paces:
                fill_s, period_s = self._pricing.course(Pipeline(micro_batch, 1, stages), settings).ends(count)
                paces[sign] = Pace(micro_batch, fill_s, period_s)
        counts = split_batch(self._job.global_batch, [paces[sign] for sign in signs])
        if counts is None:
            return None
        draft = tuple(Pipeline(micro_batch, n, stages) for stages, n in zip(built, counts, strict=True))
        # Memory was counted with the mean number of micro-batches; a fast pipeline takes more, and may hold more at once.
        return draft if max(counts) <= self._number(len(pipelines), micro_batch) or self._room.fits(draft, settings) else None

    def _stages_of(self, groups: Groups, counts: tuple[int, ...], full: tuple[int, ...], micro_batch: int) -> tuple[Stage, ...]:
        """The stages of a pipeline that hold these numbers of layers, and recompute these numbers of them."""
        key = (groups, counts, full, micro_batch)
        found = self._built.get(key)
        if found is None:
            found = self._built[key] = tuple(
                stage(devices, layers, micro_batch, full=n)
                for devices, layers, n in zip(groups, ranges(counts), full, strict=True)
            )
        return found

    def _number(self, pipelines: int, micro_batch: int) -> int:
        """Micro-batches of each of so many pipelines, if all took as many."""
        return max(1, -(-self._job.global_batch // (micro_batch * pipelines)))

    def _sign(self, groups: Groups, micro_batch: int, settings: Settings) -> object:
        """What twins have in common: the nodes, degrees and speeds of their stages."""
        device = self._cluster.device
        return tuple(
            (device(devices[0]).node.name, len(devices), self._pricing.stage(devices, micro_batch, settings).layer_forward_s)
            for devices in groups
        )

    def _cut(
        self, groups: Groups, sign: object, pipelines: int, twins: int, micro_batch: int, settings: Settings
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Layers of each stage, and how many of them it recomputes; the same for all twins."""
        key = (sign, pipelines, twins, micro_batch, settings)
        if key not in self._cuts:
            self._cuts[key] = self._find_cut(groups, pipelines, twins, micro_batch, settings)
        return self._cuts[key]

    def _find_cut(
        self, groups: Groups, pipelines: int, twins: int, micro_batch: int, settings: Settings
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        depth, layers = len(groups), self._job.model.layers
        if depth > layers:
            return None
        number = self._number(pipelines, micro_batch)
        tables = []
        for s, devices in enumerate(groups):
            flying = in_flight(settings.schedule, depth, s, number)
            tables.append(self._table(devices, pipelines * self._copies, micro_batch, settings, flying, s == 0, s == depth - 1))
        size = self._pricing.activation_bytes(micro_batch)
        waits = [0.0] * depth
        for s in range(depth - 1):
            for a, b in ((groups[s], groups[s + 1]), (groups[s + 1], groups[s])):
                seconds = self._pricing.message(a, b, settings).seconds(size, twins) / 2
                waits[s] += seconds
                waits[s + 1] += seconds
        best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
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
            full = tuple([tables[s](count)[1] for s, count in enumerate(counts)])
            stages = self._stages_of(groups, tuple(counts), full, micro_batch)
            course = self._pricing.course(Pipeline(micro_batch, number, stages), settings)
            seconds = course.end_s(twins)
            if best is None or seconds < best[0]:
                best = (seconds, tuple(counts), full)
        assert best is not None
        return best[1], best[2]

    def _table(
        self,
        devices: tuple[str, ...],
        pipelines: int,
        micro_batch: int,
        settings: Settings,
        flying: float,
        first: bool,
        last: bool,
    ) -> partial[tuple[float, int]]:
        """A function of a number of layers: a stage's seconds for one micro-batch, and how many layers it recomputes."""
        alike = id(self._pricing.stage(devices, micro_batch, settings)), self._room.capacity_bytes(devices), len(devices)
        key = (alike, pipelines, micro_batch, settings, flying, first, last)
        known = self._stages.setdefault(key, {})
        return partial(self._seconds, known, devices, pipelines, micro_batch, settings, flying, first, last)

    def _seconds(
        self,
        known: dict[int, tuple[float, int]],
        devices: tuple[str, ...],
        pipelines: int,
        micro_batch: int,
        settings: Settings,
        flying: float,
        first: bool,
        last: bool,
        layers: int,
    ) -> tuple[float, int]:
        """See `_table`. Infinite where the layers do not fit."""
        found = known.get(layers)
        if found is None:
            held = self._room.stage(pipelines, len(devices), micro_batch, settings, first, last)
            full = held.fewest_recomputed(self._room.capacity_bytes(devices), layers, flying)
            if full is None:
                found = (math.inf, 0)
            else:
                pieces = self._pricing.stage(devices, micro_batch, settings)
                found = (pieces.forward_s(layers, first, last) + pieces.backward_s(layers, full, first, last), full)
            known[layers] = found
        return found
