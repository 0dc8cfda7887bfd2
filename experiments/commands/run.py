"""`motley run`: trains what a plan says, and tells what it measured beside what is simulated."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.commands.options import (
    ConstantsFile,
    PlanFile,
    ReportFile,
    Seed,
    StackName,
    TimelineFile,
    TokenCount,
    TraceFile,
    duration_s,
    errors_about,
    files_behind,
    on_stack,
    whole_number,
)
from experiments.exits import FAILED, INTERRUPTED, NO_ANSWER, tell_error
from experiments.machine import too_large
from experiments.measured import RunReport, measured_run, run_json
from experiments.output import STANDARD_OUTPUT, Outputs, check_apart, check_folder, check_outside, outputs
from experiments.pacing import pace, write_pace
from experiments.parallel import cores
from experiments.tables import plan_table, run_table, run_titles, training_line
from sim.cost.feasibility import infeasible
from sim.metrics import infeasible_report, report_json, with_training
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.judge import Infeasible
from sim.spec.plan import Plan, read_plan
from sim.spec.reading import InputError
from sim.spec.trace import trace_json
from sim.spec.transformer import transformer

if TYPE_CHECKING:
    from runtime.settings import Settings  # it would import torch


def _number(text: object) -> float:
    """The number of a text; its error names the value, which typer's own does not."""
    try:
        return float(str(text))
    except ValueError:
        raise typer.BadParameter(f"expected a number, but got {str(text)!r}") from None


_OPTIMIZER, _KEEPING, _WORKERS = "Optimizer", "Checkpoints and weights", "Workers"


def _whole(flag: str, help: str, minimum: int = 0, panel: str | None = None) -> Any:
    """An option that takes a whole number."""
    return typer.Option(flag, metavar="N", parser=whole_number(minimum), help=help, rich_help_panel=panel)


def _real(flag: str, help: str) -> Any:
    """An option of the optimizer that takes a number."""
    return typer.Option(flag, metavar="X", parser=_number, help=help, rich_help_panel=_OPTIMIZER)


def _folder(flag: str, help: str) -> Any:
    """An option that takes a folder."""
    return typer.Option(flag, metavar="DIR", help=help, show_default=False, rich_help_panel=_KEEPING)


def run(
    plan: PlanFile,
    steps: Annotated[int, _whole("--steps", "Optimizer steps in all, those before --resume included.", 1)],
    data: Annotated[
        str, typer.Option("--data", metavar="DATA", help="text:FILE, text:FOLDER (tokens are bytes), or tokens:FILE.")
    ],
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="What each worker computes on: cpu or cuda.")] = "cpu",
    devices: Annotated[
        str,
        typer.Option("--devices", metavar="NAME", help="real, or paced: instructions last as long as on --cluster."),
    ] = "real",
    pace_file: Annotated[
        Path | None,
        typer.Option(
            "--pace",
            metavar="FILE",
            help="The seconds of paced devices; by default, what is simulated for --cluster.",
            show_default=False,
        ),
    ] = None,
    testbed: Annotated[
        str | None,
        typer.Option("--testbed", metavar="NAME", help="Run in this testbed (motley testbed up).", show_default=False),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="FILE",
            help="The cluster, for peak FLOP/s and the simulated report; by default, the testbed's or this machine's devices.",
            show_default=False,
        ),
    ] = None,
    stack: StackName = None,
    constants: ConstantsFile = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="A preset or config.json in the place of the plan's.", show_default=False),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision", metavar="NAME", help="fp32, tf32, fp16 or bf16, in the place of the plan's.", show_default=False
        ),
    ] = None,
    seed: Seed = 0,
    tokens: TokenCount = None,
    token_type: Annotated[
        str, typer.Option("--token-type", metavar="NAME", help="Of tokens:FILE: uint16, uint32, or auto, by the vocabulary.")
    ] = "auto",
    json_file: ReportFile = None,
    trace: TraceFile = None,
    timeline: TimelineFile = None,
    print_launch: Annotated[
        bool, typer.Option("--print-launch", help="Print the torchrun line of each node, and start nothing.", show_default=False)
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="HOST", help="With --print-launch: where the first node is reached.", show_default=False
        ),
    ] = None,
    learning_rate: Annotated[float, _real("--learning-rate", "The highest rate of the schedule.")] = 3e-4,
    final_rate: Annotated[
        float, _real("--final-rate", "What a linear or cosine schedule ends with, as a fraction of that.")
    ] = 0.1,
    rate_schedule: Annotated[
        str,
        typer.Option("--rate-schedule", metavar="NAME", help="constant, linear or cosine.", rich_help_panel=_OPTIMIZER),
    ] = "cosine",
    warm_up_steps: Annotated[int, _whole("--warm-up-steps", "Steps in which the rate rises.", panel=_OPTIMIZER)] = 0,
    weight_decay: Annotated[float, _real("--weight-decay", "Of matrices; vectors do not decay.")] = 0.1,
    beta1: Annotated[float, _real("--beta1", "Of Adam: the mean of the gradients.")] = 0.9,
    beta2: Annotated[float, _real("--beta2", "Of Adam: the mean of their squares.")] = 0.95,
    epsilon: Annotated[float, _real("--epsilon", "Of Adam: what is added to its divisor.")] = 1e-8,
    clip_norm: Annotated[float, _real("--clip-norm", "The norm that gradients are clipped to; 0 for none.")] = 1.0,
    checkpoints: Annotated[Path | None, _folder("--checkpoints", "Write checkpoints there, one at the end in any case.")] = None,
    checkpoint_every: Annotated[int, _whole("--checkpoint-every", "Steps between checkpoints.", panel=_KEEPING)] = 0,
    keep_checkpoints: Annotated[int, _whole("--keep-checkpoints", "How many stay; 0 for all.", panel=_KEEPING)] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the latest checkpoint; the plan may be another one. Once all steps are done, only --save-weights.",
            show_default=False,
            rich_help_panel=_KEEPING,
        ),
    ] = False,
    weights: Annotated[Path | None, _folder("--weights", "Begin with the weights of a Hugging Face folder.")] = None,
    save_weights: Annotated[Path | None, _folder("--save-weights", "Write the weights there, as Hugging Face does.")] = None,
    timeout: Annotated[
        str,
        typer.Option("--timeout", metavar="TIME", help="How long a worker waits for another.", rich_help_panel=_WORKERS),
    ] = "60s",
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="nccl (default on cuda) or gloo (default on the cpu).",
            show_default=False,
            rich_help_panel=_WORKERS,
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the layers.", show_default=False, rich_help_panel=_WORKERS)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no line for each step.", show_default=False)] = False,
) -> None:
    """Train what a plan says, one worker for each of its devices.

    Prints every step, and at the end the measured iteration beside the
    simulated one. --json writes both reports, --trace what every lane did
    in a typical step, --timeline draws that above the simulation. On CPUs
    the peak FLOP/s is measured. Exit code 1: the plan does not fit.

    Example:

      motley run examples/plans/asymmetric-cpu-4.json --steps 20 \\
        --data text:examples --device cpu --learning-rate 3e-3 \\
        --timeline timeline.png --json run.json
    """
    began_s = time.perf_counter()
    inputs = [plan, cluster, pace_file, constants]
    files = outputs({"--json": json_file, "--trace": trace, "--timeline": timeline}, [*inputs, *_data_files(data)])
    if print_launch and files.paths:
        raise InputError(f"--print-launch starts nothing that {', '.join(files.paths)} could tell of")
    if address is not None and not print_launch:
        raise InputError("--address is where the nodes of --print-launch meet, which was not given")
    where_from = testbed_cluster(testbed, cluster)
    if devices not in ("real", "paced"):
        raise InputError(f"--devices is real or paced, but got {devices!r}")
    if devices == "paced" and where_from is None:
        raise InputError("paced devices are those of a cluster; name it by --cluster, or a testbed by --testbed")
    if pace_file is not None and devices != "paced":
        raise InputError("--pace is of paced devices; say --devices paced")
    if print_launch and (testbed is not None or devices == "paced"):
        raise InputError("--print-launch is for machines of their own, not for a testbed or paced devices")
    if stack is not None and where_from is None:
        raise InputError(f"--stack {stack} takes the place of the stack of --cluster, which was not given")
    if constants is not None and where_from is None:
        raise InputError(f"--constants {constants} are for the simulation on --cluster, which was not given")
    folders = {"--checkpoints": checkpoints, "--save-weights": save_weights}
    for flag, folder in folders.items():
        if folder is not None:
            check_folder(flag, folder)
    check_apart({**files.paths, **folders})
    if (texts := data_folder(data)) is not None:
        # A new report is no part of this run's data; checkpoints are of the data of the run that goes on from them.
        check_outside(texts, {**{flag: path for flag, path in files.paths.items() if Path(path).exists()}, **folders})
    if timeline is not None:
        from experiments.pictures import check_picture  # matplotlib, only where something is drawn

        check_picture("--timeline", timeline)
    if testbed is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # in a namespace no address has a host's name, of which torch warns
    with needing_torch("run"):
        from runtime.launch import launch_lines, launch_locally, takes_steps
        from runtime.settings import Settings, check_runnable, with_model
    settings = Settings(
        steps=steps,
        data=data,
        device=device,
        precision=precision,
        seed=seed,
        learning_rate=learning_rate,
        final_rate=final_rate,
        rate_schedule=rate_schedule,
        warm_up_steps=warm_up_steps,
        weight_decay=weight_decay,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        clip_norm=clip_norm,
        token_type=token_type,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        resume=resume,
        weights=weights,
        save_weights=save_weights,
        timeout_s=duration_s("timeout", timeout),
        pace=pace_file,
        testbed=testbed,
        backend=backend,
        compile=compile,
        quiet=quiet,
    )
    trains = print_launch or takes_steps(settings)
    if not trains and files.paths:
        flags = ", ".join(files.paths)
        raise InputError(f"all {steps} steps of the training in {checkpoints} are done; {flags} would have nothing to tell of")
    where = on_stack(read_cluster(where_from), stack, constants) if where_from is not None else None
    written = read_plan(plan)
    if model is not None:
        transformer(model)  # whose mistake is not the plan's
    files.spare(files_behind(where, written.model, model))
    with errors_about(plan):
        what = with_model(written, model, precision)
        check_runnable(what, settings)
        reason = _too_large(what, where, settings, here=not print_launch)
    if where is not None and what.cluster != where.name:
        tell_error(f"warning: {plan} was made for the cluster {what.cluster!r}, and is told on {where.name!r}")
    if reason is not None:
        files.write("--json", report_json(infeasible_report(reason, time.perf_counter() - began_s)))
        left_out = " and ".join(flag for flag in ("--trace", "--timeline") if flag in files)
        tell_error(f"{plan} is not feasible: {reason.message}" + (f"; {left_out}: nothing was written" if left_out else ""))
        files.finish()
        raise typer.Exit(NO_ANSWER)
    if print_launch:
        for node, line in launch_lines(what, plan, settings, model, address or "HOST"):
            print(f"# on {node}\n{line}")
        return
    with _standard_output_kept(STANDARD_OUTPUT in files.paths.values()), TemporaryDirectory(prefix="motley-pace-") as paces:
        if devices == "paced" and pace_file is None:
            assert where is not None
            settings = replace(settings, pace=write_pace(pace(what, where), Path(paces) / "pace.json"))
        if not trains:
            with _told_of_failures():
                launch_locally(plan, what, settings, model)
            return
        told = run_told(plan, what, settings, model, where)
    measured = with_training(replace(told.measured, wall_s=time.perf_counter() - began_s), what, tokens)
    simulated = told.simulated and with_training(told.simulated, what, tokens)
    told = replace(told, measured=measured, simulated=simulated)
    files.write("--trace", trace_json(told.result.trace))
    if timeline is not None:
        files.tell(timeline, draw_run(told, timeline))
    files.write("--json", run_json(told))
    show_run(told, where, files)
    if told.measured.training is not None:
        files.say(training_line(told.measured.training, len(told.cluster.devices)))
    files.finish()
    if told.failed is not None:
        tell_error(f"error: {told.failed}")
        raise typer.Exit(told.failed.code)


def testbed_cluster(testbed: str | None, cluster: Path | None) -> Path | None:
    """The file of the cluster that a run is told on: the one that is named, else the testbed's. Raises InputError."""
    if testbed is None or cluster is not None:
        return cluster
    from runtime.testbed import find

    return find(testbed).cluster_file


@contextmanager
def needing_torch(command: str) -> Iterator[None]:
    """Makes of a missing torch, which few commands need, one line that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        told = f"motley {command} needs torch, which is not installed; pip install 'motley[runtime]' installs it"
        raise InputError(told) from None


def _data_files(data: str) -> list[Path]:
    """The file of the data, where it is one."""
    path = Path(data.partition(":")[2])
    return [path] if path.is_file() else []


def data_folder(data: str) -> Path | None:
    """The folder of the data, whose texts are what is trained on, where it is one."""
    kind, _, path = data.partition(":")
    return Path(path) if kind == "text" and Path(path).is_dir() else None


def _too_large(plan: Plan, cluster: Cluster | None, settings: Settings, here: bool) -> Infeasible | None:
    """Why the plan cannot run: on GPUs of the cluster, if one is given, or in this machine's memory, if `here` on its CPUs.

    Raises InputError for a device that the cluster does not have.
    """
    if cluster is not None:
        for name in plan.devices:
            cluster.device(name)
    if settings.pace is not None and cluster is not None:
        return infeasible(plan, cluster) or too_large(plan)
    if settings.device == "cpu":
        return too_large(plan) if here else None
    return infeasible(plan, cluster) if cluster is not None else None


@contextmanager
def _standard_output_kept(wanted: bool) -> Iterator[None]:
    """Where wanted, what the workers print goes to standard error meanwhile, for data goes to standard output."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def run_told(plan_path: Path, plan: Plan, settings: Settings, model: str | None, cluster: Cluster | None) -> RunReport:
    """As `measured_run`; tells of a run that fails or is interrupted, and ends the command with its exit code."""
    with _told_of_failures():
        return measured_run(plan_path, plan, settings, model, cluster)


@contextmanager
def _told_of_failures() -> Iterator[None]:
    """Tells of a run that fails or is interrupted, and ends the command with its exit code."""
    from runtime.launch import RunFailed

    try:
        yield
    except RunFailed as failure:
        tell_error(f"error: {failure}")
        raise typer.Exit(failure.code) from None
    except KeyboardInterrupt:
        tell_error(f"interrupted: {_UNFINISHED}")
        raise typer.Exit(INTERRUPTED) from None
    except SystemExit as stop:  # the launcher's, where another signal asks to end
        code = stop.code if isinstance(stop.code, int) else FAILED
        tell_error(f"told to end: {_UNFINISHED}")
        raise typer.Exit(code) from None


_UNFINISHED = "the run did not come to its end, and no report was written"


# --- What is told of a run -------------------------------------------------------------------------------------------


def draw_run(told: RunReport, path: Path, replace: bool = False) -> Path | None:
    """Where the earlier picture is kept now, if any and unless `replace`. Draws the measured timeline above the simulated one."""
    from experiments.pictures import draw_timeline, draw_two_timelines

    titles = run_titles(told)
    if told.simulated_trace is None:
        return draw_timeline(told.trace, told.cluster, path, titles[0], replace)
    return draw_two_timelines(told.trace, told.simulated_trace, told.cluster, path, titles, replace)


def show_run(told: RunReport, cluster: Cluster | None, files: Outputs) -> None:
    """Nothing; prints the plan with the memory it took, the measures beside the simulated ones, and where the loss stands.

    `cluster` is the one that was asked for, if any.
    """
    result, plan = told.result, told.result.trace.plan
    files.console.print()
    if told.simulated is not None:  # else the memory of the devices may not be known
        files.console.print(plan_table(plan, told.cluster, told.measured.peak_bytes))
        files.console.print()
    files.console.print(run_table(told))
    files.console.print()
    first, last = result.first_step + 1, result.first_step + len(result.losses)
    files.say(f"loss {result.losses[0]:.4f} in step {first}, {result.losses[-1]:.4f} in step {last}")
    if result.peak_measured and result.peak_flop_per_s and told.cluster.calibration is None:
        peak = f"{sum(result.peak_flop_per_s.values()) / 1e9:,.1f} GFLOP/s"
        workers, shared = len(plan.devices), ""
        if workers > cores():
            held = f"{cores()} core{'s' if cores() > 1 else ''}"
            shared = f"; they share {held}, and what one leaves idle another uses, which is not simulated"
        files.say(f"MFU and HFU are of the {peak} that the {workers} workers together reached with matmuls alone{shared}")
    if told.stands_in and cluster is not None:
        files.say(f"{cluster.name} has GPUs, and the workers were CPUs: the simulated figures are for the CPUs of this machine")
    for name, kind in result.device_kinds.items() if result.trace.origin == "measured" else ():
        if not told.stands_in and told.cluster.device(name).gpu.name != kind and not result.peak_measured:
            tell_error(
                f"warning: {name} is of kind {told.cluster.device(name).gpu.name} in {told.cluster.name}, but ran on {kind}"
            )
            break
    if told.why_not is not None:
        files.say(f"there is no simulated report: {told.why_not}")
