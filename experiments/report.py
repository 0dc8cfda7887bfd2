"""The report: one page of all runs that were found, to look at, to sort, and to print.

It tells what `experiments.findings` found, and computes nothing but what a picture needs. Everything with a bar or a row follows
the filter of the table of runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from experiments.agreement import TIME
from experiments.diagrams import alike, plan_rows, timelines
from experiments.findings import MEASURED, SIMULATED, Findings, Run
from experiments.pages import (
    Bar,
    Bars,
    Cell,
    Html,
    Look,
    Looks,
    Note,
    Part,
    Picture,
    Section,
    Table,
    heading,
    natural,
    page,
    picture_bytes,
)
from experiments.tables import GIB, NEARLY_FULL, energy, memory, money, per_cent, plan_title, seconds, source_cells
from partition.objective import MEASURED_IN
from sim.spec.trace import Trace, short_devices

SHOWN = 3
"""Runs that are looked at closely from the beginning; the others are when their row is clicked."""

MOST_SIMULATED = 12
"""Runs without a trace that are simulated for the page, where their plan and cluster are known."""

RUNS = "runs"
"""The name of the table that the bars follow."""

MOST_CHARACTERS = 10_000_000
"""Of what is looked at closely, before it is packed to a fifth or less: timelines beyond that are left out."""

MOST_LINKS = 16
MOST_PANELS = 12
MOST_BARS = 24
MOST_CHOICES, MOST_LISTS = 30, 7
"""A column with more values has no list to choose from; the first few that can have one do."""


def report_page(found: Findings, title: str, remarks: Sequence[str] = ()) -> str:
    """The text of the HTML file. `remarks` are told at the end, as of what could not be simulated."""
    runs = with_short_paths(found.runs)
    names = labels(runs)
    sections = [
        Section("Runs", run_parts(runs), "Click a heading to sort, a run's number to look at it more closely."),
        Section(
            "MFU",
            mfu_parts(runs, names),
            "Model FLOPs of an iteration without recomputation, over what all GPUs of the cluster could do in that time. "
            "HFU counts recomputation too.",
        ),
        Section("Quality over seconds of search", quality_parts(found)),
        Section("A closer look", look_parts(runs, names)),
        Section("Simulated against measured", error_parts(runs, names)),
        Section("Predicted against published", validation_parts(found.validations)),
        Section("Runs without a result", failure_parts(runs, names)),
        Section("Where this comes from", source_parts(found, remarks)),
    ]
    return page(title, sections, summary(runs))


SENTENCES = ("infeasible", "refusal", "error")
"""Columns of whole sentences, in which devices may be named: never paths."""


def with_short_paths(runs: Sequence[Run]) -> list[Run]:
    """The runs with what all paths of a column have in common, their folder and their ending, left out."""
    cut: dict[str, tuple[int, int]] = {}
    for key in dict.fromkeys(key for run in runs for key in run.row):
        if key in SENTENCES:
            continue
        values = list(dict.fromkeys(run.row[key] for run in runs if run.row.get(key) is not None))
        if len(values) > 1 and all(isinstance(value, str) and "/" in value for value in values):
            folders = list(PurePath(values[0]).parts[:-1])
            for value in values:
                same = [a == b for a, b in zip(folders, PurePath(value).parts[:-1], strict=False)]
                folders = folders[: [*same, False].index(False)]
            endings = {PurePath(value).suffix for value in values}
            cut[key] = (len("/".join(folders)) + bool(folders), len(endings.pop()) if len(endings) == 1 else 0)
    if not cut:
        return list(runs)
    return [
        replace(
            run, row={key: _cut(value, cut[key]) if key in cut and value is not None else value for key, value in run.row.items()}
        )
        for run in runs
    ]


def _cut(text: str, ends: tuple[int, int]) -> str:
    return text[ends[0] : len(text) - ends[1]]


def by_merit(runs: Sequence[Run]) -> list[Run]:
    """The runs in the order in which they are worth a closer look: measured ones first, then the fastest of each job."""
    ordered = sorted(runs, key=lambda run: -(run.row.get("mfu") or 0.0))
    seen: set[tuple[object, ...]] = set()
    first: list[Run] = []
    later: list[Run] = []
    for run in ordered:
        job = tuple(run.row.get(key) for key in ("cluster", "model", "sequence_length", "global_batch"))
        fresh = job not in seen and run.outcome == "ok"
        seen |= {job} if run.outcome == "ok" else set()
        (first if fresh else later).append(run)
    found = [run for run in first + later if run.closer]
    return sorted(found, key=lambda run: (run.outcome not in ("ok", "not judged"), not run.traces, MEASURED not in run.traces))


def summary(runs: Sequence[Run]) -> str:
    """How many runs there are of which outcome, in one line."""
    outcomes = Counter(run.outcome for run in runs)
    parts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return f"{len(runs)} run{'s' if len(runs) != 1 else ''}" + (f": {parts}" if parts else "")


# --- The table of runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """How a known column is shown: its heading, the factor from the file's unit, and the format of the number."""

    heading: str
    scale: float = 1.0
    form: str = ""


_INPUTS: Mapping[str, _Column] = {
    "cluster": _Column("cluster"),
    "stack": _Column("stack"),
    "model": _Column("model"),
    "sequence_length": _Column("sequence, tokens", form=",d"),
    "global_batch": _Column("global batch", form=",d"),
    "precision": _Column("precision"),
    "gradient_precision": _Column("gradients"),
    "optimizer": _Column("optimizer"),
    "zero_stage": _Column("ZeRO"),
    "sequence_parallel": _Column("sequence parallel"),
    "context_parallel": _Column("context parallel"),
    "sequence_slices": _Column("slices of a sequence"),
    "expert_parallel": _Column("expert parallel"),
    "expert_tensor_parallel": _Column("tensor ranks of an expert"),
    "offload_optimizer": _Column("optimizer in hosts"),
    "planner": _Column("planner"),
    "schedule": _Column("schedule"),
    "objective": _Column("objective"),
    "judge": _Column("judge"),
    "jitter": _Column("jitter, %", 100, "g"),
    "repeats": _Column("repeats", form="d"),
    "seed": _Column("seed", form="d"),
    "budget_s": _Column("budget, s", form="g"),
    "origin": _Column("origin"),
}
_OF_CLUSTERS: Mapping[str, _Column] = {
    "gpus": _Column("GPUs", form=",d"),
    "node_bytes_per_s": _Column("network of a node, Gbit/s", 8e-9, ".4g"),
}
"""What the cluster's name and the labels of a sweep mean; after these, because it follows from them."""
_RESULTS: Mapping[str, _Column] = {
    "iteration_s": _Column("iteration, s", form=".4g"),
    "in_step_s": _Column("in step, s", form=".4g"),
    "least_s": _Column("least, s", form=".4g"),
    "most_s": _Column("most, s", form=".4g"),
    "tokens_per_s": _Column("tokens/s", form=",.0f"),
    "mfu": _Column("MFU, %", 100, ".2f"),
    "hfu": _Column("HFU, %", 100, ".2f"),
    "mfu_used": _Column("MFU of used, %", 100, ".2f"),
    "bubble": _Column("bubble, %", 100, ".1f"),
    "ratio_to_best": _Column("to the best", form=".3f"),
    "peak_bytes": _Column("peak memory, GiB", 1 / GIB, ".1f"),
    "memory_headroom": _Column("memory left, %", 100, ".1f"),
    "energy_j": _Column("energy, kJ", 1e-3, ",.4g"),
    "dollars": _Column("$/iteration", form=".3g"),
    "gpus_used": _Column("GPUs used", form=",d"),
    "dollars_per_billion_tokens": _Column("$ per 1e9 tokens", form=",.4g"),
    "joules_per_token": _Column("J per token", form=".4g"),
    "judged": _Column("plans judged", form=",d"),
    "search_s": _Column("search, s", form=".3g"),
    "found_s": _Column("found, s", form=".3g"),
    "stopped": _Column("search ended"),
    "stands_in": _Column("another planner's plan"),
    "wall_s": _Column("took, s", form=".3g"),
}
_TOLD_ELSEWHERE = frozenset({"run", "plan", "middle_seed", "version", "infeasible", "reason", "refusal", "error"})
_LONGEST = 80
"""Characters of a value that still stands in the table, of a column that is not known here."""
_ALWAYS = ("iteration_s", "mfu")


def keys_of(runs: Sequence[Run]) -> list[str]:
    """The keys by which the rows are known on the page: r0, r1, ..."""
    return [f"r{i}" for i in range(len(runs))]


def labels(runs: Sequence[Run]) -> list[str]:
    """What tells each run from the others: as many of the inputs in which they differ as it takes, or else its file."""
    found = [""] * len(runs)
    for key in (key for key in _inputs(runs) if _differs(runs, key)):
        longer = [_joined(text, _told(key, run.row.get(key))) for text, run in zip(found, runs, strict=True)]
        if len(set(longer)) > len(set(found)):
            found = longer
    counts = Counter(found)
    files = Counter(run.name for run in runs)
    return [
        text if text and counts[text] == 1 else _joined(text, run.name if files[run.name] == 1 else f"run {i + 1}")
        for i, (text, run) in enumerate(zip(found, runs, strict=True))
    ]


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _inputs(runs: Sequence[Run]) -> list[str]:
    """The columns of inputs: those that are known, and then the others that occur, in the order of the file."""
    occurring = list(dict.fromkeys(key for run in runs for key in run.row))
    known = {*_INPUTS, *_OF_CLUSTERS, *_RESULTS, *_TOLD_ELSEWHERE}
    others = [key for key in occurring if key not in known and _is_shown(runs, key)]
    return [*(key for key in _INPUTS if key in occurring), *others, *(key for key in _OF_CLUSTERS if key in occurring)]


def _is_shown(runs: Sequence[Run], key: str) -> bool:
    """Whether a column that is not known here holds short values, and is no number or digest that each run has one of."""
    values = [run.row[key] for run in runs if run.row.get(key) is not None]
    if not values or any(isinstance(value, dict | list | tuple) or len(str(value)) > _LONGEST for value in values):
        return False
    own_each = len(runs) > 2 and len(set(map(str, values))) == len(runs)
    return not (own_each and any(isinstance(value, str) for value in values))


def _differs(runs: Sequence[Run], key: str) -> bool:
    return len({str(run.row.get(key)) for run in runs}) > 1


def _is_mfu(runs: Sequence[Run], key: str) -> bool:
    """Whether a kind of MFU is that of all GPUs, and without recomputation, in every run."""
    return key in ("hfu", "mfu_used") and all(run.row.get(key) == run.row.get("mfu") for run in runs)


def _column(key: str) -> _Column:
    """How a column is shown; the unit of one that is not known stands in its name, as everywhere in Motley."""
    known = _INPUTS.get(key) or _OF_CLUSTERS.get(key) or _RESULTS.get(key)
    if known is not None:
        return known
    for ending, column in (
        ("_bytes_per_s", _Column(", GB/s", 1e-9, ".4g")),
        ("_bytes", _Column(", GiB", 1 / GIB, ".3g")),
        ("_s", _Column(", s", form=".4g")),
    ):
        if key.endswith(ending):
            return _Column(key.removesuffix(ending).replace("_", " ") + column.heading, column.scale, column.form)
    return _Column(key.replace("_", " ").removeprefix("input."))


def _cell(key: str, value: Any) -> Cell:
    """The cell of a value; '-' where there is none."""
    if value is None or value == "":
        return Cell("-")
    column = _column(key)
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if not isinstance(value, int | float):
        return Cell(str(value))
    scaled = value * column.scale
    if column.form.endswith("d") and scaled != int(scaled):
        return Cell(f"{scaled:g}", scaled)
    return Cell(f"{int(scaled):{column.form}}" if column.form.endswith("d") else f"{scaled:{column.form or 'g'}}", scaled)


def _told(key: str, value: Any) -> str:
    """A value of an input in words: what does not speak for itself stands beside its name. Empty where there is none."""
    if value is None or value == "":
        return ""
    text = _cell(key, value).text
    what, _, unit = _column(key).heading.partition(", ")
    return text if isinstance(value, str) else f"{what} {text} {unit}".rstrip()


def run_parts(runs: Sequence[Run]) -> list[Part]:
    """What all runs have in common, and the table of what differs and what came of it."""
    if not runs:
        return []
    inputs = _inputs(runs)
    varying = [key for key in inputs if _differs(runs, key)]
    common = [
        (_column(key).heading, _cell(key, value).text)
        for key in inputs
        if key not in varying and (value := runs[0].row.get(key)) is not None
    ]
    results = [
        key
        for key in _RESULTS
        if key in _ALWAYS
        or (
            any(isinstance(run.row.get(key), str | int | float) for run in runs)
            and _differs(runs, key)
            and not _is_mfu(runs, key)
        )
    ]
    outcome = len({run.outcome for run in runs}) > 1
    files = len({run.name for run in runs}) > 1
    headings = ["run", *(_column(key).heading for key in varying)]
    headings += [*(["outcome"] if outcome else []), *(_column(key).heading for key in results), *(["file"] if files else [])]
    rows = []
    for key, run in zip(keys_of(runs), runs, strict=True):
        number = int(key[1:]) + 1
        row = [Cell(str(number), number, opens=_look_key(key) if run.closer else "")]
        row += [_cell(name, run.row.get(name)) for name in varying]
        row += [Cell(run.outcome, tone="" if run.outcome in ("ok", "not judged") else "bad")] if outcome else []
        row += [_cell(name, value if isinstance(value := run.row.get(name), str | int | float) else None) for name in results]
        row += [Cell(run.name)] if files else []
        rows.append(row)
    few = [key for key in varying if len({str(run.row.get(key)) for run in runs}) <= min(MOST_CHOICES, len(runs) - 1)]
    table = Table(
        RUNS,
        headings,
        rows,
        search=True,
        choose=[*(_column(key).heading for key in few[:MOST_LISTS]), "outcome"],
        keys=keys_of(runs),
        noun="runs",
    )
    return [*([Note("Of all runs:", tuple(common))] if common and len(runs) > 1 else []), table]


def mfu_parts(runs: Sequence[Run], names: Sequence[str]) -> list[Part]:
    """A bar for every run that has an MFU, with its HFU behind."""
    shown = [(i, run) for i, run in enumerate(runs) if run.row.get("mfu") is not None]
    if not shown:
        return []
    top = max(max(run.row["mfu"], run.row.get("hfu") or 0.0) for _, run in shown)
    end = next((step for step in (0.01, 0.02, 0.05, *(k / 10 for k in range(1, 10))) if top <= step), max(1.0, top))
    bars = []
    for i, run in shown:
        mfu, hfu = run.row["mfu"], run.row.get("hfu")
        text = f"{mfu * 100:.1f} %" + (f" ({hfu * 100:.1f})" if hfu is not None and round(hfu - mfu, 4) else "")
        bars.append(Bar(names[i], mfu / end, text, behind=None if hfu is None else hfu / end, key=f"r{i}"))
    best = max(shown, key=lambda entry: float(entry[1].row["mfu"]))
    alt = f"MFU of {len(bars)} runs, the highest {best[1].row['mfu'] * 100:.1f} % of {names[best[0]]}"
    recomputes = any(bar.behind is not None and bar.behind > bar.fraction for bar in bars)
    legend = (("plain", "MFU"), ("behind", "HFU (in brackets)")) if recomputes else ()
    caption = f"The bars' full length is {end * 100:g} %. They follow the filter and the order of the table."
    return [Bars(alt, bars, caption, legend, follows=RUNS, most=MOST_BARS)]


# --- Searches --------------------------------------------------------------------------------------------------------


def quality_parts(found: Findings) -> list[Part]:
    """A picture for every cluster and model whose searches have a history."""
    if not found.history:
        return []
    from experiments.curves import Curve, Panel, draw_quality  # imports matplotlib, which only this needs

    jobs = list(dict.fromkeys(map(_search_of, found.history)))
    models = {model for _, model, _ in jobs}
    parts: list[Part] = []
    for job in jobs[:MOST_PANELS]:
        steps: dict[str, dict[Any, list[tuple[float, float]]]] = {}
        for row in found.history:
            if _search_of(row) == job:
                steps.setdefault(str(row["planner"]), {}).setdefault(row.get("seed"), []).append(
                    (row["seconds"], row[MEASURED_IN[job[2]]])
                )
        curves = tuple(
            Curve(planner, tuple(tuple(history) for history in own.values()), _ends_s(found.runs, job[:2], planner, own))
            for planner, own in steps.items()
        )
        title = str(job[0]) + (f", {job[1]}" if len(models) > 1 else "")
        panel = Panel(title, curves)
        with TemporaryDirectory(prefix="motley-report-") as folder:
            path = Path(folder) / "quality.svg"
            draw_quality([panel], path, objective=job[2])
            image = path.read_bytes()
        reached = [
            f"{curve.planner} {panel.best / min(history[-1][1] for history in curve.histories) * 100:.0f} %" for curve in curves
        ]
        parts.append(
            picture_bytes(image, f"Quality of the best plan over seconds of search on {title}; at the end {', '.join(reached)}")
        )
    if len(jobs) > MOST_PANELS:
        parts.append(Note(f"The first {MOST_PANELS} of {len(jobs)} clusters and models."))
    return parts


def _search_of(row: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """The cluster, the model and the objective of a row of a history; older files have no objective, which was throughput."""
    return row["cluster"], row.get("model"), row.get("objective") or "throughput"


def _ends_s(
    runs: Sequence[Run], job: tuple[Any, Any], planner: str, own: Mapping[Any, Sequence[tuple[float, float]]]
) -> tuple[float, ...]:
    """When each seed's search ended, as far as the rows tell; else when it last found something."""
    told = {
        run.row.get("seed"): run.row["search_s"]
        for run in runs
        if (run.row.get("cluster"), run.row.get("model"), run.row.get("planner")) == (*job, planner) and run.row.get("search_s")
    }
    return tuple(float(told.get(seed, steps[-1][0])) for seed, steps in own.items())


# --- A closer look ---------------------------------------------------------------------------------------------------


def _look_key(key: str) -> str:
    return f"look-{key}"


def look_parts(runs: Sequence[Run], names: Sequence[str]) -> list[Part]:
    """Every run that has more than its row, the first ones shown from the beginning, as long as the page stays small."""
    place = {id(run): i for i, run in enumerate(runs)}
    looks: list[Look] = []
    total = without = 0
    for run in by_merit(runs):
        i = place[id(run)]
        parts = _look(run)
        if total + (size := _size(parts)) > MOST_CHARACTERS:
            without += 1
            parts = _look(run, timeline=False)
            size = _size(parts)
        total += size
        looks.append(Look(_look_key(f"r{i}"), f"{i + 1}: {names[i]}", parts, shown=len(looks) < SHOWN))
    if not looks:
        return []
    told = []
    if len(looks) > SHOWN:
        told.append(f"{SHOWN} of {len(looks)}; the others open with a click on their number in the table of runs.")
    if without:
        told.append(f"Of {without} runs the timelines and links are left out, to keep the page small.")
    return [*([Note(" ".join(told))] if told else []), Looks(looks)]


def _size(parts: Sequence[object]) -> int:
    """About how many characters of HTML the parts are."""
    return sum(len(p.markup) if isinstance(p, Html) else 220 * len(p.bars) if isinstance(p, Bars) else 600 for p in parts)


def _look(run: Run, timeline: bool = True) -> list[Note | Table | Bars | Picture | Html]:
    """The parts of one run."""
    parts: list[Note | Table | Bars | Picture | Html] = [Note("" if run.plan is None else plan_title(run.plan), _facts(run))]
    if run.why_not:
        parts.append(Note(f"It has no result: {run.why_not}"))
    if run.plan is not None:
        parts += [heading("The plan: which GPUs hold which layers"), plan_rows(run.plan, run.cluster)]
    if run.peaks:
        parts += [heading("Memory at its peak"), memory_bars(run)]
    if run.traces and timeline:
        parts += [heading("One iteration"), timelines([(_trace_title(run, side, trace), trace) for side, trace in _sides(run)])]
    if timeline and any(link.num_bytes > 0 for link in run.links):
        parts += [heading("Links, the busiest first"), link_bars(run)]
    return parts


def _sides(run: Run) -> list[tuple[str, Trace]]:
    """The traces, the measured one first."""
    return [(side, run.traces[side]) for side in (MEASURED, SIMULATED) if side in run.traces]


def _trace_title(run: Run, side: str, trace: Trace) -> str:
    """Whether the iteration is a measured one, and how long it took; where the run's report is known, beside the median step."""
    title, told_s = f"{trace.origin}: {seconds(trace.iteration_s)}", run.row.get("iteration_s")
    measured_s = run.traces[MEASURED].iteration_s if MEASURED in run.traces else None
    all_steps = bool(run.told.get("losses")) and told_s is not None and told_s != measured_s
    if side == MEASURED and all_steps:
        title += f" from the first lane's start to the last one's end; a step takes {seconds(told_s)} (median)"
    other_s = told_s if measured_s is None or all_steps else measured_s
    if side == SIMULATED and other_s and abs(trace.iteration_s / other_s - 1) > 1e-6:
        of = "the median step" if all_steps else "the measured one" if measured_s is not None else "what its row says"
        title += f" ({(trace.iteration_s / other_s - 1) * 100:+.1f} % of {of})"
    if trace.jitter > 0:
        title += f", on devices whose speeds differ by {100 * trace.jitter:g} %"
    return title + (", simulated for this page" if side == SIMULATED and run.simulated_here else "")


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    """The measures of a run, those that are known."""
    row = run.row
    shown: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("iteration", "iteration_s", seconds),
        ("tokens/s", "tokens_per_s", lambda value: f"{value:,.0f}"),
        ("MFU", "mfu", per_cent),
        ("HFU", "hfu", per_cent),
        ("MFU of the GPUs used", "mfu_used", per_cent),
        ("bubble", "bubble", per_cent),
        ("energy of an iteration", "energy_j", energy),
        ("cost of an iteration", "dollars", money),
    )
    return tuple((name, form(row[key])) for name, key, form in shown if row.get(key) is not None)


def memory_bars(run: Run) -> Bars:
    """How full the memory of each GPU was at its peak: one bar for equal neighbours; measured, with the simulated peak behind."""
    side = MEASURED if MEASURED in run.peaks else SIMULATED
    peaks, other = run.peaks[side], run.peaks.get(SIMULATED) if side == MEASURED else None
    capacity = {name: run.cluster.device(name).gpu.memory_bytes for name in peaks} if run.cluster is not None else {}
    largest = max([*peaks.values(), *(other or {}).values(), 1])
    order = {device.name: i for i, device in enumerate(run.cluster.devices)} if run.cluster is not None else {}
    names = sorted(peaks, key=lambda name: (order.get(name, 0), natural(name)))
    bars = []
    for group in alike(names, lambda name: (name.rpartition("/")[0], peaks[name], capacity.get(name), (other or {}).get(name))):
        first = group[0]
        whole = capacity.get(first) or largest
        filled = peaks[first] / whole
        text = memory(peaks[first]) + (f" of {memory(capacity[first])}" if capacity else "")
        tone = "" if not capacity or filled <= NEARLY_FULL else "full" if filled <= 1 else "over"
        kind = f" {run.cluster.device(first).gpu.name}" if run.cluster is not None else ""
        label = short_devices(tuple(group)) + kind + (" (each)" if len(group) > 1 else "")
        bars.append(Bar(label, filled, text, behind=None if not other else other.get(first, 0) / whole, tone=tone))
    legend = [("plain", f"{side} peak")] if other else []
    hidden = {bar.hides_behind for bar in bars} if other else set()
    legend += [("behind", "simulated peak")] if False in hidden else []
    legend += [("mark", "simulated peak" + (", where it is less" if False in hidden else ""))] if True in hidden else []
    legend += [
        (tone, words)
        for tone, words in (("full", f"more than {NEARLY_FULL * 100:.0f} % full"), ("over", "more than there is"))
        if any(bar.tone == tone for bar in bars)
    ]
    fullest = max(bars, key=lambda bar: bar.fraction)
    caption = "" if capacity else "How much memory the GPUs have is not known here: --cluster FILE tells it."
    return Bars(f"Peak memory of {len(names)} GPUs, the fullest {fullest.label}: {fullest.text}", bars, caption, legend, most=24)


def link_bars(run: Run) -> Bars:
    """The share of its capacity that each link carried over the iteration, of the busiest links."""
    used = sorted((link for link in run.links if link.num_bytes > 0), key=lambda link: (-link.utilisation, link.name))
    kinds: dict[tuple[float, float, str], list[str]] = {}
    for link in used:
        alike_ones = (round(link.utilisation, 4), link.num_bytes, re.sub(r"\d+", "#", link.name))
        kinds.setdefault(alike_ones, []).append(link.name)
    bars = [
        Bar(
            members[0] + (f" and {len(members) - 1} like it" if len(members) > 1 else ""),
            use,
            f"{use * 100:.2f} %, {_bytes(num_bytes)}",
        )
        for (use, num_bytes, _), members in kinds.items()
    ]
    quiet = len(run.links) - len(used)
    caption = "Bytes of one iteration over what the link can carry in that time; each direction is a link of its own."
    caption += f" {quiet} links carried nothing." if quiet else ""
    return Bars(f"Use of {len(used)} links, the busiest {bars[0].label}: {bars[0].text}", bars, caption, most=MOST_LINKS)


def _bytes(count: float) -> str:
    """Bytes in decimal units, as rates of links are."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


# --- Errors ----------------------------------------------------------------------------------------------------------


def error_parts(runs: Sequence[Run], names: Sequence[str]) -> list[Part]:
    """A row for every quantity that was both measured and simulated, and the error of all iterations together."""
    rows: list[list[Cell | str]] = []
    errors = []
    for i, run in enumerate(runs):
        for quantity, measured, simulated, form in _both(run):
            error = simulated / measured - 1
            if quantity == "iteration":
                errors.append(error)
            rows.append(
                [
                    Cell(names[i], opens=_look_key(f"r{i}") if run.closer else ""),
                    quantity,
                    Cell(form(measured), measured),
                    Cell(form(simulated), simulated),
                    Cell(f"{round(error * 100, 1) + 0.0:+.1f}", error),  # no minus before a zero
                ]
            )
    if not rows:
        return []
    parts: list[Part] = [Table("errors", ("run", "quantity", "measured", "simulated", "error, %"), rows, search=len(rows) > 20)]
    if errors:
        mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
        parts.insert(
            0,
            Note(f"Iterations: mean error {mean * 100:.1f} %, bias {bias * 100:+.1f} %, of {len(errors)} measured."),
        )
    return parts


def _both(run: Run) -> list[tuple[str, float, float, Callable[[float], str]]]:
    """What of a run was measured and simulated: in words, both figures, and how they are written."""
    told = run.simulated
    if not told and MEASURED in run.traces and SIMULATED in run.traces:
        told = {"iteration_s": run.traces[SIMULATED].iteration_s}
    forms: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("iteration", "iteration_s", seconds),
        ("bubble", "bubble", per_cent),
    )
    found = [
        (heading, float(run.row[key]), float(told[key]), form)
        for heading, key, form in forms
        if run.row.get(key) and told.get(key) is not None
    ]
    measured, simulated = run.peaks.get(MEASURED), run.peaks.get(SIMULATED)
    if measured and simulated:
        fullest = max(measured, key=lambda name: measured[name])
        if simulated.get(fullest) and measured[fullest]:
            found.append((f"peak memory of {fullest}", float(measured[fullest]), float(simulated[fullest]), memory))
    return found


def validation_parts(validations: Mapping[str, Mapping[str, Any]]) -> list[Part]:
    """The tables of errors that `motley validate --json` wrote, source by source, and predicted over measured times."""
    parts: list[Part] = []
    for i, (name, told) in enumerate(validations.items()):
        cells = source_cells(told["sources"], told["overall"])
        parts.append(Table(f"validation-{i}", cells[0], cells[1:], caption=f"Errors by source ({name})"))
        points = [row for row in told["runs"] if row.get("quantity") == TIME and row.get("predicted") and row.get("measured")]
        if points:
            parts.append(_parity(points, name))
    return parts


def _parity(points: Sequence[Mapping[str, Any]], name: str) -> Picture:
    from experiments.pictures import draw_parity
    from experiments.plots import ParityPoint

    drawn = [ParityPoint(row["source_key"], row["measured"], row["predicted"]) for row in points]
    with TemporaryDirectory(prefix="motley-report-") as folder:
        path = Path(folder) / "parity.svg"
        draw_parity(drawn, path, "Iteration times, predicted over measured")
        image = path.read_bytes()
    near = sum(abs(point.predicted_s / point.measured_s - 1) <= 0.1 for point in drawn)
    return picture_bytes(image, f"Predicted over measured iteration times of {len(drawn)} runs ({name}); {near} within 10 %")


def failure_parts(runs: Sequence[Run], names: Sequence[str]) -> list[Part]:
    """A row for every kind of reason, those of most runs first: reasons that differ in their numbers only are of one kind."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(runs):
        if run.outcome not in ("ok", "not judged"):
            kinds.setdefault((run.outcome, re.sub(r"[\d.,]+", "#", run.why_not)), []).append(i)
    rows: list[list[Cell | str]] = []
    for (outcome, _), members in sorted(kinds.items(), key=lambda entry: -len(entry[1])):
        first = members[0]
        which = names[first] + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        rows.append(
            [Cell(outcome, tone="bad"), Cell(str(len(members)), len(members)), runs[first].why_not or "no reason is told", which]
        )
    return [Table("failures", ("outcome", "runs", "reason (of the first)", "which"), rows)] if rows else []


def source_parts(found: Findings, remarks: Sequence[str]) -> list[Part]:
    """The files that were read, and what could not be told."""
    files = list(found.read)
    listed = ", ".join(map(str, files[:20])) + (f" and {len(files) - 20} more" if len(files) > 20 else "")
    parts: list[Part] = [Note(f"Read: {listed}.")]
    if found.passed_over:
        parts.append(Note(f"Passed over, as nothing of Motley's: {', '.join(map(str, found.passed_over[:20]))}."))
    parts += [Note(remark) for remark in remarks]
    return parts
