"""The state that devices hold: where it is copied and saved, and what a generation loads."""

from collections.abc import Callable, Sequence

from rayfcp.cluster.checkpoints.resuming import Resume, Weights
from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.recovery.replication import Replication
from rayfcp.cluster.recovery.stores import CopyStores
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.elastic.facts import Failure
from rayfcp.elastic.recoverable import RecoverableState
from rayfcp.execute.reports import DeviceReport, Joined
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import KeptStates, StateId

NOTHING = RecoverableState(reason="the state is read from its checkpoint")


class State:
    """State of a run, at a version (steps applied). This one is only read: every generation loads the same weights, and
    losses cost nothing. Methods that call all devices raise `GroupFailedError`."""

    def __init__(self, workers: WorkerGroup, stores: CopyStores, *, weights: Weights) -> None:
        self._workers, self._stores, self._weights = workers, stores, weights

    @property
    def is_safe(self) -> bool:
        """True if a loss can be recovered from without copies of earlier generations."""
        return True

    def newest(self, *, up_to: int) -> RecoverableState:  # noqa: ARG002
        """Find the newest state in memory of at most `up_to` steps: a later one is not in the log and runs again."""
        return NOTHING

    def load(self, found: RecoverableState, joined: Sequence[Joined]) -> int:  # noqa: ARG002
        """Make the devices that `joined` load this state, or the newest checkpoint if there is none; return the
        version."""
        self._weights.check_weights(joined)
        self._weights.load(self._workers)
        return self._weights.step

    def begin(self, *, version: int) -> None:  # noqa: ARG002
        """Begin a generation that holds this version."""
        self._stores.assign(self._workers.all)  # they kill processes that hang

    def before_leaving(self, *, version: int) -> None:
        """Make sure that a copy of this version exists, as its devices are about to leave."""

    def save_now(self, *, version: int) -> str:  # noqa: ARG002
        """Begin to save this version if that has not been done; return a clause that says so."""
        return ""

    def on_failure(self) -> None:
        """Give up what the lost devices were to do."""

    def on_recovery(self, failure: Failure) -> None:
        """Take note of a loss that is being recovered from."""

    def rescue(self, *, up_to: int) -> str:  # noqa: ARG002
        """Save the newest state in memory, if no checkpoint has it; return a clause that says so."""
        return ""


class TrainedState(State):
    """State of a training: copied in memory and saved in checkpoints."""

    def __init__(
        self,
        workers: WorkerGroup,
        stores: CopyStores,
        *,
        resume: Resume,
        replication: Replication,
        saver: Saver,
        metrics: MetricsExporter,
        log: Callable[[str], None],
    ) -> None:
        super().__init__(workers, stores, weights=resume)
        self._log = log
        self.replication, self.saver, self._metrics = replication, saver, metrics
        self._is_loaded = False

    def order(self, step: int) -> tuple[StateId | None, KeptStates]:
        """Return the copy that devices make after `step`, if any, and the states whose copies they keep."""
        return self.replication.order(step, saved=self.saver.wants(step))

    def after_step(self, step: int, devices: Sequence[DeviceReport], *, step_s: float) -> None:
        """Take note of the copies that devices made, send those that are due, and write a checkpoint if one is due."""
        self.replication.after_step(devices, step_s=step_s)
        copied_s = max(each.copy_s for each in devices)
        self._metrics.set("snapshot_seconds", copied_s + self.replication.intervals.send_s)
        self.saver.after_step(step)

    def newest(self, *, up_to: int) -> RecoverableState:
        return self._stores.newest_state(self._workers.all, up_to=up_to)

    def load(self, found: RecoverableState, joined: Sequence[Joined]) -> int:
        self._weights.check_weights(joined)
        is_first, self._is_loaded = not self._is_loaded, True
        if found.state is not None:
            load_copies(self._workers, found)
            return found.state.version
        if is_first:
            self._weights.load(self._workers)
            return self._weights.step
        self._stores.drop_copies(self._workers.all)  # those that are left are of steps that run again
        version = self.saver.fall_back()
        source = f"the checkpoint of step {version}" if version else "the beginning, as there is no checkpoint"
        self._log(f"{found.reason}; resuming from {source}")
        return version

    def begin(self, *, version: int) -> None:
        self.replication.begin(version=version)

    def before_leaving(self, *, version: int) -> None:
        self.replication.copy_now(version)

    @property
    def is_safe(self) -> bool:
        return self.replication.is_safe

    def save_now(self, *, version: int) -> str:
        self.saver.save_now(version)
        return "; saving"

    def on_failure(self) -> None:
        self.saver.abandon()

    def on_recovery(self, failure: Failure) -> None:
        self.replication.after_loss(failure)

    def rescue(self, *, up_to: int) -> str:
        found, saver = self.newest(up_to=up_to), self.saver
        if found.state is None or found.state.version <= saver.saved_step:
            return ""
        step = found.state.version
        self._log(f"saving step {step} from copies in memory")
        problem = saver.rescue(found)
        return f"; step {step} could not be saved: {problem}" if problem else f"; step {step} is saved in {saver.saved}"


def load_copies(workers: WorkerGroup, found: RecoverableState) -> None:
    """Make all devices load a state from copies."""
    sources = workers.runtime.put(found.copies)
    workers.call(lambda _, worker: worker.load_copies.remote(sources))
