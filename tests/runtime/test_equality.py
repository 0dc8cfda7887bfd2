"""Training by a plan equals training in one process, whatever the plan."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from runtime.data import Order as SampleOrder
from runtime.data import open_data
from runtime.settings import Settings, check_runnable
from sim.spec.counts import RECOMPUTE
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError
from sim.spec.transformer import Moe, Transformer
from tests.runtime.reference import initial_weights, train
from tests.runtime.workers import WORKERS, Order, Outcome, Workers, token_file
from tests.strategies import plans

STEPS = 3
TOKENS = 4000

LLAMA = Transformer(name="small-llama", layers=4, hidden=32, ffn=48, heads=4, kv_heads=2, vocab=96)
NORMED = dataclasses.replace(LLAMA, name="small-qwen", qk_norm=True, tied_embeddings=True)
GPT = Transformer(
    name="small-gpt",
    layers=4,
    hidden=32,
    ffn=64,
    heads=4,
    vocab=90,
    padded_vocab=96,
    activation="gelu",
    norm="layernorm",
    attention_bias="all",
    mlp_bias=True,
    position="learned",
    max_positions=128,
    tied_embeddings=True,
)

WIDE = Transformer(name="wide-llama", layers=2, hidden=256, ffn=64, heads=4, kv_heads=2, vocab=96)

MIXTURE = dataclasses.replace(LLAMA, name="small-mixtral", experts=Moe(experts=6, top_k=2, ffn=24))
SHARED = dataclasses.replace(NORMED, name="small-shared", experts=Moe(experts=4, top_k=3, ffn=16, shared_experts=2, shared_ffn=8))
RELU_MIXTURE = dataclasses.replace(GPT, name="small-switch", mlp_bias=False, activation="relu", experts=Moe(4, 1, 32))


def pipeline(micro_batch: int, micro_batches: int, *stages: tuple[object, ...]) -> Pipeline:
    """A pipeline of stages (layers, devices) or (layers, (devices, sequences), ...), with a recompute mode at the end if any.

    Layers are one range, or a list of ranges.
    """
    made = []
    for layers, *rest in stages:
        mode = rest.pop() if isinstance(rest[-1], str) and rest[-1] in RECOMPUTE else "none"
        replicas = (
            tuple(Replica(tuple(f"n/{i}" for i in devices), sequences) for devices, sequences in rest)  # type: ignore[misc]
            if isinstance(rest[0][0], tuple)  # type: ignore[index]
            else (Replica(tuple(f"n/{i}" for i in rest[0]), micro_batch),)  # type: ignore[attr-defined]
        )
        ranges = tuple(layers) if isinstance(layers, list) else (layers,)
        made.append(Stage(replicas, ranges, mode))  # type: ignore[arg-type]
    return Pipeline(micro_batch, micro_batches, tuple(made))


def plan_of(model: Transformer, *pipelines: Pipeline, **more: object) -> Plan:
    return Plan(
        cluster="test",
        model=model,
        global_batch=sum(p.sequences for p in pipelines),
        pipelines=pipelines,
        precision="fp32",
        **{"sequence_length": 16, "zero_stage": 0, **more},  # type: ignore[arg-type]
    )


PLANS = {
    "one device": plan_of(LLAMA, pipeline(2, 2, ((0, 4), (0,)))),
    "tensor parallel": plan_of(LLAMA, pipeline(2, 2, ((0, 4), (0, 1, 2, 3)))),
    "sequence parallel": plan_of(LLAMA, pipeline(2, 2, ((0, 4), (0, 1, 2, 3))), sequence_parallel=True),
    "degrees 4 to 2": plan_of(LLAMA, pipeline(1, 4, ((0, 3), (0, 1, 2, 3)), ((3, 4), (4, 5)))),
    "degrees 1 to 4 with sequence parallel": plan_of(
        LLAMA, pipeline(2, 3, ((0, 1), (5,)), ((1, 4), (0, 1, 2, 3))), sequence_parallel=True
    ),
    "devices in any order": plan_of(
        LLAMA, pipeline(2, 2, ((0, 2), (3, 0)), ((2, 4), (2, 1))), pipeline(1, 1, ((0, 4), (5, 4))), sequence_parallel=True
    ),
    "three stages, gpipe": plan_of(
        LLAMA, pipeline(1, 4, ((0, 2), (0,)), ((2, 3), (1, 2)), ((3, 4), (3,), "full")), schedule="gpipe"
    ),
    "micro-batches in flight as the stages say": plan_of(
        LLAMA,
        pipeline(1, 6, ((0, 2), (0,)), ((2, 3), (1, 2)), ((3, 4), (3,))).holding([6, 3, 3]),
        pipeline(1, 2, ((0, 3), (4,)), ((3, 4), (5,))).holding([1, 1]),
    ),
    "gradients that go on before the weight half": plan_of(
        GPT,
        pipeline(1, 5, ((0, 2), (0, 1)), ((2, 4), (2,), "full")).holding([4, 2]),
        pipeline(1, 3, ((0, 1), (3,)), ((1, 4), (4, 5))),
        schedule="split-1f1b",
    ),
    "unlike cuts": plan_of(
        LLAMA, pipeline(1, 3, ((0, 1), (0,)), ((1, 4), (1,))), pipeline(2, 2, ((0, 3), (2,)), ((3, 4), (3, 4)))
    ),
    "degrees 2, 1 and 2 for the same layers": plan_of(
        LLAMA, pipeline(1, 2, ((0, 4), (0, 1))), pipeline(2, 1, ((0, 4), (2,))), pipeline(1, 3, ((0, 2), (3, 4)), ((2, 4), (5,)))
    ),
    "degree 4 beside 1, sequence parallel": plan_of(
        LLAMA, pipeline(2, 2, ((0, 4), (0, 1, 2, 3))), pipeline(1, 3, ((0, 4), (4,))), sequence_parallel=True
    ),
    "norms of query and key, degree 4 beside 1": plan_of(
        NORMED, pipeline(2, 2, ((0, 4), (0, 1, 2, 3))), pipeline(1, 3, ((0, 2), (4,)), ((2, 4), (5,))), zero_stage=1
    ),
    "uneven replicas": plan_of(LLAMA, pipeline(4, 2, ((0, 2), ((0,), 3), ((1, 2), 1)), ((2, 4), ((3,), 2), ((4, 5), 2)))),
    "tied embeddings over stages": plan_of(
        GPT, pipeline(1, 3, ((0, 2), (0, 1), "selective"), ((2, 4), (2,))), pipeline(2, 2, ((0, 4), (3,), "full"))
    ),
    "tied embeddings, sequence parallel": plan_of(
        GPT, pipeline(2, 2, ((0, 3), (0, 1)), ((3, 4), (2, 3))), pipeline(1, 1, ((0, 4), (4, 5))), sequence_parallel=True
    ),
    "ends alone": plan_of(GPT, pipeline(1, 3, ((0, 0), (0,)), ((0, 4), (1, 2)), ((4, 4), (3,)))),
    "zero 1, unequal replicas": plan_of(
        LLAMA, pipeline(1, 2, ((0, 4), (0, 1))), pipeline(2, 1, ((0, 1), (2,)), ((1, 4), (3,))), zero_stage=1
    ),
    "offloaded, unlike cuts": plan_of(
        LLAMA,
        pipeline(1, 3, ((0, 1), (0,)), ((1, 4), (1,))),
        pipeline(2, 2, ((0, 3), (2,)), ((3, 4), (3, 4))),
        offload_optimizer=True,
    ),
    "offloaded, zero 1, tied": plan_of(
        GPT,
        pipeline(2, 2, ((0, 2), (0, 1)), ((2, 4), (2,))),
        pipeline(1, 3, ((0, 4), (3, 4))),
        zero_stage=1,
        offload_optimizer=True,
    ),
    "zero 1, tied, sequence parallel": plan_of(
        GPT,
        pipeline(2, 2, ((0, 2), (0, 1)), ((2, 4), (2,))),
        pipeline(1, 3, ((0, 4), (3, 4))),
        zero_stage=1,
        sequence_parallel=True,
    ),
    "zero 2, unequal degrees": plan_of(
        LLAMA, pipeline(1, 3, ((0, 4), (0, 1, 2, 3))), pipeline(2, 3, ((0, 4), (4,))), zero_stage=2
    ),
    "zero 2, two stages, uneven replicas": plan_of(
        GPT, pipeline(3, 2, ((0, 3), ((0,), 1), ((1, 2), 2)), ((3, 4), ((3,), 2), ((4,), 1))), zero_stage=2
    ),
    "zero 3, unequal degrees, recomputed": plan_of(
        LLAMA, pipeline(1, 3, ((0, 4), (0, 1), "full")), pipeline(2, 3, ((0, 4), (2,))), zero_stage=3
    ),
    "zero 3, two stages, uneven replicas": plan_of(
        GPT,
        pipeline(3, 2, ((0, 3), ((0,), 1), ((1, 2), 2)), ((3, 4), ((3,), 2), ((4,), 1))),
        zero_stage=3,
        schedule="gpipe",
        sequence_parallel=True,
    ),
    "shard groups of two, unlike cuts, zero 1": plan_of(
        GPT,
        pipeline(1, 3, ((0, 4), (5,))),
        pipeline(2, 2, ((0, 1), (0,)), ((1, 4), (1,))),
        pipeline(1, 2, ((0, 4), (3,))),
        pipeline(1, 1, ((0, 3), (4,)), ((3, 4), (2,))),
        zero_stage=1,
        shard_group=2,
    ),
    "shard groups of one, tensor and sequence parallel, zero 2": plan_of(
        LLAMA,
        pipeline(1, 2, ((0, 4), (3, 0), "full")),
        pipeline(2, 2, ((0, 4), (1, 2), "full")),
        zero_stage=2,
        shard_group=1,
        sequence_parallel=True,
    ),
    "shard groups of three, uneven replicas, zero 3": plan_of(
        NORMED,
        pipeline(8, 2, ((0, 4), ((4,), 1), ((0,), 2), ((2,), 1), ((5,), 1), ((3,), 2), ((1,), 1))),
        zero_stage=3,
        shard_group=3,
    ),
    "shard groups of two context ranks, zero 3": plan_of(
        LLAMA,
        pipeline(1, 2, ((0, 4), (0, 3))),
        pipeline(2, 2, ((0, 4), (2, 1))),
        context_parallel=2,
        zero_stage=3,
        shard_group=2,
    ),
    # Scatters of their sizes end while others go on, and what is a shard group of one slice has a shard of another in common.
    "shard groups of one, wide, tensor parallel, zero 1": plan_of(
        WIDE, pipeline(2, 3, ((0, 2), ((0, 1), 1), ((2, 3), 1))), zero_stage=1, shard_group=1
    ),
    "shard groups of two, wide, tied": plan_of(
        dataclasses.replace(WIDE, layers=4, tied_embeddings=True),
        pipeline(1, 3, ((0, 2), (0,)), ((2, 4), (1,))),
        pipeline(2, 2, ((0, 2), (2,)), ((2, 4), (3,))),
        zero_stage=1,
        shard_group=2,
    ),
    "shard groups of two, wide, zb-v, zero 3": plan_of(
        WIDE,
        pipeline(4, 3, ([(0, 1), (1, 2)], ((0,), 1), ((3,), 1), ((1,), 1), ((2,), 1))),
        schedule="zb-v",
        zero_stage=3,
        shard_group=2,
    ),
    "shard groups, but no zero, unlike degrees": plan_of(
        LLAMA, pipeline(1, 2, ((0, 4), (0, 1))), pipeline(1, 2, ((0, 4), (2,))), shard_group=1
    ),
    "one shard group of unlike degrees, zero 1": plan_of(
        LLAMA, pipeline(1, 2, ((0, 4), (0, 1))), pipeline(1, 2, ((0, 4), (2,))), zero_stage=1, shard_group=2
    ),
    "shard groups of one, offloaded, zb-1p, zero 1": plan_of(
        LLAMA,
        pipeline(4, 4, ((0, 2), ((0,), 1), ((2,), 3)), ((2, 4), ((1,), 1), ((3,), 3))),
        schedule="zb-1p",
        zero_stage=1,
        shard_group=1,
        offload_optimizer=True,
    ),
    "zero 3, pointwise recomputed": plan_of(
        LLAMA, pipeline(1, 3, ((0, 4), (0, 1), "pointwise")), pipeline(2, 3, ((0, 4), (2,), "pointwise")), zero_stage=3
    ),
    # Norms are computed again in the weight halves, when their parameters are released.
    "zero 3, split 1f1b, pointwise recomputed": plan_of(
        GPT,
        pipeline(1, 3, ((0, 4), (0, 1), "pointwise")),
        pipeline(2, 3, ((0, 4), (2,), "pointwise")),
        schedule="split-1f1b",
        zero_stage=3,
    ),
    "split 1f1b, pointwise recomputed, some in full": plan_of(
        GPT,
        Pipeline(
            2,
            3,
            tuple(part.recomputing("full", 1, "pointwise") for part in pipeline(2, 3, ((0, 2), (0, 1)), ((2, 4), (2,))).stages),
        ),
        schedule="split-1f1b",
        sequence_parallel=True,
    ),
    "zb-1p, pointwise recomputed": plan_of(
        LLAMA,
        pipeline(2, 3, ((0, 2), (0, 1), "pointwise"), ((2, 4), (2,), "pointwise")),
        schedule="zb-1p",
        sequence_parallel=True,
    ),
    "interleaved, three micro-batches on two stages": plan_of(
        LLAMA, pipeline(2, 3, ([(0, 1), (2, 3)], (0,)), ([(1, 2), (3, 4)], (1, 2), "selective")), schedule="interleaved"
    ),
    "interleaved, tied, beside another number of ranges": plan_of(
        GPT,
        pipeline(1, 4, ([(0, 1), (2, 3)], (0, 1)), ([(1, 2), (3, 4)], (2,))),
        pipeline(2, 2, ((0, 3), (3,)), ((3, 4), (4,))),
        schedule="interleaved",
        zero_stage=1,
    ),
    "interleaved, zero 3, uneven replicas": plan_of(
        LLAMA,
        pipeline(3, 2, ([(0, 1), (2, 3)], ((0,), 1), ((1, 2), 2)), ([(1, 2), (3, 4)], ((3,), 2), ((4,), 1))),
        schedule="interleaved",
        zero_stage=3,
    ),
    "zb-1p, degrees 2 and 1, recomputed": plan_of(
        LLAMA, pipeline(2, 4, ((0, 2), (0, 1), "full"), ((2, 4), (2,))), schedule="zb-1p", sequence_parallel=True
    ),
    "zb-1p, zero 2, two pipelines": plan_of(
        GPT,
        pipeline(1, 3, ((0, 1), (0,)), ((1, 4), (1, 2))),
        pipeline(2, 3, ((0, 1), (3,)), ((1, 4), (4,))),
        schedule="zb-1p",
        zero_stage=2,
    ),
    "zb-2p, three stages, unlike cuts": plan_of(
        LLAMA,
        pipeline(1, 5, ((0, 2), (0,)), ((2, 3), (1,)), ((3, 4), (2,))),
        pipeline(2, 2, ((0, 1), (3,)), ((1, 4), (4,))),
        schedule="zb-2p",
        zero_stage=1,
    ),
    "zb-v, tied ends on one stage": plan_of(
        GPT, pipeline(2, 3, ([(0, 1), (3, 4)], (0, 1)), ([(1, 2), (2, 3)], (2,), "full")), schedule="zb-v"
    ),
    "zb-v, zero 3, two pipelines": plan_of(
        LLAMA,
        pipeline(1, 4, ([(0, 1), (3, 4)], (0,)), ([(1, 2), (2, 3)], (1, 2))),
        pipeline(1, 4, ([(0, 1), (3, 4)], (3,)), ([(1, 2), (2, 3)], (4,))),
        schedule="zb-v",
        zero_stage=3,
        sequence_parallel=True,
    ),
    "zb-v, one stage and ends alone": plan_of(
        GPT,
        pipeline(1, 2, ([(0, 2), (2, 4)], (0,))),
        pipeline(1, 3, ([(0, 0), (4, 4)], (1,)), ([(0, 1), (1, 4)], (2,))),
        schedule="zb-v",
        zero_stage=1,
    ),
    "reductions after the backward": plan_of(
        LLAMA, pipeline(1, 2, ((0, 4), (0,))), pipeline(1, 2, ((0, 2), (1,)), ((2, 4), (2,))), overlap_gradients=False
    ),
    "slices, three stages of unlike degrees": plan_of(
        LLAMA,
        pipeline(2, 3, ((0, 2), (0,), "selective"), ((2, 3), (1, 2)), ((3, 4), (3,), "pointwise")),
        sequence_slices=2,
    ),
    "slices, one device and tied embeddings": plan_of(GPT, pipeline(2, 2, ((0, 4), (0,), "full")), sequence_slices=8),
    "slices, gpipe, tied, two pipelines": plan_of(
        GPT,
        pipeline(1, 3, ((0, 2), (0, 1), "full"), ((2, 4), (2,))),
        pipeline(2, 2, ((0, 1), (3,), "pointwise"), ((1, 4), (4,), "selective")),
        schedule="gpipe",
        sequence_slices=4,
    ),
    "slices, sequence parallel, zero 1": plan_of(
        NORMED,
        pipeline(2, 3, ((0, 2), (0, 1)), ((2, 4), (2, 3), "full")),
        pipeline(1, 2, ((0, 4), (4, 5), "pointwise")),
        zero_stage=1,
        sequence_parallel=True,
        sequence_slices=4,
    ),
    "slices, a window, in flight as the stages say": plan_of(
        dataclasses.replace(LLAMA, name="small-mistral", sliding_window=5),
        pipeline(1, 4, ((0, 2), (0,)), ((2, 3), (1, 2), "full"), ((3, 4), (3,))).holding([9, 4, 2]),
        pipeline(1, 2, ((0, 3), (4,)), ((3, 4), (5,))).holding([1, 1]),
        sequence_slices=4,
    ),
    "slices, split 1f1b, sequence parallel": plan_of(
        GPT,
        pipeline(2, 3, ((0, 2), (0, 1), "full"), ((2, 4), (2,), "pointwise")),
        pipeline(1, 2, ((0, 4), (3, 4))),
        schedule="split-1f1b",
        sequence_parallel=True,
        sequence_slices=2,
    ),
    "slices, split 1f1b, in flight as the stages say": plan_of(
        LLAMA, pipeline(1, 5, ((0, 2), (0, 1)), ((2, 4), (2,))).holding([6, 2]), schedule="split-1f1b", sequence_slices=4
    ),
    "slices, uneven replicas, reductions after the backward": plan_of(
        LLAMA,
        pipeline(4, 2, ((0, 2), ((0,), 3), ((1, 2), 1)), ((2, 4), ((3,), 2), ((4, 5), 2))),
        overlap_gradients=False,
        sequence_slices=2,
    ),
    "experts on one device": plan_of(MIXTURE, pipeline(2, 2, ((0, 4), (0,)))),
    "experts, stages of unlike degrees, recomputed": plan_of(
        SHARED, pipeline(2, 3, ((0, 2), (0, 1), "full"), ((2, 3), (2,), "pointwise"), ((3, 4), (3, 4), "selective"))
    ),
    "experts, sequence parallel, beside another degree": plan_of(
        MIXTURE, pipeline(2, 2, ((0, 4), (0, 1, 2, 3))), pipeline(1, 3, ((0, 4), (4,), "pointwise")), sequence_parallel=True
    ),
    "experts, zero 3, uneven replicas": plan_of(
        RELU_MIXTURE, pipeline(3, 2, ((0, 2), ((0,), 1), ((1, 2), 2)), ((2, 4), ((3,), 2), ((4,), 1))), zero_stage=3
    ),
    "experts, zb-1p, pointwise recomputed": plan_of(
        SHARED, pipeline(1, 4, ((0, 2), (0, 1), "pointwise"), ((2, 4), (2,), "pointwise")), schedule="zb-1p"
    ),
    "experts, slices": plan_of(MIXTURE, pipeline(2, 2, ((0, 2), (0,), "full"), ((2, 4), (1, 2))), sequence_slices=4),
    "divided experts, two pipelines": plan_of(
        MIXTURE, pipeline(1, 3, ((0, 4), (0,))), pipeline(2, 3, ((0, 4), (1,))), expert_parallel=2
    ),
    "divided experts, three replicas in any order, recomputed": plan_of(
        MIXTURE, pipeline(4, 2, ((0, 4), ((4,), 1), ((0,), 2), ((2,), 1), "full")), expert_parallel=3, zero_stage=0
    ),
    "experts, three pipelines, degrees 2 in any order, zero 1": plan_of(
        SHARED,
        pipeline(1, 2, ((0, 4), (5, 0), "pointwise")),
        pipeline(1, 2, ((0, 4), (1, 2))),
        pipeline(2, 1, ((0, 4), (3, 4))),
        zero_stage=1,
    ),
    "divided experts, tensor and sequence parallel, zero 2": plan_of(
        SHARED,
        pipeline(1, 2, ((0, 4), (3, 0), "full")),
        pipeline(2, 2, ((0, 4), (1, 2), "full")),
        expert_parallel=2,
        zero_stage=2,
        sequence_parallel=True,
    ),
    "divided experts, stages, zero 3, some held twice": plan_of(
        RELU_MIXTURE,
        pipeline(3, 2, ((0, 3), ((0,), 1), ((1,), 2)), ((3, 4), ((2,), 2), ((3,), 1), "full")),
        expert_parallel=2,
        zero_stage=3,
    ),
    "divided experts, four replicas of two parts, zero 1": plan_of(
        MIXTURE, pipeline(4, 2, ((0, 4), ((0,), 1), ((1,), 1), ((2,), 1), ((3,), 1))), expert_parallel=2, zero_stage=1
    ),
    "divided experts, context ranks, sequence parallel": plan_of(
        MIXTURE, pipeline(2, 2, ((0, 4), (0, 1, 2, 3))), expert_parallel=2, context_parallel=2, sequence_parallel=True
    ),
    "whole experts, one group, zero 1": plan_of(
        SHARED, pipeline(2, 2, ((0, 4), (1, 0))), expert_parallel=2, expert_tensor_parallel=1, sequence_parallel=True
    ),
    "whole experts, two groups in any order, recomputed, zero 2": plan_of(
        SHARED,
        pipeline(1, 2, ((0, 4), (3, 0), "full")),
        pipeline(2, 2, ((0, 4), (1, 2), "full")),
        expert_parallel=4,
        expert_tensor_parallel=1,
        zero_stage=2,
        sequence_parallel=True,
    ),
    "whole experts, some held twice, zero 3": plan_of(
        MIXTURE,
        pipeline(3, 2, ((0, 3), ((0, 1), 1), ((3, 2), 2), "pointwise"), ((3, 4), ((4,), 2), ((5,), 1))),
        expert_parallel=2,
        expert_tensor_parallel=1,
        zero_stage=3,
        sequence_parallel=True,
    ),
    "whole experts, context ranks, zb-1p": plan_of(
        MIXTURE,
        pipeline(2, 3, ((0, 3), (0, 1, 2, 3)), ((3, 4), (4, 5), "selective")),
        context_parallel=2,
        expert_parallel=2,
        expert_tensor_parallel=1,
        sequence_parallel=True,
        schedule="zb-1p",
    ),
    "divided experts, zb-2p": plan_of(
        MIXTURE,
        pipeline(1, 4, ((0, 2), (0,)), ((2, 4), (1,))),
        pipeline(2, 4, ((0, 2), (2,), "pointwise"), ((2, 4), (3,), "selective")),
        expert_parallel=2,
        schedule="zb-2p",
    ),
    "context, two ranks": plan_of(LLAMA, pipeline(2, 2, ((0, 4), (0, 1))), context_parallel=2),
    "context, four ranks in any order, recomputed": plan_of(
        LLAMA, pipeline(2, 2, ((0, 4), (2, 0, 3, 1), "selective")), context_parallel=4
    ),
    "context, learned positions, tied, sequence parallel": plan_of(
        GPT, pipeline(2, 2, ((0, 4), (3, 0, 2, 1), "full")), context_parallel=2, sequence_parallel=True
    ),
    "context, stages, norms of query and key, zero 1": plan_of(
        NORMED,
        pipeline(2, 3, ((0, 3), (0, 1, 2, 3)), ((3, 4), (4, 5))),
        context_parallel=2,
        zero_stage=1,
    ),
    "context, zero 3, uneven replicas, pointwise recomputed": plan_of(
        LLAMA,
        pipeline(3, 2, ((0, 4), ((0, 1), 1), ((2, 3, 4, 5), 2), "pointwise")),
        context_parallel=2,
        zero_stage=3,
        sequence_parallel=True,
    ),
    "context, zero 2, one lane": plan_of(
        GPT, pipeline(1, 3, ((0, 4), (0, 1, 2))), context_parallel=3, zero_stage=2, sequence_length=18
    ),
    "context, zb-1p, beside a pipeline of another degree": plan_of(
        LLAMA,
        pipeline(1, 3, ((0, 2), (0, 1)), ((2, 4), (2, 3))),
        pipeline(2, 2, ((0, 4), (4, 5))),
        schedule="zb-1p",
        context_parallel=2,
    ),
    "context, interleaved, ends on several nodes": plan_of(
        LLAMA,
        pipeline(2, 4, ([(0, 1), (2, 3)], (0, 1)), ([(1, 2), (3, 4)], (2, 3))),
        schedule="interleaved",
        context_parallel=2,
    ),
}


WITH_MANY_STEPS_ALONE = {
    *("devices in any order", "degrees 4 to 2", "degrees 2, 1 and 2 for the same layers", "tied embeddings, sequence parallel"),
    *("norms of query and key, degree 4 beside 1", "zero 2, unequal degrees", "interleaved, three micro-batches on two stages"),
    *(
        "split 1f1b, pointwise recomputed, some in full",
        "zb-v, one stage and ends alone",
        "slices, one device and tied embeddings",
    ),
    *("slices, gpipe, tied, two pipelines", "slices, split 1f1b, sequence parallel", "experts, slices"),
    *("slices, uneven replicas, reductions after the backward", "experts, stages of unlike degrees, recomputed"),
    *("divided experts, three replicas in any order, recomputed", "divided experts, four replicas of two parts, zero 1"),
    *(
        "context, zero 2, one lane",
        "context, interleaved, ends on several nodes",
        "shard groups of one, offloaded, zb-1p, zero 1",
    ),
}
"""Plans all of whose features others have, too: the slow test tries them, or one of other steps or precisions."""
assert PLANS.keys() > WITH_MANY_STEPS_ALONE


def settings_of(plan: Plan, data: Path, **more: object) -> Settings:
    values = {"steps": STEPS, "data": f"tokens:{data}", "learning_rate": 1e-2, "warm_up_steps": 2, "clip_norm": 0.5, "seed": 3}
    return Settings(**{**values, **more})  # type: ignore[arg-type]


def reference(
    plan: Plan, chosen: Settings, dtype: torch.dtype, sizes: list[int] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of the same training in this process, with batches of these sizes if not the plan's."""
    model = plan.transformer
    tokens = open_data(chosen.data, "auto", model.vocab, plan.sequence_length)
    order = SampleOrder(tokens.samples, chosen.seed)
    batches, consumed = [], 0
    for size in sizes or [plan.global_batch] * chosen.steps:
        at = range(consumed, consumed + size)
        consumed += size
        windows = torch.stack([torch.as_tensor(tokens.window(order.sample(position))) for position in at])
        batches.append((windows[:, :-1], windows[:, 1:]))
    weights = initial_weights(model, chosen.seed, dtype)
    losses = train(model, weights, batches, plan.optimizer, chosen)
    return losses, {name: weight.detach() for name, weight in weights.items()}


def assert_equal(outcome: Outcome, losses: list[float], weights: dict[str, torch.Tensor], tolerance: float) -> None:
    assert outcome.losses == pytest.approx(losses, abs=tolerance, rel=tolerance)
    assert outcome.weights.keys() == weights.keys()
    for name, weight in weights.items():
        error = (outcome.weights[name] - weight).abs().max().item()
        assert error <= tolerance, f"{name} differs by {error}"


@pytest.mark.parametrize("name", [name for name in PLANS if name not in WITH_MANY_STEPS_ALONE])
def test_losses_and_parameters_equal_those_of_one_process_in_fp64(name: str, workers: Workers, tmp_path: Path) -> None:
    check_fp64(PLANS[name], STEPS, workers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_they_do_so_after_many_steps(name: str, workers: Workers, tmp_path: Path) -> None:
    check_fp64(PLANS[name], 12, workers, tmp_path)


def rate_of(model: Transformer) -> float:
    """The learning rate for a model: the wider, the smaller, for at one rate losses of wide ones rise, and rounding with them."""
    return 0.32 / model.hidden


def check_fp64(plan: Plan, steps: int, workers: Workers, folder: Path) -> None:
    data = token_file(folder, plan.transformer.vocab, TOKENS)
    chosen = settings_of(plan, data, precision="fp64", steps=steps, learning_rate=rate_of(plan.transformer))
    outcome = workers.train(Order(plan, chosen, bucket_parameters=1000))
    assert_equal(outcome, *reference(plan, chosen, torch.float64), tolerance=1e-8)


@pytest.mark.parametrize(
    "name",
    [
        *("uneven replicas", "tied embeddings over stages", "zero 1, unequal replicas"),
        *("zb-2p, three stages, unlike cuts", "zb-v, tied ends on one stage"),
        "context, stages, norms of query and key, zero 1",
    ],
)
def test_losses_in_fp32_equal_those_of_one_process(name: str, workers: Workers, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLANS[name], optimizer="sgd")
    chosen = settings_of(plan, token_file(tmp_path, plan.transformer.vocab, TOKENS))
    outcome = workers.train(Order(plan, chosen))
    losses, weights = reference(plan, chosen, torch.float32)
    assert outcome.losses == pytest.approx(losses, abs=1e-5, rel=1e-5)
    for key, weight in weights.items():
        # The bias of the keys has no gradient but rounding, because softmax takes no notice of it: it stays at 1e-14.
        assert (outcome.weights[key] - weight).norm() <= 1e-5 * weight.norm() + 1e-12, key


# --- Random plans ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Device:
    name: str


@dataclasses.dataclass(frozen=True)
class Devices:
    """What the strategy of plans needs of a cluster."""

    name: str = "test"
    devices: tuple[Device, ...] = tuple(Device(f"n/{i}") for i in range(WORKERS))


@st.composite
def runnable_plans(draw: DrawFn) -> Plan:
    """Random plans of up to WORKERS devices that the runtime accepts, of small models of all families.

    In some of them each device is two context ranks.
    """
    base = draw(st.sampled_from((LLAMA, GPT, MIXTURE)))
    model = dataclasses.replace(base, layers=draw(st.integers(1, 4)), tied_embeddings=draw(st.booleans()), name="random")
    ranks = draw(st.sampled_from((1, 1, 2)))
    plan = draw(plans(Devices(devices=Devices().devices[: WORKERS // ranks]), model))  # type: ignore[arg-type]
    if ranks == 2 and plan.sequence_slices == 1:
        plan = with_two_context_ranks(plan)
    plan = dataclasses.replace(
        plan,
        sequence_length=16,
        precision="fp32",
        gradient_precision="fp32",
    )
    experts = {"expert_parallel": draw(st.sampled_from((1, 2, 3))), "expert_tensor_parallel": draw(st.sampled_from((None, 1)))}
    # What cannot be run is left out: divided experts first, then shard groups, then ZeRO.
    undivided = {"expert_parallel": 1, "expert_tensor_parallel": None}
    without = undivided, {**undivided, "shard_group": None}, {**undivided, "shard_group": None, "zero_stage": 0}
    for left_out in ({**experts, "shard_group": None}, {"shard_group": draw(st.sampled_from((None, 1, 2)))}, *without):
        with contextlib.suppress(InputError):
            found = dataclasses.replace(plan, **left_out)  # type: ignore[arg-type]
            check_runnable(found, Settings(steps=1, data="tokens:x"))
            return found
    raise AssertionError("a plan without ZeRO cannot be run")


def with_two_context_ranks(plan: Plan) -> Plan:
    """The plan with the devices 2i and 2i + 1 in the place of device i."""

    def both(replica: Replica) -> Replica:
        numbers = [2 * int(name.removeprefix("n/")) for name in replica.devices]
        return dataclasses.replace(replica, devices=tuple(f"n/{number + rank}" for rank in (0, 1) for number in numbers))

    pipelines = tuple(
        dataclasses.replace(
            pipeline,
            stages=tuple(
                dataclasses.replace(stage, replicas=tuple(both(replica) for replica in stage.replicas))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return dataclasses.replace(plan, pipelines=pipelines, context_parallel=2)


def check_random_plan(plan: Plan, buckets: int | None, workers: Workers, folder: Path) -> None:
    chosen = settings_of(plan, token_file(folder, plan.transformer.vocab, TOKENS), precision="fp64", steps=3)
    outcome = workers.train(Order(plan, chosen, bucket_parameters=buckets))
    assert_equal(outcome, *reference(plan, chosen, torch.float64), tolerance=1e-8)


SHARED_FOLDER = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=12, suppress_health_check=SHARED_FOLDER)
@given(plan=runnable_plans(), buckets=st.sampled_from((None, 1000)))
def test_random_plans_equal_one_process(plan: Plan, buckets: int | None, workers: Workers, tmp_path: Path) -> None:
    check_random_plan(plan, buckets, workers, tmp_path)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=SHARED_FOLDER)
@given(plan=runnable_plans(), buckets=st.sampled_from((None, 1000)))
def test_a_hundred_random_plans_equal_one_process(plan: Plan, buckets: int | None, workers: Workers, tmp_path: Path) -> None:
    check_random_plan(plan, buckets, workers, tmp_path)
