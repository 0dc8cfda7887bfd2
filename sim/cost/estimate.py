"""The fast judge: an iteration as one chain of maxima and sums, without simulating events.

The order of a lane's instructions, of its messages to a peer and of its collectives is known before anything is timed, so
that every end is the latest of a few earlier ends plus a duration (a max-plus recursion). The chain is laid out once; other
constants only change the durations.

Lanes that cannot differ are one: lanes of equal work, devices and places whose neighbours are alike and whose messages take
equally long (the coarsest such division of the lanes, found by refining colours). Symmetric data parallelism folds to one
pipeline.

Sharing. Of the transfers of lanes that are one, each shares its links with the others of its kind, for they are under way at
the same time: a link takes the smaller of two transfers' loads for each other transfer. Where others use the same links, too, all
are followed from one event to the next, at their max-min rates (`sim.cost.meeting`). So the estimate is what the simulation
would say, but for lanes that are one and meet different others.

Long schedules repeat themselves: the chain is laid out for fewer micro-batches, and where all ends of a period come equally
much later than those of an earlier one, so do all later ends (a max-plus recursion is homogeneous), and the rest is a
multiple. Where they do not, the chain is laid out longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from sim.alike import islands
from sim.collector import garbage_collector_paused
from sim.cost.compute import ComputeCost, TensorCollective
from sim.cost.feasibility import infeasible
from sim.cost.memory import peak_bytes
from sim.cost.network import Network, Transfer, together
from sim.cost.price import dollars, energy_j
from sim.cost.traffic import (
    Inner,
    collective_scale,
    computing_s,
    exchange,
    hidden_shares,
    inner,
    message,
    ring_steps_s,
    sum_of_shards,
    switch_owners,
    work,
)
from sim.metrics import recompute_flop
from sim.spec.cluster import Cluster
from sim.spec.compile import compile_plan, lane_instructions, lanes_of
from sim.spec.counts import model_flop
from sim.spec.gpu import GpuKind
from sim.spec.job import Job
from sim.spec.judge import Cost, Forecast, Infeasible, Verdict
from sim.spec.plan import LayerRange, Plan
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Compute,
    Forward,
    GatherParameters,
    Instruction,
    Lane,
    OptimizerStep,
    Recv,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    Send,
    SendActivation,
    SendGradient,
    Sequences,
    WorkKey,
    dependencies,
    dry_run,
    work_key,
)
from sim.spec.reading import InputError
from sim.spec.stack import Stack

if TYPE_CHECKING:
    from sim.cost.meeting import Course, Routes

COLLECTIVE_TYPES = (ReduceGradients, GatherParameters)

COMPUTES, SENDS, RECEIVES, JOINS = "computes", "sends", "receives", "joins"
_ROLES: Mapping[type[Instruction], str] = {
    **dict.fromkeys((Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep), COMPUTES),
    **dict.fromkeys((SendActivation, SendGradient), SENDS),
    **dict.fromkeys((RecvActivation, RecvGradient), RECEIVES),
    **dict.fromkeys(COLLECTIVE_TYPES, JOINS),
}
"""What a lane does with each type of instruction."""


def estimation(cluster: Cluster, job: Job) -> Forecast:
    """The judge that estimates plans of one job on one cluster. Raises InputError for the plan of another job."""
    network = Network(cluster)  # its paths serve every plan

    def judge(plan: Plan) -> Verdict:
        if plan.job() != job:
            raise InputError(f"the judge was made for the job {job.summary}, but the plan is for {plan.job().summary}")
        reason = infeasible(plan, cluster)
        if isinstance(reason, Infeasible):
            return reason
        return Estimate(plan, cluster, network).cost()

    return Forecast(judge)


# --- What is under way -----------------------------------------------------------------------------------------------


class _Form:
    """A transfer that a lane that stands for others uses over and over, and how long it takes among those of its kind.

    `wire_s` is until its links are free, `latency_s` from then until the last byte has arrived.
    """

    __slots__ = ("beside", "late", "latency_s", "members", "streams", "wire_s")

    def __init__(self, members: list[Transfer], wire_s: float, late: bool, streams: frozenset[object]) -> None:
        self.members, self.wire_s, self.latency_s = members, wire_s, members[0].latency_s
        self.late = late
        """Whether the ends of its flows in the chain are those of the last byte's arrival."""
        self.beside = False
        """Whether it goes on beside the computation that begins with it."""
        self.streams = streams
        """What it stands in line with: forms that share one are never under way together."""


def _alike_s(transfers: Sequence[Transfer], capacities: Sequence[float]) -> list[float]:
    """Seconds of each of some transfers that begin together, without latency: a link gives all on it the same rate."""
    users: dict[int, list[float]] = {}
    for transfer in transfers:
        for link, num_bytes in transfer.loads:
            users.setdefault(link, []).append(num_bytes)
    found = []
    known: dict[tuple[int, float], float] = {}
    for transfer in transfers:
        seconds = 0.0
        for link, own in transfer.loads:
            loads, shared = users[link], own
            if len(loads) > 1:
                if (link, own) not in known:
                    known[link, own] = sum([min(own, load) for load in loads])
                shared = known[link, own]
            seconds = max(seconds, shared / capacities[link])
        found.append(seconds)
    return found


# --- Lanes that are one ----------------------------------------------------------------------------------------------


class _Folded:
    """The lanes of a plan, which of them are one, and the transfers of those that stand for the others."""

    def __init__(self, plan: Plan, cluster: Cluster, network: Network, cost: ComputeCost) -> None:
        self.plan, self.cluster, self.network, self.cost = plan, cluster, network, cost
        self.lanes, self._ends = lanes_of(plan)
        self._islands = islands(plan, cluster)
        self._number = {lane.name: n for n, lane in enumerate(self.lanes)}
        self._own = [n for n, lane in enumerate(self.lanes) if self._islands.pipelines[lane.pipeline] == lane.pipeline]
        """The lanes, by number, of islands that no other one stands for; of them alone anything is found."""
        self._standing_links: dict[int, int] = {}
        self._owners = switch_owners(plan, self.lanes, cluster)
        self._prepare_messages()
        self._colour = self._first_colours()
        self._wire_s: dict[int, list[float]] = {}
        self._wired: dict[int, int] = {}
        """The colours with which `_wire_s` was found."""
        self._refine({})
        self._tensor: dict[int, dict[WorkKey, tuple[Transfer, float]]] = {n: {} for n in self._own}
        self._refine(self._tensors())
        self._groups = self._by_colour()
        self.groups = self._with_islands(self._groups)
        """Lanes that are one, by number; the first of each stands for all."""
        self._group = {n: g for g, group in enumerate(self._groups) for n in group}
        self.standing = [self.lanes[group[0]] for group in self._groups]

    def _by_colour(self) -> list[list[int]]:
        """The own lanes of each colour."""
        groups: dict[int, list[int]] = {}
        for n, colour in self._colour.items():
            groups.setdefault(colour, []).append(n)
        return list(groups.values())

    def _with_islands(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Groups of own lanes with all lanes of the islands that theirs stand for."""
        first: dict[int, int] = {}
        for n, lane in enumerate(self.lanes):
            first.setdefault(lane.pipeline, n)
        stood_for: dict[int, list[int]] = {}
        for pipeline, standing in enumerate(self._islands.pipelines):
            stood_for.setdefault(standing, []).append(first[pipeline])
        found = []
        for group in groups:
            places = [(self.lanes[n].pipeline, n) for n in group]
            found.append(sorted([begin + n - first[own] for own, n in places for begin in stood_for[own]]))
        return found

    # --- Messages ---

    def _prepare_messages(self) -> None:
        """Every lane's outgoing messages with their transfers, and where in its sender's list each incoming one stands."""
        lanes = self.lanes
        self._places: dict[tuple[type[Send], int, str, str, Sequences], int] = {}
        self._messages: dict[int, list[tuple[int, Transfer]]] = {}
        for n in self._own:
            lane = lanes[n]
            outgoing: list[tuple[int, Transfer]] = []
            known: dict[tuple[int, Sequences], Transfer] = {}  # those of all layers and both directions are alike
            for kind, edges in ((SendActivation, lane.next), (SendGradient, lane.previous)):
                for edge in edges:
                    peer, sent = self._number[edge.peer], kind(0, edge.layer, edge.peer, edge.sequences)
                    self._places[kind, edge.layer, lane.name, edge.peer, edge.sequences] = len(outgoing)
                    if (peer, edge.sequences) not in known:
                        known[peer, edge.sequences] = message(self.network, self.plan, lane, lanes[peer], sent)
                    outgoing.append((peer, known[peer, edge.sequences]))
            self._messages[n] = outgoing
        self._incoming = {
            n: [
                (self._number[edge.peer], self._places[kind, edge.layer, edge.peer, lanes[n].name, edge.sequences])
                for kind, edges in ((SendActivation, lanes[n].previous), (SendGradient, lanes[n].next))
                for edge in edges
            ]
            for n in self._own
        }

    # --- Colours ---

    def _first_colours(self) -> dict[int, int]:
        """Lanes of one colour compute the same for equally long; where they have their links to themselves, these are equal."""
        plan, step = self.plan, OptimizerStep()
        numbers: dict[object, int] = {}
        positions = [{s: i for i, s in enumerate(pipeline.visiting_order)} for pipeline in plan.pipelines]
        own: dict[str, tuple[object, ...]] = {}
        for link in self.cluster.link_overrides:
            for end in link.name.split(">"):
                own[end] = (*own.get(end, ()), (link.name.startswith(end), link.bandwidth_bytes_per_s, link.latency_s))
        colours = {}
        for n in self._own:
            lane = self.lanes[n]
            stage, place = plan.pipelines[lane.pipeline].stages[lane.stage], positions[lane.pipeline]
            devices = [self.cluster.device(name) for name in lane.devices]
            key = (
                tuple([id(device.gpu) for device in devices]),
                # What steps of rings and messages take beside their transfers depends on the nodes.
                tuple([self.cluster.nodes_of(group) for group in (lane.devices, *lane.tensor_groups)]),
                (devices[0].node.intra, *[own.get(device.name) for device in devices]) if self._alone(lane) else None,
                lane.name in self._owners,
                lane.sequences[1] - lane.sequences[0],
                lane.layers,
                lane.embedding,
                lane.head,
                lane.buckets,
                lane.split,
                lane.micro_batches,
                stage.recompute,
                tuple(stage.recomputed().items()),
                place[lane.stage],
                len(place),
                # States in host memory make the step depend on the host.
                self.cost.seconds(lane, step) if plan.offload_optimizer else None,
            )
            colours[n] = numbers.setdefault(key, len(numbers))
        return colours

    def _alone(self, lane: Lane) -> bool:
        """Whether no other lane's collectives inside its work can use the links of this one's: NVLink ports inside one node."""
        node = self.cluster.device(lane.devices[0]).node
        if not node.intra.is_nvlink or self.plan.expert_parallel > 1 or self.cluster.bandwidth_matrix is not None:
            return False
        return all(self.cluster.device(name).node is node for name in lane.devices)

    def _refine(self, tensors: Mapping[int, tuple[float, ...]]) -> None:
        """Divides colours until lanes of one colour have neighbours of equal colours, and equally long transfers to them."""
        capacities = self.network.capacities()
        count = len(set(self._colour.values()))
        while True:
            if self._colour != self._wired:
                self._wire_s, self._wired = self._shared_wire_s(capacities), self._colour
            numbers: dict[object, int] = {}
            colour, refined = self._colour, dict[int, int]()
            for n in self._own:
                outgoing = tuple(
                    (colour[peer], _rounded(wire_s), _rounded(transfer.latency_s))
                    for (peer, transfer), wire_s in zip(self._messages[n], self._wire_s[n], strict=True)
                )
                incoming = tuple((colour[peer], place) for peer, place in self._incoming[n])
                key = (colour[n], outgoing, incoming, tensors.get(n))
                refined[n] = numbers.setdefault(key, len(numbers))
            if len(numbers) == count:
                return
            self._colour, count = refined, len(numbers)

    def _shared_wire_s(self, capacities: Sequence[float]) -> dict[int, list[float]]:
        """Seconds of each lane's messages, among those that lanes of its colour send at the same time."""
        alike: dict[tuple[int, int], list[int]] = {}
        for n, outgoing in self._messages.items():
            for place in range(len(outgoing)):
                alike.setdefault((self._colour[n], place), []).append(n)
        found = {n: [0.0] * len(outgoing) for n, outgoing in self._messages.items()}
        for (_, place), group in alike.items():
            times = _alike_s([self._messages[n][place][1] for n in group], capacities)
            for n, wire_s in zip(group, times, strict=True):
                found[n][place] = wire_s
        return found

    def _tensors(self) -> dict[int, tuple[float, ...]]:
        """Seconds of the collectives inside each lane's work, among those of lanes of its colour; prepares `_tensor`.

        Lanes that have their links to themselves are left out.
        """
        signatures: dict[int, tuple[float, ...]] = {}
        capacities = self.network.capacities()
        for group in self._by_colour():
            first = self.lanes[group[0]]
            if self._alone(first) or (len(first.devices) == 1 and self.plan.expert_parallel == 1):
                continue
            known: dict[tuple[TensorCollective, ...], tuple[list[Transfer], list[float]]] = {}
            for instruction in self.work(first):
                collectives = self.cost.collectives(first, instruction)
                if collectives not in known:
                    transfers = [self.inside(self.lanes[n], instruction) for n in group]
                    capacities = capacities if len(capacities) == len(self.network.links) else self.network.capacities()
                    known[collectives] = transfers, _alike_s(transfers, capacities)
                for n, transfer, wire_s in zip(group, *known[collectives], strict=True):
                    self._tensor[n][self._key(instruction)] = (transfer, wire_s)
            for transfers, times in known.values():
                for n, transfer, wire_s in zip(group, transfers, times, strict=True):
                    signatures[n] = (*signatures.get(n, ()), _rounded(wire_s), _rounded(transfer.latency_s))
        return signatures

    # --- What is asked of it ---

    def instructions(self, lane: Lane, micro_batches: int | None = None) -> list[Instruction]:
        """The instructions of a lane, of the plan's micro-batches or of another number of them."""
        if micro_batches is not None:
            lane = replace(lane, micro_batches=micro_batches)
        return list(lane_instructions(self.plan, lane, self._ends))

    def work(self, lane: Lane) -> list[Compute]:
        """One instruction of each form of a lane's forwards and backwards."""
        few = min(lane.micro_batches, 2)  # the last micro-batch may be divided otherwise than the others
        found: dict[WorkKey, Compute] = {}
        for instruction in self.instructions(lane, few):
            if isinstance(instruction, (Forward, Backward, BackwardInput, BackwardWeight)):
                found.setdefault(self._key(instruction), instruction)
        return list(found.values())

    def _key(self, instruction: Compute | OptimizerStep) -> WorkKey:
        """What the time of an instruction depends on, besides its lane."""
        return work_key(instruction, self.plan.sequence_slices)

    def inside(self, lane: Lane, instruction: Compute) -> Transfer:
        """The transfer of all collectives inside one instruction."""
        return together(inner(self.network, self.cost, lane, instruction))

    def inner(self, group: int, instruction: Compute | OptimizerStep) -> Inner:
        """The transfers inside one instruction of a standing lane."""
        return inner(self.network, self.cost, self.standing[group], instruction)

    def group_of(self, name: str) -> int:
        """The group of a lane, by its name."""
        return self._group[self._number[name]]

    def message(self, group: int, kind: type[Send], layer: int, peer: str, sequences: Sequences) -> int:
        """Where in its list of messages a standing lane has one."""
        return self._places[kind, layer, self.standing[group].name, peer, sequences]

    def sent_by(self, group: int, instruction: Recv) -> tuple[int, int]:
        """The group that sends what a standing lane receives, and where in its list the message stands."""
        kind = SendActivation if isinstance(instruction, RecvActivation) else SendGradient
        place = self._places[kind, instruction.layer, instruction.peer, self.standing[group].name, instruction.sequences]
        return self.group_of(instruction.peer), place

    def messages(self, group: int, place: int) -> tuple[list[Transfer], float, object]:
        """The transfers of one message of all lanes of a group, the seconds of the first's, and what it stands in line with."""
        numbers, lane = self._groups[group], self.standing[group]
        stream = group, self._messages[numbers[0]][place][0], place < len(lane.next)
        return [self._messages[n][place][1] for n in numbers], self._wire_s[numbers[0]][place], stream

    def tensor(self, group: int, instruction: Compute) -> tuple[list[Transfer], float]:
        """The transfers of the collectives inside one instruction of all lanes of a group, and the seconds of the first's.

        None, where there are none that could meet others; the first's alone, where it has its links to itself.
        """
        numbers, key, lane = self._groups[group], self._key(instruction), self.standing[group]
        if len(lane.devices) > 1 and self._alone(lane):
            if lane.name in self._owners:
                return [], 0.0
            transfer = self.inside(lane, instruction)
            return [transfer], self.network.busiest_s(transfer)
        found = [self._tensor[n][key] for n in numbers if key in self._tensor[n]]
        return [transfer for transfer, _ in found], found[0][1] if found else 0.0

    def parts(self, group: int, instruction: Compute) -> tuple[list[Transfer], list[Transfer]]:
        """Of the same lanes as `tensor`, the transfers beside one instruction and those after it, with the own constants."""
        numbers, lane = self._groups[group], self.standing[group]
        lanes = [lane] if self._alone(lane) else [self.lanes[n] for n in numbers]
        taken = [work(self.network, self.cost, each, instruction) for each in lanes]
        return [each.beside for each in taken], [each.after for each in taken]

    def collective(self, instruction: Collective, groups: Iterable[int]) -> tuple[Transfer, Transfer | None]:
        """The transfer of a reduction or gather over all lanes of some groups, and of the sum of shards after it."""
        members = [self.lanes[n] for n in sorted(n for group in groups for n in self.groups[group])]
        exchanged = exchange(self.network, self.plan, instruction, members)
        summed = sum_of_shards(self.network, self.plan, instruction, members)
        return self._on_standing(exchanged), None if summed is None else self._on_standing(summed)

    def _on_standing(self, transfer: Transfer) -> Transfer:
        """A transfer on the links of the islands that stand for others, each with the most of those that it stands for."""
        known, nodes, links = self._standing_links, self._islands.nodes, self.network.links
        if not nodes:
            return transfer
        loads: dict[int, float] = {}
        for link, num_bytes in transfer.loads:
            standing = known.get(link)
            if standing is None:
                node = nodes.get(links[link].node or "")
                standing = known[link] = link if node is None else self.network.in_place_of(link, node)
            if num_bytes > loads.get(standing, 0.0):
                loads[standing] = num_bytes
        return replace(transfer, loads=tuple(sorted(loads.items())))


def _rounded(seconds: float) -> float:
    """To eleven digits, so that sums in another order are equal."""
    return float(f"{seconds:.10e}")


# --- The chain -------------------------------------------------------------------------------------------------------


Link: TypeAlias = tuple[int, int, int, int]
"""`(i, j, k, l)`: its end is the later of end i + duration k and end j + duration l."""

MESSAGE, REDUCTION, GATHER = "messages", "gradient reduction", "parameter gather"
"""What a lane can wait for."""


_Step: TypeAlias = tuple[int, int, int, WorkKey | None, str | None]
"""What a lane does at one link of the chain: its end, the lane's end before it, the number of its duration, its work (None where
it only waits), and what it waits for."""


@dataclass
class _Chain:
    """The laid-out program: its links, and what they stand for. End 0 is the beginning; link n gives end n + 1."""

    micro_batches: int | None
    links: list[Link] = field(default_factory=list)
    steps: list[list[_Step]] = field(default_factory=list)
    """Of every group's lane, in its order."""
    flows: dict[int, list[int]] = field(default_factory=dict)
    """The ends of each form that others can slow."""
    last: list[tuple[int, int, int]] = field(default_factory=list)
    """Of every group: the end of its lane, of its collectives, and of sums of shards."""
    period: tuple[int, int, int, int] | None = None
    """Of the stretch that repeats itself: its last end, links of a period, micro-batches of a period, how far back it looks."""
    course: Course | None = None
    """Itself as arrays; made when it is first timed."""


class _Layout:
    """Lays out a chain: lanes take turns, in their order, each as far as its next computation."""

    def __init__(self, estimate: Estimate, micro_batches: int | None) -> None:
        self._estimate, self._folded = estimate, estimate.folded
        self.chain = _Chain(micro_batches)
        self._links = self.chain.links
        self._slices = estimate.plan.sequence_slices
        lanes = self._folded.standing
        self._instructions = [self._folded.instructions(lane, micro_batches) for lane in lanes]
        self._lanes = [
            replace(lane, micro_batches=micro_batches or lane.micro_batches, instructions=tuple(instructions))
            for lane, instructions in zip(lanes, self._instructions, strict=True)
        ]
        members: dict[Collective, list[int]] = {}
        for g, instructions in enumerate(self._instructions):
            for instruction in instructions:
                if isinstance(instruction, COLLECTIVE_TYPES):
                    members.setdefault(instruction, []).append(g)
        self._members = members
        self._at = [0] * len(lanes)
        self._ends = [0] * len(lanes)
        self._waits: list[list[tuple[int, int, str]]] = [[] for _ in lanes]
        self._queues: dict[object, int] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        self._joined: list[list[tuple[Collective, int]]] = [[] for _ in lanes]
        self._next_joined = [0] * len(lanes)
        self._collective_ends, self._sum_ends = [0] * len(lanes), [0] * len(lanes)
        self._summed: set[Collective] = set()
        self._collected: dict[Collective, int] = {}
        self._sends: list[dict[object, tuple[int, list[int], object]]] = [{} for _ in lanes]
        """Of each group's messages, by what they are of a micro-batch: form, flows, and what they stand in line with."""
        self._receives: list[dict[object, int]] = [{} for _ in lanes]
        self._works: list[dict[WorkKey, tuple[int, tuple[list[int], ...]]]] = [{} for _ in lanes]
        """Of each group's work: the number of its duration, and the flows of its collectives."""
        self._labels: list[tuple[int, WorkKey] | None] = []
        self.chain.steps = [[] for _ in lanes]
        waiting = {OptimizerStep}
        self._waiting = [waiting | ({Forward, Backward, BackwardInput} if lane.split == "all" else set()) for lane in lanes]

    def laid_out(self) -> _Chain:
        """The chain. Raises InputError, with the grid of a deadlock, for a program that cannot be executed."""
        groups, sweeps = range(len(self._lanes)), [0]
        left = sum(map(len, self._instructions))
        while left:
            gone = sum(self._turn(g) for g in groups)
            if not gone:
                dry_run(compile_plan(self._estimate.plan))  # raises, and shows where the lanes stand
                raise RuntimeError(f"{left} instructions were never laid out")
            left -= gone
            sweeps.append(len(self._links))
        for g in groups:
            self._wait_for_all(g)
        self.chain.last = list(zip(self._ends, self._collective_ends, self._sum_ends, strict=True))
        if self.chain.micro_batches is not None:
            self.chain.period = self._period(sweeps)
        return self.chain

    # --- One lane's turn ---

    def _turn(self, g: int) -> int:
        """How many instructions the lane executed: those up to its second computation, or to one that has to wait."""
        instructions, at = self._instructions[g], self._at[g]
        begun, computed, count = at, False, len(instructions)
        while at < count:
            instruction: Any = instructions[at]
            role = _ROLES.get(instruction.__class__)
            if role is RECEIVES:
                if not self._receive(g, instruction):
                    break
            elif role is COMPUTES:
                if computed or not self._compute(g, instruction):
                    break
                computed = True
            elif role is SENDS:
                self._send(g, instruction)
            elif role is JOINS:
                self._join(g, instruction)
            else:
                raise TypeError(f"no estimate for {instruction!r}")
            at += 1
        self._at[g] = at
        return at - begun

    def _link(self, i: int, j: int, k: int, l: int, label: tuple[int, WorkKey] | None = None) -> int:  # noqa: E741
        self._links.append((i, j, k, l))
        self._labels.append(label)
        return len(self._links)

    def _wait_for_all(self, g: int, but_last: bool = False) -> None:
        """Lets the lane wait for what it has to wait for (but the last of it)."""
        waits = self._waits[g]
        while len(waits) > but_last:
            end, latency, cause = waits.pop(0)
            before = self._ends[g]
            self._ends[g] = self._link(before, end, 0, latency)
            self.chain.steps[g].append((self._ends[g], before, 0, None, cause))

    def _compute(self, g: int, instruction: Compute | OptimizerStep) -> bool:
        waits = self._waits[g]
        if instruction.__class__ in self._waiting[g]:
            # A lane's collectives follow one another, and so do its sums of shards, so that the last laid out is the last to end.
            latest: dict[bool, tuple[int, int, str]] = {}
            for _, other in dependencies(self._lanes[g], instruction):
                if isinstance(other, COLLECTIVE_TYPES):
                    end = self._collected.get(other)
                    if end is None:
                        return False
                    queue = other in self._summed
                    if queue not in latest or end > latest[queue][0]:
                        latest[queue] = end, 0, REDUCTION if isinstance(other, ReduceGradients) else GATHER
            waits += latest.values()
        work = work_key(instruction, self._slices)
        known = self._works[g].get(work)
        if known is None:
            number = self._estimate.work_number(g, instruction)
            known = self._works[g][work] = number, tuple(map(self._flows, self._estimate.tensor_forms.get((g, work), ())))
        number, flows = known
        before = self._ends[g]
        if waits:
            self._wait_for_all(g, but_last=True)
            before = self._ends[g]
            end, latency, cause = waits.pop()
            both = self._estimate.sum_number(latency, number) if latency else number
            after = self._ends[g] = self._link(before, end, number, both, (g, work))
            self.chain.steps[g].append((after, before, number, work, cause))
        else:
            after = self._ends[g] = self._link(before, before, number, number, (g, work))
            self.chain.steps[g].append((after, before, number, work, None))
        for flow in flows:
            flow.append(after)
        return True

    def _flows(self, form: int) -> list[int]:
        """The ends of a form in the chain, to which more are added."""
        return self.chain.flows.setdefault(form, [])

    def _send(self, g: int, instruction: Send) -> None:
        if self._waits[g]:
            self._wait_for_all(g)
        key = (instruction.__class__, instruction.layer, instruction.peer, instruction.sequences)
        known = self._sends[g].get(key)
        if known is None:
            form = self._estimate.message_form(g, self._folded.message(g, *key))
            known = self._sends[g][key] = form, self._flows(form), (g, instruction.__class__, instruction.peer)
        form, flows, stream = known
        ready = self._ends[g]
        duration = self._estimate.wire_numbers[form]
        end = self._link(ready, self._queues.get(stream, ready), duration, duration)
        self._queues[stream] = self._arrived[form, instruction.micro_batch] = end
        flows.append(end)

    def _receive(self, g: int, instruction: Recv) -> bool:
        key = (instruction.__class__, instruction.layer, instruction.peer, instruction.sequences)
        form = self._receives[g].get(key)
        if form is None:
            form = self._receives[g][key] = self._estimate.message_form(*self._folded.sent_by(g, instruction))
        end = self._arrived.get((form, instruction.micro_batch))
        if end is None:
            return False
        self._waits[g].append((end, self._estimate.latency_numbers[form], MESSAGE))
        return True

    def _join(self, g: int, instruction: Collective) -> None:
        """Joins a collective, and lays out those that can now take place: all members have come, and are through with others."""
        if self._waits[g]:
            self._wait_for_all(g)
        self._joined[g].append((instruction, self._ends[g]))
        ready = [instruction]
        while ready:
            collective = ready.pop()
            members = self._members[collective]
            heads = []
            for h in members:
                joined, at = self._joined[h], self._next_joined[h]
                if at == len(joined) or joined[at][0] != collective:
                    break
                heads.append(joined[at][1])
            if len(heads) < len(members):
                continue
            form, sum_form = self._estimate.collective_forms(collective, tuple(members))
            befores = [end for h, head in zip(members, heads, strict=True) for end in (head, self._collective_ends[h])]
            end = self._collected[collective] = self._after(befores, form)
            if sum_form is not None:
                self._summed.add(collective)
                summed = self._collected[collective] = self._after([end, *(self._sum_ends[h] for h in members)], sum_form)
                for h in members:
                    self._sum_ends[h] = summed
            for h in members:
                self._collective_ends[h] = end
                self._next_joined[h] += 1
                if self._next_joined[h] < len(self._joined[h]):
                    ready.append(self._joined[h][self._next_joined[h]][0])

    def _after(self, befores: Iterable[int], form: int) -> int:
        """The end of a transfer that begins when all others before it have ended."""
        ends = [end for end in dict.fromkeys(befores) if end] or [0]
        reached = ends[0]
        for other in ends[1:-1]:
            reached = self._link(reached, other, 0, 0)
        duration = self._estimate.wire_numbers[form]
        end = self._link(reached, ends[-1], duration, duration)
        self._flows(form).append(end)
        return end

    # --- What repeats itself ---

    def _period(self, sweeps: Sequence[int]) -> tuple[int, int, int, int] | None:
        """The stretch in which the turns of all lanes repeat themselves; see `_Chain.period`."""
        known: dict[object, int] = {}
        rounds = []
        looking_back = np.array(self._links, np.int64).reshape(-1, 4)
        looking_back[:, :2] = np.arange(1, len(looking_back) + 1)[:, None] - looking_back[:, :2]
        for begin, end in pairwise(sweeps):
            rounds.append(known.setdefault(looking_back[begin:end].tobytes(), len(known)))
        for turns in range(1, len(rounds) // 3 + 1):
            begin = end = 0
            first: int | None = None
            for r in range(turns, len(rounds) + 1):
                same = r < len(rounds) and rounds[r] == rounds[r - turns]
                if same and first is None:
                    first = r
                if not same and first is not None:
                    if r - first > end - begin:
                        begin, end = first, r
                    first = None
            if end - begin < turns:
                continue
            last = sweeps[end]
            links = last - sweeps[end - turns]
            micro_batches = self._balanced(last - links, last)
            if micro_batches:
                back = int(looking_back[last - links : last, :2].max())
                # What follows looks back at the stretch, too.
                after = min([min(i, j) for i, j, _, _ in self._links[last:]], default=last)
                return last, links, micro_batches, max(back, last + 1 - after)
        return None

    def _balanced(self, begin: int, end: int) -> int:
        """For how many micro-batches some links have all the work of every lane; 0 where they do not."""
        counts: dict[tuple[int, WorkKey], int] = {}
        for label in self._labels[begin:end]:
            if label is not None:
                counts[label] = counts.get(label, 0) + 1
        times = set(counts.values())
        if len(times) != 1:
            return 0
        for g, works in enumerate(self._works):
            sums: dict[tuple[type[Instruction], int], int] = {}
            for group, (kind, layers, place) in counts:
                if group == g and layers is not None:
                    sums[kind, place] = sums.get((kind, place), 0) + layers[1] - layers[0]
            every = {(kind, place) for kind, _, place in works if kind is not OptimizerStep}
            if set(sums) != every or len(set(sums.values())) != 1:
                return 0
            if any(work[0] is Forward and (g, work) not in counts for work in works):
                return 0
        return times.pop()


# --- The estimate ----------------------------------------------------------------------------------------------------


TENSOR, CONTEXT = 0, 1
"""Places in `Inner`."""


GROUPS = 4
"""With several chunks a stage, what pipelines do seldom repeats itself in fewer groups of `depth` micro-batches than these."""


class _WorkSeconds(NamedTuple):
    """Seconds of computation; of collectives beside it on their links, and of latency; the same of those that follow."""

    computing_s: float
    beside_s: float = 0.0
    beside_late_s: float = 0.0
    after_s: float = 0.0
    after_late_s: float = 0.0


class _Timed:
    """Some work of a lane that stands for others: the number of its duration, and what is known of its collectives."""

    __slots__ = ("alone", "beside_form", "form", "inner", "instruction", "lane", "number", "sharing")

    def __init__(self, number: int, lane: Lane, instruction: Compute | OptimizerStep, inner: Inner, network: Network) -> None:
        self.number, self.lane, self.instruction, self.inner = number, lane, instruction, inner
        self.alone: tuple[int, float, float] | None = None
        """Where all its collectives are of one kind: its place in `inner`, and their seconds on the wire, and of latency."""
        kinds = [group for group, transfer in enumerate(inner) if transfer]
        if len(kinds) == 1:
            self.alone = kinds[0], network.busiest_s(inner[kinds[0]]), inner[kinds[0]].latency_s
        self.form: int | None = None
        """Of the collectives that follow the computation."""
        self.beside_form: int | None = None
        """Of those beside it, which begin with it."""
        self.sharing = 1.0
        """How many times longer its collectives take among those of lanes that are one than alone."""

    def seconds(self, network: Network, cost: ComputeCost) -> _WorkSeconds:
        """What it takes with these constants."""
        lane, instruction = self.lane, self.instruction
        if isinstance(instruction, OptimizerStep) or not any(self.inner):
            return _WorkSeconds(computing_s(network, cost, lane, instruction))
        if self.alone is None:  # several kinds of collectives, which may be on different links
            taken = work(network, cost, lane, instruction, self.inner)
            beside_s, after_s = (self.sharing * network.busiest_s(transfer) for transfer in (taken.beside, taken.after))
            return _WorkSeconds(taken.seconds, beside_s, taken.beside.latency_s, after_s, taken.after.latency_s)
        group, wire_s, latency_s = self.alone
        wire_s /= collective_scale(network, cost.stack, self.inner[group])
        alone_s = wire_s + latency_s
        overlapped, hidden = hidden_shares(
            cost, lane, instruction, alone_s if group == TENSOR else 0.0, alone_s if group == CONTEXT else 0.0
        )
        share = overlapped if group == TENSOR else hidden if group == CONTEXT else 0.0
        wire_s *= self.sharing
        steps_s = ring_steps_s(network, cost.stack, lane.tensor_groups, cost.collectives(lane, instruction))
        after_s, late_s = (1 - share) * wire_s, (1 - share) * latency_s + steps_s
        return _WorkSeconds(computing_s(network, cost, lane, instruction), share * wire_s, share * latency_s, after_s, late_s)


@dataclass
class _Timing:
    """The seconds of everything with one set of constants."""

    durations: list[float]
    """By number, as if transfers were alone."""
    computing_s: list[float]
    """By number, of work: its computation."""
    wire_s: list[float]
    """By form: seconds on its links."""
    late_s: list[float]
    """By form: from then until the last byte has arrived, where the ends of its flows in the chain include it."""
    inside: dict[int, float]
    """By number of work: the seconds in which it waits for its collectives."""


class _Answer(NamedTuple):
    """What the seconds of an iteration were found with."""

    chain: _Chain
    timing: _Timing
    further: Sequence[float] | None
    """What each link took longer because of others that shared its wires, where any did."""
    times: int
    """How many times more what repeats itself is repeated."""


class Estimate:
    """What an iteration of a plan takes on a cluster, asked again and again with other constants.

    Made once per plan: orders, transfers and what they share. Raises InputError for a plan that cannot be compiled.
    """

    @garbage_collector_paused()
    def __init__(self, plan: Plan, cluster: Cluster, network: Network | None = None) -> None:
        self.plan, self.cluster = plan, cluster
        self.network = network if network is not None else Network(cluster)
        self.folded = _Folded(plan, cluster, self.network, ComputeCost(plan, cluster))
        self.tensor_forms: dict[tuple[int, WorkKey], tuple[int, ...]] = {}
        self.wire_numbers: list[int] = []
        self.latency_numbers: list[int] = []
        self._forms: list[_Form] = []
        self._routes: Routes | None = None
        self._message_forms: dict[tuple[int, int], int] = {}
        self._collective_forms: dict[tuple[type[Collective], LayerRange, tuple[int, ...]], tuple[int, int | None]] = {}
        self._exchanges: dict[int, Transfer] = {}
        """The transfers of these forms."""
        self._fixed: list[float] = [0.0]
        self._work: dict[object, _Timed] = {}
        self._work_numbers: dict[tuple[int, WorkKey], int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._chains: dict[int | None, _Chain] = {}
        self._depth = max(len(pipeline.stages) for pipeline in plan.pipelines)
        self.contended = False
        """Whether transfers slowed one another in the latest answer; where none did, the simulation says the same."""
        self._first = self._short = self._first_micro_batches()
        self._chain(self._short)

    @property
    def alike(self) -> list[list[Lane]]:
        """The lanes of the plan, those that cannot differ together."""
        return [[self.folded.lanes[n] for n in group] for group in self.folded.groups]

    @property
    def laid_out(self) -> int:
        """The micro-batches of each pipeline (the longest) that are laid out for an answer; the others follow from them."""
        return self._short or max(pipeline.micro_batches for pipeline in self.plan.pipelines)

    # --- Preparation ---

    def _first_micro_batches(self) -> int | None:
        """Of how many micro-batches the chain is first laid out; None: of all."""
        pipelines = self.plan.pipelines
        if len({pipeline.micro_batches for pipeline in pipelines}) > 1:
            return None
        return self._fewer(self._depth + 8 if len(pipelines[0].stages[0].layers) == 1 else GROUPS * self._depth)

    def _fewer(self, least: int) -> int | None:
        """So many micro-batches or little more, from which one comes to the plan's by whole periods; None: of all."""
        micro_batches, stages = self.plan.pipelines[0].micro_batches, self.plan.pipelines[0].stages
        # With several chunks a stage goes through them in groups of `depth` micro-batches.
        unit = self._depth if len(stages[0].layers) > 1 else 1
        fewer = least + (micro_batches - least) % unit
        return fewer if 4 * fewer <= 3 * micro_batches else None

    def _chain(self, micro_batches: int | None) -> _Chain:
        """The chain of the plan with this number of micro-batches; None: its own."""
        if micro_batches not in self._chains:
            with garbage_collector_paused():
                self._chains[micro_batches] = _Layout(self, micro_batches).laid_out()
        return self._chains[micro_batches]

    def _number(self, seconds: float) -> int:
        self._fixed.append(seconds)
        return len(self._fixed) - 1

    def sum_number(self, a: int, b: int) -> int:
        """The number of the duration that is the sum of two."""
        if (a, b) not in self._sums:
            self._sums[a, b] = self._number(0.0)
        return self._sums[a, b]

    def work_number(self, g: int, instruction: Compute | OptimizerStep) -> int:
        """The number of the duration of some work of a group's lane."""
        key = (g, work_key(instruction, self.plan.sequence_slices))
        if key not in self._work_numbers:
            shape = (g, self.folded.cost.shape(self.folded.standing[g], instruction))
            timed = self._work.get(shape)
            if timed is None:
                timed = self._work[shape] = self._timed(g, instruction)
            self.tensor_forms[key] = tuple(form for form in (timed.form, timed.beside_form) if form is not None)
            self._work_numbers[key] = timed.number
        return self._work_numbers[key]

    def _timed(self, g: int, instruction: Compute | OptimizerStep) -> _Timed:
        """Some work of a group's lane, with a new number for its duration."""
        timed = _Timed(self._number(0.0), self.folded.standing[g], instruction, self.folded.inner(g, instruction), self.network)
        if not isinstance(instruction, OptimizerStep):
            transfers, wire_s = self.folded.tensor(g, instruction)
            if transfers and transfers[0].loads:
                timed.sharing = wire_s / self.network.busiest_s(transfers[0])
                beside, after = (transfers, transfers) if timed.alone is not None else self.folded.parts(g, instruction)
                timed.form = self._form(after, wire_s, True, frozenset([g]))
                if timed.seconds(self.network, self.folded.cost).beside_s > 0:
                    timed.beside_form = self._form(beside, wire_s, True, frozenset([g]))
                    self._forms[timed.beside_form].beside = True
        return timed

    def message_form(self, g: int, place: int) -> int:
        """The form of one message of a group's lane."""
        if (g, place) not in self._message_forms:
            transfers, wire_s, stream = self.folded.messages(g, place)
            self._message_forms[g, place] = self._form(transfers, wire_s, False, frozenset([stream]))
        return self._message_forms[g, place]

    def collective_forms(self, instruction: Collective, groups: tuple[int, ...]) -> tuple[int, int | None]:
        """The form of a gradient reduction or parameter gather over some groups, and that of the sum of shards after it."""
        start, stop = instruction.layers
        key = (type(instruction), instruction.layers if start == stop else (0, stop - start), groups)
        if key not in self._collective_forms:
            exchanged, summed = self.folded.collective(instruction, groups)
            following = None if summed is None else self._collective_form("sum", summed, groups)
            self._collective_forms[key] = self._collective_form("exchange", exchanged, groups), following
        return self._collective_forms[key]

    def _collective_form(self, queue: str, transfer: Transfer, groups: tuple[int, ...]) -> int:
        """A new form of a transfer that stands in line with others of its groups."""
        seconds = self.network.alone_s(transfer) - transfer.latency_s
        form = self._form([transfer], seconds, True, frozenset((queue, g) for g in groups))
        self._exchanges[form] = transfer
        return form

    def _form(self, members: list[Transfer], wire_s: float, late: bool, streams: frozenset[object]) -> int:
        """The number of a new form; see `_Form`."""
        form = _Form(members, wire_s, late, streams)
        self._forms.append(form)
        self.wire_numbers.append(self._number(wire_s + (form.latency_s if late else 0.0)))
        self.latency_numbers.append(0 if late or form.latency_s == 0 else self._number(form.latency_s))
        return len(self._forms) - 1

    # --- Answers ---

    def iteration_s(self, kinds: Mapping[str, GpuKind] | None = None, stack: Stack | None = None) -> float:
        """Seconds of one iteration, with other GPU kinds (by name) and another software stack than the cluster's, if given.

        Collectives that a given stack hides, and the cluster's own does not, are not followed where transfers meet: found to be
        0.01 % at most.
        """
        own = self.cluster.stack
        if stack is not None and stack.node_dispatch != own.node_dispatch:  # other transfers than were laid out
            other = replace(self.cluster, stack=replace(own, node_dispatch=stack.node_dispatch))
            return Estimate(self.plan, other).iteration_s(kinds, stack)
        return self._answer(kinds, stack)[0]

    def _answer(self, kinds: Mapping[str, GpuKind] | None, stack: Stack | None) -> tuple[float, _Answer]:
        """Seconds of an iteration, and what they were found with."""
        micro_batches = self.plan.pipelines[0].micro_batches
        while self._short is not None:
            chain = self._chain(self._short)
            timing = self._timing(kinds, stack)
            ends, further = self._ends(chain, timing)
            self.contended = further is not None
            found = _steady(chain, ends, micro_batches - self._short, SETTLED if further is None else SETTLED_SLOWED)
            if found is not None:
                longer_s, times = found
                return _last_s(chain, ends) + longer_s, _Answer(chain, timing, further, times)
            # What has not settled in twice as many seldom does.
            self._short = self._fewer(2 * self._short) if self._short == self._first else None
        chain = self._chain(None)
        timing = self._timing(kinds, stack)
        ends, further = self._ends(chain, timing)
        self.contended = further is not None
        return _last_s(chain, ends), _Answer(chain, timing, further, 0)

    def _timing(self, kinds: Mapping[str, GpuKind] | None, stack: Stack | None) -> _Timing:
        """The seconds of everything that has been laid out."""
        cost = self.folded.cost.with_constants(kinds, stack)
        durations, computing_s, inside = self._fixed.copy(), [0.0] * len(self._fixed), {}
        wire_s = [form.wire_s for form in self._forms]
        late_s = [form.latency_s if form.late else 0.0 for form in self._forms]
        if stack is not None:
            # The transfers were made with the cluster's stack; their bytes are inversely proportional to the scale.
            for form, transfer in self._exchanges.items():
                own, other = (collective_scale(self.network, each, transfer) for each in (self.cluster.stack, stack))
                if own != other:
                    wire_s[form] *= own / other
                    durations[self.wire_numbers[form]] = wire_s[form] + late_s[form]
        for timed in self._work.values():
            taken = timed.seconds(self.network, cost)
            before_s = max(taken.computing_s, taken.beside_s + taken.beside_late_s)
            seconds = before_s + taken.after_s + taken.after_late_s
            durations[timed.number], inside[timed.number] = seconds, seconds - taken.computing_s
            computing_s[timed.number] = before_s if timed.beside_form is None else taken.computing_s
            if timed.form is not None:
                wire_s[timed.form], late_s[timed.form] = taken.after_s, taken.after_late_s
            if timed.beside_form is not None:
                wire_s[timed.beside_form], late_s[timed.beside_form] = taken.beside_s, taken.beside_late_s
        for (a, b), number in self._sums.items():
            durations[number] = durations[a] + durations[b]
        return _Timing(durations, computing_s, wire_s, late_s, inside)

    def _ends(self, chain: _Chain, timing: _Timing) -> tuple[list[float], list[float] | None]:
        """All ends; and what each link took longer because of others that shared its wires, where any did."""
        from sim.cost import meeting  # who only imports this module need not wait for a compiler

        if self._routes is None or len(self._routes.alone_bytes_per_s) < len(self._forms):
            forms = self._forms
            self._routes = meeting.find_routes(
                [form.members for form in forms], [form.streams for form in forms], self.network.capacities()
            )
            for known in self._chains.values():
                known.course = None
        if chain.course is None:
            chain.course = meeting.make_course(chain.links, chain.flows, [form.beside for form in self._forms], self._routes)
        durations = np.array(timing.durations)
        ends: list[float] = meeting.plain_ends_s(chain.course.links, durations).tolist()
        if not chain.course.meet:
            return ends, None
        computing_s, wire_s, late_s = map(np.array, (timing.computing_s, timing.wire_s, timing.late_s))
        met_s, further = meeting.met_ends_s(chain.course, self._routes, durations, computing_s, wire_s, late_s)
        if not (further > LEAST_SLOWING * _last_s(chain, ends)).any():
            return ends, None
        return met_s.tolist(), further.tolist()

    def _busy(self, answer: _Answer) -> list[float]:
        """Busy seconds of every group's lane."""
        chain, timing, further, times = answer
        last, links, _, _ = chain.period or (0, 0, 0, 0)
        found = []
        for steps in chain.steps:
            busy = 0.0
            for end, _, duration, key, _ in steps:
                if key is not None:
                    seconds = timing.durations[duration] + (further[end - 1] if further else 0.0)
                    busy += seconds * (1 + times) if last - links < end <= last else seconds
            found.append(busy)
        return found

    def cost(self) -> Cost:
        """The verdict of the plan. Raises InputError for an iteration that takes no time."""
        plan, cluster = self.plan, self.cluster
        iteration_s, answer = self._answer(None, None)
        if not iteration_s > 0:
            raise InputError(f"an iteration takes more than 0 s, but that of {cluster.name!r} has {iteration_s!r} s")
        flop = model_flop(plan.transformer, plan.global_batch, plan.sequence_length)
        peak = cluster.peak_flop_per_s(plan.precision)
        peak_used = cluster.peak_flop_per_s(plan.precision, plan.devices)
        lanes, busy = self.folded.lanes, self._busy(answer)
        busy_s = {
            device: seconds
            for group, seconds in zip(self.folded.groups, busy, strict=True)
            for n in group
            for device in lanes[n].devices
        }
        busy_lane_s = sum(seconds * len(group) for group, seconds in zip(self.folded.groups, busy, strict=True))
        return Cost(
            iteration_s=iteration_s,
            tokens_per_s=plan.global_batch * plan.sequence_length / iteration_s,
            mfu=flop / (iteration_s * peak) if peak else 0.0,
            mfu_used=flop / (iteration_s * peak_used) if peak_used else 0.0,
            hfu=(flop + recompute_flop(plan)) / (iteration_s * peak) if peak else 0.0,
            bubble=1 - busy_lane_s / (len(lanes) * iteration_s),
            peak_bytes=peak_bytes(plan, cluster),
            energy_j=energy_j(cluster, iteration_s, busy_s),
            dollars=dollars(cluster, iteration_s) or 0.0,
        )

    def breakdown(self, kinds: Mapping[str, GpuKind] | None = None, stack: Stack | None = None) -> dict[str, float]:
        """Seconds of the iteration by cause, on the lane that ends last; they sum to it.

        forward, backward, optimizer, step: its computation. collectives: those inside it, as far as nothing hides them. messages,
        gradient reduction, parameter gather: what it waits for them, the bubble being in messages.
        """
        chain = self._chain(None)
        timing = self._timing(kinds, stack)
        ends, further = self._ends(chain, timing)
        end_s = _last_s(chain, ends)
        late = [g for g, last in enumerate(chain.last) if max(ends[end] for end in last) >= end_s * (1 - 1e-12)]
        g = max(late, key=lambda g: ends[chain.last[g][0]])
        found = dict.fromkeys(("forward", "backward", "collectives", MESSAGE, REDUCTION, GATHER, "optimizer", "step"), 0.0)
        for end, before, duration, key, waits_for in chain.steps[g]:
            worked = timing.durations[duration]
            more = further[end - 1] if further else 0.0
            if waits_for is not None:
                found[waits_for] += ends[end] - ends[before] - worked - more
            if key is None:
                continue
            kind = key[0]
            inside = timing.inside[duration]
            cause = "optimizer" if kind is OptimizerStep else "forward" if kind is Forward else "backward"
            found[cause] += worked - inside
            found["collectives"] += inside + more
            if kind is OptimizerStep:
                step_s = (stack if stack is not None else self.cluster.stack).step_s
                found["optimizer"] -= step_s
                found["step"] += step_s
        own_s = ends[chain.last[g][0]]
        found[GATHER if self.plan.zero_stage else REDUCTION] += end_s - own_s
        return found


def _last_s(chain: _Chain, ends: Sequence[float]) -> float:
    return max(ends[end] for last in chain.last for end in last)


LEAST_SLOWING = 1e-12
"""The least part of an iteration by which a transfer must be longer for others to have slowed it; less is rounding."""

SETTLED, SETTLED_SLOWED = 1e-13, 1e-11
"""How far ends may differ from equally much later, as a fraction of the time that has passed; where flows slow each other, what
they lose is not known as exactly."""


def _steady(chain: _Chain, ends: Sequence[float], micro_batches: int, settled: float) -> tuple[float, int] | None:
    """Seconds that further micro-batches take, and how many periods they are; None where the chain has not settled.

    It has, where all ends that what follows looks back at come equally much later than some periods before. Looked for at the
    end of the stretch that repeats itself, and before, where flows do not meet those of the last micro-batches.
    """
    if chain.period is None:
        return None
    last, links, each, back = chain.period
    times, rest = divmod(micro_batches, each)
    if rest:
        return None
    room = (last - back) // links
    for at in (last, last - room // 4 * links, last - room // 2 * links):
        tolerance_s = settled * ends[at]
        for periods in range(1, room):
            before = at - periods * links
            if before - back < 0:
                break
            later_s = ends[at] - ends[before]
            if times % periods == 0 and all(abs(ends[at - n] - ends[before - n] - later_s) <= tolerance_s for n in range(back)):
                return later_s * (times // periods), times
    return None
