"""Safe states: only what every device kept, and no step runs too far ahead of them."""

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.recoverable import StoredSnapshots
from rayfcp.values import StateId
from tests.examples import examples


def state(version: int, generation: int = 0) -> StateId:
    return StateId(version=version, generation=generation)


REPORTS = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.none() | st.builds(state, st.integers(0, 5), st.integers(0, 1))),
    max_size=12,
)


@examples(300)
@given(REPORTS)
def test_safe_is_the_newest_that_every_device_reported(reports: list[dict[str, StateId | None]]) -> None:
    kept = StoredSnapshots.start("ab", generation=0, first=0, every=1)
    seen: dict[str, set[StateId]] = {"a": set(), "b": set()}
    for report in reports:
        before, kept = kept.safe, kept.after(report)
        for device in seen:
            told = report.get(device)
            seen[device] |= {told} if told is not None and told.generation == 0 else set()
        assert kept.safe == max(seen["a"] & seen["b"], default=None)
        assert before is None or (kept.safe is not None and kept.safe >= before)


@examples(200)
@given(first=st.integers(0, 9), every=st.integers(1, 5), delays=st.lists(st.integers(0, 6), min_size=30, max_size=30))
def test_a_loss_at_any_time_repeats_at_most_so_many_finished_steps(first: int, every: int, delays: list[int]) -> None:
    """Steps run as soon as they may; each snapshot is kept some steps after it was taken."""
    kept = StoredSnapshots.start("ab", generation=1, first=first, every=every)
    step, due = first, {}
    for delay in delays:
        if kept.due(step):
            due[step] = delay
        arrived = [version for version, left in due.items() if left <= 0]
        for version in arrived:
            kept = kept.after({"a": state(version, 1), "b": state(version, 1)})
        due = {version: left - 1 for version, left in due.items() if version not in arrived}
        if not kept.may_dispatch(step + 1):
            needed = kept.needed(step + 1)
            assert needed is not None
            kept = kept.after({"a": needed, "b": needed})
            assert kept.may_dispatch(step + 1)
            due.pop(needed.version, None)
        newest = kept.safe.version if kept.safe is not None else first
        assert step - newest <= every, "more finished steps than that would run again"
        step += 1


@examples(100)
@given(first=st.integers(0, 9), every=st.integers(1, 5), ahead=st.integers(1, 20))
def test_what_is_needed_is_a_snapshot_that_is_taken(first: int, every: int, ahead: int) -> None:
    kept = StoredSnapshots.start("a", generation=0, first=first, every=every)
    taken = [version for version in range(first, first + ahead - 1) if kept.due(version)]
    needed = kept.needed(first + ahead)
    assert needed == (state(taken[-1]) if taken else None)


def test_without_snapshots_nothing_is_waited_for() -> None:
    kept = StoredSnapshots.start("a", generation=0, first=3, every=0)
    assert not any(kept.due(version) for version in range(3, 20))
    assert all(kept.may_dispatch(step) for step in range(4, 20))


def test_the_state_of_before_stays_safe_until_the_new_generation_has_one() -> None:
    kept = StoredSnapshots.start("ab", generation=0, first=0, every=1).after({"a": state(4), "b": state(4)})
    kept = kept.again("ac", generation=1, first=4)
    assert kept.safe == state(4)
    assert kept.may_dispatch(5)
    assert not kept.may_dispatch(6)
    assert kept.needed(6) == state(4, 1)
    late = kept.after({"a": state(5), "b": state(5), "c": state(5)})
    assert late.safe == state(4)
    assert kept.after({"a": state(4, 1), "c": state(4, 1)}).may_dispatch(6)


def test_what_was_safe_and_is_lost_is_safe_no_longer() -> None:
    """The run had to go back to a checkpoint of version 2."""
    kept = StoredSnapshots.start("ab", generation=0, first=0, every=1).after({"a": state(6), "b": state(6)})
    kept = kept.again("ab", generation=1, first=2)
    assert kept.safe is None
    assert not kept.may_dispatch(4)
    assert kept.after({"a": state(2, 1), "b": state(2, 1)}).safe == state(2, 1)


def test_a_state_that_one_device_skipped_is_not_safe() -> None:
    kept = StoredSnapshots.start("ab", generation=0, first=0, every=1)
    kept = kept.after({"a": state(1), "b": state(2)})
    assert kept.safe is None
    assert kept.after({"a": state(2)}).safe == state(2)


def test_what_a_lost_store_held_is_kept_anew_before_the_next_steps() -> None:
    kept = StoredSnapshots.start("ab", generation=0, first=0, every=1).after({"a": state(3), "b": state(3)})
    assert kept.may_dispatch(5)
    without = kept.without_copies({"b"})
    assert without.safe is None
    assert not without.may_dispatch(5)
    assert without.after({"b": state(3)}).safe == state(3)
    assert kept.without_copies({"x"}) == kept
