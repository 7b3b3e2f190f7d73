"""Where memory asks for recomputation, and how whole layers cover it.

The layers that each microbatch recomputes on each stage, for the least seconds that memory permits.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.compiled import compiled, inner
from rayfcp.cost.microbatches import StageBytes
from rayfcp.values.arrays import Floats, Ints


class Rows(NamedTuple):
    """Row r: the sum of `value[e]` x min(C[`column[e]`], `most[r]`) over e in `starts[r]:starts[r + 1]`, less
    `again[r]` where C[`own[r]`] is at least `most[r]`, must be `needed[r]` at least; `own` is -1 where nothing is
    recomputed."""

    starts: Ints
    column: Ints
    value: Floats
    needed: Floats
    most: Floats
    own: Ints
    again: Floats
    stage: Ints


@compiled
def rows_of(order: Ints, held: StageBytes) -> Rows:
    """A row for each pass of a stage at which it holds more than its room, were nothing recomputed or just its own
    chunk; none for a pass after which, at once, more is held. Columns: InfiniPipe's Eq. 16, place in backward order +
    stages after it."""
    num_stages, num_passes = order.shape
    place = np.empty(num_passes // 2, np.int64)
    turn = 0
    for at in range(num_passes):
        if order[0, at] < 0:
            place[-1 - order[0, at]] = turn
            turn += 1
    rows, sizes = _empty(0, 0), np.zeros(2, np.int64)
    for stage in range(num_stages):
        _add(stage, order[stage], place + (num_stages - 1 - stage), held, rows, sizes)
    rows = _empty(sizes[0], sizes[1])
    sizes[:] = 0
    for stage in range(num_stages):
        _add(stage, order[stage], place + (num_stages - 1 - stage), held, rows, sizes)
    return rows


@compiled
def _empty(total: int, entries: int) -> Rows:
    return Rows(
        np.zeros(total + 1, np.int64),
        np.empty(entries, np.int64),
        np.empty(entries),
        np.empty(total),
        np.empty(total),
        np.empty(total, np.int64),
        np.empty(total),
        np.empty(total, np.int64),
    )


@compiled
def _add(stage: int, codes: Ints, columns: Ints, held: StageBytes, rows: Rows, sizes: Ints) -> None:
    """Rows of a stage behind the `sizes[0]` rows and `sizes[1]` entries that there are; only counts where `rows` have
    no space."""
    bytes_held = 0.0
    alive = np.zeros(len(columns), np.bool_)
    for at in range(len(codes)):
        code = codes[at]
        m = code if code >= 0 else -1 - code
        bytes_held += held.kept[stage, m] if code >= 0 else held.layers[stage] * held.begun[m]
        alive[m] = True
        needed = bytes_held + held.working[m] - held.room[stage]
        more = held.again[m] - held.layers[stage] * held.freed[m] if code < 0 else 0.0
        if needed + max(more, 0.0) > 0.0 and not _passed(codes, at, held, stage):
            if sizes[0] < len(rows.needed):
                _write(rows, sizes, alive, columns, held.freed)
                rows.needed[sizes[0]] = needed
                rows.most[sizes[0]] = held.layers[stage]
                rows.own[sizes[0]] = -1 if code >= 0 else columns[m]
                rows.again[sizes[0]] = 0.0 if code >= 0 else held.again[m]
                rows.stage[sizes[0]] = stage
            sizes[0] += 1
            sizes[1] += alive.sum()
        if code < 0:
            bytes_held -= held.kept[stage, m] + held.layers[stage] * held.summed[m]
            alive[m] = False


@inner
def _write(rows: Rows, sizes: Ints, alive: npt.NDArray[np.bool_], columns: Ints, freed: Floats) -> None:
    entry = sizes[1]
    for m in range(len(alive)):
        if alive[m]:
            rows.column[entry] = columns[m]
            rows.value[entry] = freed[m]
            entry += 1
    rows.starts[sizes[0] + 1] = entry


@inner
def _passed(codes: Ints, at: int, held: StageBytes, stage: int) -> bool:
    """A forward pass behind which another one follows that holds more, whatever is recomputed."""
    if codes[at] < 0 or at + 1 == len(codes) or codes[at + 1] < 0:
        return False
    following = codes[at + 1]
    least = held.kept[stage, following] - held.layers[stage] * held.freed[following]
    more: bool = least + held.working[following] >= held.working[codes[at]]
    return more


@compiled
def least_sum_of(rows: Rows, most: float) -> float:
    """A sum that no columns that cover the rows are below: of rows of one stage in turn, each the first that shares no
    column with those before, what the largest entries must do at least; the largest such sum of a stage. Infinite
    where a row asks for more than `most` of everything."""
    best, total, stage, reach = 0.0, 0.0, -1, -1
    for row in range(len(rows.needed)):
        if rows.stage[row] != stage:
            stage, total, reach = rows.stage[row], 0.0, -1
        first, last = rows.starts[row], rows.starts[row + 1]
        if rows.needed[row] <= 0.0 or rows.column[first:last].min() <= reach:
            continue
        least = _least(np.sort(rows.value[first:last])[::-1], rows.needed[row], most)
        total += least
        reach = rows.column[first:last].max()
        best = max(best, total)
    return best


@inner
def _least(values: Floats, needed: float, most: float) -> float:
    """Layers, `most` of each value, largest values first, that make up `needed`."""
    layers: float = 0.0
    for value in values:
        if value * most >= needed:
            layers += max(needed, 0.0) / value
            return layers
        needed -= value * most
        layers += most
    return np.inf


@compiled
def cover(rows: Rows, counts: Floats, most: float) -> bool:
    """Raise `counts`, whole numbers of at most `most`, one layer at a time where that mends most, until all rows are
    covered; then lower what is not needed, the last columns first. False if rows stay uncovered."""
    gain = np.empty(len(counts))
    while _gains(rows, counts, gain):
        best = -1
        for column in range(len(counts)):
            if counts[column] < most and gain[column] > 0.0 and (best < 0 or gain[column] > gain[best]):
                best = column
        if best < 0:
            return False
        counts[best] += 1.0
    for column in range(len(counts) - 1, -1, -1):
        while counts[column] > 0.0 and _spare(rows, column, counts):
            counts[column] -= 1.0
    return True


@inner
def _gains(rows: Rows, counts: Floats, gain: Floats) -> bool:
    """Fills `gain[column]` with the bytes that one layer more mends; False if nothing is lacking."""
    lacking = False
    gain[:] = 0.0
    for row in range(len(rows.needed)):
        slack = _slack(rows, row, counts)
        lacking |= slack < 0.0
        for entry in range(rows.starts[row], rows.starts[row + 1]):
            column = rows.column[entry]
            if counts[column] < rows.most[row]:
                after = slack + rows.value[entry]
                if column == rows.own[row] and counts[column] + 1.0 >= rows.most[row]:
                    after -= rows.again[row]
                gain[column] += max(-slack, 0.0) - max(-after, 0.0)
    return lacking


@inner
def _slack(rows: Rows, row: int, counts: Floats) -> float:
    covered: float = -rows.needed[row]
    for entry in range(rows.starts[row], rows.starts[row + 1]):
        covered += rows.value[entry] * min(counts[rows.column[entry]], rows.most[row])
    if rows.own[row] >= 0 and counts[rows.own[row]] >= rows.most[row]:
        covered -= rows.again[row]
    return covered


@inner
def _spare(rows: Rows, column: int, counts: Floats) -> bool:
    """All rows are covered with one layer less in a column."""
    counts[column] -= 1.0
    spare = True
    for row in range(len(rows.needed)):
        for entry in range(rows.starts[row], rows.starts[row + 1]):
            if rows.column[entry] == column:
                spare = _slack(rows, row, counts) >= 0.0
                break
        if not spare:
            break
    counts[column] += 1.0
    return spare


@compiled
def fit(order: Ints, held: StageBytes, layer_s: Floats, recomputed: Ints) -> bool:
    """Fills `recomputed[stage, microbatch]`: a layer more of the microbatch that mends most bytes a second, as long as
    a pass holds more than the stage's room, or about all; then a layer less of what was not needed, the slowest
    microbatches first. False if memory does not suffice. Microbatches of whole sequences: no gradients are summed up.
    """
    slowest = np.argsort(-layer_s)
    for stage in range(len(order)):
        layers = recomputed[stage]
        layers[:] = 0
        slack = np.empty(order.shape[1])
        if not _raised(order[stage], held, stage, layer_s, layers) and not _all_but(order[stage], held, stage, layers):
            return False
        for m in slowest:
            while layers[m] > 0:
                layers[m] -= 1
                if _room_left(order[stage], held, stage, layers, slack):
                    layers[m] += 1
                    break
    return True


@compiled
def _raised(codes: Ints, held: StageBytes, stage: int, layer_s: Floats, layers: Ints) -> bool:
    spans, slack = _spans(codes, len(layers)), np.empty(len(codes))
    while _room_left(codes, held, stage, layers, slack):
        best, most = -1, 0.0
        for m in range(len(layers)):
            if layers[m] < held.layers[stage]:
                gain = _mended(slack, spans[m], held.freed[m]) / layer_s[m]
                if gain > most:
                    best, most = m, gain
        if best < 0:
            return False
        layers[best] += 1
    return True


@compiled
def _all_but(codes: Ints, held: StageBytes, stage: int, layers: Ints) -> bool:
    """All layers, but one where a microbatch does not fit because the layer that it recomputes is whole."""
    slack = np.empty(len(codes))
    layers[:] = int(held.layers[stage])
    while _room_left(codes, held, stage, layers, slack):
        at = int(np.argmin(slack))
        m = -1 - codes[at]
        if codes[at] >= 0 or layers[m] < held.layers[stage]:
            return False
        layers[m] -= 1
    return True


@inner
def _room_left(codes: Ints, held: StageBytes, stage: int, layers: Ints, slack: Floats) -> bool:
    """Fills `slack[pass]` with what is left of the room; whether it is too little somewhere."""
    kept, lacking = 0.0, False
    for at in range(len(codes)):
        m = codes[at] if codes[at] >= 0 else -1 - codes[at]
        mine = held.kept[stage, m] - layers[m] * held.freed[m]
        if codes[at] >= 0:
            kept += mine
        used = kept + held.working[m]
        if codes[at] < 0:
            kept -= mine
            if layers[m] >= held.layers[stage]:
                used += held.again[m]
        slack[at] = held.room[stage] - used
        lacking |= slack[at] < 0.0
    return lacking


@compiled
def _spans(codes: Ints, count: int) -> Ints:
    """[microbatch, 2]: its first and last pass."""
    spans = np.empty((count, 2), np.int64)
    for at in range(len(codes)):
        if codes[at] >= 0:
            spans[codes[at], 0] = at
        else:
            spans[-1 - codes[at], 1] = at
    return spans


@inner
def _mended(slack: Floats, span: Ints, freed: float) -> float:
    mended = 0.0
    for at in range(span[0], span[1] + 1):
        mended += min(freed, max(-slack[at], 0.0))
    return mended
