"""Bytes per device, against closed forms, published measurements, and the laws they obey."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.memory import MemoryParts, count_holders, host_bytes, lane_parts, memory_parts, peak_bytes
from sim.spec.cluster import Cluster, Intra, Nic, Node
from sim.spec.compile import compile_plan, holders
from sim.spec.counts import RECOMPUTE, total_parameters
from sim.spec.gpu import gpu_kind
from sim.spec.plan import Pipeline, Plan, Replica, Stage
from sim.spec.stack import Stack
from sim.spec.transformer import Moe, Transformer, transformer

TINY = Transformer(name="tiny", layers=8, hidden=64, ffn=128, heads=4, vocab=256, tied_embeddings=True)


def uniform(
    model: str | Transformer,
    tensor: int = 1,
    depth: int = 1,
    copies: int = 1,
    micro_batch: int = 1,
    micro_batches: int = 64,
    sequence_length: int = 4096,
    recompute: str = "none",
    **fields: object,
) -> Plan:
    """Equal pipelines, cut as evenly as it goes."""
    shape = transformer(model) if isinstance(model, str) else model
    cuts = [round(i * shape.layers / depth) for i in range(depth + 1)]

    def stage(pipeline: int, s: int) -> Stage:
        first = (pipeline * depth + s) * tensor
        devices = tuple(f"gpu/{i}" for i in range(first, first + tensor))
        return Stage((Replica(devices, micro_batch),), ((cuts[s], cuts[s + 1]),), recompute)

    pipelines = tuple(Pipeline(micro_batch, micro_batches, tuple(stage(p, s) for s in range(depth))) for p in range(copies))
    batch = micro_batch * micro_batches * copies
    return Plan("toy", model, sequence_length, batch, pipelines, **fields)  # type: ignore[arg-type]


def cluster(gpus: int, kind: str = "A100-80GB-SXM") -> Cluster:
    return Cluster("toy", (Node("gpu", gpu_kind(kind), gpus, Intra("nvlink", 3e11), Nic("ethernet", 1e9)),))


def highest(plan: Plan) -> MemoryParts:
    return max((parts for _, _, _, parts in lane_parts(plan)), key=lambda parts: parts.total)


def allocated(plan: Plan) -> float:
    """GiB of the fullest device that the framework allocates: without its context and what it cannot use."""
    parts = highest(plan)
    return (parts.total - parts.context - parts.reserve) / 2**30


# --- Published -------------------------------------------------------------------------------------------------------


def test_activations_of_gpt3_are_those_of_korthikanti_without_dropout_and_scores() -> None:
    # 175B, tensor parallel 8, pipeline of 8, 2048 tokens: as many micro-batches in flight at the first stage as make up for
    # its share of the 96 layers. Table 2 of arXiv:2205.05198, less masks (2 of 10 and of 34) and with flash attention.
    tokens, hidden, layers, t = 2048, 12288, 96, 8
    none = memory_parts(uniform("gpt3-175b", 8, 8, sequence_length=2048), 0, 0)
    softmax = 4 * 96 * tokens // t
    assert none.activations == layers * (tokens * hidden * (8 + 24 // t) + softmax)
    selective = uniform("gpt3-175b", 8, 8, sequence_length=2048, recompute="selective", sequence_parallel=True)
    assert memory_parts(selective, 0, 0).activations == layers * tokens * hidden * 32 // t
    full = uniform("gpt3-175b", 8, 8, sequence_length=2048, recompute="full")
    assert memory_parts(full, 0, 0).activations == layers * tokens * hidden * 2


def test_the_state_of_gpt3_is_18_bytes_a_parameter_over_64_gpus() -> None:
    parts = memory_parts(uniform("gpt3-175b", 8, 8, sequence_length=2048), 0, 3)
    state = parts.parameters + parts.gradients + parts.optimizer
    assert state == pytest.approx(18 * 175e9 / 64, rel=0.02)


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "heads", "tensor", "depth", "copies", "measured_gib"),
    [
        (12, 8192, 28672, 64, 1, 2, 4, 66.55),
        (12, 8192, 28672, 64, 2, 1, 4, 60.68),
        (12, 8192, 28672, 64, 4, 1, 2, 39.07),
        (12, 8192, 28672, 64, 8, 1, 1, 28.29),
        (4, 16384, 53248, 128, 1, 2, 4, 87.08),
        (4, 16384, 53248, 128, 2, 1, 4, 81.59),
        (4, 16384, 53248, 128, 4, 1, 2, 52.89),
    ],
)
def test_megatron_allocates_what_is_counted_within_3_percent(
    layers: int, hidden: int, ffn: int, heads: int, tensor: int, depth: int, copies: int, measured_gib: float
) -> None:
    # SimuMax's runs on B200: Llama 3 70B and 405B with fewer layers, micro-batch 1 of 4096 tokens, distributed optimizer.
    model = Transformer("llama-3", layers, hidden, ffn, heads, 128256, kv_heads=8)
    plan = uniform(model, tensor, depth, copies, sequence_parallel=tensor > 1)
    assert allocated(plan) == pytest.approx(measured_gib, rel=0.03)


def test_a_backward_needs_the_gradients_of_what_it_works_on() -> None:
    # Of 256 tokens: a gradient of each tensor that a layer keeps, or of the logits, with that of the largest matrix in 2 bytes.
    of_layer = 2 * 64 * 2 * 128
    for vocab, recompute in ((256, "none"), (4096, "none"), (4096, "full"), (65536, "full")):
        model = replace(TINY, vocab=vocab, padded_vocab=vocab)
        kept = memory_parts(uniform(model, sequence_length=256), 0, 0).activations / 8
        again = kept if recompute == "full" else 0
        parts = memory_parts(uniform(model, sequence_length=256, recompute=recompute), 0, 0)
        logits = 256 * vocab * 4
        assert parts.working == max(kept + again + of_layer, logits + 2 * vocab * 64)
        assert parts.logits == 256 * (2 * 64 * 2 + vocab * (2 + 4))
    # A schedule that splits backwards keeps the gradient of the logits for the half that comes later.
    model, stages = replace(TINY, vocab=65536, padded_vocab=65536), 2
    whole, split = (
        memory_parts(uniform(model, depth=stages, sequence_length=256, schedule=name), 0, 1) for name in ("1f1b", "zb-1p")
    )
    assert whole.working == 256 * 65536 * 4 + 2 * 65536 * 64
    assert split.working == whole.working + kept
    # Of a bucket's matrix, and beside a copy of all gradients, no other is there; the head is in no bucket.
    assert memory_parts(uniform(TINY, copies=2, zero_stage=2, sequence_length=256), 0, 0).working == kept
    assert memory_parts(uniform(model, copies=2, zero_stage=2, sequence_length=256), 0, 0).working == whole.working
    for gradients, held in (("fp32", whole.working - 2 * 65536 * 64), ("bf16", whole.working)):
        plan = uniform(model, sequence_length=256, gradient_precision=gradients)
        assert memory_parts(plan, 0, 0, software=Stack("copies", gradient_copy=True)).working == held


@pytest.mark.parametrize(("vocab", "tokens", "measured_gib"), [(32768, 2048, 16.01), (131072, 2048, 21.00), (32768, 4096, 22.23)])
def test_a_pipeline_of_eight_stages_allocates_what_is_counted_within_2_percent(
    vocab: int, tokens: int, measured_gib: float
) -> None:
    # The baseline of "Balancing Pipeline Parallelism with Vocabulary Parallelism", GPT 4B on eight A100s, 1F1B.
    gpt = Transformer(
        "gpt-4b", 32, 3072, 12288, 24, vocab, activation="gelu", norm="layernorm", attention_bias="all", mlp_bias=True
    )
    model = replace(gpt, position="learned", max_positions=tokens)
    assert allocated(uniform(model, 1, 8, micro_batches=128, sequence_length=tokens)) == pytest.approx(measured_gib, rel=0.02)


# --- Fits or not -----------------------------------------------------------------------------------------------------


def test_llama_2_7b_in_mixed_precision_does_not_fit_on_one_80_gb_gpu() -> None:
    parts = memory_parts(uniform("llama-2-7b"), 0, 0)
    assert parts.parameters + parts.gradients + parts.optimizer == 18 * total_parameters(transformer("llama-2-7b"))
    assert parts.total > gpu_kind("A100-80GB-SXM").memory_bytes
    lighter = memory_parts(uniform("llama-2-7b", recompute="full", gradient_precision="bf16"), 0, 0)
    assert lighter.total > gpu_kind("A100-80GB-SXM").memory_bytes


def test_llama_2_7b_fits_on_eight_80_gb_gpus_with_zero_or_tensor_parallelism() -> None:
    capacity = gpu_kind("A100-80GB-SXM").memory_bytes
    assert highest(uniform("llama-2-7b", copies=8, recompute="selective")).total < capacity
    assert highest(uniform("llama-2-7b", tensor=8, zero_stage=0)).total < capacity


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_llama_2_13b_never_fits_on_one_24_gb_gpu(zero_stage: int, optimizer: str) -> None:
    plan = uniform("llama-2-13b", zero_stage=zero_stage, optimizer=optimizer, gradient_precision="bf16", recompute="full")
    assert highest(plan).total > gpu_kind("RTX4090").memory_bytes


@pytest.mark.parametrize(
    ("model", "depth", "micro_batch"),
    [("megatron-22b", 1, 4), ("gpt3-175b", 8, 1), ("megatron-530b", 35, 1), ("megatron-1t", 64, 1)],
)
@pytest.mark.parametrize(("recompute", "sequence_parallel"), [("full", False), ("selective", True)])
def test_the_models_that_korthikanti_trained_on_80_gb_gpus_fit(
    model: str, depth: int, micro_batch: int, recompute: str, sequence_parallel: bool
) -> None:
    # arXiv:2205.05198: tensor parallel 8, pipelines as deep as given here, no ZeRO (without its interleaving).
    plan = uniform(model, 8, depth, 1, micro_batch, 64, 2048, recompute, sequence_parallel=sequence_parallel, zero_stage=0)
    assert highest(plan).total < gpu_kind("A100-80GB-SXM").memory_bytes


# --- By hand ---------------------------------------------------------------------------------------------------------


def test_parameters_gradients_and_states_have_the_bytes_of_their_precision() -> None:
    count = total_parameters(TINY)
    expected = {
        ("bf16", "fp32", "adamw"): (2, 4, 12),
        ("bf16", "bf16", "adamw"): (2, 2, 12),
        ("fp32", "fp32", "adamw"): (4, 4, 8),
        ("fp16", "fp32", "sgd"): (2, 4, 8),
        ("tf32", "fp32", "sgd"): (4, 4, 4),
    }
    for (precision, gradient_precision, optimizer), (parameter, gradient, state) in expected.items():
        plan = uniform(TINY, precision=precision, gradient_precision=gradient_precision, optimizer=optimizer)
        parts = memory_parts(plan, 0, 0)
        assert (parts.parameters, parts.gradients, parts.optimizer) == (count * parameter, count * gradient, count * state)


def test_zero_divides_what_its_stage_says_over_the_lanes() -> None:
    count, lanes = total_parameters(TINY), 4
    for zero_stage, states in enumerate((1, lanes, lanes)):
        parts = memory_parts(uniform(TINY, copies=lanes, zero_stage=zero_stage), 2, 0)
        assert parts.optimizer == 12 * count // states
        assert parts.parameters == 2 * count
        assert parts.gradients == 4 * count  # under ZeRO 2, too: all layers of so small a model are one bucket


def test_zero_2_keeps_a_shard_of_the_gradients_two_buckets_and_the_ends() -> None:
    # Llama 2 7B: 202,383,360 parameters a layer, so that each is a bucket; embedding and head 131,072,000 and a norm of 4096.
    parts = memory_parts(uniform("llama-2-7b", copies=8, zero_stage=2), 0, 0)
    assert parts.gradients == 4 * ((32 // 8 + 2) * 202_383_360 + 2 * 131_072_000 + 4096)
    assert parts.parameters == 2 * 6_738_415_616


def test_zero_3_keeps_a_shard_two_buckets_and_the_ends() -> None:
    # Llama 2 7B: 202,383,360 parameters a layer, so that each is a bucket; embedding and head 131,072,000 and a norm of 4096.
    parts = memory_parts(uniform("llama-2-7b", copies=8, zero_stage=3), 0, 0)
    assert parts.parameters == 2 * ((32 // 8 + 2) * 202_383_360 + 2 * 131_072_000 + 4096)


def test_pipelines_of_different_cuts_shard_each_layer_over_those_that_hold_it() -> None:
    # Layers:      0   2   4       8      Stages [0, 4) and [4, 8) beside [0, 2) and [2, 8): each layer is held twice, but the
    #  pipeline 0  |-------|-------|      third pipeline of one stage makes that thrice.
    #  pipeline 1  |---|-----------|
    #  pipeline 2  |---------------|
    def pipeline(name: str, cuts: list[int]) -> Pipeline:
        stages = [Stage((Replica((f"{name}/{i}",), 1),), (cut,)) for i, cut in enumerate(itertools.pairwise(cuts))]
        return Pipeline(1, 4, tuple(stages))

    untied = replace(TINY, tied_embeddings=False)
    plan = Plan("toy", untied, 32, 12, (pipeline("a", [0, 4, 8]), pipeline("b", [0, 2, 8]), pipeline("c", [0, 8])))
    layer, ends = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64, (256 * 64, 256 * 64 + 64)
    assert memory_parts(plan, 0, 0).optimizer == round(12 * (4 * layer + ends[0]) / 3)
    assert memory_parts(plan, 1, 1).optimizer == round(12 * (6 * layer + ends[1]) / 3)
    without = replace(plan, global_batch=8, pipelines=plan.pipelines[:2])
    assert memory_parts(without, 0, 0).optimizer == round(12 * (4 * layer + ends[0]) / 2)


def test_the_head_of_a_tied_pipeline_holds_a_copy_of_the_embedding() -> None:
    layer, embedding, norm = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64, 256 * 64, 64
    plan = uniform(TINY, depth=2, zero_stage=0)
    assert memory_parts(plan, 0, 1).parameters == 2 * (4 * layer + embedding + norm)
    assert memory_parts(uniform(TINY, zero_stage=0), 0, 0).parameters == 2 * (8 * layer + embedding + norm)
    # Under ZeRO the copy shares the embedding's state: two lanes hold it.
    assert memory_parts(uniform(TINY, depth=2), 0, 1).optimizer == 12 * (4 * layer + embedding // 2 + norm)


def test_only_inner_stages_have_buffers_on_both_sides() -> None:
    plan = uniform(TINY, depth=3, sequence_length=32)
    boundary = 32 * 64 * 2
    assert [memory_parts(plan, 0, s).buffers for s in range(3)] == [4 * boundary, 8 * boundary, 4 * boundary]
    assert memory_parts(uniform(TINY), 0, 0).buffers == 0


def test_each_micro_batch_in_flight_keeps_its_activations() -> None:
    plan = uniform(TINY, depth=4, micro_batches=8)
    activations = [memory_parts(plan, 0, s).activations for s in range(4)]
    assert [each / activations[-1] for each in activations] == [4, 3, 2, 1]
    own = replace(plan, pipelines=(plan.pipelines[0].holding([20, 5, 3, 3]),))
    assert [memory_parts(own, 0, s).activations / activations[-1] for s in range(4)] == [8, 5, 3, 3]
    gpipe = replace(plan, schedule="gpipe")
    assert [memory_parts(gpipe, 0, s).activations / activations[-1] for s in range(4)] == [8, 8, 8, 8]
    assert memory_parts(gpipe, 0, 3).logits > memory_parts(plan, 0, 3).logits > memory_parts(plan, 0, 2).logits == 0


def test_slices_in_flight_keep_their_part_and_keys_and_values_of_a_micro_batch() -> None:
    """Under 1F1B a stage holds one slice more for each stage that follows, and all others of a micro-batch."""
    whole, sliced = (uniform("llama-2-7b", depth=4, sequence_slices=slices) for slices in (1, 4))
    of_slice, rest = divmod(memory_parts(whole, 0, 3).activations, 4)  # of one micro-batch
    assert rest == 0
    for s in range(4):
        assert memory_parts(sliced, 0, s).activations == (4 - s + 3) * of_slice
    keys_and_values = 8 * 1024 * 2 * 4096 * 2  # of 8 layers, for a slice of 1,024 tokens, in bf16
    messages = [4096 * 4096 * 2 * 4, 1024 * 4096 * 2 * 4]  # two each way, to one neighbour
    assert memory_parts(whole, 0, 0).buffers == messages[0]
    assert memory_parts(sliced, 0, 0).buffers == messages[1] + (4 + 3) * keys_and_values
    again = [memory_parts(uniform("llama-2-7b", depth=4, recompute="full", sequence_slices=n), 0, 3) for n in (1, 4)]
    assert again[1].activations - again[0].activations == 4 * keys_and_values


def test_each_context_rank_keeps_its_part_of_every_sequence_and_a_shard_of_the_state() -> None:
    # Tensor ranks x context ranks; 128 tokens, 32 of them on each context rank.
    plain = memory_parts(uniform(TINY, tensor=2, sequence_length=128), 0, 0)
    ranks = memory_parts(uniform(TINY, tensor=8, sequence_length=128, context_parallel=4), 0, 0)
    assert (ranks.activations, ranks.logits) == (plain.activations // 4, plain.logits // 4)
    assert (ranks.parameters, ranks.gradients) == (plain.parameters, plain.gradients)
    assert ranks.optimizer == plain.optimizer // 4
    block = 32 * 2 * (2 * 16) * 2  # of 4 heads of 16 two on a rank, keys and values, 2 bytes
    assert ranks.buffers == 4 * block


def test_experts_are_divided_over_replicas_and_their_states_over_all() -> None:
    mixture = replace(TINY, experts=Moe(experts=4, top_k=2, ffn=128))
    expert, rest = 3 * 64 * 128, 4 * 64 * 64 + 2 * 64 + 64 * 4
    ends = 256 * 64 + 64
    parts = memory_parts(uniform(mixture, copies=8, expert_parallel=2), 3, 0)
    assert parts.parameters == 2 * (8 * (rest + 2 * expert) + ends)
    assert parts.gradients == 4 * (8 * (rest + 2 * expert) + ends)
    # Each half of the experts is held by four of the eight, which divide its state: an eighth of all, as of the rest.
    assert parts.optimizer == 12 * (8 * (rest + 4 * expert) + ends) // 8


def test_tensor_ranks_may_have_whole_experts() -> None:
    mixture = replace(TINY, experts=Moe(experts=4, top_k=2, ffn=128))
    columns, whole = (
        memory_parts(uniform(mixture, tensor=2, copies=4, sequence_parallel=True, **division), 1, 0)
        for division in ({"expert_parallel": 2}, {"expert_parallel": 4, "expert_tensor_parallel": 1})
    )
    # Halves of two of four experts, or one whole; the states of all of them are on the eight ranks in any case.
    assert (whole.parameters, whole.gradients, whole.optimizer) == (columns.parameters, columns.gradients, columns.optimizer)
    # Inputs and results of two experts a token, and the probabilities of the router: each rank has those of its own tokens.
    routed = 4096 * (2 * 2 * 64 * 2 + 4 * 4)
    assert columns.activations - whole.activations == 8 * (routed - routed // 2)


def test_shard_groups_divide_states_over_their_members_alone() -> None:
    # Llama 2 7B on 8 GPUs in groups of 4: as without groups on 4 GPUs.
    grouped = memory_parts(uniform("llama-2-7b", copies=8, zero_stage=3, shard_group=4), 0, 0)
    assert grouped.parameters == 2 * ((32 // 4 + 2) * 202_383_360 + 2 * 131_072_000 + 4096)
    assert grouped.optimizer == 12 * 6_738_415_616 // 4
    assert grouped == memory_parts(uniform("llama-2-7b", copies=4, zero_stage=3), 0, 0)


def test_an_offloaded_optimizer_leaves_parameters_and_gradients() -> None:
    plain, offloaded = (memory_parts(uniform(TINY, offload_optimizer=offload), 0, 0) for offload in (False, True))
    assert offloaded.optimizer == 0
    assert (offloaded.parameters, offloaded.gradients) == (plain.parameters, plain.gradients)


def test_what_is_offloaded_is_in_the_memory_of_its_node() -> None:
    # In fp32 the parameter, its gradient and two states, each once under ZeRO 1, and all eight copies of them without.
    for zero_stage, precision, copies in ((0, "bf16", 8), (1, "bf16", 1), (1, "fp32", 1)):
        offloaded = uniform("llama-2-7b", copies=8, zero_stage=zero_stage, precision=precision, offload_optimizer=True)
        assert host_bytes(offloaded) == {"gpu": pytest.approx(copies * 16 * 6_738_415_616, abs=64)}
    assert host_bytes(uniform(TINY)) == {}


def test_a_software_stack_says_what_it_holds_besides() -> None:
    plan, count = uniform(TINY, sequence_length=32), total_parameters(TINY)
    plain = memory_parts(plan, 0, 0)
    unfused = Stack("test", activation_scale=1.5, logits_scale=2.0, gradient_copy=True, context_bytes=5e9)
    other = memory_parts(plan, 0, 0, software=unfused)
    assert other.gradients == 6 * count == plain.gradients + 2 * count
    matrix = 2 * 64 * 2 * 128  # gate and up; beside a copy of all gradients there is no other of this one
    assert (other.activations, other.logits) == (plain.activations * 1.5, plain.logits * 2)
    assert other.working == (plain.working - matrix) * 1.5
    assert (other.context - plain.context, other.parameters) == (5e9 - 2**30, plain.parameters)
    # No copy beside gradients that are summed in the training precision.
    in_bf16 = replace(plan, gradient_precision="bf16")
    assert memory_parts(in_bf16, 0, 0, software=unfused).gradients == 2 * count
    assert peak_bytes(plan, replace(cluster(1), stack=unfused))["gpu/0"] == other.total


def test_without_flash_attention_the_scores_of_every_layer_are_kept_unless_recomputed() -> None:
    scores, sums = 2 * 4 * 32 * 32, 4 * 4 * 32  # 4 heads, 32 x 32, 2 bytes; with a flash kernel a sum of 4 bytes a row
    for mode, differ in (("none", 8 * (scores - sums)), ("selective", 0)):
        plan = uniform(TINY, sequence_length=32, recompute=mode)
        flash, plain = (memory_parts(plan, 0, 0, software=Stack("test", flash_attention=kernel)) for kernel in (True, False))
        assert plain.activations - flash.activations == differ
        assert plain.working > flash.working


def test_a_softmax_that_megatrons_kernel_does_not_take_is_kept_in_fp32_besides_unless_recomputed() -> None:
    fused = Stack("test", flash_attention=False)
    for tensor, precision, number in ((1, "bf16", 0), (4, "bf16", 4 * 32 * 32), (4, "fp32", 0)):  # of four heads one on a rank
        for mode in RECOMPUTE:
            plan = uniform(TINY, tensor=tensor, sequence_length=32, recompute=mode, precision=precision)
            one, other = (
                memory_parts(plan, 0, 0, software=software) for software in (fused, replace(fused, megatron_softmax=True))
            )
            kept = mode in ("none", "pointwise")
            assert other.activations - one.activations == (8 * number if kept else 0)
            # Of a layer a gradient of as many bytes, and where it is recomputed what that brings back.
            assert other.working - one.working == number * (1 if kept else 2)


def test_all_slices_of_a_micro_batch_together_keep_what_its_whole_sequences_keep() -> None:
    software = Stack("test", flash_attention=False)
    for mode in RECOMPUTE:
        whole, sliced = (
            memory_parts(uniform(TINY, micro_batches=1, sequence_length=32, recompute=mode, **fields), 0, 0, software=software)
            for fields in ({}, {"sequence_slices": 4})
        )
        # Under full recomputation keys and values besides: 8 layers, 32 tokens, of 4 heads of 16 both, 2 bytes.
        besides = 8 * 32 * 2 * (4 * 16) * 2 if mode == "full" else 0
        assert sliced.activations == whole.activations + besides


def test_every_device_of_the_plan_has_the_peak_of_its_lane() -> None:
    plan = uniform(TINY, tensor=2, depth=2, copies=2)
    peaks = peak_bytes(plan, cluster(8))
    assert tuple(peaks) == plan.devices
    assert peaks["gpu/6"] == peaks["gpu/7"] == memory_parts(plan, 1, 1).total
    assert all(type(peak) is int and peak > 2**30 for peak in peaks.values())


def test_a_lane_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError, match="no lane with pipeline 0, stage 3"):
        memory_parts(uniform(TINY), 0, 3)


# --- Laws ------------------------------------------------------------------------------------------------------------

models = st.builds(
    Transformer,
    name=st.just("some"),
    layers=st.integers(4, 12),
    hidden=st.sampled_from([64, 256, 1024]),
    ffn=st.sampled_from([128, 1000]),
    heads=st.sampled_from([4, 8]),
    vocab=st.integers(100, 5000),
    activation=st.sampled_from(["gelu", "swiglu"]),
    tied_embeddings=st.booleans(),
)
plans = st.builds(
    uniform,
    models,
    tensor=st.sampled_from([1, 2, 4]),
    depth=st.integers(1, 4),
    copies=st.integers(1, 3),
    micro_batch=st.integers(1, 3),
    micro_batches=st.integers(1, 8),
    sequence_length=st.sampled_from([16, 512]),
    recompute=st.sampled_from(RECOMPUTE),
    precision=st.sampled_from(["bf16", "fp32"]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    zero_stage=st.integers(0, 3),
    sequence_parallel=st.booleans(),
)


def never_more(smaller: Plan, larger: Plan) -> None:
    world = cluster(64)
    less, more = peak_bytes(smaller, world), peak_bytes(larger, world)
    assert all(less[device] <= more[device] for device in more)


@given(plans, st.integers(0, 2))
def test_a_higher_zero_stage_never_needs_more(plan: Plan, stage: int) -> None:
    never_more(replace(plan, zero_stage=stage + 1), replace(plan, zero_stage=stage))


@given(plans)
def test_more_recomputation_never_needs_more(plan: Plan) -> None:
    def with_recompute(mode: str) -> Plan:
        pipelines = tuple(
            replace(pipeline, stages=tuple(replace(stage, recompute=mode) for stage in pipeline.stages))
            for pipeline in plan.pipelines
        )
        return replace(plan, pipelines=pipelines)

    for some in ("pointwise", "selective"):
        never_more(with_recompute(some), with_recompute("none"))
        never_more(with_recompute("full"), with_recompute(some))


@given(plans)
def test_1f1b_never_needs_more_than_gpipe(plan: Plan) -> None:
    never_more(plan.under("1f1b"), plan.under("gpipe"))


@given(plans)
def test_sequence_parallelism_never_needs_more(plan: Plan) -> None:
    never_more(replace(plan, sequence_parallel=True), replace(plan, sequence_parallel=False))


@given(
    st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.booleans(),
)
def test_holders_are_those_of_the_compiled_program(inner: list[list[int]], replicas: list[int], tied: bool) -> None:
    pipelines = []
    for p, cuts in enumerate(inner):
        bounds = [0, *sorted(set(cuts) - {0, 8}), 8]
        stages = []
        for s, layers in enumerate(itertools.pairwise(bounds)):
            shares = [Replica((f"{p}-{s}/{i}",), 1) for i in range(replicas[p])]
            stages.append(Stage(tuple(shares), (layers,)))
        pipelines.append(Pipeline(replicas[p], 1, tuple(stages)))
    model = replace(TINY, tied_embeddings=tied)
    plan = Plan("toy", model, 16, sum(p.micro_batch for p in pipelines), tuple(pipelines))
    lanes, counted = list(compile_plan(plan).lanes), count_holders(plan)
    assert counted.layers == tuple(len(holders(lanes, (i, i + 1), model)) for i in range(8))
    assert (counted.embedding, counted.head) == (len(holders(lanes, (0, 0), model)), len(holders(lanes, (8, 8), model)))
