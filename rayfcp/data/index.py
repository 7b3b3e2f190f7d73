"""All samples of a prepared folder by their lengths: what planning needs, and nothing of the tokens."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.data.manifest import MAX_NAMED_ROWS, PreparedManifest, check_bad_fraction, read_manifest
from rayfcp.data.rows import IGNORED, BadReason, BadRow, Pieces, around_pictures, cut_rows, drop_rows, split_rows
from rayfcp.data.shards import ShardReader
from rayfcp.data.vision.layout import Ragged, items_of, pictures_of
from rayfcp.values import Pictures, Sample

LongSequences = Literal["cut", "split", "drop"]

_LONG = {"cut": (cut_rows, "cut"), "split": (split_rows, "split"), "drop": (drop_rows, "dropped")}
_READING_THREADS = 8


class LengthIndex:
    """Samples in the order of shards, rows and positions; `len(index)` of them.

    `lengths`, `num_targets`: int arrays `[samples]`. `counts`: rows cut, split, dropped, and left out by reason, those
    that `prepare` left out included. `named_bad_rows` names the first 100 of the latter. `fingerprint` is equal exactly
    when the samples and their tokens are. No picture is cut: a row ends before one that goes beyond `max_seqlen`.
    """

    def __init__(
        self, manifest: PreparedManifest, *, max_seqlen: int, long_sequences: LongSequences, vocab_size: int | None
    ) -> None:
        self.manifest, self.max_seqlen, self.long_sequences = manifest, max_seqlen, long_sequences
        shards = [ShardReader(manifest, shard) for shard in range(len(manifest.shards))]
        with ThreadPoolExecutor(_READING_THREADS) as pool:
            columns = list(pool.map(ShardReader.small_columns, shards))
            pictures = list(pool.map(ShardReader.picture_columns, shards))
        self._runs = [None if table is None else table[1] for table in pictures]
        limit = np.inf if vocab_size is None else vocab_size
        wrong = [np.flatnonzero(column["max_token_id"] >= limit) for column in columns]
        cut, word = _LONG[long_sequences]
        pieces, num_long, num_lost = [], 0, 0
        for shard, column in enumerate(columns):
            rows = np.flatnonzero(column["max_token_id"] < limit)
            lengths = column["length"][rows]
            num_long += int(np.count_nonzero(lengths > max_seqlen))
            piece = cut(rows, lengths=lengths, max_seqlen=max_seqlen)
            if long_sequences != "drop" and (table := pictures[shard]) is not None:
                spans = {int(row): _spans(table[0], row) for row in rows[lengths > max_seqlen]}
                piece, lost = around_pictures(
                    piece,
                    lengths=column["length"],
                    spans_of={row: found for row, found in spans.items() if found},
                    max_seqlen=max_seqlen,
                    split=long_sequences == "split",
                )
                num_lost += lost
            targets = _targets(shards[shard], piece, column=column, has_labels=manifest.shards[shard].has_labels)
            pieces.append((np.full(piece.rows.size, shard), piece, targets))
        self._fill(pieces)
        self.counts = _counts(manifest, num_wrong=sum(rows.size for rows in wrong))
        if num_long:
            self.counts[word] = num_long
        if num_lost:
            self.counts["picture_too_long"] = num_lost
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
        """The index of a prepared folder or URL. Rows with a token id of `vocab_size` or more are left out.

        Rows of more than `max_seqlen` tokens are cut to it, split into consecutive sequences of their own (a last
        piece of one token has no target and is left out), or dropped.

        Raises:
            ConfigError: Not a whole prepared folder, more bad rows than `max_bad_fraction` of all, or no sample left.
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
                f"sample of {index.manifest.folder} ({index.counts}); raise it, or cut"
            )
        return index

    def __len__(self) -> int:
        return int(self.shards.size)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample."""
        lengths: npt.NDArray[np.int64] = self.stops - self.starts
        return lengths

    @property
    def has_pictures(self) -> bool:
        """Whether any row has some."""
        return any(runs is not None and bool(runs.values.size) for runs in self._runs)

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
        return self.samples([position])[0]

    def samples(self, positions: Iterable[int]) -> tuple[Sample, ...]:
        """The samples at these positions, in their order."""
        return tuple(
            Sample(
                id=int(position),
                shard=int(self.shards[position]),
                row=int(self.rows[position]),
                start=int(self.starts[position]),
                stop=int(self.stops[position]),
                num_targets=int(self.num_targets[position]),
                pictures=self._pictures(int(position)),
            )
            for position in positions
        )

    def _pictures(self, position: int) -> tuple[Pictures, ...]:
        runs = self._runs[self.shards[position]]
        if runs is None:
            return ()
        own = runs[int(self.rows[position])]
        return pictures_of(own, start=int(self.starts[position]), stop=int(self.stops[position]))

    def _fill(self, pieces: list[tuple[npt.NDArray[np.int64], Pieces, npt.NDArray[np.int64]]]) -> None:
        self.shards = np.concatenate([shard for shard, _, _ in pieces]).astype(np.int32)
        self.rows = np.concatenate([piece.rows for _, piece, _ in pieces]).astype(np.int32)
        self.starts = np.concatenate([piece.starts for _, piece, _ in pieces])
        self.stops = np.concatenate([piece.stops for _, piece, _ in pieces])
        self.num_targets = np.concatenate([targets for _, _, targets in pieces])


def _spans(items: Ragged, row: int) -> list[tuple[int, int]]:
    """Tokens of the row's images and videos."""
    return [(item.start, item.stop) for item in items_of(items[row])]


def _targets(
    shard: ShardReader, pieces: Pieces, *, column: dict[str, npt.NDArray[np.int32]], has_labels: bool
) -> npt.NDArray[np.int64]:
    """Targets of each piece: its first token is nobody's target, since the piece is a sequence of its own."""
    if not has_labels:
        return pieces.stops - pieces.starts - 1
    targets = column["num_targets"][pieces.rows].astype(np.int64)
    for place in np.flatnonzero(pieces.stops - pieces.starts < column["length"][pieces.rows]):
        labels = shard.labels(int(pieces.rows[place]))[pieces.starts[place] + 1 : pieces.stops[place]]
        targets[place] = np.count_nonzero(labels != IGNORED)
    return targets


def _counts(manifest: PreparedManifest, *, num_wrong: int) -> dict[str, int]:
    counts = dict(manifest.bad_rows)
    if num_wrong:
        reason = BadReason.TOKEN_OUT_OF_RANGE.value
        counts[reason] = counts.get(reason, 0) + num_wrong
    return counts


def _named(
    manifest: PreparedManifest,
    wrong: list[npt.NDArray[np.int64]],
    columns: list[dict[str, npt.NDArray[np.int32]]],
    limit: float,
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
