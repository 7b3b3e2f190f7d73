"""A global batch into microbatches: `part[sequence]` is the microbatch of each; an empty array is no cut."""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.price import Floats, Ints
from rayfcp.plan.joint.kernels.state import World, _sum_s

STEPS = 20_000  # of the search for the fewest microbatches: many sequences seldom need it


class Cut(NamedTuple):
    """At most `most` microbatches of at most `room` tokens; `spare_from_s`: see `cut_by_time`."""

    most: int
    room: float
    spare_from_s: float


class Bins(NamedTuple):
    """Of `capacity` tokens each, or the least multiple that a sequence needs."""

    capacity: float
    max_bins: int


@compiled
def cut_by_time(world: World, order: Ints, how: Cut) -> Ints:
    """Each sequence, in `order`, to the microbatch with the least time that has room.

    A microbatch whose longest sequence takes more than `spare_from_s` even alone has ranks to spare: the
    excess is taken off its time, so that it fills up first; others may stay empty and are left out.
    """
    batch = world.batch
    part = np.full(len(order), -1)
    tokens, times, excess = np.zeros(how.most), np.zeros(how.most), np.zeros(how.most)
    for at in order:
        best = -1
        for each in range(how.most):
            if tokens[each] + batch.tokens[at] <= how.room and (best < 0 or times[each] < times[best]):
                best = each
        if best < 0:
            return np.zeros(0, np.int64)
        part[at] = best
        tokens[best] += batch.tokens[at]
        more_s = max(excess[best], batch.alone_s[at] - world.prices.fixed_s - how.spare_from_s)
        times[best] += batch.work_s[at] / world.prices.capacity + excess[best] - more_s
        excess[best] = more_s
    return _renumbered(part)


@compiled
def cut_by_length(world: World, how: Cut) -> Ints:
    """Runs of sequences of like length, the longest run as short in tokens as may be; where memory binds, these waste
    none of it."""
    tokens = world.batch.tokens
    low, high = max(tokens.max(), tokens.sum() / how.most), how.room
    if len(_runs(tokens, how.most, high)) == 0:
        return np.zeros(0, np.int64)
    while high - low > 1.0:
        middle = (low + high) / 2
        if len(_runs(tokens, how.most, middle)) == 0:
            low = middle
        else:
            high = middle
    return _runs(tokens, how.most, high)


@compiled
def _runs(tokens: Floats, most: int, room: float) -> Ints:
    """The run of each; nothing if more than `most` would be needed."""
    part = np.zeros(len(tokens), np.int64)
    held, number = 0.0, 0
    for at in range(len(tokens)):
        if held + tokens[at] > room:
            held, number = 0.0, number + 1
            if number == most:
                return np.zeros(0, np.int64)
        part[at] = number
        held += tokens[at]
    return part


@compiled
def bins_by_tokens(world: World, room: float) -> Ints:
    """Best-fit decreasing by tokens, into as many microbatches as that takes: it always fits."""
    return best_fit(world.batch.tokens, Bins(room, len(world.batch.tokens)))


@compiled
def tight_bins(world: World, room: float, most: int) -> Ints:
    """At most so many microbatches, by search in depth: each sequence, longest first, in each microbatch with room for
    it, until as much room is lost as may be. Nothing if there are none, or none was found in `STEPS`."""
    tokens = world.batch.tokens
    size, free = len(tokens), most * room - tokens.sum()
    part, held, at = np.full(size, -1), np.zeros(most), 0
    for _ in range(STEPS):
        if part[at] >= 0:
            held[part[at]] -= tokens[at]
        part[at] = _next_bin(held, room, tokens[at], part[at])
        if part[at] < 0:
            if at == 0:
                break
            at -= 1
            continue
        held[part[at]] += tokens[at]
        if at == size - 1:
            return part
        if _lost(held, room, tokens[size - 1]) <= free:
            at += 1
    return part[:0]


@inner
def _next_bin(held: Floats, room: float, tokens: float, before: int) -> int:
    """The first after `before` with room, of those that hold as much only the first of all; -1 if there is none."""
    for each in range(before + 1, len(held)):
        if held[each] + tokens <= room:
            new = True
            for other in range(each):
                new = new and held[other] != held[each]
            if new:
                return each
    return -1


@inner
def _lost(held: Floats, room: float, shortest: float) -> float:
    """Room that nothing fits in any more."""
    lost = 0.0
    for each in range(len(held)):
        if room - held[each] < shortest:
            lost += room - held[each]
    return lost


@compiled
def best_fit(lengths: Floats, bins: Bins) -> Ints:
    """`rayfcp.plan.packing.best_fit_decreasing`; nothing if too many bins would open."""
    owners = np.zeros(len(lengths), np.int64)
    rooms, names = np.zeros(len(lengths)), np.zeros(len(lengths), np.int64)  # of open bins, by (room, name)
    count = 0
    for at in range(len(lengths)):
        best = np.searchsorted(rooms[:count], lengths[at])
        if best < count:
            name, room = names[best], rooms[best] - lengths[at]
        else:
            if count == bins.max_bins:
                return np.zeros(0, np.int64)
            name, room = count, math.ceil(lengths[at] / bins.capacity) * bins.capacity - lengths[at]
            count += 1
        owners[at] = name
        while best > 0 and (rooms[best - 1] > room or (rooms[best - 1] == room and names[best - 1] > name)):
            rooms[best], names[best] = rooms[best - 1], names[best - 1]
            best -= 1
        rooms[best], names[best] = room, name
    return owners


@compiled
def floor_s(world: World, part: Ints) -> float:
    """No plan of this cut takes less."""
    batch, prices = world.batch, world.prices
    spans = np.zeros(part.max() + 1)
    alone = np.zeros(len(spans))
    for at in range(len(part)):
        spans[part[at]] += batch.work_s[at] / prices.capacity
        alone[part[at]] = max(alone[part[at]], batch.alone_s[at])
    for each in range(len(spans)):
        spans[each] = max(spans[each] + prices.fixed_s, alone[each])
    return _sum_s(world, spans)


@compiled
def _renumbered(part: Ints) -> Ints:
    """Without microbatches that nothing is in."""
    names = np.full(part.max() + 1, -1)
    count = 0
    for at in range(len(part)):
        if names[part[at]] < 0:
            names[part[at]] = count
            count += 1
        part[at] = names[part[at]]
    return part
