"""The planner that tries everything: the best plan of a small instance, by which tests measure the others.

The space is all plans of schedule 1F1B and ZeRO 1 with

- any part of the GPUs, in any grouping into pipelines, each a sequence of stages in any order;
- a stage of GPUs of one node, as many as the model's heads allow; sequence parallelism on or off where a stage has several;
- any cut of the layers, empty stages at the ends of a pipeline (embedding or head alone) included;
- micro-batches of one or two sequences, of each pipeline its own, and any division of the batch over the pipelines;
- recomputation of all layers or none, of each stage its own.

GPUs that the network cannot tell apart (of one node, PCIe switch and NIC) are interchangeable: of plans that differ by such an
exchange, or in the order of their pipelines, one is tried. The estimate judges; its ten best are left to the search's own judge.

Not every plan needs to be judged. The estimate only ever lengthens an iteration in which every transfer has its links to
itself, so that this iteration is a lower bound of it; that of a pipeline is computed for all its cuts and recomputations
at once, as a recursion over arrays, and what gradients and parameters take at the least after its backwards is added. Plans
come in order of their bound (best first), and the search ends where the next bound is above the tenth best estimate: branch
and bound (Land & Doig, 1960), whose answer is that of trying all.

Left out: other schedules and ZeRO stages, larger micro-batches, selective recomputation, recomputation of some layers of a
stage, tensor-parallel groups that span nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations_with_replacement, pairwise, product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from partition.drafts import Settings, fits_heads, make_plan, reject, stage, usable_nodes
from partition.search import Search, register
from sim.cost.collectives import between_lanes
from sim.cost.compute import ComputeCost
from sim.cost.estimate import estimation
from sim.cost.memory import lane_parts
from sim.cost.network import Network
from sim.cost.traffic import exchange, work
from sim.spec.compile import bucket_layers, lanes_of
from sim.spec.counts import PRECISION_BYTES, boundary_bytes
from sim.spec.judge import Cost
from sim.spec.plan import LayerRange, Pipeline, Plan
from sim.spec.program import Backward, Forward, GatherParameters, Lane, OptimizerStep, ReduceGradients
from sim.spec.reading import InputError
from sim.spec.schedules import SCHEDULES, in_flight

MOST_GPUS = 6
MOST_PLANS = 4_000_000_000
"""Largest instances: GPUs that have the job's precision, and plans of the space, symmetric ones counted once."""

MICRO_BATCHES = (1, 2)
MODES = ("none", "full")

FINALISTS = 10
"""How many of the best plans by estimate are judged by the search's own judge."""

KEPT_BYTES = 2**28
"""So much of the times of pipelines for all cuts and recomputations is kept for the next use."""

EXACT = 1 - 1e-9
"""Bounds are lowered by this, for they add up in another order than the estimate."""

Times: TypeAlias = NDArray[np.float64]
"""Seconds by [recomputation, cut] of a pipeline; either axis may be 1 where it does not matter."""

Devices: TypeAlias = tuple[str, ...]
Group: TypeAlias = tuple[tuple[int, int], ...]
"""The GPUs of a stage: how many (second) of which sort (first)."""
Line: TypeAlias = tuple[Group, ...]
"""The stages of a pipeline, in order."""
Share: TypeAlias = tuple[int, int]
"""What a pipeline takes of the batch: the size of its micro-batches and their number."""


@register("exhaustive", estimates=True)
def exhaustive(search: Search) -> None:
    """Has the ten fastest plans of the whole space judged, by estimate; a space that is too large is refused.

    Raises InputError there.
    """
    nodes = usable_nodes(search)
    if not nodes:
        return
    names = [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)]
    if len(names) > MOST_GPUS:
        raise InputError(f"exhaustive tries every plan on at most {MOST_GPUS} GPUs, but {search.cluster.name} has {len(names)}")
    space = Space(search, names)
    if space.size(MOST_PLANS) > MOST_PLANS:
        raise InputError(
            f"exhaustive tries at most {MOST_PLANS:,} plans, but {search.job.summary} on {len(names)} GPUs has more; fewer GPUs, "
            "fewer layers or a smaller global batch make fewer"
        )
    finalists = best_plans(search, space)
    if not finalists:
        reject(search, names)
    for _, plan in finalists:
        search.consider(plan)


# --- The space -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """The plans that differ in cuts and recomputation alone."""

    lines: tuple[Line, ...]
    shares: tuple[Share, ...]
    sequence_parallel: bool


class Space:
    """All plans of one job on some GPUs of one cluster, symmetric ones once."""

    def __init__(self, search: Search, names: Sequence[str]) -> None:
        self.cluster, self.job = search.cluster, search.job
        self.sorts = _sorts(search, names)
        """GPUs that are interchangeable, together."""

    def size(self, most: float = math.inf) -> int:
        """How many plans there are, those too that do not fit in memory; counting ends at more than `most`."""
        total = 0
        for family in self.families():
            total += self.count(family)
            if total > most:
                break
        return total

    def count(self, family: Family) -> int:
        """How many plans a family has."""
        total, alike = 1, 1
        for i, (line, share) in enumerate(zip(family.lines, family.shares, strict=True)):
            each = _variants(self.job.model.layers, len(line))
            alike = alike + 1 if i and (line, share) == (family.lines[i - 1], family.shares[i - 1]) else 1
            total = total * (each + alike - 1) // alike
        return total

    def families(self) -> Iterator[Family]:
        """All families."""
        for lines in self._groupings():
            degrees = {sum(count for _, count in group) for line in lines for group in line}
            parallel = degrees != {1} and all(self.job.sequence_length % degree == 0 for degree in degrees)
            for shares in _shares(lines, self.job.global_batch):
                for sequence_parallel in (False, True) if parallel else (False,):
                    yield Family(lines, shares, sequence_parallel)

    def _groupings(self) -> Iterator[tuple[Line, ...]]:
        """All sets of pipelines that the GPUs allow, each in one order."""
        groups, counts = self._groups(), tuple(len(sort) for sort in self.sorts)
        by_use: dict[tuple[int, ...], list[Line]] = {}

        def extend(line: Line, left: tuple[int, ...]) -> None:
            for group in groups:
                rest = _without(left, group)
                if rest is not None:
                    longer = (*line, group)
                    if _variants(self.job.model.layers, len(longer)):
                        by_use.setdefault(tuple(a - b for a, b in zip(counts, rest, strict=True)), []).append(longer)
                    extend(longer, rest)

        extend((), counts)
        uses = sorted(by_use, reverse=True)

        def choose(first: int, left: tuple[int, ...], pipelines: int) -> Iterator[tuple[Line, ...]]:
            for u in range(first, len(uses)):
                rest, times = left, 0
                while pipelines + times < self.job.global_batch:
                    rest = tuple(a - b for a, b in zip(rest, uses[u], strict=True))
                    if min(rest) < 0:
                        break
                    times += 1
                    for lines in combinations_with_replacement(by_use[uses[u]], times):
                        yield lines
                        for others in choose(u + 1, rest, pipelines + times):
                            yield (*lines, *others)

        yield from choose(0, counts, 0)

    def _groups(self) -> list[Group]:
        """All stages that the GPUs of a node can make."""
        by_node: dict[str, list[int]] = {}
        for i, sort in enumerate(self.sorts):
            by_node.setdefault(sort[0].rpartition("/")[0], []).append(i)
        found = []
        for sorts in by_node.values():
            for counts in product(*(range(len(self.sorts[i]) + 1) for i in sorts)):
                if sum(counts) and fits_heads(self.job, sum(counts)):
                    found.append(tuple((i, count) for i, count in zip(sorts, counts, strict=True) if count))
        return found

    def devices(self, lines: Sequence[Line]) -> list[list[Devices]]:
        """GPUs for each stage of some pipelines: of each sort the next ones."""
        used = [0] * len(self.sorts)
        found: list[list[Devices]] = []
        for line in lines:
            found.append([])
            for group in line:
                names: list[str] = []
                for sort, count in group:
                    names += self.sorts[sort][used[sort] : used[sort] + count]
                    used[sort] += count
                found[-1].append(tuple(names))
        return found

    def plan(self, family: Family, picks: Sequence[tuple[int, int]]) -> Plan:
        """A plan of a family, given the recomputation and the cut of each of its pipelines."""
        draft: list[Pipeline] = []
        for groups, (size, number), (mode, cut) in zip(self.devices(family.lines), family.shares, picks, strict=True):
            counts, stages, at = cuts(self.job.model.layers, len(groups))[cut], [], 0
            for s, (devices, count) in enumerate(zip(groups, counts, strict=True)):
                stages.append(stage(devices, (at, at + count), size, MODES[mode >> s & 1]))
                at += count
            draft.append(Pipeline(size, number, tuple(stages)))
        return make_plan(self.cluster, self.job, tuple(draft), Settings(sequence_parallel=family.sequence_parallel))


def _sorts(search: Search, names: Sequence[str]) -> list[Devices]:
    """GPUs by what tells them apart: node, PCIe switch and NIC, a bandwidth matrix over devices, speed, links of their own."""
    network, matrix = Network(search.cluster), search.cluster.bandwidth_matrix
    sorts: dict[object, list[str]] = {}
    for name in names:
        device = search.cluster.device(name)
        own = name if matrix is not None and name in matrix.names else None
        intra = device.node.intra
        switch = None if intra.is_nvlink else device.index // intra.gpus_per_switch
        lone = tuple(link.name for link in search.cluster.link_overrides if name in link.name.replace("=>", ">").split(">"))
        key = (device.node.name, switch, network.nic_of(name), own, device.speed, lone)
        sorts.setdefault(key, []).append(name)
    return [tuple(sort) for sort in sorts.values()]


def _without(left: tuple[int, ...], group: Group) -> tuple[int, ...] | None:
    """What is left of each sort of GPU without a group's; None where there are not as many."""
    rest = list(left)
    for sort, count in group:
        rest[sort] -= count
        if rest[sort] < 0:
            return None
    return tuple(rest)


@cache
def cuts(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """All layers of each stage of a pipeline; only a stage at an end may have none, and not the only one."""
    if stages == 1:
        return ((layers,),)
    found = []
    for first, last in product(range(layers + 1), repeat=2):
        for middle in _compositions(layers - first - last, stages - 2):
            found.append((first, *middle, last))
    return tuple(found)


@cache
def _variants(layers: int, stages: int) -> int:
    """How many cuts and recomputations a pipeline of so many stages has: a choice of two for each stage that has layers."""
    if stages == 1:
        return 2
    holding = {stages: 1, stages - 1: 2, stages - 2: 1}  # both ends may be empty
    return sum(ways * math.comb(layers - 1, held - 1) * 2**held for held, ways in holding.items() if held)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways of writing a total as a sum of so many positive parts, in order."""
    if parts == 0:
        if total == 0:
            yield ()
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def _shares(lines: Sequence[Line], global_batch: int) -> Iterator[tuple[Share, ...]]:
    """All divisions of the batch over some pipelines; equal pipelines, which stand beside each other, take theirs in order."""

    def divide(at: int, left: int, before: Share) -> Iterator[tuple[Share, ...]]:
        if at == len(lines):
            if left == 0:
                yield ()
            return
        for size in MICRO_BATCHES:
            for number in range(1, left // size + 1):
                share = (size, number)
                if at and lines[at] == lines[at - 1] and share < before:
                    continue
                for rest in divide(at + 1, left - size * number, share):
                    yield (share, *rest)

    yield from divide(0, global_batch, (0, 0))


# --- Lower bounds ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """One pipeline, with all its cuts and recomputations: of each stage the end of its last backward, and that backward."""

    ends_s: tuple[Times, ...]
    backward_s: tuple[Times, ...]


class Part(NamedTuple):
    """A stage, as far as its seconds and bytes depend on it: how many layers it holds, and which ends."""

    devices: Devices
    micro_batch: int
    sequence_parallel: bool
    layers: int
    first: bool
    last: bool
    mode: str = "none"


class Bounds:
    """Lower bounds of the estimate of the plans of a space. What it finds out of stages and links it keeps.

    Why they are bounds: every end in the estimate is the latest of earlier ends plus a duration, and sharing links only makes
    durations longer. Left out are waits alone: of transfers for others, of one pipeline for another but for what they
    exchange. That is taken as if it met no one, with those of the other pipelines' stages with which it is fastest, in the
    buckets that are fastest; and a backward that is divided into buckets takes no less than a whole one.
    """

    def __init__(self, space: Space) -> None:
        self.space, self.cluster, self.job = space, space.cluster, space.job
        self.network = Network(self.cluster)
        self.layers = self.job.model.layers
        # Without messages that keep stages it takes less.
        self._software = replace(self.cluster.stack, blocking_messages=False, message_s=0.0)
        self._per_bucket = min(self.layers, bucket_layers(self.job.model))
        self._plan = self._probed(Part(("probe",), 1, False, self.layers, True, True))[0]
        self.stage_s = cache(self._stage_s)
        self.optimizer_s = cache(self._optimizer_s)
        self.stage_bytes = cache(self._stage_bytes)
        self.message_s = cache(self._message_s)
        self.exchange_s = cache(self._exchange_s)
        self.exchanged_s = cache(self._exchanged_s)
        self.pace_s = cache(self._pace_s)
        self.sync_s = cache(self._sync_s)
        stages = min(sum(len(sort) for sort in space.sorts), self.layers)
        largest_bytes = 2 * 8 * stages * 2**stages * len(cuts(self.layers, stages))
        self.course = lru_cache(maxsize=max(1, KEPT_BYTES // largest_bytes))(self._course)
        self.fitting = lru_cache(maxsize=max(1, KEPT_BYTES // largest_bytes))(self._fitting)

    # --- Pieces ---

    def _probed(self, part: Part, copies: tuple[bool, ...] = (), flying: int = 1) -> tuple[Plan, int]:
        """A plan with a stage as asked for in its first pipeline, with so many micro-batches flying, and which stage it is.

        It has as many further pipelines as `copies`, which say whether these have several stages.
        """
        total, size, names = self.layers, part.micro_batch, (f"probe/{i}" for i in range(2 * MOST_GPUS))
        begin = 0 if part.first else total - part.layers if part.last else 0
        held, end = (begin, begin + part.layers), (total, total)
        pipelines = [[stage(part.devices, held, size, part.mode)]]
        if not part.first:
            pipelines[0].insert(0, stage([next(names)], (0, begin), size))
        if not part.last:
            pipelines[0].append(stage([next(names)], (held[1], total), size))
        for several in copies:
            pipelines.append([stage([next(names)], cut, size) for cut in ([(0, total), end] if several else [(0, total)])])
        draft = tuple(Pipeline(size, flying, tuple(stages)) for stages in pipelines)
        job = replace(self.job, global_batch=len(draft) * size * flying)
        # Under GPipe every micro-batch is in flight at once.
        settings = Settings(schedule="gpipe", sequence_parallel=part.sequence_parallel)
        return make_plan(self.cluster, job, draft, settings), 0 if part.first else 1

    def _stage_s(self, part: Part) -> tuple[float, float]:
        """Seconds of a forward and of a backward of a stage, with its links to itself."""
        plan, at = self._probed(part)
        cost, lane = ComputeCost(plan, self.cluster, stack=self._software), lanes_of(plan)[0][at]
        forward, backward = (
            work(self.network, cost, lane, kind(0, lane.layers[0])).alone_s(self.network) for kind in (Forward, Backward)
        )
        return forward, backward

    def _optimizer_s(self, part: Part, copies: tuple[bool, ...]) -> float:
        """Seconds of the optimizer's step on a stage."""
        plan, at = self._probed(part, copies)
        return ComputeCost(plan, self.cluster).seconds(lanes_of(plan)[0][at], OptimizerStep())

    def _stage_bytes(self, part: Part, copies: tuple[bool, ...], flying: int) -> int:
        """Bytes at the peak on each device of a stage."""
        plan, at = self._probed(part, copies, flying)
        return next(parts.total for p, s, _, parts in lane_parts(plan, self.cluster.stack) if (p, s) == (0, at))

    def _message_s(self, sender: Devices, receiver: Devices, size: int, sequence_parallel: bool) -> tuple[float, float]:
        """Seconds of a message on its links, and of latency after them."""
        num_bytes = boundary_bytes(self.job.model, size, self.job.sequence_length, PRECISION_BYTES[self.job.precision])
        transfer = between_lanes(self.network, sender, receiver, num_bytes, sequence_parallel)
        return self.network.busiest_s(transfer), transfer.latency_s

    def _exchange_s(self, members: tuple[Devices, ...], layers: LayerRange, gather: bool) -> float:
        """Seconds of a reduction of gradients, or of a gather of parameters, alone on its links."""
        lanes = [
            Lane(f"p{p}", p, 0, 0, devices, (layers,), (0, 1), 1, embedding=False, head=False)
            for p, devices in enumerate(members)
        ]
        instruction = GatherParameters(layers) if gather else ReduceGradients(layers)
        return self.network.alone_s(exchange(self.network, self._plan, instruction, lanes))

    # --- One pipeline ---

    def _course(self, line: Line, share: Share, sequence_parallel: bool) -> Course:
        """The course of a pipeline whose transfers have their links to themselves."""
        (groups,), depth = self.space.devices([line]), len(line)
        held, full = _held(self.layers, depth)
        size, number = share
        forward, backward = [], []
        for s, devices in enumerate(groups):
            seconds = np.full((3, self.layers + 1), math.inf)
            for part in self._parts(devices, size, sequence_parallel, s, depth):
                plain, again = self.stage_s(part), self.stage_s(part._replace(mode="full"))
                seconds[:, part.layers] = *plain, again[1]
            forward.append(seconds[0, held[s]][None, :])
            backward.append(seconds[1 + full[s][:, None], held[s][None, :]])
        there = [self.message_s(a, b, size, sequence_parallel) for a, b in pairwise(groups)]
        back = [self.message_s(b, a, size, sequence_parallel) for a, b in pairwise(groups)]
        ends: list[Times] = [np.zeros((1, 1))] * depth
        queues: dict[tuple[int, bool], Times] = {}
        arrived: dict[tuple[int, bool, int], Times] = {}
        for s, ahead, m in _steps(depth, number):
            came = arrived.pop((s, ahead, m), None)
            start = ends[s] if came is None else np.maximum(ends[s], came)
            end = ends[s] = start + (forward[s] if ahead else backward[s])
            to = s + 1 if ahead else s - 1
            if 0 <= to < depth:
                wire_s, latency_s = there[s] if ahead else back[to]
                queue = queues.get((s, ahead))
                sent = queues[s, ahead] = (end if queue is None else np.maximum(end, queue)) + wire_s
                arrived[to, ahead, m] = sent + latency_s
        return Course(tuple(ends), tuple(backward))

    def _fitting(self, line: Line, share: Share, sequence_parallel: bool, copies: tuple[bool, ...]) -> NDArray[np.bool_]:
        """Which cuts and recomputations of a pipeline fit in memory; stages without layers recompute nothing."""
        (groups,), depth = self.space.devices([line]), len(line)
        held, full = _held(self.layers, depth)
        fits = np.ones((full.shape[1], held.shape[1]), dtype=bool)
        for s, devices in enumerate(groups):
            capacity = min(self.cluster.device(name).gpu.memory_bytes for name in devices)
            flying = int(in_flight("1f1b", depth, s, share[1]))
            room = np.zeros((2, self.layers + 1), dtype=bool)
            for part in self._parts(tuple(f"gpu/{i}" for i in range(len(devices))), share[0], sequence_parallel, s, depth):
                for mode in range(2 if part.layers else 1):
                    room[mode, part.layers] = self.stage_bytes(part._replace(mode=MODES[mode]), copies, flying) <= capacity
            fits &= room[full[s][:, None], held[s][None, :]]
        return fits

    def _parts(self, devices: Devices, size: int, sequence_parallel: bool, s: int, depth: int) -> Iterator[Part]:
        """A stage of a pipeline with every number of layers that it can hold."""
        first, last = s == 0, s == depth - 1
        for n in sorted({cut[s] for cut in cuts(self.layers, depth)}):
            yield Part(devices, size, sequence_parallel, n, first, last)

    # --- Families ---

    def floor_s(self, family: Family) -> float:
        """A bound of all plans of a family, found more quickly than theirs."""
        sync_s = self.sync_s(family.lines) if len(family.lines) > 1 else 0.0
        paces = (self.pace_s(*one, family.sequence_parallel) for one in zip(family.lines, family.shares, strict=True))
        return max(sync_s, *paces) * EXACT

    def _pace_s(self, line: Line, share: Share, sequence_parallel: bool) -> float:
        """The least seconds of a pipeline: the work of a stage, what comes before its first and after its last."""
        (groups,), depth = self.space.devices([line]), len(line)
        held, _ = _held(self.layers, depth)
        size, number = share
        before = longest = np.zeros(1)
        for s, devices in enumerate(groups):
            both = np.full(self.layers + 1, math.inf)
            for part in self._parts(devices, size, sequence_parallel, s, depth):
                both[part.layers] = sum(self.stage_s(part))
            longest = np.maximum(longest, before + number * both[held[s]])
            if s + 1 < depth:
                there = self.message_s(devices, groups[s + 1], size, sequence_parallel)
                back = self.message_s(groups[s + 1], devices, size, sequence_parallel)
                before = before + both[held[s]] + sum(there) + sum(back)
        return float(longest.min())

    def _sync_s(self, lines: tuple[Line, ...]) -> float:
        """The least seconds of the exchanges of the layers of some pipelines; a lane's follow one another."""
        groups = self.space.devices(lines)
        longest = 0.0
        for p, line in enumerate(lines):
            held, _ = _held(self.layers, len(line))
            ends_s = np.zeros(held.shape[1])
            for s, devices in enumerate(groups[p]):
                lanes = _with(groups, p, devices)
                for_layers_s = self.exchanged_s(lanes, False)[0] + self.exchanged_s(lanes, True)[0]
                ends_s = np.maximum(ends_s, for_layers_s[held[s]])
            longest = max(longest, float(ends_s.min()))
        return longest

    def of(self, family: Family) -> list[Times]:
        """For each pipeline of a family, the bounds of the plans with this cut and recomputation of it; infinite: no memory.

        The bound of a plan is the largest of those of its pipelines.
        """
        found = []
        # Where embedding and head are tied, a pipeline of several stages holds the embedding twice.
        several = [len(line) > 1 and self.job.model.tied_embeddings for line in family.lines]
        groups = self.space.devices(family.lines)
        for p, (line, share) in enumerate(zip(family.lines, family.shares, strict=True)):
            copies = tuple(sorted(several[:p] + several[p + 1 :]))
            fits = self.fitting(line, share, family.sequence_parallel, copies)
            if not fits.any():
                found.append(np.full(fits.shape, math.inf))
                continue
            course = self.course(line, share, family.sequence_parallel)
            bound = np.zeros((1, 1))
            for s in range(len(line)):
                bound = np.maximum(bound, self._stage_end_s(family, groups, copies, course, p, s))
            found.append(np.where(fits, bound * EXACT, math.inf))
        return found

    def _stage_end_s(
        self,
        family: Family,
        groups: Sequence[Sequence[Devices]],
        copies: tuple[bool, ...],
        course: Course,
        p: int,
        s: int,
    ) -> Times:
        """When a stage can at the earliest have ended its last gather of parameters, or its optimizer's step."""
        devices, depth = groups[p][s], len(groups[p])
        first, last = s == 0, s == depth - 1
        held, full = _held(self.layers, depth)
        steps = np.full(self.layers + 1, math.inf)
        for part in self._parts(devices, 1, False, s, depth):
            steps[part.layers] = self.optimizer_s(part, copies)
        step_s, end_s = steps[held[s]][None, :], course.ends_s[s]
        done: Times = end_s + step_s
        if not copies:
            return done
        lanes = _with(groups, p, devices)
        (reduced, least), (gathered, _) = self.exchanged_s(lanes, False), self.exchanged_s(lanes, True)
        # Head and embedding; where they are tied, others take part as well.
        ends = []
        for here, place, layers in ((first, 0, (0, 0)), (last, -1, (self.layers, self.layers))):
            members = tuple(stages[place] for stages in groups)
            counts = here and not self.job.model.tied_embeddings
            ends.append([self.exchange_s(members, layers, gather) if counts else 0.0 for gather in (False, True)])
        (embedding_s, embedding_gather_s), (head_s, head_gather_s) = ends
        # The backward of the last micro-batch begins its reductions after its first part, of a layer or more.
        middle = Part(devices, family.shares[p][0], family.sequence_parallel, 1, False, False)
        layer_s = [self.stage_s(middle._replace(mode=mode))[1] - self.cluster.stack.micro_batch_s for mode in MODES]
        begun = end_s - course.backward_s[s] + np.maximum(layer_s, 0.0)[full[s]][:, None]
        all_s = np.where(held[s] > 0, begun + (head_s + embedding_s + reduced[held[s]])[None, :], 0.0)
        last_s = end_s + (embedding_s + np.where(held[s] > 0, least, head_s))[None, :]
        done = np.maximum(all_s, last_s) + step_s + (gathered[held[s]] + embedding_gather_s + head_gather_s)[None, :]
        return done

    def _exchanged_s(self, lanes: tuple[tuple[Devices, ...], ...], gather: bool) -> tuple[Times, float]:
        """The least seconds of the exchanges of so many layers (by index), and of any one, with any stages of the others."""
        each = [
            min(self.exchange_s(members, (0, n), gather) for members in product(*lanes)) for n in range(1, self._per_bucket + 1)
        ]
        least = np.zeros(self.layers + 1)
        for n in range(1, self.layers + 1):
            least[n] = min(seconds + least[n - k] for k, seconds in enumerate(each, 1) if k <= n)
        return least, min(each)


def _with(groups: Sequence[Sequence[Devices]], p: int, devices: Devices) -> tuple[tuple[Devices, ...], ...]:
    """The stages of some pipelines, of pipeline p this one alone."""
    return tuple((devices,) if q == p else tuple(stages) for q, stages in enumerate(groups))


@cache
def _held(layers: int, stages: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The layers of a pipeline's stages by [stage, cut], and whether (1) a stage recomputes by [stage, recomputation]."""
    held = np.array(cuts(layers, stages), dtype=np.int64).T
    full = np.array([[mode >> s & 1 for mode in range(2**stages)] for s in range(stages)], dtype=np.int64)
    return held, full


@cache
def _steps(depth: int, micro_batches: int) -> tuple[tuple[int, bool, int], ...]:
    """The forwards (True) and backwards of all stages, by stage and micro-batch, each after those that it waits for."""
    orders = [list(SCHEDULES["1f1b"].order(depth, s, 1, micro_batches)) for s in range(depth)]
    done: dict[tuple[int, bool, int], None] = {}
    at = [0] * depth
    while any(at[s] < len(orders[s]) for s in range(depth)):
        for s in range(depth):
            while at[s] < len(orders[s]):
                step = orders[s][at[s]]
                ahead = step.kind is Forward
                before = s - 1 if ahead else s + 1
                if 0 <= before < depth and (before, ahead, step.micro_batch) not in done:
                    break
                done[s, ahead, step.micro_batch] = None
                at[s] += 1
    return tuple(done)


# --- The search ------------------------------------------------------------------------------------------------------


def best_plans(search: Search, space: Space, most: int = FINALISTS) -> list[tuple[float, Plan]]:
    """The plans with the smallest estimates, in seconds, the best first; fewer where there are fewer that run.

    The first that is found is judged by the search at once, so that a search that is cut has an answer.
    """
    judge, bounds = estimation(search.cluster, search.job), Bounds(space)
    queue: list[tuple[float, int, Family, _Ordered | None]] = []
    for i, family in enumerate(space.families()):
        search.check_budget()
        queue.append((bounds.floor_s(family), i, family, None))
    heapq.heapify(queue)
    best: list[tuple[float, Plan]] = []
    limit_s = math.inf
    while queue and queue[0][0] <= limit_s:
        search.check_budget()
        _, i, family, plans = queue[0]
        if plans is None:
            plans = _Ordered(bounds.of(family), family, limit_s)
        # Of a family that has only now been opened the best plan is judged before its turn, which lowers the limit early.
        if math.isfinite(plans.bound_s()):
            plan = space.plan(family, plans.next())
            verdict = judge(plan)
            if isinstance(verdict, Cost):
                if not best:
                    search.consider(plan)
                best = sorted([*best, (verdict.iteration_s, plan)], key=lambda entry: entry[0])[:most]
                limit_s = best[-1][0] if len(best) == most else math.inf
        if math.isfinite(plans.bound_s()):
            heapq.heapreplace(queue, (plans.bound_s(), i, family, plans))
        else:
            heapq.heappop(queue)
    return best


class _Ordered:
    """The plans of a family whose bound is at most a limit, in order of their bounds."""

    def __init__(self, bounds: list[Times], family: Family, limit_s: float) -> None:
        self._shapes = [times.shape for times in bounds]
        flat = [times.ravel() for times in bounds]
        kept = [np.flatnonzero(times <= limit_s) for times in flat]
        joint = np.zeros(())
        for times, places in zip(flat, kept, strict=True):
            joint = np.maximum(joint[..., None], times[places])
        wanted = np.isfinite(joint)
        lines = list(zip(family.lines, family.shares, strict=True))
        for p in range(1, len(lines)):
            if lines[p] == lines[p - 1]:  # of equal pipelines, the order does not matter
                shape = [1] * len(lines)
                shape[p - 1], shape[p] = len(kept[p - 1]), len(kept[p])
                wanted &= (kept[p - 1][:, None] <= kept[p][None, :]).reshape(shape)
        flat_joint = joint.ravel()
        chosen = np.flatnonzero(wanted.ravel())
        self._order = chosen[np.argsort(flat_joint[chosen], kind="stable")]
        self._bounds = flat_joint[self._order]
        self._kept, self._size, self._at = kept, joint.shape, 0

    def bound_s(self) -> float:
        """The bound of the next plan; infinite where there is none."""
        return float(self._bounds[self._at]) if self._at < len(self._bounds) else math.inf

    def next(self) -> list[tuple[int, int]]:
        """The recomputation and the cut of each pipeline of the next plan."""
        places = np.unravel_index(self._order[self._at], self._size)
        self._at += 1
        picks = []
        for kept, place, shape in zip(self._kept, places, self._shapes, strict=True):
            mode, cut = np.unravel_index(kept[place], shape)
            picks.append((int(mode), int(cut)))
        return picks
