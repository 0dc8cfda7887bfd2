"""Collectives of CPU tensors as rings of messages, for gloo between machines.

Gloo's own rings announce a buffer to its sender only when its step has come, so that every step waits for the path's latency
once more; and its reduce-scatter moves as much as an all-reduce, so that also inside a machine a ring is faster. Here all
receives are posted when a collective begins, and a step sends what the one before it brought. So a ring takes what it ideally
does (Patarasuk & Yuan, 2009): n-1 steps for a reduce-scatter or a gather and twice as many for an all-reduce, each of an n-th of
the bytes and one latency.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

FIRST_TAG, TAGS = 1_000_000, 1_000_000
"""The tags of the rings' messages, which no other message of a group has; they come round again."""

LEAST_BYTES = 1024
"""Of a rank's part of a collective: less, such as a norm, gloo sends at once to all."""


class RingWork:
    """A collective under way."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def wait(self) -> None:
        """Nothing; returns when the result is there. Raises what went wrong."""
        self.future.result()


class Ring:
    """A group's ring, in the order of `places` (of each of the group's ranks, what to sort it by), and a thread that turns it.

    Collectives are begun in one order on all ranks and follow one another.
    """

    def __init__(self, group: dist.ProcessGroup, places: Sequence[Any], scatters_only: bool = False) -> None:
        self._group, self.size, self._scatters_only = group, dist.get_world_size(group), scatters_only
        self._order = sorted(range(self.size), key=lambda rank: (places[rank], rank))
        self._at = self._order.index(dist.get_rank(group))
        self._next, self._previous = (
            dist.get_global_rank(group, self._order[(self._at + step) % self.size]) for step in (1, self.size - 1)
        )
        self._tag = 0
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], RingWork]] = queue.SimpleQueue()
        threading.Thread(target=self._turn, name="ring", daemon=True).start()

    def takes(self, whole: torch.Tensor, scatters: bool = False) -> bool:
        """Whether a tensor's collective, such as a scatter, is worth a ring."""
        worth = not whole.is_cuda and whole.numel() * whole.element_size() >= LEAST_BYTES * self.size
        return worth and (scatters or not self._scatters_only)

    def all_reduce(self, tensor: torch.Tensor) -> RingWork:
        """The work of summing a contiguous tensor in place."""
        flat = tensor.detach().view(-1)
        each = -(-flat.numel() // self.size)
        parts = [flat[part * each : (part + 1) * each] for part in range(self.size)]
        scatter = self._scatter(parts)
        gather = self._gather(parts)

        def turn() -> None:
            parts[self._order[self._at]].copy_(scatter())
            gather()

        return self._begun(turn)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> RingWork:
        """The work of summing `whole` and leaving this rank its equal part; `whole` stays as it is."""
        scatter = self._scatter(whole.detach().reshape(-1).view(self.size, -1).unbind())
        return self._begun(lambda: part.detach().view(-1).copy_(scatter()))

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> RingWork:
        """The work of gathering equal parts of all ranks."""
        parts = whole.detach().view(self.size, -1).unbind()
        gather = self._gather(parts)

        def turn() -> None:
            parts[self._order[self._at]].copy_(part.detach().reshape(-1))
            gather()

        return self._begun(turn)

    def _part(self, parts: Sequence[torch.Tensor], back: int) -> torch.Tensor:
        """The part of the rank that stands so many places before this one."""
        return parts[self._order[(self._at - back) % self.size]]

    def _posted(self, buffers: Sequence[torch.Tensor]) -> tuple[list[Any], int]:
        """The works that receive into these buffers from the rank before, one after the other, and the first one's tag."""
        first = FIRST_TAG + self._tag % TAGS
        self._tag += len(buffers)
        works = [
            dist.irecv(buffer, self._previous, group=self._group, tag=first + step) if buffer.numel() else None
            for step, buffer in enumerate(buffers)
        ]
        return works, first

    def _send(self, part: torch.Tensor, tag: int) -> Any:
        return dist.isend(part, self._next, group=self._group, tag=tag) if part.numel() else None

    def _scatter(self, parts: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """What turns the ring once and gives this rank's part of the sum; its receives are posted here and now."""
        buffers = [torch.empty_like(self._part(parts, step + 2)) for step in range(self.size - 1)]
        works, tag = self._posted(buffers)

        def turn() -> torch.Tensor:
            sent, part = [], self._part(parts, 1)
            for step, (work, buffer) in enumerate(zip(works, buffers, strict=True)):
                sent.append((part, self._send(part, tag + step)))
                _end(work)
                part = buffer.add_(self._part(parts, step + 2))
            for _, work in sent:
                _end(work)
            return part

        return turn

    def _gather(self, parts: Sequence[torch.Tensor]) -> Callable[[], None]:
        """What turns the ring once and fills all parts; its receives are posted here and now."""
        works, tag = self._posted([self._part(parts, step + 1) for step in range(self.size - 1)])

        def turn() -> None:
            sent = []
            for step, work in enumerate(works):
                sent.append(self._send(self._part(parts, step), tag + step))
                _end(work)
            for work in sent:
                _end(work)

        return turn

    def _begun(self, turn: Callable[[], object]) -> RingWork:
        work = RingWork()
        self._jobs.put((turn, work))  # type: ignore[arg-type]
        return work

    def _turn(self) -> None:
        """Nothing; the thread, which does one collective after the other."""
        while True:
            turn, work = self._jobs.get()
            try:
                with torch.no_grad():
                    turn()
            except BaseException as error:
                work.future.set_exception(error)
            else:
                work.future.set_result(None)


def _end(work: Any) -> None:
    if work is not None:
        work.wait()


_rings: dict[dist.ProcessGroup, Ring] = {}


def use_ring(group: dist.ProcessGroup, places: Sequence[Any], scatters_only: bool = False) -> None:
    """Nothing; has the collectives of a gloo group, or its reduce-scatters alone, go round a ring, from the rank with the
    lowest of `places` on."""
    _rings[group] = Ring(group, places, scatters_only)


def ring_of(group: dist.ProcessGroup | None, whole: torch.Tensor, scatters: bool = False) -> Ring | None:
    """The ring that a collective of this tensor goes round; None where it is gloo's, or NCCL's, own matter."""
    ring = _rings.get(group) if group is not None else None
    return ring if ring is not None and ring.takes(whole, scatters) else None
