"""Environment of a worker process that the libraries below torch read."""

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rayfcp.cluster.facts.devices import HostFacts
from rayfcp.cluster.runtime import LOOPBACK
from rayfcp.values.devices import DEVICES

_SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface (netdevice(7))."""


CGROUP = Path("/sys/fs/cgroup")
"""Of the container, where there is one: version 2, or version 1 in `memory`."""


def host_facts(snapshot_dir: str, *, store_bytes: int, copies_bytes: int) -> HostFacts:
    """Memory of this node. `store_bytes`: of Ray's object store; `copies_bytes`: of copies that an earlier start of the
    run left, in whose place new ones come. What the kernel can drop, such as files' pages, is not in use either."""
    page = os.sysconf("SC_PAGE_SIZE")
    limit, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    used = limit - free
    for limit_file, used_file, stat in _cgroup_files():
        with suppress(OSError, ValueError):
            own = int(limit_file.read_text())
            if own < limit:
                inactive = dict(line.split() for line in stat.read_text().splitlines()).get("inactive_file", 0)
                limit, used = own, int(used_file.read_text()) - int(inactive)
    shm = os.statvfs(snapshot_dir)
    return HostFacts(
        limit_bytes=limit,
        used_bytes=used - copies_bytes,
        store_bytes=store_bytes,
        shm_bytes=shm.f_bavail * shm.f_frsize + copies_bytes,
    )


def _cgroup_files() -> list[tuple[Path, Path, Path]]:
    """Files with limit, use and details of the container's memory."""
    old = CGROUP / "memory"
    return [
        (CGROUP / "memory.max", CGROUP / "memory.current", CGROUP / "memory.stat"),
        (old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat"),
    ]


def set_environment(granted: Mapping[str, Sequence[str]]) -> None:
    """Set what the devices' libraries need for recovery in place and for speed, unless the user set it. Must be called
    before torch is imported; variables of devices that are not here do nothing.

    The process sees only the devices that Ray granted it (numbers by resource), also where Ray is told not to see to
    that. NCCL uses peer access to devices of other processes all the same (its `transport/p2p.cc`, CUDA 10.1 or newer).
    """
    for info in DEVICES.values():
        for setting in info.environment:
            os.environ.setdefault(setting.name, setting.value)
        if numbers := granted.get(info.resource or ""):
            os.environ[info.visible_devices] = ",".join(numbers)


def use_interface(host: str, *, own_address: str) -> None:
    """Let gloo and the bootstrap of NCCL and HCCL use the interface with `own_address`, or the loopback if the
    rendezvous is there, unless the user chose one. By itself gloo takes the address of the host's name, which may be
    a loopback on nodes of a cluster, and the others the first interface, which may be a container bridge."""
    names = [name for _, name in socket.if_nameindex()]
    if host == LOOPBACK:
        found = "lo" if "lo" in names else "lo0"
    else:
        found = next((name for name in names if _address_of(name) == own_address), "")
    if found:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        for library in ("NCCL", "HCCL"):  # without the second "=", eth1 would be eth10 and eth11 too
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", f"={found}")


def _address_of(interface: str) -> str:
    """IPv4 address of an interface; empty if it has none, or on systems other than Linux."""
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each, suppress(OSError):
            answer = fcntl.ioctl(each, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    return ""
