"""FSDP2: parameters, gradients and optimizer state in equal shards over all ranks, any number of them."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.interpreter import Pixels, Placed
from rayfcp.execute.parallel.groups import World
from rayfcp.execute.reports import Progress


def stage_mesh(world: World) -> DeviceMesh:
    """The devices of this stage: ranks (`shard`), or ranks x tensor-parallel devices (`shard`, `tensor`)."""
    channels, kind = world.channels, world.device.type
    if channels.tensor is None:
        return DeviceMesh.from_group(channels.shard, kind, mesh_dim_names=("shard",))
    groups, devices = [channels.shard, channels.tensor], torch.tensor(world.place.stage_devices)
    return DeviceMesh.from_group(groups, kind, mesh=devices, mesh_dim_names=("shard", "tensor"))


def shard(
    module: nn.Module,
    layers: Iterable[nn.Module],
    *,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    kept: nn.Module | None = None,
) -> None:
    """Shard `layers` one by one and the rest of `module` together over a mesh of one dimension, in place. Layers
    without gradients are gathered for forward passes only. The layer `kept` stays gathered between a forward pass and
    the backward pass that follows: where that begins with it, nobody waits for the slowest forward pass there.

    Gradients are summed over ranks (not averaged) in fp32, or fp64 for fp64 models; computation runs in
    `dtype`. Every rank must run the same forward and backward passes from now on.

    Raises:
        RuntimeError: gradients of some part would be divided.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype is torch.bfloat16 else None,
        reduce_dtype=torch.float32 if dtype is torch.bfloat16 else None,
        cast_forward_inputs=False,
    )
    for layer in layers:
        part: FSDPModule = fully_shard(layer, mesh=mesh, mp_policy=policy)
        trained = any(parameter.requires_grad for parameter in layer.parameters())
        part.set_unshard_in_backward(trained)
        if layer is kept and trained:
            part.set_reshard_after_forward(False, recurse=False)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    if hasattr(module, "encode"):
        register_fsdp_forward_method(module, "encode")
    for part in sharded_modules(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    _check_sums(module)


def keep_gathered(module: nn.Module) -> None:
    """From now on parts stay gathered, forward and backward, until `release`; for several passes of one step."""
    for part in sharded_modules(module):
        part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(False, recurse=False)


def release(module: nn.Module) -> None:
    """Keep shards only, as before the step."""
    for part in sharded_modules(module):
        part.reshard()


def _check_sums(module: nn.Module) -> None:
    """`set_gradient_divide_factor` is not recursive, and a part that it missed would get 1/N of its gradients."""
    for part in sharded_modules(module):
        factors = {group.gradient_divide_factor for group in parameter_groups(part)}
        if factors - {1.0}:
            raise RuntimeError(f"gradients of {type(part).__name__} are divided by {factors}; sums are needed")


def parameter_groups(part: FSDPModule) -> list[Any]:
    """What a part gathers and reduces together."""
    state = part._get_fsdp_state()
    # torch 2.12 brought several groups to a part; 2.9 to 2.11 have one or None. DefaultAllGather and
    # DefaultReduceScatter, private too, are the same in all of them.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """All FSDP modules of a tree, the root included."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class StageModule(nn.Module):
    """What a device holds of a model, and of which of its parameters other devices hold copies that see the other
    parts of their gradients. `partial_names`: on all tensor-parallel devices. `shared_matrix`: embedding and head in
    one, on the first and the last of several stages. `occasional`: trained parameters that not every batch uses."""

    partial_names: tuple[str, ...] = ()

    @property
    def shared_matrix(self) -> nn.Parameter | None:
        return None

    @property
    def occasional(self) -> tuple[nn.Parameter, ...]:
        return ()

    def blank_pictures(self, count: int, *, side: int) -> Pixels:  # noqa: ARG002  a model that sees needs both
        """Pictures of `side` x `side` patches without contents, as the vision encoder takes them.

        Raises:
            ValueError: the model has none.
        """
        raise ValueError(f"{type(self).__name__} has no vision encoder; give it no pictures")


class StageRunner:
    """Forward passes of a `CausalLM`, or of a stage of one; see `TrainableModel`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(
        self,
        inputs: Tensor,
        *,
        positions: Tensor,
        targets: Tensor | None,
        attention: AttentionContext,
        keep_logits: bool = True,
        placed: Placed | None = None,
    ) -> Tensor:
        # FSDP sees no tensors of `placed`: it would take the end of their gradients for the end of the whole pass.
        output: Tensor = self.module(inputs, positions, targets, attention, keep_logits, placed)
        return output.squeeze(0)  # here, since FSDP's hooks want no view

    def encode(self, pixels: Pixels | None) -> Tensor:
        """See `TrainableModel`."""
        features: Tensor = self.module.encode(pixels)  # type: ignore[operator]
        return features if pixels is not None else features[:0]  # here, since FSDP's hooks want no view


class ShardedModel(StageRunner):
    """Parameters are in shards."""

    def set_reduce(self, reduce: bool) -> None:
        self.module.set_requires_gradient_sync(reduce)  # type: ignore[operator]
        # Otherwise each backward pass forgets the order of layers of forward passes whose turn is yet to come,
        # and nothing is gathered ahead of time in theirs.
        self.module.set_is_last_backward(reduce)  # type: ignore[operator]


class HostWait:
    """Seconds that the host spent in gathers and reductions of shards, waiting for other ranks included.

    Meaningful on CPUs, where these calls block; an accelerator's host only enqueues them. `progress` learns of waits.
    """

    def __init__(self, module: nn.Module, progress: Progress | None = None) -> None:
        self.seconds = 0.0
        self._progress = progress or Progress()
        for part in sharded_modules(module):
            part.set_custom_all_gather(_TimedAllGather(self))
            part.set_custom_reduce_scatter(_TimedReduceScatter(self))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time inside."""
        start_s = time.perf_counter()
        with self._progress.waiting():
            yield
        self.seconds += time.perf_counter() - start_s


class _TimedAllGather(DefaultAllGather):
    def __init__(self, wait: HostWait) -> None:
        self._wait = wait

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        with self._wait.timed():
            return super().__call__(*args, **keywords)


class _TimedReduceScatter(DefaultReduceScatter):
    def __init__(self, wait: HostWait) -> None:
        self._wait = wait

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        with self._wait.timed():
            return super().__call__(*args, **keywords)
