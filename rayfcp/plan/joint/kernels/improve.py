"""Local search: sequences move between groups and microbatches, or change places, while that helps."""

import math

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _allocate
from rayfcp.plan.joint.kernels.links import Links, _settle, _shift, links_of
from rayfcp.plan.joint.kernels.price import Floats
from rayfcp.plan.joint.kernels.split import _split
from rayfcp.plan.joint.kernels.state import MICROBATCHES, MOVES, World, total_s
from rayfcp.plan.joint.kernels.trials import Change, _bottleneck, _moves, _swaps, _unions


@compiled
def improve(world: World, max_moves: int) -> float:
    """Better the slowest group of every microbatch until none can be, or `State.counts` reaches so many moves.

    Each change makes a slowest group faster and the batch no slower. Returns the seconds of the batch.
    """
    state = world.state
    links = links_of(world)
    spans = np.zeros(state.counts[MICROBATCHES])
    for microbatch in range(len(spans)):
        spans[microbatch] = _allocate(world, microbatch, 0)
    stuck = np.zeros(len(spans), np.bool_)
    while state.counts[MOVES] < max_moves:
        slowest = -1
        for microbatch in range(len(spans)):
            if not stuck[microbatch] and (slowest < 0 or spans[microbatch] > spans[slowest]):
                slowest = microbatch
        if slowest < 0:
            break
        if _step(world, links, spans, slowest):
            stuck[:] = False
        else:
            stuck[slowest] = True
    return total_s(world)


@compiled
def _step(world: World, links: Links, spans: Floats, microbatch: int) -> bool:
    """The best change of the slowest group of a microbatch; False if there is none."""
    slow = _bottleneck(world, microbatch)
    if slow.group < 0:
        return False
    best = _moves(world, links, spans, slow, Change(math.inf, -1, -1, -1, 0))
    best = _unions(world, slow, best)
    best = _swaps(world, links, spans, slow, best)
    if best.target < 0:
        if not _split(world, links, slow.group):
            return False
        spans[microbatch] = _allocate(world, microbatch, 0)
        return True
    there = world.state.home[best.target]
    _apply(world, links, slow.group, best)
    spans[microbatch] = _allocate(world, microbatch, 0)
    if there != microbatch:
        spans[there] = _allocate(world, there, 0)
    return True


@inner
def _apply(world: World, links: Links, source: int, change: Change) -> None:
    state = world.state
    target = change.target
    if change.at < 0:
        while links.head[source] >= 0:
            _shift(world, links, links.head[source], target)
    else:
        _shift(world, links, change.at, target)
        if change.other >= 0:
            _shift(world, links, change.other, source)
    _settle(world, links, source)
    state.spare[state.home[target]] -= change.degree - state.degree[target]
    state.degree[target] = change.degree
    _settle(world, links, target)
