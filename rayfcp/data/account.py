"""What becomes of the rows and tokens of the inputs: everything that is read is used, or counted here with a reason."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Self


@dataclass(slots=True, kw_only=True)
class ReadAccount:
    """Counts of what reading leaves out of rows that are used.

    Attributes:
        ignored_columns: Rows by the name of a column, or key of a message, that was not used.
        removed_tokens: Tokens by the reason for which they are in no sample, e.g. padding.
        unreadable_files: Tasks by the URL of a file that could not be read to its end.
        without_end: Trained turns by the chat template that does not end them in an end token.
    """

    ignored_columns: dict[str, int] = field(default_factory=dict)
    removed_tokens: dict[str, int] = field(default_factory=dict)
    unreadable_files: dict[str, int] = field(default_factory=dict)
    without_end: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, key: str, *, by: int = 1) -> None:
        """Add to one of the counts, by the name of its attribute."""
        counts: dict[str, int] = getattr(self, name)
        counts[key] = counts.get(key, 0) + by

    @classmethod
    def total(cls, parts: Iterable["ReadAccount"]) -> Self:
        """Return the sums of all counts."""
        sums: dict[str, Counter[str]] = {each.name: Counter() for each in fields(cls)}
        for part in parts:
            for name, counts in sums.items():
                counts.update(getattr(part, name))
        return cls(**{name: dict(counts) for name, counts in sums.items()})
