"""Workers for missing devices come by themselves; a new controller finds those that live."""

from collections.abc import Iterator

import pytest

from rayfcp.cluster.workers.starting import PendingWorkers
from rayfcp.config import Config
from tests.cluster.light import (
    free_cpus_again,
    light_config,
    light_start,
)
from tests.cluster.processes import lives
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return light_config(tmp_path_factory.mktemp("light"), name="pending", num_workers=2)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with free_cpus_again():
        yield


def opened(pending: PendingWorkers, *, count: int) -> list:
    """Workers that were opened, so many of them."""
    found: list = []
    until(lambda: bool(found.extend(pending.ready()) or len(found) >= count))
    return found


def test_they_come_without_waiting_and_what_is_not_wanted_any_more_goes(config: Config) -> None:
    start = light_start(config, run_key="come")
    pending = PendingWorkers(start)
    pending.want(2, in_use=0)
    assert len(pending.requested_s) == 2
    pending.want(1, in_use=1)
    assert len(pending.requested_s) == 1
    (member,) = opened(pending, count=1)
    assert lives(member.facts.pid)
    assert member.facts.worker_id == member.id
    assert len(pending.requested_s) == 0
    pending.end()
    start.end(member)
    until(lambda: not lives(member.facts.pid))
