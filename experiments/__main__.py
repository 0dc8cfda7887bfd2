"""Where the command `motley` begins: also an interrupt while its parts are imported ends in one line."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Runs the command line and ends the process."""
    try:
        from experiments.cli import run
    except KeyboardInterrupt:
        print("motley: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(run())


if __name__ == "__main__":
    main()
