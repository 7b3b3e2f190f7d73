"""Shares: every token once, equal tokens and pairs on all ranks, few cuts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions
from rayfcp.plan.blocks.distributor import Pieces, Pool, RankLimits, Shares, cut, distribute, loads_of
from rayfcp.plan.blocks.kernels.distribute import Line, Sweep, sweep
from rayfcp.values import SequenceSpec
from tests.examples import examples
from tests.plan.blocks.helpers import drawn, imbalance, pool_of
from tests.plan.helpers import batch_of, batches


def check_once(pool: Pool, pieces: Pieces) -> None:
    """Blocks tile every sequence, in order."""
    for sequence in range(len(pool.length)):
        begin, end = pieces.first[sequence], pieces.first[sequence + 1]
        assert (pieces.owner[begin:end] == sequence).all()
        assert pieces.start[begin] == 0 and pieces.stop[end - 1] == pool.length[sequence]
        assert (pieces.start[begin + 1 : end] == pieces.stop[begin : end - 1]).all()
    assert (pieces.stop > pieces.start).all() and pieces.first[-1] == len(pieces.owner)


@examples(150)
@given(
    batches(max_sequences=12, max_tokens=400),
    st.integers(1, 9),
    st.integers(1, 100),
    st.integers(0, 50),
    st.sampled_from(["shares", "lpt"]),
)
def test_each_token_once_and_memory_holds(
    sequences: list[SequenceSpec], num_ranks: int, block_tokens: int, spare: int, placement: str
) -> None:
    pool = pool_of(sequences)
    most = -(-int(pool.length.sum()) // num_ranks) + spare
    limits = RankLimits(max_tokens=most, block_tokens=block_tokens, weights=np.ones(num_ranks))
    options = BlockOptions(placement="lpt" if placement == "lpt" else "shares")
    pieces = distribute(pool, limits=limits, options=options)
    check_once(pool, pieces)
    assert pieces.rank.min() >= 0 and pieces.rank.max() < num_ranks
    tokens, pairs = loads_of(pool, pieces)
    assert tokens.max() <= most
    assert pairs.sum() == sum(each.attention_pairs for each in sequences)


@examples(100)
@given(batches(max_sequences=12, max_tokens=2000), st.integers(1, 9))
def test_without_a_tolerance_all_ranks_have_equal_tokens_and_pairs(
    sequences: list[SequenceSpec], num_ranks: int
) -> None:
    """Equal up to one token of the line at each cut; mirrored slices differ by half a token more."""
    pool = pool_of(sequences)
    mean = -(-int(pool.length.sum()) // num_ranks)
    ends, before = np.append(0, np.cumsum(pool.length)), np.append(0.0, np.cumsum(pool.length * pool.density))
    bounds = sweep(Line(ends, before, pool.density), Sweep(mean, 0, 1, 0.0, np.ones(num_ranks)))
    tokens = np.diff(bounds)
    held = tokens[:num_ranks] + tokens[: num_ranks - 1 : -1]
    assert held.max() <= mean and held.min() >= mean - num_ranks
    each = np.diff(np.interp(bounds, ends, before))
    pairs = each[:num_ranks] + each[: num_ranks - 1 : -1]
    assert abs(pairs - pairs.mean()).max() <= 2 * num_ranks * pool.density.max()
    assert bounds[0] == 0 and bounds[-1] == ends[-1] and (tokens >= 0).all()


@examples(100)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.integers(1, 60))
def test_shares_of_one_sequence_have_pairs_in_proportion(shares: list[int], block_tokens: int) -> None:
    length, count = sum(shares), len(shares)
    pool = pool_of(batch_of([length]))
    rows = Shares(np.zeros(count, np.int64), np.arange(count), np.array(shares))
    limits = RankLimits(max_tokens=length, block_tokens=block_tokens, weights=np.ones(count))
    pieces = cut(pool, rows, limits=limits)
    check_once(pool, pieces)
    tokens, pairs = loads_of(pool, pieces)
    assert tokens.tolist() == shares
    assert abs(pairs - np.array(shares) * pool.density[0]).max() <= length
    if count > 1:
        sizes = pieces.stop - pieces.start
        assert sizes.max() < 2 * block_tokens


def test_long_tails_with_one_of_512k_are_level() -> None:
    """Half a million tokens on 64 ranks of 32K: its late blocks alone are more than a rank's share of the pairs."""
    pool = pool_of(drawn("long-tail", num_ranks=64, seed=3, longest=524_288))
    limits = RankLimits(max_tokens=36_000, block_tokens=2048, weights=np.ones(64))
    pieces = distribute(pool, limits=limits, options=BlockOptions())
    tokens, pairs = loads_of(pool, pieces)
    assert imbalance(pairs) < 0.02 and imbalance(tokens) < 0.02
    plain = distribute(pool, limits=limits, options=BlockOptions(placement="lpt"))
    assert imbalance(loads_of(pool, plain)[1]) > imbalance(pairs)
