"""Fitting stacks: which runs are held out, and the constants that synthetic runs were made with are found again."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from experiments import fitting
from experiments.assumptions import read_assumptions
from experiments.constants import Constants, parse_constants, told_factor, with_factor, without_factor
from experiments.fidelity import PUBLISHED, measured_peak_bytes, measured_s
from experiments.fitting import (
    MEMORY_PARAMETERS,
    RECORD_RUNS,
    TIME_PARAMETERS,
    FittedStack,
    Task,
    fit_stack,
    split,
)
from experiments.published import Modelled, modelled
from experiments.published_rows import Run, read_runs
from sim.cost.estimate import Estimate
from sim.cost.memory import peak_bytes
from sim.spec.cluster import links
from sim.spec.counts import model_flop
from sim.spec.gpu import efficiencies
from sim.spec.reading import InputError
from sim.spec.stack import Stack, stack, stacks

# --- Which runs ------------------------------------------------------------------------------------------------------


def of_sources(**counts: int) -> list[Run]:
    return [Run(f"{source}-{i:03d}", source, None, None) for source, count in counts.items() for i in range(count)]


@pytest.mark.parametrize("holdout", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_share_of_each_source_is_held_out(holdout: float, seed: int) -> None:
    runs = of_sources(a=10, b=40, c=1)
    calibration, held = split(runs, holdout, seed)
    assert not {run.id for run in calibration} & {run.id for run in held}
    assert sorted(run.id for run in [*calibration, *held]) == sorted(run.id for run in runs)
    counts = Counter(run.source_key for run in held)
    assert (counts["a"], counts["b"], counts["c"]) == (round(10 * holdout), round(40 * holdout), round(holdout))


def test_the_lot_depends_on_nothing_but_seed_and_source() -> None:
    runs = of_sources(a=20, b=20)
    first = [{run.id for run in part} for part in split(runs, 0.5, 0)]
    shuffled = random.Random(7).sample(runs, len(runs))
    assert [{run.id for run in part} for part in split(shuffled, 0.5, 0)] == first
    assert [{run.id for run in part} for part in split(runs, 0.5, 1)] != first
    # The rows that are held out do not come by their order in the file.
    assert {run.id for run in split(runs[:20], 0.5, 0)[1]} != {run.id for run in runs[:10]}


def test_by_nodes_whole_sizes_are_held_out_and_by_source_whole_sources() -> None:
    runs = [replace(run, num_gpus=8 * (1 + i % 4), gpus_per_node=8) for i, run in enumerate(of_sources(a=12, b=16))]
    calibration, held = split(runs, 0.5, 0, "nodes")
    sizes = [{(run.source_key, run.num_gpus) for run in part} for part in (calibration, held)]
    assert not sizes[0] & sizes[1]
    assert [len(part) for part in sizes] == [4, 4]
    calibration, held = split(runs, 0.5, 0, "source")
    assert {len({run.source_key for run in part}) for part in (calibration, held)} == {1}
    assert len(calibration) + len(held) == len(runs)


@pytest.mark.parametrize("share", [1.0, -0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InputError, match=rf"^--holdout is a share of the runs from 0 to below 1, but got {share!r}$"):
        split(of_sources(a=2), share, 0)


def test_a_stack_comes_after_the_one_whose_runs_decide_the_factor_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be fitted with the factor of whatever was shipped before."""
    rounds: list[list[Task]] = []

    def found(function: object, tasks: list[Task], *others: object) -> tuple[list[FittedStack], bool]:
        rounds.append(tasks)
        return [FittedStack(task.stack, dict.fromkeys(task.free, 0.9), 1, 0.0, 0, 0.0) for task in tasks], False

    monkeypatch.setattr(fitting, "in_processes", found)
    monkeypatch.setattr(fitting, "fit_pieces", lambda *_: SimpleNamespace(efficiencies={}))
    monkeypatch.setattr(fitting, "fit_links", lambda *_: (links(),))
    titan = [run for run in read_runs(PUBLISHED) if run.source_key == "torchtitan"]
    other = next(run for run in read_runs(PUBLISHED) if run.source_key == "fmsfsdp")
    # Its utilisation was of another kind's peak.
    fitting.fit([*titan, replace(other, gpu_type=titan[0].gpu_type, mfu_pct=None, hfu_pct=None)], [], 0, 0.0)
    assert [[(task.stack.name, task.free) for task in tasks] for tasks in rounds] == [
        [("torchtitan", ("hopper-500w",))],
        [("fms-fsdp", ())],
    ]
    assert [[variant.name for variant in task.variants] for tasks in rounds for task in tasks] == [["torchtitan-rowwise"], []]
    begun = without_factor(efficiencies()["hopper-500w"])
    of_each = [tasks[0].constants.efficiencies["hopper-500w"] for tasks in rounds]
    assert of_each == [begun, told_factor(begun, 0.9, "torchtitan")]


def test_rates_that_other_runs_decided_stay_unless_all_is_fitted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(function: object, tasks: list[Task], *others: object) -> tuple[list[FittedStack], bool]:
        return [FittedStack(task.stack, dict.fromkeys(task.free, 0.9), 1, 0.0, 0, 0.0) for task in tasks], False

    # Of consumer GPUs there are no micro-benchmarks, and their factor was told by runs; these runs are on others.
    shipped = efficiencies()["ada-consumer"]
    monkeypatch.setattr(fitting, "in_processes", found)
    monkeypatch.setattr(fitting, "fit_pieces", lambda *_: SimpleNamespace(efficiencies={"ada-consumer": without_factor(shipped)}))
    monkeypatch.setattr(fitting, "fit_links", lambda *_: (links(),))
    runs = [run for run in read_runs(PUBLISHED) if run.source_key == "torchtitan"]
    for anew, expected in ((False, shipped), (True, without_factor(shipped))):
        text = fitting.fit(runs, [], 0, 0.0, anew=anew).constants_text
        assert parse_constants(text, "own.yaml").efficiencies["ada-consumer"] == expected


# --- What they were made with ----------------------------------------------------------------------------------------

USUAL = Stack("usual", **{p.name: p.middle for p in (*TIME_PARAMETERS, *MEMORY_PARAMETERS)})  # type: ignore[arg-type]
"""What the priors take for granted."""


def run(layers: int, hidden: int, tokens: int, degrees: tuple[int, int, int], batches: tuple[int, int], gpu: str) -> Run:
    """A Llama-like row; degrees are tp, pp and dp, batches the micro-batch and the global batch."""
    (tp, pp, dp), (micro_batch, global_batch) = degrees, batches
    return Run(
        id=f"own-{layers}-{hidden}-{tokens}-{degrees}-{batches}-{gpu}",
        source_key="own",
        gpu_type=gpu,
        num_gpus=tp * pp * dp,
        gpus_per_node=8,
        model_name="Llama",
        num_layers=layers,
        hidden=hidden,
        ffn_hidden=hidden * 11 // 4,
        heads=hidden // 64,
        vocab=32000,
        seq_len=tokens,
        global_batch=global_batch,
        micro_batch=micro_batch,
        tp=tp,
        pp=pp,
        dp=dp,
        precision="fp16",
    )


A100 = "A100-80GB-SXM"

SHAPES = (
    (4, 1024, 512, (1, 1, 1), (1, 4)),
    (4, 1024, 2048, (1, 1, 1), (4, 16)),
    (8, 2048, 2048, (1, 1, 1), (2, 4)),
    (4, 4096, 2048, (1, 1, 1), (2, 8)),
    (8, 1024, 512, (1, 4, 1), (1, 16)),
    (8, 4096, 2048, (1, 2, 1), (1, 8)),
    (4, 2048, 2048, (1, 1, 8), (2, 32)),
    (4, 4096, 4096, (1, 1, 2), (1, 8)),
    (4, 1024, 256, (1, 1, 1), (1, 2)),
    (8, 2048, 1024, (1, 2, 2), (2, 16)),
    (2, 4096, 8192, (1, 1, 1), (1, 4)),
    (4, 2048, 512, (1, 1, 1), (8, 8)),
    (2, 8192, 512, (1, 1, 1), (16, 32)),
    (4, 8192, 1024, (1, 1, 1), (8, 64)),
    (8, 8192, 2048, (1, 1, 1), (1, 8)),
    (4, 12288, 2048, (1, 1, 1), (8, 32)),
    (4, 6144, 1024, (1, 2, 1), (8, 64)),
    (4, 8192, 16384, (1, 1, 1), (1, 4)),
)
UNSEEN = ((6, 2048, 1024, (1, 2, 1), (2, 12)), (4, 1024, 1024, (1, 1, 4), (1, 16)), (12, 4096, 4096, (1, 4, 1), (1, 16)))


@cache
def estimate(row: Run) -> Estimate:
    found = world(row)
    return Estimate(found.plan, found.cluster)


def world(row: Run) -> Modelled:
    found = modelled(row, read_assumptions())
    assert isinstance(found, Modelled), found
    return found


def timed(stack: Stack, shapes: Sequence[tuple[int, int, int, tuple[int, int, int], tuple[int, int]]] = SHAPES) -> list[Run]:
    """Rows of these shapes on A100, that took what a stack takes."""
    rows = [run(*shape, A100) for shape in shapes]
    return [replace(row, iter_time_s=estimate(row).iteration_s(stack=stack)) for row in rows]


def peak_gb(row: Run, stack: Stack) -> float:
    """The peak of a row under a stack, in the unit of its column."""
    peak = max(peak_bytes(world(row).plan, replace(world(row).cluster, stack=stack)).values())
    return peak / measured_peak_bytes(replace(row, peak_mem_gb=1.0))


def fitted(rows: Sequence[Run], start: Stack = USUAL, free: tuple[str, ...] = ()) -> FittedStack:
    return fit_stack(Task(start, tuple(rows), (), Constants(), free))


@pytest.mark.parametrize("quantity", ["tokens_per_s", "tflops_per_gpu", "mfu_pct"])
def test_rates_tell_as_much_as_the_times_that_they_were_taken_from(quantity: str) -> None:
    rows = timed(replace(USUAL, matmul_scale=0.8), SHAPES[:6])
    rates = []
    for row in rows:
        took = float(row.iter_time_s or 0)
        # A rate of one is measured in as many seconds as an iteration has of it.
        amount = measured_s(world(replace(row, **{"iter_time_s": None, quantity: 1.0})))
        rates.append(replace(row, **{"iter_time_s": None, quantity: amount / took}))
    model = world(rows[0]).plan.transformer
    flop = model_flop(model, rows[0].global_batch or 0, rows[0].seq_len or 0)
    tokens = (rows[0].global_batch or 0) * (rows[0].seq_len or 0)
    amounts = {"tokens_per_s": tokens, "tflops_per_gpu": flop / 1e12, "mfu_pct": 100 * flop / 312e12}
    assert getattr(rates[0], quantity) * float(rows[0].iter_time_s or 0) == pytest.approx(amounts[quantity], rel=1e-9)
    by_times, by_rates = fitted(rows), fitted(rates)
    assert by_rates.timed == len(rows)
    assert by_rates.stack.matmul_scale == pytest.approx(by_times.stack.matmul_scale, rel=1e-3)


def test_runs_that_cannot_be_fitted_on_are_not_said_to_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(function: object, tasks: list[Task], *others: object) -> tuple[list[FittedStack], bool]:
        return [FittedStack(task.stack, {}, len(task.runs), 0.0, 0, 0.0) for task in tasks], False

    monkeypatch.setattr(fitting, "in_processes", found)
    monkeypatch.setattr(fitting, "fit_pieces", lambda *_: SimpleNamespace(efficiencies={}))
    monkeypatch.setattr(fitting, "fit_links", lambda *_: (links(),))
    whole = timed(USUAL, SHAPES[:2])
    open_, lacking = replace(whole[0], id="open", source_key="sc21", micro_batch=None), replace(whole[0], id="lacking", tp=None)
    told = fitting.fit([*whole, open_, lacking], [], 0, 0.0)
    assert told.calibration_ids == {run.id for run in whole}
    assert (told.timed, told.weighed, told.drawn) == (2, 0, 4)
    with pytest.raises(InputError, match=r"^--fit: no run can be fitted on: lacking: not modelled: tp; and 1 more$"):
        fitting.fit([open_, lacking], [], 0, 0.0)


def test_a_variant_has_kernels_of_its_own_and_all_else_in_common() -> None:
    true = replace(USUAL, matmul_scale=0.75, step_s=40e-3)
    other = replace(true, matmul_scale=0.55, step_s=0.0)
    rows = timed(true)
    # By their framework rows are of a stack; those of this one are the variant's here.
    framed = [replace(run(*shape, A100), id=f"nanotron-{shape}", framework="nanotron") for shape in SHAPES]
    framed = [replace(row, iter_time_s=estimate(row).iteration_s(stack=other)) for row in framed]
    variant = replace(USUAL, name="nanotron", variant_of="usual", step_s=0.0)  # what it has none of stays so
    found = fit_stack(Task(USUAL, (*rows, *framed), (), Constants(), variants=(variant,)))
    (own,) = found.variants
    assert own.matmul_scale == pytest.approx(0.55, rel=0.04)
    assert found.stack.matmul_scale == pytest.approx(0.75, rel=0.04)
    assert found.stack.step_s == pytest.approx(40e-3, rel=0.04)
    kernels = {name: getattr(own, name) for name in fitting.OF_KERNELS}
    assert own == replace(found.stack, name="nanotron", variant_of="usual", source=own.source, step_s=0.0, **kernels)
    assert found.timed == len(rows) + len(framed) and found.time_error < 0.02
    assert found.stack.source.startswith(f"fitted with its variants on times of {len(rows)} runs, met within ")
    assert own.source.startswith(f"fitted with usual on times of {len(framed)} runs, met within ")


def test_a_mean_is_geometric_where_it_can_be() -> None:
    known = {"a": Stack("a", matmul_scale=0.5, tensor_overlap=0.4, step_s=1e-3), "b": Stack("b", matmul_scale=2.0, step_s=9e-3)}
    mean = fitting.mean_stack(Stack("mean", flash_attention=False, mean_of="a, b", source="said"), known)
    assert (mean.matmul_scale, mean.tensor_overlap, mean.step_s) == (1.0, 0.2, 3e-3)
    assert (mean.name, mean.flash_attention, mean.source) == ("mean", False, "said")
    known["c"] = Stack("c", routing_traffic=3.0)
    assert fitting.mean_stack(Stack("mean", mean_of="a, c"), known).routing_traffic == 0  # as of all


def test_a_mean_that_runs_tell_of_is_none_any_more() -> None:
    mean = replace(USUAL, name="mean", mean_of="nanotron, nemo")
    assert fitted(timed(USUAL, SHAPES[:3]), mean).stack.mean_of == ""
    assert fitted([], mean).stack.mean_of == "nanotron, nemo"


def test_the_shipped_mean_is_that_of_its_stacks() -> None:
    (shipped,) = (one for one in stacks().values() if one.mean_of)
    found = fitting.mean_stack(shipped, stacks())
    for parameter in (*TIME_PARAMETERS, *fitting.MEMORY_PARAMETERS):
        assert getattr(shipped, parameter.name) == pytest.approx(getattr(found, parameter.name), rel=1e-3, abs=0), parameter.name
    assert all(stacks()[name].flash_attention for name in shipped.mean_of.split(", "))


def test_means_follow_their_stacks_until_runs_tell_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(function: object, tasks: list[Task], *others: object) -> tuple[list[FittedStack], bool]:
        return [FittedStack(replace(task.stack, matmul_scale=0.5, mean_of=""), {}, 1, 0.0, 0, 0.0) for task in tasks], False

    monkeypatch.setattr(fitting, "in_processes", found)
    monkeypatch.setattr(fitting, "fit_pieces", lambda *_: SimpleNamespace(efficiencies={}))
    monkeypatch.setattr(fitting, "fit_links", lambda path: (links(), None))
    titan = replace(run(*SHAPES[0], A100), framework="torchtitan")
    shipped = stacks()["typical"]
    mean = parse_constants(fitting.fit([titan], [], 0, 0.0, anew=False).constants_text, "here").stacks["typical"]
    renewed = fitting.mean_stack(shipped, {**stacks(), "torchtitan": replace(stacks()["torchtitan"], matmul_scale=0.5)})
    assert mean.matmul_scale == renewed.matmul_scale < 0.95 * shipped.matmul_scale
    assert mean.mean_of == shipped.mean_of
    nobody = replace(titan, framework="FSDP of our own")
    own = parse_constants(fitting.fit([nobody], [], 0, 0.0, anew=False).constants_text, "here").stacks["typical"]
    assert (own.matmul_scale, own.mean_of) == (0.5, "")


def test_what_takes_many_runs_to_tell_moves_half_as_far_by_few() -> None:
    parameter = fitting.Parameter("ring_step_s", 1e-6, 1e-8, 1e-2, 4.0, (), 50)
    # The record has none of it, so that the prior has its own middle.
    assert [parameter.near(0.0, runs) for runs in (49, 50)] == [replace(parameter, width=2.0), parameter]
    few, many = (parameter.near(3e-6, runs) for runs in (RECORD_RUNS, 54 * RECORD_RUNS))
    assert (few.middle, few.width) == (3e-6, pytest.approx(2.0 * math.sqrt(1 / 2)))
    assert (many.middle, many.width) == (3e-6, pytest.approx(4.0 * math.sqrt(54 / 55)))


def test_a_few_own_runs_move_a_record_less_than_they_decide_one_anew() -> None:
    record = replace(USUAL, matmul_scale=0.8, step_s=20e-3, activation_scale=1.2, source="fitted on times of 40 runs")
    shapes = SHAPES[2:4]
    agreeing, slower = timed(record, shapes), timed(replace(record, matmul_scale=0.6), shapes)
    for rows in (agreeing, slower):
        kept, anew = (fit_stack(Task(record, tuple(rows), (), Constants(), anew=anew)).stack for anew in (False, True))
        moved, decided = (abs(math.log(one.matmul_scale / record.matmul_scale)) for one in (kept, anew))
        assert moved < 0.01 if rows is agreeing else 0.02 < moved < decided, (moved, decided)
        if rows is agreeing:
            assert kept.step_s == pytest.approx(20e-3, rel=0.02) and anew.step_s < 15e-3
    # Of which no run says anything stays.
    assert (kept.activation_scale, kept.logits_scale) == (record.activation_scale, record.logits_scale)
    heavy = [replace(row, peak_mem_gb=2 * peak_gb(row, record)) for row in agreeing]
    kept, anew = (fit_stack(Task(record, tuple(heavy), (), Constants(), anew=anew)).stack for anew in (False, True))
    assert 1.1 < kept.activation_scale / 1.2 < 0.9 * anew.activation_scale / 1.0


def test_many_own_runs_decide_what_a_record_says() -> None:
    record = replace(USUAL, matmul_scale=0.95, step_s=2e-3)
    found = fit_stack(Task(record, tuple(timed(replace(record, matmul_scale=0.75))), (), Constants(), anew=False))
    assert found.time_error < 0.01 and found.stack.matmul_scale == pytest.approx(0.75, rel=0.04)


def test_runs_whose_speeds_contradict_one_another_are_not_fitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(function: object, tasks: list[Task], *others: object) -> tuple[list[FittedStack], bool]:
        return [FittedStack(task.stack, {}, len(task.runs), 0.0, 0, 0.0) for task in tasks], False

    monkeypatch.setattr(fitting, "in_processes", found)
    monkeypatch.setattr(fitting, "fit_pieces", lambda *_: SimpleNamespace(efficiencies={}))
    monkeypatch.setattr(fitting, "fit_links", lambda path: (links(), None))
    good, bad = (replace(run(*SHAPES[0], A100), id=name, iter_time_s=1.0, framework="torchtitan") for name in ("good", "bad"))
    told = fitting.fit([good, replace(bad, tokens_per_s=10.0)], [], 0, 0.0, anew=False)
    assert (told.timed, told.calibration_ids) == (1, {"good"})
    assert told.doubtful == ("bad: iter_time_s 1 and tokens_per_s 10 (204.8 s) contradict one another",)


def test_what_few_runs_replace_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(function: object, tasks: list[Task], *others: object) -> tuple[list[FittedStack], bool]:
        counts = [Counter(world(row).cluster.stack.name for row in task.runs) for task in tasks]
        fits = zip(tasks, counts, strict=True)
        return [FittedStack(t.stack, {}, len(t.runs), 0.0, 0, 0.0, t.variants, n) for t, n in fits], False

    monkeypatch.setattr(fitting, "in_processes", found)
    monkeypatch.setattr(fitting, "fit_pieces", lambda *_: SimpleNamespace(efficiencies={}))
    monkeypatch.setattr(fitting, "fit_links", lambda path: (links(), None))
    one = replace(run(*SHAPES[0], A100), framework="NeMo")
    bridge = replace(one, id="bridge", framework="Megatron-Bridge")
    many = [replace(one, id=str(i)) for i in range(RECORD_RUNS)]
    nemo, other = (f"{name}: 1 run; the shipped record was {stacks()[name].source}" for name in ("nemo", "megatron-bridge"))
    asked = (([one], False), ([one], True), ([bridge], False), ([one, bridge], False), (many, False), ([*many, bridge], False))
    told = [fitting.fit(runs, [], 0, 0.0, anew=anew).few for runs, anew in asked]
    assert told == [(nemo,), (), (other,), (nemo, other), (), (other,)]


def test_a_variant_keeps_its_memory_where_own_runs_say_nothing_of_it() -> None:
    stack, variant = stacks()["aleph-megatron"], stacks()["aleph-megatron-rms"]
    runs = [one for one in read_runs(PUBLISHED) if one.source_key == "aleph" and world(one).cluster.stack == variant][:2]
    assert len(runs) == 2 and not any(one.peak_mem_gb for one in runs)
    found = fit_stack(Task(stack, tuple(runs), (), Constants(), variants=(variant,), anew=False))
    memory = [p.name for p in MEMORY_PARAMETERS]
    assert [getattr(found.variants[0], name) for name in memory] == [getattr(variant, name) for name in memory]
    assert found.runs == {stack.name: 0, variant.name: 2}
    # Two runs leave it near its own rates, which are others than the stack's.
    assert variant.memory_traffic < 0.6 * stack.memory_traffic
    assert found.variants[0].memory_traffic / found.stack.memory_traffic < 0.75


def test_own_runs_of_software_that_was_never_timed_are_not_held_near_one_that_loses_nothing() -> None:
    true = replace(USUAL, matmul_scale=0.7, step_s=30e-3)
    few = timed(true, SHAPES[2:5])
    none, record = (
        fit_stack(Task(Stack("s", source=text), tuple(few), (), Constants(), anew=False))
        for text in ("", "fitted on times of 9 runs")
    )
    assert none.time_error < record.time_error


def test_constants_that_are_off_what_the_prior_takes_for_granted_are_found() -> None:
    true = replace(USUAL, matmul_scale=0.75, host_s=60e-6, step_s=40e-3)
    found = fitted(timed(true), Stack("start"))
    assert found.timed == len(SHAPES) and found.time_error < 0.01
    assert found.stack.matmul_scale == pytest.approx(0.75, rel=0.04)
    assert found.stack.host_s == pytest.approx(60e-6, rel=0.04)
    assert found.stack.step_s == pytest.approx(40e-3, rel=0.04)
    # Shapes that it has not seen.
    for row in timed(true, UNSEEN):
        assert estimate(row).iteration_s(stack=found.stack) == pytest.approx(float(row.iter_time_s or 0), rel=0.015)
    assert found.stack.source == f"fitted on times of 18 runs, met within {found.time_error:.3f} on average"
    assert (found.weighed, found.stack.activation_scale) == (0, 1.0)


def test_runs_that_are_as_the_prior_takes_them_leave_it_where_it_is() -> None:
    found = fitted(timed(USUAL), Stack("start"))
    untold = ("tensor", "message", "collective", "ring", "routing", "unaligned")
    for parameter in TIME_PARAMETERS:
        if not parameter.name.startswith(untold):
            assert getattr(found.stack, parameter.name) == pytest.approx(parameter.middle, rel=0.02), parameter.name


@pytest.mark.slow
def test_a_slow_host_is_found_where_a_long_step_explains_nearly_as_much() -> None:
    # From a quick host alone the search ends with a step of the optimizer that takes 244 ms, for models of a billion parameters.
    rows = [row for row in read_runs(PUBLISHED) if row.source_key in ("amp_homo", "amp_het")]
    start = replace(stack("deepspeed-amp"), host_s=20e-6, step_s=5e-3, source="")
    found = fitted(rows, start)
    assert found.timed == len(rows) == 29 and found.time_error < 0.045
    assert found.stack.host_s > 150e-6 and found.stack.step_s < 50e-3


def test_one_wild_run_moves_little() -> None:
    true = replace(USUAL, matmul_scale=0.75, step_s=40e-3)
    rows = timed(true)
    wild = [replace(rows[0], iter_time_s=10 * float(rows[0].iter_time_s or 0)), *rows[1:]]
    found = fitted(wild)
    # Least squares without robustness would be off by 20 to 70 % on all others.
    for row in rows[1:]:
        assert estimate(row).iteration_s(stack=found.stack) == pytest.approx(float(row.iter_time_s or 0), rel=0.06)


def test_what_no_run_speaks_of_keeps_its_value() -> None:
    # On one node without tensor ranks: their overlap, the rate across nodes, and what the host takes for each of them.
    start = replace(USUAL, tensor_overlap=0.7, tensor_host_s=3e-6, message_s=2.0, message_nodes=1e3, flash_attention=False)
    start = replace(start, collective_scale=0.3, ring_step_s=7e-6, message_lane_nodes=5, routing_traffic=7.0)
    found = fitted(timed(start), start).stack
    assert (found.tensor_overlap, found.tensor_host_s, found.message_s) == (0.7, 3e-6, 2.0)
    assert (found.collective_scale, found.ring_step_s, found.routing_traffic) == (0.3, 7e-6, 7.0)
    assert not found.flash_attention and found.context_bytes == start.context_bytes
    # Without runs: everything.
    nothing = fitted([], replace(start, source="as it was"))
    assert nothing.stack == replace(start, source="as it was") and (nothing.timed, nothing.weighed) == (0, 0)
    assert fitted([replace(row, iter_time_s=None) for row in timed(start)], start).stack == start


def test_runs_with_experts_tell_what_the_way_to_them_moves() -> None:
    true, start, mixed = replace(USUAL, routing_traffic=15.0), replace(USUAL, routing_traffic=0.0), (1, 2, 3, 6, 7, 9)
    shapes = (*SHAPES, *UNSEEN)
    rows = [replace(run(*shape, A100), model_name="Mixtral-8x7B" if n in mixed else "Llama") for n, shape in enumerate(shapes)]
    found = fitted([replace(row, iter_time_s=estimate(row).iteration_s(stack=true)) for row in rows], start)
    # It decides little of their times, so that the prior, with its middle at 2, keeps some.
    assert 7 < found.stack.routing_traffic < 16 and found.time_error < 0.02
    assert fitted(timed(USUAL, SHAPES[1:4]), start).stack.routing_traffic == 0


def test_runs_whose_vocabulary_is_not_padded_tell_what_that_costs() -> None:
    true, start = replace(USUAL, unaligned_scale=0.3), replace(USUAL, unaligned_scale=0.9)
    rows = [replace(run(*shape, A100), framework="torchtitan", vocab=50257 + 47 * (n % 2)) for n, shape in enumerate(SHAPES)]
    found = fitted([replace(row, iter_time_s=estimate(row).iteration_s(stack=true)) for row in rows], start)
    assert found.stack.unaligned_scale == pytest.approx(0.3, rel=0.1) and found.time_error < 0.01
    assert fitted(timed(USUAL, SHAPES[1:4]), start).stack.unaligned_scale == 0.9


def test_a_run_whose_gpu_lacks_the_precision_spares_the_others() -> None:
    rows = timed(USUAL, SHAPES[:3])
    lacking = replace(run(*SHAPES[0], "T4"), precision="bf16", iter_time_s=1.0)
    assert isinstance(world(lacking), Modelled)
    assert fitted([*rows, lacking]).timed == len(rows)


@pytest.mark.slow
def test_what_steps_of_rings_over_nodes_take_is_found_where_there_are_some() -> None:
    degrees = [(tp, pp, 1) for tp in (1, 2, 4, 8, 16, 32) for pp in (1, 2)]
    shapes = [(4, 2048, 2048, many, (batch, 4 * batch)) for many in degrees for batch in (1, 2, 4, 8, 16)]
    found = fitted(timed(replace(USUAL, ring_step_s=40e-6, tensor_host_s=150e-6), shapes), Stack("start"))
    assert found.stack.ring_step_s == pytest.approx(40e-6, rel=0.15) and found.time_error < 0.02
    assert found.stack.tensor_host_s == pytest.approx(150e-6, rel=0.15)


def test_the_overlap_of_tensor_collectives_is_found_where_there_are_some() -> None:
    shapes = [(4, 2048, 2048, (tp, 1, 1), (batch, 4 * batch)) for tp in (1, 2, 4, 8) for batch in (1, 4)]
    true = replace(USUAL, tensor_overlap=0.6)
    found = fitted(timed(true, shapes))
    assert found.stack.tensor_overlap == pytest.approx(0.6, rel=0.15) and found.time_error < 0.01


@pytest.mark.parametrize(("node_scale", "scale"), [(1.1, 0.3), (0.3, 0.9)])
def test_the_rates_of_collectives_inside_a_node_and_across_are_told_apart(node_scale: float, scale: float) -> None:
    # Micro-batches so large that the GPU is what is waited for: where the host is, collectives cost little.
    shapes = [(4, 2048, 2048, (tp, 1, 1), (batch, 4 * batch)) for tp in (2, 4, 8, 16, 32) for batch in (4, 8, 16, 32)]
    true = replace(USUAL, node_collective_scale=node_scale, collective_scale=scale)
    found = fitted(timed(true, shapes))
    assert found.stack.node_collective_scale == pytest.approx(node_scale, rel=0.15)
    assert found.stack.collective_scale == pytest.approx(scale, rel=0.15) and found.time_error < 0.01


def test_the_rate_of_kinds_without_micro_benchmarks_is_found() -> None:
    # V100 at 0.7 of its record, A100 as its record says.
    assert efficiencies()["volta"].matmul_fraction * 0.7 == with_factor(efficiencies()["volta"], 0.7).matmul_fraction
    rows = timed(USUAL)
    slow = [run(*shape, "V100-32GB-SXM") for shape in SHAPES[:6]]
    for row in slow:
        (kind,) = {node.gpu for node in world(row).cluster.nodes}
        kinds = {kind.name: replace(kind, efficiency=with_factor(kind.efficiency, 0.7))}
        rows.append(replace(row, iter_time_s=estimate(row).iteration_s(kinds, USUAL)))
    found = fitted(rows, free=("volta",))
    assert list(found.factors) == ["volta"] and found.factors["volta"] == pytest.approx(0.7, rel=0.03)
    assert found.stack.matmul_scale == pytest.approx(1.0, rel=0.02)
    # A kind that is not free stays as its record has it; then the stack has to take the blame.
    assert fitted(rows).factors == {} and fitted(rows).time_error > 3 * found.time_error


@pytest.mark.parametrize("factor", [0.9512, 1.04, 3.0])
def test_a_factor_that_runs_gave_is_taken_back_before_the_next_one(factor: float) -> None:
    record = replace(efficiencies()["volta"], matmul_fraction=0.82, attention_fraction=0.5, source="guessed")
    once = told_factor(record, factor, "own")
    assert once.source.startswith("guessed; rates of matmuls and attention x ") and once.source.endswith(" by runs of own")
    assert once.matmul_fraction == pytest.approx(min(0.82 * factor, 1.0), rel=0.02)
    assert once.matmul_fraction <= 1 and once.matmul_fraction / once.attention_fraction == pytest.approx(0.82 / 0.5)
    assert without_factor(once) == record
    assert without_factor(record) == record


def test_no_fraction_goes_above_one() -> None:
    record = efficiencies()["volta"]
    fast = with_factor(record, 2.5)
    # Both are faster by the same factor, so that it can be taken back.
    assert fast.matmul_fraction == 1.0
    assert fast.attention_fraction == pytest.approx(record.attention_fraction / record.matmul_fraction)
    assert replace(fast, matmul_fraction=record.matmul_fraction, attention_fraction=record.attention_fraction) == record


def test_the_memory_that_runs_took_is_found() -> None:
    true = replace(USUAL, activation_scale=1.4, context_bytes=2.0 * 2**30)
    rows = []
    for shape in (*SHAPES, *UNSEEN):
        row = run(*shape, A100)
        rows.append(replace(row, peak_mem_gb=peak_gb(row, true)))
    found = fitted(rows)
    assert (found.timed, found.weighed) == (0, len(rows)) and found.memory_error < 0.005
    assert found.stack.activation_scale == pytest.approx(1.4, rel=0.03)
    assert found.stack.context_bytes == pytest.approx(2.0 * 2**30, rel=0.03)
    assert replace(found.stack, activation_scale=1.0, logits_scale=1.0, context_bytes=USUAL.context_bytes, source="") == USUAL
