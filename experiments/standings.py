"""The table of planners side by side: searches of ours, baselines and published plans, on one cluster."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Group
from rich.text import Text

from experiments.comparison import Standing, headroom
from experiments.tables import FittedTable
from partition.objective import MEASURED_IN

_HEADINGS = {"iteration_s": "iteration\ns", "dollars_per_billion_tokens": "$ per 1e9\ntokens", "joules_per_token": "J per\ntoken"}
"""The heading of what an objective measures, which comes first."""


def standings_table(title: str, standings: Sequence[Standing], objective: str = "throughput") -> Group:
    """One row per planner or published plan, the best by the objective first. Over several seeds: medians, and its range.

    `times best` is what the objective measures over that of the best row whose plans fit in memory. Where plans were simulated on
    devices of different speeds, `in step` is their iteration on equal ones.
    """
    jittered = any(outcome.spread is not None for standing in standings for outcome in standing.outcomes)
    headings = [
        "",
        "planner",
        _HEADINGS[MEASURED_IN[objective]],
        "times\nbest",
        *(["in\nstep\ns"] if jittered else []),
        "tokens/s",
        "MFU\n%",
        "memory\nleft %",
        "plans\njudged",
        "search\ns",
        "stopped, or\nhow judged",
    ]
    best = min((standing.value for standing in standings if standing.fits and standing.found), default=float("inf"))
    rows, rank = [], 0
    for standing in standings:
        rank += standing.fits and bool(standing.found)
        rows.append(_row(standing, rank, best, jittered))
    words = {"planner", headings[-1]}
    return Group(Text(title, style="bold"), FittedTable(headings, rows, [heading not in words for heading in headings]))


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
        f"{median(values):.4g}" + (f"\n{values[0]:.4g} to\n{values[-1]:.4g}" if values[0] < values[-1] else ""),
        f"{median(values) / best:.3f}" if best < float("inf") else "-",
        *([f"{median(in_step_s):.4g}"] if jittered else []),
        f"{standing.median(lambda _, cost: cost.tokens_per_s):,.0f}",
        f"{standing.median(lambda _, cost: cost.mfu) * 100:.2f}",
        f"{standing.median(lambda plan, cost: headroom(plan, cost, cluster)) * 100:.0f}",
        judged,
        seconds,
        how,
    ]
