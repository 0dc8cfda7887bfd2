"""`motley experiment`: executes a registered experiment, and draws and tells what came of it."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from experiments.commands.options import budget_s, folder
from experiments.commands.sweep import Processes, Ray, RunBudget, carry_out
from experiments.journal import CSV
from experiments.output import Outputs, console
from experiments.sweep import Row
from experiments.workers import Workers
from sim.spec.reading import InputError, write_file

Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The experiment; without it, all are listed.", show_default=False)
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        parser=folder,
        help="Write rows, plans, plots and the table there. What is stopped continues there.",
        show_default=False,
    ),
]


def experiment(
    name: Name = None, out: Folder = None, on: Ray = None, processes: Processes = None, budget: RunBudget = None
) -> None:
    """Execute an experiment of a paper: its sweep, its plots, its table.

    Works as `motley sweep` does, with the runs of the experiment; then
    --out also holds NAME*.png and NAME.md, made of results.csv. A budget
    other than the experiment's own makes other rows. See docs/experiments/.

    Example:

      motley experiment holmes --out results/holmes
    """
    from experiments.papers import EXPERIMENTS, experiment_named  # its runs, which no other command needs
    from experiments.papers.experiment import read_rows
    from experiments.plots import save_figure

    if name is None:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for heading in ("experiment", "asks", "after"):
            table.add_column(heading, overflow="fold")
        for each in EXPERIMENTS.values():
            table.add_row(each.name, each.question, each.paper)
        console().print(table)
        return
    chosen = experiment_named(name)
    if out is None:
        raise InputError(f"--out: expected the folder to write to, as in motley experiment {name} --out results/{name}")
    for taken in sorted(out.glob(f"{glob.escape(chosen.name)}*.png")):
        if taken.is_dir():
            raise InputError(f"--out: {taken} is a folder, but a picture is to be written there")
    runs = list(chosen.runs())
    if budget is not None:
        limit_s = budget_s(budget)
        runs = [run if run.plan is not None else replace(run, budget_s=limit_s) for run in runs]

    def tell(_rows: Sequence[Row], files: Outputs) -> None:
        frame = read_rows(out / CSV)
        for stem, figure in chosen.plot(frame).items():
            path = out / f"{stem}.png"
            files.tell(path, save_figure(figure, path))
        text = chosen.table(frame)
        path = out / f"{chosen.name}.md"
        files.tell(path, write_file(path, text))
        files.say(text)

    carry_out(chosen.name, runs, out, Workers(processes, on), also=[f"{chosen.name}.md"], then=tell)
