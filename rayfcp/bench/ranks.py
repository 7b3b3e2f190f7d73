"""All ranks' programs of a plan, one after the other on one device: what comes of them and how long each takes."""

import itertools
from dataclasses import dataclass

import torch

from rayfcp.bench.planned import Part
from rayfcp.bench.results import RankSeconds
from rayfcp.bench.tensors import Batch, Outcome, rows_of
from rayfcp.bench.turns import Stopwatch, TurnTransport, in_turns
from rayfcp.execute.attention import AttentionContext, attention
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.schedule import make_ready


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOutcome:
    """`seconds`: of every rank in every microbatch."""

    outcome: Outcome
    seconds: RankSeconds


def run_ranks(parts: tuple[tuple[Part, ...], ...], batch: Batch, *, kernel: AttentionKernel) -> RanksOutcome:
    """One pass, forward and backward, of every microbatch. Messages are those of the programs; what each rank takes
    is measured while no other computes, without the copying of messages."""
    found = Outcome(
        out=torch.full_like(batch.query, torch.nan),
        dq=torch.full_like(batch.query, torch.nan),
        dk=torch.full_like(batch.key, torch.nan),
        dv=torch.full_like(batch.value, torch.nan),
    )
    seconds = [_run_microbatch(each, batch, kernel=kernel, found=found) for each in parts]
    forward_s, backward_s = (tuple(tuple(each[at] for each in row) for row in seconds) for at in (0, 1))
    return RanksOutcome(outcome=found, seconds=RankSeconds(forward_s=forward_s, backward_s=backward_s))


def _run_microbatch(
    parts: tuple[Part, ...], batch: Batch, *, kernel: AttentionKernel, found: Outcome
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each rank; what comes of it is written to `found`."""
    starts = list(itertools.accumulate(batch.lengths, initial=0))
    ready = [make_ready(each.attention) for each in parts]

    def work(transport: TurnTransport, watch: Stopwatch) -> tuple[float, float]:
        part = parts[transport.rank]
        rows = rows_of(part, starts, device=batch.query.device)
        query, key, value = (each[rows].requires_grad_() for each in (batch.query, batch.key, batch.value))
        gradient = batch.gradient[rows]
        context = AttentionContext(program=ready[transport.rank], transport=transport, kernel=kernel)
        watch.start()
        out = attention(query, key, value, context, scale=batch.scale)
        watch.stop()
        forward_s = watch.seconds()
        watch.start()
        grads = torch.autograd.grad(out, (query, key, value), gradient)
        watch.stop()
        backward_s = watch.seconds()
        if part.pieces:
            for target, source in zip((found.out, found.dq, found.dk, found.dv), (out.detach(), *grads), strict=True):
                target[rows] = source
        return forward_s, backward_s

    return in_turns(len(parts), work, device=batch.query.device)
