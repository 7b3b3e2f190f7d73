"""The flash-attn package, version 2.8, by its documented low-level functions `_flash_attn_varlen_forward/_backward`.

All pairs of a call in one launch; grouped-query heads, and strided views whose last dimension is contiguous, are
supported. Source: `flash_attn/flash_attn_interface.py`.
"""

from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.kernels.interface import Pairs, offsets_of

_PLAIN = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
}


class FlashAttn2Kernel:
    """See `AttentionKernel`; head_dim is a multiple of 8. `library`: the module `flash_attn.flash_attn_interface`."""

    name = "flash-attn 2"

    def __init__(self, library: Any) -> None:
        self._library = library

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._library._flash_attn_varlen_forward(
            q=query,
            k=key,
            v=value,
            **_options(pairs, query.device),
        )
        return out, lse.transpose(0, 1)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
        self._library._flash_attn_varlen_backward(
            dout=grad_out,
            q=query,
            k=key,
            v=value,
            out=out,
            softmax_lse=lse.transpose(0, 1).contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            **_options(pairs, query.device),
            **_PLAIN,
        )
        return dq, dk, dv


def _options(pairs: Pairs, device: torch.device) -> dict[str, Any]:
    """Arguments of both passes."""
    offsets = offsets_of(pairs, device=device)
    return {
        "cu_seqlens_q": offsets.query,
        "cu_seqlens_k": offsets.key,
        "max_seqlen_q": offsets.max_query,
        "max_seqlen_k": offsets.max_key,
        "dropout_p": 0.0,
        "softmax_scale": pairs.scale,
        "causal": pairs.causal,
    }
