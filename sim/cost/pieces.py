"""Seconds of the pieces of a model on one GPU: a layer, the embedding, the head.

The seconds of a piece on one rank of a tensor-parallel group are a sum over its kernels:

    matmul       (FLOP / peak + matmul_half_s) / matmul_fraction + matmul_traffic x bytes / bandwidth
    attention    FLOP / (peak x attention_fraction), or its bytes / (bandwidth x memory_fraction) where these take longer; and
                 the FLOP of attention_rows query rows at the same rate, however few rows there are; longer where heads are
                 narrower than WIDE_HEAD, as if each score had attention_width numbers more
    the rest     bytes / (bandwidth x memory_fraction)
    each kernel  launch_s besides

and the weight half of the backward moves gradient_bytes per parameter besides, to sum the gradients. The bytes of a matmul are
those of its operands and its result, each once; matmul_traffic is the part of their seconds that does not hide behind the FLOP.
All of it is divided by the speed of the device.
In fp32 the fraction is fp32_fraction. Flash attention executes, for each query, the keys that the causal mask leaves and
attention_keys more; without it the scores of all keys are two matmuls more, and pass through memory as
`sim.spec.counts.attention_memory_bytes` counts; where Megatron's fused softmax does not take them, several times more.

The backward pass has two matmuls for each of the forward pass, the gradient of the input and that of the weights: the same
three matrices in other roles, so as many FLOP and bytes. Its flash attention takes FLASH_BACKWARD times as long, that without
flash twice the matmuls; the rest moves BACKWARD_TRAFFIC times the bytes in twice the kernels. The input half has the attention,
the rest and one of each two matmuls, the weight half the other. With context parallelism a rank has an equal part of every
sequence's tokens, cut so that the causal mask leaves all ranks equally many FLOP. The tokens of a slice of a sequence attend to
those of the slices before it, too.

The software stack multiplies the rates of matmuls, of those that tensor cores do not take as they lie, and of attention, flash or
not, by its scales, and the bytes of the rest by its memory traffic, which may be another for what tensor parallelism divides, for
the way to experts and back, and in the backward; its kernels may each take some seconds more. The products of all experts of a
layer are one kernel.
Left out: the gradients' norm, the quantisation of operands below 16 bits, the all-reduce of the norms' gradients under sequence
parallelism.
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
    embedding_parameters_at,
    head_matmuls,
    head_parameters_at,
    key_value_bytes,
    layer_forward_flop,
    layer_kernels,
    layer_matmuls,
    layer_memory_bytes,
    layer_parameters_at,
    layer_pointwise_bytes,
    layer_pointwise_kernels,
    layer_pointwise_sharded_bytes,
    layer_routing_bytes,
    layer_sharded_bytes,
    tied_copy_parameters_at,
    unfused_scores,
)
from sim.spec.gpu import WIDE_HEAD, GpuKind
from sim.spec.reading import InputError
from sim.spec.stack import Stack
from sim.spec.transformer import Transformer

FLASH_BACKWARD = 3.0
"""Seconds of flash attention's backward pass per second of its forward pass: five matmuls for two, at 0.83 of the rate.

Source: Dao (2023), arXiv:2307.08691, section 4.1; the 24 pairs of forward and backward on A100 that SimuMax measured."""

BACKWARD_TRAFFIC = 1.5
"""Bytes that the backward pass of memory-bound kernels moves per byte of their forward pass: a norm, a softmax and an activation
read the gradient besides (3 for 2, 3 for 2, 5 for 3 in swiglu), a residual addition and a rotary position move as many."""

UNFUSED_SOFTMAX = {2: (6 + 8 + 9 + 8 + 6 - 4, 4), 4: (8 + 9, 2)}
"""By the bytes of a score: what a softmax that is not fused moves of each beyond a fused one, and how many kernels more it has.

Scores are cast to fp32, scaled, masked (of one byte), normalised and cast back, each by a kernel that reads and writes them; in
fp32 they are not cast. Source: Megatron-LM, megatron/model/fused_softmax.py, `forward_torch_softmax`."""

FEWER_BITS = ("fp8", "mxfp8", "nvfp4")
"""Precisions of the layers' matmuls only: attention, embedding and head are in 16 bits."""


@dataclass(frozen=True, slots=True)
class PieceSeconds:
    """Seconds of a GPU for one layer, embedding or head and one share of a micro-batch, without communication."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    attention_s: float = 0.0
    """The part of the forward pass that selective recompute repeats."""
    pointwise_s: float = 0.0
    """The part of the forward pass that pointwise recompute repeats."""
    attention_backward_s: float = 0.0
    """The part of the backward pass's input half that is attention's."""
    forward_kernels: int = 0
    backward_input_kernels: int = 0
    backward_weight_kernels: int = 0
    attention_kernels: int = 0
    pointwise_kernels: int = 0
    """How many kernels the host launches in each."""

    @property
    def backward_s(self) -> float:
        """Both halves of the backward pass."""
        return self.backward_input_s + self.backward_weight_s


def slowest(pieces: Sequence[PieceSeconds]) -> PieceSeconds:
    """What one piece takes on a tensor-parallel group whose ranks take `pieces`: they wait for each other in every layer."""
    if len(pieces) == 1:
        return pieces[0]
    return PieceSeconds(*(max(getattr(piece, field.name) for piece in pieces) for field in fields(PieceSeconds)))


# --- Work ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MatmulWork:
    """What some matmuls do, one after another."""

    count: int
    flop: int
    num_bytes: int
    """Of their operands and results, each read or written once."""
    unaligned_flop: int = 0
    """Of this FLOP, those of matrices that tensor cores do not take as they lie."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What the attention of one layer does on one rank, forward."""

    flop: float
    """A flash kernel leaves out what the causal mask hides."""
    key_flop: float
    """Of one key more for every query."""
    rows: int
    """Query rows: tokens times heads."""
    width: int
    """Numbers of a head."""
    num_bytes: int
    flash: bool
    unfused_bytes: int = 0
    """Of the kernels that take the place of Megatron's fused softmax, beyond what that one moves."""
    unfused_kernels: int = 0
    """How many these are more."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one rank does in one layer's forward pass."""

    matmuls: MatmulWork
    attention: AttentionWork
    memory_bytes: int
    """Of the kernels that memory bounds."""
    sharded_bytes: int
    """Of these bytes, those between matmuls that tensor parallelism divides."""
    routing_bytes: int
    """Of these bytes, those that send tokens to experts and back."""
    memory_kernels: int
    pointwise_bytes: int
    pointwise_sharded_bytes: int
    pointwise_kernels: int
    """Of all of these, what pointwise recompute repeats."""
    parameters: int
    """That it has the gradients of."""


def matmul_work(matmuls: Iterable[Matmul], element_bytes: int) -> MatmulWork:
    """What these matmuls do, with matrices of `element_bytes` per element."""
    count = flop = unaligned = elements = 0
    for matmul in matmuls:
        count += matmul.kernels
        flop += matmul.flop
        unaligned += 0 if matmul.aligned(element_bytes) else matmul.flop
        elements += matmul.count * (matmul.m * matmul.k + matmul.k * matmul.n + matmul.m * matmul.n)
    return MatmulWork(count, flop, elements * element_bytes, unaligned)


@lru_cache(maxsize=65536)
def layer_work(
    transformer: Transformer,
    sequences: int,
    sequence_length: int,
    tensor_parallel: int,
    sequence_parallel: bool,
    element_bytes: int,
    flash_attention: bool,
    context_parallel: int,
    expert_parallel: int,
    whole_experts: bool = False,
    tokens_before: int = 0,
    fuses_some_softmax: bool = False,
) -> LayerWork:
    """What one rank does in one layer's forward pass; it has `sequences * sequence_length / context_parallel` tokens.

    They are the last ones of sequences with so many `tokens_before`, whose keys and values are there.
    """
    tokens = -(-sequences * sequence_length // context_parallel)
    matmuls = layer_matmuls(transformer, tokens, tensor_parallel, expert_parallel, whole_experts)
    sent = -(-tokens // tensor_parallel) if whole_experts else tokens
    heads = -(-transformer.heads // tensor_parallel)
    end = tokens_before + sequence_length
    window = transformer.sliding_window or end
    flop = layer_forward_flop(transformer, tokens, sequence_length).attention * heads / transformer.heads
    key_flop = flop / min(sequence_length, window)
    # Of a query the keys that the causal mask leaves: on average over all tokens up to its slice's end, less those before it.
    attended = (_attended_keys(end, window) - _attended_keys(tokens_before, window)) / sequence_length
    num_bytes = attention_memory_bytes(transformer, tokens, end, tensor_parallel, element_bytes, flash_attention)
    earlier = min(tokens_before, window)
    scores = 0
    if fuses_some_softmax:
        scores = unfused_scores(transformer, sequences, tokens // sequences, end, tensor_parallel, element_bytes)
    of_score, unfused_kernels = UNFUSED_SOFTMAX[element_bytes]
    attention = AttentionWork(
        flop=key_flop * (attended if flash_attention else min(end, window)),
        key_flop=key_flop,
        rows=tokens * heads,
        width=transformer.head_dim,
        num_bytes=num_bytes + key_value_bytes(transformer, sequences, earlier, tensor_parallel, element_bytes),
        flash=flash_attention,
        unfused_bytes=scores * of_score,
        unfused_kernels=unfused_kernels if scores else 0,
    )
    work = matmul_work(matmuls, element_bytes)
    return LayerWork(
        matmuls=work,
        attention=attention,
        memory_bytes=layer_memory_bytes(transformer, tokens, tensor_parallel, sequence_parallel, element_bytes, whole_experts),
        sharded_bytes=layer_sharded_bytes(transformer, tokens, tensor_parallel, element_bytes),
        routing_bytes=layer_routing_bytes(transformer, sent, element_bytes),
        memory_kernels=layer_kernels(transformer, expert_parallel) - work.count - 1,
        pointwise_bytes=layer_pointwise_bytes(transformer, tokens, tensor_parallel, sequence_parallel, element_bytes),
        pointwise_sharded_bytes=layer_pointwise_sharded_bytes(transformer, tokens, tensor_parallel, element_bytes),
        pointwise_kernels=layer_pointwise_kernels(transformer, expert_parallel),
        parameters=layer_parameters_at(transformer, tensor_parallel, expert_parallel, whole_experts),
    )


def _attended_keys(tokens: int, window: int) -> float:
    """How many keys the first tokens of a sequence attend to, all together, under a causal mask of this window."""
    return tokens * tokens / 2 if tokens <= window else window * tokens - window * window / 2


# --- Rates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """What a kind reaches at a precision. Attention and head run in bf16 where the precision of the layers' matmuls is lower."""

    kind: GpuKind
    matmul_peak: float
    other_peak: float
    attention_peak: float
    """Of flash attention, whose kernels are of 16 bits. In 4 bytes torch's memory-efficient one takes its place, which reaches
    half the peak of fp32, whatever that of tf32: on an H200 33 TFLOP/s, and 39 forward where matmuls may be in tf32."""
    matmul_fraction: float

    def matmul_s(self, work: MatmulWork, peak: float, unaligned_scale: float = 1.0) -> float:
        """Seconds of some matmuls, one after another, launches not included."""
        efficiency = self.kind.efficiency
        flop = work.flop + work.unaligned_flop * (1 / unaligned_scale - 1)
        flop_s = (flop / peak + work.count * efficiency.matmul_half_s) / self.matmul_fraction
        bytes_s = efficiency.matmul_traffic * work.num_bytes / self.kind.memory_bandwidth_bytes_per_s
        return (flop_s + bytes_s) / self.kind.speed

    def flash_s(self, work: AttentionWork) -> tuple[float, float]:
        """Seconds of flash attention, forward and backward, launches not included."""
        efficiency = self.kind.efficiency
        flop = (work.flop + efficiency.attention_keys * work.key_flop) * _narrowness(work.width, efficiency.attention_width)
        flop_s = flop / (self.attention_peak * efficiency.attention_fraction * self.kind.speed)
        bytes_s, rows_s = self.memory_s(work.num_bytes), flop_s * efficiency.attention_rows / work.rows
        return max(flop_s, bytes_s) + rows_s, max(FLASH_BACKWARD * flop_s, 2 * bytes_s) + rows_s

    def memory_s(self, num_bytes: float) -> float:
        """Seconds of kernels that memory bandwidth bounds."""
        return num_bytes / (self.kind.memory_bandwidth_bytes_per_s * self.kind.efficiency.memory_fraction * self.kind.speed)

    @property
    def launch_s(self) -> float:
        """Seconds by which each kernel lengthens the GPU's work."""
        return self.kind.efficiency.launch_s / self.kind.speed


def _narrowness(width: int, more: float) -> float:
    """How many times as long as in a wide head a FLOP of flash attention takes, if a head of so many numbers costs some more."""
    return (1 + more / min(width, WIDE_HEAD)) / (1 + more / WIDE_HEAD)


def _matmul_s(work: MatmulWork, rates: Rates, peak: float, stack: Stack) -> float:
    """Seconds of some matmuls with weights under a software stack, launches included."""
    seconds = rates.matmul_s(work, peak, stack.unaligned_scale) / stack.matmul_scale
    return seconds + work.count * (rates.launch_s + stack.kernel_s)


@lru_cache(maxsize=1024)
def rates_of(kind: GpuKind, precision: str) -> Rates:
    """What the kind reaches at a precision. Raises InputError where it lacks the precision."""
    peak = kind.peak(precision)
    if peak is None:
        raise InputError(f"{kind.name} has no {precision}; it has {', '.join(kind.peak_flop_per_s)}")
    other_peak = (kind.peak("bf16") or kind.peak("fp16") or peak) if precision in FEWER_BITS else peak
    attention_peak = kind.peak("fp32") or other_peak if PRECISION_BYTES[precision] == 4 else other_peak
    efficiency = kind.efficiency
    return Rates(
        kind, peak, other_peak, attention_peak, efficiency.fp32_fraction if precision == "fp32" else efficiency.matmul_fraction
    )


# --- Seconds ---------------------------------------------------------------------------------------------------------


def seconds_of_layer(work: LayerWork, rates: Rates, stack: Stack) -> PieceSeconds:
    """Seconds of one layer's work at the rates of a kind under a software stack."""
    launch_s = rates.launch_s + stack.kernel_s
    matmuls, attention, backward_traffic = work.matmuls, work.attention, BACKWARD_TRAFFIC * stack.backward_traffic
    matmul_s = _matmul_s(matmuls, rates, rates.matmul_peak, stack)
    if attention.flash:
        kernels = 1
        attention_s, backward_s = (seconds / stack.attention_scale for seconds in rates.flash_s(attention))
    else:
        # Two matmuls, whose bytes are counted with the scores, and the softmax between them.
        kernels = 3 + attention.unfused_kernels
        scores = MatmulWork(2, round(attention.flop), 0)
        products_s = rates.matmul_s(scores, rates.other_peak) / stack.attention_scale
        # The scale is what is lost by moving scores through kernels made for them; a cast or a mask is like any other kernel.
        traffic_s = rates.memory_s(attention.num_bytes) / stack.attention_scale + rates.memory_s(attention.unfused_bytes)
        attention_s, backward_s = products_s + traffic_s, 2 * products_s + backward_traffic * traffic_s
    rest_s = rates.memory_s(stack.moved_bytes(work.memory_bytes, work.sharded_bytes, work.routing_bytes))
    others = work.memory_kernels + kernels
    attention_s += kernels * launch_s
    forward_s = matmul_s + attention_s + rest_s + work.memory_kernels * launch_s
    input_s = matmul_s + backward_s + backward_traffic * rest_s + 2 * others * launch_s
    return PieceSeconds(
        forward_s=forward_s,
        backward_input_s=input_s,
        backward_weight_s=matmul_s + rates.memory_s(work.parameters * stack.gradient_bytes),
        attention_s=attention_s,
        pointwise_s=rates.memory_s(stack.moved_bytes(work.pointwise_bytes, work.pointwise_sharded_bytes))
        + work.pointwise_kernels * launch_s,
        attention_backward_s=backward_s + 2 * kernels * launch_s,
        forward_kernels=matmuls.count + others,
        backward_input_kernels=matmuls.count + 2 * others,
        backward_weight_kernels=matmuls.count,
        attention_kernels=kernels,
        pointwise_kernels=work.pointwise_kernels,
    )


@lru_cache(maxsize=65536)
def layer_seconds(
    kind: GpuKind,
    stack: Stack,
    transformer: Transformer,
    sequences: int,
    sequence_length: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    precision: str = "bf16",
    context_parallel: int = 1,
    expert_parallel: int = 1,
    whole_experts: bool = False,
    tokens_before: int = 0,
) -> PieceSeconds:
    """Seconds of one layer, with attention to so many tokens before the sequences'. Raises InputError where the kind lacks the
    precision."""
    work = layer_work(
        transformer,
        sequences,
        sequence_length,
        tensor_parallel,
        sequence_parallel,
        PRECISION_BYTES[precision],
        stack.flash_attention,
        context_parallel,
        expert_parallel,
        whole_experts,
        tokens_before,
        stack.fuses_some_softmax,
    )
    return seconds_of_layer(work, rates_of(kind, precision), stack)


@lru_cache(maxsize=65536)
def embedding_seconds(
    kind: GpuKind,
    stack: Stack,
    transformer: Transformer,
    sequences: int,
    sequence_length: int,
    tensor_parallel: int = 1,
    precision: str = "bf16",
    context_parallel: int = 1,
) -> PieceSeconds:
    """Seconds of the embedding: a row read and written per token (learned positions: two read), and the projection if any.

    Every tensor-parallel rank looks up all tokens, whichever rows it has. Its backward is all in the weight half, but for the
    projection's. Raises InputError where the kind lacks the precision.
    """
    rates, element_bytes = rates_of(kind, precision), PRECISION_BYTES[precision]
    tokens = -(-sequences * sequence_length // context_parallel)
    launch_s = rates.launch_s + stack.kernel_s
    matmuls = matmul_work(embedding_matmuls(transformer, tokens), element_bytes)
    matmul_s = _matmul_s(matmuls, rates, rates.other_peak, stack)
    learned = transformer.position == "learned"
    elements, kernels = 2 * transformer.embedding_width + (3 * transformer.hidden if learned else 0), 2 if learned else 1
    rest_s = rates.memory_s(tokens * elements * element_bytes * stack.memory_traffic)
    sum_s = rates.memory_s(embedding_parameters_at(transformer, tensor_parallel) * stack.gradient_bytes)
    return PieceSeconds(
        forward_s=matmul_s + rest_s + kernels * launch_s,
        backward_input_s=matmul_s,
        backward_weight_s=matmul_s + BACKWARD_TRAFFIC * stack.backward_traffic * rest_s + 2 * kernels * launch_s + sum_s,
        forward_kernels=matmuls.count + kernels,
        backward_input_kernels=matmuls.count,
        backward_weight_kernels=matmuls.count + 2 * kernels,
    )


@lru_cache(maxsize=65536)
def head_seconds(
    kind: GpuKind,
    stack: Stack,
    transformer: Transformer,
    sequences: int,
    sequence_length: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    precision: str = "bf16",
    context_parallel: int = 1,
) -> PieceSeconds:
    """Seconds of the head: final norm, output matmul (projection too, if any), and cross-entropy over the logits.

    The cross-entropy reads each logit in fp32 and writes its softmax, after a cast where the training precision is lower;
    its backward turns the softmax into the gradient and casts it back, as many bytes. Raises InputError where the kind lacks
    the precision.
    """
    rates, element_bytes = rates_of(kind, precision), PRECISION_BYTES[precision]
    tokens = -(-sequences * sequence_length // context_parallel)
    launch_s = rates.launch_s + stack.kernel_s
    matmuls = matmul_work(head_matmuls(transformer, tokens, tensor_parallel), element_bytes)
    matmul_s = _matmul_s(matmuls, rates, rates.other_peak, stack)
    casts = element_bytes < 4
    per_logit, loss_kernels = 4 + 4 + (element_bytes + 4 if casts else 0), 1 + casts
    logits = tokens * -(-transformer.padded_vocab // tensor_parallel)
    moved_s = rates.memory_s(logits * per_logit * stack.loss_traffic)
    loss_s, loss_back_s = (moved_s * traffic + loss_kernels * launch_s for traffic in (1.0, stack.backward_traffic))
    norm_s, norm_kernels = 0.0, 0
    if transformer.final_norm:
        divided = tensor_parallel if sequence_parallel else 1
        norm_bytes = 2 * tokens * transformer.hidden * element_bytes / divided
        norm_s, norm_kernels = rates.memory_s(norm_bytes * stack.memory_traffic), 1
    kernels = matmuls.count + loss_kernels + norm_kernels
    norm_back_s = BACKWARD_TRAFFIC * stack.backward_traffic * norm_s + 2 * norm_kernels * launch_s
    parameters = head_parameters_at(transformer, tensor_parallel) + tied_copy_parameters_at(transformer, tensor_parallel)
    return PieceSeconds(
        forward_s=matmul_s + loss_s + norm_s + norm_kernels * launch_s,
        backward_input_s=matmul_s + loss_back_s + norm_back_s,
        backward_weight_s=matmul_s + rates.memory_s(parameters * stack.gradient_bytes),
        forward_kernels=kernels,
        backward_input_kernels=kernels + norm_kernels,
        backward_weight_kernels=matmuls.count,
    )
