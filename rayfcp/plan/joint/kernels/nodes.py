"""What a plan costs where its groups really lie (`rayfcp.plan.placement.place_groups`)."""

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _keep_pace
from rayfcp.plan.joint.kernels.price import SEAT, Ints
from rayfcp.plan.joint.kernels.state import GROUPS, MICROBATCHES, World, _reprice, total_s


@compiled
def place(world: World, nodes: Ints) -> float:
    """Mark the groups that span nodes, given the ranks of each node, and price them so; returns the seconds of the
    batch."""
    state = world.state
    for microbatch in range(state.counts[MICROBATCHES]):
        groups = np.flatnonzero(state.home[: state.counts[GROUPS]] == microbatch)
        state.pace[microbatch] = 0.0
        for number in range(len(groups)):
            if state.far[groups[number]] < SEAT:
                state.far[groups[number]] = 0
            _reprice(world, int(groups[number]))
        groups = groups[state.far[groups] < SEAT]
        groups = groups[np.argsort(-state.seconds[groups], kind="mergesort")]
        groups = groups[np.argsort(-state.degree[groups], kind="mergesort")]
        _place_all(world, groups, nodes.copy())
        _keep_pace(world, microbatch, 0)
    return total_s(world)


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
def _place_all(world: World, groups: Ints, left: Ints) -> None:
    """Each into the node with the least room that holds it, else over the emptiest ones; those larger than all last."""
    largest = left.max()
    for turn in range(2):
        for group in groups:
            if (world.state.degree[group] > largest) == (turn == 1):
                _place_one(world, group, left)


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
