"""Losses that are more than one worker in the middle of a step: each run ends as if nothing had happened."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from rayfcp.cluster import FlexTrainer, RunFailedError
from rayfcp.cluster.checkpoints import CheckpointFolder
from rayfcp.config import Config, dump_config
from rayfcp.telemetry.events import EventKind, read_events
from rayfcp.telemetry.names import METRICS, Kind
from rayfcp.values import StepReport
from tests.chaos.reference import Undisturbed
from tests.cluster.light import free_cpus_again, until
from tests.cluster.processes import lives
from tests.cluster.recovering import PickyWorker, Trouble, close, kill, pids, reopen
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.cluster.test_cli_runs import Command
from tests.telemetry.scraping import Samples, scrape_run, total

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


def test_losses_before_the_first_step_and_in_the_last_save(folder: Path, alone: Undisturbed) -> None:
    config = run_config(folder, name="early", cluster={"num_workers": [1, 3]}, train={"steps": 6})
    first = {start: lambda: kill(pids(WORKER)[0]) for start in ("joining", "measuring", "saving")}
    trouble = Trouble(on_line=first)
    with free_cpus_again():
        result = FlexTrainer(config, worker=PickyWorker).fit(watcher=trouble)
    assert trouble.is_over
    assert result.checkpoint is not None and result.metrics["last_step"] == 6
    assert_undisturbed(config, alone)


def test_the_controller_is_lost_and_workers_stay(folder: Path, alone: Undisturbed) -> None:
    config = run_config(folder, name="controller", train={"steps": ENDLESS})
    workers: list[list[int]] = []

    def strike() -> None:
        workers.append(pids(WORKER) + pids(KEEPER))
        kill(*pids(CONTROLLER))

    served: list[Samples] = []

    def look() -> None:
        workers.append(pids(WORKER) + pids(KEEPER))
        served.append(scrape_run(config.run_dir))

    trouble = Trouble({3: strike, 6: strike, 9: look}, end=lambda report: True)
    with free_cpus_again():
        FlexTrainer(config, worker=PickyWorker).fit(watcher=trouble)
    reports = assert_undisturbed(config, alone)
    done = reports[: int(total(served[0], "step"))]
    assert total(served[0], "tokens_total") == sum(report.num_tokens for report in done)
    assert total(served[0], "strategy_steps_total") == len(done) >= 9
    assert len(workers[0]) == 3 and workers[0] == workers[1] == workers[2]
    assert len(trouble.said("from copies in memory")) == 2
    assert len(trouble.said("the controller was lost and starts again")) == 2


def test_a_worker_lost_with_its_keeper_costs_the_way_from_the_last_checkpoint(folder: Path, alone: Undisturbed) -> None:
    config = run_config(folder, name="kept", train={"steps": 60}, checkpoint={"every_steps": 30})

    def strike() -> None:
        kill(*pids(KEEPER), pids(WORKER)[0])

    def strike_all() -> None:
        kill(*pids(KEEPER), *pids(WORKER))

    served: list[Samples] = []

    def look() -> None:
        served.append(scrape_run(config.run_dir))

    trouble = Trouble({4: strike, 40: strike_all, 50: lambda: kill(pids(WORKER)[0]), 55: look})
    with free_cpus_again():
        FlexTrainer(config, worker=PickyWorker).fit(watcher=trouble)
    assert trouble.is_over
    assert_undisturbed(config, alone)
    names = {metric.name: metric.name + "_count" * (metric.kind is Kind.HISTOGRAM) for metric in METRICS}
    del names["worker_encode_seconds"]  # of models that see
    found = {name: total(served[0], sample) for name, sample in names.items()}
    assert found["recoveries_total"] == 3 and found["lost_steps_total"] > 0 and found["checkpoint_step"] == 30
    assert found["sequences_skipped_total"] == 2 and 1 <= found["world_size"] <= 2
    assert len(trouble.said("going on from the beginning, for there is no checkpoint")) == 1
    assert len(trouble.said("going on from the checkpoint of step 30")) == 1
    told = read_events(Path(config.run_dir) / "events.jsonl")
    recoveries = [event for event in told if event.kind is EventKind.RECOVERY]
    assert (told[0].kind, len(recoveries), told[-1].kind) == (EventKind.START, 3, EventKind.END)
    assert sum(event.lost_steps for event in recoveries) == found["lost_steps_total"]
    assert all(event.cause and event.seconds > 0 and event.reason for event in recoveries)


def test_stages_shrink_to_one_device_and_come_back(folder: Path, alone: Undisturbed) -> None:
    config = run_config(
        folder,
        name="stages",
        cluster={"num_workers": 4, "pipeline_stages": 2},
        plan={"strategy": "elastic-pipeline"},
        train={"steps": ENDLESS},
    )

    def first() -> None:
        close(config)
        kill(pids(WORKER)[0])

    def more() -> None:
        kill(pids(WORKER)[0])

    trouble = Trouble(
        {2: first, 5: more, 8: more},
        on_size={1: lambda: reopen(config)},
        end=lambda report: report.world_size == 4,
    )
    with free_cpus_again():
        FlexTrainer(config, worker=PickyWorker).fit(watcher=trouble)
    assert trouble.is_over
    reports = assert_undisturbed(config, alone)
    sizes = [report.world_size for report in reports]
    assert list(dict.fromkeys(sizes)) == [4, 2, 1]
    assert sizes[-1] == 4 and {report.strategy for report in reports if report.world_size > 1} == {"elastic-pipeline"}
    assert {report.strategy for report in reports if report.world_size == 1} == {"flex-ring"}


def few(folder: Path, *, name: str, wait_s: float) -> Config:
    """A run that needs three of its four workers."""
    elastic = {"wait_s": wait_s, "look_every_s": 0.2}
    return run_config(folder, name=name, cluster={"num_workers": [3, 4]}, train={"steps": ENDLESS}, elastic=elastic)


def test_too_few_devices_are_waited_for_and_what_they_hold_is_saved_before_the_end(
    folder: Path, alone: Undisturbed
) -> None:
    """Half of the devices go, and nothing comes in time. Started again, with devices that come while it waits."""
    config = few(folder, name="few", wait_s=3)

    def strike() -> None:
        close(config)
        kill(*pids(WORKER)[:2])

    trouble = Trouble({3: strike})
    with free_cpus_again(), pytest.raises(RunFailedError, match=r"none came in elastic\.wait_s \(3 s\).* is saved in"):
        FlexTrainer(config, worker=PickyWorker).fit(watcher=trouble)
    saved = len(steps_of(config))
    assert saved >= 3
    reopen(config)
    again = few(folder, name="few", wait_s=100)

    trouble = Trouble({saved + 2: strike}, on_line={"2 devices died": lambda: reopen(config)}, end=lambda report: True)
    with free_cpus_again():
        FlexTrainer(again, worker=PickyWorker).fit(watcher=trouble)
    assert trouble.is_over and trouble.said(f"going on after step {saved}")
    assert_undisturbed(config, alone)


@pytest.mark.parametrize("every", [3, 0])
def test_few_copies_or_none(every: int, folder: Path, alone: Undisturbed) -> None:
    """Copies of every third step cost up to three finished steps; without copies there are checkpoints, and growth."""
    config = run_config(
        folder,
        name=f"every-{every}",
        cluster={"num_workers": [1, 2]},
        train={"steps": ENDLESS},
        checkpoint={"every_steps": 5},
        elastic={"snapshot_every_steps": every},
    )

    def strike() -> None:
        saved = CheckpointFolder(Path(config.run_dir) / "checkpoints", keep=2)
        until(lambda: saved.latest() is not None)  # it is written beside the steps after it
        close(config)
        kill(pids(WORKER)[0])

    trouble = Trouble({8: strike}, on_size={1: lambda: reopen(config)}, end=lambda report: report.world_size == 2)
    with free_cpus_again():
        FlexTrainer(config, worker=PickyWorker).fit(watcher=trouble)
    reports = assert_undisturbed(config, alone)
    assert list(dict.fromkeys(report.world_size for report in reports)) == [2, 1]
    assert len(trouble.said("going on from the checkpoint of step ")) == (0 if every else 1)


def test_a_driver_that_is_killed_is_started_again(folder: Path, alone: Undisturbed) -> None:
    """As `ray job submit` does: the same command, on the cluster where the first one's workers live on."""
    address = ray.get_runtime_context().gcs_address
    config = run_config(folder, name="driver", cluster={"address": address}, train={"steps": 60})
    (folder / "driver.yaml").write_text(dump_config(config))
    with free_cpus_again():
        first = Command(folder / "driver.yaml", folder=folder)
        try:
            until(lambda: Path(config.run_dir, "steps.jsonl").exists() and len(steps_of(config)) >= 3, timeout_s=120)
            left = pids("RankWorker") + pids(KEEPER)
            assert len(left) == 3
        finally:
            first.process.kill()
        first.process.wait()
        written = Command(folder / "driver.yaml", folder=folder).ends_with(0, seconds=200)
    assert "going on with 2 workers whose controller is gone" in written and "from copies in memory" in written
    assert len(assert_undisturbed(config, alone)) == 60
    until(lambda: not any(lives(pid) for pid in left))
    assert not ray.util.list_named_actors(all_namespaces=True)
    assert {each["state"] for each in placement_group_table().values()} <= {"REMOVED"}


def test_tensor_parallel_ranks_shrink_and_come_back(folder: Path, alone: Undisturbed) -> None:
    """Two ranks of two devices each; what is left of a rank stands by."""
    config = run_config(
        folder, name="split", cluster={"num_workers": 4, "tensor_parallel": 2}, train={"steps": ENDLESS}
    )

    def strike() -> None:
        close(config)
        kill(pids(WORKER)[0])

    trouble = Trouble({3: strike}, on_size={2: lambda: reopen(config)}, end=lambda report: report.world_size == 4)
    with free_cpus_again():
        FlexTrainer(config, worker=PickyWorker).fit(watcher=trouble)
    assert trouble.is_over
    reports = assert_undisturbed(config, alone)
    assert list(dict.fromkeys(report.world_size for report in reports)) == [4, 2]
    assert trouble.said("as 1 rank, 1 standing by")
