"""Attention shared out by heads: its lowering, and the rounds of messages that its exchanges are.

An exchange is an all-to-all over the group, run as d - 1 matchings: in its round i position p sends to
p + i and receives from p - i (mod d), so no subgroup of processes is needed. Forward exchanges queries, keys
and values, attends, and exchanges outputs; backward does the same with the gradients of outputs, then of
queries, keys and values. Nothing is computed while an exchange runs: attention needs all of it.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rayfcp.program.attention import Order, lower_attention, order_of
from rayfcp.program.instructions import AttentionProgram, AttentionRound, HeadProgram, Message, Payload, Range
from rayfcp.program.windows import Bands
from rayfcp.values import Block, Layout, Mask, Round, SequenceSpec, Transfer, bands_of

Run = tuple[int, ...]
"""Ranks that exchange tokens for heads, by position."""

TO_HEADS = frozenset({Payload.QKV, Payload.OUT_GRAD})
"""What goes from tokens to heads; the other payloads of exchanges go back."""


def padding_number(rank: int) -> int:
    """The sequence that the padding token of a rank without tokens is: a number that no batch has."""
    return -1 - rank


def lower_heads(
    layout: Layout,
    runs: Sequence[Run],
    *,
    masks: Mapping[int, Mask],
    bands: Bands | None = None,
    mutual: Bands | None = None,
    earlier: Mapping[int, Mapping[int, Order]] | None = None,
    needed: Collection[tuple[int, int]] = (),
) -> dict[int, HeadProgram]:
    """The programs of all ranks of `runs`, wherever the layout puts its blocks. `earlier[m][r]`: the order of the slot
    0 that rank r's run had in microbatch m. `bands`, `mutual`, `needed`: as in
    `lower_attention`.

    `source` and `target` of the layout's transfers number runs: the ranks at one position of two runs exchange keys
    and values of their heads. A Ulysses group is one run without transfers.

    Invariant: every (query, key) cell of every mask is computed once for each head, on a rank of that head.

    Raises:
        ValueError: what `lower_attention` refuses.
    """
    joined, own, padded = _joined(layout, runs)
    programs = lower_attention(
        joined,
        masks={**masks, **padded},
        num_ranks=len(runs),
        bands=None if bands is None else {**bands, **_bands_of_padding(padded)},
        mutual=mutual,
        own=own,
        earlier={at: [orders[run[0]] for run in runs] for at, orders in (earlier or {}).items()},
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
            attention = _addressed(program, peers) if joined.rounds else program
            found[rank] = HeadProgram(num_tokens=tokens[position], ranks=run, tokens=tokens, attention=attention)
    return found


def _bands_of_padding(padded: Mapping[int, Mask]) -> Bands:
    return {
        number: bands_of(SequenceSpec(id=number, num_tokens=1, num_targets=0, mask=mask))
        for number, mask in padded.items()
    }


def _joined(layout: Layout, runs: Sequence[Run]) -> tuple[Layout, list[list[int]], dict[int, Mask]]:
    """The layout with a run's blocks on that run, behind them a block for each padding token; of each run the blocks
    in the order of its ranks; and the masks of the padding tokens."""
    held: dict[int, list[int]] = {rank: [] for run in runs for rank in run}
    number_of = {rank: number for number, run in enumerate(runs) for rank in run}
    blocks = _renumbered(layout.blocks, number_of)
    padded: dict[int, Mask] = {}
    for index, block in enumerate(layout.blocks):
        held[block.rank].append(index)
    for rank, number in number_of.items():
        if not held[rank]:
            held[rank].append(len(blocks))
            padded[padding_number(rank)] = Mask.CAUSAL
            blocks.append(Block(sequence=padding_number(rank), start=0, stop=1, rank=number))
    own = [[index for rank in run for index in held[rank]] for run in runs]
    context = tuple(replace(each, blocks=tuple(_renumbered(each.blocks, number_of))) for each in layout.context)
    rounds = layout.rounds if not context else _shifted(layout.rounds, len(layout.blocks), by=len(padded))
    return replace(layout, blocks=tuple(blocks), rounds=rounds, context=context), own, padded


def _renumbered(blocks: Sequence[Block], number_of: Mapping[int, int]) -> list[Block]:
    return [replace(block, rank=number_of[block.rank]) for block in blocks]


def _shifted(rounds: Sequence[Round], first: int, *, by: int) -> tuple[Round, ...]:
    """Rounds whose blocks from `first` on, those of context, have numbers higher by `by`."""

    def moved(transfer: Transfer) -> Transfer:
        return replace(transfer, blocks=tuple(block + by * (block >= first) for block in transfer.blocks))

    return tuple(Round(transfers=tuple(moved(transfer) for transfer in step.transfers)) for step in rounds)


def slot_order(layout: Layout, run: Run) -> Order:
    """Where blocks lie in the slot 0 of a run: those of its ranks laid end to end, one token for a rank without."""
    blocks: list[Block] = []
    for rank in run:
        mine = [block for block in layout.blocks if block.rank == rank]
        blocks += mine or [Block(sequence=padding_number(rank), start=0, stop=1, rank=rank)]
    return order_of(blocks)


def _addressed(program: AttentionProgram, peers: Sequence[int]) -> AttentionProgram:
    """The program with ranks for peers in place of runs."""

    def named(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(replace(message, peer=peers[message.peer]) for message in messages)

    forward, backward = (
        tuple(replace(step, sends=named(step.sends), receives=named(step.receives)) for step in rounds)
        for rounds in (program.forward, program.backward)
    )
    return replace(program, forward=forward, backward=backward)


def rounds_of(program: AttentionProgram | HeadProgram, *, rank: int, backward: bool) -> tuple[AttentionRound, ...]:
    """The rounds of a pass, with or without exchanges."""
    if isinstance(program, HeadProgram):
        return head_rounds(program, rank=rank, backward=backward)
    return program.backward if backward else program.forward


def head_rounds(program: HeadProgram, *, rank: int, backward: bool) -> tuple[AttentionRound, ...]:
    """What a rank sends, receives and computes, in order: one exchange, the attention's rounds, the other exchange.

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

    Ranges of messages count tokens of the whole group laid end to end, slot 0; of each the message carries the heads
    of the rank at its other end (to heads) or of its source (to tokens).

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
    """Where each position's tokens lie when all are laid end to end.

    >>> spans([2, 3, 1])
    ((0, 2), (2, 5), (5, 6))
    """
    return tuple(itertools.pairwise(itertools.accumulate(tokens, initial=0)))
