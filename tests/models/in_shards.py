"""A case on a model in shards, with the weights of a whole one; loss and logits of all ranks together."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import ProcessGroups
from rayfcp.execute.parallel.sharding import StageModule, local_shard
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.execute.state.snapshots import own_box
from rayfcp.models.pretrained import read
from rayfcp.program import lower
from tests.execute.cases import Case, CaseTokens
from tests.models.families import empty_logits, head_of, put_logits, recorded_hidden


def run_in_shards(
    model: StageModule, whole: nn.Module, *, config: PreTrainedConfig, case: Case, world: ProcessGroups
) -> tuple[float, Tensor]:
    """Loss and logits of a case; gradients stay on the parameters of `model`, which gets the weights of `whole`."""
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
    return float(loss), parts
