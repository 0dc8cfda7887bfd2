"""Tables for people: a plan, an iteration, a run, planners and sources side by side. Per cent, GiB and ms live here only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from experiments.agreement import MEMORY, TIME, Comparison, FitCheck, fit_summary, summary
from experiments.alternatives import Alternative
from experiments.assumptions import DISREGARDED
from experiments.explain import Effect, Explanation, OneMore
from experiments.measured import RunReport
from experiments.repeats import Spread
from partition.objective import Outlay
from partition.search import Result
from sim.cost.memory import host_bytes
from sim.critical import CriticalPath, Share
from sim.metrics import Report, Training
from sim.spec.cluster import Cluster, Device
from sim.spec.compile import lane_name
from sim.spec.counts import masked_share
from sim.spec.gpu import PRECISIONS
from sim.spec.judge import Infeasible
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.schedules import held_by
from sim.spec.trace import short_devices

if TYPE_CHECKING:
    from experiments.fidelity import Replay  # it would import what only one command needs
    from experiments.plots import MfuCell  # it would import matplotlib

GIB = 2**30

MOST_LANES = 40
"""Above this many lanes, pipelines that are alike are shown once."""

NEARLY_FULL = 0.95


def _table(apart: int = 2) -> Table:
    """A table without rows, with so many spaces between its columns."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, apart - 1, 0, 0))


def _longest_word(texts: Iterable[str]) -> int:
    """Letters of the longest word."""
    return max((len(word) for text in texts for word in text.split()), default=0)


def _titled(title: str, table: Table | _Folded) -> Group:
    """The table below its title, which may be as wide as the console, and not only as the table."""
    return Group(Text(title, style="bold"), table)


# --- Figures ---------------------------------------------------------------------------------------------------------


def seconds(value_s: float | None) -> str:
    """Seconds with four digits, in the unit that suits them."""
    if value_s is None:
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value_s * factor >= 1:
            return f"{value_s * factor:.4g} {unit}" if value_s < 1000 else f"{value_s:,.0f} s"
    return f"{value_s * 1e6:.4g} µs"


def per_cent(fraction: float | None, digits: int = 2) -> str:
    """A fraction in per cent."""
    return "-" if fraction is None else f"{fraction * 100:.{digits}f} %"


def memory(num_bytes: float | None) -> str:
    """Bytes with three digits, in the unit that suits them."""
    if num_bytes is None:
        return "-"
    return f"{num_bytes / GIB:.3g} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.3g} MiB"


def energy(value_j: float | None) -> str:
    """Joules with three digits, in the unit that suits them."""
    if value_j is None:
        return "-"
    for factor, unit in ((1e-9, "GJ"), (1e-6, "MJ"), (1e-3, "kJ")):
        if value_j * factor >= 1:
            return f"{value_j * factor:.3g} {unit}"
    return f"{value_j:.3g} J"


def money(dollars: float | None) -> str:
    """Dollars with three digits."""
    if dollars is None:
        return "no price known"
    return f"${dollars:,.2f}" if dollars >= 10 else f"${dollars:.3g}"


MASKED = 0.1
"""From this share on it is told what of the FLOP a causal mask leaves out."""

WHOLE = 0.95
"""A search that took this part of its budget is said to have taken all of it."""


def how_it_ended(result: Result, budget_s: float) -> str:
    """How a search ended, and whether another machine would answer the same."""
    if result.stopped == "finished":
        return f"finished after {result.seconds:.3g} s of its budget of {budget_s:g} s: the same answer on every machine"
    if result.stopped == "budget":
        other = "a faster or slower machine may find another answer"
        if result.seconds < WHOLE * budget_s:  # shares of it ended some steps, and others did not need theirs
            return f"ended after {result.seconds:.3g} s of its budget of {budget_s:g} s, which cut some steps short: {other}"
        return f"stopped at its budget of {budget_s:g} s: {other}"
    return f"interrupted after {result.seconds:.3g} s: this is the best plan until then"


# --- A plan ----------------------------------------------------------------------------------------------------------


def plan_title(plan: Plan) -> str:
    """What a plan trains where, and how, on one line."""
    facts = [
        f"{plan.transformer.name} on {plan.cluster}",
        f"{plan.global_batch} x {plan.sequence_length} tokens",
        plan.job().precisions,
        plan.schedule,
        f"ZeRO {plan.zero_stage}",
    ]
    if plan.sequence_slices > 1:
        facts.append(f"sequences in {plan.sequence_slices} slices")
    if plan.sequence_parallel:
        facts.append("sequence parallel")
    for name, degree in (("context", plan.context_parallel), ("expert", plan.expert_parallel)):
        if degree > 1:
            facts.append(f"{name} parallel {degree}")
    if plan.whole_experts:
        facts.append("whole experts on each tensor rank")
    if plan.offload_optimizer:
        facts.append(f"optimizer in hosts (up to {max(host_bytes(plan).values()) / GIB:.1f} GiB)")
    return ", ".join(facts)


def timeline_title(plan: Plan, report: Report) -> str:
    """What a picture of the plan's iteration shows, on two lines."""
    return f"{plan_title(plan)}\n{_iteration_title('simulated', report)}"


def run_titles(told: RunReport) -> tuple[str, str]:
    """What the two pictures of a run's iteration show: the measured one on two lines, the simulated one on one."""
    measured = f"{plan_title(told.result.trace.plan)}\n{_iteration_title(told.trace.origin, told.measured)}"
    if told.simulated is None:
        return measured, ""
    difference = _difference(told.measured.iteration_s, told.simulated.iteration_s)
    return measured, _iteration_title("simulated", told.simulated, f" ({difference})")


def _iteration_title(origin: str, report: Report, remark: str = "") -> str:
    """How long an iteration was and what of its peak it reached."""
    return f"one {origin} iteration of {seconds(report.iteration_s)}{remark}, MFU {per_cent(report.mfu, 1)}"


FOLDED = 14
"""A column of a plan is not folded to fewer letters a line, unless its words are all shorter."""


@dataclass(frozen=True)
class _Folded:
    """The first of three tables that the console has room for, which `made` gives: for so many letters to which words may be
    folded, and spaces between columns. The last may be folded as far as it takes."""

    made: Callable[[int, int], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """The table for so many columns."""
        for apart in (2, 1):
            table = self.made(FOLDED, apart)
            if Measurement.get(console, options.update(max_width=MOST_WIDTH), table).minimum <= options.max_width:
                yield table
                return
        yield self.made(1, 1)


MOST_WIDTH = 10_000
"""A console that has room for every table."""


def plan_table(plan: Plan, cluster: Cluster, peak_bytes: Mapping[str, int] | None = None, headroom: bool = False) -> Group:
    """One row per lane: its devices, their kinds and number, layers, recompute, and the fullest device's peak and capacity.

    Where stages say how many micro-batches they hold, these are shown, too, or slices of them. With `headroom` (and peaks), also
    the share of that device's memory that is left.
    Pipelines of several stages are parted by blank lines; the micro-batches stand in each one's first row. Of a plan with
    more than MOST_LANES lanes, pipelines that differ only in their devices' names are shown once. Raises InputError for
    devices the cluster has not.
    """
    for name in plan.devices:
        cluster.device(name)
    return _titled(plan_title(plan), _Folded(lambda *room: _plan_table(plan, cluster, peak_bytes, headroom, *room)))


def _plan_table(
    plan: Plan, cluster: Cluster, peak_bytes: Mapping[str, int] | None, headroom: bool, least: int, apart: int
) -> Table:
    """The table whose columns are not folded to fewer than `least` letters, unless their words are all shorter."""
    table = _table(apart)
    for heading in ("lane", "micro-\nbatches"):
        table.add_column(heading, no_wrap=True)
    replicas = [(stage, replica) for pipeline in plan.pipelines for stage in pipeline.stages for replica in stage.replicas]
    # Where there is no room for all of it these are folded, but not to a few letters a line.
    folded = {
        "devices": [short_devices(replica.devices) for _, replica in replicas],
        "GPUs": [_kinds(replica.devices, cluster) for _, replica in replicas],
        "layers": [_layers(stage) for stage, _ in replicas],
        "recom-\npute": [_recompute(stage) for stage, _ in replicas],
    }
    for heading, cells in folded.items():
        table.add_column(heading, overflow="fold", min_width=min(_longest_word((*cells, heading)), least))
    if plan.holds_its_own:
        heading = "in\nflight" if plan.sequence_slices == 1 else "slices\nin flight"
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("peak GiB\nof memory", justify="right", no_wrap=True)
    if headroom:
        table.add_column("left\n%", justify="right", no_wrap=True)
    lanes = sum(1 for _ in plan.replicas())
    groups: dict[object, list[int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        groups.setdefault(_form(pipeline, cluster) if lanes > MOST_LANES else p, []).append(p)
    for members in groups.values():
        _add_pipeline(table, plan, cluster, members, peak_bytes, headroom)
    return table


def _form(pipeline: Pipeline, cluster: Cluster) -> object:
    """What two pipelines that are alike have in common."""

    def replica_form(replica: Replica) -> object:
        return replica.sequences, tuple(cluster.device(name).gpu.name for name in replica.devices)

    stages = tuple((replace(stage, replicas=()), *map(replica_form, stage.replicas)) for stage in pipeline.stages)
    return pipeline.micro_batch, pipeline.micro_batches, stages


def _add_pipeline(
    table: Table, plan: Plan, cluster: Cluster, members: Sequence[int], peak_bytes: Mapping[str, int] | None, headroom: bool
) -> None:
    """Adds the rows of pipelines that are alike, with the devices of the first."""
    first = members[0]
    pipeline = plan.pipelines[first]
    place = {s: position for position, s in enumerate(pipeline.visiting_order)}
    batches = f"{pipeline.micro_batches} x {pipeline.micro_batch}"
    if len(members) > 1:
        batches += f"\n{len(members)} alike"
    for s, stage in enumerate(pipeline.stages):
        for r, replica in enumerate(stage.replicas):
            others = [plan.pipelines[p].stages[s].replicas[r].devices for p in members]
            share = "" if len(stage.replicas) == 1 else f" ({replica.sequences} of {pipeline.micro_batch})"
            table.add_row(
                lane_name(first, s, r, len(stage.replicas)),
                batches,
                short_devices(replica.devices) + ("" if len(members) == 1 else " ..."),
                _kinds(replica.devices, cluster) + share,
                _layers(stage),
                _recompute(stage),
                *([_held(plan, pipeline, place[s])] if plan.holds_its_own else ()),
                *_memory([name for devices in others for name in devices], cluster, peak_bytes, headroom),
            )
            batches = ""
    if len(pipeline.stages) > 1:
        table.add_section()


def _held(plan: Plan, pipeline: Pipeline, position: int) -> str:
    """How many micro-batches, or slices of them, the stage at a position holds at most."""
    return f"{held_by(plan.schedule, pipeline, position, slices=plan.sequence_slices):.0f}"


def _kinds(devices: Sequence[str], cluster: Cluster, joint: str = " + ") -> str:
    """The kinds of the devices and how many there are of each, as in '4 x RTX4090 + 8 x T4'."""
    kinds = [cluster.device(name).gpu.name for name in devices]
    return joint.join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _layers(stage: Stage) -> str:
    """The first and last layer of each of the stage's ranges."""
    shown = [f"{start}-{stop - 1}" if stop > start + 1 else f"{start}" for start, stop in stage.layers if start < stop]
    return ", ".join(shown) or "none"


def _recompute(stage: Stage) -> str:
    """The stage's recompute mode, with the number of layers where it is not all of them."""
    return stage.recompute_words


def _memory(devices: Sequence[str], cluster: Cluster, peak_bytes: Mapping[str, int] | None, headroom: bool) -> list[Text]:
    """Peak and capacity of the fullest device (without peaks the least capacity alone); if asked, what is left in per cent."""
    capacities = {name: cluster.device(name).gpu.memory_bytes for name in devices}
    if peak_bytes is None:
        return [Text(f"{min(capacities.values()) / GIB:.1f}")]
    fullest = max(devices, key=lambda name: peak_bytes[name] / capacities[name])
    peak, capacity = peak_bytes[fullest], capacities[fullest]
    style = "red" if peak > capacity else "yellow" if peak > NEARLY_FULL * capacity else ""
    shown = [Text(f"{peak / GIB:.1f}/{capacity / GIB:.1f}", style=style)]
    return [*shown, Text(f"{(1 - peak / capacity) * 100:.0f}", style=style)] if headroom else shown


# --- Measures --------------------------------------------------------------------------------------------------------


def report_table(report: Report, plan: Plan, cluster: Cluster) -> Table:
    """The measures of one iteration, two a row."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify=justify)
    table.add_row("iteration", seconds(report.iteration_s), "tokens/s", _tokens(report.tokens_per_s))
    table.add_row("MFU", per_cent(report.mfu), "HFU (counts recomputation)", per_cent(report.hfu))
    used = f"MFU of the {len(plan.devices)} GPUs used, of {len(cluster.devices)}"
    table.add_row("bubble", per_cent(report.bubble), used, per_cent(report.mfu_used))
    spent = f"cost of an iteration, all {len(cluster.devices)} GPUs"
    table.add_row("energy", energy(report.energy_j), spent, money(report.dollars))
    if (interval := report.iteration_interval_s) is not None and (calibration := cluster.calibration) is not None:
        told = f"expected in {per_cent(calibration.coverage, 0)} of runs"
        table.add_row("interval", f"{seconds(interval[0])} to {seconds(interval[1])}", told, "")
    return table


def attention_line(report: Report, plan: Plan) -> str | None:
    """What of the FLOP that a utilisation counts no causal kernel computes; None where that is too little to matter.

    For it a utilisation may be above 1.
    """
    share = masked_share(plan.transformer, plan.sequence_length)
    if share < MASKED or report.mfu is None:
        return None
    without = per_cent(report.mfu * (1 - share))
    return f"{per_cent(share, 0)} of the FLOP are causally masked attention, without which MFU is {without}"


LEAST_GAIN = 1e-3
"""The least part of an iteration that is worth a line."""


def changed_line(effect: Effect, before_s: float) -> str | None:
    """What a change would gain; None where it cannot be made, or gains nothing."""
    less = 0.0 if effect.iteration_s is None else 1 - effect.iteration_s / before_s
    if less < LEAST_GAIN:
        return None
    return f"{effect.name}, an iteration would take {seconds(effect.iteration_s)} (-{per_cent(less)})"


def training_line(training: Training, devices: int) -> str:
    """What a whole training takes, on one line."""
    spent = ", no price known" if training.dollars is None else f", {money(training.dollars)}"
    used = "" if training.energy_kwh is None else f", {_digits(training.energy_kwh)} kWh"
    return (
        f"training on {training.tokens:.4g} tokens: {training.iterations:,} iterations, {_digits(training.days)} days"
        f"{spent}{used} (all {devices} devices)"
    )


def spread_line(spread: Spread) -> str:
    """The iterations on devices of different speeds, on one line."""
    times = spread.iteration_s
    if len(times) == 1:
        return f"on devices whose speeds differ by {100 * spread.jitter:g} %, drawn with the seed {spread.seed}"
    return (
        f"{len(times)} runs on devices whose speeds differ by {100 * spread.jitter:g} %: iteration {seconds(spread.median_s)} "
        f"(median), {seconds(min(times))} to {seconds(max(times))}, standard deviation "
        f"{per_cent(spread.standard_deviation_s / spread.median_s)}; the figures above are of the run in the middle"
    )


def _digits(value: float) -> str:
    """A number with three digits, and more where it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- A search --------------------------------------------------------------------------------------------------------


def outlay_line(outlay: Outlay, plan: Plan) -> str:
    """What training takes in money and energy, of the GPUs that the plan uses alone."""
    who, joules = f"the {len(plan.devices)} GPUs used", f"{outlay.joules_per_token:.3g} J per token"
    if outlay.dollars_per_hour is None:
        return f"{who} take {joules}; not all GPUs here have a price"
    rent = f"{money(outlay.dollars_per_hour)} per hour, {money(outlay.dollars_per_billion_tokens)} per billion tokens"
    return f"{who} rent for {rent}, and take {joules}"


LEAST_TOLD = 0.0005
"""A part of a gap that is less of the iteration is not told."""


def unused_line(plan: Plan, cluster: Cluster) -> str | None:
    """Which GPUs a plan leaves out, kind by kind, and which of them have not its precision; None where it uses all."""
    used = set(plan.devices)
    left: dict[str, list[Device]] = {}
    for device in cluster.devices:
        if device.name not in used:
            left.setdefault(device.gpu.name, []).append(device)
    told = []
    for kind, devices in left.items():
        gpu = devices[0].gpu
        has = ", ".join(name for name in PRECISIONS if gpu.peak(name) is not None)
        cannot = "" if gpu.peak(plan.precision) is not None else f", which has no {plan.precision} (it has {has})"
        told.append(f"{len(devices)} x {kind} ({short_devices(tuple(device.name for device in devices))}){cannot}")
    return f"not used: {'; '.join(told)}" if told else None


def bound_line(iteration_s: float, bound_s: float, parts: Mapping[str, float]) -> str:
    """How far the plan is from the best possible at most.

    `parts` is what the gap is made of, as fractions of the iteration that sum to it; those that are next to none are left out.
    """
    told = ", ".join(f"{name} {per_cent(part, 1)}" for name, part in parts.items() if abs(part) >= LEAST_TOLD)
    gap = per_cent(1 - bound_s / iteration_s, 1)
    return f"no plan on all GPUs takes less than {seconds(bound_s)}: the gap is {gap} of the iteration" + (
        f" ({told})" if told else ""
    )


def alternatives_table(best: Plan, outlay: Outlay, others: Sequence[Alternative], cluster: Cluster) -> Group:
    """One row for the plan, and one for each of the best plans of other shapes, with what each loses most by."""
    table = _table()
    for heading in ("pipe-\nlines", "stages", "tensor"):
        table.add_column(heading, no_wrap=True)
    gpus = [_kinds(plan.devices, cluster, "\n") for plan in (best, *(other.plan for other in others))]
    # Of a width of its own: rich takes some from each column that can be folded, and then gives back what is below the least.
    lines = [line for text in gpus for line in text.splitlines()]
    table.add_column("GPUs", overflow="fold", width=min(max(map(len, lines)), FOLDED))
    for heading in ("iteration", "$/billion\ntokens", "J/token"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("loses most by", overflow="fold")
    rows = [(best, outlay, "this plan", "")]
    for other in others:
        why = "nothing, as simulated" if other.cause is None else other.cause
        if other.cause_s is not None:
            why += f", {seconds(other.cause_s)} more"
        rows.append((other.plan, other.outlay, _difference(outlay.iteration_s, other.outlay.iteration_s), why))
    for (plan, took, compared, why), kinds in zip(rows, gpus, strict=True):
        table.add_row(
            str(len(plan.pipelines)),
            _span([len(pipeline.stages) for pipeline in plan.pipelines]),
            _tensor(plan),
            kinds,
            f"{seconds(took.iteration_s)}\n{compared}",
            _dollars(took.dollars_per_billion_tokens, 0),
            f"{took.joules_per_token:.3g}",
            why,
        )
    return _titled("The best plans of other shapes that were judged", table)


def _tensor(plan: Plan) -> str:
    """The tensor-parallel degrees of a plan, and the context- and expert-parallel ones where it has those."""
    ranks = plan.context_parallel
    tensor = _span([len(replica.devices) // ranks for _, _, _, replica in plan.replicas()])
    context = f" x {ranks} context" if ranks > 1 else ""
    experts = f"\nexperts {plan.expert_parallel}" if plan.expert_parallel > 1 else ""
    return tensor + context + experts + ("\nwhole" if plan.whole_experts else "")


def front_table(plans: Sequence[tuple[Plan, Outlay]], cluster: Cluster, most: int = 10) -> Group:
    """One row for each plan that no other one dominates in time, dollars and energy; of many, some from all along the front."""
    table = _table()
    table.add_column("GPUs", overflow="fold")
    for heading in ("iteration", "tokens/s", "$/hour", "$/billion\ntokens", "J/token"):
        table.add_column(heading, justify="right", no_wrap=True)
    count = min(most, len(plans))
    chosen = sorted({round(i * (len(plans) - 1) / max(count - 1, 1)) for i in range(count)})
    for plan, outlay in (plans[i] for i in chosen):
        table.add_row(
            _kinds(plan.devices, cluster),
            seconds(outlay.iteration_s),
            _tokens(outlay.tokens_per_s),
            _dollars(outlay.dollars_per_hour, 2),
            _dollars(outlay.dollars_per_billion_tokens, 0),
            f"{outlay.joules_per_token:.3g}",
        )
    some = "" if count == len(plans) else f" ({count} of {len(plans)})"
    return _titled(f"Plans that no other one beats in time, dollars and energy{some}", table)


def _dollars(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _span(values: Sequence[int]) -> str:
    """The least and the largest of some numbers."""
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)}-{max(values)}"


# --- A run -----------------------------------------------------------------------------------------------------------


def run_table(told: RunReport) -> Table:
    """The measures of a run's iteration, beside the simulated ones and how far these are from them, where there are any."""
    plan, measured, simulated = told.result.trace.plan, told.measured, told.simulated
    table = _table()
    table.add_column("", no_wrap=True)
    for heading in (told.trace.origin, "simulated", "difference")[: 3 if simulated is not None else 1]:
        table.add_column(heading, justify="right", no_wrap=True)
    fullest = max(plan.devices, key=lambda name: _fullness(told, name))
    rows: dict[str, tuple[Callable[[Report], float | None], Callable[[float | None], str]]] = {
        "iteration": (lambda report: report.iteration_s, seconds),
        "tokens/s": (lambda report: report.tokens_per_s, _tokens),
        "MFU": (lambda report: report.mfu, per_cent),
        "HFU (counts recomputation)": (lambda report: report.hfu, per_cent),
        "bubble": (lambda report: report.bubble, per_cent),
        f"peak memory of {fullest}": (lambda report: (report.peak_bytes or {}).get(fullest), memory),
    }
    for heading, (measure, shown) in rows.items():
        row = [heading, shown(measure(measured))]
        if simulated is not None:
            row += [shown(measure(simulated)), _difference(measure(measured), measure(simulated))]
        table.add_row(*row)
        if heading == "iteration" and simulated is not None and (interval := simulated.iteration_interval_s) is not None:
            inside = interval[0] <= (measured.iteration_s or 0.0) <= interval[1]
            shown_interval = f"{seconds(interval[0])} to {seconds(interval[1])}"
            table.add_row("  expected between", "", shown_interval, "inside" if inside else "outside")
    return table


def _fullness(told: RunReport, device: str) -> float:
    """The part of a device's memory that it had in use at its peak."""
    return (told.measured.peak_bytes or {}).get(device, 0) / told.cluster.device(device).gpu.memory_bytes


def _tokens(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def _difference(measured: float | None, simulated: float | None) -> str:
    """How far the simulated figure is from the measured one, in per cent of that."""
    if not measured or simulated is None:
        return "-"
    return f"{(simulated - measured) / measured * 100:+.1f} %"


# --- An explanation --------------------------------------------------------------------------------------------------

MOST_SHARES = 12
"""Rows of a critical path; what is left is told together."""


def path_table(path: CriticalPath, plan: Plan, cluster: Cluster) -> Group:
    """One row per cause and place of a critical path, the longest first, with the seconds in which the busiest lane waits."""
    table = _table()
    for heading in ("cause", "where"):
        table.add_column(heading, overflow="fold")
    for heading in ("seconds", "share\n%", "bubble\ns"):
        table.add_column(heading, justify="right", no_wrap=True)
    kinds = {
        lane_name(p, s, r, len(plan.pipelines[p].stages[s].replicas)): _kinds(replica.devices, cluster)
        for p, s, r, replica in plan.replicas()
    }
    shown = path.shares if len(path.shares) <= MOST_SHARES else path.shares[: MOST_SHARES - 1]
    rest = path.shares[len(shown) :]
    for share in shown:
        where = f"{share.place} ({kinds[share.place]})" if share.place in kinds else share.place
        table.add_row(f"{share.cause}: {share.activity}", where, *_path_figures([share], path.iteration_s))
    if rest:
        table.add_row(f"{len(rest)} shorter ones", "", *_path_figures(rest, path.iteration_s))
    return _titled("The critical path", table)


def _path_figures(shares: Sequence[Share], iteration_s: float) -> tuple[str, str, str]:
    """Seconds, share of the iteration and bubble of some parts of a path together."""
    spent_s, bubble_s = sum(share.seconds for share in shares), sum(share.bubble_s for share in shares)
    return seconds(spent_s), f"{spent_s / iteration_s * 100:.1f}", seconds(bubble_s) if bubble_s > 1e-9 * iteration_s else "-"


def path_line(path: CriticalPath) -> str:
    """What a critical path is made of, on one line."""
    causes = {cause: spent_s for cause, spent_s in path.seconds_by_cause.items() if spent_s > 0}
    parts = ", ".join(f"{cause} {per_cent(spent_s / path.iteration_s, 1)}" for cause, spent_s in causes.items())
    bubble = sum(share.bubble_s for share in path.shares) / path.iteration_s
    return f"in all: {parts}; the busiest lane, {path.busiest_lane}, waits for {per_cent(bubble, 1)} of it (bubble)"


MOST_EFFECTS, MOST_REFUSED = 16, 6
"""Rows of the changes that can be made, and lines of those that cannot; the JSON file has all."""


def effects_table(told: Explanation) -> Group:
    """One row per change, those that save most first, with its iteration; below, those that cannot be made."""
    table = _table()
    table.add_column("change", overflow="fold")
    for heading in ("iteration", "saves", "saves\n%"):
        table.add_column(heading, justify="right", no_wrap=True)
    now_s = told.trace.iteration_s
    made = [(effect, effect.iteration_s) for effect in told.effects if effect.iteration_s is not None]
    refused = [effect for effect in told.effects if effect.iteration_s is None]
    # Of many, those in the middle change least.
    least = sorted(range(len(made)), key=lambda i: abs(now_s - made[i][1]))[: max(0, len(made) - MOST_EFFECTS)]
    for effect, iteration_s in (entry for i, entry in enumerate(made) if i not in least):
        saved_s = now_s - iteration_s
        saves = "0 s" if abs(saved_s) < now_s * 5e-7 else seconds(saved_s) if saved_s > 0 else f"-{seconds(-saved_s)}"
        table.add_row(effect.name, seconds(iteration_s), saves, f"{saved_s / now_s * 100 + 0.0:.2f}")
    lines = []
    if least:
        most = max(abs(now_s - made[i][1]) for i in least)
        others = f"{len(least)} other changes alter" if len(least) > 1 else "one other change alters"
        lines.append(f"{others} the iteration by {seconds(most)} at most")
    if told.left_out:
        lines.append(f"{told.left_out} more stages were not tried, which the path is shorter on")
    # Of recomputation there may be many, of experts a few that no other change is like.
    refused.sort(key=lambda effect: {"experts": 0, "recompute": 2}.get(effect.group, 1))
    lines += [f"not possible: {effect.name}: {_refusal(effect)}" for effect in refused[:MOST_REFUSED]]
    if len(refused) > MOST_REFUSED:
        lines.append(f"not possible: {len(refused) - MOST_REFUSED} more, for such reasons")
    return Group(_titled("What one change would gain, simulated", table), *map(Text, lines))


def _refusal(effect: Effect) -> str:
    """Why a change cannot be made, in short."""
    reason = effect.why_not
    if isinstance(reason, Infeasible) and reason.need_bytes is not None and reason.have_bytes is not None:
        return f"{reason.device or 'a host'} lacks {memory(reason.need_bytes - reason.have_bytes)} of memory"
    return effect.reason or ""


def one_more_table(more: Sequence[OneMore], plan: Plan) -> Group:
    """One row per kind: the iteration with one GPU of it more, what that gains, and its price beside it."""
    table = _table()
    table.add_column("one more", overflow="fold")
    table.add_column("in node", overflow="fold")
    for heading in ("iteration", "tokens/s\nmore", "gains\n%", "GPUs\nused", "$/hour", "$/billion\nmore tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    tokens = plan.global_batch * plan.sequence_length
    for gpu in more:
        if gpu.after_s is None:
            table.add_row(gpu.kind, f"{gpu.node}: {gpu.why_not}", *("-",) * 6)
            continue
        gained = tokens / gpu.after_s - tokens / gpu.before_s
        price = gpu.dollars_per_hour
        per_billion = price / 3600 / gained * 1e9 if price is not None and gained > 0 else None
        gains = f"{(gpu.before_s / gpu.after_s - 1) * 100:+.2f}"
        costs = (_dollars(price, 2), _dollars(per_billion, 0))
        table.add_row(gpu.kind, gpu.node, seconds(gpu.after_s), f"{gained:,.0f}", gains, str(gpu.gpus_used), *costs)
    before = seconds(more[0].before_s) if more else "-"
    return _titled(f"What one more GPU is worth, beside the best plan found without it ({before})", table)


# --- Predicted beside reported ---------------------------------------------------------------------------------------


def demo_table(predictions: Sequence[MfuCell]) -> Group:
    """One row per cluster and model: the reported figure, and for each planner its HFU at the publication's peaks and its MFU."""
    planners = list(dict.fromkeys(prediction.planner for prediction in predictions))
    table = _table()
    table.add_column("cluster", no_wrap=True)
    table.add_column("model", no_wrap=True)
    table.add_column("reported", justify="right", no_wrap=True)
    for planner in planners:
        table.add_column(planner, justify="right", no_wrap=True)
    for cell in dict.fromkeys((prediction.cluster, prediction.model) for prediction in predictions):
        own = {prediction.planner: prediction for prediction in predictions if (prediction.cluster, prediction.model) == cell}
        reported = next(iter(own.values())).reported
        best = max((p.mfu for p in own.values() if p.mfu is not None), default=None)
        shown = [_predicted(own.get(planner), best) for planner in planners]
        table.add_row(*cell, f"{reported * 100:.1f}", *shown)
    return _titled(
        "Reported MFU (counts recomputation), and ours: HFU at the publication's peaks / MFU at true peaks, in %", table
    )


def _predicted(prediction: MfuCell | None, best_mfu: float | None) -> Text:
    """The two figures of one planner; bold where no other has a higher MFU."""
    if prediction is None or prediction.mfu is None:
        return Text("no plan")
    hfu = "-" if prediction.hfu_at_paper_peaks is None else f"{prediction.hfu_at_paper_peaks * 100:.1f}"
    return Text(f"{hfu} / {prediction.mfu * 100:.1f}", style="bold" if prediction.mfu == best_mfu else "")


# --- Sources side by side --------------------------------------------------------------------------------------------

Cells = list[tuple[str, ...]]
"""The rows of a table, of which the first holds the headings."""

MOST_REASONS = 12
"""How many reasons are told for which runs were not modelled, the most frequent first; the JSON file has all."""
NAMED = 2
"""So many runs are named for each reason."""

EACH, FARTHEST = 40, 10
"""So many comparisons at most stand one by one; of more those that are farthest off."""

_ERRORS = {
    "mean %": "mean_absolute_relative_error",
    "median %": "median_absolute_relative_error",
    "90th %": "p90_absolute_relative_error",
    "bias %": "bias",
}


def fidelity_cells(told: Replay) -> list[tuple[str, Cells]]:
    """All tables of a replay with their titles; those that would be empty are left out."""
    summaries, overall = told.summaries(), summary(told.held_out)
    judged = ", ".join(f"{count} by {judge}" for judge, count in overall["judges"].items() if judge != "memory")
    fitted = "; of the runs that the constants were not fitted on" if told.calibration_ids else ""
    found = [(f"Errors of iteration times ({judged or 'none'}) and of peak memory{fitted}", source_cells(summaries, overall))]
    if told.calibration_ids:
        title = "The same of the runs that they were fitted on"
        found.append((title, source_cells(told.summaries(calibration=True), summary(told.calibration))))
    found.append(
        ("Runs of which the micro-batch or the interleaving is not published, at the best that fits", assumed_cells(summaries))
    )
    found.append(("Cells that are disregarded, for what was measured contradicts them", disregarded_cells(told.held_out)))
    found.append(("Order of runs that differ in their schedules only, and by more than 3 % of time", pairs_cells(summaries)))
    found.append(("What is said of the memory of runs that ran and that failed", fit_cells(told.held_out_checks)))
    title, cells = run_cells(told.held_out)
    found.append((f"{title}{fitted}", cells))
    found.append(("Runs that are not modelled", reason_cells(told.held_out)))
    return [(title, cells) for title, cells in found if len(cells) > 1]


def source_cells(summaries: Mapping[str, Mapping[str, Any]], overall: Mapping[str, Any]) -> Cells:
    """A row per source, that with most compared runs first, and one of all together; errors are absolute, but for the bias.

    Errors that are not those of iteration times say of what they are; a source with several speeds has a row of the iteration
    times that they say, and one for each. Memory has columns of its own. Those of tau and of memory are there where some source
    has it.
    """
    headings = (
        "source",
        "runs",
        "not modelled",
        "compared",
        *_ERRORS,
        "tau",
        "memory runs",
        "memory mean %",
        "memory median %",
    )
    ordered = sorted(summaries.items(), key=lambda entry: (-entry[1]["count"], -entry[1]["runs"]))
    rows = [row for source, told in (*ordered, ("all", overall)) for row in _source_rows(source, told)]
    bare = [i for i in range(headings.index("tau"), len(headings)) if all(row[i] in ("-", "0", "") for row in rows)]
    return [tuple([cell for i, cell in enumerate(row) if i not in bare]) for row in (headings, *rows)]


def _in_words(quantity: str) -> str:
    """The name of a quantity in words, between which lines may break."""
    return quantity.replace("_", " ")


def _source_rows(source: str, told: Mapping[str, Any]) -> list[tuple[str, ...]]:
    quantity = told["quantity"]
    name = source if quantity in (TIME, MEMORY, None) else f"{source} ({_in_words(quantity)})"
    # Memory stands in its own columns, where it is all that there is, too.
    errors = {} if quantity == MEMORY else told
    memory = told["quantities"].get(MEMORY, {})
    first = (
        name,
        str(told["runs"]),
        str(told["not_modelled"]),
        str(errors.get("count", 0)),
        *_errors(errors),
        "-" if told["kendall_tau"] is None or not errors else f"{told['kendall_tau']:.3f}",
        str(memory.get("count", 0)),
        _points(memory.get("mean_absolute_relative_error")),
        _points(memory.get("median_absolute_relative_error")),
    )
    speeds = [(speed, found) for speed, found in told["quantities"].items() if speed != MEMORY]
    rows = [(f"{source} ({_in_words(q)})", "", "", str(found["count"]), *_errors(found), "", "", "", "") for q, found in speeds]
    return [first, *(rows if len(rows) > 1 else [])]


def _errors(figures: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a quantity's errors."""
    return (_points(figures.get(key), signed=key == "bias") for key in _ERRORS.values())


def _points(fraction: float | None, signed: bool = False) -> str:
    """A fraction in per cent, without its sign of per cent."""
    digits = ".1f" if fraction is None or abs(fraction) < 1e4 else ".3g"
    return "-" if fraction is None else f"{fraction * 100:{'+' if signed else ''}{digits}}"


def assumed_cells(summaries: Mapping[str, Mapping[str, Any]]) -> Cells:
    """A row per source and quantity of the runs of which something decisive is not published."""
    rows = [
        (source, quantity, str(figures["count"]), *_errors(figures))
        for source, told in summaries.items()
        for quantity, figures in told["assumed"].items()
    ]
    return [("source", "compared in", "runs", *_ERRORS), *rows]


def disregarded_cells(comparisons: Iterable[Comparison]) -> Cells:
    """A row per source and text of a cell that was not believed."""
    taken = {(c.id, c.source_key, text) for c in comparisons for text in c.assumptions if text.endswith(DISREGARDED)}
    counts = Counter((source, text.removesuffix(f" {DISREGARDED}")) for _, source, text in taken)
    return [("source", "cell", "runs"), *((source, text, str(count)) for (source, text), count in sorted(counts.items()))]


def pairs_cells(summaries: Mapping[str, Mapping[str, Any]]) -> Cells:
    """A row per source that has runs which differ in their schedules only."""
    found = {source: told["pairs"] for source, told in summaries.items() if told["pairs"] is not None}
    rows = [
        (source, str(pairs["count"]), str(pairs["right"]), ", ".join(" / ".join(ids) for ids in pairs["wrong"]) or "-")
        for source, pairs in found.items()
    ]
    return [("source", "pairs of schedules", "right order", "wrong"), *rows]


def fit_cells(checks: Sequence[FitCheck]) -> Cells:
    """A row per source and class of runs: whether they ran, ran out of memory, or failed for what may be another reason."""
    shown = {"ran": "ran", "out_of_memory": "ran out of memory", "failed": "failed, not surely for it"}
    rows = [
        (source, shown[group], str(entry["count"]), str(entry["right"]), _points(entry["share"]), str(entry["not_modelled"]))
        for source, groups in fit_summary(checks).items()
        for group, entry in groups.items()
    ]
    return [("source", "what happened", "judged", "said right", "right %", "not modelled"), *rows]


def run_cells(comparisons: Iterable[Comparison]) -> tuple[str, Cells]:
    """A row per comparison with its title, that farthest off first, where there are few; of many the first of these."""
    found = [(abs(error), c) for c in comparisons if (error := c.relative_error) is not None]
    found.sort(key=lambda entry: -entry[0])
    title = "Run by run, what is farthest off first"
    if len(found) > EACH:
        title, found = f"The {FARTHEST} figures that are farthest off, of {len(found):,}", found[:FARTHEST]
    rows = [
        (c.id, c.quantity or "", _figure(c.measured), _figure(c.predicted), _points(c.relative_error, signed=True), c.note)
        for _, c in found
    ]
    noted = 6 if any(c.note for _, c in found) else 5
    return title, [row[:noted] for row in [("run", "compared in", "measured", "predicted", "error %", "note"), *rows]]


def _figure(value: float | None) -> str:
    """Four digits of a figure, whose unit its quantity names."""
    return "-" if value is None else f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def reason_cells(comparisons: Iterable[Comparison], reasons: int = MOST_REASONS) -> Cells:
    """A row per reason for which runs were not modelled, the most frequent first, with the first of these runs.

    Of a run of which something is predicted, and something else is not, the reason says so.
    """
    found_of = list(comparisons)
    predicted = {comparison.id for comparison in found_of if comparison.predicted is not None}
    ids: dict[str, list[str]] = {}
    for comparison in found_of:
        if comparison.predicted is None:
            reason = comparison.note + (" (all else of it is)" if comparison.id in predicted else "")
            ids.setdefault(reason, []).append(comparison.id)
    found = sorted(ids.items(), key=lambda entry: -len(entry[1]))
    rows = [(str(len(own)), reason, ", ".join(own[:NAMED]) + (", ..." if len(own) > NAMED else "")) for reason, own in found]
    if len(found) > reasons + 1:
        count = sum(len(own) for _, own in found[reasons:])
        rows = [*rows[:reasons], (str(count), f"{len(found) - reasons} other reasons", "")]
    return [("runs", "not modelled, because", "which"), *rows]


def cells_table(title: str, cells: Cells) -> Group:
    """A table of cells below its title; the cells of a column of figures stand on the right."""
    figures = (
        [all(map(_is_figure, column)) for column in zip(*cells[1:], strict=True)] if len(cells) > 1 else [False] * len(cells[0])
    )
    return Group(Text(title, style="bold"), FittedTable([heading.replace(" ", "\n") for heading in cells[0]], cells[1:], figures))


UNFOLDED = 20
"""Letters of a name or word of a fitted table that is not folded where there is room."""


@dataclass(frozen=True)
class FittedTable:
    """Cells in columns that suit the width of the console: no figure is folded, and no short word, where there is room."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures: Sequence[bool]
    """Which columns have figures, that stand on the right."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """The table for so many columns."""
        columns = [[heading, *(row[i] for row in self.rows)] for i, heading in enumerate(self.headings)]

        def least(folded: int) -> list[int]:
            """Letters that each column needs if no figure is folded, and no word of a text that has fewer than so many."""
            lines = [[line for cell in column for line in cell.splitlines()] for column in columns]
            return [
                max(map(len, own), default=0) if figure else min(_longest_word(own), folded)
                for own, figure in zip(lines, self.figures, strict=True)
            ]

        choices = ((apart, least(folded)) for folded in range(UNFOLDED, 0, -1) for apart in (2, 1))
        fitting = ((apart, widths) for apart, widths in choices if sum(widths) + apart * (len(columns) - 1) <= options.max_width)
        apart, widths = next(fitting, (1, [0] * len(columns)))  # where none fits, figures are folded, too: nothing is cut off
        table = _table(apart)
        for heading, figure, width in zip(self.headings, self.figures, widths, strict=True):
            table.add_column(
                heading,
                justify="right" if figure else "left",
                overflow="fold",
                no_wrap=figure and width > 0,
                min_width=width or None,
            )
        for row in self.rows:
            table.add_row(*row)
        yield table


def cells_markdown(title: str, cells: Cells) -> str:
    """The same as Markdown, below its title, if it has one."""
    marks = ["--:" if all(_is_figure(row[i]) for row in cells[1:]) else "---" for i in range(len(cells[0]))]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
    lines.insert(1, f"|{'|'.join(marks)}|")
    return (f"**{title}**\n\n" if title else "") + "\n".join(lines) + "\n"


def _is_figure(text: str) -> bool:
    return text in ("", "-") or re.fullmatch(r"[+-]?[\d,]+(\.\d+)?(e[+-]\d+)?", text) is not None
