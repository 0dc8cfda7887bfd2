"""The rows of a benchmark that searches cell by cell, in a CSV file: what stands there is not searched again."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from experiments.comparison import Cell, cell_digest, rows_csv
from sim.spec.reading import write_file

Row: TypeAlias = dict[str, Any]


def read_rows(table: Path) -> list[Row]:
    """The rows of a CSV file, all cells as text; none where there is no such file."""
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def searched(
    cells: Sequence[Cell], table: Path, again: bool, row: Callable[[Cell], Row], tell: Callable[[Cell, Row], None]
) -> list[Row]:
    """The rows of all cells, in their order: those of the table, unless `again`, and what `row` makes of the others.

    Each of these is written as soon as it is known, and told, so that a benchmark that is killed loses one search alone.
    """
    known = {} if again else {entry["cell"]: entry for entry in read_rows(table)}
    digests = [cell_digest(cell) for cell in cells]
    for cell, digest in zip(cells, digests, strict=True):
        if digest not in known:
            known[digest] = {**row(cell), "cell": digest}
            write_file(table, rows_csv([known[name] for name in digests if name in known]), replace=True)
            tell(cell, known[digest])
    return [known[digest] for digest in digests]


def seconds(entry: Row) -> float:
    """The iteration of a row; infinite where it has no plan."""
    return float(entry["iteration_s"]) if entry["iteration_s"] not in (None, "") else float("inf")
