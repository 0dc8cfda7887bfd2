"""Sources of tokens, the order of samples, and each pipeline's share of them."""

import dataclasses
import os
import struct
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import runtime.data
from runtime.data import Batches, Order, Tokens, open_data
from sim.spec.plan import Plan
from sim.spec.reading import InputError
from tests.strategies import worlds
from tests.worlds import plan, stage

SEQUENCE = 8


def raw(path: Path, ids: Any, dtype: str = "<u2") -> Path:
    """A file of these token ids, one after the other."""
    np.asarray(ids, dtype=dtype).tofile(path)
    return path


def indexed(stem: Path, documents: list[list[int]], dtype: str = "<u2", code: int = 8) -> Path:
    """An indexed data set of Megatron-LM, written as its builder writes it."""
    arrays = [np.asarray(document, dtype=dtype) for document in documents]
    stem.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    sizes = [len(array) for array in arrays]
    pointers = [0, *accumulate(array.nbytes for array in arrays)][:-1]
    parts = [b"MMIDIDX\x00\x00", struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)]
    parts += [np.array(sizes, "<i4").tobytes(), np.array(pointers, "<i8").tobytes()]
    parts.append(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
    stem.with_suffix(".idx").write_bytes(b"".join(parts))
    return stem


def all_windows(tokens: Tokens) -> list[list[int]]:
    return [tokens.window(i).tolist() for i in range(tokens.samples)]


def cut(stream: Any, sequence_length: int) -> list[list[int]]:
    """The windows of a stream, by hand."""
    stream = list(stream)
    return [stream[i : i + sequence_length + 1] for i in range(0, len(stream) - sequence_length, sequence_length)]


def refusal(text: str, token_type: str = "auto", vocab: int = 300, sequence_length: int = SEQUENCE) -> str:
    """The one line that the opening of some data is refused with."""
    with pytest.raises(InputError) as caught:
        open_data(text, token_type, vocab, sequence_length)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Token files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [SEQUENCE + 1, 2 * SEQUENCE, 2 * SEQUENCE + 1, 30])
def test_a_file_of_tokens_is_cut_into_windows_that_share_one_token(tmp_path: Path, count: int) -> None:
    path = raw(tmp_path / "train.bin", range(count))
    tokens = open_data(f"tokens:{path}", "auto", 300, SEQUENCE)
    assert (tokens.count, tokens.samples) == (count, (count - 1) // SEQUENCE)
    assert all_windows(tokens) == cut(range(count), SEQUENCE)
    assert tokens.window(0).dtype == np.int64
    with pytest.raises(IndexError):
        tokens.window(tokens.samples)


@pytest.mark.parametrize(
    ("token_type", "vocab", "dtype"),
    [("auto", 65_536, "<u2"), ("auto", 65_537, "<u4"), ("uint16", 100_000, "<u2"), ("uint32", 300, "<u4")],
)
def test_the_width_of_tokens_follows_the_vocabulary_or_what_is_said(
    tmp_path: Path, token_type: str, vocab: int, dtype: str
) -> None:
    ids = [299, *range(40)]
    path = raw(tmp_path / "train.bin", ids, dtype)
    assert all_windows(open_data(f"tokens:{path}", token_type, vocab, SEQUENCE)) == cut(ids, SEQUENCE)


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
@pytest.mark.parametrize(("dtype", "code"), [("<u1", 1), ("<i4", 4), ("<i8", 5), ("<u2", 8)])
def test_an_indexed_data_set_is_one_stream_in_the_type_of_its_index(tmp_path: Path, ending: str, dtype: str, code: int) -> None:
    documents = [[1, 2, 3], [], list(range(100, 130)), [7]]
    stem = indexed(tmp_path / "corpus", documents, dtype, code)
    tokens = open_data(f"tokens:{stem}{ending}", "auto", 100_000, SEQUENCE)
    assert all_windows(tokens) == cut([token for document in documents for token in document], SEQUENCE)


def test_a_name_with_dots_is_not_cut_at_them(tmp_path: Path) -> None:
    indexed(tmp_path / "corpus", [list(range(20))])
    for ending in (".bin", ".idx"):
        (tmp_path / f"corpus{ending}").rename(tmp_path / f"corpus.text_document{ending}")
    tokens = open_data(f"tokens:{tmp_path}/corpus.text_document", "auto", 300, SEQUENCE)
    assert all_windows(tokens) == cut(range(20), SEQUENCE)


def test_a_raw_file_of_any_name_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw(tmp_path / "train.u16", range(20))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_data("tokens:~/train.u16", "auto", 300, SEQUENCE).samples == 2


def test_what_is_no_index_of_this_kind_is_refused(tmp_path: Path) -> None:
    stem = indexed(tmp_path / "corpus", [list(range(20))])
    path = stem.with_suffix(".idx")
    good = path.read_bytes()
    changes = {
        b"TNTIDX\x00\x00\x00" + good[9:]: "is not the index of a Megatron-LM data set, which begins with b'MMIDIDX",
        good[:20]: "is not the index of a Megatron-LM data set",
        good[:9] + struct.pack("<Q", 2) + good[17:]: "expected an index of version 1, but got version 2",
        good[:17] + b"\x07" + good[18:]: "expected tokens of a type among 1 (uint8), 2 (int8), 3 (int16), 4 (int32), "
        "5 (int64), 8 (uint16), but got the code 7",
        good[:40]: "ends too early: it has 40 bytes for 1 sequences",
        good[:17] + b"\x04" + good[18:]: "describes 80 bytes of tokens, but its .bin has 40",
    }
    for content, message in changes.items():
        path.write_bytes(content)
        assert refusal(f"tokens:{stem}").startswith(f"{path}: {message}")
    path.unlink()
    assert refusal(f"tokens:{path}") == f"{path}: cannot be read (no such file or directory)"


@pytest.mark.parametrize("limit", [2**26, 10])
@pytest.mark.parametrize(("bad", "dtype", "code"), [(300, "<u2", 8), (-1, "<i4", 4), (2**40, "<i8", 5)])
def test_a_token_outside_the_vocabulary_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, bad: int, dtype: str, code: int
) -> None:
    monkeypatch.setattr(runtime.data, "CHECKED_AT_OPENING", limit)
    monkeypatch.setattr(runtime.data, "BLOCK", 7)
    ids = list(range(30))
    ids[19] = bad
    stem = indexed(tmp_path / "corpus", [ids], dtype, code)
    message = f"{stem}.bin: token 19 is {bad}, but the vocabulary has 300 tokens, 0 to 299"
    if limit > 30:
        assert refusal(f"tokens:{stem}") == message
    else:  # only once it is read
        tokens = open_data(f"tokens:{stem}", "auto", 300, SEQUENCE)
        assert tokens.window(1).tolist() == ids[8:17]
        with pytest.raises(InputError) as caught:
            tokens.window(2)
        assert str(caught.value) == message


def test_a_file_that_shrank_is_told_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.data, "CHECKED_AT_OPENING", 0)
    path = raw(tmp_path / "train.bin", range(30))
    tokens = open_data(f"tokens:{path}", "auto", 300, SEQUENCE)
    raw(path, range(29))
    with pytest.raises(InputError, match=r"train\.bin: has become shorter than the 30 tokens that it had"):
        tokens.window(0)


def test_what_cannot_be_data_is_refused_in_one_line(tmp_path: Path) -> None:
    forms = "data is tokens:FILE, text:FILE or text:FOLDER, but got "
    for text in ("corpus.bin", "csv:corpus", "tokens:", "", ":x", "text:a\0b"):
        assert refusal(text) == forms + repr(text)
    raw(tmp_path / "short.bin", range(SEQUENCE))
    assert refusal(f"tokens:{tmp_path}/short") == (
        f"{tmp_path}/short.bin: has 8 tokens, but one sample of sequence length 8 needs 9"
    )
    (tmp_path / "odd.bin").write_bytes(bytes(41))
    assert refusal(f"tokens:{tmp_path}/odd.bin") == (
        f"{tmp_path}/odd.bin: has 41 bytes, which is no whole number of uint16 tokens of 2 bytes"
    )
    (tmp_path / "empty.bin").touch()
    assert "empty.bin: has 0 tokens" in refusal(f"tokens:{tmp_path}/empty.bin")
    assert refusal(f"tokens:{tmp_path}") == f"{tmp_path}: is a folder, but a file was expected"
    assert refusal("tokens:/dev/null") == "/dev/null: is no regular file, but a file was expected"
    assert refusal(f"tokens:{tmp_path}/none") == f"{tmp_path}/none: cannot be read (no such file or directory)"
    assert refusal(f"text:{tmp_path}/none") == f"{tmp_path}/none: cannot be read (no such file or directory)"
    assert "cannot be read (file name too long)" in refusal("text:" + "x" * 5000)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refusal(f"text:{tmp_path}/loop") == f"{tmp_path}/loop: cannot be read (too many levels of symbolic links)"
    assert refusal("text:~nobody-here/x").startswith("~nobody-here/x: cannot be read (")


# --- Text ------------------------------------------------------------------------------------------------------------


def test_the_tokens_of_a_text_are_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Grüße, and a zero\0 as well")
    tokens = open_data(f"text:{path}", "auto", 256, SEQUENCE)
    assert all_windows(tokens) == cut(path.read_bytes(), SEQUENCE)
    assert refusal(f"text:{path}", vocab=255) == (
        "the tokens of a text are bytes, which need a vocabulary of at least 256, but got 255"
    )


def test_a_folder_is_its_text_files_by_path_with_zeros_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.data, "OPEN_FILES", 2)
    folder, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    contents: dict[str, bytes] = {
        "a-b/z.txt": b"<dash>",  # '-' comes before '/', and '.' between the two
        "a.txt": b"first",
        "a/b/c.py": b"nested " * 5,
        "a/empty": b"",
        "a/late.txt": b"x" * 1024 + b"\0after the first KiB",
        "b.bin": b"text all the same",
    }
    passed_over = {".hidden.txt": b"h", ".git/config": b"g", "image.png": b"\x89PNG\0\0", "a/zero": b"x" * 1023 + b"\0"}
    for name, content in (contents | passed_over).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    elsewhere.mkdir()
    (elsewhere / "linked.txt").write_bytes(b"through a link to a folder")
    (folder / "link").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    (folder / "c.txt").symlink_to(elsewhere / "linked.txt")
    os.mkfifo(folder / "pipe")
    stream = b"\0".join([*contents.values(), b"through a link to a folder"])
    for sequence_length in (1, 3, 64, len(stream) - 1):
        tokens = open_data(f"text:{folder}", "auto", 256, sequence_length)
        assert tokens.count == len(stream)
        assert all_windows(tokens) == cut(stream, sequence_length)
    assert refusal(f"text:{folder}", sequence_length=len(stream)).startswith(f"{folder}: has {len(stream):,} tokens")


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "zeros").write_bytes(bytes(100))
    (tmp_path / ".hidden").write_text("not seen " * 10)
    assert refusal(f"text:{tmp_path}") == f"{tmp_path}: this folder holds no text"


@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\0", b"n")), min_size=1, max_size=8), st.integers(1, 6))
def test_a_folder_is_the_join_of_its_files(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], sequence_length: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for i, content in enumerate(contents):
        (folder / f"{i}.txt").write_bytes(content)
    stream = b"\0".join(contents)
    if not any(contents) or len(stream) <= sequence_length:
        refusal(f"text:{folder}", sequence_length=sequence_length)
    else:
        tokens = open_data(f"text:{folder}", "auto", 256, sequence_length)
        assert all_windows(tokens) == cut(stream, sequence_length)


def test_a_place_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "a.txt").write_text("words " * 10)
    locked.chmod(0)
    try:
        assert refusal(f"text:{tmp_path}") == f"{locked}: cannot be read (permission denied)"
        assert refusal(f"text:{locked}/a.txt") == f"{locked}/a.txt: cannot be read (permission denied)"
    finally:
        locked.chmod(0o700)


# --- The order, and who sees what ------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(0, 2**40), st.integers(0, 5))
def test_every_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    order = Order(samples, seed)
    seen = [order.sample(position) for position in range(epoch * samples, (epoch + 1) * samples)]
    assert sorted(seen) == list(range(samples))


def test_epochs_and_seeds_have_orders_of_their_own_and_at_most_two_are_kept() -> None:
    order = Order(100, 1)
    epochs = [[order.sample(100 * epoch + i) for i in range(100)] for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert len(order._epochs) == 2
    assert [order.sample(i) for i in range(100)] == epochs[0]  # drawn anew, and the same
    assert [Order(100, 2).sample(i) for i in range(100)] != epochs[0]


def test_a_seed_gives_the_same_order_in_every_process() -> None:
    code = "from runtime.data import Order; order = Order(10, 7); print([order.sample(i) for i in range(20)])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "3"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    order = Order(10, 7)
    assert result.stdout.strip() == str([order.sample(i) for i in range(20)])
    assert [order.sample(i) for i in range(10)] == GOLDEN_ORDER


GOLDEN_ORDER = [8, 0, 7, 1, 3, 6, 2, 4, 5, 9]
"""Of ten samples under seed 7. Another order would make a resumed training see samples twice."""


def numbered(path: Path, samples: int, sequence_length: int) -> Tokens:
    """Tokens whose sample i is all i, but for its last token, which is the next one's first."""
    raw(path, np.repeat(np.arange(samples + 1), sequence_length)[: samples * sequence_length + 1], "<u4")
    return open_data(f"tokens:{path}", "uint32", samples + 1, sequence_length)


def whole(
    batches: Batches, plan: Plan, consumed: int, pipeline: int, m: int, bound: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a micro-batch, of whose sequences each slice gives its own."""
    count = plan.sequence_slices
    slices = [batches.micro_batch(consumed, pipeline, m * count + place, bound) for place in range(count)]
    assert all(len(tokens_SB) == len(labels_SB) == plan.slice_length for tokens_SB, labels_SB in slices)
    tokens, labels = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return tokens, labels


def iteration(batches: Batches, plan: Plan, consumed: int) -> list[int]:
    """The samples of one iteration, in the plan's order, as the replicas of each stage have them between them."""
    seen: list[int] = []
    for p, pipeline in enumerate(plan.pipelines):
        for m in range(pipeline.micro_batches):
            by_stage = []
            for s in pipeline.stages:
                bounds = pairwise([0, *accumulate(replica.sequences for replica in s.replicas)])
                parts = [whole(batches, plan, consumed, p, m, bound) for bound in bounds]
                for tokens_SB, labels_SB in parts:
                    assert torch.equal(tokens_SB[1:], labels_SB[:-1])
                    assert bool((tokens_SB == tokens_SB[0]).all())
                by_stage.append([int(i) for tokens_SB, _ in parts for i in tokens_SB[0]])
            assert all(samples == by_stage[0] for samples in by_stage)
            seen += by_stage[0]
    return seen


@given(worlds(), st.integers(1, 70), st.integers(0, 1000))
def test_over_an_epoch_every_sample_is_seen_once_whatever_the_plan(
    tmp_path_factory: pytest.TempPathFactory, world: tuple[Any, Plan], samples: int, seed: int
) -> None:
    _, plan = world
    tokens = numbered(tmp_path_factory.mktemp("data") / "train.bin", samples, plan.sequence_length)
    assert tokens.samples == samples
    batches = Batches(tokens, Order(samples, seed), plan)
    steps = -(-2 * samples // plan.global_batch)
    seen = [sample for step in range(steps) for sample in iteration(batches, plan, step * plan.global_batch)]
    assert sorted(seen[:samples]) == sorted(seen[samples : 2 * samples]) == list(range(samples))
    order = Order(samples, seed)
    assert seen == [order.sample(position) for position in range(steps * plan.global_batch)]
    # Another plan of the same global batch, and a run that begins here, see the same.
    other = one_pipeline(plan)
    last = (steps - 1) * plan.global_batch
    assert iteration(Batches(tokens, Order(samples, seed), other), other, last) == seen[last:]


def one_pipeline(like: Plan) -> Plan:
    """A plan of one lane that takes the global batch one sequence at a time."""
    return plan([[stage("n0/0", (0, 2))]], like.global_batch, sequence_length=like.sequence_length)


def test_micro_batches_are_sequence_first_contiguous_and_of_whole_numbers(tmp_path: Path) -> None:
    tokens = open_data(f"tokens:{raw(tmp_path / 'train.bin', range(100))}", "auto", 300, 4)
    two = plan([[stage("n0/0", (0, 2))], [stage("n0/1", (0, 2))]], 3, sequence_length=4)
    batches = Batches(tokens, Order(tokens.samples, 0), two)
    tokens_SB, labels_SB = batches.micro_batch(6, 1, 2, (0, 1))
    assert tokens_SB.shape == labels_SB.shape == (4, 1)
    assert tokens_SB.dtype == labels_SB.dtype == torch.int64
    assert tokens_SB.is_contiguous() and labels_SB.is_contiguous()
    window = tokens.window(Order(tokens.samples, 0).sample(6 + 3 + 2)).tolist()
    assert (tokens_SB[:, 0].tolist(), labels_SB[:, 0].tolist()) == (window[:-1], window[1:])


def test_a_slice_has_its_part_of_the_tokens_and_labels(tmp_path: Path) -> None:
    tokens = open_data(f"tokens:{raw(tmp_path / 'train.bin', range(100))}", "auto", 300, 4)
    uncut = plan([[stage("n0/0", (0, 2))]], 3, sequence_length=4)
    cut = dataclasses.replace(uncut, sequence_slices=2)
    order = Order(tokens.samples, 0)
    expected = Batches(tokens, order, uncut).micro_batch(6, 0, 2, (0, 1))
    for place in range(2):
        found = Batches(tokens, order, cut).micro_batch(6, 0, 2 * 2 + place, (0, 1))
        for part, all_SB in zip(found, expected, strict=True):
            assert part.is_contiguous() and torch.equal(part, all_SB[2 * place : 2 * place + 2])
