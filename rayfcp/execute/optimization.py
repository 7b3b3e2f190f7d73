"""The update: learning rate by step, global gradient norm, clipping, AdamW."""

import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rayfcp.config.models import TrainConfig
from rayfcp.execute.devices.backend import backend_of, to_device
from rayfcp.execute.parallel.groups import ProcessGroups, swap
from rayfcp.execute.parallel.sharding import StageModule, local_shard


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of update `step` (from 1): linear warm-up over `warmup_steps`, then constant, or linear or cosine
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
    """AdamW with weight decay for matrices, not for vectors (norms, biases). The parameters of a group lie on one mesh:
    fused updates, as on accelerators, cannot mix meshes."""
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
    """Sum the gradients of parameters over `group`, each device of which holds copies of them. All devices pass their
    parameters in the same order, sharded alike."""
    for parameter in parameters:
        dist.all_reduce(_gradient(parameter), group=group)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This device's shard of the gradient, made of zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_shard(parameter.grad)


def local_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Sum of squares of this device's shards of the gradients, in the dtype of the device's sums."""
    gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    parts = [each.to(backend_of(each.device).sum_dtype).square().sum() for each in gradients]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def is_split(parameter: nn.Parameter) -> bool:
    """True if tensor-parallel devices hold parts of the parameter rather than copies."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and parameter.placements[names.index("tensor")].is_shard()


def scale_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Clip by norm: multiply all gradients by max_norm / norm if norm is larger."""
    if norm <= max_norm:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            local_shard(parameter.grad).mul_(max_norm / norm)


def totals(groups: ProcessGroups, module: StageModule, *, loss_sum: float) -> tuple[float, float]:
    """Sums of losses and of squared gradients over all devices; copies count once.

    Before, gradients of parameters with copies are summed over these, and parameters that this batch did not use get
    zeros, so that all are updated equally often.
    """
    position = groups.position
    for parameter in module.occasional:
        _gradient(parameter)
    if groups.tensor is not None:
        sum_copies([module.get_parameter(name) for name in module.partial_names], groups.tensor)
    shared = module.shared_matrix
    if shared is not None and groups.pipe_forward is not None:
        gradient, peer = _gradient(shared), position.num_stages - 1 - position.stage
        other = torch.empty_like(gradient)
        swap(gradient, other, group=groups.pipe_forward, target=peer, source=peer)
        gradient += other  # both devices get bitwise equal sums
    counted = [
        parameter
        for parameter in module.parameters()
        if (position.tensor_rank == 0 or is_split(parameter)) and (position.stage == 0 or parameter is not shared)
    ]
    dtype = backend_of(groups.device).sum_dtype
    own = to_device(np.array(loss_sum if position.tensor_rank == 0 else 0.0), dtype=dtype, device=groups.device)
    loss_sum, squares = groups.sum(torch.stack([own, local_squares(counted).to(own)])).tolist()
    return loss_sum, squares
