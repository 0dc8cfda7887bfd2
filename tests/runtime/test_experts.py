"""The matrices of all experts, group by group, equal one matrix after another. Whole trainings are in test_equality.py."""

from __future__ import annotations

import pytest
import torch

from runtime.experts import Groups, _at_once, _grouped_linear
from runtime.tensor_parallel import DeferredWeights, Remade

ENDS = [[3, 3, 10, 16], [0, 0, 0, 16], [4, 8, 12, 16], [0, 0, 0, 0]]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")


def group_by_group(x: torch.Tensor, weight: torch.Tensor, transposed: bool, ends: list[int]) -> torch.Tensor:
    parts = weight.view(len(ends), -1, weight.shape[-1])
    rows = zip([0, *ends], ends, parts, strict=False)
    return torch.cat([x[start:stop] @ (part if transposed else part.t()) for start, stop, part in rows])


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.bfloat16, 0.05),
        pytest.param("cuda", torch.bfloat16, 0.05, marks=GPU),
        pytest.param("cuda", torch.float16, 0.01, marks=GPU),
    ],
)
def test_each_group_meets_the_matrix_of_its_expert(
    device: str, dtype: torch.dtype, tolerance: float, transposed: bool, ends: list[int]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(ends[-1], 24).to(dtype)
    weight = torch.randn(4 * 24 if transposed else 4 * 40, 40 if transposed else 24).to(dtype)
    mine = [part.clone().to(device).requires_grad_() for part in (x, weight)]
    theirs = [part.double().requires_grad_() for part in (x, weight)]
    y = _grouped_linear(mine[0], mine[1], transposed, Groups(torch.tensor(ends, dtype=torch.int32, device=device)), None)
    expected = group_by_group(*theirs, transposed, ends)
    given = torch.randn(ends[-1], 40).to(dtype)
    y.backward(given.to(device))
    expected.backward(given.double())
    found = [y, *(part.grad for part in mine)]
    for one, other in zip(found, [expected, *(part.grad for part in theirs)], strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one.detach().double().cpu(), other.detach(), atol=tolerance, rtol=tolerance)


def test_gradients_are_put_off_and_made_of_what_is_kept() -> None:
    torch.manual_seed(0)
    base, weight = torch.randn(16, 24, dtype=torch.float64).requires_grad_(), torch.randn(80, 24, dtype=torch.float64)
    weight.requires_grad_()
    groups = Groups(torch.tensor(ENDS[0], dtype=torch.int32))
    group_by_group(base.tanh(), weight, False, ENDS[0]).sum().backward()
    expected, expected_of_base = weight.grad, base.grad
    weight.grad = base.grad = None
    accumulated: list[torch.Tensor] = []
    deferred = DeferredWeights(lambda _, gradient: accumulated.append(gradient))
    with deferred.collecting() as run:
        _grouped_linear(base.tanh(), weight, False, groups, deferred, Remade(torch.tanh, base)).sum().backward()
    assert not accumulated and weight.grad is None
    torch.testing.assert_close(base.grad, expected_of_base)
    run()
    torch.testing.assert_close(accumulated, [expected])


@GPU
def test_a_gpu_that_has_the_kernel_takes_all_groups_at_once() -> None:
    x, weight = (torch.zeros(16, width, dtype=torch.bfloat16, device="cuda") for width in (24, 40))
    assert _at_once(x, weight) == (torch.cuda.get_device_capability()[0] in (9, 10))
    assert not _at_once(x, weight[:, :36])  # rows that are no multiple of 16 bytes
    assert not _at_once(x.half(), weight.half())
