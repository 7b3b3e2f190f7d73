"""Kernels in the device's own precision against attention written out in fp64."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rayfcp.bench.results import TOLERANCE
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels import AttentionKernel, Pairs

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Pairs of so many queries and keys; see `AttentionKernel`."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    causal: bool
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128


CASES = (
    Case(query_lengths=(1024,), key_lengths=(1024,), causal=True),
    Case(query_lengths=(1, 2, 3, 511, 77, 1024), key_lengths=(1, 2, 3, 511, 77, 1024), causal=True),
    Case(query_lengths=(1024, 64, 5), key_lengths=(333, 2048, 1), causal=False),
    Case(query_lengths=(700, 129), key_lengths=(700, 129), causal=True, heads=32, kv_heads=8, head_dim=64),
    Case(query_lengths=(700, 129), key_lengths=(129, 700), causal=False, heads=8, kv_heads=8, head_dim=80),
    Case(query_lengths=(256, 40), key_lengths=(256, 40), causal=True, heads=12, kv_heads=2, head_dim=20),
    Case(query_lengths=(512,), key_lengths=(300,), causal=False, heads=64, kv_heads=8),
)

TINY = (
    Case(query_lengths=(9, 1), key_lengths=(9, 1), causal=True, heads=4, kv_heads=2, head_dim=8),
    Case(query_lengths=(3, 5), key_lengths=(7, 2), causal=False, heads=2, kv_heads=2, head_dim=20),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformed:
    """Largest differences, as shares of the largest number, at least of 1."""

    kernel: str
    dtype: str
    case: Case
    errors: dict[str, float]

    @property
    def holds(self) -> bool:
        return all(error <= TOLERANCE[self.dtype] for error in self.errors.values())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "bound": TOLERANCE[self.dtype], "holds": self.holds}


def kernels_of(device: torch.device) -> list[AttentionKernel]:
    """All that can be used here, the one that is picked first."""
    return list(backend_of(device).kernels(sm_margin=0))


def conform(kernel: AttentionKernel, case: Case, *, device: torch.device, dtype: str, seed: int = 0) -> Conformed:
    """One call forward and one backward of keys and values that are views of one tensor."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(tokens: int, heads: int) -> Tensor:
        shape = (tokens, heads, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, dtype))

    query, gradient = (draw(sum(case.query_lengths), case.heads) for _ in range(2))
    key, value = draw(sum(case.key_lengths), 2 * case.kv_heads).chunk(2, dim=1)
    pairs = Pairs(
        query_lengths=case.query_lengths, key_lengths=case.key_lengths, causal=case.causal, scale=case.head_dim**-0.5
    )
    out, lse = kernel.forward(query, key, value, pairs=pairs)
    grads = kernel.backward(gradient, query, key, value, out, lse, pairs=pairs)
    wanted = written_out((gradient, query, key, value), case)
    errors = {
        name: float((own.double() - true).abs().max() / true.abs().max().clamp_min(1.0))
        for name, own, true in zip(NAMES, (out, lse, *grads), wanted, strict=True)
    }
    return Conformed(kernel=kernel.name, dtype=dtype, case=case, errors=errors)


def written_out(tensors: Sequence[Tensor], case: Case) -> list[Tensor]:
    """(out, lse, dq, dk, dv) in fp64 of (gradient, query, key, value), pair by pair."""
    gradient, query, key, value = (each.double() for each in tensors)
    by_query = [each.split(case.query_lengths) for each in (gradient, query)]
    by_key = [each.split(case.key_lengths) for each in (key, value)]
    parts = [_pair(*pair, causal=case.causal) for pair in zip(*by_query, *by_key, strict=True)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _pair(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    q, k, v = (each.detach().requires_grad_() for each in (query, key, value))
    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = (each.repeat_interleave(share, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, wide_k) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v)
    grads = torch.autograd.grad(out, (q, k, v), gradient)
    return out.detach(), scores.detach().logsumexp(-1).transpose(0, 1), *grads
