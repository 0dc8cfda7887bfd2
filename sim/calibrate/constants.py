"""The constants of a cluster that are fitted, each with its prior: what it is of, where it may go, how it is read and set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from sim.calibrate.observations import Elsewhere, Observed
from sim.cost.network import Network
from sim.spec.bench import LinkMeasurement
from sim.spec.cluster import Cluster, LinkOverride, link_names
from sim.spec.gpu import SPEEDS

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
        return replace(c, stack=replace(c.stack, name="own", activation_scale=rounded(scale)))

    unit = max(cluster.stack.fragmentation, 0.04)

    def losing(c: Cluster, z: float) -> Cluster:
        return replace(c, stack=replace(c.stack, name="own", fragmentation=rounded(max(0.0, c.stack.fragmentation + unit * z))))

    return [
        Constant("stack.activation_scale", keeping, -4.0, 4.0, value=lambda c: c.stack.activation_scale),
        Constant("stack.fragmentation", losing, -cluster.stack.fragmentation / unit, 10.0, value=lambda c: c.stack.fragmentation),
    ]


def _of_kind(cluster: Cluster, kind: str, records: bool, ran_here: bool) -> list[Constant]:
    """The speed of a kind, and of each of its devices beside it, if any ran here; its record's constants."""
    devices = [device for device in cluster.devices if device.node.gpu.name == kind]
    own = devices[0].node.gpu
    bounds = math.log(SPEEDS[0] / own.speed), math.log(SPEEDS[1] / own.speed)
    found = [
        Constant(
            f"speed of {kind}",
            lambda c, z: _with_kind(c, kind, lambda gpu: replace(gpu, speed=rounded(gpu.speed * math.exp(KIND_PRIOR * z)))),
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
                c, device_speeds=tuple((speeds | {name: rounded(speeds.get(name, 1.0) * math.exp(DEVICE_PRIOR * z))}).items())
            )

        def speed(c: Cluster, name: str = name) -> float:
            return c.device(name).gpu.speed

        found.append(
            Constant(f"speed of {name}", faster, -8.0, 8.0, f"speed of {kind}", DEVICE_PRIOR, frozenset([name]), value=speed)
        )
    for name in ("memory_fraction", "attention_fraction") if records else ():

        def scaled(c: Cluster, z: float, name: str = name) -> Cluster:
            return _with_record(c, kind, name, lambda value: rounded(value * math.exp(RECORD_PRIOR * z)))

        highest = math.log(1 / getattr(own.efficiency, name)) / RECORD_PRIOR
        found.append(
            Constant(f"{name} of {kind}", scaled, -8.0, highest, devices=found[0].devices, value=_record_value(kind, name))
        )
    for name, least in RECORD_UNITS.items() if records else ():
        start = getattr(own.efficiency, name)
        unit = max(start, least)

        def longer(c: Cluster, z: float, name: str = name, unit: float = unit) -> Cluster:
            return _with_record(c, kind, name, lambda value: rounded(max(0.0, value + unit * z)))

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
                protocol: rounded(c.fabric.efficiency(protocol) * math.exp(PROTOCOL_PRIOR * z))
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
        return with_link(c, name, bandwidth_bytes_per_s=rounded(rate * shared * math.exp(prior * z)))

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
        lambda c, z: with_link(c, name, latency_s=rounded(max(0.0, now_s + unit_s * z))),
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
        name, lambda c, z: change(c, rounded(max(0.0, value(c) + unit * z))), -now / unit, 1000.0, own=unit, value=value, unit="s"
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


def rounded(value: float) -> float:
    """The value to six digits, as a file has it; less than 1e-12 is nothing."""
    return float(f"{value:.6g}") if abs(value) >= 1e-12 else 0.0


def applied(cluster: Cluster, constants: Sequence[Constant], z: Iterable[float]) -> Cluster:
    """The cluster with its constants so many of their priors' standard deviations away from where they are."""
    for constant, away in zip(constants, z, strict=True):
        if away != 0:
            cluster = constant.apply(cluster, float(away))
    return cluster
