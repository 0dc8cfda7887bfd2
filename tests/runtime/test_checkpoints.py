"""Checkpoints: any division of the numbers over ranks loads into any other, and no crash, full disk or damage spoils one.

Tensors are flat and named by a letter. A share is what one rank saves: `(name, start, values)`; a wish is what it loads:
`(name, start, stop)`. Three worker processes that run many cases stand for the ranks; None in the place of a group is this
process alone.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from runtime import checkpoint_items
from runtime.checkpoints import Stretch, complete, latest, load, read_facts, save
from sim.spec.reading import InputError
from tests.runtime.processes import soon_started

RANKS = 3
ALL, LAST_TWO = (0, 1, 2), (1, 2)
TIMEOUT_S = 60.0
FULL_BYTES = 40_000

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Share: TypeAlias = tuple[str, int, Numbers]
Wish: TypeAlias = tuple[str, int, int]


# --- Ranks -----------------------------------------------------------------------------------------------------------


def save_shares(
    group: Any,
    folder: Path,
    step: int,
    sizes: Mapping[str, int],
    shares: Sequence[Share],
    facts: Mapping[str, Any] = MappingProxyType({}),
    keep: int = 0,
    item_size: int = checkpoint_items.ITEM_SIZE,
    full_on: int | None = None,
) -> Path:
    """The checkpoint that this rank saved with the others of its group. On rank `full_on` no file can exceed FULL_BYTES."""
    stretches = [Stretch(name, sizes[name], start, torch.from_numpy(values)) for name, start, values in shares]
    usual, limits = checkpoint_items.ITEM_SIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        checkpoint_items.ITEM_SIZE = item_size
        if full_on == (0 if group is None else dist.get_rank()):
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, limits[1]))
        return save(folder, step, stretches, facts, group, keep)
    finally:
        checkpoint_items.ITEM_SIZE = usual
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def load_wishes(group: Any, checkpoint: Path, sizes: Mapping[str, int], wishes: Sequence[Wish]) -> list[Numbers]:
    """The numbers that this rank loaded with the others of its group."""
    found = [np.full(stop - start, np.nan, np.float32) for _, start, stop in wishes]
    wanted = zip(wishes, found, strict=True)
    load(checkpoint, [Stretch(name, sizes[name], start, torch.from_numpy(values)) for (name, start, _), values in wanted], group)
    return found


class World:
    """RANKS processes that wait for a function to call."""

    def __init__(self, folder: Path) -> None:
        context = soon_started()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(folder / "store"), there), daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def call(
        self, group: Sequence[int] | None, work: Callable[..., Any], of_rank: Sequence[tuple[Any, ...]], **options: Any
    ) -> Any:
        """What `work` returned, or raised, on each rank of the group: `of_rank` are the arguments of each, `options` of all."""
        if group is None:
            return [work(None, *of_rank[0], **options)]
        for index, rank in enumerate(group):
            self.connections[rank].send((tuple(group), work, of_rank[index], options))
        answers = []
        for rank in group:
            assert self.connections[rank].poll(2 * TIMEOUT_S), f"rank {rank} does not answer"
            answers.append(self.connections[rank].recv())
        return answers

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(rank: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in (ALL, LAST_TWO)}
    while True:
        try:
            ranks, work, arguments, options = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            connection.send(work(groups[ranks], *arguments, **options))
        except Exception as error:
            connection.send(error)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


def save_alone(folder: Path, step: int, values: Mapping[str, Sequence[float]], **options: Any) -> Path:
    """The checkpoint of a few numbers that this process saved."""
    arrays = {name: np.array(numbers, np.float32) for name, numbers in values.items()}
    sizes = {name: len(numbers) for name, numbers in arrays.items()}
    return save_shares(None, folder, step, sizes, [(name, 0, numbers) for name, numbers in arrays.items()], **options)


def load_alone(checkpoint: Path, **sizes: int) -> dict[str, list[float]]:
    """The whole tensors of a checkpoint."""
    found = load_wishes(None, checkpoint, sizes, [(name, 0, size) for name, size in sizes.items()])
    return {name: values.tolist() for name, values in zip(sizes, found, strict=True)}


# --- What is saved is loaded -----------------------------------------------------------------------------------------


def test_a_lone_process_gets_back_what_it_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    facts = {"model": {"hidden": 4}, "consumed": 512, "data": "tokens:a.bin"}
    checkpoint = save_alone(tmp_path / "new" / "folder", 20, {"a": [1, 2, 3], "b": [4]}, facts=facts)
    assert checkpoint == tmp_path / "new" / "folder" / "step-00000020"
    assert load_alone(checkpoint, a=3, b=1) == {"a": [1, 2, 3], "b": [4]}
    assert read_facts(checkpoint) == {"step": 20, **facts}
    assert latest(tmp_path / "new" / "folder") == checkpoint
    written = json.loads((checkpoint / "motley.json").read_text())
    assert written["format"] == "motley-checkpoint/1"
    assert set(written["versions"]) == {"motley", "python", "torch"}
    assert capfd.readouterr() == ("", "")
    assert list(recwarn) == []


def test_numbers_are_converted_to_the_type_that_is_wanted(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path, 1, {"a": [1.5, 2.25, -3]})
    values = torch.zeros(3, dtype=torch.float64)
    load(checkpoint, [Stretch("a", 3, 1, values[:2])], None)
    assert values.tolist() == [2.25, -3, 0]


def test_types_are_saved_as_they_are(tmp_path: Path) -> None:
    precise = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    checkpoint = save(tmp_path, 1, [Stretch("a", 2, 0, precise)], {}, None)
    found = torch.zeros(2, dtype=torch.float64)
    load(checkpoint, [Stretch("a", 2, 0, found)], None)
    assert torch.equal(found, precise)


def test_a_parameter_that_requires_gradients_can_be_loaded(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    load(save_alone(tmp_path, 1, {"a": [1, 2, 3, 4]}), [Stretch("a", 4, 0, parameter.view(-1))], None)
    assert parameter.tolist() == [[1, 2], [3, 4]]


Group: TypeAlias = tuple[int, ...] | None


@st.composite
def divisions(draw: st.DrawFn, sizes: Mapping[str, int], ranks: int) -> list[list[Wish]]:
    """Every number of the tensors in one stretch of one of these ranks; some have many stretches, and some have none."""
    of_rank: list[list[Wish]] = [[] for _ in range(ranks)]
    for name, size in sizes.items():
        cuts = sorted(draw(st.sets(st.integers(0, size), max_size=6)) | {0, size})
        for start, stop in pairwise(cuts):
            of_rank[draw(st.integers(0, ranks - 1))].append((name, start, stop))
    return [draw(st.permutations(wishes)) for wishes in of_rank]


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, int], int, Group, list[list[Wish]], Group, list[list[Wish]]]:
    """Sizes, the length of an item; the group that saves, and what each saves; the group that loads, and what each loads."""
    sizes = draw(st.dictionaries(st.sampled_from("abc"), st.integers(1, 40), min_size=1))
    groups = [draw(st.sampled_from((ALL, LAST_TWO, None))) for _ in range(2)]
    saved, loaded = (draw(divisions(sizes, len(group or (0,)))) for group in groups)
    for wishes in loaded:  # whole parameters are loaded on several ranks
        for name, size in sizes.items():
            if draw(st.booleans()):
                start = draw(st.integers(0, size))
                wishes.append((name, start, draw(st.integers(start, size))))
    return sizes, draw(st.sampled_from((3, 1000))), groups[0], saved, groups[1], loaded


@given(cases())
def test_every_division_over_ranks_loads_into_every_other(world: World, case: Any) -> None:
    sizes, item_size, savers, saved, loaders, loaded = case
    generator = np.random.default_rng(0)
    truth = {name: generator.standard_normal(size, np.float32) for name, size in sizes.items()}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        shares = [[(name, start, truth[name][start:stop].copy()) for name, start, stop in held] for held in saved]
        answers = world.call(savers, save_shares, [(folder, 7, sizes, held) for held in shares], item_size=item_size)
        assert answers == [folder / "step-00000007"] * len(shares)
        found = world.call(loaders, load_wishes, [(answers[0], sizes, wishes) for wishes in loaded])
    for wishes, numbers in zip(loaded, found, strict=True):
        assert [values.tolist() for values in numbers] == [truth[name][start:stop].tolist() for name, start, stop in wishes]


# --- What is refused -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(world: World, tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path, 1, {"a": [1, 2, 3]})
    wishes: list[list[Wish]] = [[("a", 0, 2)], [], []]
    answers = world.call(ALL, load_wishes, [(checkpoint, {"a": 4}, wish) for wish in wishes])
    assert [str(answer) for answer in answers] == [f"{checkpoint}: is of another model: a has 3 numbers there, but 4 here"] * 3
    assert all(isinstance(answer, InputError) for answer in answers)


def test_numbers_that_were_not_saved_are_told_on_all_ranks(world: World, tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path, 1, {"a": [1, 2, 3]})
    wishes: list[list[Wish]] = [[("a", 0, 2)], [], [("a", 1, 3), ("b", 2, 4)]]
    answers = world.call(ALL, load_wishes, [(checkpoint, {"a": 3, "b": 5}, wish) for wish in wishes])
    assert [str(answer) for answer in answers] == [f"{checkpoint}: holds no numbers 2 to 4 of b"] * 3
    assert all(isinstance(answer, InputError) for answer in answers)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 2, 5), "no rank saves numbers 4 to 5 of its 7"),
        ((0, 1, 5), "two ranks save number 1 of its 7"),
        ((0, 0, 5), "two ranks save number 0 of its 7"),
        ((1, 3, 5), "no rank saves numbers 0 to 1 of its 7"),
    ],
)
def test_numbers_that_no_rank_or_two_ranks_save_are_refused_on_all(
    world: World, tmp_path: Path, starts: Sequence[int], message: str
) -> None:
    of_rank = [(tmp_path, 1, {"a": 7}, [("a", start, np.zeros(2, np.float32))]) for start in starts]
    answers = world.call(ALL, save_shares, of_rank)
    assert all(isinstance(answer, RuntimeError) and message in str(answer) for answer in answers), answers
    assert list(tmp_path.iterdir()) == []


def test_facts_that_no_json_can_say_fail_on_all_ranks_and_leave_nothing(world: World, tmp_path: Path) -> None:
    of_rank: list[Any] = [(tmp_path, 1, {"a": 2}, [("a", 0, np.zeros(2, np.float32))]), *[(tmp_path, 1, {}, [])] * 2]
    answers = world.call(ALL, save_shares, of_rank, facts={"x": {1, 2}})
    assert all(isinstance(answer, RuntimeError) and "set is not JSON" in str(answer) for answer in answers), answers
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_on_all_ranks(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "checkpoints"
    answers = world.call(LAST_TWO, save_shares, [(folder, 1, {}, [])] * 2)
    assert [str(answer) for answer in answers] == [f"{folder}/step-00000001: cannot be written (not a directory)"] * 2
    assert all(isinstance(answer, InputError) for answer in answers)


def test_a_folder_that_the_ranks_do_not_share_is_told_on_all_of_them(world: World, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    of_rank = [(folder, 1, {"a": 6}, [("a", 2 * i, np.zeros(2, np.float32))]) for i, folder in enumerate(folders)]
    answers = world.call(ALL, save_shares, of_rank)
    assert [str(answer) for answer in answers] == [
        f"{tmp_path}/a: all workers must share this folder, but it lacks what some wrote"
    ] * 3
    assert complete(tmp_path / "a") == complete(tmp_path / "b") == []


def test_a_stretch_outside_of_its_tensor_cannot_be_made() -> None:
    with pytest.raises(ValueError, match=r"a: numbers 3 to 5 are not among its 4"):
        Stretch("a", 4, 3, torch.zeros(2))
    with pytest.raises(ValueError, match=r"a: the values must be flat and contiguous, but got \(2, 2\)"):
        Stretch("a", 4, 0, torch.zeros(2, 2))


# --- Damage ----------------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _spoil(path: Path) -> None:
    path.write_bytes(b"\x5a" * path.stat().st_size)


def _flip(path: Path) -> None:
    """Another number in the middle, where nothing but a checksum sees it."""
    content = bytearray(path.read_bytes())
    at = content.index(np.float32(2).tobytes())
    content[at : at + 4] = np.float32(3).tobytes()
    path.write_bytes(content)


def _rename_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 1', '"step": 3'))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a data file is missing": ("__0_0.distcp", Path.unlink, "is damaged (__0_0.distcp is missing)"),
    "a data file is cut": ("__0_0.distcp", _cut, "is damaged (__0_0.distcp has "),
    "a data file is overwritten": ("__0_0.distcp", _spoil, "is damaged (__0_0.distcp is not what was saved)"),
    "a number is another": ("__0_0.distcp", _flip, "is damaged (__0_0.distcp is not what was saved)"),
    "DCP's own file is missing": (".metadata", Path.unlink, "is damaged (.metadata is missing)"),
    "DCP's own file is cut": (".metadata", _cut, "is damaged (.metadata has "),
    "DCP's own file is overwritten": (".metadata", _spoil, "is damaged (.metadata is not what was saved)"),
    "the facts are missing": ("motley.json", Path.unlink, "is no complete checkpoint (it has no motley.json)"),
    "the facts are cut": ("motley.json", lambda path: os.truncate(path, 30), "motley.json, line 2, column 12: ends too early"),
    "the facts are of another format": (
        "motley.json",
        lambda path: path.write_text('{"format": "motley-plan/1"}'),
        "motley.json: format: expected one of motley-checkpoint/1, but got 'motley-plan/1'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_in_one_line_on_all_ranks(
    world: World, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file, spoil, message = DAMAGES[damage]
    checkpoint = save_alone(tmp_path, 1, {"a": [1, 2, 3]})
    spoil(checkpoint / file)
    wishes: list[list[Wish]] = [[], [], [("a", 0, 3)]]  # the first ranks want no number, and are told as well
    answers = world.call(ALL, load_wishes, [(checkpoint, {"a": 3}, wish) for wish in wishes])
    assert all(isinstance(answer, InputError) for answer in answers), answers
    assert len({str(answer) for answer in answers}) == 1
    assert str(answers[0]).startswith(str(checkpoint))
    assert message in str(answers[0])
    assert "\n" not in str(answers[0])
    if file == "motley.json":
        with pytest.raises(InputError):
            read_facts(checkpoint)
    with pytest.raises(InputError):
        load_alone(checkpoint, a=3)
    assert capfd.readouterr() == ("", "")


def test_facts_of_another_step_are_told(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path, 1, {"a": [1, 2, 3]})
    _rename_step(checkpoint / "motley.json")
    with pytest.raises(InputError, match=r"step-00000001: is damaged \(its motley.json tells of step 3\)"):
        read_facts(checkpoint)


def test_a_checksum_of_another_file_is_told(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path, 1, {"a": [1, 2, 3]})
    facts = checkpoint / "motley.json"
    facts.write_text(facts.read_text().replace('"crc32": {', '"crc32": {"x": 1, '))
    with pytest.raises(InputError, match="has the checksum of x, which is none of its files"):
        load_alone(checkpoint, a=3)


def test_checkpoints_of_before_there_were_checksums_are_loaded(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path, 1, {"a": [1, 2, 3]})
    facts = json.loads((checkpoint / "motley.json").read_text())
    assert set(facts["crc32"]) == set(facts["files"]) == {".metadata", "__0_0.distcp"}
    del facts["crc32"]
    (checkpoint / "motley.json").write_text(json.dumps(facts))
    assert load_alone(checkpoint, a=3) == {"a": [1, 2, 3]}


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no complete checkpoint"):
        read_facts(tmp_path / "step-00000001")
    with pytest.raises(InputError, match="is no complete checkpoint"):
        load(tmp_path / "step-00000001", [], None)


# --- A full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full_on", "saves", "count", "size", "facts"),
    [(0, 0, 1, 30_000, ""), (2, 2, 1, 30_000, ""), (0, 1, 400, 1, ""), (0, 1, 1, 1, "x" * 100_000)],
    ids=["first rank's numbers", "last rank's numbers", "DCP's own file", "facts"],
)
def test_a_full_disk_is_told_on_all_ranks_and_leaves_what_was_there(
    world: World, tmp_path: Path, full_on: int, saves: int, count: int, size: int, facts: str
) -> None:
    # A limit on the length of one rank's files stands for the disk: writing fails in the midst, as on a full one.
    earlier = save_alone(tmp_path, 10, {"a": [1, 2]})
    sizes = {f"tensor {i:0100}": size for i in range(count)}
    shares: list[list[Share]] = [[], [], []]
    shares[saves] = [(name, 0, np.arange(size, dtype=np.float32)) for name in sizes]
    of_rank = [(tmp_path, 20, sizes, share, {"text": facts}) for share in shares]
    for answer in world.call(ALL, save_shares, of_rank, full_on=full_on):
        assert isinstance(answer, OSError), answer
        assert (answer.errno, answer.filename) == (errno.EFBIG, str(tmp_path / "step-00000020"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert latest(tmp_path) == earlier
    assert load_alone(earlier, a=2) == {"a": [1, 2]}
    world.call(ALL, save_shares, of_rank)  # there is room again
    assert complete(tmp_path) == [earlier, tmp_path / "step-00000020"]


def test_a_full_disk_prints_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # DCP's stream was flushed once more when it was collected; its file was closed by then, and Python 3.13 prints that.
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with pytest.raises(OSError, match="step-00000001"):
        save_alone(tmp_path, 1, {"a": [0] * 30_000}, full_on=0)
    gc.collect()
    assert printed == []


# --- Which are complete ----------------------------------------------------------------------------------------------


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 100_000_000, 10):
        save_alone(tmp_path, step, {"a": [step]})
    names = ["step-00000008", "step-00000009", "step-00000010", "step-100000000"]
    assert [path.name for path in complete(tmp_path)] == names
    save_alone(tmp_path, 11, {"a": [11]}, keep=3)
    assert [path.name for path in complete(tmp_path)] == ["step-00000010", "step-00000011", "step-100000000"]
    assert len(list(tmp_path.iterdir())) == 3


def test_what_was_just_saved_is_kept_even_where_later_steps_are_there(tmp_path: Path) -> None:
    for step in (10, 20):
        save_alone(tmp_path, step, {"a": [step]})
    checkpoint = save_alone(tmp_path, 5, {"a": [5]}, keep=1)
    assert complete(tmp_path) == [checkpoint, tmp_path / "step-00000020"]


def test_leftovers_of_a_crash_are_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    earlier = save_alone(tmp_path, 10, {"a": [1]})
    for leftover in (".step-00000020.partial", ".step-00000030.partial", ".step-00000005.removed", ".step-00000010.replaced"):
        shutil.copytree(earlier, tmp_path / leftover)
    (tmp_path / "step-00000040").mkdir()  # without motley.json
    (tmp_path / "notes.txt").write_text("mine")
    assert complete(tmp_path) == [earlier]
    later = save_alone(tmp_path, 20, {"a": [2]})
    assert complete(tmp_path) == [earlier, later]
    assert load_alone(later, a=1) == {"a": [2]}
    assert {path.name for path in tmp_path.iterdir()} == {earlier.name, later.name, "step-00000040", "notes.txt"}


def test_a_checkpoint_that_a_crash_left_without_its_name_is_found_and_gets_it_back(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path, 20, {"a": [1]})
    hidden = checkpoint.rename(tmp_path / ".step-00000020.replaced")
    assert latest(tmp_path) == hidden
    assert load_alone(hidden, a=1) == {"a": [1]}
    later = save_alone(tmp_path, 30, {"a": [2]})
    assert complete(tmp_path) == [checkpoint, later]
    assert load_alone(checkpoint, a=1) == {"a": [1]}


def test_no_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert complete(tmp_path / "none") == []
    assert latest(tmp_path / "none") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be read \(not a directory\)"):
        complete(tmp_path / "file")


# --- A kill ----------------------------------------------------------------------------------------------------------

OLD, NEW = [1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]


def _die_at(count: int, folder: Path) -> None:
    """Nothing; this process kills itself when it is about to touch the folder, a file or an item for the count-th time."""
    left = count

    def touched() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
            touched()

    def touching(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            touched()
            return function(*arguments, **keywords)

        return wrapped

    sys.addaudithook(audit)
    os.fsync = touching(os.fsync)
    checkpoint_items._SavePlanner.resolve_data = touching(checkpoint_items._SavePlanner.resolve_data)  # type: ignore[method-assign]


def _kill_everywhere(folder: Path, earlier: int, keep: int) -> list[tuple[int, list[float], list[str]]]:
    """For each moment of saving step 20 after an earlier one, what a kill left: the latest step and its numbers; and what the
    next save of step 20 left of all files."""
    found: list[tuple[int, list[float], list[str]]] = []
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        save_alone(folder, earlier, {"a": OLD})
        child = os.fork()
        if child == 0:
            _die_at(len(found) + 1, folder)
            save_alone(folder, 20, {"a": NEW}, keep=keep, item_size=2)  # three items
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return found
        last = latest(folder)
        assert last is not None
        step, numbers = read_facts(last)["step"], load_alone(last, a=5)["a"]
        save_alone(folder, 20, {"a": NEW}, keep=1)
        found.append((step, numbers, [path.name for path in folder.iterdir()]))


def _kill_twice(folder: Path, answer: Connection) -> None:
    """Nothing; answers for a later step, and for the same. It runs in a process of its own, which has no threads to fork."""
    torch.set_num_threads(1)
    answer.send([_kill_everywhere(folder, 10, 1), _kill_everywhere(folder, 20, 0)])


def test_a_kill_at_any_moment_of_saving_leaves_the_old_or_the_new_checkpoint_whole(tmp_path: Path) -> None:
    context = soon_started()
    here, there = context.Pipe()
    process = context.Process(target=_kill_twice, args=(tmp_path / "checkpoints", there))
    process.start()
    there.close()
    answers = here.recv()
    process.join(5)
    for earlier, found in zip((10, 20), answers, strict=True):
        outcomes = [(step, numbers) for step, numbers, _ in found]
        news = outcomes.count((20, NEW))
        olds = len(outcomes) - news
        assert outcomes == [(earlier, OLD)] * olds + [(20, NEW)] * news
        assert olds > 10  # folder, partial, three items, DCP's files and motley.json, each opened and flushed
        assert news > 3  # the folder flushed, the old one renamed and removed
        assert all(names == ["step-00000020"] for _, _, names in found)
