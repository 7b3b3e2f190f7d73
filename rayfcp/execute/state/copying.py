"""A device's shard of parameters and optimizer state: copied to host memory, and filled from such copies."""

import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.optimization import owns
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.parallel.sharding import StageModule, local_shard
from rayfcp.execute.state.copies import Buffer, CopyFolder, Into, NewCopy, Wanted, slices_of
from rayfcp.values.state import BUFFER, PARAMETER, Box, ShardEntry, ShardHeader, StateId

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes; entries begin at multiples of it."""

BOUNCE_BYTES = 32 * 2**20
"""Size of each of the two pinned buffers through which accelerators' states reach shared memory. Larger ones hide no
more: a copy of this size takes 0.6 ms over PCIe and 3 ms to memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor:
    """This device's part of a parameter, its optimizer state, or a buffer, by `kind`; `tensor` shares memory."""

    name: str
    kind: str
    parameter: Tensor
    tensor: Tensor

    @property
    def box(self) -> Box:
        return own_box(self.parameter)


def _parts(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[ShardTensor]:
    """Parts of the device, parameter by parameter. Parameters of which it has nothing are skipped, and those that are
    not trained: whoever makes a model fills them (`models.build.sharded_model`)."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (own := local_shard(parameter)).numel():
            yield ShardTensor(name=name, kind=PARAMETER, parameter=parameter, tensor=own)
            for kind, value in optimizer.state.get(parameter, {}).items():
                if _is_shaped(value, parameter):
                    yield ShardTensor(name=name, kind=kind, parameter=parameter, tensor=local_shard(value))
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                full = f"{path}.{name}" if path else name
                yield ShardTensor(name=full, kind=BUFFER, parameter=buffer, tensor=buffer.detach())


def _is_shaped(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


def _scalars(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Scalars of the optimizer's state, which all parameters share; a RuntimeError if they differ."""
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


def own_box(parameter: Tensor) -> Box:
    """Box of this device's part of a parameter."""
    if not isinstance(parameter, DTensor):
        return Box(offsets=(0,) * parameter.ndim, sizes=tuple(parameter.shape))
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(offsets=tuple(offsets), sizes=tuple(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A copy of one device's shard, local or remote. `read(wanted, into)` is `CopyFolder.read` of this copy; it raises
    a CollectiveFailedError if the copy is gone, or cannot be reached."""

    header: ShardHeader
    read: Callable[[Sequence[Wanted], Sequence[Into]], None]


class Copier:
    """Copies a sharded module and its optimizer to a folder in shared memory, between two updates.

    On accelerators a copy is made during the next step, by a thread and on a stream of its own: straight into the file
    once that is page-locked (`DeviceBackend.page_locks`), before and elsewhere through pinned buffers. That stream
    waits for the update before it, and the next update waits for the copy (`hold_update`): the parameters must not
    change under it.

    `copied`: the newest state whose copy is complete. `seconds`: time that steps spent here since the caller last
    reset it.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, position: MeshPosition, copies: CopyFolder | None
    ) -> None:
        self._module, self._optimizer, self._copies = module, optimizer, copies
        self._place = position
        self._laid_out: list[tuple[str, str]] | None = None
        self._entries: tuple[ShardEntry, ...] = ()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._pending: tuple[NewCopy, Future[None]] | None = None
        self._stream: Any = None
        self._bounces: list[Tensor] = []
        self._thread: ThreadPoolExecutor | None = None
        self.copied: StateId | None = None
        self.seconds = 0.0

    @torch.no_grad()
    def take(self, state: StateId) -> None:
        """Copy the device's contents as `state`; done when this returns on CPUs, by `settle` on accelerators. Without
        memory for it there is no copy, which is logged; a RuntimeError without a folder for copies."""
        if self._copies is None:
            raise RuntimeError("this engine was made without a folder for copies of its state")
        self.settle()
        start_s = time.perf_counter()
        parts = list(_parts(self._module, self._optimizer))
        self._lay_out(parts)
        header = ShardHeader(
            state=state,
            number=self._place.device,
            num_devices=self._place.num_devices,
            entries=self._entries,
            num_bytes=self._num_bytes,
            scalars=_scalars(self._optimizer),
        )
        try:
            new = self._copies.begin(header)
        except OSError as error:
            logger.warning("no copy of state %s: %s in %s", state, error.strerror, self._copies.path)
        else:
            try:
                self._copy(parts, new)
            except BaseException:
                new.discard()
                raise
        self.seconds += time.perf_counter() - start_s

    def _lay_out(self, parts: Sequence[ShardTensor]) -> None:
        """Box and offset of each part in the buffer, other names of tied parameters last; computed anew only when the
        optimizer has new state, since shards do not move within a generation."""
        names = [(part.name, part.kind) for part in parts]
        if names == self._laid_out:
            return
        entries, at = [], 0
        for part in parts:
            entry = ShardEntry(
                name=part.name,
                kind=part.kind,
                box=part.box,
                dtype=str(part.tensor.dtype).removeprefix("torch."),
                start_byte=at,
                is_owner=self._owns(part.parameter),
            )
            entries.append(entry)
            at += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
        first = {part.parameter: entry for part, entry in zip(parts, entries, strict=True) if part.kind == PARAMETER}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if parameter in first and first[parameter].name != name:
                entries.append(replace(first[parameter], name=name))
        self._laid_out, self._entries, self._num_bytes = names, tuple(entries), at

    def _owns(self, parameter: Tensor) -> bool:
        """Whether this device is the one of those with the same part that writes it to checkpoints."""
        is_alone = isinstance(parameter, DTensor) or self._place.rank == 0
        # The last stage has a tied matrix under all of its names.
        shared = self._module.shared_matrix if isinstance(self._module, StageModule) else None
        is_left_to_last = parameter is shared and self._place.stage == 0
        return is_alone and not is_left_to_last and owns(parameter, self._place, shared=None)

    def _copy(self, parts: Sequence[ShardTensor], new: NewCopy) -> None:
        flat = torch.from_numpy(new.buffer)
        pairs = [
            (flat[entry.start_byte : entry.start_byte + entry.num_bytes].view(part.tensor.dtype), part.tensor)
            for entry, part in zip(new.header.entries, parts, strict=False)  # without other names of parameters
        ]
        backend = backend_of(parts[0].tensor.device if parts else "cpu")
        streams = backend.streams
        if streams is None:
            if pairs:  # of few adapters a device may hold nothing
                torch._foreach_copy_([view.view(each.shape) for view, each in pairs], [each for _, each in pairs])
            self._publish(new)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
            self._stream = streams.Stream()
            self._bounces = [torch.from_numpy(backend.allocate_host(BOUNCE_BYTES)) for _ in range(2)]
        updated = streams.Event()
        updated.record(streams.current_stream())
        cuts = backend.page_locks.cuts(new.buffer) if backend.page_locks is not None else None
        copy = self._bounce if cuts is None else partial(self._straight, cuts=cuts)
        copied = self._thread.submit(copy, pairs, updated, streams)
        with self._lock:
            self._pending = new, copied
        self._thread.submit(self._settle_later, copied)

    @torch.no_grad()
    def _bounce(self, pairs: Sequence[tuple[Tensor, Tensor]], updated: Any, streams: Any) -> None:
        """Copy through the pinned buffers in turn: one is filled by the device while the host empties the other."""
        filled: deque[tuple[Tensor, Tensor, Any]] = deque()
        turn = itertools.cycle(self._bounces)

        def empty() -> None:
            target, bounce, event = filled.popleft()
            event.synchronize()
            target.copy_(bounce)

        with streams.stream(self._stream):
            self._stream.wait_event(updated)
            for view, tensor in pairs:
                source, most = tensor.detach().reshape(-1), BOUNCE_BYTES // view.element_size()
                for start in range(0, len(view), most):
                    target = view[start : start + most]
                    if len(filled) == len(self._bounces):
                        empty()
                    bounce = next(turn)[: target.nbytes].view(target.dtype)
                    bounce.copy_(source[start : start + most], non_blocking=True)
                    event = streams.Event()
                    event.record(self._stream)
                    filled.append((target, bounce, event))
            while filled:
                empty()

    @torch.no_grad()
    def _straight(
        self, pairs: Sequence[tuple[Tensor, Tensor]], updated: Any, streams: Any, *, cuts: Sequence[int]
    ) -> None:
        """Copy into page-locked memory, no part across any of its `cuts`."""
        with streams.stream(self._stream):
            self._stream.wait_event(updated)
            for view, tensor in pairs:
                source, first = tensor.detach().reshape(-1), view.storage_offset()
                inner = [cut // view.element_size() - first for cut in cuts]
                for start, stop in pairwise([0, *(at for at in inner if 0 < at < len(view)), len(view)]):
                    view[start:stop].copy_(source[start:stop], non_blocking=True)
            copied = streams.Event()
            copied.record(self._stream)
        copied.synchronize()

    def settle(self) -> None:
        """Wait until the last copy is complete. Any thread may call it; a RuntimeError if the accelerator was stopped
        meanwhile, and the copy lost."""
        with self._lock:
            pending = self._pending
        if pending is None:
            return
        new, copied = pending
        copied.exception()  # waits; not with the lock, which the thread takes between two copies
        with self._lock:
            if self._pending is not pending:
                return
            self._pending = None
            try:
                copied.result()
                self._publish(new)
            except BaseException:
                new.discard()
                raise

    def _settle_later(self, copied: Future[None]) -> None:
        """Publish the copy as soon as it is complete; an error is raised by whoever settles next."""
        with self._lock:
            is_pending = self._pending is not None and self._pending[1] is copied
        if is_pending and copied.exception() is None:
            self.settle()

    def _publish(self, new: NewCopy) -> None:
        if new.publish():
            self.copied = new.header.state

    def hold_update(self) -> None:
        """`settle`, and count how long it took; call it before each update."""
        start_s = time.perf_counter()
        self.settle()
        self.seconds += time.perf_counter() - start_s

    def abandon(self) -> None:
        """Wait for the last copy, which may be lost if its accelerator was stopped."""
        try:
            self.settle()
        except RuntimeError:
            logger.warning("the last copy of device %d was lost with its accelerator", self._place.device)


@torch.no_grad()
def load_copies(module: nn.Module, optimizer: torch.optim.Optimizer, *, sources: Sequence[Source]) -> None:
    """Set parameters and optimizer state from copies of one state, made on any number of devices.

    Parts that several copies hold are taken from the first source: pass those of this process first. Optimizer state
    that no copy has is cleared.

    Raises:
        ValueError: the copies are of different states, or do not cover each element exactly once.
        CollectiveFailedError: a copy could not be read; the model's contents are no state then.
    """
    states = {source.header.state for source in sources}
    if len(states) != 1:
        raise ValueError(
            f"copies are of {len(states)} states {sorted(states)}, must be of one; pass copies of one state only"
        )
    held: dict[tuple[str, str], dict[Box, _Holder]] = defaultdict(dict)
    for at, source in enumerate(sources):
        for entry in source.header.entries:
            held[entry.name, entry.kind].setdefault(entry.box, (at, entry.itemsize))
    _allocate_state(module, optimizer, held.keys(), scalars=_common_scalars(sources))
    requests: dict[int, list[tuple[ShardTensor, Box]]] = defaultdict(list)
    for part in _parts(module, optimizer):
        for at, box in _cover(part, held.get((part.name, part.kind), {})):
            requests[at].append((part, box))
    with ThreadPoolExecutor(max_workers=max(1, min(8, len(requests)))) as pool:
        for each in [pool.submit(_take_up, sources[at], parts) for at, parts in requests.items()]:
            each.result()


@torch.no_grad()
def _take_up(source: Source, parts: Sequence[tuple[ShardTensor, Box]]) -> None:
    """Read parts of tensors from a copy."""
    targets = [part.tensor[slices_of(box, within=part.box)] for part, box in parts]
    source.read([(part.name, part.kind, box) for part, box in parts], [_host_memory(target) for target in targets])


def _host_memory(target: Tensor) -> Iterator[Buffer]:
    """Memory of the host for the contents of a tensor: its own where its elements lie in row-major order, else other,
    from where they are copied. Little of that for accelerators' tensors, buffer after buffer."""
    flat = target.reshape(-1) if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype).reshape(-1)
    if backend_of(flat.device).streams is None:
        yield flat.view(torch.uint8).numpy()
    else:
        most = BOUNCE_BYTES // flat.element_size()
        bounce = torch.empty(min(len(flat), most), dtype=flat.dtype)
        for start in range(0, len(flat), most):
            part = flat[start : start + most]
            yield bounce[: len(part)].view(torch.uint8).numpy()
            part.copy_(bounce[: len(part)])
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


_Holder = tuple[int, int]
"""Number of the source that holds a box of a tensor, and the tensor's element size there."""


def _common_scalars(sources: Sequence[Source]) -> dict[str, float]:
    """The optimizer's scalars, of the devices that have any."""
    found = {tuple(sorted(source.header.scalars.items())) for source in sources} - {()}
    if len(found) > 1:
        raise ValueError(
            f"copies of one state have numbers {sorted(found)}, must have the same; they are of several runs"
        )
    return dict(found.pop()) if found else {}


def _allocate_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, held: Iterable[tuple[str, str]], *, scalars: dict[str, float]
) -> None:
    """Give the optimizer memory for the kinds of state in `held`, and set its scalars."""
    optimizer.state.clear()
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parameters = dict(module.named_parameters())
    for name, kind in held:
        parameter = parameters.get(name)
        if kind != PARAMETER and parameter is not None and parameter in trained:
            if parameter not in optimizer.state:
                numbers = {key: torch.tensor(value, dtype=torch.float32) for key, value in scalars.items()}
                optimizer.state[parameter].update(numbers)
            optimizer.state[parameter][kind] = torch.zeros_like(parameter, requires_grad=False)


def _cover(part: ShardTensor, boxes: dict[Box, _Holder]) -> list[tuple[int, Box]]:
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
