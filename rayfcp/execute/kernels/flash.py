"""Flash attention for CUDA: flash-attn 4, 3 and 2, and torch's own kernels, in fp16 and bf16.

All pairs of a call in one launch; grouped-query heads, and strided views whose last dimension is contiguous, are
supported. Sources: flash-attn 4's `flash_attn/cute/interface.py` (`_flash_attn_fwd`, `_flash_attn_bwd`); flash-attn 3's
`hopper/flash_attn_interface.py` (`_flash_attn_forward`, `_flash_attn_backward`); flash-attn 2.8's
`flash_attn/flash_attn_interface.py` (`_flash_attn_varlen_forward`, `_flash_attn_varlen_backward`, documented); torch's
`native/transformers/cuda/attention.cu`, `attention_backward.cu`, `flash_attn/flash_api.cpp`
(`aten::_flash_attention_forward/_backward`, which `torch.nn.attention.varlen` calls in the same way).
"""

from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.kernels import AttentionKernel, Pairs, offsets_of, repeated
from rayfcp.execute.kernels.widths import Widths

MAX_FLASH_4_HEAD_DIM = 128
"""Largest head_dim that flash-attn 4 takes on all devices that it supports."""

FLASH_3_WIDTHS = Widths(key=(129, 192), value=(97, 128))
"""Sizes of keys and values that flash-attn 3 takes although they differ (`hopper/flash_api.cpp`, `mha_fwd`)."""


def _options(pairs: Pairs, device: torch.device) -> dict[str, Any]:
    """Arguments of both passes, as flash-attn 2 and 4 name them."""
    offsets = offsets_of(pairs, device=device)
    return {
        "softmax_scale": pairs.scale,
        "causal": pairs.causal,
        "softcap": pairs.softcap,
        "cu_seqlens_q": offsets.query,
        "cu_seqlens_k": offsets.key,
        "max_seqlen_q": offsets.max_query,
        "max_seqlen_k": offsets.max_key,
    }


class FlashAttn4Kernel:
    """See `AttentionKernel`; for Hopper and datacenter Blackwell; head_dim is a multiple of 8. Compiled for each
    combination of dtype, head_dim and mask at its first call.

    Args:
        library: the module `flash_attn.cute.interface`.
        wide: takes larger head_dims.
    """

    name = "flash-attn 4"

    def __init__(self, library: Any, *, wide: AttentionKernel) -> None:
        self._library, self._wide = library, wide

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:
        return query.shape[-1] <= MAX_FLASH_4_HEAD_DIM or self._wide.supports(query, pairs=pairs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        if query.shape[-1] > MAX_FLASH_4_HEAD_DIM:
            return self._wide.forward(query, key, value, pairs=pairs)
        options = _options(pairs, query.device)
        options["softcap"] = pairs.softcap or None  # as this pass says that there is none
        out, lse, *_ = self._library._flash_attn_fwd(query, key, value, return_lse=True, **options)
        return out, lse.transpose(0, 1)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        if query.shape[-1] > MAX_FLASH_4_HEAD_DIM:
            return self._wide.backward(grad_out, query, key, value, out, lse, pairs=pairs)
        lse, options = lse.transpose(0, 1).contiguous(), _options(pairs, query.device)
        dq, dk, dv, *_ = self._library._flash_attn_bwd(query, key, value, out, grad_out, lse, **options)
        return dq, dk, dv


class FlashAttn3Kernel:
    """See `AttentionKernel`; for Hopper; head_dim is a multiple of 8. Arguments up to the mask are positional: releases
    name some of them differently.

    Args:
        library: the module `flash_attn_interface`.
        sm_margin: multiprocessors that its persistent blocks leave to communication.
    """

    name = "flash-attn 3"

    def __init__(self, library: Any, *, sm_margin: int = 0) -> None:
        self._library, self._sm_margin = library, sm_margin

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        offsets = offsets_of(pairs, device=query.device)
        new_key, new_value, value_query, out = None, None, None, None
        new_offsets, used_query, used_key = None, None, None
        pages = (None,) * 6  # page table, batch index, left padding, rotary cosines, sines and lengths
        scales = (None,) * 3  # of queries, keys and values in eight bits
        out, lse, *_ = self._library._flash_attn_forward(
            *(query, key, value, new_key, new_value, value_query, out),
            *(offsets.query, offsets.key, new_offsets, used_query, used_key, offsets.max_query, offsets.max_key),
            *(*pages, *scales, pairs.scale, pairs.causal),
            softcap=pairs.softcap,
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
            softcap=pairs.softcap,
            sm_margin=self._sm_margin,
        )
        return dq, dk, dv


class FlashAttn2Kernel:
    """See `AttentionKernel`; head_dim is a multiple of 8. `library`: the module `flash_attn.flash_attn_interface`."""

    name = "flash-attn 2"

    def __init__(self, library: Any) -> None:
        self._library = library

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        options = _options(pairs, query.device) | {"dropout_p": 0.0}
        out, lse, *_ = self._library._flash_attn_varlen_forward(q=query, k=key, v=value, **options)
        return out, lse.transpose(0, 1)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
        plain = {
            "dropout_p": 0.0,
            "window_size_left": -1,
            "window_size_right": -1,
            "alibi_slopes": None,
        }
        tensors = {"dout": grad_out, "q": query, "k": key, "v": value, "out": out, "dq": dq, "dk": dk, "dv": dv}
        lse = lse.transpose(0, 1).contiguous()
        options = _options(pairs, query.device) | plain
        self._library._flash_attn_varlen_backward(**tensors, softmax_lse=lse, deterministic=False, **options)
        return dq, dk, dv


class TorchFlashKernel:
    """See `AttentionKernel`; head_dim is a multiple of 8."""

    name = "torch's flash"

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return not pairs.softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        offsets = offsets_of(pairs, device=query.device)
        if offsets.max_query == 1:  # the operator would swap grouped heads with queries, and the layout of logsumexp
            key, value = repeated(query, key), repeated(query, value)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *offsets, 0.0, pairs.causal, False, scale=pairs.scale
        )
        return out, lse.transpose(0, 1)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dropout_state = torch.empty(2, dtype=torch.uint64, device=query.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad_out, query, key, value, out, lse.transpose(0, 1).contiguous()),
            *offsets_of(pairs, device=query.device),
            *(0.0, pairs.causal, dropout_state, torch.empty(0, device=query.device)),
            scale=pairs.scale,
        )
        return dq, dk, dv
