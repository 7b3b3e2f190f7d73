"""What an accelerator's failure leads to, with stand-ins for the parts of torch that need one."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rayfcp.cluster.workers import environment
from rayfcp.execute.devices import cuda
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.parallel import membership
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.parallel.membership import Membership, collective, is_collective_failure, is_device_loss
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.execute.reports import DeviceLostError
from rayfcp.values.devices import DEVICES

BROKEN = (
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: unknown error"),
    RuntimeError("NPU function error: HBM MULTI BIT ECC ERROR"),
)
OF_THE_PROGRAM = (
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA error: unknown error"),
)


class Engine:
    """Interface that `collective` needs."""

    is_aborted = False

    @collective
    def run(self, error: Exception) -> None:
        raise error

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("error", BROKEN, ids=str)
def test_errors_of_a_broken_device(error: Exception) -> None:
    assert is_device_loss(error) and not is_collective_failure(error)
    engine = Engine()
    with pytest.raises(DeviceLostError, match=r"device is broken: (CUDA|NPU)"):
        engine.run(error)
    assert not engine.is_aborted  # nothing on a broken device ends in order


@pytest.mark.parametrize("error", OF_THE_PROGRAM, ids=str)
def test_errors_of_the_program_are_no_loss(error: Exception) -> None:
    assert not is_device_loss(error)
    with pytest.raises(type(error)):
        Engine().run(error)


class Group:
    """A process group whose abort returns only once all groups were told to end, as communicators of one device."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def abort(self) -> None:
        self._barrier.wait(timeout=20)


def test_all_groups_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other would hang: aborting a communicator frees memory, which waits for the others' kernels."""
    ended: list[bool] = []
    barrier = threading.Barrier(3)
    groups = [Group(barrier) for _ in range(3)]
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: ended.append(True))
    backend_of("cuda").abort_collectives(torch.device("cuda"))
    assert ended == [True]


def test_recovery_keeps_to_the_sequence_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """All communicators are aborted (User Guide, "Fault Tolerance"), their groups dropped, torch's cache emptied, since
    communicators allocate beside it, and only then others made, under another prefix of the store."""
    events: list[str] = []
    world, store = SimpleNamespace(pg_map={}), dist.HashStore()

    def make_groups(*, store: Any, **_: Any) -> None:
        store().set("unique id", "made")
        barrier = threading.Barrier(3, action=lambda: events.append("all groups are told to abort"))
        world.pg_map = dict.fromkeys(Group(barrier) for _ in range(3))
        events.append("groups are made")

    def clean_up() -> None:
        world.pg_map = {}
        events.append("groups are dropped")

    monkeypatch.setattr(membership, "join_process_groups", make_groups)
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", clean_up)
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(world.pg_map))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("cache is emptied"))
    monkeypatch.setattr(membership.gc, "collect", lambda: events.append("garbage is collected"))
    member = Membership(torch.device("cuda"), start_timeout_s=1.0, collective_timeout_s=1.0)
    for generation in (1, 2):
        member.forget()
        prefix = f"generation-{generation}"
        member.join(MeshPosition(rank=0, num_ranks=1), store=lambda prefix=prefix: dist.PrefixStore(prefix, store))
        member.abort()
        member.abort()  # repeated until the exchanges have ended
        assert member.is_aborted
    ended = ["all groups are told to abort", "groups are dropped"]
    assert events == ["groups are made", *ended, "garbage is collected", "cache is emptied", "groups are made", *ended]
    assert all(store.get(f"generation-{generation}/unique id") == b"made" for generation in (1, 2))


class Cudart:
    """Registration of host memory in the CUDA runtime."""

    def __init__(self, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  CUDA's name
        assert flags == 0
        if not self._error:
            self.pinned[address] = size
        return self._error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  CUDA's name
        del self.pinned[address]
        return 0


def test_pinned_memory_is_as_large_as_asked_and_unpinned_when_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = cuda.BACKEND.allocate_host(3 * 2**20 + 1)
    assert buffer.dtype == np.uint8 and list(runtime.pinned.values()) == [3 * 2**20 + 1]
    view = buffer[:8].view(np.uint64)
    del buffer
    assert runtime.pinned
    del view
    assert not runtime.pinned
    assert len(cuda.BACKEND.allocate_host(0)) == 0


def test_memory_that_cannot_be_pinned_is_usable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(error=2))
    assert len(cuda.BACKEND.allocate_host(8)) == 8
    assert "8 bytes of host memory cannot be pinned (CUDA error 2)" in caplog.text


def batches_of(monkeypatch: pytest.MonkeyPatch, *, sends: list[int], receives: list[int], backend: str) -> list[Any]:
    """Batches that a transport of `backend` posts for messages to and from these peers."""
    found: list[Any] = []
    kinds = {dist.isend: "send", dist.irecv: "receive"}
    monkeypatch.setattr(
        dist, "P2POp", lambda kind, tensor, *, group, group_peer: (kinds[kind], group_peer, int(tensor))
    )
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: found.append(batch) or [])
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    monkeypatch.setattr(type(backend_of("npu")), "streams", None)
    group: Any = type("Group", (), {})()
    numbered = [[(peer, torch.tensor(at)) for at, peer in enumerate(peers)] for peers in (sends, receives)]
    DistributedTransport(group).post(*numbered)
    return found


def test_a_batch_of_hccl_has_one_message_to_and_from_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """HcclBatchSendRecv refuses more up to CANN 8.5. The order between two ranks stays, in both directions."""
    found = batches_of(monkeypatch, sends=[1, 2, 1, 1], receives=[2, 1, 2], backend="hccl")
    assert found == [
        [("send", 1, 0), ("send", 2, 1), ("receive", 2, 0), ("receive", 1, 1)],
        [("send", 1, 2), ("receive", 2, 2)],
        [("send", 1, 3)],
    ]


def test_other_libraries_take_all_messages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = batches_of(monkeypatch, sends=[1, 1], receives=[2, 2], backend="gloo")
    assert found == [[("send", 1, 0), ("send", 1, 1), ("receive", 2, 0), ("receive", 2, 1)]]
    assert batches_of(monkeypatch, sends=[], receives=[], backend="gloo") == []


def test_libraries_of_devices_find_their_environment_set_before_torch_is_imported() -> None:
    code = (
        "import os, sys\n"
        "import rayfcp.cluster.workers.worker\n"
        "from rayfcp.cluster.workers.environment import set_environment\n"
        "assert 'torch' not in sys.modules, 'the worker imports torch before it sets the environment'\n"
        "set_environment({'GPU': ['3'], 'NPU': [], 'TPU': ['0']})\n"
        "names = 'TORCH_NCCL_ASYNC_ERROR_HANDLING', 'CUDA_DEVICE_MAX_CONNECTIONS', 'CUDA_VISIBLE_DEVICES'\n"
        "print(*map(os.environ.get, (*names, 'ASCEND_RT_VISIBLE_DEVICES')))\n"
    )
    variables = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    variables.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=False)
    assert (done.returncode, done.stdout) == (0, "0 1 3 None\n"), done.stderr  # what the user sets stays


def test_interfaces_are_named_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name alone is a prefix to NCCL and HCCL."""
    for name in ("GLOO", "NCCL", "HCCL"):
        monkeypatch.delenv(f"{name}_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(environment.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth10"), (3, "eth1")])
    monkeypatch.setattr(environment, "_address_of", {"lo": "127.0.0.1", "eth10": "10.0.0.2", "eth1": "10.1.0.2"}.get)
    environment.use_interface("10.1.0.1", own_address="10.1.0.2")
    found = {name: os.environ.pop(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL", "HCCL")}
    assert found == {"GLOO": "eth1", "NCCL": "=eth1", "HCCL": "=eth1"}


def test_settings_have_reasons_and_one_value() -> None:
    settings = [setting for info in DEVICES.values() for setting in info.environment]
    assert len({setting.name for setting in settings}) == len(settings)
    assert all(setting.value and setting.reason for setting in settings)
