"""A device's shard of parameters and optimizer state: copied to host memory, and filled from such copies."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfcp.execute.copies import HeldCopies, Wanted, reading
from rayfcp.execute.groups import Place
from rayfcp.execute.shards import PARAMETER, Part, entries_of, own_box, parts_of, scalars_of, wanted_parts
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A copy of one device's shard, wherever it is. `pieces` is `HeldCopies.pieces` of this copy."""

    header: ShardHeader
    pieces: Callable[[Sequence[Wanted]], Sequence[np.ndarray[Any, Any]]]


class Snapshots:
    """Takes copies of a sharded module and its optimizer, from between two updates.

    On accelerators a copy is made on a stream of its own, while the next step computes; `settle` ends it.

    Args:
        place: of this device.
        copies: where copies go.
    """

    seconds: float
    """That steps have spent here, until somebody sets it back."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        place: Place,
        copies: HeldCopies,
    ) -> None:
        self._module, self._optimizer, self._copies = module, optimizer, copies
        self._place = place
        self._boxes: dict[Tensor, Box] = {}
        self._laid_out: tuple[tuple[ShardEntry, ...], int] = ((), 0)
        self._lock = threading.Lock()
        self._under_way: tuple[ShardHeader, np.ndarray[Any, Any], Any] | None = None
        self._stream: Any = None
        self.seconds = 0.0

    @torch.no_grad()
    def take(self, state: StateId) -> ShardHeader:
        """Copy what the device holds now, as `state`; on CPUs it is done when this returns, otherwise by `settle`.

        Raises:
            RuntimeError: numbers of the optimizer differ between parameters.
        """
        self.settle()
        start_s = time.perf_counter()
        parts = list(parts_of(self._module, self._optimizer, box_of=self._box))
        entries, num_bytes = self._lay_out(parts)
        header = ShardHeader(
            state=state,
            number=self._place.device,
            num_devices=self._place.num_devices,
            entries=entries,
            num_bytes=num_bytes,
            scalars=scalars_of(self._optimizer),
        )
        self._copy(parts, header=header, buffer=self._copies.spare(num_bytes))
        self.seconds += time.perf_counter() - start_s
        return header

    def _box(self, parameter: Tensor) -> Box:
        """Worked out once: parameters stay where they are as long as there is this generation."""
        if parameter not in self._boxes:
            self._boxes[parameter] = own_box(parameter)
        return self._boxes[parameter]

    def _lay_out(self, parts: Sequence[Part]) -> tuple[tuple[ShardEntry, ...], int]:
        """`entries_of`, again only when the optimizer has got more to hold."""
        entries, _ = self._laid_out
        if [(part.name, part.kind) for part in parts] != [(entry.name, entry.kind) for entry in entries]:
            self._laid_out = entries_of(parts)
        return self._laid_out

    def _copy(self, parts: Sequence[Part], *, header: ShardHeader, buffer: np.ndarray[Any, Any]) -> None:
        flat = torch.from_numpy(buffer)
        pairs = [
            (flat[entry.start_byte : entry.start_byte + entry.num_bytes].view(part.tensor.dtype), part.tensor)
            for entry, part in zip(header.entries, parts, strict=True)
        ]
        kinds = {part.tensor.device.type for part in parts} - {"cpu"}
        if not kinds:
            torch._foreach_copy_([view.view(tensor.shape) for view, tensor in pairs], [tensor for _, tensor in pairs])
            self._copies.put(header, buffer)
            return
        accelerator = getattr(torch, kinds.pop())
        self._stream = self._stream or accelerator.Stream()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            for view, tensor in pairs:
                view.view(tensor.shape).copy_(tensor, non_blocking=True)
            event = accelerator.Event()
            event.record(self._stream)
        with self._lock:
            self._under_way = (header, buffer, event)

    def settle(self) -> None:
        """Return when the last copy is in host memory, and seen in `copies`. Any thread may call it."""
        with self._lock:
            if self._under_way is not None:
                header, buffer, event = self._under_way
                event.synchronize()
                self._copies.put(header, buffer)
                self._under_way = None

    def hold_update(self) -> None:
        """`settle`, and count how long it took; to be called before anything is updated."""
        start_s = time.perf_counter()
        self.settle()
        self.seconds += time.perf_counter() - start_s

    def abandon(self) -> None:
        """Wait for the last copy, which an accelerator that was stopped may have lost."""
        try:
            self.settle()
        except RuntimeError:
            logger.warning("the last copy of device %d was lost with its accelerator", self._place.device)


@torch.no_grad()
def fill(module: nn.Module, optimizer: torch.optim.Optimizer, *, sources: Sequence[Source]) -> None:
    """Set parameters and optimizer state from copies of one state, made on any number of devices.

    Of parts that several copies hold, the first source's is taken: give those of this process first. State of the
    optimizer that no copy has is cleared.

    Raises:
        ValueError: the copies are of different states, or together do not hold each element wanted exactly once.
        CollectiveFailedError: a copy is gone from where it was; what the model holds now is no state.
    """
    states = {source.header.state for source in sources}
    if len(states) != 1:
        raise ValueError(f"copies are of {len(states)} states {sorted(states)}, must be of one; ask for one state only")
    held = _holders(sources)
    parts = list(wanted_parts(module, optimizer, kinds=_kinds(held), scalars=_common_scalars(sources)))
    orders: dict[int, list[tuple[Part, Box]]] = defaultdict(list)
    for part in parts:
        for at, box in _cover(part, held.get((part.name, part.kind), {})):
            orders[at].append((part, box))
    with ThreadPoolExecutor(max_workers=max(1, min(8, len(orders)))) as pool:
        asked = {
            at: pool.submit(sources[at].pieces, [(part.name, part.kind, box) for part, box in wanted])
            for at, wanted in orders.items()
        }
        for at, wanted in orders.items():
            with reading(sources[at].header):
                pieces = asked[at].result()
            for (part, box), piece in zip(wanted, pieces, strict=True):
                _put(part, box, piece=piece)


def _common_scalars(sources: Sequence[Source]) -> dict[str, float]:
    """Of devices that have any."""
    found = {tuple(sorted(source.header.scalars.items())) for source in sources} - {()}
    if len(found) > 1:
        raise ValueError(
            f"copies of one state have numbers {sorted(found)}, must have the same; they are of several runs"
        )
    return dict(found.pop()) if found else {}


Holders = dict[tuple[str, str], dict[Box, tuple[int, int]]]
"""(name, kind) -> each part's index of its source and size of elements."""


def _holders(sources: Sequence[Source]) -> Holders:
    held: Holders = defaultdict(dict)
    for at, source in enumerate(sources):
        for entry in source.header.entries:
            held[entry.name, entry.kind].setdefault(entry.box, (at, entry.itemsize))
    return held


def _kinds(held: Holders) -> dict[str, list[str]]:
    """Kinds of optimizer state of each parameter."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, kind in held:
        if kind != PARAMETER:
            kinds[name].append(kind)
    return kinds


def _cover(part: Part, boxes: dict[Box, tuple[int, int]]) -> list[tuple[int, Box]]:
    found: list[tuple[int, Box]] = []
    itemsizes = set()
    for box, (at, itemsize) in boxes.items():
        common = box.meet(part.box) if len(box.sizes) == len(part.box.sizes) else None
        if common is not None:
            found.append((at, common))
            itemsizes.add(itemsize)
    count = sum(box.num_elements for _, box in found)
    label = f"{part.kind} of {part.name} at {part.box}"
    if itemsizes - {part.tensor.element_size()}:
        raise ValueError(
            f"{label} has elements of {part.tensor.element_size()} bytes, copies have {sorted(itemsizes)}; "
            "build the model from the run's own configuration"
        )
    if count != part.box.num_elements or any(
        box.meet(other) for i, (_, box) in enumerate(found) for _, other in found[:i]
    ):
        raise ValueError(
            f"{label} has {part.box.num_elements} elements, copies give {count}; give those of all devices"
        )
    return found


@torch.no_grad()
def _put(part: Part, box: Box, *, piece: np.ndarray[Any, Any]) -> None:
    ends = zip(box.offsets, part.box.offsets, box.sizes, strict=True)
    target = part.tensor[tuple(slice(at - start, at - start + size) for at, start, size in ends)]
    flat = torch.from_numpy(np.require(piece.reshape(-1), requirements="W").view(np.uint8))
    target.copy_(flat.view(part.tensor.dtype).view(target.shape))
