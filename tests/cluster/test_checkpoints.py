"""The checkpoint folder: whole or absent, whatever interrupts it; what is kept; what a resumed run may differ in."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.cluster.checkpoints.folder import (
    MANIFEST,
    CheckpointFolder,
    Manifest,
    check_same_model,
    check_same_weights,
    newest_intact,
    read_manifest,
    shares,
)
from rayfcp.cluster.trainer import with_first_init
from rayfcp.config import Config, ConfigError
from rayfcp.execute.reports import FileSum, find_damage, sum_files


def manifest_of(step: int, *, files: tuple[FileSum, ...] = ()) -> Manifest:
    return Manifest(step=step, world_size=2, model={"hidden_size": 8}, data={"seed": 0, "step": step}, files=files)


def write(folder: CheckpointFolder, step: int) -> Path:
    """Write one checkpoint as ranks and controller do."""
    unfinished = folder.unfinished(step)
    unfinished.mkdir(parents=True, exist_ok=True)
    names = [f"__{rank}_0.distcp" for rank in range(2)]
    for name in names:
        (unfinished / name).write_text(f"{step} in {name}")
    return folder.commit(unfinished, manifest_of(step, files=sum_files(unfinished, names)))


def steps_in(folder: CheckpointFolder) -> list[int]:
    return [read_manifest(path).step for path in folder.complete()]


def test_complete_from_the_commit_on(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new" / "checkpoints", keep=2)
    folder.open()
    assert folder.latest() is None
    unfinished = folder.unfinished(3)
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_text("part")
    assert folder.complete() == [] and folder.latest() is None
    final = folder.commit(unfinished, manifest_of(3))
    assert final.name == "step-00000003" and folder.latest() == final
    assert read_manifest(final) == manifest_of(3)
    assert (final / "__0_0.distcp").read_text() == "part"
    assert not unfinished.exists()


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.integers(1, 10**8 - 1), min_size=1, max_size=6, unique=True), keep=st.integers(1, 4))
def test_the_newest_are_kept(steps: list[int], keep: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = CheckpointFolder(tmp_path_factory.mktemp("keep"), keep=keep)
    folder.open()
    for count, step in enumerate(sorted(steps), start=1):
        assert write(folder, step).exists()
        assert steps_in(folder) == sorted(steps)[:count][-keep:]
    assert len(list(folder.root.iterdir())) == min(keep, len(steps))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_run_that_starts_over_leaves_no_later_checkpoint(keep: int, tmp_path: Path) -> None:
    """`resume=never`, or from an earlier checkpoint: later ones are of a run that is given up. They would
    otherwise outlive what is saved now, and be resumed from and exported in its place."""
    folder = CheckpointFolder(tmp_path, keep=keep)
    for step in (10, 20, 30):
        write(folder, step)
    assert write(folder, 15) == folder.latest()
    assert steps_in(folder) == ([10, 15] if keep == 3 else [15])


def test_the_same_step_again_takes_its_place(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, 4)
    final = write(folder, 4)
    assert folder.complete() == [final]
    assert [path.name for path in tmp_path.iterdir()] == [final.name]


def test_leftovers_go_when_a_run_opens(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, 1)
    torn = folder.unfinished(2)
    torn.mkdir()
    (torn / "__0_0.distcp").write_text("half")
    replaced = tmp_path / ".unfinished-removed-step-00000001"
    replaced.mkdir()
    (replaced / MANIFEST).write_text("{}")
    half_removed = tmp_path / ".unfinished-removed-step-00000003"
    half_removed.mkdir()
    (tmp_path / "step-00000009").mkdir()
    assert steps_in(folder) == [1]
    folder.open()
    assert not torn.exists() and not replaced.exists() and not half_removed.exists()
    assert steps_in(folder) == [1]


def test_a_complete_checkpoint_out_of_sight_comes_back(tmp_path: Path) -> None:
    """A crash between hiding the old checkpoint of a step and showing the new one loses neither for good."""
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, 4)
    (tmp_path / "step-00000004").rename(tmp_path / ".unfinished-removed-step-00000004")
    assert steps_in(folder) == []
    folder.open()
    assert steps_in(folder) == [4]


COMMIT_FOR_EVER = """
import sys
from rayfcp.cluster.checkpoints.folder import CheckpointFolder, Manifest
folder = CheckpointFolder(sys.argv[1], keep=1)
folder.open()
last = step = int(sys.argv[2])
while True:
    step += 1
    part = folder.unfinished(step)
    part.mkdir()
    for index in range(40):
        (part / str(index)).write_text(str(step))
    folder.commit(part, Manifest(step=step, world_size=1, model={}, data={}, files=()))
    if step == last + 1:
        print("committed", flush=True)
"""


def test_killed_at_any_moment_the_newest_is_whole(tmp_path: Path) -> None:
    """A process that commits without pause is killed again and again; what counts as complete is whole, and
    there is always one."""
    rng, last = random.Random(0), 0
    folder = CheckpointFolder(tmp_path, keep=1)
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", COMMIT_FOR_EVER, tmp_path, str(last)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "committed\n"
            time.sleep(0.1 * rng.random())
            process.kill()
        complete = folder.complete()
        assert 1 <= len(complete) <= 2, "the one before goes only after the next is there"
        for path in complete:
            step = read_manifest(path).step
            assert sorted(part.name for part in path.iterdir()) == sorted([MANIFEST, *map(str, range(40))])
            assert {(path / str(index)).read_text() for index in range(40)} == {str(step)}
        assert step > last
        last = step


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{",
        b"[1]",
        b'{"step": 1}',
        b'{"step": 1, "world_size": 1, "model": {}, "data": {}, "files": [], "crc32": 0, "x": 0}',
        b'{"step": 1, "world_size": 1, "model": {}, "data": {}, "files": [], "crc32": 0}',
        b"\xff",
    ],
)
def test_what_is_no_checkpoint_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ConfigError, match="no complete checkpoint is there") as caught:
        read_manifest(tmp_path)
    assert str(tmp_path) in str(caught.value) and f"give a folder with the {MANIFEST}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_manifest_is_plain_json(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    found = json.loads((write(folder, 7) / MANIFEST).read_text())
    files, checksum = found.pop("files"), found.pop("crc32")
    assert found == {"step": 7, "world_size": 2, "model": {"hidden_size": 8}, "data": {"seed": 0, "step": 7}}
    assert [each["name"] for each in files] == ["__0_0.distcp", "__1_0.distcp"] and checksum


def test_the_first_difference_of_models_is_named() -> None:
    manifest = manifest_of(1)
    check_same_model(manifest, {"hidden_size": 8})
    with pytest.raises(ConfigError, match=r"^model hidden_size is 16, the checkpoint's is 8; a resumed run keeps"):
        check_same_model(manifest, {"hidden_size": 16})
    with pytest.raises(ConfigError, match="model extra is True, the checkpoint's is None"):
        check_same_model(manifest, {"hidden_size": 8, "extra": True})
    with pytest.raises(ConfigError, match="model hidden_size is None, the checkpoint's is 8"):
        check_same_model(manifest, {})


@pytest.mark.parametrize("frozen", [{}, {"lora": {"rank": 2}}, {"freeze_vision": True}])
def test_a_run_of_an_earlier_release_resumes_with_its_weights(frozen: dict[str, Any], tmp_path: Path) -> None:
    """Without a word about them they were random, whatever `model.path` holds."""
    (tmp_path / "config.yaml").write_text("model: {path: base, init: random}\n")
    given = {"run": {"dir": str(tmp_path)}, "data": {"paths": ["x"]}, "model": {"path": "base", **frozen}}
    config = Config(**given)
    assert with_first_init(config).model.init == "pretrained"  # nothing is there to resume
    checkpoint = write(CheckpointFolder(tmp_path / "checkpoints", keep=1), 7)
    assert with_first_init(config).model.init == "random"
    check_same_weights(checkpoint, with_first_init(config).model)
    assert with_first_init(config.changed(checkpoint={"resume": "never"})).model.init == "pretrained"
    said = Config(**{**given, "model": {**given["model"], "init": "pretrained"}})
    assert with_first_init(said) is said
    if not frozen:
        check_same_weights(checkpoint, said.model)
        return
    with pytest.raises(ConfigError, match=r"model.init is 'pretrained', .* began with 'random'; .* set model.init="):
        check_same_weights(checkpoint, said.model)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_changed_bit_anywhere_gives_the_next_older(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Manifests included; and files that are cut off or gone."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("flipped"), keep=3)
    older, newer = write(folder, 1), write(folder, 2)
    torn = data.draw(st.sampled_from(sorted(newer.iterdir())))
    content = torn.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
    torn.write_bytes(data.draw(st.sampled_from([flipped, content[:at]])))
    said: list[str] = []
    found = newest_intact([newer, older], check=find_damage, log=said.append)
    assert found is not None and found == (older, read_manifest(older))
    (line,) = said
    assert line.startswith(f"checkpoint {newer.name} is damaged: ") and line.endswith(f"; trying {older.name}")
    assert str(torn) in line and "\n" not in line
    torn.unlink()
    with pytest.raises(ConfigError, match=r"is intact: .*restore the damaged files, or start over") as caught:
        newest_intact([newer], check=find_damage, log=said.append)
    assert "\n" not in str(caught.value)
    assert newest_intact([], check=find_damage, log=said.append) is None


@given(sizes=st.lists(st.integers(0, 50), max_size=12), count=st.integers(1, 5))
def test_shares_have_every_file_once_and_about_equal_bytes(sizes: list[int], count: int) -> None:
    files = [FileSum(name=str(number), num_bytes=size, crc32=0) for number, size in enumerate(sizes)]
    parts = shares(files, count=count)
    assert sorted((each for part in parts for each in part), key=lambda each: int(each.name)) == files
    loads = [sum(each.num_bytes for each in part) for part in parts]
    assert len(loads) == count and max(loads) - min(loads) <= max(sizes, default=0)


def test_storage_that_refuses_the_rename_leaves_what_there_was(tmp_path: Path) -> None:
    """A file where the folder shall be written: a real error of the file system."""
    folder = CheckpointFolder(tmp_path, keep=2)
    final = write(folder, 4)
    with pytest.raises(OSError, match="No such file"):
        folder.commit(folder.unfinished(4), manifest_of(4))
    assert folder.complete() == [final] and find_damage(final, read_manifest(final).files) is None


def test_what_is_dropped_goes_with_the_next_sweep_and_never_mixes_with_the_next_write(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    given_up = folder.unfinished(4)
    given_up.mkdir()
    folder.drop(given_up)
    (given_up / "late").write_text("by a device that had not heard")
    assert folder.unfinished(4) != given_up
    assert write(folder, 4).name == "step-00000004"
    assert not given_up.exists()
