"""Progress of long work, on standard error: only where that is a terminal, and only after two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from partition.search import Search

PATIENCE_S = 2.0
"""How long work may take before its progress is shown."""

REFRESH_S = 0.1
"""A search may judge thousands of plans a second, and tells of its progress so often at most."""


def _progress(*columns: ProgressColumn) -> Progress:
    """A display of these columns on standard error, which leaves nothing behind."""
    console = Console(file=sys.stderr)
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


@contextmanager
def _shown_after_patience(progress: Progress) -> Iterator[None]:
    """Starts the progress after PATIENCE_S unless the work is done by then; stops it in any case."""
    if not progress.console.is_terminal:
        yield
        return
    timer = threading.Timer(PATIENCE_S, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


class SearchProgress:
    """What `partition.search` tells of its progress: the best so far, plans judged per second, elapsed time and budget.

    It has a clock of its own, for that of a search begins anew with every part of the cluster.
    """

    def __init__(self, progress: Progress, budget_s: float) -> None:
        self._progress, self._budget_s = progress, budget_s
        self._began, self._shown = time.perf_counter(), float("-inf")
        self._task = progress.add_task("searching", total=budget_s, best="no feasible plan yet", rate="")

    def __call__(self, search: Search) -> None:
        """Nothing; shows where the search stands."""
        now = time.perf_counter()
        if now - self._shown < REFRESH_S:
            return
        self._shown, elapsed_s = now, now - self._began
        best = f"best {search.best[1].iteration_s:.4g} s" if search.best else "no feasible plan yet"
        rate = f"{search.judged:,} plans judged, {search.judged / max(elapsed_s, 1e-9):.3g}/s"
        self._progress.update(self._task, completed=min(elapsed_s, self._budget_s), best=best, rate=rate)


@contextmanager
def search_progress(budget_s: float) -> Iterator[SearchProgress]:
    """The progress callback of one search with this budget."""
    progress = _progress(
        SpinnerColumn(),
        TextColumn("{task.fields[best]}"),
        TextColumn("{task.fields[rate]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn(f"of {budget_s:g} s"),
    )
    callback = SearchProgress(progress, budget_s)
    with _shown_after_patience(progress):
        yield callback


class CountProgress:
    """Counts what is done of a known number."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._task = progress, progress.add_task(what, total=total)

    def __call__(self) -> None:
        """Nothing; one more is done."""
        self._progress.advance(self._task)


@contextmanager
def waiting_progress(what: str) -> Iterator[None]:
    """Shows that something is done, and for how long, of which nobody knows how far it is."""
    progress = _progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    progress.add_task(what)
    with _shown_after_patience(progress):
        yield


@contextmanager
def count_progress(what: str, total: int) -> Iterator[CountProgress]:
    """A callback that is called once for each of `total` that is done."""
    progress = _progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    callback = CountProgress(progress, what, total)
    with _shown_after_patience(progress):
        yield callback
