"""Parts of a checkpoint, written from copies in shared memory; free of torch, which reads them.

A part is a file of torch.distributed.checkpoint: one archive of `torch.save` per tensor, which is a zip file with its
elements and a pickle that describes them.
"""

import os
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import IO
from zipfile import ZIP64_LIMIT, ZipFile, ZipInfo
from zlib import crc32

from rayfcp.execute.reports import FileSum, SavedPart, SavedTensor
from rayfcp.execute.state.copies import Buffer, CopyFolder, CopyGoneError, HeldCopy
from rayfcp.values.state import ITEMSIZES, ShardEntry, StateId

WRITERS = 4
"""Files of a node that are written at once: storage of several disks is faster than one file at a time, and these
threads shall not take the CPUs from training."""

CHUNK_BYTES = 4 * 2**20
"""Summed and written at once: small enough to stay in a cache between the two."""

_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}
"""Names by which pickles tell torch a dtype."""
assert _STORAGES.keys() == ITEMSIZES.keys()


class SaveError(RuntimeError):
    """A part of a checkpoint could not be written; one line."""


class CopyMissingError(SaveError):
    """A copy is not there: its memory was full, or somebody removed it."""


def write_part(copies: CopyFolder, state: StateId, *, numbers: Sequence[int], folder: Path) -> SavedPart:
    """Write the shards of these devices in a state, one file each, from copies that are held until all are on disk.

    Raises:
        SaveError: the storage is full or refuses it; a CopyMissingError without one of the copies.
    """
    began_s = time.perf_counter()
    try:
        with ExitStack() as held:
            found = [held.enter_context(copies.reading(state, number)) for number in numbers]
            folder.mkdir(exist_ok=True)
            with ThreadPoolExecutor(max_workers=WRITERS, thread_name_prefix="checkpoint") as pool:
                written = list(pool.map(lambda copy: write_shard(copy, folder), found))
    except CopyGoneError as error:
        raise CopyMissingError(f"{error}: its memory was full, or it was removed") from error
    except OSError as error:
        raise SaveError(f"{error.strerror}: {error.filename or folder}") from error
    return SavedPart(
        seconds=time.perf_counter() - began_s,
        files=tuple(file for file, _ in written),
        tensors=tuple(tensor for _, tensors in written for tensor in tensors),
        scalars={name: value for copy in found for name, value in copy.header.scalars.items()},
    )


def write_shard(copy: HeldCopy, folder: Path) -> tuple[FileSum, list[SavedTensor]]:
    """Write what the device of a copy owns; return the file's sum, and what is in it once it is on disk."""
    path = folder / f"__{copy.header.number}_0.distcp"
    tensors: dict[int, tuple[int, int]] = {}
    saved = []
    with path.open("wb") as file:
        target = _Summed(file)
        for entry in copy.header.entries:
            if not entry.is_owner:
                continue
            if entry.start_byte not in tensors:  # else it is another name of a tied parameter
                start = target.num_bytes
                _write_tensor(target, entry, copy.buffer[entry.start_byte : entry.start_byte + entry.num_bytes])
                tensors[entry.start_byte] = start, target.num_bytes - start
            start, num_bytes = tensors[entry.start_byte]
            saved.append(SavedTensor(entry=entry, file=path.name, start_byte=start, num_bytes=num_bytes))
        file.flush()
        os.fsync(file.fileno())
    return FileSum(name=path.name, num_bytes=target.num_bytes, crc32=target.crc32), saved


class _Summed:
    """A file that is summed while it is written. Without `tell`, so that archives count from their own beginning."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.num_bytes = self.crc32 = 0

    def write(self, data: bytes | memoryview) -> int:
        self.crc32, self.num_bytes = crc32(data, self.crc32), self.num_bytes + len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Nothing: it is flushed once, at its end."""


def _write_tensor(target: _Summed, entry: ShardEntry, raw: Buffer) -> None:
    with ZipFile(target, "w") as archive:  # type: ignore[call-overload]  # needs no more of a file than this
        archive.writestr(ZipInfo("archive/data.pkl"), _pickled(entry))
        archive.writestr(ZipInfo("archive/version"), "3\n")
        with archive.open(ZipInfo("archive/data/0"), "w", force_zip64=len(raw) > ZIP64_LIMIT) as data:
            for start in range(0, len(raw), CHUNK_BYTES):
                data.write(raw[start : start + CHUNK_BYTES].data)


def _pickled(entry: ShardEntry) -> bytes:
    """The pickle of `torch.save`, of a contiguous tensor on the CPU whose elements are in `data/0`."""
    sizes = entry.box.sizes
    strides = tuple(prod(sizes[at + 1 :]) for at in range(len(sizes)))
    storage = [_pushed("storage"), b"ctorch\n", _STORAGES[entry.dtype].encode(), b"\n"]
    storage += [_pushed("0"), _pushed("cpu"), _pushed(prod(sizes))]
    arguments = [
        b"(",
        *storage,
        b"tQ",
        _pushed(0),
        _pushed(sizes),
        _pushed(strides),
        b"\x89ccollections\nOrderedDict\n)R",
    ]
    return b"".join([b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(", *arguments, b"tR."])


def _pushed(value: object) -> bytes:
    """Opcodes of a pickle that push a value, without those that begin and end it."""
    return pickle.dumps(value, protocol=2)[2:-1]
