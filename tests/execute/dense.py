"""Attention of whole sequences by one softmax, and programs on a thread per rank held against it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from rayfcp.execute.attention.function import attention
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.plan import lay_out
from rayfcp.program import AttentionProgram, HeadProgram, lower
from rayfcp.values import FULL, Group, Layout, MicrobatchPlan, Primitive, SequenceSpec
from tests.execute.layouts import plan_of
from tests.execute.threads import InProcessTransport
from tests.masks import seen
from tests.program.helpers import forwards
from tests.program.lowered import attention_of

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
Tensors = dict[int, list[torch.Tensor]]
Programs = Sequence[AttentionProgram | HeadProgram]
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=4)


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


def random_tensors(
    sequences: Sequence[SequenceSpec],
    *,
    dtype: torch.dtype,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    head_dim: int = HEAD_DIM,
) -> Tensors:
    """Query, key, value and the output's gradient of each sequence; `heads`: of queries, of keys."""
    generator = torch.Generator().manual_seed(1)
    return {
        each.id: [
            torch.randn(each.num_tokens, count, head_dim, dtype=dtype, generator=generator)
            for count in (heads[0], heads[1], heads[1], heads[0])
        ]
        for each in sequences
    }


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Soft cap of scores, 0 for none, and sinks `[heads]`."""

    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    def own_sinks(self) -> torch.Tensor | None:
        """A leaf with a gradient of its own."""
        return None if self.sinks is None else self.sinks.clone().requires_grad_()


PLAIN = Variant()
OF_SINKS = -1
"""Key of the gradient of sinks among results by sequence."""


def dense(tensors: Tensors, sequences: Sequence[SequenceSpec], *, variant: Variant = PLAIN) -> Tensors:
    """out, dq, dk, dv per sequence by one softmax; layers of the first kind."""
    results: Tensors = {}
    sinks = variant.own_sinks()
    for sequence in sequences:
        q, k, v = (part.clone().requires_grad_() for part in tensors[sequence.id][:3])
        wide = [part.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for part in (k, v)]
        scores = q.transpose(0, 1) @ wide[0].transpose(1, 2) * q.shape[2] ** -0.5
        if variant.softcap:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        kind = sequence.layer_kinds[0][0] if sequence.layer_kinds else FULL
        window = kind.window or -kind.chunk
        scores = scores.masked_fill(~torch.from_numpy(seen(sequence, window=window)), float("-inf"))
        if sinks is not None:  # keys without a value
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
        out = (scores.softmax(-1)[..., : len(q)] @ wide[1]).transpose(0, 1)
        out.backward(tensors[sequence.id][3])
        results[sequence.id] = [out.detach(), q.grad, k.grad, v.grad]
    if sinks is not None:
        results[OF_SINKS] = [sinks.grad]
    return results


def distributed(
    programs: Programs,
    layout: Layout,
    tensors: Tensors,
    sequences: Sequence[SequenceSpec],
    *,
    variant: Variant = PLAIN,
) -> Tensors:
    """The same by the interpreter, one thread per rank, put together again."""
    results = {s.id: [torch.zeros_like(tensors[s.id][i]) for i in (0, 0, 1, 2)] for s in sequences}
    fabric = Fabric(len(programs))
    kernel, sinks = pick_kernel("cpu"), [variant.own_sinks() for _ in programs]

    def work(rank: int) -> None:
        own = [block for block in layout.blocks if block.rank == rank]
        if own:
            inputs = [torch.cat([tensors[b.sequence][i][b.start : b.stop] for b in own]) for i in range(4)]
        else:
            inputs = [
                torch.ones(1, heads, HEAD_DIM, dtype=tensors[0][0].dtype)
                for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
            ]
            inputs[3] *= 0.0  # padding is in no loss
        q, k, v = (part.requires_grad_() for part in inputs[:3])
        options = {"softcap": variant.softcap, "sinks": sinks[rank], "kernel": kernel}
        out = attention(q, k, v, programs[rank], transport=InProcessTransport(fabric, rank), **options)
        out.backward(inputs[3])
        at = 0
        for block in own:
            for whole, part in zip(results[block.sequence], (out.detach(), q.grad, k.grad, v.grad), strict=True):
                whole[block.start : block.stop] = part[at : at + block.num_tokens]
            at += block.num_tokens

    run_ranks(work, num_ranks=len(programs), fabric=fabric)
    if variant.sinks is not None:
        results[OF_SINKS] = [sum(each.grad for each in sinks)]
    return results


def assert_equal_to_dense(
    layout: Layout, sequences: Sequence[SequenceSpec], *, num_ranks: int, dtype: torch.dtype
) -> None:
    """The layout without groups: rings and rounds."""
    programs = attention_of(layout, num_ranks=num_ranks)
    assert_programs_equal_to_dense(programs, layout, sequences, dtype=dtype)


def assert_programs_equal_to_dense(
    programs: Programs,
    layout: Layout,
    sequences: Sequence[SequenceSpec],
    *,
    dtype: torch.dtype,
    variant: Variant = PLAIN,
) -> None:
    tensors = random_tensors(sequences, dtype=dtype)
    expected = dense(tensors, sequences, variant=variant)
    found = distributed(programs, layout, tensors, sequences, variant=variant)
    assert expected.keys() == found.keys()
    bound = 1e-10 if dtype is torch.float64 else 1e-5
    for key, wanted in expected.items():
        for number, (want, have) in enumerate(zip(wanted, found[key], strict=True)):
            error = float((want - have).norm() / want.norm().clamp_min(1.0))
            assert error <= bound, f"sequence {key}, {('out', 'dq', 'dk', 'dv')[number]}: relative error {error:.2e}"


def assert_lowered_equal_to_dense(
    layout: Layout, sequences: Sequence[SequenceSpec], *, num_ranks: int, variant: Variant = PLAIN
) -> None:
    """One microbatch of one group with this layout, windows too."""
    programs = lower(plan_of(layout, sequences, num_ranks=num_ranks), sequences)
    attention = [forwards(each)[0].attention for each in programs]
    assert_programs_equal_to_dense(attention, layout, sequences, dtype=torch.float64, variant=variant)


def assert_ulysses_equal_to_dense(sequences: Sequence[SequenceSpec], *, degree: int, variant: Variant = PLAIN) -> None:
    """One group that shares out heads."""
    group = Group(
        ranks=tuple(range(degree)), sequences=tuple(each.id for each in sequences), primitive=Primitive.ULYSSES
    )
    microbatch = MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0)
    layout = lay_out(microbatch, sequences)
    plan = replace(plan_of(layout, sequences, num_ranks=degree), microbatches=(microbatch,))
    attention = [forwards(each)[0].attention for each in lower(plan, sequences)]
    assert_programs_equal_to_dense(attention, layout, sequences, dtype=torch.float64, variant=variant)
