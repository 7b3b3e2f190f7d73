"""Random access to the rows of one shard."""

import threading
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayfcp.data.manifest import PreparedManifest, picture_file, shard_path
from rayfcp.data.shards import PICTURE_COLUMNS, SMALL_COLUMNS, shard_schema
from rayfcp.data.storage import is_local
from rayfcp.data.vision.layout import Item, Ragged, items_of

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
