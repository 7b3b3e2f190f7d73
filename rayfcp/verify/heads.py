"""Proof that ranks which share out heads agree, so that the first share of heads stands for all."""

from collections.abc import Iterator, Sequence

from rayfcp.program.attention import padding_number
from rayfcp.program.heads import with_peers
from rayfcp.program.instructions import AttentionProgram, HeadProgram, Load, Message, Piece
from rayfcp.verify.replay import SlotTokens
from rayfcp.verify.tokens import Tokens

RankPart = tuple[AttentionProgram | HeadProgram, Load]
"""The attention of a rank in one microbatch, and what it loads."""

Past = tuple[Sequence[RankPart], Sequence[SlotTokens]]
"""The parts of all ranks of a microbatch, and their `first_heads`."""

_NOTHING: SlotTokens = (AttentionProgram(num_tokens=0, forward=(), backward=()), {0: Tokens.of(())})


def first_heads(parts: Sequence[RankPart], *, earlier: Sequence[Past] = ()) -> list[SlotTokens]:
    """The attention of each rank of one microbatch with the first share of the heads (all of them where heads are not
    shared out), and the tokens in its slots at first; nothing on ranks of other shares. `parts[r]` is rank r's.

    Each of d ranks of a group computes for 1/d of the heads. Ranks of one group run the same attention, and messages go
    between equal shares of equally many, and context comes from the same group; so every share does what the first one
    does, and pairs of all heads are computed once if and only if those of the first share are.

    Raises:
        ValueError: ranks of a group disagree on its ranks, tokens or attention; a message goes to a rank of other
            heads; or context is of a microbatch in which the rank had other heads.
    """
    for rank, (program, _) in enumerate(parts):
        for message in _messages(program):
            if _share(parts, message.peer) != _share(parts, rank):
                raise ValueError(
                    f"rank {rank}: a {message.payload.value} message names rank {message.peer}, which has other heads; "
                    "must be a rank of the same share; lower the plan again"
                )
        if isinstance(program, HeadProgram):
            _check_agreement(parts, program, rank=rank)
        for slot in program.inner.context:
            _check_group(parts, earlier[slot.microbatch][0], rank=rank, microbatch=slot.microbatch)
    return [
        _held(parts, rank, earlier=earlier) if _share(parts, rank)[1] == 0 else _NOTHING for rank in range(len(parts))
    ]


def _held(parts: Sequence[RankPart], rank: int, *, earlier: Sequence[Past]) -> SlotTokens:
    program = parts[rank][0].inner
    slots = {0: Tokens.of(piece for peer in _group(parts, rank) for piece in _pieces(parts, peer))}
    for slot in program.context:
        if slot.slot in slots:
            raise ValueError(f"rank {rank}: slot {slot.slot} is full from the start twice; lower the plan again")
        slots[slot.slot] = earlier[slot.microbatch][1][rank][1][0].cut((slot.span,))
    return program, slots


def _group(parts: Sequence[RankPart], rank: int) -> tuple[int, ...]:
    """The ranks that share out heads with a rank, itself included."""
    program = parts[rank][0]
    return program.ranks if isinstance(program, HeadProgram) else (rank,)


def _check_group(parts: Sequence[RankPart], then: Sequence[RankPart], *, rank: int, microbatch: int) -> None:
    now, before = _group(parts, rank), _group(then, rank)
    if now != before:
        raise ValueError(
            f"rank {rank}: context of microbatch {microbatch} was shared out by heads over ranks {before}, must be "
            f"over {now} as here; keep a sequence's slices in groups of the same ranks and primitive"
        )


def _pieces(parts: Sequence[RankPart], rank: int) -> tuple[Piece, ...]:
    """The pieces of a rank; without tokens, a sequence of its own."""
    return parts[rank][1].pieces or (Piece(sequence=padding_number(rank), start=0, stop=1),)


def _share(parts: Sequence[RankPart], rank: int) -> tuple[int, int]:
    """The number of shares into which the rank's group cuts the heads, and that of the rank's own."""
    program = parts[rank][0]
    return (program.degree, program.ranks.index(rank)) if isinstance(program, HeadProgram) else (1, 0)


def _messages(program: AttentionProgram | HeadProgram) -> Iterator[Message]:
    for step in program.inner.forward + program.inner.backward:
        yield from step.sends
        yield from step.receives


def _check_agreement(parts: Sequence[RankPart], program: HeadProgram, *, rank: int) -> None:
    for peer in program.ranks:
        other = parts[peer][0]
        if not isinstance(other, HeadProgram):
            raise ValueError(
                f"rank {rank}: its Ulysses group {program.ranks} names rank {peer}, which runs no part of it"
            )
        wrong = [field for field in ("ranks", "tokens") if getattr(other, field) != getattr(program, field)]
        if peer == program.ranks[0] and not wrong:  # all others are compared with it
            agree = _of_groups(parts, other.attention) == _of_groups(parts, program.attention)
            wrong = [] if agree else ["attention"]
        if wrong:
            raise ValueError(
                f"rank {rank}: {wrong[0]} of its Ulysses group differ from those of rank {peer}, must be the same "
                f"on all of {program.ranks}; lower the plan again"
            )


def _of_groups(parts: Sequence[RankPart], program: AttentionProgram) -> AttentionProgram:
    """The program with the first rank of its group in place of each peer."""
    firsts = {rank: part.ranks[0] if isinstance(part, HeadProgram) else rank for rank, (part, _) in enumerate(parts)}
    return with_peers(program, firsts)
