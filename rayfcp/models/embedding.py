"""Gradients of embeddings, summed over tokens in fp32 at least.

On CPUs torch sums the gradients of a word's tokens one after the other in bf16. Most terms of a frequent word are lost:
over a batch of 128K tokens the matrix's gradient is 75 % off.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.losses.base import wide


def sum_widely(model: nn.Module) -> None:
    """Make all embeddings of `model` sum their gradients in fp32 at least."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            vars(module)["forward"] = functools.partial(_embed, module.forward)


def _embed(forward: Callable[..., Tensor], *args: Any, **keywords: Any) -> Tensor:
    with _WideSums():
        return forward(*args, **keywords)


class _WideSums(TorchFunctionMode):
    """Replaces torch's embedding only, since families scale and mask its result in their own ways."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.embedding or kwargs["max_norm"] is not None or kwargs["scale_grad_by_freq"]:
            return func(*args, **(kwargs or {}))
        ids, weight = args
        padding_idx = kwargs["padding_idx"]
        return _Embedding.apply(weight, ids, -1 if padding_idx is None else padding_idx)  # type: ignore[no-untyped-call]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_words, ctx.padding_idx = len(weight), padding_idx
        return torch.embedding(weight, ids, padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (ids,), dtype = ctx.saved_tensors, gradient.dtype
        if not backend_of(gradient.device).sums_embeddings:
            gradient = gradient.to(wide(gradient))
        found = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.num_words, ctx.padding_idx, False)
        return found.to(dtype), None, None
