"""The frame of a page: one HTML file that holds all it needs, and asks the network for nothing.

A page is made of sections, and a section of parts: notes, tables that sort and filter, bars, pictures, and runs to look at more
closely. The templates beside this file (`templates/`) say how each looks, on a wide screen, on a phone and in print. All text is
escaped; only `Markup` is taken as it is.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sim.spec.version import VERSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Note:
    """A paragraph. Of facts, each is set apart from the next."""

    kind: ClassVar[str] = "note"
    text: str
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Cell:
    """A table's cell: what it shows, and the number by which it sorts; without one it sorts by its text."""

    text: str
    value: float | None = None
    tone: str = ""
    """'bad' and 'good' are told by a sign too, not by the colour alone."""
    opens: str = ""
    """The key of the run that a click shows more closely."""


@dataclass(frozen=True)
class Table:
    """A table whose columns sort; `search` gives it a box that filters, `choose` a list for each of these columns.

    `keys`, one a row, say what else on the page belongs to the row: bars with that key follow the filter and the order.
    """

    kind: ClassVar[str] = "table"
    name: str
    """Unique on the page, and an HTML id: letters, digits and dashes."""
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    search: bool = False
    choose: Sequence[str] = ()
    keys: Sequence[str] = ()
    noun: str = "rows"
    """What its rows are, in the plural."""

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """The rows, with the numbers of texts that are plain figures."""
        return [[cell if isinstance(cell, Cell) else Cell(cell, figure(cell)) for cell in row] for row in self.rows]

    @cached_property
    def right(self) -> list[bool]:
        """Of each column, whether it holds numbers, which stand on the right."""
        columns = list(zip(*self.cells, strict=True)) or [()] * len(self.headings)
        return [
            any(cell.value is not None for cell in column)
            and all(cell.value is not None or cell.text in ("", "-") for cell in column)
            for column in columns
        ]

    @cached_property
    def choices(self) -> list[tuple[int, str, list[str]]]:
        """Number, heading and values of each column that has a list to choose from."""
        found = []
        for i, heading in enumerate(self.headings):
            values = {row[i].text: row[i].value for row in self.cells}
            if heading in self.choose and len(values) > 1:
                ordered = sorted(values.items(), key=lambda entry: (entry[1] is None, entry[1] or 0.0, natural(entry[0])))
                found.append((i, heading, [text for text, _ in ordered]))
        return found


@dataclass(frozen=True)
class Bar:
    """One bar: its length as a fraction of the track, and of a paler one behind it, the text beside it, and its tone."""

    label: str
    fraction: float
    text: str
    behind: float | None = None
    tone: str = ""
    """'' | 'full' (nearly full) | 'over' (too much)."""
    key: str = ""
    """That of the table's row that it belongs to."""

    @property
    def width(self) -> str:
        """Its length in per cent of the track."""
        return share(self.fraction)

    @property
    def hides_behind(self) -> bool:
        """Whether the paler one, which is shorter, has to be drawn as a mark."""
        return self.behind is not None and self.behind < self.fraction

    @property
    def behind_width(self) -> str | None:
        """The length of the paler one, in per cent of the track."""
        return None if self.behind is None else share(self.behind)


@dataclass(frozen=True)
class Bars:
    """Bars below one another; of more than `most`, the rest is shown on demand. `alt` says in words what they show."""

    kind: ClassVar[str] = "bars"
    alt: str
    bars: Sequence[Bar]
    caption: str = ""
    legend: Sequence[tuple[str, str]] = ()
    """Class and words of each colour."""
    most: int = 40
    follows: str = ""
    """The name of the table whose filter and order they follow."""


@dataclass(frozen=True)
class Picture:
    """An image, as a data URI, with the words for those who do not see it."""

    kind: ClassVar[str] = "picture"
    source: str
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Html:
    """Markup that is put into the page as it is: what `markup` or `heading` makes, which escape what they are given."""

    kind: ClassVar[str] = "html"
    markup: Markup


@dataclass(frozen=True)
class Look:
    """A run to look at more closely: a title and parts, shown from the beginning or when its row is clicked."""

    key: str
    title: str
    parts: Sequence[Note | Table | Bars | Picture | Html]
    shown: bool = False


@dataclass(frozen=True)
class Looks:
    """Runs to look at more closely, one below the other."""

    kind: ClassVar[str] = "looks"
    looks: Sequence[Look]


Part: TypeAlias = Note | Table | Bars | Picture | Html | Looks


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it. `intro` says how to read it."""

    title: str
    parts: Sequence[Part]
    intro: str = ""

    @property
    def name(self) -> str:
        """Its id on the page."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


def page(title: str, sections: Sequence[Section], subtitle: str = "") -> str:
    """The text of an HTML file with these sections; those without parts are left out.

    It holds its style, its script and its images, and forbids the browser to load anything else.
    """
    shown = [section for section in sections if section.parts]
    return _environment().get_template("page.html").render(title=title, subtitle=subtitle, sections=shown, version=VERSION)


def markup(template: str, **values: object) -> Html:
    """The part that a template of the folder makes of the values."""
    return Html(Markup(_environment().get_template(template).render(**values)))


def picture(figure: Figure, alt: str, caption: str = "") -> Picture:
    """A matplotlib figure as an image of the page: SVG, with its text as shapes, so that it looks the same everywhere."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "motley"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return picture_bytes(buffer.getvalue(), alt, caption)


def picture_bytes(svg: bytes, alt: str, caption: str = "") -> Picture:
    """The content of an SVG file as an image of the page."""
    return Picture("data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii"), alt, caption)


def heading(text: str) -> Html:
    """A heading below that of its section."""
    return Html(Markup("<h4>{}</h4>\n").format(text))


def figure(text: str) -> float | None:
    """The number that a text is, with thousands parted by commas or not, or None for any other text."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def natural(name: str) -> list[tuple[bool, int, str]]:
    """By which names are sorted so that node-10/2 comes after node-9/11."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name) if part]


def share(fraction: float) -> str:
    """A fraction in per cent, between 0 and 100, as CSS takes it."""
    return f"{min(max(fraction, 0.0), 1.0) * 100:.4g}%"


@cache
def _environment() -> Environment:
    """The templates, which escape whatever they are given."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"inlined": _inlined, "packed": _packed}
    return environment


def _packed(looks: Sequence[Look]) -> str:
    """The runs that are not shown from the beginning, for the script to unpack: as JSON {key: HTML}, deflated, in base 64.

    Hundreds of plans and timelines are alike, and take a tenth of the place so.
    """
    draw = _environment().get_template("parts.html").module.look  # type: ignore[attr-defined]
    texts = {look.key: str(draw(look)) for look in looks if not look.shown}
    return base64.b64encode(zlib.compress(json.dumps(texts, ensure_ascii=False).encode(), 9)).decode("ascii")


def _inlined(name: str) -> Markup:
    """The text of a file of the folder, as it is."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))
