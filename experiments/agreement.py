"""How well predictions agree with what was measured: errors, rank correlation and the order of schedules, source by source."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

TIME, MEMORY = "iter_time_s", "peak_mem_gb"

SPEEDS = (TIME, "tokens_per_s", "tflops_per_gpu", "mfu_pct", "hfu_pct")
"""The columns that say how fast a run was, the one to compare first."""

LEAST_RANKED = 3
"""Rows that a table must have for its rank correlation to be told: of two, it is 1 or -1 by one comparison."""

DIFFERENT = 0.03
"""How much longer than the shorter of two measured times the longer one must be for their order to count, as a fraction."""


@dataclass(frozen=True)
class Comparison:
    """One published figure of one run beside its prediction, or why there is none: then `predicted` is None, and `note` says why.

    Figures are in the unit that the quantity's name says.
    """

    id: str
    source_key: str
    quantity: str | None
    """The column that is compared; None where nothing that could be is published."""
    predicted: float | None
    measured: float | None
    note: str = ""
    predicted_s: float | None = None
    """Seconds of the iteration whose speed it is; None of memory."""
    judge: str | None = None
    """What predicted it: 'estimate' or 'simulation' for speeds, 'memory' for bytes."""
    assumed: bool = False
    """Whether something decisive is unpublished, so that the best feasible value was taken: averaged apart."""
    assumptions: tuple[str, ...] = ()
    """All that its row does not tell and that was taken for it, as 'vocab 50257', and cells that were disregarded."""
    table: str = ""
    """The table of the source that it stands in."""
    schedule: str = ""
    parallelisation: tuple[object, ...] = ()
    """What a table may vary: the degrees and how states are shared."""
    setting: tuple[object, ...] = ()
    """What two runs have in common that differ in their schedules only."""

    @property
    def relative_error(self) -> float | None:
        """predicted / measured - 1; None where there is no prediction, or nothing measured."""
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None

    @property
    def measured_s(self) -> float | None:
        """Seconds of the measured iteration, by its speed beside the predicted one; None where one of them is not told."""
        if self.predicted_s is None or not self.predicted or not self.measured:
            return None
        return self.measured if self.quantity == TIME else self.predicted_s * self.predicted / self.measured


@dataclass(frozen=True)
class Statistics:
    """Errors of several comparisons, as fractions of what was measured."""

    count: int
    mean_absolute_relative_error: float
    median_absolute_relative_error: float
    p90_absolute_relative_error: float
    """The 90th percentile, between two errors on the straight line between them."""
    bias: float
    """Mean of the relative errors with their signs: above 0, predictions are too large."""


NO_STATISTICS: Mapping[str, None] = dict.fromkeys((field.name for field in fields(Statistics) if field.name != "count"), None)


def statistics(comparisons: Iterable[Comparison]) -> Statistics | None:
    """The statistics of those comparisons that have an error; None where none has."""
    found = [c.relative_error for c in comparisons if c.relative_error is not None]
    if not found:
        return None
    errors = np.array(found)
    absolute = np.abs(errors)
    return Statistics(
        len(found),
        float(absolute.mean()),
        float(np.median(absolute)),
        float(np.percentile(absolute, 90)),
        float(errors.mean()),
    )


# --- Order -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableRanking:
    """Kendall's tau-b between what is predicted and what was measured of the rows of one table."""

    source_key: str
    table: str
    count: int
    kendall_tau: float
    varies_parallelisation: bool
    """Whether its rows differ in their degrees or in how states are shared, and not in sizes, replicas and the like alone."""


def table_rankings(comparisons: Iterable[Comparison]) -> list[TableRanking]:
    """The ranking of every table that has at least LEAST_RANKED rows with a prediction.

    All comparisons are of one quantity. A table whose measured figures are all equal has no order, and is left out.
    """
    from scipy.stats import kendalltau  # half a second, which no other command and no worker process shall wait

    tables: dict[tuple[str, str], list[Comparison]] = {}
    for c in comparisons:
        if c.relative_error is not None:
            tables.setdefault((c.source_key, c.table), []).append(c)
    rankings = []
    for (source, table), rows in tables.items():
        if len(rows) >= LEAST_RANKED:
            tau = float(kendalltau([c.predicted for c in rows], [c.measured for c in rows]).statistic)
            if tau == tau:  # scipy's answer is not a number where one side has no order
                rankings.append(TableRanking(source, table, len(rows), tau, len({c.parallelisation for c in rows}) > 1))
    return rankings


def kendall_tau(rankings: Sequence[TableRanking]) -> float | None:
    """The mean of the correlations of the tables that vary the parallelisation, each weighted by its pairs of rows.

    Where none does, of all tables; None without tables.
    """
    rankings = [ranking for ranking in rankings if ranking.varies_parallelisation] or rankings
    pairs = [ranking.count * (ranking.count - 1) / 2 for ranking in rankings]
    return sum(n * ranking.kendall_tau for n, ranking in zip(pairs, rankings, strict=True)) / sum(pairs) if pairs else None


@dataclass(frozen=True)
class SchedulePairs:
    """Of the pairs of runs that differ in their schedules only, and in measured time by more than DIFFERENT: how many are right.

    A pair is right where the prediction says the same run of the two is the faster one.
    """

    count: int
    right: int
    wrong: tuple[tuple[str, str], ...]
    """The ids of the others."""


def schedule_pairs(comparisons: Iterable[Comparison]) -> SchedulePairs | None:
    """The pairs of schedules among these comparisons of times; None where there are none."""
    settings: dict[object, list[Comparison]] = {}
    for c in comparisons:
        if c.relative_error is not None:
            settings.setdefault((c.source_key, c.setting), []).append(c)
    count, wrong = 0, []
    for rows in settings.values():
        for a, b in itertools.combinations(rows, 2):
            measured_a, measured_b = float(a.measured or 0), float(b.measured or 0)
            if a.schedule == b.schedule or max(measured_a, measured_b) <= (1 + DIFFERENT) * min(measured_a, measured_b):
                continue
            count += 1
            predicted_a, predicted_b = float(a.predicted or 0), float(b.predicted or 0)
            if (predicted_a - predicted_b) * (measured_a - measured_b) <= 0:
                wrong.append((a.id, b.id))
    return SchedulePairs(count, count - len(wrong), tuple(wrong)) if count else None


# --- Out of memory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitCheck:
    """Whether one run was said to fit into its memory, beside whether it did; `fits` is None where it could not be modelled."""

    id: str
    source_key: str
    ran: bool
    fits: bool | None
    exact: bool = True
    """Whether its source says that memory was the cause, where it failed."""
    note: str = ""


def fit_summary(checks: Iterable[FitCheck]) -> dict[str, Any]:
    """Per source and class (`ran`, `out_of_memory`; `failed` where it is not known to be for memory): how many runs there are.

    `count` were judged, `right` of them rightly, which is the `share`; `not_modelled` could not be judged, for `reasons`.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for check in checks:
        group = "ran" if check.ran else "out_of_memory" if check.exact else "failed"
        entry = found.setdefault(check.source_key, {}).setdefault(
            group, {"count": 0, "right": 0, "not_modelled": 0, "reasons": Counter()}
        )
        if check.fits is None:
            entry["not_modelled"] += 1
            entry["reasons"][check.note] += 1
        else:
            entry["count"] += 1
            entry["right"] += check.fits == check.ran
    for groups in found.values():
        for entry in groups.values():
            entry["share"] = entry["right"] / entry["count"] if entry["count"] else None
            entry["reasons"] = dict(entry["reasons"].most_common())
    return found


# --- Summaries -------------------------------------------------------------------------------------------------------


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """What is told of one source, or of all together, as it stands in the JSON file.

    The statistics at the top are those of the one speed that all runs are compared by, named; where there are several, of the
    iteration times that they say; and where there is none, of memory. `quantities` has those of each, `assumed` those of the runs
    that stand apart, which are in nothing else.
    """
    certain = [c for c in comparisons if not c.assumed]
    quantities = _by_quantity(certain)
    speeds = [q for q in SPEEDS if q in quantities]
    headline = TIME if len(speeds) > 1 else next((q for q in (*speeds, MEMORY) if q in quantities), None)
    in_seconds = [_in_seconds(c) for c in certain if c.quantity in speeds]
    shown = in_seconds if headline == TIME else _of(headline, certain)
    figures = statistics(shown)
    rankings = table_rankings(shown)
    pairs = schedule_pairs(in_seconds)
    runs = {c.id for c in comparisons}
    modelled = {c.id for c in comparisons if c.predicted is not None}
    return {
        "quantity": headline,
        **(asdict(figures) if figures is not None else {"count": 0, **NO_STATISTICS}),
        "kendall_tau": kendall_tau(rankings),
        "runs": len(runs),
        "modelled": len(modelled),
        "not_modelled": len(runs - modelled),
        "quantities": quantities,
        "assumed": _by_quantity([c for c in comparisons if c.assumed]),
        "tables": [asdict(ranking) for ranking in rankings],
        "pairs": None if pairs is None else {**asdict(pairs), "share": pairs.right / pairs.count},
        "judges": dict(Counter(c.judge for c in shown if c.judge is not None)),
        "reasons": dict(Counter(c.note for c in comparisons if c.predicted is None).most_common()),
    }


def _of(quantity: str | None, comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons of one quantity."""
    return [c for c in comparisons if c.quantity == quantity]


def _in_seconds(comparison: Comparison) -> Comparison:
    """The comparison of the iteration times that a predicted and a measured speed say."""
    if comparison.quantity == TIME:
        return comparison
    return replace(comparison, quantity=TIME, predicted=comparison.predicted_s, measured=comparison.measured_s)


def _by_quantity(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """The statistics of each quantity that has any."""
    found = {q: statistics(_of(q, comparisons)) for q in (*SPEEDS, MEMORY)}
    return {quantity: asdict(figures) for quantity, figures in found.items() if figures is not None}


def by_source(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """The comparisons of each source, in the order of their first runs."""
    found: dict[str, list[Comparison]] = {}
    for c in comparisons:
        found.setdefault(c.source_key, []).append(c)
    return found
