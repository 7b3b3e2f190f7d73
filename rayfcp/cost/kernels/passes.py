"""When each rank has computed, sent and received all that a pass over the rounds of a layout asks of it."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.cost.work import Loads, Pass, Rounds


class Ports(NamedTuple):
    """Of each run in one phase: when its ports, [inside or between nodes, run], are free, when the first transfer
    starts and the last one ends."""

    sends: Loads
    receives: Loads
    first: Loads
    last: Loads


@compiled
def finish_s(rounds: Rounds, each: Pass, start: Loads) -> Loads:
    """When each rank, which starts at `start`, has finished: its run exchanges, attends, and exchanges again."""
    heads = rounds.heads
    here = each.latencies * rounds.exchange_s / 2
    for run in range(len(here)):
        here[run] += start[run * heads : (run + 1) * heads].max()
    _attend(rounds, each, here)
    return np.repeat(here + each.latencies * rounds.exchange_s / 2, heads)


@compiled
def _attend(rounds: Rounds, each: Pass, here: Loads) -> None:
    """`here`: when each run begins the rounds; then, when it is through them."""
    num_runs, num_phases = rounds.work_s.shape
    latency_s = each.latencies * rounds.latency_s
    for phase in range(num_phases - 1 + max(each.hold, 1)):
        ports = Ports(np.empty((2, num_runs)), np.empty((2, num_runs)), np.full(num_runs, np.inf), here.copy())
        ports.sends[:] = here
        ports.receives[:] = here
        _fly(rounds, ports, phase, each.keys, latency_s, False)
        if each.gradients > 0.0:
            _fly(rounds, ports, phase - each.hold, each.gradients, latency_s, True)
        for run in range(num_runs):
            computed = here[run]
            if phase < num_phases:
                computed += each.attention * rounds.work_s[run, phase]
            beside = max(min(computed, ports.last[run]) - ports.first[run], 0.0)
            here[run] = max(computed, ports.last[run]) + (1.0 - rounds.overlap) * beside


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
        for run in (source, target):
            ports.first[run] = min(ports.first[run], begin)
            ports.last[run] = max(ports.last[run], end + latency_s)
