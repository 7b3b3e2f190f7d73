"""One round of messages of a recurrent layer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.recurrence.schedule import Shape


class Outgoing(NamedTuple):
    """A message of `shape` to rank `peer`, which `pack` writes."""

    peer: int
    shape: Shape
    pack: Callable[[Tensor], object]


class Incoming(NamedTuple):
    """A message of `shape` from rank `peer`."""

    peer: int
    shape: Shape


def exchange(
    sends: Sequence[Outgoing],
    receives: Sequence[Incoming],
    *,
    like: Tensor,
    context: AttentionContext,
) -> list[Tensor]:
    """Contents of `receives`, all in the dtype and on the device of `like`. They are packed and posted on the message
    stream, and copied out of message memory, which is reused, behind it."""
    if not sends and not receives:
        return []
    stats = context.stats
    take = partial(stats.buffers.take, dtype=like.dtype, device=like.device)
    with context.transport.message_stream(after_compute=True):
        leaving = [(peer, take(shape)) for peer, shape, _ in sends]
        for message, (_, packed) in zip(sends, leaving, strict=True):
            message.pack(packed)
        arriving = [(peer, take(shape)) for peer, shape in receives]
        pending = stats.post(leaving, arriving, transport=context.transport)
    stats.wait(pending)
    found = [packed.clone() for _, packed in arriving]
    for _, packed in arriving:
        stats.buffers.give(packed, computed=True)
    for _, packed in leaving:
        stats.buffers.give(packed, computed=False)
    return found
