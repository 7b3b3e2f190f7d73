"""Whether the devices of a step still move: what they answer, judged while their calls are pending."""

import time
from collections.abc import Sequence

from rayfcp.cluster.losses import Diagnosis, Pulse
from rayfcp.elastic.hang import Signs, judge


class StepWatch:
    """Asked by `Crew.gather` about the devices that have not reported the step."""

    def __init__(self, ids: Sequence[str], *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._signs = Signs.start(ids, now_s=time.monotonic())

    def __call__(self, pulses: Sequence[Pulse]) -> Diagnosis:
        now_s = time.monotonic()
        number_of = {pulse.id: pulse.number for pulse in pulses}
        signs = self._signs.without([sign.id for sign in self._signs.signs if sign.id not in number_of])
        for pulse in pulses:
            if pulse.beat is not None:
                signs = signs.heard(
                    pulse.id,
                    step=pulse.beat.step,
                    num_done=pulse.beat.num_done,
                    waiting=pulse.beat.waiting,
                    now_s=pulse.heard_s,
                )
        self._signs = signs
        verdict = judge(signs.signs, now_s=now_s, deadline_s=self._deadline_s)
        hung = frozenset(number_of[each] for each in verdict.hung)
        return Diagnosis(hung=hung, stuck=verdict.stuck, reason=verdict.reason)
