"""The arena's benchmark: what is in its table is not searched again, and its means are those of the table."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from partition.search import PLANNERS, Search
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.job import Job
from sim.spec.transformer import transformer
from tests.experiments.conftest import ROOT, World


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("arena")


@pytest.fixture
def places(world: World) -> list[tuple[Cluster, Job]]:
    cluster, job = read_cluster(world.cluster), Job(transformer(world.model), 128, 4)
    return [(cluster, job), (replace(cluster, name="other"), job)]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The clusters and seeds that the planner `counted` searched."""
    runs: list[tuple[str, int]] = []

    def counted(search: Search) -> None:
        runs.append((search.cluster.name, search.seed))
        PLANNERS["random"](search)

    monkeypatch.setitem(PLANNERS, "counted", counted)
    return runs


def test_only_what_the_table_lacks_is_searched(
    bench: ModuleType, places: list[tuple[Cluster, Job]], searched: list[tuple[str, int]], tmp_path: Path
) -> None:
    run: Callable[..., bool] = bench.run
    out = tmp_path / "out"
    assert run(places[:1], ["counted"], 1, 5.0, out) is False and searched == [("tiny", 0)]
    assert run(places, ["counted"], 2, 5.0, out) is False
    assert searched == [("tiny", 0), ("tiny", 1), ("other", 0), ("other", 1)]
    assert run(places, ["counted", "megatron"], 2, 5.0, out) is False and len(searched) == 4
    rows = bench.read_rows(out / "arena.csv")
    assert sorted((row["cluster"], row["planner"], row["seed"]) for row in rows) == [
        (cluster, planner, seed) for cluster in ("other", "tiny") for planner in ("counted", "megatron") for seed in "01"
    ]
    assert run(places[:1], ["counted"], 1, 5.0, out, again=["counted"]) is False and len(searched) == 5
    slower = replace(places[0][0], fabric=replace(places[0][0].fabric, latency_s=1.0))
    run([(slower, places[0][1])], ["counted"], 1, 5.0, out)
    assert len(searched) == 6, "another cluster of the same name is searched"
    rows = bench.read_rows(out / "arena.csv")
    assert sorted((row["cluster"], row["planner"], row["seed"]) for row in rows) == [
        *(("other", planner, seed) for planner in ("counted", "megatron") for seed in "01"),
        ("tiny", "counted", "0"),
    ], "rows of the earlier cluster of that name are gone, those of other clusters stay"


def row(cluster: str, planner: str, seed: int, iteration_s: float | None, judged_as: str = "") -> dict[str, Any]:
    return {
        "cluster": cluster,
        "model": "toy",
        "planner": planner,
        "seed": str(seed),
        "iteration_s": "" if iteration_s is None else str(iteration_s),
        "judged_as": judged_as,
        "stands_in": "",
    }


def test_the_means_are_of_medians_over_the_seeds_and_places(bench: ModuleType) -> None:
    """At `a` motley takes 1, 2, 3 s (median 2), at `b` 1 s; its best rivals take 4 s and 1.5 s: sqrt(2 * 1.5) as fast."""
    rows = [row("a", "motley", seed, seed + 1.0) for seed in range(3)] + [row("b", "motley", 0, 1.0)]
    rows += [row("a", "x", 0, 4.0), row("b", "x", 0, 3.0), row("a", "y", 0, 5.0), row("b", "y", 0, 1.5)]
    rows += [row("a", "z", 0, None), row("b", "p, published", 0, 0.5, "as 1F1B, memory ignored")]
    text = bench.report(rows)
    lines = {line[:24].strip(): line[24:].split() for line in text.splitlines()[7:]}
    assert lines["the best other planner"] == ["2", f"{3**0.5:.3f}", "1.500", "b", "toy", "2", "of", "2", "1.333"]
    assert lines["x"][:3] == ["2", f"{6**0.5:.3f}", "2.000"]
    assert lines["p, published"] == ["1", "0.500", "0.500", "b", "toy", "0", "of", "1", "0.500"]
    assert "z" not in lines and "0.50**" in text
    assert "no rows of motley" in bench.report([row("a", "x", 0, 4.0)])
