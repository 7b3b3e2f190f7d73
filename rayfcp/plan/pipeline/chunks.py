"""The sequence processor (InfiniPipe, Algorithm 1): long sequences into slices, short ones into buckets.

Ours: besides tokens, seconds may decide how many buckets there are, so that batched chunks may hold more tokens than
slices do where memory permits; slices end at whole rows of a ring; and a tail that is not worth a slice stays with the
slice before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rayfcp.cost.microbatches import Chunks
from rayfcp.cost.model import CostModel
from rayfcp.plan.pipeline.kernels.packing import pack_balanced
from rayfcp.values import LayerKinds, Primitive, SequenceSpec, Slice
from rayfcp.values.arrays import Floats, Ints
from rayfcp.values.layers import layers_work

LEAST_TAIL = 0.1
"""Share of a slice's seconds: a shorter tail stays with the slice before it, as it would pay the fixed cost of a chunk
for little work."""

PLACES = 1025
"""Places of a sequence between which its seconds are interpolated: more bring slices less than 1 % nearer."""

ROWS = 16
"""Slices of fewer rows than this end anywhere: rounding would make them too unequal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWork:
    """Seconds of a backward pass on all stages together and on each rank, with all that moves exposed: per (query, key)
    pair, per token, and per token of the context that a slice meets (Eq. 1). `layer_kinds`: the model's."""

    pair_s: float
    token_s: float
    context_s: float
    layer_kinds: LayerKinds = ()

    @classmethod
    def of(cls, cost: CostModel, *, degree: int, primitive: Primitive, crosses: bool) -> "ChunkWork":
        _, backward = cost.terms(degree, primitive=primitive, crosses=crosses)
        ring = primitive is Primitive.RING
        token_s = backward.attention_s_per_token + backward.linear_s_per_token
        if not ring:
            token_s = token_s + backward.moved_s_per_token
        pair_s = float(backward.attention_s_per_pair)
        return cls(
            pair_s=pair_s,
            token_s=float(token_s),
            context_s=pair_s * cost.attention_half_tokens * (degree if ring else 1),
            layer_kinds=cost.layer_kinds,
        )

    def pairs(self, start: int, stop: int) -> float:
        """Pairs of a sequence's queries `[start, stop)`, in the mean over layers."""
        return float(layers_work(self.layer_kinds, start=start, stop=stop).pairs)

    def seconds(self, start: int, stop: int) -> float:
        """Seconds of the slice `[start, stop)`."""
        return self.pair_s * self.pairs(start, stop) + self.token_s * (stop - start) + self.context_s * start


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceColumns:
    """Sequences, most seconds first, ids ascending among equals: position p is sequence `ids[p]`."""

    ids: Ints
    tokens: Floats
    pairs: Floats
    seconds: Floats

    @classmethod
    def of(cls, sequences: Sequence[SequenceSpec], *, work: ChunkWork) -> "SequenceColumns":
        ids = np.array([each.id for each in sequences], np.int64)
        tokens = np.array([each.num_tokens for each in sequences], np.float64)
        pairs = np.array([each.attention_pairs for each in sequences], np.float64)
        seconds = work.pair_s * pairs + work.token_s * tokens
        order = np.lexsort((ids, -seconds))
        return cls(ids=ids[order], tokens=tokens[order], pairs=pairs[order], seconds=seconds[order])


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Sequences that are cut, those of more slices first, of more seconds among equals. `lengths`: slices of each;
    `columns`: fields of `Chunks` by slice; `tail_s`: seconds of each sequence's last slice; `short`: positions of the
    sequences that are not cut."""

    slices: tuple[Slice, ...]
    lengths: tuple[int, ...]
    columns: Floats
    tail_s: Floats
    short: Ints

    @property
    def tails(self) -> Ints:
        """Numbers of the last slices."""
        return np.cumsum(np.array(self.lengths, np.int64)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """Chunks in the order of their forward passes, runs of more chunks first. `slices[m]`: the slice that chunk m
    holds of a sequence that is cut, or None; `owners[k]`: the chunk of sequence `short[k]`, which is whole; `runs`:
    lengths."""

    chunks: Chunks
    slices: tuple[Slice | None, ...]
    short: Ints
    owners: Ints
    runs: tuple[int, ...]

    @property
    def members(self) -> list[list[int]]:
        """Ids of the whole sequences of each chunk."""
        members: list[list[int]] = [[] for _ in self.slices]
        for sequence, owner in zip(self.short.tolist(), self.owners.tolist(), strict=True):
            members[owner].append(sequence)
        return members


def balanced_ends(longest: int, count: int, *, work: ChunkWork, rows: int) -> tuple[int, ...]:
    """Ends of `count` slices that take a backward pass as long as each other, rounded to `rows` tokens."""
    places = np.unique(np.linspace(0, longest, PLACES).astype(np.int64))
    seconds = work.pair_s * layers_work(work.layer_kinds, start=0, stop=places).pairs + work.token_s * places
    due = np.arange(1, count + 1) * seconds[-1] / count
    return _rounded(np.append(np.interp(due[:-1], seconds, places), longest), rows=rows)


def equal_ends(longest: int, count: int, *, rows: int) -> tuple[int, ...]:
    """Ends of `count` slices of equal tokens."""
    return _rounded(np.arange(1, count + 1) * longest / count, rows=rows)


def _rounded(ends: Floats, *, rows: int) -> tuple[int, ...]:
    unit = rows if float(np.diff(ends, prepend=0.0).min()) >= ROWS * rows else 1
    inner = np.rint(ends[:-1] / unit) * unit
    whole = np.unique(np.append(inner, ends[-1]).astype(np.int64))
    return tuple(whole[whole > 0].tolist())


def split(batch: SequenceColumns, ends: tuple[int, ...], *, work: ChunkWork, merges: bool, max_tokens: float) -> Splits:
    """Slices of each sequence that is longer than the first end; a tail that is not worth one `merges` with the slice
    before it, where no slice gets more than `max_tokens`."""
    least_s = LEAST_TAIL * work.seconds(0, ends[0]) if merges else 0.0
    found: list[tuple[int, list[int]]] = []
    for position in np.flatnonzero(batch.tokens > ends[0]).tolist():
        length = int(batch.tokens[position])
        cuts = [0, *(end for end in ends if end < length), length]
        if len(cuts) > 2 and work.seconds(cuts[-2], length) < least_s and length - cuts[-3] <= max_tokens:
            del cuts[-2]
        if len(cuts) > 2:
            found.append((position, cuts))
    found.sort(key=lambda each: (-len(each[1]), -batch.seconds[each[0]]))
    whole = np.ones(len(batch.ids), np.bool_)
    whole[[position for position, _ in found]] = False
    columns = np.array([column for _, cuts in found for column in _columns(cuts, work=work)], np.float64)
    return Splits(
        slices=tuple(
            Slice(sequence=int(batch.ids[position]), start=start, stop=stop)
            for position, cuts in found
            for start, stop in pairwise(cuts)
        ),
        lengths=tuple(len(cuts) - 1 for _, cuts in found),
        columns=columns.reshape(-1, len(Chunks._fields)).T,
        tail_s=np.array([work.seconds(cuts[-2], cuts[-1]) for _, cuts in found], np.float64),
        short=np.flatnonzero(whole),
    )


def _columns(cuts: list[int], *, work: ChunkWork) -> Iterator[tuple[float, ...]]:
    """Fields of `Chunks` for each slice of a sequence."""
    earlier: list[int] = []
    for start, stop in pairwise(cuts):
        size, last = stop - start, stop == cuts[-1]
        yield (
            size,
            work.pairs(start, stop),
            sum(max(size, each) for each in earlier),
            start,
            max(earlier, default=0),
            0 if last else size,
            start if last else 0,
            len(earlier),
        )
        earlier.append(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Of at most `max_tokens` and about `target_s` seconds; None: packed by tokens alone. With a `taper`, the first and
    the last buckets without a slice are shorter in so many equal steps, if there are enough: pipelines fill and drain
    as fast as their first and last chunks pass."""

    max_tokens: float
    target_s: float | None
    taper: int = 0


def chunk(batch: SequenceColumns, buckets: Buckets, *, splits: Splits) -> Chunked:
    """Every token of the batch in one slice or whole sequence of one chunk; slices of a sequence in ascending chunks,
    and no chunk with slices of two sequences. Order: what fills the pipeline, shortest first; what is cut; then
    buckets of short sequences, longest first."""
    owners, bucket_s, num_filling = _pack(batch, buckets, splits)
    num_tails, num_slices = len(splits.lengths), len(splits.slices)
    used = np.unique(owners[owners >= num_tails])
    batched = used[np.argsort(-bucket_s[used], kind="stable")]
    fills = batched < num_tails + num_filling
    order = np.concatenate([batched[fills][::-1], batched[~fills]])
    filling = int(fills.sum())
    place = np.empty(len(bucket_s), np.int64)
    place[:num_tails] = filling + splits.tails
    place[order] = np.arange(len(order)) + np.where(np.arange(len(order)) < filling, 0, num_slices)
    chunk_of = place[owners]
    count, left = len(order) + num_slices, len(order) - filling
    columns = np.zeros((len(Chunks._fields), count))
    columns[:, filling : filling + num_slices] = splits.columns
    chunks = Chunks(*columns)
    chunks.tokens[:] += np.bincount(chunk_of, batch.tokens[splits.short], minlength=count)
    chunks.pairs[:] += np.bincount(chunk_of, batch.pairs[splits.short], minlength=count)
    return Chunked(
        chunks=chunks,
        slices=(*[None] * filling, *splits.slices, *[None] * left),
        short=batch.ids[splits.short],
        owners=chunk_of,
        runs=(*[1] * filling, *splits.lengths, *[1] * left),
    )


def _pack(batch: SequenceColumns, how: Buckets, splits: Splits) -> tuple[Ints, Floats, int]:
    """The bucket of each short sequence, seconds of buckets, and the number of buckets that fill the pipeline, which
    come after those of tails; bucket t begins with tail t."""
    seconds, tokens = batch.seconds[splits.short], batch.tokens[splits.short]
    tail_tokens = splits.columns[0, splits.tails]
    num_tails, num_short = len(splits.lengths), len(splits.short)
    space = num_tails + 2 * num_short
    bucket_s, bucket_tokens = np.zeros(space), np.full(space, -1.0)
    bucket_s[:num_tails], bucket_tokens[:num_tails] = splits.tail_s, tail_tokens
    if how.target_s is None:
        owners = _pack_equal(bucket_tokens, tokens, num_tails=num_tails, max_tokens=how.max_tokens)
        return owners, bucket_s + np.bincount(owners, seconds, minlength=space), 0
    all_s, all_tokens = float(splits.tail_s.sum() + seconds.sum()), float(tail_tokens.sum() + tokens.sum())
    buckets = max(all_s / how.target_s, all_tokens / how.max_tokens)
    rising = np.arange(1, how.taper + 1) / (how.taper + 1)
    shares = np.append(rising, rising[::-1])
    most = num_tails + num_short
    count = min(max(num_tails, int(np.ceil(buckets + float((1 - shares).sum())))), most)
    if count - num_tails <= len(shares):
        shares = shares[:0]
        count = min(max(num_tails, int(np.ceil(buckets))), most)
    less = np.zeros(space)  # the part of a bucket that stays empty, as if it were filled
    less[num_tails : num_tails + len(shares)] = 1 - shares
    limit_s, mean_tokens = (each / max(count - less.sum(), 1.0) for each in (all_s, all_tokens))
    bucket_tokens[num_tails:count] = 0.0
    bucket_s += less * limit_s
    bucket_tokens += less * mean_tokens
    owners = pack_balanced(bucket_s, bucket_tokens, seconds, tokens, limit_s, how.max_tokens)
    return owners, bucket_s - less * limit_s, how.taper if len(shares) else 0


def _pack_equal(bucket_tokens: Floats, tokens: Floats, *, num_tails: int, max_tokens: float) -> Ints:
    """Best-fit decreasing by tokens into buckets of `max_tokens`, of which the first hold tails; a longer sequence gets
    a bucket of its own."""
    owners, opened = np.empty(len(tokens), np.int64), num_tails
    for at in np.argsort(-tokens, kind="stable").tolist():
        left = max_tokens - bucket_tokens[:opened] - tokens[at]
        left[left < 0] = np.inf
        best = int(np.argmin(left)) if left.min(initial=np.inf) < np.inf else opened
        if best == opened:
            bucket_tokens[best], opened = 0.0, opened + 1
        bucket_tokens[best] += tokens[at]
        owners[at] = best
    return owners
