"""The bench of a device: what it chooses to measure, how it counts time, and that every operation runs as it says."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from runtime import bench
from runtime.bench import (
    Case,
    Effort,
    bench_cases,
    bench_device,
    bench_precisions,
    described,
    measure,
    relative_spread,
)
from sim.spec.bench import OPERATIONS, Measurement
from sim.spec.gpu import catalogue
from sim.spec.reading import InputError

CPU = torch.device("cpu")
LAYER = {
    "sequences": 1,
    "sequence_length": 16,
    "hidden": 128,
    "ffn": 384,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 64,
    "tensor_parallel": 1,
}


@pytest.fixture
def rate(monkeypatch: pytest.MonkeyPatch) -> float:
    """A device that multiplies at 1 TFLOP/s and has room for everything."""
    monkeypatch.setattr(bench, "_matmul_rate", lambda *_: 1e12)
    monkeypatch.setattr(bench, "_free_bytes", lambda *_: 10**15)
    return 1e12


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_measured_lasts_neither_too_short_nor_too_long(rate: float, quick: bool) -> None:
    effort = bench.EFFORTS["cpu", quick]
    cases = bench_cases(CPU, ["fp32"], quick)
    matmuls = [case.shape for case in cases if case.operation == "matmul"]
    seconds = [2 * shape["rows"] * shape["columns"] * shape["inner"] / rate for shape in matmuls]
    assert 2 <= len(matmuls) <= effort.matmuls
    assert all(effort.shortest_s <= one <= effort.longest_s for one in seconds)
    assert seconds == sorted(seconds) and max(seconds) >= 5 * min(seconds)
    assert len({tuple(shape.values()) for shape in matmuls}) == len(matmuls)
    # Causal attention does half of 4 x tokens x keys x width.
    attentions = [case.shape for case in cases if case.operation == "attention forward"]
    for shape in attentions:
        width = shape["heads"] * shape["head_dim"]
        one = 2 * shape["sequences"] * shape["sequence_length"] ** 2 * width / rate
        assert effort.shortest_s <= one <= effort.longest_s


def test_every_operation_of_a_cpu_is_measured_and_backward_beside_forward(rate: float) -> None:
    cases = bench_cases(CPU, ["fp32", "bf16"])
    for precision in ("fp32", "bf16"):
        of_this = [case for case in cases if case.precision == precision]
        assert {case.operation for case in of_this} == set(OPERATIONS) - {"host"}
        for what in ("attention", "layer", "mixture", "head"):
            forward = [case.shape for case in of_this if case.operation == f"{what} forward"]
            assert forward == [case.shape for case in of_this if case.operation == f"{what} backward"]
    assert {case.compiled for case in cases} == {False}
    assert bench_cases(CPU, ["fp32", "bf16"], compiled=True) == [dataclasses.replace(case, compiled=True) for case in cases]
    # A rank's part of matrices is among the shapes.
    assert len({case.shape["tensor_parallel"] for case in cases if case.operation == "layer forward"}) > 1
    # Few experts and many.
    assert len({case.shape["experts"] for case in cases if case.operation == "mixture forward"}) == 2


def test_what_does_not_fit_into_memory_is_left_out(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench_cases(CPU, ["fp32"])
    monkeypatch.setattr(bench, "_free_bytes", lambda *_: 5 * 50 * 2**20)  # a fifth of it is 50 MiB
    some = bench_cases(CPU, ["fp32"])
    assert [case for case in whole if case not in some]
    for case in some:
        if case.operation == "matmul":
            m, n, k = (case.shape[name] for name in ("rows", "columns", "inner"))
            assert 4 * (m * n + n * k + m * k) <= 50 * 2**20
    assert not [case for case in some if case.operation == "memory"]  # 128 MiB and more


def test_a_device_too_slow_for_any_shape_measures_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_matmul_rate", lambda *_: 1e3)
    cases = bench_cases(CPU, ["fp32"], quick=True)
    matmuls = [case.shape for case in cases if case.operation == "matmul"]
    # Half of two heads of 64 numbers, back to the 128 of the residual stream.
    assert matmuls == [{"rows": 128, "columns": 128, "inner": 64}]


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        ("matmul", {"rows": 32, "columns": 16, "inner": 8}),
        ("attention forward", {"sequences": 2, "sequence_length": 16, "heads": 4, "kv_heads": 2, "head_dim": 8}),
        ("attention backward", {"sequences": 2, "sequence_length": 16, "heads": 4, "kv_heads": 4, "head_dim": 8}),
        ("layer forward", LAYER),
        ("layer backward", {**LAYER, "tensor_parallel": 2}),
        ("mixture forward", {**LAYER, "experts": 8, "top_k": 2}),
        ("mixture backward", {**LAYER, "experts": 8, "top_k": 2}),
        ("head forward", {"sequences": 2, "sequence_length": 16, "hidden": 64, "vocab": 100}),
        ("head backward", {"sequences": 2, "sequence_length": 16, "hidden": 64, "vocab": 100}),
        ("memory", {"bytes": 3000}),
        ("launch", {"kernels": 10}),
        ("gradients", {"parameters": 1000}),
        ("optimizer", {"parameters": 1000}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_operation_is_measured_in_time(operation: str, shape: dict[str, int], precision: str) -> None:
    found = measure(Case(operation, shape, precision), CPU, quick=True)
    assert found is not None
    assert (found.operation, found.shape, found.precision, found.repeats) == (operation, shape, precision, 3)
    assert 1e-8 < found.seconds < 5.0


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_layers_can_be_compiled_each_for_its_own_shape(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    kept: set[bool] = set()

    def noted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        sizes.extend(tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 3)
        kept.add(not bench.ahead_of_time.donated_buffer)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    torch.compiler.reset()
    # One graph that leaves the length open is made for the second, and would do for the third.
    shapes = [{**LAYER, "sequence_length": length} for length in (16, 48, 32)]
    found = [measure(Case(f"layer {way}", shape, "fp32", compiled=True), CPU, quick=True) for shape in shapes]
    assert [m.shape for m in found if m is not None] == shapes
    assert sizes == [(shape["sequence_length"], shape["sequences"], shape["hidden"]) for shape in shapes]
    # A backward is repeated on what one forward kept, whose buffers are therefore not given away.
    assert kept == {True} and bench.ahead_of_time.donated_buffer
    sizes.clear()
    measure(Case(f"layer {way}", LAYER, "fp32"), CPU, quick=True)
    measure(Case("matmul", {"rows": 8, "columns": 8, "inner": 8}, "fp32", compiled=True), CPU, quick=True)
    assert sizes == []


def test_a_rank_of_a_group_has_its_part_of_the_matrices() -> None:
    def sizes(degree: int) -> list[int]:
        _, leaves = bench._made_layer({**LAYER, "tensor_parallel": degree}, Case("layer forward", LAYER, "fp32"), CPU)
        return [leaf.numel() for leaf in leaves[1:]]

    whole = sorted(sizes(1))
    # Two norms; query, key and value; output; gate and up; down.
    assert whole == sorted([128, 128, 3 * 128 * 128, 128 * 128, 2 * 384 * 128, 384 * 128])
    assert sorted(sizes(2)) == sorted([128, 128, *(size // 2 for size in whole if size > 128)])


def test_the_optimizer_of_a_bench_makes_the_step_of_adam() -> None:
    torch.manual_seed(0)
    run = bench._optimizer(Case("optimizer", {"parameters": 1000}, "bf16"), CPU)
    variables = dict(zip(run.__code__.co_freevars, (cell.cell_contents for cell in run.__closure__ or ()), strict=True))
    master, values, gradient = (variables[name] for name in ("master", "values", "gradient"))
    before = master.detach().clone()
    run()
    # The first step of Adam goes by the learning rate, against the sign of the gradient, after a decay of 1 % of that rate.
    assert torch.allclose(master.data, before * (1 - 1e-8) - 1e-6 * gradient.sign(), atol=1e-9)
    assert torch.equal(values, master.data.bfloat16())


def test_samples_are_means_of_as_many_runs_as_fill_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that only the runs move: 3 ms each, but 30 ms the first.
    clock = [0.0]
    durations = [0.030]

    def run() -> None:
        clock[0] += durations.pop() if durations else 0.003

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    effort = dataclasses.replace(bench.EFFORTS["cpu", True], warm_up_s=0.009, sample_s=0.012, repeats=4)
    assert bench._cpu_samples(run, effort) == pytest.approx([0.003] * 4)
    # The first, one to see how long it takes, two more to warm up, and four samples of four.
    assert clock[0] == pytest.approx(0.030 + 3 * 0.003 + 16 * 0.003)


def test_the_spread_is_the_distance_of_the_quartiles() -> None:
    assert relative_spread([4.0]) == 0.0
    assert relative_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)  # of 2 and 4 about 3


def test_the_matmul_rate_of_a_cpu_is_one_that_a_cpu_can_have() -> None:
    found = measure(Case("matmul", {"rows": 256, "columns": 256, "inner": 256}, "fp32"), CPU, quick=True)
    assert found is not None
    # Two units of 16 numbers, a multiply-add each, at 6 GHz.
    assert 1e7 < 2 * 256**3 / found.seconds < torch.get_num_threads() * 2 * 16 * 2 * 6e9


def test_a_cpu_is_described_by_its_best_rates() -> None:
    def found(operation: str, shape: dict[str, int], seconds: float) -> Measurement:
        return Measurement(operation, shape, "fp32", seconds)

    slow, fast = (found("matmul", {"rows": 10, "columns": 10, "inner": 5}, seconds) for seconds in (1e-6, 5e-7))
    told = described(CPU, ["fp32"], [slow, fast, found("memory", {"bytes": 3000}, 1e-6), found("memory", {"bytes": 300}, 1e-6)])
    assert told.kind == "CPU" and told.gpu_kind is not None
    assert told.gpu_kind.peak_flop_per_s == {"fp32": 2e9}  # 1000 FLOP in 0.5 us
    assert told.gpu_kind.memory_bandwidth_bytes_per_s == 3e9
    assert told.gpu_kind.efficiency == catalogue()["CPU"].efficiency
    assert told.threads == torch.get_num_threads()
    with pytest.raises(InputError, match="the peaks of CPU are those of measured matmuls and memory, of which there are none"):
        described(CPU, ["fp32"], [slow])


def test_a_device_or_precision_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--device is one of cpu, cuda, but got 'cudda'; did you mean cuda"):
        bench_device("cudda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device cuda needs a GPU, but torch finds none on this machine; accepted: --device cpu"):
        bench_device("cuda")
    with pytest.raises(InputError, match="--precision on cpu is one of fp32, fp16, bf16, but got 'tf32'"):
        bench_precisions(CPU, ["tf32"])
    assert bench_precisions(CPU, ["bf16", "fp32", "bf16"]) == ("bf16", "fp32")
    assert bench_precisions(CPU, []) == ("fp32",)


class _Gpu:
    """A GPU of thought: a host that queues work, and a device that does it in order, each with a clock."""

    def __init__(self, host_s: float, device_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.each_host_s, self.each_device_s = host_s, device_s
        self.host_s = self.device_s = 0.0
        self.runs = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.at_s = max(gpu.device_s, gpu.host_s)

            def synchronize(self) -> None:
                gpu.host_s = max(gpu.host_s, self.at_s)

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at_s - self.at_s)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda ticks: self._queue(1e-6, ticks / bench.CLOCK_HZ))
        monkeypatch.setattr(time, "perf_counter", lambda: self.host_s)

    def _queue(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + device_s

    def run(self) -> None:
        self.runs += 1
        self._queue(self.each_host_s, self.each_device_s)


@pytest.mark.parametrize(("host_s", "device_s"), [(100e-6, 20e-6), (8e-6, 5e-6), (20e-6, 3e-3), (1e-3, 1.1e-3), (5e-3, 1e-4)])
def test_events_count_what_the_device_does_and_not_the_host(
    host_s: float, device_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = _Gpu(host_s, device_s, monkeypatch)
    effort = dataclasses.replace(bench.EFFORTS["cuda", False], repeats=3)
    samples = bench._cuda_samples(gpu.run, effort, torch.device("cuda", 0))
    assert samples == pytest.approx([device_s] * 3, rel=1e-3)
    assert gpu.device_s >= effort.warm_up_s


# --- On a GPU --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")


@gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_is_measured_at_rates_that_it_can_have(compiled: bool) -> None:
    device = bench_device("cuda")
    precisions = bench_precisions(device, [])
    cases = bench_cases(device, precisions, quick=True, compiled=compiled)
    assert {case.operation for case in cases} == set(OPERATIONS)
    found = [m for case in cases if (m := measure(case, device, quick=True)) is not None]
    assert len(found) == len(cases)
    told = described(device, precisions, found)
    kind = told.gpu_kind
    assert kind is not None
    for m in found:
        if m.operation == "matmul":
            flop = 2 * m.shape["rows"] * m.shape["columns"] * m.shape["inner"]
            assert flop / m.seconds < 1.05 * kind.peak_flop_per_s[m.precision]
        elif m.operation == "memory":
            assert m.shape["bytes"] / m.seconds < 1.05 * kind.memory_bandwidth_bytes_per_s
        elif m.operation == "launch":
            assert 1e-7 < m.seconds / m.shape["kernels"] < 20e-6
        elif m.operation == "host":
            assert 1e-6 < m.seconds / m.shape["kernels"] < 1e-3


@gpu
def test_the_host_is_not_in_the_times_of_a_gpu() -> None:
    device = bench_device("cuda")
    x = torch.zeros(1, device=device)
    effort: Effort = dataclasses.replace(bench.EFFORTS["cuda", True], repeats=5)

    def slow_host() -> None:
        sum(math.sqrt(i) for i in range(2000))  # some 100 us, in which the GPU has nothing to do
        x.add_(1)

    run: Callable[[], Any] = slow_host
    assert sorted(bench._cuda_samples(run, effort, device))[2] < 30e-6
