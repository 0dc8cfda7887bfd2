"""The mixture of experts that stands in a layer in the place of its MLP: the router, the way of tokens to their experts and back.

No token is dropped, and none is sent elsewhere because an expert has many: the loss is that of the tokens alone, so that what is
learned is the same under every plan. Weights of the chosen experts are those of a softmax over the chosen, in fp32 at least
(Jiang et al., 2024, Mixtral of Experts, arXiv:2401.04088, section 2.1).

Shapes: T tokens of a tensor-parallel group, E experts, K those that a token is sent to, H hidden. All of it is a divided region
of tensor parallelism: each rank has its columns of every expert, sends all tokens, and what it computes is its part of a sum.
With sequence parallelism, where other groups have other experts, it sends its own part of the tokens; what arrives at all ranks
of a group they gather, and what they make of it they sum. With whole experts on each of them there is nothing to be gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_to_all
from runtime.parameters import Section, experts_of
from runtime.tensor_parallel import DeferredWeights, Gradients, Remade, TensorGroup, eager, enter, leave, own_linear
from sim.spec.transformer import Transformer


@dataclass(frozen=True)
class ExpertGroup:
    """One rank's place among those that divide a layer's experts: number `index` of `degree`, which has as many of them.

    `order` are these numbers in the order of the process group's ranks.
    """

    index: int
    degree: int
    order: tuple[int, ...]
    process_group: dist.ProcessGroup
    whole: bool = False
    """Whether each tensor rank has whole experts, and not its columns of each."""


class _Rows(torch.autograd.Function):
    """Rows of a tensor, each as many times: `taken` says which, one after another, and `back` where the copies of each went."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, taken: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.back, ctx.shape = back, (len(x_TH), len(taken) // max(1, len(x_TH)), *x_TH.shape[1:])
        return x_TH[taken]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # In this order, whichever thread of a GPU comes first, sums are the same in every run.
        return gradients[0][ctx.back].view(ctx.shape).sum(1), None, None


def _rows(x_TH: torch.Tensor, taken: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = _Rows.apply(x_TH, taken, back)  # type: ignore[no-untyped-call]
    return rows


class _Sent(torch.autograd.Function):
    """The rows that come from the ranks of a process group, as many from each as `coming` says, for those that go there."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, going: list[int], coming: list[int], among: dist.ProcessGroup | None, group: TensorGroup
    ) -> torch.Tensor:
        ctx.going, ctx.coming, ctx.among, ctx.group = going, coming, among, group
        return _exchanged(x_TH, going, coming, among, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _exchanged(gradients[0], ctx.coming, ctx.going, ctx.among, ctx.group), None, None, None, None


def _sent(
    x_TH: torch.Tensor, going: list[int], coming: list[int], among: dist.ProcessGroup | None, group: TensorGroup
) -> torch.Tensor:
    sent: torch.Tensor = _Sent.apply(x_TH, going, coming, among, group)  # type: ignore[no-untyped-call]
    return sent


def _exchanged(
    x_TH: torch.Tensor, going: Sequence[int], coming: Sequence[int], among: dist.ProcessGroup | None, group: TensorGroup
) -> torch.Tensor:
    arriving = x_TH.new_empty(sum(coming), *x_TH.shape[1:])
    x_TH = x_TH.contiguous()
    group.begun(lambda: all_to_all(arriving, x_TH, coming, going, among)).wait()
    return arriving


# --- Matrices of all experts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """Rows that lie group by group, one for each expert: `ends` (int32) is behind the last row of each."""

    ends: torch.Tensor

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The first row and the one behind the last of each group; a GPU is waited for."""
        ends: list[int] = self.ends.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


def _at_once(*operands: torch.Tensor) -> bool:
    """Whether the GPU has a kernel for the products of all groups, which also spares the host the numbers of rows.

    Elsewhere torch's own function would ask for them and take the groups one by one. Its rows are of 16 bytes at least.
    """
    x = operands[0]
    if not len(x) or not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
        return False
    return all(operand.shape[-1] and operand.shape[-1] % 8 == 0 for operand in operands)


def _products(x_TK: torch.Tensor, weight_EKN: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The rows y_TN of each group times its expert's matrix."""
    if _at_once(x_TK, weight_EKN, weight_EKN.mT):
        found: torch.Tensor = F.grouped_mm(x_TK, weight_EKN, offs=groups.ends)
        return found
    y_TN = x_TK.new_empty(len(x_TK), weight_EKN.shape[2])
    for (start, stop), weight_KN in zip(groups.spans, weight_EKN, strict=True):
        torch.mm(x_TK[start:stop], weight_KN, out=y_TN[start:stop])
    return y_TN


def _sums_of_products(x_TK: torch.Tensor, y_TN: torch.Tensor, groups: Groups) -> torch.Tensor:
    """For each expert the matrix x^T y (E, K, N) of its group's rows."""
    if _at_once(x_TK, y_TN):
        found: torch.Tensor = F.grouped_mm(x_TK.t(), y_TN, offs=groups.ends)
        return found
    sums_EKN = x_TK.new_empty(len(groups.spans), x_TK.shape[1], y_TN.shape[1])
    for (start, stop), sum_KN in zip(groups.spans, sums_EKN, strict=True):
        torch.mm(x_TK[start:stop].t(), y_TN[start:stop], out=sum_KN)
    return sums_EKN


class _GroupedLinear(torch.autograd.Function):
    """x W^T of each group of rows with its expert's W, of which the weight has the rows one after another; x W if `transposed`.

    With `remade`, as in a `_Linear` of `runtime.tensor_parallel`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        transposed: bool,
        groups: Groups,
        deferred: DeferredWeights | None,
        remade: Remade | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_TK if remade is None else remade.base)
        ctx.function = None if remade is None else remade.function
        ctx.weight, ctx.transposed, ctx.groups, ctx.deferred = weight, transposed, groups, deferred
        stacked = _stacked(weight, groups)
        return _products(x_TK, stacked if transposed else stacked.mT, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, transposed, groups, function = ctx.weight, ctx.transposed, ctx.groups, ctx.function
        gradient_TN = gradients[0].contiguous()
        (kept,) = (saved.detach() for saved in ctx.saved_tensors)

        def of_weights() -> Gradients:
            with torch.no_grad():
                x_TK = kept if function is None else function(kept)
            rows, columns = (x_TK, gradient_TN) if transposed else (gradient_TN, x_TK)
            return _sums_of_products(rows, columns, groups).view_as(weight), None

        put_off = ctx.deferred is not None and ctx.deferred.put_off((weight, None), of_weights)
        stacked = _stacked(weight, groups)
        of_input = _products(gradient_TN, stacked.mT if transposed else stacked, groups) if ctx.needs_input_grad[0] else None
        return of_input, None if put_off else of_weights()[0], None, None, None, None


def _stacked(weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The experts' matrices, one behind another."""
    return weight.detach().view(len(groups.ends), -1, weight.shape[-1])


def _grouped_linear(
    x_TK: torch.Tensor,
    weight: torch.Tensor,
    transposed: bool,
    groups: Groups,
    deferred: DeferredWeights | None,
    remade: Remade | None = None,
) -> torch.Tensor:
    detached = None if remade is None else replace(remade, base=remade.base.detach())
    made: torch.Tensor = _GroupedLinear.apply(x_TK, weight, transposed, groups, deferred, detached)  # type: ignore[no-untyped-call]
    return made


# --- The mixture -----------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """The experts of one layer, of which this rank has its part, and their router."""

    def __init__(
        self,
        transformer: Transformer,
        section: Section,
        layer_index: int,
        group: TensorGroup,
        activation: Callable[[torch.Tensor], torch.Tensor],
        remakes_activation: bool = False,
        deferred: DeferredWeights | None = None,
        expert_group: ExpertGroup | None = None,
    ) -> None:
        super().__init__()
        assert transformer.experts is not None
        self.moe, at = transformer.experts, f"layers.{layer_index}.mlp"
        self.group, self.deferred, self.expert_group = group, deferred, expert_group
        self.activation, self.remakes_activation = activation, remakes_activation

        ups = ("gate", "up") if transformer.gated else ("up",)
        index, degree = (0, 1) if expert_group is None else (expert_group.index, expert_group.degree)
        own = [f"{at}.experts.{number}" for number in experts_of(self.moe.experts, index, degree)]
        self.router_EH = section.parameter(f"{at}.router.weight")
        self.own_up = section.parameter(*(f"{name}.{part}.weight" for name in own for part in ups))
        self.own_down = section.parameter(*(f"{name}.down.weight" for name in own))
        self.shared: tuple[nn.Parameter, nn.Parameter] | None = None
        if self.moe.shared_experts:
            up = section.parameter(*(f"{at}.shared.{part}.weight" for part in ups))
            self.shared = up, section.parameter(f"{at}.shared.down.weight")
        # Experts in the order in which the ranks of the process group have them, so that what goes to one lies side by side.
        order = (0,) if expert_group is None else expert_group.order
        slots = [number for index in order for number in experts_of(self.moe.experts, index, degree)]
        self.slot_of = torch.tensor(slots, device=self.router_EH.device).argsort()
        self.numbers = torch.arange(len(slots), device=self.router_EH.device)

    @eager
    def forward(self, x_SBH: torch.Tensor, again: Remade | None = None) -> torch.Tensor:
        """What the experts make of the stream's normed rows, which are `again` made of the rows themselves, if that is given."""
        own = self.expert_group is not None and (self.expert_group.whole or self.group.scatters)
        entered_SBH = x_SBH if own and self.shared is None else enter(x_SBH, self.group)
        # What all ranks' rows together would be made of, none has.
        entered_again = again if self.group.process_group is None else None
        if own:
            y_SBH = self._routed(x_SBH, again)
            return y_SBH if self.shared is None else y_SBH + leave(self._shared_experts(entered_SBH, entered_again), self.group)
        y_SBH = self._routed(entered_SBH, entered_again)
        return leave(y_SBH if self.shared is None else y_SBH + self._shared_experts(entered_SBH, entered_again), self.group)

    def _routed(self, x_SBH: torch.Tensor, again: Remade | None) -> torch.Tensor:
        """What the experts make of these rows that the router chooses for them, weighted."""
        moe, x_TH = self.moe, x_SBH.flatten(0, 1)
        logits_TE = own_linear(x_TH, self.router_EH, False, self.deferred, again)
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        chosen_TK, expert_TK = logits_TE.to(wide).topk(moe.top_k, dim=-1)
        weight_TK = chosen_TK.softmax(-1).to(x_TH.dtype)

        slots = self.slot_of[expert_TK.flatten()]
        sorted_slots, order = slots.sort(stable=True)
        back = _inverse(order)
        sent = _rows(x_TH, order // moe.top_k, back)
        made = self._made(sent, torch.searchsorted(sorted_slots, self.numbers, right=True, out_int32=True))
        returned_TKH = _rows(made, back, order).view(-1, moe.top_k, x_TH.shape[-1])
        return (returned_TKH * weight_TK[..., None]).sum(1).view_as(x_SBH)

    def _shared_experts(self, x_SBH: torch.Tensor, again: Remade | None) -> torch.Tensor:
        """What the experts make of these rows to which every token goes."""
        assert self.shared is not None
        up, down = self.shared
        wide_TF = own_linear(x_SBH.flatten(0, 1), up, False, self.deferred, again)
        y_TH = own_linear(self.activation(wide_TF), down, True, self.deferred, self._remade(wide_TF[:, None]))
        return y_TH.view_as(x_SBH)

    def _made(self, sent: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """What the experts make of rows that lie expert by expert: of those of other ranks there."""
        expert_group, group = self.expert_group, self.group
        if expert_group is None:
            return self._each(sent, Groups(ends_E))
        among, each = expert_group.process_group, len(ends_E) // expert_group.degree
        going_RE = ends_E.diff(prepend=ends_E.new_zeros(1)).view(expert_group.degree, each)
        coming_RE = _exchanged(going_RE, [1] * expert_group.degree, [1] * expert_group.degree, among, group)
        going, coming = going_RE.sum(1).tolist(), coming_RE.sum(1).tolist()
        here = _sent(sent, going, coming, among, group)
        # What tensor ranks with columns of every expert got of their parts of the tokens all of them need.
        gathers = group.scatters and not expert_group.whole
        blocks_BE, own, sizes = coming_RE, len(here), [len(here)]
        if gathers:
            ranks = group.degree
            counts = [len(coming_RE)] * ranks
            blocks_BE = _exchanged(coming_RE.repeat(ranks, 1), counts, counts, group.process_group, group)
            sizes = blocks_BE.view(ranks, -1).sum(1).tolist()
            here = _sent(here.repeat(ranks, 1), [own] * ranks, sizes, group.process_group, group)
        # From block by block, in each expert by expert, to expert by expert.
        number = self.numbers[:each].repeat(len(blocks_BE)).repeat_interleave(blocks_BE.flatten(), output_size=sum(sizes))
        order = number.argsort(stable=True)
        back = _inverse(order)
        made = self._each(_rows(here, order, back), Groups(blocks_BE.sum(0).cumsum(0).to(torch.int32)))
        made = _rows(made, back, order)
        if gathers:
            made = _sent(made, sizes, [own] * len(sizes), group.process_group, group)
            made = made.view(len(sizes), own, made.shape[-1]).sum(0)
        return _sent(made, coming, going, among, group)

    def _each(self, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
        """What this rank's experts make of rows that lie expert by expert."""
        wide = _grouped_linear(rows, self.own_up, False, groups, self.deferred)
        return _grouped_linear(self.activation(wide), self.own_down, True, groups, self.deferred, self._remade(wide))

    def _remade(self, wide: torch.Tensor) -> Remade | None:
        """How the input of a second matrix comes of the output of the first, where that is kept in its place."""
        return Remade(self.activation, wide) if self.remakes_activation else None


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """Where each number of a permutation stands."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
