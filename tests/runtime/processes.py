"""Whether processes still run, for tests of what must end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


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
