"""Every numbered example prints what the .out file beside it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_prints_what_stands_beside_it(example: Path, pytestconfig: pytest.Config) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    beside = example.with_suffix(".out")
    if pytestconfig.getoption("--regen"):
        beside.write_text(done.stdout)
    assert done.stdout == beside.read_text()
