"""Where one worker stands: its rank, device and lane, and the process groups that it is a member of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runtime.context_parallel import ContextGroup
from runtime.experts import ExpertGroup
from runtime.launch import ranked_devices
from runtime.pacer import Pacer
from runtime.parameters import share
from runtime.rings import use_ring
from runtime.tensor_parallel import TensorGroup
from runtime.watch import control_timeout_s
from sim.spec.plan import Plan
from sim.spec.program import Lane, Program, Send

Ranks = tuple[int, ...]
Told = TypeVar("Told")


def lane_ranks(plan: Plan, program: Program) -> Mapping[str, tuple[Ranks, ...]]:
    """Of every lane the ranks of its tensor-parallel groups, one for each context rank.

    In a group they ascend, as torch has them: a lane's shards follow the ranks.
    """
    rank_of = {name: rank for rank, name in enumerate(ranked_devices(plan))}
    return {
        lane.name: tuple(tuple(sorted(rank_of[device] for device in group)) for group in lane.tensor_groups)
        for lane in program.lanes
    }


class Connections:
    """The process groups of one process, made by all processes of torch's default group together, which is gloo's.

    With NCCL each pair of devices that exchange messages has a communicator for each direction besides, so that no message
    waits behind one that goes the other way. The control groups, of what is not an iteration's, wait longer than those of
    messages: to draw weights or to save them takes some workers longer than others. Who has died is seen at once all the same.
    With `places`, of each rank its place in the network, gloo's collectives go round rings in their order (`runtime.rings`);
    without, its scatters alone, which gloo does by reducing everything.
    """

    def __init__(
        self, device: torch.device, backend: str = "gloo", timeout_s: float = 60.0, places: Sequence[Any] | None = None
    ) -> None:
        self._places = places
        self.device, self.backend, self.timeout_s = device, backend, timeout_s
        self.rank = dist.get_rank()
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}
        self._sums: dict[Ranks, dist.ProcessGroup | None] = {}
        """Of shards. They are begun beside everything else, so that no other collective may be of the same group."""
        self._controls: dict[Ranks, dist.ProcessGroup | None] = {}
        self._channels: dict[tuple[int, int], dist.ProcessGroup | None] = {}

    def connect(self, plan: Plan, program: Program, reductions: Iterable[Ranks], sums: Iterable[Ranks] = ()) -> None:
        """Nothing; makes the groups of a plan that are not there yet: of its workers, lanes, reductions and sums of shards.

        All processes call it alike, those that are no members of a group too. (Groups that only their members make would be
        cheaper, but their names depend on how many others a process has, in torch 2.13.)
        """
        ranks = lane_ranks(plan, program)
        everyone = tuple(range(len(plan.devices)))
        patient_s = control_timeout_s(self.timeout_s)
        if everyone not in self._controls:
            self._controls[everyone] = self._new_group(everyone, "gloo", patient_s)
        # NCCL counts from when a work is queued, and ends the process without a word: there the watchdog is the limit.
        timeout_s = patient_s if self.backend == "nccl" else self.timeout_s
        tensor_groups = (group for groups in ranks.values() for group in groups)
        sharing_experts = (tuple(sorted(members)) for members in expert_ranks(plan, program))
        of_all = [(members, self._groups) for members in sorted({*reductions, *tensor_groups, *sharing_experts, everyone})]
        for members, known in [*of_all, *((members, self._sums) for members in sorted(sums))]:
            if members not in known and len(members) > 1:
                known[members] = group = self._new_group(members, self.backend, timeout_s)
                if group is not None and self.backend == "gloo":
                    places = members if self._places is None else [self._places[rank] for rank in members]
                    use_ring(group, places, scatters_only=self._places is None)
                if group is not None and self.backend == "nccl":
                    # A communicator is made at its first use, by all members at once: here, and not where one may be busy.
                    dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        if self.backend == "nccl":
            for pair in sorted(message_pairs(plan, program) - self._channels.keys()):
                self._channels[pair] = channel = self._new_group(pair, self.backend, timeout_s, urgent=True)
                if channel is not None:  # a message makes another communicator than a collective does
                    first = torch.zeros(1, device=self.device)
                    move = dist.send if self.rank == pair[0] else dist.recv
                    move(first, pair[1] if self.rank == pair[0] else pair[0], group=channel)

    def _new_group(self, ranks: Ranks, backend: str, timeout_s: float, urgent: bool = False) -> dist.ProcessGroup | None:
        """The group; None where this process is no member."""
        options = None
        if urgent:
            # Torch has so many streams of each priority: what waits for a peer must not share one with a lane's collectives.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        timeout = timedelta(seconds=timeout_s)
        made = dist.new_group(list(ranks), backend=backend, timeout=timeout, pg_options=options)
        if self.rank not in ranks:
            return None
        assert isinstance(made, dist.ProcessGroup)
        return made

    def group(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group of these ranks, this process among them."""
        return _member(self._groups[ranks])

    def sums_group(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group in which these ranks, this process among them, sum the shards that they all have."""
        return _member(self._sums[ranks])

    def control(self, everyone: Ranks) -> dist.ProcessGroup:
        """The gloo group of all workers of a plan."""
        return _member(self._controls[everyone])

    def message_group(self, sender: int, receiver: int, everyone: Ranks) -> dist.ProcessGroup:
        """The group that messages from one worker to another go through."""
        return _member(self._channels[sender, receiver]) if self.backend == "nccl" else self.group(everyone)


def _member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None
    return group


def shared_rows(rows: int, sender: tuple[int, int], receiver: tuple[int, int]) -> tuple[int, int]:
    """The `(start, stop)` of a message's rows that one device sends another, each given as (index, of how many); or nothing."""
    (a, b), (c, d) = share(rows, *sender), share(rows, *receiver)
    return max(a, c), max(max(a, c), min(b, d))


def message_pairs(plan: Plan, program: Program) -> set[tuple[int, int]]:
    """Sender and receiver of all messages between workers."""
    ranks = lane_ranks(plan, program)
    length = plan.slice_length // plan.context_parallel
    found = set()
    for lane in program.lanes:
        for peer in {i.peer for i in lane.instructions if isinstance(i, Send)}:
            for senders, receivers in zip(ranks[lane.name], ranks[peer], strict=True):
                for i, sender in enumerate(senders):
                    for j, receiver in enumerate(receivers):
                        start, stop = shared_rows(length, (i, len(senders)), (j, len(receivers)))
                        if start < stop:
                            found.add((sender, receiver))
        if lane.context_parallel > 1:
            for members in zip(*ranks[lane.name], strict=True):
                ring = sorted(members)
                found |= {(sender, ring[(at + 1) % len(ring)]) for at, sender in enumerate(ring)}
    return found


def expert_rank(plan: Plan, lane: Lane, context: int, index: int) -> int:
    """Which of the `expert_parallel` parts of its layers' experts a device of a lane has: one after another in the plan.

    It is tensor rank `index` of a context rank. All tensor ranks have the same part, unless each has whole experts.
    """
    replicas = len(plan.pipelines[lane.pipeline].stages[lane.stage].replicas)
    copy = (lane.pipeline * replicas + lane.replica) * plan.context_parallel + context
    if plan.whole_experts:
        copy = copy * lane.tensor_parallel + index
    return copy % plan.expert_parallel


def expert_ranks(plan: Plan, program: Program) -> list[Ranks]:
    """The ranks that divide the experts of a stage's layers among them, in expert order.

    Each with the others' tensor rank; where ranks have whole experts, all tensor ranks of the groups together.
    """
    ranks = lane_ranks(plan, program)
    found: list[Ranks] = []
    for stage in range(len(plan.pipelines[0].stages)) if plan.expert_parallel > 1 else ():
        groups = [group for lane in program.lanes if lane.stage == stage for group in ranks[lane.name]]
        copies = plan.expert_copies(len(groups[0]))
        for at in range(0, len(groups), copies):
            sharing = groups[at : at + copies]
            found += [tuple(chain.from_iterable(sharing))] if plan.whole_experts else list(zip(*sharing, strict=True))
    return found


class World:
    """The workers of a plan, seen from one of them. Each is one device; ranks follow `ranked_devices`.

    The default group may have more processes than the plan has devices: the first ones are its workers. `connections` must
    have the plan's groups.
    """

    def __init__(self, plan: Plan, program: Program, connections: Connections) -> None:
        self.plan, self.program, self._connections = plan, program, connections
        self.rank, self.device, self.backend = connections.rank, connections.device, connections.backend
        self.devices = ranked_devices(plan)
        self.ranks = lane_ranks(plan, program)
        self.lane, self.context = next(
            (lane, context) for lane in program.lanes for context, group in enumerate(self.ranks[lane.name]) if self.rank in group
        )
        """Its lane, and the number of its context rank there."""
        self.tensor_ranks: Ranks = self.ranks[self.lane.name][self.context]
        self.index = self.tensor_ranks.index(self.rank)
        """Its number in its tensor-parallel group."""
        self.everyone = tuple(range(len(self.devices)))
        self.control = connections.control(self.everyone) if len(self.everyone) > 1 else None
        """All workers of the plan, always through gloo: for errors, clocks and checkpoints. None where there is one."""

    def expert_group(self) -> ExpertGroup | None:
        """This worker's place among those that divide its layers' experts; None where it has all of them."""
        degree = self.plan.expert_parallel
        if degree == 1:
            return None
        index = expert_rank(self.plan, self.lane, self.context, self.index)
        members = next(found for found in expert_ranks(self.plan, self.program) if self.rank in found)
        order = sorted(range(degree), key=lambda expert: members[expert])
        process_group = self.group(tuple(sorted(members)))
        return ExpertGroup(index, degree, tuple(order), process_group, self.plan.whole_experts)

    def lanes_sharing_experts(self) -> list[str]:
        """The names of the lanes whose devices have this one's layers' other experts, its own among them."""
        members = next(found for found in expert_ranks(self.plan, self.program) if self.rank in found)
        ranks = ((lane.name, {rank for group in self.ranks[lane.name] for rank in group}) for lane in self.program.lanes)
        return [name for name, own in ranks if own.intersection(members)]

    @property
    def device_name(self) -> str:
        """The plan's name of this worker's device."""
        return self.devices[self.rank]

    def lanes_text(self, names: Sequence[str], most: int = 3) -> str:
        """Lanes with their devices, as in 'p0s0 (a100/0, a100/1), p1s0 (v100/0)', not more than `most` by name."""
        shown = [f"{name} ({', '.join(self.program.by_name[name].devices)})" for name in names[:most]]
        return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")

    def group(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group of these ranks, this worker among them."""
        return self._connections.group(ranks)

    def sums_group(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group in which these ranks, this worker among them, sum the shards that they all have."""
        return self._connections.sums_group(ranks)

    def tensor_group(self, sequence_parallel: bool) -> TensorGroup:
        """This worker's tensor-parallel group."""
        ranks = self.tensor_ranks
        process_group = self.group(ranks) if len(ranks) > 1 else None
        return TensorGroup(self.index, len(ranks), process_group, sequence_parallel)

    def context_group(self, pacer: Pacer | None = None) -> ContextGroup | None:
        """This worker's place among those that share its sequences; None where it has whole ones."""
        members = [group[self.index] for group in self.ranks[self.lane.name]]
        if len(members) == 1:
            return None
        # Ranks go node after node, and so do the blocks.
        ring = sorted((rank, context) for context, rank in enumerate(members))
        return ContextGroup(self.context, len(members), tuple(ring), self.message, pacer)

    def message(self, sender: int, receiver: int, tag: int) -> tuple[dist.ProcessGroup, int]:
        """The group and the tag of a message. With NCCL messages of a pair go in their order, with gloo by tag."""
        group = self._connections.message_group(sender, receiver, self.everyone)
        return group, 0 if self.backend == "nccl" else tag

    def told_by_first(self, value: Told) -> Told:
        """What the first worker has, on all of them."""
        values = [value]
        if self.control is not None:
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def agree(self, problem: Exception | None) -> None:
        """Nothing where no worker has a problem; else all raise that of the first rank which has one.

        What goes wrong before the first step is so told by all alike, and no worker waits for one that has ended.
        """
        if self.control is None:
            if problem is not None:
                raise problem
            return
        problems: list[Exception | None] = [None] * len(self.everyone)
        dist.all_gather_object(problems, problem, group=self.control)
        first = next((found for found in problems if found is not None), None)
        if first is not None:
            raise first
