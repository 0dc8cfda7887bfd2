"""The planner that cuts a sequence of GPUs into stages, and balances layers over the stages and data inside each of them.

After Metis (Um et al., USENIX ATC 2024). The kinds of GPU are put in a sequence, in every order. A sequence is cut into stages,
device groups whose sizes are powers of two; a group may hold several kinds. For each way to cut it, and each size of the
micro-batches that divides the batch:

    1  Inside a stage, data parallelism comes first: every GPU is a replica. While stages do not fit in memory, the one that
       lacks the most has half as many replicas, of twice the tensor-parallel degree.
    2  Each micro-batch is divided over the replicas of a stage by their speed, so that they end together.
    3  Layers are divided over the stages by their speed and, where memory binds, by that.
    4  The estimate of an iteration: a micro-batch through all stages, the period of the pipeline for each further one, and
       the exchange of gradients.

The search is pruned as there: groups have at least LEAST_SHARE of the mean size, at most a few blocks of a cut are permuted
(equal groups are joined to blocks), and the way from data to tensor parallelism ends where memory no longer binds. Besides,
cuts are tried in the order of what they take at least, up to a number, and the way ends where it is too slow whatever fits.

Done otherwise than there. Both divisions are the best in whole numbers, not rounded ones. The estimate counts messages in the
period, and lets stages that share a network card add up; the plans that are best by it are ranked anew by `sim.cost.estimate`
before they are judged. Tensor-parallel groups do not span nodes. Recomputation and ZeRO, which Metis takes as given, are tried
for the whole plan. Left out: the profiler, and batches of any size but the job's. All GPUs are used and micro-batches divide the
batch, so that where the batch has few divisors there may be no plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby, islice, pairwise, permutations

from partition.drafts import (
    FEWEST_JUDGED,
    GRANULARITIES,
    JUDGED_WORK,
    SLACK,
    Draft,
    Settings,
    all_under,
    fits_heads,
    judge_in_order,
    make_plan,
    reject,
    simulation_work,
    usable_nodes,
)
from partition.layers import ranges, split_layers
from partition.planners.sailor import held_bytes
from partition.pricing import Pricing, schedule_period_s
from partition.room import Room
from partition.search import Search, register
from sim.cost.estimate import estimation
from sim.spec.cluster import Node
from sim.spec.counts import PRECISION_BYTES, embedding_parameters, head_parameters, layer_parameters
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline, Replica, Stage
from sim.spec.schedules import in_flight

LEAST_SHARE = 0.5
"""A device group is at least so large, as a part of the mean size of the groups."""

PERMUTED = (4, 3, 2, 1)
"""So many blocks of a cut are permuted at most: the first of these with which there are at most MOST_CUTS cuts."""
MOST_CUTS = 4000

MOST_LINES = 24
"""So many sequences of the kinds are tried at most: four kinds in every order."""

MOST_TRIED = 2000
"""So many cuts with a size of the micro-batches are tried at most, the most promising first."""

MOST_SEQUENCES = 8
"""A replica takes at most so many sequences of a micro-batch."""

ESTIMATED = 16
"""So many plans are ranked by the exact estimate before the best are judged."""


# --- The search space ------------------------------------------------------------------------------------------------


def device_groups(gpus: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Sizes of the groups of so many stages, smallest first: powers of two that sum to the GPUs, none far below the mean."""
    mean = gpus // stages
    sizes = [2**i for i in range(gpus.bit_length()) if LEAST_SHARE * mean <= 2**i]

    def grown(left: int, number: int, smallest: int) -> Iterator[tuple[int, ...]]:
        if number == 0:
            if left == 0:
                yield ()
            return
        for size in sizes:
            if size >= smallest and size * number <= left <= size + sizes[-1] * (number - 1):
                for others in grown(left - size, number - 1, size):
                    yield size, *others

    if sizes:
        yield from grown(gpus, stages, sizes[0])


def orders(groups: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """Orders of device groups. At most so many blocks change places: the smallest groups, equal ones first, are joined."""
    blocks: list[tuple[int, ...]] = [(size,) for size in groups]
    while len(blocks) > most:
        blocks.sort(key=sum)
        pairs = list(enumerate(pairwise(blocks)))
        at = next((i for i, (a, b) in pairs if a == b), 0)
        blocks[at : at + 2] = [blocks[at] + blocks[at + 1]]
    found = {tuple(size for block in order for size in block) for order in permutations(blocks)}
    return sorted(found)


def cuts_of(gpus: int, most_stages: int, sequences: int) -> list[tuple[int, ...]]:
    """All device groups in all orders that are tried, fewest stages first, for so many sequences of kinds."""
    every = [groups for stages in range(1, most_stages + 1) for groups in device_groups(gpus, stages)]
    found: list[tuple[int, ...]] = []
    for most in PERMUTED:
        found = [order for groups in every for order in orders(groups, most)]
        if len(found) * sequences <= MOST_CUTS:
            break
    return found


def least_pipeline_s(work: float, micro_batches: int, speeds: Sequence[float]) -> float:
    """The least seconds of a pipeline whose stages have these speeds, if the work of a micro-batch divides at will.

    It is a linear program, in which the fastest stages are busy all the time and the others have nothing to do.
    """
    least_s, speed = math.inf, 0.0
    for used, more in enumerate(sorted(speeds, reverse=True), start=1):
        speed += more
        least_s = min(least_s, (micro_batches - 1 + used) * work / speed)
    return least_s


# --- A sequence of GPUs ----------------------------------------------------------------------------------------------


class _Line:
    """The GPUs in one sequence: their names, their nodes, and for each node the type of those that compute alike."""

    def __init__(self, nodes: Sequence[Node], types: Sequence[int]) -> None:
        self.nodes, self.types = nodes, types
        self.devices = [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)]
        self.place = [i for i, node in enumerate(nodes) for _ in range(node.gpus)]
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def runs(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The nodes of these GPUs by place, and how many are of each."""
        found = self._runs.get((begin, end))
        if found is None:
            found = [(i, len(list(group))) for i, group in groupby(self.place[begin:end])]
            self._runs[begin, end] = found
        return found


@dataclass(frozen=True)
class Table:
    """What a stage takes for a micro-batch by its number of layers, and what is left of the memory of its fullest GPU.

    `room` is a part of that memory, negative where the layers do not fit.
    """

    seconds: tuple[float, ...]
    room: tuple[float, ...]


@dataclass(frozen=True)
class Candidate:
    """A plan before its devices are named: where the sequence is cut, degrees and layers of the stages, the micro-batch."""

    line: int
    groups: tuple[int, ...]
    degrees: tuple[int, ...]
    layers: tuple[int, ...]
    micro_batch: int
    mode: str


# --- The planner -----------------------------------------------------------------------------------------------------


@register("metis", estimates=True)
def metis(search: Search) -> None:
    """Estimates the balanced plans of all ways to cut all sequences of the GPUs, and has the best of them judged."""
    nodes = usable_nodes(search)
    if not nodes:
        return
    planner = _Metis(search, nodes)
    judge = estimation(search.cluster, search.job)
    ranked: list[tuple[float, int, Draft, Settings]] = []
    for candidate in planner.best():
        draft = planner.draft(candidate)
        for settings in planner.settings_of(candidate):
            search.check_budget()
            cost = judge(make_plan(search.cluster, search.job, draft, settings))
            if isinstance(cost, Cost):
                ranked.append((cost.iteration_s, len(ranked), draft, settings))
    if not ranked:
        reject(search, [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)])
    ranked.sort(key=lambda entry: entry[:2])
    spent = 0
    near: list[tuple[Draft, Settings]] = []
    for seconds, _, draft, settings in ranked:
        spent += simulation_work(draft)
        if seconds <= SLACK * ranked[0][0] and (len(near) < FEWEST_JUDGED or spent <= JUDGED_WORK):
            near.append((draft, settings))
    judge_in_order(search, near)


class _Metis:
    """The search over sequences, cuts and micro-batches, and what it knows of stages."""

    def __init__(self, search: Search, nodes: Sequence[Node]) -> None:
        self.search, self.job = search, search.job
        self.pricing, self.room = Pricing(search.cluster, search.job), Room(search.cluster, search.job)
        kinds: dict[str, list[Node]] = {}
        for node in nodes:
            kinds.setdefault(node.gpu.name, []).append(node)
        types: dict[object, list[Node]] = {}
        for node in nodes:
            types.setdefault((node.gpu.name, node.gpus, node.intra), []).append(node)
        self.types = [alike[0] for alike in types.values()]
        """The first node of each type; those of a type compute alike."""
        number = {node.name: t for t, alike in enumerate(types.values()) for node in alike}
        self.lines = []
        for order in islice(permutations(kinds), MOST_LINES):
            sequence = [node for name in order for node in kinds[name]]
            self.lines.append(_Line(sequence, [number[node.name] for node in sequence]))
        self.gpus = len(self.lines[0].devices)
        widest = 1 << (max(node.gpus for node in nodes).bit_length() - 1)
        parallel = widest > 1 and self.job.sequence_length % widest == 0
        self.settings = Settings(sequence_parallel=parallel)
        model = self.job.model
        self.parameters = layer_parameters(model), embedding_parameters(model), head_parameters(model)
        self.moved_bytes = PRECISION_BYTES[self.job.gradient_precision] + PRECISION_BYTES[self.job.precision]
        """Of each parameter: its gradient is scattered, and it is gathered."""
        self.found: dict[Candidate, float] = {}
        self.least_s = math.inf
        self._tables: dict[object, Table] = {}
        self._tables_of: dict[object, Table] = {}
        self._shares: dict[object, list[int]] = {}
        self._sent: dict[tuple[str, str], float] = {}

    def best(self) -> list[Candidate]:
        """The candidates whose estimate is near the best one's, best first."""
        cuts = cuts_of(self.gpus, min(self.gpus, self.job.model.layers), len(self.lines))
        batch = self.job.global_batch
        sizes = [size for size in range(1, batch + 1) if batch % size == 0]
        # Layers and sequences per second, if a GPU were always busy, at the share of a micro-batch that suits it best.
        rates = [max(n / self._layer_s(t, 1, n) for n in range(1, MOST_SEQUENCES + 1)) for t in range(len(self.types))]
        widest = max(node.gpus for node in self.lines[0].nodes)
        promising: list[tuple[float, float, int, tuple[int, ...], int]] = []
        for groups in cuts:
            self.search.check_budget()
            bounds = ranges(groups)
            for number, line in enumerate(self.lines):
                speeds = [sum(rates[line.types[i]] * n for i, n in line.runs(*bound)) for bound in bounds]
                network_s = self._network_s(line, bounds, speeds)
                for size in sizes:
                    if min(groups) * MOST_SEQUENCES >= size and max(groups) <= size * widest:
                        least_s = least_pipeline_s(size * self.job.model.layers, batch // size, speeds)
                        promising.append((least_s + network_s, least_s, number, groups, size))
        promising.sort()
        for _, least_s, number, groups, size in promising[:MOST_TRIED]:
            self.search.check_budget()
            if least_s <= SLACK * self.least_s:
                self._try(number, groups, size)
        near = [(seconds, c) for c, seconds in self.found.items() if seconds <= SLACK * self.least_s]
        near.sort(key=lambda entry: entry[0])
        return [candidate for _, candidate in near[:ESTIMATED]]

    def _network_s(self, line: _Line, bounds: Sequence[tuple[int, int]], speeds: Sequence[float]) -> float:
        """Roughly what the network adds to an iteration, if layers follow speeds: its longest exchange or busiest boundary."""
        layer, embedding, head = self.parameters
        per_speed = self.job.model.layers * layer / sum(speeds)
        moved = self.moved_bytes
        runs = [line.runs(*bound) for bound in bounds]
        longest_s = 0.0
        for s, (run, speed) in enumerate(zip(runs, speeds, strict=True)):
            if len(run) > 1:
                parameters = speed * per_speed + (s == 0) * embedding + (s == len(bounds) - 1) * head
                per_byte = self._s_per_byte(line.nodes[run[0][0]], line.nodes[run[1][0]])
                longest_s = max(longest_s, parameters * moved * per_byte)
        num_bytes = self.job.global_batch * self.pricing.activation_bytes(1)
        for there, back in pairwise(runs):
            per_byte = self._s_per_byte(line.nodes[there[0][0]], line.nodes[back[-1][0]])
            longest_s = max(longest_s, num_bytes / min(len(there), len(back)) * per_byte)
        return longest_s

    def _try(self, number: int, groups: tuple[int, ...], size: int) -> None:
        """Adds the candidates of a cut: from data to tensor parallelism, under each mode, until memory does not bind."""
        for mode in GRANULARITIES:
            if not self._ways(number, groups, size, mode):
                return  # recomputing more only takes longer

    def _ways(self, number: int, groups: tuple[int, ...], size: int, mode: str) -> bool:
        """Whether memory binds; adds the candidates under one recompute mode, from the most data parallelism on."""
        line, bounds, depth = self.lines[number], ranges(groups), len(groups)
        layers = self.job.model.layers
        degrees, bound = [1] * depth, False
        while True:
            data = [group // degree for group, degree in zip(groups, degrees, strict=True)]
            if any(size > MOST_SEQUENCES * n for n in data):
                return bound
            halved = [s for s, n in enumerate(data) if n > size]
            if halved:
                halved.sort(key=lambda s: -data[s])
            else:
                tables = [self._table(line, bounds, s, degrees[s], size, mode) for s in range(depth)]
                free = split_layers(layers, depth, partial(_free, tables))
                if free is None:
                    return bound
                room = [table.room[n] for table, n in zip(tables, free, strict=True)]
                if self._add(Candidate(number, groups, tuple(degrees), tuple(free), size, mode), min(room) >= 0):
                    return bound
                bound = True
                fitting = split_layers(layers, depth, partial(_fitting, tables))
                if fitting is not None:
                    self._add(Candidate(number, groups, tuple(degrees), tuple(fitting), size, mode), True)
                halved = sorted(range(depth), key=lambda s: room[s])
            for s in halved:
                if self._divides(line, bounds[s], 2 * degrees[s]):
                    degrees[s] *= 2
                    break
            else:
                return bound

    def _add(self, candidate: Candidate, fits: bool) -> bool:
        """Whether the way ends here: the candidate fits, and was added, or is too slow even without limits of memory."""
        seconds = self.estimate_s(candidate)
        if seconds > SLACK * self.least_s:
            return True
        if fits:
            self.least_s = min(self.least_s, seconds)
            self.found[candidate] = seconds
        return fits

    def _divides(self, line: _Line, bound: tuple[int, int], degree: int) -> bool:
        """Whether tensor-parallel groups of this degree lie inside nodes there, and can share the model's heads."""
        return all(n % degree == 0 for _, n in line.runs(*bound)) and fits_heads(self.job, degree)

    # --- A stage ---

    def _replicas(self, line: _Line, bound: tuple[int, int], degree: int) -> tuple[int, ...]:
        """The type of node of each replica of a stage."""
        return tuple(line.types[i] for i, n in line.runs(*bound) for _ in range(n // degree))

    def shares(self, replicas: tuple[int, ...], degree: int, size: int) -> list[int]:
        """How many sequences of a micro-batch each replica takes, so that the last one ends as early as possible."""
        key = (replicas, degree, size)
        found = self._shares.get(key)
        if found is None:
            seconds = {t: [self._layer_s(t, degree, n) for n in range(1, MOST_SEQUENCES + 1)] for t in set(replicas)}
            found = split_layers(
                size, len(replicas), lambda r, n: seconds[replicas[r]][n - 1] if n <= MOST_SEQUENCES else math.inf
            )
            assert found is not None, "a stage has at most as many replicas as sequences, and not too many sequences for them"
            self._shares[key] = found
        return found

    def _layer_s(self, kind: int, degree: int, sequences: int) -> float:
        """Seconds of one layer on a replica of a type of node."""
        pieces = self.pricing.stage(_devices(self.types[kind], degree), sequences, self.settings)
        return pieces.layer_forward_s + pieces.layer_backward_s

    def _table(self, line: _Line, bounds: Sequence[tuple[int, int]], s: int, degree: int, size: int, mode: str) -> Table:
        """What a stage takes, by its number of layers."""
        place = (id(line), bounds[s], len(bounds) - s, degree, size, mode)
        found = self._tables_of.get(place)
        if found is None:
            replicas = self._replicas(line, bounds[s], degree)
            takes = tuple(dict.fromkeys(zip(replicas, self.shares(replicas, degree, size), strict=True)))
            flying = in_flight("1f1b", len(bounds), s, self.job.global_batch // size)
            key = (takes, len(replicas), degree, s == 0, s == len(bounds) - 1, flying, mode)
            if key not in self._tables:
                self._tables[key] = self._measured(*key)
            found = self._tables_of[place] = self._tables[key]
        return found

    def _measured(
        self, takes: Sequence[tuple[int, int]], replicas: int, degree: int, first: bool, last: bool, flying: float, mode: str
    ) -> Table:
        """The table of a stage whose replicas are of these types and take these numbers of sequences."""
        most = self.job.model.layers
        seconds, room = [0.0] * (most + 1), [math.inf] * (most + 1)
        for kind, sequences in takes:
            node = self.types[kind]
            pieces = self.pricing.stage(_devices(node, degree), sequences, self.settings)
            held = held_bytes(self.room, replicas, degree, sequences, self.settings, first, last)
            for n in range(1, most + 1):
                counts = all_under(mode, n)
                takes_s = pieces.forward_s(n, first, last) + pieces.backward_s(counts, first, last)
                seconds[n] = max(seconds[n], takes_s)
                room[n] = min(room[n], 1 - held.total(flying, counts) / node.gpu.memory_bytes)
        return Table(tuple(seconds), tuple(room))

    # --- The estimate ---

    def estimate_s(self, candidate: Candidate) -> float:
        """Seconds of an iteration, of which `sim.cost.estimate` knows better: see the head of this file."""
        line, bounds = self.lines[candidate.line], ranges(candidate.groups)
        depth, micro_batches = len(bounds), self.job.global_batch // candidate.micro_batch
        takes = [
            self._table(line, bounds, s, candidate.degrees[s], candidate.micro_batch, candidate.mode).seconds[candidate.layers[s]]
            for s in range(depth)
        ]
        messages, reduced = [0.0] * len(line.nodes), [0.0] * len(line.nodes)
        waits = []
        num_bytes = self.pricing.activation_bytes(candidate.micro_batch)
        for s in range(depth - 1):
            waits.append(self._message_s(line, bounds[s], bounds[s + 1], candidate.degrees[s : s + 2], num_bytes, messages))
        inside_s = 0.0
        layer, embedding, head = self.parameters
        for s, (bound, degree) in enumerate(zip(bounds, candidate.degrees, strict=True)):
            data = candidate.groups[s] // degree
            parameters = candidate.layers[s] * layer + (s == 0) * embedding + (s == depth - 1) * head
            moved = parameters * self.moved_bytes * (data - 1) / data
            places = [i for i, _ in line.runs(*bound)]
            if len(places) == 1:
                inside_s = max(inside_s, moved / degree / line.nodes[places[0]].intra.bandwidth_bytes_per_s)
            else:
                slowest = max(self._s_per_byte(line.nodes[a], line.nodes[b]) for a, b in pairwise(places))
                for i in places:
                    reduced[i] += moved * slowest
        period_s = schedule_period_s("1f1b", takes, [0.0] * depth, waits)
        pipeline_s = sum(takes) + 2 * sum(waits) + (micro_batches - 1) * period_s
        return max(pipeline_s, micro_batches * max(messages)) + max(inside_s, *reduced)

    def _message_s(
        self,
        line: _Line,
        sender: tuple[int, int],
        receiver: tuple[int, int],
        degrees: Sequence[int],
        num_bytes: float,
        load_s: list[float],
    ) -> float:
        """Seconds of the messages of a micro-batch between two stages; adds what each node's card has to send, there and back."""
        there, back = line.runs(*sender), line.runs(*receiver)
        if len(there) == len(back) == 1 and there[0][0] == back[0][0]:
            lanes = min((end - begin) // degree for (begin, end), degree in zip((sender, receiver), degrees, strict=True))
            return num_bytes / lanes / line.nodes[there[0][0]].intra.bandwidth_bytes_per_s
        per_byte = self._s_per_byte(line.nodes[there[0][0]], line.nodes[back[-1][0]])
        longest_s = 0.0
        for runs, (begin, end) in ((there, sender), (back, receiver)):
            for i, n in runs:
                seconds = num_bytes * n / (end - begin) * per_byte
                load_s[i] += seconds
                longest_s = max(longest_s, seconds)
        return longest_s

    def _s_per_byte(self, a: Node, b: Node) -> float:
        """Seconds per byte that one node sends to another, over all of its cards."""
        if a is b:
            return 0.0
        key = (a.name, b.name)
        if key not in self._sent:
            message = self.pricing.message((f"{a.name}/0",), (f"{b.name}/0",), Settings())
            self._sent[key] = message.s_per_byte / min(node.nic.count if node.nic else 1 for node in (a, b))
        return self._sent[key]

    # --- Drafts ---

    def settings_of(self, candidate: Candidate) -> list[Settings]:
        """Settings of a candidate: ZeRO 1 and, where there is something to divide, 0."""
        found = replace(self.settings, sequence_parallel=self.settings.sequence_parallel and max(candidate.degrees) > 1)
        shared = any(group > degree for group, degree in zip(candidate.groups, candidate.degrees, strict=True))
        return [found, replace(found, zero_stage=0)] if shared else [found]

    def draft(self, candidate: Candidate) -> Draft:
        """The draft of a candidate: as many pipelines as its stages divide into alike, whose stages may have several replicas."""
        line, bounds = self.lines[candidate.line], ranges(candidate.groups)
        stages: list[list[Replica]] = []
        for bound, degree in zip(bounds, candidate.degrees, strict=True):
            names = line.devices[slice(*bound)]
            shares = self.shares(self._replicas(line, bound, degree), degree, candidate.micro_batch)
            stages.append([Replica(tuple(names[r * degree : (r + 1) * degree]), n) for r, n in enumerate(shares)])
        number = _copies([[replica.sequences for replica in replicas] for replicas in stages])
        cuts = ranges(candidate.layers)
        draft = []
        for p in range(number):
            held = [replicas[len(replicas) * p // number : len(replicas) * (p + 1) // number] for replicas in stages]
            draft.append(
                Pipeline(
                    candidate.micro_batch // number,
                    self.job.global_batch // candidate.micro_batch,
                    tuple(Stage(tuple(own), (cut,), candidate.mode) for own, cut in zip(held, cuts, strict=True)),
                )
            )
        return tuple(draft)


def _copies(shares: Sequence[Sequence[int]]) -> int:
    """Into how many runs the replicas of every stage can be divided, so that all runs take as many sequences."""
    common, size = reduce(math.gcd, (len(own) for own in shares)), sum(shares[0])
    for number in range(common, 1, -1):
        if common % number == 0 and size % number == 0:
            sums = {sum(own[len(own) * p // number : len(own) * (p + 1) // number]) for own in shares for p in range(number)}
            if sums == {size // number}:
                return number
    return 1


def _free(tables: Sequence[Table], stage: int, layers: int) -> float:
    """Seconds of a stage with so many layers, whether they fit or not; the model has no more."""
    seconds = tables[stage].seconds
    return seconds[layers] if layers < len(seconds) else math.inf


def _fitting(tables: Sequence[Table], stage: int, layers: int) -> float:
    """Seconds of a stage with so many layers, infinite where they do not fit."""
    room = tables[stage].room
    return tables[stage].seconds[layers] if layers < len(room) and room[layers] >= 0 else math.inf


def _devices(node: Node, degree: int) -> tuple[str, ...]:
    return tuple(f"{node.name}/{index}" for index in range(degree))
