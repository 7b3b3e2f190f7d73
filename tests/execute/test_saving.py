"""Checkpoints written from copies: what torch reads from them, on storage that fails, while states go on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from jobs.bench.gpu_plain import one_rank_program
from rayfcp.bench.alone import Alone, alone
from rayfcp.config import Config
from rayfcp.execute.reports import find_damage, find_wrong_size, sum_files
from rayfcp.execute.state.checkpoint import COMMON, METADATA, write_index
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.copying import Copier
from rayfcp.execute.state.saving import CopyMissingError, SaveError, write_part
from rayfcp.values.state import BUFFER, ITEMSIZES, PARAMETER, Box, KeptStates, ShardEntry, ShardHeader, StateId
from tests.examples import examples
from tests.execute.copying import vector, write
from tests.execute.saving import save

FIRST, SECOND = (StateId(version=version, generation=0) for version in (1, 2))

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@st.composite
def tensors(draw: st.DrawFn) -> dict[tuple[str, str], torch.Tensor]:
    """Random bytes of some dtypes and shapes, scalars included, by name and kind."""
    found = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 5), max_size=3))
        dtype = getattr(torch, draw(st.sampled_from([each for each in ITEMSIZES if each != "bool"])))
        for kind in (
            (PARAMETER, "exp_avg") if shape and draw(st.booleans()) else (draw(st.sampled_from([PARAMETER, BUFFER])),)
        ):
            size = int(np.prod(shape, dtype=int)) * dtype.itemsize
            raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).copy()
            found[f"layers.{number}.weight", kind] = torch.from_numpy(raw).view(dtype).reshape(shape)
    return found


def shards(tensor: torch.Tensor, *, num_devices: int) -> Iterator[tuple[int, Box, torch.Tensor]]:
    """Rows of each device that has any; of a scalar the first two devices have a copy."""
    if tensor.ndim == 0:
        yield from ((number, Box(offsets=(), sizes=()), tensor) for number in range(min(2, num_devices)))
        return
    for number, rows in enumerate(tensor.tensor_split(num_devices)):
        if len(rows):
            start = sum(len(each) for each in tensor.tensor_split(num_devices)[:number])
            yield number, Box(offsets=(start, *(0,) * (tensor.ndim - 1)), sizes=tuple(rows.shape)), rows


def copy_all(copies: CopyFolder, whole: dict[tuple[str, str], torch.Tensor], *, num_devices: int) -> None:
    entries: list[list[ShardEntry]] = [[] for _ in range(num_devices)]
    contents: list[bytes] = [b""] * num_devices
    for (name, kind), tensor in whole.items():
        for number, box, part in shards(tensor, num_devices=num_devices):
            at = len(contents[number])
            entry = ShardEntry(
                name=name,
                kind=kind,
                box=box,
                dtype=str(tensor.dtype).removeprefix("torch."),
                start_byte=at,
                is_owner=tensor.ndim > 0 or number == min(1, num_devices - 1),
            )
            entries[number].append(entry)
            contents[number] += (
                part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().ljust(-(-entry.num_bytes // 8) * 8)
            )
    for number in range(num_devices):
        header = ShardHeader(
            state=FIRST,
            number=number,
            num_devices=num_devices,
            entries=tuple(entries[number]),
            num_bytes=len(contents[number]),
            scalars={"step": 7.0} if any(entry.kind == "exp_avg" for entry in entries[number]) else {},
        )
        new = copies.begin(header)
        new.buffer[:] = np.frombuffer(contents[number], np.uint8)
        assert new.publish()


@examples(60)
@given(whole=tensors(), num_devices=st.integers(1, 5), num_nodes=st.integers(1, 3))
def test_torch_reads_what_any_number_of_devices_held(
    whole: dict[tuple[str, str], torch.Tensor],
    num_devices: int,
    num_nodes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each byte, whatever the dtypes, shapes and shards; what two devices hold is in one file."""
    folder = tmp_path_factory.mktemp("saved")
    copies = CopyFolder(folder / "run" / "node")
    copy_all(copies, whole, num_devices=num_devices)
    nodes = [list(range(num_devices))[at::num_nodes] for at in range(num_nodes)]
    sums = save(copies, FIRST, nodes=nodes, folder=folder / "saved")
    assert find_damage(folder / "saved", sums) is None
    assert {each.name for each in sums} == {path.name for path in (folder / "saved").iterdir()}
    found: dict[str, Any] = {"model": {}, "optimizer": {}}
    for (name, kind), tensor in whole.items():
        is_model = kind in (PARAMETER, BUFFER)
        key = name if is_model else f"state.{name}.{kind}"
        found["model" if is_model else "optimizer"][key] = torch.zeros_like(tensor)
        if not is_model:
            found["optimizer"] |= {f"state.{name}.step": torch.zeros(()), f"param_groups.{name}.betas": None}
    dcp.load(found, checkpoint_id=folder / "saved", no_dist=True)
    for (name, kind), tensor in whole.items():
        is_model = kind in (PARAMETER, BUFFER)
        read = found["model"][name] if is_model else found["optimizer"][f"state.{name}.{kind}"]
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        if not is_model:
            assert found["optimizer"][f"state.{name}.step"] == 7
            assert found["optimizer"][f"param_groups.{name}.betas"] == (0.9, 0.95)
    copies.remove()


def trained(rank: Alone, copies: CopyFolder, *, steps: int) -> None:
    engine, program = rank.engine, one_rank_program((9, 5), recomputed_layers=0)
    for step in range(1, steps + 1):
        engine.run_step(program, rank.batch(step, (0, 1)), plan_hash=program.plan_hash)
    generation = engine.generation
    Copier(generation.module, generation.optimizer, position=engine.position, copies=copies).take(
        StateId(version=steps, generation=0)
    )
    generation.optimizer.zero_grad(set_to_none=True)


@pytest.fixture(scope="module")
def rank() -> Iterator[Alone]:
    architecture = {"num_layers": 1, "hidden_size": 64, "tied_embeddings": True}
    config = Config.model_validate(
        {"data": {"paths": ["."]}, "model": {"architecture": architecture}, "train": {"learning_rate": 0.01}}
    )
    with alone(config, device=torch.device("cpu"), lengths=(9, 5)) as made:
        yield made


def test_its_index_is_that_of_torch(rank: Alone, tmp_path: Path) -> None:
    """Of the state that torch itself would save: keys, shapes, dtypes, and values, tied names and options included."""
    copies = CopyFolder(tmp_path / "copies")
    trained(rank, copies, steps=2)
    save(copies, SECOND, nodes=[[0]], folder=tmp_path / "ours", train=rank.engine._config.train)
    options = StateDictOptions(strict=True, flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(rank.engine.generation.module, rank.engine.generation.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    found = {"model": model, "optimizer": {key: None for key in optimizer if key.startswith("param_groups.")}}
    dcp.load(found, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert found["optimizer"] == {key: optimizer[key] for key in found["optimizer"]}
    tied = {"model.model.embed_tokens.weight", "model.lm_head.weight"}
    places = {
        index.fqn: place for index, place in ours.storage_data.items() if index.fqn.removeprefix("model.") in tied
    }
    assert len(places) == 2 and len({str(place) for place in places.values()}) == 1, "it is written once"


def test_a_state_before_the_first_update_is_loaded_without_optimizer_state(rank: Alone, tmp_path: Path) -> None:
    engine, copies = rank.engine, CopyFolder(tmp_path / "copies")
    engine.generation.optimizer.state.clear()
    trained(rank, copies, steps=0)
    first = StateId(version=0, generation=0)
    save(copies, first, nodes=[[0]], folder=tmp_path / "saved", train=engine._config.train)
    want = {name: each.full_tensor().clone() for name, each in engine.generation.module.named_parameters()}
    trained(rank, copies, steps=1)
    engine.load(str(tmp_path / "saved"))
    assert not engine.generation.optimizer.state
    for name, parameter in engine.generation.module.named_parameters():
        assert torch.equal(parameter.full_tensor(), want[name])


def test_weights_alone_are_loaded_for_an_evaluation(rank: Alone, tmp_path: Path) -> None:
    engine, copies = rank.engine, CopyFolder(tmp_path / "copies")
    trained(rank, copies, steps=2)
    save(copies, SECOND, nodes=[[0]], folder=tmp_path / "saved", train=engine._config.train)
    want = {name: each.full_tensor().clone() for name, each in engine.generation.module.named_parameters()}
    trained(rank, copies, steps=1)
    engine.generation.optimizer.state.clear()
    engine.load(str(tmp_path / "saved"), only_weights=True)
    assert not engine.generation.optimizer.state
    for name, parameter in engine.generation.module.named_parameters():
        assert torch.equal(parameter.full_tensor(), want[name])


def test_a_full_disk_fails_the_write_and_the_next_is_whole(tmp_path: Path) -> None:
    copies = write(CopyFolder(tmp_path / "copies"), vector(1, 0, 0), vector(1, 0, 1, start=50))
    full, free = tmp_path / "full", tmp_path / "free"
    full.mkdir()
    (full / "__1_0.distcp").symlink_to("/dev/full")
    with pytest.raises(SaveError, match=f"^No space left on device: {full}$"):
        write_part(copies, FIRST, numbers=[0, 1], folder=full)
    part = write_part(copies, FIRST, numbers=[0, 1], folder=free)
    assert find_damage(free, part.files) is None and part.seconds > 0
    assert [each.name for each in part.files] == ["__0_0.distcp", "__1_0.distcp"]


def test_a_file_in_the_folders_place_fails_the_write(tmp_path: Path) -> None:
    copies = write(CopyFolder(tmp_path / "copies"), vector(1))
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"^Not a directory: .*below$"):
        write_part(copies, FIRST, numbers=[0], folder=tmp_path / "file" / "below")


def test_without_a_copy_nothing_is_written(tmp_path: Path) -> None:
    copies = write(CopyFolder(tmp_path / "copies"), vector(1))
    with pytest.raises(CopyMissingError, match=r"no copy of device 1 at .* is held here: its memory was full"):
        write_part(copies, FIRST, numbers=[0, 1], folder=tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_parts_that_lack_a_shard_are_no_checkpoint(tmp_path: Path) -> None:
    copies = write(CopyFolder(tmp_path / "copies"), vector(1, 0, 0), vector(1, 0, 1, start=50))
    part = write_part(copies, FIRST, numbers=[1], folder=tmp_path / "saved")
    with pytest.raises(ValueError, match="has 100 elements, parts hold 50"):
        write_index(tmp_path / "saved", [part], step=1, config=Config.model_validate({"data": {"paths": ["."]}}).train)
    assert not (tmp_path / "saved" / METADATA).exists() and not (tmp_path / "saved" / COMMON).exists()


def test_a_copy_that_is_written_stays_as_it_is_though_newer_states_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer drops it, and makes copies of the next states; so does a store, after the death of the writer."""
    copies = write(CopyFolder(tmp_path / "copies"), vector(1))
    want = write_part(copies, FIRST, numbers=[0], folder=tmp_path / "before").files
    mkdir = Path.mkdir

    def go_on(path: Path, **options: Any) -> None:
        for version in (2, 3, 4):
            copies.drop(KeptStates(since=StateId(version=version, generation=0)), of_dead=True)
            write(copies, vector(version))
        assert not copies.has(FIRST, 0)
        mkdir(path, **options)

    monkeypatch.setattr(Path, "mkdir", go_on)
    part = write_part(copies, FIRST, numbers=[0], folder=tmp_path / "meanwhile")
    assert part.files == want


@examples(40)
@given(content=st.binary(min_size=1, max_size=400), data=st.data())
def test_any_change_of_a_file_is_found_and_named(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    (folder / "a").write_bytes(content)
    (folder / "b").write_bytes(b"as it was")
    sums = sum_files(folder, ["b", "a"])
    assert [each.name for each in sums] == ["a", "b"] and find_damage(folder, sums) is None
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    for damage in (bytes(changed), content[:at], content + b"x"):
        (folder / "a").write_bytes(damage)
        found = find_damage(folder, sums)
        assert found is not None and found.startswith(f"{folder / 'a'} h") and found.endswith("as written")
        assert (find_wrong_size(folder, sums) is None) == (len(damage) == len(content))
    (folder / "a").unlink()
    assert find_damage(folder, sums) == f"{folder / 'a'} cannot be read (No such file or directory)"
