"""The planner of Varuna: pipelines of equal stages, one GPU each, and the depth that its own quick simulation finds fastest.

Varuna trains over slow networks, so it has no tensor parallelism: G GPUs become D = floor(G / P) pipelines of P stages, and
what is left idles. For every depth P,

- the layers are cut so that the stages' forward passes are as equal as possible;
- the micro-batch is the smallest one whose seconds for a sequence are within a few per cent of the best that fits in memory,
  as the bubble grows with it;
- a pipeline is simulated with the profiled seconds of its passes and messages, and the all-reduce of the gradients added.

Forward passes are recomputed except on the last stage, whose backward pass follows at once. The optimizer's state is whole in
every pipeline (ZeRO 0). The ranks follow the cluster file pipeline by pipeline, so that messages stay inside nodes where they
can. This is what Varuna does anew whenever its GPUs change ("morphing").

Source: Athlur et al. (2022), "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", EuroSys 2022,
arXiv:2111.04007.

Done otherwise: the profile is our cost model. Varuna takes all GPUs to be alike; on several kinds, its profile is that of the
slowest in use, and as it drops stragglers, the search is also made without the slowest kind, without the two slowest, and so
on. Where micro-batches do not divide over the pipelines, some take one more. Plans run 1F1B, and so they are simulated, but
for a stage whose next pass waits for its input, which does the other one if it can; Varuna's schedule goes back whenever it
can, holds as many micro-batches as memory allows, and recomputes while it waits for a gradient, where here that is a part of
the backward pass. The best depths are judged, not only the first.

Left out: what makes it survive preemption; the optimizer's states on the host; the exchange of tied embeddings in the price.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from partition.drafts import SLACK, Draft, Settings, all_under, judge_in_order, reject, stage, usable_nodes
from partition.layers import ranges, split_layers
from partition.pricing import Pricing
from partition.room import Room
from partition.search import Search, register
from sim.cost.collectives import across_lanes
from sim.cost.network import at_once
from sim.spec.cluster import Cluster, Node
from sim.spec.counts import PRECISION_BYTES, embedding_parameters, head_parameters, layer_parameters
from sim.spec.job import Job
from sim.spec.plan import Pipeline

SETTINGS = Settings(schedule="1f1b", zero_stage=0)
MICRO_BATCHES = (1, 2, 4, 8, 16)
"""The profiled sizes. Those that do not divide the batch are left out."""

PLATEAU = 1.05
"""A micro-batch is large enough when its seconds for a sequence are at most so many times those of the best one."""


@register("varuna")
def varuna(search: Search) -> None:
    """Simulates every depth on all GPUs, and without the slowest kinds, and has the best judged."""
    nodes = usable_nodes(search)
    if not nodes:
        return
    simulated = ranked(search, nodes)
    if not simulated:
        reject(search, [f"{node.name}/{index}" for node in nodes for index in range(node.gpus)])
        return
    near = [(draft, SETTINGS) for seconds, draft in simulated if seconds <= SLACK * simulated[0][0]]
    judge_in_order(search, near)


def ranked(search: Search, nodes: Sequence[Node], room: Room | None = None) -> list[tuple[float, Draft]]:
    """Every depth on every pool of GPUs, as far as it fits, with the seconds that it is simulated to take, best first."""
    morphing = Morphing(search.cluster, search.job, room)
    simulated: list[tuple[float, int, Draft]] = []
    for devices in morphing.pools(nodes):
        for depth in range(1, min(search.job.model.layers, len(devices)) + 1):
            search.check_budget()
            configuration = morphing.configure(devices, depth)
            if configuration is not None:
                seconds = morphing.seconds(configuration)
                simulated.append((seconds, len(simulated), morphing.draft(configuration)))
    return [(seconds, draft) for seconds, _, draft in sorted(simulated, key=lambda entry: entry[:2])]


@dataclass(frozen=True)
class Configuration:
    """Pipelines of one depth: their GPUs, the layers of each stage, the micro-batch, and the GPU kind of the profile."""

    pipelines: tuple[tuple[str, ...], ...]
    layers: tuple[int, ...]
    micro_batch: int
    profiled: str
    """The GPU whose seconds are taken for all."""


class Morphing:
    """The choice of micro-batches and depths for one job on a cluster."""

    def __init__(self, cluster: Cluster, job: Job, room: Room | None = None) -> None:
        """`room` says what fits, in place of the memory as it is judged."""
        self.cluster, self.job = cluster, job
        self.pricing, self.room = Pricing(cluster, job), room or Room(cluster, job)

    def pools(self, nodes: Sequence[Node]) -> Iterator[list[str]]:
        """The GPUs of the fastest kind, of the two fastest, and so on to all, in the order of the cluster file."""
        speeds = {node.gpu.name: self._layer_s(f"{node.name}/0") for node in nodes}
        for slowest_s in sorted(set(speeds.values())):
            yield [f"{node.name}/{i}" for node in nodes if speeds[node.gpu.name] <= slowest_s for i in range(node.gpus)]

    def _layer_s(self, device: str) -> float:
        part = self.pricing.stage((device,), 1, SETTINGS)
        return part.layer_forward_s + part.layer_backward_s

    def configure(self, devices: Sequence[str], depth: int) -> Configuration | None:
        """The pipelines of this depth with the micro-batch that Varuna takes, or None where none fits in memory."""
        profiled = max(devices, key=self._layer_s)
        counts = self.cut(profiled, depth)
        fitting: dict[int, Configuration] = {}
        for size in MICRO_BATCHES:
            data = min(len(devices) // depth, self.job.global_batch // size)
            if self.job.global_batch % size == 0:
                pipelines = tuple(tuple(devices[d * depth : (d + 1) * depth]) for d in range(data))
                found = Configuration(pipelines, counts, size, profiled)
                if not self.room.fits(self.draft(found), SETTINGS):
                    break  # nor do larger ones
                fitting[size] = found
        if not fitting:
            return None
        sequence_s = {size: self._slowest_forward_s(found) / size for size, found in fitting.items()}
        best_s = min(sequence_s.values())
        return next(found for size, found in fitting.items() if sequence_s[size] <= PLATEAU * best_s)

    def cut(self, profiled: str, depth: int) -> tuple[int, ...]:
        """The layers of each stage: the longest forward pass is as short as possible."""
        part = self.pricing.stage((profiled,), 1, SETTINGS)
        counts = split_layers(self.job.model.layers, depth, lambda s, count: part.forward_s(count, s == 0, s == depth - 1))
        assert counts is not None  # there is a layer for each stage, and nothing costs infinitely much
        return tuple(counts)

    def _slowest_forward_s(self, configuration: Configuration) -> float:
        return max(forward_s for forward_s, _ in self._passes_s(configuration))

    def _passes_s(self, configuration: Configuration) -> list[tuple[float, float]]:
        """Seconds of the forward and the backward pass of each stage."""
        part = self.pricing.stage((configuration.profiled,), configuration.micro_batch, SETTINGS)
        last = len(configuration.layers) - 1
        return [
            (
                part.forward_s(count, s == 0, s == last),
                part.backward_s(all_under("none" if s == last else "full", count), s == 0, s == last),
            )
            for s, count in enumerate(configuration.layers)
        ]

    def seconds(self, configuration: Configuration) -> float:
        """Seconds of an iteration, by simulation of the pipeline that goes from node to node most often."""
        pipelines = configuration.pipelines
        travelling = max(pipelines, key=lambda devices: len({name.rpartition("/")[0] for name in devices}))
        num_bytes = self.pricing.activation_bytes(configuration.micro_batch)
        messages_s = [self.pricing.message((a,), (b,), SETTINGS).seconds(num_bytes) for a, b in pairwise(travelling)]
        micro_batches = -(-self.job.global_batch // (configuration.micro_batch * len(pipelines)))
        return simulated_s(self._passes_s(configuration), messages_s, micro_batches) + self._gradients_s(configuration)

    def _gradients_s(self, configuration: Configuration) -> float:
        """Seconds of the all-reduces of all stages' gradients, which go at once and share the cards of their nodes."""
        model, network = self.job.model, self.pricing.network
        last = len(configuration.layers) - 1
        transfers = []
        for s, count in enumerate(configuration.layers):
            parameters = count * layer_parameters(model)
            parameters += embedding_parameters(model) if s == 0 else 0
            parameters += head_parameters(model) if s == last else 0
            lanes = [(devices[s],) for devices in configuration.pipelines]
            num_bytes = parameters * PRECISION_BYTES[self.job.gradient_precision]
            transfers.append(across_lanes(network, "all_reduce", lanes, num_bytes))
        return network.alone_s(at_once(transfers))

    def draft(self, configuration: Configuration) -> Draft:
        """The pipelines of a configuration. The first ones take a micro-batch more where they do not divide."""
        size, data = configuration.micro_batch, len(configuration.pipelines)
        each, more = divmod(self.job.global_batch // size, data)
        cuts = ranges(configuration.layers)
        modes = ["full"] * (len(cuts) - 1) + ["none"]
        return tuple(
            Pipeline(
                size,
                each + (d < more),
                tuple(stage([name], cut, size, mode) for name, cut, mode in zip(devices, cuts, modes, strict=True)),
            )
            for d, devices in enumerate(configuration.pipelines)
        )


def simulated_s(passes_s: Sequence[tuple[float, float]], messages_s: Sequence[float], micro_batches: int) -> float:
    """Seconds until the last backward pass of a pipeline ends.

    `passes_s` holds the forward and the backward pass of each stage, `messages_s` what one takes between a stage and the next,
    in either direction; they overlap with the passes. Stage s of P takes a forward pass while it holds fewer than P - s
    micro-batches, and else, or where no input is there yet, a backward pass.
    """
    depth = len(passes_s)
    forwards: list[deque[float]] = [deque() for _ in passes_s]  # when the inputs of passes yet to do are there
    backwards: list[deque[float]] = [deque() for _ in passes_s]
    forwards[0].extend([0.0] * micro_batches)
    held, free_s = [0] * depth, [0.0] * depth
    looks = [(0.0, 0)]  # moments at which a stage may find something to do
    while looks:
        now_s, s = heapq.heappop(looks)
        if free_s[s] > now_s:
            continue
        if forwards[s] and forwards[s][0] <= now_s and held[s] < depth - s:
            forwards[s].popleft()
            held[s] += 1
            free_s[s] = now_s + passes_s[s][0]
            if s < depth - 1:
                forwards[s + 1].append(free_s[s] + messages_s[s])
                heapq.heappush(looks, (forwards[s + 1][-1], s + 1))
            else:
                backwards[s].append(free_s[s])
        elif backwards[s] and backwards[s][0] <= now_s:
            backwards[s].popleft()
            held[s] -= 1
            free_s[s] = now_s + passes_s[s][1]
            if s > 0:
                backwards[s - 1].append(free_s[s] + messages_s[s - 1])
                heapq.heappush(looks, (backwards[s - 1][-1], s - 1))
        else:
            continue
        heapq.heappush(looks, (free_s[s], s))
    return max(free_s)
