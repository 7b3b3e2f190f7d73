"""What a plan costs where its groups really lie (`rayfcp.plan.placement.place_groups`)."""

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _keep_pace
from rayfcp.plan.joint.kernels.price import SEAT, Floats, Ints
from rayfcp.plan.joint.kernels.state import GROUPS, MICROBATCHES, MOVES, World, _reprice, _sum_s, total_s


@compiled
def place(world: World) -> float:
    """Mark the groups that span nodes, and price them so; returns the seconds of the batch."""
    spans = np.zeros(world.state.counts[MICROBATCHES])
    _lay_all(world, spans)
    return _sum_s(world, spans)


@compiled
def alone_s(world: World) -> float:
    """Seconds of the batch if each group were alone in its microbatch, inside a node as far as may be."""
    state = world.state
    state.pace[:] = 0.0
    for group in range(state.counts[GROUPS]):
        if state.home[group] >= 0:
            if state.far[group] < SEAT:
                state.far[group] = 0
            _reprice(world, group)
    return total_s(world)


@compiled
def _lay_all(world: World, spans: Floats) -> None:
    for microbatch in range(world.state.counts[MICROBATCHES]):
        spans[microbatch] = _lay(world, microbatch)


@compiled
def _lay(world: World, microbatch: int) -> float:
    """Mark the groups of a microbatch that span nodes; returns its makespan with them priced so.

    The larger and slower go first, each into the node with the least room that holds it, else over the emptiest ones;
    those larger than all nodes go last. Groups of one rank always find room.
    """
    state = world.state
    groups, count = np.empty(world.prices.num_ranks, np.int64), 0
    state.pace[microbatch] = 0.0
    for group in range(state.counts[GROUPS]):
        if state.home[group] != microbatch:
            continue
        if state.far[group] < SEAT:
            state.far[group] = 0
            if state.degree[group] > 1:
                groups[count] = group
                count += 1
        _reprice(world, group)
    _sort(world, groups[:count])
    left, largest = world.nodes.copy(), world.nodes.max()
    for turn in range(2):
        for group in groups[:count]:
            if (state.degree[group] > largest) == (turn == 1):
                _place_one(world, group, left)
    state.counts[MOVES] += 1 + count * len(left) // 4
    return _keep_pace(world, microbatch, 0)


@inner
def _sort(world: World, groups: Ints) -> None:
    """By ranks, then by seconds, most first; stable, and quick for few."""
    degree, seconds = world.state.degree, world.state.seconds
    for number in range(1, len(groups)):
        group, at = groups[number], number
        while at > 0:
            other = groups[at - 1]
            if degree[other] > degree[group] or (degree[other] == degree[group] and seconds[other] >= seconds[group]):
                break
            groups[at] = other
            at -= 1
        groups[at] = group


@inner
def _place_one(world: World, group: int, left: Ints) -> None:
    degree, best = world.state.degree[group], -1
    for node in range(len(left)):
        if left[node] >= degree and (best < 0 or left[node] < left[best]):
            best = node
    if best >= 0:
        left[best] -= degree
        return
    world.state.far[group] = 1
    while degree > 0:
        emptiest = 0
        for node in range(len(left)):
            if left[node] > left[emptiest]:
                emptiest = node
        taken = min(degree, left[emptiest])
        left[emptiest] -= taken
        degree -= taken
