"""Time to write a checkpoint from a copy in shared memory.

    python jobs/bench/checkpoints.py --gib 1 --out /path/on/the/disk

Compared with `dcp.save` of the same tensors, and with the time to write and flush as many bytes.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from rayfcp.config.models import TrainConfig
from rayfcp.execute.reports import sum_files
from rayfcp.execute.state.checkpoint import write_index
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.saving import write_part
from rayfcp.values.state import PARAMETER, Box, ShardEntry, ShardHeader, StateId

STATE = StateId(version=1, generation=0)
COLUMNS, TIMES = 4096, 4


def copied(folder: Path, *, num_bytes: int, num_tensors: int) -> tuple[CopyFolder, dict[str, torch.Tensor]]:
    """A copy of matrices of random numbers, and the matrices."""
    rows = num_bytes // num_tensors // COLUMNS // 4
    tensors = {f"layers.{number}.weight": torch.randn(rows, COLUMNS) for number in range(num_tensors)}
    box, size = Box(offsets=(0, 0), sizes=(rows, COLUMNS)), rows * COLUMNS * 4
    entries = tuple(
        ShardEntry(name=name, kind=PARAMETER, box=box, dtype="float32", start_byte=number * size)
        for number, name in enumerate(tensors)
    )
    header = ShardHeader(
        state=STATE, number=0, num_devices=1, entries=entries, num_bytes=size * num_tensors, scalars={}
    )
    copies = CopyFolder(folder / "run" / "node")
    new = copies.begin(header)
    for number, tensor in enumerate(tensors.values()):
        new.buffer[number * size : (number + 1) * size] = tensor.reshape(-1).view(torch.uint8).numpy()
    new.publish()
    return copies, tensors


def timed(work: Callable[[Path], object], folder: Path) -> dict[str, float]:
    """Least wall and CPU seconds of several times, without the first, for which the system has to find memory."""
    found = []
    for _ in range(1 + TIMES):
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        work(folder)
        wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
        found.append((wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    wall, cpu = zip(*found[1:], strict=True)
    return {"wall_s": min(wall), "cpu_s": min(cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--out", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    num_bytes = int(arguments.gib * 2**30)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(dir=arguments.out) as out,
    ):
        copies, tensors = copied(Path(memory), num_bytes=num_bytes, num_tensors=arguments.tensors)

        def from_copies(folder: Path) -> None:
            part = write_part(copies, STATE, numbers=[0], folder=folder)
            write_index(folder, [part], step=1, config=TrainConfig())

        def by_torch(folder: Path) -> None:
            dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
            sum_files(folder, [path.name for path in folder.iterdir()])

        def plain(folder: Path) -> None:
            folder.mkdir()
            with (folder / "file").open("wb") as file, copies.reading(STATE, 0) as copy:
                file.write(copy.buffer.data)
                file.flush()
                os.fsync(file.fileno())

        for work in (from_copies, by_torch, plain):
            print(json.dumps({"what": work.__name__, "gib": arguments.gib, **timed(work, Path(out) / "saved")}))  # noqa: T201


if __name__ == "__main__":
    main()
