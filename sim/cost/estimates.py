"""The fast judge made fast: estimates of thousands of plans of one job on one cluster.

`sim.cost.estimate` lays out one plan; here what plans have in common is kept from one to the next: the seconds and bytes of a
stage by what decides them, the paths between devices, what messages and exchanges between groups put on links, and the numbers
of whole pipelines, which a search takes over from plan to plan. What is left of a plan is a few numbers a lane, which compiled
arithmetic (`sim.cost.recurrence`) follows through pipelines and exchanges.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.collector import garbage_collector_paused
from sim.cost.collectives import by_nccl, collective
from sim.cost.compute import ComputeCost, Inside, host_of
from sim.cost.estimate import Estimate
from sim.cost.feasibility import infeasible
from sim.cost.memory import (
    COMMUNICATOR_BYTES,
    Holders,
    LaneShape,
    count_holders,
    logits_bytes,
    rules_of,
    shape_parts,
)
from sim.cost.network import Network
from sim.cost.price import dollars
from sim.cost.traffic import Growth, growth, work
from sim.spec.cluster import Cluster, Device
from sim.spec.compile import common_refinement
from sim.spec.counts import (
    PRECISION_BYTES,
    boundary_bytes,
    embedding_parameters,
    head_parameters,
    layer_parameters,
    layer_parameters_at,
    layer_recompute_flop,
    model_flop,
)
from sim.spec.job import Job
from sim.spec.judge import Cost, Verdict
from sim.spec.plan import LayerRange, Pipeline, Plan, Replica, Stage
from sim.spec.program import Backward, BackwardInput, BackwardWeight, Forward, Lane, OptimizerStep
from sim.spec.reading import InputError
from sim.spec.schedules import SCHEDULES, held_by, in_flight

MOST_STEPS = 2_000_000
"""Forwards of one plan that are followed one by one; of longer schedules `Estimate` follows a part."""

RING_BYTES = 2.0**20
"""Of a collective that shows which links its group uses."""

ASKED_AT_ONCE = 4096
"""Paths that the compiled arithmetic can miss before it is told."""

EAGERNESS = {"gpipe": 0, "1f1b": 0, "split-1f1b": 0, "eager-1f1b": 0, "zb-1p": 1, "zb-2p": 2}
"""The schedules that are followed; of those that divide backwards, the forwards of their warm-up for each stage that follows."""

UNKNOWN = -2
"""In the place of the number of a list of parts: it has not been asked for."""

FEWEST_TRANSFERS, MOST_TRANSFERS = 2**12, 2**17
"""How many messages and exchanges are kept at first and at most; then all are forgotten."""

LINKS_EACH, LINES_EACH = 12, 4
"""For how many links, and lines, of each of them there is room, on average."""

MOST_ALONES = 256
"""Of so many looks the plans that were asked about are kept; then all are forgotten."""

MOST_PIPELINES = 2**16
"""Of so many pipelines the rows of numbers are kept; then all are forgotten."""

Pass: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight

_End: TypeAlias = tuple[int, tuple[tuple[int, float], ...], float, float]
"""A device and the links of a path that it decides, with their weights; latency of the path, and of a step over it."""


class Estimates:
    """The estimates of plans of one job on one cluster; what it finds out of stages and paths it keeps for the next plan.

    Where nothing is contended they are those of `Estimate`, and so of the simulation, to 1e-9. Where messages meet they are
    slowed by what some stretches of time show them to lose, and where exchanges of gradients or parameters meet their rates are
    followed; what messages, exchanges and the collectives inside stages take from one another is left out. Memory is that of
    `sim.cost.memory`. Plans outside the wide class that is followed here (1F1B, split and eager 1F1B, GPipe, ZB-1p or ZB-2p; ZeRO
    1, or no gradients to exchange; neither context nor expert parallelism; no messages that keep a stage; no tensor-parallel
    replicas of a stage on one node) are handed to `Estimate`.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        from sim.cost import recurrence  # who only imports this module need not wait for a compiler

        self._compiled: Any = recurrence
        self.cluster, self.job = cluster, job
        self.network = Network(cluster)
        self._paths = _Paths(self.network, recurrence)
        self._transfers = _Transfers(recurrence)
        self._groups = _Groups(cluster, job, self.network, self._paths)
        self._settings: dict[object, _Settings] = {}
        self._growths: dict[tuple[bool, int], dict[object, Growth | None]] = {}
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

    def iteration_s(self, plan: Plan, worth_s: float = 0.0) -> float:
        """Seconds of one iteration; infinite where the plan cannot run. Raises InputError as `judge` does.

        With `worth_s` messages that meet are followed one by one, except where they are many and it is finite; where an iteration
        takes longer than that, the seconds are any that are longer, too.
        """
        found = self._found(plan, worth_s=worth_s)
        if found is not None:
            return found.iteration_s
        if infeasible(plan, self.cluster) is not None:
            return math.inf
        return Estimate(plan, self.cluster, self.network).iteration_s()

    def changed_s(self, plan: Plan, pipelines: Sequence[Pipeline], worth_s: float = 0.0) -> float:
        """`iteration_s` of a plan with these pipelines instead of its own; that it would be sound is taken for granted."""
        found = self._found(plan, pipelines, worth_s)
        return found.iteration_s if found is not None else self.iteration_s(replace(plan, pipelines=tuple(pipelines)))

    def many(self, plans: Iterable[Plan], worth_s: float = 0.0) -> NDArray[np.float64]:
        """`iteration_s` of each of some plans."""
        with garbage_collector_paused():
            return np.array([self.iteration_s(plan, worth_s) for plan in plans])

    # --- From a plan to numbers ---

    def _found(self, plan: Plan, pipelines: Sequence[Pipeline] | None = None, worth_s: float = 0.0) -> _Found | None:
        """What the compiled arithmetic finds, with other pipelines than the plan's if they are given; None for a plan that it
        does not follow."""
        self._check(plan)
        key = (
            plan.schedule,
            plan.zero_stage,
            plan.sequence_parallel,
            plan.overlap_gradients,
            plan.gradient_precision,
            plan.context_parallel,
            plan.expert_parallel,
            plan.expert_tensor_parallel,
            plan.sequence_slices,
            plan.shard_group,
            plan.offload_optimizer,
        )
        settings = self._settings.get(key)
        if settings is None:
            growths = self._growths.setdefault((plan.sequence_parallel, plan.sequence_slices), {})
            settings = self._settings[key] = _Settings(plan, self.cluster, self.network, self._groups, self._compiled, growths)
        if not settings.followed:
            return None
        try:
            numbers = settings.numbers(plan.pipelines if pipelines is None else pipelines)
        except _Impossible:
            return _Found(settings, math.inf, NO_ROWS, NO_ROWS, NO_VALUES, NO_VALUES)
        if numbers is None:
            return None
        compiled, again = self._compiled, False
        lanes = np.frombuffer(numbers.lanes, np.int64).reshape(-1, compiled.LANE_COLUMNS)
        bounds = np.frombuffer(numbers.pipelines, np.int64).reshape(-1, 3)
        busy_s, num_bytes = np.empty(len(lanes)), np.empty(len(lanes))
        while True:
            iteration_s, end = compiled.evaluate(
                settings.common(self._paths.world(), self._transfers.tables),
                bounds,
                lanes,
                numbers.shards,
                numbers.embeddings,
                numbers.heads,
                worth_s,
                busy_s,
                num_bytes,
            )
            if end == compiled.DONE:
                return _Found(settings, iteration_s, lanes, bounds, busy_s, num_bytes)
            if end == compiled.MISSING:
                self._paths.fill()
            else:
                self._transfers.forget(again)
                again = True

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
            or plan.gradient_precision != job.gradient_precision
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
        compiled, lanes, busy_s = self._compiled, found.lanes, found.busy_s
        looks, numbers = settings.looks.rows[lanes[:, compiled.LOOK]], lanes[:, compiled.GROUP]
        peaks: dict[str, int] = {}
        for group, num_bytes in zip(numbers.tolist(), found.num_bytes.tolist(), strict=True):
            peaks.update(dict.fromkeys(groups.names[group], int(num_bytes)))
        micro_batches = np.repeat(found.pipelines[:, 2] // settings.slices, np.diff(found.pipelines[:, 0], prepend=0))
        sequences = (lanes[:, compiled.TO] - lanes[:, compiled.FROM]) * micro_batches
        recomputed = [int(looks[:, column] @ sequences) for column in (compiled.SELECTIVE, compiled.WHOLLY)]
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
    num_bytes: NDArray[np.float64]


class _Numbers(NamedTuple):
    """A plan as the compiled arithmetic takes it."""

    lanes: array[int]
    """Rows, one after the other."""
    pipelines: array[int]
    """Rows, too: the lane after its last, its depth, the slices of its micro-batches."""
    shards: NDArray[np.float64]
    embeddings: int
    """Over how many the state of the embedding is divided."""
    heads: int


NO_ROWS: NDArray[np.int64] = np.empty((0, 0), np.int64)
NO_VALUES: NDArray[np.float64] = np.empty(0)


# --- Tables that grow ------------------------------------------------------------------------------------------------


class _Column:
    """A one-dimensional array that grows, or rows of `width`."""

    def __init__(self, dtype: type, values: Sequence[float] = (), width: int = 1) -> None:
        self._array: NDArray[Any] = np.empty(64 * width, dtype)
        self._length, self._width, self.grown = 0, width, 0
        self.extend(values)

    def __len__(self) -> int:
        return self._length // self._width

    def extend(self, values: Sequence[float] | NDArray[Any]) -> None:
        """Appends values."""
        stop = self._length + len(values)
        if stop > len(self._array):
            more = -(-max(stop, len(self._array)) // self._width) * self._width
            self._array = np.concatenate([self._array, np.empty(more, self._array.dtype)])
            self.grown += 1
        self._array[self._length : stop] = values
        self._length = stop

    def append(self, value: float) -> None:
        """The same of one value."""
        if self._length == len(self._array):
            self.extend([value])
        else:
            self._array[self._length] = value
            self._length += 1

    @property
    def values(self) -> NDArray[Any]:
        """All values."""
        return self._array[: self._length]

    @property
    def room(self) -> NDArray[Any]:
        """The values and what will be others, as rows if they are: the same array as long as there is room."""
        return self._array if self._width == 1 else self._array.reshape(-1, self._width)

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
        self._flags = np.array([by_nccl(network, [name]) for name in self._names])
        self._paths = np.full((len(devices), len(devices)), -1, np.int64)
        starts = np.flatnonzero(np.diff(self._nodes, prepend=-1))
        self._node_of = (np.searchsorted(starts, np.arange(len(devices)), side="right") - 1).tolist()
        self._devices_of = [range(a, b) for a, b in pairwise([*starts.tolist(), len(devices)])]
        # The first one stands in for those that are missing.
        self._first, self._links, self._weights = _Column(np.int64, [0, 0]), _Column(np.int64), _Column(np.float64)
        self._latency_s, self._step_s, self._capacity = _Column(np.float64, [0]), _Column(np.float64, [0]), _Column(np.float64)
        self._cards = _Column(np.bool_)
        self._asked = np.zeros(1 + 2 * ASKED_AT_ONCE, np.int64)
        matrix = network.cluster.bandwidth_matrix
        self._by_device = matrix is not None and any(name in self.numbers for name in matrix.names)
        self._world: Any = None

    def world(self) -> Any:
        """The tables, as the compiled arithmetic takes them."""
        if self._world is None:
            self._world = self._compiled.World(
                self._nodes,
                self._nics,
                self._flags,
                self._paths,
                self._first.room,
                self._links.room,
                self._weights.room,
                self._latency_s.room,
                self._step_s.room,
                self._capacity.values,
                self._cards.values,
                self._asked,
            )
        return self._world

    def fill(self) -> None:
        """Fills in the paths that were missed, and those between the other devices of the same two nodes."""
        asked, self._world = self._asked, None
        missed = asked[1 : 1 + 2 * min(int(asked[0]), ASKED_AT_ONCE)].reshape(-1, 2).tolist()
        asked[0] = 0
        for a, b in missed:
            if self._paths[a, b] < 0:
                self._fill_between(a, b)
        self.take_links()

    def take_links(self) -> None:
        """Takes the links that the network has found since."""
        known = len(self._capacity)
        self._capacity.extend(self._network.capacities()[known:])
        self._cards.extend([self._network.is_card(link) for link in range(known, len(self._capacity))])
        self._world = None

    def _fill_between(self, a: int, b: int) -> None:
        """Enters the path between two devices, and where they are of two nodes, all paths between these.

        On such a path the sender decides some of the first links and the receiver some of the last, so that few paths tell all.
        Not where the network has been measured device by device.
        """
        path, names = self._network.path, self._names
        senders, receivers = (self._devices_of[self._node_of[number]] for number in (a, b))
        together = senders is not receivers and not self._by_device
        if together:
            first, last = names[senders[0]], names[receivers[0]]
            corner = path(first, last)
            leaving, entering = [path(names[one], last) for one in senders], [path(first, names[one]) for one in receivers]
            decided = len(corner.links) - min(_common(corner.links[::-1], found.links[::-1]) for found in leaving)
            together = decided <= min(_common(corner.links, found.links) for found in entering)
        if not together:
            senders, receivers, decided, corner = range(a, a + 1), range(b, b + 1), 0, path(names[a], names[b])
            leaving = entering = [corner]
        heads: dict[int, list[_End]] = {}
        tails: dict[int, list[_End]] = {}  # by how many links they are
        for one, found in zip(senders, leaving, strict=True):
            head = found.links[: len(found.links) - len(corner.links) + decided]
            heads.setdefault(len(head), []).append((one, head, found.latency_s, found.step_s))
        for one, found in zip(receivers, entering, strict=True):
            tail = found.links[decided:]
            tails.setdefault(len(tail), []).append((one, tail, found.latency_s - corner.latency_s, found.step_s - corner.step_s))
        for some, others in product(heads.values(), tails.values()):
            self._enter(some, others)

    def _enter(self, heads: Sequence[_End], tails: Sequence[_End]) -> None:
        """Enters all paths from devices with some first links to devices with some last ones; of each, all are equally many."""
        senders, first, latency_s, step_s = zip(*heads, strict=True)
        receivers, last, more_latency_s, more_step_s = zip(*tails, strict=True)
        n, m, h = len(heads), len(tails), len(first[0])
        both = np.empty((n, m, h + len(last[0]), 2))
        both[:, :, :h] = np.reshape(first, (n, 1, h, 2))
        both[:, :, h:] = np.reshape(last, (1, m, -1, 2))
        self._paths[np.ix_(senders, receivers)] = np.arange(n * m).reshape(n, m) + len(self._latency_s)
        self._first.extend(np.arange(1, n * m + 1) * both.shape[2] + len(self._links))
        self._links.extend(both[..., 0].ravel())
        self._weights.extend(both[..., 1].ravel())
        self._latency_s.extend(np.add.outer(latency_s, more_latency_s).ravel())
        self._step_s.extend(np.add.outer(step_s, more_step_s).ravel())


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of their first entries two sequences have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class _Transfers:
    """The messages and exchanges that plans have had; see `sim.cost.recurrence.Transfers`."""

    def __init__(self, compiled: Any) -> None:
        self._compiled, self._rows = compiled, FEWEST_TRANSFERS
        self.tables = self._empty()

    def forget(self, all_are_of_one_plan: bool) -> None:
        """Makes room: all are forgotten."""
        if self._rows < MOST_TRANSFERS or all_are_of_one_plan:
            self._rows *= 2
        self.tables = self._empty()

    def _empty(self) -> Any:
        rows = self._rows
        return self._compiled.Transfers(
            np.full(2 * rows, -1, np.int64),
            np.empty((rows, 2), np.int64),
            np.empty((rows, 3)),
            np.empty(rows, np.bool_),
            np.zeros(rows + 1, np.int64),
            np.empty(rows * LINKS_EACH, np.int64),
            np.empty(rows * LINKS_EACH),
            np.zeros(rows + 1, np.int64),
            np.empty((rows * LINES_EACH, 2)),
            np.zeros(1, np.int64),
        )


class _Groups:
    """The tensor-parallel groups that plans have had, by number."""

    def __init__(self, cluster: Cluster, job: Job, network: Network, paths: _Paths) -> None:
        self._cluster, self._precision, self._network, self._paths = cluster, job.precision, network, paths
        self.known: dict[tuple[str, ...], int] = {}
        self.names: list[tuple[str, ...]] = []
        self.alike: list[int] = []
        """Groups of one number here have work that takes equally long."""
        self.alike_names: list[tuple[str, ...]] = []
        """The first group of each of these numbers."""
        self._alikes: dict[object, int] = {}
        self._random = np.random.default_rng(0)
        self.first, self.devices, self.keys = _Column(np.int64, [0]), _Column(np.int64), _Column(np.int64, width=2)
        self.capacity_bytes, self.busy_watts, self.peak_flop_per_s = (_Column(np.float64) for _ in range(3))
        self.ring_first, self.ring_link, self.ring_share = _Column(np.int64, [0]), _Column(np.int64), _Column(np.float64)

    def add(self, names: tuple[str, ...]) -> int:
        """The number of a new group. Raises _Impossible where the cluster lacks a device, or that the precision."""
        if any(name not in self._paths.numbers for name in names):
            raise _Impossible
        devices = [self._cluster.device(name) for name in names]
        peaks = [device.gpu.peak(self._precision) for device in devices]
        if None in peaks:
            raise _Impossible
        self.peak_flop_per_s.extend([sum(peak or 0.0 for peak in peaks)])
        self.busy_watts.extend([sum(device.gpu.busy_watts - device.gpu.idle_watts for device in devices)])
        self.capacity_bytes.extend([min(device.gpu.memory_bytes for device in devices)])
        self.devices.extend([self._paths.numbers[name] for name in names])
        self.first.append(len(self.devices))
        self.keys.extend(self._random.integers(-(2**63), 2**63, 2))
        ring = collective(self._network, "all_gather", names, RING_BYTES)
        self._paths.take_links()
        capacities = self._network.capacities()
        seconds = {link: num_bytes / capacities[link] for link, num_bytes in ring.loads}
        self.ring_link.extend(list(seconds))
        self.ring_share.extend([part / max(seconds.values()) for part in seconds.values()])
        self.ring_first.append(len(self.ring_link))
        alike = self._alikes.setdefault(self._looks(devices), len(self._alikes))
        if alike == len(self.alike_names):
            self.alike_names.append(names)
        self.alike.append(alike)
        self.names.append(names)
        number = self.known[names] = len(self.names) - 1
        return number

    def _looks(self, devices: Sequence[Device]) -> object:
        """What the seconds of a group's work depend on: the kinds at their speeds, the network among the devices, and with how
        many the node's processors are shared."""
        node = devices[0].node
        if any(device.node is not node for device in devices):
            return tuple(device.name for device in devices)
        links: dict[int, int] = {}
        paths = []
        for sender, receiver in permutations(devices, 2):
            path = self._network.path(sender.name, receiver.name)
            crossed = tuple((links.setdefault(link, len(links)), weight) for link, weight in path.links)
            paths.append((crossed, path.latency_s, path.step_s))
        rates = tuple(self._network.links[link].capacity_bytes_per_s for link in links)
        order = tuple(sorted(range(len(devices)), key=lambda i: devices[i].index))  # in which a ring visits them
        return frozenset(id(device.gpu) for device in devices), node.intra, host_of(node), order, tuple(paths), rates


# --- What plans of equal settings have in common ---------------------------------------------------------------------


class _Look(NamedTuple):
    """What the seconds and the bytes of a stage depend on."""

    alike: int
    share: int
    ends: int
    """1 for the embedding and 2 for the head, or their sum."""
    layers: int
    full: int
    """Layers that are recomputed in full, which come first, then selectively, then pointwise."""
    selective: int
    pointwise: int


class _Bytes(NamedTuple):
    """Of looks with equal ends, shares and degrees: bytes that they have without layers, allocated in any case, needed when at
    work and kept of each slice; that each layer adds; that each layer of a mode keeps, and needs when at work; and the rest of a
    look's row."""

    fixed: int
    working: int
    kept: int
    each: int
    modes: tuple[tuple[int, int], ...]
    rest: tuple[int, ...]


_Key: TypeAlias = tuple[int, int, int, int, str, int | None, str]
"""The same with the recomputation as a stage says it: alike, share, ends, layers, mode, layers in that mode, mode of the rest."""


def _has_neighbours(stage: Stage) -> bool:
    """Whether tensor-parallel replicas of a stage are on one node, where their collectives, which are in step, meet."""
    nodes = [{name.rpartition("/")[0] for name in replica.devices} for replica in stage.replicas if len(replica.devices) > 1]
    return len(nodes) > 1 and len(set().union(*nodes)) < sum(map(len, nodes))


class _Settings:
    """Plans that agree in all but their pipelines, and what is known of their stages."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        network: Network,
        groups: _Groups,
        compiled: Any,
        growths: dict[object, Growth | None],
    ) -> None:
        self._plan, self._network, self._cluster, self._groups, self._compiled = plan, network, cluster, groups, compiled
        stack, model = cluster.stack, plan.transformer
        self.followed = (
            plan.schedule in EAGERNESS
            and plan.zero_stage <= 1
            and plan.context_parallel == plan.expert_parallel == 1
            and not plan.whole_experts
            and plan.shard_group is None
            and not stack.keeps_messages(len(cluster.nodes))
        )
        self._schedule, self._zero_stage, self.slices = plan.schedule, plan.zero_stage, plan.sequence_slices
        self._halves = SCHEDULES[plan.schedule].splits_backward
        self._last_kinds: tuple[type[Pass], ...] = (BackwardWeight, BackwardInput) if self._halves else (Backward,)
        """Of a last backward: the part after which gradients go on, and the other half where it is divided."""
        self._divided_length = plan.slice_length if plan.sequence_parallel else 0
        self._overlap, self._model = plan.overlap_gradients, model
        self._rules = rules_of(plan, stack)
        self._per_bucket = self._rules.bucket_layers
        element_bytes, gradient_bytes = PRECISION_BYTES[plan.precision], PRECISION_BYTES[plan.gradient_precision]
        per_layer, embedding, head = layer_parameters(model), embedding_parameters(model), head_parameters(model)
        self.sizes = compiled.Sizes(
            layers=model.layers,
            boundary_bytes=float(boundary_bytes(model, 1, plan.slice_length, element_bytes)),
            layer_gradient_bytes=float(per_layer * gradient_bytes),
            embedding_gradient_bytes=float(embedding * gradient_bytes),
            head_gradient_bytes=float(head * gradient_bytes),
            layer_parameter_bytes=float(per_layer * element_bytes),
            embedding_parameter_bytes=float(embedding * element_bytes),
            head_parameter_bytes=float(head * element_bytes),
            state_bytes=float(self._rules.state_bytes),
            logits_scale=float(stack.logits_scale),
            fragmentation=float(stack.fragmentation),
            communicator_bytes=float(COMMUNICATOR_BYTES),
            start_s=float(cluster.fabric.start_s),
            node_collective_scale=float(stack.node_collective_scale),
            collective_scale=float(stack.collective_scale),
            per_bucket=self._per_bucket,
            sequence_parallel=plan.sequence_parallel,
            eagerness=EAGERNESS.get(plan.schedule, 0),
            halves=self._halves,
            overlap=plan.overlap_gradients,
            gathers=plan.zero_stage >= 1,
            tied=model.tied_embeddings,
        )
        one = plan.sequence_length
        self.recompute_flop = [layer_recompute_flop(model, one, one, mode) for mode in ("selective", "full")]
        self.looks = _Column(np.float64, width=compiled.LOOK_COLUMNS)
        """Of each stage that looks unlike those before: see `sim.cost.recurrence.Tables`."""
        self._pass_s = _Column(np.float64, width=2 * self.slices)
        self._known: dict[_Key, int] = {}
        self._seen: list[_Look] = []
        self._each_layer: list[int] = []
        """Of each look: its parts where every layer is one; -1: it has no layers; -2: not known."""
        self._pipelines: dict[bool, dict[int, tuple[Pipeline, array[int] | None]]] = {True: {}, False: {}}
        """Of pipelines that have been met, by their identity (they are kept so that it stays theirs): the rows of their lanes."""
        self._even_shards: dict[int, NDArray[np.float64]] = {}
        self._part_first, self._part_s, self._input_s = _Column(np.int64, [0]), _Column(np.float64), _Column(np.float64)
        self._step_first, self._steps = _Column(np.int64, [0]), _Column(np.float64, width=2)
        self._columns = (
            *(self.looks, self._pass_s, self._steps, self._step_first, self._part_first, self._part_s, self._input_s),
            *(groups.first, groups.devices, groups.capacity_bytes, groups.keys),
            *(groups.ring_first, groups.ring_link, groups.ring_share),
        )
        """Of the compiled arithmetic's `Tables`, in their order."""
        self._common: Any = None
        self._handed: tuple[Any, Any, list[int]] = (None, None, [])
        """Of what that was made: the world, the transfers, and how often the columns had grown."""
        self._works: dict[object, tuple[float, float]] = {}
        self._alones: dict[_Look, tuple[ComputeCost, Lane]] = {}
        self._parts: dict[object, int] = {}
        self._steps_of: dict[int, int] = {}
        self._bytes: dict[tuple[int, ...], _Bytes] = {}
        self._flying: dict[tuple[int, int], list[int]] = {}
        """Of depths and slices: how many each stage of a pipeline holds."""
        self._layer_s: dict[object, float] = {}
        self._growths = growths
        """Of passes; plans of other schedules and ZeRO stages have the same."""

    def common(self, world: Any, transfers: Any) -> Any:
        """What these plans have in common, as the compiled arithmetic takes it."""
        grown = [column.grown for column in self._columns]
        if world is not self._handed[0] or transfers is not self._handed[1] or grown != self._handed[2]:
            tables = self._compiled.Tables(*[column.room for column in self._columns])
            tables = tables._replace(pass_s=tables.pass_s.reshape(-1, 2, self.slices))
            self._common = self._compiled.common(world, transfers, tables, self.sizes)
            self._handed = world, transfers, grown
        return self._common

    # --- A plan ---

    def numbers(self, pipelines: Sequence[Pipeline]) -> _Numbers | None:
        """A plan's lanes and pipelines, lanes in layer order; None where it is followed elsewhere.

        Raises _Impossible for a group that cannot work.
        """
        copies, steps, count = len(pipelines), 0, 0
        ends = copies
        if self._model.tied_embeddings:
            ends += sum(len(pipeline.stages) > 1 for pipeline in pipelines)
        if self._zero_stage == 0 and ends > 1:
            return None  # all-reduces may go along trees
        known = self._pipelines[copies > 1]
        if len(known) > MOST_PIPELINES:
            known.clear()
        lanes, bounds = array("q"), array("q")
        for pipeline in pipelines:
            found = known.get(id(pipeline))
            if found is None:
                found = known[id(pipeline)] = pipeline, self._rows(pipeline, copies > 1)
            if found[1] is None:
                return self._uneven_numbers(replace(self._plan, pipelines=tuple(pipelines)))
            lanes += found[1]
            depth, micro_batches = len(pipeline.stages), pipeline.micro_batches * self.slices
            steps, count = steps + depth * micro_batches, count + depth
            bounds.extend((count, depth, micro_batches))
        if steps > MOST_STEPS:
            return None
        if self._overlap and copies > 1 and self._per_bucket > 1:
            self._divide(lanes)
        return _Numbers(lanes, bounds, self._shards(copies), ends, copies)

    def _rows(self, pipeline: Pipeline, shared: bool) -> array[int] | None:
        """The rows of a pipeline's lanes, where it is one of several (`shared`) or alone; None where its stages have several
        replicas or ranges, or do not stand in layer order.
        """
        in_parts = shared and self._overlap and self._per_bucket == 1
        group_of, alike, known, each_layer = self._groups.known, self._groups.alike, self._known, self._each_layer
        stages, share, micro_batches = pipeline.stages, pipeline.micro_batch, pipeline.micro_batches * self.slices
        depth, at, parts, more = len(stages), 0, -1, self.slices - 1
        tied = self._model.tied_embeddings and depth > 1
        held = self._flying.get((depth, micro_batches))
        if held is None:
            alone = [int(in_flight(self._schedule, depth, place, micro_batches)) for place in range(depth)]
            held = self._flying[depth, micro_batches] = [min(flying + more, micro_batches) for flying in alone]
        rows: list[int] = []  # a list grows faster than an array
        for place, stage in enumerate(stages):
            replicas, layers = stage.replicas, stage.layers
            start, stop = layers[0]
            if len(replicas) > 1 or len(layers) > 1 or start != at:
                return None
            at = stop
            devices = replicas[0].devices
            group = group_of.get(devices)
            if group is None:
                group = self._groups.add(devices)
            end = (place == 0) + 2 * (place == depth - 1)
            key = (
                alike[group],
                share,
                end,
                stop - start,
                stage.recompute,
                stage.recompute_layers,
                stage.recompute_rest,
            )
            look = known.get(key)
            if look is None:
                look = known[key] = self._add(key, stage)
            if in_parts:
                parts = each_layer[look]
                if parts == UNKNOWN:
                    parts = each_layer[look] = self._layers_of(look)
            flying = held[place]
            if stage.in_flight is not None:
                flying = min(stage.in_flight + more, micro_batches)
            exchanges = shared or (tied and end > 0)
            rows += (look, group, parts, start, stop, 0, share, place, flying, stop - start, exchanges)
        return array("q", rows)

    def _shards(self, copies: int) -> NDArray[np.float64]:
        """Of how many layers a stage keeps the state, by the layers that it holds, where all pipelines hold each layer once."""
        found = self._even_shards.get(copies)
        if found is None:
            n = self._model.layers
            held = Holders((copies,) * n, copies, copies)
            found = self._even_shards[copies] = np.array([held.shard(((0, layers),)) for layers in range(n + 1)])
        return found

    def _uneven_numbers(self, plan: Plan) -> _Numbers | None:
        """As `numbers`, for stages of several replicas, and in any order."""
        model = self._model
        if any(len(stage.layers) > 1 or _has_neighbours(stage) for pipeline in plan.pipelines for stage in pipeline.stages):
            return None
        held = count_holders(plan)
        heads, embeddings = held.head_shards, held.embedding_shards
        if self._zero_stage == 0 and max(*held.layers, heads, embeddings) > 1:
            return None
        lanes, bounds = array("q"), array("q")
        shards: list[float] = []
        count = steps = 0
        for pipeline in plan.pipelines:
            depth, micro_batches = len(pipeline.stages), pipeline.micro_batches * self.slices
            for place, s in enumerate(pipeline.visiting_order):
                stage, at = pipeline.stages[s], 0
                (start, stop), end = stage.layers[0], (place == 0) + 2 * (place == depth - 1)
                flying = held_by(self._schedule, pipeline, place, slices=self.slices)
                holding = [held.layers[start]] if start < stop else []
                holding += [held.embedding] if end & 1 or (end and model.tied_embeddings) else []
                holding += [held.head] if end & 2 else []
                for replica in stage.replicas:
                    group = self._groups.known.get(replica.devices)
                    if group is None:
                        group = self._groups.add(replica.devices)
                    alike = self._groups.alike[group]
                    again = stage.recompute, stage.recompute_layers, stage.recompute_rest
                    key = alike, replica.sequences, end, stop - start, *again
                    look = self._known.get(key, UNKNOWN)
                    if look == UNKNOWN:
                        look = self._known[key] = self._add(key, stage)
                    to, shared = at + replica.sequences, max(holding) > 1
                    lanes.extend((look, group, -1, start, stop, at, to, place, int(flying), len(shards), shared))
                    at = to
                shards.append(held.shard(stage.layers))
                count += len(stage.replicas)
                steps += len(stage.replicas) * micro_batches
            bounds.extend((count, depth, micro_batches))
        if steps > MOST_STEPS:
            return None
        if self._overlap:
            self._divide(lanes)
        return _Numbers(lanes, bounds, np.array(shards), embeddings, heads)

    def _divide(self, lanes: array[int]) -> None:
        """Enters for each lane the parts in which its last backward comes, where several lanes hold all of its layers."""
        compiled = self._compiled
        width = compiled.LANE_COLUMNS
        cuts = Counter(zip(lanes[compiled.START :: width], lanes[compiled.STOP :: width], strict=True))
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
        for i in range(0, len(lanes), width):
            parts = parts_of.get((lanes[i + compiled.START], lanes[i + compiled.STOP]))
            if parts is not None:
                lanes[i + compiled.PARTS] = self._parts_of(lanes[i + compiled.LOOK], parts)

    # --- A stage ---

    def _add(self, key: _Key, stage: Stage) -> int:
        """The number of a look that is new."""
        alike, share, ends, layers, *_ = key
        counts = stage.recomputed()
        look = _Look(alike, share, ends, layers, counts["full"], counts["selective"], counts["pointwise"])
        row, passes = [0.0] * self._compiled.LOOK_COLUMNS, [0.0] * (2 * self.slices)
        degree = len(self._groups.alike_names[look.alike])
        if self._can_divide(degree):
            backward = BackwardInput if self._halves else Backward
            forwards = [self._whole_s(look, Forward, place) for place in range(self.slices)]
            backwards = [self._whole_s(look, backward, place) for place in range(self.slices)]
            passes = [seconds for seconds, _ in forwards + backwards[::-1]]
            row = [
                self._whole_s(look, BackwardWeight)[0] if self._halves else 0.0,
                *self._bytes_of(degree, look),
                look.selective,
                look.full,
                self._steps_list(look),
                forwards[0][1],
                backwards[0][1],
            ]
        else:
            row[self._compiled.FIXED] = math.inf
        self._seen.append(look)
        self._each_layer.append(UNKNOWN if look.layers else -1)
        self.looks.extend(row)
        self._pass_s.extend(passes)
        return len(self._seen) - 1

    def _bytes_of(self, degree: int, look: _Look) -> tuple[float, ...]:
        """The bytes and parameters that the row of a look has, in its order; GPUs of all kinds have the same.

        They grow by as much with each layer of a mode of recomputation; but of the layer at work the most counts.
        """
        key = degree, look.share, look.ends
        known = self._bytes.get(key)
        if known is None:
            known = self._bytes[key] = self._bytes_by_mode(*key)
        fixed, working, kept, each, modes, rest = known
        none = look.layers - look.full - look.selective - look.pointwise
        for count, (of_layer, at_work) in zip((none, look.pointwise, look.selective, look.full), modes, strict=True):
            if count:
                kept += count * of_layer
                working = max(working, at_work)
        return fixed + look.layers * each + working, kept, *rest

    def _bytes_by_mode(self, degree: int, share: int, ends: int) -> _Bytes:
        """What the bytes of looks grow by."""
        rules, embedding, head = self._rules, bool(ends & 1), bool(ends & 2)
        empty = LaneShape(
            tensor_parallel=degree,
            sequences=share,
            in_flight=1,
            embedding_in_flight=1 if embedding else 0,
            head_in_flight=0,
            none=0,
            pointwise=0,
            selective=0,
            full=0,
            embedding=embedding,
            head=head,
            boundaries=2 - embedding - head if ends != 3 else 0,
            shard=0,
            embedding_shards=1,
            head_shards=1,
            communicators=(degree > 1) + (ends != 3),
        )
        without, held = shape_parts(rules, empty), rules.parameters(degree)
        with_one = (empty._replace(none=1), empty._replace(pointwise=1), empty._replace(selective=1), empty._replace(full=1))
        layers = [shape_parts(rules, one) for one in with_one]
        fixed = without.parameters + without.gradients + without.buffers
        return _Bytes(
            fixed=fixed,
            working=without.working,
            kept=without.activations,
            each=layers[0].parameters + layers[0].gradients + layers[0].buffers - fixed,
            modes=tuple([(one.activations - without.activations, one.working) for one in layers]),
            rest=(
                logits_bytes(rules, empty)[0] if head else 0,
                without.context,
                held.layer_undivided,
                held.embedding if embedding else 0,
                held.head if head else 0,
                held.copy if head and not embedding else 0,
            ),
        )

    def _can_divide(self, degree: int) -> bool:
        """Whether a group of this degree can divide the heads and the sequences; see `sim.cost.feasibility`."""
        heads, key_heads = self._model.heads, self._model.kv_heads
        return not (heads % degree or (key_heads % degree and degree % key_heads) or self._divided_length % degree)

    # --- Seconds ---

    def _whole_s(self, look: _Look, kind: type[Pass], place: int = 0) -> tuple[float, float]:
        """As `_taken_s`, of all layers of a stage."""
        return self._taken_s(look, kind, (0, look.layers), place)

    def _taken_s(self, look: _Look, kind: type[Pass], part: LayerRange, place: int = 0) -> tuple[float, float]:
        """Seconds of a forward or backward, or of a half of one, of some of a stage's layers, given from its first one on, with
        its collectives; and of those that it waits for.

        They are alone on their links. Where sequences come in slices, it is of the slice at a place.
        """
        only = look.ends == 3  # one stage alone: of the others the ends make no difference
        key = look.alike, look.share, only, kind, place
        if key not in self._growths:
            layers, ends = (self._model.layers, 3) if only else (1, 0)
            cost, lane = self._alone(_Look(look.alike, look.share, ends, layers, 0, 0, 0))
            self._growths[key] = growth(self._network, cost, lane, kind, place)
        found = self._growths[key]
        if found is None:
            return self._work_s(look, kind, part, place)
        a, b = part
        inside = Inside(b - a, *_within(look, part), bool(look.ends & 1 and a == 0), bool(look.ends & 2 and b == look.layers))
        return found.alone_s(inside, a == 0, kind is not Forward and b < look.layers)

    def _work_s(self, look: _Look, kind: type[Pass], part: LayerRange, place: int) -> tuple[float, float]:
        """As `_taken_s`, where seconds do not grow in proportion. What `ComputeCost.shape` says decides them is their key."""
        a, b = part
        inside = _within(look, part) if kind is not Forward else ()
        embedding, head, beside = look.ends & 1 and a == 0, look.ends & 2 and b == look.layers, b < look.layers
        key = (look.alike, look.share, look.ends == 3, kind, b - a, inside, embedding, head, a == 0, beside, place)
        seconds = self._works.get(key)
        if seconds is None:
            cost, lane = self._alone(look)
            if b - a < look.layers:
                lane = replace(lane, split="last")
            start = lane.layers[0][0]
            taken = work(self._network, cost, lane, kind(place, (start + a, start + b)))
            seconds = self._works[key] = taken.alone_s(self._network), self._network.alone_s(taken.after)
        return seconds

    def _alone(self, look: _Look) -> tuple[ComputeCost, Lane]:
        """A plan with a stage that looks like this, and its lane."""
        if (found := self._alones.get(look)) is not None:
            return found
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
        stages = [_as_said(Stage((Replica(names, share),), (layers,)), look)]
        stages += [Stage((Replica((f"other/{i}",), share),), (other,)) for i, other in enumerate(others)]
        plan = replace(self._plan, pipelines=(Pipeline(share, 1, tuple(stages)),), global_batch=share)
        if len(self._alones) >= MOST_ALONES:
            self._alones.clear()
        lane = _lane("p0s0", names, layers, share, look.ends, self.slices)
        self._alones[look] = found = ComputeCost(plan, self._cluster), lane
        return found

    def _steps_list(self, look: _Look) -> int:
        """The list of what a stage's optimizer step takes on each sort of its devices: seconds, and seconds of each parameter."""
        number = self._steps_of.get(look.alike)
        if number is None:
            names, n = self._groups.alike_names[look.alike], self._model.layers
            cost, _ = self._alone(look._replace(layers=n, ends=3, full=0, selective=0, pointwise=0))
            devices = [self._cluster.device(name) for name in names]
            of_one = {(one.gpu, host_of(one.node)): (one.name,) * len(names) for one in devices}
            for same in of_one.values():
                none_s, all_s = (
                    cost.seconds(_lane(f"{same[0]}, {layers}", same, (0, layers), look.share, 0, self.slices), OptimizerStep())
                    for layers in (0, n)
                )
                self._steps.extend([none_s, (all_s - none_s) / (n * layer_parameters_at(self._model, len(names)))])
            self._step_first.append(len(self._steps))
            number = self._steps_of[look.alike] = len(self._step_first) - 2
        return number

    def _parts_of(self, number: int, parts: tuple[LayerRange, ...]) -> int:
        """The list of the parts of a lane's last backward, which are given from its first layer on, the last ones first."""
        look = self._seen[number]
        found = self._parts.get((look, parts))
        if found is None:
            seconds = [self._each_part_s(look, parts, kind) for kind in self._last_kinds]
            found = self._parts[look, parts] = self._note_parts(*seconds)
        return found

    def _layers_of(self, number: int) -> int:
        """As `_parts_of`, where every layer is a part."""
        look = self._seen[number]
        return self._note_parts(*[self._each_layer_s(look, kind) for kind in self._last_kinds])

    def _note_parts(self, last: Sequence[float], inputs: Sequence[float] = ()) -> int:
        """The number of a new list of the parts of a last backward; `inputs`: of its other half, where it is divided."""
        self._part_s.extend(last)
        self._input_s.append(sum(inputs))
        self._part_first.append(len(self._part_s))
        return len(self._part_first) - 2

    def _each_layer_s(self, look: _Look, kind: type[Pass]) -> list[float]:
        """Seconds of a stage's last backward, or of a half of it, layer by layer, the last one first."""
        top, at = look.layers - 1, 0
        seconds: list[float] = []
        for mode, count in enumerate((look.full, look.selective, look.pointwise, look.layers)):
            stop = min(at + count, look.layers)
            if at < stop:
                inner = range(max(at, 1), min(stop, top))  # the first layer and the last one have other things beside them
                if at == 0:
                    seconds.append(self._one_layer_s(look, kind, 0, mode))
                if inner:
                    seconds += [self._one_layer_s(look, kind, inner[0], mode)] * len(inner)
                if stop > top > 0:
                    seconds.append(self._one_layer_s(look, kind, top, mode))
            at = stop
        return seconds[::-1]

    def _one_layer_s(self, look: _Look, kind: type[Pass], layer: int, mode: int) -> float:
        """Seconds of one layer of `_each_layer_s`, which is in a mode of recomputation; stages of many looks have it."""
        key = look.alike, look.share, look.ends, kind, mode, layer == 0, layer == look.layers - 1
        found = self._layer_s.get(key)
        if found is None:
            found = self._layer_s[key] = self._taken_s(look, kind, (layer, layer + 1))[0]
        return found

    def _each_part_s(self, look: _Look, parts: tuple[LayerRange, ...], kind: type[Pass]) -> list[float]:
        """Seconds of each part of a stage's last backward, or of a half of it."""
        known: dict[object, float] = {}  # most layers are alike
        seconds, layers = [], look.layers
        for part in parts:
            a, b = part
            key = b - a, _within(look, part), a == 0, b == layers
            found = known.get(key)
            if found is None:
                found = known[key] = self._taken_s(look, kind, part)[0]
            seconds.append(found)
        return seconds


def _within(look: _Look, part: LayerRange) -> tuple[int, int, int]:
    """How many of some layers of a stage, given from its first one on, are recomputed in full, selectively and pointwise."""
    a, b = part
    first, second = look.full, look.full + look.selective
    third = second + look.pointwise
    return (
        max(0, min(b, first) - a),
        max(0, min(b, second) - max(a, first)),
        max(0, min(b, third) - max(a, second)),
    )


def _as_said(stage: Stage, look: _Look) -> Stage:
    """The stage with the recomputation of a look, which has two modes at most."""
    counts = {"full": look.full, "selective": look.selective, "pointwise": look.pointwise}
    counts["none"] = look.layers - sum(counts.values())
    used = [mode for mode, count in counts.items() if count] or ["none"]
    return stage.recomputing(used[0], counts[used[0]], used[-1])


def _lane(name: str, devices: tuple[str, ...], layers: LayerRange, share: int, ends: int, slices: int) -> Lane:
    """A lane of the first stage, without neighbours and instructions."""
    return Lane(name, 0, 0, 0, devices, (layers,), (0, share), 1, bool(ends & 1), bool(ends & 2), sequence_slices=slices)
