"""Published runs as plans on clusters: reading the CSV, and what is assumed where a source does not say.

A row becomes a `Modelled` (cluster, plan, and the plans it may also have been), or a `NotModelled` with the reason. What a
source leaves open stands in `data/assumptions.yaml`, per source and with its reason; nothing here knows a run.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from sim.spec.cluster import INTRA_KINDS, MOST_GPUS, NIC_KINDS, PCIE_BYTES_PER_S, Cluster, Fabric, Intra, Nic, Node, links
from sim.spec.counts import RECOMPUTE, head_forward_flop, layer_forward_flop
from sim.spec.gpu import PRECISIONS, GpuKind, gpu_kind
from sim.spec.job import GRADIENT_PRECISIONS, OPTIMIZERS
from sim.spec.plan import SCHEDULES, ZERO_STAGES, LayerRange, Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError, Table, nearest, parse_json, read_text, read_yaml
from sim.spec.stack import stack
from sim.spec.transformer import Moe, Transformer

DATA = Path(__file__).with_name("data")

CUTS = ("even", "ends", "late", "nanotron", "redistribute")
NODE_RATES = ("nominal", "measured")
MEMORY_UNITS = {"GB": 1e9, "GiB": 2.0**30}
MEMORY_COUNTS = ("total", "reserved", "allocated")

NVLINK_DOMAIN = 72
"""GPUs that one NVLink switch joins in GB200 and GB300 NVL72 racks."""


# --- The rows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One row of a CSV of runs, its columns under their names and in their units; None where a cell is empty or missing.

    Without `failure` the run ended, in `iter_time_s` per iteration; with it, it is the text of what went wrong.
    """

    id: str
    source_key: str
    gpu_type: str | None
    num_gpus: int | None
    source: str | None = None
    table_or_fig: str | None = None
    cluster: str | None = None
    gpus_per_node: int | None = None
    intra_node_link: str | None = None
    inter_node_GBps_per_node: float | None = None
    """One direction."""
    model_name: str | None = None
    num_layers: int | None = None
    hidden: int | None = None
    ffn_hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seq_len: int | None = None
    vocab: int | None = None
    params_b: float | None = None
    """Parameters in 1e9."""
    global_batch: int | None = None
    """Sequences."""
    micro_batch: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    vpp: int | None = None
    schedule: str | None = None
    zero_stage_or_fsdp: str | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    precision: str | None = None
    framework: str | None = None
    iter_time_s: float | None = None
    iter_time_origin: str | None = None
    tokens_per_s: float | None = None
    """Of all GPUs together."""
    tflops_per_gpu: float | None = None
    tflops_counting: str | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    peak_mem_gb: float | None = None
    heterogeneous: bool | None = None
    trust: str | None = None
    plan_json: str | None = None
    notes: str | None = None
    failure: str | None = None
    bad_cells: tuple[str, ...] = ()
    """What is wrong with cells that are not of their column, which count as empty."""


_TYPES: Mapping[str, str] = {column.name: str(column.type) for column in fields(Run) if column.name != "bad_cells"}

_EMPTY = ("", "n/a", "na", "nan", "null", "-", "--", "?")
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": False}
"""Words that stand for an empty cell, and for a flag, without regard to case."""

_REQUIRED = ("id", "source_key", "gpu_type", "num_gpus")
_REQUIRED_OF_FAILURES = ("source_key", "gpu_type", "num_gpus", "failure")
_RENAMED = {"zero": "zero_stage_or_fsdp"}
"""Columns that the CSV of failed runs calls otherwise."""


def read_runs(path: str | Path) -> list[Run]:
    """The rows of a CSV of runs, such as `data/published_runs.csv`.

    Its columns are the fields of Run, but for the last two; id, source_key, gpu_type and num_gpus must be there, any other may be
    missing. A row with a cell that is not of its column says so (`bad_cells`). Raises InputError, in one line, for a file without
    rows, unknown or missing columns, a row that has more or fewer cells, and an id that stands twice.
    """
    return _read(path, _REQUIRED, {})


def read_failures(path: str | Path) -> list[Run]:
    """The rows of a CSV of failed runs, such as `data/failed_runs.csv`: source_key, gpu_type, num_gpus and failure must be there.

    A row without an id is called SOURCE-failed-NUMBER. Raises InputError as `read_runs` does.
    """
    return _read(path, _REQUIRED_OF_FAILURES, _RENAMED)


def _read(path: str | Path, required: Sequence[str], renamed: Mapping[str, str]) -> list[Run]:
    """The rows of a CSV file."""
    text = read_text(path)
    reader = csv.reader(io.StringIO(text))
    try:
        header = [cell.strip() for cell in next(reader, [])]
        while len(header) > 1 and not header[-1]:  # a comma at the end of each line, as spreadsheets leave them
            header.pop()
        if not any(header):
            what = "the first line is empty" if text.strip() else "is empty"
            raise InputError(f"{path}: {what}; expected a CSV whose first line names the columns ({', '.join(required)}, ...)")
        if len(header) == 1 and (other := re.search(r"[;\t|]", header[0])) is not None:
            raise InputError(f"{path}: columns are separated by {other.group()!r}; expected commas")
        columns = [renamed.get(name, name) for name in header]
        for number, (name, column) in enumerate(zip(header, columns, strict=True), 1):
            if not name:
                raise InputError(f"{path}: column {number} has no name; accepted: {', '.join(_TYPES)}")
            if column not in _TYPES:
                raise InputError(f"{path}: unknown column {name!r}{nearest(name, _TYPES)}; accepted: {', '.join(_TYPES)}")
            if columns.count(column) > 1:
                raise InputError(f"{path}: the column {name!r} stands {columns.count(column)} times")
        for name in required:
            if name not in columns:
                raise InputError(
                    f"{path}: the column {name!r} is missing; required are {', '.join(required)}, but got {', '.join(header)}"
                )
        runs: list[Run] = []
        lines: dict[str, int] = {}
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            line = reader.line_num
            while len(cells) > len(columns) and not cells[-1].strip():
                cells.pop()
            if len(cells) != len(columns):
                raise InputError(f"{path}, line {line}: has {len(cells)} cells, but there are {len(columns)} columns")
            values, bad = _values(columns, cells)
            if values.get("source_key") is None:
                raise InputError(f"{path}, line {line}: source_key is a text, but the cell is empty")
            if values.get("id") is None:
                if "id" in required:
                    raise InputError(f"{path}, line {line}: id is a text, but the cell is empty")
                values["id"] = f"{values['source_key']}-failed-{len(runs) + 1:04d}"
            run = Run(**values, bad_cells=bad)
            if run.id in lines:
                raise InputError(f"{path}, line {line}: the id {run.id!r} stands in line {lines[run.id]} already")
            lines[run.id] = line
            runs.append(run)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: is not valid CSV: {error}") from None
    if not runs:
        raise InputError(f"{path}: holds no runs; expected one row for each, below the line that names the columns")
    return runs


def _values(columns: Sequence[str], cells: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The typed values of a row's cells, and what is wrong with those that count as empty for it."""
    values: dict[str, Any] = {}
    bad = []
    for column, cell in zip(columns, cells, strict=True):
        try:
            values[column] = _cell(cell.strip(), column)
        except InputError as error:
            values[column] = None
            bad.append(str(error))
    return values, tuple(bad)


def _cell(text: str, column: str) -> Any:
    """The typed value of one cell; None where it is empty. Raises InputError where it is not of its column."""
    if text.casefold() in _EMPTY:
        return None
    kind = _TYPES[column]
    if kind.startswith("str"):
        return text
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if kind.startswith("bool"):
        if text.casefold() in _FLAGS:
            return _FLAGS[text.casefold()]
        if value not in (0, 1):
            raise InputError(f"{column} is 0 or 1, but got {text!r}")
        return bool(value)
    if text.casefold() == "none":
        return None
    if kind.startswith("int"):
        if not (value.is_integer() and 1 <= value < 2**53):
            raise InputError(f"{column} is a whole number of at least 1, or empty, but got {text!r}")
        return int(value)
    if not 0 <= value < math.inf:
        raise InputError(f"{column} is a number of at least 0, or empty, but got {text!r}")
    return value


# --- Assumptions -----------------------------------------------------------------------------------------------------


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
    precision: str
    recompute: str
    selective_layers: float | None
    zero_stage: int
    sequence_parallel: bool
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
    _known: dict[tuple[Any, ...], Assumption] = field(default_factory=dict, compare=False, repr=False)

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
    """Whether an exception is for a run: each column of `when` contains one of its texts, and none of `unless` does."""

    def contains(column: str, texts: Sequence[str]) -> bool:
        found = str(getattr(run, column) or "").casefold()
        return any(text[1:].casefold() == found if text.startswith("=") else text.casefold() in found for text in texts)

    freed = any(contains(column, texts) for column, texts in entry.get("unless", {}).items())
    return not freed and all(contains(column, texts) for column, texts in entry["when"].items())


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
                if column not in _TYPES:
                    raise columns.error(column, f"unknown column{nearest(column, _TYPES)}; accepted: {', '.join(_TYPES)}")
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
        precision=table.choice("precision", PRECISIONS),
        recompute=table.choice("recompute", RECOMPUTE),
        selective_layers=none_or(table.number, "selective_layers", maximum=1.0),
        zero_stage=table.choice("zero_stage", ZERO_STAGES),
        sequence_parallel=table.flag("sequence_parallel"),
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
        not_modelled=none_or(table.text, "not_modelled"),
    )
    table.close()
    return found


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


# --- What a row says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Modelled:
    """A run as a plan on a cluster. `plan` is the first of the `candidates`, which are several where the row leaves it open."""

    run: Run
    plan: Plan
    cluster: Cluster
    assumed: tuple[str, ...]
    """What the row does not say and is assumed, as 'vocab 50257'."""
    candidates: tuple[Plan, ...]


@dataclass(frozen=True)
class NotModelled:
    """A run that no plan is made of; `reason` is a line that begins with 'not modelled: '."""

    run: Run
    reason: str


class _Refused(Exception):
    """Why a run is not modelled."""


def modelled(run: Run, assumptions: Assumptions) -> Modelled | NotModelled:
    """The plan and the cluster of a run, or why there are none. The same for runs that failed.

    Ranks lie tensor fastest, then context, then data, then pipeline (Megatron-LM's and DeepSpeed's order), node after node,
    unless the row's `plan_json` says otherwise.
    """
    try:
        if run.bad_cells:
            raise _Refused("; ".join(run.bad_cells))
        row = _Row(run, assumptions.of(run))
        plans = tuple(row.plans())
    except (_Refused, InputError) as error:
        return NotModelled(run, f"not modelled: {error}")
    return Modelled(run, plans[0], row.cluster, tuple(row.assumed), plans)


class _Row:
    """One run while it is being modelled: its cells, what stands in for those that are empty, and a list of these."""

    def __init__(self, run: Run, assumption: Assumption) -> None:
        self.run, self.assumption = run, assumption
        self.assumed: list[str] = []
        self.gpus = self._gpus()
        for name in ("num_layers", "hidden", "global_batch", "tp", "pp", "seq_len"):
            self._published(name)
        if assumption.not_modelled is not None:
            raise _Refused(assumption.not_modelled)
        self.tp, self.pp, self.cp = self._published("tp"), self._published("pp"), run.cp or 1
        copies, rest = divmod(self._published("num_gpus"), self.tp * self.pp * self.cp)
        if rest and run.dp is None:
            terms = [self.tp, self.pp] + ([self.cp] if self.cp > 1 else [])
            raise _Refused(f"degrees {' x '.join(map(str, terms))} do not divide num_gpus {run.num_gpus}")
        self.dp = int(self._taken("dp", None if rest else copies))
        degrees = self.tp * self.pp * self.dp * self.cp
        if degrees != self._published("num_gpus"):
            terms = [self.tp, self.pp, self.dp] + ([self.cp] if self.cp > 1 else [])
            raise _Refused(f"degrees {' x '.join(map(str, terms))} = {degrees}, but num_gpus is {run.num_gpus}")
        self.transformer = self._transformer()
        self.cluster = self._cluster()

    def _published(self, name: str) -> int:
        """A number that must be published."""
        value = getattr(self.run, name)
        if value is None:
            raise _Refused(name)
        return int(value)

    def _taken(self, name: str, value: Any) -> Any:
        """The row's own value, else the given one, which is noted; refuses the row where that is None too."""
        own = getattr(self.run, name)
        if own is not None:
            return own
        if value is None:
            raise _Refused(name)
        self._note(f"{name} {value}")
        return value

    def _text(self, name: str, value: str) -> str:
        """The row's own text in lower case, else the given one, which is noted."""
        # What pandas makes of a column of flags with gaps: '1.0'.
        return re.sub(r"^(\d+)\.0+$", r"\1", str(self._taken(name, value)).strip().casefold())

    def _unknown(self, name: str, accepted: Iterable[str]) -> _Refused:
        """The refusal of a text that is none of those that are accepted."""
        return _Refused(f"{name} {getattr(self.run, name)!r}; accepted: {', '.join(dict.fromkeys(accepted))}")

    def _note(self, assumed: str) -> None:
        if assumed not in self.assumed:
            self.assumed.append(assumed)

    # The model

    def _transformer(self) -> Transformer:
        run, assumption = self.run, self.assumption
        hidden = self._published("hidden")
        heads = self._taken("heads", hidden // assumption.head_dim if assumption.head_dim else None)
        ffn = self._taken("ffn_hidden", round(assumption.ffn_per_hidden * hidden) if assumption.ffn_per_hidden else None)
        vocab = self._taken("vocab", assumption.vocab)
        step = assumption.vocab_multiple * self.tp
        shape = dict(assumption.model)
        if assumption.shape is not None:
            self._note(f"model {assumption.shape}, of no family that is known")
        if shape.get("experts") is not None:
            shape["experts"] = Moe(**({"ffn": ffn} | shape["experts"]))
        elif re.search(_EXPERTS, run.model_name or "", re.IGNORECASE):
            raise _Refused(f"model_name {run.model_name!r}, experts whose sizes have no column")
        if shape.get("position") == "learned":
            shape["max_positions"] = self._published("seq_len")
        return Transformer(
            name=re.sub(r"[\s/]+", "-", run.model_name or run.id).strip("-"),
            layers=self._published("num_layers"),
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            vocab=vocab,
            kv_heads=run.kv_heads or heads,
            padded_vocab=-(-vocab // step) * step,
            **shape,
        )

    # The cluster

    def _gpus(self) -> tuple[tuple[GpuKind, int], ...]:
        """The kinds with how many there are of each, in the order of the text: '12xV100-16GB+4xT4'."""
        text, total = self.run.gpu_type, self.run.num_gpus
        if text is None or total is None:
            raise _Refused("gpu_type" if text is None else "num_gpus")
        if total > MOST_GPUS:
            raise _Refused(f"num_gpus {total}, but a cluster has at most {MOST_GPUS:,}")
        found = []
        for part in text.split("+"):
            match = re.fullmatch(r"\s*(\d+)\s*x\s*(.+?)\s*", part) if re.match(r"\s*\d+\s*x", part) else None
            name, count = (match[2], int(match[1])) if match else (part.strip(), total)
            try:
                found.append((gpu_kind(name), count))
            except InputError as error:
                raise _Refused(str(error).split(" known:")[0].rstrip(";")) from None
        if sum(count for _, count in found) != total:
            raise _Refused(f"gpu_type {text!r} names {sum(count for _, count in found)} GPUs, but num_gpus is {total}")
        return tuple(found)

    def _cluster(self) -> Cluster:
        run, assumption = self.run, self.assumption
        total = self._published("num_gpus")
        per_node = int(self._taken("gpus_per_node", assumption.gpus_per_node))
        rate = None if run.inter_node_GBps_per_node is None else run.inter_node_GBps_per_node * 1e9 / per_node
        link = (run.intra_node_link or "").casefold()
        if "nvl72" in link:  # the switch joins the nodes of a rack, which are used equally
            per_node = max(n for n in range(1, min(NVLINK_DOMAIN, total) + 1) if total % n == 0)
        denied = any(word in link for word in _NO_FABRICS)
        fabric = not denied and any(word in link for word in _FABRICS)
        unknown = not (denied or fabric or "pci" in link)
        groups = []
        for kind, count in self.gpus:
            intra = dict(assumption.intra_of).get(kind.name)
            nvlink = kind.nvlink_bytes_per_s if fabric or (unknown and intra is None) else None
            if intra is not None or nvlink is None:
                groups.append((kind, count, *(intra or assumption.intra)))
            else:
                groups.append((kind, count, "nvswitch", nvlink))
        many = any(-(-count // per_node) > 1 for _, count in self.gpus) or len(self.gpus) > 1
        if many and rate == 0:
            raise _Refused("inter_node_GBps_per_node 0, but the GPUs are on several nodes")
        nics: list[tuple[str, float, int] | None] = []
        for kind, _ in self.gpus:
            nic = dict(assumption.nic_of).get(kind.name)
            if not many:
                nics.append(None)
                continue
            own = rate if nic is None else None
            nic = nic or assumption.nic
            if own is None:
                if run.inter_node_GBps_per_node is None:
                    self._note(f"{nic.kind} at {nic.bandwidth_bytes_per_s * 8e-9:g} Gbit/s for each {nic.gpus_per_nic} GPUs")
                nics.append((nic.kind, nic.bandwidth_bytes_per_s, nic.gpus_per_nic))
            else:
                carried = Fabric().efficiency(nic.kind) if assumption.node_rate == "measured" else 1.0
                nics.append((nic.kind, own * nic.gpus_per_nic / carried, nic.gpus_per_nic))
        name = "+".join(f"{count}x{kind.name}" for kind, count in self.gpus)
        network = (assumption.latency_s, assumption.step_s) if many else (0.0, None)
        return _made_cluster(name, tuple(groups), per_node, tuple(nics), *network, assumption.stack)

    # The plans

    def plans(self) -> Iterator[Plan]:
        """The plan, or all that the row may mean, in the order of the assumption's lists; at least one. Raises _Refused."""
        run, batch = self.run, self._published("global_batch")
        schedule, chunk_counts = self._schedule()
        micro_batches = self.assumption.micro_batch if run.micro_batch is None else (run.micro_batch,)
        refusal: _Refused | None = None
        found: dict[tuple[int, int], Plan] = {}
        for micro_batch, chunks in itertools.product(micro_batches, chunk_counts):
            try:
                count, rest = divmod(batch, self.dp * micro_batch)
                if rest:
                    raise _Refused(f"global_batch {batch} does not divide by dp {self.dp} x micro_batch {micro_batch}")
                if len(chunk_counts) > 1 and chunks > 1 and count % self.pp:
                    raise _Refused(f"{count} micro-batches do not divide by pp {self.pp}, which interleaving needs")
                name = "1f1b" if schedule == "interleaved" and chunks == 1 else schedule
                found[micro_batch, chunks] = self._plan(name, micro_batch, count, chunks)
            except _Refused as refused:
                refusal = refusal or refused
        if refusal is not None and not found:
            raise refusal
        for name, options, axis in (("micro_batch", micro_batches, 0), ("vpp", chunk_counts, 1)):
            if len(options) > 1:
                self._note(f"{name} one of {', '.join(map(str, dict.fromkeys(key[axis] for key in found)))}")
        if run.micro_batch is None and len(micro_batches) == 1:
            self._note(f"micro_batch {micro_batches[0]}")
        yield from found.values()

    def _schedule(self) -> tuple[str, tuple[int, ...]]:
        """The schedule's name, and how many chunks of layers a stage may have."""
        run, options = self.run, self.assumption.vpp
        if self.pp == 1:
            return "1f1b", (1,)
        if run.schedule is None and run.vpp is not None:
            return "interleaved", (run.vpp,)
        text = self._text("schedule", self.assumption.schedule)
        text = _SCHEDULE_WORDS.get(text, text)
        if "non-interleaved" in text:
            return "1f1b", (1,)
        if "zb-v" in text:
            return "zb-v", (2,)
        if (name := _HANDCRAFTED.get(text, text)) in ("zb-1p", "zb-2p", "gpipe", "eager-1f1b"):
            return name, (1,)
        if run.vpp is not None and ("1f1b" in text or "interleaved" in text):
            return "interleaved", (run.vpp,)
        if "interleaved" in text or text == "1f1b-i":
            options = tuple(v for v in options if v > 1)
            if not options:
                raise _Refused("vpp")
            return "interleaved", options
        if "1f1b" not in text:
            raise self._unknown("schedule", (*SCHEDULES, *_HANDCRAFTED, *_SCHEDULE_WORDS))
        return "interleaved", (1,) if run.schedule is not None else options

    def _plan(self, schedule: str, micro_batch: int, micro_batches: int, chunks: int) -> Plan:
        run, assumption = self.run, self.assumption
        zero_stage, shard_group = self._zero()
        return Plan(
            cluster=self.cluster.name,
            model=self.transformer,
            sequence_length=self._published("seq_len"),
            global_batch=self._published("global_batch"),
            pipelines=self._pipelines(schedule, micro_batch, micro_batches, chunks),
            precision=self._precision(),
            schedule=schedule,
            zero_stage=zero_stage,
            sequence_parallel=self.tp > 1 and bool(self._taken("sequence_parallel", assumption.sequence_parallel)),
            context_parallel=self.cp,
            expert_parallel=run.ep or 1,
            shard_group=shard_group,
            overlap_gradients=assumption.overlap_gradients,
            gradient_precision=assumption.gradient_precision,
            offload_optimizer=assumption.offload_optimizer,
            optimizer=assumption.optimizer,
        )

    def _zero(self) -> tuple[int, int | None]:
        """The ZeRO stage, and how many devices share its shards (None: all replicas)."""
        text = self._text("zero_stage_or_fsdp", f"ZeRO-{self.assumption.zero_stage}")
        group = None
        if found := re.search(r"shard (\d+)", text):
            group = int(found[1]) if int(found[1]) < self.dp * self.cp else None
        elif "hsdp" in text:  # over the replicas of a node, where there are others
            per_node = int(self._taken("gpus_per_node", self.assumption.gpus_per_node)) // self.tp
            group = per_node if 1 <= per_node < self.dp * self.cp else None
        if "shard_grad_op" in text:
            return 2, group
        if found := re.search(r"(?:zero|stage)[- ]*(?:stage)?[- ]*([0-3])", text) or re.fullmatch(r"([0-3])", text):
            return int(found[1]), group
        if "fsdp" in text or "hsdp" in text or "full_shard" in text or "sharded weights" in text:
            return 3, group
        if "distributed optimizer" in text:
            return 1, group
        if text in _ZERO_WORDS:
            return _ZERO_WORDS[text], group
        raise self._unknown("zero_stage_or_fsdp", ("0 to 3", "ZeRO-N", "FSDP", "HSDP", *_ZERO_WORDS))

    def _precision(self) -> str:
        """Our name of the precision."""
        text = self._text("precision", self.assumption.precision)
        for part, name in _PRECISION_WORDS:
            if part in text:
                return name
        raise self._unknown("precision", PRECISIONS)

    def _recompute(self, layers: int) -> tuple[str, int | None]:
        """The mode of a stage of so many layers, and how many of them it is for, with 'full'."""
        run, share = self.run, self.assumption.selective_layers
        text = self._text("recompute", self.assumption.recompute)
        text = _RECOMPUTE_WORDS.get(text, text)
        mode = next((mode for mode in RECOMPUTE if text.startswith(mode)), None)
        if mode is None:
            raise self._unknown("recompute", (*RECOMPUTE, *_RECOMPUTE_WORDS))
        if mode == "selective" and share is not None:
            if run.mfu_pct and run.hfu_pct:
                share = min(1.0, max(0.0, 3 * (run.hfu_pct / run.mfu_pct - 1)))  # a layer's forward is a third of its FLOP
            return "full", round(share * layers)
        return mode, None

    def _pipelines(self, schedule: str, micro_batch: int, micro_batches: int, chunks: int) -> tuple[Pipeline, ...]:
        """One pipeline for each data-parallel rank."""
        uneven = _uneven(self.run)
        groups = self._sailor_ranks(uneven) if uneven.stages else self._ranks()
        if uneven.partition:
            layers = self._amp_ranges(uneven.partition)
        elif uneven.layers_per_stage:
            layers = self._sailor_ranges(uneven.layers_per_stage)
        else:
            layers = self._ranges(schedule, chunks)
        pipelines = []
        for d in range(self.dp):
            stages = []
            for p, ranges in enumerate(layers):
                mode, count = self._recompute(sum(stop - start for start, stop in ranges))
                stages.append(Stage((Replica(groups[p][d], micro_batch),), ranges, mode, count))
            pipelines.append(Pipeline(micro_batch, micro_batches, tuple(stages)))
        return tuple(pipelines)

    def _ranks(self) -> list[list[tuple[str, ...]]]:
        """The devices of each stage's data-parallel ranks: [stage][rank]."""
        names = [device.name for device in self.cluster.devices]
        size = self.tp * self.cp
        at = [tuple(names[i : i + size]) for i in range(0, len(names), size)]
        return [at[p * self.dp : (p + 1) * self.dp] for p in range(self.pp)]

    def _ranges(self, schedule: str, chunks: int) -> list[tuple[LayerRange, ...]]:
        """The layer ranges of each stage."""
        sizes = self._cut(self.pp * chunks)
        if sizes is None:
            what = f"num_layers {self.run.num_layers} over pp {self.pp}" + (f" x vpp {chunks}" if chunks > 1 else "")
            raise _Refused(f"{what}: {_NO_CUT.get(self.assumption.cuts, 'does not divide, and how it was cut is not published')}")
        bounds = [0, *itertools.accumulate(sizes)]
        ranges = list(itertools.pairwise(bounds))
        if schedule == "zb-v":
            return [(ranges[p], ranges[-1 - p]) for p in range(self.pp)]
        return [tuple(ranges[p :: self.pp]) for p in range(min(self.pp, len(ranges)))]

    def _cut(self, parts: int) -> list[int] | None:
        """How many layers each part has, in layer order; None where the assumed rule does not tell."""
        layers, cuts = self._published("num_layers"), self.assumption.cuts
        if cuts == "nanotron" and parts > 1:
            return self._nanotron_cut(parts)
        if cuts == "redistribute" and 1 < parts <= layers:
            return self._least_slowest(parts)
        if layers % parts == 0:
            return [layers // parts] * parts
        if cuts == "late":
            return _spread(layers, parts)[::-1]
        if (layers + 2) % parts and cuts != "ends":
            return None
        sizes = _spread(layers + 2, parts)
        sizes[0] -= 1
        sizes[-1] -= 1
        return sizes if min(sizes) >= 0 and all(sizes[1:-1]) else None

    def _nanotron_cut(self, stages: int) -> list[int] | None:
        """The stages' layers by nanotron's rule: blocks in order, each stage until its share of the cost is exceeded.

        Stages that the rule leaves nothing but the loss, or nothing at all, are left out, and their devices idle. None where a
        stage before the head's has no layers. Source: nanotron, models/base.py `build_model` and
        `get_block_compute_costs` of its Llama: 4 hidden^2 + 3 hidden x ffn for a layer, vocab x hidden for the head, and
        nothing for the embedding, the final norm, the cast and the loss.
        """
        t = self.transformer
        layer = 4 * t.hidden * t.hidden + 3 * t.hidden * t.ffn
        costs = [0] + [layer] * t.layers + [0, t.vocab * t.hidden, 0, 0]
        total, done, stage = sum(costs), 0, 0
        held: list[list[int]] = [[] for _ in range(stages)]
        for block, cost in enumerate(costs):
            done += cost
            held[stage].append(block)
            if done > total * ((stage + 1) / stages) and stage < stages - 1:
                stage += 1
        sizes = [sum(1 <= block <= t.layers for block in blocks) for blocks in held]
        head = t.layers + 2
        last = next(s for s, blocks in enumerate(held) if head in blocks)
        return sizes[: last + 1] if all(sizes[:last]) else None

    def _least_slowest(self, stages: int) -> list[int]:
        """The stages' layers so that the FLOP of the slowest stage, head included, are the fewest; later stages larger."""
        t, length = self.transformer, self._published("seq_len")
        head = head_forward_flop(t, length) / layer_forward_flop(t, length, length).total
        best = min(range(t.layers // stages, 0, -1), key=lambda last: max(last + head, -(-(t.layers - last) // (stages - 1))))
        return [*_spread(t.layers - best, stages - 1)[::-1], best]

    # Plans that are published as JSON

    def _amp_ranges(self, bounds: Sequence[int]) -> list[tuple[LayerRange, ...]]:
        """The layers of AMP's stages, whose pseudo-layers are embedding, no-op, the transformer's layers, and four more."""
        layers = self._published("num_layers")
        if len(bounds) != self.pp + 1 or bounds[0] != 0 or bounds[-1] != layers + 6:
            raise _Refused(f"plan_json's partition {list(bounds)} does not cut {layers} + 6 pseudo-layers over pp {self.pp}")
        cuts = [min(max(bound - 2, 0), layers) for bound in bounds]
        return [(found,) for found in itertools.pairwise(cuts)]

    def _sailor_ranges(self, counts: Sequence[int]) -> list[tuple[LayerRange, ...]]:
        """The layers of Sailor's stages, which count the embedding and the head."""
        layers = self._published("num_layers")
        if len(counts) != self.pp or sum(counts) != layers + 2:
            raise _Refused(f"plan_json's layers_per_stage {list(counts)} do not sum to {layers} + 2 over pp {self.pp}")
        cuts = [min(max(bound - 1, 0), layers) for bound in (0, *itertools.accumulate(counts))]
        return [(found,) for found in itertools.pairwise(cuts)]

    def _sailor_ranks(self, uneven: _Uneven) -> list[list[tuple[str, ...]]]:
        """The devices of Sailor's replicas, each taken from the next free ones of its kind."""
        free: dict[str, list[str]] = {}
        for device in self.cluster.devices:
            free.setdefault(device.gpu.name, []).append(device.name)
        found = []
        for stage in uneven.stages:
            groups = []
            for replica in stage:
                devices: list[str] = []
                for name, count in replica:
                    kind = gpu_kind(name).name
                    if len(free.get(kind, [])) < count:
                        raise _Refused(f"plan_json uses more of {kind} than gpu_type names")
                    devices += free[kind][:count]
                    free[kind] = free[kind][count:]
                groups.append(tuple(devices))
            found.append(groups)
        if len(found) != self.pp or any(len(groups) != self.dp for groups in found):
            shown = " + ".join(str(len(groups)) for groups in found)
            raise _Refused(f"plan_json has {shown} replicas in its stages, but pp is {self.pp} and dp {self.dp}")
        return found


_FABRICS = ("nvlink", "nvswitch", "nvl", "sxm", "hgx", "dgx", "infinity fabric", "xgmi")
_NO_FABRICS = ("no nvlink", "without nvlink", "non-nvlink")
"""Words of `intra_node_link` that tell of a kind's own fabric, and that there is none. Words that tell neither say nothing."""

_HANDCRAFTED = {"zb-h1": "zb-1p", "zb-h2": "zb-2p"}
"""The names of zero-bubble orders that are written by hand, and our schedules of these orders (Qi et al., 2024)."""


_SCHEDULE_WORDS = {
    "none": "1f1b",
    "default": "1f1b",
    "pipedream-flush": "1f1b",
    "afab": "gpipe",
    "zbv": "zb-v",
    "zb1p": "zb-1p",
    "zb2p": "zb-2p",
}
_RECOMPUTE_WORDS = {
    **dict.fromkeys(("no", "off", "false", "0"), "none"),
    **dict.fromkeys(("yes", "on", "true", "1"), "full"),
}
_ZERO_WORDS = {"none": 0, "no": 0, "ddp": 0, "no_shard": 0, "dist opt": 1, "distributed-optimizer": 1, "distributed_optimizer": 1}
"""What else a schedule, a recomputation and a ZeRO stage are called."""

_PRECISION_WORDS = (
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8-mx", "mxfp8"),
    ("fp8", "fp8"),
    ("float8", "fp8"),
    ("bf16", "bf16"),
    ("bfloat16", "bf16"),
    ("fp16", "fp16"),
    ("float16", "fp16"),
    ("half", "fp16"),
    ("tf32", "tf32"),
    ("fp32", "fp32"),
)
"""What a text contains, and our name of that precision; the first that fits."""


_EXPERTS = r"(?<![a-z])moe(?![a-z])|[-_ ]a\d+(\.\d+)?b(?![a-z0-9])|\d+x\d+(\.\d+)?b(?![a-z])|\d+ ?experts"
"""What the name of a model says that is a mixture of experts: MoE, A3B, 8x7B, 64 experts."""


_NO_CUT = {"nanotron": "nanotron leaves no layers to a stage before the head's"}
"""What it says where a rule gives no cut that a plan can tell, by rule."""


@dataclass(frozen=True)
class _Uneven:
    """The uneven plan that a row tells: AMP's stage boundaries, or Sailor's layers and GPUs of each stage's replicas."""

    partition: tuple[int, ...] = ()
    layers_per_stage: tuple[int, ...] = ()
    stages: tuple[tuple[tuple[tuple[str, int], ...], ...], ...] = ()
    """[stage][replica]: names of GPU kinds with how many of each."""


def _uneven(run: Run) -> _Uneven:
    """The uneven plan of a row's `plan_json`; AMP's failed rows have theirs in the notes. Raises InputError and _Refused."""
    if run.plan_json is None:
        noted = re.search(r"partition=\[([\d, ]+)\]", run.notes or "")
        return _Uneven(tuple(int(bound) for bound in noted[1].split(","))) if noted else _Uneven()
    found: Any = parse_json(run.plan_json, "plan_json")
    try:
        uneven = _Uneven(
            tuple(int(bound) for bound in found.get("partition", ())),
            tuple(int(count) for count in found.get("layers_per_stage", ())),
            tuple(
                tuple(tuple((str(name), int(count)) for name, count in replica["gpus"]) for replica in stage)
                for stage in found.get("stages", ())
            ),
        )
        if any(count < 1 for stage in uneven.stages for replica in stage for _, count in replica):
            raise ValueError
        return uneven
    except (AttributeError, KeyError, TypeError, ValueError):
        forms = 'expected {"partition": [BOUND, ...]} or {"layers_per_stage": [...], "stages": [[{"gpus": [[KIND, COUNT]]}]]}'
        raise _Refused(f"plan_json, which is of no known form; {forms}") from None


def _spread(count: int, parts: int) -> list[int]:
    """The count over the parts, as even as possible, the first parts larger."""
    each, more = divmod(count, parts)
    return [each + (part < more) for part in range(parts)]


@lru_cache(maxsize=256)
def _made_cluster(
    name: str,
    groups: tuple[tuple[GpuKind, int, str, float | None], ...],
    per_node: int,
    nics: tuple[tuple[str, float, int] | None, ...],
    latency_s: float,
    step_s: float | None,
    software: str,
) -> Cluster:
    """The cluster of so many GPUs of each kind, `per_node` to a node; rows that are alike share it."""
    nodes: list[Node] = []
    for (kind, count, link, rate), nic in zip(groups, nics, strict=True):
        intra = Intra(link, rate or PCIE_BYTES_PER_S[link], latency_s=links().latency_s[link])
        intra = replace(intra, host_bandwidth_bytes_per_s=intra.bandwidth_bytes_per_s)
        for first in range(0, count, per_node):
            gpus = min(per_node, count - first)
            cards = None if nic is None else Nic(nic[0], nic[1], max(1, -(-gpus // nic[2])))
            nodes.append(Node(f"node-{len(nodes)}", kind, gpus, intra, cards))
    fabric = Fabric(latency_s=latency_s, start_s=links().start_s, step_s=links().step_s if step_s is None else step_s)
    return Cluster(name, tuple(nodes), fabric, stack=stack(software))
