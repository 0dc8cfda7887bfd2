"""Reading quantities, YAML, JSON and tables, and writing files: what is accepted, and the one line that refuses the rest."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.spec.reading import (
    DIMENSIONS,
    RANGES,
    InputError,
    Table,
    nearest,
    parse_json,
    quantity,
    read_json,
    read_own_yaml,
    read_text,
    read_yaml,
    write_file,
)

# --- Quantities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("8 bit/s", "bandwidth", 1),
        ("8 kbit/s", "bandwidth", 1e3),
        ("100 Mbit/s", "bandwidth", 12.5e6),
        ("10 Gbit/s", "bandwidth", 1.25e9),
        ("1.6 Tbit/s", "bandwidth", 200e9),
        ("7 B/s", "bandwidth", 7),
        ("25 GB/s", "bandwidth", 25e9),
        ("1 TB/s", "bandwidth", 1e12),
        ("0.5 GiB/s", "bandwidth", 2**29),
        ("1 KiB/s", "bandwidth", 1024),
        ("3 ns", "time", 3e-9),
        ("50 us", "time", 50e-6),
        ("50 µs", "time", 50e-6),
        ("20 ms", "time", 0.02),
        ("2 s", "time", 2),
        ("2 min", "time", 120),
        ("1.5 h", "time", 5400),
        ("24 GiB", "size", 24 * 2**30),
        ("24 GB", "size", 24e9),
        ("1 TiB", "size", 2**40),
        ("24564 MiB", "size", 24564 * 2**20),
        ("165 TFLOP/s", "rate of work", 165e12),
        ("1.979 PFLOP/s", "rate of work", 1.979e15),
        ("2 GFLOP", "work", 2e9),
        ("450 W", "power", 450),
        ("1.2 kW", "power", 1200),
        ("1.50 $/h", "price", 1.5),
    ],
)
def test_a_quantity_is_read_in_si_units(text: str, dimension: str, value: float) -> None:
    assert quantity(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["10Gbit/s", "10  Gbit/s", "\t10 Gbit/s ", "1e1 Gbit/s", "+10. Gbit/s", "1E+1Gbit/s", "10.0\nGbit/s"]
)
def test_spaces_and_the_form_of_the_number_do_not_matter(text: str) -> None:
    assert quantity(text, "bandwidth") == 1.25e9


@pytest.mark.parametrize("value", [10, 10.0, 0, float("nan"), "10", " 10 ", "1e9"])
def test_a_bare_number_is_refused_with_the_units_accepted(value: object) -> None:
    with pytest.raises(
        InputError, match=r"without a unit, but a bandwidth with its unit \(Mbit/s, Gbit/s, .* for example '10 Gb"
    ):
        quantity(value, "bandwidth")


@pytest.mark.parametrize(
    "text", ["10 GB", "10 gbit/s", "10 Gbit", "10 G bit/s", "10 s", "10 Gbit/s extra", "10 GBit/s", "5 Ebit/s"]
)
def test_a_unit_of_another_kind_is_refused_by_its_name(text: str) -> None:
    unit = text.split(maxsplit=1)[1]
    with pytest.raises(InputError, match=f"^got '{text}' with the unit '{unit}', but a bandwidth"):
        quantity(text, "bandwidth")


@pytest.mark.parametrize(
    "value", ["", "fast", "nan Gbit/s", "inf Gbit/s", "1,5 Gbit/s", "1 2 Gbit/s", "--1 Gbit/s", "0x10 B/s", None, True, [], {}]
)
def test_what_is_no_quantity_at_all_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="but a bandwidth with its unit") as caught:
        quantity(value, "bandwidth")
    assert "\n" not in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "number",
    ["1e400", "-1e309", "1e999999999", "1e99999999999999999999", "1e-320", "-1e-320", "1e-999999999", "1e-99999999999999999999"],
)
def test_a_quantity_beyond_its_range_is_refused_with_the_range(number: str) -> None:
    with pytest.raises(InputError) as caught:
        quantity(f"{number} GB/s", "bandwidth")
    assert str(caught.value) == f"got '{number} GB/s', but a bandwidth from 1 to 1e21 B/s is accepted"


@pytest.mark.parametrize(
    ("dimension", "words"),
    [
        ("bandwidth", "from 1 to 1e21 B/s"),
        ("time", "from 0 to 1e7 s"),
        ("size", "from 1 to 1e18 B"),
        ("rate of work", "from 1000 to 1e24 FLOP/s"),
        ("power", "from 0.001 to 1e9 W"),
        ("price", "from 1e-6 to 1e9 $/h"),
    ],
)
def test_every_dimension_accepts_its_range_with_both_ends(dimension: str, words: str) -> None:
    (smallest, largest), unit = RANGES[dimension], words.split()[-1]
    assert [quantity(f"{bound!r} {unit}", dimension) for bound in (smallest, largest)] == [smallest, largest]
    for beyond in (smallest * 0.99, largest * 1.01):
        if beyond > 0:
            assert line_of(lambda beyond=beyond: quantity(f"{beyond!r} {unit}", dimension)).endswith(f"{words} is accepted")  # type: ignore[misc]


@pytest.mark.parametrize("number", ["0", "-0", "0.000", "0e999999999", "0e-99999999999999999999"])
def test_zero_is_zero_however_it_is_written(number: str) -> None:
    assert quantity(f"{number} GB/s", "bandwidth") == 0.0


@given(st.sampled_from(sorted(DIMENSIONS)), st.data(), st.floats(0.0, 1.0), st.sampled_from((1, -1)))
def test_every_unit_scales_every_number(dimension: str, data: st.DataObject, part: float, sign: int) -> None:
    unit = data.draw(st.sampled_from(sorted(DIMENSIONS[dimension])))
    smallest, largest = (bound / DIMENSIONS[dimension][unit] for bound in RANGES[dimension])
    number = sign * (smallest * 1.01 + part * (largest * 0.99 - smallest * 1.01))
    assert quantity(f"{number!r} {unit}", dimension) == pytest.approx(number * DIMENSIONS[dimension][unit], rel=1e-15)


def test_a_quantity_is_converted_in_decimal_to_the_last_bit() -> None:
    assert quantity("50 us", "time") == 50e-6 != 50 * 1e-6
    assert quantity("3 ns", "time") == 3e-9
    assert quantity("50 \u03bcs", "time") == quantity("50 \u00b5s", "time") == 50e-6


def test_the_nearest_name_is_found_without_regard_to_case() -> None:
    known = ["bandwidth", "latency", "RTX4090"]
    assert nearest("bandwith", known) == "; did you mean bandwidth?"
    assert nearest("rtx409", known) == "; did you mean RTX4090?"
    assert nearest("zzz", known) == "" == nearest("latency", [])
    assert nearest("latency" * 10_000, known * 100) == ""


# --- YAML and JSON ---------------------------------------------------------------------------------------------------


def write(folder: Path, text: str | bytes, name: str = "file.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def line_of(call: Callable[[], object]) -> str:
    """The error's text, which is one line."""
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "at", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", ", line 3, column 1", "the key 'a' stands twice"),
        ("a:\n  - {x: 1, y: 2, x: 3}\n", ", line 2, column 18", "the key 'x' stands twice"),
        ("a: 1\n'a': 2\n", ", line 2, column 1", "the key 'a' stands twice"),
        ("a: [1, 2\nb: 3\n", ", line 2, column 2", "expected ',' or ']', but got ':'"),
        ("a: 1\n\tb: 2\n", ", line 2, column 1", "found character '\\t' that cannot start any token"),
        ("a: *unknown\n", ", line 1, column 4", "found undefined alias 'unknown'"),
        ("a: 1\n---\nb: 2\n", ", line 2, column 1", "but found another document"),
        ("a: !!python/name:os.system x\n", ", line 1, column 4", "could not determine a constructor"),
        ("{[1, 2]: 3}\n", ", line 1, column 2", "found unhashable key"),
        ("a: 2024-13-45\n", "", "month must be in 1..12"),
        ("a: \x07\n", "", "unacceptable character #x0007"),
        ("[" * 100_000, "", "recursion"),
    ],
)
def test_what_is_not_yaml_is_told_in_one_line_with_its_place(tmp_path: Path, text: str, at: str, problem: str) -> None:
    path = write(tmp_path, text)
    error = line_of(lambda: read_yaml(path))
    assert error.startswith(f"{path}{at}: is not valid YAML: ") and problem in error


ROOT = Path(__file__).parents[3]
OWN = sorted(path for part in ("sim", "partition", "runtime", "experiments") for path in (ROOT / part).rglob("*.yaml"))


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_our_own_files_read_the_same_quickly_and_with_care(path: Path) -> None:
    assert repr(read_own_yaml(path)) == repr(read_yaml(path))


def test_one_key_in_two_mappings_is_no_key_twice(tmp_path: Path) -> None:
    path = write(tmp_path, "a: {x: 1}\nb: [{x: 2}, {x: 3}]\n")
    assert read_yaml(path) == {"a": {"x": 1}, "b": [{"x": 2}, {"x": 3}]}


def test_a_mapping_may_be_merged_into_another_and_overridden_there(tmp_path: Path) -> None:
    path = write(tmp_path, "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, b"\xef\xbb\xbfa: 1\n")) == {"a": 1}
    assert read_json(write(tmp_path, b'\xef\xbb\xbf{"a": 1}')) == {"a": 1}


def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    assert line_of(lambda: read_text(tmp_path / "none")) == f"{tmp_path}/none: cannot be read (no such file or directory)"
    assert line_of(lambda: read_text(tmp_path)) == f"{tmp_path}: cannot be read (is a directory)"
    path = write(tmp_path, b"\xff\xfe\x00")
    assert line_of(lambda: read_text(path)) == f"{path}: is not a text file in UTF-8"
    assert line_of(lambda: read_text("a\0b")) == "'a\\x00b': cannot be read (embedded null byte)"


@pytest.mark.parametrize("reader", [read_yaml, read_json])
def test_a_file_that_cannot_be_read_is_not_called_invalid(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    binary = write(tmp_path, b"\xff\xfe\x00")
    assert line_of(lambda: reader(tmp_path / "none")) == f"{tmp_path}/none: cannot be read (no such file or directory)"
    assert line_of(lambda: reader(tmp_path)) == f"{tmp_path}: cannot be read (is a directory)"
    assert line_of(lambda: reader(binary)) == f"{binary}: is not a text file in UTF-8"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "plan, line 1, column 1: ends too early: Expecting value"),
        ('{"a": 1,\n "b": [1, 2', "plan, line 2, column 12: ends too early: Expecting ',' delimiter"),
        ('{"a": "b', "plan, line 1, column 7: ends too early: Unterminated string starting at"),
        ('{"a": 1,\n', "plan, line 2, column 1: ends too early: Expecting property name enclosed in double quotes"),
        ('{"a": 1,\n b: 2}', "plan, line 2, column 2: is not valid JSON: Expecting property name enclosed in double quotes"),
        ('{"a": 1} {', "plan, line 1, column 10: is not valid JSON: Extra data"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "plan: the key 'b' stands twice"),
    ],
)
def test_what_is_not_json_is_told_in_one_line_with_its_place(text: str, error: str) -> None:
    assert line_of(lambda: parse_json(text, "plan")) == error


@pytest.mark.parametrize("text", ['{"layers": ' + "7" * 5000 + "}", "[" * 200_000])
def test_json_that_python_itself_gives_up_on_is_told_in_one_line(text: str) -> None:
    assert line_of(lambda: parse_json(text, "plan")).startswith("plan: is not valid JSON: ")


def test_every_truncated_json_is_refused() -> None:
    text = '{"a": [1, {"b": "c"}], "d": true}'
    for stop in range(len(text)):
        assert line_of(lambda stop=stop: parse_json(text[:stop], "plan")).startswith("plan, line 1, column ")  # type: ignore[misc]


# --- Tables ----------------------------------------------------------------------------------------------------------


def table(**values: object) -> Table:
    return Table(values, "file.yaml", "nodes[0]")


@pytest.mark.parametrize(
    ("getter", "good", "bad", "accepted"),
    [
        (lambda t: t.text("x"), ["a", " a b "], ["", "  ", 1, True, None, ["a"]], "a text"),
        (lambda t: t.integer("x", maximum=9000), [0, 9000], [-1, 9001, 10**30], "a whole number of at least 0 and at most 9,000"),
        (lambda t: t.integer("x", minimum=2), [2, 10**30], [1, -2, 2.0, True, "2", None], "a whole number of at least 2"),
        (
            lambda t: t.number("x", minimum=0.5, maximum=2.0),
            [0.5, 1, 2.0],
            [0.4, 2.1, float("nan"), float("inf"), True, "1", None, 10**400],
            "a number of at least 0.5 and at most 2",
        ),
        (lambda t: t.number("x"), [0, 1e300], [-1, float("inf"), 10**400], "a number of at least 0"),
        (lambda t: t.flag("x"), [True, False], [0, 1, "true", None], "true or false"),
        (lambda t: t.choice("x", ["one", "two"]), ["one", "two"], ["three", 1, None, ["one"]], "one of one, two"),
        (lambda t: t.choice("x", [0, 1]), [0, 1], [2, True, False, "1"], "one of 0, 1"),
        (lambda t: t.items("x", minimum=1), [[1], ["a", None]], [[], {}, "a", None], "a list of at least 1 entries"),
        (lambda t: t.items("x"), [[]], [{}, "a"], "a list"),
    ],
)
def test_a_getter_gives_good_values_and_refuses_bad_ones_with_what_is_accepted(
    getter: Callable[[Table], Any], good: list[object], bad: list[object], accepted: str
) -> None:
    for value in good:
        assert getter(table(x=value)) == value
    for value in bad:
        error = line_of(lambda value=value: getter(table(x=value)))  # type: ignore[misc]
        assert error.startswith(f"file.yaml: nodes[0].x: expected {accepted}, but got "), error
    assert line_of(lambda: getter(table())) == f"file.yaml: nodes[0].x: is missing; expected {accepted}"


def test_a_getter_gives_the_default_where_the_key_is_not_there() -> None:
    empty = table()
    assert empty.text("a", None) is None
    assert empty.integer("b", 3) == 3
    assert empty.quantity("c", "time", 0.5) == 0.5
    assert empty.choice("d", ["x"], "x") == "x"
    assert empty.tables("e", []) == []
    assert empty.table("f", None) is None
    assert "a" not in empty


def test_a_quantity_in_a_table_is_above_zero_unless_zero_is_allowed() -> None:
    assert table(x="0 s").quantity("x", "time", zero=True) == 0
    assert table(x="2 ms").quantity("x", "time") == 0.002
    for text, zero, words in [("0 s", False, "above"), ("-1 s", False, "above"), ("-1 s", True, "of at least")]:
        error = line_of(lambda text=text, zero=zero: table(x=text).quantity("x", "time", zero=zero))  # type: ignore[misc]
        assert error == f"file.yaml: nodes[0].x: got '{text}', but a time {words} zero is accepted"
    error = line_of(lambda: table(x=50).quantity("x", "time"))
    assert error.startswith("file.yaml: nodes[0].x: got 50 without a unit, but a time with its unit (ns, us, ")
    missing = line_of(lambda: table().quantity("x", "time"))
    assert missing == "file.yaml: nodes[0].x: is missing; expected a time with its unit, for example '50 us'"


def test_a_near_miss_of_a_choice_is_named() -> None:
    error = line_of(lambda: table(x="nvlnk").choice("x", ["nvlink", "pcie4"]))
    assert error == "file.yaml: nodes[0].x: expected one of nvlink, pcie4, but got 'nvlnk'; did you mean nvlink?"


def test_tables_in_tables_know_their_place() -> None:
    outer = Table({"nodes": [{"nic": {"count": 0}}, 5]}, "file.yaml")
    assert line_of(lambda: outer.tables("nodes")) == "file.yaml: nodes[1]: expected a mapping of keys to values, but got 5"
    inner = Table({"nodes": [{"nic": {"count": 0}}]}, "file.yaml").tables("nodes")[0].table("nic")
    assert line_of(lambda: inner.integer("count", minimum=1)).startswith("file.yaml: nodes[0].nic.count: expected")
    assert line_of(lambda: Table(None, "file.yaml")) == "file.yaml: expected a mapping of keys to values, but got nothing"
    assert line_of(lambda: Table([1], "file.yaml")) == "file.yaml: expected a mapping of keys to values, but got [1]"


def test_closing_refuses_the_keys_that_nobody_asked_for_and_names_the_nearest() -> None:
    read = table(bandwidth="1 GB/s", latency="1 us")
    read.quantity("bandwidth", "bandwidth"), read.quantity("latency", "time", 0.0)
    read.close()
    read = table(bandwith="1 GB/s")
    read.quantity("bandwidth", "bandwidth", 0.0), read.quantity("latency", "time", 0.0)
    error = "file.yaml: nodes[0]: unknown key 'bandwith'; accepted: bandwidth, latency; did you mean bandwidth?"
    assert line_of(read.close) == error
    unlike = Table({1: 2}, "file.yaml")
    unlike.text("a", None)
    assert line_of(unlike.close) == "file.yaml: unknown key 1; accepted: a"


def test_all_keys_of_a_table_are_texts() -> None:
    named = table(b=1, a=2)
    assert named.keys() == ["b", "a"]
    named.close()
    assert line_of(Table({"a": 1, 2: 3}, "file.yaml").keys) == "file.yaml: the key 2 is not a text"


def test_a_long_value_is_shown_by_its_beginning() -> None:
    error = line_of(lambda: table(x="y" * 1000).flag("x"))
    assert len(error) < 150 and error.endswith("yyy...")


# --- Writing ---------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, str]:
    """All files of a folder, hidden ones too, with their text."""
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_earlier_content_is_kept_under_the_next_free_number(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert write_file(path, "one") is None
    assert contents(tmp_path) == {"plan.json": "one"}
    assert write_file(path, b"two") == tmp_path / "plan.json.~1~"
    assert write_file(path, "three") == tmp_path / "plan.json.~2~"
    assert contents(tmp_path) == {"plan.json": "three", "plan.json.~1~": "one", "plan.json.~2~": "two"}


def test_equal_content_and_content_to_be_replaced_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_file(path, "one")
    assert write_file(path, "one") is None
    assert write_file(path, "two", replace=True) is None
    assert contents(tmp_path) == {"plan.json": "two"}


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_file(str(tmp_path / "a" / "b" / "plan.json"), "µ")
    assert (tmp_path / "a" / "b" / "plan.json").read_bytes() == "µ".encode()


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("x" * 255), "one")
    assert contents(tmp_path) == {"x" * 255: "one"}


def test_a_written_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_file(tmp_path / "plan.json", "one")
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_folder_or_a_file_in_the_way_is_told_in_one_line(tmp_path: Path) -> None:
    assert line_of(lambda: write_file(tmp_path, "x")) == f"{tmp_path}: is a folder, but a file is to be written there"
    (tmp_path / "file").write_text("kept")
    error = line_of(lambda: write_file(tmp_path / "file" / "plan.json", "x"))
    assert error.startswith(f"{tmp_path}/file/plan.json: cannot be written (")
    assert line_of(lambda: write_file("/proc/none/plan.json", "x")).startswith("/proc/none/plan.json: cannot be written (")
    assert contents(tmp_path) == {"file": "kept"}


def test_a_device_is_written_to_without_being_renamed() -> None:
    assert write_file("/dev/null", "x") is None
    assert not Path("/dev/null").is_file() and not Path("/dev/null.~1~").exists()


def test_nothing_is_left_behind_when_the_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_file(path, "one")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left on device") as caught:  # not the user's mistake, so no InputError
        write_file(path, "two")
    assert caught.value.filename == str(path)
    assert contents(tmp_path) == {"plan.json": "one"}


def test_the_earlier_file_stays_when_writing_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_file(path, "one")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "chmod", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, "two")
    assert contents(tmp_path) == {"plan.json": "one"}
