"""One worker of a run: started, kept alive, ended."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rayfcp.cluster.runtime import ActorSpec, Role, Runtime, Timer
from rayfcp.cluster.workers.facts import DeviceFacts
from rayfcp.cluster.workers.lifetime import WORKER, actor_name
from rayfcp.cluster.workers.placement import bundle
from rayfcp.config import Config

HEARTBEATS = 4
"""Heartbeats within the silence that ends an orphan."""

Killer = Callable[[DeviceFacts], None]
"""Ends a worker's process on its node even if it does not react to the runtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An opened worker. `id` never changes; the reservation `group` holds its device."""

    id: str
    handle: Any
    group: Any
    facts: DeviceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A worker requested at `requested_s` of `Runtime.now_s`, which starts once its device is granted. `opening`
    references its facts."""

    id: str
    handle: Any
    group: Any
    opening: Any
    requested_s: float

    def opened(self, facts: DeviceFacts) -> Member:
        return Member(id=self.id, handle=self.handle, group=self.group, facts=facts)


def keep_alive(runtime: Runtime, orphan_s: float, *, handles: Callable[[], Iterable[Any]]) -> Timer:
    """Call `beat` of actors often enough, until closed, that they do not end as orphans."""

    def call() -> None:
        for handle in handles():
            handle.beat.remote()

    return runtime.every(orphan_s / HEARTBEATS, call, name="keep alive")


class WorkerStart:
    """Starts and ends the workers of a run. No process owns them: whoever starts or adopts them keeps them alive with
    `hold`, and ends them.

    Args:
        device: resolved value of `cluster.device`.
    """

    def __init__(
        self, config: Config, *, runtime: Runtime, device: str, data_dir: str, vocab_size: int, run_key: str
    ) -> None:
        self.config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": device})})
        self.runtime, self.device, self.run_key = runtime, device, run_key
        self._data_dir, self._vocab_size = data_dir, vocab_size
        self._held: dict[str, Any] = {}
        self._alive: Timer | None = None

    def launch(self, group: Any) -> Launched:
        """Request a worker in this reservation, granted or not, without waiting."""
        id = self.runtime.new_id()
        spec = ActorSpec(
            role=Role.WORKER,
            name=actor_name(self.run_key, WORKER, id=id),
            reservation=group,
            resources=bundle(self.device, threads=self.config.train.threads_per_worker),
        )
        handle = self.runtime.start(spec, self.config, self._data_dir, vocab_size=self._vocab_size, worker_id=id)
        self.hold(id, handle)
        now_s = self.runtime.now_s()
        return Launched(id=id, handle=handle, group=group, opening=handle.open.remote(), requested_s=now_s)

    def end(self, worker: Member | Launched) -> None:
        """Kill a worker, started or not, and give its device back."""
        self.runtime.end(worker.handle)
        self.runtime.release(worker.group)

    def hold(self, id: str, handle: Any) -> None:
        """Keep a worker alive until `let_go`."""
        self._held[id] = handle
        if self._alive is None:
            self._alive = keep_alive(self.runtime, self.config.elastic.orphan_s, handles=self._handles)

    def let_go(self, id: str) -> None:
        """Stop keeping a worker alive."""
        self._held.pop(id, None)
        if not self._held and self._alive is not None:
            self._alive.close()
            self._alive = None

    def _handles(self) -> list[Any]:
        return list(self._held.values())  # a copy: the timer may run in another thread
