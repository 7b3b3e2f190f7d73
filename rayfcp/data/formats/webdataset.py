"""Rows of WebDataset shards."""

import io
import tarfile
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import IO, Any

from rayfcp.data.formats.base import Record, Records, TableColumns, record_or_bad
from rayfcp.data.formats.lines import json_object
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.sources import InputFile


def tar_records(handle: io.BufferedReader, file: InputFile, *, columns: TableColumns) -> Records:
    """Yield the rows of a WebDataset shard, a tar whose members of one row follow each other and share one name up to
    the first dot of its last part: `txt` or `text` is its text, `json` an object of columns. Other members are not
    read."""
    watched: Any = _WatchedArchive(handle)
    with tarfile.open(fileobj=watched, mode="r|") as tar:
        members = ((member.name.rpartition("/"), member) for member in tar if member.isfile())
        keyed = (
            ((folder, name.partition(".")[0]), name.partition(".")[2], each) for (folder, _, name), each in members
        )
        for row, (_, group) in enumerate(groupby(keyed, key=itemgetter(0))):
            found, unread = {}, []
            for _, ending, member in group:
                content = tar.extractfile(member) if ending in _TAR_ENDINGS else None
                if content is None or _TAR_ENDINGS[ending] in found:
                    unread.append(f".{ending}")
                else:
                    found[_TAR_ENDINGS[ending]] = content.read()
            yield record_or_bad(
                file, partial(_tar_record, found, row=row, text=columns.text, unread=tuple(unread)), row=row
            )
    if watched.last.strip(b"\0"):  # tarfile accepts a truncated archive
        raise tarfile.ReadError("the archive breaks off: it has no blocks of zeros at its end")


class _WatchedArchive:
    """File that is read from its start to its end. `last` holds the last 512 bytes read so far."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle, self.last = handle, b""

    def read(self, num_bytes: int) -> bytes:
        data = self._handle.read(num_bytes)
        self.last = (self.last + data)[-512:]
        return data


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
