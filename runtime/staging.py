"""Numbers on their way between a GPU and the host's memory: in chunks, through page-locked buffers, beside the processors' work.

From and to memory that is not page-locked a GPU copies through a buffer of its driver, at a fraction of the link's rate, and
the caller waits. On a CPU, where all numbers are in the host's memory already, nothing is copied that need not be.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK = 2**24
"""Numbers in a buffer: enough for the link's whole rate, and few beside what an optimizer keeps."""


class _Buffers:
    """Two page-locked buffers, used in turn: while one is being copied, the processors have the other."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._both = [torch.empty(CHUNK, dtype=dtype, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def next(self, count: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The first numbers of the buffer whose turn it is, once nothing copies from or to it any more, and what tells of it."""
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        event.synchronize()
        return self._both[self._turn][:count], event


class Staging:
    """The way of one device's numbers to the host and back."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], _Buffers] = {}

    def brought(self, source: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Of every chunk of a flat tensor its first place and the one behind it, and its numbers in the host's memory.

        They are there until the next chunk is asked for, whose copy goes on meanwhile.
        """
        if source.device.type != "cuda":
            yield 0, len(source), source
            return
        buffers = self._of("down", source.dtype)
        waiting: list[tuple[int, int, torch.Tensor, torch.cuda.Event]] = []
        for begin in range(0, len(source), CHUNK):
            end = min(begin + CHUNK, len(source))
            buffer, event = buffers.next(end - begin)
            buffer.copy_(source[begin:end], non_blocking=True)
            event.record()
            waiting.append((begin, end, buffer, event))
            if len(waiting) == 2:
                yield self._here(waiting.pop(0))
        for one in waiting:
            yield self._here(one)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Nothing; copies a flat tensor to its place on the device, in the precision there.

        What the device does next finds it; of one in the host's memory the caller need not wait.
        """
        if target.device.type != "cuda" or source.device.type == "cuda":
            target.copy_(source)
            return
        buffers = self._of("up", target.dtype)
        for begin in range(0, len(source), CHUNK):
            end = min(begin + CHUNK, len(source))
            buffer, event = buffers.next(end - begin)
            buffer.copy_(source[begin:end])
            target[begin:end].copy_(buffer, non_blocking=True)
            event.record()

    def _of(self, way: str, dtype: torch.dtype) -> _Buffers:
        """The buffers of a way and a precision."""
        if (way, dtype) not in self._buffers:
            self._buffers[way, dtype] = _Buffers(dtype)
        return self._buffers[way, dtype]

    @staticmethod
    def _here(chunk: tuple[int, int, torch.Tensor, torch.cuda.Event]) -> tuple[int, int, torch.Tensor]:
        """A chunk whose copy has ended."""
        begin, end, buffer, event = chunk
        event.synchronize()
        return begin, end, buffer
