"""GPU kinds: what one GPU of a kind can do, how much of it is reached, and the catalogue of known kinds.

The catalogue is the file gpu_kinds.yaml beside this one. It is read with the same reader, and has the same keys, as the
section `gpu_kinds` of a cluster file, so that an entry can be copied from one to the other. Its head says what each figure
means and where it comes from; each kind names its sources. The efficiencies that kinds share are in constants.yaml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sim.spec.reading import REQUIRED, InputError, Table, nearest, quantity, read_own_yaml

CONSTANTS = Path(__file__).with_name("constants.yaml")
"""The constants that `motley validate --fit` fits: the `efficiencies` read here, and the `stacks` of `sim.spec.stack`."""

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
"""The precisions of matrix work. fp32 is without TF32; below fp32, products are summed in fp32."""


# --- Records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Efficiency:
    """How much of a GPU's peaks a software stack reaches on it: the constants that calibration refits.

    All are about one GPU and hold for every precision but as said. Raises InputError where a fraction is outside (0, 1],
    matmul_traffic outside [0, 1], or a time, or a number of keys, rows or numbers, negative.
    """

    matmul_fraction: float
    """Fraction of the peak FLOP/s that a large matmul reaches, fp32 apart."""
    fp32_fraction: float
    """Fraction of the fp32 peak, which is without tensor cores, that a large matmul reaches."""
    matmul_half_s: float
    """Seconds of work at peak at which one matmul reaches half of its fraction: a matmul of w seconds at peak takes
    (w + matmul_half_s) / matmul_fraction seconds, and those of its bytes that do not hide."""
    matmul_traffic: float
    """Of the seconds that a matmul's operands and result take at the memory bandwidth, the part that FLOP do not hide."""
    attention_fraction: float
    """Fraction of the peak FLOP/s of flash attention's forward pass, over the FLOPs the kernel executes: under a causal mask
    about half of the full count that MFU uses, with heads of WIDE_HEAD numbers or more."""
    attention_keys: float
    """Keys that each query of flash attention costs besides those that the mask leaves: tiles that the mask cuts, and what a row
    costs once."""
    attention_rows: float
    """Query rows (tokens times heads of a rank) whose seconds flash attention takes besides, as it fills the GPU and drains."""
    attention_width: float
    """Numbers of a head whose products take as long as what flash attention does for each score besides, such as its exponential:
    where heads are narrow, that counts for more. 0: the rate is that of wide heads, however narrow they are."""
    memory_fraction: float
    """Fraction of the memory bandwidth that element-wise work (norms, activations, residuals, optimizer) reaches."""
    launch_s: float
    """Seconds by which each kernel lengthens the GPU's work: its start and its end, when the GPU is not full."""
    source: str = "nominal, not measured"
    """What the constants were fitted on or derived from."""

    def __post_init__(self) -> None:
        """Raises InputError as the class says."""
        for name in ("matmul_fraction", "fp32_fraction", "attention_fraction", "memory_fraction"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise InputError(f"{name} must be above 0 and at most 1, but got {value!r}")
        if not 0 <= self.matmul_traffic <= 1:
            raise InputError(f"matmul_traffic must be from 0 to 1, but got {self.matmul_traffic!r}")
        for name, unit in (
            ("matmul_half_s", "seconds"),
            ("launch_s", "seconds"),
            ("attention_keys", "keys"),
            ("attention_rows", "rows"),
            ("attention_width", "numbers"),
        ):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(f"{name} must be a finite number of {unit} of at least 0, but got {value!r}")


WIDE_HEAD = 128
"""Numbers of a head from which on flash attention gets no faster: kernels are written for 64 and 128."""

NOMINAL_EFFICIENCY = Efficiency(
    matmul_fraction=0.8,
    fp32_fraction=0.8,
    matmul_half_s=10e-6,
    matmul_traffic=0.65,
    attention_fraction=0.5,
    attention_keys=230.0,
    attention_rows=16e3,
    attention_width=22.0,
    memory_fraction=0.85,
    launch_s=2e-6,
)
"""What a new kind is given where its file says nothing: round middles of the measured kinds of the catalogue."""

NOMINAL_BUSY_WATTS, NOMINAL_IDLE_SHARE = 300.0, 0.1
"""The power of a new kind whose file says nothing of it: busy, and idle as a share of busy."""


LEAST_FRACTION = 1e-6
"""The smallest fraction of a peak that a file may give, so that times stay finite."""

SPEEDS = (1e-3, 1e3)
"""The least and the most that a file may give as the speed of a kind or a device."""

MOST_ROWS = 1e9
"""The most attention_rows, attention_keys and attention_width that a file may give, so that times stay finite."""


class _PeakRates(Mapping[str, float]):
    """Peak FLOP/s by precision, in the order of PRECISIONS; unlike a dict it never changes and can be hashed."""

    __slots__ = ("_rates",)

    def __init__(self, rates: Mapping[str, float]) -> None:
        for precision in rates:
            if precision not in PRECISIONS:
                hint = nearest(str(precision), PRECISIONS)
                raise InputError(f"peak must be given for {', '.join(PRECISIONS)}, but got {precision!r}{hint}")
        self._rates = tuple((precision, float(rates[precision])) for precision in PRECISIONS if precision in rates)

    def __getitem__(self, precision: str) -> float:
        for known, rate in self._rates:
            if known == precision:
                return rate
        raise KeyError(precision)

    def __iter__(self) -> Iterator[str]:
        return (precision for precision, _ in self._rates)

    def __len__(self) -> int:
        return len(self._rates)

    def __eq__(self, other: object) -> bool:
        # Kinds are compared often, and what Mapping does is slow.
        return self._rates == other._rates if isinstance(other, _PeakRates) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self._rates)

    def __repr__(self) -> str:
        return repr(dict(self._rates))

    def __reduce__(self) -> tuple[type[_PeakRates], tuple[dict[str, float]]]:
        return _PeakRates, (dict(self._rates),)


@dataclass(frozen=True)
class GpuKind:
    """One kind of GPU: memory, peaks, links, power, price, and how much of the peaks is reached.

    Any mapping may be given as peak_flop_per_s; it is kept as one that cannot change, so that kinds can be hashed and
    pickled. Raises InputError with the rule and the value where a figure cannot be.
    """

    name: str
    memory_bytes: int
    """Usable capacity, as the driver reports it."""
    peak_flop_per_s: Mapping[str, float]
    """By precision: dense, without sparsity, summed in fp32. A precision that is absent is not supported."""
    memory_bandwidth_bytes_per_s: float
    nvlink_bytes_per_s: float | None
    """Per GPU and direction, to all its peers together (AMD: Infinity Fabric). None: PCIe only, or a bridge that is optional."""
    idle_watts: float
    busy_watts: float
    """The board's power limit."""
    dollars_per_hour: float | None
    """Nominal rent of one GPU. None: unknown."""
    efficiency: Efficiency
    source: str = ""
    aliases: tuple[str, ...] = ()
    speed: float = 1.0
    """How many times as fast as its efficiency record says it computes: what calibration found. Peaks stay as they are."""

    def __post_init__(self) -> None:
        """Raises InputError as the class says."""
        object.__setattr__(self, "peak_flop_per_s", _PeakRates(self.peak_flop_per_s))
        object.__setattr__(self, "aliases", tuple(self.aliases))
        if not fold(self.name):
            raise InputError(f"a GPU kind must have a name, but got {self.name!r}")
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int) or self.memory_bytes <= 0:
            raise InputError(f"memory must be a whole number of bytes above 0, but got {self.memory_bytes!r} ({self.name})")
        if not self.peak_flop_per_s:
            raise InputError(f"peak must be given for at least one of {', '.join(PRECISIONS)} ({self.name})")
        above_zero = [(f"peak in {precision}", rate) for precision, rate in self.peak_flop_per_s.items()]
        above_zero += [("memory_bandwidth", self.memory_bandwidth_bytes_per_s), ("speed", self.speed)]
        if self.nvlink_bytes_per_s is not None:
            above_zero.append(("nvlink", self.nvlink_bytes_per_s))
        for what, value in above_zero:
            if not 0 < value < math.inf:
                raise InputError(f"{what} must be finite and above 0, but got {value!r} ({self.name})")
        if not 0 <= self.idle_watts < self.busy_watts < math.inf:
            got = f"idle {self.idle_watts!r} W and busy {self.busy_watts!r} W"
            raise InputError(f"power must keep 0 <= idle < busy, but got {got} ({self.name})")
        if self.dollars_per_hour is not None and not 0 <= self.dollars_per_hour < math.inf:
            raise InputError(f"price must be finite and at least 0 $/h, but got {self.dollars_per_hour!r} ({self.name})")

    def peak(self, precision: str) -> float | None:
        """Peak FLOP/s at a precision, or None where the kind does not support it. Raises InputError for an unknown precision."""
        if precision not in PRECISIONS:
            raise InputError(
                f"unknown precision {precision!r}{nearest(precision, PRECISIONS)}; accepted: {', '.join(PRECISIONS)}"
            )
        return self.peak_flop_per_s.get(precision)


CPU = "CPU"
"""The kind in the catalogue; kinds of a cluster file whose names begin with it are CPUs, too."""


def is_cpu(kind: GpuKind) -> bool:
    """Whether the kind is that of CPUs."""
    return fold(kind.name).startswith(fold(CPU))


@lru_cache(maxsize=65536)
def at_speed(kind: GpuKind, factor: float) -> GpuKind:
    """The kind that computes so many times as fast; of equal arguments always the same object."""
    return kind if factor == 1 else replace(kind, speed=kind.speed * factor)


# --- Names -----------------------------------------------------------------------------------------------------------

_BRANDS = ("nvidia", "amd", "geforce", "tesla", "quadro", "instinct")


def fold(name: str) -> str:
    """The form in which names of kinds are compared.

    Case, spaces, dashes, underscores and leading brand words do not count: 'NVIDIA GeForce RTX 4090' and 'rtx-4090' are one.
    """
    words = [word for word in re.split(r"[\s_-]+", name.casefold()) if word]
    while len(words) > 1 and words[0] in _BRANDS:
        words.pop(0)
    return "".join(words)


def gpu_kind(name: str, further: Iterable[str] = ()) -> GpuKind:
    """The catalogue's kind of a name or alias, compared as `fold` says. Raises InputError with the nearest known name.

    `further` are the names of kinds that are known beside the catalogue's; they are told with the others.
    """
    kinds = catalogue()
    found = _names().get(fold(name))
    if found is None:
        known = list(dict.fromkeys([*further, *kinds]))
        hint = nearest(name, [*known, *(alias for kind in kinds.values() for alias in kind.aliases)])
        raise InputError(f"unknown GPU kind {name!r}{hint or ';'} known: {', '.join(known)}")
    return kinds[found]


# --- The catalogue ---------------------------------------------------------------------------------------------------


def catalogue() -> Mapping[str, GpuKind]:
    """All known kinds by name, in the order of the file, which is read at the first call."""
    return _catalogue()[0]


def efficiencies() -> Mapping[str, Efficiency]:
    """The records of constants.yaml that kinds share, by name, in the order of the file."""
    return _catalogue()[1]


@cache
def _catalogue() -> tuple[Mapping[str, GpuKind], Mapping[str, Efficiency]]:
    """The kinds, and the efficiencies that kinds share, by name."""
    path = Path(__file__).with_name("gpu_kinds.yaml")
    root = Table(read_own_yaml(path), path.name)
    shared, entries = Table(read_own_yaml(CONSTANTS), CONSTANTS.name).table("efficiencies"), root.table("kinds")
    family_names, kind_names = shared.keys(), entries.keys()
    families = {family: _read_efficiency(shared.table(family), None) for family in family_names}
    kinds: dict[str, GpuKind] = {}

    def earlier(name: str) -> GpuKind:
        if name not in kinds:
            raise InputError(f"expected a kind that stands above, but got {name!r}{nearest(name, kinds)}")
        return kinds[name]

    for name in kind_names:
        kinds[name] = _read(name, entries.table(name), None, families, earlier)
    root.close()
    return MappingProxyType(kinds), MappingProxyType(families)


@cache
def _names() -> Mapping[str, str]:
    """The kind's name for every folded name and alias. Raises InputError where two kinds claim one."""
    names: dict[str, str] = {}
    for kind in catalogue().values():
        for spelling in (kind.name, *kind.aliases):
            if names.setdefault(fold(spelling), kind.name) != kind.name:
                raise InputError(f"gpu_kinds.yaml: {spelling!r} names both {names[fold(spelling)]} and {kind.name}")
    return MappingProxyType(names)


# --- Reading ---------------------------------------------------------------------------------------------------------


def read_gpu_kind(name: str, table: Table, base: GpuKind | None) -> GpuKind:
    """The kind that one entry of a cluster file's `gpu_kinds` describes; the table is closed.

    With a base the entry overrides what it mentions (of peak and efficiency: precision by precision, constant by constant)
    and the kind keeps the base's name. Without a base, `like: NAME` takes the catalogue's kind NAME as a pattern for one of
    another name; otherwise the kind is new, and memory, peak and memory_bandwidth are required. `nvlink: null` and
    `price: null` say that there is none. `efficiency` is a mapping of constants or the name of a family of the catalogue.
    Raises InputError.
    """
    return _read(name, table, base, _catalogue()[1], gpu_kind)


def _read(
    name: str,
    table: Table,
    base: GpuKind | None,
    families: Mapping[str, Efficiency],
    find: Callable[[str], GpuKind],
) -> GpuKind:
    """The kind of one entry; `find` gives the kind that `like` names."""
    like = table.get("like", lambda value: find(_text(value)), "the name of a known GPU kind", None)
    pattern: GpuKind | None = base if like is None else like
    memory = table.quantity("memory", "size", REQUIRED if pattern is None else pattern.memory_bytes)
    peak = dict(pattern.peak_flop_per_s) if pattern else {}
    rates = table.table("peak", REQUIRED if pattern is None else None)
    if rates is not None:
        for precision in PRECISIONS:
            if precision in rates:
                peak[precision] = rates.quantity(precision, "rate of work")
            else:
                rates.quantity(precision, "rate of work", None)  # so that `close` can name it among the accepted keys
        rates.close()
    bandwidth = table.quantity(
        "memory_bandwidth", "bandwidth", REQUIRED if pattern is None else pattern.memory_bandwidth_bytes_per_s
    )
    nvlink = _quantity_or_none(table, "nvlink", "bandwidth", pattern.nvlink_bytes_per_s if pattern else None)
    busy = table.quantity("busy_power", "power", pattern.busy_watts if pattern else NOMINAL_BUSY_WATTS)
    idle = table.quantity("idle_power", "power", pattern.idle_watts if pattern else busy * NOMINAL_IDLE_SHARE, zero=True)
    price = _quantity_or_none(table, "price", "price", pattern.dollars_per_hour if pattern else None, zero=True)

    nominal = replace(NOMINAL_EFFICIENCY, attention_width=0.0) if fold(name).startswith(fold(CPU)) else NOMINAL_EFFICIENCY
    efficiency = pattern.efficiency if pattern else nominal
    if isinstance(table.get("efficiency", lambda value: value, "a mapping or a name", None), dict):
        efficiency = _read_efficiency(table.table("efficiency"), efficiency)
    elif "efficiency" in table:
        accepted = "a mapping of constants or the name of a family"
        efficiency = table.get("efficiency", lambda value: _family(_text(value), families), accepted)
    speed = table.number("speed", pattern.speed if pattern else 1.0, *SPEEDS)
    figures = ("memory", "peak", "memory_bandwidth", "nvlink", "idle_power", "busy_power", "price")
    mentioned = [key for key in figures if key in table]
    own = f"{', '.join(mentioned)} as in {table.where}" if mentioned else ""
    source = table.text("source", "; ".join(part for part in (pattern.source if pattern else "", own) if part))
    aliases = table.get("aliases", _texts, "a list of names", base.aliases if base else ())
    table.close()
    try:
        return GpuKind(
            name=base.name if base is not None else name,
            memory_bytes=round(memory),
            peak_flop_per_s=peak,
            memory_bandwidth_bytes_per_s=bandwidth,
            nvlink_bytes_per_s=nvlink,
            idle_watts=idle,
            busy_watts=busy,
            dollars_per_hour=price,
            efficiency=efficiency,
            source=source,
            aliases=aliases,
            speed=speed,
        )
    except InputError as error:
        raise table.error("", str(error)) from None


def _family(name: str, families: Mapping[str, Efficiency]) -> Efficiency:
    """The shared efficiency of a name. Raises InputError with the nearest known name."""
    if name not in families:
        raise InputError(f"expected one of {', '.join(families)}, but got {name!r}{nearest(name, families)}")
    return families[name]


def _read_efficiency(table: Table, base: Efficiency | None) -> Efficiency:
    """The efficiency of a mapping of constants: over `base` only those mentioned, without a base all of them."""

    def default(field: str) -> Any:
        return REQUIRED if base is None else getattr(base, field)

    values: dict[str, float] = {
        "matmul_fraction": table.number("matmul_fraction", default("matmul_fraction"), LEAST_FRACTION, 1.0),
        "fp32_fraction": table.number("fp32_fraction", default("fp32_fraction"), LEAST_FRACTION, 1.0),
        "matmul_half_s": table.quantity("matmul_half", "time", default("matmul_half_s"), zero=True),
        "matmul_traffic": table.number("matmul_traffic", default("matmul_traffic"), 0.0, 1.0),
        "attention_fraction": table.number("attention_fraction", default("attention_fraction"), LEAST_FRACTION, 1.0),
        "attention_keys": table.number("attention_keys", default("attention_keys"), 0.0, MOST_ROWS),
        "attention_rows": table.number("attention_rows", default("attention_rows"), 0.0, MOST_ROWS),
        "attention_width": table.number("attention_width", default("attention_width"), 0.0, MOST_ROWS),
        "memory_fraction": table.number("memory_fraction", default("memory_fraction"), LEAST_FRACTION, 1.0),
        "launch_s": table.quantity("launch", "time", default("launch_s"), zero=True),
    }
    changed = [] if base is None else [field for field in values if values[field] != getattr(base, field)]
    own = f"{base.source}; {', '.join(changed)} as in {table.where}" if base is not None and changed else None
    source = table.text("source", REQUIRED if base is None else own or base.source)
    table.close()
    try:
        return Efficiency(**values, source=source)
    except InputError as error:
        raise table.error("", str(error)) from None


def _quantity_or_none(table: Table, key: str, dimension: str, default: float | None, zero: bool = False) -> float | None:
    """A quantity in SI units, or None where the file says null."""

    def convert(value: object) -> float | None:
        if value is None:
            return None
        amount = quantity(value, dimension)
        if amount < 0 or (amount == 0 and not zero):
            raise InputError(f"got {value!r}, but a {dimension} above zero, or null, is accepted")
        return amount

    return table.get(key, convert, f"a {dimension} with its unit, or null", default)


def _text(value: object) -> str:
    """The value, where it is a text that is not empty; raises ValueError elsewhere."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _texts(value: object) -> tuple[str, ...]:
    """The texts of a list; raises ValueError where it is none."""
    if not isinstance(value, list):
        raise ValueError
    return tuple(_text(item) for item in value)
