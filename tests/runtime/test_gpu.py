"""Runs on a GPU. Several workers share one through gloo, so that one GPU is enough for every kind of plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from runtime.launch import launch_locally
from runtime.results import RunResult, read_result
from runtime.settings import Settings
from sim.spec.plan import Plan
from tests.runtime.test_equality import (
    GPT,
    LLAMA,
    MIXTURE,
    PLANS,
    WITH_MANY_STEPS_ALONE,
    assert_equal,
    pipeline,
    plan_of,
    rate_of,
    reference,
    settings_of,
)
from tests.runtime.workers import Order, Workers, token_file

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

TOKENS = 4000


def run(plan: Plan, settings: Settings, folder: Path) -> RunResult:
    """The result of a run by workers of their own."""
    path = folder / "plan.json"
    path.write_text(plan.to_json())
    launch_locally(path, plan, dataclasses.replace(settings, results=folder / "results", quiet=True))
    return read_result(folder / "results")


IN_FP64 = [name for name, plan in PLANS.items() if plan.context_parallel == 1 and name not in WITH_MANY_STEPS_ALONE]
IN_RINGS = [name for name, plan in PLANS.items() if plan.context_parallel > 1]
"""Of these in fp32: a GPU has no kernel for a block of a ring in fp64."""


@pytest.mark.parametrize("name", IN_FP64)
def test_workers_that_share_a_gpu_learn_as_one_process_does(name: str, workers: Workers, tmp_path: Path) -> None:
    plan = PLANS[name]
    data = token_file(tmp_path, plan.transformer.vocab, TOKENS)
    more = {"device": "cuda", "backend": "gloo", "precision": "fp64", "learning_rate": rate_of(plan.transformer)}
    chosen = settings_of(plan, data, **more)
    outcome = workers.train(Order(plan, chosen, bucket_parameters=1000))
    assert_equal(outcome, *reference(plan, chosen, torch.float64), tolerance=1e-8)


@pytest.mark.parametrize("name", IN_RINGS)
def test_rings_that_share_a_gpu_learn_as_one_process_does(name: str, workers: Workers, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLANS[name], optimizer="sgd")
    data = token_file(tmp_path, plan.transformer.vocab, TOKENS)
    chosen = settings_of(plan, data, device="cuda", backend="gloo", precision="fp32")
    losses, _ = reference(plan, chosen, torch.float32)
    assert workers.train(Order(plan, chosen)).losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["offloaded, zero 1, tied", "zb-v, zero 3, two pipelines", "divided experts, tensor and sequence parallel, zero 2"]
)
def test_runs_that_share_a_gpu_tell_their_peaks(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    data = token_file(tmp_path, plan.transformer.vocab, TOKENS)
    chosen = settings_of(plan, data, device="cuda", backend="gloo", precision="fp64")
    result = run(plan, chosen, tmp_path)
    losses, _ = reference(plan, chosen, torch.float64)
    assert list(result.losses) == pytest.approx(losses, rel=1e-8)
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
