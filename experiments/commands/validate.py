"""`motley validate`: predictions beside what was measured in published runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.agreement import MEMORY, TIME, Comparison, summary
from experiments.commands.options import ConstantsFile, whole_number
from experiments.compilation import compile_first
from experiments.exits import INTERRUPTED, NO_ANSWER, tell_error
from experiments.judges import ESTIMATE
from experiments.output import Outputs, outputs
from experiments.progress import count_progress
from experiments.tables import cells_markdown, cells_table, fidelity_cells
from sim.spec.reading import InputError, nearest, read_text
from sim.spec.stack import stacks

if TYPE_CHECKING:
    from experiments.fidelity import Replay
    from experiments.published_rows import Run

BEGIN, END = "<!-- begin: motley validate -->", "<!-- end: motley validate -->"
"""The lines of a Markdown file between which the tables stand."""

DEFAULT_PLOT = "parity.png"
DEFAULT_HOLDOUT, DEFAULT_SEED = 0.5, 0
HOLDOUT_BY = ("run", "nodes", "source")

MOST_DOUBTS = 5
"""So many runs are told of that are not fitted on because a figure of theirs is doubtful, or that a fit misses all the same."""

FAR_OFF = 0.3
"""A run of one's own that was fitted on, and that is missed by more than this fraction, is told of."""


def _share(text: object) -> float:
    """The number of a text, at least 0 and below 1; its error names the value, which typer's own does not."""
    try:
        number = float(str(text))
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise typer.BadParameter(f"expected a number from 0 to below 1, but got {str(text)!r}")
    return number


RunsFile = Annotated[
    Path | None,
    typer.Option(
        "--runs", metavar="CSV", help="Runs, in the columns of the published ones, which are the default.", show_default=False
    ),
]
FailuresFile = Annotated[
    Path | None,
    typer.Option(
        "--failures",
        metavar="CSV",
        help="Runs that failed; by default those published, where --runs is not given.",
        show_default=False,
    ),
]
Sources = Annotated[
    list[str] | None, typer.Option("--source", metavar="KEY", help="Only runs of this source; several times.", show_default=False)
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write all comparisons as JSON; '-' is standard output.", show_default=False),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help=f"Draw predicted over measured times: .png, .svg or .pdf; of the published runs {DEFAULT_PLOT} by default.",
        show_default=False,
    ),
]
MarkdownFile = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", help="Write the tables as Markdown; into a file that exists, between its marks."),
]
Fit = Annotated[bool, typer.Option("--fit", help="Fit the constants on a part of the runs first, and report on the others.")]
Holdout = Annotated[
    float | None,
    typer.Option(
        "--holdout",
        metavar="SHARE",
        parser=_share,
        help=f"The share of each source's runs that --fit does not see; {DEFAULT_HOLDOUT} by default.",
        show_default=False,
    ),
]
HoldoutBy = Annotated[
    str | None,
    typer.Option(
        "--holdout-by",
        metavar="run|nodes|source",
        help="What --holdout draws: runs, numbers of nodes of each source, or whole sources; run by default.",
        show_default=False,
    ),
]
FitSeed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        parser=whole_number(0),
        help=f"Seed of the lot that divides the runs for --fit; {DEFAULT_SEED} by default.",
        show_default=False,
    ),
]
FittedFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the constants that --fit found.", show_default=False)
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        "--jobs",
        metavar="N",
        parser=whole_number(1),
        help="Runs at one time; by default one per core.",
        show_default=False,
    ),
]


def validate(
    runs: RunsFile = None,
    failures: FailuresFile = None,
    source: Sources = None,
    constants: ConstantsFile = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    fit: Fit = False,
    holdout: Holdout = None,
    holdout_by: HoldoutBy = None,
    seed: FitSeed = None,
    out: FittedFile = None,
    processes: Processes = None,
) -> None:
    """Predict published runs, and compare with what was measured.

    Prints errors source by source: of iteration times (or the rate that is
    published instead) and of peak memory, Kendall's tau within the tables,
    which runs could not be modelled and why. --fit refits the constants on
    a part of the runs, and reports on those that it did not see. Exit code
    1: no run could be modelled.

    Examples:

      motley validate

      motley validate --json errors.json --plot errors.svg

      motley validate --runs my_runs.csv

      motley validate --fit --holdout 0.5 --seed 0 --out constants.yaml
    """
    # They import scipy and read the catalogues, which no other command shall wait for.
    from experiments.constants import parse_constants, read_constants
    from experiments.fidelity import FAILED, PUBLISHED, replay, replay_json
    from experiments.published_rows import read_failures, read_runs

    _check_fit_flags(fit, holdout, holdout_by, seed, out, constants)
    path, failed_path = runs or PUBLISHED, failures or (FAILED if runs is None else None)
    if plot is None and runs is None and json_file != "-":
        plot = Path(DEFAULT_PLOT)
    files = outputs(
        {"--json": json_file, "--plot": plot, "--markdown": markdown, "--out": out}, inputs=[path, failed_path, constants]
    )
    around = ("", "") if markdown is None else _around(markdown)
    if plot is not None:
        from experiments.pictures import check_picture  # matplotlib, only where something is drawn

        check_picture("--plot", plot)
    chosen = None if constants is None else read_constants(constants)
    measured, failed = _chosen(source, path, read_runs(path), [] if failed_path is None else read_failures(failed_path))
    calibration_ids = frozenset[str]()
    compile_first(ESTIMATE)
    if fit:
        from experiments.fitting import fit as fit_constants

        share, lot = DEFAULT_HOLDOUT if holdout is None else holdout, seed or DEFAULT_SEED
        try:
            with count_progress("software stacks fitted", len(stacks())) as progress:
                by = holdout_by or HOLDOUT_BY[0]
                fitted = fit_constants(measured, failed, lot, share, progress, processes, by, anew=runs is None)
        except KeyboardInterrupt:
            raise _interrupted() from None
        chosen, calibration_ids = parse_constants(fitted.constants_text, "the fitted constants"), fitted.calibration_ids
    with count_progress("runs", len(measured) + len(failed)) as progress:
        told, interrupted = replay(measured, failed, chosen, processes, progress)
    if interrupted:
        raise _interrupted()
    told = replace(told, calibration_ids=calibration_ids)
    shipped: Replay | None = None
    if fit and runs is not None:  # the published runs are those that the shipped constants were fitted on
        with count_progress("runs with the shipped constants", fitted.held) as progress:
            unseen = [run for run in measured if run.id not in calibration_ids]
            shipped, interrupted = replay(unseen, [], None, processes, progress)
        if interrupted:
            raise _interrupted()
    if fit:
        files.write("--out", fitted.constants_text)
        used = f"fitted on the times of {fitted.timed:,} runs and the memory of {fitted.weighed:,}"
        files.say(f"{used}, of {fitted.drawn:,} that were not held out")
        for doubt in fitted.doubtful[:MOST_DOUBTS]:
            tell_error(f"warning: not fitted on: {doubt}")
        for line in fitted.few:
            tell_error(f"warning: few runs to fit a stack on: {line}")
        if runs is not None:
            _tell_far_off(told.calibration)
        if share and not fitted.held:
            few = f"--holdout {share:g} by {by} left none of {len(measured)} runs out"
            tell_error(f"warning: {few}: what follows is of runs that the constants were fitted on")
        if shipped is not None and fitted.held:
            published = {_but_for_names(run) for run in read_runs(PUBLISHED)}
            _tell_beside_shipped(files, told, shipped, sum(_but_for_names(run) in published for run in unseen))
    files.write("--json", replay_json(told))
    points = _points(told)
    if plot is not None and not points:
        tell_error(f"--plot: {plot} was not written, for no run has both a measured and a predicted speed")
    elif plot is not None:
        files.tell(plot, _draw(points, plot))
    if markdown is not None:
        files.write("--markdown", around[0] + _markdown(told, markdown, plot if points else None) + around[1])
    for title, cells in fidelity_cells(told):
        files.console.print(cells_table(title, cells))
        files.console.print()
    if runs is None and chosen is None:
        files.say("the shipped constants were fitted on these runs; docs/fidelity.md has the errors on runs that no fit saw")
    files.finish()
    if not any(c.predicted is not None for c in told.comparisons):
        tell_error(f"none of {len(measured)} runs could be modelled")
        raise typer.Exit(NO_ANSWER)


def _but_for_names(run: Run) -> Run:
    """A run without what its file calls it."""
    return replace(run, id="", source_key="")


def _tell_far_off(fitted_on: Sequence[Comparison]) -> None:
    """Nothing; warns of runs whose iteration times a fit on them misses by far: no constant says what makes them take so long."""
    errors = {c.id: c.predicted_s / c.measured_s - 1 for c in fitted_on if c.predicted_s is not None and c.measured_s}
    far = sorted(((run, error) for run, error in errors.items() if abs(error) > FAR_OFF), key=lambda entry: -abs(entry[1]))
    if far:
        which = ", ".join(f"{run} {error:+.0%}" for run, error in far[:MOST_DOUBTS]) + (", ..." if len(far) > MOST_DOUBTS else "")
        off = f"{len(far)} of {len(errors)} runs that it was fitted on are still missed by more than {FAR_OFF:.0%}"
        tell_error(f"warning: {off}: {which}; others like them will be, too, and these may have drawn the constants away")


def _tell_beside_shipped(files: Outputs, told: Replay, shipped: Replay, known: int) -> None:
    """Nothing; tells the errors of the runs that a fit has not seen, beside those with the shipped constants.

    `known` of these runs are published ones.
    """
    fitted, before = summary(told.held_out), summary(shipped.held_out)
    for what, quantity in (("iteration times", TIME), ("peak memory", MEMORY)):
        new, old = (_median(found, quantity) for found in (fitted, before))
        if new is None or old is None:
            continue
        files.say(f"runs held out: {what} missed by {new:.1%} (median); with the shipped constants by {old:.1%}")
        if new > old:
            tell_error(
                f"warning: the fit predicts the {what} of the runs that it has not seen no better than the shipped constants"
            )
    if known:
        tell_error(f"warning: {known} of the runs held out are published ones, which the shipped constants were fitted on")


def _median(found: Mapping[str, Any], quantity: str) -> float | None:
    """The median absolute relative error of the iteration times that speeds say, or of memory; None where there is none."""
    figures = found if quantity == TIME and found["quantity"] != MEMORY else found["quantities"].get(quantity)
    return None if figures is None else figures["median_absolute_relative_error"]


def _interrupted() -> typer.Exit:
    """The end of a command that Ctrl-C ended, which is told."""
    tell_error("interrupted: nothing was written")
    return typer.Exit(INTERRUPTED)


def _check_fit_flags(
    fit: bool, holdout: float | None, by: str | None, seed: int | None, out: Path | None, constants: Path | None
) -> None:
    """Nothing. Raises InputError for flags that --fit needs, that need --fit, or that exclude it."""
    if fit and out is None:
        raise InputError("--fit needs --out FILE, where the constants are written")
    if fit and constants is not None:
        raise InputError(f"--fit finds the constants, so that --constants {constants} would not be used; leave one of them out")
    for flag, value in (("--holdout", holdout), ("--holdout-by", by), ("--seed", seed), ("--out", out)):
        if not fit and value is not None:
            raise InputError(f"{flag} {value} says how to fit the constants, but --fit is not given")
    if by is not None and by not in HOLDOUT_BY:
        raise InputError(f"--holdout-by is {', '.join(HOLDOUT_BY)}, but got {by!r}{nearest(by, HOLDOUT_BY)}")


def _chosen(
    sources: Sequence[str] | None, path: Path, runs: Sequence[Run], failures: Sequence[Run]
) -> tuple[list[Run], list[Run]]:
    """The runs, and the failed runs, of these sources, or all. Raises InputError for a source that no run is of."""
    known = list(dict.fromkeys(run.source_key for run in (*runs, *failures)))
    for source in sources or ():
        if source not in known:
            raise InputError(
                f"--source: {path} has no run of {source!r}{nearest(source, known) or ';'} it has {', '.join(known)}"
            )

    def of_these(some: Sequence[Run]) -> list[Run]:
        return [run for run in some if not sources or run.source_key in sources]

    return of_these(runs), of_these(failures)


def _around(path: Path) -> tuple[str, str]:
    """What stands before and after the tables in a Markdown file: nothing, where there is no such file yet.

    Raises InputError for a file without the marks, which would be overwritten.
    """
    if not path.is_file():
        return "", ""
    before, begin, rest = read_text(path).partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"--markdown: {path} exists, and has no lines {BEGIN!r} and {END!r} for the tables to go between")
    return before, after or "\n"


def _markdown(told: Replay, path: Path, plot: Path | None) -> str:
    """The tables between their marks, below the picture, where one is drawn."""
    parts = [cells_markdown(title, cells) for title, cells in fidelity_cells(told)]
    if plot is not None:
        place = Path(os.path.relpath(plot, path.parent)).as_posix()
        parts.insert(0, f"![predicted over measured iteration times]({place})\n")
    return "\n".join([BEGIN, "", *parts, END]) + ("" if path.is_file() else "\n")


def _points(told: Replay) -> list[tuple[str, float, float]]:
    """Source, measured and predicted seconds of an iteration, as their speeds say, of all runs that a picture shows."""
    found = [(c.source_key, c.measured_s, c.predicted_s) for c in told.held_out if not c.assumed]
    return [(source, measured_s, predicted_s) for source, measured_s, predicted_s in found if measured_s and predicted_s]


def _draw(found: Sequence[tuple[str, float, float]], path: Path) -> Path | None:
    """Where the earlier picture is kept now, if any. Draws predicted over measured iteration times."""
    from experiments.pictures import draw_parity
    from experiments.plots import ParityPoint

    points = [ParityPoint(*point) for point in found]
    return draw_parity(points, path, f"{len(points)} iteration times, predicted and measured")
