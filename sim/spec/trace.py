"""The trace: what every lane did when, whether simulated or measured, and its file (Chrome/Perfetto JSON)."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.spec.plan import Plan, parse_plan
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    instruction_text,
    parse_instruction,
)
from sim.spec.reading import InputError, Table, parse_json, read_text

FORMAT = "motley-trace/1"
ORIGINS = ("simulated", "measured", "paced")


class Span(NamedTuple):
    """One instruction of one lane. Of a send or collective: the whole transfer; of a receive: the wait for it."""

    lane: str
    instruction: Instruction
    start_s: float
    end_s: float
    num_bytes: int = 0


@dataclass(frozen=True)
class LinkUse:
    """One directed link and the bytes that crossed it in the iteration."""

    name: str
    capacity_bytes_per_s: float
    num_bytes: float


@dataclass(frozen=True)
class Trace:
    """One iteration of a plan on a cluster: spans, peak bytes per device, bytes per link.

    The spans stand in the order they were recorded: computation as it begins, the rest as it ends.
    """

    plan: Plan
    cluster: str
    origin: str
    iteration_s: float
    lanes: Mapping[str, tuple[str, ...]]
    """Lane name to its devices, in program order."""
    spans: tuple[Span, ...] = field(repr=False)
    peak_bytes: Mapping[str, int] = field(repr=False)
    links: tuple[LinkUse, ...] = field(default=(), repr=False)
    versions: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Versions of what made it, such as {"motley": "0.1.0"}."""
    clock_residual_s: float | None = None
    """How far apart the workers' clocks may still be after their alignment, if it was measured; None where there is one clock."""
    ran_on: str | None = field(default=None, repr=False)
    """Of a measured iteration, the text of the file of the cluster that it is told on, with the peaks that it measured."""
    jitter: float = 0.0
    """Of a simulated iteration, how far the speeds of its devices differ: their standard deviation, as a fraction."""


ACTIVITIES: Mapping[type[Instruction], str] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "backward input",
    BackwardWeight: "backward weight",
    SendActivation: "send",
    SendGradient: "send",
    RecvActivation: "wait",
    RecvGradient: "wait",
    ReduceGradients: "collective",
    GatherParameters: "collective",
    OptimizerStep: "optimizer",
}
"""What a lane does during an instruction, in the words of the file's categories, the metrics and the plots."""

BUSY = frozenset({"forward", "backward", "backward input", "backward weight", "optimizer"})
"""Activities in which the lane's devices work."""

BACKGROUND = frozenset({"send", "collective"})
"""Activities that go on beside the lane's other instructions."""


def period_s(trace: Trace) -> float:
    """Seconds from an iteration of a measured trace to the next: its own, without those by which its lanes began apart.

    A lane that is done begins the next iteration, and need not wait for the others. So all have one period, and from the first
    one's start to the last one's end passes more. Where all begin at once, as in the simulator, the two are the same.
    """
    starts_s: dict[str, float] = {}
    ends_s: dict[str, float] = {}
    for span in trace.spans:
        starts_s[span.lane] = min(span.start_s, starts_s.get(span.lane, span.start_s))
        ends_s[span.lane] = max(span.end_s, ends_s.get(span.lane, span.end_s))
    longest_s = max((end_s - starts_s[lane] for lane, end_s in ends_s.items()), default=0.0)
    return trace.iteration_s - (max(ends_s.values(), default=0.0) - longest_s)


def lane_pipelines(trace: Trace) -> dict[str, int]:
    """The pipeline of every lane, in lane order: that in which the plan has the lane's first device (0 where it has none)."""
    pipelines = {device: p for p, _, _, replica in trace.plan.replicas() for device in replica.devices}
    return {lane: pipelines.get(devices[0], 0) if devices else 0 for lane, devices in trace.lanes.items()}


def micro_batch_text(number: int, sequence_slices: int) -> str:
    """The number of a micro-batch; where it numbers slices, as in '3.1', micro-batch 3's slice 1."""
    micro_batch, place = divmod(number, sequence_slices)
    return f"{micro_batch}.{place}" if sequence_slices > 1 else str(micro_batch)


def short_devices(devices: tuple[str, ...]) -> str:
    """The devices in short, as in 'rtx4090-0/0-3' or 'a100/0,2 v100/0'."""
    nodes: dict[str, list[int]] = {}
    others: list[str] = []
    for device in devices:
        node, _, index = device.rpartition("/")
        if node and index.isdecimal():
            nodes.setdefault(node, []).append(int(index))
        else:
            others.append(device)
    shown = []
    for node, indices in nodes.items():
        runs: list[tuple[int, int]] = []
        for i in sorted(indices):
            if runs and i == runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], i)
            else:
                runs.append((i, i))
        shown.append(f"{node}/{','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)}")
    return " ".join(shown + others)


# --- Writing ---------------------------------------------------------------------------------------------------------


def trace_json(trace: Trace) -> str:
    """The text of a trace's file, Chrome trace JSON that Perfetto opens; `parse_trace` reads an equal trace from it.

    A pipeline is a process and a lane a thread. Instructions that the lane waits for are complete events ("X") of its
    thread. Transfers beside them are asynchronous events ("b" and "e"), on as many tracks of the lane as go on at once.
    `ts` and `dur` are for the viewer, in µs, rounded to whole ns; `args` has the exact seconds. Raises ValueError for a time
    that is not finite.
    """
    index = {lane: i for i, lane in enumerate(trace.lanes)}
    pipelines = lane_pipelines(trace)
    place = {lane: f'"pid":{pipelines[lane] + 1},"tid":{i + 1}' for lane, i in index.items()}
    times_s = np.array([(span.start_s, span.end_s) for span in trace.spans], dtype=float).reshape(-1, 2)
    if not np.isfinite(times_s).all():
        raise ValueError("the spans of a trace have finite times")
    starts_ns, ends_ns = _whole_ns(times_s)
    tracks = _tracks(trace, starts_ns, ends_ns)
    quoted = {text: _text(text) for text in (*trace.lanes, *ACTIVITIES.values())}
    lines = list(_metadata(trace, index, pipelines, place))
    shown: set[str] = set()
    for i, (lane, instruction, start_s, end_s, num_bytes) in enumerate(trace.spans):
        activity = ACTIVITIES[type(instruction)]
        head = f'{{"name":{_text(instruction_text(instruction))},"cat":{quoted[activity]},{place[lane]}'
        exact = f'"args":{{"start_s":{float(start_s)!r},"end_s":{float(end_s)!r},"bytes":{int(num_bytes)}}}'
        start = _microseconds(starts_ns[i])
        if activity not in BACKGROUND:
            lines.append(f'{head},"ph":"X","ts":{start},"dur":{_microseconds(ends_ns[i] - starts_ns[i])},{exact}}}')
            continue
        track = tracks[i]
        if track not in shown:
            # A viewer names a track after its first event; this one has no length and only the name.
            shown.add(track)
            name = _text(f"{lane} {activity}s")
            lines.append(f'{{"name":{name},"cat":{quoted[activity]},{place[lane]},"ph":"n","id":{track},"ts":0}}')
        lines.append(f'{head},"ph":"b","id":{track},"ts":{start},{exact}}}')
        lines.append(f'{head},"ph":"e","id":{track},"ts":{_microseconds(ends_ns[i])}}}')
    facts = {
        "format": FORMAT,
        "cluster": trace.cluster,
        "origin": trace.origin,
        "iteration_s": float(trace.iteration_s),
        "lanes": {lane: list(devices) for lane, devices in trace.lanes.items()},
        "peak_bytes": {device: int(peak) for device, peak in trace.peak_bytes.items()},
        "links": [
            {
                "name": link.name,
                "capacity_bytes_per_s": None if link.capacity_bytes_per_s == math.inf else float(link.capacity_bytes_per_s),
                "bytes": float(link.num_bytes),
            }
            for link in trace.links
        ],
        "versions": dict(trace.versions),
        **({} if trace.clock_residual_s is None else {"clock_residual_s": float(trace.clock_residual_s)}),
        **({} if trace.ran_on is None else {"ran_on": trace.ran_on}),
        **({} if trace.jitter == 0 else {"jitter": float(trace.jitter)}),
        "plan": json.loads(trace.plan.to_json()),
    }
    motley = ",\n".join(f"{_text(key)}:{_text(value)}" for key, value in facts.items())
    events = ",\n".join(lines)
    # Viewers read the unit only before the events, and stop at the first key that they do not know.
    return f'{{"displayTimeUnit":"ms",\n"traceEvents":[\n{events}\n],\n"motley":{{\n{motley}}}}}\n'


def _whole_ns(times_s: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[list[int], list[int]]:
    """The starts and the ends, rounded to whole ns. Beyond 292 years they are no 64-bit numbers, but still whole ones."""
    rounded = np.rint(times_s * 1e9)
    if rounded.size and np.abs(rounded).max() >= 2**63:
        return [int(ns) for ns in rounded[:, 0]], [int(ns) for ns in rounded[:, 1]]
    starts_ns, ends_ns = rounded.astype(np.int64).T.tolist()
    return starts_ns, ends_ns


def _text(value: object) -> str:
    """The JSON text of a value, in one line. Not in ASCII, because viewers know few escapes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _microseconds(whole_ns: int) -> str:
    """The µs of whole ns as a decimal text, and a tenth of a ns more.

    Viewers multiply by 1000 and drop the fraction, by which 0.57 µs, less by an ulp, would become 569 ns: an event could seem to
    begin before the one before it ends, and such events are left out of the picture. The tenth makes sure of the 570.
    """
    sign, whole_ns = ("-", -whole_ns) if whole_ns < 0 else ("", whole_ns)
    return f"{sign}{whole_ns // 1000}.{whole_ns % 1000:03d}1"


def _metadata(trace: Trace, index: Mapping[str, int], pipelines: Mapping[str, int], place: Mapping[str, str]) -> Iterator[str]:
    """The events that name and order the pipelines and lanes."""
    for p in sorted(set(pipelines.values())):
        for name, args in (("process_name", {"name": f"pipeline {p}"}), ("process_sort_index", {"sort_index": p})):
            yield f'{{"name":"{name}","ph":"M","ts":0,"pid":{p + 1},"args":{_text(args)}}}'
    for lane, devices in trace.lanes.items():
        title = {"name": f"{lane}  {short_devices(devices)}"}
        for name, args in (("thread_name", title), ("thread_sort_index", {"sort_index": index[lane]})):
            yield f'{{"name":"{name}","ph":"M","ts":0,{place[lane]},"args":{_text(args)}}}'


def _tracks(trace: Trace, starts_ns: list[int], ends_ns: list[int]) -> dict[int, str]:
    """The track, as a quoted id, of each background span: the lane's first that is free, so that spans of one never touch."""
    found: dict[int, str] = {}
    free: dict[tuple[str, str], tuple[list[int], list[tuple[int, int]]]] = {}
    background = [i for i, span in enumerate(trace.spans) if ACTIVITIES[type(span.instruction)] in BACKGROUND]
    for i in sorted(background, key=lambda i: (starts_ns[i], ends_ns[i])):
        span = trace.spans[i]
        group = (span.lane, ACTIVITIES[type(span.instruction)])
        idle, running = free.setdefault(group, ([], []))
        while running and running[0][0] < starts_ns[i]:
            heapq.heappush(idle, heapq.heappop(running)[1])
        track = heapq.heappop(idle) if idle else len(running)
        heapq.heappush(running, (ends_ns[i], track))
        found[i] = _text(f"{group[0]} {group[1]} {track}")
    return found


# --- Reading ---------------------------------------------------------------------------------------------------------


def read_trace(path: str | Path) -> Trace:
    """The trace of a file. Raises InputError where it is damaged or no Motley trace."""
    return parse_trace(read_text(path), str(path))


def parse_trace(text: str, where: str = "trace") -> Trace:
    """The trace of a JSON text that `trace_json` wrote. Raises InputError as `read_trace` does.

    Events that other tools added (counters, flows, instants) are passed over.
    """
    root = Table(_parsed(text, where), where)
    if "motley" not in root:
        raise root.error("motley", f"is missing; expected a trace written by Motley ({FORMAT})")
    facts = root.table("motley")
    facts.choice("format", [FORMAT])
    lane_table = facts.table("lanes")
    lanes = {lane: tuple(str(device) for device in lane_table.items(lane)) for lane in lane_table.keys()}  # noqa: SIM118
    peaks = facts.table("peak_bytes")
    versions = facts.table("versions", {})
    one_clock = facts.get("clock_residual_s", lambda value: value is None, "a number of seconds or null", True)
    links = []
    for entry in facts.tables("links", []):
        unlimited = entry.get("capacity_bytes_per_s", lambda value: value is None, "a number or null")
        capacity = math.inf if unlimited else entry.number("capacity_bytes_per_s")
        links.append(LinkUse(entry.text("name"), capacity, entry.number("bytes")))
        entry.close()
    trace = Trace(
        plan=parse_plan(json.dumps(facts.get("plan", _mapping, "a plan")), f"{where}: motley.plan"),
        cluster=facts.text("cluster"),
        origin=facts.choice("origin", ORIGINS),
        iteration_s=facts.number("iteration_s"),
        lanes=lanes,
        spans=tuple(_spans(root.items("traceEvents"), tuple(lanes), where)),
        peak_bytes={device: peaks.integer(device) for device in peaks.keys()},  # noqa: SIM118
        links=tuple(links),
        versions={name: versions.text(name) for name in versions.keys()} if isinstance(versions, Table) else {},  # noqa: SIM118
        clock_residual_s=None if one_clock else facts.number("clock_residual_s"),
        ran_on=facts.text("ran_on", None),
        jitter=facts.number("jitter", 0.0, maximum=1.0),
    )
    facts.close()
    return trace


def _parsed(text: str, where: str) -> object:
    """The plain value of the text. Unlike `parse_json`, which tells what is wrong, it does not look for keys that stand twice."""

    def refuse(constant: str) -> None:
        raise InputError(f"{where}: all numbers of a trace are finite, but one is {constant}")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError:
        return parse_json(text, where)


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _spans(events: Any, lanes: tuple[str, ...], where: str) -> Iterator[Span]:
    """The spans among the events, in the file's order."""
    instructions: dict[str, Instruction] = {}
    for i, event in enumerate(events):
        try:
            if event["ph"] not in ("X", "b"):
                continue
            text, args, lane = event["name"], event["args"], lanes[event["tid"] - 1]
            instruction = instructions.get(text) or instructions.setdefault(text, parse_instruction(text))
            start_s, end_s, num_bytes = args["start_s"], args["end_s"], args["bytes"]
            if type(start_s) is not float or type(end_s) is not float or type(num_bytes) is not int or event["tid"] < 1:
                raise TypeError
        except InputError as error:
            raise InputError(f"{where}: traceEvents[{i}].name: {error}") from None
        except (KeyError, IndexError, TypeError):
            raise InputError(
                f"{where}: traceEvents[{i}]: expected an event with name, the tid of one of {len(lanes)} lanes, and args with "
                f"start_s, end_s and bytes, but got {json.dumps(event)[:120]}"
            ) from None
        yield Span(lane, instruction, start_s, end_s, num_bytes)
