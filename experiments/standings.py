"""The table of planners side by side: searches of ours, baselines and published plans, on one cluster."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from experiments.comparison import Standing, headroom
from partition.objective import MEASURED_IN

_HEADINGS = {"iteration_s": "iteration\ns", "dollars_per_billion_tokens": "$ per 1e9\ntokens", "joules_per_token": "J per\ntoken"}
"""The heading of what an objective measures, which comes first."""


def standings_table(title: str, standings: Sequence[Standing], objective: str = "throughput") -> Group:
    """One row per planner or published plan, the best by the objective first. Over several seeds: medians, and its range.

    Where plans were simulated on devices of different speeds, `in step` is their iteration on equal ones.

    `times best` is what the objective measures over that of the best row whose plans fit in memory.
    """
    jittered = any(outcome.spread is not None for standing in standings for outcome in standing.outcomes)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("planner", no_wrap=True)
    for heading in (
        _HEADINGS[MEASURED_IN[objective]],
        "times\nbest",
        *(["in step,\ns"] if jittered else []),
        "tokens/s",
        "MFU\n%",
        "memory\nleft %",
        "plans\njudged",
        "search\ns",
    ):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("stopped, or\nhow judged", overflow="fold")
    best = min((standing.value for standing in standings if standing.fits and standing.found), default=float("inf"))
    rank = 0
    for standing in standings:
        rank += standing.fits and bool(standing.found)
        table.add_row(*_row(standing, rank, best, jittered))
    return Group(Text(title, style="bold"), table)


def _row(standing: Standing, rank: int, best: float, jittered: bool) -> list[str]:
    """The row of one planner; a rank is only for who has a plan that fits. With jitter it tells the iteration in step, too."""
    searched = [outcome.result for outcome in standing.outcomes if outcome.result is not None and outcome.searched]
    judged = f"{median(result.judged for result in searched):,.0f}" if searched else "-"
    seconds = f"{median(result.seconds for result in searched):.1f}" if searched else "-"
    how = ", ".join(dict.fromkeys(outcome.remark or outcome.stopped for outcome in standing.outcomes))
    if any(result.stands_in for result in searched):
        how += "; a symmetric plan stands in"
    if not standing.found:
        return ["-", standing.planner, "no plan", *["-"] * (4 + jittered), judged, seconds, how]
    if len(standing.found) < len(standing.outcomes):
        how += f"; no plan for {len(standing.outcomes) - len(standing.found)} of {len(standing.outcomes)} seeds"
    cluster = standing.outcomes[0].cell.cluster
    in_step_s = [outcome.in_step_s for outcome in standing.outcomes if outcome.in_step_s is not None]
    values = sorted(outcome.value for outcome in standing.outcomes if outcome.value is not None)
    return [
        str(rank) if standing.fits else "-",
        standing.planner,
        f"{median(values):.4g}" + (f"\n{values[0]:.4g}-{values[-1]:.4g}" if values[0] < values[-1] else ""),
        f"{median(values) / best:.3f}" if best < float("inf") else "-",
        *([f"{median(in_step_s):.4g}"] if jittered else []),
        f"{standing.median(lambda _, cost: cost.tokens_per_s):,.0f}",
        f"{standing.median(lambda _, cost: cost.mfu) * 100:.2f}",
        f"{standing.median(lambda plan, cost: headroom(plan, cost, cluster)) * 100:.0f}",
        judged,
        seconds,
        how,
    ]
