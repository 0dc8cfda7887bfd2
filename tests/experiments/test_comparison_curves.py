"""The picture of quality over search time: what is drawn is what was found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.curves import Curve, Level, Panel, draw_quality, plot_quality, spread
from sim.spec.reading import InputError

STEADY = Curve("steady", (((1.0, 4.0), (2.0, 2.0)), ((1.0, 4.0), (3.0, 2.0)), ((2.0, 4.0),)), (4.0, 4.0, 5.0))
"""Three seeds. At 1 s two of them have a plan of 4 s; at 2 s the plans take 2, 4 and 4 s; at 3 s 2, 2 and 4 s."""
HALF = Curve("half", (((1.0, 8.0),), ()), (6.0, 6.0))
"""One of two seeds finds nothing, which is not more than half of them."""


def lines(panel: Panel, planners: list[str]) -> list[Line2D]:
    ax = Figure().add_subplot()
    plot_quality(panel, ax, planners)
    return list(ax.get_lines())


def test_a_line_is_the_median_quality_from_when_more_than_half_of_the_seeds_have_a_plan() -> None:
    line, dot = lines(Panel("one", (STEADY,)), ["steady"])
    assert np.array(line.get_xdata()).tolist() == [1.0, 2.0, 3.0, 5.0]
    assert np.array(line.get_ydata()).tolist() == [0.5, 0.5, 1.0, 1.0]
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([5.0], [1.0])
    assert lines(Panel("one", (HALF,)), ["half"]) == []


def test_quality_is_of_the_fastest_that_fits() -> None:
    published = (Level("fits", 1.0), Level("does not", 0.5, fits=False))
    panel = Panel("one", (STEADY,), published)
    assert panel.best == 1.0
    line, _, fits, does_not = lines(panel, ["steady"])
    assert np.array(line.get_ydata()).tolist() == [0.25, 0.25, 0.5, 0.5]
    assert list(fits.get_ydata()) == [1.0, 1.0] and list(does_not.get_ydata()) == [2.0, 2.0]
    assert Panel("none", (HALF,)).best == 8.0 and Panel("none", ()).best == float("inf")


def test_every_number_of_panels_is_drawn(tmp_path: Path) -> None:
    for count in (1, 2, 4):
        path = tmp_path / f"{count}.svg"
        draw_quality([Panel(f"cluster {i}", (STEADY, HALF), (Level("published", 3.0),)) for i in range(count)], path, "title")
        text = path.read_text()
        for i in range(count):
            assert f"<!-- cluster {i} -->" in text
        assert "<!-- steady -->" in text and "<!-- published -->" in text
    with pytest.raises(InputError, match="nothing to plot"):
        draw_quality([], tmp_path / "none.png")


def test_a_cluster_where_nothing_was_found_is_an_empty_panel(tmp_path: Path) -> None:
    draw_quality([Panel("empty", (Curve("barren", ((),), (1.0,)),))], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_names_are_moved_apart_as_little_as_can_be() -> None:
    assert spread([0.1, 0.5], 0.2) == pytest.approx([0.1, 0.5])
    assert spread([0.4, 0.4, 0.9], 0.2) == pytest.approx([0.3, 0.5, 0.9])
    assert spread([0.4, 0.4, 0.6], 0.2) == pytest.approx([4 / 15, 7 / 15, 2 / 3])
