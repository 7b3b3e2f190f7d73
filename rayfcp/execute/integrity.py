"""Sums of the files of a checkpoint: what they were when they were written, and what has become of them."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """Size and CRC-32 of the file `name` of a folder."""

    name: str
    num_bytes: int
    crc32: int


def sum_files(folder: str | Path, names: Iterable[str]) -> tuple[FileSum, ...]:
    """Sums of these files in order of their names; each is read whole, a chunk at a time.

    Raises:
        OSError: one cannot be read.
    """
    return tuple(_sum(Path(folder) / name) for name in sorted(names))


def find_damage(folder: str | Path, sums: Sequence[FileSum]) -> str | None:
    """What is wrong with the first file that is not as it was, None if all are. Sizes come first: they cost nothing."""
    return find_wrong_size(folder, sums) or next(
        (found for each in sums if (found := _wrong_content(Path(folder), each))), None
    )


def find_wrong_size(folder: str | Path, sums: Sequence[FileSum]) -> str | None:
    """The same without reading: files that are missing, cut off or too long."""
    for each in sums:
        path = Path(folder) / each.name
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if num_bytes != each.num_bytes:
            return f"{path} holds {num_bytes} bytes, must be {each.num_bytes} as written"
    return None


def _wrong_content(folder: Path, want: FileSum) -> str | None:
    path = folder / want.name
    try:
        found = _sum(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None if found == want else f"{path} has checksum {found.crc32:08x}, must be {want.crc32:08x} as written"


def _sum(path: Path) -> FileSum:
    num_bytes, checksum = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            num_bytes, checksum = num_bytes + len(chunk), zlib.crc32(chunk, checksum)
    return FileSum(name=path.name, num_bytes=num_bytes, crc32=checksum)
