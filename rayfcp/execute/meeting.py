"""The rendezvous store as one device of one generation sees it, and how all its exchanges over gloo are ended."""

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rayfcp.execute.reports import CollectiveFailedError

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
