"""Temperature of Llama 4's attention without rotation: queries are scaled by their position in the sequence.

The library scales them by their row in the batch, which is the position in a batch of one sequence only.

Source: Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025 (arXiv:2501.19399).
"""

from typing import Any

import torch
from torch import Tensor, nn


def scaled_by_position(module: nn.Module, query: Tensor, *, positions: Tensor | None) -> Tensor:
    """`query`, `[1, heads, tokens, head_dim]`, scaled by `positions`, `[tokens]`, in place of rows if the module scales
    by these.

    Raises:
        ValueError: It does, and there are no positions.
    """
    given: Any = module
    if not getattr(given, "attn_temperature_tuning", False) or given.use_rope:
        return query
    if positions is None:
        raise ValueError(f"{type(module).__name__} scales queries by position; pass Carried(context, positions)")
    rows = torch.arange(query.shape[-2], device=query.device)
    wanted, found = (_scales(given, each) for each in (positions.to(query.device), rows))
    return (query * (wanted / found).unsqueeze(-1)).to(query.dtype)


def _scales(module: Any, positions: Tensor) -> Tensor:
    scales: Tensor = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return scales
