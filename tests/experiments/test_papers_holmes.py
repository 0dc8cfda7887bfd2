"""The experiment after Holmes: its networks, how it counts FLOP, and its planners without a part of Holmes."""

from __future__ import annotations

import pytest

import partition
from experiments.papers.holmes import CARD_BYTES_PER_S, ETHERNET_BYTES_PER_S, VARIANTS, cluster, paper_flop
from partition.search import PLANNERS
from sim.cost.network import Network
from sim.spec.counts import head_forward_flop, layer_forward_flop
from sim.spec.job import Job
from sim.spec.plan import Plan
from sim.spec.transformer import transformer
from tests.partition.small_worlds import TINY, job


@pytest.mark.parametrize(
    ("network", "ends", "rate"),
    [
        ("mingled", ("infiniband-0/0", "infiniband-2/0"), 0.92 * CARD_BYTES_PER_S),
        ("mingled", ("roce-1/0", "roce-3/0"), 0.9 * CARD_BYTES_PER_S),
        ("mingled", ("infiniband-0/0", "roce-1/0"), 0.92 * ETHERNET_BYTES_PER_S),
        ("hybrid", ("infiniband-0/0", "infiniband-1/0"), 0.92 * CARD_BYTES_PER_S),
        ("ethernet", ("ethernet-0/0", "ethernet-3/7"), 0.92 * ETHERNET_BYTES_PER_S),
    ],
)
def test_only_nodes_of_one_kind_talk_rdma(network: str, ends: tuple[str, str], rate: float) -> None:
    on = Network(cluster(network, 4))
    moved = on.transfer([(*ends, 1e9)])
    assert on.busiest_s(moved) == pytest.approx(1e9 / rate)


def test_all_gpus_of_a_kind_of_node_share_as_many_cards_as_the_kind_has() -> None:
    on = Network(cluster("hybrid", 4))
    for kind, cards, at in (("infiniband", 4, (0, 1)), ("roce", 2, (2, 3))):
        moves = [(f"{kind}-{at[0]}/{i}", f"{kind}-{at[1]}/{i}", 1e9) for i in range(8)]
        alone = on.busiest_s(on.transfer(moves[:1]))
        assert on.busiest_s(on.transfer(moves)) == pytest.approx(8 / cards * alone)


def test_the_paper_counts_a_layer_four_times_and_the_head_three_times() -> None:
    model = transformer("megatron-7.5b")
    of_layers = 4 * model.layers * layer_forward_flop(model, 6 * 2048, 2048).total
    assert paper_flop(Job(model, 2048, 6)) == pytest.approx(of_layers + 3 * head_forward_flop(model, 6 * 2048))


def found(name: str) -> Plan:
    result = partition.plan(cluster("mingled", 4), job(TINY, batch=32), name, budget_s=600)
    assert result.plan is not None
    return result.plan


def test_each_variant_lacks_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variant in VARIANTS.items():
        monkeypatch.setitem(PLANNERS, name, variant)
    whole, late = found("holmes"), found("holmes-without-overlap")
    assert whole.overlap_gradients
    assert not late.overlap_gradients
    even = found("holmes-even-split")
    counts = [stage.layer_count for stage in even.pipelines[0].stages]
    assert max(counts) - min(counts) <= 1
    asked = found("holmes-file-order")
    order = [name for s in range(len(asked.pipelines[0].stages)) for p in asked.pipelines for name in p.stages[s].devices]
    assert order == [device.name for device in cluster("mingled", 4).devices][: len(order)]
