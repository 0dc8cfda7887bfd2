"""Why random pipelines often beat the graph partition of FlashFlex's program, in its own terms and under our simulation.

    python benchmarks/partitions.py            # some minutes on one core, to benchmarks/results/partitions.txt

Rebuilds, from the published program (https://github.com/Relaxed-System-Lab/FlashFlex, experimental/), how it makes a plan out of
a partition of the GPUs into pipelines, and its cost model; docs/arena.md says what they are. On each of the 14 clusters and
models that its plans are published for, and for several numbers of pipelines, the GPUs are divided into pipelines in two ways:

    graph     METIS cuts them so that the weights between pipelines are least, where a weight is 1 / bandwidth
    random    as with --apply_random_strategy: every GPU goes to a pipeline that is drawn for it

and TRIES plans are made each way, which differ in what the program draws. Otherwise than there, the number of pipelines stays
the same during the tries, all of them share the batch, and a tensor-parallel degree divides the model's heads. Plans are
simulated for their time alone, as 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import pymetis

from experiments.hexiscale import paper_peaks
from experiments.parallel import in_processes
from experiments.peers import arena, with_endless_memory
from partition.drafts import fits_heads
from sim.simulation import simulation
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.judge import Cost
from sim.spec.plan import Pipeline, Plan, Replica, Stage

HERE = Path(__file__).parent
TRIES = 40
"""The iterations of the published runs."""
SIMULATED = 4
"""So many of the tries are simulated, besides those of the lowest price."""
PIPELINES = (2, 3, 4, 6)
WAYS = ("graph", "random")

DEGREES = {
    1: ((1,),),
    2: ((2,), (1, 1)),
    3: ((2, 1), (1, 1, 1)),
    4: ((4,), (2, 2), (2, 1, 1)),
    5: ((4, 1), (2, 2, 1)),
    6: ((4, 2), (2, 2, 2)),
    7: ((4, 2, 1), (2, 2, 2, 1)),
    8: ((8,), (4, 4), (4, 2, 2)),
}
"""By the GPUs that a stage group has on one node: the tensor-parallel degrees that the program considers for its stages."""

Stages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Made:
    """A plan as the program has it: for each pipeline its stages (devices by number) and their layers; and its price."""

    pipelines: tuple[tuple[Stages, tuple[int, ...]], ...]
    pipeline_s: float
    """The slowest pipeline by the program's cost model."""
    exchange_s: float
    """The exchange of gradients by it."""

    @property
    def price_s(self) -> float:
        """What the program compares: the slowest pipeline times 1.8, and the exchange times 1.1."""
        return 1.8 * self.pipeline_s + 1.1 * self.exchange_s


class World:
    """A cluster and a job as the program sees them: devices by number, peaks, memories, and one rate for every pair."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self.cluster, self.job = cluster, job
        peaks = paper_peaks(cluster)
        self.peak = [peaks[device.gpu.name] for device in cluster.devices]
        self.memory = [round(device.gpu.memory_bytes / 2**30) for device in cluster.devices]  # GiB, as on the box
        self.node = [cluster.nodes.index(device.node) for device in cluster.devices]
        count = len(self.peak)
        self.rate = np.full((count, count), np.inf)
        for a in range(count):
            for b in range(count):
                inside = cluster.nodes[self.node[a]]
                nics = [cluster.nodes[self.node[i]].nic for i in (a, b)]
                between = min(nic.bandwidth_bytes_per_s for nic in nics if nic is not None)
                if a != b:
                    self.rate[a, b] = inside.intra.bandwidth_bytes_per_s if self.node[a] == self.node[b] else between
        self._judge = simulation(with_endless_memory(cluster), job)
        self._simulated: dict[object, float] = {}
        self._exchange: dict[tuple[tuple[int, ...], ...], float] = {}
        self._node_stages: dict[tuple[int, ...], Stages] = {}

    # --- The program's cost model ---

    @cached_property
    def message_bytes(self) -> int:
        """The activations of one micro-batch of one sequence."""
        return self.job.sequence_length * self.job.model.hidden * 2

    def stage_s(self, devices: Sequence[int], layers: int) -> float:
        """Seconds of a stage for a micro-batch, both ways, with recomputation: FLOPs at the peak, and tensor parallelism."""
        model, tokens = self.job.model, self.job.sequence_length
        share = 1 + tokens / (6 * model.hidden) + model.vocab / (16 * model.layers * model.hidden)
        compute_s = 96 * tokens * model.hidden**2 * share / (self.peak[devices[0]] * len(devices))
        per_rank = [sum(1 / self.rate[i, j] for j in devices if j != i) for i in devices]
        return float(layers * (compute_s + 12 * self.message_bytes / len(devices) * max(per_rank)))

    def message_s(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Seconds of the messages between two stages for a micro-batch: to the nearest device, which tells the others."""
        spread = {b: sum(1 / self.rate[b, to] for to in after if to != b) / len(after) for b in after}
        return float(2 * self.message_bytes * min(1 / self.rate[a, b] + spread[b] for a in before for b in after))

    def pipeline_s(self, stages: Stages, layers: Sequence[int], micro_batches: int) -> float:
        """Seconds of a pipeline: in every turn of GPipe's grid, the slowest of the stages that work in it."""
        costs = [self.stage_s(devices, held) for devices, held in zip(stages, layers, strict=True)]
        for s in range(len(stages) - 1):
            costs[s] += self.message_s(stages[s], stages[s + 1])
        filling = sum(max(costs[: i + 1]) for i in range(len(costs) - 1))
        draining = sum(max(costs[i + 1 :]) for i in range(len(costs) - 1))
        return filling + (micro_batches - len(costs) + 1) * max(costs) + draining

    def exchange_s(self, pipelines: Sequence[tuple[Stages, Sequence[int]]]) -> float:
        """Seconds of the exchange of gradients: every layer on its own, each pair of its holders at the pair's rate."""
        held = [[devices for devices, count in zip(*pipeline, strict=True) for _ in range(count)] for pipeline in pipelines]
        return sum(self._layer_exchange_s(tuple(layer)) for layer in zip(*held, strict=True))

    def _layer_exchange_s(self, groups: tuple[tuple[int, ...], ...]) -> float:
        if groups not in self._exchange:
            sizes = [len(group) for group in groups]
            padded = [[device for device in group for _ in range(max(sizes) // len(group))] for group in groups]
            total = 0.0
            for ranks in list(zip(*padded, strict=False))[: max(sizes) // min(sizes)]:
                per_rank = [sum(1 / self.rate[i, j] for j in ranks if j != i) for i in ranks]
                total += 2 * 12 * self.job.model.hidden**2 * 2 / (min(sizes) * len(ranks)) * max(per_rank)
            self._exchange[groups] = total
        return self._exchange[groups]

    def fits(self, devices: Sequence[int], layers: int, first: bool, last: bool) -> bool:
        """Whether a stage fits by the program's estimate: 8 bytes a parameter, and the inputs of one micro-batch's layers."""
        model, tokens = self.job.model, self.job.sequence_length
        parameters = layers * 12 * model.hidden**2 / len(devices)
        parameters += model.hidden * (last * (1 + model.vocab) + first * (model.vocab + tokens))
        need_bytes = 8 * parameters + self.message_bytes * (layers / len(devices) + 2)
        return need_bytes <= self.memory[devices[0]] * 2**30

    # --- The program's plans ---

    def weight(self, a: int, b: int) -> int:
        """The weight of a pair of GPUs where the graph partition makes pipelines."""
        return round(1e10 / float(self.rate[a, b]))

    def cut(self, devices: Sequence[int], parts: int, slowness: bool) -> list[list[int]]:
        """METIS's partition into parts of equal peak FLOP/s; a weight is the bandwidth, or with `slowness` its inverse."""
        if parts <= 1:
            return [list(devices)]
        pairs = [(a, b) for a in devices for b in devices if a != b]
        weights = [self.weight(a, b) if slowness else round(self.rate[a, b] / 1e6) for a, b in pairs]
        at = {device: i for i, device in enumerate(devices)}
        starts = [i * (len(devices) - 1) for i in range(len(devices) + 1)]
        _, member = pymetis.part_graph(
            min(parts, len(devices)),
            pymetis.CSRAdjacency(starts, [at[b] for _, b in pairs]),
            eweights=weights,
            vweights=[round(self.peak[device] / 1e10) for device in devices],  # METIS fails on sums of larger weights
            options=pymetis.Options(contig=True),
        )
        found = [[device for device, part in zip(devices, member, strict=True) if part == p] for p in range(max(member) + 1)]
        return [part for part in found if part]

    def stages(self, groups: Sequence[Sequence[int]]) -> Stages:
        """The stages of a pipeline: its groups in the program's order, and in each, node by node, the degrees of least cost."""
        if len(groups) > 1:
            paths = [[start, *sorted(set(range(len(groups))) - {start}, reverse=True)] for start in range(len(groups))]
            weights = [sum(self.rate[i, j] for a, b in pairwise(path) for i in groups[a] for j in groups[b]) for path in paths]
            path = paths[weights.index(min(weights))]
            groups = [groups[g] for g in sorted(range(len(groups)), key=lambda g: path[g])]
        found: list[tuple[int, ...]] = []
        for group in groups:
            for node in sorted({self.node[i] for i in group}):
                found += self._node_split(tuple(i for i in group if self.node[i] == node))
        return tuple(found)

    def _node_split(self, devices: tuple[int, ...]) -> Stages:
        """Some GPUs of a node as stages, by the degrees that the cost model finds fastest for a model that they hold alone."""
        if devices not in self._node_stages:
            choices = []
            for split in DEGREES[len(devices)]:
                if all(fits_heads(self.job, degree) for degree in split):
                    ends = np.cumsum(split)
                    stages = tuple(devices[end - degree : end] for end, degree in zip(ends, split, strict=True))
                    layers = [self.job.model.layers * degree // len(devices) for degree in split]
                    layers[-1] += self.job.model.layers - sum(layers)
                    choices.append((self.pipeline_s(stages, layers, self.job.global_batch), stages))
            self._node_stages[devices] = min(choices, key=lambda choice: choice[0])[1]
        return self._node_stages[devices]

    def layers(self, stages: Stages) -> tuple[int, ...] | None:
        """The layers of each stage, dealt one by one in proportion to its memory; None where one then lacks memory."""
        memories = [sum(self.memory[i] for i in devices) for devices in stages]
        total, quota = self.job.model.layers, [0] * len(stages)
        ranked = np.argsort(memories, kind="stable")[::-1]  # of equal ones the last first
        full = [False] * len(stages)
        s = over = 0
        while sum(quota) < total:
            at = s % len(stages)
            full[at] = (quota[at] + 1) / total > memories[at] / sum(memories)
            if all(full):
                quota[ranked[over % len(stages)]] += 1
                over += 1
            elif not full[at]:
                quota[at] += 1
            s += 1
        last = len(stages) - 1
        fit = all(self.fits(stages[s], quota[s], s == 0, s == last) for s in range(len(stages)))
        return tuple(quota) if fit else None

    def make(self, parts: Sequence[Sequence[int]], rng: np.random.Generator) -> Made | None:
        """The plan of pipelines on these parts, each cut again into 1 + binomial(2, 0.2) groups; None where memory lacks."""
        pipelines = []
        for part in parts:
            stages = self.stages(self.cut(part, 1 + int(rng.binomial(2, 0.2)), slowness=False))
            layers = self.layers(stages)
            if layers is None:
                return None
            pipelines.append((stages, layers))
        micro_batches = self.job.global_batch // len(parts)
        slowest_s = max(self.pipeline_s(stages, layers, micro_batches) for stages, layers in pipelines)
        return Made(tuple(pipelines), slowest_s, self.exchange_s(pipelines))

    def plan(self, made: Made) -> Plan:
        """The plan in our form, as 1F1B with recomputation; stages without layers are left out."""
        names = [device.name for device in self.cluster.devices]
        pipelines = []
        for stages, layers in made.pipelines:
            ends = np.cumsum(layers)
            held = tuple(
                Stage((Replica(tuple(names[i] for i in devices), 1),), ((int(end) - count, int(end)),), "full")
                for devices, count, end in zip(stages, layers, ends, strict=True)
                if count
            )
            pipelines.append(Pipeline(1, self.job.global_batch // len(made.pipelines), held))
        job = self.job
        return Plan(self.cluster.name, job.model.name, job.sequence_length, job.global_batch, tuple(pipelines), zero_stage=0)

    def simulated_s(self, made: Made) -> float:
        """The iteration of the plan by our simulation, memory ignored."""
        if made.pipelines not in self._simulated:
            verdict = self._judge(self.plan(made))
            assert isinstance(verdict, Cost), verdict
            self._simulated[made.pipelines] = verdict.iteration_s
        return self._simulated[made.pipelines]


def partition(world: World, way: str, parts: int, rng: np.random.Generator) -> list[list[int]] | None:
    """The GPUs in so many pipelines; None where one gets none."""
    devices = range(len(world.peak))
    if way == "graph":
        found = world.cut(devices, parts, slowness=True)
    else:
        drawn = rng.integers(0, parts, len(devices))
        found = [[i for i in devices if drawn[i] == p] for p in range(parts)]
    return found if len(found) == parts and all(found) else None


def cut_weight(world: World, parts: Sequence[Sequence[int]]) -> int:
    """The weights between the pipelines together, which the graph partition minimises."""
    where = {device: p for p, part in enumerate(parts) for device in part}
    return sum(world.weight(a, b) for a in where for b in where if a < b and where[a] != where[b])


# --- The experiment --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tries:
    """The plans of one way at one place for one number of pipelines: those of which the program says that they fit."""

    world: World
    made: tuple[Made, ...]
    cut: float
    """The median weight of the cuts."""

    @property
    def different(self) -> int:
        """How many different plans there are among them."""
        return len({made.pipelines for made in self.made})

    def cheapest(self, first: int = TRIES) -> Made:
        """The plan of the lowest price among the first tries: what the program would answer."""
        return min(self.made[:first], key=lambda made: made.price_s)


def tries(world: World, way: str, parts: int, seed: int = 0) -> Tries:
    """TRIES plans of one way. Those that the program finds too large, or that have an empty pipeline, are missing."""
    rng = np.random.default_rng([seed, parts, WAYS.index(way)])
    made, cuts = [], []
    for _ in range(TRIES):
        chosen = partition(world, way, parts, rng)
        found = world.make(chosen, rng) if chosen is not None else None
        if chosen is not None and found is not None:
            made.append(found)
            cuts.append(cut_weight(world, chosen))
    return Tries(world, tuple(made), median(cuts) if cuts else 0.0)


Pair = dict[str, Tries]
"""By way, the tries at one place for one number of pipelines."""


def _first(pair: Pair) -> int:
    """So many tries as the graph partition has different plans."""
    return min(pair["graph"].different, len(pair["random"].made))


Seconds = Callable[[Made], float]
MEASURES: tuple[tuple[str, Callable[[Pair, Seconds], float]], ...] = (
    (
        "the cheapest plan of all tries",
        lambda pair, s: s(pair["random"].cheapest()) / s(pair["graph"].cheapest()),
    ),
    (
        "the cheapest of as many random plans as graph has different ones",
        lambda pair, s: s(pair["random"].cheapest(_first(pair))) / s(pair["graph"].cheapest()),
    ),
    (
        "the median try",
        lambda pair, s: median(map(s, pair["random"].made[:SIMULATED])) / median(map(s, pair["graph"].made[:SIMULATED])),
    ),
)
"""Ratios, random to graph, of what a function says of their plans in seconds."""

FIGURES: tuple[tuple[str, Callable[[Tries], float]], ...] = (
    ("different plans", lambda t: t.different),
    ("nodes of a pipeline", lambda t: median(_nodes(t.world, stages) for m in t.made for stages, _ in m.pipelines)),
    ("slowest pipeline, s", lambda t: median(m.pipeline_s for m in t.made)),
    ("exchange, s", lambda t: median(m.exchange_s for m in t.made)),
)


def _nodes(world: World, stages: Stages) -> int:
    """How many nodes a pipeline's stages are on."""
    return len({world.node[i] for devices in stages for i in devices})


@dataclass(frozen=True)
class Compared:
    """Both ways at one place for one number of pipelines, in the order of MEASURES, FIGURES and WAYS."""

    by_price: tuple[float, ...]
    by_simulation: tuple[float, ...]
    cut: float
    """The weight that METIS cuts over that of a random partition."""
    figures: tuple[tuple[float, ...], ...]


def compared(place: tuple[Cluster, Job]) -> list[Compared]:
    """Both ways at a place, for every number of pipelines for which both have a plan."""
    world, found = World(*place), []
    for parts in PIPELINES:
        pair = {way: tries(world, way, parts) for way in WAYS}
        if all(way.made for way in pair.values()):
            by_price = tuple(measure(pair, lambda made: made.price_s) for _, measure in MEASURES)
            by_simulation = tuple(measure(pair, world.simulated_s) for _, measure in MEASURES)
            figures = tuple(tuple(figure(pair[way]) for way in WAYS) for _, figure in FIGURES)
            found.append(Compared(by_price, by_simulation, pair["graph"].cut / pair["random"].cut, figures))
    print(f"{place[0].name} {place[1].model.name}: {len(found)} numbers of pipelines", flush=True)
    return found


def report(rows: Sequence[Compared]) -> str:
    """The text of partitions.txt."""
    lines = [
        f"{len(rows)} pairs of a place (cluster and model) and a number of pipelines at which both ways have a plan, of",
        f"{TRIES} tries. Ratios of seconds, random / graph: geometric means over the pairs, and at how many random is faster.",
        "'Cheapest' is by the price of FlashFlex's program, which is what it answers with.",
        "",
        f"{'':66s} {'by its price':>20s}   {'by our simulation':>20s}",
    ]
    for m, (name, _) in enumerate(MEASURES):
        cells = []
        for ratios in ([row.by_price[m] for row in rows], [row.by_simulation[m] for row in rows]):
            cells.append(f"{geometric_mean(ratios):7.3f} {sum(ratio < 1 for ratio in ratios):5d} of {len(ratios):3d}")
        lines.append(f"{name:66s} {cells[0]:>20s}   {cells[1]:>20s}")
    cuts = [row.cut for row in rows]
    lines += [
        "",
        f"METIS cuts {geometric_mean(cuts):.3f} times the weight that a random draw does ({min(cuts):.3f} to {max(cuts):.3f}).",
        "",
        f"{'medians over the pairs':24s} {'graph':>8s} {'random':>8s}",
    ]
    for f, (name, _) in enumerate(FIGURES):
        lines.append(f"{name:24s} " + " ".join(f"{median(row.figures[f][w] for row in rows):8.1f}" for w in range(len(WAYS))))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the experiment and writes its table."""
    places = [(cluster, job) for cluster, job in arena() if job.precision == "bf16"]  # another harness made those of the pools
    found, interrupted = in_processes(compared, places)
    if not interrupted:
        text = report([row for rows in found if rows is not None for row in rows])
        (HERE / "results" / "partitions.txt").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
