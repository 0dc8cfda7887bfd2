"""`motley plan`: what it prints, writes, and does when it is stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.commands.options import budget_s, default_sequence_length
from partition.search import PLANNERS, Search
from sim.spec.plan import Pipeline, Plan, Replica, Stage, parse_plan, read_plan
from sim.spec.transformer import transformer
from tests.experiments.conftest import ROOT, TINY_CLUSTER, Ran, World

Motley = Callable[..., Ran]


def arguments(world: World, *more: object, planner: str = "random") -> list[object]:
    return ["plan", "--cluster", world.cluster, "--model", world.model, "--global-batch", 4, "--planner", planner, *more]


def split_in_two(search: Search, micro_batch: int = 1) -> Plan:
    """The plan with one stage on each of the two GPUs."""
    layers, batch = search.job.model.layers, search.job.global_batch
    stages = tuple(
        Stage((Replica((device.name,), micro_batch),), (cut,))
        for device, cut in zip(search.cluster.devices, ((0, layers // 2), (layers // 2, layers)), strict=True)
    )
    pipelines = (Pipeline(micro_batch, batch // micro_batch, stages),)
    return Plan(search.cluster.name, search.job.model, search.job.sequence_length, batch, pipelines, search.job.precision)


# --- What it writes --------------------------------------------------------------------------------------------------


def test_the_plan_and_the_report_are_written_and_agree_with_simulate(motley: Motley, world: World) -> None:
    out, report = world.folder / "found.json", world.folder / "report.json"
    ran = motley(*arguments(world, "--budget", "20s", "--out", out, "--json", report))
    assert ran.code == 0 and ran.err == ""
    assert f"wrote {out}" in ran.out and "random judged" in ran.out
    answer = json.loads(report.read_text())
    again = json.loads(motley("simulate", out, "--cluster", world.cluster, "--json", "-").out)
    assert again["iteration_s"] == answer["iteration_s"] and again["peak_bytes"] == answer["peak_bytes"]
    assert answer["search"]["planner"] == "random" and answer["search"]["judged"] > 0
    assert answer["search"]["stopped"] == "finished"


def test_a_search_may_ask_the_estimate_and_tells_the_simulated_figures(motley: Motley, world: World) -> None:
    out, report = world.folder / "found.json", world.folder / "report.json"
    ran = motley(*arguments(world, "--judge", "estimate", "--budget", "20s", "--out", out, "--json", report))
    assert ran.code == 0 and "the judge estimate took the iteration for" in ran.out
    answer = json.loads(report.read_text())
    assert answer["search"]["judge"] == "estimate"
    again = json.loads(motley("simulate", out, "--cluster", world.cluster, "--json", "-").out)
    assert again["iteration_s"] == answer["iteration_s"] and again["devices"] == answer["devices"] != []


def test_plans_are_searched_and_simulated_on_the_stack_that_is_named(motley: Motley, world: World) -> None:
    slow = world.write("slow.yaml", TINY_CLUSTER + "stack: {host: 1 ms, step: 3 s}\n")
    out = world.folder / "found.json"
    ran = motley(*arguments(world, "--cluster", slow, "--stack", "motley", "--budget", "20s", "--out", out, "--json", "-"))
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out)
    assert answer["iteration_s"] < 3
    # As on the cluster whose stack that is.
    again = json.loads(motley("simulate", out, "--cluster", world.cluster, "--json", "-").out)
    assert again["iteration_s"] == answer["iteration_s"]


@pytest.mark.parametrize("flag", ["--json", "--out"])
def test_standard_output_is_nothing_but_json_where_it_is_asked_for(motley: Motley, world: World, flag: str) -> None:
    ran = motley(*arguments(world, flag, "-"))
    assert ran.code == 0
    if flag == "--out":
        assert parse_plan(ran.out).cluster == "tiny"
    assert isinstance(json.loads(ran.out), dict)
    assert "tiny-llama on tiny" in ran.err


def test_two_processes_with_one_seed_write_the_same_plan(world: World) -> None:
    texts = []
    for number in range(2):
        out = world.folder / f"{number}.json"
        command = [sys.executable, "-m", "experiments.cli", *map(str, arguments(world, "--budget", "1min", "--out", out))]
        environment = {**os.environ, "PYTHONHASHSEED": str(number)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "the same answer on every machine" in done.stdout
        texts.append(out.read_text())
    assert texts[0] == texts[1]


# --- How it ends -----------------------------------------------------------------------------------------------------


def test_ctrl_c_writes_the_best_plan_so_far_and_exits_with_130(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(search: Search) -> None:
        search.consider(split_in_two(search))
        raise KeyboardInterrupt

    monkeypatch.setitem(PLANNERS, "interrupted", interrupted)
    out = world.folder / "found.json"
    ran = motley(*arguments(world, "--out", out, planner="interrupted"))
    assert ran.code == 130
    assert "interrupted after" in ran.out and "the best plan until then" in ran.out
    assert read_plan(out).pipelines[0].micro_batches == 4


def test_ctrl_c_before_any_plan_writes_nothing(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(search: Search) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(PLANNERS, "interrupted", interrupted)
    before = world.names()
    out, report = world.folder / "found.json", world.folder / "report.json"
    ran = motley(*arguments(world, "--out", out, "--json", report, planner="interrupted"))
    assert ran.code == 130 and ran.err.startswith("motley: interrupted after 0 plans")
    assert world.names() == before


def test_a_search_that_its_budget_stopped_says_that_the_answer_may_differ(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(search: Search) -> None:
        while True:
            search.consider(split_in_two(search))

    monkeypatch.setitem(PLANNERS, "endless", endless)
    ran = motley(*arguments(world, "--budget", "200ms", planner="endless"))
    assert ran.code == 0
    assert "stopped at its budget of 0.2 s" in ran.out and "another answer" in ran.out


# --- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "expected"), [("30s", 30.0), ("2min", 120.0), ("500ms", 0.5), ("1.5 s", 1.5)])
def test_a_budget_has_a_unit(text: str, expected: float) -> None:
    assert budget_s(text) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [("gpt3-125m", 2048), ("llama-7b", 2048), ("llama-2-7b", 4096), ("qwen2.5-7b", 4096), ("opt-350m", 2048), ("gpt2", 1024)],
)
def test_the_default_sequence_length_is_the_models_but_at_most_4096(model: str, expected: int) -> None:
    assert default_sequence_length(transformer(model)) == expected


def test_the_sequence_length_is_the_models_where_none_is_given(motley: Motley, world: World) -> None:
    assert json.loads(motley(*arguments(world, "--out", "-")).out)["sequence_length"] == 1024
    assert json.loads(motley(*arguments(world, "--seq-len", 256, "--out", "-")).out)["sequence_length"] == 256


@pytest.mark.parametrize("command", ["plan", "simulate", "compare", "demo"])
def test_the_help_of_every_command_shows_an_example_that_starts_with_it(motley: Motley, command: str) -> None:
    ran = motley(command, "--help")
    assert ran.code == 0 and ran.err == ""
    assert "Example:" in ran.out and f"motley {command} " in ran.out.split("Example:")[1]


def test_the_version_is_printed(motley: Motley) -> None:
    assert motley("--version").out == "motley 0.1.0\n"


def test_the_example_cluster_of_the_help_exists() -> None:
    assert Path(ROOT / "examples" / "clusters" / "hexiscale-mixed-a.yaml").is_file()
