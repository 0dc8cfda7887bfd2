"""The fit on a bench: it finds the constants that made up the times it is given, and says where it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.bench import BOUNDS, BenchFit, draw_bench, fit_bench
from runtime.bench import HOST_KERNELS, HOST_LAYER, HOST_LAYERS
from sim.cost.pieces import head_seconds, layer_seconds
from sim.spec.bench import Bench, Measurement, measured_model
from sim.spec.gpu import GpuKind, gpu_kind
from sim.spec.reading import InputError
from sim.spec.stack import Stack

PEAK, BANDWIDTH = 989.4e12, 4.8e12
"""Of an H200 in bf16."""


def bench(*measurements: Measurement, kind: GpuKind | None = None) -> Bench:
    return Bench("a GPU", "H200", ("bf16",), None, {}, measurements, (), kind or gpu_kind("H200"))


def matmul(rows: int, columns: int, inner: int, seconds: float, precision: str = "bf16") -> Measurement:
    return Measurement("matmul", {"rows": rows, "columns": columns, "inner": inner}, precision, seconds)


def simple_times() -> list[Measurement]:
    """By hand: a matmul takes (FLOP / peak + 12 us) / 0.62 + 0.45 x bytes / bandwidth and a launch of 3 us; memory moves at 0.8
    of the bandwidth, an optimizer's 30 bytes a parameter 1.5 times, and a sum of gradients 14 bytes a parameter."""
    found = []
    for m in (256, 1024, 4096, 16384):
        for n, k in ((1024, 4096), (4096, 1024), (8192, 8192), (256, 16384), (12288, 4096)):
            num_bytes = 2 * (m * k + k * n + m * n)
            found.append(matmul(m, n, k, (2 * m * n * k / PEAK + 12e-6) / 0.62 + 0.45 * num_bytes / BANDWIDTH + 3e-6))
    found += [Measurement("memory", {"bytes": size}, "bf16", size / (0.8 * BANDWIDTH)) for size in (10**8, 10**9, 10**10)]
    # Gradient 4, two states 16, the copy in fp32 8, the parameter 2.
    found += [Measurement("optimizer", {"parameters": n}, "bf16", 1.5 * 30 * n / (0.8 * BANDWIDTH)) for n in (10**7, 10**9)]
    found += [Measurement("gradients", {"parameters": 10**9}, "bf16", 14 * 10**9 / (0.8 * BANDWIDTH))]
    found += [Measurement("launch", {"kernels": 200}, "bf16", 200 * 3e-6)]
    return found


def test_the_constants_that_times_were_made_with_are_found() -> None:
    fit = fit_bench(bench(*simple_times(), *simple_times()))
    kind, stack = fit.bench.gpu_kind, fit.bench.stack
    assert kind is not None and stack is not None
    found = kind.efficiency
    assert found.matmul_fraction == pytest.approx(0.62, rel=0.02)
    assert found.matmul_half_s == pytest.approx(12e-6, rel=0.05)
    assert found.matmul_traffic == pytest.approx(0.45, rel=0.12)  # which decides little of these times, and the prior some
    assert found.memory_fraction == pytest.approx(0.8, rel=0.01)
    assert found.launch_s == pytest.approx(3e-6, rel=0.02)
    assert stack.optimizer_traffic == pytest.approx(1.5, rel=0.03)
    assert stack.gradient_bytes == pytest.approx(14, rel=0.03)
    name, count, median, ninth = fit.errors()[-1]
    assert (name, count) == ("all", 54)
    assert median <= ninth <= 0.02
    assert fit.at_bounds == []
    # What no measurement tells stays as it was, and the source says so.
    before = gpu_kind("H200").efficiency
    assert (found.attention_keys, found.fp32_fraction) == (before.attention_keys, before.fp32_fraction)
    assert "54 measurements" in found.source
    assert "as before: fp32_fraction, attention_fraction, attention_keys, attention_rows" in found.source


def test_the_rates_of_layers_and_of_attention_are_found() -> None:
    truth = replace(
        gpu_kind("H200").efficiency,
        matmul_fraction=0.6,
        attention_fraction=0.5,
        attention_rows=9e3,
        attention_width=48.0,
        memory_fraction=0.75,
    )
    kind = replace(gpu_kind("H200"), efficiency=truth)
    traffic = {"memory_traffic": 1.2, "sharded_traffic": 4.0, "routing_traffic": 5.0, "loss_traffic": 2.2}
    traffic |= {"backward_traffic": 1.3}
    stack = Stack("made", kernel_s=6e-6, **traffic)
    # Those that memory bounds, at this fraction of the bandwidth; nothing that layers do is in them.
    memory = [m for m in simple_times() if m.operation in ("optimizer", "gradients")]
    found = [replace(m, seconds=m.seconds * 0.8 / 0.75) for m in memory]
    found += [Measurement("memory", {"bytes": 10**9}, "bf16", 10**9 / (0.75 * BANDWIDTH))]
    found += [Measurement("launch", {"kernels": 200}, "bf16", 200 * truth.launch_s)]
    for n in (512, 1024, 2048):  # without these the seconds of each matmul could as well be those of each kernel
        flop_s = (2 * n**3 / PEAK + truth.matmul_half_s) / 0.6
        found.append(matmul(n, n, n, flop_s + truth.matmul_traffic * 6 * n * n / BANDWIDTH + truth.launch_s))
    for hidden, degree in ((1024, 1), (2048, 1), (2048, 8), (4096, 2)):
        for sequences, length in ((1, 512), (4, 1024), (2, 8192)):
            shape = {"sequences": sequences, "sequence_length": length, "hidden": hidden, "ffn": 3 * hidden}
            shape |= {"heads": hidden // 128, "kv_heads": hidden // 128, "head_dim": 128}
            layer = layer_seconds(kind, stack, measured_model(shape), sequences, length, degree, False, "bf16")
            for name, seconds in (("forward", layer.forward_s), ("backward", layer.backward_s)):
                found.append(Measurement(f"layer {name}", {**shape, "tensor_parallel": degree}, "bf16", seconds))
            if degree == 1:
                mixture = {**shape, "tensor_parallel": 1, "ffn": hidden // 2, "experts": 32, "top_k": 6}
                layer = layer_seconds(kind, stack, measured_model(mixture), sequences, length, precision="bf16")
                found.append(Measurement("mixture forward", mixture, "bf16", layer.forward_s))
                found.append(Measurement("mixture backward", mixture, "bf16", layer.backward_s))
            # 4 x tokens x keys x width, half of it behind the mask; some keys more a query, and some rows that fill the GPU.
            width, rows = hidden, sequences * length * hidden // 128
            per_key = 4 * sequences * length * width
            flop_s = (per_key * length / 2 + truth.attention_keys * per_key) / (PEAK * 0.5)
            rows_s = flop_s * 9e3 / rows
            attention = {name: shape[name] for name in ("sequences", "sequence_length", "heads", "kv_heads", "head_dim")}
            found.append(Measurement("attention forward", attention, "bf16", flop_s + rows_s))
            found.append(Measurement("attention backward", attention, "bf16", 3 * flop_s + rows_s))
            # Heads half as wide, each score of which costs 64 + 48 numbers for 128 + 48: twice as many scores, 14/11 the time.
            narrow = attention | {"heads": hidden // 64, "kv_heads": hidden // 64, "head_dim": 64}
            narrow_s = flop_s * 14 / 11
            found.append(Measurement("attention forward", narrow, "bf16", narrow_s * (1 + 9e3 / (2 * rows))))
            found.append(Measurement("attention backward", narrow, "bf16", narrow_s * (3 + 9e3 / (2 * rows))))
        head_shape = {"sequences": 2, "sequence_length": 2048, "hidden": hidden, "vocab": 32000}
        head = head_seconds(kind, stack, measured_model(head_shape), 2, 2048, precision="bf16")
        found.append(Measurement("head forward", head_shape, "bf16", head.forward_s))
        found.append(Measurement("head backward", head_shape, "bf16", head.backward_s))
    fit = fit_bench(bench(*found, *found))
    assert fit.bench.gpu_kind is not None and fit.bench.stack is not None
    efficiency = fit.bench.gpu_kind.efficiency
    assert efficiency.matmul_fraction == pytest.approx(0.6, rel=0.02)
    assert efficiency.attention_fraction == pytest.approx(0.5, rel=0.03)
    assert efficiency.attention_rows == pytest.approx(9e3, rel=0.1)
    assert efficiency.attention_width == pytest.approx(48.0, rel=0.1)
    assert efficiency.memory_fraction == pytest.approx(0.75, rel=0.02)
    assert {name: getattr(fit.bench.stack, name) for name in traffic} == pytest.approx(traffic, rel=0.1)
    assert fit.bench.stack.kernel_s == pytest.approx(6e-6, rel=0.1)
    assert fit.bench.stack.optimizer_traffic == pytest.approx(1.5, rel=0.03)
    assert fit.bench.stack.gradient_bytes == pytest.approx(14, rel=0.03)
    assert fit.errors()[-1][3] <= 0.02


def test_fp32_has_a_fraction_of_its_own() -> None:
    peak = gpu_kind("H200").peak_flop_per_s["fp32"]
    made = [matmul(n, n, n, 2 * n**3 / peak / 0.5, "fp32") for n in (2048, 4096, 8192)] * 5
    kind = fit_bench(bench(*made)).bench.gpu_kind
    assert kind is not None
    assert kind.efficiency.fp32_fraction == pytest.approx(0.5, rel=0.03)
    assert kind.efficiency.matmul_fraction == gpu_kind("H200").efficiency.matmul_fraction


def test_the_host_is_told_by_its_own_measurement_alone() -> None:
    fit = fit_bench(bench(*simple_times(), Measurement("host", {"kernels": 33}, "bf16", 33 * 8e-6)))
    assert fit.bench.stack is not None
    assert fit.bench.stack.host_s == pytest.approx(8e-6)
    assert "host" not in [name for name, *_ in fit.errors()]
    assert fit.errors()[-1][1] == len(simple_times())


def test_the_host_launches_as_many_kernels_as_the_simulator_counts() -> None:
    sizes = HOST_LAYER["sequences"], HOST_LAYER["sequence_length"]
    layer = layer_seconds(gpu_kind("H200"), Stack("any"), measured_model(HOST_LAYER), *sizes)
    kernels = layer.forward_kernels + layer.backward_input_kernels + layer.backward_weight_kernels
    assert HOST_LAYERS * kernels == HOST_KERNELS


def test_a_constant_at_its_bound_is_told() -> None:
    # Twice as fast as the peak allows.
    made = [matmul(n, n, n, 2 * n**3 / PEAK / 2) for n in (4096, 8192)] * 20
    assert "matmul_fraction is at 1, the most that the fit allows" in fit_bench(bench(*made)).at_bounds
    assert BOUNDS["matmul_fraction"][1] == 1.0


def test_errors_are_those_of_each_operation_and_of_all() -> None:
    measured = bench(matmul(1, 1, 1, 1.0), matmul(2, 1, 1, 1.0), Measurement("memory", {"bytes": 1}, "bf16", 2.0))
    fit = BenchFit(measured, [1.0, 1.0, 2.0], [1.1, 0.7, 2.0], [])
    assert [(name, count) for name, count, *_ in fit.errors()] == [("matmul", 2), ("memory", 1), ("all", 3)]
    assert [median for *_, median, _ in fit.errors()] == pytest.approx([0.2, 0.0, 0.1])
    assert [ninth for *_, ninth in fit.errors()] == pytest.approx([0.28, 0.0, 0.26])  # between the two largest


def test_a_bench_of_links_has_nothing_to_fit() -> None:
    with pytest.raises(InputError, match="needs measurements of a device"):
        fit_bench(replace(bench(matmul(1, 1, 1, 1.0)), gpu_kind=None))


def test_the_picture_is_written(tmp_path: Path) -> None:
    fit = fit_bench(bench(*simple_times()))
    assert draw_bench(fit, tmp_path / "fit.svg") is None
    text = (tmp_path / "fit.svg").read_text(encoding="utf-8")
    assert "matmul (20)" in text and "time by the fitted constants, in s" in text
