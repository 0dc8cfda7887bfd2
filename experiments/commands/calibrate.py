"""`motley calibrate`: from measured runs to the constants of a cluster, and how well plans are predicted then."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.commands.options import ClusterFile, ReportFile, Seed, files_behind
from experiments.compilation import compile_first
from experiments.exits import tell_error
from experiments.judges import ESTIMATE
from experiments.output import outputs
from sim.spec.bench import read_bench
from sim.spec.cluster import cluster_yaml, read_cluster
from sim.spec.reading import InputError
from sim.spec.trace import read_trace

if TYPE_CHECKING:
    from sim.calibrate import Calibrated


def _fraction(text: object) -> float:
    """The number between 0 and 1, ends left out, of a text; its error names the value, which typer's own does not."""
    try:
        number = float(str(text))
    except ValueError:
        number = -1.0
    if not 0 < number < 1:
        raise typer.BadParameter(f"expected a number above 0 and below 1, but got {str(text)!r}")
    return number


def calibrate(
    cluster: ClusterFile,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="Write the calibrated cluster there; '-' is standard output.")
    ],
    traces: Annotated[
        list[Path] | None,
        typer.Option("--traces", metavar="FILE", help="A run's trace (motley run --trace); may be repeated.", show_default=False),
    ] = None,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[TRACE]...", help="More traces, as a shell's *.json gives them.")
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option("--bench", metavar="FILE", help="What motley bench measured; may be repeated.", show_default=False),
    ] = None,
    links: Annotated[
        list[Path] | None,
        typer.Option("--links", metavar="FILE", help="As --bench, of links; may be repeated.", show_default=False),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            metavar="FILE",
            help="A CSV of runs elsewhere, as motley validate reads it: those on this cluster's kinds count.",
            show_default=False,
        ),
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(
            "--holdout",
            metavar="FRACTION",
            parser=_fraction,
            help="Tell the errors of so many plans, held out of one fit to the others; by default each is held out once.",
            show_default=False,
        ),
    ] = None,
    several_models: Annotated[
        bool, typer.Option("--several-models", help="The runs may be of different models.", show_default=False)
    ] = False,
    seed: Seed = 0,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML page of it all.", show_default=False)
    ] = None,
    json_file: ReportFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw predicted over measured times: .png, .svg or .pdf.", show_default=False
        ),
    ] = None,
) -> None:
    """Fit a cluster's constants to measured runs.

    Prints how well plans held out of the fit are predicted before and
    after, and what was fitted. --out writes the cluster with the constants
    fitted on all runs; simulate, plan and run then tell an interval. See
    docs/calibrate.md.

    Example:

      motley calibrate --cluster c.yaml --traces runs/*.json \\
        --out c.calibrated.yaml --report calibration.html
    """
    from experiments import calibration as told  # scipy, only where something is fitted
    from sim.calibrate import calibrate as calibrated

    given = [*(traces or ()), *(more or ())]
    benches = [*(bench or ()), *(links or ())]
    if not given and not benches and runs is None:
        raise InputError("nothing to fit to: give --traces, --bench, --links or --runs")
    if holdout is not None and not given:
        raise InputError(f"--holdout {holdout:g} is of runs' plans, but there are no --traces")
    if plot is not None and not given:
        raise InputError(f"--plot {plot}: without --traces there is nothing to draw")
    for path in given:
        if given.count(path) > 1:
            raise InputError(f"--traces: {path} is given more than once")
    flags = {"--out": out, "--report": report, "--json": json_file, "--plot": plot}
    files = outputs(flags, inputs=[cluster, *given, *benches, *([runs] if runs is not None else [])])
    if plot is not None:
        from experiments.pictures import check_picture  # matplotlib, only where something is drawn

        check_picture("--plot", plot)
    where = read_cluster(cluster)
    files.spare(files_behind(where))
    elsewhere = told.runs_elsewhere(runs, where) if runs is not None else []
    ran = [(str(path), read_trace(path)) for path in given]
    measured = [(str(path), read_bench(path)) for path in benches]
    if ran:
        compile_first(ESTIMATE)
    found = calibrated(where, ran, measured, holdout, seed, several_models, elsewhere)
    text = cluster_yaml(found.cluster)
    if found.cluster.calibration is None:
        text = f"# Fitted on {', '.join(str(path) for path in (*benches, *([runs] if runs is not None else [])))}.\n{text}"
    files.write("--out", text)
    if report is not None:
        files.write("--report", told.calibration_page(found))
    files.write("--json", told.calibration_json(found))
    if plot is not None:
        _draw(found, plot)
        files.tell(plot, None)
    for line in told.warnings(found):
        tell_error(f"warning: {line}")
    if found.predictions:
        files.say(f"errors of the iteration time; {found.how}")
        files.console.print(told.errors_table(found))
    for line in told.sentences(found):
        files.say(line)
    if any(one.told for one in found.constants):
        files.console.print()
        files.console.print(told.constants_table(found))
    elif (line_of_bench := told.taken_line(found)) is not None:
        files.say(line_of_bench)
    if (line_of_rest := told.not_told_line(found)) is not None:
        files.say(line_of_rest)
    files.finish()


def _draw(found: Calibrated, path: Path) -> None:
    """Nothing; draws predicted over measured times into a file."""
    from matplotlib.figure import Figure

    from experiments.calibration import parity_axes
    from experiments.plots import save_figure

    drawn = parity_axes(found.predictions, found.how).get_figure(root=True)
    assert isinstance(drawn, Figure)
    save_figure(drawn, path)
