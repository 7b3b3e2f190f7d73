"""Blocks anywhere, coalesced and buffered, through the interpreter: outputs and gradients of dense attention."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions
from rayfcp.plan import CostModel
from rayfcp.plan.blocks.planner import batch_of, plan_blocks
from rayfcp.program import Forward, lower
from rayfcp.values import ClusterSpec, Layout, SequenceSpec
from rayfcp.verify import check_programs
from tests.examples import examples
from tests.execute.dense import LENGTHS, assert_equal_to_dense, assert_programs_equal_to_dense
from tests.execute.layouts import over_runs, plan_of, random_layout
from tests.masks import specs

COST = CostModel(
    attention_s_per_pair=1e-3,
    linear_s_per_token=1e-2,
    fixed_s=0.5,
    ring_intra_s_per_token=4e-3,
    ring_inter_s_per_token=3e-2,
    ring_s_per_round=0.2,
    ranks_per_node=2,
    attention_half_tokens=5.0,
)


def laid_out(sequences: list[SequenceSpec], *, num_ranks: int, options: BlockOptions, heads: int = 1) -> Layout:
    """Layout on ranks, or on runs of `heads` ranks in place of each."""
    batch = batch_of(sequences)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=sum(each.num_tokens for each in sequences))
    found = plan_blocks(batch.pool(np.arange(len(sequences))), cluster=cluster, cost=COST, options=options)
    layout = found.layout(batch.ids)
    return over_runs(layout, num_ranks=heads * num_ranks, heads=heads) if heads > 1 else layout


@examples(8)
@given(
    lengths=LENGTHS,
    num_ranks=st.sampled_from([2, 3, 4, 5, 7]),
    block_tokens=st.integers(1, 40),
    coalesce=st.integers(1, 6),
    num_buffers=st.integers(2, 4),
    placement=st.sampled_from(["shares", "lpt"]),
    pairing=st.sampled_from(["zigzag", "free"]),
)
def test_any_block_size_coalescing_degree_and_buffer_count(
    lengths: list[int],
    num_ranks: int,
    block_tokens: int,
    coalesce: int,
    num_buffers: int,
    placement: str,
    pairing: str,
) -> None:
    sequences = specs(lengths)
    options = BlockOptions(
        block_tokens=block_tokens,
        coalesce=coalesce,
        num_buffers=num_buffers,
        placement="lpt" if placement == "lpt" else "shares",
        pairing="free" if pairing == "free" else "zigzag",
    )
    layout = laid_out(sequences, num_ranks=num_ranks, options=options)
    assert_equal_to_dense(layout, sequences, num_ranks=num_ranks, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attends_that_are_cut_over_phases(dtype: torch.dtype) -> None:
    """Long enough for several tiles of a kernel in a phase."""
    sequences = specs([1501, 700, 90])
    layout = laid_out(sequences, num_ranks=3, options=BlockOptions(block_tokens=200, coalesce=2))
    assert layout.pacing is not None and len(layout.rounds) >= 4
    assert_equal_to_dense(layout, sequences, num_ranks=3, dtype=dtype)


@examples(40)
@given(
    lengths=LENGTHS,
    ranks_and_heads=st.sampled_from([(2, 2), (4, 2), (6, 2), (4, 4), (8, 4)]),
    block_tokens=st.integers(1, 40),
    coalesce=st.integers(1, 4),
    dealt=st.booleans(),
)
def test_blocks_of_runs_that_share_out_heads(
    lengths: list[int],
    ranks_and_heads: tuple[int, int],
    block_tokens: int,
    coalesce: int,
    dealt: bool,
) -> None:
    """Every share of heads travels between ranks of its own; ranks may have none of a run's tokens."""
    num_ranks, heads = ranks_and_heads
    options = BlockOptions(block_tokens=block_tokens, coalesce=coalesce)
    sequences = specs(lengths)
    layout = laid_out(sequences, num_ranks=num_ranks // heads, options=options)
    layout = over_runs(layout, num_ranks=num_ranks, heads=heads, dealt=dealt)
    assert_runs_equal_to_dense(layout, sequences, num_ranks=num_ranks, dtype=torch.float64)


@examples(30)
@given(lengths=LENGTHS, num_runs=st.integers(1, 3), seed=st.integers(0, 10_000), dealt=st.booleans())
def test_relays_of_runs_that_share_out_heads(lengths: list[int], num_runs: int, seed: int, dealt: bool) -> None:
    sequences = specs(lengths)
    layout = over_runs(
        random_layout(sequences, num_ranks=num_runs, seed=seed), num_ranks=2 * num_runs, heads=2, dealt=dealt
    )
    assert_runs_equal_to_dense(layout, sequences, num_ranks=2 * num_runs, dtype=torch.float64)


def test_runs_that_share_out_heads_in_fp32() -> None:
    sequences = specs([401, 170, 90])
    layout = laid_out(sequences, num_ranks=3, options=BlockOptions(block_tokens=60, coalesce=2))
    layout = over_runs(layout, num_ranks=6, heads=2)
    assert_runs_equal_to_dense(layout, sequences, num_ranks=6, dtype=torch.float32)


def assert_runs_equal_to_dense(
    layout: Layout, sequences: list[SequenceSpec], *, num_ranks: int, dtype: torch.dtype
) -> None:
    """Lowered as part of a plan, proved, run."""
    plan = plan_of(layout, sequences, num_ranks=num_ranks)
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
    passes = [item.attention for each in programs for item in each.instructions if isinstance(item, Forward)]
    assert_programs_equal_to_dense(passes, layout, sequences, dtype=dtype)
