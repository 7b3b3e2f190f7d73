"""Paced rounds (`rayfcp.values.Pacing`): attention of each rank in each phase, and when each rank is done."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inlined, inner_with_arrays
from rayfcp.values.arrays import Floats, Ints
from rayfcp.values.plan import phase_share

_share = inlined(phase_share)


class Flow(NamedTuple):
    """Transfers in the order of their rounds: the i-th is in flight in phase `phase[i]`, takes `moved_s`, and brings
    its target `work_s` of attention, which is computed by phase `due[i]`; `own_s` is each rank's attention to its own
    keys."""

    phase: Ints
    source: Ints
    target: Ints
    moved_s: Floats
    work_s: Floats
    own_s: Floats
    due: Ints


@compiled
def finish_s(flow: Flow) -> Floats:
    """Seconds until each rank has computed, sent and received everything of a pass.

    A rank is through a phase when it has computed its part (`phases_of`) and its transfers of that phase have ended. A
    transfer starts when both ranks are in its phase and both ports are free.
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
        while at < len(flow.phase) and flow.phase[at] == phase:
            source, target = flow.source[at], flow.target[at]
            end = max(sends[source], receives[target]) + flow.moved_s[at]
            sends[source] = receives[target] = end
            ready[source], ready[target] = max(ready[source], end), max(ready[target], end)
            at += 1
        for rank in range(num_ranks):
            here[rank] = ready[rank]
    return here


@compiled
def phases_of(flow: Flow) -> Floats:
    """Attention of each rank in each phase, [rank, phase], as `Pacing` defines it.

    Ranks with about equal attention go through the rounds at one pace, and none waits for another that still has its
    own keys to attend to.
    """
    num_ranks, count = len(flow.own_s), len(flow.phase)
    num_phases = flow.phase[-1] + 2 if count else 1
    first = np.zeros(num_ranks + 1, np.int64)
    for target in flow.target:
        first[target + 1] += 1
    for rank in range(num_ranks):
        first[rank + 1] += first[rank]
    mine, filled = np.zeros(count, np.int64), first.copy()
    for at in range(count):
        mine[filled[flow.target[at]]] = at
        filled[flow.target[at]] += 1
    work = np.zeros((num_ranks, num_phases))
    for rank in range(num_ranks):
        _fill(flow, mine[first[rank] : first[rank + 1]], work[rank], flow.own_s[rank])
    return work


@inner_with_arrays
def _fill(flow: Flow, mine: Ints, work: Floats, own_s: float) -> None:
    """Fill `work` with the phases of one rank, which receives the transfers `mine`."""
    total = own_s
    for at in mine:
        total += flow.work_s[at]
    arrived, done, part = 0, 0, 0.0  # transfers before this phase; those computed whole, and part of the next
    computed = 0.0
    for phase in range(len(work)):
        share, last = _share(total, phase, len(work), computed), phase + 1 == len(work)
        while arrived < len(mine) and flow.phase[mine[arrived]] < phase:
            arrived += 1
        while done < arrived:
            left = flow.work_s[mine[done]] - part
            if work[phase] + left > share and phase < flow.due[mine[done]] and not last:
                taken = max(share - work[phase], 0.0)
                part += taken
                work[phase] += taken
                break
            work[phase] += left
            done, part = done + 1, 0.0
        filler = own_s if last else min(own_s, max(share - work[phase], 0.0))
        work[phase] += filler
        own_s -= filler
        computed += work[phase]
