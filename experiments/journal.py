"""What is on disk of a sweep: a journal that only grows, the plans, and the tables made of it.

    journal.jsonl      first the sweep it is of, then one line for every run that is finished, in the order they finished
    plans/RUN.json     the plan of a run
    results.parquet    one row a run, in the order of the sweep; written when all runs are finished
    results.csv        the same

A line is written in one piece when its run is done, so that whatever ends the process, what the journal has is whole lines and
perhaps a last one that is cut; that one is dropped, and its run executed again.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.comparison import rows_csv
from sim.spec.reading import DISK_FAILURES, InputError, Table, parse_json, write_file
from sim.spec.version import VERSION

FORMAT = "motley-sweep/1"
JOURNAL, PLANS = "journal.jsonl", "plans"
PARQUET, CSV = "results.parquet", "results.csv"

Row = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """The first line of a journal: which sweep it is of. `runs` has the digests of its runs, in their order."""

    sweep: str
    """The file that the sweep stands in; for people, who may rename it."""
    runs: Sequence[str]

    @property
    def digest(self) -> str:
        """What is the same for the same runs in the same order."""
        return sha256(" ".join(self.runs).encode()).hexdigest()[:16]

    def line(self) -> str:
        """Its text, with the line's end."""
        head = {"format": FORMAT, "version": VERSION, "sweep": self.sweep, "runs": len(self.runs), "digest": self.digest}
        return json.dumps(head) + "\n"


class Journal:
    """The journal of a sweep in a folder, open for more: a context that one process at a time can enter.

    `rows` has the finished runs' rows by digest; `wrong` names the first column of a row that is no run's, once `whole` has added
    to it what rows of earlier versions do not have. Raises InputError where the folder holds such rows, or results of another
    sweep or of another version of Motley, or another process is at work in it; then nothing has been changed.
    """

    def __init__(
        self,
        folder: Path,
        head: Head,
        wrong: Callable[[Row], str | None] = lambda row: None,
        whole: Callable[[Row], Row] = lambda row: row,
    ) -> None:
        self.folder, self.head, self._wrong, self._whole = folder, head, wrong, whole
        self.rows: dict[str, Row] = {}
        self._file: int | None = None

    def __enter__(self) -> Journal:
        path = self.folder / JOURNAL
        if not path.exists():
            for name in (PARQUET, CSV):
                if (self.folder / name).exists():
                    raise InputError(
                        f"{self.folder}: holds {name}, but no {JOURNAL} of a sweep, which would write over it; give another --out"
                    )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
            _lock(self._file, self.folder)
            self._read(path)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno not in DISK_FAILURES:
                raise InputError(f"{path}: cannot be opened ({(error.strerror or str(error)).lower()})") from None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Nothing; other processes may go on with the sweep."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, path: Path) -> None:
        """Takes the rows from the file, and cuts off a last line that was not finished; a new file gets its head."""
        data = path.read_bytes()
        size = data.rfind(b"\n") + 1
        if not size and self.head.line().encode().startswith(data):
            self._append(self.head.line()[len(data) :])
            return
        try:
            lines = data[:size].decode("ascii").split("\n")[:-1]
        except UnicodeDecodeError:
            lines = []
        if not lines:
            raise InputError(f"{path}: is not the journal of a sweep; give another --out")
        head = Table(parse_json(lines[0], f"{path}, head"), str(path))
        version = head.text("version")
        if head.text("format") != FORMAT or version != VERSION:
            raise InputError(f"{self.folder}: holds results of Motley {version}, but this is {VERSION}; give another --out")
        if head.text("digest") != self.head.digest:
            raise InputError(
                f"{self.folder}: holds results of another sweep ({head.text('sweep')}, {head.integer('runs'):,} runs, with other "
                f"inputs, --seed or --budget), not of the {len(self.head.runs):,} runs of {self.head.sweep}; give another --out"
            )
        known = set(self.head.runs)
        for number, line in enumerate(lines[1:], 2):
            row = parse_json(line, str(path), number)
            if not isinstance(row, dict) or row.get("run") not in known:
                raise InputError(f"{path}, line {number}: expected the row of a run of this sweep, but got {line[:60]!r}")
            row = self._whole(row)
            if (wrong := self._wrong(row)) is not None:
                told = row.get(wrong, "missing")
                raise InputError(f"{path}, line {number}: expected the row of a run, but its {wrong} is {told!r}")
            self.rows[row["run"]] = row
        if size < len(data):
            assert self._file is not None
            os.ftruncate(self._file, size)

    def enter(self, row: Row, plan: str | None) -> None:
        """Nothing; the run is finished once this returns. Raises OSError, which names the file, where the disk is full."""
        if plan is not None:
            write_file(self.folder / row["plan"], plan, replace=True)
        self._append(json.dumps(row) + "\n")
        self.rows[row["run"]] = row

    def _append(self, line: str) -> None:
        """Nothing; the file has the line."""
        assert self._file is not None
        data = line.encode("ascii")  # a character of several bytes could be cut
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.folder / JOURNAL)) from None


def _lock(file: int, folder: Path) -> None:
    """Nothing; this process alone works in the folder until it closes the file or ends, however it ends. Raises InputError."""
    import fcntl  # only POSIX systems have it

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{folder}: another process is at work on the sweep in this folder") from None


# --- Tables ----------------------------------------------------------------------------------------------------------


def tables_there(folder: Path) -> bool:
    """Whether the tables have been written."""
    return all((folder / name).is_file() for name in (PARQUET, CSV))


def write_tables(folder: Path, rows: Sequence[Row], columns: Mapping[str, type]) -> list[tuple[Path, Path | None]]:
    """The files of the tables, each with where its earlier content is kept now, if it had another one.

    `columns` has the types of columns that all rows have; those of others are found in the rows, which may lack them.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    filled = [{name: row.get(name) for name in names} for row in rows]
    types = {name: columns.get(name) or _type_of([row[name] for row in filled]) for name in names}
    contents: dict[str, str | bytes] = {PARQUET: _parquet(filled, types), CSV: rows_csv(filled)}
    return [(folder / name, write_file(folder / name, content)) for name, content in contents.items()]


def _type_of(values: Sequence[Any]) -> type:
    """The narrowest of bool, int, float and str that all the values have or become; None is of every type."""
    there = {type(value) for value in values if value is not None}
    if len(there) == 1:
        return there.pop()
    return float if there == {int, float} else str


def _parquet(rows: Sequence[Row], types: Mapping[str, type]) -> bytes:
    """The rows as a Parquet file with columns of these types."""
    import pyarrow  # takes long to import, and only what writes needs it
    from pyarrow import parquet

    known = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    arrays = {
        name: pyarrow.array([None if row[name] is None else kind(row[name]) for row in rows], known[kind])
        for name, kind in types.items()
    }
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), file)
    return file.getvalue()
