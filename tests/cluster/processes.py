"""Processes that this one has started, and what they started: never those of other tests on the machine."""

import os
import sys
from pathlib import Path

HEEDING_CTRL_C = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)
"""Before a command: Ctrl-C ends it as in a terminal, although the tests may have been started where it is ignored."""


def descendants(name: str) -> list[int]:
    """Ids of living processes below this one whose command line begins with `name`, such as `ray::Planner`."""
    children: dict[int, list[int]] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        found += [each for each in below if lines[each].startswith(name)]
    return sorted(found)


def marked(variable: str) -> dict[int, str]:
    """Command lines of living processes whose environment began with this, NAME=VALUE. Those that rename themselves
    lose it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        except OSError:
            continue
    return found


def lives(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
