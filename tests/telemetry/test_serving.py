"""The server of a run on real sockets: who may read it, and what it never reveals."""

import http.client
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.telemetry.serving import RunServer
from tests.examples import examples
from tests.waiting import PATIENCE_S

PAGES = {"/": lambda accept: ("text/html", b"page"), "/metrics": lambda accept: ("text/plain", accept.encode())}
TOKEN = "a-token-of-the-user"


@contextmanager
def served(folder: Path, *, host: str, token_file: str | None = None) -> Iterator[RunServer]:
    server = RunServer(PAGES, run_dir=folder, host=host, port=0, token_file=token_file)
    try:
        yield server
    finally:
        server.close()


def get(server: RunServer, path: str, *, host: str = "127.0.0.1", method: str = "GET", **headers: str):
    """Status, headers and body. `_` in header names stands for `-`."""
    connection = http.client.HTTPConnection(host, server.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunServer]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "mine").write_text(f"{TOKEN}\n")
    with served(folder, host="0.0.0.0", token_file=str(folder / "mine")) as server:
        yield server


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_free_for_those_who_ask_for_it(host: str, tmp_path: Path) -> None:
    with served(tmp_path, host=host) as server:
        assert get(server, "/")[0] == 200
        assert get(server, "/metrics", Accept="text/plain")[2] == b"text/plain"
        for name in ("localhost", f"127.0.0.1:{server.port}", "[::1]:80", "LOCALHOST"):
            assert get(server, "/", Host=name)[0] == 200, name
        for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "", "10.0.0.1"):
            assert get(server, "/", Host=name)[0] == 403, name
        assert server.token_file is None and not list(tmp_path.iterdir())


def test_what_is_not_there(tmp_path: Path) -> None:
    with served(tmp_path, host="127.0.0.1") as server:
        for path in ("/token", "/../token", "//etc/passwd", "/metrics/", "/api", "/index.html"):
            assert get(server, path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert get(server, "/", method=method)[0] == 501, method


def test_elsewhere_only_with_the_token(guarded: RunServer) -> None:
    for path in ("/", "/metrics", "/nothing"):
        status, headers, body = get(guarded, path)
        assert status == 401 and headers["WWW-Authenticate"].startswith("Bearer") and TOKEN.encode() not in body
    assert get(guarded, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert get(guarded, "/metrics", Authorization=f"bearer  {TOKEN}", Host="evil.example")[0] == 200
    assert get(guarded, f"/metrics?token={TOKEN}")[0] == 200
    assert get(guarded, "/nothing", Authorization=f"Bearer {TOKEN}")[0] == 404


def test_a_browser_gives_the_token_once(guarded: RunServer) -> None:
    status, headers, _ = get(guarded, f"/?token={TOKEN}")
    assert status == 303 and headers["Location"] == "/"
    cookie = headers["Set-Cookie"]
    assert TOKEN not in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    pair = cookie.partition(";")[0]
    assert get(guarded, "/", Cookie=pair)[0] == 200
    assert get(guarded, "/metrics", Cookie=f"other=1; {pair}")[0] == 200
    name = pair.partition("=")[0]
    for wrong in (f"{name}={TOKEN}", f"{name}=", "x" + pair, f"{pair}0", "=;;"):
        assert get(guarded, "/", Cookie=wrong)[0] == 401, wrong


WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)


@examples(25)
@given(word=WORDS.filter(lambda word: word != TOKEN))
def test_no_other_token_opens(word: str, guarded: RunServer) -> None:
    assert get(guarded, "/", Authorization=f"Bearer {word}")[0] == 401


def test_a_token_is_made_for_its_owner_and_stays(tmp_path: Path) -> None:
    with served(tmp_path, host="0.0.0.0") as server:
        file = tmp_path / "token"
        token = file.read_text().strip()
        assert server.token_file == file and stat.S_IMODE(file.stat().st_mode) == 0o600 and len(token) > 30
        assert get(server, "/metrics", Authorization=f"Bearer {token}")[0] == 200
    file.chmod(0o644)
    with served(tmp_path, host="0.0.0.0"):
        assert file.read_text().strip() == token and stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("short")
    with served(tmp_path, host="0.0.0.0"):
        assert len(file.read_text()) > 30 and stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", [None, "", "short", "two words of a long token", "ümlauts-are-not-ascii-at-all"])
def test_a_token_file_that_holds_none(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    if text is not None:
        file.write_text(text)
    wrong = pytest.raises(ConfigError, match=r"metrics\.token_file is .*mine'")
    with wrong, served(tmp_path, host="0.0.0.0", token_file=str(file)):
        pass


def test_nothing_is_logged_and_nothing_is_kept(guarded: RunServer, capfd: pytest.CaptureFixture[str]) -> None:
    _, headers, _ = get(guarded, f"/metrics?token={TOKEN}")
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_slow_clients_hold_nobody_up(tmp_path: Path) -> None:
    """One that has sent half a request, and one that left."""
    with served(tmp_path, host="127.0.0.1") as server:
        slow = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        slow.connect()
        assert slow.sock is not None
        slow.sock.sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert get(server, "/")[0] == 200
        slow.close()
        assert get(server, "/")[0] == 200
