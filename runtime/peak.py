"""What a device can do at most: the peak FLOP/s of its kind, or measured on a CPU, and the peak bytes that a run held."""

from __future__ import annotations

import contextlib
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from runtime.settings import DTYPES
from sim.spec.gpu import catalogue, fold

SIZES = (512, 768, 1024)
"""Rows of the square matrices that a CPU multiplies: large enough for its best rate, small enough for a short measurement."""

MEMORY_TOLERANCE = 0.1
"""How far a GPU's memory may be from its kind's. The driver keeps up to 3 %, error correction takes 6 % of an A6000, and the
nearest two kinds that one name stands for (H100 of 80 and of 96 GB) are 17 % apart."""


# --- FLOP/s ----------------------------------------------------------------------------------------------------------


def _alone() -> None:
    """Nothing; there are no others to begin with."""


def peak_flop_per_s(device: torch.device, precision: str, together: Callable[[], None] = _alone) -> tuple[float | None, bool]:
    """The device's peak FLOP/s at a precision, and whether it was measured.

    Of a GPU the figure of its kind in the catalogue, None where its kind or the precision is not there. Of a CPU, which no
    catalogue knows, the best that this process reaches, with the threads it has.
    """
    if device.type != "cuda":
        return measured_peak_flop_per_s(DTYPES[precision], together=together), True
    properties = torch.cuda.get_device_properties(device)
    kind = gpu_kind_name(properties.name, properties.total_memory)
    return (None if kind is None else catalogue()[kind].peak_flop_per_s.get(precision)), False


def measured_peak_flop_per_s(dtype: torch.dtype, seconds: float = 0.8, together: Callable[[], None] = _alone) -> float:
    """The FLOP/s of square matmuls on this CPU, of the size that is best in short trials, held for three quarters of `seconds`.

    The rate is that over all this time, not of the fastest product: where several workers that share cores measure at once,
    their rates sum to what the machine has, if `together`, which is called before, has them all begin at once. A larger size is
    passed over where it would take much longer than a trial, as in fp16 without instructions for it.
    """
    generator = torch.Generator().manual_seed(0)
    rates: dict[int, float] = {}
    for size in SIZES:
        if rates and 2 * size**3 / max(rates.values()) > seconds:
            break
        rates[size] = _held_rate(size, dtype, seconds / 4 / len(SIZES), generator)
    together()
    return _held_rate(max(rates, key=lambda size: rates[size]), dtype, seconds * 3 / 4, generator)


def _held_rate(size: int, dtype: torch.dtype, seconds: float, generator: torch.Generator) -> float:
    """FLOP/s of square matmuls of a size over `seconds`."""
    a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    product = torch.mm(a, b)  # the first one chooses a kernel and touches the memory
    count, elapsed_s, start_s = 0, 0.0, time.perf_counter()
    while elapsed_s < seconds:
        torch.mm(a, b, out=product)
        count += 1
        elapsed_s = time.perf_counter() - start_s
    return 2 * size**3 * count / elapsed_s


# --- Names -----------------------------------------------------------------------------------------------------------


def gpu_kind_name(name: str, total_memory_bytes: int) -> str | None:
    """The catalogue's kind of a GPU that torch names so and gives this memory; None where it is not there.

    Where the name fits kinds of several sizes, or says another size than there is ("GH200 480GB" counts the host's), the
    memory decides. A name that says more than a kind's (a laptop's GPU, a part of a GPU) is no name of it.
    """
    named, sized = fold(name), _without_size(name)
    spellings = {kind.name: (kind.name, *kind.aliases) for kind in catalogue().values()}
    exact = [kind for kind, known in spellings.items() if named in map(fold, known)]
    alike = [kind for kind, known in spellings.items() if sized in map(_without_size, known)]
    for kind in exact + alike:
        expected = catalogue()[kind].memory_bytes
        if abs(total_memory_bytes - expected) <= MEMORY_TOLERANCE * expected:
            return kind
    return None


def _without_size(name: str) -> str:
    """The folded name without its words that say a size of memory, such as 80GB."""
    return fold(re.sub(r"(?<![^\s_-])\d+\s?GB?(?![^\s_-])", "", name, flags=re.IGNORECASE))


def hardware_name(device: torch.device) -> str:
    """The name of the GPU, or of the machine's CPU, as the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        model = re.search(r"^model name\s*:\s*(\S.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        model = None
    return model[1].strip() if model else platform.processor() or platform.machine()


# --- Bytes -----------------------------------------------------------------------------------------------------------

_PROCESS = Path("/proc/self")

_watched_from_bytes = (0, 0)
"""`_resident_bytes` when `start_memory_watch` was called. They are the whole process's, so there is one record of them."""


def start_memory_watch() -> None:
    """Nothing; from now on `memory_peak_bytes` of a CPU counts what the process takes beyond what it has now."""
    global _watched_from_bytes
    with contextlib.suppress(OSError):  # where the system refuses it, an earlier peak stays
        (_PROCESS / "clear_refs").write_text("5")  # the peak begins anew: proc(5)
    _watched_from_bytes = _resident_bytes()


def memory_peak_bytes(device: torch.device) -> int:
    """The most bytes that this process has had on the device.

    On a GPU what torch's allocator reserved, not only what tensors filled: that is what others could not have, and what the
    simulator's peak, which counts fragmentation, stands for. The CUDA context is not in it. On a CPU the growth of the
    process's resident memory since `start_memory_watch`.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    (before, peak_before), (now, peak) = _watched_from_bytes, _resident_bytes()
    # A peak from before the watch says nothing of what came since; then the present bytes are all that is known.
    return max(0, (peak if peak > peak_before else now) - before)


def _resident_bytes() -> tuple[int, int]:
    """The process's resident bytes now and at their peak; twice the peak where the system does not tell the present ones."""
    try:
        status = _status()
        return status["VmRSS"], status["VmHWM"]
    except (OSError, KeyError):
        import resource  # not on every system that has torch

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak


def _status() -> Mapping[str, int]:
    """The bytes of the lines of /proc/self/status that are in kB."""
    lines = re.findall(r"^(\w+):\s*(\d+) kB$", (_PROCESS / "status").read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}
