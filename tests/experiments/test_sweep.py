"""`motley sweep`: its files, its rows, and what it leaves on disk. All here in one process."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from pyarrow import parquet

from experiments.comparison import cell_digest
from experiments.journal import JOURNAL, Head, Journal
from experiments.sweep import COLUMNS, Run, execute, given, named, wrong_column
from experiments.sweep_files import read_sweep, with_bandwidth
from sim.engine import simulate
from sim.simulation import simulation
from sim.spec.cluster import Cluster, parse_cluster, read_cluster
from sim.spec.judge import Cost
from sim.spec.plan import Plan, parse_plan, read_plan
from sim.spec.reading import InputError
from tests.experiments.conftest import ROOT, TINY_CLUSTER, TINY_PLAN, Ran, World

Motley = Callable[..., Ran]

TWO_NODES = """\
name: two
nodes:
  - {name: box, count: 2, gpu: RTX4090, gpus: 1, intra: pcie4, nic: {kind: ethernet, bandwidth: 10 Gbit/s, count: 1}}
"""


def sweep_file(world: World, text: str, name: str = "sweep.yaml") -> str:
    return world.write(name, text)


def plans_sweep(world: World, more: str = "seeds: [0, 1, 2]\n") -> str:
    """A sweep of the tiny plan."""
    return sweep_file(world, f"clusters: [tiny.yaml]\nplans: [plan.json]\n{more}")


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def journal_lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]


def verdict(cluster: Cluster, plan: Plan) -> Cost:
    found = simulation(cluster, plan.job())(plan)
    assert isinstance(found, Cost)
    return found


# --- What a file says ------------------------------------------------------------------------------------------------


def test_a_grid_has_all_combinations_of_its_lists(world: World) -> None:
    world.write("other.yaml", TINY_CLUSTER.replace("name: tiny", "name: other"))
    path = sweep_file(
        world,
        "clusters: [tiny.yaml, other.yaml]\nmodels: [llama-2-7b, opt-350m]\nsequence_lengths: [128, 256]\n"
        "global_batches: [4, 8]\nprecisions: [bf16, fp16]\ngradient_precisions: [fp32, bf16]\n"
        "planners: [random, megatron]\nbudget: 2s\n"
        "judges: [estimate, simulate]\nseeds: [0, 3]\n",
    )
    runs, files = read_sweep(Path(path), seed=10)
    assert len(runs) == 2**9 == len(named(runs))
    assert {run.seed for run in runs} == {10, 13} and {run.budget_s for run in runs} == {2.0}
    assert {(run.cluster.name, run.planner, run.judge) for run in runs} == {
        (cluster, planner, judge)
        for cluster in ("tiny", "other")
        for planner in ("random", "megatron")
        for judge in ("estimate", "simulate")
    }
    assert {(run.job.sequence_length, run.job.global_batch, run.job.precision, run.job.gradient_precision) for run in runs} == {
        (tokens, batch, *precisions)
        for tokens in (128, 256)
        for batch in (4, 8)
        for precisions in (("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp16", "bf16"))
    }
    assert sorted(file.name for file in files) == ["other.yaml", "tiny.yaml"]


def test_given_plans_are_found_by_patterns_and_vary_in_schedule_length_and_precision(world: World) -> None:
    for name in "ab":
        world.write(f"plan-{name}.json", Path(world.plan).read_text())
    path = sweep_file(
        world,
        "clusters: [tiny.yaml]\nplans: ['plan-*.json']\nschedules: [gpipe, zb-1p]\nsequence_lengths: [128, 64]\n"
        "precisions: [fp16]\n",
    )
    runs, _ = read_sweep(Path(path))
    plan = read_plan(world.plan)
    assert [(dict(run.labels)["plan_file"], run.plan) for run in runs] == [
        (f"plan-{name}.json", replace(plan, precision="fp16", sequence_length=tokens, schedule=schedule))
        for tokens in (128, 64)
        for name in "ab"
        for schedule in ("gpipe", "zb-1p")
    ]


def test_gradients_of_given_plans_take_other_precisions_and_their_rows_say_so(world: World) -> None:
    runs, _ = read_sweep(Path(plans_sweep(world, "gradient_precisions: [fp32, bf16]\n")))
    assert [run.job.gradient_precision for run in runs] == ["fp32", "bf16"]
    rows = [execute(run).row for run in runs]
    assert [row["gradient_precision"] for row in rows] == ["fp32", "bf16"]
    assert rows[1]["peak_bytes"] < rows[0]["peak_bytes"]


def test_the_table_tells_precisions_of_gradients_apart(motley: Motley, world: World) -> None:
    ran = motley("sweep", plans_sweep(world, "gradient_precisions: [fp32, bf16]\n"), "--out", world.folder / "out")
    assert ran.code == 0 and "gradient_precision" in ran.out, ran.out


def test_stacks_take_the_place_of_the_clusters_own(world: World) -> None:
    world.write("two.yaml", TWO_NODES)
    more = "stacks: [megatron-core, nanotron]\nbandwidths: [x1, x0.5]\n"
    runs, _ = read_sweep(Path(sweep_file(world, f"clusters: [two.yaml]\nplans: [plan.json]\n{more}")))
    assert [(run.cluster.stack.name, dict(run.labels)["bandwidth"]) for run in runs] == [
        (name, rate) for name in ("megatron-core", "nanotron") for rate in ("x1", "x0.5")
    ]
    rows = [execute(run).row for run in read_sweep(Path(plans_sweep(world, "stacks: [megatron-core, nanotron]\n")))[0]]
    assert [row["stack"] for row in rows] == ["megatron-core", "nanotron"]
    assert rows[0]["iteration_s"] != rows[1]["iteration_s"]


def test_what_given_plans_divide_varies_and_their_rows_say_so(world: World) -> None:
    more = "zero_stages: [0, 1]\nexpert_parallels: [1]\nexpert_tensor_parallels: [null]\n"
    runs, _ = read_sweep(Path(plans_sweep(world, more)))
    assert [run.plan.zero_stage for run in runs if run.plan is not None] == [0, 1]
    rows = [execute(run).row for run in runs]
    assert [(row["zero_stage"], row["expert_parallel"]) for row in rows] == [(0, 1), (1, 1)]
    assert all("expert_tensor_parallel" not in row for row in rows)


def test_bandwidths_set_or_scale_the_network_cards(world: World) -> None:
    cluster = read_cluster(world.write("two.yaml", TWO_NODES))

    def rates(changed: Cluster) -> list[float]:
        return [node.nic.bandwidth_bytes_per_s for node in changed.nodes if node.nic is not None]

    assert rates(with_bandwidth(cluster, "x0.5")) == [0.625e9] * 2
    assert rates(with_bandwidth(cluster, "100 Gbit/s")) == [12.5e9] * 2
    assert with_bandwidth(cluster, "x1") == cluster
    for wrong in ("x0", "x-1", "xx", "10", "10 GB", "xnan"):
        with pytest.raises(InputError):
            with_bandwidth(cluster, wrong)


def test_a_factor_scales_what_a_matrix_says_between_nodes_and_a_rate_is_refused_there(world: World) -> None:
    world.write("two.csv", "GB/s,box-0,box-1\nbox-0,,1\nbox-1,2,\n")
    cluster = read_cluster(world.write("two.yaml", TWO_NODES + "bandwidth_matrix: two.csv\n"))
    half = with_bandwidth(cluster, "x0.5").bandwidth_matrix
    assert half is not None and (half.bytes_per_s[0][1], half.bytes_per_s[1][0]) == (0.5e9, 1e9)
    with pytest.raises(InputError, match="bandwidth matrix"):
        with_bandwidth(cluster, "1 Gbit/s")


def test_a_file_where_plans_go_and_no_folder_at_all_are_told_before_the_work(motley: Motley, world: World) -> None:
    path = sweep_file(world, "clusters: [tiny.yaml]\nplans: [plan.json]\n")
    out = world.folder / "out"
    out.mkdir()
    (out / "plans").write_text("mine")
    for folder, told in ((out, "plans is a file, but a folder is needed there"), ("", "but got ''")):
        ran = motley("sweep", path, "--out", folder)
        assert ran.code == 2 and told in ran.err and ran.err.count("\n") == 1, ran.err
    assert [path.name for path in out.iterdir()] == ["plans"] and (out / "plans").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("clusters: [tiny.yaml]\nplans: []\n", "plans: expected a list of at least 1 entries"),
        ("clusters: []\nplans: [plan.json]\n", "clusters: expected a list of at least 1 entries"),
        ("clusters: [tiny.yaml]\n", "either planners, which search, or plans"),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\nplanner: [x]\n", "unknown key 'planner'"),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\nmodels: [llama-2-7b]\n", "models: goes with planners only"),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\nseeds: [0, 1, 0]\n", "seeds: 0 stands twice"),
        (
            "clusters: [tiny.yaml]\nplans: [plan.json]\nseeds: [9223372036854775808]\n",
            "seeds: expected a whole number from 0 to 2^63 - 1, but got 9223372036854775808",
        ),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\njudges: [simulated]\n", "unknown judge 'simulated'"),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\nschedules: [1f2b]\n", "unknown schedule '1f2b'"),
        (
            "clusters: [tiny.yaml]\nplans: [plan.json]\nstacks: [nanotrom]\n",
            "unknown software stack 'nanotrom'; did you mean nanotron?",
        ),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\nzero_stages: [4]\n", "zero_stages: expected one of 0, 1, 2, 3, but got 4"),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\nexpert_tensor_parallels: [2]\n", "or null (columns of each), but got 2"),
        (
            "clusters: [tiny.yaml]\nmodels: [llama-2-7b]\nglobal_batches: [4]\nplanners: [random]\nzero_stages: [1]\n",
            "zero_stages: goes with plans only",
        ),
        (
            "clusters: [tiny.yaml]\nplans: [plan.json]\ngradient_precisions: [fp16]\n",
            "unknown gradient precision 'fp16'; accepted: fp32, bf16",
        ),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\nbandwidths: [5]\n", "bandwidths: expected a rate"),
        (
            "clusters: [two.yaml]\nplans: [plan.json]\nbandwidths: [10 Gbit/s, x0.1, 10Gbit/s]\n",
            "bandwidths: '10 Gbit/s' and '10Gbit/s' make the same clusters",
        ),
        (
            "clusters: [tiny.yaml]\nplans: [plan.json]\njitters: [150%]\n",
            "jitters: expected per cent, such as 0.1%, or a number between 0 and 1, but got '150%'",
        ),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\njitters: [true]\n", "between 0 and 1, but got True"),
        (
            "clusters: [tiny.yaml]\nplans: [plan.json]\njitters: [0, 0.1%]\njudges: [estimate]\n",
            "jitter 0.001 needs the judge simulate, but got estimate",
        ),
        ("clusters: [tiny.yaml]\nplans: [plan.json]\njitters: [0.1%, 0.001]\n", "are the same"),
        ("clusters: [tiny.yaml]\nplans: ['none-*.json']\n", "no file is like 'none-*.json'"),
        ("clusters: [nowhere.yaml]\nplans: [plan.json]\n", "nowhere.yaml: cannot be read"),
        (
            "clusters: [tiny.yaml]\nmodels: [llama-2-7b]\nglobal_batches: [4]\nplanners: [megatrom]\n",
            "unknown planner 'megatrom'",
        ),
        (
            "clusters: [tiny.yaml]\nmodels: [llama-2-7b]\nglobal_batches: [4]\nplanners: [random]\nbudget: 1\n",
            "budget: got 1 without a unit",
        ),
        (
            "clusters: [tiny.yaml]\nplans: [plan.json]\nsequence_lengths: [99999999]\n",
            "sweep.yaml: plan.json: the sequence length is",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_and_nothing_is_written(motley: Motley, world: World, text: str, told: str) -> None:
    path = sweep_file(world, text)
    world.write("two.yaml", TWO_NODES)
    before = world.names()
    ran = motley("sweep", path, "--out", world.folder / "out")
    assert ran.code == 2 and told in ran.err and ran.err.count("\n") == 1, ran.err
    assert world.names() == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\n", "expected a function runs()"),
        ("def runs():\n    return []\n", "the sweep has no runs"),
        ("def runs():\n    yield 1\n", "yields experiments.sweep.Run, but number 1 is 1"),
        ("def runs():\n    yield 1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def runs(:\n", "SyntaxError"),
        ("raise SystemExit(4)\n", "SystemExit: 4"),
    ],
)
def test_a_mistake_in_a_python_file_is_one_line(motley: Motley, world: World, text: str, told: str) -> None:
    ran = motley("sweep", sweep_file(world, text, "sweep.py"), "--out", world.folder / "out")
    assert ran.code == 2 and told in ran.err and ran.err.count("\n") == 1, ran.err


def test_a_budget_for_runs_that_do_not_search_is_refused(motley: Motley, world: World) -> None:
    ran = motley("sweep", plans_sweep(world), "--out", world.folder / "out", "--budget", "3s")
    assert ran.code == 2 and "no run searches" in ran.err and ran.err.count("\n") == 1, ran.err


@pytest.mark.parametrize("address", ["head:10001", "ray://head", "ray://:1", "ray://head:x"])
def test_an_address_that_is_none_is_one_line(motley: Motley, world: World, address: str) -> None:
    ran = motley("sweep", plans_sweep(world), "--out", world.folder / "out", "--on", address)
    assert ran.code == 2 and "expected ray://HOST:PORT" in ran.err


def test_a_run_is_checked_when_it_is_made(world: World) -> None:
    cluster, plan = read_cluster(world.cluster), read_plan(world.plan)
    with pytest.raises(InputError, match="not one of the columns"):
        given(cluster, plan, labels=(("mfu", 1),))
    with pytest.raises(InputError, match="unknown planner"):
        Run(cluster, plan.job(), "nobody")
    with pytest.raises(InputError, match=r"jitter is a number between 0 and 1, but got -0\.1"):
        given(cluster, plan, jitter=-0.1)
    with pytest.raises(InputError, match="jitter is a number between 0 and 1, but got True"):
        given(cluster, plan, jitter=True)
    with pytest.raises(InputError, match="its plan is for"):
        replace(given(cluster, plan), job=replace(plan.job(), global_batch=8))
    with pytest.raises(InputError, match="runs 1 and 3 of the sweep are the same"):
        named([given(cluster, plan), given(cluster, plan, seed=1), given(cluster, plan)])


# --- Rows ------------------------------------------------------------------------------------------------------------


def test_the_row_of_a_given_plan_has_the_measures_of_its_judge(motley: Motley, world: World) -> None:
    out = world.folder / "out"
    ran = motley("sweep", plans_sweep(world, "seeds: [0]\n"), "--out", out, "--seed", 5, "--processes", 1)
    assert ran.code == 0, ran.err
    (row,) = table(out)
    cluster, plan = read_cluster(world.cluster), read_plan(world.plan)
    cost = verdict(cluster, plan)
    assert {name: float(row[name]) for name in ("iteration_s", "tokens_per_s", "mfu", "bubble", "energy_j")} == {
        name: getattr(cost, name) for name in ("iteration_s", "tokens_per_s", "mfu", "bubble", "energy_j")
    }
    assert int(row["peak_bytes"]) == max(cost.peak_bytes.values())
    assert (row["planner"], row["plan_file"], row["seed"], row["judge"]) == ("given", "plan.json", "5", "simulate")
    assert (row["model"], row["gpus"], row["gpus_used"], row["schedule"]) == ("toy", "2", "2", "1f1b")
    assert read_plan(out / row["plan"]) == plan
    assert list(row) == [*(names := list(COLUMNS))[: (at := names.index("seed") + 1)], "plan_file", *names[at:]]


def test_with_jitter_a_run_costs_what_its_seed_draws_and_tells_the_iteration_in_step(motley: Motley, world: World) -> None:
    out = world.folder / "out"
    ran = motley("sweep", plans_sweep(world, "jitters: [0, 10%]\nseeds: [0, 1]\n"), "--out", out, "--processes", 1)
    assert ran.code == 0, ran.err
    rows = table(out)
    cluster, plan = read_cluster(world.cluster), read_plan(world.plan)
    assert [(row["jitter"], row["seed"]) for row in rows] == [("0.0", "0"), ("0.0", "1"), ("0.1", "0"), ("0.1", "1")]
    in_step_s = verdict(cluster, plan).iteration_s
    assert [float(row["iteration_s"]) for row in rows] == [
        *[in_step_s] * 2,
        *[simulate(plan, cluster, seed, 0.1).iteration_s for seed in (0, 1)],
    ]
    assert [row["in_step_s"] for row in rows] == ["", "", str(in_step_s), str(in_step_s)]
    assert len({row["iteration_s"] for row in rows}) == 3
    assert re.search(r"jitter +0 % +2 ", ran.out) and re.search(r"\n +10 % +2 ", ran.out), ran.out


def test_a_search_with_jitter_finds_its_plan_in_step(world: World) -> None:
    plan = read_plan(world.plan)
    search = Run(read_cluster(world.cluster), plan.job(), "uniform-grid", seed=3)
    alone, apart = execute(search), execute(replace(search, jitter=0.1))
    assert apart.plan == alone.plan and apart.row["in_step_s"] == alone.row["iteration_s"] != apart.row["iteration_s"]
    assert apart.row["run"] != alone.row["run"]


def test_a_run_without_jitter_has_the_name_that_it_had_before_there_was_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.comparison.VERSION", "0.1.0")
    cluster, plan = parse_cluster(TINY_CLUSTER, "cluster"), parse_plan(TINY_PLAN, "plan")
    judged, search = given(cluster, plan), Run(cluster, plan.job(), "random", budget_s=5.0, seed=3)
    assert (cell_digest(judged), cell_digest(search)) == ("29e9e2c3984eefc4", "d0d1595acca9de12")  # written before there was any
    assert len({cell_digest(replace(judged, jitter=jitter)) for jitter in (0, 0.0, 1, 1.0, 0.5)}) == 3


def test_what_a_search_found_stays_where_its_jitter_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> NoReturn:
        raise RuntimeError("no more memory")

    plan = read_plan(world.plan)
    search = Run(read_cluster(world.cluster), plan.job(), "uniform-grid", seed=3, jitter=0.1)
    alone = execute(replace(search, jitter=0.0))
    monkeypatch.setattr("experiments.comparison.repeated", fails)
    found = execute(search)
    assert found.plan == alone.plan and found.row["error"] == "RuntimeError: no more memory"
    assert (found.row["iteration_s"], found.row["in_step_s"]) == (None, alone.row["iteration_s"])
    assert wrong_column(found.row) is None


def test_a_journal_of_before_there_was_jitter_is_gone_on_with(motley: Motley, world: World) -> None:
    out, path = world.folder / "out", plans_sweep(world)
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0
    head, *rows = journal_lines(out)
    for row in rows:
        assert row.pop("jitter") == 0 and row.pop("in_step_s") is None
    (out / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in [head, *rows[:2]]))
    ran = motley("sweep", path, "--out", out, "--processes", 1)
    assert ran.code == 0 and "2 of 3 runs were finished before" in ran.out, ran.err
    assert [(row["seed"], row["jitter"], row["in_step_s"]) for row in table(out)] == [(str(i), "0.0", "") for i in range(3)]


def test_parquet_and_csv_have_the_same_rows_and_the_columns_their_types(motley: Motley, world: World) -> None:
    out = world.folder / "out"
    assert motley("sweep", plans_sweep(world), "--out", out, "--processes", 1).code == 0
    found = parquet.read_table(out / "results.parquet")
    rows = found.to_pylist()
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows] == table(out)
    types = {"string": str, "int64": int, "double": float, "bool": bool}
    assert {name: types[str(found.schema.field(name).type)] for name in COLUMNS} == dict(COLUMNS)
    assert [row["seed"] for row in rows] == [0, 1, 2] and journal_lines(out)[1:] == rows


def test_a_search_finds_what_the_planner_finds_alone(motley: Motley, world: World) -> None:
    out, alone = world.folder / "out", world.folder / "alone.json"
    path = sweep_file(
        world, f"clusters: [tiny.yaml]\nmodels: [{world.model}]\nglobal_batches: [4]\nplanners: [random]\nseeds: [1]\n"
    )
    assert motley("sweep", path, "--out", out, "--budget", "20s", "--processes", 1).code == 0
    options = ["--cluster", world.cluster, "--model", world.model, "--global-batch", 4, "--planner", "random", "--seed", 1]
    assert motley("plan", *options, "--budget", "20s", "--out", alone).code == 0
    (row,) = table(out)
    assert read_plan(out / row["plan"]) == read_plan(alone)
    assert (row["planner"], row["budget_s"], row["stopped"], row["error"]) == ("random", "20.0", "finished", "")


def test_a_run_that_raises_is_a_row_with_the_error(motley: Motley, world: World) -> None:
    path, out = plans_sweep(world, "schedules: [zb-v, 1f1b]\n"), world.folder / "out"
    ran = motley("sweep", path, "--out", out, "--processes", 1)
    assert ran.code == 0 and "1 of 2 runs failed" in ran.err
    wrong, right = table(out)
    assert "'zb-v' takes two" in wrong["error"] and wrong["iteration_s"] == "" and float(wrong["wall_s"]) >= 0
    assert right["error"] == "" and float(right["iteration_s"]) > 0


def test_a_plan_that_does_not_fit_is_a_row_with_the_reason_and_exit_code_1(motley: Motley, world: World) -> None:
    out = world.folder / "out"
    ran = motley("sweep", plans_sweep(world, "precisions: [mxfp8]\n"), "--out", out, "--processes", 1)
    (row,) = table(out)
    assert ran.code == 1 and row["reason"] == "precision" and "mxfp8" in row["infeasible"] and row["error"] == ""


def test_labels_are_columns_and_rows_may_lack_them(motley: Motley, world: World) -> None:
    path = sweep_file(
        world,
        "from pathlib import Path\nfrom experiments.sweep import given\nfrom sim.spec.cluster import read_cluster\n"
        "from sim.spec.plan import read_plan\n\nHERE = Path(__file__).parent\n\n\ndef runs():\n"
        "    cluster, plan = read_cluster(HERE / 'tiny.yaml'), read_plan(HERE / 'plan.json')\n"
        "    yield given(cluster, plan, labels=(('share', 1), ('rdma', True)))\n"
        "    yield given(cluster, plan, labels=(('share', 0.5),))\n",
        "sweep.py",
    )
    out = world.folder / "out"
    ran = motley("sweep", path, "--out", out, "--processes", 1)
    assert ran.code == 0, ran.err
    rows = parquet.read_table(out / "results.parquet").to_pylist()
    assert [(row["share"], row["rdma"]) for row in rows] == [(1.0, True), (0.5, None)]


def test_rows_are_the_same_in_a_new_process_with_another_hash_seed(world: World) -> None:
    path = sweep_file(
        world,
        f"clusters: [tiny.yaml]\nmodels: [{world.model}]\nglobal_batches: [4]\nplanners: [random, megatron]\nbudget: 60s\n",
    )
    tables = []
    for hash_seed in ("1", "2"):
        out = world.folder / hash_seed
        command = [sys.executable, "-m", "experiments", "sweep", path, "--out", str(out), "--processes", hash_seed]
        subprocess.run(command, cwd=ROOT, env=_environment(PYTHONHASHSEED=hash_seed), check=True, capture_output=True)
        tables.append([{name: value for name, value in row.items() if name != "wall_s"} for row in table(out)])
    assert tables[0] == tables[1] and all(row["stopped"] == "finished" for row in tables[0])


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


# --- What is on disk -------------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_executed_or_written(motley: Motley, world: World) -> None:
    path, out = plans_sweep(world), world.folder / "out"
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.rglob("*") if file.is_file()}
    ran = motley("sweep", path, "--out", out)
    assert ran.code == 0 and "3 of 3 runs were finished before" in ran.out
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.rglob("*") if file.is_file()} == before


def test_a_line_that_was_cut_is_executed_again_and_no_other(motley: Motley, world: World) -> None:
    path, out = plans_sweep(world), world.folder / "out"
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0
    text = (out / JOURNAL).read_text()
    for name in ("results.csv", "results.parquet"):
        (out / name).unlink()
    (out / JOURNAL).write_text(text[:-40])  # as if the disk had been full
    ran = motley("sweep", path, "--out", out, "--processes", 1)
    assert ran.code == 0 and "2 of 3 runs were finished before" in ran.out
    again = (out / JOURNAL).read_text()
    lines = text.splitlines()
    assert again.splitlines()[:3] == lines[:3] and len(again.splitlines()) == 4
    same = [{**json.loads(line), "wall_s": 0.0} for line in (lines[3], again.splitlines()[3])]
    assert same[0] == same[1] and len(table(out)) == 3


def test_a_run_whose_plan_is_gone_is_executed_again_and_no_other(motley: Motley, world: World) -> None:
    path, out = plans_sweep(world), world.folder / "out"
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0
    before, text = sorted(file.name for file in (out / "plans").iterdir()), (out / JOURNAL).read_text()
    (out / "plans" / before[1]).unlink()
    ran = motley("sweep", path, "--out", out, "--processes", 1)
    assert ran.code == 0 and "3 of 3 runs were finished before; 1 of them again, whose plans are not in" in ran.out
    assert sorted(file.name for file in (out / "plans").iterdir()) == before
    again = (out / JOURNAL).read_text()
    assert again.startswith(text) and len(again.splitlines()) == len(text.splitlines()) + 1
    assert len(table(out)) == 3 and "3 of 3 runs were finished before\n" in motley("sweep", path, "--out", out).out


def test_a_journal_that_was_cut_in_its_head_begins_anew(motley: Motley, world: World) -> None:
    path, out = plans_sweep(world), world.folder / "out"
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0
    head = (out / JOURNAL).read_text().splitlines()[0]
    (out / "results.csv").unlink()
    (out / JOURNAL).write_text(head[:50])
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0
    assert (out / JOURNAL).read_text().splitlines()[0] == head and len(journal_lines(out)) == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace('"version": "', '"version": "0.0.1-', 1), "holds results of Motley 0.0.1-"),
        (lambda text: text.replace('"digest": "', '"digest": "0', 1), "holds results of another sweep (sweep.yaml, 3 runs"),
        (lambda text: "something else", "is not the journal of a sweep"),
        (lambda text: text + "{}\n", "line 5: expected the row of a run of this sweep"),
        (
            lambda text: text.replace('"iteration_s": ', '"iteration": ', 1),
            "line 2: expected the row of a run, but its iteration_s is",
        ),
        (lambda text: text.replace('"seed": 1', '"seed": "one"', 1), "line 3: expected the row of a run, but its seed is 'one'"),
    ],
)
def test_results_of_another_version_or_sweep_are_left_alone(
    motley: Motley, world: World, change: Callable[[str], str], told: str
) -> None:
    path, out = plans_sweep(world), world.folder / "out"
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0
    (out / JOURNAL).write_text(change((out / JOURNAL).read_text()))
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    ran = motley("sweep", path, "--out", out, "--processes", 1)
    assert ran.code == 2 and told in ran.err and ran.err.count("\n") == 1, ran.err
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_another_seed_budget_or_grid_is_another_sweep(motley: Motley, world: World) -> None:
    path, out = plans_sweep(world), world.folder / "out"
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0
    assert "holds results of another sweep" in motley("sweep", path, "--out", out, "--seed", 1).err
    plans_sweep(world, "seeds: [0, 1]\n")
    assert "holds results of another sweep" in motley("sweep", path, "--out", out).err
    plans_sweep(world, "# the same runs\nseeds: [0, 1, 2]\n")
    assert motley("sweep", path, "--out", out).code == 0


def test_results_of_something_else_are_not_written_over(motley: Motley, world: World) -> None:
    out = world.folder / "out"
    out.mkdir()
    (out / "results.csv").write_text("a,b\n")
    ran = motley("sweep", plans_sweep(world), "--out", out)
    assert ran.code == 2 and "holds results.csv, but no journal.jsonl" in ran.err
    assert [file.name for file in out.iterdir()] == ["results.csv"]


def test_one_process_at_a_time_works_in_a_folder(motley: Motley, world: World) -> None:
    path, out = plans_sweep(world), world.folder / "out"
    runs = named(read_sweep(Path(path))[0])
    with Journal(out, Head("sweep.yaml", tuple(runs))):
        ran = motley("sweep", path, "--out", out)
        assert ran.code == 2 and "another process is at work" in ran.err
    assert motley("sweep", path, "--out", out, "--processes", 1).code == 0


def test_execution_gives_the_row_and_the_text_of_the_plan(world: World) -> None:
    cluster, plan = read_cluster(world.cluster), read_plan(world.plan)
    (name, run), *_ = named([given(cluster, plan)]).items()
    done = execute(run)
    assert done.row["run"] == name and done.plan == plan.to_json()
