"""First weights: a function of the seed alone, on any number of ranks; or those of a folder, exported before."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import AutoModelForCausalLM

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import ModelConfig
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.models.build import random_model, sharded_model
from rayfcp.models.describe import model_config
from rayfcp.models.export import export_checkpoint
from tests.execute.gloo import joined, on_processes
from tests.models.helpers import FAMILIES, VOCAB, architecture, library_config

SEED = 11
Weights = dict[str, Tensor]


def weights_of(model: torch.nn.Module) -> Weights:
    """Parameters and buffers, whole."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.detach().clone()
    return found


def assert_equal(found: Weights, want: Weights) -> None:
    assert found.keys() == want.keys()
    for name, weight in found.items():
        assert torch.equal(weight, want[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_are_the_seeds_and_of_the_librarys_distribution(family: str, tied: bool) -> None:
    config = library_config(family, tied=tied)
    first = weights_of(random_model(config, dtype="float32", seed=SEED))
    torch.manual_seed(123)
    assert_equal(weights_of(random_model(config, dtype="float32", seed=SEED)), first)
    other = weights_of(random_model(config, dtype="float32", seed=SEED + 1))
    theirs = AutoModelForCausalLM.from_config(config)
    made = dict((*theirs.named_parameters(), *theirs.named_buffers()))
    assert {f"model.{name}" for name in made} == first.keys()
    matrices = []
    for name, weight in first.items():
        like = made[name.removeprefix("model.")]
        assert weight.shape == like.shape and weight.dtype == like.dtype
        if weight.ndim == 2:
            assert float(weight.std()) == pytest.approx(config.initializer_range, rel=0.1), name
            assert not torch.equal(weight, other[name]), name
            matrices.append(weight)
        else:
            assert torch.equal(weight, like), f"{name}: norms, biases and frequencies are not random"
    assert len({float(matrix.flatten()[0]) for matrix in matrices}) == len(matrices), "each draws its own numbers"


def test_fp64_and_bf16_runs_start_from_the_same_numbers() -> None:
    config = library_config("qwen3")
    single = weights_of(random_model(config, dtype="float32", seed=SEED))
    assert_equal(weights_of(random_model(config, dtype="bfloat16", seed=SEED)), single)
    for name, weight in weights_of(random_model(config, dtype="float64", seed=SEED)).items():
        assert torch.equal(weight.float(), single[name]), name
        assert weight.dtype is torch.float64 or "inv_freq" in name


def export_tiny(folder: Path, family: str, *, dtype: str) -> tuple[Path, Weights]:
    """A checkpoint as a run leaves it, exported; and the weights that it held."""
    run = ModelConfig(dtype=dtype, architecture=architecture(family))
    config = Config.model_validate({"data": {"paths": ["."]}, "model": run.model_dump()})
    model = random_model(model_config(run, vocab_size=VOCAB), dtype=dtype, seed=SEED + 5)
    checkpoint, out = folder / f"{family}-{dtype}", folder / f"exported-{family}-{dtype}"
    dcp.save({"model": model.state_dict()}, checkpoint_id=checkpoint, no_dist=True)
    export_checkpoint(config, checkpoint, out_dir=out, vocab_size=VOCAB)
    return out, weights_of(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_opens_in_the_library(dtype: str, tmp_path: Path) -> None:
    out, held = export_tiny(tmp_path, "qwen2", dtype=dtype)
    assert (out / "model.safetensors").exists() and (out / "config.json").exists()
    opened = AutoModelForCausalLM.from_pretrained(out)
    assert opened.dtype is getattr(torch, dtype)
    for name, weight in opened.named_parameters():
        assert torch.equal(weight, held[f"model.{name}"].to(weight.dtype)), name
    config = Config.model_validate({"data": {"paths": ["."]}})
    with pytest.raises(ConfigError, match="must be an empty folder or absent"):
        export_checkpoint(config, tmp_path / f"qwen2-{dtype}", out_dir=out, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Weights], dict[str, Weights]]:
    """Full weights, by case, of models that two processes hold in shards, and the expected ones."""
    folder = tmp_path_factory.mktemp("sharded")
    runs: dict[str, ModelConfig] = {}
    want: dict[str, Weights] = {}
    for family in FAMILIES:
        runs[family] = ModelConfig(architecture=architecture(family, tied=family != "llama"))
        want[family] = weights_of(
            random_model(library_config(family, tied=family != "llama"), dtype="float32", seed=SEED)
        )
    for dtype in ("float32", "bfloat16"):
        out, held = export_tiny(folder, "qwen3", dtype=dtype)
        case = f"pretrained in {dtype}"
        runs[case] = ModelConfig(path=str(out), init="pretrained", dtype=dtype)
        want[case] = {
            name: weight if "inv_freq" in name else weight.to(getattr(torch, dtype)).float()
            for name, weight in held.items()
        }
    return on_processes(_make_all, runs, size=2)[0], want


def _make_all(rank: int, client: dist.Store, runs: dict[str, ModelConfig]) -> dict[str, Weights]:
    torch.manual_seed(rank)
    found = {}
    with joined(MeshPosition(rank=rank, num_ranks=2), client, name="weights") as world:
        for case, run in runs.items():
            library = model_config(run, vocab_size=VOCAB)
            found[case] = weights_of(sharded_model(library, run=run, seed=SEED, world=world))
    return found


def test_shards_hold_the_weights_of_the_whole_model(
    sharded: tuple[dict[str, Weights], dict[str, Weights]],
) -> None:
    """Random ones, and those of a folder, whatever ranks' own generators log."""
    found, want = sharded
    assert len(found) == len(FAMILIES) + 2
    for case, weights in found.items():
        assert_equal(weights, want[case])
