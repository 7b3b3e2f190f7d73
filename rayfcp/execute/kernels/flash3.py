"""flash-attn 3, for Hopper, by its low-level functions `_flash_attn_forward` and `_flash_attn_backward`.

All pairs of a call in one launch; grouped-query heads, and strided views whose last dimension is contiguous, are
supported. `sm_margin` keeps its persistent blocks off that many multiprocessors. Arguments up to the mask are
positional: releases name some of them differently. Source: `hopper/flash_attn_interface.py`.
"""

from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.kernels.interface import Pairs, offsets_of


class FlashAttn3Kernel:
    """See `AttentionKernel`; head_dim is a multiple of 8.

    Args:
        library: the module `flash_attn_interface`.
        sm_margin: multiprocessors that it leaves to communication.
    """

    name = "flash-attn 3"

    def __init__(self, library: Any, *, sm_margin: int = 0) -> None:
        self._library, self._sm_margin = library, sm_margin

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        offsets = offsets_of(pairs, device=query.device)
        new_key, new_value, value_query, out = None, None, None, None
        new_offsets, used_query, used_key = None, None, None
        pages = (None,) * 6  # page table, batch index, left padding, rotary cosines, sines and lengths
        scales = (None,) * 3  # of queries, keys and values in eight bits
        out, lse, *_ = self._library._flash_attn_forward(
            *(query, key, value, new_key, new_value, value_query, out),
            *(offsets.query, offsets.key, new_offsets, used_query, used_key, offsets.max_query, offsets.max_key),
            *pages,
            *scales,
            pairs.scale,
            pairs.causal,
            num_splits=1,
            sm_margin=self._sm_margin,
        )
        return out, lse.transpose(0, 1)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        offsets = offsets_of(pairs, device=query.device)
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
        used_query, used_key = None, None
        self._library._flash_attn_backward(
            *(grad_out, query, key, value, out, lse.transpose(0, 1).contiguous()),
            *(offsets.query, offsets.key, used_query, used_key, offsets.max_query, offsets.max_key),
            *(dq, dk, dv, pairs.scale, pairs.causal),
            sm_margin=self._sm_margin,
        )
        return dq, dk, dv
