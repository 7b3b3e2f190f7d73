"""Blocks of sequences with mutual pictures: what travels, cells of ranks, and shares, counted one by one."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions
from rayfcp.cost.work import work_of
from rayfcp.plan.blocks.distributor import Space, distribute
from rayfcp.plan.blocks.kernels.distribute import Shares, slices_of
from rayfcp.plan.blocks.kernels.traffic import Packing, loads_of, needs_of, own_sides, parcels_of
from rayfcp.plan.blocks.planner import plan_blocks
from rayfcp.values import ClusterSpec, Pictures, SequenceSpec
from tests.examples import examples
from tests.masks import pictured, sees
from tests.plan.blocks.helpers import any_options, pool_of, small
from tests.plan.helpers import UNIT, batch_of, batches

PICTURED = st.builds(
    lambda sequences, seed: pictured(sequences, seed=seed),
    batches(max_sequences=6, max_tokens=120),
    st.integers(0, 9999),
)


def in_order(sequences: list[SequenceSpec]) -> list[SequenceSpec]:
    """As the columns of their pool come."""
    return sorted(sequences, key=lambda each: (-each.attention_cells / each.num_tokens, -each.num_tokens, each.id))


@examples(60)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(1, 6))
def test_every_need_is_met_once_with_its_cells(seed: int, num_ranks: int) -> None:
    plain, _ = small(seed, num_ranks=num_ranks)
    sequences = pictured(plain, seed=seed)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=sum(each.num_tokens for each in sequences))
    found = plan_blocks(pool_of(sequences), cluster=cluster, cost=UNIT, options=any_options(seed))
    order = in_order(sequences)
    layout = found.layout(np.array([each.id for each in order]))
    by_id = {each.id: each for each in sequences}
    due = {
        (query.rank, at)
        for query in layout.blocks
        for at, key in enumerate(layout.blocks)
        if key.sequence == query.sequence and key.rank != query.rank
        if any(sees(by_id[key.sequence], row, key.start) for row in range(query.start, query.stop))
    }
    got = Counter((t.target, block) for step in layout.rounds for t in step.transfers for block in t.blocks)
    assert set(got) == due and set(got.values()) <= {1}
    work = work_of(layout, by_id=by_id, num_ranks=num_ranks)
    brought = np.bincount(work.target, work.cells, minlength=num_ranks)
    parcels = found.traffic.parcels
    assert np.bincount(parcels.target, parcels.cells, minlength=num_ranks) == pytest.approx(brought)


@examples(60)
@given(PICTURED, st.integers(1, 6), st.integers(1, 60), st.sampled_from(["shares", "lpt"]))
def test_cells_of_ranks_are_those_of_their_blocks(
    sequences: list[SequenceSpec], num_ranks: int, block_tokens: int, placement: str
) -> None:
    pool, order = pool_of(sequences), in_order(sequences)
    space = Space(
        num_ranks=num_ranks,
        max_tokens=int(pool.length.sum()),
        block_tokens=block_tokens,
        weights=np.ones(num_ranks),
    )
    options = BlockOptions(placement="lpt" if placement == "lpt" else "shares")
    pieces = distribute(pool, space=space, half_tokens=0.0, options=options)
    rows = zip(pieces.owner.tolist(), pieces.start.tolist(), pieces.stop.tolist(), strict=True)
    cells = [order[owner].block_cells(start, stop) for owner, start, stop in rows]
    assert loads_of(pool, pieces)[1] == pytest.approx(np.bincount(pieces.rank, cells, minlength=num_ranks))


@examples(60)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=7), st.integers(1, 60), st.integers(0, 9999))
def test_shares_of_a_sequence_have_cells_in_proportion(shares: list[int], block_tokens: int, seed: int) -> None:
    """Whatever pictures lie at one end of it: up to the keys that a row sees at each cut."""
    length, count = sum(shares), len(shares)
    pool = pool_of(pictured(batch_of([length]), seed=seed))
    rows = Shares(np.zeros(count, np.int64), np.arange(count), np.array(shares), count, block_tokens)
    pieces = slices_of(pool, rows)
    ends = [0, *pieces.stop.tolist()]
    assert pieces.start.tolist() == ends[:-1] and ends[-1] == length
    tokens, cells = loads_of(pool, pieces)
    assert tokens.tolist() == shares
    assert abs(cells - np.array(shares) * pool.density[0]).max() <= 2 * count * length


def test_pictures_add_the_same_to_layers_with_windows() -> None:
    picture = Pictures(start=10, num_tokens=20, num_patches=80, mutual=True, count=2, stride=30)
    windows = ((0, 1), (8, 3))
    sequence = SequenceSpec(id=0, num_tokens=90, num_targets=0, windows=windows, pictures=(picture,))
    plain = SequenceSpec(id=0, num_tokens=90, num_targets=0, windows=windows)
    pool = pool_of([sequence])
    more = sequence.attention_cells - plain.attention_cells
    assert pool.mutual.cells[-1] == pytest.approx(more)
    assert pool.level[0] == pytest.approx(pool_of([plain]).level[0])


def test_parcels_of_a_picture_that_is_cut() -> None:
    """Rank 0 has half of a picture and what is before it, rank 1 the rest."""
    picture = Pictures(start=10, num_tokens=20, num_patches=80, mutual=True)
    pool = pool_of([SequenceSpec(id=0, num_tokens=40, num_targets=0, pictures=(picture,))])
    shares = Shares(np.zeros(2, np.int64), np.arange(2), np.array([20, 20]), 2, 100)
    pieces = slices_of(pool, shares)._replace(
        owner=np.zeros(2, np.int64),
        start=np.array([0, 20]),
        stop=np.array([20, 40]),
        rank=np.array([0, 1]),
        first=np.array([0, 2]),
    )
    parcels = parcels_of(needs_of(pool, pieces), Packing(pieces, 100))
    found = {(a, b): (cells, sides) for a, b, cells, sides in zip(*parcels[2:4], *parcels[5:], strict=True)}
    assert found == {(0, 1): (20 * 20, 20), (1, 0): (10 * 10, 10)}
    assert own_sides(pool, pieces)[0].sum() == 10 + 10 + 19 / 2
    assert loads_of(pool, pieces)[1].tolist() == [210 + 45 + 100, 20 * 20 + 210 + 45]
    assert list(itertools.chain(parcels.tokens)) == [20, 20]
