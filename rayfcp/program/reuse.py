"""That keys and values which a microbatch keeps for later ones are there while these read them, and no longer."""

from rayfcp.program.instructions import Backward, Forward, Free, Range, RankProgram


def check_reuse(program: RankProgram) -> None:
    """A context is of an earlier microbatch that keeps it, and the backward pass of every reader comes before that
    microbatch's own: only then are its gradients whole. `check_order` found each pass once.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    kept = _kept(program)
    backward = [item.microbatch for item in program.instructions if isinstance(item, Backward)]
    turn = {number: at for at, number in enumerate(backward)}
    for item in program.instructions:
        for slot in item.attention.inner.context if isinstance(item, Forward) else ():
            where = f"{program.place}, microbatch {item.microbatch}: slot {slot.slot} is context of {slot.microbatch}"
            start, stop = slot.span
            if not 0 <= slot.microbatch < item.microbatch:
                raise ValueError(f"{where}, must be of an earlier microbatch; lower the plan again")
            if not any(first <= start < stop <= last for first, last in kept[slot.microbatch]):
                raise ValueError(
                    f"{where}, tokens [{start}, {stop}), which keeps {list(kept[slot.microbatch])}; keep what is read"
                )
            if turn[slot.microbatch] < turn[item.microbatch]:
                raise ValueError(
                    f"{where}, whose Backward comes before this one's, must come after it: otherwise it lacks the "
                    "gradients of its keys and values; reverse them"
                )


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
