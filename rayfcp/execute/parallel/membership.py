"""Tells failures of exchanges between devices from errors of the program.

The rendezvous store as one device of one generation sees it, and how all its exchanges over gloo are ended.

This process's part in one generation of devices after another, which another thread can end at any time.
"""

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

from rayfcp.execute.parallel.groups import Place, World, join_world, leave_world
from rayfcp.execute.reports import CollectiveFailedError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FAILURES = re.compile(
    r"gloo[/\\]|Gloo connect|NCCL|HCCL|FORCE STOP"
    r"|Connection (closed|reset|refused|timed out|was likely closed)|Broken pipe"
    r"|Timed out waiting \d+ ?ms|Socket Timeout|process group .*(aborted|destroyed)|ERR02\d\d\d",
    re.IGNORECASE,
)
"""What libraries below torch say in plain RuntimeErrors; torch_npu's ERR02 are errors of its distributed module."""


def is_collective_failure(error: BaseException) -> bool:
    """Whether an error, or what caused it, came from an exchange between devices."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CollectiveFailedError | dist.DistError | ConnectionError):
            return True
        if type(seen) is RuntimeError and _FAILURES.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def collective(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """For methods of objects with `is_aborted` and `abort`: failures of exchanges, and whatever goes wrong once they
    were aborted, are raised as `CollectiveFailedError`, and the object is aborted: neighbours need not wait longer."""

    @functools.wraps(method)
    def wrapped(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        engine: Any = args[0]
        try:
            return method(*args, **keywords)
        except Exception as error:
            if not engine.is_aborted and not is_collective_failure(error):
                raise
            how = "aborted" if engine.is_aborted else "failed"
            engine.abort()
            if isinstance(error, CollectiveFailedError):
                raise
            first = (str(error).strip().splitlines() or [""])[0]
            raise CollectiveFailedError(f"exchange between devices {how}; {type(error).__name__}: {first}") from error

    return wrapped


_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Between two looks at the store."""


class Meeting(dist.Store):
    """A client of the store that another thread can abort.

    A wait in gloo can be ended from outside only by closing its connections, and only gloo knows which they are. But
    devices tell each other at the store where they listen: a connection is gloo's if one of its ends was told here.

    Args:
        connect: makes the client, under the prefix of the generation.
        timeout_s: for other devices to come.
    """

    def __init__(self, connect: Callable[[], dist.Store], *, timeout_s: float) -> None:
        super().__init__()
        self._timeout = timedelta(seconds=timeout_s)
        self._aborted = threading.Event()
        self._told = b""
        self._store = connect()

    @property
    def is_aborted(self) -> bool:
        return self._aborted.is_set()

    def check_alive(self) -> None:
        """
        Raises:
            CollectiveFailedError: the meeting was aborted.
        """
        if self.is_aborted:
            raise CollectiveFailedError("exchange between devices aborted, by order")

    def abort(self) -> None:
        """End waits at the store, and all that goes on over gloo between these devices; any thread may call it.
        Neighbours notice at once. A connection that is only just being made is closed by the next call: repeat it until
        what goes on has ended.

        Only the receiving side is shut down: gloo reads the end of the connection, fails what is posted on it and
        closes it. A send that met a connection shut down for writing would be queued and then forgotten: gloo's
        `Pair::signalException` does not tell the buffers in its transmit queue, and their waiters stay until their
        timeout. The same happens to a message of which a part was transferred when its peer died; the controller
        takes a device for hung whose call outlives its abort by `elastic.hang_min_s`."""
        self._aborted.set()
        for connection in _connections():
            with connection, suppress(OSError):  # closed by its other end meanwhile
                if any(end in self._told for end in _ends(connection)):
                    connection.shutdown(socket.SHUT_RD)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        stop_s = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _SHORTEST_PAUSE_S
        while not self.check(keys):
            if time.monotonic() > stop_s:
                raise dist.DistStoreError(f"timed out waiting for {list(keys)}; other devices have not come")
            self._aborted.wait(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(key)
        self._told += value
        return value

    def set(self, key: str, value: Any) -> None:
        self.check_alive()
        self._told += value.encode() if isinstance(value, str) else bytes(value)
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


def _connections() -> Iterator[socket.socket]:
    """Second handles of all TCP connections of this process."""
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
    """Port and address of both ends as they stand in a C `sockaddr`, which gloo tells the others; none if it is not
    connected."""
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


class Membership:
    """At most one generation at a time; `world` is None outside.

    Args:
        device: of this process.
        start_timeout_s: for the others to come to the store.
        collective_timeout_s: for one exchange.
        communication_sms: multiprocessors of a GPU that exchanges may take; 0: as many as they like.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        start_timeout_s: float,
        collective_timeout_s: float,
        communication_sms: int = 0,
    ) -> None:
        self._device, self._communication_sms = device, communication_sms
        self._start_timeout_s, self._collective_timeout_s = start_timeout_s, collective_timeout_s
        self._meeting: Meeting | None = None
        self._lock = threading.Lock()
        self._caches = _caches_of_shapes()
        self.world: World | None = None

    @property
    def is_aborted(self) -> bool:
        return self._meeting is not None and self._meeting.is_aborted

    def check_alive(self) -> None:
        """
        Raises:
            CollectiveFailedError: the generation was aborted.
        """
        if self._meeting is not None:
            self._meeting.check_alive()

    def join(self, place: Place, *, store: Callable[[], dist.Store]) -> World:
        """Meet the others at the store and make groups."""
        meeting = Meeting(store, timeout_s=self._start_timeout_s)
        self._meeting = meeting
        self.world = join_world(
            place=place,
            store=lambda: meeting,
            device=self._device,
            timeout_s=self._collective_timeout_s,
            communication_sms=self._communication_sms,
        )
        meeting.check_alive()
        return self.world

    def abort(self) -> None:
        """End all exchanges of this generation, under way or to come; from any thread, more than once too."""
        with self._lock:
            meeting = self._meeting
            if meeting is None:
                return
            first = not meeting.is_aborted
            meeting.abort()
            if first and self._device.type != "cpu" and dist.is_initialized():
                abort_accelerator(self._device)

    def leave(self) -> None:
        """In order; all devices do."""
        if self.world is not None:
            leave_world(self.world)
            self.world = None
        self._meeting = None

    def forget(self) -> None:
        """Be rid of a generation that failed or was aborted, without the others. What holds its groups, such as
        sharded modules, must be gone: connections are closed by it, and threads ended."""
        if self._meeting is None:
            return
        self.abort()
        if self._device.type == "npu":
            _npu().npu.restart_device(self._device.index or 0)
        self.world = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self._meeting = None
        self.collect()

    def collect(self) -> None:
        """Free what is left of a generation. Sharded tensors that torch remembers would keep its groups; and meshes of
        two generations are equal if their devices' numbers are, though this process may have another number now."""
        tensor_debug._clear_sharding_prop_cache()
        getattr(_redistribute, "_planner_cache", {}).clear()  # some releases have it
        for cache in self._caches:
            cache.cache_clear()
        gc.collect()


def _caches_of_shapes() -> list[Any]:
    """What torch remembers of sharded tensors by their mesh, as caches of functions; some are in closures only."""
    return [
        each
        for each in gc.get_objects()
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("torch.distributed.tensor")
    ]


def abort_accelerator(device: torch.device) -> None:
    """End collectives that the accelerator executes or has queued.

    nccl: torch aborts all communicators. hccl: torch_npu stops the device, after which each operation fails until
    `restart_device` (Ascend Extension for PyTorch, `torch_npu.npu.stop_device`).

    Raises:
        RuntimeError: the device did not stop.
    """
    if device.type == "npu":
        if _npu().npu.stop_device(device.index or 0):
            raise RuntimeError(f"device {device} did not stop; end this process")
        return
    dist.distributed_c10d._abort_process_group()


def _npu() -> Any:
    import torch_npu

    return torch_npu
