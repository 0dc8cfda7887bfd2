"""How many layers a device holds: the bytes of a stage as a sum of parts that grow with its layers and with its micro-batches.

What the parts are is not said here but asked of `sim.cost.memory`, by the shapes of the lanes of a small plan and others like
these, whose totals are compared: under ZeRO 0 and 1 they are linear in the layers and in the micro-batches in flight, and it is
asked about no other stages. Answers are kept for the next one that is alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from partition.drafts import Draft, Settings, make_plan, most_recomputation, recomputed, stage, updated_parameters
from sim.cost.memory import LaneShape, MemoryRules, host_parameter_bytes, host_room_bytes, lane_shapes, rules_of, shape_parts
from sim.spec.cluster import Cluster
from sim.spec.counts import RECOMPUTE
from sim.spec.gpu import is_cpu
from sim.spec.job import Job
from sim.spec.plan import Pipeline
from sim.spec.schedules import SCHEDULES, held_by

FEW, MANY = 2, 4
"""Numbers of pipelines that are asked about. With more of them ZeRO's parts are smaller in proportion, the rest is the same."""


@dataclass(frozen=True)
class ModeBytes:
    """Bytes under one recompute mode: once where a layer has it, and for each such layer and micro-batch, or slice, in flight."""

    working: float
    kept: float


@dataclass(frozen=True)
class StageBytes:
    """Bytes on each device of a stage: what is there without layers, and what each layer and micro-batch in flight adds."""

    fixed: float
    layer: float
    flight: float
    """For each micro-batch, or slice of one, in flight, whatever the layers: what the embedding and the head keep."""
    modes: tuple[ModeBytes, ...]
    """In the order of `RECOMPUTE`."""

    def total(self, in_flight: float, counts: Iterable[int]) -> float:
        """Bytes of a stage with so many layers in each mode, in the order of `RECOMPUTE`, and so many micro-batches in flight."""
        kept = working = 0.0
        layers = 0
        for count, mode in zip(counts, self.modes, strict=True):
            if count:
                layers += count
                kept += count * mode.kept
                working = max(working, mode.working)
        return self.fixed + layers * self.layer + in_flight * (self.flight + kept) + working

    def least_recomputation(self, capacity_bytes: float, layers: int, in_flight: float) -> int | None:
        """The least amount of recomputation (see `partition.drafts`) with which so many layers fit, or None if they never do."""

        def fits(amount: int) -> bool:
            return self.total(in_flight, recomputed(layers, amount)) <= capacity_bytes

        if fits(0):
            return 0
        few, enough = 0, most_recomputation(layers)  # `few` is too few, `enough` is enough
        if not fits(enough):
            return None
        while enough - few > 1:
            middle = (few + enough) // 2
            if fits(middle):
                enough = middle
            else:
                few = middle
        return enough


class Room:
    """The bytes of stages of one job, by what they depend on."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._cluster, self._job = cluster, job
        self._known: dict[object, list[StageBytes]] = {}
        self._cpus = {node.name for node in cluster.nodes if is_cpu(node.gpu)}
        self._hosts = {node.name: have for node in cluster.nodes if (have := host_room_bytes(node)) is not None}

    def fits(self, draft: Draft, settings: Settings) -> bool:
        """Whether every stage of a draft fits in the memory of each of its devices, and what it offloads in that of hosts."""
        for pipeline in draft:
            for s, part in enumerate(pipeline.stages):
                if self._held_bytes(draft, pipeline, s, settings) > self.capacity_bytes(part.replicas[0].devices):
                    return False
        return self.fits_hosts(draft, settings)

    def _held_bytes(self, draft: Draft, pipeline: Pipeline, s: int, settings: Settings) -> float:
        """The bytes on each device of a stage of one of a draft's pipelines."""
        part, deepest = pipeline.stages[s], len(pipeline.stages) - 1
        held = self.stage(len(draft), len(part.replicas[0].devices), pipeline.micro_batch, settings, s == 0, s == deepest)
        flying = held_by(settings.schedule, pipeline, s, slices=settings.sequence_slices)
        return held.total(flying, part.recomputed().values())

    def fits_hosts(self, draft: Draft, settings: Settings) -> bool:
        """Whether the states that a draft offloads fit in the memory of each host that is known; see `sim.cost.memory`.

        Those of CPUs stand beside what else the devices hold.
        """
        if not settings.offload_optimizer or not self._hosts:
            return True
        need: dict[str, float] = {}
        copies = len(draft) if settings.zero_stage else 1
        each_bytes = host_parameter_bytes(self._job.optimizer)
        for pipeline in draft:
            deepest = len(pipeline.stages) - 1
            for s, part in enumerate(pipeline.stages):
                own = updated_parameters(self._job, len(part.devices), part.layer_count, s == 0, s == deepest, copies)
                for name in part.devices:
                    node = self._cluster.device(name).node.name
                    beside = self._held_bytes(draft, pipeline, s, settings) if node in self._cpus else 0.0
                    need[node] = need.get(node, 0.0) + own * each_bytes + beside
        return all(num_bytes <= self._hosts.get(name, math.inf) for name, num_bytes in need.items())

    def capacity_bytes(self, devices: tuple[str, ...]) -> int:
        """The memory of the smallest of some devices."""
        return min(self._cluster.device(name).gpu.memory_bytes for name in devices)

    def stage(self, pipelines: int, degree: int, micro_batch: int, settings: Settings, first: bool, last: bool) -> StageBytes:
        """The bytes of a stage, of as many devices as `degree`, of one of some pipelines, at these ends of its pipeline."""
        only = first and last
        if settings.zero_stage == 0:
            pipelines = min(pipelines, FEW)  # nothing is divided over them
        key = (
            pipelines,
            degree,
            micro_batch,
            settings.zero_stage,
            settings.sequence_parallel,
            settings.offload_optimizer,
            settings.expert_parallel,
            settings.expert_tensor_parallel,
            settings.sequence_slices,
            settings.context_parallel,
            SCHEDULES[settings.schedule].splits_backward,
            only,
        )
        found = self._known.get(key)
        if found is None:
            if pipelines <= MANY:
                found = self._probed(pipelines, degree, micro_batch, settings, 1 if only else 3)
            else:
                ends = ((True, True),) if only else ((True, False), (False, False), (False, True))
                few, many = ([self.stage(count, degree, micro_batch, settings, *end) for end in ends] for count in (FEW, MANY))
                found = [_divided_further(one, other, pipelines) for one, other in zip(few, many, strict=True)]
            self._known[key] = found
        return found[0 if first else -1 if last else 1]

    def _probed(self, pipelines: int, degree: int, micro_batch: int, settings: Settings, depth: int) -> list[StageBytes]:
        """The bytes of each stage of pipelines of this depth."""
        names = _names()
        draft = tuple(
            Pipeline(
                micro_batch,
                1,
                tuple(stage([next(names) for _ in range(degree)], (s, s + 1), micro_batch) for s in range(depth)),
            )
            for _ in range(pipelines)
        )
        model = replace(self._job.model, name="probe", layers=depth)
        job = replace(self._job, model=model, global_batch=pipelines * micro_batch)
        # Under GPipe every micro-batch is in flight at once.
        plan = make_plan(self._cluster, job, draft, replace(settings, schedule="gpipe"))
        splits = SCHEDULES[settings.schedule].splits_backward
        rules = replace(rules_of(plan, self._cluster.stack), splits_backward=splits)
        return [_compared(rules, shape) for _, _, _, shape in islice(lane_shapes(plan), depth)]


def _compared(rules: MemoryRules, shape: LaneShape) -> StageBytes:
    """The bytes of a stage, from those of one with a layer and a micro-batch in flight, and of its like with more."""

    def totals(layers: int, mode: str) -> tuple[int, int]:
        """With so many layers in a mode, and with one micro-batch in flight or two."""
        none, pointwise, selective, full = (layers * (mode == one) for one in RECOMPUTE)
        like = shape._replace(none=none, pointwise=pointwise, selective=selective, full=full, shard=layers * shape.shard)
        more = like._replace(
            in_flight=2 * shape.in_flight,
            embedding_in_flight=2 * shape.embedding_in_flight,
            head_in_flight=2 * shape.head_in_flight,
        )
        return shape_parts(rules, like).total, shape_parts(rules, more).total

    one, one_twice = totals(1, "none")
    two, two_twice = totals(2, "none")
    kept = (two_twice - two) - (one_twice - one)
    flight = (one_twice - one) - kept
    layer = (two - one) - kept
    # The total of one layer less this is fixed, or the working memory of the mode: of one mode it does not matter which.
    rest = one - layer - flight - kept
    working = [0.0]
    modes_kept = [float(kept)]
    for once, twice in (totals(1, mode) for mode in RECOMPUTE[1:]):
        modes_kept.append(twice - once - flight)
        working.append(once - layer - flight - modes_kept[-1] - rest)
    least, slices = min(working), rules.sequence_slices  # all of a micro-batch are in flight here
    modes = tuple(ModeBytes(w - least, k / slices) for w, k in zip(working, modes_kept, strict=True))
    return StageBytes(rest + least, layer, flight / slices, modes)


def _divided_further(few: StageBytes, many: StageBytes, pipelines: int) -> StageBytes:
    """The bytes of a stage of one of some pipelines, from those of FEW and of MANY: what ZeRO divides goes with 1 / pipelines."""
    way = (1 / FEW - 1 / pipelines) / (1 / FEW - 1 / MANY)
    fixed, layer = few.fixed + (many.fixed - few.fixed) * way, few.layer + (many.layer - few.layer) * way
    return replace(many, fixed=fixed, layer=layer)


def _names() -> Iterator[str]:
    """Names of devices that are not looked up: memory depends on their number alone."""
    n = 0
    while True:
        yield f"probe/{n}"
        n += 1
