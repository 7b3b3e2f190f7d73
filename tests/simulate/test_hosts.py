"""Machines whose hosts enqueue slower than devices compute: cost model, bound and simulator agree on them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import plan_batch
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import ClusterSpec, Primitive
from tests.examples import examples
from tests.masks import specs
from tests.simulate.helpers import MODEL, cost_of, machine, plan_of


@examples(40)
@given(
    num_tokens=st.integers(16, 60),
    degree=st.sampled_from([1, 2, 4]),
    primitive=st.sampled_from(list(Primitive)),
    host_layer_s=st.floats(1.0, 3.0),
    host_round_s=st.floats(0.0, 2.0),
    recomputed_layers=st.integers(0, 4),
)
def test_passes_that_the_host_bounds_take_as_predicted(
    num_tokens: int,
    degree: int,
    primitive: Primitive,
    host_layer_s: float,
    host_round_s: float,
    recomputed_layers: int,
) -> None:
    hardware = machine(host_layer_s=host_layer_s, host_round_s=host_round_s)
    cost = cost_of(hardware, num_ranks=degree, recomputed_layers=recomputed_layers)
    groups = [[(tuple(range(degree)), (0,))]]
    plan = plan_of(groups, num_ranks=degree, primitive=primitive, recomputed_layers=recomputed_layers)
    pairs = num_tokens * (num_tokens + 1) / 2
    predicted_s = cost.batch_s([float(cost.group_s(pairs, num_tokens, degree=degree, primitive=primitive))])
    further = (degree - 1 if primitive is Primitive.RING else 2) if degree > 1 else 0
    enqueued = MODEL.num_layers + recomputed_layers / (1 + MODEL.linear_backward)
    assert predicted_s == pytest.approx(enqueued * (host_layer_s + further * host_round_s), rel=0.02)
    simulated_s = simulate(lower(plan, specs([num_tokens])), model=MODEL, hardware=hardware).iteration_s
    assert simulated_s == pytest.approx(predicted_s, rel=0.02)


@pytest.mark.parametrize("strategy", ["flex-ring", "flex-block", "ulysses"])
@pytest.mark.parametrize("host_s", [0.0, 0.02, 2.0])
def test_no_plan_is_faster_than_its_bound(strategy: str, host_s: float) -> None:
    """Hosts that bound no pass change nothing, slower ones as predicted."""
    hardware, sequences = machine(host_layer_s=host_s, host_round_s=host_s / 4), specs([900, 700, 300, 60, 40, 20])
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=300)
    plan = plan_batch(sequences, cluster=cluster, cost=cost_of(hardware, num_ranks=4), strategy=strategy)
    simulated_s = simulate(lower(plan, sequences), model=MODEL, hardware=hardware).iteration_s
    assert plan.lower_bound_s <= min(plan.predicted_s, simulated_s) * (1 + 1e-9)
    assert simulated_s == pytest.approx(plan.predicted_s, rel=0.15)
    free_s = simulate(lower(plan, sequences), model=MODEL, hardware=machine()).iteration_s
    assert simulated_s >= free_s and (simulated_s > free_s) == (host_s > 1.0)
