"""Copies of a model's sharded state: versions, parts of tensors, and their places in memory."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StateId:
    """State after `version` optimizer steps, sharded over the devices of `generation`; newer states are larger. The
    same version of two generations may differ by rounding, so their shards must not mix."""

    version: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """States whose copies are needed: those in `states`, and all from `since` on; with `since` None all."""

    since: StateId | None = None
    states: frozenset[StateId] = frozenset()

    def __contains__(self, state: StateId) -> bool:
        return self.since is None or state >= self.since or state in self.states


ALL_STATES = KeptStates()


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor: `[offsets[i], offsets[i] + sizes[i])` in each dimension. No dimension: a whole scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    def meet(self, other: "Box") -> "Box | None":
        """Intersection of two boxes; None if it is empty.

        >>> Box(offsets=(0, 0), sizes=(4, 2)).meet(Box(offsets=(3, 0), sizes=(4, 2)))
        Box(offsets=(3, 0), sizes=(1, 2))
        """
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(offsets=starts, sizes=sizes) if all(size > 0 for size in sizes) else None


PARAMETER, BUFFER = "parameter", "buffer"
"""Kinds of entries besides the keys of the optimizer's state."""

ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element, by the dtype's name in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A part of one tensor of the state: `kind` is `PARAMETER`, `BUFFER`, or a key of the optimizer's state. Its
    elements, of `dtype` (see `ITEMSIZES`), lie in row-major order from byte `start_byte` of the shard, those of a tied
    parameter once for all of its names. Of devices that hold the same part, one has `is_owner`."""

    name: str
    kind: str
    box: Box
    dtype: str
    start_byte: int
    is_owner: bool = True

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """Contents of the shard of device `number` of `num_devices`. `scalars`: numbers of the optimizer that are the same
    for all parameters, such as its count of steps. Parts of one tensor on several devices are the same or disjoint."""

    state: StateId
    number: int
    num_devices: int
    entries: tuple[ShardEntry, ...]
    num_bytes: int
    scalars: dict[str, float]
