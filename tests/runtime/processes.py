"""Processes that start soon, for tests of several at once, and whether processes still run, for tests of what must end."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTED = ["torch.distributed.checkpoint", "torch.nn.attention.bias"]
"""What takes a process longest before it can work, with all that these import."""


def soon_started() -> ForkServerContext:
    """The context of processes that are forked from one which has imported torch, and nothing of the project.

    They have nothing else in common with the process that starts them, as spawned ones, which import it once more each.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended, and that nobody asked for yet, does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not Path("/proc/self").exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Nothing, as soon as the condition holds; AssertionError where it does not within half a minute."""
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)
