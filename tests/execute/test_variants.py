"""Soft caps and sinks on ranks: outputs and gradients, those of sinks included, are those of one softmax."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.execute.dense import (
    HEADS,
    LENGTHS,
    Variant,
    assert_lowered_equal_to_dense,
    assert_ulysses_equal_to_dense,
)
from tests.execute.layouts import random_layout, ring
from tests.execute.test_windows import windowed
from tests.masks import specs

SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)
assert len(SINKS) == HEADS
VARIANTS = st.sampled_from([Variant(sinks=SINKS), Variant(softcap=1.5), Variant(softcap=1.5, sinks=SINKS)])
WINDOWS = st.sampled_from([0, 3, 16, -7])


@examples(15)
@given(
    lengths=LENGTHS,
    num_ranks=st.integers(1, 5),
    window=WINDOWS,
    variant=VARIANTS,
    seed=st.none() | st.integers(0, 10_000),
)
def test_rings_and_any_placement(
    lengths: list[int], num_ranks: int, window: int, variant: Variant, seed: int | None
) -> None:
    sequences = windowed(specs(lengths), window)
    if seed is None:
        layout = ring(sequences, num_ranks=num_ranks)
    else:
        layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_lowered_equal_to_dense(layout, sequences, num_ranks=num_ranks, variant=variant)


@examples(6)
@given(lengths=LENGTHS, degree=st.sampled_from([2, 4]), window=WINDOWS, variant=VARIANTS)
def test_ranks_that_share_out_heads(lengths: list[int], degree: int, window: int, variant: Variant) -> None:
    assert_ulysses_equal_to_dense(windowed(specs(lengths), window), degree=degree, variant=variant)
