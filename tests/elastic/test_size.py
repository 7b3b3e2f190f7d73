"""Sizes: what holds of every decision, the best size by brute force, and the cases that people ask about."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.facts import Cause, Device, Facts, Failure, Fit, Limits, Loss, Setbacks
from rayfcp.elastic.size import decide, fewest_devices
from rayfcp.values import Move
from tests.elastic.worlds import NOW_S, devices, is_calm, running, usable, worlds
from tests.examples import examples

FOUR = Limits(min_devices=1, max_devices=4)
DEAD = Failure(cause=Cause.DIED, lost=("d1",), message="exit code -9")


@examples(80)
@given(worlds())
def test_what_holds_of_every_decision(facts: Facts) -> None:
    decision = decide(facts, now_s=NOW_S)
    assert decision == decide(facts, now_s=NOW_S)
    assert "\n" not in decision.reason
    assert any(letter.isdigit() for letter in decision.reason)
    assert bool(decision.devices) == (decision.what is Move.FORM)
    if not decision.devices:
        return
    ids, limits = decision.devices, facts.limits
    assert len(set(ids)) == len(ids) <= limits.max_devices
    assert set(ids) <= usable(facts)
    num_ranks, rest = divmod(len(ids), decision.num_stages * limits.tensor_parallel)
    assert rest == 0
    assert any(fit.num_stages == decision.num_stages and num_ranks >= fit.min_ranks for fit in facts.fits)
    assert len(usable(facts)) >= limits.min_devices


@examples(100)
@given(worlds())
def test_what_kind_of_move_fits_the_occasion(facts: Facts) -> None:
    """Between steps nothing waits, and devices that can stay are left for a larger shape alone; after a failure nothing
    goes on as if it had not been."""
    decision = decide(facts, now_s=NOW_S)
    if not is_calm(facts):
        assert decision.what is not Move.GO_ON
        return
    assert decision.what in (Move.GO_ON, Move.FORM)
    if decision.what is Move.FORM and set(facts.active) <= usable(facts):
        assert len(decision.devices) > len(facts.active) or decision.num_stages > facts.num_stages


def most(facts: Facts, *, at_most: int) -> tuple[int, int] | None:
    """Stages and ranks by trying all: as many stages as configured or next to it, then as many ranks as can be."""
    count, limits = len(usable(facts)), facts.limits
    can = [
        (fit.num_stages, ranks)
        for fit in facts.fits
        for ranks in range(fit.min_ranks, count + 1)
        if ranks * fit.num_stages * limits.tensor_parallel <= min(count, at_most, limits.max_devices)
    ]
    return max(can, default=None) if count >= limits.min_devices else None


@examples(100)
@given(worlds())
def test_a_failure_leaves_as_many_ranks_as_can_be(facts: Facts) -> None:
    facts = dataclasses.replace(facts, losses=(), failure=DEAD, setbacks=Setbacks(), replacing_since_s=())
    at_most = len(facts.active) if facts.active and not facts.limits.grow else 99
    best = most(facts, at_most=at_most)
    decision = decide(facts, now_s=NOW_S)
    if best is None:
        assert decision.what is Move.WAIT
    else:
        per_rank = decision.num_stages * facts.limits.tensor_parallel
        assert (decision.num_stages, len(decision.devices) // per_rank) == best


@examples(60)
@given(worlds(), st.floats(0, 200))
def test_waiting_ends_after_its_time_and_not_before(facts: Facts, waited_s: float) -> None:
    facts = dataclasses.replace(
        facts,
        devices=facts.devices[: fewest_devices(facts) - 1],
        failure=DEAD,
        setbacks=Setbacks(),
        waiting_since_s=NOW_S,
        replacing_since_s=(),
    )
    assert decide(facts, now_s=NOW_S).what is Move.WAIT
    wait_s = facts.limits.wait_s
    late = decide(facts, now_s=NOW_S + waited_s).what
    assert late is (Move.GIVE_UP if waited_s >= wait_s else Move.WAIT)
    assert decide(facts, now_s=NOW_S + wait_s).what is Move.GIVE_UP
    assert decide(facts, now_s=NOW_S + wait_s - 0.01).what is Move.WAIT


@examples(100)
@given(worlds())
def test_what_was_decided_is_not_undone_by_the_next_look(facts: Facts) -> None:
    facts = dataclasses.replace(facts, starting_since_s=())
    decision = decide(facts, now_s=NOW_S)
    if not decision.devices:
        return
    had_leaving = is_calm(facts) and not set(facts.active) <= usable(facts)
    given_up = facts.failure.lost if facts.failure else ()
    after = dataclasses.replace(
        facts,
        devices=tuple(each for each in facts.devices if each.id not in given_up),
        active=decision.devices,
        num_stages=decision.num_stages,
        failure=None,
        setbacks=Setbacks(),
        waiting_since_s=None,
    )
    again = decide(after, now_s=NOW_S)
    assert again.what is Move.GO_ON or (had_leaving and len(again.devices) > len(decision.devices))


def test_a_lost_device_shrinks_by_a_rank() -> None:
    facts = running("a", "a", "b", "b", limits=FOUR, gone=("d1",), failure=DEAD)
    decision = decide(facts, now_s=NOW_S)
    assert (decision.what, decision.devices) == (Move.FORM, ("d0", "d2", "d3"))
    lost = "1 device died (exit code -9), 1 of 4 devices lost"
    assert decision.reason == f"{lost}; continuing with 3 devices as 3 ranks"


def test_a_device_standing_by_takes_the_place_of_a_lost_one() -> None:
    facts = running("a", "a", "b", "b", "b", limits=FOUR, gone=("d2",), failure=dataclasses.replace(DEAD, lost=("d2",)))
    decision = decide(facts, now_s=NOW_S)
    assert (decision.what, decision.devices) == (Move.FORM, ("d0", "d1", "d4", "d3"))


def test_a_failed_exchange_is_retried_with_all() -> None:
    failure = Failure(cause=Cause.COLLECTIVE, message="connection reset")
    decision = decide(running("b", "a", "b", "a", limits=FOUR, failure=failure), now_s=NOW_S)
    assert (decision.what, decision.devices) == (Move.FORM, ("d0", "d1", "d2", "d3"))


def test_loss_of_all_waits_and_goes_on_with_what_comes() -> None:
    everyone = ("d0", "d1", "d2", "d3")
    facts = running(*"aabb", limits=FOUR, gone=everyone, failure=Failure(cause=Cause.NODE, lost=everyone))
    assert decide(facts, now_s=NOW_S).what is Move.WAIT
    came = dataclasses.replace(facts, devices=devices("c", first=7), waiting_since_s=NOW_S)
    decision = decide(came, now_s=NOW_S + 5)
    assert (decision.what, decision.devices) == (Move.FORM, ("d7",))


TWO_STAGES = Limits(min_devices=1, max_devices=4, num_stages=2)


def test_a_loss_with_stages_takes_a_rank_and_leaves_each_stage_where_it_is() -> None:
    """Stage 0 is d0, d1, stage 1 is d2, d3."""
    facts = running(*"aabb", limits=TWO_STAGES, num_stages=2, gone=("d0",), failure=DEAD, fits=(Fit(num_stages=2),))
    facts = dataclasses.replace(facts, failure=dataclasses.replace(DEAD, lost=("d0",)))
    decision = decide(facts, now_s=NOW_S)
    assert (decision.what, decision.devices, decision.num_stages) == (Move.FORM, ("d1", "d2"), 2)


def test_stages_are_joined_where_no_rank_is_left_and_parted_when_devices_come() -> None:
    facts = running(*"ab", limits=TWO_STAGES, num_stages=2, gone=("d1",), failure=DEAD, fits=(Fit(num_stages=2),))
    assert decide(facts, now_s=NOW_S).what is Move.WAIT
    fits = (Fit(num_stages=1), Fit(num_stages=2))
    decision = decide(dataclasses.replace(facts, fits=fits), now_s=NOW_S)
    assert (decision.what, decision.devices, decision.num_stages) == (Move.FORM, ("d0",), 1)
    back = Facts(limits=TWO_STAGES, fits=fits, devices=devices(*"ab"), active=("d0",))
    decision = decide(back, now_s=NOW_S)
    assert (decision.what, decision.devices, decision.num_stages) == (Move.FORM, ("d0", "d1"), 2)


def test_one_device_more_than_whole_ranks_stands_by() -> None:
    limits = Limits(min_devices=2, max_devices=8, tensor_parallel=2)
    facts = Facts(limits=limits, devices=devices(*"aab"), active=("d0", "d1"))
    assert decide(facts, now_s=NOW_S).what is Move.GO_ON


class TestDrain:
    LEAVING = {"b": NOW_S + 30}  # noqa: RUF012

    def test_shrinks_before_the_deadline(self) -> None:
        decision = decide(running(*"aabb", limits=FOUR, leaving=self.LEAVING), now_s=NOW_S)
        assert (decision.what, decision.devices) == (Move.FORM, ("d0", "d1"))
        assert "2 of 4 devices are on nodes to be removed, the first in 30 s" in decision.reason

    def test_takes_devices_standing_by_instead(self) -> None:
        decision = decide(running(*"aabbcc", limits=FOUR, leaving=self.LEAVING), now_s=NOW_S)
        assert (decision.what, decision.devices) == (Move.FORM, ("d0", "d1", "d4", "d5"))

    def test_goes_on_while_it_lasts_where_nobody_else_is(self) -> None:
        decision = decide(running(*"bb", limits=FOUR, leaving=self.LEAVING), now_s=NOW_S)
        assert decision.what is Move.GO_ON
        assert "0 others can be used and 1 needed" in decision.reason

    def test_does_not_grow_in_the_same_go(self) -> None:
        limits = Limits(min_devices=1, max_devices=8)
        facts = Facts(limits=limits, devices=devices(*"aabccc"), active=("d0", "d1", "d2"), leaving=self.LEAVING)
        assert len(decide(facts, now_s=NOW_S).devices) == 3


class TestGrowth:
    LIMITS = Limits(min_devices=1, max_devices=8)

    def test_takes_all_that_came_up_to_the_most(self) -> None:
        facts = Facts(limits=FOUR, devices=devices(*"abcba"), active=("d0", "d1"))
        decision = decide(facts, now_s=NOW_S)
        assert (decision.what, decision.devices) == (Move.FORM, ("d0", "d4", "d1", "d3"))

    @pytest.mark.parametrize(("age_s", "what"), [(5.0, Move.GO_ON), (20.0, Move.FORM)])
    def test_gathers_devices_that_start_but_not_for_ever(self, age_s: float, what: Move) -> None:
        facts = Facts(
            limits=self.LIMITS,
            devices=devices(*"ab"),
            active=("d0",),
            starting_since_s=(NOW_S - age_s,),
        )
        assert decide(facts, now_s=NOW_S).what is what

    @pytest.mark.parametrize(
        ("losses", "calm_s", "what"),
        [(2, 1, Move.FORM), (3, 29, Move.GO_ON), (3, 31, Move.FORM), (4, 31, Move.GO_ON)],
    )
    def test_a_place_that_loses_devices_often_stays_calm_first(self, losses: int, calm_s: float, what: Move) -> None:
        facts = Facts(
            limits=self.LIMITS,
            devices=(*devices("a"), Device(id="d9", node_id="b", place="b/0")),
            active=("d0",),
            losses=tuple(Loss(place="b/0", at_s=NOW_S - calm_s - index) for index in range(losses)),
        )
        assert decide(facts, now_s=NOW_S).what is what

    def test_a_place_that_loses_devices_often_is_better_than_none(self) -> None:
        facts = Facts(
            limits=self.LIMITS,
            devices=devices("b"),
            losses=tuple(Loss(place="b", at_s=NOW_S - index) for index in range(5)),
        )
        assert decide(facts, now_s=NOW_S).what is Move.FORM

    def test_off_means_off_but_the_lost_are_replaced(self) -> None:
        limits = dataclasses.replace(self.LIMITS, grow=False)
        facts = Facts(limits=limits, devices=devices(*"abc"), active=("d0",))
        assert decide(facts, now_s=NOW_S).what is Move.GO_ON
        lost = dataclasses.replace(facts, failure=Failure(cause=Cause.DIED, lost=("d0",)))
        assert decide(lost, now_s=NOW_S).what is Move.FORM


def test_a_hung_device_counts_as_lost_though_its_process_lives() -> None:
    facts = running(*"aabb", limits=FOUR, failure=Failure(cause=Cause.HUNG, lost=("d3",), message="silent for 30 s"))
    decision = decide(facts, now_s=NOW_S)
    assert decision.devices == ("d0", "d1", "d2")
    assert "1 device hung (silent for 30 s), 1 of 4 devices lost" in decision.reason


@pytest.mark.parametrize(("waited_s", "what"), [(0.0, Move.WAIT), (59.0, Move.WAIT), (61.0, Move.FORM)])
def test_a_recovery_waits_for_fresh_processes_on_its_devices(waited_s: float, what: Move) -> None:
    facts = running(*"aabb", limits=FOUR, gone=("d1",), failure=DEAD, replacing_since_s=(NOW_S - waited_s,))
    decision = decide(facts, now_s=NOW_S)
    assert decision.what is what
    if what is Move.WAIT:
        assert "1 fresh process starting on devices of the run" in decision.reason
    else:
        assert len(decision.devices) == 3


def test_nobody_waits_for_processes_that_make_no_larger_run() -> None:
    """With two devices for a rank, and at most four."""
    limits = dataclasses.replace(FOUR, tensor_parallel=2)
    facts = running(*"aabbb", limits=limits, gone=("d1",), failure=DEAD, replacing_since_s=(NOW_S,))
    assert len(decide(facts, now_s=NOW_S).devices) == 4, "one that stood by makes it whole"
    facts = running(*"aabb", limits=limits, gone=("d1",), failure=DEAD, replacing_since_s=(NOW_S,))
    assert decide(facts, now_s=NOW_S).what is Move.WAIT
