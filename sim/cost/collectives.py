"""Collectives and messages between lanes as fluid transfers: which bytes cross which links, and how many latencies.

A collective is never simulated step by step. Its transfer holds, for every link that it crosses, the total bytes of all its
steps; its latency is the start and that of all steps that follow one another; of gloo's rings, what the bytes of slower hops do
not hide of it (`_laps`). Which algorithm and which protocol a collective
takes depends on its size, as in NCCL (src/graph/tuning.cc): the one that would be done first with its links to itself.

Algorithms: a ring; a reduction inside each node and trees across; the NVLink switch that reduces by itself. Protocols: that
of full bandwidth, and that of low latency, which sends a flag with every word of data in place of fences between the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from sim.cost.network import NOTHING, Network, Path, Transfer, at_once, scaled, together
from sim.spec.cluster import Node
from sim.spec.gpu import is_cpu
from sim.spec.transformer import Moe

RING_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often a ring collective goes round: each time every link carries (n-1)/n of the tensor in n-1 steps.

Those that go round equally often are done alike, and what is known of one serves the other.
"""

FLAGGED_BYTES = 2.0
"""Bytes on the wire per byte of data in the protocol of low latency: four of data, then a flag of four (NCCL's LL)."""

SWITCH_STEPS = 12
"""What the NVLink switch's reduction takes to fill its pipeline, in steps of full bandwidth: 60 to 100 us on H100 and H200."""

ALIKE = 1 + 1e-9
"""Seconds within this factor of each other are the same: what rounding makes of them chooses no algorithm."""

Group: TypeAlias = tuple[float, tuple[str, ...]]
"""A part of the tensor, in fractions of its bytes, and the devices that hold it."""


@dataclass(frozen=True)
class _Steps:
    """One algorithm for a collective of one byte: what it puts on links, and what its steps take that follow one another."""

    transfer: Transfer
    """Its latency is that of the paths of all those steps."""
    step_s: float
    """Seconds that the steps take longer in the protocol of full bandwidth."""
    rings: tuple[tuple[Path, ...], ...] = ()
    """Where it is nothing but rings: the paths from each device to the next one."""


Line: TypeAlias = tuple[float, float]
"""Seconds that a size takes at least: so many, and so many for each byte."""


@dataclass(frozen=True)
class Option:
    """A way of doing a collective of one byte."""

    transfer: Transfer
    """Its latency is in the lines."""
    byte_s: float
    """Seconds of the byte alone on its links."""
    lines: tuple[Line, ...]
    """It takes what the highest one says of a size."""

    def latency_s(self, num_bytes: float) -> float:
        """What a size takes beside its bytes."""
        if len(self.lines) == 1:
            return self.lines[0][0]
        return max(0.0, *[latency_s - num_bytes * (self.byte_s - byte_s) for latency_s, byte_s in self.lines])

    def never_slower(self, other: Option) -> bool:
        """Whether it takes no longer than another, whatever the size."""
        return all(any(_below(one, another) for another in other.lines) for one in self.lines)


def _below(one: Line, other: Line) -> bool:
    """Whether a line is nowhere higher than another."""
    return one[0] <= other[0] * ALIKE and one[1] <= other[1] * ALIKE


# --- Any collective ----------------------------------------------------------------------------------------------------


def collective(network: Network, kind: str, devices: Sequence[str], num_bytes: float, count: int = 1) -> Transfer:
    """The transfer of `count` collectives, one after the other, by the algorithm and the protocol that take the least time.

    `kind` is all_reduce, all_gather, reduce_scatter (of a tensor of `num_bytes`: gathered or reduced) or all_to_all (every
    device has `num_bytes` and keeps 1/n of them).
    """
    if len(devices) < 2 or num_bytes <= 0 or count == 0:
        return NOTHING
    key = (RING_STEPS.get(kind), tuple(devices))
    options = network.options.get(key)
    if options is None:
        options = network.options[key] = _options(network, kind, [(1.0, key[1])])
    return _cheapest(options, num_bytes, count)


def across_lanes(network: Network, kind: str, lanes: Sequence[Sequence[str]], num_bytes: float) -> Transfer:
    """The transfer of one collective over lanes of any tensor-parallel degrees that hold the same tensor of `num_bytes`.

    Each slice of the common refinement of the degrees is a collective over the one device of each lane that holds it; all go
    at once, and the slowest latency counts.
    """
    if len(lanes) < 2 or num_bytes <= 0:
        return NOTHING
    key = (RING_STEPS.get(kind), "across lanes", tuple(tuple(lane) for lane in lanes))
    options = network.options.get(key)
    if options is None:
        options = network.options[key] = _options(network, kind, _slices_of(key[2]))
    return _cheapest(options, num_bytes)


def _slices_of(lanes: Sequence[Sequence[str]]) -> list[Group]:
    """The slices of the common refinement of the lanes' degrees: how much of the tensor, and who holds it."""
    return [
        ((stop - start) / of, tuple(lane[start * len(lane) // of] for lane in lanes))
        for start, stop, of in slices([len(lane) for lane in lanes])
    ]


def _cheapest(options: Sequence[Option], num_bytes: float, count: int = 1) -> Transfer:
    """The transfer of `num_bytes` by the option that takes the least time alone on its links, of equals the first."""
    if not options:
        return NOTHING
    best, least_s = options[0], math.inf
    for option in options if len(options) > 1 else ():
        seconds = option.latency_s(num_bytes) + num_bytes * option.byte_s
        if seconds * ALIKE < least_s:
            best, least_s = option, seconds
    return scaled(best.transfer, num_bytes, count, best.latency_s(num_bytes))


def _options(network: Network, kind: str, groups: Sequence[Group]) -> tuple[Option, ...]:
    """The ways in which groups can do a collective at once, those of the fewest seconds a byte first.

    What is never the cheapest, whatever the size, is left out; of those that always take the same the first algorithm stays. A
    group that cannot do an algorithm does its ring.
    """
    groups = [group for group in groups if len(group[1]) > 1]
    nccl = by_nccl(network, [name for _, devices in groups for name in devices])
    kept: list[Option] = []
    known: list[list[_Steps]] = []
    for algorithm in _ALGORITHMS[kind]:
        each = [algorithm(network, kind, devices) for _, devices in groups]
        if all(steps is None for steps in each):
            continue
        rings = known[0] if known else []  # a ring is the first way of doing what has rings at all
        done = [steps or rings[i] for i, steps in enumerate(each)]
        if done in known:
            continue
        known.append(done)
        for flagged in (False, True) if nccl and algorithm in (_ring, _trees) else (False,):
            transfer = at_once([_started(network, steps, share, flagged) for steps, (share, _) in zip(done, groups, strict=True)])
            byte_s = network.busiest_s(transfer)
            lines = ((transfer.latency_s, byte_s),) if nccl else _lines(network, kind, done, transfer)
            option = Option(transfer, byte_s, lines)
            if not any(other.never_slower(option) for other in kept):
                kept = [other for other in kept if not option.never_slower(other)] + [option]
    return tuple(sorted(kept, key=lambda option: option.byte_s))


def _lines(network: Network, kind: str, done: Sequence[_Steps], transfer: Transfer) -> tuple[Line, ...]:
    """What gloo takes at least for the steps of several groups, which move a byte at once: together, their `transfer`."""
    start_s, busiest_s, link_s = network.cluster.fabric.start_s, network.busiest_s(transfer), network.seconds_by_link(transfer)
    found = [(steps.transfer.latency_s + steps.step_s, busiest_s) for steps in done if not steps.rings]
    for ring in (ring for steps in done for ring in steps.rings):
        count = RING_STEPS[kind] * (len(ring) - 1)
        latencies_s = [path.latency_s + path.step_s for path in ring]
        found += _laps(latencies_s, [max(link_s[link] for link, _ in path.links) / count for path in ring], count)
    kept: list[Line] = []
    for line in found:
        if not any(_below(line, other) for other in kept):
            kept = [other for other in kept if not _below(other, line)] + [line]
    return tuple((start_s + latency_s, byte_s) for latency_s, byte_s in kept)


def _laps(latencies_s: Sequence[float], steps_s: Sequence[float], count: int) -> Iterator[Line]:
    """What `count` steps of a ring take at least, of which a hop's takes its seconds and then its latency: together, all of it.

    A device sends a part when it has received it and has sent the one before. So a step waits for the one before on the same hop,
    for its seconds, and for that on the hop before, for its latency too; all steps take as long as the longest chain of such
    waits. A chain goes on over some hops that follow one another, and stays for all other steps at the slowest of them: there the
    latencies of the hops that it leaves out are hidden. Where all hops are alike none is.
    """
    n = len(steps_s)
    for first in range(n):
        latency_s = passed_s = slowest_s = 0.0
        for length in range(1, count + 1):
            hop = (first + length - 1) % n
            latency_s, passed_s = latency_s + latencies_s[hop], passed_s + steps_s[hop]
            slowest_s = max(slowest_s, steps_s[hop])
            yield latency_s, passed_s + (count - length) * slowest_s


def _started(network: Network, steps: _Steps, num_bytes: float, flagged: bool = False) -> Transfer:
    """The transfer of an algorithm's steps, with its start, in the protocol of full bandwidth or of low latency (`flagged`)."""
    latency_s = network.cluster.fabric.start_s + steps.transfer.latency_s + (0.0 if flagged else steps.step_s)
    return replace(scaled(steps.transfer, num_bytes * (FLAGGED_BYTES if flagged else 1.0)), latency_s=latency_s)


def by_nccl(network: Network, devices: Sequence[str]) -> bool:
    """Whether NCCL does a collective; among CPUs it is gloo, which has rings alone."""
    kinds = {kind.name: kind for kind in [network.cluster.device(name).gpu for name in devices]}
    return not any(map(is_cpu, kinds.values()))


# --- Algorithms --------------------------------------------------------------------------------------------------------


def ring(network: Network, kind: str, devices: Sequence[str], num_bytes: float, count: int = 1) -> Transfer:
    """The transfer of `count` ring collectives in the protocol of full bandwidth, with all their latencies, whatever the size.

    The ring enters and leaves every node once; where the devices of each node use several NICs, as many rings share the
    bytes, each turned so that it crosses by other NICs, as NCCL's channels do.
    Source: Patarasuk & Yuan (2009), section 3.
    """
    if len(devices) < 2 or num_bytes <= 0 or count == 0:
        return NOTHING
    key = (kind, "ring", tuple(devices))
    unit = network.unit_transfers.get(key)
    if unit is None:
        found = _ring(network, kind, key[2])
        unit = network.unit_transfers[key] = _started(network, found, 1.0)
    return scaled(unit, num_bytes, count)


def _ring(network: Network, kind: str, devices: Sequence[str]) -> _Steps:
    """A byte goes over n-1 of the n hops in each round, at worst over all but the shortest.

    NCCL's latencies come beside its bytes, as it reckons itself (src/graph/tuning.cc); of gloo's see `_laps`.
    """
    rounds, n = RING_STEPS[kind], len(devices)
    rings = _rings(network, devices)
    each = rounds * (n - 1) / n / len(rings)
    paths = [[network.path(a, b) for a, b in pairwise([*order, order[0]])] for order in rings]
    latency_s = max(_but_one([path.latency_s for path in ring]) for ring in paths)
    step_s = max(_but_one([path.step_s for path in ring]) for ring in paths)
    moved = network.moved((path, each) for ring in paths for path in ring)
    return _Steps(replace(moved, latency_s=rounds * latency_s), rounds * step_s, tuple(map(tuple, paths)))


def _but_one(seconds: Sequence[float]) -> float:
    """The sum without the smallest."""
    return math.fsum(seconds) - min(seconds)


def _trees(network: Network, kind: str, devices: Sequence[str]) -> _Steps | None:
    """Reduced around rings inside the nodes, across them along trees. See `_across`."""
    return _across(network, devices, lambda group: _ring(network, kind, group))


def _switch_trees(network: Network, kind: str, devices: Sequence[str]) -> _Steps | None:
    """Reduced by the NVLink switches inside the nodes, across them along trees. See `_across`."""
    return _across(network, devices, lambda group: _switch(network, kind, group))


def _across(network: Network, devices: Sequence[str], reduced: Callable[[Sequence[str]], _Steps | None]) -> _Steps | None:
    """Reduced inside each node, across nodes along two binary trees that carry half each, and gathered inside each node.

    Among nodes of several devices every device takes a slice of the tensor across, over its own NIC. A node that is inside
    one tree is a leaf of the other, so that none moves much more than twice the tensor in either direction.
    Source: Sanders, Speck & Traeff (2009), Two-tree algorithms for full bandwidth broadcast, reduction and scan; NCCL 2.4.
    """
    groups = _by_node(network, devices)
    if len(groups) < 2 or not by_nccl(network, devices):
        return None
    inside = []
    for group in groups:
        steps = reduced(group) if len(group) > 1 else _Steps(NOTHING, 0.0)
        if steps is None:
            return None
        inside.append(steps)
    moves: list[tuple[str, str, float]] = []
    for share, holders in _slices_of(groups):
        for child, parent in _two_trees(len(groups)):
            moves += [(holders[child], holders[parent], share / 2), (holders[parent], holders[child], share / 2)]
    across, climbed = network.transfer(moves), 2 * math.ceil(math.log2(len(groups)))
    latency_s = max(steps.transfer.latency_s for steps in inside) + climbed * across.latency_s
    step_s = max(steps.step_s for steps in inside) + climbed * network.cluster.fabric.step_s
    transfer = together([across, *(steps.transfer for steps in inside)])
    return _Steps(replace(transfer, latency_s=latency_s), step_s)


def _two_trees(n: int) -> list[tuple[int, int]]:
    """The edges (child, parent) of two binary trees over 0 ... n-1, of which what is inside one is a leaf of the other.

    The parent of a number has its lowest bit cleared and the next one set, or just cleared where that is beyond the last;
    the second tree is the first one mirrored, or turned by one where n is odd.
    """

    def parent(i: int) -> int:
        low = i & -i
        up = (i ^ low) | (low << 1)
        return up if up < n else i ^ low

    first = [(i, parent(i)) for i in range(1, n)]
    if n % 2 == 0:
        return first + [(n - 1 - i, n - 1 - j) for i, j in first]
    return first + [((i + 1) % n, (j + 1) % n) for i, j in first]


def _switch(network: Network, kind: str, devices: Sequence[str]) -> _Steps | None:
    """The NVLink switch reduces what it reads from all devices, and sends each the sum (NVLink SHARP, NCCL's NVLS).

    Device i of n reads the sum of the i-th of n parts, and has the switch write it to all: n parts leave every device and one
    reaches it, then the reverse. On Hopper or later, whose sign is fp8, behind an NVSwitch.
    """
    nodes = {node.name: node for node in (network.cluster.device(name).node for name in devices)}
    if len(nodes) > 1 or not all(_has_sharp(node) for node in nodes.values()):
        return None
    n, order = len(devices), _rings(network, devices)[0]
    wire = network.cluster.fabric.efficiency("nvlink") / network.cluster.fabric.efficiency("nvls")
    one = network.transfer((a, b, (n + 1) / n * wire) for a, b in pairwise([*order, order[0]]))
    step_s = network.path(order[0], order[1]).step_s
    return _Steps(replace(one, latency_s=2 * one.latency_s), SWITCH_STEPS * step_s)


def _has_sharp(node: Node) -> bool:
    return node.intra.kind == "nvswitch" and node.gpu.peak("fp8") is not None


def _pairs(network: Network, kind: str, devices: Sequence[str]) -> _Steps:
    """Every device sends each other one its part: all messages at once, of which a device begins one after the other."""
    n = len(devices)
    pairs = [(a, b) for a in devices for b in devices if a != b]
    step_s = max(network.path(a, b).step_s for a, b in pairs)
    return _Steps(network.transfer((a, b, 1 / n) for a, b in pairs), (n - 1) * step_s)


Algorithm: TypeAlias = Callable[[Network, str, Sequence[str]], _Steps | None]

_ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": (_ring, _trees, _switch, _switch_trees),
    "all_gather": (_ring,),
    "reduce_scatter": (_ring,),
    "all_to_all": (_pairs,),
}


# --- Tokens and their experts ----------------------------------------------------------------------------------------


def dispatch(network: Network, groups: Iterable[tuple[str, Sequence[str]]], experts: Moe, once_a_node: bool = False) -> Transfer:
    """What devices send, all at once, in an all-to-all among those that hold a layer's experts, of one byte each.

    A device is given with its group, in which each has as many of the experts, itself among them; its byte is that of its tokens,
    once for each of their experts, which are as likely to be any. Either each copy goes its own way, or, `once_a_node`, a token
    goes to each node that has experts of it once, to the GPU of the sender's number there, which sends it on, once to each GPU
    that has some (DeepEP: DeepSeek-AI, 2024, arXiv:2412.19437, section 3.2.2).
    """
    fabric, most, sent = network.cluster.fabric, 0, list[tuple[str, str, float]]()
    for device, group in groups:
        most = max(most, len(group))
        if once_a_node:
            sent += _sent_once(network, device, group, experts)
        else:
            sent += [(device, other, 1 / len(group)) for other in group]
    found = network.transfer(sent)
    return replace(found, latency_s=fabric.start_s + found.latency_s + (most - 1) * fabric.step_s)


def _sent_once(network: Network, device: str, group: Sequence[str], experts: Moe) -> Iterator[tuple[str, str, float]]:
    """The messages of a device whose tokens go to each node once; of those to other nodes also what is sent on there."""

    def share(holders: int) -> float:
        """Of a byte the part that goes to so many of the group together: of a token one copy, if any of its experts is there."""
        others = experts.experts - holders * experts.experts // len(group)
        return (1 - math.comb(others, experts.top_k) / math.comb(experts.experts, experts.top_k)) / experts.top_k

    nodes: dict[str, list[str]] = {}
    for other in group:
        nodes.setdefault(network.cluster.device(other).node.name, []).append(other)
    own = network.cluster.device(device).node.name
    number = nodes[own].index(device)
    for node, there in nodes.items():
        first = device if node == own else there[number % len(there)]
        if node != own:
            yield device, first, share(len(there))
        yield from ((first, other, share(1)) for other in there if other != first)


def _by_node(network: Network, devices: Sequence[str]) -> list[list[str]]:
    """The devices of each node, in order.

    Nodes of one site and rack stand beside each other, and so do the devices of one node and PCIe switch, so that a ring or
    tree over them crosses the slow links as seldom as it can.
    """
    by_node: dict[tuple[str, str, int], list[tuple[int, str]]] = {}
    for name in devices:
        device = network.cluster.device(name)
        place = (device.node.site, device.node.rack or "", network.node_number(device.node.name))
        by_node.setdefault(place, []).append((device.index, name))
    return [[name for _, name in sorted(by_node[place])] for place in sorted(by_node)]


def _rings(network: Network, devices: Sequence[str]) -> list[list[str]]:
    """Orders of the devices; one for each NIC that every node's devices use, and one where they share a node."""
    groups = _by_node(network, devices)
    if len(groups) == 1:
        return groups
    nics = min(len({network.nic_of(name) for name in group}) for group in groups)
    turned = []
    for r in range(nics):
        order: list[str] = []
        for group in groups:
            at = r * len(group) // nics
            order += group[at:] + group[:at]
        turned.append(order)
    return turned


# --- Messages ----------------------------------------------------------------------------------------------------------


def ring_exchange(network: Network, devices: Sequence[str], bytes_per_step: float, steps: int) -> Transfer:
    """The transfer of `steps` exchanges, in each of which every device sends `bytes_per_step` to the next one on a ring.

    So the key and value blocks of context parallelism go round (Liu et al., 2023, Ring Attention: n-1 steps). Each step is a
    message of its own, and starts when the last one has arrived.
    """
    if len(devices) < 2 or bytes_per_step <= 0 or steps == 0:
        return NOTHING
    key = ("ring exchange", tuple(devices))
    unit = network.unit_transfers.get(key)
    if unit is None:
        order = [name for group in _by_node(network, devices) for name in group]
        unit = network.unit_transfers[key] = _message(network, [(a, b, 1.0) for a, b in pairwise([*order, order[0]])])
    return scaled(unit, bytes_per_step, steps)


def _message(network: Network, moves: Sequence[tuple[str, str, float]]) -> Transfer:
    """Messages that go at once, in the protocol of full bandwidth."""
    sent = network.transfer(moves)
    if not sent:
        return NOTHING
    step_s = max(network.path(a, b).step_s for a, b, _ in moves)
    return replace(sent, latency_s=network.cluster.fabric.start_s + sent.latency_s + step_s)


def slices(degrees: Sequence[int]) -> list[tuple[int, int, int]]:
    """The common refinement of a tensor cut into each of these degrees: (start, stop, of), in fractions start/of to stop/of."""
    of = math.lcm(*degrees)
    bounds = sorted({k * of // degree for degree in set(degrees) for k in range(degree + 1)})
    return [(a, b, of) for a, b in pairwise(bounds)]


def between_lanes(
    network: Network, sender: Sequence[str], receiver: Sequence[str], num_bytes: float, sequence_parallel: bool
) -> Transfer:
    """The transfer of an activation (or its gradient) of `num_bytes` from one tensor-parallel group to another.

    Without sequence parallelism every device of both groups has, or needs, all of it: the senders share the sending (those
    on the receiving node alone, if there are any), each receiving node gets every byte once, spread over its devices, which
    then gather it among themselves on the fast links (the scatter-gather of Narayanan et al., 2021, section 4.1, for unequal
    degrees). With it, device i of n has and needs
    only the i-th of n equal parts.
    """
    if sequence_parallel:
        of = math.lcm(len(sender), len(receiver))
        pieces = [(sender[k * len(sender) // of], receiver[k * len(receiver) // of]) for k in range(of)]
        return _message(network, [(a, b, num_bytes / of) for a, b in pieces])
    by_node: dict[str, list[str]] = {}
    for name in receiver:
        by_node.setdefault(network.cluster.device(name).node.name, []).append(name)
    moves: list[tuple[str, str, float]] = []
    gathers = []
    for node, group in by_node.items():
        having = [name for name in sender if network.cluster.device(name).node.name == node] or sender
        pieces_here = math.lcm(len(having), len(group))
        moves += [(having[k % len(having)], group[k % len(group)], num_bytes / pieces_here) for k in range(pieces_here)]
        gathers.append(ring(network, "all_gather", group, num_bytes))
    # The gather of each piece follows on its arrival, so that the two overlap but for their latencies.
    return together([_message(network, moves), at_once(gathers)])
