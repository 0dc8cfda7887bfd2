"""What a command writes: files, checked before the long work starts, and text for people beside JSON for programs."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from sim.spec.reading import DISK_FAILURES, InputError, write_file

STANDARD_OUTPUT = "-"

DATA_WIDTH = 100
"""Columns of a table that goes to a file or a pipe, where COLUMNS does not say otherwise."""


@dataclass(frozen=True)
class Outputs:
    """The files that a command was asked to write, by flag, and the console on which people read."""

    paths: Mapping[str, str]
    console: Console
    _notes: list[str] = field(default_factory=list, repr=False)

    def __contains__(self, flag: str) -> bool:
        """Whether the flag was given."""
        return flag in self.paths

    def write(self, flag: str, text: str) -> None:
        """Nothing; writes the text to the flag's file, or to standard output, if the flag was given. Raises InputError."""
        path = self.paths.get(flag)
        if path == STANDARD_OUTPUT:
            try:
                sys.stdout.write(text)
                sys.stdout.flush()
            except OSError as error:
                raise OSError(error.errno, error.strerror, "standard output") from None
        elif path is not None:
            self.tell(path, write_file(path, text))

    def spare(self, inputs: Iterable[Path]) -> None:
        """Nothing. Raises InputError where one of these files, which the command reads too, would be overwritten."""
        spare(self.paths, inputs)

    def tell(self, path: str | Path, kept: Path | None) -> None:
        """Nothing; `finish` will say that the file was written, and where its earlier content is kept."""
        earlier = f" (the earlier one is kept as {kept})" if kept else ""
        self._notes.append(f"wrote {path}{earlier}")

    def say(self, text: str) -> None:
        """Nothing; prints one line for people."""
        self.console.print(text, soft_wrap=True, markup=False)

    def finish(self) -> None:
        """Nothing; says what was written. Last, below the tables, which are long; writing comes first, for a pipe may break."""
        for note in self._notes:
            self.say(note)
        self._notes.clear()


def outputs(flags: Mapping[str, str | Path | None], inputs: Iterable[str | Path | None] = ()) -> Outputs:
    """The outputs of a command by flag; those that are None were not asked for.

    The console is standard output, or standard error where data goes to standard output. Raises InputError for a place that
    cannot be written, is named twice, or is an input.
    """
    paths = {flag: str(path) for flag, path in flags.items() if path is not None}
    for flag, path in paths.items():
        if path != STANDARD_OUTPUT:
            check_file(flag, path)
    spare(paths, inputs)
    check_apart(paths)
    return Outputs(paths, console(error=STANDARD_OUTPUT in paths.values()))


def check_apart(places: Mapping[str, str | Path | None]) -> None:
    """Nothing. Raises InputError where two of these files and folders, by flag, are one; those that are None are not there."""
    seen: dict[str, str] = {}
    for flag, path in places.items():
        if path is not None:
            place = STANDARD_OUTPUT if str(path) == STANDARD_OUTPUT else os.path.realpath(path)
            if place in seen:
                shown = "standard output" if place == STANDARD_OUTPUT else path
                raise InputError(f"{flag} and {seen[place]} both go to {shown}, which takes one of them")
            seen[place] = flag


def check_outside(folder: Path, places: Mapping[str, str | Path | None]) -> None:
    """Nothing. Raises InputError where one of these files and folders, by flag, lies in the folder whose texts are trained on."""
    data = os.path.realpath(folder)
    for flag, path in places.items():
        place = Path(os.path.realpath(path)) if path is not None and str(path) != STANDARD_OUTPUT else None
        if place is None or not place.is_relative_to(data):
            continue
        if not any(part.startswith(".") for part in place.relative_to(data).parts):  # what is hidden is not read
            raise InputError(f"{flag}: {path} lies in {folder}, whose texts are trained on")


def spare(paths: Mapping[str, str | Path], inputs: Iterable[str | Path | None]) -> None:
    """Nothing. Raises InputError where one of these outputs, by flag, is among the files that the command reads."""
    read = {os.path.realpath(path) for path in inputs if path is not None}
    for flag, path in paths.items():
        if str(path) != STANDARD_OUTPUT and os.path.realpath(path) in read:
            raise InputError(f"{flag}: {path} is read by this command, and would be overwritten")


def console(error: bool = False) -> Console:
    """A console on standard output, or standard error: as wide as the terminal, and DATA_WIDTH columns into a file or pipe."""
    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdecimal() else DATA_WIDTH
    return Console(file=stream, highlight=False, width=width)


def check_file(flag: str, path: str | Path) -> None:
    """Nothing. Raises InputError where no file could be written at the path, which is tried beside it."""
    if not str(path):
        raise InputError(f"{flag}: expected the name of a file, but got ''")
    path = Path(path)
    with _telling(flag, path):
        _check_names(path.parent, (path.name,))
        if path.is_dir():
            raise InputError(f"{flag}: {path} is a folder, but a file is to be written there")
        if path.exists():
            if not os.access(path, os.W_OK):
                raise InputError(f"{flag}: {path} is write-protected")
            if not path.is_file():  # a device or a pipe
                return
            _check_names(path.parent, (f"{path.name}.~1~",))  # the earlier one will be kept under such a name
        _check_folder(flag, path.parent, path.name)


def check_folder(flag: str, path: str | Path) -> None:
    """Nothing. Raises InputError where the path is no folder and cannot become one, or no file could be written into it."""
    if not str(path):
        raise InputError(f"{flag}: expected the name of a folder, but got ''")
    with _telling(flag, Path(path)):
        _check_folder(flag, Path(path))


def _check_folder(flag: str, folder: Path, *names: str) -> None:
    """Nothing. Raises InputError or OSError where folders and files of these names could not be made there."""
    folder = folder.absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir():
        raise InputError(f"{flag}: {existing} is a file, but a folder is needed there")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{flag}: nothing can be written into the folder {existing}")
    _check_names(existing, (*folder.relative_to(existing).parts, *names))
    # Rights do not tell everything: of a disk that is full or read-only, or /proc, only trying does.
    handle, temporary = tempfile.mkstemp(dir=existing, prefix=".motley.")
    os.close(handle)
    os.unlink(temporary)


def _check_names(folder: Path, names: Iterable[str]) -> None:
    """Nothing. Raises OSError where the file system of the folder takes no such name, as one that is too long."""
    for name in names:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(folder / name)


@contextlib.contextmanager
def _telling(flag: str, path: Path) -> Iterator[None]:
    """Makes of an error of the file system the one line that tells of it; a full disk stays an OSError, which names the path."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:  # a zero character in the name is a ValueError
        if isinstance(error, OSError) and error.errno in DISK_FAILURES:
            raise OSError(error.errno, error.strerror, str(path)) from None
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{flag}: {path} cannot be written ({why.lower()})") from None
