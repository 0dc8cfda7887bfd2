"""Tensor parallelism of 2 and 4 processes against the plain model in one, in fp64.

The processes are started once and compute everything; the tests compare what they left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

from runtime import tensor_parallel
from runtime.model import ModelPart
from runtime.parameters import is_partial, model_parameters, rows_of
from runtime.tensor_parallel import (
    DeferredWeights,
    TensorGroup,
    column_linear,
    cross_entropy_sum,
    leave,
    row_linear,
    vocabulary_embedding,
)
from sim.spec.counts import layer_activation_bytes
from sim.spec.transformer import Transformer
from tests.runtime.processes import soon_started
from tests.runtime.reference import gradients_of, reference_logits, reference_loss, rough_weights, sections_of
from tests.runtime.test_model import GPT, LLAMA, accumulate, kept_bytes

WORLD = 4


@dataclass(frozen=True)
class Case:
    """A model on a tensor-parallel group of `degree`."""

    transformer: Transformer
    degree: int
    sequence_parallel: bool = False
    recompute: str = "none"
    deferred: bool = False
    compiled: bool = False


UNEVEN = replace(LLAMA, ffn=5, padded_vocab=29)
"""Over 4 ranks 2, 2, 1 and 0 columns of the MLP, and 8, 8, 8 and 5 rows of the vocabulary."""
SMALL_VOCABULARY = replace(LLAMA, vocab=9, padded_vocab=9)
"""Over 4 ranks 3, 3, 3 and 0 rows."""
PADDED = replace(LLAMA, vocab=9, padded_vocab=24)
"""Over 4 ranks 6, 3, 0 and 0 rows without the padding."""
NORMED = replace(LLAMA, qk_norm=True)
ONE_KEY = replace(LLAMA, kv_heads=1, attention_bias="qkv")

CASES = {
    "llama over 2": Case(LLAMA, 2),
    "llama over 2, sequence parallel": Case(LLAMA, 2, True),
    "gpt over 2": Case(GPT, 2),
    "gpt over 2, sequence parallel": Case(GPT, 2, True),
    "one key head over 2": Case(ONE_KEY, 2),
    "one key head over 2, sequence parallel": Case(ONE_KEY, 2, True),
    "norms of query and key over 2": Case(NORMED, 2),
    "norms of query and key over 2, sequence parallel, attention recomputed": Case(NORMED, 2, True, "selective"),
    "norms of query and copied keys over 4": Case(NORMED, 4),
    "gpt over 2, deferred": Case(GPT, 2, deferred=True),
    "llama over 2, sequence parallel, deferred and recomputed": Case(LLAMA, 2, True, "full", deferred=True),
    "llama over 2, recomputed": Case(LLAMA, 2, False, "full"),
    "gpt over 2, sequence parallel, recomputed": Case(GPT, 2, True, "full"),
    "llama over 2, sequence parallel, attention recomputed": Case(LLAMA, 2, True, "selective"),
    "llama over 2, sequence parallel, pointwise recomputed": Case(LLAMA, 2, True, "pointwise"),
    "gpt over 2, pointwise recomputed, compiled": Case(GPT, 2, False, "pointwise", compiled=True),
    "norms of query and key over 2, sequence parallel, deferred, pointwise recomputed": Case(NORMED, 2, True, "pointwise", True),
    "gpt over 2, sequence parallel, compiled": Case(GPT, 2, True, "full", compiled=True),
    "llama over 2, a window": Case(replace(LLAMA, sliding_window=3), 2),
    "llama over 4, copied key heads": Case(LLAMA, 4),
    "llama over 4, copied key heads, sequence parallel": Case(LLAMA, 4, True),
    "gpt over 4, sequence parallel, deferred": Case(GPT, 4, True, deferred=True),
    "uneven over 4": Case(UNEVEN, 4),
    "uneven over 4, sequence parallel, recomputed": Case(UNEVEN, 4, True, "full"),
    "a rank without vocabulary": Case(SMALL_VOCABULARY, 4),
    "a rank without vocabulary, sequence parallel, deferred": Case(SMALL_VOCABULARY, 4, True, deferred=True),
    "ranks with nothing but padding": Case(PADDED, 4, True),
}

Left = Mapping[str, Any]
"""What one process left, by the name of the case."""


def batch_SB(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocab, (9, 2), generator=torch.Generator().manual_seed(1))
    return tokens[:-1], tokens[1:]


# --- What the processes do -------------------------------------------------------------------------------------------


def run_case(case: Case, group: TensorGroup) -> dict[str, Any]:
    """Loss, logits and gradients of a rank."""
    t = case.transformer
    sections = sections_of(t, rough_weights(t, seed=0), group.index, group.degree)
    deferred = DeferredWeights(accumulate) if case.deferred else None
    modes = [case.recompute] * t.layers
    part = ModelPart(t, (0, t.layers), sections, group, True, True, modes, case.compiled, deferred)
    tokens_SB, labels_SB = batch_SB(t.vocab)
    loss = part(tokens_SB, labels_SB)
    if deferred is None:
        (loss / labels_SB.numel()).backward()
    else:
        with deferred.collecting() as weight_half:
            (loss / labels_SB.numel()).backward()
        weight_half()
    with torch.no_grad():
        logits = part.logits(tokens_SB)
    return {"loss": loss.detach(), "logits": logits, "gradients": gradients_of(sections)}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CUTS = ((0, 3), (3, 3), (3, 4), (4, 7))
"""Columns of a vocabulary of 7, unevenly over 4 ranks."""


def run_cross_entropy(group: TensorGroup, dtype: torch.dtype) -> dict[str, Any]:
    start, stop = CUTS[group.index]
    logits = (300 * numbers(5, 2, 7)).to(dtype)[..., start:stop].clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "LOSS_NUMBERS", 5)  # in parts, of one to five tokens
        loss = cross_entropy_sum(logits, torch.arange(10).view(5, 2) % 7, start, group)
        (loss * 0.5).backward()
    return {"loss": loss.detach(), "gradient": logits.grad}


def run_regions(group: TensorGroup) -> dict[str, Any]:
    """A divided region between two uses of its input, so that gradients meet; and whether anything given was overwritten."""
    rows = 8 // group.degree if group.scatters else 8
    start = group.index * rows if group.scatters else 0
    x = numbers(8, 2, 6)[start : start + rows].clone().requires_grad_()
    up, bias, down = numbers(8, 6, seed=1), numbers(8, seed=2), numbers(8, 6, seed=3)
    own = slice(group.index * 8 // group.degree, (group.index + 1) * 8 // group.degree)
    up, bias, down = (each[own].clone().requires_grad_() for each in (up, bias, down))
    parameters = {"up": up, "bias": bias, "down": down, "last": numbers(6, seed=4).requires_grad_()}
    before = x.detach().clone()
    y = x + row_linear(torch.tanh(column_linear(x, up, bias, group)), down, parameters["last"], group)
    seed = numbers(8, 2, 6, seed=5)[start : start + rows].clone()
    y.backward(seed)

    part = numbers(8, 2, 6, seed=group.index).requires_grad_()
    kept = part.detach().clone()
    summed = leave(part, group)
    summed.backward(seed)
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: parameter.grad for name, parameter in parameters.items()},
        "sum": summed.detach(),
        "of sum": part.grad,
        "unchanged": torch.equal(before, x.detach())
        and torch.equal(kept, part.detach())
        and torch.equal(seed, numbers(8, 2, 6, seed=5)[start : start + rows]),
    }


def run_kept_bytes(group: TensorGroup) -> int:
    t = replace(GPT, hidden=64, head_dim=16, ffn=160, max_positions=32)
    sections = sections_of(t, rough_weights(t, 0, torch.float32), group.index, group.degree)
    part = ModelPart(t, (1, 2), sections, group, False, False, ["none"])
    return kept_bytes(part, torch.randn(32 // group.degree, 1, 64, requires_grad=True))


def work(rank: int, folder: Path) -> None:
    """One process of WORLD. Cases of degree 2 are divided over two pairs, of which one compiles: its first time takes long."""
    torch.set_num_threads(1)
    compile_layer: Callable[..., Any] = torch.compile
    torch.compile = lambda function: compile_layer(function, backend="eager")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: (rank % 2, 2, pairs[rank // 2]), 4: (rank, 4, dist.group.WORLD)}
    left: dict[str, Any] = {}
    for number, (name, case) in enumerate(CASES.items()):
        if case.degree == WORLD or number % 2 == rank // 2:
            left[name] = run_case(case, TensorGroup(*groups[case.degree], case.sequence_parallel))
    for dtype in (torch.float64, torch.bfloat16):
        left[f"cross-entropy {dtype}"] = run_cross_entropy(TensorGroup(*groups[4]), dtype)
    for scattered in (False, True):
        left[f"regions {scattered}"] = run_regions(TensorGroup(*groups[4], scattered))
    left["kept bytes"] = run_kept_bytes(TensorGroup(*groups[2], True))
    torch.save(left, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[Left]:
    """What each of the processes left."""
    folder = tmp_path_factory.mktemp("ranks")
    soon_started()
    multiprocessing.start_processes(work, (folder,), nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


# --- The tests -------------------------------------------------------------------------------------------------------


def close(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_every_rank_computes_its_part_of_the_plain_model(name: str, left: list[Left]) -> None:
    """Partial gradients are first summed over the ranks that hold the same rows."""
    case = CASES[name]
    t = case.transformer
    ranks = [found[name] for found in left if name in found]
    assert len(ranks) == case.degree
    weights = rough_weights(t, seed=0)
    tokens_SB, labels_SB = batch_SB(t.vocab)
    loss = reference_loss(t, weights, tokens_SB.T, labels_SB.T)
    loss.backward()
    for rank in ranks:
        close(rank["loss"] / labels_SB.numel(), loss.detach(), "loss")
    logits = torch.cat([rank["logits"] for rank in ranks], dim=-1)
    close(logits, reference_logits(t, weights, tokens_SB.T).detach().transpose(0, 1), "logits")
    for parameter in model_parameters(t):
        rows = [rows_of(parameter, index, case.degree) for index in range(case.degree)]
        expected = weights[parameter.name].grad
        assert expected is not None
        for index, (start, stop) in enumerate(rows):
            same = [i for i in range(case.degree) if rows[i] == (start, stop)]
            adds = same if is_partial(parameter, case.degree, case.sequence_parallel) else [index]
            gradient = sum(ranks[i]["gradients"][parameter.name] for i in adds)
            assert isinstance(gradient, torch.Tensor)
            close(gradient, expected[start:stop], f"{parameter.name} of rank {index}")


def test_the_loss_of_a_divided_vocabulary_is_that_of_the_whole_one(left: list[Left]) -> None:
    """With logits far apart, columns that are uneven, and a rank that has none."""
    for dtype, loss_dtype in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        logits = (300 * numbers(5, 2, 7)).to(dtype).requires_grad_()
        labels = (torch.arange(10).view(5, 2) % 7).flatten()
        loss = F.cross_entropy(logits.to(loss_dtype).flatten(0, 1), labels, reduction="sum")
        (loss * 0.5).backward()
        assert logits.grad is not None
        found = [rank[f"cross-entropy {dtype}"] for rank in left]
        for (start, stop), rank in zip(CUTS, found, strict=True):
            assert rank["loss"].dtype == loss_dtype and rank["gradient"].dtype == dtype
            torch.testing.assert_close(rank["loss"], loss.detach())
            torch.testing.assert_close(rank["gradient"], logits.grad[..., start:stop])


@pytest.mark.parametrize("scattered", [False, True])
def test_a_divided_region_is_the_whole_one_and_overwrites_nothing(scattered: bool, left: list[Left]) -> None:
    x, up, down = (numbers(*shape, seed=seed).requires_grad_() for shape, seed in (((8, 2, 6), 0), ((8, 6), 1), ((8, 6), 3)))
    bias, last = numbers(8, seed=2).requires_grad_(), numbers(6, seed=4).requires_grad_()
    seed = numbers(8, 2, 6, seed=5)
    y = x + torch.tanh(x @ up.T + bias) @ down + last
    y.backward(seed)
    total = sum((numbers(8, 2, 6, seed=index) for index in range(1, WORLD)), numbers(8, 2, 6, seed=0))
    found = [rank[f"regions {scattered}"] for rank in left]
    for index, rank in enumerate(found):
        rows = slice(2 * index, 2 * index + 2) if scattered else slice(0, 8)
        own = slice(2 * index, 2 * index + 2)
        assert rank["unchanged"]
        close(rank["y"], y.detach()[rows])
        close(rank["sum"], total[rows])
        close(rank["of sum"], seed)
        for name, whole, part in (("x", x, rows), ("up", up, own), ("bias", bias, own), ("down", down, own)):
            assert whole.grad is not None
            close(rank[name], whole.grad[part], name)
    lasts = [rank["last"] for rank in found]
    assert last.grad is not None
    close(torch.stack(lasts).sum(0) if scattered else lasts[0], last.grad)


def test_with_sequence_parallelism_a_layer_keeps_the_bytes_that_the_simulator_counts(left: list[Left]) -> None:
    t = replace(GPT, hidden=64, head_dim=16, ffn=160)
    expected = layer_activation_bytes(t, 1, 32, 2, True, "none", 4)
    for rank in left:
        assert expected <= rank["kept bytes"] <= 1.01 * expected


def test_a_group_of_one_adds_nothing_to_the_graph() -> None:
    alone = TensorGroup(0, 1, None, sequence_parallel=True)
    x = numbers(4, 2, 6).requires_grad_()
    assert leave(x, alone) is x and not alone.scatters
    weight = numbers(5, 6, seed=1).requires_grad_()
    y = column_linear(x, weight, None, alone)
    assert type(y.grad_fn) is type(F.linear(x, weight).grad_fn)
    tokens = torch.arange(4).view(4, 1)
    assert torch.equal(vocabulary_embedding(tokens, weight, 0, alone), weight[tokens])
    logits, labels = numbers(4, 2, 5), torch.ones(4, 2, dtype=torch.int64)
    expected = -torch.log_softmax(logits, -1)[..., 1].sum()
    close(cross_entropy_sum(logits, labels, 0, alone), expected)


@pytest.mark.parametrize("numbers_at_once", [1, 11, 2**25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_in_parts_is_that_of_all_tokens_at_once(
    numbers_at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "LOSS_NUMBERS", numbers_at_once)
    torch.manual_seed(0)
    mine = (10 * torch.randn(7, 5)).to(dtype).requires_grad_()
    theirs = mine.detach().double().requires_grad_()
    labels = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    loss = cross_entropy_sum(mine[:, None], labels[:, None], 0, TensorGroup(0, 1, None))
    expected = F.cross_entropy(theirs, labels, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6 if dtype == torch.bfloat16 else 1e-12)
    (3 * loss).backward()
    (3 * expected).backward()
    assert mine.grad is not None and theirs.grad is not None
    tolerance = 0.01 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance)
