"""Copies of shards from the shared memory of one node to that of another, by plain sockets.

Not as objects of Ray, which take several times the CPU time (`jobs/bench/transfer.py`). A transport by RDMA would take
the place of `Listener` and `send_copies`.

Both ends prove that they know the receiving store's token, which Ray hands out, before anything is sent. Then for each
copy: its head as it is in memory, the receiver's answer, the data, their checksum, the receiver's answer.
"""

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from rayfcp.execute.state.copies import PAGE, CopyFolder, CopyGoneError, label, read_header
from rayfcp.values import ShardHeader, StateId

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
"""Sent, summed and paced at once: small enough to stay in a cache between the two."""

HANDSHAKE_S = 5.0
"""Time for a connection to prove that it knows the token."""

MAX_CONNECTIONS = 32
"""Connections at once, strangers' included; more are closed."""

MAX_HEAD_BYTES = 64 * 2**20
NONCE_BYTES = 32
_LENGTH = struct.Struct(">Q")


class Answer(bytes, Enum):
    """The receiver's answers."""

    SEND = b"s"
    HELD = b"h"
    KEPT = b"k"
    DAMAGED = b"d"
    FULL = b"f"


class TransferError(RuntimeError):
    """Copies could not be sent; one line."""


class CopyRemovedError(TransferError):
    """A copy is gone from the sender's memory."""


class NoRoomError(TransferError):
    """The receiver's memory is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a store receives copies."""

    host: str
    port: int
    token: bytes = field(repr=False)


class Listener:
    """Receives copies into a folder until `close`, on one address only.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(self, copies: CopyFolder, *, host: str, patience_s: float) -> None:
        self._copies, self._patience_s = copies, patience_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self.peer = Peer(host=host, port=self._socket.getsockname()[1], token=secrets.token_bytes(NONCE_BYTES))
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._is_closed = False
        threading.Thread(target=self._accept, name="copies listener", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._socket.accept()
            except OSError as error:  # such as too many open files; by close too
                if not self._is_closed:
                    logger.warning("accepting a connection for copies: %s", error)
                    time.sleep(0.1)
                continue
            if not self._free.acquire(blocking=False):
                logger.warning("refused %s: %d connections for copies are open", address[0], MAX_CONNECTIONS)
                connection.close()
                continue
            threading.Thread(target=self._serve, args=[connection, address[0]], daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            with connection:
                if not self._is_known(connection):
                    logger.warning("refused %s, which does not know this store's token", address)
                    return
                connection.settimeout(self._patience_s)
                while (head := _receive_head(connection)) is not None:
                    connection.sendall(self._keep(connection, head))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("copies from %s broke off: %s", address, error)
        finally:
            self._free.release()

    def _is_known(self, connection: socket.socket) -> bool:
        """Whether the other end knows the token; proves to it that this end does."""
        connection.settimeout(HANDSHAKE_S)
        mine = secrets.token_bytes(NONCE_BYTES)
        try:
            connection.sendall(mine)
            theirs, proof = _receive(connection, NONCE_BYTES), _receive(connection, NONCE_BYTES)
            if not hmac.compare_digest(proof, _proof(self.peer.token, b"sender", mine + theirs)):
                return False
            connection.sendall(_proof(self.peer.token, b"receiver", mine + theirs))
        except OSError:
            return False
        return True

    def _keep(self, connection: socket.socket, header: ShardHeader) -> bytes:
        if self._copies.has(header.state, header.number):
            return Answer.HELD.value
        try:
            new = self._copies.begin(header)
        except OSError as error:
            logger.warning("no room for the %s in %s: %s", label(header), self._copies.path, error.strerror)
            return Answer.FULL.value
        try:
            connection.sendall(Answer.SEND.value)
            found, view = xxhash.xxh3_64(), new.buffer.data
            for start in range(0, len(view), CHUNK_BYTES):
                part = view[start : start + CHUNK_BYTES]
                _receive_into(connection, part)
                found.update(part)
            if found.digest() != _receive(connection, 8):
                return Answer.DAMAGED.value
            return Answer.KEPT.value if new.publish() else Answer.FULL.value
        finally:
            new.discard()


def send_copies(
    copies: CopyFolder,
    state: StateId,
    *,
    numbers: Iterable[int],
    to: Peer,
    patience_s: float,
    bytes_per_s: float | None = None,
) -> int:
    """Send the copies of these devices in a state, at most so many bytes a second; return the bytes sent.

    Raises:
        TransferError: the receiver cannot be reached, is another, or did not keep a copy; a copy is gone here.
    """
    try:
        with socket.create_connection((to.host, to.port), timeout=HANDSHAKE_S) as connection:
            theirs, mine = _receive(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            connection.sendall(mine + _proof(to.token, b"sender", theirs + mine))
            proof = _receive(connection, NONCE_BYTES)
            if not hmac.compare_digest(proof, _proof(to.token, b"receiver", theirs + mine)):
                raise TransferError(f"{to.host}:{to.port} is not the store that was meant")
            connection.settimeout(patience_s)
            return sum(_send(connection, copies, state, number, bytes_per_s=bytes_per_s) for number in numbers)
    except CopyGoneError as error:
        raise CopyRemovedError(str(error)) from error
    except OSError as error:
        raise TransferError(f"sending copies to {to.host}:{to.port} failed: {error}") from error


def _send(
    connection: socket.socket, copies: CopyFolder, state: StateId, number: int, *, bytes_per_s: float | None
) -> int:
    with copies.reading(state, number) as copy:
        _send_head(connection, copy.head)
        answer = _receive(connection, 1)
        if answer == Answer.HELD.value:
            return 0
        if answer == Answer.SEND.value:
            found, view, began_s = xxhash.xxh3_64(), copy.buffer.data, time.monotonic()
            for start in range(0, len(view), CHUNK_BYTES):
                part = view[start : start + CHUNK_BYTES]
                found.update(part)
                connection.sendall(part)
                if bytes_per_s:
                    time.sleep(max(0.0, began_s + (start + len(part)) / bytes_per_s - time.monotonic()))
            connection.sendall(found.digest())
            answer = _receive(connection, 1)
        if answer == Answer.FULL.value:
            raise NoRoomError(f"the {label(copy.header)} found no room")
        if answer != Answer.KEPT.value:
            raise TransferError(f"the {label(copy.header)} arrived damaged")
        return len(copy.buffer)


def _send_head(connection: socket.socket, head: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(head)) + head)


def _receive_head(connection: socket.socket) -> ShardHeader | None:
    """None at the end of the connection."""
    first = connection.recv(1)
    if not first:
        return None
    (length,) = _LENGTH.unpack(first + _receive(connection, _LENGTH.size - 1))
    if length > MAX_HEAD_BYTES:
        raise ValueError(f"a head of {length} bytes, {MAX_HEAD_BYTES} are allowed")
    head = _receive(connection, length)
    header = read_header(head[:PAGE], entries_of=lambda size: head[PAGE : PAGE + size])
    if header is None:
        raise ValueError("a head arrived damaged")
    return header


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection ended")
        view = view[count:]


def _proof(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, role + nonces, "sha256")
