"""When each rank has computed, sent and received all that a pass over the rounds of a layout asks of it."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.costs.layout_rounds import Pass, Rounds
from rayfcp.plan.costs.layout_work import Loads


class Ports(NamedTuple):
    """Of each rank in one phase: when its ports, [inside or between nodes, rank], are free, when the first transfer
    starts and the last one ends."""

    sends: Loads
    receives: Loads
    first: Loads
    last: Loads


@compiled
def finish_s(rounds: Rounds, each: Pass, start: Loads) -> Loads:
    """When each rank, which starts at `start`, has finished."""
    num_ranks, num_phases = rounds.work_s.shape
    here = start.copy()
    for phase in range(num_phases - 1 + max(each.hold, 1)):
        ports = Ports(np.empty((2, num_ranks)), np.empty((2, num_ranks)), np.full(num_ranks, np.inf), here.copy())
        ports.sends[:] = here
        ports.receives[:] = here
        _fly(rounds, ports, phase, each.keys, each.latency_s, False)
        if each.gradients > 0.0:
            _fly(rounds, ports, phase - each.hold, each.gradients, each.latency_s, True)
        for rank in range(num_ranks):
            computed = here[rank]
            if phase < num_phases:
                computed += each.attention * rounds.work_s[rank, phase]
            beside = max(min(computed, ports.last[rank]) - ports.first[rank], 0.0)
            here[rank] = max(computed, ports.last[rank]) + (1.0 - rounds.overlap) * beside
    return here


@inner
def _fly(rounds: Rounds, ports: Ports, phase: int, share: float, latency_s: float, back: bool) -> None:
    """All rounds of a phase, each a matching: a transfer starts when both its ports are free."""
    first = np.searchsorted(rounds.stage, phase)
    last = np.searchsorted(rounds.stage, phase, side="right")
    for at in range(rounds.bounds[first], rounds.bounds[last]):
        source = rounds.target[at] if back else rounds.source[at]
        target = rounds.source[at] if back else rounds.target[at]
        link = rounds.across[at]
        begin = max(ports.sends[link, source], ports.receives[link, target])
        end = begin + share * rounds.moved_s[at]
        ports.sends[link, source] = end
        ports.receives[link, target] = end
        for rank in (source, target):
            ports.first[rank] = min(ports.first[rank], begin)
            ports.last[rank] = max(ports.last[rank], end + latency_s)
