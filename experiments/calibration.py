"""A calibration told: tables for people, a file for programs, and one page with its plots."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from experiments.assumptions import read_assumptions
from experiments.fidelity import unpublished
from experiments.published import Modelled, modelled
from experiments.published_rows import read_runs
from experiments.tables import per_cent, seconds
from sim.calibrate import Calibrated, Elsewhere, Prediction, Told
from sim.spec.cluster import Cluster
from sim.spec.compile import instruction_estimate
from sim.spec.reading import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BITS = 8e-9

USELESS = 2.0
"""An interval wider than so many times what is predicted tells nothing."""

MOST_ELSEWHERE = 100
"""The most runs of a table that a fit looks at, those of the smallest programs: a kind's speed is few constants, and each run
costs time."""


def runs_elsewhere(path: str | Path, cluster: Cluster) -> list[Elsewhere]:
    """The runs of a table, as `published.read_runs` reads it, whose plans are told whole and whose GPUs are kinds of a cluster.

    Raises InputError where there are none, and as `read_runs` does.
    """
    kinds = {node.gpu.name for node in cluster.nodes}
    rows, known, found = read_runs(path), read_assumptions(), []
    for row in rows:
        world = modelled(row, known)
        if not isinstance(world, Modelled) or unpublished(world) or not row.iter_time_s:
            continue
        if kinds.issuperset(node.gpu.name for node in world.cluster.nodes):
            found.append(Elsewhere(str(path), row.source_key, world.plan, world.cluster, row.iter_time_s))
    if not found:
        raise InputError(
            f"{path}: none of its {len(rows)} runs tells a whole plan and its iter_time_s on the kinds of {cluster.name!r}: "
            f"{', '.join(sorted(kinds))}"
        )
    return sorted(found, key=lambda one: instruction_estimate(one.plan))[:MOST_ELSEWHERE]


def figure(told: Told, value: float) -> str:
    """A constant's value in the unit that people read."""
    if told.unit == "s":
        return seconds(value) if value else "0 s"
    if told.unit == "B/s":
        return f"{value * _BITS:.4g} Gbit/s" if value * _BITS >= 0.1 else f"{value * _BITS * 1e3:.4g} Mbit/s"
    return f"{value:.4g}"


def error_rows(found: Calibrated) -> list[tuple[str, str, str]]:
    """What is told of the errors: a heading, before, and after."""
    before, after = found.errors_before, found.errors_after
    if before is None or after is None:
        return []

    def median(errors: object) -> str:
        return f"{per_cent(errors.median, 1)} ({per_cent(errors.median_low, 1)} to {per_cent(errors.median_high, 1)})"  # type: ignore[attr-defined]

    return [
        ("median (95 % of bootstrap)", median(before), median(after)),
        ("90th percentile", per_cent(before.p90, 1), per_cent(after.p90, 1)),
        ("largest", per_cent(before.largest, 1), per_cent(after.largest, 1)),
    ]


def sentences(found: Calibrated) -> list[str]:
    """What else is told of plans held out: their order, the spread of runs, the interval."""
    lines = []
    if found.tau is not None:
        apart = "" if found.spread is None else " that differ by more than twice the run-to-run spread"
        lines.append(f"order: Kendall's tau {found.tau:.3f} over {found.pairs} pairs{apart}")
    if found.best_rank is not None:
        lines.append(f"the measured best of the plans is number {found.best_rank} as predicted")
    if found.spread is not None:
        lines.append(f"from run to run of one plan the iteration differs by {per_cent(found.spread, 2)} (standard deviation)")
    if (calibration := found.cluster.calibration) is not None:
        low, high = f"{calibration.low * 100:+.1f}", f"{calibration.high * 100:+.1f}"
        lines.append(f"{calibration.coverage:.0%} of iterations are expected within {low} % and {high} % of what is predicted")
        if calibration.high - calibration.low > USELESS:
            lines.append("predictions tell little at that: take more runs, longer ones, and machines that do nothing else")
    if found.elsewhere is not None:
        before, after = (per_cent(errors.median, 1) for errors in found.elsewhere)
        lines.append(f"runs elsewhere, on which it was fitted too: median error {before} before, {after} after")
    return lines


def warnings(found: Calibrated) -> list[str]:
    """What to be warned of, one line each."""
    return [
        f"{told.name} is at a bound, {figure(told, told.after)}: the file is wrong in something that is not fitted"
        for told in found.constants
        if told.at_bound
    ]


def errors_table(found: Calibrated) -> Table:
    """Errors of the iteration's prediction, before and after."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("|predicted / measured - 1|", overflow="fold")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in error_rows(found):
        table.add_row(*row)
    return table


def constants_table(found: Calibrated) -> Table:
    """The constants that the data tell, before and after."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("constant", overflow="fold")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for told in found.constants:
        if told.told:
            table.add_row(told.name, figure(told, told.before), figure(told, told.after), _change(told))
    return table


def taken_line(found: Calibrated) -> str | None:
    """What a bench of a device gave, where nothing was fitted to runs, on one line; None where that is nothing."""
    names = []
    kinds = {node.gpu.name: node.gpu for node in found.before.nodes}
    for kind in {node.gpu.name: node.gpu for node in found.cluster.nodes}.values():
        pairs = ((kind, kinds.get(kind.name, kind)), (kind.efficiency, kinds.get(kind.name, kind).efficiency))
        names += [f"{name} of {kind.name}" for after, before in pairs for name in _unlike(after, before)]
    names += [f"stack.{name}" for name in _unlike(found.cluster.stack, found.before.stack)]
    return f"taken from the bench: {', '.join(names)}" if names else None


def _unlike(one: Any, other: Any) -> list[str]:
    """The fields in which two records differ, but for words about them and records within."""
    passed_over = ("name", "source", "efficiency", "aliases")
    return [f.name for f in fields(one) if f.name not in passed_over and getattr(one, f.name) != getattr(other, f.name)]


def not_told_line(found: Calibrated) -> str | None:
    """The constants that the data do not tell, on one line; None where they tell all."""
    names = [told.name for told in found.constants if not told.told]
    return f"not told by these runs, left as in the file: {', '.join(names)}" if names else None


def _change(told: Told) -> str:
    return f"{(told.after / told.before - 1) * 100:+.1f} %" if told.before > 0 else "-"


def calibration_json(found: Calibrated) -> str:
    """The text of the file of a calibration: errors before and after, every plan held out, every constant."""

    def errors(name: str) -> object:
        some = getattr(found, name)
        return None if some is None else asdict(some)

    def told(prediction: Prediction) -> dict[str, object]:
        return {
            "runs": list(prediction.observation.names),
            "measured_s": prediction.measured_s,
            "before_s": prediction.before_s,
            "after_s": prediction.after_s,
        }

    calibration = found.cluster.calibration
    facts = {
        "cluster": found.cluster.name,
        "held_out": found.how,
        "errors_before": errors("errors_before"),
        "errors_after": errors("errors_after"),
        "errors_elsewhere": None if found.elsewhere is None else [asdict(errors) for errors in found.elsewhere],
        "run_spread": found.spread,
        "kendall_tau": found.tau,
        "pairs": found.pairs,
        "best_rank": found.best_rank,
        "interval": None
        if calibration is None
        else {"coverage": calibration.coverage, "low": calibration.low, "high": calibration.high},
        "constants": [
            {key: value if value == value else None for key, value in asdict(one).items()}  # a value may be unknown
            for one in found.constants
        ],
        "plans": [told(one) for one in found.predictions],
    }
    return json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


# --- Pictures --------------------------------------------------------------------------------------------------------


def parity_axes(predictions: Sequence[Prediction], title: str | None = None) -> Axes:
    """Predicted over measured times of the plans held out, before and after."""
    from experiments.plots import ParityPoint, plot_parity

    points = [ParityPoint("before", one.measured_s, one.before_s) for one in predictions]
    points += [ParityPoint("after", one.measured_s, one.after_s) for one in predictions]
    return plot_parity(points, title=title)


def calibration_page(found: Calibrated) -> str:
    """The text of an HTML file that holds all: errors, the plot, the constants, every plan."""
    from matplotlib.figure import Figure

    from experiments.pages import Cell, Note, Part, Section, page, picture
    from experiments.pages import Table as Rows

    parts: list[Part] = []
    if found.predictions:
        drawn = parity_axes(found.predictions, found.how).get_figure(root=True)
        assert isinstance(drawn, Figure)
        parts = [
            Rows("errors", ("|predicted / measured - 1|", "before", "after"), error_rows(found)),
            picture(drawn, "Predicted over measured iteration times of the plans held out, before and after the calibration."),
        ]
    parts += [Note(line) for line in (*sentences(found), *warnings(found))]
    constants = [
        (
            told.name,
            Cell(figure(told, told.before), told.before if math.isfinite(told.before) else None),
            Cell(figure(told, told.after), told.after if math.isfinite(told.after) else None),
            _change(told),
            Cell(f"{told.left:.2f}", told.left),
            Cell("yes", tone="good") if told.told else "no, kept",
        )
        for told in found.constants
    ]
    plans = [
        (
            ", ".join(one.observation.names),
            Cell(seconds(one.measured_s), one.measured_s),
            Cell(seconds(one.before_s), one.before_s),
            Cell(seconds(one.after_s), one.after_s),
            f"{(one.before_s / one.measured_s - 1) * 100:+.1f}",
            f"{(one.after_s / one.measured_s - 1) * 100:+.1f}",
        )
        for one in found.predictions
    ]
    fitted = found.cluster.calibration.fitted_on if found.cluster.calibration is not None else ()
    sections = [
        Section("Errors", parts, f"Of the iteration time: {found.how}."),
        Section(
            "Constants",
            [Rows("constants", ("constant", "before", "after", "change", "left of prior", "told by the data"), constants)],
            "Left of prior: the standard deviation that the data leave, in the prior's. A constant with more than half of it is "
            "not told, and kept.",
        ),
        Section(
            "Plans held out",
            [Rows("plans", ("runs", "measured", "before", "after", "error before, %", "error after, %"), plans)] if plans else [],
        ),
        Section("Fitted on", [Note(", ".join(fitted))] if fitted else []),
    ]
    origin = found.cluster.calibration.origin if found.cluster.calibration is not None else "measured"
    return page(f"Calibration of {found.cluster.name}", sections, f"{len(found.predictions)} plans, {origin} runs")
