"""Counts of what reading leaves out: everything that is read is used, or counted here with a reason."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from rayfcp.data.rows import printable
from rayfcp.values.counted import counted

SHOWN_COLUMNS = 30


@dataclass(slots=True, kw_only=True)
class ReadAccount:
    """Counts of what reading leaves out beside bad rows.

    Attributes:
        ignored_columns: Rows, keyed by the column or message key that was not used.
        removed_tokens: Tokens that are in no sample, keyed by reason, e.g. padding.
        unreadable_files: Tasks that could not read a file to its end, keyed by its URL.
        without_end: Trained turns that do not end in an end token, keyed by chat template.
        images_of_bad_rows: Images and videos of bad rows, keyed by the row's reason.
        begun_twice: Rows whose text begins with the token that the tokenizer puts before it, keyed by that token.
    """

    ignored_columns: dict[str, int] = field(default_factory=dict)
    removed_tokens: dict[str, int] = field(default_factory=dict)
    unreadable_files: dict[str, int] = field(default_factory=dict)
    without_end: dict[str, int] = field(default_factory=dict)
    images_of_bad_rows: dict[str, int] = field(default_factory=dict)
    begun_twice: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, key: str, *, by: int = 1) -> None:
        """Add `by` to the count of `key` in the attribute `name`."""
        counts: dict[str, int] = getattr(self, name)
        counts[key] = counts.get(key, 0) + by

    @classmethod
    def total(cls, parts: Iterable["ReadAccount"]) -> Self:
        """Return the sums of all counts."""
        return cls(**sums_of(list(parts), [each.name for each in fields(cls)]))

    def lines(self) -> list[str]:
        """Return a line for each kind of thing that was left out of rows that are used."""
        found = []
        if files := sorted(self.unreadable_files):
            found.append(printable(f"unreadable files: {', '.join(files)}"))
        if names := sorted(name or "one without a name" for name in self.ignored_columns):
            more = f" and {len(names) - SHOWN_COLUMNS:,} more" if len(names) > SHOWN_COLUMNS else ""
            shown = ", ".join(names[:SHOWN_COLUMNS])
            found.append(printable(f"ignored columns: {shown}{more}"))
        for template, count in self.without_end.items():
            found.append(
                f"{counted(count, 'trained turn')} without an end token at the end, by chat template "
                f"{printable(template)}: the model does not learn to stop there; use a template that ends the "
                "assistant's turns in one"
            )
        for token, count in self.begun_twice.items():
            found.append(
                f"{counted(count, 'row')} beginning with {printable(token)} twice, once in the text and once by the "
                "tokenizer; remove it from rendered texts, or give their conversations"
            )
        return found


def by_reason(rows: Mapping[str, int]) -> str:
    """Return counts with their reasons.

    >>> by_reason({"empty": 1300, "bad_json": 1})
    'empty 1,300, bad_json 1'
    """
    return ", ".join(f"{reason} {count:,}" for reason, count in rows.items())


def sums_of(parts: Sequence[Any], names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the sums over all parts of the counters in attributes `names`, keyed by attribute."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in names}
    for name, counts in sums.items():
        for part in parts:
            counts.update(getattr(part, name))
    return {name: dict(counts) for name, counts in sums.items()}
