"""Blocks transferred in each round, and their time."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions
from rayfcp.cost.kernels.flow import Flow, finish_s, phases_of
from rayfcp.cost.layout import layout_s
from rayfcp.plan.blocks.planner import block_tokens, plan_blocks, sizes
from rayfcp.plan.blocks.rounds import own_sides
from rayfcp.plan.imbalance import round_tokens
from rayfcp.plan.layout import Placement
from rayfcp.plan.strategies.flex_block import propose_blocks
from rayfcp.values import ClusterSpec, Pacing
from tests.examples import examples
from tests.plan.blocks.helpers import any_options, drawn, pool_of, small
from tests.plan.helpers import UNIT, batch_of, profiled
from tests.program.lowered import attention_of


@examples(150)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(1, 7))
def test_every_need_is_met_once_in_as_many_matchings_as_the_degree(seed: int, num_ranks: int) -> None:
    sequences, _ = small(seed, num_ranks=num_ranks)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=sum(each.num_tokens for each in sequences))
    found = plan_blocks(pool_of(sequences), cluster=cluster, cost=UNIT, options=any_options(seed))
    layout = found.layout(np.arange(len(sequences)))
    due = {
        (query.rank, at)
        for query in layout.blocks
        for at, key in enumerate(layout.blocks)
        if key.sequence == query.sequence and key.rank != query.rank
        if key.start < query.start
    }
    got = Counter((t.target, block) for step in layout.rounds for t in step.transfers for block in t.blocks)
    assert set(got) == due and set(got.values()) <= {1}
    ends = [(t.source, t.target) for step in layout.rounds for t in step.transfers]
    degrees = [*Counter(source for source, _ in ends).values(), *Counter(target for _, target in ends).values()]
    assert len(layout.rounds) == max(degrees, default=0)
    for step in layout.rounds:
        assert len({t.source for t in step.transfers}) == len(step.transfers) == len({t.target for t in step.transfers})
        assert all(layout.blocks[block].rank == t.source for t in step.transfers for block in t.blocks)


@examples(60)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(1, 6))
def test_pairs_and_pieces_are_those_of_the_programs(seed: int, num_ranks: int) -> None:
    """In unsplit programs a rank's predicted attention is what it attends to."""
    sequences, _ = small(seed, num_ranks=num_ranks)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=sum(each.num_tokens for each in sequences))
    cost = UNIT.with_coefficients(attention_half_tokens=3.0)
    found = plan_blocks(pool_of(sequences), cluster=cluster, cost=cost, options=BlockOptions(block_tokens=100))
    ids = np.arange(len(sequences))
    layout = found.layout(ids)
    programs = attention_of(layout, num_ranks=num_ranks)
    for rank, program in enumerate(programs):
        held = any(block.rank == rank for block in layout.blocks)
        pairs = program.num_pairs if held else 0
        seconds = found.traffic.attention_s[rank]
        assert seconds >= cost.attention_s_per_pair * pairs * (1 - 1e-9)
    port = np.maximum(*(_moved(found, side) for side in ("source", "target")))
    assert round_tokens(Placement.of(layout), num_ranks=num_ranks).tolist() == port.tolist()


def _moved(found: object, side: str) -> np.ndarray:
    messages, count = found.traffic.messages, found.traffic.num_ranks  # type: ignore[attr-defined]
    return np.bincount(getattr(messages, side), messages.tokens, minlength=count)


def test_seconds_of_two_ranks_in_closed_form() -> None:
    """A causal sequence of 400 tokens: the first rank has its ends, the other its middle."""
    cost = UNIT.with_coefficients(attention_half_tokens=10.0)
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=200)
    options = BlockOptions(block_tokens=200, coalesce=1)
    found = plan_blocks(pool_of(batch_of([400])), cluster=cluster, cost=cost, options=options)
    pieces = list(zip(*(column.tolist() for column in found.pieces[1:4]), strict=True))
    assert pieces == [(0, 100, 0), (100, 300, 1), (300, 400, 0)]
    hop_s, again_s = cost.ring_intra_s_per_token, cost.ring_s_per_round
    assert sorted(found.traffic.moved_s) == pytest.approx([100 * hop_s + again_s, 200 * hop_s + again_s])
    ends = 2 * 100 * 101 / 2 + 100 * 100 + 10 * (50 + 50 + 100)  # two squares and what lies between them
    middle = 200 * 201 / 2 + 10 * 100
    brought = [100 * 200 + 10 * 200, 200 * 100 + 10 * 200]
    assert found.traffic.own_s == pytest.approx([1e-3 * ends, 1e-3 * middle])
    assert found.traffic.attention_s == pytest.approx([1e-3 * (ends + brought[0]), 1e-3 * (middle + brought[1])])
    assert (
        found.seconds
        >= layout_s(found.layout(np.array([0])), by_id={0: batch_of([400])[0]}, cluster=cluster, cost=cost)
        - cost.fixed_s
        - 1e-9
    )


def test_own_runs_of_blocks_count_as_one() -> None:
    cluster = ClusterSpec(num_ranks=1, max_tokens_per_rank=1000)
    pool = pool_of(batch_of([300, 200]))
    found = plan_blocks(pool, cluster=cluster, cost=UNIT, options=BlockOptions(block_tokens=50, placement="lpt"))
    assert own_sides(found.pieces).tolist() == [150 + 100]


def flow(
    stages: list[int], ends: list[tuple[int, int]], *, moved: list[float], work: list[float], own: list[float]
) -> Flow:
    source, target = (np.array([pair[side] for pair in ends], np.int64) for side in (0, 1))
    phase = np.array(stages, np.int64)
    due = Pacing(coalesce=1, num_buffers=3).due_phase(phase)
    return Flow(phase, source, target, np.array(moved), np.array(work), np.array(own), due)


def test_communication_hides_behind_level_phases() -> None:
    """Rank 0 has all at home, rank 1 gets half of what it computes: both go in two phases of 5 s."""
    one = flow([0], [(0, 1)], moved=[4.0], work=[5.0], own=[10.0, 5.0])
    assert phases_of(one).tolist() == [[5.0, 5.0], [5.0, 5.0]]
    assert finish_s(one).tolist() == [10.0, 10.0]
    slow = one._replace(moved_s=np.array([7.0]))
    assert finish_s(slow).tolist() == [12.0, 12.0], "two seconds of the transfer are exposed on both ranks"


def test_ports_are_taken_in_turn() -> None:
    """Two transfers of one stage from one source follow each other; to one target too."""
    both = flow([0, 0], [(0, 1), (0, 2)], moved=[3.0, 3.0], work=[0.0, 0.0], own=[1.0, 1.0, 1.0])
    assert finish_s(both).max() == pytest.approx(6.0 + 0.5)


def test_what_comes_is_computed_before_its_buffer_is_due() -> None:
    """A heavy first stage is spread over two phases, as three buffers permit, and no more."""
    heavy = flow([0, 1, 2, 3], [(0, 1)] * 4, moved=[0.1] * 4, work=[12.0, 1.0, 1.0, 1.0], own=[15.0, 0.0])
    work = phases_of(heavy)
    assert work[1].sum() == 15.0 and work[1, 0] == 0.0
    assert work[1, 1] == 6.0, "two shares of 3 are due by the second phase"
    assert work[1, 2] >= 6.0, "the rest of the first stage, by its last phase"
    assert work[0].tolist() == [3.0] * 5


def test_three_rules_of_size() -> None:
    """2K on the paper's GPU-X (section 7); fewer where ranks have few tokens; more where links are slow."""
    cost = profiled(64, hardware="gpu-x")
    assert block_tokens(cost, tokens_per_rank=32_768, crosses=True) == 2048
    assert block_tokens(cost, tokens_per_rank=4096, crosses=True) == 512
    slow = cost.with_coefficients(ring_inter_s_per_token=4096 * cost.attention_s_per_pair)
    assert block_tokens(slow, tokens_per_rank=65_536, crosses=True) == 4096
    assert block_tokens(slow, tokens_per_rank=65_536, crosses=False) == 2048
    assert block_tokens(cost, tokens_per_rank=3, crosses=False) == 128
    assert sizes(128, tokens_per_rank=3.0) == (128,)


@pytest.mark.parametrize(("name", "num_ranks"), [("bimodal", 64), ("long-tail", 32)])
def test_rounds_run_as_one_are_chosen_for_both_passes(name: str, num_ranks: int) -> None:
    """Half or twice as many take no less, by the walk over both passes that prices plans."""
    sequences, cost = drawn(name, num_ranks=num_ranks, seed=0), profiled(num_ranks, hardware="gpu-x")
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=40_000)
    chosen, seconds = 0, {}
    for coalesce in (None, 1, 2, 4, 8, 16):
        options = BlockOptions(block_tokens=2048, heads=1, coalesce=coalesce)
        (found,) = propose_blocks(sequences, cluster=cluster, cost=cost, options=options).microbatches
        assert found.layout is not None and found.layout.pacing is not None
        seconds[coalesce or 0] = found.group_s[0]
        chosen = chosen or found.layout.pacing.coalesce
    near = [seconds[count] for count in (chosen // 2, chosen * 2) if count]
    assert seconds[0] <= min(near)
