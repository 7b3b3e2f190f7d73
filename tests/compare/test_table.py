"""Table and headline: the simplest of about equal layouts, true rivals, one bound, memory that is left."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayfcp.compare.advice import Advisor, recommendation, recommended_trial
from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.page import sentence
from rayfcp.compare.results import Entry
from rayfcp.compare.table import SIMPLER_WITHIN, entry_line, format_table, headline, ranked, recommended
from tests.compare.cases import small

NAMES = ("flex-ring", "static-cp", "ulysses")


def entry(name: str, time_s: float, **given: Any) -> Entry:
    return Entry(strategy=name, feasible=True, reason="", num_ranks=8, iteration_s=time_s, **given)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    given: dict[str, Any] = {"strategies": NAMES, "batches": 1, "max_tokens_per_rank": None, "memory_gib": 70.0}
    return compare(small(tmp_path_factory.mktemp("table"), **given))


def with_times(comparison: Comparison, **times_s: float) -> Comparison:
    """The comparison with these iteration times, and lower bounds a half, a third... of them."""
    entries = [
        replace(each, iteration_s=times_s[each.strategy.replace("-", "_")], lower_bound_s=1.0 + number)
        for number, each in enumerate(comparison.entries)
    ]
    return replace(comparison, entries=tuple(entries))


def test_the_simplest_of_about_equal_ones_is_recommended() -> None:
    """Stages must pay by more than 5 %, as must planning with all strategies; among the simplest, time decides."""
    within = 10.0 * SIMPLER_WITHIN
    staged, plain, auto = (
        entry("elastic-pipeline", 10.0, num_stages=2),
        entry("flex-ring", within - 0.01),
        entry("auto", 10.1),
    )
    assert recommended([staged, plain, auto]) is plain
    assert recommended([staged, replace(plain, iteration_s=within + 0.1), auto]) is auto
    assert recommended([staged, replace(plain, iteration_s=within + 0.1)]) is staged
    assert recommended([plain, entry("ulysses", 10.2)]).strategy == "ulysses"  # type: ignore[union-attr]
    assert recommended([]) is None


def test_the_headline_names_static_cp_and_the_fastest_baseline(comparison: Comparison) -> None:
    found = with_times(comparison, flex_ring=8.0, static_cp=12.0, ulysses=10.0)
    assert [line.strip() for line in headline(found)[1:]] == [
        "1.50 times as fast as static-cp",
        "1.25 times as fast as ulysses, the fastest baseline",
    ]
    text = format_table(found)
    assert text.splitlines()[0].split()[:5] == ["strategy", "iteration", "speedup", "over", "static-cp"]
    assert "speedup over ulysses, the fastest baseline" in text
    data = {each["strategy"]: each for each in found.as_json()["results"]}
    assert data["flex-ring"]["speedup_over_best_baseline"] == 1.25
    assert data["flex-ring"]["speedup_over_static_cp"] == 1.5
    said = sentence(found)
    assert "1.50 times as fast as static-cp" in said and "1.25 times as fast as ulysses, the fastest baseline" in said
    both = headline(with_times(comparison, flex_ring=8.0, static_cp=8.2, ulysses=10.0))
    assert both[1:] == [
        "  1.02 times as fast as static-cp, the fastest baseline: flexible groups gain little on these lengths"
    ]


def test_a_system_that_is_faster_is_the_reference(comparison: Comparison) -> None:
    """The best layout of another system may be faster than each baseline that was requested."""
    found = replace(with_times(comparison, flex_ring=8.0, static_cp=12.0, ulysses=10.0), system=("DeepSpeed", 9.0))
    assert found.reference == ("DeepSpeed", 9.0)
    assert replace(found, system=("DeepSpeed", 11.0)).reference == ("ulysses, the fastest baseline", 10.0)


def test_a_table_has_one_bound(comparison: Comparison) -> None:
    """Gaps and times of a table are in the same order: all refer to the least bound, whose strategy is named."""
    found = with_times(comparison, flex_ring=8.0, static_cp=12.0, ulysses=10.0)
    text = format_table(found)
    assert "gap: iteration over 1 s, the least lower bound of all rows (of flex-ring)" in text
    rows = text.splitlines()[1:4]
    assert [row.split()[0] for row in rows] == [each.strategy for each in ranked(found.entries)]
    assert [f"{gap:.3f}" in row for gap, row in zip((8.0, 10.0, 12.0), rows, strict=True)] == [True] * 3


def test_memory_is_of_what_the_device_has(comparison: Comparison, tmp_path: Path) -> None:
    assert format_table(comparison).count(" of 70.0 GiB") == len(NAMES) + 1
    inputs = replace(comparison.inputs, memory_gib=None)
    assert format_table(replace(comparison, inputs=inputs)).count(" of 80.0 GiB") == len(NAMES) + 1
    assert " of " not in entry_line(comparison.entries[0])


def test_rows_are_told_when_they_are_ready(tmp_path: Path) -> None:
    told: list[str] = []
    given: dict[str, Any] = {"strategies": ("flex-ring", "dapple"), "batches": 1}
    found = compare(
        small(tmp_path, **given),
        log=lambda text: told.append(f"({text})"),
        on_entry=lambda each: told.append(entry_line(each)),
    )
    first, last = entry_line(found.entries[0]), entry_line(found.entries[1])
    assert told.index(first) > told.index("(flex-ring: batch 1 of 1)") and told[-1] == last
    assert first.startswith("flex-ring: ") and last.startswith("dapple: not feasible: dapple splits the layers")


def test_a_faster_layout_with_stages_is_named_and_not_recommended(tmp_path: Path) -> None:
    given: dict[str, Any] = {"strategies": ("flex-ring", "elastic-pipeline"), "batches": 1, "searched": ("stages",)}
    advice = Advisor(small(tmp_path, max_tokens_per_rank=None, **given)).advise()
    done = [each for each in advice.trials if each.status == "simulated" and each.strategy in given["strategies"]]
    plain = next(each for each in done if each.layout.num_stages == 1)
    staged = next(each for each in done if each.layout.num_stages > 1)
    assert plain.entry is not None and staged.entry is not None

    def timed(seconds: float) -> Any:
        return replace(staged, entry=replace(staged.entry, iteration_s=seconds * plain.iteration_s))

    assert recommended_trial([timed(0.96), plain]) is plain
    faster = timed(0.9)
    assert recommended_trial([faster, plain]) is faster
    near = replace(advice, best=plain, trials=(timed(0.96), plain))
    assert any("is faster by 4.1" in line and "simplest layout is recommended" in line for line in recommendation(near))
