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
from sim.spec.transformer import transformer
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("megatron-cor", ["--stack: unknown software stack 'megatron-cor'; did you mean megatron-core?", "known: motley, "]),
        ("", ["--stack: unknown software stack ''"]),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate", "compare", "run"])
def test_a_stack_that_is_not_known_is_told_with_the_nearest(
    motley: Motley, world: World, command: str, name: str, words: list[str]
) -> None:
    lines: dict[str, list[object]] = {
        "plan": plan_arguments(world),
        "simulate": ["simulate", world.plan, "--cluster", world.cluster],
        "compare": ["compare", "--cluster", world.cluster, "--model", world.model, "--global-batch", 4],
        "run": ["run", world.plan, "--cluster", world.cluster, "--steps", 1, "--data", f"text:{world.folder}"],
    }
    files = world.names()
    assert_refused(motley(*lines[command], "--stack", name), 2, *words)
    assert world.names() == files


@pytest.mark.parametrize("command", ["plan", "simulate", "compare", "run"])
def test_the_stack_is_in_the_help(motley: Motley, command: str) -> None:
    ran = motley(command, "--help")
    assert ran.code == 0 and "--stack" in ran.out


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
        ('"vocab": 256', '"vocab": 256, "position": "learned", "max_positions": 64', ["64 tokens", "sequence length is 128"]),
        ('"layers": [2, 4]', '"layers": [2, 4], "recompute": {"full": 99}', ["pipelines[0].stages[1]", "which has 2", "99"]),
        ('"precision": "bf16"', '"schedule": "zb-v"', ["pipelines[0].stages[0] has 1 layer range, but 'zb-v' takes two"]),
        (
            '"layers": [2, 4]}]}]}',
            '"layers": [[2, 3], [3, 4]]}]}], "schedule": "interleaved"}',
            ["pipelines[0].stages[1] has 2 layer ranges", "as many of every stage, and stages[0] has 1"],
        ),
        ('"precision": "bf16"', '"expert_parallel": 2', ["expert_parallel divides the experts evenly", "has none"]),
        ('"precision": "bf16"', '"shard_group": 2', ["shard_group 2 must divide the number of replicas", "have 1"]),
        ('"layers": [0, 2]', '"layers": [[0, 1], [1, 2]]', ["pipelines[0].stages[0] has 2 layer ranges"]),
        (
            '"global_batch": 4',
            '"global_batch": 100000000',
            ["global batch 100000000 over the pipelines, but got 1 x 4 = 4"],
        ),
    ],
)
def test_a_mistake_in_a_plan_is_told_in_one_line(motley: Motley, world: World, old: str, new: str, words: list[str]) -> None:
    assert old in TINY_PLAN
    plan = world.write("wrong.json", TINY_PLAN.replace(old, new))
    before = world.names()
    ran = motley("simulate", plan, "--cluster", world.cluster, "--json", world.folder / "report.json")
    assert_refused(ran, 2, "wrong.json", *words)
    assert world.names() == before


def test_zero_2_with_unequal_cuts_is_refused_with_the_files_name(motley: Motley, world: World) -> None:
    plan = json.loads(TINY_PLAN)
    whole = {"micro_batch": 1, "micro_batches": 2, "stages": [{"devices": ["box/0"], "layers": [0, 4]}]}
    other = {"micro_batch": 1, "micro_batches": 4, "stages": [{"devices": ["box/1"], "layers": [0, 4]}]}
    file = world.write("wrong.json", json.dumps(plan | {"zero_stage": 2, "global_batch": 6, "pipelines": [whole, other]}))
    assert_refused(motley("simulate", file, "--cluster", world.cluster), 2, f"{file}: zero_stage 2 shares")


def test_a_plan_whose_program_is_too_large_is_refused_at_once(motley: Motley, world: World) -> None:
    changes = {
        '"micro_batches": 4': '"micro_batches": 1000000',
        '"global_batch": 4': '"global_batch": 1000000, "zero_stage": 3',
    }
    text = TINY_PLAN
    for old, new in changes.items():
        text = text.replace(old, new)
    ran = motley("simulate", world.write("large.json", text), "--cluster", world.cluster)
    assert_refused(ran, 2, "large.json: the plan has about 14,000,000 instructions", "at most 10,000,000")


# --- Flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"budget": "4"}, ["--budget", "without a unit", "ms, s, min"]),
        ({"budget": "4 GB"}, ["--budget", "'GB'"]),
        ({"budget": "0s"}, ["--budget", "above zero"]),
        ({"budget": "1e999999999s"}, ["--budget", "a time from 0 to 1e7 s"]),
        ({"global_batch": 10**30}, ["global batch", "at most 1,000,000"]),
        ({"sequence_length": None, "seq_len": 10**30}, ["sequence length", "at most 67,108,864"]),
        ({"planner": "flexflash"}, ["unknown planner 'flexflash'", "random"]),
        ({"planner": "randon"}, ["did you mean random?"]),
        ({"judge": "simulat"}, ["unknown judge 'simulat'", "did you mean simulate?"]),
        ({"model": "llama-2-17b"}, ["unknown model 'llama-2-17b'", "did you mean llama-2-"]),
        ({"precision": "bf17"}, ["unknown precision 'bf17'", "bf16"]),
        ({"global_batch": 0}, ["--global-batch", "0"]),
        ({"global_batch": "many"}, ["--global-batch", "many"]),
        ({"global_batch": None}, ["--global-batch"]),
        ({"cluster": "nowhere.yaml"}, ["error: nowhere.yaml: cannot be read (no such file or directory)"]),
        ({"cluster": "/"}, ["error: /: cannot be read (is a directory)"]),
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
        (["--out", "{folder}/" + "x" * 300], ["--out", "cannot be written (file name too long)"]),
        (["--out", "{folder}/new/" + "x" * 300 + "/plan.json"], ["--out", "cannot be written (file name too long)"]),
        (["--out", "/proc/motley/plan.json"], ["--out", "/proc/motley/plan.json cannot be written"]),
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


@pytest.mark.parametrize("flag", ["--json", "--timeline", "--program"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_else_is(motley: Motley, world: World, flag: str) -> None:
    before = world.names()
    trace = world.folder / "new" / "trace.json"
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--trace", trace, flag, "/proc/x.png")
    assert_refused(ran, 2, flag, "/proc/x.png")
    assert world.names() == before and not trace.parent.exists()


def test_an_existing_file_whose_name_leaves_no_room_for_its_successors_is_refused_at_once(motley: Motley, world: World) -> None:
    report = world.write("x" * 254, "earlier")
    assert_refused(motley("simulate", world.plan, "--cluster", world.cluster, "--json", report), 2, "--json", "too long")


def test_files_that_other_inputs_name_are_not_overwritten(motley: Motley, world: World) -> None:
    matrix = world.write("rates.csv", "GB/s,box/0,box/1\nbox/0,,9\nbox/1,9,\n")
    cluster = world.write("matrix.yaml", TINY_CLUSTER + "bandwidth_matrix: rates.csv\n")
    model = world.write("config.json", Path(world.model).read_text())
    layers = transformer(model).layers
    inline = '{"name": "toy", "layers": 4, "hidden": 64, "ffn": 128, "heads": 4, "vocab": 256}'
    plan = world.write("of.json", TINY_PLAN.replace(inline, json.dumps(model)).replace("[2, 4]", f"[2, {layers}]"))
    before = world.names()
    assert_refused(motley("simulate", world.plan, "--cluster", cluster, "--json", matrix), 2, "--json", "is read by")
    assert_refused(motley("simulate", plan, "--cluster", cluster, "--trace", model), 2, "--trace", "is read by")
    assert_refused(motley(*plan_arguments(world, cluster=cluster, out=matrix)), 2, "--out", "is read by")
    assert_refused(motley(*plan_arguments(world, model=model, json=model)), 2, "--json", "is read by")
    compare = ("compare", "--clusters", cluster, "--model", model, "--global-batch", 4, "--planners", "random")
    assert_refused(motley(*compare, "--json", matrix), 2, "--json", "is read by")
    world.write("results.csv", Path(matrix).read_text())
    cluster = world.write("matrix.yaml", TINY_CLUSTER + "bandwidth_matrix: results.csv\n")
    assert_refused(motley(*compare, "--out", world.folder), 2, "--out (results.csv)", "is read by")
    assert world.names() == before | {"results.csv"}


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_place_is_named(motley: Motley, world: World) -> None:
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--json", "/dev/full")
    assert_refused(ran, 3, "error: /dev/full: no space left on device")


def test_a_lack_of_memory_is_told_in_words(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(search: Search) -> None:
        raise MemoryError

    monkeypatch.setitem(PLANNERS, "greedy", greedy)
    assert_refused(motley(*plan_arguments(world, planner="greedy")), 3, "the memory of this machine ran out")


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


def test_an_interrupt_while_it_is_imported_is_one_line() -> None:
    program = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'experiments.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from experiments.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "motley: interrupted\n")


def test_an_interrupt_of_a_command_is_one_line(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.commands.export.read_plan", interrupted)
    ran = motley("export", "plan.json", "--to", "megatron")
    assert (ran.code, ran.out, ran.err) == (130, "", "motley: interrupted\n")
