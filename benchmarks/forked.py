"""Workers forked from a benchmark, which has torch already: to load it takes them longer than to train."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is loaded

from runtime.options import arguments
from runtime.settings import Settings


def forked_worker(path: Path, settings: Settings, environment: Mapping[str, str]) -> int:
    """The process of a new worker that trains the plan at a path, as `python -m runtime` does under torchrun, and then ends.

    `environment` says who it is: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    """
    process = os.fork()
    if process == 0:
        _train(path, settings, environment)
    return process


def _train(path: Path, settings: Settings, environment: Mapping[str, str]) -> None:
    """Trains, and ends the process with its exit code."""
    try:
        from runtime.__main__ import main

        os.environ.update(environment, LOCAL_RANK=environment["RANK"])
        os._exit(main([str(path), *arguments(settings)]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(3)
