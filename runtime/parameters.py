"""The model's parameters as all plans know them, and which of their numbers one rank holds.

Every parameter is stored so that tensor parallelism divides its rows: a matrix whose input is divided (attention output, MLP
down) as (in, out), every other one as (out, in). So whatever a rank holds of a parameter is one stretch of its flattened
numbers, and uneven degrees, slices of the common refinement, ZeRO shards and checkpoints are intervals and nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sim.spec.plan import LayerRange
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

STANDARD_DEVIATION = 0.02
"""Of matrices and embeddings at the start; of those that write into the residual stream 1 / sqrt(2 layers) of it.

Source: Radford et al. (2019), section 2.3.
"""

BLOCK = 2**20
"""Numbers of a parameter that are drawn with one seed, so that a rank draws little beside what it holds."""


@dataclass(frozen=True)
class Parameter:
    """One matrix (`rows`, `width`) of the model, or a vector of `rows` numbers where `width` is None.

    `divided` says how tensor parallelism divides the rows: "whole" (a copy on every rank), "in_part" (one, too, which each
    rank uses for its own part of a layer alone), "heads", "kv_heads" (in units of
    a head of `unit` rows), "columns" (of the MLP) or "vocabulary" (both in equal parts, rounded up).
    """

    name: str
    place: LayerRange
    """(i, i + 1) for layer i, (0, 0) for the embedding, (n, n) for the head of n layers, as in ReduceGradients."""
    rows: int
    width: int | None
    divided: str = "whole"
    unit: int = 1
    initial: str = "normal"
    """normal | residual (a matrix that writes into the residual stream) | ones | zeros."""
    expert: int | None = None
    """The expert that it is of, in a mixture; None for what all tokens meet."""

    @property
    def row_size(self) -> int:
        """Numbers of one row."""
        return 1 if self.width is None else self.width

    @property
    def size(self) -> int:
        """Numbers of the whole parameter."""
        return self.rows * self.row_size

    @property
    def copied(self) -> bool:
        """Whether every rank holds all of it."""
        return self.divided in ("whole", "in_part")

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to biases and norms."""
        return self.width is not None


def place_parameters(transformer: Transformer, place: LayerRange) -> tuple[Parameter, ...]:
    """The parameters of one place: (0, 0) the embedding, (i, i + 1) layer i, (n, n) the head, which has no tied output."""
    t = transformer
    if place == (0, 0):
        found = [Parameter("embedding.tokens.weight", place, t.padded_vocab, t.hidden, "vocabulary")]
        if t.position == "learned":
            found.append(Parameter("embedding.positions.weight", place, t.max_positions, t.hidden))
        return tuple(found)
    if place == (t.layers, t.layers):
        found = _norm(t, "head.norm", place) if t.final_norm else []
        if not t.tied_embeddings:
            found.append(Parameter("head.output.weight", place, t.padded_vocab, t.hidden, "vocabulary"))
        return tuple(found)
    return tuple(_layer(t, place))


def range_parameters(transformer: Transformer, layers: LayerRange) -> tuple[Parameter, ...]:
    """The parameters of the layers of a range, in layer order; of the embedding for (0, 0), of the head for (n, n)."""
    start, stop = layers
    places = [layers] if start == stop else [(i, i + 1) for i in range(start, stop)]
    return tuple(parameter for place in places for parameter in place_parameters(transformer, place))


def model_parameters(transformer: Transformer) -> tuple[Parameter, ...]:
    """All parameters of the model: embedding, layers, head."""
    n = transformer.layers
    return tuple(p for layers in ((0, 0), (0, n), (n, n)) for p in range_parameters(transformer, layers))


def _norm(t: Transformer, name: str, place: LayerRange) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", place, t.hidden, None, initial="ones")
    return [weight, Parameter(f"{name}.bias", place, t.hidden, None, initial="zeros")] if t.norm == "layernorm" else [weight]


def _layer(t: Transformer, place: LayerRange) -> Iterable[Parameter]:
    """One layer's parameters. Query, key and value follow one another, and gate and up, so that each is one matmul.

    So do all experts' gates and ups, and then all that lead down.
    """
    at = f"layers.{place[0]}"
    query, keys = t.heads * t.head_dim, t.kv_heads * t.head_dim
    attention = (("query", query, "heads"), ("key", keys, "kv_heads"), ("value", keys, "kv_heads"))
    yield from _norm(t, f"{at}.attention_norm", place)
    for part, rows, divided in attention:
        yield Parameter(f"{at}.attention.{part}.weight", place, rows, t.hidden, divided, t.head_dim)
    if t.attention_bias in ("qkv", "all"):
        for part, rows, divided in attention:
            yield Parameter(f"{at}.attention.{part}.bias", place, rows, None, divided, t.head_dim, "zeros")
    for part in ("query", "key") if t.qk_norm else ():
        yield Parameter(f"{at}.attention.{part}_norm.weight", place, t.head_dim, None, "in_part", initial="ones")
    yield Parameter(f"{at}.attention.output.weight", place, query, t.hidden, "heads", t.head_dim, "residual")
    if t.attention_bias in ("output", "all"):
        yield Parameter(f"{at}.attention.output.bias", place, t.hidden, None, initial="zeros")
    yield from _norm(t, f"{at}.mlp_norm", place)
    if t.experts is not None:
        moe = t.experts
        yield Parameter(f"{at}.mlp.router.weight", place, moe.experts, t.hidden, "in_part")
        experts = [list(_mlp(t, f"{at}.mlp.experts.{number}", place, moe.ffn, number)) for number in range(moe.experts)]
        yield from (matrix for own in experts for matrix in own if matrix.initial != "residual")
        yield from (matrix for own in experts for matrix in own if matrix.initial == "residual")
        if moe.shared_experts:
            yield from _mlp(t, f"{at}.mlp.shared", place, moe.shared_experts * moe.shared_ffn)
        return
    yield from _mlp(t, f"{at}.mlp", place, t.ffn)


def _mlp(t: Transformer, at: str, place: LayerRange, ffn: int, expert: int | None = None) -> Iterable[Parameter]:
    """The parameters of an MLP of this width between its matrices, or of one expert."""
    ups = ("gate", "up") if t.gated else ("up",)
    for part in ups:
        yield Parameter(f"{at}.{part}.weight", place, ffn, t.hidden, "columns", expert=expert)
    if t.mlp_bias:
        for part in ups:
            yield Parameter(f"{at}.{part}.bias", place, ffn, None, "columns", initial="zeros", expert=expert)
    yield Parameter(f"{at}.down.weight", place, ffn, t.hidden, "columns", initial="residual", expert=expert)
    if t.mlp_bias:
        yield Parameter(f"{at}.down.bias", place, t.hidden, None, initial="zeros", expert=expert)


# --- What a rank holds -----------------------------------------------------------------------------------------------


def share(count: int, index: int, of: int) -> tuple[int, int]:
    """The `(start, stop)` of one of `of` equal parts of `count`, rounded up: the last ones may be smaller, or empty."""
    each = -(-count // of)
    return min(index * each, count), min((index + 1) * each, count)


def experts_of(experts: int, index: int, degree: int) -> range:
    """The experts that rank `index` of those has which divide them evenly."""
    each = experts // degree
    return range(index * each, (index + 1) * each)


def rows_of(parameter: Parameter, index: int, tensor_parallel: int) -> tuple[int, int]:
    """The `(start, stop)` of a parameter's rows on rank `index` of a tensor-parallel group.

    Where there are fewer key-value heads than ranks, neighbouring ranks hold a copy of one head each.
    """
    if parameter.copied:
        return 0, parameter.rows
    units = parameter.rows // parameter.unit
    if units < tensor_parallel and parameter.divided == "kv_heads":
        head = index * units // tensor_parallel
        return head * parameter.unit, (head + 1) * parameter.unit
    start, stop = share(units, index, tensor_parallel)
    return start * parameter.unit, stop * parameter.unit


def is_partial(parameter: Parameter, tensor_parallel: int, sequence_parallel: bool) -> bool:
    """Whether each rank's gradient is only its part of a sum over the ranks of its lane that hold the same rows.

    So it is for copied key-value heads, which each rank uses for its own query heads only; for norms of heads, and for routers,
    of whose experts each rank has its columns; and with sequence parallelism for whatever is whole on every rank, which sees
    only the rank's own tokens.
    """
    if parameter.divided == "in_part":
        return tensor_parallel > 1
    if parameter.divided == "whole":
        return sequence_parallel and tensor_parallel > 1
    return parameter.divided == "kv_heads" and parameter.rows // parameter.unit < tensor_parallel


def check_degree(
    transformer: Transformer, tensor_parallel: int, length: int, sequence_parallel: bool, what: str = "sequence length"
) -> None:
    """Nothing. Raises InputError where a tensor-parallel group of this many ranks cannot share a layer.

    `length` are its tokens of a sequence at once, by the name that a message gives them.
    """
    t, degree = transformer, tensor_parallel
    if t.heads % degree:
        raise InputError(f"the {t.heads} heads of {t.name} do not divide by the tensor-parallel degree {degree}")
    if t.kv_heads % degree and degree % t.kv_heads:
        raise InputError(
            f"the {t.kv_heads} key-value heads of {t.name} neither divide by the tensor-parallel degree {degree} nor divide it"
        )
    if sequence_parallel and length % degree:
        raise InputError(
            f"with sequence parallelism the tensor-parallel degree must divide the {what} {length}, but got {degree}"
        )


@dataclass(frozen=True)
class Segment:
    """What one rank holds of a parameter: its rows `start` to `stop`, at `offset` of the section's flat tensor."""

    parameter: Parameter
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return (self.stop - self.start) * self.parameter.row_size


class Section:
    """The parameters of one layer range on one rank, in one flat tensor: what is reduced, stepped and gathered together.

    Divided parameters stand before whole ones, and in each half matrices before vectors, so that the numbers which the same
    devices hold, and those that decay, lie side by side.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        layers: LayerRange,
        index: int,
        tensor_parallel: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        offset, segments = 0, []
        for parameter in sorted(parameters, key=lambda p: (p.copied, not p.decays)):
            start, stop = rows_of(parameter, index, tensor_parallel)
            segments.append(Segment(parameter, start, stop, offset))
            offset += segments[-1].size
        self.segments = tuple(segments)
        self.segment_of = {segment.parameter.name: segment for segment in segments}
        self.size = offset
        self.values = torch.empty(offset, dtype=dtype, device=device)
        """The parameters in the precision of training; the tensors of `parameter` are views of it."""
        self.parameters: dict[tuple[str, ...], torch.nn.Parameter] = {}
        self.spans: dict[tuple[str, ...], tuple[int, int]] = {}

    def parameter(self, *names: str) -> torch.nn.Parameter:
        """The parameter of these names, stacked by rows: a view of `values`, the same object at every call.

        Raises KeyError for a name that the section does not hold, ValueError for names that do not follow one another.
        """
        if names not in self.parameters:
            segments = [self.segment_of[name] for name in names]
            start = at = segments[0].offset
            for segment in segments:
                if segment.offset != at or segment.parameter.width != segments[0].parameter.width:
                    raise ValueError(f"{', '.join(names)} do not stand one after the other")
                at += segment.size
            released = self.values.untyped_storage().nbytes() == 0
            if released:
                self.restore()  # torch makes no view of memory that is not there
            flat = self.values[start:at]
            width = segments[0].parameter.width
            self.parameters[names] = torch.nn.Parameter(flat if width is None else flat.view(-1, width))
            if released:
                self.release()
            self.spans[names] = (start, at)
        return self.parameters[names]

    def release(self) -> None:
        """Nothing; gives the memory of the values back, until `restore`. The parameters stay, without numbers."""
        self.values.untyped_storage().resize_(0)

    def restore(self) -> torch.Tensor:
        """The values, with memory again, to be written over; autograd does not notice that their numbers were away."""
        self.values.untyped_storage().resize_(self.size * self.values.element_size())
        return self.values.data  # its changes are not counted, as those of `values` are, which a backward would refuse


# --- The first values ------------------------------------------------------------------------------------------------


def initial_values(transformer: Transformer, parameter: Parameter, start: int, stop: int, seed: int) -> torch.Tensor:
    """The first values of some rows of a parameter, flat, in fp32: the same for a seed, whoever asks for which rows."""
    begin, end = start * parameter.row_size, stop * parameter.row_size
    if parameter.initial in ("ones", "zeros"):
        return torch.full((end - begin,), float(parameter.initial == "ones"))
    deviation = STANDARD_DEVIATION
    if parameter.initial == "residual":
        deviation /= math.sqrt(2 * transformer.layers)
    drawn = torch.empty(end - begin)
    generator = torch.Generator()
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        digest = hashlib.sha256(f"{seed}/{parameter.name}/{block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        first = block * BLOCK
        values = torch.randn(min(BLOCK, parameter.size - first), generator=generator)
        a, b = max(begin, first), min(end, first + BLOCK)
        drawn[a - begin : b - begin] = values[a - first : b - first]
    return drawn.mul_(deviation)
