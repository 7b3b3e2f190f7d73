"""Runs on storage that fails: files that cannot grow, checkpoints that were changed. Real errors of the kernel."""

import resource
import shutil
from pathlib import Path
from urllib.request import urlopen

import pytest

from rayfcp.cluster import FlexTrainer, export_run
from rayfcp.cluster.checkpoints import CheckpointFolder, read_manifest
from rayfcp.config import Config
from rayfcp.execute.integrity import find_damage
from rayfcp.telemetry.targets import SD_FILE
from rayfcp.values import StepReport
from tests.cluster.processes import descendants
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(3 * PATIENCE_S)]

LIMIT_BYTES = 100_000
"""Less than a device's part of a checkpoint, more than its log."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    write_texts(path)
    return path


@pytest.fixture(scope="module")
def trained(folder: Path) -> Config:
    """A run of six steps with two checkpoints."""
    config = run_config(folder, name="trained", train={"steps": 6}, checkpoint={"every_steps": 3, "keep": 3})
    FlexTrainer(config).fit()
    return config


def again(trained: Config, *, name: str, steps: int) -> Config:
    """A copy of that run, to go on with."""
    folder = Path(trained.run_dir).parent
    shutil.copytree(trained.run_dir, folder / name)
    return run_config(folder, name=name, train={"steps": steps}, checkpoint={"keep": 3})


class FullDisk:
    """Once workers are there one of them may write no large file, until `failures` saves have failed (-1: for good).
    Ctrl-C is pressed once a checkpoint was written all the same."""

    def __init__(self, run_dir: str, *, failures: int) -> None:
        self._sd_file, self._failures = Path(run_dir) / SD_FILE, failures
        self._written = Path(run_dir) / "checkpoints"
        self.lines: list[str] = []
        self.metrics = ""

    def say(self, text: str) -> None:
        self.lines.append(text)
        if text == "measuring devices":
            self._limit(LIMIT_BYTES)
        if len(self.failed) == self._failures:
            self._limit(resource.RLIM_INFINITY)

    def update(self, report: StepReport) -> None:
        if self.failed and not self.metrics and self._sd_file.exists():
            target = self._sd_file.read_text().split('"')[3]
            with urlopen(f"http://{target}/metrics", timeout=PATIENCE_S) as answer:
                self.metrics = answer.read().decode()
        if self.metrics and self._failures > 0 and CheckpointFolder(self._written, keep=1).latest() is not None:
            self._failures = 0
            raise KeyboardInterrupt

    @property
    def failed(self) -> list[str]:
        return [line for line in self.lines if "could not be written" in line]

    def _limit(self, num_bytes: int) -> None:
        worker = descendants("ray::RankWorker")[-1]
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def checkpoints_of(config: Config) -> CheckpointFolder:
    return CheckpointFolder(Path(config.run_dir) / "checkpoints", keep=1)


def test_training_outlives_failed_saves_and_saves_once_there_is_room(folder: Path) -> None:
    config = run_config(
        folder,
        name="full",
        train={"steps": 100_000},
        checkpoint={"every_steps": 2, "max_failures": 1000},
        plan={"refit": False},
    )
    disk = FullDisk(config.run_dir, failures=2)
    FlexTrainer(config).fit(watcher=disk)
    reports = steps_of(config)
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    assert len(disk.failed) >= 2
    assert all(line.startswith("checkpoint of step ") and "\n" not in line for line in disk.failed)
    assert 'rayfcp_failed_checkpoints_total{run="full"}' in disk.metrics
    last = checkpoints_of(config).latest()
    assert last is not None and read_manifest(last).step == len(reports)
    assert find_damage(last, read_manifest(last).files) is None
    assert all(path.name.startswith("step-") for path in checkpoints_of(config).root.iterdir())


def test_a_changed_checkpoint_is_refused_and_the_one_before_taken(trained: Config, folder: Path) -> None:
    config = again(trained, name="changed", steps=7)
    reports = steps_of(config)
    older, newer = checkpoints_of(config).complete()
    flip_a_bit(newer / "__1_0.distcp")
    said: list[str] = []
    assert export_run(config.run_dir, out_dir=folder / "exported", say=said.append) == older
    disk = FullDisk(config.run_dir, failures=-1)
    disk.say = disk.lines.append  # type: ignore[method-assign]
    FlexTrainer(config).fit(watcher=disk)
    assert said == [line for line in disk.lines if "damaged" in line]
    assert said[0].startswith(f"checkpoint {newer.name} is damaged: {newer / '__1_0.distcp'} has checksum ")
    repeated = steps_of(config)
    assert [report.step for report in repeated] == list(range(1, 8))
    assert [report.samples_hash for report in repeated[:6]] == [report.samples_hash for report in reports]
    assert [report.loss for report in repeated[3:6]] == pytest.approx([each.loss for each in reports[3:]], rel=1e-4)
    aside = Path(config.run_dir) / "earlier-1"
    assert (aside / "checkpoints" / newer.name).exists()
    assert f"what came after step 3 is in {aside}" in disk.lines


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
