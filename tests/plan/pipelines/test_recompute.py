"""Recomputation against brute force: never over the room, and as near to the least as is certified."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.recompute import on_stages, recompute, uniform
from rayfcp.plan.pipeline.schedule import Order, one_forward_one_backward, peak_bytes
from rayfcp.values import InfeasiblePlanError
from tests.examples import examples
from tests.plan.pipelines.helpers import descending


@st.composite
def held_bytes(draw: st.DrawFn, *, runs: list[int], layers: list[int]) -> StageBytes:
    """Chunks of a few units each; slices that have later ones keep a unit a layer, and its gradients."""
    count = sum(runs)
    whole = np.array(draw(st.lists(st.integers(3, 6), min_size=count, max_size=count)), float)
    working = np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), float)
    stops = np.repeat(np.cumsum(runs), runs)
    later = (np.arange(count) + 1 < stops).astype(float)
    begun = np.zeros(count)
    begun[np.cumsum(runs) - 1] = np.array(runs) - 1
    room = np.array([draw(st.integers(5, 60)) for _ in layers], float)
    by_stage = np.array(layers, float)
    return StageBytes(
        kept=by_stage[:, None] * whole,
        freed=whole - 1 - later,
        working=working,
        again=whole,
        summed=later,
        begun=begun,
        layers=by_stage,
        room=room,
    )


small_runs = descending.filter(lambda runs: sum(runs) <= 4)


def fits(order: Order, held: StageBytes, layers: np.ndarray) -> bool:
    return bool((peak_bytes(order, held=held, recomputed=layers) <= held.room).all())


@given(data=st.data(), runs=small_runs, layers=st.sampled_from([[2, 2], [2, 1], [1, 1], [3], [2, 2, 1]]))
@examples(80)
def test_the_sum_is_the_least_within_the_certificate(data: st.DataObject, runs: list[int], layers: list[int]) -> None:
    held = data.draw(held_bytes(runs=runs, layers=layers))
    order = one_forward_one_backward(runs, num_stages=len(layers))
    columns = sum(runs) + len(layers) - 1
    least = min(
        (
            sum(counts)
            for counts in itertools.product(range(max(layers) + 1), repeat=columns)
            if fits(order, held, on_stages(np.array(counts, float), order, held=held))
        ),
        default=None,
    )
    try:
        found = recompute(order, held=held, num_nodes=50)
    except InfeasiblePlanError as error:
        # with a stage of fewer layers than others a greedy repair may give up; never where all stages have as many
        assert least is None or min(layers) < max(layers)
        assert "stage" in str(error) and "GiB" in str(error)
        return
    assert least is not None
    assert fits(order, held, found.layers)
    assert found.bound <= least <= found.total
    assert found.total - least <= 1


@given(data=st.data(), runs=descending, num_stages=st.integers(1, 3), ahead=st.integers(1, 2))
def test_memory_is_never_passed(data: st.DataObject, runs: list[int], num_stages: int, ahead: int) -> None:
    held = data.draw(held_bytes(runs=runs, layers=[3] * num_stages))
    order = one_forward_one_backward(runs, num_stages=num_stages, ahead=ahead)
    everything = np.full(held.kept.shape, 3)
    for solve in (recompute, uniform):
        try:
            found = solve(order, held=held)
        except InfeasiblePlanError:
            assert not fits(order, held, everything)
            continue
        assert fits(order, held, found.layers)
        assert found.layers.min() >= 0
        assert found.layers.max() <= 3
        assert found.bound <= found.total


@given(runs=descending, num_stages=st.integers(1, 4), most=st.integers(1, 3))
def test_diagonals_share_a_number(runs: list[int], num_stages: int, most: int) -> None:
    """Eq. 15: the k-th backward pass of a stage recomputes as much as the one after it of the next stage."""
    order = one_forward_one_backward(runs, num_stages=num_stages)
    count = sum(runs)
    counts = np.arange(count + num_stages - 1) % (most + 1)
    held = StageBytes(*[np.zeros(0)] * 6, layers=np.full(num_stages, float(most)), room=np.zeros(num_stages))
    layers = on_stages(counts.astype(float), order, held=held)
    backward = -1 - order[0][order[0] < 0]
    for stage in range(num_stages - 1):
        assert layers[stage][backward[:-1]].tolist() == layers[stage + 1][backward[1:]].tolist()


def test_what_does_not_fit_is_named() -> None:
    held = StageBytes(
        kept=np.full((2, 1), 4.0 * 2**30),
        freed=np.full(1, 2.0**30),
        working=np.zeros(1),
        again=np.zeros(1),
        summed=np.zeros(1),
        begun=np.zeros(1),
        layers=np.full(2, 2.0),
        room=np.array([3.0, 1.0]) * 2**30,
    )
    order = one_forward_one_backward([1], num_stages=2)
    for solve in (recompute, uniform):
        with pytest.raises(InfeasiblePlanError, match=r"stage 1 has 1 GiB beside .* need 2 GiB .* add memory"):
            solve(order, held=held)
