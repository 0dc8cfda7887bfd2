"""Drafts that differ from one by a single change, which the search tries last.

A layer moves from stage to stage or is recomputed, micro-batches move between pipelines or are of another size, or one more or
fewer of them is held for a message; in one family of pipelines that are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from partition.deals import micro_batches
from partition.drafts import Draft, Settings, amount_of, most_recomputation, recomputing, stage
from partition.room import Room
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.plan import COUNTED_SCHEDULES, Pipeline, Stage
from sim.spec.schedules import held_by

MOST_SIZES = 16
"""All sizes of micro-batches up to this are tried, and larger ones by doubling."""


class Variants:
    """The single changes of the drafts of one job on a cluster."""

    def __init__(self, cluster: Cluster, job: Job, room: Room, charged: bool) -> None:
        """`charged` where seconds count for what they cost: then it may be better to wait than to compute again."""
        self._job, self._room, self._charged = job, room, charged
        self._kind = {device.name: device.gpu.name for device in cluster.devices}

    def of(self, draft: Draft, settings: Settings, rng: np.random.Generator) -> Iterator[Draft]:
        """The draft with each single change, which pipelines that are alike share; `rng` draws the order in which layers move."""
        families: dict[object, list[int]] = {}
        for p, pipeline in enumerate(draft):
            sign = tuple(
                (self._kind[s.replicas[0].devices[0]], len(s.replicas[0].devices), s.layers, s.in_flight) for s in pipeline.stages
            )
            families.setdefault((sign, pipeline.micro_batch), []).append(p)
        for members in families.values():
            stages = draft[members[0]].stages
            order = rng.permutation(len(stages) ** 2)
            for n in order:
                giver, taker = divmod(int(n), len(stages))
                if giver == taker or stages[giver].layer_count < 2:
                    continue
                made = list(draft)
                for p in members:
                    made[p] = replace(draft[p], stages=_moved_layer(draft[p].stages, giver, taker))
                    made[p] = self._fitted(made[p], (giver, taker), len(draft), settings)
                yield tuple(made)
                if self._charged and stages[giver].recompute != "none":  # to wait may be cheaper than to compute again
                    for p in members:
                        own = made[p].stages
                        made[p] = replace(made[p], stages=(*own[:giver], recomputing(own[giver], 0), *own[giver + 1 :]))
                    yield tuple(made)
            for n in range(len(stages)):
                for changed in _recomputed(stages[n]):
                    made = list(draft)
                    for p in members:
                        own = draft[p].stages
                        made[p] = replace(draft[p], stages=(*own[:n], _like(own[n], changed), *own[n + 1 :]))
                    yield tuple(made)
            if settings.schedule in COUNTED_SCHEDULES:
                for counts in _held_otherwise(draft[members[0]].in_flight):
                    made = list(draft)
                    for p in members:
                        made[p] = self._fitted(draft[p].holding(counts), range(len(counts)), len(draft), settings)
                    yield tuple(made)
        groups = list(families.values())
        for ones in groups:
            for others in groups:
                p, q = ones[0], others[-1]
                if p != q and draft[p].micro_batch == draft[q].micro_batch and draft[p].micro_batches > 1:
                    made = list(draft)
                    made[p] = replace(draft[p], micro_batches=draft[p].micro_batches - 1)
                    made[q] = replace(draft[q], micro_batches=draft[q].micro_batches + 1)
                    yield tuple(made)
            yield from self._with_other_micro_batches(draft, ones, settings)

    def _fitted(self, pipeline: Pipeline, which: Iterable[int], copies: int, settings: Settings) -> Pipeline:
        """One of so many pipelines, some of whose stages recompute as little as they must to fit, if they ever do."""
        stages, last = list(pipeline.stages), len(pipeline.stages) - 1
        for s in which if settings.zero_stage < 2 else ():  # of others `Room` knows nothing
            devices, layers = stages[s].replicas[0].devices, stages[s].layer_count
            held = self._room.stage(copies, len(devices), pipeline.micro_batch, settings, s == 0, s == last)
            flying = held_by(settings.schedule, pipeline, s, slices=settings.sequence_slices)
            amount = held.least_recomputation(self._room.capacity_bytes(devices), layers, flying)
            if amount is not None:
                stages[s] = recomputing(stages[s], amount)
        return replace(pipeline, stages=tuple(stages))

    def _with_other_micro_batches(self, draft: Draft, members: Sequence[int], settings: Settings) -> Iterator[Draft]:
        """The draft with the same sequences of some pipelines in micro-batches of another size, recomputed as memory asks for."""
        totals, own = {draft[p].micro_batch * draft[p].micro_batches for p in members}, draft[members[0]].micro_batch
        for size in sorted({*range(1, MOST_SIZES + 1), *micro_batches(self._job, own)}):
            if size == own or any(total % size for total in totals):
                continue
            for mode in ("none",) if settings.zero_stage < 2 else ("none", "full"):
                made = list(draft)
                for p in members:
                    stages = tuple(
                        stage(part.replicas[0].devices, part.layers[0], size, mode, in_flight=part.in_flight)
                        for part in draft[p].stages
                    )
                    total = draft[p].micro_batch * draft[p].micro_batches
                    made[p] = self._fitted(Pipeline(size, total // size, stages), range(len(stages)), len(draft), settings)
                yield tuple(made)


def _moved_layer(stages: Sequence[Stage], giver: int, taker: int) -> tuple[Stage, ...]:
    """The stages with one layer less in one, and one more in another; what lies between moves along."""
    counts = [part.layer_count for part in stages]
    counts[giver] -= 1
    counts[taker] += 1
    made, start = [], 0
    for part, count in zip(stages, counts, strict=True):
        amount, most = amount_of(part), most_recomputation(count)
        whole = amount == most_recomputation(part.layer_count)
        made.append(recomputing(replace(part, layers=((start, start + count),)), most if whole else min(amount, most)))
        start += count
    return tuple(made)


def _held_otherwise(in_flight: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The micro-batches that stages hold, with one more, or one fewer, for the message from one stage to the next."""
    for n in range(len(in_flight) - 1):
        for more in (1, -1):
            if in_flight[n] + more >= in_flight[n + 1]:
                yield tuple([count + more * (s <= n) for s, count in enumerate(in_flight)])


def _recomputed(stage: Stage) -> Iterator[Stage]:
    """The stage with recomputation of one layer more, or fewer."""
    for amount in (amount_of(stage) - 1, amount_of(stage) + 1):
        if 0 <= amount <= most_recomputation(stage.layer_count):
            yield recomputing(stage, amount)


def _like(stage: Stage, other: Stage) -> Stage:
    """The stage with what another one recomputes."""
    return recomputing(stage, amount_of(other))
