"""Injection of each kind of fault into a run that trains on this machine."""

import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jobs.bench.faults import Moment
from rayfcp.cluster.checkpoints.folder import CheckpointFolder
from rayfcp.cluster.recovery.history import History
from tests.chaos.clusters import ManyNodes, OneNode
from tests.chaos.commands import Command, Commands
from tests.chaos.leftovers import living
from tests.chaos.progress import Progress
from tests.chaos.schedule import Kind

NOTICE_S = 60.0
"""Notice that a preempted node gets."""

Victim = TypeVar("Victim")


class FaultActions:
    """Injects faults; each injection returns a description of what it hit."""

    def __init__(self, progress: Progress, *, cluster: OneNode | ManyNodes) -> None:
        self._progress, self._cluster = progress, cluster
        self._commands = Commands.of(progress.run_dir)
        self._of_kind: dict[Kind, Callable[[int], str]] = {
            Kind.KILL: self._kill,
            Kind.STOP: self._stop,
            Kind.TWO_KILLS: self._kill_two,
            Kind.KILL_IN_RECOVERY: self._kill_in_recovery,
            Kind.NODE_REMOVAL: self._remove_node,
            Kind.DRAIN: self._drain,
            Kind.NODE_JOINS: lambda _: f"node {self._nodes.join()[:8]}",
            Kind.DELAY: lambda _: self._command(Command.DELAY),
            Kind.DROP: lambda _: self._command(Command.DROP),
            Kind.FULL_DISK: lambda _: self._command(Command.FULL_DISK),
            Kind.TORN_FILE: self._tear,
            Kind.PLANNER_KILL: lambda target: self._kill_actor("Planner", target),
            Kind.STORE_KILL: lambda target: self._kill_actor("CopyStore", target),
            Kind.CONTROLLER_KILL: lambda target: self._kill_actor("Controller", target),
        }

    def inject(self, kind: Kind, *, target: int) -> str:
        """
        Raises:
            TimeoutError: no target exists.
        """
        return self._of_kind[kind](target)

    def _kill(self, target: int) -> str:
        return self._signal(target, signal.SIGKILL)

    def _stop(self, target: int) -> str:
        return self._signal(target, signal.SIGSTOP)

    def _signal(self, target: int, sent: signal.Signals) -> str:
        victim = _drawn(self._in_use(), target)
        os.kill(victim.pid, sent)
        return _named(victim)

    def _kill_two(self, target: int) -> str:
        first, second = random.Random(target).sample(self._in_use(), 2)
        os.kill(first.pid, signal.SIGKILL)
        os.kill(second.pid, signal.SIGKILL)
        return f"{_named(first)} and {_named(second)}"

    def _kill_in_recovery(self, target: int) -> str:
        """One dies, and one of the others when it joins the generation after."""
        self._commands.give(Command.DIE_WHILE_JOINING)
        what = self._kill(target)
        self._await_taken(Command.DIE_WHILE_JOINING)
        return f"{what}, then one that joined"

    def _command(self, command: Command) -> str:
        self._commands.give(command)
        self._await_taken(command)
        return "by a worker"

    def _kill_actor(self, class_name: str, target: int) -> str:
        victim = _drawn(self._progress.until(lambda: living(class_name), what=f"a {class_name} to be there"), target)
        os.kill(victim.pid, signal.SIGKILL)
        return f"{class_name} {victim.pid}"

    def _tear(self, target: int) -> str:
        """The newest checkpoint loses the end of a file, then nothing is left in memory: an older one must do."""
        folder = CheckpointFolder(self._progress.run_dir / "checkpoints", keep=1)
        newest = self._progress.until(lambda: folder.complete()[1:], what="two checkpoints to be there")[-1]
        torn = _drawn(sorted(newest.glob("*.distcp")), target)
        os.truncate(torn, torn.stat().st_size // 2)
        for each in (*living("CopyStore"), *living("Worker")):
            os.kill(each.pid, signal.SIGKILL)
        forget_memory(self._progress.run_dir)
        return f"{newest.name}/{torn.name}, all workers and copy stores killed and their copies removed"

    def _remove_node(self, target: int) -> str:
        victim = _drawn(self._on_nodes(), target)
        self._nodes.remove(victim.node_id)
        forget_memory(self._progress.run_dir, node_id=victim.node_id)
        return f"node {victim.node_id[:8]} with {_named(victim)}"

    def _drain(self, target: int) -> str:
        """The node goes when it is not in use any more, or at its time."""
        victim = _drawn(self._on_nodes(), target)
        self._nodes.announce(victim.node_id, in_s=NOTICE_S)
        left_s = self._progress.within(NOTICE_S, lambda: self._progress.gone(victim.pid))
        self._nodes.remove(victim.node_id)
        forget_memory(self._progress.run_dir, node_id=victim.node_id)
        return f"node {victim.node_id[:8]} with {_named(victim)}, left after {left_s:.1f} of {NOTICE_S:.0f} s"

    @property
    def _nodes(self) -> ManyNodes:
        assert isinstance(self._cluster, ManyNodes), "faults of nodes need nodes"
        return self._cluster

    def _in_use(self) -> list[Moment]:
        """Devices in use, at least two, so that one survives."""
        return self._progress.until(lambda: self._progress.running(at_least=2), what="two devices in use")

    def _on_nodes(self) -> list[Moment]:
        """Devices on nodes that can be taken away."""
        return self._progress.until(
            lambda: [each for each in self._progress.running(at_least=2) if each.node_id in self._nodes.removable],
            what="a device on a node that can go",
        )

    def _await_taken(self, command: Command) -> None:
        try:
            self._progress.until(lambda: self._commands.is_taken(command), what=f"a worker to {command}")
        finally:
            self._commands.withdraw(command)


def _drawn(victims: Sequence[Victim], target: int) -> Victim:
    return victims[target % len(victims)]


def _named(moment: Moment) -> str:
    return f"device {moment.number} of {moment.num_devices}, process {moment.pid}"


def forget_memory(run_dir: Path, *, node_id: str = "*") -> None:
    """Remove the copies of a run's state on a node, or on all. Nodes of these tests are on one machine, whose memory
    outlives them."""
    for folder in run_dir.parent.glob(f"rayfcp-*/*-{History(run_dir).run}/{node_id}"):
        shutil.rmtree(folder, ignore_errors=True)
