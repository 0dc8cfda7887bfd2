"""What estimates need is compiled before commands ask for them."""

from __future__ import annotations

import pytest

from experiments import compilation
from experiments.compilation import TOLD, compile_first


@pytest.mark.parametrize(
    ("kept", "asked", "compiles"),
    [
        (False, ("motley",), True),
        (False, ("megatron", "metis", "simulate"), True),
        (False, ("megatron", "estimate"), True),
        (False, ("megatron", "simulate"), False),
        (True, ("motley", "estimate"), False),
    ],
)
def test_it_is_compiled_where_it_is_asked_for_and_is_not_yet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: bool, asked: tuple[str, ...], compiles: bool
) -> None:
    done: list[bool] = []
    monkeypatch.setattr(compilation, "is_compiled", lambda: True)
    monkeypatch.setattr(compilation, "is_exact_compiled", lambda: kept)
    monkeypatch.setattr(compilation, "compile_once", lambda: done.append(True))
    compile_first(*asked)
    told = capsys.readouterr()
    assert done == [True] * compiles
    assert (told.out, told.err) == ("", f"motley: {TOLD}\n" if compiles else "")
