"""The transformer noun: its checks, the presets, the inline form of plans, and Hugging Face configurations on disk."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from sim.spec.reading import InputError, Table
from sim.spec.transformer import Moe, Transformer, from_hugging_face, model_file, presets, read_transformer, to_table, transformer

TINY: dict[str, Any] = {"name": "tiny", "layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 100}

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2_7B = {
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
MISTRAL_7B = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
MIXTRAL_8X7B = MISTRAL_7B | {
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
GPT2 = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
OPT_350M = {
    "activation_function": "relu",
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 50272,
    "word_embed_proj_dim": 512,
}
GPT_NEO_2_7B = {
    "activation_function": "gelu_new",
    "attention_layers": ["global", "local"] * 16,
    "hidden_size": 2560,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neo",
    "num_heads": 20,
    "num_layers": 32,
    "vocab_size": 50257,
    "window_size": 256,
}
PYTHIA_1_4B = {
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}


def read(values: dict[str, Any]) -> Transformer:
    return read_transformer(Table(values, "plan.json", "model"))


def hugging_face(config: dict[str, Any], name: str = "model") -> Transformer:
    return from_hugging_face(Table(config, "config.json"), name)


def test_what_is_not_given_follows_from_what_is() -> None:
    tiny = read(TINY)
    assert (tiny.kv_heads, tiny.head_dim, tiny.padded_vocab, tiny.embedding_width) == (4, 16, 100, 64)
    assert (tiny.activation, tiny.norm, tiny.position, tiny.experts) == ("swiglu", "rmsnorm", "rotary", None)


def test_a_transformer_is_a_key_of_a_dictionary() -> None:
    assert {transformer("llama-2-7b"): 1}[transformer("LLAMA-2-7B")] == 1
    assert hash(transformer("mixtral-8x7b")) == hash(dataclasses.replace(transformer("mixtral-8x7b")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "`layers` must be at least 1, but got 0"),
        ({"kv_heads": -1}, "`kv_heads` must be at least 1, but got -1"),
        ({"heads": 6}, "`hidden` must be a multiple of `heads` where `head_dim` is not given, but got hidden=64, heads=6"),
        ({"kv_heads": 3}, "`heads` must be a multiple of `kv_heads`, but got heads=4, kv_heads=3"),
        ({"padded_vocab": 99}, "`padded_vocab` must be at least `vocab`, but got padded_vocab=99, vocab=100"),
        ({"position": "learned"}, "`max_positions` must be at least 1 where positions are learned, and never below 0, but got 0"),
        ({"sliding_window": 0}, "`sliding_window` must be at least 1, or none, but got 0"),
        ({"rope_theta": 0}, "`rope_theta` must be above 0 and finite, but got 0"),
        ({"rope_theta": math.inf}, "`rope_theta` must be above 0 and finite, but got inf"),
        ({"norm_epsilon": -1e-5}, "`norm_epsilon` must be above 0 and finite, but got -1e-05"),
        ({"norm_epsilon": math.nan}, "`norm_epsilon` must be above 0 and finite, but got nan"),
        ({"activation": "tanh"}, "`activation` must be one of gelu, relu, swiglu, but got 'tanh'"),
        ({"attention_bias": True}, "`attention_bias` must be one of none, qkv, output, all, but got True"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Transformer(**(TINY | change))
    assert str(caught.value) == f"model tiny: {message}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 8), "`experts` of the experts must be at least 1, but got 0"),
        ((4, 5, 8), "`top_k` must be at most the number of experts, but got top_k=5, experts=4"),
        ((4, 2, 8, 1, 0), "`shared_experts` and `shared_ffn` must both be at least 1, or both be left out"),
    ],
)
def test_experts_that_cannot_be_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Moe(*arguments)


# --- Presets and paths -----------------------------------------------------------------------------------------------


def test_a_preset_is_found_in_any_case() -> None:
    assert transformer("GPT3-175B") is transformer("gpt3-175b")
    assert transformer("gpt3-175b").name == "gpt3-175b"


def test_an_unknown_preset_is_told_the_nearest_and_the_list() -> None:
    with pytest.raises(InputError) as caught:
        transformer("lama-2-7b")
    message = str(caught.value)
    assert message.startswith("unknown model 'lama-2-7b'; did you mean llama-2-7b?; expected a preset (gpt3-125m, gpt3-350m,")
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "x" * 5000, "zero\0"])
def test_a_text_that_no_file_can_be_named_is_an_unknown_model(text: str) -> None:
    with pytest.raises(InputError, match="unknown model"):
        transformer(text)


@pytest.mark.parametrize(
    "text", ["meta-llama/llama-2-7b", "missing/config.json", "./missing", "config-of-mine.json", "~nobody-here/model"]
)
def test_a_path_that_is_not_there_is_told_as_missing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="there is no such file or folder, and models are never downloaded"):
        transformer(text)


def test_a_preset_comes_before_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert transformer("gpt2").hidden == 768
    assert transformer("./gpt2").hidden == 4096


def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Meta-Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    by_folder = transformer(str(folder))
    assert by_folder.name == "Meta-Llama-3-8B"
    assert by_folder == transformer(str(folder / "config.json"))
    assert dataclasses.replace(by_folder, name="llama-3-8b") == transformer("llama-3-8b")
    monkeypatch.chdir(folder)
    assert transformer("config.json") == by_folder
    assert [model_file(name) for name in (str(folder), "config.json", "llama-7b", "none.json", "")] == [
        folder / "config.json",
        Path("config.json"),
        None,
        None,
        None,
    ]
    (folder / "other.json").write_text(json.dumps(GPT2))
    assert transformer("other.json").name == "other"


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"this folder holds no config\.json"):
        transformer(str(tmp_path))


def test_a_config_that_is_not_json_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(InputError, match=r"config\.json, line 1, column"):
        transformer(str(tmp_path))
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="expected a mapping of keys to values"):
        transformer(str(tmp_path))


# --- Inline in a plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(presets()))
def test_every_preset_survives_its_inline_form(name: str) -> None:
    preset = presets()[name]
    table = to_table(preset)
    assert read(json.loads(json.dumps(table))) == preset


def test_the_inline_form_leaves_defaults_out() -> None:
    assert to_table(Transformer(**TINY)) == TINY
    assert to_table(transformer("mixtral-8x7b")) == {
        "name": "mixtral-8x7b",
        "layers": 32,
        "hidden": 4096,
        "ffn": 14336,
        "heads": 32,
        "vocab": 32000,
        "kv_heads": 8,
        "max_positions": 32768,
        "rope_theta": 1000000.0,
        "experts": {"experts": 8, "top_k": 2},
    }


def test_a_head_size_of_its_own_and_shared_experts_survive_the_inline_form() -> None:
    odd = Transformer("odd", 2, 64, 32, 5, 100, head_dim=16, experts=Moe(8, 2, 48, 1, 96))
    assert to_table(odd)["head_dim"] == 16
    assert read(to_table(odd)) == odd
    wide = Transformer("wide", 2, 64, 32, 4, 100, head_dim=32)
    assert to_table(wide)["head_dim"] == 32
    assert read(to_table(wide)) == wide


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden": 64}, "plan.json: model: unknown key 'hiden'"),
        ({"layers": "two"}, "plan.json: model.layers: expected a whole number of at least 1, but got 'two'"),
        ({"kv_heads": 0}, "plan.json: model.kv_heads: expected a whole number of at least 1, but got 0"),
        ({"heads": 6}, "plan.json: model: model tiny: `hidden` must be a multiple of `heads`"),
        ({"activation": "gleu"}, "plan.json: model.activation: expected one of gelu, relu, swiglu, but got 'gleu'; did you"),
        ({"norm_epsilon": "1e-5"}, "plan.json: model.norm_epsilon: expected a number of at least 0, but got '1e-5'"),
        ({"rope_theta": 0}, "plan.json: model: model tiny: `rope_theta` must be above 0 and finite, but got 0"),
        ({"experts": {"experts": 4}}, "plan.json: model.experts.top_k: is missing"),
        ({"experts": {"experts": 4, "top_k": 8}}, "plan.json: model.experts: `top_k` must be at most the number of experts"),
        ({"experts": {"experts": 4, "top_k": 2, "width": 8}}, "plan.json: model.experts: unknown key 'width'"),
    ],
)
def test_inline_mistakes_name_their_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(TINY | change)
    assert str(caught.value).startswith(message)


def test_null_stands_for_no_window_and_no_experts() -> None:
    assert read(TINY | {"sliding_window": None, "experts": None}) == read(TINY)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA_3_8B, "llama-3-8b"),
        (QWEN2_7B, "qwen2.5-7b"),
        (QWEN3_8B, "qwen3-8b"),
        (QWEN3_30B_A3B, "qwen3-30b-a3b"),
        (MISTRAL_7B, "mistral-7b"),
        (MIXTRAL_8X7B, "mixtral-8x7b"),
        (GPT2, "gpt2"),
        (OPT_350M, "opt-350m"),
        (GPT_NEO_2_7B, "gpt-neo-2.7b"),
    ],
)
def test_a_published_config_reads_as_its_preset(config: dict[str, Any], preset: str) -> None:
    assert hugging_face(config, preset) == transformer(preset)


def test_pythia_has_rotary_positions_biases_and_its_own_output_matrix() -> None:
    pythia = hugging_face(PYTHIA_1_4B)
    assert (pythia.position, pythia.norm, pythia.activation) == ("rotary", "layernorm", "gelu")
    assert (pythia.attention_bias, pythia.mlp_bias, pythia.tied_embeddings) == ("all", True, False)


def test_a_llama_without_key_value_heads_has_as_many_as_heads() -> None:
    config = {key: value for key, value in LLAMA_3_8B.items() if key != "num_key_value_heads"}
    assert hugging_face(config).kv_heads == 32
    assert hugging_face(config | {"num_key_value_heads": None, "head_dim": None}).kv_heads == 32
    assert hugging_face(config | {"head_dim": 64}).head_dim == 64


def test_the_rotary_base_stands_in_its_own_key_or_inside_the_newer_ones() -> None:
    bare = {key: value for key, value in LLAMA_3_8B.items() if not key.startswith("rope")}
    assert hugging_face(bare).rope_theta == 10_000
    assert hugging_face(bare | {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}).rope_theta == 10_000
    assert hugging_face(bare | {"rope_theta": 5e5}).rope_theta == 5e5
    assert hugging_face(bare | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}).rope_theta == 7e5
    assert hugging_face(bare | {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 7e5}}).rope_theta == 7e5
    assert hugging_face(bare | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}).rope_theta == 5e5
    assert hugging_face(PYTHIA_1_4B | {"rotary_emb_base": 20_000}).rope_theta == 20_000


def test_newer_versions_name_the_experts_of_qwen3_as_those_of_mixtral() -> None:
    newer = {"num_local_experts" if key == "num_experts" else key: value for key, value in QWEN3_30B_A3B.items()}
    assert hugging_face(newer) == hugging_face(QWEN3_30B_A3B)


LLAMAS = [LLAMA_3_8B, MISTRAL_7B, QWEN2_7B, QWEN3_8B, QWEN3_30B_A3B, MIXTRAL_8X7B]
OTHERS = [GPT2, GPT_NEO_2_7B, PYTHIA_1_4B, OPT_350M]
DEFAULTS = {"llama": (1e-6, 1e4), "mistral": (1e-6, 1e4), "qwen2": (1e-6, 1e4), "mixtral": (1e-5, 1e6), "gpt2": (1e-5, 1e4)}
DEFAULTS |= dict.fromkeys(("qwen3", "qwen3_moe"), (1e-6, 1e4))
DEFAULTS |= dict.fromkeys(("gpt_neo", "gpt_neox", "opt"), (1e-5, 1e4))


@pytest.mark.parametrize("config", [*LLAMAS, *OTHERS])
def test_epsilon_and_rotary_base_default_to_those_of_the_class(config: dict[str, Any]) -> None:
    bare = {key: value for key, value in config.items() if "eps" not in key and not key.startswith("rope")}
    read = hugging_face(bare)
    assert (read.norm_epsilon, read.rope_theta) == DEFAULTS[config["model_type"]]
    key = {"gpt2": "layer_norm_epsilon", "gpt_neo": "layer_norm_epsilon", "gpt_neox": "layer_norm_eps"}
    if config["model_type"] != "opt":  # whose norms have torch's epsilon always
        named = key.get(config["model_type"], "rms_norm_eps")
        assert hugging_face(bare | {named: 3e-4}).norm_epsilon == 3e-4


def test_presets_have_the_published_epsilons_and_rotary_bases() -> None:
    found = {name: (preset.norm_epsilon, preset.rope_theta) for name, preset in presets().items()}
    shown = {
        "llama-7b": (1e-6, 1e4),
        "llama-30b": (1e-6, 1e4),
        "llama-65b": (1e-5, 1e4),  # its params.json says so, unlike those of the smaller ones
        "llama-2-70b": (1e-5, 1e4),
        "llama-3-70b": (1e-5, 5e5),
        "mistral-7b": (1e-5, 1e4),
        "mixtral-8x7b": (1e-5, 1e6),
        "qwen2.5-3b": (1e-6, 1e6),
        "qwen2.5-14b": (1e-5, 1e6),  # unlike its -Instruct
        "gpt3-175b": (1e-5, 1e4),
        "opt-13b": (1e-5, 1e4),
    }
    assert {name: found[name] for name in shown} == shown


def test_qwen_uses_its_window_only_where_it_says_so() -> None:
    assert hugging_face(QWEN2_7B | {"use_sliding_window": True}).sliding_window is None  # from layer 28 of 28 on
    assert hugging_face(QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 0}).sliding_window == 131072
    with pytest.raises(InputError, match="max_window_layers: expected 0 or at least 28"):
        hugging_face(QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 14})


def test_the_width_of_a_head_of_qwen3_does_not_follow_from_hidden_but_with_experts_it_does() -> None:
    narrow = {key: value for key, value in QWEN3_8B.items() if key != "head_dim"} | {"hidden_size": 2048}
    assert hugging_face(narrow).head_dim == 128
    assert hugging_face({key: value for key, value in QWEN3_30B_A3B.items() if key != "head_dim"}).head_dim == 64
    assert hugging_face(QWEN3_8B | {"attention_bias": True}).attention_bias == "all"


@pytest.mark.parametrize("change", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_layers_without_experts_beside_those_that_have_some_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"^config.json: {next(iter(change))}: expected .*, since every layer must have experts"):
        hugging_face(QWEN3_30B_A3B | change)


def test_opt_variants() -> None:
    plain = {key: value for key, value in OPT_350M.items() if key not in ("word_embed_proj_dim", "do_layer_norm_before")}
    assert hugging_face(plain).embedding_width == 1024
    assert hugging_face(plain).final_norm
    assert not hugging_face(plain | {"_remove_final_layer_norm": True}).final_norm
    assert hugging_face(plain | {"enable_bias": False}).attention_bias == "none"
    with pytest.raises(InputError, match="layer_norm_elementwise_affine"):
        hugging_face(plain | {"layer_norm_elementwise_affine": False})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.json: model_type: is missing"),
        (
            {"model_type": "lama"},
            "config.json: model_type: expected one of llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, gpt2, gpt_neo, "
            "gpt_neox, opt, "
            "but got 'lama'; did you mean llama?",
        ),
        ({"model_type": "llama"}, "config.json: num_hidden_layers: is missing"),
        (LLAMA_3_8B | {"rms_norm_eps": None}, "config.json: rms_norm_eps: expected a number of at least 0, but got nothing"),
        (LLAMA_3_8B | {"rms_norm_eps": 0}, "config.json: model model: `norm_epsilon` must be above 0 and finite, but got 0"),
        (LLAMA_3_8B | {"rope_theta": "big"}, "config.json: rope_theta: expected a number of at least 0, but got 'big'"),
        (LLAMA_3_8B | {"rope_parameters": {"rope_theta": -1}}, "config.json: rope_parameters.rope_theta: expected a number"),
        ({"model_type": "gpt2"}, "config.json: n_embd: is missing"),
        ({"model_type": "opt", "hidden_size": 64}, "config.json: num_hidden_layers: is missing"),
        (LLAMA_3_8B | {"num_attention_heads": 30}, "config.json: model model: `hidden` must be a multiple of `heads`"),
        (LLAMA_3_8B | {"hidden_act": "relu"}, "config.json: hidden_act: expected one of silu, swish, but got 'relu'"),
        (LLAMA_3_8B | {"hidden_size": "4096"}, "config.json: hidden_size: expected a whole number"),
        (MIXTRAL_8X7B | {"num_experts_per_tok": 9}, "config.json: `top_k` must be at most the number of experts"),
        (GPT2 | {"activation_function": "silu"}, "config.json: activation_function: expected one of gelu,"),
    ],
)
def test_a_bad_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        hugging_face(config)
    assert str(caught.value).startswith(message)
