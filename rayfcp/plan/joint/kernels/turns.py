"""One microbatch after the other: each starts from the longest sequence left and takes what else fits in its time."""

import math

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _allocate
from rayfcp.plan.joint.kernels.nodes import _lay
from rayfcp.plan.joint.kernels.price import Floats, Ints, _best_degree, _pace_of, _price
from rayfcp.plan.joint.kernels.state import GROUPS, MICROBATCHES, World, _beside_s, _compact, _forget, total_s
from rayfcp.plan.joint.kernels.take import Queue, Take, _take

TARGETS = 16
POOLS = (2, 6)  # groups of so many ranks pool their memory: fewer sequences fit in nowhere
WORTH = 0.5  # of its ranks' time: the longest sequence is not spread over so many that it uses less
MANY = 2048  # sequences: while more are left every other target is tried
SAME = 1e-3  # of a target: closer ones are tried once


@compiled
def fill_in_turn(world: World, node: int) -> float:
    """Groups for the whole batch, priced where they lie; returns its seconds.

    Each microbatch takes, of several ways to fill it, the one that gets most done a second. Ranks are rounded up to
    powers of two up to `node` (`Take`), where that is better.
    """
    state = world.state
    state.owner[:] = -1
    state.counts[GROUPS] = state.counts[MICROBATCHES] = 0
    while True:
        left = np.flatnonzero(state.owner < 0)
        if len(left) == 0:
            return total_s(world)
        microbatch, first = state.counts[MICROBATCHES], state.counts[GROUPS]
        state.counts[MICROBATCHES] = microbatch + 1
        queue = _queue(world, left)
        pace = _pace_of(world.prices, world.batch.cells[left[0]], world.batch.tokens[left[0]])
        how = _best(world, queue, microbatch, pace, node)
        state.pace[microbatch] = pace
        _take(world, queue, microbatch, how)
        _allocate(world, microbatch, first)
        _lay(world, microbatch)
        _compact(world)


@compiled
def _best(world: World, queue: Queue, microbatch: int, pace: float, node: int) -> Take:
    """The best target, then the best pool, then whether to round."""
    targets = _targets(world, queue.left, pace)
    best, most = Take(targets[0], 0, 0), -1.0
    for number in range(0, len(targets), 2 if len(queue.left) > MANY else 1):
        if number > 0 and abs(targets[number] - targets[number - 1]) <= SAME * targets[number]:
            continue
        rate = _rate(world, queue, microbatch, Take(targets[number], 0, 0), pace)
        if rate > most:
            best, most = Take(targets[number], 0, 0), rate
    target_s = best.target_s
    for ranks in POOLS:
        if ranks <= world.prices.num_ranks:
            rate = _rate(world, queue, microbatch, Take(target_s, ranks, 0), pace)
            if rate > most:
                best, most = Take(target_s, ranks, 0), rate
    rounded = Take(target_s, best.pool, node)
    return rounded if _rate(world, queue, microbatch, rounded, pace) > most else best


@compiled
def _queue(world: World, left: Ints) -> Queue:
    lightest = world.batch.cells[left]
    for number in range(1, len(left)):
        lightest[number] = min(lightest[number], lightest[number - 1])
    return Queue(left, lightest, np.zeros(len(world.state.home), np.int64))


@inner
def _rate(world: World, queue: Queue, microbatch: int, how: Take, pace: float) -> float:
    """What a second gets done: work, and tokens, of which a microbatch has room for so many."""
    state, batch, prices = world.state, world.batch, world.prices
    first = state.counts[GROUPS]
    state.pace[microbatch] = pace
    _take(world, queue, microbatch, how)
    per_token = (prices.fixed_s + world.extra_s) * prices.capacity / prices.holds
    done_s = span_s = 0.0
    for at in queue.left:
        if state.owner[at] >= 0:
            done_s += batch.work_s[at] + per_token * batch.tokens[at]
    if first < state.counts[GROUPS]:
        span_s = _lay(world, microbatch)
    _forget(world, first, microbatch)
    return done_s / (_beside_s(world, span_s, world.traffic_s) + world.extra_s) if span_s > 0.0 else 0.0


@compiled
def _targets(world: World, left: Ints, pace: float) -> Floats:
    """What the longest takes at several degrees, and equal shares of all work."""
    batch, prices = world.batch, world.prices
    longest = left[0]
    work_s = batch.work_s[left].sum() / prices.capacity
    tokens = batch.tokens[left].sum()
    targets = np.zeros(TARGETS)
    least = max(math.ceil(batch.tokens[longest] / prices.room), 1)
    best = max(_best_degree(prices, batch.cells[longest], batch.tokens[longest], pace), least)
    number = 0
    for step in range(TARGETS - 2):
        degree = round(least * (best / least) ** (step / (TARGETS - 3)))
        target_s = _price(prices, batch.cells[longest], batch.tokens[longest], degree, 0, pace)
        if step == 0 or batch.work_s[longest] >= WORTH * degree * target_s:
            targets[number] = target_s
            number += 1
    fewest = math.ceil(tokens / prices.holds)
    for more in range(2):
        share_s = work_s / (fewest + more) + prices.fixed_s
        targets[number + more] = max(share_s * 1.01, targets[number - 1])
    return targets[: number + 2]
