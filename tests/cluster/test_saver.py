"""Start, commit, omission and failure of checkpoints, with devices that write real files on request."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayfcp.cluster.checkpoints.folder import CheckpointFolder, read_manifest
from rayfcp.cluster.checkpoints.saving import Resume, Saver
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.facts import RunAbortedError
from rayfcp.config import ConfigError
from rayfcp.data import LengthIndex, Sampler
from rayfcp.data.prepare import prepare_local
from rayfcp.execute.reports import DeviceReport, SavedPart, find_damage, sum_files
from rayfcp.telemetry.metrics import MetricsExporter
from tests.cluster.runs import run_config, write_texts
from tests.cluster.test_guard import report_of


class WritingDevice:
    """Writes its part of a checkpoint no sooner than it is asked how that ended."""

    def __init__(self, number: int) -> None:
        self._number, self._folder, self._loaded = number, "", ""

    def begin_save(self, folder: str) -> None:
        self._folder = folder

    def finish_save(self) -> SavedPart | None:
        if not self._folder:
            return None
        folder, self._folder = Path(self._folder), ""
        folder.mkdir(exist_ok=True)
        name = f"__{self._number}_0.distcp"
        (folder / name).write_bytes(bytes(100 + self._number))
        return SavedPart(folder=str(folder), seconds=0.5, files=sum_files(folder, [name]))

    def verify(self, folder: str, sums: Any) -> str | None:
        return find_damage(folder, sums)

    def load(self, folder: str) -> None:
        self._loaded = folder

    def loaded(self) -> str:
        return self._loaded


class Called:
    """A handle whose calls run at once, in this process."""

    def __init__(self, device: WritingDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._device, name))


class Devices:
    """Interface of a worker group that a saver needs."""

    def __init__(self, count: int) -> None:
        self.runtime = RayRuntime()
        self._handles = [Called(WritingDevice(number)) for number in range(count)]

    def __len__(self) -> int:
        return len(self._handles)

    def call(self, method: Callable[[int, Any], Any]) -> list[Any]:
        return [method(number, handle) for number, handle in enumerate(self._handles)]


class Run:
    """A saver, its worker_group, and what it says."""

    def __init__(self, folder: Path) -> None:
        write_texts(folder)
        self.config = run_config(folder, name="saved", checkpoint={"every_steps": 2}, train={"steps": 50})
        prepare_local(self.config.data, out_dir=str(folder / "shards"))
        self._sampler = Sampler(LengthIndex.open(str(folder / "shards"), max_seqlen=256), seed=0, global_batch=6)
        self.said: list[str] = []
        self.metrics = MetricsExporter("saved", run_dir=folder / "saved")
        self.worker_group = Devices(2)
        self.saver = Saver(
            self.config,
            resume=self.make_resume("auto"),
            worker_group=self.worker_group,
            metrics=self.metrics,
            log=self.said.append,
        )

    def make_resume(self, resume: str) -> Resume:
        checkpoint = self.config.checkpoint.model_copy(update={"resume": resume})
        config = self.config.model_copy(update={"checkpoint": checkpoint})
        return Resume(config, owner="own", sampler=self._sampler, model={"hidden_size": 8}, log=self.said.append)

    def write(self) -> list[SavedPart | None]:
        return self.worker_group.call(lambda _, worker: worker.finish_save.remote())

    def step(self, step: int, *parts: SavedPart | None) -> None:
        """A step in whose reports devices said this of what they wrote; a commit begun in it has ended after it."""
        told = [*parts, *[None] * (len(self.worker_group) - len(parts))]
        ranks: list[DeviceReport] = [
            replace(report_of(step, loss=1.0), number=number, saved=part) for number, part in enumerate(told)
        ]
        self.saver.after_step(step, ranks=ranks)
        self.saver._run_in_background(lambda: None).result()

    @property
    def steps(self) -> list[int]:
        folder = CheckpointFolder(Path(self.config.run_dir) / "checkpoints", keep=1)
        return [read_manifest(path).step for path in folder.complete()]

    @property
    def unfinished(self) -> list[str]:
        return sorted(path.name for path in (Path(self.config.run_dir) / "checkpoints").glob(".unfinished*"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.metrics.close()


def test_a_slow_write_holds_nothing_up_and_the_next_is_left_out(run: Run) -> None:
    run.step(1)
    run.step(2)
    run.step(3)
    run.step(4)
    assert run.said == ["checkpoint of step 2 is still being written; that of step 4 is skipped"]
    first, second = run.write()
    run.step(5, first)
    assert run.steps == []
    run.step(5, None, second)
    assert run.steps == [2] and run.unfinished == []
    assert run.saver.last(5) is not None and run.steps == [2, 5]


def test_what_lost_devices_were_writing_is_given_up_and_never_mixes(run: Run) -> None:
    """Two devices write, one is lost; what is left of the world, one device, writes the same step anew."""
    run.step(2)
    late, _ = run.write()
    run.saver.abandon()
    (given_up,) = run.unfinished
    run.worker_group = run.saver._worker_group = Devices(1)
    run.step(2)
    run.step(3, late)
    assert run.steps == [], "what devices say of an older write is dropped"
    run.step(3, *run.write())
    assert run.steps == [2] and given_up not in run.unfinished
    (folder,) = CheckpointFolder(Path(run.config.run_dir) / "checkpoints", keep=1).complete()
    assert read_manifest(folder).world_size == 1
    assert sorted(path.name for path in folder.iterdir()) == ["__0_0.distcp", "manifest.json"]
    run.saver.abandon()
    run.saver.finish()


def test_failures_in_a_row_count_and_one_that_is_good_forgets_them(run: Run) -> None:
    def save(step: int, *, fails: bool) -> None:
        run.step(step)
        parts = run.write()
        assert parts[0] is not None
        error = "rank 0: No space left on device" if fails else ""
        run.step(step + 1, replace(parts[0], error=error), parts[1])
        run.step(step + 1)

    for step in (2, 4, 6):
        save(step, fails=True)
    save(8, fails=False)
    assert run.steps == [8] and run.unfinished == []
    for step in (10, 12, 14):
        save(step, fails=True)
    with pytest.raises(RunAbortedError, match=r"^4 checkpoints in a row could not be written") as caught:
        save(16, fails=True)
    assert "(rank 0: No space left on device); the newest good one is " in str(caught.value)
    assert "step-00000008" in str(caught.value) and run.steps == [8] and run.unfinished == []
    assert run.metrics.value("failed_checkpoints_total") == 7
    assert run.said.count("checkpoint of step 6 could not be written: rank 0: No space left on device") == 1


def test_falling_back_takes_the_newest_intact_one(run: Run) -> None:
    assert run.saver.fall_back() == 0
    for step in (2, 4):
        run.step(step)
        run.step(step + 1, *run.write())
        run.step(step + 1)
    older, newer = CheckpointFolder(Path(run.config.run_dir) / "checkpoints", keep=1).complete()
    (newer / "__1_0.distcp").write_bytes(bytes(100) + b"x")
    run.step(6)
    run.saver.abandon()
    assert run.saver.fall_back() == 2
    assert run.worker_group.call(lambda _, worker: worker.loaded.remote()) == [str(older)] * 2
    assert len(run.said) == 1 and str(newer / "__1_0.distcp") in run.said[0]
    run.step(4)
    run.step(5, *run.write())
    run.step(5)
    assert run.steps == [2, 4]


def test_damage_without_a_way_out_is_an_error(run: Run) -> None:
    """A named checkpoint is meant as it is; and where none is whole a run does not start over by itself."""
    for step in (2, 4):
        run.step(step)
        run.step(step + 1, *run.write())
        run.step(step + 1)
    older, newer = CheckpointFolder(Path(run.config.run_dir) / "checkpoints", keep=1).complete()
    (newer / "__0_0.distcp").write_bytes(bytes(99) + b"x")
    named = run.make_resume(str(newer))
    assert named.step == 4, "sizes are right"
    with pytest.raises(ConfigError, match=r"^checkpoint\.resume is .*__0_0\.distcp has checksum") as caught:
        named.verify(run.worker_group)
    assert "\n" not in str(caught.value) and newer.exists()
    automatic = run.make_resume("auto")
    automatic.verify(run.worker_group)
    assert automatic.step == 2 and automatic.source == older
    assert (
        run.steps == [2]
        and f"checkpoints and steps after step 2 are in {Path(run.config.run_dir) / 'earlier-1'}" in run.said
    )
    (older / "__1_0.distcp").write_bytes(bytes(100))
    with pytest.raises(
        ConfigError, match=r"^no checkpoint in .* is intact: .*__1_0\.distcp holds 100 bytes, must be 101"
    ):
        run.make_resume("auto")
    assert run.make_resume("never").step == 0
