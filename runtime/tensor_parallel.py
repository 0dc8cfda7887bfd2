"""What a tensor-parallel group computes together: linear maps, the embedding and the loss, divided over its ranks.

Shapes: S sequence, B sequences of a micro-batch, H hidden, K and N the input and output width of a matrix, V the rows of the
vocabulary that this rank holds. With sequence parallelism, S of what stands outside of a divided region is this rank's rows,
[S index / degree, S (index + 1) / degree) of the sequence; inside it is always the whole sequence.

On a group of one every function is the plain one of torch. The collectives of a group are begun in one order on all its
ranks, also while a backward recomputes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from runtime.collectives import MAX, Pending, all_gather, all_reduce, reduce_scatter
from runtime.pacer import Pacer


@dataclass(frozen=True)
class TensorGroup:
    """One rank's place in its tensor-parallel group: number `index` of `degree`. `process_group` is None for a group of one."""

    index: int
    degree: int
    process_group: dist.ProcessGroup | None
    sequence_parallel: bool = False
    pacer: Pacer | None = None
    """What keeps the rank at the pace of a device that is emulated, also between collectives; None for the device's own pace."""

    def begun(self, begin: Callable[[], Pending]) -> Pending:
        """The work of a collective of the group, which it begins."""
        return begin() if self.pacer is None else self.pacer.collective(begin)

    @property
    def scatters(self) -> bool:
        """Whether activations outside of divided regions are divided by rows of the sequence."""
        return self.sequence_parallel and self.process_group is not None


Some = TypeVar("Some", bound=Callable[..., Any])


_EAGER: list[Callable[..., Any]] = []
"""Functions and methods that `compiled_by_torch` has still to take out of graphs."""


def eager(function: Some) -> Some:
    """The function, which `compiled_by_torch` leaves out: collectives and what a schedule puts off are no part of a graph."""
    _EAGER.append(function)
    return function


def compiled_by_torch(function: Some) -> Some:
    """The function compiled by torch, but for what is `eager`."""
    while _EAGER:  # only now: torch's compiler takes a worker as long to load as all else of torch
        one = _EAGER.pop()
        *outer, name = one.__qualname__.split(".")
        owner = reduce(getattr, outer, sys.modules[one.__module__])
        setattr(owner, name, torch.compiler.disable(one))  # type: ignore[no-untyped-call]
    made: Some = torch.compile(function)  # type: ignore[assignment]
    return made


# --- Collectives -----------------------------------------------------------------------------------------------------

# By their names since torch 2.13, which warns of the earlier ones.

Begun = tuple[torch.Tensor, Pending | None]
"""A tensor, and what is to be waited for before it is used."""


def _sum(x: torch.Tensor, group: TensorGroup) -> Begun:
    """The sum of the ranks' tensors, begun; with sequence parallelism this rank's rows of it. Overwrites `x` without it."""
    x = x.contiguous()
    if not group.scatters:
        return x, group.begun(lambda: all_reduce(x, group.process_group))
    rows = x.new_empty(x.shape[0] // group.degree, *x.shape[1:])
    return rows, group.begun(lambda: reduce_scatter(rows, x, group.process_group))


def _gather(x: torch.Tensor, group: TensorGroup) -> Begun:
    """The whole sequence of which each rank has its rows, begun; `x` itself without sequence parallelism."""
    if not group.scatters:
        return x, None
    whole = x.new_empty(x.shape[0] * group.degree, *x.shape[1:])
    return whole, group.begun(lambda: all_gather(whole, x.contiguous(), group.process_group))


def _ended(begun: Begun) -> torch.Tensor:
    """The tensor of a collective that has ended."""
    x, work = begun
    if work is not None:
        work.wait()
    return x


class _Leave(torch.autograd.Function):
    """The sum over the ranks; its gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return _ended(_sum(x if group.scatters else x.clone(memory_format=torch.contiguous_format), group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _ended(_gather(gradients[0], ctx.group)), None


def leave(x_SBH: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """The sum of what the ranks have computed, where a divided region ends; with sequence parallelism this rank's rows of it."""
    return x_SBH if group.process_group is None else _left(x_SBH, group)


@eager
def _left(x_SBH: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    left: torch.Tensor = _Leave.apply(x_SBH, group)  # type: ignore[no-untyped-call]
    return left


class _Enter(torch.autograd.Function):
    """What every rank has, or has its rows of; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return _ended(_gather(x.view_as(x), group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        group, (gradient,) = ctx.group, gradients
        return _ended(_sum(gradient if group.scatters else gradient.clone(memory_format=torch.contiguous_format), group)), None


def enter(x_SBH: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """The whole sequence, where a divided region begins that is more than a linear map (see `column_linear`)."""
    if group.process_group is None:
        return x_SBH
    whole: torch.Tensor = _Enter.apply(x_SBH, group)  # type: ignore[no-untyped-call]
    return whole


# --- Linear maps -----------------------------------------------------------------------------------------------------

Gradients = tuple[torch.Tensor, torch.Tensor | None]
"""Of a matrix, and of its bias where it has one."""


class DeferredWeights:
    """The gradients of matrices that a backward puts off, for schedules that compute them apart from the input's.

    `accumulate(parameter, gradient)` shall do what autograd does with a parameter's gradient.
    """

    def __init__(self, accumulate: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._accumulate = accumulate
        self._pending: deque[tuple[tuple[torch.Tensor | None, ...], Callable[[], Gradients]]] | None = None

    @contextmanager
    def collecting(self) -> Iterator[Callable[[], None]]:
        """A function that computes and accumulates, once, what backwards inside the `with` put off.

        Outside of it they put off nothing.
        """
        outer, self._pending = self._pending, deque()
        try:
            yield partial(self._run, self._pending)
        finally:
            self._pending = outer

    def put_off(self, parameters: tuple[torch.Tensor | None, ...], gradients: Callable[[], Gradients]) -> bool:
        """Whether the gradients will be computed later: not so outside of `collecting`."""
        if self._pending is None:
            return False
        self._pending.append((parameters, gradients))
        return True

    def _run(self, pending: deque[tuple[tuple[torch.Tensor | None, ...], Callable[[], Gradients]]]) -> None:
        with torch.no_grad():
            while pending:  # taken out one by one, so that the activations of each are freed after it
                parameters, gradients = pending.popleft()
                for parameter, gradient in zip(parameters, gradients(), strict=True):
                    if parameter is not None and gradient is not None:
                        self._accumulate(parameter, gradient)


@dataclass(frozen=True)
class Remade:
    """How the input of a linear map comes of a tensor that is kept anyway, so that the backward can compute it again."""

    function: Callable[..., torch.Tensor]
    """Of the base and these parameters."""
    base: torch.Tensor
    parameters: tuple[torch.Tensor | None, ...] = ()


class _Linear(torch.autograd.Function):
    """x W^T + bias, or x W where W is stored `transposed`. With a `group`, x enters its divided region.

    With `remade`, x is made again of its `base`, which is kept in the place of x until the weight's gradient needs x.

    Entering is: x is the same on all ranks and the ranks' gradients are summed; or, with sequence parallelism, x is gathered,
    again for the backward so that only this rank's rows are kept, and the gradients are summed and scattered. Both
    collectives of the backward run beside its matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_SBK: torch.Tensor,
        weight: torch.Tensor,
        bias_N: torch.Tensor | None,
        transposed: bool,
        group: TensorGroup | None,
        deferred: DeferredWeights | None,
        remade: Remade | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_SBK if remade is None else remade.base)
        # Not the whole: the base shall live no longer than what autograd has saved of it.
        ctx.remade = None if remade is None else (remade.function, remade.parameters)
        # Not saved through autograd: under a checkpoint what comes back of that is a copy, not the parameter to accumulate in.
        ctx.weight, ctx.bias, ctx.transposed, ctx.group, ctx.deferred = weight, bias_N, transposed, group, deferred
        if group is not None:
            x_SBK = _ended(_gather(x_SBK, group))
        return F.linear(x_SBK, weight.t() if transposed else weight, bias_N)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient_SBN = gradients[0]
        weight, bias_N, transposed, group = ctx.weight, ctx.bias, ctx.transposed, ctx.group
        (kept,) = (saved.detach() for saved in ctx.saved_tensors)
        function, parameters = ctx.remade or (None, ())

        def gathered() -> Begun:
            with torch.no_grad():
                x_SBK = kept if function is None else function(kept, *parameters)
            return (x_SBK, None) if group is None else _gather(x_SBK, group)

        def of_weights(begun: Begun | None = None) -> Gradients:
            x_TK, gradient_TN = _ended(begun or gathered()).flatten(0, 1), gradient_SBN.flatten(0, 1)
            of_weight = x_TK.t() @ gradient_TN if transposed else gradient_TN.t() @ x_TK
            return of_weight, None if bias_N is None else gradient_TN.sum(0)

        put_off = ctx.deferred is not None and ctx.deferred.put_off((weight, bias_N), of_weights)
        if put_off:  # ZeRO 3 releases the parameters before the gradients are asked for
            parameters = tuple(None if held is None else held.detach().clone() for held in parameters)
        begun = None if put_off else gathered()
        of_input: Begun | None = None
        if ctx.needs_input_grad[0]:
            partial_SBK = gradient_SBN @ (weight.t() if transposed else weight)
            of_input = (partial_SBK, None) if group is None else _sum(partial_SBK, group)
        of_weight, of_bias = (None, None) if put_off else of_weights(begun)
        return None if of_input is None else _ended(of_input), of_weight, of_bias, None, None, None, None


@eager
def _linear(
    x_SBK: torch.Tensor,
    weight: torch.Tensor,
    bias_N: torch.Tensor | None,
    transposed: bool,
    group: TensorGroup | None,
    deferred: DeferredWeights | None,
    remade: Remade | None,
) -> torch.Tensor:
    detached = None if remade is None else replace(remade, base=remade.base.detach())
    found: torch.Tensor = _Linear.apply(x_SBK, weight, bias_N, transposed, group, deferred, detached)  # type: ignore[no-untyped-call]
    return found


def column_linear(
    x_SBK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    group: TensorGroup,
    deferred: DeferredWeights | None = None,
    remade: Remade | None = None,
) -> torch.Tensor:
    """This rank's columns y_SBN of a linear map, whose matrix and bias are divided by its outputs: a divided region begins.

    What its input is `remade` of is kept for the backward in place of the input.
    """
    if group.process_group is None and deferred is None and remade is None:
        return F.linear(x_SBK, weight_NK, bias_N)
    return _linear(x_SBK, weight_NK, bias_N, False, None if group.process_group is None else group, deferred, remade)


def row_linear(
    x_SBK: torch.Tensor,
    weight_KN: torch.Tensor,
    bias_N: torch.Tensor | None,
    group: TensorGroup,
    deferred: DeferredWeights | None = None,
    remade: Remade | None = None,
) -> torch.Tensor:
    """The whole result y_SBN of a linear map, whose matrix is divided by its inputs and stored (in, out): a divided region ends.

    With sequence parallelism this rank's rows of it. The bias is whole on every rank. As for `remade`, see `column_linear`.
    """
    if deferred is None and remade is None:
        y_SBN = F.linear(x_SBK, weight_KN.t())
    else:
        y_SBN = _linear(x_SBK, weight_KN, None, True, None, deferred, remade)
    y_SBN = leave(y_SBN, group)
    return y_SBN if bias_N is None else y_SBN + bias_N


def own_linear(
    x_TK: torch.Tensor, weight: torch.Tensor, transposed: bool, deferred: DeferredWeights | None, remade: Remade | None = None
) -> torch.Tensor:
    """A linear map y_TN inside a divided region, of a matrix (out, in), or (in, out) where it is `transposed`.

    What its input is `remade` of, flattened but for its last dimension, is kept for the backward in place of the input.
    """
    if deferred is None and remade is None:
        return F.linear(x_TK, weight.t() if transposed else weight)
    return _linear(x_TK[:, None], weight, None, transposed, None, deferred, remade)[:, 0]


# --- The vocabulary --------------------------------------------------------------------------------------------------


def vocabulary_embedding(tokens_SB: torch.Tensor, weight_VH: torch.Tensor, start_row: int, group: TensorGroup) -> torch.Tensor:
    """The embeddings x_SBH of tokens (with sequence parallelism this rank's rows), where it holds V rows from `start_row` on."""
    if group.process_group is None:
        return F.embedding(tokens_SB, weight_VH)
    if weight_VH.shape[0] == 0:
        # Nothing to look up, but a part of the graph all the same: this rank joins in the backward's collective.
        return leave(weight_VH.sum() + weight_VH.new_zeros(*tokens_SB.shape, weight_VH.shape[1]), group)
    row_SB = tokens_SB - start_row
    elsewhere_SB = (row_SB < 0) | (row_SB >= weight_VH.shape[0])
    x_SBH = F.embedding(row_SB.masked_fill(elsewhere_SB, 0), weight_VH)
    return leave(x_SBH.masked_fill(elsewhere_SB[..., None], 0.0), group)


LOSS_NUMBERS = 2**25
"""Logits whose softmax is computed at once, in fp32: of all tokens together it would be the largest tensor of a training."""


class _CrossEntropySum(torch.autograd.Function):
    """The loss of `cross_entropy_sum`. Keeps the logits as they are, and their softmax only as its denominator."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, column_T: torch.Tensor, here_T: torch.Tensor, group: TensorGroup
    ) -> torch.Tensor:
        wide = _wide(logits_TV)
        maximum_T = logits_TV.amax(-1).to(wide)
        group.begun(lambda: all_reduce(maximum_T, group.process_group, MAX)).wait()
        target_T = (logits_TV.gather(-1, column_T[:, None])[:, 0].to(wide) - maximum_T).masked_fill_(~here_T, 0.0)
        sum_T = torch.empty_like(maximum_T)
        for rows in _row_parts(logits_TV):
            torch.sum((logits_TV[rows] - maximum_T[rows, None]).exp_(), -1, out=sum_T[rows])
        both_2T = torch.stack((sum_T, target_T))
        group.begun(lambda: all_reduce(both_2T, group.process_group)).wait()
        log_T = both_2T[0].log()
        ctx.save_for_backward(logits_TV, maximum_T + log_T, column_T, here_T)
        return (log_T - both_2T[1]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_TV, denominator_T, column_T, here_T = ctx.saved_tensors
        of_logits_TV = torch.empty_like(logits_TV)
        for rows in _row_parts(logits_TV):
            softmax = (logits_TV[rows] - denominator_T[rows, None]).exp_()
            softmax.scatter_add_(-1, column_T[rows, None], -here_T[rows, None].to(softmax.dtype))
            torch.mul(softmax, gradients[0], out=of_logits_TV[rows])
        return of_logits_TV, None, None, None


class _OwnCrossEntropySum(torch.autograd.Function):
    """The same of a rank that has all columns: with fewer passes over them, for torch makes a softmax in one."""

    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, label_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits_TV, label_T)
        losses = [
            F.nll_loss(F.log_softmax(logits_TV[rows], -1, dtype=_wide(logits_TV)), label_T[rows], reduction="sum")
            for rows in _row_parts(logits_TV)
        ]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_TV, label_T = ctx.saved_tensors
        of_logits_TV = torch.empty_like(logits_TV)
        for rows in _row_parts(logits_TV):
            softmax = F.softmax(logits_TV[rows], -1, dtype=_wide(logits_TV))
            softmax.scatter_add_(-1, label_T[rows, None], softmax.new_full((1, 1), -1.0).expand(len(softmax), 1))
            torch.mul(softmax, gradients[0], out=of_logits_TV[rows])
        return of_logits_TV, None


def _row_parts(logits_TV: torch.Tensor) -> list[slice]:
    """The rows of logits, as many at a time as `LOSS_NUMBERS` allows."""
    tokens, columns = logits_TV.shape
    each = max(1, LOSS_NUMBERS // max(1, columns))
    return [slice(start, start + each) for start in range(0, tokens, each)]


def _wide(logits: torch.Tensor) -> torch.dtype:
    """The precision that a loss is computed in."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def cross_entropy_sum(logits_SBV: torch.Tensor, labels_SB: torch.Tensor, start_row: int, group: TensorGroup) -> torch.Tensor:
    """The negative log likelihood of the labels, summed over all tokens, where this rank has the logits from `start_row` on.

    In fp32, or fp64 where the logits are; the same on all ranks. Every label is one of the ranks' columns; a rank may have none.
    """
    if group.process_group is None:
        own: torch.Tensor = _OwnCrossEntropySum.apply(logits_SBV.flatten(0, 1), labels_SB.flatten())  # type: ignore[no-untyped-call]
        return own
    columns, column_SB = logits_SBV.shape[-1], labels_SB - start_row
    here_SB = (column_SB >= 0) & (column_SB < columns)
    if columns == 0:
        logits_SBV = F.pad(logits_SBV, (0, 1), value=-torch.inf)  # one column that adds nothing to the softmax
    column_SB = column_SB.clamp(0, max(columns, 1) - 1)
    loss: torch.Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
        logits_SBV.flatten(0, 1), column_SB.flatten(), here_SB.flatten(), group
    )
    return loss
