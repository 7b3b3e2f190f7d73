"""Environment of a worker process that the libraries below torch read."""

import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress

from rayfcp.cluster.workers.facts import LOOPBACK
from rayfcp.values.devices import DEVICES

_SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface (netdevice(7))."""


def set_environment() -> None:
    """Set what the devices' libraries need for recovery in place and for speed, unless the user set it. Must be called
    before torch is imported; variables of devices that are not here do nothing."""
    for info in DEVICES.values():
        for setting in info.environment:
            os.environ.setdefault(setting.name, setting.value)


def use_interface(host: str, *, own_address: str) -> None:
    """Let gloo and NCCL's bootstrap use the interface with `own_address`, or the loopback if the rendezvous is there,
    unless the user chose one. By themselves they take the address of the host's name, which may be a loopback on nodes
    of a cluster, and NCCL the first interface, which may be a container bridge."""
    names = [name for _, name in socket.if_nameindex()]
    if host == LOOPBACK:
        found = "lo" if "lo" in names else "lo0"
    else:
        found = next((name for name in names if _address_of(name) == own_address), "")
    if found:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", found)


def _address_of(interface: str) -> str:
    """IPv4 address of an interface; empty if it has none, or on systems other than Linux."""
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each, suppress(OSError):
            answer = fcntl.ioctl(each, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    return ""
