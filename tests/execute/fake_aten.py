"""torch's flash and cuDNN attention operators of variable lengths on the CPU, dense, as their CUDA sources have them.

`aten::_flash_attention_forward/_backward`, `aten::_cudnn_attention_forward/_backward`: what the kernels would refuse,
or compute something else from, is refused here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.execute import varlen_dense

FEW_QUERIES = 128


@contextmanager
def registered() -> Iterator[None]:
    """The operators run on CPU tensors inside."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in OPERATORS.items():
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert dropout == 0.0 and not debug
    assert (max_q, max_k) == (varlen_dense.longest(cu_q), varlen_dense.longest(cu_k))
    varlen_dense.check(query, key, value)
    out, lse = varlen_dense.forward(query, key, value, offsets=(cu_q, cu_k), causal=causal, scale=scale)
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, state, torch.empty((), dtype=torch.uint64), torch.empty(0, dtype=query.dtype)


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert dropout == 0.0 and state.dtype == torch.uint64 and state.shape == (2,)
    assert (max_q, max_k) == (varlen_dense.longest(cu_q), varlen_dense.longest(cu_k))
    varlen_dense.check(query, key, value)
    varlen_dense.check_saved(query, value=value, grad_out=grad, out=out, lse=lse)
    tensors = (grad, query, key, value, out, lse)
    return varlen_dense.backward(tensors, offsets=(cu_q, cu_k), causal=causal, scale=scale)


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: None, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    with_lse: bool, dropout: float = 0.0, causal: bool = False, debug: bool = False, *, scale: float, **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, Tensor, Tensor, Tensor]:  # fmt: skip
    assert bias is None and with_lse and dropout == 0.0 and not debug
    _check_bounds((cu_q, cu_k), (max_q, max_k))
    varlen_dense.check(query, key, value, equal_heads=True)
    out, lse = varlen_dense.forward(query, key, value, offsets=(cu_q, cu_k), causal=causal, scale=scale)
    nothing = torch.empty(0)
    return out, lse, cu_q.clone(), cu_k.clone(), max_q, max_k, nothing, nothing.clone(), nothing.clone()


def _cudnn_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    bias: None, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert bias is None and dropout == 0.0
    _check_bounds((cu_q, cu_k), (max_q, max_k))
    varlen_dense.check(query, key, value, equal_heads=True)
    varlen_dense.check_saved(query, value=value, grad_out=grad, out=out, lse=lse)
    tensors = (grad, query, key, value, out, lse)
    return varlen_dense.backward(tensors, offsets=(cu_q, cu_k), causal=causal, scale=scale)


def _check_bounds(offsets: tuple[Tensor, Tensor], limits: tuple[int, int]) -> None:
    """Limits may be more than the longest; few queries are refused."""
    for cuts, limit in zip(offsets, limits, strict=True):
        assert varlen_dense.longest(cuts) <= limit < 2 * varlen_dense.longest(cuts)
    assert varlen_dense.longest(offsets[0]) > FEW_QUERIES


OPERATORS = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_cudnn_attention_forward": _cudnn_forward,
    "_cudnn_attention_backward": _cudnn_backward,
}
