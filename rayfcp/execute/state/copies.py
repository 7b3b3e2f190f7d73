"""Copies of shards in host memory: of this device's own states, and those stored for other devices."""

import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId

Wanted = tuple[str, str, Box]
"""Name, kind (see `ShardEntry`) and part of a tensor."""

MAX_SPARE = 2
"""Buffers of dropped copies kept for new ones: the next copy allocates nothing, for this much host memory."""

_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Raw elements by size: their real dtype does not matter here."""


class CopyGoneError(LookupError):
    """A requested copy is not held any more, or not complete: states are dropped while others look for them."""


@contextmanager
def reading(header: ShardHeader) -> Iterator[None]:
    """Context for reading pieces of a copy, in this or another process; a CollectiveFailedError if the copy is gone. It
    was dropped for a newer one then, and others may hold the pieces."""
    try:
        yield
    except CopyGoneError as error:
        raise CollectiveFailedError(f"a copy was dropped while it was read: no complete {_label(header)}") from error


class _Copy:
    """One shard. Its buffer is reused once the copy is dropped and no thread reads or writes it (`users` is 0)."""

    def __init__(self, header: ShardHeader, buffer: np.ndarray[Any, Any]) -> None:
        self.header, self.buffer = header, buffer
        self.claimed: dict[int, int] = {}
        self.num_written = self.users = 0
        self.is_complete = self.is_dropped = False
        self._entries: dict[tuple[str, str], list[ShardEntry]] = defaultdict(list)
        for entry in header.entries:
            self._entries[entry.name, entry.kind].append(entry)

    def piece(self, name: str, kind: str, *, box: Box) -> np.ndarray[Any, Any]:
        for entry in self._entries.get((name, kind), ()):
            if entry.box.meet(box) == box:
                raw = self.buffer[entry.start_byte : entry.start_byte + entry.num_bytes]
                whole = raw.view(_DTYPES[entry.itemsize]).reshape(entry.box.sizes)
                return np.array(whole[slices_of(box, within=entry.box)], order="C")
        raise ValueError(f"{_label(self.header)} lacks {kind} of {name} at {box}; request parts of its entries")


def slices_of(box: Box, *, within: Box) -> tuple[slice, ...]:
    """Slices of `box` in an array that holds the box `within`."""
    ends = zip(box.offsets, within.offsets, box.sizes, strict=True)
    return tuple(slice(at - start, at - start + size) for at, start, size in ends)


class HeldCopies:
    """Complete copies by (state, device number); thread-safe.

    A copy received in chunks is visible once all of them are here and their checksums (CRC-32) match. `allocate`
    returns a uint8 buffer of so many bytes; pinned memory for accelerators.
    """

    def __init__(
        self, *, allocate: Callable[[int], np.ndarray[Any, Any]] = lambda num_bytes: np.empty(num_bytes, np.uint8)
    ) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._copies: dict[tuple[StateId, int], _Copy] = {}
        self._spare: list[np.ndarray[Any, Any]] = []

    def begin(self, header: ShardHeader) -> bool:
        """Expect chunks of a copy, from the start if some were received already; False if it is held complete."""
        _check(header)
        with self._lock:
            held = self._copies.get((header.state, header.number))
            if held is not None and held.is_complete:
                return False
            self._add(_Copy(header, self._buffer(header.num_bytes)), is_complete=header.num_bytes == 0)
        return True

    def write(
        self, state: StateId, number: int, *, offset: int, data: bytes | bytearray | memoryview | Any, checksum: int
    ) -> bool:
        """Store one chunk, in any order; True if the copy is complete now. A repeated chunk changes nothing.

        Raises:
            CopyGoneError: no such copy is expected; it was dropped meanwhile.
            ValueError: the checksum is wrong, and the copy is dropped; or the chunk is outside, or overlaps another.
        """
        view = memoryview(data).cast("B")
        with self._using(state, number) as copy:
            if zlib.crc32(view) != checksum:
                with self._lock:
                    if self._copies.get((state, number)) is copy and not copy.is_complete:
                        self._drop(self._copies.pop((state, number)))
                raise ValueError(f"{_label(copy.header)}: chunk at byte {offset} is damaged; send the copy again")
            if not self._claim(copy, offset, size=len(view)):
                return copy.is_complete
            copy.buffer[offset : offset + len(view)] = np.frombuffer(view, np.uint8)
            with self._lock:
                if copy.is_dropped:
                    raise CopyGoneError(f"{_label(copy.header)} was dropped while it was received")
                copy.num_written += len(view)
                copy.is_complete = copy.num_written == copy.header.num_bytes
                return copy.is_complete

    def put(self, header: ShardHeader, buffer: np.ndarray[Any, Any]) -> None:
        """Take over a whole copy; the caller must not write to the buffer (uint8, of the shard's size) any more."""
        _check(header)
        if len(buffer) != header.num_bytes:
            raise ValueError(f"{_label(header)}: buffer has {len(buffer)} bytes, must have {header.num_bytes}")
        with self._lock:
            self._add(_Copy(header, buffer), is_complete=True)

    def spare(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """A buffer for `put`: of a dropped copy of the same size, or new."""
        with self._lock:
            return self._buffer(num_bytes)

    def headers(self) -> tuple[ShardHeader, ...]:
        """Headers of complete copies, by state and device number."""
        with self._lock:
            held = [copy.header for copy in self._copies.values() if copy.is_complete]
        return tuple(sorted(held, key=lambda header: (header.state, header.number)))

    def pieces(self, state: StateId, number: int, *, wanted: Sequence[Wanted]) -> list[np.ndarray[Any, Any]]:
        """Each part, which must be within one entry, as a contiguous array of its box's shape, with unsigned integers
        of the elements' size. A CopyGoneError if the copy is not held, or not complete."""
        with self._using(state, number, complete=True) as copy:
            return [copy.piece(name, kind, box=box) for name, kind, box in wanted]

    def chunks(self, state: StateId, number: int, *, chunk_bytes: int) -> Iterator[tuple[int, memoryview, int]]:
        """(offset, bytes, checksum) of each chunk, for `write` elsewhere. The bytes are valid until the next chunk. A
        CopyGoneError if the copy is not held, not complete, or was dropped meanwhile."""
        with self._using(state, number, complete=True) as copy:
            view = copy.buffer.data
            for start in range(0, len(view), chunk_bytes):
                if copy.is_dropped:
                    raise CopyGoneError(f"{_label(copy.header)} was dropped while it was sent")
                chunk = view[start : start + chunk_bytes]
                yield start, chunk, zlib.crc32(chunk)

    def drop_older(self, than: StateId) -> None:
        """Drop all copies of states before `than`, complete or not."""
        with self._lock:
            for state, number in [key for key in self._copies if key[0] < than]:
                self._drop(self._copies.pop((state, number)))

    def drop_all(self) -> None:
        """Drop all copies, complete or not."""
        with self._lock:
            for copy in self._copies.values():
                self._drop(copy)
            self._copies.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, spare ones included."""
        with self._lock:
            return sum(len(copy.buffer) for copy in self._copies.values()) + sum(map(len, self._spare))

    @contextmanager
    def _using(self, state: StateId, number: int, *, complete: bool = False) -> Iterator[_Copy]:
        with self._lock:
            copy = self._copies.get((state, number))
            if copy is None or (complete and not copy.is_complete):
                raise CopyGoneError(
                    f"no {'complete ' if complete else ''}copy of device {number} in {state} is held here"
                )
            copy.users += 1
        try:
            yield copy
        finally:
            with self._lock:
                copy.users -= 1
                self._recycle(copy)

    def _claim(self, copy: _Copy, offset: int, *, size: int) -> bool:
        """Reserve the chunk's bytes; False if another call has written or is writing it."""
        with self._lock:
            if copy.claimed.get(offset) == size:
                return False
            outside = offset < 0 or offset + size > copy.header.num_bytes
            if outside or any(at < offset + size and offset < at + n for at, n in copy.claimed.items()):
                raise ValueError(
                    f"{_label(copy.header)}: chunk of {size} bytes at {offset} reaches "
                    f"{f'beyond {copy.header.num_bytes}' if outside else 'into another'}; cut the copy one way only"
                )
            copy.claimed[offset] = size
            return True

    def _add(self, copy: _Copy, *, is_complete: bool) -> None:
        copy.is_complete = is_complete
        key = (copy.header.state, copy.header.number)
        if key in self._copies:
            self._drop(self._copies.pop(key))
        self._copies[key] = copy

    def _drop(self, copy: _Copy) -> None:
        copy.is_dropped = True
        self._recycle(copy)

    def _recycle(self, copy: _Copy) -> None:
        if copy.is_dropped and not copy.users:
            self._spare = [*self._spare, copy.buffer][-MAX_SPARE:]

    def _buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        for at, buffer in enumerate(self._spare):
            if len(buffer) == num_bytes:
                return self._spare.pop(at)
        return self._allocate(num_bytes)


def _check(header: ShardHeader) -> None:
    for entry in header.entries:
        if entry.itemsize not in _DTYPES or not 0 <= entry.start_byte <= header.num_bytes - entry.num_bytes:
            raise ValueError(f"{_label(header)}: {entry} does not fit in {header.num_bytes} bytes of 1, 2, 4 or 8 each")


def _label(header: ShardHeader) -> str:
    state = header.state
    return f"copy of device {header.number} at version {state.version}, generation {state.generation}"
