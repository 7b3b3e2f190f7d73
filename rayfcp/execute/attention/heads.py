"""Differentiable all-to-all between token and head sharding around attention.

The all-to-all of DeepSpeed-Ulysses (Jacobs et al., 2023), run as the program's point-to-point matchings.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.attention.kept import KeptResults, once
from rayfcp.execute.attention.schedule import accumulator_dtype, apart, side_by_side
from rayfcp.execute.parallel.transport import AttentionStats, Transport
from rayfcp.program import HeadProgram, Message, Payload, exchange_rounds, spans


class HeadExchange:
    """One rank's end of the exchanges of a group, for a query `[tokens, heads, head_dim]` and `keys`, its keys and
    values or their latents, `[tokens, kv_heads, head_dim]`; head_dims may differ.

    Position p of degree d has query heads [p h, (p + 1) h), h = heads / d, and the k = max(kv_heads / d, 1) key and
    value heads that they attend to, replicated where d is above kv_heads, as the one head of latents is. `kept`: of a
    recomputed layer, which then repeats no exchange.
    """

    def __init__(
        self,
        program: HeadProgram,
        *,
        query: Tensor,
        keys: Sequence[Tensor],
        transport: Transport,
        stats: AttentionStats,
        kept: KeptResults | None = None,
    ) -> None:
        degree, heads, kv_heads = program.degree, query.shape[1], keys[0].shape[1]
        if transport.rank not in program.ranks:
            raise ValueError(
                f"attention: the program is of ranks {program.ranks}, this is rank {transport.rank}; pass its own"
            )
        if heads % degree or (kv_heads % degree and degree % kv_heads):
            raise ValueError(
                f"attention: {heads} heads on {kv_heads} key/value heads cannot be split over the {degree} ranks "
                f"{program.ranks}; the degree must divide the heads, and divide the key/value heads or be a multiple "
                "of them: plan with the model's num_heads and num_kv_heads"
            )
        self.heads, self.kv_heads, self.kept = heads, kv_heads, kept
        self.head_share, self.kv_share = heads // degree, max(kv_heads // degree, 1)
        self.shares = (
            (self.head_share, query.shape[2]),
            *((self.kv_share, each.shape[2]) for each in keys),
        )
        self._program, self._transport, self._stats = program, transport, stats
        self._spans = spans(program.tokens)
        self._own = program.ranks.index(transport.rank)

    @property
    def own_heads(self) -> tuple[int, int]:
        """The query heads of this position."""
        return self._own * self.head_share, (self._own + 1) * self.head_share

    def part(self, query: Tensor, *keys: Tensor, position: int) -> Tensor:
        """Queries, keys and values of one position's heads, of this rank's tokens: `[tokens, width]`, side by side."""
        first = position * self.kv_heads // self._program.degree
        kept = [each[:, first : first + self.kv_share] for each in keys]
        at = position * self.head_share
        return side_by_side([query[:, at : at + self.head_share], *kept])

    def gather(self, part_of: Callable[[int], Tensor], *, payload: Payload) -> Tensor:
        """Send `part_of(p)`, this rank's tokens of position p's heads, to position p. Returns this position's heads of
        all tokens of the group, in order."""
        own = part_of(self._own)
        whole = own.new_empty((self._spans[-1][1], *own.shape[1:]))
        whole[slice(*self._spans[self._own])] = own
        self._run(
            payload,
            outgoing=lambda message: part_of(self._program.ranks.index(message.peer)),
            incoming=lambda message: whole[slice(*message.ranges[0])],
        )
        return whole

    def scatter(self, whole: Tensor, *, payload: Payload) -> list[Tensor]:
        """Send this position's heads of all tokens, contiguous, to the ranks of the tokens. Returns this rank's tokens
        of each position's heads."""
        start, stop = self._spans[self._own]
        parts = [
            whole[start:stop] if position == self._own else whole.new_empty((stop - start, *whole.shape[1:]))
            for position in range(self._program.degree)
        ]
        self._run(
            payload,
            outgoing=lambda message: whole[slice(*message.ranges[0])],
            incoming=lambda message: parts[self._program.ranks.index(message.peer)],
        )
        return parts

    def _run(
        self, payload: Payload, *, outgoing: Callable[[Message], Tensor], incoming: Callable[[Message], Tensor]
    ) -> None:
        """Post all rounds before waiting for the first: they do not depend on each other."""
        posted = []
        for step in exchange_rounds(self._program, rank=self._transport.rank, payload=payload):
            sends = [(message.peer, outgoing(message)) for message in step.sends]
            receives = [(message.peer, incoming(message)) for message in step.receives]
            posted.append((self._stats.post(sends, receives, transport=self._transport), sends))  # keeps tensors alive
        for pending, _ in posted:
            self._stats.wait(pending)


class ToHeads(torch.autograd.Function):
    """Queries, keys and values of own tokens -> `[all tokens, width]`, those of own heads side by side, in `shares`.
    Gradients of replicated key and value heads are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *given: Tensor) -> Tensor:
        ctx.exchange = exchange
        part_of = functools.partial(exchange.part, *given)
        (whole,) = once(
            "heads",
            lambda: (exchange.gather(lambda position: part_of(position=position), payload=Payload.QKV),),
            kept=exchange.kept,
        )
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange: HeadExchange = ctx.exchange
        parts = exchange.scatter(grads[0].contiguous(), payload=Payload.QKV_GRAD)
        by_tensor = zip(*(apart(part, exchange.shares) for part in parts), strict=True)
        dq, *others = (torch.cat(each, dim=1) for each in by_tensor)
        return None, dq, *(_summed(each, exchange.kv_heads) for each in others)


def _summed(gradient: Tensor, kv_heads: int) -> Tensor:
    """`[tokens, kv_heads x replicas, head_dim]` -> `[tokens, kv_heads, head_dim]`."""
    tokens, _, head_dim = gradient.shape
    replicas = gradient.view(tokens, kv_heads, -1, head_dim)
    return replicas.sum(2, dtype=accumulator_dtype(gradient.dtype)).to(gradient.dtype)


class ToTokens(torch.autograd.Function):
    """`[all tokens, h, head_dim]` of own heads -> `[tokens, heads, head_dim]` of own tokens."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        (own,) = once(
            "tokens",
            lambda: (torch.cat(exchange.scatter(out.contiguous(), payload=Payload.OUT), dim=1),),
            kept=exchange.kept,
        )
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange: HeadExchange = ctx.exchange
        shares = grads[0].split(exchange.head_share, dim=1)
        return exchange.gather(lambda position: shares[position].contiguous(), payload=Payload.OUT_GRAD), None
