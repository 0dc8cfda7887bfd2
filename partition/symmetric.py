"""The best symmetric grid by its price, unjudged: what stands in where a budget is too small, and a first look at GPUs."""

from __future__ import annotations

import time

from partition.drafts import Draft, Settings, make_plan
from partition.objective import pools
from partition.planners.megatron import grids
from partition.pricing import Pricing
from partition.room import Room
from partition.search import Search
from sim.spec.cluster import Cluster
from sim.spec.plan import Plan

GRACE_S = 5.0
"""So long grids are priced where there are many; when it is over, the best of those until then is taken."""


def best_symmetric(search: Search) -> Plan | None:
    """The symmetric plan that fits and is priced fastest, on the largest part of the cluster worth a try that has one.

    None where none fits. After GRACE_S it is the best until then, or the first that is found.
    """
    until = time.perf_counter() + GRACE_S
    for part in reversed(pools(search.cluster, search.job, search.objective)):
        found = symmetric_on(search, part, until)
        if found is not None:
            return found
    return None


def symmetric_on(search: Search, part: Cluster, until: float) -> Plan | None:
    """The symmetric plan that fits a part of a cluster and is priced fastest; None where none fits.

    Once time.perf_counter() is past `until`, it is the best until then, or the first that is found.
    """
    job = search.job
    best: tuple[float, Draft, Settings] | None = None
    nodes = [node for node in part.nodes if node.gpu.peak(job.precision) is not None]
    pricing, room = Pricing(part, job), Room(part, job)
    for draft, settings in grids(search, nodes) if nodes else ():
        if best is not None and time.perf_counter() > until:
            break
        if room.fits(draft, settings):
            price_s = pricing.price_s(draft, settings)
            if best is None or price_s < best[0]:
                best = price_s, draft, settings
    return None if best is None else make_plan(part, job, best[1], best[2])
