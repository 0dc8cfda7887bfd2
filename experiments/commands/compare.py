"""`motley compare`: ranks planners on one judge."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments.commands.options import (
    Budget,
    ConstantsFile,
    GlobalBatch,
    GradientPrecision,
    Jitter,
    JudgeName,
    ModelName,
    ObjectiveName,
    Precision,
    SequenceLength,
    StackName,
    budget_s,
    check_jitter,
    files_behind,
    folder,
    on_stack,
    read_clusters,
    read_job,
    read_objective,
    whole_number,
)
from experiments.comparison import (
    Cell,
    Outcome,
    history_rows,
    kept,
    ranking,
    ratio_to_best,
    row,
    rows_csv,
    rows_json,
    with_jitter,
)
from experiments.comparison import compare as run_comparison
from experiments.compilation import compile_first
from experiments.exits import FAILED, INTERRUPTED, NO_ANSWER, tell_error
from experiments.judges import judge_named
from experiments.output import Outputs, check_folder, outputs
from experiments.peers import judge_peer, peers_on
from experiments.progress import count_progress
from experiments.standings import standings_table
from partition import PLANNERS
from partition.search import planner_named
from sim.spec.cluster import Cluster
from sim.spec.job import Job
from sim.spec.reading import InputError, set_aside, write_file

ClusterFiles = Annotated[
    list[Path],
    typer.Option(
        "--cluster",
        "--clusters",
        metavar="FILE...",
        help="The clusters, YAML files: several after one flag, or the flag several times.",
    ),
]
MoreClusterFiles = Annotated[
    list[Path] | None, typer.Argument(metavar="FILE", help="More clusters, as after --clusters *.yaml.", show_default=False)
]
PlannerNames = Annotated[str, typer.Option("--planners", metavar="NAMES", help="Planners, parted by commas, or all.")]
OneSeed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", parser=whole_number(0), help="The one seed.  [default: 0]", show_default=False),
]
SeedCount = Annotated[
    int | None,
    typer.Option(
        "--seeds", metavar="N", parser=whole_number(1), help="Search with each of the seeds 0 to N-1.", show_default=False
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        parser=folder,
        help="Write all plans, tables and a picture there. What is killed continues there when it is run again.",
        show_default=False,
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        metavar="N",
        parser=whole_number(1),
        help="With --jitter: simulate each plan so often, and rank it by the run in the middle.  [default: 5]",
        show_default=False,
    ),
]
RowsFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON; '-' is standard output.", show_default=False)
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        metavar="N",
        parser=whole_number(1),
        help="Searches at one time; by default one per core.",
        show_default=False,
    ),
]


REPEATS = 5
"""How often each plan is simulated with jitter."""

TABLES, PICTURE = ("results.csv", "history.csv"), "quality.png"
"""What --out holds besides the plans."""

UNFINISHED = "unfinished"
"""The folder below --out that keeps what is known until all of it is."""


def compare(
    clusters: ClusterFiles,
    model: ModelName = "llama-2-7b",
    global_batch: GlobalBatch = 256,
    more_clusters: MoreClusterFiles = None,
    sequence_length: SequenceLength = None,
    precision: Precision = "bf16",
    gradient_precision: GradientPrecision = "fp32",
    stack: StackName = None,
    constants: ConstantsFile = None,
    planners: PlannerNames = "all",
    judge: JudgeName = "simulate",
    objective: ObjectiveName = "throughput",
    budget: Budget = "10s",
    seed: OneSeed = None,
    seeds: SeedCount = None,
    jitter: Jitter = 0.0,
    repeats: Repeats = None,
    out: Folder = None,
    json_file: RowsFile = None,
    processes: Processes = None,
) -> None:
    """Rank planners by the plans they find in the same time.

    Prints a table per cluster, the best plan's planner first (the fastest,
    or by --objective that which takes the fewest dollars or joules per
    token); over several seeds, medians. Published plans for the same
    cluster and job stand in it, too. With --jitter every plan is simulated
    again on devices whose speeds differ by chance, as those of a cluster
    do, and ranked by the run in the middle.

    --out writes CLUSTER.PLANNER.SEED.json for every plan, results.csv,
    history.csv (the best plan over the seconds of each search) and
    quality.png, which shows that; if the comparison is killed, the same
    command continues it. Exit code 1: a cluster has no feasible plan.

    Example:

      motley compare --clusters examples/clusters/hexiscale-*.yaml \\
        --model llama-2-7b --global-batch 256 --seq-len 4096 \\
        --planners megatron,flashflex,random --budget 10s --seeds 3 \\
        --out results/compare
    """
    limit_s = budget_s(budget)
    names = _planner_names(planners)
    judge_named(judge)
    check_jitter(judge, jitter, repeats)
    aim = read_objective(objective)
    if seed is not None and seeds is not None:
        raise InputError(f"--seed and --seeds exclude one another, but got --seed {seed} and --seeds {seeds}")
    paths = [*clusters, *_checked(more_clusters or [])]
    if out is not None:
        check_folder("--out", out)
    files = outputs({"--json": json_file}, inputs=[*paths, constants])
    places = [on_stack(place, stack, constants) for place in read_clusters(paths)]
    job = read_job(model, global_batch, sequence_length, precision, gradient_precision)
    chosen = range(seeds) if seeds is not None else [seed or 0]
    behind = [file for place in places for file in files_behind(place, model)]
    files.spare(behind)
    for path, place in zip(paths, places, strict=True):
        try:
            aim.check(place)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    cells = [Cell(place, job, name, judge, limit_s, number, aim.name) for place in places for name in names for number in chosen]
    if out is not None:
        written = dict.fromkeys([*TABLES, PICTURE, *map(plan_file_name, cells)])
        outputs({f"--out ({name})": out / name for name in written}, inputs=[*paths, *behind, constants])
    keep = out / UNFINISHED if out is not None else None
    earlier = kept(cells, keep) if keep is not None else 0
    if earlier:
        files.say(f"continues in {out}: {earlier} of {len(cells)} searches were finished before\n")
    compile_first(*names, judge)
    with count_progress(f"{len(cells)} searches of {limit_s:g} s at most", len(cells)) as progress:
        searched, interrupted = run_comparison(cells, processes, progress, keep)
    published = [judge_peer(peer, place, judge, chosen[0], aim.name) for place in places for peer in peers_on(place, job)]
    outcomes = [*searched, *(outcome for outcome in published if outcome.cell.cluster in {o.cell.cluster for o in searched})]
    if jitter > 0:
        if not interrupted:
            repeats = repeats or REPEATS
            with count_progress(f"{len(outcomes)} plans, {repeats} times each", len(outcomes)) as progress:
                outcomes, interrupted = with_jitter(outcomes, jitter, repeats, processes, progress)
        if interrupted:  # plans in step and out of it are not to be ranked together
            tell_error("interrupted: nothing was written" + (f"; the searches are kept in {keep}" if keep is not None else ""))
            raise typer.Exit(INTERRUPTED)
    write_results(outcomes, out, files)
    if keep is not None and not interrupted:
        shutil.rmtree(keep, ignore_errors=True)
    for place in places:
        own = [outcome for outcome in outcomes if outcome.cell.cluster == place]
        if own:
            show_ranking(place, job, own, files)
    files.finish()
    if interrupted:
        tell_error(f"interrupted: {len(searched)} of {len(cells)} searches were begun")
        raise typer.Exit(INTERRUPTED)
    if any(outcome.error is not None for outcome in outcomes):
        raise typer.Exit(FAILED)
    without = [place.name for place in places if not any(o.plan for o in searched if o.cell.cluster == place)]
    if without:
        tell_error(f"no feasible plan for {', '.join(without)}")
        raise typer.Exit(NO_ANSWER)


def _planner_names(text: str) -> list[str]:
    """The planners of a list parted by commas; 'all' is every registered one. Raises InputError for others, or one twice."""
    names = list(PLANNERS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"--planners: expected names parted by commas, or all, but got {text!r}")
    for name in names:
        planner_named(name)
        if names.count(name) > 1:
            raise InputError(
                f"--planners: {name} stands {names.count(name)} times in {text!r}; for more searches of it take --seeds"
            )
    return names


def _checked(more_clusters: Sequence[Path]) -> Sequence[Path]:
    """The files; raises InputError where one is a planner's name, which was meant for --planners."""
    for path in more_clusters:
        if str(path) in PLANNERS:
            raise InputError(
                f"{path} is a planner, but a cluster file is expected there; part planners by commas: --planners A,B"
            )
    return more_clusters


def plan_file_name(cell: Cell) -> str:
    """The name of the file of a cell's plan."""
    return f"{cell.cluster.name}.{cell.planner.replace(', ', '-')}.{cell.seed}.json"


def write_results(outcomes: Sequence[Outcome], folder: Path | None, files: Outputs) -> None:
    """Nothing; writes every plan, the tables and the picture into the folder, if one is given, and the rows to --json.

    What another comparison left in the folder is kept under other names, so that nothing there is of two.
    """
    rows = []
    if folder is not None:
        for earlier in _earlier(folder, {plan_file_name(outcome.cell) for outcome in outcomes if outcome.plan is not None}):
            files.say(f"{earlier} is of an earlier comparison, and is kept as {set_aside(earlier)}")
    for outcome in outcomes:
        name = plan_file_name(outcome.cell)
        written = folder is not None and outcome.plan is not None
        if folder is not None and outcome.plan is not None:
            before = write_file(folder / name, outcome.plan.to_json())
            if before is not None:
                files.tell(folder / name, before)
        rows.append({**row(outcome, name if written else None), "ratio_to_best": ratio_to_best(outcome, outcomes)})
    if folder is not None:
        for name, table in zip(TABLES, (rows, history_rows(outcomes)), strict=True):
            files.tell(folder / name, write_file(folder / name, rows_csv(table)))
        if any(outcome.plan is not None for outcome in outcomes):
            files.tell(folder / PICTURE, _draw(outcomes, folder / PICTURE))
        plans = sum(outcome.plan is not None for outcome in outcomes)
        files.tell(f"{plans} plans into {folder}", None)
    files.write("--json", rows_json(rows))


def _earlier(folder: Path, plans: Collection[str]) -> list[Path]:
    """What an earlier comparison left in the folder, by its table, and one that writes these plans does not write over."""
    try:
        with (folder / TABLES[0]).open(encoding="utf-8", newline="") as file:
            named = {row.get("plan") or "" for row in csv.DictReader(file)}
    except (OSError, ValueError, csv.Error):
        return []
    names = [*sorted(named - {*plans, ""}), *([] if plans else [PICTURE])]
    return [folder / name for name in names if Path(name).name == name and (folder / name).is_file()]


def _draw(outcomes: Sequence[Outcome], path: Path) -> Path | None:
    """Where the earlier picture is kept now, if any. Draws a panel for every cluster that has a plan."""
    from experiments.curves import draw_quality, panel  # imports matplotlib, which only --out needs

    job = outcomes[0].cell.job
    places = dict.fromkeys(outcome.cell.cluster for outcome in outcomes if outcome.plan is not None)
    panels = [panel(place.name, [o for o in outcomes if o.cell.cluster == place]) for place in places]
    title = f"{job.model.name}, {job.global_batch} x {job.sequence_length} tokens, {job.precisions}"
    return draw_quality(panels, path, title, objective=outcomes[0].cell.objective)


def show_ranking(cluster: Cluster, job: Job, outcomes: Sequence[Outcome], files: Outputs) -> None:
    """Nothing; prints the ranking on one cluster, and why planners found nothing."""
    title = f"{job.model.name} on {cluster.name}, {job.global_batch} x {job.sequence_length} tokens, {job.precisions}"
    seeds = len({outcome.cell.seed for outcome in outcomes})
    if seeds > 1:
        title += f"; medians of {seeds} seeds, and the range of the first figure"
    if (spread := next((outcome.spread for outcome in outcomes if outcome.spread is not None), None)) is not None:
        apart = f"{100 * spread.jitter:g} %"
        title += f"; of {len(spread.iteration_s)} runs on devices whose speeds differ by {apart} the one in the middle"
    standings = ranking(outcomes)
    files.console.print(standings_table(title, standings, outcomes[0].cell.objective))
    for standing in standings:
        reasons = [outcome.why_not for outcome in standing.outcomes if outcome.why_not is not None]
        if reasons:
            how = [outcome.stopped for outcome in standing.outcomes]
            verb = "failed" if "error" in how else "refused" if "refused" in how else "found no plan"
            files.say(f"{standing.planner} {verb}: {reasons[0]}")
    files.console.print()
