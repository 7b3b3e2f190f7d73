"""Kernels of recurrent layers behind one interface: gated linear attention and gated delta rules over sequences."""

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rayfcp.execute.attention.schedule import accumulator_dtype, take_rows
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels import Lengths
from rayfcp.program import Range

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """Inputs of a recurrence over packed sequences with a state S `[heads, dk, dv]`:
    `S_t = diag(e^g_t) S_{t-1} + k_t v_t^T`, with a `beta` `S_t = (I - b_t k_t k_t^T) diag(e^g_t) S_{t-1} +
    b_t k_t v_t^T` (Gated DeltaNet; Kimi Linear), and outputs `scale S_t^T q_t`.

    `query`, `key`: `[tokens, key_heads, dk]`; `key_heads` divides `heads`, and head h has key head `h // (heads //
    key_heads)`. `value`: `[tokens, heads, dv]`. `log_decay`, g, at most 0: `[tokens, heads]`, the same for all dk, or
    `[tokens, heads, dk]`. `beta`: `[tokens, heads]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor | None = None
    scale: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there."""
        given = (self.query, self.key, self.value, self.log_decay)
        return given if self.beta is None else (*given, self.beta)

    def split(self, lengths: Lengths) -> "Iterator[Gated]":
        """The inputs of each sequence."""
        return map(self.of, zip(*(each.split(lengths) for each in self.tensors), strict=True))

    def rows(self, ranges: Sequence[Range]) -> "Gated":
        """The inputs of some tokens."""
        return self.of([take_rows(each, ranges) for each in self.tensors])

    def with_values(self, value: Tensor) -> "Gated":
        """Other values."""
        return replace(self, value=value)

    def of(self, tensors: Sequence[Tensor]) -> "Gated":
        """Other tensors in place of `tensors`."""
        query, key, value, log_decay, *rest = tensors
        beta = rest[0] if rest else None
        return replace(self, query=query, key=key, value=value, log_decay=log_decay, beta=beta)

    @property
    def state_dtype(self) -> torch.dtype:
        """Of states."""
        return accumulator_dtype(self.value.dtype)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(heads, dk, dv)."""
        return self.value.shape[1], self.key.shape[2], self.value.shape[2]


def sums_after(log_decay: Tensor, *, dim: int) -> Tensor:
    """Of each token the sum over later ones, 0 for the last; not a difference of sums, in which precision is lost."""
    later = torch.cat(
        (log_decay.narrow(dim, 1, log_decay.shape[dim] - 1), torch.zeros_like(log_decay.narrow(dim, 0, 1))), dim=dim
    )
    return later.flip(dim).cumsum(dim).flip(dim)


class RecurrenceKernel(Protocol):
    """A recurrence over packed sequences, differentiable in its inputs and in the states."""

    name: str

    def __call__(self, inputs: Gated, *, lengths: Lengths, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs `[tokens, heads, dv]` in the dtype of values, and states `[sequences, heads, dk, dv]` after the last
        token of each sequence. `lengths`: tokens of each, at least 1; `state`: before the first token of each, zero if
        None. States are in fp32, for fp64 inputs in fp64."""
        ...


def pick_recurrence(device: str) -> RecurrenceKernel:
    """The best kernel that can run on a kind of device; chosen, and logged, once."""
    return _best(device)


@functools.cache
def _best(device: str) -> RecurrenceKernel:
    kernel = next(backend_of(device).recurrences())
    logger.info("recurrences on %s: %s", device, kernel.name)
    return kernel


Gradients = tuple[Tensor, ...]


def differentiate(
    kernel: RecurrenceKernel,
    inputs: Gated,
    *,
    lengths: Lengths,
    state: Tensor | None,
    grad_out: Tensor,
    grad_state: Tensor | None,
) -> Gradients:
    """Gradients of `inputs.tensors` at the states before the sequences, given those of the outputs and of the states
    after the sequences (None: zero). The kernel runs forward once more: only its inputs were kept."""
    leaves = [each.detach().requires_grad_() for each in inputs.tensors]
    with torch.enable_grad():
        out, final = kernel(inputs.of(leaves), lengths=lengths, state=state)
    if grad_state is None:
        return torch.autograd.grad((out,), leaves, (grad_out,))
    return torch.autograd.grad((out, final), leaves, (grad_out, grad_state))
