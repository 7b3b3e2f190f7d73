"""Start, commit, omission and failure of checkpoints, with stores that write real files on request."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayfcp.cluster.checkpoints.folder import CheckpointFolder, read_manifest
from rayfcp.cluster.checkpoints.resuming import Resume
from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.errors import RunAbortedError
from rayfcp.cluster.runtime import ActorLostError, TaskFailedError
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config import ConfigError
from rayfcp.data import LengthIndex, Sampler
from rayfcp.data.prepare import prepare_local
from rayfcp.elastic.recoverable import RecoverableState, ShardCopy
from rayfcp.execute.reports import find_damage
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.saving import SaveError, write_part
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import StateId
from tests.cluster.light import bytes_of, shard
from tests.cluster.runs import run_config, write_texts

FULL = SaveError("No space left on device: /checkpoints")


class Write:
    """Reference of a write that a store carries out when it is asked to."""

    def __init__(self, write: Callable[[], Any]) -> None:
        self._write = write
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        if not self.is_done:
            self.is_done, self.error = True, error
            self.value = self._write() if error is None else None


class Called:
    """A handle whose calls run at once, in this process."""

    def __init__(self) -> None:
        self.source = ""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote={"verify": find_damage, "load": self._load}[name])

    def _load(self, folder: str, *, only_weights: bool) -> None:
        self.source = folder


class RuntimeOfWrites(RayRuntime):
    """Waiting makes stores end their writes, with the next of `errors` if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []

    def wait(self, refs: Sequence[Write], *, timeout_s: float | None = None) -> list[Write]:
        for each in refs:
            each.end(self.errors.pop(0) if self.errors else None)
        return list(refs)

    def wait_all(self, refs: Sequence[Write], *, timeout_s: float | None = None) -> list[Write]:
        return [each for each in refs if each.is_done]

    def get(self, ref: Write, *, timeout_s: float | None = None) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value


class Devices:
    """Devices, one on each of two nodes, with their stores: the interfaces of a worker group, of stores and of
    replication that a saver needs. `is_slow`: copies are complete only with the next step, as on accelerators."""

    def __init__(self, count: int, *, folder: Path) -> None:
        self.runtime = RuntimeOfWrites()
        self.all: list[Any] = []
        self.handles = [Called() for _ in range(count)]
        self.copies = CopyFolder(folder / "copies")
        self.states = SimpleNamespace(here=None)
        self.leased: StateId | None = None
        self.is_slow = False
        self.writes: list[Write] = []
        self.replaced: list[str] = []

    def __len__(self) -> int:
        return len(self.handles)

    def call(self, method: Callable[[int, Any], Any]) -> list[Any]:
        return [method(number, handle) for number, handle in enumerate(self.handles)]

    def save(self, state: StateId, numbers: Mapping[str, Sequence[int]], *, folder: str) -> dict[Write, str]:
        def write(of: Sequence[int]) -> Write:
            return Write(lambda: write_part(self.copies, state, numbers=of, folder=Path(folder)))

        made = {write(of): node for node, of in numbers.items()}
        self.writes = list(made)
        return made

    def replace(self, node_id: str, *, members: Sequence[Any]) -> None:
        self.replaced.append(node_id)

    def copy_now(self, step: int) -> None:
        for number in range(len(self)):
            header = shard(step, number=number, num_devices=len(self))
            if not self.copies.has(header.state, number):
                new = self.copies.begin(header)
                new.buffer[:] = bytes_of(shard(step))
                new.publish()
        self.states.here = None if self.is_slow else header.state

    copy_again = copy_now

    def lease(self, version: int) -> tuple[StateId, dict[str, list[int]]]:
        self.leased = StateId(version=version, generation=0)
        return self.leased, {f"node-{number}": [number] for number in range(len(self))}

    def end_lease(self) -> None:
        self.leased = None


class Run:
    """A saver, its devices, and what it says."""

    def __init__(self, folder: Path) -> None:
        write_texts(folder)
        self.config = run_config(folder, name="saved", checkpoint={"every_steps": 2}, train={"steps": 50})
        prepare_local(self.config.data, out_dir=str(folder / "shards"))
        self._sampler = Sampler(LengthIndex.open(str(folder / "shards"), max_seqlen=256), seed=0, global_batch=6)
        self.said: list[str] = []
        self.metrics = MetricsExporter("saved", run_dir=folder / "saved")
        self.devices: Any = Devices(2, folder=folder)
        self.saver = Saver(
            self.config,
            resume=self.make_resume("auto"),
            replication=self.devices,
            worker_group=self.devices,
            stores=self.devices,
            metrics=self.metrics,
            log=self.said.append,
        )

    def make_resume(self, resume: str) -> Resume:
        checkpoint = self.config.checkpoint.model_copy(update={"resume": resume})
        config = self.config.model_copy(update={"checkpoint": checkpoint})
        return Resume(config, owner="own", sampler=self._sampler, model={"hidden_size": 8}, log=self.said.append)

    def write(self, error: Exception | None = None) -> None:
        """The first store's write ends so, all others well."""
        for each in self.devices.writes:
            each.end(error)
            error = None

    def step(self, step: int) -> None:
        """A step; a commit begun after it has ended when this returns."""
        if self.saver.wants(step):
            self.devices.copy_now(step)
        self.saver.after_step(step)
        self.saver._run_in_background(lambda: None).result()

    def save(self, step: int, error: Exception | None = None) -> None:
        """A step after which a checkpoint is due, which is committed two steps later, or fails."""
        self.step(step)
        self.write(error)
        self.step(step + 1)
        self.step(step + 1)

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
    for step in (1, 2, 3, 4):
        run.step(step)
    assert run.said == ["checkpoint of step 2 is still being written; that of step 4 is skipped"]
    run.devices.writes[0].end()
    run.step(5)
    assert run.steps == [] and run.devices.leased == StateId(version=2, generation=0)
    run.write()
    run.step(5)
    assert run.devices.leased is None
    run.step(5)
    assert run.steps == [2] and run.unfinished == []
    assert run.saver.last(5) is not None and run.steps == [2, 5]
    (folder, _) = CheckpointFolder(Path(run.config.run_dir) / "checkpoints", keep=1).complete()
    manifest = read_manifest(folder)
    assert manifest.world_size == 2 and find_damage(folder, manifest.files) is None
    names = ["manifest.json", *(file.name for file in manifest.files)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_a_loss_of_devices_does_not_end_what_stores_write(run: Run) -> None:
    run.step(2)
    run.saver.abandon()
    run.write()
    run.step(3)
    run.step(3)
    assert run.steps == [2] and run.said == []


def test_copies_that_may_not_be_complete_are_not_written_after_a_loss(run: Run) -> None:
    """As on accelerators, where they are complete before the update of the next step."""
    run.devices.is_slow = True
    run.step(2)
    assert run.devices.writes == []
    run.saver.abandon()
    assert run.devices.leased is None
    run.step(3)
    assert run.devices.writes == [] and run.metrics.value("failed_checkpoints_total") in (None, 0)
    run.step(4)
    run.step(5)
    run.write()
    run.step(5)
    run.step(5)
    assert run.steps == [4] and run.said == []
    run.step(6)
    assert run.saver.last(6) is not None and run.steps == [4, 6], "the copies are complete when the run ends"


def test_a_store_that_is_lost_is_replaced_and_the_last_checkpoint_written_again(run: Run) -> None:
    run.save(2, ActorLostError("its process died"))
    said = "checkpoint of step 2 could not be written: the copy store on node-0 is lost: its process died"
    assert run.steps == [] and run.said == [said] and run.devices.replaced == ["node-0"]
    run.devices.runtime.errors = [ActorLostError("its process died")] * 2
    assert run.saver.last(3) is not None and run.steps == [3]
    assert run.metrics.value("failed_checkpoints_total") == 2
    run.devices.runtime.errors = [ActorLostError("its process died")] * 20
    with pytest.raises(RunAbortedError, match="the last checkpoint, of step 5, could not be written"):
        run.saver.last(5)
    run.devices.runtime.errors = [TaskFailedError(FULL)]
    with pytest.raises(RunAbortedError, match=r"could not be written \(No space left on device: /checkpoints\)"):
        run.saver.last(7)
    assert run.unfinished == [] and run.steps == [3]


def test_a_state_that_is_left_in_memory_is_saved_without_devices(run: Run) -> None:
    run.devices.copy_now(7)
    copies = tuple(
        ShardCopy(header=shard(7, number=number, num_devices=2), peer=None, node_id="node-1") for number in (0, 1)
    )
    found = RecoverableState(reason="", state=StateId(version=7, generation=0), copies=copies)
    run.devices.handles.clear()
    assert run.saver.rescue(found) == "" and run.steps == [7] and run.saver.saved_step == 7
    assert len(run.devices.writes) == 1, "one node has both copies"


def test_failures_in_a_row_count_and_one_that_is_good_forgets_them(run: Run) -> None:
    for step in (2, 4, 6):
        run.save(step, TaskFailedError(FULL))
    run.save(8)
    assert run.steps == [8] and run.unfinished == []
    for step in (10, 12, 14):
        run.save(step, TaskFailedError(FULL))
    with pytest.raises(RunAbortedError, match=r"^4 checkpoints in a row could not be written") as caught:
        run.save(16, TaskFailedError(FULL))
    assert "(No space left on device: /checkpoints); the newest good one is " in str(caught.value)
    assert "step-00000008" in str(caught.value) and run.steps == [8] and run.unfinished == []
    assert run.metrics.value("failed_checkpoints_total") == 7
    assert run.said.count(f"checkpoint of step 6 could not be written: {FULL}") == 1


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_falling_back_takes_the_newest_intact_one(run: Run) -> None:
    assert run.saver.fall_back() == 0
    run.save(2)
    run.save(4)
    older, newer = CheckpointFolder(Path(run.config.run_dir) / "checkpoints", keep=1).complete()
    damage(newer / "__1_0.distcp")
    assert run.saver.fall_back() == 2
    assert [each.source for each in run.devices.handles] == [str(older)] * 2
    assert len(run.said) == 1 and str(newer / "__1_0.distcp") in run.said[0]
    run.save(4)
    assert run.steps == [2, 4]
    run.step(6)
    assert run.saver.fall_back() == 6, "what is being written is waited for"


def test_damage_without_a_way_out_is_an_error(run: Run) -> None:
    """A named checkpoint is meant as it is; and where none is whole a run does not start over by itself."""
    run.save(2)
    run.save(4)
    older, newer = CheckpointFolder(Path(run.config.run_dir) / "checkpoints", keep=1).complete()
    damage(newer / "__0_0.distcp")
    named = run.make_resume(str(newer))
    assert named.step == 4, "sizes are right"
    with pytest.raises(ConfigError, match=r"^checkpoint\.resume is .*__0_0\.distcp has checksum") as caught:
        named.verify(run.devices)
    assert "\n" not in str(caught.value) and newer.exists()
    automatic = run.make_resume("auto")
    automatic.verify(run.devices)
    assert automatic.step == 2 and automatic.source == older
    assert (
        run.steps == [2]
        and f"checkpoints and steps after step 2 are in {Path(run.config.run_dir) / 'earlier-1'}" in run.said
    )
    (older / "__1_0.distcp").write_bytes(bytes(100))
    with pytest.raises(
        ConfigError, match=r"^no checkpoint in .* is intact: .*__1_0\.distcp holds 100 bytes, must be \d+ as written"
    ):
        run.make_resume("auto")
    assert run.make_resume("never").step == 0
