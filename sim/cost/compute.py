"""Seconds of computation of one instruction on one lane, and the tensor-parallel collectives inside it.

A piece is a layer, the embedding or the head. Its seconds on one rank are a sum over its kernels:

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

from sim.cost.memory import OPTIMIZER_STATES, Holders, count_holders
from sim.spec.cluster import Cluster
from sim.spec.counts import (
    PRECISION_BYTES,
    Matmul,
    attention_memory_bytes,
    boundary_bytes,
    embedding_matmuls,
    embedding_parameters_at,
    head_matmuls,
    head_parameters_at,
    layer_forward_flop,
    layer_kernels,
    layer_matmuls,
    layer_memory_bytes,
    layer_parameters_at,
    tied_copy_parameters_at,
)
from sim.spec.gpu import GpuKind
from sim.spec.plan import LayerRange, Plan
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Compute, Forward, Lane, OptimizerStep
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

FLASH_BACKWARD = 2.5
"""FLOP of flash attention's backward pass per FLOP of its forward pass: five matmuls for two."""

# --- Pieces ----------------------------------------------------------------------------------------------------------


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
class _Rates:
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
def _rates(kind: GpuKind, precision: str) -> _Rates:
    peak = kind.peak(precision)
    if peak is None:
        raise InputError(f"{kind.name} has no {precision}; it has {', '.join(kind.peak_flop_per_s)}")
    below_16_bits = precision in ("fp8", "mxfp8", "nvfp4")
    return _Rates(kind, peak, (kind.peak("bf16") or kind.peak("fp16") or peak) if below_16_bits else peak)


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
    rates, tokens, element_bytes = _rates(kind, precision), sequences * sequence_length, PRECISION_BYTES[precision]
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
    rates, tokens, element_bytes = _rates(kind, precision), sequences * sequence_length, PRECISION_BYTES[precision]
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
    rates, tokens, element_bytes = _rates(kind, precision), sequences * sequence_length, PRECISION_BYTES[precision]
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


def optimizer_bytes(precision: str, gradient_precision: str, optimizer: str) -> int:
    """Bytes that the optimizer step reads and writes per parameter.

    Reads the gradient (4 in fp32, 2 in bf16); reads and writes the states (8 each, AdamW has two, SGD one) and the fp32 copy
    of the parameter (8); writes the parameter in the training precision. Where that is fp32, there is no copy and the
    parameter is read, too.
    """
    element_bytes = PRECISION_BYTES[precision]
    parameter = 8 if element_bytes == 4 else 8 + element_bytes
    return PRECISION_BYTES[gradient_precision] + 8 * OPTIMIZER_STATES[optimizer] + parameter


# --- Collectives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorCollective:
    """`count` collectives, one after another, over the devices of a lane. `num_bytes` is the size of the whole tensor."""

    kind: str
    """all_reduce, all_gather or reduce_scatter."""
    num_bytes: float
    count: int


_Tally = dict[tuple[str, float], int]


def _add(tally: _Tally, kind: str, num_bytes: float, count: int) -> None:
    if count:
        tally[kind, num_bytes] = tally.get((kind, num_bytes), 0) + count


# --- The plan's lanes ------------------------------------------------------------------------------------------------


class ComputeCost:
    """The seconds and tensor-parallel collectives of a plan's instructions on a cluster.

    Answers are kept by lane and layers, so that asking again for another micro-batch is one look-up. The pieces are kept over
    all plans, so that the next plan of the same job finds them.
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self._seconds: dict[object, float] = {}
        self._collectives: dict[object, tuple[TensorCollective, ...]] = {}
        self._pieces: dict[str, tuple[PieceSeconds, PieceSeconds, PieceSeconds]] = {}
        self._holders: Holders | None = None

    def seconds(self, lane: Lane, instruction: Compute | OptimizerStep) -> float:
        """Seconds of computation of one instruction of a lane, without communication. The slowest of its devices decides.

        Raises TypeError for an instruction that computes nothing, InputError where a device lacks the plan's precision.
        """
        key = (lane.name, instruction.__class__, getattr(instruction, "layers", None))
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._optimizer_s(lane) if isinstance(instruction, OptimizerStep) else self._compute_s(lane, instruction)
            self._seconds[key] = seconds
        return seconds

    def collectives(self, lane: Lane, instruction: Compute | OptimizerStep) -> tuple[TensorCollective, ...]:
        """The tensor-parallel collectives inside one instruction of a lane; none where a single device is the lane.

        Without sequence parallelism a layer sums its two partial results in the forward pass, and the gradients of its two
        inputs in the input half of the backward. With it each sum is a reduce-scatter whose result is gathered for the next
        matmul; of the gathered inputs only the shards are kept, and the weight half gathers them once more (Korthikanti et
        al., 2022, arXiv:2205.05198, section 4.2.2). The embedding sums the rows that its ranks found; the head sums the
        gradient of its input, and for the cross-entropy three values a token in fp32: maximum, sum of exponentials, the
        target's logit. Recomputed layers repeat their forward's. A mixture of experts is summed where a dense MLP would be.
        """
        key = (lane.name, instruction.__class__, getattr(instruction, "layers", None))
        found = self._collectives.get(key)
        if found is None:
            if isinstance(instruction, OptimizerStep) or lane.tensor_parallel == 1:
                found = ()
            else:
                found = self._tensor_collectives(lane, instruction)
            self._collectives[key] = found
        return found

    def pieces(self, lane: Lane) -> tuple[PieceSeconds, PieceSeconds, PieceSeconds]:
        """One layer, the embedding and the head for the lane's share of a micro-batch on its devices."""
        found = self._pieces.get(lane.name)
        if found is None:
            plan, kinds = self.plan, self._kinds(lane)
            model, length, precision = plan.transformer, plan.sequence_length, plan.precision
            share = lane.sequences[1] - lane.sequences[0]
            split = (lane.tensor_parallel, plan.sequence_parallel, precision)
            found = self._pieces[lane.name] = (
                slowest([layer_seconds(kind, model, share, length, *split) for kind in kinds]),
                slowest([embedding_seconds(kind, model, share, length, precision) for kind in kinds]),
                slowest([head_seconds(kind, model, share, length, *split) for kind in kinds]),
            )
        return found

    def _kinds(self, lane: Lane) -> tuple[GpuKind, ...]:
        """The kinds of a lane's devices, each once."""
        return tuple({id(kind): kind for kind in (self.cluster.device(name).gpu for name in lane.devices)}.values())

    def _inside(self, lane: Lane, layers: LayerRange) -> tuple[int, int, int, bool, bool]:
        """Of a part of a lane: its layers, how many of them recompute in full and how many selectively, and its ends."""
        start, stop = layers
        stage = self.plan.pipelines[lane.pipeline].stages[lane.stage]
        count, full, selective = stop - start, 0, 0
        if stage.recompute == "selective":
            selective = count
        elif stage.recompute == "full":
            left = stage.recomputed()["full"]  # the first of the stage's layers, in layer order
            for a, b in sorted(stage.layers):
                within = min(b - a, left)
                full += max(0, min(stop, a + within) - max(start, a))
                left -= within
        embedding = lane.embedding and start == 0
        head = lane.head and stop == self.plan.transformer.layers
        return count, full, selective, embedding, head

    def _compute_s(self, lane: Lane, instruction: Compute) -> float:
        """Seconds of a forward, backward, or half of a backward."""
        if not isinstance(instruction, (Forward, Backward, BackwardInput, BackwardWeight)):
            raise TypeError(f"no compute time for {instruction!r}")
        count, full, selective, embedding, head = self._inside(lane, instruction.layers)
        layer, first, last = self.pieces(lane)
        if isinstance(instruction, Forward):
            return count * layer.forward_s + embedding * first.forward_s + head * last.forward_s
        seconds = 0.0
        if isinstance(instruction, (Backward, BackwardInput)):
            seconds += count * layer.backward_input_s + embedding * first.backward_input_s + head * last.backward_input_s
            seconds += full * layer.forward_s + selective * layer.attention_s
        if isinstance(instruction, (Backward, BackwardWeight)):
            seconds += count * layer.backward_weight_s + embedding * first.backward_weight_s + head * last.backward_weight_s
        return seconds

    def _optimizer_s(self, lane: Lane) -> float:
        """Seconds of the optimizer step over the lane's parameters, or over its shard of them where ZeRO divides the states."""
        plan, model, degree = self.plan, self.plan.transformer, lane.tensor_parallel
        if self._holders is None:
            self._holders = count_holders(plan)
        held, sharded = self._holders, plan.zero_stage >= 1
        layers = held.shard(lane.layers) if sharded else sum(stop - start for start, stop in lane.layers)
        parameters = layers * layer_parameters_at(model, degree)
        if lane.embedding:
            parameters += embedding_parameters_at(model, degree) / (held.embedding if sharded else 1)
        if lane.head:
            parameters += head_parameters_at(model, degree) / (held.head if sharded else 1)
        if lane.head and not lane.embedding:
            parameters += tied_copy_parameters_at(model, degree) / (held.embedding if sharded else 1)
        num_bytes = parameters * optimizer_bytes(plan.precision, plan.gradient_precision, plan.optimizer)
        rates = [_rates(kind, plan.precision) for kind in self._kinds(lane)]
        return max(rate.memory_s(num_bytes) + rate.kind.efficiency.launch_s for rate in rates)

    def _tensor_collectives(self, lane: Lane, instruction: Compute) -> tuple[TensorCollective, ...]:
        """See `collectives`."""
        if not isinstance(instruction, (Forward, Backward, BackwardInput, BackwardWeight)):
            raise TypeError(f"no collectives for {instruction!r}")
        plan, model = self.plan, self.plan.transformer
        count, full, _, embedding, head = self._inside(lane, instruction.layers)
        share = lane.sequences[1] - lane.sequences[0]
        tokens, element_bytes = share * plan.sequence_length, PRECISION_BYTES[plan.precision]
        inside = boundary_bytes(model, share, plan.sequence_length, element_bytes)
        at_ends = tokens * model.embedding_width * element_bytes
        forward = isinstance(instruction, Forward)
        inputs = isinstance(instruction, (Backward, BackwardInput))
        weights = isinstance(instruction, (Backward, BackwardWeight))
        passes = (count if forward else 0) + (full + count if inputs else 0)
        tally: _Tally = {}
        if plan.sequence_parallel:
            _add(tally, "all_gather", inside, 2 * passes + (2 * count if weights else 0))
            _add(tally, "reduce_scatter", inside, 2 * passes)
            _add(tally, "reduce_scatter", at_ends, (embedding and forward) + (head and inputs))
            _add(tally, "all_gather", at_ends, (embedding and weights) + (head and forward) + (head and weights))
        else:
            _add(tally, "all_reduce", inside, 2 * passes)
            _add(tally, "all_reduce", at_ends, (embedding and forward) + (head and inputs))
        _add(tally, "all_reduce", 4 * tokens, 3 if head and forward else 0)
        return tuple(TensorCollective(kind, num_bytes, n) for (kind, num_bytes), n in tally.items())
