"""Order, window and recomputation of microbatches: closed forms, and brute force over all of them."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.microbatches import StageBytes, StageTimes, WholeCosts
from rayfcp.plan import CostModel
from rayfcp.plan.pipeline.batch_level import AHEAD, Arrangement, Arranger
from rayfcp.plan.pipeline.schedule import Recompute, one_forward_one_backward, peak_bytes, replayed_s
from tests.examples import examples
from tests.plan.pipeline.helpers import staged_cost

ROOMY = 1e9
RECOMPUTE: tuple[Recompute, ...] = ("adaptive", "uniform", "halves")


def quiet(num_stages: int) -> CostModel:
    """One rank a stage: no traffic of parameters."""
    return staged_cost(num_ranks=1, num_stages=num_stages, memory_bytes=1 << 40)


def costs_of(seconds: Sequence[float], *, num_stages: int, budget: float = ROOMY, num_layers: int = 4) -> WholeCosts:
    """Microbatches that take so long forward and twice as long backward, and hold as many bytes a layer."""
    forward = np.tile(np.array(seconds, np.float64), (num_stages, 1))
    each = forward[0]
    times = StageTimes(forward, 2 * forward, each / num_layers, np.zeros(len(each)), np.zeros((3, *forward.shape)))
    held = StageBytes(
        kept=num_layers * forward,
        freed=0.75 * each,
        working=0.5 * each,
        again=each,
        summed=np.zeros_like(each),
        begun=np.zeros_like(each),
        layers=np.full(num_stages, float(num_layers)),
        budget=np.full(num_stages, budget),
    )
    return WholeCosts(groups=times, first=np.arange(len(each)), times=times, held=held)


def best(costs: WholeCosts, *, recompute: Recompute = "adaptive") -> Arrangement | tuple[float, int, float, float]:
    arranger = Arranger(costs, cost=quiet(len(costs.held.layers)), recompute=recompute)
    found = arranger.starts()
    return arranger.improved(found[0]) if found else arranger.shortfall()


@given(count=st.integers(1, 8), num_stages=st.integers(2, 4))
def test_equal_microbatches_fill_and_drain_once(count: int, num_stages: int) -> None:
    found = best(costs_of([2.0] * count, num_stages=num_stages))
    assert isinstance(found, Arrangement)
    assert found.makespan_s == pytest.approx((count + num_stages - 1) * 6.0)
    assert not found.recomputed.any()


@given(count=st.integers(1, 9), num_stages=st.integers(1, 5), ahead=st.integers(1, 3), most=st.integers(0, 4))
def test_no_stage_is_further_ahead_than_it_may(count: int, num_stages: int, ahead: int, most: int) -> None:
    order = one_forward_one_backward([1] * count, num_stages=num_stages, ahead=ahead, most=most)
    for stage, codes in enumerate(order.tolist()):
        held = np.cumsum([1 if code >= 0 else -1 for code in codes])
        assert held.max() == min(1 + min(most, ahead * (num_stages - 1 - stage)), count)
    ones = np.ones((num_stages, count))
    assert replayed_s(order, forward_s=ones, backward_s=ones, transfer_s=np.zeros(count)) >= 2 * num_stages


seconds_of = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@examples(25)
@given(seconds=seconds_of, num_stages=st.integers(2, 3))
def test_orders_are_near_the_best_of_all(seconds: list[int], num_stages: int) -> None:
    costs = costs_of(seconds, num_stages=num_stages)
    found = best(costs)
    assert isinstance(found, Arrangement)
    times, least = costs.times, np.inf
    for ahead, turns in itertools.product(AHEAD, itertools.permutations(range(len(seconds)))):
        order = one_forward_one_backward([1] * len(seconds), num_stages=num_stages, ahead=ahead)
        forward, backward = times.forward_s[:, turns], times.backward_s[:, turns]
        least = min(least, replayed_s(order, forward_s=forward, backward_s=backward, transfer_s=times.transfer_s))
    assert least * (1 - 1e-9) <= found.makespan_s <= 1.05 * least


@given(
    seconds=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    num_stages=st.integers(2, 4),
    budget=st.floats(1.0, 120.0),
    recompute=st.sampled_from(RECOMPUTE),
)
def test_memory_is_kept_or_one_microbatch_alone_does_not_fit(
    seconds: list[int], num_stages: int, budget: float, recompute: Recompute
) -> None:
    costs = costs_of(seconds, num_stages=num_stages, budget=budget)
    found = best(costs, recompute=recompute)
    alone = max(seconds) * (4 - 0.75 * 4 + 0.5 + 1.0)
    if not isinstance(found, Arrangement):
        assert found[2] == pytest.approx(alone)
        assert alone > budget
        return
    held, turns = costs.held, found.turns
    in_turn = held._replace(kept=held.kept[:, turns], freed=held.freed[turns], working=held.working[turns])
    in_turn = in_turn._replace(again=held.again[turns])
    assert sorted(turns.tolist()) == list(range(len(seconds)))
    assert (peak_bytes(found.order, held=in_turn, recomputed=found.recomputed[:, turns].astype(float)) <= budget).all()
    serial = 3 * num_stages * sum(seconds) + sum((found.recomputed * costs.times.layer_s).sum(axis=1))
    assert found.makespan_s <= serial * (1 + 1e-9)
    if recompute == "uniform":
        assert len(np.unique(found.recomputed)) == 1
    if recompute == "halves":
        assert found.recomputed.flat[0] in (0, 2, 4) and len(np.unique(found.recomputed)) == 1


def test_what_does_not_fit_names_the_stage() -> None:
    costs = costs_of([1.0, 8.0], num_stages=3)
    narrow = np.array([ROOMY, 5.0, ROOMY])
    found = best(
        WholeCosts(groups=costs.groups, first=costs.first, times=costs.times, held=costs.held._replace(budget=narrow))
    )
    assert isinstance(found, tuple)
    assert (found[1], found[3]) == (1, 5.0)
