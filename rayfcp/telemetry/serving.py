"""HTTP server of a run, open on loopback and token-protected elsewhere, and its service discovery for Prometheus."""

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
"""Folder beside the run directories with a file per run: Prometheus allows wildcards in file names only."""

logger = logging.getLogger(__name__)


def target_files(run_dir: str | Path) -> tuple[Path, Path]:
    """Return the discovery file in the run directory, and the one in the folder shared by runs."""
    folder = Path(run_dir).absolute()
    return folder / SD_FILE, folder.parent / SD_FOLDER / f"{folder.name}.json"


def announce(run_dir: str | Path, *, run: str, target: str) -> None:
    """Write `target`, HOST:PORT, to both files. One that cannot be written, as in a read-only folder or on a full disk,
    is logged: no run ends for it."""
    text = json.dumps([{"targets": [target], "labels": {"job": "rayfcp", "run": run}}]) + "\n"
    own, shared = target_files(run_dir)
    for path, other in ((own, shared), (shared, own)):
        try:
            write_whole(path, text)
        except OSError as error:
            logger.warning("%s is not written (%s); Prometheus finds the run by %s", path, error.strerror, other)


def withdraw(run_dir: str | Path) -> None:
    """Remove both files; idempotent."""
    for path in target_files(run_dir):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


TOKEN_FILE = "token"
MIN_TOKEN = 16
PATIENCE_S = 10.0
"""Timeout of a slow request."""

LOOK_S = 0.1
"""Poll interval of shutdown."""

Page = Callable[[str], tuple[str, bytes]]
"""Maps the Accept header to content type and body."""

SAFE = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class RunServer:
    """Server of `pages` by path until `close`; `port` 0 takes a free one.

    Loopback needs no token, but the Host header must name a loopback host, which prevents DNS rebinding. On other
    interfaces each request needs the token: as `Authorization: Bearer`, in a cookie, or once as `?token=`, which sets
    the cookie.

    Raises:
        ConfigError: Host and port are not available, or `token_file` holds no token.
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
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(LOOK_S,), name="run-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _guard(self, run_dir: Path, token_file: str | None) -> Path | None:
        """Set the token and return its file; None on loopback."""
        if ipaddress.ip_address(str(self._server.server_address[0]).split("%")[0]).is_loopback:
            return None
        path = Path(token_file) if token_file else run_dir / TOKEN_FILE
        self._server.token = read_token(path) if token_file else _made_token(path)
        return path


def read_token(path: str | Path) -> str:
    """Read the token of a file, stripped.

    Raises:
        ConfigError: The file cannot be read, or the token is too short.
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
            "write one there, e.g. the output of `openssl rand -hex 32`"
        )
    return token


def _made_token(path: Path) -> str:
    """Return the token of an earlier controller, or a new one, in a file that only its owner can read."""
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
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        # The inherited method looks up the host's name, which may take long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "rayfcp", ""
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        page = self.server.pages.get(url.path)
        if self.server.token is None:
            if not _is_loopback(self.headers.get("Host", "")):
                return self._log(HTTPStatus.FORBIDDEN, "use host 127.0.0.1 or localhost")
        elif not self._is_known(self.server.token):
            given = parse_qs(url.query).get("token", [""])[0]
            if not _same(given, self.server.token):
                realm = {"WWW-Authenticate": 'Bearer realm="rayfcp"'}
                return self._log(HTTPStatus.UNAUTHORIZED, "the run's token is required", **realm)
            if page is not None and url.path == "/":
                cookie = f"{self.server.cookie}={_digest(given)}; HttpOnly; SameSite=Strict; Path=/"
                return self._log(HTTPStatus.SEE_OTHER, "", Location="/", **{"Set-Cookie": cookie})
        if page is None:
            return self._log(HTTPStatus.NOT_FOUND, f"known paths: {', '.join(self.server.pages)}")
        kind, body = page(self.headers.get("Accept", ""))
        return self._answer(HTTPStatus.OK, kind, body)

    def _is_known(self, token: str) -> bool:
        """True if the request has the token, or the cookie made from it."""
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), token):
            return True
        with suppress(CookieError):
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            return found is not None and _same(found.value, _digest(token))
        return False

    def _log(self, status: HTTPStatus, text: str, **headers: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{text}\n".encode(), **headers)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **SAFE, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the request line may contain the token."""


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())  # constant time


def _digest(token: str) -> str:
    """Return the cookie's value, from which the token cannot be derived."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _is_loopback(host: str) -> bool:
    """True if a Host header names the loopback interface."""
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False
