"""Process groups on real gloo processes: made once, warmed, capped, and made anew for each generation."""

import dataclasses
import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.execute.parallel.groups import Place, World
from tests.execute.gloo import joined, on_processes

WORLDS = ((1, 3, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 1))
"""Stages, ranks and tensor-parallel devices of one generation after another, in the same processes."""

NUM_PROCESSES = max(math.prod(world) for world in WORLDS)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each process saw."""
    return on_processes(_join_all, size=NUM_PROCESSES)


def _join_all(number: int, client: dist.Store) -> dict[str, Any]:
    # Without warming, gloo would now open a connection when it is first used.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    facts: dict[str, Any] = {"generations": []}
    for generation, (stages, ranks, tensor) in enumerate(WORLDS):
        if number < stages * ranks * tensor:
            place = Place.of(number, num_ranks=ranks, num_stages=stages, tensor_parallel=tensor)
            with joined(place, client, name=f"generation-{generation}", max_groups=5) as world:
                facts.setdefault("sockets", []).append(_sockets_before_and_after_traffic(world))
                num_joined = world.cache.num_joined
                if generation == 0:
                    facts["cache"] = _cache(world)
                facts["generations"].append(_generation(world) | {"joined": num_joined})
            facts["generations"][-1]["left"] = not dist.is_initialized() and len(world.cache) == 0
    return facts


def _sum_of_ranks(group: dist.ProcessGroup) -> float:
    number = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(number, group=group)
    return float(number)


def _groups(world: World) -> dict[str, dist.ProcessGroup]:
    """This device's channels by name; those that its world needs."""
    found = {field.name: getattr(world.channels, field.name) for field in dataclasses.fields(world.channels)}
    return {name: group for name, group in found.items() if group is not None}


def _generation(world: World) -> dict[str, Any]:
    groups = _groups(world)
    return {
        "place": dataclasses.asdict(world.place),
        "devices": {name: dist.get_process_group_ranks(group) for name, group in groups.items()},
        "sums": {name: _sum_of_ranks(group) for name, group in groups.items()},
        "distinct": len({id(group) for group in groups.values()}) == len(groups),
        "named": all(group.group_desc == name for name, group in groups.items()),
        "sum over all": world.sum(torch.tensor([float(world.place.device), 1.0])).tolist(),
        "timed": 0 < world.cache.seconds < 60,
    }


def _cache(world: World) -> dict[str, Any]:
    """Every rank asks for the same groups in the same order; the capacity is 5, three of which are channels."""
    cache, everyone = world.cache, tuple(range(world.place.num_ranks))

    def is_same(channel: str, ranks: tuple[int, ...], group: dist.ProcessGroup) -> bool:
        return cache.get(channel, ranks) is group

    facts: dict[str, Any] = {"at first": len(cache), "channel again": is_same("shard", everyone, world.channels.shard)}
    low, high = cache.get("sub", (0, 1)), cache.get("sub", (1, 2))
    facts["full"] = len(cache)
    facts["low sum"] = _sum_of_ranks(low) if world.place.rank in (0, 1) else 1.0
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
    facts["remade works"] = _sum_of_ranks(remade) if world.place.rank in (1, 2) else 3.0
    facts["channels work"] = _sum_of_ranks(world.channels.attend)
    return facts


def _sockets_before_and_after_traffic(world: World) -> list[int]:
    """Sockets of this process when it has joined, and when every pair has exchanged on every channel."""
    before = _num_sockets()
    for group in _groups(world).values():
        _sum_of_ranks(group)
        works = []
        for peer in set(dist.get_process_group_ranks(group)) - {world.place.device}:
            works.append(dist.isend(torch.zeros(4), group=group, dst=peer))
            works.append(dist.irecv(torch.zeros(4), group=group, src=peer))
        for work in works:
            work.wait()
    return [before, _num_sockets()]


def _num_sockets() -> int:
    return sum(link.is_socket() for link in Path("/proc/self/fd").iterdir())


def test_channels_in_every_generation(found: list[dict[str, Any]]) -> None:
    """Joined, left and joined again as another world, by processes that live on. A channel holds the devices that
    differ from this one in what the channel is for, and in nothing else."""
    differ = {"shard": "rank", "attend": "rank", "pipe_forward": "stage", "pipe_backward": "stage"}
    differ["tensor"] = "tensor_rank"
    for number, facts in enumerate(found):
        worlds = [world for world in WORLDS if number < math.prod(world)]
        assert len(facts["generations"]) == len(worlds)
        for (stages, ranks, tensor), each in zip(worlds, facts["generations"], strict=True):
            places = list(itertools.product(range(stages), range(ranks), range(tensor)))
            own = dict(zip(("stage", "rank", "tensor_rank"), places[number], strict=True))
            shape = {"num_stages": stages, "num_ranks": ranks, "tensor_parallel": tensor}
            assert each["place"] == own | shape
            want = {"control": list(range(len(places)))}
            for name, what in differ.items():
                same = [axis for axis in own if axis != what]
                others = [dict(zip(own, place, strict=True)) for place in places]
                want[name] = [at for at, it in enumerate(others) if all(it[axis] == own[axis] for axis in same)]
            absent = {"pipe_forward", "pipe_backward"} if stages == 1 else set()
            absent |= {"tensor"} if tensor == 1 else set()
            assert each["devices"] == {name: devices for name, devices in want.items() if name not in absent}
            assert each["sums"] == {name: sum(devices) for name, devices in each["devices"].items()}
            assert each["sum over all"] == [sum(range(len(places))), len(places)]
            assert each["joined"] == len(each["devices"])
            assert each["distinct"] and each["named"] and each["timed"] and each["left"]


def test_each_group_is_made_once_and_the_oldest_spare_goes(found: list[dict[str, Any]]) -> None:
    for facts in (facts for facts in found if "cache" in facts):
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


def test_traffic_opens_no_connection(found: list[dict[str, Any]]) -> None:
    """All were opened when the channels were made."""
    for facts in found:
        for before, after in facts["sockets"]:
            assert before == after > 0
