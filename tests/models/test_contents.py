"""The contents of a model's files: the same for the same weights, wherever and however they are stored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rayfcp.config.adapting import LoraConfig
from rayfcp.config.models import ModelConfig
from rayfcp.execute.state.identity import contents_of
from rayfcp.models.build import random_model
from rayfcp.models.describe import model_config
from rayfcp.models.pretrained import contents_at
from tests.models.folders import saved
from tests.models.helpers import VOCAB


def contents(folder: Path) -> dict[str, str]:
    run = ModelConfig(path=str(folder), init="pretrained")
    return contents_at(str(folder), model_config(run, vocab_size=VOCAB, max_seqlen=32))


@pytest.fixture(scope="module", params=["qwen3, tied", "qwen3_moe", "phi3, fused"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16, in several files."""
    folder = tmp_path_factory.mktemp("base")
    saved(folder, request.param)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def again(base: Path, folder: Path, *, dtype: torch.dtype = torch.bfloat16, size: str = "5GB") -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=size)
    return folder


def linked(base: Path, folder: Path) -> Path:
    folder.symlink_to(base)
    return folder


def with_other_files(base: Path, folder: Path) -> Path:
    shutil.copytree(base, folder)
    (folder / "tokenizer.json").write_text('{"other": 1}')
    return folder


def with_head(base: Path, folder: Path) -> Path:
    """A tied matrix under both of its names."""
    again(base, folder)
    held = load_file(folder / "model.safetensors")
    held.setdefault("lm_head.weight", held["model.embed_tokens.weight"].clone())
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


SAME: dict[str, Callable[[Path, Path], Path]] = {
    "another folder": lambda base, folder: Path(shutil.copytree(base, folder)),
    "a link": linked,
    "one file": again,
    "more files": lambda base, folder: again(base, folder, size="9KB"),
    "float32": lambda base, folder: again(base, folder, dtype=torch.float32),
    "another tokenizer": with_other_files,
    "a tied matrix twice": with_head,
}


@pytest.mark.parametrize("way", SAME)
def test_the_same_weights(way: str, base: Path, tmp_path: Path) -> None:
    assert contents(SAME[way](base, tmp_path / "other")) == contents(base)


def one_bit(held: dict[str, Tensor]) -> set[str]:
    held["model.norm.weight"].view(torch.int16)[3] ^= 1
    return {"model.norm.weight"}


def two_layers(held: dict[str, Tensor]) -> set[str]:
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 2)]
    held[names[0]], held[names[1]] = held[names[1]].clone(), held[names[0]].clone()
    return set(names)


def two_rows(held: dict[str, Tensor]) -> set[str]:
    name = "model.layers.1.self_attn.o_proj.weight"
    held[name] = held[name].flip(0).contiguous()
    return {name}


@pytest.mark.parametrize("change", [one_bit, two_layers, two_rows])
def test_other_weights(change: Callable[[dict[str, Tensor]], set[str]], base: Path, tmp_path: Path) -> None:
    folder = again(base, tmp_path / "other")
    held = load_file(folder / "model.safetensors")
    names = change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    first, found = contents(base), contents(folder)
    assert first.keys() == found.keys() and {name for name in first if first[name] != found[name]} == names


def test_rounded_weights_are_others(tmp_path: Path) -> None:
    saved(tmp_path / "base", "qwen3")
    wide = again(tmp_path / "base", tmp_path / "wide", dtype=torch.float32)
    held = {name: each + 1e-3 * torch.randn(each.shape) for name, each in load_file(wide / "model.safetensors").items()}
    save_file(held, wide / "model.safetensors", metadata={"format": "pt"})
    found = contents(again(wide, tmp_path / "short"))
    assert all(found[name] != each for name, each in contents(wide).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_model_reads_the_contents_of_its_files(dtype: str, quantize: str | None, tmp_path: Path) -> None:
    """Contents do not depend on the dtype of the run, nor on packing."""
    keys = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "base").mkdir()
    run = ModelConfig.model_validate(
        {"path": str(tmp_path / "base"), "init": "pretrained", "lora": {"rank": 2, "quantize": quantize}}
    )
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB, **keys}))
    library = model_config(run, vocab_size=VOCAB, max_seqlen=32)
    AutoModelForCausalLM.from_config(library).save_pretrained(tmp_path / "base")
    lora: LoraConfig = run.lora
    model = random_model(library, dtype=dtype, seed=0, lora=lora, path=run.path)
    assert contents_of(model.read_weights) == contents(tmp_path / "base")
