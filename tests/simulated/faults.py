"""Injection of a schedule's faults."""

from typing import TYPE_CHECKING

from rayfcp.cluster.runtime.lifetime import STANDBY
from tests.simulated.schedule import Fault, Kind
from tests.simulated.world import HEAD, Actor, Node, Process

if TYPE_CHECKING:
    from tests.simulated.run import SimulatedRun

MOST_NODES = 12


def _stands_by(actor: Actor) -> bool:
    """True for a process beside a worker, which has not taken its place yet."""
    return f"/{STANDBY}/" in actor.process.name and (actor.instance is None or actor.instance.facts() is None)


class Injector:
    """Carries out the faults of one run, each once. `happened`: kinds in the order in which they came about."""

    def __init__(self, run: "SimulatedRun") -> None:
        self._run, self._world = run, run.world
        self._left = list(run.schedule.faults)
        self._is_armed = False
        self.happened: list[Kind] = []
        if self._left and self._left[0].step == 0:
            self._arm()

    def on_step(self, step: int) -> None:
        """A device begins a step."""
        if not self._is_armed and self._left and self._left[0].step <= step:
            self._arm()

    def _arm(self) -> None:
        fault, self._is_armed = self._left.pop(0), True

        def inject() -> None:
            self._is_armed = False
            self._world.note(f"fault: {fault.kind}")
            self.happened.append(fault.kind)
            self._strike(fault)
            if self._left and self._left[0].step == 0:
                self._arm()

        self._world.at(fault.after_s, inject)

    def _strike(self, fault: Fault) -> None:
        getattr(self, f"_{fault.kind.name.lower()}")(fault)

    # Workers.

    def _some(self, kind: str, count: int = 1) -> list[Actor]:
        found = [each for each in self._world.living(kind) if not _stands_by(each)]
        return self._world.random.sample(found, min(count, len(found)))

    def _kill(self, kind: str, count: int) -> None:
        for actor in self._some(kind, count):
            self._world.kill(actor.process, "fault")

    def _worker_dies(self, fault: Fault) -> None:
        self._kill("worker", 1)

    def _two_workers_die(self, fault: Fault) -> None:
        self._kill("worker", 2)

    def _newest_worker_dies(self, fault: Fault) -> None:
        """Kill the newest worker, which replaced the last, as on a broken device."""
        for actor in self._world.living("worker")[-1:]:
            self._world.kill(actor.process, "fault")

    def _all_workers_die(self, fault: Fault) -> None:
        self._kill("worker", len(self._world.living("worker")))

    def _worker_stops(self, fault: Fault) -> None:
        for actor in self._some("worker"):
            self._stop(actor.process, fault.lasts_s)

    def _worker_deadlocks(self, fault: Fault) -> None:
        for actor in self._some("worker"):
            if actor.instance is not None:
                actor.instance.deadlock()

    def _standby_dies(self, fault: Fault) -> None:
        for actor in [each for each in self._world.living("worker") if _stands_by(each)][:1]:
            self._world.kill(actor.process, "fault")

    def _abort_hangs(self, fault: Fault) -> None:
        survivors = len(self._some("worker", MOST_NODES)) - 1
        self._run.behavior.hanging_aborts = self._world.random.randint(1, max(1, survivors))
        self._kill("worker", 1)

    def _worker_slows(self, fault: Fault) -> None:
        for actor in self._some("worker"):
            if actor.instance is not None:
                self._run.behavior.slowness[actor.instance.id] = self._world.random.choice([1.5, 3.0])

    def _start_fails(self, fault: Fault) -> None:
        self._run.hooks.never_opens += 1
        self._kill("worker", 1)

    def _start_hangs(self, fault: Fault) -> None:
        self._run.hooks.hangs_opening += 1
        self._kill("worker", 1)

    def _exchange_stuck(self, fault: Fault) -> None:
        self._run.behavior.stuck_steps.add(self._run.step + 1)

    def _exchange_fails(self, fault: Fault) -> None:
        self._run.behavior.failing_steps.add(self._run.step + 1)

    def _memory_short(self, fault: Fault) -> None:
        self._run.behavior.short_steps.add(self._run.step + 1)

    def _program_fails(self, fault: Fault) -> None:
        self._run.behavior.broken_steps.add(self._run.step + 1)

    def _connection_breaks(self, fault: Fault) -> None:
        for actor in self._some("worker" if self._world.random.random() < 0.7 else "planner"):
            actor.drop_calls()

    # Memory of nodes.

    def _node_processes_die(self, fault: Fault) -> None:
        """But the node lives, and its memory."""
        self._end_processes_of(self._some_node())

    def _memory_lost(self, fault: Fault) -> None:
        """As after a restart of the machine, or by somebody who tidies up."""
        node = self._some_node()
        if node is not None:
            self._end_processes_of(node)
            self._run.memory.lose(node.id)

    def _memory_cleaned(self, fault: Fault) -> None:
        node = self._some_node()
        if node is not None:
            self._run.memory.lose(node.id)

    def _memory_full(self, fault: Fault) -> None:
        node = self._some_node()
        if node is not None:
            self._run.memory.full.add(node.id)
            self._world.at(fault.lasts_s, lambda: self._run.memory.full.discard(node.id))

    def _end_processes_of(self, node: Node | None) -> None:
        for actor in [*self._world.living("worker"), *self._world.living("store")]:
            if node is not None and actor.process.node == node.id:
                self._world.kill(actor.process, "fault")

    # Others.

    def _store_dies(self, fault: Fault) -> None:
        self._kill("store", 1)

    def _store_stops(self, fault: Fault) -> None:
        for actor in self._some("store"):
            self._stop(actor.process, fault.lasts_s)

    def _planner_dies(self, fault: Fault) -> None:
        self._kill("planner", 1)

    def _controller_dies(self, fault: Fault) -> None:
        self._kill("controller", 1)

    def _driver_dies(self, fault: Fault) -> None:
        """Kill the driver and the controller, which it owns."""
        self._world.kill(self._run.driver, "fault")

    def _controller_dies_writing(self, fault: Fault) -> None:
        self._run.disk.kill_after = self._world.random.randint(1, 12)

    def _user_stops(self, fault: Fault) -> None:
        self._run.stop()

    def _messages_late(self, fault: Fault) -> None:
        before = self._world.delay_s
        self._world.delay_s = self._world.random.choice([0.05, 0.5, 2.0])
        self._world.at(fault.lasts_s, lambda: setattr(self._world, "delay_s", before))

    def _disk_full(self, fault: Fault) -> None:
        self._run.disk.full = True
        self._world.at(fault.lasts_s, lambda: setattr(self._run.disk, "full", False))

    def _checkpoint_damaged(self, fault: Fault) -> None:
        """All that is in memory is lost as well, so that a checkpoint has to be read."""
        self._run.damage_newest_checkpoint()
        self._kill("store", len(self._world.living("store")))
        self._kill("worker", len(self._world.living("worker")))
        for node in self._world.nodes:
            self._run.memory.lose(node)

    # Nodes.

    def _node_dies(self, fault: Fault) -> None:
        node = self._some_node()
        if node is not None:
            self._world.kill_node(node)
            self._replace(node.slots)

    def _node_drains(self, fault: Fault) -> None:
        self._drain(fault)

    def _node_dies_as_it_is_left(self, fault: Fault) -> None:
        """Earlier than it was announced."""
        node = self._drain(fault)
        if node is not None:

            def leaves() -> None:
                self._run.behavior.on_leave = lambda: None
                self._world.at(self._world.random.uniform(0.0, 0.3), lambda: self._world.kill_node(node))

            self._run.behavior.on_leave = leaves

    def _drain(self, fault: Fault) -> Node | None:
        node = self._some_node()
        if node is None:
            return None
        node.drained_at_s = self._world.now_s + fault.lasts_s
        self._world.note(f"node {node.id} drains")
        self._world.at(fault.lasts_s, lambda: self._world.kill_node(node))
        self._replace(node.slots)
        return node

    def _some_node(self) -> Node | None:
        """One that is to stay, with devices in use where there is one."""
        nodes = [
            node for node in self._world.nodes.values() if node.alive and node.id != HEAD and node.drained_at_s is None
        ]
        used = [node for node in nodes if node.taken]
        return self._world.random.choice(used or nodes) if nodes else None

    def _node_comes(self, fault: Fault) -> None:
        if len(self._world.nodes) < MOST_NODES:
            self._world.add_node(self._world.random.randint(1, 4))

    def _replace(self, slots: int) -> None:
        """Mostly another node comes for one that goes, sooner or later."""
        if self._world.random.random() < 0.8:
            self._world.at(self._world.random.uniform(0.0, 60.0), lambda: self._world.add_node(slots))

    def _stop(self, process: Process, lasts_s: float) -> None:
        """Half of the stopped processes go on after a while."""
        self._world.freeze(process)
        if self._world.random.random() < 0.5:
            self._world.at(lasts_s, lambda: self._world.thaw(process))
