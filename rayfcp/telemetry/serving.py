"""The files by which Prometheus finds the address of a run (`file_sd_configs`).

The HTTP server of a run: a few pages, free on loopback, elsewhere for those who know the token.
"""

import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from rayfcp.config import ConfigError
from rayfcp.telemetry.files import write_whole

SD_FILE = "prometheus_sd.json"
SD_FOLDER = ".prometheus"
"""Beside the folders of runs, with a file for each: Prometheus takes wildcards in names of files, not of folders."""

logger = logging.getLogger(__name__)


def target_files(run_dir: str | Path) -> tuple[Path, Path]:
    """In the run's folder, and in the one that all runs beside it share."""
    folder = Path(run_dir).absolute()
    return folder / SD_FILE, folder.parent / SD_FOLDER / f"{folder.name}.json"


def announce(run_dir: str | Path, *, run: str, target: str) -> None:
    """Names `target`, HOST:PORT, in both files. Nobody may write beside the run's folder: then its own has to do.

    Raises:
        OSError: the run's folder cannot be written to.
    """
    text = json.dumps([{"targets": [target], "labels": {"job": "rayfcp", "run": run}}]) + "\n"
    own, shared = target_files(run_dir)
    write_whole(own, text)
    try:
        write_whole(shared, text)
    except OSError as error:
        logger.warning("%s is not written (%s); Prometheus finds the run by %s", shared, error.strerror, own)


def withdraw(run_dir: str | Path) -> None:
    """The run serves no more. Twice is no error."""
    for path in target_files(run_dir):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


TOKEN_FILE = "token"
MIN_TOKEN = 16
PATIENCE_S = 10.0
"""For a request that is slow to come."""

LOOK_S = 0.1
"""From one look whether it shall end to the next."""

Page = Callable[[str], tuple[str, bytes]]
"""From what the client accepts to the type and the body of an answer."""

SAFE = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class RunServer:
    """Serves `pages` by path until `close`. `port` 0 takes a free one.

    On loopback no token is asked for, but requests must name a loopback host, so that no web page elsewhere reads them
    by a name of its own. On any other interface each request needs the token: as `Authorization: Bearer`, in a cookie,
    or once as `?token=`, which sets the cookie.

    Raises:
        ConfigError: Host and port cannot be listened on, or `token_file` holds no token.
    """

    def __init__(
        self, pages: Mapping[str, Page], *, run_dir: str | Path, host: str, port: int, token_file: str | None = None
    ) -> None:
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ConfigError(
                f"metrics.port is {port}, must be free on {host} ({error.strerror}); choose another, 0 takes a free one"
            ) from error
        self.port: int = self._server.server_address[1]
        self._server.pages, self._server.cookie = pages, f"rayfcp-{self.port}"
        try:
            self.token_file = self._guard(Path(run_dir), token_file)
        except BaseException:
            self._server.server_close()
            raise
        named = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        self.target = f"[{named}]:{self.port}" if ":" in named else f"{named}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_S,), name="run-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops serving. Twice is no error."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _guard(self, run_dir: Path, token_file: str | None) -> Path | None:
        """Where the token is; None on loopback."""
        if ipaddress.ip_address(str(self._server.server_address[0]).split("%")[0]).is_loopback:
            return None
        path = Path(token_file) if token_file else run_dir / TOKEN_FILE
        self._server.token = read_token(path) if token_file else _made_token(path)
        return path


def read_token(path: str | Path) -> str:
    """The token in a file, without white space around it.

    Raises:
        ConfigError: The file cannot be read, or holds no token that is hard to guess.
    """
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(
            f"metrics.token_file is {str(path)!r}, cannot be read ({reason}); give a file that holds a token"
        ) from error
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"metrics.token_file is {str(path)!r}, must hold one word of at least {MIN_TOKEN} ASCII characters; "
            "write one there, as `openssl rand -hex 32` gives it"
        )
    return token


def _made_token(path: Path) -> str:
    """A new one, or the one that an earlier controller made; only its owner reads the file."""
    with suppress(ConfigError):
        token = read_token(path)
        path.chmod(0o600)
        return token
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{token}\n")
    return token


class _Server(ThreadingHTTPServer):
    pages: Mapping[str, Page]
    cookie: str
    token: str | None = None

    def __init__(self, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of the host's name, which may last."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "rayfcp", ""
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        page = self.server.pages.get(url.path)
        if self.server.token is None:
            if not _is_loopback(self.headers.get("Host", "")):
                return self._say(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1 or localhost")
        elif not self._is_known():
            given = parse_qs(url.query).get("token", [""])[0]
            if not _same(given, self.server.token):
                return self._say(
                    HTTPStatus.UNAUTHORIZED, "give the run's token", **{"WWW-Authenticate": 'Bearer realm="rayfcp"'}
                )
            if page is not None and url.path == "/":
                cookie = f"{self.server.cookie}={_digest(given)}; HttpOnly; SameSite=Strict; Path=/"
                return self._say(HTTPStatus.SEE_OTHER, "", Location="/", **{"Set-Cookie": cookie})
        if page is None:
            return self._say(HTTPStatus.NOT_FOUND, f"there are {', '.join(self.server.pages)}")
        kind, body = page(self.headers.get("Accept", ""))
        return self._answer(HTTPStatus.OK, kind, body)

    def _is_known(self) -> bool:
        """By header or cookie."""
        assert self.server.token is not None
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), self.server.token):
            return True
        with suppress(CookieError):
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            return found is not None and _same(found.value, _digest(self.server.token))
        return False

    def _say(self, status: HTTPStatus, text: str, **headers: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{text}\n".encode(), **headers)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **SAFE, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what is asked for may hold the token."""


def _same(given: str, token: str) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _digest(token: str) -> str:
    """What a cookie holds instead of it."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False
