"""The rows of one input file, whatever its format, good or broken, in order."""

import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

import pyarrow as pa

from rayfcp.data.columnar import Columns, arrow_rows, parquet_rows
from rayfcp.data.rows import BadReason, BadRow, BadRowError, RawRow, Row, make_row
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import resolve
from rayfcp.data.tokenizer import Tokenizer
from rayfcp.data.vision.loading import PictureTokenizer
from rayfcp.data.vision.records import PictureRules, picture_row, raw_pictures

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
    messages as `rayfcp.data.vision.records` says; otherwise its `text_column` is tokenised. A file that breaks off
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
