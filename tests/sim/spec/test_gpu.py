"""The GPU kinds: their published figures, their names, and the reader that clusters use to add or override kinds."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.spec.gpu import NOMINAL_EFFICIENCY, PRECISIONS, Efficiency, GpuKind, catalogue, fold, gpu_kind, read_gpu_kind
from sim.spec.reading import InputError, Table

MIB = 2**20
KINDS = list(catalogue().values())
NVIDIA = [kind for kind in KINDS if "NVIDIA" in kind.source]


def entry(**keys: object) -> Table:
    return Table(dict(keys), "cluster.yaml", "gpu_kinds.X")


NEW = {"memory": "24 GiB", "peak": {"bf16": "100 TFLOP/s"}, "memory_bandwidth": "1 TB/s"}


# --- Published figures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "tflop_per_s"),
    [
        ("A100-80GB-SXM", "bf16", 312),
        ("A100-80GB-SXM", "fp16", 312),
        ("A100-80GB-SXM", "tf32", 156),
        ("A100-80GB-SXM", "fp32", 19.5),
        ("A100-80GB-SXM", "fp8", None),
        ("V100-16GB-SXM", "fp16", 125),
        ("V100-16GB-SXM", "fp32", 15.7),
        ("V100-16GB-SXM", "bf16", None),
        ("V100-16GB-SXM", "tf32", None),
        ("T4", "fp16", 65),
        ("T4", "fp32", 8.1),
        ("H100-80GB-SXM", "bf16", 989),
        ("H100-80GB-SXM", "fp8", 1979),
        ("H100-80GB-SXM", "mxfp8", None),
        ("H100-80GB-PCIe", "bf16", 756),
        ("B200", "bf16", 2250),
        ("B200", "nvfp4", 9000),
        ("GB200", "bf16", 2500),
        ("RTX3090", "fp16", 71),
        ("RTX3080Ti", "fp16", 68),
        ("RTX4090", "fp16", 165),
        ("RTX4090", "bf16", 165),
        ("RTX5090", "bf16", 209.5),
        ("RTX2080", "fp16", 40),
        ("TITAN-RTX", "fp16", 130),
        ("P40", "fp32", 11.8),
        ("MI300X", "bf16", 1307),
        ("L4", "bf16", 121),
        ("H20", "bf16", 148),
        ("RTX3060", "fp16", 25.5),
        ("RTX3080", "fp16", 59.5),
        ("RTX4070Ti", "bf16", 80.2),
        ("RTX4080", "bf16", 97.5),
        ("RTX5080", "bf16", 112.6),
        ("RTX-6000-Ada", "bf16", 364.2),
        ("A30", "bf16", 165),
        ("Quadro-RTX8000", "fp16", 130.5),
        ("GTX1080Ti", "fp16", 11.3),
        ("MI250", "bf16", 181),
    ],
)
def test_peaks_are_those_of_the_datasheets_dense_and_summed_in_fp32(name: str, precision: str, tflop_per_s: float | None) -> None:
    peak = gpu_kind(name).peak(precision)
    assert peak == (None if tflop_per_s is None else pytest.approx(tflop_per_s * 1e12, rel=0.01))


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("A100-80GB-SXM", 81920),
        ("A100-40GB-SXM", 40960),
        ("RTX4090", 24564),
        ("RTX3090", 24576),
        ("RTX3080Ti", 12288),
        ("H100-80GB-SXM", 81559),
        ("H200", 143771),
        ("B200", 183359),
        ("GB200", 189471),
        ("T4", 15360),
        ("L4", 23034),
    ],
)
def test_memory_is_what_the_driver_shows(name: str, mib: int) -> None:
    assert gpu_kind(name).memory_bytes == mib * MIB


@pytest.mark.parametrize(
    ("name", "gigabytes_per_s"),
    [
        ("V100-32GB-SXM", 150),
        ("A100-40GB-SXM", 300),
        ("A800-80GB-SXM", 200),
        ("H800-80GB-SXM", 200),
        ("H100-80GB-SXM", 450),
        ("H200", 450),
        ("GH200-96GB", 450),
        ("B200", 900),
        ("GB300", 900),
        ("A100-80GB-PCIe", None),
        ("H100-80GB-PCIe", None),
        ("H100-NVL", None),
        ("RTX4090", None),
        ("RTX3090", None),
        ("CPU", None),
    ],
)
def test_nvlink_is_counted_per_gpu_and_direction(name: str, gigabytes_per_s: float | None) -> None:
    assert gpu_kind(name).nvlink_bytes_per_s == (None if gigabytes_per_s is None else gigabytes_per_s * 1e9)


@pytest.mark.parametrize(
    ("name", "gigabytes_per_s"),
    [
        ("A100-40GB-SXM", 1555),
        ("A100-80GB-SXM", 2039),
        ("A100-80GB-PCIe", 1935),
        ("V100-16GB-SXM", 900),
        ("T4", 320),
        ("H100-80GB-SXM", 3350),
        ("H200", 4800),
        ("RTX3090", 936),
        ("RTX4090", 1008),
        ("MI300X", 5300),
        ("B200", 8000),
    ],
)
def test_memory_bandwidth_is_that_of_the_datasheets(name: str, gigabytes_per_s: float) -> None:
    assert gpu_kind(name).memory_bandwidth_bytes_per_s == gigabytes_per_s * 1e9


def test_the_500_watt_h100_has_the_rates_of_h100_with_less_power_and_bandwidth() -> None:
    low, full = gpu_kind("H100-SXM-96GB-HBM2e-500W"), gpu_kind("H100")
    assert low.name == "H100-96GB-SXM-HBM2e"
    assert low.peak_flop_per_s == full.peak_flop_per_s
    assert low.busy_watts == 500 and low.memory_bandwidth_bytes_per_s == 2.4e12
    assert low.memory_bytes > full.memory_bytes


def test_cpu_has_only_a_nominal_fp32_rate() -> None:
    cpu = gpu_kind("cpu")
    assert list(cpu.peak_flop_per_s) == ["fp32"]
    assert "nominal" in cpu.source and "measure" in cpu.source


# --- Names -----------------------------------------------------------------------------------------------------------

PUBLISHED_SPELLINGS = {
    "A100-80GB-SXM": "A100 A100-80 A100-80GB A100-80GB-SXM A100-SXM-80GB A100-NVLink",
    "A100-40GB-SXM": "A100-40 A100-40GB A100-SXM-40GB A100-40GB-SXM",
    "A100-80GB-PCIe": "A100-PCIe A100-PCIe-80GB A100-80GB-PCIe",
    "A800-80GB-SXM": "A800-80GB-SXM",
    "A10G": "A10G",
    "A6000": "A6000",
    "B200": "B200 B200-SXM B200-SXM-180GB",
    "B300": "B300",
    "GB200": "GB200",
    "GB300": "GB300",
    "GH200-96GB": "GH-96 GH200-96GB",
    "H100-80GB-SXM": "H100 H100-80GB H100-SXM H100-SXM-80GB",
    "H100-96GB-SXM-HBM2e": "H100-SXM-96GB-HBM2e-500W",
    "H100-NVL": "H100-NVL",
    "H200": "H200 H200-SXM-141GB",
    "L4": "L4",
    "P100-16GB-PCIe": "P100",
    "P40": "P40",
    "RTX-PRO-6000": "RTX-PRO-6000-96GB",
    "RTX2080": "RTX-2080",
    "RTX3080Ti": "RTX3080Ti RTX3080Ti-12GB",
    "RTX3090": "RTX-3090 RTX3090 RTX3090-24GB",
    "RTX3090Ti": "RTX3090Ti",
    "RTX4090": "RTX4090 RTX4090-24GB",
    "RTX5060Ti": "RTX5060Ti-16GB",
    "RTX5090": "RTX5090",
    "T4": "T4 T4-16GB",
    "TITAN-RTX": "Titan-RTX",
    "V100-16GB-PCIe": "V100-PCIe-16GB",
    "V100-16GB-SXM": "V100 V100-16 V100-16GB V100-16GB-SXM V100-SXM2-16GB",
    "V100-32GB-SXM": "V100-32GB",
    "MI300X": "MI300X",
    "MI325X": "MI325X",
    "MI355X": "MI355X",
}
"""Every name of one GPU in the columns `gpu_type`, `gpu` and `device` of the published data, by the kind it means. Where a row
is about a group ('V100 x8 NVLink (single node)', '12xV100-16GB+4xT4') the names of its members stand here."""

PUBLISHED_SPELLINGS_WITH_SPACES = {
    "NVIDIA A100 SXM": "A100-80GB-SXM",
    "NVIDIA A100 PCIe": "A100-80GB-PCIe",
    "NVIDIA H100 SXM": "H100-80GB-SXM",
    "NVIDIA H200 SXM": "H200",
    "NVIDIA GH200 SXM": "GH200-96GB",
    "NVIDIA B200 SXM": "B200",
    "NVIDIA B300 SXM": "B300",
    "NVIDIA GB200 SXM": "GB200",
    "AMD MI300X": "MI300X",
    "AMD MI325X": "MI325X",
    "AMD MI355X": "MI355X",
    "V100-16GB (p3)": "V100-16GB-SXM",
    "T4-16GB (g4dn)": "T4",
    "A100-SXM4-80GB (Azure ND A100 v4)": "A100-80GB-SXM",
    "H100-SXM-80GB (Azure ND H100 v5)": "H100-80GB-SXM",
    "H200-SXM-141GB (Azure ND H200 v5)": "H200",
}

DRIVER_NAMES = {
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 3080 Ti": "RTX3080Ti",
    "NVIDIA A100-SXM4-80GB": "A100-80GB-SXM",
    "NVIDIA A100-SXM4-40GB": "A100-40GB-SXM",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "NVIDIA H100 80GB HBM3": "H100-80GB-SXM",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H100 PCIe": "H100-80GB-PCIe",
    "NVIDIA H200": "H200",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA RTX A6000": "A6000",
    "NVIDIA TITAN RTX": "TITAN-RTX",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
    "Tesla V100-SXM2-16GB": "V100-16GB-SXM",
    "Tesla P100-PCIE-16GB": "P100-16GB-PCIe",
    "Tesla T4": "T4",
    "AMD Instinct MI300X": "MI300X",
    "NVIDIA GeForce RTX 3060": "RTX3060",
    "NVIDIA GeForce RTX 4070 SUPER": "RTX4070-Super",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX4070Ti-Super",
    "NVIDIA GeForce RTX 4080 SUPER": "RTX4080-Super",
    "NVIDIA GeForce RTX 4090 D": "RTX4090D",
    "NVIDIA GeForce GTX 1080 Ti": "GTX1080Ti",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "Quadro RTX 8000": "Quadro-RTX8000",
    "NVIDIA TITAN V": "TITAN-V",
    "NVIDIA A30": "A30",
    "AMD Instinct MI210": "MI210",
}


@pytest.mark.parametrize(("name", "spellings"), PUBLISHED_SPELLINGS.items())
def test_every_spelling_of_the_published_data_names_its_kind(name: str, spellings: str) -> None:
    assert {gpu_kind(spelling).name for spelling in spellings.split()} == {name}


@pytest.mark.parametrize(("spelling", "name"), [*PUBLISHED_SPELLINGS_WITH_SPACES.items(), *DRIVER_NAMES.items()])
def test_spellings_with_spaces_and_the_names_drivers_print_are_known(spelling: str, name: str) -> None:
    assert gpu_kind(spelling).name == name


def test_the_catalogue_holds_every_kind_that_people_own() -> None:
    wanted = """
        V100-16GB-SXM V100-32GB-SXM V100-16GB-PCIe V100-32GB-PCIe T4 P40 P100 A10 A10G A40 A100-40GB-SXM A100-40GB-PCIe
        A100-80GB-SXM A100-80GB-PCIe A800-80GB-SXM A800-80GB-PCIe H100-80GB-SXM H100-80GB-PCIe H100-NVL H800 H20 H200 GH200
        B200 B300 GB200 GB300 L4 L20 L40 L40S A4000 A5000 A6000 RTX2080 RTX2080Ti RTX3080Ti RTX3090 RTX3090Ti RTX4090
        RTX5060Ti RTX5090 RTX-PRO-6000 TITAN-RTX TITAN-V TITAN-Xp GTX1080 GTX1080Ti Quadro-RTX6000 Quadro-RTX8000 A30 A4500
        RTX3060 RTX3060Ti RTX3070 RTX3070Ti RTX3080 RTX3080-12GB RTX4060 RTX4060Ti RTX4070 RTX4070S RTX4070Ti RTX4070Ti-Super
        RTX4080 RTX4080S RTX4090D RTX-4000-Ada RTX-5000-Ada RTX-6000-Ada H200-NVL H800-PCIe RTX5060 RTX5070 RTX5070Ti RTX5080
        MI100 MI210 MI250 MI250X MI300X MI325X MI355X CPU"""
    assert {gpu_kind(name).name for name in wanted.split()} <= set(catalogue())
    assert len({gpu_kind(name).name for name in wanted.split()}) == len(wanted.split())


@pytest.mark.parametrize("spelling", ["rtx4090", "RTX 4090", "rtx_4090", "Rtx-4090", " rtx - 4090 "])
def test_case_spaces_dashes_and_underscores_do_not_count(spelling: str) -> None:
    assert gpu_kind(spelling) is gpu_kind("RTX4090")


@given(st.sampled_from(KINDS), st.randoms())
def test_any_change_of_case_and_separators_leaves_the_name_known(kind: GpuKind, random: Random) -> None:
    for name in (kind.name, *kind.aliases):
        respelt = "".join(c.upper() if random.random() < 0.5 else c.lower() for c in name)
        assert gpu_kind(respelt.replace("-", random.choice("-_ "))) is kind


def test_no_two_kinds_share_a_name_or_alias() -> None:
    spellings = [(fold(spelling), kind.name) for kind in KINDS for spelling in {fold(s) for s in (kind.name, *kind.aliases)}]
    assert len({folded for folded, _ in spellings}) == len(spellings)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("RTX4900", "RTX4090"), ("a100-80gb-sxn", "A100-80GB-SXM"), ("H101-NVL", "H100-NVL"), ("MI300", "MI300X"), ("H101", "H100")],
)
def test_an_unknown_name_suggests_the_nearest(name: str, suggestion: str) -> None:
    with pytest.raises(InputError) as caught:
        gpu_kind(name)
    assert str(caught.value).startswith(f"unknown GPU kind {name!r}; did you mean {suggestion}? known: ")
    assert "\n" not in str(caught.value) and "TITAN-RTX" in str(caught.value)


@pytest.mark.parametrize("name", ["zzzzzzzz", "", "12xV100-16GB+4xT4", "TPUv4 pod slice of eight"])
def test_what_is_no_gpu_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"unknown GPU kind .*; .*known: "):
        gpu_kind(name)


# --- Consistency -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_is_consistent(kind: GpuKind) -> None:
    assert catalogue()[kind.name] is kind
    assert "fp32" in kind.peak_flop_per_s
    assert set(kind.peak_flop_per_s) <= set(PRECISIONS)
    assert kind.source and kind.efficiency.source
    assert 0 < kind.idle_watts < kind.busy_watts <= 1500
    assert 7e9 < kind.memory_bytes < 320e9
    bandwidth = kind.memory_bandwidth_bytes_per_s
    if kind.name != "CPU":
        assert 250e9 <= bandwidth <= 8.5e12
        assert kind.nvlink_bytes_per_s is None or 50e9 <= kind.nvlink_bytes_per_s < bandwidth
    assert kind.dollars_per_hour is None or 0.01 < kind.dollars_per_hour < 15
    assert kind.dollars_per_hour is None or ("price" in kind.source and "nominal" in kind.source)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_smaller_numbers_are_never_slower(kind: GpuKind) -> None:
    for slow, fast in [
        ("fp32", "tf32"),
        ("tf32", "fp16"),
        ("fp32", "fp16"),
        ("bf16", "fp8"),
        ("fp8", "mxfp8"),
        ("mxfp8", "nvfp4"),
    ]:
        if slow in kind.peak_flop_per_s and fast in kind.peak_flop_per_s:
            assert kind.peak_flop_per_s[slow] <= kind.peak_flop_per_s[fast]


@pytest.mark.parametrize("kind", NVIDIA, ids=lambda kind: kind.name)
def test_nvidia_rates_double_from_tf32_over_bf16_to_fp8(kind: GpuKind) -> None:
    bf16 = kind.peak("bf16")
    assert (bf16 is None) == (kind.peak("tf32") is None)  # both came with Ampere
    if bf16 is None:
        assert kind.peak("fp8") is None
        return
    assert kind.peak("fp16") == bf16
    assert kind.peak("tf32") == pytest.approx(bf16 / 2, rel=0.02)
    fp8 = kind.peak("fp8")
    assert fp8 is None or fp8 == pytest.approx(2 * bf16, rel=0.02)


def test_the_catalogue_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        catalogue()["RTX4090"] = gpu_kind("T4")  # type: ignore[index]
    with pytest.raises(TypeError):
        gpu_kind("T4").peak_flop_per_s["fp16"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kinds_survive_pickling_and_can_be_hashed(kind: GpuKind) -> None:
    again = pickle.loads(pickle.dumps(kind))
    assert again == kind and hash(again) == hash(kind)
    assert {kind: 1}[again] == 1
    assert repr(again) == repr(kind)


def test_a_kind_does_not_follow_the_mapping_it_was_made_from() -> None:
    rates = {"fp16": 2e12, "fp32": 1e12}
    kind = replace(gpu_kind("T4"), peak_flop_per_s=rates)
    rates["fp16"] = 0.0
    assert dict(kind.peak_flop_per_s) == {"fp32": 1e12, "fp16": 2e12}
    assert isinstance(kind.peak_flop_per_s, Mapping) and list(kind.peak_flop_per_s) == ["fp32", "fp16"]
    assert kind != gpu_kind("T4") and replace(kind, peak_flop_per_s=gpu_kind("T4").peak_flop_per_s) == gpu_kind("T4")


def test_an_unknown_precision_is_an_error_and_an_unsupported_one_is_none() -> None:
    assert gpu_kind("T4").peak("bf16") is None
    with pytest.raises(InputError, match=r"unknown precision 'bfp16'; did you mean .*; accepted: fp32, tf32"):
        gpu_kind("T4").peak("bfp16")


# --- Construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("matmul_fraction", 0.0),
        ("matmul_fraction", 1.01),
        ("fp32_fraction", 0.0),
        ("matmul_traffic", -0.1),
        ("matmul_traffic", 1.01),
        ("attention_rows", -1.0),
        ("attention_width", math.nan),
        ("attention_keys", math.inf),
        ("attention_fraction", -0.1),
        ("memory_fraction", math.nan),
        ("matmul_half_s", -1e-6),
        ("launch_s", math.inf),
        ("launch_s", math.nan),
    ],
)
def test_an_efficiency_outside_its_range_is_refused_with_rule_and_value(field: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"{field} must be .*, but got {value!r}"):
        replace(NOMINAL_EFFICIENCY, **{field: value})  # type: ignore[arg-type]


def test_the_limits_of_an_efficiency_are_accepted() -> None:
    Efficiency(1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, "ideal")
    replace(NOMINAL_EFFICIENCY, matmul_traffic=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": " "}, "must have a name, but got ' '"),
        ({"memory_bytes": 0}, r"memory must be .* but got 0 \(T4\)"),
        ({"memory_bytes": 1.5}, "memory must be a whole number of bytes"),
        ({"peak_flop_per_s": {}}, "peak must be given for at least one of fp32"),
        ({"peak_flop_per_s": {"fp16": -1.0}}, "peak in fp16 must be finite and above 0, but got -1.0"),
        ({"peak_flop_per_s": {"bf61": 1.0}}, "but got 'bf61'; did you mean bf16"),
        ({"memory_bandwidth_bytes_per_s": math.inf}, "memory_bandwidth must be finite"),
        ({"nvlink_bytes_per_s": 0.0}, "nvlink must be finite and above 0, but got 0.0"),
        ({"idle_watts": 70.0}, "idle < busy, but got idle 70.0 W and busy 70"),
        ({"dollars_per_hour": -1.0}, r"price must be .* at least 0 \$/h, but got -1.0"),
    ],
)
def test_a_kind_that_cannot_be_is_refused_with_rule_and_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(gpu_kind("T4"), **change)  # type: ignore[arg-type]


# --- The reader ------------------------------------------------------------------------------------------------------


def test_an_entry_without_base_defines_a_new_kind() -> None:
    kind = read_gpu_kind(
        "Z1",
        entry(
            memory="24 GiB",
            peak={"fp32": "20 TFLOP/s", "bf16": "165 TFLOP/s"},
            memory_bandwidth="900 GB/s",
            nvlink="100 GB/s",
            idle_power="20 W",
            busy_power="0.35 kW",
            price="1.2 $/h",
            efficiency={"matmul_fraction": 0.6, "matmul_half": "0.00001 s", "launch": "0.000007 s", "source": "a run"},
            source="its maker",
        ),
        None,
    )
    assert kind == GpuKind(
        name="Z1",
        memory_bytes=24 * 2**30,
        peak_flop_per_s={"fp32": 20e12, "bf16": 165e12},
        memory_bandwidth_bytes_per_s=900e9,
        nvlink_bytes_per_s=100e9,
        idle_watts=20.0,
        busy_watts=350.0,
        dollars_per_hour=1.2,
        efficiency=replace(NOMINAL_EFFICIENCY, matmul_fraction=0.6, matmul_half_s=10e-6, launch_s=7e-6, source="a run"),
        source="its maker",
    )


def test_a_new_kind_needs_only_memory_peak_and_memory_bandwidth() -> None:
    kind = read_gpu_kind("Z1", entry(**NEW), None)
    assert kind.efficiency == NOMINAL_EFFICIENCY and "not measured" in kind.efficiency.source
    assert (kind.nvlink_bytes_per_s, kind.dollars_per_hour, kind.aliases) == (None, None, ())
    assert (kind.idle_watts, kind.busy_watts) == (30.0, 300.0)
    assert "cluster.yaml" in kind.source


@pytest.mark.parametrize("key", NEW)
def test_a_new_kind_without_a_required_key_is_refused(key: str) -> None:
    with pytest.raises(InputError, match=rf"^cluster.yaml: gpu_kinds\.X\.{key}: is missing"):
        read_gpu_kind("Z1", entry(**{k: v for k, v in NEW.items() if k != key}), None)


def test_an_override_changes_only_what_it_mentions_and_says_so() -> None:
    base = gpu_kind("RTX4090")
    kind = read_gpu_kind(
        "rtx-4090", entry(peak={"bf16": "100 TFLOP/s"}, efficiency={"matmul_fraction": 0.5}, price="9 $/h"), base
    )
    assert kind == replace(
        base,
        peak_flop_per_s={**base.peak_flop_per_s, "bf16": 100e12},
        dollars_per_hour=9.0,
        efficiency=replace(
            base.efficiency, matmul_fraction=0.5, source=base.efficiency.source + "; matmul_fraction as in cluster.yaml"
        ),
        source=base.source + "; peak, price as in cluster.yaml",
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_empty_override_changes_nothing(kind: GpuKind) -> None:
    assert read_gpu_kind(kind.name, entry(), kind) == kind


def test_null_takes_nvlink_and_price_away() -> None:
    kind = read_gpu_kind("A100", entry(nvlink=None, price=None), gpu_kind("A100"))
    assert kind.nvlink_bytes_per_s is None and kind.dollars_per_hour is None


def test_like_takes_a_known_kind_as_the_pattern_of_a_new_name_without_its_aliases() -> None:
    pattern = gpu_kind("RTX4090")
    kind = read_gpu_kind("RTX4090-48GB", entry(like="rtx 4090", memory="48 GiB"), None)
    assert kind == replace(
        pattern,
        name="RTX4090-48GB",
        memory_bytes=48 * 2**30,
        aliases=(),
        source=pattern.source + "; memory as in cluster.yaml",
    )


def test_an_efficiency_may_name_a_family_of_the_catalogue() -> None:
    kind = read_gpu_kind("Z1", entry(**NEW, efficiency="ampere-consumer"), None)
    assert kind.efficiency == gpu_kind("RTX3090").efficiency


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"memroy": "1 GiB"}, r"^cluster.yaml: gpu_kinds\.X: unknown key 'memroy'; accepted: .*; did you mean memory\?"),
        ({"memory": 24}, r"gpu_kinds\.X\.memory: got 24 without a unit"),
        ({"memory": "0 GiB"}, r"gpu_kinds\.X\.memory: got '0 GiB', but a size above zero"),
        ({"memory": "24 GB/s"}, r"gpu_kinds\.X\.memory: got '24 GB/s' with the unit 'GB/s'"),
        ({"peak": {"bf61": "1 TFLOP/s"}}, r"gpu_kinds\.X\.peak: unknown key 'bf61'; accepted: fp32, .*; did you mean bf16\?"),
        ({"peak": {"bf16": "1 TB/s"}}, r"gpu_kinds\.X\.peak\.bf16: got '1 TB/s'"),
        ({"peak": "165 TFLOP/s"}, r"gpu_kinds\.X\.peak: expected a mapping"),
        ({"memory_bandwidth": "fast"}, r"gpu_kinds\.X\.memory_bandwidth: got 'fast'"),
        ({"nvlink": "0 GB/s"}, r"gpu_kinds\.X\.nvlink: got '0 GB/s', but a bandwidth above zero, or null"),
        ({"price": 1.2}, r"gpu_kinds\.X\.price: got 1.2 without a unit"),
        ({"idle_power": "500 W", "busy_power": "400 W"}, r"gpu_kinds\.X: power must keep 0 <= idle < busy, but got idle 500"),
        ({"like": "RTX4900"}, r"gpu_kinds\.X\.like: unknown GPU kind 'RTX4900'; did you mean RTX4090\?"),
        ({"like": 4090}, r"gpu_kinds\.X\.like: expected the name of a known GPU kind, but got 4090"),
        ({"efficiency": "ada-consumers"}, r"gpu_kinds\.X\.efficiency: expected one of .*; did you mean ada-consumer\?"),
        ({"efficiency": 0.7}, r"gpu_kinds\.X\.efficiency: expected a mapping of constants or the name of a family, but got 0.7"),
        (
            {"efficiency": {"matmul_fraction": 1.5}},
            r"gpu_kinds\.X\.efficiency\.matmul_fraction: expected a number of at least 1e-06 and at most 1, but got 1.5",
        ),
        (
            {"efficiency": {"memory_fraction": 1e-300}},
            r"efficiency\.memory_fraction: expected .* at least 1e-06 .*, but got 1e-300",
        ),
        ({"efficiency": {"attention_fraction": 0}}, r"efficiency\.attention_fraction: expected .* at least 1e-06 .*, but got 0"),
        ({"efficiency": {"launch": "-1 us"}}, r"gpu_kinds\.X\.efficiency\.launch: got '-1 us'"),
        ({"efficiency": {"lunch": "1 us"}}, r"gpu_kinds\.X\.efficiency: unknown key 'lunch'; .*; did you mean launch\?"),
        ({"aliases": "X1"}, r"gpu_kinds\.X\.aliases: expected a list of names, but got 'X1'"),
        ({"aliases": [1]}, r"gpu_kinds\.X\.aliases: expected a list of names"),
    ],
)
def test_mistakes_are_told_with_key_value_and_what_is_accepted(keys: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_gpu_kind("Z1", entry(**(NEW | keys)), None)
    assert "\n" not in str(caught.value)


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(0.0, 1e-3))
def test_calibrated_constants_come_back_as_they_were_written(matmul: float, memory: float, half_s: float) -> None:
    written = {"matmul_fraction": matmul, "memory_fraction": memory, "matmul_half": f"{half_s!r} s", "source": "a fit"}
    read = read_gpu_kind("T4", entry(efficiency=written), gpu_kind("T4")).efficiency
    assert (read.matmul_fraction, read.memory_fraction, read.matmul_half_s) == (matmul, memory, half_s)
    assert (read.attention_fraction, read.launch_s) == (
        gpu_kind("T4").efficiency.attention_fraction,
        gpu_kind("T4").efficiency.launch_s,
    )
    assert read.source == "a fit"
