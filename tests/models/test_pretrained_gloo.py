"""Weights of a folder on devices that share a model: each reads its own parts, and nothing else, bit for bit."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rayfcp.config.models import ModelConfig
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.reports import ReadWeight
from rayfcp.execute.state.copying import own_box
from rayfcp.execute.state.identity import contents_of
from rayfcp.models import pretrained
from rayfcp.models.build import sharded_model
from rayfcp.models.library import vision_family
from rayfcp.models.pretrained import contents_at, fill_pretrained, read
from tests.execute.gloo import joined, on_processes
from tests.models.folders import saved


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model of three layers on devices."""

    what: str
    num_ranks: int = 1
    num_stages: int = 1
    tensor_parallel: int = 1

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.num_stages * self.tensor_parallel


RUNS = (
    Run(what="qwen3, tied", num_ranks=3),
    Run(what="qwen3, tied", num_stages=3),
    Run(what="qwen2, with biases", tensor_parallel=2),
    Run(what="llama", num_ranks=2, tensor_parallel=2),
    Run(what="phi3, fused", num_ranks=2, num_stages=2),
    Run(what="qwen3_moe", num_ranks=3),
    Run(what="qwen3_moe", num_ranks=2, num_stages=2),
    Run(what="mixtral, experts renamed", num_ranks=4),
    Run(what="qwen3_vl", num_ranks=2),
    Run(what="internvl", num_ranks=3),
)
"""Five experts on three ranks; three on four."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Model that a device loaded from a folder: parameters that differ from what was saved; elements held, of the
    model, and read; contents of what it read, and of the whole folder."""

    wrong: tuple[str, ...]
    num_held: int
    num_whole: int
    num_read: int
    weights: tuple[ReadWeight, ...]
    contents: dict[str, str]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Device]]:
    """Results by run, then by device."""
    folder = tmp_path_factory.mktemp("pretrained")
    for what in {run.what for run in RUNS}:
        saved(folder / what, what)
    loaded = on_processes(_load_all, folder, size=max(run.num_devices for run in RUNS))
    return [[each[index] for each in loaded if index in each] for index in range(len(RUNS))]


def _load_all(number: int, client: dist.Store, folder: Path) -> dict[int, Device]:
    loaded = {}
    for index, run in enumerate(RUNS):
        if number < run.num_devices:
            position = MeshPosition.of(
                number, num_ranks=run.num_ranks, num_stages=run.num_stages, tensor_parallel=run.tensor_parallel
            )
            with joined(position, client, name=f"{index}") as world:
                loaded[index] = _load(folder / run.what, world)
    return loaded


def _load(folder: Path, world: ProcessGroups) -> Device:
    config, path = AutoConfig.from_pretrained(folder), str(folder)
    model = sharded_model(config, run=ModelConfig(path=path, init="pretrained"), seed=0, world=world)
    kind = AutoModelForCausalLM if vision_family(config) is None else AutoModelForImageTextToText
    want = dict(kind.from_pretrained(folder).named_parameters())
    wrong, num_held = [], 0
    for name, parameter in model.model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        num_held += local.numel()
        if not torch.equal(local.detach(), read(want[name].detach(), own_box(parameter)).float()):
            wrong.append(name)
    sizes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pretrained, "own_box", lambda target: (sizes.append(own_box(target).num_elements), own_box(target))[1]
        )
        weights = fill_pretrained(model.model.requires_grad_(False), path, config=config)
    num_whole = sum(each.numel() for each in want.values())
    same = contents_at(path, config)
    return Device(
        wrong=tuple(wrong), num_held=num_held, num_whole=num_whole, num_read=sum(sizes), weights=weights, contents=same
    )


@pytest.mark.parametrize("index", range(len(RUNS)), ids=lambda index: f"{RUNS[index].what} {index}")
def test_devices_hold_their_parts_and_read_nothing_else(index: int, found: list[list[Device]]) -> None:
    devices = found[index]
    assert len(devices) == RUNS[index].num_devices
    for device in devices:
        assert not device.wrong
        assert device.num_read == device.num_held < 0.7 * device.num_whole
    assert contents_of(part for device in devices for part in device.weights) == devices[0].contents
