"""Iterated local search: disturb a few groups at random, improve what that touched, keep what is faster."""

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _allocate
from rayfcp.plan.joint.kernels.improve import _step
from rayfcp.plan.joint.kernels.links import Links, _settle, _shift, links_of
from rayfcp.plan.joint.kernels.nodes import _lay_all
from rayfcp.plan.joint.kernels.price import SEAT, SLACK, Floats, Ints
from rayfcp.plan.joint.kernels.ruin import _roll
from rayfcp.plan.joint.kernels.state import GROUPS, MICROBATCHES, MOVES, Trials, World, _compact, _copy, _open, _sum_s

KICKS = 3  # at most, at a time
TRIES = 8  # to draw what can be disturbed


@compiled
def kick(world: World, trials: Trials) -> float:
    """Try again and again; a try that does not make the batch faster is undone.

    Tries follow a fixed sequence of pseudo-random numbers. Returns the seconds of the batch.
    """
    state, saved, max_moves = world.state, trials.saved, trials.max_moves
    count = state.counts[MICROBATCHES]
    spans, before = np.zeros(count), np.zeros(count)
    _lay_all(world, spans)
    total_s = _sum_s(world, spans)
    dice, stuck = np.array([54321]), np.zeros(count, np.bool_)
    while state.counts[MOVES] < max_moves:
        _compact(world)
        _copy(state, saved)
        before[:] = spans
        links = links_of(world)
        state.counts[MOVES] += 10 + (len(state.owner) + state.counts[GROUPS]) // 4
        stuck[:] = True
        for _ in range(1 + _roll(dice, KICKS)):
            _disturb(world, links, stuck, dice)
        for microbatch in range(count):
            if not stuck[microbatch]:
                spans[microbatch] = _allocate(world, microbatch, 0)
        _calm(world, links, spans, stuck, max_moves)
        _lay_all(world, spans)
        after_s = _sum_s(world, spans)
        if after_s < total_s * (1.0 - SLACK):
            total_s = after_s
        else:
            moves = state.counts[MOVES]
            _copy(saved, state)
            state.counts[MOVES] = moves
            spans[:] = before
    return total_s


@inner
def _calm(world: World, links: Links, spans: Floats, stuck: Ints, max_moves: int) -> None:
    """Improve the slowest groups of the microbatches that are not stuck."""
    while world.state.counts[MOVES] < max_moves:
        slowest = -1
        for microbatch in range(len(spans)):
            if not stuck[microbatch] and (slowest < 0 or spans[microbatch] > spans[slowest]):
                slowest = microbatch
        if slowest < 0:
            return
        if not _step(world, links, spans, slowest):
            stuck[slowest] = True


@inner
def _disturb(world: World, links: Links, stuck: Ints, dice: Ints) -> None:
    """Move a sequence to another group or to a new one, which takes ranks from its group."""
    state, batch, room = world.state, world.batch, world.prices.room
    for _ in range(TRIES):
        at = _roll(dice, len(state.owner))
        source = state.owner[at]
        home = state.home[source]
        if _roll(dice, 3) == 0:
            ranks = state.degree[source] - 1
            if (
                state.far[source] >= SEAT
                or ranks < 1
                or state.spare[home] + ranks < 1
                or state.counts[GROUPS] >= len(state.home) - 1
            ):
                continue
            ranks = 1 + _roll(dice, ranks)
            if state.tokens[source] - batch.tokens[at] > (state.degree[source] - ranks) * room:
                continue
            if batch.tokens[at] > ranks * room:
                continue
            state.degree[source] -= ranks
            state.spare[home] += ranks
            target = _open(world, home, ranks)
        else:
            target = _roll(dice, state.counts[GROUPS])
            if target == source or state.home[target] < 0:
                continue
            if state.tokens[target] + batch.tokens[at] > state.degree[target] * room:
                continue
        _shift(world, links, at, target)
        stuck[home] = False
        stuck[state.home[target]] = False
        _settle(world, links, source)
        _settle(world, links, target)
        return
