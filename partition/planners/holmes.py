"""Holmes's planner: data parallelism among nodes whose NICs speak alike, pipeline stages across those whose NICs do not.

Source: Yang et al. (2023), Holmes: Towards Distributed Training Across Clusters with Heterogeneous NIC Environment, ICPP 2024,
arXiv:2312.03549. A NIC of InfiniBand cannot talk RDMA to one of RoCE, nor either to Ethernet, and sites are far apart; a
cluster in the paper's sense (here: a group) is the nodes of one site with NICs of one kind. As there:

- Tensor-parallel groups lie inside a node. Data-parallel groups lie inside a group, so that gradients use its RDMA (automatic
  NIC selection). Groups follow one another as runs of pipeline stages, so that only the messages of the pipeline, the least of
  all traffic, leave them (cross-cluster pipeline parallelism). Tensor- and data-parallel degree are the same everywhere; ranks
  follow the order of the cluster file with tensor parallelism fastest, then data, then pipeline.
- The split is uneven (self-adapting pipeline partition): each stage of a group gets floor(alpha x S / sum of S x layers) of
  them, where S is the speed of the group's stages, which counts the exchange of gradients over its NICs, and the sum is over
  all stages; the stages of the slowest group divide what is left. alpha is a parameter, by which the fast groups get back what
  rounding down takes from them.
- Optimizer states are divided over the data-parallel group, and gradients reduced while the backward still runs (overlapped
  distributed optimizer): ZeRO 1 with overlap.

Done otherwise: S is priced, for one layer with its gradients, where the paper measures whole runs in each NIC environment.
Where GPUs differ as well, groups of one kind of GPU and of NIC are tried beside those of one kind of NIC (the authors' program
lists a type of device or NIC for each node); the paper has A100s alone. Degrees, micro-batch size, the order of the groups
and alpha are given there, by hand; here all are tried, with as little recomputation as fits, and the best by their quick price
are judged. Tried are all nodes, one group alone, and homogeneous parts, as by `partition.planners.megatron`.

Left out: what is no part of a plan (communicators of NCCL, fault tolerance), other schedules than 1F1B, and a split that heeds
memory: what does not fit is discarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

from partition.drafts import GRANULARITIES, SLACK, Draft, Settings, degrees, judge_in_order, reject, stage, usable_nodes
from partition.layers import even_split, ranges
from partition.planners.megatron import MICRO_BATCHES, parts
from partition.pricing import Pricing
from partition.room import Room
from partition.search import Search, register
from sim.cost.collectives import across_lanes
from sim.spec.cluster import Node
from sim.spec.counts import PRECISION_BYTES, layer_parameters
from sim.spec.plan import Pipeline

ALPHAS = (1.0, 1.05, 1.1)

ALL_ORDERS = 3
"""Up to so many groups are tried in all orders; more in the file's order, and by speed, in both directions."""

Lane = tuple[str, ...]


@register("holmes")
def holmes(search: Search) -> None:
    """Prices the plans of all degrees, orders and splits over the NIC groups that fit, and has the best of them judged."""
    holmes_with(search)


def holmes_with(search: Search, by_nic: bool = True, uneven: bool = True) -> None:
    """As `holmes`, with or without its parts, to see what they are good for.

    Without `by_nic` the nodes are one group, in the order of the file; without `uneven` all stages have as many layers.
    """
    nodes = usable_nodes(search)
    if not nodes:
        return
    priced = HolmesPlans(search, by_nic, uneven).priced(nodes)
    if not priced:
        reject(search, [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)])
    priced.sort(key=lambda entry: entry[:2])
    judge_in_order(search, [(draft, settings) for price_s, _, draft, settings in priced if price_s <= SLACK * priced[0][0]])


def nic_groups(nodes: Sequence[Node], by_gpu: bool = False) -> list[list[Node]]:
    """The nodes of one site and kind of NIC (and of one kind of GPU, if asked for), in the order of their first nodes."""
    found: dict[object, list[Node]] = {}
    for node in nodes:
        nic = node.nic.kind if node.nic is not None else None
        found.setdefault((node.site, nic, node.gpu.name if by_gpu else None), []).append(node)
    return list(found.values())


def uneven_split(layers: int, speeds: Sequence[float], alpha: float) -> list[int] | None:
    """Layers of the stages of these speeds, or None where a stage would be empty.

    Stages that are not the slowest get floor(alpha x speed / sum of speeds x layers), the slowest divide the rest evenly.
    Source: Holmes (arXiv:2312.03549), self-adapting pipeline partition.
    """
    slowest, total = min(speeds), sum(speeds)
    # A share that is a whole number is not to be rounded down to the one below.
    counts = [0 if speed == slowest else math.floor(alpha * speed / total * layers + 1e-9) for speed in speeds]
    last = [s for s, speed in enumerate(speeds) if speed == slowest]
    left = layers - sum(counts)
    if left < len(last):
        return None
    for s, count in zip(last, even_split(left, len(last)), strict=True):
        counts[s] = count
    return counts if min(counts) > 0 else None


class HolmesPlans:
    """What is tried, with its prices."""

    def __init__(self, search: Search, by_nic: bool = True, uneven: bool = True) -> None:
        self.search, self.job = search, search.job
        self.by_nic, self.uneven = by_nic, uneven
        self.pricing, self.room = Pricing(search.cluster, search.job), Room(search.cluster, search.job)

    def priced(self, nodes: Sequence[Node]) -> list[tuple[float, int, Draft, Settings]]:
        """All plans that fit, each with its price and its number."""
        found: list[tuple[float, int, Draft, Settings]] = []
        seen: set[Draft] = set()
        for groups in self._groupings(nodes):
            for draft, settings in self._plans(groups):
                if draft not in seen:
                    seen.add(draft)
                    found.append((self.pricing.price_s(draft, settings), len(found), draft, settings))
        return found

    def _groupings(self, nodes: Sequence[Node]) -> list[list[list[Node]]]:
        """The groups of each part of the cluster that is tried."""
        if not self.by_nic:
            return [[part] for part in parts(nodes)]
        tried = [*parts(nodes), *nic_groups(nodes)]
        found = [nic_groups(part, by_gpu) for part in tried for by_gpu in (False, True)]
        return [groups for i, groups in enumerate(found) if groups not in found[:i]]

    def _plans(self, groups: Sequence[Sequence[Node]]) -> Iterator[tuple[Draft, Settings]]:
        """The plans that fit on these groups: all degrees, micro-batches, orders and splits, as little recomputed as can be."""
        names = [[f"{node.name}/{index}" for node in group for index in range(node.gpus)] for group in groups]
        common = math.gcd(*map(len, names))
        for tensor in degrees(self.job, math.gcd(*(node.gpus for group in groups for node in group))):
            settings = Settings(zero_stage=1, sequence_parallel=tensor > 1 and self.job.sequence_length % tensor == 0)
            for data in range(1, common // tensor + 1):
                if common % (tensor * data) or sum(map(len, names)) // (tensor * data) > self.job.model.layers:
                    continue
                stages = [_stages(devices, tensor, data) for devices in names]
                for micro_batch in MICRO_BATCHES:
                    if self.job.global_batch % (data * micro_batch) == 0:
                        self.search.check_budget()
                        yield from self._splits(stages, micro_batch, settings)

    def _splits(
        self, groups: Sequence[Sequence[Sequence[Lane]]], micro_batch: int, settings: Settings
    ) -> Iterator[tuple[Draft, Settings]]:
        """The plans of some groups of stages: all orders and splits."""
        layers = self.job.model.layers
        speeds = [1 / self.layer_s(stages, micro_batch, settings) for stages in groups]
        for order in _orders(speeds):
            stages = [lanes for g in order for lanes in groups[g]]
            of_stages = [speeds[g] for g in order for _ in groups[g]]
            splits: list[list[int] | None] = [even_split(layers, len(stages))]
            if self.uneven:
                splits = [uneven_split(layers, of_stages, alpha) for alpha in ALPHAS]
            for n, counts in enumerate(splits):
                if counts is not None and counts not in splits[:n]:
                    draft = self._first_that_fits(stages, counts, micro_batch, settings)
                    if draft is not None:
                        yield draft, settings

    def layer_s(self, stages: Sequence[Sequence[Lane]], micro_batch: int, settings: Settings) -> float:
        """Seconds of an iteration that a layer adds to the slowest of a group's stages, with the exchange of its gradients."""
        network = self.pricing.network
        parameters = layer_parameters(self.job.model)
        passes = self.job.global_batch // (len(stages[0]) * micro_batch)
        slowest_s = 0.0
        for lanes in stages:
            of_lanes = [self.pricing.stage(lane, micro_batch, settings) for lane in lanes]
            took_s = passes * max(one.layer_forward_s + one.layer_backward_s for one in of_lanes)
            for kind, precision in (("reduce_scatter", self.job.gradient_precision), ("all_gather", self.job.precision)):
                num_bytes = parameters * PRECISION_BYTES[precision]
                took_s += network.alone_s(across_lanes(network, kind, lanes, num_bytes))
            slowest_s = max(slowest_s, took_s)
        return slowest_s

    def _first_that_fits(
        self, stages: Sequence[Sequence[Lane]], counts: Sequence[int], micro_batch: int, settings: Settings
    ) -> Draft | None:
        """The plan with the least recomputation that fits."""
        data = len(stages[0])
        passes = self.job.global_batch // (data * micro_batch)
        for recompute in GRANULARITIES:
            draft = tuple(
                Pipeline(
                    micro_batch,
                    passes,
                    tuple(
                        stage(lanes[d], cut, micro_batch, recompute) for lanes, cut in zip(stages, ranges(counts), strict=True)
                    ),
                )
                for d in range(data)
            )
            if self.room.fits(draft, settings):
                return draft
        return None


def _stages(devices: Sequence[str], tensor: int, data: int) -> list[list[Lane]]:
    """The stages of a group: tensor-parallel groups of consecutive devices, consecutive ones the replicas of a stage."""
    lanes = [tuple(devices[at : at + tensor]) for at in range(0, len(devices), tensor)]
    return [lanes[at : at + data] for at in range(0, len(lanes), data)]


def _orders(speeds: Sequence[float]) -> list[tuple[int, ...]]:
    """The orders of groups of these speeds that are tried."""
    count = len(speeds)
    if count <= ALL_ORDERS:
        return list(permutations(range(count)))
    rising = tuple(sorted(range(count), key=lambda g: speeds[g]))
    return list(dict.fromkeys((tuple(range(count)), rising, rising[::-1])))
