"""A quick price of a draft, in seconds, by which planners rank drafts before they have the best ones judged.

It is no judge: it knows each stage's computation and transfers as the simulation does, but adds them up by the closed form of
a schedule's steady state instead of following them, and counts contention only as a busy link's share of time. What it
ranks first still has to be simulated.

A pipeline of stages j takes, with forward F_j, backward B_j, and c_j for a message from stage j to stage j + 1,

    sum of all F_j + B_j + 2 c_j, once, to fill and drain it, and then for each further micro-batch one period:
    1F1B     the largest mean, over every run of consecutive stages, of F_j + B_j and of 2 c_j inside the run:
             a stage of 1F1B waits for its neighbour's answer, so that messages count although they do not block;
             where it holds more micro-batches it waits for the answer to an earlier one, and the sum is shared by as many more;
             where backwards come in halves, the weight half counts in the first stage of the run alone
    GPipe    max(F_j, c_j) + max(B_j, c_j), over all stages

A link that all messages together keep busy longer than this sets the period instead. Gradients of the layers held by several
pipelines are then reduced, last layers first, each reduction when its members are ready and free, and under ZeRO their
parameters gathered. Left out: an optimizer's step on the GPUs, and everything that depends on exact moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from partition.drafts import Draft, Settings, stage, updated_parameters
from sim.cost.collectives import across_lanes, between_lanes, collective, dispatch, ring_exchange
from sim.cost.compute import ComputeCost, Inside, TensorCollective, host_step_s
from sim.cost.network import Network, Transfer, scaled
from sim.cost.pieces import layer_seconds
from sim.cost.traffic import ring_steps_s
from sim.spec.cluster import Cluster, Node
from sim.spec.counts import (
    PRECISION_BYTES,
    boundary_bytes,
    embedding_parameters,
    head_parameters,
    layer_parameter_parts,
)
from sim.spec.gpu import is_cpu
from sim.spec.job import Job
from sim.spec.plan import Pipeline, Plan, Stage, tensor_groups
from sim.spec.program import Backward, BackwardWeight, Compute, Forward, Lane
from sim.spec.transformer import Moe

Devices: TypeAlias = tuple[str, ...]
Sign: TypeAlias = tuple[tuple[float, ...], tuple[float, ...], tuple[str, ...]]
"""Forward and backward seconds of a pipeline's stages, and their nodes."""

Exchange: TypeAlias = tuple[float, float, tuple[tuple[object, float], ...]]
"""Seconds of an exchange of gradients, of the gather of parameters after it, and those that the former keeps each link busy."""

ROUNDS = 3
"""How often the price is corrected for the contention that follows from it."""
MOST_COURSES, MOST_EXCHANGES = 20_000, 100_000
"""So many pipelines, and exchanges between certain devices, are remembered."""
FEW_STAGES = 24
"""Up to so many, loops over stages are faster than arrays."""
CROWDED = 0.95
"""The share of a link's time that others may take before a message on it is priced as if they took no more."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the pieces of a stage for one micro-batch, with their tensor-parallel collectives."""

    layer_forward_s: float
    layer_backward_s: float
    recompute_s: float
    """What full recomputation adds to the backward of each layer."""
    selective_s: float
    """What selective recomputation adds to it."""
    pointwise_s: float
    """What pointwise recomputation adds to it, in the weight half."""
    embedding_forward_s: float
    embedding_backward_s: float
    head_forward_s: float
    head_backward_s: float
    layer_weight_s: float
    """Of the backward of each layer, the weight half."""
    head_weight_s: float
    micro_batch_s: float
    """What each pass takes besides its layers."""

    def forward_s(self, layers: int, first: bool, last: bool) -> float:
        """The forward pass of so many layers, and of the ends."""
        ends_s = first * self.embedding_forward_s + last * self.head_forward_s
        return self.micro_batch_s + layers * self.layer_forward_s + ends_s

    def backward_s(self, counts: Iterable[int], first: bool, last: bool) -> float:
        """The backward pass of so many layers in each mode of recomputation, in the order of `RECOMPUTE`, and of the ends."""
        none, pointwise, selective, full = counts
        ends_s = first * self.embedding_backward_s + last * self.head_backward_s
        again_s = pointwise * self.pointwise_s + selective * self.selective_s + full * self.recompute_s
        return self.micro_batch_s + (none + pointwise + selective + full) * self.layer_backward_s + again_s + ends_s

    def weight_s(self, counts: Iterable[int], last: bool) -> float:
        """Of a backward in halves, the weight half."""
        none, pointwise, selective, full = counts
        layers = none + pointwise + selective + full
        return layers * self.layer_weight_s + pointwise * self.pointwise_s + last * self.head_weight_s


@dataclass(frozen=True)
class Message:
    """A transfer between two stages, per byte of an activation: alone, and what it puts on each link if it leaves its node."""

    latency_s: float
    s_per_byte: float
    loads: tuple[tuple[int, float], ...]

    def seconds(self, num_bytes: float, twins: int = 1, busy: Mapping[int, float] | None = None, per_s: float = 0.0) -> float:
        """Seconds of a message that so many twins send at once, `per_s` times a second, on links busy for these shares."""
        seconds = self.s_per_byte * num_bytes
        if self.loads:
            seconds *= twins
            if busy:
                others = max(busy[link] for link, _ in self.loads) - per_s * seconds
                seconds /= 1 - min(max(others, 0.0), CROWDED)
        return self.latency_s + seconds


@dataclass(frozen=True)
class Course:
    """What one pipeline does for each micro-batch: the passes of its stages, the messages between them there and back."""

    schedule: str
    micro_batches: int
    """Slices of them where sequences come in slices, as in all that follows."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    messages: tuple[tuple[Message, Message], ...]
    activation_bytes: int
    ahead: tuple[int, ...] = ()
    """How many micro-batches more than the schedule says a stage holds for the next message than the stage after it does."""
    weight_s: tuple[float, ...] = ()
    """Of the backwards of the stages, the weight halves; none where a gradient waits for them, too."""

    def ends(self, twins: int = 1, busy: Mapping[int, float] | None = None, total_s: float = 1.0) -> tuple[float, float]:
        """Seconds that it takes once, and for each micro-batch.

        It may run beside twins, with links that are busy for these shares of an iteration of total_s.
        """
        per_s, size = self.micro_batches / total_s, self.activation_bytes
        waits = [
            (there.seconds(size, twins, busy, per_s) + back.seconds(size, twins, busy, per_s)) / 2
            for there, back in self.messages
        ]
        return schedule_ends_s(
            self.schedule, self.micro_batches, self.forward_s, self.backward_s, waits, self.ahead, self.weight_s
        )

    def least_fill_s(self) -> float:
        """Seconds by which it takes longer than its slowest stage works, at least, without messages.

        A stage waits for its first micro-batch, and those before it for its last gradient.
        """
        both_s = [forward_s + backward_s for forward_s, backward_s in zip(self.forward_s, self.backward_s, strict=True)]
        weight_s = self.weight_s or (0.0,) * len(both_s)
        before_s = [0.0, *accumulate(both - weight for both, weight in zip(both_s, weight_s[1:], strict=False))]
        ends = [before + self.micro_batches * own for before, own in zip(before_s, both_s, strict=True)]
        return max(ends) - self.micro_batches * max(both_s)

    def end_s(self, twins: int = 1, busy: Mapping[int, float] | None = None, total_s: float = 1.0) -> float:
        """When its last backward ends. See `ends`."""
        fill_s, period_s = self.ends(twins, busy, total_s)
        return fill_s + self.micro_batches * period_s


@dataclass(frozen=True)
class _Sorts:
    """Nodes and devices that are alike for what goes between nodes."""

    nodes: Sequence[Sequence[str]]
    """The nodes of each sort, in the order of rings and trees; none where every node has figures of its own."""
    places: Mapping[str, tuple[int, int]]
    """Of a node: where it is in that order, and its sort."""
    ways: Mapping[str, Sequence[Sequence[str]]]
    """The devices of a node, by what decides their paths to other nodes."""
    devices: Mapping[str, tuple[str, int]]
    """Of a device: its node, and which of the node's ways it has."""


class Pricing:
    """Quick prices of the drafts of one job on one cluster. What it finds out of stages and links it keeps."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self.cluster, self.job = cluster, job
        self.network = Network(cluster)
        self._computation: dict[object, tuple[tuple[float, ...], tuple[tuple[TensorCollective, ...], ...]]] = {}
        self._stages: dict[object, StageSeconds] = {}
        self._alike: dict[StageSeconds, StageSeconds] = {}
        self._dispatches: dict[Devices, Transfer] = {}
        self._fewer: dict[object, float] = {}
        self._collective_seconds: dict[tuple[TensorCollective, Devices], float] = {}
        self._messages: dict[object, Message] = {}
        self._messages_alike: dict[object, Message] = {}
        self._courses: dict[object, tuple[tuple[Stage, ...], Course]] = {}
        self._asked: dict[object, Exchange] = {}
        self._exchanges: dict[object, tuple[float, float, tuple[tuple[tuple[tuple[str, ...], ...], float], ...]]] = {}

    # --- Pieces ---

    def stage(self, devices: Devices, micro_batch: int, settings: Settings) -> StageSeconds:
        """The seconds of the pieces of a stage on these devices. They are as the simulation's, alone on their links.

        Where sequences come in slices they are the mean of those of the slices. Of context ranks the keys and values go round
        as if they hid behind the rest, or it behind them.
        Devices on which they are equal have the same object.
        """
        key = (devices, micro_batch, settings.sequence_parallel, settings.sequence_slices, settings.context_parallel)
        found = self._stages.get(key)
        if found is None:
            computed, collectives = self._computed(devices, micro_batch, settings)
            tensor, *_ = groups = tensor_groups(devices, settings.context_parallel)
            ring = tuple([group[0] for group in groups])
            all_s = [
                max(
                    seconds + sum(self._collective_s(c, tensor) for c in inside if c.group != "context"),
                    sum(self._collective_s(c, ring) for c in inside if c.group == "context"),
                )
                for seconds, inside in zip(computed, collectives, strict=True)
            ]
            forward, backward, pointwise, selective, recompute, *ends, weight, weight_head = all_s
            with_embedding, embedding_back, with_head, head_back = ends
            made = StageSeconds(
                layer_forward_s=forward,
                layer_backward_s=backward,
                recompute_s=recompute - backward,
                selective_s=selective - backward,
                pointwise_s=pointwise - backward,
                embedding_forward_s=with_embedding - forward,
                embedding_backward_s=embedding_back - backward,
                head_forward_s=with_head - forward,
                head_backward_s=head_back - backward,
                layer_weight_s=weight,
                head_weight_s=weight_head - weight,
                micro_batch_s=self.cluster.stack.micro_batch_s,
            )
            found = self._stages[key] = self._alike.setdefault(made, made)
        return found

    def _computed(
        self, devices: Devices, micro_batch: int, settings: Settings
    ) -> tuple[tuple[float, ...], tuple[tuple[TensorCollective, ...], ...]]:
        """Seconds and collectives of the passes through one layer: plain, recomputed, with embedding, with head."""
        kinds = tuple(dict.fromkeys(id(self.cluster.device(name).gpu) for name in devices))
        slices, ranks = settings.sequence_slices, settings.context_parallel
        key = (kinds, len(devices), micro_batch, settings.sequence_parallel, slices, ranks)
        found = self._computation.get(key)
        if found is None:
            plan = Plan(
                cluster=self.cluster.name,
                model=replace(self.job.model, name="probe", layers=1),
                sequence_length=self.job.sequence_length,
                global_batch=micro_batch,
                pipelines=(Pipeline(micro_batch, 1, (stage(devices, (0, 1), micro_batch),)),),
                precision=self.job.precision,
                gradient_precision=self.job.gradient_precision,
                sequence_parallel=settings.sequence_parallel,
                sequence_slices=slices,
                context_parallel=ranks,
            )
            cost = ComputeCost(plan, self.cluster)
            whole = ((0, 1),), (0, micro_batch), 1, True, True
            lane = Lane("probe", 0, 0, 0, devices, *whole, context_parallel=ranks, sequence_slices=slices)
            plain = Inside(1, 0, 0, 0, False, False)
            first, last = plain._replace(embedding=True), plain._replace(head=True)
            asked: tuple[tuple[type[Compute], Inside], ...] = (
                (Forward, plain),
                (Backward, plain),
                (Backward, plain._replace(pointwise=1)),
                (Backward, plain._replace(selective=1)),
                (Backward, plain._replace(full=1)),
                (Forward, first),
                (Backward, first),
                (Forward, last),
                (Backward, last),
                (BackwardWeight, plain),
                (BackwardWeight, last),
            )
            found = self._computation[key] = (
                tuple([sum([cost.passing_s(lane, kind, inside, i) for i in range(slices)]) / slices for kind, inside in asked]),
                tuple([cost.collectives_of(lane, kind, inside) for kind, inside in asked]),
            )
        return found

    def _collective_s(self, inner: TensorCollective, devices: Devices) -> float:
        """Seconds of some equal collectives, alone on their links."""
        key = (inner, devices)
        found = self._collective_seconds.get(key)
        if found is None:
            if inner.kind == "ring":
                transfer = ring_exchange(self.network, devices, inner.num_bytes, inner.count * (len(devices) - 1))
            else:
                transfer = collective(self.network, inner.kind, devices, inner.num_bytes, inner.count)
            steps_s = ring_steps_s(self.network, self.cluster.stack, (devices,), (inner,))
            found = self._collective_seconds[key] = self.network.alone_s(transfer) + steps_s
        return found

    def with_fewer_experts(self, devices: Devices, sequences: int, settings: Settings) -> float:
        """How many times as long a layer computes where a GPU holds a part of the experts."""
        own = settings.expert_parallel, settings.whole_experts
        if own == (1, False):
            return 1.0
        kind, tensor = self.cluster.device(devices[0]).gpu, len(devices)
        key = (id(kind), tensor, sequences, own)
        if key not in self._fewer:
            job, stack = self.job, self.cluster.stack
            few, all_of_them = (
                layer_seconds(kind, stack, job.model, sequences, job.sequence_length, tensor, tensor > 1, job.precision, 1, *held)
                for held in (own, (1, False))
            )
            self._fewer[key] = (few.forward_s + few.backward_s) / (all_of_them.forward_s + all_of_them.backward_s)
        return min(1.0, self._fewer[key])

    def experts_s(self, groups: Sequence[Devices], sequences: int, settings: Settings) -> float:
        """Seconds in which tokens go to their experts and back, in both passes of a micro-batch through a layer.

        `groups` are the tensor-parallel ones that hold it, in the plan's order.
        """
        experts, first = self.job.model.experts, groups[0]
        if experts is None or settings.expert_parallel == 1:
            return 0.0
        stream_bytes, whole = self.activation_bytes(sequences), settings.whole_experts
        sharing = groups[: settings.expert_copies(len(first))]
        holders = tuple([device for group in sharing for device in (group if whole else group[:1])])
        seconds = 4 * self.dispatch_s(holders, stream_bytes * experts.top_k / len(first), experts)
        return seconds + (self.routed_s(first, stream_bytes, experts, whole) if len(first) > 1 else 0.0)

    def dispatch_s(self, devices: Devices, num_bytes: float, experts: Moe) -> float:
        """Seconds in which tokens go to their experts on devices of which each has so many bytes, alone on their links."""
        transfer = self._dispatches.get(devices)
        if transfer is None:
            groups = [(device, devices) for device in devices]
            transfer = self._dispatches[devices] = dispatch(self.network, groups, experts, self.cluster.stack.node_dispatch)
        return self.network.alone_s(scaled(transfer, num_bytes))

    def routed_s(self, devices: Devices, stream_bytes: float, experts: Moe, whole: bool = False) -> float:
        """Seconds by which the collectives of tensor ranks take longer in both passes of a layer whose experts are divided.

        They gather what arrived for the experts, and scatter as much behind these, in the place of the one stream of a dense
        MLP, of which the weight half gathers the input once more; where ranks have whole experts, nothing (so that this is below
        0). See `sim.cost.compute.ComputeCost.collectives`.
        """

        def each_s(kind: str, num_bytes: float) -> float:
            return self._collective_s(TensorCollective(kind, num_bytes, 1, "routed"), devices)

        routed_s = 0.0
        if not whole:
            routed_s = 2 * sum([each_s(kind, experts.top_k * stream_bytes) for kind in ("all_gather", "reduce_scatter")])
        if experts.shared_experts:
            return routed_s
        return routed_s - 3 * each_s("all_gather", stream_bytes) - 2 * each_s("reduce_scatter", stream_bytes)

    def offloaded_step_s(self, pipelines: Iterable[Iterable[tuple[Devices, int]]], copies: int, settings: Settings) -> float:
        """Seconds of the longest optimizer step in a host's memory; 0.0 where the states are on the GPUs.

        Of pipelines the stages' devices and numbers of layers are given, of `copies` pipelines those that differ are enough.
        """
        if not settings.offload_optimizer:
            return 0.0
        job, longest_s = self.job, 0.0
        for pipeline in pipelines:
            stages = list(pipeline)
            for s, (devices, layers) in enumerate(stages):
                first, last, dividing = s == 0, s == len(stages) - 1, copies if settings.zero_stage else 1
                own = updated_parameters(job, len(devices), layers, first, last, dividing)
                node = self.cluster.device(devices[0]).node
                if is_cpu(node.gpu):
                    continue  # which is its own host
                longest_s = max(longest_s, host_step_s(node, own, job.precision, job.gradient_precision, job.optimizer))
        return longest_s

    def message(self, sender: Devices, receiver: Devices, settings: Settings) -> Message:
        """A byte of an activation, or of its gradient, from one stage to another."""
        key = (sender, receiver, settings.sequence_parallel)
        found = self._messages.get(key)
        if found is None:
            transfer = between_lanes(self.network, sender, receiver, 1.0, settings.sequence_parallel)
            shared = transfer.loads if self._crosses(sender, receiver) else ()
            seconds = self.network.alone_s(transfer) - transfer.latency_s
            found = self._messages[key] = Message(transfer.latency_s, seconds, shared)
        return found

    def message_alike(self, sender: Devices, receiver: Devices, settings: Settings) -> Message:
        """As `message`, but the links that it names may be others that are like those."""
        key = (sender, receiver, settings.sequence_parallel)
        found = self._messages_alike.get(key)
        if found is None:
            alike = self.alike((sender, receiver)), settings.sequence_parallel
            if alike not in self._messages_alike:
                self._messages_alike[alike] = self.message(sender, receiver, settings)
            found = self._messages_alike[key] = self._messages_alike[alike]
        return found

    def _crosses(self, sender: Devices, receiver: Devices) -> bool:
        """Whether a message leaves its node."""
        device = self.cluster.device
        return len({device(name).node.name for name in (*sender, *receiver)}) > 1

    def alike(self, groups: Sequence[Devices]) -> object:
        """What decides the messages between a pipeline's stages: the sorts of its nodes, which of them are one, and the ways out.

        Where nodes or links have figures of their own it is the names of the devices.
        """
        sorts = self._sorts
        if not sorts.nodes:
            return tuple(groups)
        met: dict[str, int] = {}
        found = []
        for devices in groups:
            places = [sorts.devices[name] for name in devices]
            found.append(tuple([(sorts.places[node][1], met.setdefault(node, len(met)), way) for node, way in places]))
        return tuple(found)

    # --- Pipelines ---

    def course(self, pipeline: Pipeline, settings: Settings) -> Course:
        """What a pipeline does for each micro-batch."""
        # Searches change a few pipelines at a time, and the others' stages are the same objects again.
        key = (id(pipeline.stages), pipeline.micro_batch, settings)
        stages, found = self._courses.get(key, (None, None))
        if found is None or stages is not pipeline.stages:
            if len(self._courses) >= MOST_COURSES:
                self._courses.clear()
            found = self._course(pipeline, settings)
            self._courses[key] = pipeline.stages, found
        micro_batches = pipeline.micro_batches * settings.sequence_slices
        return found if found.micro_batches == micro_batches else replace(found, micro_batches=micro_batches)

    def _course(self, pipeline: Pipeline, settings: Settings) -> Course:
        """See `course`."""
        forward, backward, weight = [], [], []
        deepest = len(pipeline.stages) - 1
        for s, part in enumerate(pipeline.stages):
            seconds = self.stage(part.replicas[0].devices, pipeline.micro_batch, settings)
            counts = part.recomputed().values()
            forward.append(seconds.forward_s(part.layer_count, s == 0, s == deepest))
            backward.append(seconds.backward_s(counts, s == 0, s == deepest))
            if settings.schedule == "split-1f1b":
                weight.append(seconds.weight_s(counts, s == deepest))
        lanes = [part.replicas[0].devices for part in pipeline.stages]
        messages = tuple((self.message(a, b, settings), self.message(b, a, settings)) for a, b in pairwise(lanes))
        size = self.activation_bytes(pipeline.micro_batch, settings.sequence_slices)
        said = any(part.in_flight is not None for part in pipeline.stages)
        ahead = ahead_of(pipeline.in_flight) if said else ()
        passes = tuple(forward), tuple(backward)
        micro_batches = pipeline.micro_batches * settings.sequence_slices
        return Course(settings.schedule, micro_batches, *passes, messages, size, ahead, tuple(weight))

    def activation_bytes(self, micro_batch: int, slices: int = 1) -> int:
        """Bytes of the activation of one micro-batch, or of one of so many slices of it, between two stages."""
        length = self.job.sequence_length // slices
        return boundary_bytes(self.job.model, micro_batch, length, PRECISION_BYTES[self.job.precision])

    # --- Drafts ---

    def price_s(self, draft: Draft, settings: Settings) -> float:
        """Seconds of one iteration of a draft. Contention is a rough guess; see the head of this file."""
        courses = [self.course(pipeline, settings) for pipeline in draft]
        together = self._loads_s(courses)
        floor_s = max(together.values(), default=0.0)
        # Twins do the same on the same nodes: they keep step, and send at the same moments.
        twins: dict[Sign, int] = {}
        signs = []
        for course, pipeline in zip(courses, draft, strict=True):
            nodes = tuple(self._node(part.replicas[0].devices) for part in pipeline.stages)
            signs.append((course.forward_s, course.backward_s, nodes))
            twins[signs[-1]] = twins.get(signs[-1], 0) + 1
        different = {(sign, course.micro_batches): course for sign, course in zip(signs, courses, strict=True)}
        ends = {key: course.end_s(twins[key[0]]) for key, course in different.items()}
        for _ in range(ROUNDS if together else 0):
            total_s = max(*ends.values(), floor_s)
            busy = {link: seconds / total_s for link, seconds in together.items()}
            # What is busier takes longer, and what takes longer is less busy: the geometric mean leads to where both agree.
            ends = {key: math.sqrt(ends[key] * course.end_s(twins[key[0]], busy, total_s)) for key, course in different.items()}
        done = [max(ends[sign, course.micro_batches], floor_s) for sign, course in zip(signs, courses, strict=True)]
        stages = ([(part.replicas[0].devices, part.layer_count) for part in pipeline.stages] for pipeline in draft)
        synchronised_s = self._synchronised_s(draft, settings, courses, done)
        return synchronised_s + self.offloaded_step_s(stages, len(draft), settings)

    def _node(self, devices: Devices) -> str:
        return self.cluster.device(devices[0]).node.name

    def _loads_s(self, courses: Sequence[Course]) -> dict[int, float]:
        """Seconds that the messages of an iteration keep each link busy that one of them crosses between nodes."""
        links = self.network.links
        found: dict[int, float] = {}
        for course in courses:
            num_bytes = course.micro_batches * course.activation_bytes
            for pair in course.messages:
                for message in pair:
                    for link, load in message.loads:
                        found[link] = found.get(link, 0.0) + load * num_bytes / links[link].capacity_bytes_per_s
        return found

    def _synchronised_s(self, draft: Draft, settings: Settings, courses: Sequence[Course], done: Sequence[float]) -> float:
        """When gradients are reduced and parameters gathered, given the end of each pipeline's last backward."""
        model = self.job.model
        last = [len(pipeline.stages) - 1 for pipeline in draft]
        if len(draft) == 1 and not (model.tied_embeddings and last[0]):
            return done[0]
        ready = []
        for course, end_s in zip(courses, done, strict=True):
            # The last backward goes from the last stage to the first.
            after = accumulate(course.backward_s[:-1], initial=0.0)
            ready.append([end_s - seconds for seconds in after])
        reduce = "all_reduce" if settings.zero_stage == 0 else "reduce_scatter"
        element_bytes = PRECISION_BYTES[self.job.precision]
        free: dict[tuple[int, int], float] = {}
        gathering: dict[tuple[int, int], float] = {}
        loads: dict[object, float] = {}
        first_s, reduced_s = math.inf, max(done)
        for parameters, experts, members in self._shared(draft, last):
            if len(members) < 2 or parameters == 0:
                continue
            lanes = tuple(draft[p].stages[s].replicas[0].devices for p, s in members)
            copies = settings.expert_copies(len(lanes[0])) if experts else 1
            if copies == 1:
                reduce_s, gather_s, transfer_loads = self._exchange(reduce, lanes, parameters)
            else:  # experts among those that hold the same ones, after all else
                parts = [(lanes, parameters - experts), (lanes[::copies], experts // copies)]
                exchanges = [self._exchange(reduce, *part) for part in parts if len(part[0]) > 1]
                reduce_s, gather_s = sum(exchange[0] for exchange in exchanges), sum(exchange[1] for exchange in exchanges)
                transfer_loads = tuple(chain.from_iterable(exchange[2] for exchange in exchanges))
            begin_s = max(max(free.get((p, s), 0.0), ready[p][s]) for p, s in members)
            end_s = begin_s + reduce_s
            first_s, reduced_s = min(first_s, begin_s), max(reduced_s, end_s)
            for link, load_s in transfer_loads:
                loads[link] = loads.get(link, 0.0) + load_s
            for member in members:
                free[member] = end_s
                gathering[member] = gathering.get(member, 0.0) + gather_s
        floor_s = max(loads.values(), default=0.0)
        reduced_s = max(reduced_s, first_s + floor_s) if loads else reduced_s
        # A gather puts as many elements on the same links as the reduce-scatter did.
        floor_s *= element_bytes / PRECISION_BYTES[self.job.gradient_precision] if settings.zero_stage else 0.0
        return reduced_s + max(floor_s, max(gathering.values(), default=0.0))

    def exchange_s(self, lanes: tuple[Devices, ...], parameters: int) -> tuple[float, float]:
        """Seconds of a reduce-scatter of so many gradients among lanes, and of a gather of as many parameters, each alone."""
        return self._exchange("reduce_scatter", lanes, parameters)[:2]

    def _exchange(self, reduce: str, lanes: tuple[Devices, ...], parameters: int) -> Exchange:
        """Seconds of a reduction of so many gradients, of the gather that follows under ZeRO, and the former's loads."""
        asked = (reduce, lanes, parameters)
        known = self._asked.get(asked)
        if known is None:
            if len(self._asked) >= MOST_EXCHANGES:
                self._asked.clear()
            known = self._asked[asked] = self._found_exchange(*asked)
        return known

    def _found_exchange(self, reduce: str, lanes: tuple[Devices, ...], parameters: int) -> Exchange:
        """See `_exchange`."""
        likened, names = self._likened(lanes, ordered=reduce == "all_reduce")
        key = (reduce, likened, parameters)
        found = self._exchanges.get(key)
        if found is None:
            network = self.network
            transfer = across_lanes(network, reduce, likened, parameters * PRECISION_BYTES[self.job.gradient_precision])
            gather_s = 0.0
            if reduce == "reduce_scatter":
                num_bytes = parameters * PRECISION_BYTES[self.job.precision]
                gather_s = network.alone_s(across_lanes(network, "all_gather", likened, num_bytes))
            loads = []
            for number, carried in transfer.loads:
                link = network.links[number]
                ends = tuple([tuple(end.split("/")) for end in link.name.split(">")])
                loads.append((ends, carried / link.capacity_bytes_per_s))
            found = self._exchanges[key] = network.alone_s(transfer), gather_s, tuple(loads)
        reduce_s, gather_s, held = found
        # A link's end is a device, or something of a node.
        return reduce_s, gather_s, tuple([(tuple([_renamed(end, names) for end in ends]), load_s) for ends, load_s in held])

    def _likened(self, lanes: tuple[Devices, ...], ordered: bool) -> tuple[tuple[Devices, ...], Mapping[str, str]]:
        """The lanes on the first nodes and devices of their sorts, and the names there of what they are on; or none, as they are.

        What they exchange takes as long there, and fewer exchanges are to be found out about. With `ordered` the nodes keep
        their order, on which the load of trees depends; rings are the same in any.
        """
        sorts = self._sorts
        by_node: dict[str, list[tuple[tuple[int, ...], Devices]]] = {}
        for lane in lanes:
            node = sorts.devices[lane[0]][0]
            by_node.setdefault(node, []).append((tuple([sorts.devices[name][1] for name in lane]), lane))
            if any(sorts.devices[name][0] != node for name in lane):
                return lanes, {}
        if not sorts.nodes or len(by_node) == 1:
            return lanes, {}
        placed = [(*sorts.places[node], sorted(held), node) for node, held in by_node.items()]
        placed.sort(key=lambda entry: entry[0] if ordered else (entry[1], [ways for ways, _ in entry[2]]))
        found, names, met, last = [], {}, [0] * len(sorts.nodes), -1
        for _, sort, held, node in placed:
            alike = sorts.nodes[sort]
            while ordered and met[sort] < len(alike) and sorts.places[alike[met[sort]]][0] < last:
                met[sort] += 1
            if met[sort] == len(alike):
                return lanes, {}
            chosen = alike[met[sort]]
            met[sort] += 1
            last = sorts.places[chosen][0]
            names[chosen] = node
            used = [0] * len(sorts.ways[chosen])
            for ways, lane in held:
                made = []
                for way, name in zip(ways, lane, strict=True):
                    first = sorts.ways[chosen][way][used[way]]
                    used[way] += 1
                    made.append(first)
                    names[first] = name
                found.append(tuple(made))
        return tuple(found), names

    @cached_property
    def _sorts(self) -> _Sorts:
        """Which nodes and devices are alike for what goes between nodes."""
        cluster = self.cluster
        numbers: dict[Node, int] = {}
        places: dict[str, tuple[int, int]] = {}
        nodes: list[list[str]] = []
        for place, node in enumerate(sorted(cluster.nodes, key=lambda node: (node.site, node.rack or ""))):
            sort = numbers.setdefault(replace(node, name="", rack=None), len(numbers))
            if sort == len(nodes):
                nodes.append([])
            nodes[sort].append(node.name)
            places[node.name] = place, sort
        ways: dict[str, dict[object, list[str]]] = {node.name: {} for node in cluster.nodes}
        devices = {}
        for device in cluster.devices:
            own, way = ways[device.node.name], self.network.way_out(device.name)
            own.setdefault(way, []).append(device.name)
            devices[device.name] = device.node.name, list(own).index(way)
        single = cluster.bandwidth_matrix is not None or cluster.link_overrides or cluster.fabric.oversubscription > 1
        if single or len({node.site for node in cluster.nodes}) > 1:
            nodes = []
        return _Sorts(nodes, places, {node: list(own.values()) for node, own in ways.items()}, devices)

    def _shared(self, draft: Draft, last: Sequence[int]) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """Parameters that several stages may hold, and those of experts among them, last layers first, with the (pipeline, stage)
        that hold them."""
        model, n = self.job.model, self.job.model.layers
        ends = [(p, s) for p, s in enumerate(last)]
        yield head_parameters(model), 0, ends
        starts = [[part.layers[0][0] for part in pipeline.stages] for pipeline in draft]
        cuts = sorted({start for found in starts for start in found} | {n})
        at = list(last)
        layer = layer_parameter_parts(model)
        for start, stop in reversed(list(pairwise(cuts))):
            for p, found in enumerate(starts):
                while found[at[p]] > start:
                    at[p] -= 1
            yield (stop - start) * layer.total, (stop - start) * layer.experts, list(enumerate(at))
        begins = [(p, 0) for p in range(len(draft))]
        tied = [end for end in ends if end[1]] if model.tied_embeddings else []
        yield embedding_parameters(model), 0, begins + tied


def _renamed(end: Sequence[str], names: Mapping[str, str]) -> str:
    """The name of a link's end, made of its parts, where devices and nodes have other names."""
    name = "/".join(end)
    return names.get(name) or "/".join([names.get(end[0], end[0]), *end[1:]])


def ahead_of(in_flight: Sequence[int]) -> tuple[int, ...]:
    """How many micro-batches more than under 1F1B each stage but the last holds for the message to the next one."""
    return tuple([a - b - 1 for a, b in pairwise(in_flight)])


def schedule_period_s(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    waits: Sequence[float],
    ahead: Sequence[int] = (),
    weight: Sequence[float] = (),
) -> float:
    """Seconds between two micro-batches of a pipeline in its steady state; waits[j] is a message between stages j and j + 1.

    For that message stage j holds `ahead[j]` micro-batches more than the schedule says. Of its backward `weight[j]` is the weight
    half, for which no gradient waits. Where these are empty, there are none.
    """
    if schedule == "gpipe":
        there = max(max(forward), max(waits, default=0.0))
        return there + max(max(backward), max(waits, default=0.0))
    return max(_runs(schedule, forward, backward, waits, ahead, weight).period_s)


def schedule_ends_s(
    schedule: str,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    waits: Sequence[float],
    ahead: Sequence[int] = (),
    weight: Sequence[float] = (),
) -> tuple[float, float]:
    """Seconds that a pipeline takes once, and `schedule_period_s`: together the end of its last backward.

    Stages that are slow together, or wait for each other's messages, end last. They wait for their first micro-batch, and the
    stages before them for the last gradient. What a micro-batch takes behind them is hidden by the forwards that the last of them
    does meanwhile when it begins, and by its backwards when it ends.
    """
    if schedule == "gpipe":
        period_s = schedule_period_s(schedule, forward, backward, waits)
        return sum(forward) + sum(backward) + 2 * sum(waits) - period_s, period_s
    runs = _runs(schedule, forward, backward, waits, ahead, weight)
    idle_s = []
    for there_s, back_s, end_s, held in zip(forward, backward, runs.ends_s, runs.held, strict=True):
        behind_s, hidden = runs.ends_s[-1] - end_s, min(runs.held[-1] - held, micro_batches - 1)
        idle_s.append(min(behind_s, max(0.0, behind_s - hidden * there_s) + max(0.0, behind_s - hidden * back_s)))
    first_s = weight[0] if weight else 0.0
    last_s = max(
        first_s + runs.ends_s[last] + (micro_batches - 1) * own_s + idle_s[last]
        for own_s, last in zip(runs.period_s, runs.last, strict=True)
    )
    period_s = max(runs.period_s)
    return last_s - micro_batches * period_s, period_s


class _Runs(NamedTuple):
    """What the runs of consecutive stages tell of a pipeline, a number for each stage."""

    ends_s: Sequence[float]
    """What a micro-batch takes there and back, up to this stage, less the weight halves."""
    held: Sequence[int]
    """How many micro-batches fewer than in the first stage are under way."""
    period_s: Sequence[float]
    """The longest between two micro-batches, over the runs that begin here."""
    last: Sequence[int]
    """The stage that this run ends with."""


def _runs(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    waits: Sequence[float],
    ahead: Sequence[int],
    weight: Sequence[float],
) -> _Runs:
    """The runs of stages of any schedule but GPipe's. See `schedule_period_s`."""
    # From stage i to stage j so many micro-batches are under way at once; what one of them takes there and back is the total
    # up to j less that before i.
    each = 2 if schedule in ("eager-1f1b", "zb-2p") else 1
    further = [each + more for more in ahead] or [each] * (len(forward) - 1)
    weight = weight or [0.0] * len(forward)
    if len(forward) <= FEW_STAGES:
        begins, ends, held, total_s = [], [], [0, *accumulate(further)], 0.0
        for there_s, back_s, wait_s, weight_s in zip(forward, backward, (0.0, *waits), weight, strict=True):
            begins.append(total_s + 2 * wait_s - weight_s)
            total_s += 2 * wait_s + there_s + back_s - weight_s
            ends.append(total_s)
        periods, last = [], []
        for i, begin_s in enumerate(begins):
            period_s, before, at = 0.0, held[i] - 1, i
            for j in range(i, len(ends)):
                mean_s = (ends[j] - begin_s) / (held[j] - before)
                if mean_s > period_s:
                    period_s, at = mean_s, j
            periods.append(period_s)
            last.append(at)
        return _Runs(ends, held, periods, last)
    waiting = 2 * np.array([0.0, *waits])
    ended = np.cumsum(np.add(forward, backward) + waiting - np.array(weight))
    begun = np.concatenate([[0.0], ended[:-1]]) + waiting - np.array(weight)
    under_way = np.concatenate([[0], np.cumsum(further)])
    counts = under_way - under_way[:, None] + 1
    counts[np.tril_indices(len(under_way), -1)] = 0
    means = (ended - begun[:, None]) / np.where(counts > 0, counts, np.inf)
    return _Runs(ended.tolist(), under_way.tolist(), means.max(axis=1).tolist(), means.argmax(axis=1).tolist())
