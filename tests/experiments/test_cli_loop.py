"""`motley loop` with runs whose truth is known: each is simulated on a cluster that the loop is not told of."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.cli import run
from experiments.commands import loop
from experiments.pacing import pace
from runtime.settings import Settings
from sim.engine import simulate
from sim.spec.cluster import Cluster, cluster_yaml, read_cluster
from sim.spec.compile import compile_plan
from sim.spec.pace import read_pace
from sim.spec.plan import Plan, read_plan
from sim.spec.trace import Trace, read_trace
from tests.calibration_runs import MIXED, hidden_factors, measured, truth

WORLD = MIXED.without_nodes({"large-1", "small-1"})
TRUE = truth(WORLD, hidden_factors(WORLD, seed=8))
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@dataclass
class Result:
    trace: Trace


@dataclass
class Told:
    result: Result


@dataclass
class World:
    """A folder with a cluster, its truth and a model, and how many runs were made."""

    folder: Path
    runs: int = 0

    def loop(self, *more: str, rounds: int = 3) -> int:
        return run(
            [
                *("loop", "--cluster", str(self.folder / "c.yaml"), "--model", str(self.folder / "model.json")),
                *(
                    "--global-batch",
                    "8",
                    "--seq-len",
                    "64",
                    "--data",
                    f"text:{self.folder / 'texts'}",
                    "--out",
                    str(self.folder / "out"),
                ),
                *("--devices", "paced", "--paced-as", str(self.folder / "true.yaml")),
                *("--plans", "4", "--rounds", str(rounds), "--budget", "300ms", *more),
            ]
        )

    def run_told(self, path: Path, plan: Plan, settings: Settings, model: str | None, cluster: Cluster | None) -> Told:
        """In the place of a run; checks what it is told first."""
        self.runs += 1
        assert read_plan(path) == plan and model is None and cluster is not None
        assert settings.pace is not None
        assert read_pace(settings.pace, plan, compile_plan(plan)) == pace(plan, TRUE)  # the truth, not the cluster
        return Told(Result(measured(plan, TRUE, self.runs)))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    (tmp_path / "c.yaml").write_text(cluster_yaml(WORLD))
    (tmp_path / "true.yaml").write_text(cluster_yaml(TRUE))
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("one text of some words. " * 100)
    monkeypatch.setattr(loop, "run_told", made.run_told)
    return made


def test_it_ends_when_the_order_is_as_predicted_and_a_stopped_one_goes_on(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.loop(rounds=1) == 0
    capsys.readouterr()
    first = world.runs
    assert first == len(list((world.folder / "out" / "runs").glob("*.json"))) >= 2

    assert world.loop(rounds=3) == 0
    told = capsys.readouterr().out
    assert "the order is as predicted" in told and "round 2" in told
    out = world.folder / "out"
    traces = [read_trace(path) for path in (out / "runs").glob("*.json")]
    assert world.runs == len(traces)  # what had run was not run again
    best = min(traces, key=lambda trace: trace.iteration_s)
    assert read_plan(out / "plan.json") == best.plan
    found = read_cluster(out / "calibrated.yaml")
    for trace in traces:
        assert simulate(trace.plan, found).iteration_s == pytest.approx(simulate(trace.plan, TRUE).iteration_s, rel=0.02)
    before = [simulate(trace.plan, WORLD).iteration_s / trace.iteration_s - 1 for trace in traces]
    assert max(map(abs, before)) > 0.05

    # With all of it there, nothing runs; a trace that is gone is made again.
    assert world.loop(rounds=3) == 0
    told = re.sub(r" \(the earlier one is kept as [^)]*\)", "", told)
    assert world.runs == len(traces) and capsys.readouterr().out == told
    next((out / "runs").glob("*.json")).unlink()
    assert world.loop(rounds=3) == 0
    assert world.runs == len(traces) + 1


def test_one_that_was_killed_among_a_rounds_plans_chooses_them_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file = loop.write_file

    def killed_at_the_second(path: Path, content: str) -> None:
        if path.name == "plan-02.json":
            os.kill(os.getpid(), signal.SIGKILL)
        write_file(path, content)

    monkeypatch.setattr(loop, "write_file", killed_at_the_second)
    process = multiprocessing.get_context("fork").Process(target=world.loop, kwargs={"rounds": 1})
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    out = world.folder / "out"
    assert list(out.rglob("plan-01.json"))  # the first was written, and stands where no loop takes it for the round's

    monkeypatch.setattr(loop, "write_file", write_file)
    assert world.loop(rounds=1) == 0
    assert world.runs == len(list((out / "round-1").glob("plan-*.json"))) >= 2
    assert {path.name for path in out.iterdir()} == {"loop.json", "round-1", "runs", "plan.json", "calibrated.yaml"}


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ('{"cluster": "name: other"}', "has a loop of another cluster; take another folder"),
        ("[]", "has a loop of another cluster; take another folder"),
        ("{", "loop.json, line 1, column 2: ends too early"),
    ],
)
def test_another_loops_folder_is_refused(world: World, capsys: pytest.CaptureFixture[str], known: str, message: str) -> None:
    (world.folder / "out").mkdir()
    (world.folder / "out" / "loop.json").write_text(known)
    assert world.loop() == 2
    assert message in capsys.readouterr().err
    assert world.runs == 0


def test_a_loop_of_another_model_or_other_settings_under_the_same_names_is_refused(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.loop(rounds=1) == 0
    assert world.loop("--steps", "9") == 2
    assert "has a loop of another settings (Settings(steps=" in capsys.readouterr().err
    wider = json.dumps(MODEL | {"intermediate_size": 2 * MODEL["intermediate_size"]})
    (world.folder / "model.json").write_text(wider)
    assert world.loop(rounds=1) == 2
    assert "has a loop of another model; take another folder" in capsys.readouterr().err


def test_a_round_is_calibrated_on_its_own_runs_and_those_before_whenever_it_is_looked_at(world: World) -> None:
    out = world.folder / "out"
    assert world.loop("--plans", "2", rounds=1) == 0
    assert not (out / "round-1" / "calibrated.yaml").exists() and not (out / "calibrated.yaml").exists()
    for _ in range(2):  # the second time all has run
        assert world.loop(rounds=2) == 0
        assert not (out / "round-1" / "calibrated.yaml").exists()
        assert len(list((out / "runs").glob("*.json"))) >= 4
        assert (out / "round-2" / "calibrated.yaml").is_file()


def test_why_no_plan_was_found_is_told(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.loop("--precision", "bf16") == 1
    told = capsys.readouterr().err
    assert "motley: round 1: no plan was found within 300ms: " in told and "bf16" in told


def test_files_of_a_user_are_neither_overwritten_nor_lost(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    out = world.folder / "out"
    out.mkdir()
    (out / "plan.json").write_text("mine")
    assert world.loop(rounds=1) == 0
    assert (out / "plan.json.~1~").read_text() == "mine" and "the earlier one is kept as" in capsys.readouterr().out
    read = world.folder / "there" / "calibrated.yaml"
    read.parent.mkdir()
    read.write_text((world.folder / "c.yaml").read_text())
    assert world.loop("--cluster", str(read), "--out", str(read.parent)) == 2
    assert "calibrated.yaml is read by this command, and would be overwritten" in capsys.readouterr().err
    assert [path.name for path in read.parent.iterdir()] == ["calibrated.yaml"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--devices", "slow"], "--devices is real or paced, but got 'slow'"),
        (["--devices", "real"], "--paced-as is of paced devices"),
        (["--plans", "1"], "at least 2"),
        (["--data", "text:nowhere"], "nowhere: cannot be read"),
        (["--out", "{folder}/texts/out"], "texts/out lies in "),
        (["--device", "cuda"], "device cuda needs a GPU"),
        (["--precision", "fp8"], "the runtime trains in fp32, tf32, fp16, bf16, but the plan's precision is fp8"),
        (["--model", "opt-350m"], "the runtime cannot run an embedding of another width than the layers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    world: World, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert world.loop(*[word.format(folder=world.folder) for word in more]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert not (world.folder / "out").exists()
