"""Which numbers of the model a rank holds, and what they are at first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.parameters import (
    BLOCK,
    STANDARD_DEVIATION,
    Parameter,
    Section,
    check_degree,
    initial_values,
    model_parameters,
    range_parameters,
    rows_of,
    share,
)
from sim.spec.counts import layer_parameters_at, total_parameters
from sim.spec.reading import InputError
from sim.spec.transformer import Moe, Transformer, presets
from tests.runtime.test_equality import GPT, LLAMA

RUNNABLE = [t for t in presets().values() if t.position != "alibi" and not t.projected_embeddings]
RUNNABLE.append(replace(presets()["mixtral-8x7b"], name="shared", experts=Moe(8, 2, 14336, shared_experts=2, shared_ffn=4096)))


@pytest.mark.parametrize("name", [t.name for t in RUNNABLE])
def test_a_model_has_as_many_numbers_as_the_simulator_counts(name: str) -> None:
    model = next(t for t in RUNNABLE if t.name == name)
    assert sum(parameter.size for parameter in model_parameters(model)) == total_parameters(model)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_a_rank_holds_as_many_numbers_of_a_layer_as_the_simulator_counts(degree: int) -> None:
    model = presets()["llama-3-8b"]
    held = sum(
        (stop - start) * parameter.row_size
        for parameter in range_parameters(model, (0, 1))
        for start, stop in [rows_of(parameter, 0, degree)]
    )
    assert held == layer_parameters_at(model, degree)


@given(count=st.integers(0, 100), of=st.integers(1, 20))
def test_shares_follow_one_another_and_leave_nothing_out(count: int, of: int) -> None:
    shares = [share(count, index, of) for index in range(of)]
    assert [n for start, stop in shares for n in range(start, stop)] == list(range(count))
    assert max(stop - start for start, stop in shares) == -(-count // of)


@given(kv_heads=st.sampled_from((1, 2, 4, 8)), degree=st.sampled_from((1, 2, 4, 8)))
def test_a_rank_holds_the_key_heads_of_its_query_heads(kv_heads: int, degree: int) -> None:
    queries, keys = Parameter("q", (0, 1), 8 * 4, 1, "heads", 4), Parameter("k", (0, 1), kv_heads * 4, 1, "kv_heads", 4)
    for index in range(degree):
        heads = range(*(row // 4 for row in rows_of(queries, index, degree)))
        assert {head * kv_heads // 8 for head in heads} == set(range(*(row // 4 for row in rows_of(keys, index, degree))))


@pytest.mark.parametrize("seed", [0, 7])
def test_first_values_do_not_depend_on_who_asks_for_which_rows(seed: int) -> None:
    big = Parameter("layers.0.mlp.up.weight", (0, 1), 3000, 1000, "columns")  # three blocks
    assert big.size > 2 * BLOCK
    whole = initial_values(LLAMA, big, 0, big.rows, seed)
    for start, stop in ((0, 1), (1000, 2100), (2999, 3000), (5, 5)):
        assert torch.equal(initial_values(LLAMA, big, start, stop, seed), whole[start * 1000 : stop * 1000])
    assert whole.std().item() == pytest.approx(STANDARD_DEVIATION, rel=1e-2)
    assert not torch.equal(whole, initial_values(LLAMA, big, 0, big.rows, seed + 1))


def test_first_values_are_the_same_in_every_process_and_version() -> None:
    found = initial_values(GPT, Parameter("embedding.tokens.weight", (0, 0), 4, 2, "vocabulary"), 0, 4, 0)
    expected = [0.015437182, 0.008220528, 0.013863335, -0.014641413, 0.012837701, -0.016022859, -0.006286761, 0.003734572]
    assert found.tolist() == pytest.approx(expected, abs=1e-8)


def test_what_writes_into_the_residual_stream_begins_smaller() -> None:
    down = next(p for p in range_parameters(LLAMA, (0, 1)) if p.name.endswith("down.weight"))
    found = initial_values(LLAMA, Parameter(down.name, down.place, 1000, 100, initial=down.initial), 0, 1000, 0)
    assert found.std().item() == pytest.approx(STANDARD_DEVIATION / math.sqrt(2 * LLAMA.layers), rel=2e-2)


def test_a_section_gives_fused_parameters_as_views() -> None:
    section = Section(range_parameters(LLAMA, (1, 2)), (1, 2), 1, 2, torch.float32, torch.device("cpu"))
    section.values.copy_(torch.arange(section.size))
    names = [f"layers.1.attention.{part}.weight" for part in ("query", "key", "value")]
    fused = section.parameter(*names)
    assert fused.shape == (16 + 8 + 8, 32)
    assert section.parameter(*names) is fused
    section.values.zero_()
    assert not fused.any()
    with pytest.raises(ValueError, match="do not stand one after the other"):
        section.parameter(names[0], names[2])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "sequence_length", "message"),
    [
        (6, 6, 4, 16, "the 6 heads of m do not divide by the tensor-parallel degree 4"),
        (12, 3, 4, 16, "the 3 key-value heads of m neither divide by the tensor-parallel degree 4 nor divide it"),
        (4, 4, 4, 18, "the tensor-parallel degree must divide the sequence length 18, but got 4"),
    ],
)
def test_what_a_group_cannot_share_is_told(heads: int, kv_heads: int, degree: int, sequence_length: int, message: str) -> None:
    model = Transformer(name="m", layers=1, hidden=48, ffn=48, heads=heads, kv_heads=kv_heads, vocab=10)
    with pytest.raises(InputError, match=message):
        check_degree(model, degree, sequence_length, sequence_parallel=True)


def test_with_sequence_parallelism_a_group_shares_each_slice() -> None:
    model = Transformer(name="m", layers=1, hidden=48, ffn=48, heads=4, kv_heads=4, vocab=10)
    check_degree(model, 4, 12, sequence_parallel=True)
    check_degree(model, 4, 6, sequence_parallel=False)
    with pytest.raises(InputError, match="must divide the length of a slice of the sequences 6, but got 4"):
        check_degree(model, 4, 6, sequence_parallel=True, what="length of a slice of the sequences")
