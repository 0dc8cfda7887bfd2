"""Software stacks: their records, what a cluster file says of one, and mistakes in it, each told in one line."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from sim.spec.cluster import read_cluster
from sim.spec.reading import InputError, Table
from sim.spec.stack import STACK_UNITS, Stack, read_stack, stack, stacks


def read(**values: object) -> Stack:
    return read_stack("own", Table(values, "mine.yaml", "stack"))


def refused(**values: object) -> str:
    with pytest.raises(InputError) as caught:
        read(**values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Records ---------------------------------------------------------------------------------------------------------


def test_every_record_has_its_name_and_source() -> None:
    assert "motley" in stacks() and "megatron-core" in stacks()
    for name, record in stacks().items():
        assert record.name == name and record.source
        assert stack(name) is record


def test_motleys_own_stack_loses_nothing() -> None:
    assert replace(stack("motley"), source="") == Stack("motley")


@pytest.mark.parametrize(("name", "hint"), [("megatron-cor", "; did you mean megatron-core?"), ("Nemo", "; did you mean nemo?")])
def test_an_unknown_name_is_told_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        stack(name)
    assert str(caught.value) == f"unknown software stack {name!r}{hint} known: {', '.join(stacks())}"


def test_a_name_like_none_is_told_with_all() -> None:
    with pytest.raises(InputError, match=r"^unknown software stack 'zzz'; known: motley, "):
        stack("zzz")


# --- Reading ---------------------------------------------------------------------------------------------------------


def test_what_a_table_says_is_in_its_unit() -> None:
    found = read(
        host="60 us",
        tensor_host="1.5 ms",
        micro_batch="200 ns",
        step="2 s",
        context="512 MiB",
        matmul_scale=0.8,
        gradient_bytes=6,
        loss_traffic=2.5,
        flash_attention=False,
        gradient_copy=True,
        source="my own runs",
    )
    assert found == Stack(
        "own",
        host_s=60e-6,
        tensor_host_s=1.5e-3,
        micro_batch_s=200e-9,
        step_s=2.0,
        context_bytes=512 * 2**20,
        matmul_scale=0.8,
        gradient_bytes=6.0,
        loss_traffic=2.5,
        flash_attention=False,
        gradient_copy=True,
        source="my own runs",
    )


def test_nothing_said_is_nothing_lost() -> None:
    assert read() == Stack("own")
    assert read(host="0 s", step="0 s", context="0 B") == replace(Stack("own"), context_bytes=0.0)


def test_like_takes_another_stack_but_for_what_is_said() -> None:
    base = stack("deepspeed-zero3")
    assert not base.flash_attention and base.collective_scale < 1
    assert read(like="deepspeed-zero3", host="7 us") == replace(base, name="own", host_s=7e-6)
    assert read(like="deepspeed-zero3", flash_attention=True, collective_scale=1).flash_attention
    assert read_stack("own", Table({"step": "1 s"}, "mine.yaml"), base) == replace(base, name="own", step_s=1.0)
    # What is said there comes before what is given.
    assert read_stack("own", Table({"like": "nemo"}, "mine.yaml"), base) == replace(stack("nemo"), name="own")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hosts": "1 us"}, ["mine.yaml: stack: unknown key 'hosts'", "did you mean host?", "accepted: like, "]),
        ({"host_s": 1e-6}, ["unknown key 'host_s'", "tensor_host"]),
        ({"host": 60}, ["mine.yaml: stack.host: got 60 without a unit"]),
        ({"host": "60 MiB"}, ["stack.host", "60 MiB"]),
        ({"host": "-1 us"}, ["stack.host", "-1 us", "at least zero"]),
        ({"host": "3 s"}, ["mine.yaml: stack.host: expected a time of at most 1 s, but got '3 s'"]),
        ({"context": "1 s"}, ["stack.context", "'1 s'"]),
        ({"matmul_scale": 0}, ["stack.matmul_scale", "at least 0.01", "0"]),
        ({"matmul_scale": "fast"}, ["stack.matmul_scale", "'fast'"]),
        ({"matmul_scale": float("nan")}, ["stack.matmul_scale", "nan"]),
        ({"tensor_overlap": 1.5}, ["stack.tensor_overlap", "at most 1", "1.5"]),
        ({"flash_attention": 1}, ["stack.flash_attention", "true or false", "1"]),
        ({"source": ""}, ["stack.source", "a text"]),
        ({"like": "megatron-cor"}, ["mine.yaml: stack.like: unknown software stack 'megatron-cor'; did you mean megatron-core?"]),
        ({"like": 3}, ["stack.like", "a text", "3"]),
    ],
)
def test_a_mistake_names_file_key_value_and_what_is_accepted(values: dict[str, object], words: list[str]) -> None:
    told = refused(**values)
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("matmul_scale", 0.01, 100.0),
        ("gradient_bytes", 0.0, 1000.0),
        ("host_s", 0.0, 1.0),
        ("tensor_overlap", 0.0, 1.0),
        ("message_s", 0.0, 100.0),
    ],
)
def test_the_ends_of_a_range_are_inside_and_what_is_beyond_is_not(name: str, least: float, most: float) -> None:
    assert getattr(Stack("own", **{name: least}), name) == least  # type: ignore[arg-type]
    assert getattr(Stack("own", **{name: most}), name) == most  # type: ignore[arg-type]
    for beyond in (least - 1e-3, most + 1e-3, float("nan")):
        with pytest.raises(InputError, match=rf"^stack 'own': {name} must be from {least:g} to {most:g}, but got "):
            Stack("own", **{name: beyond})  # type: ignore[arg-type]


def test_every_number_with_a_unit_in_its_name_is_given_with_one() -> None:
    assert set(STACK_UNITS) == {field.name for field in fields(Stack) if field.name.endswith(("_s", "context_bytes"))}


# --- In a cluster file -----------------------------------------------------------------------------------------------

CLUSTER = "name: tiny\nnodes:\n  - {name: box, gpu: RTX4090, gpus: 2, intra: pcie4}\n"


def in_a_cluster(folder: Path, line: str) -> Stack:
    (folder / "tiny.yaml").write_text(CLUSTER + line)
    return read_cluster(folder / "tiny.yaml").stack


def test_a_cluster_names_its_stack_or_describes_one(tmp_path: Path) -> None:
    assert in_a_cluster(tmp_path, "") == stack("motley")
    assert in_a_cluster(tmp_path, "stack: deepspeed-zero3\n") == stack("deepspeed-zero3")
    assert in_a_cluster(tmp_path, "stack: {}\n") == Stack("own")
    assert in_a_cluster(tmp_path, "stack: {host: 60 us}\n") == Stack("own", host_s=60e-6)
    own = in_a_cluster(tmp_path, "stack: {like: deepspeed-zero3, host: 60 us}\n")
    assert own == replace(stack("deepspeed-zero3"), name="own", host_s=60e-6)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stack: nanotorn\n", ["tiny.yaml: stack: unknown software stack 'nanotorn'; did you mean nanotron?"]),
        ("stack: 3\n", ["tiny.yaml: stack", "'3'"]),
        ("stack: [nemo]\n", ["tiny.yaml: stack"]),
        ("stack: {like: nanotorn}\n", ["tiny.yaml: stack.like: unknown software stack 'nanotorn'; did you mean nanotron?"]),
        ("stack: {like: nemo, hots: 60 us}\n", ["tiny.yaml: stack: unknown key 'hots'", "did you mean host?"]),
        ("stack: {host: 60}\n", ["tiny.yaml: stack.host: got 60 without a unit"]),
    ],
)
def test_a_mistake_in_the_stack_of_a_cluster_file_names_its_place(tmp_path: Path, line: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        in_a_cluster(tmp_path, line)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
