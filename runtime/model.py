"""The transformer that runs: embedding, layers and head over the parameters of `runtime.parameters`, and a lane's part of it.

Shapes: S sequence, B sequences of a micro-batch, H hidden, N heads, D width of a head, V the rows of the vocabulary that this
rank holds, K the keys that S queries may attend to. The residual stream x_SBH is sequence first; with sequence parallelism it has
this rank's rows of the sequence. Where sequences are cut in slices, S is a slice, and K are all tokens up to its end; where they
are divided over context ranks, S are this one's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.context_parallel import ContextGroup, ring_attention
from runtime.experts import ExpertGroup, Experts
from runtime.parameters import Section
from runtime.tensor_parallel import (
    DeferredWeights,
    Remade,
    TensorGroup,
    column_linear,
    compiled_by_torch,
    cross_entropy_sum,
    eager,
    row_linear,
    vocabulary_embedding,
)
from sim.spec.counts import recomputes_activation
from sim.spec.plan import LayerRange
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

Rotary = tuple[torch.Tensor, torch.Tensor]
"""The cosines and sines of the rotary positions, each of shape (S, 1, 1, D / 2)."""


# --- Positions -------------------------------------------------------------------------------------------------------


def rotary_tables(
    transformer: Transformer, stretches: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> Rotary:
    """The rotary tables of some stretches of positions, computed in fp32 (fp64 for fp64) and rounded to `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, transformer.head_dim, 2, dtype=wide, device=device) / transformer.head_dim
    positions = torch.cat([torch.arange(start, stop, dtype=wide, device=device) for start, stop in stretches])
    angles = torch.outer(positions, 1.0 / transformer.rope_theta**exponents)
    return angles.cos().to(dtype)[:, None, None], angles.sin().to(dtype)[:, None, None]


def place_stretches(length: int, place: int, context: ContextGroup | None) -> tuple[tuple[int, int], ...]:
    """First position and the one behind the last of what a rank's tokens, so many, are: of a slice, or of a context rank."""
    return ((place * length, (place + 1) * length),) if context is None else context.positions(length)


KEYS_AT_ONCE = 16
"""Keys before the window are left out in multiples of this: of a mask whose rows are no multiple of it (in some versions, of its
half) torch makes a padded copy for the memory-efficient kernel in every layer (aten/src/ATen/native/transformers/attention.cpp).
"""


def earliest_key(start: int, window: int | None) -> int:
    """The first position whose key is given to tokens from `start` on, which see none before it through a causal window."""
    return 0 if window is None else max(0, start + 1 - window) // KEYS_AT_ONCE * KEYS_AT_ONCE


def attention_mask(
    length: int, earlier: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    """What is added to the scores (query, key) of `length` tokens that attend to so many earlier ones and to themselves.

    None for the causal mask of a whole sequence, where the window is no narrower.
    """
    keys = earlier + length
    if window is None or keys <= window:
        if earlier == 0:
            return None
        if device.type == "cuda":  # its kernels need no numbers for it, which would take more than all else of long sequences
            from torch.nn.attention.bias import causal_lower_right  # here, because it loads torch's compiler

            return causal_lower_right(length, keys)
        window = keys
    seen_SK = torch.ones(length, keys, dtype=torch.bool, device=device).tril_(earlier).triu_(earlier + 1 - window)
    # Not as booleans, of which attention makes this anew and keeps it in every layer.
    return torch.zeros(length, keys, dtype=dtype, device=device).masked_fill_(~seen_SK, -torch.inf)


def _rotated(x_SBND: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """The heads turned by their positions; the halves of a head are the two coordinates, as in Hugging Face."""
    cos, sin = rotary
    a, b = x_SBND.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# --- Slices ----------------------------------------------------------------------------------------------------------

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each of shape (K, B, N, D)."""


class Attended:
    """The keys and values of one micro-batch in one layer, to which its slices add theirs in order.

    Backwards come from the last slice to the first, and leave here what they give the keys and values of those before.
    """

    def __init__(self, slices: int, window: int | None) -> None:
        self._slices, self._window = slices, window
        self._held: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []

    def added(self, place: int, own: KeysValues) -> KeysValues:
        """What the slice at a place attends to: the keys and values before it that its window shows, and its own."""
        begin, start, stop = self._bounds(place, len(own[0]))
        if not self._held:
            self._held = [each.new_empty(self._slices * len(each), *each.shape[1:]) for each in own]
        for held, each in zip(self._held, own, strict=True):
            held[start:stop] = each
        # Of .data autograd does not count the changes: it may keep this, since later slices change only what is behind it.
        keys, values = (held.data[begin:stop] for held in self._held)
        return keys, values

    def completed(self, place: int, given: KeysValues) -> KeysValues:
        """The gradients of the slice's own keys and values, of those given of what it attends to, and what later slices left."""
        begin, start, stop = self._bounds(place, len(self._held[0]) // self._slices)
        later = place < self._slices - 1
        if not later:
            self._gradients = [each.new_zeros(start, *each.shape[1:]) for each in given]
        for gradient, each in zip(self._gradients, given, strict=True):
            gradient[begin:start] += each[: start - begin]
        keys, values = (each[start - begin :] for each in given)
        if later:
            of_keys, of_values = (gradient[start:stop] for gradient in self._gradients)
            keys, values = keys + of_keys, values + of_values
        return keys, values

    def _bounds(self, place: int, length: int) -> tuple[int, int, int]:
        """The first position that the slice at a place attends to, its own first, and the one behind it."""
        start = place * length
        return earliest_key(start, self._window), start, start + length


@dataclass(eq=False)
class Slice:
    """One slice of a micro-batch in one layer.

    Not frozen: of a frozen dataclass torch 2.11 compiles in all fields, and so layers anew for each slice's mask.
    """

    place: int
    attended: Attended
    mask_SK: torch.Tensor | None
    """Its `attention_mask`."""

    def attends_to(self, key_SBND: torch.Tensor, value_SBND: torch.Tensor) -> KeysValues:
        """The keys and values of the slices before this one, as far as its window shows them, and its own."""
        found: KeysValues = _Joined.apply(key_SBND, value_SBND, self.place, self.attended)  # type: ignore[no-untyped-call]
        return found


Seen: TypeAlias = "torch.Tensor | Slice | None"
"""What tokens of whole sequences see, by their `attention_mask`, or the slice that they are."""


class _Joined(torch.autograd.Function):
    """What a slice attends to. The slices' graphs remain apart: gradients of earlier slices pass outside of them."""

    @staticmethod
    def forward(
        ctx: Any, key_SBND: torch.Tensor, value_SBND: torch.Tensor, place: int, attended: Attended
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.place, ctx.attended = place, attended
        return attended.added(place, (key_SBND, value_SBND))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        keys, values = gradients
        return *ctx.attended.completed(ctx.place, (keys, values)), None, None


# --- Pieces ----------------------------------------------------------------------------------------------------------


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up of the two side by side; keeps them and no product, which a plain expression would."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        of_gate = torch.ops.aten.silu_backward(gradients[0] * up, gate)
        return torch.cat((of_gate, gradients[0] * F.silu(gate)), dim=-1)


def _swiglu(both: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _SwiGlu.apply(both)  # type: ignore[no-untyped-call]
    return product


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": _gelu, "relu": F.relu, "swiglu": _swiglu}
"""What stands between the matrices of an MLP, by its name in `Transformer`."""


class Norm(nn.Module):
    """A norm over the hidden numbers of each token."""

    def __init__(self, transformer: Transformer, section: Section, name: str) -> None:
        super().__init__()
        self.epsilon = transformer.norm_epsilon
        self.weight_H = section.parameter(f"{name}.weight")
        self.bias_H = section.parameter(f"{name}.bias") if transformer.norm == "layernorm" else None

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """The normed stream."""
        return self.normed(x_SBH, self.weight_H, self.bias_H)

    def normed(self, x_SBH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None) -> torch.Tensor:
        """The normed stream by such parameters."""
        if bias_H is None:
            return F.rms_norm(x_SBH, weight_H.shape, weight_H, self.epsilon)
        return F.layer_norm(x_SBH, weight_H.shape, weight_H, bias_H, self.epsilon)

    def remade(self, x_SBH: torch.Tensor) -> Remade:
        """How what it makes of the stream is made again."""
        return Remade(self.normed, x_SBH, (self.weight_H, self.bias_H))


def _first_row(section: Section, name: str) -> int:
    """The first row of a parameter that a rank holds."""
    return section.segment_of[name].start


class Embedding(nn.Module):
    """Tokens into the residual stream. Of tokens_SB every tensor rank is given all that its group has of the sequence."""

    def __init__(
        self, transformer: Transformer, section: Section, group: TensorGroup, context: ContextGroup | None = None
    ) -> None:
        super().__init__()
        self.group, self.context = group, context
        self.tokens_VH = section.parameter("embedding.tokens.weight")
        self.start_row = _first_row(section, "embedding.tokens.weight")
        learned = transformer.position == "learned"
        self.positions = section.parameter("embedding.positions.weight") if learned else None

    def forward(self, tokens_SB: torch.Tensor, place: int = 0) -> torch.Tensor:
        """x_SBH, with the learned positions if there are any. Raises InputError for a sequence longer than their table.

        The tokens are those of the slice at a place.
        """
        x_SBH = vocabulary_embedding(tokens_SB, self.tokens_VH, self.start_row, self.group)
        if self.positions is None:
            return x_SBH
        here = place_stretches(tokens_SB.shape[0], place, self.context)
        length = max(stop for _, stop in here)
        if length > self.positions.shape[0]:
            raise InputError(f"the sequence length is at most the {self.positions.shape[0]} learned positions, but got {length}")
        positions_SH = (
            torch.cat([self.positions[start:stop] for start, stop in here]) if len(here) > 1 else self.positions[slice(*here[0])]
        )
        rows = x_SBH.shape[0]
        first = self.group.index * rows if self.group.scatters else 0
        return x_SBH + positions_SH[first : first + rows, None]


class Layer(nn.Module):
    """One layer. Its backward computes again, by `recompute`: "none", "pointwise" (what enters the matrices behind norms and the
    activation), "selective" (the core of attention) or "full" (all)."""

    def __init__(
        self,
        transformer: Transformer,
        section: Section,
        layer_index: int,
        group: TensorGroup,
        recompute: str,
        compiled: bool = False,
        deferred: DeferredWeights | None = None,
        context: ContextGroup | None = None,
        expert_group: ExpertGroup | None = None,
    ) -> None:
        super().__init__()
        t, at = transformer, f"layers.{layer_index}"
        self.group, self.deferred, self.context = group, deferred, context
        self.activation = ACTIVATIONS[t.activation]

        attention = [f"{at}.attention.{part}" for part in ("query", "key", "value")]
        ups = [f"{at}.mlp.{part}" for part in (("gate", "up") if t.gated else ("up",))]

        def fused(names: Sequence[str], kind: str, present: bool = True) -> nn.Parameter | None:
            return section.parameter(*(f"{name}.{kind}" for name in names)) if present else None

        self.attention_norm = Norm(t, section, f"{at}.attention_norm")
        self.qkv_weight = section.parameter(*(f"{name}.weight" for name in attention))
        self.qkv_bias = fused(attention, "bias", t.attention_bias in ("qkv", "all"))
        self.query_norm = section.parameter(f"{at}.attention.query_norm.weight") if t.qk_norm else None
        self.key_norm = section.parameter(f"{at}.attention.key_norm.weight") if t.qk_norm else None
        self.epsilon = t.norm_epsilon
        self.output_weight = section.parameter(f"{at}.attention.output.weight")
        self.output_bias = fused([f"{at}.attention.output"], "bias", t.attention_bias in ("output", "all"))
        self.mlp_norm = Norm(t, section, f"{at}.mlp_norm")
        remakes_activation = recompute == "pointwise" and recomputes_activation(t)
        self.experts: Experts | None = None
        if t.experts is not None:
            self.experts = Experts(t, section, layer_index, group, self.activation, remakes_activation, deferred, expert_group)
        else:
            self.up_weight = section.parameter(*(f"{name}.weight" for name in ups))
            self.up_bias = fused(ups, "bias", t.mlp_bias)
            self.down_weight = section.parameter(f"{at}.mlp.down.weight")
            self.down_bias = fused([f"{at}.mlp.down"], "bias", t.mlp_bias)

        self.head_dim = t.head_dim
        self.heads = self.output_weight.shape[0] // t.head_dim
        self.kv_heads = (self.qkv_weight.shape[0] // t.head_dim - self.heads) // 2
        self.shares_keys = _shares_keys(self.qkv_weight)
        self._run = compiled_by_torch(self._layer) if compiled else self._layer
        # Chosen here, so that compiled layers that differ only in these share their graphs where they can.
        self._around_layer = _recomputed if recompute == "full" else _called
        self._around_core = _recomputed if recompute == "selective" else _called
        self._remakes_norms = recompute == "pointwise"
        self._remakes_activation = remakes_activation

    def forward(self, x_SBH: torch.Tensor, rotary: Rotary | None, seen: Seen) -> torch.Tensor:
        """The residual stream behind the layer. The `rotary_tables` are those of the whole sequence, or of the slice."""
        return self._around_layer(self._run, x_SBH, rotary, seen)

    def _layer(self, x_SBH: torch.Tensor, rotary: Rotary | None, seen: Seen) -> torch.Tensor:
        group, deferred = self.group, self.deferred
        again = self.attention_norm.remade(x_SBH) if self._remakes_norms else None
        qkv = column_linear(self.attention_norm(x_SBH), self.qkv_weight, self.qkv_bias, group, deferred, again)
        attended = self._attention(qkv, rotary, seen)
        x_SBH = x_SBH + row_linear(attended, self.output_weight, self.output_bias, group, deferred)
        again = self.mlp_norm.remade(x_SBH) if self._remakes_norms else None
        if self.experts is not None:
            made: torch.Tensor = self.experts(self.mlp_norm(x_SBH), again)
            return x_SBH + made
        wide = column_linear(self.mlp_norm(x_SBH), self.up_weight, self.up_bias, group, deferred, again)
        again = Remade(self.activation, wide) if self._remakes_activation else None
        return x_SBH + row_linear(self.activation(wide), self.down_weight, self.down_bias, group, deferred, again)

    def _attention(self, qkv: torch.Tensor, rotary: Rotary | None, seen: Seen) -> torch.Tensor:
        """What the heads of this rank read, side by side in the last dimension."""
        qkv_SBND = qkv.view(*qkv.shape[:2], -1, self.head_dim)
        turned_SBND, value_SBND = qkv_SBND.tensor_split((self.heads + self.kv_heads,), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query_SBND, key_SBND = turned_SBND.tensor_split((self.heads,), dim=2)
            query_SBND = F.rms_norm(query_SBND, self.query_norm.shape, self.query_norm, self.epsilon)
            key_SBND = F.rms_norm(key_SBND, self.key_norm.shape, self.key_norm, self.epsilon)
            turned_SBND = torch.cat((query_SBND, key_SBND), dim=2)
        if rotary is not None:
            turned_SBND = _rotated(turned_SBND, rotary)
            if self.query_norm is None and self.context is None and not isinstance(seen, Slice):
                value_SBND = value_SBND.contiguous()  # a copy, so that the unturned query and key need not be kept with it
        query_SBND, key_SBND = turned_SBND.tensor_split((self.heads,), dim=2)
        if isinstance(seen, Slice):
            return self._read_by_slice(query_SBND, key_SBND, value_SBND, seen)
        if self.context is not None:
            return self._read_around(query_SBND, key_SBND, value_SBND)
        return self._read(query_SBND, key_SBND, value_SBND, seen)

    @eager
    def _read_around(self, query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor) -> torch.Tensor:
        # Copies, also where they are all that is kept, so that nothing else of query, key and value need be.
        query_SBND, block_2SBND = query_SBND.contiguous(), torch.stack((key_SBND, value_SBND))
        read_BNSD = self._around_core(ring_attention, query_SBND, block_2SBND, self.context)
        return read_BNSD.permute(2, 0, 1, 3).flatten(2)

    @eager
    def _read_by_slice(
        self, query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor, part: Slice
    ) -> torch.Tensor:
        query_SBND = query_SBND.contiguous()  # a copy, so that the slice's keys and values need not be kept twice
        return self._read(query_SBND, *part.attends_to(key_SBND, value_SBND), part.mask_SK)

    def _read(
        self, query_SBND: torch.Tensor, key_KBND: torch.Tensor, value_KBND: torch.Tensor, mask_SK: torch.Tensor | None
    ) -> torch.Tensor:
        query_BNSD, key_BNKD, value_BNKD = (part.permute(1, 2, 0, 3) for part in (query_SBND, key_KBND, value_KBND))
        read_BNSD = self._around_core(self._core, query_BNSD, key_BNKD, value_BNKD, mask_SK)
        return read_BNSD.permute(2, 0, 1, 3).flatten(2)

    def _core(
        self, query_BNSD: torch.Tensor, key_BNKD: torch.Tensor, value_BNKD: torch.Tensor, mask_SK: torch.Tensor | None
    ) -> torch.Tensor:
        grouped = self.kv_heads < self.heads
        masked = type(mask_SK) is torch.Tensor  # and not causal_lower_right's, which is of a class of its own
        if grouped and (not self.shares_keys or (masked and query_BNSD.is_cuda)):
            grouped = False
            times = self.heads // self.kv_heads
            key_BNKD, value_BNKD = key_BNKD.repeat_interleave(times, dim=1), value_BNKD.repeat_interleave(times, dim=1)
        return F.scaled_dot_product_attention(
            query_BNSD, key_BNKD, value_BNKD, attn_mask=mask_SK, is_causal=mask_SK is None, enable_gqa=grouped
        )


def _shares_keys(weight: torch.Tensor) -> bool:
    """Whether attention has a kernel that reads one key head for several query heads.

    On GPUs that is only the flash kernel, for half precision from compute capability 8.0 on, and under causal masks alone.
    Elsewhere `enable_gqa` would fall back to whole score matrices, while the memory-efficient kernel takes repeated keys.
    Source: torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if weight.device.type != "cuda":
        return True
    return weight.dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(weight.device) >= (8, 0)


def _called(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    return function(*arguments)


def _recomputed(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """What a function returns; its backward keeps the arguments alone and calls it again. Nothing in a layer is random."""
    result: torch.Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


class Head(nn.Module):
    """The residual stream into logits and the loss. `tied_section` holds the token embedding, where the output matrix is it."""

    def __init__(
        self,
        transformer: Transformer,
        section: Section,
        group: TensorGroup,
        tied_section: Section | None = None,
        deferred: DeferredWeights | None = None,
    ) -> None:
        super().__init__()
        self.group, self.deferred = group, deferred
        name = "head.output.weight" if tied_section is None else "embedding.tokens.weight"
        holder = section if tied_section is None else tied_section
        self.norm = Norm(transformer, section, "head.norm") if transformer.final_norm else None
        self.weight_VH = holder.parameter(name)
        self.start_row = _first_row(holder, name)
        self.columns = max(0, min(self.weight_VH.shape[0], transformer.vocab - self.start_row))
        """Those that the padding of the vocabulary leaves."""

    def logits(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """logits_SBV: of the whole sequence, over this rank's rows of the vocabulary without its padding."""
        if self.norm is not None:
            x_SBH = self.norm(x_SBH)
        return column_linear(x_SBH, self.weight_VH, None, self.group, self.deferred)[..., : self.columns]

    def forward(self, x_SBH: torch.Tensor, labels_SB: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of the labels, of the whole sequence, summed over the tokens."""
        return cross_entropy_sum(self.logits(x_SBH), labels_SB, self.start_row, self.group)


# --- A part of the model ---------------------------------------------------------------------------------------------


class ModelPart(nn.Module):
    """Some consecutive layers of the model on one rank, with the embedding before them or the head behind them where asked.

    `sections` holds the parameters by layer range: (0, 0) the embedding (also for the head of a tied model), (n, n) the head,
    and ranges that together cover `layers`. `recompute` has one mode per layer. Of `sequence_slices` the forwards come in order,
    micro-batch by micro-batch, and the backwards of a micro-batch from its last slice to its first. Of a `context` tokens, labels
    and the stream are those of its rank. Raises InputError for what cannot be computed.
    """

    def __init__(
        self,
        transformer: Transformer,
        layers: LayerRange,
        sections: Mapping[LayerRange, Section],
        group: TensorGroup,
        embedding: bool,
        head: bool,
        recompute: Sequence[str],
        compile_layers: bool = False,
        deferred: DeferredWeights | None = None,
        sequence_slices: int = 1,
        context: ContextGroup | None = None,
        expert_group: ExpertGroup | None = None,
    ) -> None:
        super().__init__()
        t, numbers = transformer, range(*layers)
        if t.position == "rotary" and t.head_dim % 2:
            raise InputError(f"rotary positions need an even width of a head, but {t.name} has head_dim {t.head_dim}")
        self.transformer, self.group, self.context = transformer, group, context
        self.embedding = Embedding(t, sections[0, 0], group, context) if embedding else None
        self.layers = nn.ModuleList(
            Layer(t, _section_of(sections, number), number, group, mode, compile_layers, deferred, context, expert_group)
            for number, mode in zip(numbers, recompute, strict=True)
        )
        tied = sections[0, 0] if head and t.tied_embeddings else None
        self.head = Head(t, sections[t.layers, t.layers], group, tied, deferred) if head else None
        self._slices = sequence_slices
        self._attended: list[Attended] = []
        """By layer, of the micro-batch whose slices come now. Afterwards its graphs alone hold them."""
        self._tables: dict[tuple[int, int, torch.device, torch.dtype], tuple[Rotary | None, torch.Tensor | None]] = {}

    @property
    def has_head(self) -> bool:
        """Whether it ends with the loss."""
        return self.head is not None

    def forward(self, x: torch.Tensor, labels_SB: torch.Tensor | None = None, place: int = 0) -> torch.Tensor:
        """The residual stream behind the part, or, with a head, the cross-entropy of the labels summed over the tokens.

        `x` is tokens_SB where the part has the embedding, else x_SBH. Tokens and labels are of the whole sequence, or of its
        slice at a place.
        """
        x_SBH = self._stream(x, place)
        if self.head is None:
            return x_SBH
        if labels_SB is None:
            raise ValueError("a part with a head computes the loss, and needs the labels for it")
        loss: torch.Tensor = self.head(x_SBH, labels_SB)
        return loss

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits_SBV of a part with a head: `Head.logits` behind its layers."""
        assert self.head is not None
        logits_SBV: torch.Tensor = self.head.logits(self._stream(x))
        return logits_SBV

    def _stream(self, x: torch.Tensor, place: int = 0) -> torch.Tensor:
        """x_SBH behind the last layer."""
        x_SBH: torch.Tensor = x if self.embedding is None else self.embedding(x, place)
        rotary, mask_SK = self._positions(x_SBH, place)
        for layer, seen in zip(self.layers, self._seen(place, mask_SK), strict=True):
            x_SBH = layer(x_SBH, rotary, seen)
        return x_SBH

    def _seen(self, place: int, mask_SK: torch.Tensor | None) -> Sequence[Seen]:
        """What each layer's tokens see: by the mask, of whole sequences or of their slice at a place."""
        if self._slices == 1:
            return [mask_SK] * len(self.layers)
        if place == 0:
            self._attended = [Attended(self._slices, self.transformer.sliding_window) for _ in self.layers]
        parts = [Slice(place, attended, mask_SK) for attended in self._attended]
        if place == self._slices - 1:
            self._attended = []
        return parts

    def _positions(self, x_SBH: torch.Tensor, place: int = 0) -> tuple[Rotary | None, torch.Tensor | None]:
        """The rotary tables and the mask that all layers share, made once for a length and a place."""
        length = x_SBH.shape[0] * (self.group.degree if self.group.scatters else 1)
        key = length, place, x_SBH.device, x_SBH.dtype
        if key not in self._tables:
            t, alike = self.transformer, (x_SBH.device, x_SBH.dtype)
            here = place_stretches(length, place, self.context)
            rotary = rotary_tables(t, here, *alike) if t.position == "rotary" else None
            mask_SK = None
            if self.context is None:  # whose ring knows what its ranks see
                start = place * length
                mask_SK = attention_mask(length, start - earliest_key(start, t.sliding_window), t.sliding_window, *alike)
            self._tables[key] = rotary, mask_SK
        return self._tables[key]


def _section_of(sections: Mapping[LayerRange, Section], layer: int) -> Section:
    """The section that holds a layer."""
    return next(section for (start, stop), section in sections.items() if start <= layer < stop)
