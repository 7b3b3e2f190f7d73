"""`rayfcp export` for models of every kind: what it writes opens in transformers, by its own page where it is adapters,
with the logits of the run; numbers are rounded once; another base is refused.
"""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.cli import main
from rayfcp.cluster.checkpoints.folder import FROZEN, CheckpointFolder, Manifest
from rayfcp.cluster.checkpoints.resuming import comparable_model
from rayfcp.cluster.dataset import model_of_checkpoint
from rayfcp.config import Config, dump_config
from rayfcp.execute.reports import sum_files
from rayfcp.execute.state.identity import first_weights
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import configured_model
from rayfcp.models.nf4 import Nf4Linear
from tests.models import recurrent, test_multimodal
from tests.models.folders import ALL_FOLDERS, EXPERTS, SHAPE, saved
from tests.models.helpers import VOCAB

STEP = 3
PACKED = {**SHAPE, "hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "initializer_range": 0.2}
OTHERS = {"afmoe": {**SHAPE, **EXPERTS, "num_dense_layers": 1, "layer_types": ["full_attention"] * 3}}
LORA = {"rank": 4, "alpha": 6}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, tied": ("qwen3, tied", {}),
    "dense, not from weights": ("llama", {"init": "random"}),
    "fused": ("phi3, fused", {}),
    "experts": ("qwen3_moe", {}),
    "experts with a bias that is not trained": ("afmoe", {}),
    "recurrent": ("qwen3_next", {}),
    "without attention": ("mamba2", {}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl, frozen encoder": ("qwen3_vl", {"freeze_vision": True}),
    "internvl": ("internvl", {}),
    "text of a multimodal model": ("gemma3, multimodal", {}),
    "reward": ("llama", {}),
}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3, tied", LORA),
    "experts, dora": ("qwen3_moe", {**LORA, "dora": True}),
    "qwen3_vl": ("qwen3_vl", LORA),
    "internvl": ("internvl", LORA),
    "reward": ("llama", {**LORA, "rslora": True}),
    "packed": ("packed", {**LORA, "quantize": "nf4"}),
    "packed, some layers": ("packed", {**LORA, "quantize": "nf4", "targets": ["q_proj", "v_proj"]}),
}


def write_base(folder: Path, what: str) -> None:
    if what in ALL_FOLDERS:
        saved(folder, what, dtype=torch.float32)
    elif what == "gemma3, multimodal":
        test_multimodal.saved("gemma3", folder)
    else:
        known = recurrent.library(what, vocab_size=VOCAB) if what in recurrent.FAMILIES else None
        config = known or AutoConfig.for_model(what if what in OTHERS else "llama", **OTHERS.get(what, PACKED))
        with torch.random.fork_rng():
            torch.manual_seed(5)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def written_run(folder: Path, what: str, **model: Any) -> tuple[Config, CausalLM]:
    """A run in `folder / "run"` as training leaves it, of a model in `folder / "base"` whose trained parts differ from
    the first ones; and this model."""
    if not (folder / "base").exists():
        write_base(folder / "base", what)
    config = Config.model_validate(
        {
            "run": {"dir": str(folder / "run")},
            "data": {"paths": ["."], "tokenizer": "bytes", "max_seqlen": 32},
            "model": {"path": str(folder / "base"), "init": "pretrained", **model},
            "loss": {"type": "reward" if folder.name.startswith("reward") else "cross_entropy"},
        }
    )
    run, seed = config.model, config.run.seed
    path = run.path if run.init == "pretrained" else None
    library = configured_model(config, vocab_size=VOCAB)
    keys: dict[str, Any] = {"freeze_vision": run.freeze_vision, "lora": run.lora, "path": path}
    held = random_model(library, dtype=run.dtype, seed=seed, **keys)
    generator = torch.Generator().manual_seed(1)
    trained = {name: each.data for name, each in held.named_parameters() if each.requires_grad}
    for each in trained.values():
        each.add_(torch.randn(each.shape, generator=generator), alpha=0.05)
    folders = CheckpointFolder(folder / "run" / "checkpoints", keep=1)
    folders.open()
    unfinished = folders.unfinished(STEP)
    dcp.save({"model": trained}, checkpoint_id=unfinished, no_dist=True)
    manifest = Manifest(
        step=STEP,
        world_size=1,
        model=comparable_model(model_of_checkpoint(config, vocab_size=VOCAB)),
        data={},
        files=sum_files(unfinished, [each.name for each in unfinished.iterdir()]),
        loss=config.loss.options,
        weights={FROZEN: first_weights(run, seed=seed, read=held.read_weights)},
    )
    folders.commit(unfinished, manifest)
    (folder / "run" / "config.yaml").write_text(dump_config(config))
    if held.model._supports_sdpa:
        held.model.set_attn_implementation("sdpa")
    return config, held


def export(folder: Path, out: str, *words: str) -> Path:
    assert main(["export", str(folder / "run"), str(folder / out), *words]) == 0
    return folder / out


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(3, 40)[None]).logits
    return found.float()


def loss_of(logits: Tensor) -> float:
    return float(F.cross_entropy(logits[0, :-1], torch.arange(4, 40)))


def assert_opens(out: Path, held: CausalLM) -> None:
    want = logits_of(held.model)
    opened = getattr(transformers, AutoConfig.from_pretrained(out).architectures[0]).from_pretrained(out)
    torch.testing.assert_close(logits_of(opened), want, rtol=1e-4, atol=1e-4)
    if opened.can_generate():
        assert opened.generate(torch.arange(3, 9)[None], max_new_tokens=2, min_new_tokens=2).shape == (1, 8)


def opened_by_page(out: Path) -> Any:
    """The model that the page of an export of adapters opens."""
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"]


def unpack(opened: Any, held: CausalLM) -> None:
    """Check that the layers with adapters, and no others, are packed as the run has them, and replace them by layers
    with the same weights, whose products are exact."""
    layers = dict(held.model.named_modules())
    packed = {name: each for name, each in opened.get_base_model().named_modules() if isinstance(each, Linear4bit)}
    assert packed.keys() == {name for name, each in layers.items() if isinstance(each, Nf4Linear)}
    for name, layer in packed.items():
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert torch.equal(weight, layers[name].weight)
        opened.get_base_model().set_submodule(name, layers[name].unpack())


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, (what, model) = tmp_path_factory.mktemp(kind.split(",", maxsplit=1)[0]), KINDS[kind]
    _, held = written_run(folder, what, **model)
    assert_opens(export(folder, "out"), held)


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_of_every_kind(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, (what, lora) = tmp_path_factory.mktemp(kind.split(",", maxsplit=1)[0]), ADAPTED[kind]
    _, held = written_run(folder, what, lora=lora)
    want = logits_of(copy.deepcopy(held.model))
    assert_opens(export(folder, "merged", "--merge"), held)
    opened = opened_by_page(export(folder, "adapter"))
    if "quantize" in lora:
        unpack(opened, held)  # before bitsandbytes' first product on CPUs, for which it stores weights anew
        usual = logits_of(opened_by_page(folder / "adapter"))
        assert loss_of(usual) == pytest.approx(loss_of(want), rel=5e-3)
    torch.testing.assert_close(logits_of(opened), want, rtol=1e-4, atol=1e-4)


def tensors(out: Path) -> dict[str, Tensor]:
    (file,) = out.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("lora", "words"),
    [({}, []), ({**LORA, "quantize": "nf4", "dora": True}, ["--merge"]), (LORA, ["--merge"]), (LORA, [])],
)
def test_numbers_are_rounded_once(dtype: str, lora: dict[str, Any], words: Sequence[str], tmp_path: Path) -> None:
    """For a run of any precision, numbers in bfloat16 equal those in float32, rounded."""
    _, held = written_run(tmp_path, "packed", dtype=dtype, lora=lora)
    wide = tensors(export(tmp_path, "wide", *words, "--dtype", "float32"))
    short = tensors(export(tmp_path, "short", *words, "--dtype", "bfloat16"))
    usual = tensors(export(tmp_path, "usual", *words))
    assert wide.keys() == short.keys() == usual.keys()
    assert all(each.dtype == torch.float32 for each in wide.values())
    assert all(torch.equal(short[name], each.bfloat16()) for name, each in wide.items())
    same = short if dtype == "bfloat16" and not (lora and not words) else wide
    assert all(torch.equal(each, same[name]) for name, each in usual.items())
    if words or not lora:
        name = "model.layers.1.mlp.up_proj"
        layer = held.model.get_submodule(name)
        want = layer.weight if not lora else layer.base_layer.weight.float() + layer.get_delta_weight("default")
        if not lora.get("dora"):
            assert torch.equal(wide[f"{name}.weight"], want.data)


def test_another_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written_run(tmp_path, "packed", lora=LORA)
    capsys.readouterr()
    first = tensors(export(tmp_path, "first", "--merge"))
    (tmp_path / "base").rename(tmp_path / "moved")
    moved = [f"model.path={tmp_path / 'moved'}"]
    again = tensors(export(tmp_path, "again", "--merge", *moved))
    assert all(torch.equal(each, first[name]) for name, each in again.items())
    file = tmp_path / "moved" / "model.safetensors"
    held = load_file(file)
    held["model.layers.2.mlp.up_proj.weight"].view(torch.int32)[5, 7] ^= 1
    save_file(held, file, metadata={"format": "pt"})
    words = ["export", str(tmp_path / "run"), str(tmp_path / "other"), "--merge", *moved]
    capsys.readouterr()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "moved', with other weights than the run began with (model.layers.2.mlp.up_proj.weight, 1 in all); " in told
    assert "checkpoint.accept_other_weights=true" in told and told.count("\n") == 1
    assert main([*words, "checkpoint.accept_other_weights=true"]) == 0
    assert "accepted by checkpoint.accept_other_weights" in capsys.readouterr().err
    export(tmp_path, "adapter", *moved)  # does not read the base


def test_another_seed_is_another_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written_run(tmp_path, "packed", lora=LORA, init="random")
    export(tmp_path, "out", "--merge")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "other"), "--merge", "run.seed=8"]) == 2
    assert "run.seed is 8, with other weights than the run began with" in capsys.readouterr().err


def test_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written_run(tmp_path, "packed", lora=LORA)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "model.lora.alpha=64"]) == 2
    assert "model.lora.alpha is 64, the checkpoint's is 6; " in capsys.readouterr().err
