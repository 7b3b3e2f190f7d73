"""That keys and values which a microbatch keeps for later ones are there while these read them, and no longer."""

from collections.abc import Mapping

from rayfcp.program.instructions import AttentionProgram, Backward, Forward, Free, RankProgram
from rayfcp.program.parcels import Range
from rayfcp.program.placed import union


def check_reuse(program: RankProgram) -> None:
    """A context is of an earlier microbatch, which keeps just what later ones read, in layers of each window; and the
    backward pass of every reader comes before that microbatch's own: only then are its gradients whole. `check_order`
    found each pass once, with the same windows.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    backward = [item.microbatch for item in program.instructions if isinstance(item, Backward)]
    turn = {number: at for at, number in enumerate(backward)}
    forwards = [item for item in program.instructions if isinstance(item, Forward)]
    for at in range(len(forwards[0].kinds)):
        attention = {item.microbatch: item.kinds[at].attention.inner for item in forwards}
        _check_kind(attention, turn, place=program.place)


def _check_kind(attention: Mapping[int, AttentionProgram], turn: Mapping[int, int], *, place: str) -> None:
    read: dict[int, set[Range]] = {number: set() for number in turn}
    for number, here in attention.items():
        for slot in here.context:
            where = f"{place}, microbatch {number}: slot {slot.slot} is context of {slot.microbatch}"
            if not 0 <= slot.microbatch < number or slot.num_tokens < 1:
                raise ValueError(
                    f"{where}, tokens {slot.span}; must be at least one token of an earlier microbatch; lower the plan "
                    "again"
                )
            if turn[slot.microbatch] < turn[number]:
                raise ValueError(
                    f"{where}, whose Backward comes before this one's, must come after it: otherwise it lacks the "
                    "gradients of its keys and values; reverse them"
                )
            read[slot.microbatch].add(slot.span)
    for number, here in attention.items():
        if here.kept != (due := union(read[number])):
            raise ValueError(
                f"{place}, microbatch {number}: kept is {here.kept}, must be what later microbatches read of it, "
                f"{due}; lower the plan again"
            )


def check_frees(program: RankProgram) -> None:
    """What a microbatch keeps is freed once, after its backward pass; nothing else is.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    freed = [item.microbatch for item in program.instructions if isinstance(item, Free)]
    forwards = [item for item in program.instructions if isinstance(item, Forward)]
    due = [item.microbatch for item in forwards if any(kind.attention.inner.kept for kind in item.kinds)]
    if sorted(freed) != due:
        raise ValueError(f"{program.place}: Free names microbatches {freed}, must name {due} once: those that keep")
    done: set[int] = set()
    for item in program.instructions:
        if isinstance(item, Backward):
            done.add(item.microbatch)
        elif isinstance(item, Free) and item.microbatch not in done:
            raise ValueError(
                f"{program.place}: Free of microbatch {item.microbatch} comes before its Backward, must come after it"
            )
