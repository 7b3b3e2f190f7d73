"""Local search over the order in which microbatches pass a pipeline."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.compiled import compiled
from rayfcp.plan.pipelines.kernels.events import Floats, Ints, finish_s, peak_bytes

SLACK = 1e-9  # relative: less is no improvement


class Timed(NamedTuple):
    """Seconds of passes by [stage, microbatch]; `gathering_s` of a forward pass that comes first, `reducing_s` of a
    backward pass that comes last; of a hop, by microbatch."""

    forward_s: Floats
    gathering_s: Floats
    backward_s: Floats
    reducing_s: Floats
    transfer_s: Floats


class Held(NamedTuple):
    """Bytes by [stage, microbatch], as `peak_bytes` has them; `room` by stage."""

    kept: Floats
    working: Floats
    again: Floats
    room: Floats


@compiled
def makespan_s(order: Ints, timed: Timed, turns: Ints) -> float:
    """Microbatch `turns[i]` is the i-th that passes; infinite if stages wait for each other."""
    forward, backward = timed.forward_s[:, turns], timed.backward_s[:, turns]
    forward[:, 0] = timed.gathering_s[:, turns[0]]
    backward[:, -1] = timed.reducing_s[:, turns[-1]]
    ends = np.empty((2, *forward.shape))
    if not finish_s(order, forward, backward, timed.transfer_s[turns], ends):
        return np.inf
    return float(ends.max())


@compiled
def fits(order: Ints, held: Held, turns: Ints) -> bool:
    """Whether every stage keeps to its room."""
    peaks, none = np.zeros(len(held.room)), np.zeros_like(held.kept)
    peak_bytes(order, held.kept[:, turns], held.working[:, turns], held.again[:, turns], none, none, peaks)
    return bool((peaks <= held.room).all())


@compiled
def reorder(order: Ints, timed: Timed, held: Held, turns: Ints, max_trials: int) -> float:
    """Take a microbatch out and put it in elsewhere, as long as that makes the pipeline shorter and memory permits;
    `turns` is changed. Returns the makespan."""
    count, trials = len(turns), 0
    best_s = makespan_s(order, timed, turns)
    better = True
    while better:
        better = False
        for source in range(count):
            for target in range(count):
                if source == target:
                    continue
                if trials == max_trials:
                    return best_s
                trials += 1
                _move(turns, source, target)
                seconds = makespan_s(order, timed, turns)
                if seconds < best_s * (1 - SLACK) and fits(order, held, turns):
                    best_s, better = seconds, True
                else:
                    _move(turns, target, source)
    return best_s


@compiled
def _move(turns: Ints, source: int, target: int) -> None:
    moved, step = turns[source], 1 if source < target else -1
    at = source
    while at != target:
        turns[at] = turns[at + step]
        at += step
    turns[target] = moved
