"""Algorithm 1."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan.blocks.kernels.distribute import Items, Rule, longest_first
from tests.examples import examples

Sizes = list[tuple[int, int]]
"""(tokens, pairs)."""


def items_of(sizes: Sizes, *, num_ranks: int) -> Items:
    tokens, pairs = np.array(sizes, np.int64).T
    return Items(tokens.copy(), tokens * num_ranks / tokens.sum(), pairs * num_ranks / pairs.sum())


some_sizes = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 500)), min_size=1, max_size=24)


def test_by_hand() -> None:
    """Equal tokens; pairs 8, 7, 6, 5, 4 on two ranks: 8 | 7, then 6 to the 7, 5 to the 8, 4 to either at 13."""
    items = items_of([(1, 8), (1, 7), (1, 6), (1, 5), (1, 4)], num_ranks=2)
    rule = Rule(0.0, 1.0, 5, np.ones(2))
    assert longest_first(items, rule).tolist() == [0, 1, 1, 0, 0]
    assert longest_first(items, Rule(0.0, 1.0, 2, np.ones(2))).tolist() == []


@examples(100)
@given(some_sizes, st.integers(1, 5), st.integers(0, 60))
def test_memory_binds(sizes: Sizes, num_ranks: int, spare: int) -> None:
    items = items_of(sizes, num_ranks=num_ranks)
    most = -(-sum(tokens for tokens, _ in sizes) // num_ranks) + spare
    rank_of = longest_first(items, Rule(1.0, 1.0, most, np.ones(num_ranks)))
    if len(rank_of):
        assert np.bincount(rank_of, items.tokens, minlength=num_ranks).max() <= most


@examples(60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 3))
def test_compute_alone_is_within_a_third_of_the_optimum(pairs: list[int], num_ranks: int) -> None:
    items = items_of([(1, each) for each in pairs], num_ranks=num_ranks)
    rank_of = longest_first(items, Rule(0.0, 1.0, 10, np.ones(num_ranks)))
    found = np.bincount(rank_of, np.array(pairs), minlength=num_ranks).max()
    least = min(
        max(sum(each for each, at in zip(pairs, ranks, strict=True) if at == rank) for rank in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(pairs))
    )
    # alpha 0 leaves max(m, c) as the order, which is by pairs here unless all are less than the mean of tokens
    assert least <= found <= (2 - 1 / num_ranks) * least + 1e-9
