"""Which pipelines of a plan, and which links, behave alike, so that one of each is enough to know all.

Data-parallel copies on alike GPUs do the same at the same times, and load links that are loaded alike. That is so wherever the
pipelines and links can be divided into classes such that

    pipelines of a class are built the same, take the same seconds, and of each of their transfers bring equal bytes to equally
    many links of each class;
    links of a class have the same capacity, and carry equal bytes of equally many transfers of each class,

(an equitable partition): at every instant the rates of transfers that were alike so far are then alike, because all that a rate
follows from, the capacity of each link and what it is asked to carry, is. The coarsest such classes are found by refinement:
from classes that are too coarse, what tells two of a class apart divides it, until nothing does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.cost.network import Transfer
from sim.spec.cluster import Cluster, Node
from sim.spec.plan import Plan

Numbers = npt.NDArray[np.int64]

EQUAL_BITS = 36
"""Bytes that are equal in so many bits are equal: the order in which they were summed may differ."""


def alike(
    kinds: Sequence[Hashable], transfers: Sequence[Sequence[Transfer]], shared: Sequence[Transfer], capacities: Sequence[float]
) -> tuple[list[int], dict[int, int]]:
    """For each pipeline, and for each link that carries anything, the first one that behaves as it does.

    kinds: of each pipeline all that it does by itself; pipelines of a kind have as many transfers, in the same order.
    transfers: by pipeline. shared: transfers that no pipeline has to itself.
    """
    everything = (*transfers, shared)
    if len(set(kinds)) == len(kinds):
        return list(range(len(kinds))), {link: link for some in everything for one in some for link, _ in one.loads}
    entries = [
        (pipeline, place, link)
        for pipeline, some in enumerate(everything)
        for place, transfer in enumerate(some)
        for link, _ in transfer.loads
    ]
    pipelines, places, carrying = np.array(entries, np.int64).reshape(-1, 3).T
    loads = np.array([num_bytes for some in everything for transfer in some for _, num_bytes in transfer.loads], np.float64)
    names, links = np.unique(carrying, return_inverse=True)
    what = _numbered(places, _numbered(_rounded(loads)))
    # What is shared counts as one more pipeline, alone in its class.
    of_pipeline = np.array(_firsts([*kinds, None]))
    of_link = np.array(_firsts([capacities[name] for name in names]), np.int64)
    known = 0
    while known < (known := len(set(of_pipeline)) + len(set(of_link))):
        of_link = _divided(of_link, links, _numbered(of_pipeline[pipelines], what))
        of_pipeline = _divided(of_pipeline, pipelines, _numbered(of_link[links], what))
    return of_pipeline[:-1].tolist(), dict(zip(names.tolist(), names[of_link].tolist(), strict=True))


# --- Before anything is known of their transfers ---------------------------------------------------------------------


@dataclass(frozen=True)
class Islands:
    """Which parts of a plan, on nodes of their own, are built as an earlier part is, and do as it does but for collectives."""

    pipelines: Sequence[int]
    """For each pipeline the one at its place in the first island that is built as its own."""
    nodes: Mapping[str, str]
    """For each node of an island that another one stands for, the node at its place there."""


def islands(plan: Plan, cluster: Cluster) -> Islands:
    """The islands of a plan: pipelines that share nodes, experts, or a group among which ZeRO divides states, are on one.

    What the lanes of an island send each other crosses the links of its own nodes alone, so that islands meet in gradient
    reductions and parameter gathers only. Where nodes that are built alike may have unlike links (measured pairs, overrides,
    several sites, oversubscribed racks) each island stands for itself.
    """
    # In the order in which rings go round them: two islands whose nodes stand otherwise are not alike.
    pipelines, nodes = plan.pipelines, sorted(cluster.nodes, key=lambda node: node.rack or "")
    measured = cluster.bandwidth_matrix is not None or cluster.link_overrides
    shards = _shards(plan)
    apart = cluster.fabric.oversubscription > 1 or len({node.site for node in nodes}) > 1
    if len(pipelines) < 2 or measured or apart or shards is None:
        return Islands(range(len(pipelines)), {})
    numbers = {node.name: number for number, node in enumerate(nodes)}
    devices = [[cluster.device(d) for s in pipeline.stages for r in s.replicas for d in r.devices] for pipeline in pipelines]
    on = [sorted({numbers[device.node.name] for device in some}) for some in devices]
    found, of_node = list(range(len(pipelines))), dict[str, str]()
    first: dict[Hashable, tuple[list[int], list[int]]] = {}
    makes = [_make(node) for node in nodes]
    for members in _joined([{*each, *e, *s} for each, e, s in zip(on, _experts(plan), shards, strict=True)]):
        used = sorted({number for p in members for number in on[p]})
        place = {nodes[number].name: at for at, number in enumerate(used)}
        built = [
            (pipelines[p].build, tuple([(place[device.node.name], device.index, device.speed) for device in devices[p]]))
            for p in members
        ]
        like, there = first.setdefault((tuple([makes[number] for number in used]), *built), (members, used))
        if like is not members:
            for p, other in zip(members, like, strict=True):
                found[p] = other
            of_node |= {nodes[number].name: nodes[other].name for number, other in zip(used, there, strict=True)}
    return Islands(found, of_node)


def _make(node: Node) -> Hashable:
    """All that a node is, but which one it is."""
    return tuple([getattr(node, each.name) for each in fields(node) if each.name not in ("name", "rack")])


Parts = list[list[tuple[str, int, int]]]
"""For each pipeline the groups of copies of a stage that it has a part in: what they divide, the stage, and their number."""


def _experts(plan: Plan) -> Parts:
    """The groups among which experts are divided."""
    stages = plan.pipelines[0].stages  # those of all pipelines are alike
    degrees = [len(stage.replicas[0].devices) // plan.context_parallel for stage in stages]
    return _grouped(plan, "experts", [len(stage.replicas) for stage in stages], [plan.expert_copies(n) for n in degrees])


def _shards(plan: Plan) -> Parts | None:
    """The groups among which ZeRO divides states, where not all copies of a layer are one; None where pipelines are not alike."""
    if plan.shard_group is None or plan.zero_stage == 0:
        return _grouped(plan, "shards", [], [])
    if len({tuple((stage.layers, len(stage.replicas)) for stage in pipeline.stages) for pipeline in plan.pipelines}) > 1:
        return None
    pipeline = plan.pipelines[0]
    copies = [len(stage.replicas) for stage in pipeline.stages]
    first, last = pipeline.chunks[0][0], pipeline.chunks[-1][0]
    if plan.transformer.tied_embeddings and first != last:
        copies.append(copies[first] + copies[last])  # of the embedding
    return _grouped(plan, "shards", copies, [plan.shard_group] * len(copies))


def _grouped(plan: Plan, what: str, copies: Sequence[int], sizes: Sequence[int]) -> Parts:
    """Groups of so many copies that follow one another, of each stage; `copies`: those of one pipeline."""
    found: Parts = [[] for _ in plan.pipelines]
    for s, (copied, size) in enumerate(zip(copies, sizes, strict=True)):
        count = copied * plan.context_parallel
        if size > 1:
            for p, own in enumerate(found):
                own += [(what, s, group) for group in range(p * count // size, ((p + 1) * count - 1) // size + 1)]
    return found


def _joined(holdings: Sequence[Iterable[Hashable]]) -> list[list[int]]:
    """The holders, by number, in the parts that hold nothing in common."""
    leader = list(range(len(holdings)))
    held_by: dict[Hashable, int] = {}

    def first(holder: int) -> int:
        while leader[holder] != holder:
            leader[holder] = holder = leader[leader[holder]]
        return holder

    for holder, things in enumerate(holdings):
        for thing in things:
            one, other = sorted((first(holder), first(held_by.setdefault(thing, holder))))
            leader[other] = one
    parts: dict[int, list[int]] = {}
    for holder in range(len(holdings)):
        parts.setdefault(first(holder), []).append(holder)
    return list(parts.values())


def _firsts(values: Sequence[Hashable]) -> list[int]:
    """For each value, where it stands first."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(value, at) for at, value in enumerate(values)]


def _rounded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The values without what rounding may have made of them."""
    mantissas, exponents = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissas, EQUAL_BITS)), exponents)


def _numbered(values: npt.NDArray[Any], others: Numbers | None = None) -> Numbers:
    """A number for each value, or for each pair of values: equal numbers for equals."""
    numbers: Numbers = np.unique(values, return_inverse=True)[1].astype(np.int64)
    if others is None:
        return numbers
    return _numbered(numbers * (others.max(initial=0) + 1) + others)


def _divided(classes: Numbers, of: Numbers, entries: Numbers) -> Numbers:
    """The classes of some things, divided by the entries that each of them has, however often; told by the first of a class."""
    order = np.lexsort((entries, of))
    bounds = np.searchsorted(of[order], np.arange(len(classes) + 1)).tolist()
    inside = entries[order]
    return np.array(
        _firsts([(name, inside[a:b].tobytes()) for name, (a, b) in zip(classes.tolist(), pairwise(bounds), strict=True)]),
        np.int64,
    )
