"""The experiments: what holds for each of them and its page, and `motley experiment`, which executes them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import papers
from experiments.journal import CSV, JOURNAL
from experiments.papers import EXPERIMENTS
from experiments.papers.experiment import Experiment, markdown, read_rows
from experiments.sweep import COLUMNS, Finished, Run, execute, given, named
from sim.simulation import simulation
from sim.spec.cluster import read_cluster
from sim.spec.judge import Cost
from sim.spec.plan import read_plan
from sim.spec.reading import InputError
from tests.experiments.conftest import ROOT, Ran, World

Motley = Callable[..., Ran]

PAGES = ROOT / "docs" / "experiments"
LEAST_PIXELS, MOST_PIXELS = 700, 1300
"""How wide a figure is that a page can show as it is."""

each = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))


# --- Every experiment ------------------------------------------------------------------------------------------------


def _said(run: Run) -> dict[str, object]:
    """What a run says of itself before it is executed, as far as no constant changes it."""
    labels = {name: value for name, value in run.labels if not isinstance(value, float)}
    return {
        "cluster": run.cluster.name,
        "gpus": len(run.cluster.devices),
        "model": run.job.model.name,
        "sequence_length": run.job.sequence_length,
        "global_batch": run.job.global_batch,
        "precision": run.job.precision,
        "planner": run.planner,
        "judge": run.judge,
        "seed": run.seed,
        **({} if run.plan is not None else {"budget_s": run.budget_s}),
        **labels,
    }


@each
def test_its_runs_are_there_once_and_the_same_each_time(experiment: Experiment) -> None:
    runs = list(experiment.runs())
    assert list(named(runs)) == list(named(experiment.runs()))  # raises where there are none, and where two are the same


@each
def test_the_rows_that_its_page_shows_are_those_of_its_runs(experiment: Experiment) -> None:
    runs, frame = list(experiment.runs()), read_rows(PAGES / f"{experiment.name}.csv")
    assert len(frame) == len(runs)
    labels = {name for run in runs for name, _ in run.labels}
    assert set(frame.columns) == set(COLUMNS) | labels
    for run, row in zip(runs, frame.to_dict("records"), strict=True):
        said = _said(run)
        assert {name: row[name] for name in said} == said
    assert not frame["error"].notna().any()


@each
def test_its_table_is_that_of_its_rows(experiment: Experiment) -> None:
    told = experiment.table(read_rows(PAGES / f"{experiment.name}.csv"))
    assert told == (PAGES / f"{experiment.name}-table.md").read_text(encoding="utf-8")


@each
def test_its_page_shows_every_figure_and_the_table(experiment: Experiment) -> None:
    page = (PAGES / f"{experiment.name}.md").read_text(encoding="utf-8")
    figures = experiment.plot(read_rows(PAGES / f"{experiment.name}.csv"))
    assert figures and all(stem.startswith(experiment.name) for stem in figures)
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert sorted(shown) == sorted(f"{stem}.png" for stem in figures)
    assert {path.name for path in PAGES.glob(f"{experiment.name}*.png")} == set(shown)
    for figure in figures.values():
        assert LEAST_PIXELS <= figure.get_figwidth() * figure.dpi <= MOST_PIXELS
        figure.draw_without_rendering()  # raises where it cannot be drawn
    assert f'--8<-- "docs/experiments/{experiment.name}-table.md"' in page
    assert f"motley experiment {experiment.name} --out" in page


def test_every_experiment_is_in_the_list_of_pages_and_in_the_menu() -> None:
    index, menu = (PAGES / "index.md").read_text(encoding="utf-8"), (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    lines = [f"| [{name}]({name}.md) | {asked.paper} | {asked.question} |" for name, asked in EXPERIMENTS.items()]
    assert re.findall(r"^\| \[.*$", index, re.MULTILINE) == lines
    assert re.findall(r"experiments/(\w+)\.md", menu) == ["index", *EXPERIMENTS]
    assert all(name == asked.name for name, asked in EXPERIMENTS.items())


# --- Rows and tables -------------------------------------------------------------------------------------------------


def test_a_table_in_markdown_has_its_first_column_to_the_left() -> None:
    assert markdown(["a", "b", "c"], [["x", 1, 2.5], ["y", "-", ""]]) == (
        "| a | b | c |\n| :-- | --: | --: |\n| x | 1 | 2.5 |\n| y | - |  |\n"
    )


def test_rows_that_are_not_of_a_sweep_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        read_rows(tmp_path / "no.csv")
    (tmp_path / "other.csv").write_text("run,cluster\n1,2\n")
    with pytest.raises(InputError, match=r"results\.csv of a sweep: it has no column 'stack'"):
        read_rows(tmp_path / "other.csv")


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(world: World, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """A registered experiment of two judged plans and a search, which says of its rows how many there are, and the slowest."""
    cluster, plan = read_cluster(world.cluster), read_plan(world.plan)

    def runs() -> list[Run]:
        return [
            given(cluster, plan, labels=(("part", "given"), ("schedule_of", "1f1b"))),
            given(cluster, plan, "estimate", labels=(("part", "given"), ("schedule_of", "estimated"))),
            Run(cluster, plan.job(), "megatron", budget_s=20.0, labels=(("part", "searched"),)),
        ]

    def plot(frame: pandas.DataFrame) -> dict[str, Figure]:
        figure = Figure(figsize=(8.0, 3.0))
        FigureCanvasAgg(figure)
        figure.subplots().bar(frame["part"].index, frame["iteration_s"])
        return {"tiny-bars": figure}

    def table(frame: pandas.DataFrame) -> str:
        return markdown(["part", "s"], [[row.part, f"{row.iteration_s:.9g}"] for row in frame.itertuples()])

    experiment = Experiment("tiny", "nobody's", "Is it so?", runs, plot, table)
    monkeypatch.setattr(papers, "EXPERIMENTS", {**EXPERIMENTS, "tiny": experiment})
    return experiment


def test_without_a_name_all_experiments_are_listed(motley: Motley, tiny: Experiment) -> None:
    ran = motley("experiment")
    assert ran.code == 0 and not ran.err
    lines = [line.split()[0] for line in ran.out.splitlines() if line[:1].isalpha()]
    assert lines == ["experiment", *EXPERIMENTS, "tiny"]
    assert "Is it so?" in ran.out and "nobody's" in ran.out


def test_an_unknown_name_is_told_in_one_line_with_the_nearest(motley: Motley, world: World) -> None:
    before = world.names()
    ran = motley("experiment", "holmse", "--out", world.folder / "out")
    assert ran.code == 2 and not ran.out
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("motley: error: unknown experiment 'holmse'; accepted: ") and "did you mean holmes?" in ran.err
    assert world.names() == before


def test_without_a_folder_it_says_in_one_line_what_to_write(motley: Motley, tiny: Experiment) -> None:
    ran = motley("experiment", "tiny")
    assert ran.code == 2 and not ran.out
    assert ran.err.count("\n") == 1 and "motley experiment tiny --out results/tiny" in ran.err


def test_a_folder_where_a_picture_goes_and_no_folder_at_all_are_told_before_the_work(
    motley: Motley, tiny: Experiment, world: World
) -> None:
    out = world.folder / "out"
    (out / "tiny-bars.png").mkdir(parents=True)
    for folder, told in ((out, "tiny-bars.png is a folder, but a picture is to be written there"), ("", "but got ''")):
        ran = motley("experiment", "tiny", "--out", folder)
        assert ran.code == 2 and ran.err.count("\n") == 1 and told in ran.err and not ran.out
    assert [path.name for path in out.iterdir()] == ["tiny-bars.png"]


@pytest.mark.parametrize("name", ["motley", "pools"])
def test_pictures_are_drawn_of_what_one_short_budget_found(name: str) -> None:
    """The seconds of a search are those it had, and where nothing was found nothing is drawn."""
    rows = read_rows(PAGES / f"{name}.csv")
    rows["budget_s"] = 0.02
    if name == "pools":
        rows["stands_in"] = True
    for stem, figure in EXPERIMENTS[name].plot(rows).items():
        figure.draw_without_rendering()
        if stem == "motley-time":
            assert {tick for ax in figure.axes for tick in ax.get_xticks()} == {0.02}
    assert "0.02 s" in EXPERIMENTS[name].table(rows) or name == "pools"


def test_an_experiment_writes_its_rows_figures_and_table(motley: Motley, tiny: Experiment, world: World) -> None:
    out = world.folder / "out"
    ran = motley("experiment", "tiny", "--out", out, "--processes", 1)
    assert ran.code == 0, ran.err
    frame = read_rows(out / CSV)
    assert list(frame["part"]) == ["given", "given", "searched"]
    assert list(frame["schedule_of"].fillna("-")) == ["1f1b", "estimated", "-"]
    verdict = simulation(read_cluster(world.cluster), read_plan(world.plan).job())(read_plan(world.plan))
    assert isinstance(verdict, Cost) and frame["iteration_s"][0] == verdict.iteration_s
    assert (out / "tiny.md").read_text() == tiny.table(frame)
    assert f"| given | {verdict.iteration_s:.9g} |" in ran.out
    assert (out / "tiny-bars.png").read_bytes().startswith(b"\x89PNG")
    assert all((out / name).is_file() for name in frame["plan"])


def test_an_experiment_that_was_stopped_continues_and_draws_when_all_is_done(
    motley: Motley, tiny: Experiment, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = world.folder / "whole", world.folder / "cut"
    assert motley("experiment", "tiny", "--out", whole, "--processes", 1).code == 0
    lines = (whole / JOURNAL).read_text().splitlines(keepends=True)
    shutil.copytree(whole / "plans", cut / "plans")
    (cut / JOURNAL).write_text("".join(lines[:-1]))  # all but the search
    searched: list[Run] = []

    def noted(run: Run) -> Finished:
        searched.append(run)
        return execute(run)

    monkeypatch.setattr("experiments.sweep.execute", noted)
    ran = motley("experiment", "tiny", "--out", cut, "--processes", 1)
    assert ran.code == 0 and "2 of 3 runs were finished before" in ran.out
    assert [run.planner for run in searched] == ["megatron"]
    earlier, later = read_rows(whole / CSV), read_rows(cut / CSV)
    pandas.testing.assert_frame_equal(earlier.drop(columns="wall_s"), later.drop(columns="wall_s"))
    assert (cut / "tiny.md").read_text() == (whole / "tiny.md").read_text()
    assert (cut / "tiny-bars.png").read_bytes() == (whole / "tiny-bars.png").read_bytes()


def test_a_budget_is_that_of_the_searches_and_makes_other_runs(motley: Motley, tiny: Experiment, world: World) -> None:
    out = world.folder / "out"
    assert motley("experiment", "tiny", "--out", out, "--processes", 1, "--budget", "15s").code == 0
    frame = read_rows(out / CSV)
    assert list(frame["budget_s"].fillna(0)) == [0, 0, 15]
    first = json.loads((out / JOURNAL).read_text().splitlines()[0])
    assert first["sweep"] == "tiny" and first["runs"] == 3
    ran = motley("experiment", "tiny", "--out", out, "--processes", 1)
    assert ran.code == 2 and ran.err.count("\n") == 1 and str(out) in ran.err
