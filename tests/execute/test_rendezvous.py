"""Aborting a client closes no handle of the process but its own connections."""

import os
import socket

import torch.distributed as dist

from rayfcp.execute.parallel.membership import RendezvousClient


def num_handles() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208


def test_abort_leaves_no_handle_open_and_other_connections_alone() -> None:
    """A process that recovers often would run out of handles."""
    client = RendezvousClient(dist.HashStore, timeout_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            before = num_handles()
            for _ in range(3):
                client.abort()
            assert num_handles() == before
            ours.sendall(b"alive")
            assert theirs.recv(5) == b"alive"
