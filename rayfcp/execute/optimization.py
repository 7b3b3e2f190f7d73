"""The update: learning rate by step, global gradient norm, clipping, AdamW."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rayfcp.config.models import TrainConfig
from rayfcp.execute.devices.device import moved, numbers_dtype
from rayfcp.execute.parallel.groups import Place, World
from rayfcp.execute.parallel.sharding import StageModule
from rayfcp.values import Span, SpanKind


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of update `step` (from 1): linear warm-up over `warmup_steps`, then constant, or linear or cosine
    decay that would reach 0 one step after the last.

    >>> learning_rate(1, TrainConfig(learning_rate=1.0, lr_schedule="constant", warmup_steps=4, steps=8))
    0.25
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps - 1) / max(config.steps - config.warmup_steps, 1)
    if config.lr_schedule == "constant":
        return config.learning_rate
    if config.lr_schedule == "linear":
        return config.learning_rate * (1.0 - min(done, 1.0))
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def make_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms, biases) do not. Those of one group lie on one mesh: updates of many
    parameters at once, as on accelerators, mix none."""
    groups: dict[tuple[bool, int], list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.requires_grad:
            dimensions = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
            groups[parameter.ndim < 2, dimensions].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": 0.0 if is_vector else config.weight_decay}
            for (is_vector, _), members in sorted(groups.items())
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
    )


def sum_copies(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters, of which every device of `group` holds a copy, over these copies. Each device
    gives its parameters in the same order; they are sharded alike."""
    for parameter in parameters:
        dist.all_reduce(_gradient(parameter), group=group)


def sum_with_peer(parameter: nn.Parameter, group: dist.ProcessGroup, *, peer: int) -> None:
    """`sum_copies` with one other device of `group`, number `peer` in it; both get the same bits."""
    gradient = _gradient(parameter)
    other = torch.empty_like(gradient)
    exchange = [
        dist.P2POp(kind, tensor, group=group, group_peer=peer)
        for kind, tensor in ((dist.isend, gradient), (dist.irecv, other))
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    gradient += other


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This device's shard of it, zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)


def local_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Sum of squares of this device's shards of the gradients, in `numbers_dtype`."""
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    parts = [each.to(numbers_dtype(each.device)).square().sum() for each in gradients]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def is_split(parameter: nn.Parameter) -> bool:
    """Whether tensor-parallel devices hold parts of it, rather than copies."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and parameter.placements[names.index("tensor")].is_shard()


def scale_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Clip: multiply all gradients by max_norm / norm where norm is larger."""
    if norm <= max_norm:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).mul_(max_norm / norm)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def totals(world: World, module: StageModule, *, loss_sum: float) -> tuple[float, float]:
    """Losses and squared gradients of all devices together, whatever has copies counted once; before, gradients of
    parameters that see a part each are summed over their copies, and those of parameters that this batch did not use
    are zero, so that all are updated equally often."""
    channels, place = world.channels, world.place
    for parameter in module.occasional:
        _gradient(parameter)
    if channels.tensor is not None:
        sum_copies([module.get_parameter(name) for name in module.partial_names], channels.tensor)
    shared = module.shared_matrix
    if shared is not None and channels.pipe_forward is not None:
        sum_with_peer(shared, channels.pipe_forward, peer=place.num_stages - 1 - place.stage)
    counted = [
        parameter
        for parameter in module.parameters()
        if (place.tensor_rank == 0 or is_split(parameter)) and (place.stage == 0 or parameter is not shared)
    ]
    dtype = numbers_dtype(world.device)
    own = moved(np.array(loss_sum if place.tensor_rank == 0 else 0.0), dtype=dtype, device=world.device)
    loss_sum, squares = world.sum(torch.stack([own, local_squares(counted).to(own)])).tolist()
    return loss_sum, squares


def update_span(place: Place, *, start_s: float) -> Span:
    """Of an update that ends now."""
    return Span(
        rank=place.rank, stage=place.stage, kind=SpanKind.UPDATE, label="update", start_s=start_s, stop_s=time.time()
    )
