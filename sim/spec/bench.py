"""Bench files: what was measured on one device, or on the links between several, and the constants that were fitted on it.

    format: motley-bench/1
    device: NVIDIA H200                  # as its system names it
    kind: H200                           # in the catalogue, or the device's own name; CPU for a CPU
    precisions: [bf16]
    threads: 2                           # of a CPU
    compiled: true                       # if layers were compiled by torch, as `motley run --compile` does
    versions: {motley: 0.1.0, torch: 2.13.0}
    gpu_kind: {memory: 150754820096 B}   # figures that are the device's and not the catalogue's
    efficiency: {matmul_fraction: 0.71, matmul_half: 2.6 us, source: ...}
    stack: {memory_traffic: 1.4, host: 9 us, source: ...}
    measurements:
    - {operation: matmul, shape: {rows: 4096, columns: 4096, inner: 4096}, precision: bf16, seconds: 0.00021, ...}
    links:
    - {operation: send, sender: a/0, receiver: b/0, bytes: 1048576, seconds: 0.0011, spread: 0.02, repeats: 9}

`gpu_kind` and `efficiency` have the keys of a cluster file's `gpu_kinds`, `stack` those of its `stack`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sim.spec.gpu import PRECISIONS, GpuKind, catalogue, read_gpu_kind
from sim.spec.reading import InputError, Table, nearest, read_yaml
from sim.spec.stack import Stack, read_stack
from sim.spec.transformer import Moe, Transformer
from sim.spec.writing import efficiency_entries, kind_entries, stack_entries

FORMAT = "motley-bench/1"

_ATTENTION = ("sequences", "sequence_length", "heads", "kv_heads", "head_dim")
_LAYER = ("sequences", "sequence_length", "hidden", "ffn", "heads", "kv_heads", "head_dim", "tensor_parallel")
_MIXTURE = (*_LAYER, "experts", "top_k")
_HEAD = ("sequences", "sequence_length", "hidden", "vocab")

SECONDS = 1e-10, 1e6
"""Between these is what anything measured takes."""

OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("rows", "columns", "inner"),
    "attention forward": _ATTENTION,
    "attention backward": _ATTENTION,
    "layer forward": _LAYER,
    "layer backward": _LAYER,
    "mixture forward": _MIXTURE,
    "mixture backward": _MIXTURE,
    "head forward": _HEAD,
    "head backward": _HEAD,
    "memory": ("bytes",),
    "launch": ("kernels",),
    "host": ("kernels",),
    "gradients": ("parameters",),
    "optimizer": ("parameters",),
}
"""What is measured on a device, and the numbers of its shape.

- matmul: a (rows, inner) by an (inner, columns) matrix.
- attention: causal, on heads of one rank; its backward is without a forward.
- layer: of one rank of a tensor-parallel group, without its collectives; heads, key-value heads and ffn are the whole layer's.
  RMSNorm, SwiGLU, rotary positions, no biases.
- mixture: the same layer with so many experts of width ffn in the place of its MLP, of which each token goes to top_k.
- head: norm, output matrix and cross-entropy.
- memory: element-wise work that reads and writes so many bytes together.
- launch: so many of the smallest kernels one after another, without waiting for the host.
- host: the host's seconds to launch what `sim.spec.counts` has so many kernels for.
- gradients: the gradients of so many parameters, added to sums in fp32.
- optimizer: a step of AdamW on so many parameters, with the norm of the gradients and copies in fp32 where precision is lower."""

LINK_OPERATIONS = ("send", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "ring")
"""What is measured on links. In a ring every member sends to the next, the last to the first, all at once."""


def measured_model(shape: Mapping[str, int]) -> Transformer:
    """The one-layer model that the shape of a layer, a mixture or a head is of."""
    if "vocab" in shape:
        return Transformer("bench", layers=1, hidden=shape["hidden"], ffn=shape["hidden"], heads=1, vocab=shape["vocab"])
    sizes: dict[str, Any] = {name: shape[name] for name in ("hidden", "ffn", "heads", "kv_heads", "head_dim")}
    experts = Moe(shape["experts"], shape["top_k"], shape["ffn"]) if "experts" in shape else None
    return Transformer("bench", layers=1, vocab=8, experts=experts, **sizes)


# --- Records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """The seconds of one operation on one device. Raises InputError for what cannot be."""

    operation: str
    shape: Mapping[str, int]
    precision: str
    seconds: float
    """Median of the repeats."""
    spread: float = 0.0
    """Distance of the quartiles, as a fraction of the median."""
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            hint = nearest(self.operation, OPERATIONS)
            raise InputError(f"operation is one of {', '.join(OPERATIONS)}, but got {self.operation!r}{hint}")
        if set(self.shape) != set(OPERATIONS[self.operation]):
            expected = ", ".join(OPERATIONS[self.operation])
            raise InputError(f"the shape of {self.operation} has {expected}, but got {', '.join(self.shape) or 'nothing'}")
        for name, value in self.shape.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} in the shape of {self.operation} is a whole number above 0, but got {value!r}")
        if self.precision not in PRECISIONS:
            raise InputError(f"precision is one of {', '.join(PRECISIONS)}, but got {self.precision!r}")
        _check_times(self.seconds, self.spread, self.repeats)


@dataclass(frozen=True)
class LinkMeasurement:
    """The seconds of one message or collective. Raises InputError for what cannot be."""

    operation: str
    members: tuple[str, ...]
    """Names of devices (node/index) or hosts; of a send the sender and the receiver."""
    num_bytes: int
    """Of a message; of a collective's whole tensor; of an all_to_all what each member has; of a ring what each sends on."""
    seconds: float
    """Median of the repeats: from the sender's beginning until the last byte is there."""
    spread: float = 0.0
    """Distance of the quartiles, as a fraction of the median."""
    repeats: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        if self.operation not in LINK_OPERATIONS:
            hint = nearest(self.operation, LINK_OPERATIONS)
            raise InputError(f"operation is one of {', '.join(LINK_OPERATIONS)}, but got {self.operation!r}{hint}")
        if len(self.members) < 2 or len(set(self.members)) < len(self.members) or not all(self.members):
            raise InputError(f"the members of {self.operation} are at least two, with a name each, but got {list(self.members)}")
        if self.operation == "send" and len(self.members) > 2:
            raise InputError(f"a send has a sender and a receiver, but got {len(self.members)} members")
        if isinstance(self.num_bytes, bool) or not isinstance(self.num_bytes, int) or self.num_bytes < 0:
            raise InputError(f"bytes is a whole number of at least 0, but got {self.num_bytes!r}")
        _check_times(self.seconds, self.spread, self.repeats)

    @property
    def sender(self) -> str:
        """Of a send, who sends."""
        return self.members[0]

    @property
    def receiver(self) -> str:
        """Of a send, who receives."""
        return self.members[1]


def _check_times(seconds: float, spread: float, repeats: int) -> None:
    """Nothing. Raises InputError as the records say."""
    if not 0 < seconds < math.inf:
        raise InputError(f"seconds is finite and above 0, but got {seconds!r}")
    if not SECONDS[0] <= seconds <= SECONDS[1]:
        raise InputError(f"seconds is from {SECONDS[0]:g} to {SECONDS[1]:g}, but got {seconds!r}")
    if not 0 <= spread < math.inf:
        raise InputError(f"spread is finite and at least 0, but got {spread!r}")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise InputError(f"repeats is a whole number above 0, but got {repeats!r}")


@dataclass(frozen=True)
class Bench:
    """What a bench measured, and what was fitted on it. Raises InputError where there is no measurement in it."""

    device: str
    """As its system names it; of links, what they were measured with."""
    kind: str = ""
    """The catalogue's name of its kind, or the device's own; empty where there are links only."""
    precisions: tuple[str, ...] = ()
    threads: int | None = None
    """Of a CPU, those that computed."""
    versions: Mapping[str, str] | None = None
    measurements: tuple[Measurement, ...] = ()
    links: tuple[LinkMeasurement, ...] = ()
    gpu_kind: GpuKind | None = None
    """The kind with what is this device's own: figures that were measured, and the fitted efficiency. None: links only."""
    stack: Stack | None = None
    """What the runtime that was measured adds, fitted; None: that was not."""
    compiled: bool = False
    """Whether the layers that were measured were compiled by torch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", dict(self.versions or {}))
        for name in ("precisions", "measurements", "links"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.measurements and not self.links:
            raise InputError("a bench has at least one measurement, or one of links, but got none")
        if self.measurements and not self.kind:
            raise InputError("a bench with measurements of a device names its kind, but got ''")


# --- Writing ---------------------------------------------------------------------------------------------------------


def bench_yaml(bench: Bench) -> str:
    """The text of a bench file, which `read_bench` reads back equal."""
    head: dict[str, Any] = {"format": FORMAT, "device": bench.device}
    if bench.kind:
        head |= {"kind": bench.kind, "precisions": list(bench.precisions)}
    if bench.threads is not None:
        head["threads"] = bench.threads
    if bench.compiled:
        head["compiled"] = True
    if bench.versions:
        head["versions"] = dict(bench.versions)
    if bench.gpu_kind is not None:
        head |= {"gpu_kind": kind_entries(bench.gpu_kind), "efficiency": efficiency_entries(bench.gpu_kind.efficiency)}
    if bench.stack is not None:
        head["stack"] = stack_entries(bench.stack)
    lines = [yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=120)]
    if bench.measurements:
        lines.append("measurements:\n")
        for m in bench.measurements:
            told: dict[str, Any] = {"operation": m.operation, "shape": dict(m.shape), "precision": m.precision}
            lines.append(f"- {_text(told | _times(m))}")
    if bench.links:
        lines.append("links:\n")
        for link in bench.links:
            sent: dict[str, Any] = {"sender": link.sender, "receiver": link.receiver}
            who = sent if link.operation == "send" else {"members": list(link.members)}
            lines.append(f"- {_text({'operation': link.operation, **who, 'bytes': link.num_bytes} | _times(link))}")
    return "".join(lines)


def _times(m: Measurement | LinkMeasurement) -> dict[str, Any]:
    return {"seconds": float(m.seconds), "spread": float(m.spread), "repeats": m.repeats}


def _text(value: object) -> str:
    """The YAML of a value, on one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)


# --- Reading ---------------------------------------------------------------------------------------------------------


def read_bench(path: str | Path) -> Bench:
    """The bench of a file. Raises InputError with the file, the key, the value and what is accepted."""
    table = Table(read_yaml(path), str(path))
    table.choice("format", [FORMAT])
    device, kind = table.text("device"), table.text("kind", "")
    precisions = table.get("precisions", _precisions, f"a list of {', '.join(PRECISIONS)}", () if not kind else ("",))
    threads = table.integer("threads", None, minimum=1)
    compiled = table.flag("compiled", False)
    versions = table.table("versions", None)
    told = {} if versions is None else {name: versions.text(name) for name in versions.keys()}  # noqa: SIM118
    gpu_kind = _read_kind(kind, table)
    stack = read_stack("bench", table.table("stack")) if "stack" in table else None
    measurements = [_read_measurement(entry) for entry in table.tables("measurements", ())]
    links = [_read_link(entry) for entry in table.tables("links", ())]
    table.close()
    if precisions == ("",):
        raise table.error("precisions", "is missing; a bench of a device names those that it measured")
    try:
        return Bench(device, kind, precisions, threads, told, tuple(measurements), tuple(links), gpu_kind, stack, compiled)
    except InputError as error:
        raise table.error("", str(error)) from None


def _precisions(value: object) -> tuple[str, ...]:
    """The precisions of a list. Raises ValueError for anything else."""
    if not isinstance(value, list) or not value or not all(item in PRECISIONS for item in value):
        raise ValueError
    return tuple(value)


def _read_kind(kind: str, table: Table) -> GpuKind | None:
    """The kind with the file's figures and efficiency; None where it has neither."""
    plain: dict[str, Any] = {}
    for key in ("gpu_kind", "efficiency"):
        if key in table:
            value = table.get(key, lambda value: value, "a mapping of keys to values")
            plain |= dict(value) if key == "gpu_kind" and isinstance(value, dict) else {key: value}
    if not plain:
        return None
    if not kind:
        raise table.error("kind", "is missing; gpu_kind and efficiency are those of a kind")
    return read_gpu_kind(kind, Table(plain, table.where, "gpu_kind"), catalogue().get(kind))


def _read_measurement(table: Table) -> Measurement:
    """The measurement of one entry; the table is closed."""
    operation = table.choice("operation", OPERATIONS)
    shape = table.table("shape")
    values = {name: shape.integer(name, minimum=1) for name in OPERATIONS[operation]}
    shape.close()
    precision = table.choice("precision", PRECISIONS)
    times = _read_times(table)
    try:
        return Measurement(operation, values, precision, *times)
    except InputError as error:
        raise table.error("", str(error)) from None


def _read_link(table: Table) -> LinkMeasurement:
    """The measurement of links of one entry; the table is closed."""
    operation = table.choice("operation", LINK_OPERATIONS)
    members: tuple[str, ...] = (table.text("sender"), table.text("receiver")) if operation == "send" else ()
    members = members or table.get("members", _names, "a list of names of devices")
    num_bytes = table.integer("bytes")
    times = _read_times(table)
    try:
        return LinkMeasurement(operation, members, num_bytes, *times)
    except InputError as error:
        raise table.error("", str(error)) from None


def _names(value: object) -> tuple[str, ...]:
    """The texts of a list. Raises ValueError for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return tuple(value)


def _read_times(table: Table) -> tuple[float, float, int]:
    """Seconds, spread and repeats of an entry, which is closed."""
    times = table.number("seconds"), table.number("spread", 0.0), table.integer("repeats", 1, minimum=1)
    table.close()
    return times
