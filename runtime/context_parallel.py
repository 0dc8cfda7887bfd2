"""Attention over sequences that are divided over ranks: keys and values go round a ring (context parallelism).

Of n ranks, rank i has two of 2n equal stretches of every sequence, number i and number 2n - 1 - i, so that under a causal mask
all have as much to do: of another rank's keys its own queries either all see the first half, or those of its second half see
all. So only a rank's own block needs a mask. (Liu et al., 2023, Ring Attention, arXiv:2310.01889; the stretches as in Grattafiori
et al., 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.)

Shapes: S tokens of this rank, B sequences of a micro-batch, N heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from runtime.collectives import Pending, receive, send
from runtime.pacer import Pacer
from runtime.tensor_parallel import eager

Stretches = tuple[tuple[int, int], tuple[int, int]]
"""First position and the one behind the last, of both stretches of a sequence that a rank has."""

Channel = Callable[[int, int, int], tuple[dist.ProcessGroup, int]]
"""The process group and the tag of a message, of its sender, its receiver and its number: `World.message`."""


def stretches(length: int, index: int, degree: int) -> Stretches:
    """The stretches of a sequence of so many tokens that context rank `index` of `degree` has, in their order."""
    each = length // (2 * degree)
    last = 2 * degree - 1 - index
    return (index * each, (index + 1) * each), (last * each, (last + 1) * each)


@dataclass(frozen=True)
class ContextGroup:
    """One rank's place among those that share its sequences: number `index` of `degree`.

    Blocks of keys and values go from each of `ring`, (rank, context rank) in the order of the ring, to the next one.
    """

    index: int
    degree: int
    ring: tuple[tuple[int, int], ...]
    channel: Channel
    pacer: Pacer | None = None
    """As a `TensorGroup`'s."""

    def rows(self, whole_SB: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what belongs to the tokens of a whole sequence."""
        return torch.cat([whole_SB[start:stop] for start, stop in stretches(len(whole_SB), self.index, self.degree)])

    def positions(self, length: int) -> Stretches:
        """The stretches of this rank, where it has so many tokens of each sequence."""
        return stretches(length * self.degree, self.index, self.degree)

    @property
    def _at(self) -> int:
        """Its place on the ring."""
        return next(at for at, (_, context) in enumerate(self.ring) if context == self.index)

    def source(self, step: int) -> int:
        """The context rank whose block is here after so many steps."""
        return self.ring[(self._at - step) % self.degree][1]

    def pass_on(self, block: torch.Tensor, number: int, beside: bool = True) -> Callable[[], torch.Tensor]:
        """What waits for the block of the rank before, as this one's begins to go to the rank behind.

        Messages of one number come one after another, those of two beside each other. `beside`: whether attention goes on
        meanwhile.
        """
        at = self._at
        here, to, source = (self.ring[(at + step) % self.degree][0] for step in (0, 1, -1))
        arriving = torch.empty_like(block)

        def begin() -> Pending:
            return _Exchange(
                receive(arriving, source, *self.channel(source, here, number)), send(block, to, *self.channel(here, to, number))
            )

        begun_by = None if self.pacer is None else self.pacer.exchange if beside else self.pacer.collective
        work = begin() if begun_by is None else begun_by(begin)

        def arrived() -> torch.Tensor:
            work.wait()
            return arriving

        return arrived


@dataclass(frozen=True)
class _Exchange:
    """A message that comes and one that goes."""

    coming: Pending
    going: Pending

    def wait(self) -> None:
        """Nothing; returns when both have ended."""
        self.coming.wait()
        self.going.wait()


# --- One block -------------------------------------------------------------------------------------------------------

Read = tuple[torch.Tensor, torch.Tensor]
"""What queries read of some keys, (B, N, S, D), and the logarithms of the sums of the exponentials of their scores, (B, N, S)."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries, keys and values."""


class _Kernel:
    """Attention to one block of keys, forward and backward, by the kernels of torch's own attention, below autograd.

    For the backward of a block needs what was read of all of them. On a GPU it is the kernel that torch takes for whole
    sequences of these shapes, which is no slower in parts: cuDNN's, the flash kernel or the memory-efficient one.
    """

    def __init__(self, query_BNSD: torch.Tensor, key_BNKD: torch.Tensor) -> None:
        self._width = query_BNSD.shape[-1]
        self._scale = 1 / math.sqrt(self._width)
        self._kind = None if query_BNSD.device.type == "cpu" else gpu_kernel(query_BNSD, key_BNKD)
        self._state: tuple[Any, ...] = ()
        """What a GPU's kernels left besides: of their random numbers, which without dropout are none."""

    def read(self, query_BNSD: torch.Tensor, key_BNKD: torch.Tensor, value_BNKD: torch.Tensor, causal: bool) -> Read:
        """What the queries read of the block, under a causal mask or of all of it."""
        aten, scale = torch.ops.aten, self._scale
        if self._kind is None:
            read, sums = aten._scaled_dot_product_flash_attention_for_cpu(
                query_BNSD, key_BNKD, value_BNKD, 0.0, causal, scale=scale
            )
            return read, sums
        heads, length = query_BNSD.shape[1:3]
        query, key, value = (_padded(part) for part in (query_BNSD, key_BNKD, value_BNKD))
        if self._kind == SDPBackend.CUDNN_ATTENTION:
            read, sums, *state = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, scale=scale)
            sums = sums.view(read.shape[:3])
        elif self._kind == SDPBackend.FLASH_ATTENTION:
            read, sums, *state = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        else:
            key, value = _repeated(key, heads), _repeated(value, heads)
            read, sums, *state = aten._scaled_dot_product_efficient_attention(
                query, key, value, None, True, 0.0, causal, scale=scale
            )
        self._state = tuple(state)
        return read[..., : self._width], sums[..., :length]

    def backward(
        self,
        gradient_BNSD: torch.Tensor,
        query_BNSD: torch.Tensor,
        key_BNKD: torch.Tensor,
        value_BNKD: torch.Tensor,
        read: Read,
        causal: bool,
    ) -> Gradients:
        """The gradients of the queries, keys and values, as far as this block goes; what was `read` is of all blocks."""
        aten, (read_BNSD, sums_BNS), scale = torch.ops.aten, read, self._scale
        sums_BNS = sums_BNS.contiguous()
        if self._kind is None:
            found: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient_BNSD, query_BNSD, key_BNKD, value_BNKD, read_BNSD, sums_BNS, 0.0, causal, scale=scale
            )
            return found
        heads, kv_heads = query_BNSD.shape[1], key_BNKD.shape[1]
        given, query, key, value, whole = map(_padded, (gradient_BNSD, query_BNSD, key_BNKD, value_BNKD, read_BNSD))
        longest = query.shape[2], key.shape[2]
        if self._kind == SDPBackend.CUDNN_ATTENTION:
            *cumulative, _, _, seed, offset, _ = self._state
            of_query, of_key, of_value = aten._scaled_dot_product_cudnn_attention_backward(
                *(given, query, key, value, whole, sums_BNS[..., None], seed, offset),
                *(None, *cumulative, *longest, 0.0, causal),
                scale=scale,
            )
        elif self._kind == SDPBackend.FLASH_ATTENTION:
            *cumulative, _, _, seed, offset, _ = self._state
            of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_backward(
                *(given, query, key, value, whole, sums_BNS, *cumulative, *longest, 0.0, causal, seed, offset),
                scale=scale,
            )
        else:
            # It reads sums of 32 queries at once, and what was read as if the heads of a token lay side by side.
            whole = whole.transpose(1, 2).contiguous().transpose(1, 2)
            sums_BNS = F.pad(sums_BNS, (0, -sums_BNS.shape[-1] % 32), value=torch.inf)
            key, value = _repeated(key, heads), _repeated(value, heads)
            of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
                *(given, query, key, value, None, whole, sums_BNS, *self._state, 0.0, [True, True, True, False], causal),
                scale=scale,
            )
            of_key, of_value = (part.unflatten(1, (kv_heads, -1)).sum(2) for part in (of_key, of_value))
        return of_query[..., : self._width], of_key[..., : self._width], of_value[..., : self._width]


def gpu_kernel(query_BNSD: torch.Tensor, key_BNKD: torch.Tensor) -> SDPBackend:
    """The kernel that torch's attention takes, where gradients are needed; the memory-efficient one where it takes none."""
    query, key = (_padded(part.detach()).requires_grad_() for part in (query_BNSD, key_BNKD))
    with torch.enable_grad():
        number = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    chosen = SDPBackend(number)
    return chosen if chosen in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) else SDPBackend.EFFICIENT_ATTENTION


def _padded(x_BNSD: torch.Tensor) -> torch.Tensor:
    """With heads of a width that the kernels of a GPU take, a multiple of 8; what is added are zeros, which change no score."""
    missing = -x_BNSD.shape[-1] % 8
    return F.pad(x_BNSD, (0, missing)) if missing else x_BNSD


def _repeated(x_BNKD: torch.Tensor, heads: int) -> torch.Tensor:
    """With a head of keys, or values, for each head of queries."""
    return x_BNKD.repeat_interleave(heads // x_BNKD.shape[1], dim=1)


# --- The ring --------------------------------------------------------------------------------------------------------

KEYS_AND_VALUES, THEIR_GRADIENTS = 0, 1
"""The numbers of the messages: of each there is one under way at a time."""


def _both(block_2SBND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values (B, N, S, D) of a block."""
    key_SBND, value_SBND = block_2SBND
    return key_SBND.permute(1, 2, 0, 3), value_SBND.permute(1, 2, 0, 3)


def _parts(length: int, source: int, index: int) -> tuple[slice, slice]:
    """Which queries of rank `index` see another rank's keys, and which of them, of so many tokens each: they see all of these."""
    if source < index:  # its first stretch is before both of ours, its second behind them
        return slice(None), slice(0, length // 2)
    return slice(length // 2, None), slice(None)  # both of its stretches are between ours


class _Ring(torch.autograd.Function):
    """What the queries read of the keys of all ranks. Keeps this rank's own keys and values; the others come round once more."""

    @staticmethod
    def forward(ctx: Any, query_SBND: torch.Tensor, block_2SBND: torch.Tensor, group: ContextGroup) -> torch.Tensor:
        query, length = query_SBND.permute(1, 2, 0, 3), len(query_SBND)
        kernel, block = _Kernel(query, _both(block_2SBND)[0]), block_2SBND
        wide = torch.promote_types(query.dtype, torch.float32)
        for step in range(group.degree):
            coming = group.pass_on(block, KEYS_AND_VALUES) if step + 1 < group.degree else None
            key, value = _both(block)
            if step == 0:
                read, sums = (part.to(wide) for part in kernel.read(query, key, value, causal=True))
            else:
                queries, keys = _parts(length, group.source(step), group.index)
                more, more_sums = kernel.read(query[:, :, queries], key[:, :, keys], value[:, :, keys], causal=False)
                before = sums[:, :, queries]
                read[:, :, queries].lerp_(more.to(wide), (more_sums - before).sigmoid_()[..., None])  # by their sums
                torch.logaddexp(before, more_sums, out=before)
            if coming is not None:
                block = coming()
        read = read.to(query.dtype)
        ctx.save_for_backward(query_SBND, block_2SBND, read, sums)
        ctx.kernel, ctx.group = kernel, group
        return read

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        query_SBND, own_2SBND, read, sums = ctx.saved_tensors
        kernel, group, (given,) = ctx.kernel, ctx.group, gradients
        query, length, block = query_SBND.permute(1, 2, 0, 3), len(query_SBND), own_2SBND
        wide = torch.promote_types(query.dtype, torch.float32)
        arriving = None
        for step in range(group.degree):
            coming = group.pass_on(block, KEYS_AND_VALUES) if step + 1 < group.degree else None
            key, value = _both(block)
            if step == 0:
                of_query, *of_own = (part.to(wide) for part in kernel.backward(given, query, key, value, (read, sums), True))
            else:
                queries, keys = _parts(length, group.source(step), group.index)
                seen = read[:, :, queries], sums[:, :, queries]
                at = query[:, :, queries], key[:, :, keys], value[:, :, keys]
                of_part, *of_others = kernel.backward(given[:, :, queries], *at, seen, False)
                of_query[:, :, queries] += of_part
                # What the ranks before gave this block came a step behind it, and goes on to the next, at last to its own rank.
                of_block = torch.zeros_like(block) if arriving is None else arriving()
                for whole, part in zip(_both(of_block), of_others, strict=True):
                    whole[:, :, keys] += part
                # The last step home has nothing to hide behind.
                arriving = group.pass_on(of_block, THEIR_GRADIENTS, beside=step + 1 < group.degree)
            if coming is not None:
                block = coming()
        assert arriving is not None  # a group has two ranks at least
        of_block = arriving()
        for whole, part in zip(_both(of_block), of_own, strict=True):
            whole += part
        return of_query.permute(2, 0, 1, 3).to(query.dtype), of_block, None


@eager
def ring_attention(query_SBND: torch.Tensor, block_2SBND: torch.Tensor, group: ContextGroup) -> torch.Tensor:
    """What the queries read, (B, N, S, D), of all ranks' blocks of keys and values under a causal mask."""
    read: torch.Tensor = _Ring.apply(query_SBND, block_2SBND, group)  # type: ignore[no-untyped-call]
    return read
