"""Weights keep all bits from files to devices, from devices to a run's own checkpoint, and from that to files."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig

from rayfcp.config import Config
from rayfcp.config.models import ModelConfig, TrainConfig
from rayfcp.execute.optimization import make_optimizer
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.copying import Copier
from rayfcp.models.build import sharded_model
from rayfcp.models.export import export_checkpoint
from rayfcp.values import StateId
from tests.execute.gloo import joined, on_processes
from tests.execute.saving import save
from tests.models.folders import saved
from tests.models.helpers import VOCAB

NUM_DEVICES = 2
RUNS = {
    "qwen3, tied": {"num_stages": 2},
    "qwen2, with biases": {"tensor_parallel": 2},
    "qwen3_moe": {"num_ranks": 2},
    "gemma": {"num_ranks": 2},
}
"""Ways in which two devices share a model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("round")
    for what in RUNS:
        saved(folder / what / "first", what)
    on_processes(_save_all, folder, size=NUM_DEVICES)
    return folder


def _save_all(number: int, client: dist.Store, folder: Path) -> None:
    for what, layout in RUNS.items():
        position = MeshPosition.of(number, **{"num_ranks": 1, **layout})
        with joined(position, client, name=what) as world:
            _save(folder / what, world)


def _save(folder: Path, world: ProcessGroups) -> None:
    run = ModelConfig(path=str(folder / "first"), init="pretrained", dtype="bfloat16")
    model = sharded_model(AutoConfig.from_pretrained(folder / "first"), run=run, seed=0, world=world)
    state, copies = StateId(version=0, generation=0), CopyFolder(folder / "copies")
    optimizer = make_optimizer(model, TrainConfig())
    Copier(model, optimizer, position=world.position, copies=copies).take(state)
    dist.barrier(world.control)
    if world.position.device == 0:
        save(copies, state, nodes=[[number] for number in range(NUM_DEVICES)], folder=folder / "checkpoint")


@pytest.mark.parametrize("what", RUNS)
def test_files_come_back_as_they_were(what: str, folder: Path) -> None:
    first, out = folder / what / "first", folder / what / "out"
    model = {"path": str(first), "dtype": "bfloat16"}
    config = Config.model_validate({"data": {"paths": ["."], "tokenizer": "bytes"}, "model": model})
    export_checkpoint(config, folder / what / "checkpoint", out_dir=out, vocab_size=VOCAB)
    found, want = (
        {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}
        for path in (out, first)
    )
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        assert tensor.dtype is want[name].dtype and torch.equal(tensor, want[name]), name
