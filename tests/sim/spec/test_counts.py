"""Parameters against published totals, FLOP and bytes against the papers' formulas, and the laws that hold for any shape."""

import dataclasses
from csv import DictReader
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.spec import counts
from sim.spec.counts import (
    active_parameters,
    attention_memory_bytes,
    boundary_bytes,
    embedding_forward_flop,
    embedding_matmuls,
    embedding_parameters,
    embedding_parameters_at,
    head_activation_bytes,
    head_forward_flop,
    head_matmuls,
    head_parameters,
    head_parameters_at,
    layer_activation_bytes,
    layer_forward_flop,
    layer_kernels,
    layer_matmuls,
    layer_memory_bytes,
    layer_parameter_parts,
    layer_parameters,
    layer_parameters_at,
    layer_pointwise_bytes,
    layer_pointwise_kernels,
    layer_recompute_flop,
    layer_recompute_peak_bytes,
    layer_routing_bytes,
    layer_sharded_bytes,
    masked_share,
    model_flop,
    tied_copy_parameters_at,
    total_parameters,
    unfused_scores,
)
from sim.spec.reading import InputError, Table
from sim.spec.transformer import Moe, Transformer, from_hugging_face, presets, transformer

PUBLISHED_PARAMETERS = {
    # Sums over the tensors of the published safetensors files.
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt-neo-2.7b": 2_651_307_520,
}

ROUNDED = {"m": 10**6, "b": 10**9, "t": 10**12}


@st.composite
def transformers(draw: st.DrawFn) -> Transformer:
    head_dim = draw(st.sampled_from([8, 16]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    hidden = heads * head_dim
    vocab = draw(st.integers(10, 500))
    moe = st.builds(Moe, st.sampled_from([4, 8]), st.integers(1, 4), st.integers(1, 99), st.just(1), st.integers(1, 99))
    return Transformer(
        name="random",
        layers=draw(st.integers(1, 5)),
        hidden=hidden,
        ffn=draw(st.integers(1, 300)),
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        padded_vocab=vocab + draw(st.integers(0, 30)),
        activation=draw(st.sampled_from(["gelu", "relu", "swiglu"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        attention_bias=draw(st.sampled_from(["none", "qkv", "output", "all"])),
        mlp_bias=draw(st.booleans()),
        position=draw(st.sampled_from(["rotary", "learned", "alibi"])),
        max_positions=64,
        embedding_width=draw(st.sampled_from([hidden, 24])),
        sliding_window=draw(st.sampled_from([None, 16])),
        tied_embeddings=draw(st.booleans()),
        final_norm=draw(st.booleans()),
        experts=draw(st.none() | moe),
    )


degrees = st.sampled_from([1, 2, 3, 4, 8])


# --- Parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_the_published_total(name: str) -> None:
    assert total_parameters(transformer(name)) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith(("gpt3-", "megatron-"))])
def test_gpt_parameters_are_within_two_per_cent_of_the_name(name: str) -> None:
    # The tables print 1.7 B for a model of 1.652 B and 530 B (529.6), so the last digit printed is given its half, too.
    number, scale = name.split("-")[1][:-1], ROUNDED[name[-1]]
    half_digit = 0.05 * scale if "." in number else 0.0
    assert abs(total_parameters(transformer(name)) - float(number) * scale) <= max(0.02 * float(number) * scale, half_digit)


@pytest.mark.parametrize("name", ["gpt3-125m", "gpt3-175b", "megatron-18.4b", "megatron-1t"])
def test_gpt_parameters_follow_megatrons_formula(name: str) -> None:
    gpt = transformer(name)
    h, layers, s, vocabulary = gpt.hidden, gpt.layers, 2048, 51200
    formula = 12 * layers * h * h * (1 + Fraction(13, 12 * h) + Fraction(vocabulary + s, 12 * layers * h))
    assert total_parameters(gpt) == formula + 2 * h  # the formula leaves the final norm out


def test_a_pythia_config_has_the_published_parameters() -> None:
    config = {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "vocab_size": 50304,
    }
    assert total_parameters(from_hugging_face(Table(config, "config.json"), "pythia-1.4b")) == 1_414_647_808


def test_opt_350m_counted_by_hand() -> None:
    opt = transformer("opt-350m")
    assert embedding_parameters(opt) == 50272 * 512 + 2050 * 1024 + 512 * 1024
    assert head_parameters(opt) == 1024 * 512  # tied, and no final norm
    assert layer_parameters(opt) == 12 * 1024**2 + 13 * 1024


def test_mixtral_activates_two_experts_of_eight() -> None:
    mixtral = transformer("mixtral-8x7b")
    parts = layer_parameter_parts(mixtral)
    assert (parts.experts, parts.router, parts.mlp) == (8 * 3 * 4096 * 14336, 8 * 4096, 0)
    assert active_parameters(mixtral) == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336
    assert active_parameters(transformer("mistral-7b")) == 7_241_732_096


def test_shared_experts_are_counted_beside_the_routed_ones() -> None:
    model = Transformer("shared", 1, 8, 99, 2, 10, experts=Moe(4, 2, 5, 2, 7))
    parts = layer_parameter_parts(model)
    assert (parts.mlp, parts.router, parts.experts) == (2 * 3 * 8 * 7, 8 * 4, 4 * 3 * 8 * 5)
    assert active_parameters(model) == total_parameters(model) - 2 * 3 * 8 * 5


def test_one_rank_of_a_tensor_parallel_group_counted_by_hand() -> None:
    qwen = transformer("qwen2.5-7b")  # 28 heads and 4 key-value heads of 128, biases on query, key and value
    h, ffn = 3584, 18944
    expected = h * (7 + 2) * 128 + 7 * 128 * h + (7 + 2) * 128 + 3 * h * ffn // 4 + 2 * h
    assert layer_parameters_at(qwen, 4) == expected
    gpt = transformer("gpt3-175b")
    assert layer_parameters_at(gpt, 8) == 12 * 12288**2 // 8 + (3 + 4) * 12288 // 8 + 2 * 12288 + 4 * 12288
    assert embedding_parameters_at(gpt, 8) == 51200 // 8 * 12288 + 2048 * 12288
    assert head_parameters_at(gpt, 8) == 2 * 12288
    assert tied_copy_parameters_at(gpt, 8) == 51200 // 8 * 12288
    assert tied_copy_parameters_at(qwen, 8) == 0


def test_norms_of_query_and_key_are_on_every_rank() -> None:
    with_norms, without = (Transformer("m", 2, 64, 96, 4, 50, kv_heads=2, head_dim=16, qk_norm=norms) for norms in (True, False))
    for ranks in (1, 2, 4):
        assert layer_parameters_at(with_norms, ranks) - layer_parameters_at(without, ranks) == 2 * 16
    # Query and key are kept as they were, read and written once more, by two kernels more.
    kept = [layer_activation_bytes(t, 1, 32, 2, False, "none", 2) for t in (with_norms, without)]
    moved = [layer_memory_bytes(t, 32, 2, False, 2) for t in (with_norms, without)]
    assert kept[0] - kept[1] == 32 * (2 + 1) * 16 * 2 and moved[0] - moved[1] == 2 * 32 * (2 + 1) * 16 * 2
    assert layer_kernels(with_norms) - layer_kernels(without) == 2


def test_fewer_key_value_heads_than_ranks_are_copied() -> None:
    qwen = transformer("qwen2.5-0.5b")  # 14 heads, 2 key-value heads of 64
    held = layer_parameter_parts(qwen, 7).attention
    assert held == 896 * (2 + 2 * 1) * 64 + 2 * 64 * 896


@given(transformers(), degrees)
def test_the_ranks_together_hold_at_least_the_model(model: Transformer, ranks: int) -> None:
    for whole, at in [
        (layer_parameters, layer_parameters_at),
        (embedding_parameters, embedding_parameters_at),
        (head_parameters, head_parameters_at),
    ]:
        assert at(model, 1) == whole(model)
        assert ranks * at(model, ranks) >= whole(model) >= at(model, ranks)


@given(transformers())
def test_active_parameters_are_some_of_all(model: Transformer) -> None:
    assert 0 < active_parameters(model) <= total_parameters(model)
    assert (active_parameters(model) == total_parameters(model)) == (
        model.experts is None or model.experts.top_k == model.experts.experts
    )


# --- FLOP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt3-1.3b", "gpt3-175b", "megatron-22b", "megatron-530b", "megatron-1t"])
@pytest.mark.parametrize("s", [1024, 2048])
def test_gpt_flop_follow_megatrons_formulas(name: str, s: int) -> None:
    gpt, batch = transformer(name), 3
    h, layers, vocabulary = gpt.hidden, gpt.layers, 51200
    model = 72 * batch * s * layers * h**2 * (1 + Fraction(s, 6 * h) + Fraction(vocabulary, 12 * layers * h))
    assert model_flop(gpt, batch, s) == model
    with_recompute = 96 * batch * s * layers * h**2 * (1 + Fraction(s, 6 * h) + Fraction(vocabulary, 16 * layers * h))
    recompute = layers * layer_recompute_flop(gpt, batch * s, s, "full")
    assert model_flop(gpt, batch, s) + recompute == with_recompute
    # Of 72 B s l h^2 the attention is s / 6h, and half of it is masked.
    masked = Fraction(s, 12 * h) / (1 + Fraction(s, 6 * h) + Fraction(vocabulary, 12 * layers * h))
    assert masked_share(gpt, s) == pytest.approx(float(masked), rel=1e-12)


def test_a_short_window_has_nothing_masked() -> None:
    mistral = transformer("mistral-7b")
    assert masked_share(mistral, 8192) == 0 < masked_share(mistral, 4096)


def test_llama_flop_counted_by_hand() -> None:
    llama, tokens, s = transformer("llama-2-70b"), 100, 4096
    flop = layer_forward_flop(llama, tokens, s)
    assert flop.matmul == 2 * tokens * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert flop.attention == 4 * tokens * s * 8192
    assert head_forward_flop(llama, tokens) == 2 * tokens * 8192 * 32000
    assert model_flop(llama, 2, s) == 3 * (80 * layer_forward_flop(llama, 2 * s, s).total + 2 * 2 * s * 8192 * 32000)


def test_a_mixture_computes_only_the_chosen_experts_and_the_router() -> None:
    flop = layer_forward_flop(transformer("mixtral-8x7b"), 10, 4096)
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert flop.matmul == 2 * 10 * (attention + 8 * 4096 + 2 * 3 * 4096 * 14336)


def test_a_window_limits_the_keys_only_where_it_is_shorter() -> None:
    mistral = transformer("mistral-7b")
    everything = dataclasses.replace(mistral, sliding_window=None)
    assert layer_forward_flop(mistral, 10, 2048) == layer_forward_flop(everything, 10, 2048)
    assert layer_forward_flop(mistral, 10, 8192) == layer_forward_flop(everything, 10, 4096)


def test_a_projected_embedding_costs_its_matmul_on_both_ends() -> None:
    opt = transformer("opt-350m")
    assert embedding_forward_flop(opt, 7) == 2 * 7 * 512 * 1024
    assert head_forward_flop(opt, 7) == 2 * 7 * (512 * 1024 + 512 * 50272)
    assert embedding_forward_flop(transformer("opt-1.3b"), 7) == 0


def test_recomputation_repeats_attention_or_everything() -> None:
    gpt = transformer("gpt3-13b")
    flop = layer_forward_flop(gpt, 2048, 2048)
    assert layer_recompute_flop(gpt, 2048, 2048, "none") == 0
    assert layer_recompute_flop(gpt, 2048, 2048, "pointwise") == 0
    assert layer_recompute_flop(gpt, 2048, 2048, "selective") == flop.attention
    assert layer_recompute_flop(gpt, 2048, 2048, "full") == flop.matmul + flop.attention


@given(transformers(), st.integers(1, 100), st.integers(1, 20), st.integers(1, 64))
def test_flop_are_linear_in_tokens(model: Transformer, tokens: int, times: int, sequence_length: int) -> None:
    one, many = (layer_forward_flop(model, n, sequence_length) for n in (tokens, tokens * times))
    assert (many.matmul, many.attention) == (times * one.matmul, times * one.attention)
    assert head_forward_flop(model, tokens * times) == times * head_forward_flop(model, tokens)
    assert model_flop(model, tokens * times, sequence_length) == times * model_flop(model, tokens, sequence_length)


# --- Matmuls ---------------------------------------------------------------------------------------------------------


def test_the_matmuls_of_a_llama_layer() -> None:
    matmuls = layer_matmuls(transformer("llama-3-8b"), 8192, 2)
    assert [(matmul.name, matmul.m, matmul.n, matmul.k, matmul.count) for matmul in matmuls] == [
        ("query, key and value", 8192, 2048 + 2 * 512, 4096, 1),
        ("attention output", 8192, 4096, 2048, 1),
        ("mlp gate and up", 8192, 14336, 4096, 1),
        ("mlp down", 8192, 4096, 7168, 1),
    ]
    assert [(matmul.m, matmul.n, matmul.k) for matmul in head_matmuls(transformer("llama-3-8b"), 8192, 2)] == [
        (8192, 64128, 4096)
    ]


def test_the_matmuls_of_a_mixture_layer() -> None:
    mixtral = transformer("mixtral-8x7b")
    names = [(matmul.name, matmul.m, matmul.count, matmul.kernels) for matmul in layer_matmuls(mixtral, 1024, 1)]
    assert names[2:] == [("router", 1024, 1, 1), ("expert gate and up", 256, 8, 1), ("expert down", 256, 8, 1)]
    spread = layer_matmuls(mixtral, 1024, 1, expert_parallel=4)
    assert [(matmul.m, matmul.count) for matmul in spread[3:]] == [(1024, 2), (1024, 2)]


def test_experts_of_all_tokens_are_one_mlp() -> None:
    mixture = dataclasses.replace(transformer("mixtral-8x7b"), experts=Moe(8, 2, 100, 3, 50))
    up, down = layer_matmuls(mixture, 16, 1)[-2:]
    assert (up.name, up.m, up.n, up.count) == ("shared expert gate and up", 16, 2 * 3 * 50, 1)
    assert (down.name, down.k, down.count) == ("shared expert down", 3 * 50, 1)


@given(transformers(), st.integers(1, 20))
def test_the_matmuls_add_up_to_the_flop(model: Transformer, eighths: int) -> None:
    tokens = 8 * eighths  # so that 4 or 8 experts share them without remainder
    assert sum(m.flop for m in layer_matmuls(model, tokens, 1)) == layer_forward_flop(model, tokens, 16).matmul
    assert sum(m.flop for m in head_matmuls(model, tokens, 1)) == head_forward_flop(model, tokens)
    assert sum(m.flop for m in embedding_matmuls(model, tokens)) == embedding_forward_flop(model, tokens)


@given(transformers(), degrees)
def test_the_ranks_together_compute_at_least_the_layer(model: Transformer, ranks: int) -> None:
    held = sum(matmul.flop for matmul in layer_matmuls(model, 64, ranks))
    assert ranks * held >= layer_forward_flop(model, 64, 16).matmul >= held


# --- Bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 2, 8])
def test_gpt_activation_bytes_follow_the_published_formula_without_dropout(t: int) -> None:
    gpt, b, s = transformer("gpt3-175b"), 2, 2048
    h, a = gpt.hidden, gpt.heads
    published = s * b * h * (10 + Fraction(24, t) + Fraction(5 * a * s, h * t))
    masks = s * b * h * (2 + Fraction(3 * a * s, h * t))  # after attention and MLP; on the scores a mask and what it leaves
    assert layer_activation_bytes(gpt, b, s, t, False, "none", 2, flash_attention=False) == published - masks
    assert layer_activation_bytes(gpt, b, s, t, False, "selective", 2) == s * b * h * (8 + Fraction(24, t))
    assert layer_activation_bytes(gpt, b, s, t, True, "selective", 2) == s * b * h * Fraction(34 - 2, t)
    assert layer_activation_bytes(gpt, b, s, t, False, "full", 2) == 2 * s * b * h
    assert layer_activation_bytes(gpt, b, s, t, True, "full", 2) == Fraction(2 * s * b * h, t)
    statistics = 4 * b * s * a // t
    assert layer_activation_bytes(gpt, b, s, t, True, "none", 2) == s * b * h * Fraction(32, t) + statistics


def test_llama_activation_bytes_counted_by_hand() -> None:
    llama, tokens = transformer("llama-3-8b"), 8192
    per_token = 4 * 4096 + (16 + 2 * 4) * 128 + 16 * 128 + 3 * 7168  # on one of two ranks
    assert layer_activation_bytes(llama, 1, tokens, 2, False, "none", 2) == tokens * (2 * per_token + 4 * 16)
    dropped = 2 * 4096 + 7168  # the norms' results, and the product of gate and up
    assert layer_activation_bytes(llama, 1, tokens, 2, False, "pointwise", 2) == tokens * (2 * (per_token - dropped) + 4 * 16)


def test_mixture_activation_bytes_counted_by_hand() -> None:
    mixtral, tokens = transformer("mixtral-8x7b"), 1024
    per_token = 4 * 4096 + (32 + 2 * 8) * 128 + 32 * 128 + 2 * 3 * 14336 + 2 * 2 * 4096
    assert layer_activation_bytes(mixtral, 1, tokens, 1, False, "selective", 2) == tokens * (2 * per_token + 4 * 8)
    none, pointwise = (layer_activation_bytes(mixtral, 1, tokens, 1, False, mode, 2) for mode in ("none", "pointwise"))
    assert none - pointwise == tokens * 2 * (2 * 4096 + 2 * 14336)


def test_pointwise_recomputation_moves_the_bytes_of_norms_and_activation() -> None:
    """Each reads its inputs and writes its result once; relu, whose result is kept, is not computed again."""
    llama, opt = transformer("llama-3-8b"), transformer("opt-1.3b")
    assert layer_pointwise_bytes(llama, 100, 2, False, 2) == 100 * (2 * 2 * 4096 + 3 * 7168) * 2
    assert layer_pointwise_bytes(llama, 100, 2, True, 2) == 100 * (2 * 2 * 2048 + 3 * 7168) * 2
    assert layer_pointwise_bytes(opt, 100, 1, False, 2) == 100 * 2 * 2 * 2048 * 2
    assert (layer_pointwise_kernels(llama), layer_pointwise_kernels(opt)) == (3, 2)


def test_relu_keeps_its_result_only() -> None:
    opt = transformer("opt-1.3b")
    kept = layer_activation_bytes(opt, 1, 100, 1, False, "selective", 2)
    as_gelu = layer_activation_bytes(dataclasses.replace(opt, activation="gelu"), 1, 100, 1, False, "selective", 2)
    assert as_gelu - kept == 100 * 8192 * 2


@given(transformers(), st.integers(1, 4), st.integers(1, 64), degrees, st.booleans(), st.booleans())
def test_activation_bytes_fall_with_recomputation_and_ranks_and_rise_with_the_micro_batch(
    model: Transformer, micro_batch: int, sequence_length: int, ranks: int, sequence_parallel: bool, flash: bool
) -> None:
    def kept(recompute: str, batch: int = micro_batch, group: int = ranks) -> int:
        return layer_activation_bytes(model, batch, sequence_length, group, sequence_parallel, recompute, 2, flash)

    for some in ("pointwise", "selective"):
        assert 0 < kept("full") < kept(some) < kept("none")
    assert kept("none", micro_batch + 1) > kept("none")
    assert kept("none") <= kept("none", group=1)
    assert kept("none", 2 * micro_batch) <= 2 * kept("none")
    for recompute in counts.RECOMPUTE:
        peak = layer_recompute_peak_bytes(model, micro_batch, sequence_length, ranks, sequence_parallel, recompute, 2, flash)
        assert kept(recompute) + peak == kept("none")


def test_an_unknown_recompute_is_refused() -> None:
    with pytest.raises(InputError, match="of a layer must be one of none, pointwise, selective, full, but got 'some'"):
        layer_activation_bytes(transformer("gpt2"), 1, 8, 1, False, "some", 2)
    with pytest.raises(InputError, match="but got 'some'"):
        layer_recompute_flop(transformer("gpt2"), 8, 8, "some")


def test_the_head_keeps_logits_twice() -> None:
    llama, tokens = transformer("llama-3-8b"), 2 * 8192
    logits = tokens * 128256 // 8 * (2 + 4)
    assert head_activation_bytes(llama, 2, 8192, 8, False, 2) == logits + 2 * tokens * 4096 * 2
    assert head_activation_bytes(llama, 2, 8192, 8, True, 2) == logits + 2 * tokens * 4096 * 2 // 8
    opt = transformer("opt-350m")
    assert head_activation_bytes(opt, 1, 8, 1, False, 4) == 8 * (1024 + 512) * 4 + 8 * 50272 * 8


def test_the_boundary_is_one_tensor_of_the_hidden_width() -> None:
    assert boundary_bytes(transformer("llama-2-13b"), 2, 4096, 2) == 2 * 4096 * 5120 * 2


def test_memory_traffic_counted_by_hand() -> None:
    gpt = transformer("gpt2")  # norms 4 h, residuals 6 h, gelu 2 x 4 h
    assert layer_memory_bytes(gpt, 10, 1, False, 2) == 10 * 18 * 768 * 2
    assert layer_memory_bytes(gpt, 10, 4, False, 2) == 10 * (10 + 2) * 768 * 2
    assert layer_memory_bytes(gpt, 10, 4, True, 2) * 4 == 10 * 18 * 768 * 2
    llama = transformer("llama-3-8b")
    assert layer_memory_bytes(llama, 1, 1, False, 2) == 2 * (10 * 4096 + 2 * (4096 + 1024) + 3 * 14336)
    mixtral = transformer("mixtral-8x7b")
    assert layer_memory_bytes(mixtral, 1, 1, False, 2) == 2 * (
        10 * 4096 + 2 * (4096 + 1024) + 2 * 3 * 14336 + (2 * 2 + 2 + 1) * 4096
    )


def test_of_memory_traffic_heads_and_the_mlp_are_divided() -> None:
    assert layer_sharded_bytes(transformer("gpt2"), 10, 4, 2) == 10 * 2 * 768 * 2
    assert layer_routing_bytes(transformer("gpt2"), 10, 2) == 0
    # sent: 2 x 4096 in and out; combined: 2 x 4096 in, 4096 out
    assert layer_routing_bytes(transformer("mixtral-8x7b"), 1, 2) == 2 * 7 * 4096
    assert layer_sharded_bytes(transformer("llama-3-8b"), 1, 2, 2) == 2 * (2 * (2048 + 512) + 3 * 7168)
    # With norms of query and key these are read and written once more.
    qwen = transformer("qwen3-4b")
    turned = dataclasses.replace(qwen, qk_norm=False)
    heads = 2 * (qwen.heads + qwen.kv_heads) * qwen.head_dim * 2
    assert layer_sharded_bytes(qwen, 1, 1, 2) - layer_sharded_bytes(turned, 1, 1, 2) == heads


def test_attention_without_flash_moves_the_scores_four_times() -> None:
    gpt = transformer("gpt2")
    flash = attention_memory_bytes(gpt, 10, 1024, 1, 2)
    assert flash == 10 * 4 * 768 * 2
    assert attention_memory_bytes(gpt, 10, 1024, 1, 2, flash_attention=False) == flash + 10 * 4 * 12 * 1024 * 2


def test_megatrons_softmax_takes_scores_of_16_bits_in_fours_of_matrices() -> None:
    # Twenty heads: five on each of four ranks.
    model = dataclasses.replace(transformer("gpt2"), heads=20, kv_heads=20, head_dim=64)
    assert unfused_scores(model, 1, 2048, 2048, 4, 2) == 5 * 2048 * 2048
    assert unfused_scores(model, 2, 512, 2048, 4, 2) == 2 * 5 * 512 * 2048
    assert unfused_scores(model, 4, 2048, 2048, 4, 2) == 0
    assert unfused_scores(model, 1, 2048, 2048, 5, 2) == unfused_scores(model, 1, 2048, 2048, 1, 2) == 0
    assert unfused_scores(model, 4, 2048, 2048, 4, 4) == 20 * 2048 * 2048
    # Nor rows that are too short or too long for it, nor queries that are no multiple of four.
    taken = [(4, 17), (4, 16384)]
    left = [(4, 16), (4, 16385), (6, 17)]
    assert [unfused_scores(model, 1, *sizes, 1, 2) for sizes in taken] == [0, 0]
    assert [unfused_scores(model, 1, *sizes, 1, 2) for sizes in left] == [20 * queries * keys for queries, keys in left]


def test_megatrons_softmax_takes_what_aleph_alphas_runs_could_use_it_for() -> None:
    """Their code refuses a plan for which the same kernel is not available, and does not fall back on others."""
    data = Path(__file__).parents[3] / "experiments" / "data"
    with (data / "published_runs.csv").open() as ran, (data / "failed_runs.csv").open() as failed:
        rows = [row for row in (*DictReader(ran), *DictReader(failed)) if row["notes"].startswith("kernel=fused")]
    wrong = []
    for row in rows:
        assert row["source_key"] == "aleph"
        heads, length, degree, sequences = (int(float(row[name])) for name in ("heads", "seq_len", "tp", "micro_batch"))
        model = dataclasses.replace(transformer("gpt2"), heads=heads, kv_heads=heads, head_dim=128)
        taken = unfused_scores(model, sequences, length, length, degree, 2) == 0
        if taken == (row.get("failure") == "Kernel not available"):
            wrong.append((heads, degree, sequences))
    assert len(rows) == 38
    assert wrong == [(52, 2, 2)]  # refused, like others of this model on two ranks, though its 52 matrices are a multiple of four


def test_kernels_counted_by_hand() -> None:
    # norm, qkv, attention, output, residual, norm, up, gelu, down, residual; with rotary one more
    assert layer_kernels(transformer("gpt2")) == 10
    assert layer_kernels(transformer("llama-2-7b")) == 11
    # router, choose, send and combine besides; up, activation and down are those of all experts at once
    assert layer_kernels(transformer("mixtral-8x7b")) == 11 + 4
    assert layer_kernels(transformer("mixtral-8x7b"), expert_parallel=8) == 11 + 4
    # and three more where there are experts for every token
    assert layer_kernels(dataclasses.replace(transformer("mixtral-8x7b"), experts=Moe(8, 2, 100, 3, 50))) == 11 + 4 + 3
