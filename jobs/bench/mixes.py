"""The cheapest mix of kinds of microbatches that holds a batch, as a linear programme, and the prices that it gives."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from kinds import Bools, Floats, Ints, Kind, Loads, loads_of
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec

SINGLE, CLASSES = 25, 25  # the longest sequences, one by one, and classes of the others
STEPS = (0, 1, 2, 3, 4, 6, 8)  # degrees beyond the least that a class is offered
FIRST = 6  # degrees that every class is offered
USED = 1e-3  # of a microbatch of a kind in the mix


class Prices(NamedTuple):
    """`each` of the sequences, `classes` of the linear programme's classes, `extra_s` of a microbatch (s)."""

    each: Floats
    classes: Floats
    extra_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch, longest first, as it is and in classes; `best_s`: a plan takes so long; `least_s`: the slowest passes of
    the shortest microbatch; `beside_s`, `last_s`: what comes on top of the groups of any and of the last microbatch."""

    loads: Loads
    classes: Loads
    class_of: Ints
    best_s: float
    least_s: float
    beside_s: float
    last_s: float


def case_of(
    sequences: list[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: tuple[Primitive, ...],
    best_s: float,
) -> Case:
    ordered = sorted(sequences, key=lambda each: (-each.num_tokens, -each.attention_cells))
    tokens = np.array([each.num_tokens for each in ordered], np.float64)
    cells = np.array([each.attention_cells for each in ordered], np.float64)
    rest = np.array_split(np.arange(min(SINGLE, len(ordered)), len(ordered)), CLASSES)
    parts = [np.array([at]) for at in range(min(SINGLE, len(ordered)))] + [part for part in rest if len(part)]
    count = np.array([len(part) for part in parts], np.float64)
    means = (np.array([column[part].mean() for part in parts]) for column in (tokens, cells))
    first, last = (
        max(cost.shard_s - cost.exposed_s + more, 0.0) for more in (0.0, cost.reduce_s - cost.reduce_exposed_s)
    )
    return Case(
        loads=loads_of(tokens, cells, np.ones(len(ordered)), cluster=cluster, cost=cost, primitives=primitives),
        classes=loads_of(*means, count, cluster=cluster, cost=cost, primitives=primitives),
        class_of=np.repeat(np.arange(len(parts)), count.astype(int)),
        best_s=best_s,
        least_s=cost.fixed_s,
        beside_s=(1 - cost.overlap) * first + cost.exposed_s,
        last_s=cost.reduce_exposed_s + (1 - cost.overlap) * (last - first),
    )


def _offered(loads: Loads, kind: Kind) -> Bools:
    """[class, degree - 1]: in the linear programme; the longest may be joined by other long ones."""
    fits = loads.fits(kind)
    least = np.where(fits.any(axis=1), fits.argmax(axis=1), -1)
    found = np.zeros_like(fits)
    for step in STEPS:
        found[np.arange(len(least)), np.minimum(least + step, fits.shape[1] - 1)] = True
    found[np.ix_(loads.count == 1, least[:3][least[:3] >= 0])] = True
    found[:, :FIRST] = True
    return found & fits


class Block(NamedTuple):
    """Of one kind of microbatch: offered pairs of class and degree, degrees used, capped classes, and where its rows
    and columns start. Rows: forward, backward and memory by degree, ranks, caps; columns: pairs, groups by degree, how
    many microbatches of the kind."""

    kind: Kind
    at: Ints
    degree: Ints
    used: Ints
    capped: Ints
    row: int
    column: int


def _blocks(case: Case, kinds: list[tuple[float, float]]) -> list[Block]:
    found, row, column = [], 0, 0
    for seconds, share in kinds:
        kind = Kind(seconds * share, seconds * (1 - share))
        at, degree = np.nonzero(_offered(case.classes, kind))
        used, capped = np.unique(degree), np.unique(at[case.classes.count[at] == 1])
        found.append(Block(kind, at, degree, used, capped, row, column))
        row += 3 * len(used) + 1 + len(capped)
        column += len(at) + len(used) + 1
    return found


def _entries(loads: Loads, block: Block) -> tuple[Floats, Floats, Floats]:
    """Rows, columns and values of its constraints, all at most 0."""
    at, degree, used = block.at, block.degree, block.used
    size, pairs, degrees = len(used), np.arange(len(at)), loads.degrees[used]
    place, groups = np.searchsorted(used, degree), len(at) + np.arange(size)
    number, rank_row = len(at) + size, 3 * size
    one = np.flatnonzero(loads.count[at] == 1)
    caps = rank_row + 1 + np.arange(len(block.capped))
    rows = [place, size + place, 2 * size + place, *(each * size + np.arange(size) for each in range(3))]
    rows += [np.full(size + 1, rank_row), rank_row + 1 + np.searchsorted(block.capped, at[one]), caps]
    columns = [pairs, pairs, pairs, groups, groups, groups, np.r_[groups, number], one, np.full(len(caps), number)]
    values = [loads.forward_s[at, degree], loads.backward_s[at, degree], loads.rooms[at]]
    values += [loads.forward_fixed_s[used] - block.kind.forward_s, loads.backward_fixed_s[used] - block.kind.backward_s]
    values += [-degrees, np.r_[degrees, -len(loads.degrees)], np.ones(len(one)), -np.ones(len(caps))]
    return block.row + np.concatenate(rows), block.column + np.concatenate(columns), np.concatenate(values)


def solved(case: Case, kinds: list[tuple[float, float]], count: int) -> tuple[Prices, list[tuple[float, float]]]:
    """Dual prices of the cheapest mix of `count` microbatches of kinds (seconds, share of forward) that holds all
    classes, and the kinds in it. The last column holds all at a high price, so that there is a mix."""
    loads, blocks = case.classes, _blocks(case, kinds)
    entries = [np.concatenate(each) for each in zip(*(_entries(loads, block) for block in blocks), strict=True)]
    numbers = np.array([block.column + len(block.at) + len(block.used) for block in blocks])
    width, height = int(numbers[-1]) + 2, len(loads.count)
    last = blocks[-1]
    depth = last.row + 3 * len(last.used) + 1 + len(last.capped)
    held = np.concatenate([block.at for block in blocks])
    places = np.concatenate([block.column + np.arange(len(block.at)) for block in blocks])
    rows = np.r_[held, np.full(len(numbers) + 1, height), np.arange(height)]
    columns = np.r_[places, numbers, width - 1, np.full(height, width - 1)]
    values = np.r_[np.ones(len(held) + len(numbers) + 1), loads.count]
    seconds = np.zeros(width)
    seconds[numbers] = [loads.ahead.makespan_s(*block.kind) + case.beside_s for block in blocks]
    seconds[-1] = 3 * case.best_s
    mix = linprog(
        seconds,
        A_ub=csr_matrix((entries[2], (entries[0], entries[1])), shape=(depth, width)),
        b_ub=np.zeros(depth),
        A_eq=csr_matrix((values, (rows, columns)), shape=(height + 1, width)),
        b_eq=np.r_[loads.count, count],
        method="highs-ipm",
    )
    dual, prices = np.maximum(-mix.ineqlin.marginals, 0.0), mix.eqlin.marginals
    used = [kind for kind, number in zip(kinds, numbers, strict=True) if mix.x[number] > USED]
    each = _each(case, blocks, dual, prices)
    return Prices(np.maximum(each, 0.0), prices[:height], float(prices[height])), used


def _each(case: Case, blocks: list[Block], dual: Floats, prices: Floats) -> Floats:
    """Prices of sequences: what the cheapest place takes of the rows of classes; of one alone in its class that of the
    class."""
    loads = case.loads
    found = np.full(len(loads.count), np.inf)
    for block in blocks:
        size, used = len(block.used), block.used
        forward, backward, memory = dual[block.row : block.row + 3 * size].reshape(3, size)
        offered = np.zeros((len(case.classes.count), size), np.bool_)
        offered[block.at, np.searchsorted(used, block.degree)] = True
        taken = (
            forward * loads.forward_s[:, used] + backward * loads.backward_s[:, used] + memory * loads.rooms[:, None]
        )
        fits = offered[case.class_of] & loads.fits(block.kind)[:, used]
        found = np.minimum(found, np.where(fits, taken, np.inf).min(axis=1, initial=np.inf))
    found = np.where(np.isfinite(found), found, 0.0)
    alone = case.classes.count[case.class_of] == 1
    return np.where(alone, prices[case.class_of], found)
