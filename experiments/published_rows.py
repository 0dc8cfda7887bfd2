"""The rows of a CSV of runs, measured or failed, each cell typed: what `motley validate --runs` reads."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sim.spec.reading import InputError, nearest, read_text


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


COLUMNS: Mapping[str, str] = {column.name: str(column.type) for column in fields(Run) if column.name != "bad_cells"}
"""The columns that such a file may have, each with the type of its cells."""

_EMPTY = ("", "n/a", "na", "nan", "null", "-", "--", "?")
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": False}
"""Words that stand for an empty cell, and for a flag, without regard to case."""

_OFTEN_NUMBERS = ("zero_stage_or_fsdp", "recompute", "schedule", "precision")
_NONE_BY_ZERO = ("vpp", "cp", "ep")
"""Columns of texts that may be numbers, and columns of degrees where 0 says that there is no such thing."""

_LEAST, _MOST = 1e-9, 1e15
"""What no published figure is below or above, whatever its unit."""

_REQUIRED = ("id", "source_key", "gpu_type", "num_gpus")
_REQUIRED_OF_FAILURES = ("source_key", "gpu_type", "num_gpus", "failure")
_RENAMED = {"zero": "zero_stage_or_fsdp"}
"""Columns that the CSV of failed runs calls otherwise."""


def gpu_parts(text: str) -> list[tuple[str, int | None]]:
    """The names that a `gpu_type` has, with how many GPUs of each where it says so: '12xV100-16GB+4xT4'."""
    found: list[tuple[str, int | None]] = []
    for part in text.split("+"):
        counted = re.fullmatch(r"\s*(\d+)\s*x\s*(.+?)\s*", part)
        found.append((counted[2], int(counted[1])) if counted else (part.strip(), None))
    return found


def read_runs(path: str | Path) -> list[Run]:
    """The rows of a CSV of runs, such as `data/published_runs.csv`.

    Its columns are the fields of Run, but for the last; id, source_key, gpu_type and num_gpus must be there, any other may be
    missing. A row with a cell that is not of its column, or that tells of a failure, says so (`bad_cells`). Raises InputError, in
    one line, for a file without rows, unknown or missing columns, a row that has more or fewer cells, an id that stands twice,
    and a quote that nothing closes.
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
    # Strict: a quote that nothing closes would take all rows below it into its cell.
    reader = csv.reader(io.StringIO(text), strict=True)
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
                raise InputError(f"{path}: column {number} has no name; accepted: {', '.join(COLUMNS)}")
            if column not in COLUMNS:
                raise InputError(f"{path}: unknown column {name!r}{nearest(name, COLUMNS)}; accepted: {', '.join(COLUMNS)}")
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
            if "failure" not in required and values.get("failure") is not None:
                bad = (*bad, f"failure {values['failure']!r}, but --runs are those that ended; others are read by --failures")
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
    kind = COLUMNS[column]
    if kind.startswith("str"):
        # What pandas makes of a column of numbers with gaps: '3.0'.
        return re.sub(r"^(\d+)\.0+$", r"\1", text) if column in _OFTEN_NUMBERS else text
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
    if value == 0 and column in _NONE_BY_ZERO:
        return None
    if kind.startswith("int"):
        if not (value.is_integer() and 1 <= value < 2**53):
            none = "0 or empty for none" if column in _NONE_BY_ZERO else "empty"
            raise InputError(f"{column} is a whole number of at least 1, or {none}, but got {text!r}")
        return int(value)
    if value == 0 and column == "inter_node_GBps_per_node":
        return value  # there is no network
    if not 0 < value < math.inf:
        raise InputError(f"{column} is a number above 0, or empty, but got {text!r}")
    if not _LEAST <= value <= _MOST:
        raise InputError(f"{column} is a number from {_LEAST:g} to {_MOST:g}, or empty, but got {text!r}")
    if column == "mfu_pct" and value > 100:
        raise InputError(f"{column} is per cent, at most 100, but got {text!r}")
    return value
