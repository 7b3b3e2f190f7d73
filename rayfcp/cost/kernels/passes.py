"""Finish times of ranks in a pass over the rounds of a layout."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner, inner_with_arrays
from rayfcp.cost.kernels.loops import argmax, first_at_least
from rayfcp.cost.layout import Pass, Rounds
from rayfcp.values.arrays import Floats


class Ports(NamedTuple):
    """Times in one phase. `here`, `first`, `last`: when each run begins it, when its first transfer starts, and when
    its last one ends. Queues (`_queue`) of the ports of each run, [inside or between nodes, run, 3], and of the uplink
    of each node, [out or in, node, 3]."""

    here: Floats
    first: Floats
    last: Floats
    sends: Floats
    receives: Floats
    uplinks: Floats


@compiled
def finish_s(rounds: Rounds, each: Pass, start: Floats, uplinks: Floats) -> Floats:
    """Finish times of ranks that start at `start`: their run exchanges heads, attends, and exchanges again. Transfers
    join the queues of `uplinks` (`Ports`), which passes before this one may have filled."""
    heads = rounds.heads
    here = each.latencies * rounds.exchange_s / 2
    for run in range(len(here)):
        ranks = start[run * heads : (run + 1) * heads]
        here[run] += ranks[argmax(ranks)]
    _attend(rounds, each, here, uplinks)
    done = np.empty(len(start))
    for rank in range(len(done)):
        done[rank] = here[rank // heads] + each.latencies * rounds.exchange_s[rank // heads] / 2
    return done


@inner_with_arrays
def _attend(rounds: Rounds, each: Pass, here: Floats, uplinks: Floats) -> None:
    """Advance `here`, when each run begins the rounds, to when it is through them."""
    num_runs, num_phases = rounds.work_s.shape
    latency_s = each.latencies * rounds.latency_s
    for phase in range(num_phases - 1 + max(each.hold, 1)):
        sends, receives = np.empty((2, num_runs, 3)), np.empty((2, num_runs, 3))
        for run in range(num_runs):
            sends[:, run] = receives[:, run] = here[run]
        ports = Ports(here, np.full(num_runs, np.inf), here.copy(), sends, receives, uplinks)
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
    """Transfers of all rounds of a phase: one starts when both of its runs are in the phase, and takes its place in the
    queues of both ports at once."""
    first = first_at_least(rounds.phase, len(rounds.phase), phase)
    last = first_at_least(rounds.phase, len(rounds.phase), phase + 1)
    for at in range(rounds.bounds[first], rounds.bounds[last]):
        source = rounds.target[at] if back else rounds.source[at]
        target = rounds.source[at] if back else rounds.target[at]
        link = rounds.across[at]
        here_s, moved_s = max(ports.here[source], ports.here[target]), share * rounds.moved_s[at]
        end = _queue(ports.sends[link, source], here_s, moved_s)
        end = max(end, _queue(ports.receives[link, target], here_s, moved_s))
        if rounds.uplink_s[at] > 0.0:
            through_s = share * rounds.uplink_s[at]
            end = max(end, _queue(ports.uplinks[0, rounds.node[source]], here_s, through_s))
            end = max(end, _queue(ports.uplinks[1, rounds.node[target]], here_s, through_s))
        for run in (source, target):
            ports.first[run] = min(ports.first[run], here_s)
            ports.last[run] = max(ports.last[run], end + latency_s)


@inner
def _queue(queue: Floats, begin: float, through_s: float) -> float:
    """End of a transfer that takes a port or uplink for `through_s` from `begin` on.

    `queue`: start and end of its last gap, and when it is free. Transfers are not visited in the order of their times:
    one that begins earlier than others before it takes the gap that these have left, if it fits.
    """
    start = max(queue[0], begin)
    if start + through_s <= queue[1]:
        queue[0] = start + through_s
        return float(queue[0])
    if begin > queue[2]:
        queue[0], queue[1], queue[2] = queue[2], begin, begin
    queue[2] += through_s
    return float(queue[2])
