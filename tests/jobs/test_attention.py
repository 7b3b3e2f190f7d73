"""Measurements of the scripts of FCP with blocks: attention alone, relative to one kernel."""

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.compare.lengths import sequences_of_rows
from rayfcp.config import ConfigError
from rayfcp.program import lower
from rayfcp.verify import check_programs
from tests.examples import examples

FOLDER = Path(__file__).resolve().parents[2] / "jobs" / "reproduce"
LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=8).map(tuple)


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Modules beside the scripts, imported as these do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        names = ("attention", "block_ablation")
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def bench_of(scripts: Any, *, num_ranks: int, **options: str) -> Any:
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    args = scripts.attention.parser_of("").parse_args([*flags, "--tokens-per-rank", "24000"])
    return scripts.attention.bench_of(args, num_ranks=num_ranks)


@examples(20)
@given(lengths=LENGTHS, hardware=st.sampled_from(["gpu-x", "gpu-y"]))
def test_one_rank_is_one_kernel(scripts: Any, lengths: tuple[int, ...], hardware: str) -> None:
    bench = bench_of(scripts, num_ranks=1, hardware=hardware)
    (each,) = scripts.attention.compared(["ring"], lengths, bench=bench).values()
    left_s = 1e-9 * (sum(lengths) + bench.hardware.linear_half_tokens)  # of linear layers as narrow as profiles can be
    assert each.kernels_s <= each.attention_s <= each.kernels_s + left_s
    assert abs(each.exposed_s) <= left_s
    for share in (each.mfu, each.forward_mfu, each.backward_mfu):
        assert share <= 1 + 1e-9


@examples(8)
@given(lengths=LENGTHS, num_ranks=st.integers(2, 12))
def test_figures_agree_with_each_other(scripts: Any, lengths: tuple[int, ...], num_ranks: int) -> None:
    """No system is faster than kernels without loss; passes add up; WLB is one of two."""
    bench = bench_of(scripts, num_ranks=num_ranks)
    found = scripts.attention.compared(scripts.attention.STRATEGIES, lengths, bench=bench)
    for each in found.values():
        assert each.mfu <= 1 + 1e-9
        backward_s = (each.kernels_s - each.kernels_forward_s) / each.backward_mfu
        assert each.kernels_forward_s / each.forward_mfu + backward_s == pytest.approx(each.iteration_s)
        assert each.attention_s + each.exposed_s <= each.iteration_s * (1 + 1e-9)
    assert found["wlb"] in (found["ring"], found["bytescale"])
    assert set(found) == set(scripts.attention.SHOWN)


@examples(15)
@given(seed=st.integers(0, 99), num_tokens=st.integers(2000, 50_000), name=st.sampled_from(["long-tail", "bimodal"]))
def test_batches_fill_the_ranks(scripts: Any, seed: int, num_tokens: int, name: str) -> None:
    batches = scripts.attention.batches_of(f"dist:{name}", num_tokens=num_tokens, batches=2, seed=seed)
    assert [sum(each) for each in batches] == [num_tokens] * 2
    assert all(length > 0 for each in batches for length in each)
    assert batches == scripts.attention.batches_of(f"dist:{name}", num_tokens=num_tokens, batches=2, seed=seed)


def test_short_file_is_one_line(scripts: Any, tmp_path: Path) -> None:
    path = tmp_path / "few.txt"
    path.write_text("5\n6\n")
    with pytest.raises(ConfigError, match="has 11 tokens, must have 100"):
        scripts.attention.batches_of(str(path), num_tokens=100, batches=1, seed=0)


@examples(8)
@given(lengths=LENGTHS, num_ranks=st.integers(2, 9))
def test_large_rings_are_priced_as_they_are_simulated(scripts: Any, lengths: tuple[int, ...], num_ranks: int) -> None:
    lengths = (*lengths, 20_000)
    bench = bench_of(scripts, num_ranks=num_ranks)
    simulated = scripts.attention.compared(["ring"], lengths, bench=bench)["ring"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts.attention, "MOST_PAIRS", 0)
        priced = scripts.attention.compared(["ring"], lengths, bench=bench)["ring"]
    assert priced.attention_s is None
    assert priced.iteration_s == pytest.approx(simulated.iteration_s, rel=0.05)
    assert priced.forward_s == pytest.approx(simulated.forward_s, rel=0.05)


def one_by_one(scripts: Any, lengths: tuple[int, ...], *, num_ranks: int) -> Any:
    """The paper's blocks in small, rounds one by one."""
    options = scripts.attention.BlockOptions(block_tokens=300, placement="lpt", coalesce=1, paced=False)
    return scripts.attention.blocks_plan(lengths, bench=bench_of(scripts, num_ranks=num_ranks), options=options)


@examples(15)
@given(lengths=LENGTHS, num_ranks=st.integers(2, 6), seed=st.integers(0, 9))
def test_random_order_moves_the_same(scripts: Any, lengths: tuple[int, ...], num_ranks: int, seed: int) -> None:
    lengths = (*lengths, 4000)
    plan = one_by_one(scripts, lengths, num_ranks=num_ranks)
    (microbatch,) = plan.microbatches
    random = scripts.block_ablation._fetched(microbatch.layout, num_ranks=num_ranks, seed=seed)
    moved = [
        Counter(each for step in layout.rounds for each in step.transfers) for layout in (microbatch.layout, random)
    ]
    assert moved[0] == moved[1]
    for step in random.rounds:
        targets = [transfer.target for transfer in step.transfers]
        assert len(set(targets)) == len(targets)
    sequences = sequences_of_rows(lengths)
    check_programs(lower(scripts.block_ablation._with(plan, random), sequences), sequences)


@examples(15)
@given(lengths=LENGTHS, num_ranks=st.integers(2, 20))
def test_reshuffled_tokens_by_brute_force(scripts: Any, lengths: tuple[int, ...], num_ranks: int) -> None:
    lengths = (*lengths, 4000)
    plan = one_by_one(scripts, lengths, num_ranks=num_ranks)
    layout, bench = plan.microbatches[0].layout, bench_of(scripts, num_ranks=num_ranks)
    first, total = np.concatenate([[0], np.cumsum(lengths)]), sum(lengths)
    there = np.empty(total, np.int64)
    for block in layout.blocks:
        there[first[block.sequence] + block.start : first[block.sequence] + block.stop] = block.rank
    shares = [total * rank // num_ranks for rank in range(num_ranks + 1)]
    here = np.repeat(np.arange(num_ranks), np.diff(shares))
    pairs = Counter(zip(here.tolist(), there.tolist(), strict=True))
    busiest = []
    for across in (True, False):
        kept = {pair: n for pair, n in pairs.items() if pair[0] != pair[1] and (pair[0] // 8 != pair[1] // 8) == across}
        ends = [Counter(), Counter()]
        for pair, count in kept.items():
            for end, rank in zip(ends, pair, strict=True):
                end[rank] += count
        busiest.append(max((each for end in ends for each in end.values()), default=0))
    moved = scripts.block_ablation._moved(layout, lengths, bench=bench)
    assert [moved.between, moved.inside] == busiest
