"""Parts of sequences as affine maps of the state before them: `S_out = T S_in + U`, and outputs `O + P S_in`.

Of a scalar or diagonal decay, T, U and P follow from sums of its logarithms. A delta rule's come from the kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfcp.execute.kernels import Lengths
from rayfcp.execute.kernels.recurrence import Gated, RecurrenceKernel, sums_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries:
    """Of parts in turn: T, `[heads, ...]`, and U, `[heads, dk, dv]`. `readouts`: P of the tokens of all, `[tokens,
    heads, dk]`, where it does not follow from queries and decays."""

    transitions: Sequence[Tensor] = ()
    increments: Sequence[Tensor] = ()
    readouts: Sequence[Tensor] = ()


def summarize(kernel: RecurrenceKernel, inputs: Gated, *, lengths: Lengths) -> Summaries:
    """Summaries of parts of these lengths, without gradients."""
    if inputs.beta is None:
        found = [_closed_form(each) for each in inputs.split(lengths)]
        return Summaries(transitions=[each for each, _ in found], increments=[each for _, each in found])
    readout, increments, transitions = kernel.summarize(inputs, lengths=lengths)
    return Summaries(transitions=transitions.unbind(), increments=increments.unbind(), readouts=[readout])


def state_gradients(
    grad_out: Tensor,
    *,
    readout: Tensor,
    log_decay: Tensor | None = None,
    lengths: Lengths,
    scale: float,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """Gradients of the states before parts through the outputs of these, `P^T grad_out`, `[heads, dk, dv]` each.

    Args:
        grad_out: `[tokens, heads, dv]`, of all parts in turn.
        readout: P, `[tokens, heads, dk]`, or, with `log_decay`, queries.
        log_decay: as of `Gated`; P is then queries times `scale` and the decay from the start of the part.
        lengths: tokens of each part.
        scale: of outputs.
        dtype: of gradients.
    """
    decays = [None] * len(lengths) if log_decay is None else log_decay.split(lengths)
    for rows, grad, decay in zip(readout.split(lengths), grad_out.split(lengths), decays, strict=True):
        rows, grad = rows.to(dtype), grad.to(dtype)  # noqa: PLW2901
        if decay is not None:
            start = decay.to(dtype).cumsum(0).exp() * scale
            if start.dim() == 2:
                grad = grad * start.unsqueeze(-1)  # noqa: PLW2901
            else:
                rows = _by_head(rows, start) * start  # noqa: PLW2901
        yield torch.einsum("tgk,tgrv->grkv", rows, grad.unflatten(1, (rows.shape[1], -1))).flatten(0, 1)


def _closed_form(part: Gated) -> tuple[Tensor, Tensor]:
    """T and U of a part with a scalar or diagonal decay."""
    log_decay = part.log_decay.to(part.state_dtype)
    key, value, to_end = (
        part.key.to(log_decay.dtype),
        part.value.to(log_decay.dtype),
        sums_after(log_decay, dim=0).exp(),
    )
    if log_decay.dim() == 2:
        value = value * to_end.unsqueeze(-1)
    else:
        key = _by_head(key, to_end) * to_end
    increment = torch.einsum("tgk,tgrv->grkv", key, value.unflatten(1, (key.shape[1], -1)))
    return log_decay.sum(0).exp(), increment.flatten(0, 1)


def _by_head(rows: Tensor, heads: Tensor) -> Tensor:
    """`[tokens, groups, dk]` as `[tokens, heads, dk]`."""
    return rows.repeat_interleave(heads.shape[1] // rows.shape[1], dim=1)
