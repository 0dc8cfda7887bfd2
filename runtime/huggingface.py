"""The weights of Hugging Face models in safetensors, read row by row and written whole: Llama, Mistral, Mixtral, Qwen2, Qwen3
(with experts, too) and GPT-2.

Their matrices are stored (out, in), those of GPT-2's layers (in, out); ours so that tensor parallelism divides the rows (see
`runtime.parameters`). Each parameter of ours is a stretch along one axis of one of their tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from runtime.parameters import Parameter, model_parameters
from sim.spec.reading import DISK_FAILURES, InputError, Table, read_json, write_file
from sim.spec.transformer import Moe, Transformer, from_hugging_face

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2")

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_SHARD_BYTES = 5 * 10**9
"""Of one file of weights that is written, unless one tensor alone has more."""

FLOATING_TYPES = ("F64", "F32", "F16", "BF16")
"""Of tensors that can be read, in the words of safetensors."""

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the GELU by tanh, which is GPT-2's and the runtime's."""

STORED_BY_INPUT = ("attention.output.weight", ".down.weight")
"""Matrices of a layer that we have as (in, out)."""

LLAMA_NAMES: Mapping[str, str] = {
    "embedding.tokens": "embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "head.norm": "norm",
}
"""Of modules: ours, within a layer or outside the layers, and Llama's."""

MIXTURE_NAMES: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.N.gate": "block_sparse_moe.experts.N.w1",
        "mlp.experts.N.up": "block_sparse_moe.experts.N.w3",
        "mlp.experts.N.down": "block_sparse_moe.experts.N.w2",
    },
    "qwen3_moe": {
        "mlp.router": "mlp.gate",
        "mlp.experts.N.gate": "mlp.experts.N.gate_proj",
        "mlp.experts.N.up": "mlp.experts.N.up_proj",
        "mlp.experts.N.down": "mlp.experts.N.down_proj",
    },
}
"""Of the modules of a mixture, besides Llama's, by the type of the model: ours and theirs, those of expert N."""

GPT2_NAMES: Mapping[str, str] = {
    "embedding.tokens": "wte",
    "embedding.positions": "wpe",
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "head.norm": "ln_f",
}
"""Of modules: ours and GPT-2's, which has query, key and value in one."""


@dataclass(frozen=True)
class _Place:
    """Where one parameter lies: `rows` indices from `start` on along `axis` of the tensor `name`, which has this `shape`.

    The parameter may have more rows, which pad the vocabulary.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    start: int
    rows: int


def _module(module: str, model_type: str) -> str:
    """Their name of one of our modules."""
    names = GPT2_NAMES if model_type == "gpt2" else {**LLAMA_NAMES, **MIXTURE_NAMES.get(model_type, {})}
    number = re.search(r"(?<=experts\.)\d+", module)
    return names[module] if number is None else names[module.replace(number[0], "N", 1)].replace("N", number[0])


def _place(transformer: Transformer, parameter: Parameter, model_type: str, prefix: str) -> _Place:
    """Where a parameter lies. `prefix` stands before all names but that of the output matrix."""
    t, is_gpt2 = transformer, model_type == "gpt2"
    rows = t.vocab if parameter.divided == "vocabulary" else parameter.rows
    if parameter.name == "head.output.weight":
        return _Place("lm_head.weight", (rows, t.hidden), 0, 0, rows)
    layer = re.fullmatch(r"layers\.(\d+)\.(.*)", parameter.name)
    module, _, kind = (layer[2] if layer else parameter.name).rpartition(".")
    inside = f"{'h' if is_gpt2 else 'layers'}.{layer[1]}." if layer else ""
    name = f"{prefix}{inside}{_module(module, model_type)}.{kind}"
    transposed = parameter.name.endswith(STORED_BY_INPUT) != (is_gpt2 and layer is not None)
    axis = int(parameter.width is not None and transposed)
    start, length = 0, rows
    if is_gpt2 and module in ("attention.query", "attention.key", "attention.value"):
        start, length = ("query", "key", "value").index(module.removeprefix("attention.")) * rows, 3 * rows
    shape = (length,) if parameter.width is None else (length, parameter.width)
    return _Place(name, shape[::-1] if axis else shape, axis, start, rows)


def _safetensors() -> ModuleType:
    """The module safetensors, with its submodule torch. Raises InputError where it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise InputError("Hugging Face weights need the package safetensors: pip install safetensors") from None
    return safetensors


# --- Reading ---------------------------------------------------------------------------------------------------------


class HuggingFaceWeights:
    """The weights of a folder, of which each rank reads the rows it holds. Made by `load_weights`."""

    def __init__(self, folder: Path, transformer: Transformer, model_type: str) -> None:
        """Looks at the names, shapes and types of all tensors; reads no numbers."""
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._names: dict[Path, set[str]] = {}
        self._file_of = self._tensors()
        prefix = "model."
        if model_type == "gpt2":  # whose published weights are those of the model without its head, and have no prefix
            prefix = "" if "wte.weight" in self._file_of else "transformer."
        self._places = {p.name: _place(transformer, p, model_type, prefix) for p in model_parameters(transformer)}
        for place in self._places.values():
            self._check(place)

    def rows(self, parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        """Some rows of a parameter, flat, in fp32. Rows that only pad the vocabulary are zeros."""
        place = self._places[parameter.name]
        read = torch.zeros(stop - start, parameter.row_size)
        first, end = place.start + start, place.start + min(stop, place.rows)
        if first < end:
            tensor = self._open(self._file_of[place.name]).get_slice(place.name)
            if parameter.width is None:
                found = tensor[first:end][:, None]
            else:
                found = tensor[:, first:end].T if place.axis else tensor[first:end]
            read[: end - first].copy_(found)
        return read.view(-1)

    def _tensors(self) -> dict[str, Path]:
        """The file of each tensor, by its name."""
        whole, index = self._folder / WEIGHTS_FILE, self._folder / INDEX_FILE
        if whole.exists():
            self._open(whole)
            return dict.fromkeys(self._names[whole], whole)
        if not index.exists():
            raise InputError(f"{self._folder}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}, which weights are read from")
        names = Table(read_json(index), str(index)).table("weight_map")
        return {name: self._folder / names.text(name) for name in names.keys()}  # noqa: SIM118  (a Table is not a mapping)

    def _open(self, path: Path) -> Any:
        """One file of tensors, memory-mapped; it stays open."""
        if path not in self._files:
            safetensors = _safetensors()
            if not path.is_file():
                raise InputError(f"{path}: there is no such file")
            try:
                self._files[path] = safetensors.safe_open(path, framework="pt")
                self._names[path] = set(self._files[path].keys())
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error})") from None
            except safetensors.SafetensorError as error:
                raise InputError(f"{path}: is not a file of safetensors ({error})") from None
        return self._files[path]

    def _check(self, place: _Place) -> None:
        """Nothing; raises InputError where a tensor is missing, or of another shape or type."""
        if place.name not in self._file_of:
            raise InputError(f"{self._folder}: the tensor {place.name} is missing")
        path = self._file_of[place.name]
        file = self._open(path)
        if place.name not in self._names[path]:
            raise InputError(f"{path}: the tensor {place.name} is missing, which {INDEX_FILE} says is there")
        tensor = file.get_slice(place.name)
        shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
        if shape != place.shape:
            raise InputError(f"{path}: the tensor {place.name} must have the shape {place.shape}, but it has {shape}")
        if kind not in FLOATING_TYPES:
            raise InputError(f"{path}: the tensor {place.name} must be one of {', '.join(FLOATING_TYPES)}, but it is {kind}")


def load_weights(folder: Path, transformer: Transformer) -> HuggingFaceWeights:
    """The weights of a Hugging Face folder for this transformer, from model.safetensors or from shards with their index.

    Raises InputError where the folder's config.json describes another model, or one that the runtime computes otherwise.
    """
    path = folder / "config.json"
    config = Table(read_json(path), str(path))
    model_type = config.choice("model_type", MODEL_TYPES)
    difference = _difference(from_hugging_face(config, transformer.name), transformer)
    if difference is not None:
        field, there, here = difference
        raise InputError(f"{path}: its {field} is {there}, but the model {transformer.name} of the plan has {here}")
    if model_type == "gpt2":
        _check_gpt2(config)
    else:
        _check_rotary(config)
    if model_type == "qwen3_moe" and not config.flag("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "expected true, since the weights of the experts of a token add up to 1 here")
    return HuggingFaceWeights(folder, transformer, model_type)


def _difference(one: Transformer, other: Transformer) -> tuple[str, object, object] | None:
    """The first field that two transformers differ in so that weights of the one do not fit the other, with both values.

    Where both have experts, the field of these.
    """
    passed_over = {"name", "padded_vocab", "rope_theta" if other.position == "learned" else "max_positions"}
    if other.experts is not None:
        passed_over.add("ffn")
    pairs = [(field.name, getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(Transformer)]
    if one.experts is not None and other.experts is not None:
        passed_over.add("experts")
        fields = [field.name for field in dataclasses.fields(Moe)]
        pairs += [(f"experts.{name}", getattr(one.experts, name), getattr(other.experts, name)) for name in fields]
    return next((pair for pair in pairs if pair[0] not in passed_over and pair[1] != pair[2]), None)


def _check_rotary(config: Table) -> None:
    """Nothing; raises InputError unless all of a head is rotated, in every layer alike, without scaling."""
    tables = [config]
    for key in ("rope_scaling", "rope_parameters"):
        if not config.get(key, lambda value: value, "a mapping", None):
            continue
        rotary = config.table(key)
        kind = next((name for name in ("rope_type", "type") if name in rotary), None)
        if kind is not None and (value := rotary.text(kind)) != "default":
            raise rotary.error(kind, f"expected default, since rotary positions are not scaled here, but got {value!r}")
        for name in rotary.keys():  # noqa: SIM118
            if rotary.get(name, lambda value: isinstance(value, dict), "a value"):
                raise rotary.error(name, "expected the same rotary positions in all layers, but got some for one kind of layer")
        tables.append(rotary)
    for table in tables:
        if table.get("partial_rotary_factor", lambda value: value not in (None, 1), "a number", False):
            raise table.error("partial_rotary_factor", "expected 1, since all of a head is rotated here")


def _check_gpt2(config: Table) -> None:
    """Nothing; raises InputError for the variants of GPT-2 that compute something else from the same weights."""
    config.choice("activation_function", TANH_GELU, "gelu_new")
    for key, usual in {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }.items():
        if config.flag(key, usual) != usual:
            raise config.error(key, f"expected {str(usual).lower()}, as in GPT-2, but got {str(not usual).lower()}")


# --- Writing ---------------------------------------------------------------------------------------------------------


def prepare_save(folder: Path, transformer: Transformer) -> None:
    """Nothing; makes the folder for `save_weights`, and finds out before a run begins what would stop that at its end.

    Raises InputError for a folder that is not empty or cannot be written, and for a model that no type describes.
    """
    _safetensors()
    _config(transformer, torch.float32)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(
                f"{folder}: is not empty, but weights are written to a new or an empty folder, so that none are lost"
            )
        (folder / ".part").touch()
        (folder / ".part").unlink()
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({(error.strerror or str(error)).lower()})") from None


def save_weights(
    folder: Path,
    transformer: Transformer,
    tensors: Iterator[tuple[Parameter, torch.Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Nothing; writes a folder that Hugging Face's transformers and `load_weights` read: config.json and the weights.

    `tensors` are all parameters of the model, in the order of `model_parameters`, each whole, of any shape and type. One file
    of weights at a time is held in memory. The vocabulary's padding is left out. config.json is written last, so that a
    folder without it is not complete. Raises InputError as `prepare_save` does; OSError where the disk is full.
    """
    prepare_save(folder, transformer)
    config = _config(transformer, dtype)
    model_type = config["model_type"]
    parameters = model_parameters(transformer)
    prefix = "transformer." if model_type == "gpt2" else "model."
    places = [_place(transformer, p, model_type, prefix) for p in parameters]
    sizes = {place.name: math.prod(place.shape) * dtype.itemsize for place in places}
    shard_of = _shards(sizes, max_shard_bytes)
    count = max(shard_of.values()) + 1
    names = [WEIGHTS_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    held: dict[str, torch.Tensor] = {}
    current = 0
    for parameter, place, (given, values) in zip(parameters, places, tensors, strict=True):
        if given != parameter:
            raise ValueError(f"expected the parameter {parameter.name}, but got {given.name}")
        if shard_of[place.name] != current:
            _write_shard(folder / names[current], held)
            held, current = {}, shard_of[place.name]
        if place.name not in held:
            held[place.name] = torch.empty(place.shape, dtype=dtype)
        rows = values.detach().reshape(parameter.rows, -1)[: place.rows]
        part = held[place.name].narrow(place.axis, place.start, place.rows)
        part.copy_(rows.T if place.axis else rows.reshape(part.shape))
    _write_shard(folder / names[current], held)
    if count > 1:
        weight_map = {name: names[shard] for name, shard in shard_of.items()}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_file(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    write_file(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _shards(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """The number of the file that each tensor goes to, in order: a file has at most `most` bytes, or one tensor alone."""
    shard_of: dict[str, int] = {}
    shard, filled = 0, 0
    for name, size in sizes.items():
        if filled and filled + size > most:
            shard, filled = shard + 1, 0
        shard_of[name] = shard
        filled += size
    return shard_of


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Nothing; writes one file of tensors, under another name until it is whole."""
    safetensors = _safetensors()
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(mode)  # for newer versions make a file that only its owner may read
        os.replace(temporary, path)
    except (OSError, safetensors.SafetensorError) as error:
        told = re.search(r"os error (\d+)", str(error))  # safetensors has the system's error in its text alone
        number = int(told[1]) if told else getattr(error, "errno", None)
        if number is None:
            raise
        if number in DISK_FAILURES:
            raise OSError(number, os.strerror(number), str(path)) from None
        raise InputError(f"{path}: cannot be written ({os.strerror(number).lower()})") from None
    finally:
        temporary.unlink(missing_ok=True)


def _config(transformer: Transformer, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a transformer, of the model type that is like it. Raises InputError where none is.

    `rope_theta` stands outside `rope_parameters`, where all versions of transformers look for it.
    """
    t = transformer
    config: dict[str, Any] = {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": t.vocab,
        "tie_word_embeddings": t.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if t.position == "learned":
        config |= {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": t.layers,
            "n_embd": t.hidden,
            "n_inner": t.ffn,
            "n_head": t.heads,
            "n_positions": t.max_positions,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": t.norm_epsilon,
        }
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        config |= {
            "num_hidden_layers": t.layers,
            "hidden_size": t.hidden,
            "intermediate_size": t.ffn,
            "num_attention_heads": t.heads,
            "num_key_value_heads": t.kv_heads,
            "hidden_act": "silu",
            "rms_norm_eps": t.norm_epsilon,
            "rope_theta": t.rope_theta,
        }
        if t.max_positions:
            config["max_position_embeddings"] = t.max_positions
        if t.head_dim * t.heads != t.hidden:
            config["head_dim"] = t.head_dim
        moe = t.experts
        if moe is not None and not t.qk_norm:
            config |= {"model_type": "mixtral", "num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k}
            config |= {"sliding_window": t.sliding_window, "intermediate_size": moe.ffn}
        elif t.qk_norm:
            window = {"sliding_window": t.sliding_window, "max_window_layers": 0, "head_dim": t.head_dim}
            config |= {"model_type": "qwen3", "use_sliding_window": t.sliding_window is not None} | window
            config["attention_bias"] = t.attention_bias == "all"
            if moe is not None:
                config |= {"model_type": "qwen3_moe", "num_experts": moe.experts, "num_experts_per_tok": moe.top_k}
                config |= {"moe_intermediate_size": moe.ffn, "norm_topk_prob": True}
        elif t.attention_bias == "qkv":
            window = {"sliding_window": t.sliding_window, "max_window_layers": 0}
            config |= {"model_type": "qwen2", "use_sliding_window": t.sliding_window is not None} | window
        elif t.sliding_window is not None or t.hidden % t.heads:  # which Llama has not
            config |= {"model_type": "mistral", "sliding_window": t.sliding_window}
        else:
            config |= {"model_type": "llama", "attention_bias": t.attention_bias == "all", "mlp_bias": t.mlp_bias}
        words = config["model_type"].split("_")  # as in Qwen3MoeForCausalLM
        config["architectures"] = [f"{''.join(word.capitalize() for word in words)}ForCausalLM"]
    difference = _difference(from_hugging_face(Table(config, "config.json"), t.name), t)
    if difference is not None:
        field, there, here = difference
        raise InputError(
            f"model {t.name} cannot be written as a Hugging Face model: the nearest type, {config['model_type']}, has "
            f"{field} {there}, but the model has {here}"
        )
    return config
