"""What runs measured, plan by plan: what the constants of a cluster are fitted to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeAlias

import numpy as np

from sim.prepared import SpanKey
from sim.spec.cluster import Cluster
from sim.spec.compile import compile_plan
from sim.spec.gpu import is_cpu
from sim.spec.plan import Plan
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    OptimizerStep,
    Recv,
    Send,
    matching_send,
    work_key,
)
from sim.spec.reading import InputError
from sim.spec.trace import Span, Trace, period_s

MOST_AFTER = 2.0
"""A span of an iteration ends within so many of it; lanes may begin apart."""

MessageKey: TypeAlias = tuple[str, Send]
"""The sender, and what it sends, of micro-batch 0."""


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
            for key, seconds in median_spans_s(trace).items():
                spans.setdefault(key, []).append(seconds)
        first = traces[0][1]
        # The first device of a lane is recorded, and its optimizer step waits for no other: of several it tells too little.
        kept = {key: median(some) for key, some in spans.items() if key[1] is not OptimizerStep or len(first.lanes[key[0]]) == 1}
        times = tuple(period_s(trace) for _, trace in traces)
        sent: dict[MessageKey, list[float]] = {}
        for _, trace in traces:
            for message_key, seconds in median_messages_s(trace).items():
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
    precision = trace.plan.precision
    for device in (*trace.plan.devices, *trace.peak_bytes):
        try:
            kind = cluster.device(device).gpu
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        if kind.peak(precision) is None:
            raise InputError(f"{name}: the run is in {precision}, which {kind.name} of {device} does not have")
    if not several_models and trace.plan.transformer != first.plan.transformer:
        shapes = [f"{one.name} ({one.layers} layers of {one.hidden})" for one in (trace.plan.transformer, first.plan.transformer)]
        raise InputError(f"{name}: all runs are of one model, but this one is of {shapes[0]}, and {first_name} of {shapes[1]}")
    if trace.origin != first.origin:
        raise InputError(
            f"{name}: runs are all measured or all paced, but this one is {trace.origin}, and {first_name} {first.origin}"
        )
    if not trace.iteration_s > 0:
        raise InputError(f"{name}: an iteration takes more than 0 s, but this one has {trace.iteration_s!r} s")
    lanes = compile_plan(trace.plan).by_name
    program = {lane.name: set(lane.instructions) for lane in lanes.values()}
    for span in trace.spans:
        if span.end_s < span.start_s:
            raise InputError(f"{name}: {span.instruction} on the lane {span.lane!r} ends before it starts")
        if span.instruction not in program.get(span.lane, ()):
            raise InputError(f"{name}: its spans are of another plan: there is no {span.instruction} on the lane {span.lane!r}")
    for lane_name, devices in trace.lanes.items():
        if lane_name not in lanes or lanes[lane_name].devices != devices:
            raise InputError(f"{name}: its lane {lane_name!r} of {', '.join(devices) or 'no device'} is none of its plan")
    last_s = max((span.end_s for span in trace.spans), default=0.0)
    if last_s > MOST_AFTER * trace.iteration_s or not period_s(trace) > 0:
        raise InputError(f"{name}: its spans take longer than an iteration, of {trace.iteration_s!r} s")


def median_spans_s(trace: Trace) -> dict[SpanKey, float]:
    """Median seconds of the instructions of a trace that compute."""
    found: dict[SpanKey, list[float]] = {}
    for span in trace.spans:
        if isinstance(span.instruction, (Forward, Backward, BackwardInput, BackwardWeight, OptimizerStep)):
            key = (span.lane, *work_key(span.instruction, trace.plan.sequence_slices))
            found.setdefault(key, []).append(span.end_s - span.start_s)
    return {key: median(seconds) for key, seconds in found.items()}


def median_messages_s(trace: Trace) -> dict[MessageKey, float]:
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
