"""Process groups of one generation: the channels, and a capped, deduplicated cache behind them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class GroupCache:
    """Groups by (channel, ranks): each is made and warmed once, and there are at most `capacity`.

    Every rank of the world must ask for the same groups in the same order (creation is collective).
    A communicator holds device memory, so the oldest that is not a channel goes when there are too many.
    """

    def __init__(self, *, backend: str, device: torch.device, capacity: int, timeout_s: float) -> None:
        self._backend, self._device, self._capacity = backend, device, capacity
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._kept: set[tuple[str, tuple[int, ...]]] = set()
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._groups)

    def get(
        self, channel: str, ranks: tuple[int, ...], *, backend: str | None = None, keep: bool = False
    ) -> dist.ProcessGroup:
        """The group of `ranks` on `channel`, made and warmed if it is new; `keep` protects it from going."""
        key = (channel, ranks)
        if key in self._groups:
            self._groups[key] = self._groups.pop(key)
            return self._groups[key]
        self._make_room()
        start_s = time.perf_counter()
        used = backend or self._backend
        group = dist.new_group(list(ranks), timeout=self._timeout, backend=used, group_desc=channel)
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
class Channels:
    """One group per kind of traffic, each over all ranks; nothing else uses them.

    `shard`: gathers and reductions of sharded parameters. `attend`: keys, values and their gradients.
    `control` (gloo): checkpoints and numbers.
    """

    shard: dist.ProcessGroup
    attend: dist.ProcessGroup
    control: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the ranks of one generation."""

    rank: int
    num_ranks: int
    device: torch.device
    cache: GroupCache
    channels: Channels


def join_world(
    *,
    rank: int,
    num_ranks: int,
    store: Callable[[], dist.Store],
    device: torch.device,
    timeout_s: float,
    max_groups: int = 16,
) -> World:
    """Meet the other ranks at the store and make the channels.

    `store` gives a client of the rendezvous store, under the prefix of this generation.
    """
    start_s = time.perf_counter()
    backend = BACKENDS[device.type]
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store(), rank=rank, world_size=num_ranks, timeout=timeout)
    cache = GroupCache(backend=backend, device=device, capacity=max_groups, timeout_s=timeout_s)
    everyone = tuple(range(num_ranks))
    channels = Channels(
        shard=cache.get("shard", everyone, keep=True),
        attend=cache.get("attend", everyone, keep=True),
        control=cache.get("control", everyone, backend="gloo", keep=True),
    )
    cache.seconds = time.perf_counter() - start_s
    logger.info("rank %d of %d: %d process groups in %.3f s", rank, num_ranks, len(cache), cache.seconds)
    return World(rank=rank, num_ranks=num_ranks, device=device, cache=cache, channels=channels)


def leave_world(world: World) -> None:
    """Destroy the groups of this generation."""
    world.cache.clear()
    dist.destroy_process_group()
