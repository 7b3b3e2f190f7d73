"""Forward passes as early as memory has room for what they keep."""

import numpy as np
import numpy.typing as npt

from rayfcp.plan.compiled import compiled, inner

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
