"""Packs of equal memory, filled by work, or by length where memory is scarce; and cuts of a batch.

A global batch into microbatches: `part[sequence]` is the microbatch of each; an empty array is no cut.
"""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner, inner_with_arrays
from rayfcp.cost.kernels.loops import argmax, descending, first_at_least
from rayfcp.plan.groups.kernels.state import MOVES, SearchProblem, _sum_s
from rayfcp.values.arrays import Floats, Ints

CAPACITIES = 8  # tried between the mean and all of a pack's memory


class Packs(NamedTuple):
    """The pack of each member, and what each pack holds; nothing where some member finds no room."""

    owners: Ints
    tokens: Floats
    pairs: Floats
    sequences: Floats


@inner_with_arrays
def _packed(problem: SearchProblem, members: Ints, degree: int, count: int, by_length: bool) -> Packs:
    """Into so many packs of `degree` ranks' memory, by work, or else by length."""
    if not by_length:
        packs = _by_work(problem, members, degree, count)
        if len(packs.owners) == len(members):
            return packs
    return _by_length(problem, members, degree, count)


@inner_with_arrays
def _by_length(problem: SearchProblem, members: Ints, degree: int, count: int) -> Packs:
    """First-fit decreasing, at about the least tokens a pack that suffice."""
    tokens, most = problem.batch.tokens[members], problem.prices.max_tokens * degree  # longest first
    least = max(tokens.sum() / count, tokens[0])
    owners = np.full(len(members), -1)
    if least > most or not _fits(tokens, most, owners, count):
        return Packs(owners[:0], np.zeros(count), np.zeros(count), np.zeros(count))
    trial = owners.copy()
    for _ in range(CAPACITIES):
        middle = (least + most) / 2.0
        if _fits(tokens, middle, trial, count):
            most = middle
            for number in range(len(owners)):
                owners[number] = trial[number]
        else:
            least = middle
    problem.state.counts[MOVES] += 2 * (1 + CAPACITIES) * len(members)
    held, pairs, sequences = np.zeros(count), np.zeros(count), np.zeros(count)
    for number, at in enumerate(members):
        held[owners[number]] += problem.batch.tokens[at]
        pairs[owners[number]] += problem.batch.pairs[at]
        sequences[owners[number]] += problem.batch.sequences[at]
    return Packs(owners, held, pairs, sequences)


@inner_with_arrays
def _fits(tokens: Floats, max_tokens: float, owners: Ints, count: int) -> bool:
    """Assign each to the first of `count` packs that it fits in; False if one fits in none."""
    leaves = 1
    while leaves < count:
        leaves *= 2
    left_tokens = np.zeros(2 * leaves)  # binary tree of maxima over the packs' free tokens
    left_tokens[leaves : leaves + count] = max_tokens
    for node in range(leaves - 1, 0, -1):
        left_tokens[node] = max(left_tokens[2 * node], left_tokens[2 * node + 1])
    for number in range(len(tokens)):
        if left_tokens[1] < tokens[number]:
            return False
        node = 1
        while node < leaves:
            node = 2 * node if left_tokens[2 * node] >= tokens[number] else 2 * node + 1
        owners[number] = node - leaves
        left_tokens[node] -= tokens[number]
        while node > 1:
            node //= 2
            left_tokens[node] = max(left_tokens[2 * node], left_tokens[2 * node + 1])
    return True


@inner_with_arrays
def _by_work(problem: SearchProblem, members: Ints, degree: int, count: int) -> Packs:
    """The most work first, to the pack with the least that has room."""
    batch, max_tokens = problem.batch, problem.prices.max_tokens * degree
    owners = np.zeros(len(members), np.int64)
    tokens, pairs, sequences = np.zeros(count), np.zeros(count), np.zeros(count)
    loads, winners = np.zeros(count), np.empty(2 * count, np.int64)  # a tournament: winners[1] has the least load
    for pack in range(count):
        winners[count + pack] = pack
    for node in range(count - 1, 0, -1):
        winners[node] = min(winners[2 * node], winners[2 * node + 1])
    for number in descending(batch.work_s[members]):
        at = members[number]
        best = winners[1] if count > 1 else 0
        if tokens[best] + batch.tokens[at] > max_tokens:
            best = _least_loaded(tokens, loads, max_tokens - batch.tokens[at])
        if best < 0:
            return Packs(owners[:0], tokens, pairs, sequences)
        owners[number] = best
        tokens[best] += batch.tokens[at]
        pairs[best] += batch.pairs[at]
        sequences[best] += batch.sequences[at]
        loads[best] += batch.work_s[at]
        _replay(winners, loads, best)
    problem.state.counts[MOVES] += 2 * len(members)
    return Packs(owners, tokens, pairs, sequences)


@inner
def _least_loaded(tokens: Floats, loads: Floats, max_tokens: float) -> int:
    """The pack with the least load of those with at most `max_tokens` tokens; -1 if there is none."""
    best = -1
    for each in range(len(tokens)):
        if tokens[each] <= max_tokens and (best < 0 or loads[each] < loads[best]):
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


@compiled
def cut_by_time(problem: SearchProblem, most: int, max_tokens: float, spare_from_s: float) -> Ints:
    """Cut into at most `most` microbatches of `max_tokens` by longest processing time first; empty if they do not fit.

    A microbatch whose longest sequence takes more than `spare_from_s` even alone has ranks to spare: the
    excess is taken off its time, so that it fills up first; others may stay empty and are left out.
    """
    batch = problem.batch
    part = np.full(len(batch.tokens), -1)
    tokens, times, excess = np.zeros(most), np.zeros(most), np.zeros(most)
    for at in descending(batch.work_s):
        best = -1
        for each in range(most):
            if tokens[each] + batch.tokens[at] <= max_tokens and (best < 0 or times[each] < times[best]):
                best = each
        if best < 0:
            return np.zeros(0, np.int64)
        part[at] = best
        tokens[best] += batch.tokens[at]
        more_s = max(excess[best], batch.alone_s[at] - problem.prices.fixed_s - spare_from_s)
        times[best] += batch.work_s[at] / problem.prices.capacity + excess[best] - more_s
        excess[best] = more_s
    return _renumbered(part)


@compiled
def cut_by_length(problem: SearchProblem, most: int, max_tokens: float) -> Ints:
    """Cut into at most `most` runs of sequences of like length, the largest of as few tokens as possible; empty if one
    exceeds `max_tokens`. Where memory binds, these waste none of it."""
    tokens = problem.batch.tokens
    low, high = max(tokens[0], tokens.sum() / most), max_tokens
    if len(_runs(tokens, most, high)) == 0:
        return np.zeros(0, np.int64)
    while high - low > 1.0:
        middle = (low + high) / 2
        if len(_runs(tokens, most, middle)) == 0:
            low = middle
        else:
            high = middle
    return _runs(tokens, most, high)


@inner_with_arrays
def _runs(tokens: Floats, most: int, max_tokens: float) -> Ints:
    """The run of each; nothing if more than `most` would be needed."""
    part = np.zeros(len(tokens), np.int64)
    held, number = 0.0, 0
    for at in range(len(tokens)):
        if held + tokens[at] > max_tokens:
            held, number = 0.0, number + 1
            if number == most:
                return np.zeros(0, np.int64)
        part[at] = number
        held += tokens[at]
    return part


@compiled
def best_fit(lengths: Floats, capacity: float, max_bins: int) -> Ints:
    """`rayfcp.plan.assembly.best_fit_decreasing`; empty if more than `max_bins` would open."""
    owners = np.zeros(len(lengths), np.int64)
    left_tokens, names = np.zeros(len(lengths)), np.zeros(len(lengths), np.int64)  # of open bins, by (room, name)
    count = 0
    for at in range(len(lengths)):
        best = first_at_least(left_tokens, count, lengths[at])
        if best < count:
            name, max_tokens = names[best], left_tokens[best] - lengths[at]
        else:
            if count == max_bins:
                return np.zeros(0, np.int64)
            name, max_tokens = count, math.ceil(lengths[at] / capacity) * capacity - lengths[at]
            count += 1
        owners[at] = name
        while best > 0 and (
            left_tokens[best - 1] > max_tokens or (left_tokens[best - 1] == max_tokens and names[best - 1] > name)
        ):
            left_tokens[best], names[best] = left_tokens[best - 1], names[best - 1]
            best -= 1
        left_tokens[best], names[best] = max_tokens, name
    return owners


@compiled
def floor_s(problem: SearchProblem, part: Ints) -> float:
    """Lower bound on the seconds of any plan of the cut `part`."""
    return _sum_s(problem, _floors(problem, part))


@inner_with_arrays
def _floors(problem: SearchProblem, part: Ints) -> Floats:
    """Lower bounds on the makespan of each microbatch of a cut: by the work of all ranks, and by every sequence."""
    batch, prices = problem.batch, problem.prices
    floors = np.zeros(part[argmax(part)] + 1)
    alone = np.zeros(len(floors))
    for at in range(len(part)):
        floors[part[at]] += batch.work_s[at]
        alone[part[at]] = max(alone[part[at]], batch.alone_s[at])
    for each in range(len(floors)):
        floors[each] = max(floors[each] / prices.capacity + prices.fixed_s, alone[each])
    return floors


@inner_with_arrays
def _renumbered(part: Ints) -> Ints:
    """Without microbatches that nothing is in."""
    names = np.full(part[argmax(part)] + 1, -1)
    count = 0
    for at in range(len(part)):
        if names[part[at]] < 0:
            names[part[at]] = count
            count += 1
        part[at] = names[part[at]]
    return part
