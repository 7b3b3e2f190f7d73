"""The update: learning rate by step, global gradient norm, clipping, AdamW."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rayfcp.config.models import TrainConfig


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
    """AdamW; matrices decay, vectors (norms, biases) do not."""
    matrices = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.ndim >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
    )


def sum_over_ranks(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Element-wise sum over the ranks of `group`."""
    dist.all_reduce(numbers, group=group)
    return numbers


def local_squares(module: nn.Module) -> Tensor:
    """Sum of squares of this rank's shards of the gradients, fp64."""
    parts = [
        _local(parameter.grad).double().square().sum()
        for parameter in module.parameters()
        if parameter.grad is not None
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def scale_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Clip: multiply all gradients by max_norm / norm where norm is larger."""
    if norm <= max_norm:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).mul_(max_norm / norm)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
