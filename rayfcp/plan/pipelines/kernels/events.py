"""Passes of all stages, event by event. Orders name forward of microbatch m as m, its backward as -1 - m."""

import numpy as np
import numpy.typing as npt

from rayfcp.plan.compiled import compiled

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
