"""Which errors are failures of exchanges, and how each backend's are ended."""

import pickle
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.parallel.membership import (
    Membership,
    RendezvousClient,
    collective,
    is_collective_failure,
)
from rayfcp.execute.reports import CollectiveFailedError
from tests.execute.gloo import client_of, listening_store


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"),
        RuntimeError("HCCL AllReduce error"),
        RuntimeError("FORCE STOP"),
        dist.DistBackendError("NCCL error in: ncclUniqueId"),
        dist.DistStoreError("wait timeout after 50ms"),
        ConnectionResetError("reset"),
    ],
)
def test_failures_of_exchanges(error: Exception) -> None:
    assert is_collective_failure(error)
    outer = ValueError("cannot load")
    outer.__cause__ = error
    assert is_collective_failure(outer)


@pytest.mark.parametrize(
    "error",
    [
        IndexError("index out of range in self"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("out of memory"),
        ValueError("program is for rank 1"),
        FloatingPointError("gradient norm is nan"),
    ],
)
def test_errors_of_the_program(error: Exception) -> None:
    assert not is_collective_failure(error)


class Engine:
    """Interface that `collective` needs."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    @collective
    def fail(self, error: Exception, *, aborted: bool = False) -> None:
        self.is_aborted = aborted
        raise error


def test_failures_are_told_apart_for_the_controller() -> None:
    engine = Engine()
    with pytest.raises(IndexError):
        engine.fail(IndexError("model"))
    assert not engine.is_aborted
    with pytest.raises(CollectiveFailedError, match="devices aborted; IndexError: model"):
        engine.fail(IndexError("model"), aborted=True)
    engine.is_aborted = False
    with pytest.raises(CollectiveFailedError, match="devices failed; DistNetworkError: gone") as caught:
        engine.fail(dist.DistNetworkError("gone\nat 0x1"))
    assert engine.is_aborted, "so that neighbours notice"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_join_that_waits_for_others_is_ended() -> None:
    store = listening_store()
    member = Membership(torch.device("cpu"), start_timeout_s=200.0, collective_timeout_s=200.0)
    waiting = threading.Event()

    class Client(dist.Store):
        """Tells when somebody looks for others."""

        def check(self, keys: Any) -> bool:
            waiting.set()
            return client.check(list(keys))

        def get(self, key: str) -> bytes:
            return client.get(key)

        def set(self, key: str, value: Any) -> None:
            client.set(key, value)

    client = client_of(store.port)
    inner = Client()

    def abort() -> None:
        assert waiting.wait(100)
        member.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(Exception, match="by order"):
        member.join(MeshPosition(rank=0, num_ranks=2), store=lambda: inner)
    thread.join()
    assert member.is_aborted
    member.forget()
    assert not member.is_aborted and not dist.is_initialized()
    member.join(MeshPosition(rank=0, num_ranks=1), store=dist.HashStore)
    member.leave()
    assert not dist.is_initialized()


def test_waits_at_the_store_end_by_themselves() -> None:
    client = RendezvousClient(dist.HashStore, timeout_s=0.1)
    with pytest.raises(dist.DistStoreError):
        client.get("never set")
    client.set("set", b"1")
    assert client.get("set") == b"1"


def test_npu_devices_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []

    def stop_device(device: int) -> int:
        stopped.append(device)
        return 0 if device < 3 else 1

    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=SimpleNamespace(stop_device=stop_device)))
    backend_of("npu").abort_collectives(SimpleNamespace(type="npu", index=2))
    backend_of("npu").abort_collectives(SimpleNamespace(type="npu", index=None))
    assert stopped == [2, 0]
    with pytest.raises(RuntimeError, match="did not stop; end this process"):
        backend_of("npu").abort_collectives(SimpleNamespace(type="npu", index=3))
