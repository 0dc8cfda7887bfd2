"""`motley sweep`: executes many runs, each one row, and continues where it was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from experiments.commands.options import Seed, budget_s, folder, whole_number
from experiments.compilation import compile_first
from experiments.exits import INTERRUPTED, NO_ANSWER, tell_error
from experiments.journal import CSV, JOURNAL, PARQUET, PLANS, Head, Journal, tables_there, write_tables
from experiments.output import Outputs, check_folder, outputs
from experiments.progress import count_progress
from experiments.sweep import COLUMNS, Row, Run, named, with_added, wrong_column
from experiments.sweep import sweep as run_sweep
from experiments.sweep_files import read_sweep
from experiments.tables import seconds
from experiments.workers import Workers

SweepFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="The sweep: a grid in YAML, or a Python file with a function runs().", show_default=False
    ),
]
Folder = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        parser=folder,
        help="Write the rows and plans there. What is stopped continues there.",
        show_default=False,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--on", metavar="ray://HOST:PORT", help="Execute the runs on a Ray cluster, which has Python as here.", show_default=False
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        metavar="N",
        parser=whole_number(1),
        help="Runs at one time; by default one per core, or per CPU of the Ray cluster.",
        show_default=False,
    ),
]
RunBudget = Annotated[
    str | None,
    typer.Option("--budget", metavar="TIME", help="How long a search may take, in the place of its own.", show_default=False),
]

INPUTS = (
    "cluster",
    "stack",
    "model",
    "sequence_length",
    "global_batch",
    "precision",
    "gradient_precision",
    "optimizer",
    "planner",
    "schedule",
    "judge",
    "jitter",
    "seed",
)
"""The columns whose values the table for people tells apart where they vary, besides the labels."""
MOST_VALUES = 12
"""A column with more values than these is left out of the table."""


def sweep(
    file: SweepFile,
    out: Folder,
    seed: Seed = 0,
    on: Ray = None,
    processes: Processes = None,
    budget: RunBudget = None,
) -> None:
    """Execute many runs: searches for plans, or given plans, over a grid.

    A run is one row, with all its inputs and results, or the error that
    ended it. --out holds journal.jsonl, which grows while runs finish,
    plans/, and at the end results.parquet and results.csv. A sweep that was
    stopped, however it was, goes on with the same command and repeats
    nothing. --seed is added to the seeds of the runs. Exit code 1: no run
    has a feasible plan. See docs/sweeps.md.

    Example:

      motley sweep examples/sweeps/bandwidth-vs-mfu.yaml \\
        --out results/bandwidth --seed 0
    """
    listed, behind = read_sweep(file, seed, budget_s(budget) if budget is not None else None)
    carry_out(file.name, listed, out, Workers(processes, on), [file, *behind])


def carry_out(
    name: str,
    listed: Sequence[Run],
    out: Path,
    workers: Workers,
    inputs: Iterable[Path] = (),
    also: Sequence[str] = (),
    then: Callable[[Sequence[Row], Outputs], None] | None = None,
) -> None:
    """Nothing; executes the runs of a sweep that the folder does not have yet, writes its tables, and prints what came of it.

    `also` names more files of the folder, which `then` writes once the rows are complete. Raises InputError, and typer.Exit where
    it was interrupted or no run has a feasible plan.
    """
    runs = named(listed)
    check_folder("--out", out)
    check_folder("--out", out / PLANS)
    files = outputs({f"--out ({file})": out / file for file in (JOURNAL, PARQUET, CSV, *also)}, inputs)
    with Journal(out, Head(name, tuple(runs)), wrong_column, with_added) as journal:
        earlier = len(journal.rows)
        lost = [digest for digest, row in journal.rows.items() if row["plan"] is not None and not (out / row["plan"]).is_file()]
        for digest in lost:
            del journal.rows[digest]
        again = f"; {len(lost):,} of them again, whose plans are not in {out / PLANS} any more" if lost else ""
        if earlier:
            files.say(f"continues in {out}: {earlier:,} of {len(runs):,} runs were finished before{again}\n")
        earlier -= len(lost)
        interrupted = False
        if earlier < len(runs):
            compile_first(*{name for run in runs.values() for name in (run.planner, run.judge)})
            with count_progress(f"{len(runs):,} runs", len(runs)) as progress:
                for _ in range(earlier):
                    progress()
                interrupted = run_sweep(runs, journal, workers, progress)
        rows = [journal.rows[digest] for digest in runs if digest in journal.rows]
        if len(rows) == len(runs) and (earlier < len(runs) or not tables_there(out)):
            for path, kept in write_tables(out, rows, COLUMNS):
                files.tell(path, kept)
    if interrupted:
        tell_error(f"interrupted: {len(rows):,} of {len(runs):,} runs are finished; the same command continues")
        raise typer.Exit(INTERRUPTED)
    _show(rows, files)
    if then is not None:
        then(rows, files)
    files.finish()
    if not any(row["iteration_s"] is not None for row in rows):
        tell_error(f"no run has a feasible plan: {_why_not(rows[0])}")
        raise typer.Exit(NO_ANSWER)


def _why_not(row: Row) -> str | None:
    """Why a run has no feasible plan; None where it has one."""
    reasons: list[str | None] = [row["error"], row["refusal"], row["infeasible"]]
    return next((reason for reason in reasons if reason is not None), None)


def _show(rows: Sequence[Row], files: Outputs) -> None:
    """Nothing; prints how the runs ended, and medians over those that have each value of what varies."""
    failed = [row for row in rows if row["error"] is not None]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("", "", "runs", "feasible", "failed", "iteration", "MFU %"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    _add(table, "all", "", rows)
    for name, values in _varying(rows).items():
        for value in values:
            _add(
                table,
                "" if value != values[0] else name,
                _shown(name, value),
                [row for row in rows if row.get(name) == value],
            )
    files.console.print(Group(Text(f"{len(rows):,} runs; of those with a plan, medians", style="bold"), table))
    files.console.print()
    if failed:
        tell_error(f"warning: {len(failed):,} of {len(rows):,} runs failed, the first with: {failed[0]['error']}")


def _shown(name: str, value: Any) -> str:
    """A value of a column as people read it."""
    return "-" if value is None else f"{100 * value:g} %" if name == "jitter" else str(value)


def _varying(rows: Sequence[Row]) -> Mapping[str, Sequence[Any]]:
    """The values of the inputs and labels that are not the same in all rows, nor too many to show."""
    labels = [name for row in rows for name in row if name not in COLUMNS]
    found = {name: list(dict.fromkeys(row.get(name) for row in rows)) for name in dict.fromkeys((*INPUTS, *labels))}
    return {name: values for name, values in found.items() if 1 < len(values) <= MOST_VALUES}


def _add(table: Table, name: str, value: str, rows: Sequence[Row]) -> None:
    """Nothing; adds the line of the rows that have a value in a column."""
    times = [row["iteration_s"] for row in rows if row["iteration_s"] is not None]
    shares = [row["mfu"] for row in rows if row["mfu"] is not None]
    failed = sum(row["error"] is not None for row in rows)
    measures = (seconds(median(times)) if times else "-", f"{100 * median(shares):.2f}" if shares else "-")
    table.add_row(name, value, f"{len(rows):,}", f"{len(times):,}", f"{failed:,}", *measures)
