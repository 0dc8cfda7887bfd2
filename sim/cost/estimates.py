"""The fast judge made fast: estimates of thousands of plans of one job on one cluster.

`sim.cost.estimate` lays out one plan; here what plans have in common is kept from one to the next: the seconds and bytes of a
stage by what decides them, and the paths between devices. What is left of a plan is a few numbers a lane, which compiled
arithmetic (`sim.cost.recurrence`) follows through pipelines and exchanges.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.cost.collectives import _by_nccl
from sim.cost.compute import ComputeCost
from sim.cost.estimate import Estimate
from sim.cost.feasibility import infeasible
from sim.cost.memory import (
    COMMUNICATOR_BYTES,
    FRAGMENTATION_FRACTION,
    Holders,
    MemoryParts,
    _parts,
    _Rules,
    _rules,
    _Shape,
    count_holders,
)
from sim.cost.network import Network
from sim.cost.price import dollars
from sim.cost.traffic import work
from sim.spec.cluster import Cluster, Device
from sim.spec.compile import BUCKET_PARAMETERS, common_refinement, lane_name
from sim.spec.counts import (
    PRECISION_BYTES,
    RECOMPUTE,
    boundary_bytes,
    embedding_parameters,
    embedding_parameters_at,
    head_parameters,
    head_parameters_at,
    layer_parameters,
    layer_parameters_at,
    layer_recompute_flop,
    model_flop,
    tied_copy_parameters_at,
)
from sim.spec.job import Job
from sim.spec.judge import Cost, Verdict
from sim.spec.plan import LayerRange, Pipeline, Plan, Replica, Stage
from sim.spec.program import Backward, Forward, Lane, OptimizerStep
from sim.spec.reading import InputError
from sim.spec.schedules import in_flight

MOST_STEPS = 2_000_000
"""Forwards of one plan that are followed one by one; of longer schedules `Estimate` follows a part."""

ASKED_AT_ONCE = 4096
"""Paths that the compiled arithmetic can miss before it is told."""

WARM_UP = {"gpipe": 0, "1f1b": 1, "eager-1f1b": 2}
"""The schedules that are followed, and the forwards of their warm-up for each stage that follows; 0: all."""

UNKNOWN = -2
"""In the place of the number of a list of parts: it has not been asked for."""

Pass: TypeAlias = Forward | Backward

Numbers: TypeAlias = "array[int]"
"""Rows of whole numbers, one after the other."""


class Estimates:
    """The estimates of plans of one job on one cluster; what it finds out of stages and paths it keeps for the next plan.

    Where nothing is contended they are those of `Estimate`, and so of the simulation, to 1e-9. Where messages meet they are
    slowed by what some stretches of time show them to lose, and where exchanges of gradients or parameters meet their rates are
    followed; what messages, exchanges and the collectives inside stages take from one another is left out. Memory is that of
    `sim.cost.memory`. Plans outside the wide class that is followed here (1F1B, eager 1F1B or GPipe; ZeRO 1, or no gradients to
    exchange; neither context nor expert parallelism nor offloading) are handed to `Estimate`.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        from sim.cost import recurrence  # who only imports this module need not wait for a compiler

        self._compiled: Any = recurrence
        self.cluster, self.job = cluster, job
        self.network = Network(cluster)
        self._paths = _Paths(self.network, recurrence)
        self._groups = _Groups(cluster, job, self._paths.numbers)
        self._settings: dict[object, _Settings] = {}
        self._known_models: list[object] = []
        self._idle_watts = sum(device.gpu.idle_watts for device in cluster.devices)
        self._peak_flop_per_s = cluster.peak_flop_per_s(job.precision)
        self._model_flop = model_flop(job.model, job.global_batch, job.sequence_length)

    # --- What is asked ---

    def __call__(self, plan: Plan) -> Verdict:
        """See `judge`, as which it may be passed on."""
        return self.judge(plan)

    def judge(self, plan: Plan) -> Verdict:
        """The verdict on a plan. Raises InputError for the plan of another job, and for one that cannot be compiled."""
        found = self._found(plan)
        if found is None or found.iteration_s == math.inf:
            reason = infeasible(plan, self.cluster)
            return reason if reason is not None else Estimate(plan, self.cluster, self.network).cost()
        return self._cost(found)

    def iteration_s(self, plan: Plan) -> float:
        """Seconds of one iteration; infinite where the plan cannot run. Raises InputError as `judge` does."""
        found = self._found(plan)
        if found is not None:
            return found.iteration_s
        if infeasible(plan, self.cluster) is not None:
            return math.inf
        return Estimate(plan, self.cluster, self.network).iteration_s()

    def many(self, plans: Iterable[Plan]) -> NDArray[np.float64]:
        """`iteration_s` of each of some plans."""
        return np.array([self.iteration_s(plan) for plan in plans])

    # --- From a plan to numbers ---

    def _found(self, plan: Plan) -> _Found | None:
        """What the compiled arithmetic finds; None for a plan that it does not follow."""
        self._check(plan)
        key = (
            plan.schedule,
            plan.zero_stage,
            plan.sequence_parallel,
            plan.overlap_gradients,
            plan.gradient_precision,
            plan.context_parallel,
            plan.expert_parallel,
            plan.shard_group,
            plan.offload_optimizer,
        )
        settings = self._settings.get(key)
        if settings is None:
            settings = self._settings[key] = _Settings(plan, self.cluster, self.network, self._groups)
        if not settings.followed:
            return None
        try:
            numbers = settings.numbers(plan)
        except _Impossible:
            return _Found(settings, math.inf, NO_ROWS, NO_ROWS, NO_SECONDS)
        if numbers is None:
            return None
        lanes = np.frombuffer(numbers[0], np.int64).reshape(-1, 8)
        pipelines = np.frombuffer(numbers[1], np.int64).reshape(-1, 3)
        busy_s = np.empty(len(lanes))
        while True:
            iteration_s, missing = self._compiled.evaluate(
                self._paths.world(), settings.tables(), settings.sizes, pipelines, lanes, busy_s
            )
            if not missing:
                return _Found(settings, iteration_s, lanes, pipelines, busy_s)
            self._paths.fill()

    def _check(self, plan: Plan) -> None:
        """Raises InputError for the plan of another job."""
        job = self.job
        if not any(plan.model is known for known in self._known_models):
            if plan.transformer != job.model:
                self._refuse(plan)
            self._known_models = [*self._known_models[-3:], plan.model]
        if (
            plan.global_batch != job.global_batch
            or plan.sequence_length != job.sequence_length
            or plan.precision != job.precision
            or plan.optimizer != job.optimizer
        ):
            self._refuse(plan)

    def _refuse(self, plan: Plan) -> None:
        raise InputError(f"the judge was made for the job {self.job.summary}, but the plan is for {plan.job().summary}")

    # --- Verdicts ---

    def _cost(self, found: _Found) -> Cost:
        """The verdict of a plan that fits."""
        iteration_s, settings, groups = found.iteration_s, found.settings, self._groups
        if not iteration_s > 0:
            raise InputError(f"an iteration takes more than 0 s, but that of {self.cluster.name!r} has {iteration_s!r} s")
        lanes, busy_s = found.lanes, found.busy_s
        records, numbers = settings.records.rows[lanes[:, 0]], lanes[:, 1]
        peaks: dict[str, int] = {}
        for group, num_bytes in zip(numbers.tolist(), records[:, 3].tolist(), strict=True):
            peaks.update(dict.fromkeys(groups.names[group], int(num_bytes)))
        micro_batches = np.repeat(found.pipelines[:, 2], np.diff(found.pipelines[:, 0], prepend=0))
        sequences = (lanes[:, 6] - lanes[:, 5]) * micro_batches
        recomputed = [int(records[:, column] @ sequences) for column in (4, 5)]
        again = sum(n * each for n, each in zip(recomputed, settings.recompute_flop, strict=True))
        peak, used = self._peak_flop_per_s, float(groups.peak_flop_per_s.values[numbers].sum())
        return Cost(
            iteration_s=iteration_s,
            tokens_per_s=self.job.tokens / iteration_s,
            mfu=self._model_flop / (iteration_s * peak) if peak else 0.0,
            mfu_used=self._model_flop / (iteration_s * used) if used else 0.0,
            hfu=(self._model_flop + again) / (iteration_s * peak) if peak else 0.0,
            bubble=1 - float(busy_s.sum()) / (len(lanes) * iteration_s),
            peak_bytes=peaks,
            energy_j=self._idle_watts * iteration_s + float(groups.busy_watts.values[numbers] @ busy_s),
            dollars=dollars(self.cluster, iteration_s) or 0.0,
        )


class _Impossible(Exception):
    """A plan that cannot run whatever its memory: it names a device that the cluster lacks, or that lacks the precision."""


class _Found(NamedTuple):
    """What the compiled arithmetic found of a plan: infinite seconds where it does not fit."""

    settings: _Settings
    iteration_s: float
    lanes: NDArray[np.int64]
    pipelines: NDArray[np.int64]
    busy_s: NDArray[np.float64]


NO_ROWS: NDArray[np.int64] = np.empty((0, 0), np.int64)
NO_SECONDS: NDArray[np.float64] = np.empty(0)


# --- Tables that grow ------------------------------------------------------------------------------------------------


class _Column:
    """A one-dimensional array that grows, or rows of `width`."""

    def __init__(self, dtype: type, values: Sequence[float] = (), width: int = 1) -> None:
        self._array: NDArray[Any] = np.empty(64 * width, dtype)
        self._length, self._width = 0, width
        self.extend(values)

    def __len__(self) -> int:
        return self._length // self._width

    def extend(self, values: Sequence[float]) -> None:
        """Appends values."""
        stop = self._length + len(values)
        if stop > len(self._array):
            self._array = np.concatenate([self._array, np.empty(max(stop, len(self._array)), self._array.dtype)])
        self._array[self._length : stop] = values
        self._length = stop

    @property
    def values(self) -> NDArray[Any]:
        """All values."""
        return self._array[: self._length]

    @property
    def rows(self) -> NDArray[Any]:
        """The values as rows."""
        return self.values.reshape(-1, self._width)


class _Paths:
    """The paths between devices as tables of numbers; those that are missed are filled in."""

    def __init__(self, network: Network, compiled: Any) -> None:
        self._network, self._compiled = network, compiled

        def ring_place(device: Device) -> tuple[str, str, int, int]:
            """Where a ring visits a device; see `sim.cost.collectives`."""
            node = device.node
            return node.site, node.rack or "", network.node_number(node.name), device.index

        devices = sorted(network.cluster.devices, key=ring_place)
        self._names = [device.name for device in devices]
        self.numbers = {name: number for number, name in enumerate(self._names)}
        nics = [network.nic_of(name) for name in self._names]
        nic_numbers = {nic: number for number, nic in enumerate(dict.fromkeys(nic for nic in nics if nic is not None))}
        self._nodes = np.array([network.node_number(device.node.name) for device in devices])
        self._nics = np.array([-1 if nic is None else nic_numbers[nic] for nic in nics])
        self._flags = np.array([_by_nccl(network, [name]) for name in self._names])
        self._paths = np.full((len(devices), len(devices)), -1, np.int64)
        self._first, self._links, self._weights = _Column(np.int64, [0]), _Column(np.int64), _Column(np.float64)
        self._latency_s, self._step_s, self._capacity = (_Column(np.float64) for _ in range(3))
        self._asked = np.zeros(1 + 2 * ASKED_AT_ONCE, np.int64)
        self._world: Any = None

    def world(self) -> Any:
        """The tables, as the compiled arithmetic takes them."""
        if self._world is None:
            self._world = self._compiled.World(
                self._nodes,
                self._nics,
                self._flags,
                self._paths,
                self._first.values,
                self._links.values,
                self._weights.values,
                self._latency_s.values,
                self._step_s.values,
                self._capacity.values,
                self._asked,
            )
        return self._world

    def fill(self) -> None:
        """Fills in the paths that were missed."""
        asked, self._world = self._asked, None
        missed = dict.fromkeys(map(tuple, asked[1 : 1 + 2 * asked[0]].reshape(-1, 2).tolist()))
        asked[0] = 0
        paths = [self._network.path(self._names[a], self._names[b]) for a, b in missed]
        for number, (a, b) in enumerate(missed, len(self._latency_s)):
            self._paths[a, b] = number
        ends = np.cumsum([len(path.links) for path in paths]) + len(self._links)
        self._links.extend([link for path in paths for link, _ in path.links])
        self._weights.extend([weight for path in paths for _, weight in path.links])
        self._first.extend(ends.tolist())
        self._latency_s.extend([path.latency_s for path in paths])
        self._step_s.extend([path.step_s for path in paths])
        self._capacity.extend(self._network.capacities()[len(self._capacity) :])


class _Groups:
    """The tensor-parallel groups that plans have had, by number."""

    def __init__(self, cluster: Cluster, job: Job, numbers: dict[str, int]) -> None:
        self._cluster, self._precision, self._numbers = cluster, job.precision, numbers
        self.known: dict[tuple[str, ...], int] = {}
        self.names: list[tuple[str, ...]] = []
        self.alike: list[int] = []
        """Groups of one number here have work that takes equally long."""
        self.alike_names: list[tuple[str, ...]] = []
        """The first group of each of these numbers."""
        self._alikes: dict[object, int] = {}
        self.first, self.devices = _Column(np.int64, [0]), _Column(np.int64)
        self.capacity_bytes, self.busy_watts, self.peak_flop_per_s = (_Column(np.float64) for _ in range(3))

    def add(self, names: tuple[str, ...]) -> int:
        """The number of a new group. Raises _Impossible where the cluster lacks a device, or that the precision."""
        if any(name not in self._numbers for name in names):
            raise _Impossible
        devices = [self._cluster.device(name) for name in names]
        peaks = [device.gpu.peak(self._precision) for device in devices]
        if None in peaks:
            raise _Impossible
        self.peak_flop_per_s.extend([sum(peak or 0.0 for peak in peaks)])
        self.busy_watts.extend([sum(device.gpu.busy_watts - device.gpu.idle_watts for device in devices)])
        self.capacity_bytes.extend([min(device.gpu.memory_bytes for device in devices)])
        self.devices.extend([self._numbers[name] for name in names])
        self.first.extend([len(self.devices)])
        alike = self._alikes.setdefault(self._looks(devices), len(self._alikes))
        if alike == len(self.alike_names):
            self.alike_names.append(names)
        self.alike.append(alike)
        self.names.append(names)
        number = self.known[names] = len(self.names) - 1
        return number

    def _looks(self, devices: Sequence[Device]) -> object:
        """What the seconds of a group's work depend on."""
        if len(devices) == 1:
            return id(devices[0].gpu)
        node = devices[0].node
        if any(device.node is not node for device in devices) or self._cluster.bandwidth_matrix is not None:
            return tuple(device.name for device in devices)
        return id(node.gpu), node.gpus, node.intra, tuple(device.index for device in devices)


# --- What plans of equal settings have in common ---------------------------------------------------------------------


class _Look(NamedTuple):
    """What the seconds of a stage's work depend on."""

    alike: int
    share: int
    ends: int
    """1 for the embedding and 2 for the head, or their sum."""
    layers: int
    selective: int
    full: int


class _Settings:
    """Plans that agree in all but their pipelines, and what is known of their stages."""

    def __init__(self, plan: Plan, cluster: Cluster, network: Network, groups: _Groups) -> None:
        from sim.cost.recurrence import Sizes, Tables

        self._plan, self._network, self._cluster, self._groups, self._tables_type = plan, network, cluster, groups, Tables
        stack, model = cluster.stack, plan.transformer
        self.followed = (
            plan.schedule in WARM_UP
            and plan.zero_stage <= 1
            and plan.context_parallel == plan.expert_parallel == 1
            and plan.shard_group is None
            and not plan.offload_optimizer
            and not stack.blocking_messages
        )
        self._schedule, self._zero_stage = plan.schedule, plan.zero_stage
        self._sequence_length = plan.sequence_length if plan.sequence_parallel else 0
        self._overlap, self._model = plan.overlap_gradients, model
        self._per_bucket = max(1, -(-BUCKET_PARAMETERS // layer_parameters(model)))
        element_bytes, gradient_bytes = PRECISION_BYTES[plan.precision], PRECISION_BYTES[plan.gradient_precision]
        per_layer, embedding, head = layer_parameters(model), embedding_parameters(model), head_parameters(model)
        self.sizes = Sizes(
            layers=model.layers,
            boundary_bytes=float(boundary_bytes(model, 1, plan.sequence_length, element_bytes)),
            layer_gradient_bytes=float(per_layer * gradient_bytes),
            embedding_gradient_bytes=float(embedding * gradient_bytes),
            head_gradient_bytes=float(head * gradient_bytes),
            layer_parameter_bytes=float(per_layer * element_bytes),
            embedding_parameter_bytes=float(embedding * element_bytes),
            head_parameter_bytes=float(head * element_bytes),
            start_s=cluster.fabric.start_s,
            collective_scale=stack.collective_scale,
            per_bucket=self._per_bucket,
            sequence_parallel=plan.sequence_parallel,
            warm_up=WARM_UP.get(plan.schedule, 0),
            overlap=plan.overlap_gradients,
            gathers=plan.zero_stage >= 1,
            tied=model.tied_embeddings,
        )
        self._rules = _rules(
            model,
            plan.sequence_length,
            plan.precision,
            plan.gradient_precision,
            plan.optimizer,
            plan.offload_optimizer,
            plan.sequence_parallel,
            plan.zero_stage,
            plan.context_parallel,
            plan.expert_parallel,
            stack,
        )
        one = plan.sequence_length
        self.recompute_flop = [layer_recompute_flop(model, one, one, mode) for mode in ("selective", "full")]
        self.records = _Column(np.float64, width=6)
        """Of each stage that has been met: seconds of forward, backward and optimizer, bytes, layers recomputed."""
        self._part_first, self._part_s = _Column(np.int64, [0]), _Column(np.float64)
        self._tables: Any = None
        self._tables_groups = 0
        self._known: dict[object, dict[object, int]] = {}
        self._shards: dict[object, float] = {}
        self._works: dict[object, float] = {}
        self._bytes: dict[object, _Held] = {}
        self._parts: dict[object, int] = {}
        self._convex = stack.host_s == stack.tensor_host_s == 0
        """Whether seconds are sums and maxima of what grows in proportion; a host that is waited for adds otherwise."""
        self._planes: dict[object, tuple[float, float, float] | None] = {}
        self._steps: dict[object, tuple[float, float]] = {}
        self._looks: list[_Look] = []
        """Of each record: what its parts depend on, besides where they are divided."""
        self._each_layer: list[int] = []
        """Of each record: its parts where every layer is one; -2: not known."""

    def tables(self) -> Any:
        """The tables, as the compiled arithmetic takes them."""
        if self._tables is None or self._tables_groups != len(self._groups.names):
            groups = self._groups
            self._tables_groups = len(groups.names)
            self._tables = self._tables_type(
                self.records.rows,
                self._part_first.values,
                self._part_s.values,
                groups.first.values,
                groups.devices.values,
                groups.capacity_bytes.values,
            )
        return self._tables

    # --- A plan ---

    def numbers(self, plan: Plan) -> tuple[Numbers, Numbers] | None:
        """The rows of a plan's lanes and pipelines, lanes in layer order; None where it is followed elsewhere.

        Raises _Impossible for a group that cannot work.
        """
        pipelines = plan.pipelines
        if sum(len(pipeline.stages) * pipeline.micro_batches for pipeline in pipelines) > MOST_STEPS:
            return None
        copies = len(pipelines)
        ends = copies
        if self._model.tied_embeddings:
            ends += sum(len(pipeline.stages) > 1 for pipeline in pipelines)
        if self._zero_stage == 0 and ends > 1:
            return None  # all-reduces may go along trees
        known = self._known.get((copies, ends))
        if known is None:
            known = self._known[copies, ends] = {}
        group_of, alike, schedule = self._groups.known, self._groups.alike, self._schedule
        divided = self._overlap and copies > 1
        each_layer = self._each_layer if divided and self._per_bucket == 1 else None
        parts = -1
        lanes: list[int] = []
        rows: list[int] = []
        add, count = lanes.extend, 0
        for pipeline in pipelines:
            stages, share, micro_batches = pipeline.stages, pipeline.micro_batch, pipeline.micro_batches
            depth, at = len(stages), 0
            for place, stage in enumerate(stages):
                replicas, layers = stage.replicas, stage.layers
                start, stop = layers[0]
                if len(replicas) > 1 or len(layers) > 1 or start != at:
                    return self._uneven_numbers(plan)
                at = stop
                devices = replicas[0].devices
                group = group_of.get(devices)
                if group is None:
                    group = self._groups.add(devices)
                end = (place == 0) + 2 * (place == depth - 1)
                flying = in_flight(schedule, depth, place, micro_batches)
                key = (alike[group], share, stop - start, end, flying, stage.recompute, stage.recompute_layers)
                record = known.get(key)
                if record is None:
                    counts = stage.recomputed()
                    look = _Look(alike[group], share, end, stop - start, counts["selective"], counts["full"])
                    shared = copies > 1 or (end > 0 and ends > 1)
                    step_s = self._even_step_s(look, copies, ends)
                    shards = self._shard(copies, stop - start), ends, copies
                    record = known[key] = self._record(look, flying, shared, shards, step_s)
                if each_layer is not None:
                    parts = each_layer[record]
                    if parts == UNKNOWN:
                        parts = each_layer[record] = self._parts_of(record, _single(stop - start))
                add((record, group, parts, start, stop, 0, share, place))
            count += depth
            rows += (count, depth, micro_batches)
        if divided and each_layer is None:
            self._divide(lanes)
        return array("q", lanes), array("q", rows)

    def _uneven_numbers(self, plan: Plan) -> tuple[Numbers, Numbers] | None:
        """As `numbers`, for stages of several replicas, and in any order."""
        schedule, model = self._schedule, self._model
        if any(len(stage.layers) > 1 for pipeline in plan.pipelines for stage in pipeline.stages):
            return None
        held = count_holders(plan)
        heads, embeddings = held.head_shards, held.embedding_shards
        if self._zero_stage == 0 and max(*held.layers, heads, embeddings) > 1:
            return None
        known = self._known.setdefault((heads, embeddings, "uneven"), {})
        cost = ComputeCost(plan, self._cluster)
        lanes: list[int] = []
        rows: list[int] = []
        for p, pipeline in enumerate(plan.pipelines):
            depth, micro_batches = len(pipeline.stages), pipeline.micro_batches
            for place, s in enumerate(pipeline.visiting_order):
                stage, at = pipeline.stages[s], 0
                (start, stop), end = stage.layers[0], (place == 0) + 2 * (place == depth - 1)
                flying, shard = in_flight(schedule, depth, place, micro_batches), held.shard(stage.layers)
                holding = [held.layers[start]] if start < stop else []
                holding += [held.embedding] if end & 1 or (end and model.tied_embeddings) else []
                holding += [held.head] if end & 2 else []
                shared = max(holding) > 1
                for r, replica in enumerate(stage.replicas):
                    group = self._groups.known.get(replica.devices)
                    if group is None:
                        group = self._groups.add(replica.devices)
                    share = replica.sequences
                    counts = stage.recomputed()
                    look = _Look(self._groups.alike[group], share, end, stop - start, counts["selective"], counts["full"])
                    key = look, flying, shard, shared
                    record = known.get(key)
                    if record is None:
                        name = lane_name(p, s, r, len(stage.replicas))
                        lane = _lane(name, p, s, replica.devices, (start, stop), share, end)
                        step_s = cost.seconds(lane, OptimizerStep())
                        record = known[key] = self._record(look, flying, shared, (shard, embeddings, heads), step_s)
                    lanes += (record, group, -1, start, stop, at, at + share, place)
                    at += share
            rows += (len(lanes) // 8, depth, micro_batches)
        if self._overlap:
            self._divide(lanes)
        return array("q", lanes), array("q", rows)

    def _divide(self, lanes: list[int]) -> None:
        """Enters for each lane the parts in which its last backward comes, where several lanes hold all of its layers."""
        cuts = Counter(zip(lanes[3::8], lanes[4::8], strict=True))
        bounds = common_refinement(list(cuts))
        copies = {(a, b): sum(n for (start, stop), n in cuts.items() if start <= a and b <= stop) for a, b in bounds}
        parts_of: dict[LayerRange, tuple[LayerRange, ...]] = {}
        for start, stop in cuts:
            inside = [(a, b) for a, b in bounds if start <= a and b <= stop]
            if inside and all(copies[segment] > 1 for segment in inside):
                parts_of[start, stop] = tuple(
                    (max(a, top - self._per_bucket) - start, top - start)
                    for a, b in reversed(inside)
                    for top in range(b, a, -self._per_bucket)
                )
        for i in range(0, len(lanes), 8):
            parts = parts_of.get((lanes[i + 3], lanes[i + 4]))
            if parts is not None:
                lanes[i + 2] = self._parts_of(lanes[i], parts)

    # --- A stage ---

    def _shard(self, copies: int, layers: int) -> float:
        """The layers that a stage keeps the state of, where all pipelines hold each layer once."""
        key = copies, layers
        if key not in self._shards:
            self._shards[key] = Holders((copies,) * self._model.layers, copies, copies).shard(((0, layers),))
        return self._shards[key]

    def _record(self, look: _Look, flying: float, shared: bool, shards: tuple[float, int, int], step_s: float) -> int:
        """A new record of a stage: of so many micro-batches in flight, and what it keeps of the states of layers and ends."""
        degree = len(self._groups.alike_names[look.alike])
        if self._can_divide(degree):
            held = self._held(degree, look.share, look.ends)
            num_bytes: float = held.total(look.layers, look.selective, look.full, flying, shared, shards)
            seconds = [self._whole_s(look, kind) for kind in (Forward, Backward)]
        else:
            num_bytes, seconds = math.inf, [math.inf, math.inf]
        self._looks.append(look)
        self._each_layer.append(UNKNOWN if look.layers else -1)
        self.records.extend([*seconds, step_s, num_bytes, look.selective, look.full])
        self._tables = None
        return len(self.records) - 1

    def _can_divide(self, degree: int) -> bool:
        """Whether a group of this degree can divide the heads and the sequences; see `sim.cost.feasibility`."""
        heads, key_heads = self._model.heads, self._model.kv_heads
        return not (heads % degree or (key_heads % degree and degree % key_heads) or self._sequence_length % degree)

    def _held(self, degree: int, share: int, ends: int) -> _Held:
        """The bytes of stages of this degree, share and ends."""
        key = degree, share, ends
        if key not in self._bytes:
            self._bytes[key] = _Held(self._rules, degree, share, ends)
        return self._bytes[key]

    # --- Seconds ---

    def _whole_s(self, look: _Look, kind: type[Pass]) -> float:
        """Seconds of a forward or backward of all layers of a stage.

        Of one mode they are a convex function of the layers and of those recomputed in full: maxima of sums that grow in
        proportion. Where it is on a plane at its corners and somewhere inside, it is that plane and is not asked again.
        """
        if not self._convex or self._model.layers < 4 or look.layers == 0 or look.ends == 3:
            return self._work_s(look, kind, (0, look.layers))
        selective = kind is Backward and look.selective > 0
        key = look.alike, look.share, look.ends, kind, selective
        if key not in self._planes:
            self._planes[key] = self._plane(look, kind, selective)
        plane = self._planes[key]
        if plane is None:
            return self._work_s(look, kind, (0, look.layers))
        full = look.full if kind is Backward else 0
        return plane[0] + look.layers * plane[1] + full * plane[2]

    def _plane(self, look: _Look, kind: type[Pass], selective: bool) -> tuple[float, float, float] | None:
        """Seconds without layers, for each layer, and for each recomputed in full; None where they do not grow so."""

        def seconds(layers: int, full: int) -> float:
            probe = look._replace(layers=layers, selective=layers if selective else 0, full=full)
            return self._work_s(probe, kind, (0, layers))

        n = self._model.layers
        least, most = seconds(1, 0), seconds(n, 0)
        each = (most - least) / (n - 1)
        again = 0.0 if kind is Forward or selective else (seconds(n, n) - most) / n
        half = n // 2
        for layers, full in ((half, 0), (half, half // 2), (1, 1)):
            if full and not again:
                continue
            expected = least + (layers - 1) * each + full * again
            if abs(seconds(layers, full) - expected) > 1e-12 * most:
                return None
        return least - each, each, again

    def _work_s(self, look: _Look, kind: type[Pass], part: LayerRange) -> float:
        """Seconds of a forward or backward of some of a stage's layers, given from its first one on, with its collectives.

        They are alone on their links. What `ComputeCost.shape` says decides them is the key under which they are kept.
        """
        a, b = part
        inside = (0, 0) if kind is Forward else (b - a if look.selective else 0, max(0, min(b, look.full) - a))
        embedding, head, beside = look.ends & 1 and a == 0, look.ends & 2 and b == look.layers, b < look.layers
        key = (look.alike, look.share, look.ends == 3, kind, b - a, inside, embedding, head, a == 0, beside)
        seconds = self._works.get(key)
        if seconds is None:
            cost, lane = self._alone(look)
            if b - a < look.layers:
                lane = replace(lane, split="last")
            start = lane.layers[0][0]
            taken = work(self._network, cost, lane, kind(0, (start + a, start + b)))
            seconds = self._works[key] = taken.alone_s(self._network)
        return seconds

    def _alone(self, look: _Look) -> tuple[ComputeCost, Lane]:
        """A plan with a stage that looks like this, and its lane."""
        names, n = self._groups.alike_names[look.alike], self._model.layers
        held, share = look.layers, look.share
        others: tuple[LayerRange, ...]
        if look.ends == 3:
            layers, others = (0, held), ()
        elif look.ends == 1:
            layers, others = (0, held), ((held, n),)
        elif look.ends == 2:
            layers, others = (n - held, n), ((0, n - held),)
        else:
            layers, others = (0, held), ((0, 0), (held, n))
        mode = "full" if look.full else "selective" if look.selective else "none"
        stages = [Stage((Replica(names, share),), (layers,), mode, look.full or None)]
        stages += [Stage((Replica((f"other/{i}",), share),), (other,)) for i, other in enumerate(others)]
        plan = replace(self._plan, pipelines=(Pipeline(share, 1, tuple(stages)),), global_batch=share)
        return ComputeCost(plan, self._cluster), _lane("p0s0", 0, 0, names, layers, share, look.ends)

    def _even_step_s(self, look: _Look, copies: int, ends: int) -> float:
        """Seconds of the optimizer's step where all pipelines hold each layer once; they grow with the layers."""
        n, look = self._model.layers, look._replace(selective=0, full=0)
        holders = Holders((copies,) * n, ends, copies)
        key = look.alike, look.ends, copies, ends
        if key not in self._steps:
            if look.ends == 3 or n == 1:
                return self._step_s(look, holders)
            one, most = (self._step_s(look._replace(layers=layers), holders) for layers in (1, n))
            self._steps[key] = one, (most - one) / (n - 1)
        one, each = self._steps[key]
        return one + (look.layers - 1) * each

    def _step_s(self, look: _Look, holders: Holders) -> float:
        """Seconds of the optimizer's step of a stage."""
        cost, lane = self._alone(look)
        cost._holders = holders
        return cost.seconds(lane, OptimizerStep())

    def _parts_of(self, record: int, parts: tuple[LayerRange, ...]) -> int:
        """The list of the parts of a lane's last backward, which are given from its first layer on, the last ones first."""
        look = self._looks[record]
        number = self._parts.get((look, parts))
        if number is None:
            known: dict[object, float] = {}  # most layers are alike
            seconds = []
            for a, b in parts:
                key = b - a, min(max(look.full - a, 0), b - a), a == 0, b == look.layers
                if key not in known:
                    known[key] = self._work_s(look, Backward, (a, b))
                seconds.append(known[key])
            self._part_s.extend(seconds)
            self._part_first.extend([len(self._part_s)])
            self._tables = None
            number = self._parts[look, parts] = len(self._part_first) - 2
        return number


class _Held:
    """The bytes at the peak of stages of one degree, share of the sequences and ends.

    `sim.cost.memory` is asked for one layer of each mode; the rest grows in proportion to layers and to micro-batches in flight.
    """

    def __init__(self, rules: _Rules, degree: int, share: int, ends: int) -> None:
        model, self._zero_stage = rules.transformer, rules.zero_stage
        self._rules, self._degree, self._share = rules, degree, share
        self._embedding, self._head = bool(ends & 1), bool(ends & 2)
        self._inner_boundaries, self._deep = 2 - self._embedding - self._head if ends != 3 else 0, ends != 3
        none = self._probe()
        one, selective, full = (self._probe(**{mode: 1}) for mode in RECOMPUTE)
        self._parameters, self._gradients = none.parameters, none.gradients
        self._parameters_each, self._gradients_each = one.parameters - none.parameters, one.gradients - none.gradients
        self._optimizer, self._optimizer_each = none.optimizer, one.optimizer - none.optimizer
        self._embedded = none.activations
        self._kept = tuple(parts.activations - none.activations for parts in (one, selective, full))
        self._working = tuple(parts.working for parts in (one, selective, full))
        self._logits: dict[float, int] = {}
        self._buffers, self._context = none.buffers, none.context
        embedding = embedding_parameters_at(model, degree) if self._embedding else 0
        copy = tied_copy_parameters_at(model, degree) if self._head and not self._embedding else 0
        self._layer_parameters, self._embedding_parameters = layer_parameters_at(model, degree), (embedding, copy)
        self._head_parameters = head_parameters_at(model, degree) if self._head else 0

    def _probe(self, none: int = 0, selective: int = 0, full: int = 0, head_flying: float = 0) -> MemoryParts:
        """The parts of a stage with these layers and one micro-batch in flight, all states its own."""
        shape = _Shape(
            self._degree,
            self._share,
            1,
            1 if self._embedding else 0,
            head_flying,
            none,
            selective,
            full,
            self._embedding,
            self._head,
            self._inner_boundaries,
            none + selective + full,
            1,
            1,
            0,
        )
        return _parts(self._rules, shape)

    def total(self, layers: int, selective: int, full: int, flying: float, shared: bool, shards: tuple[float, int, int]) -> int:
        """Bytes of a stage: of its layers, those that recompute, and what it keeps of the states of layers and ends."""
        rules, none = self._rules, layers - selective - full
        counts = none, selective, full
        if self._zero_stage:
            shard, embeddings, heads = shards
            embedding, copy = self._embedding_parameters
            # Summed as in `sim.cost.memory`, so that it is rounded alike.
            ends = embedding / embeddings + self._head_parameters / heads + copy / embeddings
            optimizer = round((shard * self._layer_parameters + ends) * rules.state_bytes)
        else:
            optimizer = self._optimizer + layers * self._optimizer_each
        kept = sum(count * each for count, each in zip(counts, self._kept, strict=True))
        working = max((each for count, each in zip(counts, self._working, strict=True) if count), default=0)
        logits = 0
        if self._head:
            if flying not in self._logits:
                self._logits[flying] = self._probe(head_flying=flying).logits
            logits = self._logits[flying]
        allocated = (
            self._parameters
            + layers * self._parameters_each
            + self._gradients
            + layers * self._gradients_each
            + optimizer
            + round(flying * (kept + self._embedded))
            + working
            + logits
            + self._buffers
        )
        communicators = (self._degree > 1) + self._deep + shared
        return allocated + round(FRAGMENTATION_FRACTION * allocated) + self._context + communicators * COMMUNICATOR_BYTES


def _lane(name: str, pipeline: int, stage: int, devices: tuple[str, ...], layers: LayerRange, share: int, ends: int) -> Lane:
    """A lane without neighbours and instructions."""
    return Lane(name, pipeline, stage, 0, devices, (layers,), (0, share), 1, bool(ends & 1), bool(ends & 2))


@cache
def _single(layers: int) -> tuple[LayerRange, ...]:
    """Layers one by one, the last one first."""
    return tuple((n - 1, n) for n in range(layers, 0, -1))
