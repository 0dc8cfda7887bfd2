"""Pipette's planner: for every grid that fits in memory, the placement of the workers that its latency model likes best.

Source: Yim et al. (2024), Pipette: Automatic Fine-grained Large Language Model Training Configurator for Real-World Clusters,
DATE 2024, arXiv:2405.18093. As there: the grids of pipeline, tensor and data parallelism and micro-batch sizes are enumerated;
those that do not fit in memory are discarded; simulated annealing over the permutation of the workers (migrate one, swap two,
reverse a run) looks for the placement of each grid of the lowest latency over the measured bandwidths between workers; and the
latency of 1F1B counts its hidden critical path. A stage holds at most as many micro-batches as there are stages, p, so that
every p of the m micro-batches make a round trip of the pipeline, and pay for all its links:

    latency = m / p x (p C + T_PP) + (p - 1) C + T_DP
    C       forward and backward of one micro-batch on a stage, with its tensor-parallel collectives
    T_PP    messages of one micro-batch there and back, summed over the links of the slowest pipeline
    T_DP    all-reduce of the first stage's gradients, which are complete last, in hierarchical rings:
            4 (n - 1) / n x bytes / slowest link inside a node, among the n replicas of a node, and
            2 (n - 1) / n x bytes / slowest link between nodes, among the n nodes

Done otherwise: memory is checked exactly, where the paper trains a network to predict it. C is that of the slowest stage where
stages differ, in layers, ends or GPUs (all are alike in the paper). Of fewer micro-batches than stages only as many count in
(p - 1) C. A message to a stage and the answer of it are priced each in its own direction. A worker that is moved is a
tensor-parallel group (the published program moves whole nodes, as `ranked` can), which lies inside a node, so that the
all-reduce links and messages of its GPUs are priced together; two nodes are measured by one pair of their workers, unless the
cluster's matrix is one of GPUs. Annealing begins with the ranks of
Megatron-LM, makes a number of steps instead of going on for some seconds, and skips a grid that would lose even if all its links
were the fastest there are; of the grids left, the ten of lowest latency are judged. Layers are cut as evenly as possible where
they do not divide. On mixed clusters homogeneous parts are tried too, as by `partition.planners.megatron`. Layers are
recomputed in full, as Megatron-LM of that time can, where a grid does not fit otherwise.

Left out, because the paper's plans have none of it: unequal layer cuts, pipelines that differ, ZeRO, sequence parallelism,
interleaved schedules, and links that several messages share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from partition.drafts import Draft, Settings, all_under, degrees, judge_in_order, reject, stage, usable_nodes
from partition.layers import even_split, ranges
from partition.planners.megatron import MICRO_BATCHES, parts
from partition.pricing import Pricing
from partition.room import Room
from partition.search import Search, register
from sim.spec.cluster import Node
from sim.spec.counts import PRECISION_BYTES, embedding_parameters, layer_parameters
from sim.spec.job import Job
from sim.spec.plan import Pipeline
from sim.spec.schedules import in_flight

SETTINGS = Settings(zero_stage=0, sequence_parallel=False)
RECOMPUTE_MODES = ("none", "full")
"""The first under which a grid fits is taken."""

JUDGED = 10
"""So many grids of lowest latency are judged."""
STEPS = 2000
"""Steps of annealing for each grid."""
HOT, COLD = 0.5, 1e-3
"""Temperature of the first and of the last step, as the fraction of the latency that a worse placement costs more."""

Seconds: TypeAlias = NDArray[np.float64]
Order: TypeAlias = NDArray[np.int64]
"""The worker in each place of a grid: stage by stage, and in each the replicas."""


# --- The latency model -----------------------------------------------------------------------------------------------


def critical_path_s(stages: int, micro_batches: int, stage_s: float, messages_s: float) -> float:
    """Seconds of 1F1B without gradient exchange: `stage_s` a micro-batch on each stage, `messages_s` its messages altogether.

    Source: Pipette (arXiv:2405.18093); see the head of this file.
    """
    rounds = max(micro_batches / stages, 1.0)
    return rounds * (stages * stage_s + messages_s) + (min(micro_batches, stages) - 1) * stage_s


def all_reduce_s(num_bytes: float, in_node: int, nodes: int, inside_s_per_byte: float, between_s_per_byte: float) -> float:
    """Seconds of an all-reduce in hierarchical rings, of so many replicas in a node on so many nodes, over the slowest links."""
    inside = 4 * (in_node - 1) / in_node * inside_s_per_byte
    return num_bytes * (inside + 2 * (nodes - 1) / nodes * between_s_per_byte)


class Workers:
    """The tensor-parallel groups of one degree on some nodes, and what is measured between and on them.

    Arrays are by worker, or [sender, receiver].
    """

    def __init__(self, pricing: Pricing, nodes: Sequence[Node], degree: int) -> None:
        cluster = pricing.cluster
        self.devices = [
            tuple(f"{node.name}/{index}" for index in range(at, at + degree))
            for node in nodes
            for at in range(0, node.gpus, degree)
        ]
        self.node = np.array([n for n, node in enumerate(nodes) for _ in range(node.gpus // degree)])
        self.memory_bytes = np.array([cluster.device(names[0]).gpu.memory_bytes for names in self.devices], dtype=np.float64)
        matrix = cluster.bandwidth_matrix
        self._each = matrix is not None and "/" in matrix.names[0]
        self._pricing = pricing
        # An activation arrives whole on every GPU; of a gradient every GPU has its own part.
        self.message_latency_s, self.message_s_per_byte = self._measured(Settings(sequence_parallel=False))
        _, self.gradient_s_per_byte = self._measured(Settings(sequence_parallel=True))

    def __len__(self) -> int:
        return len(self.devices)

    def _measured(self, settings: Settings) -> tuple[Seconds, Seconds]:
        """Latency, and seconds per byte, of a message between each two workers."""
        count = len(self)
        latency_s, s_per_byte = np.zeros((count, count)), np.zeros((count, count))
        blocks = [np.flatnonzero(self.node == n) for n in range(self.node[-1] + 1)]
        for a, rows in enumerate(blocks):
            for b, columns in enumerate(blocks):
                if a != b and not self._each:
                    message = self._pricing.message(self.devices[rows[0]], self.devices[columns[0]], settings)
                    latency_s[np.ix_(rows, columns)] = message.latency_s
                    s_per_byte[np.ix_(rows, columns)] = message.s_per_byte
                    continue
                for u in rows:
                    for v in columns:
                        if u != v:
                            message = self._pricing.message(self.devices[u], self.devices[v], settings)
                            latency_s[u, v], s_per_byte[u, v] = message.latency_s, message.s_per_byte
        return latency_s, s_per_byte

    def seconds(self, of: Callable[[tuple[str, ...]], float]) -> Seconds:
        """What is measured on each worker, one of each node standing for the others there."""
        found: dict[int, float] = {}
        for names, node in zip(self.devices, self.node, strict=True):
            if int(node) not in found:
                found[int(node)] = of(names)
        return np.array([found[int(node)] for node in self.node])


class Grid:
    """One grid on some workers: p stages of d replicas, one micro-batch size, and the seconds of each placement."""

    def __init__(self, workers: Workers, pricing: Pricing, room: Room, pipeline: int, micro_batch: int, recompute: str) -> None:
        job = pricing.job
        self.workers, self.pipeline, self.micro_batch, self.recompute = workers, pipeline, micro_batch, recompute
        self.data = len(workers) // pipeline
        self.micro_batches = job.global_batch // (self.data * micro_batch)
        self.cuts = ranges(even_split(job.model.layers, pipeline))
        layers = [stop - start for start, stop in self.cuts]
        self.need_bytes, stage_s = [], []
        for s, held in enumerate(layers):
            first, last, counts = s == 0, s == pipeline - 1, all_under(recompute, held)
            # Without ZeRO a stage of two replicas takes as much as one of many.
            bytes_of = room.stage(min(self.data, 2), len(workers.devices[0]), micro_batch, SETTINGS, first, last)
            flying = in_flight(SETTINGS.schedule, pipeline, s, self.micro_batches)
            self.need_bytes.append(bytes_of.total(flying, counts))

            def took_s(
                names: tuple[str, ...],
                held: int = held,
                counts: tuple[int, ...] = counts,
                first: bool = first,
                last: bool = last,
            ) -> float:
                seconds = pricing.stage(names, micro_batch, SETTINGS)
                return seconds.forward_s(held, first, last) + seconds.backward_s(counts, first, last)

            stage_s.append(workers.seconds(took_s))
        self._stage_s = np.array(stage_s)  # [stage, worker]
        self._needs = np.array(self.need_bytes)[:, None]
        self._stages = np.arange(pipeline)[:, None]
        self._roomy = max(self.need_bytes) <= workers.memory_bytes.min()
        one_way_s = workers.message_latency_s + workers.message_s_per_byte * pricing.activation_bytes(micro_batch)
        self._there_and_back_s = one_way_s + one_way_s.T
        self._known: dict[bytes, float] = {}
        """Seconds of all-reduces, by the workers that take part."""
        parameters = layers[0] * layer_parameters(job.model) + embedding_parameters(job.model)
        self._gradient_bytes = PRECISION_BYTES[job.gradient_precision] * parameters

    @property
    def start(self) -> Order | None:
        """The ranks of Megatron-LM; where those do not fit, most memory where most is needed; None if that does not either."""
        order = np.arange(len(self.workers), dtype=np.int64)
        if self.fits(order):
            return order
        hungriest = np.argsort(-np.repeat(self.need_bytes, self.data), kind="stable")
        order[hungriest] = np.argsort(-self.workers.memory_bytes, kind="stable")
        return order if self.fits(order) else None

    def fits(self, order: Order) -> bool:
        """Whether each worker has the memory of its stage."""
        if self._roomy:
            return True
        return bool((self.workers.memory_bytes[order.reshape(self.pipeline, self.data)] >= self._needs).all())

    def latency_s(self, order: Order) -> float:
        """The latency of a placement, infinite where it does not fit."""
        if not self.fits(order):
            return math.inf
        places = order.reshape(self.pipeline, self.data)
        stage_s = float(self._stage_s[self._stages, places].max())
        messages_s = float(self._there_and_back_s[places[:-1], places[1:]].sum(axis=0).max())
        return critical_path_s(self.pipeline, self.micro_batches, stage_s, messages_s) + self._gradients_s(places[0])

    def _gradients_s(self, replicas: Order) -> float:
        """Seconds of the all-reduce of the first stage's gradients."""
        if self.data == 1:
            return 0.0
        ring = np.sort(replicas)  # workers are numbered node by node
        known = self._known.get(ring.tobytes())
        if known is not None:
            return known
        after = np.roll(ring, -1)
        node = self.workers.node[ring]
        inside = node == self.workers.node[after]
        s_per_byte = self.workers.gradient_s_per_byte[ring, after]
        found = self._known[ring.tobytes()] = all_reduce_s(
            self._gradient_bytes,
            int(np.bincount(node).max()),
            max(1, int((~inside).sum())),
            float(s_per_byte[inside].max(initial=0.0)),
            float(s_per_byte[~inside].max(initial=0.0)),
        )
        return found

    @property
    def least_s(self) -> float:
        """A latency that no placement is below: the workers are in their best places, and gradients cost nothing."""
        stage_s = float(self._stage_s.min(axis=0).max())
        messages_s = 0.0
        if self.pipeline > 1:
            others = ~np.eye(len(self.workers), dtype=bool)
            messages_s = (self.pipeline - 1) * float(self._there_and_back_s[others].min())
        return critical_path_s(self.pipeline, self.micro_batches, stage_s, messages_s)

    def draft(self, order: Order) -> Draft:
        """The pipelines of a placement."""
        places = order.reshape(self.pipeline, self.data)
        devices = self.workers.devices
        return tuple(
            Pipeline(
                self.micro_batch,
                self.micro_batches,
                tuple(stage(devices[places[s, d]], cut, self.micro_batch, self.recompute) for s, cut in enumerate(self.cuts)),
            )
            for d in range(self.data)
        )


# --- The annealing ---------------------------------------------------------------------------------------------------


def anneal(cost: Callable[[Order], float], start: Order, rng: np.random.Generator, steps: int = STEPS) -> tuple[Order, float]:
    """The best permutation that simulated annealing found from `start`, and its cost, which at the start must be finite."""
    order, cost_now = start, cost(start)
    best, cost_best = order, cost_now
    count = len(start)
    if count < 2:
        return best, cost_best
    cooling = (COLD / HOT) ** (1 / max(1, steps - 1))
    temperature = HOT
    # Drawn all at once, which is faster: kinds of move, first places, other places, chances.
    moves, places = rng.integers(3, size=steps).tolist(), rng.integers(count, size=steps).tolist()
    others, chances = rng.integers(count - 1, size=steps).tolist(), rng.random(steps).tolist()
    for move, i, j, chance in zip(moves, places, others, chances, strict=True):
        changed = _neighbour(order, move, i, j + (j >= i))
        cost_new = cost(changed)
        # Equal placements are many, for workers of a node are alike, and are walked over freely.
        if cost_new <= cost_now or chance < math.exp((cost_now - cost_new) / (cost_now * temperature)):
            order, cost_now = changed, cost_new
            if cost_now < cost_best:
                best, cost_best = order, cost_now
        temperature *= cooling
    return best, cost_best


def _neighbour(order: Order, move: int, i: int, j: int) -> Order:
    """The order with one worker migrated from place i to j, the two there swapped, or the run between them reversed."""
    changed = order.copy()
    low, high = min(i, j), max(i, j)
    if move == 0:
        changed[[i, j]] = order[[j, i]]
    elif move == 1:
        changed[low : high + 1] = order[low : high + 1][::-1]
    elif i < j:
        changed[i:j], changed[j] = order[i + 1 : j + 1], order[i]
    else:
        changed[j + 1 : i + 1], changed[j] = order[j:i], order[i]
    return changed


def anneal_workers(grid: Grid, start: Order, rng: np.random.Generator, steps: int) -> tuple[Order, float]:
    """The best placement that was found of the workers one by one, and its latency."""
    return anneal(grid.latency_s, start, rng, steps)


def anneal_nodes(grid: Grid, start: Order, rng: np.random.Generator, steps: int) -> tuple[Order, float]:
    """The best placement that was found of whole nodes, and its latency; `start` where their ranks do not fit in memory."""
    blocks = [np.flatnonzero(grid.workers.node == n) for n in range(int(grid.workers.node[-1]) + 1)]

    def laid(nodes: Order) -> Order:
        return np.concatenate([blocks[n] for n in nodes])

    ranks = np.arange(len(blocks), dtype=np.int64)
    if not grid.fits(laid(ranks)):
        return start, grid.latency_s(start)
    best, latency_s = anneal(lambda nodes: grid.latency_s(laid(nodes)), ranks, rng, steps)
    return laid(best), latency_s


# --- The planner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A grid in the best placement that was found, with its latency."""

    latency_s: float
    grid: Grid
    order: Order


@register("pipette")
def pipette(search: Search) -> None:
    """Anneals the placement of every grid that fits and may win, and has the placements of lowest latency judged."""
    nodes = usable_nodes(search)
    if not nodes:
        return
    best_first = ranked(search, nodes)
    if not best_first:
        reject(search, [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)])
    judge_in_order(search, ((entry.grid.draft(entry.order), SETTINGS) for entry in best_first[:JUDGED]))


def ranked(search: Search, nodes: Sequence[Node], steps: int = STEPS, whole_nodes: bool = False) -> list[Placed]:
    """Every grid that fits and may win, in the best placement of so many steps of annealing, the one of lowest latency first.

    With `whole_nodes` nodes change places, with all their workers, as in the published program.
    """
    starts = [(grid.least_s, n, grid, start) for n, (grid, start) in enumerate(_grids(search, nodes))]
    placed: list[Placed] = []
    best_s = math.inf
    for least_s, _, grid, start in sorted(starts, key=lambda entry: entry[:2]):
        if least_s > best_s and len(placed) >= JUDGED:
            break
        search.check_budget()
        order, latency_s = (anneal_nodes if whole_nodes else anneal_workers)(grid, start, search.rng, steps)
        placed.append(Placed(latency_s, grid, order))
        best_s = min(best_s, latency_s)
    return sorted(placed, key=lambda entry: entry.latency_s)


def _grids(search: Search, nodes: Sequence[Node]) -> Iterator[tuple[Grid, Order]]:
    """All grids that fit, on all parts of the cluster, with a placement that fits."""
    pricing, room, job = Pricing(search.cluster, search.job), Room(search.cluster, search.job), search.job
    for part in parts(nodes):
        for degree in degrees(job, math.gcd(*(node.gpus for node in part))):
            search.check_budget()
            workers = Workers(pricing, part, degree)
            for pipeline, micro_batch in shapes(job, len(workers)):
                tried = (Grid(workers, pricing, room, pipeline, micro_batch, mode) for mode in RECOMPUTE_MODES)
                fitting = ((grid, start) for grid in tried if (start := grid.start) is not None)
                yield from islice(fitting, 1)


def shapes(job: Job, workers: int) -> Iterator[tuple[int, int]]:
    """Stages and micro-batch sizes that divide so many workers and the batch."""
    for pipeline in range(1, min(job.model.layers, workers) + 1):
        if workers % pipeline == 0:
            for micro_batch in MICRO_BATCHES:
                if job.global_batch % (workers // pipeline * micro_batch) == 0:
                    yield pipeline, micro_batch
