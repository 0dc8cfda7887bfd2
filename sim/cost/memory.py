"""Bytes on every device at the peak of an iteration, part by part.

All bytes are those of the fullest tensor-parallel rank of a lane. Nothing is averaged: parts that peak at different moments
are added as if they met, which they nearly do at the first backward after the warm-up. What is counted is what a framework
with fused kernels holds that sums gradients in place; what another holds besides its software stack says (`sim.spec.stack`).
How far that is from measured peaks, source by source, and which runs that ran or failed are told right, is in `docs/fidelity.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from sim.spec.cluster import Cluster, Node
from sim.spec.compile import bucket_layers
from sim.spec.counts import (
    PRECISION_BYTES,
    RECOMPUTE,
    boundary_bytes,
    embedding_parameters_at,
    head_activation_bytes,
    head_parameters_at,
    key_value_bytes,
    layer_activation_bytes,
    layer_matmuls,
    layer_parameters_at,
    layer_recompute_peak_bytes,
    tied_copy_parameters_at,
    unfused_scores,
)
from sim.spec.gpu import is_cpu
from sim.spec.plan import LayerRange, Pipeline, Plan
from sim.spec.schedules import SCHEDULES, check_ranges, held_by
from sim.spec.stack import Stack, stack
from sim.spec.transformer import Transformer

COMMUNICATOR_BYTES = 300 * 2**20
"""Buffers of one communicator. An assumption: 16 channels, each with a 4 MiB buffer to and from two neighbours, and the
smaller buffers of the other protocols. A device has one for each of: tensor-parallel group, context-parallel group, experts'
group, pipeline, gradients."""

OPTIMIZER_STATES = {"adamw": 2, "sgd": 1}
"""States in fp32 that an optimizer keeps of each parameter: two moments of AdamW, the momentum of SGD."""


# --- Records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryParts:
    """Bytes that one device of a lane holds at its peak, by what they are for."""

    parameters: int
    """In the training precision; under ZeRO 3 the shard and what is gathered."""
    gradients: int
    optimizer: int
    """Moments, and the fp32 copy of the parameters where these are in less; nothing where they are in the host's memory."""
    activations: int
    """Kept between forward and backward, of all micro-batches in flight."""
    working: int
    """Of what has its backward under way: of a layer what its recomputation brings back, and a gradient of each kept tensor; or
    of the head the gradient of one micro-batch's logits, if that is more. A schedule that splits backwards keeps this gradient
    for the second half, and so has both. And the gradient of its largest matrix, in the training precision, until it is summed;
    of a bucket's (ZeRO 2 and 3) that is among the gradients, and so it is where the stack keeps a copy of them."""
    logits: int
    """What the head keeps, of all micro-batches in flight."""
    buffers: int
    """Two for each activation and gradient that comes from or goes to a neighbouring stage, and two for the keys and values,
    and for their gradients, that come from another context rank. Where sequences come in slices, for each layer the keys and
    values of a micro-batch together, to which its next slice attends, and the gradients of those of all slices before one."""
    reserve: int
    """What the allocator loses to fragmentation."""
    context: int
    """CUDA context and library workspaces (the stack's), communicators."""

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(vars(self).values())

    @property
    def allocated(self) -> int:
        """What tensors take: all but what the allocator reserves beyond them, and what it knows nothing of."""
        return self.reserved - self.reserve

    @property
    def reserved(self) -> int:
        """What the allocator holds, which knows nothing of the CUDA context and of communicators."""
        return self.total - self.context


# --- Who holds what --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holders:
    """How many tensor-parallel groups hold each layer, the embedding (where it is tied, with its copies at the head) and the
    head; each context rank of a lane is such a group. `shard_group` is how many of them ZeRO divides at most."""

    layers: tuple[int, ...]
    embedding: int
    head: int
    shard_group: int | None = None

    @property
    def embedding_shards(self) -> int:
        """Over how many the state of the embedding is divided."""
        return self._shards(self.embedding)

    @property
    def head_shards(self) -> int:
        """Over how many the state of the head is divided."""
        return self._shards(self.head)

    def _shards(self, count: int) -> int:
        return count if self.shard_group is None else min(count, self.shard_group)

    @cached_property
    def _shares(self) -> tuple[float, ...]:
        """[i] is the sum of the shares that one holder keeps of each of the layers before i."""
        return tuple(accumulate((1 / self._shards(count) for count in self.layers), initial=0.0))

    def shard(self, ranges: tuple[LayerRange, ...]) -> float:
        """The layers that a lane with these ranges keeps the state of, where that of each is divided over its holders."""
        # Rounded, so that stages that are alike come out equal wherever they stand.
        return round(sum(self._shares[stop] - self._shares[start] for start, stop in ranges), 9)


def count_holders(plan: Plan) -> Holders:
    """How many tensor-parallel groups hold what."""
    change = [0] * (plan.transformer.layers + 1)
    first = last = copies = 0
    for pipeline in plan.pipelines:
        ends = pipeline.chunks[0][0], pipeline.chunks[-1][0]
        begin, end = (len(pipeline.stages[s].replicas) for s in ends)
        first, last, copies = first + begin, last + end, copies + (end if ends[0] != ends[1] else 0)
        for stage in pipeline.stages:
            for start, stop in stage.layers:
                change[start] += len(stage.replicas)
                change[stop] -= len(stage.replicas)
    tied, ranks = plan.transformer.tied_embeddings, plan.context_parallel
    layers = tuple(count * ranks for count in accumulate(change[:-1]))
    return Holders(layers, (first + (copies if tied else 0)) * ranks, last * ranks, plan.shard_group)


# --- Parts -----------------------------------------------------------------------------------------------------------


class Parameters(NamedTuple):
    """Parameters on one tensor-parallel rank."""

    layer: int
    """With its share of the experts of a layer."""
    layer_undivided: int
    """With all of them."""
    embedding: int
    head: int
    copy: int
    """Of the embedding, where it is tied to a head on another stage."""
    layer_matrix: int
    """Of the largest matrix of a layer; of experts that of one, as where each has a tensor of its own."""


@dataclass(frozen=True)
class MemoryRules:
    """What all lanes of a plan share."""

    transformer: Transformer
    slice_length: int
    """Tokens of a slice of a sequence; of all of it, where sequences are not cut."""
    element_bytes: int
    gradient_bytes: int
    state_bytes: int
    sequence_parallel: bool
    zero_stage: int
    context_parallel: int
    expert_parallel: int
    whole_experts: bool
    sequence_slices: int
    splits_backward: bool
    copies_gradients: bool
    """Whether `gradient_bytes` are those of sums, and of gradients in the training precision beside them."""
    stack: Stack

    @cached_property
    def known(self) -> dict[LaneShape, MemoryParts]:
        """The parts of the shapes asked for so far."""
        return {}

    @cached_property
    def _layer_bytes(self) -> dict[tuple[int, int], dict[str, tuple[int, int]]]:
        return {}

    @cached_property
    def _parameters(self) -> dict[int, Parameters]:
        return {}

    def parameters(self, tensor_parallel: int) -> Parameters:
        """Parameters on one of so many tensor-parallel ranks."""
        found = self._parameters.get(tensor_parallel)
        if found is None:
            model = self.transformer
            found = self._parameters[tensor_parallel] = Parameters(
                layer_parameters_at(model, tensor_parallel, self.expert_parallel, self.whole_experts),
                layer_parameters_at(model, tensor_parallel),
                embedding_parameters_at(model, tensor_parallel),
                head_parameters_at(model, tensor_parallel),
                tied_copy_parameters_at(model, tensor_parallel),
                max(matmul.n * matmul.k for matmul in layer_matmuls(model, 1, tensor_parallel, 1, self.whole_experts)),
            )
        return found

    @cached_property
    def bucket_layers(self) -> int:
        """Layers of a bucket, which has one at least."""
        return bucket_layers(self.transformer)

    def layer_bytes(self, tensor_parallel: int, sequences: int) -> dict[str, tuple[int, int]]:
        """By mode of recomputation, bytes that a layer keeps of a micro-batch, and those that its recomputation brings back.

        Where micro-batches come in slices, of a slice: an equal part of what the whole sequences keep, so that each row of scores
        is of all their keys. Its keys and values are kept under every mode, for others attend to them.
        """
        found = self._layer_bytes.get((tensor_parallel, sequences))
        if found is None:
            software, slices = self.stack, self.sequence_slices
            kept_as = (self.transformer, sequences, self.slice_length * slices, tensor_parallel, self.sequence_parallel)
            softmax_bytes = self._unfused_softmax_bytes(tensor_parallel, sequences)

            def scaled(count: Callable[..., float], mode: str, with_softmax: bool) -> int:
                whole_bytes = count(*kept_as, mode, self.element_bytes, software.flash_attention, self.whole_experts)
                whole_bytes += softmax_bytes * with_softmax
                return round(software.activation_scale * whole_bytes / (self.context_parallel * slices))

            found = self._layer_bytes[tensor_parallel, sequences] = {
                mode: (
                    scaled(layer_activation_bytes, mode, mode in ("none", "pointwise")),
                    scaled(layer_recompute_peak_bytes, mode, mode in ("selective", "full")),
                )
                for mode in RECOMPUTE
            }
            if slices > 1:
                kept, again = found["full"]
                found["full"] = kept + self.key_value_bytes(tensor_parallel, sequences), again
        return found

    def _unfused_softmax_bytes(self, tensor_parallel: int, sequences: int) -> int:
        """Bytes of a layer's softmax in fp32 that is kept beside the cast one, where Megatron's fused kernel does not take it."""
        if not self.stack.fuses_some_softmax or self.element_bytes == 4:
            return 0
        length = self.slice_length * self.sequence_slices
        return 4 * unfused_scores(self.transformer, sequences, length, length, tensor_parallel, self.element_bytes)

    def key_value_bytes(self, tensor_parallel: int, sequences: int) -> int:
        """Bytes of a layer's keys and values of a slice of a micro-batch."""
        return key_value_bytes(self.transformer, sequences, self.slice_length, tensor_parallel, self.element_bytes)


class LaneShape(NamedTuple):
    """All that the bytes of a lane depend on besides the rules: where the lanes of two plans agree in it, they are alike."""

    tensor_parallel: int
    sequences: int
    in_flight: float
    """Of micro-batches, in activations of all its layers; then of the embedding and of the head."""
    embedding_in_flight: float
    head_in_flight: float
    none: int
    """Layers under each mode of recomputation, in the order of `RECOMPUTE`."""
    pointwise: int
    selective: int
    full: int
    embedding: bool
    head: bool
    boundaries: int
    shard: float
    embedding_shards: int
    head_shards: int
    communicators: int


@lru_cache(maxsize=256)
def _rules(
    transformer: Transformer,
    slice_length: int,
    precision: str,
    gradient_precision: str,
    optimizer: str,
    offload_optimizer: bool,
    sequence_parallel: bool,
    zero_stage: int,
    context_parallel: int,
    expert_parallel: int,
    whole_experts: bool,
    sequence_slices: int,
    splits_backward: bool,
    software: Stack,
) -> MemoryRules:
    element_bytes = PRECISION_BYTES[precision]
    state_bytes = 0 if offload_optimizer else 4 * OPTIMIZER_STATES[optimizer] + (4 if element_bytes < 4 else 0)
    gradient_bytes = PRECISION_BYTES[gradient_precision]
    copies_gradients = software.gradient_copy and gradient_bytes != element_bytes
    if copies_gradients:
        gradient_bytes += element_bytes
    return MemoryRules(
        transformer,
        slice_length,
        element_bytes,
        gradient_bytes,
        state_bytes,
        sequence_parallel,
        zero_stage,
        context_parallel,
        expert_parallel,
        whole_experts,
        sequence_slices,
        splits_backward,
        copies_gradients,
        software,
    )


def rules_of(plan: Plan, software: Stack) -> MemoryRules:
    """What all lanes of a plan share under a software stack. Plans that agree in it have the same object."""
    return _rules(
        plan.transformer,
        plan.slice_length,
        plan.precision,
        plan.gradient_precision,
        plan.optimizer,
        plan.offload_optimizer,
        plan.sequence_parallel,
        plan.zero_stage,
        plan.context_parallel,
        plan.expert_parallel,
        plan.whole_experts,
        plan.sequence_slices,
        SCHEDULES[plan.schedule].splits_backward,
        software,
    )


def memory_parts(plan: Plan, pipeline: int, stage: int, replica: int = 0, software: Stack | None = None) -> MemoryParts:
    """The parts on each device of one lane, given by its indices in the plan. Raises IndexError where there is none."""
    for p, s, r, parts in lane_parts(plan, software):
        if (p, s, r) == (pipeline, stage, replica):
            return parts
    raise IndexError(f"the plan has no lane with pipeline {pipeline}, stage {stage}, replica {replica}")


def peak_bytes(plan: Plan, cluster: Cluster) -> dict[str, int]:
    """Bytes at the peak on every device that the plan uses, in the plan's order; capacities are not asked.

    See `memory_parts` for what they are made of.
    """
    peaks: dict[str, int] = {}
    for p, s, r, parts in lane_parts(plan, cluster.stack):
        peaks.update(dict.fromkeys(plan.pipelines[p].stages[s].replicas[r].devices, parts.total))
    return peaks


def host_bytes(plan: Plan) -> dict[str, int]:
    """Bytes in the memory of each node that the plan uses, by its name; empty where no optimizer is offloaded.

    See `host_parameter_bytes` for what they are made of.
    """
    found: dict[str, int] = {}
    if plan.offload_optimizer:
        on_gpus = replace(plan, offload_optimizer=False)
        scale = host_parameter_bytes(plan.optimizer) / rules_of(on_gpus, stack("motley")).state_bytes
        for p, s, r, parts in lane_parts(on_gpus):
            for name in plan.pipelines[p].stages[s].replicas[r].devices:
                node = name.rpartition("/")[0]
                found[node] = found.get(node, 0) + round(scale * parts.optimizer)
    return found


def host_room_bytes(node: Node) -> int | None:
    """Bytes that a node's host has for offloaded optimizers; None where that is not known.

    Where the devices are CPUs, their memory is the host's, and there is no other.
    """
    if not is_cpu(node.gpu):
        return node.host_memory_bytes
    own_bytes = node.gpus * node.gpu.memory_bytes
    return own_bytes if node.host_memory_bytes is None else min(own_bytes, node.host_memory_bytes)


def host_parameter_bytes(optimizer: str) -> int:
    """Bytes in a host's memory of each parameter whose states are there: an optimizer's states, the parameter and its gradient.

    All are in fp32, whatever they are on the GPUs.
    """
    return 4 * (OPTIMIZER_STATES[optimizer] + 2)


def lane_parts(plan: Plan, software: Stack | None = None) -> Iterator[tuple[int, int, int, MemoryParts]]:
    """The parts of every lane, with the indices of its pipeline, stage and replica; without a software stack, of Motley's own.

    Raises InputError where a pipeline's layer ranges are not laid as the schedule takes them.
    """
    rules = rules_of(plan, software or stack("motley"))
    known = rules.known
    for p, s, r, shape in lane_shapes(plan):
        parts = known.get(shape)
        if parts is None:
            parts = known[shape] = shape_parts(rules, shape)
        yield p, s, r, parts


def lane_shapes(plan: Plan) -> Iterator[tuple[int, int, int, LaneShape]]:
    """The shape of every lane, with the indices of its pipeline, stage and replica. Raises InputError as `lane_parts` does."""
    held, known = count_holders(plan), dict[Hashable, list[tuple[int, int, LaneShape]]]()
    for p, pipeline in enumerate(plan.pipelines):
        build = pipeline.build
        if build not in known:
            check_ranges(plan.schedule, pipeline, f"pipelines[{p}]")
            known[build] = list(_shapes_of(plan, pipeline, held))
        for s, r, shape in known[build]:
            yield p, s, r, shape


def _shapes_of(plan: Plan, pipeline: Pipeline, held: Holders) -> Iterator[tuple[int, int, LaneShape]]:
    """The shape of each lane of a pipeline, with the indices of its stage and replica."""
    depth = len(pipeline.stages)
    place = {s: position for position, s in enumerate(pipeline.visiting_order)}
    crossings = [(a, b) for (a, _), (b, _) in pairwise(pipeline.chunks) if a != b]
    for s, part in enumerate(pipeline.stages):
        position = place[s]
        modes = part.recomputed()
        chunks = tuple(stop - start for start, stop in sorted(part.layers))
        shared = max((held.layers[start] for start, stop in part.layers if start < stop), default=0)
        only_first = (1, *(0,) * (len(chunks) - 1))
        flying, first_flying, last_flying = (
            held_by(plan.schedule, pipeline, position, weights, plan.sequence_slices)
            for weights in (chunks, only_first, only_first[::-1])
        )
        embedding, head = s == pipeline.chunks[0][0], s == pipeline.chunks[-1][0]
        if embedding or (head and plan.transformer.tied_embeddings):
            shared = max(shared, held.embedding)
        if head:
            shared = max(shared, held.head)
        for r, replica in enumerate(part.replicas):
            degree = len(replica.devices) // plan.context_parallel
            groups = (degree, plan.context_parallel, plan.expert_parallel, depth, shared)
            shape = LaneShape(
                degree,
                replica.sequences,
                flying,
                first_flying if embedding else 0,
                last_flying if head else 0,
                modes["none"],
                modes["pointwise"],
                modes["selective"],
                modes["full"],
                embedding,
                head,
                sum(s in ends for ends in crossings),
                held.shard(part.layers),
                held.embedding_shards,
                held.head_shards,
                sum(members > 1 for members in groups),
            )
            yield s, r, shape


def shape_parts(rules: MemoryRules, shape: LaneShape) -> MemoryParts:
    """The parts of a lane.

    ZeRO 1 divides the optimizer's states over the groups that hold a layer, 2 the gradients too, 3 the parameters too; the
    experts' over as many fewer groups as they are divided over themselves, so that their share is the same. Of what is
    divided, two of the largest buckets are whole besides: of gradients the one that is made and the one that is scattered, of
    parameters the one at work and the one that is gathered. Embedding and head, which are used at every micro-batch by one
    stage alone, stay whole but for their states.
    """
    model, degree = rules.transformer, shape.tensor_parallel
    counts = dict(zip(RECOMPUTE, (shape.none, shape.pointwise, shape.selective, shape.full), strict=True))
    layers = sum(counts.values())
    software, ranks = rules.stack, rules.context_parallel
    parameters = rules.parameters(degree)
    layer_shards = shape.shard * parameters.layer_undivided
    embedding = parameters.embedding if shape.embedding else 0
    head = parameters.head if shape.head else 0
    copy = parameters.copy if shape.head and not shape.embedding else 0
    end_parameters = embedding + head + copy
    whole = layers * parameters.layer + end_parameters
    ends = embedding / shape.embedding_shards + head / shape.head_shards + copy / shape.embedding_shards
    divided_layers = min(whole, end_parameters + layer_shards + 2 * rules.bucket_layers * parameters.layer)
    of_layer = rules.layer_bytes(degree, shape.sequences)
    activations = sum(count * of_layer[mode][0] for mode, count in counts.items())
    in_layer = max((of_layer["none"][0] + of_layer[mode][1] for mode, count in counts.items() if count), default=0)
    matrix_bytes = 0 if rules.copies_gradients else rules.element_bytes
    of_matrix = parameters.layer_matrix * matrix_bytes if layers and rules.zero_stage < 2 else 0
    working = in_layer + of_matrix
    tokens = shape.sequences * rules.slice_length // ranks
    divided = degree if rules.sequence_parallel else 1
    activations = round(shape.in_flight * activations)
    if shape.embedding and model.projected_embeddings:  # the input of the projection
        activations += round(shape.embedding_in_flight * (tokens * model.embedding_width * rules.element_bytes // divided))
    logits = 0
    if shape.head:
        logits, gradient = logits_bytes(rules, shape)
        in_head = round(software.logits_scale * gradient)
        of_head = max(head, copy, embedding if model.tied_embeddings else 0) * matrix_bytes
        # Where backwards are split, the halves with the matrices come one by one.
        both = in_layer + in_head + max(of_matrix, of_head)
        working = both if rules.splits_backward else max(working, in_head + of_head)
    boundary = boundary_bytes(model, shape.sequences, rules.slice_length, rules.element_bytes) // (divided * ranks)
    of_keys_and_values = rules.key_value_bytes(degree, shape.sequences)
    attended = of_keys_and_values // ranks if ranks > 1 else 0
    before = 2 * rules.sequence_slices - 1 if rules.sequence_slices > 1 else 0
    allocated = MemoryParts(
        parameters=round((divided_layers if rules.zero_stage >= 3 else whole) * rules.element_bytes),
        gradients=round((divided_layers if rules.zero_stage >= 2 else whole) * rules.gradient_bytes),
        optimizer=round((layer_shards + ends if rules.zero_stage >= 1 else whole) * rules.state_bytes),
        activations=activations,
        working=working,
        logits=round(software.logits_scale * shape.head_in_flight * logits),
        buffers=shape.boundaries * 2 * 2 * boundary + 2 * 2 * attended + before * layers * of_keys_and_values,
        reserve=0,
        context=0,
    )
    return replace(
        allocated,
        reserve=round(software.fragmentation * allocated.total),
        context=round(software.context_bytes) + shape.communicators * COMMUNICATOR_BYTES,
    )


def logits_bytes(rules: MemoryRules, shape: LaneShape) -> tuple[int, int]:
    """Bytes that a head keeps of each micro-batch in flight, and of the gradient of one micro-batch's logits."""
    model, degree, ranks = rules.transformer, shape.tensor_parallel, rules.context_parallel
    tokens = shape.sequences * rules.slice_length // ranks
    kept_as = (shape.sequences, rules.slice_length, degree, rules.sequence_parallel)
    gradient = tokens * -(-model.padded_vocab // degree) * 4  # in fp32, as the softmax it is made from
    return head_activation_bytes(model, *kept_as, rules.element_bytes) // ranks, gradient
