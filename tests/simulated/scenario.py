"""Runs to which one thing happens, written down instead of drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayfcp.cluster.dataset import Evaluation
from rayfcp.cluster.runtime import Role
from rayfcp.telemetry.events import Event, EventKind
from tests.simulated.run import Result, simulate
from tests.simulated.schedule import Fault, Kind, Schedule

ELASTIC = {
    "snapshot_every_steps": 1,
    "wait_s": 60.0,
    "hang_min_s": 5.0,
    "hang_factor": 5.0,
    "look_every_s": 0.5,
    "start_timeout_s": 60.0,
    "orphan_s": 20.0,
    "controller_restarts": 2,
    "max_recoveries": 5,
}


def ran(
    *faults: Fault,
    steps: int = 30,
    workers: tuple[int, int] = (1, 4),
    nodes: Sequence[int] = (2, 2),
    seed: int = 0,
    skipped: frozenset[int] = frozenset(),
    plan_s: float = 0.05,
    push_s: float = 0.05,
    plan_spread: float = 0.5,
    folder: Path | None = None,
    never_starts: frozenset[Role] = frozenset(),
    interrupts: int = 0,
    trace: list[str] | None = None,
    evaluates: Evaluation | None = None,
    **sections: dict[str, Any],
) -> Result:
    """A run of steps of half a second, a copy after each."""
    return simulate(
        Schedule(
            seed=seed,
            num_steps=steps,
            num_workers=workers,
            nodes=tuple(nodes),
            faults=faults,
            sections={
                "train": {"steps": steps, "on_nonfinite": "skip"} | sections.get("train", {}),
                "checkpoint": sections.get("checkpoint", {}),
                "cluster": sections.get("cluster", {}),
                "elastic": ELASTIC | sections.get("elastic", {}),
                "eval": sections.get("eval", {}),
                "plan": {"lookahead_steps": 2, "planner_actors": 2} | sections.get("plan", {}),
            },
            skipped=skipped,
            step_s=0.5,
            plan_s=plan_s,
            push_s=push_s,
            plan_spread=plan_spread,
        ),
        folder=folder,
        never_starts=never_starts,
        interrupts=interrupts,
        trace=trace,
        evaluates=evaluates,
    )


def fault(kind: Kind, step: int, after_s: float = 0.2, *, lasts_s: float = 20.0) -> Fault:
    return Fault(kind=kind, step=step, after_s=after_s, lasts_s=lasts_s)


def of(result: Result, kind: EventKind) -> list[Event]:
    return [each for each in result.events if each.kind is kind]


def ended_well(result: Result, *, steps: int = 30) -> None:
    assert result.outcome.finished is not None, result.outcome
    assert result.outcome.finished.last_step == steps
    assert [each.step for each in result.reports] == list(range(1, steps + 1))
