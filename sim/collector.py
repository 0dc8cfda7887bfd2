"""Python's garbage collector, held back where it would only cost time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 20
"""How many times as rare full collections are made."""


@contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Nothing is collected inside: what is made there is hundreds of thousands of objects that stay, which Python would scan
    again and again (a third of the time at 4,096 GPUs), and next to no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def garbage_collected_seldom() -> Iterator[None]:
    """All that there is is looked through for garbage less often inside: a search keeps hundreds of thousands of objects, in
    which there is none, and Python would scan them every second (a sixth of the time). What is young is collected as ever."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], SELDOM * before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
