"""The picture of a comparison: how good the best plan of each planner is after so many seconds of search.

One panel per cluster. Better is what takes less by the objective: time, dollars or energy. A line is the median over a planner's
seeds and begins when more than half of them have a plan; the band around it goes from the worst to the best of them, and the dot
at its end is where the last of its searches ended. A dashed line is a published plan, a dotted one that does not fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from experiments.comparison import Outcome
from experiments.plots import BLACK, BLUE, DOTS_PER_INCH, GREEN, ORANGE, PURPLE, SKY, VERMILLION, save_figure
from sim.spec.reading import InputError

_Dashes: TypeAlias = tuple[float, tuple[float, ...]]
_STYLES: tuple[tuple[str, _Dashes], ...] = tuple(
    (colour, (0, dashes)) for dashes in ((), (4, 2), (1, 1)) for colour in (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
)
"""Colour and dashes, one pair for each planner of a picture."""
_PUBLISHED = "#606060"
_MEASURED = {"throughput": "iteration", "cost": "cost per token", "energy": "energy per token"}
_COLUMNS, _PANEL_INCH, _LEGEND_INCH = 3, (4.6, 3.5), 0.26


@dataclass(frozen=True)
class Curve:
    """The searches of one planner on one cluster: for each seed the steps (seconds, best value so far), and its end."""

    planner: str
    histories: tuple[tuple[tuple[float, float], ...], ...]
    ends_s: tuple[float, ...]


@dataclass(frozen=True)
class Level:
    """The value of a published plan, and whether the plan fits in memory."""

    name: str
    value: float
    fits: bool = True


@dataclass(frozen=True)
class Panel:
    """What was found on one cluster."""

    title: str
    curves: tuple[Curve, ...]
    levels: tuple[Level, ...] = ()

    @property
    def best(self) -> float:
        """The least value of all that fit; infinite where nothing was found."""
        found = [value for curve in self.curves for history in curve.histories for _, value in history]
        return min([*found, *(level.value for level in self.levels if level.fits)], default=float("inf"))


def panel(title: str, outcomes: Sequence[Outcome]) -> Panel:
    """The panel of the outcomes of one job on one cluster."""
    curves, levels = [], []
    for name in dict.fromkeys(outcome.cell.planner for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.cell.planner == name]
        searches = [outcome for outcome in own if outcome.searched and outcome.result is not None]
        if searches:
            ends_s = tuple(outcome.result.seconds for outcome in searches if outcome.result is not None)
            steps = tuple(tuple((step.seconds, getattr(step, o.cell.measure)) for step in o.history) for o in searches)
            curves.append(Curve(name, steps, ends_s))
        levels += [Level(name, o.value, o.fits) for o in own if not o.searched and o.value is not None]
    return Panel(title, tuple(curves), tuple(levels))


def draw_quality(
    panels: Sequence[Panel], path: str | Path, title: str | None = None, replace: bool = False, objective: str = "throughput"
) -> Path | None:
    """Where the earlier picture is kept now, if any and unless `replace`. Draws one panel per cluster into a file.

    Raises InputError where there is no panel.
    """
    if not panels:
        raise InputError("there is nothing to plot; expected at least one cluster")
    planners = list(dict.fromkeys(curve.planner for shown in panels for curve in shown.curves))
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    handles = _handles(planners, any(shown.levels for shown in panels))
    per_line = max(2, 2 * columns)
    height_inch = rows * _PANEL_INCH[1] + _LEGEND_INCH * (1 + -(-len(handles) // per_line)) + (0.3 if title else 0.0)
    width_inch = max(6.4, columns * _PANEL_INCH[0])
    figure = Figure(figsize=(width_inch, height_inch), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(rows, columns, squeeze=False)
    for shown, ax in zip(panels, places.flat, strict=False):
        plot_quality(shown, ax, planners)
    for ax in places.flat[len(panels) :]:
        ax.set_axis_off()
    for row in places:
        row[0].set_ylabel(f"quality: best known {_MEASURED[objective]}\n/ best so far", fontsize=9)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.legend(handles=handles, loc="outside lower center", ncols=per_line, frameon=False, fontsize=9)
    return save_figure(figure, path, replace)


def plot_quality(shown: Panel, ax: Axes, planners: Sequence[str]) -> Axes:
    """The Axes with the curves of a panel: quality, which is 100 % for the best plan of all, over seconds of search.

    `planners` decides which planner has which colour.
    """
    ends = [end_s for curve in shown.curves for end_s in curve.ends_s]
    begins = [history[0][0] for curve in shown.curves for history in curve.histories if history]
    for curve in shown.curves:
        colour, dashes = _STYLES[planners.index(curve.planner) % len(_STYLES)]
        _draw_curve(ax, curve, shown.best, colour, dashes)
    for level in shown.levels:
        quality = shown.best / level.value
        ax.axhline(quality, color=_PUBLISHED, linewidth=0.9, linestyle=(0, (6, 3)) if level.fits else (0, (1, 2)), zorder=1)
    ax.set_xscale("log")
    if begins:
        room = 4.0 if shown.levels else 1.5  # for the names of the published plans
        ax.set_xlim(min(begins) / room, max(ends) * 1.8)
    highest = max([1.0, *(shown.best / level.value for level in shown.levels)]) if shown.best < np.inf else 1.0
    ax.set_ylim(0, 1.06 * highest)
    _label_levels(ax, shown)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.grid(True, color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_xlabel("seconds of search", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.set_title(shown.title, loc="left", fontsize=9)
    return ax


def _draw_curve(ax: Axes, curve: Curve, best: float, colour: str, dashes: _Dashes) -> None:
    """The median over the seeds, the band between them, and the dot at the end."""
    times = sorted({seconds for history in curve.histories for seconds, _ in history})
    if not times:
        return
    end_s = max([*curve.ends_s, times[-1]])
    at = np.array([*times, end_s])
    quality = np.array([[_quality(history, t, best) for t in at] for history in curve.histories])
    reached = np.mean(quality > 0, axis=0) > 0.5  # before that, the median is of nothing
    at, quality = at[reached], quality[:, reached]
    if not at.size:
        return
    middle = np.median(quality, axis=0)
    if len(curve.histories) > 1:
        band: dict[str, Any] = {"step": "post", "color": colour, "alpha": 0.15, "linewidth": 0}
        ax.fill_between(at, quality.min(axis=0), quality.max(axis=0), **band)
    ax.step(at, middle, where="post", color=colour, linestyle=dashes, linewidth=1.6, zorder=3)
    ax.plot(at[-1], middle[-1], "o", color=colour, markersize=4.5, zorder=4)


def _quality(history: Sequence[tuple[float, float]], seconds: float, best: float) -> float:
    """The quality of the best plan of one search after so many seconds; 0 before the first."""
    reached = [value for at, value in history if at <= seconds]
    return best / reached[-1] if reached else 0.0


def _label_levels(ax: Axes, shown: Panel) -> None:
    """The names of the published plans at their lines, moved apart where they would overlap."""
    low, high = ax.get_ylim()
    levels = sorted(shown.levels, key=lambda level: -level.value)
    heights = spread([shown.best / level.value for level in levels], 0.05 * (high - low))
    for level, y in zip(levels, heights, strict=True):
        name = level.name if level.fits else f"{level.name} (memory ignored)"
        style: dict[str, Any] = {"fontsize": 7, "color": _PUBLISHED, "ha": "left", "va": "center", "zorder": 5}
        box = {"facecolor": "#FFFFFF", "edgecolor": "none", "alpha": 0.85, "pad": 0.6}
        ax.text(0.012, y, name, transform=ax.get_yaxis_transform(), bbox=box, **style)


def spread(wanted: Sequence[float], least: float) -> list[float]:
    """Heights as near to the wanted ones (ascending) as can be, each at least so much above the one before."""
    blocks: list[list[float]] = []  # of each, what its members would want, were they all at one height
    for i, value in enumerate(wanted):
        blocks.append([value - i * least])
        while len(blocks) > 1 and float(np.mean(blocks[-2])) > float(np.mean(blocks[-1])):
            last = blocks.pop()
            blocks[-1] += last
    flat = [float(np.mean(block)) for block in blocks for _ in block]
    return [height + i * least for i, height in enumerate(flat)]


def _handles(planners: Sequence[str], with_levels: bool) -> list[Line2D]:
    """The legend: one line per planner, and one for published plans."""
    handles = []
    for i, name in enumerate(planners):
        colour, dashes = _STYLES[i % len(_STYLES)]
        handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=1.6, label=name))
    if with_levels:
        handles.append(Line2D([], [], color=_PUBLISHED, linewidth=0.9, linestyle=(0, (6, 3)), label="published plan"))
    return handles
