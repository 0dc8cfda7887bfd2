"""What a comparison sets beside the searches: the best grid on all GPUs, and the best grid on GPUs of one kind alone.

Both are planners, registered as `uniform-grid` and `single-kind` when this module is imported. The first is what a planner
for homogeneous clusters makes of a mixed one; the second is the answer "leave the other GPUs out", which a planner for mixed
clusters should beat, or give itself. The grids are those of `partition.planners.megatron`, which may choose either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partition.drafts import reject, usable_nodes
from partition.planners.megatron import Grid, grids, judge_best
from partition.room import Room
from partition.search import Search, register


@register("uniform-grid")
def uniform_grid(search: Search) -> None:
    """Has the best symmetric grids on all GPUs judged, or on as many as there are fitting grids on."""
    most = 0
    fitting: list[Grid] = []
    for grid in _fitting_grids(search):
        count = len(_devices(grid))
        if count > most:
            most, fitting = count, []
        if count == most:
            fitting.append(grid)
    _judge_best(search, fitting)


@register("single-kind")
def single_kind(search: Search) -> None:
    """Has the best symmetric grids on GPUs of one kind judged, whichever kind that is."""
    kind = {device.name: device.gpu.name for device in search.cluster.devices}
    _judge_best(search, [grid for grid in _fitting_grids(search) if len({kind[name] for name in _devices(grid)}) == 1])


def _devices(grid: Grid) -> list[str]:
    return [name for pipeline in grid[0] for stage in pipeline.stages for name in stage.devices]


def _fitting_grids(search: Search) -> Iterator[Grid]:
    """All symmetric grids that fit in memory, on the whole cluster and on its homogeneous parts."""
    nodes = usable_nodes(search)
    room = Room(search.cluster, search.job)
    for draft, settings in grids(search, nodes) if nodes else ():
        search.check_budget()
        if room.fits(draft, settings):
            yield draft, settings


def _judge_best(search: Search, fitting: Sequence[Grid]) -> None:
    """Has the best of the grids judged, interleaved ones, too."""
    if not fitting:
        reject(search, [device.name for device in search.cluster.devices])
    judge_best(search, fitting)
