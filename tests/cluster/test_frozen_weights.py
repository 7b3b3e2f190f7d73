"""A resumed or recovered run keeps the weights that it does not train, and says which options of its loss changed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from rayfcp.cluster.checkpoints.folder import (
    FROZEN,
    MANIFEST,
    CheckpointFolder,
    Manifest,
    check_same_model,
    read_manifest,
)
from rayfcp.cluster.checkpoints.resuming import Resume, comparable_model
from rayfcp.config import Config, ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.execute.reports import Joined, ReadWeight
from rayfcp.execute.state.checkpoint import write_index
from rayfcp.values.state import Box
from tests.cluster.runs import run_config

FIRST = {"a.weight": 1 << 63, "b.weight": 2}


class AnySampler:
    def check_state(self, state: dict[str, Any]) -> None: ...


def joined(contents: Mapping[str, int], *, num_devices: int) -> list[Joined]:
    """Reports of devices, each of which has read a part of every tensor."""
    found = []
    for number in range(num_devices):
        box = Box(offsets=(number,), sizes=(1,))
        own = {name: each if number == 0 else number << 60 for name, each in contents.items()}
        if number == 0:
            own = {name: each - sum(range(num_devices)) * (1 << 60) for name, each in own.items()}
        parts = tuple(ReadWeight(name=name, box=box, content=each & (1 << 64) - 1) for name, each in own.items())
        found.append(Joined(process_groups=1, process_group_s=0.1, weights=parts))
    return found


class Resumed:
    """Checks and messages of a run that resumes in a folder."""

    def __init__(self, config: Config) -> None:
        self.said: list[str] = []
        sampler: Any = AnySampler()
        self.resume = Resume(config, owner="own", sampler=sampler, model={"hidden_size": 8}, log=self.said.append)

    def reads(self, contents: Mapping[str, int], *, num_devices: int = 2) -> None:
        self.resume.check_weights(joined(contents, num_devices=num_devices))


def adapted(folder: Path, **checkpoint: Any) -> Config:
    model = {"path": "base", "init": "pretrained", "lora": {"rank": 2}}
    return run_config(folder, name="run", model=model, data={"tokenizer": "bytes"}, checkpoint=checkpoint)


def write(config: Config, resumed: Resumed | None) -> Path:
    """A checkpoint of a run, by an earlier release if `resumed` is None."""
    folders = CheckpointFolder(Path(config.run_dir) / "checkpoints", keep=1)
    folders.open()
    unfinished = folders.unfinished(3)
    unfinished.mkdir()
    fields: dict[str, Any] = {"step": 3, "world_size": 2, "model": {"hidden_size": 8}, "data": {}}
    if resumed is not None:
        fields |= {"loss": config.loss.options, "weights": resumed.resume.weights}
    return folders.commit(
        unfinished, Manifest(files=write_index(unfinished, [], step=3, config=config.train), **fields)
    )


def test_frozen_weights_are_kept(tmp_path: Path) -> None:
    """Recoveries on any number of devices, and runs that resume, keep the frozen weights."""
    config = adapted(tmp_path)
    first = Resumed(config)
    first.reads(FIRST, num_devices=1)
    first.reads(FIRST, num_devices=3)
    told = (
        r"^model.path is 'base', with other weights than the run began with \(b.weight, 1 in all\); give those, in any"
    )
    with pytest.raises(ConfigError, match=told):
        first.reads(FIRST | {"b.weight": 3})
    checkpoint = write(config, first)
    assert read_manifest(checkpoint).weights == {FROZEN: {"a.weight": "8" + 15 * "0", "b.weight": f"{2:016x}"}}
    Resumed(config).reads(FIRST)
    for other in (FIRST | {"b.weight": 3}, {"b.weight": 2}, FIRST | {"c.weight": 4}):
        with pytest.raises(ConfigError, match="with other weights than the run began with"):
            Resumed(config).reads(other)
    accepting = Resumed(adapted(tmp_path, accept_other_weights=True))
    accepting.reads(FIRST | {"b.weight": 3})
    assert len(accepting.said) == 1 and accepting.said[0].endswith("accepted by checkpoint.accept_other_weights")
    assert accepting.resume.weights[FROZEN]["b.weight"] == f"{3:016x}"


def test_a_checkpoint_of_an_earlier_release_is_accepted(tmp_path: Path) -> None:
    config = adapted(tmp_path)
    checkpoint = write(config, None)
    assert not {"loss", "weights"} & json.loads((checkpoint / MANIFEST).read_text()).keys()
    resumed = Resumed(config)
    resumed.reads(FIRST)
    told = "the checkpoint of step 3 does not say which weights were frozen: those of model.path are taken for the same"
    assert resumed.said == [told]
    with pytest.raises(ConfigError, match="with other weights"):
        resumed.reads(FIRST | {"b.weight": 3})


def test_a_run_that_trains_all_has_nothing_to_keep(tmp_path: Path) -> None:
    resumed = Resumed(run_config(tmp_path, name="run"))
    resumed.reads({})
    assert resumed.resume.weights == {} and not resumed.said


def test_frozen_weights_that_are_drawn_have_a_seed(tmp_path: Path) -> None:
    config = run_config(tmp_path, name="run", model={"lora": {"rank": 2}})
    first = Resumed(config)
    first.reads({})
    write(config, first)
    with pytest.raises(ConfigError, match=r"^run\.seed is 4, with other weights"):
        Resumed(config.changed(run={"seed": 4})).reads({})


class NoWorkers:
    """Finds all files of a checkpoint intact."""

    def __len__(self) -> int:
        return 1

    def call(self, _: Any) -> list[None]:
        return [None]


def test_options_of_the_loss_that_changed_are_told(tmp_path: Path) -> None:
    config = run_config(tmp_path, name="run", loss={"type": "distillation", "temperature": 2.0})
    write(config, Resumed(config))
    group: Any = NoWorkers()
    for loss, told in (
        ({}, []),
        (
            {"temperature": 3.0, "share": 0.5},
            ["resumed with other loss options: temperature 2.0 -> 3.0, share 1.0 -> 0.5"],
        ),
        (
            {"type": "cross_entropy", "temperature": 1.0},
            ["resumed with other loss options: type distillation -> cross_entropy"],
        ),
    ):
        resumed = Resumed(config.changed(loss=loss, data={"rows": None}))
        resumed.resume.verify(group)
        assert resumed.said == told


def test_keys_of_adapters_that_changed_are_named() -> None:
    def of(**lora: Any) -> dict[str, Any]:
        return {"hidden_size": 8, "lora": LoraConfig(**lora).model_dump(mode="json")}

    manifest = Manifest(step=1, world_size=1, data={}, files=(), model=of(rank=8, targets=("q_proj", "v_proj")))
    check_same_model(manifest, of(rank=8, alpha=8, targets=("v_proj", "q_proj")))
    for now, told in (
        (of(rank=8, alpha=64, targets=("q_proj", "v_proj")), "model.lora.alpha is 64, the checkpoint's is 8; a"),
        (
            of(rank=8, dora=True),
            "model.lora.dora is True, the checkpoint's is False; model.lora.targets is ['all-linear']",
        ),
        ({"hidden_size": 8}, "model.lora.rank is None, the checkpoint's is 8; a resumed run keeps its model"),
        (of(rank=8, targets=("q_proj", "v_proj")) | {"freeze_vision": True}, "model.freeze_vision is True, the"),
        ({**of(rank=8, targets=("q_proj", "v_proj")), "text_config": {"size": 3}}, "model text_config.size is 3, the"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_same_model(manifest, now)
        assert str(caught.value).startswith(told), told


def test_targets_are_the_layers_that_they_name() -> None:
    config = Qwen3Config(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, head_dim=4)

    def of(*targets: str) -> dict[str, Any]:
        return comparable_model(
            config.to_dict() | {"lora": LoraConfig(rank=2, targets=targets).model_dump(mode="json")}
        )

    manifest = Manifest(step=1, world_size=1, data={}, files=(), model=of("all-linear"))
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    check_same_model(manifest, of(*names))
    with pytest.raises(ConfigError, match=r"model\.lora\.targets is \['down_proj', .*, the checkpoint's is \['all-l"):
        check_same_model(manifest, of(*names[1:]))
