"""What the tests of the command line share: a tiny cluster and model, and `motley`, which runs a command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.cli import run

ROOT = Path(__file__).resolve().parents[2]

TINY_CLUSTER = """\
name: tiny
nodes:
  - {name: box, gpu: RTX4090, gpus: 2, intra: pcie4}
"""

TINY_PLAN = """\
{"format": "motley-plan/1", "cluster": "tiny", "sequence_length": 128, "global_batch": 4, "precision": "bf16",
 "model": {"name": "toy", "layers": 4, "hidden": 64, "ffn": 128, "heads": 4, "vocab": 256},
 "pipelines": [{"micro_batch": 1, "micro_batches": 4, "stages": [
   {"devices": ["box/0"], "layers": [0, 2]},
   {"devices": ["box/1"], "layers": [2, 4]}]}]}
"""


@dataclass(frozen=True)
class Ran:
    """What a command line answered."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class World:
    """Files of a tiny world in an empty folder."""

    folder: Path
    cluster: str
    model: str
    plan: str

    def write(self, name: str, text: str) -> str:
        """The path of a file with this text in the folder."""
        (self.folder / name).write_text(text, encoding="utf-8")
        return str(self.folder / name)

    def names(self) -> set[str]:
        """All files below the folder, temporary ones included."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    cluster, plan = tmp_path / "tiny.yaml", tmp_path / "plan.json"
    cluster.write_text(TINY_CLUSTER, encoding="utf-8")
    plan.write_text(TINY_PLAN, encoding="utf-8")
    return World(tmp_path, str(cluster), str(ROOT / "examples" / "models" / "tiny-llama.json"), str(plan))


@pytest.fixture
def motley(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """A function that runs a command line in this process. Whatever it answers, it is no traceback."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Ran(code, captured.out, captured.err)

    return call
