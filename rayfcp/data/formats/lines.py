"""Formats of text: documents, JSON Lines, JSON, and tables with separators."""

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

from rayfcp.data.formats.base import Record, Records, TableColumns, record_or_bad
from rayfcp.data.kinds import MAX_FIRST_LINE, is_json_line
from rayfcp.data.rows import BadReason, BadRowError, checked_text
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import UnreadableFileError

ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
"""Begin of JSON that holds rows in an array."""
HEAD_BYTES = 256
"""Bytes that are looked at to tell what JSON holds."""
_BUFFER_SIGNS = 1 << 20
"""Characters of a JSON file decoded at a time."""
_TORN_SIGNS = 16
"""Distance to the end of a buffer, in characters, within which a JSON error may mean that a number, word or escape
continues in the next block."""
_NO_NAMES: tuple[str, ...] = ()
_REMEDY = "write an array of rows, or a row in each line, or leave the file out with data.exclude"
_BOM = b"\xef\xbb\xbf"


def text_records(handle: io.BufferedReader, file: InputFile, *, columns: TableColumns) -> Records:
    """Yield the whole file as one row.

    Raises:
        UnreadableFileError: It begins with a row of JSON, and `data.format` does not say that it is text.
    """
    content = handle.read().removeprefix(_BOM)
    if file.is_guessed and is_json_line(content[:MAX_FIRST_LINE].partition(b"\n")[0] + b"\n"):
        remedy = "set data.format to jsonl, or to text"
        raise UnreadableFileError.of(file.url, "would be one text but begins with a line of JSON", remedy=remedy)
    yield Record(row=0, values={columns.text: content})


def jsonl_records(handle: io.BufferedReader, file: InputFile, *, columns: TableColumns) -> Records:  # noqa: ARG001
    """Yield one row for each line that begins in the file's piece and is not blank.

    Raises:
        UnreadableFileError: It begins with an array of rows.
    """
    if not file.start and ARRAY.match(handle.peek(HEAD_BYTES)[:HEAD_BYTES]):
        remedy = "name it .json, or set data.format to json"
        raise UnreadableFileError.of(
            file.url, "holds an array of JSON, must hold an object in each line", remedy=remedy
        )
    yield from _line_records(_lines(handle, file), file)


def _line_records(lines: Iterator[bytes], file: InputFile) -> Records:
    for row, line in enumerate(lines):
        if line.strip() not in (b"", _BOM):
            yield record_or_bad(file, partial(_json_record, line, row=row), row=row)


def _lines(handle: io.BufferedReader, file: InputFile) -> Iterator[bytes]:
    position = file.start
    if position:
        # A line that begins exactly at `start` belongs to this piece: look for a line end from the byte before.
        handle.seek(position - 1)
        position += len(handle.readline()) - 1
    while not file.is_piece or position < file.stop:
        line = handle.readline()
        if not line and position < file.stop and not file.is_compressed:
            raise EOFError(f"it ends after {position} of {file.num_bytes} bytes")
        if not line:
            return
        position += len(line)
        yield line


def _json_record(line: bytes, *, row: int) -> Record:
    return Record(row=row, values=json_object(line))


def json_object(data: bytes) -> dict[str, Any]:
    """Return the object that the JSON text holds.

    Raises:
        BadRowError: It holds none.
    """
    try:
        values = _JSON.decode(checked_text(data.strip(), name="the line").removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise BadRowError(BadReason.BAD_JSON, error, num_rows=max(_num_values(data), 1)) from error
    return _checked_object(values)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        name = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise ValueError(f"key {name!r} occurs twice in an object")
    return values


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def _num_values(data: bytes) -> int:
    """Values of JSON that follow each other, as where line ends were lost, up to the first error."""
    count = 0
    with suppress(ValueError, RecursionError):
        for _ in _Decoder(iter((data,))).values():
            count += 1
    return count


def _checked_object(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise BadRowError(BadReason.WRONG_TYPE, "the row must be an object")
    return values


def json_records(handle: io.BufferedReader, file: InputFile, *, columns: TableColumns) -> Records:
    """Yield the rows of a JSON file: the objects of an array, objects on lines or one after the other in any layout, a
    single object, or the objects of the only list in it. A single object is held in memory whole."""
    lines = [handle.readline(MAX_FIRST_LINE)]
    while is_json_line(lines[0]) and (line := handle.readline()):
        lines.append(line)
        if line.strip():
            yield from _line_records(chain(lines, handle), file)
            return
    decoded = _Decoder(chain(lines, iter(partial(handle.read, _BUFFER_SIGNS), b"")))
    values, unread = decoded.values(), _NO_NAMES
    if not decoded.is_array:
        opening = list(islice(values, 2))
        if not opening:
            raise UnreadableFileError.of(file.url, "is empty, must hold JSON")
        if len(opening) == 1:
            values, unread = _rows_within(opening[0], file=file, columns=columns)
        else:
            values = chain(opening, values)
    for row, (value, ignored) in enumerate(zip(values, chain((unread,), repeat(_NO_NAMES)), strict=False)):
        yield record_or_bad(file, partial(_decoded_record, value, row=row, unread=ignored), row=row)


def _decoded_record(value: Any, *, row: int, unread: tuple[str, ...]) -> Record:
    return Record(row=row, values=_checked_object(value), unread=unread)


def _rows_within(value: Any, *, file: InputFile, columns: TableColumns) -> tuple[Iterator[Any], tuple[str, ...]]:
    """Return the rows of a file with one value, and the keys beside them: the value itself if it has a column to read,
    otherwise the elements of its list.

    Raises:
        UnreadableFileError: It is an object without either, or one whose columns hold the values of many rows.
    """
    if not isinstance(value, dict):
        return iter((value,)), ()
    try:
        chosen = columns.choose(list(value))
    except BadRowError as error:
        lists = [name for name, each in value.items() if isinstance(each, list) and any(map(_is_object, each))]
        if len(lists) == 1:
            return iter(value[lists[0]]), tuple(name for name in value if name != lists[0])
        problem = f"holds one object, which {error.detail}"
        if lists:
            problem = f"holds {len(lists)} lists of rows ({', '.join(lists)}), must hold one"
        raise UnreadableFileError.of(file.url, problem, remedy=_REMEDY) from None
    if any(_is_column(value[name]) for name in chosen if name not in columns.large):
        raise UnreadableFileError.of(file.url, "holds one object of whole columns, must hold rows", remedy=_REMEDY)
    return iter((value,)), ()


def _is_column(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, str) for each in value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


class _Decoder:
    """Decodes JSON text that comes in blocks: values one after the other, or the elements of one array. At most one
    element and one block of an array are in memory."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        # A byte that is not UTF-8 becomes half of a surrogate pair, which makes its row bad and no other.
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        ended = (decoder.decode(block, not block) for block in chain(blocks, (b"",)))
        self._texts = ended
        self._text, self._at = "", 0
        self._decode = _JSON.raw_decode
        self._skip("\ufeff")
        self.is_array = self._skip("[")

    def values(self) -> Iterator[Any]:
        """Yield the values.

        Raises:
            ValueError: The text from here on is not JSON, or breaks off.
        """
        if self.is_array and self._skip("]"):
            self._end()
            return
        while self.is_array or self._peek():
            yield self._value()
            if self.is_array and not self._skip(","):
                if not self._skip("]"):
                    raise ValueError("a comma or ] must follow an element of its array")
                self._end()
                return

    def _end(self) -> None:
        if self._peek():
            raise ValueError("more follows the end of its array")

    def _peek(self) -> str:
        """Return the next character that is not white space; empty at the end."""
        while True:
            rest = self._text[self._at : self._at + 1]
            if rest and not rest.isspace():
                return rest
            if not rest and not self._more():
                return ""
            self._at += bool(rest)

    def _skip(self, sign: str) -> bool:
        found = self._peek() == sign
        self._at += found
        return found

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, stop = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_torn = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _TORN_SIGNS
                if not is_torn or not self._more():
                    raise
            else:
                # A number at the end of the buffer may go on in the next one.
                if isinstance(value, str | list | dict) or stop < len(self._text) or not self._more():
                    self._at = stop
                    return value

    def _more(self) -> bool:
        """Read at least as many characters as the buffer holds, so that a long value is decoded few times."""
        rest, added = self._text[self._at :], []
        size = 0
        for text in self._texts:
            added.append(text)
            size += len(text)
            if size > len(rest):
                break
        self._text, self._at = rest + "".join(added), 0
        return size > 0


def table_records(
    handle: io.BufferedReader, file: InputFile, *, columns: TableColumns, delimiter: str = ","
) -> Records:
    """Yield the rows of a table with a header; values are texts, empty fields null."""
    csv.field_size_limit(sys.maxsize)  # process-wide; documents exceed the default of 128 KiB
    text = io.TextIOWrapper(handle, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    header = next(lines, None)
    if header is None:
        raise UnreadableFileError.of(file.url, "is empty, must begin with the names of its columns")
    chosen = columns.of_table(header, url=file.url)
    unread = tuple(name for name in dict.fromkeys(header) if name not in chosen)
    for row, fields in enumerate(filter(None, lines)):
        found = dict(zip(header, fields, strict=False))
        make = partial(_field_record, found, row=row, sizes=(len(fields), len(header)), unread=unread)
        yield record_or_bad(file, make, row=row)
    text.detach()


def _field_record(found: Mapping[str, str], *, row: int, sizes: tuple[int, int], unread: tuple[str, ...]) -> Record:
    if sizes[0] != sizes[1]:
        raise BadRowError(BadReason.WRONG_TYPE, f"{sizes[0]} fields in a table of {sizes[1]} columns")
    return Record(
        row=row, values={name: value or None for name, value in found.items() if name not in unread}, unread=unread
    )
