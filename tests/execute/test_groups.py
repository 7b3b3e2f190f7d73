"""Process groups on real gloo processes: made and warmed for each generation."""

import dataclasses
import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.execute.parallel.groups import POINT_TO_POINT, MeshPosition, ProcessGroups
from tests.execute.gloo import joined, on_processes

WORLDS = ((1, 3, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 1))
"""Stages, ranks and tensor-parallel devices of one generation after another, in the same processes."""

NUM_PROCESSES = max(math.prod(world) for world in WORLDS)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Results of each process."""
    return on_processes(_join_all, size=NUM_PROCESSES)


def _join_all(number: int, client: dist.Store) -> dict[str, Any]:
    # Without warming, gloo would now open a connection when it is first used.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    facts: dict[str, Any] = {"generations": []}
    for generation, (stages, ranks, tensor) in enumerate(WORLDS):
        if number < stages * ranks * tensor:
            position = MeshPosition.of(number, num_ranks=ranks, num_stages=stages, tensor_parallel=tensor)
            with joined(position, client, name=f"generation-{generation}") as world:
                facts.setdefault("sockets", []).append(_sockets_before_and_after_traffic(world))
                facts["generations"].append(_generation(world) | {"joined": len(world.made)})
            facts["generations"][-1]["left"] = not dist.is_initialized()
    return facts


def _sum_of_ranks(group: dist.ProcessGroup) -> float:
    number = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(number, group=group)
    return float(number)


def _groups(world: ProcessGroups) -> dict[str, dist.ProcessGroup]:
    """This device's channels by name; those that its world needs."""
    found = {field.name: getattr(world, field.name) for field in dataclasses.fields(world)}
    return {name: group for name, group in found.items() if isinstance(group, dist.ProcessGroup)}


def _generation(world: ProcessGroups) -> dict[str, Any]:
    groups = _groups(world)
    return {
        "place": dataclasses.asdict(world.position),
        "devices": {name: dist.get_process_group_ranks(group) for name, group in groups.items()},
        "sums": {name: _sum_of_ranks(group) for name, group in groups.items()},
        "distinct": len({id(group) for group in groups.values()}) == len(groups),
        "named": all(group.group_desc == name for name, group in groups.items()),
        "sum over all": world.sum(torch.tensor([float(world.position.device), 1.0])).tolist(),
        "timed": 0 < world.seconds < 60,
    }


def _sockets_before_and_after_traffic(world: ProcessGroups) -> list[int]:
    """Sockets of this process when it has joined, and after what the channels are for: collectives on all of them,
    messages between every pair on some."""
    before = _num_sockets()
    for name, group in _groups(world).items():
        _sum_of_ranks(group)
        size, works = dist.get_world_size(group), []
        dist.all_gather(list(torch.zeros(size, 8)), torch.zeros(8), group=group)
        dist.reduce_scatter(torch.zeros(8), list(torch.zeros(size, 8)), group=group)
        if name not in POINT_TO_POINT:
            continue
        for peer in set(dist.get_process_group_ranks(group)) - {world.position.device}:
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
                others = [dict(zip(own, position, strict=True)) for position in places]
                want[name] = [at for at, it in enumerate(others) if all(it[axis] == own[axis] for axis in same)]
            absent = {"pipe_forward", "pipe_backward"} if stages == 1 else set()
            absent |= {"tensor"} if tensor == 1 else set()
            assert each["devices"] == {name: devices for name, devices in want.items() if name not in absent}
            assert each["sums"] == {name: sum(devices) for name, devices in each["devices"].items()}
            assert each["sum over all"] == [sum(range(len(places))), len(places)]
            assert each["joined"] == len(each["devices"])
            assert each["distinct"] and each["named"] and each["timed"] and each["left"]


def test_traffic_opens_no_connection(found: list[dict[str, Any]]) -> None:
    """All were opened when the channels were made."""
    for facts in found:
        for before, after in facts["sockets"]:
            assert before == after > 0
