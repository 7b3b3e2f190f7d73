"""The manifest of a prepared folder, and local paths and fsspec URLs in one form.

`manifest.json` is written last, in one step: a folder without it is not complete.
"""

import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem, make_path_posix
from pydantic import TypeAdapter

from rayfcp.config import ConfigError
from rayfcp.config.losses import RowKind
from rayfcp.data.account import ReadAccount
from rayfcp.data.rows import BadRow, printable
from rayfcp.values.counted import counted


def resolve(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of `url` and the path in it, which is absolute if the file system is local. In both, `::`
    is part of a name, unless a URL stands on either side of it (fsspec's chains).

    Raises:
        ConfigError: No file system is known, or installed, for the URL's protocol.
    """
    local = next((url[len(start) :] for start in ("file://", "local://") if url.startswith(start)), url)
    if "://" not in local or local is not url:
        return LocalFileSystem(), make_path_posix(local.rstrip("/") or "/")
    head, chained, last = url.partition("::")
    is_name = bool(chained) and "://" in head and "://" not in last
    folder = head[: head.rindex("/") + 1] if is_name else url
    try:
        fs, path = fsspec.core.url_to_fs(folder)
    except (ValueError, ImportError, TypeError, OSError) as error:
        raise ConfigError(f"{url!r} cannot be opened: {error}; install the fsspec backend of its protocol") from error
    return fs, f"{path.rstrip('/')}/{url[len(folder) :]}" if is_name else path


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """True if paths are files of this machine, which can be memory-mapped."""
    return isinstance(fs, LocalFileSystem)


def name_of(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """The path if local, else the URL: `resolve` turns it back into (fs, path) in any process."""
    return path if is_local(fs) else str(fs.unstrip_protocol(path))


def join(folder: str, name: str) -> str:
    """`folder/name`, for paths and URLs.

    >>> join("s3://bucket/data/", "manifest.json")
    's3://bucket/data/manifest.json'
    """
    return f"{folder.rstrip('/')}/{name}"


@contextmanager
def whole_file(fs: fsspec.AbstractFileSystem, path: str) -> Iterator[IO[bytes]]:
    """A file to write that replaces `path` atomically when the block ends without an error.

    Local: written beside it, synced and renamed, so that a reader's memory map of the old file stays valid.
    Elsewhere: object stores publish an upload when it is closed.
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


MANIFEST_NAME = "manifest.json"
KIND, MIXTURE_KIND, VERSION = "rayfcp-prepared", "rayfcp-mixture", 1
MAX_NAMED_ROWS = 100
READ_RULES = 3
"""Version of the rules that make rows of files and tokens of rows. Raise it when they change for any input, so that
caches of other rules are not used."""
_PICTURE_RULES = 3
"""First rules by which rows with images have masks of answers, and images know the marks around them."""


def image_file(shard: str) -> str:
    """Name of the file of images beside a shard.

    >>> image_file("shard-0-00000-000.arrow")
    'shard-0-00000-000.pictures'
    """
    return shard.removesuffix(".arrow") + ".pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One shard. `batch_rows`: rows of each record batch. `content`: hash of tokens, labels, images and what a teacher
    said. `picture_bytes`: size of the image file beside it, None if rows have no images."""

    name: str
    num_bytes: int
    num_tokens: int
    batch_rows: tuple[int, ...]
    has_labels: bool
    content: str
    picture_bytes: int | None = None
    has_teacher: bool = False

    @property
    def num_rows(self) -> int:
        return sum(self.batch_rows)

    @property
    def has_images(self) -> bool:
        return self.picture_bytes is not None

    @property
    def files(self) -> dict[str, int]:
        """Size of each file by name."""
        beside = {} if self.picture_bytes is None else {image_file(self.name): self.picture_bytes}
        return {self.name: self.num_bytes, **beside}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedManifest:
    """A prepared folder. `folder`: where it was opened, not part of the file.

    `fingerprint`: hash of the inputs (names, sizes, times), tokenizer and columns; if it differs, prepare again.
    `bad_rows`: skipped rows by reason; `named_bad_rows`: the first 100 of them. `rows`: what a row of the inputs is.
    `num_files`, `num_read_rows`: of the inputs, None in folders of earlier versions. `num_ignored_files`: other files
    of the folders. `file_lines`: log lines about these. `parts`: the sources of a mixture by name; its shards are those
    of the sources in order, and their names are whole paths. `read_rules`: the `READ_RULES` that made the rows.
    """

    folder: str
    fingerprint: str
    tokenizer: str
    tokenizer_fingerprint: str
    tokenizer_vocab_size: int
    max_token_id: int
    shards: tuple[ShardInfo, ...]
    bad_rows: dict[str, int] = field(default_factory=dict)
    rows: RowKind = "sequences"
    named_bad_rows: tuple[BadRow, ...] = ()
    account: ReadAccount = field(default_factory=ReadAccount)
    num_files: int | None = None
    num_ignored_files: int = 0
    file_lines: tuple[str, ...] = ()
    num_read_rows: int | None = None
    parts: Mapping[str, "PreparedManifest"] = field(default_factory=dict)
    read_rules: int = READ_RULES

    @property
    def num_rows(self) -> int:
        """Good rows of the inputs, and further samples that they gave."""
        return sum(shard.num_rows for shard in self.shards) // self.samples_per_row

    @property
    def samples_per_row(self) -> int:
        """Rows of the shards that a row of the inputs gives, or 1 where it may give any number."""
        return 2 if self.rows == "pairs" else 1

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_bad_rows(self) -> int:
        return sum(self.bad_rows.values())

    def shard(self, number: int) -> tuple["PreparedManifest", int]:
        """The manifest that has shard `number` of samples, which is this one, and its number there."""
        return self, number

    @property
    def content(self) -> tuple[str, ...]:
        """Hashes of the shards in order: equal exactly when all that their rows hold is, wherever they lie."""
        return tuple(shard.content for shard in self.shards)

    def __str__(self) -> str:
        return f"{printable(self.folder)}: {counted(self.num_tokens, 'token')} in {counted(len(self.shards), 'shard')}"


_MANIFEST = TypeAdapter(PreparedManifest)


def write_mixture(folder: str, parts: Mapping[str, PreparedManifest]) -> PreparedManifest:
    """Write a manifest in `folder` that stands for the prepared folders of a mixture's sources, by name; return it."""
    fs, path = resolve(join(folder, MANIFEST_NAME))
    values = {"kind": MIXTURE_KIND, "version": VERSION, "parts": {name: part.folder for name, part in parts.items()}}
    with whole_file(fs, path) as file:
        file.write(json.dumps(values).encode())
    return read_manifest(folder)


def _mixture(folder: str, parts: Mapping[str, str]) -> PreparedManifest | None:
    """The sources' manifests as one; None if one of them is not complete."""
    found = {name: find_manifest(part) for name, part in parts.items()}
    manifests = [part for part in found.values() if part is not None]
    if len(manifests) < len(found):
        return None
    bad: Counter[str] = Counter()
    for part in manifests:
        bad.update(part.bad_rows)
    fingerprints = [(name, part.fingerprint) for name, part in zip(found, manifests, strict=True)]
    return replace(
        manifests[0],
        folder=folder,
        fingerprint=hashlib.blake2b(repr(fingerprints).encode(), digest_size=8).hexdigest(),
        max_token_id=max(part.max_token_id for part in manifests),
        shards=tuple(replace(each, name=join(part.folder, each.name)) for part in manifests for each in part.shards),
        bad_rows=dict(bad),
        named_bad_rows=tuple(row for part in manifests for row in part.named_bad_rows)[:MAX_NAMED_ROWS],
        account=ReadAccount.total(part.account for part in manifests),
        num_files=None,  # counted in the parts
        num_ignored_files=0,
        file_lines=(),
        num_read_rows=None,
        parts=dict(zip(found, manifests, strict=True)),
    )


def write_manifest(manifest: PreparedManifest) -> None:
    """Make the folder complete."""
    own = _MANIFEST.dump_python(manifest, mode="json", exclude={"folder", "parts"})
    values = {"kind": KIND, "version": VERSION, **own}
    totals = {"num_rows": manifest.num_rows, "num_tokens": manifest.num_tokens, "vocab_size": None}
    fs, path = resolve(join(manifest.folder, MANIFEST_NAME))
    with whole_file(fs, path) as file:
        file.write(json.dumps({**values, **totals}).encode())


def find_manifest(folder: str) -> PreparedManifest | None:
    """The manifest of a complete prepared folder of this version with all its shards, else None.

    Raises:
        ConfigError: An earlier version prepared it with a processor.
    """
    fs, path = resolve(folder)
    try:
        values = json.loads(fs.cat_file(join(path, MANIFEST_NAME)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if isinstance(values, dict) and (values.get("kind"), values.get("version")) == (MIXTURE_KIND, VERSION):
        return _mixture(name_of(fs, path), values["parts"])
    if not isinstance(values, dict) or (values.get("kind"), values.get("version")) != (KIND, VERSION):
        return None
    try:
        manifest = _MANIFEST.validate_python({"read_rules": 1, **values, "folder": name_of(fs, path)})
    except ValueError:  # written by an older version, e.g. one that counted an unreadable file as a bad row
        return None
    if manifest.read_rules < _PICTURE_RULES and any(shard.has_images for shard in manifest.shards):
        raise ConfigError(
            f"{printable(manifest.folder)} was prepared with a processor by rules {manifest.read_rules}, must be by "
            f"{_PICTURE_RULES} or later, which train answers alone and cut before images; delete it and prepare again"
        )
    sizes = {entry["name"].rsplit("/", 1)[-1]: entry.get("size") for entry in fs.ls(path, detail=True)}
    wanted = {name: size for shard in manifest.shards for name, size in shard.files.items()}
    return manifest if all(sizes.get(name) == size for name, size in wanted.items()) else None


def read_manifest(folder: str) -> PreparedManifest:
    """The manifest of a complete prepared folder or URL.

    Raises:
        ConfigError: Not a prepared folder, or an incomplete one.
    """
    manifest = find_manifest(folder)
    if manifest is None:
        raise ConfigError(
            f"{folder!r} must be a folder of prepared data with {MANIFEST_NAME} and all its shards; run rayfcp prepare"
        )
    return manifest
