"""Losses of single tokens from forward passes alone, and their sums by sequence over all ranks."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.devices.backend import backend_of
from rayfcp.program import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Losses of the tokens of `pieces`, in their order, `[tokens]` on the device, in fp32 at least: each the cross
    entropy of the token's target, the negative log-probability of the token that follows; 0 where that does not count.
    A rank without pieces has one of padding."""

    pieces: tuple[Piece, ...]
    losses: Tensor


def sums_by_sequence(scored: Iterable[TokenLosses], *, num_sequences: int, device: torch.device) -> Tensor:
    """Sums of this device's losses by sequence id, `[sequences]`, in the dtype of its sums. The sum over devices is
    that of whole sequences, wherever their pieces lie."""
    total = torch.zeros(num_sequences, dtype=backend_of(device).sum_dtype, device=device)
    for each in scored:
        if each.pieces:
            ids, counts = zip(*((piece.sequence, piece.num_tokens) for piece in each.pieces), strict=True)
            total.index_add_(0, torch.from_numpy(np.repeat(ids, counts)).to(device), each.losses.to(total.dtype))
    return total
