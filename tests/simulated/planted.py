"""Faults planted into the control code, one at a time: does the simulation find them?

    python -m tests.simulated.planted

Each is a fault that the project's history mended (the commit stands beside it) or that a reviewer would fear.
"""

import fcntl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rayfcp.cluster.actors.plan_queue import PlanQueue
from rayfcp.cluster.actors.pool import ActorPool, Member
from rayfcp.cluster.checkpoints.resuming import Resume
from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.jobs.train import TrainJob
from rayfcp.cluster.recovery.replication import Replication
from rayfcp.cluster.recovery.stores import CopyStores
from rayfcp.cluster.session.devices import Devices
from rayfcp.cluster.session.session import Session
from rayfcp.cluster.workers.calls import GroupCall
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.cluster.workers.starting import PendingWorkers, WorkerStart
from rayfcp.elastic.recoverable import CopiedStates, RecoverableState, ShardCopy
from rayfcp.execute.reports import DeviceReport
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.values import KeptStates, StateId
from tests.simulated.run import simulate
from tests.simulated.schedule import draw
from tests.simulated.world import ViolationError

Plant = Callable[[], AbstractContextManager[Any]]


def _torn_copies() -> AbstractContextManager[Any]:
    """The memory of a copy that others still need is used for a new one."""
    return patch.object(KeptStates, "__contains__", lambda self, state: self.since is None or state > self.since)


def _one_node_forgotten() -> AbstractContextManager[Any]:
    """A node whose processes are all dead is not asked for its copies."""
    newest = CopyStores.newest_state

    def newest_state(self: CopyStores, members: Any, *, up_to: int) -> Any:
        with patch.object(CopyStores, "_start", lambda self, nodes: None):
            return newest(self, members, up_to=up_to)

    return patch.object(CopyStores, "newest_state", newest_state)


def _kept_after_the_end() -> AbstractContextManager[Any]:
    """A run that ended leaves its copies in memory."""
    return patch.object(CopyFolder, "remove", lambda self: None)


def _stuck_go_on() -> AbstractContextManager[Any]:
    """Survivors whose aborts hang are taken for free, and may take for ever to rebuild."""
    call = WorkerGroup.call

    def patient(self: WorkerGroup, method: Any, *, most_s: float | None = None) -> Any:
        return call(self, method)

    stack = ExitStack()
    stack.enter_context(patch.object(GroupCall, "_stuck", lambda self, numbers: None))
    stack.enter_context(patch.object(WorkerGroup, "call", patient))
    return stack


def _vacant_for_ever() -> AbstractContextManager[Any]:
    """Devices whose workers were lost are kept after the end."""
    return patch.object(WorkerStart, "release_vacant", lambda self, but=0: None)


def _mixed_versions() -> AbstractContextManager[Any]:
    """One shard is filled from a copy of another version than the rest."""
    import rayfcp.cluster.recovery.stores as stores

    newest = stores.newest

    def mixed(held: Sequence[ShardCopy], **given: Any) -> RecoverableState:
        found = newest(held, **given)
        others = [each for each in held if each.header.number == 0 and each.header.state != found.state]
        return replace(found, copies=(others[0], *found.copies[1:])) if others and found.copies else found

    return patch.object(stores, "newest", mixed)


def _committed_early() -> AbstractContextManager[Any]:
    """A step counts as done when all devices but one have reported it."""
    values = GroupCall.values

    def early(self: GroupCall) -> Any:
        while len(self._pending) > 1 and not self._found.reason:
            if not self._take_ended():
                self._look()
        known = next((each for each in self._values if isinstance(each, DeviceReport)), None)
        if known is None or self._found.reason or not self._pending:
            return values(self)
        return [known if each is None else each for each in self._values]

    return patch.object(GroupCall, "values", early)


def _old_plans() -> AbstractContextManager[Any]:
    """Plans in flight survive a change of devices."""

    def start(self: PlanQueue, first_step: int, last_step: int, *, cluster: Any, cost: Any) -> None:
        if not self._in_flight:
            self._next = first_step
        self._last = last_step
        self._cluster, self._cluster_ref = cluster, self._runtime.put(cluster)
        self._cost_ref = self._runtime.put(cost)
        self.refill()

    return patch.object(PlanQueue, "start", start)


def _drain_is_death() -> AbstractContextManager[Any]:
    """Devices of a node that is about to go are ended at once."""
    upkeep = Devices.upkeep

    def ending(self: Devices, **given: Any) -> Any:
        draining = self._nodes.view.draining
        for member in self.workers.members:
            if member.facts.node_id in draining:
                self.workers.runtime.end(member.handle)
        return upkeep(self, **given)

    return patch.object(Devices, "upkeep", ending)


def _dropped_copies() -> AbstractContextManager[Any]:
    """Only the newest state stays, though other nodes have none as new."""
    return patch.object(CopiedStates, "kept", property(lambda self: KeptStates(since=self.here)))


def _copies_pile_up() -> AbstractContextManager[Any]:
    """Copies that are not needed any more stay."""
    return patch.object(CopyFolder, "drop", lambda self, kept, of_dead=False: None)


def _hung_start() -> AbstractContextManager[Any]:
    """A pending worker that hangs while it starts keeps its device (found by this simulation)."""
    return patch.object(PendingWorkers, "_late", lambda self: [])


def _safe_though_lost() -> AbstractContextManager[Any]:
    """A state that was lost stays safe (2e190d4)."""

    def again(self: CopiedStates, devices: Any, *, generation: int, first: int) -> CopiedStates:
        begun = CopiedStates.start(devices, generation=generation, first=first)
        return replace(begun, here=self.here, away=self.away)

    return patch.object(CopiedStates, "again", again)


def _unlogged_steps() -> AbstractContextManager[Any]:
    """A run goes on from a state of steps that are not in its log (0b538bb)."""
    newest = CopyStores.newest_state

    def unlogged(self: CopyStores, members: Any, *, up_to: int) -> Any:
        return newest(self, members, up_to=10**6)

    return patch.object(CopyStores, "newest_state", unlogged)


def _dispatch_unsafe() -> AbstractContextManager[Any]:
    """Steps go on though nobody keeps a copy of the state before them."""
    return patch.object(CopiedStates, "may_dispatch", lambda self, step, every: True)


def _nobody_kept_alive() -> AbstractContextManager[Any]:
    """Copy stores are started, but not kept alive, and take themselves for orphans."""
    init = CopyStores.__init__

    def closed(self: CopyStores, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._stop_beats()

    def silent(self: WorkerStart, id: str, handle: Any) -> None:
        self._held[id] = handle

    return _all(patch.object(CopyStores, "__init__", closed), patch.object(WorkerStart, "hold", silent))


def _orphans() -> AbstractContextManager[Any]:
    """Workers that stand by outlive their run."""

    def end(self: WorkerGroup) -> None:
        self.drop([member.id for member in self.members])

    import rayfcp.cluster.driver.following as following

    return _all(
        patch.object(WorkerGroup, "end", end), patch.object(following, "end_leftovers", lambda runtime, key: None)
    )


def _leaked_devices() -> AbstractContextManager[Any]:
    """A worker that is given up keeps its device."""

    def end(self: WorkerStart, worker: Any) -> None:
        self._held.pop(worker.id, None)
        self.runtime.end(worker.handle)

    import rayfcp.cluster.driver.following as following

    return _all(
        patch.object(WorkerStart, "end", end),
        patch.object(following, "end_leftovers", lambda runtime, key: None),
    )


def _unaborted() -> AbstractContextManager[Any]:
    """A call that begins after it was aborted is not aborted again (876d9ff)."""

    def free(self: GroupCall) -> None:
        living = [number for number in range(len(self._members)) if number not in self._found.gone]
        for number in living:
            self._members[number].handle.abort.remote()
        self._pending = {}

    return patch.object(GroupCall, "_free", free)


def _early_checkpoint() -> AbstractContextManager[Any]:
    """A checkpoint is committed as soon as one node has written its part."""
    collect = Saver._collect

    def early(self: Saver, pending: Any) -> None:
        collect(self, pending)
        if pending.parts and pending.writes:
            pending.writes.clear()
            collect(self, pending)

    return patch.object(Saver, "_collect", early)


def _unread_checkpoint() -> AbstractContextManager[Any]:
    """A checkpoint is taken for whole by the sizes of its files."""
    import rayfcp.cluster.checkpoints.resuming as resuming

    return patch.object(resuming, "_read_by", lambda worker_group: resuming.find_wrong_size)


def _forgotten_step() -> AbstractContextManager[Any]:
    """A step is written down only while the next one runs, and not when that breaks."""
    commit = TrainJob._commit

    def late(self: TrainJob, *finished: Any) -> None:
        before = getattr(self, "_late", None)
        self._late = finished  # type: ignore[attr-defined]
        if before is not None:
            commit(self, *before)

    return patch.object(TrainJob, "_commit", late)


def _dead_members() -> AbstractContextManager[Any]:
    """Lost workers stay members."""
    return patch.object(WorkerGroup, "_forget", lambda self, ids: None)


def _gone_copy_ends_run() -> AbstractContextManager[Any]:
    """A copy that goes while it is read counts as an error of the program (found by this simulation)."""
    return patch("rayfcp.execute.state.copies.CopyGoneError", LookupError)


def _planner_not_asked_again() -> AbstractContextManager[Any]:
    """A planner that died is replaced, but what it had in hand is not planned again (240c44a)."""

    def forget(self: ActorPool, member: Member) -> None:
        for request in self._requests:
            if request.member is member:
                request.actor = member.actor  # or the queue would wait for the dead one without an end

    return patch.object(ActorPool, "_repeat_unfinished", forget)


def _planner_dies_starting() -> AbstractContextManager[Any]:
    """A planner that dies while it starts ends the run (found by this simulation)."""

    def wait(self: ActorPool, member: Member) -> None:
        self.runtime.get(member.ready, timeout_s=self.timeout_s)

    return patch.object(ActorPool, "_await", wait)


def _dead_nodes_keep() -> AbstractContextManager[Any]:
    """Copy stores are started on nodes whose standby workers are dead (found by this simulation)."""
    return patch.object(WorkerGroup, "drop_dead", lambda self: None)


def _torn_checkpoint() -> AbstractContextManager[Any]:
    """The memory of copies that are being written to a checkpoint is used for new ones."""
    flock, reads = fcntl.flock, fcntl.LOCK_SH | fcntl.LOCK_NB

    def unleased(self: Replication, version: int) -> Any:
        return StateId(version=version, generation=self.states.generation), self._numbers()

    return _all(
        patch.object(fcntl, "flock", lambda fd, operation: None if operation == reads else flock(fd, operation)),
        patch.object(Replication, "lease", unleased),
    )


def _stays_on_leaving_nodes() -> AbstractContextManager[Any]:
    """Devices of nodes that are about to go are kept."""
    import rayfcp.elastic.size as size

    return patch.object(size, "_staying", lambda facts: list(facts.devices))


def _lossless_resize() -> AbstractContextManager[Any]:
    """A resize that had to go back to an older state goes on as if it had not (found by this simulation)."""
    at_boundary = Session.at_boundary

    def same(self: Session, job: Any, *, version: int) -> int:
        at_boundary(self, job, version=version)
        return version

    return patch.object(Session, "at_boundary", same)


def _unwatched() -> AbstractContextManager[Any]:
    """Nobody asks after a device whose own call has ended, though others wait for it (found by this simulation)."""
    poll = GroupCall._poll

    def busy_only(self: GroupCall, number: int) -> None:
        if number in self._pending.values():
            poll(self, number)
        else:  # not taken for silent either
            self._heartbeats[number] = replace(self._heartbeats[number], heard_s=self._runtime.now_s())

    return patch.object(GroupCall, "_poll", busy_only)


def _request_stays() -> AbstractContextManager[Any]:
    """A lost controller's request to the autoscaler outlives the run (found by this simulation)."""
    import rayfcp.cluster.driver.following as following

    end_leftovers = following.end_leftovers

    def without(runtime: Any, key: str) -> None:
        with patch.object(runtime, "request", lambda *_, **__: None):
            end_leftovers(runtime, key)

    return patch.object(following, "end_leftovers", without)


def _resumes_wrong_step() -> AbstractContextManager[Any]:
    """Steps after a fall back are planned from one step too far."""
    fall_back = Resume.fall_back

    def wrong(self: Resume, worker_group: Any) -> int:
        return fall_back(self, worker_group) + 1

    return patch.object(Resume, "fall_back", wrong)


def _no_recovery_counted() -> AbstractContextManager[Any]:
    """Recoveries are not counted."""
    record = Session._record

    def silent(self: Session, kind: Any, decision: Any, **given: Any) -> None:
        record(self, kind, replace(decision, reason=""), **given)

    return patch.object(Session, "_record", silent)


@contextmanager
def _all(*patches: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


PLANTED: tuple[Plant, ...] = (
    _mixed_versions,
    _committed_early,
    _old_plans,
    _drain_is_death,
    _dropped_copies,
    _copies_pile_up,
    _torn_copies,
    _one_node_forgotten,
    _stuck_go_on,
    _vacant_for_ever,
    _kept_after_the_end,
    _hung_start,
    _safe_though_lost,
    _unlogged_steps,
    _dispatch_unsafe,
    _nobody_kept_alive,
    _orphans,
    _leaked_devices,
    _unaborted,
    _early_checkpoint,
    _unread_checkpoint,
    _forgotten_step,
    _dead_members,
    _gone_copy_ends_run,
    _planner_not_asked_again,
    _planner_dies_starting,
    _dead_nodes_keep,
    _torn_checkpoint,
    _lossless_resize,
    _unwatched,
    _request_stays,
    _stays_on_leaving_nodes,
    _resumes_wrong_step,
    _no_recovery_counted,
)


RARE = (_forgotten_step,)
"""It takes hundreds of schedules to find this, too many for every run of the tests."""

BY_SCENARIO = {
    _one_node_forgotten: "test_processes_of_a_node_die",
    _dropped_copies: "test_the_loss_of_a_node_costs_the_interval_at_most",
    _lossless_resize: "test_a_resize_that_loses_steps_goes_on_from_the_state_that_is_left",
    _request_stays: "test_the_autoscaler_makes_no_room_for_a_run_that_is_over",
    _unwatched: "test_a_device_that_dies_after_its_own_call_ended_is_found_while_others_wait_for_it",
    _dead_nodes_keep: "test_no_store_is_started_where_a_device_that_stood_by_is_dead",
    _early_checkpoint: "test_checkpoints_of_every_step_are_whole",
    _torn_checkpoint: "test_checkpoints_of_every_step_are_whole",
    _gone_copy_ends_run: "test_a_copy_that_goes_while_it_is_read_ends_no_run",
    _orphans: "test_a_controller_is_not_started_again_for_ever",
    _planner_dies_starting: "test_a_planner_that_dies_while_it_starts_is_replaced",
    _resumes_wrong_step: "test_without_copies_it_goes_on_from_the_checkpoint",
    _safe_though_lost: "test_copies_of_steps_that_are_lost_keep_nothing_safe",
    _dispatch_unsafe: "test_steps_wait_for_slow_copies",
    _unaborted: "test_all_workers_die_at_once_and_no_step_is_lost",
    _unread_checkpoint: "test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken",
    _drain_is_death: "test_a_node_that_leaves_is_left_in_time",
    _stays_on_leaving_nodes: "test_a_node_that_leaves_is_left_in_time",
    _hung_start: "test_a_worker_that_hangs_while_it_starts_gives_its_device_back",
}
"""Few of the drawn schedules show these, or none: the test in `test_scenarios` or `test_memory` that does."""


def first_catch(plant: Plant, *, most: int, first: int = 0) -> tuple[int, str] | None:
    """Number of schedules until one finds the planted fault, and by what; None if `most` do not."""
    with plant():
        for count in range(1, most + 1):
            try:
                simulate(draw(first + count - 1))
            except ViolationError as error:
                return count, str(error).split("\n", maxsplit=1)[0]
            except Exception as error:
                return count, f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    missed = 0
    for plant in PLANTED:
        found = first_catch(plant, most=2000)
        missed += found is None
        what = (plant.__doc__ or "").strip()
        print(f"{plant.__name__[1:]}: {what}", flush=True)  # noqa: T201
        print(f"    {f'schedule {found[0]}: {found[1][:120]}' if found else 'NOT FOUND in 2000'}", flush=True)  # noqa: T201
    print(f"{len(PLANTED) - missed} of {len(PLANTED)} planted faults found")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
