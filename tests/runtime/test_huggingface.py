"""Hugging Face weights, read and written, against the models of the library transformers."""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.huggingface import HuggingFaceWeights, load_weights, prepare_save, save_weights
from runtime.parameters import Parameter, model_parameters
from sim.spec.reading import InputError
from sim.spec.transformer import Moe, Transformer, transformer
from tests.runtime.reference import reference_logits

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

TYPES = "llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gpt2"
LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make(kind: str, **changes: Any) -> Any:
    """A small random model of the library, whose biases and norms are random too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**((GPT2 if kind == "GPT2" else LLAMA) | changes))
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make("Llama", rope_theta=5e4, rms_norm_eps=1e-4),
    "llama-tied": lambda: make("Llama", tie_word_embeddings=True),
    "llama-biases": lambda: make("Llama", attention_bias=True, mlp_bias=True),
    "llama-wide-heads": lambda: make("Llama", head_dim=24),
    "mistral": lambda: make("Mistral", sliding_window=5),
    "mistral-odd-heads": lambda: make("Mistral", num_attention_heads=6, head_dim=8, sliding_window=None),
    "qwen2": lambda: make("Qwen2", num_key_value_heads=1),
    "qwen2-window": lambda: make("Qwen2", use_sliding_window=True, max_window_layers=0, sliding_window=5),
    "qwen3": lambda: make("Qwen3", num_key_value_heads=2, head_dim=24),
    "qwen3-window": lambda: make("Qwen3", head_dim=8, use_sliding_window=True, max_window_layers=0, sliding_window=5),
    "mixtral": lambda: make("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "qwen3-moe": lambda: make("Qwen3Moe", num_experts=12, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True),
    "gpt2": lambda: make("GPT2", layer_norm_epsilon=1e-4),
    "gpt2-untied": lambda: make("GPT2", tie_word_embeddings=False, n_inner=40),
}


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of the library, and the folder that the library saved it to."""
    model, folder = MODELS[request.param](), tmp_path_factory.mktemp("saved") / request.param
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "model"
    make("Llama").save_pretrained(folder)
    return folder


def expected(model: Any, parameter: Parameter) -> torch.Tensor:
    """What a parameter of ours is in the library's model, as a matrix (rows, width): every name written out by hand."""
    state: dict[str, torch.Tensor] = model.state_dict()
    name = parameter.name
    if model.config.model_type == "gpt2":
        hidden = model.config.n_embd
        name = name.replace("layers.", "transformer.h.")
        thirds = {"attention.query": 0, "attention.key": hidden, "attention.value": 2 * hidden}
        for part, start in thirds.items():
            if part in name:
                fused = state[name.replace(part, "attn.c_attn")]
                return fused[..., start : start + hidden].reshape(-1, hidden).T
        if name.endswith("mlp.up.weight"):
            return state[name.replace("mlp.up", "mlp.c_fc")].T
        words = {
            "embedding.tokens": "transformer.wte",
            "embedding.positions": "transformer.wpe",
            "attention_norm": "ln_1",
            "attention.output": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
            "head.norm": "transformer.ln_f",
            "head.output": "lm_head",
        }
    else:
        name = name.replace("layers.", "model.layers.")
        if parameter.expert is not None:
            at, number = f"{name.partition('.experts.')[0]}.experts", parameter.expert
            if name.endswith("down.weight"):
                return state[f"{at}.down_proj"][number].T
            return state[f"{at}.gate_up_proj"][number].chunk(2)[name.endswith("up.weight")]
        if "mlp.router" in name:
            return state[name.replace("mlp.router", "mlp.gate")]
        if name.endswith("attention.output.weight"):
            return state[name.replace("attention.output", "self_attn.o_proj")].T
        if name.endswith("mlp.down.weight"):
            return state[name.replace("mlp.down", "mlp.down_proj")].T
        words = {
            "embedding.tokens": "model.embed_tokens",
            "attention_norm": "input_layernorm",
            "attention.query_norm": "self_attn.q_norm",
            "attention.key_norm": "self_attn.k_norm",
            "attention.query": "self_attn.q_proj",
            "attention.key": "self_attn.k_proj",
            "attention.value": "self_attn.v_proj",
            "attention.output": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "mlp.gate": "mlp.gate_proj",
            "mlp.up": "mlp.up_proj",
            "mlp.down": "mlp.down_proj",
            "head.norm": "model.norm",
            "head.output": "lm_head",
        }
    for ours, theirs in words.items():
        name = name.replace(ours, theirs)
    return state[name].reshape(parameter.rows, -1)


def whole(weights: HuggingFaceWeights, parameter: Parameter) -> torch.Tensor:
    return weights.rows(parameter, 0, parameter.rows).view(parameter.rows, -1)


def all_of(weights: HuggingFaceWeights, model: Transformer) -> Iterator[tuple[Parameter, torch.Tensor]]:
    return ((parameter, whole(weights, parameter)) for parameter in model_parameters(model))


# --- Reading ---------------------------------------------------------------------------------------------------------


def test_every_parameter_is_what_the_library_has(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    shape = transformer(str(folder))
    weights = load_weights(folder, shape)
    seen = 0
    for parameter in model_parameters(shape):
        truth = expected(model, parameter)
        read = weights.rows(parameter, 0, parameter.rows)
        assert read.dtype == torch.float32 and read.shape == (parameter.size,)
        assert torch.equal(read.view(parameter.rows, -1), truth), parameter.name
        start, stop = parameter.rows // 3, parameter.rows // 3 * 2 + 1
        assert torch.equal(weights.rows(parameter, start, stop), truth[start:stop].reshape(-1)), parameter.name
        assert weights.rows(parameter, start, start).numel() == 0
        seen += parameter.size
    assert seen == model.num_parameters()


def test_a_plain_transformer_of_these_weights_computes_what_the_library_does(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    shape = transformer(str(folder))
    weights = {
        parameter.name: (read if parameter.width else read[:, 0]).double()
        for parameter, read in all_of(load_weights(folder, shape), shape)
    }
    ids_BS = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = model(ids_BS).logits
    torch.testing.assert_close(reference_logits(shape, weights, ids_BS).float(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_shards_are_read_as_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make("Llama").to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    shape = transformer(str(tmp_path))
    for parameter, read in all_of(load_weights(tmp_path, shape), shape):
        assert read.dtype == torch.float32
        assert torch.equal(read, expected(model, parameter).float())


def test_gpt2_without_its_head_and_prefix_is_read_alike(tmp_path: Path) -> None:
    model = make("GPT2")
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in safetensors_torch.load_file(tmp_path / "model.safetensors")
    shape = transformer(str(tmp_path))
    for parameter, read in all_of(load_weights(tmp_path, shape), shape):
        assert torch.equal(read, expected(model, parameter))


def test_rows_that_pad_the_vocabulary_are_zeros(llama: Path) -> None:
    shape = transformer(str(llama))
    padded = replace(shape, padded_vocab=128, name="of another name")
    weights = load_weights(llama, padded)
    for name in ("embedding.tokens.weight", "head.output.weight"):
        parameter = next(p for p in model_parameters(padded) if p.name == name)
        read = whole(weights, parameter)
        assert torch.equal(read[:96], whole(weights, replace(parameter, rows=96)))
        assert not read[96:].any() and bool(read[:96].any(dim=1).all())
        assert torch.equal(weights.rows(parameter, 90, 100), read[90:100].reshape(-1))
        assert torch.equal(weights.rows(parameter, 100, 110), torch.zeros(320))


NOTHING: Mapping[str, Any] = {}


# --- What is not read ------------------------------------------------------------------------------------------------


def copy(
    folder: Path, to: Path, config: Mapping[str, Any] = NOTHING, tensors: Mapping[str, torch.Tensor | None] = NOTHING
) -> Path:
    """A copy of a saved model with other keys in its configuration (None leaves one out) and other tensors."""
    to.mkdir()
    values = json.loads((folder / "config.json").read_text()) | dict(config)
    (to / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    held = safetensors_torch.load_file(folder / "model.safetensors") | dict(tensors)
    safetensors_torch.save_file({k: v.contiguous() for k, v in held.items() if v is not None}, to / "model.safetensors")
    return to


def refusal(folder: Path, model: Transformer) -> str:
    with pytest.raises(InputError) as caught:
        load_weights(folder, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, "its layers is 2, but the model of the plan has 3"),
        ({"kv_heads": 4}, "its kv_heads is 2, but the model of the plan has 4"),
        ({"vocab": 97, "padded_vocab": 128}, "its vocab is 96, but the model of the plan has 97"),
        ({"attention_bias": "qkv"}, "its attention_bias is none, but the model of the plan has qkv"),
        ({"tied_embeddings": True}, "its tied_embeddings is False, but the model of the plan has True"),
        ({"sliding_window": 8}, "its sliding_window is None, but the model of the plan has 8"),
        ({"rope_theta": 5e5}, "its rope_theta is 10000.0, but the model of the plan has 500000.0"),
        ({"norm_epsilon": 1e-5}, "its norm_epsilon is 1e-06, but the model of the plan has 1e-05"),
    ],
)
def test_a_model_of_another_shape_is_refused(llama: Path, change: dict[str, Any], message: str) -> None:
    shape = transformer(str(llama))
    assert refusal(llama, replace(shape, **change)) == f"{llama}/config.json: {message.replace('the model', 'the model model')}"
    load_weights(llama, replace(shape, max_positions=17))  # of which rotary positions need no table


def test_learned_positions_must_be_as_many(tmp_path: Path) -> None:
    make("GPT2").save_pretrained(tmp_path)
    message = refusal(tmp_path, replace(transformer(str(tmp_path)), max_positions=32))
    assert message.startswith(f"{tmp_path}/config.json: its max_positions is 16, but the model")
    load_weights(tmp_path, replace(transformer(str(tmp_path)), rope_theta=5.0))  # which it has no use for


LLAMA_3_SCALING = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": LLAMA_3_SCALING}, "rope_parameters.rope_type: expected default, since rotary positions"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type: expected default, since rotary positions"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention: expected the same rotary positions in all layers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, since all of a head is rotated here"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor: expected 1",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: expected one of silu, swish, but got 'gelu'"),
        ({"model_type": "opt"}, f"model_type: expected one of {TYPES}, but got 'opt'"),
        (
            {"model_type": "lama"},
            f"model_type: expected one of {TYPES}, but got 'lama'; did you mean llama?",
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers: is missing"),
    ],
)
def test_a_llama_that_computes_otherwise_is_refused(llama: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = copy(llama, tmp_path / "copy", change)
    assert refusal(folder, transformer(str(llama))).startswith(f"{folder}/config.json: {message}")


def test_default_rotary_positions_are_read_in_every_spelling(llama: Path, tmp_path: Path) -> None:
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": None, "rope_theta": 10000},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ]
    for i, spelling in enumerate(spellings):
        load_weights(copy(llama, tmp_path / str(i), spelling), transformer(str(llama)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "gelu"}, "activation_function: expected one of gelu_new, gelu_pytorch_tanh, gelu_fast"),
        ({"activation_function": "relu"}, "its activation is relu, but the model model of the plan has gelu"),
        ({"scale_attn_weights": False}, "scale_attn_weights: expected true, as in GPT-2, but got false"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: expected false, as in GPT-2"),
        ({"add_cross_attention": True}, "add_cross_attention: expected false, as in GPT-2, but got true"),
    ],
)
def test_a_gpt2_that_computes_otherwise_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    make("GPT2").save_pretrained(tmp_path / "model")
    folder = copy(tmp_path / "model", tmp_path / "copy", change)
    assert refusal(folder, transformer(str(tmp_path / "model"))).startswith(f"{folder}/config.json: {message}")
    if "activation_function" in change:  # and the GELU by tanh has other names
        load_weights(
            copy(tmp_path / "model", tmp_path / "tanh", {"activation_function": "gelu_pytorch_tanh"}),
            transformer(str(tmp_path / "model")),
        )


def test_a_tensor_that_is_missing_or_of_another_shape_or_type_is_refused(llama: Path, tmp_path: Path) -> None:
    shape = transformer(str(llama))
    name = "model.layers.1.self_attn.k_proj.weight"
    folder = copy(llama, tmp_path / "missing", tensors={name: None})
    assert refusal(folder, shape) == f"{folder}: the tensor {name} is missing"
    folder = copy(llama, tmp_path / "shape", tensors={name: torch.zeros(32, 32)})
    assert refusal(folder, shape) == (
        f"{folder}/model.safetensors: the tensor {name} must have the shape (16, 32), but it has (32, 32)"
    )
    folder = copy(llama, tmp_path / "type", tensors={name: torch.zeros(16, 32, dtype=torch.int8)})
    assert refusal(folder, shape) == (
        f"{folder}/model.safetensors: the tensor {name} must be one of F64, F32, F16, BF16, but it is I8"
    )


def test_files_that_are_missing_or_broken_are_refused(llama: Path, tmp_path: Path) -> None:
    shape = transformer(str(llama))
    assert refusal(tmp_path, shape) == f"{tmp_path}/config.json: cannot be read (no such file or directory)"
    folder = copy(llama, tmp_path / "copy")
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    weights.write_bytes(b"not tensors")
    assert refusal(folder, shape).startswith(f"{weights}: is not a file of safetensors (")
    weights.unlink()
    assert refusal(folder, shape) == (
        f"{folder}: holds neither model.safetensors nor model.safetensors.index.json, which weights are read from"
    )
    index.write_text('{"weight_map": {"model.norm.weight": 3}}')
    assert refusal(folder, shape).startswith(f"{index}: weight_map.model.norm.weight: expected a text")
    held = safetensors_torch.load_file(llama / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(held, "shard.safetensors")}))
    assert refusal(folder, shape) == f"{folder}/shard.safetensors: there is no such file"
    del held["lm_head.weight"]
    safetensors_torch.save_file(held, folder / "shard.safetensors")
    assert refusal(folder, shape) == (
        f"{folder}/shard.safetensors: the tensor lm_head.weight is missing, which model.safetensors.index.json says is there"
    )


def test_without_the_package_the_way_to_it_is_told(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert refusal(llama, transformer(str(llama))).endswith("pip install safetensors")


# --- Writing ---------------------------------------------------------------------------------------------------------


def test_what_is_written_is_the_same_model_to_the_library(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    shape = replace(transformer(str(folder)), padded_vocab=128)
    to = tmp_path / "new" / "written"
    save_weights(to, shape, all_of(load_weights(folder, shape), shape), torch.float32)
    assert sorted(path.name for path in to.iterdir()) == ["config.json", "model.safetensors"]
    assert replace(transformer(str(to)), name=shape.name, padded_vocab=128) == shape
    theirs = transformers.AutoConfig.from_pretrained(to)
    assert (theirs.vocab_size, theirs.num_hidden_layers, theirs.tie_word_embeddings) == (96, 2, shape.tied_embeddings)
    again, told = transformers.AutoModelForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not any(told.values()), told
    assert again.dtype == torch.float32
    ids_BS = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(again.eval()(ids_BS).logits, model(ids_BS).logits)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_weights_are_written_in_shards_and_in_half_precision(tmp_path: Path, kind: str) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path / "model")
    shape = transformer(str(tmp_path / "model"))
    to = tmp_path / "written"
    save_weights(to, shape, all_of(load_weights(tmp_path / "model", shape), shape), torch.bfloat16, max_shard_bytes=9000)
    index = json.loads((to / "model.safetensors.index.json").read_text())
    shards = sorted(to.glob("*.safetensors"))
    assert len(shards) > 3 and {path.name for path in shards} == set(index["weight_map"].values())
    held = {path.name: safetensors_torch.load_file(path) for path in shards}
    assert {name: file for file, tensors in held.items() for name in tensors} == index["weight_map"]
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in held.values()]
    assert sum(sizes) == index["metadata"]["total_size"] == 2 * model.num_parameters()
    assert all(size <= 9000 or len(tensors) == 1 for size, tensors in zip(sizes, held.values(), strict=True))
    again = transformers.AutoModelForCausalLM.from_pretrained(to)
    assert again.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(torch.bfloat16)), name
    assert {path.stat().st_mode for path in shards} == {(to / "config.json").stat().st_mode}


def test_a_folder_that_holds_anything_is_left_as_it_is(llama: Path, tmp_path: Path) -> None:
    shape = transformer(str(llama))
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    for refused in (prepare_save, partial(save_weights, tensors=iter(()), dtype=torch.float32)):
        with pytest.raises(InputError) as caught:
            refused(llama, shape)
        assert str(caught.value) == (
            f"{llama}: is not empty, but weights are written to a new or an empty folder, so that none are lost"
        )
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=f"{place}: cannot be written"):
            prepare_save(place, shape)
    prepare_save(tmp_path / "a" / "new", shape)
    prepare_save(tmp_path / "a" / "new", shape)
    assert os.listdir(tmp_path / "a" / "new") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": "output"}, "llama, has attention_bias none, but the model has output"),
        ({"attention_bias": "qkv", "mlp_bias": True}, "qwen2, has mlp_bias False, but the model has True"),
        ({"norm": "layernorm"}, "llama, has norm rmsnorm, but the model has layernorm"),
        ({"position": "alibi"}, "llama, has position rotary, but the model has alibi"),
        ({"final_norm": False}, "llama, has final_norm True, but the model has False"),
        ({"experts": Moe(4, 2, 48, 1, 16)}, "mixtral, has experts.shared_experts 0, but the model has 1"),
        ({"position": "learned", "max_positions": 16}, "gpt2, has kv_heads 4, but the model has 2"),
    ],
)
def test_a_model_that_no_type_describes_is_refused_before_anything_is_written(
    llama: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = replace(transformer(str(llama)), **change)
    with pytest.raises(InputError) as caught:
        prepare_save(tmp_path / "new", model)
    start = "model model cannot be written as a Hugging Face model: the nearest type, "
    assert str(caught.value).startswith(start + message)
    assert not (tmp_path / "new").exists()


def test_parameters_out_of_order_or_missing_are_an_error_and_leave_no_configuration(llama: Path, tmp_path: Path) -> None:
    shape = transformer(str(llama))
    tensors = list(all_of(load_weights(llama, shape), shape))
    with pytest.raises(ValueError, match=r"expected the parameter embedding\.tokens\.weight, but got head\.output\.weight"):
        save_weights(tmp_path / "a", shape, iter(tensors[::-1]), torch.float32)
    with pytest.raises(ValueError, match="zip"):
        save_weights(tmp_path / "b", shape, iter(tensors[:-1]), torch.float32)
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []


def test_a_disk_that_is_full_is_no_mistake_of_the_user(llama: Path, tmp_path: Path) -> None:
    shape = transformer(str(llama))
    tensors = list(all_of(load_weights(llama, shape), shape))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a file that grows beyond it fails as a full disk does
    try:
        with pytest.raises(OSError) as caught:
            save_weights(tmp_path / "new", shape, iter(tensors), torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not isinstance(caught.value, InputError)
    assert caught.value.filename == str(tmp_path / "new" / "model.safetensors")
    assert not (tmp_path / "new" / "config.json").exists()
