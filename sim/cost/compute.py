"""Seconds of computation of one instruction on one lane, and the collectives inside it.

What the software stack (`sim.spec.stack`) adds to the pieces of a model is applied here: its seconds for each forward and
backward and for each step, its optimizer's traffic, and how much slower it computes while gradients or parameters move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.cost.memory import OPTIMIZER_STATES, Holders, count_holders
from sim.cost.pieces import PieceSeconds, embedding_seconds, head_seconds, layer_seconds, rates_of, slowest
from sim.spec.cluster import PCIE_BYTES_PER_S, Cluster, Node
from sim.spec.compile import lanes_of
from sim.spec.counts import (
    PRECISION_BYTES,
    boundary_bytes,
    embedding_parameters_at,
    head_parameters_at,
    key_value_bytes,
    layer_parameters_at,
    tied_copy_parameters_at,
)
from sim.spec.gpu import GpuKind, at_speed, is_cpu
from sim.spec.plan import LayerRange, Plan, tensor_groups
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Compute, Forward, Lane, OptimizerStep, work_key
from sim.spec.stack import Stack

HOST_BYTES_PER_S = 120e9
"""What the processors of a node read and write together in an optimizer step in host memory: CPU-Adam takes 0.22 s for 1
billion parameters and 2.57 s for 10 billion, at 30 bytes each. Source: Ren et al. (2021), arXiv:2101.06840, table 4."""


def optimizer_bytes(precision: str, gradient_precision: str, optimizer: str) -> int:
    """Bytes that the optimizer step reads and writes per parameter.

    Reads the gradient (4 in fp32, 2 in bf16); reads and writes the states (8 each, AdamW has two, SGD one) and the fp32 copy
    of the parameter (8); writes the parameter in the training precision. Where that is fp32, there is no copy and the
    parameter is read, too.
    """
    element_bytes = PRECISION_BYTES[precision]
    parameter = 8 if element_bytes == 4 else 8 + element_bytes
    return PRECISION_BYTES[gradient_precision] + 8 * OPTIMIZER_STATES[optimizer] + parameter


def host_of(node: Node) -> tuple[float, float]:
    """What decides how long a GPU's optimizer step takes in its node's memory: bytes per second of its part of the way there, and
    how many GPUs the processors serve.

    Each GPU of a node has its equal part of the processors, and of its PCIe switch's uplink, whether the others are used or not.
    On NVLink nodes each GPU is taken to have a PCIe link of generation 4 to its host.
    """
    gpus = node.host_gpus or node.gpus
    if node.intra.is_nvlink:
        return PCIE_BYTES_PER_S["pcie4"], gpus
    return node.intra.bandwidth_bytes_per_s / min(node.intra.gpus_per_switch, gpus), gpus


def host_step_s(node: Node, parameters: float, precision: str, gradient_precision: str, optimizer: str) -> float:
    """Seconds of the optimizer step of so many parameters of a GPU whose states are in its host's memory.

    Gradients come down, the processors update, parameters go up; nothing overlaps. See `host_of`.
    """
    rate, gpus = host_of(node)
    moved = parameters * (PRECISION_BYTES[gradient_precision] + PRECISION_BYTES[precision])
    updated = parameters * optimizer_bytes(precision, gradient_precision, optimizer)
    # These are rates that a copy between host and GPU reaches; `Links.efficiency` of PCIe is of collectives among GPUs.
    return moved / rate + updated * gpus / HOST_BYTES_PER_S


# --- Collectives -----------------------------------------------------------------------------------------------------


INNER_GROUPS = ("tensor", "context", "expert", "routed")
"""Among whom the collectives inside an instruction are: the tensor ranks of each context rank; the context ranks of each tensor
rank; each device with those that hold the other experts; and, of what arrived for these, the tensor ranks once more."""


@dataclass(frozen=True, slots=True)
class TensorCollective:
    """`count` collectives, one after another, over groups of devices, all groups of the lane at once."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, ring or all_to_all."""
    num_bytes: float
    """The size of the whole tensor; of a ring, what each device passes on in each of its steps, one fewer than devices; of an
    all_to_all, what each device has, of which it keeps its part."""
    count: int
    group: str = "tensor"
    """One of `INNER_GROUPS`."""

    @property
    def among_tensor_ranks(self) -> bool:
        """Whether it is one of the tensor ranks of each context rank."""
        return self.group in ("tensor", "routed")


_Tally = dict[tuple[str, float, str], int]


def _add(tally: _Tally, kind: str, num_bytes: float, count: int, group: str = "tensor") -> None:
    if count:
        tally[kind, num_bytes, group] = tally.get((kind, num_bytes, group), 0) + count


# --- The plan's lanes ------------------------------------------------------------------------------------------------


HOST_EXPONENT = 3
"""How sharply the longer of GPU and host decides: without limit it would be the maximum, at 1 the sum. Of 2, 3, 6
and 10 the one that errs least on vTrain's 431 runs (arXiv:2312.12391)."""


class Inside(NamedTuple):
    """Of a part of a lane: its layers, those that are recomputed in full, selectively and pointwise, and its ends."""

    layers: int
    full: int
    selective: int
    pointwise: int
    embedding: bool
    head: bool


class ComputeCost:
    """The seconds and the collectives inside a plan's instructions on a cluster.

    `kinds`, by name, and `stack` stand in the place of the cluster's, so that one plan can be evaluated with many constants.
    Answers are kept by lane and layers, so that asking again for another micro-batch is one look-up. The pieces are kept over
    all plans, so that the next plan of the same job finds them.
    """

    def __init__(
        self, plan: Plan, cluster: Cluster, kinds: Mapping[str, GpuKind] | None = None, stack: Stack | None = None
    ) -> None:
        self.plan, self.cluster = plan, cluster
        self.stack = stack if stack is not None else cluster.stack
        self._given_kinds = kinds or {}
        self._seconds: dict[object, float] = {}
        self._both: dict[object, tuple[float, float]] = {}
        self._collectives: dict[object, tuple[TensorCollective, ...]] = {}
        self._pieces: dict[tuple[str, int], tuple[PieceSeconds, PieceSeconds, PieceSeconds]] = {}
        self._insides: dict[tuple[str, LayerRange], Inside] = {}
        self._lane_parameters: dict[str, float] = {}
        self._expert_groups: dict[int, Mapping[tuple[str, ...], Sequence[tuple[str, ...]]]] = {}
        self._holders: Holders | None = None
        self._lanes: dict[str, Lane] = {}

    def with_constants(self, kinds: Mapping[str, GpuKind] | None, stack: Stack | None) -> ComputeCost:
        """The same with other kinds and another stack than the cluster's, where given; what does not depend on them is kept."""
        other = ComputeCost(self.plan, self.cluster, kinds, stack)
        other._collectives, other._lanes, other._expert_groups = self._collectives, self._lanes, self._expert_groups
        other._insides, other._lane_parameters = self._insides, self._lane_parameters
        other._holders = self._held()
        return other

    def seconds(self, lane: Lane, instruction: Compute | OptimizerStep) -> float:
        """Seconds of computation of one instruction of a lane, without communication. The slowest of its devices decides.

        Raises TypeError for an instruction that computes nothing, InputError where a device lacks the plan's precision.
        """
        key = _key(lane, instruction, "compute time")
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._optimizer_s(lane) if isinstance(instruction, OptimizerStep) else self._compute_s(lane, instruction)
            self._seconds[key] = seconds
        return seconds

    def collectives(self, lane: Lane, instruction: Compute | OptimizerStep) -> tuple[TensorCollective, ...]:
        """The collectives inside one instruction of a lane: of its tensor ranks, of its context ranks, of its experts.

        Without sequence parallelism a layer sums its two partial results in the forward pass, and the gradients of its two
        inputs in the input half of the backward. With it each sum is a reduce-scatter whose result is gathered for the next
        matmul; of the gathered inputs only the shards are kept, and the weight half gathers them once more (Korthikanti et
        al., 2022, arXiv:2205.05198, section 4.2.2). The embedding sums the rows that its ranks found; the head sums the
        gradient of its input, and for the cross-entropy three values a token in fp32: maximum, sum of exponentials, the
        target's logit. Recomputed layers repeat their forward's. A mixture of experts is summed where a dense MLP would be.

        Context ranks attend in a ring (Liu et al., 2023, arXiv:2310.01889): keys and values of each one's part of the sequence
        go round once, and in the backward once more, with their gradients. Expert parallelism sends every token to its experts
        and back, and so its gradient (Lepikhin et al., 2020, arXiv:2006.16668). With sequence parallelism each tensor rank sends
        its part of the tokens, and what arrived at all of them is gathered there, once for each expert that a token goes to, and
        kept for the weight half (Megatron Core's all-to-all dispatcher; Singh et al., 2023, arXiv:2303.06318), unless each has
        whole experts. Experts that every token goes to are a dense MLP.
        """
        key = _key(lane, instruction, "collectives")
        found = self._collectives.get(key)
        if found is None:
            alone = len(lane.devices) == 1 and self.plan.expert_parallel == 1
            if alone or isinstance(instruction, OptimizerStep):
                found = ()
            else:
                found = self.collectives_of(lane, type(instruction), self._inside(lane, instruction.layers))
            self._collectives[key] = found
        return found

    def shape(self, lane: Lane, instruction: Compute | OptimizerStep) -> object:
        """What decides the seconds and the collectives of a lane's instruction: those of equal shape take equally long.

        Most of a lane's layers are alike, so that there are few shapes, into however many parts its work is divided.
        """
        if isinstance(instruction, OptimizerStep):
            return OptimizerStep
        start, stop = instruction.layers
        inside, once = self._inside(lane, instruction.layers), self._comes_once(lane, instruction)
        # Where messages keep a stage, the instructions before and after them take longer.
        edges = [(edge.peer, edge.sequences) for edge in lane.previous if edge.layer == start]
        edges += [(edge.peer, edge.sequences) for edge in lane.next if edge.layer == stop]
        place = lane.slice_of(instruction.micro_batch)
        return instruction.__class__, inside, once, _beside_exchange(lane, instruction), tuple(edges), place

    def pieces(self, lane: Lane, place: int = 0) -> tuple[PieceSeconds, PieceSeconds, PieceSeconds]:
        """One layer, the embedding and the head for the lane's share of a micro-batch on its devices; of its slice at a place."""
        found = self._pieces.get((lane.name, place))
        if found is None:
            plan, stack, kinds = self.plan, self.stack, self._kinds(lane)
            model, length, precision = plan.transformer, plan.slice_length, plan.precision
            before = place * length
            share = lane.sequences[1] - lane.sequences[0]
            split = (lane.tensor_parallel, plan.sequence_parallel, precision, plan.context_parallel)
            experts = (plan.expert_parallel, plan.whole_experts)
            ends = (lane.tensor_parallel, precision, plan.context_parallel)
            found = self._pieces[lane.name, place] = (
                slowest([layer_seconds(kind, stack, model, share, length, *split, *experts, before) for kind in kinds]),
                slowest([embedding_seconds(kind, stack, model, share, length, *ends) for kind in kinds]),
                slowest([head_seconds(kind, stack, model, share, length, *split) for kind in kinds]),
            )
        return found

    def expert_groups(self, stage: int) -> Mapping[tuple[str, ...], Sequence[tuple[str, ...]]]:
        """With whom each tensor-parallel group that holds a stage, of pipelines of equal cuts, divides the experts.

        They are some of these groups that follow one another in the plan, context ranks fastest; see `Plan.expert_copies`.
        """
        found = self._expert_groups.get(stage)
        if found is None:
            plan = self.plan
            replicas = (replica for pipeline in plan.pipelines for replica in pipeline.stages[stage].replicas)
            groups = [group for replica in replicas for group in tensor_groups(replica.devices, plan.context_parallel)]
            count = plan.expert_copies(len(groups[0]))
            found = {group: groups[i // count * count :][:count] for i, group in enumerate(groups)}
            self._expert_groups[stage] = found
        return found

    def lane(self, name: str) -> Lane:
        """The plan's lane of this name, without instructions."""
        if not self._lanes:
            self._lanes.update((lane.name, lane) for lane in lanes_of(self.plan)[0])  # also of those that share them
        return self._lanes[name]

    def _held(self) -> Holders:
        """How many lanes hold each part of the model."""
        if self._holders is None:
            self._holders = count_holders(self.plan)
        return self._holders

    def _kinds(self, lane: Lane) -> tuple[GpuKind, ...]:
        """The kinds of a lane's devices at their speeds, each once."""
        kinds = [self.cluster.device(name).gpu for name in lane.devices]
        if self._given_kinds:
            given = self._given_kinds
            kinds = [at_speed(given[kind.name], kind.speed) if kind.name in given else kind for kind in kinds]
        return tuple({id(kind): kind for kind in kinds}.values())

    def _inside(self, lane: Lane, layers: LayerRange) -> Inside:
        """Of a part of a lane: its layers, how many of them are under each recompute mode, and its ends."""
        found = self._insides.get((lane.name, layers))
        if found is None:
            start, stop = layers
            again = self.plan.pipelines[lane.pipeline].stages[lane.stage].recomputed_within(layers)
            embedding = lane.embedding and start == 0
            head = lane.head and stop == self.plan.transformer.layers
            found = Inside(stop - start, again["full"], again["selective"], again["pointwise"], embedding, head)
            self._insides[lane.name, layers] = found
        return found

    def _compute_s(self, lane: Lane, instruction: Compute) -> float:
        """Seconds of a forward, backward, or half of a backward: of the GPU, or of the host where it needs longer to launch."""
        device_s, host_s = self._both_s(lane, instruction)
        return busy_s(device_s, host_s) + self._comes_once(lane, instruction) * self.stack.micro_batch_s

    def _comes_once(self, lane: Lane, instruction: Compute) -> bool:
        """Whether what comes once for each forward and each backward of a chunk is with this part: that of the first layer."""
        return not isinstance(instruction, BackwardWeight) and instruction.layers[0] == lane.chunk(instruction.layers)[0]

    def gap_s(self, lane: Lane, instruction: Compute) -> float:
        """Of an instruction's seconds of computation, those in which the GPU waits for the host."""
        device_s, host_s = self._both_s(lane, instruction)
        return busy_s(device_s, host_s) - device_s

    def filled_s(self, lane: Lane, instruction: Compute, exposed_s: float) -> float:
        """Of an instruction's `exposed_s` of collectives, those that pass while the GPU waits for the host; see `filled_s`."""
        return filled_s(*self._both_s(lane, instruction), exposed_s)

    def once_s(self, lane: Lane, instruction: Compute | OptimizerStep) -> float:
        """Of an instruction's seconds of computation, those that come once for each pass of a chunk, or each iteration."""
        if isinstance(instruction, OptimizerStep):
            return self.stack.step_s
        return self._comes_once(lane, instruction) * self.stack.micro_batch_s

    def is_hosts(self, lane: Lane, instruction: Compute | OptimizerStep) -> bool:
        """Whether an instruction is its host's work: an optimizer step of states in host memory, unless the device is a CPU."""
        return isinstance(instruction, OptimizerStep) and bool(self._hosts(lane))

    def _hosts(self, lane: Lane) -> list[Node]:
        """The nodes in whose memory a lane's optimizer states are."""
        if not self.plan.offload_optimizer:
            return []
        nodes = [self.cluster.device(name).node for name in lane.devices]
        return [node for node in nodes if not is_cpu(node.gpu)]  # a CPU is its own host: nothing moves

    def _both_s(self, lane: Lane, instruction: Compute) -> tuple[float, float]:
        """Seconds of the GPU for an instruction's computation, and of the host to launch all of it."""
        key = _key(lane, instruction, "compute time")
        both = self._both.get(key)
        if both is None:
            both = self._both[key] = self._device_and_host_s(lane, instruction)
        return both

    def _device_and_host_s(self, lane: Lane, instruction: Compute) -> tuple[float, float]:
        """See `_both_s`."""
        inside, place = self._inside(lane, instruction.layers), lane.slice_of(instruction.micro_batch)
        seconds, kernels = self.launched(lane, type(instruction), inside, place)
        if _beside_exchange(lane, instruction):
            seconds *= 1 + self.stack.overlap_slowdown
        if self.stack.host_s == self.stack.tensor_host_s == 0:
            return seconds, 0.0
        return seconds, self.host_s(lane, kernels, self.collectives(lane, instruction))

    def launched(self, lane: Lane, kind: type[Compute], inside: Inside, place: int = 0) -> tuple[float, int]:
        """Seconds of the GPU for what is inside a pass of a lane, of the slice at a place, and how many kernels that is.

        Both grow in proportion to each of the numbers inside.
        """
        count, full, selective, pointwise, embedding, head = inside
        known = self.pieces(lane, place)
        pieces, layer = list(zip((count, embedding, head), known, strict=True)), known[0]
        seconds, kernels = 0.0, 0
        if kind is Forward:
            seconds += sum([times * piece.forward_s for times, piece in pieces])
            kernels += sum([times * piece.forward_kernels for times, piece in pieces])
        if kind in (Backward, BackwardInput):
            seconds += sum([times * piece.backward_input_s for times, piece in pieces])
            seconds += full * layer.forward_s + selective * layer.attention_s
            kernels += sum([times * piece.backward_input_kernels for times, piece in pieces])
            kernels += full * layer.forward_kernels + selective * layer.attention_kernels
        if kind in (Backward, BackwardWeight):
            seconds += sum([times * piece.backward_weight_s for times, piece in pieces])
            seconds += pointwise * layer.pointwise_s  # only the gradients of matrices need what it brings back
            kernels += sum([times * piece.backward_weight_kernels for times, piece in pieces])
            kernels += pointwise * layer.pointwise_kernels
        return seconds, kernels

    def passing_s(self, lane: Lane, kind: type[Compute], inside: Inside, place: int = 0) -> float:
        """Seconds of computation of what is inside a pass of a lane, without what comes once for each pass."""
        device_s, kernels = self.launched(lane, kind, inside, place)
        return busy_s(device_s, self.host_s(lane, kernels, self.collectives_of(lane, kind, inside)))

    def host_s(self, lane: Lane, kernels: int, collectives: Sequence[TensorCollective]) -> float:
        """Seconds of the host to launch so many kernels of a lane, and collectives between them."""
        stack = self.stack
        host_s = stack.host_s * (kernels + sum(collective.count for collective in collectives))
        if len(self.plan.pipelines[lane.pipeline].stages) > 1 and len(self.cluster.nodes) > 1:
            tensor = sum(collective.count for collective in collectives if collective.among_tensor_ranks)
            host_s += stack.tensor_host_s * tensor * lane.tensor_parallel
        return host_s

    def attention_s(self, lane: Lane, instruction: Compute) -> float:
        """Seconds of attention in an instruction, recomputed attention included."""
        if not isinstance(instruction, (Forward, Backward, BackwardInput)):
            return 0.0
        count, full, selective, _, _, _ = self._inside(lane, instruction.layers)
        layer = self.pieces(lane, lane.slice_of(instruction.micro_batch))[0]
        if isinstance(instruction, Forward):
            return count * layer.attention_s
        return count * layer.attention_backward_s + (full + selective) * layer.attention_s

    def beside_ring(self, lane: Lane, instruction: Compute) -> float:
        """The share of the steps of a ring in an instruction beside which there is attention: all but the gradients' last."""
        if isinstance(instruction, Forward):
            return 1.0
        count, full, selective, _, _, _ = self._inside(lane, instruction.layers)
        return 1 - count / ((2 * count + full + selective) * (lane.context_parallel - 1)) if count else 1.0

    def beside_ring_s(self, lane: Lane, instruction: Compute) -> float:
        """Seconds of attention in an instruction to the keys of other context ranks, beside which their blocks come."""
        ranks = lane.context_parallel
        return self.attention_s(lane, instruction) * (ranks - 1) / ranks

    def _optimizer_s(self, lane: Lane) -> float:
        """Seconds of the optimizer step over the parameters that a lane updates."""
        plan, parameters = self.plan, self._lane_parameters.get(lane.name)
        if parameters is None:
            parameters = self._lane_parameters[lane.name] = self._parameters(lane)
        num_bytes = parameters * optimizer_bytes(plan.precision, plan.gradient_precision, plan.optimizer)
        if hosts := self._hosts(lane):
            return self.stack.step_s + max(
                host_step_s(node, parameters, plan.precision, plan.gradient_precision, plan.optimizer) for node in hosts
            )
        rates = [rates_of(kind, plan.precision) for kind in self._kinds(lane)]
        traffic = self.stack.optimizer_traffic * num_bytes
        return self.stack.step_s + max(rate.memory_s(traffic) + rate.launch_s for rate in rates)

    def _parameters(self, lane: Lane) -> float:
        """The parameters that a lane updates: its own, or its shard of them where ZeRO divides the states."""
        plan, model, degree = self.plan, self.plan.transformer, lane.tensor_parallel
        held, sharded = self._held(), plan.zero_stage >= 1
        if sharded:
            parameters = held.shard(lane.layers) * layer_parameters_at(model, degree)
        else:
            layers = sum(stop - start for start, stop in lane.layers)
            parameters = layers * layer_parameters_at(model, degree, plan.expert_parallel, plan.whole_experts)
        if lane.embedding:
            parameters += embedding_parameters_at(model, degree) / (held.embedding_shards if sharded else 1)
        if lane.head:
            parameters += head_parameters_at(model, degree) / (held.head_shards if sharded else 1)
        if lane.head and not lane.embedding:
            parameters += tied_copy_parameters_at(model, degree) / (held.embedding_shards if sharded else 1)
        return parameters

    def collectives_of(self, lane: Lane, kind: type[Compute], inside: Inside) -> tuple[TensorCollective, ...]:
        """See `collectives`; of what is inside a pass. How many there are grows in proportion to each of the numbers inside."""
        plan, model = self.plan, self.plan.transformer
        count, full, selective, _, embedding, head = inside
        share, degree = lane.sequences[1] - lane.sequences[0], lane.tensor_parallel
        tokens, element_bytes = share * plan.slice_length // plan.context_parallel, PRECISION_BYTES[plan.precision]
        boundary = boundary_bytes(model, share, plan.slice_length, element_bytes) // plan.context_parallel
        at_ends = tokens * model.embedding_width * element_bytes
        forward, inputs, weights = kind is Forward, kind in (Backward, BackwardInput), kind in (Backward, BackwardWeight)
        passes = (count if forward else 0) + (full + count if inputs else 0)
        tally: _Tally = {}
        routed = boundary * model.experts.top_k if plan.expert_parallel > 1 and model.experts is not None else 0
        if degree > 1 and plan.sequence_parallel:
            # Of attention, and of the MLP, or of that of the experts that every token goes to; and then of the others.
            inputs_of = 2 if not routed or (model.experts is not None and model.experts.shared_experts) else 1
            _add(tally, "all_gather", boundary, inputs_of * (passes + (count if weights else 0)))
            _add(tally, "reduce_scatter", boundary, inputs_of * passes)
            if routed and not plan.whole_experts:
                _add(tally, "all_gather", routed, passes, "routed")
                _add(tally, "reduce_scatter", routed, passes, "routed")
            _add(tally, "reduce_scatter", at_ends, (embedding and forward) + (head and inputs))
            _add(tally, "all_gather", at_ends, (embedding and weights) + (head and forward) + (head and weights))
        elif degree > 1:
            _add(tally, "all_reduce", boundary, 2 * passes)
            _add(tally, "all_reduce", at_ends, (embedding and forward) + (head and inputs))
        if degree > 1:
            _add(tally, "all_reduce", 4 * tokens, 3 if head and forward else 0)
        if plan.context_parallel > 1:
            both = key_value_bytes(model, share, plan.sequence_length, degree, element_bytes)
            rounds = passes + (count + selective if inputs else 0)
            _add(tally, "ring", both / plan.context_parallel, rounds, "context")
        if routed:
            _add(tally, "all_to_all", routed / (degree if plan.sequence_parallel else 1), 2 * passes, "expert")
        return tuple(TensorCollective(kind, num_bytes, n, group) for (kind, num_bytes, group), n in tally.items())


def _key(lane: Lane, instruction: Compute | OptimizerStep, asked: str) -> object:
    """What decides the work of an instruction. Raises TypeError for one that computes nothing."""
    if not isinstance(instruction, (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep)):
        raise TypeError(f"no {asked} for {instruction!r}")
    return lane.name, *work_key(instruction, lane.sequence_slices)


def busy_s(device_s: float, host_s: float) -> float:
    """Seconds of work that keeps a GPU busy for `device_s` and the host that launches it for `host_s`.

    No less than either, and more where they are near: small kernels wait for the host while it is still late, large ones make it
    wait, and a stream that has run dry loses what the host was ahead.
    """
    if host_s == 0:
        return device_s
    # Written so that rounding never makes it less than the longer of the two.
    longer_s, shorter_s = max(device_s, host_s), min(device_s, host_s)
    return float(longer_s * (1 + (shorter_s / longer_s) ** HOST_EXPONENT) ** (1 / HOST_EXPONENT))


def filled_s(device_s: float, host_s: float, exposed_s: float) -> float:
    """Of the seconds of collectives that nothing hides, those in which the GPU had waited for the host in any case.

    Collectives of tensor ranks are work of the GPU as its kernels are: the host is ahead of, or behind, both together.
    """
    if host_s == 0 or exposed_s == 0:
        return 0.0
    return max(0.0, busy_s(device_s, host_s) + exposed_s - busy_s(device_s + exposed_s, host_s))


def _beside_exchange(lane: Lane, instruction: Compute) -> bool:
    """Whether gradients or parameters are on their way beside an instruction.

    Under ZeRO 2 and 3 always, else from the second part on of a backward that is divided into buckets.
    """
    if lane.split in ("backward", "all"):
        return True
    whole = lane.chunk(instruction.layers)
    return lane.split == "last" and not isinstance(instruction, Forward) and instruction.layers[1] < whole[1]
