"""What estimates need is compiled before a command asks for them, once on a machine: its first searches would do without."""

from __future__ import annotations

import sys

from experiments.judges import ESTIMATE
from experiments.progress import waiting_progress
from partition.estimated import compile_once, is_compiled, is_exact_compiled
from partition.search import ESTIMATING

TOLD = "compiling what estimates need, once on this machine (a minute or two)"


def compile_first(*asked: str) -> None:
    """Nothing; returns when all is compiled that planners and judges of these names ask, and says so where that takes time."""
    if (is_compiled() and is_exact_compiled()) or not {ESTIMATE, *ESTIMATING}.intersection(asked):
        return
    print(f"motley: {TOLD}", file=sys.stderr)
    with waiting_progress(TOLD):
        compile_once()
