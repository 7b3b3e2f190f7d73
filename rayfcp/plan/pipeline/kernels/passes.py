"""Passes of all stages, event by event. Orders name forward of microbatch m as m, its backward as -1 - m.

Forward passes as early as memory has room for what they keep.

Local search over the order in which microbatches pass a pipeline.
"""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.values.arrays import Floats, Ints


@compiled
def finish_s(order: Ints, forward_s: Floats, backward_s: Floats, transfer_s: Floats, ends: Floats) -> bool:
    """Fills `ends[way, stage, microbatch]` with when each pass ends, way 0 forward, 1 backward.

    A pass begins when its stage is done with the pass before and what it needs has come from the neighbour: a
    neighbour sends as soon as it has computed, and each way between two stages carries one microbatch at a time.
    False if stages wait for each other.
    """
    num_stages, num_passes = order.shape
    count = num_passes // 2
    ends[:] = -1.0
    came = np.full((2, num_stages, count), -1.0)
    came[0, 0] = 0.0
    came[1, num_stages - 1] = 0.0
    free, at = np.zeros(num_stages), np.zeros(num_stages, np.int64)
    wire = np.zeros((2, num_stages))
    left, moved = num_stages * num_passes, True
    while left and moved:
        moved = False
        for turn in range(2 * num_stages):
            stage = turn if turn < num_stages else 2 * num_stages - 1 - turn
            while at[stage] < num_passes:
                code = order[stage, at[stage]]
                way = 0 if code >= 0 else 1
                m = code if code >= 0 else -1 - code
                if came[way, stage, m] < 0.0 or (way == 1 and ends[0, stage, m] < 0.0):
                    break
                spent = forward_s[stage, m] if way == 0 else backward_s[stage, m]
                free[stage] = max(free[stage], came[way, stage, m]) + spent
                ends[way, stage, m] = free[stage]
                to = stage + 1 if way == 0 else stage - 1
                if 0 <= to < num_stages:
                    wire[way, stage] = max(wire[way, stage], free[stage]) + transfer_s[m]
                    came[way, to, m] = wire[way, stage]
                at[stage] += 1
                left -= 1
                moved = True
    done: bool = left == 0
    return done


@compiled
def peak_bytes(
    order: Ints, kept: Floats, working: Floats, whole: Floats, summed: Floats, begun: Floats, peaks: Floats
) -> None:
    """Fills `peaks[stage]` with the most bytes at a time.

    `kept[stage, m]` from forward to the end of backward; `working[stage, m]` during either; `whole[stage, m]`, what is
    recomputed at a time, during backward; `begun[stage, m]` from backward of m on, `summed[stage, m]` up to its end.
    """
    num_stages, num_passes = order.shape
    for stage in range(num_stages):
        held, most = 0.0, 0.0
        for at in range(num_passes):
            code = order[stage, at]
            m = code if code >= 0 else -1 - code
            if code >= 0:
                held += kept[stage, m]
                most = max(most, held + working[stage, m])
            else:
                held += begun[stage, m]
                most = max(most, held + working[stage, m] + whole[stage, m])
                held -= kept[stage, m] + summed[stage, m]
        peaks[stage] = most


@compiled
def eager_leads(
    least: Ints,
    most: Ints,
    backward: Ints,
    kept: Floats,
    working: Floats,
    whole: Floats,
    begun: Floats,
    summed: Floats,
    room: Floats,
) -> Ints:
    """Forward passes of each stage before each of its backward passes: between `least` and `most`, both [stage, i] and
    rising, no stage fewer than the next one, as many as its room permits beside those that must come.

    `backward[i]`: microbatch of the i-th backward pass. By [stage, m]: `kept`, `working`, `whole` (in backward),
    `begun`, `summed` as in `peak_bytes`.
    """
    num_stages, count = least.shape
    leads = least.copy()
    held, work = np.empty(count), np.empty(count)
    for stage in range(num_stages):
        _slots(
            least[stage], backward, kept[stage], working[stage], whole[stage], begun[stage], summed[stage], held, work
        )
        done = 0
        for at in range(count):
            done = max(done, least[stage, at])
            limit = most[stage, at]
            if stage > 0 and leads[stage - 1, at] < count:
                limit = min(limit, leads[stage - 1, at] - 1)
            while done < limit and _fits(
                least[stage], at, done, kept[stage, done], working[stage, done], held, work, room[stage]
            ):
                slot = at
                while slot < count and least[stage, slot] <= done:
                    held[slot] += kept[stage, done]
                    slot += 1
                work[at] = max(work[at], working[stage, done])
                done += 1
            leads[stage, at] = done
    _meet(leads)
    return leads


@inner
def _meet(leads: Ints) -> None:
    """Lower what stages could wait for each other for ever by, where hand-overs of one flow complete in order on both
    sides: a stage takes the next microbatch when its successor has taken the one before, and goes on with backward
    when its predecessor has taken the last gradient. So before its i-th backward pass a stage between others has at
    most one forward pass more than its successor has before its backward pass i + 1. The first stage takes no
    microbatches, the last one no gradients."""
    num_stages, count = leads.shape
    for stage in range(num_stages - 3, 0, -1):
        for at in range(count - 1):
            leads[stage, at] = min(leads[stage, at], leads[stage + 1, at + 1] + 1)


@inner
def _slots(
    least: Ints,
    backward: Ints,
    kept: Floats,
    working: Floats,
    whole: Floats,
    begun: Floats,
    summed: Floats,
    held: Floats,
    work: Floats,
) -> None:
    """The most that is held, and the most that is worked with, from one backward pass to the end of the next one."""
    now, done = 0.0, 0
    for at in range(len(backward)):
        m = backward[at]
        work[at] = working[m] + whole[m]
        while done < least[at]:
            now += kept[done]
            work[at] = max(work[at], working[done])
            done += 1
        now += begun[m]
        held[at] = now
        now -= kept[m] + summed[m]


@inner
def _fits(least: Ints, at: int, m: int, kept: float, working: float, held: Floats, work: Floats, room: float) -> bool:
    """Microbatch m may be kept from the slot of backward pass `at` on, up to the slot in which it must come."""
    if held[at] + kept + max(work[at], working) > room:
        return False
    slot = at + 1
    while slot < len(least) and least[slot] <= m:
        if held[slot] + kept + work[slot] > room:
            return False
        slot += 1
    return True


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
