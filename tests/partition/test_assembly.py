"""Drafts from groups of devices: what is found for some nodes holds for others that are like them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from partition.assembly import Assembly
from partition.drafts import Settings
from partition.pricing import Pricing
from sim.spec.cluster import Nic
from tests.partition.small_worlds import SMALL, cluster, job, node

CARDS = Nic("infiniband", 12.5e9, count=2)
WORLD = cluster(*(replace(node(f"n{n}", "RTX4090" if n < 3 else "RTX3080Ti", 4), nic=CARDS) for n in range(5)))
GROUPS = [(f"n{n}/{at}", f"n{n}/{at + 1}") for n in range(5) for at in (0, 2)] + [
    (f"n{n}/{at}",) for n in range(5) for at in range(4)
]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Pipelines of groups that share no device."""
    pipelines: list[list[tuple[str, ...]]] = [[] for _ in range(draw(st.integers(1, 4)))]
    used: set[str] = set()
    for group in draw(st.permutations(GROUPS)):
        if not used & set(group):
            used |= set(group)
            pipelines[draw(st.integers(0, len(pipelines) - 1))].append(group)
    return tuple(tuple(pipe) for pipe in pipelines if pipe)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(layouts(), min_size=1, max_size=4),
    st.sampled_from([*map(Settings, ("1f1b", "eager-1f1b", "gpipe")), Settings(ahead=1), Settings("split-1f1b", ahead=2)]),
    st.sampled_from([1, 2]),
)
def test_a_draft_is_the_same_whether_nodes_are_known_to_be_alike_or_not(
    asked: list[tuple[tuple[tuple[str, ...], ...], ...]], chosen: Settings, micro_batch: int
) -> None:
    work = job(SMALL, batch=32)
    known, single = Pricing(WORLD, work), Pricing(WORLD, work)
    single._sorts = replace(single._sorts, nodes=())  # every node is of its own sort
    one, other = Assembly(WORLD, work, known), Assembly(WORLD, work, single)
    for pipelines in asked:  # what was found for those before is used
        draft = one.draft(pipelines, micro_batch, chosen)
        assert draft == other.draft(pipelines, micro_batch, chosen)
        for pipeline in draft or ():
            nodes = [part.devices[0].split("/")[0] for part in pipeline.stages]
            for s, count in enumerate(pipeline.in_flight):
                crossings = sum(a != b for a, b in pairwise(nodes[s:]))
                assert count == len(nodes) - s + chosen.ahead * crossings
