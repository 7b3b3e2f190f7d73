"""What a device's shard consists of: its parts of parameters and of the optimizer's state.

A device's shard of parameters and optimizer state: copied to host memory, and filled from such copies.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rayfcp.execute.parallel.groups import Place
from rayfcp.execute.state.copies import HeldCopies, Wanted, reading
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId

PARAMETER = "parameter"
ALIGNMENT = 64
"""Bytes; entries begin at multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of this device, its own memory."""

    name: str
    kind: str
    box: Box
    tensor: Tensor


def wanted_parts(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, kinds: dict[str, list[str]], scalars: dict[str, float]
) -> Iterator[Part]:
    """All parts that the device is to hold, with memory for them."""
    optimizer.state.clear()
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        if parameter in trained and name in kinds:
            numbers = {key: torch.tensor(value, dtype=torch.float32) for key, value in scalars.items()}
            moments = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in kinds[name]}
            optimizer.state[parameter] = numbers | moments
    yield from parts_of(module, optimizer, box_of=own_box)


def parts_of(module: nn.Module, optimizer: torch.optim.Optimizer, *, box_of: Callable[[Tensor], Box]) -> Iterator[Part]:
    """Tensors of the device, by parameter; those of which it has nothing are left out."""
    for name, parameter in module.named_parameters():
        box = box_of(parameter)
        if box.num_elements:
            yield Part(name=name, kind=PARAMETER, box=box, tensor=_local(parameter))
            for kind, value in optimizer.state.get(parameter, {}).items():
                if _is_shaped(value, parameter):
                    yield Part(name=name, kind=kind, box=box, tensor=_local(value))


def _is_shaped(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


def scalars_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Numbers of the optimizer's state; all parameters have the same."""
    found: dict[str, set[float]] = defaultdict(set)
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            if not _is_shaped(value, parameter):
                found[kind].add(float(value))
    for kind, values in found.items():
        if len(values) > 1:
            raise RuntimeError(
                f"{kind} of the optimizer is {sorted(values)}; all parameters must have been updated alike"
            )
    return {kind: values.pop() for kind, values in found.items()}


def entries_of(parts: Iterable[Part]) -> tuple[tuple[ShardEntry, ...], int]:
    """Where each part lies in the buffer, and the buffer's bytes."""
    entries, at = [], 0
    for part in parts:
        itemsize = part.tensor.element_size()
        entries.append(ShardEntry(name=part.name, kind=part.kind, box=part.box, itemsize=itemsize, start_byte=at))
        at += -(-entries[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(entries), at


def own_box(parameter: Tensor) -> Box:
    """This device's part of a parameter."""
    if not isinstance(parameter, DTensor):
        return Box(offsets=(0,) * parameter.ndim, sizes=tuple(parameter.shape))
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(offsets=tuple(offsets), sizes=tuple(sizes))


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


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
