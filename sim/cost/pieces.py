"""Seconds of the pieces of a model on one GPU: a layer, the embedding, the head.

The seconds of a piece on one rank of a tensor-parallel group are a sum over its kernels:

    matmul       (FLOP / peak + matmul_half_s) / matmul_fraction
    attention    FLOP / (peak x attention_fraction), or its bytes / (bandwidth x memory_fraction) where these take longer
    the rest     bytes / (bandwidth x memory_fraction)
    each kernel  launch_s besides

The backward pass has two matmuls for each of the forward pass, the gradient of the input and that of the weights; moves twice
the bytes; launches twice the kernels; and flash attention takes 2.5 times its forward FLOP, since it recomputes the scores
(Dao, 2023, arXiv:2307.08691, section 4.1). The input half has the attention, the rest and one of each two matmuls, the weight
half the other. Left out: the sum of weight gradients over micro-batches (part of the matmul, where it is fused), the
gradients' norm, the quantisation of operands below 16 bits, the all-reduce of the norms' gradients under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from sim.spec.counts import (
    PRECISION_BYTES,
    Matmul,
    attention_memory_bytes,
    embedding_matmuls,
    head_matmuls,
    layer_forward_flop,
    layer_kernels,
    layer_matmuls,
    layer_memory_bytes,
)
from sim.spec.gpu import GpuKind
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

FLASH_BACKWARD = 2.5
"""FLOP of flash attention's backward pass per FLOP of its forward pass: five matmuls for two."""


@dataclass(frozen=True, slots=True)
class PieceSeconds:
    """Seconds of one layer, embedding or head for one share of a micro-batch, without communication."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    attention_s: float = 0.0
    """The part of the forward pass that selective recompute repeats."""

    @property
    def backward_s(self) -> float:
        """Both halves of the backward pass."""
        return self.backward_input_s + self.backward_weight_s


def slowest(pieces: Sequence[PieceSeconds]) -> PieceSeconds:
    """What one piece takes on a tensor-parallel group whose ranks take `pieces`: they wait for each other in every layer."""
    if len(pieces) == 1:
        return pieces[0]
    return PieceSeconds(*(max(getattr(piece, field.name) for piece in pieces) for field in fields(PieceSeconds)))


@dataclass(frozen=True)
class Rates:
    """What a kind reaches at a precision. Attention and head run in bf16 where the precision of the layers' matmuls is lower."""

    kind: GpuKind
    matmul_peak: float
    other_peak: float

    def matmuls_s(self, matmuls: Iterable[Matmul], peak: float) -> float:
        """Seconds of some matmuls, one after another."""
        efficiency = self.kind.efficiency
        return sum(m.flop / peak + m.count * efficiency.matmul_half_s for m in matmuls) / efficiency.matmul_fraction

    def memory_s(self, num_bytes: float) -> float:
        """Seconds of kernels that memory bandwidth bounds."""
        return num_bytes / (self.kind.memory_bandwidth_bytes_per_s * self.kind.efficiency.memory_fraction)


@lru_cache(maxsize=1024)
def rates_of(kind: GpuKind, precision: str) -> Rates:
    peak = kind.peak(precision)
    if peak is None:
        raise InputError(f"{kind.name} has no {precision}; it has {', '.join(kind.peak_flop_per_s)}")
    below_16_bits = precision in ("fp8", "mxfp8", "nvfp4")
    return Rates(kind, peak, (kind.peak("bf16") or kind.peak("fp16") or peak) if below_16_bits else peak)


@lru_cache(maxsize=65536)
def layer_seconds(
    kind: GpuKind,
    transformer: Transformer,
    sequences: int,
    sequence_length: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    precision: str = "bf16",
) -> PieceSeconds:
    """Seconds of one layer. Raises InputError where the kind lacks the precision.

    Attention executes the FLOP that a causal mask leaves: of the seen keys, 1 - seen / (2 x sequence length).
    """
    rates, tokens, element_bytes = rates_of(kind, precision), sequences * sequence_length, PRECISION_BYTES[precision]
    efficiency = kind.efficiency
    matmuls = layer_matmuls(transformer, tokens, tensor_parallel)
    matmul_kernels = sum(matmul.count for matmul in matmuls)
    matmul_s = rates.matmuls_s(matmuls, rates.matmul_peak) + matmul_kernels * efficiency.launch_s

    heads = -(-transformer.heads // tensor_parallel)
    seen = min(sequence_length, transformer.sliding_window or sequence_length)
    flop = layer_forward_flop(transformer, tokens, sequence_length).attention * heads / transformer.heads
    flop *= 1 - seen / (2 * sequence_length)
    flop_s = flop / (rates.other_peak * efficiency.attention_fraction)
    bytes_s = rates.memory_s(attention_memory_bytes(transformer, tokens, sequence_length, tensor_parallel, element_bytes))
    attention_s = max(flop_s, bytes_s) + efficiency.launch_s
    attention_backward_s = max(FLASH_BACKWARD * flop_s, 2 * bytes_s) + 2 * efficiency.launch_s

    rest = layer_memory_bytes(transformer, tokens, tensor_parallel, sequence_parallel, element_bytes)
    rest_kernels = layer_kernels(transformer) - matmul_kernels - 1
    rest_s = rates.memory_s(rest) + rest_kernels * efficiency.launch_s
    return PieceSeconds(
        forward_s=matmul_s + attention_s + rest_s,
        backward_input_s=matmul_s + attention_backward_s + 2 * rest_s,
        backward_weight_s=matmul_s,
        attention_s=attention_s,
    )


@lru_cache(maxsize=65536)
def embedding_seconds(
    kind: GpuKind, transformer: Transformer, sequences: int, sequence_length: int, precision: str = "bf16"
) -> PieceSeconds:
    """Seconds of the embedding: a row read and written per token (learned positions: two read), and the projection if any.

    Every tensor-parallel rank looks up all tokens, whichever rows it has. Its backward is all in the weight half, but for the
    projection's. Raises InputError where the kind lacks the precision.
    """
    rates, tokens, element_bytes = rates_of(kind, precision), sequences * sequence_length, PRECISION_BYTES[precision]
    launch_s = kind.efficiency.launch_s
    matmuls = embedding_matmuls(transformer, tokens)
    matmul_s = rates.matmuls_s(matmuls, rates.other_peak) + len(matmuls) * launch_s
    learned = transformer.position == "learned"
    elements = 2 * transformer.embedding_width + (3 * transformer.hidden if learned else 0)
    rest_s = rates.memory_s(tokens * elements * element_bytes) + (2 if learned else 1) * launch_s
    return PieceSeconds(matmul_s + rest_s, matmul_s, matmul_s + 2 * rest_s)


@lru_cache(maxsize=65536)
def head_seconds(
    kind: GpuKind,
    transformer: Transformer,
    sequences: int,
    sequence_length: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    precision: str = "bf16",
) -> PieceSeconds:
    """Seconds of the head: final norm, output matmul (projection too, if any), and cross-entropy over the logits.

    The cross-entropy reads each logit in fp32 and writes its softmax, after a cast where the training precision is lower;
    its backward turns the softmax into the gradient and casts it back, as many bytes. Raises InputError where the kind lacks
    the precision.
    """
    rates, tokens, element_bytes = rates_of(kind, precision), sequences * sequence_length, PRECISION_BYTES[precision]
    launch_s = kind.efficiency.launch_s
    matmuls = head_matmuls(transformer, tokens, tensor_parallel)
    matmul_s = rates.matmuls_s(matmuls, rates.other_peak) + len(matmuls) * launch_s
    casts = element_bytes < 4
    per_logit = 4 + 4 + (element_bytes + 4 if casts else 0)
    loss_s = rates.memory_s(tokens * -(-transformer.padded_vocab // tensor_parallel) * per_logit) + (1 + casts) * launch_s
    norm_s = 0.0
    if transformer.final_norm:
        divided = tensor_parallel if sequence_parallel else 1
        norm_s = rates.memory_s(2 * tokens * transformer.hidden * element_bytes / divided) + launch_s
    return PieceSeconds(matmul_s + loss_s + norm_s, matmul_s + loss_s + 2 * norm_s, matmul_s)
