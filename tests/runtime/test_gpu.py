"""Runs on a GPU. Several workers share one through gloo, so that one GPU is enough for every kind of plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from runtime.launch import launch_locally
from runtime.results import RunResult, read_result
from runtime.settings import DTYPES, Settings
from sim.spec.plan import Plan
from tests.runtime.test_equality import GPT, LLAMA, MIXTURE, PLANS, pipeline, plan_of, reference, settings_of
from tests.runtime.workers import token_file

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

TOKENS = 4000


def run(plan: Plan, settings: Settings, folder: Path) -> RunResult:
    """The result of a run by workers of their own."""
    path = folder / "plan.json"
    path.write_text(plan.to_json())
    launch_locally(path, plan, dataclasses.replace(settings, results=folder / "results", quiet=True))
    return read_result(folder / "results")


@pytest.mark.parametrize(
    "name",
    [
        "degrees 1 to 4 with sequence parallel",
        "unlike cuts",
        "zero 1, tied, sequence parallel",
        "offloaded, unlike cuts",
        "offloaded, zero 1, tied",
        "zero 2, two stages, uneven replicas",
        "zero 3, unequal degrees, recomputed",
        "interleaved, tied, beside another number of ranges",
        "zb-v, zero 3, two pipelines",
        "shard groups of two, unlike cuts, zero 1",
        "shard groups of three, uneven replicas, zero 3",
        "experts, stages of unlike degrees, recomputed",
        "divided experts, tensor and sequence parallel, zero 2",
        "divided experts, stages, zero 3, some held twice",
        "divided experts, zb-2p",
        "whole experts, two groups in any order, recomputed, zero 2",
        "divided experts, context ranks, sequence parallel",
        "context, learned positions, tied, sequence parallel",
        "context, zero 3, uneven replicas, pointwise recomputed",
        "context, zb-1p, beside a pipeline of another degree",
    ],
)
def test_workers_that_share_a_gpu_learn_as_one_process_does(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    precision, tolerance = "fp64", 1e-8
    if plan.context_parallel > 1:  # a GPU has no kernel for a block of a ring in fp64
        plan, precision, tolerance = dataclasses.replace(plan, optimizer="sgd"), "fp32", 1e-5
    data = token_file(tmp_path, plan.transformer.vocab, TOKENS)
    chosen = settings_of(plan, data, device="cuda", backend="gloo", precision=precision)
    result = run(plan, chosen, tmp_path)
    losses, _ = reference(plan, chosen, DTYPES[precision])
    assert list(result.losses) == pytest.approx(losses, rel=tolerance)
    assert set(result.trace.peak_bytes) == set(plan.devices)
    assert all(peak > 0 for peak in result.trace.peak_bytes.values())
    assert result.trace.iteration_s > 0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.03), ("fp16", 0.01)])
def test_one_gpu_trains_in_every_precision(precision: str, tolerance: float, compiled: bool, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLANS["one device"], precision=precision)
    chosen = settings_of(plan, token_file(tmp_path, plan.transformer.vocab, TOKENS), device="cuda", compile=compiled)
    result = run(plan, dataclasses.replace(chosen, timeout_s=300.0), tmp_path)
    losses, _ = reference(plan, dataclasses.replace(chosen, device="cpu"), torch.float32)
    assert list(result.losses) == pytest.approx(losses, abs=tolerance)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU, and NCCL needs one for each worker")
@pytest.mark.parametrize(
    "plan",
    [
        plan_of(LLAMA, pipeline(1, 4, ((0, 2), (0,)), ((2, 4), (1,)))),
        plan_of(LLAMA, pipeline(2, 2, ((0, 4), (0, 1))), sequence_parallel=True),
        plan_of(GPT, pipeline(1, 2, ((0, 4), (0,))), pipeline(2, 2, ((0, 4), (1,))), zero_stage=2),
        plan_of(LLAMA, pipeline(1, 3, ([(0, 1), (2, 3)], (0,)), ([(1, 2), (3, 4)], (1,))), schedule="interleaved"),
        plan_of(MIXTURE, pipeline(1, 3, ((0, 4), (0,))), pipeline(2, 3, ((0, 4), (1,))), expert_parallel=2),
        plan_of(GPT, pipeline(1, 3, ((0, 4), (0,))), pipeline(2, 3, ((0, 4), (1,))), zero_stage=3, shard_group=1),
    ],
    ids=["two stages", "tensor parallel", "two pipelines", "interleaved", "divided experts", "shard groups"],
)
def test_two_gpus_learn_through_nccl_as_one_process_does(plan: Plan, tmp_path: Path) -> None:
    chosen = settings_of(plan, token_file(tmp_path, plan.transformer.vocab, TOKENS), device="cuda", precision="fp64")
    result = run(plan, chosen, tmp_path)
    losses, _ = reference(plan, chosen, torch.float64)
    assert list(result.losses) == pytest.approx(losses, rel=1e-8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU, and NCCL needs one for each worker")
def test_blocks_go_round_two_gpus_through_nccl(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLANS["context, two ranks"], optimizer="sgd")
    chosen = settings_of(plan, token_file(tmp_path, plan.transformer.vocab, TOKENS), device="cuda", precision="fp32")
    result = run(plan, chosen, tmp_path)
    losses, _ = reference(plan, chosen, torch.float32)
    assert list(result.losses) == pytest.approx(losses, rel=1e-5)
