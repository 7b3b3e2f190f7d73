"""Parts of sequences as affine maps of the state before them: `S_out = T S_in + U`, and outputs `O + P S_in`.

Of a scalar or diagonal decay, T, U and P follow from sums of its logarithms. A delta rule's come from the kernel, given
wider values and a state for them: the recurrence is linear in both, column by column, so values `[v, 0]` and the state
`[0, I]` make outputs `[O, P]` and the state `[U, T]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfcp.execute.kernels import Lengths
from rayfcp.execute.kernels.recurrence import Gated, RecurrenceKernel, sums_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Readout:
    """P of a part: `rows` `[tokens, groups, dk]`, where a group of heads shares rows, times `factors` `[tokens,
    heads]`, if there are any."""

    rows: Tensor
    factors: Tensor | None = None

    def of_state(self, state: Tensor) -> Tensor:
        """What the outputs have of the state before the part, `[tokens, heads, dv]`."""
        rows = self.rows.to(state.dtype)
        read = torch.einsum("tgk,grkv->tgrv", rows, state.unflatten(0, (rows.shape[1], -1))).flatten(1, 2)
        return read if self.factors is None else read * self.factors.unsqueeze(-1)

    def adjoint(self, grad_out: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Gradient of the state before the part through its outputs, `[heads, dk, dv]`."""
        rows, grad = self.rows.to(dtype), grad_out.to(dtype)
        grad = grad if self.factors is None else grad * self.factors.unsqueeze(-1)
        return torch.einsum("tgk,tgrv->grkv", rows, grad.unflatten(1, (rows.shape[1], -1))).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries:
    """Of parts in turn: T, `[heads, ...]`, U, `[heads, dk, dv]`, and P. `out`: of all their tokens, if it came with
    them; the kernel's of states 0."""

    transitions: Sequence[Tensor]
    increments: Sequence[Tensor]
    readouts: Sequence[Readout]
    out: Tensor | None


def summarize(kernel: RecurrenceKernel, inputs: Gated, *, lengths: Lengths) -> Summaries:
    """Summaries of parts of these lengths."""
    if inputs.beta is not None:
        return _from_kernel(kernel, inputs, lengths=lengths)
    found = [_closed_form(each) for each in inputs.split(lengths)]
    return Summaries(
        transitions=[transition for transition, _ in found],
        increments=[increment for _, increment in found],
        readouts=readouts(inputs, lengths=lengths),
        out=None,
    )


def readouts(inputs: Gated, *, lengths: Lengths) -> list[Readout]:
    """P of parts with a scalar or diagonal decay."""
    found = []
    for each in inputs.split(lengths):
        decay = each.log_decay.to(each.state_dtype).cumsum(0).exp() * each.scale
        if decay.dim() == 2:
            found.append(Readout(rows=each.query, factors=decay))
        else:
            found.append(Readout(rows=_by_head(each.query, decay) * decay))
    return found


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


def _from_kernel(kernel: RecurrenceKernel, inputs: Gated, *, lengths: Lengths) -> Summaries:
    (heads, dk, dv), value = inputs.state_shape, inputs.value
    wide = torch.cat((value, value.new_zeros(*value.shape[:2], dk)), dim=-1)
    identity = torch.eye(dk, dtype=inputs.state_dtype, device=value.device).expand(len(lengths), heads, dk, dk)
    state = torch.cat((identity.new_zeros(len(lengths), heads, dk, dv), identity), dim=-1)
    out, final = kernel(inputs.with_values(wide), lengths=lengths, state=state)
    rows = out[..., dv:].split(lengths)
    return Summaries(
        transitions=final[..., dv:].unbind(),
        increments=final[..., :dv].unbind(),
        readouts=[Readout(rows=each) for each in rows],
        out=out[..., :dv],
    )
