"""Fresh processes on real actors: survivors that cannot abort their exchanges, and processes that stand by."""

import threading
from pathlib import Path

import pytest
from ray._private.state import actors

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.runtime.lifetime import STANDBY, WORKER
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config
from rayfcp.telemetry.events import EventKind, read_events
from tests.cluster.processes import lives
from tests.cluster.recovering import Trouble, kill
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("ray_cluster")


class HangingWorker(DeviceWorker):
    """Cannot abort its exchanges, as with a communicator that does not end: whoever tries waits for ever."""

    def open(self) -> DeviceFacts:
        facts = super().open()
        self._engine.abort = threading.Event().wait  # type: ignore[method-assign, assignment]
        return facts


def processes(kind: str, *, of: Config) -> list[int]:
    """Of the run's workers, or of those that stand by, in the order of their names."""
    prefix = f"{of.run.name}-"
    found = [each for each in actors().values() if each["Name"].startswith(prefix) and f"/{kind}/" in each["Name"]]
    return [each["Pid"] for each in sorted(found, key=lambda each: each["Name"]) if each["Pid"] and lives(each["Pid"])]


def fresh_config(folder: Path, *, name: str, steps: int = 20_000, **elastic: object) -> Config:
    """By default with more steps than any test waits for."""
    elastic |= {"snapshot_every_steps": 10, "leave_timeout_s": 1.0, "hang_min_s": PATIENCE_S}
    return run_config(folder, name=name, train={"steps": steps}, elastic=elastic)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh")
    write_texts(folder)
    return folder


@pytest.mark.parametrize("standbys", [0, 2])
def test_survivors_that_cannot_abort_lose_no_step(folder: Path, standbys: int) -> None:
    config = fresh_config(folder, name=f"hanging-{standbys}", standby_workers=standbys)
    first: list[int] = []

    def strike() -> None:
        """Steps go on until all processes stand by."""
        until(lambda: len(processes(STANDBY, of=config)) == standbys)
        first.extend(processes(WORKER, of=config))
        kill(first[0])

    heard = Trouble({3: strike}, end=lambda report: report.recovered)
    FlexTrainer(config, worker=HangingWorker).fit(watcher=heard)
    found = steps_of(config)
    want = fresh_config(folder, name=f"undisturbed-{standbys}", steps=len(found))
    FlexTrainer(want).fit()
    for mine, other in zip(found, steps_of(want), strict=True):
        assert mine.samples_hash == other.samples_hash
        assert mine.loss == pytest.approx(other.loss, rel=1e-4 if mine.step <= 100 else 1e-2)
    events = read_events(Path(config.run_dir) / "events.jsonl")
    (recovery,) = [each for each in events if each.kind is EventKind.RECOVERY]
    assert (recovery.devices, recovery.lost_steps) == (2, 0)
    assert not any(lives(pid) for pid in first), "the survivor got a fresh process too"
    assert not processes(WORKER, of=config) and not processes(STANDBY, of=config)
