"""Open input files decompressed, and check by their first bytes that they are what their names say."""

import importlib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from rayfcp.config import ConfigError
from rayfcp.data.kinds import codec_of
from rayfcp.data.manifest import is_local, resolve
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import RemoteFile, UnreadableFileError

_HEAD_BYTES = 256
_POINTER = b"version https://git-lfs.github.com/spec/"
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|head|body|\?xml|error)\b", re.IGNORECASE)
_CODED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<bzip2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\x00)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<zip>PK\x03\x04)"
    rb"|(?P<Parquet>PAR1\x15)|(?P<Arrow>ARROW1\x00\x00)|(?P<PDF>%PDF-)"
)
_LINES = ("text", "jsonl", "json", "csv", "tsv")


CountCall = Callable[[int], object]
"""Called with the number of bytes of each read of a file."""


@contextmanager
def opened(file: InputFile, *, count: CountCall | None = None) -> Iterator[io.BufferedReader]:
    """Open the file at its start, decompressed. `count` is called with the bytes that are read, before decompression.

    Raises:
        UnreadableFileError: It is not what its name says.
        ConfigError: A module that decompresses it is not installed.
    """
    fs, path = resolve(file.url)
    raw: Any = fs.open(path, "rb") if is_local(fs) else RemoteFile(fs, path, num_bytes=file.num_bytes)
    with raw, io.BufferedReader(raw if count is None else _Counted(raw, count)) as stored:
        codec = codec_of(file.url)
        if file.start == 0:
            _check_head(stored.peek(_HEAD_BYTES), file, is_coded=codec is not None)
        if codec is None:
            yield stored
            return
        with io.BufferedReader(_decompressed(stored, codec)) as plain:
            _check_head(plain.peek(_HEAD_BYTES), file, is_coded=False)
            is_sought = codec == "zstd" and file.format in ("parquet", "arrow")  # zstd streams cannot seek
            yield io.BufferedReader(io.BytesIO(plain.read())) if is_sought else plain


class _Counted(io.RawIOBase):
    """A file whose bytes are counted as they are read."""

    def __init__(self, file: Any, count: CountCall) -> None:
        super().__init__()
        self._file, self._count = file, count

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        num_bytes = int(self._file.readinto(buffer))
        self._count(num_bytes)
        return num_bytes


def _decompressed(stored: io.BufferedReader, codec: str) -> Any:
    if codec == "zstd":  # pyarrow's reader, unlike that of some packages, fails at the end of a truncated file
        if not pa.Codec.is_available(codec):
            raise ConfigError("this pyarrow is built without zstd; install pyarrow from PyPI or conda-forge")
        return pa.CompressedInputStream(pa.PythonFile(stored, "r"), codec)
    try:
        module: Any = importlib.import_module(codec)
    except ImportError as error:
        raise ConfigError(
            f"this Python is built without {codec}; use one that has it, or decompress the data"
        ) from error
    return module.open(stored, "rb")


def named_head(head: bytes) -> str | None:
    """Return the kind of file that begins with these bytes if it is no image, text or table; None otherwise."""
    if head.startswith(_POINTER):
        return "a Git LFS pointer, not the data"
    if _MARKUP.match(head):
        return "a page of HTML or XML, e.g. for a login or an error, not the data"
    coded = _CODED.match(head)
    return coded and f"{coded.lastgroup} bytes"


def _check_head(head: bytes, file: InputFile, *, is_coded: bool) -> None:
    head = head[:_HEAD_BYTES]
    if head.startswith(_POINTER):
        raise UnreadableFileError.of(
            file.url, "is a Git LFS pointer, not the data", remedy="run git lfs pull in its repository"
        )
    if is_coded and not head:
        raise UnreadableFileError.of(file.url, "is empty, without even the header of its compression")
    if file.format != "text" and _MARKUP.match(head):
        what = "is a page of HTML or XML, e.g. for a login or an error, not the data"
        raise UnreadableFileError.of(file.url, what, remedy="download it again")
    coded = _CODED.match(head)
    if coded and not is_coded and file.format in _LINES:
        what = f"holds {coded.lastgroup} bytes, which its name does not say"
        raise UnreadableFileError.of(file.url, what, remedy="rename it, or set data.format")
