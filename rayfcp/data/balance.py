"""Account of the inputs: the files, rows and tokens that were read add up to what became of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, Self

from rayfcp.config import ConfigError
from rayfcp.data.account import by_reason, sums_of
from rayfcp.data.rows import BadReason, BadRow, LongSequences
from rayfcp.values.counted import counted

TRAINED, NOT_TARGETS, CUT = "trained", "not targets", "cut"
DROPPED, IMAGE_TOO_LONG, IMAGE_CUT, SINGLE_TOKENS = "dropped", "picture_too_long", "picture_cut", "single_tokens"
USED = "used"
"""Keys of `Balance.tokens`, beside reasons of bad rows and of `ReadAccount.removed_tokens`. Keys of the second line
are also keys of `Balance.skipped`. IMAGE_TOO_LONG and IMAGE_CUT: the cut leaves no target of a row with images, with
the former since an image is longer than a sample. USED and CUT are keys of `Balance.images`."""

MAX_IDLE_SHARE = 0.1
"""Fraction of sequences without targets above which a warning is given. Chat data loses the answers of a few per cent
of its rows to `data.max_seqlen`; above a tenth, steps spend noticeable time on sequences that train nothing."""
SHOWN_ROWS = 3
FEWEST_ROWS = 1000
"""Least number of rows that count as seen. With the default `data.max_bad_fraction` ten rows may have broken images
before a run ends, and data without any intact image ends it within a few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Account of the files, rows and tokens of inputs. Balances of parts add up to the balance of the whole.

    `num_rows + num_further` equals `num_used` plus the sum of `skipped`, and the tokens read are the sum of `tokens`.

    Attributes:
        num_files: Files that were read, None where prepared data of an older version does not say.
        num_ignored_files, num_unreadable_files: Files that were ignored, or could not be read.
        num_rows: Rows that were read.
        num_further: Samples beyond the first that rows gave.
        num_used: Rows, and further samples, that are in sequences.
        num_long: Rows longer than `max_seqlen`.
        num_sequences: Samples that are drawn.
        skipped: Rows, and further samples, that are in no sequence, keyed by reason.
        tokens: Tokens, keyed by what became of them: TRAINED, NOT_TARGETS, CUT, or a reason.
        images: Images and videos, keyed by what became of them: USED, CUT, or the reason for which their row is
            skipped. Images of bad rows are counted as far as the row could be read.
        num_without: Rows in sequences that lost images to the cut.
        idle: Sequences without targets, keyed by cause: "cut" if their row has targets beyond `max_seqlen`, or
            "labels".
    """

    max_seqlen: int
    long_sequences: LongSequences
    samples_per_row: int
    num_files: int | None = None
    num_ignored_files: int = 0
    num_unreadable_files: int = 0
    num_rows: int = 0
    num_further: int = 0
    num_used: int = 0
    num_long: int = 0
    num_sequences: int = 0
    num_without: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    images: Mapping[str, int] = field(default_factory=dict)
    idle: Mapping[Literal["cut", "labels"], int] = field(default_factory=dict)

    @classmethod
    def total(cls, parts: Sequence["Balance"]) -> Self:
        """Return the balance of all parts together, at least one, of equal settings."""
        settings = {name: getattr(parts[0], name) for name in ("max_seqlen", "long_sequences", "samples_per_row")}
        names = [each.name for each in fields(cls)]
        numbers = [name for name in names if name.startswith("num_")]
        files = [part.num_files for part in parts if part.num_files is not None]
        sums = {name: sum(getattr(part, name) or 0 for part in parts) for name in numbers}
        counts = sums_of(parts, ["skipped", "tokens", "images", "idle"])
        return cls(**settings | sums | counts | {"num_files": sum(files) if files else None})

    @property
    def num_tokens(self) -> int:
        """Tokens that were read."""
        return sum(self.tokens.values())

    @property
    def num_idle(self) -> int:
        """Sequences without targets."""
        return sum(self.idle.values())

    @property
    def bad_rows(self) -> dict[str, int]:
        """Bad rows, keyed by reason, without rows dropped for their length."""
        reasons = set(BadReason)
        return {reason: count for reason, count in self.skipped.items() if reason in reasons}

    def check_bad_rows(self, *, named: Sequence[BadRow], max_bad_fraction: float) -> None:
        """Check that few enough rows are bad; `named` are the first bad rows.

        Raises:
            ConfigError: More than `max_bad_fraction` of the rows are bad.
        """
        num_bad, num_rows = sum(self.bad_rows.values()), self.num_rows + self.num_further
        if num_bad > max_bad_fraction * num_rows:
            raise ConfigError(
                f"{num_bad:,} of {num_rows:,} rows ({num_bad / num_rows:.2%}) are bad ({by_reason(self.bad_rows)}), "
                f"data.max_bad_fraction allows {max_bad_fraction:g}; first: {named[0]}; repair or exclude them, or "
                "raise data.max_bad_fraction"
            )

    def __str__(self) -> str:
        """Return one line in which files, rows and tokens add up, with a remedy for tokens that are lost."""
        whole = max(self.num_tokens, 1)
        fates = dict.fromkeys([TRAINED, NOT_TARGETS, CUT, *self.tokens])
        known = [(fate, self.tokens.get(fate, 0)) for fate in fates]
        terms = [f"{count:,} {self._words(fate)} ({_percent(count / whole)})" for fate, count in known if count]
        further = f" and {counted(self.num_further, 'further sample')} of them" if self.num_further else ""
        skipped = f" ({sum(self.skipped.values()):,} skipped: {by_reason(self.skipped)})" if self.skipped else ""
        idle = f" ({self.num_idle:,} without targets)" if self.num_idle else ""
        return (
            f"{self._files}, {counted(self.num_rows, 'row')}{further}{skipped}, "
            f"{counted(self.num_sequences, 'sequence')}{idle}; {counted(self.num_tokens, 'token')} = "
            f"{' + '.join(terms) or '0'}{self._of_images}{self._remedy}"
        )

    @property
    def _of_images(self) -> str:
        if not self.images:
            return ""
        words = {USED: USED, CUT: f"cut from {counted(self.num_without, 'row')}"}
        known = [(fate, self.images.get(fate, 0)) for fate in dict.fromkeys([*words, *self.images])]
        terms = [f"{count:,} {words.get(fate, f'in rows skipped as {fate}')}" for fate, count in known if count]
        return f"; {counted(sum(self.images.values()), 'image')} = {' + '.join(terms)}"

    @property
    def _files(self) -> str:
        if self.num_files is None:
            return "files not counted"
        others = {"ignored": self.num_ignored_files, "unreadable": self.num_unreadable_files}
        left_out = ", ".join(f"{count:,} {what}" for what, count in others.items() if count)
        return counted(self.num_files, "file") + (f" ({left_out})" if left_out else "")

    def _words(self, fate: str) -> str:
        limit = f"data.max_seqlen={self.max_seqlen}"
        known = {
            TRAINED: TRAINED,
            NOT_TARGETS: NOT_TARGETS,
            CUT: f"cut by {limit} from {counted(self.num_long, 'row')}",
            DROPPED: f"dropped in rows longer than {limit}",
            IMAGE_TOO_LONG: f"in rows with an image longer than {limit}",
            IMAGE_CUT: f"in rows with images without a target within {limit}",
            SINGLE_TOKENS: "single tokens at the end of split rows",
            BadReason.TOKEN_OUT_OF_RANGE: "in rows with token ids beyond the vocabulary",
            BadReason.NO_TARGETS: f"in pairs with an answer beyond {limit}",
            BadReason.EQUAL_ANSWERS: f"in pairs that are equal within {limit}",
        }
        return known.get(fate, f"{fate} removed")

    @property
    def _remedy(self) -> str:
        is_pairs = self.samples_per_row > 1
        if self.tokens.get(CUT):
            can_split = not is_pairs and self.long_sequences != "split"
            return "; raise data.max_seqlen" + (", or use data.long_sequences: split" if can_split else "")
        if self.tokens.get(DROPPED):
            return f"; use data.long_sequences: {'cut' if is_pairs else 'split or cut'}"
        return ""

    def lines(self, title: str) -> list[str]:
        """Return the account, and a warning if more than `MAX_IDLE_SHARE` of the sequences have no target."""
        account = f"{title}: {self}"
        if self.num_idle <= MAX_IDLE_SHARE * self.num_sequences:
            return [account]
        share = _percent(self.num_idle / self.num_sequences)
        return [
            account,
            f"{title}: {self.num_idle:,} of {counted(self.num_sequences, 'sequence')} ({share}) have no target and "
            f"train nothing: {self._cause}",
        ]

    def check_targets(self, name: str) -> None:
        """Check that the data has targets.

        Raises:
            ConfigError: No sequence of the data called `name` has a target.
        """
        if not self.tokens.get(TRAINED):
            raise ConfigError(
                f"{name}: {counted(self.num_sequences, 'sequence')} without a single target, must have one: "
                f"{self._cause}"
            )

    @property
    def _cause(self) -> str:
        """Cause of sequences without targets, with its remedy."""
        causes = {
            "cut": f"{self.idle.get('cut', 0):,} have their targets beyond data.max_seqlen={self.max_seqlen}; raise it",
            "labels": f"{self.idle.get('labels', 0):,} have a single token, or only labels of -100; give rows that "
            "have labels or answers",
        }
        return "; ".join(text for cause, text in causes.items() if self.idle.get(cause))  # type: ignore[call-overload]


class BrokenRows:
    """Rows with an image that a run, or an evaluation, cannot decode; each counts once. `known`: messages on rows that
    were found before, keyed by place."""

    def __init__(self, *, num_rows: int, max_bad_fraction: float, known: Mapping[str, str] | None = None) -> None:
        self._num_rows, self._max_bad_fraction = num_rows, max_bad_fraction
        self._found = dict(known or {})

    def __len__(self) -> int:
        return len(self._found)

    def add(self, rows: Iterable[BadRow]) -> list[BadRow]:
        """Add rows, and return the new ones."""
        new = []
        for row in rows:
            if row.place not in self._found:
                self._found[row.place] = str(row)
                new.append(row)
        return new

    def check(self, *, num_seen: int) -> None:
        """Check the bound after `num_seen` sequences were drawn. One broken row among the first few says nothing about
        the rest, so at least `FEWEST_ROWS` count as seen, or all rows of smaller data.

        Raises:
            ConfigError: More than `max_bad_fraction` of the rows seen are broken.
        """
        num_seen = min(self._num_rows, max(num_seen, FEWEST_ROWS))
        if len(self) > self._max_bad_fraction * num_seen:
            found = f"{len(self):,} of {num_seen:,} rows ({len(self) / num_seen:.2%})"
            raise ConfigError(
                f"{found} have an image that cannot be decoded, data.max_bad_fraction allows "
                f"{self._max_bad_fraction:g}; first: {next(iter(self._found.values()))}; repair or exclude them and "
                "prepare again, or raise data.max_bad_fraction"
            )


def skipped_lines(rows: Sequence[BadRow], *, path: Path | None) -> list[str]:
    """Return a line with the first of the bad rows, if there are any; the file `path` has more of them."""
    more = f" and more{f', see {path}' if path else ''}" if len(rows) > SHOWN_ROWS else ""
    return [f"skipped: {'; '.join(map(str, rows[:SHOWN_ROWS]))}{more}"] if rows else []


def _percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "under 0.1 %"
    if 0.9995 <= share < 1:
        return "over 99.9 %"
    return f"{100 * share:.1f} %"
