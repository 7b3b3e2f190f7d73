"""FSDP2: parameters, gradients and optimizer state in equal shards over any number of ranks."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from rayfcp.data.vision.decoding import DecodedImages
from rayfcp.execute.parallel.groups import ProcessGroups
from rayfcp.execute.reports import ReadWeight, StepProgress


def stage_mesh(groups: ProcessGroups) -> DeviceMesh:
    """The devices of this stage: ranks (`shard`), or ranks x tensor-parallel devices (`shard`, `tensor`)."""
    kind = groups.device.type
    if groups.tensor is None:
        return DeviceMesh.from_group(groups.shard, kind, mesh_dim_names=("shard",))
    devices = torch.from_numpy(groups.position.mesh[groups.position.stage])
    return DeviceMesh.from_group([groups.shard, groups.tensor], kind, mesh=devices, mesh_dim_names=("shard", "tensor"))


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
    the backward pass that follows and begins with it, which then need not wait for the slowest rank's forward pass.

    Gradients are summed over ranks (not averaged) in fp32, or fp64 for fp64 models; computation runs in `dtype`. Every
    rank must run the same forward and backward passes from now on.

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
    if isinstance(module, StageModule):
        register_fsdp_forward_method(module, "encode")
    for part in sharded_modules(module):
        part.set_gradient_divide_factor(1.0)  # not recursive: a part that it missed would get 1/N of its gradients
        part.set_force_sum_reduction_for_comms(True)
        factors = {group.gradient_divide_factor for group in parameter_groups(part)}
        if factors - {1.0}:
            raise RuntimeError(f"gradients of {type(part).__name__} are divided by {factors}; sums are needed")


def prefetch_next(layers: Iterable[nn.Module]) -> None:
    """Let each of these sharded layers begin to gather the next one before it computes, as the simulator assumes. By
    default a gather begins only when the host comes to its layer, which is too late where the host is not ahead."""
    for layer, following in pairwise(layers):
        assert isinstance(layer, FSDPModule) and isinstance(following, FSDPModule), "layers are sharded"
        layer.set_modules_to_forward_prefetch([following])


def keep_gathered(module: nn.Module) -> None:
    """Keep parts gathered from now on, forward and backward, until `release`; for several passes of one step."""
    for part in sharded_modules(module):
        part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(False, recurse=False)


def release(module: nn.Module) -> None:
    """Free gathered parameters and keep shards only."""
    for part in sharded_modules(module):
        part.reshard()


def release_forward(module: nn.Module) -> None:
    """`release` after forward passes that no backward pass followed, whose order would otherwise count as that of the
    next step's: its backward pass would gather a layer of theirs, for nothing."""
    release(module)
    for part in sharded_modules(module):
        for group in parameter_groups(part):
            group.comm_ctx.post_forward_order.clear()
            getattr(group, "_post_forward_indices", []).clear()


def parameter_groups(part: FSDPModule) -> list[Any]:
    """Groups of parameters that a part gathers and reduces together."""
    state = part._get_fsdp_state()
    # torch 2.12 brought several groups to a part; 2.9 to 2.11 have one or None. DefaultAllGather and
    # DefaultReduceScatter, private too, are the same in all of them.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def local_shard(tensor: Tensor) -> Tensor:
    """This device's part of a tensor, detached; shares memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """All FSDP modules of a tree, the root included."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class StageModule(nn.Module):
    """One device's part of a model, as `Interpreter` runs it: all layers or those of one stage, sharded or whole, and
    the vision encoder if the model has one.

    A call passes `inputs`, `positions`, `targets`, the attention context, whether logits may be kept since the backward
    pass comes next, and features that replace the embeddings of image tokens; see `CausalLM.forward`.

    `partial_names`: parameters whose gradients are partial, since all tensor-parallel devices hold copies.
    `shared_matrix`: tied embedding and head, on the first and last of several stages. `occasional`: trained parameters
    that not every batch uses. `read_weights`: what this device has read from files and does not train.
    """

    partial_names: tuple[str, ...] = ()
    read_weights: tuple[ReadWeight, ...] = ()

    @property
    def shared_matrix(self) -> nn.Parameter | None:
        return None

    @property
    def occasional(self) -> tuple[nn.Parameter, ...]:
        return ()

    def encode(self, pixels: DecodedImages | None) -> Tensor:  # noqa: ARG002  vision models need it
        """Features of the images' tokens, in order, `[tokens, num_mergers x hidden]`; in the graph unless the encoder
        is frozen. None: the encoder runs, as on other ranks, on a small blank image."""
        raise ValueError(f"{type(self).__name__} has no vision encoder; give it no images")

    def blank_images(self, count: int, *, side: int) -> DecodedImages:  # noqa: ARG002  vision models need both
        """`count` blank images of `side` x `side` patches, as the vision encoder takes them."""
        raise ValueError(f"{type(self).__name__} has no vision encoder; give it no images")


def set_reduce(module: nn.Module, reduce: bool) -> None:
    """Set whether the next backward pass sums gradients over ranks; a module that is not sharded never does."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(reduce)
        # Otherwise each backward pass clears the recorded layer order of forward passes whose backward is still to
        # come, and nothing is prefetched in theirs.
        module.set_is_last_backward(reduce)


class HostWait:
    """Seconds that the host spent in gathers and reductions of shards, waiting for other ranks included.

    Meaningful on CPUs, where these calls block; an accelerator's host only enqueues them. `progress` records waits.
    """

    def __init__(self, module: nn.Module, progress: StepProgress | None = None) -> None:
        self.seconds = 0.0
        self._progress = progress or StepProgress()
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


class _Timed:
    """Collective of FSDP whose calls are timed."""

    def __init__(self, wait: HostWait) -> None:
        self._wait = wait

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        with self._wait.timed():
            return super().__call__(*args, **keywords)  # type: ignore[misc]


class _TimedAllGather(_Timed, DefaultAllGather):
    pass


class _TimedReduceScatter(_Timed, DefaultReduceScatter):
    pass
