"""What one task of a preparation does: read, tokenise and write one chunk. The same in a Ray task and in-process.

From the files that a configuration names to a prepared folder, in-process or as tasks of Ray Data.
"""

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from pydantic import TypeAdapter

from rayfcp.config import ConfigError
from rayfcp.config.models import DataConfig
from rayfcp.data.manifest import (
    MANIFEST_NAME,
    MAX_NAMED_ROWS,
    VERSION,
    PreparedManifest,
    ShardInfo,
    check_bad_fraction,
    find_manifest,
    join,
    lives_in_one_process,
    name_of,
    read_manifest,
    resolve,
    write_manifest,
)
from rayfcp.data.readers import read_rows
from rayfcp.data.rows import BadRow, Row
from rayfcp.data.shards import ShardWriter
from rayfcp.data.sources import Chunk, InputFile, discover, make_chunks, work_bytes, would_be_read
from rayfcp.data.vision.processors import tokenizer_named, tokenizer_of
from rayfcp.data.vision.rows import PictureRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is the same for all chunks. With `pictures` the tokenizer is a processor's. `fingerprint` is part of the
    shards' names, so that the shards of different preparations never meet; those of the same one are equal byte for
    byte, whoever writes them last."""

    tokenizer: str
    text_column: str
    pictures: PictureRules | None
    vocab_size: int | None
    out_dir: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """What a chunk gave. Rows of `named_bad_rows` count from the start of their piece; `num_rows` has bad ones too."""

    index: int
    num_rows: int
    max_token_id: int
    shards: tuple[ShardInfo, ...]
    bad_rows: dict[str, int]
    named_bad_rows: tuple[BadRow, ...]


def prepare_chunk(chunk: Chunk, job: Job) -> ChunkResult:
    """Write the chunk's rows to shards of `job.out_dir` and count what was left out."""
    bad: Counter[str] = Counter()
    named: list[BadRow] = []
    num_rows, max_token_id = 0, -1
    prefix = f"shard-{job.fingerprint}-{chunk.index:05d}"
    with ShardWriter(job.out_dir, prefix=prefix, pictures=job.pictures is not None) as writer:
        for row in _rows(chunk, job):
            if isinstance(row, Row):
                writer.add(row)
                num_rows += 1
                max_token_id = max(max_token_id, row.max_token_id)
                continue
            bad[row.reason.value] += row.num_rows
            num_rows += row.num_rows
            if len(named) < MAX_NAMED_ROWS:
                named.append(row)
    return ChunkResult(
        index=chunk.index,
        num_rows=num_rows,
        max_token_id=max_token_id,
        shards=writer.shards,
        bad_rows=dict(bad),
        named_bad_rows=tuple(named),
    )


def _rows(chunk: Chunk, job: Job) -> Iterator[Row | BadRow]:
    tokenizer = tokenizer_named(job.tokenizer, sees=job.pictures is not None)
    for file in chunk.files:
        yield from read_rows(
            file,
            tokenizer=tokenizer,
            text_column=job.text_column,
            vocab_size=job.vocab_size,
            pictures=job.pictures,
        )


logger = logging.getLogger(__name__)

# Below this, starting the workers' processes (5 s on two cores) takes longer than the work.
SMALL_BYTES = 64 << 20

# Called with (bytes of input done, bytes of input in all) after each chunk.
ProgressCall = Callable[[int, int], None]
_Run = Callable[[tuple[Chunk, ...], Job], Iterator[ChunkResult]]

_CHUNK, _RESULT = TypeAdapter(Chunk), TypeAdapter(ChunkResult)


def prepare(
    data: DataConfig,
    *,
    out_dir: str,
    vocab_size: int | None = None,
    parallelism: int | None = None,
    progress: ProgressCall | None = None,
) -> PreparedManifest:
    """Tokenise `data` into shards and a manifest in `out_dir`, a folder or fsspec URL.

    Inputs over 64 MiB run as Ray Data tasks, at most `parallelism` at a time, on the Ray that the caller has started;
    smaller ones in this process. Both write the same bytes. A complete `out_dir` of the same inputs is kept as it is.

    Raises:
        ConfigError: Nothing to read, too many bad rows, no usable row, or other prepared data in `out_dir`.
    """
    files = discover(data)
    has_pictures = data.processor is not None
    is_small = sum(work_bytes(file, has_pictures=has_pictures) for file in files) <= SMALL_BYTES
    is_private = any(map(lives_in_one_process, [out_dir, *(file.url for file in files)]))
    run = _run_here if is_small or is_private else _ray_runner(parallelism)
    return _prepare(data, files=files, out_dir=out_dir, vocab_size=vocab_size, run=run, progress=progress)


def prepare_local(
    data: DataConfig, *, out_dir: str, vocab_size: int | None = None, progress: ProgressCall | None = None
) -> PreparedManifest:
    """`prepare` in this process, without Ray, whatever the size."""
    files = discover(data)
    return _prepare(data, files=files, out_dir=out_dir, vocab_size=vocab_size, run=_run_here, progress=progress)


def cached_prepare(
    data: DataConfig,
    *,
    cache_dir: str,
    vocab_size: int | None = None,
    parallelism: int | None = None,
    progress: ProgressCall | None = None,
) -> PreparedManifest:
    """The prepared folder of `data`: `data.paths` itself if it is one, else a folder of `cache_dir` named by
    fingerprint, which is made unless it is there and complete.

    Raises:
        ConfigError: As `prepare`; or prepared data whose tokenizer is not `data.tokenizer`.
    """
    prepared = _already_prepared(data)
    if prepared is None:
        files = discover(data)
        out_dir = join(cache_dir, f"prepared-{fingerprint_of(data, files=files, vocab_size=vocab_size)}")
        return prepare(data, out_dir=out_dir, vocab_size=vocab_size, parallelism=parallelism, progress=progress)
    if prepared.tokenizer_fingerprint != tokenizer_of(data).fingerprint:
        key, name = ("processor", data.processor) if data.processor else ("tokenizer", data.tokenizer)
        raise ConfigError(
            f"data.{key} is {name!r}, must be {prepared.tokenizer!r} (of the same content), with which "
            f"{prepared.folder} was prepared; set it, or prepare again"
        )
    _check_bad(prepared, data)
    return prepared


def fingerprint_of(data: DataConfig, *, files: tuple[InputFile, ...], vocab_size: int | None) -> str:
    """16 hex digits over all that prepared shards depend on: files (names, sizes, times), tokenizer, columns, rules for
    pictures. Files that rows name are not looked at."""
    rules = _rules(data)
    parts = [
        [VERSION, tokenizer_of(data).fingerprint, data.text_column, vocab_size],
        [(file.url, file.format, file.num_bytes, file.stamp) for file in files],
        *([] if rules is None else [dataclasses.astuple(rules)]),
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def _rules(data: DataConfig) -> PictureRules | None:
    if data.processor is None:
        return None
    return PictureRules(max_pixels=data.max_picture_pixels, fps=data.video_fps, are_targets=data.picture_targets)


def _already_prepared(data: DataConfig) -> PreparedManifest | None:
    """The manifest where `data.paths` is a prepared folder."""
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
    data: DataConfig,
    *,
    files: tuple[InputFile, ...],
    out_dir: str,
    vocab_size: int | None,
    run: _Run,
    progress: ProgressCall | None,
) -> PreparedManifest:
    if data.format == "prepared":
        raise ConfigError("data.format is 'prepared', must be a format of source files to prepare; nothing to do")
    fingerprint = fingerprint_of(data, files=files, vocab_size=vocab_size)
    fs, path = resolve(out_dir)
    folder = name_of(fs, path)
    if would_be_read(folder, data):
        raise ConfigError(f"{folder} lies in data.paths, must lie outside: its shards would be read as input next time")
    manifest = find_manifest(folder)
    if manifest is not None and manifest.fingerprint != fingerprint:
        raise ConfigError(
            f"{folder} already holds other prepared data; give another folder, or delete its {MANIFEST_NAME}"
        )
    if manifest is None:
        job = Job(
            tokenizer=data.processor or data.tokenizer,
            text_column=data.text_column,
            pictures=_rules(data),
            vocab_size=vocab_size,
            out_dir=folder,
            fingerprint=fingerprint,
        )
        chunks = make_chunks(files, has_pictures=job.pictures is not None)
        results = _with_progress(run(chunks, job), chunks=chunks, progress=progress)
        manifest = _merge(results, chunks=chunks, job=job)
        _check_bad(manifest, data)
        write_manifest(manifest)
        logger.info("prepared %s", manifest)
    else:
        _check_bad(manifest, data)
    return manifest


def _run_here(chunks: tuple[Chunk, ...], job: Job) -> Iterator[ChunkResult]:
    return (prepare_chunk(chunk, job) for chunk in chunks)


def _ray_runner(parallelism: int | None) -> _Run:
    def run(chunks: tuple[Chunk, ...], job: Job) -> Iterator[ChunkResult]:
        import ray.data

        items = [{"chunk": _CHUNK.dump_json(chunk)} for chunk in chunks]
        work = ray.data.from_items(items, override_num_blocks=len(items))
        done = work.map(partial(_run_item, job=job), compute=ray.data.TaskPoolStrategy(size=parallelism))
        # The command line shows its own progress.
        done.context.enable_progress_bars = False
        return (_RESULT.validate_json(item["result"]) for item in done.iter_rows())

    return run


def _run_item(item: dict[str, bytes], *, job: Job) -> dict[str, bytes]:
    """The task: rows of Ray Data are plain columns, so chunk and result travel as JSON."""
    return {"result": _RESULT.dump_json(prepare_chunk(_CHUNK.validate_json(item["chunk"]), job))}


def _with_progress(
    results: Iterable[ChunkResult], *, chunks: tuple[Chunk, ...], progress: ProgressCall | None
) -> Iterator[ChunkResult]:
    total_bytes = sum(chunk.num_bytes for chunk in chunks)
    done_bytes = 0
    for result in results:
        done_bytes += chunks[result.index].num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)
        yield result


def _merge(results: Iterable[ChunkResult], *, chunks: tuple[Chunk, ...], job: Job) -> PreparedManifest:
    """The manifest of all chunks, in the order of the files, whichever was done first."""
    ordered = sorted(results, key=lambda result: result.index)
    tokenizer = tokenizer_named(job.tokenizer, sees=job.pictures is not None)
    bad: Counter[str] = Counter()
    named = []
    rows_before = 0
    for result in ordered:
        # Pieces number their rows from 0; the file's own numbers go on from the pieces before.
        rows_before = rows_before if chunks[result.index].files[0].start else 0
        named += [dataclasses.replace(row, row=row.row + rows_before) for row in result.named_bad_rows]
        rows_before += result.num_rows
        bad.update(result.bad_rows)
    return PreparedManifest(
        folder=job.out_dir,
        fingerprint=job.fingerprint,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_vocab_size=tokenizer.vocab_size,
        vocab_size=job.vocab_size,
        max_token_id=max(result.max_token_id for result in ordered),
        shards=tuple(shard for result in ordered for shard in result.shards),
        bad_rows=dict(bad),
        named_bad_rows=tuple(named[:MAX_NAMED_ROWS]),
    )


def _check_bad(manifest: PreparedManifest, data: DataConfig) -> None:
    check_bad_fraction(
        manifest.bad_rows,
        num_good_rows=manifest.num_rows,
        named=manifest.named_bad_rows,
        max_bad_fraction=data.max_bad_fraction,
    )
    if not manifest.num_rows:
        raise ConfigError(f"data.paths {', '.join(map(repr, data.paths))} hold no usable row; give files that do")
