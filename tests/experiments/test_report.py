"""`motley report`: what it finds in folders, what its page says, and what it refuses."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pandas
import pytest

from experiments.diagrams import UNITS, alike, natural, plan_rows, timelines
from experiments.findings import MEASURED, SIMULATED, Run, findings, simulate_missing
from experiments.journal import Head
from experiments.pages import Bar, Bars, Cell, Html, Look, Looks, Note, Section, Table, page, picture
from experiments.repeats import repeated
from experiments.report import (
    MOST_CHARACTERS,
    by_merit,
    error_parts,
    failure_parts,
    labels,
    link_bars,
    look_parts,
    memory_bars,
    mfu_parts,
    report_page,
    with_short_paths,
)
from sim.engine import simulate
from sim.metrics import LinkLoad
from sim.spec.cluster import Cluster
from sim.spec.plan import Plan, parse_plan
from sim.spec.program import Backward, Forward, SendActivation
from sim.spec.reading import InputError
from sim.spec.trace import Span, Trace, trace_json
from sim.spec.version import VERSION
from tests.experiments.conftest import TINY_CLUSTER, TINY_PLAN, Ran, World
from tests.experiments.report_world import row, tiny, traces, write_results, write_rows, write_run

Motley = Callable[..., Ran]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    write_results(folder)
    return folder


def cells(parts: list[object]) -> list[list[str]]:
    """The texts of the first table among parts."""
    table = next(part for part in parts if isinstance(part, Table))
    return [[cell.text for cell in row] for row in table.cells]


# --- What belongs together -------------------------------------------------------------------------------------------


def test_rows_traces_reports_and_plans_become_one_list_of_runs(results: Path) -> None:
    found = findings([results])
    assert len(found.runs) == 41 and len(found.history) == 2 * 4 * 2 * 3
    own = found.runs[40]
    assert set(own.traces) == {SIMULATED, MEASURED} and own.plan == parse_plan(TINY_PLAN) and own.cluster == tiny()
    assert own.row["iteration_s"] == traces()[1].iteration_s and own.row["origin"] == "measured"
    assert [run.outcome for run in found.runs].count("ok") == 38


def test_a_row_has_the_plan_that_it_names_and_what_a_plan_tells(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "a.json").write_text(TINY_PLAN)
    write_rows(tmp_path / "results.csv", [row(0) | {"plan": "plans/a.json", "cluster": "tiny"}])
    (run,) = findings([tmp_path]).runs
    assert run.plan == parse_plan(TINY_PLAN) and run.row["schedule"] == "1f1b" and run.row["mfu"] == 0.10


def test_plans_that_differ_in_an_unusual_choice_alone_are_told_apart(tmp_path: Path) -> None:
    for name, chosen in (("a", ""), ("b", '"offload_optimizer": true, ')):
        (tmp_path / f"{name}.json").write_text(TINY_PLAN.replace('"precision"', f'{chosen}"precision"'))
    rows = [row(0) | {"plan": f"{name}.json", "cluster": "tiny"} for name in "ab"]
    write_rows(tmp_path / "results.csv", rows)
    runs = findings([tmp_path]).runs
    assert [run.row.get("offload_optimizer") for run in runs] == [None, True]
    assert "optimizer in hosts yes" in labels(runs)[1]


def test_parquet_tells_the_same_as_csv(tmp_path: Path) -> None:
    rows = [row(number) for number in range(40)]
    for name in ("csv", "parquet"):
        (tmp_path / name).mkdir()
    write_rows(tmp_path / "csv" / "results.csv", rows)
    pandas.DataFrame(rows).to_parquet(tmp_path / "parquet" / "results.parquet")
    one, other = (findings([tmp_path / name]).runs for name in ("csv", "parquet"))
    assert [run.row for run in one] == [run.row for run in other]
    write_rows(tmp_path / "parquet" / "results.csv", rows)  # a sweep writes both
    assert len(findings([tmp_path / "parquet"]).runs) == 40


def test_a_sweep_that_is_not_finished_is_told_from_its_journal(tmp_path: Path) -> None:
    lines = [json.dumps(row(number)) for number in range(3)]
    (tmp_path / "journal.jsonl").write_text(Head("grid.yaml", ("a", "b", "c", "d")).line() + "\n".join(lines) + '\n{"cut')
    assert [run.row["mfu"] for run in findings([tmp_path]).runs] == pytest.approx([0.10, 0.11, 0.12])


def test_a_journal_or_table_that_is_named_is_read_and_beside_others_only_one(tmp_path: Path) -> None:
    rows = [row(number) for number in range(3)]
    journal, table = tmp_path / "journal.jsonl", tmp_path / "results.csv"
    journal.write_text(Head("grid.yaml", ("a", "b", "c")).line() + "".join(json.dumps(row) + "\n" for row in rows))
    write_rows(table, rows)
    other = tmp_path / ".." / tmp_path.name / "results.csv"
    for paths in ([journal], [table], [tmp_path], [journal, table], [table, journal], [journal, other], [tmp_path, journal]):
        assert len(findings(paths).runs) == 3, paths
    assert len(findings([tmp_path, table]).runs) == 3


def test_a_damaged_journal_is_told_with_its_line(tmp_path: Path) -> None:
    lines = [json.dumps(row(0)), '{"cut": ', json.dumps(row(1))]
    (tmp_path / "journal.jsonl").write_text(Head("grid.yaml", ("a", "b")).line() + "\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"journal\.jsonl, line 3, column \d+: "):
        findings([tmp_path])


def test_a_report_goes_to_the_trace_with_its_peaks_and_time(motley: Motley, world: World) -> None:
    """Two plans in one folder, each with a report and a trace: whose is whose is not in the names."""
    slow = TINY_PLAN.replace('"micro_batch": 1, "micro_batches": 4', '"micro_batch": 4, "micro_batches": 1')
    world.write("b.json", slow)
    for plan, report, trace in (("plan.json", "x.json", "z.json"), ("b.json", "y.json", "w.json")):
        place = [world.folder / name for name in (plan, report, trace)]
        assert motley("simulate", place[0], "--cluster", world.cluster, "--json", place[1], "--trace", place[2]).code == 0
    runs = findings([world.folder]).runs
    assert len(runs) == 2
    for run in runs:
        told = json.loads((world.folder / ("x.json" if run.plan == parse_plan(TINY_PLAN) else "y.json")).read_text())
        assert {key: run.row[key] for key in ("iteration_s", "mfu", "wall_s")} == {
            key: told[key] for key in ("iteration_s", "mfu", "wall_s")
        }


def test_the_report_of_a_plan_says_how_it_was_searched(motley: Motley, world: World, tmp_path: Path) -> None:
    files = "--out", tmp_path / "plan.json", "--json", tmp_path / "report.json"
    search = "--global-batch", "4", "--seq-len", "128", "--planner", "random", "--budget", "2s", "--seed", "3"
    assert motley("plan", "--cluster", world.cluster, "--model", world.model, *search, *files).code == 0
    told = json.loads((tmp_path / "report.json").read_text())["search"]
    (run,) = findings([tmp_path]).runs
    same = ("planner", "judge", "seed", "budget_s", "judged", "stopped", "dollars_per_billion_tokens", "joules_per_token")
    assert {key: run.row[key] for key in same} == {key: told[key] for key in same}
    assert (run.row["planner"], run.row["seed"], run.row["search_s"]) == ("random", 3, told["seconds"])


def test_an_infeasible_report_says_why(motley: Motley, world: World) -> None:
    large = TINY_PLAN.replace('"hidden": 64, "ffn": 128', '"hidden": 65536, "ffn": 65536')
    ran = motley("simulate", world.write("plan.json", large), "--cluster", world.cluster, "--json", world.folder / "r.json")
    assert ran.code == 1
    ran = motley("report", world.folder / "r.json", "--out", world.folder / "r.html")
    assert ran.code == 0 and "needs" in (world.folder / "r.html").read_text()


# --- Simulated for the page ------------------------------------------------------------------------------------------


def test_a_plan_whose_cluster_is_known_is_simulated(world: World) -> None:
    (run,) = findings([world.folder]).runs
    assert simulate_missing([run], 1) == []
    assert run.traces[SIMULATED] == traces()[0] and run.simulated_here
    assert run.row["iteration_s"] == traces()[0].iteration_s


def test_a_simulation_that_takes_another_time_than_the_row_says_is_not_shown(world: World) -> None:
    told = row(0) | {"plan": "plan.json", "cluster": "tiny", "judge": "simulate"}
    write_rows(world.folder / "results.csv", [told | {"iteration_s": traces()[0].iteration_s * 1.01}])
    (run,) = findings([world.folder]).runs
    (remark,) = simulate_missing([run], 1)
    assert SIMULATED not in run.traces and "its timeline is not told" in remark and "'tiny'" in remark
    assert run.peaks[SIMULATED]  # memory does not depend on the time
    write_rows(world.folder / "results.csv", [told | {"seed": seed, "iteration_s": 1.0 + seed} for seed in range(3)])
    (remark,) = simulate_missing(findings([world.folder]).runs, 3)
    assert "the timelines of 3 runs are not told" in remark and "the first one" in remark and "and not 1 s" in remark
    write_rows(world.folder / "results.csv", [told | {"iteration_s": traces()[0].iteration_s}])
    (run,) = findings([world.folder]).runs
    assert simulate_missing([run], 1) == [] and run.traces[SIMULATED] == traces()[0]


def test_a_run_on_devices_of_different_speeds_is_simulated_on_the_same(motley: Motley, world: World) -> None:
    plan, place = parse_plan(TINY_PLAN, "plan"), tiny()
    told = row(0) | {"plan": "plan.json", "cluster": "tiny", "judge": "simulate", "jitter": 0.2, "seed": 3}
    once, middle = simulate(plan, place, 3, 0.2), repeated(plan, place, 3, 0.2, 5)[0]
    assert once != middle
    spread = repeated(plan, place, 3, 0.2, 5)[1]
    for more, trace in (({}, once), ({"repeats": 5, "middle_seed": spread.middle_seed}, middle), ({"repeats": "a label"}, once)):
        write_rows(world.folder / "results.csv", [told | more | {"iteration_s": trace.iteration_s}])
        (run,) = findings([world.folder]).runs
        assert simulate_missing([run], 1) == [] and run.traces[SIMULATED] == trace
    (world.folder / "results.csv").unlink()
    report = world.folder / "report.json"
    flags = ("--jitter", "20%", "--seed", 3, "--repeats", 5, "--json", report)
    assert motley("simulate", world.plan, "--cluster", world.cluster, *flags).code == 0
    (run,) = findings([world.folder]).runs
    assert simulate_missing([run], 1) == [] and run.traces[SIMULATED] == middle
    told = json.loads(report.read_text())["repeats"]
    known = {"jitter": 0.2, "repeats": 5, "seed": 3, "least_s": told["least_s"], "most_s": told["most_s"]}
    assert {key: run.row[key] for key in known} == known
    found = findings([world.folder])
    assert simulate_missing(found.runs, 1) == []
    assert "on devices whose speeds differ by 20 %, simulated for this page" in report_page(found, "t")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"seed": -1}, "drawn with the seed -1; expected a whole number"),
        ({"seed": None}, "drawn with the seed None"),
        ({"seed": 0.5}, "drawn with the seed 0.5"),
        ({"seed": math.nan}, "drawn with the seed nan"),
        ({"seed": math.inf}, "drawn with the seed inf"),
        ({"jitter": math.nan}, "its jitter is nan"),
        ({"jitter": 7}, "its jitter is 7; expected a number between 0 and 1"),
        ({"jitter": True}, "its jitter is True"),
    ],
)
def test_a_row_whose_devices_cannot_be_drawn_is_told_and_not_simulated(world: World, more: dict[str, object], told: str) -> None:
    (run,) = findings([world.folder]).runs
    run.row |= {"jitter": 0.2, "seed": 3, "iteration_s": 1.0} | more
    (remark,) = simulate_missing([run], 1)
    assert told in remark and SIMULATED not in run.traces


def test_a_trace_and_a_report_go_to_the_row_that_took_as_long_and_to_no_other(motley: Motley, world: World) -> None:
    plan, place = parse_plan(TINY_PLAN, "plan"), tiny()
    told = row(0) | {"plan": "plan.json", "cluster": "tiny", "judge": "simulate"}
    times = {(jitter, seed): simulate(plan, place, seed, jitter).iteration_s for jitter in (0.0, 0.2) for seed in (3, 4)}
    write_rows(world.folder / "results.csv", [told | {"jitter": j, "seed": s, "iteration_s": t} for (j, s), t in times.items()])
    for name, flags in (("same", ("--jitter", "20%", "--seed", 4)), ("other", ("--jitter", "10%", "--seed", 7))):
        files = ("--trace", world.folder / f"{name}.trace.json", "--json", world.folder / f"{name}.json")
        assert motley("simulate", world.plan, "--cluster", world.cluster, *flags, *files).code == 0
    runs = findings([world.folder]).runs
    known = [(run.row["jitter"], run.row["seed"]) for run in runs]
    assert known == [*times, (0.1, 7)] and [SIMULATED in run.traces for run in runs] == [False, False, False, True, True]
    assert [run.row["iteration_s"] for run in runs[:4]] == pytest.approx([*times.values()], rel=1e-12)


def test_a_trace_alone_tells_that_its_devices_differ(motley: Motley, world: World, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert motley("simulate", world.plan, "--cluster", world.cluster, "--jitter", "20%", "--trace", file).code == 0
    found = findings([tmp_path])
    (run,) = found.runs
    assert run.row["jitter"] == 0.2 and "on devices whose speeds differ by 20 %" in report_page(found, "t")


def test_jitter_is_told_where_there_is_any_and_rows_without_have_none(tmp_path: Path) -> None:
    old = [row(0) | {"seed": seed} for seed in range(2)]
    assert "jitter" not in " ".join(labels([Run("r", one | {"jitter": 0.0}) for one in old]))
    for name in "abc":
        (tmp_path / name).mkdir()
    write_rows(tmp_path / "a" / "results.csv", [one | {"jitter": 0.0} for one in old])
    write_rows(tmp_path / "b" / "results.csv", old)
    assert all("jitter" not in run.row for run in findings([tmp_path]).runs)
    write_rows(tmp_path / "c" / "results.csv", [row(0) | {"seed": 0, "jitter": 0.001}])
    assert [run.row["jitter"] for run in findings([tmp_path]).runs] == [0, 0, 0, 0, 0.001]


def test_runs_that_cannot_be_simulated_for_one_reason_are_told_of_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = findings([world.folder]).runs
    reason = "the device box/9 is not in the cluster"

    def refuse(plan: Plan, cluster: Cluster) -> NoReturn:
        raise InputError(reason)

    monkeypatch.setattr("experiments.findings.peak_bytes", refuse)
    strangers = [replace(run, name=name, peaks={}) for name in ("one", "two", "three")]
    assert simulate_missing(strangers, 3) == [f"one and 2 more are not simulated: {reason}"]
    assert simulate_missing(strangers[1:2], 3) == [f"two is not simulated: {reason}"]


def test_a_sweeps_bandwidth_is_that_of_the_simulated_cluster(tmp_path: Path) -> None:
    place = tmp_path / "two.yaml"
    nic = "nic: {kind: ethernet, bandwidth: 10 Gbit/s}"
    place.write_text(
        f"name: two\nnodes:\n  - {{name: a, count: 2, gpu: RTX4090, gpus: 1, intra: pcie4, {nic}}}\nfabric: {{latency: 50 us}}\n"
    )
    write_rows(tmp_path / "results.csv", [row(0) | {"cluster": "two", "bandwidth": "x0.5", "stack": "motley"}])
    (run,) = findings([tmp_path]).runs
    assert run.cluster is not None and run.cluster.nodes[0].nic is not None
    assert run.cluster.nodes[0].nic.bandwidth_bytes_per_s == 10e9 / 8 / 2


# --- What the page says ----------------------------------------------------------------------------------------------


def test_errors_are_of_what_was_measured(results: Path) -> None:
    runs = list(findings([results]).runs)
    told = cells(error_parts(runs, labels(runs)))
    iteration, bubble, peak = told
    assert iteration[1] == "iteration" and iteration[4] == "-20.0"  # 1 / 1.25 - 1
    assert bubble[1] == "bubble" and bubble[4] == "+0.0"
    assert peak[1].startswith("peak memory of box/") and peak[4] == "+0.0"
    (note,) = (part for part in error_parts(runs, labels(runs)) if isinstance(part, Note))
    assert note.text == "Iterations: mean error 20.0 %, bias -20.0 %, of 1 measured."


def test_failures_that_differ_in_their_numbers_only_are_one_row(results: Path) -> None:
    runs = list(findings([results]).runs)
    told = cells(failure_parts(runs, labels(runs)))
    assert [line[:3] for line in told] == [
        ["infeasible", "2", "box/0 needs 31.2 GiB, but has 24.0 GiB"],
        ["failed", "1", "ZeroDivisionError: division by zero"],
    ]
    assert told[0][3] == "pool-0 · flashflex · seed 2 and 1 more"


def test_runs_are_called_by_the_inputs_that_tell_them_apart_and_no_more() -> None:
    runs = [Run("f", row(number) | {"label": f"x{number // 5 % 4}"}) for number in range(40)]
    assert labels(runs)[6] == "pool-0 · flashflex · seed 1"  # the label says what the planner has said
    assert labels([Run("a", {}), Run("b", {})]) == ["a", "b"]
    assert labels([Run("a", {"seed": 0}), Run("a", {"seed": 0})]) == ["run 1", "run 2"]


def test_paths_leave_out_what_they_have_in_common() -> None:
    runs = [Run("f", {"plan_file": f"../plans/{name}.json"}) for name in ("amp/a", "amp/b", "b")]
    assert [run.row["plan_file"] for run in with_short_paths(runs)] == ["amp/a", "amp/b", "b"]


def test_sentences_that_name_devices_are_no_paths() -> None:
    told = [f"h-0/0 needs {need} GiB but has 79.6 GiB" for need in (226.6, 91.2)]
    runs = [Run("f", {"infeasible": text, "error": text, "refusal": text}) for text in told]
    assert [run.row for run in with_short_paths(runs)] == [run.row for run in runs]


def test_mfu_bars_are_as_long_as_the_mfu(results: Path) -> None:
    runs = list(findings([results]).runs)[:40]
    (bars,) = mfu_parts(runs, labels(runs))
    assert isinstance(bars, Bars) and len(bars.bars) == 37
    first = bars.bars[0]
    assert (first.fraction, first.behind) == pytest.approx((0.10 / 0.6, 0.12 / 0.6))  # up to 51 % MFU: bars end at 60 %
    assert first.width == f"{100 / 6:.4g}%" and first.text == "10.0 % (12.0)"
    assert "highest 49.0 % of pool-1 · random · seed 4" in bars.alt


def test_memory_bars_are_shares_of_what_a_gpu_has() -> None:
    capacity = tiny().nodes[0].gpu.memory_bytes
    assert capacity == pytest.approx(24 * 2**30, rel=1e-3)
    run = Run("f", cluster=tiny(), peaks={SIMULATED: {"box/0": capacity // 2, "box/1": capacity // 2}})
    (both,) = memory_bars(run).bars
    assert both == Bar("box/0-1 RTX4090 (each)", 0.5, "12 GiB of 24 GiB")
    run.peaks[SIMULATED] = {"box/0": int(0.97 * capacity), "box/1": 2 * capacity}
    assert [(bar.tone, bar.width) for bar in memory_bars(run).bars] == [("full", "97%"), ("over", "100%")]
    run.peaks[MEASURED] = {"box/0": capacity // 4, "box/1": capacity // 8}
    bars = memory_bars(run).bars
    assert [bar.fraction for bar in bars] == [0.25, 0.125] and bars[1].behind == 2.0


def test_memory_without_a_cluster_says_that_capacities_are_not_known() -> None:
    bars = memory_bars(Run("f", peaks={SIMULATED: {"n/10": 2**30, "n/9": 2**31}}))
    assert [(bar.label, bar.fraction, bar.text) for bar in bars.bars] == [("n/9", 1.0, "2 GiB"), ("n/10", 0.5, "1 GiB")]
    assert "--cluster" in bars.caption


def test_links_that_carry_the_same_share_a_bar() -> None:
    links = [
        LinkLoad("a>b", 0.5, 1e9),
        LinkLoad("n/0>nvlink", 0.25, 2e6),
        LinkLoad("n/1>nvlink", 0.25, 2e6),
        LinkLoad("x>y", 0.0, 0.0),
    ]
    shown = link_bars(Run("f", links=links))
    assert [(bar.label, bar.fraction, bar.text) for bar in shown.bars] == [
        ("a>b", 0.5, "50.00 %, 1 GB"),
        ("n/0>nvlink and 1 like it", 0.25, "25.00 %, 2 MB"),
    ]
    assert "1 links carried nothing" in shown.caption


def test_a_timeline_draws_every_span_where_it_was() -> None:
    """One lane, 4 s: forward 0 to 1 s, backward 1 to 3 s, and beside them a message from 1 to 1.5 s.

    s      0    1    2    3    4
    work   FFFFFBBBBBBBBBB
    send        SSS
    """
    plan = parse_plan(TINY_PLAN)
    spans = (
        Span("p0s0", Forward(0, (0, 2)), 0.0, 1.0),
        Span("p0s0", Backward(0, (0, 2)), 1.0, 3.0),
        Span("p0s0", SendActivation(0, 2, "p0s1", (0, 1)), 1.0, 1.5, 8),
    )
    trace = Trace(plan, "tiny", "simulated", 4.0, {"p0s0": ("box/0",)}, spans, {})
    html = timelines([("hand-drawn", trace)]).markup
    second, gap = UNITS // 4, 5
    assert re.findall(r'<path class="(\w+)" stroke-width="\d+" d="M(\d+) \d+h(\d+)"/>', html) == [
        ("tf", "0", str(second - gap)),
        ("tb", str(second), str(2 * second - gap)),
        ("ts", str(second), str(second // 2 - gap)),
    ]
    assert re.findall(r'<s( class="w")? style="left:([\d.]+%)">0</s>', html) == [("", "12.5%"), (' class="w"', "50%")]
    assert re.findall(r'<span class="\w*" style="left:([\d.]+%)">([^<]+)', html) == [
        ("0%", "0"),
        ("25%", "1"),
        ("50%", "2"),
        ("75%", "3"),
        ("100%", "4 s"),
    ]


def test_thin_bars_that_touch_are_one_and_others_stay_apart() -> None:
    """A thousand forwards of 1 ms in a row, and then one after a pause: two strokes, not a thousand."""
    spans = [Span("p0s0", Forward(i, (0, 2)), i / 1000, (i + 1) / 1000) for i in range(1000)]
    spans.append(Span("p0s0", Forward(1000, (0, 2)), 1.5, 2.0))
    trace = Trace(parse_plan(TINY_PLAN), "tiny", "simulated", 2.0, {"p0s0": ("box/0",)}, tuple(spans), {})
    (path,) = re.findall(r'class="tf" stroke-width="\d+" d="([^"]+)"', timelines([("", trace)]).markup)
    assert path == f"M0 8h{UNITS // 2 - 5}M{UNITS * 3 // 4} 8h{UNITS // 4 - 5}"


def test_a_plan_shows_which_gpus_hold_which_layers() -> None:
    html = plan_rows(parse_plan(TINY_PLAN), tiny()).markup
    blocks = re.findall(r'<b class="(\w+)" style="left:([\d.]+%);width:([\d.]+%)"[^>]*>(\w+)</b>', html)
    assert blocks == [("p0", "0%", "50%", "p0s0"), ("p0", "50%", "50%", "p0s1")]  # embedding, four layers and head
    assert [text for _, text in re.findall(r'<span style="left:([\d.]+%)">(\w+)</span>', html)] == ["E", "0", "1", "2", "3", "H"]
    assert 'aria-label="Plan of toy on 2 GPUs of tiny: 1 pipeline of 2 stages. p0s0 on box/0: layers 0 to 1; ' in html
    one = replace(parse_plan(TINY_PLAN).pipelines[0].stages[0], layers=((0, 4),))
    alone = replace(parse_plan(TINY_PLAN), pipelines=(replace(parse_plan(TINY_PLAN).pipelines[0], stages=(one,)),))
    assert "<em>not used</em>" in plan_rows(alone, tiny()).markup


def test_neighbours_that_are_alike_are_one_row_and_names_sort_by_their_numbers() -> None:
    assert alike(["a", "b", "C", "d"], str.islower) == [["a", "b"], ["C"], ["d"]]
    assert sorted(["n-10/2", "n-9/11", "n-9/2"], key=natural) == ["n-9/2", "n-9/11", "n-10/2"]


def test_the_runs_to_look_at_first_are_measured_ones_and_then_the_fastest_of_each_job(results: Path) -> None:
    runs = list(findings([results]).runs)
    for run in runs[:40]:
        run.plan = parse_plan(TINY_PLAN)
    names = [runs.index(run) for run in by_merit(runs)]
    assert names[:3] == [40, 39, 19] and set(names[-3:]) == {7, 8, 21}


def test_timelines_are_left_out_where_the_page_would_grow_too_large(monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    runs = list(findings([results]).runs)
    assert MOST_CHARACTERS > 1_000_000
    (looks,) = (part for part in look_parts(runs, labels(runs)) if isinstance(part, Looks))
    whole = [part for part in looks.looks[0].parts if isinstance(part, Html)]
    monkeypatch.setattr("experiments.report.MOST_CHARACTERS", 1)
    note, looks = look_parts(runs, labels(runs))
    assert isinstance(note, Note) and "timelines and links are left out" in note.text and isinstance(looks, Looks)
    assert "timeline" in str(whole) and "timeline" not in str(looks.looks[0].parts)


def test_validations_show_their_errors_by_source(motley: Motley, tmp_path: Path) -> None:
    summary = {
        **{"runs": 2, "not_modelled": 0, "quantity": "iter_time_s", "count": 2, "kendall_tau": 0.5, "quantities": {}},
        **{"mean_absolute_relative_error": 0.1, "median_absolute_relative_error": 0.05, "p90_absolute_relative_error": 0.2},
        **{"bias": -0.03},
    }
    point = {"source_key": "someone2024", "quantity": "iter_time_s", "predicted": 1.0, "measured": 1.1}
    told = {"runs": [point, point], "sources": {"someone2024": summary}, "overall": summary}
    (tmp_path / "validation.json").write_text(json.dumps(told))
    assert motley("report", tmp_path / "validation.json", "--out", tmp_path / "v.html").code == 0
    html = (tmp_path / "v.html").read_text()
    assert re.search(r"<td>someone2024</td>.*?>10\.0<.*?>5\.0<.*?>20\.0<.*?>-3\.0<.*?>0\.500<", html, re.S)
    assert 'alt="Predicted over measured iteration times of 2 runs' in html and "2 within 10 %" in html


# --- The frame -------------------------------------------------------------------------------------------------------


def test_a_page_escapes_what_it_is_told() -> None:
    evil = "<script>alert(1)</script>"
    table = Table("t", [evil], [[Cell(evil, opens=evil)], [evil]], search=True, choose=[evil], noun=evil)
    looks = Looks(
        [Look("a", evil, [Note(evil, ((evil, evil),))], shown=True), Look("b", evil, [Bars(evil, [Bar(evil, 0, evil)])])]
    )
    html = page(evil, [Section(evil, [table, looks])], evil)
    assert evil not in html and "&lt;script&gt;" in html
    (packed,) = re.findall(r'<script type="text/plain" class="packed">([^<]+)</script>', html)
    texts = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert list(texts) == ["b"] and evil not in texts["b"] and "&lt;script&gt;" in texts["b"]


def test_a_page_names_no_place_outside_itself(results: Path) -> None:
    html = report_page(findings([results]), "title")
    assert not re.findall(r'(?:src|href|action|data)="(?!data:|#)[^"]*"', html)
    assert not re.findall(r"@import|url\(", html)
    assert "default-src 'none'" in html


def test_a_figure_becomes_an_image_with_words() -> None:
    from matplotlib.figure import Figure

    image = picture(Figure((2, 1)), "An empty figure")
    svg = base64.b64decode(image.source.removeprefix("data:image/svg+xml;base64,"))
    assert b"<svg" in svg and 'alt="An empty figure"' in page("t", [Section("s", [image])])


def test_the_same_results_make_the_same_page(results: Path) -> None:
    assert report_page(findings([results]), "t") == report_page(findings([results]), "t")


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_one_file_and_keeps_an_earlier_one(motley: Motley, results: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("earlier")
    ran = motley("report", results, "--out", out)
    assert ran.code == 0 and "41 runs of 7 files" in ran.out and "report.html.~1~" in ran.out
    assert (tmp_path / "report.html.~1~").read_text() == "earlier" and out.read_text().startswith("<!doctype html>")
    ran = motley("report", results / "run" / "measured.json", "--out", "-", "--title", "One trace")
    assert "<title>One trace</title>" in ran.out and "1 run of 1 file;" in ran.err


def test_what_is_nothing_of_motleys_is_passed_over_in_a_folder(motley: Motley, results: Path, tmp_path: Path) -> None:
    for name, text in (("package.json", "{}"), ("sheet.csv", "a,b\n1,2\n"), ("other.yaml", "a: 1\n"), ("notes.txt", "x")):
        (results / name).write_text(text)
    (results / "unfinished").mkdir()
    (results / "unfinished" / "results.csv").write_text("nonsense")
    ran = motley("report", results, "--out", tmp_path / "r.html")
    assert ran.code == 0 and f"3 files passed over: {results / 'other.yaml'}, {results / 'package.json'}, " in ran.out


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "holds nothing that a report can tell of; expected results.csv"),
        ({"package.json": "{}", "a.csv": "a,b\n1,2\n"}, "holds nothing that a report can tell of"),
        ({"a.json": '{"iteration_s": '}, "ends too early"),
        ({"a.json": '{"traceEvents": [{"ph": "M", '}, "ends too early"),
        ({"plan.json": '{"format": "motley-plan/9"}'}, "expected one of motley-plan/1, but got 'motley-plan/9'"),
        ({"results.csv": "cluster,planner,iteration_s\na,b\n"}, "row 1 has 2 cells, but the first line names 3 columns"),
        ({"results.csv": "cluster,planner,iteration_s,mfu\na,b,1.0,high\n"}, 'row 1: mfu is a number, but got "high"'),
        (
            {"results.csv": "cluster,planner,iteration_s,version\na,b,1.0,0.0.9\n"},
            f"by motley 0.0.9, but this is motley {VERSION}",
        ),
        ({"results.parquet": "PAR2"}, "is no Parquet file"),
        (
            {"a.yaml": TINY_CLUSTER, "b.yaml": TINY_CLUSTER.replace("RTX4090", "V100-16GB-SXM")},
            "another file describes a cluster 'tiny'",
        ),
        ({"a.yaml": TINY_CLUSTER}, "there is no run to tell of"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(motley: Motley, world: World, files: dict[str, str], problem: str) -> None:
    folder = world.folder / "bad"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    out = world.folder / "report.html"
    out.write_text("earlier")
    before = world.names()
    ran = motley("report", folder, "--out", out)
    assert ran.code == 2 and problem in ran.err and ran.err.count("\n") == 1
    assert world.names() == before and out.read_text() == "earlier"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["absent"], "absent: does not exist"),
        (["plan.json", "--out", "r.pdf"], "a page's name ends in .html, but got"),
        (["plan.json", "--out", "plan.json"], "would be overwritten"),
        (["other.json"], "is nothing that a report can tell of"),
        (["plan.json", "--cluster", "absent.yaml"], "absent.yaml: cannot be read"),
    ],
)
def test_bad_arguments_are_one_line(
    motley: Motley, world: World, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    monkeypatch.chdir(world.folder)
    world.write("other.json", "{}")
    before = world.names()
    ran = motley("report", *arguments)
    assert ran.code == 2 and problem in ran.err and ran.err.count("\n") == 1 and world.names() == before


def test_a_trace_alone_tells_what_it_can(motley: Motley, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(trace_json(traces()[0]))
    (run,) = findings([tmp_path / "t.json"]).runs
    assert run.row["tokens_per_s"] == 4 * 128 / traces()[0].iteration_s and run.row.get("mfu") is None
    assert motley("report", tmp_path / "t.json", "--out", tmp_path / "t.html").code == 0


def test_a_run_on_cpus_is_simulated_as_its_report_has_it(tmp_path: Path) -> None:
    """Where the peaks that a run measured explain the simulated time of its report, the timeline is told; else it is not."""
    write_run(tmp_path)
    (tmp_path / "simulated.json").unlink()
    (run,) = findings([tmp_path]).runs
    assert simulate_missing([run], 1) == [] and run.traces[SIMULATED].iteration_s == traces()[0].iteration_s
    told = json.loads((tmp_path / "run.json").read_text())
    told["simulated"]["iteration_s"] *= 2
    (tmp_path / "run.json").write_text(json.dumps(told))
    (run,) = findings([tmp_path]).runs
    assert len(simulate_missing([run], 1)) == 1 and SIMULATED not in run.traces
