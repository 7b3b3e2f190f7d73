"""Who is lost, found out with real processes that are killed and stopped; all others are free afterwards."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import ray

from rayfcp.cluster.recovery.losses import Diagnosis, Pulse, RanksLostError, WorkerFailedError, judge_silence
from rayfcp.cluster.recovery.stores import Keeper, Keeping
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.group import Crew
from rayfcp.cluster.workers.lifetime import OrphanWatch
from rayfcp.cluster.workers.members import keep_alive
from rayfcp.cluster.workers.pending import Recruits
from rayfcp.config import Config, ConfigError
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.values import ClusterSpec
from tests.cluster.light import LightWorker, free_cpus_again, light_config, light_start
from tests.cluster.processes import lives
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return light_config(tmp_path_factory.mktemp("light"), name="light", num_workers=3, hang_min_s=PATIENCE_S)


@pytest.fixture(scope="module")
def company(config: Config) -> Iterator[tuple[Crew, Recruits, Keeping]]:
    """A crew, those who fill its gaps, and keepers that end processes."""
    with free_cpus_again():
        start = light_start(config, run_key="losses")
        crew, recruits = Crew.launch(start, stopped=lambda: False), Recruits(start, autoscale=False)
        keeping = Keeping(config, runtime=RayRuntime(), run_key="losses")
        crew.kill = keeping.kill
        yield crew, recruits, keeping
        pids = [fact.pid for fact in crew.facts]
        recruits.end()
        crew.end()
        keeping.end()
        until(lambda: not any(map(lives, pids)))


@pytest.fixture
def crew(company: tuple[Crew, Recruits, Keeping]) -> Iterator[Crew]:
    """Three idle members; none of those lost lives on."""
    crew, recruits, keeping = company
    recruits.want(3 - len(crew), in_use=len(crew))
    until(lambda: crew.add(recruits.ready()) or len(crew.all) == 3)
    crew.form(ClusterSpec(num_ranks=3, max_tokens_per_rank=1), [member.id for member in crew.all])
    keeping.cover(crew.members)
    crew.each(lambda _, worker: worker.abort.remote())
    crew.each(lambda _, worker: worker.rest.remote())
    pids = {fact.pid for fact in crew.facts}
    yield crew
    lost = pids - {fact.pid for fact in crew.facts}
    until(lambda: not any(map(lives, lost)))


def idle(crew: Crew) -> bool:
    """A call of each that lives is answered."""
    return crew.each(lambda number, worker: worker.value.remote(number)) == list(range(len(crew)))


def test_main_calls_stay_in_one_thread_while_others_are_answered(crew: Crew) -> None:
    threads = {tuple(crew.each(lambda _, worker: worker.thread.remote())) for _ in range(5)}
    assert len(threads) == 1
    busy = crew.workers[0].exchange.remote()
    assert ray.get(crew.workers[0].beat.remote(), timeout=PATIENCE_S).step == 1
    assert ray.get(crew.workers[0].headers.remote(), timeout=PATIENCE_S) == ()
    ray.get(crew.workers[0].abort.remote(), timeout=PATIENCE_S)
    with pytest.raises(CollectiveFailedError):
        ray.get(busy, timeout=PATIENCE_S)
    assert tuple(crew.each(lambda _, worker: worker.thread.remote())) in threads


def test_a_killed_worker_is_named_and_the_others_are_free(crew: Crew) -> None:
    ids, pids = [member.id for member in crew.members], [fact.pid for fact in crew.facts]
    refs = [worker.exchange.remote() for worker in crew.workers]
    until(lambda: not ray.wait(refs, timeout=0.3)[0])
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RanksLostError, match="rank 1 died") as caught:
        crew.gather(refs)
    assert [(each.id, each.number, each.cause) for each in caught.value.lost] == [(ids[1], 1, "died")]
    assert caught.value.cause == "died"
    assert [member.id for member in crew.members] == [ids[0], ids[2]]
    assert idle(crew)


def test_a_stopped_worker_is_hung_and_killed(crew: Crew) -> None:
    """Ray cannot end a process that is stopped: its keeper does."""
    pid, silence = crew.facts[1].pid, judge_silence(2)

    def judge(pulses: Sequence[Pulse]) -> Diagnosis:
        return silence([each for each in pulses if each.number == 1])  # a busy machine lets others be silent, too

    refs = [worker.exchange.remote() for worker in crew.workers]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RanksLostError, match="rank 1 hangs: gave no sign of life for 2 s") as caught:
        crew.gather(refs, judge=judge)
    assert [(each.number, each.cause) for each in caught.value.lost] == [(1, "hung")]
    assert idle(crew)
    until(lambda: not lives(pid))


def test_errors_of_the_program_are_raised_at_once(crew: Crew) -> None:
    refs = [crew.workers[0].fail.remote(IndexError("out of range")), crew.workers[1].exchange.remote()]
    with pytest.raises(WorkerFailedError, match="rank 0 failed: IndexError") as caught:
        crew.gather(refs)
    assert not isinstance(caught.value, RanksLostError)
    with pytest.raises(ConfigError, match=r"set x"):
        crew.gather([crew.workers[0].fail.remote(ConfigError("set x"))])


def test_an_error_because_another_is_gone_is_a_loss(crew: Crew) -> None:
    """Not every library says what it failed of."""
    os.kill(crew.facts[2].pid, signal.SIGKILL)
    until(lambda: not lives(crew.facts[2].pid))
    refs = [crew.workers[0].fail.remote(RuntimeError("?")), crew.workers[1].exchange.remote()]
    with pytest.raises(RanksLostError) as caught:
        crew.gather(refs)
    assert [each.number for each in caught.value.lost] == [2]
    assert idle(crew)


class Impatient:
    """What soon takes itself for an orphan once it was told to."""

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
    """As a worker that nobody has called for long."""


class ImpatientKeeper(Impatient, Keeper):
    """As a keeper that nobody has called for long."""


def test_orphans_end_and_give_their_devices_back(tmp_path: Path) -> None:
    config = light_config(tmp_path, name="orphan", num_workers=1)
    with free_cpus_again():
        start = light_start(config, run_key="orphans", worker=ImpatientWorker)
        crew = Crew.launch(start, stopped=lambda: False)
        keeper = ray.remote(ImpatientKeeper).options(num_cpus=0).remote(orphan_s=PATIENCE_S)
        ray.get(crew.workers[0].outlive_a_watch.remote())
        start.let_go(crew.members[0].id)
        orphans = ray.get([each.orphan_in.remote(0.2) for each in (crew.workers[0], keeper)])
        until(lambda: not any(map(lives, orphans)))
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(keeper.open.remote())


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
    watch.heard()
    assert not watch.is_quiet() and watch.is_quiet()


def test_the_class_of_workers_is_the_callers(tmp_path: Path) -> None:
    config = light_config(tmp_path, name="own", num_workers=1)
    with free_cpus_again():
        runtime = RayRuntime(LightWorker)
        crew = Crew.start(
            config, runtime=runtime, device="cpu", data_dir="", vocab_size=256, stopped=lambda: False, run_key="own"
        )
        assert idle(crew)
        crew.end()
