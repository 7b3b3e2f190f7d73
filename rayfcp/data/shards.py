"""Shards: Arrow IPC files of rows, uncompressed so that they can be memory-mapped, in small record batches.

Random access to the rows of one shard.

From the place of a token to the token: what a rank reads of the shards.
"""

import hashlib
import threading
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import IO, Any, Self

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayfcp.data.manifest import (
    PreparedManifest,
    ShardInfo,
    is_local,
    join,
    picture_file,
    read_manifest,
    resolve,
    shard_path,
    whole_file,
)
from rayfcp.data.rows import IGNORED, Row
from rayfcp.data.vision.images import PictureFile
from rayfcp.data.vision.layout import Item, Ragged, items_of
from rayfcp.values import Sample

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


_KEPT_BATCHES = 8

Lists = dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[Any]]]


class ShardReader:
    """One shard, opened at the first read. Local files are memory-mapped: nothing is copied, and only what is
    touched is read. Of others the record batches that are asked for are fetched, by range. Thread-safe."""

    def __init__(self, manifest: PreparedManifest, shard: int) -> None:
        self._info = manifest.shards[shard]
        self._fs, self._path = shard_path(manifest, shard)
        self._first_rows = np.concatenate([[0], np.cumsum(self._info.batch_rows)])
        self._batches: OrderedDict[int, Lists] = OrderedDict()
        self._lock = threading.Lock()

    def small_columns(self) -> dict[str, npt.NDArray[np.int32]]:
        """`length`, `num_targets` and `max_token_id`, `[rows]` each, without reading tokens."""
        batches = self._batches_of(SMALL_COLUMNS)
        return {name: np.concatenate([batch.column(name).to_numpy() for batch in batches]) for name in SMALL_COLUMNS}

    def picture_columns(self) -> tuple[Ragged, Ragged] | None:
        """Items and runs of all rows, without reading tokens; None where the shard has no pictures."""
        if not self._info.has_pictures:
            return None
        batches = self._batches_of(("items", "runs"))
        return Ragged.of([batch.column("items") for batch in batches]), Ragged.of(
            [batch.column("runs") for batch in batches]
        )

    def items(self, row: int) -> list[Item]:
        """The images and videos of the row, in order."""
        return items_of(self._values(row, "items")) if self._info.has_pictures else []

    def parts(self, row: int) -> npt.NDArray[np.int64]:
        """First byte and number of bytes of each part of the row's items, `[parts, 2]`."""
        return self._values(row, "parts").reshape(-1, 2)

    def part(self, first: int, num_bytes: int) -> bytes:
        """These bytes of the file of pictures: one read."""
        return bytes(self._fs.cat_file(picture_file(self._path), start=first, end=first + num_bytes))

    def _batches_of(self, columns: tuple[str, ...]) -> list[pa.RecordBatch]:
        reader = self._open(columns)
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]

    def tokens(self, row: int) -> npt.NDArray[np.int32]:
        """Token ids of the row, `[tokens]`, a view."""
        return self._values(row, "input_ids")

    def labels(self, row: int) -> npt.NDArray[np.int32]:
        """The token id that each position holds as a target of the one before (-100: none), `[tokens]`, a view."""
        return self._values(row, "labels" if self._info.has_labels else "input_ids")

    def _values(self, row: int, name: str) -> npt.NDArray[Any]:
        index = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        offsets, values = self._batch(index)[name]
        place = row - int(self._first_rows[index])
        return values[offsets[place] : offsets[place + 1]]

    def _batch(self, index: int) -> Lists:
        """Offsets and values of the list columns of a record batch."""
        with self._lock:
            if index not in self._batches:
                batch = self._reader.get_batch(index)
                lists = {name: batch.column(name) for name in batch.schema.names if name not in SMALL_COLUMNS}
                self._batches[index] = {
                    name: (column.offsets.to_numpy(), column.values.to_numpy()) for name, column in lists.items()
                }
                if len(self._batches) > _KEPT_BATCHES:
                    self._batches.popitem(last=False)
            self._batches.move_to_end(index)
            return self._batches[index]

    @cached_property
    def _reader(self) -> Any:
        if is_local(self._fs):
            return pa.ipc.open_file(pa.memory_map(self._path))
        labels = ("labels",) if self._info.has_labels else ()
        return self._open(("input_ids", *labels, *(PICTURE_COLUMNS if self._info.has_pictures else ())))

    def _open(self, columns: tuple[str, ...]) -> Any:
        """An IPC reader that fetches the bytes of these columns alone. (With a memory map the same option would have
        Arrow ask the system to load the rest too.)"""
        # Readahead would fetch the tokens between the small columns.
        source = pa.OSFile(self._path) if is_local(self._fs) else self._fs.open(self._path, "rb", cache_type="none")
        schema = shard_schema(has_labels=self._info.has_labels, has_pictures=self._info.has_pictures)
        places = sorted(schema.get_field_index(name) for name in columns)
        return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=places))


_OPEN_SHARDS = 64


class TokenReader:
    """Tokens and targets of samples, from the shards of a prepared folder. Thread-safe."""

    def __init__(self, manifest: PreparedManifest) -> None:
        self._manifest = manifest
        self._shards: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: str) -> Self:
        """The reader of a prepared folder or URL.

        Raises:
            ConfigError: Not a whole prepared folder.
        """
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
        shard = self._shard(sample.shard)
        tokens = shard.tokens(sample.row)[sample.start + start : sample.start + stop].astype(np.int64)
        targets = np.full(stop - start, IGNORED, dtype=np.int64)
        following = shard.labels(sample.row)[sample.start + start + 1 : min(sample.start + stop + 1, sample.stop)]
        targets[: following.size] = following
        return tokens, targets

    def items(self, sample: Sample) -> list[tuple[Item, npt.NDArray[np.int64]]]:
        """The images and videos of a sample, their tokens counted from its first one, each with the places `[parts, 2]`
        of its files; see `ShardReader.part`."""
        shard = self._shard(sample.shard)
        found, taken = [], 0
        for item in shard.items(sample.row):
            if sample.start <= item.start < sample.stop:
                own = item._replace(start=item.start - sample.start, stop=item.stop - sample.start)
                found.append((own, shard.parts(sample.row)[taken : taken + item.parts]))
            taken += item.parts
        return found

    def part(self, sample: Sample, *, first: int, num_bytes: int) -> bytes:
        """Bytes of a picture of the sample."""
        return self._shard(sample.shard).part(first, num_bytes)

    def name_of(self, sample: Sample) -> str:
        """Where its row is, for people."""
        return f"{self._manifest.shards[sample.shard].name} row {sample.row}"

    def _shard(self, shard: int) -> ShardReader:
        with self._lock:
            if shard not in self._shards:
                self._shards[shard] = ShardReader(self._manifest, shard)
                if len(self._shards) > _OPEN_SHARDS:
                    self._shards.popitem(last=False)
            self._shards.move_to_end(shard)
            return self._shards[shard]
