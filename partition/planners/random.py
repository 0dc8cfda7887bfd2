"""The planner that draws plans: the simplest one, and the yardstick for every other.

A planner is a function of a `Search`, registered under a name. It makes plans in an order that only `search.rng` decides, has
them judged by `search.consider`, which keeps the best, and returns when it has done its share of work. When the budget is
spent before that, `search.consider` or `search.check_budget` raises BudgetSpent, which the planner lets pass. A plan that it
finds infeasible itself it tells `search.reject`, so that an answer without a plan can say what lacked.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from partition.batches import Pace, split_batch
from partition.drafts import Draft, Settings, degrees, judge_in_order, stage, usable_nodes
from partition.layers import even_split, ranges
from partition.search import Search, register
from sim.spec.cluster import Node
from sim.spec.counts import RECOMPUTE
from sim.spec.plan import Pipeline

TRIES = 800
"""Plans drawn, of which those that can run are judged until their simulations have taken enough."""

MICRO_BATCHES = (1, 2, 4)


@register("random")
def random(search: Search) -> None:
    """Draws plans: tensor-parallel degrees, grouping and order of the stages, micro-batch, recompute. Layers are split evenly."""
    nodes = usable_nodes(search)
    if nodes:
        judge_in_order(search, _drawn(search, nodes))


def _drawn(search: Search, nodes: list[Node]) -> Iterator[tuple[Draft, Settings]]:
    """The drafts, drawn one when the one before has been judged."""
    for _ in range(TRIES):
        search.check_budget()
        draft = _draw(search, nodes)
        if draft is not None:
            yield draft, Settings()


def _draw(search: Search, nodes: list[Node]) -> Draft | None:
    """One draft, or None where what was drawn does not go together."""
    rng, job = search.rng, search.job

    # Each node's GPUs in tensor-parallel groups of one size, which divides their number.
    groups = []
    for node in nodes:
        allowed = degrees(job, node.gpus)
        degree = allowed[rng.integers(len(allowed))]
        names = [f"{node.name}/{index}" for index in range(node.gpus)]
        groups += [names[at : at + degree] for at in range(0, node.gpus, degree)]

    # The groups, shuffled, are dealt to the pipelines, whose stages they become in the order they came. Half of the time whole
    # nodes are shuffled: few messages then cross the network.
    order = rng.permutation(len(groups))
    if rng.integers(2):
        place = {node.name: i for i, node in enumerate(nodes[j] for j in rng.permutation(len(nodes)))}
        order = np.array(sorted(range(len(groups)), key=lambda i: place[groups[i][0].rpartition("/")[0]]))
    groups = [groups[i] for i in order]
    count = int(len(groups) ** rng.random())  # few pipelines more often than many: their stages hold fewer layers
    dealt = [groups[p::count] for p in range(count)]

    # All pipelines take as many micro-batches, give or take one.
    micro_batch = int(rng.choice(MICRO_BATCHES))
    recompute = str(rng.choice(RECOMPUTE))
    micro_batches = split_batch(job.global_batch, [Pace(micro_batch, 0.0, 1.0)] * count)
    if micro_batches is None:
        return None

    pipelines = []
    for stages, number in zip(dealt, micro_batches, strict=True):
        used = stages[: job.model.layers]  # a stage holds at least one layer; GPUs beyond that are left out
        cuts = ranges(even_split(job.model.layers, len(used)))
        parts = tuple(stage(devices, cut, micro_batch, recompute) for devices, cut in zip(used, cuts, strict=True))
        pipelines.append(Pipeline(micro_batch, number, parts))
    return tuple(pipelines)
