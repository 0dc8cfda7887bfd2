"""The report's page in a browser: what a reader sees and can do, on a wide screen, on a phone and in print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from experiments.cli import run
from tests import chromium
from tests.experiments.report_world import PLANNERS, row, write_results

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.skipif(chromium.missing() is not None, reason=chromium.missing() or "")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Chrome, Path]]:
    folder = tmp_path_factory.mktemp("report")
    write_results(folder / "results")
    path = folder / "report.html"
    assert run(["report", str(folder / "results"), "--out", str(path)]) == 0
    with chromium.browser() as driver:
        yield driver, path


@pytest.fixture
def page(opened: tuple[Chrome, Path]) -> Chrome:
    """The page as it is when it has just been opened, on a wide screen."""
    driver, path = opened
    chromium.resize(driver, 1280)
    chromium.open_page(driver, path)
    return driver


def texts(page: Chrome, selector: str) -> list[str]:
    """What the shown elements say, in their order."""
    script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent).map(e => e.textContent.trim())"
    return list(page.execute_script(script, selector))


def column(page: Chrome, heading: str) -> list[str]:
    """The cells of the shown rows of the table of runs below a heading."""
    headings = texts(page, "#runs th")
    return texts(page, f"#runs tbody tr td:nth-child({headings.index(heading) + 1})")


def click_heading(page: Chrome, heading: str) -> None:
    number = texts(page, "#runs th").index(heading) + 1
    page.find_element("css selector", f"#runs th:nth-child({number}) button").click()


def open_run(page: Chrome, number: int) -> None:
    """Clicks on a run's number, and waits until it is there."""
    from selenium.webdriver.support.wait import WebDriverWait

    page.find_element("css selector", f'#runs a[href="#look-r{number}"]').click()
    shown = "const e = document.getElementById(arguments[0]); return Boolean(e && e.offsetParent)"
    WebDriverWait(page, 5).until(lambda driver: driver.execute_script(shown, f"look-r{number}"))


def test_it_loads_without_an_error_and_asks_for_nothing_else(opened: tuple[Chrome, Path]) -> None:
    driver, path = opened
    chromium.requests(driver), chromium.console_errors(driver)  # what was before
    chromium.open_page(driver, path)
    assert driver.title == "Motley: results"
    assert chromium.requests(driver) == [path.resolve().as_uri()]
    assert chromium.console_errors(driver) == []


def test_it_would_be_forbidden_to_ask_for_anything_else(page: Chrome) -> None:
    page.execute_script("const i = new Image(); i.src = 'https://example.invalid/x.png'; document.body.append(i)")
    assert any("Content Security Policy" in message for message in chromium.console_errors(page))


def test_a_click_on_a_heading_sorts_by_number_with_missing_values_last(page: Chrome) -> None:
    known = sorted((0.10 + 0.01 * n for n in range(40) if n not in (7, 8, 21)), reverse=True)
    click_heading(page, "MFU, %")
    falling = column(page, "MFU, %")
    click_heading(page, "MFU, %")
    rising = column(page, "MFU, %")
    measured = [text for text in falling if text not in [f"{mfu * 100:.2f}" for mfu in known] and text != "-"]
    assert len(measured) == 1  # of the tiny run
    assert [float(text) for text in falling if text not in ("-", *measured)] == pytest.approx([100 * mfu for mfu in known])
    assert falling[-3:] == rising[-3:] == ["-", "-", "-"]
    assert rising[:-3] == falling[:-3][::-1]
    assert page.execute_script("return document.querySelector('#runs th[aria-sort]').ariaSort") == "ascending"


def test_texts_sort_by_the_alphabet_and_numbers_in_them_by_size(page: Chrome) -> None:
    click_heading(page, "planner")
    shown = [text for text in column(page, "planner") if text != "-"]
    assert shown == sorted(shown) and set(shown) == set(PLANNERS)


def test_bars_follow_the_order_and_the_filter_of_the_table(page: Chrome) -> None:
    click_heading(page, "MFU, %")
    numbers = [int(text) for text in column(page, "run")]
    bars = page.execute_script(
        "return [...document.querySelectorAll('#mfu .bar')].filter(e => e.offsetParent).map(e => e.dataset.key)"
    )
    assert bars == [f"r{number - 1}" for number in numbers[: len(bars)]] and len(bars) == 24
    page.find_element("css selector", "#runs input").send_keys("flashflex pool-1")
    assert sorted(texts(page, "#mfu .bar .label")) == [f"pool-1 · flashflex · seed {seed}" for seed in range(5)]


def test_all_words_of_the_filter_must_occur_and_the_rest_is_counted(page: Chrome) -> None:
    box = page.find_element("css selector", "#runs input")
    box.send_keys("AMP pool-0")
    assert texts(page, "#runs output") == ["5 of 41 runs"]
    assert set(column(page, "planner")) == {"amp"} and set(column(page, "cluster")) == {"pool-0"}
    box.clear()
    box.send_keys("no such words")
    assert texts(page, "#runs output") == ["0 of 41 runs"] and column(page, "run") == []
    box.clear()
    box.send_keys(" ")
    assert texts(page, "#runs output") == ["41 runs"]


def test_a_list_chooses_what_a_column_says(page: Chrome) -> None:
    from selenium.webdriver.support.select import Select

    labels = page.find_elements("css selector", "#runs form label")
    chosen = next(label for label in labels if label.text.startswith("outcome"))
    Select(chosen.find_element("tag name", "select")).select_by_visible_text("infeasible")
    assert [int(text) - 1 for text in column(page, "run")] == [7, 8]
    assert [row(number)["planner"] for number in (7, 8)] == column(page, "planner")


def test_a_click_on_a_run_shows_it_and_close_hides_it(page: Chrome) -> None:
    open_run(page, 40)  # the only one that has more than its row
    assert "look-r40" in page.execute_script("return [...document.querySelectorAll('.look')].map(e => e.id)")
    page.find_element("css selector", "#look-r40 button.close").click()
    assert texts(page, "#look-r40") == []
    open_run(page, 40)
    assert len(texts(page, "#look-r40")) == 1


NAMELESS = """
const named = (e) => (e.getAttribute('alt') ?? e.getAttribute('aria-label') ?? '').trim().length > 10;
return [...document.querySelectorAll('img, svg, [role=img], canvas, object, embed')]
  .filter(e => !(e.tagName === 'svg' && e.closest('[role=img]') !== null))
  .filter(e => !named(e)).map(e => e.outerHTML.slice(0, 100));
"""


def test_every_image_has_words_for_those_who_do_not_see_it(page: Chrome) -> None:
    open_run(page, 40)
    pictures = page.execute_script("return document.querySelectorAll('img, [role=img]').length")
    assert pictures >= 7  # two searches, MFU, plan, memory, two timelines
    assert page.execute_script(NAMELESS) == []


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_it_fits_the_width_without_scrolling_sideways(page: Chrome, width: int) -> None:
    chromium.resize(page, width)
    open_run(page, 40)
    inside, window = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert (inside, window) == (width, width)


PALE = """
const light = (rgb) => { const [r, g, b] = rgb.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const colour = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (e) => { for (; e; e = e.parentElement) { const c = colour(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
const found = [];
for (const e of document.querySelectorAll('body *')) {
  if (!e.offsetParent || e.closest('.lane') || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  const [a, b] = [light(colour(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
  const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (contrast < 4.5) found.push([e.outerHTML.slice(0, 80), contrast]);
}
return found;
"""


def test_text_is_dark_on_light_and_contrasts_by_the_rule_for_all_readers(page: Chrome) -> None:
    """At least 4.5 to 1, as WCAG 2.2 (1.4.3) asks of all text. Text over the bars of a timeline has no ground of its own."""
    open_run(page, 40)
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.execute_script(PALE) == []


def test_in_print_all_rows_are_there_and_controls_are_not(page: Chrome) -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        chromium.resize(page, 1030)  # A4, laid across, less its margins
        assert texts(page, "nav a, .filter, button.close") == []
        assert page.execute_script("return getComputedStyle(document.querySelector('#runs .wide')).maxHeight") == "none"
        assert page.execute_script("return document.documentElement.scrollWidth") == 1030
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed: Any = chromium.printed_pdf(page)
    assert printed.startswith(b"%PDF-")


def test_a_measured_and_a_simulated_timeline_stand_on_one_time_axis(page: Chrome) -> None:
    open_run(page, 40)
    ends = page.execute_script("return [...document.querySelectorAll('#look-r40 .timeline .axis .last')].map(e => e.textContent)")
    assert len(ends) == 2 and ends[0] == ends[1]
    measured, simulated = page.execute_script(
        "const end = (path) => path.getBBox().x + path.getBBox().width;"
        "return [...document.querySelectorAll('#look-r40 .timeline')]"
        ".map(t => Math.max(...[...t.querySelectorAll('svg path:not(.te)')].map(end)))"
    )
    assert measured / simulated == pytest.approx(1.25, rel=0.01)  # everything was made to take a quarter longer
    titles = texts(page, "#look-r40 .timeline h4")
    assert re.match("measured: ", titles[0]) and re.match(r"simulated: .* \(-20\.0 % of the measured one\)$", titles[1])
