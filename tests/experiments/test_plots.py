"""What is drawn, read back from the artists; and that nothing of it is cut off."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from experiments.plots import _STYLES, MfuCell, plot_mfu_bars, plot_plan, plot_timeline, plot_two_timelines, save_figure
from sim.spec.cluster import Cluster, Intra, Nic, Node
from sim.spec.gpu import NOMINAL_EFFICIENCY, GpuKind
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    RecvActivation,
    ReduceGradients,
    SendActivation,
)
from sim.spec.reading import InputError
from sim.spec.trace import Span, Trace
from sim.spec.transformer import Transformer

CLUSTER = Cluster(
    "mixed",
    tuple(
        Node(
            f"node-{i}",
            GpuKind("RTX4090", 10**9, {"bf16": 1e12}, 1e9, None, 5.0, 50.0, None, NOMINAL_EFFICIENCY),
            4,
            Intra("pcie4", 24e9),
            Nic("ethernet", 1e9),
        )
        for i in range(60)
    ),
)


def trace_of(pipelines: int, stages: int, micro_batches: int, forward_s: float = 0.01) -> Trace:
    """Each lane waits, runs all forwards, sending the result of each, all backwards, a reduction and the optimizer step."""
    model = Transformer("tiny", layers=stages, hidden=4, ffn=8, heads=2, vocab=10)
    made = []
    for p in range(pipelines):
        nodes = [p * stages + s for s in range(stages)]
        groups = [Replica(tuple(f"node-{n}/{g}" for g in range(4)), 1) for n in nodes]
        made.append(Pipeline(1, micro_batches, tuple(Stage((g,), ((s, s + 1),)) for s, g in enumerate(groups))))
    plan = Plan("mixed", model, 5, pipelines * micro_batches, tuple(made))
    spans, lanes, end_s = [], {}, 0.0
    for p, pipeline in enumerate(made):
        for s, stage in enumerate(pipeline.stages):
            lane, now_s = f"p{p}s{s}", (1 + s) * forward_s
            lanes[lane] = stage.devices
            spans.append(Span(lane, RecvActivation(0, s, "p0s0", (0, 1)), 0.0, now_s))
            for m in range(micro_batches):
                spans.append(Span(lane, Forward(m, (s, s + 1)), now_s, now_s + forward_s))
                now_s += forward_s
                spans.append(Span(lane, SendActivation(m, s + 1, "p0s0", (0, 1)), now_s, now_s + forward_s / 5))
            for m in range(micro_batches):
                spans.append(Span(lane, Backward(m, (s, s + 1)), now_s, now_s + 2 * forward_s))
                now_s += 2 * forward_s
            spans.append(Span(lane, ReduceGradients((s, s + 1)), now_s, now_s + 3 * forward_s))
            spans.append(Span(lane, OptimizerStep(), now_s + 3 * forward_s, now_s + 4 * forward_s))
            end_s = max(end_s, now_s + 4 * forward_s)
    return Trace(plan, "mixed", "simulated", end_s, lanes, tuple(spans), {})


def bars(ax: Axes) -> dict[str, int]:
    return {str(c.get_label()): len(c.get_paths()) for c in ax.collections if isinstance(c, PolyCollection)}


def figure_of(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def assert_nothing_is_cut_off(ax: Axes) -> None:
    """Checks that the outermost pixels are blank: a word that is cut off would end there."""
    canvas = FigureCanvasAgg(figure_of(ax))
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    for side, edge in {"top": pixels[0], "bottom": pixels[-1], "left": pixels[:, 0], "right": pixels[:, -1]}.items():
        assert (edge == 255).all(), f"something is cut off at the {side}"


# --- A plan ----------------------------------------------------------------------------------------------------------


def held_by_row(ax: Axes) -> dict[int, set[tuple[float, float, str]]]:
    """For each row: from where to where it is filled, and in which colour."""
    found: dict[int, set[tuple[float, float, str]]] = {}
    for patch in ax.patches:
        if isinstance(patch, Rectangle) and patch.get_width() >= 1 and patch.get_facecolor() != to_rgba("#ECECEC"):
            for row in range(round(patch.get_y()), round(patch.get_y() + patch.get_height())):
                found.setdefault(row, set()).add(
                    (patch.get_x(), patch.get_x() + patch.get_width(), to_hex(patch.get_facecolor()))
                )
    return found


def two_pipelines() -> Plan:
    """On 3 nodes of 4 GPUs: one pipeline of a pair and two single GPUs, the last of which is on the next node; one of one GPU."""
    model = Transformer("tiny", layers=6, hidden=4, ffn=8, heads=2, vocab=10)
    pair = Stage((Replica(("node-0/0", "node-0/1"), 1),), ((0, 3),), "full")
    single, last = (Stage((Replica((name,), 1),), (cut,)) for name, cut in (("node-0/3", (3, 5)), ("node-1/0", (5, 6))))
    alone = Stage((Replica(("node-1/2",), 2),), ((0, 6),))
    return Plan("mixed", model, 5, 4, (Pipeline(1, 2, (pair, single, last)), Pipeline(2, 1, (alone,))))


def test_a_plans_picture_shows_for_each_gpu_the_layers_that_it_holds_and_its_memory() -> None:
    three = replace(CLUSTER, nodes=CLUSTER.nodes[:3])
    peaks = {"node-0/0": 960_000_000, "node-0/1": 500_000_000, "node-0/3": 100, "node-1/0": 250_000_000, "node-1/2": 900_000_000}
    held, full = plot_plan(two_pipelines(), three, peaks, title="a plan")
    # The embedding is left of layer 0, the head right of layer 5.
    assert {row: {(left, right) for left, right, _ in filled} for row, filled in held_by_row(held).items()} == {
        0: {(-1, 3)},
        1: {(-1, 3)},
        3: {(3, 5)},
        4: {(5, 7)},
        6: {(-1, 7)},
    }
    colours = {row: colour for row, filled in held_by_row(held).items() for _, _, colour in filled}
    assert colours[0] == colours[1] == colours[3] == colours[4] != colours[6]
    assert [text.get_text() for text in held.texts if "s" in text.get_text() and text.get_text() != "not used"] == [
        "p0s0  1/2",
        "p0s1",
        "p0s2",
        "p1s0",
    ]
    assert sum(text.get_text() == "not used" for text in held.texts) == 3  # node-0/2, node-1/1, and from node-1/3 on
    widths = [bar.get_width() for bar in full.patches if isinstance(bar, Rectangle) and bar.get_height() == 0.8]
    assert widths == [0.96, 0.5, 0, 1e-7, 0.25, 0, 0.9, 0, 0, 0, 0, 0]
    figure = held.get_figure(root=True)
    assert isinstance(figure, Figure)
    assert {text.get_text() for legend in figure.legends for text in legend.get_texts()} == {
        "recomputed: full",
        "memory more than 95 % full",
        "1/2: the part of each of its layers that a GPU holds",
    }


def test_neighbouring_pipelines_of_a_plans_picture_differ_in_grey() -> None:
    model = Transformer("tiny", layers=2, hidden=4, ffn=8, heads=2, vocab=10)
    names = [device.name for device in CLUSTER.devices[:8]]
    pipelines = tuple(Pipeline(1, 1, (Stage((Replica((name,), 1),), ((0, 2),)),)) for name in names)
    held, _ = plot_plan(Plan("mixed", model, 5, 8, pipelines), replace(CLUSTER, nodes=CLUSTER.nodes[:2]), {})
    greys = [float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114))) for _, ((*_, colour),) in sorted(held_by_row(held).items())]
    assert len(greys) == 8
    assert all(abs(a - b) > 0.15 for a, b in itertools.pairwise(greys))


def test_a_large_plans_picture_is_no_taller_than_a_screen_or_two_and_names_nodes() -> None:
    plan = trace_of(pipelines=6, stages=10, micro_batches=1).plan
    held, _ = plot_plan(plan, CLUSTER, dict.fromkeys(plan.devices, 1))
    figure = held.get_figure(root=True)
    assert isinstance(figure, Figure) and figure.get_figheight() < 18
    assert [label.get_text() for label in held.get_yticklabels()][:2] == ["node-0  4x RTX4090", "node-1  4x RTX4090"]
    assert held_by_row(held).keys() == set(range(240))
    assert all(patch.get_hatch() is None for patch in held.patches)


def test_a_long_title_of_a_timeline_stays_inside_its_figure() -> None:
    settings = (
        "llama-30b on hexiscale-mixed-c, 256 x 4096 tokens, bf16, split-1f1b, ZeRO 1, sequences in 2 slices, sequence parallel"
    )
    ax = plot_timeline(trace_of(1, 4, 8), title=f"{settings}, optimizer in hosts\none simulated iteration", cluster=CLUSTER)
    figure = figure_of(ax)
    figure.draw_without_rendering()
    assert figure.bbox.x1 >= max(text.get_window_extent().x1 for text in ax.get_children() if isinstance(text, Text))
    assert ax.get_title(loc="left").splitlines()[-1] == "one simulated iteration"


def test_a_small_timeline_draws_every_span_and_numbers_every_micro_batch() -> None:
    ax = plot_timeline(trace_of(1, 4, 8), title="four lanes", cluster=CLUSTER)
    assert bars(ax) == {"wait": 4, "forward": 32, "backward": 32, "optimizer": 4, "send": 32, "collective": 4}
    assert sorted(text.get_text() for text in ax.texts) == sorted(2 * 4 * [str(m) for m in range(8)])
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "p0s0  4x RTX4090  node-0/0-3",
        "p0s1  4x RTX4090  node-1/0-3",
        "p0s2  4x RTX4090  node-2/0-3",
        "p0s3  4x RTX4090  node-3/0-3",
    ]
    assert ax.get_title(loc="left") == "four lanes"
    (legend,) = figure_of(ax).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward",
        "backward",
        "optimizer",
        "sending",
        "reducing and gathering",
        "waiting to receive",
        "idle",
    ]
    assert legend.get_window_extent().y1 < ax.get_window_extent().y0
    assert_nothing_is_cut_off(ax)


def test_a_bar_is_where_its_span_is() -> None:
    ax = plot_timeline(trace_of(1, 2, 1))
    forward = next(c for c in ax.collections if c.get_label() == "forward")
    (first, second) = (path.get_extents() for path in forward.get_paths())
    assert (first.x0, first.x1) == pytest.approx((10, 20))  # ms
    assert (second.x0, second.x1) == pytest.approx((20, 30))
    assert 0 < first.y0 < first.y1 < 1 < second.y0 < second.y1 < 2
    send = next(c for c in ax.collections if c.get_label() == "send").get_paths()[0].get_extents()
    assert first.y1 < send.y0 < send.y1 < 1
    assert send.y1 - send.y0 < (first.y1 - first.y0) / 3


@pytest.mark.parametrize(("forward_s", "unit"), [(1.0, "s"), (0.01, "ms"), (1e-6, "µs")])
def test_the_time_axis_has_the_unit_of_the_iteration(forward_s: float, unit: str) -> None:
    trace = trace_of(1, 2, 2, forward_s)
    ax = plot_timeline(trace)
    assert ax.get_xlabel() == f"time in {unit}"
    assert ax.get_xlim()[1] == pytest.approx(trace.iteration_s * {"s": 1, "ms": 1e3, "µs": 1e6}[unit])


def test_a_line_parts_the_pipelines() -> None:
    def lines(trace: Trace) -> list[float]:
        return [float(np.asarray(line.get_ydata())[0]) for line in plot_timeline(trace).lines if line.get_linewidth() == 1.0]

    assert lines(trace_of(3, 2, 2)) == [2, 4]
    assert lines(trace_of(1, 6, 2)) == []


def test_a_large_timeline_is_drawn_whole_and_without_numbers_and_edges() -> None:
    trace = trace_of(15, 4, 256)
    ax = plot_timeline(trace, cluster=CLUSTER)
    assert sum(bars(ax).values()) == len(trace.spans) == 60 * (3 * 256 + 3)
    assert not ax.texts
    assert len(ax.get_yticklabels()) == 60
    forward = next(c for c in ax.collections if c.get_label() == "forward")
    assert len(forward.get_edgecolor()) == 0
    labels = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(labels)), "labels overlap"
    assert figure_of(ax).get_figheight() > 2 * figure_of(plot_timeline(trace_of(1, 4, 8))).get_figheight()
    assert_nothing_is_cut_off(ax)


def test_both_halves_of_a_split_backward_are_told_apart() -> None:
    whole = trace_of(1, 2, 4)
    spans: list[Span] = []
    for span in whole.spans:
        match span.instruction:
            case Backward(m, layers):
                middle_s = (span.start_s + span.end_s) / 2
                spans.append(Span(span.lane, BackwardInput(m, layers), span.start_s, middle_s))
                spans.append(Span(span.lane, BackwardWeight(m, layers), middle_s, span.end_s))
            case _:
                spans.append(span)
    ax = plot_timeline(replace(whole, spans=tuple(spans)))
    assert bars(ax)["backward input"] == bars(ax)["backward weight"] == 8
    assert next(c for c in ax.collections if c.get_label() == "backward weight").get_hatch()


def test_the_colours_of_the_bar_differ_in_grey_or_by_hatch() -> None:
    def grey(colour: str) -> float:
        return float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114)))

    names = ("forward", "backward", "wait", "optimizer")
    lightness = sorted([grey(_STYLES[name].fill) for name in names] + [1.0])  # idle is white
    assert all(b - a > 0.12 for a, b in itertools.pairwise(lightness))
    assert _STYLES["backward weight"].hatch


def test_a_timeline_can_be_drawn_on_a_given_axes_with_its_legend_beside_it() -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    ax = figure.subplots()
    assert plot_timeline(trace_of(1, 4, 8), ax, "mine") is ax
    assert not figure.legends
    legend = ax.get_legend()
    assert legend is not None
    figure.draw_without_rendering()
    assert legend.get_window_extent().x0 > ax.get_window_extent().x1
    assert_nothing_is_cut_off(ax)


def test_long_device_lists_are_shortened() -> None:
    trace = trace_of(1, 2, 2)
    devices = tuple(f"node-{i}/0" for i in range(10))
    ax = plot_timeline(replace(trace, lanes=trace.lanes | {"p0s0": devices}), cluster=CLUSTER)  # type: ignore[operator]
    label = ax.get_yticklabels()[0].get_text()
    assert label.startswith("p0s0  10x RTX4090  node-0/0 node-1/0")
    assert label.endswith("…")
    assert_nothing_is_cut_off(ax)


# --- Two timelines ---------------------------------------------------------------------------------------------------


def test_two_timelines_have_one_time_axis_one_order_of_lanes_and_one_legend() -> None:
    upper, lower = trace_of(2, 2, 4, 0.02), trace_of(2, 2, 4, 0.01)
    turned = replace(lower, lanes=dict(reversed(list(lower.lanes.items()))))
    above, below = plot_two_timelines(upper, turned, ("measured", "simulated"), CLUSTER)
    assert above.get_xlim() == below.get_xlim() and below.get_xlim()[1] == pytest.approx(upper.iteration_s * 1e3)
    assert (above.get_xlabel(), below.get_xlabel()) == ("", "time in ms")
    lanes = [[label.get_text() for label in ax.get_yticklabels()] for ax in (above, below)]
    assert lanes[0] == lanes[1] and lanes[0][0].startswith("p0s0")
    assert [ax.get_title(loc="left") for ax in (above, below)] == ["measured", "simulated"]
    assert bars(above) == bars(below)
    figure_of(above).draw_without_rendering()
    boxes = [ax.get_window_extent() for ax in (above, below)]
    assert boxes[0].y0 > boxes[1].y1 and (boxes[0].x0, boxes[0].x1) == (boxes[1].x0, boxes[1].x1)
    (legend,) = figure_of(above).legends
    assert legend.get_window_extent().y1 < boxes[1].y0
    assert_nothing_is_cut_off(above)


def test_a_span_of_the_shorter_timeline_is_half_as_long_and_what_comes_after_its_end_is_grey() -> None:
    upper, lower = trace_of(1, 2, 1, 0.02), trace_of(1, 2, 1, 0.01)
    above, below = plot_two_timelines(upper, lower)
    first = [next(c for c in ax.collections if c.get_label() == "forward").get_paths()[0].get_extents() for ax in (above, below)]
    assert (first[0].x0, first[0].x1) == pytest.approx((20, 40)) and (first[1].x0, first[1].x1) == pytest.approx((10, 20))
    assert [len(ax.patches) for ax in (above, below)] == [0, 1]
    grey = below.patches[0].get_window_extent().transformed(below.transData.inverted())
    assert (grey.x0, grey.x1) == pytest.approx((lower.iteration_s * 1e3, upper.iteration_s * 1e3))
    words = [text.get_text() for text in figure_of(above).legends[0].get_texts()]
    assert words[-2:] == ["idle", "ended"]


def test_timelines_of_other_lanes_are_not_drawn_below_one_another() -> None:
    with pytest.raises(InputError, match=r"lane by lane.*p0s0, p0s1 .*p0s0, p0s1, p0s2"):
        plot_two_timelines(trace_of(1, 2, 1), trace_of(1, 3, 1))


# --- MFU bars --------------------------------------------------------------------------------------------------------

CELLS = [
    MfuCell("mixed-a", "llama-2-7b", "HexiScale", 0.3119, "flashflex", 0.35, 0.27),
    MfuCell("mixed-a", "llama-2-7b", "HexiScale", 0.3119, "metis", None, None, "memory"),
    MfuCell("homogeneous-16", "llama-2-13b", "Megatron", 0.3946, "flashflex", 0.41, 0.31),
    MfuCell("homogeneous-16", "llama-2-13b", "Megatron", 0.3946, "metis", 0.38, 0.29),
]


def test_every_cell_has_the_reported_bar_and_two_for_each_planner_with_a_plan() -> None:
    ax = plot_mfu_bars(CELLS, title="predicted and reported", note="assumed: 4096 tokens")
    heights = [round(patch.get_height(), 4) for patch in ax.patches]  # type: ignore[attr-defined]
    assert heights == [0.3119, 0.35, 0.27, 0.3946, 0.41, 0.31, 0.38, 0.29]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["mixed-a\nllama-2-7b", "homogeneous-16\nllama-2-13b"]
    words = [text.get_text() for text in ax.texts]
    assert words.count("no plan") == 1
    assert {"HexiScale", "Megatron", "31.2", "39.5"} <= set(words)
    assert ax.get_xlabel() == "assumed: 4096 tokens"
    assert_nothing_is_cut_off(ax)


def test_the_axis_of_the_mfu_bars_is_in_per_cent() -> None:
    ax = plot_mfu_bars(CELLS)
    figure_of(ax).draw_without_rendering()
    assert "30%" in [label.get_text() for label in ax.get_yticklabels()]


def test_bars_of_one_cell_stand_beside_one_another() -> None:
    ax = plot_mfu_bars(CELLS)
    boxes = [patch.get_window_extent() for patch in ax.patches]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))


def test_a_picture_of_many_cells_and_planners_has_1400_by_700_pixels_and_no_overlapping_words() -> None:
    cells = [(f"mixed-{c}", model) for c in "abcd" for model in ("llama-2-7b", "llama-2-13b")]
    planners = ("flashflex", "metis", "motley")
    rows = [
        MfuCell(cluster, model, "HexiScale", 0.31, planner, 0.3 + 0.02 * i, 0.25)
        for cluster, model in cells
        for i, planner in enumerate(planners)
    ]
    ax = plot_mfu_bars(rows, title="all", note="assumed. " * 60)
    figure = figure_of(ax)
    figure.draw_without_rendering()
    assert (figure.bbox.width, figure.bbox.height) == (1400, 700)
    labels = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(labels))
    values = [text.get_window_extent() for text in ax.texts if text.get_text().isdecimal()]
    assert len(values) == 8 * 7
    assert not any(a.overlaps(b) for i, a in enumerate(values) for b in values[i + 1 : i + 3])
    legend = ax.get_legend()
    assert legend is not None
    assert all(box.y1 < legend.get_window_extent().y0 for box in values)
    assert_nothing_is_cut_off(ax)


def test_nothing_to_plot_is_told() -> None:
    with pytest.raises(InputError, match="nothing to plot"):
        plot_mfu_bars([])


# --- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "head"), [("png", b"\x89PNG"), ("SVG", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_written_in_the_format_of_its_name(tmp_path: Path, ending: str, head: bytes) -> None:
    ax = plot_timeline(trace_of(1, 2, 2))
    path = tmp_path / f"timeline.{ending}"
    save_figure(figure_of(ax), path)
    assert path.read_bytes().startswith(head)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_equal_pictures_are_equal_files(tmp_path: Path) -> None:
    for ending in ("png", "svg", "pdf"):
        for name in ("one", "two"):
            save_figure(figure_of(plot_timeline(trace_of(1, 2, 2))), tmp_path / f"{name}.{ending}")
        assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes(), ending


def test_another_ending_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in one of \.png, \.svg, \.pdf, but this one ends in '\.gif'"):
        save_figure(Figure(), tmp_path / "timeline.gif")
