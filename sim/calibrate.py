"""Calibration: from measured runs, and measurements of links, to the constants of a cluster that predict them best.

The constants are fitted together, by least squares with bounds and a robust loss: the residuals are the logarithms of measured
over predicted seconds, of each instruction's computation and of each iteration, where the prediction is the simulation's, and of
each message or collective of a bench. An iteration of a paced run is simulated there with the measured seconds of its
instructions: where the model cannot tell these, as of lanes whose collectives wait for a busy host, they bend what they are made
of, and not the links.
Plans held out are predicted by the constants alone. Every constant has a weak prior, its value in the cluster file; computation
has one for each kind of GPU and one beside it for each device, links one for each protocol and one beside it for each direction
of a card or of a wide-area link, so that what several share is told by all of them, and what is its own by its own runs.

A constant is told by the data where they leave less than half of the prior's uncertainty (of a device or link: of what is its
own). Those that are not told stay as they are, the others are fitted once more, and the fit says which are which.

Of a lane only the first device is recorded, and its devices wait for each other in every layer: a lane takes as long as the
slowest of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.cost.collectives import between_lanes, collective, ring_exchange
from sim.cost.compute import ComputeCost
from sim.cost.estimate import Estimate
from sim.cost.memory import lane_parts
from sim.cost.network import Network
from sim.cost.traffic import message, switch_owners, work
from sim.engine import simulate
from sim.prepared import SpanKey
from sim.spec.bench import Bench, LinkMeasurement
from sim.spec.cluster import Calibration, Cluster, LinkOverride, link_names
from sim.spec.compile import compile_plan
from sim.spec.gpu import SPEEDS, GpuKind, is_cpu
from sim.spec.plan import Plan
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Send,
    matching_send,
    work_key,
)
from sim.spec.reading import InputError
from sim.spec.stack import Stack
from sim.spec.trace import Span, Trace, period_s

NEEDED_PLANS = 4
"""Different plans that a fit needs: two to fit, and two to tell how well it predicts."""

ITERATION_ERROR, SPAN_ERROR, LANE_ERROR, MESSAGE_ERROR, LINK_ERROR, ELSEWHERE_ERROR = 0.01, 0.03, 0.06, 0.3, 0.05, 0.15
MEMORY_ERROR = 0.03
"""Standard deviations of what the model leaves open, as fractions: of an iteration, of an instruction on one device, on a lane
whose devices talk inside it, of a message of a run, of what a bench measured of links, of an iteration on another cluster;
and of the bytes at a GPU's peak."""

CLOCK_S = 1e-4
"""Seconds that a recorded span may be off."""

KIND_PRIOR, DEVICE_PRIOR, PROTOCOL_PRIOR, RECORD_PRIOR = 0.3, 0.15, 0.3, 0.3
"""Standard deviations of the priors of logarithms: the speed of a kind, of a device beside its kind's, the rate of a protocol,
the fractions of an efficiency record."""

RECORD_UNITS = {"launch_s": 2e-6, "matmul_half_s": 2e-6, "attention_keys": 32.0}
"""What of an efficiency record may be nothing: the prior's standard deviation is the value, and no less than this."""


@dataclass(frozen=True)
class Priors:
    """Standard deviations of the priors that a file tells least of; of some, those are taken that predict plans held out best."""

    link: float = 0.05
    """Of the logarithm of a link's rate beside its protocol's."""
    share: float = 1e-3
    """Of a time (a latency, the start of a message, what each pass takes besides), as a fraction of the median iteration, where
    the file's value is smaller; ten times that for what each iteration takes besides."""


PRIORS = (Priors(), Priors(link=0.2), Priors(share=1e-4))
"""Those that are tried: cards of one protocol are alike or not, hosts take time for a message or not."""

TOLD = 0.5
"""What may be left of the prior's standard deviation of a constant that the data tell."""

LOOSE = 3.0
"""Residuals beyond so many standard deviations pull less and less."""

STEP, STALE = 0.05, 2.0
"""Of derivatives: the difference that finds them, and how far from where they were found they still serve; in priors' standard
deviations."""

MOST_STEPS, MOST_DAMPING = 30, 1e3
"""Of a fit."""

MOST_PARTS = 4
"""In which all plans are held out, a part at a time."""

RESAMPLES = 2000
"""Of the bootstrap."""

COVERAGE = 0.9
"""How often a prediction interval is to hold what is measured."""

MessageKey: TypeAlias = tuple[str, Send]
"""The sender, and what it sends, of micro-batch 0."""

Vector: TypeAlias = NDArray[np.float64]


# --- Observations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observed:
    """What the runs of one plan measured."""

    plan: Plan
    names: tuple[str, ...]
    """Of the runs' files."""
    origin: str
    iterations_s: tuple[float, ...]
    """Of each run."""
    spans_s: Mapping[SpanKey, float]
    """Median seconds of the instructions that compute."""
    messages_s: Mapping[MessageKey, float]
    """Median seconds of messages that their receivers waited for, from the moment they were handed over until they were there."""
    peaks_bytes: Mapping[str, float] = field(default_factory=dict)
    """Of GPUs, the median of what the allocator had reserved at the peak; a CPU's process tells too little of it."""

    @property
    def iteration_s(self) -> float:
        """Median seconds of an iteration."""
        return median(self.iterations_s)


@dataclass(frozen=True)
class Elsewhere:
    """A run on another cluster that has kinds of the one that is calibrated, such as a published one."""

    name: str
    """Of the file that tells of it."""
    source: str
    """Who measured it: the runs of a source together count as the root of their number."""
    plan: Plan
    cluster: Cluster
    """Where it ran, with the software that it ran on."""
    iteration_s: float


def observed(runs: Sequence[tuple[str, Trace]], cluster: Cluster, several_models: bool = False) -> tuple[Observed, ...]:
    """What some runs measured, plan by plan, in the order of the runs; each has the name of its file.

    Raises InputError for a trace that is simulated, or of another cluster, of devices that this one lacks, of another origin
    or (but with `several_models`) another model than the first, or whose spans are not of its plan.
    """
    found: dict[str, list[tuple[str, Trace]]] = {}
    for name, trace in runs:
        _check(name, trace, cluster, *runs[0], several_models)
        found.setdefault(trace.plan.to_json(), []).append((name, trace))
    observations = []
    for traces in found.values():
        spans: dict[SpanKey, list[float]] = {}
        for _, trace in traces:
            for key, seconds in _spans_s(trace).items():
                spans.setdefault(key, []).append(seconds)
        first = traces[0][1]
        # The first device of a lane is recorded, and its optimizer step waits for no other: of several it tells too little.
        kept = {key: median(some) for key, some in spans.items() if key[1] is not OptimizerStep or len(first.lanes[key[0]]) == 1}
        times = tuple(period_s(trace) for _, trace in traces)
        sent: dict[MessageKey, list[float]] = {}
        for _, trace in traces:
            for message_key, seconds in _messages_s(trace).items():
                sent.setdefault(message_key, []).append(seconds)
        messages = {key: median(some) for key, some in sent.items()}
        peaks: dict[str, float] = {}
        if first.origin == "measured":
            for device, num_bytes in first.peak_bytes.items():
                if num_bytes > 0 and not is_cpu(cluster.device(device).node.gpu):
                    peaks[device] = median(trace.peak_bytes.get(device, num_bytes) for _, trace in traces)
        names = tuple(name for name, _ in traces)
        observations.append(Observed(first.plan, names, first.origin, times, kept, messages, peaks))

    return tuple(observations)


def _check(name: str, trace: Trace, cluster: Cluster, first_name: str, first: Trace, several_models: bool) -> None:
    """Nothing. Raises InputError as `observed` says."""
    if trace.origin == "simulated":
        raise InputError(f"{name}: constants are fitted on measured or paced runs, but this one is simulated")
    if trace.cluster != cluster.name:
        raise InputError(f"{name}: the run is of the cluster {trace.cluster!r}, but the constants to fit are of {cluster.name!r}")
    try:
        for device in trace.plan.devices:
            cluster.device(device)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if not several_models and trace.plan.transformer != first.plan.transformer:
        shapes = [f"{one.name} ({one.layers} layers of {one.hidden})" for one in (trace.plan.transformer, first.plan.transformer)]
        raise InputError(f"{name}: all runs are of one model, but this one is of {shapes[0]}, and {first_name} of {shapes[1]}")
    if trace.origin != first.origin:
        raise InputError(
            f"{name}: runs are all measured or all paced, but this one is {trace.origin}, and {first_name} {first.origin}"
        )
    if not trace.iteration_s > 0:
        raise InputError(f"{name}: an iteration takes more than 0 s, but this one has {trace.iteration_s!r} s")
    program = {lane.name: set(lane.instructions) for lane in compile_plan(trace.plan).lanes}
    for span in trace.spans:
        if span.instruction not in program.get(span.lane, ()):
            raise InputError(f"{name}: its spans are of another plan: there is no {span.instruction} on the lane {span.lane!r}")


def _spans_s(trace: Trace) -> dict[SpanKey, float]:
    """Median seconds of the instructions of a trace that compute."""
    found: dict[SpanKey, list[float]] = {}
    for span in trace.spans:
        if isinstance(span.instruction, (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep)):
            key = (span.lane, *work_key(span.instruction, trace.plan.sequence_slices))
            found.setdefault(key, []).append(span.end_s - span.start_s)
    return {key: median(seconds) for key, seconds in found.items()}


def _messages_s(trace: Trace) -> dict[MessageKey, float]:
    """Median seconds of the messages of a trace that tell what links take: whose receiver waited before they were handed over,
    and that were handed over after the one before them had come."""
    sent_s = {(span.lane, span.instruction): span.start_s for span in trace.spans if isinstance(span.instruction, Send)}
    arrivals: dict[tuple[str, str, type[Instruction]], list[tuple[float, float, Span, Send]]] = {}
    for span in trace.spans:
        if isinstance(span.instruction, Recv):
            sender, send = matching_send(span.lane, span.instruction)
            if (sender, send) in sent_s:
                start_s = sent_s[sender, send]
                arrivals.setdefault((sender, span.lane, type(send)), []).append((start_s, span.end_s, span, send))
    found: dict[MessageKey, list[float]] = {}
    for (sender, _, _), messages in arrivals.items():
        free_s = -math.inf
        for start_s, end_s, span, send in sorted(messages, key=lambda message: message[:2]):
            if span.start_s <= start_s and free_s <= start_s < end_s:
                found.setdefault((sender, replace(send, micro_batch=0)), []).append(end_s - start_s)
            free_s = max(free_s, end_s)
    return {key: median(seconds) for key, seconds in found.items()}


def run_spread(observations: Iterable[Observed]) -> float | None:
    """The relative standard deviation of the iteration from run to run of one plan; None where no plan ran twice."""
    squares, freedom = 0.0, 0
    for each in observations:
        logs = np.log(each.iterations_s)
        squares += float(((logs - logs.mean()) ** 2).sum())
        freedom += len(logs) - 1
    return math.sqrt(squares / freedom) if freedom else None


# --- Constants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """One constant that is fitted. `apply(cluster, z)` is the cluster where it is z of its prior's standard deviations away."""

    name: str
    apply: Callable[[Cluster, float], Cluster]
    lowest: float = -math.inf
    highest: float = math.inf
    """Of z."""
    beside: str | None = None
    """The constant that it is beside: the kind of a device, the protocol of a link."""
    own: float = 1.0
    """Standard deviation of the prior: of a time in seconds, else in the unit in which those it is beside have theirs."""
    devices: frozenset[str] | None = None
    """The devices that it is of; None: it may tell on any plan."""
    links: frozenset[str] | None = None
    """The links that it is of."""
    value: Callable[[Cluster], float] = lambda _: math.nan
    """Its value in a cluster, in SI units."""
    unit: str = ""


def constants_of(
    cluster: Cluster,
    observations: Sequence[Observed],
    links: Sequence[LinkMeasurement] = (),
    records: bool = False,
    elsewhere: Sequence[Elsewhere] = (),
    priors: Priors = PRIORS[0],
) -> list[Constant]:
    """The constants that are fitted for a cluster; with `records` also those of the kinds' efficiency records."""
    computing = {name for each in observations for name in each.plan.devices}
    used = computing | {name for one in links for name in one.members}
    scale_s = median(each.iteration_s for each in observations) if observations else 1.0
    found: list[Constant] = []
    ran_here = {device.node.gpu.name for device in cluster.devices if device.name in computing}
    ran = ran_here | {node.gpu.name for each in elsewhere for node in each.cluster.nodes}
    for kind in dict.fromkeys(node.gpu.name for node in cluster.nodes if node.gpu.name in ran):
        found += _of_kind(cluster, kind, records, kind in ran_here)
    names = sorted(link_names(cluster))
    found += _of_links(cluster, names, used, priors.link)
    fabric = cluster.fabric
    small_s = priors.share * scale_s
    nodes = {cluster.device(name).node.name for name in used}
    if len(nodes) > 1:
        found.append(_time("fabric.latency", fabric.latency_s, small_s, _set_fabric("latency_s"), lambda c: c.fabric.latency_s))
    for kind in dict.fromkeys(node.intra.kind for node in cluster.nodes if node.gpus > 1 and node.name in nodes):
        value = _intra_latency(kind)
        found.append(_time(f"latency inside {kind} nodes", value(cluster), small_s, _set_intra_latency(kind), value))
    found.append(_time("fabric.start", fabric.start_s, small_s, _set_fabric("start_s"), lambda c: c.fabric.start_s))
    found.append(_time("fabric.step", fabric.step_s, small_s, _set_fabric("step_s"), lambda c: c.fabric.step_s))
    stack = cluster.stack
    found.append(
        _time("stack.micro_batch", stack.micro_batch_s, small_s, _set_stack("micro_batch_s"), lambda c: c.stack.micro_batch_s)
    )
    found.append(_time("stack.step", stack.step_s, 10 * small_s, _set_stack("step_s"), lambda c: c.stack.step_s))
    found.append(
        replace(
            _time(
                "stack.overlap_slowdown",
                stack.overlap_slowdown,
                0.1,
                _set_stack("overlap_slowdown"),
                lambda c: c.stack.overlap_slowdown,
            ),
            unit="",
        )
    )
    if any(each.peaks_bytes for each in observations):
        found += _of_memory(cluster)
    return found


def _of_memory(cluster: Cluster) -> list[Constant]:
    """What the stack keeps of activations, and what its allocator loses. Of the context a run measures nothing."""

    def keeping(c: Cluster, z: float) -> Cluster:
        scale = c.stack.activation_scale * math.exp(RECORD_PRIOR * z)
        return replace(c, stack=replace(c.stack, name="own", activation_scale=_figure(scale)))

    unit = max(cluster.stack.fragmentation, 0.04)

    def losing(c: Cluster, z: float) -> Cluster:
        return replace(c, stack=replace(c.stack, name="own", fragmentation=_figure(max(0.0, c.stack.fragmentation + unit * z))))

    return [
        Constant("stack.activation_scale", keeping, -4.0, 4.0, value=lambda c: c.stack.activation_scale),
        Constant("stack.fragmentation", losing, -cluster.stack.fragmentation / unit, 10.0, value=lambda c: c.stack.fragmentation),
    ]


def peaks_bytes(plan: Plan, stack: Stack) -> dict[str, int]:
    """What a run is predicted to reserve at the peak of each device: without the context, which it does not measure."""
    return {
        name: parts.total - parts.context
        for p, s, r, parts in lane_parts(plan, stack)
        for name in plan.pipelines[p].stages[s].replicas[r].devices
    }


def _of_kind(cluster: Cluster, kind: str, records: bool, ran_here: bool) -> list[Constant]:
    """The speed of a kind, and of each of its devices beside it, if any ran here; its record's constants."""
    devices = [device for device in cluster.devices if device.node.gpu.name == kind]
    own = devices[0].node.gpu
    bounds = math.log(SPEEDS[0] / own.speed), math.log(SPEEDS[1] / own.speed)
    found = [
        Constant(
            f"speed of {kind}",
            lambda c, z: _with_kind(c, kind, lambda gpu: replace(gpu, speed=_figure(gpu.speed * math.exp(KIND_PRIOR * z)))),
            max(bounds[0], -2.0) / KIND_PRIOR,
            min(bounds[1], 2.0) / KIND_PRIOR,
            own=KIND_PRIOR,
            devices=frozenset(device.name for device in devices),
            value=lambda c: next(node.gpu.speed for node in c.nodes if node.gpu.name == kind),
        )
    ]
    for name in (device.name for device in devices if ran_here):

        def faster(c: Cluster, z: float, name: str = name) -> Cluster:
            speeds = dict(c.device_speeds)
            return replace(
                c, device_speeds=tuple((speeds | {name: _figure(speeds.get(name, 1.0) * math.exp(DEVICE_PRIOR * z))}).items())
            )

        def speed(c: Cluster, name: str = name) -> float:
            return c.device(name).gpu.speed

        found.append(
            Constant(f"speed of {name}", faster, -8.0, 8.0, f"speed of {kind}", DEVICE_PRIOR, frozenset([name]), value=speed)
        )
    for name in ("memory_fraction", "attention_fraction") if records else ():

        def scaled(c: Cluster, z: float, name: str = name) -> Cluster:
            return _with_record(c, kind, name, lambda value: _figure(value * math.exp(RECORD_PRIOR * z)))

        highest = math.log(1 / getattr(own.efficiency, name)) / RECORD_PRIOR
        found.append(
            Constant(f"{name} of {kind}", scaled, -8.0, highest, devices=found[0].devices, value=_record_value(kind, name))
        )
    for name, least in RECORD_UNITS.items() if records else ():
        start = getattr(own.efficiency, name)
        unit = max(start, least)

        def longer(c: Cluster, z: float, name: str = name, unit: float = unit) -> Cluster:
            return _with_record(c, kind, name, lambda value: _figure(max(0.0, value + unit * z)))

        found.append(
            Constant(
                f"{name.removesuffix('_s')} of {kind}",
                longer,
                -start / unit,
                100.0,
                devices=found[0].devices,
                value=_record_value(kind, name),
                unit="s" if name.endswith("_s") else "keys",
            )
        )
    return found


def _record_value(kind: str, field: str) -> Callable[[Cluster], float]:
    return lambda c: next(float(getattr(node.gpu.efficiency, field)) for node in c.nodes if node.gpu.name == kind)


def _with_kind(cluster: Cluster, kind: str, change: Callable[..., object]) -> Cluster:
    """The cluster with a kind changed."""
    known: dict[int, object] = {}
    nodes = []
    for node in cluster.nodes:
        if node.gpu.name == kind:
            if id(node.gpu) not in known:
                known[id(node.gpu)] = change(node.gpu)
            node = replace(node, gpu=known[id(node.gpu)])  # type: ignore[arg-type]
        nodes.append(node)
    return replace(cluster, nodes=tuple(nodes))


def _with_record(cluster: Cluster, kind: str, field: str, change: Callable[[float], float]) -> Cluster:
    """The cluster with one constant of a kind's efficiency record changed."""

    def changed(gpu: object) -> object:
        record = gpu.efficiency  # type: ignore[attr-defined]
        return replace(gpu, efficiency=replace(record, **{field: change(getattr(record, field))}))  # type: ignore[type-var]

    return _with_kind(cluster, kind, changed)


def _of_links(cluster: Cluster, names: Sequence[str], used: set[str], prior: float) -> list[Constant]:
    """The rates of protocols, of cards and wide-area links beside them, and the latencies of wide-area links."""
    found: list[Constant] = []
    nodes = [node for node in cluster.nodes if any(name.startswith(f"{node.name}/") for name in used)]
    cards: dict[str, str] = {}
    if len(nodes) > 1:
        cards = {node.name: node.nic.kind for node in nodes if node.nic is not None}
    inside = {"nvlink" if node.intra.is_nvlink else "pcie" for node in nodes if node.gpus > 1}
    network = Network(cluster)
    for protocol in sorted({*cards.values(), *inside}):
        rate = cluster.fabric.efficiency(protocol)

        def carried(c: Cluster, z: float, protocol: str = protocol) -> Cluster:
            efficiency = dict(c.fabric.protocol_efficiency) | {
                protocol: _figure(c.fabric.efficiency(protocol) * math.exp(PROTOCOL_PRIOR * z))
            }
            return replace(c, fabric=replace(c.fabric, protocol_efficiency=tuple(efficiency.items())))

        def value(c: Cluster, protocol: str = protocol) -> float:
            return c.fabric.efficiency(protocol)

        highest = -math.log(rate) / PROTOCOL_PRIOR
        found.append(Constant(f"fabric.protocol_efficiency.{protocol}", carried, -8.0, highest, own=PROTOCOL_PRIOR, value=value))
    for name in names:
        node = next((part.partition("/")[0] for part in name.split(">") if "/nic" in part), None)
        if node in cards:
            found.append(_link_rate(name, network, prior, cards[node]))
        elif name.startswith("site:") and len({n.site for n in nodes}) > 1:
            found.append(_link_rate(name, network, PROTOCOL_PRIOR))
            found.append(_link_latency(name, network))
    return found


def _link_rate(name: str, network: Network, prior: float, protocol: str | None = None) -> Constant:
    """The rate of one direction of a link, beside that of its protocol where it has one."""
    rate = network.named(name).capacity_bytes_per_s
    if any(link.name == name and link.bandwidth_bytes_per_s is not None for link in network.cluster.link_overrides):
        protocol = None  # it has a rate of its own already
    efficiency = network.cluster.fabric.efficiency(protocol) if protocol is not None else 1.0

    def changed(c: Cluster, z: float) -> Cluster:
        shared = c.fabric.efficiency(protocol) / efficiency if protocol is not None else 1.0
        return with_link(c, name, bandwidth_bytes_per_s=_figure(rate * shared * math.exp(prior * z)))

    return Constant(
        f"bandwidth of {name}",
        changed,
        -8.0,
        8.0,
        None if protocol is None else f"fabric.protocol_efficiency.{protocol}",
        prior,
        links=frozenset([name]),
        value=lambda c: Network(c).named(name).capacity_bytes_per_s,
        unit="B/s",
    )


def _link_latency(name: str, network: Network) -> Constant:
    """The latency of one direction of a link."""
    now_s = network.named(name).latency_s
    unit_s = max(now_s / 2, 1e-4)
    return Constant(
        f"latency of {name}",
        lambda c, z: with_link(c, name, latency_s=_figure(max(0.0, now_s + unit_s * z))),
        -now_s / unit_s,
        20.0,
        links=frozenset([name]),
        value=lambda c: Network(c).named(name).latency_s,
        unit="s",
    )


def with_link(cluster: Cluster, name: str, **changes: Any) -> Cluster:
    """The cluster with what `LinkOverride` says of a link changed."""
    known = {link.name: link for link in cluster.link_overrides}
    known[name] = replace(known.get(name, LinkOverride(name)), **changes)
    return replace(cluster, link_overrides=tuple(known.values()))


def _time(
    name: str, now: float, least_unit: float, change: Callable[[Cluster, float], Cluster], value: Callable[[Cluster], float]
) -> Constant:
    """A time of at least 0; its prior's standard deviation is its value, or `least_unit` where that is more."""
    unit = max(now, least_unit)
    return Constant(
        name, lambda c, z: change(c, _figure(max(0.0, value(c) + unit * z))), -now / unit, 1000.0, own=unit, value=value, unit="s"
    )


def _set_fabric(field: str) -> Callable[[Cluster, float], Cluster]:
    def changed(c: Cluster, value: float) -> Cluster:
        changes: dict[str, Any] = {field: value}
        return replace(c, fabric=replace(c.fabric, **changes))

    return changed


def _set_stack(field: str) -> Callable[[Cluster, float], Cluster]:
    def changed(c: Cluster, value: float) -> Cluster:
        changes: dict[str, Any] = {field: value}
        return replace(c, stack=replace(c.stack, name="own", **changes))

    return changed


def _intra_latency(kind: str) -> Callable[[Cluster], float]:
    return lambda c: next(node.intra.latency_s for node in c.nodes if node.intra.kind == kind)


def _set_intra_latency(kind: str) -> Callable[[Cluster, float], Cluster]:
    def changed(c: Cluster, value: float) -> Cluster:
        nodes = (replace(n, intra=replace(n.intra, latency_s=value)) if n.intra.kind == kind else n for n in c.nodes)
        return replace(c, nodes=tuple(nodes))

    return changed


def _figure(value: float) -> float:
    """The value to six digits, as a file has it; less than 1e-12 is nothing."""
    return float(f"{value:.6g}") if abs(value) >= 1e-12 else 0.0


def applied(cluster: Cluster, constants: Sequence[Constant], z: Iterable[float]) -> Cluster:
    """The cluster with its constants so many of their priors' standard deviations away from where they are."""
    for constant, away in zip(constants, z, strict=True):
        if away != 0:
            cluster = constant.apply(cluster, float(away))
    return cluster


# --- The fit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a fit says of one constant: where it was and is, how sure, and whether the data tell it."""

    name: str
    before: float
    after: float
    unit: str
    left: float
    """What is left of the prior's standard deviation."""
    told: bool
    at_bound: bool


@dataclass(frozen=True)
class Fit:
    """A calibrated cluster, and what the fit says of its constants."""

    cluster: Cluster
    constants: tuple[Told, ...]
    z: Vector
    """Of the constants, in their priors' standard deviations."""


@dataclass
class _Slopes:
    """Derivatives of the logarithms of predicted seconds: where, of each observation, of the links and the runs elsewhere."""

    at: Vector
    of_plans: dict[int, Vector]
    of_others: Vector


@dataclass(frozen=True)
class _World:
    """A cluster with some constants, and what is predicted there."""

    cluster: Cluster
    network: Network
    logs: dict[int, Vector]
    other_logs: Vector


class Fitting:
    """Fits of one cluster's constants to some observations, measured links and runs elsewhere, with what they share: derivatives
    above all."""

    def __init__(
        self,
        cluster: Cluster,
        observations: Sequence[Observed],
        links: Sequence[LinkMeasurement] = (),
        records: bool = False,
        elsewhere: Sequence[Elsewhere] = (),
        priors: Priors = PRIORS[0],
        near: Fitting | None = None,
    ) -> None:
        """`near`: one of the same constants with other priors, where the fit to all observations begins."""
        self._near = near
        self.cluster, self.observations, self.links = cluster, list(observations), list(links)
        self.elsewhere, self.priors = list(elsewhere), priors
        self.constants = constants_of(cluster, self.observations, self.links, records, self.elsewhere, priors)
        self._estimates = [Estimate(each.plan, each.cluster) for each in self.elsewhere]
        self._elsewhere_logs: dict[frozenset[GpuKind], Vector] = {}
        counts = Counter(each.source for each in self.elsewhere)
        alone = [1 / (ELSEWHERE_ERROR * counts[each.source] ** 0.25) for each in self.elsewhere]
        self._other_weights = np.array([1 / LINK_ERROR] * len(self.links) + alone)
        self._others_measured = np.log([*(one.seconds for one in self.links), *(each.iteration_s for each in self.elsewhere)])
        self._fit: Fit | None = None
        self._derivatives: _Slopes | None = None
        self._known: dict[bytes, _World] = {}
        self._links_used: dict[int, frozenset[str]] = {}
        self._programs: dict[int, Program] = {}
        self._instructions: dict[int, dict[SpanKey, Compute | OptimizerStep]] = {}

    def fit(self) -> Fit:
        """The fit to all observations; found once."""
        if self._fit is None:
            self._fit = self._fitted(range(len(self.observations)), None if self._near is None else self._from(self._near))
        return self._fit

    def fit_without(self, out: Collection[int]) -> Fit:
        """The fit to the observations but these. It begins where the fit to all of them ended, and with its derivatives."""
        start = self.fit()
        kept, self._derivatives = self._derivatives, deepcopy(self._derivatives)
        found = self._fitted([number for number in range(len(self.observations)) if number not in out], start.z)
        self._derivatives = kept
        return found

    def _from(self, other: Fitting) -> Vector:
        """z of what another fitting of these constants found, whose derivatives are taken over."""
        priors = np.array([own.own / its.own for own, its in zip(self.constants, other.constants, strict=True)])
        z: Vector = other.fit().z / priors
        found = other._derivatives
        if found is not None:
            slopes = {number: slopes * priors for number, slopes in found.of_plans.items()}
            self._derivatives = _Slopes(z.copy(), slopes, found.of_others * priors)
        return z

    def _fitted(self, chosen: Sequence[int], start: Vector | None = None) -> Fit:
        """The fit to the observations of these numbers: from `start`, near enough to keep its derivatives, or from the priors."""
        free, anew = np.ones(len(self.constants), dtype=bool), start is None
        z = self._solve(chosen, free, self._start(chosen) if start is None else start, anew)
        if anew and self._derivatives is not None and np.abs(z - self._derivatives.at).max() > 1:
            self._derivatives = None  # what is told is to be judged by derivatives found here
        left = self._left(chosen, free, z, anew)
        while (not_told := np.flatnonzero(free & (left > TOLD))).size:
            # A constant that others of its kind are beside is what they share: it goes only after them.
            free_names = {self.constants[i].beside for i in np.flatnonzero(free)}
            waiting = [i for i in not_told if self.constants[i].name not in free_names]
            if not waiting:
                break
            worst = max(waiting, key=lambda i: left[i])
            free[worst] = False
            left = np.where(free, self._left(chosen, free, z, anew), left)
        if not free.all():
            z = self._solve(chosen, free, np.where(free, z, 0.0), anew)
        after = applied(self.cluster, self.constants, z)
        told = []
        for i, constant in enumerate(self.constants):
            # At an end of what is accepted; a time of nothing is none, nor are no keys.
            at_bound = bool(free[i]) and bool(
                z[i] > constant.highest - 1e-3
                or (constant.unit not in ("s", "keys") and constant.name[:6] != "stack." and z[i] < constant.lowest + 1e-3)
            )
            before, now = constant.value(self.cluster), constant.value(after)
            told.append(Told(constant.name, before, now, constant.unit, float(left[i]), bool(free[i]), at_bound))
        return Fit(after, tuple(told), z)

    def _start(self, chosen: Sequence[int]) -> Vector:
        """Where a fit begins: at the priors, but with the speeds that the devices' own instructions tell without more ado."""
        z = np.zeros(len(self.constants))
        logs, _ = self._logs(chosen, z)
        slower: dict[str, list[float]] = {}
        for number, predicted in zip(chosen, logs, strict=True):
            lanes, measured = self._program(number).by_name, self._measured(number)
            for n, (lane, *_) in enumerate(self.observations[number].spans_s, 1):
                if len(lanes[lane].devices) == 1:
                    slower.setdefault(lanes[lane].devices[0], []).append(float(measured[n] - predicted[n]))
        faster = {f"speed of {name}": -median(some) for name, some in slower.items()}
        index = {constant.name: i for i, constant in enumerate(self.constants)}
        for kind in {constant.beside for constant in self.constants if constant.devices is not None and constant.beside}:
            own = {one.name: faster[one.name] for one in self.constants if one.beside == kind and one.name in faster}
            mean = sum(own.values()) / max(1, len(own))
            z[index[kind]] = mean / KIND_PRIOR
            for name, value in own.items():
                z[index[name]] = (value - mean) / DEVICE_PRIOR
        return z

    def elsewhere_s(self, cluster: Cluster) -> list[float]:
        """Predicted seconds of the iterations elsewhere, with the kinds of a cluster."""
        return [float(seconds) for seconds in np.exp(self._other_logs(cluster)[len(self.links) :])]

    # --- Residuals ---

    def _logs(self, chosen: Iterable[int], z: Vector) -> tuple[list[Vector], Vector]:
        """Logarithms of predicted seconds: of each chosen observation the iteration and its instructions, and of all else."""
        key = z.tobytes()
        if key not in self._known:
            if len(self._known) > 8:
                self._known.clear()
            cluster = applied(self.cluster, self.constants, z)
            self._known[key] = _World(cluster, Network(cluster), {}, self._other_logs(cluster))
        world = self._known[key]
        for number in chosen:
            if number not in world.logs:
                world.logs[number] = self._plan_logs(number, world.cluster, world.network)
        return [world.logs[number] for number in chosen], world.other_logs

    def _plan_logs(self, number: int, cluster: Cluster, network: Network) -> Vector:
        """Logarithms of an observation's predicted seconds: of the iteration, its instructions, messages and peaks.

        The iteration of a paced run is predicted with its instructions' measured seconds: what the model says wrongly of these
        is told by them, and is not to be told once more of all else that the iteration is made of. Of a real run the seconds of
        an instruction vary, and the iteration has their mean, not their median: there the constants answer for them.
        """
        each, program = self.observations[number], self._program(number)
        known_s = each.spans_s if each.origin == "paced" else {}
        trace = simulate(each.plan, cluster, network=network, program=program, known_s=known_s)
        self._links_used.setdefault(number, frozenset(link.name for link in trace.links))
        lanes, sent, spans = program.by_name, _messages_s(trace), _spans_s(trace)
        cost, owners = ComputeCost(each.plan, cluster), switch_owners(each.plan, program.lanes, cluster)
        for key in each.spans_s:
            lane = lanes[key[0]]
            taken = work(network, cost, lane, self._instructions[number][key])
            if lane.name in owners or not (taken.beside or taken.after):
                spans[key] = taken.alone_s(network)
        # Where it is not predicted that the receiver waits, the message has its links to itself.
        messages = [
            sent.get(sender) or network.alone_s(message(network, each.plan, lanes[sender[0]], lanes[sender[1].peer], sender[1]))
            for sender in each.messages_s
        ]
        seconds = [trace.iteration_s, *map(spans.__getitem__, each.spans_s), *messages]
        peaks = peaks_bytes(each.plan, cluster.stack) if each.peaks_bytes else {}
        return np.log([*(max(value, 1e-12) for value in seconds), *(peaks[device] for device in each.peaks_bytes)])

    def _program(self, number: int) -> Program:
        """An observation's plan, compiled."""
        if number not in self._programs:
            program = self._programs[number] = compile_plan(self.observations[number].plan)
            self._instructions[number] = {
                (lane.name, *work_key(one, lane.sequence_slices)): one
                for lane in program.lanes
                for one in reversed(lane.instructions)
                if isinstance(one, (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep))
            }
        return self._programs[number]

    def _other_logs(self, cluster: Cluster) -> Vector:
        """Logarithms of the predicted seconds of the measured links, and of the runs elsewhere."""
        if not self.links and not self.elsewhere:
            return np.zeros(0)
        network = Network(cluster)
        of_links = np.log([max(link_s(network, one), 1e-12) for one in self.links])
        kinds = {node.gpu.name: node.gpu for node in cluster.nodes}
        key = frozenset(kinds.values())
        if key not in self._elsewhere_logs:
            self._elsewhere_logs[key] = np.log([estimate.iteration_s(kinds) for estimate in self._estimates])
        return np.concatenate([of_links, self._elsewhere_logs[key]])

    def _weights(self, number: int) -> Vector:
        """One over the standard deviations of an observation's residuals."""
        each = self.observations[number]
        repeated = run_spread([each]) or 0.0
        weights = [1 / max(ITERATION_ERROR, repeated / math.sqrt(len(each.iterations_s)))]
        lanes = self._program(number).by_name
        for (lane, *_), seconds in each.spans_s.items():
            alone = len(lanes[lane].devices) == 1
            weights.append(1 / ((SPAN_ERROR if alone else LANE_ERROR) + CLOCK_S / max(seconds, CLOCK_S / 10)))
        weights += [1 / (MESSAGE_ERROR + CLOCK_S / max(seconds, CLOCK_S / 10)) for seconds in each.messages_s.values()]
        weights += [1 / MEMORY_ERROR] * len(each.peaks_bytes)
        return np.array(weights)

    def _residuals(self, chosen: Sequence[int], z: Vector) -> Vector:
        """Residuals of the chosen observations and of all else, in standard deviations; positive where more is predicted."""
        logs, others = self._logs(chosen, z)
        parts = [(logs[n] - self._measured(number)) * self._weights(number) for n, number in enumerate(chosen)]
        parts.append((others - self._others_measured) * self._other_weights)
        return np.concatenate(parts)

    def _measured(self, number: int) -> Vector:
        """Logarithms of what an observation measured, as `_plan_logs` predicts it."""
        each = self.observations[number]
        seconds = [each.iteration_s, *each.spans_s.values(), *each.messages_s.values()]
        return np.log([*(max(value, 1e-12) for value in seconds), *each.peaks_bytes.values()])

    # --- Derivatives ---

    def _slopes(self, chosen: Sequence[int], z: Vector, anew: bool) -> Vector:
        """Derivatives of the residuals, of which those found near by serve too; wherever they were found, if not `anew`."""
        found = self._derivatives
        if found is None or (anew and np.abs(z - found.at).max() > STALE) or not found.of_plans.keys() >= set(chosen):
            found = self._derivatives = self._differentiated(chosen, z)
        parts = [found.of_plans[number] * self._weights(number)[:, None] for number in chosen]
        return np.concatenate([*parts, found.of_others * self._other_weights[:, None]])

    def _learn(self, chosen: Sequence[int], z: Vector, tried: Vector) -> None:
        """Nothing; lets the derivatives say of the way from z to a point what was found there (Broyden, 1965)."""
        move, found = tried - z, self._derivatives
        if found is None or not (length := float(move @ move)):
            return
        (before, others_before), (there, others_there) = self._logs(chosen, z), self._logs(chosen, tried)
        for n, number in enumerate(chosen):
            slopes = found.of_plans[number]
            slopes += np.outer(there[n] - before[n] - slopes @ move, move) / length
        found.of_others += np.outer(others_there - others_before - found.of_others @ move, move) / length

    def _differentiated(self, chosen: Sequence[int], z: Vector) -> _Slopes:
        """Derivatives of `_logs`, by differences; a constant that others are beside moves all of those."""
        base, base_others = self._logs(chosen, z)
        count = len(self.constants)
        of_plans = {number: np.zeros((len(values), count)) for number, values in zip(chosen, base, strict=True)}
        of_others = np.zeros((len(base_others), count))
        summed = {constant.beside for constant in self.constants if constant.devices is not None}
        for i, constant in enumerate(self.constants):
            step = STEP if z[i] + STEP <= constant.highest else -STEP
            moved = z.copy()
            moved[i] += step
            cluster = applied(self.cluster, self.constants, moved)
            of_others[:, i] = (self._other_logs(cluster) - base_others) / step
            if constant.name in summed:
                continue
            network = Network(cluster)
            for number, values in zip(chosen, base, strict=True):
                if constant.devices is not None and constant.devices.isdisjoint(self.observations[number].plan.devices):
                    continue
                if constant.links is not None and constant.links.isdisjoint(self._links_used[number]):
                    continue
                of_plans[number][:, i] = (self._plan_logs(number, cluster, network) - values) / step
        index = {constant.name: i for i, constant in enumerate(self.constants)}
        for i, constant in enumerate(self.constants):
            if constant.beside in summed and constant.beside is not None:
                # The logarithms of the speeds add up.
                shared = index[constant.beside]
                for slopes in of_plans.values():
                    slopes[:, shared] += slopes[:, i] * (self.constants[shared].own / constant.own)
        return _Slopes(z.copy(), of_plans, of_others)

    # --- Solving ---

    def _solve(self, chosen: Sequence[int], free: NDArray[np.bool_], z: Vector, anew: bool) -> Vector:
        """z of the free constants with the least robust squares of the residuals and squares of z; the others stay.

        Derivatives that no longer lead down are found `anew`, or steps get shorter.

        Levenberg-Marquardt steps within the bounds, the residuals weighted so that they pull as those of the robust loss
        sqrt(1 + (residual / LOOSE)^2) do.
        """
        from scipy.optimize import lsq_linear  # half a second, which only fits shall wait for

        lowest = np.array([constant.lowest for constant in self.constants])[free]
        highest = np.array([constant.highest for constant in self.constants])[free]
        z = z.copy()
        z[free] = np.clip(z[free], lowest, highest)
        residuals = self._residuals(chosen, z)
        loss, damping = _loss(residuals, z), 0.1
        for _ in range(MOST_STEPS):
            weights = (1 + (residuals / LOOSE) ** 2) ** -0.25
            slopes = self._slopes(chosen, z, anew)[:, free]
            eye = np.eye(int(free.sum()))
            matrix = np.concatenate([slopes * weights[:, None], eye, math.sqrt(damping) * eye])
            target = -np.concatenate([residuals * weights, z[free], np.zeros(len(eye))])
            room = np.minimum(lowest - z[free], 0.0), np.maximum(highest - z[free], 1e-9)
            tried = z.copy()
            tried[free] += lsq_linear(matrix, target, bounds=room, tol=1e-8).x
            there = self._residuals(chosen, tried)
            gained = loss - _loss(there, tried)
            if gained > 0:
                self._learn(chosen, z, tried)
                z, residuals, loss = tried, there, loss - gained
            if abs(gained) < 1e-3 * (1 + loss) and damping <= 1:
                break
            if gained > 0:
                damping = damping / 10 if damping > 1e-3 else 0.0
            elif anew and self._derivatives is not None and not np.array_equal(self._derivatives.at, z):
                self._derivatives = None
            elif damping > MOST_DAMPING:
                break
            else:
                damping = max(1.0, 10 * damping)
        return z

    def _left(self, chosen: Sequence[int], free: NDArray[np.bool_], z: Vector, anew: bool) -> Vector:
        """What the data leave of each prior's standard deviation.

        Of a constant beside another it is that of the two together, over what the prior says of its own.
        """
        slopes = self._slopes(chosen, z, anew)[:, free]
        covariance = np.linalg.inv(slopes.T @ slopes + np.eye(slopes.shape[1]))
        places = {int(i): n for n, i in enumerate(np.flatnonzero(free))}
        index = {constant.name: i for i, constant in enumerate(self.constants)}
        found = np.ones(len(self.constants))
        for i, n in places.items():
            constant = self.constants[i]
            combined = np.zeros(len(places))
            combined[n] = 1.0
            if constant.beside is not None and (shared := places.get(index[constant.beside])) is not None:
                combined[shared] = self.constants[index[constant.beside]].own / constant.own
            found[i] = math.sqrt(combined @ covariance @ combined)
        return found


def _loss(residuals: Vector, z: Vector) -> float:
    """What a fit makes least."""
    return float((2 * LOOSE**2 * (np.sqrt(1 + (residuals / LOOSE) ** 2) - 1)).sum() + z @ z)


def link_s(network: Network, measured: LinkMeasurement) -> float:
    """Seconds that a measured message or collective is predicted to take. Raises InputError for members not in the cluster."""
    for name in measured.members:
        network.cluster.device(name)
    if measured.operation == "send":
        transfer = between_lanes(network, measured.members[:1], measured.members[1:], measured.num_bytes, False)
    elif measured.operation == "ring":
        transfer = ring_exchange(network, measured.members, measured.num_bytes, 1)
    else:
        transfer = collective(network, measured.operation, measured.members, measured.num_bytes)
    return network.alone_s(transfer)


# --- Held out --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """One plan that was held out of a fit: what it took, and what was predicted before and after."""

    observation: Observed
    measured_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True)
class Errors:
    """|predicted / measured - 1| over plans: median with its bootstrap interval, 90th percentile, and the largest."""

    median: float
    median_low: float
    median_high: float
    p90: float
    largest: float


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found."""

    cluster: Cluster
    """With the constants fitted on all runs, and what they were fitted on."""
    before: Cluster
    constants: tuple[Told, ...]
    predictions: tuple[Prediction, ...]
    """Of the plans that were held out; none where only benchmarks were given."""
    how: str
    """How plans were held out, in words."""
    errors_before: Errors | None
    errors_after: Errors | None
    spread: float | None
    """The relative standard deviation from run to run of one plan; None where none ran twice."""
    tau: float | None
    """Kendall's, over pairs of held-out plans of one job whose times differ by more than twice the spread; None without any."""
    pairs: int
    best_rank: int | None
    """The place, from 1, of the measured best of the held-out plans in the predicted order."""
    elsewhere: tuple[Errors, Errors] | None = None
    """Of the runs elsewhere before and after, on which it was fitted too; None without any."""


def calibrate(
    cluster: Cluster,
    runs: Sequence[tuple[str, Trace]],
    benches: Sequence[tuple[str, Bench]] = (),
    holdout: float | None = None,
    seed: int = 0,
    several_models: bool = False,
    elsewhere: Sequence[Elsewhere] = (),
) -> Calibrated:
    """The cluster with the constants that runs and benchmarks tell, and runs elsewhere; each has the name of its file.

    The constants are fitted on all runs. How well they predict is told by plans held out of a fit: a fraction `holdout` of them,
    drawn with `seed`, out of one fit to the others; else every plan once, a part at a time. A bench gives its kind's figures and
    record, its stack, and its links' measurements. Raises InputError for runs that are not of the cluster, or not of one model
    where not `several_models` are said, too few of them, and a bench of a kind that the cluster does not have.
    """
    start, links = with_benches(cluster, benches), [one for _, bench in benches for one in bench.links]
    names = tuple(dict.fromkeys([*(name for name, _ in (*runs, *benches)), *(each.name for each in elsewhere)]))
    rng = np.random.default_rng(seed)
    if not runs:
        fitting = Fitting(start, [], links, elsewhere=elsewhere)
        fit = fitting.fit()
        errors = _errors_elsewhere(fitting, cluster, fit.cluster, rng)
        return Calibrated(
            fit.cluster, cluster, fit.constants, (), "no runs, no plans to hold out", None, None, None, None, 0, None, errors
        )
    observations = observed(runs, start, several_models)
    if len(observations) < NEEDED_PLANS:
        raise InputError(
            f"a fit needs runs of at least {NEEDED_PLANS} different plans, but there are {len(runs)} of {len(observations)}: "
            f"run {NEEDED_PLANS - len(observations)} more"
        )
    count = len(observations)
    order = [int(i) for i in rng.permutation(count)]
    fitting = chosen_fitting(start, observations, links, elsewhere, seed)
    fit = fitting.fit()
    if holdout is not None:
        out = order[: min(max(2, round(count * holdout)), count - 2)]
        kept = [observations[i] for i in sorted(set(range(count)) - set(out))]
        apart = chosen_fitting(start, kept, links, elsewhere, seed)
        fitted = apart.fit().cluster
        after = dict(zip(out, _simulated(fitted, [observations[i] for i in out]), strict=True))
        how = f"{len(out)} of {count} plans held out of one fit to the others"
    else:
        after, parts = _cross_validated(fitting, order)
        how = f"each of {count} plans held out once, in {parts} parts"
    before = _simulated(cluster, observations)
    found = tuple(Prediction(observations[i], observations[i].iteration_s, before[i], after[i]) for i in sorted(after))
    errors_before = _errors([one.before_s / one.measured_s - 1 for one in found], rng)
    errors_after = _errors([one.after_s / one.measured_s - 1 for one in found], rng)
    low, high = _interval([one.measured_s / one.after_s for one in found])
    calibration = Calibration(
        fitted_on=names,
        origin=observations[0].origin,
        plans=count,
        error_before=_figure(errors_before.median),
        error_after=_figure(errors_after.median),
        coverage=COVERAGE,
        low=_figure(low),
        high=_figure(high),
        not_told=tuple(told.name for told in fit.constants if not told.told),
    )
    spread = run_spread(observations)
    tau, pairs = _kendall(found, spread or 0.0)
    best = min(found, key=lambda one: one.measured_s)
    rank = sorted(found, key=lambda one: one.after_s).index(best) + 1
    calibrated = replace(fit.cluster, calibration=calibration)
    errors = _errors_elsewhere(fitting, cluster, fit.cluster, rng)
    return Calibrated(
        calibrated, cluster, fit.constants, found, how, errors_before, errors_after, spread, tau, pairs, rank, errors
    )


def with_benches(cluster: Cluster, benches: Sequence[tuple[str, Bench]]) -> Cluster:
    """The cluster with the figures and records of its kinds, and the stack, that benches measured.

    Raises InputError for a bench of a kind that the cluster does not have, and for links of devices that it does not have.
    """
    for name, bench in benches:
        if bench.kind and bench.kind not in (kinds := list(dict.fromkeys(node.gpu.name for node in cluster.nodes))):
            raise InputError(f"{name}: the bench is of a {bench.kind}, but the cluster {cluster.name!r} has {', '.join(kinds)}")
        if bench.gpu_kind is not None:
            measured = bench.gpu_kind
            cluster = replace(
                cluster,
                nodes=tuple(replace(node, gpu=measured) if node.gpu.name == bench.kind else node for node in cluster.nodes),
            )
        if bench.stack is not None:
            cluster = replace(cluster, stack=replace(bench.stack, name="own"))
        try:
            for device in (member for one in bench.links for member in one.members):
                cluster.device(device)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    return cluster


def chosen_fitting(
    cluster: Cluster,
    observations: Sequence[Observed],
    links: Sequence[LinkMeasurement] = (),
    elsewhere: Sequence[Elsewhere] = (),
    seed: int = 0,
) -> Fitting:
    """The fitting of the constants that predicts plans held out best, in parts drawn with `seed`.

    Several priors are tried; of measured plans also the constants of efficiency records.
    """
    order = [int(i) for i in np.random.default_rng(seed).permutation(len(observations))]

    def tried(records: bool, priors: Priors, near: Fitting | None = None) -> tuple[float, Fitting]:
        fitting = Fitting(cluster, observations, links, records, elsewhere, priors, near)
        after, _ = _cross_validated(fitting, order)
        error = sum(abs(math.log(seconds / observations[i].iteration_s)) for i, seconds in after.items())
        return error, fitting

    first = tried(False, PRIORS[0])
    best = min((first, *(tried(False, priors, first[1]) for priors in PRIORS[1:])), key=lambda one: one[0])
    if observations[0].origin == "measured":
        best = min(best, tried(True, best[1].priors), key=lambda one: one[0])
    return best[1]


def _cross_validated(fitting: Fitting, order: Sequence[int]) -> tuple[dict[int, float], int]:
    """Predicted seconds of each observation by a fit without it, and in how many parts they were left out."""
    parts = min(MOST_PARTS, len(order))
    found: dict[int, float] = {}
    for part in range(parts):
        out = order[part::parts]
        found.update(zip(out, _simulated(fitting.fit_without(out).cluster, [fitting.observations[i] for i in out]), strict=True))
    return found, parts


def _simulated(cluster: Cluster, observations: Iterable[Observed]) -> list[float]:
    """Simulated seconds of iterations."""
    network = Network(cluster)
    return [simulate(each.plan, cluster, network=network).iteration_s for each in observations]


def _errors_elsewhere(
    fitting: Fitting, before: Cluster, after: Cluster, rng: np.random.Generator
) -> tuple[Errors, Errors] | None:
    """The errors of the runs elsewhere with the kinds of two clusters; None without any."""
    if not fitting.elsewhere:
        return None
    errors = []
    for cluster in (before, after):
        predicted = zip(fitting.elsewhere_s(cluster), fitting.elsewhere, strict=True)
        errors.append(_errors([seconds / each.iteration_s - 1 for seconds, each in predicted], rng))
    return errors[0], errors[1]


def _errors(errors: Sequence[float], rng: np.random.Generator) -> Errors:
    """What some relative errors are like."""
    sizes = np.abs(np.array(errors))
    medians = np.median(rng.choice(sizes, (RESAMPLES, len(sizes))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Errors(float(np.median(sizes)), float(low), float(high), float(np.quantile(sizes, 0.9)), float(sizes.max()))


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which of measured / predicted - 1 the next plan's is expected, from those of plans held out: a normal deviate of
    unknown mean and variance, in logarithms (Student's prediction interval)."""
    from scipy.stats import t as student  # another half

    logs = np.log(ratios)
    wide = float(student.ppf((1 + COVERAGE) / 2, len(logs) - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / len(logs)))
    middle = float(logs.mean())
    return math.expm1(middle - wide), math.expm1(middle + wide)


def _kendall(found: Sequence[Prediction], spread: float) -> tuple[float | None, int]:
    """Kendall's tau of measured and predicted times over pairs of one job that differ by more than twice the spread; how many."""
    signs = []
    for i, one in enumerate(found):
        for other in found[:i]:
            apart = math.log(one.measured_s / other.measured_s)
            if one.observation.plan.job() == other.observation.plan.job() and abs(apart) > 2 * spread:
                signs.append(math.copysign(1, apart) * np.sign(one.after_s - other.after_s))
    return (float(np.mean(signs)), len(signs)) if signs else (None, 0)
