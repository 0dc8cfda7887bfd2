"""From a bench to constants: the efficiency record and the stack that make `sim.cost.pieces` tell what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.fit_pieces import (
    RECORD_CONSTANTS,
    Constant,
    GradientsWork,
    HeadWork,
    LaunchWork,
    Measurement,
    OptimizerWork,
    PiecesSearch,
    Work,
)
from sim.cost.compute import optimizer_bytes
from sim.cost.pieces import AttentionWork, MatmulWork, layer_work
from sim.spec import bench
from sim.spec.bench import Bench, measured_model
from sim.spec.counts import PRECISION_BYTES
from sim.spec.gpu import GpuKind
from sim.spec.reading import InputError
from sim.spec.stack import Stack

STACK = "bench"

SUMS = "sums of gradients"
"""The stack of these measurements alone: the backward of a measured layer adds its gradients to nothing."""

STACK_CONSTANTS: Mapping[str, Sequence[Constant]] = {
    "layer": (
        Constant("memory_traffic", 1.5, 0.3, 10.0, 0.7),
        Constant("sharded_traffic", 3.0, 0.3, 30.0, 0.7),
        Constant("backward_traffic", 1.0, 0.5, 5.0, 0.3),
        Constant("kernel_s", 3e-6, 1e-8, 1e-3, 1.0),
    ),
    "mixture": (Constant("routing_traffic", 3.0, 0.3, 30.0, 0.7),),
    "head": (Constant("loss_traffic", 1.5, 0.3, 10.0, 0.7),),
    "optimizer": (Constant("optimizer_traffic", 1.3, 0.3, 10.0, 0.7),),
    "gradients": (Constant("gradient_bytes", 10.0, 1.0, 100.0, 0.7),),
}
"""What the runtime's kernels move beyond fused ones, by what tells it."""

MATMUL_SCALE = Constant("matmul_scale", 1.0, 0.5, 1.5, 0.1)
"""Matmuls in a layer have other layouts in the backward, and find other things in the caches, than matmuls alone."""

LAUNCH = Constant("launch_s", 2e-6, 1e-8, 1e-3, 0.5)
"""Of a record, too; the published figures say nothing of it."""

WIDER = 2.0
"""One device, measured on many shapes, tells more than the published figures that the widths of the priors are for."""

BOUNDS: Mapping[str, tuple[float, float]] = {
    "matmul_fraction": (0.05, 1.0),
    "fp32_fraction": (0.05, 1.0),
    "matmul_half_s": (1e-8, 5e-3),
    "matmul_traffic": (1e-3, 1.0),
    "attention_fraction": (0.01, 1.0),
    "attention_keys": (1.0, 2000.0),
    "attention_rows": (1.0, 1e6),
    "attention_width": (0.1, 1e3),
    "memory_fraction": (0.05, 1.0),
    "launch_s": (LAUNCH.least, LAUNCH.most),
}
"""Least and most of each constant of a record: wider than those of the published figures, for CPUs are measured, too."""

AT_BOUND = 1e-3
"""A constant this near to its bound, as a fraction, lies on it."""


@dataclass(frozen=True)
class BenchFit:
    """What a fit on a bench found, and how well it tells what was measured."""

    bench: Bench
    """With the efficiency in its kind, and the stack."""
    measured_s: Sequence[float]
    predicted_s: Sequence[float]
    """Of the bench's measurements, in their order; of `host`, which nothing predicts, both are the same."""
    at_bounds: Sequence[str]
    """A line for each constant that lies at a bound of the fit."""

    def errors(self) -> list[tuple[str, int, float, float]]:
        """For each operation, and last for all: its name, the count, median and 90th percentile of the relative errors."""
        found: dict[str, list[float]] = {}
        pairs = zip(self.bench.measurements, self.predicted_s, self.measured_s, strict=True)
        for m, predicted_s, measured_s in pairs:
            if m.operation != "host":
                found.setdefault(m.operation, []).append(abs(predicted_s / measured_s - 1))
        found["all"] = [error for errors in list(found.values()) for error in errors]
        return [(name, len(errors), float(np.median(errors)), float(np.quantile(errors, 0.9))) for name, errors in found.items()]


def fit_bench(measured: Bench) -> BenchFit:
    """The constants at the least robust error over the measurements of a device, starting from those its kind has.

    What the measurements do not tell stays. Raises InputError for a bench without measurements of a device.
    """
    kind = measured.gpu_kind
    if kind is None or not measured.measurements:
        raise InputError("a fit of the efficiency needs measurements of a device, but the bench has none")
    work = [_measurement(m, kind) for m in measured.measurements]
    told = [m for m in work if m is not None]
    operations = {m.what.split()[0] for m in told}
    stack_constants = [c for name, own in STACK_CONSTANTS.items() if name in operations - {"gradients"} for c in own]
    stack_constants += [MATMUL_SCALE] if {"layer", "matmul"} <= operations else []
    stacks = {STACK: stack_constants, SUMS: STACK_CONSTANTS["gradients"]}
    search = PiecesSearch(told, lambda kind: kind.name, _record_constants(kind), stacks)
    values = {owner: {name: float(f"{value:.4g}") for name, value in found.items()} for owner, found in search.fit().items()}
    predicted = iter(search.predict(values))
    predicted_s = [m.seconds if w is None else float(next(predicted)) for m, w in zip(measured.measurements, work, strict=True)]
    found: dict[str, Any] = dict(values.get(kind.name, {}))
    efficiency = replace(kind.efficiency, **found)
    own: dict[str, Any] = {**values.get(STACK, {}), **values.get(SUMS, {})}
    hosts = [m.seconds / m.shape["kernels"] for m in measured.measurements if m.operation == "host"]
    if hosts:
        own["host_s"] = float(f"{np.median(hosts):.4g}")
    fit = BenchFit(measured, [m.seconds for m in measured.measurements], predicted_s, _at_bounds(search, values))
    source = _source(fit, [name for name in BOUNDS if name not in found])
    efficiency = replace(efficiency, source=source)
    stack = Stack(STACK, **own, source=source) if own else None
    return replace(fit, bench=replace(measured, gpu_kind=replace(kind, efficiency=efficiency), stack=stack))


def _record_constants(kind: GpuKind) -> list[Constant]:
    """The constants of a record, starting from what the kind has."""
    constants = []
    for c in (*RECORD_CONSTANTS, LAUNCH):
        if c.name in BOUNDS:
            least, most = BOUNDS[c.name]
            start = min(max(getattr(kind.efficiency, c.name) or c.start, least), most)
            constants.append(Constant(c.name, start, least, most, WIDER * c.width))
    return constants


def _measurement(m: bench.Measurement, kind: GpuKind) -> Measurement | None:
    """The measurement as the fit knows it; None for what is no work of the device."""
    if m.operation == "host":
        return None
    what = m.operation.split()[0]
    stack = SUMS if what == "gradients" else STACK if what in STACK_CONSTANTS else ""
    return Measurement(m.operation, "bench", kind, m.precision, "", "", _work(m), m.seconds, stack)


def _work(m: bench.Measurement) -> Work:
    """What an operation does, as `sim.cost.pieces` counts it."""
    shape, size = m.shape, PRECISION_BYTES[m.precision]
    what = m.operation.split()[0]
    if what == "matmul":
        rows, columns, inner = shape["rows"], shape["columns"], shape["inner"]
        return MatmulWork(1, 2 * rows * columns * inner, size * (rows * inner + inner * columns + rows * columns))
    if what == "attention":
        tokens, length, width = shape["sequences"] * shape["sequence_length"], shape["sequence_length"], shape["head_dim"]
        flop = 4.0 * tokens * length * shape["heads"] * width
        num_bytes = 2 * tokens * (shape["heads"] + shape["kv_heads"]) * width * size
        # Flash: half of it behind the causal mask, as `sim.cost.pieces.layer_work` has it.
        return AttentionWork(flop / 2, flop / length, tokens * shape["heads"], width, num_bytes, True)
    if what in ("layer", "mixture"):
        sizes = shape["sequences"], shape["sequence_length"], shape["tensor_parallel"]
        return layer_work(measured_model(shape), *sizes, False, size, True, 1, 1)
    if what == "head":
        return HeadWork(measured_model(shape), shape["sequences"], shape["sequence_length"])
    if what == "gradients":
        return GradientsWork(shape["parameters"])
    if what == "optimizer":
        return OptimizerWork(shape["parameters"] * optimizer_bytes(m.precision, "fp32", "adamw"))
    return LaunchWork(shape["kernels"]) if what == "launch" else float(shape["bytes"])


def _at_bounds(search: PiecesSearch, values: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each constant at a bound."""
    lines = []
    for owner, c in search.constants:
        value = values[owner][c.name]
        for bound, word in ((c.least, "least"), (c.most, "most")):
            if abs(value / bound - 1) < AT_BOUND:
                lines.append(f"{c.name} is at {bound:g}, the {word} that the fit allows")
    return lines


def _source(fit: BenchFit, kept: Sequence[str]) -> str:
    """On what the constants were fitted, and how well they tell it."""
    name, count, median, ninth = fit.errors()[-1]
    assert name == "all"
    rest = f"; as before: {', '.join(kept)}" if kept else ""
    measured = fit.bench
    how = ", ".join((*measured.precisions, *(["layers compiled"] if measured.compiled else [])))
    return (
        f"motley bench on {measured.device} ({how}): {count} measurements, met within "
        f"{median:.3f} in the median and {ninth:.3f} in nine of ten{rest}"
    )


def draw_bench(fit: BenchFit, path: str | Path) -> Path | None:
    """Where the earlier picture is kept now, if any. Draws the seconds by the fitted constants over those measured."""
    from matplotlib.figure import Figure  # only where something is drawn

    from experiments.plots import ParityPoint, plot_parity, save_figure

    pairs = zip(fit.bench.measurements, fit.measured_s, fit.predicted_s, strict=True)
    points = [ParityPoint(m.operation, measured, predicted) for m, measured, predicted in pairs if m.operation != "host"]
    axes = plot_parity(points, title=f"{fit.bench.device}: {len(points)} measurements and the fit on them")
    axes.set_xlabel("measured time, in s")
    axes.set_ylabel("time by the fitted constants, in s")
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # finds the ticks, and so how far to the left their axis' label has to be
    return save_figure(figure, path)
