"""Reports of a device to the controller, checksums of checkpoint files, progress within a step; free of torch."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.program import Piece
from rayfcp.values import PairStats, Span, StateId
from rayfcp.values.state import Box, ShardEntry

if TYPE_CHECKING:
    from rayfcp.data.rows import BadRow  # its package loads pyarrow, which stores of copies do without


class StepProgress:
    """Progress of a device within a step. Written by the thread that runs the step; others may read each number."""

    def __init__(self) -> None:
        self.step = self.num_done = 0
        self.is_waiting = False

    def begin(self, step: int) -> None:
        self.step, self.num_done = step, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which this device waits for others."""
        outer, self.is_waiting = self.is_waiting, True
        try:
            yield
        finally:
            self.is_waiting = outer


CHUNK_BYTES = 1 << 20
"""Read at a time: little memory, large enough for full disk bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """Size and CRC-32 of file `name` of a folder."""

    name: str
    num_bytes: int
    crc32: int


def sum_files(folder: str | Path, names: Iterable[str]) -> tuple[FileSum, ...]:
    """Checksums of these files in order of their names; each is read whole, a chunk at a time."""
    return tuple(_sum(Path(folder) / name) for name in sorted(names))


def find_damage(folder: str | Path, sums: Sequence[FileSum]) -> str | None:
    """Describe the first file that differs from its checksum; None if all match. Sizes are compared first: no reads."""
    if found := find_wrong_size(folder, sums):
        return found
    for want in sums:
        path = Path(folder) / want.name
        try:
            found_sum = _sum(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if found_sum != want:
            return f"{path} has checksum {found_sum.crc32:08x}, must be {want.crc32:08x} as written"
    return None


def find_wrong_size(folder: str | Path, sums: Sequence[FileSum]) -> str | None:
    """Like `find_damage`, without reading: finds files that are missing, truncated or too long."""
    for each in sums:
        path = Path(folder) / each.name
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if num_bytes != each.num_bytes:
            return f"{path} holds {num_bytes} bytes, must be {each.num_bytes} as written"
    return None


def _sum(path: Path) -> FileSum:
    num_bytes, checksum = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            num_bytes, checksum = num_bytes + len(chunk), zlib.crc32(chunk, checksum)
    return FileSum(name=path.name, num_bytes=num_bytes, crc32=checksum)


class CollectiveFailedError(RuntimeError):
    """An exchange between devices failed or was aborted, because of another device or the network, not the program."""


class DeviceLostError(RuntimeError):
    """This process's device is broken; the run goes on without it, and the process cannot use it again."""


class DeviceFullError(ConfigError):
    """A device ran out of memory in a step; the message names what needed it, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWeight:
    """Part `box` of a tensor that was read from files and is not trained; `content` is defined in
    `state/identity.py`."""

    name: str
    box: Box
    content: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Process groups that a device made for a generation, and the seconds that it took; the weights that it read."""

    process_groups: int
    process_group_s: float
    weights: tuple[ReadWeight, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Place of `num_bytes` in `file` of a checkpoint that hold the part of a tensor which `entry` describes."""

    entry: ShardEntry
    file: str
    start_byte: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """Part of a checkpoint that is on disk after `seconds`: the shards of some devices. `scalars`: as in their
    headers."""

    seconds: float
    files: tuple[FileSum, ...]
    tensors: tuple[SavedTensor, ...]
    scalars: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One step of device `number`. `loss` and `grad_norm` are global; if one is not finite, or `loss` is None because
    the batch has no targets, nothing was updated.

    `step_s` runs from the call to the end of the update. `wait_s` of it was spent waiting for other devices: for
    messages of attention and of other stages (`message_s`), gathers and reductions. It is NaN on accelerators, whose
    host does not wait; `message_s` is measured on their streams. `gather_s[m]`: seconds of gathers and reductions in
    microbatch m, NaN on accelerators.
    `copy_s`: part of `step_s` spent waiting for
    copies of the state. `copied`: newest state of which this device's copy is complete in its node's memory.
    `broken`: rows with images that this device could not decode. `source_losses`: sums of losses of this
    device's tokens, by source of a mixture; on the last stage's first tensor-parallel device alone. `pairs`: of a loss
    of pairs.
    """

    number: int
    stage: int
    rank: int
    tensor_rank: int
    step: int
    loss: float | None
    grad_norm: float
    learning_rate: float
    step_s: float
    wait_s: float
    memory_bytes: dict[str, int]
    gather_s: tuple[float, ...]
    spans: tuple[Span, ...]
    message_s: float = math.nan
    copy_s: float = 0.0
    copied: StateId | None = None
    broken: "tuple[BadRow, ...]" = ()
    source_losses: tuple[float, ...] = ()
    pairs: PairStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLosses:
    """Losses of an evaluated batch, summed over all devices: `by_sequence` from device 0, empty from the others;
    `num_targets` that count. `seconds`: of this device. `terms`: of the tokens of its own `pieces` end to end,
    `[tokens]`, where they were asked for. `broken`: as in `DeviceReport`."""

    number: int
    by_sequence: tuple[float, ...]
    num_targets: int
    seconds: float
    pieces: tuple[Piece, ...] = ()
    terms: npt.NDArray[Any] | None = None
    broken: "tuple[BadRow, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Progress of a device in step `step`: `num_done` instructions of its program are done. Before the first, it counts
    down with each image or video that the device decodes: slow storage is no hang.

    `waiting`: its main thread waits for other devices; on accelerators, whose host does not wait for each exchange,
    only between the last backward pass and the update.
    """

    step: int
    num_done: int
    waiting: bool
