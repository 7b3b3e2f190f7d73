"""Steps of short sequences, in which shards take about as long as computation."""

import random
import statistics
from typing import Any, NoReturn

import pytest

from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.plan.batch import plan_candidates
from rayfcp.program import Programs, lower
from rayfcp.simulate import simulate
from rayfcp.simulate.simulate import choose
from rayfcp.values import ClusterSpec
from tests.plan.helpers import batch_of

OPTIONS = PlanConfig(primitives=["ring", "ulysses"])


@pytest.mark.parametrize("hardware_name", ["h100", "h200"])
def test_short_sequences_are_predicted_as_they_are_simulated(hardware_name: str) -> None:
    """With shards hidden behind forward and backward together, predictions were 13 % too low in the mean."""
    errors = [error for seed in range(4) for error in _errors(hardware_name, seed=seed)]
    assert statistics.fmean(errors) < 0.03
    assert max(errors) < 0.1


def _errors(hardware_name: str, *, seed: int) -> list[float]:
    """Check that flex-ring is never behind what it contains, and return the prediction errors."""
    hardware, model = hardware_profile(hardware_name), model_profile(("qwen3-1.7b", "llama3-8b")[seed % 2])
    rng = random.Random(seed)
    lengths = [min(int(rng.lognormvariate(6.3, 1.0)) + 2, (4096, 16384)[seed // 2]) for _ in range(128)]
    cost = CostModel.from_profiles(model, hardware, num_ranks=64, bytes_per_element=2, reduce_every="step")
    cluster, batch = ClusterSpec(num_ranks=64, max_tokens_per_rank=16384), batch_of(lengths)
    given: dict[str, Any] = {"cluster": cluster, "cost": cost, "options": OPTIONS}
    of_strategy = {name: plan_batch(batch, strategy=name, **given) for name in ("flex-ring", "static-cp", "ulysses")}

    def seconds(programs: Programs) -> float:
        return simulate(programs, model=model, hardware=hardware).iteration_s

    simulated_s = {name: seconds(lower(plan, batch)) for name, plan in of_strategy.items()}
    assert of_strategy["flex-ring"].predicted_s <= min(plan.predicted_s for plan in of_strategy.values()) * 1.001
    assert all(plan.lower_bound_s <= simulated_s[name] * (1 + 1e-9) for name, plan in of_strategy.items())
    chosen = choose(
        plan_candidates(batch, strategy="flex-ring", **given),
        strategy="flex-ring",
        lowered=lambda plan: lower(plan, batch),
        seconds=seconds,
    )
    assert chosen.programs is not None and seconds(chosen.programs) <= min(simulated_s.values())
    assert chosen.plan.strategy == "flex-ring" and chosen.plan.reason.startswith("Flex-ring took ")
    assert chosen.programs.plan_hash == chosen.plan.plan_hash
    return [abs(plan.predicted_s / simulated_s[name] - 1) for name, plan in of_strategy.items()]


def test_long_steps_have_one_candidate() -> None:
    """Computation hides shards: nothing is planned or simulated beside the plan itself."""
    model, hardware = model_profile("llama3-8b"), hardware_profile("h100")
    cost = CostModel.from_profiles(model, hardware, num_ranks=16, bytes_per_element=2, reduce_every="step")
    cluster, batch = ClusterSpec(num_ranks=16, max_tokens_per_rank=65536), batch_of([65536, 32768, 32768, 8192] * 8)
    given: dict[str, Any] = {"cluster": cluster, "cost": cost, "options": OPTIONS}
    plan = plan_batch(batch, strategy="flex-ring", **given)
    assert plan_candidates(batch, strategy="flex-ring", **given) == (plan,)
    assert choose((plan,), strategy="flex-ring", lowered=_never, seconds=_never).plan == plan


def _never(_: object) -> NoReturn:
    raise AssertionError("nothing is lowered or simulated")
