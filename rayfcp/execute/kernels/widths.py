"""Values that are narrower or wider than keys, for kernels that want one size."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from rayfcp.execute.kernels import AttentionKernel, Pairs


class Widths(NamedTuple):
    """Smallest and largest sizes of keys and of values."""

    key: tuple[int, int]
    value: tuple[int, int]


class EqualWidths:
    """Calls `kernel` with queries, keys and values padded to the widest of them, `unless` their sizes are such as it
    takes; see `AttentionKernel`. Zeros change neither scores nor the rest of out and gradients."""

    def __init__(self, kernel: AttentionKernel, *, unless: Widths | None = None) -> None:
        self._kernel, self._unless, self.name = kernel, unless, kernel.name

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:
        """As `kernel`."""
        return self._kernel.supports(query, pairs=pairs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        given = self._widened((query, key, value), key=key, value=value)
        out, lse = self._kernel.forward(*given, pairs=pairs)
        return out[..., : value.shape[-1]], lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, value_dim = query.shape[-1], value.shape[-1]
        tensors = (grad_out, query, key, value, out)
        grad_out, query, key, value, out = self._widened(tensors, key=key, value=value)
        dq, dk, dv = self._kernel.backward(grad_out, query, key, value, out, lse, pairs=pairs)
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]

    def _widened(self, tensors: tuple[Tensor, ...], *, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        sizes = key.shape[-1], value.shape[-1]
        bounds = self._unless or ()
        if sizes[0] == sizes[1] or (bounds and all(a <= size <= b for size, (a, b) in zip(sizes, bounds, strict=True))):
            return tensors
        return tuple(F.pad(each, (0, max(sizes) - each.shape[-1])) for each in tensors)
