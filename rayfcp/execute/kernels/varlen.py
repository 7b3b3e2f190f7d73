"""What CUDA kernels that take all pairs of a call in one launch have in common."""

import functools
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfcp.execute.device import moved
from rayfcp.execute.kernels.interface import Lengths, Pairs

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
    return grad.unflatten(1, (like.shape[1], -1)).sum(dim=2, dtype=torch.float32)
