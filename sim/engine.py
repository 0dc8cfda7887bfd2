"""The simulator: a simpy interpreter of a program on a cluster, with every transfer sharing the links with all others.

Each lane is a process that executes its instructions in order. Sends and collectives go on beside it. The messages from one
lane to another, in one direction of the model, follow one another, and so do a lane's collectives, as on communication
streams; a collective starts when all its members have come to it. Where gradients are scattered inside shard groups, the sums
of shards over these that follow are in line with one another alone.

Of pipelines that behave alike (`sim.alike`) one runs, and what it did they did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import simpy
from simpy.events import EventPriority

from sim.collector import garbage_collector_paused
from sim.cost.memory import peak_bytes
from sim.cost.network import Network
from sim.cost.sharing import Route, max_min_rates
from sim.prepared import LaneWork, Prepared, Shape, SpanKey, message_key
from sim.spec.cluster import Cluster
from sim.spec.plan import Plan
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
    Program,
    Recv,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    Send,
    SendActivation,
    SendGradient,
    dependencies,
    dry_run,
    work_key,
)
from sim.spec.trace import LinkUse, Span, Trace
from sim.spec.version import VERSION

RESHARE_PRIORITY = EventPriority(2)
"""After simpy's urgent (0) and normal (1) events of the same instant, so that links are shared anew once per instant."""


def simulate(
    plan: Plan,
    cluster: Cluster,
    seed: int = 0,
    jitter: float = 0.0,
    network: Network | None = None,
    program: Program | None = None,
    known_s: Mapping[SpanKey, float] = MappingProxyType({}),
) -> Trace:
    """The trace of one simulated iteration. Memory is reported, not judged: see `sim.cost.feasibility`.

    Instructions that compute take the seconds of `known_s` where it has them, collectives inside them included; it is not asked
    for those whose collectives share links with others. `jitter` is the standard deviation of each device's speed, as a fraction,
    drawn with `seed`. `network` may be given to keep its paths from one plan to the next, and `program`, the plan compiled, where
    it is simulated often. Raises InputError for a plan that cannot be compiled or names unknown devices.
    """
    network = network if network is not None else Network(cluster)
    with garbage_collector_paused():
        trace = _Run(Prepared(plan, network, _slowdowns(cluster, seed, jitter), program, known_s)).trace()
    return trace if jitter == 0 else replace(trace, jitter=jitter)


@dataclass(frozen=True)
class Condensed:
    """One simulated iteration, told of one pipeline for all that behave alike.

    `part` is the trace of the lanes that ran, without links; `like` says of each lane of the plan, in program order, which of
    these did what it does.
    """

    part: Trace
    like: Mapping[str, str]
    lanes: Mapping[str, tuple[str, ...]]
    """All lanes to their devices."""


def condensed(plan: Plan, network: Network) -> Condensed:
    """What `simulate` would tell of each lane, without telling it of all. Raises InputError as that does."""
    with garbage_collector_paused():
        prepared = Prepared(plan, network)
        part = _Run(prepared).part()
    return Condensed(part, prepared.like, {lane.name: lane.devices for lane in prepared.lanes.values()})


def _slowdowns(cluster: Cluster, seed: int, jitter: float) -> Mapping[str, float]:
    """How much longer than its kind each device computes."""
    if jitter == 0:
        return {}
    drawn = np.random.default_rng(seed).normal(0.0, jitter, len(cluster.devices))
    return {device.name: float(math.exp(x)) for device, x in zip(cluster.devices, drawn, strict=True)}


# --- Flows -----------------------------------------------------------------------------------------------------------


Callback: TypeAlias = Callable[[], None]


class _Flow:
    """A transfer under way: bytes left (on its slowest link), its rate, and whom to tell when the last is sent and there."""

    __slots__ = ("arrived", "left_bytes", "number", "rate", "route", "sent", "updated_s", "version")

    def __init__(self, number: int, route: Route, now_s: float, arrived: Callback, sent: Callback | None) -> None:
        self.number, self.route, self.arrived, self.sent = number, route, arrived, sent
        self.left_bytes, self.rate, self.updated_s, self.version = route.size_bytes, 0.0, now_s, 0


class _Flows:
    """All transfers under way. Rates are shared anew only inside the connected component that changed, once per instant."""

    def __init__(self, env: simpy.Environment, capacities: list[float]) -> None:
        self.env, self.capacities = env, capacities
        self._on_link: dict[int, dict[int, _Flow]] = {}
        self._dirty: dict[int, None] = {}  # in the order of the changes, so that nothing depends on hashes
        self._waiting = False
        self._count = 0
        self._known: dict[tuple[int, ...], dict[int, float]] = {}

    def start(self, route: Route, arrived: Callback, sent: Callback | None = None) -> None:
        """Starts a transfer; `sent` is called when the links are free of it, `arrived` when its last byte has arrived."""
        self._count += 1
        flow = _Flow(self._count, route, self.env.now, arrived, sent)
        if route.size_bytes == 0:
            self._arrive(flow)
            return
        alone = True
        for link in route.links:
            on_link = self._on_link.setdefault(link, {})
            if on_link:
                alone = False
                self._dirty[link] = None
            on_link[flow.number] = flow
        if alone:
            self._set_rate(flow, route.alone_bytes_per_s)
        else:
            self._share_later()

    def _set_rate(self, flow: _Flow, rate: float) -> None:
        """Gives a flow its new rate from now on, and the time it will end at."""
        env = self.env
        flow.left_bytes = max(0.0, flow.left_bytes - flow.rate * (env.now - flow.updated_s))
        flow.rate, flow.updated_s = rate, env.now
        flow.version += 1
        version = flow.version

        def end(_: object) -> None:
            if flow.version == version:
                self._end(flow)

        env.timeout(flow.left_bytes / rate).callbacks.append(end)

    def _end(self, flow: _Flow) -> None:
        for link in flow.route.links:
            on_link = self._on_link[link]
            del on_link[flow.number]
            if on_link:
                self._dirty[link] = None
                self._share_later()
        self._arrive(flow)

    def _arrive(self, flow: _Flow) -> None:
        if flow.route.latency_s == 0:
            flow.arrived()
        else:
            self.env.timeout(flow.route.latency_s).callbacks.append(lambda _: flow.arrived())
        if flow.sent is not None:
            flow.sent()

    def _share_later(self) -> None:
        """Shares the changed links anew after everything else that happens at this instant."""
        if self._waiting:
            return
        self._waiting = True
        event = simpy.Event(self.env)
        event.callbacks.append(self._share)
        event._ok, event._value = True, None
        self.env.schedule(event, priority=RESHARE_PRIORITY)

    def _share(self, _: object) -> None:
        self._waiting = False
        dirty, self._dirty = self._dirty, {}
        on_link = self._on_link
        seen: set[int] = set()
        for link in dirty:
            if link in seen or not on_link[link]:
                continue
            component: dict[int, _Flow] = {}
            frontier = [link]
            seen.add(link)
            for at in frontier:  # which grows meanwhile
                for number, flow in on_link[at].items():
                    if number not in component:
                        component[number] = flow
                        for other in flow.route.links:
                            if other not in seen:
                                seen.add(other)
                                if len(on_link[other]) > 1:
                                    frontier.append(other)
            flows = [component[number] for number in sorted(component)]
            for flow, rate in zip(flows, self._rates(flows), strict=True):
                if rate != flow.rate:
                    self._set_rate(flow, rate)

    def _rates(self, flows: list[_Flow]) -> list[float]:
        """The fair rates of a component. The same routes meet again at every micro-batch, so they are kept."""
        if len(flows) == 1:
            return [flows[0].route.alone_bytes_per_s]
        key = tuple(sorted(id(flow.route) for flow in flows))  # routes live as long as the run
        known = self._known.get(key)
        if known is None:
            shared = max_min_rates([flow.route for flow in flows], self.capacities)
            known = self._known[key] = {id(flow.route): rate for flow, rate in zip(flows, shared, strict=True)}
        return [known[id(flow.route)] for flow in flows]


# --- The run ---------------------------------------------------------------------------------------------------------


@dataclass
class _LaneState:
    """A lane while it runs: its communication streams, its messages to send, and the types that wait for asynchronous ones."""

    lane: Lane
    works: LaneWork
    waiting_types: frozenset[type[Instruction]]
    exchanges: deque[Collective] = field(default_factory=deque)
    sums: deque[Collective] = field(default_factory=deque)
    outgoing: dict[tuple[type[Instruction], str], deque[Send]] = field(default_factory=dict)


def _state(lane: Lane, works: LaneWork) -> _LaneState:
    """The state of a lane before it runs. Lane order settles every dependency but those on instructions that do not block."""
    waiting: set[type[Instruction]] = {OptimizerStep}
    if lane.split == "all":
        waiting |= {Forward, Backward, BackwardInput}
    return _LaneState(lane, works, frozenset(waiting))


Key: TypeAlias = tuple[str, Instruction]


class _Run:
    """One simulation: the lanes as simpy processes, and the handlers of all instruction types."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.program = prepared, prepared.program
        self.env = simpy.Environment()
        self.spans: list[Span] = []
        self._handlers: Mapping[type[Instruction], Callable[[_LaneState, Any], simpy.Event | None]] = {
            Forward: self._compute,
            Backward: self._compute,
            BackwardInput: self._compute,
            BackwardWeight: self._compute,
            OptimizerStep: self._compute,
            SendActivation: self._send,
            SendGradient: self._send,
            RecvActivation: self._receive,
            RecvGradient: self._receive,
            ReduceGradients: self._collective,
            GatherParameters: self._collective,
        }
        self._states = {lane.name: _state(lane, prepared.works[lane.name]) for lane in self.program.lanes}
        self._flows = _Flows(self.env, prepared.network.capacities())
        self._finished: set[Key] = set()
        self._waiters: dict[Key, simpy.Event] = {}
        self._arrived: dict[Collective, int] = {}
        self._began_s: dict[Collective, float] = {}
        self._summing: set[Collective] = set()

    # --- Execution ---

    def part(self) -> Trace:
        """Runs everything and returns what happened on the lanes that ran, without the links."""
        for state in self._states.values():
            self.env.process(self._lane(state))
        self.env.run()
        if len(self.spans) != self.program.instruction_count:
            dry_run(self.program)  # raises, and shows where the lanes stand
            raise RuntimeError(f"{self.program.instruction_count - len(self.spans)} instructions were never executed")
        prepared = self.prepared
        return Trace(
            plan=prepared.plan,
            cluster=prepared.network.cluster.name,
            origin="simulated",
            iteration_s=max(span.end_s for span in self.spans),
            lanes={lane.name: lane.devices for lane in self.program.lanes},
            spans=tuple(self.spans),
            peak_bytes=peak_bytes(prepared.plan, prepared.network.cluster),
            versions={"motley": VERSION},
        )

    def trace(self) -> Trace:
        """Runs everything and returns what happened on all lanes and links."""
        part, prepared, known = self.part(), self.prepared, self.prepared.network.links
        links = [
            LinkUse(known[link].name, known[link].capacity_bytes_per_s, num_bytes)
            for link, num_bytes in sorted(prepared.link_bytes().items())
        ]
        return replace(
            part,
            lanes={lane.name: lane.devices for lane in prepared.lanes.values()},
            spans=tuple(self._all_spans()),
            links=tuple(links),
        )

    def _all_spans(self) -> Iterator[Span]:
        """The spans of all lanes: after each of those that ran, its equals of the lanes that are like it."""
        prepared = self.prepared
        others: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
        for name, first in prepared.like.items():
            if name != first:
                others.setdefault(first, []).append((name, prepared.peers(first, name)))
        for span in self.spans:
            yield span
            for name, peers in others.get(span.lane, ()):
                instruction = span.instruction
                if isinstance(instruction, (SendActivation, RecvActivation, SendGradient, RecvGradient)):
                    instruction = replace(instruction, peer=peers[instruction.peer])
                yield span._replace(lane=name, instruction=instruction)

    def _lane(self, state: _LaneState) -> Generator[simpy.Event, object, None]:
        """The process of one lane: its instructions in order, each after what it waits for."""
        handlers, waiting_types, lane = self._handlers, state.waiting_types, state.lane
        for instruction in lane.instructions:
            kind = type(instruction)
            if kind in waiting_types:
                for key in dependencies(lane, instruction):
                    if isinstance(key[1], (ReduceGradients, GatherParameters)) and key not in self._finished:
                        yield self._waiter(key)
            event = handlers[kind](state, instruction)
            if event is not None:
                yield event

    def _waiter(self, key: Key) -> simpy.Event:
        """The event of an asynchronous instruction's end."""
        event = self._waiters[key] = self.env.event()
        return event

    def _finish(self, key: Key) -> None:
        """Marks the end of an asynchronous instruction."""
        self._finished.add(key)
        event = self._waiters.pop(key, None)
        if event is not None:
            event.succeed()

    def _start(self, shape: Shape, arrived: Callback, sent: Callback | None = None) -> None:
        shape.uses += 1
        assert shape.route is not None
        self._flows.start(shape.route, arrived, sent)

    def _compute(self, state: _LaneState, instruction: Compute | OptimizerStep) -> simpy.Event:
        """Computes; where its collectives share links with others, some beside it, and then waits for those that follow."""
        env, name = self.env, state.lane.name
        taken = state.works.work[work_key(instruction, state.lane.sequence_slices)]
        start_s, num_bytes = env.now, taken.num_bytes
        computed = env.timeout(taken.seconds)
        if taken.folded or (taken.beside is None and taken.after is None):
            for shape in taken.shapes:
                shape.uses += 1
            self.spans.append(Span(name, instruction, start_s, start_s + taken.seconds, num_bytes))
            return computed
        finished = env.event()
        under_way = 1 if taken.beside is None else 2

        def end() -> None:
            self.spans.append(Span(name, instruction, start_s, env.now, num_bytes))
            finished.succeed()

        def one_ended() -> None:
            nonlocal under_way
            under_way -= 1
            if under_way == 0:
                if taken.after is None:
                    end()
                else:
                    self._start(taken.after, end)

        computed.callbacks.append(lambda _: one_ended())
        if taken.beside is not None:
            self._start(taken.beside, one_ended)
        return finished

    def _send(self, state: _LaneState, instruction: Send) -> None:
        """Hands a message over and goes on; it starts when those before it to the same peer are sent."""
        queue = state.outgoing.setdefault((type(instruction), instruction.peer), deque())
        queue.append(instruction)
        if len(queue) == 1:
            self._start_message(state, queue)

    def _start_message(self, state: _LaneState, queue: deque[Send]) -> None:
        """Starts the first message of a queue."""
        env, name, instruction = self.env, state.lane.name, queue[0]
        shape = state.works.messages[message_key(instruction)]
        start_s = env.now

        def arrived() -> None:
            self.spans.append(Span(name, instruction, start_s, env.now, round(shape.transfer.num_bytes)))
            self._finish((name, instruction))

        def sent() -> None:
            queue.popleft()
            if queue:
                self._start_message(state, queue)

        self._start(shape, arrived, sent)

    def _receive(self, state: _LaneState, instruction: Recv) -> simpy.Event | None:
        """Waits until the message has arrived."""
        env, name = self.env, state.lane.name
        (key,) = dependencies(state.lane, instruction)
        start_s = env.now
        if key in self._finished:
            self.spans.append(Span(name, instruction, start_s, start_s))
            return None
        event = self._waiter(key)
        event.callbacks.append(lambda _: self.spans.append(Span(name, instruction, start_s, env.now)))
        return event

    def _collective(self, state: _LaneState, instruction: Collective) -> None:
        """Joins a collective and goes on; the last member to come starts it."""
        state.exchanges.append(instruction)
        self._arrived[instruction] = self._arrived.get(instruction, 0) + 1
        self._start_collective(instruction)

    def _start_collective(self, instruction: Collective) -> None:
        """Starts a collective if all members have come to it and none of them is still busy with an earlier one."""
        members = self.program.members[instruction]
        if self._arrived[instruction] < len(members) or instruction in self._began_s:
            return
        queues = [self._states[member].exchanges for member in members]
        if any(queue[0] != instruction for queue in queues):
            return
        self._began_s[instruction] = self.env.now

        def end() -> None:
            if instruction in self.prepared.sums:
                for member in members:
                    self._states[member].sums.append(instruction)
                self._start_sum(instruction)
            else:
                self._end_collective(instruction)
            for following in _next(queues):
                self._start_collective(following)

        self._start(self.prepared.exchanges[instruction], end)

    def _start_sum(self, instruction: Collective) -> None:
        """Starts a sum of shards, whose scatter has ended, if no member is still busy with an earlier one."""
        queues = [self._states[member].sums for member in self.program.members[instruction]]
        if instruction in self._summing or any(queue[0] != instruction for queue in queues):
            return
        self._summing.add(instruction)

        def end() -> None:
            self._end_collective(instruction)
            for following in _next(queues):
                self._start_sum(following)

        self._start(self.prepared.sums[instruction], end)

    def _end_collective(self, instruction: Collective) -> None:
        """Notes the end of a collective on all its members."""
        prepared = self.prepared
        num_bytes = prepared.exchanges[instruction].transfer.num_bytes
        if instruction in prepared.sums:
            num_bytes += prepared.sums[instruction].transfer.num_bytes
        share = round(num_bytes / prepared.members[instruction])
        for member in self.program.members[instruction]:
            self.spans.append(Span(member, instruction, self._began_s[instruction], self.env.now, share))
            self._finish((member, instruction))


def _next(queues: Sequence[deque[Collective]]) -> list[Collective]:
    """The collectives that come first in some queues, once each, when what came before them is taken out."""
    for queue in queues:
        queue.popleft()
    return list(dict.fromkeys(queue[0] for queue in queues if queue))
