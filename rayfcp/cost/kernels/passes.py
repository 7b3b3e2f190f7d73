"""Finish times of ranks in a pass over the rounds of a layout."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner, inner_with_arrays
from rayfcp.cost.kernels.loops import argmax, first_at_least
from rayfcp.cost.layout import Pass, Rounds
from rayfcp.values.arrays import Floats


class Ports(NamedTuple):
    """Times in one phase: when the ports of each run, [inside or between nodes, run], are free, when its first transfer
    starts and its last one ends."""

    sends: Floats
    receives: Floats
    first: Floats
    last: Floats


@compiled
def finish_s(rounds: Rounds, each: Pass, start: Floats) -> Floats:
    """Finish times of ranks that start at `start`: their run exchanges heads, attends, and exchanges again."""
    heads = rounds.heads
    here = each.latencies * rounds.exchange_s / 2
    for run in range(len(here)):
        ranks = start[run * heads : (run + 1) * heads]
        here[run] += ranks[argmax(ranks)]
    _attend(rounds, each, here)
    done = np.empty(len(start))
    for rank in range(len(done)):
        done[rank] = here[rank // heads] + each.latencies * rounds.exchange_s[rank // heads] / 2
    return done


@inner_with_arrays
def _attend(rounds: Rounds, each: Pass, here: Floats) -> None:
    """Advance `here`, when each run begins the rounds, to when it is through them."""
    num_runs, num_phases = rounds.work_s.shape
    latency_s = each.latencies * rounds.latency_s
    for phase in range(num_phases - 1 + max(each.hold, 1)):
        ports = Ports(np.empty((2, num_runs)), np.empty((2, num_runs)), np.full(num_runs, np.inf), here.copy())
        for run in range(num_runs):
            for link in range(2):
                ports.sends[link, run] = ports.receives[link, run] = here[run]
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
    """Transfers of all rounds of a phase, each a matching: one starts when both its ports are free."""
    first = first_at_least(rounds.phase, len(rounds.phase), phase)
    last = first_at_least(rounds.phase, len(rounds.phase), phase + 1)
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
