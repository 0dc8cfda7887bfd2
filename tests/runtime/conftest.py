"""The worker processes that the runtime's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    group = Workers()
    yield group
    group.close()
