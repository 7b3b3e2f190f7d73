"""What a stage does, as operations that all of its ranks run, and where things are in them."""

from collections.abc import Mapping
from dataclasses import dataclass

from rayfcp.program import Flow

SHOWN_LAYERS = 6

RowKey = tuple[int, str]
"""(position of the instruction, kind of layers): names a row of equal layers."""

Operation = tuple[int, int, float, float, int]
"""kind, arg, base_s, per_token_s, recorded, as in `Script`."""

HopKey = tuple[Flow, int, int]
"""(flow, microbatch, stage that sends)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Equal layers one after the other, of `total` the first few in the script. Layer i ends at `marks[i]`; `gathers`:
    the collectives that gather them, without those of layers that are still gathered."""

    key: RowKey
    total: int
    marks: tuple[int, ...]
    gathers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Marks of one instruction: start; end of the wait for its first parameters; end of computation; end. Where a
    backward pass goes on through the vision encoder, `encoder` are start and end of that, before the end."""

    start: int
    ready: int
    computed: int
    stop: int
    encoder: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A stage's script and where things are in it. `recorded[p]` is the mark after the recorded layer, of pass p
    (`Machine.number`). Collectives are numbered from `first_collective`."""

    operations: tuple[Operation, ...]
    rows: tuple[Row, ...]
    first_collective: int
    collective_bytes: tuple[float, ...]
    instants: tuple[Instants, ...]
    recorded: Mapping[int, int]
    num_marks: int
