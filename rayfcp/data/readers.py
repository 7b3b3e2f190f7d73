"""Rows of one input file, tokenised and checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfcp.data.account import ReadAccount
from rayfcp.data.columns import LARGE_COLUMNS, RowColumns
from rayfcp.data.formats import CountCall, Record, TableColumns, read_records
from rayfcp.data.kinds import is_metadata
from rayfcp.data.messages import Forms, check_marks
from rayfcp.data.pretokenized import token_rows
from rayfcp.data.rows import BadRow, BadRowError, RawRow, TokenRow
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import UnreadableFileError
from rayfcp.data.tokenizer import TokenArray, Tokenizer

_BATCH_ROWS, _BATCH_SIZE = 256, 1 << 20
"""Rows, and characters or tokens, that are tokenised in one call: enough for the tokenizer's threads."""

_MAX_IGNORED = 200
"""Bound on ignored columns counted by name, since each row may have column names of its own."""

MediaEncoder = Callable[[Mapping[str, Any], str], list[TokenRow]]
"""Encodes the columns of a row that may have images, given the URL of its file; raises BadRowError."""
ChatCall = Callable[[Mapping[str, Any]], list[TokenRow]]
"""Encodes the columns of a row with a conversation; raises BadRowError."""


def read_rows(
    file: InputFile,
    *,
    tokenizer: Tokenizer,
    text_column: str,
    media: MediaEncoder | None = None,
    chat: ChatCall | None = None,
    whole: Forms = (),
    account: ReadAccount | None = None,
    count: CountCall | None = None,
) -> Iterator[TokenRow | BadRow]:
    """Yield every row of the file, tokenised and checked, or why it is skipped. Row numbers count from the piece's
    start. With `whole`, only rows of these forms are read, and `chat` encodes them.

    A row with `input_ids` is used as it is, with its `labels` and masks if present; otherwise `text_column` is
    tokenised, or, with `chat`, a conversation in it or in the usual columns is encoded. `media` encodes conversations
    and texts with images in place of `chat`. `account` counts what is left out of rows that are used; `count` is
    called with the bytes that are read.

    Raises:
        UnreadableFileError: The file cannot be read from here on.
    """
    account = ReadAccount() if account is None else account
    has_media = media is not None
    columns = RowColumns(
        text=text_column,
        media=has_media,
        chat=chat is not None or has_media,
        whole=whole,
        is_metadata=is_metadata(file.url),
    )
    encoder = _Encoder(url=file.url, tokenizer=tokenizer, media=media, chat=chat, account=account)
    pending: list[RawRow | BadRow] = []
    size = 0
    table_columns = TableColumns(text=text_column, choose=columns.choose, large=LARGE_COLUMNS)
    broken: list[UnreadableFileError] = []
    for record in _until_broken(read_records(file, table_columns, count=count), broken):
        raw = _raw(record, url=file.url, columns=columns)
        pending.append(raw)
        size += _size(raw)
        if len(pending) >= _BATCH_ROWS or size >= _BATCH_SIZE:
            yield from encoder.encoded(pending)
            pending, size = [], 0
    yield from encoder.encoded(pending)
    if broken:
        raise broken[0]


def _until_broken(records: Iterator[Record | BadRow], broken: list[UnreadableFileError]) -> Iterator[Record | BadRow]:
    try:
        yield from records
    except UnreadableFileError as error:
        broken.append(error)


def _raw(record: Record | BadRow, *, url: str, columns: RowColumns) -> RawRow | BadRow:
    if isinstance(record, BadRow):
        return record
    try:
        return columns.row(record)
    except BadRowError as error:
        return error.at(url, row=record.row)


def _size(raw: RawRow | BadRow) -> int:
    """Characters or tokens. A row that is encoded alone fills a batch, so that what it holds, e.g. images, is not kept
    for others."""
    if isinstance(raw, BadRow):
        return 0
    if raw.media is not None or raw.chat is not None:
        return _BATCH_SIZE
    content: Any = raw.tokens["input_ids"] if raw.tokens is not None else raw.text
    return len(content) if hasattr(content, "__len__") else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoder:
    """Turns rows of the file at `url` into samples."""

    url: str
    tokenizer: Tokenizer
    media: MediaEncoder | None
    chat: ChatCall | None
    account: ReadAccount

    def encoded(self, raws: list[RawRow | BadRow]) -> Iterator[TokenRow | BadRow]:
        """Yield the samples of each row, or why it is skipped; texts are tokenised together."""
        texts = [raw.text for raw in raws if isinstance(raw, RawRow) and raw.text is not None]
        encoded = iter(self.tokenizer.encode_batch(texts) if texts else [])
        for raw in raws:
            if isinstance(raw, BadRow):
                yield raw
                continue
            text = next(encoded) if raw.text is not None else None
            try:
                samples = self._samples(raw, text=text)
            except BadRowError as error:
                yield error.at(self.url, row=raw.row)
                continue
            yield from samples
            if raw.tokens is None:
                self._count_begun_twice(samples)
            for name in raw.ignored:
                is_known = name in self.account.ignored_columns or len(self.account.ignored_columns) < _MAX_IGNORED
                self.account.count("ignored_columns", name if is_known else "others")

    def _count_begun_twice(self, samples: Sequence[TokenRow]) -> None:
        library = self.tokenizer.library
        begin = None if library is None else library.bos_token_id
        if begin is not None and any(each.tokens[:2].tolist() == [begin, begin] for each in samples):
            self.account.count("begun_twice", str(library.bos_token))

    def _samples(self, raw: RawRow, *, text: TokenArray | None) -> list[TokenRow]:
        if raw.media is not None and self.media is not None:
            return self.media(raw.media, self.url)
        if raw.chat is not None and self.chat is not None:
            samples = self.chat(raw.chat)
        else:
            samples = token_rows(raw.tokens or {"input_ids": text}, account=self.account)
        for token, kind in self.tokenizer.picture_marks.items():
            for sample in (each for each in samples if each.max_token_id >= token):  # no row here has images
                for values in (sample.tokens, sample.labels):
                    check_marks(0 if values is None else int(np.count_nonzero(values == token)), 0, kind=kind)
        return samples
