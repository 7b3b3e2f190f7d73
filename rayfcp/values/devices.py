"""Kinds of device, as far as they can be described without torch.

Adding one: its `DeviceInfo` in `DEVICES`, and the module that this names, with a `BACKEND`
(`rayfcp.execute.devices.backend.DeviceBackend`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Setting(NamedTuple):
    """An environment variable of a worker process, and why rayfcp sets it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One kind of device and everything that packages without torch need to know about it."""

    name: str
    """As in `cluster.device`, and torch's own device type."""
    backend_module: str
    """Holds the device's `BACKEND`; imported where torch is needed."""
    resource: str | None
    """Ray's resource for one device; None if the workers compute on CPUs, which Ray counts anyway."""
    group_backend: str
    """Of torch.distributed; no two kinds of device share one."""
    failures: str
    """Pattern of the messages of plain RuntimeErrors from its collective library: exchanges that failed, after which a
    run recovers."""
    losses: str | None = None
    """Pattern of the messages of RuntimeErrors of a device that is broken: the run goes on without it. Any other
    RuntimeError, faults of kernels such as illegal memory accesses included, ends the run."""
    hardware: tuple[str, ...]
    """Named hardware profiles of such devices."""
    start_tokens: int
    """Tokens of the largest pass of one rank that is timed before a run starts: more are predicted better, and take
    longer."""
    install: str
    """Remedy if torch does not see the device."""
    environment: tuple[Setting, ...] = ()
    """Set in worker processes before torch is imported, unless the user has set them."""
    visible_devices: str = ""
    """Environment variable with the devices that a process sees, which each worker sets to its own one."""
    compiles: bool = False
    """Layers are compiled where `train.compile` is auto."""
    single_message_per_peer: bool = False
    """A batch of point-to-point messages may hold one to and one from each peer."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dense bf16 peak of one device by a pattern of whole words of its name, from the vendors' data sheets."""

    @property
    def base_hardware(self) -> str:
        """The named profile that stands in for devices without one."""
        return self.hardware[0]

    @property
    def is_host(self) -> bool:
        """Workers compute on the host's CPUs: they share its memory, and calls return when the work is done."""
        return self.resource is None

    def peak_flops_of(self, name: str) -> float | None:
        """Peak of the device with this name, as its driver gives it; the longest matching pattern counts. None if the
        table does not have it.

        >>> DEVICES["cuda"].peak_flops_of("NVIDIA H100 PCIe")
        756000000000000.0
        """
        matches = [
            (len(match.group()), peak)
            for pattern, peak in self.peak_flops.items()
            if (match := re.search(rf"\b{pattern}\b", name, re.IGNORECASE))
        ]
        return max(matches)[1] if matches else None


CUDA = DeviceInfo(
    name="cuda",
    backend_module="rayfcp.execute.devices.cuda",
    resource="GPU",
    group_backend="nccl",
    failures="NCCL",
    # Of `cudaGetErrorString`: errors 46, 100, 214, 220, 702, 714, 719, 721, 802 and 999 of the CUDA Runtime API.
    losses=r"CUDA error: (CUDA-capable device\(s\) is/are busy|no CUDA-capable device|uncorrectable (ECC|NVLink) error"
    r"|the launch timed out|hardware stack error|unspecified launch failure"
    r"|Invalid access of peer GPU memory over nvlink|system not yet initialized|unknown error)",
    hardware=("h100", "h200", "a800", "a100", "b200", "gb200", "l40s", "gpu-x", "gpu-y"),
    start_tokens=16384,
    install="install the driver and torch's CUDA build; in a container, run it with the GPUs (--gpus all)",
    environment=(
        Setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "NCCL's watchdog would end survivors that recover in place"),
        Setting(
            "TORCH_NCCL_BLOCKING_WAIT", "0", "the host would wait for each gather and message instead of enqueueing"
        ),
        Setting("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", "an aborted communicator would end the process"),
        Setting("TORCH_NCCL_ENABLE_MONITORING", "0", "the heartbeat monitor would end a process that recovers"),
        Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", "its threads would poll the rendezvous store of a past generation"),
        Setting("NCCL_NVLS_ENABLE", "0", "buffers of NVLink SHARP are not freed when a communicator is aborted"),
        Setting(
            "NCCL_LAUNCH_ORDER_IMPLICIT",
            "0",
            "kernels would start in the host's order: gathers behind messages, and before CUDA 12.3 one at a time, so "
            "that pipeline stages would wait for each other",
        ),
        Setting(
            "CUDA_DEVICE_MAX_CONNECTIONS", "32", "with 8 hardware queues, 9 to 14 streams would wait for each other"
        ),
        Setting("PYTORCH_ALLOC_CONF", "expandable_segments:True", "batches of many lengths would fragment memory"),
    ),
    visible_devices="CUDA_VISIBLE_DEVICES",
    compiles=True,
    peak_flops={  # without a suffix: the SXM module
        "B200": 2250e12,
        "GB200": 2500e12,
        "H200": 989e12,
        "H200 NVL": 835e12,
        "H100": 989e12,
        "H100 PCIe": 756e12,
        "H100 NVL": 835e12,
        "H20": 148e12,
        "A100": 312e12,
        "A800": 312e12,
        "A10": 125e12,
        "L40S": 362e12,
        "L4": 121e12,
    },
)
NPU = DeviceInfo(
    name="npu",
    backend_module="rayfcp.execute.devices.npu",
    resource="NPU",
    group_backend="hccl",
    failures=r"HCCL|FORCE STOP|ERR02\d\d\d",  # ERR02: errors of torch_npu's distributed module
    losses=r"UCE ERROR|MULTI BIT ECC ERROR|HCCS LINK ERROR|SUSPECT MEM ERROR",  # torch_npu's names of device errors
    hardware=("ascend-910c",),
    start_tokens=16384,
    install="install the driver, CANN and torch-npu of torch's version; in a container, mount its devices and driver",
    environment=(
        Setting("HCCL_ASYNC_ERROR_HANDLING", "0", "the watchdog would end survivors that recover in place"),
        Setting("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "batches of many lengths would fragment memory"),
    ),
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    # HcclBatchSendRecv up to CANN 8.5 takes no "duplicate sending or receiving tasks pointed to the same rank".
    single_message_per_peer=True,
    # A 910C package, which names itself 910_93.., has two dies and shows as two devices.
    peak_flops={r"Ascend910(C|_93)\w*": 376e12, r"Ascend910B\w*": 376e12},
)
CPU = DeviceInfo(
    name="cpu",
    backend_module="rayfcp.execute.devices.cpu",
    resource=None,
    group_backend="gloo",
    failures=r"gloo[/\\]|Gloo connect",
    hardware=("cpu",),
    start_tokens=1024,
    install="reinstall torch and rayfcp",
)

DEVICES: dict[str, DeviceInfo] = {info.name: info for info in (CUDA, NPU, CPU)}
"""By name, in the order in which `cluster.device=auto` looks for them."""

AUTO = "auto"


def device_in(resources: Mapping[str, float]) -> DeviceInfo:
    """The kind of device that `cluster.device=auto` takes of these Ray resources."""
    return next((info for info in DEVICES.values() if info.resource and resources.get(info.resource, 0) >= 1), CPU)


def device_of_hardware(profile: str) -> DeviceInfo | None:
    """The kind of device that a named hardware profile is of; None for profiles from files."""
    return next((info for info in DEVICES.values() if profile in info.hardware), None)


def device_of_group_backend(name: str) -> DeviceInfo:
    """The kind of device whose tensors process groups of this torch.distributed backend carry."""
    return next((info for info in DEVICES.values() if info.group_backend == name), CPU)
