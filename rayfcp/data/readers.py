"""Rows of one input file, in order, whatever its format: text, JSON Lines, Parquet, Arrow IPC or WebDataset."""

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
from rayfcp.data.messages import CHAT_COLUMNS, has_chat
from rayfcp.data.rows import TEACHER_COLUMNS, BadReason, BadRow, BadRowError, RawRow, TokenRow, make_row
from rayfcp.data.sources import InputFile
from rayfcp.data.tokenizer import Tokenizer

_TOKEN_COLUMNS = ("input_ids", "labels")
MEDIA_COLUMNS = ("messages", "images", "videos")
"""Columns of rows with images, read if there is a `MediaEncoder`."""

_COLUMN_ROWS, _LARGE_COLUMN_ROWS = 1024, 16
"""Rows of a Parquet batch: enough to amortise the call; few where each row may hold megabytes of images or logits."""
_BATCH_ROWS, _BATCH_SIZE = 256, 1 << 20
"""Rows, and characters or tokens, that are tokenised in one call: enough for the tokenizer's threads."""

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

MediaEncoder = Callable[[Mapping[str, Any], str], TokenRow]
"""Encodes the media columns of a row of the file with this URL; raises BadRowError."""
ChatCall = Callable[[Mapping[str, Any]], list[TokenRow]]
"""Encodes the columns of a row with a conversation; raises BadRowError."""
_Rows = Iterator[RawRow | BadRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """Columns to read beside `input_ids` and `labels`: a text, the media columns if `media`, and those of conversations
    if `chat`. Or `whole`: these alone, which `chat` encodes together."""

    text: str
    media: bool = False
    chat: bool = False
    whole: tuple[str, ...] = ()


def read_rows(
    file: InputFile,
    *,
    tokenizer: Tokenizer,
    text_column: str,
    media: MediaEncoder | None = None,
    chat: ChatCall | None = None,
    whole: tuple[str, ...] = (),
) -> Iterator[TokenRow | BadRow]:
    """Every row of the file, tokenised and checked, or why it is skipped. Row numbers count from the piece's start.
    With `whole`, `chat` encodes these columns of each row, and nothing else is read.

    A row with `input_ids` is used as it is, with its `labels` if present; with `media`, a row that has media columns is
    encoded by it; otherwise `text_column` is tokenised, or, with `chat`, a conversation in it or in the usual columns
    is encoded. A file that breaks off gives the rows before the break and one BadRow for the rest.
    """
    pending: list[RawRow | BadRow] = []
    size = 0
    columns = RowColumns(text=text_column, media=media is not None, chat=chat is not None, whole=whole)
    encoded = partial(_encoded, file=file, tokenizer=tokenizer, media=media, chat=chat)
    for raw in _raw_rows(file, columns):
        pending.append(raw)
        size += _size(raw)
        if len(pending) >= _BATCH_ROWS or size >= _BATCH_SIZE:
            yield from encoded(pending)
            pending, size = [], 0
    yield from encoded(pending)


def _size(raw: RawRow | BadRow) -> int:
    """Characters or tokens. A row that is encoded alone fills a batch, so that what it holds, e.g. images, is not kept
    for others."""
    if isinstance(raw, BadRow):
        return 0
    if raw.media is not None or raw.chat is not None:
        return _BATCH_SIZE
    content = raw.tokens if raw.text is None else raw.text
    return len(content) if hasattr(content, "__len__") else 0


def _encoded(
    raws: list[RawRow | BadRow],
    *,
    file: InputFile,
    tokenizer: Tokenizer,
    media: MediaEncoder | None,
    chat: ChatCall | None,
) -> Iterator[TokenRow | BadRow]:
    texts = [raw.text for raw in raws if isinstance(raw, RawRow) and raw.text is not None]
    encoded = iter(tokenizer.encode_batch(texts) if texts else [])
    for raw in raws:
        if isinstance(raw, BadRow):
            yield raw
            continue
        try:
            if raw.media is not None and media is not None:
                if raw.tokens is not None:
                    raise BadRowError(BadReason.WRONG_TYPE, "images beside input_ids, whose positions are unknown")
                yield media(raw.media, file.url)
            elif raw.chat is not None and chat is not None:
                yield from chat(raw.chat)
            else:
                yield make_row(raw.tokens if raw.text is None else next(encoded), labels=raw.labels)
        except BadRowError as error:
            yield _bad(file, raw.row, error)


def _bad(file: InputFile, row: int, error: BadRowError, *, num_rows: int = 1) -> BadRow:
    return BadRow(shard=file.url, row=row, reason=error.reason, detail=error.detail, num_rows=num_rows)


def _row(file: InputFile, row: int, make: Callable[[], RawRow]) -> RawRow | BadRow:
    """The row that `make` returns, or why it cannot."""
    try:
        return make()
    except pa.ArrowInvalid as error:
        return _bad(file, row, BadRowError(BadReason.UNREADABLE, error))
    except BadRowError as error:
        return _bad(file, row, error)


def _raw_rows(file: InputFile, columns: RowColumns) -> _Rows:
    """Rows of the format's reader; what breaks the reader becomes a BadRow after the last good row."""
    next_row = 0
    try:
        fs, path = resolve(file.url)
        with fs.open(path, "rb", compression="infer" if file.is_compressed else None) as handle:
            for raw in _READERS[file.format](handle, file, columns):
                is_text = columns.whole and isinstance(raw, RawRow) and raw.chat is None
                yield _bad(file, raw.row, _missing_text(columns)) if is_text else raw
                next_row = raw.row + (raw.num_rows if isinstance(raw, BadRow) else 1)
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        yield _bad(file, next_row, BadRowError(BadReason.UNREADABLE, error))


def _text_rows(handle: IO[bytes], file: InputFile, columns: RowColumns) -> _Rows:
    """The whole file as one row."""
    yield _row(file, 0, partial(_tar_row, {"text": handle.read()}, row=0, columns=columns))


def _jsonl_rows(handle: IO[bytes], file: InputFile, columns: RowColumns) -> _Rows:
    """One row for each line that begins in the file's piece."""
    for row, line in enumerate(_lines(handle, file)):
        yield _row(file, row, partial(_json_row, line, row=row, columns=columns))


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


def _json_row(line: bytes, *, row: int, columns: RowColumns) -> RawRow:
    try:
        record = json.loads(_text(line.strip(), name="the line").removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise BadRowError(BadReason.BAD_JSON, error) from error
    if not isinstance(record, dict):
        raise BadRowError(BadReason.WRONG_TYPE, "the line must hold an object")
    return _record_row(record, row=row, columns=columns)


def _record_row(record: Mapping[str, Any], *, row: int, columns: RowColumns) -> RawRow:
    """The row of a JSON object, or of all its values in a table."""
    if columns.whole:
        return RawRow(row=row, chat={name: record[name] for name in columns.whole if record.get(name) is not None})
    found = {name: record[name] for name in MEDIA_COLUMNS if record.get(name) is not None} if columns.media else {}
    media = {**found, "text": record.get(columns.text)} if found else None
    if record.get("input_ids") is not None:
        return RawRow(row=row, tokens=record["input_ids"], labels=record.get("labels"), media=media)
    if media is not None:
        return RawRow(row=row, media=media)
    text = record.get(columns.text)
    if columns.chat and (isinstance(text, list) or (text is None and has_chat(record))):
        chat = {name: record[name] for name in CHAT_COLUMNS if name in record}
        return RawRow(row=row, chat=chat if text is None else {**chat, "messages": text})
    if columns.text not in record:
        raise _missing_text(columns)
    return RawRow(row=row, text=_text(text, name=columns.text))


def _missing_text(columns: RowColumns) -> BadRowError:
    if columns.whole:
        return BadRowError(BadReason.MISSING_COLUMN, f"none of {', '.join(columns.whole)}")
    others = ", messages, conversations nor prompt and completion" if columns.chat else ""
    return BadRowError(BadReason.MISSING_COLUMN, f"neither input_ids nor {columns.text}{others}")


def _wrong_type(name: str, kind: str) -> BadRowError:
    return BadRowError(BadReason.WRONG_TYPE, f"{name} is {kind}")


def _text(value: Any, *, name: str) -> str:
    """A text that is not empty, from str or UTF-8 bytes."""
    if not isinstance(value, str | bytes):
        raise _wrong_type(name, "null" if value is None else "not text")
    if not value:
        raise BadRowError(BadReason.EMPTY)
    try:
        if isinstance(value, bytes):
            return value.decode()
        value.encode()
    except UnicodeDecodeError as error:
        raise BadRowError(BadReason.NOT_UTF8, f"byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise BadRowError(BadReason.NOT_UTF8, "half of a surrogate pair") from error
    return value


def _tar_rows(handle: IO[bytes], file: InputFile, columns: RowColumns) -> _Rows:
    """Rows of a WebDataset shard, a tar whose members of one row follow each other and have one name up to the first
    dot of its last part: `txt` or `text` is its text, `json` an object of columns. Others are not read."""
    watched: Any = _Watched(handle)
    with tarfile.open(fileobj=watched, mode="r|") as tar:
        members = ((member.name.rpartition("/"), member) for member in tar if member.isfile())
        keyed = (
            ((folder, name.partition(".")[0]), name.partition(".")[2], each) for (folder, _, name), each in members
        )
        for row, (_, group) in enumerate(groupby(keyed, key=itemgetter(0))):
            found = {}
            for _, ending, member in group:
                content = tar.extractfile(member) if ending in _TAR_ENDINGS else None
                if content is not None:
                    found[_TAR_ENDINGS[ending]] = content.read()
            yield _row(file, row, partial(_tar_row, found, row=row, columns=columns))
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


def _tar_row(found: Mapping[str, bytes], *, row: int, columns: RowColumns) -> RawRow:
    if "json" in found:
        return _json_row(found["json"], row=row, columns=columns)
    if "text" not in found:
        raise BadRowError(BadReason.MISSING_COLUMN, "neither json nor txt")
    if columns.whole:
        raise _missing_text(columns)
    return RawRow(row=row, text=_text(found["text"], name="text"))


def _parquet_rows(handle: IO[bytes], file: InputFile, columns: RowColumns) -> _Rows:
    """Rows of the row groups that begin in the file's piece. A group that breaks off is bad from there to its end."""
    try:
        parquet = pq.ParquetFile(handle)
    except (pa.ArrowException, OSError):
        if file.start == 0:  # the first piece reports a broken footer for all
            raise
        return
    names = _selected(parquet.schema_arrow, columns)
    batch_rows = _LARGE_COLUMN_ROWS if {*MEDIA_COLUMNS, *TEACHER_COLUMNS}.intersection(names) else _COLUMN_ROWS
    row = 0
    for group in range(parquet.metadata.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        if file.is_piece and not file.start <= _offset(metadata) < file.stop:
            continue
        group_stop = row + metadata.num_rows
        if not names:
            missing = _missing_text(columns)
            yield _bad(file, row, missing, num_rows=metadata.num_rows)
            row = group_stop
            continue
        try:
            for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=names):
                yield from _batch_rows(batch, first=row, file=file, columns=columns)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            unreadable = BadRowError(BadReason.UNREADABLE, error)
            yield _bad(file, row, unreadable, num_rows=max(group_stop - row, 1))
        row = group_stop


def _offset(group: Any) -> int:
    """Byte of the file at which the row group begins."""
    columns = (group.column(index) for index in range(group.num_columns))
    pages = ((column.data_page_offset, column.dictionary_page_offset) for column in columns)
    return min((offset for pair in pages for offset in pair if offset is not None), default=0)


def _arrow_rows(handle: IO[bytes], file: InputFile, columns: RowColumns) -> _Rows:
    """Rows of an IPC file or stream."""
    magic = handle.read(6)
    handle.seek(0)
    row = 0
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(handle)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = pa.ipc.open_stream(handle)
    for batch in batches:
        yield from _batch_rows(batch, first=row, file=file, columns=columns)
        row += batch.num_rows


def _selected(schema: pa.Schema, columns: RowColumns) -> list[str]:
    """Columns to read; a column that occurs twice counts as absent."""
    if columns.whole:
        return [name for name in columns.whole if schema.get_field_index(name) >= 0]
    known = (*_TOKEN_COLUMNS, columns.text, *MEDIA_COLUMNS, *CHAT_COLUMNS)
    has = {name for name in known if schema.get_field_index(name) >= 0}
    if columns.media and has.intersection(MEDIA_COLUMNS):
        return [name for name in (*MEDIA_COLUMNS, columns.text, *_TOKEN_COLUMNS) if name in has]
    if "input_ids" in has:
        return [name for name in _TOKEN_COLUMNS if name in has]
    others = [name for name in CHAT_COLUMNS if name in has and name != columns.text]
    if columns.text in has:
        return [columns.text, *(others if _is_list(schema, columns) else [])]
    return others if columns.chat and has_chat(dict.fromkeys(others, True)) else []


def _is_list(schema: pa.Schema, columns: RowColumns) -> bool:
    """True if the text column has conversations instead."""
    place = schema.get_field_index(columns.text)
    kind = schema.field(place).type if place >= 0 and columns.chat else pa.null()
    return _is_lists(kind)


def _batch_rows(batch: pa.RecordBatch, *, first: int, file: InputFile, columns: RowColumns) -> _Rows:
    """Rows of one record batch, numbered from `first`."""
    names = _selected(batch.schema, columns)
    if batch.num_rows == 0:
        return
    if not names:
        yield _bad(file, first, _missing_text(columns), num_rows=batch.num_rows)
    elif columns.whole or set(names) - {columns.text, *_TOKEN_COLUMNS} or _is_list(batch.schema, columns):
        kept = batch.select(names)
        for row in range(first, first + batch.num_rows):
            yield _row(file, row, partial(_media_row, kept.slice(row - first, 1), row=row, columns=columns))
    else:
        try:
            arrays = [_plain(batch.column(name), name=name) for name in names]
        except BadRowError as error:
            yield _bad(file, first, error, num_rows=batch.num_rows)
            return
        make = _token_row if names[0] == "input_ids" else _text_row
        for row, values in enumerate(zip(*arrays, strict=True), first):
            yield _row(file, row, partial(make, values, row=row, columns=columns))


def _plain(column: pa.Array, *, name: str) -> pa.Array:
    """The column as large_binary (text) or large_list of integers, its buffers checked."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if kind in _BINARY:  # text that is not UTF-8 is an error of its row alone: the column is only checked as bytes
        column = column.cast(_BINARY[kind])
    is_text = column.type in _BINARY.values()
    if not is_text and not (_is_lists(kind) and pa.types.is_integer(kind.value_type)):
        raise _wrong_type(name, str(kind))
    column.validate(full=True)  # broken bytes can hold offsets that point anywhere
    return column.cast(pa.large_binary() if is_text else pa.large_list(kind.value_type))


_BINARY = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def _text_row(values: Sequence[Any], *, row: int, columns: RowColumns) -> RawRow:
    return RawRow(row=row, text=_text(values[0].as_py(), name=columns.text))


def _token_row(values: Sequence[Any], *, row: int, columns: RowColumns) -> RawRow:  # noqa: ARG001
    lists = [value.values for value in values]
    if lists[0] is None or any(each is not None and each.null_count for each in lists):
        raise BadRowError(BadReason.WRONG_TYPE, "null in input_ids or labels")
    tokens, *labels = [None if each is None else each.to_numpy(zero_copy_only=False) for each in lists]
    return RawRow(row=row, tokens=tokens, labels=labels[0] if labels else None)


def _media_row(batch: pa.RecordBatch, *, row: int, columns: RowColumns) -> RawRow:
    """The row of a batch of one."""
    batch.validate(full=True)  # broken bytes can hold offsets that point anywhere
    record = {name: _value(column[0]) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    # Tables fill an object's missing keys with nulls, which templates would print.
    return _record_row(_without_nulls(record) if columns.chat else record, row=row, columns=columns)


def _value(scalar: pa.Scalar) -> Any:
    """The value; an array, if it is a list of lists of numbers, all of one length."""
    kind, widths = scalar.type, []
    values = scalar.values if _is_lists(kind) and _is_lists(kind.value_type) else None
    if values is not None:
        numbers = values.flatten()
        widths = pc.unique(pc.list_value_length(values)).to_pylist()
        if len(widths) == 1 and numbers.null_count == 0 and _is_number(numbers.type):
            return numbers.to_numpy(zero_copy_only=False).reshape(len(values), *widths)
    return scalar.as_py()


def _is_lists(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[IO[bytes], InputFile, RowColumns], _Rows]] = {
    "text": _text_rows,
    "jsonl": _jsonl_rows,
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
    "webdataset": _tar_rows,
}
