"""Whether the devices of a step still move: what they answer, judged while their calls are pending."""

import time
from collections.abc import Sequence

from rayfcp.cluster.losses import Pulse
from rayfcp.elastic.hang import Signs, Verdict, judge


class StepWatch:
    """Asked by `Crew.gather` about the devices that have not reported `step`."""

    def __init__(self, ids: Sequence[str], *, step: int, deadline_s: float) -> None:
        self._ids, self._step, self._deadline_s = tuple(ids), step, deadline_s
        self._signs = Signs.start(ids, now_s=time.monotonic())

    def __call__(self, pulses: Sequence[Pulse]) -> Verdict:
        """The verdict on those that `pulses` are of, by device number in their names' place."""
        now_s = time.monotonic()
        pending = {self._ids[pulse.number] for pulse in pulses}
        signs = self._signs.without([each for each in self._ids if each not in pending])
        for pulse in pulses:
            if pulse.beat is not None:
                signs = signs.heard(
                    self._ids[pulse.number],
                    step=pulse.beat.step,
                    num_done=pulse.beat.num_done,
                    waiting=pulse.beat.waiting,
                    now_s=now_s - pulse.silent_s,
                )
        self._signs = signs
        return judge(signs.signs, now_s=now_s, deadline_s=self._deadline_s)
