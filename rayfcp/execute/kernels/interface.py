"""What a device must offer: attention over pairs of ranges that returns and takes (out, logsumexp)."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rayfcp.config import ConfigError

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
