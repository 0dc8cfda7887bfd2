"""What follows from a transformer's shape: parameters, FLOP, bytes kept and bytes moved, of a layer, the embedding, the head.

All counts are whole numbers. `tensor_parallel` is the number of ranks that share a layer; a count "of one rank" is that of
the fullest rank: heads, key-value heads (each rank has at least one, copied where there are fewer heads than ranks), MLP
columns and vocabulary rows are divided and rounded up. `tokens` are those that pass through in one micro-batch.

A model is, for the partition, one embedding, `layers` equal layers and one head; the head is the final norm, the projection
back to the embedding width if there is one, and the output matrix.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

PRECISION_BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 2, "mxfp8": 2, "nvfp4": 2}
"""Bytes of a stored parameter or activation. 8 and 4 bits are the precisions of matmuls, whose operands are kept in bf16."""

RECOMPUTE = ("none", "pointwise", "selective", "full")
"""What of a layer the backward pass computes again: nothing; what comes of the norms of the stream and of the activation, which
only the gradients of matrices need; the core of attention; everything. Of two modes in one stage the later one comes first."""


def _share(count: int, ranks: int) -> int:
    """The part of the fullest of `ranks` that divide `count`."""
    return -(-count // ranks)


# --- Parameters ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer by their place. `experts` are all routed experts; shared ones and a dense MLP are `mlp`."""

    attention: int
    mlp: int
    router: int
    experts: int
    norms: int
    biases: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.mlp + self.router + self.experts + self.norms + self.biases


def layer_parameter_parts(transformer: Transformer, tensor_parallel: int = 1) -> LayerParameters:
    """Parameters of one layer that one of `tensor_parallel` ranks holds, by their place.

    Norms, the router and the biases after the row-parallel matrices (attention output, MLP down) are on every rank. Biases
    of routed experts count with `experts`.
    """
    t = transformer
    query, keys = _attention_widths(t, tensor_parallel)
    qkv = query + 2 * keys
    biases = 0
    if t.attention_bias in ("qkv", "all"):
        biases += qkv
    if t.attention_bias in ("output", "all"):
        biases += t.hidden
    router = experts = mlp = 0
    if t.experts is None:
        mlp = _mlp_matrices(t, t.ffn, tensor_parallel)
        biases += _mlp_biases(t, t.ffn, tensor_parallel)
    else:
        moe = t.experts
        router = t.hidden * moe.experts
        expert = _mlp_matrices(t, moe.ffn, tensor_parallel) + _mlp_biases(t, moe.ffn, tensor_parallel)
        experts = moe.experts * expert
        if moe.shared_experts:
            mlp = _mlp_matrices(t, moe.shared_experts * moe.shared_ffn, tensor_parallel)
            biases += _mlp_biases(t, moe.shared_experts * moe.shared_ffn, tensor_parallel)
    return LayerParameters(
        attention=t.hidden * (qkv + query),
        mlp=mlp,
        router=router,
        experts=experts,
        norms=2 * _norm(t) + 2 * t.head_dim * t.qk_norm,
        biases=biases,
    )


def _attention_widths(t: Transformer, tensor_parallel: int) -> tuple[int, int]:
    """Columns of the query, and of the key (or value), on one rank."""
    return t.head_dim * _share(t.heads, tensor_parallel), t.head_dim * _share(t.kv_heads, tensor_parallel)


def _mlp_matrices(t: Transformer, ffn: int, tensor_parallel: int) -> int:
    return (3 if t.gated else 2) * t.hidden * _share(ffn, tensor_parallel)


def _mlp_biases(t: Transformer, ffn: int, tensor_parallel: int) -> int:
    return ((2 if t.gated else 1) * _share(ffn, tensor_parallel) + t.hidden) if t.mlp_bias else 0


def _norm(t: Transformer) -> int:
    return (2 if t.norm == "layernorm" else 1) * t.hidden


def layer_parameters(transformer: Transformer) -> int:
    """Parameters of one layer."""
    return layer_parameter_parts(transformer).total


def layer_parameters_at(
    transformer: Transformer, tensor_parallel: int, expert_parallel: int = 1, whole_experts: bool = False
) -> int:
    """Parameters of one layer that one of `tensor_parallel` ranks holds, with its share of the experts: of their number, and,
    unless they are whole, of the columns of each."""
    parts = layer_parameter_parts(transformer, tensor_parallel)
    experts = layer_parameter_parts(transformer).experts if whole_experts else parts.experts
    return parts.total - parts.experts + _share(experts, expert_parallel)


def embedding_parameters(transformer: Transformer) -> int:
    """Parameters before the first layer: token embedding (padded), learned positions, projection to the hidden width."""
    return embedding_parameters_at(transformer, 1)


def embedding_parameters_at(transformer: Transformer, tensor_parallel: int) -> int:
    """Parameters before the first layer that one rank holds: the vocabulary is divided, positions and projection are not."""
    t = transformer
    positions = t.max_positions * t.hidden if t.position == "learned" else 0
    return _vocabulary_matrix(t, tensor_parallel) + positions + _projection(t)


def head_parameters(transformer: Transformer) -> int:
    """Parameters after the last layer: final norm, projection to the embedding width, and the output matrix unless tied."""
    return head_parameters_at(transformer, 1)


def head_parameters_at(transformer: Transformer, tensor_parallel: int) -> int:
    """Parameters after the last layer that one rank holds; a tied output matrix is not among them (`tied_copy_parameters_at`)."""
    t = transformer
    output = 0 if t.tied_embeddings else _vocabulary_matrix(t, tensor_parallel)
    return (_norm(t) if t.final_norm else 0) + _projection(t) + output


def tied_copy_parameters_at(transformer: Transformer, tensor_parallel: int) -> int:
    """Parameters that one rank of the last stage holds besides, because the tied embedding lies on another stage.

    0 where the embedding is not tied. The copy is no part of the model's parameters: its gradient is summed with that of
    the embedding, as Megatron-LM does it.
    """
    return _vocabulary_matrix(transformer, tensor_parallel) if transformer.tied_embeddings else 0


def _vocabulary_matrix(t: Transformer, tensor_parallel: int) -> int:
    return _share(t.padded_vocab, tensor_parallel) * t.embedding_width


def _projection(t: Transformer) -> int:
    return t.embedding_width * t.hidden if t.projected_embeddings else 0


def total_parameters(transformer: Transformer) -> int:
    """Parameters of the whole model, padding of the vocabulary included."""
    t = transformer
    return embedding_parameters(t) + t.layers * layer_parameters(t) + head_parameters(t)


def active_parameters(transformer: Transformer) -> int:
    """Parameters that one token meets: all of them, less the experts that its router does not choose."""
    t = transformer
    if t.experts is None:
        return total_parameters(t)
    expert = layer_parameter_parts(t).experts // t.experts.experts
    return total_parameters(t) - t.layers * expert * (t.experts.experts - t.experts.top_k)


# --- FLOP ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerFlop:
    """FLOP of one layer: `matmul` with its weights, `attention` between its tokens (scores, and values weighted by them)."""

    matmul: int
    attention: int

    @property
    def total(self) -> int:
        """FLOP of both."""
        return self.matmul + self.attention


def layer_forward_flop(transformer: Transformer, tokens: int, sequence_length: int) -> LayerFlop:
    """FLOP of one layer's forward pass over all ranks together, a multiply-add being 2; its backward pass takes twice as many.

    Matmuls only, the router's too, and of experts only those chosen. Each token is counted against all keys of its sequence,
    not half for causality; a sliding window shorter than the sequence limits the keys.
    """
    t = transformer
    query, keys = _attention_widths(t, 1)
    weights = t.hidden * (2 * query + 2 * keys)
    if t.experts is None:
        weights += _mlp_matrices(t, t.ffn, 1)
    else:
        moe = t.experts
        weights += t.hidden * moe.experts + moe.top_k * _mlp_matrices(t, moe.ffn, 1)
        weights += _mlp_matrices(t, moe.shared_experts * moe.shared_ffn, 1)
    seen = sequence_length if t.sliding_window is None else min(sequence_length, t.sliding_window)
    return LayerFlop(matmul=2 * tokens * weights, attention=2 * 2 * tokens * seen * query)


def layer_recompute_flop(transformer: Transformer, tokens: int, sequence_length: int, recompute: str) -> int:
    """FLOP that one layer's backward pass spends on recomputation: the attention's for "selective", all for "full".

    Norms and activations are not counted as FLOP anywhere, so there are none for "pointwise".
    What a flash kernel recomputes inside itself is not counted. The HFU that Korthikanti et al. (2022) publish counts three times
    as much for "selective": there the attention term s / 6h doubles, though only its forward third is repeated.
    """
    _check(recompute)
    flop = layer_forward_flop(transformer, tokens, sequence_length)
    return {"none": 0, "pointwise": 0, "selective": flop.attention, "full": flop.total}[recompute]


def embedding_forward_flop(transformer: Transformer, tokens: int) -> int:
    """FLOP before the first layer, forward: the look-up takes none, a projection to the hidden width its matmul."""
    return 2 * tokens * _projection(transformer)


def head_forward_flop(transformer: Transformer, tokens: int) -> int:
    """FLOP after the last layer, forward: the output matrix over the padded vocabulary, which is what the matmul runs over."""
    return 2 * tokens * (_vocabulary_matrix(transformer, 1) + _projection(transformer))


def model_flop(transformer: Transformer, global_batch: int, sequence_length: int) -> int:
    """Model FLOP of one iteration over `global_batch` sequences: forward and backward, without recomputation.

    For a GPT this is 72 B s l h^2 (1 + s / 6h + V / 12lh). Source: Korthikanti et al. (2022), arXiv:2205.05198,
    appendix A; Narayanan et al. (2021), arXiv:2104.04473, with full recomputation (96 for 72, V / 16lh for V / 12lh).
    """
    t, tokens = transformer, global_batch * sequence_length
    layers = t.layers * layer_forward_flop(t, tokens, sequence_length).total
    return 3 * (embedding_forward_flop(t, tokens) + layers + head_forward_flop(t, tokens))


def masked_share(transformer: Transformer, sequence_length: int) -> float:
    """The part of the model FLOP of such sequences that a causal mask leaves out, and a causal kernel does not compute.

    That is half of the attention's; of a window shorter than the sequence nothing.
    """
    t = transformer
    if t.sliding_window is not None and t.sliding_window < sequence_length:
        return 0.0
    attention = 3 * t.layers * layer_forward_flop(t, sequence_length, sequence_length).attention
    return attention / 2 / model_flop(t, 1, sequence_length)


# --- Matmuls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matmul:
    """`count` products of an (m, k) by a (k, n) matrix, in one kernel if `grouped`, or one after another."""

    name: str
    m: int
    n: int
    k: int
    count: int = 1
    grouped: bool = False

    @property
    def flop(self) -> int:
        """FLOP of all `count` products."""
        return 2 * self.m * self.n * self.k * self.count

    def aligned(self, element_bytes: int) -> bool:
        """Whether tensor cores take these matrices as they lie: in 16 bits or fewer their rows are of a multiple of 16 bytes.

        NVIDIA, Matrix Multiplication Background User's Guide, section 2.2. Rows are along n and k, in the backward pass as well.
        """
        return element_bytes > 2 or self.n * element_bytes % 16 == self.k * element_bytes % 16 == 0

    @property
    def kernels(self) -> int:
        """Kernels that make them."""
        return 1 if self.grouped else self.count


def layer_matmuls(
    transformer: Transformer, tokens: int, tensor_parallel: int, expert_parallel: int = 1, whole_experts: bool = False
) -> tuple[Matmul, ...]:
    """The matmuls with weights that one rank runs in one layer's forward pass, in their order.

    Query, key and value are one product, and so are gate and up, and all experts that every token goes to are one MLP. A router
    is taken to spread the tokens evenly: each expert gets tokens x top_k x expert_parallel / experts of them, rounded up, and
    the products of all experts are grouped, as in MegaBlocks (arXiv:2211.15841). Where experts are whole a rank sends its own
    part of the tokens alone. Not among them: the two of attention, whose FLOP `layer_forward_flop` gives. In the backward pass
    each product becomes two of as many FLOP.
    """
    t = transformer
    query, keys = _attention_widths(t, tensor_parallel)
    matmuls = [
        Matmul("query, key and value", tokens, query + 2 * keys, t.hidden),
        Matmul("attention output", tokens, t.hidden, query),
    ]
    if t.experts is None:
        return (*matmuls, *_mlp_matmuls(t, "mlp", tokens, t.ffn, tensor_parallel))
    moe = t.experts
    sent, parts = (_share(tokens, tensor_parallel), 1) if whole_experts else (tokens, tensor_parallel)
    matmuls.append(Matmul("router", sent, moe.experts, t.hidden))
    held = _share(moe.experts, expert_parallel)
    routed = _share(sent * moe.top_k * expert_parallel, moe.experts)
    matmuls += _mlp_matmuls(t, "expert", routed, moe.ffn, parts, count=held, grouped=True)
    if moe.shared_experts:
        matmuls += _mlp_matmuls(t, "shared expert", tokens, moe.shared_experts * moe.shared_ffn, tensor_parallel)
    return tuple(matmuls)


def _mlp_matmuls(
    t: Transformer, name: str, tokens: int, ffn: int, tensor_parallel: int, count: int = 1, grouped: bool = False
) -> list[Matmul]:
    width = _share(ffn, tensor_parallel)
    first, columns = (f"{name} gate and up", 2 * width) if t.gated else (f"{name} up", width)
    down = Matmul(f"{name} down", tokens, t.hidden, width, count, grouped)
    return [Matmul(first, tokens, columns, t.hidden, count, grouped), down]


def embedding_matmuls(transformer: Transformer, tokens: int) -> tuple[Matmul, ...]:
    """The matmuls of every rank before the first layer, forward: the projection to the hidden width, or none."""
    t = transformer
    return (Matmul("projection in", tokens, t.hidden, t.embedding_width),) if t.projected_embeddings else ()


def head_matmuls(transformer: Transformer, tokens: int, tensor_parallel: int) -> tuple[Matmul, ...]:
    """The matmuls that one rank runs after the last layer, forward; the padded vocabulary is divided over the ranks."""
    t = transformer
    projection = (Matmul("projection out", tokens, t.embedding_width, t.hidden),) if t.projected_embeddings else ()
    return (*projection, Matmul("output", tokens, _share(t.padded_vocab, tensor_parallel), t.embedding_width))


def aligned(transformer: Transformer, tensor_parallel: int, precision: str) -> tuple[bool, ...]:
    """Of each matmul with weights on one of so many ranks, the output matmul last: whether tensor cores take it as it lies."""
    layers = layer_matmuls(transformer, 1, tensor_parallel)
    matmuls = (*embedding_matmuls(transformer, 1), *layers, *head_matmuls(transformer, 1, tensor_parallel))
    return tuple(matmul.aligned(PRECISION_BYTES[precision]) for matmul in matmuls)


PADDED_ROWS = 128
"""Rows that Megatron-LM by default pads what a tensor rank has of a vocabulary to a multiple of."""


def with_padded_vocabulary(transformer: Transformer, degrees: Collection[int], precision: str) -> Transformer | None:
    """The model with its vocabulary padded to PADDED_ROWS rows a rank of each of some tensor-parallel degrees.

    None where tensor cores take the output matmul no better so: they take it as it lies, or its width is what does not fit.
    """
    step = PADDED_ROWS * math.lcm(*degrees)
    padded = replace(transformer, padded_vocab=-(-transformer.padded_vocab // step) * step)
    now, then = ([aligned(each, ranks, precision)[-1] for ranks in degrees] for each in (transformer, padded))
    return padded if now != then else None


# --- Bytes kept for the backward pass --------------------------------------------------------------------------------


def layer_activation_bytes(
    transformer: Transformer,
    micro_batch: int,
    sequence_length: int,
    tensor_parallel: int,
    sequence_parallel: bool,
    recompute: str,
    precision_bytes: int,
    flash_attention: bool = True,
    whole_experts: bool = False,
) -> int:
    """Bytes that one rank keeps of one layer between the forward and the backward pass of one micro-batch.

    Per token, in elements of `precision_bytes` unless said otherwise; a, g, d are heads, key-value heads and head size,
    f is the MLP's width, E the experts, k those chosen:

        whole on every rank; divided with sequence parallelism
            input of both norms                           2 h
            input of query, key and value; of the MLP     2 h
        divided by the degree of tensor parallelism
            query, key and value                          (a + 2 g) d
            attention's result (the output's input)       a d
            query and key before their norms, if any      (a + g) d
            MLP: gelu 2 f (its input and its result), relu f (its result), swiglu 3 f (gate, up, and their product; fused)
            softmax of attention: a x 4 bytes (its sum, in fp32) with flash attention, else a s (the scores)
        mixture of experts: k f's in the place of f's, those of the shared experts besides, and whole on every rank, or divided
        where experts are whole
            tokens sent to experts, and their results     2 k h
            the router's probabilities                    E x 4 bytes

    "pointwise" recompute drops the inputs of the matrices of query, key and value and of the MLP (the norms' results), and the
    activation's result where its input is kept (not of relu), "selective" the softmax row, "full" all but the layer's input.
    Dropout is taken to be off, as in today's training, so there are no masks; nor are the few bytes of a norm's statistics
    counted. A score matrix is whole even under a sliding window, which masks it. Source: Korthikanti et al. (2022),
    arXiv:2205.05198, section 4 and table 2; for a GPT without flash attention their sbh(10 + 24/t + 5as/ht) less the masks is
    sbh(8 + 24/t + 2as/ht).
    """
    _check(recompute)
    t, tokens = transformer, micro_batch * sequence_length
    whole_ranks = tensor_parallel if sequence_parallel else 1
    if recompute == "full":
        return _share(tokens * t.hidden * precision_bytes, whole_ranks)
    query, keys = _attention_widths(t, tensor_parallel)
    again = recompute == "pointwise"
    of_mlp = _mlp_kept(t) - (again and recomputes_activation(t))
    elements = 2 * query + 2 * keys + (query + keys) * t.qk_norm + of_mlp * _mlp_width(t, tensor_parallel)
    routed_bytes = 0
    if t.experts is not None:
        routed_bytes = tokens * (2 * t.experts.top_k * t.hidden * precision_bytes + 4 * t.experts.experts)
    stream = _share(tokens * (2 if again else 4) * t.hidden * precision_bytes, whole_ranks)
    kept = stream + tokens * elements * precision_bytes + _share(routed_bytes, tensor_parallel if whole_experts else 1)
    if recompute in ("none", "pointwise"):
        kept += _softmax_bytes(t, micro_batch, sequence_length, tensor_parallel, precision_bytes, flash_attention)
    return kept


def _mlp_kept(t: Transformer) -> int:
    """Tensors of the MLP's width kept for backward."""
    return {"gelu": 2, "relu": 1, "swiglu": 3}[t.activation]


def recomputes_activation(t: Transformer) -> bool:
    """Whether "pointwise" recompute computes the activation again: relu's backward needs the result itself."""
    return t.activation != "relu"


def _mlp_width(t: Transformer, tensor_parallel: int) -> int:
    """The numbers of a token between an MLP's matrices on one rank: of all experts that it is sent to, if there are any."""
    if t.experts is None:
        return _share(t.ffn, tensor_parallel)
    moe = t.experts
    return moe.top_k * _share(moe.ffn, tensor_parallel) + _share(moe.shared_experts * moe.shared_ffn, tensor_parallel)


def _softmax_bytes(
    t: Transformer,
    micro_batch: int,
    sequence_length: int,
    tensor_parallel: int,
    precision_bytes: int,
    flash_attention: bool,
) -> int:
    rows = micro_batch * sequence_length * _share(t.heads, tensor_parallel)
    return rows * (4 if flash_attention else sequence_length * precision_bytes)


def layer_recompute_peak_bytes(
    transformer: Transformer,
    micro_batch: int,
    sequence_length: int,
    tensor_parallel: int,
    sequence_parallel: bool,
    recompute: str,
    precision_bytes: int,
    flash_attention: bool = True,
    whole_experts: bool = False,
) -> int:
    """Bytes that one rank holds, besides those kept, while one layer is recomputed: what "none" would have kept, less what is.

    0 for "none". One layer is recomputed at a time, so a stage needs this once.
    """

    def kept(policy: str) -> int:
        return layer_activation_bytes(
            transformer,
            micro_batch,
            sequence_length,
            tensor_parallel,
            sequence_parallel,
            policy,
            precision_bytes,
            flash_attention,
            whole_experts,
        )

    return kept("none") - kept(recompute)


def head_activation_bytes(
    transformer: Transformer,
    micro_batch: int,
    sequence_length: int,
    tensor_parallel: int,
    sequence_parallel: bool,
    precision_bytes: int,
) -> int:
    """Bytes that one rank keeps after the last layer for the backward pass of one micro-batch.

    Per token: the input of the final norm and of the output matrix (of the projection too, if there is one) in the training
    precision, whole on every rank unless sequence parallelism divides them; and over the rank's share of the padded vocabulary
    the logits in the training precision and their softmax in fp32, which the loss is computed from.
    """
    t, tokens = transformer, micro_batch * sequence_length
    width = t.hidden * (2 if t.final_norm else 1) + (t.embedding_width if t.projected_embeddings else 0)
    inputs = _share(tokens * width * precision_bytes, tensor_parallel if sequence_parallel else 1)
    return inputs + tokens * _share(t.padded_vocab, tensor_parallel) * (precision_bytes + 4)


def boundary_bytes(transformer: Transformer, micro_batch: int, sequence_length: int, precision_bytes: int) -> int:
    """Bytes of one micro-batch's activation between two stages; its gradient on the way back has as many."""
    return micro_batch * sequence_length * transformer.hidden * precision_bytes


def key_value_bytes(
    transformer: Transformer, micro_batch: int, sequence_length: int, tensor_parallel: int, precision_bytes: int
) -> int:
    """Bytes of one layer's keys and values of one micro-batch that belong to one rank's heads."""
    _, keys = _attention_widths(transformer, tensor_parallel)
    return micro_batch * sequence_length * 2 * keys * precision_bytes


def _check(recompute: str) -> None:
    if recompute not in RECOMPUTE:
        raise InputError(f"`recompute` of a layer must be one of {', '.join(RECOMPUTE)}, but got {recompute!r}")


# --- Bytes moved and kernels launched --------------------------------------------------------------------------------


def layer_memory_bytes(
    transformer: Transformer,
    tokens: int,
    tensor_parallel: int,
    sequence_parallel: bool,
    precision_bytes: int,
    whole_experts: bool = False,
) -> int:
    """Bytes that one rank reads and writes, in one layer's forward pass, in what is bound by memory and not by matmuls.

    Per token, in elements, each operation reading its inputs and writing its result once (a fused kernel each):

        norm, twice              h in, h out; divided with sequence parallelism
        residual addition, twice 2 h in, h out; divided with sequence parallelism
        rotary position          query and key in and out, 2 (a + g) d; divided by the degree of tensor parallelism
        norms of query and key   the same
        activation               f in, f out (swiglu 2 f in, f out); divided; for each expert chosen, and shared
        mixture of experts       k h in and out to send the tokens to their experts, k h in and h out to combine them; divided
                                 where experts are whole

    Left out: biases (added by the matmuls), attention (`attention_memory_bytes`), the router's softmax.
    """
    t = transformer
    whole = _share(tokens * 10 * t.hidden, tensor_parallel if sequence_parallel else 1)
    routing_bytes = layer_routing_bytes(t, _share(tokens, tensor_parallel if whole_experts else 1), precision_bytes)
    return whole * precision_bytes + routing_bytes + layer_sharded_bytes(t, tokens, tensor_parallel, precision_bytes)


def layer_routing_bytes(transformer: Transformer, tokens: int, precision_bytes: int) -> int:
    """Of `layer_memory_bytes`, what a mixture moves to send so many tokens to their experts and to combine what these make."""
    moe = transformer.experts
    return 0 if moe is None else tokens * (3 * moe.top_k + 1) * transformer.hidden * precision_bytes


def layer_sharded_bytes(transformer: Transformer, tokens: int, tensor_parallel: int, precision_bytes: int) -> int:
    """Of `layer_memory_bytes`, what stands between matmuls that tensor parallelism divides: on heads, and in the MLP."""
    t = transformer
    query, keys = _attention_widths(t, tensor_parallel)
    elements = 2 * (query + keys) * ((t.position == "rotary") + t.qk_norm) + _activation_elements(t, tensor_parallel)
    return tokens * elements * precision_bytes


def _activation_elements(t: Transformer, tensor_parallel: int) -> int:
    """What the activation of one token reads and writes."""
    return (3 if t.gated else 2) * _mlp_width(t, tensor_parallel)


def layer_pointwise_bytes(
    transformer: Transformer, tokens: int, tensor_parallel: int, sequence_parallel: bool, precision_bytes: int
) -> int:
    """Of `layer_memory_bytes`, what "pointwise" recompute repeats: both norms, and the activation where it does."""
    norms = _share(tokens * 4 * transformer.hidden, tensor_parallel if sequence_parallel else 1)
    return norms * precision_bytes + layer_pointwise_sharded_bytes(transformer, tokens, tensor_parallel, precision_bytes)


def layer_pointwise_sharded_bytes(transformer: Transformer, tokens: int, tensor_parallel: int, precision_bytes: int) -> int:
    """Of `layer_pointwise_bytes`, what tensor parallelism divides."""
    t = transformer
    return tokens * _activation_elements(t, tensor_parallel) * recomputes_activation(t) * precision_bytes


@lru_cache(maxsize=1024)
def layer_pointwise_kernels(transformer: Transformer, expert_parallel: int = 1) -> int:
    """Of `layer_kernels`, what "pointwise" recompute repeats."""
    return 2 + _activations(layer_matmuls(transformer, 1, 1, expert_parallel)) * recomputes_activation(transformer)


def _activations(matmuls: Iterable[Matmul]) -> int:
    """Kernels between the matrices of an MLP: one for each, and one for all grouped experts."""
    return sum(matmul.kernels for matmul in matmuls if matmul.name.endswith(" down"))


def attention_memory_bytes(
    transformer: Transformer,
    tokens: int,
    sequence_length: int,
    tensor_parallel: int,
    precision_bytes: int,
    flash_attention: bool = True,
) -> int:
    """Bytes that one rank reads and writes in one layer's attention, forward: query, key, value in, result out.

    Without flash attention the scores besides, four times: written, read and written by the softmax, read.
    """
    query, keys = _attention_widths(transformer, tensor_parallel)
    scores = 0 if flash_attention else 4 * _share(transformer.heads, tensor_parallel) * sequence_length
    return tokens * (2 * query + 2 * keys + scores) * precision_bytes


def unfused_scores(
    transformer: Transformer, sequences: int, queries: int, keys: int, tensor_parallel: int, precision_bytes: int
) -> int:
    """Scores that Megatron's fused softmax does not take, of one layer's attention on one rank: all of them, or none.

    It takes scores of 16 bits in matrices of a multiple of four queries and more than 16 and at most 16,384 keys, if there is a
    multiple of four such matrices, one for each head and sequence. Source: Megatron-LM, `FusedScaleMaskSoftmax` in
    megatron/model/fused_softmax.py; versions before 2022 take 2,048 keys at most.
    """
    matrices = sequences * _share(transformer.heads, tensor_parallel)
    fused = precision_bytes == 2 and matrices % 4 == 0 and queries % 4 == 0 and 16 < keys <= 16384
    return 0 if fused else matrices * queries * keys


@lru_cache(maxsize=1024)
def layer_kernels(transformer: Transformer, expert_parallel: int = 1) -> int:
    """Kernels that one layer's forward pass launches.

    The matmuls, flash attention, two norms, those of query and key if any, two residual additions, the rotary position if any,
    and the activation of an MLP, or of all experts; a mixture of experts also chooses, sends and combines.
    """
    t = transformer
    matmuls = layer_matmuls(t, 1, 1, expert_parallel)
    kernels = sum(matmul.kernels for matmul in matmuls) + _activations(matmuls)
    return kernels + 1 + 2 + 2 + 2 * t.qk_norm + (t.position == "rotary") + (0 if t.experts is None else 3)
