"""Attention kernels behind one interface, over pairs of ranges with (out, logsumexp); conversions that they share."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfcp.config import ConfigError
from rayfcp.execute.devices.backend import backend_of, to_device

logger = logging.getLogger(__name__)

Lengths = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How scores follow from products of queries and keys: times `scale`, and with a `softcap` c above 0 then
    `c tanh(s / c)`."""

    scale: float
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of ranges of one call: pair i has `query_lengths[i]` queries and `key_lengths[i]` keys, none of them 0.

    `causal` pairs have as many queries as keys, and query i attends to keys j <= i; otherwise each query of a pair
    attends to all its keys. `scale` and `softcap` as of `Scores`.
    """

    query_lengths: Lengths
    key_lengths: Lengths
    causal: bool
    scale: float
    softcap: float = 0.0


class AttentionKernel(Protocol):
    """Attention over packed pairs.

    Queries `[queries, heads, head_dim]`, keys `[keys, kv_heads, head_dim]` and values `[keys, kv_heads, value_dim]` of
    all pairs are concatenated; `heads` is a multiple of `kv_heads`. Kernels that want one size of keys and values are
    called by `rayfcp.execute.kernels.widths`. Inputs may be strided views whose last dimension is contiguous.
    """

    name: str

    def supports(self, query: Tensor, *, pairs: Pairs) -> bool:
        """False if such pairs need another kernel (`rayfcp.execute.kernels.operators`)."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """out `[queries, heads, value_dim]` in the input's dtype; natural logsumexp `[queries, heads]` in fp32 (fp64
        for fp64)."""
        ...

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these pairs alone, given `out` and `lse` merged over all keys of the sequence."""
        ...


class MergeKernel(Protocol):
    """Merge of partial attention results in one launch; see `rayfcp.execute.attention.slots.MergedAttention`."""

    def __call__(self, known_out: Tensor, known_lse: Tensor, *, rows: Tensor | int, out: Tensor, lse: Tensor) -> None:
        """Merge `out` `[rows, heads, value_dim]` and `lse` `[rows, heads]`, results of further keys, into rows of
        `known_out` and `known_lse`, fp32.

        `rows`: row numbers, int64, none twice; or the first of consecutive ones.
        """
        ...


class LossKernel(Protocol):
    """Cross entropy and its gradient in one launch; see `rayfcp.models.causal_lm`."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross entropies `[tokens]`, fp32, of `logits`, `[tokens, vocab]` in at most fp32, against `targets`,
        `[tokens]`, int64; 0 for negative ones. `logits` are overwritten with the gradient of their sum."""
        ...


def usable(name: str, agrees: Callable[[], bool]) -> bool:
    """True if a kernel runs and agrees with torch's operators; otherwise False, with a warning."""
    try:
        if agrees():
            return True
        logger.warning("%s differs from torch's operators, which are used instead", name)
    except Exception as error:  # a compiler or a driver is missing
        logger.warning("%s cannot be used here: %s", name, " ".join(str(error).split())[:300])
    return False


class KernelUnavailableError(ConfigError):
    """No kernel can run on the device; the message says what to install."""


def pick_kernel(device: str, *, sm_margin: int = 0) -> AttentionKernel:
    """The best kernel that can run on a kind of device, and torch's operators for pairs that it does not support;
    chosen, and logged, once.

    `sm_margin`: multiprocessors of a GPU that the kernel leaves to communication, if it can.

    Raises:
        KernelUnavailableError: there is none; the message says what to install.
    """
    return _best(device, sm_margin)


@functools.cache
def _best(device: str, sm_margin: int) -> AttentionKernel:
    from rayfcp.execute.kernels.operators import AnyPairs  # imports this module

    backend = backend_of(device)
    kernel = AnyPairs(next(backend.kernels(sm_margin=sm_margin)))
    fused = {"merge": backend.merge_kernel(), "loss": backend.loss_kernel()}  # compiled before ranks wait for them
    found = ", ".join(name for name, each in fused.items() if each)
    logger.info("attention on %s: %s%s", device, kernel.name, found and f"; in Triton: {found}")
    return kernel


ALIGNMENT = 8
"""CUDA kernels need a head_dim that is a multiple of this."""


class Offsets(NamedTuple):
    """Cumulative lengths of pairs, on the device, and maximum lengths, in the order in which kernels take them."""

    query: Tensor
    key: Tensor
    max_query: int
    max_key: int


def offsets_of(pairs: Pairs, *, device: torch.device) -> Offsets:
    return Offsets(
        query=_cumulative(pairs.query_lengths, device),
        key=_cumulative(pairs.key_lengths, device),
        max_query=max(pairs.query_lengths),
        max_key=max(pairs.key_lengths),
    )


@functools.lru_cache(maxsize=1024)  # the layers of a microbatch make the same calls
def _cumulative(lengths: Lengths, device: torch.device) -> Tensor:
    return to_device([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def padded(tensor: Tensor) -> Tensor:
    """`tensor` with head_dim padded to the alignment. Zeros change neither scores nor the rest of out and gradients."""
    missing = -tensor.shape[-1] % ALIGNMENT
    return F.pad(tensor, (0, missing)) if missing else tensor


def repeated(query: Tensor, tensor: Tensor) -> Tensor:
    """Keys or values with as many heads as the query, for kernels without grouped-query attention."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def summed(grad: Tensor, like: Tensor) -> Tensor:
    """Gradient of the argument of `repeated`, summed in fp32 over the repeated heads."""
    if grad.shape[1] == like.shape[1]:
        return grad
    total: Tensor = grad.unflatten(1, (like.shape[1], -1)).sum(dim=2, dtype=torch.float32)
    return total
