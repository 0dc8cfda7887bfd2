"""`motley bench`: measures a device or links, and fits what the simulator takes of the device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from experiments.commands.options import whole_number
from experiments.commands.run import needing_torch
from experiments.exits import INTERRUPTED, tell_error
from experiments.output import Outputs, outputs
from experiments.progress import count_progress
from experiments.tables import cells_table
from sim.spec.bench import Bench, LinkMeasurement, bench_yaml, read_bench
from sim.spec.reading import InputError
from sim.spec.writing import efficiency_entries, stack_entries

MOST_ROWS = 40
"""Rows of the table of links."""

_LINKS = "Links"


def bench(
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Write the bench file; '-' is standard output.")],
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="What is measured: cpu or cuda.")] = "cpu",
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            metavar="NAME",
            help="fp32, tf32, fp16 or bf16; several times. Default: fp32 on the cpu, bf16 on cuda (fp16 where there is no bf16).",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small measurements.", show_default=False)] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="Of layers that torch compiled, as those of `motley run --compile` are.", show_default=False
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw the fit over the measurements: .png, .svg or .pdf.", show_default=False
        ),
    ] = None,
    links: Annotated[
        bool,
        typer.Option("--links", help="Measure the links between workers instead.", show_default=False, rich_help_panel=_LINKS),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            parser=whole_number(2),
            help="Workers on this machine; 2 by default, or one for each of --names.",
            show_default=False,
            rich_help_panel=_LINKS,
        ),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--names",
            metavar="NODE/INDEX,...",
            help="The devices that the workers stand for, in a cluster file's names.",
            show_default=False,
            rich_help_panel=_LINKS,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="nccl (default on cuda) or gloo (default on the cpu).",
            show_default=False,
            rich_help_panel=_LINKS,
        ),
    ] = None,
    testbed: Annotated[
        str | None,
        typer.Option(
            "--testbed",
            metavar="NAME",
            help="Measure in a testbed, one worker for each device of its cluster.",
            show_default=False,
            rich_help_panel=_LINKS,
        ),
    ] = None,
    from_log: Annotated[
        list[Path] | None,
        typer.Option(
            "--from-log",
            metavar="FILE",
            help="Read a log of nccl-tests, or iperf3's JSON, instead of measuring; several times.",
            show_default=False,
            rich_help_panel=_LINKS,
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="HOST=NODE",
            help="What a host of --from-log is called in a cluster file; several times.",
            show_default=False,
            rich_help_panel=_LINKS,
        ),
    ] = None,
) -> None:
    """Measure this machine's GPU or CPU, or the links between workers.

    Of a device: matmuls over the shapes that training uses, attention,
    layers, heads, memory, launches, the optimizer; then fits the efficiency
    that the simulator takes of its kind, and tells how well that meets what
    was measured. Of links: messages between every two workers and
    collectives of all.

    Examples:

      motley bench --device cuda --out h200.yaml --plot h200.png

      motley bench --links --workers 4 --out links.yaml

      motley bench --links --from-log all_reduce_perf.log --out links.yaml
    """
    _check_flags(links, from_log, {"--workers": workers, "--names": names, "--backend": backend, "--testbed": testbed}, rename)
    of_device = {"--precision": precision, "--compile": compiled, "--plot": plot}
    if links and (given := next((flag for flag, value in of_device.items() if value), None)):
        raise InputError(f"--links measures no device, of which {given} would be")
    files = outputs({"--out": out, "--plot": plot}, from_log or ())
    if plot is not None:
        from experiments.pictures import check_picture  # matplotlib, only where something is drawn

        check_picture("--plot", plot)
    try:
        if from_log:
            _links_read(from_log, rename or (), files)
        elif links:
            _links_measured(device, backend, names, workers, quick, testbed, files)
        else:
            _device_measured(device, precision or (), quick, compiled, plot, files)
    except KeyboardInterrupt:
        tell_error("interrupted: nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    files.finish()


def _check_flags(
    links: bool, from_log: Sequence[Path] | None, of_workers: dict[str, object], rename: Sequence[str] | None
) -> None:
    """Nothing. Raises InputError for flags that need others, or exclude them."""
    given = [flag for flag, value in of_workers.items() if value is not None]
    if not links:
        given += (["--from-log"] if from_log else []) + (["--rename"] if rename else [])
        if given:
            raise InputError(f"{given[0]} is of links, but --links is not given")
    elif from_log and given:
        raise InputError(f"--from-log measures nothing, of which {given[0]} would be")
    elif rename and not from_log:
        raise InputError("--rename is of the hosts in a log, but --from-log is not given")


UNSTEADY = 0.2
"""Quartiles further apart than this share of the median say that a machine was not idle."""

# --- A device --------------------------------------------------------------------------------------------------------


def _device_measured(name: str, asked: Sequence[str], quick: bool, compiled: bool, plot: Path | None, files: Outputs) -> None:
    """Nothing; measures a device, fits its constants, and tells of both."""
    with needing_torch("bench"):
        from runtime.bench import bench_cases, bench_device, bench_precisions, described, measure
    from experiments.bench import draw_bench, fit_bench  # scipy, which no other command shall wait for

    device = bench_device(name)
    precisions = bench_precisions(device, asked)
    cases = bench_cases(device, precisions, quick, compiled)
    # By lot, so that a machine that is slower for a while is not slower for one sort of work.
    order = random.Random(0).sample(range(len(cases)), len(cases))
    found = {}
    with count_progress("measurements", len(cases)) as progress:
        for i in order:
            found[i] = measure(cases[i], device, quick)
            progress()
    measurements = [m for i in range(len(cases)) if (m := found[i]) is not None]
    fit = fit_bench(described(device, precisions, measurements, compiled))
    files.write("--out", bench_yaml(fit.bench))
    if plot is not None:
        files.tell(plot, draw_bench(fit, plot))
    rows = [(name, str(count), f"{100 * median:.1f}", f"{100 * ninth:.1f}") for name, count, median, ninth in fit.errors()]
    title = f"{fit.bench.device}: how far the fitted constants are from what was measured"
    files.console.print(cells_table(title, [("operation", "measured", "median error, %", "90th percentile, %"), *rows]))
    files.console.print()
    kind = fit.bench.gpu_kind
    assert kind is not None
    files.say(f"efficiency of {kind.name}: {_constants(efficiency_entries(kind.efficiency))}")
    if fit.bench.stack is not None:
        files.say(f"stack: {_constants(stack_entries(fit.bench.stack))}")
    if len(measurements) < len(cases):
        tell_error(f"warning: {len(cases) - len(measurements)} measurements are left out, for which memory did not suffice")
    for line in fit.at_bounds:
        tell_error(f"warning: {line}")
    unsteady = sum(m.spread > UNSTEADY for m in measurements)
    if unsteady > len(measurements) / 10:
        tell_error(
            f"warning: {unsteady} of {len(measurements)} measurements differ by more than {UNSTEADY:.0%} from repeat to repeat: "
            "something else runs on this machine"
        )
    if (threads := fit.bench.threads or 1) > 1:
        tell_error(
            f"warning: measured with {threads} threads, as a CPU device of {threads} cores would compute; those that `motley "
            "discover` writes have one: OMP_NUM_THREADS=1"
        )


def _constants(entries: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in entries.items() if key != "source")


# --- Links -----------------------------------------------------------------------------------------------------------


def _links_measured(
    device: str, backend: str | None, names: str | None, workers: int | None, quick: bool, testbed: str | None, files: Outputs
) -> None:
    """Nothing; measures the links between workers on this machine."""
    with needing_torch("bench"):
        from runtime.launch import RunFailed
        from runtime.link_bench import Options, launch_links
    devices = [] if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if testbed is not None and not devices:
        from runtime.testbed import find
        from sim.spec.cluster import read_cluster

        devices = [own.name for own in read_cluster(find(testbed).cluster_file).devices]
    with TemporaryDirectory(prefix="motley-bench-") as folder:
        options = Options(Path(folder) / "links.yaml", device, backend, tuple(devices), quick, testbed)
        try:
            launch_links(options, workers or len(devices) or 2)
        except RunFailed as failure:
            tell_error(f"error: {failure}")
            raise typer.Exit(failure.code) from None
        _tell_links(read_bench(options.out), files)


def _links_read(logs: Sequence[Path], rename: Sequence[str], files: Outputs) -> None:
    """Nothing; reads what other programs measured."""
    from experiments.link_logs import read_link_log, renamed

    called = {}
    for pair in rename:
        host, equals, node = pair.rpartition("=")
        if not (host and equals and node):
            raise InputError(f"--rename is HOST=NODE, but got {pair!r}")
        called[host] = node
    found = [link for log in logs for link in read_link_log(log)]
    known = {name for link in found for member in link.members for name in (member, member.rpartition("/")[0])}
    for host in called:
        if host not in known:
            hosts = ", ".join(dict.fromkeys(member for link in found for member in link.members))
            raise InputError(f"--rename: no log has the host {host!r}; they have {hosts}")
    read = Bench(f"logs: {', '.join(log.name for log in logs)}", links=tuple(renamed(found, called)))
    _tell_links(read, files)


def _tell_links(measured: Bench, files: Outputs) -> None:
    """Nothing; writes the bench and shows for each pair and group what the smallest takes, and at which rate the largest goes."""
    files.write("--out", bench_yaml(measured))
    groups: dict[tuple[str, tuple[str, ...]], list[LinkMeasurement]] = {}
    for link in measured.links:
        groups.setdefault((link.operation, link.members), []).append(link)
    rows = []
    for (operation, members), own in groups.items():
        least, most = min(own, key=lambda link: link.num_bytes), max(own, key=lambda link: link.num_bytes)
        who = " to ".join(members) if operation == "send" else f"{len(members)} from {members[0]} to {members[-1]}"
        rate = "-" if most.num_bytes < 1000 else f"{most.num_bytes / most.seconds / 1e9:.3g}"
        rows.append((operation, who, f"{least.num_bytes:,}", f"{least.seconds * 1e6:.4g}", f"{most.num_bytes:,}", rate))
    heads = ("operation", "between", "smallest, bytes", "takes, us", "largest, bytes", "goes at, GB/s")
    files.console.print(cells_table(f"{measured.device}: {len(measured.links)} measurements", [heads, *rows[:MOST_ROWS]]))
    files.console.print()
    if len(rows) > MOST_ROWS:
        files.say(f"and {len(rows) - MOST_ROWS} more, which are in the file")
