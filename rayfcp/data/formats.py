"""Records of one input file, in order, whatever its format: text, JSON Lines, Parquet, Arrow IPC or WebDataset."""

import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfcp.data.manifest import resolve
from rayfcp.data.rows import BadReason, BadRow, BadRowError, checked_text
from rayfcp.data.sources import InputFile

_COLUMN_ROWS, _LARGE_COLUMN_ROWS = 1024, 16
"""Rows of a Parquet batch: enough to amortise the call; few where each row may hold megabytes of images or logits."""

_BROKEN = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    MemoryError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
)
"""Errors of the formats' readers on broken bytes: EOFError for a truncated archive, ValueError for a name that is not
UTF-8, MemoryError for a message that claims terabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of a file: number `row` (from 0), its `values` by column, and the `unread` columns, whose values were not
    looked at. A text may be bytes; lists of integers may be arrays."""

    row: int
    values: Mapping[str, Any]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """What is read of files with columns.

    Attributes:
        text: Column that stands for the whole of a text file or member.
        choose: Return the columns to read of a table with these names; raises BadRowError if none can be used.
        large: Columns whose rows may hold megabytes each.
    """

    text: str
    choose: Callable[[Sequence[str]], list[str]]
    large: frozenset[str] = frozenset()


_Records = Iterator[Record | BadRow]


def read_records(file: InputFile, columns: TableColumns) -> Iterator[Record | BadRow]:
    """Yield every row of the file, or why it cannot be read. Row numbers count from the piece's start.

    A file that breaks off gives the rows before the break and one BadRow for the rest.
    """
    next_row = 0
    try:
        fs, path = resolve(file.url)
        with fs.open(path, "rb", compression="infer" if file.is_compressed else None) as handle:
            for record in _READERS[file.format](handle, file, columns):
                yield record
                next_row = record.row + (record.num_rows if isinstance(record, BadRow) else 1)
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        yield BadRowError(BadReason.UNREADABLE, error).at(file.url, row=next_row)


def _row(file: InputFile, row: int, make: Callable[[], Record]) -> Record | BadRow:
    try:
        return make()
    except pa.ArrowInvalid as error:
        return BadRowError(BadReason.UNREADABLE, error).at(file.url, row=row)
    except BadRowError as error:
        return error.at(file.url, row=row)


def _text_records(handle: IO[bytes], file: InputFile, columns: TableColumns) -> _Records:  # noqa: ARG001
    """Yield the whole file as one row."""
    yield Record(row=0, values={columns.text: handle.read()})


def _jsonl_records(handle: IO[bytes], file: InputFile, columns: TableColumns) -> _Records:  # noqa: ARG001
    """Yield one row for each line that begins in the file's piece."""
    for row, line in enumerate(_lines(handle, file)):
        yield _row(file, row, partial(_json_record, line, row=row))


def _lines(handle: IO[bytes], file: InputFile) -> Iterator[bytes]:
    position = file.start
    if position:
        # A line that begins exactly at `start` belongs to this piece: look for a line end from the byte before.
        handle.seek(position - 1)
        position += len(handle.readline()) - 1
    while file.is_compressed or position < file.stop:
        line = handle.readline()
        if not line:
            return
        position += len(line)
        yield line


def _json_record(line: bytes, *, row: int) -> Record:
    return Record(row=row, values=_object(line))


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(checked_text(line.strip(), name="the line").removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise BadRowError(BadReason.BAD_JSON, error) from error
    if not isinstance(values, dict):
        raise BadRowError(BadReason.WRONG_TYPE, "the line must hold an object")
    return values


def _tar_records(handle: IO[bytes], file: InputFile, columns: TableColumns) -> _Records:
    """Yield the rows of a WebDataset shard, a tar whose members of one row follow each other and share one name up to
    the first dot of its last part: `txt` or `text` is its text, `json` an object of columns. Others are not read."""
    watched: Any = _Watched(handle)
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
            yield _row(file, row, partial(_tar_record, found, row=row, text=columns.text, unread=tuple(unread)))
    if watched.last.strip(b"\0"):  # the library takes a truncated archive for one that ends there
        raise tarfile.ReadError("the archive breaks off: it has no blocks of zeros at its end")


class _Watched:
    """A file that is read from its start to its end; `last`: its last 512 bytes so far."""

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
    values: dict[str, Any] = _object(found["json"]) if "json" in found else {}
    if "text" in found and text in values:
        unread = (*unread, ".txt")
    elif "text" in found:
        values[text] = found["text"]
    return Record(row=row, values=values, unread=unread)


def _parquet_records(handle: IO[bytes], file: InputFile, columns: TableColumns) -> _Records:
    """Yield rows of the row groups that begin in the file's piece. A group that breaks off is bad from there to its
    end."""
    try:
        parquet = pq.ParquetFile(handle)
    except (pa.ArrowException, OSError):
        if file.start == 0:  # the first piece reports a broken footer for all
            raise
        return
    row = 0
    for group in range(parquet.metadata.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        if file.is_piece and not file.start <= _offset(metadata) < file.stop:
            continue
        group_stop = row + metadata.num_rows
        try:
            for batch in _group_batches(parquet, group, columns=columns):
                yield from _batch_records(batch, first=row, file=file, names=parquet.schema_arrow.names)
                row += batch.num_rows
        except BadRowError as error:
            yield error.at(file.url, row=row, num_rows=metadata.num_rows)
        except (pa.ArrowException, OSError) as error:
            unreadable = BadRowError(BadReason.UNREADABLE, error)
            yield unreadable.at(file.url, row=row, num_rows=max(group_stop - row, 1))
        row = group_stop


def _group_batches(parquet: pq.ParquetFile, group: int, *, columns: TableColumns) -> Iterator[pa.RecordBatch]:
    names = _chosen(parquet.schema_arrow.names, columns)
    batch_rows = _LARGE_COLUMN_ROWS if columns.large.intersection(names) else _COLUMN_ROWS
    return parquet.iter_batches(batch_rows, row_groups=[group], columns=names)  # type: ignore[no-any-return]


def _chosen(names: Sequence[str], columns: TableColumns) -> list[str]:
    """Columns to read; a column that occurs twice counts as absent."""
    return columns.choose([name for name in names if names.count(name) == 1])


def _offset(group: Any) -> int:
    """Byte of the file at which the row group begins."""
    columns = (group.column(index) for index in range(group.num_columns))
    pages = ((column.data_page_offset, column.dictionary_page_offset) for column in columns)
    return min((offset for pair in pages for offset in pair if offset is not None), default=0)


def _arrow_records(handle: IO[bytes], file: InputFile, columns: TableColumns) -> _Records:
    """Yield rows of an IPC file or stream."""
    magic = handle.read(6)
    handle.seek(0)
    row = 0
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(handle)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = pa.ipc.open_stream(handle)
    for batch in batches:
        try:
            chosen = batch.select(_chosen(batch.schema.names, columns))
        except BadRowError as error:
            yield error.at(file.url, row=row, num_rows=batch.num_rows)
        else:
            yield from _batch_records(chosen, first=row, file=file, names=batch.schema.names)
        row += batch.num_rows


def _batch_records(batch: pa.RecordBatch, *, first: int, file: InputFile, names: Sequence[str]) -> _Records:
    """Yield rows of one record batch, numbered from `first`. `names`: of all columns of its table."""
    read = batch.schema.names
    unread = tuple(name for name in dict.fromkeys(names) if name not in read)
    columns = [_as_bytes(column) for column in batch.columns]
    texts = frozenset(name for name, kind in zip(read, batch.schema.types, strict=True) if _is_text(kind))
    try:
        for column in columns:
            column.validate(full=True)  # broken bytes can hold offsets that point anywhere
        is_valid = True
    except pa.ArrowInvalid:  # text that is not UTF-8 within lists and objects is an error of its row alone: row by row
        is_valid = False
    for at in range(batch.num_rows):
        values = dict(zip(read, columns if is_valid else [column.slice(at, 1) for column in columns], strict=True))
        place = at if is_valid else 0
        yield _row(file, first + at, partial(_table_record, values, place, row=first + at, texts=texts, unread=unread))


def _table_record(
    columns: Mapping[str, pa.Array], at: int, *, row: int, texts: frozenset[str], unread: tuple[str, ...]
) -> Record:
    values = {}
    for name, column in columns.items():
        if len(column) == 1:
            column.validate(full=True)
        value = _value(column[at])
        values[name] = checked_text(value, name=name) if name in texts and value else value
    return Record(row=row, values=values, unread=unread)


def _as_bytes(column: pa.Array) -> pa.Array:
    """The column with text as bytes, whose encoding is checked row by row."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(_BINARY[column.type]) if column.type in _BINARY else column


def _is_text(kind: pa.DataType) -> bool:
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in _BINARY


_BINARY = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def _value(scalar: pa.Scalar) -> Any:
    """The value, without the nulls that tables fill missing keys of objects with, which templates would print; an array
    if it is a list of integers, or of lists of numbers of one length."""
    kind = scalar.type
    values = scalar.values if _is_lists(kind) else None
    if values is None:
        return _without_nulls(scalar.as_py())
    if pa.types.is_integer(kind.value_type) and not values.null_count:
        return values.to_numpy(zero_copy_only=False)
    if _is_lists(kind.value_type):
        numbers = values.flatten()
        widths = pc.unique(pc.list_value_length(values)).to_pylist()
        if len(widths) == 1 and numbers.null_count == 0 and _is_number(numbers.type):
            return numbers.to_numpy(zero_copy_only=False).reshape(len(values), *widths)
    return _without_nulls(scalar.as_py())


def _is_lists(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[IO[bytes], InputFile, TableColumns], _Records]] = {
    "text": _text_records,
    "jsonl": _jsonl_records,
    "parquet": _parquet_records,
    "arrow": _arrow_records,
    "webdataset": _tar_records,
}
