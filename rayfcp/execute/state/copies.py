"""Copies of shards as files in shared memory, which outlive the processes that write them.

All processes of one run on one node share a folder, usually on a tmpfs. A copy is one file: a page with the shard's
header, the list of its entries, the data. It is written under another name and renamed when it is complete, so that
what has the name of a copy is whole, whenever its writer died. Locks (`flock`) end with their holders:

- a process in the folder holds a shared lock on `lock`: a folder whose lock is free was left by dead processes;
- the writer of a copy holds a lock on it while it lives, and only then reuses its memory for a later copy;
- a reader holds a shared lock: a copy that is read is never overwritten.
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import secrets
import shutil
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp.execute.devices.page_locks import PageLocks
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.values.state import ITEMSIZES, Box, KeptStates, ShardEntry, ShardHeader, StateId

logger = logging.getLogger(__name__)

Wanted = tuple[str, str, Box]
"""Name, kind (see `ShardEntry`) and part of a tensor."""

PAGE = 4096
COPY, UNFINISHED, LOCK = ".copy", ".new", "lock"

MAX_SPARE = 2
"""Files of dropped copies that a process keeps for new ones: the next copy allocates nothing, not even while another is
written to a checkpoint, for this much memory. Memory for a copy of 1 GiB takes 0.3 s and more."""

ABANDONED_S = 900.0
"""Age at which copies that no living process holds are removed by processes of other runs: time to start the run again
and find its state."""

_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Raw elements by size: their real dtype does not matter here."""

Buffer = np.ndarray[Any, Any]

Into = Iterable[Buffer]
"""Memory (uint8) for the bytes of one part, in row-major order: buffer after buffer, each full before the next one is
taken."""


class CopyGoneError(CollectiveFailedError):
    """A requested copy is not there any more: states are dropped while others look for them."""


@dataclass(slots=True)
class _File:
    """A file that this process wrote, mapped for as long as it is kept."""

    name: str
    fd: int
    mapping: mmap.mmap
    data_start: int
    entries: bytes = b""

    @property
    def size(self) -> int:
        return len(self.mapping)


@dataclass(slots=True)
class NewCopy:
    """A copy that is being written: `buffer` (uint8) has the shard's size. Ends by `publish` or `discard`."""

    header: ShardHeader
    buffer: Buffer
    _folder: "CopyFolder"
    _file: _File | None

    def publish(self) -> bool:
        """Make the copy visible; the buffer must not be written to any more. False if somebody removed the folder, or
        the file, and there is no copy."""
        if self._file is not None:
            try:
                self._folder._publish(self._file, self.header)
            except FileNotFoundError:
                self.discard()
                return False
            self._file = None
        return True

    def discard(self) -> None:
        """Give the memory back; nothing happens after `publish` or `discard`."""
        file, self._file = self._file, None
        if file is not None:
            self._folder._recycle(file)


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A copy that is being read, and stays as it is meanwhile. `head`: its header as `read_header` takes it."""

    header: ShardHeader
    head: bytes
    buffer: Buffer

    def pieces(self, wanted: Sequence[Wanted]) -> Iterator[Buffer]:
        """Yield each part, which must be within one entry, as a contiguous array of its box's shape, with unsigned
        integers of the elements' size; memory of the copy where that is contiguous."""
        entries: dict[tuple[str, str], list[ShardEntry]] = defaultdict(list)
        for entry in self.header.entries:
            entries[entry.name, entry.kind].append(entry)
        for name, kind, box in wanted:
            yield self._piece(entries[name, kind], name, kind, box=box)

    def _piece(self, entries: Sequence[ShardEntry], name: str, kind: str, *, box: Box) -> Buffer:
        for entry in entries:
            if entry.box.meet(box) == box:
                found = self.buffer[entry.start_byte : entry.start_byte + entry.num_bytes]
                whole = found.view(_DTYPES[entry.itemsize]).reshape(entry.box.sizes)
                return np.asarray(whole[slices_of(box, within=entry.box)], order="C")
        raise ValueError(f"{label(self.header)} lacks {kind} of {name} at {box}; request parts of its entries")


def raw(piece: Buffer) -> Buffer:
    """The bytes of a contiguous array."""
    return piece.reshape(-1).view(np.uint8)


def slices_of(box: Box, *, within: Box) -> tuple[slice, ...]:
    """Slices of `box` in an array that holds the box `within`."""
    ends = zip(box.offsets, within.offsets, box.sizes, strict=True)
    return tuple(slice(at - start, at - start + size) for at, start, size in ends)


def copies_folder(parent: str, *, run: str, node: str) -> Path:
    """Folder of the copies of a run on a node. `parent` is a folder in shared memory; the run's is this user's own.

    Raises:
        OSError: the user's folder cannot be made, or is not the user's alone.
    """
    own = Path(parent) / f"rayfcp-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"elastic.snapshot_dir: {own} is not a folder of this user alone (mode 0700); remove it, or name another"
        )
    return own / run / node


class CopyFolder:
    """The copies of a run on a node, by (state, device number), as one process sees them; thread-safe. `page_locks`:
    of the device whose state this process copies."""

    def __init__(self, path: Path, *, page_locks: PageLocks | None = None) -> None:
        self.path, self._page_locks = path, page_locks
        self._lock_fd = _join(path)
        self._lock = threading.RLock()
        self._own: dict[str, _File] = {}
        self._spare: list[_File] = []
        self._entries: tuple[tuple[ShardEntry, ...], bytes] = ((), b"[]")

    def begin(self, header: ShardHeader) -> NewCopy:
        """Memory for a copy; of a dropped one of the same size, or new.

        Raises:
            OSError: the file system is full, or cannot be written to.
        """
        _check(header)
        with self._lock:
            if os.fstat(self._lock_fd).st_nlink == 0:  # somebody removed the folder
                self.close()
                self._lock_fd = _join(self.path)
            entries = self._bytes_of(header.entries)
            data_start = -(-(PAGE + len(entries)) // PAGE) * PAGE
            file = self._file_of(data_start + header.num_bytes, data_start=data_start)
        if file.entries != entries:
            file.mapping[PAGE : PAGE + len(entries)] = entries
            file.entries = entries
        buffer = np.frombuffer(file.mapping, np.uint8)[data_start:]
        return NewCopy(header, buffer, self, file)

    def headers(self) -> tuple[ShardHeader, ...]:
        """Headers of all copies, by state and device number."""
        found = []
        for name in self._names(COPY):
            with suppress(OSError), (self.path / name).open("rb") as file:
                header = read_header(file.read(PAGE), entries_of=file.read)
                if header is not None and _name(header.state, header.number) == name:  # else reused meanwhile
                    found.append(header)
        return tuple(sorted(found, key=lambda header: (header.state, header.number)))

    def has(self, state: StateId, number: int) -> bool:
        return (self.path / _name(state, number)).exists()

    @contextmanager
    def reading(self, state: StateId, number: int) -> Iterator[HeldCopy]:
        """Context of a copy that is read; a CopyGoneError if it is not there."""
        gone = CopyGoneError(f"no {_label(state, number)} is held here")
        try:
            fd = os.open(self.path / _name(state, number), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise gone from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise gone from error
            mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            header = read_header(mapping[:PAGE], entries_of=lambda size: mapping[PAGE : PAGE + size])
            if header is None or (header.state, header.number) != (state, number):
                raise gone  # reused meanwhile
            data_start = len(mapping) - header.num_bytes
            yield HeldCopy(header, mapping[:data_start], np.frombuffer(mapping, np.uint8)[data_start:])
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # the mapping has a descriptor of its own, and may live on
            os.close(fd)

    def read(self, state: StateId, number: int, *, wanted: Sequence[Wanted], into: Sequence[Into]) -> None:
        """Fill memory with parts of a copy; see `HeldCopy.pieces`. A CopyGoneError if it is not there."""
        with self.reading(state, number) as copy:
            for piece, buffers in zip(copy.pieces(wanted), into, strict=True):
                data, at = raw(piece), 0
                for buffer in buffers:
                    buffer[:] = data[at : at + len(buffer)]
                    at += len(buffer)

    def drop(self, kept: KeptStates, *, of_dead: bool = False) -> None:
        """Drop copies of all other states that this process wrote; with `of_dead` also those whose writers are dead,
        and what they left unfinished."""
        names = [name for name in self._copy_names() if _state_of(name) not in kept]
        self._drop(names, remove=_unlink_unlocked if of_dead else None)
        for name in self._names(UNFINISHED) if of_dead else ():
            _unlink_unlocked(self.path / name)

    def drop_generations(self, up_to: int) -> None:
        """Drop all copies of generations up to this number, whoever wrote them."""
        names = [name for name in self._copy_names() if _state_of(name).generation <= up_to]
        self._drop(names, remove=lambda path: path.unlink(missing_ok=True))

    def _drop(self, names: Sequence[str], *, remove: Callable[[Path], None] | None) -> None:
        """Use the memory of own copies again; `remove` others, or leave them."""
        for name in names:
            with self._lock:
                file = self._own.pop(name, None)
            if file is not None:
                self._recycle(file)
            elif remove is not None:
                remove(self.path / name)

    def adopt(self) -> None:
        """Take over the copies of this run that dead processes left on this machine under another node's name, as after
        a restart of the cluster. Returns when all of them are here, whoever of this folder takes them."""
        others = [path for path in _folders(self.path.parent) if path != self.path]
        if not others:
            return
        with suppress(FileNotFoundError), _turn(self.path):
            for path in others:
                with _alone(path) as is_free:
                    for copy in path.glob(f"*{COPY}") if is_free else ():
                        if not (self.path / copy.name).exists():  # a living process may have written that
                            copy.replace(self.path / copy.name)
                    if is_free:
                        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Leave the folder with its copies, as by the end of the process."""
        with self._lock:
            for file in [*self._own.values(), *self._spare]:
                self._close(file)
            self._own, self._spare = {}, []
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            self._lock_fd = -1

    def remove(self) -> None:
        """Remove the folder with all copies; other processes in it cannot publish any more."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    @property
    def num_bytes(self) -> int:
        """Memory of all files in the folder."""
        total = 0
        for name in self._names(""):
            with suppress(OSError):
                total += (self.path / name).stat().st_blocks * 512
        return total

    def _names(self, suffix: str) -> list[str]:
        try:
            return [each.name for each in os.scandir(self.path) if each.name.endswith(suffix)]
        except FileNotFoundError:
            return []

    def _copy_names(self) -> set[str]:
        """Names of copies: all in the folder, and of this process's own also those that others have removed."""
        with self._lock:
            return {*self._names(COPY), *self._own}

    def _bytes_of(self, entries: tuple[ShardEntry, ...]) -> bytes:
        """Entries in JSON; those of one generation are one object, encoded once."""
        if self._entries[0] is not entries:
            listed = [[e.name, e.kind, e.box.offsets, e.box.sizes, e.dtype, e.start_byte, e.is_owner] for e in entries]
            self._entries = (entries, json.dumps(listed, separators=(",", ":")).encode())
        return self._entries[1]

    def _file_of(self, size: int, *, data_start: int) -> _File:
        for at, spare in enumerate(self._spare):
            if (spare.size, spare.data_start) == (size, data_start) and os.fstat(spare.fd).st_nlink:
                return self._spare.pop(at)
        if len(self._spare) == MAX_SPARE:  # of other sizes, as after a change of devices
            self._give_back(self._spare.pop(0))
        name, fd = self._make()
        try:
            os.posix_fallocate(fd, 0, size)  # without it, a full file system shows by SIGBUS
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(fd)
            (self.path / name).unlink(missing_ok=True)
            raise
        if self._page_locks is not None:
            self._page_locks.add(np.frombuffer(mapping, np.uint8))
        return _File(name, fd, mapping, data_start)

    def _close(self, file: _File) -> None:
        """Leave a file, which is unmapped once nobody uses its memory."""
        if self._page_locks is not None:
            self._page_locks.remove(np.frombuffer(file.mapping, np.uint8))
        os.close(file.fd)

    def _make(self) -> tuple[str, int]:
        """Name and descriptor of a new file, which is locked."""
        while True:
            name = f"{secrets.token_hex(8)}{UNFINISHED}"
            fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return name, fd
            os.close(fd)  # removed before it was locked, as if it were a dead process's

    def _publish(self, file: _File, header: ShardHeader) -> None:
        page = _page(header, entries=file.entries)
        file.mapping[: len(page)] = page
        name = _name(header.state, header.number)
        fcntl.flock(file.fd, fcntl.LOCK_SH)  # before it has its name: readers do not wait
        with self._lock:
            (self.path / file.name).rename(self.path / name)
            replaced = self._own.pop(name, None)
            if replaced is not None:
                self._close(replaced)
            file.name = name
            self._own[name] = file

    def _recycle(self, file: _File) -> None:
        """Keep a file for a new copy, rather than the oldest that is kept, unless it is read or was removed."""
        with self._lock:
            if os.fstat(file.fd).st_nlink == 0:  # its name may be that of another file
                self._close(file)
                return
            with suppress(OSError):  # it is read, or gone with the folder
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                name = f"{secrets.token_hex(8)}{UNFINISHED}"
                (self.path / file.name).rename(self.path / name)
                file.name = name
                self._spare.append(file)
                if len(self._spare) <= MAX_SPARE:
                    return
                file = self._spare.pop(0)
            self._give_back(file)

    def _give_back(self, file: _File) -> None:
        """Remove a file of which there is no copy."""
        (self.path / file.name).unlink(missing_ok=True)
        self._close(file)


def remove_abandoned(own: Path, *, age_s: float = ABANDONED_S) -> None:
    """Remove what dead processes of other runs than that of the folder `own` left in shared memory, once it is that
    old."""
    for run in _folders(own.parent.parent):
        for path in _folders(run) if run != own.parent else ():
            with suppress(OSError), _alone(path) as is_free:
                if is_free and time.time() - path.stat().st_mtime > age_s:
                    logger.warning("removing copies that a run left in %s", path)
                    shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            run.rmdir()


def label(header: ShardHeader) -> str:
    return _label(header.state, header.number)


def _label(state: StateId, number: int) -> str:
    return f"copy of device {number} at version {state.version}, generation {state.generation}"


def _join(path: Path) -> int:
    """Lock of a folder, which is made if it is not there."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with suppress(FileNotFoundError):  # removed meanwhile
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether no living process is in the folder; none enters meanwhile."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Context that one process after the other enters."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _folders(path: Path) -> list[Path]:
    try:
        return [each for each in path.iterdir() if each.is_dir() and not each.is_symlink()]
    except OSError:
        return []


def _unlink_unlocked(path: Path) -> None:
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(fd)


def _name(state: StateId, number: int) -> str:
    return f"{state.version}-{state.generation}-{number}{COPY}"


def _state_of(name: str) -> StateId:
    version, generation, _ = name.removesuffix(COPY).split("-")
    return StateId(version=int(version), generation=int(generation))


def _page(header: ShardHeader, *, entries: bytes) -> bytes:
    fields = {
        "state": asdict(header.state),
        "number": header.number,
        "num_devices": header.num_devices,
        "num_bytes": header.num_bytes,
        "scalars": header.scalars,
        "num_entry_bytes": len(entries),
        "entry_sum": _sum(entries),
    }
    text = json.dumps(fields).encode()
    if len(text) > PAGE - 17:
        raise ValueError(f"{label(header)}: its header takes {len(text)} bytes, {PAGE - 17} are allowed")
    return (_sum(text).encode() + text + b"\n").ljust(PAGE, b"\0")


def _sum(data: bytes) -> str:
    """Checksum of 16 characters."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def read_header(page: bytes, *, entries_of: Callable[[int], bytes]) -> ShardHeader | None:
    """Header in the first page of a file, whose next bytes, so many, `entries_of` gives; None if that or these are
    damaged, or of another copy. A ValueError if its entries do not fit."""
    text = page[16:].partition(b"\n")[0]
    if _sum(text).encode() != page[:16]:
        return None
    fields = json.loads(text)
    entries = entries_of(fields.pop("num_entry_bytes"))
    if _sum(entries) != fields.pop("entry_sum"):
        return None
    made = tuple(
        ShardEntry(
            name=name,
            kind=kind,
            box=Box(offsets=tuple(offsets), sizes=tuple(sizes)),
            dtype=dtype,
            start_byte=start_byte,
            is_owner=is_owner,
        )
        for name, kind, offsets, sizes, dtype, start_byte, is_owner in json.loads(entries)
    )
    header = ShardHeader(**{**fields, "state": StateId(**fields["state"])}, entries=made)
    _check(header)
    return header


def _check(header: ShardHeader) -> None:
    for entry in header.entries:
        if entry.dtype not in ITEMSIZES or not 0 <= entry.start_byte <= header.num_bytes - entry.num_bytes:
            raise ValueError(
                f"{label(header)}: {entry} does not fit in {header.num_bytes} bytes, or is of no known dtype"
            )
