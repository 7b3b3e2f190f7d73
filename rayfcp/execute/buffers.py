"""Memory of messages, used again and again within a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class _Buffer:
    """Raw bytes; `used`: an event behind the last computation that used them, on an accelerator."""

    memory: Tensor
    used: Any = None


class Buffers:
    """A pool. Sizes are rounded up to eighths of powers of two, so that messages of about one size serve each other.

    On an accelerator, where memory is used by a queue of computations and by one of messages, a buffer waits on the
    device for whoever used it last; hosts never wait.
    """

    def __init__(self) -> None:
        self._free: list[_Buffer] = []
        self._taken: dict[int, _Buffer] = {}

    def take(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Contiguous memory of any content, for what is enqueued from here on."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device=device)
        buffer = self._find(num_bytes, device)
        if buffer is None:
            buffer = _Buffer(memory=torch.empty(rounded(num_bytes), dtype=torch.uint8, device=device))
        if buffer.used is not None:
            buffer.used.wait()
            buffer.used = None
        self._taken[buffer.memory.data_ptr()] = buffer
        return buffer.memory[:num_bytes].view(dtype).view(*shape)

    def give(self, tensor: Tensor, *, computed: bool) -> None:
        """The holder needs it no more, what is enqueued so far apart; memory from elsewhere is left alone.

        `computed`: computations used it, and not only messages, which the pool's user has waited for.
        """
        buffer = self._taken.pop(tensor.untyped_storage().data_ptr(), None)
        if buffer is None:
            return
        if computed and tensor.device.type != "cpu":
            buffer.used = getattr(torch, tensor.device.type).Event()
            buffer.used.record()
        self._free.append(buffer)

    def clear(self) -> None:
        """Let all memory go, once the device is done with what is enqueued so far."""
        for buffer in (*self._free, *self._taken.values()):
            if buffer.memory.device.type != "cpu":
                buffer.memory.record_stream(getattr(torch, buffer.memory.device.type).current_stream())
        self._free.clear()
        self._taken.clear()

    def _find(self, num_bytes: int, device: torch.device) -> _Buffer | None:
        """The one that has been free for longest of those that fit."""
        for at, buffer in enumerate(self._free):
            if num_bytes <= len(buffer.memory) <= 2 * num_bytes and buffer.memory.device == device:
                return self._free.pop(at)
        return None


def rounded(num_bytes: int) -> int:
    """Up to the next eighth of a power of two, at least 512.

    >>> rounded(1), rounded(5000), rounded(100_000)
    (512, 5120, 106496)
    """
    step = max(1 << max((num_bytes - 1).bit_length() - 4, 0), 512)
    return -(-num_bytes // step) * step
