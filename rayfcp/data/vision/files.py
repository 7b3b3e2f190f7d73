"""The file of pictures beside a shard: their bytes end to end, so that any of them is one read of a range."""

import hashlib
from contextlib import ExitStack
from typing import IO

import fsspec
import numpy as np
import pyarrow as pa

from rayfcp.data.rows import RowPictures
from rayfcp.data.storage import whole_file


class PictureFile:
    """Written row by row, beside its shard and with the same life, that of `stack`."""

    def __init__(self, stack: ExitStack, fs: fsspec.AbstractFileSystem, *, path: str) -> None:
        self._file: IO[bytes] = stack.enter_context(whole_file(fs, path))
        self._hash = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[list[int], list[int], list[int]]] = []
        self.num_bytes = 0

    @property
    def digest(self) -> bytes:
        """Of all rows so far and their bytes."""
        return self._hash.digest()

    def add(self, pictures: RowPictures | None) -> None:
        """Write the files of the next row, which may have none."""
        items, runs = (
            ([], []) if pictures is None else (pictures.items.ravel().tolist(), pictures.runs.ravel().tolist())
        )
        places: list[int] = []
        for part in () if pictures is None else pictures.parts:
            self._file.write(part)
            self._hash.update(part)
            places += [self.num_bytes, len(part)]
            self.num_bytes += len(part)
        self._hash.update(repr((items, runs, places)).encode())
        self._rows.append((items, runs, places))

    def take(self) -> dict[str, pa.Array]:
        """Columns `items`, `runs` and `parts` of the rows since the last call."""
        rows, self._rows = self._rows, []
        return {name: _lists([row[at] for row in rows]) for at, name in enumerate(("items", "runs", "parts"))}


def _lists(rows: list[list[int]]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    values = np.array([number for row in rows for number in row], dtype=np.int64)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
