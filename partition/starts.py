"""Layouts that a search begins with: symmetric grids, and nodes that are dealt to equal pipelines.

Nodes are dealt in the order of the path whose slowest link is fastest: all together, by kind of GPU, by METIS parts of the graph
of devices, node by node, group by group; for every degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import TypeVar

from partition.deals import MICRO_BATCHES, Deals, Layout, shared_out
from partition.drafts import Settings, degrees
from partition.graph import DeviceGraph
from partition.planners.megatron import parts, shapes
from sim.spec.cluster import Cluster, Node
from sim.spec.job import Job

Thing = TypeVar("Thing")


def twins(groups: int) -> list[int]:
    """Numbers of equal pipelines to deal so many groups to."""
    return [n for n in sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, groups}) if n <= groups]


class Starts:
    """Layouts of one job on some nodes of a cluster, to be iterated over."""

    def __init__(self, cluster: Cluster, job: Job, nodes: Sequence[Node], graph: DeviceGraph, deals: Deals, seed: int) -> None:
        """`graph` is of the nodes' devices; `deals` say which schedules there are; `seed` is of the partition by METIS."""
        self._job, self._nodes, self._graph, self._schedules, self._seed = job, list(nodes), graph, deals.schedules, seed
        devices = {name: cluster.device(name) for name in graph.devices}
        self._kind = {name: device.gpu.name for name, device in devices.items()}
        self._node = {name: device.node.name for name, device in devices.items()}
        self._speed = {name: (device.gpu.peak(job.precision) or 0.0) * device.gpu.speed for name, device in devices.items()}
        self._memory = {name: float(device.gpu.memory_bytes) for name, device in devices.items()}
        self._grouped: dict[tuple[tuple[str, ...], int], list[tuple[str, ...]]] = {}

    def __iter__(self) -> Iterator[Layout]:
        """Layouts to begin with, each once: symmetric grids and nodes dealt to pipelines, some of every sort in turn."""
        gridded = _in_turn([self.gridded(part) for part in parts(self._nodes)])
        dealt = _in_turn([self._dealt(teams) for teams in self._teams()])
        seen = set()
        for layout in _in_turn([gridded, dealt]):
            if layout not in seen:
                seen.add(layout)
                yield layout

    def gridded(self, part: Sequence[Node]) -> Iterator[Layout]:
        """The symmetric grids on a part of the cluster."""
        for pipelines in _from_both_ends(list(shapes(self._job, part))):
            tensor = len(pipelines[0][0])
            parallel = tensor > 1 and self._job.sequence_length % tensor == 0
            for size, zero_stage in product(MICRO_BATCHES, (1, 0) if len(pipelines) > 1 else (1,)):
                if self._job.global_batch % (len(pipelines) * size) == 0:
                    yield Layout(pipelines, size, Settings(zero_stage=zero_stage, sequence_parallel=parallel))

    def _dealt(self, teams: Sequence[Sequence[Sequence[str]]]) -> Iterator[Layout]:
        """Pipelines of groups of one degree, dealt from teams of nodes."""
        most = max(node.gpus for node in self._nodes)
        widths = [degree for degree in degrees(self._job, most) if degree & (degree - 1) == 0] or [1]
        sizes = [size for size in MICRO_BATCHES if self._job.global_batch % size == 0][:2]
        for degree in widths:
            grouped = [[self._groups(names, degree) for names in team] for team in teams]
            most_groups = max(sum(map(len, team)) for team in grouped)
            for pipelines in _from_both_ends(twins(most_groups)):
                if most_groups // pipelines > self._job.model.layers:
                    continue
                pipes = tuple([pipe for team in grouped for pipe in shared_out(team, pipelines)])
                if all(len(pipe) <= self._job.model.layers for pipe in pipes):
                    for size, (schedule, ahead) in product(sizes, self._schedules):
                        if len(pipes) * size <= self._job.global_batch:
                            yield Layout(pipes, size, Settings(schedule, ahead=ahead))

    def _teams(self) -> Iterator[list[list[list[str]]]]:
        """Teams of nodes' devices, each in path order: all, by kind, the fastest kinds alone, by METIS, node by node."""
        devices = self._graph.devices
        by_kind: dict[str, list[str]] = {}
        by_node: dict[str, list[str]] = {}
        for name in devices:
            by_kind.setdefault(self._kind[name], []).append(name)
            by_node.setdefault(self._node[name], []).append(name)
        groupings = [[devices], list(by_kind.values()), list(by_node.values())]
        kinds = sorted(by_kind, key=lambda kind: -self._speed[by_kind[kind][0]])
        for count in range(1, len(kinds)):
            fastest = [name for kind in kinds[:count] for name in by_kind[kind]]
            groupings += [[fastest], [by_kind[kind] for kind in kinds[:count]]]
        for count in (2, 3, 4, 8):
            if count < len(by_node):
                for weight in (self._speed, self._memory):
                    groupings.append(self._graph.partition(devices, count, [weight[n] for n in devices], self._seed))
        seen: list[list[list[list[str]]]] = []
        for grouping in groupings:
            teams = [self._in_path_order(names) for names in grouping]
            if teams not in seen:
                seen.append(teams)
                yield teams

    def _in_path_order(self, devices: Sequence[str]) -> list[list[str]]:
        """Devices by node, along the path whose slowest link is fastest, nodes with more memory first."""
        by_node: dict[str, list[str]] = {}
        for name in devices:
            by_node.setdefault(self._node[name], []).append(name)
        weight = {node: sum(self._memory[name] for name in names) for node, names in by_node.items()}
        return [by_node[node] for node in self._graph.path(list(by_node), weight)]

    def _groups(self, names: Sequence[str], degree: int) -> list[tuple[str, ...]]:
        """A node's devices in groups of this degree, or of the largest below it that its number of devices allows."""
        key = (tuple(names), degree)
        found = self._grouped.get(key)
        if found is None:
            allowed = max(d for d in degrees(self._job, len(names)) if d <= degree)
            found = self._grouped[key] = self._graph.tensor_groups(names, allowed, self._seed)
        return found


def _from_both_ends(things: Sequence[Thing]) -> Iterator[Thing]:
    """The first, the last, the second, the last but one, ...: one end is fast where memory is large, the other fits where not."""
    for i in range(len(things)):
        yield things[i // 2 if i % 2 == 0 else -(i // 2) - 1]


def _in_turn(sources: Sequence[Iterator[Layout]]) -> Iterator[Layout]:
    """One layout of each source after the other, until none has more."""
    left = list(sources)
    while left:
        going = []
        for source in left:
            for layout in islice(source, 1):
                yield layout
                going.append(source)
        left = going
