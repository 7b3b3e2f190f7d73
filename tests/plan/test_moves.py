import pytest

from rayfcp.config.models import PlanConfig
from rayfcp.plan.moves import FACTORS, FIRST, TAKES, USUAL, moves_of, next_level, with_share


def test_moves_grow_with_ranks_sequences_and_level() -> None:
    auto = PlanConfig()
    assert moves_of(auto, num_ranks=4, num_sequences=16) == FIRST
    assert moves_of(auto, num_ranks=64, num_sequences=512) == USUAL
    assert moves_of(auto, num_ranks=256, num_sequences=2048) == USUAL
    by_level = [moves_of(auto, num_ranks=64, num_sequences=512, level=each) for each in range(len(FACTORS))]
    assert by_level == sorted(set(by_level))
    assert by_level[0] == FIRST
    assert moves_of(PlanConfig(search_moves=7), num_ranks=64, num_sequences=512, level=3) == 7


def test_parts_have_their_share() -> None:
    assert with_share(PlanConfig(search_moves=1000), parts=1, of=8).search_moves == 125
    assert with_share(PlanConfig(), parts=1, of=8).search_moves == FIRST


@pytest.mark.parametrize("level", range(len(TAKES)))
def test_the_level_fits_into_the_slack(level: int) -> None:
    """What is expected at the new level takes half of the time at most, and no higher one would."""
    for least_s in (0.001, 0.01, 0.1, 10.0):
        found = next_level(level, plan_s=least_s * TAKES[level], slack_s=3.0)
        assert found == 0 or TAKES[found] * least_s <= 1.5
        assert found == len(TAKES) - 1 or TAKES[found + 1] * least_s > 1.5
