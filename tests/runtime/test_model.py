"""The runtime's model against the plain one of `reference`, and against Hugging Face's own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.model import ModelPart, attention_mask
from runtime.parameters import Section, place_parameters, range_parameters
from runtime.tensor_parallel import DeferredWeights, TensorGroup
from sim.spec.counts import RECOMPUTE, key_value_bytes, layer_activation_bytes
from sim.spec.plan import LayerRange
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer
from tests.runtime.reference import Weights, gradients_of, reference_logits, reference_loss, rough_weights, sections_of

ALONE = TensorGroup(0, 1, None)

LLAMA = Transformer("a llama", 3, 16, 24, 4, 29, kv_heads=2, padded_vocab=32, rope_theta=500.0, norm_epsilon=1e-3)
GPT = Transformer(
    "a gpt",
    layers=3,
    hidden=16,
    ffn=40,
    heads=4,
    vocab=29,
    padded_vocab=32,
    activation="gelu",
    norm="layernorm",
    attention_bias="all",
    mlp_bias=True,
    position="learned",
    max_positions=9,
    tied_embeddings=True,
)
MODELS: Mapping[str, Transformer] = {
    "llama with grouped keys": LLAMA,
    "gpt": GPT,
    "one key head": replace(LLAMA, kv_heads=1),
    "heads of another width": replace(LLAMA, kv_heads=4, head_dim=6),
    "tied llama": replace(LLAMA, tied_embeddings=True),
    "biases of query, key and value": replace(LLAMA, attention_bias="qkv"),
    "biases in a gated mlp": replace(LLAMA, attention_bias="output", mlp_bias=True),
    "norms of query and key": replace(LLAMA, qk_norm=True, head_dim=6),
    "norms of query and key in a gpt": replace(GPT, qk_norm=True),
    "a window and grouped keys": replace(LLAMA, sliding_window=3),
    "a window as long as the sequence": replace(GPT, sliding_window=8),
    "a window in a gpt": replace(GPT, sliding_window=1),
    "relu, no final norm": replace(GPT, activation="relu", final_norm=False, tied_embeddings=False),
    "nothing but the tied embedding behind the layers": replace(GPT, final_norm=False),
    "rotary gpt": replace(GPT, position="rotary", max_positions=0),
    "no padding": replace(LLAMA, padded_vocab=29),
}

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def batch_BS() -> Batch:
    """Two sequences of eight tokens, and their labels."""
    tokens = torch.randint(0, 29, (2, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def close_gradients(actual: Weights, weights: Weights, tolerance: float = 1e-12) -> None:
    """Asserts that all weights have these gradients."""
    assert actual.keys() == weights.keys()
    for name, weight in weights.items():
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(actual[name], expected, rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, name))


def whole_model(
    transformer: Transformer, weights: Weights, recompute: str | Sequence[str] = "none", **options: Any
) -> tuple[ModelPart, dict[LayerRange, Section]]:
    sections = sections_of(transformer, weights)
    modes = [recompute] * transformer.layers if isinstance(recompute, str) else recompute
    return ModelPart(transformer, (0, transformer.layers), sections, ALONE, True, True, modes, **options), sections


def mean_loss(part: ModelPart, batch_BS: Batch) -> torch.Tensor:
    tokens, labels = batch_BS
    loss: torch.Tensor = part(tokens.T, labels.T) / labels.numel()
    return loss


def slice_losses(part: ModelPart, batch_BS: Batch, slices: int) -> list[torch.Tensor]:
    """What each slice of the sequences adds to the mean loss."""
    tokens, labels = (part_BS.T.chunk(slices) for part_BS in batch_BS)
    return [part(tokens[i], labels[i], i) / batch_BS[1].numel() for i in range(slices)]


# --- Against the plain model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_those_of_the_plain_model(name: str, batch_BS: Batch) -> None:
    weights = rough_weights(MODELS[name], seed=0)
    expected = reference_loss(MODELS[name], weights, *batch_BS)
    expected.backward()
    part, sections = whole_model(MODELS[name], weights)
    loss = mean_loss(part, batch_BS)
    loss.backward()
    close(loss, expected)
    close_gradients(gradients_of(sections), weights)


@pytest.mark.parametrize("name", ["llama with grouped keys", "gpt"])
def test_logits_leave_out_the_padding_of_the_vocabulary(name: str, batch_BS: Batch) -> None:
    weights = rough_weights(MODELS[name], seed=0)
    part, _ = whole_model(MODELS[name], weights)
    logits_SBV = part.logits(batch_BS[0].T)
    assert logits_SBV.shape == (8, 2, 29)
    close(logits_SBV.transpose(0, 1), reference_logits(MODELS[name], weights, batch_BS[0]))


@pytest.mark.parametrize("recompute", ["pointwise", "selective", "full", ("full", "pointwise", "selective")])
@pytest.mark.parametrize("transformer", [LLAMA, replace(GPT, sliding_window=3)], ids=["llama", "gpt"])
def test_recomputation_changes_no_gradient(transformer: Transformer, recompute: str | Sequence[str], batch_BS: Batch) -> None:
    weights = rough_weights(transformer, seed=0)
    gradients = []
    for modes in ("none", recompute):
        part, sections = whole_model(transformer, weights, modes)
        mean_loss(part, batch_BS).backward()
        gradients.append(gradients_of(sections))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize("transformer", [LLAMA, GPT, replace(GPT, final_norm=False)], ids=["llama", "gpt", "bare head"])
def test_two_parts_one_after_the_other_are_the_whole_model(transformer: Transformer, batch_BS: Batch) -> None:
    """The second part of a tied model has the tokens' matrix alone of the embedding, and each part its gradient of it."""
    n, (tokens_BS, labels_BS) = transformer.layers, batch_BS
    weights = rough_weights(transformer, seed=0)
    reference_loss(transformer, weights, *batch_BS).backward()
    first, second = sections_of(transformer, weights), sections_of(transformer, weights)
    if transformer.tied_embeddings:
        (tokens, *_) = place_parameters(transformer, (0, 0))
        second[0, 0] = Section([tokens], (0, 0), 0, 1, torch.float64, torch.device("cpu"))
        second[0, 0].values.copy_(weights[tokens.name].detach().flatten())
    start = ModelPart(transformer, (0, 2), first, ALONE, True, False, ["none", "full"])
    end = ModelPart(transformer, (2, n), second, ALONE, False, True, ["none"])
    assert end.has_head and not start.has_head

    left = start(tokens_BS.T)
    entered = left.detach().requires_grad_()
    (end(entered, labels_BS.T) / labels_BS.numel()).backward()
    assert entered.grad is not None
    torch.autograd.backward(left, entered.grad)

    gradients, more = gradients_of(first), gradients_of(second)
    close_gradients({name: gradient + more.get(name, 0) for name, gradient in gradients.items()}, weights)


def test_a_part_without_layers_is_embedding_and_head(batch_BS: Batch) -> None:
    weights = rough_weights(LLAMA, seed=0)
    sections = sections_of(LLAMA, weights)
    x_SBH = ModelPart(LLAMA, (0, 0), sections, ALONE, True, False, [])(batch_BS[0].T)
    close(x_SBH, weights["embedding.tokens.weight"].detach()[batch_BS[0].T])
    logits = ModelPart(LLAMA, (3, 3), sections, ALONE, False, True, []).logits(torch.ones(1, 1, 16, dtype=torch.float64))
    expected = weights["head.output.weight"][:29] @ weights["head.norm.weight"] / (1 + LLAMA.norm_epsilon) ** 0.5
    close(logits[0, 0], expected)


def test_what_cannot_be_computed_is_refused_in_one_line(batch_BS: Batch) -> None:
    odd = replace(LLAMA, head_dim=5)
    with pytest.raises(InputError, match="rotary positions need an even width of a head, but a llama has head_dim 5"):
        whole_model(odd, rough_weights(odd, seed=0))
    short = replace(GPT, max_positions=7)
    part, _ = whole_model(short, rough_weights(short, seed=0))
    with pytest.raises(InputError, match="at most the 7 learned positions, but got 8"):
        part(batch_BS[0].T, batch_BS[1].T)


# --- Slices of the sequences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        *(("llama with grouped keys", 2), ("gpt", 8), ("one key head", 4), ("norms of query and key", 4), ("rotary gpt", 4)),
        *(("a window and grouped keys", 2), ("a window and grouped keys", 4), ("a window in a gpt", 4)),
    ],
)
def test_slices_one_after_the_other_are_the_whole_sequence(name: str, slices: int, batch_BS: Batch) -> None:
    weights = rough_weights(MODELS[name], seed=0)
    expected = reference_loss(MODELS[name], weights, *batch_BS)
    expected.backward()
    part, sections = whole_model(MODELS[name], weights, RECOMPUTE[:3], sequence_slices=slices)
    losses = slice_losses(part, batch_BS, slices)
    for loss in reversed(losses):
        loss.backward()
    close(torch.stack(losses).sum(), expected)
    close_gradients(gradients_of(sections), weights)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("transformer", [LLAMA, replace(GPT, sliding_window=3)], ids=["llama", "gpt with a window"])
def test_slices_of_several_micro_batches_are_under_way_at_once(transformer: Transformer, recompute: str, batch_BS: Batch) -> None:
    """In the order of 1F1B with split backwards: what one micro-batch's slices see, and leave, is not another's."""
    weights = rough_weights(transformer, seed=0)
    reference_loss(transformer, weights, *batch_BS).backward()
    deferred = DeferredWeights(accumulate)
    part, sections = whole_model(transformer, weights, recompute, deferred=deferred, sequence_slices=4)
    tokens, labels = (part_BS.T.chunk(4) for part_BS in batch_BS)

    def forward(b: int, place: int) -> torch.Tensor:
        loss: torch.Tensor = part(tokens[place][:, b : b + 1], labels[place][:, b : b + 1], place) / batch_BS[1].numel()
        return loss

    losses = [forward(0, place) for place in range(4)]
    for place in range(4):
        losses.append(forward(1, place))
        with deferred.collecting() as weight_half:
            losses[3 - place].backward()
        weight_half()
    for loss in reversed(losses[4:]):
        loss.backward()
    close_gradients(gradients_of(sections), weights)


def test_a_slice_is_given_no_keys_that_lie_before_its_window() -> None:
    transformer = replace(LLAMA, sliding_window=5)
    tokens_BS = torch.randint(0, 29, (1, 49), generator=torch.Generator().manual_seed(1))
    batch_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
    weights = rough_weights(transformer, seed=0)
    reference_loss(transformer, weights, *batch_BS).backward()
    part, sections = whole_model(transformer, weights, sequence_slices=3)
    for loss in reversed(slice_losses(part, batch_BS, 3)):
        loss.backward()
    close_gradients(gradients_of(sections), weights)
    _, mask_SK = part._positions(torch.empty(16, 1, 16, dtype=torch.float64), 2)
    assert mask_SK is not None and mask_SK.shape == (16, 32)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_keys_and_values_are_freed_with_the_last_graph_that_needs_them(recompute: str, batch_BS: Batch) -> None:
    part, _ = whole_model(LLAMA, rough_weights(LLAMA, seed=0), recompute, sequence_slices=4)
    tokens, labels = (part_BS.T.chunk(4) for part_BS in batch_BS)
    losses = [part(tokens[0], labels[0], 0)]
    held = [weakref.ref(attended) for attended in part._attended]
    losses += [part(tokens[place], labels[place], place) for place in range(1, 4)]
    gc.disable()
    try:
        while losses:
            assert all(attended() is not None for attended in held)
            losses.pop().backward()
        assert all(attended() is None for attended in held)
    finally:
        gc.enable()


def test_a_slice_of_learned_positions_ends_within_their_table(batch_BS: Batch) -> None:
    short = replace(GPT, max_positions=7)
    part, _ = whole_model(short, rough_weights(short, seed=0), sequence_slices=2)
    with pytest.raises(InputError, match="at most the 7 learned positions, but got 8"):
        slice_losses(part, batch_BS, 2)


@pytest.mark.parametrize(("window", "earlier"), [(None, 6), (3, 2), (9, 6)])
def test_the_mask_lets_through_what_each_query_sees(window: int | None, earlier: int) -> None:
    mask_SK = attention_mask(4, earlier, window, torch.device("cpu"), torch.float64)
    assert mask_SK is not None
    for query in range(4):
        for key in range(earlier + 4):
            seen = key <= earlier + query and (window is None or key > earlier + query - window)
            assert mask_SK[query, key] == (0 if seen else -torch.inf)


def test_on_a_gpu_the_mask_of_a_slice_takes_no_memory() -> None:
    cuda = torch.device("cuda")
    assert attention_mask(4, 0, None, cuda, torch.bfloat16) is attention_mask(4, 0, 4, cuda, torch.bfloat16) is None
    mask_SK = attention_mask(4, 2, None, cuda, torch.float64)
    assert isinstance(mask_SK, CausalBias) and mask_SK.variant is CausalVariant.LOWER_RIGHT
    query, key, value = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (4, 6, 6))
    plain = attention_mask(4, 2, None, torch.device("cpu"), torch.float64)
    attended = torch.nn.functional.scaled_dot_product_attention
    close(attended(query, key, value, attn_mask=mask_SK), attended(query, key, value, attn_mask=plain))


# --- Deferred weights, compilation, memory ---------------------------------------------------------------------------


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("transformer", [LLAMA, GPT], ids=["llama", "gpt"])
def test_deferred_weights_have_the_same_gradients_later(transformer: Transformer, recompute: str, batch_BS: Batch) -> None:
    """Of two micro-batches in the order of a zero-bubble schedule: both inputs' halves, then both weights' halves."""
    weights = rough_weights(transformer, seed=0)
    reference_loss(transformer, weights, *batch_BS).backward()
    deferred = DeferredWeights(accumulate)
    part, sections = whole_model(transformer, weights, recompute, deferred=deferred)
    tokens_SB, labels_SB = (part_BS.T for part_BS in batch_BS)
    halves = []
    for b in range(2):
        loss = part(tokens_SB[:, b : b + 1], labels_SB[:, b : b + 1]) / labels_SB.numel()
        with deferred.collecting() as weight_half:
            loss.backward()
        halves.append(weight_half)
    early = gradients_of(sections)
    for name, gradient in early.items():
        computed = "norm" in name or name.startswith("embedding") or name.endswith(("output.bias", "down.bias"))
        assert bool(gradient.any()) == computed, name
    for weight_half in halves:
        weight_half()
        weight_half()  # nothing is left for a second time
    close_gradients(gradients_of(sections), weights)


def test_outside_of_collecting_no_weight_is_put_off(batch_BS: Batch) -> None:
    weights = rough_weights(LLAMA, seed=0)
    reference_loss(LLAMA, weights, *batch_BS).backward()
    part, sections = whole_model(LLAMA, weights, deferred=DeferredWeights(accumulate))
    mean_loss(part, batch_BS).backward()
    close_gradients(gradients_of(sections), weights)


class _Asked(TorchDispatchMode):
    """The operations that are asked for while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function.overloadpacket))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", MODELS)
def test_a_micro_batch_never_has_a_gpu_waited_for(name: str, recompute: str) -> None:
    """Neither for a number that the host wants to know: a device without numbers has none; nor for one that the host gives.

    A copy of that waits for all work before it. Of experts a GPU is waited for where it has no kernel for all of them.
    """
    transformer = MODELS[name]
    ranges = [(0, 0), (0, transformer.layers), (transformer.layers, transformer.layers)]
    for device in (torch.device("meta"), torch.device("cpu")):
        held = {layers: Section(range_parameters(transformer, layers), layers, 0, 1, torch.bfloat16, device) for layers in ranges}
        part = ModelPart(transformer, ranges[1], held, ALONE, True, True, [recompute] * transformer.layers)
        tokens = torch.zeros(8, 2, dtype=torch.long, device=device)
        part(tokens, tokens).backward()  # makes the tables and masks that all micro-batches have in common
        with _Asked() as asked:
            part(tokens, tokens).backward()
        assert {"aten.mm", "aten.scatter_add_"} <= asked.names
        assert "aten.lift_fresh" not in asked.names  # as a number of the host begins; a device without numbers asks for nothing


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that are compiled in a test, which run as they are."""
    found: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=kept))
    torch.compiler.reset()
    return found


@pytest.mark.parametrize(
    ("transformer", "recompute", "count"),
    [(LLAMA, ("none", "none", "full"), 1), (replace(GPT, sliding_window=3), ("selective", "full", "selective"), 2)],
    ids=["llama", "gpt"],
)
def test_compiled_layers_compute_the_same_and_share_their_graphs(
    transformer: Transformer, recompute: Sequence[str], count: int, batch_BS: Batch, graphs: list[torch.fx.GraphModule]
) -> None:
    weights = rough_weights(transformer, seed=0)
    reference_loss(transformer, weights, *batch_BS).backward()
    part, sections = whole_model(transformer, weights, recompute, compile_layers=True)
    mean_loss(part, batch_BS).backward()
    close_gradients(gradients_of(sections), weights)
    assert len(graphs) == count


@pytest.mark.parametrize(
    ("transformer", "recompute"),
    [(LLAMA, ("none", "none", "selective")), (replace(GPT, sliding_window=3), ("full", "full", "selective"))],
    ids=["llama", "gpt"],
)
def test_compiled_layers_share_their_graphs_between_slices(
    transformer: Transformer, recompute: Sequence[str], batch_BS: Batch, graphs: list[torch.fx.GraphModule]
) -> None:
    """What is before the attention, and after it: the attention itself sees another number of keys in each slice."""
    weights = rough_weights(transformer, seed=0)
    reference_loss(transformer, weights, *batch_BS).backward()
    part, sections = whole_model(transformer, weights, recompute, compile_layers=True, sequence_slices=4)
    for loss in reversed(slice_losses(part, batch_BS, 4)):
        loss.backward()
    close_gradients(gradients_of(sections), weights)
    assert len(graphs) <= 4


def kept_bytes(part: ModelPart, x_SBH: torch.Tensor, slices: int = 1) -> int:
    """Bytes of what autograd keeps of a part's forward, or those of slices, without parameters, tables, masks and integers."""
    given = {p.untyped_storage().data_ptr() for p in part.parameters()}
    streams = [part_SBH.detach().requires_grad_() for part_SBH in x_SBH.chunk(slices)]
    for place, stream in enumerate(streams):
        rotary, mask_SK = part._positions(stream, place)
        given |= {table.untyped_storage().data_ptr() for table in (*(rotary or ()), mask_SK) if table is not None}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in given:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        for place, stream in enumerate(streams):
            part(stream, place=place)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", ["llama with grouped keys", "norms of query and key", "gpt", "relu, no final norm"])
def test_a_layer_keeps_the_bytes_that_the_simulator_counts(name: str, recompute: str, slices: int) -> None:
    """Up to 1.2 %, the statistics of norms; and what torch's RMS norm keeps on the CPU, where it is not fused.

    A micro-batch's slices have their keys and values in common, and the simulator counts these once more.
    """
    transformer = replace(MODELS[name], hidden=64, head_dim=16, ffn=160, max_positions=32)
    sections = sections_of(transformer, rough_weights(transformer, 0, torch.float32))
    part = ModelPart(transformer, (1, 2), sections, ALONE, False, False, [recompute], sequence_slices=slices)
    x_SBH = torch.randn(32, 1, 64, requires_grad=True)
    expected = layer_activation_bytes(transformer, 1, 32, 1, False, recompute, 4)
    unfused = 2 * x_SBH.nbytes if transformer.norm == "rmsnorm" and recompute != "full" else 0
    if transformer.qk_norm and recompute != "full":
        unfused += 32 * (transformer.heads + transformer.kv_heads) * transformer.head_dim * 4
    if slices > 1 and transformer.qk_norm and recompute != "full":  # the values beside the query and key before their norms
        unfused += key_value_bytes(transformer, 1, 32, 1, 4) // 2
    assert expected <= kept_bytes(part, x_SBH, slices) - unfused <= 1.012 * expected


# --- Against Hugging Face --------------------------------------------------------------------------------------------


def agrees_with_hugging_face(transformer: Transformer, weights: Weights, theirs: Any, batch_BS: Batch) -> None:
    tokens_BS, labels_BS = batch_BS
    part, _ = whole_model(transformer, weights)
    expected = theirs(tokens_BS).logits
    close(part.logits(tokens_BS.T).transpose(0, 1), expected, 1e-5)
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels_BS.flatten())
    close(mean_loss(part, batch_BS), expected_loss, 1e-5)


@pytest.mark.parametrize("biases", [False, True])
def test_logits_and_loss_are_those_of_hugging_face_llama(biases: bool, batch_BS: Batch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=500.0,
        rms_norm_eps=1e-3,
        initializer_range=0.3,
        attention_bias=biases,
        mlp_bias=biases,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    state = {name: torch.randn_like(p) * 0.3 if p.dim() == 1 else p for name, p in theirs.state_dict().items()}
    theirs.load_state_dict(state)
    ours = replace(LLAMA, layers=2, kv_heads=2, padded_vocab=29, attention_bias="all" if biases else "none", mlp_bias=biases)
    weights = {
        "embedding.tokens.weight": state["model.embed_tokens.weight"],
        "head.norm.weight": state["model.norm.weight"],
        "head.output.weight": state["lm_head.weight"],
    }
    parts = {"q": "query", "k": "key", "v": "value", "o": "output", "gate": "gate", "up": "up", "down": "down"}
    for name, value in state.items():
        if ".layers." not in name:
            continue
        _, _, number, module, *rest = name.split(".")
        kind = rest[-1]
        if module.endswith("layernorm"):
            norm = "attention_norm" if module.startswith("input") else "mlp_norm"
            weights[f"layers.{number}.{norm}.weight"] = value
        else:
            part = parts[rest[0].removesuffix("_proj")]
            block = "attention" if module == "self_attn" else "mlp"
            turned = part in ("output", "down") and kind == "weight"
            weights[f"layers.{number}.{block}.{part}.{kind}"] = value.t() if turned else value
    agrees_with_hugging_face(ours, weights, theirs, batch_BS)


def test_logits_and_loss_are_those_of_hugging_face_gpt2(batch_BS: Batch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=29, n_embd=16, n_inner=40, n_layer=2, n_head=4, n_positions=9, initializer_range=0.3
    )
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    state = {name: torch.randn_like(p) * 0.3 if p.dim() == 1 else p for name, p in theirs.state_dict().items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    theirs.load_state_dict(state)
    weights = {
        "embedding.tokens.weight": state["transformer.wte.weight"],
        "embedding.positions.weight": state["transformer.wpe.weight"],
        "head.norm.weight": state["transformer.ln_f.weight"],
        "head.norm.bias": state["transformer.ln_f.bias"],
    }
    for layer in range(2):
        for kind in ("weight", "bias"):
            at, theirs_at = f"layers.{layer}", f"transformer.h.{layer}"
            fused = state[f"{theirs_at}.attn.c_attn.{kind}"]  # their matrices are (in, out)
            for part, value in zip(("query", "key", "value"), fused.chunk(3, dim=-1), strict=True):
                weights[f"{at}.attention.{part}.{kind}"] = value.t()
            weights[f"{at}.attention.output.{kind}"] = state[f"{theirs_at}.attn.c_proj.{kind}"]
            weights[f"{at}.attention_norm.{kind}"] = state[f"{theirs_at}.ln_1.{kind}"]
            weights[f"{at}.mlp_norm.{kind}"] = state[f"{theirs_at}.ln_2.{kind}"]
            weights[f"{at}.mlp.up.{kind}"] = state[f"{theirs_at}.mlp.c_fc.{kind}"].t()
            weights[f"{at}.mlp.down.{kind}"] = state[f"{theirs_at}.mlp.c_proj.{kind}"]
    agrees_with_hugging_face(replace(GPT, layers=2, padded_vocab=29), weights, theirs, batch_BS)
