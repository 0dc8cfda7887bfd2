"""The numbers of a checkpoint, as torch.distributed.checkpoint (DCP) writes and reads them: one file per rank.

The planners here tell it where the numbers of each rank's stretches belong. See `runtime.checkpoints`, which alone imports this
module, and only to save or to load: torch takes as long to load this part as half of all else.
"""

from __future__ import annotations

import io
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from runtime.checkpoints import Stretch, reason
from sim.spec.reading import DISK_FAILURES, InputError

Value = TypeVar("Value")

ITEM_SIZE = 2**22
"""Numbers that are written as one item at most. DCP reads an item whole, however few of its numbers are wanted."""

# --- Ranks -----------------------------------------------------------------------------------------------------------


def everywhere(work: Callable[[], Value], process_group: dist.ProcessGroup | None, checkpoint: Path, done: str) -> Value:
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
            return InputError(f"{checkpoint}: cannot be {done} ({reason(cause)})")
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


# --- Writing ---------------------------------------------------------------------------------------------------------


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


def write_items(folder: Path, stretches: Sequence[Stretch], process_group: dist.ProcessGroup | None) -> None:
    """Nothing; writes this rank's stretches into a folder, and on the first rank what all have written.

    Raises what failed on this rank.
    """
    planner, writer = _SavePlanner(stretches), _Writer(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        save_items({}, storage_writer=writer, planner=planner, process_group=process_group, no_dist=process_group is None)
    failure = writer.failure or planner.failure
    if failure is not None:
        raise failure


# --- Reading ---------------------------------------------------------------------------------------------------------


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
            return InputError(f"{self.path}: cannot be read ({reason(error)})")
        text = (str(error).splitlines() or [""])[0]
        return InputError(f"{self.path}: is damaged ({type(error).__name__}: {text})")


class Items:
    """What the stretches of this rank want of a checkpoint. Raises InputError, when made, for what it does not hold."""

    def __init__(self, checkpoint: Path, stretches: Sequence[Stretch]) -> None:
        self._reader = _Reader(checkpoint)
        self._planner = _LoadPlanner(checkpoint, stretches, self._reader.read_metadata())

    def read(self, process_group: dist.ProcessGroup | None) -> None:
        """Nothing; fills the stretches, as all ranks do together. Raises what failed here."""
        reader, planner, alone = self._reader, self._planner, process_group is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process only
            load_items({}, storage_reader=reader, planner=planner, process_group=process_group, no_dist=alone)
        if reader.failure is not None:
            raise reader.failure
