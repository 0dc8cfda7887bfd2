"""Predictions beside measurements: statistics against figures worked out by hand, countings against published formulas."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from experiments import fidelity
from experiments.agreement import (
    MEMORY,
    TIME,
    Comparison,
    FitCheck,
    TableRanking,
    fit_summary,
    kendall_tau,
    schedule_pairs,
    statistics,
    summary,
    table_rankings,
)
from experiments.assumptions import DATA, read_assumptions
from experiments.constants import Constants, parse_constants, read_constants
from experiments.fidelity import (
    ESTIMATE,
    Replay,
    check_fit,
    counted_flop,
    is_out_of_memory,
    measured_peak_bytes,
    predict,
    replay,
    replay_json,
)
from experiments.plots import ParityPoint, plot_parity
from experiments.published import Modelled, modelled
from experiments.published_rows import Run, read_runs
from experiments.tables import reason_cells
from sim.cost.estimate import Estimate
from sim.cost.memory import lane_parts, peak_bytes
from sim.cost.network import Network
from sim.engine import simulate
from sim.spec.cluster import Cluster
from sim.spec.counts import model_flop
from sim.spec.gpu import CONSTANTS, efficiencies
from sim.spec.plan import Plan
from sim.spec.reading import InputError
from sim.spec.stack import stacks

GPT_22B = Run(
    id="mine-1",
    source_key="vtrain_single",
    gpu_type="A100-80GB-SXM",
    num_gpus=8,
    gpus_per_node=8,
    intra_node_link="NVLink3",
    model_name="GPT",
    num_layers=4,
    hidden=1024,
    ffn_hidden=4096,
    heads=16,
    kv_heads=16,
    seq_len=1024,
    vocab=51200,
    global_batch=16,
    micro_batch=2,
    tp=2,
    pp=2,
    dp=2,
    recompute="full",
    precision="fp16",
    iter_time_s=1.0,
)


def compared(predicted: float | None, measured: float, id: str = "a-1", **changes: object) -> Comparison:
    """A comparison of iteration times of the source 'a'."""
    return Comparison(**{"id": id, "source_key": "a", "quantity": TIME, "predicted": predicted, "measured": measured, **changes})  # type: ignore[arg-type]


# --- Statistics ------------------------------------------------------------------------------------------------------


def test_statistics_are_those_worked_out_by_hand() -> None:
    # Errors -0.5, -0.1, 0, 0.2, 1: absolute 0, 0.1, 0.2, 0.5, 1; the 90th percentile lies at 0.9 * 4 = 3.6 of them.
    found = statistics([compared(p, 10.0) for p in (5.0, 9.0, 10.0, 12.0, 20.0)] + [compared(None, 10.0)])
    assert found is not None
    assert found.count == 5
    assert found.mean_absolute_relative_error == pytest.approx(1.8 / 5)
    assert found.median_absolute_relative_error == pytest.approx(0.2)
    assert found.p90_absolute_relative_error == pytest.approx(0.5 + 0.6 * 0.5)
    assert found.bias == pytest.approx(0.6 / 5)


def test_of_nothing_there_are_no_statistics() -> None:
    assert statistics([compared(None, 10.0)]) is None


def test_kendalls_tau_is_one_less_two_for_each_pair_in_the_wrong_order() -> None:
    measured = [1.0, 2.0, 3.0, 4.0]
    for order in permutations([1.0, 2.0, 3.0, 4.0]):
        rows = [compared(p, m, parallelisation=(i,)) for i, (p, m) in enumerate(zip(order, measured, strict=True))]
        wrong = sum(order[i] > order[j] for i in range(4) for j in range(i + 1, 4))
        (ranking,) = table_rankings(rows)
        assert ranking.count == 4
        assert ranking.kendall_tau == pytest.approx(1 - 2 * wrong / 6)


def test_tables_of_three_rows_that_have_an_order_are_ranked() -> None:
    rows = [
        compared(t, t, table=table, parallelisation=(varied and i,))
        for table, varied in (("x", 1), ("y", 0))
        for i, t in enumerate((1.0, 2.0, 3.0))
    ]
    rows += [compared(t, t, table="z", parallelisation=(t,)) for t in (1.0, 2.0)]
    rows += [compared(1.0, 1.0, table="no order", parallelisation=(i,)) for i in range(3)]
    assert table_rankings(rows) == [
        TableRanking("a", "x", 3, pytest.approx(1.0), varies_parallelisation=True),
        TableRanking("a", "y", 3, pytest.approx(1.0), varies_parallelisation=False),
    ]


def test_tables_weigh_by_their_pairs_of_rows_and_those_that_vary_no_parallelisation_count_where_there_are_no_others() -> None:
    tables = [TableRanking("a", "x", 3, 1.0, True), TableRanking("a", "y", 4, 0.0, True)]  # 3 and 6 pairs
    sizes = TableRanking("a", "z", 3, -1.0, False)
    assert kendall_tau(tables) == kendall_tau([*tables, sizes]) == pytest.approx(3 / 9)
    assert kendall_tau([sizes]) == -1.0
    assert kendall_tau([]) is None


def test_pairs_of_schedules_are_those_of_one_setting_whose_measured_times_differ_by_more_than_three_per_cent() -> None:
    rows = [
        compared(8.0, 10.0, "a-1", schedule="1f1b", setting=(1,)),
        compared(9.0, 9.0, "a-2", schedule="zb-1p", setting=(1,)),  # measured faster, predicted slower: wrong
        compared(7.0, 8.8, "a-3", schedule="zb-2p", setting=(1,)),  # against 9.0 only 2.3 % apart: no pair; against 10.0 right
        compared(1.0, 20.0, "a-4", schedule="zb-v", setting=(2,)),  # alone in its setting
        compared(None, 99.0, "a-5", schedule="1f1b", setting=(1,)),
    ]
    pairs = schedule_pairs(rows)
    assert pairs is not None
    assert (pairs.count, pairs.right, pairs.wrong) == (2, 1, (("a-1", "a-2"),))
    assert schedule_pairs(rows[3:]) is None


def test_runs_of_two_tables_that_differ_in_their_schedules_only_are_a_pair_and_those_on_other_gpus_are_none() -> None:
    plain, other = replace(GPT_22B, table_or_fig="Table 4"), replace(GPT_22B, table_or_fig="Table 6", schedule="ZB-1p")
    (one,), (two,) = predict(plain), predict(replace(other, iter_time_s=2.0))
    (third,) = predict(replace(other, gpu_type="A100-40GB-SXM", iter_time_s=2.0))
    assert schedule_pairs([one, two]) is not None and schedule_pairs([one, third]) is None
    single = replace(plain, pp=1, tp=8, dp=1, num_gpus=8, vpp=None)  # a pipeline of one stage has no schedule
    (one,), (two,) = predict(single), predict(replace(single, schedule="ZB-1p", iter_time_s=2.0))
    assert schedule_pairs([one, two]) is None and one.predicted == two.predicted


def test_every_reason_has_its_row_and_says_where_the_rest_of_a_run_is_modelled() -> None:
    known = replace(GPT_22B, peak_mem_gb=900.0)
    refused = [replace(GPT_22B, id=name, **{name: None}) for name in ("tp", "pp", "heads")]
    comparisons = [found for run in (known, *refused) for found in predict(run)]
    peak = "not modelled: peak_mem_gb 900 is more than the 85.9 GB that a device has (all else of it is)"
    reasons = [("1", peak, known.id), *(("1", f"not modelled: {name}", name) for name in ("tp", "pp", "heads"))]
    head = ("runs", "not modelled, because", "which")
    assert (
        [reason_cells(comparisons, most) for most in (4, 3, 2)]
        == [
            [head, *reasons],
            [head, *reasons],  # in the place of a row that one other reason makes stands the reason
            [head, *reasons[:2], ("2", "2 other reasons", "")],
        ]
    )


def test_a_summary_keeps_assumed_runs_apart_and_counts_those_that_are_not_modelled() -> None:
    told = summary(
        [
            compared(11.0, 10.0, "a-1"),
            compared(20.0, 10.0, "a-1", quantity=MEMORY),
            compared(30.0, 10.0, "a-2", assumed=True),
            compared(None, 10.0, "a-3", note="not modelled: tp"),
            compared(None, 10.0, "a-4", note="not modelled: tp"),
        ]
    )
    assert told["quantity"] == TIME and told["count"] == 1
    assert told["mean_absolute_relative_error"] == pytest.approx(0.1)
    assert told["quantities"][MEMORY]["mean_absolute_relative_error"] == pytest.approx(1.0)
    assert told["assumed"][TIME]["mean_absolute_relative_error"] == pytest.approx(2.0)
    assert (told["runs"], told["modelled"], told["not_modelled"]) == (4, 2, 2)
    assert told["reasons"] == {"not modelled: tp": 2}
    assert told["pairs"] is None and told["kendall_tau"] is None


def test_runs_that_are_compared_by_several_speeds_count_together_by_the_iteration_times_that_they_say() -> None:
    rates = [  # iterations predicted to take 2, 2 and 6 s, which at the measured rates took 2.5, 1.6 and 4 s
        compared(50.0, 40.0, "a-2", quantity="tokens_per_s", predicted_s=2.0, parallelisation=(2,)),
        compared(40.0, 50.0, "a-3", quantity="mfu_pct", predicted_s=2.0, parallelisation=(3,)),
        compared(10.0, 15.0, "a-4", quantity="tokens_per_s", predicted_s=6.0, parallelisation=(4,)),
    ]
    told = summary([compared(11.0, 10.0, "a-1", predicted_s=11.0, parallelisation=(1,)), *rates])
    assert (told["quantity"], told["count"]) == (TIME, 4)
    assert told["mean_absolute_relative_error"] == pytest.approx((0.1 + 0.2 + 0.25 + 0.5) / 4)
    assert told["bias"] == pytest.approx((0.1 - 0.2 + 0.25 + 0.5) / 4)
    assert told["kendall_tau"] == pytest.approx(5 / 30**0.5)  # tau-b: of six pairs five in order, and one a tie as predicted
    assert {q: found["count"] for q, found in told["quantities"].items()} == {TIME: 1, "tokens_per_s": 2, "mfu_pct": 1}
    alone = summary(rates[:1])
    assert (alone["quantity"], alone["bias"]) == ("tokens_per_s", pytest.approx(0.25))


def test_the_share_of_fits_said_right_is_told_for_each_class() -> None:
    checks = [FitCheck("a-1", "a", ran=True, fits=True), FitCheck("a-2", "a", ran=True, fits=False)]
    checks += [FitCheck("a-3", "a", ran=False, fits=False), FitCheck("a-4", "a", ran=False, fits=None, note="not modelled: tp")]
    checks += [FitCheck("b-1", "b", ran=False, fits=True, exact=False)]
    told = fit_summary(checks)
    assert told["a"]["ran"] == {"count": 2, "right": 1, "not_modelled": 0, "share": 0.5, "reasons": {}}
    told_reasons = {"not modelled: tp": 1}
    assert told["a"]["out_of_memory"] == {"count": 1, "right": 1, "not_modelled": 1, "share": 1.0, "reasons": told_reasons}
    assert told["b"] == {"failed": {"count": 1, "right": 0, "not_modelled": 0, "share": 0.0, "reasons": {}}}


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("OOM", True),
        ("OOM Error", True),
        ("out of memory", True),
        ("CUDA out of memory", True),
        ("torch.cuda.OutOfMemoryError", True),
        ("did not fit", True),
        ("crashed / OOM / timeout", False),
        ("Kernel not available", False),
    ],
)
def test_only_failures_that_can_be_nothing_else_are_for_memory(failure: str, expected: bool) -> None:
    assert is_out_of_memory(failure) is expected


# --- FLOP as publications count them ---------------------------------------------------------------------------------


def test_flop_are_counted_as_the_publications_formulas_say() -> None:
    world = modelled(replace(GPT_22B, source_key="vtrain_multi", tp=1, pp=1, dp=8), read_assumptions())
    assert isinstance(world, Modelled)
    B, s, l, h = 16, 1024, 4, 1024  # noqa: E741
    V = world.plan.transformer.padded_vocab or world.plan.transformer.vocab
    model = 72 * B * s * l * h**2 * (1 + s / (6 * h) + V / (12 * l * h))
    assert counted_flop(world.plan, "model flops (NVIDIA formula)") == pytest.approx(model)
    full = 96 * B * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h))
    assert counted_flop(world.plan, "HW flops incl. full recompute, 96Bslh^2(1+s/6h+V/16lh)") == pytest.approx(full)
    assert counted_flop(world.plan, "HW flops incl. recompute") == pytest.approx(full)  # the run recomputes all layers
    half = model - 72 * B * s * l * h**2 * s / (6 * h) / 2
    assert counted_flop(world.plan, "model flops, causal attention counted half") == pytest.approx(half)
    parameters = world.plan.transformer
    assert counted_flop(world.plan, "model flops 6N+12Lhs (no causal halving)") == pytest.approx(
        (6 * _gpt_parameters(l, h, V, s) + 12 * l * h * s) * B * s, rel=0.01
    ), parameters


def _gpt_parameters(layers: int, hidden: int, vocab: int, positions: int) -> float:
    """12 l h^2 (1 + 13/12h), tied embedding and positions (Narayanan et al., 2021, equation 2)."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden)) + (vocab + positions) * hidden


# --- Runs ------------------------------------------------------------------------------------------------------------


def test_a_run_is_compared_in_its_time_and_its_memory() -> None:
    time, memory = predict(replace(GPT_22B, peak_mem_gb=10.0))
    assert (time.quantity, time.measured, time.judge, time.assumed) == (TIME, 1.0, ESTIMATE, False)
    assert time.predicted is not None and 0.01 < time.predicted < 1.0
    assert time.relative_error == pytest.approx(time.predicted - 1)
    assert (memory.quantity, memory.measured) == (MEMORY, 10.0)
    world = modelled(GPT_22B, read_assumptions())
    assert isinstance(world, Modelled)
    assert memory.predicted == pytest.approx(max(peak_bytes(world.plan, world.cluster).values()) / 1e9)


def test_memory_is_in_gib_where_the_notes_of_the_rows_or_the_code_that_logged_it_say_so() -> None:
    rows = [run for run in read_runs(fidelity.PUBLISHED) if run.peak_mem_gb]
    said = {run.source_key for run in rows if "GiB" in (run.notes or "")} | {"ultrascale"}
    assert {"torchtitan", "sailor_het", "sailor_gh", "simumax_b200"} <= said
    for run in rows:
        unit = 2.0**30 if run.source_key in said else 1e9
        assert measured_peak_bytes(run) == (run.peak_mem_gb or 0.0) * unit, run.id
    run = next(run for run in rows if run.source_key == "sailor_het")
    world = modelled(run, read_assumptions())
    assert isinstance(world, Modelled)
    (memory,) = [found for found in predict(run) if found.quantity == MEMORY]
    assert memory.predicted == pytest.approx(max(peak_bytes(world.plan, world.cluster).values()) / 2**30)


@pytest.mark.parametrize(("source", "without"), [("ultrascale", ("context",)), ("simumax_b200", ("context", "reserve"))])
def test_a_peak_that_the_allocator_counted_is_compared_without_what_it_does_not_know(
    source: str, without: tuple[str, ...]
) -> None:
    run = next(run for run in read_runs(fidelity.PUBLISHED) if run.source_key == source and run.peak_mem_gb)
    world = modelled(run, read_assumptions())
    assert isinstance(world, Modelled)
    lanes = [parts for _, _, _, parts in lane_parts(world.plan, world.cluster.stack)]
    known = max(sum(size for part, size in vars(parts).items() if part not in without) for parts in lanes)
    (memory,) = [found for found in predict(run) if found.quantity == MEMORY]
    assert memory.predicted == pytest.approx(known / 2**30)
    assert known < max(peak_bytes(world.plan, world.cluster).values())


def test_where_no_time_is_published_the_first_rate_is_compared() -> None:
    (time,) = predict(GPT_22B)
    counting = "model flops"
    (rate,) = predict(replace(GPT_22B, iter_time_s=None, tflops_per_gpu=50.0, tflops_counting=counting, mfu_pct=16.0))
    (mfu,) = predict(replace(GPT_22B, iter_time_s=None, tflops_counting=counting, mfu_pct=16.0))
    (named,) = predict(replace(GPT_22B, iter_time_s=None, tflops_counting=f"{counting}, peak 156 TFLOPS", mfu_pct=16.0))
    world = modelled(GPT_22B, read_assumptions())
    assert isinstance(world, Modelled) and time.predicted and rate.predicted and mfu.predicted and named.predicted
    assert rate.quantity == "tflops_per_gpu" and mfu.quantity == named.quantity == "mfu_pct"
    assert rate.predicted * 1e12 * 8 * time.predicted == pytest.approx(counted_flop(world.plan, counting))
    assert mfu.predicted == pytest.approx(100 * rate.predicted / 312)  # the peak of an A100 in fp16
    assert named.predicted == pytest.approx(2 * mfu.predicted)
    (other,) = predict(replace(GPT_22B, iter_time_s=None, tflops_counting=f"{counting} (TF32 peak)", mfu_pct=16.0))
    assert other.predicted == pytest.approx(2 * mfu.predicted)  # 156 TFLOP/s, too
    # A publication may count the FLOP of its rates in two ways.
    both = f"tflops_per_gpu = {counting}; mfu_pct = model flops"
    rate, mfu = (
        predict(replace(GPT_22B, iter_time_s=None, tflops_counting=both, **{quantity: 50.0}))[0]  # type: ignore[arg-type]
        for quantity in ("tflops_per_gpu", "mfu_pct")
    )
    flop = [rate.predicted * 1e12 * 8, mfu.predicted / 100 * 312e12 * 8] if rate.predicted and mfu.predicted else []
    assert [each * time.predicted for each in flop] == pytest.approx(
        [counted_flop(world.plan, counting), counted_flop(world.plan, "model flops")]
    )
    # Whatever the speed is told in, the seconds of the iteration are the same ones, and those measured follow from the rate.
    assert rate.predicted_s == mfu.predicted_s == named.predicted_s == time.predicted == time.predicted_s
    assert time.measured_s == time.measured and rate.measured_s is not None
    assert rate.measured_s == pytest.approx(counted_flop(world.plan, counting) / (50e12 * 8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 3}, "degrees 2 x 2 x 3 = 12, but num_gpus is 8"),
        ({"global_batch": 15}, "global_batch 15 does not divide"),
        ({"num_layers": None}, "num_layers"),
        ({"num_layers": None, "seq_len": None, "tp": None}, "not modelled: num_layers, tp, seq_len"),
        ({"gpu_type": "A101-80GB-SXM"}, "did you mean"),
        ({"heads": 15, "kv_heads": 15, "hidden": 960}, "15"),
        ({"iter_time_s": None}, "nothing to compare is published"),
        ({"iter_time_s": 0.0}, "nothing to compare is published"),
    ],
)
def test_a_run_that_cannot_be_modelled_says_why(changes: dict[str, object], words: str) -> None:
    (found,) = predict(replace(GPT_22B, **changes))  # type: ignore[arg-type]
    assert found.predicted is None and found.relative_error is None
    assert words in found.note


def test_what_is_too_far_from_what_was_measured_is_told_and_no_number() -> None:
    (found,) = predict(replace(GPT_22B, iter_time_s=5e-324, peak_mem_gb=None))
    assert (found.predicted, found.relative_error) == (None, None)
    assert found.note == "not modelled: predicted and measured are too far apart"


def test_a_peak_that_no_device_has_is_told_and_no_error() -> None:
    # In MB, as nvidia-smi prints it.
    time, memory = predict(replace(GPT_22B, peak_mem_gb=62_000.0))
    assert time.predicted is not None and (memory.predicted, memory.relative_error) == (None, None)
    assert memory.note.startswith("not modelled: peak_mem_gb 62000 is more than the ") and "that a device has" in memory.note


def test_speeds_that_contradict_one_another_are_told() -> None:
    (found,) = predict(replace(GPT_22B, iter_time_s=2.0))
    world = modelled(GPT_22B, read_assumptions())
    assert isinstance(world, Modelled)
    # By hand: 2 s of this many FLOP on all its GPUs, of a peak of 312 TFLOP/s each.
    flop_per_gpu = model_flop(world.plan.transformer, world.plan.global_batch, world.plan.sequence_length) / len(
        world.plan.devices
    )
    share = 100 * flop_per_gpu / 2.0 / 312e12
    for rate, contradicts in ((share, False), (share / 1.4, False), (1.4 * share, False), (share / 2, True), (2 * share, True)):
        (told,) = predict(replace(GPT_22B, iter_time_s=2.0, mfu_pct=rate))
        took = 2.0 * share / rate
        said = f"iter_time_s 2 and mfu_pct {rate:g} ({took:.4g} s) contradict one another"
        other = f"mfu_pct {rate:g} ({took:.4g} s) and iter_time_s 2 contradict one another"
        assert told.note == (found.note if not contradicts else said if took > 2.0 else other)
        assert (told.quantity, told.predicted) == (found.quantity, found.predicted)


def test_a_run_that_is_predicted_not_to_fit_by_far_is_told_so() -> None:
    (fits,) = predict(replace(GPT_22B, iter_time_s=2.0))
    (found,) = predict(replace(GPT_22B, iter_time_s=2.0, recompute="none", micro_batch=8, seq_len=65536))
    assert fits.note == "" and found.predicted is not None
    need, have = map(float, re.findall(r"predicted not to fit: ([\d.]+) GiB of ([\d.]+); perhaps recompute", found.note)[0])
    assert have == 80.0 and need > 1.1 * have
    # What is predicted to be a little beyond may have fitted.
    told: dict[bool, list[float]] = {False: [], True: []}
    for length in range(4096, 20_480, 256):
        row = replace(GPT_22B, iter_time_s=2.0, recompute="none", micro_batch=8, seq_len=length)
        world = modelled(row, read_assumptions())
        assert isinstance(world, Modelled)
        share = max(peak_bytes(world.plan, world.cluster).values()) / (80 * 2**30)
        told[predict(row)[0].note.startswith("predicted not to fit")].append(share)
    assert 1.0 < max(told[False]) <= 1.1 < min(told[True]) < 1.2


def test_a_run_with_a_bad_cell_is_told_although_nothing_else_is_published() -> None:
    (found,) = predict(
        replace(GPT_22B, iter_time_s=None, bad_cells=("iter_time_s is a number above 0, or empty, but got 'soon'",))
    )
    assert found.note == "not modelled: iter_time_s is a number above 0, or empty, but got 'soon'"


@pytest.mark.parametrize(("rate", "within"), [(25.0, 5e-3), (50.0, 5e-3), (100.0, 1e-6), (200.0, 1e-6)])
def test_predictions_on_slow_networks_are_those_of_the_simulation(rate: float, within: float) -> None:
    # Lanes on two nodes each, whose sums and collectives of context ranks meet messages. On slow ones who meets whom hangs on
    # the last digits: at 50 GB/s the simulation itself changes by 0.3 % when computations take 1e-12 longer or shorter.
    run = next(run for run in read_runs(DATA / "published_runs.csv") if run.id == "dgxc-0230")
    slow = replace(run, inter_node_GBps_per_node=rate, iter_time_s=1.0)
    world = modelled(slow, read_assumptions())
    assert isinstance(world, Modelled)
    (found,) = predict(slow)
    assert found.predicted == pytest.approx(simulate(world.plan, world.cluster).iteration_s, rel=within)


def test_a_run_without_its_micro_batch_is_predicted_at_the_best_and_marked() -> None:
    open_ = replace(GPT_22B, source_key="sc21", micro_batch=None, schedule="1f1b")
    (found,) = predict(open_)
    assert found.assumed and found.note.startswith("assumed: micro_batch one of 1, 2, 4, 8")
    each = [predict(replace(open_, micro_batch=m))[0].predicted for m in (1, 2, 4, 8)]
    assert found.predicted == min(time for time in each if time is not None)


def test_plans_that_cannot_be_the_best_are_not_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # With fewer micro-batches a pipeline idles longer, but a GPU is no faster with sequences of 2,048 tokens.
    open_ = replace(GPT_22B, source_key="sc21", micro_batch=None, schedule="1f1b", seq_len=2048, pp=4, tp=1)
    asked: list[int] = []

    class Counted(Estimate):
        def __init__(self, plan: Plan, cluster: Cluster, network: Network | None = None) -> None:
            asked.append(plan.pipelines[0].micro_batch)
            super().__init__(plan, cluster, network)

    monkeypatch.setattr(fidelity, "Estimate", Counted)
    predict(open_)
    assert 0 < len(asked) < 4


def test_whether_a_run_fits_is_checked_against_its_devices() -> None:
    assert check_fit(GPT_22B, ran=True).fits is True
    assert check_fit(replace(GPT_22B, seq_len=65536, recompute="none", micro_batch=8), ran=False).fits is False
    unknown = check_fit(replace(GPT_22B, tp=None), ran=False)
    assert unknown.fits is None and unknown.note == "not modelled: tp"


def test_a_replay_checks_memory_where_failures_are_told_to_be_for_memory() -> None:
    failed = replace(GPT_22B, id="mine-failed", iter_time_s=None, failure="OOM", seq_len=65536, recompute="none", micro_batch=8)
    other = replace(GPT_22B, id="other-1", source_key="vtrain_multi")
    told, interrupted = replay([GPT_22B, other], [failed], processes=1)
    assert not interrupted
    assert [(check.id, check.ran, check.fits) for check in told.checks] == [("mine-1", True, True), ("mine-failed", False, False)]
    assert [c.id for c in told.comparisons] == ["mine-1", "other-1"]


def test_an_error_of_ours_is_told_with_its_run_and_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, plan: Plan, cluster: Cluster, network: Network) -> None:
            self.plan = plan

        def iteration_s(self) -> float:
            if self.plan.global_batch == 16:
                raise ZeroDivisionError("float division by zero")
            return 2.0

    monkeypatch.setattr(fidelity, "Estimate", Failing)
    told, _ = replay([GPT_22B, replace(GPT_22B, id="mine-2", global_batch=32)], processes=1)
    assert [(c.id, c.predicted, c.note) for c in told.comparisons] == [
        ("mine-1", None, "not modelled: ZeroDivisionError: float division by zero"),
        ("mine-2", 2.0, ""),
    ]


@pytest.mark.parametrize("intra", ["NVLink3", "PCIe"])
def test_runs_whose_transfers_meet_are_predicted_as_they_are_simulated(intra: str) -> None:
    run = replace(GPT_22B, intra_node_link=intra)
    world = modelled(run, read_assumptions())
    (found,) = predict(run)
    assert isinstance(world, Modelled) and found.judge == ESTIMATE
    assert found.predicted == pytest.approx(simulate(world.plan, world.cluster).iteration_s, rel=1e-6)
    estimate = Estimate(world.plan, world.cluster)
    assert estimate.iteration_s() and estimate.contended


def test_the_file_has_all_rows_and_tells_runs_of_the_fit_apart() -> None:
    rows = (compared(11.0, 10.0, "a-1"), compared(30.0, 10.0, "a-2"), compared(None, 10.0, "a-3", note="not modelled: tp"))
    found = json.loads(replay_json(Replay(rows, (), frozenset({"a-2"}))))
    assert [list(row)[:7] for row in found["runs"]] == [
        ["id", "source_key", "quantity", "predicted", "measured", "relative_error", "note"]
    ] * 3
    assert [row["calibration"] for row in found["runs"]] == [False, True, False]
    assert found["runs"][0]["relative_error"] == pytest.approx(0.1)
    assert found["runs"][2]["predicted"] is None and found["runs"][2]["relative_error"] is None
    assert found["overall"]["count"] == 1 and found["overall"]["bias"] == pytest.approx(0.1)
    assert found["calibration"]["overall"]["bias"] == pytest.approx(2.0)
    assert list(found["sources"]) == ["a"]


def test_after_a_fit_memory_is_told_of_runs_that_it_did_not_see() -> None:
    checks = (FitCheck("a-1", "a", ran=True, fits=True), FitCheck("a-2", "a", ran=True, fits=False))
    found = json.loads(replay_json(Replay((compared(11.0, 10.0, "a-1"),), checks, frozenset({"a-2"}))))
    assert found["out_of_memory"]["a"]["ran"] == {"count": 1, "right": 1, "not_modelled": 0, "share": 1.0, "reasons": {}}


# --- Constants -------------------------------------------------------------------------------------------------------


def test_the_shipped_file_read_as_constants_changes_nothing() -> None:
    shipped = read_constants(CONSTANTS)
    assert shipped.efficiencies == efficiencies() and shipped.stacks == stacks()
    assert predict(GPT_22B, shipped)[0].predicted == pytest.approx(float(predict(GPT_22B)[0].predicted or 0))


def test_constants_of_a_file_take_the_place_of_the_shipped_ones() -> None:
    world = modelled(GPT_22B, read_assumptions())
    assert isinstance(world, Modelled)
    name = world.cluster.stack.name
    records = "efficiencies: {ampere-datacenter: {matmul_fraction: 0.25}, hopper: {matmul_fraction: 0.5}}"
    text = f"{records}\nstacks: {{{name}: {{step: 3 s}}}}\n"
    constants = parse_constants(text, "mine.yaml")
    cluster = constants.applied(world.cluster)
    efficiency, before = cluster.nodes[0].gpu.efficiency, world.cluster.nodes[0].gpu.efficiency
    assert efficiency.matmul_fraction == 0.25 and efficiency.launch_s == before.launch_s
    assert cluster.stack == replace(world.cluster.stack, step_s=3.0)
    slow = predict(GPT_22B, constants)[0].predicted
    assert slow is not None and slow > 3.0
    assert Constants().applied(world.cluster) == world.cluster


def test_what_a_cluster_changed_itself_it_keeps() -> None:
    world = modelled(GPT_22B, read_assumptions())
    assert isinstance(world, Modelled)
    own = replace(world.cluster, stack=replace(world.cluster.stack, host_s=7e-6))
    changed = parse_constants(f"stacks: {{{own.stack.name}: {{host: 1 us, step: 3 s}}}}", "mine.yaml").applied(own)
    assert (changed.stack.host_s, changed.stack.step_s) == (7e-6, 3.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "efficiencies: {hoper: {matmul_fraction: 0.9}}",
            "mine.yaml: efficiencies.hoper: is not the name of a record; did you mean hopper?",
        ),
        ("efficiencies: {hopper: {matmul_fraction: 9}}", "efficiencies.hopper.efficiency.matmul_fraction"),
        ("stackz: {}", "unknown key 'stackz'"),
        ("stacks: {motley: {step: 3}}", "stacks.motley.step: got 3 without a unit"),
        ("a: [", "is not valid YAML"),
        ("", "expected a mapping"),
    ],
)
def test_a_mistake_in_a_constants_file_is_told(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_constants(text, "mine.yaml")
    assert words in str(caught.value) and "\n" not in str(caught.value)


# --- The picture -----------------------------------------------------------------------------------------------------


def test_every_source_has_a_marker_of_its_own_and_the_axes_are_alike() -> None:
    points = [ParityPoint(f"source-{i}", 0.1 * (i + 1), 0.12 * (i + 1)) for i in range(30)] + [
        ParityPoint("source-0", 50.0, 40.0)
    ]
    ax = plot_parity(points, title="30 sources")
    shown = {line.get_label(): line for line in ax.lines if str(line.get_label()).startswith("source-")}
    assert len(shown) == 30
    assert len({(line.get_marker(), line.get_color()) for line in shown.values()}) == 30
    assert list(shown["source-0"].get_xdata()) == [0.1, 50.0] and list(shown["source-0"].get_ydata()) == [0.12, 40.0]  # type: ignore[arg-type]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log") and ax.get_xlim() == ax.get_ylim()
    assert ax.get_xlim()[0] < 0.1 and ax.get_xlim()[1] > 50
    assert "in s" in ax.get_xlabel() and "measured" in ax.get_xlabel() and "predicted" in ax.get_ylabel()
    figure = ax.get_figure(root=True)
    assert figure is not None
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[0] == "source-0 (2)" and words[-3:] == ["predicted = measured", "within 10 %", "a factor of 2"]
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().y0 > 0


def test_nothing_to_plot_is_told() -> None:
    with pytest.raises(InputError, match="nothing to plot"):
        plot_parity([])


def test_the_shipped_runs_can_be_found() -> None:
    from experiments.fidelity import FAILED, PUBLISHED

    assert Path(PUBLISHED).is_file() and Path(FAILED).is_file()
