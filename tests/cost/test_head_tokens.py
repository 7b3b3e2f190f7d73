"""Costs of data of which the head runs on some tokens alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.fit import PassShape
from rayfcp.data.rows import IGNORED
from rayfcp.execute.calibrate import _Zeros
from rayfcp.plan import CostModel, hardware_profile, model_flops, model_profile, plan_batch
from rayfcp.program import lower
from rayfcp.simulate.simulate import simulate
from rayfcp.values import ClusterSpec, ModelProfile, SequenceSpec
from tests.examples import examples
from tests.masks import specs

MODEL, HARDWARE, RANKS = model_profile("qwen3-1.7b"), hardware_profile("h100"), 4
TENTH = dataclasses.replace(MODEL, head_fraction=0.1)


def cost_of(model: ModelProfile, *, num_stages: int = 1) -> CostModel:
    return CostModel.from_profiles(
        model, HARDWARE, num_ranks=RANKS, num_stages=num_stages, bytes_per_element=2, reduce_every="step"
    )


@examples(50)
@given(num_tokens=st.integers(1, 500), data=st.data())
def test_flops_count_tokens_with_targets(num_tokens: int, data: st.DataObject) -> None:
    """Plain language modelling, which has no target at the last token, has all of the head."""
    num_targets = data.draw(st.integers(0, num_tokens))
    (plain,) = specs([num_tokens])
    some = SequenceSpec(id=0, num_tokens=num_tokens, num_targets=num_targets)
    assert plain.num_head_tokens == num_tokens
    fewer = max(num_tokens - 1 - num_targets, 0)
    less = model_flops(MODEL, [plain]) - model_flops(MODEL, [some])
    assert less == pytest.approx(6 * MODEL.head_parameters * fewer, rel=1e-9)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_tenth_of_the_targets_costs_a_tenth_of_the_head(num_stages: int) -> None:
    whole, tenth = cost_of(MODEL, num_stages=num_stages), cost_of(TENTH, num_stages=num_stages)
    head_s = 6 * MODEL.head_parameters / (HARDWARE.peak_flops * HARDWARE.linear_efficiency)
    assert whole.linear_s_per_token - tenth.linear_s_per_token == pytest.approx(0.9 * head_s)
    if num_stages > 1:
        assert whole.pipeline is not None and tenth.pipeline is not None
        assert tenth.pipeline.head_s_per_token == pytest.approx(0.1 * whole.pipeline.head_s_per_token)
    assert cost_of(dataclasses.replace(MODEL, head_fraction=1.0), num_stages=num_stages) == whole


def test_predictions_are_those_of_the_simulator() -> None:
    sequences = specs([30_000, 9_000, 8_000, 7_000, 4_000])
    cluster = ClusterSpec(num_ranks=RANKS, max_tokens_per_rank=20_000)
    seconds = []
    for model in (MODEL, TENTH):
        plan = plan_batch(sequences, cluster=cluster, cost=cost_of(model))
        timeline = simulate(lower(plan, sequences), model=model, hardware=HARDWARE)
        assert plan.gap >= 1 - 1e-9
        seconds.append((plan.predicted_s, timeline.iteration_s))
    (whole_s, simulated_s), (tenth_s, simulated_tenth_s) = seconds
    assert tenth_s < whole_s
    assert simulated_s - simulated_tenth_s == pytest.approx(whole_s - tenth_s, rel=0.1)


@examples(50)
@given(fraction=st.floats(0.01, 1.0), start=st.integers(0, 1000), num_tokens=st.integers(2, 2000))
def test_timed_passes_have_the_fraction_of_targets(fraction: float, start: int, num_tokens: int) -> None:
    shape = PassShape(degree=1, lengths=(num_tokens,), head_fraction=fraction)
    ids, targets = _Zeros(shape.head_fraction).read(0, start=start, stop=start + num_tokens)
    assert len(ids) == len(targets) == num_tokens and targets[-1] == IGNORED
    assert abs(np.count_nonzero(targets != IGNORED) - fraction * num_tokens) <= 2
