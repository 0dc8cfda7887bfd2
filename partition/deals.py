"""Deals: layouts of equal pipelines, described by few choices, so that a search that tries them one by one ends soon.

The nodes of a cluster are rows, those that are alike together; where one has a few GPUs more than most of its sort, these are a
row of their own. Each row has a tensor-parallel degree, or is left out; its groups are dealt to the pipelines in equal parts, and
the rows stand in the order of the stages. So a deal is an order of rows, their degrees, a number of pipelines and what holds for
all of them. From a start, `Deals.descended` takes whatever single change helps, until none does: first those that keep rows or
join them, then, if they are asked for, zero-bubble schedules, then those that cut a row in two, so that a part of its GPUs has
another degree or place, or is left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from partition.assembly import Groups
from partition.batches import divisors
from partition.drafts import Settings, degrees, fits_heads
from partition.graph import DeviceGraph
from partition.pricing import Devices
from sim.spec.cluster import Node
from sim.spec.job import Job
from sim.spec.plan import SLICED_SCHEDULES, slice_counts

Score: TypeAlias = "Callable[[Deal, float], float]"
"""Seconds of an iteration of a deal, infinite where it cannot run; where they are longer than given ones, any that are, too."""

MICRO_BATCHES = (1, 2, 4, 8)
"""Sizes of micro-batches that are tried; for others see `micro_batches`."""

SCHEDULES = (("1f1b", 0), ("split-1f1b", 0), ("split-1f1b", 1), ("split-1f1b", 2), ("eager-1f1b", 0))
"""Schedules that are tried with all else, and how many micro-batches more are held for messages between nodes (`Settings`): those
that need least memory first."""

SLICES = (1, 2, 4, 8)
"""Into how many slices sequences are cut, as far as their length allows."""

SLICED = 0.5
"""The share of random deals whose sequences are cut, where the schedule allows it."""

SPLIT_SCHEDULES = ("zb-1p", "zb-2p")
"""Schedules that divide backwards, which suit rows that are settled."""

DEALINGS = ("in turn", "by node", "by row")
"""How groups are dealt: those of each node to one pipeline after the other, so that stages of the same layers are neighbours; of
each node a part that lies together; of each row a part in as few nodes as possible."""

DEALT = (0.4, 0.4, 0.2)
"""How often random deals have each of them."""

MOST_CUT = 60
"""Of so many changes that cut a row one must help, or a descent ends: the many others are left to the next descents."""

OFFLOADED = 0.25
"""The share of random deals that keep the optimizer's states in the hosts' memory, where GPUs are short of it."""

PARTS = 8
"""Into so many parts a row is divided at most, some of which a random deal has before all other rows."""

SHUFFLED = 0.5
"""The share of random deals whose other rows stand in random order; in the rest they are as the path has them, or reversed."""

FEW_MORE = 0.25
"""GPUs that a node has more than most of its sort are a row of their own where they are at most this share of the others."""

KICKS, KICKED = 50, 2
"""How often a random change of a deal is tried until it fits, and the most changes that it is made of."""


@dataclass(frozen=True)
class Layout:
    """The stages' tensor-parallel groups of all pipelines, in stage order, and what holds for all of them."""

    pipelines: tuple[Groups, ...]
    micro_batch: int
    settings: Settings


@dataclass(frozen=True)
class Row:
    """Devices of some nodes, node by node, and the degree of their tensor-parallel groups; 0 leaves them out."""

    nodes: tuple[Devices, ...]
    degree: int

    def parts(self, pipelines: int) -> Iterator[tuple[tuple[Devices, ...], tuple[Devices, ...]]]:
        """Parts of it with the rest: one node, one for each of so many pipelines, half of them, half of the devices of each."""
        nodes = self.nodes
        for count in sorted({1, pipelines, len(nodes) // 2, len(nodes) - len(nodes) // 2}):
            if 0 < count < len(nodes):
                yield nodes[:count], nodes[count:]
        if any(len(held) > 1 for held in nodes):
            halves = [(held[: len(held) // 2], held[len(held) // 2 :]) for held in nodes]
            one, other = (tuple(filter(None, sides)) for sides in zip(*halves, strict=True))
            yield one, other
            yield other, one


@dataclass(frozen=True)
class Deal:
    """Rows in stage order, and how they are dealt."""

    rows: tuple[Row, ...]
    pipelines: int
    dealing: str
    """One of DEALINGS."""
    micro_batch: int
    settings: Settings


def micro_batches(job: Job, size: int) -> tuple[int, ...]:
    """The sizes of micro-batches to try where they have a size: the small ones, and twice and half as many sequences.

    A small model on short sequences computes best with dozens of them, and few jobs have memory for that. Where twice as many do
    not divide the batch, the next that do: 127 sequences after four of 508.
    """
    further = [other for other in (size // 2, size, 2 * size) if MICRO_BATCHES[-1] < other <= job.global_batch]
    if job.global_batch % (2 * size):
        whole = divisors(job.global_batch)
        at = bisect_left(whole, size)
        further += [other for other in whole[max(0, at - 1) : at + 2] if other not in (*MICRO_BATCHES, *further)]
    return (*MICRO_BATCHES, *further)


class Deals:
    """The deals of one job on some nodes."""

    def __init__(self, graph: DeviceGraph, job: Job, nodes: Sequence[Node], memory: Mapping[str, float], seed: int) -> None:
        self._graph, self._job, self._seed = graph, job, seed
        devices = {node.name: tuple(f"{node.name}/{index}" for index in range(node.gpus)) for node in nodes}
        order = graph.path(list(devices), {name: sum(memory[device] for device in own) for name, own in devices.items()})
        self.schedules = tuple(entry for entry in SCHEDULES if len(nodes) > 1 or not entry[1])
        """Those that are tried: no message leaves the only node."""
        self.slices = tuple(slices for slices in slice_counts(job.sequence_length) if slices in SLICES)
        kinds = _alike(nodes)
        alike: dict[tuple[Node, int], list[Devices]] = {}
        for name in order:
            most = kinds[name].gpus
            for part in (devices[name][:most], devices[name][most:]):
                if part:
                    alike.setdefault((kinds[name], len(part)), []).append(part)
        self._rows = [tuple(held) for held in alike.values()]
        self._spare = [len(held[0]) < node.gpus for (node, _), held in alike.items()]
        """Of each row, whether it is what some nodes have more than most of their sort."""
        sorts = list(dict.fromkeys(node for node, _ in alike))
        self._sort = {name: sorts.index(kinds[name]) for name in order}
        self._grouped: dict[tuple[Devices, int], list[Devices]] = {}

    def starts(self, pipelines: int, settings: Settings) -> Iterator[Deal]:
        """Deals of so many pipelines in which all rows have one degree, or the largest below it that they allow.

        The GPUs that some nodes have more than most are left out first, and then not.
        """
        allowed = [self._degrees(nodes) for nodes in self._rows]
        for degree in sorted({degree for some in allowed for degree in some}):
            rows = tuple(Row(nodes, max(d for d in some if d <= degree)) for nodes, some in zip(self._rows, allowed, strict=True))
            without = tuple(Row(row.nodes, 0) if spare else row for row, spare in zip(rows, self._spare, strict=True))
            for dealt in dict.fromkeys((without, rows)):
                for dealing in DEALINGS if pipelines > 1 else DEALINGS[:1]:
                    yield Deal(dealt, pipelines, dealing, 1, settings)

    def few(self, pipelines: int, settings: Settings) -> Iterator[Deal]:
        """Deals of so many pipelines on some nodes of one row, half of them, a quarter, ...: all others are left out."""
        for i, nodes in enumerate(self._rows):
            if self._spare[i]:
                continue
            others = [Row(row, 0) for n, row in enumerate(self._rows) if n != i]
            for count in sorted({max(1, len(nodes) >> halvings) for halvings in range(len(nodes).bit_length())}):
                left = [Row(nodes[count:], 0)] if count < len(nodes) else []
                for degree in self._degrees(nodes):
                    yield Deal((Row(nodes[:count], degree), *left, *others), pipelines, DEALINGS[0], 1, settings)

    def drawn(self, pipelines: int, rng: np.random.Generator, short: bool = False, slices: bool = True) -> Deal:
        """A random deal of so many pipelines: one row in two parts, all others between them, each of any degree.

        Where memory is short some have the optimizer's states in the hosts' memory. With `slices` some cut sequences. What some
        nodes have more than most is left out half of the time.
        """
        spare = {nodes for nodes, spare in zip(self._rows, self._spare, strict=True) if spare}
        cut = int(rng.integers(len(self._rows)))
        nodes, others = self._rows[cut], [row for i, row in enumerate(self._rows) if i != cut]
        at = int(rng.integers(len(nodes) + 1)) if len(nodes) < PARTS else int(rng.integers(PARTS + 1)) * len(nodes) // PARTS
        if rng.random() < SHUFFLED:
            others = [others[i] for i in rng.permutation(len(others))]
        elif rng.random() < 0.5:
            others.reverse()
        parts = [part for part in (nodes[:at], *others, nodes[at:]) if part]
        rows = []
        for part in parts:
            allowed = self._degrees(part)
            degree = allowed[int(rng.integers(len(allowed)))]
            rows.append(Row(part, 0 if part in spare and rng.random() < 0.5 else degree))
        schedules = (*self.schedules, (SPLIT_SCHEDULES[-1], 0))
        schedule, ahead = schedules[int(rng.integers(len(schedules)))]
        settings = Settings(schedule, 1, bool(rng.random() < 0.5), short and bool(rng.random() < OFFLOADED), ahead=ahead)
        if slices and schedule in SLICED_SCHEDULES and rng.random() < SLICED:
            settings = replace(settings, sequence_slices=self.slices[int(rng.integers(len(self.slices)))])
        dealing = str(rng.choice(DEALINGS, p=DEALT))
        return Deal(tuple(rows), pipelines, dealing, MICRO_BATCHES[int(rng.integers(2))], settings)

    def layout(self, deal: Deal) -> Layout | None:
        """The layout of a deal; None where pipelines would have no stage, stages no layer, or sequences cannot be divided so."""
        runs: list[list[Devices]] = []
        for row in deal.rows:
            if row.degree:
                groups = [self._groups(devices, row.degree) for devices in row.nodes]
                runs += [[group for own in groups for group in own]] if deal.dealing == "by row" else groups
        pipelines = tuple(shared_out(runs, deal.pipelines, deal.dealing == "in turn"))
        if len(pipelines) < deal.pipelines or max(map(len, pipelines)) > self._job.model.layers:
            return None
        batch, (length, rest) = self._job.global_batch, divmod(self._job.sequence_length, deal.settings.sequence_slices)
        if rest or batch % deal.micro_batch or deal.pipelines * deal.micro_batch > batch:
            return None
        if deal.settings.sequence_parallel and any(row.degree and length % row.degree for row in deal.rows):
            return None
        return Layout(pipelines, deal.micro_batch, deal.settings)

    def _row(self, nodes: tuple[Devices, ...], degree: int) -> Row:
        """A row of this degree, or of the largest below it that its nodes allow."""
        return Row(nodes, max((allowed for allowed in self._degrees(nodes) if allowed <= degree), default=0))

    def _degrees(self, nodes: Sequence[Devices]) -> list[int]:
        """The degrees that a row may have: those that divide a node's GPUs, and powers of two, which may leave some out."""
        most = min(map(len, nodes))
        powers = [1 << n for n in range(most.bit_length()) if fits_heads(self._job, 1 << n)]
        return sorted({*degrees(self._job, most), *powers})

    def _groups(self, devices: Devices, degree: int) -> list[Devices]:
        """A node's devices in groups of a degree."""
        key = devices, degree
        found = self._grouped.get(key)
        if found is None:
            found = self._grouped[key] = self._graph.tensor_groups(devices, degree, self._seed)
        return found

    # --- Changes ---

    def near(self, deal: Deal, reslices: bool = True) -> Iterator[Deal]:
        """All deals that differ in one choice: a row's degree or place, the order as a whole, or what holds for all pipelines.

        With `reslices` among these is in how many slices sequences come.

        Where a row that is left out would stand makes no difference; it may take the place of another one. What was cut of one
        row and stands together can go elsewhere together, and be one row again.
        """
        rows, settings = deal.rows, deal.settings
        for i, row in enumerate(rows):
            for degree in (0, *self._degrees(row.nodes)):
                if degree != row.degree:
                    yield replace(deal, rows=(*rows[:i], Row(row.nodes, degree), *rows[i + 1 :]))
            if row.degree:
                yield from _placed(deal, (*rows[:i], *rows[i + 1 :]), row, (i,))
            else:
                yield from self._instead(deal, (*rows[:i], *rows[i + 1 :]), row.nodes)
        for start, stop in self._runs(rows):
            run, rest = rows[start:stop], (*rows[:start], *rows[stop:])
            for at in range(len(rest) + 1):
                if at != start:
                    yield replace(deal, rows=(*rest[:at], *run, *rest[at:]))
            nodes = _joined(run)
            for degree in self._degrees(nodes):
                yield replace(deal, rows=(*rest[:start], Row(nodes, degree), *rest[start:]))
        if len(rows) > 2:
            yield replace(deal, rows=rows[::-1])
        if deal.pipelines > 1:
            yield from (replace(deal, dealing=dealing) for dealing in DEALINGS if dealing != deal.dealing)
        for size in micro_batches(self._job, deal.micro_batch):
            if size != deal.micro_batch:
                yield replace(deal, micro_batch=size)
        if any(row.degree > 1 for row in rows):
            yield replace(deal, settings=replace(settings, sequence_parallel=not settings.sequence_parallel))
        for other in (changed_zero(settings), changed_offload(settings)):
            if other is not None:
                yield replace(deal, settings=other)
        for schedule, ahead in self.schedules:
            if (schedule, ahead) != (settings.schedule, settings.ahead):
                yield replace(deal, settings=settings.under(schedule, ahead))
        if reslices:
            yield from (replace(deal, settings=changed) for changed in self.resliced(settings))

    def resliced(self, settings: Settings) -> Iterator[Settings]:
        """The settings with sequences in any other number of slices; none where the schedule takes no slices."""
        if settings.schedule in SLICED_SCHEDULES and settings.zero_stage < 2:
            for slices in self.slices:
                if slices != settings.sequence_slices:
                    yield replace(settings, sequence_slices=slices)

    def _runs(self, rows: Sequence[Row]) -> list[tuple[int, int]]:
        """Where neighbours of one sort of nodes begin and end that are in use, two at least."""
        sorts = [self._sort[row.nodes[0][0].rpartition("/")[0]] if row.degree else None for row in rows]
        ends = [i for i in range(len(rows) + 1) if i in (0, len(rows)) or sorts[i] != sorts[i - 1]]
        return [(start, stop) for start, stop in pairwise(ends) if sorts[start] is not None and stop - start > 1]

    def split(self, deal: Deal) -> Iterator[Deal]:
        """The deal under the schedules that divide backwards."""
        for schedule in SPLIT_SCHEDULES:
            if schedule != deal.settings.schedule:
                yield replace(deal, settings=deal.settings.under(schedule))

    def cut(self, deal: Deal) -> Iterator[Deal]:
        """All deals in which a row is cut in two, a part of which has another degree or place than it had."""
        rows = deal.rows
        for i, row in enumerate(rows):
            for one, other in row.parts(deal.pipelines):
                stays = self._row(other, row.degree)
                if not row.degree:
                    yield from self._instead(deal, (*rows[:i], stays, *rows[i + 1 :]), one)
                for degree in (0, *self._degrees(one)):
                    if degree != row.degree:
                        made = Row(one, degree)
                        yield replace(deal, rows=(*rows[:i], made, stays, *rows[i + 1 :]))
                        if degree and row.degree:
                            yield replace(deal, rows=(*rows[:i], stays, made, *rows[i + 1 :]))
                if row.degree:
                    moves = self._row(one, row.degree)
                    yield from _placed(deal, (*rows[:i], stays, *rows[i + 1 :]), moves, (i, i + 1))

    def _instead(self, deal: Deal, rest: Sequence[Row], nodes: tuple[Devices, ...]) -> Iterator[Deal]:
        """The deal in which nodes that are left out stand in the place of a row, which is left out instead."""
        for at, row in enumerate(rest):
            if row.degree:
                taken = self._row(nodes, row.degree)
                yield replace(deal, rows=(*rest[:at], taken, *rest[at + 1 :], Row(row.nodes, 0)))

    def descended(
        self,
        deal: Deal,
        score_s: Score,
        rng: np.random.Generator,
        late: Callable[[], bool],
        judged_s: Callable[[Deal], float] | None = None,
        splits: bool = False,
        cuts: bool = True,
        hope_s: float = math.inf,
        reslices: bool = True,
    ) -> tuple[float, Deal]:
        """The deal to which changes lead that improve it, in random order, until none is found, and its score.

        All changes of one choice are tried (see `near`), with `splits` schedules that divide backwards, and with `cuts` some of
        the many that cut a row, unless it has come to no less than `hope_s` without.
        With `judged_s`, which may be slow, a change has to be better by that, too. It ends before when it is late.
        """
        seconds, by_judge_s = score_s(deal, math.inf), judged_s(deal) if judged_s is not None else math.inf

        def better(changes: Sequence[Deal], most: int | None = None) -> tuple[float, float, Deal] | None:
            """The first of so many of these changes, in random order, that helps; None where none does, or it is late."""
            for i in rng.permutation(len(changes))[:most]:
                if late():
                    return None
                changed_s = score_s(changes[i], seconds)
                if changed_s < seconds * (1 - 1e-9):
                    judged = judged_s(changes[i]) if judged_s is not None else by_judge_s
                    if judged_s is None or judged < by_judge_s:
                        return changed_s, judged, changes[i]
            return None

        def changed() -> tuple[float, float, Deal] | None:
            """What one change leads to, of the sorts of changes in their order."""
            return (
                better(list(self.near(deal, reslices)))
                or (better(list(self.split(deal))) if splits else None)
                or (better(list(self.cut(deal)), MOST_CUT) if cuts and seconds < hope_s else None)
            )

        while (found := changed()) is not None:
            seconds, by_judge_s, deal = found
        return seconds, deal

    def kicked(self, deal: Deal, score_s: Score, rng: np.random.Generator) -> Deal:
        """The deal after a few random changes that leave it feasible; as it is where none do."""
        for _ in range(KICKS):
            made = deal
            for _ in range(1 + int(rng.integers(KICKED))):
                neighbours = list(self.near(made) if rng.random() < 0.5 else self.cut(made)) or list(self.near(made))
                made = neighbours[int(rng.integers(len(neighbours)))]
            if score_s(made, math.inf) < math.inf:
                return made
        return deal


def _alike(nodes: Sequence[Node]) -> dict[str, Node]:
    """What nodes are like, by name: alike are those that differ in their names, and in a few GPUs more than most have, alone.

    Most are two at least, and more than have as many as that one. A power of two is never more than others have.
    """
    sorts = {node.name: replace(node, name="", rack=None, gpus=1) for node in nodes}
    numbers: dict[Node, Counter[int]] = {}
    for node in nodes:
        numbers.setdefault(sorts[node.name], Counter())[node.gpus] += 1
    everywhere = Counter(node.gpus for node in nodes)
    found = {}
    for node in nodes:
        sort = sorts[node.name]
        # Where none of a sort is like another, what is usual is what nodes of other sorts have.
        known = numbers[sort] if max(numbers[sort].values()) > 1 else everywhere
        usual = min(known, key=lambda gpus: (-known[gpus], gpus))
        few = usual < node.gpus <= usual * (1 + FEW_MORE) and node.gpus & (node.gpus - 1)
        found[node.name] = replace(sort, gpus=usual if few and known[usual] > max(1, known[node.gpus]) else node.gpus)
    return found


def changed_zero(settings: Settings) -> Settings | None:
    """The settings with ZeRO 0 for 1, or 1 for 0; None where states are offloaded, which all copies under ZeRO 0 would update."""
    return None if settings.offload_optimizer else replace(settings, zero_stage=1 - settings.zero_stage)


def changed_offload(settings: Settings) -> Settings | None:
    """The settings with the optimizer's states in the hosts' memory, or back on the GPUs; None under ZeRO 0."""
    return replace(settings, offload_optimizer=not settings.offload_optimizer) if settings.zero_stage else None


def _placed(deal: Deal, rest: Sequence[Row], row: Row, but: Sequence[int]) -> Iterator[Deal]:
    """The deal with a row at each place among the rest, but for some."""
    for at in range(len(rest) + 1):
        if at not in but:
            yield replace(deal, rows=(*rest[:at], row, *rest[at:]))


def _joined(rows: Iterable[Row]) -> tuple[Devices, ...]:
    """The devices of some rows, node by node, each node's by number."""
    held: dict[str, list[str]] = {}
    for row in rows:
        for devices in row.nodes:
            held.setdefault(devices[0].rpartition("/")[0], []).extend(devices)
    return tuple([tuple(sorted(devices, key=lambda name: int(name.rpartition("/")[2]))) for devices in held.values()])


def shared_out(runs: Sequence[Sequence[Devices]], twins: int, in_turn: bool = False) -> list[Groups]:
    """Runs of groups dealt to as many pipelines in equal parts; those that got one more of a run come last at the next.

    A part lies together, unless groups are dealt to one pipeline after the other.
    """
    pipes: list[list[Devices]] = [[] for _ in range(twins)]
    extra = 0
    for groups in runs:
        each, more = divmod(len(groups), twins)
        at = 0
        for t in range(twins):
            order = (t - extra) % twins
            count = each + (order < more)
            pipes[t] += groups[order::twins] if in_turn else groups[at : at + count]
            at += count
        extra += more
    return [tuple(pipe) for pipe in pipes if pipe]
