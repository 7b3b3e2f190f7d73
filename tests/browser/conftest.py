"""Headless Chromium for the tests of pages: Debian's own, found on PATH.

Where it is missing these tests are skipped, but where `RAYFCP_TEST_BROWSER=required`, as in `.ci/run`: there they fail.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.watched import Watched
from tests.waiting import PATIENCE_S

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb")
SIZES = {"wide": (1360, 900), "narrow": (400, 860)}

Opener = Callable[..., Watched]
Tabs = Callable[..., Page]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Ended with the package, so that its event loop is not there for others."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        missing = "no chromium on PATH; install the Debian package chromium"
        pytest.fail(missing) if os.environ.get("RAYFCP_TEST_BROWSER") == "required" else pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def tabs(browser: Browser) -> Tabs:
    """One for each light and size: for each new one Chromium starts processes that load its own surface."""

    @cache
    def tab(*, dark: bool = False, size: str = "wide") -> Page:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            service_workers="block",
            reduced_motion="reduce",
        )
        context.set_default_timeout(1000 * PATIENCE_S)
        return context.new_page()

    return tab


@pytest.fixture
def watched(tabs: Tabs) -> Iterator[Opener]:
    """Watches tabs: `watched("report", dark=True, size="narrow", allowed=("127.0.0.1:9100",))`, one of each light and
    size at a time. The test fails if a page asked for anything from outside, or said that something went wrong."""
    used: list[Watched] = []

    def new(name: str, *, dark: bool = False, size: str = "wide", allowed: tuple[str, ...] = ()) -> Watched:
        used.append(Watched(tabs(dark=dark, size=size), name=name, allowed=allowed))
        return used[-1]

    yield new
    for each in used:
        each.leave()
    assert [problem for each in used for problem in each.problems] == []
