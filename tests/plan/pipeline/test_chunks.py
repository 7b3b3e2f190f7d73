"""The sequence processor: nothing lost, nothing twice, slices in order, and balance where it is promised."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.reproduce.chunks import chunks_of
from rayfcp.plan.pipeline.chunks import (
    Buckets,
    Chunked,
    ChunkWork,
    SequenceColumns,
    balanced_ends,
    chunk,
    equal_ends,
    split,
)
from rayfcp.plan.pipeline.kernels.packing import pack_balanced
from rayfcp.plan.pipeline.planner import microbatches_of
from rayfcp.values import Primitive, SequenceSpec
from tests.examples import examples
from tests.plan.helpers import batches
from tests.plan.pipeline.runs import run_lengths

works = st.builds(
    ChunkWork,
    pair_s=st.sampled_from([0.0, 1e-3, 1.0]),
    token_s=st.sampled_from([1e-2, 1.0]),
    context_s=st.sampled_from([0.0, 0.1]),
)


def made(
    batch: list[SequenceSpec], *, work: ChunkWork, count: int, balanced: bool, budget: float, taper: int = 0
) -> tuple[SequenceColumns, Buckets, Chunked]:
    pool = SequenceColumns.of(batch, work=work)
    longest = int(pool.tokens.max())
    count = min(count, longest)
    ends = balanced_ends(longest, count, work=work, rows=2) if balanced else equal_ends(longest, count, rows=2)
    target_s = work.pair_s * ends[0] * (ends[0] + 1) / 2 + work.token_s * ends[0]
    buckets = Buckets(max_tokens=budget * ends[0], target_s=target_s if balanced else None, taper=taper)
    return pool, buckets, chunk(pool, buckets, splits=split(pool, ends, work=work, merges=balanced, max_tokens=1 << 40))


@given(
    batch=batches(max_sequences=12, max_tokens=60),
    work=works,
    count=st.integers(1, 6),
    balanced=st.booleans(),
    budget=st.sampled_from([1.0, 1.5, 100.0]),
    taper=st.sampled_from([0, 0, 1, 3]),
)
@examples(150)
def test_every_token_is_in_one_chunk(
    batch: list[SequenceSpec], work: ChunkWork, count: int, balanced: bool, budget: float, taper: int
) -> None:
    _, buckets, found = made(batch, work=work, count=count, balanced=balanced, budget=budget, taper=taper)
    by_id = {each.id: each for each in batch}
    seconds = [0.0] * len(found.slices)
    microbatches = microbatches_of(found, num_ranks=2, primitive=Primitive.ULYSSES, seconds=seconds)
    spans: dict[int, list[tuple[int, int]]] = {}
    for microbatch in microbatches:
        (group,) = microbatch.groups
        slices = {each.sequence: (each.start, each.stop) for each in microbatch.slices}
        assert len(slices) <= 1, "never two tails, never slices of two sequences"
        assert group.sequences
        for sequence in group.sequences:
            spans.setdefault(sequence, []).append(slices.get(sequence, (0, by_id[sequence].num_tokens)))
    for sequence, held in spans.items():
        assert [start for start, _ in held] == [0, *[stop for _, stop in held[:-1]]], "ascending, side by side"
        assert held[-1][1] == by_id[sequence].num_tokens
    assert spans.keys() == by_id.keys()
    assert found.runs == run_lengths(microbatches)
    later = list(found.runs)
    for _ in range(taper):
        if later and later[0] == 1:
            del later[0]
    assert later == sorted(later, reverse=True), "behind those that fill the pipeline, most chunks first"
    for ours, theirs in zip(found.chunks, chunks_of(microbatches, by_id=by_id), strict=True):
        assert ours == pytest.approx(theirs)
    for tokens, members, piece in zip(found.chunks.tokens, found.members, found.slices, strict=True):
        assert tokens <= buckets.max_tokens or len(members) == (piece is None) or (piece is not None and not members)


@given(longest=st.integers(1, 100_000), count=st.integers(1, 40), work=works)
def test_slices_take_as_long_as_each_other(longest: int, count: int, work: ChunkWork) -> None:
    ends = balanced_ends(longest, min(count, longest), work=work, rows=1)
    assert ends[-1] == longest
    assert list(ends) == sorted(set(ends))
    cuts = np.array([0, *ends], float)
    size, start = np.diff(cuts), cuts[:-1]
    seconds = work.pair_s * (size * (size + 1) / 2 + size * start) + work.token_s * size + work.context_s * start
    slack = work.pair_s * longest + work.token_s + work.context_s  # what one token more makes of a slice
    if len(ends) == count and work.context_s == 0.0:
        assert np.ptp(seconds) <= 2 * slack + 1e-6 * seconds.max()


def test_rows_are_whole_where_slices_are_long() -> None:
    work = ChunkWork(pair_s=1e-3, token_s=1.0, context_s=0.0)
    assert all(end % 16 == 0 for end in balanced_ends(100_000, 7, work=work, rows=16)[:-1])
    assert equal_ends(100, 4, rows=16) == (25, 50, 75, 100)


def test_tail_that_is_not_worth_a_slice_stays() -> None:
    work = ChunkWork(pair_s=0.0, token_s=1.0, context_s=0.0)
    batch = [SequenceSpec(id=at, num_tokens=size, num_targets=1) for at, size in enumerate((400, 205, 150))]
    _, _, found = made(batch, work=work, count=4, balanced=True, budget=1.0)
    pieces = [(piece.sequence, piece.start, piece.stop) for piece in found.slices if piece]
    assert [each[1:] for each in pieces if each[0] == 1] == [(0, 100), (100, 205)]
    assert [each[1:] for each in pieces if each[0] == 2] == [(0, 100), (100, 150)]


def test_less_attention_a_token_comes_first() -> None:
    """A bucket of short sequences gets the next one before a bucket of a long one does."""
    bucket_s, bucket_tokens = np.array([5.0, 4.0, 0.0, 0.0]), np.array([5.0, 8.0, -1.0, -1.0])
    owners = pack_balanced(bucket_s, bucket_tokens, np.array([1.0, 1.0]), np.array([1.0, 1.0]), 10.0, 10.0)
    assert owners.tolist() == [1, 1]


def test_seconds_grow_before_buckets_do() -> None:
    bucket_s, bucket_tokens = np.array([5.0, 4.0, 0.0]), np.array([5.0, 4.0, -1.0])
    owners = pack_balanced(bucket_s, bucket_tokens, np.array([3.0]), np.array([3.0]), 6.0, 10.0)
    assert owners.tolist() == [1]
    full = pack_balanced(np.array([5.0, 0.0]), np.array([9.0, -1.0]), np.array([3.0]), np.array([3.0]), 6.0, 10.0)
    assert full.tolist() == [1]


def test_first_and_last_chunks_taper_off() -> None:
    work = ChunkWork(pair_s=0.0, token_s=1.0, context_s=0.0)
    batch = [SequenceSpec(id=at, num_tokens=2, num_targets=1) for at in range(1000)]
    pool, _, found = made(
        [*batch, SequenceSpec(id=1000, num_tokens=200, num_targets=1)],
        work=work,
        count=1,
        balanced=True,
        budget=2.0,
        taper=3,
    )
    sizes = found.chunks.tokens
    assert sizes[:3] == pytest.approx([50, 100, 150], rel=0.1)
    assert sizes[-3:] == pytest.approx([150, 100, 50], rel=0.1)
    assert sizes[3:-3] == pytest.approx([200] * (len(sizes) - 6), rel=0.1)
    assert pool.tokens.sum() == sizes.sum()
