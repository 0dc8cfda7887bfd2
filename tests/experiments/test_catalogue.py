"""`motley list`: every name that it shows is accepted, its figures are the catalogues', and its page is up to date."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.catalogue import SORTS, page, sort_named
from partition.search import planner_named
from sim.spec.gpu import catalogue, gpu_kind
from sim.spec.stack import stack
from sim.spec.transformer import presets, transformer
from tests.experiments.conftest import ROOT, Ran, World
from tests.experiments.test_cli_errors import assert_refused

Motley = Callable[..., Ran]

ACCEPTS: dict[str, Callable[[str], object]] = {
    "gpus": gpu_kind,
    "models": transformer,
    "planners": planner_named,
    "stacks": stack,
}


@pytest.mark.parametrize("what", SORTS)
def test_every_name_is_accepted_where_such_names_are_and_has_a_row(what: str) -> None:
    head, *lines = sort_named(what).cells()
    rows = sort_named(what).rows()
    assert [line[0] for line in lines] == [row["name"] for row in rows]
    assert len({row["name"] for row in rows}) == len(rows) > 5
    for row in rows:
        ACCEPTS[what](row["name"])
    assert all(len(line) == len(head) for line in lines)


def test_all_kinds_and_models_are_there() -> None:
    assert [row["name"] for row in SORTS["gpus"].rows()] == list(catalogue())
    assert {row["name"] for row in SORTS["models"].rows()} == set(presets())


def test_the_figures_are_in_the_units_of_their_heads(motley: Motley) -> None:
    kinds = {line[0]: line[1:] for line in SORTS["gpus"].cells()}
    assert kinds["H100-80GB-SXM"] == ("79.6", "66.9", "989.4", "1,979", "3,350", "450", "700", "2.99")
    assert kinds["A800-80GB-PCIe"] == ("80.0", "19.5", "312", "-", "1,935", "-", "300", "-")
    models = {line[0]: line[1:] for line in SORTS["models"].cells()}
    assert models["qwen3-30b-a3b"] == ("30.5", "48", "2,048", "768", "32", "4", "151,936", "40,960", "8/128")
    ran = motley("list", "gpus")
    assert ran.code == 0 and all(kind in ran.out for kind in catalogue())


@pytest.mark.parametrize("what", ["gpus", "models"])
def test_eighty_columns_hold_every_name_and_figure_whole(monkeypatch: pytest.MonkeyPatch, motley: Motley, what: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, *lines = sort_named(what).cells()
    told = [line.split() for line in motley("list", what).out.splitlines()]
    assert all(list(line) in told for line in lines)


def test_the_file_has_all_figures(motley: Motley, world: World) -> None:
    file = world.folder / "gpus.json"
    ran = motley("list", "gpus", "--json", file)
    assert ran.code == 0 and f"wrote {file}" in ran.out.replace("\n", "")
    found = {row["name"]: row for row in json.loads(file.read_text())}
    kind = gpu_kind("RTX4090")
    assert found["RTX4090"]["peak_flop_per_s"] == dict(kind.peak_flop_per_s)
    assert found["RTX4090"]["aliases"] == list(kind.aliases) and found["RTX4090"]["source"] == kind.source
    models = {row["name"]: row for row in json.loads(motley("list", "models", "--json", "-").out)}
    assert (models["mixtral-8x7b"]["parameters"], models["mixtral-8x7b"]["active_parameters"]) == (46_702_792_704, 12_879_925_248)


def test_a_wrong_name_is_told_in_one_line(motley: Motley) -> None:
    assert_refused(motley("list", "gpu"), 2, "unknown list 'gpu'; accepted: gpus, models, planners, stacks; did you mean gpus?")


def test_the_page_is_what_the_catalogues_say() -> None:
    """Where this fails, `python -m experiments.catalogue > docs/catalogue.md` makes it again."""
    assert Path(ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("columns", [200, 100, 80, 72, 60, 50])
@pytest.mark.parametrize("what", SORTS)
def test_nothing_is_cut_off_on_a_narrow_terminal(
    what: str, columns: int, motley: Motley, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = motley("list", what)
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= columns
    # Of each cell all letters are there, wherever it is folded.
    cells = sort_named(what).cells()
    wanted = Counter(letter for row in cells for cell in row for letter in cell if not letter.isspace())
    assert not wanted - Counter(ran.out)
    # As long as there is room no figure is folded.
    words = [word for row in cells[1:] for cell in row for word in cell.split() if len(word) <= 7]
    assert columns < 80 or all(word in ran.out.split() for word in words)
