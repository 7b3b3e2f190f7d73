"""Rows of WebDataset shards."""

import io
import tarfile
from collections.abc import Mapping
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import IO, Any

from rayfcp.data.formats.base import Record, Records, TableColumns, record_or_bad
from rayfcp.data.formats.lines import ARRAY, HEAD_BYTES, json_object
from rayfcp.data.kinds import kind_of
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import UnreadableFileError


def tar_records(handle: io.BufferedReader, file: InputFile, *, columns: TableColumns) -> Records:
    """Yield the rows of a WebDataset shard, a tar whose members of one row follow each other and share one name up to
    the first dot of its last part: `txt` or `text` is its text, `json` an object of columns. Other members are not
    read.

    Raises:
        UnreadableFileError: A member is a file of many rows.
    """
    watched: Any = _WatchedArchive(handle)
    with tarfile.open(fileobj=watched, mode="r|") as tar:
        keyed = ((*_key_of(member.name), member) for member in tar if member.isfile())
        for row, (_, group) in enumerate(groupby(keyed, key=itemgetter(0))):
            found, unread = {}, []
            for _, ending, member in group:
                content = tar.extractfile(member) if ending.lower() in _TAR_ENDINGS else None
                if content is None or _TAR_ENDINGS[ending.lower()] in found:
                    _check_one_row(member.name, kind_of(member.name), file=file)
                    unread.append(f".{ending}")
                else:
                    read = found[_TAR_ENDINGS[ending.lower()]] = content.read()
                    _check_one_row(member.name, "array" if ARRAY.match(read[:HEAD_BYTES]) else None, file=file)
            yield record_or_bad(
                file, partial(_tar_record, found, row=row, text=columns.text, unread=tuple(unread)), row=row
            )
    end = watched.last[len(watched.last) - watched.position + tar.offset :]  # where tarfile stopped
    if len(end) < tarfile.BLOCKSIZE:  # tarfile accepts a truncated archive
        raise tarfile.ReadError("the archive breaks off: it has no blocks of zeros at its end")
    if any(block.strip(b"\0") for block in chain((end,), iter(partial(handle.read, _BLOCK_BYTES), b""))):
        raise tarfile.ReadError("more follows the end of the archive; unpack the archives that were joined")


def _key_of(path: str) -> tuple[tuple[str, str], str]:
    """Key and ending of a member; one beside it that keeps its attributes, as macOS writes it, has its key."""
    folder, _, name = path.rpartition("/")
    plain = name.removeprefix("._")
    stem, _, ending = plain.partition(".")
    return (folder, stem), ending if plain == name else f"_{ending}"


def _check_one_row(name: str, kind: str | None, *, file: InputFile) -> None:
    if kind not in (None, "text", "json"):
        problem = f"holds {name} ({kind}), must hold one row in each member"
        raise UnreadableFileError.of(file.url, problem, remedy="unpack it")


class _WatchedArchive:
    """File that is read from its start. `last` holds its last bytes read so far, which end at `position`."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle, self.last, self.position = handle, b"", 0

    def read(self, num_bytes: int) -> bytes:
        data = self._handle.read(num_bytes)
        self.last, self.position = (self.last + data)[-2 * tarfile.RECORDSIZE :], self.position + len(data)
        return data


_BLOCK_BYTES = 1 << 20
_TAR_ENDINGS = {"json": "json", "txt": "text", "text": "text"}


def _tar_record(found: Mapping[str, bytes], *, row: int, text: str, unread: tuple[str, ...]) -> Record:
    if not found:
        raise BadRowError(BadReason.MISSING_COLUMN, f"neither json nor txt, but {', '.join(unread)}")
    values: dict[str, Any] = json_object(found["json"]) if "json" in found else {}
    if "text" in found and text in values:
        unread = (*unread, ".txt")
    elif "text" in found:
        values[text] = found["text"]
    return Record(row=row, values=values, unread=unread)
