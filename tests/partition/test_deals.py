"""Deals against what they promise: GPUs stand in layouts once, neighbours are complete, descents end where none is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.deals import DEALINGS, Deal, Deals, Row, Score, shared_out
from partition.drafts import Settings, fits_heads
from partition.graph import DeviceGraph
from partition.pricing import Devices
from sim.cost.network import Network
from sim.spec.cluster import Cluster
from tests.partition.small_worlds import cluster, job, node

KINDS = ("RTX4090", "RTX3090", "RTX3080Ti")


def worlds_of(*sizes: int) -> st.SearchStrategy[Cluster]:
    """Clusters of a few nodes of these numbers of GPUs."""
    return st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(sizes)), min_size=1, max_size=5).map(
        lambda drawn: cluster(*(node(f"n{i}", kind, gpus) for i, (kind, gpus) in enumerate(drawn)))
    )


worlds = worlds_of(1, 2, 4, 6, 7, 8, 9)


def deals_of(world: Cluster) -> Deals:
    memory = {device.name: float(device.gpu.memory_bytes) for device in world.devices}
    return Deals(DeviceGraph(Network(world), world.nodes), job(batch=64), world.nodes, memory, 0)


def allowed(nodes: Sequence[Devices]) -> list[int]:
    """The degrees of a row: what divides its GPUs of a node, and powers of two, as far as the model's heads allow."""
    most = min(map(len, nodes))
    return [d for d in range(1, most + 1) if (most % d == 0 or d in (1, 2, 4, 8)) and fits_heads(job(), d)]


def a_deal(deals: Deals, pipelines: int, seed: int, changes: int) -> Deal:
    """A start after some random changes."""
    rng = np.random.default_rng(seed)
    starts = list(deals.starts(pipelines, Settings("eager-1f1b")))
    deal = starts[int(rng.integers(len(starts)))]
    for _ in range(changes):
        neighbours = [*deals.near(deal), *deals.cut(deal)]
        deal = neighbours[int(rng.integers(len(neighbours)))]
    return deal


def devices_of(deal: Deal, used: bool = False) -> list[str]:
    return [name for row in deal.rows if row.degree or not used for nodes in row.nodes for name in nodes]


@settings(deadline=None, max_examples=50)
@given(worlds_of(1, 2, 4, 6, 8), st.integers(1, 3))
def test_deals_of_few_nodes_have_all_of_a_kind_or_a_half_or_a_quarter(world: Cluster, pipelines: int) -> None:
    found: dict[object, set[int]] = {}
    for deal in deals_of(world).few(pipelines, Settings()):
        assert sorted(devices_of(deal)) == sorted(device.name for device in world.devices) and deal.pipelines == pipelines
        used = {name.split("/")[0] for name in devices_of(deal, used=True)}
        (kind,) = {(node.gpu.name, node.gpus) for node in world.nodes if node.name in used}
        found.setdefault(kind, set()).add(len(used))
    for kind, counts in found.items():
        most = sum((node.gpu.name, node.gpus) == kind for node in world.nodes)
        assert counts == {most, max(1, most // 2), max(1, most // 4)}
    assert len(found) == len({(node.gpu.name, node.gpus) for node in world.nodes})


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((8, 8, 9), [("n0 n1 n2", 8), ("n2", 1)]),
        ((8, 9, 9), [("n0", 8), ("n1 n2", 9)]),
        ((10, 4, 10, 12), [("n0 n2 n3", 10), ("n1", 4), ("n3", 2)]),
        ((8, 4), [("n0", 8), ("n1", 4)]),  # four more than four are not a few
        ((8, 8, 6, 6, 6), [("n0 n1", 8), ("n2 n3 n4", 6)]),  # nor two more than six
        ((7, 7, 8), [("n0 n1", 7), ("n2", 8)]),  # eight are whole
        ((8, 9), [("n0", 8), ("n1", 9)]),  # one is not most
        ((5, 4, 4), [("n0 n1 n2", 4), ("n0", 1)]),
        ((8, 8, 7), [("n0 n1", 8), ("n2", 7)]),
    ],
)
def test_what_a_node_has_more_than_its_like_is_a_row_of_its_own(sizes: tuple[int, ...], rows: list[tuple[str, int]]) -> None:
    deals = deals_of(cluster(*(node(f"n{i}", "RTX4090", gpus) for i, gpus in enumerate(sizes))))
    found = {(" ".join(sorted(own[0].split("/")[0] for own in held)), len(held[0])) for held in deals._rows}
    assert found == set(rows) and len(deals._rows) == len(rows)


def test_of_kinds_with_one_node_each_the_others_tell_how_many_gpus_are_usual() -> None:
    nodes = (node("a", "RTX4090", 8), node("b", "RTX3090", 9), node("c", "RTX3080Ti", 8))
    assert sorted(len(held[0]) for held in deals_of(cluster(*nodes))._rows) == [1, 8, 8, 8]


def test_nodes_of_other_kinds_cut_nothing_off_a_whole_one() -> None:
    for one, other in ((8, 6), (4, 3), (8, 7)):
        found = deals_of(cluster(node("a", "RTX4090", one), node("b", "RTX3090", other)))._rows
        assert sorted(len(held[0]) for held in found) == sorted((one, other))


def test_nodes_of_unequal_sizes_are_halved_each_by_itself() -> None:
    row = Row((("a/0", "a/1", "a/2", "a/3"), ("b/0",), ("c/0", "c/1")), 1)
    (one, other), _ = list(row.parts(5))[-2:]
    assert one == (("a/0", "a/1"), ("c/0",)) and other == (("a/2", "a/3"), ("b/0",), ("c/1",))
    assert not [part for parts in row.parts(2) for part in parts if not all(part)]


def test_deals_begin_without_the_gpus_that_a_node_has_more_as_if_it_had_none() -> None:
    # In the order of the larger one.
    plain = deals_of(cluster(node("b", "RTX4090", 8), node("a", "RTX4090", 8), node("c", "RTX4090", 8)))
    more = deals_of(cluster(node("a", "RTX4090", 8), node("b", "RTX4090", 9), node("c", "RTX4090", 8)))
    settings = Settings()
    begun = [plain.layout(deal) for deal in plain.starts(2, settings)]
    with_more = [more.layout(deal) for deal in more.starts(2, settings)]
    assert set(begun) <= set(with_more)
    used = {name for layout in with_more if layout is not None for pipe in layout.pipelines for group in pipe for name in group}
    assert "b/8" in used


def test_a_node_of_seven_has_degrees_that_do_not_divide_it() -> None:
    deals = deals_of(cluster(node("a", "RTX4090", 7)))
    assert deals._degrees(deals._rows[0])[:3] == [1, 2, 4]
    (layout,) = [deals.layout(deal) for deal in deals.starts(1, Settings()) if deal.rows[0].degree == 2]
    assert layout is not None and [len(group) for group in layout.pipelines[0]] == [2, 2, 2]


@settings(deadline=None, max_examples=100)
@given(worlds, st.integers(1, 6), st.integers(0, 2**32), st.integers(0, 6))
def test_a_layout_has_the_devices_of_its_rows_once_in_groups_of_one_node(world: Cluster, count: int, seed: int, n: int) -> None:
    deals = deals_of(world)
    deal = a_deal(deals, count, seed, n)
    assert sorted(devices_of(deal)) == sorted(device.name for device in world.devices)
    layout = deals.layout(deal)
    if layout is None:
        return
    groups = [group for pipe in layout.pipelines for group in pipe]
    dealt = [name for group in groups for name in group]
    assert len(set(dealt)) == len(dealt) and set(dealt) <= set(devices_of(deal, used=True))
    # A degree leaves out what it does not divide of a node's GPUs.
    assert len(dealt) == sum(len(names) // row.degree * row.degree for row in deal.rows if row.degree for names in row.nodes)
    assert all(len({name.split("/")[0] for name in group}) == 1 for group in groups)
    assert len(layout.pipelines) == count
    assert all(1 <= len(pipe) <= job().model.layers for pipe in layout.pipelines)
    lengths = [len(pipe) for pipe in layout.pipelines]
    runs = sum(1 if deal.dealing == "by row" else len(row.nodes) for row in deal.rows if row.degree)
    assert max(lengths) - min(lengths) <= runs  # of each run one pipeline may have one group more than another


@settings(deadline=None, max_examples=60)
@given(worlds, st.integers(0, 2**32), st.integers(0, 4))
def test_every_neighbour_is_another_deal_of_the_same_devices(world: Cluster, seed: int, n: int) -> None:
    deals = deals_of(world)
    deal = a_deal(deals, 2, seed, n)
    for found in (list(deals.near(deal)), list(deals.cut(deal))):
        for changed in found:
            assert changed != deal
            assert sorted(devices_of(changed)) == sorted(devices_of(deal))
            for row in changed.rows:
                assert row.degree in (0, *allowed(row.nodes))


@settings(deadline=None, max_examples=40)
@given(worlds, st.integers(0, 2**32))
def test_all_degrees_of_all_rows_in_all_orders_are_near_one_another(world: Cluster, seed: int) -> None:
    deals = deals_of(world)
    deal = a_deal(deals, 2, seed, 2)
    near = set(deals.near(deal))
    for i, row in enumerate(deal.rows):
        for degree in (0, *allowed(row.nodes)):
            rows = (*deal.rows[:i], Row(row.nodes, degree), *deal.rows[i + 1 :])
            assert degree == row.degree or replace(deal, rows=rows) in near
        for j in range(i + 1, len(deal.rows)):
            if j == i + 1 and row.degree and deal.rows[j].degree:  # two neighbours change places
                rows = (*deal.rows[:i], deal.rows[j], row, *deal.rows[j + 1 :])
                assert replace(deal, rows=rows) in near


def test_what_was_cut_of_a_row_can_move_together_and_be_one_again() -> None:
    deals = deals_of(cluster(node("n0", "RTX4090", 4), node("n1", "RTX3090", 2)))
    one, two, other = Row((("n0/2", "n0/3"),), 1), Row((("n0/0", "n0/1"),), 2), Row((("n1/0", "n1/1"),), 1)
    deal = Deal((one, two, other), 2, "by node", 1, Settings())
    near = [changed.rows for changed in deals.near(deal)]
    assert (other, one, two) in near
    whole = (("n0/0", "n0/1", "n0/2", "n0/3"),)
    for degree in (1, 2, 4):
        assert (Row(whole, degree), other) in near
    apart = replace(deal, rows=(one, other, two))
    assert all(len(changed.rows) == 3 for changed in deals.near(apart))
    left_out = replace(deal, rows=(one, Row(two.nodes, 0), other))
    assert all(len(changed.rows) == 3 for changed in deals.near(left_out))


@settings(deadline=None, max_examples=40)
@given(worlds, st.integers(0, 2**32))
def test_a_row_that_is_left_out_can_take_the_place_of_any_other(world: Cluster, seed: int) -> None:
    deals = deals_of(world)
    deal = a_deal(deals, 2, seed, 3)
    near = [[(row.nodes, row.degree) for row in changed.rows if row.degree] for changed in deals.near(deal)]
    used = [(row.nodes, row.degree) for row in deal.rows if row.degree]
    for out in (row for row in deal.rows if not row.degree):
        for at, (_, degree) in enumerate(used):
            taken = max(d for d in allowed(out.nodes) if d <= degree)
            assert [*used[:at], (out.nodes, taken), *used[at + 1 :]] in near


def scored(seed: int) -> Score:
    """A score that knows nothing of training: a sum over rows, of their places and degrees, and over what holds for all."""
    rng = np.random.default_rng(seed)
    costs = rng.random((4, 129, 10))

    def score_s(deal: Deal, worth_s: float = float("inf")) -> float:
        rows = sum(costs[0, place % 10, row.degree] for place, row in enumerate(deal.rows))
        first = costs[1, int(deal.rows[0].nodes[0][0][1]), 0]  # which node comes first
        rest = costs[2, deal.micro_batch, deal.settings.zero_stage] + costs[3, DEALINGS.index(deal.dealing), 0]
        seconds = float(rows + first + rest)
        return seconds if seconds <= worth_s else float("inf")  # so long that nobody wants to know

    return score_s


@settings(deadline=None, max_examples=40)
@given(worlds, st.integers(0, 2**32))
def test_a_descent_ends_where_no_neighbour_is_better(world: Cluster, seed: int) -> None:
    deals, score_s = deals_of(world), scored(seed)
    start = a_deal(deals, 2, seed, 1)
    with mock.patch("partition.deals.MOST_CUT", 10_000):
        seconds, deal = deals.descended(start, score_s, np.random.default_rng(seed), lambda: False)
    assert seconds == score_s(deal) <= score_s(start)
    assert seconds <= min(score_s(changed) for changed in [*deals.near(deal), *deals.cut(deal)]) * (1 + 1e-8)


@settings(deadline=None, max_examples=20)
@given(worlds, st.integers(0, 2**32))
def test_a_descent_without_hope_cuts_no_row(world: Cluster, seed: int) -> None:
    deals, score_s = deals_of(world), scored(seed)
    start = a_deal(deals, 2, seed, 0)
    seconds, deal = deals.descended(start, score_s, np.random.default_rng(seed), lambda: False, hope_s=0.0)
    assert len(deal.rows) == len(start.rows)
    assert seconds <= min(map(score_s, deals.near(deal))) * (1 + 1e-8)


@settings(deadline=None, max_examples=100)
@given(worlds, st.integers(1, 6), st.integers(0, 2**32))
def test_a_random_deal_has_all_devices_and_one_row_in_two_parts_at_most(world: Cluster, count: int, seed: int) -> None:
    deals, rng = deals_of(world), np.random.default_rng(seed)
    alike = len(next(deals.starts(1, Settings("1f1b"))).rows)
    for _ in range(10):
        deal = deals.drawn(count, rng)
        assert deal.pipelines == count
        assert sorted(devices_of(deal)) == sorted(device.name for device in world.devices)
        spare = {held for held, spare in zip(deals._rows, deals._spare, strict=True) if spare}
        assert all(row.degree in allowed(row.nodes) or (row.degree == 0 and row.nodes in spare) for row in deal.rows)
        assert alike <= len(deal.rows) <= alike + 1
    again = [deals.drawn(count, np.random.default_rng(seed)) for _ in range(2)]
    assert again[0] == again[1]


def test_a_descent_that_is_late_returns_what_it_has() -> None:
    deals = deals_of(cluster(node("n0", "RTX4090", 8), node("n1", "RTX3090", 8)))
    start = a_deal(deals, 2, 0, 0)
    assert deals.descended(start, scored(1), np.random.default_rng(0), lambda: True) == (scored(1)(start), start)


@pytest.mark.parametrize("seed", range(5))
def test_a_kick_changes_a_deal_and_leaves_it_feasible(seed: int) -> None:
    deals = deals_of(cluster(node("n0", "RTX4090", 8), node("n1", "RTX3090", 8)))
    start = a_deal(deals, 2, 0, 0)

    def score_s(deal: Deal, worth_s: float = float("inf")) -> float:
        return 1.0 if deals.layout(deal) is not None else float("inf")

    kicked = deals.kicked(start, score_s, np.random.default_rng(seed))
    assert kicked != start
    assert deals.layout(kicked) is not None
    assert deals.kicked(start, lambda *_: float("inf"), np.random.default_rng(seed)) == start


@pytest.mark.parametrize(
    ("dealing", "dealt"),
    [
        ("in turn", [["n0/0", "n0/2", "n1/0", "n1/2"], ["n0/1", "n0/3", "n1/1", "n1/3"]]),
        ("by node", [["n0/0", "n0/1", "n1/0", "n1/1"], ["n0/2", "n0/3", "n1/2", "n1/3"]]),
        ("by row", [["n0/0", "n0/1", "n0/2", "n0/3"], ["n1/0", "n1/1", "n1/2", "n1/3"]]),
    ],
)
def test_groups_are_dealt_in_turn_by_node_or_by_row(dealing: str, dealt: list[list[str]]) -> None:
    deals = deals_of(cluster(*(node(f"n{n}", "RTX4090", 4) for n in range(2))))
    (row,) = next(deals.starts(2, Settings("eager-1f1b"))).rows
    layout = deals.layout(Deal((Row(row.nodes, 1),), 2, dealing, 1, Settings()))
    assert layout is not None
    assert [[name for (name,) in pipe] for pipe in layout.pipelines] == dealt


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5), st.booleans())
def test_runs_are_shared_out_evenly(lengths: list[int], twins: int, in_turn: bool) -> None:
    runs = [[(f"{run}/{n}",) for n in range(length)] for run, length in enumerate(lengths)]
    pipes = shared_out(runs, twins, in_turn)
    assert sorted(group for pipe in pipes for group in pipe) == sorted(group for run in runs for group in run)
    counts = sorted(len(pipe) for pipe in pipes) if len(pipes) == twins else [0, *(len(pipe) for pipe in pipes)]
    assert max(counts) - min(counts) <= 1
