"""Merge of partial attention results in one launch, in Triton: reads both results once and writes one.

Torch's operators (`rayfcp.execute.attention.slots`) are the reference: six launches or more, and 18 to 34 bytes of
memory traffic per element of a bf16 result, against 10 here.
"""

import torch
from torch import Tensor

from rayfcp.execute.kernels import usable

try:
    import triton
    from triton import language as tl
except ImportError:  # torch brings it where it was built for such devices
    triton = None

LINES = 16
"""Heads of tokens of one program: with a head_dim of 128 each of its 128 threads has 16 elements."""

if triton is not None:

    @triton.jit(do_not_specialize=["first", "num_lines"])  # type: ignore[untyped-decorator]
    def _merge(  # type: ignore[no-untyped-def]
        known_out, known_lse, out, lse, rows, first, num_lines, heads,
        known_row, known_head, row, head, known_lse_row, known_lse_head, lse_row, lse_head,
        head_dim: tl.constexpr, width: tl.constexpr, lines: tl.constexpr, indexed: tl.constexpr,
    ):  # fmt: skip
        line = tl.program_id(0).to(tl.int64) * lines + tl.arange(0, lines)
        here = line < num_lines
        source, own = line // heads, line % heads
        target = tl.load(rows + source, mask=here, other=0) if indexed else source + first
        old = tl.load(known_lse + target * known_lse_row + own * known_lse_head, mask=here, other=0.0)
        new = tl.load(lse + source * lse_row + own * lse_head, mask=here, other=0.0)
        weight = 1.0 / (1.0 + tl.exp(old - new))
        total = tl.maximum(old, new) + tl.log(1.0 + tl.exp(-tl.abs(old - new)))
        column = tl.arange(0, width)[None, :]
        inside = here[:, None] & (column < head_dim)
        place = (target * known_row + own * known_head)[:, None] + column
        known = tl.load(known_out + place, mask=inside, other=0.0)
        part = tl.load(out + (source * row + own * head)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        # Several threads hold the same line, or element of a small tile: all must have read before one writes.
        tl.debug_barrier()
        tl.store(known_lse + target * known_lse_row + own * known_lse_head, total, mask=here)
        tl.store(known_out + place, known + weight[:, None] * (part - known), mask=inside)


def fused_merge(known_out: Tensor, known_lse: Tensor, *, rows: Tensor | int, out: Tensor, lse: Tensor) -> None:
    """See `MergeKernel`."""
    heads, head_dim = out.shape[1:]
    num_lines, indexed = lse.numel(), isinstance(rows, Tensor)
    _merge[(triton.cdiv(num_lines, LINES),)](
        *(known_out, known_lse, out, lse),
        *((rows, 0) if indexed else (known_lse, rows)),
        *(num_lines, heads, *known_out.stride()[:2], *out.stride()[:2], *known_lse.stride(), *lse.stride()),
        head_dim=head_dim,
        width=triton.next_power_of_2(head_dim),
        lines=LINES,
        indexed=indexed,
    )


def agrees(device: torch.device | str) -> bool:
    """True if `fused_merge` gives here what torch's operators give. Compiles the kernel."""
    return usable(
        "the fused merge", lambda: all(_agrees(rows, device) for rows in (8, torch.arange(40, device=device)))
    )


def _agrees(rows: Tensor | int, device: torch.device | str) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    out, part = (torch.randn(each, 4, 128, device=device, generator=generator) for each in (48, 40))
    lse, part_lse = (4 * torch.randn(4, each, device=device, generator=generator).t() for each in (48, 40))
    lse[::5], part = float("-inf"), part.bfloat16()
    known = rows if isinstance(rows, Tensor) else slice(rows, rows + len(part))
    weight = torch.sigmoid(part_lse - lse[known]).unsqueeze(-1)
    want, want_lse = out.clone(), lse.clone()
    want[known], want_lse[known] = out[known].lerp(part.float(), weight), torch.logaddexp(lse[known], part_lse)
    fused_merge(out, lse, rows=rows, out=part, lse=part_lse)
    pairs = ((out, want), (lse, want_lse))
    return all(torch.allclose(*pair, atol=1e-4, rtol=1e-4) for pair in pairs)
