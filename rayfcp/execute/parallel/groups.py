"""Process groups of one generation: places, channels, and a capped, deduplicated cache behind them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rayfcp.execute.devices.device import group_options

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 86_400.0
"""Of the control channel, on which devices wait for the slowest to write a checkpoint: a timeout would break the
channel for good. Who waits in vain is freed by an abort of the groups."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class GroupCache:
    """Groups by (channel, ranks): each is made and warmed once, and there are at most `capacity`.

    Every device of the world must ask for the same groups in the same order (creation is collective), those of
    others included. A communicator holds device memory, so the oldest that is not a channel goes when there are
    too many.
    """

    def __init__(
        self, *, backend: str, device: torch.device, capacity: int, timeout_s: float, communication_sms: int = 0
    ) -> None:
        self._backend, self._device, self._capacity = backend, device, capacity
        self._communication_sms = communication_sms
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._kept: set[tuple[str, tuple[int, ...]]] = set()
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_joined(self) -> int:
        """Groups that this device is part of."""
        return sum(dist.get_rank() in ranks for _, ranks in self._groups)

    def get(
        self,
        channel: str,
        ranks: tuple[int, ...],
        *,
        backend: str | None = None,
        keep: bool = False,
        timeout_s: float | None = None,
    ) -> dist.ProcessGroup:
        """The group of `ranks` on `channel`, made and warmed if it is new; `keep` protects it from going. `timeout_s`:
        if not that of the cache."""
        key = (channel, ranks)
        if key in self._groups:
            self._groups[key] = self._groups.pop(key)
            return self._groups[key]
        self._make_room()
        start_s = time.perf_counter()
        used = backend or self._backend
        timeout = self._timeout if timeout_s is None else timedelta(seconds=timeout_s)
        options = group_options(used, communication_sms=self._communication_sms)
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend=used, group_desc=channel, pg_options=options
        )
        if dist.get_rank() in ranks:
            device = torch.device("cpu") if used == "gloo" else self._device
            _warm(group, device)
        self.seconds += time.perf_counter() - start_s
        self._groups[key] = group
        if keep:
            self._kept.add(key)
        return group

    def clear(self) -> None:
        """Destroy all groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
        self._kept.clear()

    def _make_room(self) -> None:
        spare = [key for key in self._groups if key not in self._kept]
        if len(self._groups) >= self._capacity and spare:
            dist.destroy_process_group(self._groups.pop(spare[0]))


def _warm(group: dist.ProcessGroup, device: torch.device) -> None:
    """Open all connections now, so that no rank opens one lazily in the middle of a step."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    token, inbox = torch.zeros(1, device=device), [torch.zeros(1, device=device) for _ in range(size)]
    for hop in range(1, size):
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, token, group=group, group_peer=(rank + hop) % size),
                dist.P2POp(dist.irecv, inbox[hop], group=group, group_peer=(rank - hop) % size),
            ]
        )
        for work in works:
            work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which device this is: `stage` of `num_stages`, `rank` of `num_ranks`, `tensor_rank` of `tensor_parallel`.

    A rank is the devices of all stages and tensor ranks that hold the model for the same tokens.
    """

    rank: int
    num_ranks: int
    stage: int = 0
    num_stages: int = 1
    tensor_rank: int = 0
    tensor_parallel: int = 1

    @classmethod
    def of(cls, number: int, *, num_ranks: int, num_stages: int = 1, tensor_parallel: int = 1) -> "Place":
        """The place of device `number`.

        >>> place = Place.of(7, num_ranks=3, num_stages=2, tensor_parallel=2)
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
        """Number of this device in the world."""
        return self.at(self.stage, self.rank, tensor_rank=self.tensor_rank)

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_ranks * self.tensor_parallel

    def at(self, stage: int, rank: int, *, tensor_rank: int) -> int:
        """Number of a device of the same world."""
        return (stage * self.num_ranks + rank) * self.tensor_parallel + tensor_rank

    @property
    def stage_devices(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the devices of this stage, `[rank][tensor rank]`."""
        tensor_ranks = range(self.tensor_parallel)
        return tuple(
            tuple(self.at(self.stage, rank, tensor_rank=each) for each in tensor_ranks)
            for rank in range(self.num_ranks)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """One group per kind of traffic; nothing else uses them.

    `shard`: gathers and reductions of sharded parameters, over the ranks of a stage. `attend`: keys, values and their
    gradients, over the same devices. `pipe_forward`, `pipe_backward`: what passes between stages, over the
    stages of a rank; None with one stage. `tensor`: over the tensor-parallel devices of a stage and rank; None if
    there is one. `control` (gloo): checkpoints and numbers, over all devices.
    """

    shard: dist.ProcessGroup
    attend: dist.ProcessGroup
    control: dist.ProcessGroup
    pipe_forward: dist.ProcessGroup | None = None
    pipe_backward: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the devices of one generation."""

    place: Place
    device: torch.device
    cache: GroupCache
    channels: Channels

    def sum(self, numbers: Tensor) -> Tensor:
        """Element-wise sum over all devices, in place; every device must call it, on this world's kind of device."""
        for group in (self.channels.shard, self.channels.pipe_forward, self.channels.tensor):
            if group is not None:
                dist.all_reduce(numbers, group=group)
        return numbers


def join_world(
    *,
    place: Place,
    store: Callable[[], dist.Store],
    device: torch.device,
    timeout_s: float,
    max_groups: int = 16,
    communication_sms: int = 0,
) -> World:
    """Meet the other devices at the store and make the channels.

    `store` gives a client of the rendezvous store, under the prefix of this generation. `max_groups`: that the cache
    holds, channels of other devices apart. `communication_sms`: see `group_options`.
    """
    start_s = time.perf_counter()
    backend = BACKENDS[device.type]
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store(), rank=place.device, world_size=place.num_devices, timeout=timeout)
    members = _members(place)
    others = sum(len(groups) - 1 for groups in members.values())
    capacity = max_groups + others
    cache = GroupCache(
        backend=backend, device=device, capacity=capacity, timeout_s=timeout_s, communication_sms=communication_sms
    )
    channels = Channels(**{name: _own(cache, name, groups, place=place) for name, groups in members.items()})
    cache.seconds = time.perf_counter() - start_s
    logger.info("device %d: %s, %d process groups in %.3f s", place.device, place, cache.num_joined, cache.seconds)
    return World(place=place, device=device, cache=cache, channels=channels)


def _members(place: Place) -> dict[str, list[tuple[int, ...]]]:
    """Devices of every group of every channel, in the order in which they are made."""
    stages, ranks, tensor_ranks = range(place.num_stages), range(place.num_ranks), range(place.tensor_parallel)

    def at(stage: int, rank: int, each: int) -> int:
        return place.at(stage, rank, tensor_rank=each)

    across_ranks = [tuple(at(stage, rank, each) for rank in ranks) for stage in stages for each in tensor_ranks]
    members = {"shard": across_ranks, "attend": across_ranks, "control": [tuple(range(place.num_devices))]}
    if place.num_stages > 1:
        across_stages = [tuple(at(stage, rank, each) for stage in stages) for rank in ranks for each in tensor_ranks]
        members |= {"pipe_forward": across_stages, "pipe_backward": across_stages}
    if place.tensor_parallel > 1:
        members["tensor"] = [
            tuple(at(stage, rank, each) for each in tensor_ranks) for stage in stages for rank in ranks
        ]
    return members


def _own(cache: GroupCache, name: str, groups: Sequence[tuple[int, ...]], *, place: Place) -> dist.ProcessGroup:
    """Make all groups of a channel; the one that this device is part of."""
    backend, timeout_s = ("gloo", CONTROL_TIMEOUT_S) if name == "control" else (None, None)
    made = {devices: cache.get(name, devices, backend=backend, keep=True, timeout_s=timeout_s) for devices in groups}
    return next(group for devices, group in made.items() if place.device in devices)


def leave_world(world: World) -> None:
    """Destroy the groups of this generation."""
    world.cache.clear()
    dist.destroy_process_group()
