"""Named hardware profiles: data-sheet peaks, and the shares of them that large kernels reach."""

from rayfcp.plan.words import pick
from rayfcp.values import HardwareProfile

GIB = 1 << 30

_PROFILES = (
    HardwareProfile(
        name="cpu",
        peak_flops=6e10,
        memory_bytes=4 * GIB,
        linear_efficiency=0.5,
        attention_efficiency=0.4,
        devices_per_node=64,
        intra_node_bandwidth=1e9,
        inter_node_bandwidth=1e9,
        latency_s=2e-4,
        microbatch_overhead_s=1e-2,
        dtype_bytes=4,
        overlap=0.0,
        source="one x86 server thread: fp32 matrix product 51-56 GFLOP/s, flash attention 30-41 GFLOP/s measured "
        "at sizes 512-4096; links: gloo over loopback or 10 Gb/s Ethernet, assumed; no overlap: the cores that compute "
        "also move the bytes",
    ),
    HardwareProfile(
        name="h100",
        peak_flops=989.4e12,
        memory_bytes=80 * GIB,
        linear_efficiency=0.65,
        attention_efficiency=0.5,
        devices_per_node=8,
        intra_node_bandwidth=450e9,
        inter_node_bandwidth=50e9,
        latency_s=1e-5,
        microbatch_overhead_s=5e-3,
        source="NVIDIA H100 SXM5 data sheet: bf16 dense, NVLink 4 at 900 GB/s both ways; one 400 Gb/s port a GPU; "
        "efficiencies and overheads assumed",
    ),
    HardwareProfile(
        name="h200",
        peak_flops=989.4e12,
        memory_bytes=140 * GIB,
        linear_efficiency=0.65,
        attention_efficiency=0.5,
        devices_per_node=8,
        intra_node_bandwidth=450e9,
        inter_node_bandwidth=50e9,
        latency_s=1e-5,
        microbatch_overhead_s=5e-3,
        source="NVIDIA H200 SXM data sheet: bf16 dense, 141 GB (about 140 GiB usable), NVLink 4 at 900 GB/s both "
        "ways; one 400 Gb/s port a GPU; efficiencies and overheads assumed",
    ),
    HardwareProfile(
        name="a800",
        peak_flops=312e12,
        memory_bytes=80 * GIB,
        linear_efficiency=0.7,
        attention_efficiency=0.55,
        devices_per_node=8,
        intra_node_bandwidth=200e9,
        inter_node_bandwidth=25e9,
        latency_s=1e-5,
        microbatch_overhead_s=5e-3,
        source="NVIDIA A800 SXM data sheet: bf16 dense, NVLink at 400 GB/s both ways; one 200 Gb/s port a GPU; "
        "efficiencies and overheads assumed",
    ),
    HardwareProfile(
        name="ascend-910c",
        peak_flops=376e12,
        memory_bytes=64 * GIB,
        linear_efficiency=0.6,
        attention_efficiency=0.45,
        devices_per_node=16,
        intra_node_bandwidth=196e9,
        inter_node_bandwidth=25e9,
        latency_s=2e-5,
        microbatch_overhead_s=5e-3,
        source="one die, as in Flexible Context Parallelism section 6.1 (16 a node, 64 GB each); half of the "
        "package's published 752 TFLOP/s bf16, 196 GB/s unified bus and 200 Gb/s RDMA a die; efficiencies and "
        "overheads assumed",
    ),
)

HARDWARE = {profile.name: profile for profile in _PROFILES}


def hardware_profile(name: str) -> HardwareProfile:
    """The profile of that name.

    Raises:
        ValueError: unknown; names the nearest known one.
    """
    return HARDWARE[pick(name, HARDWARE, what="hardware")]
