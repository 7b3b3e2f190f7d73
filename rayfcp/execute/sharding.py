"""FSDP2: parameters, gradients and optimizer state in equal shards over all ranks, any number of them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rayfcp.execute.attention import AttentionContext


def shard(
    module: nn.Module, layers: nn.ModuleList, *, group: dist.ProcessGroup, device_type: str, dtype: torch.dtype
) -> None:
    """Shard `layers` one by one and the rest of `module` together, in place.

    Gradients are summed over ranks (not averaged) in fp32, or fp64 for fp64 models; computation runs in
    `dtype`. Every rank must run the same forward and backward passes from now on.

    Raises:
        ValueError: `set_gradient_divide_factor` did not reach every shard group.
    """
    mesh = DeviceMesh.from_group(group, device_type)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype is torch.bfloat16 else None,
        reduce_dtype=torch.float32 if dtype is torch.bfloat16 else None,
        cast_forward_inputs=False,
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for part in sharded_modules(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """All FSDP modules of a tree, the root included."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class ShardedModel:
    """A sharded `CausalLM`; see `TrainableModel`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def loss_sum(self, tokens: Tensor, *, positions: Tensor, targets: Tensor, attention: AttentionContext) -> Tensor:
        return self.module(tokens, positions, targets, attention)  # type: ignore[no-any-return]

    def set_reduce(self, reduce: bool) -> None:
        self.module.set_requires_gradient_sync(reduce)  # type: ignore[operator]
