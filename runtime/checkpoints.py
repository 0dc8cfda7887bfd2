"""Checkpoints that a run of another plan can resume, and none that a crash, a full disk or a dead worker spoils.

Whatever a rank holds of a parameter are stretches of its flattened numbers (runtime.parameters), so a saved tensor has one
dimension, every rank saves its stretches, and every rank of the next run, under whatever plan, asks for its own. The numbers
are written and read by torch.distributed.checkpoint (DCP), one file per rank; the planners here tell it where they belong.

    FOLDER/step-00000020/             complete: DCP's files and motley.json, which is written last
    FOLDER/.step-00000020.partial     being written; takes its name when all ranks have finished and all is on the disk
    FOLDER/.step-00000020.replaced    complete, where the same step is saved once more: it makes room for the new one, which
                                      is complete by then. Should a crash come between the two renames there is no
                                      step-00000020, and `complete` finds this one; the next `save` gives it its name back
    FOLDER/.step-00000020.removed     being removed

All ranks must see FOLDER. `process_group` has the ranks that save or load, all of which must call; None is this process alone.
What fails on one rank is raised on all of them.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_items
from torch.distributed.checkpoint.state_dict_saver import save as save_items
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sim.spec.reading import DISK_FAILURES, InputError, Table, read_json, write_file
from sim.spec.version import VERSION

Value = TypeVar("Value")

FORMAT = "motley-checkpoint/1"
FACTS = "motley.json"

ITEM_SIZE = 2**22
"""Numbers that are written as one item at most. DCP reads an item whole, however few of its numbers are wanted."""

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
        raise InputError(f"{folder}: cannot be read ({_reason(error)})") from None
    return [found[step] for step in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the last step, or None. Raises InputError where the folder cannot be read."""
    found = complete(folder)
    return found[-1] if found else None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """The facts that a checkpoint was saved with, as JSON keeps them, and its `step`.

    Raises InputError where it is none, or is damaged.
    """
    table = _read_table(checkpoint)
    facts = table.get("facts", _mapping, "a mapping of keys to values")
    return {"step": table.integer("step"), **facts}


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


# --- Ranks -----------------------------------------------------------------------------------------------------------


def _is_first(process_group: dist.ProcessGroup | None) -> bool:
    return process_group is None or dist.get_rank(process_group) == 0


def _everywhere(work: Callable[[], Value], process_group: dist.ProcessGroup | None, checkpoint: Path, done: str) -> Value:
    """What `work` returns on this rank. Where it fails on a rank, all ranks raise the failure of the first that did."""
    value: Value | None = None
    cause: BaseException | None = None
    failures: list[BaseException | None] = [None]
    try:
        value = work()
    except (Exception, CheckpointException) as error:
        failures = [_told(error, checkpoint, done)]
        cause = None if isinstance(failures[0], (InputError, OSError)) else error
    if process_group is not None:
        mine = failures[0]
        failures = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(failures, mine, group=process_group)
    for failure in failures:
        if failure is not None:
            raise failure from cause
    return value  # type: ignore[return-value]


def _told(error: BaseException, checkpoint: Path, done: str) -> BaseException:
    """The failure as it is raised on every rank: an exception that is made of texts and numbers, for it is sent to them.

    `done` is what was to be done to the checkpoint: written | read.
    """
    if isinstance(error, InputError):
        return InputError(str(error))
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, KeyboardInterrupt):
            return KeyboardInterrupt()
        if isinstance(cause, OSError) and cause.errno in DISK_FAILURES:
            return OSError(cause.errno, cause.strerror, str(checkpoint))
    for cause in causes:
        if isinstance(cause, OSError):
            return InputError(f"{checkpoint}: cannot be {done} ({_reason(cause)})")
    first = next(cause for cause in causes if not isinstance(cause, CheckpointException))
    return RuntimeError(f"{checkpoint}: cannot be {done} ({type(first).__name__}: {first})")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what led to it, and what DCP has wrapped in it."""
    while error is not None:
        yield error
        if isinstance(error, CheckpointException):
            for failed, _ in error.failures.values():
                yield from _causes(failed)
        error = error.__cause__ or error.__context__


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


# --- Saving ----------------------------------------------------------------------------------------------------------


class _SavePlanner(SavePlanner):
    """Tells DCP where the numbers of this rank's stretches belong. An item's index is its place in the stretches."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = stretches
        self.failure: Exception | None = None

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: all is known."""

    def create_local_plan(self) -> SavePlan:
        """This rank's items."""
        items = []
        for i, stretch in enumerate(self.stretches):
            properties = TensorProperties(dtype=stretch.values.dtype)
            for start in range(stretch.start, stretch.stop, ITEM_SIZE):
                offsets = torch.Size([start])
                chunk = ChunkStorageMetadata(offsets, torch.Size([min(ITEM_SIZE, stretch.stop - start)]))
                data = TensorWriteData(chunk, properties, torch.Size([stretch.size]))
                items.append(WriteItem(MetadataIndex(stretch.name, offsets, i), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each rank's items as they are, and what the checkpoint will hold; on the first rank only."""
        plans, metadata = create_default_global_save_plan(all_plans, rewrite_index_hints=False)
        try:
            for name, tensor in metadata.state_dict_metadata.items():
                assert isinstance(tensor, TensorStorageMetadata)
                _check_whole(name, tensor)
        except ValueError as error:  # kept, see _Writer
            self.failure = error
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The numbers of an item."""
        assert write_item.tensor_data is not None and write_item.index.index is not None
        stretch, chunk = self.stretches[write_item.index.index], write_item.tensor_data.chunk
        return stretch.values.narrow(0, chunk.offsets[0] - stretch.start, chunk.sizes[0])


def _check_whole(name: str, tensor: TensorStorageMetadata) -> None:
    """Nothing. Raises ValueError where the ranks do not save every number of a tensor exactly once: nothing could load it."""
    spans = sorted((chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in tensor.chunks)
    size = tensor.size[0]
    for (_, stop), (start, _) in pairwise([(0, 0), *spans, (size, size)]):
        if stop != start:
            problem = f"no rank saves numbers {stop} to {start}" if stop < start else f"two ranks save number {start}"
            raise ValueError(f"{name}: {problem} of its {size}")


class _File(io.BufferedWriter):
    """A file that may be flushed after it was closed, as DCP does after a failure, where Python would print a traceback."""

    def flush(self) -> None:
        if not self.closed:
            super().flush()


class _Files(FileSystem):
    """The files that DCP writes."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file to be written."""
        with _File(io.FileIO(path, mode)) as stream:
            yield stream


class _Writer(FileSystemWriter):
    """DCP's writer of files, which keeps a failure where DCP's raises it.

    DCP sends the other ranks the exception with its traceback, which torch 2.11 cannot under every Python 3.13; they would
    wait for it until their timeout. Nor does it send the exceptions that led to it, such as the full disk behind torch.save's
    RuntimeError.
    """

    failure: Exception | None = None

    def __init__(self, path: Path) -> None:
        # An item is copied from a GPU when its turn comes: a copy is fast beside a disk, and needs no CUDA on a CPU's run.
        super().__init__(path, per_thread_copy_ahead=0)
        self.fs = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """What was written where; nothing after a failure."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            self.failure = error
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing; writes what the checkpoint holds, on the first rank only."""
        try:
            names = {result.storage_data.relative_path for of_rank in results for result in of_rank}
            unseen = sorted(name for name in names if not (Path(self.path) / name).exists())
            if unseen:
                raise InputError(f"{Path(self.path).parent}: all workers must share this folder, but it lacks what some wrote")
            super().finish(metadata, results)
        except Exception as error:
            self.failure = self.failure or error


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
    name = f"step-{step:08d}"
    checkpoint, partial = folder / name, folder / f".{name}.partial"
    first = _is_first(process_group)

    def prepare() -> None:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            _tidy(folder)
            partial.mkdir()

    def write() -> None:
        planner = _SavePlanner(stretches)
        writer = _Writer(partial)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process only
            save_items({}, storage_writer=writer, planner=planner, process_group=process_group, no_dist=process_group is None)
        failure = writer.failure or planner.failure
        if failure is not None:
            raise failure

    def publish() -> None:
        if first:
            _write_facts(partial, step, facts)
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
        for work in (prepare, write, publish):
            _everywhere(work, process_group, checkpoint, "written")
    except Exception:
        if first:  # no rank writes any more: all have told how it went, or one is dead
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return checkpoint


def _write_facts(partial: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Nothing; writes the file that makes a checkpoint complete. It has the size of each other one, so that damage shows."""
    content = {
        "format": FORMAT,
        "step": step,
        "versions": {"motley": VERSION, "python": platform.python_version(), "torch": str(torch.__version__)},
        "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
        "facts": dict(facts),
    }
    write_file(partial / FACTS, json.dumps(content, indent=1) + "\n")
    _flush(partial / FACTS)
    _flush(partial)


# --- Loading ---------------------------------------------------------------------------------------------------------


class _LoadPlanner(LoadPlanner):
    """Tells DCP which saved numbers this rank's stretches want. An item's index is its place in the stretches.

    Raises InputError, when made, for numbers that the checkpoint does not hold.
    """

    def __init__(self, checkpoint: Path, stretches: Sequence[Stretch], metadata: Metadata) -> None:
        self.stretches = stretches
        self.items: list[ReadItem] = []
        spans: dict[str, list[tuple[int, int]]] = {}
        for i, stretch in enumerate(stretches):
            name = stretch.name
            saved = metadata.state_dict_metadata.get(name)
            if isinstance(saved, TensorStorageMetadata):
                if saved.size[0] != stretch.size:
                    raise InputError(
                        f"{checkpoint}: is of another model: {name} has {saved.size[0]} numbers there, but {stretch.size} here"
                    )
                if name not in spans:
                    spans[name] = sorted((chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in saved.chunks)
            self.items.extend(_read_items(checkpoint, stretch, i, spans.get(name, [])))

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing: all is known."""

    def create_local_plan(self) -> LoadPlan:
        """This rank's items."""
        return LoadPlan(self.items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: all items are tensors."""
        raise AssertionError(f"a checkpoint has tensors only, but {read_item} is none")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where the numbers of an item go."""
        assert read_item.dest_index.index is not None
        values = self.stretches[read_item.dest_index.index].values
        return values.detach().narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the numbers are in their place."""


def _read_items(checkpoint: Path, stretch: Stretch, index: int, spans: Sequence[tuple[int, int]]) -> Iterator[ReadItem]:
    """What to read for a stretch from the saved `(start, stop)` of its tensor. Raises InputError for numbers in none."""
    at = stretch.start
    for start, stop in spans[max(bisect_right(spans, at, key=lambda span: span[0]) - 1, 0) :]:
        if start > at or stop <= at or at >= stretch.stop:
            break
        end = min(stop, stretch.stop)
        yield ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(stretch.name, [stretch.start], index),
            dest_offsets=torch.Size([at - stretch.start]),
            storage_index=MetadataIndex(stretch.name, [start]),
            storage_offsets=torch.Size([at - start]),
            lengths=torch.Size([end - at]),
        )
        at = end
    if at < stretch.stop:
        raise InputError(f"{checkpoint}: holds no numbers {at} to {stretch.stop} of {stretch.name}")


class _Reader(FileSystemReader):
    """DCP's reader of files, which tells a damaged file in one line, and keeps that failure as `_Writer` does."""

    failure: Exception | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds."""
        try:
            return super().read_metadata(*args, **kwargs)
        except Exception as error:
            raise self._told(error) from None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Nothing; reads the numbers, as far as that goes."""
        try:
            return super().read_data(plan, planner)
        except Exception as error:
            self.failure = self._told(error)
            nothing: Future[None] = Future()
            nothing.set_result(None)
            return nothing

    def _told(self, error: Exception) -> Exception:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
            return error
        if isinstance(error, OSError):
            return InputError(f"{self.path}: cannot be read ({_reason(error)})")
        text = (str(error).splitlines() or [""])[0]
        return InputError(f"{self.path}: is damaged ({type(error).__name__}: {text})")


def load(checkpoint: Path, stretches: Sequence[Stretch], process_group: dist.ProcessGroup | None = None) -> None:
    """Nothing; fills the values of the stretches, whatever the stretches were that the checkpoint was saved with.

    Raises InputError where the checkpoint is damaged, is of another model, or lacks a number; the values are undefined then.
    """
    first = _is_first(process_group)
    reader = _Reader(checkpoint)

    def plan() -> _LoadPlanner:
        if first:
            _check_files(checkpoint)
        return _LoadPlanner(checkpoint, stretches, reader.read_metadata())

    planner = _everywhere(plan, process_group, checkpoint, "read")

    def read() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process only
            load_items({}, storage_reader=reader, planner=planner, process_group=process_group, no_dist=process_group is None)
        if reader.failure is not None:
            raise reader.failure

    _everywhere(read, process_group, checkpoint, "read")


def _check_files(checkpoint: Path) -> None:
    """Nothing. Raises InputError where a file of a checkpoint is missing, or is not as long as it was."""
    files = _read_table(checkpoint).table("files")
    for name in files.keys():  # noqa: SIM118
        path, size = checkpoint / name, files.integer(name)
        if not path.is_file():
            raise InputError(f"{checkpoint}: is damaged ({name} is missing)")
        if path.stat().st_size != size:
            raise InputError(f"{checkpoint}: is damaged ({name} has {path.stat().st_size} bytes, but was saved with {size})")
