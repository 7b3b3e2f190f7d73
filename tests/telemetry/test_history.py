"""Events that a run records next to its steps, and the history built from them."""

import math
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.telemetry.events import MAX_REASON, Event, EventKind, append_event, read_events
from rayfcp.telemetry.rank_times import RankTimes, rank_charts
from rayfcp.telemetry.report import history_of, marks_of
from rayfcp.values import ClusterSpec
from tests.telemetry.samples import report

clusters = st.builds(
    ClusterSpec,
    num_ranks=st.just(3),
    max_tokens_per_rank=st.integers(1, 10**6),
    node_of_rank=st.sampled_from([(), (0, 1, 1)]),
    generation=st.integers(0, 9),
    speed_of_rank=st.sampled_from([(), (1.0, 0.5, 1.0)]),
)
happenings = st.builds(
    Event,
    kind=st.sampled_from(EventKind),
    step=st.integers(0, 10**6),
    at_s=st.floats(0, 4e9),
    devices=st.integers(0, 999),
    devices_before=st.integers(0, 999),
    seconds=st.floats(0, 1e5),
    lost_steps=st.integers(0, 9),
    cause=st.text(max_size=9),
    reason=st.text(max_size=MAX_REASON),
    cluster=st.none() | clusters,
)


@given(st.lists(happenings, max_size=5), st.booleans())
def test_events_come_back_as_they_were_written_and_torn_lines_do_not_matter(given_: list[Event], torn: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        assert read_events(path) == ()
        for event in given_:
            append_event(path, event)
        if torn:
            with path.open("a") as file:
                file.write('{"kind": "sta')
        assert read_events(path) == tuple(given_)


def event(kind: EventKind, at_s: float, *, seconds: float = 0.0, step: int = 0, lost_steps: int = 0) -> Event:
    return Event(kind=kind, step=step, at_s=at_s, devices=4, seconds=seconds, lost_steps=lost_steps)


START, RECOVERY, RESIZE, END, *_ = EventKind


def test_wall_time_counts_every_start_to_its_end_and_no_pause_between() -> None:
    told = [
        event(START, 110.0, seconds=10.0),
        event(RECOVERY, 140.0, seconds=4.0, step=3, lost_steps=1),
        event(END, 150.0),
        event(START, 1010.0, seconds=10.0),
        event(RESIZE, 1020.0, step=6),
    ]
    steps = [report(step, step_s=5.0, world_size=world) for step, world in ((1, 4), (2, 4), (3, 3), (4, 3), (5, 4))]
    history = history_of(told, steps, last_write_s=1050.0)
    assert history.wall_s == 50.0 + 50.0 and history.goodput == 25.0 / 100.0
    assert (history.num_starts, history.num_recoveries, history.lost_steps) == (2, 1, 1)
    assert history.worlds == (4, 3, 4) and history.recovery_s == 4.0
    assert list(marks_of(told)) == [(3, "recovery"), (6, "resize")]
    killed = history_of([told[0], told[3], told[4]], steps, last_write_s=1050.0)
    assert killed.wall_s == 10.0 + 50.0, "a start without an end counts until the last thing known of it"
    nothing = history_of([], steps, last_write_s=1050.0)
    assert math.isnan(nothing.wall_s) and math.isnan(nothing.goodput)


@given(
    st.lists(st.dictionaries(st.integers(0, 5), st.floats(0.1, 10), min_size=1), min_size=1, max_size=60),
    st.integers(4, 40),
)
def test_busy_times_keep_their_means_in_bounded_space(steps: list[dict[int, float]], max_cells: int) -> None:
    times = RankTimes(max_entries=max_cells)
    for step, busy_s in enumerate(steps, start=1):
        times.add(step, busy_s)
        assert sum(len(each.busy_s) for each in times.stretches) <= max(max_cells, 3 * 6)
    for number in range(6):
        own = [busy_s[number] for busy_s in steps if number in busy_s]
        assert sum(each.count.get(number, 0) for each in times.stretches) == len(own)
        assert math.isclose(sum(each.busy_s.get(number, 0.0) for each in times.stretches), sum(own), abs_tol=1e-6)
    firsts = [each.first_step for each in times.stretches]
    lasts = [each.last_step for each in times.stretches]
    assert firsts == [1, *(last + 1 for last in lasts[:-1])] and lasts[-1] == len(steps)
    with tempfile.TemporaryDirectory() as folder:
        times.write(Path(folder) / "ranks.json")
        again = RankTimes.read(Path(folder) / "ranks.json")
        half = RankTimes.read(Path(folder) / "ranks.json", up_to=len(steps) // 2)
    assert [each.count for each in again.stretches] == [each.count for each in times.stretches]
    assert all(each.last_step <= len(steps) // 2 for each in half.stretches)
    again.add(len(steps) + 1, {0: 1.0})
    assert again.stretches[-1].last_step == len(steps) + 1


def test_devices_that_are_others_in_each_step_stay_in_bounded_space_too() -> None:
    times = RankTimes(max_entries=4)
    for step in range(1, 33):
        times.add(step, {step % 2: 1.0, 2 + step % 2: 1.0, 4 + step % 2: 1.0})
        assert sum(len(each.busy_s) for each in times.stretches) <= 2 * 6


def test_the_slowest_device_leads_and_many_devices_stay_readable() -> None:
    times = RankTimes()
    for step in range(1, 200):
        times.add(step, {number: 2.0 if number == 37 else 1.0 + number * 1e-4 for number in range(64)})
    slowest, heat = rank_charts(times)
    assert [row["name"] for row in slowest["rows"][:3]] == ["device 37", "device 63", "device 62"]
    assert "the 24 slowest of 64 devices" in heat["note"] and len(heat["fields"]) < 3000
    assert rank_charts(RankTimes()) == []
