"""What all tests share: the option `--regen`, golden texts, and how many examples hypothesis tries."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

GOLDEN = Path(__file__).parent / "golden"

# No deadline and no check of speed: a busy machine must not turn a test red. Derandomized: the same commit tries the same
# examples everywhere. The thorough profile tries many new ones at each run, and what failed again at the next; `pytest -m slow`
# chooses it, and so does `HYPOTHESIS_PROFILE=thorough`.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "thorough",
    settings.get_profile("quick"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
    max_examples=1000,
    print_blob=True,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="rewrite the golden texts in tests/golden instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile", default=None):
        slow_chosen = config.getoption("markexpr", default="") == "slow"
        settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("thorough" if slow_chosen else "quick"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function that compares a text with tests/golden/NAME, or writes the text there under `--regen`."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--regen"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"tests/golden/{name} does not exist; `pytest --regen` writes it", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"tests/golden/{name}", "what the test made", lineterm=""
            )
            pytest.fail("\n".join([*lines, "", "If the new text is right, `pytest --regen` writes it."]), pytrace=False)

    return compare
