"""Exports, read back by the rules of the systems they are for, and what is refused or told."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.exports import SYSTEMS, Export, export
from sim.spec.compile import compile_plan
from sim.spec.plan import LayerRange, Pipeline, Plan, Replica, Stage
from sim.spec.reading import InputError
from sim.spec.transformer import transformer
from tests.experiments.conftest import Ran, World

Motley = Callable[..., Ran]

WHOLE_EXPERTS = {"model": "mixtral-8x7b", "expert_parallel": 4, "expert_tensor_parallel": 1, "sequence_parallel": True}


def grid(
    pipeline: int = 2,
    data: int = 2,
    tensor: int = 2,
    cuts: Sequence[Sequence[LayerRange]] | None = None,
    micro_batch: int = 1,
    micro_batches: int = 4,
    data_fastest: bool = True,
    recompute: Sequence[tuple[Any, ...]] = (("none", None),),
    in_flight: int | None = None,
    **changes: Any,
) -> Plan:
    """A plan of equal pipelines on nodes n0, n1, ... of 8 GPUs; in their order lie tensor ranks, then data, then stages."""
    model = changes.pop("model", "llama-3-8b")
    shape = transformer(model) if isinstance(model, str) else model
    layers, tokens = shape.layers, 2048 if shape.position == "learned" else 4096
    cuts = cuts or [[(layers * s // pipeline, layers * (s + 1) // pipeline)] for s in range(pipeline)]

    def devices(s: int, d: int) -> tuple[str, ...]:
        group = s * data + d if data_fastest else d * pipeline + s
        return tuple(f"n{i // 8}/{i % 8}" for i in range(group * tensor, (group + 1) * tensor))

    def stage(s: int, d: int) -> Stage:
        return Stage((Replica(devices(s, d), micro_batch),), tuple(cuts[s]), *recompute[s % len(recompute)])

    pipelines = tuple(Pipeline(micro_batch, micro_batches, tuple(stage(s, d) for s in range(pipeline))) for d in range(data))
    if in_flight is not None:
        pipelines = tuple(each.holding([in_flight] * pipeline) for each in pipelines)
    values: dict[str, Any] = {"cluster": "c", "model": model, "sequence_length": tokens, "pipelines": pipelines}
    return Plan(**{**values, "global_batch": data * micro_batch * micro_batches, **changes})


def text_of(plan: Plan, system: str) -> str:
    found = export(plan, system)
    assert found.text is not None, found.refused
    return found.text


def flags_of(script: str) -> dict[str, str]:
    """The flags of a Megatron-LM script with their values; '' for a switch."""
    command = " ".join(line.rstrip("\\") for line in script.splitlines() if not line.startswith("#"))
    words = shlex.split(command.partition("pretrain_gpt.py")[2].replace('"$@"', ""))
    found: dict[str, str] = {}
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--"):
            assert word not in found
            found[word] = "" if following.startswith("--") else following
    return found


def ranks_of(script: str) -> list[str]:
    """The devices by rank, from the comments of a script."""
    devices = []
    for line in script.splitlines():
        if line.startswith(("# ranks ", "# rank ")):
            node, _, indices = line.split(": ")[1].partition("/")
            devices += [f"{node}/{index}" for index in indices.split(",")]
    return devices


# --- Megatron-LM -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans())
def test_megatron_ranks_are_the_devices_of_the_plan(pipeline: int, data: int, tensor: int, data_fastest: bool) -> None:
    made = grid(pipeline, data, tensor, data_fastest=data_fastest)
    script = text_of(made, "megatron")
    flags, ranks = flags_of(script), ranks_of(script)
    assert len(ranks) == pipeline * data * tensor
    order = "--use-tp-pp-dp-mapping" in flags
    for rank, device in enumerate(ranks):
        group = rank // tensor
        # The orders of Megatron-LM's ranks, the fastest first: tp-cp-ep-dp-pp, and with the mapping tp-cp-ep-pp-dp.
        s, d = (group % pipeline, group // pipeline) if order else (group // data, group % data)
        assert made.pipelines[d].stages[s].devices[rank % tensor] == device
    nodes = [device.partition("/")[0] for device in ranks]
    by_itself = any("start every rank by itself" in line for line in export(made, "megatron").by_hand)
    in_a_row = all(nodes[i] == nodes[i - 1] or nodes[i] not in nodes[:i] for i in range(1, len(nodes)))
    assert in_a_row or by_itself


def test_a_megatron_script_says_job_model_and_states() -> None:
    flags = flags_of(text_of(grid(4, 2, 2, micro_batch=2, sequence_parallel=True, gradient_precision="bf16"), "megatron"))
    expected = {
        "--num-layers": "32",
        "--hidden-size": "4096",
        "--ffn-hidden-size": "14336",
        "--num-attention-heads": "32",
        "--group-query-attention": "",
        "--num-query-groups": "8",
        "--rotary-base": "500000",
        "--swiglu": "",
        "--normalization": "RMSNorm",
        "--disable-bias-linear": "",
        "--untie-embeddings-and-output-weights": "",
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "4",
        "--sequence-parallel": "",
        "--micro-batch-size": "2",
        "--global-batch-size": "16",
        "--seq-length": "4096",
        "--max-position-embeddings": "8192",
        "--bf16": "",
        "--optimizer": "adam",
        "--use-distributed-optimizer": "",
        "--grad-reduce-in-bf16": "",
        "--overlap-grad-reduce": "",
        "--overlap-param-gather": "",
    }
    assert {name: flags.get(name) for name in expected} == expected
    assert not {"--pipeline-model-parallel-layout", "--recompute-granularity", "--context-parallel-size"} & set(flags)
    assert flags["--attention-dropout"] == flags["--hidden-dropout"] == "0.0"


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"tensor": 1}, False),
        ({"tensor": 2}, True),
        ({"tensor": 2, "context_parallel": 2}, True),
        ({"pipeline": 1, "tensor": 2, "zero_stage": 3}, False),  # FSDP wants several
    ],
)
def test_one_connection_where_megatron_asks_for_it(changes: dict[str, Any], asked: bool) -> None:
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun " in text_of(grid(**changes), "megatron")) == asked


def test_the_other_order_of_ranks_goes_with_neither_context_nor_expert_ranks() -> None:
    made = grid(2, 4, 2, data_fastest=False)
    assert "--use-tp-pp-dp-mapping" in text_of(made, "megatron")
    for changes in ({"context_parallel": 2}, {"model": "mixtral-8x7b", "expert_parallel": 2}):
        found = export(grid(2, 4, 2, data_fastest=False, **changes), "megatron")
        assert "--use-tp-pp-dp-mapping" not in str(found.text)
        assert any("start every rank by itself" in line for line in found.by_hand)


def test_an_uneven_cut_is_a_layout() -> None:
    cuts: list[list[LayerRange]] = [[(0, 5)], [(5, 6)], [(6, 20)], [(20, 32)]]
    flags = flags_of(text_of(grid(4, cuts=cuts), "megatron"))
    parts = flags["--pipeline-model-parallel-layout"].split("|")
    assert parts == ["Et*5", "t", "t*14", "t*12L"]


def test_interleaving_says_the_layers_of_a_virtual_stage() -> None:
    cuts: list[list[LayerRange]] = [[(0, 8), (16, 24)], [(8, 16), (24, 32)]]
    even = grid(cuts=cuts, schedule="interleaved")
    compile_plan(even)
    assert flags_of(text_of(even, "megatron"))["--num-layers-per-virtual-pipeline-stage"] == "8"
    odd = export(grid(cuts=cuts, schedule="interleaved", micro_batches=5), "megatron")
    assert odd.text is None and "multiples" in odd.refused[0]


@pytest.mark.parametrize(
    ("settings", "expected", "differs"),
    [
        ([("none", None)], {}, False),
        ([("selective", None)], {"--recompute-granularity": "selective"}, False),
        ([("pointwise", None)], {"--recompute-granularity": "selective", "--recompute-modules": "layernorm"}, True),
        ([("pointwise", 3)], {"--recompute-granularity": "selective", "--recompute-modules": "layernorm"}, True),
        (
            [("full", 3, "pointwise")],
            {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": "3"},
            True,
        ),
        (
            [("full", None)],
            {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"},
            False,
        ),
        ([("full", 3)], {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": "3"}, False),
        (
            [("full", 3), ("none", None)],
            {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": "3"},
            True,
        ),
    ],
)
def test_megatron_recomputes_as_the_stage_that_does_most(
    settings: list[tuple[Any, ...]], expected: dict[str, str], differs: bool
) -> None:
    found = export(grid(recompute=settings), "megatron")
    flags = flags_of(str(found.text))
    assert {name: value for name, value in flags.items() if "recompute" in name} == expected
    assert any("recomputation" in line for line in found.differs) == differs


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero_stage": 0}, set()),
        ({"zero_stage": 3}, {"--use-megatron-fsdp", "--data-parallel-sharding-strategy"}),
        ({"shard_group": 1}, {"--num-distributed-optimizer-instances"}),
        ({"offload_optimizer": True}, {"--optimizer-cpu-offload", "--use-precision-aware-optimizer"}),
        ({"zero_stage": 0, "offload_optimizer": True}, {"--optimizer-cpu-offload", "--use-distributed-optimizer"}),
        ({"model": "mixtral-8x7b"}, {"--num-experts", "--moe-router-topk", "--sequence-parallel", "--moe-grouped-gemm"}),
        ({"precision": "fp16"}, {"--fp16"}),
        ({"model": "mixtral-8x7b", "expert_parallel": 2}, {"--expert-model-parallel-size", "--moe-token-dispatcher-type"}),
        (WHOLE_EXPERTS, {"--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel"}),
        ({"model": "mistral-7b"}, {"--window-size"}),
        ({"model": "qwen2.5-7b"}, {"--add-qkv-bias", "--disable-bias-linear"}),
        ({"model": "qwen3-8b"}, {"--qk-layernorm", "--disable-bias-linear"}),
    ],
)
def test_what_a_plan_says_has_its_flag(changes: dict[str, Any], expected: set[str]) -> None:
    flags = flags_of(text_of(grid(**changes), "megatron"))
    assert expected <= set(flags)
    assert ("--use-distributed-optimizer" in flags) == (changes.get("zero_stage", 1) > 0 or "offload_optimizer" in changes)


def test_activations_of_experts_are_recomputed_where_their_products_are_one_kernel() -> None:
    for precision, modules in (("bf16", "layernorm moe_act"), ("fp32", "layernorm")):
        made = grid(model="mixtral-8x7b", precision=precision)
        stages = lambda pipeline: tuple(stage.recomputing("pointwise") for stage in pipeline.stages)  # noqa: E731
        pipelines = tuple(replace(pipeline, stages=stages(pipeline)) for pipeline in made.pipelines)
        text = text_of(replace(made, pipelines=pipelines), "megatron")
        (told,) = [line for line in text.splitlines() if "--recompute-modules" in line]
        assert told.removesuffix(' "$@"').removesuffix(" \\").strip() == f"--recompute-modules {modules}"
        assert ("--moe-grouped-gemm" in flags_of(text)) == ("moe_act" in modules)


def test_rows_of_the_embedding_are_filled_up_as_the_model_has_them() -> None:
    # 50,257 rows become 51,200, a multiple of 1,024: 128 x 8 tensor ranks, or 512 x 2.
    assert "--make-vocab-size-divisible-by" not in flags_of(text_of(grid(tensor=8, model="gpt3-13b"), "megatron"))
    by_two = flags_of(text_of(grid(tensor=2, model="gpt3-13b"), "megatron"))
    assert by_two["--make-vocab-size-divisible-by"] == "512"
    # GPT-2's are not: a rank's rows of 16 bits are no multiple of 16 bytes.
    unpadded = text_of(grid(tensor=1, model="gpt2", sequence_length=1024), "megatron")
    assert flags_of(unpadded)["--make-vocab-size-divisible-by"] == "1" and "50,257 rows of the vocabulary" in unpadded
    whole = grid(tensor=1, model="gpt2", sequence_length=1024, precision="fp32")
    assert "rows of the vocabulary" not in text_of(whole, "megatron")  # 4 bytes each are no matter
    assert "rows of the vocabulary" not in text_of(grid(tensor=2, model="gpt3-13b"), "megatron")


# --- torchtitan ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(0, 3))
def test_a_torchtitan_file_has_the_plan_s_ranks_and_batch(pipeline: int, data: int, tensor: int, mb: int, zero: int) -> None:
    zero = zero if pipeline == 1 else min(zero, 1)
    made = grid(pipeline, data, tensor, micro_batch=mb, zero_stage=zero, sequence_parallel=True)
    file = tomllib.loads(text_of(made, "torchtitan"))
    found, training = file["parallelism"], file["training"]
    ranks = found["data_parallel_replicate_degree"] * found["data_parallel_shard_degree"]
    assert ranks == data
    assert ranks * found["tensor_parallel_degree"] * found["pipeline_parallel_degree"] == len(made.devices)
    # What a data-parallel rank takes at once, and how often until the global batch is full.
    at_once = training["local_batch_size"] * ranks
    assert training["global_batch_size"] == made.global_batch and made.global_batch % at_once == 0
    if pipeline > 1:
        assert training["local_batch_size"] // found["pipeline_parallel_microbatch_size"] == made.pipelines[0].micro_batches
        assert made.global_batch == at_once
        parts = found["module_fqns_per_model_part"]
        modules = [name for part in parts for name in part]
        assert modules == ["tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "output"] and len(parts) == pipeline
    else:
        assert made.global_batch // at_once == made.pipelines[0].micro_batches
    assert (
        found["fsdp_reshard_after_forward"] == {0: "never", 1: "never", 2: "never", 3: "always"}[zero] or ranks == 1 or zero == 0
    )
    assert file["model"] == {"name": "llama3", "flavor": "8B"}


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"schedule": "gpipe"}, "pipeline_parallel_schedule", "GPipe"),
        (
            {"schedule": "interleaved", "cuts": [[(0, 8), (16, 24)], [(8, 16), (24, 32)]]},
            "pipeline_parallel_schedule",
            "Interleaved1F1B",
        ),
        ({"schedule": "zb-v", "cuts": [[(0, 8), (24, 32)], [(8, 16), (16, 24)]]}, "pipeline_parallel_schedule", "ZBVZeroBubble"),
    ],
)
def test_torchtitan_has_schedules_of_its_own_names(changes: dict[str, Any], key: str, value: str) -> None:
    found = export(grid(**changes), "torchtitan")
    file = tomllib.loads(str(found.text))
    assert file["parallelism"][key] == value and not any("schedule" in line for line in found.differs)
    parts = file["parallelism"]["module_fqns_per_model_part"]
    assert len(parts) == (4 if changes["schedule"] != "gpipe" else 2)


def test_hybrid_sharding_has_both_degrees() -> None:
    one = grid(1, 4, 1, zero_stage=3, shard_group=2)
    found = tomllib.loads(text_of(one, "torchtitan"))["parallelism"]
    assert (found["data_parallel_replicate_degree"], found["data_parallel_shard_degree"]) == (2, 2)


def test_every_second_layer_recomputed_is_torchtitan_s_selective() -> None:
    found = tomllib.loads(text_of(grid(recompute=[("full", 8)]), "torchtitan"))
    assert found["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}


def test_recomputing_norms_and_activation_is_nearest_to_torchtitan_s_selective_by_operation() -> None:
    found = export(grid(recompute=[("pointwise", None)]), "torchtitan")
    assert tomllib.loads(str(found.text))["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert any("norms and activation" in line for line in found.differs)


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2), st.integers(1, 4), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 5))
def test_deepspeed_s_batch_is_micro_batch_times_steps_times_ranks(pipeline: int, data: int, tensor: int, mb: int, n: int) -> None:
    made = grid(pipeline, data, tensor, micro_batch=mb, micro_batches=n)
    config = json.loads(text_of(made, "deepspeed"))
    ranks = len(made.devices) // pipeline // tensor
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * ranks
    assert config["train_batch_size"] == made.global_batch and config["zero_optimization"]["stage"] == 1
    assert config["bf16"] == {"enabled": True} and "fp16" not in config
    by_hand = " ".join(export(made, "deepspeed").by_hand)
    assert (f"num_pp={pipeline}, num_mp={tensor}, num_dp={data}" in by_hand) == (pipeline > 1)
    assert config.get("tensor_parallel") == ({"autotp_size": 2} if tensor == 2 and pipeline == 1 else None)


# --- HexiScale -------------------------------------------------------------------------------------------------------


def test_hexiscale_takes_pipelines_of_any_form() -> None:
    stages = [
        [("a/0 a/1 a/2 a/3", (0, 20)), ("b/0 b/1", (20, 32))],
        [("b/2 b/3", (0, 32))],
    ]
    pipelines = tuple(
        Pipeline(1, count, tuple(Stage((Replica(tuple(names.split()), 1),), (layers,)) for names, layers in parts))
        for parts, count in zip(stages, (6, 2), strict=True)
    )
    made = Plan("c", "llama-2-7b", 4096, 8, pipelines, zero_stage=0)
    found = export(made, "hexiscale")
    assert json.loads(str(found.text)) == {
        "hetero_configs": [[4, 2], [2]],
        "layer_partitions": [[20, 12], [32]],
        "devices_id": [[[0, 0, 0, 0], [1, 1]], [[1, 1]]],
    }
    assert found.differs == ()
    assert "--chunks 6 2 --global_bsz_size 6 2" in " ".join(found.by_hand) and "0 a, 1 b" in " ".join(found.by_hand)
    moved = replace(made, pipelines=(pipelines[1], replace(pipelines[0], micro_batches=6)))
    assert any("which GPU" in line for line in export(moved, "hexiscale").differs)


def test_degrees_of_one_layer_that_do_not_divide_one_another_are_refused() -> None:
    pipelines = tuple(
        Pipeline(1, 1, (Stage((Replica(tuple(f"{node}/{i}" for i in range(count)), 1),), ((0, 52),)),))
        for node, count in (("a", 4), ("b", 13))
    )
    model = replace(transformer("llama-30b"), layers=52)
    found = export(Plan("c", model, 4096, 2, pipelines), "hexiscale")
    assert any("no multiple" in line for line in found.refused)


# --- What is refused, and what is told -------------------------------------------------------------------------------


def uneven(**changes: Any) -> Plan:
    """Two pipelines that differ in stages, cuts, degrees, micro-batches."""
    first = Pipeline(1, 6, (Stage((Replica(("a/0", "a/1"), 1),), ((0, 20),)), Stage((Replica(("b/0",), 1),), ((20, 32),))))
    second = Pipeline(2, 1, (Stage((Replica(("b/1",), 2),), ((0, 32),)),))
    return Plan("c", "llama-3-8b", 4096, 8, (first, second), **changes)


@pytest.mark.parametrize("system", ["megatron", "torchtitan", "deepspeed"])
def test_every_reason_of_an_uneven_plan_is_told_at_once(system: str) -> None:
    found = export(uneven(), system)
    assert found.text is None and found.differs == found.by_hand == ()
    told = " ".join(found.refused)
    for reason in (
        "numbers of stages",
        "layer cuts",
        "micro-batch sizes",
        "numbers of micro-batches",
        "tensor-parallel degrees (1, 2)",
    ):
        assert reason in told
    assert all("\n" not in line for line in found.refused)


def test_equal_replicas_are_data_parallel_ranks() -> None:
    stages = tuple(Stage((Replica((f"n{s}/0",), 2), Replica((f"n{s}/1",), 2)), ((16 * s, 16 * s + 16),)) for s in range(2))
    made = Plan("c", "llama-3-8b", 4096, 16, (Pipeline(4, 4, stages),))
    flags = flags_of(text_of(made, "megatron"))
    assert (flags["--micro-batch-size"], flags["--global-batch-size"]) == ("2", "16")
    assert ranks_of(text_of(made, "megatron")) == ["n0/0", "n0/1", "n1/0", "n1/1"]
    unequal = replace(stages[0], replicas=(Replica(("n0/0",), 3), Replica(("n0/1",), 1)))
    other = replace(made, pipelines=(Pipeline(4, 4, (unequal, stages[1])),))
    assert any("shares of a micro-batch" in line for line in export(other, "megatron").refused)


@pytest.mark.parametrize(
    ("system", "changes", "refused"),
    [
        ("megatron", {"model": "opt-350m"}, "embeddings of width 512"),
        ("megatron", {"model": "opt-1.3b"}, "the activation relu"),
        ("megatron", {"schedule": "zb-v", "cuts": [[(0, 8), (24, 32)], [(8, 16), (16, 24)]]}, "folded in a V"),
        ("megatron", {"model": "mixtral-8x7b", "expert_parallel": 2, "precision": "fp16"}, "expert parallelism in fp16"),
        ("megatron", {"optimizer": "sgd", "offload_optimizer": True}, "the optimizer sgd in host memory"),
        ("deepspeed", {"pipeline": 1, "data": 4, **WHOLE_EXPERTS}, "whole experts on each tensor rank"),
        ("torchtitan", {"data": 1, "offload_optimizer": True}, "the optimizer in host memory where nothing is divided"),
        (
            "torchtitan",
            {"pipeline": 1, "data": 4, "tensor": 1, "zero_stage": 0, "offload_optimizer": True},
            "the optimizer in host memory where nothing is divided",
        ),
        ("torchtitan", {"model": "gpt3-13b"}, "positions of the kind learned"),
        ("torchtitan", {"precision": "fp16"}, "the precision fp16"),
        ("torchtitan", {"optimizer": "sgd"}, "the optimizer sgd"),
        ("deepspeed", {"zero_stage": 3}, "ZeRO 3 with pipelines"),
        ("deepspeed", {"cuts": [[(0, 15)], [(15, 32)]]}, "unequal numbers of layers"),
        ("deepspeed", {"precision": "fp8"}, "the precision fp8"),
        ("deepspeed", {"context_parallel": 2}, "context parallelism"),
        ("deepspeed", {"shard_group": 1}, "shard_group 1"),
        ("deepspeed", {"zero_stage": 0, "offload_optimizer": True}, "a whole optimizer in host memory"),
        ("hexiscale", {}, "the model llama-3-8b"),
        ("hexiscale", {"model": "llama-2-7b", "context_parallel": 2}, "context parallelism"),
        ("hexiscale", {"model": replace(transformer("llama-2-7b"), hidden=2048, head_dim=64)}, "the model llama-2-7b"),
    ],
)
def test_what_a_system_cannot_say_is_refused(system: str, changes: dict[str, Any], refused: str) -> None:
    found = export(grid(**changes), system)
    assert found.text is None and any(refused in line for line in found.refused), found


@pytest.mark.parametrize(
    ("system", "changes", "told"),
    [
        ("megatron", {"schedule": "zb-1p"}, "the schedule zb-1p"),
        ("megatron", {"model": "mixtral-8x7b"}, "tensor parallelism of experts without sequence parallelism"),
        ("megatron", {"zero_stage": 0, "offload_optimizer": True}, "a whole optimizer in host memory"),
        ("torchtitan", {"data": 1}, "bf16 beside tensor or pipeline ranks where nothing is divided"),
        ("torchtitan", {"schedule": "eager-1f1b"}, "the schedule eager-1f1b"),
        ("megatron", {"in_flight": 5}, "micro-batches in flight"),
        ("torchtitan", {"in_flight": 5}, "micro-batches in flight"),
        ("deepspeed", {"in_flight": 5}, "micro-batches in flight"),
        ("hexiscale", {"model": "llama-2-7b", "in_flight": 5}, "micro-batches in flight"),
        ("hexiscale", {"model": "llama-2-7b", "zero_stage": 2, "shard_group": 1}, "shard_group 1"),
        ("torchtitan", {"gradient_precision": "bf16"}, "gradients in bf16"),
        ("torchtitan", {}, "without sequence parallelism"),
        ("deepspeed", {"schedule": "gpipe"}, "the schedule gpipe"),
        ("hexiscale", {"model": "llama-2-7b", "schedule": "zb-2p"}, "the schedule zb-2p"),
        ("hexiscale", {"model": "llama-2-7b", "recompute": [("full", None), ("none", None)]}, "a part of the layers"),
    ],
)
def test_what_a_system_does_otherwise_is_told(system: str, changes: dict[str, Any], told: str) -> None:
    found = export(grid(**changes), system)
    assert found.text is not None and any(told in line for line in found.differs), found.differs


def test_an_unknown_system_is_told_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean megatron"):
        export(grid(), "megatronn")
    assert set(SYSTEMS) == {"megatron", "torchtitan", "deepspeed", "hexiscale"}
    assert all(isinstance(make(grid()), Export) for make in SYSTEMS.values())


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_file_and_tells_the_rest(motley: Motley, world: World) -> None:
    plan, file = world.write("grid.json", grid(schedule="zb-1p").to_json()), world.folder / "launch.sh"
    ran = motley("export", plan, "--to", "megatron", "--out", file)
    assert ran.code == 0 and ran.err == ""
    written = file.read_text()
    assert written == export(grid(schedule="zb-1p"), "megatron").text
    lines = ran.out.splitlines()
    assert [line[2:] for line in written.splitlines() if line.startswith(("# differs: ", "# by hand: "))] == lines[:-1]
    assert lines[0].startswith("differs: the schedule zb-1p") and lines[-1] == f"wrote {file}"
    assert any(line.startswith("by hand: data, tokenizer") for line in lines)


def test_without_a_file_it_goes_to_standard_output_alone(motley: Motley, world: World) -> None:
    ran = motley("export", world.write("grid.json", grid().to_json()), "--to", "deepspeed")
    assert ran.code == 0 and json.loads(ran.out)["train_batch_size"] == 8
    assert "by hand: " in ran.err


def test_what_cannot_be_said_exits_with_1_and_writes_nothing(motley: Motley, world: World) -> None:
    plan, file = world.write("uneven.json", uneven().to_json()), world.folder / "launch.sh"
    ran = motley("export", plan, "--to", "megatron", "--out", file)
    assert ran.code == 1 and ran.out == "" and not file.exists()
    lines = ran.err.splitlines()
    assert "cannot be exported to megatron; nothing was written" in lines[0]
    assert len(lines) == 1 + len(export(uneven(), "megatron").refused)
    assert all(line.startswith("motley: ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["PLAN", "--to", "megaton"], "unknown system 'megaton'"),
        (["PLAN"], "--to"),
        (["nothing.json", "--to", "megatron"], "nothing.json"),
        (["PLAN", "--to", "megatron", "--out", "PLAN"], "is read by this command"),
        (["PLAN", "--to", "megatron", "--out", "."], "is a folder"),
    ],
)
def test_bad_input_is_told_in_one_line(motley: Motley, world: World, arguments: list[str], told: str) -> None:
    plan = world.write("grid.json", grid().to_json())
    before = world.names()
    ran = motley("export", *(plan if word == "PLAN" else word for word in arguments))
    assert ran.code == 2 and told in ran.err and ran.err.count("\n") == 1
    assert world.names() == before and Path(plan).read_text() == grid().to_json()


def test_a_plan_that_no_program_can_be_made_of_is_an_error(motley: Motley, world: World) -> None:
    plan = world.write("two.json", grid(cuts=[[(0, 8), (16, 24)], [(8, 16), (24, 32)]]).to_json())  # 1f1b takes one range
    ran = motley("export", plan, "--to", "megatron")
    assert ran.code == 2 and "layer ranges" in ran.err and ran.err.count("\n") == 1
