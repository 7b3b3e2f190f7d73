"""The text part of a multimodal model: the library's logits on text, and a whole model again when it is exported."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import ModelConfig
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import model_config
from rayfcp.models.export import export_checkpoint
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import decoder_of
from rayfcp.models.multimodal import check_text_alone, text_part
from rayfcp.models.pretrained import check_weights
from rayfcp.values.layers import count_kinds
from tests.models.families import disturb, recorded_hidden
from tests.models.folders import SHAPE, SHARED
from tests.models.helpers import VOCAB, context_of, loss_sum, rows_of
from tests.models.recurrent import DELTA, EXPERTS
from tests.models.test_pretrained import rewritten

LENGTHS = (9, 14)
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **DELTA}
VISION = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
PIXELS = {"image_size": 16, "patch_size": 8}
MERGED = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "patch_size": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**SHAPE, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        "vision_config": {"model_type": "siglip_vision_model", **VISION, **PIXELS},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {**SHAPE, **SHARED, "pad_token_id": 0},
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "qwen3_5": {"text_config": {**SHAPE, **LINEAR, "rope_parameters": ROPE}, "vision_config": MERGED},
    "qwen3_5_moe": {
        "text_config": {**SHAPE, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16, "rope_parameters": ROPE},
        "vision_config": MERGED,
    },
    "llama4": {
        "text_config": {
            **SHAPE,
            **{"intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2},
            **{"floor_scale": 4, "attn_scale": 0.5, "attention_chunk_size": 6, "no_rope_layers": [1, 0, 1]},
        },
        "vision_config": {**VISION, **PIXELS, "vision_output_dim": 16, "projector_output_dim": 16},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **SHAPE, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **VISION, **PIXELS, "head_dim": 8},
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multimodal model as the library saves it."""
    return saved(request.param, tmp_path_factory.mktemp(request.param))


def saved(family: str, folder: Path) -> Path:
    config = AutoConfig.for_model(family, **copy.deepcopy(FAMILIES[family]))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForMultimodalLM.from_config(config).float()
        disturb(model)
    model.save_pretrained(folder)
    return folder


def run_of(folder: Path, **model: Any) -> Config:
    data = {"paths": ["."], "tokenizer": "bytes"}
    return Config.model_validate({"data": data, "model": {"path": str(folder), "init": "pretrained", **model}})


def opened(config: Config) -> tuple[PreTrainedConfig, CausalLM]:
    """A run's model with its first weights."""
    model = config.model
    library = model_config(model, vocab_size=VOCAB)
    assert model.path is not None
    check_weights(model.path, library)
    return library, random_model(library, dtype=model.dtype, seed=0, path=model.path, lora=model.lora)


def trained(config: Config, folder: Path) -> CausalLM:
    """A model that differs from the first one in all that is trained, and that the checkpoint in `folder` holds."""
    _, model = opened(config)
    generator = torch.Generator().manual_seed(3)
    state = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for each in state.values():
            each.add_(torch.randn(each.shape, generator=generator) * 0.05)
    dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return torch.cat([model.eval()(input_ids=row[None], use_cache=False).logits[0] for row in rows_of(LENGTHS)])


@torch.no_grad()
def assert_same(model: CausalLM, library: Any) -> None:
    """Loss and logits of packed sequences are those of the library's model, which has one at a time."""
    want = logits(library)
    parts = zip(want.split(LENGTHS), rows_of(LENGTHS), strict=True)
    losses = [F.cross_entropy(each[:-1], ids[1:], reduction="sum") for each, ids in parts]
    context = context_of(LENGTHS, layer_kinds=count_kinds(kinds_of_layers(model.model.config)))
    with recorded_hidden(model) as hidden:
        found = loss_sum(model, rows_of(LENGTHS), context=context)
    torch.testing.assert_close(found, torch.stack(losses).sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(model.head(hidden[0]), want, rtol=1e-4, atol=1e-5)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def test_text_gets_the_loss_of_the_whole_model(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    library, model = opened(run_of(folder))
    assert not library.sub_configs and "images are refused" in caplog.text
    assert_same(model, AutoModelForMultimodalLM.from_pretrained(folder))


def test_an_export_is_a_whole_model(folder: Path, tmp_path: Path) -> None:
    """Encoders as they were, the text part as it was trained; the next run starts from it."""
    config, out = run_of(folder), tmp_path / "out"
    model = trained(config, tmp_path / "checkpoint")
    (folder / "preprocessor_config.json").write_text("{}")
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=out, vocab_size=VOCAB)
    before, after = tensors_of(folder), tensors_of(out)
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in after.items()}
    first = AutoModelForMultimodalLM.from_pretrained(folder)
    whole = AutoModelForMultimodalLM.from_pretrained(out)
    decoder = {id(each) for each in (*decoder_of(whole).parameters(), *whole.get_output_embeddings().parameters())}
    for (name, each), other in zip(whole.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(each, other) == (id(each) not in decoder), name
    assert (out / "preprocessor_config.json").exists()
    assert_same(model, whole)
    _, again = opened(run_of(out))
    want = dict(model.named_parameters())
    assert all(torch.equal(each, want[name]) for name, each in again.named_parameters())


def test_the_library_opens_an_export_as_a_causal_model(tmp_path: Path) -> None:
    """Of Qwen3.5 it takes the text part itself, in the run's precision."""
    config = run_of(saved("qwen3_5", tmp_path / "first"))
    model = trained(config, tmp_path / "checkpoint")
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=VOCAB)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert alone.dtype is torch.float32 and alone.config.model_type == "qwen3_5_text"
    assert_same(model, alone)


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_are_those_of_the_whole_model(merge: bool, tmp_path: Path) -> None:
    """Its encoder has linear layers of the same names."""
    config = run_of(saved("gemma3", tmp_path / "first"), lora={"rank": 2, "targets": ["q_proj", "down_proj"]})
    model, out = trained(config, tmp_path / "checkpoint"), tmp_path / "out"
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=out, vocab_size=VOCAB, merge=merge)
    base = AutoModelForMultimodalLM.from_pretrained(out if merge else tmp_path / "first")
    adapted = base if merge else PeftModel.from_pretrained(base, out)
    assert_same(model, adapted)


def test_reward_models_start_from_it_and_random_ones_are_text_models(tmp_path: Path) -> None:
    config = run_of(saved("gemma3", tmp_path / "first"))
    path = str(config.model.path)
    library = model_config(config.model, vocab_size=VOCAB, is_reward=True)
    check_weights(path, library)
    reward = dict(random_model(library, dtype="float32", seed=0, path=path).named_parameters())
    _, causal = opened(config)
    for name, each in causal.named_parameters():
        assert torch.equal(each, reward.pop(name)), name
    assert list(reward) == ["model.score.weight"]
    config = run_of(tmp_path / "first", init="random")
    dcp.save({"model": causal.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=VOCAB)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert alone.config.model_type == "gemma3_text"
    assert_same(causal, alone)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["language_model.model.layers.1.mlp.extra.weight"] = torch.zeros(2)


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "missing": (drop, r"its files lack model\.language_model\.layers\.1\.mlp\.up_proj\.weight; give"),
    "unexpected": (add, r"no place for language_model\.model\.layers\.1\.mlp\.extra\.weight of its files"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_fit_is_named(what: str, tmp_path: Path) -> None:
    change, message = BROKEN[what]
    rewritten(saved("gemma3", tmp_path), change)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(run_of(tmp_path))
    assert "\n" not in str(caught.value)


def test_old_tables_of_encoders_are_left_out(tmp_path: Path) -> None:
    """Such as CLIP's, which published files have."""
    table = {"vision_tower.vision_model.embeddings.position_ids": torch.zeros(1, 4)}
    rewritten(saved("gemma3", tmp_path), lambda tensors: tensors.update(table))
    opened(run_of(tmp_path))


def test_a_family_that_does_more_with_text_is_refused() -> None:
    """Granite divides logits by a scale, and its multimodal model does not."""
    keys = {"model_type": "granite", **SHAPE, "logits_scaling": 4.0}
    found = AutoConfig.for_model("llava", text_config=keys)
    with pytest.raises(ConfigError, match=r"llava gives logits that differ by .* from granite alone"):
        check_text_alone(found, text_part(found))


def test_a_family_by_its_shape_is_given_as_text() -> None:
    """A shape describes one part."""
    with pytest.raises(ConfigError, match=r"architecture\.model_type is 'gemma3', gemma3 has text_config, vision_conf"):
        model_config(ModelConfig.model_validate({"architecture": {"model_type": "gemma3"}}), vocab_size=VOCAB)
