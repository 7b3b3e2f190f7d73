"""Copies of shards from the shared memory of one node to that of another, by plain sockets.

Not as objects of Ray, which take several times the CPU time (`jobs/bench/transfer.py`). A transport by RDMA would take
the place of `Listener`, `send_copies` and `read_copy`.

Both ends prove that they know the listener's token, which Ray hands out, before anything is sent. Then for each copy
that is sent (`KEEP`): its head as it is in memory, the listener's answer, the data, their checksum, the listener's
answer. For each that is read (`READ`): which parts of which copy, the listener's answer, the data, their checksum.
"""

import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from rayfcp.elastic.recoverable import ShardCopy
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.execute.state.copies import PAGE, CopyFolder, CopyGoneError, Into, Wanted, label, raw, read_header
from rayfcp.values import ShardHeader, StateId
from rayfcp.values.state import Box

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
"""Sent, summed and paced at once: small enough to stay in a cache between the two."""

HANDSHAKE_S = 5.0
"""Time for a connection to prove that it knows the token."""

MAX_STRANGERS, QUEUE_S, BACKLOG = 32, 1.0, 1024
"""Connections at once that have not proved that they know the token; others wait so long, and are closed then. Many
wait, none for long, when all devices of a run begin to read."""

MAX_HEAD_BYTES = 64 * 2**20
NONCE_BYTES = 32
_LENGTH = struct.Struct(">Q")

KEEP, READ = b"k", b"r"
"""What the listener is asked to do."""


class Answer(bytes, Enum):
    """The listener's answers."""

    SEND = b"s"
    HELD = b"h"
    KEPT = b"k"
    DAMAGED = b"d"
    FULL = b"f"
    READY = b"r"
    GONE = b"g"


class TransferError(RuntimeError):
    """Copies could not be sent; one line."""


class CopyRemovedError(TransferError):
    """A copy is gone from the sender's memory."""


class NoRoomError(TransferError):
    """The receiver's memory is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where copies are received, and read."""

    host: str
    port: int
    token: bytes = field(repr=False)


class Listener:
    """Receives copies into a folder, and gives parts of those in it, until `close`; on one address only.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(self, copies: CopyFolder, *, host: str, patience_s: float) -> None:
        self._copies, self._patience_s = copies, patience_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.peer = Peer(host=host, port=self._socket.getsockname()[1], token=secrets.token_bytes(NONCE_BYTES))
        self._free = threading.BoundedSemaphore(MAX_STRANGERS)
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
            if not self._free.acquire(timeout=QUEUE_S):
                logger.warning("refused %s: %d connections that prove nothing are open", address[0], MAX_STRANGERS)
                connection.close()
                continue
            threading.Thread(target=self._serve, args=[connection, address[0]], daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            with connection:
                try:
                    is_known = self._is_known(connection)
                finally:
                    self._free.release()
                if not is_known:
                    logger.warning("refused %s, which does not know this process's token", address)
                    return
                _begin(connection, patience_s=self._patience_s)
                while asked := connection.recv(1):
                    if asked == KEEP:
                        connection.sendall(self._keep(connection))
                    elif asked == READ:
                        self._give(connection)
                    else:
                        raise ValueError(f"{asked!r} is asked for")
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("copies for or from %s broke off: %s", address, error)

    def _is_known(self, connection: socket.socket) -> bool:
        """Whether the other end knows the token; proves to it that this end does."""
        connection.settimeout(HANDSHAKE_S)
        mine = secrets.token_bytes(NONCE_BYTES)
        try:
            connection.sendall(mine)
            theirs, proof = _receive(connection, NONCE_BYTES), _receive(connection, NONCE_BYTES)
            if not hmac.compare_digest(proof, _proof(self.peer.token, b"caller", mine + theirs)):
                return False
            connection.sendall(_proof(self.peer.token, b"listener", mine + theirs))
        except OSError:
            return False
        return True

    def _keep(self, connection: socket.socket) -> bytes:
        header = _receive_head(connection)
        if self._copies.has(header.state, header.number):
            return Answer.HELD.value
        try:
            new = self._copies.begin(header)
        except OSError as error:
            logger.warning("no room for the %s in %s: %s", label(header), self._copies.path, error.strerror)
            return Answer.FULL.value
        try:
            connection.sendall(Answer.SEND.value)
            found = xxhash.xxh3_64()
            _receive_data(connection, new.buffer.data, summed=found)
            if found.digest() != _receive(connection, found.digest_size):
                return Answer.DAMAGED.value
            return Answer.KEPT.value if new.publish() else Answer.FULL.value
        finally:
            new.discard()

    def _give(self, connection: socket.socket) -> None:
        version, generation, number, wanted = json.loads(_receive_block(connection))
        state, found = StateId(version=int(version), generation=int(generation)), xxhash.xxh3_64()
        try:
            with self._copies.reading(state, int(number)) as copy:
                connection.sendall(Answer.READY.value)
                boxes = [(name, kind, Box(offsets=tuple(at), sizes=tuple(sizes))) for name, kind, at, sizes in wanted]
                for piece in copy.pieces(boxes):
                    _send_data(connection, raw(piece).data, summed=found)
        except CopyGoneError:
            connection.sendall(Answer.GONE.value)
            return
        connection.sendall(found.digest())


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
        with _connected(to, patience_s=patience_s) as connection:
            return sum(_send(connection, copies, state, number, bytes_per_s=bytes_per_s) for number in numbers)
    except CopyGoneError as error:
        raise CopyRemovedError(str(error)) from error


def read_copy(copy: ShardCopy, *, wanted: Sequence[Wanted], into: Sequence[Into], patience_s: float) -> None:
    """Fill memory with parts of a copy that another process gives.

    Raises:
        CollectiveFailedError: the copy is gone, or did not arrive whole; what is in the memory means nothing then.
    """
    state, number, found = copy.header.state, copy.header.number, xxhash.xxh3_64()
    boxes = [(name, kind, box.offsets, box.sizes) for name, kind, box in wanted]
    try:
        with _connected(copy.peer, patience_s=patience_s) as connection:
            asked = json.dumps([state.version, state.generation, number, boxes]).encode()
            _ask(connection, READ, asked)
            if _receive(connection, 1) != Answer.READY.value:
                raise CopyGoneError(f"a copy was dropped before it was read: no {label(copy.header)}")
            for buffers in into:
                for buffer in buffers:
                    _receive_data(connection, buffer.data, summed=found)
            if found.digest() != _receive(connection, found.digest_size):
                raise TransferError(f"the {label(copy.header)} arrived damaged")
    except TransferError as error:
        raise CollectiveFailedError(f"a copy could not be read: {error}") from error


@contextmanager
def _connected(to: Peer, *, patience_s: float) -> Iterator[socket.socket]:
    """A connection to a peer that is the one that was meant; a TransferError if there is none, or it ends."""
    try:
        with socket.create_connection((to.host, to.port), timeout=HANDSHAKE_S) as connection:
            theirs, mine = _receive(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            connection.sendall(mine + _proof(to.token, b"caller", theirs + mine))
            proof = _receive(connection, NONCE_BYTES)
            if not hmac.compare_digest(proof, _proof(to.token, b"listener", theirs + mine)):
                raise TransferError(f"{to.host}:{to.port} is not the process that was meant")
            _begin(connection, patience_s=patience_s)
            yield connection
    except OSError as error:
        raise TransferError(f"the connection to {to.host}:{to.port} failed: {error}") from error


def _begin(connection: socket.socket, *, patience_s: float) -> None:
    """Prepare for what follows the proofs."""
    connection.settimeout(patience_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each short answer may take 40 ms


def _send(
    connection: socket.socket, copies: CopyFolder, state: StateId, number: int, *, bytes_per_s: float | None
) -> int:
    with copies.reading(state, number) as copy:
        _ask(connection, KEEP, copy.head)
        answer = _receive(connection, 1)
        if answer == Answer.HELD.value:
            return 0
        if answer == Answer.SEND.value:
            found = xxhash.xxh3_64()
            _send_data(connection, copy.buffer.data, summed=found, bytes_per_s=bytes_per_s)
            connection.sendall(found.digest())
            answer = _receive(connection, 1)
        if answer == Answer.FULL.value:
            raise NoRoomError(f"the {label(copy.header)} found no room")
        if answer != Answer.KEPT.value:
            raise TransferError(f"the {label(copy.header)} arrived damaged")
        return len(copy.buffer)


def _send_data(
    connection: socket.socket, data: memoryview, *, summed: xxhash.xxh3_64, bytes_per_s: float | None = None
) -> None:
    began_s = time.monotonic()
    for start in range(0, len(data), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        summed.update(part)
        connection.sendall(part)
        if bytes_per_s:
            time.sleep(max(0.0, began_s + (start + len(part)) / bytes_per_s - time.monotonic()))


def _receive_data(connection: socket.socket, data: memoryview, *, summed: xxhash.xxh3_64) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        _receive_into(connection, part)
        summed.update(part)


def _ask(connection: socket.socket, what: bytes, block: bytes) -> None:
    connection.sendall(what + _LENGTH.pack(len(block)) + block)


def _receive_block(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > MAX_HEAD_BYTES:
        raise ValueError(f"a head of {length} bytes, {MAX_HEAD_BYTES} are allowed")
    return _receive(connection, length)


def _receive_head(connection: socket.socket) -> ShardHeader:
    head = _receive_block(connection)
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
