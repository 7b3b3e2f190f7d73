"""Schedule of one simulated run: its configuration and its faults, both drawn from the seed."""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Faults, and other things that a cluster does to a run."""

    WORKER_DIES = "worker dies"
    TWO_WORKERS_DIE = "two workers die"
    NEWEST_WORKER_DIES = "newest worker dies"
    ALL_WORKERS_DIE = "all workers die"
    NODE_DIES = "node dies"
    NODE_DRAINS = "node drains"
    NODE_DIES_AS_IT_IS_LEFT = "draining node dies as it is left"
    NODE_COMES = "node comes"
    WORKER_STOPS = "worker is stopped (SIGSTOP)"
    WORKER_DEADLOCKS = "worker deadlocks"
    WORKER_SLOWS = "worker slows down"
    STANDBY_DIES = "process that stands by dies"
    ABORT_HANGS = "worker dies and aborts of others never return"
    EXCHANGE_STUCK = "message of an exchange is lost"
    EXCHANGE_FAILS = "exchange fails"
    NODE_PROCESSES_DIE = "all workers and the store of a node die"
    MEMORY_LOST = "copies of a node are removed and its processes die"
    MEMORY_CLEANED = "copies of a node are removed beneath its processes"
    MEMORY_FULL = "shared memory of a node is full"
    STORE_DIES = "copy store dies"
    STORE_STOPS = "copy store is stopped"
    PLANNER_DIES = "planner dies"
    CONTROLLER_DIES = "controller dies"
    CONTROLLER_DIES_WRITING = "controller dies in a file operation"
    DRIVER_DIES = "driver dies and is started again"
    DISK_FULL = "disk is full"
    CONNECTION_BREAKS = "connection to a worker or planner breaks"
    MESSAGES_LATE = "messages are late"
    START_FAILS = "new worker does not start"
    START_HANGS = "new worker hangs while it starts"
    CHECKPOINT_DAMAGED = "checkpoint is damaged and all copies are lost"
    MEMORY_SHORT = "device runs out of memory"
    PROGRAM_FAILS = "program of a worker fails"
    USER_STOPS = "user stops the run"


HARMLESS = frozenset(
    {
        Kind.NODE_COMES,
        Kind.WORKER_SLOWS,
        Kind.STORE_DIES,
        Kind.STANDBY_DIES,
        Kind.PLANNER_DIES,
        Kind.DISK_FULL,
        Kind.MEMORY_FULL,
        Kind.MEMORY_CLEANED,
        Kind.USER_STOPS,
    }
)
"""After these no step has to run again."""

SINGLE = frozenset(
    {
        Kind.WORKER_DIES,
        Kind.NEWEST_WORKER_DIES,
        Kind.WORKER_STOPS,
        Kind.WORKER_DEADLOCKS,
        Kind.ABORT_HANGS,
        Kind.MEMORY_SHORT,
        Kind.EXCHANGE_STUCK,
        Kind.EXCHANGE_FAILS,
        Kind.CONNECTION_BREAKS,
    }
)
"""One of these alone takes no finished step, or one that falls between two."""

WEIGHT = {Kind.USER_STOPS: 0.3, Kind.PROGRAM_FAILS: 0.2, Kind.ALL_WORKERS_DIE: 0.5, Kind.CHECKPOINT_DAMAGED: 0.6}


LAYOUTS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"pipeline_stages": 2}, {"tensor_parallel": 2})
"""Parallel layouts that runs with at least four workers draw from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`kind` happens `after_s` after a device first begins `step`; with step 0 after the fault before it, or, for the
    first one, after the start."""

    kind: Kind
    step: int
    after_s: float
    lasts_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run. `nodes`: devices of each node at the start; `skipped`: steps whose loss is not finite; `push_s`: what a
    worker takes to send half of a copy; `plan_spread`: how far the time of a plan differs from `plan_s`, relatively."""

    seed: int
    num_steps: int
    num_workers: tuple[int, int]
    nodes: tuple[int, ...]
    faults: tuple[Fault, ...]
    sections: dict[str, dict[str, Any]]
    skipped: frozenset[int]
    step_s: float
    plan_s: float
    push_s: float
    plan_spread: float = 0.5

    def __str__(self) -> str:
        faults = "; ".join(f"{each.kind} (step {each.step}, {each.after_s:.2f} s)" for each in self.faults)
        return f"seed {self.seed}: {self.num_steps} steps of {self.num_workers} workers on nodes {self.nodes}: {faults}"


def draw(seed: int, *, kinds: tuple[Kind, ...] = tuple(Kind)) -> Schedule:
    """The schedule of a seed: mostly few workers and few steps, with one to five faults."""
    rng = random.Random(f"schedule {seed}")
    most = _workers(rng)
    least = rng.choice([1, max(1, most // 2), most])
    nodes = _nodes(rng, most)
    num_steps = rng.randint(4, 8)
    count = rng.choice([1, 1, 2, 2, 3, 4, 5])
    weights = [WEIGHT.get(kind, 1.0) for kind in kinds]
    step_s = rng.choice([0.05, 0.2, 0.5])
    faults = tuple(
        Fault(
            kind=kind,
            step=0 if rng.random() < (0.4 if number else 0.15) else rng.randint(1, num_steps),
            after_s=_delay_s(rng, step_s) if number else rng.choice([_delay_s(rng, step_s), rng.uniform(0.0, 5.0)]),
            lasts_s=rng.choice([0.3, 3.0, 8.0, 20.0]),
        )
        for number, kind in enumerate(rng.choices(kinds, weights, k=count))
    )
    every = rng.choice([1, 1, "auto", 2, 3, 0])
    skipped = frozenset({rng.randint(1, num_steps)}) if rng.random() < 0.1 else frozenset()
    sections = {
        "train": {"steps": num_steps, "on_nonfinite": "skip"},
        "checkpoint": {"every_steps": rng.choice([None, 1, 2, 3, 5]), "keep": rng.choice([1, 2])},
        "elastic": {
            "snapshot_every_steps": every,
            "wait_s": 120.0,
            "hang_min_s": rng.choice([5.0, 10.0]),
            "hang_factor": 5.0,
            "look_every_s": rng.choice([0.5, 1.0]),
            "start_timeout_s": 60.0,
            "orphan_s": 20.0,
            "controller_restarts": 3,
            "max_recoveries": 8,
            "recovery": rng.choice(["auto", "auto", "in_place", "fresh_processes"]),
            "leave_timeout_s": rng.choice([2.0, 5.0]),
            "rebuild_timeout_s": rng.choice([5.0, 30.0]),
            "standby_workers": rng.choice([0, 0, 1, most]),
        },
        "plan": {"lookahead_steps": rng.choice([1, 2, 3]), "planner_actors": rng.choice([1, 2])},
    }
    plan_s = rng.choice([0.01, 0.1, 1.0])
    push_s = rng.choice([0.0, 0.0, step_s, 4 * step_s])
    if rng.random() < 0.3:
        sections["plan"] = {"lookahead_steps": "auto", "planner_actors": [1, 3]}
    if most >= 4:
        sections["cluster"] = rng.choice(LAYOUTS)
        least = max(least, 2) if sections["cluster"] else least
    if evaluation := _evaluation(random.Random(f"evaluation {seed}")):
        sections["eval"] = evaluation
    return Schedule(
        seed=seed,
        num_steps=num_steps,
        num_workers=(least, most),
        nodes=nodes,
        faults=faults,
        sections=sections,
        skipped=skipped,
        step_s=step_s,
        plan_s=plan_s,
        push_s=push_s,
    )


def _evaluation(rng: random.Random) -> dict[str, Any]:
    """Mostly none; drawn apart, so that everything else of a schedule stays as it is."""
    if rng.random() < 0.6:
        return {}
    names = rng.choice([("val",), ("val", "code")])
    return {
        "sets": {name: {"paths": ["none"]} for name in names},
        "every_steps": rng.choice([None, 1, 1, 2, 3]),
        "batches": rng.choice([1, 2, 5]),
    }


def _workers(rng: random.Random) -> int:
    return rng.choice([2, 2, 3, 3, 4, 4, 5, 6, 8]) if rng.random() < 0.96 else rng.choice([12, 16, 32, 64])


def _nodes(rng: random.Random, workers: int) -> tuple[int, ...]:
    """Devices of each node: some nodes, together with at least as many devices as workers, a few to spare."""
    count = rng.randint(1, min(4, workers))
    shares = [workers // count + (number < workers % count) for number in range(count)]
    if rng.random() < 0.5:
        shares[rng.randrange(count)] += rng.randint(1, 2)
    return tuple(shares)


def _delay_s(rng: random.Random, step_s: float) -> float:
    """Somewhere in a step, in the exchange at its end, or in the recovery that follows."""
    return rng.choice([0.0, rng.uniform(0, step_s), step_s + rng.uniform(0, 0.05), rng.uniform(0, 3.0)])
