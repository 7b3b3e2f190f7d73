"""A page in a headless browser that remembers everything that went wrong on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, Request, Route

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
LOCAL_SCHEMES = ("data", "blob", "about")

DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Waits for the frame after the first: charts are drawn once an observer has told their size, which is in a frame."""


class Watched:
    """A tab, until it is left. It may load the file that is opened and what lies on `allowed` hosts, e.g.
    `127.0.0.1:9100`; anything else is refused, written down in `problems`, and so are errors of scripts and of
    loading."""

    def __init__(self, tab: Page, *, name: str, allowed: tuple[str, ...] = ()) -> None:
        self.tab = tab
        self.problems: list[str] = []
        self._name, self._hosts, self._opened = name, set(allowed), ""
        self._heard: dict[str, Callable[[Any], None]] = {
            "console": lambda said: self._note("console", said.text) if said.type == "error" else None,
            "pageerror": lambda error: self._note("script", str(error)),
            "requestfailed": lambda request: self._note("failed", f"{request.url}: {request.failure}"),
            "response": lambda response: self._note_bad(response.status, response.url),
            "websocket": lambda socket: self._judge(socket.url),
        }
        for event, hear in self._heard.items():
            self.tab.on(event, hear)  # type: ignore[call-overload]
        self.tab.route("**/*", self._route)

    def open(self, page: Path | str) -> Page:
        """A file, or an address on an allowed host; back once it is loaded and drawn."""
        self._opened = page.absolute().as_uri() if isinstance(page, Path) else page
        self.tab.goto(self._opened, wait_until="load")
        self.tab.evaluate(DRAWN)
        return self.tab

    def leave(self) -> None:
        """The tab is as it was, for others. Once is enough; twice is no error."""
        for event, hear in self._heard.items():
            self.tab.remove_listener(event, hear)
        self._heard.clear()
        self.tab.unroute_all()
        self.tab.goto("about:blank")
        self.tab.mouse.move(0, 0)
        self.tab.context.clear_cookies()

    def picture(self, what: str, *, whole: bool = True) -> Path:
        """A screenshot, kept as `build/screenshots/NAME-WHAT.png`."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{self._name}-{what}.png"
        self.tab.screenshot(path=path, full_page=whole)
        return path

    def _route(self, route: Route, request: Request) -> None:
        if self._judge(request.url):
            route.continue_()
        else:
            route.abort()

    def _judge(self, url: str) -> bool:
        """True if the page may request it."""
        place = urlsplit(url)
        allowed = (
            place.scheme in LOCAL_SCHEMES
            or place.netloc in self._hosts
            or url.split("#", maxsplit=1)[0] == self._opened
        )
        if not allowed:
            self._note("outside", url)
        return allowed

    def _note_bad(self, status: int, url: str) -> None:
        if status >= 400:
            self._note("answer", f"{status} {url}")

    def _note(self, kind: str, text: str) -> None:
        self.problems.append(f"{kind}: {text}")
