"""Batches on pipeline stages on real processes over gloo: FSDP2 inside a stage, pipes between stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.sharding import keep_gathered, release
from rayfcp.execute.parallel.transport import DistributedTransport, Pipes
from rayfcp.models.build import DTYPES, sharded_model
from rayfcp.models.causal_lm import CausalLM
from tests.execute.cases import SEED, CaseTokens, Gradients
from tests.execute.gloo import joined, on_processes
from tests.execute.staged import HIDDEN_SIZE, StagedCase


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps of one model, a plan each, all of one shape. `is_kept`: parameters stay gathered in a step."""

    steps: tuple[StagedCase, ...]
    dtype: str = "float64"
    is_kept: bool = False

    @property
    def num_ranks(self) -> int:
        return self.steps[0].plan.num_ranks

    @property
    def num_stages(self) -> int:
        return len(self.steps[0].layers_of_stage)

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.num_stages


Found = dict[int, list[tuple[float, Gradients]]]


def run_on_gloo(runs: Sequence[Run]) -> Found:
    """Results by run, then step: loss and whole gradients; from as many processes as the largest run needs."""
    return on_processes(_run_all, tuple(runs), size=max(run.num_devices for run in runs))[0]


def _run_all(number: int, client: dist.Store, runs: Sequence[Run]) -> Found:
    found: Found = {}
    for index, run in enumerate(runs):
        if number < run.num_devices:
            position = MeshPosition.of(number, num_ranks=run.num_ranks, num_stages=run.num_stages)
            with joined(position, client, name=f"{index}") as world:
                found[index] = _run(run, world)
    return found


def _run(run: Run, world: ProcessGroups) -> list[tuple[float, Gradients]]:
    first = run.steps[0]
    library = first.library
    settings = first.run.model_copy(update={"dtype": run.dtype})
    model = sharded_model(library, run=settings, seed=SEED, world=world, layers_of_stage=first.layers_of_stage)
    if run.is_kept:
        keep_gathered(model)
    interpreter = Interpreter(
        transport=DistributedTransport(world.attend),
        kernel=pick_kernel("cpu"),
        model=model,
        pipes=pipes_of(world, dtype=run.dtype),
    )
    results = []
    for case in run.steps:
        model.zero_grad(set_to_none=True)
        scale = 1.0 / case.num_targets
        done = interpreter.run(case.programs[world.position.device], CaseTokens(case), loss_scale=scale)
        if run.is_kept:
            release(model)
        total = world.sum(torch.tensor(done.loss_sum, dtype=torch.float64))
        results.append((float(total) * scale, gathered(model, world)))
    return results


def pipes_of(groups: ProcessGroups, *, dtype: str) -> Pipes | None:
    if groups.pipe_forward is None or groups.pipe_backward is None:
        return None
    activations, gradients = (DistributedTransport(each) for each in (groups.pipe_forward, groups.pipe_backward))
    return Pipes(activations=activations, gradients=gradients, hidden_size=HIDDEN_SIZE, dtype=DTYPES[dtype])


def gathered(model: CausalLM, world: ProcessGroups) -> Gradients:
    """Whole gradients of all stages; a matrix on two stages has the sum of theirs."""
    own = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    everyone: list[Any] = [None] * world.position.num_devices
    dist.all_gather_object(everyone, own, group=world.control)
    gradients: Gradients = {}
    for stage in range(world.position.num_stages):
        for name, gradient in everyone[int(world.position.mesh[stage, 0, 0])].items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient
    return gradients
