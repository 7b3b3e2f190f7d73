"""What the ranks of Ulysses groups compute together, and that they agree on it."""

from collections.abc import Sequence

from rayfcp.program.instructions import HeadProgram
from rayfcp.program.replay import Part, padding
from rayfcp.program.table import Attends, Column
from rayfcp.program.tokens import Tokens, cells_of


def head_cells(parts: Sequence[Part]) -> list[Column]:
    """Cells that the Ulysses groups of one microbatch compute, once for all heads, by group; `parts[r]` is rank r's.

    Each of d ranks computes all cells of its group for 1/d of the heads, so that cells of all heads are
    computed once if and only if all ranks of the group run the same program.

    Raises:
        ValueError: ranks of a group disagree on its ranks, tokens or attends; or an attend mixes sequences.
    """
    found: list[Column] = []
    for rank, (program, _) in enumerate(parts):
        if isinstance(program, HeadProgram):
            _check_agreement(parts, program, rank=rank)
            if rank == program.ranks[0]:
                found.append(_group_cells(parts, program, rank=rank))
    return found


def _check_agreement(parts: Sequence[Part], program: HeadProgram, *, rank: int) -> None:
    for peer in program.ranks:
        other = parts[peer][0]
        if not isinstance(other, HeadProgram):
            raise ValueError(
                f"rank {rank}: its Ulysses group {program.ranks} names rank {peer}, which runs no part of it"
            )
        for field in ("ranks", "tokens", "attends"):
            if getattr(other, field) != getattr(program, field):
                raise ValueError(
                    f"rank {rank}: {field} of its Ulysses group differ from those of rank {peer}, must be the same "
                    f"on all of {program.ranks}; lower the plan again"
                )


def _group_cells(parts: Sequence[Part], program: HeadProgram, *, rank: int) -> Column:
    attends = Attends.of(program.attends)
    if (attends.columns[:, 2] != 0).any():
        raise ValueError(f"rank {rank}: attends of its Ulysses group read further slots, must read slot 0; lower again")
    tokens = Tokens.of(piece for peer in program.ranks for piece in parts[peer][1].pieces or (padding(peer),))
    return cells_of(attends, queries=tokens, keys=tokens, rank=rank)
