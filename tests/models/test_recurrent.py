"""Families with recurrent layers: packed batches on any ranks give the loss and gradients of the library's own run,
sequence by sequence; what they start from and what is exported is the library's too."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import ModelConfig
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.sharding import local_shard
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.execute.state.snapshots import own_box
from rayfcp.models import causal_lm
from rayfcp.models.build import random_model, sharded_model
from rayfcp.models.compiling import fault_of_compiled
from rayfcp.models.describe import check_runs, model_config, profile_of
from rayfcp.models.export import export_checkpoint
from rayfcp.models.library import kept_buffers, make_library_model, with_layers
from rayfcp.models.pretrained import check_weights, read
from rayfcp.models.selfcheck import check_supported
from rayfcp.models.tensor_parallel import check_tensor_parallel
from rayfcp.program import lower
from tests.execute.cases import CASES, SEED, VOCAB, Case, CaseTokens, Gradients
from tests.execute.gloo import joined, on_processes
from tests.execute.staged import expected, run_in_process, typical_case
from tests.models.recurrent import (
    FAMILIES,
    assert_near,
    by_library,
    disturbed,
    exact,
    in_process,
    library,
    staged,
    with_kinds,
)

ALONE = Case(num_ranks=1, lengths=(33, 1, 20), microbatches=((((0,), (0, 1, 2)),),))
RANKS = {
    "qwen3_next": (CASES[3], CASES[5]),
    "kimi_linear": (CASES[2], CASES[4], CASES[8]),
    "nemotron_h": (CASES[1], CASES[5]),
    "bamba": (CASES[6],),
    "granitemoehybrid": (CASES[3],),
    "falcon_h1": (CASES[2],),
    "minimax": (CASES[8], CASES[7]),
    "lfm2": (CASES[2], CASES[4]),
}
"""Rings of one to five ranks, Ulysses groups, heads shared by runs of ranks; layers recomputed with and without what
mixes tokens."""


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_stay_apart(family: str) -> None:
    config = library(family)
    found = in_process(config, ALONE, dtype="float64")
    assert_near(found, by_library(config, ALONE, dtype="float64"), bound=1e-9, what=family)


@pytest.mark.parametrize("family", RANKS)
def test_ranks_compute_what_one_process_does(family: str) -> None:
    config = library(family)
    for case in RANKS[family]:
        found = in_process(config, case, dtype="float64")
        assert_near(found, by_library(config, case, dtype="float64"), bound=1e-9, what=(family, case))


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "minimax"])
def test_fp32_is_as_near_to_fp64_as_the_library_s(family: str) -> None:
    """By four times its error, or by 1e-4: gradients of gates are small differences of large sums."""
    config, case = library(family), CASES[2]
    want = by_library(config, case, dtype="float64")[1]
    both = [run(config, case, dtype="float32")[1] for run in (in_process, by_library)]
    for name, value in want.items():
        ours, theirs = (float((each[name].double() - value).norm() / value.norm()) for each in both)
        assert ours <= max(1e-4, 4 * theirs), (name, ours, theirs)


@pytest.mark.parametrize("layers_of_stage", [(1, 3), (2, 1, 1)])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_stages_and_slices(family: str, layers_of_stage: tuple[int, ...]) -> None:
    """Slices take the states and the rows that earlier ones left. Bamba's layers return tuples."""
    case = staged(family, typical_case(2, num_ranks=2, layers_of_stage=layers_of_stage, is_tied=False))
    with exact("float64"):
        loss, gradients, _ = run_in_process(case, "float64")
        want = expected(case, "float64")
    assert_near((loss, gradients), want, bound=1e-9, what=family)


@pytest.fixture(scope="module")
def in_shards() -> dict[str, tuple[float, Gradients]]:
    """Loss and gradients of two processes by family."""
    return on_processes(_run_in_shards, size=2)[0]


SHARDED = ("nemotron_h", "kimi_linear")


def _run_in_shards(rank: int, client: dist.Store) -> dict[str, tuple[float, Gradients]]:
    with joined(MeshPosition(rank=rank, num_ranks=2), client, name="two") as world:
        return {family: _run_case(family, world) for family in SHARDED}


def _run_case(family: str, world: ProcessGroups) -> tuple[float, Gradients]:
    config, case = library(family), CASES[1]
    model = sharded_model(config, run=ModelConfig(dtype="float64"), seed=SEED, world=world)
    whole = dict(disturbed(config, dtype="float64").named_parameters())
    for name, parameter in model.named_parameters():
        local_shard(parameter).copy_(read(whole[name].detach(), own_box(parameter)))
    program = lower(case.plan(), with_kinds(case.sequences, config))[world.position.rank]
    interpreter = Interpreter(transport=DistributedTransport(world.attend), kernel=pick_kernel("cpu"), model=model)
    with exact("float64"):
        done = interpreter.run(program, CaseTokens(case), loss_scale=1.0 / case.num_targets)
    loss = torch.tensor(done.loss_sum / case.num_targets, dtype=torch.float64)
    dist.all_reduce(loss, group=world.control)
    return float(loss), {name: each.grad.full_tensor() for name, each in model.named_parameters()}


@pytest.mark.parametrize("family", SHARDED)
def test_sharded_over_processes(family: str, in_shards: dict[str, tuple[float, Gradients]]) -> None:
    assert_near(in_shards[family], by_library(library(family), CASES[1], dtype="float64"), bound=1e-9, what=family)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h", "minimax", "lfm2_moe"])
def test_from_a_folder_and_back(family: str, tmp_path: Path) -> None:
    """Checkpoints hold parameters; buffers of the state are those that the run started from."""
    first = make_library_model(library(family), dtype=torch.float32)
    for name, buffer in kept_buffers(first).items():
        buffer.add_(torch.rand_like(buffer) * ("bias" in name))
    first.save_pretrained(tmp_path / "first", max_shard_size="20KB")
    keys = {"path": str(tmp_path / "first"), "dtype": "float32", "init": "pretrained"}
    config = Config.model_validate({"data": {"paths": ["."], "tokenizer": "bytes"}, "model": keys})
    own = model_config(config.model, vocab_size=VOCAB)
    check_weights(str(tmp_path / "first"), own)
    held = random_model(own, dtype="float32", seed=5, path=str(tmp_path / "first"))
    for name, value in first.state_dict().items():
        assert torch.equal(held.model.state_dict()[name], value), name
    with torch.no_grad():
        for parameter in held.parameters():
            parameter.add_(1.0)
    dcp.save({"model": dict(held.named_parameters())}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=VOCAB)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    want = held.model.state_dict()
    assert opened.keys() == want.keys()
    for name, value in opened.items():
        assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_follow_the_family_s_rules(family: str) -> None:
    """Constants are the library's, and so is the spread of what is drawn."""
    torch.manual_seed(3)
    theirs = dict(make_library_model(library(family), dtype=torch.float32).named_parameters())
    for name, value in random_model(library(family), dtype="float32", seed=1).model.named_parameters():
        want = theirs[name].detach()
        if want.numel() > 64 and float(want.std()):
            assert math.isclose(float(value.std()), float(want.std()), rel_tol=0.3), name
        assert torch.equal(value, want) or float(want.std()), name


def test_sizes_of_layers_are_those_of_the_library() -> None:
    for family in FAMILIES:
        config = library(family)
        profile = profile_of(config, name=family)
        count = sum(each.numel() for each in make_library_model(config).parameters())
        assert math.isclose(profile.num_parameters, count, rel_tol=0.15), (family, profile.num_parameters, count)


def test_a_layer_without_our_recurrence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = library("bamba")
    check_supported(config, num_stages=2)
    monkeypatch.setattr(causal_lm, "hook_recurrence", lambda _model: None)
    module: Any = sys.modules["transformers.models.bamba.modeling_bamba"]
    for name in ("mamba2_chunk_scan", "causal_conv1d_fn"):
        monkeypatch.setattr(module, name, getattr(module, name).replaced)
    with pytest.raises(ConfigError, match=r"its layers \[0\] do not use our recurrence"):
        check_supported(config)


def test_the_library_s_functions_are_its_own_without_a_program() -> None:
    config = library("qwen3_next")
    model = random_model(config, dtype="float32", seed=1).model
    module: Any = sys.modules[type(model).__module__]
    heads = [torch.randn(2, 9, 2, 4) for _ in range(3)]
    gates = {"g": -torch.rand(2, 9, 2), "beta": torch.rand(2, 9, 2)}
    ours, theirs = module.torch_chunk_gated_delta_rule, module.torch_chunk_gated_delta_rule.replaced
    assert torch.equal(ours(*heads, **gates)[0], theirs(*heads, **gates)[0])


def test_compiled_around_recurrence() -> None:
    config = library("lfm2")
    config.layer_types = ["full_attention", *["conv"] * 3]
    found = fault_of_compiled(
        config, dtype="float32", device=torch.device("cpu"), kernel=pick_kernel("cpu"), backend="aot_eager"
    )
    assert found is None


@pytest.mark.parametrize("family", ["jamba", "mamba2", "zamba2", "recurrent_gemma", "rwkv"])
def test_other_recurrences_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: {family} does not run, ") as caught:
        check_runs(AutoConfig.for_model(family))
    assert "\n" not in str(caught.value)


def test_pairs_of_a_model_of_two_layers_are_no_lists_of_layers() -> None:
    config = library("falcon_h1", num_hidden_layers=2)
    cut = with_layers(config, 1)
    assert (cut.num_hidden_layers, len(cut.layer_types)) == (1, 1)
    assert cut.time_step_limit == config.time_step_limit
    profile_of(config, name="pairs")


def test_recurrent_layers_are_not_split() -> None:
    with pytest.raises(ConfigError, match="must be 1 with bamba, whose recurrent layers"):
        check_tensor_parallel(library("bamba"), 2)
