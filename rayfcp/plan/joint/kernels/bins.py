"""Sequences in packs of equal memory: by work, or by length where memory is scarce."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.price import Floats, Ints
from rayfcp.plan.joint.kernels.state import MOVES, World

CAPACITIES = 8  # tried between the mean and all of a pack's memory


class Packs(NamedTuple):
    """The pack of each member, and what each pack holds; nothing where some member finds no room."""

    owners: Ints
    tokens: Floats
    cells: Floats


@compiled
def _packed(world: World, members: Ints, degree: int, count: int, by_length: bool) -> Packs:
    """Into so many packs of `degree` ranks' memory, by work, or else by length."""
    if not by_length:
        packs = _by_work(world, members, degree, count)
        if len(packs.owners) == len(members):
            return packs
    return _by_length(world, members, degree, count)


@compiled
def _num_bins(world: World, members: Ints, degree: int) -> int:
    """Packs of `degree` ranks' memory that hold all by length."""
    tokens = world.batch.tokens[members]
    owners = np.empty(len(members), np.int64)
    _fits(tokens, np.argsort(-tokens, kind="mergesort"), world.prices.room * degree, owners, len(members))
    return int(owners.max()) + 1


@compiled
def _by_length(world: World, members: Ints, degree: int, count: int) -> Packs:
    """First-fit decreasing, at about the least tokens a pack that suffice."""
    tokens, most = world.batch.tokens[members], world.prices.room * degree
    order = np.argsort(-tokens, kind="mergesort")
    least = max(tokens.sum() / count, tokens[order[0]])
    owners = np.full(len(members), -1)
    if least > most or not _fits(tokens, order, most, owners, count):
        return Packs(owners[:0], np.zeros(count), np.zeros(count))
    trial = owners.copy()
    for _ in range(CAPACITIES):
        middle = (least + most) / 2.0
        if _fits(tokens, order, middle, trial, count):
            most = middle
            owners[:] = trial
        else:
            least = middle
    world.state.counts[MOVES] += 2 * (1 + CAPACITIES) * len(members)
    held, cells = np.zeros(count), np.zeros(count)
    for number, at in enumerate(members):
        held[owners[number]] += world.batch.tokens[at]
        cells[owners[number]] += world.batch.cells[at]
    return Packs(owners, held, cells)


@compiled
def _fits(tokens: Floats, order: Ints, room: float, owners: Ints, count: int) -> bool:
    """Each in this order goes to the first of so many packs with room for it; `owners` says to which."""
    leaves = 1
    while leaves < count:
        leaves *= 2
    rooms = np.zeros(2 * leaves)  # a tournament: rooms[1] is that of the pack with the most left
    rooms[leaves : leaves + count] = room
    for node in range(leaves - 1, 0, -1):
        rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    for number in order:
        if rooms[1] < tokens[number]:
            return False
        node = 1
        while node < leaves:
            node = 2 * node if rooms[2 * node] >= tokens[number] else 2 * node + 1
        owners[number] = node - leaves
        rooms[node] -= tokens[number]
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    return True


@compiled
def _by_work(world: World, members: Ints, degree: int, count: int) -> Packs:
    """The most work first, to the pack with the least that has room."""
    batch, room = world.batch, world.prices.room * degree
    owners = np.zeros(len(members), np.int64)
    tokens, cells = np.zeros(count), np.zeros(count)
    loads, winners = np.zeros(count), np.empty(2 * count, np.int64)  # a tournament: winners[1] has the least load
    winners[count:] = np.arange(count)
    for node in range(count - 1, 0, -1):
        winners[node] = min(winners[2 * node], winners[2 * node + 1])
    for number in np.argsort(-batch.work_s[members], kind="mergesort"):
        at = members[number]
        best = winners[1] if count > 1 else 0
        if tokens[best] + batch.tokens[at] > room:
            best = _roomy(tokens, loads, room - batch.tokens[at])
        if best < 0:
            return Packs(owners[:0], tokens, cells)
        owners[number] = best
        tokens[best] += batch.tokens[at]
        cells[best] += batch.cells[at]
        loads[best] += batch.work_s[at]
        _replay(winners, loads, best)
    world.state.counts[MOVES] += 2 * len(members)
    return Packs(owners, tokens, cells)


@inner
def _roomy(tokens: Floats, loads: Floats, room: float) -> int:
    """The pack with the least load of those with at most `room` tokens; -1 if there is none."""
    best = -1
    for each in range(len(tokens)):
        if tokens[each] <= room and (best < 0 or loads[each] < loads[best]):
            best = each
    return best


@inner
def _replay(winners: Ints, loads: Floats, pack: int) -> None:
    """The load of a pack has changed."""
    node = (len(loads) + pack) // 2
    while node > 0:
        left, right = winners[2 * node], winners[2 * node + 1]
        winners[node] = left if loads[left] <= loads[right] else right
        node //= 2
