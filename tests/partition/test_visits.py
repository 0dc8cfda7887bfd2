"""The program of what islands can do, against optima worked out by hand, and against ways of sequences through islands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from partition.islands import Island
from partition.visits import Visited, most_by_visits

LAYERS, BATCH = 10, 100


def island(crossing_s: float = 1.0, shared_s: float = 10.0, embedding_s: float = 0.0, head_s: float = 0.0) -> Island:
    return Island((), 0.0, crossing_s, shared_s, embedding_s, head_s)


def own(capacity: float = math.inf, **seconds: float) -> Visited:
    return Visited(island(**seconds), True, min(capacity, 1e9), 0.0)


def shared(capacity: float = math.inf, **seconds: float) -> Visited:
    return Visited(island(**seconds), False, min(capacity, 1e9), 0.0)


def most(*visited: Visited, seconds: float = 150.0, exchange_s: float = math.inf, repeated: float = 1.0) -> float | None:
    return most_by_visits(visited, seconds, BATCH, LAYERS, exchange_s, repeated, 0.0)


# --- By hand ---------------------------------------------------------------------------------------------------------


def test_layers_against_visits() -> None:
    # The sequences that begin in the second island cross once. With d layers there 150 - 10 d seconds are left for them:
    # 7 times 80 or 8 times 70 layers of sequences. The first, which all of them enter, has them leave for nobody.
    assert most(own(), shared()) == pytest.approx(560, rel=1e-4)


def test_a_shorter_exchange_is_one_of_fewer_layers() -> None:
    # Less than 5 layers: 4 of all sequences, which take 100 of the 110 seconds that are left. In 10 groups do 5 others in parts.
    assert most(own(), shared(), exchange_s=50) == pytest.approx(405, rel=1e-4)
    assert most(own(), shared(), exchange_s=50, repeated=2) == pytest.approx(205, rel=1e-4)


def test_what_one_island_shares_another_carries() -> None:
    # The first island's exchange takes so long that it carries none. Nothing is shared, but what groups do in parts.
    parts = most(own(shared_s=1e4), shared())
    assert parts is not None
    assert parts <= 75 * 1.02  # 2 seconds for a layer of a sequence
    # Two that share the same layers with one another do none of them twice.
    carries = most(own(), shared())
    assert carries is not None and carries > 500


def test_an_embedding_in_two_islands_is_exchanged_by_both() -> None:
    # Where it takes too long, one island alone has the head, say. If that is the second one, all sequences end there: 5 layers of
    # all of them are left.
    def ends(embedding_s: float, head_s: float) -> float | None:
        seconds = {"embedding_s": embedding_s, "head_s": head_s}
        return most(own(**seconds), shared(**seconds))

    assert ends(0, 0) == pytest.approx(560, rel=1e-4)
    assert ends(1e4, 1e4) == pytest.approx(500, rel=0.01)
    assert 505 < (ends(10, 1e4) or 0) < 555
    assert 505 < (ends(1e4, 10) or 0) < 555


def test_no_plan_can_be_where_the_work_is_more_than_what_islands_do() -> None:
    assert most(own(capacity=600), shared(capacity=390)) is None
    assert most(own(capacity=450), shared()) == pytest.approx(560, rel=1e-4)
    assert most(own(capacity=430), shared()) is None
    # Two islands that all sequences pass: each is entered or left by all of them.
    assert most(own(), own(), seconds=99) is None
    assert most(own(), own(), seconds=100.1) == pytest.approx(0, abs=1e-6)


# --- Ways of sequences -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """Sequences that take one way: the islands of the embedding, of each layer, and of the head."""

    sequences: int
    islands: tuple[int, ...]


@st.composite
def routes(draw: DrawFn) -> tuple[list[Island], list[Route]]:
    count, layers = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    seconds = st.sampled_from((0.0, 0.1, 1.0, 7.0))
    islands = [
        Island((), 0.0, draw(st.sampled_from((0.5, 1.0, 3.0))), draw(seconds), draw(seconds), draw(seconds)) for _ in range(count)
    ]
    where = st.integers(0, count - 1)
    ways = draw(st.lists(st.lists(where, min_size=layers, max_size=layers), min_size=1, max_size=4))
    if draw(st.booleans()):  # nearly alike, so that most islands have own layers
        ways = [ways[0], *([*ways[0][:-1], other[-1]] for other in ways[1:])]
    return islands, [Route(draw(st.integers(1, 20)), (way[0], *way, way[-1])) for way in ways]


def carried(number: int, one: Island, ways: Sequence[Route]) -> tuple[float, float, float, float, bool]:
    """Of an island: seconds of its links, those of exchanges, layers of sequences and heads done, whether it has own layers."""
    layers = range(1, len(ways[0].islands) - 1)
    holders = [{way.islands[at] for way in ways} for at in range(len(ways[0].islands))]
    crossings = sum(
        way.sequences * ((a == number) != (b == number))
        for way in ways
        for a, b in zip(way.islands, way.islands[1:], strict=False)
    )
    exchanged = [number in there and len(there) > 1 for there in holders]
    exchange_s = one.shared_s * sum(exchanged[at] for at in layers)
    exchange_s += one.embedding_s * exchanged[0] + one.head_s * exchanged[-1]
    done = sum(way.sequences for way in ways for at in layers if way.islands[at] == number)
    heads = sum(way.sequences for way in ways if way.islands[-1] == number)
    return crossings * one.crossing_s + exchange_s, exchange_s, done, heads, any(holders[at] == {number} for at in layers)


@settings(max_examples=150, deadline=None)
@given(routes(), st.sampled_from((0.0, 0.3)), st.booleans())
def test_every_way_through_islands_is_a_solution(world: tuple[list[Island], list[Route]], head: float, hidden: bool) -> None:
    islands, ways = world
    batch, layers = sum(way.sequences for way in ways), len(ways[0].islands) - 2
    facts = [carried(number, one, ways) for number, one in enumerate(islands)]
    # No more seconds, exchanges and computing than these ways need.
    seconds, exchange_s = max(fact[0] for fact in facts), max(fact[1] for fact in facts)
    assume(seconds > 0)
    visited, others = [], 0.0
    for number, (one, (_, _, done, heads, has_own)) in enumerate(zip(islands, facts, strict=True)):
        visited.append(Visited(one, None if hidden and number == 0 else has_own, done + head * heads, head))
        if visited[-1].own is False:
            others += done + head * heads
    found = most_by_visits(visited, seconds, batch, layers, exchange_s * 1.001 + 1e-3, 1.0, head)
    assert found is not None
    assert found >= others * (1 - 1e-3) - 1e-6
