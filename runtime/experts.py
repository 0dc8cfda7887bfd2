"""The mixture of experts that stands in a layer in the place of its MLP: the router, the way of tokens to their experts and back.

No token is dropped, and none is sent elsewhere because an expert has many: the loss is that of the tokens alone, so that what is
learned is the same under every plan. Weights of the chosen experts are those of a softmax over the chosen, in fp32 at least
(Jiang et al., 2024, Mixtral of Experts, arXiv:2401.04088, section 2.1).

Shapes: T tokens of a tensor-parallel group, E experts, K those that a token is sent to, H hidden. All of it is a divided region
of tensor parallelism: each rank has its columns of every expert, sends all tokens, and what it computes is its part of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runtime.collectives import all_to_all
from runtime.parameters import Section, experts_of
from runtime.tensor_parallel import DeferredWeights, Remade, TensorGroup, eager, enter, leave, own_linear
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
    """The rows that come from the ranks of a group, as many from each as `coming` says, for those that go there."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, going: list[int], coming: list[int], expert_group: ExpertGroup, group: TensorGroup
    ) -> torch.Tensor:
        ctx.going, ctx.coming, ctx.expert_group, ctx.group = going, coming, expert_group, group
        return _exchanged(x_TH, going, coming, expert_group, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _exchanged(gradients[0], ctx.coming, ctx.going, ctx.expert_group, ctx.group), None, None, None, None


def _sent(x_TH: torch.Tensor, going: list[int], coming: list[int], expert_group: ExpertGroup, group: TensorGroup) -> torch.Tensor:
    sent: torch.Tensor = _Sent.apply(x_TH, going, coming, expert_group, group)  # type: ignore[no-untyped-call]
    return sent


def _exchanged(
    x_TH: torch.Tensor, going: Sequence[int], coming: Sequence[int], expert_group: ExpertGroup, group: TensorGroup
) -> torch.Tensor:
    arriving = x_TH.new_empty(sum(coming), *x_TH.shape[1:])
    x_TH = x_TH.contiguous()
    group.begun(lambda: all_to_all(arriving, x_TH, coming, going, expert_group.process_group)).wait()
    return arriving


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

        def matrices(name: str) -> tuple[nn.Parameter, nn.Parameter]:
            ups = ("gate", "up") if transformer.gated else ("up",)
            return section.parameter(*(f"{name}.{part}.weight" for part in ups)), section.parameter(f"{name}.down.weight")

        self.router_EH = section.parameter(f"{at}.router.weight")
        index, degree = (0, 1) if expert_group is None else (expert_group.index, expert_group.degree)
        self.own = [matrices(f"{at}.experts.{number}") for number in experts_of(self.moe.experts, index, degree)]
        self.shared = matrices(f"{at}.shared") if self.moe.shared_experts else None
        # Experts in the order in which the ranks of the process group have them, so that what goes to one lies side by side.
        order = (0,) if expert_group is None else expert_group.order
        slots = [number for index in order for number in experts_of(self.moe.experts, index, degree)]
        self.slot_of = torch.tensor(slots, device=self.router_EH.device).argsort()

    @eager
    def forward(self, x_SBH: torch.Tensor, again: Remade | None = None) -> torch.Tensor:
        """What the experts make of the stream's normed rows, which are `again` made of the rows themselves, if that is given."""
        group, moe = self.group, self.moe
        if group.process_group is not None:
            again = None  # what all ranks' rows together would be made of, none has
        x_SBH = enter(x_SBH, group)
        x_TH = x_SBH.flatten(0, 1)
        logits_TE = own_linear(x_TH, self.router_EH, False, self.deferred, again)
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        chosen_TK, expert_TK = logits_TE.to(wide).topk(moe.top_k, dim=-1)
        weight_TK = chosen_TK.softmax(-1).to(x_TH.dtype)

        slots = self.slot_of[expert_TK.flatten()]
        order = slots.argsort(stable=True)
        back = order.argsort()
        sent = _rows(x_TH, order // moe.top_k, back)
        made = self._made(sent, torch.bincount(slots, minlength=moe.experts))
        returned_TKH = _rows(made, back, order).view(-1, moe.top_k, x_TH.shape[-1])
        y_TH = (returned_TKH * weight_TK[..., None]).sum(1)
        if self.shared is not None:
            y_TH = y_TH + self._mlp(x_TH, self.shared, again)
        return leave(y_TH.view_as(x_SBH), group)

    def _made(self, sent: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """What the experts make of rows that lie expert by expert, so many of each: of those of other ranks there."""
        expert_group = self.expert_group
        if expert_group is None:
            return self._each(sent, counts_E.tolist())
        arriving_E = torch.empty_like(counts_E)
        each = len(self.own)
        rows = [each] * expert_group.degree
        self.group.begun(lambda: all_to_all(arriving_E, counts_E, rows, rows, expert_group.process_group)).wait()
        coming_RE, going_RE = arriving_E.view(expert_group.degree, each), counts_E.view(expert_group.degree, each)
        coming, going = coming_RE.sum(1).tolist(), going_RE.sum(1).tolist()
        here = _sent(sent, going, coming, expert_group, self.group)
        # From rank by rank, in each expert by expert, to expert by expert.
        number = torch.arange(each, device=sent.device).repeat(expert_group.degree).repeat_interleave(coming_RE.flatten())
        order = number.argsort(stable=True)
        back = order.argsort()
        made = self._each(_rows(here, order, back), coming_RE.sum(0).tolist())
        return _sent(_rows(made, back, order), coming, going, expert_group, self.group)

    def _each(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """What this rank's experts make of rows that lie expert by expert, so many of each."""
        parts: Sequence[torch.Tensor] = rows.split(counts)  # type: ignore[no-untyped-call]
        return torch.cat([self._mlp(part, matrices) for part, matrices in zip(parts, self.own, strict=True)])

    def _mlp(self, x_TH: torch.Tensor, matrices: tuple[nn.Parameter, nn.Parameter], again: Remade | None = None) -> torch.Tensor:
        up, down = matrices
        wide = own_linear(x_TH, up, False, self.deferred, again)
        remade = Remade(self.activation, wide[:, None]) if self.remakes_activation else None
        return own_linear(self.activation(wide), down, True, self.deferred, remade)
