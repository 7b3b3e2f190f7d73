from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan.assembly import best_fit_decreasing, bins_of

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(lambda each: sorted(each, reverse=True))


@given(LENGTHS, st.integers(1, 30))
def test_bins_hold_what_they_were_opened_for(lengths: list[int], capacity: int) -> None:
    owners = best_fit_decreasing(lengths, capacity_tokens=capacity)
    assert owners is not None and len(owners) == len(lengths)
    bins = bins_of(owners)
    assert sorted(at for members in bins for at in members) == list(range(len(lengths)))
    for members in bins:
        room = -(-lengths[members[0]] // capacity) * capacity
        assert sum(lengths[at] for at in members) <= room


@given(LENGTHS, st.integers(1, 30))
def test_every_choice_was_the_best_fit(lengths: list[int], capacity: int) -> None:
    owners = best_fit_decreasing(lengths, capacity_tokens=capacity)
    assert owners is not None
    rooms: list[int] = []
    for length, owner in zip(lengths, owners, strict=True):
        fits = [(room, index) for index, room in enumerate(rooms) if room >= length]
        if fits:
            assert owner == min(fits)[1]
        else:
            assert owner == len(rooms)
            rooms.append(-(-length // capacity) * capacity)
        rooms[owner] -= length


@given(LENGTHS, st.integers(1, 30), st.integers(1, 10))
def test_too_many_bins_is_none(lengths: list[int], capacity: int, max_bins: int) -> None:
    free = best_fit_decreasing(lengths, capacity_tokens=capacity)
    bounded = best_fit_decreasing(lengths, capacity_tokens=capacity, max_bins=max_bins)
    assert free is not None
    assert bounded == (free if max(free) < max_bins else None)
