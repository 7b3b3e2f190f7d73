"""CPU attention: torch's own flash kernel, one call per pair.

`aten::_scaled_dot_product_flash_attention_for_cpu` takes views and grouped query heads. Its causal mask
is aligned top-left, which is the diagonal where a pair has as many queries as keys.
"""

import torch
from torch import Tensor

from rayfcp.execute.kernels.interface import Pairs

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel:
    """See `AttentionKernel`."""

    name = "torch's flash for CPUs"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        parts = [
            _forward(_heads_first(q), _heads_first(k), _heads_first(v), 0.0, pairs.causal, scale=pairs.scale)
            for q, k, v in zip(
                query.split(pairs.query_lengths),
                key.split(pairs.key_lengths),
                value.split(pairs.key_lengths),
                strict=True,
            )
        ]
        return _joined([out for out, _ in parts]), _joined([lse for _, lse in parts])

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        by_query = [tensor.split(pairs.query_lengths) for tensor in (grad_out, query, out, lse)]
        by_key = [tensor.split(pairs.key_lengths) for tensor in (key, value)]
        parts = [
            _backward(
                _heads_first(g),
                _heads_first(q),
                _heads_first(k),
                _heads_first(v),
                _heads_first(o),
                _heads_first(s),
                0.0,
                pairs.causal,
                scale=pairs.scale,
            )
            for g, q, o, s, k, v in zip(*by_query, *by_key, strict=True)
        ]
        dq, dk, dv = (_joined([part[i] for part in parts]) for i in range(3))
        return dq, dk, dv


def _heads_first(tensor: Tensor) -> Tensor:
    """[tokens, heads, ...] -> [1, heads, tokens, ...], a view."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _joined(parts: list[Tensor]) -> Tensor:
    """[1, heads, tokens, ...] each -> [tokens, heads, ...] of all."""
    tokens_first = [part.squeeze(0).transpose(0, 1) for part in parts]
    return tokens_first[0] if len(parts) == 1 else torch.cat(tokens_first)
