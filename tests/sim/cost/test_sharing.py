"""Max-min fairness: by hand on small networks, and by its certificate on random ones."""

import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from sim.cost.network import NOTHING, Transfer
from sim.cost.sharing import Route, max_min_rates, routes


def flow(**num_bytes: float) -> Transfer:
    """A transfer with its bytes on links named a, b, c, ... (links 0, 1, 2, ...)."""
    loads = tuple(sorted((ord(name) - ord("a"), float(value)) for name, value in num_bytes.items()))
    return Transfer(loads, 0.0, round(sum(value for _, value in loads)))


def whole(transfers: list[Transfer], capacities: list[float]) -> list[Route]:
    """The routes with all their links, none left out."""
    made = []
    for transfer in transfers:
        slowest = max(num_bytes / capacities[link] for link, num_bytes in transfer.loads)
        size = max(amount for link, amount in transfer.loads if amount / capacities[link] >= slowest * (1 - 1e-9))
        alone = min(capacities[link] / (num_bytes / size) for link, num_bytes in transfer.loads)
        shares = tuple((link, num_bytes / size) for link, num_bytes in transfer.loads)
        made.append(Route(shares, size, alone, transfer.latency_s))
    return made


def rates(transfers: list[Transfer], capacities: list[float]) -> list[float]:
    """The rates, found with all links and checked to be the same without those that `routes` leaves out."""
    found = max_min_rates(whole(transfers, capacities), capacities)
    assert max_min_rates(routes(transfers, capacities), capacities) == pytest.approx(found)
    return found


# --- By hand ---------------------------------------------------------------------------------------------------------


def test_one_flow_has_its_slowest_link_to_itself() -> None:
    assert rates([flow(a=5)], [10.0]) == [10]
    assert rates([flow(a=5, b=5)], [10.0, 4.0]) == [4]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_flows_on_one_link_have_equal_parts_of_it(count: int) -> None:
    assert rates([flow(a=1)] * count, [21.0]) == pytest.approx([21 / count] * count)


def test_the_bytes_of_a_flow_do_not_change_its_part() -> None:
    assert rates([flow(a=1), flow(a=1000)], [10.0]) == [5, 5]


def test_what_a_flow_cannot_use_goes_to_the_other() -> None:
    # The first is held to 2 by link b; the second takes the rest of a.
    assert rates([flow(a=1, b=1), flow(a=1)], [10.0, 2.0]) == [2, 8]


def test_three_flows_of_which_two_meet_on_each_link() -> None:
    # Link a: 1 and 2; b: 2 and 3; c: 3 and 1. Of 12, 6 and 24: flows 2 and 3 have 3 each, flow 1 the other 9 of a.
    assert rates([flow(a=1, c=1), flow(a=1, b=1), flow(b=1, c=1)], [12.0, 6.0, 24.0]) == [9, 3, 3]


def test_the_long_flow_of_a_line_of_three_links_meets_a_short_one_on_each() -> None:
    # The textbook's line: one flow over all three links, and one on each.
    long, short = flow(a=1, b=1, c=1), [flow(a=1), flow(b=1), flow(c=1)]
    assert rates([long, *short], [1.0, 1.0, 1.0]) == pytest.approx([0.5] * 4)
    assert rates([long, *short], [1.0, 2.0, 5.0]) == pytest.approx([0.5, 0.5, 1.5, 4.5])
    assert rates([long, *short, flow(b=1)], [1.0, 1.0, 1.0]) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 2 / 3, 1 / 3])


def test_a_coupled_flow_goes_at_the_pace_of_its_fullest_link() -> None:
    # Twice as many bytes on a as on b: with both links of 10, a is full at 10 and b half full.
    assert rates([flow(a=2, b=1)], [10.0, 10.0]) == [10]
    # With b of 2, that is the slowest link, full at 2.
    assert rates([flow(a=2, b=1)], [10.0, 2.0]) == [2]


def test_coupled_flows_have_equal_rates_on_their_slowest_links() -> None:
    # On b the first has half a byte for each on a: x/2 + x = 9 at the level of x = 6; a, of 10, is not full.
    assert rates([flow(a=2, b=1), flow(b=1)], [10.0, 9.0]) == pytest.approx([6, 6])
    # With 4 on a, the first is held to 4 there, and the second has the other 7 of b.
    assert rates([flow(a=2, b=1), flow(b=1)], [4.0, 9.0]) == pytest.approx([4, 7])


def test_two_flows_that_meet_on_a_card_have_half_of_it_each_whatever_they_move_on_faster_links() -> None:
    # A message over one of eight cards (a), gathered over NVLink (b), where it moves seven times the bytes; and a reduction.
    assert rates([flow(a=1, b=7), flow(a=1)], [12.0, 234.0]) == [6, 6]


@pytest.mark.parametrize("k", [1.0, 0.75, 1 / 3, 1.1, 7.0])
def test_rounding_does_not_choose_between_links_that_are_equally_slow(k: float) -> None:
    # Both links of the first take 2.1 s / k alone; the second shares one of them, and gets the same part of it for every k.
    found = rates([flow(a=2.1, b=6.3), flow(b=1)], [1.0 * k, 3.0 * k])
    assert [rate / k for rate in found] == pytest.approx([1.5, 1.5])


def test_flows_that_do_not_meet_do_not_matter_to_one_another() -> None:
    assert rates([flow(a=1), flow(b=3), flow(b=3)], [5.0, 8.0]) == [5, 4, 4]


def test_a_flow_without_links_is_not_held_by_any() -> None:
    assert max_min_rates(routes([NOTHING, flow(a=1)], [3.0]), [3.0]) == [math.inf, 3]


def test_flows_far_apart_in_size_all_move() -> None:
    tiny = flow(a=1e9, b=1)
    found = rates([tiny, *[flow(b=1)] * 50], [1e3, 1e9])
    assert found[0] == pytest.approx(1e3)
    assert found[1:] == pytest.approx([1e9 / 50] * 50)


# --- Links that are left out -----------------------------------------------------------------------------------------


def kept(transfers: list[Transfer], capacities: list[float]) -> list[str]:
    """The links that `routes` keeps for each transfer, as letters."""
    return ["".join(chr(ord("a") + link) for link, _ in route.shares) for route in routes(transfers, capacities)]


def test_a_link_that_is_never_the_fullest_is_left_out() -> None:
    assert kept([flow(a=1, b=1), flow(a=1, b=1)], [10.0, 20.0]) == ["a", "a"]
    assert kept([flow(a=1, b=1), flow(a=1, b=1)], [10.0, 10.0]) == ["a", "a"]
    assert kept([flow(a=1, b=3), flow(a=1, b=1)], [10.0, 20.0]) == ["ab", "ab"]
    assert kept([flow(a=1, b=1)], [10.0, 5.0]) == ["b"]
    assert kept([flow(a=1, b=1), flow(b=1)], [10.0, 5.0]) == ["b", "b"]
    assert kept([flow(a=1, b=1), flow(b=1)], [4.0, 5.0]) == ["ab", "b"]


def test_a_route_keeps_size_latency_and_the_rate_it_has_alone() -> None:
    transfer = Transfer(((0, 8.0), (1, 2.0)), 0.25, 10)
    assert routes([transfer], [10.0, 1.0]) == [Route(((1, 1.0),), 2.0, 1.0, 0.25)]
    assert routes([NOTHING], []) == [Route((), 0.0, math.inf, 0.0)]


# --- Laws ------------------------------------------------------------------------------------------------------------


@st.composite
def networks(draw: DrawFn) -> tuple[list[Transfer], list[float]]:
    """Up to eight transfers, plain and coupled, over up to six links; capacities and bytes over six orders of magnitude."""
    round_or_not = st.sampled_from((1.0, 2.0, 3.0, 12.0)) | st.floats(1e-3, 1e3)
    capacities = draw(st.lists(round_or_not, min_size=1, max_size=6))
    some_links = st.lists(st.integers(0, len(capacities) - 1), min_size=1, max_size=4, unique=True)
    transfers = []
    for links in draw(st.lists(some_links, min_size=1, max_size=8)):
        plain = draw(st.booleans())
        num_bytes = [1.0] * len(links) if plain else draw(st.lists(round_or_not, min_size=len(links), max_size=len(links)))
        transfers.append(Transfer(tuple(sorted(zip(links, num_bytes, strict=True))), 0.0, round(sum(num_bytes))))
    return transfers, capacities


def used(found: list[Route], at: list[float], capacities: list[float]) -> list[float]:
    """The part of every link that is used."""
    total = [0.0] * len(capacities)
    for route, rate in zip(found, at, strict=True):
        for link, share in route.shares:
            total[link] += rate * share
    return [amount / capacity for amount, capacity in zip(total, capacities, strict=True)]


@given(networks())
def test_no_link_carries_more_than_it_can_and_every_flow_has_a_bottleneck(world: tuple[list[Transfer], list[float]]) -> None:
    # The certificate of max-min fairness: each flow crosses a full link on which no other flow is faster.
    transfers, capacities = world
    found = whole(transfers, capacities)
    at = max_min_rates(found, capacities)
    full = used(found, at, capacities)
    assert max(full) <= 1 + 1e-9
    for route, rate in zip(found, at, strict=True):
        assert 0 < rate <= route.alone_bytes_per_s * (1 + 1e-9)
        bottlenecks = [
            link
            for link, _ in route.shares
            if full[link] >= 1 - 1e-9
            and all(other <= rate * (1 + 1e-9) for r, other in zip(found, at, strict=True) if link in dict(r.shares))
        ]
        assert bottlenecks


@given(networks(), st.randoms(use_true_random=False))
def test_the_order_of_the_flows_does_not_matter(world: tuple[list[Transfer], list[float]], random: Random) -> None:
    transfers, capacities = world
    order = list(range(len(transfers)))
    random.shuffle(order)
    straight = max_min_rates(whole(transfers, capacities), capacities)
    shuffled = max_min_rates(whole([transfers[i] for i in order], capacities), capacities)
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-9)


@given(networks())
def test_leaving_links_out_changes_no_rate(world: tuple[list[Transfer], list[float]]) -> None:
    transfers, capacities = world
    all_links, pruned = whole(transfers, capacities), routes(transfers, capacities)
    assert max_min_rates(pruned, capacities) == pytest.approx(max_min_rates(all_links, capacities), rel=1e-9)
    assert [(r.size_bytes, r.latency_s) for r in pruned] == [(r.size_bytes, r.latency_s) for r in all_links]
    assert [r.alone_bytes_per_s for r in pruned] == pytest.approx([r.alone_bytes_per_s for r in all_links])


@given(networks(), st.data())
def test_leaving_links_out_changes_no_rate_of_those_that_are_under_way(
    world: tuple[list[Transfer], list[float]], data: st.DataObject
) -> None:
    # Any of the transfers may be under way, some of them several times: a stage sends a micro-batch before the last arrived.
    transfers, capacities = world
    all_links, pruned = whole(transfers, capacities), routes(transfers, capacities)
    times = data.draw(st.lists(st.integers(0, 3), min_size=len(transfers), max_size=len(transfers)))
    under_way = list(itertools.chain.from_iterable([i] * n for i, n in enumerate(times)))
    expected = max_min_rates([all_links[i] for i in under_way], capacities)
    assert max_min_rates([pruned[i] for i in under_way], capacities) == pytest.approx(expected, rel=1e-9)
