"""What a sequence divided over context ranks costs in computation: a rank's blocks of attention beside its part of the whole.

    python benchmarks/ring_attention.py --out benchmarks/results/ring-attention-KIND.txt      # on a machine with a GPU

One process computes what one rank of a ring does, forward and backward, with blocks that are its own instead of another rank's:
that is as much work, and nothing is sent. Beside it stands torch's own attention to whole sequences. The simulator gives a rank
an equal part of the time of the whole; the table says how much more it needs, for more and shorter kernels, and to put together
what they read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from runtime.context_parallel import ContextGroup, ring_attention
from runtime.peak import hardware_name
from sim.spec.reading import write_file


class Alone(ContextGroup):
    """A rank that takes its own blocks for those of the others."""

    def pass_on(self, block: torch.Tensor, number: int, beside: bool = True) -> Callable[[], torch.Tensor]:
        """The same block, at once."""
        return lambda: block


def alone(index: int, degree: int) -> Alone:
    """One rank of so many."""

    def channel(source: int, to: int, number: int) -> tuple[torch.distributed.ProcessGroup, int]:
        raise AssertionError("nothing is sent")

    return Alone(index, degree, tuple((rank, rank) for rank in range(degree)), channel)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median of the seconds that it takes, each time until the device is done."""
    taken = []
    for number in range(repeats + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number >= 2:
            taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def tensors(tokens: int, heads: int, kv_heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, (S, B, N, D), and keys and values, (2, S, B, N, D), of one sequence."""
    on = {"device": "cuda", "dtype": torch.bfloat16} if torch.cuda.is_available() else {"device": "cpu", "dtype": torch.float32}
    query = torch.randn(tokens, 1, heads, width, **on, requires_grad=True)  # type: ignore[call-overload]
    block = torch.randn(2, tokens, 1, kv_heads, width, **on, requires_grad=True)  # type: ignore[call-overload]
    return query, block


def of_rank(tokens: int, index: int, degree: int, shape: tuple[int, int, int], repeats: int) -> tuple[float, float]:
    """Seconds of the forward and the backward of one rank's part."""
    query, block = tensors(tokens // degree, *shape)
    group = alone(index, degree)
    forward_s = seconds(lambda: ring_attention(query, block, group), repeats)
    read = ring_attention(query, block, group)
    given = torch.randn_like(read)
    return forward_s, seconds(lambda: torch.autograd.grad(read, (query, block), given, retain_graph=True), repeats)


def of_whole(tokens: int, shape: tuple[int, int, int], repeats: int) -> tuple[float, float]:
    """Seconds of the forward and the backward of whole sequences on one device."""
    query, block = tensors(tokens, *shape)
    heads = [part.permute(1, 2, 0, 3) for part in (query, *block)]

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=shape[0] != shape[1])

    forward_s = seconds(attend, repeats)
    read = attend()
    given = torch.randn_like(read)
    return forward_s, seconds(lambda: torch.autograd.grad(read, heads, given, retain_graph=True), repeats)


def table(cases: list[tuple[int, int, tuple[int, int, int]]], repeats: int) -> str:
    """Of each case (tokens, degree, heads) the seconds of the whole, and of a rank beside its part of it."""
    machine = hardware_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    lines = [
        f"{machine}, torch {torch.__version__}. One sequence, forward and backward; more = rank * ranks / whole - 1.",
        "",
        "                          ms, forward + backward",
        "tokens  heads      ranks                whole           first rank            last rank  more %",
    ]
    wholes: dict[tuple[int, tuple[int, int, int]], tuple[float, float]] = {}
    for tokens, degree, shape in cases:
        whole = wholes.get((tokens, shape)) or of_whole(tokens, shape, repeats)
        wholes[tokens, shape] = whole
        ranks = [of_rank(tokens, index, degree, shape, repeats) for index in (0, degree - 1)]
        more = max(sum(rank) for rank in ranks) * degree / sum(whole) - 1
        shown = "  ".join(f"{1e3 * forward:8.2f} + {1e3 * backward:8.2f}" for forward, backward in (whole, *ranks))
        lines.append(f"{tokens:6d}  {shape[0]:2d}/{shape[1]:2d}x{shape[2]:3d}  {degree:5d}  {shown}  {100 * more:+6.1f}")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Nothing; see the head of the file."""
    parser = argparse.ArgumentParser(description="Times the computation of context ranks.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 16384, 65536])
    asked = parser.parse_args()
    cases = [(tokens, ranks, (32, kv, 128)) for kv in (32, 8) for tokens in asked.tokens for ranks in (2, 4, 8)]
    write_file(asked.out, table(cases, 5), replace=True)


if __name__ == "__main__":
    main()
