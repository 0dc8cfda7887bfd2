"""The notebooks: each runs from its first cell to its last and draws something, and none is committed with outputs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IDS = [path.stem for path in NOTEBOOKS]


def code(path: Path) -> list[Any]:
    """The cells of a notebook that hold code."""
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_five_notebooks() -> None:
    assert [path.stem.split("-")[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_is_committed_without_what_it_printed(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    for cell in code(path):
        assert cell.outputs == [] and cell.execution_count is None, cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ipykernel") is None:
        pytest.skip("ipykernel is missing: pip install -e '.[dev]'")
    from nbclient import NotebookClient
    from traitlets.config import Config

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the notebook chooses its own
    book = nbformat.read(path, as_version=4)
    # By default the sockets would lie in the notebook's folder, where two notebooks at one time would take each other's.
    config = Config({"KernelManager": {"transport": "tcp"}, "AsyncKernelManager": {"transport": "tcp"}})
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(book, config=config, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert all(output.get("name") != "stderr" for output in outputs), [output.text for output in outputs if "text" in output]
    assert any("image/png" in output.get("data", {}) for output in outputs)
