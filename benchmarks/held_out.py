"""Fits the constants three times with a part of the published runs held out, and tells by how much these are missed.

    python benchmarks/held_out.py [--fits results/held-out] [--markdown docs/fidelity.md]

Half of each source's runs by lot, the runs on half of each source's numbers of nodes, and all runs of three sources in ten: each
is `motley validate --fit --seed 0`, takes as long as a fit of all runs, and leaves its constants and its JSON in the folder of
`--fits`. A fit whose JSON is there is not made again. Writes benchmarks/results/held-out.txt; `--markdown` puts the table of
errors between its marks in that file, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run import machine

from experiments.agreement import MEMORY
from experiments.tables import cells_markdown
from sim.spec.reading import read_text, write_file

HERE = Path(__file__).parent
BEGIN, END = "<!-- begin: held out -->", "<!-- end: held out -->"
FITS = {"run": 0.5, "nodes": 0.5, "source": 0.3}
"""What is drawn by lot, and what share of it is held out."""

FIGURES = {
    "vtrain_single": "5 mean",
    "vtrain_multi": "8 mean",
    "korth": "4 mean, with sc21",
    "sc21": "4 mean, with korth",
    "ultrascale": "12 median",
    "mosaic": "8 median",
    "torchtitan": "8 median",
    "dgxc": "8 median",
    "zerobubble": "6 mean",
    "sailor_gh": "6 mean",
    "sailor_het": "6 mean",
    "amp_het": "15 mean",
    "amp_homo": "15 mean",
}
"""The errors aimed at, in per cent; these sources come first."""

TAU = 0.9
TAUS = {"ultrascale": 0.8}
"""The rank correlation aimed at in tables that vary the parallelisation, and where another is."""


def fitted(by: str, folder: Path) -> Mapping[str, Any]:
    """What `motley validate --fit` told of runs that it did not see; from its file, where that is there already."""
    told = folder / f"{by}.json"
    if not told.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        files = ["--out", str(folder / f"{by}.yaml"), "--json", str(told), "--plot", str(folder / f"{by}.png")]
        drawn = ["--holdout", str(FITS[by]), "--holdout-by", by, "--seed", "0"]
        command = [sys.executable, "-m", "experiments", "validate", "--fit", *drawn, *files]
        if code := subprocess.run(command, cwd=HERE.parent, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"held_out.py: the fit held out by {by} ended with exit code {code}; those before it are kept in {folder}")
    found: Mapping[str, Any] = json.loads(told.read_text())
    return found


def errors_table(fits: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row per source of which runs were held out, and one of all: how many were compared, and by how much they are missed."""
    sources = list(dict.fromkeys([*FIGURES, *(source for told in fits.values() for source in told["sources"])]))
    rows = [["source", "aimed at, %", *(f"by {by}: {what}" for by in fits for what in ("runs", "mean %", "median %"))]]
    for source in (*sources, "all"):
        row = [source, FIGURES.get(source, "-")]
        for told in fits.values():
            row += _errors(told["overall"] if source == "all" else told["sources"].get(source))
        if any(cell != "-" for cell in row[2:]):
            rows.append(row)
    return rows


def _errors(found: Mapping[str, Any] | None) -> list[str]:
    """Count, mean and median of a summary's absolute errors of time."""
    if found is None or not _timed(found):
        return ["-"] * 3
    errors = (found["mean_absolute_relative_error"], found["median_absolute_relative_error"])
    return [str(found["count"]), *(f"{100 * error:.1f}" for error in errors)]


def _timed(found: Mapping[str, Any]) -> bool:
    """Whether a summary is of times, or of rates that tell them; where there are none it is of memory."""
    return bool(found["count"]) and found["quantity"] != MEMORY


def others(fits: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row per other figure of a source: what it is, and what it is by each fit; those that no fit tells are left out."""
    rows = [["source", "figure", "aimed at", *(f"by {by}" for by in fits)]]
    for source in dict.fromkeys(source for told in fits.values() for source in told["sources"]):
        taus, memory, ran, failed = [], [], [], []
        for told in fits.values():
            found, checks = told["sources"].get(source, {}), told["out_of_memory"].get(source, {})
            peak = found.get("quantities", {}).get(MEMORY)
            varied = any(table["varies_parallelisation"] for table in found.get("tables", ()))
            taus.append(_rounded(found["kendall_tau"] if varied and _timed(found) else None, 1, 3))
            memory.append(_rounded(peak and peak["median_absolute_relative_error"], 100, 1))
            ran.append(_rounded(checks.get("ran", {}).get("share"), 100, 1))
            failed.append(_rounded(checks.get("out_of_memory", {}).get("share"), 100, 1))
        for figure, aim, cells in (
            ("tau inside tables of several plans", f"{TAUS.get(source, TAU)}", taus),
            ("peak memory, median %", "8" if source == "ultrascale" else "-", memory),
            ("said to fit, of those that ran, %", "90", ran),
            ("said not to, of those out of memory, %", "90", failed),
        ):
            if any(cell != "-" for cell in cells):
                rows.append([source, figure, aim, *cells])
    return rows


def _rounded(value: float | None, times: float, digits: int) -> str:
    return "-" if value is None else f"{times * value:.{digits}f}"


def _text(rows: list[list[str]]) -> str:
    """The rows in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _around(path: Path) -> tuple[str, str] | None:
    """What stands before and after the marks in a file, or None where they are not there."""
    before, begin, rest = read_text(path).partition(BEGIN)
    _, end, after = rest.partition(END)
    return (before, after) if begin and end else None


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="By how much runs are missed that no fit saw.")
    parser.add_argument("--fits", type=Path, default=HERE.parent / "results" / "held-out", help="folder of the fits")
    parser.add_argument("--markdown", type=Path, help="a file with marks between which the table of errors goes")
    asked = parser.parse_args()
    around = None if asked.markdown is None else _around(asked.markdown)
    if asked.markdown is not None and around is None:
        parser.error(f"--markdown: {asked.markdown} has no lines {BEGIN!r} and {END!r} for the table to go between")
    try:
        fits = {by: fitted(by, asked.fits) for by in FITS}
    except KeyboardInterrupt:
        sys.exit(130)  # the fit has told it
    errors = errors_table(fits)
    drawn = ", ".join(f"{share:g} by {by}" for by, share in FITS.items())
    head = f"Absolute errors of times of runs that a fit has not seen (validate --fit --seed 0; held out {drawn})\n{machine()}\n"
    text = "\n".join((head, _text(errors), _text(others(fits))))
    print(text, end="")
    write_file(HERE / "results" / "held-out.txt", text)
    if around is not None:
        before, after = around
        write_file(asked.markdown, f"{before}{BEGIN}\n\n{cells_markdown('', errors)}\n{END}{after}")


if __name__ == "__main__":
    main()
