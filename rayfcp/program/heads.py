"""Attention shared out by heads: its lowering, and the rounds of messages that its exchanges are.

An exchange is an all-to-all over the group, run as d - 1 matchings: in its round i position p sends to
p + i and receives from p - i (mod d), so no subgroup of processes is needed. Forward exchanges queries, keys
and values, attends, and exchanges outputs; backward does the same with the gradients of outputs, then of
queries, keys and values. Nothing is computed while an exchange runs: attention needs all of it.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rayfcp.program.attention import Needed, Order, Orders, lower_attention, order_of
from rayfcp.program.instructions import AttentionProgram, AttentionRound, HeadProgram, Message, Payload, Range
from rayfcp.values import FULL, Block, LayerKind, Layout, Round

Run = tuple[int, ...]
"""Ranks that exchange tokens for heads, by position."""

TO_HEADS = frozenset({Payload.QKV, Payload.OUT_GRAD})
"""Payloads that go from tokens to heads; the other payloads of exchanges go back."""


def padding_number(rank: int) -> int:
    """The sequence number of the padding token of a rank without tokens; no batch has it."""
    return -1 - rank


def lower_heads(
    layout: Layout, runs: Sequence[Run], *, kind: LayerKind = FULL, earlier: Orders | None = None, needed: Needed = ()
) -> dict[int, HeadProgram]:
    """The programs of all ranks of `runs`, wherever the layout puts its blocks. `earlier`: a rank's order is that of
    its run. `kind`, `needed`: as in `lower_attention`.

    `source` and `target` of the layout's transfers number runs: the ranks at one position of two runs exchange keys
    and values of their heads. A Ulysses group is one run without transfers.

    Invariant: every visible (query, key) pair is computed once for each head, on a rank of that head.

    Raises:
        ValueError: what `lower_attention` refuses.
    """
    joined, own = _joined(layout, runs)
    programs = lower_attention(
        joined,
        num_ranks=len(runs),
        kind=kind,
        own=own,
        earlier={
            at: {number: orders[run[0]] for number, run in enumerate(runs)} for at, orders in (earlier or {}).items()
        },
        needed=needed,
    )
    sizes = {rank: 0 for run in runs for rank in run}
    for block in layout.blocks:
        sizes[block.rank] += block.num_tokens
    found: dict[int, HeadProgram] = {}
    for run, program in zip(runs, programs, strict=True):
        tokens = tuple(max(1, sizes[rank]) for rank in run)
        for position, rank in enumerate(run):
            peers = [other[position] for other in runs]
            attention = with_peers(program, peers) if joined.rounds else program
            found[rank] = HeadProgram(num_tokens=tokens[position], ranks=run, tokens=tokens, attention=attention)
    return found


def _joined(layout: Layout, runs: Sequence[Run]) -> tuple[Layout, list[list[int]]]:
    """The layout with a run's blocks on that run, behind them a block for each padding token; and the blocks of each
    run in the order of its ranks."""
    held: dict[int, list[int]] = {rank: [] for run in runs for rank in run}
    number_of = {rank: number for number, run in enumerate(runs) for rank in run}
    blocks = [replace(block, rank=number_of[block.rank]) for block in layout.blocks]
    for index, block in enumerate(layout.blocks):
        held[block.rank].append(index)
    for rank, number in number_of.items():
        if not held[rank]:
            held[rank].append(len(blocks))
            blocks.append(Block(sequence=padding_number(rank), start=0, stop=1, rank=number))
    own = [[index for rank in run for index in held[rank]] for run in runs]
    joined = replace(layout, blocks=tuple(blocks))
    return (_with_context(joined, layout, number_of) if layout.context else joined), own


def _with_context(joined: Layout, layout: Layout, number_of: Mapping[int, int]) -> Layout:
    """`joined` with the context's blocks on runs too, and their numbers, behind those of padding tokens, in rounds."""
    first, by = len(layout.blocks), len(joined.blocks) - len(layout.blocks)
    context = [
        replace(each, blocks=tuple(replace(block, rank=number_of[block.rank]) for block in each.blocks))
        for each in layout.context
    ]
    rounds = [
        Round(
            transfers=tuple(
                replace(each, blocks=tuple(block + by * (block >= first) for block in each.blocks))
                for each in step.transfers
            )
        )
        for step in layout.rounds
    ]
    return replace(joined, rounds=tuple(rounds), context=tuple(context))


def slot_order(layout: Layout, run: Run) -> Order:
    """The order of a run's slot 0: the blocks of its ranks laid end to end, one token for a rank without."""
    blocks: list[Block] = []
    for rank in run:
        mine = [block for block in layout.blocks if block.rank == rank]
        blocks += mine or [Block(sequence=padding_number(rank), start=0, stop=1, rank=rank)]
    return order_of(blocks)


def with_peers(program: AttentionProgram, peers: Mapping[int, int] | Sequence[int]) -> AttentionProgram:
    """The program with `peers[p]` in place of each peer p."""

    def named(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(replace(message, peer=peers[message.peer]) for message in messages)

    forward, backward = (
        tuple(replace(step, sends=named(step.sends), receives=named(step.receives)) for step in rounds)
        for rounds in (program.forward, program.backward)
    )
    return replace(program, forward=forward, backward=backward)


def head_rounds(program: HeadProgram, *, rank: int, backward: bool) -> tuple[AttentionRound, ...]:
    """The rounds of a rank: one exchange, the attention's rounds, the other exchange.

    Raises:
        ValueError: `rank` is none of the group's.
    """
    before, after = (Payload.OUT_GRAD, Payload.QKV_GRAD) if backward else (Payload.QKV, Payload.OUT)
    return (
        *exchange_rounds(program, rank=rank, payload=before),
        *(program.attention.backward if backward else program.attention.forward),
        *exchange_rounds(program, rank=rank, payload=after),
    )


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
