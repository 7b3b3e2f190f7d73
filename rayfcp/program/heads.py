"""Ulysses groups: their lowering, and the rounds of messages that their exchanges are.

An exchange is an all-to-all over the group, run as d - 1 matchings: in its round i position p sends to
p + i and receives from p - i (mod d), so no subgroup of processes is needed. Forward exchanges queries, keys
and values, attends, and exchanges outputs; backward does the same with the gradients of outputs, then of
queries, keys and values. Nothing is computed while an exchange runs: attention needs all of it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rayfcp.program.attends import attends_within
from rayfcp.program.instructions import Attend, AttentionProgram, AttentionRound, HeadProgram, Message, Payload, Range
from rayfcp.program.placed import BlockTable, Placed
from rayfcp.program.table import Attends
from rayfcp.values import Block, Group, Layout, Mask

_TO_HEADS = {False: Payload.QKV, True: Payload.OUT_GRAD}
_TO_TOKENS = {False: Payload.OUT, True: Payload.QKV_GRAD}


def lower_heads(group: Group, layout: Layout, *, masks: Mapping[int, Mask]) -> tuple[HeadProgram, ...]:
    """The programs of a Ulysses group's ranks, by position, wherever the layout puts its blocks.

    Invariant: every (query, key) cell of every mask is computed once for each head, on the rank of that head.

    Raises:
        ValueError: a transfer of the layout touches a rank of the group, whose tokens travel by heads.
    """
    _check_rounds(group, layout)
    held: dict[int, list[Block]] = {rank: [] for rank in group.ranks}
    for block in layout.blocks:
        if block.rank in held:
            held[block.rank].append(block)
    tokens = tuple(max(1, sum(block.num_tokens for block in held[rank])) for rank in group.ranks)
    attends = _attends([held[rank] for rank in group.ranks], tokens, masks=masks)
    return tuple(HeadProgram(num_tokens=each, ranks=group.ranks, tokens=tokens, attends=attends) for each in tokens)


def _check_rounds(group: Group, layout: Layout) -> None:
    for index, step in enumerate(layout.rounds):
        for transfer in step.transfers:
            touched = {transfer.source, transfer.target} & set(group.ranks)
            if touched:
                raise ValueError(
                    f"round {index}: a transfer touches ranks {sorted(touched)} of a {group.primitive.value} group, "
                    "which must have none; drop the transfer or make the group a ring"
                )


def _attends(held: Sequence[Sequence[Block]], tokens: Sequence[int], *, masks: Mapping[int, Mask]) -> Attends:
    """Attends over the tokens of all positions, laid end to end; padding tokens attend to themselves."""
    blocks = [block for own in held for block in own]
    begin = [at for own, (start, _) in zip(held, spans(tokens), strict=True) for at in _begins(own, start)]
    placed = Placed(tuple(range(len(blocks))), BlockTable(blocks, masks), begin=np.array(begin, np.int64))
    padded = [span for own, span in zip(held, spans(tokens), strict=True) if not own]
    padding = Attends.of(Attend(query=span, slot=0, key=span, causal=True) for span in padded)
    return Attends(np.concatenate((attends_within(placed).columns, padding.columns)))


def _begins(blocks: Sequence[Block], start: int) -> Iterator[int]:
    for block in blocks:
        yield start
        start += block.num_tokens


def rounds_of(program: AttentionProgram | HeadProgram, *, rank: int, backward: bool) -> tuple[AttentionRound, ...]:
    """The rounds of a pass, whatever the primitive."""
    if isinstance(program, HeadProgram):
        return head_rounds(program, rank=rank, backward=backward)
    return program.backward if backward else program.forward


def head_rounds(program: HeadProgram, *, rank: int, backward: bool) -> tuple[AttentionRound, ...]:
    """What a rank sends, receives and computes, in order: one exchange, the attends, the other exchange.

    Ranges of messages and attends count tokens of the whole group laid end to end, slot 0; of each the
    message carries the heads of the rank at its other end (to heads) or of its source (to tokens).

    Raises:
        ValueError: `rank` is none of the group's.
    """
    if rank not in program.ranks:
        raise ValueError(f"rank is {rank}, must be one of the group's, {program.ranks}; lower the plan again")
    position = program.ranks.index(rank)
    return (
        *_exchange(program, position, payload=_TO_HEADS[backward], to_heads=True),
        AttentionRound(attends=program.attends),
        *_exchange(program, position, payload=_TO_TOKENS[backward], to_heads=False),
    )


def _exchange(program: HeadProgram, position: int, *, payload: Payload, to_heads: bool) -> tuple[AttentionRound, ...]:
    """To heads, a rank sends its own tokens and receives those of others; to tokens, the other way round."""
    span, degree = spans(program.tokens), program.degree
    rounds = []
    for step in range(1, degree):
        target, source = (position + step) % degree, (position - step) % degree
        sent, received = (position, source) if to_heads else (target, position)
        rounds.append(
            AttentionRound(
                sends=(Message(peer=program.ranks[target], payload=payload, slot=0, ranges=(span[sent],)),),
                receives=(Message(peer=program.ranks[source], payload=payload, slot=0, ranges=(span[received],)),),
            )
        )
    return tuple(rounds)


def spans(tokens: Sequence[int]) -> tuple[Range, ...]:
    """Where each position's tokens lie when all are laid end to end.

    >>> spans([2, 3, 1])
    ((0, 2), (2, 5), (5, 6))
    """
    return tuple(itertools.pairwise(itertools.accumulate(tokens, initial=0)))
