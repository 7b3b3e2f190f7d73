"""Attention for loops that bring their own layout, against dense attention: outputs and gradients in their order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions
from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.plan import lay_out
from rayfcp.program import Forward, Payload, Piece, lower, lower_reshuffle
from rayfcp.values import Group, LayerKind, Layout, MicrobatchPlan, SequenceSpec
from tests.examples import examples
from tests.execute.dense import HEAD_DIM, HEADS, KV_HEADS, LENGTHS, Tensors, dense, random_tensors, run_ranks
from tests.execute.layouts import plan_of, random_layout, ring
from tests.execute.loops import packed_slices, random_pieces, whole_sequences
from tests.execute.test_blocks import laid_out
from tests.execute.threads import InProcessTransport
from tests.masks import specs
from tests.program.lowered import attention_of

WIDTHS = (HEADS, KV_HEADS, KV_HEADS, HEADS)
Pieces = Sequence[Sequence[Piece]]


def contexts(
    theirs: Pieces, layout: Layout, sequences: Sequence[SequenceSpec], *, fabric: Fabric
) -> list[AttentionContext]:
    lowered = lower(plan_of(layout, sequences, num_ranks=len(theirs)), sequences)
    programs = [item.attention for each in lowered for item in each.instructions if isinstance(item, Forward)]
    return [
        AttentionContext(
            schedule=make_schedule(program, reshuffle=reshuffle),
            transport=InProcessTransport(fabric, rank),
            kernel=pick_kernel("cpu"),
        )
        for rank, (program, reshuffle) in enumerate(zip(programs, lower_reshuffle(theirs, layout), strict=True))
    ]


def held(pieces: Sequence[Piece], tensors: Tensors, *, padding: int) -> list[torch.Tensor]:
    """A rank's rows of each tensor, in its order; `padding` rows if it has none."""
    if not pieces:
        return [tensors[0][0].new_ones((padding, heads, HEAD_DIM)) for heads in WIDTHS]
    return [torch.cat([tensors[p.sequence][i][p.start : p.stop] for p in pieces]) for i in range(4)]


def in_their_order(theirs: Pieces, ranks: Sequence[AttentionContext], tensors: Tensors, *, fabric: Fabric) -> Tensors:
    """out, dq, dk, dv by sequence, from one thread per rank. Every other rank without tokens passes padding."""
    results = {number: [torch.zeros_like(parts[i]) for i in (0, 0, 1, 2)] for number, parts in tensors.items()}

    def work(rank: int) -> None:
        *inputs, grad = held(theirs[rank], tensors, padding=rank % 2)
        q, k, v = (part.requires_grad_() for part in inputs)
        out = attention(q, k, v, ranks[rank])
        out.backward(grad)
        at = 0
        for piece in theirs[rank]:
            for whole, part in zip(results[piece.sequence], (out.detach(), q.grad, k.grad, v.grad), strict=True):
                whole[piece.start : piece.stop] = part[at : at + piece.num_tokens]
            at += piece.num_tokens

    run_ranks(work, num_ranks=len(theirs), fabric=fabric)
    return results


def assert_dense(theirs: Pieces, layout: Layout, sequences: Sequence[SequenceSpec], dtype: torch.dtype) -> None:
    """Outputs and gradients of dense attention, and no bytes but those of tokens that change rank."""
    tensors, fabric = random_tensors(sequences, dtype=dtype), Fabric(len(theirs))
    ranks = contexts(theirs, layout, sequences, fabric=fabric)
    expected, found = dense(tensors, sequences), in_their_order(theirs, ranks, tensors, fabric=fabric)
    bound = 1e-10 if dtype is torch.float64 else 1e-5
    for sequence in sequences:
        for name, want, have in zip(("out", "dq", "dk", "dv"), expected[sequence.id], found[sequence.id], strict=True):
            error = float((want - have).norm() / want.norm().clamp_min(1.0))
            assert error <= bound, f"sequence {sequence.id} {name}: relative error {error:.2e}"
    assert sum(each.stats.bytes_sent for each in ranks) == due_bytes(theirs, layout, ranks, dtype=dtype)


def due_bytes(theirs: Pieces, layout: Layout, ranks: Sequence[AttentionContext], *, dtype: torch.dtype) -> int:
    """q, k, v, out and the gradients of these for each token that changes rank, and the messages of the rounds."""
    home = {(b.sequence, token): b.rank for b in layout.blocks for token in range(b.start, b.stop)}
    away = sum(
        home[piece.sequence, token] != rank
        for rank, pieces in enumerate(theirs)
        for piece in pieces
        for token in range(piece.start, piece.stop)
    )
    head = HEAD_DIM * dtype.itemsize
    rounds = sum(
        message.num_tokens * 2 * KV_HEADS * head  # dK, dV in fp32 or fp64, as the inputs are
        for context in ranks
        for step in (*context.schedule.forward, *context.schedule.backward)
        for message in step.sends
        if message.payload in (Payload.KV, Payload.GRAD)
    )
    return away * 4 * (HEADS + KV_HEADS) * head + rounds


@examples(40)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_any_layout_to_any_other(lengths: list[int], num_ranks: int, seed: int) -> None:
    sequences = specs(lengths)
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    theirs = random_pieces(sequences, num_ranks=num_ranks, seed=seed + 1)
    assert_dense(theirs, layout, sequences, torch.float64)


@examples(20)
@given(lengths=LENGTHS, window=st.integers(1, 40), num_ranks=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_layers_with_windows(lengths: list[int], window: int, num_ranks: int, seed: int) -> None:
    """Squares of some rows on others stay in their round, rectangles and causal squares on themselves move."""
    sequences = [replace(each, layer_kinds=((LayerKind(window=window), 1),)) for each in specs(lengths)]
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_dense(random_pieces(sequences, num_ranks=num_ranks, seed=seed + 1), layout, sequences, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bring", [packed_slices, whole_sequences])
@pytest.mark.parametrize("kind", ["ring", "blocks"])
def test_long_sequences(kind: str, bring: Any, dtype: torch.dtype) -> None:
    sequences = specs([1501, 700, 90])
    if kind == "ring":
        layout = ring(sequences, num_ranks=3)
    else:
        layout = laid_out(sequences, num_ranks=3, options=BlockOptions(block_tokens=200, coalesce=2))
    assert_dense(bring(sequences, num_ranks=3), layout, sequences, dtype)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_plans_own_order_sends_nothing_and_copies_nothing(num_ranks: int) -> None:
    sequences = specs([40, 23])
    group = [Group(ranks=(sequence.id % num_ranks,), sequences=(sequence.id,)) for sequence in sequences]
    if num_ranks == 1:
        group = [Group(ranks=(0,), sequences=(0, 1))]
    microbatch = MicrobatchPlan(groups=tuple(group), group_s=(1.0,) * len(group), predicted_s=1.0)
    layout = lay_out(microbatch, sequences)
    theirs: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for block in layout.blocks:
        theirs[block.rank].append(Piece(sequence=block.sequence, start=block.start, stop=block.stop))
    assert_dense(theirs, layout, sequences, torch.float64)
    for context, pieces in zip(contexts(theirs, layout, sequences, fabric=Fabric(num_ranks)), theirs, strict=True):
        assert (context.schedule.reshuffle is None) == bool(pieces)


def test_what_does_not_fit_is_named() -> None:
    sequences = specs([8])
    theirs = [[Piece(sequence=0, start=0, stop=8)], []]
    layout = ring(sequences, num_ranks=2)
    programs, shuffles = attention_of(layout, num_ranks=2), lower_reshuffle(theirs, layout)
    transport, kernel = InProcessTransport(Fabric(2), 0), pick_kernel("cpu")
    eight = torch.zeros(8, 1, 16)
    with pytest.raises(ValueError, match="the reshuffle is of rank 1, this is rank 0"):
        attention(eight, eight, eight, programs[0], reshuffle=shuffles[1], transport=transport, kernel=kernel)
    four = eight[:4]
    with pytest.raises(ValueError, match="query has 4 tokens and key 4, the reshuffle has 8"):
        attention(four, four, four, programs[0], reshuffle=shuffles[0], transport=transport, kernel=kernel)
    context = AttentionContext(schedule=make_schedule(programs[0]), transport=transport, kernel=kernel)
    with pytest.raises(ValueError, match="the reshuffle of rank 0 is given with a context"):
        attention(four, four, four, context, reshuffle=shuffles[0])
    with pytest.raises(ValueError, match=r"query is torch\.float32, key torch\.float64"):
        attention(four, four.double(), four.double(), context)
    other = attention_of(ring(specs([6]), num_ranks=2), num_ranks=2)
    with pytest.raises(ValueError, match="rank 0 has 4 tokens in its layout, the program 3"):
        make_schedule(other[0], reshuffle=shuffles[0])
