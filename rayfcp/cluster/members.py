"""One worker of a run: how it is started, what is known of it, how it is ended."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from rayfcp.cluster.facts import DeviceFacts
from rayfcp.cluster.naming import NAMESPACE, WORKER, actor_name, new_id
from rayfcp.cluster.orphans import KeepAlive
from rayfcp.cluster.placement import options_for, release
from rayfcp.cluster.worker import GROUPS, RankWorker
from rayfcp.config import Config

Killer = Callable[[DeviceFacts], None]
"""Ends a worker's process on its node, also one that does not react to Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An opened worker. `id` is its own for ever; its placement group holds its device."""

    id: str
    handle: Any
    group: PlacementGroup
    facts: DeviceFacts

    def end(self) -> None:
        """Kill it by id and give its device back."""
        ray.kill(self.handle, no_restart=True)
        release([self.group])


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A worker that was asked for at `asked_s` of `time.monotonic`: it starts once its placement group has its device.
    `opening` refers to its facts."""

    id: str
    handle: Any
    group: PlacementGroup
    opening: Any
    asked_s: float = field(default_factory=time.monotonic)

    def opened(self, facts: DeviceFacts) -> Member:
        return Member(id=self.id, handle=self.handle, group=self.group, facts=facts)

    def end(self) -> None:
        """Kill it, started or not, and give its device back."""
        ray.kill(self.handle, no_restart=True)
        release([self.group])


class WorkerStart:
    """How the workers of a run are started. They belong to nobody: whoever starts or adopts them keeps them alive, by
    `hold`, and ends them.

    Args:
        device: what `cluster.device` stands for.
        worker: class of the actors.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: str,
        data_dir: str,
        vocab_size: int,
        run_key: str,
        worker: type[RankWorker] = RankWorker,
    ) -> None:
        self.config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": device})})
        self.device, self.run_key = device, run_key
        self._data_dir, self._vocab_size = data_dir, vocab_size
        self._actor = ray.remote(concurrency_groups=GROUPS)(worker)
        self._held: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._alive: KeepAlive | None = None

    def launch(self, group: PlacementGroup) -> Launched:
        """Ask for a worker in this placement group, ready or not. Does not block."""
        id = new_id()
        options = options_for(group, device=self.device, threads=self.config.train.threads_per_worker)
        name = actor_name(self.run_key, WORKER, id=id)
        actor = self._actor.options(name=name, namespace=NAMESPACE, lifetime="detached", **options)
        handle = actor.remote(self.config, self._data_dir, vocab_size=self._vocab_size, worker_id=id)
        self.hold(id, handle)
        return Launched(id=id, handle=handle, group=group, opening=handle.open.remote())

    def hold(self, id: str, handle: Any) -> None:
        """Keep a worker alive until `let_go`."""
        with self._lock:
            self._held[id] = handle
            if self._alive is None:
                self._alive = KeepAlive(self.config.elastic.orphan_s, handles=self._handles)

    def let_go(self, id: str) -> None:
        """Of a worker that was ended."""
        with self._lock:
            self._held.pop(id, None)
            if not self._held and self._alive is not None:
                self._alive.close()
                self._alive = None

    def _handles(self) -> list[Any]:
        with self._lock:
            return list(self._held.values())
