"""`motley plan`: searches for the best plan of a job on a cluster."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.alternatives import alternatives
from experiments.commands.options import (
    Budget,
    ClusterFile,
    ConstantsFile,
    GlobalBatch,
    GradientPrecision,
    JudgeName,
    ModelName,
    ObjectiveName,
    Precision,
    ReportFile,
    Seed,
    SequenceLength,
    StackName,
    TokenCount,
    budget_s,
    files_behind,
    on_stack,
    read_job,
    read_objective,
)
from experiments.compilation import compile_first
from experiments.exits import INTERRUPTED, NO_ANSWER, tell_error
from experiments.explain import effect_of_padding
from experiments.judges import SIMULATE, judge_named
from experiments.output import Outputs, outputs
from experiments.progress import count_progress, search_progress
from experiments.tables import (
    alternatives_table,
    attention_line,
    bound_line,
    changed_line,
    front_table,
    how_it_ended,
    outlay_line,
    plan_table,
    plan_title,
    report_table,
    seconds,
    training_line,
    unused_line,
)
from partition import Result
from partition import plan as search_plan
from partition.bound import Bound, gap, lower_bound
from partition.objective import Ledger, Objective, Outlay
from partition.search import planner_named
from sim.engine import simulate
from sim.metrics import Report, cost, infeasible_report, report, report_json, with_training
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.job import Job
from sim.spec.trace import Trace


def _above_zero(text: object) -> float:
    """A finite number above zero."""
    try:
        number = float(str(text).replace(",", ""))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"expected a number above zero, but got {str(text)!r}")
    return number


PlannerName = Annotated[
    str,
    typer.Option(
        "--planner", metavar="NAME", help="Who searches: motley, flashflex, megatron or another planner (docs/planners.md)."
    ),
]
MinTokens = Annotated[
    float | None,
    typer.Option(
        "--min-tokens-per-s", metavar="X", parser=_above_zero, help="Only plans that train so many.", show_default=False
    ),
]
MaxHourly = Annotated[
    float | None,
    typer.Option(
        "--max-dollars-per-hour",
        metavar="X",
        parser=_above_zero,
        help="Only plans whose GPUs together rent for no more.",
        show_default=False,
    ),
]
MaxTokenDollars = Annotated[
    float | None,
    typer.Option(
        "--max-dollars-per-billion-tokens",
        metavar="X",
        parser=_above_zero,
        help="Only plans that train at no more.",
        show_default=False,
    ),
]
PlanFile = Annotated[
    str | None, typer.Option("--out", metavar="FILE", help="Write the plan as JSON; '-' is standard output.", show_default=False)
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw which GPUs hold which layers: .png, .svg or .pdf.", show_default=False),
]


def plan(
    cluster: ClusterFile,
    model: ModelName,
    global_batch: GlobalBatch,
    sequence_length: SequenceLength = None,
    precision: Precision = "bf16",
    gradient_precision: GradientPrecision = "fp32",
    stack: StackName = None,
    constants: ConstantsFile = None,
    planner: PlannerName = "motley",
    judge: JudgeName = "simulate",
    objective: ObjectiveName = "throughput",
    min_tokens_per_s: MinTokens = None,
    max_dollars_per_hour: MaxHourly = None,
    max_dollars_per_billion_tokens: MaxTokenDollars = None,
    budget: Budget = "30s",
    seed: Seed = 0,
    tokens: TokenCount = None,
    out: PlanFile = None,
    plot: PlotFile = None,
    json_file: ReportFile = None,
) -> None:
    """Search for the best plan of a model on a cluster.

    Prints the plan, lane by lane, with its simulated time, MFU, memory and
    cost, how far from optimal it can be, and why the best plans of other
    shapes lost. --out writes the plan, --plot draws it, --json writes the
    report. Ctrl-C ends the search with the best plan so far. Exit code 1:
    no plan is feasible. See docs/planning.md.

    Example:

      motley plan --cluster examples/clusters/hexiscale-mixed-a.yaml \\
        --model llama-2-13b --global-batch 256 --seq-len 4096 \\
        --budget 30s --seed 0 --out plan.json
    """
    began = time.perf_counter()
    limit_s = budget_s(budget)
    planner_named(planner)
    make_judge = judge_named(judge)
    aim = read_objective(objective, min_tokens_per_s, max_dollars_per_hour, max_dollars_per_billion_tokens)
    files = outputs({"--out": out, "--plot": plot, "--json": json_file}, inputs=[cluster, constants])
    if plot is not None:
        from experiments.pictures import check_picture, draw_plan  # matplotlib, only where something is drawn

        check_picture("--plot", plot)
    where = on_stack(read_cluster(cluster), stack, constants)
    aim.check(where)
    files.spare(files_behind(where, model))
    job = read_job(model, global_batch, sequence_length, precision, gradient_precision)
    compile_first(planner, judge)
    with search_progress(limit_s) as progress:
        result = search_plan(where, job, planner, make_judge(where, job, seed), limit_s, seed, progress, aim)
    by = _By(planner, judge, seed, limit_s, aim)
    if result.plan is not None:
        # The judge may be a quick one: what is printed and written is the simulation's.
        trace = simulate(result.plan, where, seed=seed)
        found = with_training(report(trace, where, time.perf_counter() - began), result.plan, tokens)
        files.write("--out", result.plan.to_json())
        if plot is not None:
            title = f"{plan_title(result.plan)}\none iteration of {seconds(found.iteration_s)}"
            files.tell(plot, draw_plan(result.plan, where, found.peak_bytes or {}, plot, title))
        proven = None
        try:
            proven = _proven(trace, where, job)
        finally:  # Ctrl-C, while links are slow
            files.write("--json", _report_json(found, result, by, where, proven))
        _show(result, trace, found, where, proven, files, by)
        files.finish()
        if result.stopped == "interrupted":
            raise typer.Exit(INTERRUPTED)
    elif result.stopped == "interrupted":
        tell_error(f"interrupted after {result.judged} plans, of which none is feasible; nothing was written")
        raise typer.Exit(INTERRUPTED)
    else:
        assert result.infeasible is not None
        files.write("--json", _report_json(infeasible_report(result.infeasible, time.perf_counter() - began), result, by, where))
        # Where memory lacks, what would make it fit is said; a longer search would not.
        late = result.stopped == "budget" and result.infeasible.reason != "memory"
        longer = f", within its budget of {limit_s:g} s: a longer one may find a plan" if late else ""
        drawn = "; --plot: nothing was drawn" if plot is not None else ""
        tell_error(f"no feasible plan: {result.infeasible.message} ({planner} judged {result.judged} plans{longer}){drawn}")
        files.finish()
        raise typer.Exit(NO_ANSWER)


@dataclass(frozen=True)
class _By:
    """How a plan was searched."""

    planner: str
    judge: str
    seed: int
    budget_s: float
    objective: Objective


def _report_json(measures: Report, result: Result, by: _By, cluster: Cluster, proven: _Proven | None = None) -> str:
    """The text of a report whose last key says how the plan was searched, how far it is from the bound, and what it takes beside
    others on the front."""
    search: dict[str, Any] = {"planner": by.planner, "judge": by.judge, "seed": by.seed, "budget_s": by.budget_s}
    search |= {"judged": result.judged, "seconds": result.seconds, "stopped": result.stopped, "stands_in": result.stands_in}
    limits = asdict(by.objective)
    search |= {"objective": limits.pop("name"), **{name: limit for name, limit in limits.items() if limit is not None}}
    ledger = Ledger(cluster)
    if result.plan is not None:
        search |= _taken(ledger.outlay(result.plan, cost(measures)))
    if proven is not None:
        search |= {"bound_s": proven.bound_s, "gap": proven.parts}
    search["front"] = [
        {"gpus": len(plan.devices), "iteration_s": cost.iteration_s, **_taken(ledger.outlay(plan, cost))}
        for plan, cost in result.front
    ]
    return report_json(measures).removesuffix("\n}\n") + f',\n  "search": {json.dumps(search)}\n}}\n'


def _taken(outlay: Outlay) -> Mapping[str, float | None]:
    """The measures of an outlay that no report has: they are of the GPUs that the plan uses alone."""
    values = outlay._asdict()
    return {name: values[name] for name in ("dollars_per_hour", "dollars_per_billion_tokens", "joules_per_token")}


def _show(result: Result, trace: Trace, found: Report, cluster: Cluster, proven: _Proven | None, files: Outputs, by: _By) -> None:
    """Prints the plan, its measures, how far from optimal it can be, why others lost, and how it was found."""
    assert result.plan is not None and result.cost is not None
    ledger = Ledger(cluster)
    outlay = ledger.outlay(result.plan, cost(found))
    files.console.print(plan_table(result.plan, cluster, found.peak_bytes, headroom=True))
    files.console.print()
    files.console.print(report_table(found, result.plan, cluster))
    files.console.print()
    files.say(outlay_line(outlay, result.plan))
    if (counted := attention_line(found, result.plan)) is not None:
        files.say(counted)
    padded = effect_of_padding(result.plan, cluster, by.seed)
    if padded is not None and (gained := changed_line(padded, trace.iteration_s)) is not None:
        files.say(gained)
    if found.training is not None:
        files.say(training_line(found.training, len(cluster.devices)))
    if (unused := unused_line(result.plan, cluster)) is not None:
        files.say(unused)
    if proven is not None:
        files.say(bound_line(trace.iteration_s, proven.bound_s, proven.parts))
    if result.others:
        files.console.print()
        others = alternatives(trace, result.others, cluster, by.objective, by.seed)
        files.console.print(alternatives_table(result.plan, outlay, others, cluster))
    if by.objective.chooses_gpus and len(result.front) > 1:
        files.console.print()
        files.console.print(front_table([(plan, ledger.outlay(plan, cost)) for plan, cost in result.front], cluster))
    files.console.print()
    plans = "1 plan" if result.judged == 1 else f"{result.judged:,} plans"
    files.say(f"{by.planner} judged {plans} (seed {by.seed}), {how_it_ended(result, by.budget_s)}")
    if by.judge != SIMULATE:
        judged = seconds(result.cost.iteration_s)
        files.say(f"the judge {by.judge} took the iteration for {judged}; the figures above are simulated")
        missed = by.objective.missed(outlay)
        if missed is not None:
            tell_error(f"warning: as it is simulated, the plan has {missed.reached}, but asked for is {missed.asked}")
    if result.stands_in:
        tell_error(
            f"warning: the budget of {by.budget_s:g} s ended before {by.planner} found a feasible plan; this is the best "
            "symmetric one, or one that needs least memory, instead: give more time with --budget"
        )


@dataclass(frozen=True)
class _Proven:
    """What no plan takes less than, and what the gap to it is made of, as fractions of the iteration that sum to it."""

    bound_s: float
    parts: Mapping[str, float]


def _proven(trace: Trace, cluster: Cluster, job: Job) -> _Proven | None:
    """How far the plan is from the best possible at most; None where no bound is known."""
    with count_progress("lower bound", 1):  # some seconds where links are slow
        bound = lower_bound(cluster, job)  # of all GPUs, also where the objective leaves some out
    if not isinstance(bound, Bound):
        return None
    parts = asdict(gap(bound, trace, cluster))
    del parts["total"]
    return _Proven(bound.iteration_s, parts)
