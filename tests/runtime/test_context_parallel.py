"""Ring attention equals attention of whole sequences. Ranks are threads here; whole trainings are in test_equality.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from runtime import context_parallel
from runtime.context_parallel import ContextGroup, _Kernel, ring_attention, stretches
from runtime.model import ModelPart
from runtime.tensor_parallel import TensorGroup
from tests.runtime.reference import rough_weights, sections_of
from tests.runtime.test_equality import LLAMA
from tests.runtime.test_model import kept_bytes

Channels = dict[tuple[int, int, int], "SimpleQueue[torch.Tensor]"]


@dataclass(frozen=True)
class Thread(ContextGroup):
    """A rank whose messages go through queues, by sender, receiver and number."""

    channels: Channels = field(default_factory=dict)
    moved: list[int] = field(default_factory=list)
    """Numbers of each message that it sent."""

    def pass_on(self, block: torch.Tensor, number: int, beside: bool = True) -> Callable[[], torch.Tensor]:
        at = next(at for at, (_, context) in enumerate(self.ring) if context == self.index)
        here, to, source = (self.ring[(at + step) % self.degree][0] for step in (0, 1, -1))
        self.channels[here, to, number].put(block.clone())
        self.moved.append(block.numel())
        return lambda: self.channels[source, here, number].get(timeout=30)


def threads(order: list[int]) -> list[Thread]:
    """As many ranks, whose blocks go round in this order of their context ranks."""
    degree = len(order)
    channels: Channels = {(a, (a + 1) % degree, number): SimpleQueue() for a in range(degree) for number in (0, 1)}
    ring = tuple(enumerate(order))
    return [Thread(index, degree, ring, lambda *_: pytest.fail("no messages"), channels=channels) for index in range(degree)]


def attention(query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor) -> torch.Tensor:
    """Attention of whole sequences, of scores as the definition has them, in the shape of `ring_attention`."""
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query_SBND, key_SBND, value_SBND))
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ value


@settings(max_examples=25, deadline=None)
@given(
    order=st.integers(2, 5).flatmap(lambda degree: st.permutations(range(degree))),
    each=st.integers(1, 5),
    sequences=st.integers(1, 2),
    heads=st.sampled_from(((1, 1), (4, 2), (3, 1))),
    width=st.sampled_from((2, 6, 8)),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
)
def test_it_reads_and_teaches_what_whole_sequences_do(
    order: list[int], each: int, sequences: int, heads: tuple[int, int], width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(each)
    length = 2 * len(order) * each
    shapes = [(length, sequences, n, width) for n in (heads[0], heads[1], heads[1])]
    whole = [torch.randn(shape, dtype=torch.float64).to(dtype).double().requires_grad_() for shape in shapes]
    read = attention(*whole)
    given_BNSD = torch.randn_like(read).to(dtype).double()
    read.backward(given_BNSD)

    def work(group: Thread) -> list[torch.Tensor]:
        mine = [group.rows(part.detach()).to(dtype).requires_grad_() for part in whole]
        found = ring_attention(mine[0], torch.stack(mine[1:]), group)
        found.backward(group.rows(given_BNSD.permute(2, 0, 1, 3)).permute(1, 2, 0, 3).to(dtype))
        assert all(part.grad is not None and part.grad.dtype == dtype for part in mine)
        return [found.detach().permute(2, 0, 1, 3), *(part.grad for part in mine if part.grad is not None)]

    ranks = threads(order)
    with ThreadPoolExecutor(len(ranks)) as pool:
        results = list(pool.map(work, ranks))
    expected = [read.detach().permute(2, 0, 1, 3), *(part.grad for part in whole if part.grad is not None)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for group, found in zip(ranks, results, strict=True):
        for mine, whole_one in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), group.rows(whole_one), atol=tolerance, rtol=tolerance)
        # Keys and values once round in the forward, and in the backward once more with their gradients behind them.
        block = 2 * length // len(ranks) * sequences * heads[1] * width
        assert group.moved == [block] * (3 * (len(ranks) - 1))


class Mirror(ContextGroup):
    """A rank whose peer has the same tokens: nothing that it computes is right but how much is kept."""

    def pass_on(self, block: torch.Tensor, number: int, beside: bool = True) -> Callable[[], torch.Tensor]:
        return block.clone


def test_what_is_kept_is_of_a_ranks_own_tokens() -> None:
    kept: dict[tuple[int, str], float] = {}
    for ranks, mode in product((1, 2), ("none", "selective", "full")):
        context = None if ranks == 1 else Mirror(0, 2, ((0, 0), (1, 1)), lambda *_: pytest.fail("no messages"))
        sections = sections_of(LLAMA, rough_weights(LLAMA, 0, torch.float32))
        part = ModelPart(LLAMA, (1, 2), sections, TensorGroup(0, 1, None), False, False, [mode], context=context)
        kept[ranks, mode] = kept_bytes(part, torch.randn(64, 2, LLAMA.hidden, requires_grad=True))
    stream = 64 * 2 * LLAMA.hidden * 4
    assert kept[2, "none"] <= kept[1, "none"] + 0.6 * stream  # keys and values have a copy
    assert kept[2, "selective"] < kept[2, "none"]  # what was read the output matrix keeps, too
    assert kept[2, "full"] == kept[1, "full"]


@given(degree=st.integers(2, 9), each=st.integers(1, 7))
def test_the_stretches_cover_a_sequence_and_are_as_much_work(degree: int, each: int) -> None:
    length = 2 * degree * each
    of_ranks = [[at for start, stop in stretches(length, index, degree) for at in range(start, stop)] for index in range(degree)]
    assert sorted(at for ats in of_ranks for at in ats) == list(range(length))
    assert all(ats == sorted(ats) for ats in of_ranks)
    assert len({sum(at + 1 for at in ats) for ats in of_ranks}) == 1  # keys that they see


KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def kernel_of(query: torch.Tensor, key: torch.Tensor, name: str | None, monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    """A GPU's kernel of this name, or the one that torch takes."""
    if name is not None:
        monkeypatch.setattr(context_parallel, "gpu_kernel", lambda *_: KERNELS[name])
    return _Kernel(query, key)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("width", [64, 20])
def test_the_kernels_of_gpus_take_what_they_are_given(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.empty(2, 4, 6, width, dtype=torch.bfloat16, device="meta")  # where torch has the shapes of all its kernels
    key = torch.empty(2, 2, 10, width, dtype=torch.bfloat16, device="meta")
    kernel = kernel_of(query, key, name, monkeypatch)
    read = kernel.read(query, key, key, causal=False)
    found = kernel.backward(query, query, key, key, read, causal=False)
    assert read[0].shape == query.shape and read[1].shape == query.shape[:3]
    assert [part.shape for part in found] == [query.shape, key.shape, key.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")
@pytest.mark.parametrize(("queries", "keys", "causal"), [(96, 96, True), (50, 100, False), (100, 50, False), (7, 7, True)])
@pytest.mark.parametrize(("width", "kv_heads"), [(64, 2), (128, 1), (20, 4)])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "name"),
    [
        *((torch.bfloat16, 0.05, name) for name in (*KERNELS, None)),
        *((torch.float16, 0.01, name) for name in (*KERNELS, None)),
        (torch.float32, 1e-4, None),
    ],
)
def test_a_gpu_reads_what_the_processor_does(
    dtype: torch.dtype,
    tolerance: float,
    name: str | None,
    queries: int,
    keys: int,
    causal: bool,
    width: int,
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "cudnn" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torch takes cuDNN's kernel on Hopper and later GPUs alone")
    torch.manual_seed(0)
    query, key, value, given_BNSD = (
        torch.randn(2, heads, length, width, dtype=torch.float64).to(dtype).double().requires_grad_()
        for heads, length in ((4, queries), (kv_heads, keys), (kv_heads, keys), (4, queries))
    )
    whole = [part.repeat_interleave(4 // kv_heads, dim=1) for part in (key, value)]
    read = F.scaled_dot_product_attention(query, *whole, is_causal=causal)
    read.backward(given_BNSD.detach())
    scores = query @ whole[0].transpose(-1, -2) / width**0.5
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1) if causal else torch.zeros(queries, keys, dtype=torch.bool)
    on_gpu = [part.detach().to("cuda", dtype) for part in (query, key, value, given_BNSD)]
    kernel = kernel_of(*on_gpu[:2], name, monkeypatch)
    found, sums = kernel.read(*on_gpu[:3], causal)
    expected_sums = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(sums.double().cpu(), expected_sums.detach(), atol=tolerance, rtol=tolerance)
    gradients = kernel.backward(on_gpu[3], *on_gpu[:3], (found, sums), causal)
    for mine, expected in zip((found, *gradients), (read, query.grad, key.grad, value.grad), strict=True):
        assert expected is not None
        torch.testing.assert_close(mine.double().cpu(), expected.detach(), atol=tolerance, rtol=tolerance)
