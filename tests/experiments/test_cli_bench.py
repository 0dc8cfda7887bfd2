"""`motley bench`: what it measures comes back from its file, and every mistake is one line and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import yaml

from runtime import bench, link_bench
from sim.spec.bench import Bench, LinkMeasurement, Measurement, bench_yaml, read_bench
from sim.spec.cluster import read_cluster
from sim.spec.writing import efficiency_entries, kind_entries
from tests.experiments.conftest import Ran, World
from tests.experiments.test_link_logs import ALL_REDUCE

Motley = Callable[..., Ran]

ANSWERS: Mapping[str, Callable[[Mapping[str, int]], float]] = {
    "matmul": lambda shape: (2 * shape["rows"] * shape["columns"] * shape["inner"] / 50e9 + 20e-6) / 0.8,
    "memory": lambda shape: shape["bytes"] / 8e9,
}


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is known beforehand: nothing is measured."""

    def measured(case: bench.Case, *_: object) -> Measurement | None:
        seconds = ANSWERS[case.operation](case.shape) if case.operation in ANSWERS else 1e-3
        return Measurement(case.operation, case.shape, case.precision, seconds, 0.0, 3)

    monkeypatch.setattr(bench, "_matmul_rate", lambda *_: 50e9)
    monkeypatch.setattr(bench, "measure", measured)


def test_a_real_bench_comes_back_from_its_file_and_into_a_cluster(motley: Motley, world: World) -> None:
    out, picture = world.folder / "cpu.yaml", world.folder / "cpu.svg"
    ran = motley("bench", "--device", "cpu", "--quick", "--out", out, "--plot", picture)
    assert ran.code == 0, ran.err
    found = read_bench(out)
    assert (found.kind, found.precisions, found.threads) == ("CPU", ("fp32",), torch.get_num_threads())
    assert found.gpu_kind is not None and found.stack is not None
    assert out.read_text(encoding="utf-8") == bench_yaml(found)
    kind = {**kind_entries(found.gpu_kind), "efficiency": efficiency_entries(found.gpu_kind.efficiency)}
    text = yaml.safe_dump(
        {"name": "one", "gpu_kinds": {"CPU": kind}, "nodes": [{"name": "a", "gpu": "CPU", "gpus": 1, "intra": "pcie3"}]}
    )
    assert read_cluster(world.write("cluster.yaml", text)).nodes[0].gpu == found.gpu_kind
    # The best rate of its own matmuls is the peak, and the table tells of every operation.
    matmuls = [(m.shape, m.seconds) for m in found.measurements if m.operation == "matmul"]
    best = max(2 * shape["rows"] * shape["columns"] * shape["inner"] / seconds for shape, seconds in matmuls)
    assert found.gpu_kind.peak_flop_per_s["fp32"] == best
    for operation in {m.operation for m in found.measurements}:
        assert operation in ran.out
    assert f"wrote {out}" in ran.out.replace("\n", "") and picture.stat().st_size > 1000


@pytest.mark.usefixtures("instant")
def test_a_bench_of_compiled_layers_says_so(motley: Motley, world: World) -> None:
    found = {}
    for name, flags in (("plain.yaml", ()), ("compiled.yaml", ("--compile",))):
        out = world.folder / name
        assert motley("bench", "--device", "cpu", "--quick", *flags, "--out", out).code == 0
        found[name] = read_bench(out)
    assert [bench.compiled for bench in found.values()] == [False, True]
    gpu_kind = found["compiled.yaml"].gpu_kind
    assert gpu_kind is not None and "(fp32, layers compiled)" in gpu_kind.efficiency.source


@pytest.mark.usefixtures("instant")
def test_constants_at_their_bounds_are_warned_of_and_an_earlier_file_is_kept(motley: Motley, world: World) -> None:
    out = world.folder / "cpu.yaml"
    out.write_text("earlier", encoding="utf-8")
    ran = motley("bench", "--quick", "--out", out, "--precision", "fp32")
    assert ran.code == 0
    assert (world.folder / "cpu.yaml.~1~").read_text(encoding="utf-8") == "earlier"
    assert "the earlier one is kept as" in ran.out.replace("\n", " ")
    # Layers of all sizes that take one millisecond are met by no constants that can be.
    assert "warning: " in ran.err and "that the fit allows" in ran.err
    assert read_bench(out).measurements[0].repeats == 3


@pytest.mark.usefixtures("instant")
def test_what_memory_does_not_suffice_for_is_told(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = bench.measure
    monkeypatch.setattr(bench, "measure", lambda case, *rest: None if case.operation == "optimizer" else usual(case, *rest))
    ran = motley("bench", "--quick", "--out", "-")
    assert ran.code == 0
    assert "warning: 1 measurements are left out, for which memory did not suffice" in ran.err
    operations = {m["operation"] for m in yaml.safe_load(ran.out)["measurements"]}
    assert "matmul" in operations and "optimizer" not in operations


@pytest.mark.usefixtures("instant")
def test_nothing_is_written_after_an_interruption(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Measurement:
        raise KeyboardInterrupt

    before = world.names()
    monkeypatch.setattr(bench, "measure", interrupted)
    ran = motley("bench", "--quick", "--out", world.folder / "cpu.yaml", "--plot", world.folder / "cpu.png")
    assert (ran.code, ran.err) == (130, "motley: interrupted: nothing was written\n")
    assert world.names() == before


def test_links_are_measured_between_workers_and_shown(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def launched(options: link_bench.Options, workers: int) -> None:
        asked.append((options.device, options.names, workers, options.quick))
        links = [LinkMeasurement("send", ("a/0", "b/0"), n, 1e-3 + n / 2e9, repeats=3) for n in (1, 2_000_000)]
        options.out.write_text(bench_yaml(Bench("gloo on cpu", links=tuple(links))), encoding="utf-8")

    monkeypatch.setattr(link_bench, "launch_links", launched)
    out = world.folder / "links.yaml"
    ran = motley("bench", "--links", "--names", "a/0,b/0", "--out", out)
    assert ran.code == 0
    assert asked == [("cpu", ("a/0", "b/0"), 2, False)]
    assert len(read_bench(out).links) == 2
    # 2 MB in 2 ms.
    assert "a/0 to b/0" in ran.out and "1000" in ran.out and " 1 " in ran.out
    motley("bench", "--links", "--workers", 5, "--quick", "--out", out)
    assert asked[1:] == [("cpu", (), 5, True)]


def test_a_worker_that_fails_is_told(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        from runtime.launch import RunFailed

        raise RunFailed("a/0 (lane links), while measuring a/0 to b/0: connection closed by the peer", 3)

    monkeypatch.setattr(link_bench, "launch_links", failing)
    before = world.names()
    ran = motley("bench", "--links", "--out", world.folder / "links.yaml")
    assert ran.code == 3 and "connection closed by the peer" in ran.err
    assert world.names() == before


def test_logs_are_read_and_their_hosts_renamed(motley: Motley, world: World) -> None:
    log, out = world.write("all_reduce_perf.log", ALL_REDUCE), world.folder / "links.yaml"
    ran = motley("bench", "--links", "--from-log", log, "--rename", "node-a=a100", "--rename", "node-b/0=v100/3", "--out", out)
    assert ran.code == 0, ran.err
    assert [link.members for link in read_bench(out).links] == [("a100/0", "a100/1", "v100/3")] * 2
    ran = motley("bench", "--links", "--from-log", log, "--rename", "node-z=a100", "--out", out)
    assert ran.code == 2 and "no log has the host 'node-z'; they have node-a/0, node-a/1, node-b/0" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device is one of cpu, cuda, but got 'tpu'"),
        (["--precision", "fp9"], "--precision on cpu is one of fp32, fp16, bf16, but got 'fp9'"),
        (["--plot", "picture.doc"], "--plot: a picture's name ends in one of .png, .svg, .pdf"),
        (["--workers", "2"], "--workers is of links, but --links is not given"),
        (["--from-log", "x.log"], "--from-log is of links, but --links is not given"),
        (["--links", "--workers", "1"], "expected a whole number of at least 2, but got '1'"),
        (["--links", "--precision", "fp32"], "--links measures no device, of which --precision would be"),
        (["--links", "--compile"], "--links measures no device, of which --compile would be"),
        (["--links", "--from-log", "x.log", "--workers", "2"], "--from-log measures nothing, of which --workers would be"),
        (["--links", "--rename", "a=b"], "--rename is of the hosts in a log, but --from-log is not given"),
        (["--links", "--from-log", "no-such.log"], "no-such.log: cannot be read"),
        (["--links", "--backend", "nccl"], "backend nccl needs device cuda, but got cpu"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, motley: Motley, world: World) -> None:
    before = world.names()
    ran = motley("bench", *arguments, "--out", world.folder / "out.yaml")
    assert ran.code == 2 and message in ran.err and ran.err.count("\n") == 1
    assert world.names() == before


def test_a_gpu_that_is_not_there_and_a_log_that_is_none_are_told(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = motley("bench", "--device", "cuda", "--out", world.folder / "out.yaml")
    assert ran.code == 2 and "device cuda needs a GPU, but torch finds none on this machine" in ran.err
    path = world.write("notes.txt", "hello")
    ran = motley("bench", "--links", "--from-log", path, "--out", world.folder / "out.yaml")
    assert ran.code == 2 and "is neither the text of nccl-tests" in ran.err
    ran = motley("bench", "--links", "--from-log", path, "--out", path)
    assert ran.code == 2 and "is read by this command, and would be overwritten" in ran.err
    assert Path(path).read_text(encoding="utf-8") == "hello"
