"""What happens while a state is evaluated costs no finished step, and changes no result: these are checked for every
run, against an undisturbed one (`SimulatedRun`)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cluster.dataset import Evaluation
from rayfcp.telemetry.events import EventKind
from tests.examples import examples
from tests.simulated.data import GLOBAL_BATCH, NUM_SAMPLES
from tests.simulated.run import Result
from tests.simulated.scenario import ended_well, fault, of, ran
from tests.simulated.schedule import Fault, Kind
from tests.simulated.state import digest, first, loss_of

STEPS, AT = 12, 10
IN_EVALUATION_S = 1.4
"""After the step before it began: a step takes half a second, and ten batches two."""


def evaluated(*faults: Fault, seed: int = 0, every_steps: int | None = 5, **sections: object) -> Result:
    sets = {"val": {"paths": ["none"]}, "code": {"paths": ["none"]}}
    given = {"eval": {"sets": sets, "every_steps": every_steps, "batches": 5}}
    return ran(*faults, steps=STEPS, seed=seed, **{**given, **sections})  # type: ignore[arg-type]


def in_evaluation(kind: Kind) -> Fault:
    return fault(kind, AT, IN_EVALUATION_S)


def steps_with_results(result: Result) -> list[int]:
    return [each.step for each in result.reports if each.eval]


def test_states_are_evaluated_when_they_are_due() -> None:
    for every_steps, steps in ((5, [5, 10, 12]), (4, [4, 8, 12]), (None, [12]), (100, [12])):
        result = evaluated(every_steps=every_steps)
        ended_well(result, steps=STEPS)
        assert steps_with_results(result) == steps
        assert [each.step for each in of(result, EventKind.EVALUATION)] == steps
        assert {tuple(each.eval) for each in result.reports if each.eval} == {("val", "code")}
        assert result.num_planned == STEPS + 10 * len(steps), "batches are planned ahead, once"
    assert not any("evaluat" in line for line in ran(steps=STEPS).lines)


@pytest.mark.parametrize(
    "kind",
    [
        Kind.WORKER_DIES,
        Kind.TWO_WORKERS_DIE,
        Kind.ALL_WORKERS_DIE,
        Kind.NODE_PROCESSES_DIE,
        Kind.WORKER_DEADLOCKS,
        Kind.EXCHANGE_FAILS,
        Kind.EXCHANGE_STUCK,
        Kind.CONNECTION_BREAKS,
    ],
    ids=lambda kind: kind.name.lower(),
)
def test_a_loss_takes_no_finished_step(kind: Kind) -> None:
    """A hang included, which the evaluation's own deadline finds."""
    result = evaluated(in_evaluation(kind), elastic={"min_workers": 1})
    ended_well(result, steps=STEPS)
    assert steps_with_results(result) == [5, 10, 12]
    for recovery in of(result, EventKind.RECOVERY):
        assert (recovery.step, recovery.lost_steps) == (10, 0)
    assert of(result, EventKind.RECOVERY) or kind is Kind.CONNECTION_BREAKS
    assert not any(each.recovered for each in result.reports), "no step runs again"


def test_a_lost_state_is_made_again_and_evaluated() -> None:
    """All copies are gone: steps run again from a checkpoint, and each is in the log once."""
    result = evaluated(in_evaluation(Kind.CHECKPOINT_DAMAGED), checkpoint={"every_steps": 4, "keep": 3})
    ended_well(result, steps=STEPS)
    assert steps_with_results(result) == [5, 10, 12]
    assert of(result, EventKind.RECOVERY)[0].lost_steps > 1


@pytest.mark.parametrize("kind", [Kind.CONTROLLER_DIES, Kind.DRIVER_DIES])
def test_a_lost_controller_evaluates_again(kind: Kind) -> None:
    result = evaluated(in_evaluation(kind), checkpoint={"every_steps": 4, "keep": 3})
    ended_well(result, steps=STEPS)
    assert steps_with_results(result) == [5, 10, 12]
    if kind is Kind.CONTROLLER_DIES:
        assert [each.step for each in of(result, EventKind.START)] == [0, 10], "the step that is evaluated is done"


def test_the_number_of_devices_changes_between_batches() -> None:
    result = evaluated(in_evaluation(Kind.NODE_DRAINS), nodes=(2, 2, 2))
    ended_well(result, steps=STEPS)
    assert steps_with_results(result) == [5, 10, 12]
    first = of(result, EventKind.RESIZE)[0]
    assert "on nodes to be removed" in first.reason and (first.step, first.lost_steps) == (10, 0)
    grown = evaluated(in_evaluation(Kind.NODE_COMES), workers=(1, 8), nodes=(2,), seed=3)
    ended_well(grown, steps=STEPS)
    assert steps_with_results(grown) == [5, 10, 12]


def test_a_dead_planner_is_replaced_by_one_queue_alone() -> None:
    result = evaluated(in_evaluation(Kind.PLANNER_DIES), plan={"planner_actors": 1})
    ended_well(result, steps=STEPS)
    assert sum("planner 0 died" in line for line in result.lines) == 1


def test_a_user_who_stops_gets_the_step_without_results() -> None:
    result = evaluated(in_evaluation(Kind.USER_STOPS))
    assert result.outcome.finished is not None and result.outcome.finished.last_step == AT
    assert [each.step for each in result.reports] == list(range(1, AT + 1))
    assert steps_with_results(result) == [5]
    assert any("evaluation after step 10 stopped after" in line for line in result.lines)


def test_a_full_device_gets_fewer_tokens() -> None:
    result = evaluated(in_evaluation(Kind.MEMORY_SHORT))
    ended_well(result, steps=STEPS)
    assert any("as few tokens in evaluation as in training" in line for line in result.lines)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert (recovery.cause, recovery.lost_steps) == ("memory", 0)


@examples(25)
@given(
    kind=st.sampled_from(
        [Kind.WORKER_DIES, Kind.ALL_WORKERS_DIE, Kind.WORKER_DEADLOCKS, Kind.CONTROLLER_DIES, Kind.PLANNER_DIES]
    ),
    after_s=st.floats(1.0, 8.0),
    seed=st.integers(0, 99),
    draws=st.dictionaries(st.sampled_from(["val", "code"]), st.sets(st.integers(0, NUM_SAMPLES - 1), min_size=12)),
)
def test_a_run_that_only_evaluates_gives_the_sums_of_what_it_was_asked_for(
    kind: Kind, after_s: float, seed: int, draws: dict[str, set[int]]
) -> None:
    """Of the first state, without any copy of it, whatever is lost at whatever time."""
    draws = draws or {"val": set(range(40))}
    asked_for = {name: np.array(sorted(each)) for name, each in draws.items()}
    wanted = Evaluation(sources={}, folders={name: name for name in draws}, draws=asked_for)
    lost = fault(kind, 0, after_s)
    sets = {"val": {"paths": ["none"]}, "code": {"paths": ["none"]}}
    given_sections: dict[str, object] = {
        "train": {"steps": 1},
        "elastic": {"snapshot_every_steps": 0, "min_workers": 1},
        "eval": {"sets": sets},
    }
    result = ran(lost, steps=0, seed=seed, evaluates=wanted, **given_sections)  # type: ignore[arg-type]
    if result.outcome.evaluated is None:  # the run itself checks that it may give up: a worker died at its start
        assert result.outcome.error
        return
    found = result.outcome.evaluated.sums
    assert found.keys() == draws.keys() and not result.outcome.evaluated.terms["val" if "val" in draws else "code"]
    total = digest(first(67))
    for name, asked in draws.items():
        want = [loss_of(total + number) if number in asked else np.nan for number in range(NUM_SAMPLES)]
        assert found[name] == pytest.approx(want, nan_ok=True)
    assert result.num_planned >= sum(-(-len(asked) // GLOBAL_BATCH) for asked in draws.values())
