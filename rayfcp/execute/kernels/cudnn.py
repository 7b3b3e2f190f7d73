"""cuDNN's attention on Hopper and datacenter Blackwell, `aten::_cudnn_attention_forward/_backward` with `cum_seq`.

The operators have taken variable lengths since torch 2.6, but until their schema has `seqused_k` (August 2026, behind
torch 2.13) each call builds its execution plan anew, some 40 ms on the host (pytorch pull 191576); such releases are
not used. Further requirements, as `torch.nn.attention.varlen` of those releases checks them: cuDNN 9.18, more than 128
queries in the longest pair, as many key heads as query heads. logsumexp is `[heads, queries]`, natural, fp32. A plan is
cached for each number of pairs and maximum lengths, so these lengths are rounded up to powers of two.

Source: torch's `native/cudnn/MHA.cpp`, `native/transformers/cuda/attention.cu`, `attention_backward.cu`.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.kernels import AttentionKernel, Pairs, offsets_of, repeated, summed

logger = logging.getLogger(__name__)

MIN_CUDNN = 91800
MAX_SHORT_QUERIES = 128
PROBE_LENGTHS = (192, 64)
"""One pair above and one below `MAX_SHORT_QUERIES`."""


class CudnnKernel:
    """See `AttentionKernel`; head_dim is a multiple of 8. `short` takes calls whose pairs all have few queries."""

    name = "torch's cuDNN"

    def __init__(self, *, short: AttentionKernel) -> None:
        self._short = short

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:  # noqa: ARG002
        return not pairs.softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        if max(pairs.query_lengths) <= MAX_SHORT_QUERIES:
            return self._short.forward(query, key, value, pairs=pairs)
        out, lse, *_ = torch.ops.aten._cudnn_attention_forward(
            query=query,
            key=repeated(query, key),
            value=repeated(query, value),
            compute_log_sumexp=True,
            return_debug_mask=False,
            **_options(pairs, query.device),
        )
        return out, lse.transpose(0, 1)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        if max(pairs.query_lengths) <= MAX_SHORT_QUERIES:
            return self._short.backward(grad_out, query, key, value, out, lse, pairs=pairs)
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)
        dq, dk, dv = torch.ops.aten._cudnn_attention_backward(
            grad_out=grad_out,
            query=query,
            key=repeated(query, key),
            value=repeated(query, value),
            out=out,
            logsumexp=lse.transpose(0, 1).contiguous(),
            philox_seed=unused,
            philox_offset=unused,
            **_options(pairs, query.device),
        )
        return dq, summed(dk, key), summed(dv, value)


def _options(pairs: Pairs, device: torch.device) -> dict[str, Any]:
    """Arguments of both passes."""
    offsets = offsets_of(pairs, device=device)
    return {
        "attn_bias": None,
        "cum_seq_q": offsets.query,
        "cum_seq_k": offsets.key,
        "max_q": _bucket(offsets.max_query),
        "max_k": _bucket(offsets.max_key),
        "dropout_p": 0.0,
        "is_causal": pairs.causal,
        "scale": pairs.scale,
    }


def _bucket(length: int) -> int:
    return 1 << (length - 1).bit_length()


def keeps_plans() -> bool:
    """True if this torch caches the execution plans of variable lengths, and this cuDNN is new enough."""
    arguments = torch.ops.aten._cudnn_attention_forward.default._schema.arguments
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return any(each.name == "seqused_k" for each in arguments) and (version or 0) >= MIN_CUDNN


def agrees(kernel: AttentionKernel, other: AttentionKernel, *, device: torch.device | str) -> bool:
    """True if both kernels give similar outputs and gradients here for two pairs; False if one of them raises."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(sum(PROBE_LENGTHS), heads, 64) for heads in (4, 2, 2, 4)]
    options: dict[str, Any] = {"generator": generator, "dtype": torch.bfloat16, "device": device}
    query, key, value, grad_out = (torch.randn(shape, **options) for shape in shapes)
    pairs = Pairs(query_lengths=PROBE_LENGTHS, key_lengths=PROBE_LENGTHS, causal=True, scale=0.125)
    found = []
    for each in (kernel, other):
        try:
            out, lse = each.forward(query, key, value, pairs=pairs)
            found.append((out, lse, *each.backward(grad_out, query, key, value, out, lse, pairs=pairs)))
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            logger.warning("%s cannot be used here: %s", each.name, " ".join(str(error).split())[:300])
            return False
    close = (torch.allclose(a.float(), b.float(), atol=0.05, rtol=0.05) for a, b in zip(*found, strict=True))
    return all(close)
