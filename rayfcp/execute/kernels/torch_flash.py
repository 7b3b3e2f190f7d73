"""torch's own flash kernels, `aten::_flash_attention_forward/_backward`.

All pairs of a call in one launch; grouped-query heads, and strided views whose last dimension is contiguous, are
supported. Source: torch's `native/transformers/cuda/attention.cu`, `attention_backward.cu`,
`flash_attn/flash_api.cpp`; `torch.nn.attention.varlen` calls them in the same way.
"""

import torch
from torch import Tensor

from rayfcp.execute.kernels.interface import Pairs, offsets_of, repeated


class TorchFlashKernel:
    """See `AttentionKernel`; head_dim is a multiple of 8."""

    name = "torch's flash"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        offsets = offsets_of(pairs, device=query.device)
        if offsets.max_query == 1:  # the operator would swap grouped heads with queries, and the layout of logsumexp
            key, value = repeated(query, key), repeated(query, value)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            *offsets,
            0.0,
            pairs.causal,
            False,
            scale=pairs.scale,
        )
        return out, lse.transpose(0, 1)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        offsets = offsets_of(pairs, device=query.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse.transpose(0, 1).contiguous(),
            *offsets,
            0.0,
            pairs.causal,
            torch.empty(2, dtype=torch.uint64, device=query.device),  # dropout's state
            torch.empty(0, device=query.device),
            scale=pairs.scale,
        )
        return dq, dk, dv
