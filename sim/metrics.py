"""The report: what a trace says of an iteration as a whole, in the measures of docs/design.md."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sim.cost.price import dollars, energy_j
from sim.spec.cluster import Cluster, Device
from sim.spec.counts import RECOMPUTE, layer_recompute_flop, model_flop
from sim.spec.judge import Cost, Infeasible
from sim.spec.plan import Plan
from sim.spec.program import Instruction, Recv, Send, matching_send
from sim.spec.reading import InputError
from sim.spec.trace import ACTIVITIES, BUSY, LinkUse, Trace

Interval = tuple[float, float]
"""`(start_s, end_s)`."""


@dataclass(frozen=True)
class DeviceUse:
    """How one device of the cluster spent the iteration; the three sum to it. Unused devices have no lane and are idle."""

    device: str
    lane: str | None
    busy_s: float
    """Its lane works: it computes, or updates parameters."""
    communication_s: float
    """Its lane does not work, and a message that it waits for, or a transfer of its own, is under way."""
    idle_s: float


@dataclass(frozen=True)
class LinkLoad:
    """The share of a directed link's capacity that the iteration used, and the bytes that crossed it."""

    name: str
    utilisation: float
    num_bytes: float


@dataclass(frozen=True)
class Training:
    """What a whole training takes, if each of its iterations is as the one that is reported; of all the cluster's GPUs."""

    tokens: float
    iterations: int
    seconds: float
    days: float
    dollars: float | None
    """None where no GPU has a price."""
    energy_kwh: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The measures of one iteration, or why there is none: then `infeasible` is set and every measure is None.

    Fractions between 0 and 1. MFU, HFU and `mfu_used` are also None where no GPU has a peak at the plan's precision, dollars
    where no GPU has a price.
    """

    iteration_s: float | None
    iteration_interval_s: Interval | None = None
    """Where the cluster is calibrated: between which seconds a run is expected to take, of a prediction."""
    tokens_per_s: float | None
    mfu: float | None
    """Model FLOP without recomputation / (iteration_s x peak FLOP/s of all the cluster's GPUs at the plan's precision)."""
    mfu_used: float | None
    """As `mfu`, with the peak of the plan's devices only."""
    hfu: float | None
    """As `mfu`, with the recomputed FLOP counted too."""
    bubble: float | None
    """1 - busy lane-seconds / (lanes x iteration_s)."""
    peak_bytes: Mapping[str, int] | None
    infeasible: Infeasible | None
    energy_j: float | None
    dollars: float | None
    wall_s: float
    """How long Motley took to find it."""
    devices: tuple[DeviceUse, ...] = ()
    """All of the cluster's, in its order."""
    links: tuple[LinkLoad, ...] = ()
    training: Training | None = None
    """Where a number of tokens was asked for."""


OPTIONAL = ("iteration_interval_s", "training")
"""What a report's file leaves out where it is None."""


def report(
    trace: Trace,
    cluster: Cluster,
    wall_s: float = 0.0,
    peaks: Mapping[str, float] | None = None,
    lanes: Mapping[str, LaneUse] | None = None,
) -> Report:
    """The measures of a trace on its cluster.

    `lanes` is what `lane_use` tells of the trace, if it is known; the trace then needs no spans.
    `peaks` overrides the peak FLOP/s of GPU kinds, by name, for comparison with publications that take other peaks; kinds that
    the cluster does not have are passed over. Raises InputError for a device that the cluster does not have, and for a trace
    whose iteration takes no time.
    """
    if not trace.iteration_s > 0:
        raise InputError(f"an iteration takes more than 0 s, but the trace of {trace.cluster!r} has {trace.iteration_s!r} s")
    plan = trace.plan
    lane_of = {device: lane for lane, devices in trace.lanes.items() for device in devices}
    used = [cluster.device(name) for name in lane_of]
    peak = _peak_flop_per_s(cluster.devices, plan.precision, peaks)
    flop = model_flop(plan.transformer, plan.global_batch, plan.sequence_length)
    lanes = lane_use(trace) if lanes is None else lanes
    devices = tuple(
        DeviceUse(device.name, lane, *lanes[lane])
        if (lane := lane_of.get(device.name)) is not None
        else DeviceUse(device.name, None, 0.0, 0.0, trace.iteration_s)
        for device in cluster.devices
    )
    busy_lane_s = sum(busy_s for busy_s, _, _ in lanes.values())
    predicted = cluster.calibration if trace.origin == "simulated" else None
    return Report(
        iteration_s=trace.iteration_s,
        iteration_interval_s=None if predicted is None else predicted.interval_s(trace.iteration_s),
        tokens_per_s=plan.global_batch * plan.sequence_length / trace.iteration_s,
        mfu=_utilisation(flop, trace.iteration_s, peak),
        mfu_used=_utilisation(flop, trace.iteration_s, _peak_flop_per_s(used, plan.precision, peaks)),
        hfu=_utilisation(flop + recompute_flop(plan), trace.iteration_s, peak),
        bubble=1 - busy_lane_s / (len(lanes) * trace.iteration_s) if lanes else None,
        peak_bytes=dict(trace.peak_bytes),
        infeasible=None,
        energy_j=energy_j(cluster, trace.iteration_s, {use.device: use.busy_s for use in devices}),
        dollars=dollars(cluster, trace.iteration_s),
        wall_s=wall_s,
        devices=devices,
        links=tuple(_load(link, trace.iteration_s) for link in trace.links),
    )


def infeasible_report(infeasible: Infeasible, wall_s: float = 0.0) -> Report:
    """The report of a plan that cannot run: the same keys, with every measure None."""
    measures = dict.fromkeys(field.name for field in dataclasses.fields(Report) if field.name not in ("devices", "links"))
    return Report(**{**measures, "infeasible": infeasible, "wall_s": wall_s})  # type: ignore[arg-type]


def with_training(report: Report, plan: Plan, tokens: float | None) -> Report:
    """The report with what training on so many tokens takes, the last iteration whole; unchanged where it is not asked for, or
    where the plan cannot run."""
    if tokens is None or report.iteration_s is None:
        return report
    iterations = math.ceil(tokens / (plan.global_batch * plan.sequence_length))
    seconds = iterations * report.iteration_s
    training = Training(
        tokens=tokens,
        iterations=iterations,
        seconds=seconds,
        days=seconds / 86400,
        dollars=None if report.dollars is None else iterations * report.dollars,
        energy_kwh=None if report.energy_j is None else iterations * report.energy_j / 3.6e6,
    )
    return dataclasses.replace(report, training=training)


def cost(report: Report) -> Cost:
    """The verdict of a report that is not infeasible; a fraction or price that is not known counts 0. Raises ValueError else."""
    if report.infeasible is not None or report.iteration_s is None or report.tokens_per_s is None:
        raise ValueError("an infeasible plan has no cost; its verdict is the report's `infeasible`")
    return Cost(
        iteration_s=report.iteration_s,
        tokens_per_s=report.tokens_per_s,
        mfu=report.mfu or 0.0,
        mfu_used=report.mfu_used or 0.0,
        hfu=report.hfu or 0.0,
        bubble=report.bubble or 0.0,
        peak_bytes=report.peak_bytes or {},
        energy_j=report.energy_j or 0.0,
        dollars=report.dollars or 0.0,
    )


def cost_report(cost: Cost, wall_s: float = 0.0, cluster: Cluster | None = None) -> Report:
    """The report of a verdict that is no simulation's: without devices and links; a utilisation or price of 0 is not known.

    With the cluster it has the interval of one that is calibrated.
    """
    predicted = cluster.calibration if cluster is not None else None
    return Report(
        iteration_s=cost.iteration_s,
        iteration_interval_s=None if predicted is None else predicted.interval_s(cost.iteration_s),
        tokens_per_s=cost.tokens_per_s,
        mfu=cost.mfu or None,
        mfu_used=cost.mfu_used or None,
        hfu=cost.hfu or None,
        bubble=cost.bubble,
        peak_bytes=dict(cost.peak_bytes),
        infeasible=None,
        energy_j=cost.energy_j,
        dollars=cost.dollars or None,
        wall_s=wall_s,
    )


def report_json(report: Report) -> str:
    """The text of a report's file: its keys in the order of `Report`, one a line, and then one device and one link a line."""
    lines = [
        f"  {json.dumps(key)}: {_json_text(value)}"
        for key, value in dataclasses.asdict(report).items()
        if key not in ("devices", "links") and not (key in OPTIONAL and value is None)
    ]
    for key, entries in (("devices", report.devices), ("links", report.links)):
        rows = [f"    {_json_text(dataclasses.asdict(entry))}" for entry in entries]
        lines.append(f"  {json.dumps(key)}: [\n" + ",\n".join(rows) + "\n  ]" if rows else f"  {json.dumps(key)}: []")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# --- FLOP ------------------------------------------------------------------------------------------------------------


def recompute_flop(plan: Plan) -> int:
    """FLOP that one iteration of the plan spends on recomputation, over all its pipelines."""
    total = 0
    for pipeline in plan.pipelines:
        tokens = pipeline.sequences * plan.sequence_length
        for mode in RECOMPUTE:
            layers = sum(stage.recomputed()[mode] for stage in pipeline.stages)
            total += layers * layer_recompute_flop(plan.transformer, tokens, plan.sequence_length, mode)
    return total


def _peak_flop_per_s(devices: Iterable[Device], precision: str, peaks: Mapping[str, float] | None) -> float:
    """Sum of the devices' peaks, of which `peaks` overrides some by the kind's name."""
    chosen = peaks or {}
    return sum(chosen.get(device.gpu.name, device.gpu.peak(precision) or 0.0) for device in devices)


def _utilisation(flop: int, iteration_s: float, peak_flop_per_s: float) -> float | None:
    return flop / (iteration_s * peak_flop_per_s) if peak_flop_per_s > 0 else None


# --- Time ------------------------------------------------------------------------------------------------------------


LaneUse: TypeAlias = tuple[float, float, float]
"""Seconds of work, of communication that work does not hide, and of neither."""


def work_s(trace: Trace) -> dict[str, float]:
    """Each lane's seconds of work: the first of what `lane_use` tells, and quicker to find."""
    spans: dict[str, list[Interval]] = {lane: [] for lane in trace.lanes}
    for span in trace.spans:
        if ACTIVITIES[type(span.instruction)] in BUSY:
            spans[span.lane].append((max(span.start_s, 0.0), min(span.end_s, trace.iteration_s)))
    return {lane: covered_s(inside) for lane, inside in spans.items()}


def lane_use(trace: Trace) -> dict[str, LaneUse]:
    """Each lane's seconds of work, of communication that work does not hide, and of neither; they sum to the iteration.

    Of a wait for a message only the part in which the message is under way is communication; before, the lane is idle.
    """
    sent_s: dict[tuple[str, Instruction], float] = {
        (span.lane, span.instruction): span.start_s for span in trace.spans if isinstance(span.instruction, Send)
    }
    busy_s = work_s(trace)
    spans: dict[str, list[Interval]] = {lane: [] for lane in trace.lanes}
    for span in trace.spans:
        start_s, instruction = max(span.start_s, 0.0), span.instruction
        if isinstance(instruction, Recv):
            start_s = max(start_s, sent_s.get(matching_send(span.lane, instruction), start_s))
        spans[span.lane].append((start_s, min(span.end_s, trace.iteration_s)))
    found = {}
    for lane, inside in spans.items():
        either_s = covered_s(inside)
        found[lane] = (busy_s[lane], max(either_s - busy_s[lane], 0.0), max(trace.iteration_s - either_s, 0.0))
    return found


def covered_s(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for start_s, end_s in sorted(intervals):
        if end_s > max(start_s, reached):
            total += end_s - max(start_s, reached)
            reached = end_s
    return total


def _load(link: LinkUse, iteration_s: float) -> LinkLoad:
    """The load of one link; one of infinite capacity has none."""
    return LinkLoad(link.name, link.num_bytes / (link.capacity_bytes_per_s * iteration_s), link.num_bytes)
