"""The least seconds of an iteration whose pipelines must fill and drain, with micro-batches large enough to compute well.

Small micro-batches compute badly: what does not grow with the sequences (half a matmul's work, its weights, launches, the filling
of attention's rows) comes once for each. Large ones are long on their way, and every GPU waits for the first and the last of
them, but for what its memory lets it do meanwhile. Slices of sequences are shorter on their way, and compute badly just so. No
plan escapes both, whatever its schedule.

All seconds below are the least that the work can take; a lane that takes longer does less.

Waits. A micro-batch goes through its pipeline slice by slice, and its backwards come back from the last slice to the first; one
whose sequences are not cut is one slice. A place in the micro-batches of a pipeline (its first sequence, say) visits one lane of
each stage, with all slices. Let D be the seconds of these lanes' forwards of a last slice through all layers, each with all that
the lane has of the slice, and D' those of its input halves back. Before D no lane that the place visits has begun a backward: the
first micro-batch's last slice has still to go forward through all of them. Until then it does forwards, of all of which it keeps
the activations. And once the last micro-batch's last slice is through the last layer, all forwards have been done on these lanes;
in the D' that it takes at least from then on they do backwards, of what they still keep. The two stretches do not overlap. So if
the GPUs of a lane hold the activations of X layers of sequences each, and compute N layers of sequences each, at G GPU-seconds,
F of them forward, then in T seconds

    N G <= E = min(T, T - D + X F, T - D' + X (G - F), T - D - D' + X G)

for a lane comes to keep the earlier slices of a micro-batch first, and is rid of them last: they keep as much as later ones,
which attend to more, and take no longer.

Where gradients are exchanged for W seconds at least after all forwards, D' counts as W if that is longer.

G is that of the lane: of its tensor and context ranks, of its share of a micro-batch, of all slices of its sequences together,
and of the fraction of its layers that it recomputes, which lengthens the backward, but lets it hold more. n lane-seconds for s
sequences are n / s GPU-seconds for each. What the stack or the attention does not hide of the collectives of tensor and context
ranks is in it, at what a GPU's own port takes for the bytes that it sends. Of a sum that is the tensor at least (a ring of n
sends it 2 (n - 1) / n times, the NVLink switch (n + 1) / n times, two trees along an edge of each); of a ring of context ranks,
n - 1 of the n parts of keys and values. A lane of several kinds takes, and holds, no better than a lane of each of them would.

Prices. A lane of n GPUs that takes s sequences of each of m micro-batches is taken apart, n / s GPUs for each place. For every
layer and sequence of a place it spends G GPU-seconds, and its GPUs have E each. So at any price p of a GPU, the GPUs of one place
are worth at least

    m (sum over the layers of p G / E, of the lane that the place visits there)

and the same for the head. The m of all places are the batch of B sequences. So T is too short if at some prices

    sum over all GPUs of p  <  B min over D + D' of (the least sum of p G / E on ways of so many seconds)

Where some GPUs do no more than so many layers of sequences, these layers have a price in place of those GPUs: a place may have
any of its layers done at it, and all of them are added to what the other GPUs are worth. (Where some GPUs of a lane are such, its
layers have no better price than the better of both.) A head counts as the part of a layer that it is worth at least.

D and D' are counted as the least parts of D + D' that they can be. The least sum is found by giving seconds of the way a price,
too: every price gives a lower one, the highest counts. Where there is a range (of sequences, of fractions recomputed, of D + D'),
each figure is taken from that end of it where it is best.

Left out: embedding and optimizer, messages on the way, latencies, the slices before the last one in D and after it in D', that
all lanes on a way cut sequences alike, and what memory holds besides activations of layers and head: of keys and values, too,
which slices keep though they are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sim.cost.pieces import PieceSeconds, head_seconds, layer_seconds
from sim.spec.cluster import Cluster
from sim.spec.counts import (
    PRECISION_BYTES,
    RECOMPUTE,
    boundary_bytes,
    head_activation_bytes,
    key_value_bytes,
    layer_activation_bytes,
)
from sim.spec.gpu import GpuKind
from sim.spec.job import Job
from sim.spec.plan import slice_counts
from sim.spec.stack import Stack

Array: TypeAlias = npt.NDArray[np.float64]

STEPS = 30
"""How often the interval of times in which the bound lies is halved."""

CLOSE_STEPS = 7
"""The same where divisions are asked for closer ones."""

SHARES = (1.25, 0.25, 5.0)
"""By how much ranges of a lane's share of a micro-batch grow, where there are between so many and so many sequences for each of
its GPUs; elsewhere they double."""

RECOMPUTED = (0.0, 0.02, 0.06, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0)
"""The ends of the ranges of the fraction of its layers that a lane recomputes in full, all others pointwise."""

RECOMPUTED_POINTWISE = (0.0, 0.25, 0.5, 0.75)
"""The ends of the ranges of the fraction that it recomputes pointwise, where none are in full; the last one ends at all."""

WAYS = np.concatenate([[0.0], np.geomspace(1 / 64, 0.5, 60), [1.0]])
"""The ends of the ranges of D + D', as fractions of the iteration."""

WAY_PRICES = np.array([0.0, 0.1, 0.15, 0.2, 0.3, 0.45, 0.65, 1.0, 1.5, 3.0])
"""Prices of a second of the way that are tried, as a fraction of what a sequence's layers cost, / seconds of the iteration."""

GPU_WAYS = (0.04, 0.07, 0.1, 0.14, 0.2)
GPU_WAY_PRICES = (0.1, 0.2, 0.35, 0.6)
"""Prices of GPUs that are tried: what each is worth if D + D' is such a fraction of the iteration and a second of it has such a
price, so that lanes of all kinds are equally dear."""

WORST = 1.4
"""Of lanes that take longer than the best by such a factor it is not asked how long their way is, or what they hold."""

LONG = 1.15
"""Of lanes that do so without recomputation, by this factor, it is not asked how long their way is."""

LEAST_S = 1e-30
"""In place of no seconds at all, of which nothing can be a part."""

SMALLEST_BYTES = 1e-3
"""What a layer's activations are taken to need at least, where they are no more than what rounding may save."""

ROUNDING = 1e-9
"""The memory that parts may gain by being rounded, one by one, as a fraction."""


@dataclass(frozen=True)
class _Lanes:
    """What lanes of one kind may be like, none of which is better in all: an entry for each of them."""

    gpu_s: Array
    """GPU-seconds of a layer for a sequence, forward and backward, at least."""
    way_s: Array
    """Seconds of a layer on the way of a last slice forward and back, at least."""
    kept_forward_s: Array
    """GPU-seconds of the forwards of what a GPU's memory has room for, at most."""
    kept_backward_s: Array
    """GPU-seconds of the backwards of what it has room for, at most."""


@dataclass(frozen=True)
class _Kind:
    """A kind of GPU: how many there are, what lanes of it may be like, and what holds for all of them."""

    count: int
    lanes: _Lanes
    head_s: float
    """GPU-seconds of the head for a sequence, at least."""
    forward: float
    """The part of the way that is forward, at least."""
    back: float
    """The part of the way that is back, at least."""


@dataclass(frozen=True)
class Division:
    """A way to divide the work over a cluster: GPUs that may compute all the time, and what all others do at most."""

    counts: Mapping[GpuKind, int]
    others: float = 0.0
    """Layers of sequences."""
    exchange_s: float = 0.0
    """How long gradients and parameters are on their way at least when all forwards are done."""
    closer: Callable[[], Iterable[Division]] | None = None
    """The same as several, of which each allows less; these take long to find."""


Divisions: TypeAlias = Callable[[float], Iterable[Division]]
"""All ways to divide the work, given the seconds of an iteration."""


@dataclass(frozen=True)
class _Priced:
    """A kind at some prices: its own, that of a layer of a sequence on the cheapest lanes (by price and length of the way), and
    that of the head."""

    price: float
    each: Array
    head: float


@dataclass(frozen=True)
class _Unpriced:
    """The kinds in an iteration of some seconds, in the last of which gradients are exchanged for some."""

    parts: Mapping[GpuKind, Array]
    """For each of the ways and the lanes, which part of all that a GPU can do a layer of a sequence takes."""
    priced: dict[tuple[float, float], Mapping[GpuKind, _Priced]]
    """What they cost, by the prices that were tried."""


class Filling:
    """What GPUs of some kinds can do at all, by filling and draining their pipelines."""

    def __init__(self, cluster: Cluster, job: Job, counts: Mapping[GpuKind, int]) -> None:
        self.job, self.counts = job, counts
        self._kinds = {kind: _kind(cluster, job, kind, counts) for kind in counts}
        self._forward = min(kind.forward for kind in self._kinds.values())
        self._back = min(kind.back for kind in self._kinds.values())
        self._prices = list(product(GPU_WAYS, GPU_WAY_PRICES))
        # No lane is asked for the head more seldom, in its own layers' seconds.
        self.head_layers = min(kind.head_s / (WORST * kind.lanes.gpu_s.min()) for kind in self._kinds.values())

    def least_s(self, once_s: float, least_s: float, divisions: Divisions | None = None) -> float:
        """The least seconds, no fewer than `least_s`, of an iteration, of which `once_s` are lost, in any of the divisions.

        Without divisions all GPUs may compute all the time.
        """
        found = divisions or (lambda _: [Division(self.counts)])

        def too_short(seconds: float, closely: bool) -> bool:
            known: dict[float, _Unpriced] = {}  # by the seconds of the exchange

            def proven(division: Division) -> bool:
                if self._too_short(division, seconds - once_s, once_s, known):
                    return True
                return closely and division.closer is not None and all(proven(part) for part in division.closer())

            return all(proven(division) for division in found(seconds))

        low = least_s
        for closely, steps in ((False, STEPS), (True, CLOSE_STEPS)):
            if (divisions is None and closely) or not too_short(low, closely):
                continue
            high = 1.05 * low
            while too_short(high, closely):
                low, high = high, 1.5 * high
            for _ in range(steps):
                middle = (low + high) / 2
                low, high = (middle, high) if too_short(middle, closely) else (low, middle)
        return low

    def most(self, seconds: float, once_s: float, exchange_s: float) -> Mapping[GpuKind, float]:
        """The most layers of sequences that a GPU of each kind does, a head counted as `head_layers` of them."""
        after_s = max(0.0, exchange_s - once_s)
        found = {}
        for name, kind in self._kinds.items():
            computing_s = self._computing_s(kind.lanes, np.zeros(1), seconds - once_s, after_s)[:, 0]
            found[name] = float(np.max(computing_s / kind.lanes.gpu_s))
        return found

    def head_s(self, kind: GpuKind) -> float:
        """The GPU-seconds of the head for a sequence, at least."""
        return self._kinds[kind].head_s

    def _too_short(
        self,
        division: Division,
        seconds: float,
        once_s: float,
        known: dict[float, _Unpriced],
    ) -> bool:
        """Whether the job cannot be done in so many seconds if its work is divided so, by some prices."""
        exchange_s = max(0.0, division.exchange_s - once_s)
        if exchange_s not in known:
            known[exchange_s] = self._unpriced(seconds, exchange_s)
        unpriced = known[exchange_s]
        for at, prices in enumerate(self._prices):
            if prices not in unpriced.priced:
                unpriced.priced[prices] = self._priced(unpriced, seconds, exchange_s, *prices)
            if self._proven(division, seconds, unpriced.priced[prices]):
                self._prices.insert(0, self._prices.pop(at))  # others like it are often proven so, too
                return True
        return False

    def _proven(self, division: Division, seconds: float, priced: Mapping[GpuKind, _Priced]) -> bool:
        """Whether these prices prove that the job cannot be done in so many seconds."""
        job, layers = self.job, self.job.model.layers
        free = [priced[kind] for kind, count in division.counts.items() if count]
        if not free:
            return division.others < job.global_batch * layers * (1 - 1e-9)
        given = sum(count * priced[kind].price for kind, count in division.counts.items())
        second = WAY_PRICES * layers / seconds
        each, head = np.minimum.reduce([kind.each for kind in free]), min(kind.head for kind in free)
        net = layers * each - second[:, None] * WAYS[1:] * seconds
        best = np.argmax(net, axis=0)
        at = int(np.argmin(np.max(net, axis=0)))
        least = float(np.max(net, axis=0)[at])
        if job.global_batch * (least + head) <= given * (1 + 1e-9):
            return False
        if division.others == 0:
            return True
        # A layer on the other GPUs has a price, too, as it has on these, without or with its part of the way.
        for other in ((least + head) / (layers + self.head_layers), float(each[best[at], at])):
            net = layers * np.minimum(each, other) - second[:, None] * WAYS[1:] * seconds
            needed = job.global_batch * (float(np.max(net, axis=0).min()) + min(head, other * self.head_layers))
            if needed > (given + other * division.others) * (1 + 1e-9):
                return True
        return False

    def _unpriced(self, seconds: float, exchange_s: float) -> _Unpriced:
        """The kinds, before any prices."""
        parts = {}
        for name, kind in self._kinds.items():
            computing_s = self._computing_s(kind.lanes, WAYS[:-1], seconds, exchange_s)
            part = np.where(computing_s > 0, kind.lanes.gpu_s[:, None] / np.maximum(computing_s, LEAST_S), math.inf)
            parts[name] = np.ascontiguousarray(part.T)
        return _Unpriced(parts, {})

    def _priced(
        self, unpriced: _Unpriced, seconds: float, exchange_s: float, way: float, way_price: float
    ) -> Mapping[GpuKind, _Priced]:
        """The kinds at their prices for such a way at such a price."""
        layers = self.job.model.layers
        second = WAY_PRICES * layers / seconds
        found = {}
        for name, kind in self._kinds.items():
            lanes = kind.lanes
            worth = np.maximum(0.0, 1 - way_price * layers / seconds * lanes.way_s)
            price = float(np.max(worth * self._computing_s(lanes, np.array([way]), seconds, exchange_s)[:, 0] / lanes.gpu_s))
            cost = price * unpriced.parts[name]  # above zero: the lane that is as good as can be has a price at any
            # Price by price: all at once are more numbers than caches hold.
            each = np.array([np.min(cost + one * lanes.way_s, axis=1) for one in second])
            found[name] = _Priced(price, each, price * kind.head_s / seconds)
        return found

    def _computing_s(self, lanes: _Lanes, ways: Array, seconds: float, exchange_s: float) -> Array:
        """E of each lane, for ways that are such fractions of the seconds."""
        kept_forward_s, kept_backward_s = lanes.kept_forward_s[:, None], lanes.kept_backward_s[:, None]
        forward_s, back_s = self._forward * ways * seconds, np.maximum(self._back * ways * seconds, exchange_s)
        after_s = np.maximum(ways * seconds, forward_s + back_s)
        computing_s = np.minimum(seconds - forward_s + kept_forward_s, seconds - back_s + kept_backward_s)
        both_s: Array = np.minimum(computing_s, seconds - after_s + kept_forward_s + kept_backward_s)
        return np.minimum(both_s, seconds)


# --- Choices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lane:
    """Seconds of a lane of some degrees for its share of a micro-batch, of a layer with its collectives and of the head."""

    each: float
    """GPU-seconds of a sequence in a second of the lane."""
    slices: int
    """In so many its sequences come; all seconds but those of the last slice's way are of all of them together."""
    forward_s: float
    backward_s: float
    again_s: float
    """Of the recomputation of a layer in full, and of the pointwise one."""
    pointwise_s: float
    way_forward_s: float
    way_back_s: float
    head_forward_s: float
    head_backward_s: float

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of a layer for a sequence, nothing recomputed."""
        return self.each * (self.forward_s + self.backward_s)

    @property
    def way_s(self) -> float:
        """Seconds of a layer on the way forward and back."""
        return self.way_forward_s + self.way_back_s


def _kind(cluster: Cluster, job: Job, kind: GpuKind, counts: Mapping[GpuKind, int]) -> _Kind:
    """What lanes of a kind may be like."""
    model, software, most = job.model, cluster.stack, sum(counts.values())
    element_bytes, port_bytes_per_s = PRECISION_BYTES[job.precision], _port_bytes_per_s(cluster, kind)
    lanes = [
        tuple(_lane(cluster, job, kind, degrees, slices, share, port_bytes_per_s, whole) for share in shares)
        for degrees in _degrees(job, most)
        for whole in ((False, True) if model.experts is not None and model.experts.experts % degrees[0] == 0 else (False,))
        for slices in (slice_counts(job.sequence_length) if degrees[1] == 1 else (1,))
        for shares in _shares(job.global_batch, math.prod(degrees))
    ]
    none, pointwise, least, full = (
        software.activation_scale
        * layer_activation_bytes(model, 1, job.sequence_length, 1, False, mode, element_bytes, software.flash_attention)
        for mode in RECOMPUTE
    )
    pointwise -= none - least  # selective recomputation is taken to cost nothing
    # Of two modes a lane has the cheaper first, and a mixture of full and none is no cheaper than what it is then taken to have.
    line = (least - pointwise) / max(SMALLEST_BYTES, least - full)
    lanes = [tuple(replace(lane, pointwise_s=min(lane.pointwise_s, line * lane.again_s)) for lane in pair) for pair in lanes]
    logits = head_activation_bytes(model, 1, job.sequence_length, 1, False, element_bytes)
    room = max(0.0, kind.memory_bytes - software.context_bytes) * (1 + ROUNDING) / (1 + software.fragmentation)
    choices = []
    long_s = LONG * min(lane.gpu_s for pair in lanes for lane in pair)
    rungs = [(share, 0.0) for share in RECOMPUTED_POINTWISE] + [(1.0, share) for share in RECOMPUTED]
    for fewest, many in pairwise(rungs):
        kept = least - many[0] * (least - pointwise) - many[1] * (pointwise - full)
        for few, more in lanes:
            # What a device keeps of a slice of its share is whole bytes, of which rounding may save one.
            saved = few.slices * few.each
            layers = few.each * room / max(SMALLEST_BYTES, kept - saved)
            heads = few.each * room / (software.logits_scale * max(SMALLEST_BYTES, logits - saved))
            backward_s = few.backward_s + _again_s(few, many)
            choices.append(
                (
                    more.each * (more.forward_s + more.backward_s + _again_s(more, fewest)),
                    few.way_s if more.gpu_s < long_s else 0.0,
                    max(layers * few.forward_s, heads * few.head_forward_s),
                    max(layers * backward_s, heads * few.head_backward_s),
                )
            )
    worst_s = WORST * min(choice[0] for choice in choices)
    asked = [lane for pair in lanes if pair[1].gpu_s < long_s for lane in pair]
    parts = [lane.way_forward_s / lane.way_s for lane in asked]
    head_s = min(more.each * (more.head_forward_s + more.head_backward_s) for _, more in lanes)
    return _Kind(counts[kind], _undominated(choices, worst_s), head_s, min(parts), 1 - max(parts))


def _again_s(lane: _Lane, fractions: tuple[float, float]) -> float:
    """Seconds of recomputation of a layer, of which such fractions are recomputed pointwise at least, and in full."""
    pointwise, full = fractions
    return pointwise * lane.pointwise_s + full * (lane.again_s - lane.pointwise_s)


def _undominated(choices: list[tuple[float, float, float, float]], worst_s: float) -> _Lanes:
    """The lanes without those that another one is at least as good as: in GPU-seconds, on the way, and in how many times its
    GPU-seconds its memory has room for. One that is otherwise as good as can be stands for all that take `worst_s` or longer."""
    kept: list[tuple[float, float, float, float]] = []
    for gpu_s, way_s, forward_s, backward_s in sorted(choice for choice in choices if choice[0] < worst_s):
        held_forward, held_backward = forward_s / gpu_s, backward_s / gpu_s
        for at, (_, way, forward, back) in enumerate(kept):
            if way <= way_s and forward >= held_forward and back >= held_backward:
                kept.insert(0, kept.pop(at))  # it is often as good as the next ones, too
                break
        else:
            kept.append((gpu_s, way_s, held_forward, held_backward))
    gpu, way, forward, back = np.array([(worst_s, 0.0, math.inf, math.inf), *kept]).T
    return _Lanes(gpu, way, forward * gpu, back * gpu)


def _lane(
    cluster: Cluster,
    job: Job,
    kind: GpuKind,
    degrees: tuple[int, int],
    slices: int,
    sequences: int,
    port_bytes_per_s: float,
    whole_experts: bool,
) -> _Lane:
    """A lane of one kind. Sequence parallelism and the most expert parallelism save most, and are taken to be there."""
    model, stack, length, precision = job.model, cluster.stack, job.sequence_length, job.precision
    tensor, context = degrees
    experts = (1 if model.experts is None else model.experts.experts, whole_experts)
    layers = sliced_seconds(kind, stack, job, slices, sequences, tensor, True, context, *experts)
    head = head_seconds(kind, stack, model, sequences, length // slices, tensor, True, precision, context)
    # In a node or across nodes, whichever is the quicker.
    bytes_per_s = max(stack.collective_scale, stack.node_collective_scale) * port_bytes_per_s
    element_bytes, summed_s = PRECISION_BYTES[precision], 0.0
    if tensor > 1:
        # Two sums forward, and two of the gradients on the way back; where all experts are whole ones, attention's alone.
        sums = 2 - (whole_experts and model.experts is not None and not model.experts.shared_experts)
        num_bytes = sums * boundary_bytes(model, sequences, length, element_bytes) // context
        summed_s = (1 - stack.tensor_overlap) * num_bytes / bytes_per_s
    forward_s = back_s = summed_s
    if context > 1:  # keys and values go round once forward, and on the way back once more with their gradients
        alone = layer_seconds(kind, stack, model, 1, length, tensor, True, precision, context, *experts)
        round_s = key_value_bytes(model, 1, length, tensor, element_bytes) / bytes_per_s
        others = sequences * (context - 1) / context  # of as many steps, all but one hide behind the attention to the last one's
        forward_s += others * max(0.0, round_s - alone.attention_s)
        back_s += others * max(0.0, 2 * round_s - alone.attention_backward_s)
    layers_s = sum(layer.forward_s for layer in layers)
    return _Lane(
        each=tensor * context / sequences,
        slices=slices,
        forward_s=layers_s + forward_s,
        backward_s=sum(layer.backward_s for layer in layers) + back_s,
        again_s=layers_s + summed_s,
        pointwise_s=sum(layer.pointwise_s for layer in layers),
        way_forward_s=layers[-1].forward_s + forward_s / slices,
        way_back_s=layers[-1].backward_input_s + back_s / slices,
        head_forward_s=slices * head.forward_s,
        head_backward_s=slices * head.backward_s,
    )


def sliced_seconds(
    kind: GpuKind,
    stack: Stack,
    job: Job,
    slices: int,
    sequences: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    whole_experts: bool = False,
) -> list[PieceSeconds]:
    """Seconds of one layer for each slice of some sequences that come in so many."""
    length = job.sequence_length // slices
    split = (tensor_parallel, sequence_parallel, job.precision, context_parallel, expert_parallel, whole_experts)
    return [layer_seconds(kind, stack, job.model, sequences, length, *split, place * length) for place in range(slices)]


def _degrees(job: Job, most: int) -> Iterator[tuple[int, int]]:
    """The degrees of tensor and context parallelism that a lane of at most so many GPUs can have."""
    contexts = [1, *(ranks for ranks in range(2, most + 1) if job.sequence_length % (2 * ranks) == 0)]
    for tensor in range(1, min(most, job.model.heads) + 1):
        if job.model.heads % tensor == 0:
            yield from ((tensor, context) for context in contexts if tensor * context <= most)


def _shares(batch: int, gpus: int) -> Iterator[tuple[int, int]]:
    """Ranges of the sequences that a lane of so many GPUs takes of a micro-batch."""
    growth, fewest, most = SHARES
    first = 1
    while first <= batch:
        times = growth if fewest * gpus <= first <= most * gpus else 2.0
        last = min(batch, max(first, math.ceil(times * first) - 1))
        yield first, last
        first = last + 1


def _port_bytes_per_s(cluster: Cluster, kind: GpuKind) -> float:
    """The most that a GPU of a kind sends: over its PCIe link, or over its NVLink port or its node's cards."""
    if cluster.link_overrides:
        return math.inf
    efficiency, rates = cluster.fabric.efficiency, [0.0]
    for node in {device.node.name: device.node for device in cluster.devices if device.gpu == kind}.values():
        if not node.intra.is_nvlink:
            rates.append(node.intra.bandwidth_bytes_per_s * efficiency("pcie"))
            continue
        rates.append(node.intra.bandwidth_bytes_per_s * max(efficiency("nvlink"), efficiency("nvls")))
        if (nic := node.nic) is not None:
            rates.append(nic.count * nic.bandwidth_bytes_per_s * max(efficiency(nic.kind), efficiency("tcp")))
            rates.append((nic.ethernet_bytes_per_s or 0.0) * efficiency("ethernet"))
    return max(rates)
