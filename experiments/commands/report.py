"""`motley report`: one page of all results in a folder."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Annotated

import typer

from experiments.commands.options import read_clusters
from experiments.output import outputs
from experiments.progress import count_progress
from sim.spec.reading import InputError

Results = Annotated[
    list[Path], typer.Argument(metavar="DIR|FILE...", help="Folders of results, or single files.", show_default=False)
]
PageFile = Annotated[str, typer.Option("--out", metavar="FILE", help="The page to write, HTML; '-' is standard output.")]
ClusterFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--cluster",
        "--clusters",
        metavar="FILE",
        help="A cluster of the runs, YAML, for capacities and timelines; the flag several times for several. "
        "Those that lie in the folders are found.",
        show_default=False,
    ),
]
Title = Annotated[str | None, typer.Option("--title", metavar="TEXT", help="The page's heading.", show_default=False)]


def report(results: Results, out: PageFile = "report.html", clusters: ClusterFiles = None, title: Title = None) -> None:
    """Write one HTML page of all results: tables, plans, timelines, MFU, memory.

    Reads what `sweep`, `compare`, `plan`, `simulate`, `run` and `validate`
    leave: results.csv or .parquet, history.csv, reports, plans and traces.
    The page holds all it needs, and asks the network for nothing. Where a
    plan and its cluster are known but no trace, the best runs are simulated.

    Example:

      motley report results/ --out report.html
    """
    from experiments.findings import findings, simulate_missing
    from experiments.report import MOST_SIMULATED, by_merit, report_page  # jinja2, which only this needs

    read = clusters or []
    files = outputs({"--out": out}, inputs=[*(path for path in results if path.is_file()), *read])
    if Path(out).suffix.lower() not in ("", ".html", ".htm") and out != "-":
        raise InputError(f"--out: a page's name ends in .html, but got {out!r}")
    found = findings(results, read_clusters(read))
    ordered = by_merit(found.runs)
    with count_progress("runs prepared", len(ordered)) as progress:
        remarks = simulate_missing(ordered, MOST_SIMULATED, progress)
    shown = title or f"Motley: {', '.join(path.name or str(path) for path in results[:3])}{', ...' if len(results) > 3 else ''}"
    files.write("--out", report_page(found, shown, remarks))
    passed = [str(path) for path in found.passed_over]
    named = f": {', '.join(passed[:4])}{' and more' if len(passed) > 4 else ''}" if passed else ""
    files.say(f"{_counted(found.runs, 'run')} of {_counted(found.read, 'file')}; {_counted(passed, 'file')} passed over{named}")
    files.finish()


def _counted(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'s' if len(things) != 1 else ''}"
