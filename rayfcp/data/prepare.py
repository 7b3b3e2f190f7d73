"""From the files of a configuration to a prepared folder, in this process or as tasks of Ray Data."""

import dataclasses
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig, SourceConfig
from rayfcp.data.account import ReadAccount, by_reason
from rayfcp.data.balance import Balance
from rayfcp.data.chat import ChatEncoder, chat_fingerprint
from rayfcp.data.distilled import DISTILLED_FORMS, distilled_rows
from rayfcp.data.formats import CountCall
from rayfcp.data.index import read_balances
from rayfcp.data.manifest import (
    MANIFEST_NAME,
    MAX_NAMED_ROWS,
    READ_RULES,
    VERSION,
    PreparedManifest,
    ShardInfo,
    find_manifest,
    join,
    name_of,
    read_manifest,
    resolve,
    write_manifest,
    write_mixture,
)
from rayfcp.data.pairs import PAIR_FORMS, PairEncoder
from rayfcp.data.readers import read_rows
from rayfcp.data.rows import BadRow, TokenRow
from rayfcp.data.shards import ShardWriter
from rayfcp.data.sources import Discovery, InputFile, InputSplit, discover, make_splits, work_bytes, would_be_read
from rayfcp.data.storage import UnreadableFileError, check_unreadable
from rayfcp.data.tokenizer import load_tokenizer, tokenizer_of

logger = logging.getLogger(__name__)

SMALL_BYTES = 64 << 20
"""Below this, starting Ray's worker processes (5 s on two cores) takes longer than the work."""

ProgressCall = Callable[[int, int], None]
"""Called with (bytes of input done, total bytes of input) after each split, and during splits that this process
reads."""
PROGRESS_S = 2.0
"""Seconds between calls within a split."""
_Row = TokenRow | BadRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """Output of one split. `num_rows` includes bad rows; `named_bad_rows` count from the start of their piece."""

    index: int
    num_rows: int
    max_token_id: int
    shards: tuple[ShardInfo, ...]
    bad_rows: dict[str, int]
    named_bad_rows: tuple[BadRow, ...]
    account: ReadAccount


_SPLIT, _RESULT = TypeAdapter(InputSplit), TypeAdapter(SplitResult)


def prepare(data: DataConfig, *, out_dir: str, progress: ProgressCall | None = None) -> PreparedManifest:
    """Tokenise `data` into shards and a manifest in `out_dir`, a folder or fsspec URL; the sources of a mixture into
    folders of their names in it.

    Inputs over 64 MiB run as Ray Data tasks on the Ray that the caller has started, smaller ones in this process. Both
    write the same bytes. A complete `out_dir` of the same inputs is kept.

    Raises:
        ConfigError: Nothing to read, too many bad rows, no usable row, or other prepared data in `out_dir`.
    """
    if data.sources:
        part = partial(prepare, progress=progress)
        return write_mixture(out_dir, _of_sources(data, lambda name, own: part(own, out_dir=join(out_dir, name))))
    found = discover(data)
    is_small = sum(work_bytes(file, has_images=data.processor is not None) for file in found.files) <= SMALL_BYTES
    # fsspec's memory file system is visible in this process alone.
    is_private = any(url.startswith("memory:") for url in (out_dir, *(file.url for file in found.files)))
    on_ray = not (is_small or is_private)
    return _prepare(data, found=found, out_dir=out_dir, on_ray=on_ray, progress=progress)


def prepare_local(data: DataConfig, *, out_dir: str, progress: ProgressCall | None = None) -> PreparedManifest:
    """`prepare` in this process, without Ray, whatever the size."""
    return _prepare(data, found=discover(data), out_dir=out_dir, on_ray=False, progress=progress)


def cached_prepare(data: DataConfig, *, cache_dir: str, progress: ProgressCall | None = None) -> PreparedManifest:
    """The prepared folder of `data`: `data.paths` itself if it is one, else a folder of `cache_dir` named by
    fingerprint, prepared unless it is complete already. That of a mixture refers to those of its sources.

    Raises:
        ConfigError: As `prepare`; or prepared data of another tokenizer.
    """
    if data.sources:
        parts = _of_sources(data, lambda _, own: cached_prepare(own, cache_dir=cache_dir, progress=progress))
        known = hashlib.blake2b(repr([(name, part.folder) for name, part in parts.items()]).encode(), digest_size=8)
        return write_mixture(join(cache_dir, f"mixture-{known.hexdigest()}"), parts)
    prepared = _already_prepared(data)
    if prepared is None:
        out_dir = join(cache_dir, f"prepared-{fingerprint_of(data, files=discover(data).files)}")
        return prepare(data, out_dir=out_dir, progress=progress)
    tokenizer = tokenizer_of(data)
    if prepared.tokenizer_fingerprint != tokenizer.fingerprint and not _is_text_of(prepared, data.processor):
        key = "processor" if data.processor else "tokenizer"
        raise ConfigError(
            f"data.{key} is {tokenizer.name!r}, must be {prepared.tokenizer!r} (of the same content), with which "
            f"{prepared.folder} was prepared; set it, or prepare again"
        )
    rows = data.rows or "sequences"
    if prepared.rows != rows and (prepared.rows, rows) != ("distilled", "sequences"):
        raise ConfigError(
            f"data.paths has rows that are {prepared.rows}, must have {rows} for loss.type; prepare them again"
        )
    _check_bad(prepared, data)
    return prepared


def _is_text_of(prepared: PreparedManifest, processor: str | None) -> bool:
    """True if `prepared` has no images, and its tokenizer is that of `processor`."""
    if processor is None or any(shard.picture_bytes for shard in prepared.shards):
        return False
    return prepared.tokenizer_fingerprint == load_tokenizer(processor).fingerprint


def _of_sources(
    data: DataConfig, prepare_one: Callable[[str, DataConfig], PreparedManifest]
) -> dict[str, PreparedManifest]:
    """The prepared sources of a mixture, by name; errors say of which a key is."""
    parts = {}
    for name, source in sorted(data.sources.items()):
        try:
            parts[name] = prepare_one(name, data.of(source))
        except ConfigError as error:
            keys = "|".join(SourceConfig.model_fields)
            raise ConfigError(re.sub(rf"\bdata\.(?={keys})", f"data.sources.{name}.", str(error))) from error
    return parts


def fingerprint_of(data: DataConfig, *, files: tuple[InputFile, ...]) -> str:
    """16 hex digits over everything that prepared shards depend on: files (names, sizes, times), tokenizer, columns,
    chat template and what of it is trained, rules of reading and of images. Files named by rows are not looked at."""
    parts: list[Any] = [
        [VERSION, READ_RULES, tokenizer_of(data).fingerprint, data.text_column],
        [(file.url, file.format, file.num_bytes, file.stamp) for file in files],
        *([] if data.processor is None else [(data.max_picture_pixels, data.video_fps, data.picture_targets)]),
    ]
    if data.rows not in (None, "sequences"):
        parts.append(data.rows)
    if any(file.format != "text" for file in files):
        parts.append(chat_fingerprint(data))
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def _already_prepared(data: DataConfig) -> PreparedManifest | None:
    """The manifest if `data.paths` is a prepared folder."""
    if data.format not in ("auto", "prepared"):
        return None
    if data.format == "prepared" and len(data.paths) == 1:
        return read_manifest(data.paths[0])
    found = [manifest for path in data.paths if "*" not in path and (manifest := find_manifest(path)) is not None]
    if len(data.paths) == 1 and found:
        return found[0]
    if found or data.format == "prepared":
        raise ConfigError(
            f"data.paths has {len(data.paths)} entries, must be one folder of prepared data; prepare sources together"
        )
    return None


def _prepare(
    data: DataConfig, *, found: Discovery, out_dir: str, on_ray: bool, progress: ProgressCall | None
) -> PreparedManifest:
    fingerprint = fingerprint_of(data, files=found.files)
    folder = name_of(*resolve(out_dir))
    if would_be_read(folder, data):
        raise ConfigError(f"{folder} lies in data.paths, must lie outside: its shards would be read as input next time")
    manifest = find_manifest(folder)
    if manifest is not None and manifest.fingerprint != fingerprint:
        raise ConfigError(
            f"{folder} already holds other prepared data; give another folder, or delete its {MANIFEST_NAME}"
        )
    # What could not be read, and may not be missing now, is tried again: the cause may be gone.
    if manifest is not None and len(manifest.account.unreadable_files) <= data.max_unreadable_files:
        _check_bad(manifest, data)
        return manifest
    work = partial(prepare_split, data=data, out_dir=folder, fingerprint=fingerprint)
    splits = make_splits(found.files, has_images=data.processor is not None)
    results: list[SplitResult] = []
    shown = _Shown(progress, total_bytes=sum(split.num_bytes for split in splits))
    for result in _results_on_ray(splits, work) if on_ray else map(partial(work, count=shown.count), splits):
        results.append(result)
        shown.finish(splits[result.index].num_bytes)
    merged = _merged(results, splits=splits, data=data, folder=folder, fingerprint=fingerprint)
    manifest = dataclasses.replace(
        merged,
        num_files=len(found.files),
        num_ignored_files=len(found.ignored),
        file_lines=found.lines,
    )
    _check_bad(manifest, data)
    write_manifest(manifest)
    logger.info("prepared %s", manifest)
    return manifest


class _Shown:
    """Reports how much of the input is done: finished splits, and bytes of the split that is being read."""

    def __init__(self, progress: ProgressCall | None, *, total_bytes: int) -> None:
        self._progress, self._total_bytes = progress, total_bytes
        self._done_bytes = self._read_bytes = 0
        self._last_s = time.monotonic()

    def count(self, num_bytes: int) -> None:
        """Add bytes that were read of the next split. Parts of a file may be skipped, or read twice."""
        self._read_bytes += num_bytes
        if time.monotonic() >= self._last_s + PROGRESS_S:
            self._show(min(self._done_bytes + self._read_bytes, self._total_bytes))

    def finish(self, num_bytes: int) -> None:
        """Mark a split of `num_bytes` as done."""
        self._done_bytes, self._read_bytes = self._done_bytes + num_bytes, 0
        self._show(self._done_bytes)

    def _show(self, num_bytes: int) -> None:
        self._last_s = time.monotonic()
        if self._progress is not None:
            self._progress(num_bytes, self._total_bytes)


def _results_on_ray(splits: tuple[InputSplit, ...], work: Callable[[InputSplit], SplitResult]) -> Iterator[SplitResult]:
    import ray.data

    def run(item: dict[str, bytes]) -> dict[str, Any]:
        try:
            return {"result": to_json(_RESULT, work(_SPLIT.validate_python(json.loads(item["split"])))), "error": ""}
        except ConfigError as error:  # returned, since Ray wraps what is raised
            return {"result": b"", "error": str(error)}

    # Rows of Ray Data are plain columns, so split and result travel as JSON.
    items = [{"split": to_json(_SPLIT, split)} for split in splits]
    done = ray.data.from_items(items, override_num_blocks=len(items)).map(run)
    done.context.enable_progress_bars = False  # the command line shows its own
    for item in done.iter_rows():
        if item["error"]:
            raise ConfigError(item["error"])
        yield _RESULT.validate_python(json.loads(item["result"]))


def to_json(adapter: TypeAdapter[Any], value: Any) -> bytes:
    """Return the value as JSON, in ASCII: pydantic's own fails for names of files that are not UTF-8."""
    return json.dumps(adapter.dump_python(value, mode="json")).encode()


def prepare_split(
    split: InputSplit, *, data: DataConfig, out_dir: str, fingerprint: str, count: CountCall | None = None
) -> SplitResult:
    """Write the rows of a split to shards of `out_dir` and count the bad ones. `fingerprint` is part of the shards'
    names, so that the shards of different preparations never mix; those of the same one are equal byte for byte,
    whichever task writes them last. Rows before the place at which a file breaks off are kept, if
    `data.max_unreadable_files` allows any. `count` is called with the bytes that are read.

    Raises:
        UnreadableFileError: A file cannot be read.
    """
    bad: Counter[str] = Counter()
    named: list[BadRow] = []
    num_rows, max_token_id = 0, -1
    prefix = f"shard-{fingerprint}-{split.index:05d}"
    account = ReadAccount()
    read = partial(_reader(data, account=account), count=count)
    with ShardWriter(out_dir, prefix=prefix, images=data.processor is not None) as writer:
        for row in (row for file in split.files for row in _readable(file, read, data=data, account=account)):
            num_rows += row.num_rows
            if isinstance(row, TokenRow):
                writer.add(row)
                max_token_id = max(max_token_id, row.max_token_id)
                continue
            bad[row.reason.value] += row.num_rows
            if row.num_images:
                account.count("images_of_bad_rows", row.reason.value, by=row.num_images)
            if len(named) < MAX_NAMED_ROWS:
                named.append(row)
    return SplitResult(
        index=split.index,
        num_rows=num_rows,
        max_token_id=max_token_id,
        shards=writer.shards,
        bad_rows=dict(bad),
        named_bad_rows=tuple(named),
        account=account,
    )


def _readable(
    file: InputFile, read: Callable[[InputFile], Iterator[_Row]], *, data: DataConfig, account: ReadAccount
) -> Iterator[_Row]:
    """Yield the rows of a file, up to where it breaks off if that is allowed."""
    try:
        yield from read(file)
    except UnreadableFileError as error:
        if not data.max_unreadable_files:
            raise
        account.count("unreadable_files", file.url)
        logger.warning("left out: %s", error)


def _reader(data: DataConfig, *, account: ReadAccount) -> Callable[..., Iterator[TokenRow | BadRow]]:
    """Return the function that yields the samples of a file, for this kind of rows."""
    read = partial(read_rows, tokenizer=tokenizer_of(data), text_column=data.text_column, account=account)
    if data.rows == "pairs":
        return partial(read, chat=PairEncoder(data, account=account), whole=PAIR_FORMS)
    if data.rows == "distilled":
        return partial(read, chat=partial(distilled_rows, account=account), whole=DISTILLED_FORMS)
    if data.processor is None:
        return partial(read, chat=ChatEncoder(data, account=account))
    from rayfcp.data.vision.rows import RowEncoder

    return partial(read, media=RowEncoder(data, account=account).encode)


def _merged(
    results: list[SplitResult], *, splits: tuple[InputSplit, ...], data: DataConfig, folder: str, fingerprint: str
) -> PreparedManifest:
    """The manifest of all splits in the order of the files, whichever was done first."""
    ordered = sorted(results, key=lambda result: result.index)
    tokenizer = tokenizer_of(data)
    bad: Counter[str] = Counter()
    named = []
    rows_before, num_rows = 0, 0
    for result in ordered:
        # Pieces number their rows from 0; the numbers of the file continue from the pieces before.
        rows_before = rows_before if splits[result.index].files[0].start else 0
        named += [dataclasses.replace(row, row=row.row + rows_before) for row in result.named_bad_rows]
        rows_before += result.num_rows
        num_rows += result.num_rows
        bad.update(result.bad_rows)
    return PreparedManifest(
        folder=folder,
        fingerprint=fingerprint,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_vocab_size=tokenizer.vocab_size,
        max_token_id=max(result.max_token_id for result in ordered),
        rows=data.rows or "sequences",
        shards=tuple(shard for result in ordered for shard in result.shards),
        bad_rows=dict(bad),
        named_bad_rows=tuple(named[:MAX_NAMED_ROWS]),
        account=ReadAccount.total(result.account for result in ordered),
        num_read_rows=num_rows,
    )


def _check_bad(manifest: PreparedManifest, data: DataConfig) -> None:
    check_unreadable(manifest.account.unreadable_files, max_unreadable_files=data.max_unreadable_files)
    balances = read_balances(manifest, max_seqlen=data.max_seqlen, long_sequences=data.long_sequences)
    Balance.total(balances).check_bad_rows(named=manifest.named_bad_rows, max_bad_fraction=data.max_bad_fraction)
    if not manifest.num_rows:
        bad = f": {by_reason(manifest.bad_rows)}, first: {manifest.named_bad_rows[0]}" if manifest.bad_rows else ""
        raise ConfigError(f"data.paths {', '.join(map(repr, data.paths))} hold no usable row{bad}; give files that do")
