import itertools

import numpy as np
import pytest

from rayfcp.plan import CostModel, plan_batch
from rayfcp.values import ClusterSpec
from tests.cost.test_bound import best_plan_s
from tests.plan import exact
from tests.plan.helpers import RUN_AHEAD, UNIT, batch_of, profiled


@pytest.mark.parametrize("lengths", [(60, 50, 20, 7), (40, 40, 40), (80, 3, 2, 1), (5,)])
@pytest.mark.parametrize("cost", [UNIT, UNIT.with_coefficients(overlap=0.0, ring_s_per_round=0.02), RUN_AHEAD])
def test_bounds_enclose_the_best_of_all_plans(lengths: tuple[int, ...], cost: CostModel) -> None:
    sequences = batch_of(lengths)
    for num_ranks, room in itertools.product((1, 3), (80, 100)):
        # groups of up to `ranks_per_node` are priced alike by both: none crosses nodes that it could avoid
        cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
        least_s, most_s = exact.best_of_all_s(sequences, cluster=cluster, cost=cost)
        best_s = best_plan_s(sequences, cluster, cost)
        assert least_s * (1 - 1e-9) <= best_s <= most_s * (1 + 1e-9)
        assert most_s <= least_s * 1.01


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_small_batches_are_within_two_percent_of_the_best(seed: int) -> None:
    lengths = np.sort(np.random.default_rng(seed).lognormal(8.0, 1.2, 9).astype(int).clip(100, 60_000))[::-1]
    cost = exact.within_layers(profiled(8, hardware="ascend-910c"))
    room = max(int(lengths.sum() / 8 / (1 + seed % 3)) + 1, -(-int(lengths[0]) // 8))
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=room)
    sequences = batch_of([int(each) for each in lengths])
    least_s, _ = exact.best_of_all_s(sequences, cluster=cluster, cost=cost)
    assert plan_batch(sequences, cluster=cluster, cost=cost).predicted_s <= 1.02 * least_s
