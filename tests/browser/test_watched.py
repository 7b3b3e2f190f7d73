"""The harness notices what it is there to notice: a test of a page that cannot fail would prove nothing."""

from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.browser.conftest import Opener, Tabs
from tests.browser.watched import SCREENSHOTS, Watched

PAGE = '<!doctype html><html lang="en"><title>page</title><body><p>here</p>{}</body></html>'


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<script>console.error('broken')</script>", "console: broken"),
        ("<script>null.x</script>", "script: "),
        ('<img src="https://example.com/x.png" alt="">', "outside: https://example.com/x.png"),
        ("<script>fetch('http://127.0.0.1:9/x').catch(() => 0)</script>", "outside: http://127.0.0.1:9/x"),
        ("<script>new WebSocket('ws://example.com/x')</script>", "outside: ws://example.com/x"),
        ('<link rel="stylesheet" href="beside.css">', "outside: file://"),
    ],
)
def test_what_goes_wrong_is_noticed(tabs: Tabs, tmp_path: Path, body: str, problem: str) -> None:
    (tmp_path / "page.html").write_text(PAGE.format(body))
    (tmp_path / "beside.css").write_text("p { color: red }")
    page = Watched(tabs(), name="bad")
    page.open(tmp_path / "page.html").wait_for_load_state("networkidle")
    page.leave()
    assert any(each.startswith(problem) for each in page.problems), page.problems


def test_a_sound_page_has_no_problems_and_a_picture(watched: Opener, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE.format("<script>document.title = 'seen'</script>"))
    page = watched("sound")
    assert page.open(tmp_path / "page.html").title() == "seen"
    assert page.picture("light").read_bytes().startswith(b"\x89PNG")
    (SCREENSHOTS / "sound-light.png").unlink()


def test_a_server_is_asked_only_if_it_is_allowed(watched: Opener, tabs: Tabs, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE.format("") + '<link rel="icon" href="data:,">')

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *given: object, **named: object) -> None:
            super().__init__(*given, directory=str(tmp_path), **named)  # type: ignore[arg-type]

        def log_message(self, *given: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        assert watched("server", allowed=(host,)).open(f"http://{host}/").inner_text("p") == "here"
        page = Watched(tabs(), name="missing", allowed=(host,))
        page.open(f"http://{host}/nothing")
        page.leave()
        server.shutdown()
    assert any(each.startswith("answer: 404") for each in page.problems), page.problems
