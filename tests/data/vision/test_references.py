"""References to images: every form gives the same bytes; missing and broken images differ from failures of storage."""

import base64
import errno
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayfcp.data import storage
from rayfcp.data.account import ReadAccount
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.storage import UnreadableFileError
from rayfcp.data.vision import references
from rayfcp.data.vision.images import decoded
from rayfcp.data.vision.references import PictureReader, frames_of, videos_of
from tests.data.makers import data_config
from tests.data.vision.makers import image, saved

PNG, JPEG = saved(image(6, 9)), saved(image(6, 9), "JPEG")


def reader(**keys: Any) -> PictureReader:
    return PictureReader(data_config("none", **keys), account=ReadAccount())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub dir").mkdir()
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "sub dir" / "é%20#.png").write_bytes(PNG)
    return tmp_path


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


FORMS = {
    "bytes": PNG,
    "view": memoryview(PNG),
    "relative": "a.png",
    "odd": "sub dir/é%20#.png",
    "dots": "sub dir/../a.png",
    "absolute": "{folder}/a.png",
    "file URL": "file://{folder}/a.png",
    "file URL in percents": "file://localhost{folder}/sub%20dir/%C3%A9%2520%23.png",
    "struct of bytes": {"bytes": PNG, "path": "none.png"},
    "struct of a path": {"bytes": None, "path": "a.png"},
    "struct of a URL": {"url": "file://{folder}/a.png"},
    "struct of base64": {"bytes": encoded(PNG), "path": None},
    "data": f"data:image/png;base64,{encoded(PNG)}",
    "data of a struct": {"url": f"data:image/png;base64,{encoded(PNG)}"},
    "data in capitals": f"DATA:;charset=utf-8;BASE64,{encoded(PNG)}",
    "data in percents": "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
    "base64": encoded(PNG),
    "base64 in lines": base64.encodebytes(PNG).decode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bytes(folder: Path, form: str) -> None:
    given = FORMS[form]
    if isinstance(given, dict):
        given = {
            key: each.replace("{folder}", str(folder)) if isinstance(each, str) else each for key, each in given.items()
        }
    elif isinstance(given, str):
        given = given.replace("{folder}", str(folder))
    assert reader()(given, folder=str(folder)) == (PNG, (6, 9))


def test_base64_of_jpeg_is_no_path(folder: Path) -> None:
    assert encoded(JPEG).startswith("/9j/")
    assert reader()(encoded(JPEG), folder=str(folder)).data == JPEG


REFUSED: list[tuple[Any, BadReason, str]] = [
    ("none.png", BadReason.IMAGE_MISSING, "none.png: No such file or directory"),
    ("sub dir", BadReason.IMAGE_MISSING, "sub dir: Is a directory"),
    ("a.png/b.png", BadReason.IMAGE_MISSING, "a.png/b.png: Not a directory"),
    ("x" * 5000, BadReason.IMAGE_MISSING, "File name too long"),
    ("nothing://host/a.png", BadReason.IMAGE_MISSING, "nothing://host/a.png"),
    ("data:image/png;base64,***", BadReason.IMAGE_UNREADABLE, "not base64"),
    ("data:image/png;base64,aGVsbG8=", BadReason.IMAGE_UNREADABLE, "bytes that begin with 68 65 6c 6c 6f"),
    (b"", BadReason.IMAGE_UNREADABLE, "an empty file"),
    (b"<!DOCTYPE html><html>", BadReason.IMAGE_UNREADABLE, "a page of HTML or XML"),
    (b"version https://git-lfs.github.com/spec/v1\noid", BadReason.IMAGE_UNREADABLE, "a Git LFS pointer"),
    (b"%PDF-1.4", BadReason.IMAGE_UNREADABLE, "PDF bytes, must be one of AVIF, BMP"),
    (b"<svg xmlns=", BadReason.IMAGE_UNREADABLE, "SVG, must be one of"),
    (b"%!PS-Adobe-3.0 EPSF-3.0", BadReason.IMAGE_UNREADABLE, "EPS, must be one of"),
    (b"\0\0\0\x18ftypheic\0\0\0\0", BadReason.IMAGE_UNREADABLE, "HEIC, must be one of"),
    (b"\0\0\0\x18ftypmp42\0\0\0\0", BadReason.IMAGE_UNREADABLE, "a film, whose frames"),
    (PNG[:20], BadReason.IMAGE_UNREADABLE, "a broken PNG"),
    (None, BadReason.WRONG_TYPE, "not null"),
    ("", BadReason.WRONG_TYPE, "not an empty one"),
    ({}, BadReason.WRONG_TYPE, "not an object of nothing"),
    ({"size": 3, "path": None}, BadReason.WRONG_TYPE, "not an object of size, path"),
    (3, BadReason.WRONG_TYPE, "not int"),
    ([1, 2], BadReason.WRONG_TYPE, "not list"),
]


@pytest.mark.parametrize(("given", "reason", "detail"), REFUSED)
def test_what_is_no_picture_is_refused_by_name(folder: Path, given: Any, reason: BadReason, detail: str) -> None:
    with pytest.raises(BadRowError) as caught:
        reader()(given, folder=str(folder))
    assert (caught.value.reason, detail in caught.value.detail) == (reason, True), caught.value.detail
    assert " at 0x" not in caught.value.detail


def test_bounds_have_a_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRowError, match=r"a.png: 9 x 6 pixels, data.max_picture_pixels is 53"):
        reader(max_picture_pixels=53)("a.png", folder=str(folder))
    monkeypatch.setattr(references, "MAX_BYTES", len(PNG) - 1)
    for given in ("a.png", PNG, FORMS["data"]):
        with pytest.raises(BadRowError) as caught:
            reader()(given, folder=str(folder))
        assert caught.value.reason is BadReason.IMAGE_TOO_LARGE


def test_storage_that_fails_is_not_a_bad_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(references, "_content", fail)
    with pytest.raises(UnreadableFileError, match=r"a.png cannot be read: Input/output error; check access"):
        reader()("a.png", folder=str(folder))
    account = ReadAccount()
    allowed = PictureReader(data_config("none", max_unreadable_files=1), account=account)
    with pytest.raises(BadRowError) as caught:
        allowed("a.png", folder=str(folder))
    assert (caught.value.reason, account.unreadable_files) == (BadReason.IMAGE_MISSING, {"a.png": 1})


@pytest.mark.parametrize("library", ["httpx", "httpx2", "httpcore2", "botocore.exceptions"])
def test_clients_without_a_connection_may_be_tried_again(library: str) -> None:
    error = type("ConnectError", (Exception,), {"__module__": library})("Name or service not known")
    assert storage.is_transient(error)
    assert not storage.is_transient(ValueError("Name or service not known"))


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; `/busy.png` fails as often as `failures` says."""

    failures = 0

    def do_GET(self) -> None:
        if self.path == "/busy.png" and Server.failures:
            Server.failures -= 1
            self.send_error(503)
        elif self.path == "/secret.png":
            self.send_error(403)
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        self.send_error(405)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(storage, "PAUSES_S", (0.0, 0.0))
    (folder / "busy.png").write_bytes(PNG)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_pictures_of_the_web(served: str, folder: Path) -> None:
    assert reader()(f"{served}/a.png", folder=str(folder)).data == PNG
    assert reader()("a.png", folder=served).data == PNG  # beside a file of rows on the web
    for name in ("none.png", "secret.png"):
        with pytest.raises(BadRowError) as caught:
            reader()(f"{served}/{name}", folder=str(folder))
        assert caught.value.reason is BadReason.IMAGE_MISSING
    Server.failures = 1
    assert reader()(f"{served}/busy.png", folder=str(folder)).data == PNG
    Server.failures = 1000
    with pytest.raises(UnreadableFileError, match=r"busy.png cannot be read: 503"):
        reader()(f"{served}/busy.png", folder=str(folder))
    Server.failures = 0
    with pytest.raises(UnreadableFileError, match="Connect call failed"):
        reader()("http://127.0.0.1:9/a.png", folder=str(folder))


def test_videos_are_lists_of_frames() -> None:
    assert videos_of(None) == []
    assert videos_of([["a.png", "b.png"], [PNG]]) == [["a.png", "b.png"], [PNG]]
    assert videos_of(["a.png", "b.png"]) == [["a.png", "b.png"]]
    for film in ("a.mp4", {"path": "x/a.WEBM", "bytes": b"1"}, ["https://host/a.mov?x=1"]):
        for given in (film, [film]):
            with pytest.raises(BadRowError, match=r"is a film, which is not decoded: give its frames .* ffmpeg"):
                videos_of(given)
    for given in ("a.png", [], PNG, [["a.png"]]):
        with pytest.raises(BadRowError, match="a video must be a list of frames, not"):
            frames_of(given)


def test_a_picture_beyond_pillows_own_bound_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10)
    assert reader()(PNG, folder="").size == (6, 9)
    assert decoded(PNG).size == (9, 6)
