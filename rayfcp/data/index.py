"""All samples of a prepared folder by their lengths: what planning needs, and nothing of the tokens."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.data.manifest import MAX_NAMED_ROWS, PreparedManifest, check_bad_fraction, read_manifest
from rayfcp.data.rows import IGNORED, BadReason, BadRow, LongSequences, RowRanges, sample_ranges
from rayfcp.data.shards import ShardReader
from rayfcp.values import Sample

if TYPE_CHECKING:
    from rayfcp.data.vision.layout import ImageIndex

_Column = dict[str, npt.NDArray[np.int32]]

_READING_THREADS = 8
"""Shards whose lengths are read at once: object stores answer in tens of milliseconds."""


class LengthIndex:
    """Samples in the order of shards, rows and positions; `len(index)` of them.

    `lengths`, `num_targets`: int arrays `[samples]`. `counts`: rows cut, split, dropped, and skipped by reason, those
    that `prepare` skipped included. `named_bad_rows`: the first 100 of the latter. `fingerprint` is equal exactly when
    the samples and their tokens are. No image is cut: a sample ends before one that goes beyond `max_seqlen`.
    `samples_per_draw`: samples that are kept, or not, and drawn together: 2i and 2i+1 of pairs.
    """

    def __init__(
        self, manifest: PreparedManifest, *, max_seqlen: int, long_sequences: LongSequences, vocab_size: int | None
    ) -> None:
        self.manifest, self.max_seqlen, self.long_sequences = manifest, max_seqlen, long_sequences
        self.samples_per_draw = manifest.samples_per_row
        readers = [ShardReader(manifest, shard) for shard in range(len(manifest.shards))]
        with ThreadPoolExecutor(_READING_THREADS) as pool:
            columns = list(pool.map(ShardReader.small_columns, readers))
        for column in columns:
            column["max_token_id"] = self._together(column["max_token_id"])
        self._images: ImageIndex | None = None
        if any(shard.has_images for shard in manifest.shards):
            from rayfcp.data.vision import layout

            self._images = layout.ImageIndex(readers)
        limit = np.inf if vocab_size is None else vocab_size
        wrong = [np.flatnonzero(column["max_token_id"] >= limit) for column in columns]
        self._num_long, self._long_tokens = 0, 0
        self.counts = Counter(manifest.bad_rows)
        if num_wrong := sum(rows.size for rows in wrong):
            self.counts[BadReason.TOKEN_OUT_OF_RANGE.value] += num_wrong // self.samples_per_draw
        ranges = [self._ranges(shard, column, limit=limit) for shard, column in enumerate(columns)]
        if self._num_long:
            self.counts["dropped" if long_sequences == "drop" else long_sequences] = self._num_long
        if self._images is not None and self._images.num_too_long:
            self.counts["picture_too_long"] = self._images.num_too_long
        self.shards = np.repeat(np.arange(len(ranges), dtype=np.int32), [each.rows.size for each in ranges])
        self.rows = np.concatenate([each.rows for each in ranges]).astype(np.int32)
        self.starts = np.concatenate([each.starts for each in ranges])
        self.stops = np.concatenate([each.stops for each in ranges])
        self.num_targets = np.concatenate(
            [_targets(*of_shard) for of_shard in zip(readers, ranges, columns, strict=True)]
        )
        self.named_bad_rows = (*manifest.named_bad_rows, *_named(manifest, wrong, columns, limit))[:MAX_NAMED_ROWS]

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        max_seqlen: int,
        long_sequences: LongSequences = "cut",
        vocab_size: int | None = None,
        max_bad_fraction: float = 1.0,
    ) -> Self:
        """The index of a prepared folder or URL. Rows with a token id of `vocab_size` or more are skipped.

        `long_sequences`: see `sample_ranges`.

        Raises:
            ConfigError: Not a complete prepared folder, more bad rows than `max_bad_fraction` of all, or no sample.
        """
        index = cls(read_manifest(folder), max_seqlen=max_seqlen, long_sequences=long_sequences, vocab_size=vocab_size)
        bad = {reason: count for reason, count in index.counts.items() if reason in set(BadReason)}
        num_good_rows = index.manifest.num_rows + index.manifest.num_bad_rows - sum(bad.values())
        check_bad_fraction(
            bad, num_good_rows=num_good_rows, named=index.named_bad_rows, max_bad_fraction=max_bad_fraction
        )
        if not len(index):
            raise ConfigError(
                f"data.max_seqlen is {max_seqlen} with data.long_sequences {long_sequences!r}, must leave at least one "
                f"sample of {index.manifest.folder} ({dict(index.counts)}); raise it, or cut"
            )
        return index

    def __len__(self) -> int:
        return int(self.shards.size)

    @property
    def head_fraction(self) -> float:
        """Fraction of the tokens that the output head runs on (`SequenceSpec.num_head_tokens`)."""
        return float(np.minimum(self.num_targets + 1, self.lengths).sum() / self.lengths.sum())

    def __str__(self) -> str:
        """One sentence for the log: what is kept, and what is not with its remedy."""
        kept = f"{len(self)} sequences of {self.num_tokens} tokens"
        others = "".join(f", {count} rows {reason}" for reason, count in self.counts.items() if reason != "dropped")
        if num_idle := int(np.count_nonzero((self.num_targets == 0) & (self.lengths > 1))):
            others += f", {num_idle} sequences without targets, e.g. answers beyond data.max_seqlen={self.max_seqlen}"
        if "dropped" not in self.counts:
            return kept + others
        num_rows = len(self) + self._num_long
        of_tokens = self._long_tokens / (self.num_tokens + self._long_tokens)
        others_kept = "split or cut" if self.samples_per_draw == 1 else "cut"
        return (
            f"{kept} kept{others}; {self._num_long} rows ({self._num_long / num_rows:.0%}, {of_tokens:.0%} of tokens) "
            f"longer than data.max_seqlen={self.max_seqlen} dropped; use data.long_sequences: {others_kept}"
        )

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
        stops = np.cumsum([num_shards for _, num_shards in self.manifest.sources])
        places = np.searchsorted(self.shards, np.concatenate([[0], stops])).tolist()
        return {name: (places[at], places[at + 1]) for at, (name, _) in enumerate(self.manifest.sources)}

    @property
    def has_images(self) -> bool:
        return self._images is not None and self._images.has_any

    @property
    def skipped(self) -> dict[str, int]:
        """Rows that give no sample, by reason."""
        return {reason: count for reason, count in self.counts.items() if reason not in ("cut", "split")}

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

    def _together(self, values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The largest of the values of those rows that are drawn together, for each of them."""
        size = self.samples_per_draw
        return values if size == 1 else np.repeat(values.reshape(-1, size).max(axis=1), size)

    def _ranges(self, shard: int, column: _Column, *, limit: float) -> RowRanges:
        """Samples of a shard; counts its long rows."""
        rows = np.flatnonzero(column["max_token_id"] < limit)
        lengths = column["length"][rows]
        is_long = (self._together(lengths) if self.long_sequences == "drop" else lengths) > self.max_seqlen
        self._num_long += int(np.count_nonzero(is_long))
        self._long_tokens += int(lengths[is_long].sum(dtype=np.int64))
        if self.long_sequences == "drop":
            rows, lengths = rows[~is_long], lengths[~is_long]
        ranges = sample_ranges(rows, lengths=lengths, max_seqlen=self.max_seqlen, long_sequences=self.long_sequences)
        if self._images is None or self.long_sequences == "drop":
            return ranges
        return self._images.around_images(
            shard,
            ranges,
            long_rows=rows[is_long],
            lengths=column["length"],
            max_seqlen=self.max_seqlen,
            split=self.long_sequences == "split",
        )


def _targets(shard: ShardReader, ranges: RowRanges, column: _Column) -> npt.NDArray[np.int64]:
    """Targets of each range, whose first token is no target."""
    if not shard.info.has_labels:
        return ranges.stops - ranges.starts - 1
    targets = column["num_targets"][ranges.rows].astype(np.int64)
    for place in np.flatnonzero(ranges.stops - ranges.starts < column["length"][ranges.rows]):
        labels = shard.labels(int(ranges.rows[place]))[ranges.starts[place] + 1 : ranges.stops[place]]
        targets[place] = np.count_nonzero(labels != IGNORED)
    return targets


def _named(
    manifest: PreparedManifest, wrong: list[npt.NDArray[np.int64]], columns: list[_Column], limit: float
) -> list[BadRow]:
    return [
        BadRow(
            shard=manifest.shards[shard].name,
            row=int(row),
            reason=BadReason.TOKEN_OUT_OF_RANGE,
            detail=f"{columns[shard]['max_token_id'][row]}, must be less than the vocabulary's {limit:g}",
        )
        for shard, rows in enumerate(wrong)
        for row in rows[:MAX_NAMED_ROWS]
    ]
