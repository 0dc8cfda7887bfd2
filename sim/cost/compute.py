"""Seconds of computation of one instruction on one lane, and the tensor-parallel collectives inside it."""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.memory import OPTIMIZER_STATES, Holders, count_holders
from sim.cost.pieces import PieceSeconds, embedding_seconds, head_seconds, layer_seconds, rates_of, slowest
from sim.spec.cluster import Cluster
from sim.spec.counts import (
    PRECISION_BYTES,
    boundary_bytes,
    embedding_parameters_at,
    head_parameters_at,
    layer_parameters_at,
    tied_copy_parameters_at,
)
from sim.spec.gpu import GpuKind
from sim.spec.plan import LayerRange, Plan
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Compute, Forward, Lane, OptimizerStep


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
        rates = [rates_of(kind, plan.precision) for kind in self._kinds(lane)]
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
