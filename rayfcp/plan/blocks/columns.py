"""A global batch as columns for the block planner, and its cut into microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.plan.blocks.kernels.table import Bools, Floats, Ints, Mutual, Pool
from rayfcp.plan.packing import best_fit_decreasing
from rayfcp.values import Mask, SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences with the most cells a token first, longest first among equals, then by id. `whole`: themselves."""

    ids: Ints
    tokens: Ints
    full: Bools
    density: Floats
    rising: Floats
    whole: tuple[SequenceSpec, ...]

    def pool(self, members: Ints) -> Pool:
        """Those sequences, `members` ascending."""
        tokens, density, rising = self.tokens[members], self.density[members], self.rising[members]
        mutual = _mutual([self.whole[at] for at in members.tolist()])
        plain = density - np.diff(mutual.cells[mutual.first]) / tokens
        return Pool(tokens, self.full[members], density, plain - rising * (tokens + 1) / 2, rising, mutual)


def batch_of(sequences: Sequence[SequenceSpec]) -> Batch:
    """The columns of a batch."""
    ids = np.array([sequence.id for sequence in sequences], np.int64)
    tokens = np.array([sequence.num_tokens for sequence in sequences], np.int64)
    full = np.array([sequence.mask is Mask.FULL for sequence in sequences], np.bool_)
    cells = np.array([sequence.attention_cells for sequence in sequences], np.float64)
    density, rising = cells / tokens, np.array([_rising(sequence) for sequence in sequences], np.float64)
    order = np.lexsort((ids, -tokens, -density))
    return Batch(
        ids=ids[order],
        tokens=tokens[order],
        full=full[order],
        density=density[order],
        rising=rising[order],
        whole=tuple(sequences[at] for at in order.tolist()),
    )


def _rising(sequence: SequenceSpec) -> float:
    """The share of layers in which a token sees one key more than the one before it."""
    if sequence.mask is Mask.FULL or not sequence.windows:
        return float(sequence.mask is Mask.CAUSAL)
    layers = [(count, window == 0 or window >= sequence.num_tokens) for window, count in sequence.windows]
    return sum(count for count, rises in layers if rises) / sum(count for count, _ in layers)


def _mutual(sequences: Sequence[SequenceSpec]) -> Mutual:
    """What pictures add to a full mask with a window is spread over its tokens."""
    of_each = [
        [span for run in each.mutual for span in run.ranges()] if each.mask is Mask.CAUSAL else [] for each in sequences
    ]
    start, stop = np.array([span for spans in of_each for span in spans], np.int64).reshape(-1, 2).T
    size = stop - start
    first = np.cumsum([0, *map(len, of_each)])
    return Mutual(first, start.copy(), stop.copy(), np.concatenate(([0.0], np.cumsum(size * (size - 1) / 2))))


def microbatches_of(batch: Batch, *, room: int) -> list[Ints]:
    """Positions in each microbatch, ascending: as few microbatches as memory permits, by cells.

    `room`: tokens that all ranks hold together. Every sequence can be shared by all ranks, so the number of
    microbatches is all that costs: from the fewest that tokens permit on, the sequences go, most cells first, to
    the one with the fewest cells that has room; where that finds none, best-fit decreasing, which always does.
    """
    cells = batch.tokens * batch.density
    order = np.argsort(-cells, kind="stable")
    fewest = -(-int(batch.tokens.sum()) // room)
    by_length = np.argsort(-batch.tokens, kind="stable")
    packed = np.array(best_fit_decreasing(batch.tokens[by_length].tolist(), capacity_tokens=room), np.int64)
    for count in range(fewest, int(packed.max()) + 1):
        owners = _by_cells(batch.tokens[order], cells[order], count=count, room=room)
        if owners is not None:
            return _parts(order, owners)
    return _parts(by_length, packed)


def _by_cells(tokens: Ints, cells: Floats, *, count: int, room: int) -> Ints | None:
    if count == 1:
        return np.zeros(len(tokens), np.int64)
    held, loads = [0] * count, [0.0] * count
    owners = np.zeros(len(tokens), np.int64)
    for at, (size, work) in enumerate(zip(tokens.tolist(), cells.tolist(), strict=True)):
        roomy = [each for each in range(count) if held[each] + size <= room]
        if not roomy:
            return None
        part = min(roomy, key=loads.__getitem__)
        owners[at] = part
        held[part] += size
        loads[part] += work
    return owners


def _parts(order: Ints, owners: Ints) -> list[Ints]:
    return [np.sort(order[owners == each]) for each in range(int(owners.max()) + 1) if (owners == each).any()]
