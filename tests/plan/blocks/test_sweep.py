"""Shares: every token once, equal tokens and cells on all ranks, few cuts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions
from rayfcp.plan.blocks.distributor import Space, distribute
from rayfcp.plan.blocks.kernels.distribute import Pieces, Pool, Shares, Sweep, rows_of, slices_of, sweep
from rayfcp.plan.blocks.kernels.traffic import loads_of
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
    st.sampled_from([0.0, 30.0]),
)
def test_each_token_once_and_memory_holds(
    sequences: list[SequenceSpec], num_ranks: int, block_tokens: int, spare: int, placement: str, half: float
) -> None:
    pool = pool_of(sequences)
    room = -(-int(pool.length.sum()) // num_ranks) + spare
    space = Space(num_ranks=num_ranks, max_tokens=room, block_tokens=block_tokens, weights=np.ones(num_ranks))
    options = BlockOptions(placement="lpt" if placement == "lpt" else "shares")
    pieces = distribute(pool, space=space, half_tokens=half, options=options)
    check_once(pool, pieces)
    assert pieces.rank.min() >= 0 and pieces.rank.max() < num_ranks
    tokens, cells = loads_of(pool, pieces)
    assert tokens.max() <= room
    assert cells.sum() == sum(each.attention_cells for each in sequences)


@examples(100)
@given(batches(max_sequences=12, max_tokens=2000), st.integers(1, 9))
def test_without_a_tolerance_all_ranks_have_equal_tokens_and_cells(
    sequences: list[SequenceSpec], num_ranks: int
) -> None:
    """Up to a token of the line at each cut; mirrored slices differ by half a token more."""
    pool = pool_of(sequences)
    mean = -(-int(pool.length.sum()) // num_ranks)
    cuts = sweep(pool, Sweep(num_ranks, mean, 0, 1, 0.0, np.ones(num_ranks)))
    owner, rank, tokens = rows_of(pool, cuts)
    held = np.bincount(rank, tokens, minlength=num_ranks)
    assert held.max() <= mean and held.min() >= mean - num_ranks
    cells = np.bincount(rank, tokens * pool.density[owner], minlength=num_ranks)
    assert abs(cells - cells.mean()).max() <= 2 * num_ranks * pool.density.max()
    assert len(owner) <= len(sequences) + 2 * num_ranks


@examples(100)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.booleans(), st.integers(1, 60))
def test_shares_of_one_sequence_have_cells_in_proportion(shares: list[int], full: bool, block_tokens: int) -> None:
    length, count = sum(shares), len(shares)
    pool = pool_of(batch_of([length], full=[full]))
    rows = Shares(np.zeros(count, np.int64), np.arange(count), np.array(shares), count, block_tokens)
    pieces = slices_of(pool, rows)
    check_once(pool, pieces)
    tokens, cells = loads_of(pool, pieces)
    assert tokens.tolist() == shares
    assert abs(cells - np.array(shares) * pool.density[0]).max() <= (0 if full else length)
    if count > 1:
        sizes = pieces.stop - pieces.start
        assert sizes.max() < 2 * block_tokens


def test_long_tails_with_one_of_512k_are_level() -> None:
    """Half a million tokens on 64 ranks of 32K: its late blocks alone are more than a rank's share of the cells."""
    pool = pool_of(drawn("long-tail", num_ranks=64, seed=3, longest=524_288))
    space = Space(num_ranks=64, max_tokens=36_000, block_tokens=2048, weights=np.ones(64))
    pieces = distribute(pool, space=space, half_tokens=0.0, options=BlockOptions())
    tokens, cells = loads_of(pool, pieces)
    assert imbalance(cells) < 0.02 and imbalance(tokens) < 0.02
    plain = distribute(pool, space=space, half_tokens=0.0, options=BlockOptions(placement="lpt", search_moves=0))
    assert imbalance(loads_of(pool, plain)[1]) > imbalance(cells)
