"""The tiny model of simulated runs: a vector of integers whose every update depends on the step and its samples."""

import math
import warnings
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rayfcp.cluster.checkpoints.folder import read_manifest
from rayfcp.data.evaluation import EvalBatches
from rayfcp.values import EvalResult, GlobalBatch
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId

Shard = npt.NDArray[np.uint64]

NAME, KIND = "weights", "parameter"
_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


def first(size: int) -> Shard:
    """The state before the first step."""
    return np.arange(1, size + 1, dtype=np.uint64) * _FACTOR


def updated(shard: Shard, *, step: int, samples_hash: str) -> Shard:
    """The shard after one more step. Updates do not commute, and none is undone by another."""
    drive = np.uint64(zlib.crc32(f"{step}:{samples_hash}".encode()))
    mixed = (shard ^ drive) * _FACTOR
    mixed ^= mixed >> _SHIFT
    found: Shard = mixed + np.uint64(step)
    return found


def digest(shard: Shard) -> int:
    """A number that sums up over shards to that of the whole state, whatever the shards."""
    return int(np.add.reduce(shard, dtype=np.uint64)) if len(shard) else 0


def loss_of(total: int) -> float:
    """The loss of a step, from the sum of all shards' digests before it: in [1, 2)."""
    return 1.0 + (total % (1 << 40)) / (1 << 40)


def interval(number: int, *, num_devices: int, size: int) -> tuple[int, int]:
    """Elements `[start, stop)` of device `number`."""
    return number * size // num_devices, (number + 1) * size // num_devices


def header_of(state: StateId, *, number: int, num_devices: int, size: int, version: int) -> ShardHeader:
    """The header of a copy. `version`: updates that the shard went through; `state` is what the controller calls it."""
    start, stop = interval(number, num_devices=num_devices, size=size)
    box = Box(offsets=(start,), sizes=(stop - start,))
    return ShardHeader(
        state=state,
        number=number,
        num_devices=num_devices,
        entries=(ShardEntry(name=NAME, kind=KIND, box=box, dtype="int64", start_byte=0),),
        num_bytes=8 * (stop - start),
        scalars={"version": float(version)},
    )


def eval_losses(total: int, batch: GlobalBatch) -> tuple[float, ...]:
    """The losses of a state on an evaluation batch, by sequence, from the sum of all shards' digests."""
    return tuple(loss_of(total + sample.id) for sample in batch.samples)


class Reference:
    """States of the undisturbed run, by version. `skipped`: steps that update nothing."""

    def __init__(self, size: int, *, samples_hash_of: "SamplesHash", skipped: frozenset[int]) -> None:
        self._states = [first(size)]
        self._hash_of, self._skipped = samples_hash_of, skipped

    def __call__(self, version: int) -> Shard:
        while len(self._states) <= version:
            step = len(self._states)
            last = self._states[-1]
            self._states.append(
                last if step in self._skipped else updated(last, step=step, samples_hash=self._hash_of(step))
            )
        return self._states[version]

    def loss(self, step: int) -> float:
        return loss_of(digest(self(step - 1)))

    def evaluation(self, version: int, batches: EvalBatches) -> dict[str, EvalResult]:
        """Of the state after `version` steps, on each set."""
        total, losses, tokens = digest(self(version)), dict[str, list[float]](), dict[str, int]()
        for number in range(1, len(batches) + 1):
            batch, name = batches.batch(number), batches.set_of(number).name
            losses.setdefault(name, []).extend(eval_losses(total, batch))
            tokens[name] = tokens.get(name, 0) + batch.num_targets
        return {
            name: EvalResult(loss=math.fsum(each) / tokens[name], tokens=tokens[name]) for name, each in losses.items()
        }


class SamplesHash:
    """Hash of the samples of each step, as the real sampler draws them."""

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        self._of = lru_cache(maxsize=None)(self._hash)

    def __call__(self, step: int) -> str:
        return self._of(step)

    def _hash(self, step: int) -> str:
        found: str = self._sampler.batch(step).samples_hash  # type: ignore[attr-defined]
        return found


def read_checkpoint(folder: Path, *, start: int, stop: int) -> tuple[Shard, int]:
    """Elements `[start, stop)` of a checkpoint, as torch reads it, and its version."""
    import torch
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    (described,) = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    whole = torch.zeros(described.size, dtype=torch.int64)  # type: ignore[union-attr]
    dcp.load({"model": {NAME: whole}}, checkpoint_id=folder, no_dist=True)
    return whole.numpy().view(np.uint64)[start:stop].copy(), read_manifest(folder).step
