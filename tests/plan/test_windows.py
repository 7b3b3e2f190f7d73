"""Costs and plans of models whose layers have windows: pairs and moved tokens counted one by one, sound plans."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import PlanConfig
from rayfcp.cost.work import layout_work
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.plan.imbalance import rank_loads
from rayfcp.plan.pipeline.chunks import ChunkWork, balanced_ends
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import ClusterSpec, LayerKind, Layout, SequenceSpec
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.execute.layouts import plan_of, random_layout, ring
from tests.masks import kinds
from tests.plan.counted import assert_moves_counted, assert_pairs_counted, of_windows
from tests.simulate.helpers import MODEL

WINDOWS = st.sampled_from([(3,), (0, 5), (1, 8, 1000), (40,), (-6,), (-20, 0)])
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=3)


@examples(30)
@given(lengths=LENGTHS, windows=WINDOWS, num_ranks=st.integers(1, 4), seed=st.none() | st.integers(0, 10_000))
def test_work_of_layouts_counted_one_by_one(
    lengths: list[int], windows: tuple[int, ...], num_ranks: int, seed: int | None
) -> None:
    sequences = of_windows(lengths, windows)
    layout = (
        ring(sequences, num_ranks=num_ranks)
        if seed is None
        else random_layout(sequences, num_ranks=num_ranks, seed=seed)
    )
    assert_pairs_counted(layout, sequences, num_ranks=num_ranks)


@examples(20)
@given(length=st.integers(20, 90), window=st.integers(1, 30), num_ranks=st.integers(2, 4), seed=st.integers(0, 999))
def test_moved_tokens_are_those_that_the_program_moves(length: int, window: int, num_ranks: int, seed: int) -> None:
    sequences = of_windows([length], (window,))
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_moves_counted(layout, sequences, num_ranks=num_ranks)


def test_ranks_load_the_pairs_of_their_blocks() -> None:
    sequences = of_windows([64], (0, 4))
    plan = plan_of(ring(sequences, num_ranks=2), sequences, num_ranks=2)
    cost = cost_of(2, (0, 4, 4, 0))
    (loads,) = rank_loads(plan, sequences, cost=cost)
    assert loads[1].sum() == pytest.approx(sequences[0].attention_pairs)


def cost_of(num_ranks: int, layer_windows: tuple[int, ...], *, num_stages: int = 1) -> CostModel:
    return CostModel.from_profiles(
        replace(MODEL, kind_of_layer=kinds(*layer_windows)),
        hardware_profile("cpu"),
        num_ranks=num_ranks,
        num_stages=num_stages,
        bytes_per_element=4,
        reduce_every="step",
    )


@pytest.mark.parametrize("layers", [(16, 16, 16, 16), (16, 16, 16, 0)])
@pytest.mark.parametrize(
    "strategy", ["flex-ring", "flex-block", "static-cp", "ulysses", "elastic-pipeline", "seq1f1b", "magi", "dapple"]
)
def test_strategies_plan_for_windows(strategy: str, layers: tuple[int, ...]) -> None:
    """Proved for each kind of layers, no faster than the bound says, neither by costs nor simulated."""
    num_stages = 2 if strategy in ("elastic-pipeline", "seq1f1b", "dapple") else 1
    model = replace(MODEL, kind_of_layer=kinds(*layers))
    sequences = [
        SequenceSpec(id=at, num_tokens=n, num_targets=n - 1, layer_kinds=model.layer_kinds)
        for at, n in enumerate([900, 30, 1, 210, 64, 15])
    ]
    cluster = ClusterSpec(num_ranks=4, num_stages=num_stages, max_tokens_per_rank=260)
    cost = cost_of(4, layers, num_stages=num_stages)
    options = PlanConfig(primitives=("ring", "ulysses"), search_moves=300)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=options)
    check_plan(plan, sequences, cluster=cluster, cost=cost)
    programs = lower(plan, sequences)
    timeline = simulate(programs, model=model, hardware=hardware_profile("cpu"), bytes_per_element=4)
    assert timeline.iteration_s >= plan.lower_bound_s * (1 - 1e-9)


@examples(20)
@given(longest=st.integers(50, 5000), count=st.integers(1, 12), window=st.integers(1, 400))
def test_slices_through_windows_take_as_long_as_each_other(longest: int, count: int, window: int) -> None:
    work = ChunkWork(pair_s=1.0, token_s=3.0, context_s=0.0, layer_kinds=((LayerKind(window=window), 2),))
    ends = balanced_ends(longest, count, work=work, rows=1)
    assert ends[-1] == longest and len(ends) == min(count, longest)
    seconds = [work.pairs(start, stop) + 3.0 * (stop - start) for start, stop in itertools.pairwise((0, *ends))]
    assert max(seconds) - min(seconds) <= 4 * (window + 3.0) + longest / 100 * (window + 3.0)


def test_layouts_without_windows_price_as_ever() -> None:
    """A window that cuts nothing."""
    whole = [SequenceSpec(id=0, num_tokens=50, num_targets=49)]
    cut = [replace(whole[0], layer_kinds=tuple(zip(kinds(50, 77), (3, 1), strict=True)))]
    layout: Layout = ring(whole, num_ranks=3)
    found, want = (layout_work(layout, by_id={0: each[0]}, num_ranks=3) for each in (cut, whole))
    for name in ("own_pairs", "own_sides", "moved_tokens", "pairs", "sides"):
        assert getattr(found, name) == pytest.approx(getattr(want, name))
