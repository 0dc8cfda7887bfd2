"""Results of runs that never ran, for tests: a simulated trace taken for a measured one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from runtime.results import RunResult
from sim.engine import simulate
from sim.spec.cluster import Cluster
from sim.spec.plan import Plan


def result_of(
    plan: Plan,
    cluster: Cluster,
    kind: str = "CPU",
    peaks: Mapping[str, float] | None = None,
    slower: float = 1.0,
    iteration_s: float | None = None,
    **changes: object,
) -> RunResult:
    """A run of three steps whose measured trace is the plan's simulation on the cluster, so many times slower.

    Its devices are of one kind, and have these peaks, which were measured. The median step is that of the trace unless
    `iteration_s` says otherwise; every device held 1 MiB.
    """
    trace = simulate(plan, cluster)
    trace = replace(
        trace,
        origin="measured",
        iteration_s=trace.iteration_s * slower,
        spans=tuple(span._replace(start_s=span.start_s * slower, end_s=span.end_s * slower) for span in trace.spans),
        peak_bytes=dict.fromkeys(plan.devices, 2**20),
        links=(),
    )
    step_s = trace.iteration_s if iteration_s is None else iteration_s
    values: dict[str, object] = {
        "trace": trace,
        "losses": (5.5, 4.5, 3.5),
        "step_s": (2 * step_s, step_s, step_s),
        "learning_rates": (1e-3, 1e-3, 1e-3),
        "gradient_norms": (1.0, 2.0, 3.0),
        "first_step": 0,
        "iteration_s": step_s,
        "tokens_per_s": plan.global_batch * plan.sequence_length / step_s,
        "peak_flop_per_s": dict.fromkeys(plan.devices, 50e9) if peaks is None else peaks,
        "peak_measured": kind == "CPU",
        "device_kinds": dict.fromkeys(plan.devices, kind),
    }
    return RunResult(**{**values, **changes})  # type: ignore[arg-type]
