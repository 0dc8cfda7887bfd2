"""A proven lower bound on the seconds of one iteration, over every plan that a cluster and a job allow, and the gap of a plan.

The bound holds for the simulated time, without jitter, of each plan that fits in memory: any part of the GPUs, any pipelines,
stages, cuts, replicas, degrees, micro-batches, schedule, ZeRO stage and recomputation, optimizer in the host's memory or not. It
asks of everything what no plan can do without; the fastest plan may be slower.

Compute. A lane of n GPUs that computes for s seconds spends n s GPU-seconds, and its slowest GPU decides s. Shared out equally
over them, a sequence's forward and backward through one layer so cost a GPU of kind k at least w_k: what a single GPU takes for
it, if it takes the whole batch at once. What does not grow with the sequences (half a matmul's work, its weights, launches, the
filling of attention's rows) is spread the thinnest there, and no degree of parallelism saves any of it: degrees divide FLOP and
bytes, rounding up. Of a mixture of experts the degree of expert parallelism is chosen too, and as many sequences as divide
evenly. A GPU thus does at most (T - t) / w_k of the B L layers of an iteration, where t is what every optimizer step takes
besides; embedding, head and the optimizer's bytes count as the layers that they are worth on the kind where these are fewest:

    sum over GPUs of (T - t) / w_k  >=  B (L + min (embedding + head) / w_k) + min optimizer / w_k

Recompute. Something holds the parameters and gradients of each layer, of the embedding and of the head (states may be in the
host's memory, and ZeRO only divides), and, for each part of the batch that passes a layer without recomputation, all that one
sequence's backward needs: a lane holds at least one sequence of a micro-batch from forward to backward, and degrees divide that
evenly at best. Copies of a layer that share the batch hold together no less than their mean, weighted by their shares. What
exceeds the memory of all GPUs (less contexts and fragmentation) is recomputed, in the modes that take the fewest seconds for it.

Network. Cut the cluster into islands: nodes; racks whose uplink is oversubscribed; sites. When a sequence enters or leaves an
island, its activation crosses the island's links in one direction and the gradient in the other; let alpha be the seconds of
these bytes. A tensor-parallel group that spans islands puts at least 2 alpha on each of them, in both directions, for every
layer of a sequence, and alpha for each end (less where embeddings are narrower: alpha is made so small that this holds); context
ranks count as sequences of fewer tokens. A sequence that visits an island crosses twice, less once if it begins there, less once
if it ends there; over all islands, B begin and B end. In T seconds an island is one of

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
that is quickest at it, of whatever kind and degree; an optimizer step follows. And pipelines fill and drain, the faster the
smaller their micro-batches are, but the smaller these are, the worse they compute (`partition.bubble`).

Left out, each of which makes the bound lower than it could be: what the host takes to launch kernels, in which order layers are
exchanged, that a layer is passed only once by each sequence (shared islands do their layers as often as their links allow), which
schedules there are and what each of them holds, the parameters of each GPU by itself, whole layers to a lane, and where in a
pipeline a lane is: the way of its first sequence to it, with the messages on it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from partition.bubble import Division, Filling
from sim.cost.compute import HOST_BYTES_PER_S, ComputeCost, optimizer_bytes
from sim.cost.pieces import PieceSeconds, embedding_seconds, head_seconds, layer_seconds, rates_of
from sim.metrics import lane_use
from sim.spec.cluster import Cluster, Node, WideAreaLink, rack_name
from sim.spec.compile import lanes_of
from sim.spec.counts import (
    PRECISION_BYTES,
    boundary_bytes,
    embedding_parameters,
    layer_activation_bytes,
    layer_parameter_parts,
    tied_copy_parameters_at,
    total_parameters,
)
from sim.spec.gpu import GpuKind
from sim.spec.job import Job
from sim.spec.judge import Infeasible
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Forward, OptimizerStep
from sim.spec.trace import Trace
from sim.spec.transformer import Transformer

STEPS = 40
"""How often the interval of times in which the network's bound lies is halved."""

ROUNDING = 1e-9
"""The memory that parts of a model may gain by being rounded, one by one, as a fraction."""

PRICES = 64
"""At how many prices of the joint constraint the Lagrangian is tried; each gives a bound, the least counts."""


EXCHANGED = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, math.inf)
"""The ends of the ranges of how long the exchange of an island takes, in layers of the island that takes the shortest."""


Prices: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """The least seconds of an iteration, and what they are made of: the parts sum to the whole.

    Each part but the first is what its reason adds to those before it, in the order compute, recompute, bubble, network.
    """

    iteration_s: float
    compute_s: float
    """Of all GPUs, each at its best rate and never waiting."""
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
        layer_seconds(kind, stack, model, sequences, length, 1, False, precision, 1, degree)
        for degree in range(1, experts + 1)
        if experts % degree == 0
    ]
    ends = (
        embedding_seconds(kind, stack, model, sequences, length, 1, precision),
        head_seconds(kind, stack, model, sequences, length, 1, False, precision),
    )
    return _KindSeconds(
        layer_s=min(piece.forward_s + piece.backward_s for piece in layers) / sequences,
        ends_s=sum(piece.forward_s + piece.backward_s for piece in ends) / sequences,
        again_s={
            "none": 0.0,
            "pointwise": min(piece.pointwise_s for piece in layers) / sequences,
            "selective": min(piece.attention_s for piece in layers) / sequences,
            "full": min(piece.forward_s for piece in layers) / sequences,
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


def _path_s(cluster: Cluster, job: Job, kinds: Collection[GpuKind], most_gpus: int) -> float:
    """The least seconds of a sequence's way through all layers and back, on lanes of any kinds and degrees."""
    model, stack, length, precision = job.model, cluster.stack, job.sequence_length, job.precision
    experts = 1 if model.experts is None else model.experts.experts
    tensors = [degree for degree in range(1, min(most_gpus, model.heads) + 1) if model.heads % degree == 0]
    contexts = [1, *(ranks for ranks in range(2, most_gpus + 1) if length % (2 * ranks) == 0)]
    lanes = [(kind, t, c) for kind in kinds for t in tensors for c in contexts if t * c <= most_gpus]
    layer_s = min(
        _through_s(layer_seconds(kind, stack, model, 1, length, t, parallel, precision, c, e))
        for kind, t, c in lanes
        for parallel in (False, True)
        for e in {1, experts}
    )
    head_s = min(
        _through_s(head_seconds(kind, stack, model, 1, length, t, parallel, precision, c))
        for kind, t, c in lanes
        for parallel in (False, True)
    )
    embedding_s = min(embedding_seconds(kind, stack, model, 1, length, t, precision, c).forward_s for kind, t, c in lanes)
    return model.layers * layer_s + embedding_s + head_s


def _through_s(piece: PieceSeconds) -> float:
    """Seconds of a piece for which the next one waits: its forward, and the input half of its backward."""
    return piece.forward_s + piece.backward_input_s


# --- The bound -------------------------------------------------------------------------------------------------------


def lower_bound(cluster: Cluster, job: Job) -> Bound | Infeasible:
    """The least seconds that an iteration of any plan of a job takes, or why there can be none; see the head of this file."""
    model, batch = job.model, job.global_batch
    element_bytes, summed_bytes = PRECISION_BYTES[job.precision], PRECISION_BYTES[job.gradient_precision]
    counts = Counter(device.gpu for device in cluster.devices if device.gpu.peak(job.precision) is not None)
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
    compute_s = once_s + (work + step) / rate
    again = batch * min(_recomputed(job, cluster, seconds, spilled) / seconds.layer_s for seconds in kinds.values())
    recompute_s = again / rate
    busy_s = compute_s + recompute_s
    reached_s = busy_s
    filling = Filling(cluster, job, counts)
    path_s = once_s + _path_s(cluster, job, kinds, counts.total())
    full_s = filling.least_s(once_s, max(busy_s, path_s))
    reached_s = full_s
    least_bytes = _least_bytes(cluster, job, summed_bytes)
    steady = list(_steady(cluster, job, kinds, counts, summed_bytes))
    for islands in _partitions(cluster, kinds, least_bytes):
        reached_s = max(reached_s, _network_s(islands, job, work, max(ends), once_s, busy_s))

        def divisions(seconds: float, islands: Sequence[_Island] = islands) -> Iterator[Division]:
            return _divisions(islands, job, max(*ends, filling.head_layers), seconds, once_s, filling, steady)

        reached_s = filling.least_s(once_s, reached_s, divisions)
    return Bound(reached_s, compute_s, full_s - busy_s, reached_s - full_s, recompute_s)


@dataclass(frozen=True)
class _Steady:
    """Plans that sum gradients, or gather parameters, at every micro-batch, if there are so many micro-batches or more."""

    times: float
    """The bytes that an exchange moves, per byte of one that waits for the last micro-batch."""
    again: float
    """What must be computed a second time, in layers of sequences."""
    most_again: float
    """The same of one layer of a sequence at most, where all of it is recomputed."""


def _steady(
    cluster: Cluster, job: Job, kinds: Mapping[GpuKind, _KindSeconds], counts: Counter[GpuKind], summed_bytes: int
) -> Iterator[_Steady]:
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
        yield _Steady((summed_bytes / 2 + element_bytes if number == 1 else summed) / once, again, most_again)
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


# --- Islands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Island:
    """A part of the cluster whose links to the rest are known: the layers that its GPUs do in a second, its links' seconds."""

    counts: tuple[tuple[GpuKind, int], ...]
    rate: float
    crossing_s: float
    """Of the activation of one sequence, in each direction."""
    shared_s: float
    """Of the exchange of one layer's gradients."""


def _partitions(cluster: Cluster, kinds: Mapping[GpuKind, _KindSeconds], least_bytes: _LeastBytes) -> Iterator[list[_Island]]:
    """The cluster as islands, by nodes, by racks and by sites, as far as there are several and they limit anything."""
    parts: list[list[tuple[list[Node], float]]] = [[([node], _node_bytes_per_s(cluster, node)) for node in cluster.nodes]]
    racks: dict[object, list[Node]] = {}
    sites: dict[str, list[Node]] = {}
    for node in cluster.nodes:
        racks.setdefault(node.name if node.rack is None else (node.rack, node.site), []).append(node)
        sites.setdefault(node.site, []).append(node)
    if cluster.fabric.oversubscription > 1:
        parts.append([(rack, _rack_bytes_per_s(cluster, rack)) for rack in racks.values()])
    carried = {site: sum(_wan_bytes_per_s(cluster, link) for link in cluster.wan if site in link.between) for site in sites}
    parts.append([(nodes, carried[site]) for site, nodes in sites.items()])
    for islands in parts:
        if len(islands) > 1:
            yield [_island(cluster, nodes, bytes_per_s, kinds, least_bytes) for nodes, bytes_per_s in islands]


def _island(
    cluster: Cluster, nodes: Sequence[Node], bytes_per_s: float, kinds: Mapping[GpuKind, _KindSeconds], least_bytes: _LeastBytes
) -> _Island:
    """Some nodes, whose links carry so many bytes in a second."""
    names = {node.name for node in nodes}
    counts = Counter(device.gpu for device in cluster.devices if device.node.name in names and device.gpu in kinds)
    rate = sum(count / kinds[kind].layer_s for kind, count in counts.items())
    ordered = tuple(sorted(counts.items(), key=lambda item: item[0].name))
    return _Island(ordered, rate, least_bytes.crossing / bytes_per_s, least_bytes.shared / bytes_per_s)


@dataclass(frozen=True)
class _LeastBytes:
    """Bytes that an island's links carry in each direction at least."""

    crossing: float
    """Of the activation of one sequence."""
    shared: float
    """Of the exchange of one layer."""


def _least_bytes(cluster: Cluster, job: Job, summed_bytes: int) -> _LeastBytes:
    """What a crossing takes, and an exchange, if gradients are summed in so many bytes; see the head of this file."""
    element_bytes, scale = PRECISION_BYTES[job.precision], cluster.stack.collective_scale
    model = job.model
    # A group across islands sums an activation at the embedding or the head, of its width, and four for each layer.
    crossing = float(boundary_bytes(model, 1, job.sequence_length, element_bytes))
    crossing *= min(1.0, min(2.0, model.embedding_width / model.hidden) / scale)
    parts = layer_parameter_parts(model)
    each = min(summed_bytes, (summed_bytes + element_bytes) / 2)
    return _LeastBytes(crossing, (parts.total - parts.experts) * each / scale)


def _rack_bytes_per_s(cluster: Cluster, rack: Iterable[Node]) -> float:
    """What the uplink of a rack carries in each direction."""
    nodes = list(rack)
    cards = [(node.nic, node.nic.count * node.nic.bandwidth_bytes_per_s) for node in nodes if node.nic is not None]
    rate = sum(rate * cluster.fabric.efficiency(nic.kind) for nic, rate in cards) / cluster.fabric.oversubscription
    name = rack_name(nodes[0])
    return _carried(cluster, (f"{name}>core", f"core>{name}"), rate)


def _carried(cluster: Cluster, directions: tuple[str, str], bytes_per_s: float) -> float:
    """What the faster direction of a link carries: `bytes_per_s`, or what the cluster overrides."""
    own = {link.name: link.bandwidth_bytes_per_s for link in cluster.link_overrides}
    return max(own.get(name) or bytes_per_s for name in directions)


def _wan_bytes_per_s(cluster: Cluster, link: WideAreaLink) -> float:
    """What a link between sites carries in its faster direction."""
    a, b = link.between
    return _carried(cluster, (f"site:{a}>site:{b}", f"site:{b}>site:{a}"), link.bandwidth_bytes_per_s)


def _node_bytes_per_s(cluster: Cluster, node: Node) -> float:
    """The most that a node's links carry in each direction: its cards, whatever they speak, and the matrix's pairs."""
    nic, efficiency = node.nic, cluster.fabric.efficiency
    if nic is None:  # the only node
        return math.inf
    rate = nic.count * nic.bandwidth_bytes_per_s * max(efficiency(nic.kind), efficiency("tcp"))
    if nic.ethernet_bytes_per_s is not None:
        rate += nic.ethernet_bytes_per_s * efficiency("ethernet")
    if cluster.link_overrides:
        # TCP over a card carries as much more or less of what is overridden as of the card's own rate.
        share = max(1.0, efficiency("tcp") / efficiency(nic.kind))
        cards = [(f"nic{number}", nic.bandwidth_bytes_per_s * efficiency(nic.kind), share) for number in range(nic.count)]
        if nic.ethernet_bytes_per_s is not None:
            cards.append(("ethernet", nic.ethernet_bytes_per_s * efficiency("ethernet"), 1.0))
        rate = sum(
            more * _carried(cluster, (f"{node.name}/{card}>fabric", f"fabric>{node.name}/{card}"), carried)
            for card, carried, more in cards
        )
    matrix = cluster.bandwidth_matrix
    if matrix is not None:
        own = [i for i, name in enumerate(matrix.names) if name.split("/")[0] == node.name]
        others = [i for i in range(len(matrix.names)) if i not in own]
        known = {link.name: link.bandwidth_bytes_per_s for link in cluster.link_overrides}

        def pair(i: int, j: int) -> float:
            return known.get(f"{matrix.names[i]}=>{matrix.names[j]}") or matrix.bytes_per_s[i][j]

        out = sum(pair(i, j) for i in own for j in others)
        into = sum(pair(j, i) for i in own for j in others)
        rate = min(rate, out, into)
    return rate


# --- The network's bound ---------------------------------------------------------------------------------------------


def _network_s(islands: Sequence[_Island], job: Job, work: float, ends: float, once_s: float, least_s: float) -> float:
    """The least time in which islands can do so much work, no less than `least_s`; see the head of this file."""
    batch, layers = job.global_batch, job.model.layers
    enough_s = max(least_s, 2 * batch * max(island.crossing_s for island in islands))

    def too_short(seconds: float) -> bool:
        return _most_work(islands, seconds, once_s, batch, layers, ends) < work * (1 - 1e-12)

    if not too_short(least_s):
        return least_s
    low, high = least_s, enough_s
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if too_short(middle) else (low, middle)
    return low


def _most_work(islands: Sequence[_Island], seconds: float, once_s: float, batch: int, layers: int, ends: float) -> float:
    """The most layers of sequences, ends counted as so many, that islands can do in some seconds."""
    tight = _tight(islands, seconds, batch)
    free = sum(island.rate for island in islands if island not in tight) * (seconds - once_s)
    capacities = {island: island.rate * (seconds - once_s) for island in tight}
    choices = _choices(tight, capacities, seconds, batch, layers, ends)
    return free + max(sum(island.rate for island in chosen) * (seconds - once_s) + others for chosen, others in choices)


def _tight(islands: Sequence[_Island], seconds: float, batch: int) -> Counter[_Island]:
    """The islands that not every sequence can enter and leave."""
    return Counter(island for island in islands if 2 * batch * island.crossing_s > seconds)


def _choices(
    tight: Counter[_Island],
    capacities: Mapping[_Island, float],
    seconds: float,
    batch: int,
    layers: int,
    ends: float,
    most_s: float = math.inf,
    repeated: float = 1.0,
) -> Iterator[tuple[tuple[_Island, ...], float]]:
    """Which of some islands are ends, and the most work that the others of them then do.

    Of an exchange that takes an island no longer than `most_s`, or of one that moves so many times the bytes.
    """
    # A price above half of all layers buys nothing: each sequence begun or ended saves one crossing, half a visit.
    prices = np.concatenate([[0.0], np.geomspace(1e-3, (layers + ends) / 2 + 1, PRICES)])
    by_ends = {
        some: {
            island: _shared_work(island, capacities[island], prices, seconds, batch, layers, ends, some, most_s, repeated)
            for island in tight
        }
        for some in (False, True)
    }
    for chosen in _ends(tight):
        shared = by_ends[bool(chosen)]
        needed = [2 * batch - seconds / island.crossing_s for island in chosen]
        left = 2 * batch - sum(needed)
        if left < 0 or (len(chosen) == 2 and any(batch * island.crossing_s > seconds for island in chosen)):
            continue
        counts = tight - Counter(chosen)
        others = np.sum([count * shared[island] for island, count in counts.items()], axis=0) if counts else np.zeros_like(prices)
        yield chosen, float(np.min(others + prices * left))


def _ends(tight: Counter[_Island]) -> Iterator[tuple[_Island, ...]]:
    """None, one or two of the islands that cannot be visited and left by every sequence."""
    yield ()
    kinds = list(tight)
    for i, one in enumerate(kinds):
        yield (one,)
        yield from ((one, other) for other in kinds[i:] if other is not one or tight[one] > 1)


def _shared_work(
    island: _Island,
    capacity: float,
    prices: Prices,
    seconds: float,
    batch: int,
    layers: int,
    ends: float,
    leave: bool,
    most_s: float,
    repeated: float,
) -> Prices:
    """At each price of a sequence begun or ended, the most work of an island, less the price, if its layers are all shared.

    With `leave` all sequences also visit another island, so that each visit has a crossing although it begins and ends here.
    """
    each_s = island.shared_s * repeated
    held = np.arange(1 + min(layers, math.floor(most_s / each_s)) if each_s > 0 and most_s < math.inf else 1 + layers)
    left_s = seconds - each_s * held
    # Of groups that span islands it may have parts: their layers cost as much as two visits, their ends as half a visit.
    each = np.maximum(np.maximum(held, 0.5) + ends, 2 * ends)
    most = np.minimum(capacity, batch * (held + ends) + seconds / (4 * island.crossing_s))
    without = left_s / (2 * island.crossing_s) * each
    unpaid = np.minimum(most, without)
    paid = np.minimum(most - unpaid, without if leave else batch * each)
    gain = np.maximum(0.0, 1 - 2 * prices[:, None] / each)
    done: Prices = np.max(np.where(left_s >= 0, unpaid + paid * gain, 0.0), axis=1)
    return done


def _divisions(
    islands: Sequence[_Island],
    job: Job,
    ends: float,
    seconds: float,
    once_s: float,
    filling: Filling,
    steady: Sequence[_Steady],
) -> Iterator[Division]:
    """How islands can divide the work in some seconds: which of them are free or ends, and how long gradients are exchanged."""
    batch, layers = job.global_batch, job.model.layers
    tight = _tight(islands, seconds, batch)
    free = Counter(islands) - tight

    def divided(exchange_s: float, most_s: float, times: float) -> Iterator[Division]:
        most = filling.most(seconds, once_s, exchange_s)
        capacities = {island: sum(count * most[kind] for kind, count in island.counts) for island in tight}
        for chosen, others in _choices(tight, capacities, seconds, batch, layers, ends, most_s, times):
            counts: Counter[GpuKind] = Counter()
            for island in (*free.elements(), *chosen):
                counts.update(dict(island.counts))
            yield Division(counts, others, exchange_s)

    if not tight:
        yield from divided(0.0, math.inf, 1.0)
        return
    best = filling.most(seconds, once_s, 0.0)
    most = sum(count * best[kind] for kind, count in filling.counts.items())
    for plans in steady:
        needed = batch * (layers + filling.head_layers) + plans.again
        for division in divided(0.0, math.inf, plans.times):
            done = sum(count * best[kind] for kind, count in division.counts.items())
            if min(most, done + division.others * (1 + plans.most_again)) >= needed * (1 - 1e-12):
                yield division
    unit_s = min(island.shared_s for island in tight)
    if unit_s == 0:
        yield from divided(0.0, math.inf, 1.0)
        return
    for low, high in pairwise(EXCHANGED):
        if low * unit_s > seconds:
            return
        yield from divided(low * unit_s * (1 - ROUNDING), high * unit_s * (1 - ROUNDING), 1.0)


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
    computing = bubble = network = again = used = 0.0
    for lane, devices in trace.lanes.items():
        share = sum(rates.get(cluster.device(name).gpu, 0.0) for name in devices) / rate
        busy_s, communication_s, idle_s = spent[0][lane]
        computed_s, recomputed_s = spent[1][lane]
        computing += share * (computed_s - recomputed_s)
        network += share * (communication_s + busy_s - computed_s)
        again += share * recomputed_s
        bubble += share * idle_s
        used += share
    computing += (1 - used) * seconds
    parts = (
        (computing, bound.compute_s),
        (bubble, bound.bubble_s),
        (network, bound.network_s),
        (again, bound.recompute_s),
    )
    return Gap(1 - bound.iteration_s / seconds, *((lost - least) / seconds for lost, least in parts))


def _spent(trace: Trace, cluster: Cluster) -> tuple[Mapping[str, tuple[float, float, float]], Mapping[str, tuple[float, float]]]:
    """How each lane spent its time, and how long it computed, without collectives, in all and to recompute."""
    plan = trace.plan
    bare = replace(
        plan,
        pipelines=tuple(
            replace(pipeline, stages=tuple(stage.recomputing("none") for stage in pipeline.stages)) for pipeline in plan.pipelines
        ),
    )
    cost, without = ComputeCost(plan, cluster), ComputeCost(bare, cluster)
    lanes = {lane.name: lane for lane in lanes_of(plan)[0]}
    computed = dict.fromkeys(lanes, (0.0, 0.0))
    for span in trace.spans:
        instruction = span.instruction
        if isinstance(instruction, (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep)):
            lane, (all_s, again_s) = lanes[span.lane], computed[span.lane]
            taken_s = cost.seconds(lane, instruction)
            computed[span.lane] = all_s + taken_s, again_s + taken_s - without.seconds(lane, instruction)
    return lane_use(trace), computed
