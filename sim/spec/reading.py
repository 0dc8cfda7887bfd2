"""Reading what users wrote: YAML, JSON and quantities with units, every mistake told in one line.

The readers of clusters, models and plans take their values from a `Table`. It knows the file and the key it stands at, so
that each error names the file, the key, the value and what is accepted. It lives here, and not in a validation library,
because the runtime reads plans on machines that have torch, numpy and PyYAML only.
"""

from __future__ import annotations

import csv
import difflib
import errno
import io
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import yaml

Value = TypeVar("Value")

REQUIRED: Any = object()
"""The default of a key that has none."""


class InputError(ValueError):
    """A user's mistake in a file, a flag or an argument, told in one line: what is wrong, the value, what is accepted."""


# --- Quantities ------------------------------------------------------------------------------------------------------

_SI = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

DIMENSIONS: dict[str, dict[str, float]] = {
    "bandwidth": {f"{prefix}bit/s": factor / 8 for prefix, factor in _SI.items()}
    | {f"{prefix}B/s": factor for prefix, factor in (_SI | _BINARY).items()},
    "time": {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
    "size": {f"{prefix}B": factor for prefix, factor in (_SI | _BINARY).items()},
    "rate of work": {f"{prefix}FLOP/s": factor for prefix, factor in _SI.items()},
    "work": {f"{prefix}FLOP": factor for prefix, factor in _SI.items()},
    "power": {"W": 1.0, "kW": 1e3},
    "price": {"$/h": 1.0},
}
"""Accepted units of each dimension, with their factor to the SI unit used inside (bytes/s, s, bytes, FLOP/s, W, $/h)."""

RANGES: dict[str, tuple[float, float]] = {
    "bandwidth": (1.0, 1e21),
    "time": (0.0, 1e7),  # nothing is divided by a time, and a fit may find any
    "size": (1.0, 1e18),
    "rate of work": (1e3, 1e24),
    "work": (1.0, 1e30),
    "power": (1e-3, 1e9),
    "price": (1e-6, 1e9),
}
"""The smallest above zero and the largest that is accepted of each dimension, in the SI unit used inside.

Both lie far beyond what there is, even for a link that shall be as good as infinitely fast, and keep all that is computed
from them finite.
"""

_COMMON = {
    "bandwidth": ("Mbit/s", "Gbit/s", "MB/s", "GB/s", "GiB/s", "..."),
    "size": ("MB", "GB", "MiB", "GiB", "..."),
    "rate of work": ("GFLOP/s", "TFLOP/s", "PFLOP/s", "..."),
    "work": ("GFLOP", "TFLOP", "..."),
}
"""What an error shows of the accepted units, where there are many."""

_EXAMPLES = {
    "bandwidth": "10 Gbit/s",
    "time": "50 us",
    "size": "24 GiB",
    "rate of work": "165 TFLOP/s",
    "work": "2 GFLOP",
    "power": "450 W",
    "price": "1.50 $/h",
}

_QUANTITY = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([^\d\s].*?)?\s*\Z")


def quantity(value: object, dimension: str) -> float:
    """The value in SI units of a text such as '10 Gbit/s'. Zero and negative ones are left for the caller to judge.

    Raises InputError for a bare number, a unit of another kind, and a value beyond RANGES.
    """
    units = DIMENSIONS[dimension]
    accepted = f"a {dimension} with its unit ({', '.join(_COMMON.get(dimension, units))}), for example '{_EXAMPLES[dimension]}'"
    if isinstance(value, bool) or not isinstance(value, str):
        bare = isinstance(value, (int, float)) and not isinstance(value, bool)
        raise InputError(f"got {_brief(value)}{' without a unit' if bare else ''}, but {accepted} is accepted")
    match = _QUANTITY.match(value)
    if match is None:
        raise InputError(f"got {_brief(value)}, but {accepted} is accepted")
    unit = match[2]
    if unit is None:
        raise InputError(f"got {_brief(value)} without a unit, but {accepted} is accepted")
    if unit not in units:
        raise InputError(f"got {_brief(value)} with the unit {_brief(unit)}, but {accepted} is accepted")
    try:
        amount = float(Decimal(match[1]) * Decimal(repr(units[unit])))  # in decimal, so that 50 us is 5e-05 to the last bit
    except ArithmeticError:  # an exponent that no Decimal has
        amount = math.inf
    if not re.search("[1-9]", re.split("[eE]", match[1])[0]):  # not told by the amount, which is 0 for 1e-400 too
        return 0.0
    if not in_range(abs(amount), dimension):
        raise InputError(f"got {_brief(value)}, but a {dimension} {range_text(dimension)} is accepted")
    return amount


def in_range(amount: float, dimension: str) -> bool:
    """Whether an amount in SI units that is above zero is one that is accepted of this dimension."""
    smallest, largest = RANGES[dimension]
    return smallest <= amount <= largest


def range_text(dimension: str) -> str:
    """The words 'from SMALLEST to LARGEST UNIT' of a dimension's range, for errors."""
    smallest, largest = (re.sub(r"e([+-])0?", lambda m: "e" + m[1].strip("+"), f"{bound:g}") for bound in RANGES[dimension])
    unit = next(unit for unit, factor in DIMENSIONS[dimension].items() if factor == 1.0)
    return f"from {smallest} to {largest} {unit}"


_LONGEST_NAME = 200
"""Letters of the longest name that a near one is looked for."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The text '; did you mean X?' for the known name most like `name` without regard to case, or '' where none is alike."""
    if len(name) > _LONGEST_NAME:
        return ""  # nobody mistyped that, and to compare it takes long
    by_folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.5)
    return f"; did you mean {by_folded[close[0]]}?" if close else ""


# --- Files -----------------------------------------------------------------------------------------------------------


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key written twice is an error, where PyYAML keeps the last one silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def read_text(path: str | Path) -> str:
    """The text of a file. Raises InputError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file in UTF-8") from None
    except ValueError as error:  # a zero character in the name
        raise InputError(f"{str(path)!r}: cannot be read ({error})") from None


def read_rows(path: str | Path, reader: Callable[[dict[str, str]], Iterable[Value]]) -> list[Value]:
    """What a reader makes of the rows of a CSV file of measurements. Raises InputError, with the line that it cannot read."""
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        return [value for row in rows for value in reader(row)]
    except KeyError as error:
        raise InputError(f"{path}, line {rows.line_num}: {error} is missing or unknown") from None
    except (AttributeError, TypeError):  # the cells that a row lacks are None
        raise InputError(f"{path}, line {rows.line_num}: has fewer cells than there are columns") from None
    except ValueError as error:
        raise InputError(f"{path}, line {rows.line_num}: {error}") from None


def read_yaml(path: str | Path) -> object:
    """The plain value of a YAML file. Raises InputError as `parse_yaml` does."""
    return parse_yaml(read_text(path), str(path))


def read_own_yaml(path: Path) -> object:
    """The plain value of a YAML file that comes with Motley, as `read_yaml` gives it, ten times as fast.

    Every command begins with some of them. For files of users libyaml will not do: it crashes where they nest too deeply, and
    takes keys that stand twice.
    """
    return yaml.load(read_text(path), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def parse_yaml(text: str, where: str) -> object:
    """The plain value of a YAML text. Raises InputError with line and column where it is not YAML."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{where}{at}: is not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: is not valid YAML: {' '.join(str(error).split())}") from None
    except (ValueError, RecursionError) as error:  # a date that no calendar has, a number of thousands of digits
        raise InputError(f"{where}: is not valid YAML: {error}") from None


def parse_json(text: str, where: str, line: int = 1) -> object:
    """The plain value of a JSON text, which begins at a line of its file. Raises InputError with line and column where it is not
    JSON, or holds a key twice."""
    at = where if line == 1 else f"{where}, line {line}"

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = next(key for key in values if sum(key == other for other, _ in pairs) > 1)
            raise InputError(f"{at}: the key {twice!r} stands twice")
        return values

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        cut = "ends too early" if at_end else "is not valid JSON"
        raise InputError(f"{where}, line {line + error.lineno - 1}, column {error.colno}: {cut}: {error.msg}") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets without end
        raise InputError(f"{at}: is not valid JSON: {error}") from None


def read_json(path: str | Path) -> object:
    """The plain value of a JSON file. Raises InputError as `parse_json` does."""
    return parse_json(read_text(path), str(path))


DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing where the place is right and the disk is not: no mistake of the user's."""


def write_file(path: str | Path, content: str | bytes, replace: bool = False) -> Path | None:
    """Where the earlier content of `path` is kept now, or None where there was none to keep.

    The content goes to a temporary file beside `path` that is then renamed, so that no reader ever sees half of it. A file
    that is there already, with another content, is first renamed to `path.~1~` (or the next free number), unless `replace`.
    Raises InputError where the place cannot be written; OSError, which names it, where writing fails on the way, as on a full
    disk.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    kept: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise InputError(f"{path}: is a folder, but a file is to be written there")
        if path.exists() and not path.is_file():  # such as /dev/stdout or /dev/null: nothing to keep, nothing to rename
            path.write_bytes(data)
            return None
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            if path.exists() and not replace and path.read_bytes() != data:
                kept = _free_name(path)
                _link_or_copy(path, kept)
            try:
                os.replace(temporary, path)
            except OSError:
                if kept is not None:
                    kept.unlink()  # the earlier content is still in its place
                raise
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno in DISK_FAILURES:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise InputError(f"{path}: cannot be written ({(error.strerror or str(error)).lower()})") from None
    return kept


def set_aside(path: Path) -> Path:
    """Where a file is now: beside its place, named as what `write_file` keeps. Raises InputError where that cannot be."""
    try:
        return path.rename(_free_name(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be renamed ({(error.strerror or str(error)).lower()})") from None


def _free_name(path: Path) -> Path:
    """The next free name for what was in the place of a path before."""
    return next(p for n in itertools.count(1) if not (p := path.with_name(f"{path.name}.~{n}~")).exists())


def _link_or_copy(path: Path, kept: Path) -> None:
    """Nothing; gives a file a second name, or a copy where the file system has no hard links."""
    try:
        os.link(path, kept)
    except OSError:
        shutil.copy2(path, kept)


# --- Tables ----------------------------------------------------------------------------------------------------------


class Table:
    """One mapping of an input file, with the place it stands at. `close` refuses the keys that no getter asked for."""

    def __init__(self, values: object, where: str, at: str = "") -> None:
        self.where, self.at = where, at
        if not isinstance(values, dict):
            raise InputError(f"{self._place()}: expected a mapping of keys to values, but got {_shown(values)}")
        self._values: dict[Any, Any] = values
        self._asked: list[str] = []

    def _place(self, key: str | None = None) -> str:
        path = ".".join(part for part in (self.at, key) if part)
        return f"{self.where}: {path}" if path else self.where

    def __contains__(self, key: str) -> bool:
        self._asked.append(key)
        return key in self._values

    def error(self, key: str, problem: str) -> InputError:
        """The error to raise for a problem with one key's value."""
        return InputError(f"{self._place(key)}: {problem}")

    def get(self, key: str, convert: Callable[[Any], Value], accepted: str, default: Any = REQUIRED) -> Value:
        """The converted value of a key. `convert` raises InputError (with its own words) or ValueError for a bad value."""
        self._asked.append(key)
        if key not in self._values:
            if default is REQUIRED:
                raise self.error(key, f"is missing; expected {accepted}")
            return default  # type: ignore[no-any-return]
        try:
            return convert(self._values[key])
        except InputError as error:
            raise self.error(key, str(error)) from None
        except (ValueError, TypeError, OverflowError):
            raise self.error(key, f"expected {accepted}, but got {_shown(self._values[key])}") from None

    def text(self, key: str, default: Any = REQUIRED) -> str:
        """A text that is not empty."""

        def convert(value: object) -> str:
            if not isinstance(value, str) or not value.strip():
                raise ValueError
            return value

        return self.get(key, convert, "a text", default)

    def name(self, key: str) -> str:
        """A text of one line: names are written into comments, tables and file names."""

        def convert(value: object) -> str:
            if not isinstance(value, str) or not value.strip() or not value.isprintable():
                raise ValueError
            return value

        return self.get(key, convert, "a text of one line")

    def integer(self, key: str, default: Any = REQUIRED, minimum: int = 0, maximum: int | None = None) -> int:
        """A whole number of at least `minimum`, and at most `maximum` where there is one."""

        def convert(value: object) -> int:
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError
            if maximum is not None and value > maximum:
                raise ValueError
            return value

        top = "" if maximum is None else f" and at most {maximum:,}"
        return self.get(key, convert, f"a whole number of at least {minimum}{top}", default)

    def optional_integer(self, key: str, minimum: int = 0) -> int | None:
        """A whole number of at least `minimum`; None where the key is null, or not there."""

        def convert(value: object) -> int | None:
            if value is None or (type(value) is int and value >= minimum):
                return value
            raise ValueError

        return self.get(key, convert, f"a whole number of at least {minimum}, or null", None)

    def number(self, key: str, default: Any = REQUIRED, minimum: float = 0.0, maximum: float = math.inf) -> float:
        """A finite number without unit between `minimum` and `maximum`."""

        def convert(value: object) -> float:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
                raise ValueError
            if not math.isfinite(value):
                raise ValueError
            return float(value)

        top = "" if maximum == math.inf else f" and at most {maximum:g}"
        return self.get(key, convert, f"a number of at least {minimum:g}{top}", default)

    def quantity(self, key: str, dimension: str, default: Any = REQUIRED, zero: bool = False) -> float:
        """A positive quantity (or zero, where `zero`) with its unit, in SI units. See `quantity`."""

        def convert(value: object) -> float:
            amount = quantity(value, dimension)
            if amount < 0 or (amount == 0 and not zero):
                raise InputError(f"got {value!r}, but a {dimension} {'of at least' if zero else 'above'} zero is accepted")
            return amount

        return self.get(key, convert, f"a {dimension} with its unit, for example '{_EXAMPLES[dimension]}'", default)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """true or false."""

        def convert(value: object) -> bool:
            if not isinstance(value, bool):
                raise ValueError
            return value

        return self.get(key, convert, "true or false", default)

    def choice(self, key: str, choices: Iterable[Value], default: Any = REQUIRED) -> Value:
        """One of the given values."""
        known = list(choices)
        accepted = "one of " + ", ".join(str(choice) for choice in known)

        def convert(value: object) -> Value:
            if isinstance(value, bool) or value not in known:
                hint = nearest(value, [str(choice) for choice in known]) if isinstance(value, str) else ""
                raise InputError(f"expected {accepted}, but got {_shown(value)}{hint}")
            return known[known.index(value)]

        return self.get(key, convert, accepted, default)

    def table(self, key: str, default: Any = REQUIRED) -> Table:
        """A mapping, as a Table of its own."""
        path = ".".join(part for part in (self.at, key) if part)
        values = self.get(key, lambda value: value, "a mapping of keys to values", default)
        return Table(values, self.where, path) if values is not default else values

    def items(self, key: str, default: Any = REQUIRED, minimum: int = 0) -> Sequence[Any]:
        """The plain values of a list of at least `minimum` entries."""

        def convert(value: object) -> list[Any]:
            if not isinstance(value, list) or len(value) < minimum:
                raise ValueError
            return value

        return self.get(key, convert, f"a list of at least {minimum} entries" if minimum else "a list", default)

    def tables(self, key: str, default: Any = REQUIRED, minimum: int = 0) -> list[Table]:
        """A list of mappings, each as a Table of its own."""
        path = ".".join(part for part in (self.at, key) if part)
        return [Table(value, self.where, f"{path}[{i}]") for i, value in enumerate(self.items(key, default, minimum))]

    def keys(self) -> list[str]:
        """All keys, in the order of the file; asking for them counts as having asked for each."""
        for key in self._values:
            if not isinstance(key, str):
                raise InputError(f"{self._place()}: the key {key!r} is not a text")
        self._asked.extend(self._values)
        return list(self._values)

    def close(self) -> None:
        """Refuses every key that no getter has asked for."""
        for key in self._values:
            if key not in self._asked:
                known = list(dict.fromkeys(self._asked))
                hint = nearest(key, known) if isinstance(key, str) else ""
                raise InputError(f"{self._place()}: unknown key {key!r}; accepted: {', '.join(known)}{hint}")


def _shown(value: object) -> str:
    """A value as it is shown in an error, on one line."""
    return "nothing" if value is None else _brief(value)


def _brief(value: object) -> str:
    """At most 80 characters of a value's repr."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
