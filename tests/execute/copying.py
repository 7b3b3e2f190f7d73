"""Copies of known bytes in a folder, as one process finds what others wrote; and those others: they end, live on, are
killed, or stop between two lines."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp.execute.state import copies as module
from rayfcp.execute.state.copies import LOCK, PAGE, Buffer, CopyFolder, Wanted
from rayfcp.values.state import Box, KeptStates, ShardEntry, ShardHeader, StateId

Key = tuple[int, int, int]
"""Version, generation and device number of a copy."""


def header_of(key: Key, tensors: list[tuple[Box, int]], *, pad: int = 0, name: str = "t") -> ShardHeader:
    entries, at = [], 0
    for index, (box, itemsize) in enumerate(tensors):
        dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}.get(itemsize, "unknown")
        entry = ShardEntry(name=f"{name}{index}", kind="parameter", box=box, dtype=dtype, start_byte=at)
        entries.append(entry)
        at += box.num_elements * itemsize + pad
    state = StateId(version=key[0], generation=key[1])
    return ShardHeader(state=state, number=key[2], num_devices=4, entries=tuple(entries), num_bytes=at, scalars={})


def vector(*key: int, size: int = 100, start: int = 0) -> ShardHeader:
    """Of two parts of tensors whose names are so long that the list of them takes two pages."""
    version, generation, number = (*key, 0, 0, 0)[:3]
    box = Box(offsets=(start,), sizes=(size // 2,))
    return header_of((version, generation, number), [(box, 1)] * 2, name="t" * PAGE)


def contents(header: ShardHeader) -> np.ndarray[Any, Any]:
    """Bytes of a copy, other ones in each."""
    seed = (header.state.version, header.state.generation, header.number)
    return np.random.default_rng(seed).integers(0, 256, header.num_bytes, dtype=np.uint8)


def write(folder: CopyFolder, *headers: ShardHeader) -> CopyFolder:
    for header in headers:
        new, whole = folder.begin(header), contents(header)
        new.buffer[: len(whole) // 2] = whole[: len(whole) // 2]
        new.buffer[len(whole) // 2 :] = whole[len(whole) // 2 :]
        assert new.publish()
    return folder


def found(path: Path) -> list[Key]:
    """All copies in a folder, each of which is whole."""
    folder = CopyFolder(path)
    headers = folder.headers()
    for header in headers:
        with folder.reading(header.state, header.number) as copy:
            assert copy.header == header
            np.testing.assert_array_equal(copy.buffer, contents(header))
    folder.close()
    return [(each.state.version, each.state.generation, each.number) for each in headers]


def pieces(folder: CopyFolder, header: ShardHeader, *, wanted: Sequence[Wanted]) -> list[Buffer]:
    """Parts of a copy, as they are once it is dropped."""
    with folder.reading(header.state, header.number) as copy:
        return [piece.copy() for piece in copy.pieces(wanted)]


def since(version: int, generation: int = 0) -> KeptStates:
    return KeptStates(since=StateId(version=version, generation=generation))


def files(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.name != LOCK)


def num_open(path: Path) -> int:
    """Files below a folder that this process has open, maps apart."""
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(each.is_relative_to(path) for each in links)


def process(work: Callable[[], object]) -> int:
    """Id of a fork that does this, and ends."""
    pid = os.fork()
    if pid:
        return pid
    with suppress(BaseException):
        work()
        os._exit(0)
    os._exit(1)


def ended(pid: int) -> int:
    """Exit code of a process."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def living(work: Callable[[], object]) -> Iterator[int]:
    """A process that has done this, and lives."""
    done, told = os.pipe()

    def live() -> None:
        _kept = work()
        os.write(told, b".")
        signal.pause()

    pid = process(live)
    os.close(told)
    try:
        assert os.read(done, 1) == b"."
        yield pid
    finally:
        os.close(done)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL


def between_lines(work: Callable[[], object], then: Callable[[int], object]) -> int:
    """Call `then` with the number of each line of the product, or of `write`, before `work` comes to it; return how
    many there were."""
    num_lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != module.__file__ and frame.f_code is not write.__code__:
            return None
        if event == "line":
            sys.settrace(None)
            then(num_lines)
            num_lines += 1
            sys.settrace(trace)
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(outer)
    return num_lines
