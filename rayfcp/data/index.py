"""All samples of a prepared folder by their lengths: what planning needs, and nothing of the tokens."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.data.account import by_reason
from rayfcp.data.balance import (
    CUT,
    DROPPED,
    IMAGE_CUT,
    IMAGE_TOO_LONG,
    NOT_TARGETS,
    SINGLE_TOKENS,
    TRAINED,
    USED,
    Balance,
    skipped_lines,
)
from rayfcp.data.manifest import MAX_NAMED_ROWS, PreparedManifest, read_manifest
from rayfcp.data.rows import IGNORED, BadReason, BadRow, Integers, LongSequences, RowRanges, sample_ranges
from rayfcp.data.shards import ShardReader
from rayfcp.values import Sample

if TYPE_CHECKING:
    from rayfcp.data.vision.layout import ImageIndex

_Column = dict[str, npt.NDArray[np.int32]]
_Masks = dict[str, npt.NDArray[np.bool_]]

CountCall = Callable[[str, int], None]
"""Callback that gets a reason and the number of rows skipped for it."""

_READING_THREADS = 8
"""Shards whose lengths are read at once: object stores answer in tens of milliseconds."""


class LengthIndex:
    """Samples in the order of shards, rows and positions; `len(index)` of them.

    `lengths`, `num_targets`: int arrays `[samples]`. `balance`: account of all rows, including rows that `prepare`
    skipped. `named_bad_rows`: the first 100 of them. `fingerprint` is equal exactly when the samples and their tokens
    are. No image is cut: a sample ends before the marks of an image that goes beyond `max_seqlen`.
    `long_sequences`: as given, but "cut" in place of "auto" if there are no images. `samples_per_draw`: samples that
    are kept, or not, and drawn together: 2i and 2i+1 of pairs.
    """

    def __init__(
        self, manifest: PreparedManifest, *, max_seqlen: int, long_sequences: LongSequences, vocab_size: int | None
    ) -> None:
        self.manifest, self.max_seqlen = manifest, max_seqlen
        self.samples_per_draw = manifest.samples_per_row
        readers = [ShardReader(manifest, shard) for shard in range(len(manifest.shards))]
        with ThreadPoolExecutor(_READING_THREADS) as pool:
            columns = list(pool.map(ShardReader.small_columns, readers))
        self._images: ImageIndex | None = None
        if any(shard.has_images for shard in manifest.shards):
            from rayfcp.data.vision import layout

            self._images = layout.ImageIndex(readers)
        is_text = long_sequences == "auto" and not self.has_images
        self.long_sequences: LongSequences = "cut" if is_text else long_sequences
        parts = [
            self._part(shard, readers[shard], column, limit=np.inf if vocab_size is None else vocab_size)
            for shard, column in enumerate(columns)
        ]
        ranges = [part.ranges for part in parts]
        self.shards = np.repeat(np.arange(len(ranges), dtype=np.int32), [each.rows.size for each in ranges])
        self.rows = np.concatenate([each.rows for each in ranges]).astype(np.int32)
        self.starts = np.concatenate([each.starts for each in ranges])
        self.stops = np.concatenate([each.stops for each in ranges])
        self.num_targets = np.concatenate([part.targets for part in parts])
        self._balances = [part.balance for part in parts]
        named = [row for part in parts for row in part.named]
        self.named_bad_rows = (*manifest.named_bad_rows, *named)[:MAX_NAMED_ROWS]

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        max_seqlen: int,
        long_sequences: LongSequences = "auto",
        vocab_size: int | None = None,
        max_bad_fraction: float = 1.0,
    ) -> Self:
        """The index of a prepared folder or URL. Rows with a token id of `vocab_size` or more are skipped.

        `long_sequences`: see `sample_ranges`.

        Raises:
            ConfigError: Not a complete prepared folder, more bad rows than `max_bad_fraction` of all, or no sample.
        """
        index = cls(read_manifest(folder), max_seqlen=max_seqlen, long_sequences=long_sequences, vocab_size=vocab_size)
        index.balance.check_bad_rows(named=index.named_bad_rows, max_bad_fraction=max_bad_fraction)
        if not len(index):
            raise ConfigError(
                f"data.max_seqlen is {max_seqlen} with data.long_sequences {long_sequences!r}, must leave at least one "
                f"sample of {index.manifest.folder} ({by_reason(index.balance.skipped)}); raise it, or cut"
            )
        return index

    def __len__(self) -> int:
        return int(self.shards.size)

    @property
    def head_fraction(self) -> float:
        """Fraction of the tokens that the output head runs on (`SequenceSpec.num_head_tokens`)."""
        return float(np.minimum(self.num_targets + 1, self.lengths).sum() / self.lengths.sum())

    @cached_property
    def balance(self) -> Balance:
        """Account of all that was read."""
        return self._balance(self.manifest, self._balances)

    def balance_of(self, source: str) -> Balance:
        """Return the account of a source of a mixture."""
        (start, stop) = self._shards_of[source]
        return self._balance(self.manifest.parts[source], self._balances[start:stop])

    def lines(self, *, path: Path | None = None) -> list[str]:
        """Return the account in lines: of all data and of each source of a mixture, then the first bad rows
        (`path` has more of them), and what is ignored."""
        balances = [("account", self.balance)]
        balances += [(f"account of source {name}", self.balance_of(name)) for name in self.sources]
        lines = [line for title, balance in balances for line in balance.lines(title)]
        ignored = [line for part in (self.manifest, *self.manifest.parts.values()) for line in part.file_lines]
        return [*lines, *skipped_lines(self.named_bad_rows, path=path), *ignored, *self.manifest.account.lines()]

    def check_targets(self, name: str) -> None:
        """Check that the data called `name`, and each of its sources, has targets.

        Raises:
            ConfigError: There is no target.
        """
        for source in self.sources:
            if (own := self.balance_of(source)).num_sequences:
                own.check_targets(f"data.sources.{source}")
        self.balance.check_targets(name)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        lengths: npt.NDArray[np.int64] = self.stops - self.starts
        return lengths

    @property
    def sources(self) -> dict[str, tuple[int, int]]:
        """Positions `[start, stop)` of each source of a mixture, by name; none if it is not one."""
        limits = {name: np.searchsorted(self.shards, shards).tolist() for name, shards in self._shards_of.items()}
        return {name: (start, stop) for name, (start, stop) in limits.items()}

    @property
    def _shards_of(self) -> dict[str, tuple[int, int]]:
        """Shards `[start, stop)` of each source of a mixture, by name."""
        parts = self.manifest.parts
        limits = np.cumsum([0, *(len(part.shards) for part in parts.values())]).tolist()
        return dict(zip(parts, pairwise(limits), strict=True))

    @property
    def has_images(self) -> bool:
        return self._images is not None and self._images.has_any

    def count_skipped(self, call: CountCall) -> None:
        """Report the rows that give no sample to `call`, reason by reason."""
        for reason, count in self.balance.skipped.items():
            call(reason, count)

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hash of the tokenizer, and of a processor's rules for images."""
        return self.manifest.tokenizer_fingerprint

    @property
    def fingerprint(self) -> str:
        """16 hex digits over the contents of the shards and how they are cut into samples."""
        parts = (self.manifest.content, self.max_seqlen, self.long_sequences, len(self))
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def sample(self, position: int) -> Sample:
        """The sample at this position."""
        shard, row = int(self.shards[position]), int(self.rows[position])
        start, stop = int(self.starts[position]), int(self.stops[position])
        images = () if self._images is None else self._images.images(shard, row, start=start, stop=stop)
        return Sample(
            id=int(position),
            shard=shard,
            row=row,
            start=start,
            stop=stop,
            num_targets=int(self.num_targets[position]),
            images=images,
        )

    @property
    def num_draws(self) -> int:
        """Samples, or pairs of them."""
        return len(self) // self.samples_per_draw

    def samples(self, draws: Iterable[int]) -> tuple[Sample, ...]:
        """The samples of these draws, in their order."""
        size = self.samples_per_draw
        return tuple(self.sample(size * draw + number) for draw in draws for number in range(size))

    def _together(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The largest of the values of those rows that are drawn together, for each of them."""
        size = self.samples_per_draw
        return values if size == 1 else np.repeat(values.reshape(-1, size).max(axis=1), size)

    def _balance(self, manifest: PreparedManifest, parts: Sequence[Balance]) -> Balance:
        settings: dict[str, Any] = {"max_seqlen": self.max_seqlen, "long_sequences": self.long_sequences}
        return Balance.total([*read_balances(manifest, **settings), *parts])

    def _part(self, shard: int, reader: ShardReader, column: _Column, *, limit: float) -> "_Part":
        """Return the samples of a shard, and what becomes of its rows."""
        cut = self._cut(shard, reader, column, lost=self._lost(shard, reader, column, limit=limit))
        return _Part(
            ranges=cut.ranges,
            targets=cut.targets,
            balance=self._shard_balance(column, cut),
            named=self._named(reader, column, lost=cut.lost, limit=limit),
        )

    def _lost(self, shard: int, reader: ShardReader, column: _Column, *, limit: float) -> _Masks:
        """Return disjoint masks of the shard's rows that give no sample, keyed by reason."""
        lengths, wrong = column["length"], self._together(column["max_token_id"]) >= limit
        lost = {BadReason.TOKEN_OUT_OF_RANGE.value: wrong}
        if self.long_sequences in ("drop", "auto"):
            lost[DROPPED] = ~wrong & (self._together(lengths) > self.max_seqlen)
        elif self.samples_per_draw > 1:
            cut_off = self._together(_cut_off(reader, lengths, max_seqlen=self.max_seqlen))
            equal = _equal_when_cut(reader, lengths, max_seqlen=self.max_seqlen)
            lost[BadReason.NO_TARGETS.value] = ~wrong & cut_off
            lost[BadReason.EQUAL_ANSWERS.value] = ~wrong & ~cut_off & equal
        if self.long_sequences == "auto" and self._images is not None:
            lost[DROPPED] &= self._images.counts(shard) > 0
        return lost

    def _cut(self, shard: int, reader: ShardReader, column: _Column, *, lost: _Masks) -> "_Cut":
        """Return the samples of a shard's rows that are not `lost`. Samples of long rows with images are dropped if
        they have no targets, e.g. those before the first answer."""
        lengths, limit, way = column["length"], self.max_seqlen, self.long_sequences
        rows = np.flatnonzero(~np.logical_or.reduce(list(lost.values())))
        ranges = sample_ranges(rows, lengths=lengths[rows], max_seqlen=limit, long_sequences=way)
        if self._images is None:
            return _Cut(lost=lost, rows=rows, ranges=ranges, targets=_targets(reader, ranges, column))
        counts = self._images.counts(shard)
        long_rows = rows[(lengths[rows] > limit) & (counts[rows] > 0)]
        ranges = self._images.around_images(
            shard, ranges, rows=long_rows, lengths=lengths, max_seqlen=limit, split=way == "split"
        )
        targets = _targets(reader, ranges, column)
        kept = (targets > 0) | ~np.isin(ranges.rows, long_rows)
        ranges = RowRanges(rows=ranges.rows[kept], starts=ranges.starts[kept], stops=ranges.stops[kept])
        gone = np.setdiff1d(long_rows, ranges.rows)
        too_long = gone[[self._images.longest(shard, row) > limit for row in gone.tolist()]]
        for reason, of_reason in ((IMAGE_TOO_LONG, too_long), (IMAGE_CUT, np.setdiff1d(gone, too_long))):
            lost = {**lost, reason: np.isin(np.arange(lengths.size), of_reason)}
        used = self._images.num_within(shard, ranges, rows=long_rows)
        return _Cut(
            lost=lost,
            rows=np.setdiff1d(rows, gone),
            ranges=ranges,
            targets=targets[kept],
            long_rows=np.setdiff1d(long_rows, gone),
            images=counts,
            used_images=used,
        )

    def _shard_balance(self, column: _Column, cut: "_Cut") -> Balance:
        """Return the account of a shard."""
        lengths, per_row, rows, ranges = column["length"], self.samples_per_draw, cut.rows, cut.ranges
        used, trained = _count(np.diff(ranges.rows, prepend=-1)), int(cut.targets.sum())
        sizes = ranges.stops - ranges.starts
        of_long = np.isin(ranges.rows, cut.long_rows)
        num_cut = int(lengths[cut.long_rows].sum(dtype=np.int64) - sizes[of_long].sum())
        rest = int(lengths[rows].sum(dtype=np.int64) - sizes.sum()) - num_cut
        skipped = {reason: _count(mask) // per_row for reason, mask in cut.lost.items()}
        skipped[SINGLE_TOKENS] = (rows.size - used) // per_row
        tokens = {TRAINED: trained, NOT_TARGETS: int(sizes.sum()) - trained, CUT: num_cut}
        tokens |= {reason: int(lengths[mask].sum(dtype=np.int64)) for reason, mask in cut.lost.items()}
        fate = SINGLE_TOKENS if self.long_sequences == "split" else CUT
        tokens[fate] = tokens.get(fate, 0) + rest
        in_row = column["num_targets"][ranges.rows[cut.targets == 0]]
        return Balance(
            max_seqlen=self.max_seqlen,
            long_sequences=self.long_sequences,
            samples_per_row=per_row,
            num_used=used // per_row,
            num_long=_count(lengths[rows] > self.max_seqlen),
            num_sequences=ranges.rows.size,
            skipped={reason: count for reason, count in skipped.items() if count},
            tokens={fate: count for fate, count in tokens.items() if count},
            idle={"cut": _count(in_row), "labels": _count(in_row == 0)},
            **cut.image_counts,
        )

    def _named(self, reader: ShardReader, column: _Column, *, lost: _Masks, limit: float) -> list[BadRow]:
        """Return the first bad rows of a shard."""
        details = {
            BadReason.TOKEN_OUT_OF_RANGE: "{}, must be less than the vocabulary's " + f"{limit:g}",
            BadReason.NO_TARGETS: f"an answer lies beyond data.max_seqlen={self.max_seqlen}",
            BadReason.EQUAL_ANSWERS: f"chosen and rejected are the same within data.max_seqlen={self.max_seqlen}",
        }
        largest = self._together(column["max_token_id"])
        return [
            BadRow(shard=reader.info.name, row=int(row), reason=reason, detail=detail.format(largest[row]))
            for reason, detail in details.items()
            for row in np.flatnonzero(lost.get(reason, ()))[:: self.samples_per_draw][:MAX_NAMED_ROWS]
        ]


def _no_rows() -> Integers:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Samples of a shard and their targets. `lost`: masks of rows without samples, keyed by reason; `rows`: the others.
    For data with images: `long_rows`, rows with images that are longer than a sample; `images` of each row, and
    `used_images` of each of `long_rows`."""

    lost: _Masks
    rows: Integers
    ranges: RowRanges
    targets: Integers
    long_rows: Integers = field(default_factory=_no_rows)
    images: Integers = field(default_factory=_no_rows)
    used_images: Integers = field(default_factory=_no_rows)

    @property
    def image_counts(self) -> dict[str, Any]:
        """Counts of images for the account."""
        if not self.images.any():
            return {}
        without = self.images[self.long_rows] - self.used_images
        counts = {USED: int(self.images[self.rows].sum() - without.sum()), CUT: int(without.sum())}
        counts |= {reason: int(self.images[mask].sum()) for reason, mask in self.lost.items()}
        return {"images": {fate: count for fate, count in counts.items() if count}, "num_without": _count(without)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Samples of a shard, their targets, and what became of its rows."""

    ranges: RowRanges
    targets: Integers
    balance: Balance
    named: list[BadRow]


def _count(mask: npt.NDArray[Any]) -> int:
    return int(np.count_nonzero(mask))


def _cut_off(shard: ShardReader, lengths: npt.NDArray[np.int32], *, max_seqlen: int) -> npt.NDArray[np.bool_]:
    """Return a mask of rows whose targets all lie beyond `max_seqlen`. Each row of a pair has targets."""
    found: npt.NDArray[np.bool_] = lengths > max_seqlen
    for row in np.flatnonzero(found).tolist():
        found[row] = np.all(shard.labels(row)[1:max_seqlen] == IGNORED)
    return found


def _equal_when_cut(shard: ShardReader, lengths: npt.NDArray[np.int32], *, max_seqlen: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows of pairs whose first `max_seqlen` tokens are equal. Only pairs that are cut to equal
    lengths are compared, token by token: whole ones differ."""
    pairs = lengths.reshape(-1, 2)
    equal = (pairs.min(axis=1) >= max_seqlen) & (pairs.max(axis=1) > max_seqlen)
    for pair in np.flatnonzero(equal).tolist():
        chosen, rejected = (shard.tokens(row)[:max_seqlen] for row in (2 * pair, 2 * pair + 1))
        equal[pair] = np.array_equal(chosen, rejected)
    return np.repeat(equal, 2)


def _targets(shard: ShardReader, ranges: RowRanges, column: _Column) -> npt.NDArray[np.int64]:
    """Targets of each range, whose first token is no target."""
    if not shard.info.has_labels:
        return ranges.stops - ranges.starts - 1
    targets = column["num_targets"][ranges.rows].astype(np.int64)
    for place in np.flatnonzero(ranges.stops - ranges.starts < column["length"][ranges.rows]):
        labels = shard.labels(int(ranges.rows[place]))[ranges.starts[place] + 1 : ranges.stops[place]]
        targets[place] = np.count_nonzero(labels != IGNORED)
    return targets


def read_balances(manifest: PreparedManifest, *, max_seqlen: int, long_sequences: LongSequences) -> list[Balance]:
    """Return the account of what `prepare` read and did not use, for each source of a mixture."""
    if manifest.parts:
        settings: dict[str, Any] = {"max_seqlen": max_seqlen, "long_sequences": long_sequences}
        return [each for part in manifest.parts.values() for each in read_balances(part, **settings)]
    num_samples, num_bad, unreadable = manifest.num_rows, manifest.num_bad_rows, manifest.account.unreadable_files
    num_rows = num_samples + num_bad if manifest.num_read_rows is None else manifest.num_read_rows
    return [
        Balance(
            max_seqlen=max_seqlen,
            long_sequences=long_sequences,
            samples_per_row=manifest.samples_per_row,
            num_files=None if manifest.num_files is None else manifest.num_files - len(unreadable),
            num_ignored_files=manifest.num_ignored_files,
            num_unreadable_files=len(unreadable),
            num_rows=num_rows,
            num_further=num_samples + num_bad - num_rows,
            skipped=manifest.bad_rows,
            tokens=manifest.account.removed_tokens,
            images=manifest.account.images_of_bad_rows,
        )
    ]
