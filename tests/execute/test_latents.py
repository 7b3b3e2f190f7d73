"""Latents in place of keys and values, and values narrower than keys, against dense attention: any placement, rings,
blocks, shared out heads; what travels, what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.latents import Latents
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import AttentionStats, Fabric, LoneTransport
from rayfcp.plan import lay_out
from rayfcp.program import AttentionProgram, HeadProgram
from rayfcp.values import Group, Layout, MicrobatchPlan, Primitive, SequenceSpec
from tests.examples import examples
from tests.execute.dense import LENGTHS, Programs, run_ranks
from tests.execute.layouts import random_layout
from tests.execute.threads import InProcessTransport
from tests.masks import seen, specs
from tests.program.lowered import attention_of, heads_of_runs

HEADS, NOPE, ROPE, VALUE, LATENT = 4, 6, 4, 5, 7
EMPTY = AttentionProgram(num_tokens=1, forward=(), backward=())


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Of each sequence the query, what stands for key and value, and the gradient of the output; `up` for latents."""

    tensors: dict[int, list[Tensor]]
    up: Tensor | None

    @classmethod
    def of(cls, sequences: Sequence[SequenceSpec], *, latents: bool, dtype: torch.dtype = torch.float64) -> "Inputs":
        generator = torch.Generator().manual_seed(2)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

        given = ((1, LATENT), (1, ROPE)) if latents else ((2, NOPE + ROPE), (2, VALUE))
        shapes = ((HEADS, NOPE + ROPE), *given, (HEADS, VALUE))
        tensors = {each.id: [made(each.num_tokens, *shape) for shape in shapes] for each in sequences}
        return cls(tensors=tensors, up=made(HEADS, NOPE + VALUE, LATENT) if latents else None)


Results = tuple[dict[int, list[Tensor]], Tensor | None]
"""out and the gradients of query, key and value of each sequence; the gradient of the up-projection."""


def dense(inputs: Inputs, sequences: Sequence[SequenceSpec]) -> Results:
    up = None if inputs.up is None else inputs.up.clone().requires_grad_()
    found = {}
    for sequence in sequences:
        q, k, v = given = [each.clone().requires_grad_() for each in inputs.tensors[sequence.id][:3]]
        if up is None:
            k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        else:
            both = torch.einsum("tl,hdl->thd", k.squeeze(1), up)
            k, v = torch.cat([both[..., :NOPE], v.expand(-1, HEADS, -1)], dim=2), both[..., NOPE:]
        scores = torch.einsum("qhd,khd->hqk", q, k) * (NOPE + ROPE) ** -0.5
        scores = scores.masked_fill(~torch.from_numpy(seen(sequence)), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        out.backward(inputs.tensors[sequence.id][3])
        found[sequence.id] = [out.detach(), *(each.grad for each in given)]
    return found, None if up is None else up.grad


def distributed(programs: Programs, layout: Layout, inputs: Inputs, *, stats: Sequence[AttentionStats] = ()) -> Results:
    """The same by a thread per rank; gradients of the up-projection are summed, as FSDP does."""
    found = {at: [torch.zeros_like(each[index]) for index in (3, 0, 1, 2)] for at, each in inputs.tensors.items()}
    fabric, ups = Fabric(len(programs)), []

    def work(rank: int) -> None:
        own = [block for block in layout.blocks if block.rank == rank]
        parts = zip(*(inputs.tensors[block.sequence] for block in own), strict=True)
        rows = [torch.cat([each[b.start : b.stop] for each, b in zip(part, own, strict=True)]) for part in parts]
        rows = rows or [torch.ones_like(each[:1]) for each in inputs.tensors[0]]
        leaves = [each.requires_grad_() for each in rows[:3]]
        up = None if inputs.up is None else inputs.up.clone().requires_grad_()
        context = AttentionContext(
            schedule=make_schedule(programs[rank]),
            transport=InProcessTransport(fabric, rank),
            kernel=pick_kernel("cpu"),
            stats=stats[rank] if stats else AttentionStats(),
        )
        out = attention(*leaves, context, up_projection=up)
        out.backward(rows[3] if own else torch.zeros_like(rows[3]))
        ups.append(None if up is None else up.grad)
        at = 0
        for block in own:
            for whole, part in zip(found[block.sequence], (out.detach(), *(each.grad for each in leaves)), strict=True):
                whole[block.start : block.stop] = part[at : at + block.num_tokens]
            at += block.num_tokens

    run_ranks(work, num_ranks=len(programs), fabric=fabric)
    return found, None if inputs.up is None else sum(ups)  # type: ignore[return-value, arg-type]


def assert_same(found: Results, want: Results, *, bound: float = 1e-12) -> None:
    pairs = [(f"sequence {at}", a, b) for at in want[0] for a, b in zip(found[0][at], want[0][at], strict=True)]
    if want[1] is not None:
        pairs.append(("up-projection", found[1], want[1]))  # type: ignore[arg-type]
    for what, have, due in pairs:
        error = float((have - due).norm() / due.norm().clamp_min(1.0))
        assert error <= bound, f"{what}: relative error {error:.2e}"


def ring(sequences: Sequence[SequenceSpec], degree: int, primitive: Primitive = Primitive.RING) -> Layout:
    group = Group(ranks=tuple(range(degree)), sequences=tuple(range(len(sequences))), primitive=primitive)
    return lay_out(MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0), sequences)


@examples(20)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), seed=st.integers(0, 10_000), latents=st.booleans())
def test_blocks_anywhere(lengths: list[int], num_ranks: int, seed: int, latents: bool) -> None:
    sequences = specs(lengths)
    layout, inputs = random_layout(sequences, num_ranks=num_ranks, seed=seed), Inputs.of(sequences, latents=latents)
    found = distributed(attention_of(layout, num_ranks=num_ranks), layout, inputs)
    assert_same(found, dense(inputs, sequences))


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize("latents", [True, False])
def test_zigzag_rings(degree: int, latents: bool) -> None:
    sequences = specs([57, 1, 13, 3])
    layout, inputs = ring(sequences, degree), Inputs.of(sequences, latents=latents)
    found = distributed(attention_of(layout, num_ranks=degree), layout, inputs)
    assert_same(found, dense(inputs, sequences))
    single = Inputs.of(sequences, latents=latents, dtype=torch.float32)
    found = distributed(attention_of(layout, num_ranks=degree), layout, single)
    assert_same(found, dense(single, sequences), bound=1e-5)


@examples(10)
@given(lengths=LENGTHS, degree=st.sampled_from([2, 4]), seed=st.none() | st.integers(0, 999), latents=st.booleans())
def test_shared_out_heads(lengths: list[int], degree: int, seed: int | None, latents: bool) -> None:
    """Latents are copied to all ranks of a group, each of which expands its own heads."""
    sequences = specs(lengths)
    layout = ring(sequences, degree, Primitive.ULYSSES)
    if seed is not None:
        layout = replace(layout, blocks=random_layout(sequences, num_ranks=degree, seed=seed).blocks)
    programs: list[AttentionProgram | HeadProgram] = [EMPTY] * degree
    for rank, program in heads_of_runs(layout, [tuple(range(degree))]).items():
        programs[rank] = program
    inputs = Inputs.of(sequences, latents=latents)
    assert_same(distributed(programs, layout, inputs), dense(inputs, sequences))


def test_latents_travel_and_their_gradients_in_fp32() -> None:
    """A ring of two: each sends its latents forward, again backward, and the other's gradients home."""
    sequences = specs([32])
    layout, inputs = ring(sequences, 2), Inputs.of(sequences, latents=True, dtype=torch.bfloat16)
    stats = [AttentionStats() for _ in range(2)]
    distributed(attention_of(layout, num_ranks=2), layout, inputs, stats=stats)
    assert [each.bytes_sent for each in stats] == [16 * (LATENT + ROPE) * (2 + 2 + 4)] * 2


def test_a_frozen_up_projection_has_no_gradient() -> None:
    sequences = specs([9])
    layout, inputs = ring(sequences, 1), Inputs.of(sequences, latents=True)
    (program,) = attention_of(layout, num_ranks=1)
    q, k, v = (each.clone().requires_grad_() for each in inputs.tensors[0][:3])
    options: dict[str, Any] = {"transport": LoneTransport(), "kernel": pick_kernel("cpu")}
    attention(q, k, v, program, up_projection=inputs.up, **options).backward(inputs.tensors[0][3])
    assert_same(({0: [k.grad]}, None), ({0: [dense(inputs, sequences)[0][0][2]]}, None))  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"up_projection \(3, 11, 7\); want one head of latents"):
        attention(q, k, v, program, up_projection=inputs.up[:3], **options)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"up_projection torch\.float32, must be one dtype"):
        attention(q, k, v, program, up_projection=inputs.up.float(), **options)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="want as many heads in key and value"):
        attention(q, k, v, program, **options)


def test_the_up_projection_s_gradient_is_rounded_once() -> None:
    """Over many calls in bf16, each of which adds its product in fp32."""
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(HEADS, NOPE + VALUE, LATENT, generator=generator).bfloat16().requires_grad_()
    latents, exact = Latents(up, nope_dim=NOPE), torch.zeros(HEADS * (NOPE + VALUE), LATENT, dtype=torch.float64)
    for _ in range(64):
        shapes = ((32, 1, LATENT), (32, 1, ROPE), (32, HEADS, NOPE + ROPE), (32, HEADS, VALUE))
        latent, rope, dk, dv = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
        latents.collapse(latent, rope, dk=dk, dv=dv)
        exact += torch.cat([dk[..., :NOPE], dv], dim=2).flatten(1).double().t() @ latent.squeeze(1).double()
    found = latents.gradient
    assert found is not None and found.dtype is torch.bfloat16
    error, once = (float((each.double().view_as(exact) - exact).norm()) for each in (found, exact.bfloat16()))
    assert error < 1.01 * once
