"""Attention shared out by heads: the rounds of messages that its exchanges are.

An exchange is an all-to-all over the group, run as d - 1 matchings: in its round i position p sends to
p + i and receives from p - i (mod d), so no subgroup of processes is needed. Forward exchanges queries, keys
and values, attends, and exchanges outputs; backward does the same with the gradients of outputs, then of
queries, keys and values. Nothing is computed while an exchange runs: attention needs all of it.
"""

import itertools
from collections.abc import Sequence

from rayfcp.program.instructions import AttentionRound, HeadProgram, Message, Payload, Range

TO_HEADS = frozenset({Payload.QKV, Payload.OUT_GRAD})
"""Payloads that go from tokens to heads; the other payloads of exchanges go back."""


def exchange_rounds(program: HeadProgram, *, rank: int, payload: Payload) -> tuple[AttentionRound, ...]:
    """The matchings of one exchange. To heads, a rank sends its own tokens and receives those of others; to tokens,
    the other way round.

    Ranges of messages count tokens of the whole group laid end to end, slot 0. A message carries the heads of its
    target (to heads) or of its source (to tokens).

    Raises:
        ValueError: `rank` is none of the group's.
    """
    if rank not in program.ranks:
        raise ValueError(f"rank is {rank}, must be one of the group's, {program.ranks}; lower the plan again")
    position, span, degree = program.ranks.index(rank), spans(program.tokens), program.degree
    rounds = []
    for step in range(1, degree):
        target, source = (position + step) % degree, (position - step) % degree
        sent, received = (position, source) if payload in TO_HEADS else (target, position)
        rounds.append(
            AttentionRound(
                sends=(Message(peer=program.ranks[target], payload=payload, slot=0, ranges=(span[sent],)),),
                receives=(Message(peer=program.ranks[source], payload=payload, slot=0, ranges=(span[received],)),),
            )
        )
    return tuple(rounds)


def spans(tokens: Sequence[int]) -> tuple[Range, ...]:
    """The range of each position's tokens when all are laid end to end.

    >>> spans([2, 3, 1])
    ((0, 2), (2, 5), (5, 6))
    """
    return tuple(itertools.pairwise(itertools.accumulate(tokens, initial=0)))
