"""When each rank is done: rounds of transfers behind attention, with several buffers."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled
from rayfcp.values.arrays import Floats, Ints


class Flow(NamedTuple):
    """Transfers in the order of their rounds: `stage[i]` is the coalesced round of the i-th, which takes `moved_s`
    and brings its target `work_s` of attention, which is computed within the `num_buffers` - 1 phases after; `own_s` is
    each rank's attention to its own keys."""

    stage: Ints
    source: Ints
    target: Ints
    moved_s: Floats
    work_s: Floats
    own_s: Floats
    num_buffers: int


@compiled
def finish_s(flow: Flow) -> Floats:
    """Seconds until each rank has computed, sent and received all of a pass.

    In phase p a rank computes its part (`phases_of`) of what stages before p brought, while stage p flies, and goes
    on when both are over. A transfer starts when both ranks are in its phase and both ports are free.
    """
    work = phases_of(flow)
    num_ranks, num_phases = work.shape
    here, ready = np.zeros(num_ranks), np.zeros(num_ranks)
    sends, receives = np.zeros(num_ranks), np.zeros(num_ranks)
    at = 0
    for phase in range(num_phases):
        for rank in range(num_ranks):
            ready[rank] = here[rank] + work[rank, phase]
            sends[rank] = receives[rank] = here[rank]
        while at < len(flow.stage) and flow.stage[at] == phase:
            source, target = flow.source[at], flow.target[at]
            end = max(sends[source], receives[target]) + flow.moved_s[at]
            sends[source] = receives[target] = end
            ready[source], ready[target] = max(ready[source], end), max(ready[target], end)
            at += 1
        here[:] = ready
    return here


@compiled
def phases_of(flow: Flow) -> Floats:
    """Attention of each rank in each phase: up to an equal share of all that it has for each phase so far, first of
    what arrived, in order, then of its own keys; more where a buffer must be free for the next stage.

    Ranks have about equal attention in all, so that all go through the rounds at one pace, and nobody waits for
    one that still has its own keys to do.
    """
    num_ranks, count = len(flow.own_s), len(flow.stage)
    num_phases = flow.stage[-1] + 2 if count else 1
    first = np.zeros(num_ranks + 1, np.int64)
    for target in flow.target:
        first[target + 1] += 1
    first = np.cumsum(first)
    mine, filled = np.zeros(count, np.int64), first.copy()
    for at in range(count):
        mine[filled[flow.target[at]]] = at
        filled[flow.target[at]] += 1
    work = np.zeros((num_ranks, num_phases))
    for rank in range(num_ranks):
        _fill(flow, mine[first[rank] : first[rank + 1]], work[rank], flow.own_s[rank])
    return work


@compiled
def _fill(flow: Flow, mine: Ints, work: Floats, own_s: float) -> None:
    """The phases of one rank, to which the transfers `mine` come."""
    total = own_s
    for at in mine:
        total += flow.work_s[at]
    here, done, part = 0, 0, 0.0  # arrived before this phase; computed whole, and of the next
    over = 0.0
    for phase in range(len(work)):
        share = max(total * (phase + 1) / len(work) - over, 0.0)
        while here < len(mine) and flow.stage[mine[here]] < phase:
            here += 1
        while done < here:
            left = flow.work_s[mine[done]] - part
            due = flow.stage[mine[done]] + flow.num_buffers - 1
            if work[phase] + left > share and phase < due and phase + 1 < len(work):
                taken = max(share - work[phase], 0.0)
                part += taken
                work[phase] += taken
                break
            work[phase] += left
            done, part = done + 1, 0.0
        filler = own_s if phase + 1 == len(work) else min(own_s, max(share - work[phase], 0.0))
        work[phase] += filler
        own_s -= filler
        over += work[phase]
