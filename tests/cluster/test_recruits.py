"""Workers for missing devices come by themselves; a new controller finds those that live."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from rayfcp.cluster.adoption import end_leftovers, find_living
from rayfcp.cluster.crew import Crew
from rayfcp.cluster.keeping import Keeping
from rayfcp.cluster.placement import ask
from rayfcp.cluster.pushing import Waited
from rayfcp.cluster.recruits import Recruits
from rayfcp.config import Config
from rayfcp.execute.reports import CollectiveFailedError
from tests.cluster.light import (
    LightWorker,
    bytes_of,
    copies_at,
    free_cpus_again,
    light_config,
    light_start,
    shard,
    until,
)
from tests.cluster.processes import lives

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return light_config(tmp_path_factory.mktemp("light"), name="recruits", num_workers=2)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with free_cpus_again():
        yield


def opened(recruits: Recruits, *, count: int) -> list:
    """Workers that were opened, so many of them."""
    found: list = []
    until(lambda: bool(found.extend(recruits.ready()) or len(found) >= count), timeout_s=60)
    return found


def test_they_come_without_waiting_and_what_is_not_wanted_any_more_goes(config: Config) -> None:
    recruits = Recruits(light_start(config, run_key="come"))
    start_s = time.monotonic()
    recruits.want(2, in_use=0)
    assert recruits.num_pending == 2
    assert time.monotonic() - start_s < 5
    recruits.want(1, in_use=1)
    assert recruits.num_pending == 1
    (member,) = opened(recruits, count=1)
    assert lives(member.facts.pid)
    assert member.facts.worker_id == member.id
    assert recruits.num_pending == 0
    recruits.end()
    member.end()
    until(lambda: not lives(member.facts.pid))


def test_more_than_there_is_stays_pending(config: Config) -> None:
    """Fewer wait once fewer are missing; nothing stays reserved at the end."""
    wide = config.model_copy(update={"train": config.train.model_copy(update={"threads_per_worker": 3})})
    recruits = Recruits(light_start(wide, run_key="many"))
    recruits.want(40, in_use=0)
    found = opened(recruits, count=2)
    assert recruits.num_pending == 40 - len(found)
    recruits.end()
    assert recruits.num_pending == 0
    for member in found:
        member.end()


class BrokenWorker(LightWorker):
    """Cannot open where it is."""

    def open(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_one_that_cannot_open_is_asked_for_anew_after_a_while(config: Config) -> None:
    recruits = Recruits(light_start(config, run_key="broken", worker=BrokenWorker))
    recruits.want(1, in_use=0)
    until(lambda: not recruits.ready() and recruits.num_pending == 0, timeout_s=60)
    until(lambda: not recruits.ready() and recruits.num_pending == 1)
    recruits.end()


def test_a_new_controller_finds_who_lives_and_ends_the_silent(config: Config) -> None:
    crew = Crew.launch(light_start(config, run_key="left"), stopped=lambda: False)
    keeping = Keeping(config, run_key="left")
    keeping.cover(crew.members)
    header = shard(4)
    crew.workers[0].keep.remote(header, bytes_of(header))
    assert ray.get(crew.workers[0].await_kept.remote(header.state, timeout_s=30)) == Waited.KEPT
    forgotten = ask(config, device="cpu", run_key="left")
    busy = crew.workers[0].exchange.remote()
    os.kill(crew.facts[1].pid, signal.SIGSTOP)
    living = find_living("left", timeout_s=5)
    with pytest.raises(CollectiveFailedError):
        ray.get(busy)
    (member,) = living.members
    assert (member.id, member.facts) == (crew.members[0].id, crew.facts[0])
    assert [source.header for source in copies_at({member.id: member.handle})] == [header]
    adopted = Keeping(config, run_key="left", adopted=living.keepers)
    assert [source.header for source in copies_at(adopted.keepers)] == [header]
    assert forgotten.id.hex() not in {
        id for id, each in ray.util.placement_group_table().items() if each["state"] != "REMOVED"
    }
    adopted.cover(crew.members)
    keeping.kill(crew.facts[1])
    until(lambda: not lives(crew.facts[1].pid))
    second = Crew(light_start(config, run_key="left"), living.members)
    assert second.each(lambda _, worker: worker.value.remote(3)) == [3]
    end_leftovers("left")
    until(lambda: not lives(member.facts.pid))
    living = find_living("left", timeout_s=1)
    assert (living.members, dict(living.keepers)) == ((), {})
    for each in (crew, second, keeping, adopted):
        each.end()


def test_nobody_is_found_of_a_run_that_never_was(tmp_path: Path) -> None:
    living = find_living("never", timeout_s=1)
    assert (living.members, dict(living.keepers)) == ((), {})
