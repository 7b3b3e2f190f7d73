"""Local paths and fsspec URLs as one: resolve them, name them, write files that are there whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rayfcp.config import ConfigError


def resolve(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of `url` and the path in it, absolute where the file system is local.

    Raises:
        ConfigError: No file system is known, or installed, for the URL's protocol.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{url!r} cannot be opened: {error}; install the fsspec backend of its protocol") from error
    return fs, path


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether paths are files of this machine, so that they can be memory-mapped."""
    return isinstance(fs, LocalFileSystem)


def name_of(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """What `resolve` turns back into (fs, path) in any process: the path if local, else the URL."""
    return path if is_local(fs) else str(fs.unstrip_protocol(path))


def lives_in_one_process(url: str) -> bool:
    """Whether other processes cannot see what is there."""
    return url.startswith("memory:")


def join(folder: str, name: str) -> str:
    """`folder/name`, for paths and URLs.

    >>> join("s3://bucket/data/", "manifest.json")
    's3://bucket/data/manifest.json'
    """
    return f"{folder.rstrip('/')}/{name}"


@contextmanager
def whole_file(fs: fsspec.AbstractFileSystem, path: str) -> Iterator[IO[bytes]]:
    """A file to write that replaces `path` in one step when the block ends without an error.

    Local: written beside it, synced and renamed, so that a reader's memory map of the old file stays whole.
    Elsewhere: object stores show an upload when it is closed, and only then.
    """
    fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    if not is_local(fs):
        with fs.open(path, "wb") as file:
            yield file
        return
    target = Path(path)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
