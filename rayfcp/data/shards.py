"""Shards: Arrow IPC files of rows, uncompressed so that they can be memory-mapped, in small record batches."""

import hashlib
from contextlib import ExitStack
from dataclasses import replace
from typing import IO, Self

import fsspec
import numpy as np
import pyarrow as pa

from rayfcp.data.manifest import ShardInfo, picture_file
from rayfcp.data.rows import Row
from rayfcp.data.storage import join, resolve, whole_file
from rayfcp.data.vision.files import PictureFile

BATCH_TOKENS, BATCH_ROWS = 1 << 17, 1024
SHARD_TOKENS = 16 << 20
SMALL_COLUMNS = ("length", "num_targets", "max_token_id")
PICTURE_COLUMNS = ("items", "runs", "parts")


def shard_schema(*, has_labels: bool, has_pictures: bool = False) -> pa.Schema:
    """The columns of a shard, in order. Of pictures, numbers end to end: `items` and `runs` as in
    `rayfcp.data.vision.layout`, and `parts`, the first byte and the number of bytes of each in the file beside."""
    tokens = pa.list_(pa.int32())
    columns = [("input_ids", tokens), *((name, pa.int32()) for name in SMALL_COLUMNS)]
    columns += [("labels", tokens)] if has_labels else []
    return pa.schema(columns + [(name, pa.list_(pa.int64())) for name in PICTURE_COLUMNS if has_pictures])


class ShardWriter:
    """Writes rows in order to shards `PREFIX-000.arrow`, `PREFIX-001.arrow`, ... of a folder or URL.

    A shard ends at SHARD_TOKENS (64 MiB of tokens), or before the first labelled row of a chunk that began without
    labels; from there on a row without labels has its own tokens as labels, which means the same. With `pictures` the
    bytes of these lie in `PREFIX-000.pictures` and so on, row by row.
    """

    def __init__(self, folder: str, *, prefix: str, pictures: bool = False) -> None:
        self._folder, self._prefix, self._pictures = folder, prefix, pictures
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
        """The shards that are closed: all of them after the `with` block."""
        return tuple(self._done)

    def add(self, row: Row) -> None:
        """Append one row."""
        new_labels = row.labels is not None and not self._has_labels
        self._has_labels |= new_labels
        if self._shard is not None and (new_labels or self._shard.num_tokens >= SHARD_TOKENS):
            self._done.append(self._shard.close())
            self._shard = None
        if self._shard is None:
            fs, folder = resolve(self._folder)
            name = f"{self._prefix}-{len(self._done):03d}.arrow"
            pictures = self._pictures
            self._shard = _OpenShard(fs, folder=folder, name=name, has_labels=self._has_labels, has_pictures=pictures)
        self._shard.add(row)


class _OpenShard:
    """One shard as it is written."""

    def __init__(
        self, fs: fsspec.AbstractFileSystem, *, folder: str, name: str, has_labels: bool, has_pictures: bool
    ) -> None:
        self._name, self._has_labels = name, has_labels
        self.num_tokens = 0
        self._rows: list[Row] = []
        self._buffered_tokens = 0
        self._batch_rows: list[int] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._stack = ExitStack()
        self._file: IO[bytes] = self._stack.enter_context(whole_file(fs, join(folder, name)))
        self._pictures = PictureFile(self._stack, fs, path=join(folder, picture_file(name))) if has_pictures else None
        self._schema = shard_schema(has_labels=has_labels, has_pictures=has_pictures)
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def add(self, row: Row) -> None:
        if self._pictures is not None:
            self._pictures.add(row.pictures)
            row = replace(row, pictures=None)
        self._rows.append(row)
        self.num_tokens += row.tokens.size
        self._buffered_tokens += row.tokens.size
        if self._buffered_tokens >= BATCH_TOKENS or len(self._rows) >= BATCH_ROWS:
            self._flush()

    def close(self) -> ShardInfo:
        if self._rows:
            self._flush()
        self._writer.close()
        num_bytes = self._file.tell()
        if self._pictures is not None:
            self._hash.update(self._pictures.digest)
        self._stack.close()
        return ShardInfo(
            name=self._name,
            num_bytes=num_bytes,
            num_tokens=self.num_tokens,
            batch_rows=tuple(self._batch_rows),
            has_labels=self._has_labels,
            content=self._hash.hexdigest(),
            picture_bytes=self._pictures.num_bytes if self._pictures is not None else None,
        )

    def abandon(self, error: BaseException) -> None:
        """Leave no shard behind where files can be whole or not at all."""
        self._stack.__exit__(type(error), error, None)

    def _flush(self) -> None:
        rows, self._rows, self._buffered_tokens = self._rows, [], 0
        lengths = np.array([row.tokens.size for row in rows], dtype=np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        columns = {
            "input_ids": np.concatenate([row.tokens for row in rows]),
            "length": lengths,
            "num_targets": np.array([row.num_targets for row in rows], dtype=np.int32),
            "max_token_id": np.array([row.max_token_id for row in rows], dtype=np.int32),
        }
        if self._has_labels:
            columns["labels"] = np.concatenate([row.tokens if row.labels is None else row.labels for row in rows])
        for name in ("length", "input_ids", *(["labels"] if self._has_labels else [])):
            self._hash.update(columns[name].astype("<i4", copy=False).data)
        lists = {} if self._pictures is None else self._pictures.take()
        for name in ("input_ids", *(["labels"] if self._has_labels else [])):
            lists[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(columns[name]))
        arrays = [lists[name] if name in lists else pa.array(columns[name]) for name in self._schema.names]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._batch_rows.append(len(rows))
