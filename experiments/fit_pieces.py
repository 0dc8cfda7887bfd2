"""Fitting the efficiency records of GPU kinds on published micro-benchmarks: bounded, robust least squares on log-ratios.

What is measured there are matmuls, attention, memory bandwidth and single layers, each with its kind, shape and seconds; what
they should take is what `sim.cost.pieces` says, so that the formula stands in one place. A record of constants.yaml is shared by
several kinds, and all measurements of these kinds decide it together. Each constant is held near its starting point by a
prior: what the measurements do not tell stays as it was.

The layers come from two profilers, each a software stack with one constant of its own for each way it runs:

- Zorse (github benson-guo/zorse, utils/runtime_estimator.py) sums the times of the kernels of a trace, so that no host and no
  gap is in them, and sleeps PAUSE_S between passes, in which a GPU at its power limit recovers: in a short pass it is faster
  by `burst`, a constant of the fit that no record has. Its Llama and Mistral layers use flash attention (on P40 none), GPT,
  BERT and ViT have none; fp16 runs under autocast. Its backward passes add each gradient to an fp32 sum outside of the
  matmuls, which moves GRADIENT_BYTES per parameter. Images are 577 tokens whatever the length that the row gives.
- Sailor (profiles made for Metis) times layers of OPT and GPT-Neo without flash attention, forward and backward together. Its
  times on A100 are below what fp32 could take: it ran in TF32 where there is TF32. Only layers on one GPU are looked at: those
  divided over several have communication in them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from scipy.sparse import lil_matrix

from experiments.constants import without_factor
from experiments.layer_profiles import profiled_kind, profiled_precision
from sim.cost.pieces import (
    AttentionWork,
    LayerWork,
    MatmulWork,
    Rates,
    head_seconds,
    layer_work,
    rates_of,
    seconds_of_layer,
)
from sim.spec.counts import PRECISION_BYTES, layer_parameters
from sim.spec.gpu import WIDE_HEAD, Efficiency, GpuKind, efficiencies, gpu_kind
from sim.spec.reading import InputError, read_rows
from sim.spec.stack import Stack
from sim.spec.transformer import Transformer

PAUSE_S = 0.05
"""Seconds that Zorse's profiler sleeps after each pass."""

GRADIENT_BYTES: Mapping[str, int] = {"fp16": 18, "fp32": 12}
"""Bytes per parameter of adding a gradient to its sum in fp32 (read both, write one: 12), under autocast after a cast from fp16
to fp32 (read 2, write 4)."""

ROBUST_ERROR = 0.03
"""Relative errors well below this count squared, well above it in proportion."""

PRIOR_ERROR = 0.1
"""To move a constant by its width costs as much as to miss one measurement by this fraction."""


# --- The models of the profiles --------------------------------------------------------------------------------------


def _llama(hidden: int, ffn: int, heads: int, kv_heads: int = 0) -> Transformer:
    return Transformer("llama", layers=1, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, vocab=8)


def _gpt(hidden: int, ffn: int, heads: int) -> Transformer:
    """GPT, BERT, ViT and OPT: two matrices in the MLP, biases, no rotary position."""
    return Transformer(
        "gpt",
        layers=1,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        vocab=8,
        activation="gelu",
        norm="layernorm",
        attention_bias="all",
        mlp_bias=True,
        position="learned",
        max_positions=4096,
    )


ZORSE_MODELS: Mapping[str, Transformer] = {
    "llama_tiny": _llama(2048, 5632, 32),
    "llama_3b": _llama(3200, 8640, 32),
    "llama_7b": _llama(4096, 11008, 32),
    "llama_13b": _llama(5120, 13824, 40),
    "llama_33b": _llama(6656, 17920, 52),
    "llama_65b": _llama(8192, 22016, 64),
    "llamav2_7b": _llama(4096, 11008, 32),
    "llamav2_13b": _llama(5120, 13824, 40),
    "mistral_7b": _llama(4096, 14336, 32, 8),
    "gpt_test": _gpt(512, 2048, 128),
    "gpt_1.3b": _gpt(2048, 8192, 128),
    "gpt_2.7b": _gpt(2560, 10240, 80),
    "gpt_6.7b": _gpt(4096, 16384, 128),
    "gpt_175b": _gpt(12288, 49152, 96),
    "bert_base": _gpt(768, 3072, 12),
    "bert_large": _gpt(1024, 4096, 16),
    "bert_xlarge": _gpt(1536, 6144, 24),
    "vit_g": _gpt(1664, 8192, 16),
    "vit_e": _gpt(1792, 15360, 16),
}
"""The layers of Zorse's models: models/{llama_simple,llama_v2,mistral_simple,gpt_simple,bert_simple,vit_simple}.py."""

VIT_TOKENS = 577
"""Of an image of 384 x 384 pixels in patches of 16 x 16, and the class token."""

SAILOR_MODELS: Mapping[str, Transformer] = {"OPT-350": _gpt(1024, 4096, 16), "GPT-Neo-2.7": _gpt(2560, 10240, 20)}
"""OPT-350M and GPT-Neo-2.7B, by their published configurations. Llama-3-8B is left out: its profiles are ten times slower."""


# --- Measurements ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadWork:
    """The head of a model after some sequences."""

    transformer: Transformer
    sequences: int
    sequence_length: int


@dataclass(frozen=True)
class GradientsWork:
    """Gradients that are added to those of earlier micro-batches."""

    parameters: int


@dataclass(frozen=True)
class OptimizerWork:
    """A step of the optimizer, and the bytes that a fused one moves."""

    num_bytes: float


@dataclass(frozen=True)
class LaunchWork:
    """Kernels that do next to nothing."""

    kernels: int


Work = LayerWork | MatmulWork | AttentionWork | HeadWork | GradientsWork | OptimizerWork | LaunchWork | float
"""What is measured; a number is bytes that kernels move which memory bounds."""


@dataclass(frozen=True)
class Measurement:
    """One time, and the work that took it."""

    what: str
    """A word for the work, and for layers, heads and attention which pass: forward, backward or both."""
    source: str
    kind: GpuKind
    precision: str
    model: str
    """The model of a layer; else empty."""
    group: str
    """Measurements of one group are held out together, or not at all."""
    work: Work
    seconds: float
    stack: str = ""
    """The stack whose constants it shares, if any."""
    gradient_bytes: float = 0.0
    """Of a layer's backward: bytes that sums of gradients move besides."""
    pause_s: float | None = None
    """Seconds of rest after each pass; None where it was repeated without."""

    @property
    def stratum(self) -> str:
        """Groups are held out in equal shares inside each stratum."""
        return f"{self.source}|{self.kind.name}|{self.precision}|{self.what.split()[0]}"


def read_measurements(folder: Path) -> list[Measurement]:
    """All measurements of the data folder that this fit can use. Raises InputError where a file is missing or cannot be used."""
    readers = (
        ("transformer_layer_times.csv", _zorse),
        ("layer_profiles.csv", _sailor),
        ("microbench.csv", _micro),
    )
    return [measurement for name, reader in readers for measurement in read_rows(folder / name, reader)]


def _zorse(row: Mapping[str, str]) -> Iterator[Measurement]:
    transformer, kind = ZORSE_MODELS[row["model"]], gpu_kind(row["gpu"])
    precision = {"float16": "fp16", "float32": "fp32"}[row["dtype"]]
    decoder = row["model"].startswith(("llama", "mistral"))
    length = VIT_TOKENS if row["model"].startswith("vit") else int(row["seq_len"])
    flash = decoder and kind.name != "P40"
    element_bytes = PRECISION_BYTES[precision]
    work = layer_work(transformer, int(row["micro_batch"]), length, 1, False, element_bytes, flash, 1, 1)
    gradient_bytes = float(layer_parameters(transformer) * GRADIENT_BYTES[precision])
    for what, key, extra in (("forward", "forward_ms", 0.0), ("backward", "backward_ms", gradient_bytes)):
        yield Measurement(
            what=f"layer {what}",
            source="zorse",
            kind=kind,
            precision=precision,
            model=row["model"],
            group=f"zorse|{row['gpu']}|{precision}|{row['model']}|{row['seq_len']}",
            work=work,
            seconds=float(row[key]) / 1e3,
            stack=_zorse_stack(row["model"], precision, flash),
            gradient_bytes=extra,
            pause_s=PAUSE_S,
        )


def _zorse_stack(model: str, precision: str, flash: bool) -> str:
    if model.startswith("gpt"):
        return "zorse-gpt"
    if model.startswith(("bert", "vit")):
        return "zorse-encoder"
    return "zorse" + ("-autocast" if precision == "fp16" else "") + ("" if flash else "-unfused")


def _sailor(row: Mapping[str, str]) -> Iterator[Measurement]:
    if not row["source"].startswith("sailor") or row["model"] not in SAILOR_MODELS or row["tp"] != "1":
        return
    transformer, kind = SAILOR_MODELS[row["model"]], profiled_kind(row["gpu"])
    yield Measurement(
        what="layer both",
        source="sailor",
        kind=kind,
        precision=profiled_precision(kind),
        model=row["model"],
        group=f"sailor|{row['gpu']}|{row['model']}|{row['mbs']}",
        work=layer_work(transformer, int(row["mbs"]), int(row["seq_len"]), 1, False, 4, False, 1, 1),
        seconds=float(row["mid_layer_ms"]) / 1e3,
        stack="sailor-profile",
    )


def _micro(row: Mapping[str, str]) -> Iterator[Measurement]:
    """Matmuls, attention and memory; "best shape" matmuls are no shape's time, and are left out."""
    op, shape, value = row["op"], row["shape"], float(row["value"])
    kind = _micro_kind(row["device"])
    if kind is None:
        return

    def measured(what: str, work: Work, seconds: float, precision: str) -> Measurement:
        return Measurement(what, row["source"], kind, precision, "", f"{row['device']}|{op}|{shape}", work, seconds)

    if op.startswith("matmul efficiency"):
        sizes = _sizes(shape)
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        # A sum in fp32 is read and written, 8 bytes an element; a result in 16 bits is written.
        num_bytes = 2 * (m * k + k * n) + (8 if "accumulate=True" in shape else 2) * m * n
        work = MatmulWork(1, 2 * m * n * k, num_bytes)
        yield measured("matmul", work, work.flop / (value * kind.peak_flop_per_s["bf16"]), "bf16")
    elif op.startswith("GEMM cublasLt") or (op.startswith("matmul") and shape.endswith("square")):
        if shape.endswith("square"):
            m = n = k = _sizes(shape)["n"]
        else:
            m, n, k = (int(size) for size in shape.split()[0].split("x"))
        precision = next(precision for precision in ("tf32", "fp16", "fp8") if precision in op)
        element_bytes = 1 if precision == "fp8" else PRECISION_BYTES[precision]
        work = MatmulWork(1, 2 * m * n * k, element_bytes * (m * k + k * n) + max(2, element_bytes) * m * n)
        yield measured("matmul", work, work.flop / (value * 1e12), precision)
    elif op.startswith("sdp_"):
        sizes = _sizes(shape)
        length, heads, widths = sizes["seq_len"], sizes["head_num"], sizes["qk_head_dim"] + sizes["v_head_dim"]
        full = 2 * sizes["batch"] * length**2 * heads * widths
        keys = sizes["kv_head_num"]
        num_bytes = 2 * sizes["batch"] * length * (heads + keys) * widths
        attention = _flash(full, length, length * sizes["batch"] * heads, widths // 2, num_bytes)
        what, passes = ("backward", 2.5) if "bwd" in op else ("forward", 1.0)
        yield measured(f"attention {what}", attention, passes * full / (value * kind.peak_flop_per_s["bf16"]), "bf16")
    elif op.startswith("FlashAttention-2 fwd+bwd") and " causal" in shape:
        length, width = (int(number) for number in re.findall(r"\d+", shape)[:2])
        query_rows = 16384 * 2048 // width  # 16384 tokens of a hidden size of 2048
        full = 4 * query_rows * length * width
        attention = _flash(full, length, query_rows, width, 8 * query_rows * width)
        yield measured("attention both", attention, 3.5 * full / 2 / (value * 1e12), "fp16")
    elif op.startswith("HBM bandwidth"):
        yield measured("memory", 1e12 * value, 1.0, "fp16")
    elif op.startswith("vector multiply"):
        yield measured("memory", 8 * 1e12 * value, 1.0, "fp16")  # each product reads 4 bytes and writes 4


_MICRO_KINDS = (
    ("A100-SXM4-80GB", "A100-80GB-SXM"),
    ("H100-SXM-80GB", "H100-80GB-SXM"),
    ("H200-SXM-141GB", "H200"),
    ("A100-PCIe-80GB", "A100-80GB-PCIe"),
    ("A100-80GB-SXM", "A100-80GB-SXM"),
    ("H100-SXM", "H100-80GB-SXM"),
    ("B200-SXM", "B200"),
    ("A100-80GB", "A100-80GB-SXM"),
    ("V100-32GB", "V100-32GB-SXM"),
    ("A6000", "A6000"),
    ("RTX3090Ti", "RTX3090Ti"),
    ("RTX4090", "RTX4090"),
)
"""What devices of the micro-benchmarks begin with, and the kinds that they are; the first that fits decides."""


def _micro_kind(device: str) -> GpuKind | None:
    return next((gpu_kind(name) for start, name in _MICRO_KINDS if device.startswith(start)), None)


def _sizes(shape: str) -> dict[str, int]:
    """The whole numbers of a text such as "b=1, m=4096"."""
    return {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)\b", shape)}


def _flash(full: int, length: int, rows: int, width: int, num_bytes: int) -> AttentionWork:
    """Causal flash attention whose full count of FLOP is given, by the rule of `sim.cost.pieces.layer_work`."""
    return AttentionWork(full / 2, full / length, rows, width, num_bytes, True)


# --- Constants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """A constant of the fit: where it starts, its bounds, and the factor e^width that the prior lets it go."""

    name: str
    start: float
    least: float
    most: float
    width: float


RECORD_CONSTANTS = (
    Constant("matmul_fraction", 0.7, 0.1, 1.0, 0.5),
    Constant("fp32_fraction", 0.7, 0.1, 1.0, 0.5),
    Constant("matmul_half_s", 10e-6, 1e-6, 200e-6, 1.0),
    Constant("matmul_traffic", 0.65, 0.1, 1.0, 0.3),
    Constant("attention_fraction", 0.4, 0.05, 1.0, 0.3),
    Constant("attention_keys", 230.0, 10.0, 1000.0, 0.3),
    Constant("attention_rows", 16e3, 1e3, 200e3, 0.7),
    Constant("attention_width", 22.0, 1.0, 200.0, 0.5),
    Constant("memory_fraction", 0.85, 0.5, 0.95, 0.1),
    Constant("burst", 0.05, 1e-3, 1.5, 1.0),
)
"""Of each record; `burst` is how much faster the GPU is in a short pass after a rest, as a fraction."""


def _of_stack(traffic: float, traffic_width: float, attention: float | None) -> tuple[Constant, ...]:
    scale = () if attention is None else (Constant("attention_scale", attention, 0.1, 2.0, 0.3),)
    return (Constant("memory_traffic", traffic, 0.5, 10.0, traffic_width), *scale)


STACKS: Mapping[str, tuple[Constant, ...]] = {
    "zorse-autocast": _of_stack(4.0, 0.1, None),
    "zorse-autocast-unfused": _of_stack(4.0, 0.1, 0.4),
    "zorse": _of_stack(2.5, 0.1, None),
    "zorse-unfused": _of_stack(2.5, 0.1, 0.4),
    "zorse-gpt": _of_stack(5.0, 0.3, 0.4),
    "zorse-encoder": _of_stack(1.5, 0.3, 0.55),
    "sailor-profile": _of_stack(2.0, 0.5, 0.4),
}
"""The constants of each way that a profiler runs. Where they start was counted in the code of the models. Of Llama, with norms
and rotary positions in pieces, a layer moves 56 elements per token and element of hidden for 22 of fused kernels, and under
autocast, which has the norms in fp32, 175 bytes for 44. GPT's gelu is in pieces. Scores pass through memory 10 times in GPT and
Llama and 6 to 8 times in BERT and ViT, where `sim.spec.counts` has 4. The rate of flash attention is left to the records."""

LEAST_ATTENTION = 0.06
"""Layers say something of the rate of flash attention if it has at least this share of the FLOP of their matmuls."""


def _tells(m: Measurement) -> tuple[str, ...]:
    """The constants of its kind's record that a measurement says something of."""
    fraction = "fp32_fraction" if m.precision == "fp32" else "matmul_fraction"
    if isinstance(m.work, MatmulWork):
        return (fraction, "matmul_half_s", "matmul_traffic")
    if isinstance(m.work, AttentionWork):
        narrow = ("attention_width",) if m.work.width < WIDE_HEAD else ()
        return ("attention_fraction", "attention_keys", "attention_rows", *narrow)
    if isinstance(m.work, LaunchWork):
        return ("launch_s",)
    if isinstance(m.work, HeadWork):
        return (fraction, "memory_fraction")
    if not isinstance(m.work, LayerWork):
        return ("memory_fraction",)
    attention = m.work.attention
    told = attention.flash and attention.flop >= LEAST_ATTENTION * m.work.matmuls.flop
    burst = () if m.pause_s is None else ("burst",)
    return (fraction, "matmul_half_s", "memory_fraction", *(("attention_fraction",) if told else ()), *burst)


def family_of(kind: GpuKind) -> str:
    """The name of the record that the kind shares. Raises InputError where it has one of its own."""
    for name, record in efficiencies().items():
        if record == kind.efficiency:
            return name
    raise InputError(f"{kind.name} shares no record of constants.yaml")


# --- The fit ---------------------------------------------------------------------------------------------------------

Values = Mapping[str, Mapping[str, float]]
"""Constants by the name of their record or stack, then by their own."""


class PiecesSearch:
    """The search for the constants that some measurements tell; what it moves are their logarithms.

    `record_of` names the record that a kind's measurements decide, whose constants are `record_constants`; `stacks` has the
    constants of each stack.
    """

    def __init__(
        self,
        measurements: Sequence[Measurement],
        record_of: Callable[[GpuKind], str] = family_of,
        record_constants: Sequence[Constant] = RECORD_CONSTANTS,
        stacks: Mapping[str, Sequence[Constant]] = STACKS,
    ) -> None:
        self.measurements, self.blocks, self.record_of = measurements, _blocks(measurements, record_of), record_of
        told = {(record_of(m.kind), name) for m in measurements for name in _tells(m)}
        records = sorted({record for record, _ in told})
        self.constants = [(record, c) for record in records for c in record_constants if (record, c.name) in told]
        self.constants += [(stack, c) for stack in sorted({m.stack for m in measurements if m.stack}) for c in stacks[stack]]

    def values(self, logs: Any) -> Values:
        """The constants of their logarithms."""
        values: dict[str, dict[str, float]] = {}
        for (owner, constant), log in zip(self.constants, logs, strict=True):
            values.setdefault(owner, {})[constant.name] = min(max(float(np.exp(log)), constant.least), constant.most)
        return values

    def fit(self) -> Values:
        """The constants at the least robust error."""
        start = np.log([c.start for _, c in self.constants])
        widths = np.array([c.width for _, c in self.constants])
        measured = np.log([m.seconds for m in self.measurements])

        def residuals(logs: Any) -> Any:
            errors = (np.log(self.predict(self.values(logs))) - measured) / ROBUST_ERROR
            robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
            return np.concatenate([robust, (logs - start) / widths * (PRIOR_ERROR / ROBUST_ERROR)])

        bounds = (np.log([c.least for _, c in self.constants]), np.log([c.most for _, c in self.constants]))
        found = least_squares(
            residuals, start, bounds=bounds, jac_sparsity=self.pattern(), diff_step=1e-4, xtol=1e-5, ftol=1e-5, max_nfev=60
        )
        return self.values(found.x)

    def predict(self, values: Values) -> Any:
        """The seconds that the measurements should take by these constants."""
        return _predict(self.measurements, self.blocks, values)

    def pattern(self) -> Any:
        """Which residuals depend on which constants: a measurement on those of its record and stack, a prior on its own."""
        pattern = lil_matrix((len(self.measurements) + len(self.constants), len(self.constants)), dtype=int)
        columns: dict[str, list[int]] = {}
        for j, (owner, _) in enumerate(self.constants):
            columns.setdefault(owner, []).append(j)
            pattern[len(self.measurements) + j, j] = 1
        for i, m in enumerate(self.measurements):
            pattern[i, columns.get(self.record_of(m.kind), []) + columns.get(m.stack, [])] = 1
        return pattern


_Blocks = Mapping[tuple[str, GpuKind, str, str], Sequence[int]]
"""The measurements of each record, kind, precision and stack."""


def _blocks(measurements: Sequence[Measurement], record_of: Callable[[GpuKind], str] = family_of) -> _Blocks:
    blocks: dict[tuple[str, GpuKind, str, str], list[int]] = {}
    for i, m in enumerate(measurements):
        blocks.setdefault((record_of(m.kind), m.kind, m.precision, m.stack), []).append(i)
    return blocks


def _predict(measurements: Sequence[Measurement], blocks: _Blocks, values: Values) -> Any:
    """The seconds that measurements should take by these constants, and by the shipped ones where these say nothing."""
    predicted = np.empty(len(measurements))
    for (family, kind, precision, name), members in blocks.items():
        record: dict[str, Any] = dict(values.get(family, {}))
        burst = record.pop("burst", 0.0)
        # Every constant comes once, so that to remember its rates would only fill the memory.
        rates = rates_of.__wrapped__(replace(kind, efficiency=replace(kind.efficiency, **record)), precision)
        stack = Stack(name or "none", **values.get(name, {c.name: c.start for c in STACKS.get(name, ())}))  # type: ignore[arg-type]
        for i in members:
            predicted[i] = _seconds(measurements[i], rates, stack, burst)
    return predicted


def _seconds(m: Measurement, rates: Rates, stack: Stack, burst: float) -> float:
    """What one measurement should take."""
    work = m.work
    if isinstance(work, LayerWork):
        layer = seconds_of_layer(work, rates, stack)
        seconds = layer.forward_s if m.what.endswith("forward") else layer.backward_s + rates.memory_s(m.gradient_bytes)
        if m.what == "layer both":
            seconds += layer.forward_s
    elif isinstance(work, HeadWork):
        head = head_seconds.__wrapped__(
            rates.kind, stack, work.transformer, work.sequences, work.sequence_length, precision=m.precision
        )
        seconds = head.forward_s if m.what == "head forward" else head.backward_s
    elif isinstance(work, GradientsWork):
        seconds = rates.memory_s(work.parameters * stack.gradient_bytes)
    elif isinstance(work, OptimizerWork):
        seconds = rates.memory_s(work.num_bytes * stack.optimizer_traffic)
    elif isinstance(work, LaunchWork):
        seconds = work.kernels * rates.kind.efficiency.launch_s
    elif isinstance(work, MatmulWork):
        seconds = rates.matmul_s(work, rates.matmul_peak) + rates.kind.efficiency.launch_s
    elif isinstance(work, AttentionWork):
        forward_s, backward_s = rates.flash_s(work)
        seconds = {"forward": forward_s, "backward": backward_s, "both": forward_s + backward_s}[m.what.split()[1]]
    else:
        seconds = rates.memory_s(work)
    return seconds if m.pause_s is None else seconds / (1 + burst * m.pause_s / (m.pause_s + seconds))


# --- The result ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PiecesFit:
    """What a fit found, and how far off it is."""

    efficiencies: Mapping[str, Efficiency]
    """The records of which the measurements say something; what they do not tell is as it is shipped."""
    others: Values
    """What is in no record: `burst` by record, and the constants of the profilers' stacks."""
    errors: pd.DataFrame
    """A row for each kind of measurement, GPU kind, precision and part (fit, held out): count, mean absolute relative error."""


def fit_pieces(data_folder: str | Path, seed: int = 0, holdout: float = 0.5) -> PiecesFit:
    """The efficiency records that the measurements of a data folder tell, and how well such a fit foretells others.

    The records are fitted on all measurements. The errors are those of a second fit, which does not see the share `holdout` of
    the groups of every stratum (source, GPU kind, precision, kind of work), drawn by lot. A group is one model on one kind at
    one length, or one micro-benchmark. The same seed gives the same result. Raises InputError where a file is missing or
    holdout is not a share from 0 to below 1.
    """
    if not 0 <= holdout < 1:
        raise InputError(f"holdout is a share of the groups from 0 to below 1, but got {holdout!r}")
    measurements = read_measurements(Path(data_folder))
    held = _held_out(measurements, seed, holdout)
    values = PiecesSearch(measurements).fit()
    without = PiecesSearch([m for m in measurements if m.group not in held]).fit() if held else values
    table = _errors(measurements, without, held)
    records, others = {}, {}
    for owner, found in _rounded(values).items():
        own: dict[str, Any] = {name: value for name, value in found.items() if name != "burst"}
        if owner in efficiencies():
            begun, told = without_factor(efficiencies()[owner]), _source(table[table.record == owner], own)
            records[owner] = replace(begun, **own, source=told)
        others[owner] = {name: value for name, value in found.items() if owner not in efficiencies() or name == "burst"}
    return PiecesFit(records, others, _summary(table))


def leave_out_models(data_folder: str | Path) -> pd.DataFrame:
    """The errors on the layers of each family of models (llama, gpt, ...) by a fit on everything but them."""
    measurements = read_measurements(Path(data_folder))
    tables = []
    for name in dict.fromkeys(_model_family(m) for m in measurements if m.source == "zorse"):
        left_out = {m.group for m in measurements if m.source == "zorse" and _model_family(m) == name}
        values = PiecesSearch([m for m in measurements if m.group not in left_out]).fit()
        errors = _summary(_errors(measurements, values, left_out))
        tables.append(errors[errors.part == "held out"].assign(model=name))
    return pd.concat(tables, ignore_index=True)


def _model_family(m: Measurement) -> str:
    return m.model.partition("_")[0]


def _held_out(measurements: Sequence[Measurement], seed: int, holdout: float) -> set[str]:
    """The groups that are not used in the fit. A stratum keeps at least one group."""
    strata: dict[str, list[str]] = {}
    for m in measurements:
        groups = strata.setdefault(m.stratum, [])
        if m.group not in groups:
            groups.append(m.group)
    lot, held = random.Random(seed), set()
    for name in sorted(strata):
        groups = sorted(strata[name])
        lot.shuffle(groups)
        held.update(groups[: min(round(len(groups) * holdout), len(groups) - 1)])
    return held


def _errors(measurements: Sequence[Measurement], values: Values, held: set[str]) -> pd.DataFrame:
    """A row for each measurement: what it is, whether it was held out, and its absolute relative error by these constants."""
    predicted = _predict(measurements, _blocks(measurements), values)
    return pd.DataFrame(
        {
            "what": [m.what for m in measurements],
            "source": [m.source for m in measurements],
            "gpu": [m.kind.name for m in measurements],
            "record": [family_of(m.kind) for m in measurements],
            "precision": [m.precision for m in measurements],
            "part": ["held out" if m.group in held else "fit" for m in measurements],
            "error": np.abs(predicted / np.array([m.seconds for m in measurements]) - 1),
        }
    )


def _summary(errors: pd.DataFrame) -> pd.DataFrame:
    """Count, mean and median error of the rows that are alike in all else."""
    keys = ["what", "source", "gpu", "record", "precision", "part"]
    summary = errors.groupby(keys).error.agg(["size", "mean", "median"]).reset_index()
    return summary.rename(columns={"size": "count", "mean": "mean_error", "median": "median_error"})


_SHORT = {
    "zorse": "Zorse",
    "sailor": "Sailor",
    "SimuMax": "SimuMax",
    "AI-benchmarking-guide": "Azure",
    "2307.08691": "FlashAttention-2",
    "mli": "mli",
}
"""What the sources are called for short, by a part of what the data call them."""


def _source(table: pd.DataFrame, told: Iterable[str]) -> str:
    """On what a record was fitted, with the mean relative error of what was held out (of all, where nothing was)."""
    parts = []
    names = table.source.map(lambda source: next((short for part, short in _SHORT.items() if part in source), source))
    for (what, name, precision), rows in table.groupby([table.what.str.split().str[0], names, "precision"]):
        held = rows[rows.part == "held out"]
        error = (held if len(held) else rows).error.mean()
        kind = "memory bandwidth" if what == "memory" else f"{what} {precision}"
        parts.append(f"{kind} ({name}, {len(rows)}, {error:.2f})")
    nominal = [name for name in (c.name for c in RECORD_CONSTANTS) if name not in (*told, "burst")]
    rest = f"; nominal: {', '.join(nominal)}" if nominal else ""
    return f"fitted on (source, measurements, mean relative error of those held out): {', '.join(parts)}{rest}"


def _rounded(values: Values) -> Values:
    """The constants to three digits."""
    return {owner: {name: float(f"{value:.3g}") for name, value in found.items()} for owner, found in values.items()}
