"""What the lanes of a plan will do, found before they run: seconds of computation, transfers, and the routes that these take.

Of pipelines that behave alike (`sim.alike`) the first is prepared to run for all: its transfers load the links as all of theirs
do. What pipelines are built alike is found from their lanes, before these have instructions: so few are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from sim.alike import alike
from sim.cost.compute import ComputeCost, host_of
from sim.cost.network import Network, Transfer
from sim.cost.sharing import Route, routes, slowest_bytes
from sim.cost.traffic import exchange, inner, message, sum_of_shards, switch_owners, work
from sim.spec.compile import lane_instructions, lanes_of
from sim.spec.plan import LayerRange, Plan
from sim.spec.program import (
    Collective,
    Compute,
    GatherParameters,
    Instruction,
    Lane,
    OptimizerStep,
    Program,
    ReduceGradients,
    Send,
    SendActivation,
    SendGradient,
    Sequences,
    WorkKey,
    work_key,
)

SpanKey: TypeAlias = tuple[str, type[Instruction], LayerRange | None, int]
"""A lane, a type of instruction that computes, its layers, its slice of the sequences: the micro-batches of a lane are alike."""

MessageKey: TypeAlias = tuple[type[Instruction], str, int, Sequences]


def message_key(instruction: Send) -> MessageKey:
    """What decides the message of a send in its lane."""
    return type(instruction), instruction.peer, instruction.layer, instruction.sequences


class Shape:
    """A transfer that instructions use over and over, its route, and how often it was used."""

    __slots__ = ("route", "transfer", "uses")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer, self.uses = transfer, 0
        self.route: Route | None = None


@dataclass(frozen=True)
class Work:
    """What a compute instruction takes: seconds, and the transfers of its collectives, beside and after it or folded in."""

    seconds: float
    beside: Shape | None = None
    after: Shape | None = None
    folded: bool = False

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of its collectives."""
        return round(sum(shape.transfer.num_bytes for shape in self.shapes))

    @property
    def shapes(self) -> list[Shape]:
        """The transfers of its collectives."""
        return [shape for shape in (self.beside, self.after) if shape is not None]


@dataclass(frozen=True)
class LaneWork:
    """What the instructions of a lane take, whichever micro-batch they are of."""

    work: Mapping[WorkKey, Work]
    messages: Mapping[MessageKey, Shape]

    @cached_property
    def sharing(self) -> list[Shape]:
        """Its transfers that share links with others."""
        inside = [shape for work in self.work.values() if not work.folded for shape in work.shapes]
        return [*inside, *self.messages.values()]

    @cached_property
    def shapes(self) -> list[Shape]:
        """All its transfers."""
        return [*(shape for work in self.work.values() if work.folded for shape in work.shapes), *self.sharing]

    @property
    def alone(self) -> Hashable:
        """What is the same of lanes that are built alike, and that take as long where nobody else uses the links."""
        times = [(work.seconds, work.folded, work.beside is None, work.after is None) for work in self.work.values()]
        return tuple(times), tuple((shape.transfer.latency_s, shape.transfer.num_bytes) for shape in self.shapes)


@dataclass(frozen=True)
class _Uses:
    """One instruction for each work and message of a lane, in the order in which they come, and its collectives."""

    first: tuple[Compute | OptimizerStep | Send, ...]
    collectives: tuple[Collective, ...]

    @classmethod
    def of(cls, lane: Lane) -> _Uses:
        first: dict[WorkKey | MessageKey, Compute | OptimizerStep | Send] = {}
        collectives: list[Collective] = []
        for i in lane.instructions:
            if isinstance(i, (SendActivation, SendGradient)):
                first.setdefault(message_key(i), i)
            elif isinstance(i, (ReduceGradients, GatherParameters)):
                collectives.append(i)
            elif isinstance(i, (Compute, OptimizerStep)):
                first.setdefault(work_key(i, lane.sequence_slices), i)
        return cls(tuple(first.values()), tuple(collectives))


class Prepared:
    """A plan on a cluster, ready to run.

    `program` has the lanes that run, and `like` says for each lane of the plan which of these does what it does; `lanes` are all
    by name, `works` what they take, `exchanges` the transfer of each collective, `sums` that of the sum of shards that follows
    some of them, and `members` how many lanes take part in each.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        slowdowns: Mapping[str, float] | None = None,
        program: Program | None = None,
        known_s: Mapping[SpanKey, float] = MappingProxyType({}),
        condense: bool = True,
    ) -> None:
        """`program`: the plan compiled, if it is. `known_s`: see `sim.engine.simulate`. Without `condense` every lane runs."""
        self.plan, self.network, self._slowdowns, self._known_s = plan, network, slowdowns or {}, known_s
        if program is None:
            lanes, ends = lanes_of(plan)
        else:
            lanes, ends = list(program.lanes), {}
        self.lanes = {lane.name: lane for lane in lanes}

        def compiled(name: str) -> Lane:
            lane = self.lanes[name]
            return lane if program is not None else replace(lane, instructions=tuple(lane_instructions(plan, lane, ends)))

        built = _built_alike(plan, lanes) if condense else {name: name for name in self.lanes}
        models = {name: compiled(name) for name in dict.fromkeys(built.values())}
        uses = {name: _Uses.of(lane) for name, lane in models.items()}
        cost, owners = ComputeCost(plan, network.cluster), switch_owners(plan, lanes, network.cluster)
        self._computing = self._computing_alike(lanes, built)
        self.works = {
            lane.name: self._lane_work(lane, models[built[lane.name]], uses[built[lane.name]], cost, lane.name in owners)
            for lane in lanes
        }
        members: dict[Collective, list[Lane]] = {}
        for lane in lanes:
            for collective in uses[built[lane.name]].collectives:
                members.setdefault(collective, []).append(lane)
        self.exchanges, self.sums = self._exchanges(members)
        self.members = {collective: len(held_by) for collective, held_by in members.items()}
        self.like = self._route(built)
        running = [name for name, first in self.like.items() if name == first]
        self.program = Program(tuple(models[name] if name in models else compiled(name) for name in running))

    def _lane_work(self, lane: Lane, model: Lane, uses: _Uses, cost: ComputeCost, folded: bool) -> LaneWork:
        """What a lane's instructions take, which are those of the model but for their peers."""
        slowdown = max((self._slowdowns.get(device, 1.0) for device in lane.devices), default=1.0)
        peers = self.peers(model.name, lane.name)
        works, messages = {}, {}
        for i in uses.first:
            if isinstance(i, (SendActivation, SendGradient)):
                own = replace(i, peer=peers[i.peer])
                messages[message_key(own)] = Shape(message(self.network, self.plan, lane, self.lanes[own.peer], own))
            else:
                works[work_key(i, lane.sequence_slices)] = self._work(lane, i, cost, folded, slowdown)
        return LaneWork(works, messages)

    def _work(self, lane: Lane, instruction: Compute | OptimizerStep, cost: ComputeCost, folded: bool, slowdown: float) -> Work:
        """Seconds and collectives of one instruction; on an NVLink switch that the lane has to itself, seconds alone."""
        like = self._computing[lane.name]
        taken = work(self.network, cost, like, instruction, inner(self.network, cost, lane, instruction, like))
        taken = replace(taken, seconds=taken.seconds * slowdown)
        beside, after = (Shape(transfer) if transfer else None for transfer in (taken.beside, taken.after))
        seconds = taken.alone_s(self.network) if folded else taken.seconds
        if folded or beside is after is None:
            seconds = self._known_s.get((lane.name, *work_key(instruction, lane.sequence_slices)), seconds)
        return Work(seconds, beside, after, folded)

    def _computing_alike(self, lanes: Sequence[Lane], built: Mapping[str, str]) -> dict[str, Lane]:
        """For each lane the first that computes as long: it is built alike, of the same kinds of GPUs at the same speeds."""
        cluster, first = self.network.cluster, dict[Hashable, Lane]()
        # What messages that keep a lane take, and steps of rings, depends on the nodes that devices are on.
        if cluster.stack.ring_step_s or cluster.stack.keeps_messages(len(cluster.nodes)):
            return {lane.name: lane for lane in lanes}
        kinds: dict[str, Hashable] = {device.name: id(device.gpu) for device in cluster.devices}
        if self.plan.offload_optimizer:  # the step depends on the host, too
            kinds = {device.name: (id(device.gpu), *host_of(device.node)) for device in cluster.devices}
        keys = {lane.name: (built[lane.name], *(kinds.get(device, device) for device in lane.devices)) for lane in lanes}
        return {lane.name: first.setdefault(keys[lane.name], lane) for lane in lanes}

    def _exchanges(self, members: Mapping[Collective, Sequence[Lane]]) -> tuple[dict[Collective, Shape], dict[Collective, Shape]]:
        """The transfers of all collectives, and of sums of shards; those of every micro-batch alike are one shape."""
        by_form: dict[Hashable, tuple[Shape, Shape | None]] = {}
        exchanges, sums = {}, {}
        for instruction, lanes in members.items():
            form = (type(instruction), instruction.layers, tuple(lane.name for lane in lanes))
            if form not in by_form:
                summed = sum_of_shards(self.network, self.plan, instruction, lanes)
                one = Shape(exchange(self.network, self.plan, instruction, lanes))
                by_form[form] = one, None if summed is None else Shape(summed)
            exchanges[instruction], following = by_form[form]
            if following is not None:
                sums[instruction] = following
        return exchanges, sums

    def _route(self, built: Mapping[str, str]) -> dict[str, str]:
        """For each lane the first that behaves as it does; gives the transfers of these, and of collectives, their routes."""
        capacities = self.network.capacities()
        pipelines: dict[int, list[str]] = {}
        for lane in self.lanes.values():
            pipelines.setdefault(lane.pipeline, []).append(lane.name)
        groups = list(pipelines.values())
        shared = self._shared
        firsts, links = alike(
            [tuple((built[name], self.works[name].alone) for name in names) for names in groups],
            [[shape.transfer for name in names for shape in self.works[name].sharing] for names in groups],
            [shape.transfer for shape in shared],
            capacities,
        )
        like = {
            name: one for names, first in zip(groups, firsts, strict=True) for name, one in zip(names, groups[first], strict=True)
        }
        loads: dict[Shape, dict[int, float]] = {}
        for name, first in like.items():
            for shape, one in zip(self.works[name].sharing, self.works[first].sharing, strict=True):
                _add(loads.setdefault(one, {}), shape.transfer, links)
        for shape in shared:
            _add(loads.setdefault(shape, {}), shape.transfer, links)
        transfers = [replace(shape.transfer, loads=tuple(load.items())) for shape, load in loads.items()]
        sizes_bytes = [slowest_bytes(shape.transfer, capacities) for shape in loads]
        for shape, route in zip(loads, routes(transfers, capacities, sizes_bytes), strict=True):
            shape.route = route
        return like

    @property
    def _shared(self) -> list[Shape]:
        """The transfers that no pipeline has to itself."""
        return list(dict.fromkeys([*self.exchanges.values(), *self.sums.values()]))

    def peers(self, model: str, name: str) -> dict[str, str]:
        """For each peer of a lane that of another one which is built as it is."""
        one, other = self.lanes[model], self.lanes[name]
        return {a.peer: b.peer for a, b in zip(one.previous + one.next, other.previous + other.next, strict=True)}

    def link_bytes(self) -> dict[int, float]:
        """The bytes that crossed each link, of all lanes, after the run; in whatever order they are summed."""
        found: dict[int, list[float]] = {}
        used = [
            (shape.transfer, one.uses)
            for name, first in self.like.items()
            for shape, one in zip(self.works[name].shapes, self.works[first].shapes, strict=True)
        ]
        for transfer, uses in [*used, *((shape.transfer, shape.uses) for shape in self._shared)]:
            for link, load in transfer.loads:
                found.setdefault(link, []).append(load * uses)
        return {link: math.fsum(some) for link, some in found.items()}


def _add(loads: dict[int, float], transfer: Transfer, links: Mapping[int, int]) -> None:
    """Adds what a transfer puts on links that are the first of their class."""
    for link, num_bytes in transfer.loads:
        if links[link] == link:
            loads[link] = loads.get(link, 0.0) + num_bytes


def _built_alike(plan: Plan, lanes: Sequence[Lane]) -> dict[str, str]:
    """For each lane the one at its place in the first pipeline built as its own: their instructions differ in peers alone."""
    pipelines: dict[int, list[Lane]] = {}
    for lane in lanes:
        pipelines.setdefault(lane.pipeline, []).append(lane)
    first: dict[Hashable, list[Lane]] = {}
    found: dict[str, str] = {}
    for p, own in pipelines.items():
        model = first.setdefault(plan.pipelines[p].build, own)
        found |= {lane.name: one.name for lane, one in zip(own, model, strict=True)}
    return found
