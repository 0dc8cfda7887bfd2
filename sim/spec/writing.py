"""What cluster and bench files say alike: quantities with their units, kinds of GPU, efficiency records, stacks.

Each is written so that its reader reads back an equal one.
"""

from __future__ import annotations

from dataclasses import fields
from decimal import Decimal
from typing import Any

from sim.spec.gpu import Efficiency, GpuKind, catalogue
from sim.spec.reading import DIMENSIONS, quantity
from sim.spec.stack import STACK_UNITS, Stack

_UNITS = {
    "bandwidth": ("Gbit/s", "GB/s", "Mbit/s", "MB/s", "B/s"),
    "time": ("s", "ms", "us", "ns"),
    "size": ("GiB", "GB", "MiB", "B"),
    "rate of work": ("TFLOP/s", "GFLOP/s", "FLOP/s"),
    "power": ("W",),
    "price": ("$/h",),
}
"""The units that are tried; of equally short texts the first is taken. One of each has the factor 1."""


def quantity_text(amount: float, dimension: str) -> str:
    """The shortest text, in the units that people use, that `quantity` reads back as exactly this amount in SI units."""
    exact = Decimal(repr(amount))
    texts = [f"{(exact / Decimal(repr(DIMENSIONS[dimension][unit]))).normalize():f} {unit}" for unit in _UNITS[dimension]]
    return min((text for text in texts if quantity(text, dimension) == amount), key=len)


def efficiency_entries(record: Efficiency) -> dict[str, Any]:
    """A record as a cluster file's `gpu_kinds: {NAME: {efficiency: ...}}` has it."""
    entries: dict[str, Any] = {}
    for field in fields(Efficiency):
        value = getattr(record, field.name)
        is_time = field.name.endswith("_s")
        entries[field.name.removesuffix("_s")] = quantity_text(value, "time") if is_time else value
    return entries


def kind_entries(kind: GpuKind) -> dict[str, Any]:
    """What a kind does not share with the catalogue's of its name, as a cluster file's `gpu_kinds` has it; no efficiency.

    Of a kind that the catalogue does not have, all of it.
    """
    known = catalogue().get(kind.name)
    same = (
        set()
        if known is None
        else {each.name for each in fields(GpuKind) if getattr(known, each.name) == getattr(kind, each.name)}
    )
    entries: dict[str, tuple[str, Any]] = {
        "memory": ("memory_bytes", quantity_text(kind.memory_bytes, "size")),
        "peak": ("peak_flop_per_s", {name: quantity_text(rate, "rate of work") for name, rate in kind.peak_flop_per_s.items()}),
        "memory_bandwidth": ("memory_bandwidth_bytes_per_s", quantity_text(kind.memory_bandwidth_bytes_per_s, "bandwidth")),
        "nvlink": ("nvlink_bytes_per_s", _text_or_none(kind.nvlink_bytes_per_s, "bandwidth")),
        "idle_power": ("idle_watts", quantity_text(kind.idle_watts, "power")),
        "busy_power": ("busy_watts", quantity_text(kind.busy_watts, "power")),
        "price": ("dollars_per_hour", _text_or_none(kind.dollars_per_hour, "price")),
        "speed": ("speed", kind.speed),
        "aliases": ("aliases", list(kind.aliases)),
    }
    told = {key: value for key, (name, value) in entries.items() if name not in same}
    if known is None:
        told = {key: value for key, value in told.items() if value not in (None, []) and (key, value) != ("speed", 1.0)}
    # Figures that are mentioned change the source that is read, where none is given.
    return told | ({"source": kind.source} if kind.source and (told or "source" not in same) else {})


def stack_entries(stack: Stack) -> dict[str, Any]:
    """What a stack does not share with one that loses nothing, as a cluster file's `stack` has it."""
    usual, entries = Stack(stack.name), {}
    for field in fields(Stack):
        value = getattr(stack, field.name)
        if field.name == "name" or value == getattr(usual, field.name):
            continue
        key, dimension = STACK_UNITS.get(field.name, (field.name, None))
        entries[key] = value if dimension is None else quantity_text(value, dimension)
    return entries


def _text_or_none(amount: float | None, dimension: str) -> str | None:
    return None if amount is None else quantity_text(amount, dimension)
