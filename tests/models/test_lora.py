"""Adapters: first weights, names, stages, sizes for the cost model, exports that PEFT opens, and what is refused."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from peft import LoraConfig as PeftConfig
from peft import PeftModel, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rayfcp.config import Config, ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.cost.memory import stage_state_parts
from rayfcp.execute.kernels import pick_kernel
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.compiling import fault_of_compiled
from rayfcp.models.describe import model_config, profile_of
from rayfcp.models.export import export_checkpoint
from rayfcp.models.library import MARK as LORA
from rayfcp.models.library import library_name, make_library_model, narrowed, vision_family
from rayfcp.models.lora import inject, trained_line
from rayfcp.models.pretrained import library_on_meta
from rayfcp.models.selfcheck import packed_loss
from rayfcp.models.stages import stages_of
from tests.execute.cases import CASES
from tests.models import recurrent
from tests.models.adapted import HYBRIDS, LORAS, adapted, by_peft, library
from tests.models.families import assert_same, by_ranks, disturb
from tests.models.folders import saved
from tests.models.helpers import VOCAB, rows_of
from tests.models.self_taught import with_curve
from tests.models.vlm import vlm_config

SEED = 3


def parts_of(model: CausalLM) -> dict[str, dict[str, Tensor]]:
    """Parameters by kind and name; the model's own by the library's names."""
    found: dict[str, dict[str, Tensor]] = {"base": {}, "lora_A": {}, "lora_B": {}, "lora_magnitude_vector": {}}
    for name, each in model.named_parameters():
        kind = next((kind for kind in found if f".{kind}." in name), "base")
        found[kind][library_name(name)] = each.detach()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_first_weights(dtype: str) -> None:
    """Those of the model without adapters, in the precision of its computations; adapters change nothing yet."""
    config, lora = library(), LoraConfig(rank=4, dora=True)
    model = random_model(config, dtype=dtype, seed=SEED, lora=lora)
    found, plain = parts_of(model), random_model(config, dtype=dtype, seed=SEED)
    exact, wide = getattr(torch, dtype), torch.float64 if dtype == "float64" else torch.float32
    want = {name: each.detach().to(exact) for name, each in plain.named_parameters()}
    assert found["base"].keys() == want.keys()
    assert all(each.dtype is exact and torch.equal(each, want[name]) for name, each in found["base"].items())
    assert all(not each.any() and each.dtype is wide for each in found["lora_B"].values())
    assert len(found["lora_A"]) == len(found["lora_magnitude_vector"]) == 7 * config.num_hidden_layers
    for each in found["lora_A"].values():  # uniform within 1 / sqrt(inputs)
        bound = 1 / math.sqrt(each.shape[1])
        assert 0.8 * bound < float(each.abs().max()) <= bound and each.dtype is wide
    for name, norm in found["lora_magnitude_vector"].items():
        rows = want[name.replace(".lora_magnitude_vector.default", "")]
        torch.testing.assert_close(norm, torch.linalg.vector_norm(rows.to(wide), dim=1))
    first = parts_of(random_model(config, dtype=dtype, seed=SEED, lora=lora))
    other = parts_of(random_model(config, dtype=dtype, seed=SEED + 1, lora=lora))
    assert all(torch.equal(first["lora_A"][name], each) for name, each in found["lora_A"].items())
    assert not any(torch.equal(other["lora_A"][name], each) for name, each in found["lora_A"].items())


@pytest.mark.parametrize("family", HYBRIDS)
def test_beside_recurrent_layers(family: str) -> None:
    config, lora = recurrent.library(family), HYBRIDS[family]
    found = by_ranks(adapted(lora, config), config, CASES[1])
    assert_same(found, by_peft(family, config, CASES[1]), what=family)


@pytest.mark.parametrize("which", LORAS)
def test_stages_are_the_whole_model(which: str) -> None:
    """Tied embedding and head too, which both stages have and neither trains."""
    config, lora = library(), LORAS[which]
    whole = adapted(lora, config)
    rows = [row % config.vocab_size for row in rows_of((13, 22))]
    weights, losses, gradients = whole.state_dict(), [], []
    for sizes in ((3,), (2, 1), (1, 1, 1)):
        stages = [random_model(config, dtype="float64", seed=0, stage=each, lora=lora) for each in stages_of(sizes)]
        for stage in stages:
            stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
            assert stage.shared_matrix is None
        loss = packed_loss(stages, rows, layer_kinds=())
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: each.grad for stage in stages for name, each in stage.named_parameters()})
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-12)
    for found in gradients:
        for name, want in gradients[0].items():
            assert (want is None) == (".lora_" not in name) == (found[name] is None)
            if want is not None:
                torch.testing.assert_close(found[name], want)


@pytest.mark.parametrize("which", LORAS)
def test_sizes_for_the_cost_model(which: str) -> None:
    config, lora = library(), LORAS[which]
    plain, profile = profile_of(config, name="tiny"), profile_of(config, name="tiny", lora=lora)
    parts = parts_of(random_model(config, dtype="float32", seed=0, lora=lora))
    trained = sum(each.numel() for kind, own in parts.items() if kind != "base" for each in own.values())
    assert profile.num_trained == trained and plain.num_trained == plain.num_parameters
    assert profile.num_parameters == plain.num_parameters + trained


def test_compiled_layers_agree() -> None:
    config: Any = library("llama")
    options: dict[str, Any] = {"device": torch.device("cpu"), "kernel": pick_kernel("cpu"), "backend": "aot_eager"}
    assert fault_of_compiled(config, dtype="float32", lora=LoraConfig(rank=4, dora=True), **options) is None


def run_with(folder: Path, what: str, lora: LoraConfig, *, init: str = "pretrained", **model: Any) -> Config:
    saved(folder / "base", what)
    keys = {"path": str(folder / "base"), "init": init, "lora": lora.model_dump(), "dtype": "float32", **model}
    return Config.model_validate({"data": {"paths": ["."], "tokenizer": "bytes", "max_seqlen": 32}, "model": keys})


def checkpointed(config: Config, folder: Path) -> CausalLM:
    """The model of a run whose checkpoint, in `folder / "checkpoint"`, holds what was trained of it."""
    run = config.model
    model_library = model_config(run, vocab_size=VOCAB, max_seqlen=config.data.max_seqlen)
    path = run.path if run.init == "pretrained" else None
    model = random_model(model_library, dtype=run.dtype, seed=config.run.seed, lora=run.lora, path=path)
    frozen = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    disturb(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in frozen:
                parameter.copy_(frozen[name])
    trained = {name: each.data for name, each in model.named_parameters() if each.requires_grad}
    dcp.save({"model": trained}, checkpoint_id=folder / "checkpoint", no_dist=True)
    return model


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(29)[None] % VOCAB).logits
    return found


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("what", ["qwen3, tied", "phi3, fused", "gemma3"])
def test_peft_opens_an_export_with_equal_logits(what: str, dora: bool, tmp_path: Path) -> None:
    config = run_with(tmp_path, what, LoraConfig(rank=4, alpha=6, dora=dora))
    held = checkpointed(config, tmp_path)
    held.model.set_attn_implementation("sdpa")
    want = logits_of(held.model.eval())
    out = tmp_path / "adapter"
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=out, vocab_size=VOCAB)
    assert sorted(file.name for file in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base") and settings["inference_mode"]
    kinds = {name.rpartition(".")[0].rpartition(".")[2] for name in load_file(out / "adapter_model.safetensors")}
    assert kinds >= {"lora_A", "lora_B"}
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"], dtype=torch.float32)
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(base, str(out)).eval()), want)
    if not dora:  # whose norms the library alone does not find
        opened = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        torch.testing.assert_close(logits_of(opened.eval()), want)


@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.parametrize(("what", "dora"), [("qwen3, tied", False), ("llama", True), ("qwen3_moe", False)])
def test_a_merged_export_is_a_model(what: str, dora: bool, init: str, tmp_path: Path) -> None:
    config = run_with(tmp_path, what, LoraConfig(rank=4, alpha=6, dora=dora), init=init)
    held = checkpointed(config, tmp_path)
    held.model.set_attn_implementation("sdpa")
    want = logits_of(held.model.eval())
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "merged", vocab_size=VOCAB, merge=True)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name for name, _ in opened.named_parameters())
    torch.testing.assert_close(logits_of(opened.eval()), want, rtol=1e-4, atol=1e-4)


def test_an_adapter_for_longer_contexts_has_their_configuration(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 2.0}
    config = run_with(tmp_path, "llama", LoraConfig(rank=2), rope=rope)
    checkpointed(config, tmp_path)
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=VOCAB)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("nothing",), "Target modules {'nothing'} not found"),
        (("q_proj", "nothing"), "no layer is called nothing"),
        (("lm_head",), "lm_head is not in a layer of the decoder"),
        (("layers.0.self_attn.q_proj",), "layers 0 and 1 have different ones, equal layers must have the same"),
        (("embed_tokens",), "embed_tokens is not in a layer of the decoder"),
    ],
)
def test_targets_that_cannot_run_are_one_line(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_of(library("llama"), name="tiny", lora=LoraConfig(rank=2, targets=targets))
    text = str(caught.value)
    assert text.startswith(f"model.lora.targets is {', '.join(targets)}, ") and message in text and "\n" not in text


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next", "nemotron_h", "mamba2"])
def test_all_linear_layers_by_names_that_peft_takes_for_them(family: str) -> None:
    """PEFT takes some names for the stacked weights of experts: linear layers of these names have no adapter. All
    parameters are counted once in the line at the start."""
    config, lora = narrowed(with_curve(family)[0], 2), LoraConfig(rank=2)
    ours = library_on_meta(config)
    settings = inject(ours, lora)
    theirs = library_on_meta(config)
    inject_adapter_in_model(
        PeftConfig(r=2, target_modules=settings.target_modules, task_type="CAUSAL_LM"), theirs, low_cpu_mem_usage=True
    )
    trained = [{name for name, each in model.named_parameters() if each.requires_grad} for model in (ours, theirs)]
    assert trained[0] == trained[1] and trained[0]
    wrapped = [module.get_base_layer() for module in ours.modules() if isinstance(module, LoraLayer)]
    assert all(type(module) is torch.nn.Linear for module in wrapped)
    line = trained_line(config, lora)
    num_trained, total = (int(line.split(mark)[0].split()[-1].replace(",", "")) for mark in (" trained", "; "))
    assert num_trained == sum(each.numel() for each in ours.parameters() if each.requires_grad)
    plain = library_on_meta(config)
    assert total == sum(each.numel() for each in plain.parameters())
    frozen = sum(int(each.replace(",", "")) for each in re.findall(r"\(([\d,]+)\)", line))
    assert frozen + sum(module.weight.numel() for module in wrapped) == total
    assert ("experts (" in line and "routers of experts (" in line) == (family != "mamba2")
    assert line.startswith("adapters on ") and line.endswith(" stay frozen")


@pytest.mark.parametrize(
    ("family", "target", "message"),
    [
        ("qwen3_moe", "experts", "experts names experts, which cannot have adapters"),
        ("qwen3_moe", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj names experts, which cannot have adapters"),
        ("qwen3_moe", "down_proj", "down_proj is what PEFT calls experts or their routers, which cannot have adapters"),
        ("glm4_moe", "gate", "gate is what PEFT calls experts or their routers"),
        ("gpt_oss", "router", "router names routers of experts, which cannot have adapters"),
        ("gpt2", "all-linear", "the layers of gpt2 have no torch.nn.Linear"),
    ],
)
def test_experts_have_no_adapters(family: str, target: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inject(library_on_meta(narrowed(with_curve(family)[0], 2)), LoraConfig(rank=2, targets=(target,)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_to_merge(tmp_path: Path) -> None:
    config = run_with(tmp_path, "llama", LoraConfig())
    with pytest.raises(ConfigError, match=r"--merge is given, the run has no adapters \(model\.lora\.rank\)"):
        export_checkpoint(config, tmp_path, out_dir=tmp_path / "out", vocab_size=VOCAB, merge=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfcp.models.library.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"package peft is not installed; pip install 'rayfcp\[lora\]'"):
        profile_of(library("llama"), name="tiny", lora=LoraConfig(rank=2))


def test_the_library_model_is_not_touched() -> None:
    config: Any = library("llama")
    profile_of(config, name="tiny", lora=LoraConfig(rank=2))
    assert not any("lora" in name for name, _ in library_on_meta(config).named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stages", [(3,), (2, 1)])
def test_states_are_as_large_as_the_memory_model_says(dtype: str, stages: tuple[int, ...]) -> None:
    """Matrices and norms of adapters: weights, and of what is trained gradients and moments in fp32."""
    config, lora = library("llama"), LoraConfig(rank=4, dora=True)
    profile = profile_of(config, name="tiny", lora=lora)
    settings: dict[str, Any] = {"bytes_per_element": getattr(torch, dtype).itemsize, "num_ranks": 1}
    settings |= {"reduce_every": "microbatch", "gather_every": "microbatch"}
    for number, stage in enumerate(stages_of(stages)):
        model = random_model(config, dtype=dtype, seed=0, stage=stage, lora=lora)
        due = sum(
            each.nbytes + (12 * each.numel() if each.requires_grad else 0)
            for name, each in model.named_parameters()
            if each.ndim > 1 or each.requires_grad
        )
        parts = stage_state_parts(profile, layers_of_stage=stages, stage=number, **settings)
        assert parts["sharded"] == due and parts["unreduced"] == parts["head"] == 0
        trained = sum(each.numel() for each in model.layers[0].parameters() if each.requires_grad)
        assert parts["passing"] >= (4 + settings["bytes_per_element"]) * trained


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_beside_a_vision_encoder(family: str, dora: bool) -> None:
    """Adapters are in the language model, the encoder is frozen; loss and gradients are the library's with PEFT."""
    config, lora = narrowed(vlm_config(family), 3), LoraConfig(rank=3, dora=dora)
    ours = random_model(copy.deepcopy(config), dtype="float32", seed=0, lora=lora)
    assert all(
        ("language_model" in name) == each.requires_grad for name, each in ours.named_parameters() if LORA in name
    )
    frozen = [name for name, each in ours.named_parameters() if not each.requires_grad]
    assert any("visual" in name or "vision_tower" in name for name in frozen) and not any(
        LORA in name for name in frozen
    )
    disturb(ours)
    theirs: Any = make_library_model(copy.deepcopy(config), attn_implementation="sdpa").float().train()
    inject(theirs, lora)
    theirs.load_state_dict(ours.model.state_dict(), assign=True)
    record = vision_family(config)
    assert record is not None
    rows, example = rows_of((13, 22)), record.example(config, torch.Generator().manual_seed(0))
    loss = packed_loss([ours], rows, layer_kinds=(), example=example)
    loss.backward()
    wanted = torch.zeros(())
    for given in [{"input_ids": row[None]} for row in rows] + [example.library_inputs]:
        ids = given["input_ids"][0]
        logits = theirs(**given, use_cache=False).logits[0]
        wanted = wanted + F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    want = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None and LORA in name}
    found = {name: each.grad for name, each in ours.model.named_parameters() if each.grad is not None}
    assert found.keys() == want.keys()
    for name, gradient in found.items():
        assert float((gradient - want[name]).norm() / want[name].norm()) < 1e-4, name
