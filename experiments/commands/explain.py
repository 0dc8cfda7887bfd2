"""`motley explain`: why an iteration takes as long as it does, and what would make it shorter."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from experiments.commands.options import (
    ClusterFile,
    ConstantsFile,
    PlanFile,
    ReportFile,
    Seed,
    StackName,
    budget_s,
    errors_about,
    files_behind,
    on_stack,
)
from experiments.compilation import compile_first
from experiments.exits import NO_ANSWER, tell_error
from experiments.explain import explain as explained
from experiments.explain import explanation_table, one_more
from experiments.output import outputs
from experiments.progress import count_progress
from experiments.tables import effects_table, one_more_table, path_line, path_table, seconds
from partition.search import planner_named
from sim.cost.feasibility import infeasible
from sim.metrics import infeasible_report, report_json
from sim.spec.cluster import read_cluster
from sim.spec.plan import read_plan
from sim.spec.reading import InputError

MoreBudget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Also find what one more GPU of each kind is worth, with searches of so long each: 10s, 1min.",
        show_default=False,
    ),
]
PlannerName = Annotated[
    str | None,
    typer.Option("--planner", metavar="NAME", help="Who searches, with --budget; motley by default.", show_default=False),
]


def explain(
    plan: PlanFile,
    cluster: ClusterFile,
    stack: StackName = None,
    constants: ConstantsFile = None,
    budget: MoreBudget = None,
    planner: PlannerName = None,
    seed: Seed = 0,
    json_file: ReportFile = None,
) -> None:
    """Explain what an iteration of a plan is made of.

    Prints the critical path of the simulated iteration by cause, and what
    single changes would gain: faster links, faster stages and kinds, less
    recomputation, other schedules and micro-batches, each simulated.
    --budget adds what one more GPU of each kind is worth. See
    docs/explain.md. Exit code 1: the plan is not feasible.

    Example:

      motley explain plan.json \\
        --cluster examples/clusters/hexiscale-mixed-a.yaml --budget 10s
    """
    limit_s = None if budget is None else budget_s(budget)
    if planner is not None and budget is None:
        raise InputError(f"--planner {planner} is who searches what one more GPU is worth; give --budget, too")
    planner = planner or "motley"
    planner_named(planner)
    files = outputs({"--json": json_file}, inputs=[plan, cluster, constants])
    where = on_stack(read_cluster(cluster), stack, constants)
    what = read_plan(plan)
    files.spare(files_behind(where, what.model))
    with errors_about(plan):
        for name in what.devices:
            where.device(name)
        reason = infeasible(what, where)
    if what.cluster != where.name:
        tell_error(f"warning: {plan} was made for the cluster {what.cluster!r}, and is explained on {where.name!r}")
    if reason is not None:
        files.write("--json", report_json(infeasible_report(reason)))
        tell_error(f"{plan} is not feasible: {reason.message}")
        files.finish()
        raise typer.Exit(NO_ANSWER)
    more = None
    with errors_about(plan):
        told = explained(what, where, seed, partial(count_progress, "changes simulated"))
    if limit_s is not None:
        compile_first(planner)
        more = one_more(what, where, planner, limit_s, seed, partial(count_progress, f"searches of {limit_s:g} s"))
    files.write("--json", json.dumps(explanation_table(told, more), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    files.say(f"one iteration takes {seconds(told.trace.iteration_s)}")
    files.console.print()
    files.console.print(path_table(told.path, what, where))
    files.say(path_line(told.path))
    files.console.print()
    files.console.print(effects_table(told))
    if more is not None:
        files.console.print()
        files.console.print(one_more_table(more, what))
    files.finish()
