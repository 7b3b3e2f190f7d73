"""What a device's shard consists of: its parts of parameters and of the optimizer's state."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rayfcp.values.state import Box, ShardEntry

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
