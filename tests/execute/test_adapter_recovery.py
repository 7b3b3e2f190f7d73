"""Runs with adapters: a device is killed, ranks come and go, stages too; frozen weights are in no copy and come back
from the seed. On real gloo processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.cluster.dataset import open_dataset
from rayfcp.config import Config
from rayfcp.data.prepare import prepare_local
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.values.state import StateId
from tests.cluster.runs import run_config, write_texts
from tests.execute.generations import PATIENCE_S, Device, Generation, Member, results_of
from tests.execute.gloo import client_of
from tests.execute.saving import save

SCRIPT = (
    Generation(world=(1, 3, 1), members=(0, 1, 2), steps=(1, 2), end="forward"),
    Generation(world=(1, 2, 1), members=(0, 1), steps=(3,)),
    Generation(world=(2, 1, 1), members=(1, 0), steps=(4,)),
    Generation(world=(1, 3, 1), members=(3, 0, 1), steps=(5,)),
)
KILLED = {2}
LAST = SCRIPT[-1].steps[-1]


def config_of(folder: Path) -> Config:
    architecture = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
    lora = {"rank": 4, "dora": True}
    return run_config(
        folder,
        name="adapters",
        model={"architecture": architecture | {"ffn_size": 100}, "dtype": "float64", "lora": lora},
        data={"max_seqlen": 64, "global_batch_sequences": 4},
        train={"steps": LAST, "grad_clip": 0.5, "learning_rate": 1e-2},
        elastic={"start_timeout_s": PATIENCE_S, "collective_timeout_s": 120.0},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_texts(folder)
    prepare_local(config_of(folder).data, out_dir=str(folder / "shards"))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Results of each process that survived."""
    return results_of(_process, {member for each in SCRIPT for member in each.members}, killed=KILLED, folder=folder)


def _process(me: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    config = config_of(Path(folder))
    data = open_dataset(config, data_dir=str(Path(folder) / "shards"))
    member = Member(config, data, folder=Path(folder), me=me, connect=lambda: client_of(port))
    member.run(SCRIPT)
    torch.save(member.found, Path(folder) / f"{me}.pt")


@pytest.fixture
def device(folder: Path) -> Iterator[Device]:
    config = config_of(folder)
    device = Device(config, open_dataset(config, data_dir=str(folder / "shards")), folder=folder)
    device.join(MeshPosition(rank=0, num_ranks=1), store=dist.HashStore(), empty=False)
    yield device
    device.engine.close()


def weights_of(device: Device) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor().clone() for name, each in device.model.named_parameters()}


def test_steps_are_those_of_the_undisturbed_run(found: dict[int, list[dict[str, Any]]], device: Device) -> None:
    alone = [device.step(step) for step in range(1, LAST + 1)]
    assert alone[-1].loss < alone[0].loss - 0.01
    seen = set()
    for me, facts in found.items():
        for fact in (fact for fact in facts if "loss" in fact):
            want = alone[fact["step"] - 1]
            assert fact["loss"] == pytest.approx(want.loss, rel=1e-9), (me, fact)
            assert fact["norm"] == pytest.approx(want.grad_norm, rel=1e-8), (me, fact)
            seen.add(fact["step"])
    assert seen == set(range(1, LAST + 1))


def test_a_checkpoint_has_adapters_only_and_gives_the_same_model(device: Device, folder: Path) -> None:
    """A model that is filled from it has identical weights, frozen ones too."""
    for step in (1, 2):
        device.step(step)
    state = StateId(version=2, generation=9)
    assert device.engine.copy_state(state) == state
    (header,) = [each for each in device.copies.headers() if each.state == state]
    trained = {name for name, each in device.model.named_parameters() if each.requires_grad}
    assert {entry.name for entry in header.entries} == trained and all(".lora_" in name for name in trained)
    saved = folder / "saved"
    save(device.copies, state, nodes=[[0]], folder=saved, train=device.engine._config.train)
    want, after = weights_of(device), device.step(3)
    device.engine.leave()
    device.join(MeshPosition(rank=0, num_ranks=1), store=dist.HashStore(), empty=True)
    device.engine.load(str(saved))
    assert all(torch.equal(each, want[name]) for name, each in weights_of(device).items())
    again = device.step(3)
    assert (again.loss, again.grad_norm) == (after.loss, after.grad_norm)
