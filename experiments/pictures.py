"""Picture files: plots drawn into them. Apart from the commands, so that only those that draw import matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import (
    FORMATS,
    MfuCell,
    ParityPoint,
    plot_mfu_bars,
    plot_parity,
    plot_plan,
    plot_timeline,
    plot_two_timelines,
    save_figure,
)
from sim.spec.cluster import Cluster
from sim.spec.plan import Plan
from sim.spec.reading import InputError
from sim.spec.trace import Trace


def check_picture(flag: str, path: str | Path) -> None:
    """Nothing. Raises InputError where the name's ending is that of no picture that can be drawn."""
    if Path(path).suffix.lower().lstrip(".") not in FORMATS:
        accepted = ", ".join(f".{known}" for known in FORMATS)
        raise InputError(f"{flag}: a picture's name ends in one of {accepted}, but got {str(path)!r}")


def draw_plan(
    plan: Plan, cluster: Cluster, peak_bytes: Mapping[str, int], path: str | Path, title: str | None = None, replace: bool = False
) -> Path | None:
    """Where the earlier picture is kept now, if any and unless `replace`. Draws which GPUs hold which layers into a file."""
    return _save(plot_plan(plan, cluster, peak_bytes, title=title)[0], path, replace)


def draw_timeline(
    trace: Trace, cluster: Cluster, path: str | Path, title: str | None = None, replace: bool = False
) -> Path | None:
    """Where the earlier picture is kept now, if any and unless `replace`. Draws the timeline of a trace into a file."""
    return _save(plot_timeline(trace, title=title, cluster=cluster), path, replace)


def draw_two_timelines(
    upper: Trace, lower: Trace, cluster: Cluster, path: str | Path, titles: tuple[str, str], replace: bool = False
) -> Path | None:
    """Where the earlier picture is kept now, if any and unless `replace`. Draws two traces of the same lanes into a file."""
    return _save(plot_two_timelines(upper, lower, titles, cluster)[0], path, replace)


def draw_mfu_bars(rows: Sequence[MfuCell], path: str | Path, title: str, note: str, replace: bool = False) -> Path | None:
    """Where the earlier picture is kept now, if any and unless `replace`. Draws predicted beside reported MFU into a file."""
    return _save(plot_mfu_bars(rows, title=title, note=note), path, replace)


def draw_parity(points: Sequence[ParityPoint], path: str | Path, title: str, replace: bool = False) -> Path | None:
    """Where the earlier picture is kept now, if any and unless `replace`. Draws predicted over measured times into a file."""
    return _save(plot_parity(points, title=title), path, replace)


def _save(axes: Axes, path: str | Path, replace: bool) -> Path | None:
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    return save_figure(figure, path, replace)
