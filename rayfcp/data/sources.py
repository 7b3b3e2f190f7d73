"""Input files: folders, globs and URLs become a sorted list, and that list becomes splits, the units of work."""

import json
import os
import re
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape, has_magic
from itertools import accumulate
from pathlib import Path
from typing import Any

import fsspec
from fsspec.archive import AbstractArchiveFileSystem

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data.kinds import (
    MAX_FIRST_LINE,
    codec_of,
    extension,
    format_of,
    is_binary,
    is_description,
    is_json_line,
    is_picture,
    kind_of,
)
from rayfcp.data.manifest import is_local, join, name_of, resolve
from rayfcp.data.rows import printable
from rayfcp.data.storage import is_of_storage, is_transient, retried
from rayfcp.values.counted import counted

SPLIT_BYTES = 16 << 20
"""Small files together up to this: enough work to amortise a task."""
PIECE_BYTES = 64 << 20
"""Largest piece of a file: few enough bytes that many workers share a large one."""
IMAGE_WEIGHT = 256
"""Work of a JSONL line with images, whose bytes lie in other files, in units of its own bytes."""

_NEVER_READ = (".*", "__pycache__")
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
_NAMED_KINDS = 6
"""Number of kinds of ignored files that a line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """Bytes `[start, stop)` of a file: all of it, or a piece of a large one.

    A piece has the lines (JSONL) or row groups (Parquet) that begin in it. `stamp` changes when the file does.
    `is_guessed`: the format follows from the name.
    """

    url: str
    format: str
    num_bytes: int
    stamp: str
    start: int
    stop: int
    is_guessed: bool = False

    @property
    def is_piece(self) -> bool:
        return self.stop - self.start < self.num_bytes

    @property
    def is_compressed(self) -> bool:
        return codec_of(self.url) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSplit:
    """Input of one task: several small files, or one piece."""

    index: int
    files: tuple[InputFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.stop - file.start for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """Files of `data.paths`. `files`: those to read, each once, sorted by URL. `ignored`: URLs of the others in its
    folders, sorted, without those that `data.include` and `data.exclude` leave out; a folder's ends in a slash."""

    files: tuple[InputFile, ...]
    ignored: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Log lines on files that are not read, and on files that perhaps should not be."""
        return tuple(filter(None, (self.ignored_line(), self.held_out_line())))

    def ignored_line(self) -> str | None:
        """Return one line with the number of ignored files by extension, None without any."""
        if not self.ignored:
            return None
        counts = Counter(extension(url) for url in self.ignored).most_common()
        named = ", ".join(f"{kind} {count}" if count > 1 else kind for kind, count in counts[:_NAMED_KINDS])
        others = f" and {len(counts) - _NAMED_KINDS} more kinds" if len(counts) > _NAMED_KINDS else ""
        pictures = "; images are read where rows name them" * any(map(is_picture, self.ignored))
        return printable(f"ignored files: {len(self.ignored)} ({named}{others}), e.g. {self.ignored[0]}{pictures}")

    def held_out_line(self) -> str | None:
        """Return one line if files are named as held-out splits beside one for training, None otherwise."""
        found: dict[tuple[str, bool], list[str]] = {}
        for file in self.files:
            parts = file.url.split("/")
            for at in (-1, -2):
                split = _SPLIT.match(parts[at])
                if split:
                    found.setdefault(("/".join(parts[:at]), split[1].lower() == "train"), []).append(file.url)
        held_out = sorted(
            url for (place, trains), urls in found.items() if not trains and (place, True) in found for url in urls
        )
        if not held_out:
            return None
        return printable(
            f"{counted(len(held_out), 'file')} beside those of a split train look held out, e.g. {held_out[0]}; they "
            "are read; leave them out with data.exclude"
        )


def discover(data: DataConfig) -> Discovery:
    """Find all files of `data.paths`.

    Folders are searched for files that match `data.include`; by default those with an extension of data, or with the
    usual ones of a declared format. Hidden names, `__pycache__`, and whatever matches `data.exclude` are left out.
    A pattern among the paths gives all that it matches, except hidden and excluded names below its fixed part.
    A folder written by `datasets.save_to_disk` has the files that its state names; of its splits `train` is read.
    Linked folders and files are read once, under their own name if that is in `data.paths` as well.

    Raises:
        ConfigError: A path is missing, a link leads nowhere, a named file has a format that is not read, no file is
            left, or the data are prepared already.
    """
    if data.format == "prepared":
        raise ConfigError("data.format is 'prepared', must be a format of source files to prepare; change it")
    search = _Search(data)
    for path in data.paths:
        search.add(path)
    found = search.found()
    if not found.files:
        ignored = found.ignored_line()
        remedy = "change them"
        if any(map(is_picture, found.ignored)):
            remedy += ", or put a metadata.jsonl with file_name and text of each image beside them"
        raise ConfigError(
            f"data.paths {', '.join(map(repr, data.paths))} hold no file that matches data.include, data.exclude and "
            f"data.format ({data.format}){'; ' + ignored if ignored else ''}; {remedy}"
        )
    return found


def would_be_read(folder: str, data: DataConfig) -> bool:
    """True if `discover` could find a file in `folder` the next time."""
    for path in data.paths:
        root = name_of(*resolve(path)).rstrip("/") + "/"
        if folder.startswith(root) and not _is_left_out(folder.removeprefix(root).split("/"), data.exclude):
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


def _pieces(file: InputFile, *, piece_bytes: int) -> list[InputFile]:
    """Pieces of at most `piece_bytes`, where the format can be read from the middle."""
    if file.format not in ("jsonl", "parquet") or file.is_compressed or file.num_bytes <= piece_bytes:
        return [file]
    starts = range(0, file.num_bytes, piece_bytes)
    return [replace(file, start=start, stop=min(start + piece_bytes, file.num_bytes)) for start in starts]


class _Search:
    """Files found so far, by URL, with their real paths."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._found: dict[str, tuple[bool, str, InputFile]] = {}
        self._ignored: dict[str, str] = {}
        self._entered: set[str] = set()
        self._links: deque[tuple[fsspec.AbstractFileSystem, str, str]] = deque()

    def found(self) -> Discovery:
        """Return the files, each real one once."""
        by_real: dict[str, InputFile] = {}
        for _, real, file in sorted(self._found.values(), key=lambda each: (each[0], each[2].url)):
            by_real.setdefault(real, file)
        files = {file.url: file for file in by_real.values()}
        ignored = sorted(url for url, real in self._ignored.items() if real not in by_real)
        return Discovery(files=tuple(files[url] for url in sorted(files)), ignored=tuple(ignored))

    def add(self, path: str) -> None:
        """Add the files of an entry of `data.paths`."""
        fs, root = resolve(path)
        if isinstance(fs, AbstractArchiveFileSystem):
            raise ConfigError(f"data.paths has {path!r}, must not lead into an archive; unpack it and name the files")
        try:
            entries = retried(lambda: _entries(fs, root), fs=fs, name=path)
            if not entries:
                problem = "matches no file" if has_magic(root) else "does not exist"
                raise ConfigError(f"data.paths has {path!r}, which {problem}; give a file, folder or pattern that does")
            self._entered.clear()
            for entry in _kept(entries, root=root, exclude=self._data.exclude):
                self._add_named(fs, entry)
            while self._links:
                linked, folder, below = self._links.popleft()
                self._add_folder(linked, folder, below=below)
        except Exception as error:
            if not is_of_storage(error):
                raise
            why = printable(str(error.__cause__ or error))
            raise ConfigError(f"data.paths has {path!r}, which cannot be read: {why}; check access") from error

    def _add_named(self, fs: fsspec.AbstractFileSystem, entry: dict[str, Any]) -> None:
        found = _target_of(entry)
        name = entry["name"].rstrip("/")
        if found["type"] == "directory":
            self._add_folder(fs, name, below="")
        elif self._data.format == "auto" and is_binary(name):
            raise ConfigError(
                f"data.paths has {printable(name)!r}, must not have files of type {extension(name)}, which are not "
                "read; convert it to JSON Lines or Parquet, or set data.format"
            )
        else:
            self._add_file(fs, found, real=os.path.realpath(name) if is_local(fs) else name_of(fs, name))

    def _add_folder(self, fs: fsspec.AbstractFileSystem, folder: str, *, below: str) -> None:
        """Add the files under `folder`, whose path relative to the configured one is `below`."""
        real = os.path.realpath(folder) if is_local(fs) else name_of(fs, folder)
        if real in self._entered:
            return
        self._entered.add(real)
        listed = retried(lambda: fs.ls(folder, detail=True), fs=fs, name=folder)
        entries = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in listed}
        entries = {name: entry for name, entry in entries.items() if entry["name"].rstrip("/") != folder.rstrip("/")}
        wanted = _wanted_names(fs, folder, names=entries, choose_split=not self._data.include)
        for name, listed_entry in sorted(entries.items()):
            if _selects(self._data.exclude, name, below=below):
                continue
            own = f"{real}/{name}"
            if (wanted is not None and name not in wanted) or _selects(_NEVER_READ, name):
                if wanted is not None or not self._data.include:
                    self._ignore(fs, listed_entry, real=own)
                continue
            entry = _target_of(listed_entry)
            if entry["type"] == "directory" and listed_entry.get("islink"):
                self._links.append((fs, entry["name"], f"{below}{name}/"))
            elif entry["type"] == "directory":
                self._add_folder(fs, entry["name"], below=f"{below}{name}/")
            elif entry["type"] == "file" and _is_included(name, below, self._data):
                self._add_file(fs, entry, real=os.path.realpath(own) if listed_entry.get("islink") else own)
            elif not self._data.include or _selects(self._data.include, name, below=below):
                self._ignore(fs, entry, real=own)

    def _add_file(self, fs: fsspec.AbstractFileSystem, entry: dict[str, Any], *, real: str) -> None:
        file = _input_file(fs, entry, declared=self._data.format)
        self._found[file.url] = bool(entry.get("islink")), real, file

    def _ignore(self, fs: fsspec.AbstractFileSystem, entry: dict[str, Any], *, real: str) -> None:
        self._ignored[name_of(fs, entry["name"].rstrip("/")) + "/" * (entry["type"] == "directory")] = real


def _entries(fs: fsspec.AbstractFileSystem, root: str) -> list[dict[str, Any]]:
    try:
        return [fs.info(root)]
    except (FileNotFoundError, NotADirectoryError) as error:  # `exists` would be false after any error
        if is_transient(error):
            raise
        return list(fs.glob(_pattern(fs, root), detail=True).values()) if has_magic(root) else []


def _pattern(fs: fsspec.AbstractFileSystem, root: str) -> str:
    """Return the pattern with the longest folder that exists under that very name taken literally."""
    folder, slash, rest = root.rpartition("/")
    while has_magic(folder):
        if fs.exists(folder):
            return f"{escape(folder)}/{rest}"
        folder, slash, last = folder.rpartition("/")
        rest = last + slash + rest
    return root


def _target_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry; for a link in a local folder its target, under the link's name.

    Raises:
        ConfigError: The target does not exist.
    """
    if not entry.get("islink"):
        return entry
    link = Path(entry["name"])
    if not link.exists():
        named = printable(f"{link} to {link.readlink()}")
        raise ConfigError(
            f"data.paths has the link {named}, which does not exist; repair or delete it, or set data.exclude"
        )
    fs, target = resolve(os.path.realpath(entry["name"]))
    return {**fs.info(target), "name": entry["name"], "islink": True}


def _is_included(name: str, below: str, data: DataConfig) -> bool:
    if is_binary(name) and data.format in ("auto", "text"):
        return False
    if data.include:
        return _selects(data.include, name, below=below)
    if data.format == "text":
        return True
    kind = kind_of(name)
    if data.format == "auto":
        return kind is not None and not is_description(name)
    return kind == data.format or (data.format in ("jsonl", "json") and kind in ("jsonl", "json"))


def _selects(patterns: Collection[str], name: str, *, below: str = "") -> bool:
    """True if a pattern fits the name, or, if it has a slash, the path from the configured folder, `below` and name."""
    for pattern in (each.removeprefix("./").rstrip("/") for each in patterns):
        path = f"{'/' * pattern.startswith('**/')}{below}{name}" if "/" in pattern else name
        if fnmatchcase(path, pattern):
            return True
    return False


def _is_left_out(parts: Sequence[str], patterns: Collection[str]) -> bool:
    """True if a folder or file on the path with these parts is never read, or is among the patterns."""
    paths = accumulate((f"{part}/" for part in parts), initial="")
    return any(
        _selects((*_NEVER_READ, *patterns), part, below=below) for part, below in zip(parts, paths, strict=False)
    )


def _kept(entries: list[dict[str, Any]], *, root: str, exclude: Collection[str]) -> list[dict[str, Any]]:
    """The entries without those that are hidden or excluded below the folder at which the pattern `root` begins."""
    pattern = root.strip("/").split("/")
    depth = next((at for at, part in enumerate(pattern) if has_magic(part)), len(pattern))
    if any(part.startswith(".") for part in pattern[depth:]):  # asked for
        return entries
    return [each for each in entries if not _is_left_out(each["name"].strip("/").split("/")[depth:], exclude)]


def _wanted_names(
    fs: fsspec.AbstractFileSystem, folder: str, *, names: Collection[str], choose_split: bool
) -> Collection[str] | None:
    """Return the names that hold data in a folder of the library `datasets`; None for other folders.

    A folder written by `save_to_disk` has the files of its table, or its split `train`, or its only split (all splits
    unless `choose_split`). A cache has all files but results of `map` and the like.

    Raises:
        ConfigError: Files are missing, or which split to read is not clear.
    """
    kind = next((name for name in ("state.json", "dataset_dict.json") if name in names), None)
    try:
        described = json.loads(retried(lambda: fs.cat_file(join(folder, kind)), fs=fs, name=folder)) if kind else None
    except ValueError:
        return None
    described = described if isinstance(described, dict) else {}
    if isinstance(files := described.get("_data_files"), list):
        wanted = [each["filename"] for each in files if isinstance(each, dict) and "filename" in each]
        missing = sorted(set(wanted) - set(names))
        if missing:
            raise ConfigError(
                f"data.paths has {printable(folder)!r}, saved by datasets, without {missing[0]!r} and "
                f"{len(missing) - 1} more files that its state.json names; save or copy it again"
            )
        return wanted
    if "dataset_info.json" in names:
        return [name for name in names if not fnmatchcase(name, "cache-*.arrow")]
    splits = described.get("splits") if kind == "dataset_dict.json" else None
    if not isinstance(splits, list) or not choose_split:
        return None
    if "train" in splits or len(splits) == 1:
        return ["train"] if "train" in splits else splits
    raise ConfigError(
        f"data.paths has {printable(folder)!r}, saved by datasets, with splits {', '.join(splits)}, must name one; "
        f"e.g. {printable(join(folder, splits[0]))}"
    )


def _input_file(fs: fsspec.AbstractFileSystem, entry: dict[str, Any], *, declared: str) -> InputFile:
    stamps = (entry.get(key) for key in ("ETag", "mtime", "LastModified", "updated", "created"))
    size = int(entry.get("size") or 0)
    kind = format_of(entry["name"], declared)
    if kind == "json" and codec_of(entry["name"]) is None and size > PIECE_BYTES:
        # Lines can be read in pieces, unlike other JSON.
        with retried(lambda: fs.open(entry["name"], "rb"), fs=fs, name=entry["name"]) as handle:
            kind = "jsonl" if is_json_line(handle.readline(MAX_FIRST_LINE)) else kind
    return InputFile(
        url=name_of(fs, entry["name"]),
        format=kind,
        num_bytes=size,
        stamp=str(next((stamp for stamp in stamps if stamp is not None), "")),
        start=0,
        stop=size,
        is_guessed=declared == "auto",
    )
