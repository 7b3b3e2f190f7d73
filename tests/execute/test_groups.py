"""Process groups on real gloo processes: made once, warmed, capped, and made anew for each generation."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rayfcp.execute.groups import World, join_world, leave_world
from tests.execute.gloo import listening_store

CPU = torch.device("cpu")
SIZES = (3, 2, 3)
"""Ranks of one generation after another, in the same processes."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each rank saw, by rank."""
    folder = tmp_path_factory.mktemp("groups")
    store = listening_store()
    mp.spawn(_process, args=(store.port, str(folder)), nprocs=max(SIZES))
    return {str(rank): json.loads((folder / f"{rank}.json").read_text()) for rank in range(max(SIZES))}


def _process(rank: int, port: int, folder: str) -> None:
    # Without warming, gloo would now open a connection when it is first used.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    torch.set_num_threads(1)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    facts: dict[str, Any] = {"generations": []}
    for generation, size in enumerate(SIZES):
        if rank < size:
            store = dist.PrefixStore(f"generation-{generation}", client)
            world = join_world(
                rank=rank, num_ranks=size, store=lambda store=store: store, device=CPU, timeout_s=30, max_groups=5
            )
            if generation == 0:
                facts["sockets"] = _sockets_before_and_after_traffic(world)
                facts["cache"] = _cache(world)
            facts["generations"].append(_generation(world))
            leave_world(world)
            facts["generations"][-1]["left"] = not dist.is_initialized() and len(world.cache) == 0
    (Path(folder) / f"{rank}.json").write_text(json.dumps(facts))
    client.set(f"done-{rank}", "1")
    client.wait([f"done-{other}" for other in range(max(SIZES))])


def _sum_of_ranks(group: dist.ProcessGroup) -> float:
    number = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(number, group=group)
    return float(number)


def _generation(world: World) -> dict[str, Any]:
    channels = world.channels
    groups = (channels.shard, channels.attend, channels.control)
    return {
        "rank": world.rank,
        "num_ranks": world.num_ranks,
        "sizes": [dist.get_world_size(group) for group in groups],
        "sums": [_sum_of_ranks(group) for group in groups],
        "distinct": len({id(group) for group in groups}),
        "names": [group.group_desc for group in groups],
        "timed": 0 < world.cache.seconds < 60,
    }


def _cache(world: World) -> dict[str, Any]:
    """Every rank asks for the same groups in the same order; the capacity is 5, three of which are channels."""
    cache, everyone = world.cache, tuple(range(world.num_ranks))

    def is_same(channel: str, ranks: tuple[int, ...], group: dist.ProcessGroup) -> bool:
        return cache.get(channel, ranks) is group

    facts: dict[str, Any] = {"at first": len(cache), "channel again": is_same("shard", everyone, world.channels.shard)}
    low, high = cache.get("sub", (0, 1)), cache.get("sub", (1, 2))
    facts["full"] = len(cache)
    facts["low sum"] = _sum_of_ranks(low) if world.rank in (0, 1) else 1.0
    before_s = cache.seconds
    facts["again"] = is_same("sub", (0, 1), low) and is_same("sub", (1, 2), high) and is_same("sub", (0, 1), low)
    facts["again is free"] = cache.seconds == before_s
    whole = cache.get("other", everyone)
    facts["capped"] = len(cache)
    facts["made and timed"] = cache.seconds > before_s
    facts["another channel is another group"] = whole is not world.channels.shard
    facts["used last stays"] = is_same("sub", (0, 1), low)
    facts["channels stay"] = [
        is_same(name, everyone, getattr(world.channels, name)) for name in ("shard", "attend", "control")
    ]
    remade = cache.get("sub", (1, 2))
    facts["still capped"] = len(cache)
    facts["remade works"] = _sum_of_ranks(remade) if world.rank in (1, 2) else 3.0
    facts["channels work"] = _sum_of_ranks(world.channels.attend)
    return facts


def _sockets_before_and_after_traffic(world: World) -> list[int]:
    """Sockets of this process when it has joined, and when every pair has exchanged on every channel."""
    before = _num_sockets()
    for group in (world.channels.shard, world.channels.attend, world.channels.control):
        _sum_of_ranks(group)
        works = []
        for peer in set(range(world.num_ranks)) - {world.rank}:
            works.append(dist.isend(torch.zeros(4), group=group, group_dst=peer))
            works.append(dist.irecv(torch.zeros(4), group=group, group_src=peer))
        for work in works:
            work.wait()
    return [before, _num_sockets()]


def _num_sockets() -> int:
    return sum(link.is_socket() for link in Path("/proc/self/fd").iterdir())


def test_channels_over_all_ranks_in_every_generation(found: dict[str, dict[str, Any]]) -> None:
    """Joined, left and joined again with another number of ranks, by processes that live on."""
    for rank, facts in found.items():
        sizes = [size for size in SIZES if int(rank) < size]
        assert [each["num_ranks"] for each in facts["generations"]] == sizes
        for size, each in zip(sizes, facts["generations"], strict=True):
            assert each["rank"] == int(rank)
            assert each["sizes"] == [size] * 3
            assert each["sums"] == [sum(range(size))] * 3
            assert each["distinct"] == 3 and each["names"] == ["shard", "attend", "control"]
            assert each["timed"] and each["left"]


def test_each_group_is_made_once_and_the_oldest_spare_goes(found: dict[str, dict[str, Any]]) -> None:
    for facts in found.values():
        cache = facts["cache"]
        assert cache["at first"] == 3 and cache["channel again"]
        assert cache["full"] == 5
        assert cache["low sum"] == 1.0
        assert cache["again"] and cache["again is free"]
        assert cache["capped"] == 5 and cache["made and timed"]
        assert cache["another channel is another group"]
        assert cache["used last stays"] and all(cache["channels stay"])
        assert cache["still capped"] == 5
        assert cache["remade works"] == 3.0 and cache["channels work"] == 3.0


def test_traffic_opens_no_connection(found: dict[str, dict[str, Any]]) -> None:
    """All were opened when the channels were made."""
    for facts in found.values():
        before, after = facts["sockets"]
        assert before == after > 0
