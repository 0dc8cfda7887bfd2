"""The critical path of an iteration: the one chain of work and transfers without a gap that made it as long as it was.

It is found backwards. What ended last was begun when the last of the things that it waits for had ended; of these the latest is
the next piece of the path, and so on to the beginning. So the pieces follow one another without overlap, and their seconds sum
to the iteration. What a lane does beside the path could take longer without any change, up to a point; what is on the path
could not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from sim.cost.compute import ComputeCost
from sim.cost.network import Network, Transfer
from sim.cost.traffic import exchange, filled_gap_s, message, sum_of_shards, work
from sim.spec.cluster import Cluster
from sim.spec.compile import compile_plan
from sim.spec.plan import Plan
from sim.spec.program import (
    Backward,
    BackwardInput,
    Collective,
    Compute,
    Forward,
    GatherParameters,
    Instruction,
    Lane,
    OptimizerStep,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    Send,
    SendActivation,
    SendGradient,
    dependencies,
)
from sim.spec.reading import InputError
from sim.spec.trace import ACTIVITIES, BUSY, Span, Trace

COMPUTE, RECOMPUTE, HOST, LINK, LATENCY, WAITING = "compute", "recompute", "host", "link", "latency", "waiting"
CAUSES = (COMPUTE, RECOMPUTE, HOST, LINK, LATENCY, WAITING)
"""What a piece of the path can be: work; work that recomputation adds; a host that its GPU waits for; bytes on a link; the
latency of a transfer; and nothing at all, which only a measured trace has."""

INSIDE, MESSAGE, REDUCTION, GATHER = "collectives inside the work", "messages", "gradient reduction", "parameter gather"
"""What is on a link. Messages keep the host, too, where the software stack's block."""

LAUNCHES, ONCE = "launches", "once a pass or step"
"""What a GPU waits for the host to do beside messages: to launch kernels and collectives, and what comes once for each pass of a
stage or each iteration."""

ALONE = 1 + 1e-6
"""A transfer that takes no more than this many times its seconds alone is taken to share its links with no other."""


@dataclass(frozen=True)
class Segment:
    """One piece of the path, with its cause (one of CAUSES).

    `place` is the lane that works or waits, or the link; `activity` is what the lane does (as in ACTIVITIES), or what is on the
    link. `bubble_s` is the part of it in which the busiest lane does not work.
    """

    start_s: float
    end_s: float
    cause: str
    place: str
    activity: str
    lane: str
    bubble_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Share:
    """What the path spends on one cause at one place, in how many pieces, and for how long the busiest lane waits meanwhile."""

    cause: str
    place: str
    activity: str
    seconds: float
    bubble_s: float
    pieces: int


@dataclass(frozen=True)
class CriticalPath:
    """The pieces of the path in the order of time: the first begins at 0, each where the one before ends, the last ends with the
    iteration."""

    segments: tuple[Segment, ...]
    busiest_lane: str
    """The lane that works longest in the whole iteration; the path's `bubble_s` sum to the seconds in which it does not."""

    @property
    def iteration_s(self) -> float:
        """How long the iteration takes."""
        return self.segments[-1].end_s if self.segments else 0.0

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """The path by cause, place and activity, the longest first."""
        found: dict[tuple[str, str, str], list[float]] = {}
        for segment in self.segments:
            share = found.setdefault((segment.cause, segment.place, segment.activity), [0.0, 0.0, 0])
            share[0] += segment.seconds
            share[1] += segment.bubble_s
            share[2] += 1
        shares = [Share(*key, seconds, bubble_s, int(pieces)) for key, (seconds, bubble_s, pieces) in found.items()]
        return tuple(sorted(shares, key=lambda share: -share.seconds))

    @cached_property
    def seconds_by_cause(self) -> Mapping[str, float]:
        """Seconds of each of CAUSES; they sum to the iteration."""
        return {cause: sum((segment.seconds for segment in self.segments if segment.cause == cause), 0.0) for cause in CAUSES}


def critical_path(trace: Trace, cluster: Cluster) -> CriticalPath:
    """The critical path of a trace on the cluster that it was simulated (or measured) on.

    Work is divided into computing, recomputing and exposed collectives as the cost model has it; a transfer that shares its
    links is told by the link that carries most meanwhile. Raises InputError for a trace without spans, and for one that lacks
    an instruction of its plan's program.
    """
    if not trace.spans:
        raise InputError(f"the critical path needs a trace with spans, but that of {trace.cluster!r} has none")
    walk = _Walk(trace, cluster)
    segments = tuple(segment for segment in walk.segments() if segment.end_s > segment.start_s)
    busy = {lane: sum(end_s - start_s for start_s, end_s in spans) for lane, spans in walk.busy.items()}
    busiest = max(busy, key=lambda lane: busy[lane])
    worked = _Worked(walk.busy[busiest])
    return CriticalPath(
        tuple(
            replace(segment, bubble_s=max(0.0, segment.seconds - worked.between(segment.start_s, segment.end_s)))
            for segment in segments
        ),
        busiest,
    )


class _Worked:
    """How long a lane worked between two instants."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        """From intervals in the order of time that do not overlap."""
        self._starts = [start_s for start_s, _ in spans]
        self._ends = [end_s for _, end_s in spans]
        self._before = [0.0, *accumulate(end_s - start_s for start_s, end_s in spans)]

    def between(self, start_s: float, end_s: float) -> float:
        """Seconds of work from one instant to another."""
        return self._until(end_s) - self._until(start_s)

    def _until(self, at_s: float) -> float:
        i = bisect_left(self._starts, at_s)
        return self._before[i] - (max(0.0, self._ends[i - 1] - at_s) if i else 0.0)


# --- The walk --------------------------------------------------------------------------------------------------------

Place = tuple[str, int]
"""A lane's name, and the place of one of its instructions."""

_ASYNCHRONOUS = (SendActivation, SendGradient, ReduceGradients, GatherParameters)
_EXCHANGES = {ReduceGradients: REDUCTION, GatherParameters: GATHER}
_WAITING_FOR_COLLECTIVES = (OptimizerStep, Forward, Backward, BackwardInput)


class _Walk:
    """A trace with its program, in which one can go from each instruction to what it waited for."""

    def __init__(self, trace: Trace, cluster: Cluster) -> None:
        self.trace, self.cluster, self.plan = trace, cluster, trace.plan
        self.program = compile_plan(trace.plan)
        self._spans = {(span.lane, span.instruction): span for span in trace.spans}
        self._cost, self._bare = ComputeCost(self.plan, cluster), ComputeCost(_without_recompute(self.plan), cluster)
        self._network = Network(cluster)
        self._messages: dict[object, Transfer] = {}
        self._exchanges: dict[object, tuple[Transfer, Transfer | None]] = {}
        self._at: dict[tuple[str, Instruction], int] = {}
        self._blocking: dict[str, list[int]] = {}
        """Of each instruction of a lane, the place of the last before it that the lane waited for; -1 = none."""
        self._queued: dict[str, list[int]] = {}
        """Of each message or collective, the place of the one that stood before it in its queue; -1 = none."""
        self._reduced: dict[str, list[int]] = {}
        """Of each instruction of a lane, the place of the last reduction of gradients before it; -1 = none."""
        self.busy: dict[str, list[tuple[float, float]]] = {}
        """When each lane works, in the order of time."""
        for lane in self.program.lanes:
            self._index(lane)

    def _index(self, lane: Lane) -> None:
        blocking, queued, reduced, busy = [], [], [], []
        last, last_reduced, queues = -1, -1, dict[object, int]()
        for i, instruction in enumerate(lane.instructions):
            self._at[lane.name, instruction] = i
            blocking.append(last)
            reduced.append(last_reduced)
            if isinstance(instruction, ReduceGradients):
                last_reduced = i
            queue = _queue(instruction)
            queued.append(-1 if queue is None else queues.get(queue, -1))
            if queue is None:
                last = i
            else:
                queues[queue] = i
            if ACTIVITIES[type(instruction)] in BUSY:
                span = self._span(lane.name, instruction)
                busy.append((span.start_s, span.end_s))
        self._blocking[lane.name], self._queued[lane.name], self._reduced[lane.name] = blocking, queued, reduced
        self.busy[lane.name] = busy

    def _span(self, lane: str, instruction: Instruction) -> Span:
        span = self._spans.get((lane, instruction))
        if span is None:
            raise InputError(f"the trace of {self.trace.cluster!r} lacks the instruction {instruction!r} of lane {lane}")
        return span

    def segments(self) -> list[Segment]:
        """The pieces of the path in the order of time, some of them of no length."""
        found: list[Segment] = []
        last = max(self.trace.spans, key=lambda span: span.end_s)
        at: Place | None = (last.lane, self._at[last.lane, last.instruction])
        now_s, waits = self.trace.iteration_s, last.lane
        while at is not None:
            lane, i = at
            span = self._span(lane, self.program.by_name[lane].instructions[i])
            ended_s = min(span.end_s, now_s)
            found.append(Segment(ended_s, now_s, WAITING, waits, "nothing", waits))
            received = isinstance(span.instruction, (RecvActivation, RecvGradient))
            # A receive takes no time of its own: what it waited for is the message.
            now_s = ended_s if received else min(ended_s, max(0.0, span.start_s))
            earlier = self._sum_before(at, span) if ended_s == span.end_s else None
            if earlier is not None:
                now_s = self._end_s(earlier)
            found += reversed(list(self._pieces(span, now_s, ended_s)))
            waits, at = lane, self._latest(at, span, now_s) if earlier is None else earlier
        found.append(Segment(0.0, now_s, WAITING, waits, "nothing", waits))
        return found[::-1]

    def _end_s(self, at: Place) -> float:
        lane, i = at
        return self._span(lane, self.program.by_name[lane].instructions[i]).end_s

    def _sum_before(self, at: Place, span: Span) -> Place | None:
        """The sum of shards that the one which ends an instruction waited for, if that was not for its own scatter."""
        instruction = span.instruction
        if not isinstance(instruction, ReduceGradients) or self._exchange(instruction)[1] is None:
            return None
        scattered_s = span.start_s + self._network.alone_s(self._exchange(instruction)[0])
        before = [self._earlier_sum(member, self._at[member, instruction]) for member in self.program.members[instruction]]
        latest = max((place for place in before if place is not None), key=self._end_s, default=None)
        return latest if latest is not None and scattered_s < self._end_s(latest) < span.end_s else None

    def _earlier_sum(self, lane: str, i: int) -> Place | None:
        """The last reduction of a lane before an instruction that ends with a sum of shards."""
        instructions = self.program.by_name[lane].instructions
        while (i := self._reduced[lane][i]) >= 0:
            instruction = instructions[i]
            assert isinstance(instruction, ReduceGradients)
            if self._exchange(instruction)[1] is not None:
                return lane, i
        return None

    def _latest(self, at: Place, span: Span, now_s: float) -> Place | None:
        """Of what an instruction waited for, that which ended last, no later than now."""
        best: Place | None = None
        best_s = -1.0
        for lane, i in self._predecessors(at, span.instruction):
            ended_s = min(self._end_s((lane, i)), now_s)
            if ended_s > best_s:
                best, best_s = (lane, i), ended_s
        return best

    def _predecessors(self, at: Place, instruction: Instruction) -> Iterator[Place]:
        """What an instruction waits for: what is handed over by a lane's order first, then messages and collectives."""
        name, i = at
        if isinstance(instruction, (ReduceGradients, GatherParameters)):
            members = [(member, self._at[member, instruction]) for member in self.program.members[instruction]]
            # A lane that came to it last before any that was busy with others, whose sums of shards may go on beside it.
            for places in (self._blocking, self._queued):
                yield from ((member, places[member][at]) for member, at in members if places[member][at] >= 0)
            return
        yield from ((name, places[name][i]) for places in (self._blocking, self._queued) if places[name][i] >= 0)
        lane = self.program.by_name[name]
        if isinstance(instruction, (RecvActivation, RecvGradient)):
            ((peer, sent),) = dependencies(lane, instruction)
            yield peer, self._at[peer, sent]
        elif isinstance(instruction, _WAITING_FOR_COLLECTIVES):
            for peer, awaited in dependencies(lane, instruction):
                if isinstance(awaited, (ReduceGradients, GatherParameters)):
                    yield peer, self._at[peer, awaited]

    # --- What a piece is made of ---

    def _pieces(self, span: Span, start_s: float, end_s: float) -> Iterator[Segment]:
        """The segments of a span from one instant to another, in the order of time."""
        instruction, name = span.instruction, span.lane
        lane = self.program.by_name[name]
        if isinstance(instruction, (RecvActivation, RecvGradient)):
            return
        if isinstance(instruction, _ASYNCHRONOUS):
            yield from self._transfers(span, start_s, end_s)
            return
        activity = ACTIVITIES[type(instruction)]
        taken = work(self._network, self._cost, lane, instruction)
        exposed = bool(taken.beside) or bool(taken.after)
        blocked_s = max(0.0, taken.seconds - self._cost.seconds(lane, instruction))
        whole_s = end_s - start_s
        # Without transfers inside it is all work, also where the device was slower than its kind.
        host_s = min(whole_s, blocked_s)
        work_s = min(whole_s - host_s, taken.seconds - blocked_s) if exposed else whole_s - host_s
        link = self._link(taken.after or taken.beside, start_s + work_s, end_s) if exposed else ""
        shares = self._shares(lane, instruction)
        places = (
            (RECOMPUTE, name, activity),
            (HOST if self._cost.is_hosts(lane, instruction) else COMPUTE, name, activity),
            (HOST, name, LAUNCHES),
            (HOST, name, ONCE),
            (LINK, link, INSIDE),
        )
        parts = [
            (start_s + until * work_s, *place)
            for until, share, place in zip(accumulate(shares), shares, places, strict=True)
            if share > 0
        ]
        if host_s > 0:
            parts.append((start_s + work_s + host_s, HOST, name, MESSAGE))
        if exposed:
            latency_s = min(whole_s - host_s - work_s, taken.after.latency_s)
            parts += [(end_s - latency_s, LINK, link, INSIDE), (end_s, LATENCY, link, INSIDE)]
        parts[-1] = (end_s, *parts[-1][1:])  # rounding leaves no gap
        at_s = start_s
        for to_s, cause, place, what in parts:
            yield Segment(at_s, max(at_s, min(to_s, end_s)), cause, place, what, name)
            at_s = max(at_s, min(to_s, end_s))

    def _shares(self, lane: Lane, instruction: Compute | OptimizerStep) -> tuple[float, float, float, float, float]:
        """The shares of an instruction's computation: what recomputation adds to the GPU's work; the rest of that; waits for its
        host to launch, and for what comes once; and waits that collectives fill, for which the host is not to blame."""
        seconds = self._cost.seconds(lane, instruction)
        if seconds == 0:
            return 0.0, 1.0, 0.0, 0.0, 0.0
        again_s = launched_s = filled_s = 0.0
        once_s = self._cost.once_s(lane, instruction)
        if not isinstance(instruction, OptimizerStep):
            waits_s = self._cost.gap_s(lane, instruction)
            filled_s = min(waits_s, filled_gap_s(self._network, self._cost, lane, instruction))
            launched_s = waits_s - filled_s
            if not isinstance(instruction, Forward):
                bare_s = self._bare.seconds(lane, instruction) - self._bare.gap_s(lane, instruction)
                again_s = max(0.0, seconds - waits_s - bare_s)
        own_s = seconds - again_s - launched_s - once_s - filled_s
        return again_s / seconds, own_s / seconds, launched_s / seconds, once_s / seconds, filled_s / seconds

    def _transfers(self, span: Span, start_s: float, end_s: float) -> Iterator[Segment]:
        """The segments of a message or collective from one instant to another, in the order of time."""
        instruction, name = span.instruction, span.lane
        moved: list[tuple[Transfer, float]]
        if isinstance(instruction, (SendActivation, SendGradient)):
            moved, activity = [(self._message(self.program.by_name[name], instruction), span.end_s)], MESSAGE
        else:
            assert isinstance(instruction, (ReduceGradients, GatherParameters))
            exchanged, summed = self._exchange(instruction)
            moved, activity = [(exchanged, span.end_s)], _EXCHANGES[type(instruction)]
            if summed is not None and end_s < span.end_s:  # what stood in line waited for the scatter alone
                moved = [(exchanged, end_s)]
            elif summed is not None:  # with which counts what the scatter took longer among others
                moved = [(exchanged, min(span.end_s, span.start_s + self._network.alone_s(exchanged))), (summed, span.end_s)]
        began_s = span.start_s
        for transfer, ended_s in moved:
            stop_s = max(start_s, min(ended_s, end_s))
            free_s = min(stop_s, max(start_s, ended_s - transfer.latency_s))
            link = self._link(transfer, began_s, max(began_s, ended_s - transfer.latency_s))
            yield Segment(start_s, free_s, LINK, link, activity, name)
            yield Segment(free_s, stop_s, LATENCY, link, activity, name)
            start_s, began_s = stop_s, ended_s

    def _message(self, lane: Lane, instruction: Send) -> Transfer:
        key = (lane.name, type(instruction), instruction.layer, instruction.peer, instruction.sequences)
        found = self._messages.get(key)
        if found is None:
            found = message(self._network, self.plan, lane, self.program.by_name[instruction.peer], instruction)
            self._messages[key] = found
        return found

    def _exchange(self, instruction: Collective) -> tuple[Transfer, Transfer | None]:
        """The transfer of a collective, and of the sum of shards after it."""
        members = self.program.members[instruction]
        key = (type(instruction), instruction.layers, members)
        found = self._exchanges.get(key)
        if found is None:
            asked = self._network, self.plan, instruction, [self.program.by_name[name] for name in members]
            found = self._exchanges[key] = exchange(*asked), sum_of_shards(*asked)
        return found

    def _link(self, transfer: Transfer, start_s: float, end_s: float) -> str:
        """The name of the link that a transfer waits for: its slowest, or of shared ones that which carries most meanwhile."""
        links = self._network.links
        own = {link: load / links[link].capacity_bytes_per_s for link, load in transfer.loads}
        if not own:
            return "no link"
        slowest = max(own, key=lambda link: own[link])
        if end_s - start_s <= own[slowest] * ALONE:
            return links[slowest].name
        carried = {link: self._carried(link, start_s, end_s) / links[link].capacity_bytes_per_s for link in own}
        return links[max(own, key=lambda link: (carried[link], own[link]))].name

    @cached_property
    def _on_link(self) -> Mapping[int, list[tuple[float, float, float]]]:
        """Of each link the (start, end, bytes) of the messages and exchanges on it."""
        found: dict[int, list[tuple[float, float, float]]] = {}
        exchanged: set[Instruction] = set()
        for span in self.trace.spans:
            instruction = span.instruction
            if isinstance(instruction, (SendActivation, SendGradient)):
                moved = [self._message(self.program.by_name[span.lane], instruction)]
            elif isinstance(instruction, (ReduceGradients, GatherParameters)) and instruction not in exchanged:
                exchanged.add(instruction)
                moved = [transfer for transfer in self._exchange(instruction) if transfer is not None]
            else:
                continue
            for transfer in moved:
                sent_s = max(span.start_s, span.end_s - transfer.latency_s)
                for link, load in transfer.loads:
                    found.setdefault(link, []).append((span.start_s, sent_s, load))
        return found

    def _carried(self, link: int, start_s: float, end_s: float) -> float:
        """Bytes that messages and exchanges move over a link between two instants, if each goes at one rate."""
        total = 0.0
        for from_s, to_s, load in self._on_link.get(link, ()):
            common_s = min(end_s, to_s) - max(start_s, from_s)
            if common_s > 0:
                total += load * common_s / (to_s - from_s)
        return total


def _queue(instruction: Instruction) -> object | None:
    """What an instruction stands in line with, beside its lane's own order; None for one that the lane waits for."""
    if isinstance(instruction, (SendActivation, SendGradient)):
        return type(instruction), instruction.peer
    return "collectives" if isinstance(instruction, (ReduceGradients, GatherParameters)) else None


def _without_recompute(plan: Plan) -> Plan:
    """The plan with every recomputation off."""
    pipelines = tuple(replace(p, stages=tuple(stage.recomputing("none") for stage in p.stages)) for p in plan.pipelines)
    return replace(plan, pipelines=pipelines)
