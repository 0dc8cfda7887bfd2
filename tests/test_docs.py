"""The documentation: its site builds without a warning, its commands exist, its pictures are those that its script draws."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from experiments.cli import USAGE_ERROR, app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMAGES = ROOT / "docs" / "images"


# --- The site --------------------------------------------------------------------------------------------------------


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is missing: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "sim.html").read_text()
    assert "The trace of one simulated iteration." in page  # from the docstring of sim.engine.simulate
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', page)  # nothing is asked of the network


# --- Commands --------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[str]:
    """The commands that begin with `motley` in the fenced and the indented blocks of a page, without what is piped from them."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```[^\n]*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = [line for line in rest.splitlines() if line.startswith("    ")]
    for block in (*fenced, "\n".join(indented)):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"\s*motley(\s|$)", line) and not re.match(r"\s*motley:", line):
                yield line.strip()


def words(command: str) -> list[str]:
    """The arguments of a command, up to a pipe, a redirection or the next command."""
    found = []
    for word in shlex.split(command, comments=True)[1:]:
        if word in ("|", ">", "&&", ";", "&"):
            break
        found.append(word)
    return found


def check(arguments: list[str]) -> None:
    """Nothing. Raises what typer raises for commands, options and values that do not exist; executes nothing."""
    group = typer.main.get_command(app)
    with contextlib.suppress(typer.Exit):  # --version and --help end here
        context = group.make_context("motley", list(arguments))
        while hasattr(group, "resolve_command"):
            name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            context = group.make_context(name, rest, parent=context)


FOUND = [(page.relative_to(ROOT), command) for page in PAGES for command in commands(page.read_text())]


@pytest.mark.parametrize(("page", "command"), FOUND, ids=[f"{page}: {command[:60]}" for page, command in FOUND])
def test_a_command_of_a_page_parses(page: Path, command: str) -> None:
    try:
        check(words(command))
    except USAGE_ERROR as error:
        pytest.fail(f"{page}: {command}: {error.format_message()}", pytrace=False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "command",
    ["motley paln", "motley plan --no-such-option 1", "motley simulate", "motley plan --seed one", "motley testbed fly"],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises(USAGE_ERROR):
        check(words(command))


def test_commands_are_found_in_every_kind_of_block() -> None:
    text = "Say\n\n    motley plan --seed 1 \\\n      --out a   # why\n\nor `motley no`:\n\n```sh\nmotley --version | cat\n```\n"
    assert [words(command) for command in commands(text)] == [["--version"], ["plan", "--seed", "1", "--out", "a"]]


# --- Pictures --------------------------------------------------------------------------------------------------------


def test_every_picture_of_the_concepts_is_drawn_by_the_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "pictures.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.iterdir()}
    used = set(re.findall(r"images/(concept-[\w.-]+)", (ROOT / "docs" / "concepts.md").read_text()))
    assert drawn == used == {path.name for path in IMAGES.glob("concept-*")}
    assert (tmp_path / "concept-program.txt").read_text() == (IMAGES / "concept-program.txt").read_text()
