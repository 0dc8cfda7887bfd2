"""Micro-benchmarks of one device: what a training step is made of, alone and over the shapes that training uses.

What is measured runs as it does in a training: matmuls as the linear maps of a layer, attention in the layout of
`runtime.model`, layers and heads of that module, the optimizer on flat master copies. Operands are random, for a GPU at its
power limit multiplies zeros faster. On a GPU the seconds are those between two events of the device, which is kept busy
beforehand until the host has queued all that lies between them, so that the host is not in them.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config as ahead_of_time
import torch.nn.functional as F

from runtime.model import Head, Layer, rotary_tables
from runtime.parameters import Section, check_degree, range_parameters
from runtime.peak import gpu_kind_name, hardware_name, measured_peak_flop_per_s
from runtime.settings import DEVICES, DTYPES
from runtime.tensor_parallel import TensorGroup
from sim.spec.bench import Bench, Measurement, measured_model
from sim.spec.counts import (
    PRECISION_BYTES,
    layer_activation_bytes,
    layer_forward_flop,
    layer_kernels,
    layer_matmuls,
    layer_parameters_at,
)
from sim.spec.gpu import NOMINAL_BUSY_WATTS, NOMINAL_EFFICIENCY, NOMINAL_IDLE_SHARE, GpuKind, catalogue
from sim.spec.reading import InputError, nearest
from sim.spec.version import VERSION

HIDDEN = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Hidden sizes of the layers whose parts are measured; heads of 64 numbers below 2048, of 128 from there on."""
TOKENS = (128, 512, 2048, 4096, 8192, 16384)
"""Tokens of a micro-batch on one device."""
DEGREES = (1, 2, 4, 8)
"""Of tensor parallelism: a rank has the matrices of a layer divided by it."""
MIXTURES = ((8, 2, 2), (64, 8, 8))
"""Experts, how many of them a token goes to, and by what their width is less than that of the layer's MLP."""
VOCABULARIES = (4_000, 32_000)
"""Rows of the output matrix."""

MEMORY_SHARE = 0.2
"""Of the free memory, what one measurement may take."""
ROTATED_BYTES = 2**28
"""Operands of a GPU's matmul lie in so many bytes, used in turn: more than caches hold, for in training they come from memory."""
MOST_QUEUED = 256
"""Operations between two events."""
QUEUE_S = 3e-3
"""The host's seconds for as many kernels as a GPU's queue takes, about a thousand of at least 3 us: from then on it must wait."""
CLOCK_HZ = 2e9
"""About that of GPUs: what a kernel that only waits is told to wait for is counted in its ticks."""
LONGEST_WAIT_S = 0.3
"""The longest that a GPU is kept busy while the host queues."""


@dataclass(frozen=True)
class Effort:
    """How much a bench measures. Counts are upper limits: fewer where fewer shapes last long enough and not too long."""

    shortest_s: float
    longest_s: float
    """Of one matmul or attention at the rate of a large matmul."""
    matmuls: int
    attentions: int
    layers: int
    mixtures: int
    heads: int
    memory_bytes: Sequence[int]
    parameters: Sequence[int]
    """Of sums of gradients, and of the optimizer's steps."""
    warm_up_s: float
    sample_s: float
    """What one repeat lasts at least; shorter operations are repeated within it."""
    repeats: int


EFFORTS = {
    ("cuda", False): Effort(
        10e-6, 15e-3, 60, 16, 16, 6, 4, (2**28, 2**30, 2**32), (2**24, 2**26, 2**28), 0.15, 0.05, 7
    ),
    ("cuda", True): Effort(20e-6, 5e-3, 10, 4, 3, 1, 1, (2**28,), (2**24,), 0.02, 0.01, 3),
    ("cpu", False): Effort(5e-4, 60e-3, 20, 6, 8, 3, 2, (2**27, 2**28), (2**21, 2**22), 0.05, 0.03, 5),
    ("cpu", True): Effort(5e-5, 2e-3, 6, 2, 2, 1, 1, (2**24,), (2**18,), 0.002, 0.004, 3),
}  # fmt: skip
"""By device, and whether it shall be quick."""


@dataclass(frozen=True)
class Case:
    """One thing to be measured: see `sim.spec.bench.OPERATIONS`."""

    operation: str
    shape: dict[str, int]
    precision: str
    compiled: bool = False
    """Whether its layers are compiled, if it has any."""


# --- What to measure -------------------------------------------------------------------------------------------------


def bench_device(name: str) -> torch.device:
    """The device of a name, cpu or cuda. Raises InputError where it is neither, or there is no GPU."""
    if name not in DEVICES:
        raise InputError(f"--device is one of {', '.join(DEVICES)}, but got {name!r}{nearest(name, DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda needs a GPU, but torch finds none on this machine; accepted: --device cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def bench_precisions(device: torch.device, asked: Sequence[str]) -> tuple[str, ...]:
    """The precisions to measure: those asked for, each once, or the one that a device usually trains in.

    Raises InputError for one that the runtime does not train in.
    """
    if not asked:
        if device.type == "cpu":
            return ("fp32",)
        return ("bf16",) if torch.cuda.get_device_capability(device) >= (8, 0) else ("fp16",)
    known = [name for name in DTYPES if name != "fp64"]
    for name in asked:
        if name not in known or (name == "tf32" and device.type == "cpu"):
            accepted = ", ".join(known if device.type == "cuda" else [n for n in known if n != "tf32"])
            raise InputError(f"--precision on {device.type} is one of {accepted}, but got {name!r}{nearest(name, known)}")
    return tuple(dict.fromkeys(asked))


def bench_cases(device: torch.device, precisions: Sequence[str], quick: bool = False, compiled: bool = False) -> list[Case]:
    """What a bench of the device measures, in order. Finds out first how fast it multiplies, for which it takes a second."""
    effort = EFFORTS[device.type, quick]
    room = MEMORY_SHARE * _free_bytes(device)
    cases = []
    for precision in precisions:
        rate = _matmul_rate(device, precision, quick)
        found = [*_matmuls(effort, rate, precision), *_attentions(effort, rate, precision)]
        found += _layers("layer", _layer_shapes(), effort.layers, effort, rate, precision)
        found += _layers("mixture", _mixture_shapes(), effort.mixtures, effort, rate, precision)
        found += _heads(effort, rate, precision)
        found += [Case("memory", {"bytes": size}, precision) for size in effort.memory_bytes]
        of_parameters = ("gradients", "optimizer")
        found += [Case(what, {"parameters": count}, precision) for what in of_parameters for count in effort.parameters]
        found.append(Case("launch", {"kernels": 200}, precision))
        if device.type == "cuda":
            found.append(Case("host", {"kernels": HOST_KERNELS}, precision))
        cases += [replace(case, compiled=compiled) for case in found if _case_bytes(case) <= room]
    return cases


def _layer_shape(hidden: int, sequences: int, length: int, degree: int) -> dict[str, int]:
    """A layer of Llama's proportions; from 4096 on four query heads share a key, as in the larger models."""
    head_dim = 64 if hidden < 2048 else 128
    heads = hidden // head_dim
    return {
        "sequences": sequences,
        "sequence_length": length,
        "hidden": hidden,
        "ffn": -(-8 * hidden // 3 // 64) * 64,
        "heads": heads,
        "kv_heads": heads if hidden < 4096 else heads // 4,
        "head_dim": head_dim,
        "tensor_parallel": degree,
    }


HOST_LAYER = _layer_shape(128, 1, 128, 1)
"""A layer so small that its kernels are shorter than their launch."""
HOST_LAYERS = 8
"""So many one after another in one pass: to begin a backward takes the host longer than one small layer's."""
HOST_KERNELS = HOST_LAYERS * 3 * layer_kernels(measured_model(HOST_LAYER))
"""Of their forward and their backward, as the simulator counts them: in the backward each has two."""


def _layer_shapes() -> Iterable[dict[str, int]]:
    """All layers that may be measured: a micro-batch of one long sequence, or of several short ones."""
    for hidden in HIDDEN:
        for tokens in TOKENS:
            for length in sorted({tokens, min(tokens, 2048)}):
                for degree in DEGREES:
                    shape = _layer_shape(hidden, tokens // length, length, degree)
                    try:
                        check_degree(measured_model(shape), degree, length, False)
                    except InputError:
                        continue
                    yield shape


def _mixture_shapes() -> Iterable[dict[str, int]]:
    """All layers with experts that may be measured: a few wide ones, and many of which each is a slice of the MLP."""
    for shape in _layer_shapes():
        if shape["tensor_parallel"] == 1:
            for experts, top_k, parts in MIXTURES:
                yield {**shape, "ffn": shape["ffn"] // parts, "experts": experts, "top_k": top_k}


def _matmuls(effort: Effort, rate: float, precision: str) -> list[Case]:
    """The matmuls of the layers."""
    found: dict[tuple[int, int, int], float] = {}
    for shape in _layer_shapes():
        tokens = shape["sequences"] * shape["sequence_length"]
        for matmul in layer_matmuls(measured_model(shape), tokens, shape["tensor_parallel"]):
            found[matmul.m, matmul.n, matmul.k] = matmul.flop / rate
    shapes = [dict(zip(("rows", "columns", "inner"), sizes, strict=True)) for sizes in found]
    return _chosen("matmul", shapes, list(found.values()), effort, effort.matmuls, precision)


def _attentions(effort: Effort, rate: float, precision: str) -> list[Case]:
    """The attention of the layers' ranks."""
    shapes, seconds = [], []
    for layer in _layer_shapes():
        model, degree = measured_model(layer), layer["tensor_parallel"]
        heads = layer["heads"] // degree
        shape = {name: layer[name] for name in ("sequences", "sequence_length")}
        shape |= {"heads": heads, "kv_heads": heads, "head_dim": layer["head_dim"]}
        tokens = layer["sequences"] * layer["sequence_length"]
        flop = layer_forward_flop(model, tokens, layer["sequence_length"]).attention / degree
        if shape not in shapes:
            shapes.append(shape)
            seconds.append(flop / 2 / rate)
    return _both("attention", _chosen("attention forward", shapes, seconds, effort, effort.attentions, precision))


def _layers(
    what: str, candidates: Iterable[dict[str, int]], count: int, effort: Effort, rate: float, precision: str
) -> list[Case]:
    """Some of these layers' ranks. A layer may last longer than one of its parts."""
    shapes, seconds = list(candidates), []
    for shape in shapes:
        flop = layer_forward_flop(measured_model(shape), shape["sequences"] * shape["sequence_length"], shape["sequence_length"])
        seconds.append(flop.total / shape["tensor_parallel"] / rate)
    longer = replace(effort, shortest_s=3 * effort.shortest_s, longest_s=2 * effort.longest_s)
    return _both(what, _chosen(f"{what} forward", shapes, seconds, longer, count, precision))


def _heads(effort: Effort, rate: float, precision: str) -> list[Case]:
    """The heads of the models."""
    shapes, seconds = [], []
    for hidden in HIDDEN:
        for tokens in TOKENS:
            for vocab in VOCABULARIES:
                length = min(tokens, 2048)
                shapes.append({"sequences": tokens // length, "sequence_length": length, "hidden": hidden, "vocab": vocab})
                seconds.append(2 * tokens * hidden * vocab / rate)
    longer = replace(effort, shortest_s=3 * effort.shortest_s, longest_s=2 * effort.longest_s)
    return _both("head", _chosen("head forward", shapes, seconds, longer, effort.heads, precision))


def _chosen(
    operation: str, shapes: Sequence[dict[str, int]], seconds: Sequence[float], effort: Effort, count: int, precision: str
) -> list[Case]:
    """Of the shapes that last neither too short nor too long at most so many, evenly from the shortest to the longest."""
    order = sorted(range(len(shapes)), key=lambda i: (seconds[i], *shapes[i].values()))
    fit = [i for i in order if effort.shortest_s <= seconds[i] <= effort.longest_s]
    if not fit:  # the nearest there is
        fit = [min(order, key=lambda i: abs(math.log(seconds[i] / effort.longest_s)))]
    places = {round(j * (len(fit) - 1) / max(1, count - 1)) for j in range(count)}
    return [Case(operation, shapes[fit[place]], precision) for place in sorted(places)]


def _both(what: str, forwards: Sequence[Case]) -> list[Case]:
    """Each forward with its backward."""
    return [replace(case, operation=f"{what} {way}") for case in forwards for way in ("forward", "backward")]


def _case_bytes(case: Case) -> float:
    """About what a case needs of the device's memory."""
    shape, size = case.shape, PRECISION_BYTES[case.precision]
    tokens = shape.get("sequences", 1) * shape.get("sequence_length", 1)
    if case.operation == "matmul":
        return size * (shape["rows"] * shape["inner"] + shape["inner"] * shape["columns"] + shape["rows"] * shape["columns"])
    if case.operation.startswith("attention"):
        return 12 * size * tokens * shape["heads"] * shape["head_dim"]
    if case.operation.startswith(("layer", "mixture")):
        model, degree = measured_model(shape), shape["tensor_parallel"]
        kept = layer_activation_bytes(model, shape["sequences"], shape["sequence_length"], degree, False, "none", size)
        return 3 * (kept + size * layer_parameters_at(model, degree))
    if case.operation.startswith("head"):
        return (12 + 2 * size) * tokens * shape["vocab"] + 3 * size * shape["vocab"] * shape["hidden"]
    if case.operation == "memory":
        return shape["bytes"]
    return 24 * shape.get("parameters", 0)


def _free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")


def _matmul_rate(device: torch.device, precision: str, quick: bool) -> float:
    """FLOP/s of a large matmul. A GPU is first kept at it until it is as warm as training makes it."""
    if device.type == "cpu":
        return measured_peak_flop_per_s(DTYPES[precision], 0.1 if quick else 0.5)
    _use_precision(precision)
    size = 4096
    a, b = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))
    end_s = time.perf_counter() + (0.2 if quick else 3.0)
    while time.perf_counter() < end_s:
        for _ in range(10):
            torch.mm(a, b)
        torch.cuda.synchronize(device)
    effort = replace(EFFORTS["cuda", quick], warm_up_s=0.0)
    return 2 * size**3 / statistics.median(_cuda_samples(lambda: torch.mm(a, b), effort, device))


# --- Measuring -------------------------------------------------------------------------------------------------------


def measure(case: Case, device: torch.device, quick: bool = False) -> Measurement | None:
    """What a case takes; None where the GPU's memory does not suffice for it."""
    # What a compiled forward kept shall be there when its backward runs again.
    with ahead_of_time.patch(donated_buffer=False) if case.compiled else nullcontext():
        return _measured(case, device, EFFORTS[device.type, quick])


def _measured(case: Case, device: torch.device, effort: Effort) -> Measurement | None:
    _use_precision(case.precision)
    try:
        if case.operation == "launch" and device.type == "cuda":
            run = _captured(case, device)
        else:
            run = _RUNS[case.operation.split()[0]](case, device)
        if case.operation == "host":
            samples = _host_samples(run, effort, device)
        elif device.type == "cuda":
            samples = _cuda_samples(run, effort, device)
        else:
            samples = _cpu_samples(run, effort)
    except torch.OutOfMemoryError:
        return None
    finally:
        run = _nothing  # lets the operands go
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Measurement(
        case.operation, case.shape, case.precision, statistics.median(samples), relative_spread(samples), len(samples)
    )


def _nothing() -> None:
    pass


def _use_precision(precision: str) -> None:
    """Nothing; fp32 is fp32, and only tf32 may use the tensor cores' shorter one."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def relative_spread(samples: Sequence[float]) -> float:
    """The distance of the quartiles, as a fraction of the median; 0 of one sample."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def _cpu_samples(run: Callable[[], object], effort: Effort) -> list[float]:
    """The seconds of one run on the CPU, several times; each is the mean of as many runs as fill a sample."""
    run()  # chooses kernels, touches memory
    start_s = time.perf_counter()
    run()
    one_s = max(time.perf_counter() - start_s, 1e-9)
    while time.perf_counter() - start_s < effort.warm_up_s:
        run()
    count = max(1, round(effort.sample_s / one_s))
    samples = []
    for _ in range(effort.repeats):
        start_s = time.perf_counter()
        for _ in range(count):
            run()
        samples.append((time.perf_counter() - start_s) / count)
    return samples


def _cuda_samples(run: Callable[[], object], effort: Effort, device: torch.device) -> list[float]:
    """The seconds of one run on the GPU, several times, by events of the device, without those of the host."""
    stream = torch.cuda.current_stream(device)

    def sample(count: int, wait_s: float) -> tuple[float, float]:
        """Seconds of a run, and the host's seconds to queue it."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if wait_s > 0:
            torch.cuda._sleep(round(min(wait_s, LONGEST_WAIT_S) * CLOCK_HZ))  # type: ignore[no-untyped-call]
        start_s = time.perf_counter()
        first.record(stream)
        for _ in range(count):
            run()
        last.record(stream)
        queued_s = time.perf_counter() - start_s
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / count, queued_s / count

    sample(3, 0.0)
    one_s, queued_s = sample(3, 0.0)  # so few that the host does not wait for the queue
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < effort.warm_up_s:
        one_s, _ = sample(max(1, min(MOST_QUEUED, round(0.02 / max(one_s, 1e-6)))), 0.0)
    count = max(1, min(MOST_QUEUED, round(effort.sample_s / max(one_s, 1e-6))))
    # A host that is slow needs a start for all; elsewhere a rest would only let the GPU recover, which training does not.
    is_slow = 2 * queued_s > one_s
    count = max(1, min(count, int(QUEUE_S / queued_s))) if is_slow else count
    return [sample(count, 1.5 * queued_s * (count if is_slow else 1))[0] for _ in range(effort.repeats)]


def _host_samples(run: Callable[[], object], effort: Effort, device: torch.device) -> list[float]:
    """The host's seconds of a run whose kernels are shorter than their launch, several times."""
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    samples = []
    for _ in range(effort.repeats):
        start_s = time.perf_counter()
        for _ in range(20):
            run()
        torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start_s) / 20)
    return samples


# --- What runs -------------------------------------------------------------------------------------------------------


def _random(*sizes: int, case: Case, device: torch.device) -> torch.Tensor:
    return torch.randn(*sizes, dtype=DTYPES[case.precision], device=device)


def _matmul(case: Case, device: torch.device) -> Callable[[], object]:
    """A linear map as in a layer, whose weight is stored as (out, in). Operands of a GPU are used in turn."""
    m, n, k = (case.shape[name] for name in ("rows", "columns", "inner"))
    sets = 1 if device.type == "cpu" else max(1, min(64, math.ceil(ROTATED_BYTES / _case_bytes(case))))
    operands = [tuple(_random(rows, k, case=case, device=device) for rows in (m, n)) for _ in range(sets)]
    results = [torch.empty(m, n, dtype=DTYPES[case.precision], device=device) for _ in range(sets)]
    turn = 0

    def run() -> None:
        nonlocal turn
        x, weight = operands[turn]
        torch.mm(x, weight.t(), out=results[turn])
        turn = (turn + 1) % sets

    return run


def _attention(case: Case, device: torch.device) -> Callable[[], object]:
    """Causal attention, of tensors in the layout that `runtime.model` has."""
    shape = case.shape
    sizes = [(shape["sequence_length"], shape["sequences"], shape[heads], shape["head_dim"]) for heads in ("heads", "kv_heads")]
    backward = case.operation.endswith("backward")
    leaves = [_random(*size, case=case, device=device).requires_grad_(backward) for size in (sizes[0], sizes[1], sizes[1])]
    grouped = shape["kv_heads"] < shape["heads"]

    def forward() -> torch.Tensor:
        query, key, value = (leaf.permute(1, 2, 0, 3) for leaf in leaves)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    return _way(forward, leaves, backward)


def _way(forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], backward: bool) -> Callable[[], object]:
    """The forward, or its backward alone, which may run again and again."""
    if not backward:
        return forward
    result = forward()
    gradient = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)


def _made_layer(
    shape: dict[str, int], case: Case, device: torch.device, times: int = 1
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """The forward of a layer of one rank on random numbers, so many times over, and what its backward gives the gradients of."""
    model, degree, dtype = measured_model(shape), shape["tensor_parallel"], DTYPES[case.precision]
    section = Section(range_parameters(model, (0, 1)), (0, 1), 0, degree, dtype, device)
    section.values.normal_(0, 0.02)
    # A group of one: the rank's own part of the matrices, without the collectives that sum over the others.
    layer = Layer(model, section, 0, TensorGroup(0, 1, None), "none", case.compiled)
    for norm in (layer.attention_norm, layer.mlp_norm):
        norm.weight_H.data.fill_(1)
    rotary = rotary_tables(model, [(0, shape["sequence_length"])], device, dtype)
    x_SBH = _random(shape["sequence_length"], shape["sequences"], shape["hidden"], case=case, device=device).requires_grad_()

    def forward() -> torch.Tensor:
        stream_SBH = x_SBH
        for _ in range(times):
            stream_SBH = layer(stream_SBH, rotary, None)
        return stream_SBH

    if case.compiled:  # else one graph would do for all shapes, slower than one for each, which trainings have
        torch.compiler.reset()
    return forward, [x_SBH, *layer.parameters()]


def _layer(case: Case, device: torch.device) -> Callable[[], object]:
    forward, leaves = _made_layer(case.shape, case, device)
    return _way(forward, leaves, case.operation.endswith("backward"))


def _head(case: Case, device: torch.device) -> Callable[[], object]:
    """Norm, output matrix and cross-entropy."""
    shape, model, dtype = case.shape, measured_model(case.shape), DTYPES[case.precision]
    section = Section(range_parameters(model, (1, 1)), (1, 1), 0, 1, dtype, device)
    section.values.normal_(0, 0.02)
    head = Head(model, section, TensorGroup(0, 1, None))
    length, sequences = shape["sequence_length"], shape["sequences"]
    x_SBH = _random(length, sequences, shape["hidden"], case=case, device=device).requires_grad_()
    labels_SB = torch.randint(shape["vocab"], (length, sequences), device=device)
    return _way(lambda: head(x_SBH, labels_SB), [x_SBH, *head.parameters()], case.operation.endswith("backward"))


def _memory(case: Case, device: torch.device) -> Callable[[], object]:
    """An addition as of a residual: two tensors in, one out."""
    count = case.shape["bytes"] // 3 // PRECISION_BYTES[case.precision]
    a, b, c = (_random(count, case=case, device=device) for _ in range(3))
    return lambda: torch.add(a, b, out=c)


def _launch(case: Case, device: torch.device) -> Callable[[], object]:
    """The smallest kernels, one after another."""
    x = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(case.shape["kernels"]):
            x.add_(1)

    return run


def _captured(case: Case, device: torch.device) -> Callable[[], object]:
    """The same as a graph, which the GPU runs by itself."""
    run = _launch(case, device)
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _host(case: Case, device: torch.device) -> Callable[[], object]:
    """Forward and backward of layers with next to nothing to compute."""
    forward, leaves = _made_layer(HOST_LAYER, case, device, HOST_LAYERS)
    gradient = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, gradient)


def _gradients(case: Case, device: torch.device) -> Callable[[], object]:
    """A micro-batch's gradients added to those of the micro-batches before, as `runtime.gradients` does it."""
    total = torch.zeros(case.shape["parameters"], device=device)
    gradient = _random(case.shape["parameters"], case=case, device=device)
    return lambda: total.add_(gradient)


def _optimizer(case: Case, device: torch.device) -> Callable[[], object]:
    """A step of AdamW as `runtime.optimizer` does it: the norm of the gradients, clipping, the step, parameters in precision."""
    count, dtype = case.shape["parameters"], DTYPES[case.precision]
    master = torch.nn.Parameter(torch.randn(count, device=device) * 0.02)
    values = master.data if dtype == torch.float32 else master.data.to(dtype)
    gradient = torch.randn(count, device=device)
    adamw: Any = torch.optim.AdamW([master], lr=1e-6, fused=True)

    def run() -> None:
        torch.linalg.vector_norm(gradient)
        master.grad = gradient.mul_(1.0)
        adamw.step()
        if values.dtype != master.dtype:
            values.copy_(master.data)

    return run


_RUNS: dict[str, Callable[[Case, torch.device], Callable[[], object]]] = {
    "matmul": _matmul,
    "attention": _attention,
    "layer": _layer,
    "mixture": _layer,
    "head": _head,
    "memory": _memory,
    "launch": _launch,
    "host": _host,
    "gradients": _gradients,
    "optimizer": _optimizer,
}


# --- The device ------------------------------------------------------------------------------------------------------


def described(
    device: torch.device, precisions: Sequence[str], measurements: Sequence[Measurement], compiled: bool = False
) -> Bench:
    """The bench of these measurements. Its kind has the figures that are known of this very device.

    These are its memory, and of a kind that the catalogue does not know, or a CPU, the best rates that were measured, which stand
    for its peaks. The efficiency is the catalogue's, or the nominal one: nothing is fitted here.
    """
    versions = {"motley": VERSION, "torch": str(torch.__version__)}
    threads = None
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        memory_bytes = int(facts.total_memory)
        name = gpu_kind_name(facts.name, facts.total_memory) or str(facts.name)
        versions |= {"cuda": str(torch.version.cuda)} if torch.version.cuda else {}
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name, threads = "CPU", torch.get_num_threads()
    known = catalogue().get(name)
    if known is not None and device.type == "cuda":
        kind = replace(known, memory_bytes=memory_bytes)
    else:
        kind = _measured_kind(name, known, memory_bytes, measurements)
    source = f"{kind.source}; memory as torch tells it" if kind.memory_bytes != (known or kind).memory_bytes else kind.source
    kind = replace(kind, source=source)
    return Bench(
        hardware_name(device),
        kind.name,
        tuple(precisions),
        threads,
        versions,
        tuple(measurements),
        gpu_kind=kind,
        compiled=compiled,
    )


def _measured_kind(name: str, known: GpuKind | None, memory_bytes: int, measurements: Sequence[Measurement]) -> GpuKind:
    """A kind whose peaks are the best rates measured. Raises InputError where there are none."""
    peaks: dict[str, float] = {}
    bandwidth = 0.0
    for m in measurements:
        if m.operation == "matmul":
            flop = 2 * m.shape["rows"] * m.shape["columns"] * m.shape["inner"]
            peaks[m.precision] = max(peaks.get(m.precision, 0.0), flop / m.seconds)
        elif m.operation == "memory":
            bandwidth = max(bandwidth, m.shape["bytes"] / m.seconds)
    if not peaks or not bandwidth:
        raise InputError(f"the peaks of {name} are those of measured matmuls and memory, of which there are none")
    told = "peaks and memory bandwidth are the best that were measured"
    return GpuKind(
        name=name,
        memory_bytes=memory_bytes,
        peak_flop_per_s={**(known.peak_flop_per_s if known else {}), **peaks},
        memory_bandwidth_bytes_per_s=bandwidth,
        nvlink_bytes_per_s=known.nvlink_bytes_per_s if known else None,
        idle_watts=known.idle_watts if known else NOMINAL_BUSY_WATTS * NOMINAL_IDLE_SHARE,
        busy_watts=known.busy_watts if known else NOMINAL_BUSY_WATTS,
        dollars_per_hour=known.dollars_per_hour if known else None,
        efficiency=known.efficiency if known else NOMINAL_EFFICIENCY,
        source=f"{known.source}; {told}" if known else told,
        aliases=known.aliases if known else (),
    )
