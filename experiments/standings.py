"""The table of planners side by side: searches of ours, baselines and published plans, on one cluster."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from experiments.comparison import Standing, headroom


def standings_table(title: str, standings: Sequence[Standing]) -> Group:
    """One row per planner or published plan, the fastest first. Over several seeds: medians, and the range of the iteration.

    `times best` is its iteration over that of the fastest row whose plans fit in memory.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("planner", no_wrap=True)
    for heading in ("iteration\ns", "times\nbest", "tokens/s", "MFU\n%", "memory\nleft %", "plans\njudged", "search\ns"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("stopped, or\nhow judged", overflow="fold")
    fitting = [standing.iteration_s for standing in standings if standing.fits and standing.found]
    best_s = min(fitting, default=float("inf"))
    rank = 0
    for standing in standings:
        rank += standing.fits and bool(standing.found)
        table.add_row(*_row(standing, rank, best_s))
    return Group(Text(title, style="bold"), table)


def _row(standing: Standing, rank: int, best_s: float) -> list[str]:
    """The row of one planner; a rank is only for who has a plan that fits."""
    searched = [outcome.result for outcome in standing.outcomes if outcome.result is not None and outcome.searched]
    judged = f"{median(result.judged for result in searched):,.0f}" if searched else "-"
    seconds = f"{median(result.seconds for result in searched):.1f}" if searched else "-"
    how = ", ".join(dict.fromkeys(outcome.remark or outcome.stopped for outcome in standing.outcomes))
    if any(result.stands_in for result in searched):
        how += "; a symmetric plan stands in"
    if not standing.found:
        return ["-", standing.planner, "no plan", "-", "-", "-", "-", judged, seconds, how]
    if len(standing.found) < len(standing.outcomes):
        how += f"; no plan for {len(standing.outcomes) - len(standing.found)} of {len(standing.outcomes)} seeds"
    cluster = standing.outcomes[0].cell.cluster
    times = sorted(cost.iteration_s for _, cost in standing.found)
    return [
        str(rank) if standing.fits else "-",
        standing.planner,
        f"{median(times):.4g}" + (f"\n{times[0]:.4g}-{times[-1]:.4g}" if times[0] < times[-1] else ""),
        f"{median(times) / best_s:.3f}" if best_s < float("inf") else "-",
        f"{standing.median(lambda _, cost: cost.tokens_per_s):,.0f}",
        f"{standing.median(lambda _, cost: cost.mfu) * 100:.2f}",
        f"{standing.median(lambda plan, cost: headroom(plan, cost, cluster)) * 100:.0f}",
        judged,
        seconds,
        how,
    ]
