"""Where ranks meet: a key-value store in the controller's process, listening on one address only."""

import socket

import torch.distributed as dist

from rayfcp.cluster.facts import Rendezvous


class RendezvousStore:
    """Serves on `host`, on a free port, until the process ends or the object goes."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen()
        self._host, self._port = host, self._listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=self._listener.detach()
        )

    def meeting(self, generation: int, *, num_ranks: int) -> Rendezvous:
        """The meeting of one generation."""
        return Rendezvous(host=self._host, port=self._port, generation=generation, num_ranks=num_ranks)
