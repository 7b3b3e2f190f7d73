"""Which sequences a group holds, as linked lists, so that they can change places in no time."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.price import Ints
from rayfcp.plan.joint.kernels.state import World, _empty, _reprice


class Links(NamedTuple):
    """`head[group]` is its first sequence, `after` and `before` its neighbours; -1 ends a list."""

    head: Ints
    after: Ints
    before: Ints


@compiled
def links_of(world: World) -> Links:
    """Members of every group, ascending."""
    state = world.state
    size = len(state.owner)
    head, after, before = np.full(len(state.home), -1), np.full(size, -1), np.full(size, -1)
    for at in range(size - 1, -1, -1):
        group = state.owner[at]
        if head[group] >= 0:
            before[head[group]] = at
        after[at] = head[group]
        head[group] = at
    return Links(head, after, before)


@inner
def _shift(world: World, links: Links, at: int, group: int) -> None:
    """Move a sequence to another group; the seconds of both are the caller's (`_settle`)."""
    state, batch = world.state, world.batch
    source = state.owner[at]
    before, after = links.before[at], links.after[at]
    if before >= 0:
        links.after[before] = after
    else:
        links.head[source] = after
    if after >= 0:
        links.before[after] = before
    first = links.head[group]
    links.before[at], links.after[at], links.head[group] = -1, first, at
    if first >= 0:
        links.before[first] = at
    state.owner[at] = group
    state.tokens[source] -= batch.tokens[at]
    state.cells[source] -= batch.cells[at]
    state.tokens[group] += batch.tokens[at]
    state.cells[group] += batch.cells[at]


@inner
def _settle(world: World, links: Links, group: int) -> None:
    """Its seconds anew; a group without sequences gives its ranks back."""
    state = world.state
    if links.head[group] >= 0:
        _reprice(world, group)
    elif state.home[group] >= 0:
        _empty(world, group)
