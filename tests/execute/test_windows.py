"""Layers with windows against dense masked attention: any placement, rounds, groups, slices; outputs and gradients."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.program import lower
from rayfcp.values import Block, LayerKind, Layout, SequenceSpec
from tests.examples import examples
from tests.execute import test_context
from tests.execute.dense import LENGTHS, assert_lowered_equal_to_dense, assert_ulysses_equal_to_dense
from tests.execute.layouts import plan_of, random_layout, ring
from tests.execute.test_blocks import laid_out
from tests.execute.threads import InProcessTransport
from tests.masks import kinds, specs
from tests.program.helpers import forwards
from tests.program.pipelines import random_pipelines

WINDOWS = st.sampled_from([*kinds(1, 2, 3, 7, 16, 40), *(LayerKind(chunk=each) for each in (1, 3, 16))])
RANKS = st.integers(1, 3)


def windowed(sequences: Sequence[SequenceSpec], window: LayerKind) -> list[SequenceSpec]:
    return [replace(each, layer_kinds=((window, 1),)) for each in sequences]


@examples(25)
@given(lengths=LENGTHS, num_ranks=RANKS, window=WINDOWS, seed=st.none() | st.integers(0, 10_000))
def test_rings_and_any_placement(lengths: list[int], num_ranks: int, window: LayerKind, seed: int | None) -> None:
    sequences = windowed(specs(lengths), window)
    if seed is None:
        layout = ring(sequences, num_ranks=num_ranks)
    else:
        layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_lowered_equal_to_dense(layout, sequences, num_ranks=num_ranks)


@examples(8)
@given(
    lengths=LENGTHS,
    num_ranks=st.sampled_from([2, 3, 5]),
    window=WINDOWS,
    block_tokens=st.integers(1, 40),
    coalesce=st.integers(1, 4),
    heads=st.sampled_from([1, 1, 2]),
)
def test_planned_blocks(
    lengths: list[int], num_ranks: int, window: LayerKind, block_tokens: int, coalesce: int, heads: int
) -> None:
    """Paced rounds; runs of ranks that share out heads."""
    sequences = windowed(specs(lengths), window)
    options = BlockOptions(block_tokens=block_tokens, coalesce=coalesce)
    layout = laid_out(sequences, num_ranks=num_ranks, options=options, heads=heads)
    assert_lowered_equal_to_dense(layout, sequences, num_ranks=heads * num_ranks)


def test_attends_that_are_cut_over_phases() -> None:
    """Long enough for several tiles of a kernel in a phase."""
    sequences = windowed(specs([1501, 700, 90]), LayerKind(window=400))
    layout = laid_out(sequences, num_ranks=3, options=BlockOptions(block_tokens=200, coalesce=2))
    assert_lowered_equal_to_dense(layout, sequences, num_ranks=3)


@examples(10)
@given(lengths=LENGTHS, degree=st.sampled_from([2, 4]), window=WINDOWS)
def test_ulysses_groups(lengths: list[int], degree: int, window: LayerKind) -> None:
    assert_ulysses_equal_to_dense(windowed(specs(lengths), window), degree=degree)


@examples(6)
@given(seed=st.integers(0, 100_000), num_ranks=RANKS, window=WINDOWS, heads=st.sampled_from([1, 1, 2]))
def test_slices_see_context_through_the_window(seed: int, num_ranks: int, window: LayerKind, heads: int) -> None:
    """Rings and Ulysses groups, runs that share out heads; several pipelines."""
    plan, sequences = random_pipelines(seed, num_stages=1, num_ranks=num_ranks)
    if sequences:
        sequences = windowed(sequences, window)
        test_context.assert_equal_to_dense(plan, sequences, heads=(12, 6), dtype=torch.float64, runs=heads)


def test_a_window_that_was_not_lowered_is_named() -> None:
    sequences = [
        SequenceSpec(id=0, num_tokens=9, num_targets=8, layer_kinds=tuple(zip(kinds(0, 4, 20), (1, 5, 1), strict=True)))
    ]
    layout = Layout(blocks=(Block(sequence=0, start=0, stop=9, rank=0),), rounds=())
    (program,) = lower(plan_of(layout, sequences, num_ranks=1), sequences)
    full, near, long = kinds(0, 4, 20)
    context = AttentionContext.of(
        forwards(program)[0], transport=InProcessTransport(Fabric(1), 0), kernel=pick_kernel("cpu")
    )
    assert context.of_kind(full) is context
    assert context.of_kind(long).schedule is context.schedule is not context.of_kind(near).schedule
    with pytest.raises(ValueError, match=r"a layer has window 5, .* layers with full attention, window 4, window 20"):
        context.of_kind(LayerKind(window=5))
