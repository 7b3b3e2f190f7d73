"""Input files: folders, globs and URLs become a sorted list, and that list becomes splits, the units of work."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any

import fsspec

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data.manifest import name_of, resolve

SPLIT_BYTES = 16 << 20
"""Small files together up to this: enough work to amortise a task."""
PIECE_BYTES = 64 << 20
"""Largest piece of a file: few enough bytes that many workers share a large one."""
IMAGE_WEIGHT = 256
"""Work of a JSONL line with images, whose bytes lie in other files, in units of its own bytes."""

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_EXTENSIONS = {
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "webdataset": (".tar",),
}
_NEVER_READ = (".*", "__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """Bytes `[start, stop)` of a file: all of it, or a piece of a large one.

    A piece has the lines (JSONL) or row groups (Parquet) that begin in it. `stamp` changes when the file does.
    """

    url: str
    format: str
    num_bytes: int
    stamp: str
    start: int
    stop: int

    @property
    def is_piece(self) -> bool:
        return self.stop - self.start < self.num_bytes

    @property
    def is_compressed(self) -> bool:
        return self.url.endswith(_COMPRESSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSplit:
    """Input of one task: several small files, or one piece."""

    index: int
    files: tuple[InputFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.stop - file.start for file in self.files)


def discover(data: DataConfig) -> tuple[InputFile, ...]:
    """All files of `data.paths`, each once, sorted by URL.

    Inside folders: names that match `data.include` (by default, for a declared columnar or JSONL format, its usual
    extensions) and no component of which matches `data.exclude`, except hidden names, `__pycache__` and linked folders.

    Raises:
        ConfigError: A path is missing, or no file is left.
    """
    found = {file.url: file for path in data.paths for file in _files_of(path, data)}
    if not found:
        raise ConfigError(
            f"data.paths {', '.join(map(repr, data.paths))} hold no file that matches data.include, data.exclude and "
            f"data.format ({data.format}); change them"
        )
    return tuple(found[url] for url in sorted(found))


def would_be_read(folder: str, data: DataConfig) -> bool:
    """True if `discover` could find a file in `folder` the next time."""
    for path in data.paths:
        root = name_of(*resolve(path)).rstrip("/") + "/"
        below = folder.removeprefix(root).split("/")
        if folder.startswith(root) and not any(_matches(name, (*_NEVER_READ, *data.exclude)) for name in below):
            return True
    return False


def work_bytes(file: InputFile, *, has_images: bool) -> int:
    """Bytes of the file and of the images that its rows name, estimated."""
    return file.num_bytes * (IMAGE_WEIGHT if has_images and file.format == "jsonl" else 1)


def make_splits(files: tuple[InputFile, ...], *, has_images: bool = False) -> tuple[InputSplit, ...]:
    """Splits of the files in order: small files together, large ones in pieces where their format allows it."""
    groups: list[list[InputFile]] = []
    budget_bytes = -1
    for file in files:
        num_bytes = work_bytes(file, has_images=has_images)
        pieces = _pieces(file, piece_bytes=max(PIECE_BYTES * file.num_bytes // max(num_bytes, 1), 1))
        if len(pieces) > 1 or num_bytes > budget_bytes:
            groups.extend([piece] for piece in pieces)
            budget_bytes = SPLIT_BYTES - num_bytes if len(pieces) == 1 else -1
        else:
            groups[-1].append(file)
            budget_bytes -= num_bytes
    return tuple(InputSplit(index=index, files=tuple(group)) for index, group in enumerate(groups))


def format_of(name: str, declared: str) -> str:
    """The declared format; for `auto` that of the extension, `text` for all others.

    >>> format_of("a/b.jsonl.gz", "auto"), format_of("a/b.py", "auto"), format_of("a/b.json", "jsonl")
    ('jsonl', 'text', 'jsonl')
    """
    if declared != "auto":
        return declared
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return next((kind for kind, extensions in _EXTENSIONS.items() if name.endswith(extensions)), "text")


def _pieces(file: InputFile, *, piece_bytes: int) -> list[InputFile]:
    """Pieces of at most `piece_bytes`, where the format can be read from the middle."""
    if file.format not in ("jsonl", "parquet") or file.is_compressed or file.num_bytes <= piece_bytes:
        return [file]
    starts = range(0, file.num_bytes, piece_bytes)
    return [replace(file, start=start, stop=min(start + piece_bytes, file.num_bytes)) for start in starts]


def _files_of(path: str, data: DataConfig) -> Iterator[InputFile]:
    fs, root = resolve(path)
    try:
        if fs.exists(root):
            entries = [fs.info(root)]
        else:
            entries = list(fs.glob(root, detail=True).values()) if has_magic(root) else []
    except OSError as error:
        raise ConfigError(f"data.paths has {path!r}, which cannot be read: {error}; check access") from error
    if not entries:
        problem = "matches no file" if has_magic(root) else "does not exist"
        raise ConfigError(f"data.paths has {path!r}, which {problem}; give a file, folder or pattern that does")
    for entry in map(_target_of, entries):
        inside = _walk(fs, entry["name"], data=data, below="") if entry["type"] == "directory" else [entry]
        yield from (_input_file(fs, found, declared=data.format) for found in inside)


def _walk(fs: fsspec.AbstractFileSystem, folder: str, *, data: DataConfig, below: str) -> Iterator[dict[str, Any]]:
    """File entries under `folder`, whose path relative to the configured one is `below`."""
    for listed in fs.ls(folder, detail=True):
        entry = _target_of(listed)
        name = entry["name"].rstrip("/").rsplit("/", 1)[-1]
        if entry["name"].rstrip("/") == folder.rstrip("/") or _matches(name, (*_NEVER_READ, *data.exclude)):
            continue
        if entry["type"] == "directory":
            if not listed.get("islink"):
                yield from _walk(fs, entry["name"], data=data, below=f"{below}{name}/")
        elif entry["type"] == "file" and _is_included(name, below, data):
            yield entry


def _target_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry; for a link in a local folder its target, under the link's name."""
    target = Path(entry["name"]).resolve() if entry.get("islink") else None
    if target is None or not target.exists():
        return entry
    fs, path = resolve(str(target))
    return {**fs.info(path), "name": entry["name"]}


def _is_included(name: str, below: str, data: DataConfig) -> bool:
    if data.include:
        return any(fnmatchcase(below + name if "/" in pattern else name, pattern) for pattern in data.include)
    usual = _EXTENSIONS.get(data.format)
    return usual is None or format_of(name, "auto") == data.format or (data.format == "jsonl" and ".json" in name)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _input_file(fs: fsspec.AbstractFileSystem, entry: dict[str, Any], *, declared: str) -> InputFile:
    stamps = (entry.get(key) for key in ("ETag", "mtime", "LastModified", "updated", "created"))
    size = int(entry.get("size") or 0)
    return InputFile(
        url=name_of(fs, entry["name"]),
        format=format_of(entry["name"], declared),
        num_bytes=size,
        stamp=str(next((stamp for stamp in stamps if stamp is not None), "")),
        start=0,
        stop=size,
    )
