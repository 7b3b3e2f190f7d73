"""Rows of one input file, tokenised and checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayfcp.data.account import ReadAccount
from rayfcp.data.formats import Record, TableColumns, read_records
from rayfcp.data.messages import CHAT_COLUMNS, has_chat
from rayfcp.data.rows import (
    TEACHER_COLUMNS,
    BadReason,
    BadRow,
    BadRowError,
    RawRow,
    TokenRow,
    checked_text,
    make_row,
)
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import UnreadableFileError
from rayfcp.data.tokenizer import Tokenizer

_TOKEN_COLUMNS = ("input_ids", "labels")
MEDIA_COLUMNS = ("messages", "images", "videos")
"""Columns of rows with images, read if there is a `MediaEncoder`."""

_BATCH_ROWS, _BATCH_SIZE = 256, 1 << 20
"""Rows, and characters or tokens, that are tokenised in one call: enough for the tokenizer's threads."""

MediaEncoder = Callable[[Mapping[str, Any], str], TokenRow]
"""Encodes the media columns of a row of the file with this URL; raises BadRowError."""
ChatCall = Callable[[Mapping[str, Any]], list[TokenRow]]
"""Encodes the columns of a row with a conversation; raises BadRowError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """Columns to read beside `input_ids` and `labels`: a text, the media columns if `media`, and those of conversations
    if `chat`. Or `whole`: these alone, which `chat` encodes together."""

    text: str
    media: bool = False
    chat: bool = False
    whole: tuple[str, ...] = ()

    def choose(self, names: Sequence[str]) -> list[str]:
        """Return the columns to read of a table.

        Raises:
            BadRowError: No row of it can be used.
        """
        known = self.whole or (
            *_TOKEN_COLUMNS,
            self.text,
            *(MEDIA_COLUMNS if self.media else ()),
            *(CHAT_COLUMNS if self.chat else ()),
        )
        chosen = [name for name in dict.fromkeys(known) if name in names]
        has_form = has_chat(dict.fromkeys(chosen, True)) if self.chat and not self.whole else False
        needed = self.whole or ("input_ids", self.text, *(MEDIA_COLUMNS if self.media else ()))
        if not has_form and not set(needed).intersection(chosen):
            raise self.missing()
        return chosen

    def row(self, record: Record) -> RawRow:
        """Return the row of a record.

        Raises:
            BadRowError: It has no column that can be used.
        """
        row, values = record.row, record.values
        if self.whole:
            chat = {name: values[name] for name in self.whole if values.get(name) is not None}
            if not chat:
                raise self.missing()
            return RawRow(row=row, chat=chat)
        found = {name: values[name] for name in MEDIA_COLUMNS if values.get(name) is not None} if self.media else {}
        media = {**found, "text": values.get(self.text)} if found else None
        if values.get("input_ids") is not None:
            return RawRow(row=row, tokens=values["input_ids"], labels=values.get("labels"), media=media)
        if media is not None:
            return RawRow(row=row, media=media)
        text = values.get(self.text)
        if self.chat and (isinstance(text, list) or (text is None and has_chat(values))):
            chat = {name: values[name] for name in CHAT_COLUMNS if name in values}
            return RawRow(row=row, chat=chat if text is None else {**chat, "messages": text})
        if self.text not in values:
            raise self.missing()
        return RawRow(row=row, text=checked_text(text, name=self.text))

    def missing(self) -> BadRowError:
        """Return the error of a row without a column that can be used."""
        if self.whole:
            return BadRowError(BadReason.MISSING_COLUMN, f"none of {', '.join(self.whole)}")
        others = ", messages, conversations nor prompt and completion" if self.chat else ""
        return BadRowError(BadReason.MISSING_COLUMN, f"neither input_ids nor {self.text}{others}")


def read_rows(
    file: InputFile,
    *,
    tokenizer: Tokenizer,
    text_column: str,
    media: MediaEncoder | None = None,
    chat: ChatCall | None = None,
    whole: tuple[str, ...] = (),
    account: ReadAccount | None = None,
) -> Iterator[TokenRow | BadRow]:
    """Yield every row of the file, tokenised and checked, or why it is skipped. Row numbers count from the piece's
    start. With `whole`, `chat` encodes these columns of each row, and nothing else is read.

    A row with `input_ids` is used as it is, with its `labels` if present; with `media`, a row that has media columns is
    encoded by it; otherwise `text_column` is tokenised, or, with `chat`, a conversation in it or in the usual columns
    is encoded. What is left out of a row is counted in `account`.

    Raises:
        UnreadableFileError: The file cannot be read from here on.
    """
    account = ReadAccount() if account is None else account
    pending: list[RawRow | BadRow] = []
    size = 0
    columns = RowColumns(text=text_column, media=media is not None, chat=chat is not None, whole=whole)
    encoded = partial(_encoded, file=file, tokenizer=tokenizer, media=media, chat=chat)
    large = frozenset(TEACHER_COLUMNS) | (frozenset(MEDIA_COLUMNS) if media is not None else frozenset())
    table_columns = TableColumns(text=text_column, choose=columns.choose, large=large)
    broken: list[UnreadableFileError] = []
    for record in _until_broken(read_records(file, table_columns), broken):
        raw = _raw(record, file=file, columns=columns)
        for name in record.unread if isinstance(record, Record) else ():
            account.count("ignored_columns", name)
        pending.append(raw)
        size += _size(raw)
        if len(pending) >= _BATCH_ROWS or size >= _BATCH_SIZE:
            yield from encoded(pending)
            pending, size = [], 0
    yield from encoded(pending)
    if broken:
        raise broken[0]


def _until_broken(records: Iterator[Record | BadRow], broken: list[UnreadableFileError]) -> Iterator[Record | BadRow]:
    try:
        yield from records
    except UnreadableFileError as error:
        broken.append(error)


def _raw(record: Record | BadRow, *, file: InputFile, columns: RowColumns) -> RawRow | BadRow:
    if isinstance(record, BadRow):
        return record
    try:
        return columns.row(record)
    except BadRowError as error:
        return error.at(file.url, row=record.row)


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
            yield error.at(file.url, row=raw.row)
