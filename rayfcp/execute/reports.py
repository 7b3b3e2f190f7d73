"""What a device tells the controller. Plain values: reading them needs no torch."""

import math
from dataclasses import dataclass

from rayfcp.execute.integrity import FileSum
from rayfcp.values import Span, StateId


class CollectiveFailedError(RuntimeError):
    """An exchange between devices failed or was aborted: another device or the network is to blame, not the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What device `number` knows once it is part of a generation."""

    number: int
    process_groups: int
    process_group_s: float
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """How a device's write of its part of a checkpoint into `folder` ended, after `seconds`: `files` are on disk, or
    `error` says in one line why not. A failure of one device is one of all."""

    folder: str
    seconds: float
    files: tuple[FileSum, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one device, number `number`, did in one step. `loss` and `grad_norm` are global, the same on every one; if
    one of them is not finite nothing was updated.

    `step_s` runs from the call to the end of the update; `wait_s` of it was waiting for other devices: for messages
    of attention and of other stages (`message_s`), gathers and reductions; NaN on accelerators, whose host does not
    wait, but `message_s`, which is measured in their queues. `gather_s[m]`: seconds of gathers and reductions in
    microbatch m, likewise NaN on accelerators.
    `saved`: a checkpoint write that ended since the last report, None if none did. `snapshot_s`: seconds that the step
    waited for copies of the state, within `step_s`. `kept`: the newest state of which a keeper has this device's copy,
    None if none; `push_s`, `push_bytes`: what the last copy took to get there. `keeper_lost`: it takes no more.
    `broken`: pictures that this device was to encode and nobody could decode, with the reasons.
    """

    number: int
    stage: int
    rank: int
    tensor_rank: int
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    wait_s: float
    bytes_sent: int
    num_cells: float
    memory_bytes: dict[str, int]
    gather_s: tuple[float, ...]
    spans: tuple[Span, ...]
    saved: SavedPart | None
    message_s: float = math.nan
    snapshot_s: float = 0.0
    kept: StateId | None = None
    push_s: float = 0.0
    push_bytes: int = 0
    keeper_lost: bool = False
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """How far device `number` is in step `step` right now: `num_done` instructions of its program are done.

    `waiting`: its main thread waits for other devices; on accelerators, whose host does not wait for each exchange,
    only between the last backward pass and the update.
    """

    number: int
    step: int
    num_done: int
    waiting: bool
    memory_bytes: dict[str, int]
