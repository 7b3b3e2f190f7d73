"""VLMs on real processes over gloo, encoder and all in shards: loss and gradients are the library's own."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from rayfcp.config.models import ModelConfig
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.sharding import keep_gathered, local_shard, release
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.execute.state.copying import own_box
from rayfcp.models.build import sharded_model
from rayfcp.models.pretrained import read
from rayfcp.program import lower
from rayfcp.values import BatchPlan
from tests.execute.cases import SEED, Case, Gradients, assert_same
from tests.execute.encoding import encoded_anywhere, encoded_on
from tests.execute.gloo import joined, on_processes
from tests.models.test_vlm import ROWS, cases
from tests.models.vlm import Row, Shown, by_library, vlm_config, vlm_model

NUM_PROCESSES = 3
DTYPE = "float64"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Case number `case` of a family; `gathered`: parts stay gathered for the whole step."""

    family: str
    case: int
    freeze: bool = False
    gathered: bool = False

    @property
    def shown(self) -> Shown:
        return Shown(family=self.family, rows=ROWS[self.family])

    @property
    def batch(self) -> Case:
        rows = self.shown.rows
        return (*cases(rows), *_blind(rows))[self.case]

    @property
    def plan(self) -> BatchPlan:
        """Plan of the case; in one with a microbatch without images all images are on one rank."""
        plan, sequences = self.batch.plan(), self.shown.sequences
        if self.case < len(cases(self.shown.rows)):
            return encoded_anywhere(plan, sequences, seed=self.case)
        return encoded_on(1, plan, sequences)


def _blind(rows: tuple[Row, ...]) -> list[Case]:
    """The last microbatch, in which gradients are reduced, has no images; nor has one of the ranks before."""
    lengths = tuple(row.num_tokens for row in rows)
    return [Case(num_ranks=3, lengths=lengths, microbatches=((((0, 1), (0, 2, 4)),), (((2, 1), (1,)), ((0,), (3,)))))]


RUNS = (
    Run(family="qwen3_vl", case=2),
    Run(family="qwen3_vl", case=4),
    Run(family="qwen3_vl", case=4, freeze=True),
    Run(family="qwen3_vl", case=1, gathered=True),
    Run(family="internvl", case=1),
    Run(family="internvl", case=4, freeze=True),
    Run(family="internvl", case=3),
)


@pytest.fixture(scope="module")
def found() -> list[tuple[float, Gradients]]:
    """Results by run."""
    return on_processes(_run_all, size=NUM_PROCESSES)[0]


def _run_all(rank: int, client: dist.Store) -> list[tuple[float, Gradients]]:
    found = []
    for at, run in enumerate(RUNS):
        if rank < run.batch.num_ranks:
            position = MeshPosition(rank=rank, num_ranks=run.batch.num_ranks)
            with joined(position, client, name=f"{at}") as world:
                found.append(_run(run, world))
    return found


def _run(run: Run, world: ProcessGroups) -> tuple[float, Gradients]:
    shown, config = run.shown, vlm_config(run.family)
    settings = ModelConfig(dtype=DTYPE, freeze_vision=run.freeze)
    model = sharded_model(config, run=settings, seed=SEED, world=world)
    values = dict(vlm_model(config, dtype=DTYPE).named_parameters())
    for name, parameter in model.named_parameters():
        local_shard(parameter).copy_(read(values[name].detach(), own_box(parameter)))
    if run.gathered:
        keep_gathered(model)
    program = lower(run.plan, shown.sequences, reduce_every=run.batch.reduce_every)[world.position.rank]
    transport = DistributedTransport(world.attend)
    interpreter = Interpreter(transport=transport, kernel=pick_kernel("cpu"), model=model)
    done = interpreter.run(program, shown, images=shown, loss_scale=1.0 / shown.num_targets)
    release(model)
    loss = torch.tensor(done.loss_sum / shown.num_targets, dtype=torch.float64)
    dist.all_reduce(loss, group=world.control)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return float(loss), {name: parameter.grad.full_tensor().clone() for name, parameter in trained.items()}


@pytest.mark.parametrize("at", range(len(RUNS)))
def test_in_shards_as_the_library_computes_it(at: int, found: list[tuple[float, Gradients]]) -> None:
    run = RUNS[at]
    assert_same(*found[at], want=by_library(run.shown, dtype=DTYPE, freeze=run.freeze), dtype=DTYPE, what=(run,))
