"""`motley calibrate` and what `motley loop` decides by, on runs whose truth is known."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.cli import run
from experiments.commands.loop import _Ran, agreement
from sim.spec.bench import Bench, Measurement, bench_yaml
from sim.spec.cluster import cluster_yaml, read_cluster
from sim.spec.gpu import gpu_kind
from sim.spec.stack import Stack
from sim.spec.trace import trace_json
from tests.calibration_runs import MIXED, hidden_factors, measured, random_plans, truth

WORLD = MIXED.without_nodes({"large-1", "small-1"})
PLANS = random_plans(4, 5, WORLD, batch=8)
TRUE = truth(WORLD, hidden_factors(WORLD, seed=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster file and the traces of four plans."""
    made = tmp_path_factory.mktemp("calibrate")
    (made / "c.yaml").write_text(cluster_yaml(WORLD))
    for i, plan in enumerate(PLANS):
        (made / f"{i}.json").write_text(trace_json(measured(plan, TRUE, i)))
        (made / f"plan-{i}.json").write_text(plan.to_json())
    return made


def test_a_calibrated_cluster_is_written_and_told_and_simulate_gives_an_interval(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page, facts = tmp_path / "out.yaml", tmp_path / "page.html", tmp_path / "facts.json"
    traces = [str(folder / f"{i}.json") for i in range(4)]
    asked = ["calibrate", "--cluster", str(folder / "c.yaml"), "--traces", *traces, "--holdout", "0.5"]
    assert run([*asked, "--out", str(out), "--report", str(page), "--json", str(facts)]) == 0
    told = capsys.readouterr().out
    assert "2 of 4 plans held out" in told and "not told by these runs" in told and "speed of large-0/0" in told
    found = read_cluster(out)
    assert found.calibration is not None and found.calibration.plans == 4
    for device in WORLD.devices:
        true = TRUE.device(device.name).gpu.speed
        assert found.device(device.name).gpu.speed == pytest.approx(true, rel=0.02)
    written = json.loads(facts.read_text())
    assert len(written["plans"]) == 2 and written["errors_after"]["median"] < written["errors_before"]["median"]
    text = page.read_text()
    assert "data:image/svg+xml;base64," in text and "http://" not in text.replace("http://www.w3.org", "")
    assert run(["simulate", str(folder / "plan-0.json"), "--cluster", str(out), "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    low, high = report["iteration_interval_s"]
    calibration = found.calibration
    assert low == pytest.approx(report["iteration_s"] * (1 + calibration.low), rel=1e-12)
    assert high == pytest.approx(report["iteration_s"] * (1 + calibration.high), rel=1e-12)
    assert "expected in 90 % of runs" in capsys.readouterr().out


def published_runs(path: Path, factor: float) -> Path:
    """The path, to which it writes some published runs of A100s, their times multiplied by a factor."""
    with (Path(__file__).parents[2] / "experiments" / "data" / "published_runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    needed = ("iter_time_s", "micro_batch", "recompute", "hidden")
    usable = [row for row in rows if row["gpu_type"] == "A100-80GB-SXM" and all(row[name] for name in needed)]
    # Of large layers, where the host is not waited for.
    chosen = sorted((row for row in usable if float(row["hidden"]) >= 4096), key=lambda row: float(row["num_gpus"]))[:12]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"iter_time_s": str(factor * float(row["iter_time_s"]))} for row in chosen)
    return path


def test_published_runs_tell_the_speed_of_their_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(
        "name: one\nnodes:\n  - {name: a, gpu: A100-80GB-SXM, gpus: 8, intra: nvswitch}\n", encoding="utf-8"
    )
    speeds = []
    for factor in (1.0, 0.8):
        runs, out = published_runs(tmp_path / "runs.csv", factor), tmp_path / f"{factor}.yaml"
        assert run(["calibrate", "--cluster", str(tmp_path / "c.yaml"), "--runs", str(runs), "--out", str(out)]) == 0
        told = capsys.readouterr().out
        assert "runs elsewhere, on which it was fitted too" in told and "speed of A100-80GB-SXM" in told
        assert out.read_text().startswith(f"# Fitted on {runs}.")
        speeds.append(read_cluster(out).nodes[0].gpu.speed)
    # The prior holds it back a little.
    assert 1.1 < speeds[1] / speeds[0] < 1.3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "nothing to fit to: give --traces, --bench, --links or --runs"),
        (["--links", "nowhere.yaml", "--plot", "x.png"], "--plot x.png: without --traces there is nothing to draw"),
        (["--runs", "{published}"], "runs tells a whole plan and its iter_time_s on the kinds of 'mixed': CPU-large, CPU-small"),
        (["--traces", "{0}", "--traces", "{0}"], "0.json is given more than once"),
        (["--traces", "{0}", "{1}"], "at least 4 different plans, but there are 2 of 2: run 2 more"),
        (["--traces", "{plan}"], "motley: is missing; expected a trace written by Motley"),
        (["--traces", "{0}", "--holdout", "1.5"], "expected a number above 0 and below 1, but got '1.5'"),
        (["--traces", "{0}", "--json", "{0}"], "is read by this command, and would be overwritten"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    published = published_runs(tmp_path / "runs.csv", 1.0)
    places = {"published": published, "0": folder / "0.json", "1": folder / "1.json", "plan": folder / "plan-0.json"}
    words = [str(places[word[1:-1]]) if word.startswith("{") else word for word in more]
    assert run(["calibrate", "--cluster", str(folder / "c.yaml"), "--out", str(tmp_path / "out.yaml"), *words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert not (tmp_path / "out.yaml").exists()


def test_what_a_bench_alone_gives_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = gpu_kind("H200")
    measured_kind = replace(kind, efficiency=replace(kind.efficiency, matmul_fraction=0.5), memory_bandwidth_bytes_per_s=4e12)
    launch = Measurement("launch", {"kernels": 200}, "bf16", 4e-4)
    found = Bench("a GPU", "H200", ("bf16",), None, {}, (launch,), (), measured_kind, Stack("bench", host_s=6e-5))
    (tmp_path / "b.yaml").write_text(bench_yaml(found))
    (tmp_path / "c.yaml").write_text("name: one\nnodes:\n  - {name: n, gpu: H200, gpus: 1, intra: nvlink}\n")
    flags = ["--bench", str(tmp_path / "b.yaml"), "--out", str(tmp_path / "out.yaml")]
    assert run(["calibrate", "--cluster", str(tmp_path / "c.yaml"), *flags]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "taken from the bench: memory_bandwidth_bytes_per_s of H200, matmul_fraction of H200, stack.host_s" in told
    assert "before" not in told  # the table of what is fitted to runs


def test_a_cluster_without_calibration_has_no_interval(folder: Path, tmp_path: Path) -> None:
    assert (
        run(["simulate", str(folder / "plan-0.json"), "--cluster", str(folder / "c.yaml"), "--json", str(tmp_path / "r.json")])
        == 0
    )
    assert "iteration_interval_s" not in json.loads((tmp_path / "r.json").read_text())


def test_a_round_agrees_if_every_pair_that_differs_comes_in_the_order_predicted() -> None:
    # Measured 1, 1.01, 2: the first two may come in any order; of the other two pairs one is turned.
    one, other, last = (_Ran(PLANS[0], *times) for times in ((1.2, 1.0), (1.1, 1.01), (1.15, 2.0)))
    assert agreement([one, other, last]) == (0.0, 2, 1)
    assert agreement([one, other]) == (None, 0, 0)
    assert agreement([other, last]) == (1.0, 1, 0)


def test_two_plans_predicted_to_take_the_same_are_in_no_order_whichever_comes_first() -> None:
    one, other, last = (_Ran(PLANS[0], *times) for times in ((1.0, 1.0), (1.0, 2.0), (3.0, 4.0)))
    for ran in ([one, other, last], [last, other, one], [other, one, last]):
        assert agreement(ran) == (2 / 3, 3, 0)
