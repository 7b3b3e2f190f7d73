"""Recomputation against brute force: within memory, and near the fewest seconds."""

import itertools
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.microbatches import StageBytes
from rayfcp.plan.pipeline.planner import infeasible
from rayfcp.plan.pipeline.schedule import Order, Recompute, one_forward_one_backward, peak_bytes, recomputed_layers
from rayfcp.values.arrays import Ints
from tests.examples import examples
from tests.plan.pipeline.helpers import descending

HOW: tuple[Recompute, ...] = ("adaptive", "uniform", "halves", "none", "full")


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
    budget = np.array([draw(st.integers(5, 60)) for _ in layers], float)
    by_stage = np.array(layers, float)
    return StageBytes(
        kept=by_stage[:, None] * whole,
        freed=whole - 1 - later,
        working=working,
        again=whole,
        summed=later,
        begun=begun,
        layers=by_stage,
        budget=budget,
    )


def fits(order: Order, *, held: StageBytes, layers: Ints) -> bool:
    return bool((peak_bytes(order, held=held, recomputed=layers) <= held.budget).all())


small_runs = descending.filter(lambda runs: sum(runs) <= 4)


@given(data=st.data(), runs=small_runs, layers=st.sampled_from([[2, 2], [2, 1], [1, 1], [3], [2, 2, 1]]))
@examples(60)
def test_seconds_are_near_the_least_of_all(data: st.DataObject, runs: list[int], layers: list[int]) -> None:
    """Each stage against all ways to recompute; a second a layer."""
    held = data.draw(held_bytes(runs=runs, layers=layers))
    order = one_forward_one_backward(runs, num_stages=len(layers))
    least = [np.inf] * len(layers)
    for some in itertools.product(range(max(layers) + 1), repeat=sum(runs)):
        each = np.minimum(np.array(some), np.array(layers)[:, None])
        within = peak_bytes(order, held=held, recomputed=each) <= held.budget
        least = [min(best, sum(row)) if ok else best for best, row, ok in zip(least, each, within, strict=True)]
    found = recomputed_layers(order, held=held, layer_s=np.ones(sum(runs)), how="adaptive")
    if found is None:
        assert np.inf in least
        return
    assert fits(order, held=held, layers=found)
    assert (np.array(least) <= found.sum(axis=1)).all()
    assert (found.sum(axis=1) <= 1.5 * np.array(least) + 1).all()


@given(
    data=st.data(),
    runs=descending,
    num_stages=st.integers(1, 3),
    ahead=st.integers(1, 2),
    how=st.sampled_from(HOW),
)
def test_memory_is_never_passed(
    data: st.DataObject, runs: list[int], num_stages: int, ahead: int, how: Recompute
) -> None:
    held = data.draw(held_bytes(runs=runs, layers=[3] * num_stages))
    order = one_forward_one_backward(runs, num_stages=num_stages, ahead=ahead)
    found = recomputed_layers(order, held=held, layer_s=np.ones(sum(runs)), how=how)
    if found is None:
        most = np.full(held.kept.shape, 0 if how == "none" else 3)
        assert not fits(order, held=held, layers=most)
        return
    assert fits(order, held=held, layers=found)
    assert found.min() >= 0 and found.max() <= 3
    if how != "adaptive":
        assert len(np.unique(found)) == 1


def test_what_does_not_fit_is_named() -> None:
    held = StageBytes(
        kept=np.full((2, 1), 4.0 * 2**30),
        freed=np.full(1, 2.0**30),
        working=np.zeros(1),
        again=np.zeros(1),
        summed=np.zeros(1),
        begun=np.zeros(1),
        layers=np.full(2, 2.0),
        budget=np.array([3.0, 1.0]) * 2**30,
    )
    order = one_forward_one_backward([1], num_stages=2)
    assert recomputed_layers(order, held=held, layer_s=np.ones(1), how="adaptive") is None
    said = {"adaptive": "need 2 GiB with every layer recomputed", "none": "need 4 GiB with 0 layers recomputed"}
    for how, need in said.items():
        message = str(infeasible(order, held=held, how=how))  # type: ignore[arg-type]
        assert re.match(rf"stage 1 has 1 GiB beside .* {need}; add memory", message)
