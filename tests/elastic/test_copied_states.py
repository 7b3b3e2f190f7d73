"""Complete states: only what every device copied, and no step runs too far ahead of what is on other nodes."""

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.recoverable import CopiedStates
from rayfcp.values import StateId
from tests.examples import examples


def state(version: int, generation: int = 0) -> StateId:
    return StateId(version=version, generation=generation)


def started(*, generation: int = 0, first: int = 0) -> CopiedStates:
    """Two devices have copied the first state."""
    begun = CopiedStates.start("ab", generation=generation, first=first)
    return begun.after(dict.fromkeys("ab", state(first, generation)))


@examples(300)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from((-1, 0, None))), max_size=12), st.data())
def test_complete_is_the_newest_that_every_device_reported(
    steps: list[dict[str, int | None]], data: st.DataObject
) -> None:
    """Devices report the last state or the one before it, or skip some."""
    states = CopiedStates.start("ab", generation=0, first=0)
    seen: dict[str, set[StateId]] = {"a": set(), "b": set()}
    for step, late in enumerate(steps):
        told = {device: None if by is None else state(max(0, step + by)) for device, by in late.items()}
        before, states = states.here, states.after(told)
        for device in seen:
            seen[device] |= {each} if (each := told.get(device)) is not None else set()
        assert states.here == max(seen["a"] & seen["b"], default=None)
        assert before is None or (states.here is not None and states.here >= before)
        assert all(len(each) <= 2 for each in states.copied.values()), "few are kept, whoever skips"
    other = data.draw(st.dictionaries(st.sampled_from("abc"), st.builds(state, st.integers(9, 20), st.just(1))))
    assert states.after(other) == states, "of another generation"


@examples(200)
@given(first=st.integers(0, 9), every=st.integers(1, 5), delays=st.lists(st.integers(0, 6), min_size=30, max_size=30))
def test_the_loss_of_a_node_repeats_at_most_so_many_finished_steps(first: int, every: int, delays: list[int]) -> None:
    """Steps run as soon as they may; sending a state takes some steps. What is needed is kept all the time."""
    states, step, left = started(generation=1, first=first), first, 0
    for delay in delays:
        to_send = states.to_send(every=every)
        if to_send is not None:
            states, left = states.sending(to_send), delay
        elif states.under_way is not None:
            left -= 1
        while states.under_way is not None and (left <= 0 or not states.may_dispatch(step + 1, every=every)):
            states = states.sent()
            waiting = states.to_send(every=every)
            if waiting is not None and not states.may_dispatch(step + 1, every=every):
                states = states.sending(waiting)
        assert states.may_dispatch(step + 1, every=every)
        newest = states.away.version if states.away is not None else first
        assert step - newest <= every, "more finished steps than that would run again"
        for needed in (states.here, states.away, states.under_way):
            assert needed is None or needed in states.kept
        step += 1
        states = states.after(dict.fromkeys("ab", state(step, 1)))
        assert state(step - 1, 1) not in states.kept or state(step - 1, 1) in (states.away, states.under_way)


def test_the_states_of_before_stay_until_the_new_generation_has_some() -> None:
    states = started().after({"a": state(4), "b": state(4)})
    states = states.sending(state(4)).sent()
    states = states.again("ac", generation=1, first=4)
    assert (states.here, states.away) == (state(4), state(4))
    assert states.to_send(every=1) is None, "it is not copied here yet"
    assert states.may_dispatch(6, every=1) and not states.may_dispatch(7, every=1)
    late = states.after({"a": state(5), "b": state(5), "c": state(5)})
    assert late.here == state(4)
    copied = states.after({"a": state(4, 1), "c": state(4, 1)})
    assert copied.here == copied.to_send(every=9) == state(4, 1), "however rarely copies are sent"
    assert state(4) in copied.kept and state(3) not in copied.kept


def test_what_is_lost_is_no_longer_complete() -> None:
    """The run had to go back to a checkpoint of version 2."""
    states = started().after({"a": state(6), "b": state(6)}).sending(state(6)).sent()
    states = states.again("ab", generation=1, first=2)
    assert states.here is None and states.away is None
    assert state(0) in states.kept, "nothing is dropped until there is a newer one"
    assert not states.may_dispatch(4, every=1)
    assert states.after({"a": state(2, 1), "b": state(2, 1)}).here == state(2, 1)


def test_a_state_that_one_device_skipped_is_not_complete() -> None:
    states = started().after({"a": state(1), "b": state(2)})
    assert states.here == state(0)
    assert states.after({"a": state(2)}).here == state(2)


def test_what_a_lost_node_held_is_sent_anew_before_the_next_steps() -> None:
    states = started().after({"a": state(3), "b": state(3)}).sending(state(3)).sent()
    assert states.may_dispatch(5, every=1) and states.to_send(every=1) is None
    without = states.without_away()
    assert not without.may_dispatch(5, every=1)
    assert without.to_send(every=1) == state(3)
