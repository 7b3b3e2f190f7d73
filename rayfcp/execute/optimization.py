"""The update: learning rate by step, global gradient norm, clipping, AdamW on local shards."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rayfcp.config.models import TrainConfig
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups, swap
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


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates this device's shards with one fused kernel per group, where the device has it (`is_fused`):
    DTensors cost the host more than ten times as much. State and checkpoints are those of AdamW."""

    is_fused = True

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, *, scale: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """Update. Where `is_fused`, gradients are divided by `scale` before, and nothing is updated if `skip` is 1,
        both in fp32 on the device; after an update with `skip` of 0 call `count`."""
        if not self.is_fused:
            super().step(closure)
            return
        for group in self.param_groups:
            self._update(group, scale=scale, skip=skip)
        if skip is None:
            self.count()

    def _update(self, group: dict[str, Any], *, scale: Tensor | None, skip: Tensor | None) -> None:
        tensors: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
        self._init_group(group, *tensors)  # type: ignore[no-untyped-call]
        *sharded, _, steps = tensors
        if not steps:
            return
        parameters, gradients, means, squares = ([_local(each) for each in some] for some in sharded)
        done = torch.stack(steps).tolist()
        numbers = {each: torch.full((), each + 1, device=parameters[0].device) for each in set(done)}
        torch._fused_adamw_(
            parameters,
            gradients,
            means,
            squares,
            [],
            [numbers[each] for each in done],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=skip,
        )

    def count(self) -> None:
        """Count an update of all parameters that have gradients."""
        trained = (each for group in self.param_groups for each in group["params"] if each.grad is not None)
        torch._foreach_add_([self.state[each]["step"] for each in trained], 1.0)


def _local(tensor: Tensor) -> Tensor:
    """This device's shard; without grad mode that costs next to nothing."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|a_log$")
"""Lower-case names of parameters that are not decayed whatever their shape: those of `get_decay_parameter_names` of
transformers' Trainer, and the decay rates of recurrent layers, which some families hold in four dimensions."""


def is_decayed(name: str, *, num_dimensions: int) -> bool:
    """True for matrices, unless their name is that of a bias, such as of stacked experts, of a norm, such as one with
    weights for each head, or of a recurrent layer's decay rates. False for vectors and scalars."""
    return num_dimensions > 1 and not _UNDECAYED.search(name.lower())


def make_optimizer(module: nn.Module, config: TrainConfig) -> LocalAdamW:
    """AdamW with weight decay for parameters that are decayed (`is_decayed`). The parameters of a group lie on one
    mesh: updates of several DTensors at once cannot mix meshes."""
    groups: dict[tuple[bool, int], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            dimensions = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
            groups[not is_decayed(name, num_dimensions=parameter.ndim), dimensions].append(parameter)
    optimizer = _adamw([(not kept, members) for (kept, _), members in sorted(groups.items())], config)
    optimizer.is_fused = all(backend_of(each.device).fuses_adamw for each in module.parameters())
    return optimizer


def _adamw(groups: Iterable[tuple[bool, Sequence[Tensor]]], config: TrainConfig) -> LocalAdamW:
    """Of groups of parameters, and whether they are decayed."""
    return LocalAdamW(
        [{"params": members, "weight_decay": config.weight_decay if decayed else 0.0} for decayed, members in groups],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
    )


def options_of(config: TrainConfig, *, decayed: bool, step: int) -> dict[str, Any]:
    """Options that a parameter has in the optimizer's groups after `step`."""
    (group,) = _adamw([(decayed, [torch.empty(0)])], config).param_groups
    return {**{key: value for key, value in group.items() if key != "params"}, "lr": learning_rate(step, config)}


def update(optimizer: LocalAdamW, sums: Tensor, *, num_targets: int, max_norm: float) -> tuple[float, float]:
    """Clip gradients by norm and update, unless the batch has no targets, or loss or norm is not finite; return both.

    `sums`: of losses and of squared gradients (`totals`), so that all devices agree. The host reads them once, and
    where updates are fused only after everything is enqueued.
    """
    loss, norm = sums[0] / max(num_targets, 1), sums[1].sqrt()
    read = torch.stack([loss, norm])
    if num_targets and optimizer.is_fused:
        scale = (norm / max_norm).clamp(min=1.0)
        optimizer.step(scale=scale.float(), skip=1.0 - read.isfinite().all().float())
    loss_found, norm_found = read.tolist()
    if num_targets and math.isfinite(loss_found) and math.isfinite(norm_found):
        if optimizer.is_fused:
            optimizer.count()
        else:
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            scale_gradients(parameters, norm=norm_found, max_norm=max_norm)
            optimizer.step()
    return loss_found, norm_found


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


@torch.no_grad()
def local_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Sum of squares of this device's shards of the gradients, in the dtype of the device's sums."""
    gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(gradients, 2, dtype=backend_of(gradients[0].device).sum_dtype)
    return torch.stack(norms).square().sum()


def is_split(parameter: Tensor) -> bool:
    """True if tensor-parallel devices hold parts of the parameter rather than copies."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and parameter.placements[names.index("tensor")].is_shard()


def owns(parameter: Tensor, position: MeshPosition, *, shared: Tensor | None) -> bool:
    """True for one of the devices that hold the same shard of a parameter; `shared`: the tied matrix of two stages."""
    return (position.tensor_rank == 0 or is_split(parameter)) and (position.stage == 0 or parameter is not shared)


def scale_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Clip by norm: multiply all gradients by max_norm / norm if norm is larger."""
    if norm <= max_norm:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            local_shard(parameter.grad).mul_(max_norm / norm)


def totals(groups: ProcessGroups, module: StageModule, *, loss_sum: Tensor) -> Tensor:
    """Sums of losses and of squared gradients over all devices; copies count once. The host does not wait for them.

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
    counted = [each for each in module.parameters() if owns(each, position, shared=shared)]
    own = loss_sum if position.tensor_rank == 0 else torch.zeros_like(loss_sum)
    return groups.sum(torch.stack([own, local_squares(counted).to(own)]))
