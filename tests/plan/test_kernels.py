from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import CostModel
from rayfcp.plan.assembly import columns_of
from rayfcp.plan.groups.kernels.cut import _packed, cut_by_time, floor_s
from rayfcp.plan.groups.kernels.fill import Fill, _fill, _queue
from rayfcp.plan.groups.kernels.improve import _bottleneck
from rayfcp.plan.groups.kernels.price import Load, _price
from rayfcp.plan.groups.kernels.ranks import _allocate
from rayfcp.plan.groups.kernels.search import fill_in_turn, improve, pack, perturb, place, ruin, total_s
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    SearchProblem,
    _join,
    _open,
    copied,
)
from rayfcp.plan.groups.planner import PinnedGroup, prices_of, problem_of, seconds_by_degree
from rayfcp.values import ClusterSpec, Primitive
from tests.examples import examples
from tests.plan.degrees import least_makespan
from tests.plan.helpers import RECURRENT, RUN_AHEAD, UNIT, batch_of, profiled

BOTH = (Primitive.RING, Primitive.ULYSSES)
COSTS = [
    UNIT,
    UNIT.with_coefficients(overlap=0.4, attention_half_tokens=30.0),
    profiled(12, hardware="ascend-910c"),
    RUN_AHEAD,
    RECURRENT,
]
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=14)


def entry(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrapper by which Python calls a kernel that only kernels can call."""
    return numba.njit(lambda *given: kernel(*given))  # noqa: PLW0108


price, allocate, open_group, join, fill, bottleneck, packed, queue_of = map(
    entry, (_price, _allocate, _open, _join, _fill, _bottleneck, _packed, _queue)
)


def problem(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    cost: CostModel = UNIT,
    pinned: Sequence[PinnedGroup] = (),
) -> SearchProblem:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(max_tokens, -(-max(lengths) // num_ranks)))
    batch = columns_of(batch_of(lengths), cost=cost)
    return problem_of(batch, cluster=cluster, cost=cost, primitives=(Primitive.RING,), pinned=pinned)


@pytest.mark.parametrize("cost", COSTS)
@given(
    st.builds(Load, st.floats(0, 1e6), st.floats(1, 1e4), st.integers(1, 9).map(float)),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([(0,), (1,), (0, 1)]),
)
@examples(60)
def test_a_group_costs_what_the_model_says(
    cost: CostModel, load: Load, degree: int, crosses: bool, used: tuple[int, ...]
) -> None:
    cluster = ClusterSpec(num_ranks=12, max_tokens_per_rank=10)
    primitives = tuple(BOTH[at] for at in used)
    prices = prices_of(cluster, cost, primitives=primitives)
    outside = crosses or degree > cost.ranks_per_node
    passes = []
    for primitive in primitives:
        given: dict[str, Any] = {"degree": degree, "primitive": primitive, "crosses": outside}
        layers_s, head_s, backward_s = cost.passes_s(load.pairs, load.tokens, num_sequences=load.sequences, **given)
        passes.append([float(layers_s + head_s), float(backward_s)])
    span_kind = int(crosses)
    alone_s = min(forward + backward for forward, backward in passes)
    assert price(prices, load, degree, span_kind, 0.0) == pytest.approx(alone_s, rel=1e-12)
    slower = [max(forward / 0.3, backward / 0.7) for forward, backward in passes]
    ahead = [max(cost.ahead * 0.7 * each - cost.ahead_s, 0.0) for each in slower]
    paced_s = min(max(sum(both), each - less) for both, each, less in zip(passes, slower, ahead, strict=True))
    assert price(prices, load, degree, span_kind, 0.3) == pytest.approx(paced_s, rel=1e-12)


@pytest.mark.parametrize("cost", COSTS)
@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(1, 1e4), st.integers(1, 4)), min_size=1, max_size=6),
    st.floats(0.05, 0.95),
)
@examples(60)
def test_the_makespan_is_the_slowest_group_at_the_pace_of_both_passes(
    cost: CostModel, groups: list[tuple[float, float, int]], other: float
) -> None:
    """No other pace gives less."""
    prices = prices_of(ClusterSpec(num_ranks=12, max_tokens_per_rank=10), cost, primitives=(Primitive.RING,))
    layers_s, head_s, backward_s = np.transpose([cost.passes_s(*load, degree=degree) for *load, degree in groups])
    forward_s = layers_s + head_s
    makespan_s = cost.makespan_s([forward_s, 0 * head_s, backward_s])
    pace = max(forward_s) / (max(forward_s) + max(backward_s))

    def at_pace(share: float) -> float:
        return max(price(prices, Load(*load, 1.0), degree, 0, share) for *load, degree in groups)

    assert at_pace(float(pace)) == pytest.approx(makespan_s, rel=1e-9)
    assert at_pace(other) >= makespan_s * (1 - 1e-9)


@given(LENGTHS, st.integers(1, 12), st.data())
@examples(30)
def test_ranks_are_given_out_exactly(lengths: list[int], num_ranks: int, data: st.DataObject) -> None:
    """At pace 0 groups are priced alone: the least makespan of the table."""
    held = problem(lengths, num_ranks=num_ranks, max_tokens=10**6)
    owners = [data.draw(st.integers(0, num_ranks - 1)) for _ in lengths]
    state = held.state
    state.spare[0], state.counts[1] = num_ranks, 1
    groups = {name: open_group(held, 0, 1) for name in sorted(set(owners))}
    for at, name in enumerate(owners):
        join(held, at, groups[name], 1)
    table = seconds_by_degree(held.prices, state, groups=list(groups.values()))
    makespan_s = allocate(held, 0, 0)
    degrees = state.degree[list(groups.values())]
    assert degrees.sum() + state.spare[0] == num_ranks
    assert table[np.arange(len(groups)), degrees - 1].max() == pytest.approx(least_makespan(table), rel=1e-12)
    assert makespan_s >= least_makespan(table) * (1 - 1e-12)


def check(held: SearchProblem) -> float:
    """Sequences, tokens, ranks and seconds of a state fit together; returns its total."""
    state, prices = held.state, held.prices
    assert state.owner.min() >= 0
    used = sorted(set(state.owner.tolist()))
    for group in used:
        members = np.flatnonzero(state.owner == group)
        assert state.tokens[group] == held.batch.tokens[members].sum()
        assert state.pairs[group] == held.batch.pairs[members].sum()
        assert state.sequences[group] == len(members)
        assert state.tokens[group] <= state.degree[group] * prices.max_tokens
    for home in {int(state.home[group]) for group in used}:
        assert home >= 0
        ranks = sum(int(state.degree[group]) for group in used if state.home[group] == home)
        assert ranks + state.spare[home] == prices.num_ranks
    return total_s(held)


@given(LENGTHS, st.integers(1, 20), st.integers(1, 300), st.sampled_from(COSTS), st.booleans())
@examples(80)
def test_every_step_leaves_a_plan_that_is_no_slower(
    lengths: list[int], num_ranks: int, max_tokens: int, cost: CostModel, rounds: bool
) -> None:
    """`perturb` and `ruin` compare plans where their groups lie, `improve` by the pace of each microbatch."""
    held = problem(lengths, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
    seconds = fill_in_turn(held, first=int(held.nodes.max()) if rounds else 0)
    assert seconds == pytest.approx(check(held), rel=1e-12)
    for change in (perturb, ruin):
        before_s = place(held)
        held.state.counts[MOVES] = 0
        after_s = change(held, last=3000, saved=copied(held.state))
        assert check(held) <= after_s * (1 + 1e-12)
        assert place(held) == pytest.approx(after_s, rel=1e-12)
        assert after_s <= before_s * (1 + 1e-9)
    before_s = check(held)
    held.state.counts[MOVES] = 0
    after_s = improve(held, last=3000)
    assert check(held) == pytest.approx(after_s, rel=1e-12)
    assert after_s <= before_s * (1 + 1e-9)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 300), st.lists(st.integers(1, 3), max_size=6))
@examples(60)
def test_a_good_change_gets_the_slowest_group_half_way_down_to_the_mean_of_all_ranks(
    lengths: list[int], num_ranks: int, max_tokens: int, sizes: list[int]
) -> None:
    """Those of pinned are ranks as well."""
    pinned = [PinnedGroup(ranks=tuple(range(size)), speed=0.5, crosses=False) for size in sizes]
    held = problem(lengths, num_ranks=num_ranks, max_tokens=max_tokens, pinned=pinned)
    fill_in_turn(held)
    state = held.state
    for microbatch in range(state.counts[MICROBATCHES]):
        groups = np.flatnonzero(state.home[: state.counts[GROUPS]] == microbatch)
        seconds = np.zeros(num_ranks + sum(sizes))
        busy = np.repeat(state.seconds[groups], state.degree[groups])
        seconds[: len(busy)] = busy
        slow = bottleneck(held, microbatch)
        assert slow.good_s == pytest.approx((seconds.max() + seconds.mean()) / 2, rel=1e-12)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 300), st.data())
@examples(40)
def test_what_a_microbatch_leaves_fits_nowhere_in_it(
    lengths: list[int], num_ranks: int, max_tokens: int, data: st.DataObject
) -> None:
    held = problem(lengths, num_ranks=num_ranks, max_tokens=max_tokens, cost=data.draw(st.sampled_from(COSTS)))
    state, batch, prices = held.state, held.batch, held.prices
    target_s = float(batch.alone_s[0]) * data.draw(st.floats(0.5, 3.0))
    pool, node = data.draw(st.integers(0, num_ranks)), data.draw(st.sampled_from([0, num_ranks]))
    fill(held, queue_of(held, np.arange(len(lengths))), Fill(0, 0, target_s, 0.0, pool, node))
    groups = [group for group in range(state.counts[0]) if state.degree[group]]
    assert state.degree[groups].sum() + state.spare[0] == num_ranks
    assert (state.tokens[groups] <= state.degree[groups] * prices.max_tokens).all()
    assert (state.seconds[groups] <= target_s * (1 + 1e-8)).all()
    places = [
        (int(state.degree[each]), state.pairs[each], state.tokens[each], state.sequences[each]) for each in groups
    ]
    if pool == 0 and node == 0:
        places += [(spare, 0.0, 0.0, 0.0) for spare in range(1, int(state.spare[0]) + 1)]
    for at in np.flatnonzero(state.owner < 0):
        for degree, pairs, tokens, count in places:
            load = Load(float(pairs + batch.pairs[at]), float(tokens + batch.tokens[at]), float(count + 1))
            seconds = price(prices, load, degree, 0, 0.0)
            assert load.tokens > degree * prices.max_tokens or seconds > target_s * (1 - 1e-8)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 300), st.integers(1, 4))
@examples(60)
def test_a_packed_cut_is_a_plan_above_its_floor(
    lengths: list[int], num_ranks: int, max_tokens: int, count: int
) -> None:
    held = problem(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    part = cut_by_time(held, count, held.prices.max_tokens * num_ranks, float("inf"))
    if len(part):
        assert sorted(set(part.tolist())) == list(range(part.max() + 1))
        assert floor_s(held, part) <= pack(held, part=part) * (1 + 1e-12)
        check(held)


@examples(100)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(4, 30),
    st.booleans(),
)
def test_packs_of_one_degree_hold_all_or_have_no_room_by_length_either(
    lengths: list[int], count: int, degree: int, max_tokens: int, by_length: bool
) -> None:
    held = problem(lengths, num_ranks=degree, max_tokens=max_tokens)
    most = int(held.prices.max_tokens) * degree
    packs = packed(held, np.arange(len(lengths)), degree, count, by_length)
    if len(packs.owners) == 0:
        assert first_fit(sorted(lengths, reverse=True), count, most) is None
        return
    tokens = np.bincount(packs.owners, held.batch.tokens, minlength=count)
    assert tokens.tolist() == packs.tokens.tolist() and tokens.max() <= most
    assert np.bincount(packs.owners, held.batch.pairs, minlength=count).tolist() == packs.pairs.tolist()


def first_fit(lengths: list[int], count: int, max_tokens: int) -> list[int] | None:
    """Contents of packs of that capacity in tokens, each sequence in the first pack that it fits in."""
    held = [0] * count
    for length in lengths:
        fitting = [pack for pack in range(count) if held[pack] + length <= max_tokens]
        if not fitting:
            return None
        held[fitting[0]] += length
    return held


def test_packs_go_by_length_where_work_leaves_one_without_room() -> None:
    """By work two of 5 tokens are in packs of their own, 4 and 3 join them, and the last 3 fits nowhere."""
    held = problem([5, 5, 4, 3, 3], num_ranks=1, max_tokens=10)
    assert packed(held, np.arange(5), 1, 2, False).tokens.tolist() == [10, 10]
