"""Who is lost, found out with real processes that are killed and stopped; all others are free afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import ray

from rayfcp.cluster.crew import Crew
from rayfcp.cluster.keeper import Keeper
from rayfcp.cluster.keeping import Keeping
from rayfcp.cluster.losses import Diagnosis, Pulse, RanksLostError, WorkerFailedError
from rayfcp.cluster.recruits import Recruits
from rayfcp.config import Config, ConfigError
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.values import ClusterSpec
from tests.cluster.light import LightWorker, free_cpus_again, light_config, light_start, until
from tests.cluster.processes import lives

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return light_config(tmp_path_factory.mktemp("light"), name="light", num_workers=3, hang_min_s=2.0)


@pytest.fixture(scope="module")
def company(config: Config) -> Iterator[tuple[Crew, Recruits, Keeping]]:
    """A crew, those who fill its gaps, and keepers that end processes."""
    with free_cpus_again():
        start = light_start(config, run_key="losses")
        crew, recruits = Crew.launch(start, stopped=lambda: False), Recruits(start, autoscale=False)
        keeping = Keeping(config, run_key="losses")
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
    while len(crew.all) < 3:
        crew.add(recruits.ready())
        time.sleep(0.01)
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
    assert ray.get(crew.workers[0].beat.remote(), timeout=5).step == 1
    assert ray.get(crew.workers[0].headers.remote(), timeout=5) == ()
    ray.get(crew.workers[0].abort.remote(), timeout=5)
    with pytest.raises(CollectiveFailedError):
        ray.get(busy, timeout=5)
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


def test_two_killed_at_once_are_both_named(crew: Crew) -> None:
    refs = [worker.exchange.remote() for worker in crew.workers]
    until(lambda: not ray.wait(refs, timeout=0.3)[0])
    for number in (0, 2):
        os.kill(crew.facts[number].pid, signal.SIGKILL)
    with pytest.raises(RanksLostError) as caught:
        crew.gather(refs)
    assert [each.number for each in caught.value.lost] == [0, 2]
    assert len(crew) == 1
    assert idle(crew)


def test_one_who_died_after_its_own_call_is_found_when_others_fail(crew: Crew) -> None:
    def call(number: int, worker: object) -> object:
        return worker.value.remote(0) if number == 0 else worker.exchange.remote()

    refs = [call(number, worker) for number, worker in enumerate(crew.workers)]
    ray.get(refs[0])
    os.kill(crew.facts[0].pid, signal.SIGKILL)
    ray.get(crew.workers[1].abort.remote())
    with pytest.raises(RanksLostError) as caught:
        crew.gather(refs)
    assert [(each.number, each.cause) for each in caught.value.lost] == [(0, "died")]
    assert idle(crew)


def test_an_exchange_that_fails_while_all_live_is_nobodys_loss(crew: Crew) -> None:
    refs = [worker.exchange.remote() for worker in crew.workers]
    ray.get(crew.workers[2].abort.remote())
    freed = []
    with pytest.raises(RanksLostError, match=r"rank \d failed: .*aborted") as caught:
        crew.gather(refs, freeing=lambda: freed.append(True))
    assert (caught.value.cause, caught.value.lost, freed) == ("collective", (), [True])
    assert len(crew) == 3
    assert idle(crew)


def test_a_stopped_worker_is_hung_and_killed(crew: Crew) -> None:
    """Ray cannot end a process that is stopped: its keeper does."""
    pid = crew.facts[1].pid
    refs = [worker.exchange.remote() for worker in crew.workers]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RanksLostError, match="rank 1 hangs: gave no sign of life for 2 s") as caught:
        crew.gather(refs)
    assert [(each.number, each.cause) for each in caught.value.lost] == [(1, "hung")]
    assert idle(crew)
    until(lambda: not lives(pid))


def test_one_whose_call_no_abort_ends_is_hung(crew: Crew) -> None:
    refs = [(worker.never if number == 2 else worker.exchange).remote() for number, worker in enumerate(crew.workers)]

    def judge(pulses: Sequence[Pulse]) -> Diagnosis:
        assert all(pulse.silent_s < 2 for pulse in pulses)
        return Diagnosis(stuck=all(pulse.beat is not None for pulse in pulses), reason="no progress")

    with pytest.raises(RanksLostError, match="an exchange hangs: no progress") as caught:
        crew.gather(refs, judge=judge)
    assert [(each.number, each.cause) for each in caught.value.lost] == [(2, "hung")]
    assert idle(crew)


def test_errors_of_the_program_are_raised_at_once(crew: Crew) -> None:
    start_s = time.monotonic()
    refs = [crew.workers[0].fail.remote(IndexError("out of range")), crew.workers[1].exchange.remote()]
    with pytest.raises(WorkerFailedError, match="rank 0 failed: IndexError") as caught:
        crew.gather(refs)
    assert not isinstance(caught.value, RanksLostError)
    with pytest.raises(ConfigError, match=r"set x"):
        crew.gather([crew.workers[0].fail.remote(ConfigError("set x"))])
    assert time.monotonic() - start_s < 5


def test_an_error_because_another_is_gone_is_a_loss(crew: Crew) -> None:
    """Not every library says what it failed of."""
    os.kill(crew.facts[2].pid, signal.SIGKILL)
    until(lambda: not lives(crew.facts[2].pid))
    refs = [crew.workers[0].fail.remote(RuntimeError("?")), crew.workers[1].exchange.remote()]
    with pytest.raises(RanksLostError) as caught:
        crew.gather(refs)
    assert [each.number for each in caught.value.lost] == [2]
    assert idle(crew)


def test_orphans_end_and_give_their_devices_back(tmp_path: Path) -> None:
    config = light_config(tmp_path, name="orphan", num_workers=1, orphan_s=1.0)
    with free_cpus_again():
        start = light_start(config, run_key="orphans")
        crew = Crew.launch(start, stopped=lambda: False)
        keeper = ray.remote(Keeper).options(num_cpus=0).remote(orphan_s=1.0)
        ray.get(keeper.open.remote())
        long = crew.workers[0].never.remote()
        assert ray.wait([long], timeout=3)[1], "kept alive by signs of life"
        start.let_go(crew.members[0].id)
        until(lambda: not lives(crew.facts[0].pid))
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(keeper.open.remote())


def test_a_watch_that_nobody_holds_ends_nothing() -> None:
    code = (
        "import threading; from rayfcp.cluster.orphans import OrphanWatch\n"
        "watch = OrphanWatch(0.5); (looks,) = [each for each in threading.enumerate() if each.name == 'orphan watch']\n"
        "DROP; looks.join(30); print('lives')"
    )
    for drop, said in (("del watch", "lives\n"), ("pass", "")):
        found = subprocess.run(
            [sys.executable, "-c", code.replace("DROP", drop)], capture_output=True, text=True, check=False
        )
        assert (found.stdout, found.returncode) == (said, 0 if said else 1), found.stderr


def test_the_class_of_workers_is_the_callers(config: Config) -> None:
    with free_cpus_again():
        crew = Crew.start(
            config, device="cpu", data_dir="", vocab_size=256, stopped=lambda: False, run_key="own", worker=LightWorker
        )
        assert idle(crew)
        crew.end()
