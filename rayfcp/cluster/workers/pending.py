"""Workers for missing devices: requested, started and opened while the others train."""

import logging
from collections.abc import Sequence

from rayfcp.cluster.recovery.losses import WorkerFailedError, value_of
from rayfcp.cluster.workers.lifetime import DEVICE, actor_name
from rayfcp.cluster.workers.members import Launched, Member, WorkerStart
from rayfcp.cluster.workers.placement import bundle, reserve_device
from rayfcp.config import ConfigError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after workers that could not open; it doubles from the first to the longest."""


class PendingWorkers:
    """One pending worker per missing device; it starts and opens once there is a device for it.

    Args:
        autoscale: request what the whole run needs from the autoscaler.
    """

    def __init__(self, start: WorkerStart, *, autoscale: bool = True) -> None:
        self._start, self._runtime, self._autoscale = start, start.runtime, autoscale
        self._pending: list[Launched] = []
        self._wanted = self._requested = 0
        self._failures, self._again_s = 0, 0.0
        self._with_device: set[str] = set()
        self._looked_s = start.runtime.now_s()

    @property
    def requested_s(self) -> tuple[float, ...]:
        """Time of each pending request, on `Runtime.now_s`."""
        return tuple(each.requested_s for each in self._pending)

    def want(self, missing: int, *, in_use: int) -> None:
        """Keep `missing` workers pending beside the devices in use; surplus ones are given up, the latest first."""
        self._wanted = missing
        while len(self._pending) > missing:
            self._give_up(self._pending.pop())
        self._autoscale_to(missing + in_use if missing else 0)
        self._launch()

    def ready(self) -> list[Member]:
        """Workers that opened since the last call, which are not missing any more. Those that could not open, or have
        not opened `elastic.start_timeout_s` after their device was granted, are requested anew after a pause. Never
        waits.

        Raises:
            ConfigError: a worker says that the configuration cannot run where it is.
        """
        members = []
        for each in self._ended():
            self._pending.remove(each)
            try:
                members.append(each.opened(value_of(self._runtime, each.opening, name=f"worker {each.id}")))
            except WorkerFailedError as error:
                self._failed(each, error)
            except ConfigError:
                self._give_up(each)
                raise
        for each in self._late():
            self._pending.remove(each)
            self._failed(each, "it did not open within elastic.start_timeout_s")
        if members:
            self._failures = 0
        self._wanted -= len(members)
        self._launch()
        return members

    def end(self) -> None:
        """Give up all pending workers and withdraw the request to the autoscaler."""
        self.want(0, in_use=0)

    def _ended(self) -> Sequence[Launched]:
        by_ref = {each.opening: each for each in self._pending}
        return [by_ref[ref] for ref in self._runtime.wait_all(list(by_ref), timeout_s=0)]

    def _late(self) -> list[Launched]:
        """Workers that had their device one `elastic.start_timeout_s` ago. Polls once in that time, since each poll
        asks the whole cluster."""
        now_s = self._runtime.now_s()
        if not self._pending or now_s - self._looked_s < self._start.config.elastic.start_timeout_s:
            return []
        self._looked_s = now_s
        prefix = actor_name(self._start.run_key, DEVICE, id="")
        granted = self._runtime.reservations(prefix, granted=True).keys()
        with_device = {each.id for each in self._pending if self._runtime.key(each.group) in granted}
        late = [each for each in self._pending if each.id in with_device & self._with_device]
        self._with_device = with_device
        return late

    def _failed(self, launched: Launched, why: object) -> None:
        logger.warning("a new worker could not start: %s", why)
        self._give_up(launched)
        self._failures += 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (self._failures - 1), LONGEST_PAUSE_S)
        self._again_s = self._runtime.now_s() + pause_s

    def _launch(self) -> None:
        if self._runtime.now_s() < self._again_s:
            return
        while len(self._pending) < self._wanted:
            start = self._start
            group = reserve_device(start.config, runtime=self._runtime, device=start.device, run_key=start.run_key)
            self._pending.append(start.launch(group))

    def _give_up(self, launched: Launched) -> None:
        self._start.let_go(launched.id)
        self._start.end(launched)

    def _autoscale_to(self, devices: int) -> None:
        """The autoscaler takes a request for the whole cluster, so devices in use count as well."""
        if not self._autoscale or self._requested == devices:
            return
        self._requested = devices
        one = bundle(self._start.device, threads=self._start.config.train.threads_per_worker)
        self._runtime.request(one, count=devices)
