"""Shards: Arrow IPC files of rows, uncompressed so that they can be memory-mapped, in small record batches.

Writing them row by row, and random access to the tokens of their rows.
"""

import hashlib
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayfcp.data.manifest import (
    PreparedManifest,
    ShardInfo,
    find_manifest,
    image_file,
    is_local,
    join,
    read_manifest,
    resolve,
    whole_file,
)
from rayfcp.data.rows import IGNORED, TEACHER_COLUMNS, TeacherRows, TokenRow
from rayfcp.data.storage import read_prepared
from rayfcp.values import Sample

if TYPE_CHECKING:
    from rayfcp.data.stream import Stream

BATCH_TOKENS, BATCH_ROWS = 1 << 17, 1024
"""Limits of a record batch: what one random read fetches from object storage, 512 KiB of tokens, or of what a teacher
said of them."""
SHARD_TOKENS = 16 << 20
"""Tokens of a shard, 64 MiB: few files for large data, parallel writers for small."""
SMALL_COLUMNS = ("length", "num_targets", "max_token_id")
IMAGE_COLUMNS = ("items", "runs", "parts")
_KEPT_BATCHES = 8
_OPEN_SHARDS = 64


def shard_schema(*, has_labels: bool, has_images: bool = False, has_teacher: bool = False) -> pa.Schema:
    """Columns of a shard, in order. Those of a teacher hold the rows of `TeacherRows` end to end. Those of images hold
    integers end to end: `items` and `runs` as in `rayfcp.data.vision.layout`, and `parts`, first byte and size of each
    part in the image file beside the shard."""
    tokens = pa.list_(pa.int32())
    columns = [("input_ids", tokens), *((name, pa.int32()) for name in SMALL_COLUMNS)]
    columns += [("labels", tokens)] * has_labels
    columns += [*zip(TEACHER_COLUMNS, (tokens, pa.list_(pa.float32())), strict=True)] * has_teacher
    return pa.schema(columns + [(name, pa.list_(pa.int64())) for name in IMAGE_COLUMNS if has_images])


class ShardWriter:
    """Writes rows in order to shards `PREFIX-000.arrow`, `PREFIX-001.arrow`, ... of a folder or URL.

    A shard ends at SHARD_TOKENS, a teacher's words and logits counted too, or before the first labelled row after rows
    without labels; from there on a row without labels has its own tokens as labels, which means the same. Samples of
    one row lie in one shard. With `images` their bytes lie in `PREFIX-000.pictures` and so on, row by row.
    """

    def __init__(self, folder: str, *, prefix: str, images: bool = False) -> None:
        self._folder, self._prefix, self._images = folder, prefix, images
        self._has_labels = False
        self._shard: _OpenShard | None = None
        self._done: list[ShardInfo] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._shard is not None and error is not None:
            self._shard.abandon(error)
        elif self._shard is not None:
            self._done.append(self._shard.close())

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """The closed shards: all of them after the `with` block."""
        return tuple(self._done)

    def add(self, row: TokenRow) -> None:
        """Append one row."""
        new_labels = row.labels is not None and not self._has_labels
        self._has_labels |= new_labels
        is_full = self._shard is not None and self._shard.num_values >= SHARD_TOKENS
        if self._shard is not None and (new_labels or (is_full and row.num_rows)):
            self._done.append(self._shard.close())
            self._shard = None
        if self._shard is None:
            name = f"{self._prefix}-{len(self._done):03d}.arrow"
            columns = {"has_labels": self._has_labels, "has_teacher": row.teacher is not None}
            self._shard = _OpenShard(self._folder, name, has_images=self._images, **columns)
        self._shard.add(row)


class _OpenShard:
    """A shard that is being written."""

    def __init__(self, folder: str, name: str, *, has_labels: bool, has_images: bool, has_teacher: bool) -> None:
        fs, path = resolve(folder)
        self._name, self._has_labels, self._has_teacher = name, has_labels, has_teacher
        self.num_values = self._num_tokens = self._buffered = 0
        self._rows: list[TokenRow] = []
        self._batch_rows: list[int] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._stack = ExitStack()
        self._file: IO[bytes] = self._stack.enter_context(whole_file(fs, join(path, name)))
        self._images: Any = None
        if has_images:
            from rayfcp.data.vision.images import ImageFile

            self._images = ImageFile(self._stack, fs, path=join(path, image_file(name)))
        self._schema = shard_schema(has_labels=has_labels, has_images=has_images, has_teacher=has_teacher)
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def add(self, row: TokenRow) -> None:
        if self._images is not None:
            self._images.add(row.images)
            row = replace(row, images=None)
        self._rows.append(row)
        size = row.tokens.size + (0 if row.teacher is None else sum(each.size for each in row.teacher))
        self._num_tokens += row.tokens.size
        self.num_values += size
        self._buffered += size
        if self._buffered >= BATCH_TOKENS or len(self._rows) >= BATCH_ROWS:
            self._flush()

    def close(self) -> ShardInfo:
        if self._rows:
            self._flush()
        self._writer.close()
        num_bytes = self._file.tell()
        if self._images is not None:
            self._hash.update(self._images.digest)
        self._stack.close()
        return ShardInfo(
            name=self._name,
            num_bytes=num_bytes,
            num_tokens=self._num_tokens,
            batch_rows=tuple(self._batch_rows),
            has_labels=self._has_labels,
            content=self._hash.hexdigest(),
            picture_bytes=None if self._images is None else self._images.num_bytes,
            has_teacher=self._has_teacher,
        )

    def abandon(self, error: BaseException) -> None:
        """Close without leaving a file, where the file system allows it."""
        self._stack.__exit__(type(error), error, None)

    def _flush(self) -> None:
        rows, self._rows, self._buffered = self._rows, [], 0
        lengths = np.array([row.tokens.size for row in rows], dtype=np.int32)
        arrays = {"length": pa.array(lengths)}
        for name in SMALL_COLUMNS[1:]:
            arrays[name] = pa.array([getattr(row, name) for row in rows], pa.int32())
        self._hash.update(lengths.astype("<i4", copy=False).data)
        arrays["input_ids"] = self._listed([row.tokens for row in rows])
        if self._has_labels:
            arrays["labels"] = self._listed([row.tokens if row.labels is None else row.labels for row in rows])
        if self._has_teacher:
            teachers = [row.teacher for row in rows if row.teacher is not None]
            widths = np.array([words.shape[1] for words, _ in teachers], dtype="<i4")
            self._hash.update(widths.data)
            for name, values in zip(TEACHER_COLUMNS, zip(*teachers, strict=True), strict=True):
                arrays[name] = self._listed([each.ravel() for each in values])
        arrays |= {} if self._images is None else self._images.take()
        columns = [arrays[name] for name in self._schema.names]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._batch_rows.append(len(rows))

    def _listed(self, rows: Sequence[npt.NDArray[Any]]) -> pa.Array:
        """Values of the rows as a column of lists, which enter the hash."""
        values = np.concatenate(rows)
        self._hash.update(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
        offsets = np.cumsum([0, *(row.size for row in rows)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


class ShardReader:
    """Random access to one shard, opened at the first read. Thread-safe.

    Local files are memory-mapped: nothing is copied, and only what is touched is read. Of others the record batches
    that are needed are fetched by range; the last few are kept.
    """

    def __init__(self, manifest: PreparedManifest, shard: int) -> None:
        self.info = manifest.shards[shard]
        name = self.info.name
        self.fs, self.path = resolve(name if manifest.parts else join(manifest.folder, name))
        self._first_rows = np.concatenate([[0], np.cumsum(self.info.batch_rows)])
        self._batch = lru_cache(_KEPT_BATCHES)(self._read_batch)
        self._lock = threading.Lock()

    def small_columns(self) -> dict[str, npt.NDArray[np.int32]]:
        """`length`, `num_targets` and `max_token_id`, `[rows]` each, without reading tokens."""
        batches = self.record_batches(SMALL_COLUMNS)
        return {name: np.concatenate([batch.column(name).to_numpy() for batch in batches]) for name in SMALL_COLUMNS}

    def record_batches(self, columns: tuple[str, ...]) -> list[pa.RecordBatch]:
        """All record batches with these columns alone."""
        reader = self._open(columns)
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]

    def tokens(self, row: int) -> npt.NDArray[np.int32]:
        """Token ids of the row, `[tokens]`, a view."""
        return self.values(row, "input_ids")

    def labels(self, row: int) -> npt.NDArray[np.int32]:
        """Labels of the row, `[tokens]`, a view: the token id that a position is as a target, -100 if it is none."""
        return self.values(row, "labels" if self.info.has_labels else "input_ids")

    def values(self, row: int, name: str) -> npt.NDArray[Any]:
        """Values of a list column in one row, a view."""
        index = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        found = self._batch(index).column(name)[row - int(self._first_rows[index])]
        values: npt.NDArray[Any] = found.values.to_numpy()
        return values

    def _read_batch(self, index: int) -> pa.RecordBatch:
        with self._lock:  # files of object stores have one position
            return read_prepared(lambda: self._opened_batch(index), fs=self.fs, path=self.path)

    def _opened_batch(self, index: int) -> pa.RecordBatch:
        try:
            return self._reader.get_batch(index)
        except Exception:
            self.__dict__.pop("_reader", None)  # the next try opens the file again
            raise

    @cached_property
    def _reader(self) -> Any:
        if is_local(self.fs):
            return pa.ipc.open_file(pa.memory_map(self.path))
        return self._open(tuple(name for name in self._schema.names if name not in SMALL_COLUMNS))

    @property
    def _schema(self) -> pa.Schema:
        info = self.info
        return shard_schema(has_labels=info.has_labels, has_images=info.has_images, has_teacher=info.has_teacher)

    def _open(self, columns: tuple[str, ...]) -> Any:
        """An IPC reader that fetches the bytes of these columns alone. (With a memory map the same option makes Arrow
        ask the system to load the rest too, hence OSFile.)"""
        # No cache: readahead would fetch the tokens between the small columns.
        source = pa.OSFile(self.path) if is_local(self.fs) else self.fs.open(self.path, "rb", cache_type="none")
        places = sorted(self._schema.get_field_index(name) for name in columns)
        return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=places))


class TokenReader:
    """Tokens and targets of samples, from the shards of a prepared folder. Thread-safe."""

    def __init__(self, source: "PreparedManifest | Stream") -> None:
        self._opened = lru_cache(_OPEN_SHARDS)(lambda shard: ShardReader(*source.shard(shard)))
        self.has_images = any(shard.picture_bytes for shard in getattr(source, "shards", ()))  # a stream has none

    @classmethod
    def open(cls, folder: str) -> Self:
        """A reader of a prepared folder or URL, or of that of a stream.

        Raises:
            ConfigError: Not a complete prepared folder.
        """
        if find_manifest(folder) is None:
            from rayfcp.data.stream import find_stream

            if (stream := find_stream(folder)) is not None:
                return cls(stream)
        return cls(read_manifest(folder))

    def read(self, sample: Sample, *, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and targets `[stop - start]` of positions `[start, stop)`, counted from the sample's first token.

        The target of a position is the label of the next one (its token where the data has no labels); the last
        position of a sample has none (-100). So any cut of a sample gives the targets of the whole.

        Raises:
            ValueError: Positions outside of the sample.
        """
        if not 0 <= start <= stop <= sample.num_tokens:
            raise ValueError(
                f"positions are [{start}, {stop}), must lie in [0, {sample.num_tokens}) of sample {sample.id}"
            )
        shard = self.shard(sample)
        tokens = shard.tokens(sample.row)[sample.start + start : sample.start + stop].astype(np.int64)
        targets = np.full(stop - start, IGNORED, dtype=np.int64)
        following = shard.labels(sample.row)[sample.start + start + 1 : min(sample.start + stop + 1, sample.stop)]
        targets[: following.size] = following
        return tokens, targets

    def teacher(self, sample: Sample, *, start: int, stop: int) -> TeacherRows:
        """Words that a teacher found likeliest at positions `[start, stop)`, and their logits, `[tokens, words]`."""
        shard = self.shard(sample)
        width = shard.values(sample.row, "teacher_words").size // shard.tokens(sample.row).size
        rows = slice((sample.start + start) * width, (sample.start + stop) * width)
        words, logits = (shard.values(sample.row, name)[rows].reshape(-1, width) for name in TEACHER_COLUMNS)
        return words, logits

    def shard(self, sample: Sample) -> ShardReader:
        """The shard that holds the sample; the most recently used ones stay open."""
        return self._opened(sample.shard)
