"""Base and export compared file by file: what was not trained is the same, what was trained is said everywhere."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from rayfcp.config import Config, ConfigError
from rayfcp.models import export
from rayfcp.models.build import random_model
from rayfcp.models.describe import configured_model
from rayfcp.models.export import export_checkpoint
from tests.models.folders import EXPERTS, SHAPE
from tests.models.helpers import VOCAB
from tests.models.recurrent import FAMILIES as RECURRENT
from tests.models.test_multimodal import FAMILIES as MULTIMODAL
from tests.models.test_multimodal import LINEAR

WORDS = {"<unk>": 0, "<|endoftext|>": 1, "<|im_start|>": 2, "<|im_end|>": 3, "user": 4, "assistant": 5}
TEMPLATE = (
    "{% for each in messages %}<|im_start|>{{ each.role }} {{ each.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
OTHER = TEMPLATE.replace("<|im_end|>", "<|im_end|>\n").replace(" {{", "\n{{").replace("assistant ", "assistant\n")
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 3], "bos_token_id": 1}
FILES = {
    "LICENSE": "free",
    "vocab.json": json.dumps(WORDS),
    "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "README.md": "about the base",
    "pytorch_model.bin": "the same weights",
    "original/params.json": "{}",
}
LEFT = {"README.md", "pytorch_model.bin", "original/"}
PICTURES = {"preprocessor_config.json": '{"size": 3}', "processor_config.json": "{}"}
DRAFT = {"mtp.fc.weight": (4, 8), "mtp.layers.0.norm.weight": (4,), "mtp.norm.weight": (4,)}
LATER = {"model.layers.92.eh_proj.weight": (4, 8), "model.layers.92.enorm.weight": (4,)}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A published model: family and keys, tensors that the library ignores, further files."""

    family: str
    keys: dict[str, Any]
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    loss: str = "cross_entropy"

    @property
    def opens_with(self) -> Any:
        if self.loss == "reward":
            return AutoModelForSequenceClassification
        return AutoModelForMultimodalLM if self.family in MULTIMODAL else AutoModelForCausalLM


ENDS = {"eos_token_id": 3}
MTP = {"mtp_num_hidden_layers": 1}
GLM: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    **{"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
}
BASES = {
    "dense, tied": Base(family="qwen3", keys={**SHAPE, **ENDS, "tie_word_embeddings": True}),
    "experts": Base(family="qwen3_moe", keys={**SHAPE, **ENDS, **EXPERTS}),
    "hybrid with drafts": Base(
        family="qwen3_next", keys={**SHAPE, **ENDS, **RECURRENT["qwen3_next"], **LINEAR, **MTP}, extra=DRAFT
    ),
    "multimodal": Base(
        family="qwen3_5",
        keys=MULTIMODAL["qwen3_5"] | {"text_config": {**MULTIMODAL["qwen3_5"]["text_config"], **ENDS, **MTP}},
        extra=DRAFT,
        files=PICTURES,
    ),
    "reward": Base(family="llama", keys={**SHAPE, **ENDS}, loss="reward"),
    "experts with a later layer": Base(
        family="glm4_moe",
        keys=SHAPE | ENDS | GLM,
        extra=LATER,
    ),
    "experts with a later layer of another size": Base(
        family="glm4_moe", keys=SHAPE | ENDS | GLM, extra={f"model.layers.{SHAPE['num_hidden_layers']}.enorm": (4,)}
    ),
}


def write_tokenizer(folder: Path, *, template: str | dict[str, str] | None, eos: str = "<|im_end|>") -> None:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def write_base(folder: Path, what: Base, *, template: str | dict[str, str] | None = TEMPLATE) -> None:
    """Write the files of a published model."""
    config = AutoConfig.for_model(what.family, **copy.deepcopy(what.keys))
    kind = AutoModelForCausalLM if what.loss == "reward" else what.opens_with
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind.from_config(config, dtype=torch.bfloat16)
        extra = {name: torch.randn(shape).bfloat16() for name, shape in what.extra.items()}
    model.save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    if extra:
        save_file(extra, folder / "model-extra.safetensors", metadata={"format": "pt"})
        found = json.loads(index.read_text())
        found["weight_map"] |= dict.fromkeys(extra, "model-extra.safetensors")
        index.write_text(json.dumps(found))
    write_tokenizer(folder, template=template)
    for name, text in (FILES | what.files | {"generation_config.json": json.dumps(SAMPLING)}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def exported(
    folder: Path, *, loss: str = "cross_entropy", data: dict[str, Any] | None = None, **model: Any
) -> tuple[Path, list[str], set[str]]:
    """Export a checkpoint of a run from `folder / "base"` in which only vectors were trained. Return the export, the
    lines that it logs, and the names of what was trained."""
    config = Config.model_validate(
        {
            "data": {"paths": ["."], **(data or {})},
            "model": {"path": str(folder / "base"), "dtype": "bfloat16", **model},
            "loss": {"type": loss},
        }
    )
    library = configured_model(config, vocab_size=VOCAB)
    path = config.model.path if config.model.init == "pretrained" else None
    held = random_model(library, dtype="bfloat16", seed=5, path=path, lora=config.model.lora)
    trained = {name.removeprefix("model."): each for name, each in held.named_parameters() if each.ndim == 1}
    for each in trained.values():
        each.data += 0.5
    dcp.save({"model": held.state_dict()}, checkpoint_id=folder / "checkpoint", no_dist=True)
    lines: list[str] = []
    export_checkpoint(config, folder / "checkpoint", out_dir=folder / "out", vocab_size=VOCAB, log=lines.append)
    return folder / "out", lines, set(trained)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def files_of(folder: Path) -> dict[str, bytes]:
    """Files but weights, by name."""
    files = (each for each in folder.rglob("*") if each.is_file() and "safetensors" not in each.name)
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in files}


@pytest.mark.parametrize("name", BASES)
def test_base_and_export_are_the_same_but_for_what_was_trained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    what, base = BASES[name], tmp_path / "base"
    write_base(base, what)
    out, lines, trained = exported(tmp_path, loss=what.loss)
    before, after = tensors_of(base), tensors_of(out)
    is_reward = what.loss == "reward"
    assert before.keys() - after.keys() == ({"lm_head.weight"} if is_reward else set())
    assert after.keys() - before.keys() == ({"score.weight"} if is_reward else set())
    moved = {key for key in before.keys() & after.keys() if not torch.equal(before[key], after[key])}
    assert len(moved) == len(trained) > 2 and all(after[key].ndim == 1 for key in moved)
    assert all(torch.equal(after[key], (before[key].float() + 0.5).bfloat16()) for key in moved)
    assert {each.dtype for each in after.values()} == {torch.bfloat16}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    numbers = sum(each.numel() for each in after.values())
    assert index["metadata"] == {"total_parameters": numbers, "total_size": 2 * numbers}
    assert index["weight_map"].keys() == after.keys()
    texts, kept = files_of(base), files_of(out)
    lost = {"generation_config.json"} if is_reward else set()
    assert texts.keys() - kept.keys() - lost == {"README.md", "pytorch_model.bin", "original/params.json"}
    assert not kept.keys() - texts.keys()
    assert all(texts[each] == kept[each] for each in kept.keys() - {"config.json"})
    (left,) = (line for line in lines if line.startswith(f"not copied from {base}: "))
    assert all(each in left for each in LEFT | lost)
    for each in what.extra:
        assert any(line.startswith(f"copied from {base}, not trained: ") and each in line for line in lines)
    assert is_reward == any("no use for them: lm_head.weight" in line for line in lines)
    configs = [json.loads(each["config.json"]) for each in (texts, kept)]
    heads = {"architectures", "num_labels", "id2label", "label2id", "problem_type", "pad_token_id"}
    differ = {key for key in configs[0].keys() | configs[1].keys() if configs[0].get(key) != configs[1].get(key)}
    assert differ <= (heads if is_reward else set()), {key: [each.get(key) for each in configs] for key in differ}


@pytest.mark.parametrize("name", BASES)
def test_the_library_opens_the_export_and_generates(name: str, tmp_path: Path) -> None:
    what = BASES[name]
    write_base(tmp_path / "base", what)
    out, _, _ = exported(tmp_path, loss=what.loss)
    opened, report = what.opens_with.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": "user"}]
    inputs: Any = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if what.loss == "reward":
        assert opened(inputs["input_ids"]).logits.shape == (1, 1)
        return
    assert opened.generation_config.to_diff_dict() == GenerationConfig(**SAMPLING).to_diff_dict()
    length = inputs["input_ids"].shape[1]
    assert opened.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] in range(length + 1, length + 4)


@pytest.mark.parametrize("own", [None, OTHER, {"default": OTHER, "tool_use": "{{ tools }}"}])
def test_an_export_speaks_and_ends_as_it_was_trained(own: Any, tmp_path: Path) -> None:
    """A base that ends with one token, and conversations of a template that ends with another."""
    base = tmp_path / "base"
    write_base(base, Base(family="qwen3", keys={**SHAPE, "eos_token_id": 1}), template=own)
    write_tokenizer(base, template=own, eos="<|endoftext|>")
    (base / "generation_config.json").write_text('{"eos_token_id": 1, "top_p": 0.9}')
    (tmp_path / "template").write_text(TEMPLATE)
    out, lines, _ = exported(tmp_path, data={"chat_template": str(tmp_path / "template")})
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [1, 3], "top_p": 0.9}
    assert AutoConfig.from_pretrained(out).eos_token_id == [1, 3]
    template = AutoTokenizer.from_pretrained(out).chat_template
    assert (template["default"] if isinstance(template, dict) else template) == TEMPLATE
    assert "eos_token_id: [1, 3], was 1: with the end token of the rows" in lines
    before = "the tokenizer had none" if own is None else "in place of the tokenizer's own"
    assert f"chat template: that of data.chat_template; {before}" in lines
    assert isinstance(own, dict) <= (template == {"default": TEMPLATE, "tool_use": "{{ tools }}"})


def test_an_adapter_says_how_its_base_stops(tmp_path: Path) -> None:
    write_base(tmp_path / "base", BASES["dense, tied"])
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "template").write_text(OTHER)
    given = {"chat_template": str(tmp_path / "template")}
    out, lines, _ = exported(tmp_path, data=given, lora={"rank": 2})
    assert "the base ends with eos_token_id 1, the rows with [3]: generate with eos_token_id=[1, 3]" in lines
    assert AutoTokenizer.from_pretrained(out).chat_template["default"] == OTHER
    assert (out / "adapter_model.safetensors").exists() and not (out / "config.json").exists()


def test_marks_alone_are_no_other_template(tmp_path: Path) -> None:
    write_base(tmp_path / "base", BASES["dense, tied"])
    marked = TEMPLATE.replace("{{ each.content }}", "{%- generation -%}{{ each.content }}{% endgeneration %}")
    (tmp_path / "marked").write_text(marked)
    out, lines, _ = exported(tmp_path, data={"chat_template": str(tmp_path / "marked")})
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert not [line for line in lines if line.startswith("chat template")]


def test_a_mixture_of_templates_keeps_the_tokenizers(tmp_path: Path) -> None:
    write_base(tmp_path / "base", BASES["dense, tied"])
    (tmp_path / "other").write_text(OTHER)
    sources = {"a": {"paths": ["x"], "chat_template": str(tmp_path / "other")}, "b": {"paths": ["y"]}}
    out, lines, _ = exported(tmp_path, data={"paths": [], "sources": sources})
    assert AutoTokenizer.from_pretrained(out).chat_template["default"] == TEMPLATE
    assert "chat template: that of the tokenizer, since data.sources were trained with several" in lines


def test_bytes_end_with_their_own_token(tmp_path: Path) -> None:
    """A run from random weights has no base whose files it could copy."""
    config = Config.model_validate({"data": {"paths": ["."]}, "model": {"architecture": {"num_layers": 1}}})
    library = configured_model(config, vocab_size=258)
    state = {"model": random_model(library, dtype="float32", seed=0).state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=258)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.config.eos_token_id == opened.generation_config.eos_token_id == 257
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
    }


@pytest.mark.parametrize("init", ["random", "pretrained"])
@pytest.mark.parametrize("name", ["hybrid with drafts", "experts with a later layer", "multimodal"])
def test_the_configuration_has_no_layers_without_weights(name: str, init: str, tmp_path: Path) -> None:
    """Random weights have none for drafts, and some bases lack what their configuration says."""
    what = BASES[name]
    bare = Base(family=what.family, keys=what.keys)
    write_base(tmp_path / "base", bare)
    out, lines, _ = exported(tmp_path, init=init)
    key = "num_nextn_predict_layers" if what.family == "glm4_moe" else "mtp_num_hidden_layers"
    assert f"{key} is 0, was 1: there are no weights of such layers" in lines
    found = json.loads((out / "config.json").read_text())
    assert found.get("text_config", found)[key] == 0


def test_a_reward_model_of_a_multimodal_one_is_of_text(tmp_path: Path) -> None:
    keys = copy.deepcopy(MULTIMODAL["gemma3"])
    keys["text_config"]["pad_token_id"] = 0
    write_base(tmp_path / "base", Base(family="gemma3", keys=keys))
    out, lines, _ = exported(tmp_path, loss="reward")
    assert f"not copied from {tmp_path / 'base'}: its encoders, since a reward model is one of text" in lines
    opened, report = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert opened.config.model_type == "gemma3_text" and not report["missing_keys"] and not report["unexpected_keys"]


def test_a_base_whose_weights_are_gone_does_not_keep_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was trained is in the checkpoint."""
    write_base(tmp_path / "base", BASES["hybrid with drafts"])
    monkeypatch.setattr(export, "has_weights", lambda _: False)
    out, lines, _ = exported(tmp_path)
    assert f"{tmp_path / 'base'} has no weights any more, from which tensors that were not trained are copied" in lines
    assert "mtp_num_hidden_layers is 0, was 1: there are no weights of such layers" in lines
    assert tensors_of(tmp_path / "base").keys() - tensors_of(out).keys() == DRAFT.keys()


def test_another_tokenizer_replaces_the_bases(tmp_path: Path) -> None:
    """Its files are written, those of the base are named as left out, others are copied."""
    write_base(tmp_path / "base", BASES["dense, tied"])
    write_tokenizer(tmp_path / "words", template=OTHER)
    out, lines, _ = exported(tmp_path, data={"tokenizer": str(tmp_path / "words")})
    assert AutoTokenizer.from_pretrained(out).chat_template == OTHER
    assert (out / "LICENSE").read_text() == "free" and not (out / "vocab.json").exists()
    assert any("special_tokens_map.json" in line for line in lines if line.startswith("not copied"))


def test_a_processor_speaks_as_it_was_trained(tmp_path: Path) -> None:
    """Its own files with a template would come first in the library."""
    write_base(tmp_path / "base", BASES["dense, tied"])
    for name in ("chat_template.json", "processor_config.json"):
        (tmp_path / "base" / name).write_text(json.dumps({"chat_template": TEMPLATE, "processor_class": "X"}))
    (tmp_path / "other").write_text(OTHER)
    out, _, _ = exported(tmp_path, data={"chat_template": str(tmp_path / "other")})
    found, _ = ProcessorMixin.get_processor_dict(out)
    assert found.pop("chat_template")["default"] == OTHER
    assert found == {"processor_class": "X"}


@pytest.mark.parametrize("name", ["rust_model.ot", "hf_quant_config.json", "quantize_config.json", "mtp.safetensors"])
def test_other_weights_and_their_settings_are_named_as_left_out(name: str, tmp_path: Path) -> None:
    """Shards that the index does not name, too: nobody reads them."""
    write_base(tmp_path / "base", BASES["experts"])
    for each in (name, "model-00009-of-00009.safetensors"):
        (tmp_path / "base" / each).write_text("{}")
    out, lines, _ = exported(tmp_path)
    (left,) = (line for line in lines if line.startswith("not copied"))
    assert name in left and "model-00009-of-00009" in left and "model-00001" not in left
    assert not (out / name).exists()


def test_an_adapter_of_a_base_without_settings_ends_by_its_configuration(tmp_path: Path) -> None:
    write_base(tmp_path / "base", BASES["dense, tied"])
    (tmp_path / "base" / "generation_config.json").unlink()
    assert not exported(tmp_path, lora={"rank": 2})[1]


@pytest.mark.parametrize("text", ["{bad", "[]"])
def test_broken_settings_are_named(text: str, tmp_path: Path) -> None:
    write_base(tmp_path / "base", BASES["dense, tied"])
    (tmp_path / "base" / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json (is no JSON|holds a list)"):
        exported(tmp_path)
