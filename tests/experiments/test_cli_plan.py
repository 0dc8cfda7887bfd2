"""`motley plan`: what it prints, writes, and does when it is stopped."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments.commands.options import budget_s, default_sequence_length
from experiments.tables import plan_table, unused_line
from partition.search import PLANNERS, Search
from sim.cost.memory import peak_bytes
from sim.spec.cluster import parse_cluster, read_cluster
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


@pytest.mark.parametrize("columns", [60, 72, 80, 100])
def test_every_column_of_a_plan_is_there_on_a_narrow_console(columns: int) -> None:
    """In an earlier version the last one, how much memory is left, was not, and nothing told that it was missing."""
    whole = read_plan(ROOT / "examples" / "plans" / "hexiscale-mixed-b" / "motley.json")
    held = tuple(pipeline.holding([len(pipeline.stages) + 1] * len(pipeline.stages)) for pipeline in whole.pipelines)
    plan = replace(whole, schedule="split-1f1b", sequence_slices=2, pipelines=held)
    cluster = read_cluster(ROOT / "examples" / "clusters" / "hexiscale-mixed-b.yaml")
    text = io.StringIO()
    console = Console(file=text, width=columns)
    console.print(plan_table(plan, cluster, peak_bytes(plan, cluster), headroom=True))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    first = next(line for line in lines if line.startswith("p0s0"))
    name, used = plan.devices[0], peak_bytes(plan, cluster)
    left = 1 - used[name] / cluster.device(name).gpu.memory_bytes
    assert first.split()[-1] == f"{100 * left:.0f}" and f"{used[name] / 2**30:.1f}" in first


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


def test_gradients_may_be_summed_in_bf16(motley: Motley, world: World) -> None:
    out = world.folder / "found.json"
    ran = motley(*arguments(world, "--gradient-precision", "bf16", "--budget", "20s", "--out", out))
    assert ran.code == 0 and "bf16, gradients in bf16" in ran.out
    assert json.loads(out.read_text())["gradient_precision"] == "bf16"
    refused = motley(*arguments(world, "--gradient-precision", "fp16"))
    assert (refused.code, refused.err) == (2, "motley: error: unknown gradient precision 'fp16'; accepted: fp32, bf16\n")


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


def test_what_a_vocabulary_that_is_not_padded_costs_is_told(motley: Motley, world: World) -> None:
    out, slow = world.folder / "found.json", world.write("slow.yaml", TINY_CLUSTER + "stack: {unaligned_scale: 0.3}\n")
    asked = ["--model", "gpt2", "--seq-len", 256, "--out", out]
    ran = motley(*arguments(world, "--cluster", slow, *asked, planner="megatron"))
    assert ran.code == 0, ran.err
    told = re.search(r"vocabulary padded to ([\d,]+) \(was 50,257\), an iteration would take \S+ m?s \(-[\d.]+ %\)", ran.out)
    assert told is not None and int(told[1].replace(",", "")) % 128 == 0
    # Motley's own stack is taken to lose nothing.
    assert "vocabulary padded" not in motley(*arguments(world, *asked, "--out", world.folder / "b.json", planner="megatron")).out


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


# --- Objectives and constraints --------------------------------------------------------------------------------------


PRICED = """\
name: tiny
gpu_kinds:
  RTX4090: {price: 0.4 $/h}
  RTX3090: {price: 40 $/h}
nodes:
  - {name: box, gpu: RTX4090, gpus: 1, intra: pcie4, nic: {kind: ethernet, bandwidth: 10 Gbit/s}}
  - {name: dear, gpu: RTX3090, gpus: 1, intra: pcie4, nic: {kind: ethernet, bandwidth: 10 Gbit/s}}
"""


def test_the_objective_decides_which_gpus_are_used_and_its_measures_are_told(motley: Motley, world: World) -> None:
    priced = world.write("priced.yaml", PRICED)
    flags = ["--cluster", priced, "--budget", "60s", "--json", "-"]
    answer = json.loads(motley(*arguments(world, *flags, "--objective", "cost", planner="megatron")).out)
    search = answer["search"]
    assert (search["objective"], search["stands_in"]) == ("cost", False)
    used = [device["device"] for device in answer["devices"] if device["lane"] is not None]
    assert used == ["box/0"]
    assert search["dollars_per_hour"] == 0.4
    assert search["dollars_per_billion_tokens"] == pytest.approx(0.4 / 3600 / answer["tokens_per_s"] * 1e9)
    assert answer["dollars"] == pytest.approx(40.4 * answer["iteration_s"] / 3600)  # the report's is the whole cluster's
    assert min(entry["dollars_per_billion_tokens"] for entry in search["front"]) == search["dollars_per_billion_tokens"]


def test_a_constraint_that_no_plan_keeps_exits_with_1_and_says_by_how_much(motley: Motley, world: World) -> None:
    out = world.folder / "found.json"
    ran = motley(*arguments(world, "--min-tokens-per-s", "1,000,000,000", "--out", out, planner="megatron"))
    assert ran.code == 1 and not out.exists()
    (line,) = ran.err.splitlines()
    assert "no feasible plan" in line and "tokens/s, but asked for is at least 1,000,000,000 tokens/s" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--objective", "price"], ["--objective", "unknown objective 'price'", "throughput, cost, energy"]),
        (["--min-tokens-per-s", "0"], ["--min-tokens-per-s", "above zero", "'0'"]),
        (["--max-dollars-per-hour", "cheap"], ["--max-dollars-per-hour", "'cheap'"]),
        (["--max-dollars-per-billion-tokens", "nan"], ["--max-dollars-per-billion-tokens", "'nan'"]),
        (["--plot", "plan.gif"], ["--plot", ".png, .svg, .pdf", "plan.gif"]),
    ],
)
def test_wrong_objectives_constraints_and_pictures_are_refused_in_one_line(
    motley: Motley, world: World, flags: list[str], words: list[str]
) -> None:
    ran = motley(*arguments(world, *flags))
    assert ran.code == 2 and all(word in " ".join(ran.err.split()) for word in words), ran.err


def test_cost_needs_prices(motley: Motley, world: World) -> None:
    unpriced = world.write("unpriced.yaml", PRICED.replace("price: 40 $/h", "price: null"))
    ran = motley(*arguments(world, "--cluster", unpriced, "--objective", "cost"))
    assert ran.code == 2 and "no price is known of RTX3090" in ran.err


# --- What it tells of the answer -------------------------------------------------------------------------------------


def test_the_end_tells_headroom_bound_and_why_the_others_lost(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(search: Search) -> None:
        both, batch = split_in_two(search), search.job.global_batch
        alone = Stage((Replica((search.cluster.devices[0].name,), 1),), ((0, search.job.model.layers),))
        search.consider(both)
        search.consider(replace(both, pipelines=(Pipeline(1, batch, (alone,)),)))

    monkeypatch.setitem(PLANNERS, "two", two)
    plot, report = world.folder / "plan.png", world.folder / "report.json"
    ran = motley(*arguments(world, "--plot", plot, "--json", report, planner="two"))
    assert ran.code == 0, ran.err
    answer = json.loads(report.read_text())
    found = " ".join(ran.out.split())
    bound = re.search(r"takes less than ([\d.]+) (ms|s): the gap is ([\d.]+) %", found)
    assert bound is not None
    bound_s = float(bound[1]) * {"ms": 1e-3, "s": 1.0}[bound[2]]
    assert 1 - bound_s / answer["iteration_s"] == pytest.approx(float(bound[3]) / 100, abs=2e-3)
    assert answer["search"]["bound_s"] == pytest.approx(bound_s, rel=1e-2)
    assert sum(answer["search"]["gap"].values()) == pytest.approx(1 - answer["search"]["bound_s"] / answer["iteration_s"])
    peak, capacity = max(answer["peak_bytes"].values()), 24 * 2**30
    assert f"{peak / 2**30:.1f}/24.0 {(1 - peak / capacity) * 100:.0f}" in found
    assert "The best plans of other shapes that were judged" in found
    assert len(re.findall(r"this plan", found)) == 1 and re.search(r" (compute|bubble|network|recompute), .*\+[\d.]+ %", found)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_gpus_that_are_not_used_are_named_with_the_precision_that_they_lack() -> None:
    has = "intra: nvlink, nic: {kind: ethernet, bandwidth: 10 Gbit/s}"
    nodes = f"{{name: a, gpu: A100-40GB-SXM, gpus: 3, {has}}}, {{name: b, gpu: V100-32GB-SXM, gpus: 2, {has}}}"
    cluster = parse_cluster(f"name: c\nnodes: [{nodes}]\n", "c.yaml")
    stages = (Stage((Replica(("a/0",), 1),), ((0, 12),)), Stage((Replica(("a/1",), 1),), ((12, 24),)))
    plan = Plan("c", transformer("gpt3-350m"), 512, 4, (Pipeline(1, 4, stages),))
    told = unused_line(plan, cluster)
    assert told == "not used: 1 x A100-40GB-SXM (a/2); 2 x V100-32GB-SXM (b/0-1), which has no bf16 (it has fp32, fp16)"
    whole = replace(cluster, nodes=(replace(cluster.nodes[0], gpus=2),))
    assert unused_line(plan, whole) is None


def test_a_plan_whose_layers_are_many_ranges_is_legible_on_eighty_columns(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = "name: c\nnodes: [{name: a100-node, gpu: A100-80GB-SXM, gpus: 2, intra: nvlink}]\n"
    stages = [
        Stage((Replica((f"a100-node/{s}",), 1),), tuple((4 * k + 2 * s, 4 * k + 2 * s + 2) for k in range(8))) for s in (0, 1)
    ]
    plan = Plan("c", transformer("llama-2-7b"), 512, 4, (Pipeline(1, 4, tuple(stages)),), schedule="interleaved")
    monkeypatch.setenv("COLUMNS", "80")
    ran = motley("simulate", world.write("p.json", plan.to_json()), "--cluster", world.write("c.yaml", kinds))
    assert ran.code == 0, ran.err
    first = next(line for line in ran.out.splitlines() if line.startswith("p0s0"))
    assert "a100-node/0" in first and "A100-80GB-SXM" in ran.out and "0-1, 4-5," in first


def test_a_budget_that_is_too_small_is_answered_with_a_symmetric_plan_and_a_warning(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idling(search: Search) -> None:
        while True:
            search.check_budget()

    monkeypatch.setitem(PLANNERS, "idling", idling)
    out = world.folder / "found.json"
    ran = motley(*arguments(world, "--budget", "10ms", "--out", out, planner="idling"))
    assert ran.code == 0 and out.exists()
    assert ran.err.startswith("motley: warning: the budget of 0.01 s ended before idling found a feasible plan")
    assert "symmetric" in ran.err


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


def test_a_search_that_ends_before_its_budget_is_not_said_to_have_spent_it(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hasty(search: Search) -> None:
        search.consider(split_in_two(search))
        assert search.past(0.0)  # a share of the budget

    monkeypatch.setitem(PLANNERS, "hasty", hasty)
    ran = motley(*arguments(world, "--budget", "30s", planner="hasty"))
    assert ran.code == 0 and "stopped at" not in ran.out
    assert "s of its budget of 30 s, which cut some steps short: a faster or slower machine may find another answer" in ran.out


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
