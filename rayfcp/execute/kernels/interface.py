"""What a device must offer: attention over pairs of ranges that returns and takes (out, logsumexp).

What CUDA kernels that take all pairs of a call in one launch have in common.
"""

import functools
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfcp.config import ConfigError
from rayfcp.execute.devices.device import moved

Lengths = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """What one call computes: pair i has `query_lengths[i]` queries on `key_lengths[i]` keys, none of them 0.

    `causal` pairs have as many queries as keys, and query i sees keys j <= i; otherwise each query of a pair sees each
    key of it. Scores are multiplied by `scale`.
    """

    query_lengths: Lengths
    key_lengths: Lengths
    causal: bool
    scale: float


class AttentionKernel(Protocol):
    """Attention over packed pairs.

    Queries `[queries, heads, head_dim]` and keys, values `[keys, kv_heads, head_dim]` of all pairs lie
    one after the other; `heads` is a multiple of `kv_heads`. Inputs may be strided views whose last dimension is
    contiguous.
    """

    name: str

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """out `[queries, heads, head_dim]` in the input's dtype; natural logsumexp `[queries, heads]` in
        fp32 (fp64 for fp64)."""
        ...

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these pairs alone, given `out` and `lse` merged over all keys of the sequence."""
        ...


class KernelUnavailableError(ConfigError):
    """The device's kernel cannot be used here; the message says what to install."""


ALIGNMENT = 8
"""The kernels want a head_dim that is a multiple of this."""


class Offsets:
    """Where pairs start, on the device, and how long the longest is."""

    def __init__(self, pairs: Pairs, *, device: torch.device) -> None:
        self.query = _offsets(pairs.query_lengths, device)
        self.key = _offsets(pairs.key_lengths, device)
        self.max_query = max(pairs.query_lengths)
        self.max_key = max(pairs.key_lengths)


@functools.lru_cache(maxsize=1024)
def _offsets(lengths: Lengths, device: torch.device) -> Tensor:
    return moved([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def padded(tensor: Tensor) -> Tensor:
    """Zeros up to the alignment: they change neither scores nor the rest of out and gradients."""
    missing = -tensor.shape[-1] % ALIGNMENT
    return F.pad(tensor, (0, missing)) if missing else tensor


def repeated(query: Tensor, tensor: Tensor) -> Tensor:
    """Keys or values with as many heads as the query, for kernels that want that."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def summed(grad: Tensor, like: Tensor) -> Tensor:
    """Gradient of what `repeated` repeated, in fp32."""
    if grad.shape[1] == like.shape[1]:
        return grad
    total: Tensor = grad.unflatten(1, (like.shape[1], -1)).sum(dim=2, dtype=torch.float32)
    return total
