"""A case on a model in shards, with the weights of a whole one; loss and logits of all ranks together."""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.config.models import ModelConfig
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import ProcessGroups
from rayfcp.execute.parallel.sharding import StageModule, local_shard
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.execute.state.copying import own_box
from rayfcp.models.build import sharded_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.pretrained import read
from rayfcp.program import lower
from tests.execute.cases import SEED, Case, CaseTokens
from tests.models.families import (
    DTYPE,
    Result,
    disturbed,
    empty_logits,
    exact,
    head_of,
    put_logits,
    recorded_hidden,
    with_kinds,
)


def result_in_shards(config: PreTrainedConfig, case: Case, world: ProcessGroups) -> Result:
    """Loss, logits and whole gradients of the model that `disturbed` makes."""
    model = sharded_model(config, run=ModelConfig(dtype=DTYPE), seed=SEED, world=world)
    loss, logits = run_in_shards(model, disturbed(config), config=config, case=case, world=world)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return Result(loss=loss, gradients=gradients, logits=logits)


def run_in_shards(
    model: StageModule, whole: CausalLM, *, config: PreTrainedConfig, case: Case, world: ProcessGroups
) -> tuple[float, Tensor]:
    """Loss and logits of a case; gradients stay on the parameters of `model`, which gets the weights of `whole`."""
    values = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        local_shard(parameter).copy_(read(values[name].detach(), own_box(parameter)))
    transport, kernel = DistributedTransport(world.attend), pick_kernel("cpu")
    interpreter = Interpreter(transport=transport, kernel=kernel, model=model)
    programs = lower(case.plan(), with_kinds(case.sequences, config), reduce_every=case.reduce_every)
    program = programs[world.position.rank]
    with exact(), recorded_hidden(model) as hidden:
        done = interpreter.run(program, CaseTokens(case), loss_scale=1.0 / case.num_targets)
    logits = empty_logits(config, case)
    put_logits(logits, whole.curve(head_of(whole)(torch.cat(hidden))), program=program, case=case)
    parts = torch.nan_to_num(logits)
    loss = torch.tensor(done.loss_sum / case.num_targets, dtype=torch.float64)
    dist.all_reduce(parts, group=world.control)
    dist.all_reduce(loss, group=world.control)
    return float(loss), parts
