"""How often the state is copied: as configured, or by measured costs and losses (`rayfcp.elastic.intervals`)."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import Literal

from rayfcp.elastic.facts import Cause, Failure
from rayfcp.elastic.intervals import CopyCosts, Intervals, Loses, LossRates, choose, lost_per_hour
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values.counted import counted
from rayfcp.values.devices import AUTO

FIRST, REMEMBERED = 3, 16
"""Steps after which intervals are chosen first, and then each time, from that many last ones."""

TOLD_RATIO = 2.0
"""Change of an interval that the user is told of, as of the first choice."""


class CopyIntervals:
    """Steps between copies. `now`: the intervals that hold; `sends`: whether nodes send copies to others; `send_s`:
    seconds that it took to send the last state.

    Args:
        every: `elastic.snapshot_every_steps`.
    """

    def __init__(
        self, every: int | Literal["auto"], *, is_host: bool, metrics: MetricsExporter, log: Callable[[str], None]
    ) -> None:
        self._every, self._is_host, self._metrics, self._log = every, is_host, metrics, log
        self.sends, self.send_s = False, 0.0
        self._step_s, self._copy_s = deque[float](maxlen=REMEMBERED), deque[float](maxlen=REMEMBERED)
        self._rates, self._num_steps = LossRates(), 0
        self.now = self._fixed()

    @property
    def is_on(self) -> bool:
        return self._every != 0

    def after_loss(self, failure: Failure) -> None:
        for _ in failure.lost:
            self._rates = self._rates.after(lost=Loses.NODE if failure.cause is Cause.NODE else Loses.PROCESS)

    def after_step(self, *, num_devices: int, step_s: float, copy_s: float) -> None:
        """Remember a step; now and then, choose the intervals anew."""
        self._num_steps += 1
        self._rates = self._rates.after(device_hours=num_devices * step_s / 3600)
        self._step_s.append(step_s)
        if copy_s > 0:  # not all steps copy
            self._copy_s.append(copy_s)
        if self._num_steps == FIRST or self._num_steps % REMEMBERED == 0:
            if self._every == AUTO:
                self._choose(num_devices)
            else:
                self.now = self._fixed()

    def show(self) -> None:
        """Set the metrics."""
        self._metrics.set("snapshot_interval_steps", self.now.here if self.is_on else 0)
        self._metrics.set("snapshot_away_interval_steps", self.now.away if self.is_on and self.sends else 0)

    def _fixed(self) -> Intervals:
        """Return the configured intervals; when copies are sent depends on measured times."""
        every, step_s = 1 if self._every == AUTO else int(self._every), statistics.median(self._step_s or [1.0])
        return Intervals.fixed(every, away_s=self.send_s, step_s=step_s, is_host=self._is_host)

    def _choose(self, num_devices: int) -> None:
        costs = CopyCosts(
            step_s=statistics.median(self._step_s),
            here_s=statistics.median(self._copy_s or [0.0]),
            away_s=self.send_s if self.sends else None,
        )
        before, self.now = self.now, choose(costs, self._rates, num_devices=num_devices)
        lost_s = lost_per_hour(costs, self._rates, intervals=self.now, num_devices=num_devices)
        self._metrics.set("expected_lost_seconds_per_hour", lost_s)
        self.show()
        ratios = [self.now.here / before.here, self.now.away / before.away if self.sends else 1.0]
        if self._num_steps == FIRST or max(ratios) >= TOLD_RATIO or min(ratios) <= 1 / TOLD_RATIO:
            away = f", every {counted(self.now.away, 'step')} to other nodes" if self.sends else ""
            self._log(
                f"the state is copied every {counted(self.now.here, 'step')}{away}: {self.now.reason}; "
                f"{lost_s:.1f} s an hour are expected to be lost"
            )
