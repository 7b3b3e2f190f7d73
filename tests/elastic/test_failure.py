"""Which failures end a run: errors of the program, storms of recoveries, exchanges that fail again and again."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import parse_config
from rayfcp.elastic.facts import Cause, Facts, Failure, Limits, Setbacks
from rayfcp.elastic.size import decide, reason_to_end
from rayfcp.values import Move
from tests.elastic.worlds import NOW_S, devices
from tests.examples import examples

LIMITS = Limits(min_devices=1, max_devices=4, max_recoveries=5)
FACTS = Facts(limits=LIMITS, devices=devices(*"aabb"), active=("d0", "d1", "d2", "d3"))


def outcome(failures: list[Failure | None], *, limits: Limits = LIMITS) -> tuple[int, Move]:
    """After how many events the run ends and how, where None is a finished step and the lost come back at once."""
    setbacks = Setbacks()
    for count, failure in enumerate(failures):
        if failure is None:
            setbacks = Setbacks()
            continue
        facts = dataclasses.replace(FACTS, limits=limits, failure=failure, setbacks=setbacks)
        decision = decide(facts, now_s=NOW_S)
        if decision.what is Move.GIVE_UP:
            return count, decision.what
        setbacks = setbacks.after(failure)
    return len(failures), Move.GO_ON


STUCK = Failure(cause=Cause.COLLECTIVE, message="seen")
EVENTS = st.sampled_from(
    [
        None,
        STUCK,
        STUCK,
        Failure(cause=Cause.DIED, lost=("d1",)),
        Failure(cause=Cause.COLLECTIVE, lost=("d1",)),
        Failure(cause=Cause.HUNG, lost=("d0", "d1")),
    ]
)


def end_of(failures: list[Failure | None], *, limits: Limits) -> int:
    """Event at which the run ends by the rules, counted backwards from each event."""
    for count, failure in enumerate(failures):
        if failure is None:
            continue
        since = next((back for back in range(count, -1, -1) if failures[back] is None), -1)
        run = failures[since + 1 : count]
        alone = 0
        for each in reversed(run):
            if each is None or each.cause is not Cause.COLLECTIVE or each.lost:
                break
            alone += 1
        again = failure.cause is Cause.COLLECTIVE and not failure.lost and alone >= limits.collective_retries
        if failure.cause is Cause.PROGRAM or len(run) >= limits.max_recoveries or again:
            return count
    return len(failures)


@examples(200)
@given(st.lists(EVENTS, max_size=12), st.integers(1, 6), st.integers(1, 3))
def test_a_run_ends_when_the_rules_say(failures: list[Failure | None], recoveries: int, retries: int) -> None:
    limits = dataclasses.replace(LIMITS, max_recoveries=recoveries, collective_retries=retries)
    assert outcome(failures, limits=limits)[0] == end_of(failures, limits=limits)


def test_a_program_error_ends_the_run_and_is_shown() -> None:
    facts = dataclasses.replace(FACTS, failure=Failure(cause=Cause.PROGRAM, message="KeyError: 'q'"))
    assert reason_to_end(facts) == "a program error would repeat in the same step: KeyError: 'q'"


def test_a_storm_names_the_bound() -> None:
    failure = Failure(cause=Cause.NODE, lost=("d1", "d2"), message="node b is gone")
    facts = dataclasses.replace(FACTS, failure=failure, setbacks=Setbacks(recoveries=5))
    assert reason_to_end(facts) == (
        "5 recoveries did not finish a step, elastic.max_recoveries is 5, and now 2 devices lost with a node (node b "
        "is gone); check the workers' logs, or raise it"
    )


def test_an_exchange_that_fails_again_says_where_to_look() -> None:
    failure = Failure(cause=Cause.COLLECTIVE, message="timed out")
    facts = dataclasses.replace(FACTS, failure=failure, setbacks=Setbacks(recoveries=3, collectives=3))
    reason = reason_to_end(facts)
    assert reason is not None
    assert "communication among 4 healthy devices failed 4 times in a row (timed out); check the network" in reason


def limits_of(**sections: object) -> Limits:
    return Limits.of(parse_config({"data": {"paths": ["x"]}, **sections}))


def test_limits_come_from_the_configuration() -> None:
    fixed = limits_of(cluster={"num_workers": 4, "pipeline_stages": 2, "tensor_parallel": 2})
    assert (fixed.min_devices, fixed.max_devices, fixed.num_stages, fixed.tensor_parallel) == (2, 4, 2, 2)
    ranged = limits_of(cluster={"num_workers": [3, 8]}, elastic={"wait_s": 7, "max_recoveries": 2, "grow": False})
    assert (ranged.min_devices, ranged.max_devices) == (3, 8)
    assert (ranged.wait_s, ranged.max_recoveries, ranged.grow) == (7.0, 2, False)
    assert limits_of(cluster={"num_workers": [3, 8]}, elastic={"min_workers": 5}).min_devices == 5
