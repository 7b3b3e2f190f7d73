"""Storage that fails: files that cannot be read, and calls that succeed when tried again."""

import io
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import fsspec

from rayfcp.config import ConfigError
from rayfcp.data.manifest import is_local, name_of
from rayfcp.data.rows import printable
from rayfcp.values.counted import counted

logger = logging.getLogger(__name__)

PAUSES_S = (0.5, 2.0, 8.0)
"""Seconds before each further try of a remote call: long enough for a store that throttles, short beside a failed
run."""

REMEDY = "repair or replace it, leave it out with data.exclude, or allow it with data.max_unreadable_files"
_CLIENTS = (
    *("aiohttp", "azure", "botocore", "google", "http", "httpcore", "httpcore2", "httpx", "httpx2"),
    *("huggingface_hub", "urllib3"),
)
_LASTING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
    io.UnsupportedOperation,
)
_Result = TypeVar("_Result")


class UnreadableFileError(ConfigError):
    """A file cannot be read, from its start or from some row on."""

    @classmethod
    def of(cls, url: str, problem: str | Exception, *, remedy: str = REMEDY) -> "UnreadableFileError":
        """Return the error of the file at `url`; `problem` says what it is instead, or is the error of its reader."""
        if isinstance(problem, Exception):
            problem = f"cannot be read: {' '.join(str(problem).split())[:200] or type(problem).__name__}"
        return cls(f"{printable(url)} {printable(problem)}; {remedy}")


def check_unreadable(urls: Collection[str], *, max_unreadable_files: int) -> None:
    """Warn of unreadable files, which are left out.

    Raises:
        ConfigError: There are more than `max_unreadable_files`.
    """
    first = f"{counted(len(urls), 'file')} cannot be read, e.g. {printable(min(urls, default=''))}"
    if len(urls) > max_unreadable_files:
        raise ConfigError(
            f"{first}; data.max_unreadable_files allows {max_unreadable_files}; repair or exclude them, or raise "
            "data.max_unreadable_files"
        )
    if urls:
        logger.warning("%s: their rows from there on are left out", first)


def retried(call: Callable[[], _Result], *, fs: fsspec.AbstractFileSystem, name: str) -> _Result:
    """Return the result of `call`, tried again after transient errors of a remote file system, once for each of
    `PAUSES_S`."""
    return _retried(call, pauses_s=() if is_local(fs) else PAUSES_S, name=name, may_pass=is_transient)


def read_prepared(call: Callable[[], _Result], *, fs: fsspec.AbstractFileSystem, path: str) -> _Result:
    """Return the result of `call`, which reads a file of prepared data. The file was there when the run began, so any
    error may pass, also of a local folder, which may be mounted again: `call` is tried again for each of `PAUSES_S`.

    Raises:
        UnreadableFileError: The last try failed too.
    """
    name = name_of(fs, path)
    try:
        return _retried(call, pauses_s=PAUSES_S, name=name, may_pass=lambda error: not isinstance(error, ConfigError))
    except ConfigError:
        raise
    except Exception as error:
        problem = f"cannot be read after {len(PAUSES_S) + 1} tries: {type(error).__name__}: {error}"
        # Without a cause, or a lost connection to storage is taken for a failed exchange between devices.
        raise UnreadableFileError.of(name, problem, remedy="bring it back as it was, and start the run again") from None


def _retried(
    call: Callable[[], _Result], *, pauses_s: Sequence[float], name: str, may_pass: Callable[[Exception], bool]
) -> _Result:
    for pause_s in pauses_s:
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            logger.warning("%s: %s: %s; trying again in %g s", printable(name), type(error).__name__, error, pause_s)
            time.sleep(pause_s)
    return call()


def is_transient(error: Exception) -> bool:
    """True if the same call may succeed later: time-outs, lost connections, servers that are busy or fail."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec calls any status of a server "not found"
    status = _http_status(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    return is_of_storage(error) and not isinstance(error, _LASTING)


def is_of_storage(error: Exception) -> bool:
    """True for errors of the operating system and of clients of remote storage."""
    is_client = type(error).__module__.partition(".")[0] in _CLIENTS
    return is_client or isinstance(error, OSError) or _http_status(error) is not None


def _http_status(error: Exception) -> int | None:
    """Status of the HTTP response behind the error; clients name it differently."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        found = iter([response.get("ResponseMetadata", {}).get("HTTPStatusCode")])
    else:
        names = ("status", "status_code", "code")
        found = (getattr(each, name, None) for each in (error, response) for name in names)
    return next((each for each in found if isinstance(each, int) and 100 <= each < 600), None)


class RemoteFile(io.RawIOBase):
    """Bytes of a remote file of `num_bytes` (0: unknown). After a transient error it is opened again and read on from
    the byte that was reached, so that its reader gets every byte once."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str, *, num_bytes: int) -> None:
        super().__init__()
        self._fs, self._path, self._num_bytes = fs, path, num_bytes
        self._handle: Any = None
        self._position = 0
        self._retried(self._opened)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._retried(lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def _retried(self, call: Callable[[], _Result]) -> _Result:
        try:
            return retried(call, fs=self._fs, name=self._path)
        except OSError:
            raise
        except Exception as error:  # clients raise errors of any type
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _read(self, num_bytes: int) -> bytes:
        try:
            handle = self._opened()
            if handle.tell() != self._position:
                handle.seek(self._position)
            data: bytes = handle.read(num_bytes)
            if num_bytes and not data and self._position < self._num_bytes:
                raise OSError(f"it ends after {self._position} of {self._num_bytes} bytes")
        except Exception:
            self._drop()
            raise
        return data

    def _opened(self) -> Any:
        if self._handle is None:
            self._handle = self._fs.open(self._path, "rb")
        return self._handle

    def _drop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()
