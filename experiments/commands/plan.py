"""`motley plan`: searches for the fastest plan of a job on a cluster."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from experiments.commands.options import (
    Budget,
    ClusterFile,
    GlobalBatch,
    JudgeName,
    ModelName,
    Precision,
    ReportFile,
    Seed,
    SequenceLength,
    StackName,
    budget_s,
    files_behind,
    on_stack,
    read_job,
)
from experiments.exits import INTERRUPTED, NO_ANSWER, tell_error
from experiments.judges import judge_named
from experiments.output import Outputs, outputs
from experiments.progress import search_progress
from experiments.tables import how_it_ended, plan_table, report_table, seconds
from partition import Result
from partition import plan as search_plan
from partition.search import planner_named
from sim.engine import simulate
from sim.metrics import Report, infeasible_report, report, report_json
from sim.spec.cluster import Cluster, read_cluster

PlannerName = Annotated[
    str,
    typer.Option("--planner", metavar="NAME", help="Who searches: flashflex, megatron, random or another registered planner."),
]
PlanFile = Annotated[
    str | None, typer.Option("--out", metavar="FILE", help="Write the plan as JSON; '-' is standard output.", show_default=False)
]


def plan(
    cluster: ClusterFile,
    model: ModelName,
    global_batch: GlobalBatch,
    sequence_length: SequenceLength = None,
    precision: Precision = "bf16",
    stack: StackName = None,
    planner: PlannerName = "flashflex",
    judge: JudgeName = "simulate",
    budget: Budget = "30s",
    seed: Seed = 0,
    out: PlanFile = None,
    json_file: ReportFile = None,
) -> None:
    """Search for the fastest plan of a model on a cluster.

    Prints the plan, lane by lane, with its simulated time, MFU, memory and
    cost. --out writes the plan, --json the report. Ctrl-C ends the search
    with the best plan so far. Exit code 1: no plan is feasible.

    Example:

      motley plan --cluster examples/clusters/hexiscale-mixed-a.yaml \\
        --model llama-2-13b --global-batch 256 --seq-len 4096 \\
        --planner flashflex --budget 30s --seed 0 --out plan.json
    """
    began = time.perf_counter()
    limit_s = budget_s(budget)
    planner_named(planner)
    make_judge = judge_named(judge)
    files = outputs({"--out": out, "--json": json_file}, inputs=[cluster])
    where = on_stack(read_cluster(cluster), stack)
    files.spare(files_behind(where, model))
    job = read_job(model, global_batch, sequence_length, precision)
    with search_progress(limit_s) as progress:
        result = search_plan(where, job, planner, make_judge(where, job, seed), limit_s, seed, progress)
    by = _By(planner, judge, seed, limit_s)
    if result.plan is not None:
        # The judge may be a quick one: what is printed and written is the simulation's.
        found = report(simulate(result.plan, where, seed=seed), where, time.perf_counter() - began)
        files.write("--out", result.plan.to_json())
        files.write("--json", _report_json(found, result, by))
        _show(result, found, where, files, by)
        files.finish()
        if result.stopped == "interrupted":
            raise typer.Exit(INTERRUPTED)
    elif result.stopped == "interrupted":
        tell_error(f"interrupted after {result.judged} plans, of which none is feasible; nothing was written")
        raise typer.Exit(INTERRUPTED)
    else:
        assert result.infeasible is not None
        files.write("--json", _report_json(infeasible_report(result.infeasible, time.perf_counter() - began), result, by))
        longer = f", stopped at its budget of {limit_s:g} s: a longer one may find a plan" if result.stopped == "budget" else ""
        tell_error(f"no feasible plan: {result.infeasible.message} ({planner} judged {result.judged} plans{longer})")
        files.finish()
        raise typer.Exit(NO_ANSWER)


@dataclass(frozen=True)
class _By:
    """How a plan was searched."""

    planner: str
    judge: str
    seed: int
    budget_s: float


def _report_json(report: Report, result: Result, by: _By) -> str:
    """The text of a report whose last key says how the plan was searched."""
    search = {**asdict(by), "judged": result.judged, "seconds": result.seconds, "stopped": result.stopped}
    return report_json(report).removesuffix("\n}\n") + f',\n  "search": {json.dumps(search)}\n}}\n'


def _show(result: Result, found: Report, cluster: Cluster, files: Outputs, by: _By) -> None:
    """Prints the plan, its measures, and how it was found."""
    assert result.plan is not None and result.cost is not None
    files.console.print(plan_table(result.plan, cluster, found.peak_bytes))
    files.console.print()
    files.console.print(report_table(found, result.plan, cluster))
    files.console.print()
    files.say(f"{by.planner} judged {result.judged:,} plans (seed {by.seed}), {how_it_ended(result, by.budget_s)}")
    if by.judge != "simulate":
        judged = seconds(result.cost.iteration_s)
        files.say(f"the judge {by.judge} took the iteration for {judged}; the figures above are simulated")
