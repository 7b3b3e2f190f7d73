"""Kinds of layers, by their window: which a program has, that ranks and stages agree on them, and what each of them
attends to."""

from collections.abc import Sequence

from rayfcp.program.instructions import AttentionProgram, Forward, HeadProgram, Load, RankProgram

Attention = AttentionProgram | HeadProgram


def windows_of(program: RankProgram) -> tuple[int, ...]:
    """The windows of a program's layers, ascending."""
    return tuple(kind.window for kind in _forwards(program)[0].kinds)


def attention_by_window(programs: Sequence[RankProgram]) -> dict[int, list[list[Attention]]]:
    """Of each window that some stage has, the attention of its layers, by rank, then microbatch; `check_order` holds.

    What layers of one window attend to is the same on all stages that have them.
    """
    num_ranks = programs[0].num_ranks
    found: dict[int, list[list[Attention]]] = {}
    for first in range(0, len(programs), num_ranks):
        of_stage = programs[first : first + num_ranks]
        for at, window in enumerate(windows_of(of_stage[0])):
            if window not in found:
                found[window] = [[item.kinds[at].attention for item in _forwards(each)] for each in of_stage]
    return dict(sorted(found.items()))


def check_windows(program: RankProgram, first: RankProgram) -> None:
    """Every Forward has the kinds of layers that those of the stage's first rank have, with windows that ascend, and
    these share out heads alike.

    Raises:
        ValueError: names the rank, the microbatch and the windows.
    """
    due = windows_of(first)
    for item in _forwards(program):
        where, found = f"{program.place}, microbatch {item.microbatch}", tuple(kind.window for kind in item.kinds)
        if found != due or list(found) != sorted(set(found)) or found[0] < 0:
            raise ValueError(
                f"{where}: windows of layers are {found}, must ascend from 0 or more and be those of {first.place}, "
                f"{due}; lower one plan for all"
            )
        if len({_sharing(kind.attention) for kind in item.kinds}) > 1:
            raise ValueError(f"{where}: layers of windows {found} share out heads differently; lower the plan again")


def _sharing(attention: Attention) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (attention.ranks, attention.tokens) if isinstance(attention, HeadProgram) else ((), ())


def check_loads(program: RankProgram, other: RankProgram) -> None:
    """What a rank loads is the same on all stages.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    mine, theirs = ([item for item in each.instructions if isinstance(item, Load)] for each in (program, other))
    for here, there in zip(mine, theirs, strict=True):
        if here.pieces != there.pieces:
            raise ValueError(_differ(program, other, "pieces", microbatch=here.microbatch))


def check_likeness(program: RankProgram, other: RankProgram, *, window: int) -> None:
    """What a rank's layers of a window attend to is the same on all stages.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    at, there = windows_of(program).index(window), windows_of(other).index(window)
    for mine, theirs in zip(_forwards(program), _forwards(other), strict=True):
        value, due = mine.kinds[at].attention, theirs.kinds[there].attention
        if value is not due and value != due:
            raise ValueError(_differ(program, other, "attention", microbatch=mine.microbatch))


def _differ(program: RankProgram, other: RankProgram, field: str, *, microbatch: int) -> str:
    return (
        f"{program.place}, microbatch {microbatch}: {field} differ from those of {other.place}, must be the same on "
        "all stages; lower one plan for all"
    )


def _forwards(program: RankProgram) -> list[Forward]:
    return [item for item in program.instructions if isinstance(item, Forward)]
