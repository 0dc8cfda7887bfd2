"""`motley validate`: small files of runs, what is written, and every mistake in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import fidelity, fitting
from experiments.published_rows import Run
from sim.spec.cluster import links
from sim.spec.gpu import efficiencies
from tests.experiments.conftest import Ran, World
from tests.experiments.test_cli_errors import assert_refused

Motley = Callable[..., Ran]

COLUMNS = (
    "id,source_key,table_or_fig,gpu_type,num_gpus,gpus_per_node,intra_node_link,model_name,num_layers,hidden,ffn_hidden,heads,"
    "kv_heads,seq_len,vocab,global_batch,micro_batch,tp,pp,dp,recompute,precision,iter_time_s,tflops_per_gpu,peak_mem_gb"
)
SHAPE = "A100-80GB-SXM,8,8,NVLink3,GPT,4,1024,4096,16,16,1024,51200,16,2"
ROWS = (
    f"v-1,vtrain_single,t,{SHAPE},1,1,8,full,fp16,0.1,,",
    f"v-2,vtrain_single,t,{SHAPE},2,2,2,full,fp16,0.2,,10",
    f"v-3,vtrain_single,t,{SHAPE},8,1,1,full,fp16,0.4,,",
    f"v-4,vtrain_single,t,{SHAPE},8,1,2,full,fp16,0.4,,",
    f"k-1,korth,t,{SHAPE},4,1,2,full,fp16,,30,",
)


@pytest.fixture
def runs(world: World) -> str:
    return world.write("runs.csv", "\n".join([COLUMNS, *ROWS]) + "\n")


def test_runs_are_compared_source_by_source_and_all_are_in_the_file(motley: Motley, world: World, runs: str) -> None:
    report = world.folder / "out.json"
    ran = motley("validate", "--runs", runs, "--json", report, "--jobs", 1)
    assert ran.code == 0, ran.err
    found = json.loads(report.read_text())
    assert [(row["id"], row["quantity"]) for row in found["runs"]] == [
        ("v-1", "iter_time_s"),
        ("v-2", "iter_time_s"),
        ("v-2", "peak_mem_gb"),
        ("v-3", "iter_time_s"),
        ("v-4", "iter_time_s"),
        ("k-1", "tflops_per_gpu"),
    ]
    for row in found["runs"]:
        if row["id"] == "v-4":
            assert (row["predicted"], row["relative_error"]) == (None, None)
            assert row["note"] == "not modelled: degrees 8 x 1 x 2 = 16, but num_gpus is 8"
        else:
            assert row["relative_error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    errors = [row["relative_error"] for row in found["runs"] if row["quantity"] == "iter_time_s" and row["predicted"]]
    source = found["sources"]["vtrain_single"]
    assert source["count"] == 3 and source["bias"] == pytest.approx(sum(errors) / 3)
    assert source["mean_absolute_relative_error"] == pytest.approx(sum(map(abs, errors)) / 3)
    assert source["kendall_tau"] is not None and -1 <= source["kendall_tau"] <= 1
    assert found["sources"]["korth"]["quantity"] == "tflops_per_gpu"
    assert (found["overall"]["runs"], found["overall"]["not_modelled"]) == (5, 1)
    assert "vtrain_single" in ran.out and "degrees 8 x 1 x 2 = 16" in ran.out and f"wrote {report}" in ran.out


def test_the_same_runs_in_several_processes_have_the_same_errors(motley: Motley, world: World, runs: str) -> None:
    files = [world.folder / f"{jobs}.json" for jobs in (1, 2)]
    for jobs, file in enumerate(files, 1):
        assert motley("validate", "--runs", runs, "--json", file, "--jobs", jobs).code == 0
    assert files[0].read_text() == files[1].read_text()


def test_without_files_the_shipped_runs_are_replayed(
    motley: Motley, world: World, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = world.write("failed.csv", f"{COLUMNS.split(',', 1)[1]},failure\n" + ROWS[0].split(",", 1)[1] + ",OOM\n")
    monkeypatch.setattr(fidelity, "PUBLISHED", Path(runs))
    monkeypatch.setattr(fidelity, "FAILED", Path(failed))
    ran = motley("validate", "--jobs", 1, "--json", "-", "--source", "vtrain_single")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert list(found["sources"]) == ["vtrain_single"]
    assert found["out_of_memory"]["vtrain_single"] == {
        "ran": {
            **{"count": 3, "right": 3, "not_modelled": 1, "share": 1.0},
            "reasons": {"not modelled: degrees 8 x 1 x 2 = 16, but num_gpus is 8": 1},
        },
        "out_of_memory": {"count": 1, "right": 0, "not_modelled": 0, "share": 0.0, "reasons": {}},
    }
    assert "ran out of memory" in ran.err
    # Without any option: the tables, and the picture in the folder where one is.
    monkeypatch.chdir(world.folder)
    ran = motley("validate", "--jobs", 1)
    assert ran.code == 0
    assert "the shipped constants were fitted on these runs" in ran.err + ran.out
    assert (world.folder / "parity.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_and_the_tables_are_written_and_rewritten_between_their_marks(
    motley: Motley, world: World, runs: str
) -> None:
    pages, picture = world.folder / "docs" / "fidelity.md", world.folder / "docs" / "images" / "parity.png"
    asked = ("validate", "--runs", runs, "--jobs", 1, "--plot", picture, "--markdown", pages)
    assert motley(*asked).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = pages.read_text()
    assert "](images/parity.png)" in text and "| vtrain_single | 4 | 1 | 3 |" in text
    assert "| 1 | not modelled: degrees 8 x 1 x 2 = 16, but num_gpus is 8 | v-4 |" in text
    pages.write_text(f"# Fidelity\n\nbefore\n\n{text.replace('vtrain_single', 'something old')}\nafter\n")
    assert motley(*asked).code == 0
    assert pages.read_text() == f"# Fidelity\n\nbefore\n\n{text}\nafter\n"


def test_runs_whose_rates_alone_are_published_are_drawn_too(motley: Motley, world: World) -> None:
    only, picture = world.write("rates.csv", f"{COLUMNS}\n{ROWS[4]}\n"), world.folder / "parity.svg"
    ran = motley("validate", "--runs", only, "--jobs", 1, "--plot", picture)
    assert ran.code == 0, ran.err
    assert picture.is_file() and "korth (1)" in picture.read_text() and f"wrote {picture}" in ran.out.replace("\n", "")


def test_a_source_with_times_and_rates_has_a_row_for_each(motley: Motley, world: World) -> None:
    rate = ROWS[4].replace("korth", "vtrain_single")
    both, pages = world.write("both.csv", f"{COLUMNS}\n{ROWS[0]}\n{rate}\n"), world.folder / "fidelity.md"
    assert motley("validate", "--runs", both, "--jobs", 1, "--markdown", pages, "--plot", world.folder / "parity.png").code == 0
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in pages.read_text().splitlines() if line.startswith("| ")]
    quantity = json.loads(motley("validate", "--runs", both, "--jobs", 1, "--json", "-").out)["runs"][1]["quantity"]
    assert quantity != "iter_time_s"
    for name in ("vtrain_single", "all"):
        assert [name, "2", "0", "2"] in rows  # by the iteration times that both say
        assert all([f"{name} ({speed.replace('_', ' ')})", "", "", "1"] in rows for speed in ("iter_time_s", quantity))


def test_cells_that_are_disregarded_are_counted(motley: Motley, world: World, runs: str) -> None:
    ran = motley("validate", "--runs", runs, "--json", world.folder / "out.json", "--jobs", 1)
    lines = ran.out[ran.out.index("Cells that are disregarded") :].splitlines()
    assert [line.split() for line in lines[:9] if "full" in line] == [["vtrain_single", "recompute", "full", "3"]]
    rows = json.loads((world.folder / "out.json").read_text())["runs"]
    told = {row["id"] for row in rows if "recompute full is disregarded" in row["assumptions"]}
    assert told == {"v-1", "v-2", "v-3"}


def test_few_runs_stand_one_by_one_and_of_many_those_farthest_off(motley: Motley, world: World) -> None:
    rows = [f"v-{n},vtrain_single,t,{SHAPE},1,1,8,full,fp16,{0.1 * n:.1f},," for n in range(1, 42)]
    few = motley("validate", "--runs", world.write("few.csv", "\n".join([COLUMNS, *rows[:3]]) + "\n"), "--jobs", 1).out
    lines = few[few.index("Run by run") :].splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("v-")] == [[f"v-{n}", "iter_time_s"] for n in (3, 2, 1)]
    many = motley("validate", "--runs", world.write("many.csv", "\n".join([COLUMNS, *rows]) + "\n"), "--jobs", 1).out
    lines = many[many.index("The 10 figures that are farthest off, of 41") :].splitlines()
    assert [line.split()[0] for line in lines if line.startswith("v-")] == [f"v-{n}" for n in range(41, 31, -1)]


def test_a_share_that_is_probably_a_fraction_is_told(motley: Motley, world: World) -> None:
    columns = COLUMNS.replace("tflops_per_gpu", "mfu_pct")
    rows = [f"v-1,vtrain_single,t,{SHAPE},1,1,8,full,fp16,,0.4,", f"v-2,vtrain_single,t,{SHAPE},1,1,8,full,fp16,,40,"]
    ran = motley("validate", "--runs", world.write("runs.csv", "\n".join([columns, *rows]) + "\n"), "--json", "-", "--jobs", 1)
    found = json.loads(ran.out)["runs"]
    assert [row["note"] for row in found] == ["mfu_pct 0.4 is less than one per cent; perhaps a fraction, for 40", ""]
    assert found[0]["predicted"] == found[1]["predicted"] > 4


def test_a_fit_leaves_probable_fractions_out_and_says_where_nothing_is_held_out(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit itself is not looked at: what it is given, and what is said."""
    given: list[str] = []

    def quick(task: fitting.Task) -> fitting.FittedStack:
        given.extend(run.id for run in task.runs)
        return fitting.FittedStack(task.stack, {}, len(task.runs), 0.1, 0, 0.0)

    monkeypatch.setattr(fitting, "fit_stack", quick)
    monkeypatch.setattr(fitting, "fit_pieces", lambda *_: SimpleNamespace(efficiencies=dict(efficiencies())))
    monkeypatch.setattr(fitting, "fit_links", lambda *_: (links(),))
    columns = COLUMNS.replace("tflops_per_gpu", "mfu_pct")
    rows = [f"v-{n},vtrain_single,t,{SHAPE},1,1,8,full,fp16,{speed}," for n, speed in enumerate((",0.4", ",40", "0.1,"))]
    file = world.write("runs.csv", "\n".join([columns, *rows]) + "\n")
    out = world.folder / "constants.yaml"
    ran = motley("validate", "--runs", file, "--fit", "--holdout", "0.5", "--holdout-by", "nodes", "--out", out, "--jobs", 1)
    assert ran.code == 0, ran.err
    assert sorted(given) == ["v-1", "v-2"]
    assert "warning: not fitted on: v-0: mfu_pct 0.4 is less than one per cent; perhaps a fraction, for 40" in ran.err
    assert "warning: --holdout 0.5 by nodes left none of 3 runs out" in ran.err


def test_where_there_is_nothing_to_draw_the_rest_is_written(motley: Motley, world: World) -> None:
    memory = ROWS[1].replace("0.2,,10", ",,10")
    only, page = world.write("memory.csv", f"{COLUMNS}\n{memory}\n"), world.folder / "page.md"
    ran = motley("validate", "--runs", only, "--jobs", 1, "--plot", world.folder / "parity.png", "--markdown", page)
    assert ran.code == 0 and "parity.png was not written" in ran.err
    assert page.is_file() and "parity" not in page.read_text() and not (world.folder / "parity.png").exists()


def test_constants_of_a_file_are_used(motley: Motley, world: World, runs: str) -> None:
    constants = world.write("mine.yaml", "efficiencies: {ampere-datacenter: {matmul_fraction: 0.01}}\n")
    times = []
    for more in ((), ("--constants", constants)):
        ran = motley("validate", "--runs", runs, "--jobs", 1, "--json", "-", *more)
        times.append(json.loads(ran.out)["runs"][0]["predicted"])
    assert times[1] > 10 * times[0]


def test_after_a_fit_only_runs_that_it_did_not_see_count(
    motley: Motley, world: World, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @dataclass(frozen=True)
    class Found:
        constants_text: str = "efficiencies: {ampere-datacenter: {matmul_fraction: 0.01}}\n"
        calibration_ids: frozenset[str] = frozenset({"v-1", "v-3"})
        timed: int = 2
        weighed: int = 0
        drawn: int = 3
        held: int = 2
        doubtful: tuple[str, ...] = ()
        few: tuple[str, ...] = ("nemo: 2 runs; the shipped record was fitted on times of 5 runs",)

    def fit(runs: list[Run], failures: list[Run], seed: int, holdout: float, *others: object, anew: bool) -> Found:
        assert (failures, others[1]) == ([], 1)
        asked.append(([run.id for run in runs], seed, holdout, others[2], anew))
        return Found()

    monkeypatch.setattr(fitting, "fit", fit, raising=False)
    constants, report = world.folder / "constants.yaml", world.folder / "out.json"
    ran = motley("validate", "--runs", runs, "--jobs", 1, "--fit", "--seed", 7, "--out", constants, "--json", report)
    assert ran.code == 0, ran.err
    assert asked == [(["v-1", "v-2", "v-3", "v-4", "k-1"], 7, 0.5, "run", False)]
    assert f"warning: few runs to fit a stack on: {Found().few[0]}\n" in ran.err
    assert constants.read_text() == Found().constants_text
    found = json.loads(report.read_text())
    by_id = {row["id"]: row for row in found["runs"] if row["quantity"] == "iter_time_s"}
    assert found["sources"]["vtrain_single"]["count"] == 1
    assert found["sources"]["vtrain_single"]["bias"] == by_id["v-2"]["relative_error"] > 1  # with the constants of the fit
    assert found["calibration"]["sources"]["vtrain_single"]["count"] == 2
    assert [by_id[run]["calibration"] for run in ("v-1", "v-2", "v-3")] == [True, False, True]
    assert "not fitted on" in ran.out and "were fitted on" in ran.out
    assert "fitted on the times of 2 runs and the memory of 0, of 3 that were not held out" in ran.out

    # v-2 and, by its rate, k-1 are those held out that can be modelled; beside them stand their errors without a fit.
    def missed(rows: list[dict[str, Any]]) -> float:
        (time,) = [row for row in rows if row["id"] == "v-2" and row["quantity"] == "iter_time_s"]
        (rate,) = [row for row in rows if row["id"] == "k-1"]
        return (abs(time["relative_error"]) + abs(rate["measured"] / rate["predicted"] - 1)) / 2

    before = missed(json.loads(motley("validate", "--runs", runs, "--jobs", 1, "--json", "-").out)["runs"])
    told = f"iteration times missed by {missed(found['runs']):.1%} (median); with the shipped constants by {before:.1%}"
    assert f"runs held out: {told}\n" in ran.out
    assert "the fit predicts the iteration times of the runs that it has not seen no better than the shipped constants" in ran.err
    assert "of the runs held out are published ones" not in ran.err
    errors = [(run, by_id[run]["relative_error"]) for run in ("v-1", "v-3")]
    told = ", ".join(f"{run} {error:+.0%}" for run, error in sorted(errors, key=lambda entry: -entry[1]))
    assert f"warning: 2 of 2 runs that it was fitted on are still missed by more than 30%: {told}; others like" in ran.err


def test_a_fit_tells_that_runs_held_out_are_published_ones(motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = fidelity.PUBLISHED.read_text().splitlines()
    rows = [line for line in lines if line.startswith("vtrain_single-000")][:3]
    own = world.write(
        "own.csv", "\n".join([lines[0], *(f"v-{i},mine,{row.split(',', 2)[2]}" for i, row in enumerate(rows))]) + "\n"
    )
    quick = fitting.Fitted("{}\n", frozenset({"v-0"}), 1, 0, 1, held=2)
    monkeypatch.setattr(fitting, "fit", lambda *_, **__: quick)
    ran = motley("validate", "--runs", own, "--jobs", 1, "--fit", "--out", world.folder / "constants.yaml")
    assert ran.code == 0, ran.err
    assert "warning: 2 of the runs held out are published ones, which the shipped constants were fitted on\n" in ran.err


def test_where_no_run_can_be_fitted_on_no_file_is_written(motley: Motley, world: World) -> None:
    only, before = world.write("one.csv", f"{COLUMNS}\n{ROWS[3]}\n"), {"one.csv", *world.names()}
    ran = motley("validate", "--runs", only, "--fit", "--out", world.folder / "constants.yaml")
    assert_refused(ran, 2, "no run can be fitted on", "v-4: not modelled: degrees 8 x 1 x 2 = 16, but num_gpus is 8")
    assert world.names() == before


def test_commas_at_the_ends_of_lines_are_no_columns(motley: Motley, world: World, runs: str) -> None:
    found = []
    for name, end in (("plain.csv", ""), ("commas.csv", ",,")):
        file = world.write(name, "\n".join(line + end for line in (COLUMNS, *ROWS)) + "\n")
        found.append(json.loads(motley("validate", "--runs", file, "--jobs", 1, "--json", "-").out))
    assert found[0] == found[1]


def test_where_no_run_can_be_modelled_the_exit_code_is_one(motley: Motley, world: World) -> None:
    only = world.write("one.csv", f"{COLUMNS}\n{ROWS[3]}\n")
    ran = motley("validate", "--runs", only, "--jobs", 1)
    assert ran.code == 1 and "none of 1 runs could be modelled" in ran.err


def test_an_interrupt_leaves_nothing_behind(motley: Motley, world: World, runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fidelity, "predict", interrupted)
    before = world.names()
    ran = motley(
        "validate", "--runs", runs, "--jobs", 1, "--json", world.folder / "out.json", "--markdown", world.folder / "out.md"
    )
    assert ran.code == 130 and ran.err.startswith("motley: interrupted")
    assert world.names() == before


def test_an_interrupt_of_the_fit_is_told(motley: Motley, world: World, runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **flags: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "fit", interrupted)
    before = world.names()
    ran = motley("validate", "--runs", runs, "--jobs", 1, "--fit", "--out", world.folder / "constants.yaml")
    assert ran.code == 130 and ran.err == "motley: interrupted: nothing was written\n"
    assert world.names() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["runs.csv", "is empty"]),
        (f"{COLUMNS}\n", ["runs.csv", "holds no runs"]),
        ("a,b\n1,2\n", ["runs.csv", "unknown column 'a'"]),
        ("id,source_key\nx,y\n", ["runs.csv", "the column 'gpu_type' is missing"]),
        (f"{COLUMNS}\n{ROWS[0]},1\n", ["runs.csv, line 2", "cells"]),
        (f",{COLUMNS}\n0,{ROWS[0]}\n", ["runs.csv", "column 1 has no name"]),
    ],
)
def test_a_mistake_in_a_file_of_runs_is_told_in_one_line(motley: Motley, world: World, text: str, words: list[str]) -> None:
    file = world.write("runs.csv", text)
    assert_refused(motley("validate", "--runs", file, "--json", world.folder / "out.json"), 2, *words)
    assert world.names() == {"runs.csv", "tiny.yaml", "plan.json"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--runs", "nowhere.csv"), ["nowhere.csv: cannot be read"]),
        (("--source", "vtrain"), ["--source", "no run of 'vtrain'", "did you mean vtrain_single?"]),
        (("--plot", "parity.gif"), ["--plot", ".png, .svg, .pdf", "'parity.gif'"]),
        (("--jobs", "0"), ["whole number of at least 1", "'0'"]),
        (("--fit",), ["--fit needs --out FILE"]),
        (("--holdout", "0.5"), ["--holdout 0.5", "--fit is not given"]),
        (("--holdout-by", "nodes"), ["--holdout-by nodes", "--fit is not given"]),
        (("--fit", "--out", "x.yaml", "--holdout-by", "node"), ["run, nodes, source", "'node'", "did you mean nodes?"]),
        (("--out", "constants.yaml"), ["--out constants.yaml", "--fit is not given"]),
        (("--fit", "--out", "x.yaml", "--holdout", "1"), ["from 0 to below 1", "'1'"]),
        (("--fit", "--out", "x.yaml", "--constants", "y.yaml"), ["--constants y.yaml"]),
        (("--constants", "nowhere.yaml"), ["nowhere.yaml: cannot be read"]),
        (("--json", "same.txt", "--markdown", "same.txt"), ["--markdown and --json both go to same.txt"]),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(
    motley: Motley, world: World, runs: str, arguments: tuple[str, ...], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.folder)
    before = world.names()
    given = () if "--runs" in arguments else ("--runs", runs)
    assert_refused(motley("validate", *given, *arguments), 2, *words)
    assert world.names() == before


def test_a_markdown_file_without_marks_is_not_overwritten(motley: Motley, world: World, runs: str) -> None:
    page = world.write("page.md", "mine\n")
    assert_refused(motley("validate", "--runs", runs, "--markdown", page), 2, "page.md exists", "begin: motley validate")
    assert Path(page).read_text() == "mine\n"
