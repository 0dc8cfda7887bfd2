"""A run told: the report of what it measured, beside the simulator's for the same plan on the same cluster."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from experiments.machine import allocated_bytes, stand_in, with_cpus_apart, with_measured_peaks
from sim.cost.feasibility import infeasible
from sim.engine import simulate
from sim.metrics import Report, recompute_flop, report, report_json
from sim.spec.cluster import Cluster, Node, cluster_yaml
from sim.spec.counts import model_flop
from sim.spec.gpu import is_cpu
from sim.spec.plan import Plan
from sim.spec.reading import InputError
from sim.spec.trace import Trace

if TYPE_CHECKING:  # they would import torch
    from runtime.launch import RunFailed
    from runtime.results import RunResult
    from runtime.settings import Settings


@dataclass(frozen=True)
class RunReport:
    """What a run measured and what was simulated of it, for tables, pictures and files.

    `peak_bytes` of both reports leave the CUDA context out, which a run does not measure and a CPU does not have.
    """

    result: RunResult
    """Its trace tells the cluster, where something is simulated on it."""
    cluster: Cluster
    """On which both are told: the user's, or one that stands for the machine."""
    stands_in: bool
    """Whether the cluster stands for the machine; then `mfu` and `hfu` are of the plan's devices, as `mfu_used` is."""
    trace: Trace
    """The measured step, taken to last as long as the median step."""
    measured: Report
    simulated_trace: Trace | None
    simulated: Report | None
    why_not: str | None
    """Why nothing is simulated; None where it is."""
    failed: RunFailed | None = None
    """What ended the training early, where it left its results first: a loss that was not finite."""


def measured_run(plan_path: Path, plan: Plan, settings: Settings, model: str | None, cluster: Cluster | None) -> RunReport:
    """The report of a run on this machine, which it makes: one worker for each device of the plan.

    `plan_path` and `model` are what the workers read, `plan` what comes of them. Raises InputError, KeyboardInterrupt, and
    `runtime.launch.RunFailed` where a worker fails before there are results.
    """
    from runtime.launch import RunFailed, launch_locally
    from runtime.results import is_written, read_result

    began_s, failed = time.perf_counter(), None
    with TemporaryDirectory(prefix="motley-run-") as folder:
        try:
            launch_locally(plan_path, plan, replace(settings, results=Path(folder)), model)
        except RunFailed as failure:
            if not is_written(folder):
                raise
            failed = failure
        result = read_result(folder)
    through_host = settings.chosen_backend == "gloo"
    told = run_report(result, cluster, settings.device, through_host, time.perf_counter() - began_s)
    return replace(told, failed=failed)


def run_report(result: RunResult, cluster: Cluster | None, device: str, through_host: bool, wall_s: float = 0.0) -> RunReport:
    """The report of a run on a `device` (cpu or cuda), with the simulated one where that can be made.

    A cluster of GPUs says nothing of a run on CPUs, for which the machine then stands. Raises InputError for devices that the
    cluster does not have.
    """
    plan = result.trace.plan
    emulated = cluster is not None and result.trace.origin == "paced"
    on_cpus = cluster is not None and all(is_cpu(cluster.device(name).gpu) for name in plan.devices)
    stands_in = cluster is None or (device == "cpu" and not on_cpus and not emulated)
    why_not = None
    if cluster is None or stands_in:
        try:
            cluster = stand_in(plan, result, device, through_host)
        except InputError as error:
            why_not = str(error)
            cluster = _names_alone(plan, result)
    elif device == "cpu" and not emulated:
        cluster = with_measured_peaks(cluster, plan, result)
    trace = _as_median(result)
    measured = report(trace, cluster, wall_s)
    if stands_in:
        measured = _of_used_devices(measured, result)
    if why_not is not None:
        measured = replace(measured, energy_j=None, dollars=None)
    simulated_trace = simulated = None
    began_s = time.perf_counter()
    if why_not is None:
        try:
            reason = infeasible(plan, cluster)
            if reason is not None and reason.reason != "memory":  # of which the run had enough
                raise InputError(reason.message)
            simulated_trace = replace(simulate(plan, cluster), peak_bytes=allocated_bytes(plan, device))
            simulated = report(simulated_trace, cluster, time.perf_counter() - began_s)
            simulated = _of_used_devices(simulated, result) if stands_in else simulated
        except InputError as error:
            why_not = str(error)
    if simulated is not None:
        result = replace(result, trace=replace(result.trace, ran_on=_file_text(cluster)))
    return RunReport(result, cluster, stands_in, trace, measured, simulated_trace, simulated, why_not)


def _file_text(cluster: Cluster) -> str | None:
    """The text of the cluster's file; None for a bandwidth matrix that is in no file."""
    try:
        return cluster_yaml(replace(cluster, nodes=with_cpus_apart(cluster.nodes)))
    except InputError:
        return None


def _names_alone(plan: Plan, result: RunResult) -> Cluster:
    """The devices of a run and the names of their kinds, for reports and labels; nothing else of this cluster is true."""

    def renamed(node: Node) -> Node:
        own = [name for name in plan.devices if name.startswith(f"{node.name}/")]
        kinds = dict.fromkeys(result.device_kinds[name] for name in own)
        return replace(node, gpu=replace(node.gpu, name=" or ".join(kinds)))

    cluster = stand_in(plan, result, "cpu", through_host=True)
    return replace(cluster, nodes=tuple(renamed(node) for node in cluster.nodes))


def _as_median(result: RunResult) -> Trace:
    """The measured trace with the iteration of the median step.

    The time that a step takes beyond its spans, as for its data, is idle; where the trace is of a longer step, it is scaled.
    """
    trace = result.trace
    scale = min(1.0, result.iteration_s / trace.iteration_s)
    spans = trace.spans
    if scale < 1:
        spans = tuple(span._replace(start_s=span.start_s * scale, end_s=span.end_s * scale) for span in spans)
    return replace(trace, iteration_s=result.iteration_s, spans=spans)


def _of_used_devices(report: Report, result: RunResult) -> Report:
    """The report with MFU and HFU of the plan's devices, by the peaks that the run knows; None where it does not know all."""
    plan, iteration_s = result.trace.plan, report.iteration_s
    peaks = [result.peak_flop_per_s.get(name, 0.0) for name in plan.devices]
    if iteration_s is None or not all(peaks):
        return replace(report, mfu=None, mfu_used=None, hfu=None)
    flop = model_flop(plan.transformer, plan.global_batch, plan.sequence_length)
    at_peak = sum(peaks) * iteration_s
    return replace(report, mfu=flop / at_peak, mfu_used=flop / at_peak, hfu=(flop + recompute_flop(plan)) / at_peak)


def run_json(told: RunReport) -> str:
    """The text of a run's file: the measured report, what the steps did, and last the simulated report, or null and why.

    A loss or a norm that is not finite is null.
    """
    result = told.result
    facts = {
        "losses": _finite(result.losses),
        "step_s": list(result.step_s),
        "learning_rates": list(result.learning_rates),
        "gradient_norms": _finite(result.gradient_norms),
        "first_step": result.first_step,
        "resumed_from": result.resumed_from,
        "peak_flop_per_s": dict(result.peak_flop_per_s),
        "peak_measured": result.peak_measured,
        "device_kinds": dict(result.device_kinds),
        "cluster": told.cluster.name,
        "cluster_stands_in": told.stands_in,
        "not_simulated": told.why_not,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}" for key, value in facts.items()]
    simulated = "null" if told.simulated is None else report_json(told.simulated).strip().replace("\n", "\n  ")
    lines.append(f'  "simulated": {simulated}')
    return report_json(told.measured).removesuffix("\n}\n") + ",\n" + ",\n".join(lines) + "\n}\n"


def _finite(numbers: Iterable[float]) -> list[float | None]:
    return [number if math.isfinite(number) else None for number in numbers]
