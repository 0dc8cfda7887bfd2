"""The clusters and plans that Motley's own experiment makes: wires of their own, layouts dealt evenly or by speed, more GPUs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations, product

import pandas
import pytest

from experiments.papers.motley import (
    BY_SPEED,
    EVENLY,
    LINKS,
    MORE,
    OWN,
    SHARED,
    TIME,
    best_known_s,
    evened,
    layouts,
    more_hardware,
    own_wires,
)
from experiments.sweep_files import with_bandwidth
from partition.drafts import Settings, make_plan, stage
from partition.planners.megatron import grids
from partition.search import Search
from sim.cost.network import Network
from sim.engine import simulate
from sim.simulation import simulation
from sim.spec.cluster import Cluster, read_cluster
from sim.spec.job import Job
from sim.spec.plan import Pipeline, Plan
from sim.spec.transformer import transformer
from tests.experiments.conftest import World

TWO_NODES = """\
name: two
nodes:
  - {name: slow, gpu: RTX3090, gpus: 4, intra: {kind: pcie4, gpus_per_switch: 2}, nic: {kind: ethernet, bandwidth: 10 Gbit/s}}
  - {name: fast, gpu: RTX4090, gpus: 4, intra: {kind: pcie4, gpus_per_switch: 2}, nic: {kind: ethernet, bandwidth: 40 Gbit/s}}
fabric: {latency: 50 us, oversubscription: 2}
"""


@pytest.fixture
def cluster(world: World) -> Cluster:
    return read_cluster(world.write("two.yaml", TWO_NODES))


# --- Wires of their own ----------------------------------------------------------------------------------------------


def test_with_own_wires_one_transfer_takes_as_long_and_many_at_once_take_no_longer(cluster: Cluster) -> None:
    shared, own = Network(cluster), Network(own_wires(cluster))
    size = 1e9
    for a, b in permutations([device.name for device in cluster.devices], 2):
        alone_s = shared.alone_s(shared.transfer([(a, b, size)]))
        assert own.alone_s(own.transfer([(a, b, size)])) == pytest.approx(alone_s, rel=1e-12)
    # From four GPUs of the slow node to four of the fast one, all over one card of 10 Gbit/s and uplinks of half the cards' rate.
    moves = [(f"slow/{i}", f"fast/{i}", size) for i in range(4)]
    one_s = shared.busiest_s(shared.transfer(moves[:1]))
    assert one_s == pytest.approx(size / (10e9 / 8 / 2 * cluster.fabric.efficiency("ethernet")))
    assert shared.busiest_s(shared.transfer(moves)) == pytest.approx(4 * one_s)
    assert own.busiest_s(own.transfer(moves)) == pytest.approx(one_s)


def test_with_own_wires_a_gpu_still_sends_no_faster_than_its_own_port(cluster: Cluster) -> None:
    own = Network(own_wires(cluster))
    moves = [("fast/0", f"fast/{i}", 1e9) for i in (1, 2, 3)]
    port_bytes_per_s = 24e9 * cluster.fabric.efficiency("pcie")
    assert own.busiest_s(own.transfer(moves)) == pytest.approx(3e9 / port_bytes_per_s)


def plan_of(cluster: Cluster, pairs: list[tuple[str, str]], micro_batches: int) -> Plan:
    """Pipelines of two stages of one GPU each, and of twelve layers."""
    model = replace(transformer("opt-350m"), name="untied", tied_embeddings=False)
    job = Job(model, sequence_length=512, global_batch=micro_batches * len(pairs))
    halves = ((0, 12), (12, 24))
    draft = [Pipeline(1, micro_batches, tuple(stage([a], cut, 1) for a, cut in zip(pair, halves, strict=True))) for pair in pairs]
    return make_plan(cluster, job, tuple(draft), Settings())


def test_a_plan_whose_transfers_never_meet_is_as_fast_on_own_wires_and_one_whose_do_is_faster(cluster: Cluster) -> None:
    cluster = with_bandwidth(cluster, "x0.1")
    own = own_wires(cluster)
    single = plan_of(cluster, [("slow/0", "fast/0")], 2)
    assert simulate(single, own).iteration_s == pytest.approx(simulate(single, cluster).iteration_s, rel=1e-9)
    meeting = plan_of(cluster, [(f"slow/{i}", f"fast/{i}") for i in range(4)], 2)
    assert simulate(meeting, own).iteration_s < 0.8 * simulate(meeting, cluster).iteration_s


# --- Layouts ---------------------------------------------------------------------------------------------------------


def test_layouts_hold_all_layers_and_the_whole_batch_on_all_gpus(cluster: Cluster) -> None:
    job = Job(transformer("opt-350m"), sequence_length=512, global_batch=16)
    found = layouts(cluster, job)
    assert {"8 x 1 x 1, across", "1 x 8 x 1, across", "2 x 4 x 1, across", "2 x 4 x 1, inside", "1 x 2 x 4, across"} <= set(found)
    assert "1 x 8 x 1, inside" not in found  # it is the same
    for name, variants in found.items():
        assert set(variants) == set(product((EVENLY, BY_SPEED), repeat=2))
        for (layers, shares), plan in variants.items():
            assert set(plan.devices) == {device.name for device in cluster.devices}
            for pipeline in plan.pipelines:
                cuts = [stage.layers[0] for stage in pipeline.stages]
                assert cuts[0][0] == 0 and cuts[-1][1] == 24 and all(a[1] == b[0] for a, b in pairwise(cuts))
                if layers == EVENLY:
                    assert len({cut[1] - cut[0] for cut in cuts}) <= 2
            counts = [pipeline.micro_batches for pipeline in plan.pipelines]
            assert sum(counts) == 16 and (shares == BY_SPEED or len(set(counts)) == 1)
            nodes = [{device.partition("/")[0] for stage in p.stages for device in stage.devices} for p in plan.pipelines]
            if name.startswith("2 x 4 x 1"):
                assert all(len(of) == (1 if name.endswith("inside") else 2) for of in nodes)


def test_by_speed_the_faster_node_has_more_layers_or_more_micro_batches(cluster: Cluster) -> None:
    job = Job(transformer("opt-350m"), sequence_length=512, global_batch=16)
    found = layouts(cluster, job)
    held: Counter[str] = Counter()
    for part in found["1 x 8 x 1, across"][BY_SPEED, BY_SPEED].pipelines[0].stages:
        held[part.devices[0].partition("/")[0]] += part.layer_count
    assert held["fast"] > held["slow"]
    shares = {
        p.stages[0].devices[0].partition("/")[0]: p.micro_batches for p in found["2 x 4 x 1, inside"][EVENLY, BY_SPEED].pipelines
    }
    assert shares["fast"] > shares["slow"]


def test_an_even_layout_is_a_grid_of_megatron(cluster: Cluster) -> None:
    job = Job(transformer("opt-350m"), sequence_length=512, global_batch=16)

    search = Search(cluster, job, simulation(cluster, job))
    known = {draft for draft, _ in grids(search, cluster.nodes)}
    for name, variants in layouts(cluster, job).items():
        if name.endswith("across"):
            assert variants[EVENLY, EVENLY].pipelines in known


def test_a_plan_made_even_keeps_its_groups_and_is_itself_where_nothing_is_made_even(cluster: Cluster) -> None:
    model = replace(transformer("opt-350m"), name="untied", tied_embeddings=False)
    job = Job(model, sequence_length=512, global_batch=16)
    stages = [(stage(["slow/0"], (0, 5), 2), stage(["fast/0", "fast/1"], (5, 24), 2)), (stage(["fast/2"], (0, 24), 2),)]
    draft = (Pipeline(2, 3, stages[0]), Pipeline(2, 5, stages[1]))
    plan = make_plan(cluster, job, draft, Settings(schedule="eager-1f1b"))
    made = evened(cluster, plan)
    assert set(made) == set(product((EVENLY, BY_SPEED), repeat=2)) and made[BY_SPEED, BY_SPEED] == plan
    for (layers, shares), other in made.items():
        assert other.schedule == "eager-1f1b" and other.devices == plan.devices
        assert [p.micro_batches for p in other.pipelines] == ([4, 4] if shares == EVENLY else [3, 5])
        assert [[s.layer_count for s in p.stages] for p in other.pipelines] == (
            [[12, 12], [24]] if layers == EVENLY else [[5, 19], [24]]
        )


# --- More hardware ---------------------------------------------------------------------------------------------------


def test_more_hardware_is_a_gpu_or_a_node_of_each_kind(cluster: Cluster) -> None:
    added = more_hardware(cluster)
    assert [(kind, gpus) for kind, gpus, _ in added] == [
        ("nothing", 0),
        ("RTX3090", 1),
        ("RTX3090", 4),
        ("RTX4090", 1),
        ("RTX4090", 4),
    ]
    before = Counter(device.gpu.name for device in cluster.devices)
    for kind, gpus, larger in added:
        after = Counter(device.gpu.name for device in larger.devices)
        assert after - before == Counter({kind: gpus} if gpus else {})


# --- Reading the rows ------------------------------------------------------------------------------------------------


def test_the_best_known_iteration_is_of_the_cluster_as_it_is() -> None:
    rows = [
        ("a", TIME, None, None, 5.0),
        ("a", LINKS, SHARED, None, 4.0),
        ("a", LINKS, OWN, None, 1.0),
        ("a", MORE, None, 0, 4.5),
        ("a", MORE, None, 8, 2.0),
        ("b", TIME, None, None, 3.0),
    ]
    frame = pandas.DataFrame(rows, columns=["cluster", "part", "links", "added_gpus", "iteration_s"])
    assert best_known_s(frame, "a") == 4.0
    assert best_known_s(frame, "b") == 3.0
