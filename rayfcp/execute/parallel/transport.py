"""Transports of messages: a torch.distributed group, or threads of one process; pipes between pipeline stages.

Ordering on accelerators: messages have a stream of their own. It waits for the compute stream where a message is
computed in this pass, and the compute stream waits for an event behind the messages before it uses what they brought.
The host never waits, so tensors must be kept alive, and their memory not be reused, until those events.
"""

import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its defaults name the default group of when it is loaded: none yet
from torch import Tensor

from rayfcp.execute.attention.slots import Buffers
from rayfcp.execute.devices.backend import Clock, Mark, backend_of
from rayfcp.execute.reports import StepProgress
from rayfcp.program import Receive, Send, StageFlow
from rayfcp.values.devices import device_of_group_backend

Envelope = tuple[int, Tensor]
"""(peer rank, contiguous tensor)."""


class Pending(Protocol):
    """Posted messages."""

    def wait(self) -> None:
        """Return once all are sent and received, or, on accelerators, once the compute stream waits for them."""
        ...

    def done(self) -> bool:
        """True if `wait` is known to return at once; gloo knows it only afterwards."""
        ...


class Transport(Protocol):
    """Posts the messages of one round together. Between two ranks messages match in the order posted."""

    rank: int

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        """Start all; tensors must stay alive and untouched until `wait` returned."""
        ...

    def message_stream(self, *, after_compute: bool) -> AbstractContextManager[None]:  # noqa: ARG002  hosts have no queues
        """Context in which an accelerator packs and posts on the message stream, concurrently with computation: behind
        all that the compute stream holds if `after_compute`, else behind earlier messages only."""
        return nullcontext()


class _Works:
    def __init__(self, works: list[dist.Work], progress: StepProgress) -> None:
        self._works, self._progress = works, progress

    def wait(self) -> None:
        with self._progress.waiting():
            for work in self._works:
                work.wait()

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _Enqueued:
    """Messages on a device's stream: computations enqueued after `wait` come behind them; the host does not wait."""

    def __init__(self, works: list[dist.Work], event: Any) -> None:
        self._works, self._event = works, event
        for work in works:
            work.wait()  # orders the current (message) stream behind the library's own
        event.record()

    def wait(self) -> None:
        self._event.wait()

    def done(self) -> bool:
        done: bool = self._event.query()
        return done


class DistributedTransport(Transport):
    """Batched point-to-point messages on one warmed group that holds all ranks (gloo, nccl, hccl).

    Rank r of the programs is rank r of the group; `progress` records waits.

    The group is held weakly, so that it is freed when its owner destroys it, even if a transport is left: threads of a
    gloo group that is alive when Python exits may abort the process.
    """

    def __init__(self, group: dist.ProcessGroup, progress: StepProgress | None = None) -> None:
        self._group, self._progress = weakref.ref(group), progress or StepProgress()
        self.rank = dist.get_rank(group)
        device = device_of_group_backend(dist.get_backend(group))
        self._streams, self._single = backend_of(device.name).streams, device.single_message_per_peer
        self._stream = None if self._streams is None else self._streams.Stream()

    @contextmanager
    def message_stream(self, *, after_compute: bool) -> Iterator[None]:
        """See `Transport`."""
        if self._streams is None or self._stream is None:
            yield
            return
        if after_compute:
            self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            yield

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        group = self._group()
        if group is None:
            raise ValueError(
                f"transport of rank {self.rank}: its process group is destroyed; make a new transport of a live group"
            )
        if self._streams is None:
            return _Works(self._posted(group, sends, receives), self._progress)
        with self.message_stream(after_compute=self._streams.current_stream() != self._stream):
            return _Enqueued(self._posted(group, sends, receives), self._streams.Event())

    def _posted(self, group: dist.ProcessGroup, sends: list[Envelope], receives: list[Envelope], /) -> list[dist.Work]:
        batches = [(sends, receives)]
        if self._single:  # both ends of a channel split alike
            batches = list(zip_longest(_by_turns(sends), _by_turns(receives), fillvalue=[]))
        works: list[dist.Work] = []
        for batch in batches:
            operations = [
                dist.P2POp(kind, tensor, group=group, group_peer=peer)
                for kind, envelopes in zip((dist.isend, dist.irecv), batch, strict=True)
                for peer, tensor in envelopes
            ]
            works += dist.batch_isend_irecv(operations) if operations else []
        return works


def _by_turns(envelopes: list[Envelope]) -> list[list[Envelope]]:
    """The first message of each peer, then the second of each, and so on."""
    turns: list[list[Envelope]] = []
    number: Counter[int] = Counter()
    for peer, tensor in envelopes:
        if number[peer] == len(turns):
            turns.append([])
        turns[number[peer]].append((peer, tensor))
        number[peer] += 1
    return turns


def default_transport() -> DistributedTransport:
    """The transport on the default process group; the same one until the group is destroyed."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError("transport is absent, and there is no process group; call init_process_group, or give one")
    if group not in _TRANSPORTS:
        _TRANSPORTS[group] = DistributedTransport(group)
    return _TRANSPORTS[group]


_TRANSPORTS: weakref.WeakKeyDictionary[dist.ProcessGroup, DistributedTransport] = weakref.WeakKeyDictionary()


class LoneTransport(Transport):
    """Transport of the only rank, which has no messages."""

    rank = 0

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        assert not sends and not receives
        return _Works([], StepProgress())


class FabricAbortedError(RuntimeError):
    """Another rank of the fabric failed."""


class Fabric:
    """Mailboxes between ranks that are threads of one process."""

    _POLL_S = 0.05

    def __init__(self, num_ranks: int) -> None:
        ranks = range(num_ranks)
        self._boxes = {(source, target): queue.SimpleQueue[Tensor]() for source in ranks for target in ranks}
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Wake all waiting ranks."""
        self._aborted.set()

    def put(self, source: int, target: int, *, tensor: Tensor) -> None:
        self._boxes[source, target].put(tensor)

    def take(self, source: int, target: int) -> Tensor:
        """The next tensor from source to target; a FabricAbortedError if another rank failed meanwhile."""
        while not self._aborted.is_set():
            with suppress(queue.Empty):
                return self._boxes[source, target].get(timeout=self._POLL_S)
        raise FabricAbortedError(f"rank {target} waited for rank {source} when another rank failed")


@dataclass(slots=True)
class AttentionStats:
    """Attention of one global batch: bytes sent to other ranks, (query, key) pairs computed (both
    directions, all layers, in pairs of all heads), waits for messages. `buffers`: memory of messages.
    `recurrent_layers`: numbers of those that called recurrence or convolution."""

    bytes_sent: int = 0
    pairs: float = 0.0
    recurrent_layers: set[int] = field(default_factory=set)
    buffers: Buffers = field(default_factory=Buffers)
    clock: Clock = field(default_factory=lambda: Clock(time.perf_counter))
    _waits: list[tuple[Mark, Mark]] = field(default_factory=list)

    def post(self, sends: list[Envelope], receives: list[Envelope], *, transport: Transport) -> Pending:
        """Post messages, and count the bytes sent."""
        self.bytes_sent += sum(tensor.nbytes for _, tensor in sends)
        return transport.post(sends, receives)

    def wait(self, pending: Pending) -> None:
        """Wait for messages, or make the device wait, and record how long."""
        start = self.clock.mark()
        pending.wait()
        self._waits.append((start, self.clock.mark()))

    @property
    def wait_s(self) -> float:
        """Seconds without computation because of messages; read it when the device is done."""
        return sum(self.clock.between(start, stop) for start, stop in self._waits)


class Pipes:
    """One stage's ends of the channels of `activations`, from each stage to the next, and of their `gradients`, back;
    peers are stage numbers. Both have `hidden_size` and `dtype`.

    Sent tensors are kept until they are known to have left: when the channel says so, when the gradient of a sent
    activation arrives, or at the latest in `finish`.
    """

    def __init__(
        self,
        *,
        activations: Transport,
        gradients: Transport,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._channels = {StageFlow.ACTIVATION: activations, StageFlow.GRADIENT: gradients}
        self._hidden_size, self.dtype, self._device = hidden_size, dtype, device
        self._leaving: dict[tuple[StageFlow, int], tuple[Pending, Tensor]] = {}

    @property
    def stage(self) -> int:
        return self._channels[StageFlow.ACTIVATION].rank

    def send(self, item: Send, tensor: Tensor) -> None:
        """Post `tensor`, `[tokens, hidden]`, without waiting."""
        due = (item.num_tokens, self._hidden_size)
        if tensor.shape != due or tensor.dtype is not self.dtype:
            raise ValueError(
                f"{item.flow.value} of microbatch {item.microbatch} is {tuple(tensor.shape)} in {tensor.dtype}, must "
                f"be {due} in {self.dtype}; lower the program and build the model from one configuration"
            )
        self._leaving = {at: held for at, held in self._leaving.items() if not held[0].done()}
        tensor = tensor.contiguous()
        pending = self._channels[item.flow].post([(item.stage, tensor)], [])
        self._leaving[item.flow, item.microbatch] = (pending, tensor)

    def receive(self, item: Receive, *, stats: AttentionStats) -> Tensor:
        """Wait for `[tokens, hidden]`."""
        tensor = torch.empty((item.num_tokens, self._hidden_size), dtype=self.dtype, device=self._device)
        stats.wait(self._channels[item.flow].post([], [(item.stage, tensor)]))
        if item.flow is StageFlow.GRADIENT and (StageFlow.ACTIVATION, item.microbatch) in self._leaving:
            left = self._leaving.pop((StageFlow.ACTIVATION, item.microbatch))
            left[0].wait()  # while `left` has the tensor: freed before, its memory could be reused at once
        return tensor

    def finish(self) -> None:
        """Wait until all messages have left."""
        for pending, _ in self._leaving.values():
            pending.wait()
        self._leaving.clear()
