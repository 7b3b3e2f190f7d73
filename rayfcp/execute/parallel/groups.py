"""Process groups of one generation: mesh positions and channels, made and warmed once."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rayfcp.execute.devices.backend import backend_of
from rayfcp.values.devices import CPU, DEVICES

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 86_400.0
"""Timeout of the control channel, on which devices wait for the slowest checkpoint writer: a timeout would break the
channel for good, and an abort of the groups ends a wait in vain."""

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Of one tensor each; torch 2.13 deprecates the former names."""

POINT_TO_POINT = ("attend", "pipe_forward", "pipe_backward")
"""Channels that carry messages between two devices. NCCL opens each pair's connection, with buffers of its own, at the
first message; the other channels run collectives only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPosition:
    """Position of a device: `stage` of `num_stages`, `rank` of `num_ranks`, `tensor_rank` of `tensor_parallel`.

    A rank is the devices of all stages and tensor ranks that hold the model for the same tokens.
    """

    rank: int
    num_ranks: int
    stage: int = 0
    num_stages: int = 1
    tensor_rank: int = 0
    tensor_parallel: int = 1

    @classmethod
    def of(cls, number: int, *, num_ranks: int, num_stages: int = 1, tensor_parallel: int = 1) -> "MeshPosition":
        """The position of device `number`.

        >>> place = MeshPosition.of(7, num_ranks=3, num_stages=2, tensor_parallel=2)
        >>> place.stage, place.rank, place.tensor_rank, place.device
        (1, 0, 1, 7)
        """
        at, tensor_rank = divmod(number, tensor_parallel)
        stage, rank = divmod(at, num_ranks)
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            stage=stage,
            num_stages=num_stages,
            tensor_rank=tensor_rank,
            tensor_parallel=tensor_parallel,
        )

    @property
    def device(self) -> int:
        """Number of this device among all devices."""
        return int(self.mesh[self.stage, self.rank, self.tensor_rank])

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_ranks * self.tensor_parallel

    @property
    def mesh(self) -> npt.NDArray[np.int64]:
        """Numbers of all devices, `[stage, rank, tensor rank]`."""
        return np.arange(self.num_devices).reshape(self.num_stages, self.num_ranks, self.tensor_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """Process groups of this device in one generation, one per kind of message, made in `seconds`.

    `shard`: gathers and reductions of sharded parameters, over the ranks of a stage. `attend`: keys, values and their
    gradients, over the same devices. `pipe_forward`, `pipe_backward`: activations and their gradients, over the stages
    of a rank; None with one stage. `tensor`: over the tensor-parallel devices of a stage and rank; None if there is
    one. `control` (gloo): checkpoints, over all devices. Between steps, sums of losses and gradient norms run on
    `shard`, `pipe_forward` and `tensor` in turn, and gradients of tied embeddings on `pipe_forward`.
    """

    position: MeshPosition
    device: torch.device
    seconds: float
    shard: dist.ProcessGroup
    attend: dist.ProcessGroup
    control: dist.ProcessGroup
    pipe_forward: dist.ProcessGroup | None = None
    pipe_backward: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None

    @property
    def made(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups."""
        groups = (self.shard, self.attend, self.control, self.pipe_forward, self.pipe_backward, self.tensor)
        return tuple(group for group in groups if group is not None)

    def sum(self, numbers: Tensor) -> Tensor:
        """Element-wise sum over all devices, in place; every device must call it, with a tensor on its device."""
        for group in (self.shard, self.pipe_forward, self.tensor):
            if group is not None:
                dist.all_reduce(numbers, group=group)
        return numbers


def join_process_groups(
    *,
    position: MeshPosition,
    store: Callable[[], dist.Store],
    device: torch.device,
    timeout_s: float,
    communication_sms: int = 0,
) -> ProcessGroups:
    """Rendezvous with the other devices and make the groups. `store` returns a client of the rendezvous store, under
    the prefix of this generation; `communication_sms`: see `DeviceBackend.group_options`."""
    start_s = time.perf_counter()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        DEVICES[device.type].group_backend,
        store=store(),
        rank=position.device,
        world_size=position.num_devices,
        timeout=timeout,
    )
    made: dict[str, dist.ProcessGroup] = {}
    channels = _members(position)
    for name, members in channels.items():
        is_control = name == "control"
        for devices in members:  # every device makes all groups in the same order, also those it is not part of
            group = new_channel(
                name,
                devices,
                device=torch.device(CPU.name) if is_control else device,
                timeout=timedelta(seconds=CONTROL_TIMEOUT_S) if is_control else timeout,
                communicators=len(channels) - 1,
                communication_sms=communication_sms,
            )
            if position.device in devices:
                made[name] = group
    seconds = time.perf_counter() - start_s
    groups = ProcessGroups(position=position, device=device, seconds=seconds, **made)
    logger.info("device %d: %s, %d process groups in %.3f s", position.device, position, len(groups.made), seconds)
    return groups


def new_channel(
    name: str,
    devices: Sequence[int] | None = None,
    *,
    device: torch.device,
    timeout: timedelta,
    communicators: int,
    communication_sms: int = 0,
) -> dist.ProcessGroup:
    """A group of `devices` (all if absent) for tensors on `device`, one of `communicators` there, with its connections
    open. All devices of the default group must call it."""
    group: dist.ProcessGroup = dist.new_group(
        devices,
        timeout=timeout,
        backend=DEVICES[device.type].group_backend,
        group_desc=name,
        pg_options=backend_of(device).group_options(communication_sms=communication_sms, communicators=communicators),
    )
    if devices is None or dist.get_rank() in devices:
        _warm(group, device, messages=name in POINT_TO_POINT)
    return group


def _members(position: MeshPosition) -> dict[str, list[list[int]]]:
    """Devices of each group of each channel, in the order of creation."""
    mesh = position.mesh
    across_ranks: list[list[int]] = mesh.transpose(0, 2, 1).reshape(-1, position.num_ranks).tolist()
    members = {"shard": across_ranks, "attend": across_ranks, "control": [mesh.ravel().tolist()]}
    if position.num_stages > 1:
        members["pipe_forward"] = members["pipe_backward"] = mesh.reshape(position.num_stages, -1).T.tolist()
    if position.tensor_parallel > 1:
        members["tensor"] = mesh.reshape(-1, position.tensor_parallel).tolist()
    return members


def _warm(group: dist.ProcessGroup, device: torch.device, *, messages: bool) -> None:
    """Open all connections of collectives now, and those between any two devices if the group carries `messages`, so
    that none is opened lazily in the middle of a step."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    one, all_of_them = torch.zeros(1, device=device), torch.zeros(size, device=device)
    dist.all_reduce(one, group=group)  # each algorithm of NCCL has connections of its own
    all_gather(all_of_them, one, group=group)
    reduce_scatter(one, all_of_them, group=group)
    for hop in range(1, size if messages else 1):
        swap(
            torch.zeros(1, device=device),
            torch.zeros(1, device=device),
            group=group,
            target=(rank + hop) % size,
            source=(rank - hop) % size,
        )


def swap(leaving: Tensor, arriving: Tensor, *, group: dist.ProcessGroup, target: int, source: int) -> None:
    """Send one tensor to rank `target` of `group` while another arrives from `source`; wait for both."""
    send = dist.P2POp(dist.isend, leaving, group=group, group_peer=target)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=source)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def leave_process_groups(groups: ProcessGroups) -> None:
    """Destroy the groups of this generation."""
    for group in groups.made:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
