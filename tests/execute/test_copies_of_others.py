"""What processes find in shared memory whenever a writer, a reader or one that cleans up stops between two lines, or
dies."""

import os
import random
import signal
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfcp.execute.state.copies import MAX_SPARE, CopyFolder, CopyGoneError, remove_abandoned
from tests.execute.copying import (
    between_lines,
    contents,
    ended,
    files,
    found,
    living,
    process,
    since,
    vector,
    write,
)
from tests.waiting import until


class Writer:
    """Writes versions 0 to 3 and keeps two of them, in memory that is used again."""

    def __init__(self, path: Path) -> None:
        self._folder, self.needed, self.oldest = CopyFolder(path), set[int](), 0

    def run(self) -> None:
        for version in range(4):
            self.oldest = max(0, version - 1)
            self.needed.discard(version - 2)
            self._folder.drop(since(self.oldest))
            write(self._folder, vector(version))
            self.needed.add(version)


def test_a_writer_that_is_killed_at_any_line_leaves_whole_copies(tmp_path: Path) -> None:
    """Those that it had published; and nothing else, once copies of the dead are dropped."""

    def die_at(line: int, path: Path) -> None:
        between_lines(Writer(path).run, lambda at: at == line and os.kill(os.getpid(), signal.SIGKILL))

    newest, code = [], -1
    while code:
        path = tmp_path / str(len(newest))
        code = ended(process(partial(die_at, len(newest), path)))
        versions = [version for version, *_ in found(path)]
        assert versions == list(range(4))[versions[0] : versions[-1] + 1] if versions else code
        newest.append(max(versions, default=-1))
        folder = CopyFolder(path)
        folder.drop(since(4), of_dead=True)
        assert not files(path)
        folder.close()
    assert newest == sorted(newest) and set(newest) == set(range(-1, 4)) and code == 0


def test_a_writer_that_is_killed_while_it_writes_bytes_leaves_whole_copies(tmp_path: Path) -> None:
    def work() -> None:
        folder = CopyFolder(tmp_path)
        for version in range(1000):
            folder.drop(since(version - 1))
            write(folder, vector(version, size=2**20))

    drawn, folder = random.Random(0), CopyFolder(tmp_path)
    for _ in range(10):
        pid = process(work)
        until(lambda: [*tmp_path.glob("[1-9]*.copy")], every_s=0.001)
        time.sleep(0.02 * drawn.random())
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        assert 1 <= len(found(tmp_path)) <= 3
        folder.drop(since(1000), of_dead=True)
        assert not files(tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_kept_can_be_read_between_any_two_lines_of_its_writer(seed: int, tmp_path: Path) -> None:
    """What another process drops of the dead is not the writer's."""
    writer, other, seen, drawn = Writer(tmp_path), CopyFolder(tmp_path), set[int](), random.Random(seed)

    def look(_: int) -> None:
        if drawn.random() < 0.5:  # not always, as the writer tries again
            other.drop(since(4), of_dead=True)
        headers = {header.state.version: header for header in other.headers()}
        assert writer.needed <= headers.keys()
        for version, header in headers.items():
            with nullcontext() if version >= writer.oldest else suppress(CopyGoneError):
                with other.reading(header.state, 0) as copy:
                    np.testing.assert_array_equal(copy.buffer, contents(header))
                seen.add(version)

    between_lines(writer.run, look)
    assert seen == {0, 1, 2, 3}


def test_a_reader_gets_one_whole_copy_or_none(tmp_path: Path) -> None:
    """Between any two of its lines, the copy may be dropped and one of other parts be written to its memory."""
    folder, other, results, version = CopyFolder(tmp_path), CopyFolder(tmp_path), list[str](), 0

    def replace() -> None:
        nonlocal version
        version += 1
        folder.drop(since(version))
        write(folder, vector(version, start=version % 10))

    def read() -> str:
        try:
            for header in other.headers():
                assert header == vector(header.state.version, start=header.state.version % 10)
                last = header.entries[1]
                buffers = [np.empty(20, np.uint8), np.empty(last.num_bytes - 20, np.uint8)]
                other.read(header.state, 0, wanted=[(last.name, "parameter", last.box)], into=[buffers])
                np.testing.assert_array_equal(np.concatenate(buffers), contents(header)[last.start_byte :])
        except CopyGoneError:
            return "gone"
        return "whole"

    replace()
    num_lines = between_lines(read, lambda _: None)
    for number in range(num_lines):
        between_lines(lambda: results.append(read()), lambda line, chosen=number: line == chosen and replace())
    assert set(results) == {"gone", "whole"} and version == num_lines + 1 > 20
    assert len(files(tmp_path)) <= 1 + MAX_SPARE


def test_what_the_dead_left_is_dropped_and_nothing_of_the_living(tmp_path: Path) -> None:
    def leave(number: int) -> tuple[CopyFolder, Any]:
        folder = write(CopyFolder(tmp_path), vector(1, 0, number), vector(2, 0, number))
        return folder, folder.begin(vector(3, 0, number))

    assert ended(process(lambda: leave(1))) == 0
    with living(lambda: leave(2)):
        own, unfinished = leave(3)
        own.drop(since(2))
        assert len(found(tmp_path)) == 5 and len(files(tmp_path)) == 5 + 3 + 1
        own.drop(since(2), of_dead=True)
        assert found(tmp_path) == [(1, 0, 2), (2, 0, 1), (2, 0, 2), (2, 0, 3)]
        assert len(files(tmp_path)) == 4 + 2 + 1
    unfinished.discard()


def test_copies_of_a_dead_node_on_this_machine_are_taken_over(tmp_path: Path) -> None:
    old, other, path = (tmp_path / name for name in ("old", "other", "new"))
    assert ended(process(lambda: write(CopyFolder(old), vector(1), vector(2), vector(3)))) == 0
    with living(lambda: write(CopyFolder(other), vector(4))):
        folder = write(CopyFolder(path), vector(2))
        folder.adopt()
        assert found(path) == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
        assert found(other) == [(4, 0, 0)] and not old.exists()
        folder.drop(since(3))
        write(folder, vector(5))  # to the memory of its own version 2
        assert found(path) == [(1, 0, 0), (3, 0, 0), (5, 0, 0)]
    folder.adopt()
    assert found(path) == [(1, 0, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0)]


def test_whoever_takes_them_over_all_see_all(tmp_path: Path) -> None:
    """Processes of the node's folder that ask at the same time."""
    path, count = tmp_path / "new", 30

    def look() -> None:
        folder = CopyFolder(path)
        folder.adopt()
        assert len(folder.headers()) == count

    for round in range(5):
        old = tmp_path / f"old-{round}"
        assert ended(process(lambda to=old: write(CopyFolder(to), *map(vector, range(count))))) == 0
        assert [ended(each) for each in [process(look) for _ in range(4)]] == [0] * 4
        CopyFolder(path).drop(since(count), of_dead=True)


def test_old_folders_of_other_runs_are_removed_if_nobody_lives_there(tmp_path: Path) -> None:
    own, dead, young, alive = (tmp_path / run / "node" for run in ("own", "dead", "young", "alive"))
    for path in (own, own.parent / "another", dead, young):
        assert ended(process(lambda to=path: write(CopyFolder(to), vector(1)))) == 0
    with living(lambda: write(CopyFolder(alive), vector(1))):
        for path in (own.parent / "another", dead, alive):
            os.utime(path, (0, time.time() - 3600))
        remove_abandoned(own, age_s=1800)
        left = {each.relative_to(tmp_path).as_posix() for each in tmp_path.glob("*/*")}
        assert left == {"own/node", "own/another", "young/node", "alive/node"} and not dead.parent.exists()
