"""`motley simulate`: what one iteration of a plan takes on a cluster."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Annotated

import typer

from experiments.commands.options import (
    ClusterFile,
    ConstantsFile,
    Jitter,
    JudgeName,
    PlanFile,
    ReportFile,
    Seed,
    StackName,
    TimelineFile,
    TokenCount,
    TraceFile,
    check_jitter,
    errors_about,
    files_behind,
    on_stack,
    whole_number,
)
from experiments.compilation import compile_first
from experiments.exits import NO_ANSWER, tell_error
from experiments.judges import SIMULATE, judge_named
from experiments.output import outputs
from experiments.progress import count_progress
from experiments.repeats import repeated
from experiments.tables import attention_line, plan_table, report_table, spread_line, timeline_title, training_line
from sim.cost.feasibility import infeasible
from sim.engine import simulate as simulate_plan
from sim.metrics import cost_report, infeasible_report, report, report_json, with_training
from sim.spec.cluster import read_cluster
from sim.spec.compile import compile_plan
from sim.spec.judge import Cost
from sim.spec.plan import read_plan
from sim.spec.program import dry_run, program_text
from sim.spec.reading import InputError
from sim.spec.trace import trace_json

ProgramFile = Annotated[
    str | None,
    typer.Option(
        "--program",
        metavar="FILE",
        help="Write the instructions of every lane as text; '-' is standard output.",
        show_default=False,
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats",
        metavar="N",
        parser=whole_number(1),
        help="Simulate so often, with speeds drawn anew each time, and tell the spread; all else is of the run in the middle.",
    ),
]


def simulate(
    plan: PlanFile,
    cluster: ClusterFile,
    stack: StackName = None,
    constants: ConstantsFile = None,
    trace: TraceFile = None,
    timeline: TimelineFile = None,
    json_file: ReportFile = None,
    program: ProgramFile = None,
    judge: JudgeName = "simulate",
    seed: Seed = 0,
    jitter: Jitter = 0.0,
    repeats: Repeats = 1,
    tokens: TokenCount = None,
) -> None:
    """Simulate one iteration of a plan on a cluster.

    Prints the plan, lane by lane, with its time, MFU, memory and cost.
    --trace writes what every lane did when, --timeline draws it, --json
    writes the report, --program the instructions that the plan compiles
    to. With --judge estimate there is neither trace nor timeline, and the
    report has no devices and links. Exit code 1: the plan is not feasible.

    Example:

      motley simulate plan.json \\
        --cluster examples/clusters/hexiscale-mixed-a.yaml \\
        --trace trace.json --timeline timeline.png --json report.json
    """
    began = time.perf_counter()
    make_judge = judge_named(judge)
    if judge != SIMULATE:
        for flag, given in (("--trace", trace), ("--timeline", timeline)):
            if given is not None:
                raise InputError(f"{flag} needs the event simulation; the judge {judge} has none: leave out --judge {judge}")
    check_jitter(judge, jitter, repeats)
    flags = {"--trace": trace, "--timeline": timeline, "--json": json_file, "--program": program}
    files = outputs(flags, inputs=[plan, cluster, constants])
    if timeline is not None:
        from experiments.pictures import check_picture, draw_timeline  # matplotlib, only where something is drawn

        check_picture("--timeline", timeline)
    where = on_stack(read_cluster(cluster), stack, constants)
    what = read_plan(plan)
    files.spare(files_behind(where, what.model))
    with errors_about(plan):
        for name in what.devices:
            where.device(name)
        instructions = None
        if program is not None:
            compiled = compile_plan(what)
            dry_run(compiled)
            instructions = program_text(compiled)
        reason = infeasible(what, where)
    if what.cluster != where.name:
        tell_error(f"warning: {plan} was made for the cluster {what.cluster!r}, and is simulated on {where.name!r}")
    if reason is not None:
        if instructions is not None:
            files.write("--program", instructions)
        files.write("--json", report_json(infeasible_report(reason, time.perf_counter() - began)))
        left_out = " and ".join(flag for flag in ("--trace", "--timeline") if flag in files)
        tell_error(f"{plan} is not feasible: {reason.message}" + (f"; {left_out}: nothing was written" if left_out else ""))
        files.finish()
        raise typer.Exit(NO_ANSWER)
    spread = None
    with errors_about(plan):
        if judge == SIMULATE:
            if jitter > 0:
                done, spread = repeated(what, where, seed, jitter, repeats, partial(count_progress, "runs"))
            else:
                done = simulate_plan(what, where)
            measures = report(done, where, time.perf_counter() - began)
        else:
            compile_first(judge)
            verdict = make_judge(where, what.job(), seed)(what)
            assert isinstance(verdict, Cost)  # its memory fits
            measures = cost_report(verdict, time.perf_counter() - began, where)
    measures = with_training(measures, what, tokens)
    if instructions is not None:
        files.write("--program", instructions)
    if trace is not None:
        files.write("--trace", trace_json(done))
    if timeline is not None:
        files.tell(timeline, draw_timeline(done, where, timeline, timeline_title(what, measures)))
    text = report_json(measures)
    if spread is not None:
        text = text.removesuffix("\n}\n") + f',\n  "repeats": {json.dumps(spread.values())}\n}}\n'
    files.write("--json", text)
    files.console.print(plan_table(what, where, measures.peak_bytes))
    files.console.print()
    files.console.print(report_table(measures, what, where))
    files.console.print()
    if (counted := attention_line(measures, what)) is not None:
        files.say(counted)
    if measures.training is not None:
        files.say(training_line(measures.training, len(where.devices)))
    if spread is not None:
        files.say(spread_line(spread))
    files.finish()
