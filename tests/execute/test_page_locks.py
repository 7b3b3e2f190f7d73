"""Page locks on files of copies: in pieces, never on memory that is freed, and not more than the system grants."""

import gc
import logging
import threading
from pathlib import Path

import pytest

from rayfcp.execute.devices import page_locks
from rayfcp.execute.devices.page_locks import PageLocks
from rayfcp.execute.state.copies import MAX_SPARE, CopyFolder, NewCopy
from tests.execute.copying import since, vector
from tests.execute.fake_cudart import PAGE, Cudart
from tests.waiting import until

PIECE = 3 * PAGE
SIZE = 2 * PIECE + 100
"""Of a copy: with its head of three pages, whole pieces and part of one."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locks, "PIECE_BYTES", PIECE)


def begun(runtime: Cudart, path: Path) -> tuple[PageLocks, CopyFolder, NewCopy]:
    locks = PageLocks(lambda: runtime)
    folder = CopyFolder(path, page_locks=locks)
    return locks, folder, folder.begin(vector(1, size=SIZE))


def test_files_are_registered_in_pieces(tmp_path: Path) -> None:
    """No copy may go to two of them."""
    runtime = Cudart()
    runtime.may_register.clear()
    locks, folder, new = begun(runtime, tmp_path)
    assert locks.cuts(new.buffer) is None
    runtime.may_register.set()
    until(lambda: locks.cuts(new.buffer) is not None)
    assert [stop - start for start, stop in sorted(runtime.ranges.items())] == [PIECE, PIECE, PIECE, 2 * PAGE]
    start = new.buffer.ctypes.data
    assert locks.cuts(new.buffer) == [at - start for at in sorted(runtime.ranges) if at > start]
    assert locks.cuts(new.buffer.copy()) is None, "memory of others"
    assert new.publish()
    folder.close()
    assert not runtime.ranges


@pytest.mark.parametrize("may_register", [True, False])
def test_nothing_is_registered_once_it_is_freed(tmp_path: Path, may_register: bool) -> None:
    """Files that are dropped or removed, kept for others, replaced, of other sizes; registered, or about to be."""
    runtime = Cudart()
    locks, folder, new = begun(runtime, tmp_path)
    assert new.publish()
    if not may_register:
        runtime.may_register.clear()
        threading.Timer(0.1, runtime.may_register.set).start()
    for size in (SIZE, SIZE, 2 * SIZE, PAGE):
        for version in range(2, 5 + MAX_SPARE):
            new = folder.begin(vector(version, size=size))
            assert new.publish()
        folder.drop(since(9))
    del new
    gc.collect()
    until(lambda: len(runtime.ranges) == sum(-(-file.size // PIECE) for file in folder._spare))
    (folder.path / folder._spare[0].name).unlink()
    folder.begin(vector(9, size=SIZE)).discard()
    folder.close()
    assert not runtime.ranges and not locks._memories


def test_what_cannot_be_registered_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as more than the system grants; what is registered stays so."""
    runtime = Cudart(limit_bytes=5 * PIECE)
    with caplog.at_level(logging.WARNING):
        locks, folder, new = begun(runtime, tmp_path)
        until(lambda: locks.cuts(new.buffer) is not None)
        others = [folder.begin(vector(version, size=SIZE)) for version in (2, 3)]
        until(lambda: locks._is_refused)
    assert [locks.cuts(each.buffer) for each in others] == [None, None] and locks.cuts(new.buffer)
    assert caplog.text.count("cannot be registered with the device (CUDA error 2)") == 1
    for each in (new, *others):
        each.discard()
    folder.close()
    assert not runtime.ranges
