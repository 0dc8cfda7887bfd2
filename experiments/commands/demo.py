"""`motley demo`: our planners on published clusters, beside the MFU reported for them, and a small training on this machine."""

from __future__ import annotations

import importlib.util
import sysconfig
import time
from pathlib import Path
from typing import Annotated

import typer

from experiments.commands.options import Budget, Seed, budget_s
from experiments.commands.run import draw_run, run_told, show_run
from experiments.compilation import compile_first
from experiments.exits import FAILED, INTERRUPTED, tell_error
from experiments.measured import run_json
from experiments.output import Outputs, check_folder, outputs
from experiments.progress import count_progress
from experiments.tables import demo_table
from sim.spec.plan import read_plan
from sim.spec.reading import write_file
from sim.spec.trace import trace_json

Folder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The folder of the results; files of an earlier demo are replaced.")
]


RUN_PLAN = "plans/asymmetric-cpu-4.json"
"""What the demo trains, below the folder of the examples."""

RUN_STEPS, RUN_LEARNING_RATE = 20, 3e-3


def demo(out: Folder = Path("results/demo"), budget: Budget = "8s", seed: Seed = 0) -> None:
    """Plan eight published training runs, and train a small model here.

    For each cluster and model of FlashFlex/HexiScale's report, three planners
    search. Prints predicted beside reported MFU, and writes into --out:
    mfu.png, results.csv, the plans, the timelines of the fastest plans, and
    a trace for Perfetto. Then four processes on this machine's CPUs train a
    small Llama by an asymmetric plan; below run/ lie the report, the trace,
    and the measured timeline above the simulated one. Takes two minutes on
    two cores, and another where nothing is compiled yet.

    Example:

      motley demo --out results/demo
    """
    from experiments import hexiscale  # matplotlib, only where something is drawn

    began = time.perf_counter()
    limit_s = budget_s(budget)
    check_folder("--out", out)
    examples = hexiscale.cluster_folder().parent
    searches = hexiscale.cells(hexiscale.cluster_folder(), limit_s, seed)
    total = sum(len(entries) for _, entries in searches)
    compile_first(*hexiscale.PLANNERS)
    with count_progress(f"{total} searches of {limit_s:g} s, and as many simulations", 2 * total) as progress:
        found = hexiscale.run(out, limit_s, seed, progress, searches)
    if found.interrupted:
        tell_error("interrupted: the demo is not complete")
        raise typer.Exit(INTERRUPTED)
    files = outputs({})
    files.console.print(demo_table(found.predictions))
    files.console.print()
    for prediction in found.predictions:
        if prediction.note:
            files.say(f"{prediction.planner}, {prediction.model} on {prediction.cluster}: no plan: {prediction.note}")
    files.console.print(f"\n{hexiscale.NOTE}\n", markup=False)
    train(examples, out / "run", seed, files)
    files.say(f"\nThe results lie in {out} (took {time.perf_counter() - began:.0f} s).")
    if any(outcome.error is not None for _, outcome in found.outcomes):
        raise typer.Exit(FAILED)


def train(examples: Path, out: Path, seed: int, files: Outputs) -> None:
    """Nothing; trains a small model on this machine, tells of it, and writes run.json, trace.json and timeline.png into `out`.

    The text is a part of Python's standard library, which every machine has. Without torch, it only says so.
    """
    if importlib.util.find_spec("torch") is None:
        files.say("Nothing is trained here, because torch is not installed: pip install 'motley[runtime]' installs it.")
        return
    from runtime.settings import Settings

    text = Path(sysconfig.get_path("stdlib")) / "asyncio"
    settings = Settings(RUN_STEPS, f"text:{text}", seed=seed, learning_rate=RUN_LEARNING_RATE)
    plan = examples / RUN_PLAN
    files.say(f"Four processes on this machine's CPUs train, as {plan} says, on the sources of Python's asyncio:")
    told = run_told(plan, read_plan(plan), settings, None, None)
    write_file(out / "trace.json", trace_json(told.result.trace), replace=True)
    write_file(out / "run.json", run_json(told), replace=True)
    draw_run(told, out / "timeline.png", replace=True)
    show_run(told, None, files)
