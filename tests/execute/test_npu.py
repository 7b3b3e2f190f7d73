"""Operations of Ascend devices other than attention, on a stand-in for `torch.npu` with its documented functions."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray._private.accelerators import get_accelerator_manager_for_resource

from rayfcp.cluster.facts.resources import bundle
from rayfcp.execute.devices.backend import backend_of, device_kind
from rayfcp.values.devices import DEVICES, device_of_group_backend

GIB = 1 << 30
DEVICE: Any = SimpleNamespace(type="npu", index=0)


class Npu:
    """Stand-in for functions in the API reference of Ascend Extension for PyTorch, `torch_npu.npu`."""

    def __init__(self) -> None:
        self.stopped: list[int] = []
        self.answer = 0

    def is_available(self) -> bool:
        return True

    def get_device_name(self, device: Any = None) -> str:
        return "Ascend910_9392"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(name="Ascend910_9392", total_memory=61 * GIB)

    def memory_allocated(self, device: Any = None) -> int:
        return 3 * GIB

    def max_memory_allocated(self, device: Any = None) -> int:
        return 5 * GIB

    def stop_device(self, device_id: int) -> int:
        self.stopped.append(device_id)
        return self.answer


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Npu:
    found = Npu()
    monkeypatch.setattr(torch, "npu", found, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=found))
    return found


@pytest.mark.usefixtures("npu")
def test_kind_peak_and_memory() -> None:
    assert device_kind("auto") == "npu" or torch.cuda.is_available()
    backend = backend_of(DEVICE)
    assert backend.peak_flops(DEVICE) == 376e12
    assert backend.total_memory_bytes("npu") == backend.total_memory_bytes(DEVICE) == 61 * GIB
    assert backend.memory_bytes(DEVICE) == {"allocated": 3 * GIB, "peak": 5 * GIB}


def test_sums_have_a_dtype_that_collectives_reduce() -> None:
    assert backend_of(DEVICE).sum_dtype is torch.float32 and backend_of("cpu").sum_dtype is torch.float64


def test_exchanges_end_with_the_device(npu: Npu) -> None:
    """It is stopped by number; a device that does not stop ends its process."""
    backend_of("npu").abort_collectives(DEVICE)
    assert npu.stopped == [0]
    npu.answer = 1
    with pytest.raises(RuntimeError, match="did not stop; end this process"):
        backend_of("npu").abort_collectives(DEVICE)


def test_groups_and_resources_have_the_devices_names() -> None:
    """Ray gives a worker that asks for an NPU the one that it may see, by the runtime's own variable."""
    assert DEVICES["npu"].group_backend == "hccl" and device_of_group_backend("hccl") is DEVICES["npu"]
    assert bundle("npu", threads=2) == {"CPU": 2.0, "NPU": 1.0}
    manager = get_accelerator_manager_for_resource("NPU")
    assert manager is not None and manager.get_visible_accelerator_ids_env_var() == "ASCEND_RT_VISIBLE_DEVICES"
