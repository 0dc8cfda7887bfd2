"""The names of GPUs, the peak of a CPU on a clock turned by hand, and the bytes of a process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime import peak
from runtime.peak import gpu_kind_name, hardware_name, measured_peak_flop_per_s, memory_peak_bytes, peak_flop_per_s
from sim.spec.gpu import catalogue

CPU = torch.device("cpu")
MIB = 2**20


# --- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total_mib", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", 81_051, "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", 40_326, "A100-40GB-SXM"),
        ("NVIDIA A100-PCIE-40GB", 40_326, "A100-40GB-PCIe"),
        ("NVIDIA A100 80GB PCIe", 81_038, "A100-80GB-PCIe"),
        ("NVIDIA A800-SXM4-80GB", 81_051, "A800-80GB-SXM"),
        ("NVIDIA H100 80GB HBM3", 81_008, "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", 81_008, "H100-80GB-PCIe"),
        ("NVIDIA H100 NVL", 95_320, "H100-NVL"),
        ("NVIDIA H200", 143_156, "H200"),
        ("NVIDIA H20", 97_280, "H20"),
        ("NVIDIA GH200 480GB", 96_768, "GH200-96GB"),
        ("NVIDIA GH200 480GB", 144_384, "GH200-144GB"),
        ("NVIDIA GH200 120GB", 96_768, "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", 144_384, "GH200-144GB"),
        ("NVIDIA B200", 182_643, "B200"),
        ("NVIDIA B300 SXM6 AC", 274_000, "B300"),
        ("Tesla V100-SXM2-16GB", 16_151, "V100-16GB-SXM"),
        ("Tesla V100-SXM2-32GB", 32_494, "V100-32GB-SXM"),
        ("Tesla V100-PCIE-16GB", 16_151, "V100-16GB-PCIe"),
        ("Tesla T4", 14_910, "T4"),
        ("Tesla P40", 22_912, "P40"),
        ("Tesla P100-PCIE-16GB", 16_276, "P100-16GB-PCIe"),
        ("NVIDIA A10G", 22_503, "A10G"),
        ("NVIDIA A10", 22_503, "A10"),
        ("NVIDIA A40", 45_416, "A40"),
        ("NVIDIA L4", 22_490, "L4"),
        ("NVIDIA L40", 45_373, "L40"),
        ("NVIDIA L40S", 45_373, "L40S"),
        ("NVIDIA RTX A6000", 48_567, "A6000"),
        ("NVIDIA RTX A6000", 45_500, "A6000"),  # with error correction
        ("NVIDIA RTX A4000", 16_101, "A4000"),
        ("NVIDIA GeForce RTX 4090", 24_081, "RTX4090"),
        ("NVIDIA GeForce RTX 3090", 24_253, "RTX3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 24_250, "RTX3090Ti"),
        ("NVIDIA GeForce RTX 5090", 32_109, "RTX5090"),
        ("NVIDIA GeForce RTX 5060 Ti", 15_848, "RTX5060Ti"),
        ("NVIDIA GeForce RTX 2080 Ti", 11_003, "RTX2080Ti"),
        ("NVIDIA TITAN RTX", 24_219, "TITAN-RTX"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97_249, "RTX-PRO-6000"),
        ("AMD Instinct MI300X", 196_592, "MI300X"),
        ("NVIDIA RTX 6000 Ada Generation", 48_640, "RTX-6000-Ada"),
        ("Quadro RTX 6000", 24_220, "Quadro-RTX6000"),
        ("NVIDIA GeForce RTX 4090 D", 24_081, "RTX4090D"),
        # Not in the catalogue, however like its names they are:
        ("NVIDIA RTX 5880 Ada Generation", 48_640, None),
        ("Quadro RTX 5000", 16_125, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_076, None),
        ("NVIDIA GeForce RTX 4060 Ti", 7_806, None),
        ("NVIDIA GeForce RTX 5060 Ti", 7_800, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864, None),
        ("NVIDIA H100", 95_320, None),
        ("", 0, None),
    ],
)
def test_the_kind_of_a_gpu_is_known_by_what_the_driver_calls_it(name: str, total_mib: int, kind: str | None) -> None:
    assert gpu_kind_name(name, total_mib * MIB) == kind


def test_every_name_of_the_catalogue_with_its_memory_is_its_kind() -> None:
    for kind in catalogue().values():
        for name in (kind.name, f"NVIDIA {kind.name.replace('-', ' ')}", *kind.aliases):
            assert gpu_kind_name(name, round(0.97 * kind.memory_bytes)) == kind.name


@pytest.mark.parametrize(("name", "kind"), [("A100", "A100-40GB-SXM"), ("V100-SXM2", None), ("A100-PCIe", "A100-40GB-PCIe")])
def test_where_a_name_says_no_size_the_memory_does(name: str, kind: str | None) -> None:
    assert gpu_kind_name(name, 40 * 2**30) == kind
    if kind is not None:
        assert gpu_kind_name(name, 80 * 2**30) == kind.replace("40", "80")


class Properties:
    """What torch says of a GPU."""

    def __init__(self, name: str, total_memory: int) -> None:
        self.name, self.total_memory = name, total_memory


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H200", "tf32", 494.7e12),
        ("NVIDIA H200", "fp64", None),
        ("An unknown GPU", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_is_the_catalogues(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, expected: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties(name, 143_156 * MIB))
    assert peak_flop_per_s(torch.device("cuda", 0), precision) == (expected, False)


# --- A measured peak -------------------------------------------------------------------------------------------------


def slow_matmul(monkeypatch: pytest.MonkeyPatch, rate: Callable[[int], float]) -> list[int]:
    """The sizes that are multiplied from now on, on a clock that goes on only by that, at `rate(size)` FLOP/s."""
    now_s, multiplied = [0.0], list[int]()

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        now_s[0] += 2 * a.shape[0] ** 3 / rate(a.shape[0])
        multiplied.append(a.shape[0])
        return torch.zeros_like(a) if out is None else out

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    return multiplied


def test_the_measured_peak_is_that_of_the_best_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {512: 1e11, 768: 3e11, 1024: 2e11}
    multiplied = slow_matmul(monkeypatch, rates.__getitem__)
    assert measured_peak_flop_per_s(torch.float32, seconds=0.3) == pytest.approx(3e11, rel=1e-9)
    assert {size: multiplied.count(size) > 2 for size in rates} == dict.fromkeys(rates, True)
    assert multiplied[-10:] == [768] * 10
    assert 0.3 <= time.perf_counter() < 0.35


def test_a_slow_precision_does_not_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = slow_matmul(monkeypatch, lambda size: 1e9)
    assert measured_peak_flop_per_s(torch.float16, seconds=0.3) == pytest.approx(1e9, rel=1e-9)
    assert set(multiplied) == {512}  # one of 768 would take 0.9 s


def test_a_worker_that_shares_its_core_is_measured_at_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every second product is stopped half way for as long as two take, because another worker has the core.
    calls = iter(range(10**6))
    slow_matmul(monkeypatch, lambda size: 4e11 if next(calls) % 2 else 4e11 / 3)
    assert measured_peak_flop_per_s(torch.float32) == pytest.approx(2e11, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp64"])
def test_a_cpu_is_measured_in_every_precision_of_the_runtime(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    seen: list[torch.dtype] = []
    multiply = torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(a.dtype)
        return multiply(a, b) if out is None else multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setattr(peak, "SIZES", (64,))
    reached, measured = peak_flop_per_s(CPU, precision)
    assert measured
    assert reached is not None and reached > 1e6
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(precision, torch.float32)
    assert set(seen) == {expected}


# --- Bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_what_a_process_took_and_gave_back_stays_in_its_peak_until_the_next_watch() -> None:
    peak.start_memory_watch()
    torch.ones(64 * MIB // 4)
    assert 60 * MIB < memory_peak_bytes(CPU) < 100 * MIB
    peak.start_memory_watch()
    assert memory_peak_bytes(CPU) < 30 * MIB


def write_status(folder: Path, resident_kib: int, peak_kib: int) -> None:
    (folder / "status").write_text(f"Name:\tpython\nVmPeak:\t  99999 kB\nVmHWM:\t  {peak_kib} kB\nVmRSS:\t  {resident_kib} kB\n")


def test_where_the_peak_cannot_begin_anew_an_earlier_one_is_not_taken_for_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clear_refs").mkdir()  # cannot be written
    monkeypatch.setattr(peak, "_PROCESS", tmp_path)
    monkeypatch.setattr(peak, "_watched_from_bytes", (0, 0))
    write_status(tmp_path, 100, 700)
    peak.start_memory_watch()
    write_status(tmp_path, 350, 700)
    assert memory_peak_bytes(CPU) == 250 * 1024
    write_status(tmp_path, 50, 700)
    assert memory_peak_bytes(CPU) == 0
    write_status(tmp_path, 350, 900)
    assert memory_peak_bytes(CPU) == 800 * 1024


def test_where_there_is_no_proc_the_systems_own_peak_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")

    class Usage:
        ru_maxrss = 5000

    monkeypatch.setattr(peak, "_PROCESS", tmp_path / "absent")
    monkeypatch.setattr(peak, "_watched_from_bytes", (0, 0))
    monkeypatch.setattr(resource, "getrusage", lambda _: Usage)
    for platform, unit in (("linux", 1024), ("darwin", 1)):
        monkeypatch.setattr(sys, "platform", platform)
        Usage.ru_maxrss = 5000
        peak.start_memory_watch()
        Usage.ru_maxrss = 7000
        assert memory_peak_bytes(CPU) == 2000 * unit


def test_the_peak_of_a_gpu_is_what_the_allocator_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: {"cuda:1": 77}[str(device)])
    assert memory_peak_bytes(torch.device("cuda", 1)) == 77


def test_the_cpu_has_a_name() -> None:
    name = hardware_name(CPU)
    assert name == name.strip() != ""
    assert "\n" not in name
