"""The workers of a run as one: started, joined, told the same, heard, ended."""

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from rayfcp.cluster.facts import DeviceFacts
from rayfcp.cluster.layout import device_names
from rayfcp.cluster.placement import options_for, release, reserve
from rayfcp.cluster.worker import RankWorker
from rayfcp.config import Config, ConfigError
from rayfcp.values import ClusterSpec, InfeasiblePlanError

logger = logging.getLogger(__name__)


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Without terminal colours."""
    return _COLOURS.sub("", text)


class WorkerFailedError(RuntimeError):
    """A worker raised or died; the message names the device and holds the worker's own traceback or reason."""


class Crew:
    """Worker actors in the order of their devices: those of one node are neighbours."""

    def __init__(
        self, workers: Sequence[Any], groups: Sequence[PlacementGroup], *, facts: Sequence[DeviceFacts]
    ) -> None:
        self.workers, self._groups, self.facts = list(workers), list(groups), list(facts)
        self._names = [f"rank {number}" for number in range(len(self.workers))]
        self._waiting: list[Any] = []
        self.waited_s = 0.0
        """Seconds spent waiting for workers, in total."""

    @classmethod
    def start(
        cls, config: Config, *, device: str, data_dir: str, vocab_size: int, stopped: Callable[[], bool]
    ) -> "Crew":
        """One actor per reserved device.

        Raises:
            CapacityError: too few devices.
            WorkerFailedError: a worker cannot start.
        """
        groups = reserve(config, device=device, stopped=stopped)
        actor = ray.remote(RankWorker)
        chosen = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": device})})
        workers = [
            actor.options(**options_for(group, device=device, threads=config.train.threads_per_worker)).remote(
                chosen, data_dir, vocab_size=vocab_size
            )
            for group in groups
        ]
        crew = cls(workers, groups, facts=())
        try:
            facts: list[DeviceFacts] = crew.each(lambda _, worker: worker.open.remote())
        except BaseException:
            crew.end()
            raise
        order = sorted(range(len(workers)), key=lambda index: (facts[index].node_id, index))
        return cls([workers[i] for i in order], [groups[i] for i in order], facts=[facts[i] for i in order])

    def __len__(self) -> int:
        return len(self.workers)

    def use(self, cluster: ClusterSpec) -> int:
        """Go on with the devices of the cluster; how many others stand by: they are told nothing and end with these."""
        self._names = device_names(cluster)
        self._waiting = self.workers[cluster.num_devices :]
        self.workers, self.facts = self.workers[: cluster.num_devices], self.facts[: cluster.num_devices]
        return len(self._waiting)

    def each(self, call: Callable[[int, Any], Any]) -> list[Any]:
        """`call(number, worker)` gives a reference for every device; their values in order.

        Raises:
            WorkerFailedError: names the device and the cause.
        """
        return self.gather([call(number, worker) for number, worker in enumerate(self.workers)])

    def gather(self, refs: Sequence[Any]) -> list[Any]:
        """Values of one reference per device. The first that failed is raised at once, while others may
        still wait for it.

        Raises:
            ConfigError, InfeasiblePlanError: raised by a worker as they are.
            WorkerFailedError: any other failure; names the device and the cause.
        """
        number_of = {ref: number for number, ref in enumerate(refs)}
        waiting, values = list(refs), [None] * len(refs)
        while waiting:
            start_s = time.perf_counter()
            done, waiting = ray.wait(waiting, num_returns=1)
            self.waited_s += time.perf_counter() - start_s
            for ref in done:
                values[number_of[ref]] = self._get(ref, name=self._names[number_of[ref]])
        return values

    def end(self) -> None:
        """Kill the workers by handle and give their devices back."""
        for worker in (*self.workers, *self._waiting):
            ray.kill(worker, no_restart=True)
        release(self._groups)

    def _get(self, ref: Any, *, name: str) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError | InfeasiblePlanError):
                raise error.cause from error
            raise WorkerFailedError(f"{name} failed: {error.cause!r}\n{plain(str(error))}") from error
        except RayActorError as error:
            raise WorkerFailedError(f"{name} died: {error}") from error
