"""Checkpoints that a run of another plan can resume, and none that a crash, a full disk or a dead worker spoils.

Whatever a rank holds of a parameter are stretches of its flattened numbers (runtime.parameters), so a saved tensor has one
dimension, every rank saves its stretches, and every rank of the next run, under whatever plan, asks for its own. The numbers
are written and read by torch.distributed.checkpoint (DCP), one file per rank (`runtime.checkpoint_items`).

    FOLDER/step-00000020/             complete: DCP's files, and motley.json, which is written last and has the length and the
                                      checksum of each
    FOLDER/.step-00000020.partial     being written; takes its name when all ranks have finished and all is on the disk
    FOLDER/.step-00000020.replaced    complete, where the same step is saved once more: it makes room for the new one, which
                                      is complete by then. Should a crash come between the two renames there is no
                                      step-00000020, and `complete` finds this one; the next `save` gives it its name back
    FOLDER/.step-00000020.removed     being removed
    FOLDER/.lock                      locked by the first worker of the run that writes there

All ranks must see FOLDER. `process_group` has the ranks that save or load, all of which must call; None is this process alone.
What fails on one rank is raised on all of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from sim.spec.reading import DISK_FAILURES, InputError, Table, read_json, write_file
from sim.spec.version import VERSION

FORMAT = "motley-checkpoint/1"
FACTS = "motley.json"

CHUNK_BYTES = 1 << 23
"""So many are read at a time for a checksum."""

_SHOWN = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.(step-\d{8,})\.(partial|replaced|removed)")


@dataclass(frozen=True, eq=False)
class Stretch:
    """Some numbers of one saved tensor: `values` are its numbers start, start + 1, ...; loading writes into them.

    They may be of any type and on any device; what is loaded is converted to their type.
    """

    name: str
    size: int
    """Numbers of the whole tensor."""
    start: int
    values: torch.Tensor
    """Of one dimension, and contiguous."""

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or not self.values.is_contiguous():
            raise ValueError(f"{self.name}: the values must be flat and contiguous, but got {tuple(self.values.shape)}")
        if not 0 <= self.start <= self.stop <= self.size:
            raise ValueError(f"{self.name}: numbers {self.start} to {self.stop} are not among its {self.size}")

    @property
    def stop(self) -> int:
        """The number after the last one."""
        return self.start + self.values.numel()


# --- The folder ------------------------------------------------------------------------------------------------------


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, by step; none where there is no such folder.

    Raises InputError where the folder cannot be read.
    """
    found: dict[int, Path] = {}
    try:
        for path in folder.iterdir() if folder.exists() else ():
            hidden = _HIDDEN.fullmatch(path.name)
            shown = _SHOWN.fullmatch(hidden[1] if hidden else path.name)
            if hidden and (hidden[2] != "replaced" or (folder / hidden[1]).exists()):
                continue
            if shown and (path / FACTS).is_file():
                found[int(shown[1])] = path
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({reason(error)})") from None
    return [found[step] for step in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the last step, or None. Raises InputError where the folder cannot be read."""
    found = complete(folder)
    return found[-1] if found else None


def hold(folder: Path) -> IO[bytes]:
    """A file that keeps other runs from writing into a folder for as long as it is open, also on other machines that lock files.

    Raises InputError where another run holds it, and where nothing can be written there.
    """
    try:
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({reason(error)})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(
            f"{folder}: another run writes its checkpoints there; wait for its end, or name another folder"
        ) from None
    except OSError:
        pass  # a file system that knows no locks
    return file


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """The facts that a checkpoint was saved with, as JSON keeps them, and its `step`.

    Raises InputError where it is none, or is damaged.
    """
    table = _read_table(checkpoint)
    facts, step = table.get("facts", _mapping, "a mapping of keys to values"), table.integer("step")
    named = _SHOWN.search(checkpoint.name)
    if (named is not None and int(named[1]) != step) or facts.get("step", step) != step:
        raise InputError(f"{checkpoint}: is damaged (its {FACTS} tells of step {facts.get('step', step)})")
    return {**facts, "step": step}


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _read_table(checkpoint: Path) -> Table:
    if not (checkpoint / FACTS).is_file():
        raise InputError(f"{checkpoint}: is no complete checkpoint (it has no {FACTS})")
    table = Table(read_json(checkpoint / FACTS), str(checkpoint / FACTS))
    table.choice("format", [FORMAT])
    return table


def _tidy(folder: Path) -> None:
    """Nothing; finishes what a crash has left under hidden names."""
    for path in sorted(folder.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is None:
            continue
        if hidden[2] == "replaced" and not (folder / hidden[1]).exists():
            path.rename(folder / hidden[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path, name: str) -> None:
    """Nothing; removes a checkpoint. Whoever looks meanwhile never sees a part of it."""
    removed = path.with_name(f".{name}.removed")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _flush(path: Path) -> None:
    """Nothing, once a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in DISK_FAILURES:
            raise
        # else a file system that cannot flush a folder
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """Why the system refused something, in lower case."""
    return (error.strerror or str(error)).lower()


# --- Saving and loading ----------------------------------------------------------------------------------------------


def _rank(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The number of this rank, and how many there are."""
    return (0, 1) if process_group is None else (dist.get_rank(process_group), dist.get_world_size(process_group))


def _is_first(process_group: dist.ProcessGroup | None) -> bool:
    return _rank(process_group)[0] == 0


def _checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
    return found


def save(
    folder: Path,
    step: int,
    stretches: Sequence[Stretch],
    facts: Mapping[str, Any],
    process_group: dist.ProcessGroup | None = None,
    keep: int = 0,
) -> Path:
    """The new checkpoint of a step, complete and on the disk.

    Over all ranks, every number of each tensor must be in exactly one stretch. `facts` of the first rank are kept, in JSON. A
    checkpoint of this step that is there already is replaced. With `keep` above 0, all complete checkpoints but that many of
    the last steps, and this one, are removed.

    Raises InputError where the folder cannot be written, and OSError, which names the checkpoint, where the disk is full or
    fails; the earlier checkpoints stay.
    """
    from runtime.checkpoint_items import everywhere, write_items  # here, because it takes long to import

    name = f"step-{step:08d}"
    checkpoint, partial = folder / name, folder / f".{name}.partial"
    first = _is_first(process_group)

    def prepare() -> None:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            _tidy(folder)
            partial.mkdir()

    def write() -> None:
        write_items(partial, stretches, process_group)

    def add_up() -> dict[str, int]:
        own = f"__{_rank(process_group)[0]}_"  # as DCP names a rank's files; the first rank has what is no rank's
        files = [path for path in partial.iterdir() if path.name.startswith(own) or (first and not path.name.startswith("__"))]
        return {path.name: _checksum(path) for path in files}

    sums: dict[str, int] = {}

    def publish() -> None:
        if first:
            _write_facts(partial, step, facts, sums)
            replaced = folder / f".{name}.replaced"
            if checkpoint.exists():
                checkpoint.rename(replaced)
            partial.rename(checkpoint)
            _flush(folder)
            if replaced.exists():
                _remove(replaced, name)
            for old in complete(folder)[:-keep] if keep > 0 else ():
                if old != checkpoint:
                    _remove(old, old.name)

    try:
        everywhere(prepare, process_group, checkpoint, "written")
        everywhere(write, process_group, checkpoint, "written")
        found = everywhere(add_up, process_group, checkpoint, "written")
        all_found = [found] * _rank(process_group)[1]
        if process_group is not None:
            dist.all_gather_object(all_found, found, group=process_group)
        for own in all_found:
            sums.update(own)
        everywhere(publish, process_group, checkpoint, "written")
    except Exception:
        if first:  # no rank writes any more: all have told how it went, or one is dead
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return checkpoint


def _write_facts(partial: Path, step: int, facts: Mapping[str, Any], sums: Mapping[str, int]) -> None:
    """Nothing; writes the file that makes a checkpoint complete. It has what shows that another one is damaged."""
    content = {
        "format": FORMAT,
        "step": step,
        "versions": {"motley": VERSION, "python": platform.python_version(), "torch": str(torch.__version__)},
        "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
        "crc32": dict(sorted(sums.items())),
        "facts": dict(facts),
    }
    write_file(partial / FACTS, json.dumps(content, indent=1) + "\n")
    _flush(partial / FACTS)
    _flush(partial)


def load(checkpoint: Path, stretches: Sequence[Stretch], process_group: dist.ProcessGroup | None = None) -> None:
    """Nothing; fills the values of the stretches, whatever the stretches were that the checkpoint was saved with.

    Raises InputError where the checkpoint is damaged, is of another model, or lacks a number; the values are undefined then.
    """
    from runtime.checkpoint_items import Items, everywhere  # here, because it takes long to import

    first = _is_first(process_group)

    def check() -> None:
        if first:
            _check_files(checkpoint)

    everywhere(check, process_group, checkpoint, "read")
    everywhere(lambda: _check_sums(checkpoint, *_rank(process_group)), process_group, checkpoint, "read")
    items = everywhere(lambda: Items(checkpoint, stretches), process_group, checkpoint, "read")
    everywhere(lambda: items.read(process_group), process_group, checkpoint, "read")


def _check_files(checkpoint: Path) -> None:
    """Nothing. Raises InputError where a file of a checkpoint is missing, or is not as long as it was."""
    table = _read_table(checkpoint)
    files, sums = table.table("files"), table.table("crc32", None)
    if sums is not None and (unknown := set(sums.keys()) - set(files.keys())):
        raise InputError(
            f"{checkpoint}: is damaged (its {FACTS} has the checksum of {sorted(unknown)[0]}, which is none of its files)"
        )
    for name in files.keys():  # noqa: SIM118
        path, size = checkpoint / name, files.integer(name)
        if not path.is_file():
            raise InputError(f"{checkpoint}: is damaged ({name} is missing)")
        if path.stat().st_size != size:
            raise InputError(f"{checkpoint}: is damaged ({name} has {path.stat().st_size} bytes, but was saved with {size})")


def _check_sums(checkpoint: Path, rank: int, ranks: int) -> None:
    """Nothing. Raises InputError where a file is not what was saved; ranks look at equal parts of them.

    Those of before there were checksums go by their length alone.
    """
    sums = _read_table(checkpoint).table("crc32", None)
    for name in sorted(sums.keys() if sums is not None else ())[rank::ranks]:
        if _checksum(checkpoint / name) != sums.integer(name):
            raise InputError(f"{checkpoint}: is damaged ({name} is not what was saved)")
