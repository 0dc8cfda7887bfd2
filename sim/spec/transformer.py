"""The transformer as a noun, and reading it: from a preset, a plan, or a Hugging Face configuration on disk.

What follows from its shape (parameters, FLOP, bytes) is in `sim.spec.counts`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sim.spec.reading import InputError, Table, nearest, read_json, read_own_yaml

Made = TypeVar("Made", "Transformer", "Moe")

ACTIVATIONS = ("gelu", "relu", "swiglu")
NORMS = ("layernorm", "rmsnorm")
ATTENTION_BIASES = ("none", "qkv", "output", "all")
POSITIONS = ("rotary", "learned", "alibi")


MOST: Mapping[str, int] = {
    "layers": 10_000,
    "hidden": 2**20,
    "ffn": 2**24,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_dim": 2**20,
    "vocab": 2**26,
    "padded_vocab": 2**26,
    "max_positions": 2**32,
    "embedding_width": 2**20,
    "sliding_window": 2**32,
    "experts": 2**16,
    "top_k": 2**16,
    "shared_experts": 2**16,
    "shared_ffn": 2**24,
}
"""The largest number that is accepted for each field: far beyond any model, and small enough to work with."""


@dataclass(frozen=True)
class Moe:
    """The mixture of experts that stands in each layer in the place of the MLP.

    A router sends each token to `top_k` of `experts` MLPs of width `ffn`; `shared_experts` more, of width `shared_ffn` each,
    see every token. Raises InputError where the numbers cannot be.
    """

    experts: int
    top_k: int
    ffn: int
    shared_experts: int = 0
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for field in ("experts", "top_k", "ffn"):
            if getattr(self, field) < 1:
                raise InputError(f"`{field}` of the experts must be at least 1, but got {getattr(self, field)}")
        for field in ("experts", "top_k", "ffn", "shared_experts", "shared_ffn"):
            if getattr(self, field) > MOST[field]:
                raise InputError(f"`{field}` of the experts must be at most {MOST[field]:,}, but got {getattr(self, field)}")
        if self.top_k > self.experts:
            raise InputError(f"`top_k` must be at most the number of experts, but got top_k={self.top_k}, experts={self.experts}")
        if self.shared_experts < 0 or self.shared_ffn < 0 or (self.shared_experts > 0) != (self.shared_ffn > 0):
            raise InputError(
                "`shared_experts` and `shared_ffn` must both be at least 1, or both be left out, "
                f"but got shared_experts={self.shared_experts}, shared_ffn={self.shared_ffn}"
            )


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer by its shape; all layers are alike. The defaults are those of the Llama family.

    A field whose default is 0 takes what is written beside it, at construction: none of them is 0 afterwards, except
    `max_positions` where the position is not learned. So `dataclasses.replace` with another `hidden` or `heads` keeps the
    earlier `head_dim`, `kv_heads` and `embedding_width`; give 0 for those that shall follow.
    Raises InputError where the numbers do not fit one another.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    """Width of the MLP between its matrices; not used where there are `experts`."""
    heads: int
    vocab: int
    kv_heads: int = 0
    """Key and value heads; as many as `heads` by default."""
    head_dim: int = 0
    """Width of a head; hidden / heads by default."""
    padded_vocab: int = 0
    """Rows that the embedding and the output matrix really have; `vocab` by default."""
    activation: str = "swiglu"
    norm: str = "rmsnorm"
    attention_bias: str = "none"
    """Which of the attention's matrices have a bias: none, qkv (query, key, value), output, or all."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's query and key are normalised, by one RMS norm for all queries and one for all keys, as in Qwen3."""
    position: str = "rotary"
    max_positions: int = 0
    """Rows of a learned position table (with its offset: 2050 for OPT); else the published context length, 0 if unknown."""
    embedding_width: int = 0
    """Width of a token's embedding, projected to `hidden` and back where it differs; `hidden` by default."""
    sliding_window: int | None = None
    """Keys that a query sees at most, in every layer; None for all."""
    tied_embeddings: bool = False
    """Whether the output matrix is the token embedding."""
    final_norm: bool = True
    rope_theta: float = 10_000.0
    """Base of the rotary positions' wavelengths."""
    norm_epsilon: float = 1e-5
    """What norms add to the variance before they divide by its root."""
    experts: Moe | None = None

    def __post_init__(self) -> None:
        """Fills in what follows from other fields, then checks that all fit."""
        for field in ("layers", "hidden", "ffn", "heads", "vocab"):
            if getattr(self, field) < 1:
                raise self._wrong(f"`{field}` must be at least 1, but got {getattr(self, field)}")
        for field, most in MOST.items():
            value = getattr(self, field, None)
            if isinstance(value, int) and value > most:
                raise self._wrong(f"`{field}` must be at most {most:,}, but got {value}")
        if self.head_dim == 0 and self.hidden % self.heads:
            raise self._wrong(
                "`hidden` must be a multiple of `heads` where `head_dim` is not given, "
                f"but got hidden={self.hidden}, heads={self.heads}"
            )
        derived = {
            "kv_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "padded_vocab": self.vocab,
            "embedding_width": self.hidden,
        }
        for field, value in derived.items():
            if getattr(self, field) == 0:
                object.__setattr__(self, field, value)
            elif getattr(self, field) < 0:
                raise self._wrong(f"`{field}` must be at least 1, but got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise self._wrong(f"`heads` must be a multiple of `kv_heads`, but got heads={self.heads}, kv_heads={self.kv_heads}")
        if self.padded_vocab < self.vocab:
            raise self._wrong(
                f"`padded_vocab` must be at least `vocab`, but got padded_vocab={self.padded_vocab}, vocab={self.vocab}"
            )
        if self.max_positions < 0 or (self.position == "learned" and self.max_positions == 0):
            raise self._wrong(
                f"`max_positions` must be at least 1 where positions are learned, and never below 0, but got {self.max_positions}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise self._wrong(f"`sliding_window` must be at least 1, or none, but got {self.sliding_window}")
        for field in ("rope_theta", "norm_epsilon"):
            if not 0 < getattr(self, field) < math.inf:
                raise self._wrong(f"`{field}` must be above 0 and finite, but got {getattr(self, field)}")
        choices = {
            "activation": ACTIVATIONS,
            "norm": NORMS,
            "attention_bias": ATTENTION_BIASES,
            "position": POSITIONS,
        }
        for field, accepted in choices.items():
            if getattr(self, field) not in accepted:
                raise self._wrong(f"`{field}` must be one of {', '.join(accepted)}, but got {getattr(self, field)!r}")

    def _wrong(self, problem: str) -> InputError:
        return InputError(f"model {self.name}: {problem}")

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate matrix beside the one up and the one down."""
        return self.activation == "swiglu"

    @property
    def projected_embeddings(self) -> bool:
        """Whether a matrix stands between the embedding and the first layer, and one between the last layer and the head."""
        return self.embedding_width != self.hidden


# --- By name or path -------------------------------------------------------------------------------------------------


def transformer(name_or_path: str) -> Transformer:
    """The transformer of a preset (in any case), or of a Hugging Face `config.json` or a folder that holds one.

    A preset's name is looked up first; nothing is ever downloaded. Raises InputError where neither is there.
    """
    preset = presets().get(name_or_path.casefold())
    if preset is not None:
        return preset
    path, file = Path(name_or_path), model_file(name_or_path)
    if file is not None:
        if file.name == "config.json" and not file.is_file():
            raise InputError(f"{name_or_path}: this folder holds no config.json, which a Hugging Face model has")
        name = file.resolve().parent.name if file.name == "config.json" else file.stem
        return from_hugging_face(Table(read_json(file), str(file)), name or file.stem)
    known = presets()
    hint = nearest(path.name, known)
    if "/" in name_or_path or "\\" in name_or_path or name_or_path.startswith("~") or path.suffix == ".json":
        raise InputError(
            f"{name_or_path}: there is no such file or folder, and models are never downloaded{hint}; expected a Hugging "
            f"Face config.json, a folder that holds one, or a preset ({', '.join(known)})"
        )
    raise InputError(
        f"unknown model {name_or_path!r}{hint}; expected a preset ({', '.join(known)}), "
        "a Hugging Face config.json, or a folder that holds one"
    )


def model_file(name_or_path: str) -> Path | None:
    """The configuration file that `transformer` reads for a name or path; None for a preset, and where nothing is there."""
    if name_or_path.casefold() in presets():
        return None
    try:
        path = Path(name_or_path).expanduser()
        if not name_or_path or not path.exists():
            return None
        return path / "config.json" if path.is_dir() else path
    except (OSError, RuntimeError, ValueError):  # a name too long for a file, a user who is not there, a zero character
        return None


@cache
def presets() -> Mapping[str, Transformer]:
    """The published transformers by name, in the order of `presets.yaml`."""
    path = Path(__file__).with_name("presets.yaml")
    found: dict[str, Transformer] = {}
    for family in Table({"families": read_own_yaml(path)}, path.name).tables("families"):
        family.text("source")
        shared, models = family.table("shared"), family.table("models")
        for name in models.keys():  # noqa: SIM118  (a Table is not a mapping)
            fields = {"name": name} | _plain(shared) | _plain(models.table(name))
            found[name] = read_transformer(Table(fields, path.name, name))
        family.close()
    return found


def _plain(table: Table) -> dict[str, Any]:
    return {key: table.get(key, lambda value: value, "a value") for key in table.keys()}  # noqa: SIM118


# --- Inline in a plan ------------------------------------------------------------------------------------------------


def read_transformer(table: Table) -> Transformer:
    """The transformer whose fields a mapping gives, such as the `model` of a plan. Raises InputError for any other key."""
    ffn = table.integer("ffn", minimum=1)
    experts = _or_none(table, "experts")
    fields: dict[str, Any] = {
        "name": table.name("name"),
        "layers": table.integer("layers", minimum=1),
        "hidden": table.integer("hidden", minimum=1),
        "ffn": ffn,
        "heads": table.integer("heads", minimum=1),
        "vocab": table.integer("vocab", minimum=1),
        "kv_heads": table.integer("kv_heads", 0, minimum=1),
        "head_dim": table.integer("head_dim", 0, minimum=1),
        "padded_vocab": table.integer("padded_vocab", 0, minimum=1),
        "activation": table.choice("activation", ACTIVATIONS, "swiglu"),
        "norm": table.choice("norm", NORMS, "rmsnorm"),
        "attention_bias": table.choice("attention_bias", ATTENTION_BIASES, "none"),
        "mlp_bias": table.flag("mlp_bias", False),
        "qk_norm": table.flag("qk_norm", False),
        "position": table.choice("position", POSITIONS, "rotary"),
        "max_positions": table.integer("max_positions", 0, minimum=1),
        "embedding_width": table.integer("embedding_width", 0, minimum=1),
        "sliding_window": _integer_or_none(table, "sliding_window"),
        "tied_embeddings": table.flag("tied_embeddings", False),
        "final_norm": table.flag("final_norm", True),
        "rope_theta": table.number("rope_theta", 10_000.0),
        "norm_epsilon": table.number("norm_epsilon", 1e-5),
    }
    fields["experts"] = None if experts is None else _read_experts(table.table("experts"), ffn)
    table.close()
    return _made(table, lambda: Transformer(**fields))


def _read_experts(table: Table, ffn: int) -> Moe:
    experts, top_k = table.integer("experts", minimum=1), table.integer("top_k", minimum=1)
    ffn = table.integer("ffn", ffn, minimum=1)
    shared, shared_ffn = table.integer("shared_experts", 0), table.integer("shared_ffn", 0)
    table.close()
    return _made(table, lambda: Moe(experts, top_k, ffn, shared, shared_ffn))


def to_table(transformer: Transformer) -> dict[str, Any]:
    """The plain mapping that `read_transformer` reads back to the same transformer; what is left out is the default."""
    bare = Transformer(
        name=transformer.name,
        layers=transformer.layers,
        hidden=transformer.hidden,
        ffn=transformer.ffn,
        heads=transformer.heads,
        vocab=transformer.vocab,
        head_dim=0 if transformer.hidden % transformer.heads == 0 else transformer.head_dim,
    )
    required = {field.name for field in dataclasses.fields(Transformer) if field.default is dataclasses.MISSING}
    if transformer.hidden % transformer.heads:
        required.add("head_dim")
    values = {field.name: getattr(transformer, field.name) for field in dataclasses.fields(Transformer)}
    table = {key: value for key, value in values.items() if key in required or value != getattr(bare, key)}
    if transformer.experts is not None:
        experts = {key: value for key, value in dataclasses.asdict(transformer.experts).items() if value != 0}
        if experts["ffn"] == transformer.ffn:
            del experts["ffn"]
        table["experts"] = experts
    return table


def _made(table: Table, make: Callable[[], Made]) -> Made:
    """What `make` constructs; where the numbers do not fit one another, the error names the place of the table."""
    try:
        return make()
    except InputError as error:
        place = f"{table.where}: {table.at}" if table.at else table.where
        raise InputError(f"{place}: {error}") from None


def _or_none(table: Table, key: str) -> object:
    """The plain value of a key, None where it is missing or null."""
    value: object = table.get(key, lambda value: value, "a value", None)
    return value


def _integer_or_none(table: Table, key: str) -> int | None:
    return None if _or_none(table, key) is None else table.integer(key, minimum=1)


# --- From Hugging Face -----------------------------------------------------------------------------------------------


def from_hugging_face(config: Table, name: str) -> Transformer:
    """The transformer that a Hugging Face `config.json` describes. Keys that say nothing of its shape are passed over.

    Raises InputError for a `model_type` that is not among `HUGGING_FACE_TYPES`, a missing key, or a variant that
    `Transformer` cannot say. Where a key may be left out, its default is that of the class of the model type there.
    """
    model_type = config.text("model_type")
    read = HUGGING_FACE_TYPES.get(model_type)
    if read is None:
        accepted = ", ".join(HUGGING_FACE_TYPES)
        hint = nearest(model_type, HUGGING_FACE_TYPES)
        raise config.error("model_type", f"expected one of {accepted}, but got {model_type!r}{hint}")
    fields = read(config)
    return _made(config, lambda: Transformer(name=name, **fields))


def _activation(config: Table, key: str, default: str, accepted: Mapping[str, str]) -> str:
    """Our word for the activation function that the configuration names."""
    return accepted[config.choice(key, accepted, default)]


_GATED = {"silu": "swiglu", "swish": "swiglu"}
_PLAIN = {name: "gelu" for name in ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")} | {"relu": "relu"}


def _rope_theta(config: Table, key: str = "rope_theta", default: float = 10_000.0) -> float:
    """The base of the rotary positions: from `rope_parameters` (or its older name), as newer files have it, else from `key`."""
    outside = _number_or(config, key, default)
    inside = next((name for name in ("rope_scaling", "rope_parameters") if _or_none(config, name)), None)
    return outside if inside is None else _number_or(config.table(inside), "rope_theta", outside)


def _number_or(table: Table, key: str, default: float) -> float:
    return default if _or_none(table, key) is None else table.number(key)


def _llama(config: Table) -> dict[str, Any]:
    return {
        "layers": config.integer("num_hidden_layers", minimum=1),
        "hidden": config.integer("hidden_size", minimum=1),
        "ffn": config.integer("intermediate_size", minimum=1),
        "heads": config.integer("num_attention_heads", minimum=1),
        "kv_heads": _integer_or_none(config, "num_key_value_heads") or 0,
        "head_dim": _integer_or_none(config, "head_dim") or 0,
        "vocab": config.integer("vocab_size", minimum=1),
        "activation": _activation(config, "hidden_act", "silu", _GATED),
        "attention_bias": "all" if config.flag("attention_bias", False) else "none",
        "mlp_bias": config.flag("mlp_bias", False),
        "max_positions": _integer_or_none(config, "max_position_embeddings") or 0,
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "rope_theta": _rope_theta(config),
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
    }


def _mistral(config: Table) -> dict[str, Any]:
    # The classes of Mistral, Mixtral and Qwen2 default to 8 (or 32) key-value heads, so a missing key says nothing safe.
    config.integer("num_key_value_heads", minimum=1)
    fixed = {"attention_bias": "none", "mlp_bias": False}
    return _llama(config) | fixed | {"sliding_window": _integer_or_none(config, "sliding_window")}


def _mixtral(config: Table) -> dict[str, Any]:
    shape = _mistral(config) | {
        "rope_theta": _rope_theta(config, default=1_000_000.0),
        "norm_epsilon": config.number("rms_norm_eps", 1e-5),
    }
    experts = config.integer("num_local_experts", minimum=1)
    top_k = config.integer("num_experts_per_tok", minimum=1)
    return shape | {"experts": _made(config, lambda: Moe(experts, top_k, shape["ffn"]))}


def _qwen2(config: Table) -> dict[str, Any]:
    shape = _mistral(config) | {"attention_bias": "qkv"}
    if not config.flag("use_sliding_window", False):
        return shape | {"sliding_window": None}
    full_layers = config.integer("max_window_layers")
    if full_layers >= shape["layers"]:
        return shape | {"sliding_window": None}
    if full_layers > 0:
        raise config.error(
            "max_window_layers",
            f"expected 0 or at least {shape['layers']}, since every layer must see the same window, but got {full_layers}",
        )
    return shape


def _gpt2(config: Table) -> dict[str, Any]:
    hidden = config.integer("n_embd", minimum=1)
    return {
        "layers": config.integer("n_layer", minimum=1),
        "hidden": hidden,
        "ffn": _integer_or_none(config, "n_inner") or 4 * hidden,
        "heads": config.integer("n_head", minimum=1),
        "vocab": config.integer("vocab_size", minimum=1),
        "activation": _activation(config, "activation_function", "gelu_new", _PLAIN),
        "norm": "layernorm",
        "attention_bias": "all",
        "mlp_bias": True,
        "position": "learned",
        "max_positions": config.integer("n_positions", minimum=1),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
    }


def _gpt_neo(config: Table) -> dict[str, Any]:
    # Every second layer is local, but by a mask over all scores: the work is that of full attention, so no sliding window.
    hidden = config.integer("hidden_size", minimum=1)
    return {
        "layers": config.integer("num_layers", minimum=1),
        "hidden": hidden,
        "ffn": _integer_or_none(config, "intermediate_size") or 4 * hidden,
        "heads": config.integer("num_heads", minimum=1),
        "vocab": config.integer("vocab_size", minimum=1),
        "activation": _activation(config, "activation_function", "gelu_new", _PLAIN),
        "norm": "layernorm",
        "attention_bias": "output",
        "mlp_bias": True,
        "position": "learned",
        "max_positions": config.integer("max_position_embeddings", minimum=1),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
    }


def _gpt_neox(config: Table) -> dict[str, Any]:
    return {
        "layers": config.integer("num_hidden_layers", minimum=1),
        "hidden": config.integer("hidden_size", minimum=1),
        "ffn": config.integer("intermediate_size", minimum=1),
        "heads": config.integer("num_attention_heads", minimum=1),
        "vocab": config.integer("vocab_size", minimum=1),
        "activation": _activation(config, "hidden_act", "gelu", _PLAIN),
        "norm": "layernorm",
        "attention_bias": "all" if config.flag("attention_bias", True) else "none",
        "mlp_bias": True,
        "max_positions": _integer_or_none(config, "max_position_embeddings") or 0,
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "rope_theta": _rope_theta(config, "rotary_emb_base"),
        "norm_epsilon": config.number("layer_norm_eps", 1e-5),
    }


def _opt(config: Table) -> dict[str, Any]:
    if not config.flag("layer_norm_elementwise_affine", True):
        raise config.error("layer_norm_elementwise_affine", "expected true, since norms have parameters here, but got False")
    bias = config.flag("enable_bias", True)
    return {
        "layers": config.integer("num_hidden_layers", minimum=1),
        "hidden": config.integer("hidden_size", minimum=1),
        "ffn": config.integer("ffn_dim", minimum=1),
        "heads": config.integer("num_attention_heads", minimum=1),
        "vocab": config.integer("vocab_size", minimum=1),
        "activation": _activation(config, "activation_function", "relu", _PLAIN),
        "norm": "layernorm",
        "attention_bias": "all" if bias else "none",
        "mlp_bias": bias,
        "position": "learned",
        "max_positions": config.integer("max_position_embeddings", minimum=1) + 2,  # the table's first two rows pad
        "embedding_width": _integer_or_none(config, "word_embed_proj_dim") or 0,
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "final_norm": config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False),
    }


def _qwen3(config: Table) -> dict[str, Any]:
    """As Qwen2 without biases unless it says so, with a width of a head of its own, and norms of query and key."""
    biases = "all" if config.flag("attention_bias", False) else "none"
    return _qwen2(config) | {"attention_bias": biases, "qk_norm": True, "head_dim": _integer_or_none(config, "head_dim") or 128}


def _qwen3_moe(config: Table) -> dict[str, Any]:
    """As Qwen3 with experts in every layer, and a width of a head that follows from hidden where it is not given."""
    shape = _qwen3(config) | {"head_dim": _integer_or_none(config, "head_dim") or 0}
    if config.get("mlp_only_layers", lambda value: value, "a list of layers", []):
        raise config.error("mlp_only_layers", "expected none, since every layer must have experts")
    if (step := config.integer("decoder_sparse_step", 1)) != 1:
        raise config.error("decoder_sparse_step", f"expected 1, since every layer must have experts, but got {step}")
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"  # what transformers 5 writes, or else 4
    experts, top_k = config.integer(count, minimum=1), config.integer("num_experts_per_tok", minimum=1)
    width = config.integer("moe_intermediate_size", minimum=1)
    return shape | {"experts": _made(config, lambda: Moe(experts, top_k, width))}


HUGGING_FACE_TYPES: Mapping[str, Callable[[Table], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}
"""How the fields of a `Transformer` are read from a configuration, by its `model_type`."""
