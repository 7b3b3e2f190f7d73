"""Which query ranges attend to which key ranges, in as few and as large ranges as possible."""

from collections import defaultdict
from collections.abc import Mapping

from rayfcp.program.instructions import Attend, Range
from rayfcp.values import Block, Mask


def attends_of(
    own: Mapping[int, Range],
    held: Mapping[int, Range],
    *,
    blocks: tuple[Block, ...],
    masks: Mapping[int, Mask],
    slot: int,
) -> tuple[Attend, ...]:
    """Attends of a rank's own queries to the keys of one slot.

    `own` and `held` map block indices to their ranges in slot 0 and in `slot`. Blocks of a sequence are
    disjoint, so under a causal mask a query block attends to a key block wholly (key before query), on
    and below the diagonal (same block), or not at all.
    """
    queries, keys = _by_sequence(own, blocks), _by_sequence(held, blocks)
    found: list[Attend] = []
    for sequence, query_blocks in queries.items():
        key_blocks = keys.get(sequence)
        if not key_blocks:
            continue
        if masks[sequence] is Mask.FULL:
            found += _full(query_blocks, key_blocks, slot=slot)
        elif slot == 0:
            found += _own_causal(query_blocks, slot=slot)
        else:
            found += _earlier(query_blocks, key_blocks, slot=slot)
    return tuple(found)


_Placed = tuple[Block, Range]


def _by_sequence(ranges: Mapping[int, Range], blocks: tuple[Block, ...]) -> dict[int, list[_Placed]]:
    grouped: dict[int, list[_Placed]] = defaultdict(list)
    for index, span in ranges.items():
        grouped[blocks[index].sequence].append((blocks[index], span))
    for placed in grouped.values():
        placed.sort(key=lambda item: item[0].start)
    return grouped


def _runs(placed: list[_Placed]) -> list[Range]:
    """Slot ranges of consecutive blocks, joined where they touch in the slot."""
    runs: list[Range] = []
    for _, (start, stop) in placed:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


def _full(queries: list[_Placed], keys: list[_Placed], *, slot: int) -> list[Attend]:
    return [Attend(query=q, slot=slot, key=k, causal=False) for q in _runs(queries) for k in _runs(keys)]


def _own_causal(placed: list[_Placed], *, slot: int) -> list[Attend]:
    """Own queries on own keys. A run of ascending blocks that touch in the slot is one causal square:
    within it, earlier in the slot is earlier in the sequence."""
    runs = _runs(placed)
    squares = [Attend(query=run, slot=slot, key=run, causal=True) for run in runs]
    below = [
        Attend(query=query, slot=slot, key=key, causal=False)
        for index, query in enumerate(runs)
        for key in runs[:index]
    ]
    return squares + below


def _earlier(queries: list[_Placed], keys: list[_Placed], *, slot: int) -> list[Attend]:
    """Query blocks on the keys that come before them; neighbouring query blocks with the same keys join."""
    found: list[Attend] = []
    for query, span in queries:
        for run in _runs([item for item in keys if item[0].stop <= query.start]):
            last = found[-1] if found else None
            if last and last.key == run and last.query[1] == span[0]:
                found[-1] = Attend(query=(last.query[0], span[1]), slot=slot, key=run, causal=False)
            else:
                found.append(Attend(query=span, slot=slot, key=run, causal=False))
    return found
