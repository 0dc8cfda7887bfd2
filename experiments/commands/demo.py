"""`motley demo`: our planners on published clusters, beside the MFU reported for them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from experiments.commands.options import Budget, Seed, budget_s
from experiments.exits import FAILED, INTERRUPTED, tell_error
from experiments.output import check_folder, console
from experiments.progress import count_progress
from experiments.tables import demo_table

Folder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The folder of the results; files of an earlier demo are replaced.")
]


def demo(out: Folder = Path("results/demo"), budget: Budget = "4s", seed: Seed = 0) -> None:
    """Plan eight published training runs and compare with what is reported.

    For each cluster and model of FlashFlex/HexiScale's report, three planners
    search. Prints predicted beside reported MFU, and writes into --out:
    mfu.png, results.csv, the plans, the timelines of the fastest plans, and
    a trace for Perfetto. Takes under two minutes on two cores.

    Example:

      motley demo --out results/demo
    """
    from experiments import hexiscale  # matplotlib, only where something is drawn

    began = time.perf_counter()
    limit_s = budget_s(budget)
    check_folder("--out", out)
    searches = hexiscale.cells(hexiscale.cluster_folder(), limit_s, seed)
    total = sum(len(entries) for _, entries in searches)
    with count_progress(f"{total} searches of {limit_s:g} s, and as many simulations", 2 * total) as progress:
        found = hexiscale.run(out, limit_s, seed, progress, searches)
    if found.interrupted:
        tell_error("interrupted: the demo is not complete")
        raise typer.Exit(INTERRUPTED)
    screen = console()
    screen.print(demo_table(found.predictions))
    screen.print()
    for prediction in found.predictions:
        if prediction.note:
            screen.print(
                f"{prediction.planner}, {prediction.model} on {prediction.cluster}: no plan: {prediction.note}",
                soft_wrap=True,
                markup=False,
            )
    screen.print(f"\n{hexiscale.NOTE}\n", markup=False)
    screen.print(f"The results lie in {out} (took {time.perf_counter() - began:.0f} s).", soft_wrap=True, markup=False)
    if any(outcome.error is not None for _, outcome in found.outcomes):
        raise typer.Exit(FAILED)
