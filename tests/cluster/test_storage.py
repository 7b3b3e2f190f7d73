"""Runs whose storage is slow or full, and whose newest checkpoint was changed after it was written."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors import safe_open

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.checkpoints.folder import CheckpointFolder
from rayfcp.cluster.recovery.store import CopyStore
from rayfcp.cluster.tools.exporting import export_run
from rayfcp.config import Config, ConfigError
from rayfcp.execute.reports import SavedPart
from rayfcp.values import StateId
from tests.cluster.recovering import Trouble, kill, pids
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(3 * PATIENCE_S)]


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


FIRST = 3
"""Step of the first checkpoint of runs with storage that is slow."""


class TroubledStore(CopyStore):
    """Writes nothing while the run's folder has a file `slow`, and finds the disk full in the next write after that."""

    def __init__(self, config: Config, *, run: str) -> None:
        super().__init__(config, run=run)
        self._folder = Path(config.run_dir)

    def save(self, state: StateId, numbers: Sequence[int], *, folder: str) -> SavedPart:
        while (self._folder / "slow").exists():
            (self._folder / "full").touch()
            time.sleep(0.05)
        if (self._folder / "full").exists() and state.version > FIRST:
            (self._folder / "full").unlink()
            Path(folder).mkdir()
            (Path(folder) / f"__{numbers[-1]}_0.distcp").symlink_to("/dev/full")
        return super().save(state, numbers, folder=folder)


@pytest.mark.parametrize("every", [1, 0])
def test_a_worker_that_is_killed_while_its_checkpoint_is_written_does_not_lose_it(every: int, folder: Path) -> None:
    """The other one goes on meanwhile; a disk that is full later ends that write only."""
    saving = {"every_steps": FIRST, "keep": 99}
    config = run_config(
        folder, name=f"slow-{every}", train={"steps": 40}, checkpoint=saving, elastic={"snapshot_every_steps": every}
    )
    slow = Path(config.run_dir) / "slow"
    slow.parent.mkdir()
    slow.touch()
    trouble = Trouble({4: lambda: kill(pids("DeviceWorker")[0]), 8: slow.unlink})
    FlexTrainer(config, store=TroubledStore).fit(watcher=trouble)
    assert {read_step(path) for path in checkpoints_of(config).complete()} >= {FIRST, 40}
    assert trouble.said("checkpoint of step 3 is still being written; that of step 6 is skipped")
    (failed,) = trouble.said("could not be written")
    assert "could not be written: No space left on device: " in failed
    assert not [*(Path(config.run_dir) / "checkpoints").glob(".unfinished*")]
    first = steps_of(config)
    assert [report.step for report in first] == list(range(1, 41))
    named = str(checkpoints_of(config).complete()[0])
    train, heard = {"steps": 6, "weight_decay": 0.11}, Trouble()
    resumed = run_config(folder, name=f"resumed-{every}", train=train, checkpoint={"resume": named})
    FlexTrainer(resumed).fit(watcher=heard)
    assert heard.said("resumed with") == ["resumed with other optimizer options: weight_decay 0.1 -> 0.11"]
    assert [each.loss for each in steps_of(resumed)] == pytest.approx([each.loss for each in first[3:6]], rel=1e-4)


def read_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def again(trained: Config, *, name: str, steps: int) -> Config:
    """A copy of that run, to go on with."""
    folder = Path(trained.run_dir).parent
    shutil.copytree(trained.run_dir, folder / name)
    return run_config(folder, name=name, train={"steps": steps}, checkpoint={"keep": 3})


def checkpoints_of(config: Config) -> CheckpointFolder:
    return CheckpointFolder(Path(config.run_dir) / "checkpoints", keep=1)


def test_a_step_and_a_precision_can_be_exported(trained: Config, folder: Path) -> None:
    out = folder / "exported step 3"
    assert export_run(trained.run_dir, out_dir=out, step=3, dtype="bfloat16") == checkpoints_of(trained).complete()[0]
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match="--step is 5, must be one of 3, 6 in"):
        export_run(trained.run_dir, out_dir=folder / "exported step 5", step=5)


def test_a_changed_checkpoint_is_refused_and_the_one_before_taken(trained: Config, folder: Path) -> None:
    config = again(trained, name="changed", steps=7)
    reports = steps_of(config)
    older, newer = checkpoints_of(config).complete()
    flip_a_bit(newer / "__1_0.distcp")
    said: list[str] = []
    assert export_run(config.run_dir, out_dir=folder / "exported", log=said.append) == older
    heard = Trouble()
    FlexTrainer(config).fit(watcher=heard)
    assert said == heard.said("damaged")
    assert said[0].startswith(f"checkpoint {newer.name} is damaged: {newer / '__1_0.distcp'} has checksum ")
    repeated = steps_of(config)
    assert [report.step for report in repeated] == list(range(1, 8))
    assert [report.samples_hash for report in repeated[:6]] == [report.samples_hash for report in reports]
    assert [report.loss for report in repeated[3:6]] == pytest.approx([each.loss for each in reports[3:]], rel=1e-4)
    aside = Path(config.run_dir) / "earlier-1"
    assert (aside / "checkpoints" / newer.name).exists()
    assert f"checkpoints and steps after step 3 are in {aside}" in heard.lines


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
