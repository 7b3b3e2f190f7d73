"""Frozen weights in four bits: as bitsandbytes rounds them, in shards of any ranks, with PEFT's adapters beside."""

import copy
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rayfcp.config import Config, ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.config.models import ModelConfig
from rayfcp.cost.memory import stage_state_parts
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.sharding import local_shard
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.execute.state.copying import own_box
from rayfcp.models.build import random_model, sharded_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import profile_of
from rayfcp.models.export import export_checkpoint
from rayfcp.models.library import MARK, library_name
from rayfcp.models.nf4 import Nf4Linear
from rayfcp.models.pretrained import read
from rayfcp.models.stages import stages_of
from rayfcp.program import lower
from tests.execute.cases import SEED, VOCAB, Case, CaseTokens
from tests.execute.gloo import joined, on_processes
from tests.models.test_families import CASES

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE |= {"intermediate_size": 128, "vocab_size": VOCAB}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_PROCESSES = 3
Found = dict[str, Tensor]


def lora_of(*, dora: bool) -> LoraConfig:
    return LoraConfig(rank=4, alpha=8, dora=dora, quantize="nf4")


def library() -> PreTrainedConfig:
    return AutoConfig.for_model("llama", **SHAPE, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def rounded(weight: Tensor) -> Tensor:
    codes, state = bnb.quantize_4bit(weight.detach().contiguous(), blocksize=64, quant_type="nf4")
    return bnb.dequantize_4bit(codes, state)


def whole(*, dora: bool, dtype: str = "float32") -> CausalLM:
    """A model in which no adapter is 0."""
    model = random_model(library(), dtype=dtype, seed=SEED, lora=lora_of(dora=dora))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_bitsandbytes(dtype: str) -> None:
    plain = dict(random_model(library(), dtype="float32", seed=SEED).named_modules())
    model = random_model(library(), dtype=dtype, seed=SEED, lora=lora_of(dora=True))
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Nf4Linear)}
    assert len(layers) == 7 * 2
    for name, layer in layers.items():
        own: Any = plain[library_name(name)]
        want = rounded(own.weight.to(getattr(torch, dtype)))
        assert torch.equal(layer.weight, want) and layer.codes.nbytes * 16 == want.numel() * 9
        norms: Any = model.get_submodule(name.removesuffix(".base_layer")).lora_magnitude_vector["default"]
        torch.testing.assert_close(norms.weight, torch.linalg.vector_norm(want.float(), dim=1))


def by_peft(*, dora: bool, case: Case) -> tuple[float, Found]:
    """PEFT on the rounded weights, in one process."""
    ours = whole(dora=dora)
    values = {name.removeprefix("model."): each.detach() for name, each in ours.named_parameters()}
    values |= {
        f"{name}.weight".removeprefix("model."): each.weight
        for name, each in ours.named_modules()
        if isinstance(each, Nf4Linear)
    }
    base = AutoModelForCausalLM.from_config(copy.deepcopy(library()), attn_implementation="sdpa")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, use_dora=dora, task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, settings).float().train()
    state = {f"base_model.model.{name}": each for name, each in values.items() if not name.endswith("codes")}
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys and not found.missing_keys
    total = 0.0
    for row in CaseTokens(case).rows:
        ids = torch.from_numpy(row)[None]
        loss = F.cross_entropy(model(input_ids=ids).logits[0][:-1], ids[0, 1:], reduction="sum") / case.num_targets
        if len(row) > 1:
            loss.backward()
            total += float(loss.detach())
    named = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    return total, {f"model.{name.removeprefix('base_model.model.')}": each for name, each in named.items()}


@pytest.fixture(scope="module")
def found() -> dict[tuple[bool, int], tuple[float, Found]]:
    """Losses and gradients by kind of adapters and number of ranks."""
    return on_processes(_run_all, size=NUM_PROCESSES)[0]


def _run_all(rank: int, client: dist.Store) -> dict[tuple[bool, int], tuple[float, Found]]:
    found = {}
    for case in CASES[:3]:
        if rank < case.num_ranks:
            position = MeshPosition(rank=rank, num_ranks=case.num_ranks)
            with joined(position, client, name=f"{case.num_ranks}") as world:
                for dora in (False, True):
                    found[dora, case.num_ranks] = _run(case, world, dora=dora)
                    found[dora, -case.num_ranks] = _run(case, world, dora=dora, dtype="bfloat16")
    return found


def _run(case: Case, world: ProcessGroups, *, dora: bool, dtype: str = "float32") -> tuple[float, Found]:
    """The frozen weights are packed by the ranks, each its rows; adapters get values."""
    model = sharded_model(library(), run=ModelConfig(dtype=dtype, lora=lora_of(dora=dora)), seed=SEED, world=world)
    values = dict(whole(dora=dora, dtype=dtype).named_parameters())
    for name, parameter in model.named_parameters():
        own = read(values[name].detach(), own_box(parameter))
        if parameter.requires_grad:
            local_shard(parameter).copy_(own)
        else:
            assert torch.equal(local_shard(parameter).view(torch.uint8), own.contiguous().view(torch.uint8)), name
    transport, kernel = DistributedTransport(world.attend), pick_kernel("cpu")
    program = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)[world.position.rank]
    done = Interpreter(transport=transport, kernel=kernel, model=model).run(
        program, CaseTokens(case), loss_scale=1.0 / case.num_targets
    )
    loss = torch.tensor(done.loss_sum / case.num_targets, dtype=torch.float64)
    dist.all_reduce(loss, group=world.control)
    named = {name: each.grad.full_tensor() for name, each in model.named_parameters() if each.requires_grad}
    return float(loss), named


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: f"{case.num_ranks} ranks")
def test_in_shards_as_peft_computes_them(
    case: Case, dora: bool, found: dict[tuple[bool, int], tuple[float, Found]]
) -> None:
    loss, gradients = found[dora, case.num_ranks]
    want, wanted = by_peft(dora=dora, case=case)
    assert loss == pytest.approx(want, rel=1e-6)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert float((gradient - wanted[name]).norm() / wanted[name].norm()) < 1e-5, name


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: f"{case.num_ranks} ranks")
def test_in_bfloat16(case: Case, dora: bool, found: dict[tuple[bool, int], tuple[float, Found]]) -> None:
    """Frozen weights in bf16 beside trained ones in fp32, whose gradients are fp32 too: as close as bf16 is."""
    (loss, gradients), (want, wanted) = found[dora, -case.num_ranks], found[dora, case.num_ranks]
    assert loss == pytest.approx(want, rel=2e-2)
    for name, gradient in gradients.items():
        assert gradient.dtype is torch.float32
        assert float((gradient - wanted[name]).norm() / wanted[name].norm()) < 0.2, name


def test_rows_of_a_folder_and_a_merged_export(tmp_path: Path) -> None:
    """Merged are adapters and rounded weights, so that the export computes what the run did."""
    base = AutoModelForCausalLM.from_config(library())
    base.save_pretrained(tmp_path / "base")
    lora = lora_of(dora=False)
    keys = {"path": str(tmp_path / "base"), "init": "pretrained", "lora": lora.model_dump()}
    config = Config.model_validate({"data": {"paths": ["."], "tokenizer": "bytes"}, "model": keys})
    model = random_model(library(), dtype="float32", seed=0, lora=lora, path=str(tmp_path / "base"))
    weights = dict(base.named_parameters())
    for name, layer in model.model.named_modules():
        if isinstance(layer, Nf4Linear):
            assert torch.equal(layer.weight, rounded(weights[f"{library_name(name)}.weight"])), name
    trained = {name: each.data for name, each in model.named_parameters() if each.requires_grad}
    for each in trained.values():
        nn.init.normal_(each, std=0.1)
    dcp.save({"model": trained}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for merge in (False, True):
        out = tmp_path / str(merge)
        export_checkpoint(config, tmp_path / "checkpoint", out_dir=out, vocab_size=VOCAB, merge=merge)
    assert all(MARK in name for name in load_file(tmp_path / "False" / "adapter_model.safetensors"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "True").eval()
    model.model.set_attn_implementation("sdpa")
    ids = torch.arange(29)[None]
    with torch.no_grad():
        torch.testing.assert_close(opened(input_ids=ids).logits, model.model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stages", [(2,), (1, 1)])
def test_states_are_as_large_as_the_memory_model_says(dtype: str, stages: tuple[int, ...]) -> None:
    lora = lora_of(dora=True)
    profile = profile_of(library(), name="tiny", lora=lora)
    settings: dict[str, Any] = {"bytes_per_element": getattr(torch, dtype).itemsize, "num_ranks": 1}
    settings |= {"reduce_every": "microbatch", "gather_every": "microbatch"}
    frozen = 0
    for number, stage in enumerate(stages_of(stages)):
        model = random_model(library(), dtype=dtype, seed=0, stage=stage, lora=lora)
        matrices = [each for each in model.parameters() if each.ndim > 1 or each.requires_grad]
        due = sum(each.nbytes + (12 * each.numel() if each.requires_grad else 0) for each in matrices)
        assert stage_state_parts(profile, layers_of_stage=stages, stage=number, **settings)["sharded"] == due
        frozen += sum(each.nbytes for each in matrices if not each.requires_grad)
    assert profile.frozen_bytes(settings["bytes_per_element"]) == frozen


def test_rows_of_other_sizes_are_refused() -> None:
    config = AutoConfig.for_model("llama", **{**SHAPE, "intermediate_size": 96})
    with pytest.raises(ConfigError, match=r"down_proj has 96 inputs, must be a multiple of 64; leave quantize out$"):
        random_model(config, dtype="float32", seed=0, lora=lora_of(dora=False))
    with pytest.raises(ConfigError, match=r"^model\.lora\.quantize is 'nf4', must be absent with model\.dtype float64"):
        Config(data={"paths": ["."]}, model={"dtype": "float64", "lora": {"rank": 2, "quantize": "nf4"}})
