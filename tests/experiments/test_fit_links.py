"""The fit of links: that it finds constants again from times made with them, what it reads, and what the shipped file says."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.fit_links import DATA_SETS, Measurement, fit_links, measurements, predicted_s
from sim.spec.cluster import links
from sim.spec.reading import InputError

MICROBENCH = Path(__file__).parents[2] / "experiments" / "data" / "microbench.csv"
HEADER = "device,op,shape,value,unit,source,notes,trust\n"
A100_8, A100_2 = "A100-SXM4-80GB (Azure ND A100 v4) x8", "A100 x2 NVLink (single node)"
H200_8, RTX4090_4 = "H200-SXM-141GB (Azure ND H200 v5) x8", "RTX4090 x4 (P2P-enabled driver)"


def written(path: Path, *rows: tuple[str, str, str, float]) -> Path:
    """A file of (device, operation, shape, value) in GB/s."""
    file = path / "microbench.csv"
    lines = (f'"{device}",{operation},"{shape}",{value!r},GB/s,,,A\n' for device, operation, shape, value in rows)
    file.write_text(HEADER + "".join(lines))
    return file


def test_sizes_are_read_as_they_are_told(tmp_path: Path) -> None:
    reduce = "nccl all_reduce busbw"
    told = [
        (A100_8, "132K", 2**17),
        (A100_8, "33M", 2**25),
        (RTX4090_4, "64MiB", 2**26),
        (A100_2, "1048576 bytes, 2 GPUs", 2**20),
    ]
    found = measurements(written(tmp_path, *((device, reduce, shape, 10.0) for device, shape, _ in told)))
    assert [one.num_bytes for one in found] == [num_bytes for _, _, num_bytes in told]
    # A bus bandwidth of 10 GB/s: 2 (n-1)/n of the tensor go by at that rate.
    ranks = [8, 8, 4, 2]
    assert [one.seconds for one in found] == pytest.approx(
        [2 * (n - 1) / n * one.num_bytes / 10e9 for n, one in zip(ranks, found, strict=True)]
    )


def test_the_fit_finds_the_constants_of_made_up_machines_again(tmp_path: Path) -> None:
    efficiency = {**links().efficiency, "nvlink": 0.6, "nvls": 0.5, "pcie": 0.4}
    true = replace(links(), efficiency=efficiency, start_s=50e-6, step_s=8e-6)
    by_device = {data.name: data for data in DATA_SETS if data.operation == "nccl all_reduce busbw"}
    rows = []
    for name, device, n, sizes in (
        ("A100 x8, Azure", A100_8, 8, range(14, 33)),
        ("A100, vTrain", A100_2, 2, range(14, 33)),
        ("H200 x8, Azure", H200_8, 8, range(14, 33)),
        ("RTX 4090 x4, tinygrad", RTX4090_4, 4, range(14, 33)),
    ):
        for size in sizes:
            data = by_device[name]
            (seconds,) = predicted_s([Measurement(data, n, 2.0**size, 1.0)], true, {})
            rows.append((device, data.operation, f"{2**size} bytes", 2 * (n - 1) / n * 2**size / seconds / 1e9))
    found, fabrics, errors = fit_links(written(tmp_path, *rows))
    assert fabrics == {}
    assert [found.efficiency[key] for key in ("nvlink", "nvls", "pcie")] == pytest.approx([0.6, 0.5, 0.4], rel=1e-3)
    assert (found.start_s, found.step_s) == pytest.approx((50e-6, 8e-6), rel=1e-2)
    assert max(error.mean for error in errors) < 1e-3 < min(error.mean_before for error in errors)
    assert sum(error.count for error in errors) == len(rows)


def test_the_shipped_constants_are_those_that_fit_the_measurements() -> None:
    found, fabrics, errors = fit_links(MICROBENCH)
    for key, value in links().efficiency.items():
        assert found.efficiency[key] == pytest.approx(value, rel=0.02)
    assert (found.start_s, found.step_s) == pytest.approx((links().start_s, links().step_s), rel=0.02)
    assert set(fabrics) == {"EFA of p4de", "EFA of p5"}
    large = [error for error in errors if error.fitted and error.large]
    assert sum(error.count * error.mean_before for error in large) / sum(error.count for error in large) < 0.12


def test_a_file_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no row of the collectives"):
        fit_links(written(tmp_path, ("RTX 4090", "GEMM", "1024x1024x1024", 100.0)))
