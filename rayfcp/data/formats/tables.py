"""Rows of tables in Parquet and in Arrow's IPC files and streams."""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfcp.data.formats.base import Record, Records, TableColumns, record_or_bad
from rayfcp.data.rows import BadReason, BadRowError, checked_text
from rayfcp.data.sources import InputFile

_COLUMN_ROWS, _LARGE_COLUMN_ROWS = 1024, 16
"""Rows of a Parquet batch: enough to amortise the call; few where each row may hold megabytes of images or logits."""


def parquet_records(handle: io.BufferedReader, file: InputFile, *, columns: TableColumns) -> Records:
    """Yield rows of the row groups that begin in the file's piece."""
    parquet = pq.ParquetFile(handle)
    names = parquet.schema_arrow.names
    files = _files(parquet.schema_arrow)
    chosen = list(dict.fromkeys((*columns.of_table(names, url=file.url), *files)))
    batch_rows = _LARGE_COLUMN_ROWS if columns.large.intersection(chosen) or files else _COLUMN_ROWS
    row = 0
    for group in range(parquet.metadata.num_row_groups):
        if file.is_piece and not file.start <= _offset(parquet.metadata.row_group(group)) < file.stop:
            continue
        for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=chosen):
            yield from _batch_records(batch, first=row, file=file, names=names)
            row += batch.num_rows


def _files(schema: pa.Schema) -> list[str]:
    """Return the columns that hold files (bytes and path) or lists of files. They are always read, so that none is
    lost."""
    kinds = ((field.name, field.type.value_type if _is_lists(field.type) else field.type) for field in schema)
    return [name for name, kind in kinds if pa.types.is_struct(kind) and {each.name for each in kind} == _FILE_FIELDS]


_FILE_FIELDS = {"bytes", "path"}


def _offset(group: Any) -> int:
    """Byte of the file at which the row group begins."""
    columns = (group.column(index) for index in range(group.num_columns))
    pages = ((column.data_page_offset, column.dictionary_page_offset) for column in columns)
    return min((offset for pair in pages for offset in pair if offset is not None), default=0)


def arrow_records(handle: io.BufferedReader, file: InputFile, *, columns: TableColumns) -> Records:
    """Yield rows of an IPC file or stream."""
    watched = _WatchedStream(handle)
    if handle.peek(6)[:6] == b"ARROW1":
        reader = pa.ipc.open_file(handle)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        reader = batches = pa.ipc.open_stream(watched)
    names = reader.schema.names
    chosen = list(dict.fromkeys((*columns.of_table(names, url=file.url), *_files(reader.schema))))
    row = 0
    for batch in batches:
        yield from _batch_records(batch.select(chosen), first=row, file=file, names=names)
        row += batch.num_rows
    if watched.is_at_end:  # pyarrow accepts a stream that is truncated between two batches
        raise EOFError("the stream breaks off: it has no mark of its end")
    if watched.is_used and handle.peek(1):
        raise ValueError("more follows the end of its stream")


class _WatchedStream:
    """File that is read from its start. `is_used`: it was read; `is_at_end`: the last read returned less than was
    requested."""

    def __init__(self, handle: io.BufferedReader) -> None:
        self._handle, self.closed, self.is_used, self.is_at_end = handle, False, False, False

    def read(self, num_bytes: int) -> bytes:
        data = self._handle.read(num_bytes)
        self.is_used, self.is_at_end = True, len(data) < num_bytes
        return data


def _batch_records(batch: pa.RecordBatch, *, first: int, file: InputFile, names: Sequence[str]) -> Records:
    """Yield rows of one record batch, numbered from `first`. `names` are all columns of its table."""
    read = batch.schema.names
    unread = tuple(name for name in dict.fromkeys(names) if name not in read)
    columns = [_as_bytes(column) for column in batch.columns]
    texts = frozenset(name for name, kind in zip(read, batch.schema.types, strict=True) if _is_text(kind))
    try:
        for column in columns:
            column.validate(full=True)  # broken bytes can hold offsets that point anywhere
        is_valid = True
    except pa.ArrowInvalid as error:
        if not _is_of_text(error):
            raise
        is_valid = False  # row by row, so that nested text that is not UTF-8 makes only its own row bad
    for at in range(batch.num_rows):
        values = dict(zip(read, columns if is_valid else [column.slice(at, 1) for column in columns], strict=True))
        place = at if is_valid else 0
        make = partial(_table_record, values, place, row=first + at, texts=texts, unread=unread)
        yield record_or_bad(file, make, row=first + at)


def _table_record(
    columns: Mapping[str, pa.Array], at: int, *, row: int, texts: frozenset[str], unread: tuple[str, ...]
) -> Record:
    values = {}
    for name, column in columns.items():
        try:
            if len(column) == 1:
                column.validate(full=True)
        except pa.ArrowInvalid as error:
            if not _is_of_text(error):
                raise
            raise BadRowError(BadReason.NOT_UTF8, f"in {name}") from error
        value = _value(column[at])
        values[name] = checked_text(value, name=name) if name in texts and value else value
    return Record(row=row, values=values, unread=unread)


def _is_of_text(error: pa.ArrowInvalid) -> bool:
    return "UTF8" in str(error)


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return the text column as bytes, whose encoding is then checked row by row."""
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
    """Return the value without the nulls that tables store for missing keys of objects, since templates would print
    them. A list of integers, or of equally long lists of numbers, becomes an array."""
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
