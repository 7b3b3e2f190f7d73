"""Devices that are not here, peaks by name, and FSDP's state across torch versions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config, ConfigError
from rayfcp.cost.profiles import HARDWARE
from rayfcp.execute.devices.backend import backend_of, device_kind, resolve_device
from rayfcp.execute.kernels import KernelUnavailableError
from rayfcp.execute.parallel.sharding import parameter_groups
from rayfcp.values.devices import DEVICES

NAMES = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H20": 148e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "Ascend910B3": 376e12,
    "Ascend910_9392": 376e12,
    "NVIDIA L40": None,
    "NVIDIA A10G": None,
    "NVIDIA GH200 480GB": None,
    "NVIDIA GeForce RTX 4090": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_of_the_device_and_not_of_one_that_is_called_alike(name: str) -> None:
    assert DEVICES["npu" if name.startswith("Ascend") else "cuda"].peak_flops_of(name) == NAMES[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_devices_that_are_not_here_have_neither_memory_nor_peak() -> None:
    assert device_kind("auto") == "cpu" and resolve_device("auto").type == "cpu"
    for kind in ("cuda", "npu", "cpu"):
        assert device_kind(kind) == kind
    assert backend_of("cuda").peak_flops(resolve_device("cuda")) is None
    assert [backend_of(kind).total_memory_bytes(kind) for kind in ("cuda", "npu")] == [0, 0]
    assert backend_of("cpu").total_memory_bytes("cpu") > 0


def test_every_named_hardware_profile_is_of_a_device() -> None:
    assert {name for info in DEVICES.values() for name in info.hardware} == set(HARDWARE)


@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch_npu is installed")
def test_a_device_unknown_to_torch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.device is npu, unknown to torch here; install its extension"):
        resolve_device("npu")


@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch_npu is installed")
def test_a_worker_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfcp.cluster.workers.worker.OrphanWatch", lambda _: None)  # it would end this process
    config = Config.model_validate({"data": {"paths": ["."]}, "cluster": {"device": "npu"}})
    with pytest.raises(KernelUnavailableError, match="torch_npu is not installed; install CANN"):
        DeviceWorker(config, "", vocab_size=1).open()


def part(**attributes: Any) -> Any:
    """A sharded module whose state has these attributes."""
    return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**attributes))


def test_parameter_groups_are_found_in_old_and_new_torch() -> None:
    group = SimpleNamespace(gradient_divide_factor=1.0)
    assert parameter_groups(part(_fsdp_param_group=group)) == [group]
    assert parameter_groups(part(_fsdp_param_group=None)) == []
    assert parameter_groups(part(_fsdp_param_groups=[group, group], _fsdp_param_group=group)) == [group, group]
    assert parameter_groups(part(_fsdp_param_groups=[], _fsdp_param_group=None)) == []
