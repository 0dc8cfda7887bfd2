"""Fits the constants of links (`links` of sim/spec/constants.yaml) on published measurements of collectives and messages.

Every measurement is of one collective, or message, alone on links of known nominal rates. The constants are those that make
`sim.cost.collectives` tell its seconds, by least squares on their logarithms.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from sim.cost.collectives import collective, ring_exchange
from sim.cost.network import Network
from sim.spec.cluster import PCIE_BYTES_PER_S, Cluster, Fabric, Intra, Links, Nic, Node, links
from sim.spec.gpu import gpu_kind
from sim.spec.reading import InputError, read_rows

BUS_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""A bus bandwidth is so many times (n-1)/n of the tensor's bytes, per second of the collective (nccl-tests, PERFORMANCE.md)."""

SMALL_BYTES = 65_536
"""Sizes from here on count as large in the table of errors."""

LARGE_BYTES = 2.0**30
"""A size that is told as large."""

LEAST_FIT_BYTES = 1_024
"""Smaller tensors than this decide nothing in training."""


@dataclass(frozen=True)
class Setup:
    """The machines that a data set was measured on: equal nodes, and what lies between them."""

    gpu: str
    intra: str
    gpus: int = 8
    nodes: int = 1
    nic: str = "infiniband"
    nic_bytes_per_s: float = 0.0
    """Of each card; a GPU has one of its own."""
    nics: int = 8
    fabric: str = ""
    """The name under which the latency and step between its nodes are fitted."""


@dataclass(frozen=True)
class DataSet:
    """Measurements of one operation: which rows of the file, on what, whether they decide the constants, and what they are."""

    name: str
    operation: str
    """The beginning of the rows' `op`."""
    device: str
    """A regular expression for the rows' `device`; a group `n` is the number of GPUs."""
    setup: Setup
    kind: str
    fitted: bool = True


@dataclass(frozen=True)
class Measurement:
    """One collective or message of `num_bytes` over `devices` GPUs (0: all of the machines), and its seconds."""

    data: DataSet
    devices: int
    num_bytes: float
    seconds: float


_A100, _V100 = Setup("A100-80GB-SXM", "nvswitch"), Setup("V100-32GB-SXM", "nvlink")
_H100, _H200, _B200 = Setup("H100-80GB-SXM", "nvswitch"), Setup("H200", "nvswitch"), Setup("B200", "nvswitch")
_P4DE = Setup("A100-80GB-SXM", "nvswitch", nodes=2, nic="roce", nic_bytes_per_s=12.5e9, nics=4, fabric="EFA of p4de")
_P5 = Setup("H100-80GB-SXM", "nvswitch", nodes=2, nic="roce", nic_bytes_per_s=50e9, fabric="EFA of p5")
_P6 = Setup("B200", "nvswitch", nodes=4, nic="roce", nic_bytes_per_s=50e9, fabric="EFA of p5")

DATA_SETS = (
    DataSet("A100, vTrain", "nccl all_reduce busbw", r"A100 x(?P<n>\d) NVLink \(single node\)", _A100, "all_reduce"),
    DataSet("A100 x8, ml-engineering", "nccl all_reduce busbw", r"A100 x8 \(1 node.*", _A100, "all_reduce"),
    DataSet("A100 x8, Azure", "nccl all_reduce busbw", r"A100.*Azure.*x8", _A100, "all_reduce"),
    DataSet("A100, Galvatron", "allreduce time", r"8-GPU A100-class node", _A100, "all_reduce"),
    DataSet("H100 x8, Azure", "nccl all_reduce busbw", r"H100.*Azure.*x8", _H100, "all_reduce"),
    DataSet("H200 x8, Azure", "nccl all_reduce busbw", r"H200.*Azure.*x8", _H200, "all_reduce"),
    DataSet("H200 x8, ml-engineering", "all_reduce busbw (torch, NVLS)", r"H200 x8 .*", _H200, "all_reduce"),
    DataSet("H200, distca", "nccl all_reduce busbw", r"H200 x(?P<n>\d) \(1 node.*", _H200, "all_reduce"),
    DataSet("H200, distca", "nccl all_gather busbw", r"H200 x(?P<n>\d) \(1 node.*", _H200, "all_gather"),
    DataSet("H200, distca", "nccl reduce_scatter busbw", r"H200 x(?P<n>\d) \(1 node.*", _H200, "reduce_scatter"),
    DataSet("B200 x8, ml-engineering", "all_reduce busbw (torch)", r"B200 x8 .*", _B200, "all_reduce"),
    DataSet("V100 x8, vTrain", "nccl all_reduce busbw", r"V100 x(?P<n>8) NVLink \(single node\)", _V100, "all_reduce"),
    DataSet("V100 x8, Aceso", "nccl all_reduce time", r"V100-32GB x(?P<n>8) .*", _V100, "all_reduce"),
    DataSet("2 x p4de", "nccl all_reduce busbw", r"2x p4de.*", _P4DE, "all_reduce"),
    DataSet("2 x p5", "nccl all_reduce busbw", r"2x p5\S* \(H100, EFA 3200Gb/s\)", _P5, "all_reduce"),
    DataSet(
        "RTX 4090 x4, tinygrad", "nccl all_reduce busbw", r"RTX4090 x(?P<n>4) .*", Setup("RTX4090", "pcie4", 4), "all_reduce"
    ),
    DataSet("RTX 5090, NCCL 1639", "nccl all_reduce busbw", r"RTX5090 x(?P<n>\d)", Setup("RTX5090", "pcie5"), "all_reduce"),
    # Not fitted: links of a cube-mesh, lists of tensors that are copied, or a size, rate or size of machine that is not told.
    DataSet(
        "V100 x2-7, vTrain", "nccl all_reduce busbw", r"V100 x(?P<n>[2-7]) NVLink \(single node\)", _V100, "all_reduce", False
    ),
    DataSet("V100 x2-4, Aceso", "nccl all_reduce time", r"V100-32GB x(?P<n>[24]) .*", _V100, "all_reduce", False),
    DataSet("V100, Aceso", "nccl all_gather time", r"V100-32GB x(?P<n>\d) .*", _V100, "all_gather", False),
    DataSet("V100, Aceso", "nccl reduce_scatter time", r"V100-32GB x(?P<n>\d) .*", _V100, "reduce_scatter", False),
    DataSet("V100, Aceso", "nccl all_to_all time", r"V100-32GB x(?P<n>\d) .*", _V100, "all_to_all", False),
    DataSet("V100, Aceso", "p2p send/recv bandwidth", r"V100-32GB x8 .*intra-node", _V100, "message", False),
    DataSet("2 x p5, k8s", "nccl all_reduce busbw", r"2x p5.*k8s", _P5, "all_reduce", False),
    DataSet("4 x p6-b200", "all_reduce busbw (torch)", r"B200 x32 .*", _P6, "all_reduce", False),
)


# --- Measurements ------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 1e6, "bytes": 1}


def measurements(path: str | Path) -> list[Measurement]:
    """The measurements of a file of micro-benchmarks that the data sets above name. Raises InputError where none is there."""
    found = read_rows(path, _measured)
    if not found:
        raise InputError(f"{path}: has no row of the collectives that the links are fitted on")
    return found


def _measured(row: Mapping[str, str]) -> Iterator[Measurement]:
    """What a row tells of the data set that it belongs to, if any."""
    for data in DATA_SETS:
        of = re.fullmatch(data.device, row["device"])
        num_bytes = _size(row["shape"])
        if of is None or not row["op"].startswith(data.operation) or num_bytes is None or num_bytes < LEAST_FIT_BYTES:
            continue
        n = int(of.groupdict().get("n") or 0)
        if told := re.match(r"allreduce_size_(\d+)_", row["shape"]):
            n = int(told[1])
        value, ranks = float(row["value"]), n or data.setup.gpus * data.setup.nodes
        if row["unit"] == "ms":
            seconds = value / 1e3
        elif data.kind == "message":
            seconds = num_bytes / (value * 1e9)
        else:
            seconds = BUS_ROUNDS[data.kind] * (ranks - 1) / ranks * num_bytes / (value * 1e9)
        if value >= 0.1 or row["unit"] == "ms":  # rates below have one digit
            if row["op"] == "nccl all_gather time":
                num_bytes *= ranks  # the size that is told is of what each brings
            yield Measurement(data, n, num_bytes, seconds)
        return


def _size(shape: str) -> float | None:
    """The bytes that a row's shape begins with; those in K, M and G are rounded powers of two."""
    if shape == "large":
        return LARGE_BYTES
    told = re.match(r"(?:allreduce_size_\d+_)?(\d+(?:\.\d+)?) ?(KiB|MiB|GiB|MB|bytes|K|M|G)(?:\b|_)", shape)
    if told is None:
        return None
    num_bytes = float(told[1]) * _UNITS[told[2]]
    return 2.0 ** round(math.log2(num_bytes)) if told[2] in ("K", "M", "G") else num_bytes


# --- Predictions -------------------------------------------------------------------------------------------------------


def predicted_s(
    measured: Sequence[Measurement], constants: Links, fabrics: Mapping[str, tuple[float, float, float]]
) -> list[float]:
    """Seconds of each measurement by these constants; `fabrics` are latency, step and efficiency between nodes."""
    networks: dict[Setup, Network] = {}
    found = []
    for one in measured:
        setup = one.data.setup
        if setup not in networks:
            networks[setup] = Network(_cluster(setup, constants, fabrics.get(setup.fabric)))
        network = networks[setup]
        names = [device.name for device in network.cluster.devices[: one.devices or None]]
        if one.data.kind == "message":
            transfer = ring_exchange(network, names[:2], one.num_bytes, 1)
        else:
            transfer = collective(network, one.data.kind, names, one.num_bytes)
        found.append(network.alone_s(transfer))
    return found


def _cluster(setup: Setup, constants: Links, own: tuple[float, float, float] | None) -> Cluster:
    gpu = gpu_kind(setup.gpu)
    rate = gpu.nvlink_bytes_per_s if setup.intra.startswith("nv") else PCIE_BYTES_PER_S[setup.intra]
    assert rate is not None
    intra = Intra(
        setup.intra,
        rate,
        gpus_per_switch=8,
        host_bandwidth_bytes_per_s=rate,
        latency_s=constants.latency_s[setup.intra],
        step_s=constants.step_s,
    )
    nic = Nic(setup.nic, setup.nic_bytes_per_s, setup.nics) if setup.nodes > 1 else None
    nodes = tuple(Node(f"n{i}", gpu, setup.gpus, intra, nic) for i in range(setup.nodes))
    latency_s, step_s, efficiency = own or (0.0, constants.step_s, constants.efficiency[setup.nic])
    fabric = Fabric(
        latency_s=latency_s,
        protocol_efficiency=tuple({**constants.efficiency, setup.nic: efficiency}.items()),
        start_s=constants.start_s,
        step_s=step_s,
    )
    return Cluster("measured", nodes, fabric)


# --- The fit -----------------------------------------------------------------------------------------------------------

_EFFICIENCIES, _BOUNDS = ("nvlink", "nvls", "pcie"), (0.2, 1.0)
ROBUST_ERROR = 0.03
"""Relative errors well below this count squared, well above it in proportion."""

STEP_BOUNDS_S = (1e-6, 1e-3)


@dataclass(frozen=True)
class Errors:
    """Relative errors |predicted / measured - 1| of one data set's measurements of one operation, of small or of large sizes."""

    data: str
    operation: str
    fitted: bool
    large: bool
    """Whether of 64 KiB and more."""
    count: int
    mean: float
    median: float
    mean_before: float
    """With the constants as they are shipped."""
    median_before: float


def fit_links(path: str | Path) -> tuple[Links, dict[str, tuple[float, float, float]], list[Errors]]:
    """The constants that fit the micro-benchmarks of a file best; latency, step and efficiency of each fabric; the errors.

    Fitted are the efficiencies of NVLink, of its switch's reductions, and of PCIe, the start and the step. Latencies inside a
    node are as shipped: small collectives of eight GPUs, all that there is, cannot tell them from the start. Of the network
    cards only EFA was measured, which is none of the kinds of a cluster file; its figures are returned apart (the efficiency of
    p5 stays where its search starts: NVLink is what limits there). Every data set
    counts the same. Raises InputError as `measurements`.
    """
    measured = measurements(path)
    used = [one for one in measured if one.data.fitted]
    fabrics = sorted({one.data.setup.fabric for one in used if one.data.setup.fabric})
    counts = Counter(one.data.name for one in used)
    weights = np.array([counts[one.data.name] ** -0.5 for one in used])
    logarithms = np.log([one.seconds for one in used])
    shipped = links()

    def constants(values: Sequence[float]) -> tuple[Links, dict[str, tuple[float, float, float]]]:
        nvlink, nvls, pcie, start_s, step_s = values[:5]
        found = replace(
            shipped,
            efficiency={**shipped.efficiency, "nvlink": nvlink, "nvls": nvls, "pcie": pcie},
            start_s=start_s,
            step_s=step_s,
        )
        own = {name: (values[5 + 3 * i], values[6 + 3 * i], values[7 + 3 * i]) for i, name in enumerate(fabrics)}
        return found, own

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(weights * (np.log(predicted_s(used, *constants(np.exp(x).tolist()))) - logarithms))

    start = [
        shipped.efficiency["nvlink"],
        shipped.efficiency["nvls"],
        shipped.efficiency["pcie"],
        shipped.start_s,
        shipped.step_s,
    ]
    bounds = [_BOUNDS] * 3 + [STEP_BOUNDS_S] * 2
    for _ in fabrics:
        start += [30e-6, 100e-6, 0.8]
        bounds += [STEP_BOUNDS_S, STEP_BOUNDS_S, _BOUNDS]
    least, most = np.log(bounds).T
    solved = least_squares(
        residuals,
        np.clip(np.log(start), least + 1e-6, most - 1e-6),
        bounds=(least, most),
        loss="soft_l1",
        f_scale=ROBUST_ERROR,
        diff_step=1e-3,
    )
    found, own = constants(np.exp(solved.x).tolist())
    return found, own, _errors(measured, predicted_s(measured, shipped, own), predicted_s(measured, found, own))


def _errors(measured: Sequence[Measurement], before: Sequence[float], after: Sequence[float]) -> list[Errors]:
    by_data: dict[tuple[str, str, bool, bool], list[tuple[float, float]]] = {}
    for one, *predicted in zip(measured, before, after, strict=True):
        key = (one.data.name, one.data.kind, one.data.fitted, one.num_bytes >= SMALL_BYTES)
        first, second = (abs(seconds / one.seconds - 1) for seconds in predicted)
        by_data.setdefault(key, []).append((first, second))
    return [
        Errors(
            *key,
            len(pairs),
            fmean(b for _, b in pairs),
            median(b for _, b in pairs),
            fmean(a for a, _ in pairs),
            median(a for a, _ in pairs),
        )
        for key, pairs in by_data.items()
    ]
