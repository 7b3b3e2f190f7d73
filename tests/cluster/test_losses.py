"""Detection of lost workers, with real processes that are killed and stopped; all others are free afterwards."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from rayfcp.cluster.recovery.store import CopyStore
from rayfcp.cluster.recovery.stores import CopyStores
from rayfcp.cluster.runtime.lifetime import OrphanWatch, keep_alive
from rayfcp.cluster.workers.calls import RanksLostError, WorkerFailedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.cluster.workers.starting import PendingWorkers
from rayfcp.config import Config, ConfigError
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.values import ClusterSpec
from tests.cluster.light import LightWorker, free_cpus_again, light_config, light_start, light_stores
from tests.cluster.processes import lives
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return light_config(tmp_path_factory.mktemp("light"), name="light", num_workers=3, hang_min_s=PATIENCE_S)


@pytest.fixture(scope="module")
def company(config: Config) -> Iterator[tuple[WorkerGroup, PendingWorkers, CopyStores]]:
    """A worker_group, those who fill its gaps, and copy stores that end processes."""
    with free_cpus_again():
        start = light_start(config, run_key="losses")
        copy_stores = light_stores(config, run_key="losses")
        worker_group = WorkerGroup(start, start.open_all(), kill=copy_stores.kill)
        pending = PendingWorkers(start)
        yield worker_group, pending, copy_stores
        pids = [fact.pid for fact in worker_group.facts]
        pending.end()
        worker_group.end()
        copy_stores.end()
        until(lambda: not any(map(lives, pids)))


@pytest.fixture
def worker_group(company: tuple[WorkerGroup, PendingWorkers, CopyStores]) -> Iterator[WorkerGroup]:
    """Three idle members; none of those lost lives on."""
    worker_group, pending, copy_stores = company
    pending.want(3 - len(worker_group), in_use=len(worker_group))
    until(lambda: worker_group.standby.extend(pending.ready()) or len(worker_group.all) == 3)
    worker_group.form(ClusterSpec(num_ranks=3, max_tokens_per_rank=1), [member.id for member in worker_group.all])
    copy_stores.assign(worker_group.members)
    worker_group.call(lambda _, worker: worker.abort.remote())
    worker_group.call(lambda _, worker: worker.rest.remote())
    pids = {fact.pid for fact in worker_group.facts}
    yield worker_group
    lost = pids - {fact.pid for fact in worker_group.facts}
    until(lambda: not any(map(lives, lost)))


def idle(worker_group: WorkerGroup) -> bool:
    """A call of each that lives is answered."""
    return worker_group.call(lambda number, worker: worker.value.remote(number)) == list(range(len(worker_group)))


def test_main_calls_stay_in_one_thread_while_others_are_answered(worker_group: WorkerGroup) -> None:
    threads = {tuple(worker_group.call(lambda _, worker: worker.thread.remote())) for _ in range(5)}
    assert len(threads) == 1
    busy = worker_group.workers[0].exchange.remote()
    assert ray.get(worker_group.workers[0].beat.remote(), timeout=PATIENCE_S).step == 1
    assert ray.get(worker_group.workers[0].shard_copies.remote(), timeout=PATIENCE_S) == ()
    ray.get(worker_group.workers[0].abort.remote(), timeout=PATIENCE_S)
    with pytest.raises(CollectiveFailedError):
        ray.get(busy, timeout=PATIENCE_S)
    assert tuple(worker_group.call(lambda _, worker: worker.thread.remote())) in threads


def test_a_killed_worker_is_named_and_the_others_are_free(worker_group: WorkerGroup) -> None:
    ids, pids = [member.id for member in worker_group.members], [fact.pid for fact in worker_group.facts]
    refs = [worker.exchange.remote() for worker in worker_group.workers]
    until(lambda: not ray.wait(refs, timeout=0.3)[0])
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RanksLostError, match="rank 1 died") as caught:
        worker_group.get(refs)
    assert [(each.id, each.number, each.cause) for each in caught.value.lost] == [(ids[1], 1, "died")]
    assert caught.value.cause == "died"
    assert [member.id for member in worker_group.members] == [ids[0], ids[2]]
    assert idle(worker_group)


def test_a_stopped_worker_is_hung_and_killed(worker_group: WorkerGroup) -> None:
    """Ray cannot end a process that is stopped: its copy store does."""
    hanging = worker_group.members[1]
    refs = [worker.exchange.remote() for worker in worker_group.workers]
    os.kill(hanging.facts.pid, signal.SIGSTOP)
    with pytest.raises(RanksLostError, match="rank 1 hangs: 1 of 3 devices have not answered") as caught:
        worker_group.get(refs, deadline_s=10)  # a busy machine delays other answers, too
    assert [(each.number, each.cause) for each in caught.value.lost] == [(1, "hung")]
    assert idle(worker_group)
    until(lambda: not lives(hanging.facts.pid))


def test_errors_of_the_program_are_raised_at_once(worker_group: WorkerGroup) -> None:
    refs = [worker_group.workers[0].fail.remote(IndexError("out of range")), worker_group.workers[1].exchange.remote()]
    with pytest.raises(WorkerFailedError, match="rank 0 failed: IndexError") as caught:
        worker_group.get(refs)
    assert not isinstance(caught.value, RanksLostError)
    with pytest.raises(ConfigError, match=r"set x"):
        worker_group.get([worker_group.workers[0].fail.remote(ConfigError("set x"))])


def test_an_error_because_another_is_gone_is_a_loss(worker_group: WorkerGroup) -> None:
    """Not every library says what it failed of."""
    os.kill(worker_group.facts[2].pid, signal.SIGKILL)
    until(lambda: not lives(worker_group.facts[2].pid))
    refs = [worker_group.workers[0].fail.remote(RuntimeError("?")), worker_group.workers[1].exchange.remote()]
    with pytest.raises(RanksLostError) as caught:
        worker_group.get(refs)
    assert [each.number for each in caught.value.lost] == [2]
    assert idle(worker_group)


class Impatient:
    """An actor that soon considers itself orphaned, once requested."""

    def outlive_a_watch(self) -> None:
        """One that nobody holds ends nothing."""
        before = set(threading.enumerate())
        watch = OrphanWatch(0.2)
        (looks,) = set(threading.enumerate()) - before
        del watch
        looks.join()

    def orphan_in(self, seconds: float) -> int:
        self._watch = OrphanWatch(seconds)
        return os.getpid()


class ImpatientWorker(Impatient, LightWorker):
    """A worker without calls for long."""


class ImpatientStore(Impatient, CopyStore):
    """A copy store without calls for long."""


def test_orphans_end_and_give_their_devices_back(tmp_path: Path) -> None:
    config = light_config(tmp_path, name="orphan", num_workers=1)
    with free_cpus_again():
        start = light_start(config, run_key="orphans", worker=ImpatientWorker)
        worker_group = WorkerGroup(start, start.open_all())
        store = ray.remote(ImpatientStore).options(num_cpus=0).remote(config, run="orphans")
        ray.get(worker_group.workers[0].outlive_a_watch.remote())
        start._held.pop(worker_group.members[0].id)
        orphans = ray.get([each.orphan_in.remote(0.2) for each in (worker_group.workers[0], store)])
        until(lambda: not any(map(lives, orphans)))
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(store.open.remote())


def test_signs_of_life_are_given_often_enough_until_closed() -> None:
    class Handle:
        num_beats = 0

        @property
        def beat(self) -> "Handle":
            return self

        def remote(self) -> None:
            self.num_beats += 1

    class Periods:
        def every(self, period_s: float, call: Callable[[], object], *, name: str) -> object:
            self.period_s, self.call = period_s, call
            return self

    handles, periods = [Handle(), Handle()], Periods()
    assert keep_alive(periods, 8.0, handles=lambda: handles) is periods, "closing it ends the calls"
    periods.call()
    periods.call()
    assert [each.num_beats for each in handles] == [2, 2] and periods.period_s <= 8.0 / 2
    watch = OrphanWatch(PATIENCE_S)
    watch.on_call()
    assert not watch.is_quiet() and watch.is_quiet()


def test_the_class_of_workers_is_the_callers(tmp_path: Path) -> None:
    config = light_config(tmp_path, name="own", num_workers=1)
    with free_cpus_again():
        start = light_start(config, run_key="own", worker=LightWorker)
        worker_group = WorkerGroup(start, start.open_all())
        assert idle(worker_group)
        worker_group.end()
