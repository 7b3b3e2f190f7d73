"""`auto` by simulation: never slower than any of its candidates, the same every time, and it says why."""

import pytest

from rayfcp.compare.lengths import draw_batches, lengths_of
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel
from rayfcp.plan.batch import plan_candidates
from rayfcp.program import RankProgram, check_progress, lower
from rayfcp.simulate import simulate
from rayfcp.simulate.simulate import Choice, choose
from rayfcp.values import BatchPlan, ClusterSpec
from tests.masks import specs
from tests.simulate.helpers import MACHINE, MODEL

OPTIONS = PlanConfig(primitives=("ring", "ulysses"), search_moves=5000)


def chosen(lengths: list[int], *, num_ranks: int, candidates: int = 3) -> tuple[Choice, dict[str, float]]:
    """Strategy that `auto` chooses, and simulated seconds of each candidate."""
    sequences = specs(lengths)
    cost = CostModel.from_profiles(MODEL, MACHINE, num_ranks=num_ranks, bytes_per_element=2, reduce_every="step")
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=2048)
    options = OPTIONS.model_copy(update={"auto_candidates": candidates})
    plans = plan_candidates(sequences, cluster=cluster, cost=cost, options=options)

    def lowered(plan: BatchPlan) -> tuple[RankProgram, ...]:
        return lower(plan, sequences)

    def seconds(programs: tuple[RankProgram, ...]) -> float:
        return simulate(programs, model=MODEL, hardware=MACHINE).iteration_s

    choice = choose(plans, lowered=lowered, seconds=seconds)
    return choice, {plan.strategy: seconds(lowered(plan)) for plan in plans}


@pytest.mark.parametrize("name", ["lognormal", "bimodal", "long-tail", "github"])
@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_the_fastest_candidate_is_taken(name: str, num_ranks: int) -> None:
    batches = draw_batches(f"dist:{name}", num_batches=1, global_batch=14, max_seqlen=4000, seed=num_ranks)
    lengths = lengths_of(batches)
    choice, seconds = chosen(lengths, num_ranks=num_ranks)
    assert dict(choice.simulated).items() <= seconds.items() and len(seconds) <= 3
    if choice.simulated:
        assert seconds[choice.plan.strategy] == min(each for _, each in choice.simulated)
        assert f"simulated {seconds[choice.plan.strategy]:.4g} s" in choice.plan.reason
        assert choice.programs is not None and choice.programs.plan_hash == choice.plan.plan_hash
        check_progress(choice.programs)
    assert chosen(lengths, num_ranks=num_ranks)[0] == choice


def test_all_candidates_and_one() -> None:
    """The fastest candidate in the simulation is chosen; a single one needs no simulation."""
    lengths = [3000, 1500, 900, 400, 400, 300, 200, 100, 50, 50]
    every, seconds = chosen(lengths, num_ranks=4, candidates=16)
    assert seconds[every.plan.strategy] <= 1.01 * min(seconds.values())
    one, (only,) = chosen(lengths, num_ranks=4, candidates=1)
    assert not one.simulated and one.programs is None and one.plan.strategy == only and "predicted" in one.plan.reason
