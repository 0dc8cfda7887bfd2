"""Messages between lanes: activations forward, gradients back, between groups of unequal degrees.

Each device of the sending lane sends the rows of the message that it is responsible for, to those devices of the receiving
lane that need them first; without sequence parallelism the receivers then gather the whole among themselves, on what is
usually the faster link (the scatter-gather of Narayanan et al., 2021, section 4.1, for unequal degrees).

Tensors are x_SBH: sequence, batch, hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from runtime.collectives import Pending, all_gather, receive, send
from runtime.parameters import share
from runtime.world import World, shared_rows
from sim.spec.program import Lane, Recv, RecvActivation, RecvGradient, Send, SendActivation, SendGradient, matching_send


@dataclass
class _Posted:
    """A message that is on its way here: where it will lie, and the works that put it there."""

    instruction: Send
    rows: torch.Tensor
    works: list[Pending]


@dataclass
class _Channel:
    """The messages from one lane to this one, in the sender's order: those not yet posted, and those on their way."""

    waiting: deque[tuple[int, Send]] = field(default_factory=deque)
    posted: deque[_Posted] = field(default_factory=deque)


class Messages:
    """Sends and receives of one worker. Receives are posted one ahead on every channel, and sends do not wait.

    A sent tensor is kept until a message comes back which the receiver can only have sent after it took ours; so no more are
    kept than the schedule has under way.
    """

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world, self._dtype = world, dtype
        plan = world.plan
        self._length, self._hidden = plan.slice_length // plan.context_parallel, plan.transformer.hidden
        self._sequence_parallel = plan.sequence_parallel
        self._lane = world.lane
        by_name = world.program.by_name
        peers = sorted({i.peer for i in self._lane.instructions if isinstance(i, (Send, Recv))})
        self._incoming = {peer: tuple(self._sends(by_name[peer], self._lane.name)) for peer in peers}
        self._tags = {(peer, send): tag for peer in peers for tag, send in enumerate(self._sends(self._lane, peer))}
        self._releases = {peer: self._released(by_name[peer]) for peer in peers}
        self._channels: dict[str, _Channel] = {}
        # A receive of NCCL's occupies the GPU until its message comes. In the first iteration CUDA loads kernels and NCCL
        # connects, both of which may wait for the GPU to be idle: then nothing may be posted that is not needed next.
        self._ahead = world.backend == "gloo"
        self._kept: dict[Send, tuple[torch.Tensor, list[Pending], Callable[[], None]]] = {}

    @staticmethod
    def _sends(lane: Lane, to: str) -> list[Send]:
        return [i for i in lane.instructions if isinstance(i, (SendActivation, SendGradient)) and i.peer == to]

    def _released(self, peer: Lane) -> dict[Send, tuple[Send, ...]]:
        """Of each message from a peer, those of ours that it took before it sent that one, and after the one before."""
        taken: list[Send] = []
        found: dict[Send, tuple[Send, ...]] = {}
        for instruction in peer.instructions:
            if isinstance(instruction, (RecvActivation, RecvGradient)) and instruction.peer == self._lane.name:
                taken.append(matching_send(peer.name, instruction)[1])
            elif isinstance(instruction, (SendActivation, SendGradient)) and instruction.peer == self._lane.name:
                found[instruction] = tuple(taken)
                taken = []
        return found

    def start(self) -> None:
        """Nothing; begins an iteration: posts the first receive of every channel."""
        self._channels = {peer: _Channel(deque(enumerate(sends))) for peer, sends in self._incoming.items()}
        for peer in self._channels if self._ahead else ():
            self._post(peer)

    def _post(self, peer: str) -> None:
        channel = self._channels[peer]
        if not channel.waiting:
            return
        tag, send = channel.waiting.popleft()
        world = self._world
        start, stop = share(self._length, world.index, self._lane.tensor_parallel)
        rows = torch.empty(
            (stop - start, send.sequences[1] - send.sequences[0], self._hidden), dtype=self._dtype, device=world.device
        )
        works = []
        senders = world.ranks[peer][world.context]
        for i, rank in enumerate(senders):
            here = (world.index, self._lane.tensor_parallel)
            low, high = shared_rows(self._length, (i, len(senders)), here)
            if low < high:
                works.append(receive(rows[low - start : high - start], rank, *world.message(rank, world.rank, tag)))
        channel.posted.append(_Posted(send, rows, works))

    def receive(self, instruction: Recv) -> torch.Tensor:
        """The tensor x_SBH of a message, when it is there: all rows, or this device's under sequence parallelism."""
        peer, wanted = matching_send(self._lane.name, instruction)
        channel = self._channels[peer]
        while not any(posted.instruction == wanted for posted in channel.posted):
            self._post(peer)
        posted = next(posted for posted in channel.posted if posted.instruction == wanted)
        channel.posted.remove(posted)
        for work in posted.works:
            work.wait()
        for taken in self._releases[peer].get(wanted, ()):
            self._release(taken)
        if self._ahead and not channel.posted:
            self._post(peer)
        return posted.rows if self._sequence_parallel else self._gathered(posted.rows)

    def _gathered(self, rows_SBH: torch.Tensor) -> torch.Tensor:
        """All rows of a message, of which every device of the lane has received some."""
        degree = self._lane.tensor_parallel
        if degree == 1:
            return rows_SBH
        each = share(self._length, 0, degree)[1]
        if len(rows_SBH) < each:
            rows_SBH = torch.cat([rows_SBH, rows_SBH.new_zeros((each - len(rows_SBH), *rows_SBH.shape[1:]))])
        everything = rows_SBH.new_empty((each * degree, *rows_SBH.shape[1:]))
        all_gather(everything, rows_SBH, self._world.group(self._world.tensor_ranks)).wait()
        return everything[: self._length]

    def num_bytes(self, instruction: Send | Recv) -> int:
        """The bytes of a message, from all devices of the lane to all of the other."""
        begin, end = instruction.sequences
        return self._world.plan.slice_length * (end - begin) * self._hidden * self._dtype.itemsize

    def send(self, instruction: Send, x_SBH: torch.Tensor, done: Callable[[], None]) -> None:
        """Nothing; begins to send this device's rows of `x_SBH`, the lane's share of a micro-batch.

        `done` is called when it is known that they are taken.
        """
        world, lane = self._world, self._lane
        begin, end = instruction.sequences
        columns = slice(begin - lane.sequences[0], end - lane.sequences[0])
        start, stop = share(self._length, world.index, lane.tensor_parallel)
        mine = x_SBH[:, columns] if self._sequence_parallel else x_SBH[start:stop, columns]
        mine = mine.contiguous()
        tag = self._tags[instruction.peer, instruction]
        receivers = world.ranks[instruction.peer][world.context]
        works = []
        for j, rank in enumerate(receivers):
            here = (world.index, lane.tensor_parallel)
            low, high = shared_rows(self._length, here, (j, len(receivers)))
            if low < high:
                works.append(send(mine[low - start : high - start], rank, *world.message(world.rank, rank, tag)))
        self._kept[instruction] = (mine, works, done)

    def _release(self, instruction: Send) -> None:
        _, works, done = self._kept.pop(instruction)
        for work in works:
            work.wait()
        done()

    def finish(self) -> None:
        """Nothing; ends an iteration: waits until everything that was sent is taken."""
        for instruction in list(self._kept):
            self._release(instruction)
        self._ahead = True
