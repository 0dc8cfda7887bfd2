"""Plans and timelines as HTML: rows that a phone can show, and one path per lane and activity, so that 500 of them are small.

The pictures of `experiments.plots` are of one width and drawn with all their text; a page that is read on a phone, and holds
hundreds of plans, needs rows that wrap and few bytes. What is shown, and its colours and words, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.pages import Html, markup, natural, share
from sim.spec.cluster import Cluster
from sim.spec.compile import lane_name
from sim.spec.plan import Plan, Stage
from sim.spec.trace import ACTIVITIES, Trace, micro_batch_text, short_devices

# --- A plan ----------------------------------------------------------------------------------------------------------

PIPELINE_COLOURS = 6
"""Classes p0 to p5 of the style sheet; the seventh pipeline has the first's again."""
_ROW_REM, _GPU_REM, _TALLEST_REM = 1.25, 0.25, 4.0
"""Height of a row of one GPU, what each further one adds, and the most."""


@dataclass(frozen=True)
class _Block:
    """A stretch of layers in a row."""

    left: str
    width: str
    colour: str
    text: str
    title: str
    recomputed: bool
    beside: str
    """Where its text stands, if there is no room inside, as CSS; empty where there is."""


@dataclass(frozen=True)
class _Row:
    """GPUs that follow one another and hold the same layers."""

    label: str
    kind: str
    height: str
    blocks: tuple[_Block, ...]
    new_node: bool


def plan_rows(plan: Plan, cluster: Cluster | None = None) -> Html:
    """The plan as rows of GPUs over layers: equal neighbours share a row, whose height grows with their number.

    E is the embedding, H the head. Without the cluster there are no kinds, and no rows of GPUs that the plan leaves out.
    """
    return markup(
        "plan.html",
        alt=plan_words(plan),
        rows=_plan_rows(plan, cluster),
        ticks=_layer_ticks(plan.transformer.layers),
        tensor=any(len(replica.devices) > plan.context_parallel for _, _, _, replica in plan.replicas()),
        recomputed=any(stage.most_recompute != "none" for pipeline in plan.pipelines for stage in pipeline.stages),
    )


def plan_words(plan: Plan) -> str:
    """What the picture of a plan shows, in words."""
    pipelines, stages = len(plan.pipelines), [len(pipeline.stages) for pipeline in plan.pipelines]
    told = f"{min(stages)}" if min(stages) == max(stages) else f"{min(stages)} to {max(stages)}"
    first = plan.pipelines[0]
    held = "; ".join(
        f"{lane_name(0, s, 0, len(stage.replicas))} on {short_devices(stage.devices)}: layers {_layer_words(stage)}"
        for s, stage in enumerate(first.stages[:8])
    )
    return (
        f"Plan of {plan.transformer.name} on {len(plan.devices)} GPUs of {plan.cluster}: {pipelines} pipeline"
        f"{'s' if pipelines > 1 else ''} of {told} stages. {held}{'; ...' if len(first.stages) > 8 or pipelines > 1 else ''}"
    )


def _layer_words(stage: Stage) -> str:
    return ", ".join(f"{start} to {stop - 1}" if stop > start else "none" for start, stop in stage.layers)


def _plan_rows(plan: Plan, cluster: Cluster | None) -> list[_Row]:
    """The rows in the cluster's order, or, where it is not known, in that of the names."""
    layers = plan.transformer.layers
    blocks: dict[str, tuple[_Block, ...]] = {}
    for p, s, r, replica in plan.replicas():
        stage = plan.pipelines[p].stages[s]
        tensor = len(replica.devices) // plan.context_parallel
        lane = lane_name(p, s, r, len(stage.replicas))
        text = f"{lane}  1/{tensor}" if tensor > 1 else lane
        title = f"{lane}: layers {_layer_words(stage)}, recompute {stage.recompute_words}, {replica.sequences} sequences at once"
        own = tuple(
            _Block(
                share((left + 1) / (layers + 2)),
                share((right - left) / (layers + 2)),
                f"p{p % PIPELINE_COLOURS}",
                text,
                title,
                stage.most_recompute != "none",
                _beside((left + 1) / (layers + 2), (right + 1) / (layers + 2), text),
            )
            for left, right in ((start - (start == 0), stop + (stop == layers)) for start, stop in stage.layers)
        )
        blocks.update(dict.fromkeys(replica.devices, own))
    names = [device.name for device in cluster.devices] if cluster is not None else sorted(plan.devices, key=natural)
    rows: list[_Row] = []
    before = ""
    for group in alike(names, lambda name: (name.rpartition("/")[0], blocks.get(name))):
        node = group[0].rpartition("/")[0]
        kind = cluster.device(group[0]).gpu.name if cluster is not None else ""
        used = group[0] in blocks
        height = min(_ROW_REM + _GPU_REM * (len(group) - 1), _TALLEST_REM) if used else _ROW_REM
        count = kind if len(group) == 1 else f"{len(group)} x {kind}" if kind else f"{len(group)} GPUs"
        new_node = bool(rows) and node != before
        rows.append(_Row(short_devices(tuple(group)), count, f"{height:.4g}rem", blocks.get(group[0], ()), new_node))
        before = node
    return rows


def _beside(left: float, right: float, text: str) -> str:
    """Where the text of a block stands that is too narrow for it on a phone: right of the block, or left of it at the end."""
    if right - left >= 0.025 * len(text):
        return ""
    return f"left:{share(right)}" if right < 0.8 else f"right:{share(1 - left)}"


def alike(names: Sequence[str], key: Callable[[str], object]) -> list[list[str]]:
    """The names in runs of neighbours whose `key` is equal."""
    groups: list[list[str]] = []
    for name in names:
        if groups and key(groups[-1][0]) == key(name):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _layer_ticks(layers: int) -> list[tuple[str, str]]:
    """Where the axis of layers has a mark, and what stands there."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 25, 50, 100, 1000) if layers / step <= 10 or step == 1000)
    inner = [tick for tick in range(0, layers, step) if tick <= layers - step / 2]
    marks = [(-0.5, "E"), *((tick + 0.5, str(tick)) for tick in inner), (layers + 0.5, "H")]
    return [(share((at + 1) / (layers + 2)), text) for at, text in marks]


# --- Timelines -------------------------------------------------------------------------------------------------------

UNITS = 4000
"""Width of a lane's picture in whole units, finer than the dots of a screen."""
MOST_LANES = 32
MOST_NUMBERS = 500
_GAP = 5
"""Units that part one bar from the next, where both are wide enough."""
_LEAST_NUMBER = 0.016
"""Micro-batches have their number in bars of at least this part of the width, a digit more half as much again."""
_AFTER = "ended"

_STYLES: Mapping[str, tuple[str, str, int, int]] = {
    "forward": ("tf", "forward", 8, 12),
    "backward": ("tb", "backward", 8, 12),
    "backward input": ("ti", "backward, input", 8, 12),
    "backward weight": ("tw", "backward, weights", 8, 12),
    "optimizer": ("to", "optimizer", 8, 12),
    "wait": ("tn", "waiting to receive", 8, 12),
    "send": ("ts", "sending", 17, 3),
    "collective": ("tc", "reducing and gathering", 21, 3),
}
"""Of each activity its class, its words, and the middle and height of its bars in a lane that is 24 units tall."""


@dataclass(frozen=True)
class _Lane:
    """One row of a timeline."""

    label: str
    devices: str
    paths: tuple[tuple[str, str, int], ...]
    """Class, path and height of the bars of each activity."""
    numbers: tuple[tuple[str, str, bool], ...]
    """Place and text of each micro-batch's number, and whether it is white."""


def timelines(traces: Sequence[tuple[str, Trace]]) -> Html:
    """Timelines below one another, each with its title, on the time axis of the longest.

    Of very many lanes the first are shown. The thin strips below a lane's bar are transfers that go on beside its work.
    """
    end_s = max(trace.iteration_s for _, trace in traces)
    occurring = {ACTIVITIES[type(span.instruction)] for _, trace in traces for span in trace.spans}
    legend = [(style[0], style[1]) for activity, style in _STYLES.items() if activity in occurring]
    if len({trace.iteration_s for _, trace in traces}) > 1:
        legend.append(("te", _AFTER))
    drawn = [
        {
            "title": title,
            "alt": f"Timeline, {title}: {len(trace.lanes)} lanes over {trace.iteration_s:.4g} s",
            "lanes": _lanes(trace, end_s),
            "left_out": max(len(trace.lanes) - MOST_LANES, 0),
            "ended": round(trace.iteration_s / end_s * UNITS),
        }
        for title, trace in traces
    ]
    return markup("timeline.html", timelines=drawn, legend=legend, ticks=_time_ticks(end_s), units=UNITS)


def _lanes(trace: Trace, end_s: float) -> list[_Lane]:
    shown = list(trace.lanes)[:MOST_LANES]
    bars: dict[str, dict[str, list[tuple[int, int]]]] = {lane: {} for lane in shown}
    numbers: dict[str, list[tuple[str, str, bool]]] = {lane: [] for lane in shown}
    for lane, instruction, start_s, stop_s, _ in trace.spans:
        if lane not in bars:
            continue
        activity = ACTIVITIES[type(instruction)]
        start, stop = round(max(start_s, 0.0) / end_s * UNITS), round(min(stop_s, end_s) / end_s * UNITS)
        bars[lane].setdefault(activity, []).append((start, max(stop, start + 1)))
        batch = getattr(instruction, "micro_batch", None)
        if _STYLES[activity][0] in ("tf", "tb", "ti", "tw") and batch is not None:
            text = micro_batch_text(batch, trace.plan.sequence_slices)
            if stop - start >= UNITS * _LEAST_NUMBER * (1 + len(text)) / 2:
                numbers[lane].append((share((start + stop) / 2 / UNITS), text, activity != "forward"))
    if sum(map(len, numbers.values())) > MOST_NUMBERS:
        numbers = {lane: [] for lane in shown}
    return [
        _Lane(
            lane,
            short_devices(trace.lanes[lane]),
            tuple(
                (style[0], _path(bars[lane][activity], style[2]), style[3])
                for activity, style in _STYLES.items()
                if activity in bars[lane]
            ),
            tuple(numbers[lane]),
        )
        for lane in shown
    ]


def _path(bars: list[tuple[int, int]], middle: int) -> str:
    """The path whose strokes are the bars: those that are too thin to be told apart are one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(bars):
        thin = stop - start < 3 * _GAP
        if merged and start <= merged[-1][1] and (thin or start < merged[-1][1]):
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    ends = [stop - _GAP if stop - start >= 3 * _GAP else stop for start, stop in merged]
    return "".join(f"M{start} {middle}h{end - start}" for (start, _), end in zip(merged, ends, strict=True))


def _time_ticks(end_s: float) -> list[tuple[str, str, str]]:
    """Where the time axis has a mark, what stands there, and its class."""
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if end_s * scale >= 1), (1e9, "ns")
    )
    end = end_s * scale
    power = 10.0 ** (len(str(int(end))) - 1)
    step = next(step for step in (power / 10, power / 5, power / 2, power, 2 * power) if end / step <= 6)
    count = int(end / step)
    marks = [("0%", "0", "first")]
    marks += [(share(i * step / end), f"{i * step:g}", "") for i in range(1, count + 1) if i * step <= 0.93 * end]
    return [*marks, ("100%", f"{end:.4g} {unit}", "last")]
