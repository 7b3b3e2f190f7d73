"""Leftovers of a run: actors and their processes, Ray's reservations, listening ports. Linux only: reads /proc."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.state import actors
from ray.util import list_named_actors, placement_group_table

GONE = ("DEAD",)
LISTENING = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """An actor that Ray knows. `pid` is 0 before it has a process."""

    class_name: str
    state: str
    pid: int
    node_id: str

    @property
    def is_alive(self) -> bool:
        return self.state not in GONE


def all_actors() -> list[Actor]:
    """The living and the dead, in the order of their processes. The public state API needs a dashboard; this does
    not."""
    found = [
        Actor(
            class_name=each["ActorClassName"].rpartition(".")[2],
            state=each["State"],
            pid=each["Pid"],
            node_id=each["Address"]["NodeID"],
        )
        for each in actors().values()
    ]
    return sorted(found, key=lambda actor: actor.pid)


def living(class_name: str) -> list[Actor]:
    """Actors of a class, or of all whose class name ends so, that have a process."""
    return [each for each in all_actors() if each.class_name.endswith(class_name) and each.is_alive and each.pid]


def is_running(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def listening_ports(pids: Iterable[int]) -> dict[int, set[int]]:
    """TCP ports on which each of these processes listens; a process that is gone listens on none."""
    port_of = {}
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == LISTENING:
                port_of[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return {pid: {port_of[inode] for inode in _sockets(pid) if inode in port_of} for pid in pids}


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except (FileNotFoundError, PermissionError):
        return set()
    return found


def reservations() -> list[str]:
    """Placement groups that have not been given back."""
    return [name for name, each in placement_group_table().items() if each["state"] != "REMOVED"]


def named_actors() -> list[str]:
    return [str(each) for each in list_named_actors(all_namespaces=True)]


def nodes_alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
