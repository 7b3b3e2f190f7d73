"""Attention inside pictures, all in one call of our kernel, as an implementation of the transformers library."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from rayfcp.execute.kernels import Pairs, pick_kernel

PICTURES = "rayfcp_pictures"
"""Name under which the library finds it."""

LENGTHS = "rayfcp_lengths"
"""Keyword argument of the encoder, its layers and their attention: patches of each picture in the row; each row of the
batch is a picture without it."""

Lengths = tuple[int, ...]


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001  some families name it
    *,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`[rows, heads, patches, head_dim]` in, `[rows, patches, heads, head_dim]` out, as the library wants it."""
    rows, heads, patches, head_dim = query.shape
    lengths: Lengths = keywords.get(LENGTHS) or (patches,) * rows
    packed = (each.transpose(1, 2).reshape(rows * patches, heads, head_dim) for each in (query, key, value))
    out: Tensor = _Pictures.apply(*packed, lengths, head_dim**-0.5 if scaling is None else scaling)  # type: ignore[no-untyped-call]
    return out.view(rows, patches, heads, head_dim), None


AttentionInterface.register(PICTURES, _attend)


class _Pictures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float) -> Tensor:
        ctx.pairs = Pairs(query_lengths=lengths, key_lengths=lengths, causal=False, scale=scale)
        out, lse = pick_kernel(query.device.type).forward(query, key, value, pairs=ctx.pairs)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, *others = ctx.saved_tensors
        kernel = pick_kernel(query.device.type)
        found = kernel.backward(gradient.contiguous(), query, *others, pairs=ctx.pairs)
        return *(each.to(query.dtype) for each in found), None, None
