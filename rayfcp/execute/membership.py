"""This process's part in one generation of devices after another, which another thread can end at any time."""

import functools
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor import debug as tensor_debug

from rayfcp.execute.groups import Place, World, join_world, leave_world
from rayfcp.execute.meeting import Meeting

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
