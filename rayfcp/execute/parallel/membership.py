"""Membership of this process in one generation after another, which another thread can abort at any time."""

import functools
import gc
import logging
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor import debug as tensor_debug

from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups, join_process_groups, leave_process_groups
from rayfcp.execute.reports import CollectiveFailedError, DeviceLostError
from rayfcp.values.devices import DEVICES

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FAILURES = re.compile(
    "|".join(info.failures for info in DEVICES.values())
    + r"|Connection (closed|reset|refused|timed out|was likely closed)|Broken pipe"
    r"|Timed out waiting \d+ ?ms|Socket Timeout|process group .*(aborted|destroyed)",
    re.IGNORECASE,
)
"""Messages of plain RuntimeErrors from the libraries below torch."""

_LOSSES = re.compile("|".join(info.losses for info in DEVICES.values() if info.losses))
"""Messages of RuntimeErrors of broken devices."""


def is_collective_failure(error: BaseException) -> bool:
    """True if an error, or one of its causes, came from an exchange between devices."""
    return any(
        isinstance(each, CollectiveFailedError | dist.DistError | ConnectionError)
        or (type(each) is RuntimeError and _FAILURES.search(str(each)))
        for each in _with_causes(error)
    )


def is_device_loss(error: BaseException) -> bool:
    """True if an error, or one of its causes, says that this process's device is broken."""
    return any(isinstance(each, RuntimeError) and _LOSSES.search(str(each)) for each in _with_causes(error))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def collective(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator for methods of objects with `is_aborted` and `abort`: failed exchanges, and any error after an abort,
    are raised as `CollectiveFailedError`. The object is aborted first, so that its neighbours stop waiting for it.
    Errors of a broken device are raised as `DeviceLostError`, at once: nothing on it can be ended in order."""

    @functools.wraps(method)
    def wrapped(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        engine: Any = args[0]
        try:
            return method(*args, **keywords)
        except Exception as error:
            if is_device_loss(error):
                raise DeviceLostError(f"device is broken: {_first_line(error)}") from error
            if not engine.is_aborted and not is_collective_failure(error):
                raise
            how = "aborted" if engine.is_aborted else "failed"
            engine.abort()
            if isinstance(error, CollectiveFailedError):
                raise
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise CollectiveFailedError(f"exchange between devices {how}; {reason}") from error

    return wrapped


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


_MIN_POLL_S, _MAX_POLL_S = 0.001, 0.05
"""Pauses between two polls of the store, doubled each time."""


class RendezvousClient(dist.Store):
    """A client of the rendezvous store that another thread can abort. `connect` makes the client below it, under the
    prefix of the generation; `timeout_s`: how long to wait for other devices.

    A wait in gloo can be ended from outside only by closing its connections, and only gloo knows which they are. But
    devices exchange their listening addresses through the store: a connection is gloo's if one of its ends has such an
    address.
    """

    def __init__(self, connect: Callable[[], dist.Store], *, timeout_s: float) -> None:
        super().__init__()
        self._timeout = timedelta(seconds=timeout_s)
        self._aborted = threading.Event()
        self._published = b""
        self._store = connect()

    @property
    def is_aborted(self) -> bool:
        return self._aborted.is_set()

    def check_alive(self) -> None:
        """Raise a CollectiveFailedError if `abort` was called."""
        if self.is_aborted:
            raise CollectiveFailedError("exchange between devices aborted, by order")

    def abort(self) -> None:
        """End waits at the store, and all exchanges over gloo between these devices; any thread may call it. Neighbours
        notice at once. A connection that is being made meanwhile is closed by the next call: repeat it until the
        exchanges have ended.

        Only the receiving side is shut down: gloo reads the end of the connection, fails what is posted on it and
        closes it. A send on a connection shut down for writing would be queued and then forgotten: gloo's
        `Pair::signalException` does not notify the buffers in its transmit queue, so their waiters stay until their
        timeout. The same happens to a message that was partly transferred when its peer died; the controller treats a
        device as hung if its call outlives its abort by `elastic.hang_min_s`."""
        self._aborted.set()
        for connection in _connections():
            with connection, suppress(OSError):  # closed by its other end meanwhile
                if any(end in self._published for end in _ends(connection)):
                    connection.shutdown(socket.SHUT_RD)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        stop_s = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _MIN_POLL_S
        while not self.check(keys):
            if time.monotonic() > stop_s:
                raise dist.DistStoreError(f"timed out waiting for {list(keys)}; other devices have not joined")
            self._aborted.wait(pause_s)
            pause_s = min(2.0 * pause_s, _MAX_POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(key)
        self._published += value
        return value

    def set(self, key: str, value: Any) -> None:
        self.check_alive()
        self._published += value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.check_alive()
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        self.check_alive()
        return self._store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def clone(self) -> dist.Store:
        return self

    # By these names torch's C++ parts find them; HCCL's groups delete their keys.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815


def _connections() -> Iterator[socket.socket]:
    """Duplicated handles of all TCP connections of this process."""
    for each in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            handle = os.dup(int(each.name))
            if not stat.S_ISSOCK(os.fstat(handle).st_mode):
                os.close(handle)
                continue
            found = socket.socket(fileno=handle)
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found
            else:
                found.close()


def _ends(connection: socket.socket) -> list[bytes]:
    """Port and address of both ends as in the C `sockaddr` that gloo publishes; empty if not connected."""
    try:
        ends = [connection.getsockname(), connection.getpeername()]
    except OSError:
        return []
    if connection.family == socket.AF_INET:
        return [struct.pack("!H", port) + socket.inet_aton(host) for host, port in ends]
    return [
        struct.pack("!HI", port, flow) + socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        for host, port, flow, _ in ends
    ]


logger = logging.getLogger(__name__)

SHARDING_CACHES = ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache")
"""Functions of `torch.distributed.tensor.debug` that clear caches, since torch 2.10."""


class Membership:
    """Membership of this process's device in at most one generation at a time; `groups` is None outside. The other
    devices are awaited for `start_timeout_s` at the store; an exchange takes at most `collective_timeout_s`."""

    def __init__(
        self, device: torch.device, *, start_timeout_s: float, collective_timeout_s: float, communication_sms: int = 0
    ) -> None:
        self._device, self._communication_sms = device, communication_sms
        self._start_timeout_s, self._collective_timeout_s = start_timeout_s, collective_timeout_s
        self._client: RendezvousClient | None = None
        self._lock = threading.Lock()
        self._caches = _sharding_caches()
        self.groups: ProcessGroups | None = None

    @property
    def is_aborted(self) -> bool:
        return self._client is not None and self._client.is_aborted

    def check_alive(self) -> None:
        """Raise a CollectiveFailedError if the generation was aborted."""
        if self._client is not None:
            self._client.check_alive()

    def join(self, position: MeshPosition, *, store: Callable[[], dist.Store]) -> ProcessGroups:
        """Rendezvous with the other devices at the store and make process groups."""
        client = RendezvousClient(store, timeout_s=self._start_timeout_s)
        self._client = client
        self.groups = join_process_groups(
            position=position,
            store=lambda: client,
            device=self._device,
            timeout_s=self._collective_timeout_s,
            communication_sms=self._communication_sms,
        )
        client.check_alive()
        return self.groups

    def abort(self) -> None:
        """End all exchanges of this generation, current and future; any thread may call it, repeatedly."""
        with self._lock:
            client = self._client
            if client is None:
                return
            first = not client.is_aborted
            client.abort()
            if first and dist.is_initialized():
                backend_of(self._device).abort_collectives(self._device)

    def leave(self) -> None:
        """Leave the generation together with all other devices."""
        if self.groups is not None:
            leave_process_groups(self.groups)
            self.groups = None
        self._client = None

    def forget(self) -> None:
        """Leave a generation that failed or was aborted, without the others. The caller must have dropped what refers
        to its groups, such as sharded modules: freeing the groups closes connections and ends threads."""
        if self._client is None:
            return
        self.abort()
        backend_of(self._device).restart(self._device)
        self.groups = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self._client = None
        self.collect()

    def collect(self) -> None:
        """Free what torch caches of a generation, memory included. Cached shardings would keep its groups alive; and
        meshes of two generations compare equal if their device numbers do, though this process may have another number
        now."""
        for name in SHARDING_CACHES:
            getattr(tensor_debug, name, lambda: None)()
        getattr(_redistribute, "_planner_cache", {}).clear()
        for cache in self._caches:
            cache.cache_clear()
        gc.collect()
        backend_of(self._device).release_cached_memory()


def _sharding_caches() -> list[Any]:
    """Function caches in which torch keeps shardings by mesh; some are reachable through closures only."""
    return [
        each
        for each in gc.get_objects()
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("torch.distributed.tensor")
    ]
