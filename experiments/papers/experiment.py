"""What an experiment is: the runs of a sweep, and what is drawn and told of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from experiments.sweep import ADDED, COLUMNS, Run
from sim.spec.reading import InputError

if TYPE_CHECKING:
    import pandas  # half a second, which `motley --help` does without


@dataclass(frozen=True)
class Experiment:
    """A question of a paper, put to the simulator. Registered in `experiments.papers.EXPERIMENTS`; see docs/experiments/.

    `plot` and `table` take the rows as a frame, a row for each run: the columns of a sweep, and the labels of its runs. Both may
    read nothing else, so that they can be made again from the rows alone.
    """

    name: str
    """Of the command, the page and its files."""
    paper: str
    """Whose question it is, with its arXiv number or venue."""
    question: str
    """In one sentence."""
    runs: Callable[[], Iterable[Run]]
    """All runs, in the same order each time."""
    plot: Callable[[pandas.DataFrame], Mapping[str, Figure]]
    """The figures by the name of their files, which begins with the experiment's."""
    table: Callable[[pandas.DataFrame], str]
    """What was found, in Markdown: what a reader would copy out of the plots, in numbers."""


def read_rows(path: Path) -> pandas.DataFrame:
    """The rows of a sweep's results.csv, as `Experiment.plot` and `Experiment.table` take them. Raises InputError."""
    import pandas

    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    frame = pandas.read_csv(path, dtype={name: "string" for name, kind in COLUMNS.items() if kind is str})
    missing = [name for name in COLUMNS if name not in frame and name not in ADDED]
    if missing:
        raise InputError(f"{path}: is not the results.csv of a sweep: it has no column {missing[0]!r}")
    return frame.assign(**{name: value for name, value in ADDED.items() if name not in frame})


def markdown(heads: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A table in Markdown, the first column to the left and the others to the right."""
    heads = list(heads)
    rows = [heads, [":--", *["--:"] * (len(heads) - 1)], *([str(value) for value in line] for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
