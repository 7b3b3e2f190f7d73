"""Workers of a run: started at the beginning and later for missing devices, or adopted from a lost controller; kept
alive and ended."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayfcp.cluster.errors import CapacityError
from rayfcp.cluster.facts.devices import DeviceFacts, Member
from rayfcp.cluster.facts.resources import bundle, nsight_options
from rayfcp.cluster.runtime import ActorSpec, CallError, Role, Runtime
from rayfcp.cluster.runtime.lifetime import DEVICE, STANDBY, STORE, WORKER, actor_name, keep_alive
from rayfcp.cluster.workers.calls import WorkerFailedError, value_of
from rayfcp.config import Config, ConfigError
from rayfcp.values.devices import DEVICES

logger = logging.getLogger(__name__)

LOOK_S = 0.2
MORE_WORKERS_WAIT_S = 2.0
"""Time that a start with enough workers waits for one more."""

REMOVE_S = 5.0
"""Time for copy stores to remove copies before they are ended."""

STANDBY_SHARE = 0.1
"""Of an accelerator that a standby process holds, so that Ray lets it see the device of its worker, which has the
rest."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after workers that could not open; it doubles from the first to the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A worker requested at `requested_s` of `Runtime.now_s`, which starts once its device is granted. `opening`
    references its facts."""

    id: str
    handle: Any
    reservation: Any
    opening: Any
    requested_s: float

    def opened(self, facts: DeviceFacts) -> Member:
        return Member(id=self.id, handle=self.handle, reservation=self.reservation, facts=facts)


@dataclass(slots=True, kw_only=True)
class Standby:
    """A process that stands by in a worker's reservation; `warming` until it has imported everything."""

    id: str
    handle: Any
    warming: Any


class WorkerStart:
    """Starts and ends the workers of a run. No process owns them: whoever starts or adopts them keeps them alive with
    `hold`, and ends them.

    Reservations whose workers were lost are kept as `vacant`: the next launches use them first. A process that stands
    by in one becomes the worker then, without the time that imports take.

    Args:
        device: resolved value of `cluster.device`.
        copies: name of the run's folders in shared memory; empty if no state is copied.
    """

    def __init__(
        self,
        config: Config,
        *,
        runtime: Runtime,
        device: str,
        data_dir: str,
        vocab_size: int,
        run_key: str,
        copies: str = "",
    ) -> None:
        self.config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": device})})
        self.runtime, self.run_key = runtime, run_key
        threads, share = config.train.threads_per_worker, STANDBY_SHARE if config.elastic.standby_workers else 0.0
        self.resources = bundle(device, threads=threads)
        self._shares = {
            WORKER: bundle(device, threads=threads, share=1.0 - share),
            STANDBY: bundle(device, threads=0, share=share),
        }
        self.vacant: list[Any] = []
        self._standbys: dict[str, Standby] = {}
        self._data_dir, self._vocab_size, self._copies = data_dir, vocab_size, copies
        self._nsight = nsight_options(config, device=device)
        self._held: dict[str, Any] = {}
        self._stop_beats: Callable[[], None] | None = None

    def reserve(self) -> Any:
        """Reserve one worker's device, granted once there is one; detached, and named after its run."""
        return self.runtime.reserve(self.resources, name=actor_name(self.run_key, DEVICE, id=self.runtime.new_id()))

    def launch(self, reservation: Any = None) -> Launched:
        """Request a worker without waiting: in this reservation, granted or not; in a vacant one; or in a new one."""
        if reservation is None:
            reservation = self.vacant.pop(0) if self.vacant else self.reserve()
        standby = self._standbys.pop(self.runtime.key(reservation), None)
        id, handle = (standby.id, standby.handle) if standby is not None else self._start(WORKER, reservation)
        now_s = self.runtime.now_s()
        return Launched(id=id, handle=handle, reservation=reservation, opening=handle.open.remote(), requested_s=now_s)

    def replacements(self, *, all: bool) -> list[Launched]:
        """Launch workers in `all` vacant reservations, or in those where processes stand by."""
        ready = [each for each in self.vacant if all or self.runtime.key(each) in self._standbys]
        self.vacant = [each for each in self.vacant if each not in ready]
        return [self.launch(each) for each in ready]

    def release_vacant(self, *, but: int = 0) -> None:
        """Give vacant devices back, all but the first ones."""
        while len(self.vacant) > but:
            self._release(self.vacant.pop())

    def keep_standbys(self, members: Sequence[Member]) -> None:
        """Start the next process that stands by, if `elastic.standby_workers` asks for more and none is starting."""
        most, runtime = min(self.config.elastic.standby_workers, len(members)), self.runtime
        for key, standby in list(self._standbys.items()):
            if standby.warming is not None and runtime.wait([standby.warming], timeout_s=0):
                try:
                    runtime.get(standby.warming)
                    standby.warming = None
                except CallError as error:
                    logger.warning("a process that was to stand by could not start: %s", error)
                    self._end_standby(key)
        if len(self._standbys) >= most or any(each.warming is not None for each in self._standbys.values()):
            return
        reservation = next(each.reservation for each in members if runtime.key(each.reservation) not in self._standbys)
        id, handle = self._start(STANDBY, reservation)
        self._standbys[runtime.key(reservation)] = Standby(id=id, handle=handle, warming=handle.warm.remote())

    def _start(self, kind: str, reservation: Any) -> tuple[str, Any]:
        """Start the process of a worker, or of one that stands by, in a reservation; return its id and handle."""
        id = self.runtime.new_id()
        name = actor_name(self.run_key, kind, id=id)
        spec = ActorSpec(
            role=Role.WORKER, name=name, reservation=reservation, resources=self._shares[kind], nsight=self._nsight
        )
        handle = self.runtime.start(
            spec, self.config, self._data_dir, vocab_size=self._vocab_size, worker_id=id, copies=self._copies
        )
        self.hold(id, handle)
        return id, handle

    def open_all(self, *, stopped: Callable[[], bool] = bool) -> list[Member]:
        """Start a worker on each of the devices that are there, in the order in which they open. Those that do not open
        within `elastic.start_timeout_s` are ended, if the others are enough.

        Raises:
            CapacityError: too few devices, as `_reserve_all`.
            ConfigError: a device is not what the configuration says.
            WorkerFailedError: a worker cannot start.
        """
        launched = [self.launch(each) for each in self._reserve_all(stopped)]
        try:
            return self._open(launched)
        except BaseException:
            for each in launched:
                self.end(each)
            raise

    def end(self, worker: Member | Launched, *, keep_device: bool = False) -> None:
        """Kill a worker, started or not; give its device back, or keep it as vacant."""
        self._end_process(worker.id, worker.handle)
        if keep_device:
            self.vacant.append(worker.reservation)
        else:
            self._release(worker.reservation)

    def _release(self, reservation: Any) -> None:
        self._end_standby(self.runtime.key(reservation))
        self.runtime.release(reservation)

    def _end_standby(self, key: str) -> None:
        standby = self._standbys.pop(key, None)
        if standby is not None:
            self._end_process(standby.id, standby.handle)

    def _end_process(self, id: str, handle: Any) -> None:
        self._held.pop(id, None)
        if not self._held and self._stop_beats is not None:
            self._stop_beats()
            self._stop_beats = None
        self.runtime.end(handle)

    def hold(self, id: str, handle: Any) -> None:
        """Keep a worker alive until `end`."""
        self._held[id] = handle
        if self._stop_beats is None:
            # A copy of the handles: the timer may run in another thread.
            orphan_s = self.config.elastic.orphan_s
            self._stop_beats = keep_alive(self.runtime, orphan_s, handles=lambda: list(self._held.values()))

    def _reserve_all(self, stopped: Callable[[], bool]) -> list[Any]:
        """Reserve as many devices as fit, from the minimum of `cluster.num_workers` to its maximum. Waits up to
        `elastic.start_timeout_s` for the minimum, or until `stopped()`.

        Raises:
            CapacityError: the minimum does not fit by then; nothing stays reserved.
        """
        runtime, least, timeout_s = self.runtime, self.config.cluster.min_workers, self.config.elastic.start_timeout_s
        waiting = {
            runtime.granted(each): each for each in (self.reserve() for _ in range(self.config.cluster.max_workers))
        }
        kept: list[Any] = []
        end_s = runtime.now_s() + timeout_s
        while waiting and runtime.now_s() < end_s and not stopped():
            done = runtime.wait(list(waiting), timeout_s=LOOK_S)
            kept += [waiting.pop(ref) for ref in done]
            if done and len(kept) >= least:
                end_s = min(end_s, runtime.now_s() + MORE_WORKERS_WAIT_S)
        is_enough = len(kept) >= least
        for each in [*waiting.values(), *([] if is_enough else kept)]:
            runtime.release(each)
        if is_enough:
            return kept
        names = ("CPU", *(info.resource for info in DEVICES.values() if info.resource))
        has = ", ".join(f"{name}: {count:g}" for name, count in runtime.resources().items() if name in names)
        raise CapacityError(
            f"cluster.num_workers asks for at least {least} x {self.resources}, {len(kept)} fit into {{{has}}} within "
            f"{timeout_s:.0f} s; add nodes or ask for fewer"
        )

    def _open(self, launched: list[Launched]) -> list[Member]:
        runtime, limit_s = self.runtime, self.config.elastic.start_timeout_s
        left, members = {each.opening: number for number, each in enumerate(launched)}, []
        end_s = runtime.now_s() + limit_s
        while left and (done := runtime.wait(list(left), timeout_s=max(0.0, end_s - runtime.now_s()))):
            for ref in done:
                number = left.pop(ref)
                members.append(launched[number].opened(value_of(runtime, ref, name=f"rank {number}")))
        if len(members) < min(self.config.cluster.min_workers, len(launched)):
            late = ", ".join(f"rank {number}" for number in left.values())
            raise WorkerFailedError(
                f"{late} did not open within elastic.start_timeout_s ({limit_s:.0f} s); "
                "look at their nodes, or raise it"
            )
        for number in left.values():
            self.end(launched[number])
        return members


class PendingWorkers:
    """One pending worker per missing device, which starts and opens once there is a device for it. The autoscaler is
    requested to provide what the whole run needs."""

    def __init__(self, start: WorkerStart) -> None:
        self._start, self._runtime = start, start.runtime
        self._pending: list[Launched] = []
        self._wanted = self._requested = 0
        self._failures, self._again_s = 0, 0.0
        self._with_device: set[str] = set()
        self._replacing: set[str] = set()
        self._looked_s = start.runtime.now_s()

    @property
    def requested_s(self) -> tuple[float, ...]:
        """Time of each pending request, on `Runtime.now_s`."""
        return tuple(each.requested_s for each in self._pending)

    @property
    def replacing_since_s(self) -> tuple[float, ...]:
        """The same of those that `replace` launched."""
        return tuple(each.requested_s for each in self._pending if each.id in self._replacing)

    def replace(self, *, all: bool) -> None:
        """Launch workers in the place of lost ones, on `all` vacant devices, or where processes stand by."""
        launched = self._start.replacements(all=all)
        self._pending += launched
        self._wanted += len(launched)
        self._replacing = {each.id for each in launched} | (self._replacing & {each.id for each in self._pending})

    def want(self, missing: int, *, in_use: int) -> None:
        """Keep `missing` workers pending beside the devices in use; surplus ones, and vacant devices, are given up, the
        latest first."""
        self._wanted = missing
        while len(self._pending) > missing:
            self._start.end(self._pending.pop())
        self._start.release_vacant(but=missing - len(self._pending))
        # The autoscaler takes a request for the whole cluster, so devices in use count as well.
        devices = missing + in_use if missing else 0
        if self._requested != devices:
            self._requested = devices
            self._runtime.request(self._start.resources, count=devices)
        self._launch()

    def ready(self) -> list[Member]:
        """Workers that opened since the last call, which are not missing any more. Those that could not open, or have
        not opened `elastic.start_timeout_s` after their device was granted, are requested anew after a pause. Never
        waits.

        Raises:
            ConfigError: a worker says that the configuration cannot run where it is.
        """
        members, by_ref = [], {each.opening: each for each in self._pending}
        for ref in self._runtime.wait_all(list(by_ref), timeout_s=0):
            each = by_ref[ref]
            self._pending.remove(each)
            try:
                members.append(each.opened(value_of(self._runtime, each.opening, name=f"worker {each.id}")))
            except WorkerFailedError as error:
                self._failed(each, error)
            except ConfigError:
                self._start.end(each)
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

    def _late(self) -> list[Launched]:
        """Workers that had their device one `elastic.start_timeout_s` ago. Polls once in that time, since each poll
        asks the whole cluster."""
        now_s = self._runtime.now_s()
        if not self._pending or now_s - self._looked_s < self._start.config.elastic.start_timeout_s:
            return []
        self._looked_s = now_s
        prefix = actor_name(self._start.run_key, DEVICE, id="")
        granted = self._runtime.reservations(prefix, granted=True).keys()
        with_device = {each.id for each in self._pending if self._runtime.key(each.reservation) in granted}
        late = [each for each in self._pending if each.id in with_device & self._with_device]
        self._with_device = with_device
        return late

    def _failed(self, launched: Launched, why: object) -> None:
        logger.warning("a new worker could not start: %s", why)
        self._start.end(launched)
        self._failures += 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (self._failures - 1), LONGEST_PAUSE_S)
        self._again_s = self._runtime.now_s() + pause_s

    def _launch(self) -> None:
        if self._runtime.now_s() < self._again_s:
            return
        while len(self._pending) < self._wanted:
            self._pending.append(self._start.launch())


def adopt_leftovers(runtime: Runtime, run_key: str, *, timeout_s: float) -> tuple[list[Member], dict[str, Any]]:
    """Abort the workers that are left of a run; return them, idle and in no generation, and the stores by node.

    Those that do not answer within `timeout_s`, or have not opened yet, are ended, such as processes that stand by, and
    reservations without a worker are given back.
    """
    workers, stores = _workers(runtime, run_key), _named(runtime, run_key, STORE)
    end_s = runtime.now_s() + timeout_s

    def answer(ref: Any) -> Any:
        try:
            return runtime.get(ref, timeout_s=max(0.0, end_s - runtime.now_s()))
        except CallError:
            return None

    def end(handle: Any, *, what: str) -> None:
        logger.warning("%s of the lost controller does not answer and is ended", what)
        runtime.end(handle)

    aborts = {id: worker.abort.remote() for id, worker in workers.items()}
    answers = {
        id: (worker.facts.remote(), worker.reservation.remote(), worker.idle.remote()) for id, worker in workers.items()
    }
    opened = {id: store.open.remote() for id, store in stores.items()}
    members = []
    for id, refs in answers.items():
        facts, reservation, idle = map(answer, refs)
        is_free = idle is not None and bool(runtime.wait([aborts[id]], timeout_s=max(0.0, end_s - runtime.now_s())))
        if isinstance(facts, DeviceFacts) and reservation is not None and is_free:
            members.append(Member(id=id, handle=workers[id], reservation=reservation, facts=facts))
        else:
            end(workers[id], what=f"worker {id}")
    by_node: dict[str, Any] = {}
    for id, ref in opened.items():
        found = answer(ref)
        if found is None or found.node_id in by_node:
            end(stores[id], what=f"copy store {id}")
        else:
            by_node[found.node_id] = stores[id]
    _release_all(runtime, run_key, held={runtime.key(member.reservation) for member in members})
    return members, by_node


def end_leftovers(runtime: Runtime, run_key: str) -> None:
    """End all workers and copy stores of a run without controller, with the copies of its state, and withdraw its
    request to the autoscaler."""
    for handle in _workers(runtime, run_key).values():
        runtime.end(handle)
    end_stores(runtime, _named(runtime, run_key, STORE).values())
    _release_all(runtime, run_key, held=set())
    runtime.request({}, count=0)


def end_stores(runtime: Runtime, stores: Iterable[Any]) -> None:
    """End copy stores at the end of a run, after they have removed the copies of its state."""
    handles = list(stores)
    runtime.wait_all([store.remove_copies.remote() for store in handles], timeout_s=REMOVE_S)
    for handle in handles:
        runtime.end(handle)


def _workers(runtime: Runtime, run_key: str) -> dict[str, Any]:
    """Workers, and processes that stand by, some of which may have become workers."""
    return _named(runtime, run_key, WORKER) | _named(runtime, run_key, STANDBY)


def _named(runtime: Runtime, run_key: str, kind: str) -> dict[str, Any]:
    return runtime.named(actor_name(run_key, kind, id=""))


def _release_all(runtime: Runtime, run_key: str, *, held: set[str]) -> None:
    for key, each in runtime.reservations(actor_name(run_key, DEVICE, id="")).items():
        if key not in held:
            runtime.release(each)
