"""CUDA attention in fp32, and in any precision of wide heads: torch's memory-efficient kernels,
`aten::_efficient_attention_forward/_backward`.

With `cu_seqlens` they take all pairs in one launch. Their natural logsumexp is `[pairs, heads, length]`, `length` the
longest pair's queries rounded up to 32; behind a pair's own queries it is infinity, which the backward reads as a
weight of 0. From Ampere on a product is three of tf32, close to fp32. Source: torch's
`native/transformers/cuda/attention.cu`, `attention_backward.cu`, `mem_eff_attention/kernel_*.h`.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.devices.backend import to_device
from rayfcp.execute.kernels import Lengths, Pairs, offsets_of, repeated, summed

_NO_MASK, _CAUSAL_FROM_TOP_LEFT = 0, 1
_LSE_ALIGNMENT = 32


class CutlassKernel:
    """See `AttentionKernel`; head_dim is a multiple of 8."""

    name = "torch's memory-efficient"

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return not pairs.softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        offsets = offsets_of(pairs, device=query.device)
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            _batch(query),
            _batch(repeated(query, key)),
            _batch(repeated(query, value)),
            None,
            *offsets,
            0.0,
            _CAUSAL_FROM_TOP_LEFT if pairs.causal else _NO_MASK,
            True,
            scale=pairs.scale,
        )
        return out.squeeze(0), lse.transpose(1, 2).flatten(0, 1)[_rows(pairs.query_lengths, query.device)]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        offsets = offsets_of(pairs, device=query.device)
        unused = torch.empty((), dtype=torch.int64, device=query.device)
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            _batch(grad_out),
            _batch(query),
            _batch(repeated(query, key)),
            _batch(repeated(query, value)),
            None,
            _batch(out),
            *offsets,
            _by_pair(lse, pairs.query_lengths),
            0.0,
            unused,
            unused,
            _CAUSAL_FROM_TOP_LEFT if pairs.causal else _NO_MASK,
            False,
            scale=pairs.scale,
        )
        return dq.squeeze(0), summed(dk.squeeze(0), key), summed(dv.squeeze(0), value)


def _batch(tensor: Tensor) -> Tensor:
    """A batch of one, contiguous."""
    return tensor.contiguous().unsqueeze(0)


def _padded_length(lengths: Lengths) -> int:
    return -(-max(lengths) // _LSE_ALIGNMENT) * _LSE_ALIGNMENT


@functools.lru_cache(maxsize=256)
def _rows(lengths: Lengths, device: torch.device) -> Tensor:
    """Row of each query where pairs start `_padded_length` apart."""
    length = _padded_length(lengths)
    rows = np.concatenate([np.arange(n) + pair * length for pair, n in enumerate(lengths)])
    return to_device(rows, dtype=torch.int64, device=device)


def _by_pair(lse: Tensor, lengths: Lengths) -> Tensor:
    """[queries, heads] -> [pairs, heads, padded length]."""
    rows = lse.new_full((len(lengths) * _padded_length(lengths), lse.shape[1]), float("inf"))
    rows[_rows(lengths, lse.device)] = lse
    by_pair: Tensor = rows.unflatten(0, (len(lengths), -1)).transpose(1, 2).contiguous()
    return by_pair
