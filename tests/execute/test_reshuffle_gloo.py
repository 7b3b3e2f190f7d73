"""Several layers in a row on real gloo processes, tokens in the loop's own layout, against one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.program import Piece, lower_reshuffle
from rayfcp.values import Layout
from tests.execute.gloo import joined, on_processes
from tests.execute.layouts import random_layout, ring
from tests.execute.loops import packed_slices, random_pieces, whole_sequences
from tests.masks import specs
from tests.program.lowered import attention_of

NUM_RANKS, NUM_LAYERS, HEADS, HEAD_DIM = 3, 3, 4, 16
WIDTH = HEADS * HEAD_DIM
SEQUENCES = specs([600, 41, 1, 230])
CASES: list[tuple[list[list[Piece]], Layout]] = [
    (packed_slices(SEQUENCES, num_ranks=NUM_RANKS), ring(SEQUENCES, num_ranks=NUM_RANKS)),
    (whole_sequences(SEQUENCES[:2], num_ranks=NUM_RANKS), ring(SEQUENCES[:2], num_ranks=NUM_RANKS)),
    *(
        (
            random_pieces(SEQUENCES, num_ranks=NUM_RANKS, seed=seed),
            random_layout(SEQUENCES, num_ranks=NUM_RANKS, seed=seed),
        )
        for seed in range(3)
    ),
]  # rank 2 brings nothing in the second
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Layers of projections and attention, the same weights wherever it is made."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype) for _ in range(NUM_LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(NUM_LAYERS))

    def forward(self, rows: Tensor, attend: Attend) -> Tensor:
        for into, out in zip(self.into, self.out, strict=True):
            q, k, v = into(rows).view(len(rows), 2 * HEADS, HEAD_DIM).split([HEADS, HEADS // 2, HEADS // 2], dim=1)
            rows = rows + out(attend(q, k, v).reshape(len(rows), WIDTH))
        return rows


def inputs(dtype: torch.dtype) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {each.id: torch.randn(each.num_tokens, WIDTH, dtype=dtype, generator=generator) for each in SEQUENCES}


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (each.transpose(0, 1)[None] for each in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def expected(theirs: list[list[Piece]], dtype: torch.dtype) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Outputs by sequence and gradients of all weights, one sequence at a time in one process."""
    net, rows = Net(dtype), inputs(dtype)
    outs = {}
    for number in sorted({piece.sequence for pieces in theirs for piece in pieces}):
        out = net(rows[number], dense)
        out.square().sum().backward()
        outs[number] = out.detach()
    return outs, [parameter.grad for parameter in net.parameters()]


Found = dict[tuple[int, str], tuple[list[Tensor], list[Tensor]]]


def run_case(index: int, dtype: torch.dtype, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's outputs by piece, and the gradients of all ranks."""
    theirs, layout = CASES[index]
    programs = attention_of(layout, num_ranks=NUM_RANKS)
    context = AttentionContext(
        schedule=make_schedule(programs[rank], reshuffle=lower_reshuffle(theirs, layout)[rank]),
        transport=DistributedTransport(dist.group.WORLD),
        kernel=pick_kernel("cpu"),
    )
    net, rows = Net(dtype), inputs(dtype)
    held = [rows[piece.sequence][piece.start : piece.stop] for piece in theirs[rank]]
    out = net(torch.cat(held or [torch.zeros(0, WIDTH, dtype=dtype)]), lambda *qkv: attention(*qkv, context))
    out.square().sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return list(out.detach().split([piece.num_tokens for piece in theirs[rank]])) if held else [], gradients


def run_cases(rank: int, client: dist.Store) -> Found:
    with joined(MeshPosition(rank=rank, num_ranks=NUM_RANKS), client, name="reshuffle"):
        return {
            (index, str(dtype)): run_case(index, dtype, rank)
            for index in range(len(CASES))
            for dtype in (torch.float32, torch.float64)
        }


@pytest.fixture(scope="module")
def found() -> list[Found]:
    """Results of each process in all cases."""
    return on_processes(run_cases, size=NUM_RANKS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_layers_on_gloo_equal_one_process(found, index: int, dtype: torch.dtype) -> None:
    theirs, _ = CASES[index]
    outs, gradients = expected(theirs, dtype)
    bound = 1e-10 if dtype is torch.float64 else 1e-5
    for rank, pieces in enumerate(theirs):
        parts, summed = found[rank][index, str(dtype)]
        for piece, part in zip(pieces, parts, strict=True):
            want = outs[piece.sequence][piece.start : piece.stop]
            assert float((part - want).norm() / want.norm()) <= bound
        for have, want in zip(summed, gradients, strict=True):
            assert float((have - want).norm() / want.norm()) <= bound
