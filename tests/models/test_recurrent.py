"""Families with recurrent layers: packed batches on any ranks give the loss and gradients of the library's own run,
sequence by sequence; what they start from and what is exported is the library's too."""

import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.config import Config, ConfigError
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.models import causal_lm
from rayfcp.models.build import random_model
from rayfcp.models.compiling import fault_of_compiled
from rayfcp.models.describe import check_runs, model_config, profile_of
from rayfcp.models.export import export_checkpoint
from rayfcp.models.library import kept_buffers, make_library_model, with_layers
from rayfcp.models.pretrained import check_weights
from rayfcp.models.selfcheck import check_supported
from rayfcp.models.tensor_parallel import check_tensor_parallel
from tests.execute.cases import CASES, VOCAB, Case
from tests.execute.gloo import joined, on_processes
from tests.models.families import Result, assert_same, by_library, errors, in_process
from tests.models.in_shards import result_in_shards
from tests.models.recurrent import FAMILIES, library
from tests.models.ways import assert_stages_same

ALONE = Case(num_ranks=1, lengths=(33, 1, 20), microbatches=((((0,), (0, 1, 2)),),))
RANKS = {
    "qwen3_next": (CASES[3], CASES[5]),
    "kimi_linear": (CASES[2], CASES[4], CASES[8]),
    "nemotron_h": (CASES[1], CASES[5]),
    "bamba": (CASES[6],),
    "granitemoehybrid": (CASES[3],),
    "falcon_h1": (CASES[2],),
    "mamba2": (CASES[3],),
    "minimax": (CASES[8], CASES[7]),
    "lfm2": (CASES[2],),
    "lfm3": (CASES[4],),
}
"""Rings of one to five ranks, Ulysses groups, heads shared by runs of ranks; layers recomputed with and without what
mixes tokens."""


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_stay_apart(family: str) -> None:
    config = library(family)
    assert_same(in_process(config, ALONE), by_library(config, ALONE), what=family)


@pytest.mark.parametrize("family", RANKS)
def test_ranks_compute_what_one_process_does(family: str) -> None:
    config = library(family)
    for case in RANKS[family]:
        assert_same(in_process(config, case), by_library(config, case), what=(family, case))


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "bamba"])
def test_fp32_is_as_near_to_fp64_as_the_library_s(family: str) -> None:
    """By 1e-5, or by three times its error. Gradients of gates are small differences of large sums, which roundings
    change by chance: medians of several weights, and of all layers."""
    config, case = library(family), CASES[2]
    ours, theirs = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for noise in range(5):
        want = by_library(config, case, noise=noise)
        for run, found in ((in_process, ours), (by_library, theirs)):
            for name, error in errors(run(config, case, dtype="float32", noise=noise), want).items():
                found[re.sub(r"\.\d+\.", ".", name)].append(error)
    for name in ours:
        assert median(ours[name]) <= max(1e-5, 3 * median(theirs[name])), name


@pytest.mark.parametrize(("family", "layers_of_stage"), [("qwen3_next", (2, 1, 1)), ("bamba", (1, 3))])
def test_stages_and_slices(family: str, layers_of_stage: tuple[int, ...]) -> None:
    """Slices take the states and the rows that earlier ones left. Bamba's layers return tuples."""
    assert_stages_same(library(family), 2, layers_of_stage=layers_of_stage)


@pytest.fixture(scope="module")
def in_shards() -> dict[str, Result]:
    """Of two processes, by family."""
    return on_processes(_run_in_shards, size=2)[0]


SHARDED = ("nemotron_h", "kimi_linear")


def _run_in_shards(rank: int, client: dist.Store) -> dict[str, Result]:
    with joined(MeshPosition(rank=rank, num_ranks=2), client, name="two") as world:
        return {family: result_in_shards(library(family), CASES[1], world) for family in SHARDED}


@pytest.mark.parametrize("family", SHARDED)
def test_sharded_over_processes(family: str, in_shards: dict[str, Result]) -> None:
    assert_same(in_shards[family], by_library(library(family), CASES[1]), what=family)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h", "minimax", "lfm2_moe", "mamba2"])
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


@pytest.mark.parametrize("family", ["jamba", "zamba2", "recurrent_gemma", "rwkv"])
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
