"""The experiment of HexiScale: its clusters, its conversion of utilisations, its ablation, and what it reads out of rows."""

from __future__ import annotations

import pandas
import pytest

from experiments.hexiscale import cluster_folder, paper_peaks
from experiments.papers import hexiscale
from experiments.papers.hexiscale import RDMA, SIZES, peak_over_paper, resized, table, with_rdma
from partition.drafts import Settings, make_plan, stage
from partition.planners.flashflex import Climb, Phases, in_phases
from partition.search import Search
from sim.engine import simulate
from sim.metrics import report
from sim.simulation import simulation
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.plan import Pipeline
from sim.spec.reading import InputError
from tests.partition.small_worlds import SMALL, job, mixed


def test_utilisation_at_the_papers_peaks_is_that_of_a_report_with_these_peaks() -> None:
    cluster = read_cluster(cluster_folder() / "hexiscale-mixed-b.yaml")
    stages = tuple(stage([name], (first, first + 6), 1) for name, first in (("rtx3080ti/0", 0), ("a100/0", 6)))
    trace = simulate(make_plan(cluster, job(SMALL), (Pipeline(1, 16, stages),), Settings()), cluster)
    plain, asked = report(trace, cluster), report(trace, cluster, peaks=paper_peaks(cluster))
    assert plain.hfu is not None
    assert plain.hfu * peak_over_paper(cluster) == pytest.approx(asked.hfu, rel=1e-12)
    assert plain.hfu != asked.hfu


def test_rdma_takes_the_place_of_ethernet_and_of_nothing_else() -> None:
    cluster = read_cluster(cluster_folder() / "hexiscale-mixed-a.yaml")
    rates = {}
    for network, nic in RDMA.items():
        made = with_rdma(cluster, nic)
        assert [(node.gpu, node.gpus, node.intra) for node in made.nodes] == [
            (node.gpu, node.gpus, node.intra) for node in cluster.nodes
        ]
        assert made.fabric.latency_s < cluster.fabric.latency_s
        (rates[network],) = {(node.nic.kind, node.nic.bandwidth_bytes_per_s) for node in made.nodes if node.nic is not None}
    assert rates == {"RoCE, same rate": ("roce", 10e9 / 8), "InfiniBand, 200 Gbit/s": ("infiniband", 25e9)}


def test_clusters_of_all_sizes_are_of_the_same_mixture() -> None:
    def kinds(cluster: Cluster) -> dict[str, int]:
        found = [device.gpu.name for device in cluster.devices]
        return {kind: found.count(kind) for kind in found}

    published = kinds(read_cluster(cluster_folder() / "hexiscale-mixed-b.yaml"))
    for gpus in SIZES:
        made = kinds(resized(gpus))
        assert sum(made.values()) == gpus
        assert made == {kind: count * gpus / 32 for kind, count in published.items()}


def search(phases: Phases) -> tuple[Search, Climb]:
    work, world = job(SMALL), mixed()
    made = Search(world, work, simulation(world, work), seed=3)
    return made, Climb(made, world.nodes, phases=phases)


@pytest.mark.parametrize("partition", ["graph", "random", "whole"])
def test_a_partition_has_every_gpu_once_and_whole_is_one_part(partition: str) -> None:
    _, climb = search(Phases(partition))
    starts = climb.starts()
    assert starts
    for candidate in starts:
        used = [name for team in candidate.teams for block in team.blocks for name in block.devices]
        assert sorted(used) == sorted(climb.graph.devices)
        assert (len(candidate.teams) == 1) == (partition == "whole")
    assert all(len(candidate.teams) == 1 for candidate in climb.priced) or partition != "whole"


def test_a_drawn_partition_heeds_no_link_and_depends_on_the_seed_alone() -> None:
    parts = []
    for _ in range(2):
        _, climb = search(Phases("random"))
        parts.append(list(climb._partitions()))
    assert parts[0] == parts[1]
    crossing = [len({block.node for block in team}) for grouping in parts[0] for team in grouping if len(team) > 1]
    assert crossing and min(crossing) > 1  # METIS would keep a node together; a draw into two parts tears it


def test_one_degree_means_one_in_every_plan_that_is_priced() -> None:
    made, climb = search(Phases(uneven_degrees=False))
    for start in climb.starts():
        climb.improve(start, 40)
    drafts = [draft for _, draft in climb.priced.values()]
    degrees = [{len(part.devices) for pipeline in draft for part in pipeline.stages} for draft in drafts]
    assert all(len(found) == 1 for found in degrees)
    assert {1, 2} <= {degree for found in degrees for degree in found}
    in_phases(made, Phases(uneven_degrees=False))
    assert made.best is not None
    assert len({len(part.devices) for pipeline in made.best[0].pipelines for part in pipeline.stages}) == 1


def test_an_unknown_partition_is_refused() -> None:
    with pytest.raises(InputError, match="a partition is one of any, graph, random, whole, but got 'metis'"):
        Phases("metis")


def test_the_table_tells_gaps_in_points_and_slowdowns_in_medians_of_the_whole_planner() -> None:
    def row(part: str, place: str, planner: str, hfu: float | None, seconds: float = 1.0, **others: str) -> dict[str, object]:
        found = {"part": part, "place": place, "network": "Ethernet", "planner": planner, "model": "llama-2-13b", **others}
        reported = 0.4 if place == "homogeneous-16" else 0.3
        measures = {"hfu": hfu, "mfu": hfu, "iteration_s": seconds, "wall_s": 2.0, "gpus": 32}
        return {**found, **measures, "reported": reported, "peak_over_paper": 0.5}

    rows = [
        row("utilisation", "homogeneous-16", "megatron", 0.9),
        *(row("utilisation", "mixed-a", "flashflex", hfu, seconds) for hfu, seconds in ((0.6, 9), (0.7, 10), (0.8, 30))),
        row("network", "homogeneous-16", "megatron", 0.96, network="InfiniBand, 200 Gbit/s"),
        row("ablation", "mixed-a", "flashflex-whole", 0.5, 15),
        row("ablation", "mixed-a", "flashflex-random", None, float("nan")),
        row("scheduling", "mixed-b", "flashflex", 0.5),
    ]
    lines = table(pandas.DataFrame(rows)).splitlines()
    assert "| mixed-a, llama-2-13b | megatron, flashflex | 10.00 | 10.0 | nan | 13.0 | 20.0 |" in lines
    assert any(line.startswith("| no partition | 1.50 |") for line in lines)
    assert any(line.startswith("| random partition | no plan |") for line in lines)
    assert any(line.startswith("| all phases | 1.00 (0.90 to 3.00) |") for line in lines)


def test_the_runs_register_the_variants_and_leave_the_default_planner_alone() -> None:
    planners = {run.planner for run in hexiscale.runs()}
    assert set(hexiscale.VARIANTS) < planners and {"flashflex", "motley", "megatron", "metis"} < planners
