"""That ranks which share out heads agree, so that what the first share of heads runs stands for all heads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rayfcp.program.heads import padding_number
from rayfcp.program.instructions import AttentionProgram, AttentionRound, HeadProgram, Load, Message, Piece
from rayfcp.program.replay import Held

Part = tuple[AttentionProgram | HeadProgram, Load]

_NOTHING: Held = (AttentionProgram(num_tokens=0, forward=(), backward=()), ())


def first_heads(parts: Sequence[Part]) -> list[Held]:
    """What each rank of one microbatch attends to with the first share of the heads (all of them where heads are not
    shared out), and its slot 0; nothing on ranks of other shares. `parts[r]` is rank r's.

    Each of d ranks of a group computes for 1/d of the heads. Ranks of one group run the same attention, and messages go
    between equal shares of equally many; so every share does what the first one does, and cells of all heads are
    computed once if and only if those of the first share are.

    Raises:
        ValueError: ranks of a group disagree on its ranks, tokens or attention; or a message goes to a rank of other
            heads.
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
    return [_held(parts, rank) if _share(parts, rank)[1] == 0 else _NOTHING for rank in range(len(parts))]


def _held(parts: Sequence[Part], rank: int) -> Held:
    program = parts[rank][0]
    if not isinstance(program, HeadProgram):
        return program, _pieces(parts, rank)
    return program.attention, tuple(piece for peer in program.ranks for piece in _pieces(parts, peer))


def _pieces(parts: Sequence[Part], rank: int) -> tuple[Piece, ...]:
    """What a rank holds; without tokens, a sequence of its own."""
    return parts[rank][1].pieces or (Piece(sequence=padding_number(rank), start=0, stop=1),)


def _share(parts: Sequence[Part], rank: int) -> tuple[int, int]:
    """Into how many shares the rank's group cuts the heads, and which is the rank's."""
    program = parts[rank][0]
    return (program.degree, program.ranks.index(rank)) if isinstance(program, HeadProgram) else (1, 0)


def _messages(program: AttentionProgram | HeadProgram) -> Iterator[Message]:
    for step in program.inner.forward + program.inner.backward:
        yield from step.sends
        yield from step.receives


def _check_agreement(parts: Sequence[Part], program: HeadProgram, *, rank: int) -> None:
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


def _of_groups(parts: Sequence[Part], program: AttentionProgram) -> AttentionProgram:
    """The program with the first rank of its group in place of each peer."""

    def named(messages: Sequence[Message]) -> tuple[Message, ...]:
        firsts = (parts[message.peer][0] for message in messages)
        return tuple(
            replace(message, peer=first.ranks[0] if isinstance(first, HeadProgram) else message.peer)
            for message, first in zip(messages, firsts, strict=True)
        )

    def renamed(rounds: Sequence[AttentionRound]) -> tuple[AttentionRound, ...]:
        return tuple(replace(step, sends=named(step.sends), receives=named(step.receives)) for step in rounds)

    return replace(program, forward=renamed(program.forward), backward=renamed(program.backward))
