"""Records that workers of any trainer write of their steps, faults at chosen steps, and what each fault cost.

Workers append moments to a file of their own, stamped with the machine's clock, so that stall and lost steps of
different trainers are read off in the same way.
"""

import json
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

POLL_S = 0.01
BEGAN, ENDED = "began", "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Device `number` of `num_devices` began or ended a step. `at_s`: seconds since the epoch."""

    what: str
    step: int
    number: int
    num_devices: int
    pid: int
    node_id: str
    at_s: float


class Moments:
    """Appends the moments of this process to `folder`, a line each; what was written outlives the process."""

    def __init__(self, folder: str | Path, *, node_id: str) -> None:
        self._path, self._node_id = Path(folder) / f"{os.getpid()}.jsonl", node_id

    def add(self, what: str, step: int, *, number: int, num_devices: int) -> None:
        moment = Moment(
            what=what,
            step=step,
            number=number,
            num_devices=num_devices,
            pid=os.getpid(),
            node_id=self._node_id,
            at_s=time.time(),
        )
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(moment)) + "\n")


def read_moments(folder: str | Path) -> list[Moment]:
    """All moments in order; a line that is being written is left out."""
    lines = [line for path in Path(folder).glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return sorted((Moment(**json.loads(line)) for line in lines), key=lambda moment: moment.at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A loss that was brought about while `step` ran. `at_s`: seconds since the epoch."""

    step: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a fault.

    `stall_s`: from the fault to the start of the first step that ran wholly after it. `back_s`: to the start of the
    first step that had not been finished before it. `lost_steps`: finished steps that were executed again. A step is
    finished once a device has begun the next one; until then, what a device reports of it may die with the device.
    """

    step: int
    stall_s: float
    back_s: float
    lost_steps: int


def cost_of(fault: Fault, moments: Sequence[Moment]) -> Cost:
    """
    Raises:
        ValueError: no step was finished after the fault.
    """
    began: dict[tuple[int, int], float] = {}
    ended_by: dict[int, set[int]] = defaultdict(set)
    after: list[tuple[float, int]] = []
    for moment in moments:
        key = (moment.pid, moment.step)
        if moment.what == BEGAN:
            began[key] = moment.at_s
        elif began[key] <= fault.at_s:
            ended_by[moment.step].add(moment.pid)
        else:
            after.append((began[key], moment.step))
    devices = {moment.step: moment.num_devices for moment in moments if moment.at_s <= fault.at_s}
    newest = max(devices, default=0)
    ended = (step for step, pids in ended_by.items() if step < newest and len(pids) >= devices[step])
    finished = max(ended, default=0)
    if not any(step > finished for _, step in after):
        raise ValueError(f"no step was finished after the fault in step {fault.step}; let the run go on for longer")
    first_s, first_step = min(after)
    return Cost(
        step=fault.step,
        stall_s=first_s - fault.at_s,
        back_s=min(at_s for at_s, step in after if step > finished) - fault.at_s,
        lost_steps=max(0, finished - first_step + 1),
    )


class FaultInjector(Protocol):
    """Brings losses about."""

    def can_inject(self, moment: Moment) -> bool:
        """True if the device of the moment can be lost."""
        ...

    def inject(self, moment: Moment) -> None:
        """Lose the device."""
        ...

    def mend(self) -> None:
        """Give back what was lost, where the trainer does not do so itself."""
        ...


class RandomFaults(threading.Thread):
    """Injects one fault in each of `steps`, at a random moment of it, when all its devices have begun it; moments and
    victims are drawn from the seed."""

    def __init__(self, folder: str | Path, *, steps: Sequence[int], seed: int, injector: FaultInjector) -> None:
        super().__init__(name="faults", daemon=True)
        self._folder, self._steps, self._injector = folder, list(steps), injector
        self._rng, self._ended = random.Random(seed), threading.Event()
        self.faults: list[Fault] = []

    def run(self) -> None:
        for step in self._steps:
            running = [moment for moment in self._await(step) if self._injector.can_inject(moment)]
            if not running:
                return
            self._ended.wait(self._rng.random() * self._usual_s())
            target = running[self._rng.randrange(len(running))]
            at_s = time.time()
            self._injector.inject(target)
            self.faults.append(Fault(step=step, at_s=at_s))
            self._injector.mend()

    def end(self) -> None:
        """End the injection of faults."""
        self._ended.set()
        self.join()

    def _await(self, step: int) -> list[Moment]:
        """The beginnings of the step by all devices that take part; none if the injection ends before."""
        while not self._ended.wait(POLL_S):
            found = [moment for moment in read_moments(self._folder) if moment.what == BEGAN and moment.step == step]
            if found and len(found) >= found[-1].num_devices:
                return sorted(found, key=lambda moment: moment.number)
        return []

    def _usual_s(self) -> float:
        """The last whole step that one process saw."""
        began: dict[tuple[int, int], float] = {}
        seconds = 0.0
        for moment in read_moments(self._folder):
            if moment.what == BEGAN:
                began[moment.pid, moment.step] = moment.at_s
            else:
                seconds = moment.at_s - began[moment.pid, moment.step]
        return seconds


def kill_process(moment: Moment) -> None:
    """SIGKILL of the device's process."""
    os.kill(moment.pid, signal.SIGKILL)
