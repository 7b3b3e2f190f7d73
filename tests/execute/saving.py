"""Checkpoint writes by real processes over gloo, on storage that fails one of them."""

import resource
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.reports import SavedPart
from rayfcp.execute.state.checkpoint import CheckpointWriter
from tests.execute.gloo import joined, on_processes

ROWS, COLUMNS = 64, 257

Writes = Callable[[CheckpointWriter, nn.Module, torch.optim.Optimizer, Path], list[SavedPart | None]]


def write_on_gloo(writes: Writes, folder: Path, *, size: int) -> list[list[SavedPart | None]]:
    """Results of `writes` on each of `size` ranks that share a matrix by rows."""
    return on_processes(_write, size, writes, folder, size=size)


def _write(rank: int, client: dist.Store, size: int, writes: Writes, folder: Path) -> list[SavedPart | None]:
    with joined(MeshPosition(rank=rank, num_ranks=size), client, name="saving") as world:
        mesh = init_device_mesh("cpu", (size,))
        torch.manual_seed(0)
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(torch.randn(ROWS, COLUMNS), mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW(module.parameters())
        return writes(CheckpointWriter(world.control), module, optimizer, folder)


def save_with_one_full_disk(
    writer: CheckpointWriter, module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> list[SavedPart | None]:
    """Two writes; the last rank may write no file of more than a few bytes in the first one."""
    found = []
    for name in ("first", "second"):
        no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if name == "first" and dist.get_rank() == dist.get_world_size() - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, no_limit[1]))
        writer.begin(folder / name, module, optimizer=optimizer)
        found.append(writer.finish())
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    return found


def save_where_a_file_is(
    writer: CheckpointWriter, module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> list[SavedPart | None]:
    """One write to a folder whose place a file has taken."""
    (folder / "file").touch()
    writer.begin(folder / "file" / "below", module, optimizer=optimizer)
    found = [writer.finish()]
    assert writer.finished() is None
    return [*found, writer.finish()]
