"""Pictures: a plan on its cluster, the timeline of a trace, two of them on one time axis, predicted beside reported MFU,
predicted over measured times.

Colours are of the Okabe-Ito palette, chosen so that they also differ in lightness: the pictures can be read in grey and by
people who do not tell all colours apart. A plot takes records and an Axes to draw on (or makes a figure of its own), and never
computes what it shows.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from sim.spec.cluster import Cluster
from sim.spec.plan import Plan, Stage
from sim.spec.reading import InputError, write_file
from sim.spec.trace import ACTIVITIES, BACKGROUND, Span, Trace, lane_pipelines, micro_batch_text, short_devices

FORMATS = ("png", "svg", "pdf")

DOTS_PER_INCH = 100

BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE, YELLOW, BLACK = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#F0E442",
    "#000000",
)
"""The palette of Okabe and Ito (2008)."""


def save_figure(figure: Figure, path: str | Path, replace: bool = False) -> Path | None:
    """Where the earlier content of `path` is kept now, if any and unless `replace`. Writes PNG, SVG or PDF, whole or not at all.

    Raises InputError for another ending, and where the place cannot be written.
    """
    ending = Path(path).suffix.lower().lstrip(".")
    if ending not in FORMATS:
        accepted = ", ".join(f".{known}" for known in FORMATS)
        raise InputError(f"{path}: a picture's name ends in one of {accepted}, but this one ends in {Path(path).suffix!r}")
    buffer = io.BytesIO()
    # Without a date, and with ids that are not drawn by lot, equal pictures are equal files.
    metadata = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[ending]
    with rc_context({"svg.hashsalt": "motley"}):
        figure.savefig(buffer, format=ending, metadata=metadata)
    return write_file(path, buffer.getvalue(), replace)


def _axes(width_inch: float, height_inch: float, rows: int = 1) -> list[Axes]:
    """The Axes of a new figure, one below the other on one x axis, drawn without any state of pyplot."""
    figure = Figure(figsize=(width_inch, height_inch), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])


# --- A plan ----------------------------------------------------------------------------------------------------------


_PIPELINE_FILLS = ((BLUE, "#FFFFFF"), (SKY, BLACK), (GREEN, "#FFFFFF"), (ORANGE, BLACK), (YELLOW, BLACK), (PURPLE, BLACK))
"""Colours of pipelines and of what is written on them; neighbours differ in lightness. The seventh has the first's again."""
_NEARLY_FULL = 0.95
_MOST_ROWS_NAMED = 64
"""GPUs have a name each in a picture of at most so many; in a larger one their nodes have."""


def plot_plan(
    plan: Plan, cluster: Cluster, peak_bytes: Mapping[str, int], axes: tuple[Axes, Axes] | None = None, title: str | None = None
) -> tuple[Axes, Axes]:
    """Two Axes with one row per GPU of the cluster: the layers that it holds, and how full its memory is at the peak.

    Each pipeline has a colour; lanes are named, with the part of each of their layers that one of their GPUs holds. E is the
    embedding, H the head. Hatched layers are recomputed: slanted lines in full, dots selectively, upright lines pointwise, as
    far as a stage is. The rows of GPUs that the plan leaves out are grey. Without `axes`, the figure is as tall as the GPUs
    need. Raises InputError for devices that the cluster has not.
    """
    rows = {device.name: i for i, device in enumerate(cluster.devices)}
    for name in plan.devices:
        cluster.device(name)
    alone = axes is None
    if axes is None:
        height = _PLAN_MARGIN_INCH + float(np.clip(0.26 * len(rows), 1.0, 15.0))
        figure = Figure(figsize=(12.0, height), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        held, full = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    else:
        held, full = axes
    _style_plan_axes(held, full, plan, cluster, title)
    roomy = _row_points(held) >= _ROOMY_POINTS
    for p, s, r, replica in plan.replicas():
        fill, text = _PIPELINE_FILLS[p % len(_PIPELINE_FILLS)]
        stage, tensor = plan.pipelines[p].stages[s], len(replica.devices) // plan.context_parallel
        hatch = _RECOMPUTE_HATCHES.get(stage.most_recompute) if roomy else None
        name = f"p{p}s{s}" + (f"r{r}" if len(stage.replicas) > 1 else "")
        for first, after in _blocks(sorted(rows[device] for device in replica.devices)):
            for left, right in _drawn_ranges(stage, plan.transformer.layers):
                corner, size = (left, first), (right - left, after - first)
                held.add_patch(Rectangle(corner, *size, facecolor=fill, hatch=hatch, **_FRAMES[roomy]))
                if roomy:
                    held.hlines(range(first + 1, after), left, right, color="#FFFFFF", linewidth=0.3)
                _write_lane(held, corner, size, name, f"1/{tensor}" if tensor > 1 else "", (fill, text))
    shares = [peak_bytes.get(name, 0) / cluster.device(name).gpu.memory_bytes if name in plan.devices else 0.0 for name in rows]
    colours = [VERMILLION if share > _NEARLY_FULL else SKY for share in shares]
    full.barh([i + 0.5 for i in rows.values()], shares, height=0.8 if roomy else 1.0, color=colours)
    for first, after in _blocks([i for name, i in rows.items() if name not in plan.devices]):
        for ax in (held, full):
            ax.axhspan(first, after, color=_LEFT_OUT, linewidth=0, zorder=0.5)
        middle = plan.transformer.layers / 2, (first + after) / 2
        box = {"facecolor": _LEFT_OUT, "edgecolor": "none", "pad": 1.5}
        held.text(*middle, "not used", color="#606060", fontsize=8, ha="center", va="center", zorder=5, bbox=box)
    if alone:
        handles = _plan_legend(plan, shares, roomy)
        if handles:
            _legend_below(held, handles)
    return held, full


def _plan_legend(plan: Plan, shares: Sequence[float], roomy: bool) -> list[Patch]:
    """What the hatches, the second colour of the memory and the fractions mean, as far as they occur."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    handles = [
        Patch(facecolor="#D0D0D0", edgecolor="#FFFFFF", hatch=hatch, label=f"recomputed: {how}")
        for how, hatch in _RECOMPUTE_HATCHES.items()
        if roomy and any(stage.most_recompute == how for stage in stages)
    ]
    if any(share > _NEARLY_FULL for share in shares):
        handles.append(Patch(facecolor=VERMILLION, label=f"memory more than {_NEARLY_FULL * 100:.0f} % full"))
    if roomy and any(len(replica.devices) > plan.context_parallel for stage in stages for replica in stage.replicas):
        handles.append(Patch(facecolor="none", label="1/2: the part of each of its layers that a GPU holds"))
    return handles


_PLAN_MARGIN_INCH = 1.6
_ROOMY_POINTS = 5.0
"""Thinner rows have no frames and hatches, which would be all that is seen of them."""
_FRAMES: dict[bool, dict[str, Any]] = {
    True: {"edgecolor": "#FFFFFF", "linewidth": 1.4},
    False: {"edgecolor": "none", "linewidth": 0.0},
}
_LEFT_OUT = "#ECECEC"
_RECOMPUTE_HATCHES = {"full": "//", "selective": "..", "pointwise": "||"}


def _drawn_ranges(stage: Stage, layers: int) -> list[tuple[float, float]]:
    """From where to where a stage's layers are drawn: the embedding is left of 0, the head right of the last layer."""
    return [(start - (start == 0), stop + (stop == layers)) for start, stop in stage.layers]


def _row_points(ax: Axes) -> float:
    """About how tall a row of a plan's picture is, in points."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return 72 * (figure.get_figheight() - _PLAN_MARGIN_INCH) / ax.get_ylim()[0]


def _blocks(places: Sequence[int]) -> list[tuple[int, int]]:
    """The first row and the one after the last of each run of rows that follow one another."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found


def _write_lane(
    ax: Axes, corner: tuple[float, float], size: tuple[float, float], name: str, part: str, colours: tuple[str, str]
) -> None:
    """The lane's name in one of its blocks, and what part of its layers a GPU holds, as far as there is room."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    low, high = ax.get_xlim()
    width = 72 * figure.get_figwidth() * 0.62 * size[0] / (high - low)  # the labels leave about so much of the figure
    points = float(np.clip(_row_points(ax) * size[1] * 0.7, 0, 9))
    text = next((text for text in (f"{name}  {part}".rstrip(), name) if 0.65 * points * len(text) <= width), None)
    if points >= 5 and text is not None:
        box = {"facecolor": colours[0], "edgecolor": "none", "pad": 0.8}
        style: dict[str, Any] = {"color": colours[1], "fontsize": points, "ha": "center", "va": "center", "zorder": 5}
        ax.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, bbox=box, **style)


def _style_plan_axes(held: Axes, full: Axes, plan: Plan, cluster: Cluster, title: str | None) -> None:
    """Rows' labels, lines between nodes, and both x axes."""
    layers, count = plan.transformer.layers, len(cluster.devices)
    held.set_xlim(-1, layers + 1)
    held.set_ylim(count, 0)
    step = next(step for step in (1, 2, 4, 5, 10, 20, 25, 50, 100) if layers / step <= 20 or step == 100)
    ticks = [tick for tick in range(0, layers, step) if layers <= 40 or step / 2 < tick < layers - step / 2]  # clear of E and H
    held.set_xticks([-0.5, *[tick + 0.5 for tick in ticks], layers + 0.5], ["E", *map(str, ticks), "H"])
    held.set_xlabel("layers that the GPU holds (E embedding, H head)")
    firsts = [i for i, device in enumerate(cluster.devices) if device.index == 0]
    if count <= _MOST_ROWS_NAMED:
        labels = [f"{device.gpu.name}  {device.name}" if device.index == 0 else device.name for device in cluster.devices]
        held.set_yticks([i + 0.5 for i in range(count)], labels, fontsize=8)
    else:
        middles = [first + node.gpus / 2 for first, node in zip(firsts, cluster.nodes, strict=True)]
        labels = [f"{node.name}  {node.gpus}x {node.gpu.name}" for node in cluster.nodes]
        held.set_yticks(middles, labels, fontsize=float(np.clip(700 / len(labels), 4.0, 8.0)))
    for ax in (held, full):
        ax.tick_params(axis="y", length=0)
        for first in firsts[1:]:
            ax.axhline(first, color="#606060", linewidth=0.8 if len(firsts) <= _MOST_ROWS_NAMED else 0.3, zorder=4)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    full.set_xlim(0, 1)
    full.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    full.set_xticks([0, 0.5, 1])
    full.set_xlabel("peak of its memory")
    full.grid(True, axis="x", color="#E4E4E4", linewidth=0.8)
    full.set_axisbelow(True)
    full.tick_params(axis="y", labelleft=False)
    if title:
        held.set_title(title, loc="left", fontsize=11)


# --- The timeline ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Style:
    """How spans of one activity look: from where to where in their row (0 top, 1 bottom), and their colours."""

    label: str
    top: float
    bottom: float
    fill: str
    text: str = BLACK
    hatch: str | None = None


_COMPUTE_BAR, _SEND_STRIP, _COLLECTIVE_STRIP = (0.10, 0.66), (0.69, 0.79), (0.81, 0.91)

_STYLES = {
    "forward": _Style("forward", *_COMPUTE_BAR, fill=SKY),
    "backward": _Style("backward", *_COMPUTE_BAR, fill=BLUE, text="#FFFFFF"),
    "backward input": _Style("backward, input", *_COMPUTE_BAR, fill=BLUE, text="#FFFFFF"),
    "backward weight": _Style("backward, weights", *_COMPUTE_BAR, fill=GREEN, text="#FFFFFF", hatch="////"),
    "optimizer": _Style("optimizer", *_COMPUTE_BAR, fill=BLACK),
    "send": _Style("sending", *_SEND_STRIP, fill=ORANGE),
    "collective": _Style("reducing and gathering", *_COLLECTIVE_STRIP, fill=VERMILLION),
    "wait": _Style("waiting to receive", *_COMPUTE_BAR, fill="#D0D0D0"),
}
"""In the order of the legend."""

_LABELLED = frozenset({"forward", "backward", "backward input", "backward weight"})
_MOST_LABELS = 3000
_MOST_HATCHED = 3000
_LEAST_DOTS = 0.5
"""Transfers are drawn at least this wide, so that short ones are seen at all."""
_AFTER = "#ECECEC"
"""Colour of the time after the shorter of two iterations."""


def plot_timeline(trace: Trace, ax: Axes | None = None, title: str | None = None, cluster: Cluster | None = None) -> Axes:
    """The Axes with one row per lane, in program order, and what the lane does over the time of the iteration.

    The bar of a row is its lane's work and waiting; idle is blank. The two thin strips beneath are transfers that go on beside
    it: messages it sends, and collectives. Numbers are micro-batches, where they fit. `cluster` adds the GPU kinds to the rows'
    labels. Without `ax`, the figure is as tall as the lanes need.
    """
    alone = ax is None
    if ax is None:
        (ax,) = _axes(_TIMELINE_INCH, _MARGIN_INCH + _rows_inch(trace))
    _prepare_timeline(ax, trace, cluster, title, trace.iteration_s)
    handles = _timeline_legend(trace)
    if alone:
        _legend_below(ax, handles)
    else:
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, borderaxespad=0)
    _draw_spans(ax, trace, trace.iteration_s)
    return ax


def plot_two_timelines(
    upper: Trace, lower: Trace, titles: tuple[str, str] = ("", ""), cluster: Cluster | None = None
) -> tuple[Axes, Axes]:
    """Two Axes, one below the other: the timelines of two traces of the same lanes, on the time axis of the longer one.

    What comes after the end of the shorter iteration is grey. Everything else is as in `plot_timeline`. Raises InputError
    where the lanes are not the same.
    """
    if set(upper.lanes) != set(lower.lanes):
        raise InputError(
            f"timelines are compared lane by lane, but the lanes of one are {', '.join(upper.lanes)} and those of the other "
            f"{', '.join(lower.lanes)}"
        )
    lower = replace(lower, lanes={lane: lower.lanes[lane] for lane in upper.lanes})
    above, below = _axes(_TIMELINE_INCH, 2 * (_MARGIN_INCH - 0.3 + _rows_inch(upper)), 2)
    end_s = max(upper.iteration_s, lower.iteration_s)
    for ax, trace, title in ((above, upper, titles[0]), (below, lower, titles[1])):
        _prepare_timeline(ax, trace, cluster, title, end_s)
    above.set_xlabel("")
    _legend_below(below, _timeline_legend(upper, lower))
    for ax, trace in ((above, upper), (below, lower)):
        _draw_spans(ax, trace, end_s)
    return above, below


_TIMELINE_INCH, _MARGIN_INCH = 12.0, 1.9
"""Width of a timeline's figure, and its height besides the rows."""

_TITLE_CHARACTERS = 105
"""Of a line of its title, which begins beside the rows' labels."""


def _rows_inch(trace: Trace) -> float:
    """Height of all rows: roomy for few lanes, tight for many."""
    lanes = len(trace.lanes)
    return lanes * float(np.clip(0.75 - 0.02 * lanes, 0.24, 0.6))


def _prepare_timeline(ax: Axes, trace: Trace, cluster: Cluster | None, title: str | None, end_s: float) -> None:
    """The axes of a timeline up to `end_s`, their labels and title; spans can be drawn once all Axes of a figure have these."""
    scale, unit = _time_unit(end_s)
    ax.set_xlim(0, end_s * scale)
    ax.set_ylim(len(trace.lanes), 0)
    _style_timeline(ax, trace, cluster, unit)
    if trace.iteration_s < end_s:
        ax.axvspan(trace.iteration_s * scale, end_s * scale, color=_AFTER, linewidth=0, zorder=0.2)
        ax.axvline(trace.iteration_s * scale, color="#606060", linewidth=1.0, linestyle=(0, (4, 3)), zorder=20)
    if title:
        wrapped = "\n".join(textwrap.fill(line, _TITLE_CHARACTERS) for line in title.splitlines())
        ax.set_title(wrapped, loc="left", fontsize=11)


def _legend_below(ax: Axes, handles: list[Patch]) -> None:
    """Puts the legend below everything else in the figure."""
    legend = ax.get_figure(root=True).legend  # type: ignore[union-attr]
    legend(handles=handles, loc="outside lower center", ncols=8, frameon=False, fontsize=9)


def _draw_spans(ax: Axes, trace: Trace, end_s: float) -> None:
    """Draws the bars of all spans, and the numbers in them."""
    scale, _ = _time_unit(end_s)
    row = {lane: i for i, lane in enumerate(trace.lanes)}
    by_activity = _by_activity(trace)
    dots_per_unit = _dots_wide(ax) / (end_s * scale)
    for z, (activity, style) in enumerate(_STYLES.items()):
        spans = by_activity[activity]
        if spans:
            bars = np.array([(s.start_s * scale, s.end_s * scale, row[s.lane]) for s in spans], dtype=float)
            _draw_bars(ax, activity, style, bars, dots_per_unit, z)
    labels = [(a, span) for a in _STYLES if a in _LABELLED for span in by_activity[a]]
    _draw_numbers(ax, labels, row, scale, dots_per_unit, trace.plan.sequence_slices)


def _by_activity(trace: Trace) -> dict[str, list[Span]]:
    """The spans of every activity, in the order of the legend."""
    found: dict[str, list[Span]] = {activity: [] for activity in _STYLES}
    for span in trace.spans:
        found[ACTIVITIES[type(span.instruction)]].append(span)
    return found


def _time_unit(iteration_s: float) -> tuple[float, str]:
    """The factor from seconds to the unit in which the iteration is a number above 1, and the unit."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if iteration_s * scale >= 1:
            return scale, unit
    return 1e6, "µs"


def _dots_wide(ax: Axes) -> float:
    """Width of the Axes in dots, once the labels around it have their place."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    return float(ax.get_window_extent().width)


def _style_timeline(ax: Axes, trace: Trace, cluster: Cluster | None, unit: str) -> None:
    """Rows' labels, lines between pipelines, and the time axis."""
    lanes = list(trace.lanes)
    size = float(np.clip(10.5 - 0.08 * len(lanes), 6.5, 9.5))
    ax.set_yticks([i + 0.38 for i in range(len(lanes))], [_lane_label(trace, lane, cluster) for lane in lanes], fontsize=size)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"time in {unit}")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    pipelines = list(lane_pipelines(trace).values())
    for i in range(1, len(lanes)):
        if pipelines[i] != pipelines[i - 1]:
            ax.axhline(i, color="#606060", linewidth=1.0, zorder=20)
    for i in range(len(lanes)):
        ax.axhline(i + _COMPUTE_BAR[1], color="#B0B0B0", linewidth=0.5, zorder=0.5)


def _lane_label(trace: Trace, lane: str, cluster: Cluster | None) -> str:
    """The lane's name and devices in short, with their kinds where the cluster is known: 'p0s1  4x RTX4090  rtx4090-0/0-3'."""
    devices = trace.lanes[lane]
    shown = short_devices(devices)
    if len(shown) > 36:
        shown = shown[:35].rstrip() + "…"
    if cluster is None:
        return f"{lane}  {shown}"
    kinds = [cluster.device(device).gpu.name for device in devices]
    counts = " + ".join(f"{kinds.count(kind)}x {kind}" for kind in dict.fromkeys(kinds))
    return f"{lane}  {counts}  {shown}"


def _timeline_legend(*traces: Trace) -> list[Patch]:
    """A patch for every activity that occurs, for idle, and for the time after the shorter of two iterations."""
    occurring = {ACTIVITIES[type(span.instruction)] for trace in traces for span in trace.spans}
    handles = [
        Patch(facecolor=style.fill, hatch=style.hatch, edgecolor="#FFFFFF" if style.hatch else style.fill, label=style.label)
        for activity, style in _STYLES.items()
        if activity in occurring
    ]
    handles.append(Patch(facecolor="#FFFFFF", edgecolor="#909090", label="idle"))
    if len({trace.iteration_s for trace in traces}) > 1:
        handles.append(Patch(facecolor=_AFTER, edgecolor=_AFTER, label="ended"))
    return handles


def _draw_bars(ax: Axes, activity: str, style: _Style, bars: np.ndarray[Any, Any], dots_per_unit: float, zorder: int) -> None:
    """Draws all spans of one activity as one collection; `bars` has a row (start, end, lane row) for each."""
    start, end, row = bars.T
    if activity in BACKGROUND:
        end = np.maximum(end, start + _LEAST_DOTS / dots_per_unit)
    top, bottom = row + style.top, row + style.bottom
    corners = np.stack([np.stack([start, end, end, start], -1), np.stack([top, top, bottom, bottom], -1)], -1)
    # Edges part bars of one colour that follow one another; where bars are thin, edges would be all that is seen.
    wide = float(np.median(end - start)) * dots_per_unit >= 6
    collection = PolyCollection(
        list(corners),
        facecolors=style.fill,
        edgecolors="#FFFFFF" if wide or style.hatch else "none",
        linewidths=0.6 if wide else 0.0,
        hatch=style.hatch if wide and len(bars) <= _MOST_HATCHED else None,
        # Thin bars that were snapped to whole dots would vanish or grow by chance; unsnapped, dense ones mix their colours.
        snap=wide,
        zorder=1 + zorder / 10,
        label=activity,
    )
    ax.add_collection(collection, autolim=False)


def _draw_numbers(
    ax: Axes, spans: Sequence[tuple[str, Span]], row: dict[str, int], scale: float, dots_per_unit: float, slices: int
) -> None:
    """Writes the micro-batch's number, and that of its slice, into each bar that is wide enough for it."""
    size = 7.0
    figure = ax.get_figure(root=True)
    assert figure is not None
    digit_dots = 0.64 * size * figure.dpi / 72
    bar_dots = ax.get_window_extent().height / len(row) * (_COMPUTE_BAR[1] - _COMPUTE_BAR[0])
    if bar_dots < 1.7 * digit_dots:
        return
    middle = sum(_COMPUTE_BAR) / 2 + 0.02
    fitting = []
    for activity, span in spans:
        number = micro_batch_text(span.instruction.micro_batch, slices)  # type: ignore[union-attr,arg-type]
        if (span.end_s - span.start_s) * scale * dots_per_unit >= (len(number) + 0.8) * digit_dots:
            fitting.append((activity, span, number))
    if len(fitting) > _MOST_LABELS:
        return
    for activity, span, number in fitting:
        style = _STYLES[activity]
        centre = (span.start_s + span.end_s) / 2 * scale
        ax.text(
            centre,
            row[span.lane] + middle,
            number,
            color=style.text,
            fontsize=size,
            ha="center",
            va="center",
            zorder=5,
            clip_on=True,
            bbox={"facecolor": style.fill, "edgecolor": "none", "pad": 1.4} if style.hatch else None,
        )


# --- Predicted beside reported MFU -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MfuCell:
    """One planner's prediction beside the figure that a system reports for one cluster and model; fractions.

    `hfu_at_paper_peaks` counts recomputation and takes the publication's peak FLOP/s; `mfu` is Motley's, at true peaks. Both are
    None where the planner has no feasible plan; `note` says why.
    """

    cluster: str
    model: str
    system: str
    reported: float
    planner: str
    hfu_at_paper_peaks: float | None
    mfu: float | None
    note: str = ""


_PLANNER_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
_REPORTED, _BARS = "#303030", "#8A8A8A"
_NOTE_CHARACTERS = 165
"""What one line of the note holds at the figure's own width."""


def plot_mfu_bars(rows: Sequence[MfuCell], ax: Axes | None = None, title: str | None = None, note: str = "") -> Axes:
    """The Axes with a group of bars for each cluster and model: the reported figure, and for each planner its HFU and MFU.

    The reported bar is dark; a planner has one colour, its HFU at the publication's peaks is solid and its MFU at true peaks
    hatched. A planner without a plan has the words 'no plan' in the place of its bars. `note` is written below.
    """
    if not rows:
        raise InputError("there is nothing to plot; expected at least one cell")
    cells = list(dict.fromkeys((row.cluster, row.model) for row in rows))
    planners = list(dict.fromkeys(row.planner for row in rows))
    if ax is None:
        (ax,) = _axes(14.0, 7.0)
    by_place = {(row.cluster, row.model, row.planner): row for row in rows}
    width = 0.84 / (1 + 2 * len(planners))
    value_size = float(np.clip(width * 1200 / len(cells) / 2.6, 5.5, 9.0))
    decimals = 1 if width * 1200 / len(cells) > 30 else 0
    for x, cell in enumerate(cells):
        first = next(row for row in rows if (row.cluster, row.model) == cell)
        left = x - 0.42
        _draw_value_bar(ax, left, width, first.reported, _REPORTED, None, value_size, decimals)
        ax.text(left + 0.46 * width, 0.004, first.system, rotation=90, color="#FFFFFF", ha="center", va="bottom", fontsize=8)
        for p, planner in enumerate(planners):
            row = by_place.get((*cell, planner))
            at = left + (1 + 2 * p) * width
            if row is None:
                continue
            if row.hfu_at_paper_peaks is None and row.mfu is None:
                ax.text(at + width, 0.002, "no plan", rotation=90, ha="center", va="bottom", fontsize=8, color="#404040")
                continue
            fill = _PLANNER_COLOURS[p % len(_PLANNER_COLOURS)]
            for i, (value, hatch) in enumerate(((row.hfu_at_paper_peaks, None), (row.mfu, "////"))):
                if value is not None:
                    _draw_value_bar(ax, at + i * width, width, value, fill, hatch, value_size, decimals)
    _style_mfu_axes(ax, cells, rows, planners, title, note)
    return ax


def _draw_value_bar(
    ax: Axes, left: float, width: float, value: float, fill: str, hatch: str | None, size: float, decimals: int
) -> None:
    """One bar with its value in per cent above it; a hatched bar is white with lines of the colour."""
    face = fill if hatch is None else "#FFFFFF"
    ax.bar(left, value, width * 0.92, align="edge", facecolor=face, edgecolor=fill, hatch=hatch, linewidth=0.8)
    ax.text(left + width * 0.46, value, f"{value * 100:.{decimals}f}", ha="center", va="bottom", fontsize=size)


def _style_mfu_axes(
    ax: Axes,
    cells: Sequence[tuple[str, str]],
    rows: Sequence[MfuCell],
    planners: Sequence[str],
    title: str | None,
    note: str,
) -> None:
    """Labels, legend and note around the bars."""
    ax.set_xticks(range(len(cells)), [f"{cluster}\n{model}" for cluster, model in cells], fontsize=9)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.55, len(cells) - 0.45)
    ax.xaxis.set_minor_locator(FixedLocator([x - 0.5 for x in range(1, len(cells))]))
    ax.grid(True, axis="x", which="minor", color="#D8D8D8", linewidth=0.8)
    ax.tick_params(axis="x", which="minor", length=0)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_ylabel("share of peak FLOP/s")
    ax.grid(True, axis="y", color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    # Whose bars they are above, what they are below: legends are filled column by column.
    colours = [_PLANNER_COLOURS[p % len(_PLANNER_COLOURS)] for p in range(len(planners))]
    above = [Patch(facecolor=_REPORTED, label="reported")]
    above += [Patch(facecolor=fill, label=planner) for planner, fill in zip(planners, colours, strict=True)]
    below = [
        Patch(facecolor=_BARS, edgecolor=_BARS, label="HFU at the paper's peaks"),
        Patch(facecolor="#FFFFFF", edgecolor=_BARS, hatch="////", label="MFU at true peaks"),
    ]
    columns = max(len(above), len(below))
    empty = Patch(facecolor="none", label=" ")
    handles = [pair for both in zip_longest(above, below, fillvalue=empty) for pair in both]
    legend_lines = 2
    highest = max(value for row in rows for value in (row.reported, row.hfu_at_paper_peaks, row.mfu) if value is not None)
    ax.set_ylim(0, highest * (1.08 + 0.045 * legend_lines))
    ax.legend(handles=handles, loc="upper left", ncols=columns, facecolor="#FFFFFF", edgecolor="none", framealpha=1, fontsize=9)
    if title is not None:
        ax.set_title(title, loc="left", fontsize=12)
    if note:
        wrapped = "\n".join(textwrap.fill(line, _NOTE_CHARACTERS) for line in note.splitlines())
        ax.set_xlabel(wrapped, fontsize=9, color="#404040", loc="left")


# --- Predicted over measured times -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParityPoint:
    """A predicted and a measured iteration of one run, in seconds; `group` is its source."""

    group: str
    measured_s: float
    predicted_s: float


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
_PARITY_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)
"""Yellow is too pale for a marker on white. The numbers of colours and markers have no common divisor: 70 groups differ."""

_CLOSE, _FAR = 0.1, 2.0
"""The band of nearly right predictions, as a fraction, and the factor of the outer lines."""


def plot_parity(points: Sequence[ParityPoint], ax: Axes | None = None, title: str | None = None) -> Axes:
    """The Axes with the predicted over the measured seconds of every point, both on a logarithmic scale.

    On the line they are equal; the band around it is 10 % on either side, the dashed lines are a factor of 2. Each group has a
    marker and a colour of its own and stands in the legend with its number of points, the largest first, which is drawn first.
    Raises InputError where there is nothing to plot.
    """
    if not points:
        raise InputError("there is nothing to plot; expected at least one predicted iteration time")
    groups: dict[str, list[ParityPoint]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    alone = ax is None
    if ax is None:
        (ax,) = _axes(10.8, 8.0)
    values = [value for point in points for value in (point.measured_s, point.predicted_s)]
    ends = np.array([min(values) / 1.4, max(values) * 1.4])
    ax.fill_between(ends, ends * (1 - _CLOSE), ends * (1 + _CLOSE), color="#D9D9D9", linewidth=0, zorder=0.5)
    ax.plot(ends, ends, color="#606060", linewidth=1.0, zorder=1)
    for factor in (_FAR, 1 / _FAR):
        ax.plot(ends, ends * factor, color="#808080", linewidth=0.9, linestyle=(0, (5, 4)), zorder=1)
    ordered = sorted(groups.items(), key=lambda entry: -len(entry[1]))
    handles: list[Line2D | Patch] = []
    for i, (group, own) in enumerate(ordered):
        marker, colour = _MARKERS[i % len(_MARKERS)], _PARITY_COLOURS[i % len(_PARITY_COLOURS)]
        # Many points lie upon one another: theirs are smaller, and those of small groups are drawn last, above them.
        size = 5.5 if len(own) <= 100 else 3.8
        x, y = [p.measured_s for p in own], [p.predicted_s for p in own]
        style: dict[str, Any] = {"linestyle": "none", "marker": marker, "color": colour, "markeredgecolor": "#FFFFFF"}
        ax.plot(x, y, **style, markersize=size, markeredgewidth=0.4, zorder=2 + i / 100, label=group)
        handles.append(Line2D([], [], **style, markersize=6.5, markeredgewidth=0.4, label=f"{group} ({len(own)})"))
    _style_parity_axes(ax, ends, title)
    handles.append(Line2D([], [], color="#606060", linewidth=1.0, label="predicted = measured"))
    handles.append(Patch(facecolor="#D9D9D9", label=f"within {_CLOSE * 100:.0f} %"))
    handles.append(Line2D([], [], color="#808080", linewidth=0.9, linestyle=(0, (5, 4)), label=f"a factor of {_FAR:g}"))
    if alone:
        figure = ax.get_figure(root=True)
        assert figure is not None
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    else:
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, borderaxespad=0)
    return ax


_TICKS = ((100.0, (1.0,)), (8.0, (1.0, 2.0, 5.0)), (0.0, tuple(map(float, range(1, 10)))))
"""By how far the ends of a scale are apart at least: what its ticks are multiples of, by powers of ten."""


def _style_parity_axes(ax: Axes, ends: np.ndarray[Any, Any], title: str | None) -> None:
    """Equal logarithmic scales with plain numbers, grid and labels."""
    ax.set_aspect("equal", adjustable="box")
    ax.set_xlabel("measured time of an iteration, in s")
    ax.set_ylabel("predicted time of an iteration, in s")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    # Where one or two powers of ten say too little, others have labels, too.
    subs = next((subs for least, subs in _TICKS if ends[1] / ends[0] >= least))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=subs, numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.grid(True, which="major", color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if title:
        ax.set_title(title, loc="left", fontsize=12)
