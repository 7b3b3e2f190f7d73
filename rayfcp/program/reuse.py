"""That keys and values which a microbatch keeps for later ones are there while these read them, and no longer."""

from collections.abc import Collection

from rayfcp.program.instructions import Backward, Forward, Free, Range, RankProgram


def check_reuse(program: RankProgram) -> None:
    """A context is of an earlier microbatch, which keeps just what later ones read; and the backward pass of every
    reader comes before that microbatch's own: only then are its gradients whole. `check_order` found each pass once.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    backward = [item.microbatch for item in program.instructions if isinstance(item, Backward)]
    turn = {number: at for at, number in enumerate(backward)}
    read: dict[int, set[Range]] = {number: set() for number in turn}
    for item in program.instructions:
        for slot in item.attention.inner.context if isinstance(item, Forward) else ():
            where = f"{program.place}, microbatch {item.microbatch}: slot {slot.slot} is context of {slot.microbatch}"
            if not 0 <= slot.microbatch < item.microbatch or slot.num_tokens < 1:
                raise ValueError(
                    f"{where}, tokens {slot.span}; must be at least one token of an earlier microbatch; lower the plan "
                    "again"
                )
            if turn[slot.microbatch] < turn[item.microbatch]:
                raise ValueError(
                    f"{where}, whose Backward comes before this one's, must come after it: otherwise it lacks the "
                    "gradients of its keys and values; reverse them"
                )
            read[slot.microbatch].add(slot.span)
    for number, kept in _kept(program).items():
        due = _union(read[number])
        if kept != due:
            raise ValueError(
                f"{program.place}, microbatch {number}: kept is {kept}, must be what later microbatches read of it, "
                f"{due}; lower the plan again"
            )


def _union(ranges: Collection[Range]) -> tuple[Range, ...]:
    """Ascending ranges that hold what these hold.

    >>> _union({(4, 6), (0, 3), (2, 4), (8, 9)})
    ((0, 6), (8, 9))
    """
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def check_frees(program: RankProgram) -> None:
    """What a microbatch keeps is freed once, after its backward pass; nothing else is.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    freed = [item.microbatch for item in program.instructions if isinstance(item, Free)]
    due = [number for number, ranges in _kept(program).items() if ranges]
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


def _kept(program: RankProgram) -> dict[int, tuple[Range, ...]]:
    return {item.microbatch: item.attention.inner.kept for item in program.instructions if isinstance(item, Forward)}
