"""Images that cannot be read are not broken: reading is tried again, and errors name the file. Broken ones were
read."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfcp.config import ConfigError
from rayfcp.data import LengthIndex, Sampler, TokenReader, storage
from rayfcp.data.balance import FEWEST_ROWS, BrokenRows
from rayfcp.data.rows import BadReason, BadRow
from rayfcp.data.storage import UnreadableFileError
from rayfcp.data.vision import decoding
from rayfcp.data.vision.decoding import DecodedImages, ImageDecoder
from rayfcp.data.vision.processors import ImageTokenizer
from rayfcp.execute.parallel.membership import is_collective_failure
from rayfcp.values import GlobalBatch
from tests.data.vision.makers import image, saved
from tests.data.vision.test_rows import prepared

TRIES = 1 + len(storage.PAUSES_S)


class Pauses:
    """Stands for the pauses between tries: `during` is called in pause `at`."""

    def __init__(self) -> None:
        self.at, self.count, self.during = 0, 0, lambda: None

    def __call__(self, _: float) -> None:
        self.count += 1
        if self.count == self.at:
            self.during()

    def then(self, at: int, during: Callable[[], Any]) -> None:
        self.at, self.count, self.during = at, 0, during


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    found = Pauses()
    monkeypatch.setattr(time, "sleep", found)
    return found


class Shown:
    """A prepared row with an image, its image file, and what is decoded of it."""

    def __init__(self, folder: Path, tokenizer: ImageTokenizer) -> None:
        made = prepared(folder, tokenizer, {"text": ["<image>a"], "images": [[saved(image(40, 70))]]})
        self.file = Path(made.folder, made.shards[0].name.replace(".arrow", ".pictures"))
        self.shard, self.bytes = self.file.with_suffix(".arrow"), self.file.read_bytes()
        self.reader = TokenReader(made)
        sampler = Sampler(LengthIndex.open(made.folder, max_seqlen=1000), seed=0, global_batch=1)
        self.batch: GlobalBatch = sampler.batch(1)
        self.ticks = 0
        self._decoder = ImageDecoder(self.reader, tokenizer, on_item=self._tick)

    def _tick(self) -> None:
        self.ticks += 1

    def decoded(self) -> DecodedImages:
        return self._decoder.decode(self.batch, [(0, 0, 1)])[0, 0, 1]


@pytest.fixture
def shown(tmp_path: Path, qwen: ImageTokenizer) -> Shown:
    return Shown(tmp_path, qwen)


def moved(shown: Shown) -> None:
    shown.file.rename(shown.file.with_suffix(".away"))


def truncated(shown: Shown) -> None:
    shown.file.write_bytes(shown.bytes[: len(shown.bytes) // 2])


def emptied(shown: Shown) -> None:
    shown.file.write_bytes(b"")


def a_folder(shown: Shown) -> None:
    shown.file.unlink()
    shown.file.mkdir()


def a_dangling_link(shown: Shown) -> None:
    shown.file.unlink()
    shown.file.symlink_to("nowhere")


def the_whole_folder_is_gone(shown: Shown) -> None:
    shown.file.parent.rename(shown.file.parent.with_name("away"))


def another_one(shown: Shown) -> None:
    """The file is larger, so all bytes of the image can be read but mean nothing."""
    shown.file.write_bytes(bytes(2 * len(shown.bytes)))


LOSSES = [moved, truncated, emptied, a_folder, a_dangling_link, the_whole_folder_is_gone, another_one]


@pytest.mark.parametrize("lose", LOSSES)
def test_an_image_file_that_is_lost_is_named(shown: Shown, pauses: Pauses, lose: Callable[[Shown], None]) -> None:
    want = shown.decoded().values
    lose(shown)
    with pytest.raises(UnreadableFileError, match=rf"^{shown.file} cannot be read after {TRIES} tries: ") as found:
        shown.decoded()
    assert "\n" not in str(found.value)
    assert pauses.count == len(storage.PAUSES_S)

    def back() -> None:
        shutil.rmtree(shown.file, ignore_errors=True)
        shown.file.parent.mkdir(exist_ok=True)
        shown.file.unlink(missing_ok=True)
        shown.file.write_bytes(shown.bytes)

    pauses.then(2, back)
    found_again = shown.decoded()
    np.testing.assert_array_equal(found_again.values, want)
    assert (found_again.broken, pauses.count, shown.ticks) == ((), 2, 2)


class BusyError(Exception):
    status = 503


OF_STORAGE = [
    OSError(5, "Input/output error"),
    PermissionError(13, "Permission denied"),
    TimeoutError("timed out"),
    ConnectionResetError(104, "Connection reset by peer"),
    BusyError("slow down"),
    MemoryError("no room"),
    OSError(116, "Stale file handle"),
]


@pytest.mark.parametrize(
    ("place", "error"),
    [
        *(("read_part", error) for error in OF_STORAGE),
        *(("decoded", error) for error in OF_STORAGE if isinstance(error, MemoryError) or getattr(error, "errno", 0)),
        ("decoded", OSError("out of memory error when reading image file")),
    ],
)
def test_errors_of_storage_and_of_memory_break_no_image(
    shown: Shown, pauses: Pauses, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    want, real = shown.decoded().values, getattr(decoding, place)

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(decoding, place, fails)
    with pytest.raises(UnreadableFileError, match=type(error).__name__) as found:
        shown.decoded()
    assert not is_collective_failure(found.value), "no exchange between devices failed"
    pauses.then(1, lambda: monkeypatch.setattr(decoding, place, real))
    np.testing.assert_array_equal(shown.decoded().values, want)


@pytest.mark.parametrize("where", ["image", "elsewhere"])
def test_only_complete_bytes_break(shown: Shown, pauses: Pauses, where: str) -> None:
    """Other bytes of the same length: an image that cannot be decoded, or the row's own."""
    changed = bytearray(shown.bytes)
    changed[len(changed) // 2 :] = bytes(len(changed) - len(changed) // 2)
    shown.file.write_bytes(bytes(changed) if where == "image" else shown.bytes)
    found = shown.decoded()
    assert bool(found.broken) == (where == "image")
    assert found.values.any() != bool(found.broken)
    assert pauses.count == 0


def test_a_token_shard_that_is_lost_is_named_too(shown: Shown, pauses: Pauses) -> None:
    (sample,) = shown.batch.samples
    data = shown.shard.read_bytes()
    shown.shard.unlink()
    with pytest.raises(UnreadableFileError, match=rf"^{shown.shard} cannot be read after {TRIES} tries: FileNotFound"):
        shown.reader.read(sample, start=0, stop=2)
    pauses.then(3, lambda: shown.shard.write_bytes(data))
    assert shown.reader.read(sample, start=0, stop=2)[0].size == 2


def broken(number: int) -> BadRow:
    return BadRow(shard="a.arrow", row=number, reason=BadReason.IMAGE_BROKEN, detail=f"try {number}")


@pytest.mark.parametrize(
    ("num_rows", "num_seen", "fraction", "most"),
    [
        (8, 4, 0.01, 0),  # as at preparation, where one of eight is too many
        (1000, 4, 0.01, 10),
        (10**6, 4, 0.01, FEWEST_ROWS // 100),
        (10**6, 50_000, 0.01, 500),
        (2000, 50_000, 0.01, 20),  # later epochs bring no other rows
        (100, 100, 0.5, 50),
        (100, 4, 1.0, 100),
        (100, 4, 0.0, 0),
    ],
)
def test_broken_rows_are_bounded_over_the_rows_seen(num_rows: int, num_seen: int, fraction: float, most: int) -> None:
    rows = BrokenRows(num_rows=num_rows, max_bad_fraction=fraction)
    assert rows.add(map(broken, range(most))) == list(map(broken, range(most)))
    assert rows.add(map(broken, range(most))) == [], "each counts once"
    rows.check(num_seen=num_seen)
    if most < num_rows:
        rows.add([broken(most)])
        with pytest.raises(
            ConfigError, match=rf"{most + 1:,} of .*data.max_bad_fraction allows {fraction:g}; first: a.ar"
        ):
            rows.check(num_seen=num_seen)


def test_rows_that_are_known_are_no_news() -> None:
    rows = BrokenRows(num_rows=100, max_bad_fraction=0.01, known={broken(3).place: str(broken(3))})
    assert (rows.add([broken(3), broken(4)]), len(rows)) == ([broken(4)], 2)
    with pytest.raises(ConfigError, match=r"2 of 100 rows \(2.00%\).*first: a.arrow row 4: picture_broken \(try 3\)"):
        rows.check(num_seen=8)
