"""Figures from seconds: what must hold of them whatever was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.bench.request import BenchRequest, lengths_of
from rayfcp.bench.results import BenchReport, Kernel, RankSeconds, StrategyTiming, format_found, median_of
from rayfcp.config import ConfigError

SECONDS = st.floats(1e-4, 1e3)


@st.composite
def rank_seconds(draw: st.DrawFn) -> RankSeconds:
    num_ranks, num_microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    row = st.lists(SECONDS, min_size=num_ranks, max_size=num_ranks).map(tuple)
    grid = st.lists(row, min_size=num_microbatches, max_size=num_microbatches).map(tuple)
    return RankSeconds(forward_s=draw(grid), backward_s=draw(grid))


@given(seconds=rank_seconds(), kernel_s=SECONDS)
def test_waiting_never_helps(seconds: RankSeconds, kernel_s: float) -> None:
    assert -1e-9 <= seconds.imbalance < 1
    entry = StrategyTiming(strategy="ring", seconds=seconds)
    kernel = Kernel(forward_s=kernel_s, backward_s=kernel_s, flops=1.0)
    assert entry.mfu_share(kernel) == pytest.approx(entry.efficiency(kernel) * (1 - seconds.imbalance))
    assert sum(seconds.rank_s) == pytest.approx(seconds.total_s)


@given(seconds=rank_seconds())
def test_equal_rounds_are_their_median(seconds: RankSeconds) -> None:
    assert median_of([seconds, seconds, seconds]) == seconds
    slower = RankSeconds(
        forward_s=tuple(tuple(9 * each for each in row) for row in seconds.forward_s),
        backward_s=tuple(tuple(9 * each for each in row) for row in seconds.backward_s),
    )
    assert median_of([seconds, slower, seconds]) == seconds


@given(num_ranks=st.integers(1, 9), tokens=st.integers(1, 5000), most=st.none() | st.integers(1, 4000))
def test_a_batch_has_the_tokens_of_all_ranks(num_ranks: int, tokens: int, most: int | None) -> None:
    bench = BenchRequest(num_ranks=num_ranks, tokens_per_rank=tokens, max_seqlen=most, lengths="dist:lognormal")
    try:
        lengths = lengths_of(bench)
    except ConfigError as error:
        assert most is not None and most < 17 and "must have --ranks x --tokens-per-rank" in str(error)
        return
    assert sum(lengths) == num_ranks * tokens
    assert min(lengths) >= 1 and max(lengths) <= (most or sum(lengths))


def test_an_error_beyond_the_dtype_is_wrong() -> None:
    seconds = RankSeconds(forward_s=((1.0,),), backward_s=((2.0,),))
    errors = {"exact": 0.0, "rounded": 9e-5, "off": 2e-4, "nan": float("nan")}
    entries = [StrategyTiming(strategy=name, seconds=seconds, error=error) for name, error in errors.items()]
    found = BenchReport(
        request=BenchRequest(),
        device_name="a device",
        kernel_name="a kernel",
        peak_flops=None,
        num_sequences=3,
        kernel=Kernel(forward_s=1.0, backward_s=1.0, flops=2.0),
        blocks=(),
        entries=(*entries, StrategyTiming(strategy="none", reason="there is none")),
    )
    assert [each.strategy for each in found.wrong] == ["off", "nan"]
    lines = format_found(found).splitlines()
    assert lines[-1] == "none: not run, there is none"
    assert [line.split()[0] for line in lines[-5:-1]] == list(errors)
