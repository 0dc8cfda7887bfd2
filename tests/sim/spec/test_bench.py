"""Bench files: what is written is read back, cluster files take what they found, and mistakes are told in one line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sim.spec.bench import (
    Bench,
    LinkMeasurement,
    Measurement,
    bench_yaml,
    measured_model,
    read_bench,
)
from sim.spec.cluster import read_cluster
from sim.spec.gpu import NOMINAL_EFFICIENCY, gpu_kind
from sim.spec.reading import InputError, quantity
from sim.spec.stack import Stack
from sim.spec.transformer import Moe
from sim.spec.writing import efficiency_entries, kind_entries, quantity_text, stack_entries

MATMUL = Measurement("matmul", {"rows": 64, "columns": 32, "inner": 16}, "bf16", 1.5e-05, 0.02, 7)
SEND = LinkMeasurement("send", ("a/0", "b/0"), 1_048_576, 0.00125, 0.1, 9)
RING = LinkMeasurement("all_reduce", ("a/0", "a/1", "b/0"), 12, 3e-05)
EFFICIENCY = replace(NOMINAL_EFFICIENCY, matmul_fraction=1 / 3, matmul_half_s=2.63e-06, launch_s=1e-09 / 3, source="motley bench")
NEW = "GPU: a new one"


def own_kind(name: str) -> Bench:
    kind = replace(gpu_kind(name), memory_bytes=150_754_820_096, efficiency=EFFICIENCY, source="as measured")
    return Bench("NVIDIA " + name, name, ("bf16",), None, {"torch": "2.13.0"}, (MATMUL,), (), kind)


@pytest.mark.parametrize(
    "bench",
    [
        Bench("gloo on cpu", links=(SEND, RING)),
        own_kind("H200"),
        replace(own_kind("CPU"), threads=2, stack=Stack("bench", memory_traffic=1.4, host_s=9.1e-06, source="measured")),
        replace(own_kind("H200"), kind=NEW, gpu_kind=replace(gpu_kind("H200"), name=NEW, aliases=(), efficiency=EFFICIENCY)),
        replace(own_kind("H200"), device="[a: 'b'] # c", links=(SEND,), compiled=True),
    ],
)  # fmt: skip
def test_what_is_written_is_read_back_equal(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text(bench_yaml(bench), encoding="utf-8")
    assert read_bench(path) == bench


@given(st.floats(1e-12, 1e6), st.floats(1.0, 1e15))
def test_no_bit_of_a_quantity_is_lost(seconds: float, rate: float) -> None:
    assert quantity(quantity_text(seconds, "time"), "time") == seconds
    assert quantity(quantity_text(rate, "bandwidth"), "bandwidth") == rate


def test_quantities_are_written_in_the_unit_that_people_would_choose() -> None:
    assert [quantity_text(seconds, "time") for seconds in (0.0, 2.0, 0.0125, 7.87e-06, 3e-12)] == [
        "0 s",
        "2 s",
        "12.5 ms",
        "7.87 us",
        "0.003 ns",
    ]


def test_a_cluster_file_takes_what_a_bench_found(tmp_path: Path) -> None:
    bench = replace(own_kind("H200"), stack=Stack("bench", memory_traffic=1.4, host_s=9.1e-06))
    assert bench.gpu_kind is not None and bench.stack is not None
    cluster = {
        "name": "one",
        "gpu_kinds": {"H200": {**kind_entries(bench.gpu_kind), "efficiency": efficiency_entries(bench.gpu_kind.efficiency)}},
        "stack": stack_entries(bench.stack),
        "nodes": [{"name": "a", "gpu": "H200", "gpus": 1, "intra": "nvswitch"}],
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster), encoding="utf-8")
    read = read_cluster(path)
    assert read.nodes[0].gpu == bench.gpu_kind
    assert (read.stack.memory_traffic, read.stack.host_s) == (1.4, 9.1e-06)


def test_the_model_of_a_shape_is_the_layer_that_was_measured() -> None:
    sizes = {"hidden": 512, "ffn": 1408, "heads": 8, "kv_heads": 2, "head_dim": 64}
    model = measured_model({"sequences": 1, "sequence_length": 8, "tensor_parallel": 1, **sizes})
    assert (model.layers, model.gated, model.position, model.norm) == (1, True, "rotary", "rmsnorm")
    assert {name: getattr(model, name) for name in sizes} == sizes
    assert model.experts is None
    mixture = measured_model({"sequences": 1, "sequence_length": 8, "tensor_parallel": 1, **sizes, "experts": 16, "top_k": 4})
    assert mixture.experts == Moe(16, 4, 1408)
    assert measured_model({"sequences": 1, "sequence_length": 8, "hidden": 512, "vocab": 100}).padded_vocab == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operation": "matmull"}, "operation is one of .*did you mean matmul"),
        ({"shape": {"rows": 1}}, "the shape of matmul has rows, columns, inner, but got rows"),
        ({"shape": {"rows": 0, "columns": 1, "inner": 1}}, "rows in the shape of matmul is a whole number above 0, but got 0"),
        ({"precision": "int8"}, "precision is one of .*, but got 'int8'"),
        ({"seconds": 0.0}, "seconds is finite and above 0, but got 0.0"),
        ({"seconds": math.nan}, "seconds is finite and above 0, but got nan"),
        ({"seconds": 1e-300}, r"seconds is from 1e-10 to 1e\+06, but got 1e-300"),
        ({"seconds": 1e9}, r"seconds is from 1e-10 to 1e\+06, but got 1000000000.0"),
        ({"spread": -1.0}, "spread is finite and at least 0"),
        ({"repeats": 0}, "repeats is a whole number above 0, but got 0"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(MATMUL, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": ("a/0",)}, "the members of send are at least two"),
        ({"members": ("a/0", "a/0")}, "the members of send are at least two, with a name each"),
        ({"members": ("a/0", "b/0", "c/0")}, "a send has a sender and a receiver, but got 3 members"),
        ({"num_bytes": -1}, "bytes is a whole number of at least 0, but got -1"),
        ({"operation": "gather"}, "operation is one of .*all_gather"),
    ],
)
def test_a_measurement_of_links_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SEND, **change)  # type: ignore[arg-type]


GOOD = """\
format: motley-bench/1
device: some GPU
kind: H200
precisions: [bf16]
measurements:
- {operation: matmul, shape: {rows: 64, columns: 32, inner: 16}, precision: bf16, seconds: 1.5e-05}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("motley-bench/1", "motley-bench/2", "format: expected one of motley-bench/1, but got 'motley-bench/2'"),
        ("rows: 64", "rows: 6.5", r"measurements\[0\].shape.rows: expected a whole number"),
        ("inner: 16", "inner: 16, depth: 2", r"measurements\[0\].shape: unknown key 'depth'"),
        ("seconds: 1.5e-05", "seconds: fast", r"measurements\[0\].seconds: expected a number"),
        ("seconds: 1.5e-05", "seconds: 0", r"measurements\[0\]: seconds is finite and above 0"),
        ("precisions: [bf16]", "precisions: [bf17]", "precisions: expected a list of fp32"),
        ("precisions: [bf16]\n", "", "precisions: is missing"),
        ("kind: H200\n", "", "a bench with measurements of a device names its kind"),
        ("kind: H200", "kind: H200\ngpu_kind: {memory: 12}", "gpu_kind.memory: got 12 without a unit"),
        ("kind: H200", "kind: H200\nefficiency: {matmul_fraction: 2}", "matmul_fraction: expected a number .* at most 1"),
        ("kind: H200", "kind: H200\nstack: {host: 3}", "stack.host: got 3 without a unit"),
        ("kind: H200", "kind: Foo\ngpu_kind: {memory: 1 GB}", "peak: is missing"),
        (GOOD[GOOD.index("measurements") :], "", "a bench has at least one measurement"),
        (GOOD, "- 1", "expected a mapping of keys to values"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert read_bench(path).measurements[0].spread == 0.0
    assert old in GOOD
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=message) as told:
        read_bench(path)
    assert str(told.value).startswith(f"{path}") and "\n" not in str(told.value)
