"""Runs on storage that fails: files that cannot grow, checkpoints that were changed. Real errors of the kernel."""

import resource
from pathlib import Path
from urllib.request import urlopen

import pytest

from rayfcp.cluster import FlexTrainer, RunFailedError, export_run
from rayfcp.cluster.checkpoints import CheckpointFolder, read_manifest
from rayfcp.config import Config
from rayfcp.execute.integrity import find_damage
from rayfcp.telemetry.targets import SD_FILE
from rayfcp.values import StepReport
from tests.cluster.processes import descendants
from tests.cluster.runs import run_config, steps_of, write_texts

pytestmark = pytest.mark.usefixtures("ray_cluster")

LIMIT_BYTES = 100_000
"""Less than a device's part of a checkpoint, more than its log."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    write_texts(path)
    return path


class FullDisk:
    """Once workers are there one of them may write no large file, until `failures` saves have failed (-1: for good)."""

    def __init__(self, run_dir: str, *, failures: int) -> None:
        self._sd_file, self._failures = Path(run_dir) / SD_FILE, failures
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
            with urlopen(f"http://{target}/metrics", timeout=5) as answer:
                self.metrics = answer.read().decode()

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
        train={"steps": 60},
        checkpoint={"every_steps": 2, "max_failures": 60},
        plan={"refit": False},
    )
    disk = FullDisk(config.run_dir, failures=2)
    FlexTrainer(config).fit(watcher=disk)
    assert [report.step for report in steps_of(config)] == list(range(1, 61))
    assert len(disk.failed) >= 2
    assert all(line.startswith("checkpoint of step ") and "\n" not in line for line in disk.failed)
    assert 'rayfcp_failed_checkpoints_total{run="full"}' in disk.metrics
    last = checkpoints_of(config).latest()
    assert last is not None and read_manifest(last).step == 60
    assert find_damage(last, read_manifest(last).files) is None
    assert all(path.name.startswith("step-") for path in checkpoints_of(config).root.iterdir())


def test_one_failure_too_many_ends_the_run_with_one_line(folder: Path) -> None:
    config = run_config(folder, name="stopped", train={"steps": 500}, checkpoint={"every_steps": 1, "max_failures": 1})
    disk = FullDisk(config.run_dir, failures=-1)
    with pytest.raises(RunFailedError, match=r"^2 checkpoints in a row .* checkpoint\.max_failures is 1") as caught:
        FlexTrainer(config).fit(watcher=disk)
    assert "the newest good one is none" in str(caught.value) and "\n" not in str(caught.value)
    assert 2 <= len(steps_of(config)) < 500
    assert list(checkpoints_of(config).root.iterdir()) == []


def test_a_last_save_that_fails_is_an_error_and_names_the_newest_good_checkpoint(folder: Path) -> None:
    first = run_config(folder, name="last", train={"steps": 2})
    FlexTrainer(first).fit()
    second = run_config(folder, name="last", train={"steps": 4})
    disk = FullDisk(second.run_dir, failures=-1)
    with pytest.raises(RunFailedError, match=r"^the last checkpoint, of step 4, could not be written") as caught:
        FlexTrainer(second).fit(watcher=disk)
    good = checkpoints_of(second).latest()
    assert good is not None and read_manifest(good).step == 2
    assert f"the newest good one is {good}" in str(caught.value)


def test_a_changed_checkpoint_is_refused_and_the_one_before_taken(folder: Path) -> None:
    first = run_config(folder, name="changed", train={"steps": 6}, checkpoint={"every_steps": 3, "keep": 3})
    FlexTrainer(first).fit()
    reports = steps_of(first)
    older, newer = checkpoints_of(first).complete()
    flip_a_bit(newer / "__1_0.distcp")
    said: list[str] = []
    assert export_run(first.run_dir, out_dir=folder / "exported", say=said.append) == older
    disk = FullDisk(first.run_dir, failures=-1)
    disk.say = disk.lines.append  # type: ignore[method-assign]
    FlexTrainer(run_config(folder, name="changed", train={"steps": 7}, checkpoint={"keep": 3})).fit(watcher=disk)
    assert said == [line for line in disk.lines if "damaged" in line]
    assert said[0].startswith(f"checkpoint {newer.name} is damaged: {newer / '__1_0.distcp'} has checksum ")
    again = steps_of(first)
    assert [report.step for report in again] == list(range(1, 8))
    assert [report.samples_hash for report in again[:6]] == [report.samples_hash for report in reports]
    assert [report.loss for report in again[3:6]] == pytest.approx([report.loss for report in reports[3:]], rel=1e-4)
    aside = Path(first.run_dir) / "earlier-1"
    assert (aside / "checkpoints" / newer.name).exists()
    assert f"what came after step 3 is in {aside}" in disk.lines


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
