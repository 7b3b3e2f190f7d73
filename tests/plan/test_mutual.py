"""Costs and plans of sequences with mutual pictures: cells and moved tokens counted one by one, sound plans."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import PlanConfig
from rayfcp.cost.bound import lower_bound
from rayfcp.cost.work import work_of
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.plan.pipeline.chunks import Pool, Work
from rayfcp.plan.strategies.registry import names
from rayfcp.program import Load, RankProgram, lower
from rayfcp.program.windows import attention_by_window
from rayfcp.simulate import simulate
from rayfcp.values import ClusterSpec, Pictures, Primitive, SequenceSpec
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.execute.layouts import random_layout, ring
from tests.masks import pictured, seen
from tests.plan.counted import assert_cells_counted, assert_moves_counted, of_windows
from tests.plan.helpers import UNIT, batch_of
from tests.simulate.helpers import MODEL

WINDOWS = st.sampled_from([(), (3,), (0, 5), (1, 8, 1000), (40,)])
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=3)


def sequences_of(lengths: list[int], windows: tuple[int, ...], seed: int) -> list[SequenceSpec]:
    return pictured(of_windows(lengths, windows), seed=seed)


@examples(30)
@given(LENGTHS, WINDOWS, st.integers(1, 4), st.integers(0, 10_000), st.booleans())
def test_work_of_layouts_counted_one_by_one(
    lengths: list[int], windows: tuple[int, ...], num_ranks: int, seed: int, rings: bool
) -> None:
    sequences = sequences_of(lengths, windows, seed)
    layout = ring(sequences, num_ranks=num_ranks) if rings else random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_cells_counted(layout, sequences, num_ranks=num_ranks)


@examples(30)
@given(st.integers(2, 80), st.integers(0, 30), st.integers(2, 4), st.integers(0, 9999))
def test_moved_tokens_are_those_that_the_program_moves(length: int, window: int, num_ranks: int, seed: int) -> None:
    sequences = sequences_of([length], (window,), seed)
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    assert_moves_counted(layout, sequences, num_ranks=num_ranks)


def test_whole_pictures_add_triangles_to_own_sides() -> None:
    (sequence,) = sequences_of([64], (), 3)
    picture = replace(sequence.pictures[0], start=8, num_tokens=6, count=3, stride=9, mutual=True)
    sequence = replace(sequence, pictures=(picture,))
    layout = ring([sequence], num_ranks=1)
    work = work_of(layout, by_id={0: sequence}, num_ranks=1)
    assert work.own_sides.tolist() == [64 / 2 + 3 * 5 / 2]
    assert work.own_cells.tolist() == [64 * 65 / 2 + 3 * 15]


STAGED = ("elastic-pipeline", "seq1f1b", "dapple")


@pytest.mark.parametrize("strategy", names())
@examples(3)
@given(seed=st.integers(0, 10_000))
def test_every_strategy_plans_proves_and_runs_each_cell_once(strategy: str, seed: int) -> None:
    """Proved for each kind of layers, no faster than the bound says, neither by costs nor simulated."""
    rng = random.Random(seed)
    num_stages = 2 if strategy in STAGED else 1
    model = replace(MODEL, layer_windows=rng.choice([(), (16, 16, 16, 0)]))
    lengths = [300 + rng.randrange(300), *(1 + int(rng.lognormvariate(3.5, 1.2)) % 250 for _ in range(5))]
    plain = [
        SequenceSpec(id=at, num_tokens=n, num_targets=n - 1, windows=model.windows) for at, n in enumerate(lengths)
    ]
    sequences = pictured(plain, seed=seed)
    cluster = ClusterSpec(num_ranks=4, num_stages=num_stages, max_tokens_per_rank=260)
    cost = CostModel.from_profiles(
        model,
        hardware_profile("cpu"),
        num_ranks=4,
        num_stages=num_stages,
        bytes_per_element=4,
        reduce_every="step",
    )
    options = PlanConfig(primitives=("ring", "ulysses"), search_moves=200)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=options)
    check_plan(plan, sequences, cluster=cluster, cost=cost)
    programs = lower(plan, sequences)
    for window, of_ranks in attention_by_window(programs).items():
        due = sum(int(seen(each, window=window).sum()) for each in sequences)
        assert sum(part.num_cells for parts in of_ranks for part in parts) - padding(programs) == pytest.approx(due)
    timeline = simulate(programs, model=model, hardware=hardware_profile("cpu"), bytes_per_element=4)
    assert timeline.iteration_s >= plan.lower_bound_s * (1 - 1e-9)


def padding(programs: Sequence[RankProgram]) -> int:
    """One cell of each rank in each microbatch in which it has no tokens."""
    first = programs[: programs[0].num_ranks]
    loads = [item for each in first for item in each.instructions if isinstance(item, Load)]
    return sum(not load.pieces for load in loads)


@examples(25)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 5))
def test_a_mutual_picture_never_lowers_the_bound(seed: int, num_ranks: int) -> None:
    """Nor does a longer sequence hide a shorter one with more cells."""
    rng = random.Random(seed)
    plain = batch_of([rng.randrange(1, 400) for _ in range(rng.randrange(1, 6))])
    sequences = pictured(plain, seed=seed)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=400)
    both = tuple(Primitive)
    found, less = (lower_bound(each, cluster=cluster, cost=UNIT, primitives=both) for each in (sequences, plain))
    assert found >= less * (1 - 1e-12)
    each_alone = [lower_bound([each], cluster=cluster, cost=UNIT, primitives=both) for each in sequences]
    assert found >= max(each_alone) * (1 - 1e-12)


def test_pipelines_keep_sequences_with_mutual_pictures_whole() -> None:
    (causal,) = batch_of([64])
    picture = Pictures(start=8, num_tokens=6, num_patches=24, mutual=True)
    rows = [
        causal,
        replace(causal, id=1, pictures=(picture,)),
        replace(causal, id=2, pictures=(replace(picture, mutual=False),)),
    ]
    pool = Pool.of(rows, work=Work(cell_s=1.0, token_s=0.0, context_s=0.0))
    assert dict(zip(pool.ids.tolist(), pool.sliced.tolist(), strict=True)) == {0: True, 1: False, 2: True}
    assert dict(zip(pool.ids.tolist(), pool.cells.tolist(), strict=True)) == {0: 2080, 1: 2095, 2: 2080}
