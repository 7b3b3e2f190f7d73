"""Mutual pictures against dense masked attention: any placement, rounds, groups, slices; outputs and gradients."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions, PlanConfig
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.plan.strategies.registry import names
from rayfcp.values import ClusterSpec, Mask, Pictures, SequenceSpec
from tests.examples import examples
from tests.execute import test_context
from tests.execute.dense import LENGTHS, MASKS, assert_lowered_equal_to_dense, assert_ulysses_equal_to_dense
from tests.execute.layouts import random_layout, ring
from tests.execute.test_blocks import laid_out
from tests.masks import pictured, specs, uncut
from tests.program.pipelines import random_pipelines
from tests.simulate.helpers import MODEL

WINDOWS = st.sampled_from([0, 0, 1, 3, 7, 16])
RANKS = st.integers(1, 3)
STAGED = ("elastic-pipeline", "seq1f1b", "dapple")
SEEDS = st.integers(0, 10_000)


def sequences_of(lengths: list[int], masks: Sequence[Mask], *, window: int, seed: int) -> list[SequenceSpec]:
    windows = ((window, 1),) if window else ()
    return [replace(each, windows=windows) for each in pictured(specs(lengths, masks), seed=seed)]


@examples(25)
@given(lengths=LENGTHS, masks=MASKS, num_ranks=RANKS, window=WINDOWS, seed=SEEDS, rings=st.booleans())
def test_rings_and_any_placement(
    lengths: list[int], masks: list[Mask], num_ranks: int, window: int, seed: int, rings: bool
) -> None:
    sequences = sequences_of(lengths, masks, window=window, seed=seed)
    layout = ring(sequences, num_ranks=num_ranks) if rings else random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_lowered_equal_to_dense(layout, sequences, num_ranks=num_ranks)


@examples(10)
@given(
    lengths=LENGTHS,
    num_ranks=st.sampled_from([2, 3, 5]),
    window=WINDOWS,
    seed=SEEDS,
    block_tokens=st.integers(1, 40),
    coalesce=st.integers(1, 4),
    heads=st.sampled_from([1, 1, 2]),
)
def test_planned_blocks(
    lengths: list[int], num_ranks: int, window: int, seed: int, block_tokens: int, coalesce: int, heads: int
) -> None:
    """Paced rounds; runs of ranks that share out heads."""
    sequences = sequences_of(lengths, [Mask.CAUSAL], window=window, seed=seed)
    options = BlockOptions(block_tokens=block_tokens, coalesce=coalesce)
    layout = laid_out(sequences, num_ranks=num_ranks, options=options, heads=heads)
    assert_lowered_equal_to_dense(layout, sequences, num_ranks=heads * num_ranks)


def test_attends_that_are_cut_over_phases() -> None:
    """Pictures of several tiles of a kernel, and pictures that blocks cut."""
    sequences = specs([1501, 700, 90], [Mask.CAUSAL])
    runs = (
        Pictures(start=100, num_tokens=500, num_patches=9, mutual=True),
        Pictures(start=640, num_tokens=64, num_patches=9, mutual=True, count=9, stride=70),
    )
    sequences[0] = replace(sequences[0], pictures=runs)
    layout = laid_out(sequences, num_ranks=3, options=BlockOptions(block_tokens=200, coalesce=2))
    assert layout.pacing is not None and len(layout.rounds) >= 4
    assert_lowered_equal_to_dense(layout, sequences, num_ranks=3)


@examples(15)
@given(lengths=LENGTHS, masks=MASKS, degree=st.sampled_from([2, 4]), window=WINDOWS, seed=SEEDS)
def test_ulysses_groups(lengths: list[int], masks: list[Mask], degree: int, window: int, seed: int) -> None:
    assert_ulysses_equal_to_dense(sequences_of(lengths, masks, window=window, seed=seed), degree=degree)


@examples(6)
@given(seed=SEEDS, num_ranks=RANKS, window=WINDOWS, heads=st.sampled_from([1, 1, 2]))
def test_slices_that_cut_no_picture(seed: int, num_ranks: int, window: int, heads: int) -> None:
    """Rings and Ulysses groups, runs that share out heads; several pipelines."""
    plan, plain = random_pipelines(seed, num_stages=1, num_ranks=num_ranks)
    if plain:
        windows = ((window, 1),) if window else ()
        sequences = [replace(each, windows=windows) for each in uncut(plan, pictured(plain, seed=seed))]
        test_context.assert_equal_to_dense(plan, sequences, heads=(12, 6), dtype=torch.float64, runs=heads)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", sorted({*names()} - {*STAGED}))
def test_plans_of_every_strategy(strategy: str, num_ranks: int) -> None:
    """Of those that need no stages. Several microbatches, pictures that ranks share, and a window that is shorter than
    some of them."""
    for seed, window in ((num_ranks, 0), (num_ranks + 3, 16)):
        lengths = [130, 31, 70, 9, 1, 44]
        sequences = sequences_of(lengths, [Mask.CAUSAL], window=window, seed=seed)
        cost = CostModel.from_profiles(
            replace(MODEL, num_heads=12, num_kv_heads=6, layer_windows=(window,) * 4 if window else ()),
            hardware_profile("cpu"),
            num_ranks=num_ranks,
            bytes_per_element=4,
            reduce_every="step",
        )
        plan = plan_batch(
            sequences,
            cluster=ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=-(-210 // num_ranks)),
            cost=cost,
            strategy=strategy,
            options=PlanConfig(primitives=("ring", "ulysses"), search_moves=100),
        )
        assert len(plan.microbatches) > 1
        test_context.assert_equal_to_dense(plan, sequences, heads=(12, 6), dtype=torch.float64)
