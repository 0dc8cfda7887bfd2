"""A headless Chromium for tests of pages: Debian's `chromium` with its driver, or what CHROMIUM and CHROMEDRIVER name."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Why no browser can be started here; None where one can."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed"
    if _browser() is None:
        return "there is no chromium; apt-get install chromium chromium-driver"
    return None if _driver() is not None else "there is no chromedriver; apt-get install chromium-driver"


def _browser() -> str | None:
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


def _driver() -> str | None:
    return os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """A browser that notes all its requests and what its console says."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(_browser())
    # As root, and in a small /dev/shm, as in a container.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, Service(str(_driver())))
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: Chrome, width: int, height: int = 900) -> None:
    """Nothing; makes the page so many CSS pixels wide, as a phone of that width does."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def open_page(driver: Chrome, path: Path) -> None:
    """Nothing; opens the file, and waits until it is loaded."""
    driver.get(path.resolve().as_uri())


def requests(driver: Chrome) -> list[str]:
    """The addresses of all requests since the last call, those for what a page holds itself (data:) left out."""
    found = []
    for entry in driver.get_log("performance"):
        message: dict[str, Any] = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(str(message["params"]["request"]["url"]))
    return [url for url in found if not url.startswith(("data:", "chrome:", "about:"))]


def console_errors(driver: Chrome) -> list[str]:
    """What the console has said since the last call."""
    return [str(entry["message"]) for entry in driver.get_log("browser")]


def whole_page_png(driver: Chrome) -> bytes:
    """A picture of the whole page, and not only of what a screen shows of it."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
    return base64.b64decode(shot["data"])


def printed_pdf(driver: Chrome) -> bytes:
    """The page as it is printed."""
    told = driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": False, "preferCSSPageSize": True})
    return base64.b64decode(told["data"])
