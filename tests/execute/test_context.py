"""Slices that attend to what earlier microbatches kept, against dense attention of whole sequences."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.attention.slots import ContextStore
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.plan.layout import layouts_of
from rayfcp.program import Forward, RankProgram, lower
from rayfcp.program.instructions import Backward, Free
from rayfcp.values import BatchPlan, Block, Group, Layout, Primitive, SequenceSpec
from tests.examples import examples
from tests.execute.dense import Tensors, dense, random_tensors, run_ranks
from tests.execute.threads import InProcessTransport
from tests.program.pipelines import random_pipelines

HEAD_DIM = 8


class OneRank:
    """Runs the attention of a program as two layers that see the same tensors, one of them as if recomputed."""

    def __init__(
        self, program: RankProgram, layouts: Sequence[Layout], fabric: Fabric, *, tensors: Tensors, found: list[Tensors]
    ) -> None:
        self._program, self._layouts, self._tensors, self._found = program, layouts, tensors, found
        self._transport, self._store = InProcessTransport(fabric, program.rank), ContextStore()
        self._running: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    def run(self) -> ContextStore:
        for item in self._program.instructions:
            if isinstance(item, Forward):
                self._running[item.microbatch] = [self._forward(item, layer=layer) for layer in (0, 1)]
            elif isinstance(item, Backward):
                for layer in (1, 0):
                    self._backward(item.microbatch, layer=layer)
                del self._running[item.microbatch]
            elif isinstance(item, Free):
                self._store.free(item.microbatch)
        return self._store

    def _own(self, microbatch: int, part: int) -> torch.Tensor:
        """This rank's tokens of a microbatch, or one of padding."""
        rows = [
            self._tensors[block.sequence][part][block.start : block.stop]
            for block in self._layouts[microbatch].blocks
            if block.rank == self._program.rank
        ]
        return torch.cat(rows) if rows else torch.ones_like(self._tensors[0][part][:1])

    def _forward(self, item: Forward, *, layer: int) -> tuple[torch.Tensor, ...]:
        context = AttentionContext(
            schedule=make_schedule(item.attention),
            transport=self._transport,
            kernel=pick_kernel("cpu"),
            store=self._store,
            microbatch=item.microbatch,
            layer=layer,
            recomputed=layer == 1,
        )
        leaves = [self._own(item.microbatch, part).requires_grad_() for part in range(3)]
        fused = torch.cat(leaves, dim=1)
        out = attention(*fused.split([each.shape[1] for each in leaves], dim=1), context)
        return out, *leaves

    def _backward(self, microbatch: int, *, layer: int) -> None:
        out, *leaves = self._running[microbatch][layer]
        out.backward(self._own(microbatch, 3))
        at = 0
        for block in self._layouts[microbatch].blocks:
            if block.rank != self._program.rank:
                continue
            parts = (out.detach(), *(leaf.grad for leaf in leaves))
            for whole, part in zip(self._found[layer][block.sequence], parts, strict=True):
                whole[block.start : block.stop] = part[at : at + block.num_tokens]
            at += block.num_tokens


def assert_equal_to_dense(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], *, heads: tuple[int, int], dtype: torch.dtype, runs: int = 1
) -> None:
    """`runs`: ranks that share out heads in place of each rank of the plan."""
    if runs > 1:
        plan = over_runs(plan, sequences, heads=runs)
    tensors = random_tensors(sequences, dtype=dtype, heads=heads, head_dim=HEAD_DIM)
    found = [{s.id: [torch.zeros_like(tensors[s.id][i]) for i in (0, 0, 1, 2)] for s in sequences} for _ in range(2)]
    layouts, programs = layouts_of(plan, sequences), lower(plan, sequences)
    fabric, stores = Fabric(plan.num_ranks), list[ContextStore]()

    def work(rank: int) -> None:
        stores.append(OneRank(programs[rank], layouts, fabric, tensors=tensors, found=found).run())

    run_ranks(work, num_ranks=plan.num_ranks, fabric=fabric)
    assert not any(len(store) for store in stores)
    bound = 1e-10 if dtype is torch.float64 else 1e-5
    for sequence, want in dense(tensors, sequences).items():
        for layer in (0, 1):
            for name, right, have in zip(("out", "dq", "dk", "dv"), want, found[layer][sequence], strict=True):
                error = float((right - have).norm() / right.norm().clamp_min(1.0))
                assert error <= bound, f"layer {layer} sequence {sequence} {name}: relative error {error:.2e}"


@examples(8)
@given(seed=st.integers(0, 100_000), num_ranks=st.integers(1, 4), heads=st.sampled_from([(24, 12), (12, 1)]))
def test_slices_attend_to_their_context(seed: int, num_ranks: int, heads: tuple[int, int]) -> None:
    """Rings and Ulysses groups; sequences in slices beside whole ones; several pipelines."""
    plan, sequences = random_pipelines(seed, num_stages=1, num_ranks=num_ranks)
    if sequences:
        assert_equal_to_dense(plan, sequences, heads=heads, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(6))
def test_fp32_is_within_1e_5(seed: int) -> None:
    plan, sequences = random_pipelines(seed, num_stages=1, num_ranks=3)
    assert_equal_to_dense(plan, sequences, heads=(24, 12), dtype=torch.float32)


@examples(5)
@given(seed=st.integers(0, 100_000), heads=st.sampled_from([2, 3]))
def test_runs_that_share_out_heads(seed: int, heads: int) -> None:
    """Two runs of ranks exchange keys and values of their heads; a sequence's blocks lie on one rank of each run."""
    plan, sequences = random_pipelines(seed, num_stages=1, num_ranks=2)
    if sequences:
        assert_equal_to_dense(plan, sequences, heads=(12, 6), dtype=torch.float64, runs=heads)


def over_runs(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, heads: int) -> BatchPlan:
    """The plan with a run of `heads` ranks in place of each rank, and rings of them as groups."""

    def dealt(blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(replace(block, rank=block.rank * heads + block.sequence % heads) for block in blocks)

    def rings(groups: Sequence[Group]) -> tuple[Group, ...]:
        return tuple(replace(group, primitive=Primitive.RING) for group in groups)

    def wide(groups: Sequence[Group]) -> tuple[Group, ...]:
        return tuple(
            replace(group, ranks=tuple(run * heads + share for run in group.ranks for share in range(heads)))
            for group in groups
        )

    ringed = tuple(replace(each, groups=rings(each.groups)) for each in plan.microbatches)
    plan = replace(plan, microbatches=ringed)
    layouts = [
        replace(
            layout,
            blocks=dealt(layout.blocks),
            context=tuple(replace(each, blocks=dealt(each.blocks)) for each in layout.context),
            heads=heads,
        )
        for layout in layouts_of(plan, sequences)
    ]
    microbatches = tuple(
        replace(each, groups=wide(each.groups), layout=layout)
        for each, layout in zip(plan.microbatches, layouts, strict=True)
    )
    return replace(plan, num_ranks=plan.num_ranks * heads, microbatches=microbatches)


def test_only_what_is_needed_is_kept_alive() -> None:
    """A recomputed layer's rows of a fused tensor are copied, once; those of others are views; gradients are fp32."""
    fused = torch.zeros(10, 6, HEAD_DIM, dtype=torch.bfloat16)
    key, value = fused[:, 2:4], fused[:, 4:]
    store = ContextStore()
    store.put((0, 0), [(2, 5), (5, 6)], parts=(key, value), recomputed=False)
    assert store.read((0, 0), (3, 6))[0].untyped_storage().data_ptr() == fused.data_ptr()
    store.put((0, 1), [(2, 6)], parts=(key, value), recomputed=True)
    held = store.read((0, 1), (2, 6))
    assert [each.untyped_storage().nbytes() for each in held] == [4 * 2 * HEAD_DIM * 2] * 2
    store.put((0, 1), [(2, 6)], parts=(key + 1, value), recomputed=True)
    assert torch.equal(store.read((0, 1), (2, 6))[0], held[0]), "recomputation changes nothing"
    for each in store.gradients((0, 1), (3, 4)):
        each.fill_(2.0)
    assert {each.dtype for each in store.gradients((0, 1), (3, 4))} == {torch.float32}
    gradients = torch.ones(10, 2, HEAD_DIM), torch.ones(10, 2, HEAD_DIM)
    store.settle((0, 1), gradients)
    assert [each.sum() for each in gradients] == [each.numel() + 2 * 2 * HEAD_DIM for each in gradients]
    store.free(0)
    assert len(store) == 0


def test_a_context_that_is_not_kept_is_named() -> None:
    with pytest.raises(ValueError, match=r"microbatch 3 keeps no tokens \[0, 4\) in layer 2; run it forward before"):
        ContextStore().read((3, 2), (0, 4))
