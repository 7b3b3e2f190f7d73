"""Passes of all stages, event by event: when each ends, forward passes as early as memory permits, and a local search
over the order of microbatches.

Orders name the forward pass of microbatch m as m, its backward pass as -1 - m.
"""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.kernels.recompute import peak_bytes
from rayfcp.values.arrays import Floats, Ints

SLACK = 1e-9
"""Relative: less is no improvement, but rounding."""


@compiled
def finish_s(order: Ints, forward_s: Floats, backward_s: Floats, transfer_s: Floats, ends: Floats) -> bool:
    """Fill `ends[way, stage, microbatch]` with the end of each pass, way 0 forward, 1 backward; false on a deadlock.

    A pass begins when its stage has finished the pass before and its input has arrived from the neighbour: a
    neighbour sends as soon as it has computed, and each way between two stages carries one microbatch at a time.
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
def eager_leads(least: Ints, most: Ints, backward: Ints, held: StageBytes, layers: Ints) -> Ints:
    """Forward passes of each stage before each of its backward passes: between `least` and `most`, both [stage, i] and
    rising, no stage fewer than the next one, as many as memory permits beside those that must come.

    `backward[i]`: microbatch of the i-th backward pass; `layers[stage, m]`: recomputed.
    """
    num_stages, count = least.shape
    leads = least.copy()
    base, work = np.empty(count), np.empty(count)
    for stage in range(num_stages):
        kept = held.kept[stage] - layers[stage] * held.freed
        _slots(least[stage], backward, held, stage, layers[stage], kept, base, work)
        done = 0
        for at in range(count):
            done = max(done, least[stage, at])
            limit = most[stage, at]
            if stage > 0 and leads[stage - 1, at] < count:
                limit = min(limit, leads[stage - 1, at] - 1)
            while done < limit and _fits(
                least[stage], at, done, kept[done], held.working[done], base, work, held.budget[stage]
            ):
                slot = at
                while slot < count and least[stage, slot] <= done:
                    base[slot] += kept[done]
                    slot += 1
                work[at] = max(work[at], held.working[done])
                done += 1
            leads[stage, at] = done
    _avoid_deadlock(leads)
    return leads


@inner
def _avoid_deadlock(leads: Ints) -> None:
    """Lower the leads by which stages could wait for each other, where transfers of one direction complete in order on
    both sides: a stage takes the next microbatch when its successor has taken the one before, and goes on with
    backward when its predecessor has taken the last gradient. So before its i-th backward pass a stage between others
    has at most one forward pass more than its successor has before its backward pass i + 1. The first stage takes no
    microbatches, the last one no gradients."""
    num_stages, count = leads.shape
    for stage in range(num_stages - 3, 0, -1):
        for at in range(count - 1):
            leads[stage, at] = min(leads[stage, at], leads[stage + 1, at + 1] + 1)


@inner
def _slots(
    least: Ints,
    backward: Ints,
    held: StageBytes,
    stage: int,
    layers: Ints,
    kept: Floats,
    base: Floats,
    work: Floats,
) -> None:
    """The most bytes that are kept (`base`), and the largest working set, from one backward pass to the end of the
    next."""
    now, done = 0.0, 0
    for at in range(len(backward)):
        m = backward[at]
        work[at] = held.working[m]
        if layers[m] >= held.layers[stage]:
            work[at] += held.again[m]
        while done < least[at]:
            now += kept[done]
            work[at] = max(work[at], held.working[done])
            done += 1
        now += held.layers[stage] * held.begun[m]
        base[at] = now
        now -= kept[m] + held.layers[stage] * held.summed[m]


@inner
def _fits(least: Ints, at: int, m: int, kept: float, working: float, base: Floats, work: Floats, budget: float) -> bool:
    """Microbatch m may be kept from the slot of backward pass `at` on, up to the slot in which it must come."""
    if base[at] + kept + max(work[at], working) > budget:
        return False
    slot = at + 1
    while slot < len(least) and least[slot] <= m:
        if base[slot] + kept + work[slot] > budget:
            return False
        slot += 1
    return True


class Timed(NamedTuple):
    """Seconds of passes by [stage, microbatch]; `gathering_s` of a forward pass that comes first, `reducing_s` of a
    backward pass that comes last; of a hop, by microbatch."""

    forward_s: Floats
    gathering_s: Floats
    backward_s: Floats
    reducing_s: Floats
    transfer_s: Floats


@compiled
def makespan_s(order: Ints, timed: Timed, turns: Ints) -> float:
    """Seconds of the pipeline in which microbatch `turns[i]` is the i-th; infinite on a deadlock."""
    forward, backward = timed.forward_s[:, turns], timed.backward_s[:, turns]
    for stage in range(len(forward)):
        forward[stage, 0] = timed.gathering_s[stage, turns[0]]
        backward[stage, -1] = timed.reducing_s[stage, turns[-1]]
    ends = np.empty((2, *forward.shape))
    if not finish_s(order, forward, backward, timed.transfer_s[turns], ends):
        return np.inf
    last_s = 0.0
    for stage in range(len(forward)):
        for m in range(len(turns)):
            last_s = max(last_s, ends[0, stage, m], ends[1, stage, m])
    return last_s


@compiled
def in_turns(held: StageBytes, turns: Ints) -> StageBytes:
    """Columns in the order in which microbatches pass."""
    return StageBytes(
        held.kept[:, turns],
        held.freed[turns],
        held.working[turns],
        held.again[turns],
        held.summed[turns],
        held.begun[turns],
        held.layers,
        held.budget,
    )


@compiled
def reorder(order: Ints, timed: Timed, held: StageBytes, recomputed: Ints, turns: Ints, max_trials: int) -> float:
    """Take a microbatch out and insert it elsewhere, as long as that makes the pipeline shorter and memory permits, in
    place; return the makespan. `recomputed[stage, microbatch]` layers."""
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
                if (
                    seconds < best_s * (1 - SLACK)
                    and (peak_bytes(order, in_turns(held, turns), recomputed[:, turns]) <= held.budget).all()
                ):
                    best_s, better = seconds, True
                else:
                    _move(turns, target, source)
    return best_s


@inner
def _move(turns: Ints, source: int, target: int) -> None:
    moved, step = turns[source], 1 if source < target else -1
    at = source
    while at != target:
        turns[at] = turns[at + step]
        at += step
    turns[target] = moved
