"""Every mistake ends in one line on standard error and an exit code, and leaves no file behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from partition.search import PLANNERS, Search
from tests.experiments.conftest import ROOT, TINY_CLUSTER, TINY_PLAN, Ran, World

Motley = Callable[..., Ran]


def plan_arguments(world: World, **changed: object) -> list[object]:
    """A command line of `plan` that is right, but for what is changed; None leaves a flag out."""
    values = {"cluster": world.cluster, "model": world.model, "global-batch": 4, "planner": "random", "budget": "2s"}
    flags = {**values, **{name.replace("_", "-"): value for name, value in changed.items()}}
    return ["plan", *(part for name, value in flags.items() if value is not None for part in (f"--{name}", value))]


def assert_refused(ran: Ran, code: int, *words: str) -> None:
    """One line on standard error that holds the words, nothing on standard output, and the exit code."""
    assert ran.code == code, ran.err
    assert ran.out == ""
    assert ran.err.startswith("motley: ") and ran.err.count("\n") == 1, ran.err
    for word in words:
        assert word in ran.err, ran.err


# --- Clusters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{name: box, gpu: RTX409, gpus: 2, intra: pcie4}", ["unknown GPU kind 'RTX409'", "did you mean RTX4090?"]),
        (
            "{name: box, gpu: RTX4090, gpus: 2, intra: pcie4, nic: {kind: ethernet, bandwidth: 10}}",
            ["nodes[0].nic.bandwidth", "10 without a unit", "Gbit/s"],
        ),
        ("{name: box, gpu: RTX4090, gpus: 2, intra: pcie4, color: red}", ["unknown key 'color'", "accepted"]),
        ("{name: box, gpu: RTX4090, intra: pcie4}", ["nodes[0].gpus", "is missing"]),
    ],
)
def test_a_mistake_in_a_cluster_file_names_file_key_and_what_is_accepted(
    motley: Motley, world: World, line: str, words: list[str]
) -> None:
    cluster = world.write("wrong.yaml", f"name: tiny\nnodes:\n  - {line}\n")
    assert_refused(motley(*plan_arguments(world, cluster=cluster)), 2, "wrong.yaml", *words)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ("GB/s,box/0\nbox/0,\n", ["names all 2 devices", "'box/1'"]),
        ("GB/s,box/0,box/1\nbox/0,,0\nbox/1,9,\n", ["above zero", "'box/0' to 'box/1'", "0"]),
        ("GB/s,box/0,box/1\nbox/0,,9\nbox/1,-3,\n", ["above zero", "'box/1' to 'box/0'", "-3"]),
        ("GB/s,box/0,box/1\nbox/0,,9\nbox/1,,\n", ["'box/1' to 'box/0'", "missing"]),
    ],
)
def test_a_mistake_in_a_bandwidth_matrix_names_the_pair(motley: Motley, world: World, matrix: str, words: list[str]) -> None:
    world.write("rates.csv", matrix)
    cluster = world.write("matrix.yaml", TINY_CLUSTER + "bandwidth_matrix: rates.csv\n")
    assert_refused(motley(*plan_arguments(world, cluster=cluster)), 2, "rates.csv", *words)


# --- Plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('["box/1"]', '["box/0"]', ["'box/0' is used twice"]),
        ('["box/1"]', '["box/7"]', ["'box/7' is not in cluster 'tiny'", "box/0-1"]),
        ("[2, 4]", "[3, 4]", ["layers 2 to 3 are missing"]),
        ('"micro_batches": 4', '"micro_batches": 3', ["global batch 4", "1 x 3 = 3"]),
        ('"layers": [2, 4]}]}]}', '"layers": [2', ["ends too early", "line 6"]),
        ('"precision": "bf16"', '"precison": "bf16"', ["unknown key 'precison'", "did you mean precision?"]),
    ],
)
def test_a_mistake_in_a_plan_is_told_in_one_line(motley: Motley, world: World, old: str, new: str, words: list[str]) -> None:
    assert old in TINY_PLAN
    plan = world.write("wrong.json", TINY_PLAN.replace(old, new))
    before = world.names()
    ran = motley("simulate", plan, "--cluster", world.cluster, "--json", world.folder / "report.json")
    assert_refused(ran, 2, "wrong.json", *words)
    assert world.names() == before


# --- Flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"budget": "4"}, ["--budget", "without a unit", "ms, s, min"]),
        ({"budget": "4 GB"}, ["--budget", "'GB'"]),
        ({"budget": "0s"}, ["--budget", "above zero"]),
        ({"planner": "flexflash"}, ["unknown planner 'flexflash'", "random"]),
        ({"planner": "randon"}, ["did you mean random?"]),
        ({"judge": "simulat"}, ["unknown judge 'simulat'", "did you mean simulate?"]),
        ({"model": "llama-2-17b"}, ["unknown model 'llama-2-17b'", "did you mean llama-2-"]),
        ({"precision": "bf17"}, ["unknown precision 'bf17'", "bf16"]),
        ({"global_batch": 0}, ["--global-batch", "0"]),
        ({"global_batch": "many"}, ["--global-batch", "many"]),
        ({"global_batch": None}, ["--global-batch"]),
        ({"cluster": "nowhere.yaml"}, ["nowhere.yaml", "no such file"]),
        ({"bugdet": "3s"}, ["--bugdet", "--budget"]),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(motley: Motley, world: World, changed: dict[str, object], words: list[str]) -> None:
    before = world.names()
    ran = motley(*plan_arguments(world, **changed, out=world.folder / "out.json"))
    assert_refused(ran, 2, *words)
    assert world.names() == before


def test_an_unknown_command_is_answered_with_the_nearest(motley: Motley) -> None:
    assert_refused(motley("pln"), 2, "pln", "plan")


# --- Outputs ---------------------------------------------------------------------------------------------------------


def explode(search: Search) -> None:
    """A planner that must not be reached."""
    raise AssertionError("the search began before the outputs were checked")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "{folder}"], ["--out", "is a folder"]),
        (["--out", "{cluster}/plan.json"], ["--out", "tiny.yaml", "is a file, but a folder is needed"]),
        (["--out", "{cluster}"], ["--out", "is read by this command"]),
        (["--out", "{folder}/a", "--json", "{folder}/a"], ["--json and --out both go to"]),
        (["--out", "-", "--json", "-"], ["both go to standard output"]),
        (["--out", ""], ["--out", "expected the name of a file"]),
    ],
)
def test_outputs_are_checked_before_the_search_begins(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: list[str]
) -> None:
    monkeypatch.setitem(PLANNERS, "explode", explode)
    filled = [flag.format(folder=world.folder, cluster=world.cluster) for flag in flags]
    assert_refused(motley(*plan_arguments(world, planner="explode"), *filled), 2, *words)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused_at_once(motley: Motley, world: World) -> None:
    locked = world.folder / "locked"
    locked.mkdir(mode=0o500)
    assert_refused(motley(*plan_arguments(world, out=locked / "plan.json")), 2, "--out", "locked")


def test_the_ending_of_a_picture_is_checked(motley: Motley, world: World) -> None:
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--timeline", world.folder / "timeline.gif")
    assert_refused(ran, 2, "--timeline", ".png, .svg, .pdf")


# --- Failures --------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_in_one_line_and_leaves_the_earlier_file(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Path(world.write("report.json", "earlier"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--json", report)
    assert ran.code in (2, 3)
    assert "no space left on device" in ran.err.lower() and ran.err.count("\n") == 1
    assert report.read_text() == "earlier"


def test_an_unexpected_failure_is_one_line_with_exit_code_3(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(search: Search) -> None:
        raise ZeroDivisionError("a planner's\nmistake")

    monkeypatch.setitem(PLANNERS, "broken", broken)
    assert_refused(motley(*plan_arguments(world, planner="broken")), 3, "ZeroDivisionError", "a planner's mistake")


def test_a_reader_that_goes_away_is_no_error_to_speak_of(world: World) -> None:
    command = [sys.executable, "-m", "experiments.cli", "simulate", world.plan, "--cluster", world.cluster, "--json", "-"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 3
    assert "Traceback" not in err and "BrokenPipe" not in err


# --- No feasible plan ------------------------------------------------------------------------------------------------


def test_a_model_that_fits_no_plan_exits_with_1_and_says_which_memory_lacks(motley: Motley, world: World) -> None:
    report, out = world.folder / "report.json", world.folder / "out.json"
    ran = motley(*plan_arguments(world, model="llama-2-70b", json=report, out=out))
    assert ran.code == 1
    (line,) = ran.err.splitlines()
    assert line.startswith("motley: no feasible plan: box/") and "GiB" in line
    assert not out.exists()
    written = json.loads(report.read_text())
    assert written["infeasible"]["reason"] == "memory"
    assert written["infeasible"]["need_bytes"] > written["infeasible"]["have_bytes"]
    assert [written[key] for key in ("iteration_s", "tokens_per_s", "mfu", "peak_bytes", "dollars")] == [None] * 5
