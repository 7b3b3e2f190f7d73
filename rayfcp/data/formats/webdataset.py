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
from rayfcp.data.kinds import is_film, is_picture, kind_of
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import UnreadableFileError


def tar_records(handle: io.BufferedReader, file: InputFile, *, columns: TableColumns) -> Records:
    """Yield the rows of a WebDataset shard, a tar whose members of one row follow each other and share one name up to
    the first dot of its last part: `txt`, `text` or `caption` is its text, `json` an object of columns, and image
    files are its `images`, in their order. Other members are not read.

    Raises:
        UnreadableFileError: A member is a file of many rows.
    """
    watched: Any = _WatchedArchive(handle)
    with tarfile.open(fileobj=watched, mode="r|") as tar:
        keyed = ((*_key_of(member.name), member) for member in tar if member.isfile())
        for row, (_, group) in enumerate(groupby(keyed, key=itemgetter(0))):
            found, unread, media = {}, [], {"images": list[_File](), "videos": list[_File]()}
            for _, ending, member in group:
                if is_picture(f".{ending}") and (content := tar.extractfile(member)) is not None:
                    media["images"].append({"path": member.name, "bytes": content.read()})
                    continue
                if is_film(f".{ending}"):
                    media["videos"].append({"path": member.name})
                    continue
                content = tar.extractfile(member) if ending.lower() in _TAR_ENDINGS else None
                if content is None or _TAR_ENDINGS[ending.lower()] in found:
                    _check_one_row(member.name, kind_of(member.name), file=file)
                    unread.append(f".{ending}")
                else:
                    read = found[_TAR_ENDINGS[ending.lower()]] = content.read()
                    _check_one_row(member.name, "array" if ARRAY.match(read[:HEAD_BYTES]) else None, file=file)
            make = partial(_tar_record, found, media, row=row, text=columns.text, unread=tuple(unread))
            yield record_or_bad(file, make, row=row)
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
_TAR_ENDINGS = {"json": "json", "txt": "text", "text": "text", "caption": "text"}
_File = dict[str, Any]


def _tar_record(
    found: Mapping[str, bytes], media: Mapping[str, list[_File]], *, row: int, text: str, unread: tuple[str, ...]
) -> Record:
    if not found and not any(media.values()):
        raise BadRowError(BadReason.MISSING_COLUMN, f"neither json nor txt, but {', '.join(unread)}")
    values: dict[str, Any] = json_object(found["json"]) if "json" in found else {}
    if "text" in found and text in values:
        unread = (*unread, ".txt")
    elif "text" in found:
        values[text] = found["text"]
    for name, files in media.items():
        if files:
            single = None if values.get(name) else values.pop(name.removesuffix("s"), None)
            values[name] = _ordered(files, values.get(name) or single)
    return Record(row=row, values=values, unread=unread)


def _ordered(files: list[_File], names: Any) -> list[_File]:
    """Return the image files of a row, in the order of the `names` that its json gives, if any.

    Raises:
        BadRowError: `names` and `files` differ.
    """
    if not names:
        return files
    by_name = {each["path"].rpartition("/")[2]: each for each in files}
    wanted = [str(each).rpartition("/")[2] for each in (names if isinstance(names, list) else [names])]
    if set(wanted) != set(by_name):
        detail = f"its json names images {', '.join(wanted)[:80]}, beside it are {', '.join(by_name)[:80]}"
        raise BadRowError(BadReason.UNUSED_COLUMN, detail)
    return [by_name[each] for each in wanted]
