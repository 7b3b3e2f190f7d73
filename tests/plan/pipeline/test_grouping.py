"""Grouping against all ways to cut the kinds, and forward passes as early as memory permits."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.kernels.passes import eager_leads
from rayfcp.plan.pipeline.planner import best_groups, kinds_of
from rayfcp.plan.pipeline.schedule import (
    Order,
    backward_order,
    leads_of_stages,
    least_leads,
    order_of_leads,
    peak_bytes,
    replayed_s,
)
from tests.examples import examples
from tests.plan.pipeline.helpers import descending
from tests.plan.pipeline.test_recompute import held_bytes


@given(num_kinds=st.integers(1, 6), most=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_the_best_of_all_groupings(num_kinds: int, most: int, seed: int) -> None:
    table = np.random.default_rng(seed).integers(0, 20, (num_kinds + 1, num_kinds + 1)).astype(float)
    table[table == 0] = np.inf

    def cost(first: int, last: int) -> float:
        return float(table[first, last])

    least = min(
        sum(cost(*group) for group in itertools.pairwise([0, *cuts, num_kinds]))
        for count in range(most)
        for cuts in itertools.combinations(range(1, num_kinds), count)
    )
    found = best_groups(cost, num_kinds=num_kinds, most=most)
    assert bool(found) == np.isfinite(least)
    if found:
        assert sum(cost(*group) for group in found) == pytest.approx(least)
        assert len(found) <= most
        assert [at for group in found for at in group] == [0, *sorted([at for _, at in found[:-1]] * 2), num_kinds]


@given(runs=descending)
def test_kinds_are_runs_of_one_length(runs: list[int]) -> None:
    kinds = kinds_of(runs)
    assert [at for kind in kinds for at in runs[slice(*kind)]] == runs
    assert all(len(set(runs[slice(*kind)])) == 1 for kind in kinds)
    assert len(kinds) == len(set(runs))


@given(data=st.data(), runs=descending, num_stages=st.integers(1, 5), ahead=st.integers(1, 4))
@examples(100)
def test_early_passes_stay_within_the_room(data: st.DataObject, runs: list[int], num_stages: int, ahead: int) -> None:
    held = data.draw(held_bytes(runs=runs, layers=[2] * num_stages))
    base = least_leads(runs)
    least, most = (leads_of_stages(base, num_stages=num_stages, ahead=more) for more in (1, ahead))
    before = peak_bytes(order_of_leads(least, runs=runs), held=held)
    shape = held.kept.shape
    leads = eager_leads(least, most, backward_order(runs), held, np.zeros(shape, np.int64))
    assert (least <= leads).all()
    assert (leads <= most).all()
    order = order_of_leads(leads, runs=runs)
    after = peak_bytes(order, held=held)
    assert (after <= np.maximum(before, held.budget)).all()
    ones = np.ones(shape)
    assert replayed_s(order, forward_s=ones, backward_s=ones, transfer_s=np.zeros(shape[1])) > 0, "none waits for ever"
    assert meets(order), "none waits for ever where hand-overs complete in order"
    if num_stages <= 3 and (held.budget >= held.kept.sum(axis=1) + 2 * held.summed.sum() + 6).all():
        inner = slice(1, 2) if num_stages == 3 else slice(0)
        assert np.array_equal(np.delete(leads, inner, axis=0), np.delete(most, inner, axis=0)), "room for everything"


@pytest.mark.parametrize("runs", [[1] * 12, [4, 2, 1, 1, 1, 1, 1, 1], [3, 3, 2, 2, 1, 1]])
@pytest.mark.parametrize("num_stages", [4, 5])
def test_stages_far_ahead_would_wait_for_ever(runs: list[int], num_stages: int) -> None:
    least, most = (leads_of_stages(least_leads(runs), num_stages=num_stages, ahead=ahead) for ahead in (1, 3))
    assert not meets(order_of_leads(most, runs=runs))
    nothing, stages = np.zeros(sum(runs)), np.ones(num_stages)
    held = StageBytes(np.zeros((num_stages, sum(runs))), *[nothing] * 5, layers=stages, budget=stages)
    leads = eager_leads(least, most, backward_order(runs), held, np.zeros(held.kept.shape, np.int64))
    assert meets(order_of_leads(leads, runs=runs))
    assert (leads > least).any()


def meets(order: Order) -> bool:
    """True if all stages reach their end when a stage takes what comes only after its own last send that way was
    taken."""
    num_stages, num_passes = order.shape
    at, done = [0] * num_stages, [set[int]() for _ in range(num_stages)]
    sent: list[dict[bool, int]] = [{} for _ in range(num_stages)]
    moved = True
    while moved:
        moved = False
        for stage in range(num_stages):
            while at[stage] < num_passes:
                code = int(order[stage, at[stage]])
                source, target = (stage + 1, stage - 1) if code < 0 else (stage - 1, stage + 1)
                if 0 <= source < num_stages:
                    last = sent[stage].get(code < 0)
                    if code not in done[source] or (
                        0 <= target < num_stages and last is not None and last not in done[target]
                    ):
                        break
                done[stage].add(code)
                sent[stage][code < 0] = code
                at[stage] += 1
                moved = True
    return at == [num_passes] * num_stages
