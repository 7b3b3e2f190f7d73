"""Images that rows refer to: from the value of a column, or of a message's part, to bytes and size.

An image is bytes, a path relative to the folder of the row's file, an absolute path, a URL (of any fsspec protocol, or
`data:`), base64, or an object with one of these as `bytes`, `base64`, `path` or `url`. A video is a list
of images, its frames.
"""

import base64
import binascii
import errno
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, unquote_to_bytes

import fsspec

from rayfcp.config.data import DataConfig
from rayfcp.data.account import ReadAccount
from rayfcp.data.kinds import is_film
from rayfcp.data.manifest import join, resolve
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.storage import UnreadableFileError, is_transient, retried
from rayfcp.data.vision.images import header_size

MAX_BYTES = 1 << 28
"""Bound on the bytes of an image, larger than a camera's files, so that no URL fills the memory."""
_SHOWN = 80
"""Characters of a reference that an error shows."""
_FILE_URL = re.compile(r"file:(//(localhost)?)?(?=/)", re.IGNORECASE)
_DATA_URL = re.compile(r"data:[^,]{0,200},", re.IGNORECASE)
_BASE64 = re.compile(r"(/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk|SUkq|TU0AK|AAAA)[A-Za-z0-9+/\s]{56,}={0,2}\s*")
"""Base64 of bytes that begin as JPEG, PNG, GIF, WebP, BMP, TIFF or AVIF do. Only JPEG's looks like a path."""
_OF_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
"""Errors of a name that no file can have."""
_FRAMES = "give its frames as a list of images, e.g. by ffmpeg -i FILM -r 2 frames/%04d.jpg"


class Picture(NamedTuple):
    """The bytes of an image's file, and height and width of the upright image."""

    data: bytes
    size: tuple[int, int]


class PictureReader:
    """Reads images within the bounds of `data`. An image that storage fails to give ends the preparation, unless
    `data.max_unreadable_files` allows some: then `account` counts it, and its row is bad."""

    def __init__(self, data: DataConfig, *, account: ReadAccount) -> None:
        self._max_pixels, self._lets_through = data.max_picture_pixels, data.max_unreadable_files > 0
        self._account = account

    def __call__(self, reference: Any, *, folder: str) -> Picture:
        """Return the image. Relative paths begin at `folder`.

        Raises:
            BadRowError: It does not exist, is not an image, or is one that is not read.
            UnreadableFileError: Storage fails to give its bytes, also when asked again.
        """
        name, data = _given(reference)
        if data is None:
            data = self._fetched(name, folder=folder)
        try:
            _check_bytes(len(data))
            return Picture(data, header_size(io.BytesIO(data), max_pixels=self._max_pixels))
        except BadRowError as error:
            raise BadRowError(error.reason, f"{_short(name)}: {error.detail}" if name else error.detail) from error

    def _fetched(self, path: str, *, folder: str) -> bytes:
        try:
            place = unquote(path[prefix.end() :]) if (prefix := _FILE_URL.match(path)) else path
            fs, place = resolve(place if "://" in place or place.startswith("/") else join(folder, place))
            return retried(lambda: _content(fs, place), fs=fs, name=_short(path))
        except Exception as error:  # clients of storage raise errors of any type
            cause = error.__cause__ or error
            why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            if not _is_of_machine(error):
                raise BadRowError(BadReason.IMAGE_MISSING, f"{_short(path)}: {why}") from error
            if not self._lets_through:
                remedy = "check access and run again, or allow it with data.max_unreadable_files"
                raise UnreadableFileError(f"the image {_short(path)} cannot be read: {why}; {remedy}") from error
            self._account.count("unreadable_files", path)
            raise BadRowError(BadReason.IMAGE_MISSING, f"{_short(path)} cannot be read: {why}") from error


def listed(value: Any, *, name: str) -> list[Any]:
    """Return the images of a column, which may hold one alone.

    Raises:
        BadRowError: It holds something else.
    """
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping):
        return [value]
    if not isinstance(value, list | tuple):
        raise BadRowError(BadReason.WRONG_TYPE, f"{name} must hold bytes or paths of images, not {_kind(value)}")
    return list(value)


def frames_of(video: Any) -> list[Any]:
    """Return the frames of a video, a list of images.

    Raises:
        BadRowError: It is something else, e.g. a film.
    """
    if isinstance(video, list | tuple) and video and not any(isinstance(each, list | tuple) for each in video):
        film = next((each for each in video if _is_film(each)), None)
        if film is None:
            return list(video)
        video = film
    if _is_film(video):
        name = video if isinstance(video, str) else video.get("path") or video.get("url")
        raise BadRowError(BadReason.WRONG_TYPE, f"{_short(name)} is a film, which is not decoded: {_FRAMES}")
    raise BadRowError(BadReason.WRONG_TYPE, f"a video must be a list of frames, not {_kind(video)}: {_FRAMES}")


def videos_of(value: Any) -> list[list[Any]]:
    """Return the videos of a column as lists of frames; a list of images alone is one video.

    Raises:
        BadRowError: A video is something else, e.g. a film.
    """
    videos = listed(value, name="videos")
    is_one = len(videos) > 1 and not any(isinstance(each, list | tuple) or _is_film(each) for each in videos)
    return [frames_of(each) for each in ([videos] if is_one else videos)]


def _given(reference: Any) -> tuple[str, bytes | None]:
    """Return name and bytes of a reference, as far as it has them."""
    name, given = "", reference
    if isinstance(reference, Mapping):
        name = next((str(reference[key]) for key in ("path", "url") if reference.get(key)), "")
        reference = reference.get("bytes") or reference.get("base64") or name
        if isinstance(reference, str) and reference != name:
            return name, _decoded(reference, is_url=False)
    if isinstance(reference, bytes | bytearray | memoryview):
        return name, bytes(reference)
    if not isinstance(reference, str) or not reference.strip():
        detail = f"an image must be bytes, a path or a URL, not {_kind(given)}"
        raise BadRowError(BadReason.WRONG_TYPE, detail)
    if prefix := _DATA_URL.match(reference):
        return prefix[0], _decoded(reference[prefix.end() :], is_url=not prefix[0].lower().endswith(";base64,"))
    return (reference, _decoded(reference, is_url=False)) if _BASE64.fullmatch(reference) else (reference, None)


def _decoded(text: str, *, is_url: bool) -> bytes:
    _check_bytes(len(text) * 3 // 4)
    try:
        data = unquote_to_bytes(text)
        return data if is_url else base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRowError(BadReason.IMAGE_UNREADABLE, f"{_short(text)}: not base64 ({error})") from error


def _content(fs: fsspec.AbstractFileSystem, place: str) -> bytes:
    """Return the bytes of a file, at most one more than `MAX_BYTES`."""
    with fs.open(place, "rb") as file:
        return bytes(file.read(MAX_BYTES + 1))


def _check_bytes(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise BadRowError(BadReason.IMAGE_TOO_LARGE, f"more than {MAX_BYTES >> 20} MiB")


def _is_of_machine(error: Exception) -> bool:
    """True if machine or storage failed; False if the row names a file that does not exist."""
    is_of_name = isinstance(error, OSError) and error.errno in _OF_NAMES
    return not is_of_name and (is_transient(error) or isinstance(error, PermissionError))


def _is_film(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("path") or value.get("url")
    return isinstance(value, str) and is_film(value)


def _short(name: str) -> str:
    return name if len(name) <= _SHOWN else f"{name[: _SHOWN // 2]}...{name[-_SHOWN // 2 :]}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"an object of {', '.join(map(str, value))[:_SHOWN] or 'nothing'}"
    return type(value).__name__ if not isinstance(value, Sequence) or value else "an empty one"
