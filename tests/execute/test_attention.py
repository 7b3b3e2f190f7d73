"""The interpreter against dense attention: any placement, any rounds, any lengths, outputs and gradients."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.execute.attention import attention
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.transport import Fabric, InProcessTransport
from rayfcp.plan import lay_out
from rayfcp.program import AttentionProgram, HeadProgram
from rayfcp.program.attention import lower_attention
from rayfcp.program.heads import lower_heads
from rayfcp.values import Block, Group, Layout, Mask, MicrobatchPlan, Primitive, SequenceSpec
from tests.execute.layouts import random_layout
from tests.masks import seen

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
Tensors = dict[int, list[torch.Tensor]]
Programs = Sequence[AttentionProgram | HeadProgram]


def run_ranks(work: Callable[[int], None], *, num_ranks: int, fabric: Fabric) -> None:
    """One thread per rank; the first failure of any is raised here."""
    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(error)
            fabric.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def dense(tensors: Tensors, sequences: Sequence[SequenceSpec]) -> Tensors:
    """out, dq, dk, dv per sequence by one softmax; layers of the first kind."""
    results: Tensors = {}
    for sequence in sequences:
        q, k, v = (part.clone().requires_grad_() for part in tensors[sequence.id][:3])
        wide = [part.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for part in (k, v)]
        scores = q.transpose(0, 1) @ wide[0].transpose(1, 2) * HEAD_DIM**-0.5
        window = sequence.windows[0][0] if sequence.windows else 0
        scores = scores.masked_fill(~torch.from_numpy(seen(sequence, window=window)), float("-inf"))
        out = (scores.softmax(-1) @ wide[1]).transpose(0, 1)
        out.backward(tensors[sequence.id][3])
        results[sequence.id] = [out.detach(), q.grad, k.grad, v.grad]
    return results


def distributed(programs: Programs, layout: Layout, tensors: Tensors, sequences: Sequence[SequenceSpec]) -> Tensors:
    """The same by the interpreter, one thread per rank, put together again."""
    results = {s.id: [torch.zeros_like(tensors[s.id][i]) for i in (0, 0, 1, 2)] for s in sequences}
    fabric = Fabric(len(programs))
    kernel = pick_kernel("cpu")

    def work(rank: int) -> None:
        own = [block for block in layout.blocks if block.rank == rank]
        if own:
            inputs = [torch.cat([tensors[b.sequence][i][b.start : b.stop] for b in own]) for i in range(4)]
        else:
            inputs = [
                torch.ones(1, heads, HEAD_DIM, dtype=tensors[0][0].dtype)
                for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
            ]
        q, k, v = (part.requires_grad_() for part in inputs[:3])
        out = attention(q, k, v, programs[rank], transport=InProcessTransport(fabric, rank), kernel=kernel)
        out.backward(inputs[3])
        at = 0
        for block in own:
            for whole, part in zip(results[block.sequence], (out.detach(), q.grad, k.grad, v.grad), strict=True):
                whole[block.start : block.stop] = part[at : at + block.num_tokens]
            at += block.num_tokens

    run_ranks(work, num_ranks=len(programs), fabric=fabric)
    return results


def assert_equal_to_dense(
    layout: Layout, sequences: Sequence[SequenceSpec], *, num_ranks: int, dtype: torch.dtype
) -> None:
    """The layout without groups: rings and rounds."""
    programs = lower_attention(layout, masks={s.id: s.mask for s in sequences}, num_ranks=num_ranks)
    assert_programs_equal_to_dense(programs, layout, sequences, dtype=dtype)


def assert_programs_equal_to_dense(
    programs: Programs, layout: Layout, sequences: Sequence[SequenceSpec], *, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        s.id: [
            torch.randn(s.num_tokens, heads, HEAD_DIM, dtype=dtype, generator=generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
        for s in sequences
    }
    expected, found = dense(tensors, sequences), distributed(programs, layout, tensors, sequences)
    bound = 1e-10 if dtype is torch.float64 else 1e-5
    for sequence in sequences:
        for name, want, have in zip(("out", "dq", "dk", "dv"), expected[sequence.id], found[sequence.id], strict=True):
            error = float((want - have).norm() / want.norm().clamp_min(1.0))
            assert error <= bound, f"sequence {sequence.id} {name}: relative error {error:.2e}"


def specs(lengths: Sequence[int], masks: Sequence[Mask]) -> list[SequenceSpec]:
    return [
        SequenceSpec(id=i, num_tokens=n, num_targets=n - 1, mask=masks[i % len(masks)]) for i, n in enumerate(lengths)
    ]


LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=4)
MASKS = st.lists(st.sampled_from(list(Mask)), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, masks=MASKS, num_ranks=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_any_placement_and_any_rounds(lengths: list[int], masks: list[Mask], num_ranks: int, seed: int) -> None:
    sequences = specs(lengths, masks)
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_equal_to_dense(layout, sequences, num_ranks=num_ranks, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, masks=MASKS, num_ranks=st.integers(1, 6), data=st.data())
def test_zigzag_rings_of_any_degree(lengths: list[int], masks: list[Mask], num_ranks: int, data: st.DataObject) -> None:
    sequences = specs(lengths, masks)
    degree = data.draw(st.integers(1, num_ranks))
    group = Group(ranks=tuple(range(num_ranks - degree, num_ranks)), sequences=tuple(range(len(sequences))))
    microbatch = MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0)
    layout = lay_out(microbatch, sequences)
    assert_equal_to_dense(layout, sequences, num_ranks=num_ranks, dtype=torch.float64)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_fp32_is_within_1e_5(degree: int) -> None:
    sequences = specs([257, 1, 63, 3], [Mask.CAUSAL])
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


@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    masks=MASKS,
    degree=st.sampled_from([2, 4]),
    ranks=st.permutations(range(5)),
    seed=st.none() | st.integers(0, 10_000),
)
def test_ulysses_groups_of_any_ranks(
    lengths: list[int], masks: list[Mask], degree: int, ranks: list[int], seed: int | None
) -> None:
    """Level shares, or blocks strewn over the group; two key/value heads, alone or replicated."""
    sequences = specs(lengths, masks)
    group = Group(ranks=tuple(ranks[:degree]), sequences=tuple(range(len(lengths))), primitive=Primitive.ULYSSES)
    microbatch = MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0)
    layout = lay_out(microbatch, sequences)
    if seed is not None:
        strewn = random_layout(sequences, num_ranks=degree, seed=seed).blocks
        blocks = tuple(replace(block, rank=group.ranks[block.rank]) for block in strewn)
        layout = Layout(blocks=blocks, rounds=())
    programs: list[AttentionProgram | HeadProgram] = [AttentionProgram(num_tokens=1, forward=(), backward=())] * 5
    for rank, program in lower_heads(layout, [group.ranks], masks={s.id: s.mask for s in sequences}).items():
        programs[rank] = program
    assert_programs_equal_to_dense(programs, layout, sequences, dtype=torch.float64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (12, 3)])
def test_heads_that_a_degree_cannot_share_out_are_named(heads: int, kv_heads: int) -> None:
    layout = Layout(blocks=(Block(sequence=0, start=0, stop=3, rank=0),), rounds=())
    program = lower_heads(layout, [(0, 1, 2, 3)], masks={0: Mask.CAUSAL})[0]
    query, key = torch.zeros(3, heads, 8), torch.zeros(3, kv_heads, 8)
    expected = f"{heads} heads on {kv_heads} key/value heads cannot be shared out over the 4 ranks"
    with pytest.raises(ValueError, match=expected):
        attention(query, key, key, program, transport=InProcessTransport(Fabric(4), 0), kernel=pick_kernel("cpu"))


def test_a_program_of_other_ranks_is_named() -> None:
    layout = Layout(blocks=(Block(sequence=0, start=0, stop=3, rank=0),), rounds=())
    program = lower_heads(layout, [(0, 1)], masks={0: Mask.CAUSAL})[0]
    tensor = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"the program is of ranks \(0, 1\), this is rank 2"):
        attention(
            tensor, tensor, tensor, program, transport=InProcessTransport(Fabric(3), 2), kernel=pick_kernel("cpu")
        )
