"""Collectives and messages between lanes as fluid transfers: which bytes cross which links, and how many latencies.

A collective is never simulated step by step. Its transfer holds, for every link that it crosses, the total bytes of all its
steps; its latency is that of one step times their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from sim.cost.network import NOTHING, Network, Transfer, scaled, together

RING_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often a ring collective goes round: each time every link carries (n-1)/n of the tensor in n-1 steps."""


def ring(network: Network, kind: str, devices: Sequence[str], num_bytes: float, count: int = 1) -> Transfer:
    """The transfer of `count` ring collectives, one after the other, of a tensor of `num_bytes` (full: gathered or reduced).

    The ring enters and leaves every node once; where the devices of each node use several NICs, as many rings share the
    bytes, each turned so that it crosses by other NICs, as NCCL's channels do.
    Source: Patarasuk & Yuan (2009), section 3.
    """
    if len(devices) < 2 or num_bytes <= 0 or count == 0:
        return NOTHING
    key = (kind, tuple(devices))
    unit = network.unit_transfers.get(key)
    if unit is None:
        rounds, n = RING_STEPS[kind], len(devices)
        rings = _rings(network, devices)
        each = rounds * (n - 1) / n / len(rings)
        moves = [(a, b, each) for order in rings for a, b in pairwise([*order, order[0]])]
        unit = network.unit_transfers[key] = network.transfer(moves, steps=rounds * (n - 1))
    return scaled(unit, num_bytes, count)


def _rings(network: Network, devices: Sequence[str]) -> list[list[str]]:
    """Orders of the devices; one for each NIC that every node's devices use, and one where they share a node.

    Nodes of one site and rack stand beside each other, and so do the devices of one node and PCIe switch, so that the ring
    crosses the slow links as seldom as it can.
    """
    by_node: dict[tuple[str, str, int], list[tuple[int, str]]] = {}
    for name in devices:
        device = network.cluster.device(name)
        place = (device.node.site, device.node.rack or "", network.node_number(device.node.name))
        by_node.setdefault(place, []).append((device.index, name))
    groups = [[name for _, name in sorted(by_node[place])] for place in sorted(by_node)]
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


def slices(degrees: Sequence[int]) -> list[tuple[int, int, int]]:
    """The common refinement of a tensor cut into each of these degrees: (start, stop, of), in fractions start/of to stop/of."""
    of = math.lcm(*degrees)
    bounds = sorted({k * of // degree for degree in set(degrees) for k in range(degree + 1)})
    return [(a, b, of) for a, b in pairwise(bounds)]


def across_lanes(network: Network, kind: str, lanes: Sequence[Sequence[str]], num_bytes: float) -> Transfer:
    """The transfer of one collective over lanes of any tensor-parallel degrees that hold the same tensor of `num_bytes`.

    Each slice of the common refinement of the degrees is a ring over the one device of each lane that holds it; all rings go
    at once, and the slowest latency counts.
    """
    key = (kind, tuple(tuple(lane) for lane in lanes))
    unit = network.unit_transfers.get(key)
    if unit is None:
        parts = []
        for start, stop, of in slices([len(lane) for lane in lanes]):
            holding = [lane[start * len(lane) // of] for lane in lanes]
            parts.append(ring(network, kind, holding, (stop - start) / of))
        unit = network.unit_transfers[key] = _at_once(parts)
    return scaled(unit, num_bytes) if num_bytes > 0 else NOTHING


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
        return network.transfer((a, b, num_bytes / of) for a, b in pieces)
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
    sent = network.transfer(moves)
    # The gather of each piece follows on its arrival, so that the two overlap but for their latencies.
    return together([sent, _at_once(gathers)])


def _at_once(transfers: Sequence[Transfer]) -> Transfer:
    """Several transfers that begin together, as one: bytes summed, and the slowest latency."""
    joined = together(transfers)
    return Transfer(joined.loads, max((transfer.latency_s for transfer in transfers), default=0.0), joined.num_bytes)
