"""Plans of tiny batches beside the best of all plans, placed on their ranks; `make explore` searches 2,000 cases."""

import warnings

import pytest

from rayfcp.config.constraints import HostConstraints
from rayfcp.plan import lower_bound
from rayfcp.values import ClusterSpec, InfeasiblePlanError, SequenceSpec
from tests.plan.helpers import UNIT, batch_of
from tests.plan.oracle import Case, Tally

ALONE = UNIT.with_coefficients(ranks_per_node=4)


def test_no_counterexample_among_drawn_cases() -> None:
    tally = Tally()
    for seed in range(60):
        tally.add(seed)
    assert tally.faults == 0, str(tally)
    assert sum(tally.ratios.values()) / len(tally.ratios) <= 1.01, str(tally)


def test_unit_of_one_sequence_is_no_unit() -> None:
    lengths = [60, 26]
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=31, speed_of_rank=(0.5, 2.0, 1.0, 2.0))
    plain = Case(sequences=batch_of(lengths), cluster=cluster, cost=ALONE)
    alone = Case(sequences=_with_units(lengths, [None, 1]), cluster=cluster, cost=ALONE)
    assert alone.planned_s() == plain.planned_s() == pytest.approx(plain.best_s())


@pytest.mark.parametrize(
    "constraints",
    [
        HostConstraints(),
        HostConstraints(degrees=(1, 2), placement="contiguous"),
        HostConstraints(degrees=(1, 2, 4), placement="aligned"),
        HostConstraints(degrees=(1, 2), all_ranks=True),
    ],
)
def test_units_and_constraints_are_planned_at_the_speeds(constraints: HostConstraints) -> None:
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=60, speed_of_rank=(0.5, 1.0, 2.0, 2.0))
    case = Case(
        sequences=_with_units([70, 30, 20, 20], [None, 0, 0, None]),
        cluster=cluster,
        cost=ALONE,
        constraints=constraints,
    )
    assert case.planned_s() <= case.best_s() * 1.03


@pytest.mark.parametrize(
    ("lengths", "room", "speeds", "constraints"),
    [
        ([60, 26, 26, 20], 70, (2.0, 1.0, 0.5, 0.5), HostConstraints(degrees=(1, 3))),
        ([60, 60], 240, (1.0, 1.0, 0.5, 2.0), HostConstraints(degrees=(1, 3), all_ranks=True)),
        ([7, 22, 46], 24, (0.5, 1.0, 2.0), HostConstraints(degrees="powers_of_two", num_microbatches=2)),
        ([15, 16, 3], 8, (2.0, 1.0, 1.0, 0.5), HostConstraints(degrees=(2, 4), microbatch_multiple=2)),
        ([40, 40, 40, 40], 160, (0.5, 2.0, 2.0, 0.5), HostConstraints(degrees=(2, 4))),
        ([40, 40, 20, 20], 160, (1.0, 1.0, 2.0, 2.0), HostConstraints(degrees=(2, 4), all_ranks=True)),
        ([50, 20, 20], 60, (1.0, 0.5), HostConstraints(num_microbatches=2)),
    ],
)
def test_slow_ranks_keep_their_groups_under_constraints(
    lengths: list[int], room: int, speeds: tuple[float, ...], constraints: HostConstraints
) -> None:
    """Groups of fixed ranks remain where degrees have a common factor, and where microbatches are divided or must use
    all ranks."""
    cluster = ClusterSpec(num_ranks=len(speeds), max_tokens_per_rank=room, speed_of_rank=speeds)
    case = Case(sequences=batch_of(lengths), cluster=cluster, cost=ALONE, constraints=constraints)
    assert case.planned_s() <= case.best_s() * 1.005


def test_groups_merge_where_ranks_would_be_left_over() -> None:
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=1)
    constraints = HostConstraints(degrees=(1, 3), all_ranks=True)
    case = Case(sequences=batch_of([1, 1, 1]), cluster=cluster, cost=ALONE, constraints=constraints)
    assert case.planned_s() == pytest.approx(case.best_s())


@pytest.mark.parametrize("degrees", [(4,), (1,)])
def test_bound_names_degrees_that_hold_no_sequence(degrees: tuple[int, ...]) -> None:
    cluster = ClusterSpec(num_ranks=3, max_tokens_per_rank=10)
    with pytest.raises(InfeasiblePlanError, match="permit a larger degree"):
        lower_bound(batch_of([25]), cluster=cluster, cost=UNIT, constraints=HostConstraints(degrees=degrees))


def test_ulysses_without_communication_in_a_pass_warns_of_nothing() -> None:
    cost = UNIT.with_coefficients(num_heads=4, num_kv_heads=4, ulysses_s=0.1, passes_forward=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost.terms([1.0, 2.0, 3.0], primitive="ulysses")


def _with_units(lengths: list[int], units: list[int | None]) -> list[SequenceSpec]:
    return [
        SequenceSpec(id=at, num_tokens=n, num_targets=n - 1, unit=unit)
        for at, (n, unit) in enumerate(zip(lengths, units, strict=True))
    ]
