"""Losses that are more than one worker in the middle of a step: each run ends as if nothing had happened."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from rayfcp.config import Config, dump_config
from rayfcp.values import StepReport
from tests.chaos.reference import Undisturbed
from tests.cluster.light import free_cpus_again
from tests.cluster.processes import lives
from tests.cluster.recovering import pids
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.cluster.test_cli_runs import Command
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")

RELATIVE = 1e-4
ENDLESS = 100_000
CONTROLLER, WORKER, KEEPER = "Controller", "PickyWorker", "Keeper"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recoveries")
    write_texts(path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Undisturbed]:
    with closing(Undisturbed(run_config(folder, name="alone"))) as run:
        yield run


def assert_undisturbed(config: Config, run: Undisturbed) -> tuple[StepReport, ...]:
    """Each step of the run is in its log once, with the samples and the loss of a run on one device."""
    found = steps_of(config)
    alone = run.first(len(found))
    assert [report.step for report in found] == list(range(1, len(found) + 1))
    assert [report.samples_hash for report in found] == [report.samples_hash for report in alone]
    for have, wanted in zip(found, alone, strict=True):
        assert have.loss == pytest.approx(wanted.loss, rel=RELATIVE)
    return found


def test_a_driver_that_is_killed_is_started_again(folder: Path, alone: Undisturbed) -> None:
    """As `ray job submit` does: the same command, on the cluster where the first one's workers live on."""
    address = ray.get_runtime_context().gcs_address
    config = run_config(folder, name="driver", cluster={"address": address}, train={"steps": 60})
    (folder / "driver.yaml").write_text(dump_config(config))
    with free_cpus_again():
        first = Command(folder / "driver.yaml", folder=folder)
        try:
            until(lambda: Path(config.run_dir, "steps.jsonl").exists() and len(steps_of(config)) >= 3)
            left = pids("RankWorker") + pids(KEEPER)
            assert len(left) == 3
        finally:
            first.process.kill()
        first.process.wait()
        written = Command(folder / "driver.yaml", folder=folder).ends_with(0)
    assert "going on with 2 workers whose controller is gone" in written and "from copies in memory" in written
    assert len(assert_undisturbed(config, alone)) == 60
    until(lambda: not any(lives(pid) for pid in left))
    assert not ray.util.list_named_actors(all_namespaces=True)
    assert {each["state"] for each in placement_group_table().values()} <= {"REMOVED"}
