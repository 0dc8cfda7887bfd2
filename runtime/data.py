"""The tokens that a run trains on: files of token ids or of text, the order of samples, and each pipeline's share.

A sample is a window of sequence_length + 1 tokens; window i starts at token i x sequence_length, so that each token but the
first is predicted once per epoch. Tensors are x_SB: sequence, batch.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from runtime.context_parallel import ContextGroup
from sim.spec.plan import Plan
from sim.spec.reading import InputError

INDEX_MAGIC = b"MMIDIDX\x00\x00"
"""How the .idx of Megatron-LM's indexed data sets begins. Source: megatron/core/datasets/indexed_dataset.py."""

INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of whole numbers by their code in an .idx; 6 and 7 are floating-point."""

INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, sequences, documents. Then, for each sequence, a 4-byte length and an 8-byte pointer."""

CHECKED_AT_OPENING = 2**26
"""Tokens of the largest file whose ids are all looked at when it is opened; of larger ones each window that is read is."""

BLOCK = 2**20
"""Tokens that are looked at in one go."""

OPEN_FILES = 64
"""Files that are mapped at a time."""

SNIFFED_BYTES = 1024
"""Of a file in a folder: where there is a zero byte among them, it is not text."""


@dataclass(frozen=True)
class _File:
    """One file of tokens: where it lies, their type, how many they are, and the first one's position in the stream."""

    path: Path
    dtype: np.dtype[np.integer]
    count: int
    start: int


class Tokens:
    """A stream of token ids over one or more files, with an id 0 between files, cut into samples.

    Files are memory-mapped, a few at a time, and never read whole. Raises InputError where the stream is shorter than one
    sample, where an id is not in the vocabulary, and where a file cannot be read.
    """

    def __init__(
        self, files: Sequence[tuple[Path, np.dtype[np.integer], int]], vocab: int, sequence_length: int, what: str
    ) -> None:
        """`files` are paths with the type and number of their tokens; `what` names the source in errors."""
        self.vocab, self.sequence_length = vocab, sequence_length
        starts = [0, *accumulate(count + 1 for _, _, count in files)]
        self._files = [_File(*file, start) for file, start in zip(files, starts, strict=False)]
        self._starts = np.array(starts[:-1], dtype=np.int64)
        self._maps: OrderedDict[Path, npt.NDArray[np.integer]] = OrderedDict()
        self.count = max(0, starts[-1] - 1)
        """Tokens of the whole stream."""
        if self.count < sequence_length + 1:
            raise InputError(
                f"{what}: has {self.count:,} tokens, but one sample of sequence length {sequence_length} needs "
                f"{sequence_length + 1:,}"
            )
        self.samples = (self.count - 1) // sequence_length
        """Windows of the stream."""
        for file in self._files:
            if file.count <= CHECKED_AT_OPENING and not self._fits(file.dtype):
                for start in range(0, file.count, BLOCK):
                    self._check(file, start, self._map(file)[start : start + BLOCK])

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """The sequence_length + 1 token ids of one sample: all but the last are its inputs, all but the first its labels."""
        if not 0 <= index < self.samples:
            raise IndexError(f"there are samples 0 to {self.samples - 1}, but not {index}")
        start = index * self.sequence_length
        stop = start + self.sequence_length + 1
        window_S = np.zeros(stop - start, dtype=np.int64)  # and what no file fills are the zeros between files
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for file in self._files[first:]:
            if file.start >= stop:
                break
            begin, end = max(start - file.start, 0), min(stop - file.start, file.count)
            if begin < end:
                ids = self._map(file)[begin:end]
                if not self._fits(file.dtype):
                    self._check(file, begin, ids)
                window_S[file.start + begin - start : file.start + end - start] = ids
        return window_S

    def _fits(self, dtype: np.dtype[np.integer]) -> bool:
        """Whether no number of this type can be outside the vocabulary."""
        limits = np.iinfo(dtype)
        return limits.min >= 0 and limits.max < self.vocab

    def _check(self, file: _File, start: int, ids: npt.NDArray[np.integer]) -> None:
        """Nothing; raises InputError for the first of some ids, at `start` of a file, that is not in the vocabulary."""
        if int(ids.max()) < self.vocab and int(ids.min()) >= 0:
            return
        at = int(np.argmax((ids >= self.vocab) | (ids < 0)))
        raise InputError(
            f"{file.path}: token {start + at:,} is {int(ids[at])}, but the vocabulary has {self.vocab:,} tokens, "
            f"0 to {self.vocab - 1}"
        )

    def _map(self, file: _File) -> npt.NDArray[np.integer]:
        """The tokens of one file, mapped."""
        found = self._maps.get(file.path)
        if found is None:
            try:
                found = np.memmap(file.path, dtype=file.dtype, mode="r", shape=(file.count,))
            except OSError as error:
                raise _unreadable(file.path, error) from None
            except ValueError:
                raise InputError(f"{file.path}: has become shorter than the {file.count:,} tokens that it had") from None
            self._maps[file.path] = found
            if len(self._maps) > OPEN_FILES:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(file.path)
        return found


# --- Opening ---------------------------------------------------------------------------------------------------------


def open_data(text: str, token_type: str, vocab: int, sequence_length: int) -> Tokens:
    """The tokens of `tokens:FILE`, or of `text:FILE` or `text:FOLDER`, whose tokens are bytes.

    A file of tokens holds them one after the other as nanoGPT writes them, in little-endian numbers of `token_type`: uint16,
    uint32, or auto, which is uint16 for a vocabulary of up to 65536. With an .idx beside the .bin it is an indexed data set
    of Megatron-LM; its type is what the .idx says, and all its documents are one stream. A folder of text is the stream of
    all its text files in the order of their paths, with a zero byte between them; hidden files and folders, and links to
    folders, are passed over.
    """
    kind, colon, place = text.partition(":")
    if not colon or kind not in ("tokens", "text") or not place or "\0" in place:
        raise InputError(f"data is tokens:FILE, text:FILE or text:FOLDER, but got {text!r}")
    path = Path(place)
    try:
        path = path.expanduser()
        if kind == "text":
            return _open_text(path, vocab, sequence_length)
        return _open_tokens(path, token_type, vocab, sequence_length)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of a user who is not there
        raise _unreadable(path, error) from None


def _open_tokens(path: Path, token_type: str, vocab: int, sequence_length: int) -> Tokens:
    """The tokens of a raw or an indexed file, given by the path of its .bin, of its .idx, or without either ending."""
    named = path.suffix in (".bin", ".idx")
    stem = path.with_suffix("") if named else path
    data, index = Path(f"{stem}.bin"), Path(f"{stem}.idx")
    indexed = path == index or index.exists()
    if not named and not data.exists():
        data, indexed = path, False
    size = _file_size(data)
    if indexed:
        dtype = _index_dtype(index, size)
    else:
        wide = token_type == "uint32" or (token_type == "auto" and vocab > 2**16)
        dtype = np.dtype("<u4" if wide else "<u2")
    if size % dtype.itemsize:
        raise InputError(f"{data}: has {size:,} bytes, which is no whole number of {dtype.name} tokens of {dtype.itemsize} bytes")
    return Tokens([(data, dtype, size // dtype.itemsize)], vocab, sequence_length, str(data))


def _index_dtype(path: Path, data_bytes: int) -> np.dtype[np.integer]:
    """The type of the tokens that an .idx describes. Raises InputError where it is not one, or not that of its .bin."""
    size = _file_size(path)
    with path.open("rb") as file:
        head = file.read(INDEX_HEADER.size)
        if not head.startswith(INDEX_MAGIC) or len(head) < INDEX_HEADER.size:
            raise InputError(f"{path}: is not the index of a Megatron-LM data set, which begins with {INDEX_MAGIC!r}")
        _, version, code, sequences, documents = INDEX_HEADER.unpack(head)
        if version != 1:
            raise InputError(f"{path}: expected an index of version 1, but got version {version}")
        if code not in INDEX_DTYPES:
            accepted = ", ".join(f"{known} ({np.dtype(name).name})" for known, name in INDEX_DTYPES.items())
            raise InputError(f"{path}: expected tokens of a type among {accepted}, but got the code {code}")
        if size < INDEX_HEADER.size + 12 * sequences + 8 * documents:
            raise InputError(f"{path}: ends too early: it has {size:,} bytes for {sequences:,} sequences")
        dtype, described = np.dtype(INDEX_DTYPES[code]), 0
        if sequences:
            file.seek(INDEX_HEADER.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", file.read(4))
            file.seek(INDEX_HEADER.size + 12 * sequences - 8)
            (pointer,) = struct.unpack("<q", file.read(8))
            described = pointer + length * dtype.itemsize
    if described != data_bytes:
        raise InputError(f"{path}: describes {described:,} bytes of tokens, but its .bin has {data_bytes:,}")
    return dtype


def _open_text(path: Path, vocab: int, sequence_length: int) -> Tokens:
    """The bytes of a file, or of all text files in a folder."""
    if vocab < 256:
        raise InputError(f"the tokens of a text are bytes, which need a vocabulary of at least 256, but got {vocab}")
    folder = path.is_dir()
    paths = sorted(_texts(path), key=lambda p: p.relative_to(path).as_posix()) if folder else [path]
    files = [(p, np.dtype("u1"), _file_size(p)) for p in paths]
    if folder and not any(size for _, _, size in files):
        raise InputError(f"{path}: this folder holds no text")
    return Tokens(files, vocab, sequence_length, str(path))


def _texts(folder: Path) -> Iterable[Path]:
    """The regular files below a folder, in no order, that are not hidden and begin like text. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(here, name) for name in names if not name.startswith(".")):
            if path.is_file():
                with path.open("rb") as file:
                    if b"\0" not in file.read(SNIFFED_BYTES):
                        yield path


def _file_size(path: Path) -> int:
    """Bytes of a regular file. Raises OSError where it cannot be read."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}, but a file was expected")
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _unreadable(path: Path, error: OSError | RuntimeError) -> InputError:
    """The error for a place that cannot be read: the one that the system names, or else `path`."""
    place, reason = path, str(error)
    if isinstance(error, OSError):
        place, reason = Path(error.filename or path), error.strerror or reason
    return InputError(f"{place}: cannot be read ({reason.lower()})")


# --- Who sees which sample -------------------------------------------------------------------------------------------


class Order:
    """The order in which a training sees the samples: each once per epoch, every epoch in an order of its own by the seed.

    It depends on the seed and the number of samples alone, so two plans of one global batch see the same samples at each step.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._epochs: OrderedDict[int, npt.NDArray[np.integer]] = OrderedDict()

    def sample(self, position: int) -> int:
        """The sample at a position, which counts samples from the start of the training on."""
        epoch, within = divmod(position, self._samples)
        order = self._epochs.get(epoch)
        if order is None:
            order = np.arange(self._samples, dtype=np.uint32 if self._samples <= 2**32 else np.uint64)
            np.random.default_rng((self._seed, epoch)).shuffle(order)
            self._epochs[epoch] = order
            if len(self._epochs) > 2:  # an iteration may straddle two
                self._epochs.popitem(last=False)
        return int(order[within])


class Batches:
    """The micro-batches of a plan's pipelines. An iteration takes the next global_batch samples of the order.

    Pipelines take theirs one after the other, and micro-batches follow one another within a pipeline. Of sequences that are
    divided over a `context` they are those tokens that one of its ranks has.
    """

    def __init__(self, tokens: Tokens, order: Order, plan: Plan, context: ContextGroup | None = None) -> None:
        assert tokens.sequence_length == plan.sequence_length
        self._tokens, self._order, self._plan, self._context = tokens, order, plan, context
        self._first = [0, *accumulate(pipeline.sequences for pipeline in plan.pipelines)]

    def micro_batch(
        self, consumed: int, pipeline: int, micro_batch: int, sequences: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens_SB, labels_SB): some sequences `(start, stop)` of one micro-batch, int64, contiguous.

        Where sequences come in slices, `micro_batch` counts slices, as in programs, and of the sequences it is that one's tokens.
        `consumed` is the number of samples that the training used before this iteration.
        """
        plan, (start, stop) = self._plan, sequences
        size, length = plan.pipelines[pipeline].micro_batch, plan.slice_length
        number, place = divmod(micro_batch, plan.sequence_slices)
        assert 0 <= start < stop <= size and 0 <= number < plan.pipelines[pipeline].micro_batches
        first, token = consumed + self._first[pipeline] + number * size, place * length
        window_SB = np.empty((length + 1, stop - start), dtype=np.int64)
        for column, position in enumerate(range(first + start, first + stop)):
            window_SB[:, column] = self._tokens.window(self._order.sample(position))[token : token + length + 1]
        both_SB = torch.from_numpy(window_SB)
        tokens_SB, labels_SB = both_SB[:-1], both_SB[1:]
        return (tokens_SB, labels_SB) if self._context is None else (self._context.rows(tokens_SB), self._context.rows(labels_SB))
