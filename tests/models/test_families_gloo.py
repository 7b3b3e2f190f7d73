"""The same families on real processes over gloo, in shards: loss, logits and gradients are the library's own."""

import pytest
import torch
import torch.distributed as dist

from rayfcp.config.models import ModelConfig
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.sharding import local_shard
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.execute.state.snapshots import own_box
from rayfcp.models.build import sharded_model
from rayfcp.models.pretrained import read
from rayfcp.program import lower
from tests.execute.cases import SEED, Case, CaseTokens
from tests.execute.gloo import joined, on_processes
from tests.models.families import (
    DTYPE,
    Result,
    assert_same,
    by_library,
    disturbed,
    empty_logits,
    head_of,
    put_logits,
    recorded_hidden,
)
from tests.models.test_families import CASES, library

TWO, THREE = CASES[1], CASES[2]
FAMILIES = {
    "llama3": THREE,
    "qwen3, tied": THREE,
    "mistral": THREE,
    "gemma": TWO,
    "gemma3": THREE,
    "qwen3_moe": THREE,
    "qwen2_moe, shared experts": TWO,
}
NUM_PROCESSES = THREE.num_ranks


@pytest.fixture(scope="module")
def found() -> dict[str, Result]:
    """Results by family."""
    return on_processes(_run_all, size=NUM_PROCESSES)[0]


def _run_all(rank: int, client: dist.Store) -> dict[str, Result]:
    found = {}
    for case in (TWO, THREE):
        if rank < case.num_ranks:
            position = MeshPosition(rank=rank, num_ranks=case.num_ranks)
            with joined(position, client, name=f"{case.num_ranks}") as world:
                for what in [name for name, each in FAMILIES.items() if each is case]:
                    found[what] = _run(what, case, world)
    return found


def _run(what: str, case: Case, world: ProcessGroups) -> Result:
    config = library(what)
    model = sharded_model(config, run=ModelConfig(dtype=DTYPE), seed=SEED, world=world)
    whole = disturbed(config)
    values = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        local_shard(parameter).copy_(read(values[name].detach(), own_box(parameter)))
    transport, kernel = DistributedTransport(world.attend), pick_kernel("cpu")
    interpreter = Interpreter(transport=transport, kernel=kernel, model=model)
    program = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)[world.position.rank]
    with recorded_hidden(model) as hidden:
        done = interpreter.run(program, CaseTokens(case), loss_scale=1.0 / case.num_targets)
    logits = empty_logits(config, case)
    put_logits(logits, head_of(whole)(torch.cat(hidden)), program=program, case=case)
    parts = torch.nan_to_num(logits)
    loss = torch.tensor(done.loss_sum / case.num_targets, dtype=torch.float64)
    dist.all_reduce(parts, group=world.control)
    dist.all_reduce(loss, group=world.control)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return Result(loss=float(loss), gradients=gradients, logits=parts)


@pytest.mark.parametrize("what", FAMILIES)
def test_in_shards_as_the_library_computes_them(what: str, found: dict[str, Result]) -> None:
    config = library(what)
    assert_same(found[what], by_library(config, FAMILIES[what]), config=config, what=(what,))
