"""Rendezvous of a generation: a key-value store in the controller's process that listens on one address only."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rayfcp.cluster.workers.facts import Rendezvous
from rayfcp.values import ClusterSpec


class RendezvousStore:
    """Serves on a free port of `host` until the object is collected."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen()
        self._host, self._port = host, self._listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=self._listener.detach()
        )

    def of(self, cluster: ClusterSpec) -> Rendezvous:
        """Rendezvous of the cluster's generation."""
        return Rendezvous(
            host=self._host,
            port=self._port,
            generation=cluster.generation,
            num_ranks=cluster.num_ranks,
            num_stages=cluster.num_stages,
            tensor_parallel=cluster.tensor_parallel,
            layers_of_stage=cluster.layers_of_stage,
        )


def client_of(rendezvous: Rendezvous, *, timeout_s: float) -> dist.Store:
    """Client of the store, under the prefix of the generation."""
    client: Any = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"generation-{rendezvous.generation}", client)
