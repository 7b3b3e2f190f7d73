"""Rows of Parquet and Arrow IPC files: a text column, or `input_ids` with optional `labels`.

The rows of one input file, whatever its format, good or broken, in order.
"""

import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfcp.data.manifest import resolve
from rayfcp.data.rows import BadReason, BadRow, BadRowError, RawRow, Row, make_row
from rayfcp.data.sources import InputFile
from rayfcp.data.tokenizer import Tokenizer
from rayfcp.data.vision.processors import PictureTokenizer
from rayfcp.data.vision.rows import COLUMNS, PictureRules, picture_row, raw_pictures

_COLUMN_ROWS = 1024
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
    batch_rows = _BATCH_PICTURE_ROWS if set(names) & set(COLUMNS) else _COLUMN_ROWS
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
        yield _bad_column(shard, row=first, reason=BadReason.MISSING_COLUMN, detail=detail, num_rows=batch.num_rows)
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
        yield _bad_column(shard, row=first, reason=BadReason.WRONG_TYPE, detail=wrong[0], num_rows=batch.num_rows)
    elif names[0] == "input_ids":
        yield from _token_rows(found, first=first, shard=shard)
    else:
        yield from _column_texts(found[0], first=first, shard=shard, name=columns.text)


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


def _column_texts(column: pa.Array, *, first: int, shard: str, name: str) -> Iterator[RawRow | BadRow]:
    for row, scalar in enumerate(column, first):
        data = scalar.as_py()
        if data is None:
            yield _bad_column(shard, row=row, reason=BadReason.WRONG_TYPE, detail=f"{name} is null")
        elif not data:
            yield _bad_column(shard, row=row, reason=BadReason.EMPTY)
        else:
            try:
                yield RawRow(row=row, text=data.decode())
            except UnicodeDecodeError as error:
                yield _bad_column(shard, row=row, reason=BadReason.NOT_UTF8, detail=f"byte {error.start}")


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
            yield _bad_column(
                shard, row=first + row, reason=reason, detail="" if text == "" else f"{columns.text} must be text"
            )


def _token_rows(columns: list[pa.Array], *, first: int, shard: str) -> Iterator[RawRow | BadRow]:
    for row, scalars in enumerate(zip(*columns, strict=True), first):
        lists = [scalar.values for scalar in scalars]
        if lists[0] is None or any(values is not None and values.null_count for values in lists):
            yield _bad_column(shard, row=row, reason=BadReason.WRONG_TYPE, detail="null in input_ids or labels")
            continue
        arrays = [None if values is None else values.to_numpy(zero_copy_only=False) for values in lists]
        yield RawRow(row=row, tokens=arrays[0], labels=arrays[1] if len(arrays) > 1 else None)


def _unreadable(shard: str, *, row: int, num_rows: int, error: Exception) -> BadRow:
    detail = " ".join(str(error).split())[:120]
    return _bad_column(shard, row=row, reason=BadReason.UNREADABLE, detail=detail, num_rows=max(num_rows, 1))


def _bad_column(shard: str, *, row: int, reason: BadReason, detail: str = "", num_rows: int = 1) -> BadRow:
    return BadRow(shard=shard, row=row, reason=reason, detail=detail, num_rows=num_rows)


# What broken bytes raise in the formats' readers: EOFError a truncated archive, ValueError a name that is not UTF-8,
# MemoryError a message that claims terabytes.
_BROKEN = (pa.ArrowException, OSError, EOFError, ValueError, MemoryError, zlib.error, lzma.LZMAError)
_BATCH_ROWS, _BATCH_SIZE = 256, 1 << 20


def read_rows(
    file: InputFile,
    *,
    tokenizer: Tokenizer,
    text_column: str,
    vocab_size: int | None,
    pictures: PictureRules | None = None,
) -> Iterator[Row | BadRow]:
    """Every row of the file, tokenised and checked, or why it is left out; row numbers count from the piece's start.

    A row with `input_ids` is taken as it is, with `labels` if there are any; with `pictures` one that has them or
    messages as `rayfcp.data.vision.rows` says; otherwise its `text_column` is tokenised. A file that breaks off
    gives the rows before the break and one BadRow for the rest.
    """
    finish = partial(_finished, file=file, tokenizer=tokenizer, vocab_size=vocab_size, pictures=pictures)
    pending: list[RawRow | BadRow] = []
    size = 0
    for raw in _raw_rows(file, columns=Columns(text=text_column, pictures=pictures is not None)):
        pending.append(raw)
        size += _size(raw)
        if len(pending) >= _BATCH_ROWS or size >= _BATCH_SIZE:
            yield from finish(pending)
            pending, size = [], 0
    yield from finish(pending)


def _size(raw: RawRow | BadRow) -> int:
    """Characters or tokens; of a row with pictures so much that none waits for others."""
    if isinstance(raw, RawRow) and raw.pictures is not None:
        return _BATCH_SIZE
    content: Any = None if isinstance(raw, BadRow) else raw.tokens if raw.text is None else raw.text
    return len(content) if hasattr(content, "__len__") else 0


def _finished(
    raws: list[RawRow | BadRow],
    *,
    file: InputFile,
    tokenizer: Tokenizer,
    vocab_size: int | None,
    pictures: PictureRules | None,
) -> Iterator[Row | BadRow]:
    """The texts of these rows tokenised together, and all rows checked."""
    texts = [raw.text for raw in raws if isinstance(raw, RawRow) and raw.text is not None]
    tokens = iter(tokenizer.encode_batch(texts) if texts else [])
    for raw in raws:
        if isinstance(raw, BadRow):
            yield raw
            continue
        try:
            if raw.pictures is not None and raw.tokens is not None:
                raise BadRowError(BadReason.WRONG_TYPE, "pictures beside input_ids, whose places nobody knows")
            if raw.pictures is not None and pictures is not None and isinstance(tokenizer, PictureTokenizer):
                yield picture_row(
                    raw.pictures, tokenizer=tokenizer, rules=pictures, url=file.url, vocab_size=vocab_size
                )
                continue
            ids = raw.tokens if raw.text is None else next(tokens)
            yield make_row(ids, labels=raw.labels, vocab_size=vocab_size)
        except BadRowError as error:
            yield _bad(file, row=raw.row, error=error)


def _raw_rows(file: InputFile, *, columns: Columns) -> Iterator[RawRow | BadRow]:
    """Rows as the format's reader gives them; what breaks the reader becomes a BadRow after the last good one."""
    next_row = 0
    try:
        for raw in _READERS[file.format](file, columns):
            yield raw
            next_row = raw.row + (raw.num_rows if isinstance(raw, BadRow) else 1)
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        detail = " ".join(str(error).split())[:120]
        yield BadRow(shard=file.url, row=next_row, reason=BadReason.UNREADABLE, detail=detail)


def _text_rows(file: InputFile, _columns: Columns) -> Iterator[RawRow | BadRow]:
    """The whole file is one row."""
    with _open(file) as handle:
        data = handle.read()
    try:
        raw: RawRow | BadRow = RawRow(row=0, text=_decoded(data))
    except BadRowError as error:
        raw = _bad(file, row=0, error=error)
    yield raw


def _jsonl_rows(file: InputFile, columns: Columns) -> Iterator[RawRow | BadRow]:
    """One row for each line that begins in the file's piece."""
    with _open(file) as handle:
        position = file.start
        if position:
            # A line that begins exactly at `start` is ours: look for its end from the byte before.
            handle.seek(position - 1)
            position += len(handle.readline()) - 1
        row = 0
        while file.is_compressed or position < file.stop:
            line = handle.readline()
            if not line:
                return
            position += len(line)
            try:
                raw: RawRow | BadRow = _json_row(line, row=row, columns=columns)
            except BadRowError as error:
                raw = _bad(file, row=row, error=error)
            yield raw
            row += 1


def _json_row(data: bytes, *, row: int, columns: Columns) -> RawRow:
    try:
        record = json.loads(_decoded(data.strip()).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise BadRowError(BadReason.BAD_JSON, str(error)[:120]) from error
    if not isinstance(record, dict):
        raise BadRowError(BadReason.WRONG_TYPE, "the line must hold an object")
    found = raw_pictures(record, text_column=columns.text) if columns.pictures else None
    if "input_ids" in record:
        return RawRow(row=row, tokens=record["input_ids"], labels=record.get("labels"), pictures=found)
    if found is not None:
        return RawRow(row=row, pictures=found)
    if columns.text not in record:
        raise BadRowError(BadReason.MISSING_COLUMN, f"neither input_ids nor {columns.text}")
    value = record[columns.text]
    if not isinstance(value, str):
        raise BadRowError(BadReason.WRONG_TYPE, f"{columns.text} must be text")
    if not value:
        raise BadRowError(BadReason.EMPTY)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(BadReason.NOT_UTF8, "half of a surrogate pair") from error
    return RawRow(row=row, text=value)


def _bad(file: InputFile, *, row: int, error: BadRowError) -> BadRow:
    return BadRow(shard=file.url, row=row, reason=error.reason, detail=error.detail)


def _decoded(data: bytes) -> str:
    if not data:
        raise BadRowError(BadReason.EMPTY)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadRowError(BadReason.NOT_UTF8, f"byte {error.start}") from error


def _parquet_rows(file: InputFile, columns: Columns) -> Iterator[RawRow | BadRow]:
    with _open(file) as handle:
        yield from parquet_rows(handle, file=file, columns=columns)


def _arrow_rows(file: InputFile, columns: Columns) -> Iterator[RawRow | BadRow]:
    with _open(file) as handle:
        yield from arrow_rows(handle, file=file, columns=columns)


def _open(file: InputFile) -> IO[bytes]:
    fs, path = resolve(file.url)
    handle: IO[bytes] = fs.open(path, "rb", compression="infer" if file.is_compressed else None)
    return handle


_READERS: dict[str, Callable[[InputFile, Columns], Iterator[RawRow | BadRow]]] = {
    "text": _text_rows,
    "jsonl": _jsonl_rows,
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
}
