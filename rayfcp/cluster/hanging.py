"""Who hangs in a step: what devices answer while it lasts, judged by a deadline learnt from steps before."""

from collections.abc import Iterable, Sequence

from rayfcp.cluster.losses import Diagnosis, Judge, Pulse
from rayfcp.cluster.runtime import Runtime
from rayfcp.elastic.hang import Sign, judge


def judge_progress(ids: Iterable[str], *, runtime: Runtime, deadline_s: float) -> Judge:
    """A judge of one step that is dispatched now to these devices: see `rayfcp.elastic.hang.judge`."""
    start_s = runtime.now_s()
    signs = {id: Sign.start(id, now_s=start_s) for id in ids}

    def judge_pulses(pulses: Sequence[Pulse]) -> Diagnosis:
        pulses = [each for each in pulses if each.is_busy]
        for pulse in pulses:
            beat = pulse.beat
            if beat is not None:
                signs[pulse.id] = signs[pulse.id].heard(
                    step=beat.step, num_done=beat.num_done, waiting=beat.waiting, now_s=pulse.heard_s
                )
        numbers = {pulse.id: pulse.number for pulse in pulses}
        verdict = judge([signs[id] for id in numbers], now_s=runtime.now_s(), deadline_s=deadline_s)
        return Diagnosis(hung=frozenset(numbers[id] for id in verdict.hung), stuck=verdict.stuck, reason=verdict.reason)

    return judge_pulses
