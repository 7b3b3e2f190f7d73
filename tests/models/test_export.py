"""Export of a trained model as a folder: files that the library opens and that the next run starts from, bit for
bit."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rayfcp.config import Config, ConfigError
from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.models import export
from rayfcp.models.build import empty_model, random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import model_config
from rayfcp.models.export import export_checkpoint
from rayfcp.models.pretrained import check_weights, fill_pretrained
from tests.models.folders import ALL_FOLDERS, saved
from tests.models.helpers import VOCAB

SMALL_FILE = 20_000


def checkpoint(folder: Path, what: str) -> tuple[Config, CausalLM]:
    """A run of a saved family, and the model that its checkpoint, in `folder / "checkpoint"`, holds."""
    saved(folder / "first", what)
    model = {"path": str(folder / "first"), "dtype": "bfloat16"}
    config = Config.model_validate({"data": {"paths": ["."], "tokenizer": "bytes"}, "model": model})
    held = random_model(model_config(config.model, vocab_size=VOCAB), dtype="bfloat16", seed=5)
    dcp.save({"model": held.state_dict()}, checkpoint_id=folder / "checkpoint", no_dist=True)
    return config, held


@pytest.mark.parametrize("what", ALL_FOLDERS)
def test_an_export_has_the_family_s_own_files(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, shapes and types are those that the library saved; each tensor of the checkpoint was read once."""
    monkeypatch.setattr(export, "FILE_BYTES", SMALL_FILE)
    config, held = checkpoint(tmp_path, what)
    reads = []
    monkeypatch.setattr(dcp, "load", lambda state, _load=dcp.load, **keys: (reads.extend(state), _load(state, **keys)))
    out = tmp_path / "out"
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=out, vocab_size=VOCAB)
    assert len(reads) == len(set(reads)) == len({id(each) for each in held.parameters()})
    kinds = []
    for folder in (tmp_path / "first", out):
        tensors = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
        kinds.append({name: (each.shape, each.dtype) for name, each in tensors.items()})
    assert kinds[0] == kinds[1]
    sizes = [file.stat().st_size for file in out.glob("*.safetensors")]
    largest = max(shape.numel() * 2 for shape, _ in kinds[1].values())
    assert len(sizes) > 1 and max(sizes) < max(SMALL_FILE, largest) + 8000
    want = {name: each.detach().bfloat16() for name, each in held.model.named_parameters()}
    kind = AutoModelForImageTextToText if what in VISION_FAMILIES else AutoModelForCausalLM
    opened = kind.from_pretrained(out)
    assert opened.dtype is torch.bfloat16 and opened.config.architectures == [type(opened).__name__]
    for name, weight in opened.named_parameters():
        assert torch.equal(weight, want[name]), name


@pytest.mark.parametrize("what", ["qwen3, tied", "qwen3_moe"])
def test_the_next_run_starts_from_it(what: str, tmp_path: Path) -> None:
    config, held = checkpoint(tmp_path, what)
    out = tmp_path / "out"
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=out, vocab_size=VOCAB)
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    library = model_config(config.model.model_copy(update={"path": str(out)}), vocab_size=VOCAB)
    check_weights(str(out), library)
    model = empty_model(library, dtype="float32")
    model.to_empty(device="cpu")
    model.tie()
    fill_pretrained(model.model, str(out), config=library)
    want = dict(held.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, want[name].bfloat16().float()), name


def test_the_index_names_every_tensor_and_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", SMALL_FILE)
    config, held = checkpoint(tmp_path, "llama")
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=VOCAB)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {name for name, _ in held.model.named_parameters()}
    assert index["metadata"]["total_size"] == 2 * sum(each.numel() for each in held.parameters())
    for out in (tmp_path / "out", tmp_path / "out" / "config.json"):
        with pytest.raises(ConfigError, match="must be an empty folder or absent"):
            export_checkpoint(config, tmp_path / "checkpoint", out_dir=out, vocab_size=VOCAB)


def test_a_tensor_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    config, held = checkpoint(tmp_path, "llama")
    state = held.state_dict()
    del state["model.model.norm.weight"]
    dcp.save({"model": state}, checkpoint_id=tmp_path / "less", no_dist=True)
    message = r"^checkpoint \S*less does not fit this model \(.*model\.model\.norm\.weight\b.*\); export "
    with pytest.raises(ConfigError, match=message):
        export_checkpoint(config, tmp_path / "less", out_dir=tmp_path / "out", vocab_size=VOCAB)


@pytest.mark.parametrize("what", VISION_FAMILIES)
def test_a_frozen_encoder_is_exported_from_where_it_came(what: str, tmp_path: Path) -> None:
    """No checkpoint has it."""
    config, held = checkpoint(tmp_path, what)
    keys = config.model.model_dump() | {"init": "pretrained", "freeze_vision": True, "dtype": "float32"}
    config = config.changed(model=keys)
    library = model_config(config.model, vocab_size=VOCAB)
    base = random_model(library, dtype="float32", seed=0, freeze_vision=True, path=config.model.path)
    trained = {name for name, each in base.named_parameters(remove_duplicate=False) if each.requires_grad}
    state = {name: each for name, each in held.state_dict().items() if name in trained}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "less", no_dist=True)
    export_checkpoint(config, tmp_path / "less", out_dir=tmp_path / "out", vocab_size=VOCAB)
    opened = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    want = dict(base.named_parameters()) | {name: each for name, each in held.named_parameters() if name in trained}
    for name, weight in opened.named_parameters():
        assert torch.equal(weight, want[f"model.{name}"]), name
