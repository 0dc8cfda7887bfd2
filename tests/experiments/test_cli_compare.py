"""`motley compare`, and the comparison behind it."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from experiments import comparison
from experiments.comparison import Cell, Outcome, compare, kept, ranking, run_cell, winner, with_jitter
from partition.objective import Ledger
from partition.search import PLANNERS, Result, Search, simulation
from sim.cost.estimate import estimation
from sim.engine import simulate
from sim.spec.cluster import read_cluster
from sim.spec.job import Job
from sim.spec.judge import Cost, Infeasible
from sim.spec.plan import read_plan
from sim.spec.reading import InputError
from sim.spec.stack import Stack
from sim.spec.transformer import transformer
from tests.experiments.conftest import TINY_CLUSTER, Ran, World

Motley = Callable[..., Ran]


def arguments(world: World, *more: object) -> list[object]:
    return ["compare", "--model", world.model, "--global-batch", 4, "--budget", "5s", *more]


# --- The command -----------------------------------------------------------------------------------------------------


def test_every_plan_and_row_of_a_comparison_is_written(motley: Motley, world: World) -> None:
    other = world.write("other.yaml", TINY_CLUSTER.replace("name: tiny", "name: other").replace("RTX4090", "RTX3090"))
    out, rows = world.folder / "out", world.folder / "rows.json"
    # As a shell writes it for --clusters *.yaml: the second file follows the flag's own.
    ran = motley(
        *arguments(world, "--clusters", other, world.cluster, "--planners", "random,megatron", "--seeds", 2),
        *("--out", out, "--json", rows),
    )
    assert ran.code == 0, ran.err
    names = {
        f"{cluster}.{planner}.{seed}.json"
        for cluster in ("tiny", "other")
        for planner in ("random", "megatron")
        for seed in (0, 1)
    }
    assert {path.name for path in out.iterdir()} == names | {"results.csv", "history.csv", "quality.png"}
    with (out / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(json.loads(rows.read_text())) == 8
    for row in table:
        plan = read_plan(out / row["plan"])
        assert plan.cluster == row["cluster"] and float(row["iteration_s"]) > 0
        best = min(float(other["iteration_s"]) for other in table if other["cluster"] == row["cluster"])
        assert float(row["ratio_to_best"]) == float(row["iteration_s"]) / best
    for cluster in ("tiny", "other"):
        assert f"tiny-llama on {cluster}, 4 x 1024 tokens, bf16; medians of 2 seeds" in " ".join(ran.out.split())


def test_plans_of_an_earlier_comparison_do_not_stay_beside_those_of_another(motley: Motley, world: World) -> None:
    out = world.folder / "out"
    out.mkdir()
    own = world.write("out/notes.json", "{}")
    first = motley(*arguments(world, "--cluster", world.cluster, "--planners", "random,megatron", "--out", out))
    assert first.code == 0, first.err
    before = {name: (out / name).read_text() for name in ("tiny.random.0.json", "tiny.megatron.0.json")}
    # Again, and with a planner fewer: its plan of the first time is none of the second's results.
    second = motley(*arguments(world, "--cluster", world.cluster, "--planners", "random", "--out", out))
    assert second.code == 0, second.err
    names = {"tiny.random.0.json", "results.csv", "history.csv", "quality.png", "notes.json"}
    assert {path.name for path in out.iterdir() if not path.name.endswith("~")} == names
    assert (out / "tiny.megatron.0.json.~1~").read_text() == before["tiny.megatron.0.json"]
    third = motley(*arguments(world, "--cluster", world.cluster, "--planners", "random", "--out", out, "--model", "llama-2-70b"))
    assert third.code == 1 and "no feasible plan" in third.err
    names = {"results.csv", "history.csv", "notes.json"}
    assert {path.name for path in out.iterdir() if not path.name.endswith("~")} == names
    assert Path(own).read_text() == "{}" and "tiny.megatron.0.json is of an earlier comparison" in " ".join(second.out.split())


def test_the_judge_of_the_flag_ranks(motley: Motley, world: World) -> None:
    out = world.folder / "out"
    ran = motley(*arguments(world, "--cluster", world.cluster, "--planners", "random", "--judge", "estimate", "--out", out))
    assert ran.code == 0, ran.err
    (row,) = csv.DictReader((out / "results.csv").read_text().splitlines())
    plan = read_plan(out / row["plan"])
    verdict = estimation(read_cluster(world.cluster), plan.job())(plan)
    assert row["judge"] == "estimate" and isinstance(verdict, Cost)
    assert float(row["iteration_s"]) == verdict.iteration_s


def test_planners_are_ranked_on_the_stack_that_is_named(motley: Motley, world: World) -> None:
    clusters = [
        world.write(f"{name}.yaml", TINY_CLUSTER.replace("name: tiny", f"name: {name}") + line)
        for name, line in (("plain", ""), ("slow", "stack: {step: 3 s}\n"))
    ]
    rows = []
    for more in ((), ("--stack", "motley")):
        ran = motley(*arguments(world, "--clusters", *clusters, "--planners", "random", "--json", "-", *more))
        assert ran.code == 0, ran.err
        rows.append({row["cluster"]: row["iteration_s"] for row in json.loads(ran.out)})
    assert rows[0]["slow"] > 3 > rows[0]["plain"]
    assert rows[1] == {"plain": rows[0]["plain"], "slow": rows[0]["plain"]}


def test_the_fastest_planner_stands_first_and_one_without_a_plan_last(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def barren(search: Search) -> None:
        """Finds nothing."""

    monkeypatch.setitem(PLANNERS, "barren", barren)
    ran = motley(*arguments(world, "--cluster", world.cluster, "--planners", "barren,random", "--processes", 1))
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines() if "random  " in line or "barren  " in line]
    assert rows[0][:2] == ["1", "random"]
    assert rows[1][:4] == ["-", "barren", "no", "plan"]
    assert "barren found no plan: " in ran.out


def test_no_plan_at_all_exits_with_1(motley: Motley, world: World) -> None:
    values = ["compare", "--cluster", world.cluster, "--model", "llama-2-70b", "--global-batch", 4, "--budget", "5s"]
    ran = motley(*values, "--planners", "random")
    assert ran.code == 1
    assert ran.err == "motley: no feasible plan for tiny\n"


def test_a_planner_that_serves_no_such_cluster_has_a_row_that_says_so(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def picky(search: Search) -> None:
        raise InputError("at most 1 GPU, but got 2")

    monkeypatch.setitem(PLANNERS, "picky", picky)
    ran = motley(*arguments(world, "--cluster", world.cluster, "--planners", "picky,random", "--processes", 1, "--json", "-"))
    assert ran.code == 0
    rows = {row["planner"]: row for row in json.loads(ran.out)}
    assert rows["picky"]["stopped"] == "refused" and rows["picky"]["refusal"] == "at most 1 GPU, but got 2"
    assert rows["picky"]["iteration_s"] is None and rows["picky"]["error"] is None
    assert "picky refused: at most 1 GPU, but got 2" in ran.err


def test_all_planners_are_every_registered_one_and_the_baselines(motley: Motley, world: World) -> None:
    ran = motley(*arguments(world, "--cluster", world.cluster, "--planners", "all", "--budget", "1s", "--json", "-"))
    assert {row["planner"] for row in json.loads(ran.out)} == set(PLANNERS) >= {"uniform-grid", "single-kind"}


def test_history_has_the_best_iteration_each_time_it_became_better(motley: Motley, world: World) -> None:
    out = world.folder / "out"
    ran = motley(*arguments(world, "--cluster", world.cluster, "--planners", "random,megatron", "--seeds", 2, "--out", out))
    assert ran.code == 0, ran.err
    results = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    steps = list(csv.DictReader((out / "history.csv").read_text().splitlines()))
    for row in results:
        own = [step for step in steps if (step["planner"], step["seed"]) == (row["planner"], row["seed"])]
        times = [float(step["iteration_s"]) for step in own]
        assert times == sorted(set(times), reverse=True) and times[-1] == float(row["iteration_s"])
        at = [float(step["seconds"]) for step in own]
        assert at == sorted(at) and at[-1] == float(row["found_s"])


@pytest.mark.parametrize(
    ("objective", "measure", "heading"),
    [("cost", "dollars_per_billion_tokens", "$ per 1e9"), ("energy", "joules_per_token", "J per")],
)
def test_planners_are_compared_by_what_their_plans_cost_or_take(
    motley: Motley, world: World, objective: str, measure: str, heading: str
) -> None:
    priced = TINY_CLUSTER + "\ngpu_kinds:\n  RTX4090: {price: 0.4 $/h}\n"
    cluster, out = world.write("priced.yaml", priced), world.folder / "out"
    asked = ("--cluster", cluster, "--planners", "random,megatron", "--seeds", 2, "--objective", objective, "--out", out)
    ran = motley(*arguments(world, *asked))
    assert ran.code == 0, ran.err
    assert heading in ran.out and "iteration" not in ran.out.splitlines()[1]
    results = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    steps = list(csv.DictReader((out / "history.csv").read_text().splitlines()))
    best = min(float(row[measure]) for row in results)
    for row in results:
        assert row["objective"] == objective and float(row["ratio_to_best"]) == pytest.approx(float(row[measure]) / best)
        plan, place = read_plan(out / row["plan"]), read_cluster(cluster)
        verdict = simulation(place, Job(transformer(world.model), plan.sequence_length, 4))(plan)
        assert isinstance(verdict, Cost)
        assert float(row[measure]) == pytest.approx(getattr(Ledger(place).outlay(plan, verdict), measure))
        own = [float(step[measure]) for step in steps if (step["planner"], step["seed"]) == (row["planner"], row["seed"])]
        assert own == sorted(set(own), reverse=True) and own[-1] == float(row[measure])
    page = world.folder / "report.html"
    told = motley("report", out, "--out", page)
    assert told.code == 0, told.err
    assert "Quality of the best plan" in (text := page.read_text()) and re.search(
        rf">objective<.*?>{objective}<", text, re.DOTALL
    )


def test_dollars_without_prices_are_told_in_one_line(motley: Motley, world: World) -> None:
    cluster = world.write("priceless.yaml", TINY_CLUSTER + "\ngpu_kinds:\n  RTX4090: {price: null}\n")
    ran = motley(*arguments(world, "--cluster", cluster, "--objective", "cost"))
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1 and "no price is known" in ran.err


def test_a_comparison_that_is_killed_continues_without_what_is_finished(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that dies stands for the kill: it leaves the folder as a kill would, between two searches."""
    out, runs = world.folder / "out", []

    def counted(search: Search) -> None:
        runs.append(search.seed)
        PLANNERS["random"](search)

    def killed(search: Search) -> None:
        raise SystemExit(137)

    values = arguments(world, "--cluster", world.cluster, "--planners", "counted,later", "--seeds", 2, "--processes", 1)
    monkeypatch.setitem(PLANNERS, "counted", counted)
    monkeypatch.setitem(PLANNERS, "later", killed)
    assert motley(*values, "--out", out).code != 0
    assert runs == [0, 1] and not (out / "results.csv").exists()

    monkeypatch.setitem(PLANNERS, "later", PLANNERS["megatron"])
    ran = motley(*values, "--out", out)
    assert ran.code == 0, ran.err
    assert runs == [0, 1] and "continues in" in ran.out and "2 of 4 searches were finished before" in " ".join(ran.out.split())
    again = world.folder / "again"
    assert motley(*values, "--out", again).code == 0 and runs == [0, 1, 0, 1]
    told = [list(csv.DictReader((folder / "results.csv").read_text().splitlines())) for folder in (out, again)]
    for row, fresh in zip(*told, strict=True):
        changing = {"search_s": "", "found_s": ""}
        assert {**row, **changing} == {**fresh, **changing}
    assert not (out / "unfinished").exists(), "a finished comparison is made anew when its command is repeated"


def test_what_another_budget_or_cluster_found_is_not_taken(cell: Cell, tmp_path: Path) -> None:
    compare([cell], processes=1, keep=tmp_path / "kept")
    assert kept([cell], tmp_path / "kept") == 1
    slower = replace(cell.cluster, nodes=tuple(replace(n, intra=replace(n.intra, latency_s=1.0)) for n in cell.cluster.nodes))
    others = [replace(cell, budget_s=6.0), replace(cell, seed=1), replace(cell, cluster=slower), replace(cell, judge="estimate")]
    assert kept(others, tmp_path / "kept") == 0


def test_what_is_kept_is_what_was_found(cell: Cell, tmp_path: Path) -> None:
    hopeless = replace(cell, job=Job(transformer("llama-2-70b"), 128, 4))
    (first, second), _ = compare([cell, hopeless], processes=1, keep=tmp_path / "kept")
    (again, also), _ = compare([cell, hopeless], processes=1, keep=tmp_path / "kept")
    assert first.result is not None and again.result is not None
    assert again == replace(first, result=replace(first.result, front=(), others=()))
    assert also.result == second.result and also.result is not None and also.result.infeasible is not None


def test_a_figure_of_stacks_that_came_later_goes_without_saying(cell: Cell) -> None:
    """Else what was searched before would be searched again, and journals of sweeps would not be continued."""
    said = comparison._cluster_text(cell.cluster)
    named = {field.name for field in fields(Stack) if f", {field.name}=" in said}
    first = (
        "flash_attention matmul_scale attention_scale memory_traffic loss_traffic gradient_bytes host_s tensor_host_s ring_step_s"
    )
    first += " micro_batch_s blocking_messages message_s message_nodes message_lane_nodes tensor_overlap node_collective_scale"
    first += (
        " collective_scale overlap_slowdown optimizer_traffic step_s gradient_copy activation_scale logits_scale fragmentation"
    )
    assert named == {*first.split(), "context_bytes", "source"}


def test_half_a_file_is_not_taken(cell: Cell, tmp_path: Path) -> None:
    compare([cell], processes=1, keep=tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text(file.read_text()[:100])
    assert kept([cell], tmp_path / "kept") == 0
    (outcome,), _ = compare([cell], processes=1, keep=tmp_path / "kept")
    assert outcome.plan is not None and kept([cell], tmp_path / "kept") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--planners", "random,magatron"], ["unknown planner 'magatron'", "did you mean megatron?"]),
        (["--planners", ","], ["--planners"]),
        (["--planners", "random,megatron,random"], ["random stands 2 times in 'random,megatron,random'", "--seeds"]),
        (["--planners", "random", "megatron"], ["megatron is a planner", "part planners by commas"]),
        (["--seed", "1", "--seeds", "3"], ["exclude one another"]),
        (["--cluster", "{cluster}"], ["the cluster's name 'tiny' is taken"]),
        (["--out", "{cluster}"], ["--out", "is a file"]),
        (["--jitter", "2"], ["--jitter", "between 0 and 1, but got '2'"]),
        (["--jitter", "1%", "--judge", "estimate"], ["--jitter needs the event simulation", "estimate"]),
        (["--repeats", "3"], ["--repeats 3 needs --jitter"]),
        (["--objective", "costs"], ["--objective", "costs", "did you mean cost?"]),
    ],
)
def test_a_wrong_flag_of_compare_is_told_in_one_line(motley: Motley, world: World, more: list[str], words: list[str]) -> None:
    filled = [part.format(cluster=world.cluster) for part in more]
    ran = motley(*arguments(world, "--cluster", world.cluster), *filled)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err


def test_plans_are_ranked_as_they_do_on_devices_of_different_speeds(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--cluster", world.cluster, "--planners", "random,megatron", "--seed", 3, "--json", "-")
    monkeypatch.setenv("COLUMNS", "80")
    in_step = json.loads(motley(*arguments(world, *flags)).out)
    ran = motley(*arguments(world, *flags, "--jitter", "20%", "--repeats", 3, "--out", world.folder / "out"))
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)
    cluster = read_cluster(world.cluster)
    for row, before in zip(rows, in_step, strict=True):
        plan = read_plan(world.folder / "out" / row["plan"])
        times = sorted(simulate(plan, cluster, seed, 0.2).iteration_s for seed in (3, 4, 5))
        assert [row[name] for name in ("least_s", "iteration_s", "most_s")] == times
        assert (row["in_step_s"], row["jitter"], row["repeats"]) == (before["iteration_s"], 0.2, 3)
        assert row["tokens_per_s"] == pytest.approx(4 * 1024 / times[1])
        assert "jitter" not in before
    best = min(row["iteration_s"] for row in rows)
    assert [row["ratio_to_best"] for row in rows] == [row["iteration_s"] / best for row in rows]
    # On eighty columns no figure is folded, nor any word that has a column of its own.
    shown = {row["planner"]: next(line.split() for line in ran.err.splitlines() if row["planner"] in line) for row in rows}
    for row in rows:
        figures = (
            f"{row['iteration_s']:.4g}",
            f"{row['in_step_s']:.4g}",
            f"{row['tokens_per_s']:,.0f}",
            f"{100 * row['mfu']:.2f}",
        )
        assert set(figures) <= set(shown[row["planner"]])
    table = " ".join(ran.err.split())
    assert "of 3 runs on devices whose speeds differ by 20 % the one in the middle" in table


def test_an_interrupted_jitter_writes_nothing(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "repeated", interrupted)
    out = world.folder / "out"
    flags = ("--cluster", world.cluster, "--planners", "random", "--processes", 1, "--jitter", "1%", "--out", out)
    ran = motley(*arguments(world, *flags))
    assert ran.code == 130 and f"the searches are kept in {out / 'unfinished'}" in " ".join(ran.err.split())
    assert [path.name for path in out.iterdir()] == ["unfinished"]


def test_what_was_found_before_ctrl_c_is_not_ranked_in_step_where_jitter_is_asked_for(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(search: Search) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(PLANNERS, "random", interrupted)
    out = world.folder / "out"
    flags = ("--cluster", world.cluster, "--planners", "megatron,random", "--processes", 1, "--jitter", "1%", "--out", out)
    ran = motley(*arguments(world, *flags))
    assert ran.code == 130 and "interrupted: nothing was written" in ran.err and "megatron" not in ran.out
    assert [path.name for path in out.iterdir()] == ["unfinished"]


# --- The comparison --------------------------------------------------------------------------------------------------


@pytest.fixture
def cell(world: World) -> Cell:
    return Cell(read_cluster(world.cluster), Job(transformer(world.model), 128, 4), "random", budget_s=5.0)


def outcome(cell: Cell, planner: str, seed: int, iteration_s: float | None) -> Outcome:
    """An outcome with this iteration, or without a plan."""
    this = replace(cell, planner=planner, seed=seed)
    if iteration_s is None:
        reason = Infeasible(None, "devices", None, None, "none")
        return Outcome(this, Result(planner, None, None, reason, 1, 0.1, "finished"))
    found = run_cell(cell)
    assert found.result is not None and found.cost is not None
    cost = Cost(**{**vars(found.cost), "iteration_s": iteration_s})
    return Outcome(this, replace(found.result, planner=planner, cost=cost))


def test_planners_are_ranked_by_the_median_over_their_seeds(cell: Cell) -> None:
    times: dict[str, list[float | None]] = {
        "steady": [2.0, 2.0, 2.0],
        "lucky": [1.0, 9.0, 9.0],
        "barren": [None, None, 1.0],
        "good": [1.5, 1.5, None],
    }
    outcomes = [outcome(cell, name, seed, time) for name, each in times.items() for seed, time in enumerate(each)]
    assert [standing.planner for standing in ranking(outcomes)] == ["good", "steady", "lucky", "barren"]
    best = winner(outcomes)
    assert best is not None and (best.cell.planner, best.cell.seed) == ("lucky", 0)
    assert winner([outcome(cell, "barren", 0, None)]) is None


def test_jitter_leaves_a_single_device_as_much_slower_as_it_is_drawn(world: World) -> None:
    one = world.write("one.yaml", TINY_CLUSTER.replace("gpus: 2", "gpus: 1"))
    alone = run_cell(Cell(read_cluster(one), Job(transformer(world.model), 128, 4), "random", seed=7, budget_s=5.0))
    barren = outcome(alone.cell, "barren", 0, None)
    (jittered, same), interrupted = with_jitter([alone, barren], 0.1, 5, processes=1)
    assert not interrupted and same == barren
    assert alone.cost is not None and jittered.cost is not None and jittered.spread is not None
    # With one device nothing is sent: an iteration is its computation, as many times as long as the device is slower.
    drawn = [math.exp(np.random.default_rng(seed).normal(0.0, 0.1, 1)[0]) for seed in range(7, 12)]
    assert jittered.spread.iteration_s == pytest.approx([alone.cost.iteration_s * slower for slower in drawn])
    assert jittered.cost.iteration_s == pytest.approx(alone.cost.iteration_s * sorted(drawn)[2])
    assert (jittered.plan, jittered.in_step_s) == (alone.plan, alone.cost.iteration_s)


def test_a_planner_that_fails_is_an_outcome_beside_the_others(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(search: Search) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setitem(PLANNERS, "broken", broken)
    outcomes, interrupted = compare([replace(cell, planner="broken"), cell], processes=1)
    assert not interrupted
    assert outcomes[0].error == "ZeroDivisionError: a mistake" and outcomes[0].stopped == "error"
    assert outcomes[1].plan is not None


def test_ctrl_c_ends_the_comparison_and_keeps_what_was_found(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_planner(search: Search) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(PLANNERS, "interrupted", interrupted_planner)
    outcomes, interrupted = compare([cell, replace(cell, planner="interrupted"), replace(cell, seed=1)], processes=1)
    assert interrupted
    assert [found.stopped for found in outcomes] == ["finished", "interrupted"]


def test_parallel_processes_find_what_one_finds(cell: Cell) -> None:
    cells = [cell, replace(cell, seed=1), replace(cell, planner="megatron")]
    (alone, _), (together, _) = compare(cells, processes=1), compare(cells, processes=2)
    assert [found.plan for found in alone] == [found.plan for found in together]
    assert [found.cost for found in alone] == [found.cost for found in together]
