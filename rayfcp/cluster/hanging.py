"""Who hangs in a step: what devices answer while it lasts, judged by a deadline learnt from steps before."""

import time
from collections.abc import Iterable, Sequence

from rayfcp.cluster.losses import Diagnosis, Judge, Pulse
from rayfcp.elastic.hang import Signs, judge


def judge_progress(ids: Iterable[str], *, deadline_s: float) -> Judge:
    """A judge of one step that is dispatched now to these devices: see `rayfcp.elastic.hang.judge`."""
    signs = Signs.start(ids, now_s=time.monotonic())
    heard: dict[str, float] = {}

    def judge_pulses(pulses: Sequence[Pulse]) -> Diagnosis:
        nonlocal signs
        for pulse in pulses:
            beat = pulse.beat
            if beat is not None and pulse.heard_s > heard.get(pulse.id, 0.0):
                heard[pulse.id] = pulse.heard_s
                signs = signs.heard(
                    pulse.id, step=beat.step, num_done=beat.num_done, waiting=beat.waiting, now_s=pulse.heard_s
                )
        numbers = {pulse.id: pulse.number for pulse in pulses}
        pending = [sign for sign in signs.signs if sign.id in numbers]
        verdict = judge(pending, now_s=time.monotonic(), deadline_s=deadline_s)
        return Diagnosis(hung=frozenset(numbers[id] for id in verdict.hung), stuck=verdict.stuck, reason=verdict.reason)

    return judge_pulses
