"""Ascend attention through torch-npu: `npu_fusion_attention` in TND layout and its gradient.

The forward returns softmax max and sum, `[tokens, heads, 8]` in TND (the last axis repeats one number);
lse = max + log(sum). The gradient takes max and sum back: with max = lse and sum = 1 it differentiates
against the logsumexp merged over all keys.
"""

import functools
import importlib.util
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.kernels.interface import KernelUnavailableError, Lengths

_NUMBERS_PER_ROW = 8
_LOWER_TRIANGLE = 2048


class NpuKernel:
    """See `AttentionKernel`."""

    name = "npu-fusion-attention"

    def __init__(self) -> None:
        if importlib.util.find_spec("torch_npu") is None:
            raise KernelUnavailableError(
                "cluster.device is npu, but torch_npu is not installed; install CANN, then pip install "
                "'rayfcp[torch-npu]' in the version that matches torch"
            )
        import torch_npu

        self._library: Any = torch_npu

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        out, softmax_max, softmax_sum, *_ = self._library.npu_fusion_attention(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            query.shape[1],
            "TND",
            scale=scale,
            keep_prob=1.0,
            **_mask(query, causal),
            actual_seq_qlen=list(accumulate(query_lengths)),
            actual_seq_kvlen=list(accumulate(key_lengths)),
        )
        return out, softmax_max[..., 0] + softmax_sum[..., 0].log()

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        query_lengths: Lengths,
        key_lengths: Lengths,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        row_max = lse.unsqueeze(-1).expand(*lse.shape, _NUMBERS_PER_ROW).contiguous()
        dq, dk, dv, *_ = self._library.npu_fusion_attention_grad(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            grad_out.contiguous(),
            query.shape[1],
            "TND",
            softmax_max=row_max,
            softmax_sum=torch.ones_like(row_max),
            attention_in=out.contiguous(),
            scale_value=scale,
            keep_prob=1.0,
            **_mask(query, causal),
            actual_seq_qlen=list(accumulate(query_lengths)),
            actual_seq_kvlen=list(accumulate(key_lengths)),
        )
        return dq, dk, dv


def _mask(query: Tensor, causal: bool) -> dict[str, Any]:
    """sparse_mode 3 (right-down causal) takes a fixed upper-triangular 2048 x 2048 mask; 0 takes none."""
    return {"sparse_mode": 3, "atten_mask": _hidden(query.device)} if causal else {"sparse_mode": 0}


@functools.cache
def _hidden(device: torch.device) -> Tensor:
    return torch.ones(_LOWER_TRIANGLE, _LOWER_TRIANGLE, dtype=torch.bool, device=device).triu(1)
