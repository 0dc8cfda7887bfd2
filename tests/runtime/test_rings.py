"""Collectives that go round rings give what gloo's do, in any order of the ranks and for tensors that no number divides."""

from __future__ import annotations

import queue
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime import collectives
from runtime.rings import RingWork, use_ring
from tests.runtime.processes import soon_started

RANKS = 3
ORDER = (2, 0, 1)
"""The rank's places; the ring goes 1, 2, 0."""


def _work(rank: int, store: str, told: Any) -> None:
    """One rank: each collective beside gloo's own, and which of them went round a ring."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    plain, ringed = dist.new_group(range(RANKS)), dist.new_group(range(RANKS))
    assert plain is not None and ringed is not None
    use_ring(ringed, ORDER)
    found = []
    for rows in (2, 1024):  # the first are too small to be worth a ring
        generator = torch.Generator().manual_seed(rank)
        odd = torch.randn(rows * RANKS + 1, 2, generator=generator)
        whole = torch.randn(rows * RANKS, 2, generator=generator)
        results = []
        for group in (plain, ringed):
            summed, part, everything = odd.clone(), torch.empty(rows, 2), torch.empty_like(whole)
            works = [
                collectives.all_reduce(summed, group),
                collectives.reduce_scatter(part, whole, group),
                collectives.all_gather(everything, odd[:rows].contiguous(), group),
            ]
            for work in works:
                work.wait()
            results.append((summed, part, everything, [isinstance(work, RingWork) for work in works]))
        (a, b, c, by_gloo), (d, e, f, by_ring) = results
        same = torch.allclose(a, d, atol=1e-5) and torch.allclose(b, e, atol=1e-5) and torch.equal(c, f)
        found.append((same, by_gloo, by_ring))
    told.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def test_rings_give_what_gloo_gives(tmp_path: Path) -> None:
    context = soon_started()
    told = context.Queue()
    processes = [context.Process(target=_work, args=(rank, str(tmp_path / "store"), told), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    while len(found) < RANKS and any(process.is_alive() for process in processes):
        try:
            rank, results = told.get(timeout=1)
        except queue.Empty:
            continue
        found[rank] = results
    for process in processes:
        process.join(60)
    assert found == {rank: [(True, [False] * 3, [False] * 3), (True, [False] * 3, [True] * 3)] for rank in range(RANKS)}
