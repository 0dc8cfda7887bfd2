"""Motley's own planner where the contract of all planners does not look: its descents among deals."""

from __future__ import annotations

import math

from partition.drafts import make_plan, usable_nodes
from partition.planners.motley import _Hunt
from partition.search import Search
from sim.simulation import simulation
from sim.spec.judge import Cost
from tests.partition.small_worlds import SMALL, cluster, job, node


def descended() -> _Hunt:
    """A search that has descended among the deals of a cluster of three kinds, and done nothing else."""
    world = cluster(node("a", "A100-40GB-SXM", 4, "nvlink"), node("b", "RTX4090", 4), node("c", "RTX3080Ti", 4))
    search = Search(world, job(SMALL), simulation(world, job(SMALL)), 0, 20.0)
    hunt = _Hunt(search, usable_nodes(search))
    hunt.begin_deals()
    hunt.deal()
    return hunt


def test_what_descents_end_at_is_judged_and_told_to_the_search() -> None:
    hunt = descended()
    search = hunt.search
    assert len({deal.pipelines for _, deal in hunt.ends}) == len(hunt.ends) > 1
    assert [seconds for seconds, _ in hunt.ends] == sorted(seconds for seconds, _ in hunt.ends)
    assert search.best is not None
    assert search.best[1].iteration_s == hunt.ends[0][0]
    assert search.judged >= len(hunt.ends)
    for seconds, deal in hunt.ends:
        draft, settings = hunt._drafted(deal)
        verdict = search.judge(make_plan(search.cluster, search.job, draft, settings))
        assert isinstance(verdict, Cost)
        assert verdict.iteration_s == seconds


def test_descents_beat_their_starts_and_are_the_same_again() -> None:
    one, again = descended(), descended()
    assert one.ends == again.ends
    starts = []
    for start in one.firsts:
        draft, settings = one._drafted(start)
        verdict = one.search.judge(make_plan(one.search.cluster, one.search.job, draft, settings))
        starts.append(verdict.iteration_s if isinstance(verdict, Cost) else math.inf)
    assert one.ends[0][0] < min(starts)
