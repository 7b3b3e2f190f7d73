"""Rows of Parquet and Arrow IPC files: a text column, or `input_ids` with optional `labels`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfcp.data.rows import BadReason, BadRow, RawRow
from rayfcp.data.sources import InputFile
from rayfcp.data.vision.records import COLUMNS, raw_pictures

_BATCH_ROWS = 1024
_BATCH_PICTURE_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What is read of rows beside `input_ids` and `labels`: a text, with `pictures` also those and messages."""

    text: str
    pictures: bool = False


def parquet_rows(handle: IO[bytes], *, file: InputFile, columns: Columns) -> Iterator[RawRow | BadRow]:
    """Rows of the row groups that begin in the file's piece. A group that breaks off is bad from there to its end.

    Raises:
        OSError, pyarrow.ArrowException: The footer cannot be read (the first piece only: it speaks for all).
    """
    try:
        parquet = pq.ParquetFile(handle)
    except (pa.ArrowException, OSError):
        if file.start == 0:
            raise
        return
    names = _wanted(parquet.schema_arrow, columns)
    batch_rows = _BATCH_PICTURE_ROWS if set(names) & set(COLUMNS) else _BATCH_ROWS
    row = 0
    for group in range(parquet.metadata.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        if file.is_piece and not file.start <= _offset(metadata) < file.stop:
            continue
        group_stop = row + metadata.num_rows
        try:
            for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=names):
                yield from _batch_rows(batch, first=row, shard=file.url, columns=columns)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            yield _unreadable(file.url, row=row, num_rows=group_stop - row, error=error)
        row = group_stop


def arrow_rows(handle: IO[bytes], *, file: InputFile, columns: Columns) -> Iterator[RawRow | BadRow]:
    """Rows of an IPC file or stream.

    Raises:
        OSError, pyarrow.ArrowException: Broken from the row after the last one given.
    """
    magic = handle.read(6)
    handle.seek(0)
    row = 0
    for batch in _file_batches(handle) if magic == b"ARROW1" else pa.ipc.open_stream(handle):
        yield from _batch_rows(batch, first=row, shard=file.url, columns=columns)
        row += batch.num_rows


def _file_batches(handle: IO[bytes]) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(handle)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _offset(group: Any) -> int:
    """Where the row group begins, in bytes of the file."""
    columns = (group.column(index) for index in range(group.num_columns))
    pages = ((column.data_page_offset, column.dictionary_page_offset) for column in columns)
    return min((offset for pair in pages for offset in pair if offset is not None), default=0)


def _wanted(schema: pa.Schema, wanted: Columns) -> list[str]:
    """The columns to read; a column that is there twice counts as none."""
    has = {name for name in ("input_ids", "labels", wanted.text, *COLUMNS) if schema.get_field_index(name) >= 0}
    if wanted.pictures and has.intersection(COLUMNS):
        return [name for name in (*COLUMNS, wanted.text, "input_ids", "labels") if name in has]
    if "input_ids" in has:
        return [name for name in ("input_ids", "labels") if name in has]
    return [wanted.text] if wanted.text in has else []


def _batch_rows(batch: pa.RecordBatch, *, first: int, shard: str, columns: Columns) -> Iterator[RawRow | BadRow]:
    """The rows of one record batch, numbered from `first`."""
    names = _wanted(batch.schema, columns)
    if batch.num_rows == 0:
        return
    if not names:
        detail = f"neither input_ids nor {columns.text}"
        yield _bad(shard, row=first, reason=BadReason.MISSING_COLUMN, detail=detail, num_rows=batch.num_rows)
        return
    if set(names) & set(COLUMNS):
        yield from _picture_rows(batch.select(names), first=first, shard=shard, columns=columns)
        return
    found = [_plain(batch.column(name)) for name in names]
    wrong = [
        f"{name} is {batch.schema.field(name).type}"
        for name, column in zip(names, found, strict=True)
        if column is None
    ]
    if wrong:
        yield _bad(shard, row=first, reason=BadReason.WRONG_TYPE, detail=wrong[0], num_rows=batch.num_rows)
    elif names[0] == "input_ids":
        yield from _token_rows(found, first=first, shard=shard)
    else:
        yield from _text_rows(found[0], first=first, shard=shard, name=columns.text)


def _plain(column: pa.Array) -> pa.Array | None:
    """The column as large_binary (text) or large_list of whole numbers, its buffers checked; None for other types."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        # Not UTF-8 is a fault of one row, told by row: the whole column is only checked as bytes.
        column = column.cast(pa.binary_view() if pa.types.is_string_view(kind) else _binary_of(kind))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not pa.types.is_integer(kind.value_type):
            return None
    elif not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return None
    # Broken bytes can hold offsets that point anywhere.
    column.validate(full=True)
    is_text = not pa.types.is_nested(column.type)
    return column.cast(pa.large_binary() if is_text else pa.large_list(kind.value_type))


def _binary_of(kind: pa.DataType) -> pa.DataType:
    return pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()


def _text_rows(column: pa.Array, *, first: int, shard: str, name: str) -> Iterator[RawRow | BadRow]:
    for row, scalar in enumerate(column, first):
        data = scalar.as_py()
        if data is None:
            yield _bad(shard, row=row, reason=BadReason.WRONG_TYPE, detail=f"{name} is null")
        elif not data:
            yield _bad(shard, row=row, reason=BadReason.EMPTY)
        else:
            try:
                yield RawRow(row=row, text=data.decode())
            except UnicodeDecodeError as error:
                yield _bad(shard, row=row, reason=BadReason.NOT_UTF8, detail=f"byte {error.start}")


def _picture_rows(batch: pa.RecordBatch, *, first: int, shard: str, columns: Columns) -> Iterator[RawRow | BadRow]:
    for row in range(batch.num_rows):
        one = batch.slice(row, 1)
        try:
            # Broken bytes can hold offsets that point anywhere.
            one.validate(full=True)
        except pa.ArrowInvalid as error:
            yield _unreadable(shard, row=first + row, num_rows=1, error=error)
            continue
        (record,) = one.to_pylist()
        pictures, text = raw_pictures(record, text_column=columns.text), record.get(columns.text)
        if record.get("input_ids") is not None:
            yield RawRow(row=first + row, tokens=record["input_ids"], labels=record.get("labels"), pictures=pictures)
        elif pictures is not None:
            yield RawRow(row=first + row, pictures=pictures)
        elif isinstance(text, str) and text:
            yield RawRow(row=first + row, text=text)
        else:
            reason = BadReason.EMPTY if text == "" else BadReason.WRONG_TYPE
            yield _bad(
                shard, row=first + row, reason=reason, detail="" if text == "" else f"{columns.text} must be text"
            )


def _token_rows(columns: list[pa.Array], *, first: int, shard: str) -> Iterator[RawRow | BadRow]:
    for row, scalars in enumerate(zip(*columns, strict=True), first):
        lists = [scalar.values for scalar in scalars]
        if lists[0] is None or any(values is not None and values.null_count for values in lists):
            yield _bad(shard, row=row, reason=BadReason.WRONG_TYPE, detail="null in input_ids or labels")
            continue
        arrays = [None if values is None else values.to_numpy(zero_copy_only=False) for values in lists]
        yield RawRow(row=row, tokens=arrays[0], labels=arrays[1] if len(arrays) > 1 else None)


def _unreadable(shard: str, *, row: int, num_rows: int, error: Exception) -> BadRow:
    detail = " ".join(str(error).split())[:120]
    return _bad(shard, row=row, reason=BadReason.UNREADABLE, detail=detail, num_rows=max(num_rows, 1))


def _bad(shard: str, *, row: int, reason: BadReason, detail: str = "", num_rows: int = 1) -> BadRow:
    return BadRow(shard=shard, row=row, reason=reason, detail=detail, num_rows=num_rows)
