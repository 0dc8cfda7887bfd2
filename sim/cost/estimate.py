"""The fast judge: an iteration as one chain of maxima and sums, without simulating events.

The order of a lane's instructions, of its messages to a peer and of its collectives is known before anything is timed, so
that every end is the latest of a few earlier ends plus a duration (a max-plus recursion). The chain is laid out once; other
constants only change the durations.

Lanes that cannot differ are one: lanes of equal work, devices and places whose neighbours are alike and whose messages take
equally long (the coarsest such division of the lanes, found by refining colours). Symmetric data parallelism folds to one
pipeline.

Sharing. Of the transfers of lanes that are one, each shares its links with the others of its kind, for they are under way at
the same time: a link takes the smaller of two transfers' loads for each other transfer. Transfers that merely cross the same
links are first taken to be alone. Where two are then found under way together, each is lengthened by the seconds that they
overlap times what the other would slow it by (their max-min rates); then exchanges of gradients and parameters, which are the
longest, have their rates followed through time, the others being where that puts them. Where nothing overlaps, the estimate
is what the simulation would say.

Long schedules repeat themselves: the chain is laid out for fewer micro-batches, and where all ends of a period come equally
much later than those of an earlier one, so do all later ends (a max-plus recursion is homogeneous), and the rest is a
multiple. Where they do not, the chain is laid out longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.collector import garbage_collector_paused
from sim.cost.compute import ComputeCost, TensorCollective
from sim.cost.feasibility import infeasible
from sim.cost.memory import peak_bytes
from sim.cost.network import Network, Transfer, together
from sim.cost.price import dollars, energy_j
from sim.cost.traffic import (
    Inner,
    computing_s,
    exchange,
    hidden_shares,
    inner,
    inner_scale,
    message,
    ring_steps_s,
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
    dependencies,
    dry_run,
)
from sim.spec.reading import InputError
from sim.spec.stack import Stack

COMPUTE_TYPES = (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep)
SEND_TYPES = (SendActivation, SendGradient)
COLLECTIVE_TYPES = (ReduceGradients, GatherParameters)


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


Work: TypeAlias = tuple[type[Instruction], LayerRange | None]
"""Instructions of one lane that take equally long: their type and layers."""


LEAST_SLOWING = 1e-9
"""The least fraction by which one transfer must slow another to be seen."""


class _Form:
    """A transfer that a lane that stands for others uses over and over, and how long it takes among those of its kind.

    `wire_s` is until its links are free, `latency_s` from then until the last byte has arrived.
    """

    __slots__ = ("beside", "exchange", "latency_s", "others", "streams", "transfer", "wire_s")

    def __init__(self, transfer: Transfer, wire_s: float, streams: frozenset[object]) -> None:
        self.transfer, self.wire_s, self.latency_s = transfer, wire_s, transfer.latency_s
        self.exchange = False
        """Whether it is of gradients or parameters."""
        self.beside = False
        """Whether it goes on beside the computation that begins with it."""
        self.streams = streams
        """What it stands in line with: forms that share one are never under way together."""
        self.others: list[tuple[int, float]] = []
        """Forms that can slow it, and by how much of its time they do where they are under way all the while."""


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


Flow: TypeAlias = tuple[float, float]
"""A transfer on one link: bytes there per byte on its slowest link, and its bytes/s on that when alone."""


def _flows(transfer: Transfer, capacities: Sequence[float]) -> list[tuple[int, Flow]]:
    """A transfer as the links see it, as `sim.cost.sharing` measures rates."""
    seconds = [num_bytes / capacities[link] for link, num_bytes in transfer.loads]
    busiest_s = max(seconds, default=0.0)
    nearly_s = busiest_s * (1 - 1e-9)
    size = max(
        [num_bytes for (_, num_bytes), on_it_s in zip(transfer.loads, seconds, strict=True) if on_it_s >= nearly_s], default=0.0
    )
    return [(link, (num_bytes / size, size / busiest_s)) for link, num_bytes in transfer.loads]


def _slowing(one: Flow, others: Sequence[Flow], capacity: float) -> float:
    """How much longer a transfer takes, as a fraction of its time alone, while others are on one of its links all along.

    Rates rise together until the link is full; a flow that is slow for other reasons leaves more to the others.
    """
    (share, alone), left, weight = one, capacity, sum(other[0] for other in others) + one[0]
    if sum(flow[0] * flow[1] for flow in others) + share * alone <= capacity * (1 + 1e-12):
        return 0.0
    for other_share, other_alone in sorted(others, key=lambda flow: flow[1]):
        if other_alone >= left / weight:
            break
        left, weight = left - other_share * other_alone, weight - other_share
    return max(0.0, alone * weight / left - 1)


# --- Lanes that are one ----------------------------------------------------------------------------------------------


class _Folded:
    """The lanes of a plan, which of them are one, and the transfers of those that stand for the others."""

    def __init__(self, plan: Plan, cluster: Cluster, network: Network, cost: ComputeCost) -> None:
        self.plan, self.cluster, self.network, self.cost = plan, cluster, network, cost
        self.lanes, self._ends = lanes_of(plan)
        self._number = {lane.name: n for n, lane in enumerate(self.lanes)}
        self._owners = switch_owners(plan, self.lanes, cluster)
        self._prepare_messages()
        self._colour = self._first_colours()
        self._wire_s: list[list[float]] = []
        self._wired: list[int] = []
        """The colours with which `_wire_s` was found."""
        self._refine({})
        self._tensor: list[dict[Work, tuple[Transfer, float]]] = [{} for _ in self.lanes]
        self._refine(self._tensors())
        groups: dict[int, list[int]] = {}
        for n, colour in enumerate(self._colour):
            groups.setdefault(colour, []).append(n)
        self.groups = list(groups.values())
        """Lanes that are one, by number; the first of each stands for all."""
        self._group = {n: g for g, group in enumerate(self.groups) for n in group}
        self.standing = [self.lanes[group[0]] for group in self.groups]

    # --- Messages ---

    def _prepare_messages(self) -> None:
        """Every lane's outgoing messages with their transfers, and where in its sender's list each incoming one stands."""
        lanes = self.lanes
        self._places: dict[tuple[type[Send], int, str, str, Sequences], int] = {}
        self._messages: list[list[tuple[int, Transfer]]] = []
        for lane in lanes:
            outgoing: list[tuple[int, Transfer]] = []
            known: dict[tuple[int, Sequences], Transfer] = {}  # those of all layers and both directions are alike
            for kind, edges in ((SendActivation, lane.next), (SendGradient, lane.previous)):
                for edge in edges:
                    peer, sent = self._number[edge.peer], kind(0, edge.layer, edge.peer, edge.sequences)
                    self._places[kind, edge.layer, lane.name, edge.peer, edge.sequences] = len(outgoing)
                    if (peer, edge.sequences) not in known:
                        known[peer, edge.sequences] = message(self.network, self.plan, lane, lanes[peer], sent)
                    outgoing.append((peer, known[peer, edge.sequences]))
            self._messages.append(outgoing)
        self._incoming: list[list[tuple[int, int]]] = []
        for lane in lanes:
            self._incoming.append(
                [
                    (self._number[edge.peer], self._places[kind, edge.layer, edge.peer, lane.name, edge.sequences])
                    for kind, edges in ((SendActivation, lane.previous), (SendGradient, lane.next))
                    for edge in edges
                ]
            )

    # --- Colours ---

    def _first_colours(self) -> list[int]:
        """Lanes of one colour compute the same for equally long; where they have their links to themselves, these are equal."""
        plan, step = self.plan, OptimizerStep()
        numbers: dict[object, int] = {}
        positions = [{s: i for i, s in enumerate(pipeline.visiting_order)} for pipeline in plan.pipelines]
        own: dict[str, tuple[object, ...]] = {}
        for link in self.cluster.link_overrides:
            for end in link.name.split(">"):
                own[end] = (*own.get(end, ()), (link.name.startswith(end), link.bandwidth_bytes_per_s, link.latency_s))
        colours = []
        for lane in self.lanes:
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
            colours.append(numbers.setdefault(key, len(numbers)))
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
        count = len(set(self._colour))
        while True:
            if self._colour != self._wired:
                self._wire_s, self._wired = self._shared_wire_s(capacities), self._colour
            numbers: dict[object, int] = {}
            colour, refined = self._colour, []
            for n in range(len(self.lanes)):
                outgoing = tuple(
                    (colour[peer], _rounded(wire_s), _rounded(transfer.latency_s))
                    for (peer, transfer), wire_s in zip(self._messages[n], self._wire_s[n], strict=True)
                )
                incoming = tuple((colour[peer], place) for peer, place in self._incoming[n])
                key = (colour[n], outgoing, incoming, tensors.get(n))
                refined.append(numbers.setdefault(key, len(numbers)))
            if len(numbers) == count:
                return
            self._colour, count = refined, len(numbers)

    def _shared_wire_s(self, capacities: Sequence[float]) -> list[list[float]]:
        """Seconds of each lane's messages, among those that lanes of its colour send at the same time."""
        alike: dict[tuple[int, int], list[int]] = {}
        for n, outgoing in enumerate(self._messages):
            for place in range(len(outgoing)):
                alike.setdefault((self._colour[n], place), []).append(n)
        found: list[list[float]] = [[0.0] * len(outgoing) for outgoing in self._messages]
        for (_, place), group in alike.items():
            times = _alike_s([self._messages[n][place][1] for n in group], capacities)
            for n, wire_s in zip(group, times, strict=True):
                found[n][place] = wire_s
        return found

    def _tensors(self) -> dict[int, tuple[float, ...]]:
        """Seconds of the collectives inside each lane's work, among those of lanes of its colour; prepares `_tensor`.

        Lanes that have their links to themselves are left out.
        """
        groups: dict[int, list[int]] = {}
        for n, colour in enumerate(self._colour):
            groups.setdefault(colour, []).append(n)
        signatures: dict[int, tuple[float, ...]] = {}
        capacities = self.network.capacities()
        for group in groups.values():
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
                    self._tensor[n][work_of(instruction)] = (transfer, wire_s)
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
        found: dict[Work, Compute] = {}
        for instruction in self.instructions(lane, few):
            if isinstance(instruction, (Forward, Backward, BackwardInput, BackwardWeight)):
                found.setdefault(work_of(instruction), instruction)
        return list(found.values())

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
        numbers, lane = self.groups[group], self.standing[group]
        stream = group, self._messages[numbers[0]][place][0], place < len(lane.next)
        return [self._messages[n][place][1] for n in numbers], self._wire_s[numbers[0]][place], stream

    def tensor(self, group: int, instruction: Compute) -> tuple[list[Transfer], float]:
        """The transfers of the collectives inside one instruction of all lanes of a group, and the seconds of the first's.

        None, where there are none that could meet others; the first's alone, where it has its links to itself.
        """
        numbers, key, lane = self.groups[group], work_of(instruction), self.standing[group]
        if len(lane.devices) > 1 and self._alone(lane):
            if lane.name in self._owners:
                return [], 0.0
            transfer = self.inside(lane, instruction)
            return [transfer], self.network.busiest_s(transfer)
        found = [self._tensor[n][key] for n in numbers if key in self._tensor[n]]
        return [transfer for transfer, _ in found], found[0][1] if found else 0.0

    def collective(self, instruction: Collective, groups: Iterable[int]) -> Transfer:
        """The transfer of a gradient reduction or parameter gather over all lanes of some groups."""
        members = sorted(n for group in groups for n in self.groups[group])
        return exchange(self.network, self.plan, instruction, [self.lanes[n] for n in members])


def work_of(instruction: Compute | OptimizerStep) -> Work:
    """What the time of an instruction depends on, besides its lane."""
    return type(instruction), None if isinstance(instruction, OptimizerStep) else instruction.layers


def _rounded(seconds: float) -> float:
    """To eleven digits, so that sums in another order are equal."""
    return float(f"{seconds:.10e}")


# --- The chain -------------------------------------------------------------------------------------------------------


Link: TypeAlias = tuple[int, int, int, int]
"""`(i, j, k, l)`: its end is the later of end i + duration k and end j + duration l."""

MESSAGE, REDUCTION, GATHER = "messages", "gradient reduction", "parameter gather"
"""What a lane can wait for."""


@dataclass
class _Step:
    """What a lane does at one link of the chain: works, or only waits."""

    end: int
    before: int
    """The lane's end before it."""
    duration: int
    work: Work | None
    waits_for: str | None


@dataclass
class _Chain:
    """The laid-out program: its links, and what they stand for. End 0 is the beginning; link n gives end n + 1."""

    micro_batches: int | None
    links: list[Link] = field(default_factory=list)
    steps: list[list[_Step]] = field(default_factory=list)
    """Of every group's lane, in its order."""
    flows: dict[int, list[int]] = field(default_factory=dict)
    """The ends of each form that others can slow."""
    last: list[tuple[int, int]] = field(default_factory=list)
    """Of every group: the end of its lane, and of its collectives."""
    period: tuple[int, int, int, int] | None = None
    """Of the stretch that repeats itself: its last end, links of a period, micro-batches of a period, how far back it looks."""
    meetings: _Meetings | None = None
    """Found when it is first timed."""

    def ends_s(self, durations: Sequence[float]) -> list[float]:
        """All ends, in seconds."""
        ends = [0.0]
        append = ends.append
        for i, j, k, l in self.links:  # noqa: E741
            a = ends[i] + durations[k]
            b = ends[j] + durations[l]
            append(a if a > b else b)
        return ends

    def lengthened_ends_s(self, durations: Sequence[float], further: Sequence[float]) -> list[float]:
        """All ends, where each link takes some further seconds besides."""
        ends = [0.0]
        append = ends.append
        for (i, j, k, l), more in zip(self.links, further, strict=True):  # noqa: E741
            a = ends[i] + durations[k]
            b = ends[j] + durations[l]
            append((a if a > b else b) + more)
        return ends


class _Meetings:
    """Which flows can be under way together with which, and what they lose by it. All forms are seen to at once."""

    def __init__(self, chain: _Chain, forms: Sequence[_Form]) -> None:
        self._links, flows = len(chain.links), {f: np.array(ends) for f, ends in chain.flows.items()}
        pairs = [(f, g, fraction) for f in flows for g, fraction in forms[f].others if g in flows]
        self._pairs = len(pairs)
        self.exchange_links: list[int] = []
        if not pairs:
            return
        places = range(len(pairs))
        self._ones = _Flows.of(flows, [f for f, _, _ in pairs], places, [fraction for _, _, fraction in pairs])
        self._beside = np.array([form.beside for form in forms])[self._ones.forms]
        slowing = [dict(forms[g].others).get(f, 0.0) for f, g, _ in pairs]
        self._slowing_others = _Flows.of(flows, [f for f, _, _ in pairs], places, slowing).fractions
        self._others = _Flows.of(flows, [g for _, g, _ in pairs], places)
        exchanges = [(f, g, fraction) for f, g, fraction in pairs if forms[f].exchange]
        self._exchanges = list(dict.fromkeys(f for f, _, _ in exchanges))
        if exchanges:
            met = [self._exchanges.index(f) for f, _, _ in exchanges]
            self._slowed = _Flows.of(flows, self._exchanges, range(len(self._exchanges)))
            self.exchange_links = (self._slowed.ends - 1).tolist()
            self._slowing = _Flows.of(flows, [g for _, g, _ in exchanges], met, [fraction for _, _, fraction in exchanges])

    def lost_s(self, ends: Sequence[float], wires: Sequence[tuple[float, float]], spare: Sequence[float]) -> list[float] | None:
        """Seconds that each link of the chain takes longer; None where no flows overlap.

        Of what goes on beside a computation only what outlasts it counts, and puts off what follows the computation. The flows
        of each pair of forms are laid out one after the other on one axis of time.
        """
        if not self._pairs:
            return None
        all_ends, all_wires = np.array(ends), np.array(wires)
        span_s = 2 * float(all_ends.max())
        begins, until = self._ones.times(all_ends, all_wires, span_s)
        # Rounding may let a flow begin before the one before it ends.
        corners = np.maximum.accumulate(np.stack(self._others.times(all_ends, all_wires, span_s), axis=1).ravel())
        lasts = np.cumsum(corners[1::2] - corners[::2])
        passed = np.stack([np.concatenate([[0.0], lasts[:-1]]), lasts], axis=1).ravel()
        least_s, fractions = 1e-14 * self._pairs * span_s + 1e-12 * span_s, self._ones.fractions

        def longer_s(begins: NDArray[np.float64], until: NDArray[np.float64]) -> NDArray[np.float64]:
            """By how much each is slowed that is under way from when to when alone."""
            before = np.interp(begins, corners, passed)
            both_s = np.interp(until, corners, passed) - before
            # One slowed for longer than the others are under way goes on by itself when these, slowed themselves, have ended.
            slowed = np.minimum(until + both_s * fractions, (self._ones.places + 1) * span_s)
            beside_s = (np.interp(slowed, corners, passed) - before) * (1 + self._slowing_others)
            longer: NDArray[np.float64] = np.minimum(both_s, beside_s / (1 + fractions)) * fractions
            return np.where(both_s > least_s, longer, 0.0)

        links, longer = self._ones.ends - 1, longer_s(begins, until)
        if not longer.any():
            return None
        beside = self._beside & (longer > 0)
        if not beside.any():
            seconds: list[float] = np.bincount(links, longer, self._links).tolist()
            return seconds
        outlasting = np.bincount(links[beside], longer[beside], self._links)
        outlasting[links[beside]] -= np.array(spare)[self._ones.forms[beside]]
        outlasting = np.maximum(outlasting, 0.0)
        if outlasting.any():
            later = np.where(self._beside, 0.0, outlasting[links])
            longer = longer_s(begins + later, until + later)
        return list((outlasting + np.bincount(links[~self._beside], longer[~self._beside], self._links)).tolist())

    def followed_s(self, ends: Sequence[float], wires: Sequence[tuple[float, float]], lost_s: Sequence[float]) -> list[float]:
        """As `lost_s`, with the rates of exchanges followed through time while others, lengthened as they are, come and go."""
        if not self._exchanges:
            return list(lost_s)
        all_ends, all_wires, lost = np.array(ends), np.array(wires), np.array(lost_s)
        span_s = 4 * float(all_ends.max())
        begins, until = self._slowing.times(all_ends, all_wires, span_s)
        changes = np.concatenate([begins - lost[self._slowing.ends - 1], until])
        order = np.argsort(changes, kind="stable")
        slowing = np.cumsum(np.concatenate([self._slowing.fractions, -self._slowing.fractions])[order])
        slowing[slowing < LEAST_SLOWING] = 0.0
        times = np.concatenate([[-span_s], changes[order], [(len(self._exchanges) + 1) * span_s]])
        served = np.concatenate([[0.0], np.cumsum(np.diff(times) / np.concatenate([[1.0], 1 + slowing]))])
        begins, until = self._slowed.times(all_ends, all_wires, span_s)
        wire_s, begins = until - begins, begins - lost[self._slowed.ends - 1]
        longer = np.interp(np.interp(begins, times, served) + wire_s, served, times) - begins - wire_s
        lost[self._slowed.ends - 1] = np.where(longer > 1e-12 * span_s * len(self._exchanges), longer, 0.0)
        seconds: list[float] = lost.tolist()
        return seconds


class _Flows(NamedTuple):
    """Flows of some forms, with the place of each on an axis of time, and the fraction by which it is slowed or slows."""

    ends: NDArray[np.int64]
    forms: NDArray[np.int64]
    places: NDArray[np.int64]
    fractions: NDArray[np.float64]

    @classmethod
    def of(
        cls, flows: Mapping[int, NDArray[np.int64]], forms: Sequence[int], places: Sequence[int], fractions: Sequence[float] = ()
    ) -> _Flows:
        """The flows of forms one after the other."""
        counts = [len(flows[f]) for f in forms]
        return cls(
            np.concatenate([flows[f] for f in forms]),
            np.repeat(np.array(forms), counts),
            np.repeat(np.array(places), counts),
            np.repeat(np.array(fractions or [0.0] * len(forms)), counts),
        )

    def times(
        self, ends: NDArray[np.float64], wires: NDArray[np.float64], span_s: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """From when (if alone) to when each is on its links."""
        until = ends[self.ends] - wires[self.forms, 1] + self.places * span_s
        return until - wires[self.forms, 0], until


class _Layout:
    """Lays out a chain: lanes take turns, in their order, each as far as its next computation."""

    def __init__(self, estimate: Estimate, micro_batches: int | None) -> None:
        self._estimate, self._folded = estimate, estimate.folded
        self.chain = _Chain(micro_batches)
        self._links = self.chain.links
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
        self._queues: dict[tuple[int, type[Instruction], str], int] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        self._joined: list[list[tuple[Collective, int]]] = [[] for _ in lanes]
        self._next_joined = [0] * len(lanes)
        self._collective_ends = [0] * len(lanes)
        self._collected: dict[Collective, int] = {}
        self._sends: list[dict[object, int]] = [{} for _ in lanes]
        self._receives: list[dict[object, int]] = [{} for _ in lanes]
        self._works: list[dict[Work, int]] = [{} for _ in lanes]
        self._labels: list[tuple[int, Work] | None] = []
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
        self.chain.last = list(zip(self._ends, self._collective_ends, strict=True))
        if self.chain.micro_batches is not None:
            self.chain.period = self._period(sweeps)
        return self.chain

    # --- One lane's turn ---

    def _turn(self, g: int) -> int:
        """How many instructions the lane executed: those up to its second computation, or to one that has to wait."""
        instructions, at = self._instructions[g], self._at[g]
        begun, computed = at, False
        while at < len(instructions):
            instruction = instructions[at]
            kind: Any = instruction.__class__
            if kind in COMPUTE_TYPES:
                if computed or not self._compute(g, instruction):  # type: ignore[arg-type]
                    break
                computed = True
            elif kind in SEND_TYPES:
                self._send(g, instruction)  # type: ignore[arg-type]
            elif kind in COLLECTIVE_TYPES:
                self._join(g, instruction)  # type: ignore[arg-type]
            elif kind is RecvActivation or kind is RecvGradient:
                if not self._receive(g, instruction):  # type: ignore[arg-type]
                    break
            else:
                raise TypeError(f"no estimate for {instruction!r}")
            at += 1
        self._at[g] = at
        return at - begun

    def _link(self, i: int, j: int, k: int, l: int, label: tuple[int, Work] | None = None) -> int:  # noqa: E741
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
            self.chain.steps[g].append(_Step(self._ends[g], before, 0, None, cause))

    def _compute(self, g: int, instruction: Compute | OptimizerStep) -> bool:
        waits = self._waits[g]
        if instruction.__class__ in self._waiting[g]:
            lane, collected, latest = self._lanes[g], self._collected, 0
            for _, other in dependencies(lane, instruction):
                if isinstance(other, COLLECTIVE_TYPES):
                    end = collected.get(other)
                    if end is None:
                        return False
                    # A lane's collectives follow one another, so that the last laid out is the last to end.
                    if end > latest:
                        latest, cause = end, REDUCTION if isinstance(other, ReduceGradients) else GATHER
            if latest:
                waits.append((latest, 0, cause))
        work = work_of(instruction)
        number = self._works[g].get(work)
        if number is None:
            number = self._works[g][work] = self._estimate.work_number(g, instruction)
        self._wait_for_all(g, but_last=True)
        before = self._ends[g]
        end, latency, cause = waits.pop() if waits else (before, 0, "")
        both = self._estimate.sum_number(latency, number) if latency else number
        after = self._ends[g] = self._link(before, end, number, both, (g, work))
        self.chain.steps[g].append(_Step(after, before, number, work, cause or None))
        for form in self._estimate.tensor_forms.get((g, work), ()):
            self.chain.flows.setdefault(form, []).append(after)
        return True

    def _send(self, g: int, instruction: Send) -> None:
        self._wait_for_all(g)
        kind = instruction.__class__
        key = (kind, instruction.layer, instruction.peer, instruction.sequences)
        form = self._sends[g].get(key)
        if form is None:
            form = self._sends[g][key] = self._estimate.message_form(g, self._folded.message(g, *key))
        stream = (g, kind, instruction.peer)
        ready = self._ends[g]
        duration = self._estimate.wire_numbers[form]
        end = self._link(ready, self._queues.get(stream, ready), duration, duration)
        self._queues[stream] = self._arrived[form, instruction.micro_batch] = end
        self.chain.flows.setdefault(form, []).append(end)

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
            befores = dict.fromkeys(
                end for h, head in zip(members, heads, strict=True) for end in (head, self._collective_ends[h])
            )
            befores.pop(0, None)
            form = self._estimate.collective_form(collective, tuple(members))
            duration = self._estimate.wire_numbers[form]
            ends = list(befores) or [0]
            reached = ends[0]
            for other in ends[1:-1]:
                reached = self._link(reached, other, 0, 0)
            end = self._link(reached, ends[-1], duration, duration)
            self._collected[collective] = end
            self.chain.flows.setdefault(form, []).append(end)
            for h in members:
                self._collective_ends[h] = end
                self._next_joined[h] += 1
                if self._next_joined[h] < len(self._joined[h]):
                    ready.append(self._joined[h][self._next_joined[h]][0])

    # --- What repeats itself ---

    def _period(self, sweeps: Sequence[int]) -> tuple[int, int, int, int] | None:
        """The stretch in which the turns of all lanes repeat themselves; see `_Chain.period`."""
        known: dict[object, int] = {}
        rounds = []
        for begin, end in pairwise(sweeps):
            shape = tuple((n - i, n - j, k, l) for n, (i, j, k, l) in enumerate(self._links[begin:end], begin + 1))  # noqa: E741
            rounds.append(known.setdefault(shape, len(known)))
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
                back = max(n - min(i, j) for n, (i, j, _, _) in enumerate(self._links[last - links : last], last - links + 1))
                # What follows looks back at the stretch, too.
                after = (min(i, j) for i, j, _, _ in self._links[last:])
                return last, links, micro_batches, max(back, *(last + 1 - n for n in after if n <= last))
        return None

    def _balanced(self, begin: int, end: int) -> int:
        """For how many micro-batches some links have all the work of every lane; 0 where they do not."""
        counts: dict[tuple[int, Work], int] = {}
        for label in self._labels[begin:end]:
            if label is not None:
                counts[label] = counts.get(label, 0) + 1
        times = set(counts.values())
        if len(times) != 1:
            return 0
        for g, works in enumerate(self._works):
            sums: dict[type[Instruction], int] = {}
            for group, (kind, layers) in counts:
                if group == g and layers is not None:
                    sums[kind] = sums.get(kind, 0) + layers[1] - layers[0]
            every = {kind for kind, _ in works if kind is not OptimizerStep}
            if set(sums) != every or len(set(sums.values())) != 1:
                return 0
            if any(kind is Forward and (g, (kind, layers)) not in counts for kind, layers in works):
                return 0
        return times.pop()


# --- The estimate ----------------------------------------------------------------------------------------------------


TENSOR, CONTEXT = 0, 1
"""Places in `Inner`."""


GROUPS = 4
"""With several chunks a stage, what pipelines do seldom repeats itself in fewer groups of `depth` micro-batches than these."""


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

    def seconds(self, network: Network, cost: ComputeCost) -> tuple[float, float, float, float, float]:
        """Seconds of computation; of collectives beside it on their links, and of latency; the same of those that follow."""
        lane, instruction = self.lane, self.instruction
        if isinstance(instruction, OptimizerStep) or not any(self.inner):
            return computing_s(network, cost, lane, instruction), 0.0, 0.0, 0.0, 0.0
        if self.alone is None:  # several kinds of collectives, which may be on different links
            taken = work(network, cost, lane, instruction, self.inner)
            beside_s, after_s = (self.sharing * network.busiest_s(transfer) for transfer in (taken.beside, taken.after))
            return taken.seconds, beside_s, taken.beside.latency_s, after_s, taken.after.latency_s
        group, wire_s, latency_s = self.alone
        wire_s /= inner_scale(network, cost.stack, self.inner[group])
        alone_s = wire_s + latency_s
        overlapped, hidden = hidden_shares(
            cost, lane, instruction, alone_s if group == TENSOR else 0.0, alone_s if group == CONTEXT else 0.0
        )
        share = overlapped if group == TENSOR else hidden if group == CONTEXT else 0.0
        wire_s *= self.sharing
        steps_s = ring_steps_s(network, cost.stack, lane.tensor_groups, cost.collectives(lane, instruction))
        after_s, late_s = (1 - share) * wire_s, (1 - share) * latency_s + steps_s
        return computing_s(network, cost, lane, instruction), share * wire_s, share * latency_s, after_s, late_s


@dataclass
class _Timing:
    """The seconds of everything with one set of constants."""

    durations: list[float]
    """By number."""
    wires: list[tuple[float, float]]
    """By form: seconds on its links, and of latency after them that the ends of its flows in the chain include."""
    spare: list[float]
    """By form: seconds that its flows may take longer before anything waits for them."""
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
        self.tensor_forms: dict[tuple[int, Work], tuple[int, ...]] = {}
        self.wire_numbers: list[int] = []
        self.latency_numbers: list[int] = []
        self._forms: list[_Form] = []
        self._members: list[list[Transfer]] = []
        self._late: list[bool] = []
        self._message_forms: dict[tuple[int, int], int] = {}
        self._collective_forms: dict[tuple[type[Collective], LayerRange, tuple[int, ...]], int] = {}
        self._fixed: list[float] = [0.0]
        self._work: dict[object, _Timed] = {}
        self._work_numbers: dict[tuple[int, Work], int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._chains: dict[int | None, _Chain] = {}
        self._depth = max(len(pipeline.stages) for pipeline in plan.pipelines)
        self.contended = False
        """Whether transfers slowed one another in the latest answer; where none did, the simulation says the same."""
        self.slowing = 0.0
        """Of the latest answer's seconds the fraction that they did so for."""
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
            known = len(self._forms)
            with garbage_collector_paused():
                self._chains[micro_batches] = _Layout(self, micro_batches).laid_out()
                if len(self._forms) > known:
                    self._find_others()
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
        key = (g, work_of(instruction))
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
                timed.form = self._form(transfers, wire_s, True, frozenset([g]))
                timed.sharing = wire_s / self.network.busiest_s(transfers[0])
                if timed.seconds(self.network, self.folded.cost)[1] > 0:
                    timed.beside_form = self._form(transfers, wire_s, True, frozenset([g]))
                    self._forms[timed.beside_form].beside = True
        return timed

    def message_form(self, g: int, place: int) -> int:
        """The form of one message of a group's lane."""
        if (g, place) not in self._message_forms:
            transfers, wire_s, stream = self.folded.messages(g, place)
            self._message_forms[g, place] = self._form(transfers, wire_s, False, frozenset([stream]))
        return self._message_forms[g, place]

    def collective_form(self, instruction: Collective, groups: tuple[int, ...]) -> int:
        """The form of a gradient reduction or parameter gather over some groups."""
        start, stop = instruction.layers
        key = (type(instruction), instruction.layers if start == stop else (0, stop - start), groups)
        if key not in self._collective_forms:
            transfer = self.folded.collective(instruction, groups)
            seconds = self.network.alone_s(transfer) - transfer.latency_s
            form = self._form([transfer], seconds, True, frozenset(("exchange", g) for g in groups))
            self._collective_forms[key], self._forms[form].exchange = form, True
        return self._collective_forms[key]

    def _form(self, transfers: list[Transfer], wire_s: float, late: bool, streams: frozenset[object]) -> int:
        """A new form. `late`: the ends of its flows in the chain are those of the last byte's arrival."""
        form = _Form(transfers[0], wire_s, streams)
        self._forms.append(form)
        self._members.append(transfers)
        self._late.append(late)
        self.wire_numbers.append(self._number(wire_s + (form.latency_s if late else 0.0)))
        self.latency_numbers.append(0 if late or form.latency_s == 0 else self._number(form.latency_s))
        return len(self._forms) - 1

    def _find_others(self) -> None:
        """Finds which forms can slow which: some of their transfers meet on a link that cannot carry both."""
        capacities = self.network.capacities()
        # Forms of the same transfers that stand in the same line are slowed alike.
        alike: dict[object, list[int]] = {}
        for f, (form, members) in enumerate(zip(self._forms, self._members, strict=True)):
            alike.setdefault((form.streams, *map(id, members)), []).append(f)
        every = {fs[0]: fs for fs in alike.values()}
        users: dict[int, list[tuple[int, Flow]]] = {}
        for f in every:
            for transfer in self._members[f]:
                for link, flow in _flows(transfer, capacities):
                    users.setdefault(link, []).append((f, flow))
        # Most links look like others.
        looks = dict.fromkeys((capacities[link], tuple(flows)) for link, flows in users.items() if len(flows) > 1)
        slowing: dict[int, dict[int, float]] = {f: {} for f in every}
        for capacity, flows in looks:
            by_form: dict[int, list[Flow]] = {}
            for f, flow in flows:
                by_form.setdefault(f, []).append(flow)
            for f, ones in by_form.items():
                for g, others in by_form.items():
                    if g != f and self._forms[f].streams.isdisjoint(self._forms[g].streams):
                        slowing[f][g] = max(slowing[f].get(g, 0.0), *(_slowing(one, others, capacity) for one in ones))
        for f, fs in every.items():
            found = [(g, fraction) for first, fraction in slowing[f].items() if fraction > LEAST_SLOWING for g in every[first]]
            for each in fs:
                self._forms[each].others = found

    # --- Answers ---

    def iteration_s(self, kinds: Mapping[str, GpuKind] | None = None, stack: Stack | None = None) -> float:
        """Seconds of one iteration, with other GPU kinds (by name) and another software stack than the cluster's, if given."""
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
        durations, spare, inside = self._fixed.copy(), [0.0] * len(self._forms), {}
        wires = [(form.wire_s, form.latency_s if late else 0.0) for form, late in zip(self._forms, self._late, strict=True)]
        if stack is not None and stack.collective_scale != self.cluster.stack.collective_scale:
            # The transfers were made with the cluster's stack; their bytes are inversely proportional to the scale.
            scale = self.cluster.stack.collective_scale / stack.collective_scale
            for form in self._collective_forms.values():
                wire_s, latency_s = wires[form]
                wires[form] = wire_s * scale, latency_s
                durations[self.wire_numbers[form]] = wire_s * scale + latency_s
        for timed in self._work.values():
            computing_s, beside_s, beside_latency_s, after_s, latency_s = timed.seconds(self.network, cost)
            spare_s = computing_s - beside_s - beside_latency_s
            seconds = computing_s - min(spare_s, 0.0) + after_s + latency_s
            durations[timed.number], inside[timed.number] = seconds, seconds - computing_s
            if timed.form is not None:
                wires[timed.form] = after_s, latency_s
            if timed.beside_form is not None:
                wires[timed.beside_form] = beside_s, seconds - beside_s
                spare[timed.beside_form] = max(spare_s, 0.0)
        for (a, b), number in self._sums.items():
            durations[number] = durations[a] + durations[b]
        return _Timing(durations, wires, spare, inside)

    def _ends(self, chain: _Chain, timing: _Timing) -> tuple[list[float], list[float] | None]:
        """All ends; and what each link took longer because of others that shared its wires, where any did."""
        ends, self.slowing = chain.ends_s(timing.durations), 0.0
        if chain.meetings is None:
            chain.meetings = _Meetings(chain, self._forms)
        lost_s = chain.meetings.lost_s(ends, timing.wires, timing.spare)
        if lost_s is None:
            return ends, None
        alone_s = _last_s(chain, ends)
        # What is slowed puts off what comes after it, which then meets others, or none.
        ends = chain.lengthened_ends_s(timing.durations, lost_s)
        put_off = [0.0, *(end - own_s for end, own_s in zip(ends[1:], lost_s, strict=True))]
        again_s = chain.meetings.lost_s(put_off, timing.wires, timing.spare) or [0.0] * len(lost_s)
        for link in chain.meetings.exchange_links:  # these are followed through time below
            again_s[link] = lost_s[link]
        ends = chain.lengthened_ends_s(timing.durations, again_s)
        followed_s = chain.meetings.followed_s(ends, timing.wires, again_s)
        ends = chain.lengthened_ends_s(timing.durations, followed_s)
        self.slowing = 1 - alone_s / _last_s(chain, ends)
        return ends, followed_s

    def _busy(self, answer: _Answer) -> list[float]:
        """Busy seconds of every group's lane."""
        chain, timing, further, times = answer
        last, links, _, _ = chain.period or (0, 0, 0, 0)
        found = []
        for steps in chain.steps:
            busy = 0.0
            for step in steps:
                if step.work is not None:
                    seconds = timing.durations[step.duration] + (further[step.end - 1] if further else 0.0)
                    busy += seconds * (1 + times) if last - links < step.end <= last else seconds
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
        for step in chain.steps[g]:
            worked = timing.durations[step.duration]
            more = further[step.end - 1] if further else 0.0
            if step.waits_for is not None:
                found[step.waits_for] += ends[step.end] - ends[step.before] - worked - more
            if step.work is None:
                continue
            kind = step.work[0]
            inside = timing.inside[step.duration]
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
