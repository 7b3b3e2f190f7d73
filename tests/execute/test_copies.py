"""Copies of shards in shared memory: parts of random boxes, what is seen and what stays, and how much memory it takes.
Other processes that write, read and die meanwhile: `test_copies_of_others`."""

import errno
import os
import stat
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.execute.state.copies import MAX_SPARE, PAGE, CopyFolder, CopyGoneError, copies_folder
from rayfcp.values.state import Box, KeptStates, StateId
from tests.examples import examples
from tests.execute.copying import (
    Key,
    contents,
    ended,
    files,
    found,
    header_of,
    num_open,
    pieces,
    process,
    since,
    vector,
    write,
)

DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@st.composite
def boxes(draw: st.DrawFn, inside: Box | None = None) -> Box:
    """Some box, or one within another."""
    if inside is None:
        sizes = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        return Box(offsets=tuple(draw(st.integers(0, 9)) for _ in sizes), sizes=sizes)
    starts = tuple(draw(st.integers(0, size - 1)) for size in inside.sizes)
    sizes = tuple(draw(st.integers(1, size - start)) for start, size in zip(starts, inside.sizes, strict=True))
    return Box(offsets=tuple(a + b for a, b in zip(inside.offsets, starts, strict=True)), sizes=sizes)


def positions(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))))


@given(st.data())
def test_boxes_meet_where_both_have_elements(data: st.DataObject) -> None:
    one = data.draw(boxes())
    sizes = tuple(data.draw(st.integers(1, 4)) for _ in one.sizes)
    other = Box(offsets=tuple(data.draw(st.integers(0, 9)) for _ in sizes), sizes=sizes)
    common = one.meet(other)
    assert (positions(common) if common else set()) == positions(one) & positions(other)
    assert one.num_elements == len(positions(one))


@given(st.data())
def test_pieces_are_what_slices_of_the_whole_are(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(boxes(), st.sampled_from(sorted(DTYPES))), min_size=1, max_size=3))
    header = header_of((1, 0, 0), shapes, pad=data.draw(st.sampled_from((0, 8, 64))))
    entry = data.draw(st.sampled_from(header.entries))
    wanted = data.draw(boxes(entry.box))
    with TemporaryDirectory() as path:
        folder = write(CopyFolder(Path(path)), header)
        (piece,) = pieces(folder, header, wanted=[(entry.name, entry.kind, wanted)])
        folder.close()
    raw = contents(header)[entry.start_byte :][: entry.num_bytes]
    whole = np.frombuffer(raw.tobytes(), DTYPES[entry.itemsize]).reshape(entry.box.sizes)
    ends = zip(wanted.offsets, entry.box.offsets, wanted.sizes, strict=True)
    np.testing.assert_array_equal(piece, whole[tuple(slice(a - b, a - b + n) for a, b, n in ends)])
    assert piece.shape == wanted.sizes and piece.flags.c_contiguous and piece.dtype == DTYPES[entry.itemsize]


def test_what_cannot_be_a_copy_is_refused(tmp_path: Path) -> None:
    box, folder = Box(offsets=(0,), sizes=(100,)), CopyFolder(tmp_path)
    with pytest.raises(ValueError, match="of no known dtype"):
        folder.begin(header_of((1, 0, 0), [(box, 3)]))
    write(folder, header := header_of((1, 0, 0), [(box, 1)]))
    with pytest.raises(ValueError, match="version 1, generation 0 lacks exp_avg of t0"):
        pieces(folder, header, wanted=[("t0", "exp_avg", box)])
    with pytest.raises(ValueError, match="lacks parameter of t0"):
        pieces(folder, header, wanted=[("t0", "parameter", Box(offsets=(90,), sizes=(11,)))])
    with pytest.raises(CopyGoneError, match="no copy of device 1"):
        folder.read(header.state, 1, wanted=[], into=[])


@examples(20)
@given(st.lists(st.tuples(st.tuples(*[st.integers(0, 2)] * 3), st.booleans()), max_size=6))
def test_a_copy_is_seen_once_it_is_published_and_never_if_discarded(given: list[tuple[Key, bool]]) -> None:
    with TemporaryDirectory() as path:
        folder, want = CopyFolder(Path(path)), set[Key]()
        for key, is_published in given:
            new = folder.begin(vector(*key))
            new.buffer[:] = contents(new.header)
            assert found(folder.path) == sorted(want)
            (new.publish if is_published else new.discard)()
            new.discard()  # does nothing any more
            want |= {key} if is_published else set()
            assert found(folder.path) == sorted(want)
        folder.close()


@given(st.data())
def test_exactly_what_is_kept_stays(data: st.DataObject) -> None:
    keys = st.tuples(*[st.integers(0, 3)] * 3)
    states = st.builds(StateId, version=st.integers(0, 3), generation=st.integers(0, 3))
    held = data.draw(st.sets(keys))
    kept = KeptStates(since=data.draw(st.none() | states), states=data.draw(st.frozensets(states, max_size=3)))
    with TemporaryDirectory() as path:
        folder = write(CopyFolder(Path(path)), *(vector(*key) for key in held))
        before = folder.num_bytes
        folder.drop(kept)
        newer = (0, 0) if kept.since is None else (kept.since.version, kept.since.generation)
        also = {(each.version, each.generation) for each in kept.states}
        stay = [key for key in sorted(held) if key[:2] >= newer or key[:2] in also]
        assert found(folder.path) == stay
        num_files = len(stay) + min(MAX_SPARE, len(held) - len(stay))
        assert len(files(folder.path)) == num_files and folder.num_bytes <= before
        folder.close()


def test_memory_is_used_again_also_after_shards_changed_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, allocate, sizes = CopyFolder(tmp_path), os.posix_fallocate, list[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, size: sizes.append(size) or allocate(fd, start, size))
    for size in (2**16, 2**18, 2**16):
        sizes.clear()
        for version in range(40):
            folder.drop(since(version - 1))
            write(folder, vector(version, size=size))
        folder.drop(since(40))
        assert len(sizes) <= 3 and len(files(tmp_path)) == MAX_SPARE
    assert folder.num_bytes <= MAX_SPARE * 2**17


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    folder, other, header = CopyFolder(tmp_path), CopyFolder(tmp_path), vector(1)
    write(folder, header)
    with other.reading(header.state, 0) as copy:
        folder.drop(since(2))
        with pytest.raises(CopyGoneError, match="no copy of device 0"), other.reading(header.state, 0):
            pass
        write(folder, *(vector(version) for version in range(2, 6)))
        np.testing.assert_array_equal(copy.buffer, contents(header))
    assert found(tmp_path) == [(version, 0, 0) for version in range(2, 6)]


def test_a_copy_that_another_process_replaced_is_not_the_first_ones_any_more(tmp_path: Path) -> None:
    folder, other = (write(CopyFolder(tmp_path), vector(1)) for _ in range(2))
    folder.drop(since(2))
    write(folder, vector(2), vector(3))
    other.drop(KeptStates())
    assert found(tmp_path) == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]


def test_generations_are_dropped_whoever_wrote_them_and_their_memory_is_given_back(tmp_path: Path) -> None:
    assert ended(process(lambda: write(CopyFolder(tmp_path), vector(1, 0, 1), vector(1, 1, 1)))) == 0
    own, other = CopyFolder(tmp_path), CopyFolder(tmp_path)
    write(own, *(vector(version, generation) for version in (1, 2) for generation in (0, 1, 2)))
    other.drop_generations(1)
    assert found(tmp_path) == [(1, 2, 0), (2, 2, 0)]
    own.drop(since(3))
    assert Path("/proc/self/maps").read_text().count(f"{tmp_path}/") == MAX_SPARE


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copies_folder(str(tmp_path), run="run", node="node")
    own = tmp_path / f"rayfcp-{os.getuid()}"
    assert path == own / "run" / "node" and copies_folder(str(tmp_path), run="run", node="node") == path
    own.chmod(0o710)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        copies_folder(str(tmp_path), run="run", node="node")
    own.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        copies_folder(str(tmp_path), run="run", node="node")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="rayfcp-12345 is not a folder of this user alone"):
        copies_folder(str(tmp_path), run="run", node="node")


def test_nobody_else_may_read_them_whatever_the_umask(tmp_path: Path) -> None:
    outer = os.umask(0)
    try:
        path = copies_folder(str(tmp_path), run="run", node="node")
        folder = write(CopyFolder(path), vector(1))
        _unfinished = folder.begin(vector(2))
    finally:
        os.umask(outer)
    modes = {each: stat.S_IMODE(each.stat().st_mode) for each in (path.parents[1], *path.parents[1].rglob("*"))}
    assert len(modes) == 3 + 3
    assert all(mode == (0o700 if each.is_dir() else 0o600) for each, mode in modes.items())


def test_a_full_file_system_is_an_error_that_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder, open_files = CopyFolder(tmp_path), num_open(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            folder.begin(vector(1))
    assert not files(tmp_path) and num_open(tmp_path) == open_files
    write(folder, vector(1))
    assert found(tmp_path) == [(1, 0, 0)]


@examples(20)
@given(st.integers(0, 250) | st.integers(PAGE, PAGE + 30))
def test_a_copy_with_a_damaged_head_is_ignored(at: int) -> None:
    """Another one beside it is not. What follows the text in the first page means nothing."""
    with TemporaryDirectory() as path:
        folder = write(CopyFolder(Path(path)), vector(1), vector(2), vector(3))
        (folder.path / "3-0-0.copy").rename(folder.path / "4-0-0.copy")  # damaged is any that is not of its name
        file = folder.path / "1-0-0.copy"
        whole = bytearray(file.read_bytes())
        at = at if whole[at] else 0
        whole[at] ^= 1
        file.write_bytes(whole)
        assert found(folder.path) == [(2, 0, 0)]
        with pytest.raises(CopyGoneError):
            folder.read(StateId(version=1, generation=0), 0, wanted=[], into=[])
        folder.close()


def test_a_folder_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "run" / "node"
    folder, other = write(CopyFolder(path), vector(1)), CopyFolder(path)
    unfinished = other.begin(vector(2))
    folder.remove()
    assert not path.parent.exists() and not other.headers()
    open_files = num_open(path)
    assert not unfinished.publish() and num_open(path) == open_files - 1
    write(other, vector(3))
    assert [each.state.version for each in other.headers()] == [3]


def test_memory_is_used_again_once_its_reader_is_done(tmp_path: Path) -> None:
    """Though that has its mapping still."""
    folder, other = write(CopyFolder(tmp_path), vector(1)), CopyFolder(tmp_path)
    with other.reading(StateId(version=1, generation=0), 0) as copy:
        pass
    folder.drop(since(2))
    assert len(files(tmp_path)) == 1, "it is kept for the next copy"
    np.testing.assert_array_equal(copy.buffer, contents(copy.header))
