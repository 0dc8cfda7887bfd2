"""What is assumed of published runs where they do not say: `data/assumptions.yaml`, per source and with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.published_rows import COLUMNS, Run, gpu_parts
from sim.spec.cluster import INTRA_KINDS, NIC_KINDS
from sim.spec.counts import RECOMPUTE
from sim.spec.gpu import PRECISIONS, gpu_kind
from sim.spec.job import GRADIENT_PRECISIONS, OPTIMIZERS
from sim.spec.plan import SCHEDULES, ZERO_STAGES
from sim.spec.reading import InputError, Table, nearest, read_yaml
from sim.spec.stack import stack

DATA = Path(__file__).with_name("data")

CUTS = ("even", "ends", "late", "nanotron", "redistribute")
NODE_RATES = ("nominal", "measured")
MEMORY_UNITS = {"GB": 1e9, "GiB": 2.0**30}
MEMORY_COUNTS = ("total", "reserved", "allocated")
DISREGARDABLE = ("precision", "recompute", "schedule", "sequence_parallel", "vocab", "zero_stage_or_fsdp")
"""Columns for whose cells something always stands in."""
DISREGARDED = "is disregarded"
"""How what was taken for a run (`Modelled.assumed`) tells of a cell that it has, and that is not believed."""


@dataclass(frozen=True)
class Cards:
    """What is assumed of a node's network: the kind of NIC, the rate of each (bytes/s), and how many GPUs share one."""

    kind: str
    bandwidth_bytes_per_s: float
    gpus_per_nic: int


@dataclass(frozen=True)
class Assumption:
    """What is taken for one row where it does not say; the fields are described in `data/assumptions.yaml`."""

    reasons: tuple[str, ...]
    shape: str | None
    """Which shape is taken for a model of no family; None for one that has a family."""
    stack: str
    model: tuple[tuple[str, Any], ...]
    """Fields of the Transformer that have no column."""
    vocab: int | None
    vocab_multiple: int
    ffn_per_hidden: float | None
    head_dim: int | None
    kv_heads: int | None
    precision: str
    recompute: str
    selective_layers: float | None
    zero_stage: int
    sequence_parallel: bool
    expert_tensor_parallel: int | None
    overlap_gradients: bool
    gradient_precision: str
    optimizer: str
    offload_optimizer: bool
    schedule: str
    cuts: str
    micro_batch: tuple[int, ...]
    vpp: tuple[int, ...]
    gpus_per_node: int
    intra: tuple[str, float | None]
    intra_of: tuple[tuple[str, tuple[str, float | None]], ...]
    """By the name of the GPU kind: the kind of link, and its bytes/s where they are not the usual ones."""
    nic: Cards
    nic_of: tuple[tuple[str, Cards], ...]
    node_rate: str
    latency_s: float
    step_s: float | None
    memory_unit_bytes: float
    memory_counts: str
    """Which property of `sim.cost.memory.MemoryParts` a published peak is."""
    disregarded: tuple[str, ...]
    """Columns whose cells count as empty, for what was measured contradicts them."""
    not_modelled: str | None


_ABOUT = ("where", "when", "unless", "names", "model", "reason")
"""Keys of an entry that say for what it holds, and why, or that are put together by themselves."""


@dataclass(frozen=True)
class Assumptions:
    """All that is assumed, by source and by family of models; `of` picks what holds for a row."""

    default: Mapping[str, Any]
    families: tuple[Mapping[str, Any], ...]
    shapes: Mapping[str, Mapping[str, Any]]
    """What is assumed of models of no family: `gated` or `plain`."""
    sources: Mapping[str, Mapping[str, Any]]
    where: str = "assumptions.yaml"
    """The file, for errors."""
    _known: dict[tuple[Any, ...], Assumption] = field(default_factory=dict, init=False, compare=False, repr=False)

    def of(self, run: Run) -> Assumption:
        """What is assumed for a run: its model's family or shape, the default, its source's entry, exceptions that hold for it.

        A source without an entry has the default's exceptions: what its rows name of their framework is all that is known of it.
        Raises InputError.
        """
        source = self.sources.get(run.source_key, self.default)
        family = next((f for f, entry in enumerate(self.families) if _is_of(entry["names"], run.model_name or "")), None)
        shape = "plain" if run.ffn_hidden is None or run.ffn_hidden == 4 * (run.hidden or 0) else "gated"
        held = [i for i, entry in enumerate(source.get("where", ())) if _holds(entry, run)]
        key = (run.source_key, shape if family is None else family, *held)
        if key not in self._known:
            about = [source, *(source["where"][i] for i in held)]
            of_model = self.shapes[shape] if family is None else self.families[family]
            merged: dict[str, Any] = {}
            model: dict[str, Any] = {}
            for layer in (of_model, self.default, *about):
                merged |= {name: value for name, value in layer.items() if name not in _ABOUT}
                model |= layer.get("model", {})
            reasons = tuple(str(layer["reason"]) for layer in (*about, of_model))
            table = Table(merged, self.where, run.source_key)
            self._known[key] = _assumption(table, model, reasons, shape if family is None else None)
        return self._known[key]


def _is_of(names: Sequence[str], model: str) -> bool:
    """Whether a model's name begins with one of a family's; a number ends where its digits do."""
    model = _spelled(model)
    for name in map(_spelled, names):
        if model.startswith(name) and not (name[-1:].isdigit() and model[len(name) :][:1].isalnum()):
            return True
    return False


@cache
def _spelled(name: str) -> str:
    """A model's name as it is compared, without the organisation that a hub's names begin with."""
    return re.sub(r"[\s_]+", "-", re.sub(r"^[\w.-]+/(?=[\w.-]+$)", "", name.strip()).casefold())


def _holds(entry: Mapping[str, Any], run: Run) -> bool:
    """Whether an exception is for a run: each column of `when` contains one of its texts, and none of `unless` does.

    A text must begin where a word does ("ctrl" is no TRL), but in the names of GPU kinds, which are those of the catalogue.
    """

    def contains(column: str, texts: Sequence[str]) -> bool:
        cell = str(getattr(run, column) or "")
        if column == "gpu_type":
            return any(_is_in(text, name, "") for name in _kinds(cell) for text in texts)
        return any(_is_in(text, cell, r"(?<![a-z])" if text[:1].isalpha() else "") for text in texts)

    freed = any(contains(column, texts) for column, texts in entry.get("unless", {}).items())
    return not freed and all(contains(column, texts) for column, texts in entry["when"].items())


def _is_in(text: str, cell: str, before: str) -> bool:
    """Whether a text is in a cell behind what matches `before`, or, after a "=", is all of it."""
    text, cell = text.casefold(), cell.casefold()
    return cell == text[1:] if text.startswith("=") else re.search(before + re.escape(text), cell) is not None


@cache
def _kinds(cell: str) -> tuple[str, ...]:
    """The catalogue's names of the kinds that a cell names, or the names that it has for them."""
    names = []
    for name, _ in gpu_parts(cell):
        try:
            names.append(gpu_kind(name).name)
        except InputError:
            names.append(name)
    return tuple(names)


def read_assumptions(path: str | Path = DATA / "assumptions.yaml") -> Assumptions:
    """The assumptions of a YAML file, by default those for the published runs. Raises InputError."""
    return _read_assumptions(str(path))


@cache
def _read_assumptions(path: str) -> Assumptions:
    name = Path(path).name
    root = Table(read_yaml(path), name)
    families = []
    for entry in root.tables("families"):
        entry.items("names", minimum=1)
        families.append(_with_reason(entry))
    shapes = {name: _with_reason(root.table("shapes").table(name)) for name in ("gated", "plain")}
    entries = root.table("sources")
    sources = {source: _with_exceptions(entries.table(source)) for source in entries.keys()}  # noqa: SIM118 - marks the keys, too
    found = Assumptions(_with_exceptions(root.table("default")), tuple(families), shapes, sources, name)
    root.close()
    # So that a mistake is told at once, and not at the first row that meets it.
    for family in families:
        found.of(Run("default", "default", None, None, model_name=str(family["names"][0])))
    for source, values in (("default", found.default), *sources.items()):
        for exception in (None, *values.get("where", ())):
            text = {column: texts[0] for column, texts in exception["when"].items()} if exception else {}
            found.of(replace(Run(source, source, None, None), **text))
    return found


def _with_exceptions(table: Table) -> dict[str, Any]:
    """The entry of a source, or the default, with its reason and its exceptions checked."""
    for exception in table.tables("where", []):
        exception.text("reason")
        for columns in (exception.table("when"), exception.table("unless", None)):
            for column in columns.keys() if columns is not None else ():
                if column not in COLUMNS:
                    raise columns.error(column, f"unknown column{nearest(column, COLUMNS)}; accepted: {', '.join(COLUMNS)}")
                columns.items(column, minimum=1)
    return _with_reason(table)


def _with_reason(table: Table) -> dict[str, Any]:
    """An entry as it is, which must say its reason."""
    table.text("reason")
    return {key: table.get(key, lambda value: value, "a value") for key in table.keys()}  # noqa: SIM118


def _assumption(table: Table, model: Mapping[str, Any], reasons: tuple[str, ...], shape: str | None) -> Assumption:
    """The checked assumption of merged entries; the table is closed."""

    def none_or(read: Any, key: str, **limits: Any) -> Any:
        return read(key, **limits) if table.get(key, lambda value: value, "a value", None) is not None else None

    def counts(key: str) -> tuple[int, ...]:
        values = table.items(key, minimum=1)
        if not all(type(value) is int and value >= 1 for value in values):
            raise table.error(key, f"expected a list of whole numbers of at least 1, but got {values!r}")
        return tuple(values)

    found = Assumption(
        reasons=reasons,
        shape=shape,
        stack=stack(table.text("stack")).name,
        model=tuple(model.items()),
        vocab=none_or(table.integer, "vocab", minimum=1),
        vocab_multiple=table.integer("vocab_multiple", minimum=1),
        ffn_per_hidden=none_or(table.number, "ffn_per_hidden"),
        head_dim=none_or(table.integer, "head_dim", minimum=1),
        kv_heads=table.optional_integer("kv_heads", minimum=1),
        precision=table.choice("precision", PRECISIONS),
        recompute=table.choice("recompute", RECOMPUTE),
        selective_layers=none_or(table.number, "selective_layers", maximum=1.0),
        zero_stage=table.choice("zero_stage", ZERO_STAGES),
        sequence_parallel=table.flag("sequence_parallel"),
        expert_tensor_parallel=table.optional_integer("expert_tensor_parallel"),
        overlap_gradients=table.flag("overlap_gradients"),
        gradient_precision=table.choice("gradient_precision", GRADIENT_PRECISIONS),
        optimizer=table.choice("optimizer", OPTIMIZERS),
        offload_optimizer=table.flag("offload_optimizer"),
        schedule=table.choice("schedule", SCHEDULES),
        cuts=table.choice("cuts", CUTS),
        micro_batch=counts("micro_batch"),
        vpp=counts("vpp"),
        gpus_per_node=table.integer("gpus_per_node", minimum=1),
        intra=_read_intra(table.table("intra")),
        intra_of=_by_kind(table, "intra_of", _read_intra),
        nic=_read_nic(table.table("nic")),
        nic_of=_by_kind(table, "nic_of", _read_nic),
        node_rate=table.choice("node_rate", NODE_RATES),
        latency_s=table.quantity("latency", "time", zero=True),
        step_s=table.quantity("step", "time", None, zero=True),
        memory_unit_bytes=MEMORY_UNITS[table.choice("memory_unit", MEMORY_UNITS)],
        memory_counts=table.choice("memory_counts", MEMORY_COUNTS),
        disregarded=_columns(table, "disregarded"),
        not_modelled=none_or(table.text, "not_modelled"),
    )
    table.close()
    return found


def _columns(table: Table, key: str) -> tuple[str, ...]:
    """A list of columns of which something may stand in for every cell."""
    columns = table.items(key)
    for column in columns:
        if column not in DISREGARDABLE:
            raise table.error(key, f"expected a list of columns, each one of {', '.join(DISREGARDABLE)}, but got {column!r}")
    return tuple(columns)


def _by_kind(table: Table, key: str, read: Any) -> tuple[tuple[str, Any], ...]:
    """What is said by GPU kind, under the kinds' own names."""
    entries = table.table(key, None)
    return () if entries is None else tuple((gpu_kind(name).name, read(entries.table(name))) for name in entries.keys())  # noqa: SIM118


def _read_intra(table: Table) -> tuple[str, float | None]:
    """The kind of link inside a node, and its rate where it is not the usual one."""
    found = (table.choice("kind", INTRA_KINDS), table.quantity("bandwidth", "bandwidth", None))
    table.close()
    return found


def _read_nic(table: Table) -> Cards:
    """What is assumed of a node's network."""
    kind, rate = table.choice("kind", NIC_KINDS), table.quantity("bandwidth", "bandwidth")
    found = Cards(kind, rate, table.integer("gpus_per_nic", minimum=1))
    table.close()
    return found
