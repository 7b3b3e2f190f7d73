"""Adapters on real processes over gloo, in shards: loss, logits and gradients are those of PEFT in one process."""

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rayfcp.config.models import ModelConfig
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.models.build import random_model, sharded_model
from rayfcp.models.describe import model_config
from tests.execute.cases import SEED, Case
from tests.execute.gloo import joined, on_processes
from tests.models.adapted import LORAS, adapted, by_peft, library
from tests.models.families import DTYPE, Result, assert_same
from tests.models.folders import saved
from tests.models.helpers import VOCAB
from tests.models.in_shards import run_in_shards
from tests.models.test_families import CASES

NUM_PROCESSES = 3
FIRST = {
    "drawn": ModelConfig(dtype="bfloat16", lora=LORAS["dora"]),
    "of a folder": ModelConfig(dtype="bfloat16", lora=LORAS["dora"], init="pretrained", path="given below"),
}
RUNS = {(which, case.num_ranks): case for which in LORAS for case in CASES[:3]}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int], Result]:
    """Results by adapters and number of ranks."""
    return on_processes(_run_all, size=NUM_PROCESSES)[0]


def _run_all(rank: int, client: dist.Store) -> dict[tuple[str, int], Result]:
    found = {}
    for case in CASES[:3]:
        if rank < case.num_ranks:
            position = MeshPosition(rank=rank, num_ranks=case.num_ranks)
            with joined(position, client, name=f"{case.num_ranks}") as world:
                for which in LORAS:
                    found[which, case.num_ranks] = _run(which, case, world)
    return found


def _run(which: str, case: Case, world: ProcessGroups) -> Result:
    config, lora = library(), LORAS[which]
    model = sharded_model(config, run=ModelConfig(dtype=DTYPE, lora=lora), seed=SEED, world=world)
    whole = adapted(lora, config)
    loss, logits = run_in_shards(model, whole, config=config, case=case, world=world)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert all(each.grad is None for name, each in model.named_parameters() if name not in trained)
    gradients = {name: each.grad.full_tensor() for name, each in trained.items()}
    return Result(loss=loss, gradients=gradients, logits=logits)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_in_shards_as_peft_computes_them(run: tuple[str, int], found: dict[tuple[str, int], Result]) -> None:
    config = library()
    assert_same(found[run], by_peft(run[0], config, RUNS[run]), what=run)


Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    saved(path, "qwen3, tied")
    return str(path)


@pytest.fixture(scope="module")
def sharded(folder: str) -> dict[tuple[str, bool], Weights]:
    """Full weights of models that three processes hold in shards, by case, and whether they were to be empty."""
    return on_processes(_make_all, folder, size=NUM_PROCESSES)[0]


def _config(what: str, folder: str) -> tuple[ModelConfig, PreTrainedConfig]:
    run = FIRST[what].model_copy(update={"path": folder})
    return run, model_config(run, vocab_size=VOCAB)


def _make_all(rank: int, client: dist.Store, folder: str) -> dict[tuple[str, bool], Weights]:
    torch.manual_seed(rank)
    found = {}
    with joined(MeshPosition(rank=rank, num_ranks=NUM_PROCESSES), client, name="weights") as world:
        for what in FIRST:
            for empty in (False, True):
                run, config = _config(what, folder)
                model = sharded_model(config, run=run, seed=SEED, world=world, empty=empty)
                kept = {name: each.full_tensor() for name, each in model.named_parameters()}
                frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
                found[what, empty] = {name: each for name, each in kept.items() if name in frozen or not empty}
    return found


@pytest.mark.parametrize("what", FIRST)
def test_shards_hold_the_first_weights(what: str, sharded: dict[tuple[str, bool], Weights], folder: str) -> None:
    """Frozen ones also in a model that is to be filled from copies, which do not have them."""
    run, config = _config(what, folder)
    path = folder if run.init == "pretrained" else None
    whole = random_model(config, dtype=run.dtype, seed=SEED, lora=run.lora, path=path)
    want = {name: each.detach() for name, each in whole.named_parameters()}
    assert sharded[what, False].keys() == want.keys()
    assert sharded[what, True].keys() == {name for name in want if ".lora_" not in name}
    for found in (sharded[what, False], sharded[what, True]):
        for name, each in found.items():
            assert each.dtype is want[name].dtype and torch.equal(each, want[name]), name
