"""Numbers on their way to the host's memory and back."""

from __future__ import annotations

import pytest
import torch

from runtime import staging
from runtime.staging import Staging

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_together_are_what_was_on_the_device(
    device: str, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CHUNK", 8)
    way = Staging()
    for seed in range(3):  # the buffers are used again
        numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
        found, places = torch.full_like(numbers, torch.nan), 0
        for begin, end, chunk in way.brought(numbers.to(device)):
            assert begin == places
            assert chunk.device.type == "cpu"
            found[begin:end] = chunk
            places = end
        assert places == count
        assert torch.equal(found, numbers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 8, 17, 1000])
def test_what_is_sent_arrives_in_the_precision_there(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK", 8)
    way = Staging()
    for seed in range(3):
        numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed))
        target = torch.full((count,), torch.nan, dtype=torch.bfloat16, device=device)
        kept = numbers.clone()
        way.send(numbers, target)
        numbers.fill_(torch.nan)  # the caller may use its memory again at once
        assert torch.equal(target.cpu(), kept.to(torch.bfloat16))
