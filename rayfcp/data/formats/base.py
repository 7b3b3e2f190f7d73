"""Records: the common form of rows in files of all formats."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfcp.data.rows import BadRow, BadRowError
from rayfcp.data.sources import InputFile
from rayfcp.data.storage import UnreadableFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of a file: number `row` (from 0; of JSON Lines that of its line), its `values` by column, and the
    `unread` columns, whose values were not looked at. A text may be bytes; lists of integers may be arrays."""

    row: int
    values: Mapping[str, Any]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """Choice of the columns to read of a file.

    Attributes:
        text: Column that stands for the whole of a text file or member.
        choose: Return the columns to read of a table with these names; raises BadRowError if none can be used.
        large: Columns whose rows may hold megabytes each.
    """

    text: str
    choose: Callable[[Sequence[str]], list[str]]
    large: frozenset[str] = frozenset()

    def of_table(self, names: Sequence[str], *, url: str) -> list[str]:
        """Return the columns to read of the table at `url`; one that occurs twice counts as absent.

        Raises:
            UnreadableFileError: None of them can be used.
        """
        once = [name for name in names if names.count(name) == 1]
        try:
            return self.choose(once)
        except BadRowError as error:
            remedy = "set data.text_column to the one with the text, or leave the file out with data.exclude"
            found = ", ".join(names) or "none"
            raise UnreadableFileError.of(url, f"{error.detail} (columns: {found})", remedy=remedy) from error


Records = Iterator[Record | BadRow]


def record_or_bad(file: InputFile, make: Callable[[], Record], *, row: int) -> Record | BadRow:
    """Return the record that `make` gives, or a bad row with the reason that `make` raises."""
    try:
        return make()
    except BadRowError as error:
        return error.at(file.url, row=row)
