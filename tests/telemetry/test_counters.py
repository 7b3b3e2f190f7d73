"""Counters on disk: what is counted is there again, and a broken file hurts nobody."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.telemetry.events import KeptCounters
from rayfcp.telemetry.names import METRICS, Persistence
from tests.examples import examples

KEPT = [metric for metric in METRICS if metric.kept is Persistence.COUNTERS]
Count = tuple[str, dict[str, str], int]


@st.composite
def counts(draw: st.DrawFn) -> Count:
    metric = draw(st.sampled_from(KEPT))
    labels = {name: draw(st.sampled_from(metric.known or ("picture_broken",))) for name in metric.labels}
    return metric.name, labels, draw(st.integers(0, 5))


@examples(25)
@given(lives=st.lists(st.lists(counts(), max_size=6), max_size=4))
def test_lives_add_up(lives: list[list[Count]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("counted") / "counters.json"
    wanted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for life in lives:
        counters = KeptCounters(path)
        for name, labels, amount in life:
            counters.add(name, amount, labels=labels)
            if amount:
                key = name, tuple(sorted(labels.items()))
                wanted[key] = wanted.get(key, 0) + amount
    assert {(name, labels): value for name, labels, value in KeptCounters(path)} == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        '{"a": 1}',
        '[{"name": "lost_steps_total"}]',
        '[{"name": "lost_steps_total", "labels": 7, "value": 1}]',
        '[{"name": "lost_steps_total", "labels": {}, "value": "many"}]',
        '[{"name": "lost_steps_total", "labels": {}, "value": -1}]',
        '[{"name": "lost_steps_total", "labels": {"cause": "died"}, "value": 1}]',
        '[{"name": "gone_total", "labels": {}, "value": 1}]',
    ],
)
def test_what_is_broken_or_unknown_is_left_out(text: str, tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    path.write_text(text)
    counters = KeptCounters(path)
    assert list(counters) == []
    counters.add("lost_steps_total", 2, labels={})
    assert list(KeptCounters(path)) == [("lost_steps_total", (), 2)]


def test_a_folder_that_cannot_be_written_loses_no_count(tmp_path: Path) -> None:
    blocked = tmp_path / "run"
    counters = KeptCounters(blocked / "counters.json")
    blocked.write_text("a file where the folder should be")
    counters.add("lost_steps_total", 2, labels={})
    blocked.unlink()
    counters.add("lost_steps_total", 1, labels={})
    assert list(KeptCounters(blocked / "counters.json")) == [("lost_steps_total", (), 3)]
