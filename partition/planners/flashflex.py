"""The planner that partitions the graph of devices in levels: GPUs to pipelines, pipelines to stages, layers to stages.

After FlashFlex / HexiScale (Yan et al., 2024, arXiv:2409.01143):

    1  The devices, joined by their bandwidths, are cut into groups of fast links with METIS, balanced by compute or memory.
    2  The devices that a group has on one node are cut into tensor-parallel groups by a second partition; each is a stage.
    3  Stages follow each other along the path of nodes whose slowest link is fastest.
    4  Layers go to the stages by memory and by speed, and the batch to the pipelines by speed.
    5  Two groups are merged and cut anew, and the result is kept if the price falls.

Done otherwise than there. A group may become several twin pipelines, which share each of its nodes: their gradients are then
reduced inside the nodes and only activations cross, which is what slow networks need and what a cut that keeps fast links
inside each pipeline never finds. A group may also leave nodes out, visit one twice, turn its order, or choose the degrees node
by node; all of it by a local search under the quick price of `partition.pricing`, from many starts. Layers are split with the
micro-batches in flight and the messages counted (`partition.assembly`), and recomputation is chosen per stage, only where
memory demands it. Left out: the paper's own cost model, tensor-parallel groups that span nodes, ZeRO 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np

from partition.assembly import Assembly, Groups
from partition.drafts import SLACK, Draft, Settings, degrees, judge_in_order, reject, usable_nodes
from partition.graph import DeviceGraph
from partition.pricing import Pricing
from partition.search import Search, register
from sim.spec.cluster import Node
from sim.spec.reading import InputError

MICRO_BATCHES = (1, 2, 4)
TWINS = (1, 2, 3, 4, 6, 8, 16, 32)
PRICED_GPUS = 32_000
"""Drafts priced, times the cluster's GPUs: what the search spends before it has the best ones judged, within these bounds."""
FEWEST_PRICED, MOST_PRICED = 100, 1000
STARTS = 3
"""Starting points that are improved, the best of different shapes."""

PARTITIONS = ("any", "graph", "random", "whole")
"""How the first level divides the GPUs: graph, cut by METIS; random, with a part drawn for each GPU, as the option
`--apply_random_strategy` of the paper's program does; whole, not at all. any: graph, whole, and by their kinds."""


@dataclass(frozen=True)
class Phases:
    """Which of the planner's phases are at work; an ablation leaves some out. Raises InputError for an unknown partition."""

    partition: str = "any"
    """Of PARTITIONS."""
    uneven_degrees: bool = True
    """Whether stages may differ in their tensor-parallel degree."""
    local_search: bool = True
    """Whether what the partition gives is improved (step 5, and all that is done otherwise than in the paper)."""

    def __post_init__(self) -> None:
        if self.partition not in PARTITIONS:
            raise InputError(f"a partition is one of {', '.join(PARTITIONS)}, but got {self.partition!r}")


ALL_PHASES = Phases()


# --- The candidate ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Some devices of one node in groups of `degree`: consecutive stages."""

    devices: tuple[str, ...]
    degree: int

    @property
    def node(self) -> str:
        """The node of its devices."""
        return self.devices[0].rpartition("/")[0]


@dataclass(frozen=True)
class Team:
    """Blocks in the order that a micro-batch visits them, dealt to as many twin pipelines."""

    blocks: tuple[Block, ...]
    twins: int


@dataclass(frozen=True)
class Candidate:
    """All teams, and what holds for all pipelines."""

    teams: tuple[Team, ...]
    micro_batch: int
    settings: Settings

    @property
    def shape(self) -> object:
        """What makes two candidates alike enough that one of them is judged first."""
        used = sum(len(block.devices) for team in self.teams for block in team.blocks)
        numbers = tuple(sorted(team.twins for team in self.teams))
        return numbers, self.micro_batch, self.settings.schedule, used


Move: TypeAlias = Callable[[], Candidate]


# --- The planner -----------------------------------------------------------------------------------------------------


@register("flashflex")
def flashflex(search: Search) -> None:
    """Partitions the graph of devices in levels, improves that by local moves under the quick price, has the best judged."""
    in_phases(search, ALL_PHASES)


def in_phases(search: Search, phases: Phases) -> None:
    """As `flashflex`, with these of its phases: a planner for ablations, once it has them."""
    nodes = usable_nodes(search)
    if not nodes:
        return
    climb = Climb(search, nodes, phases=phases)
    starts = climb.starts()
    climb.judge_best()
    if phases.local_search:
        for start in starts:
            climb.improve(start, climb.allowed // (2 * len(starts)))
        climb.judge_best()
        climb.explore()
    if not climb.priced:
        reject(search, climb.graph.devices)
    judge_in_order(search, climb.ranked())


class Climb:
    """The local search: what was priced so far, and how much more may be."""

    def __init__(
        self, search: Search, nodes: Sequence[Node], rng: np.random.Generator | None = None, phases: Phases = ALL_PHASES
    ) -> None:
        self.search, self.nodes, self.phases = search, {node.name: node for node in nodes}, phases
        self.rng = rng or search.rng
        self.pricing = Pricing(search.cluster, search.job)
        self.assembly = Assembly(search.cluster, search.job, self.pricing)
        self.graph = DeviceGraph(self.pricing.network, nodes)
        self.device = search.cluster.device
        kinds = {name: self.device(name).gpu for name in self.graph.devices}
        self.speed = {name: (kind.peak(search.job.precision) or 0.0) * kind.speed for name, kind in kinds.items()}
        self.memory = {name: float(self.device(name).gpu.memory_bytes) for name in self.graph.devices}
        self.allowed = min(max(FEWEST_PRICED, PRICED_GPUS // len(self.graph.devices)), MOST_PRICED)
        self.priced: dict[Candidate, tuple[float, Draft]] = {}
        self._seen: dict[Candidate, float] = {}
        self._groups: dict[Block, list[tuple[str, ...]]] = {}

    # --- Pricing ---

    def price_s(self, candidate: Candidate) -> float:
        """The quick price of a candidate, infinite where it cannot be built or does not fit."""
        found = self._seen.get(candidate)
        if found is None:
            self.search.check_budget()
            found = float("inf")
            pipelines = self.pipelines(candidate)
            draft = self.assembly.draft(pipelines, candidate.micro_batch, candidate.settings) if pipelines else None
            if draft is not None:
                found = self.pricing.price_s(draft, candidate.settings)
                self.priced[candidate] = found, draft
            self._seen[candidate] = found
        return found

    @property
    def spent(self) -> bool:
        """Whether all that may be priced is."""
        return len(self._seen) >= self.allowed

    def pipelines(self, candidate: Candidate) -> list[Groups]:
        """The stages of all pipelines: each block's groups are dealt to the twins of its team in equal runs."""
        found = []
        for team in candidate.teams:
            dealt: list[list[tuple[str, ...]]] = [[] for _ in range(team.twins)]
            extra = 0
            for block in team.blocks:
                groups = self._tensor_groups(block)
                each, more = divmod(len(groups), team.twins)
                at = 0
                for t in range(team.twins):
                    # Twins that got one more of this block come last at the next one.
                    count = each + ((t - extra) % team.twins < more)
                    dealt[t] += groups[at : at + count]
                    at += count
                extra += more
            found += [tuple(groups) for groups in dealt if groups]
        return found

    def _tensor_groups(self, block: Block) -> list[tuple[str, ...]]:
        """The second-level partition: a block's devices in tensor-parallel groups."""
        found = self._groups.get(block)
        if found is None:
            found = self._groups[block] = self.graph.tensor_groups(block.devices, block.degree, self.search.seed)
        return found

    # --- Starting points ---

    def starts(self) -> list[Candidate]:
        """The best candidates of different shapes among those that the partition gives directly."""
        everything = [
            Candidate(
                tuple(Team(tuple(self._with_degree(block, degree) for block in blocks), twins) for blocks in teams),
                size,
                Settings(),
            )
            for teams in self._partitions()
            for twins in TWINS
            if twins <= max(len(block.devices) for blocks in teams for block in blocks)
            for degree in self._degrees()
            for size in MICRO_BATCHES[:2]
        ]
        first: list[tuple[float, int, Candidate]] = []
        for i in self.rng.permutation(len(everything)):
            if len(self._seen) < self.allowed // 3:
                first.append((self.price_s(everything[i]), int(i), everything[i]))
        first.sort(key=lambda entry: entry[:2])
        chosen: dict[object, Candidate] = {}
        for _, _, candidate in first:
            shape = tuple((len(team.blocks), team.twins) for team in candidate.teams)
            if len(chosen) < STARTS:
                chosen.setdefault(shape, candidate)
        return list(chosen.values())

    def _partitions(self) -> Iterator[list[list[Block]]]:
        """The first level: the devices as one group, and in two and more groups cut by METIS; each in path order."""
        seen: list[list[list[Block]]] = []
        by_kind: dict[str, list[str]] = {}
        for name in self.graph.devices:
            by_kind.setdefault(self.device(name).gpu.name, []).append(name)
        count = len(self.graph.devices)
        groupings = [[self.graph.devices]] if self.phases.partition in ("any", "whole") else []
        if len(by_kind) > 1 and self.phases.partition == "any":
            groupings.append(list(by_kind.values()))
        for parts in sorted({2, 3, 4, len(self.nodes), *(2**n for n in range(3, 8))}):
            if parts <= min(count, 2 * len(self.nodes)) and self.phases.partition != "whole":
                for weight in (self.speed, self.memory):
                    groupings.append(self._cut(self.graph.devices, parts, weight, self.search.seed))
        for grouping in groupings:
            teams = [self._blocks(devices) for devices in grouping]
            if teams not in seen:
                seen.append(teams)
                yield teams

    def _cut(self, devices: Sequence[str], parts: int, weight: dict[str, float], seed: int) -> list[list[str]]:
        """The devices in about so many parts: cut by METIS under this seed, or drawn."""
        if self.phases.partition != "random":
            return self.graph.partition(devices, parts, [weight[name] for name in devices], seed)
        drawn: list[list[str]] = [[] for _ in range(parts)]
        for name, part in zip(devices, self.rng.integers(parts, size=len(devices)), strict=True):
            drawn[part].append(name)
        return [part for part in drawn if part]

    def _blocks(self, devices: Sequence[str]) -> list[Block]:
        """Devices by node, along the path whose slowest link is fastest, nodes with more memory first."""
        by_node: dict[str, list[str]] = {}
        for name in devices:
            by_node.setdefault(name.rpartition("/")[0], []).append(name)
        memory = {node: sum(self.memory[name] for name in names) for node, names in by_node.items()}
        return [Block(tuple(by_node[node]), 1) for node in self.graph.path(list(by_node), memory)]

    def _degrees(self) -> list[int]:
        """Tensor-parallel degrees that some node allows, of which the powers of two are tried first."""
        most = max(node.gpus for node in self.nodes.values())
        return [degree for degree in degrees(self.search.job, most) if degree & (degree - 1) == 0] or [1]

    def _with_degree(self, block: Block, degree: int) -> Block:
        """The block with this degree, or with the largest one below it that its number of devices allows.

        Where all stages have one degree, devices that do not make a whole group are left out.
        """
        if not self.phases.uneven_degrees:
            return replace(block, degree=degree)
        allowed = degrees(self.search.job, len(block.devices))
        return replace(block, degree=max(d for d in allowed if d <= degree))

    # --- Improvement ---

    def improve(self, candidate: Candidate, most: int) -> Candidate:
        """The candidate after moves that lower its price, until none does or so many were priced."""
        until = len(self._seen) + most
        at_s = self.price_s(candidate)
        better = True
        while better:
            better = False
            moves = self._moves(candidate)
            for i in self.rng.permutation(len(moves)):
                if self.spent or len(self._seen) >= until:
                    return candidate
                changed = moves[i]()
                if not changed.teams or changed == candidate:
                    continue
                price_s = self.price_s(changed)
                if price_s < at_s:
                    candidate, at_s, better = changed, price_s, True
                    break
        return candidate

    def explore(self) -> None:
        """Improves what two random moves make of the best candidates so far, until all that may be priced is."""
        rounds = 0
        while not self.spent and self.priced and rounds < self.allowed:
            rounds += 1
            self.search.check_budget()
            best = sorted(self.priced, key=lambda candidate: self.priced[candidate][0])[:8]
            candidate = best[int(self.rng.integers(len(best)))]
            for _ in range(2):
                moves = self._moves(candidate)
                changed = moves[int(self.rng.integers(len(moves)))]()
                candidate = changed if changed.teams else candidate
            self.improve(candidate, self.allowed // 10)

    # --- Moves ---

    def _moves(self, candidate: Candidate) -> list[Move]:
        """All changes of a candidate by one step, not yet made."""
        moves: list[Move] = []
        teams, settings, cuts = candidate.teams, candidate.settings, self.phases.partition != "whole"
        for t, team in enumerate(teams):
            most = max(len(block.devices) for block in team.blocks)
            for n in TWINS:
                if n != team.twins and n <= most:
                    moves.append(partial(_with_team, candidate, t, replace(team, twins=n)))
            for b in range(len(team.blocks)):
                moves += self._block_moves(candidate, t, b)
            if len(team.blocks) > 1:
                moves.append(partial(_with_team, candidate, t, replace(team, blocks=team.blocks[::-1])))
                if cuts:
                    moves.append(partial(self._recut, candidate, (t,), 2))
            for u in range(t):
                moves.append(partial(self._recut, candidate, (t, u), 1))
                moves.append(partial(self._recut, candidate, (t, u), 2))
        if not self.phases.uneven_degrees:
            moves += [partial(self._at_degree, candidate, degree) for degree in self._degrees()]
        for names in self._unused(candidate):
            moves.append(partial(self._added, candidate, names))
        for n in MICRO_BATCHES:
            if n != candidate.micro_batch:
                moves.append(partial(replace, candidate, micro_batch=n))
        other = "gpipe" if settings.schedule == "1f1b" else "1f1b"
        moves.append(partial(replace, candidate, settings=replace(settings, schedule=other)))
        used = {block.degree for team in teams for block in team.blocks}
        if used != {1} and all(self.search.job.sequence_length % degree == 0 for degree in used):
            turned = replace(settings, sequence_parallel=not settings.sequence_parallel)
            moves.append(partial(replace, candidate, settings=turned))
        return moves

    def _block_moves(self, candidate: Candidate, t: int, b: int) -> list[Move]:
        """The moves of one block: degrees, halves, another place, another team, out, and one with the block before it."""
        team = candidate.teams[t]
        block, before, after = team.blocks[b], team.blocks[:b], team.blocks[b + 1 :]
        changed = []
        for degree in degrees(self.search.job, len(block.devices)):
            if degree != block.degree and self.phases.uneven_degrees:
                changed.append((*before, replace(block, degree=degree), *after))
                changed.append(self._all_alike(team, block, degree))
        changed.append((*before, *after))
        if len(block.devices) > 1:
            half = len(block.devices) // 2
            pieces = (Block(block.devices[:half], 1), Block(block.devices[half:], 1))
            changed.append((*before, *(self._with_degree(piece, block.degree) for piece in pieces), *after))
        if before and before[-1].node == block.node:
            joined = Block(before[-1].devices + block.devices, 1)
            changed.append((*before[:-1], self._with_degree(joined, before[-1].degree), *after))
        for place in range(len(team.blocks)):
            if place != b:
                others = before + after
                changed.append((*others[:place], block, *others[place:]))
        moves: list[Move] = [partial(_with_team, candidate, t, replace(team, blocks=blocks)) for blocks in changed]
        moves += [partial(_given, candidate, t, b, u) for u in range(len(candidate.teams)) if u != t]
        return moves

    def _at_degree(self, candidate: Candidate, degree: int) -> Candidate:
        """The candidate with this degree everywhere."""
        teams = tuple(
            replace(team, blocks=tuple(replace(block, degree=degree) for block in team.blocks)) for team in candidate.teams
        )
        return replace(candidate, teams=teams)

    def _all_alike(self, team: Team, like: Block, degree: int) -> tuple[Block, ...]:
        """The team's blocks with this degree where their kind of GPU is that of the block."""
        kind = self.device(like.devices[0]).gpu.name
        return tuple(
            self._with_degree(block, degree) if self.device(block.devices[0]).gpu.name == kind else block for block in team.blocks
        )

    def _recut(self, candidate: Candidate, chosen: Sequence[int], parts: int) -> Candidate:
        """Some teams merged and, if into several parts, cut anew (by METIS under another seed); degrees are kept node by node.

        Two teams into two parts is the refinement step of the paper.
        """
        blocks = [block for t in chosen for block in candidate.teams[t].blocks]
        devices = sorted((name for block in blocks for name in block.devices), key=self.graph.devices.index)
        degree = {block.node: block.degree for block in blocks}
        weight = self.speed if self.rng.integers(2) else self.memory
        cut = self._cut(devices, parts, weight, int(self.rng.integers(1 << 20)))
        twins = max(candidate.teams[t].twins for t in chosen)
        made = [
            Team(tuple(self._with_degree(block, degree[block.node]) for block in self._blocks(names)), twins) for names in cut
        ]
        kept = [team for t, team in enumerate(candidate.teams) if t not in chosen]
        return replace(candidate, teams=(*kept, *made))

    def _unused(self, candidate: Candidate) -> list[tuple[str, ...]]:
        """The devices of each node that the candidate leaves out."""
        used = {name for team in candidate.teams for block in team.blocks for name in block.devices}
        by_node: dict[str, list[str]] = {}
        for name in self.graph.devices:
            if name not in used:
                by_node.setdefault(name.rpartition("/")[0], []).append(name)
        return [tuple(names) for names in by_node.values()]

    def _added(self, candidate: Candidate, names: tuple[str, ...]) -> Candidate:
        """Devices of a node that were left out put into some team, at some place."""
        t = int(self.rng.integers(len(candidate.teams)))
        team = candidate.teams[t]
        at = int(self.rng.integers(len(team.blocks) + 1))
        allowed = degrees(self.search.job, len(names)) if self.phases.uneven_degrees else [team.blocks[0].degree]
        block = Block(names, allowed[int(self.rng.integers(len(allowed)))])
        return _with_team(candidate, t, replace(team, blocks=(*team.blocks[:at], block, *team.blocks[at:])))

    # --- Ranking ---

    def judge_best(self) -> None:
        """Has the best draft so far judged, so that a search whose budget ends in the middle has an answer."""
        if self.priced:
            judge_in_order(self.search, islice(self.ranked(), 1))

    def ranked(self) -> Iterator[tuple[Draft, Settings]]:
        """The drafts to judge, all of a price near the best one's: the best of each shape first, then the others."""
        order = sorted(self.priced.items(), key=lambda entry: entry[1][0])
        near = [candidate for candidate, (price_s, _) in order if price_s <= SLACK * order[0][1][0]]
        leaders: dict[object, Candidate] = {}
        for candidate in near:
            leaders.setdefault(candidate.shape, candidate)
        for candidate in dict.fromkeys([*leaders.values(), *near]):
            yield self.priced[candidate][1], candidate.settings


def _with_team(candidate: Candidate, t: int, team: Team) -> Candidate:
    """The candidate with another team in place of team t, or without it where that has no blocks left."""
    there = (team,) if team.blocks else ()
    return replace(candidate, teams=(*candidate.teams[:t], *there, *candidate.teams[t + 1 :]))


def _given(candidate: Candidate, t: int, b: int, u: int) -> Candidate:
    """Block b of team t given to team u, next to a block of its node if there is one."""
    giver, taker = candidate.teams[t], candidate.teams[u]
    block = giver.blocks[b]
    at = next((i + 1 for i, other in enumerate(taker.blocks) if other.node == block.node), len(taker.blocks))
    teams = list(candidate.teams)
    teams[u] = replace(taker, blocks=(*taker.blocks[:at], block, *taker.blocks[at:]))
    teams[t] = replace(giver, blocks=giver.blocks[:b] + giver.blocks[b + 1 :])
    return replace(candidate, teams=tuple(team for team in teams if team.blocks))
