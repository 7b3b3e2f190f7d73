"""The interpreter against dense attention: any placement, any rounds, any lengths, outputs and gradients."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.execute.attention.function import attention
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.plan import lay_out
from rayfcp.program import AttentionProgram, HeadProgram
from rayfcp.values import Block, Group, Layout, MicrobatchPlan, Primitive
from tests.examples import examples
from tests.execute.dense import (
    LENGTHS,
    assert_equal_to_dense,
    assert_programs_equal_to_dense,
)
from tests.execute.layouts import random_layout
from tests.execute.threads import InProcessTransport
from tests.masks import specs
from tests.program.lowered import heads_of_runs


@examples(40)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_any_placement_and_any_rounds(lengths: list[int], num_ranks: int, seed: int) -> None:
    sequences = specs(lengths)
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_equal_to_dense(layout, sequences, num_ranks=num_ranks, dtype=torch.float64)


@examples(40)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 6), data=st.data())
def test_zigzag_rings_of_any_degree(lengths: list[int], num_ranks: int, data: st.DataObject) -> None:
    sequences = specs(lengths)
    degree = data.draw(st.integers(1, num_ranks))
    group = Group(ranks=tuple(range(num_ranks - degree, num_ranks)), sequences=tuple(range(len(sequences))))
    microbatch = MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0)
    layout = lay_out(microbatch, sequences)
    assert_equal_to_dense(layout, sequences, num_ranks=num_ranks, dtype=torch.float64)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_fp32_is_within_1e_5(degree: int) -> None:
    sequences = specs([257, 1, 63, 3])
    group = Group(ranks=tuple(range(degree)), sequences=(0, 1, 2, 3))
    layout = lay_out(MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0), sequences)
    assert_equal_to_dense(layout, sequences, num_ranks=degree, dtype=torch.float32)


def test_wrong_tokens_are_named() -> None:
    program = AttentionProgram(num_tokens=3, forward=(), backward=())
    tensor = torch.zeros(2, 1, 8)
    with pytest.raises(ValueError, match="query has 2 tokens"):
        attention(
            tensor, tensor, tensor, program, transport=InProcessTransport(Fabric(1), 0), kernel=pick_kernel("cpu")
        )


@examples(30)
@given(
    lengths=LENGTHS,
    degree=st.sampled_from([2, 4]),
    ranks=st.permutations(range(5)),
    seed=st.none() | st.integers(0, 10_000),
)
def test_ulysses_groups_of_any_ranks(lengths: list[int], degree: int, ranks: list[int], seed: int | None) -> None:
    """Level shares, or blocks strewn over the group; two key/value heads, alone or replicated."""
    sequences = specs(lengths)
    group = Group(ranks=tuple(ranks[:degree]), sequences=tuple(range(len(lengths))), primitive=Primitive.ULYSSES)
    microbatch = MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0)
    layout = lay_out(microbatch, sequences)
    if seed is not None:
        strewn = random_layout(sequences, num_ranks=degree, seed=seed).blocks
        blocks = tuple(replace(block, rank=group.ranks[block.rank]) for block in strewn)
        layout = Layout(blocks=blocks, rounds=())
    programs: list[AttentionProgram | HeadProgram] = [AttentionProgram(num_tokens=1, forward=(), backward=())] * 5
    for rank, program in heads_of_runs(layout, [group.ranks]).items():
        programs[rank] = program
    assert_programs_equal_to_dense(programs, layout, sequences, dtype=torch.float64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (12, 3)])
def test_heads_that_a_degree_cannot_share_out_are_named(heads: int, kv_heads: int) -> None:
    layout = Layout(blocks=(Block(sequence=0, start=0, stop=3, rank=0),), rounds=())
    program = heads_of_runs(layout, [(0, 1, 2, 3)])[0]
    query, key = torch.zeros(3, heads, 8), torch.zeros(3, kv_heads, 8)
    expected = f"{heads} heads on {kv_heads} key/value heads cannot be split over the 4 ranks"
    with pytest.raises(ValueError, match=expected):
        attention(query, key, key, program, transport=InProcessTransport(Fabric(4), 0), kernel=pick_kernel("cpu"))


def test_a_program_of_other_ranks_is_named() -> None:
    layout = Layout(blocks=(Block(sequence=0, start=0, stop=3, rank=0),), rounds=())
    program = heads_of_runs(layout, [(0, 1)])[0]
    tensor = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"the program is of ranks \(0, 1\), this is rank 2"):
        attention(
            tensor, tensor, tensor, program, transport=InProcessTransport(Fabric(3), 2), kernel=pick_kernel("cpu")
        )
