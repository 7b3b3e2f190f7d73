"""Headless Chromium for the tests of pages: Debian's own, found on PATH.

Where it is missing these tests are skipped, but where `RAYFCP_TEST_BROWSER=required`, as in `.ci/run`: there they fail.
"""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.browser.watched import Watched

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb")
SIZES = {"wide": (1360, 900), "narrow": (400, 860)}

Opener = Callable[..., Watched]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ended with the module, so that its event loop is not there for others."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        missing = "no chromium on PATH; install the Debian package chromium"
        pytest.fail(missing) if os.environ.get("RAYFCP_TEST_BROWSER") == "required" else pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Opener]:
    """Makes tabs: `watched("report", dark=True, size="narrow", allowed=("127.0.0.1:9100",))`. The test fails if a page
    asked for anything from outside, or said that something went wrong."""
    tabs: list[Watched] = []
    contexts: list[BrowserContext] = []

    def new(name: str, *, dark: bool = False, size: str = "wide", allowed: tuple[str, ...] = ()) -> Watched:
        width, height = SIZES[size]
        contexts.append(
            browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light",
                service_workers="block",
                reduced_motion="reduce",
            )
        )
        tabs.append(Watched(contexts[-1], name=name, allowed=allowed))
        return tabs[-1]

    yield new
    for context in contexts:
        context.close()
    assert [problem for tab in tabs for problem in tab.problems] == []
