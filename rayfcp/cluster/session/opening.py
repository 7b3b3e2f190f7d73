"""How a session opens: workers are started, or adopted from a lost controller, and the first generation is chosen."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rayfcp.cluster.checkpoints.resuming import Weights
from rayfcp.cluster.dataset import ModelData
from rayfcp.cluster.errors import CapacityError, RunAbortedError, StoppedError
from rayfcp.cluster.facts.devices import Member
from rayfcp.cluster.facts.nodes import NodeWatch
from rayfcp.cluster.recovery.history import History
from rayfcp.cluster.recovery.stores import CopyStores, copies_name
from rayfcp.cluster.runtime import Flag, Runtime
from rayfcp.cluster.runtime.lifetime import run_key
from rayfcp.cluster.session.devices import Devices
from rayfcp.cluster.session.losses import LossRecord
from rayfcp.cluster.session.session import InitialGeneration
from rayfcp.cluster.session.state import NOTHING
from rayfcp.cluster.workers.calls import GroupFailedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.cluster.workers.starting import WorkerStart, adopt_leftovers
from rayfcp.config import Config
from rayfcp.values import Move
from rayfcp.values.devices import DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a session opens with.

    `device`: kind of the devices; `stopping`: set when the user stops the run; `announce`: logs what comes next, or
    raises `StoppedError`.
    """

    config: Config
    runtime: Runtime
    data: ModelData
    device: str
    stopping: Flag
    log: Callable[[str], None]
    announce: Callable[[str], None]

    def devices(self) -> Devices:
        """Adopt the workers and copy stores of a lost controller, or start workers."""
        config, runtime, key = self.config, self.runtime, run_key(self.config)
        history = History(Path(config.run_dir))
        start = WorkerStart(
            config,
            runtime=runtime,
            device=self.device,
            data_dir=self.data.folder,
            vocab_size=self.data.vocab_size,
            run_key=key,
            copies=copies_name(key, history),
        )
        members, left_stores = adopt_leftovers(runtime, key, timeout_s=config.elastic.hang_min_s)
        with ExitStack() as undo:
            nodes = NodeWatch(runtime, every_s=config.elastic.look_every_s)
            undo.callback(nodes.end)
            stores = CopyStores(config, runtime=runtime, run_key=key, history=history, nodes=nodes, adopted=left_stores)
            undo.callback(stores.end)
            if members:
                self.announce(f"adopting {len(members)} workers of a lost controller")
            else:
                members = self._started(start)
            losses = LossRecord(config, is_host=DEVICES[self.device].is_host, log=self.log)
            workers = WorkerGroup(start, members, kill=stores.kill, way=losses.way)
            undo.pop_all()
        return Devices(
            config,
            self.data,
            start=start,
            workers=workers,
            stores=stores,
            nodes=nodes,
            losses=losses,
            log=self.log,
        )

    def _started(self, start: WorkerStart) -> list[Member]:
        self.announce(f"starting {self.config.cluster.max_workers} workers")
        try:
            return start.open_all(stopped=self.stopping.is_set)
        except CapacityError as error:
            if self.stopping.is_set():
                raise StoppedError from error
            raise

    def first_generation(self, devices: Devices, weights: Weights, *, up_to: int | None) -> InitialGeneration:
        """Choose the devices to start with, and the state that they load: one in memory of at most `up_to` steps, if it
        is newer than the checkpoint, which has been verified otherwise. Copies are not looked for if `up_to` is None.
        """
        workers = devices.workers
        while True:
            found = NOTHING if up_to is None else devices.stores.newest_state(workers.all, up_to=up_to)
            is_newer = found.state is not None and found.state.version > weights.step
            decision = devices.await_devices(None, stopping=self.stopping)
            if decision.what is Move.GIVE_UP:
                raise RunAbortedError(decision.reason)
            if not decision.devices:
                raise StoppedError
            try:
                if not is_newer:
                    devices.stores.drop_copies(workers.all)
                    workers.use(decision.devices)
                    weights.verify(workers)
                break
            except GroupFailedError as error:
                devices.on_failure(error)
                self.log(f"{error}, before the first step; starting with the workers that are left")
        version = found.state.version if is_newer and found.state is not None else weights.step
        cluster = devices.spec(decision)
        return InitialGeneration(
            decision=decision, cluster=cluster, found=found if is_newer else NOTHING, version=version
        )
