"""Copies between two nodes: whole or not at all, whoever dies on the way, and only among those who know the token."""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayfcp.elastic.recoverable import ShardCopy
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.execute.state import transfer
from rayfcp.execute.state.copies import CopyFolder, CopyGoneError, NewCopy
from rayfcp.execute.state.transfer import Listener, NoRoomError, Peer, TransferError, read_copy, send_copies
from rayfcp.values import ShardHeader
from rayfcp.values.state import Box
from tests.cluster.light import bytes_of, shard
from tests.waiting import PATIENCE_S, until

STATE = shard(1).state


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1000)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[CopyFolder, CopyFolder, Listener]]:
    """Copies here, copies there, and who receives them there."""
    here, there = CopyFolder(tmp_path / "here"), CopyFolder(tmp_path / "there")
    listener = Listener(there, host="127.0.0.1", patience_s=PATIENCE_S)
    yield here, there, listener
    listener.close()


def keep(copies: CopyFolder, header: ShardHeader) -> None:
    new = copies.begin(header)
    new.buffer[:] = bytes_of(header)
    new.publish()


def send(here: CopyFolder, listener: Listener, *numbers: int, patience_s: float = PATIENCE_S) -> int:
    return send_copies(here, STATE, numbers=numbers, to=listener.peer, patience_s=patience_s)


@pytest.mark.parametrize("num_bytes", [0, 700, 1000, 2500])
def test_copies_arrive_as_they_are(ends: tuple[CopyFolder, CopyFolder, Listener], num_bytes: int) -> None:
    """None, one or several chunks; those that are there already are not sent again."""
    here, there, listener = ends
    headers = [shard(1, number=number, num_bytes=num_bytes) for number in (3, 5)]
    for header in headers:
        keep(here, header)
    assert send(here, listener, 3) == num_bytes
    assert send(here, listener, 3, 5) == num_bytes
    assert there.headers() == tuple(headers)
    for header in headers:
        with there.reading(STATE, header.number) as copy:
            np.testing.assert_array_equal(copy.buffer, bytes_of(header))


def test_a_sender_keeps_to_its_rate(ends: tuple[CopyFolder, CopyFolder, Listener]) -> None:
    here, there, listener = ends
    keep(here, shard(1))
    began_s = time.monotonic()
    send_copies(here, STATE, numbers=[0], to=listener.peer, patience_s=PATIENCE_S, bytes_per_s=10_000)
    assert time.monotonic() - began_s >= 0.25
    assert there.has(STATE, 0)


def test_a_copy_that_arrives_damaged_is_not_kept(
    ends: tuple[CopyFolder, CopyFolder, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, listener = ends
    keep(here, shard(1))
    receive = transfer._receive_into

    def flip(connection: socket.socket, view: memoryview) -> None:
        receive(connection, view)
        if len(view) == 500:  # the last chunk
            view[0] ^= 1

    monkeypatch.setattr(transfer, "_receive_into", flip)
    with pytest.raises(TransferError, match="copy of device 0 at version 1, generation 0 arrived damaged"):
        send(here, listener, 0)
    assert there.headers() == () and list(there.path.glob("*.copy")) == []
    monkeypatch.undo()
    assert send(here, listener, 0) == 2500


def test_a_full_memory_is_named(ends: tuple[CopyFolder, CopyFolder, Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, listener = ends
    keep(here, shard(1))

    def full(header: ShardHeader) -> NewCopy:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(there, "begin", full)
    with pytest.raises(NoRoomError, match="found no room"):
        send(here, listener, 0)


def test_what_is_gone_here_is_an_error(ends: tuple[CopyFolder, CopyFolder, Listener]) -> None:
    here, _, listener = ends
    with pytest.raises(TransferError, match="no copy of device 7"):
        send(here, listener, 7)


def test_a_sender_that_dies_leaves_nothing(ends: tuple[CopyFolder, CopyFolder, Listener]) -> None:
    """At any point: the connection breaks after the head, or in the data."""
    here, there, listener = ends
    header = shard(1)
    keep(here, header)
    with here.reading(STATE, 0) as copy:
        for num_sent in (0, 1, 1500, 2500):
            connection = introduced(listener)
            transfer._ask(connection, b"k", copy.head)
            assert connection.recv(1) == b"s"
            connection.sendall(copy.buffer[:num_sent].data)
            connection.close()
    until(lambda: not list(there.path.glob("*.copy")))
    assert send(here, listener, 0) == 2500


def introduced(listener: Listener, connection: socket.socket | None = None) -> socket.socket:
    """A connection that knows the token."""
    address = (listener.peer.host, listener.peer.port)
    connection = connection or socket.create_connection(address, timeout=PATIENCE_S)
    theirs = transfer._receive(connection, 32)
    connection.sendall(b"0" * 32 + transfer._proof(listener.peer.token, b"caller", theirs + b"0" * 32))
    transfer._receive(connection, 32)
    return connection


@pytest.mark.parametrize("answer", [b"", b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(64)])
def test_strangers_are_refused_and_logged(
    ends: tuple[CopyFolder, CopyFolder, Listener],
    answer: bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silent ones after a while; others are served meanwhile."""
    here, _there, listener = ends
    monkeypatch.setattr(transfer, "HANDSHAKE_S", 0.3)
    keep(here, shard(1))
    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection((listener.peer.host, listener.peer.port), timeout=PATIENCE_S) as stranger,
    ):
        assert len(transfer._receive(stranger, 32)) == 32
        stranger.sendall(answer)
        assert send(here, listener, 0) == 2500
        with suppress(ConnectionResetError):  # what it sent was not read
            assert stranger.recv(1) == b""
        until(lambda: "refused 127.0.0.1, which does not know this process's token" in caplog.text)


def test_a_store_with_another_token_gets_nothing(ends: tuple[CopyFolder, CopyFolder, Listener]) -> None:
    """Such as one that took over the port of a dead one."""
    here, there, listener = ends
    keep(here, shard(1))
    with pytest.raises(TransferError):
        send_copies(here, STATE, numbers=[0], to=replace(listener.peer, token=bytes(32)), patience_s=PATIENCE_S)
    assert there.headers() == ()
    assert "token" not in repr(listener.peer), "it enters no log"


def test_connections_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as they have not proved anything. Those who wait are served when there is room."""
    monkeypatch.setattr(transfer, "MAX_STRANGERS", 2)
    monkeypatch.setattr(transfer, "QUEUE_S", 0.1)
    listener = Listener(CopyFolder(tmp_path / "there"), host="127.0.0.1", patience_s=PATIENCE_S)
    address = (listener.peer.host, listener.peer.port)
    with caplog.at_level(logging.WARNING):
        held = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(3)]
        assert [len(each.recv(32)) for each in held] == [32, 32, 0]
    assert "2 connections that prove nothing are open" in caplog.text
    monkeypatch.setattr(transfer, "QUEUE_S", PATIENCE_S)
    waiting = socket.create_connection(address, timeout=PATIENCE_S)
    held[0].close()
    known = [introduced(listener, waiting), introduced(listener), introduced(listener)]
    for each in [*held, *known]:
        each.close()
    listener.close()


BROKEN = [b"k" + b"\xff" * 16, b"k" + transfer._LENGTH.pack(2) + b"{}", b"r" + transfer._LENGTH.pack(2) + b"{}", b"x"]


@pytest.mark.parametrize("head", BROKEN)
def test_a_damaged_head_ends_the_connection(
    ends: tuple[CopyFolder, CopyFolder, Listener], head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    _, there, listener = ends
    with caplog.at_level(logging.WARNING), introduced(listener) as connection:
        connection.sendall(head)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        until(lambda: "broke off" in caplog.text)
    assert there.headers() == ()


def test_a_receiver_that_stops_is_lost(tmp_path: Path) -> None:
    """It accepts, and answers nothing more."""
    here = CopyFolder(tmp_path / "here")
    keep(here, shard(1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = transfer.Peer(host="127.0.0.1", port=silent.getsockname()[1], token=b"")
        with pytest.raises(TransferError, match="timed out"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "HANDSHAKE_S", 0.2)
            send_copies(here, STATE, numbers=[0], to=peer, patience_s=0.2)


def read(listener: Listener, *parts: tuple[int, int], number: int = 0, patience_s: float = PATIENCE_S) -> np.ndarray:
    """These parts, each into two buffers."""
    copy = ShardCopy(header=shard(1, number=number), peer=listener.peer, node_id="there")
    wanted = [("weight", "parameter", Box(offsets=(start,), sizes=(stop - start,))) for start, stop in parts]
    buffers = [[np.empty(10, np.uint8), np.empty(stop - start - 10, np.uint8)] for start, stop in parts]
    read_copy(copy, wanted=wanted, into=buffers, patience_s=patience_s)
    return np.concatenate([each for of_part in buffers for each in of_part])


def test_parts_of_a_copy_are_read_as_they_are(ends: tuple[CopyFolder, CopyFolder, Listener]) -> None:
    _, there, listener = ends
    keep(there, shard(1))
    data = bytes_of(shard(1))
    np.testing.assert_array_equal(read(listener, (0, 2500)), data)
    np.testing.assert_array_equal(read(listener, (2000, 2010), (7, 1500)), [*data[2000:2010], *data[7:1500]])


def test_parts_that_are_read_arrive_damaged_or_not_at_all(
    ends: tuple[CopyFolder, CopyFolder, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is gone, of another model, or changes on the way."""
    _, there, listener = ends
    with pytest.raises(CopyGoneError, match="no copy of device 0 at version 1, generation 0"):
        read(listener, (0, 2500))
    keep(there, shard(1))
    with pytest.raises(CollectiveFailedError, match=r"the connection to .* failed"):
        read(listener, (2000, 2600))
    receive = transfer._receive_into

    def flip(connection: socket.socket, view: memoryview) -> None:
        receive(connection, view)
        if len(view) == 490:  # the last chunk
            view[0] ^= 1

    monkeypatch.setattr(transfer, "_receive_into", flip)
    with pytest.raises(CollectiveFailedError, match="copy of device 0 at version 1, generation 0 arrived damaged"):
        read(listener, (0, 2500))


def test_a_stranger_reads_nothing(ends: tuple[CopyFolder, CopyFolder, Listener]) -> None:
    _, there, listener = ends
    keep(there, shard(1))
    listener.peer, peer = replace(listener.peer, token=bytes(32)), listener.peer
    stranger = ShardCopy(header=shard(1), peer=peer, node_id="there")
    with pytest.raises(CollectiveFailedError, match="a copy could not be read"):
        read_copy(stranger, wanted=[("weight", "parameter", Box(offsets=(0,), sizes=(2500,)))], into=[], patience_s=9)


@pytest.mark.parametrize("num_sent", [0, 1, 1500, 2500])
def test_a_peer_that_dies_while_it_is_read_is_lost(num_sent: int) -> None:
    """At any point: before it answers, in the data, before their checksum; or it stops there."""
    for dies in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as server:
            peer = Peer(host="127.0.0.1", port=server.getsockname()[1], token=b"1" * 32)
            thread = threading.Thread(target=give_in_part, args=[server, peer, num_sent], kwargs={"dies": dies})
            thread.start()
            copy = ShardCopy(header=shard(1), peer=peer, node_id="there")
            wanted, into = [("weight", "parameter", Box(offsets=(0,), sizes=(2500,)))], [[np.empty(2500, np.uint8)]]
            with pytest.raises(CollectiveFailedError, match="connection ended|reset" if dies else "timed out"):
                read_copy(copy, wanted=wanted, into=into, patience_s=PATIENCE_S if dies else 0.2)
            thread.join()


def give_in_part(server: socket.socket, peer: Peer, num_sent: int, *, dies: bool) -> None:
    """Answer one caller with so many bytes of a copy, 0: without the answer before them."""
    connection, _ = server.accept()
    with connection:
        connection.sendall(bytes(32))
        theirs = transfer._receive(connection, 64)[:32]
        connection.sendall(transfer._proof(peer.token, b"listener", bytes(32) + theirs))
        transfer._receive(connection, 1)
        transfer._receive_block(connection)
        if num_sent:
            connection.sendall(b"r" + bytes_of(shard(1))[:num_sent].tobytes())
        if not dies:
            assert connection.recv(1) == b"", "the caller leaves"
