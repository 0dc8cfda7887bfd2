"""A proven lower bound on the seconds of one iteration, over every plan that a cluster and a job allow, and the gap of a plan.

The bound holds for the simulated time, without jitter, of each plan that fits in memory: any part of the GPUs, any pipelines,
stages, cuts, replicas, degrees, micro-batches, slices of sequences, schedule, ZeRO stage and recomputation, optimizer in the
host's memory or not. It asks of everything what no plan can do without; the fastest plan may be slower.

Compute. A lane of n GPUs that computes for s seconds spends n s GPU-seconds, and its slowest GPU decides s. Shared out equally
over them, a sequence's forward and backward through one layer so cost a GPU of kind k at least w_k: what a single GPU takes for
it, if it takes the whole batch at once. What does not grow with the sequences (half a matmul's work, its weights, launches, the
filling of attention's rows) is spread the thinnest there, and no degree of parallelism saves any of it: degrees divide FLOP and
bytes, rounding up. Nor does a cut of sequences in slices save any, but for scores that without flash attention are computed
although the causal mask hides them; w_k is of as many slices as take the fewest seconds. Of a mixture of experts the degree of
expert parallelism is chosen too, and as many sequences as divide evenly. A GPU thus does at most (T - t) / w_k of the B L layers
of an iteration, where t is what every optimizer step takes besides; embedding, head and the optimizer's bytes count as the layers
that they are worth on the kind where these are fewest:

    sum over GPUs of (T - t) / w_k  >=  B (L + min (embedding + head) / w_k) + min optimizer / w_k

Recompute. Something holds the parameters and gradients of each layer, of the embedding and of the head (states may be in the
host's memory, and ZeRO only divides), and, for each part of the batch that passes a layer without recomputation, all that one
sequence's backward needs: a lane holds at least one sequence of a micro-batch from forward to backward, all slices of it when the
backward of the last one begins (each an equal part, with its keys and values besides if it is recomputed in full), and degrees
divide that evenly at best. Copies of a layer that share the batch hold together no less than their mean, weighted by their
shares. What exceeds the memory of all GPUs (less contexts and fragmentation) is recomputed, in the modes that take the fewest
seconds for it.

Network. Cut the cluster into islands: nodes; racks whose uplink is oversubscribed; sites. When a sequence enters or leaves an
island, its activation crosses the island's links in one direction and the gradient in the other; let alpha be the seconds of
these bytes. A tensor-parallel group that spans islands puts at least 2 alpha on each of them, in both directions, for every layer
of a sequence, and alpha for each end (less where embeddings are narrower: alpha is made so small that this holds); context ranks
count as sequences of fewer tokens, and slices together send what their sequence would. A sequence that visits an island crosses
twice, less once if it begins there, less once if it ends there; over all islands, B begin and B end. In T seconds an island is
one of

    free     2 B alpha <= T: it may compute all the time
    an end   all B sequences visit it, for a layer that is nowhere else. Of several such islands, in the order of these layers,
             every sequence enters all but the first and leaves all but the last. So at most two have 2 B alpha > T; each needs
             2 B - T / alpha sequences to begin or end there, and if there are two, B alpha <= T
    shared   each of its d layers is elsewhere, too, and the exchange of gradients takes sigma a layer; v visits do at most v d
             layers, and alpha (2 v - begun - ended) + sigma d <= T, where the first term is alpha v at least if another is an end

What all islands do at most, over all choices of ends and of d, follows from the Lagrangian of the constraint that joins them, the
2 B begun and ended: every price gives an upper bound. T is too short where that is less than the work. sigma is the least of
all ways to sum gradients over two islands (an all-reduce moves all of them into each, a scatter half of them, a gather half of
the parameters), without those of experts, which may be divided instead.

The Lagrangian does not ask where else the layers of shared islands are: others have to hold and exchange them, too. Where it
proves nothing, that is asked by a program of all islands together (`partition.visits`).

Exchange. Under ZeRO 0 and 1 a layer's gradients are summed when all lanes that hold it have done the backward of their last
micro-batch, in every pipeline, for each holds every layer. A lane's micro-batches come in order, and a backward begins after the
forward through all layers: so when the first sum begins, no forward is left anywhere. All sums, and all gathers of parameters,
follow. Where an island needs W = sigma d seconds for them, all forwards thus end W before the iteration does, and what GPUs then
compute is of what their memory holds (`partition.bubble`). With one micro-batch it is so under ZeRO 2 and 3, too; but
for what ZeRO 3 gathers before, over islands twice a layer. ZeRO 2 and 3 scatter at each of M micro-batches, as many in all
pipelines: an exchange takes M times as long, but for the last gather, and need not wait. But whole micro-batches are held, B / M
sequences of every layer at once; what of them does not fit is recomputed (as above), and adds to the work.

Together. So T seconds are too short if, of all these kinds of plans, whatever W (between any two of some values), and whichever
islands are ends, none does the work: the GPUs of islands that are free or ends fill and drain pipelines as best they can, while
those of the others do no more than the Lagrangian says. Of an island that is shared each GPU does no more than it could without
any way of sequences through other stages.

Bubble. One sequence passes all layers one after another, forward and, in the input halves, backward, each at best on the lane
that is quickest at it, of whatever kind and degree; an optimizer step follows. Of a sequence in slices the last one does so, and
the first layer does all others before it on the way forward, and after it on the way back. And pipelines fill and drain, the
faster the smaller their micro-batches are, but the smaller these are, the worse they compute (`partition.bubble`).

Left out, each of which makes the bound lower than it could be: what the host takes to launch kernels, in which order layers are
exchanged, that a layer is passed only once by each sequence (shared islands do their layers as often as their links allow), which
schedules there are and what each of them holds, the parameters of each GPU by itself, whole layers to a lane, and where in a
pipeline a lane is: the way of its first sequence to it, with the messages on it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from partition.bubble import Filling, sliced_seconds
from partition.islands import partitions
from partition.network import Divisions, Steady, network_s
from sim.cost.compute import HOST_BYTES_PER_S, ComputeCost, optimizer_bytes
from sim.cost.pieces import PieceSeconds, embedding_seconds, head_seconds, rates_of
from sim.metrics import lane_use
from sim.spec.cluster import Cluster
from sim.spec.compile import lanes_of
from sim.spec.counts import (
    PRECISION_BYTES,
    aligned,
    embedding_parameters,
    layer_activation_bytes,
    tied_copy_parameters_at,
    total_parameters,
)
from sim.spec.gpu import GpuKind
from sim.spec.job import Job
from sim.spec.judge import Infeasible
from sim.spec.plan import slice_counts
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Forward, OptimizerStep
from sim.spec.trace import Trace
from sim.spec.transformer import Transformer

ROUNDING = 1e-9
"""The memory that parts of a model may gain by being rounded, one by one, as a fraction."""


@dataclass(frozen=True)
class Bound:
    """The least seconds of an iteration, and what they are made of: the parts sum to the whole.

    Each part but the first is what its reason adds to those before it, in the order compute, host, recompute, bubble, network.
    """

    iteration_s: float
    compute_s: float
    """Of all GPUs, each at its best rate and never waiting."""
    host_s: float
    """What comes once for each step."""
    bubble_s: float
    """Of filling and draining, and of micro-batches that are small so that this does not take longer."""
    network_s: float
    """Of what islands must send each other, and of waiting for it."""
    recompute_s: float


@dataclass(frozen=True)
class Gap:
    """1 - bound / seconds of a plan, as a fraction, and the parts that sum to it.

    A part is the seconds that the plan loses there less those that the bound has there, in fractions of the plan's; it is
    negative where the bound has more of them. A GPU counts as much as the share of the work that it could do.
    """

    total: float
    compute: float
    """Slower shapes of work than the best, and GPUs that are left out."""
    host: float
    """GPUs that wait for their host, also for an optimizer step in its memory, and what comes once for each pass and step."""
    bubble: float
    """Lanes that wait, be it for others that have more to do."""
    network: float
    """Collectives inside computations, and transfers that a lane waits for."""
    recompute: float


# --- Pieces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _KindSeconds:
    """GPU-seconds that work costs a kind at least, per sequence: a layer, both ends, and a layer's forward and attention."""

    layer_s: float
    ends_s: float
    again_s: Mapping[str, float]
    """What each mode of recomputation adds to a layer."""


def _kind_seconds(cluster: Cluster, job: Job, kind: GpuKind) -> _KindSeconds:
    """The least that a kind takes. Its precision must be there."""
    model, stack, length, precision = job.model, cluster.stack, job.sequence_length, job.precision
    experts = 1 if model.experts is None else model.experts.experts
    sequences = -(-job.global_batch // experts) * experts
    layers = [
        sliced_seconds(kind, stack, job, slices, sequences, 1, False, 1, degree)
        for slices in slice_counts(length)
        for degree in range(1, experts + 1)
        if experts % degree == 0 and (slices == 1 or degree == 1)
    ]

    def least_s(part: Callable[[PieceSeconds], float]) -> float:
        return min(sum(map(part, pieces)) for pieces in layers) / sequences

    ends = (
        embedding_seconds(kind, stack, model, sequences, length, 1, precision),
        head_seconds(kind, stack, model, sequences, length, 1, False, precision),
    )
    return _KindSeconds(
        layer_s=least_s(lambda piece: piece.forward_s + piece.backward_s),
        ends_s=sum(piece.forward_s + piece.backward_s for piece in ends) / sequences,
        again_s={
            "none": 0.0,
            "pointwise": least_s(lambda piece: piece.pointwise_s),
            "selective": least_s(lambda piece: piece.attention_s),
            "full": least_s(lambda piece: piece.forward_s),
        },
    )


def _stepped_parameters(model: Transformer) -> int:
    """Parameters that optimizer steps update at least, all devices' together.

    Those of a tied embedding but its matrix are left out: ZeRO divides them over the copies of the matrix, too.
    """
    beside = embedding_parameters(model) - tied_copy_parameters_at(model, 1) if model.tied_embeddings else 0
    return total_parameters(model) - beside


def _step_s(cluster: Cluster, job: Job, kind: GpuKind, stepped_bytes: float) -> float:
    """GPU-seconds of a kind for an optimizer step that moves so many bytes, on it or in its host's memory."""
    return min(
        rates_of(kind, job.precision).memory_s(cluster.stack.optimizer_traffic * stepped_bytes), stepped_bytes / HOST_BYTES_PER_S
    )


def _tensor_degrees(model: Transformer, most_gpus: int) -> list[int]:
    return [degree for degree in range(1, min(most_gpus, model.heads) + 1) if model.heads % degree == 0]


def _path_s(cluster: Cluster, job: Job, kinds: Collection[GpuKind], most_gpus: int) -> float:
    """The least seconds of a sequence's way through all layers and back, on lanes of any kinds and degrees.

    Where it comes in slices it is the last one's way, before and after which all others pass the first layer.
    """
    model, length = job.model, job.sequence_length
    tensors = _tensor_degrees(model, most_gpus)
    contexts = [1, *(ranks for ranks in range(2, most_gpus + 1) if length % (2 * ranks) == 0)]
    splits = [
        (tensor, parallel, context)
        for tensor in tensors
        for parallel in (False, True)
        for context in contexts
        if tensor * context <= most_gpus
    ]
    return min(
        _sliced_path_s(cluster, job, kinds, slices, splits if slices == 1 else [split for split in splits if split[2] == 1])
        for slices in slice_counts(length)
    )


def _sliced_path_s(
    cluster: Cluster, job: Job, kinds: Collection[GpuKind], slices: int, splits: Sequence[tuple[int, bool, int]]
) -> float:
    """The same of a sequence in so many slices, on lanes of such tensor ranks, sequence parallelism and context ranks."""
    model, stack, length, precision = job.model, cluster.stack, job.sequence_length // slices, job.precision
    experts = 1 if model.experts is None else model.experts.experts
    layers = [
        [_through_s(piece) for piece in sliced_seconds(kind, stack, job, slices, 1, *split, degree, whole)]
        for kind in kinds
        for split in splits
        for degree in {1, experts}
        for whole in {False, experts > 1}
    ]
    last_s, others_s = min(passed[-1] for passed in layers), min(sum(passed[:-1]) for passed in layers)
    head_s = min(
        _through_s(head_seconds(kind, stack, model, 1, length, tensor, parallel, precision, context))
        for kind in kinds
        for tensor, parallel, context in splits
    )
    embedding_s = min(
        embedding_seconds(kind, stack, model, 1, length, tensor, precision, context).forward_s
        for kind in kinds
        for tensor, _, context in splits
    )
    return model.layers * last_s + others_s + embedding_s + head_s


def _through_s(piece: PieceSeconds) -> float:
    """Seconds of a piece for which the next one waits: its forward, and the input half of its backward."""
    return piece.forward_s + piece.backward_input_s


# --- The bound -------------------------------------------------------------------------------------------------------


def _as_slow_in_parts(job: Job, most_gpus: int) -> bool:
    """Whether tensor cores take no matmul as it lies, on ranks of any degree, that they do not take whole."""
    model, precision = job.model, job.precision
    whole = aligned(model, 1, precision)
    return all(
        own or not part
        for degree in _tensor_degrees(model, most_gpus)
        for own, part in zip(whole, aligned(model, degree, precision), strict=True)
    )


def lower_bound(cluster: Cluster, job: Job) -> Bound | Infeasible:
    """The least seconds that an iteration of any plan of a job takes, or why there can be none; see the head of this file."""
    if cluster.stack.fuses_some_softmax:
        # Where it is fused hangs on the sequences and heads of a lane; a softmax that is everywhere takes no longer on any.
        cluster = replace(cluster, stack=replace(cluster.stack, megatron_softmax=False))
    counts = Counter(device.gpu for device in cluster.devices if device.gpu.peak(job.precision) is not None)
    if not _as_slow_in_parts(job, counts.total()):  # compute_s is that of one rank, which must not lose what two do not
        cluster = replace(cluster, stack=replace(cluster.stack, unaligned_scale=1.0))
    model, batch = job.model, job.global_batch
    element_bytes, summed_bytes = PRECISION_BYTES[job.precision], PRECISION_BYTES[job.gradient_precision]
    if not counts:
        return Infeasible(None, "precision", None, None, f"no GPU of cluster {cluster.name!r} has {job.precision}")
    spilled = _spilled(cluster, job, counts, total_parameters(model) * (element_bytes + summed_bytes))
    if isinstance(spilled, Infeasible):
        return spilled
    kinds = {kind: _kind_seconds(cluster, job, kind) for kind in counts}
    once_s = cluster.stack.step_s
    rate = sum(count / kinds[kind].layer_s for kind, count in counts.items())
    ends = [seconds.ends_s / seconds.layer_s for seconds in kinds.values()]
    stepped_bytes = _stepped_parameters(model) * optimizer_bytes(job.precision, job.gradient_precision, job.optimizer)
    step = min(_step_s(cluster, job, kind, stepped_bytes) / seconds.layer_s for kind, seconds in kinds.items())
    work = batch * (model.layers + min(ends))
    compute_s = (work + step) / rate
    again = batch * min(_recomputed(job, cluster, seconds, spilled) / seconds.layer_s for seconds in kinds.values())
    recompute_s = again / rate
    busy_s = compute_s + once_s + recompute_s
    reached_s = busy_s
    filling = Filling(cluster, job, counts)
    path_s = once_s + _path_s(cluster, job, kinds, counts.total())
    full_s = filling.least_s(once_s, max(busy_s, path_s))
    reached_s = full_s
    steady = list(_steady(cluster, job, kinds, counts, summed_bytes))
    for islands in partitions(cluster, job, {kind: 1 / seconds.layer_s for kind, seconds in kinds.items()}):
        reached_s = max(reached_s, network_s(islands, job, work, max(ends), once_s, busy_s))
        divisions = Divisions(islands, job, max(*ends, filling.head_layers), once_s, filling, steady)
        reached_s = filling.least_s(once_s, reached_s, divisions)
    return Bound(reached_s, compute_s, once_s, full_s - busy_s, reached_s - full_s, recompute_s)


def _steady(
    cluster: Cluster, job: Job, kinds: Mapping[GpuKind, _KindSeconds], counts: Counter[GpuKind], summed_bytes: int
) -> Iterator[Steady]:
    """What such plans cost: those of few micro-batches hold much at once, those of many exchange much."""
    element_bytes, batch = PRECISION_BYTES[job.precision], job.global_batch
    once = min(summed_bytes, (summed_bytes + element_bytes) / 2)
    held = total_parameters(job.model) * (element_bytes + summed_bytes)
    most_again = max(seconds.again_s["full"] / seconds.layer_s for seconds in kinds.values())
    for number in range(1, batch + 1):
        if batch % number:
            continue
        spilled = _spilled(cluster, job, counts, held, batch // number)
        if isinstance(spilled, Infeasible):
            continue
        held_at_once = batch // number
        again = number * min(
            _recomputed(job, cluster, seconds, spilled, held_at_once) / seconds.layer_s for seconds in kinds.values()
        )
        summed = min(number * summed_bytes, (number * summed_bytes + element_bytes) / 2)
        yield Steady((summed_bytes / 2 + element_bytes if number == 1 else summed) / once, again, most_again)
        if again == 0:
            return


def _spilled(cluster: Cluster, job: Job, counts: Counter[GpuKind], held: int, sequences: int = 1) -> float | Infeasible:
    """Bytes of activations of some sequences that do not fit beside those `held`, if no layer is recomputed; or why none do."""
    model = job.model
    most = _kept_bytes(job, cluster, "none") * model.layers * sequences
    least = _kept_bytes(job, cluster, "full") * model.layers * sequences
    room = sum(count * max(0.0, kind.memory_bytes - cluster.stack.context_bytes) for kind, count in counts.items())
    room *= (1 + ROUNDING) / (1 + cluster.stack.fragmentation)
    if held + least > room:
        need, have = math.ceil(held + least), math.floor(room)
        message = (
            f"parameters and gradients of {model.name}, and what is kept of one sequence if all layers are recomputed, need "
            f"{need / 2**30:.1f} GiB, but the GPUs of cluster {cluster.name!r} have {have / 2**30:.1f} GiB for them"
        )
        return Infeasible(None, "memory", need, have, message)
    return max(0.0, held + most - room)


def _kept_bytes(job: Job, cluster: Cluster, mode: str) -> float:
    """Bytes that all ranks together keep of one layer and one sequence at least."""
    software, element_bytes = cluster.stack, PRECISION_BYTES[job.precision]
    flash = software.flash_attention
    return software.activation_scale * layer_activation_bytes(
        job.model, 1, job.sequence_length, 1, False, mode, element_bytes, flash
    )


def _recomputed(job: Job, cluster: Cluster, seconds: _KindSeconds, spilled: float, sequences: int = 1) -> float:
    """GPU-seconds of recomputation that make so many bytes of the activations of some sequences needless, at least.

    Each layer of a sequence is under one mode, so that all of them together save and cost no less than a mixture of two modes.
    """
    layers = job.model.layers * sequences
    none, saved = _kept_bytes(job, cluster, "none"), spilled / layers
    modes = [(none - _kept_bytes(job, cluster, mode), again_s) for mode, again_s in seconds.again_s.items()]
    found = [again_s for num_bytes, again_s in modes if num_bytes >= saved]
    for (few, cheap_s), (many, dear_s) in permutations(modes, 2):
        if few < saved < many:
            found.append(cheap_s + (dear_s - cheap_s) * (saved - few) / (many - few))
    most = max(num_bytes for num_bytes, _ in modes)
    return layers * min(found, default=seconds.again_s["full"] * saved / most)


# --- The gap ---------------------------------------------------------------------------------------------------------


def gap(bound: Bound, trace: Trace, cluster: Cluster) -> Gap:
    """The gap of a simulated plan to the bound of its cluster and job, and its parts.

    Raises InputError for a trace of devices that the cluster does not have.
    """
    plan, seconds = trace.plan, trace.iteration_s
    job = plan.job()
    rates = {
        kind: 1 / _kind_seconds(cluster, job, kind).layer_s
        for kind in {device.gpu for device in cluster.devices}
        if kind.peak(job.precision) is not None
    }
    rate = sum(rates.get(device.gpu, 0.0) for device in cluster.devices)
    spent = _spent(trace, cluster)
    computing = host = bubble = network = again = used = 0.0
    for lane, devices in trace.lanes.items():
        share = sum(rates.get(cluster.device(name).gpu, 0.0) for name in devices) / rate
        busy_s, communication_s, idle_s = spent[0][lane]
        computed_s, recomputed_s, hosted_s = spent[1][lane]
        computing += share * (computed_s - recomputed_s - hosted_s)
        host += share * hosted_s
        network += share * (communication_s + busy_s - computed_s)
        again += share * recomputed_s
        bubble += share * idle_s
        used += share
    computing += (1 - used) * seconds
    parts = (
        (computing, bound.compute_s),
        (host, bound.host_s),
        (bubble, bound.bubble_s),
        (network, bound.network_s),
        (again, bound.recompute_s),
    )
    return Gap(1 - bound.iteration_s / seconds, *((lost - least) / seconds for lost, least in parts))


def _spent(
    trace: Trace, cluster: Cluster
) -> tuple[Mapping[str, tuple[float, float, float]], Mapping[str, tuple[float, float, float]]]:
    """How each lane spent its time, and how long it computed without collectives: in all, to recompute, else for the host."""
    plan = trace.plan
    bare = replace(
        plan,
        pipelines=tuple(
            replace(pipeline, stages=tuple(stage.recomputing("none") for stage in pipeline.stages)) for pipeline in plan.pipelines
        ),
    )
    cost, without = ComputeCost(plan, cluster), ComputeCost(bare, cluster)
    lanes = {lane.name: lane for lane in lanes_of(plan)[0]}
    computed = dict.fromkeys(lanes, (0.0, 0.0, 0.0))
    for span in trace.spans:
        instruction = span.instruction
        if isinstance(instruction, (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep)):
            lane, (all_s, again_s, host_s) = lanes[span.lane], computed[span.lane]
            taken_s, bare_s = cost.seconds(lane, instruction), without.seconds(lane, instruction)
            hosted_s = taken_s if cost.is_hosts(lane, instruction) else cost.once_s(lane, instruction)
            if not isinstance(instruction, OptimizerStep):
                waits_s = cost.gap_s(lane, instruction)
                hosted_s += waits_s
                bare_s += waits_s - without.gap_s(lane, instruction)  # what recomputation adds to them is the host's
            computed[span.lane] = all_s + taken_s, again_s + taken_s - bare_s, host_s + hosted_s
    return lane_use(trace), computed
