"""Collectives and messages between workers, on any device through any backend.

Gloo moves what lies in the host's memory only. Tensors of a GPU go through a copy there, so that several workers may share one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from runtime.rings import RingWork, ring_of

# torch 2.13 warns of the older names, torch 2.11 does not have the newer ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Pending(Protocol):
    """A collective or message under way."""

    def wait(self) -> object:
        """Nothing of use; returns when the result may be used (on a GPU: by what is queued after it)."""


class _Staged:
    """A collective of copies in the host's memory; the result is copied back to its place when it is waited for."""

    def __init__(self, work: Any, copy: torch.Tensor, result: torch.Tensor | None) -> None:
        self._work, self._copy, self._result = work, copy, result

    def wait(self) -> None:
        """Nothing; returns when the result is in its place."""
        self._work.wait()
        if self._result is not None:
            self._result.copy_(self._copy)


def is_staged(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether a tensor goes through a copy in the host's memory."""
    return tensor.is_cuda and dist.get_backend(group) == dist.Backend.GLOO


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None, op: Any = SUM) -> Pending:
    """The work of reducing a tensor in place over a group."""
    if is_staged(tensor, group):
        copy = _host(tensor)
        return _Staged(dist.all_reduce(copy, op, group=group, async_op=True), copy, tensor)
    if op == SUM and tensor.is_contiguous() and (ring := ring_of(group, tensor)) is not None:
        return ring.all_reduce(tensor)
    return _begun(dist.all_reduce(tensor, op, group=group, async_op=True))


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
    """The work of gathering equal parts of all ranks into `whole`, along the first dimension."""
    if is_staged(part, group):
        copy = torch.empty_like(whole, device="cpu")
        return _Staged(_all_gather(copy, _host(part), group=group, async_op=True), copy, whole)
    if (ring := ring_of(group, whole)) is not None:
        return ring.all_gather(whole, part)
    return _begun(_all_gather(whole, part, group=group, async_op=True))


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
    """The work of summing `whole` over a group and leaving each rank its equal part, along the first dimension."""
    if is_staged(whole, group):
        copy = torch.empty_like(part, device="cpu")
        return _Staged(_reduce_scatter(copy, _host(whole), group=group, async_op=True), copy, part)
    if (ring := ring_of(group, whole, scatters=True)) is not None:
        return ring.reduce_scatter(part, whole)
    return _begun(_reduce_scatter(part, whole, group=group, async_op=True))


def all_to_all(
    arriving: torch.Tensor, going: torch.Tensor, rows_from: Sequence[int], rows_to: Sequence[int], group: dist.ProcessGroup | None
) -> Pending:
    """The work of sending rows to all ranks, so many to each, and receiving theirs, along the first dimension."""
    sizes = list(rows_from), list(rows_to)
    if is_staged(going, group):
        copy = torch.empty_like(arriving, device="cpu")
        return _Staged(dist.all_to_all_single(copy, _host(going), *sizes, group=group, async_op=True), copy, arriving)
    return _begun(dist.all_to_all_single(arriving, going, *sizes, group=group, async_op=True))


def send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup | None, tag: int) -> Pending:
    """The work of sending a tensor to a rank."""
    if is_staged(tensor, group):
        copy = _host(tensor)
        return _Staged(dist.isend(copy, to, group=group, tag=tag), copy, None)
    return _begun(dist.isend(tensor, to, group=group, tag=tag))


def receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None, tag: int) -> Pending:
    """The work of receiving into a tensor from a rank."""
    if is_staged(tensor, group):
        copy = torch.empty_like(tensor, device="cpu")
        return _Staged(dist.irecv(copy, source, group=group, tag=tag), copy, tensor)
    return _begun(dist.irecv(tensor, source, group=group, tag=tag))


def _begun(work: Any) -> Pending:
    assert work is not None  # which torch gives to those who are no members
    begun: Pending = work
    return begun


def tell_when_done(work: Pending, done: Callable[[], None], tensor: torch.Tensor) -> None:
    """Nothing; calls `done` in another thread as soon as a collective of a tensor of the CPU has ended, where torch can tell.

    Elsewhere (on a GPU, whose streams the host does not see, and of gloo's scatters) it is known when somebody waits for it.
    """
    if isinstance(work, RingWork):
        work.future.add_done_callback(lambda _: done())
    elif isinstance(work, dist.Work) and not tensor.is_cuda:
        with contextlib.suppress(RuntimeError):
            work.get_future().then(lambda _: done())
