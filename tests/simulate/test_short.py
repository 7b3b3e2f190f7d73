"""Steps of short sequences, in which shards take about as long as computation."""

import random
import statistics

import pytest

from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.simulate import simulate_plan
from rayfcp.values import ClusterSpec
from tests.plan.helpers import batch_of

OPTIONS = PlanConfig(primitives=["ring", "ulysses"])


@pytest.mark.parametrize("hardware_name", ["h100", "h200"])
def test_short_sequences_are_predicted_as_they_are_simulated(hardware_name: str) -> None:
    """With shards hidden behind forward and backward together, predictions were 13 % too low in the mean."""
    hardware, errors = hardware_profile(hardware_name), []
    for seed, model_name in enumerate(("qwen3-1.7b", "llama3-8b") * 2):
        model, rng = model_profile(model_name), random.Random(seed)
        lengths = [min(int(rng.lognormvariate(6.3, 1.0)) + 2, (4096, 16384)[seed // 2]) for _ in range(128)]
        cost = CostModel.from_profiles(model, hardware, num_ranks=64, bytes_per_element=2, reduce_every="step")
        cluster, batch = ClusterSpec(num_ranks=64, max_tokens_per_rank=16384), batch_of(lengths)
        of_strategy = {
            name: plan_batch(batch, cluster=cluster, cost=cost, strategy=name, options=OPTIONS)
            for name in ("flex-ring", "static-cp", "ulysses")
        }
        simulated_s = {
            name: simulate_plan(plan, batch, model=model, hardware=hardware, reduce_every="step").iteration_s
            for name, plan in of_strategy.items()
        }
        errors += [abs(plan.predicted_s / simulated_s[name] - 1) for name, plan in of_strategy.items()]
        best_s = min(plan.predicted_s for plan in of_strategy.values())
        assert of_strategy["flex-ring"].predicted_s <= best_s * 1.001
        assert simulated_s["flex-ring"] <= min(simulated_s.values()) * 1.05
        assert all(plan.lower_bound_s <= simulated_s[name] * (1 + 1e-9) for name, plan in of_strategy.items())
    assert statistics.fmean(errors) < 0.03
    assert max(errors) < 0.1
