"""`motley simulate`: what it prints and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from sim.cost.estimate import estimation
from sim.engine import simulate
from sim.metrics import report
from sim.spec.cluster import read_cluster
from sim.spec.compile import compile_plan
from sim.spec.judge import Cost
from sim.spec.plan import read_plan
from sim.spec.program import parse_program
from sim.spec.trace import read_trace
from tests.experiments.conftest import TINY_CLUSTER, TINY_PLAN, Ran, World

Motley = Callable[..., Ran]


def test_the_report_is_that_of_the_functions_it_calls(motley: Motley, world: World) -> None:
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--json", "-")
    cluster = read_cluster(world.cluster)
    expected = report(simulate(read_plan(world.plan), cluster), cluster)
    written = json.loads(ran.out)  # standard output is nothing but JSON
    assert ran.code == 0
    assert written["iteration_s"] == expected.iteration_s
    assert written["peak_bytes"] == expected.peak_bytes
    assert written["infeasible"] is None
    assert "toy on tiny" in ran.err  # the table is for people, and goes beside it


def test_what_a_causal_mask_leaves_out_of_utilisation_is_told_where_it_is_much(motley: Motley, world: World) -> None:
    # A layer takes 81,920 FLOP a token for its weights, 32,768 for attention over 128 keys, and a fourth of the head's 32,768.
    told = motley("simulate", world.plan, "--cluster", world.cluster).out
    assert "\n13 % of the FLOP are causally masked attention, without which MFU is " in told
    short = world.write("short.json", TINY_PLAN.replace('"sequence_length": 128', '"sequence_length": 64'))
    assert "causally masked" not in motley("simulate", short, "--cluster", world.cluster).out


def test_the_estimate_may_judge_instead(motley: Motley, world: World) -> None:
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--judge", "estimate", "--json", "-")
    cluster, plan = read_cluster(world.cluster), read_plan(world.plan)
    verdict, simulated = estimation(cluster, plan.job())(plan), report(simulate(plan, cluster), cluster)
    written = json.loads(ran.out)
    assert ran.code == 0 and isinstance(verdict, Cost)
    assert {key: written[key] for key in asdict(verdict)} == asdict(verdict)
    assert written["iteration_s"] == pytest.approx(simulated.iteration_s, rel=1e-9)  # nothing shares a link here
    assert (written["infeasible"], written["devices"], written["links"]) == (None, [], [])
    assert "toy on tiny" in ran.err


@pytest.mark.parametrize(("flag", "value"), [("--trace", "t.json"), ("--timeline", "t.png"), ("--jitter", "0.1")])
def test_what_only_the_simulation_has_is_refused_with_the_estimate(motley: Motley, world: World, flag: str, value: str) -> None:
    before = world.names()
    place = value if flag == "--jitter" else world.folder / value
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--judge", "estimate", flag, place)
    assert ran.code == 2 and f"{flag} needs the event simulation" in ran.err and ran.err.count("\n") == 1
    assert world.names() == before


def test_another_software_stack_takes_the_place_of_the_clusters(motley: Motley, world: World) -> None:
    slow = world.write("slow.yaml", TINY_CLUSTER + "stack: {host: 1 ms}\n")
    iterations = [
        json.loads(motley("simulate", world.plan, "--cluster", cluster, *more, "--json", "-").out)["iteration_s"]
        for cluster, more in ((world.cluster, ()), (slow, ()), (slow, ("--stack", "motley")))
    ]
    assert iterations[2] == iterations[0] < iterations[1]


def test_constants_of_a_file_take_the_place_of_the_shipped_ones(motley: Motley, world: World) -> None:
    given = world.write("constants.yaml", "stacks: {nemo: {host: 5 ms}, ours: {host: 1 ms}}\n")
    asked = (
        ("--stack", "nemo"),
        ("--stack", "nemo", "--constants", given),
        ("--stack", "ours", "--constants", given),
        ("--constants", given),
        (),
    )
    nemo, slower, ours, own, bare = (
        json.loads(motley("simulate", world.plan, "--cluster", world.cluster, *more, "--json", "-").out)["iteration_s"]
        for more in asked
    )
    by_hand = world.write("slow.yaml", TINY_CLUSTER + "stack: {like: nemo, host: 5 ms}\n")
    assert slower == json.loads(motley("simulate", world.plan, "--cluster", by_hand, "--json", "-").out)["iteration_s"] > 2 * nemo
    assert own == bare < ours < slower  # the cluster's own stack is in no record of the file
    ran = motley("simulate", world.plan, "--cluster", by_hand, "--constants", given)
    assert ran.code == 0 and "constants.yaml has no record of the stack 'own', whose figures stay" in ran.err


def test_a_file_of_constants_is_not_overwritten(motley: Motley, world: World) -> None:
    given = world.write("constants.yaml", "stacks: {nemo: {host: 5 ms}}\n")
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--constants", given, "--json", given)
    assert ran.code == 2 and "is read by this command, and would be overwritten" in ran.err
    assert Path(given).read_text() == "stacks: {nemo: {host: 5 ms}}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stacks: {nemo: {host: soon}}\n", "stacks.nemo.host"),
        ("nothing: 1\n", "nothing"),
        (None, "constants.yaml"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate", "explain", "compare"])
def test_a_bad_file_of_constants_is_told_in_one_line(
    motley: Motley, world: World, command: str, text: str | None, words: str
) -> None:
    given = world.folder / "constants.yaml" if text is None else world.write("constants.yaml", text)
    job = ("--model", world.model, "--global-batch", 4)
    rest = {"plan": job, "compare": job, "simulate": (), "explain": ()}[command]
    plan = () if command in ("plan", "compare") else (world.plan,)
    ran = motley(command, *plan, "--cluster", world.cluster, *rest, "--constants", given)
    assert ran.code == 2 and words in ran.err and ran.err.count("\n") == 1


def test_the_table_has_a_row_for_each_lane(motley: Motley, world: World) -> None:
    ran = motley("simulate", world.plan, "--cluster", world.cluster)
    assert ran.code == 0 and ran.err == ""
    lanes = [line.split() for line in ran.out.splitlines() if line.startswith("p0s")]
    assert [lane[:1] + lane[-3:-1] for lane in lanes] == [["p0s0", "0-1", "none"], ["p0s1", "2-3", "none"]]
    assert lanes[0][1:4] == ["4", "x", "1"] and "box/0" in lanes[0] and "RTX4090" in lanes[0]
    assert "tokens/s" in ran.out and "MFU" in ran.out and "bubble" in ran.out


@pytest.mark.parametrize("columns", ["80", "100"])
def test_no_line_of_the_table_is_wider_than_the_terminal(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ran = motley("simulate", world.plan, "--cluster", world.cluster)
    assert max(len(line) for line in ran.out.splitlines()) <= int(columns)


def test_trace_and_timeline_are_written_where_asked_for_and_folders_are_made(motley: Motley, world: World) -> None:
    trace, timeline = world.folder / "new" / "trace.json", world.folder / "new" / "deeper" / "timeline.svg"
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--trace", trace, "--timeline", timeline)
    assert ran.code == 0
    assert read_trace(trace).plan == read_plan(world.plan)
    assert timeline.read_text().lstrip().startswith("<?xml")
    assert world.names() == {"tiny.yaml", "plan.json", "new/trace.json", "new/deeper/timeline.svg"}


def test_an_earlier_file_is_kept_and_its_place_told(motley: Motley, world: World) -> None:
    report_file = world.folder / "report.json"
    report_file.write_text("earlier")
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--json", report_file)
    assert (world.folder / "report.json.~1~").read_text() == "earlier"
    assert "report.json.~1~" in ran.out


def test_a_plan_for_another_cluster_is_simulated_with_a_warning(motley: Motley, world: World) -> None:
    plan = world.write("other.json", TINY_PLAN.replace('"cluster": "tiny"', '"cluster": "huge"'))
    ran = motley("simulate", plan, "--cluster", world.cluster)
    assert ran.code == 0
    assert ran.err.startswith("motley: warning: ") and "'huge'" in ran.err and "'tiny'" in ran.err


def test_an_infeasible_plan_exits_with_1_and_writes_its_report_alone(motley: Motley, world: World) -> None:
    plan = world.write("large.json", TINY_PLAN.replace('"hidden": 64', '"hidden": 65536'))
    files = {flag: world.folder / name for flag, name in (("--json", "r.json"), ("--trace", "t.json"), ("--timeline", "t.png"))}
    ran = motley("simulate", plan, "--cluster", world.cluster, *(part for pair in files.items() for part in pair))
    assert ran.code == 1
    (line,) = ran.err.splitlines()
    assert "is not feasible" in line and "GiB" in line and "--trace and --timeline" in line
    assert json.loads(files["--json"].read_text())["infeasible"]["reason"] == "memory"
    assert not files["--trace"].exists() and not files["--timeline"].exists()


def test_a_kind_without_the_precision_makes_the_plan_infeasible(motley: Motley, world: World) -> None:
    plan = world.write("fp4.json", TINY_PLAN.replace('"precision": "bf16"', '"precision": "nvfp4"'))
    ran = motley("simulate", plan, "--cluster", world.cluster)
    assert ran.code == 1
    assert "RTX4090" in ran.err and "nvfp4" in ran.err


def test_the_seed_draws_the_jitter(motley: Motley, world: World) -> None:
    def iteration_s(*flags: object) -> float:
        answer = json.loads(motley("simulate", world.plan, "--cluster", world.cluster, "--json", "-", *flags).out)
        return float(answer["iteration_s"])

    assert iteration_s() == iteration_s("--seed", 1)
    assert iteration_s("--jitter", 0.2, "--seed", 1) == iteration_s("--jitter", 0.2, "--seed", 1)
    assert iteration_s("--jitter", 0.2, "--seed", 1) != iteration_s("--jitter", 0.2, "--seed", 2)


@pytest.mark.parametrize("jitter", ["-0.1", "2", "nan", "much"])
def test_a_jitter_is_a_fraction(motley: Motley, world: World, jitter: str) -> None:
    ran = motley("simulate", world.plan, "--cluster", world.cluster, "--jitter", jitter)
    assert ran.code == 2 and f"between 0 and 1, but got '{jitter}'" in ran.err


def test_the_program_is_written_as_text_that_reads_back(motley: Motley, world: World) -> None:
    file = world.folder / "program.txt"
    assert motley("simulate", world.plan, "--cluster", world.cluster, "--program", file).code == 0
    assert parse_program(file.read_text()) == compile_plan(read_plan(world.plan))
