"""Laws of Pipette's experiment: its drawn clusters, the naive count of memory, and planners that are alone with their models."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from experiments.papers import pipette as paper
from partition.drafts import Draft, Settings, make_plan, stage, usable_nodes
from partition.planners import pipette
from partition.search import Search
from sim.simulation import simulation
from sim.spec.cluster import Cluster, parse_cluster
from sim.spec.counts import total_parameters
from sim.spec.job import Job
from sim.spec.plan import Pipeline
from sim.spec.transformer import transformer

JOB = Job(transformer("gpt3-2.7b"), 1024, 32, precision="fp16")
NOMINAL = 100e9 / 8


def _search(cluster: Cluster, job: Job = JOB) -> Search:
    return Search(cluster, job, simulation(cluster, job))


def _rates(cluster: Cluster) -> np.ndarray:
    assert cluster.bandwidth_matrix is not None
    rates = np.array(cluster.bandwidth_matrix.bytes_per_s)
    return rates[~np.eye(len(rates), dtype=bool)] / NOMINAL


@pytest.mark.parametrize("links", paper.ATTAINED)
def test_rates_are_drawn_between_the_lowest_and_the_highest_and_half_of_them_lie_below_the_median(links: str) -> None:
    rates = _rates(paper.drawn_cluster(paper.MACHINES["V100"], 40, links, 0))
    quantiles = paper.ATTAINED[links]
    assert rates.min() >= quantiles[0] and rates.max() <= quantiles[-1]
    assert np.mean(rates < quantiles[paper.CHANCES.index(0.5)]) == pytest.approx(0.5, abs=0.04)


def test_a_draw_is_always_the_same_cluster_and_another_draw_is_another() -> None:
    first, again, other = (paper.drawn_cluster(paper.MACHINES["V100"], 4, "uneven", draw) for draw in (0, 0, 1))
    assert first == again
    assert first.bandwidth_matrix != other.bandwidth_matrix
    matrix = np.array(first.bandwidth_matrix.bytes_per_s if first.bandwidth_matrix else [])
    assert not np.allclose(matrix[0, 1], matrix[1, 0])  # each direction has a rate of its own


def test_the_naive_count_is_18_bytes_a_parameter_and_activations_that_grow_with_the_micro_batch() -> None:
    cluster, model = (
        parse_cluster("name: one\nnodes: [{name: n, gpu: A100-80GB-SXM, gpus: 1, intra: nvswitch}]\n", "one"),
        JOB.model,
    )

    def activations(micro_batch: int) -> int:
        draft = (Pipeline(micro_batch, 4 // micro_batch, (stage(["n/0"], (0, model.layers), micro_batch),)),)
        plan = make_plan(cluster, Job(model, 1024, 4, precision="fp16"), draft, Settings(zero_stage=0))
        # fp16 weights, fp32 gradients, an fp32 copy and two moments of AdamW
        return paper.naive_bytes(plan, cluster) - (2 + 4 + 4 + 8) * total_parameters(model)

    assert activations(1) > 0
    assert activations(4) == 4 * activations(1)


def _one_gpu_each(layers_of_first: int, recompute: str) -> tuple[Draft, Settings]:
    stages = (stage(["n/0"], (0, layers_of_first), 1, recompute), stage(["n/1"], (layers_of_first, 32), 1, recompute))
    return (Pipeline(1, 32, stages),), Settings(zero_stage=0)


def test_who_is_alone_tries_its_recommendations_in_their_order_and_stops_at_the_first_that_fits() -> None:
    cluster = parse_cluster("name: two\nnodes: [{name: n, gpu: A100-40GB-SXM, gpus: 2, intra: nvswitch}]\n", "two")
    crowded, slow, fast = _one_gpu_each(30, "none"), _one_gpu_each(17, "full"), _one_gpu_each(16, "none")
    search = _search(cluster)
    paper.alone(lambda _: [crowded, slow, fast], search)
    assert search.judged == 2
    assert search.best is not None and search.best[0] == make_plan(cluster, JOB, *slow)
    hopeless = _search(cluster)
    paper.alone(lambda _: [_one_gpu_each(n, "none") for n in range(31, 25, -1)], hopeless)
    assert hopeless.best is None and hopeless.closest is not None and hopeless.closest[1].reason == "memory"


def test_amp_alone_recommends_what_it_would_if_memory_and_rates_were_no_matter() -> None:
    machine = paper.SMALL_V100
    small, large = (paper.drawn_cluster(each, 2, "uneven", 0) for each in (machine, paper.MACHINES["V100"]))
    first, other = (next(iter(paper.amp_alone(_search(each)))) for each in (small, large))
    assert first == other
    even = paper.drawn_cluster(machine, 2, "logged", 1)
    assert next(iter(paper.amp_alone(_search(even)))) == first


def test_megatron_alone_recommends_grids_of_every_degree_as_megatron_2_5_runs_them() -> None:
    found = list(paper.megatron_alone(_search(paper.drawn_cluster(paper.MACHINES["V100"], 2, "uneven", 0))))
    assert all(settings == Settings("1f1b", zero_stage=0, sequence_parallel=False) for _, settings in found)
    assert {len(pipeline.stages[0].replicas[0].devices) for draft, _ in found for pipeline in draft} == {1, 2, 4, 8}
    assert {part.recompute for draft, _ in found for pipeline in draft for part in pipeline.stages} == {"none", "full"}


def test_whole_nodes_keep_their_workers_together_and_no_placement_is_slower_than_the_ranks() -> None:
    cluster = paper.drawn_cluster(paper.MACHINES["V100"], 4, "uneven", 0)
    search = _search(cluster)
    moved = pipette.ranked(search, usable_nodes(search), steps=50, whole_nodes=True)
    for entry in moved:
        nodes = entry.grid.workers.node[entry.order]
        assert sum(a != b for a, b in pairwise(nodes)) == nodes.max()  # so many borders between four blocks
        assert entry.latency_s <= entry.grid.latency_s(np.arange(len(entry.order)))
    assert any((entry.order != np.arange(len(entry.order))).any() for entry in moved)


def test_speed_ups_are_taken_draw_by_draw() -> None:
    pandas = pytest.importorskip("pandas")
    seconds = {"pipette-nodes-alone": (1.0, 2.0, 4.0), "amp-alone": (2.0, 3.0, 4.0)}
    rows = [
        {"part": "alone", "kind": "V100", "links": "uneven", "draw": draw, "planner": planner, "iteration_s": each}
        for planner, draws in seconds.items()
        for draw, each in enumerate(draws)
    ]
    assert paper._ratios(pandas.DataFrame(rows), "alone") == {("V100", "uneven"): {"amp": (1.5, 1.0, 2.0)}}
