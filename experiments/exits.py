"""Exit codes of the command line, and the one way in which it tells errors."""

from __future__ import annotations

import sys

NO_ANSWER = 1
"""No feasible plan."""
BAD_INPUT = 2
"""A mistake in a file, a flag or an argument."""
FAILED = 3
"""Something failed while running: disk, worker, link, a training that diverged, or Motley itself."""
INTERRUPTED = 130
"""Ctrl-C."""


def tell_error(message: str) -> None:
    """Nothing; prints `motley: ` and the message, on one line, to standard error."""
    print(f"motley: {' '.join(message.split())}", file=sys.stderr)
