"""The planner that gives each stage its replicas from a pool of GPUs of several kinds, by dynamic programming over stages.

After Sailor (Strati et al., SOSP 2025, arXiv:2504.17096). A plan has a depth, a micro-batch and a data-parallel degree that
all stages share, and layers cut evenly; each replica of a stage may be of another kind of GPU, and has the tensor-parallel
degree of its kind there. Replicas follow each other to pipelines, one of every stage to each. For every depth and micro-batch:

    1  A tensor-parallel group lies inside a node, and all of it is of one kind.
    2  For every kind and stage few degrees are tried: the least that fits in memory, and the largest that still pays.
    3  Of the data-parallel degrees, largest first, those count that change the number of micro-batches of a pipeline; the
       search stops at the first that cannot come near the best plan any more.
    4  GPUs of a kind are interchangeable: a pool is a number of GPUs for each kind of node and site.
    5  The replicas of a stage are of one site. Stages go through the sites in an order, and never back to one.
    6  Then stage by stage, the pool that is left is what the next stages have: the best for it is found once.

A configuration takes the sum of its stages' times, plus the longest of them for each further micro-batch, plus the longest
exchange of gradients. What it costs is that, times the rent of the GPUs that it uses.

Done otherwise than there. The dynamic programming keeps all that can still be best of sum, longest stage, exchange and rent,
where Sailor keeps one per pool, so that it is exact where stages have few choices. Where they have many, a stage takes the
slowest kinds that it may first, and leaves the fast ones to the others; of too many beginnings the most promising are kept. A
third degree is tried: the least with which a kind is no slower than the fastest one at its least degree. Recomputation and
ZeRO, which Sailor's profiles take as given, are tried for the whole plan. GPUs are dealt to the replicas stage by stage and
pipeline by pipeline, and the quick price of `partition.pricing` chooses. Budgets and least throughputs, which Sailor passes
down its recursion, are kept by the search, which judges no other plan an answer. Left out: the price of traffic
between sites, and elasticity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import NamedTuple, TypeAlias

from partition.drafts import SLACK, Draft, Settings, all_under, degrees, judge_in_order, reject, stage, usable_nodes
from partition.layers import even_split, ranges
from partition.pricing import Pricing
from partition.room import Room, StageBytes
from partition.search import Search, register
from sim.spec.cluster import Node
from sim.spec.counts import PRECISION_BYTES, embedding_parameters, head_parameters, layer_parameters
from sim.spec.plan import Pipeline, Stage
from sim.spec.schedules import in_flight

MICRO_BATCHES = (1, 2, 4, 8)
MODES = ("none", "selective", "full")

WORTH_DOUBLING = 1.4
"""Twice the tensor-parallel degree must make a stage at least so many times as fast."""

MOST_OPTIONS = 8
"""A stage with more ways to divide its replicas over the kinds than this tries only some of them."""

MOST_CHOICES = 9
"""So many combinations of degrees are all tried; of more, the simplest."""

MOST_LABELS = 40
"""So many beginnings of configurations are kept at most, the most promising ones."""

PRICED = 120
"""The best configurations that are laid out and priced."""


# --- The dynamic programming -----------------------------------------------------------------------------------------


Counts: TypeAlias = tuple[int, ...]
"""A number for each pool."""


@dataclass(frozen=True)
class Task:
    """What the dynamic programming is asked: `data` replicas for every stage, out of pools of `capacity` GPUs each.

    `seconds[s][k]` is a micro-batch on a replica of stage s in pool k with its messages, infinite where it does not fit,
    `exchange_s[s][k]` the exchange of the stage's gradients where pool k is its slowest, `degrees[s][k]` GPUs of a replica.
    """

    data: int
    micro_batches: int
    capacity: Counts
    seconds: Sequence[Sequence[float]]
    exchange_s: Sequence[Sequence[float]]
    degrees: Sequence[Sequence[int]]
    sites: Sequence[str] = ()
    """The site of each pool; none means that all are of one."""
    order: Sequence[str] = ()
    """In which order stages go through the sites."""
    crossing_s: float = 0.0
    """What a micro-batch's messages between two sites take."""
    rent: Sequence[float] = ()
    """Dollars per second of a GPU of each pool. Where it is given, the cheapest configuration is asked for, else the fastest."""

    def measure(self, total_s: float, longest_s: float, exchange_s: float, rent: float) -> float:
        """Seconds of an iteration or, where rent counts, dollars."""
        seconds = total_s + (self.micro_batches - 1) * longest_s + exchange_s
        return seconds * rent if self.rent else seconds


class Label(NamedTuple):
    """The first stages of a configuration: sum, longest stage, longest exchange, rent so far; and their replicas by pool."""

    total_s: float
    longest_s: float
    exchange_s: float
    rent: float
    chosen: tuple[Counts, ...]


def allocate(task: Task, bound: float = math.inf) -> tuple[float, tuple[Counts, ...]] | None:
    """The best configuration below a bound: its measure, and for each stage its number of replicas by pool. None if none is.

    Exact where a stage has at most MOST_OPTIONS ways to divide its replicas, and MOST_LABELS are never exceeded.
    """
    depth = len(task.seconds)
    least = [min(row) for row in task.seconds]
    rests = _Rests(task)
    least_exchange = [min(row) for row in task.exchange_s]
    cheapest = [0.0] * depth
    if task.rent:
        cheapest = [task.data * min(rent * n for rent, n in zip(task.rent, row, strict=True)) for row in task.degrees]
    if any(math.isinf(seconds) for seconds in least):
        return None
    # What the stages from s on take at least.
    rest = [
        (sum(least[s:]), max(least[s:], default=0.0), max(least_exchange[s:], default=0.0), sum(cheapest[s:]))
        for s in range(depth + 1)
    ]
    held = rests.least(0, task.capacity)
    if held is None:
        return None
    if task.measure(max(held[0], rest[0][0]), max(held[1], rest[0][1]), rest[0][2], rest[0][3]) >= bound:
        return None
    states: dict[tuple[Counts, int], list[Label]] = {(task.capacity, 0): [Label(0.0, 0.0, 0.0, 0.0, ())]}
    for s in range(depth):
        following: dict[tuple[Counts, int], list[Label]] = {}
        promise: dict[Label, float] = {}
        pooled: dict[Counts, tuple[float, float] | None] = {}
        all_least_s, all_longest_s, exchange_s, rent = rest[s + 1]
        for (left, site), labels in states.items():
            for at, counts in _options(task, s, left, site):
                used = [k for k, n in enumerate(counts) if n]
                crossing = task.crossing_s if s and at != site else 0.0
                takes_s = max(task.seconds[s][k] for k in used) + crossing
                exchanged_s = max(task.exchange_s[s][k] for k in used)
                paid = sum(task.rent[k] * counts[k] * task.degrees[s][k] for k in used) if task.rent else 0.0
                after = tuple(n - c * d for n, c, d in zip(left, counts, task.degrees[s], strict=True))
                if after not in pooled:
                    pooled[after] = rests.least(s + 1, after)
                held = pooled[after]
                if held is None:
                    continue
                more_s, longest_s = max(held[0], all_least_s), max(held[1], all_longest_s)
                for label in labels:
                    grown = Label(
                        label.total_s + takes_s + crossing,
                        max(label.longest_s, takes_s),
                        max(label.exchange_s, exchanged_s),
                        label.rent + paid,
                        (*label.chosen, counts),
                    )
                    least_measure = task.measure(
                        grown.total_s + more_s,
                        max(grown.longest_s, longest_s),
                        max(grown.exchange_s, exchange_s),
                        grown.rent + rent,
                    )
                    if least_measure < bound:
                        promise[grown] = least_measure
                        _keep(following.setdefault((after, at), []), grown)
        states = _most_promising(following, promise)
    best: tuple[float, tuple[Counts, ...]] | None = None
    for labels in states.values():
        for label in labels:
            measure = task.measure(*label[:4])
            if best is None or measure < best[0]:
                best = measure, label.chosen
    return best


class _Rests:
    """What the stages from any one on take at least, with the pools that are left for them."""

    def __init__(self, task: Task) -> None:
        self._task, self._depth = task, len(task.seconds)
        self._pools: list[list[tuple[float, int, int]]] = []
        for s in range(self._depth + 1):
            found = []
            for k in range(len(task.capacity)):
                usable = [i for i in range(s, self._depth) if math.isfinite(task.seconds[i][k])]
                if usable:
                    least_s, degree = (min(table[i][k] for i in usable) for table in (task.seconds, task.degrees))
                    found.append((least_s, int(degree), k))
            self._pools.append(sorted(found))

    def least(self, s: int, left: Counts) -> tuple[float, float] | None:
        """Least sum of the times of the stages from s on, and the least time of their longest; None if GPUs are too few.

        Only so many stages as the fastest pools have replicas for can be as fast as those, and so on.
        """
        data, stages = self._task.data, self._depth - s
        replicas = done = 0
        total_s = 0.0
        for least_s, degree, k in self._pools[s]:
            replicas += left[k] // degree
            full = min(stages, replicas // data)
            total_s += (full - done) * least_s
            done = full
            if done == stages:
                return total_s, least_s
        return None if stages else (0.0, 0.0)


def _most_promising(
    states: dict[tuple[Counts, int], list[Label]], promise: dict[Label, float]
) -> dict[tuple[Counts, int], list[Label]]:
    """The states with their labels, if those are not too many, else with those whose measure may become the best."""
    if sum(len(labels) for labels in states.values()) <= MOST_LABELS:
        return states
    every = [(promise[label], n, state, label) for n, (state, labels) in enumerate(states.items()) for label in labels]
    every.sort(key=lambda entry: entry[:2])
    kept: dict[tuple[Counts, int], list[Label]] = {}
    for _, _, state, label in every[:MOST_LABELS]:
        kept.setdefault(state, []).append(label)
    return kept


def _keep(labels: list[Label], new: Label) -> None:
    """Adds a label unless another is as good in everything, and drops those that it is as good as in everything."""
    if any(_as_good(old, new) for old in labels):
        return
    labels[:] = [old for old in labels if not _as_good(new, old)]
    labels.append(new)


def _as_good(a: Label, b: Label) -> bool:
    return a.total_s <= b.total_s and a.longest_s <= b.longest_s and a.exchange_s <= b.exchange_s and a.rent <= b.rent


def _options(task: Task, s: int, left: Counts, site: int) -> Iterator[tuple[int, Counts]]:
    """Ways to take the replicas of a stage from what is left, each with the place of its site in the order."""
    sites = range(site, len(task.order)) if task.order else (0,)
    for at in sites:
        if s == 0 and at:
            return  # an order that begins elsewhere is another order
        fits = []
        for k, n in enumerate(left):
            here = not task.order or task.sites[k] == task.order[at]
            fits.append(n // task.degrees[s][k] if here and math.isfinite(task.seconds[s][k]) else 0)
        if sum(fits) >= task.data:
            kinds = sum(1 for n in fits if n)
            if math.comb(task.data + kinds - 1, kinds - 1) <= MOST_OPTIONS:
                found = list(_divisions(task.data, fits))
            else:
                found = _slowest_first(task.data, fits, task.seconds[s])
            for counts in found:
                yield at, counts


def _divisions(data: int, fits: Sequence[int]) -> Iterator[Counts]:
    """All ways to divide so many replicas over pools that have room for so many each."""
    if not fits:
        if data == 0:
            yield ()
        return
    for n in range(min(data, fits[0]) + 1):
        for others in _divisions(data - n, fits[1:]):
            yield n, *others


def _slowest_first(data: int, fits: Sequence[int], seconds: Sequence[float]) -> list[Counts]:
    """For each pool the division of which it is the slowest part, filled up with ever faster ones, and the one of it alone.

    A stage waits for its slowest replica: what else it uses only matters for what it leaves to the others.
    """
    order = sorted((k for k, n in enumerate(fits) if n), key=lambda k: -seconds[k])
    found: dict[Counts, None] = {}
    for i in range(len(order)):
        counts, need = [0] * len(fits), data
        for k in order[i:]:
            counts[k] = min(need, fits[k])
            need -= counts[k]
        if need == 0:
            found[tuple(counts)] = None
        if fits[order[i]] >= data:
            found[tuple(data if k == order[i] else 0 for k in range(len(fits)))] = None
    return list(found)


# --- Memory ----------------------------------------------------------------------------------------------------------


def held_bytes(
    room: Room, holders: int, degree: int, micro_batch: int, settings: Settings, first: bool, last: bool
) -> StageBytes:
    """The bytes of a stage under ZeRO 0 or 1 that so many replicas hold, as `Room.stage` would count them.

    What ZeRO divides is inverse to the number of holders, so that asking for two and four of them tells it for any.
    """
    if holders <= 4:
        return room.stage(holders, degree, micro_batch, settings, first, last)
    two, four = (room.stage(n, degree, micro_batch, settings, first, last) for n in (2, 4))
    less = 1 - 4 / holders  # 1/4 - 1/n, as a part of 1/2 - 1/4
    return replace(four, fixed=four.fixed - (two.fixed - four.fixed) * less, layer=four.layer - (two.layer - four.layer) * less)


# --- The planner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """The nodes of one site that are alike in GPUs, interconnect and cards."""

    nodes: tuple[Node, ...]

    @property
    def node(self) -> Node:
        """The first of them."""
        return self.nodes[0]

    @property
    def gpus(self) -> int:
        """The GPUs of all of them."""
        return sum(node.gpus for node in self.nodes)


class Part(NamedTuple):
    """How many layers a stage holds, and whether it is the first and the last."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Configuration:
    """What the dynamic programming found, and for what."""

    measure: float
    micro_batch: int
    mode: str
    degrees: tuple[Counts, ...]
    chosen: tuple[Counts, ...]


@register("sailor")
def sailor(search: Search) -> None:
    """Finds the best configuration of every depth, micro-batch and data-parallel degree, and has the best of them judged."""
    nodes = usable_nodes(search)
    if not nodes:
        return
    planner = _Sailor(search, nodes)
    priced: list[tuple[float, int, Draft, Settings]] = []
    for configuration in planner.configurations():
        rent = planner.rent_of(configuration)
        for draft in planner.drafts(configuration):
            for settings in planner.settings_of(draft):
                search.check_budget()
                price = planner.pricing.price_s(draft, settings) * rent
                priced.append((price, len(priced), draft, settings))
    if not priced:
        reject(search, [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)])
        return
    priced.sort(key=lambda entry: entry[:2])
    judge_in_order(search, [(draft, settings) for price, _, draft, settings in priced if price <= SLACK * priced[0][0]])


class _Sailor:
    """The search over depths, micro-batches, degrees and settings, and what it knows of stages on each pool."""

    def __init__(self, search: Search, nodes: Sequence[Node]) -> None:
        self.search, self.job = search, search.job
        self.pricing, self.room = Pricing(search.cluster, search.job), Room(search.cluster, search.job)
        alike: dict[object, list[Node]] = {}
        for node in nodes:
            alike.setdefault((node.gpu.name, node.gpus, node.intra, node.nic, node.site), []).append(node)
        self.pools = [Pool(tuple(group)) for group in alike.values()]
        self.nodes = list(nodes)
        self.gpus = sum(pool.gpus for pool in self.pools)
        self.several = len(nodes) > 1
        self.parameters = layer_parameters(self.job.model), embedding_parameters(self.job.model), head_parameters(self.job.model)
        self.degrees = [degrees(self.job, pool.node.gpus) for pool in self.pools]
        every = {degree for allowed in self.degrees for degree in allowed}
        parallel = len(every) > 1 and all(self.job.sequence_length % degree == 0 for degree in every)
        self.settings = Settings(sequence_parallel=parallel)
        self.rent: tuple[float, ...] = ()
        """Dollars per second of a GPU of each pool, where they count."""
        if search.objective.name == "cost":
            self.rent = tuple((pool.node.gpu.dollars_per_hour or 0.0) / 3600 for pool in self.pools)
        self.best = math.inf
        self.found: list[Configuration] = []
        self._sent: dict[tuple[int, int], float] = {}
        self._seconds: dict[object, float] = {}

    def configurations(self) -> list[Configuration]:
        """The best configurations of all, whose measure is near the best one's, best first."""
        for depth in range(1, min(self.job.model.layers, self.gpus) + 1):
            for micro_batch in MICRO_BATCHES:
                if self.job.global_batch % micro_batch == 0:
                    self._of(depth, micro_batch)
        near = [c for c in self.found if c.measure <= SLACK * self.best]
        return sorted(near, key=lambda c: c.measure)[:PRICED]

    def _of(self, depth: int, micro_batch: int) -> None:
        """Adds the best configuration of each data-parallel degree, the largest first, until none can come near the best."""
        micro_batches = self.job.global_batch // micro_batch
        layers = even_split(self.job.model.layers, depth)
        parts = [Part(n, s == 0, s == depth - 1) for s, n in enumerate(layers)]
        pools = range(len(self.pools))
        # No degree makes a stage faster than the best one, whether it fits or not.
        ideal = [min(self._stage_s(k, d, part, micro_batch, "none") for k in pools for d in self.degrees[k]) for part in parts]
        for data in range(min(micro_batches, self.gpus // depth), 0, -1):
            each = -(-micro_batches // data)
            if data > 1 and each == -(-micro_batches // (data - 1)):
                continue
            self.search.check_budget()
            least_rent = depth * data * min(self.rent) if self.rent else 1.0
            if (sum(ideal) + (each - 1) * max(ideal)) * least_rent > SLACK * self.best:
                if self.rent:
                    continue  # fewer replicas take longer, but may cost less
                return
            tried: list[list[Counts]] = []
            for mode in MODES:
                least = [
                    tuple(self._least(k, part, in_flight("1f1b", depth, s, each), data, micro_batch, mode) for k in pools)
                    for s, part in enumerate(parts)
                ]
                # Recomputation only costs time where it does not let a stage fit on fewer GPUs.
                if least not in tried and all(any(row) for row in least):
                    tried.append(least)
                    for chosen in self._degree_choices(parts, least, micro_batch, mode):
                        self._solve(parts, data, each, micro_batch, mode, chosen)

    def _solve(
        self, parts: Sequence[Part], data: int, each: int, micro_batch: int, mode: str, chosen: tuple[Counts, ...]
    ) -> None:
        """Adds the best configuration with these degrees, `chosen[s][k]`, where 0 is a pool that the stage cannot use."""
        if sum(min(degree for degree in row if degree) for row in chosen) * data > self.gpus:
            return
        rows: dict[tuple[Part, Counts], tuple[list[float], list[float]]] = {}
        for key in dict.fromkeys(zip(parts, chosen, strict=True)):
            rows[key] = self._row(*key, len(parts), data, micro_batch, mode)
        seconds, exchange_s = zip(*(rows[key] for key in zip(parts, chosen, strict=True)), strict=True)
        sites = [pool.node.site for pool in self.pools]
        orders: list[tuple[str, ...]] = list(permutations(dict.fromkeys(sites)))
        crossing_s = 0.0
        if len(orders) > 1:
            pairs = [(a, b) for a, b in permutations(range(len(self.pools)), 2) if sites[a] != sites[b]]
            num_bytes = data * self.pricing.activation_bytes(micro_batch)
            crossing_s = num_bytes * max(self._s_per_byte(a, b) for a, b in pairs)
        for order in orders:
            task = Task(
                data=data,
                micro_batches=each,
                capacity=tuple(pool.gpus for pool in self.pools),
                seconds=seconds,
                exchange_s=exchange_s,
                degrees=[tuple(max(1, degree) for degree in row) for row in chosen],
                sites=sites,
                order=order if len(orders) > 1 else (),
                crossing_s=crossing_s,
                rent=self.rent,
            )
            answer = allocate(task, SLACK * self.best)
            if answer is not None:
                self.best = min(self.best, answer[0])
                self.found.append(Configuration(answer[0], micro_batch, mode, chosen, answer[1]))

    def _row(
        self, part: Part, chosen: Counts, depth: int, data: int, micro_batch: int, mode: str
    ) -> tuple[list[float], list[float]]:
        """A stage's seconds for a micro-batch with its messages, and for the exchange of its gradients, on each pool."""
        seconds, exchange_s = [math.inf] * len(chosen), [math.inf] * len(chosen)
        size = self.pricing.activation_bytes(micro_batch)
        for k, degree in enumerate(chosen):
            if degree:
                node = self.pools[k].node
                sent_s = 0.0
                if depth > 1 and self.several:
                    # Replicas of a stage stand beside each other: only where they end does a message leave the node.
                    crossing = min(1.0, data * degree / node.gpus)
                    lanes = max(1, min(data, node.gpus // degree))
                    messages = 2 - part.first - part.last
                    sent_s = messages * crossing * lanes * size * self._s_per_byte(k, k)
                seconds[k] = self._stage_s(k, degree, part, micro_batch, mode) + sent_s
                exchange_s[k] = self._exchange_s(k, degree, part, data)
        return seconds, exchange_s

    # --- Degrees ---

    def _degree_choices(
        self, parts: Sequence[Part], least: Sequence[Counts], micro_batch: int, mode: str
    ) -> list[tuple[Counts, ...]]:
        """Degrees of each stage on each pool: least, as fast as the fastest pool, and as large as pays, combined."""
        tables: list[list[Counts]] = []
        for k, allowed in enumerate(self.degrees):
            even, most = [], []
            for part, row in zip(parts, least, strict=True):
                times = {d: self._stage_s(k, d, part, micro_batch, mode) for d in allowed if row[k] and d >= row[k]}
                fastest_s = min(self._stage_s(j, d, part, micro_batch, mode) for j, d in enumerate(row) if d)
                even.append(next((d for d, seconds in times.items() if seconds <= fastest_s), row[k]))
                largest = row[k]
                for degree, seconds in times.items():
                    if degree > largest and times[largest] / seconds < WORTH_DOUBLING ** math.log2(degree / largest):
                        break
                    largest = degree
                most.append(largest)
            tables.append(list(dict.fromkeys((tuple(row[k] for row in least), tuple(even), tuple(most)))))
        if math.prod(len(table) for table in tables) <= MOST_CHOICES:
            together = list(product(*tables))
        else:
            # All pools alike, and one pool unlike the others that have their least.
            least_of = [table[0] for table in tables]
            together = [tuple(table[min(i, len(table) - 1)] for table in tables) for i in range(3)]
            for k, table in enumerate(tables):
                together += [(*least_of[:k], other, *least_of[k + 1 :]) for other in table[1:]]
        return list(dict.fromkeys(tuple(zip(*rows, strict=True)) for rows in together))

    def _least(self, k: int, part: Part, flying: float, data: int, micro_batch: int, mode: str) -> int:
        """The least degree with which a stage fits on a pool, or 0."""
        for degree in self.degrees[k]:
            held = held_bytes(self.room, data, degree, micro_batch, self.settings, part.first, part.last)
            if held.total(flying, all_under(mode, part.layers)) <= self.pools[k].node.gpu.memory_bytes:
                return degree
        return 0

    # --- Seconds ---

    def _stage_s(self, k: int, degree: int, part: Part, micro_batch: int, mode: str) -> float:
        """Seconds of a micro-batch on a replica of a stage, forward and backward, without messages."""
        key = (k, degree, part, micro_batch, mode)
        found = self._seconds.get(key)
        if found is None:
            devices = tuple(f"{self.pools[k].node.name}/{index}" for index in range(degree))
            pieces = self.pricing.stage(devices, micro_batch, self.settings)
            n, ends = part.layers, (part.first, part.last)
            found = self._seconds[key] = pieces.forward_s(n, *ends) + pieces.backward_s(all_under(mode, n), *ends)
        return found

    def _exchange_s(self, k: int, degree: int, part: Part, data: int) -> float:
        """Seconds of exchanging the gradients of a stage, and its parameters, over the cards of each node."""
        if data == 1:
            return 0.0
        node = self.pools[k].node
        layer, embedding, head = self.parameters
        parameters = part.layers * layer + part.first * embedding + part.last * head
        precisions = self.job.gradient_precision, self.job.precision
        num_bytes = parameters * sum(PRECISION_BYTES[name] for name in precisions) * (data - 1) / data
        if data * degree <= node.gpus or not self.several:
            return num_bytes / degree / node.intra.bandwidth_bytes_per_s
        return num_bytes * self._s_per_byte(k, k)

    def _s_per_byte(self, a: int, b: int) -> float:
        """Seconds per byte that a node of one pool sends to one of another, over all of its cards."""
        key = (a, b)
        if key not in self._sent:
            here = self.pools[a].node
            there = self.pools[b].node
            if here is there:
                there = next(node for node in [*self.pools[a].nodes[1:], *self.nodes] if node is not here)
            message = self.pricing.message((f"{here.name}/0",), (f"{there.name}/0",), Settings())
            cards = min(node.nic.count if node.nic else 1 for node in (here, there))
            self._sent[key] = message.s_per_byte / cards
        return self._sent[key]

    # --- Drafts ---

    def rent_of(self, found: Configuration) -> float:
        """Dollars per second of a configuration's GPUs, or 1 where they do not count."""
        if not self.rent:
            return 1.0
        rows = zip(found.degrees, found.chosen, strict=True)
        return sum(rent * d * n for row in rows for rent, d, n in zip(self.rent, *row, strict=True))

    def settings_of(self, draft: Draft) -> list[Settings]:
        """Settings of a draft: ZeRO 1 and, where there is something to divide, 0."""
        grouped = any(len(part.devices) > 1 for pipeline in draft for part in pipeline.stages)
        found = replace(self.settings, sequence_parallel=self.settings.sequence_parallel and grouped)
        return [found, replace(found, zero_stage=0)] if len(draft) > 1 else [found]

    def drafts(self, found: Configuration) -> list[Draft]:
        """The drafts of a configuration: GPUs dealt by stages, and by pipelines. Empty where nodes cannot be so divided."""
        cuts = ranges(even_split(self.job.model.layers, len(found.chosen)))
        kinds = [[k for k, n in enumerate(counts) for _ in range(n)] for counts in found.chosen]
        data = len(kinds[0])
        total = self.job.global_batch // found.micro_batch
        drafts: list[Draft] = []
        slots = [(s, d) for s in range(len(cuts)) for d in range(data)]
        for by_stage in (True, False):
            order = slots if by_stage else sorted(slots, key=lambda slot: (slot[1], slot[0]))
            held = self._dealt(order, kinds, found.degrees)
            if held is None:
                return []
            draft = []
            for d in range(data):
                stages: list[Stage] = [stage(held[s, d], cut, found.micro_batch, found.mode) for s, cut in enumerate(cuts)]
                draft.append(Pipeline(found.micro_batch, total // data + (d < total % data), tuple(stages)))
            if tuple(draft) not in drafts:
                drafts.append(tuple(draft))
        return drafts

    def _dealt(
        self, order: Sequence[tuple[int, int]], kinds: Sequence[Sequence[int]], chosen: Sequence[Counts]
    ) -> dict[tuple[int, int], tuple[str, ...]] | None:
        """The devices of the replica of each (stage, pipeline), in this order; larger groups first, so that nodes divide."""
        free = [[(node, 0) for node in pool.nodes] for pool in self.pools]
        held = {}
        for s, d in sorted(order, key=lambda slot: -chosen[slot[0]][kinds[slot[0]][slot[1]]]):
            k = kinds[s][d]
            degree = chosen[s][k]
            for i, (node, used) in enumerate(free[k]):
                if node.gpus - used >= degree:
                    held[s, d] = tuple(f"{node.name}/{index}" for index in range(used, used + degree))
                    free[k][i] = (node, used + degree)
                    break
            else:
                return None
        return held
