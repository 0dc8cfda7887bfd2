"""Holmes: groups by NIC, a split by the speed of their stages, gradients that never leave a group."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import partition
from partition.drafts import Draft, Settings
from partition.planners.holmes import HolmesPlans, nic_groups, uneven_split
from partition.pricing import Pricing
from partition.search import Search
from sim.simulation import simulation
from sim.spec.cluster import Cluster, Nic, Node
from sim.spec.judge import Verdict
from sim.spec.plan import Plan
from tests.partition.small_worlds import SMALL, TINY, cluster, job, node

INFINIBAND, ROCE = Nic("infiniband", 25e9, ethernet_bytes_per_s=1.25e9), Nic("roce", 12.5e9, ethernet_bytes_per_s=1.25e9)


def machine(name: str, nic: Nic, kind: str = "A100-40GB-SXM", gpus: int = 2) -> Node:
    return replace(node(name, kind, gpus, "nvlink"), nic=nic)


def hybrid() -> Cluster:
    """Two kinds of RDMA, their nodes mingled."""
    return cluster(machine("i0", INFINIBAND), machine("r0", ROCE), machine("i1", INFINIBAND), machine("r1", ROCE))


def test_a_group_is_the_nodes_of_one_site_and_kind_of_nic() -> None:
    ethernet = Nic("ethernet", 1.25e9)
    nodes = [
        machine("r0", ROCE),
        machine("i0", INFINIBAND),
        machine("r1", ROCE, "RTX4090"),
        machine("e0", ethernet),
        replace(machine("i1", INFINIBAND), site="elsewhere"),
        machine("i2", replace(INFINIBAND, bandwidth_bytes_per_s=50e9)),
    ]
    assert [[one.name for one in group] for group in nic_groups(nodes)] == [["r0", "r1"], ["i0", "i2"], ["e0"], ["i1"]]
    by_gpu = nic_groups(nodes, by_gpu=True)
    assert [[one.name for one in group] for group in by_gpu] == [["r0"], ["i0", "i2"], ["r1"], ["e0"], ["i1"]]


@pytest.mark.parametrize(
    ("layers", "speeds", "alpha", "counts"),
    [
        (30, (197.0, 160.0), 1.0, [16, 14]),  # 30 x 197 / 357 = 16.6
        (30, (197.0, 160.0), 1.05, [17, 13]),  # 1.05 x 16.6 = 17.4
        (30, (160.0, 197.0), 1.05, [13, 17]),
        (24, (2.0, 2.0, 1.0, 1.0), 1.0, [8, 8, 4, 4]),
        (25, (2.0, 2.0, 1.0, 1.0), 1.0, [8, 8, 5, 4]),  # what is left, 9, is divided
        (20, (3.0, 2.0, 1.0), 1.0, [10, 6, 4]),  # 10 and 6.7; 4 are left
        (10, (5.0, 5.0, 5.0), 1.1, [3, 4, 3]),  # equal stages: alpha favours none
        (4, (100.0, 1.0), 1.0, [3, 1]),
        (4, (100.0, 1.0), 1.1, None),  # nothing is left
        (4, (1.0, 10.0, 10.0, 1.0), 1.0, [1, 1, 1, 1]),
        (6, (20.0, 3.0, 2.0), 1.0, None),  # 3 / 25 of six layers is none
    ],
)
def test_the_split_is_that_of_the_paper_by_hand(
    layers: int, speeds: tuple[float, ...], alpha: float, counts: list[int] | None
) -> None:
    assert uneven_split(layers, speeds, alpha) == counts


def test_the_speed_of_a_stage_counts_its_gradients() -> None:
    # One GPU on each of two nodes: half of a layer's gradients (4 bytes each) and parameters (2 bytes) cross the card.
    on = cluster(machine("i0", INFINIBAND, gpus=1), machine("i1", INFINIBAND, gpus=1))
    work = job(batch=16)
    search = Search(on, work, simulation(on, work))
    took_s = HolmesPlans(search).layer_s([[("i0/0",), ("i1/0",)]], 2, Settings())
    of_layer = Pricing(on, work).stage(("i0/0",), 2, Settings())
    parameters = 4 * 1024 * 1024 + 3 * 1024 * 2816 + 2 * 1024
    carried_bytes_per_s = 25e9 * on.fabric.efficiency("infiniband")
    expected_s = 4 * (of_layer.layer_forward_s + of_layer.layer_backward_s)  # four micro-batches of each replica
    expected_s += parameters * (4 + 2) / 2 / carried_bytes_per_s
    assert took_s == pytest.approx(expected_s + 2 * 50e-6, rel=0.02)


def judged(on: Cluster, batch: int = 16) -> list[Plan]:
    work, seen = job(SMALL, 2048, batch), []
    judge = simulation(on, work)

    def recording(plan: Plan) -> Verdict:
        seen.append(plan)
        return judge(plan)

    partition.plan(on, work, "holmes", judge=recording, budget_s=600)
    return seen


def test_gradients_stay_in_a_group_and_stages_of_a_group_beside_each_other() -> None:
    on = hybrid()
    across = 0
    for asked in judged(on):
        depth = len(asked.pipelines[0].stages)
        assert (asked.zero_stage, asked.overlap_gradients, asked.schedule) == (1, True, "1f1b")
        assert len({len(s.devices) for p in asked.pipelines for s in p.stages}) == 1
        assert len({tuple(s.layers for s in p.stages) for p in asked.pipelines}) == 1
        kinds: list[str] = []
        for s in range(depth):
            devices = [name for p in asked.pipelines for name in p.stages[s].devices]
            nics = {nic.kind for name in devices if (nic := on.device(name).node.nic) is not None}
            assert len(nics) == 1
            kinds += nics
            for p in asked.pipelines:
                assert len({name.split("/")[0] for name in p.stages[s].devices}) == 1
        assert sum(a != b for a, b in pairwise(kinds)) == len(set(kinds)) - 1
        across += len(set(kinds)) > 1
    assert across > 0


def test_mingled_nics_are_used_better_than_in_the_order_of_the_file() -> None:
    work = job(SMALL, 2048, 16)
    holmes, megatron = (partition.plan(hybrid(), work, name, budget_s=600).cost for name in ("holmes", "megatron"))
    assert holmes is not None and megatron is not None
    assert holmes.iteration_s < megatron.iteration_s


def test_a_group_with_slow_cards_holds_fewer_layers() -> None:
    # The same GPUs, but one group reduces its gradients over 0.1 GB/s.
    slow = Nic("roce", 0.1e9, ethernet_bytes_per_s=10e9)
    on = cluster(*(machine(f"i{i}", INFINIBAND, gpus=1) for i in range(2)), *(machine(f"r{i}", slow, gpus=1) for i in range(2)))
    work = job(TINY)
    priced = HolmesPlans(Search(on, work, simulation(on, work))).priced(on.nodes)
    both = [held for _, _, draft, _ in priced if len(draft) == 2 and len(held := layers_by_group(draft)) == 2]
    assert len(both) > 4
    assert all(held["i"] > held["r"] for held in both)


def layers_by_group(draft: Draft) -> dict[str, int]:
    """Layers of the stages by the first letter of their nodes."""
    found: dict[str, int] = {}
    for part in draft[0].stages:
        letter = part.devices[0][0]
        found[letter] = found.get(letter, 0) + part.layer_count
    return found
