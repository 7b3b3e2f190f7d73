"""Coefficients of the cost model from timed passes: non-negative least squares on relative errors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from rayfcp.plan.cost import CostModel

OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of communication hidden behind attention that a fit tries."""

LEAST_SHARE = 0.25
"""Of the analytic ratio of attention to linear seconds, or of its inverse."""

ABOUT = 1.25
"""How much larger an error counts as about the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one forward, backward and reduction in which every group of `degree` ranks runs one ring
    over sequences of `num_tokens` tokens and `num_cells` mask cells together."""

    degree: int
    num_tokens: int
    num_cells: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cost model and the mean of |predicted - measured| / measured over the timings that it was fitted to."""

    cost: CostModel
    mean_error: float


def fit_cost(cost: CostModel, timings: Sequence[Timing], *, overlaps: Sequence[float] = OVERLAPS) -> Fit:
    """Replace the coefficients of `cost` by those that explain `timings` best.

    With a given overlap every timing is linear in fixed cost, tokens, cells, ring volume and rounds
    (Eq. 8-10), as long as it is known which of ring and attention is longer; so each overlap is fitted
    twice, the second time with the longer one that the first fit says, and the best is taken. Timed
    passes contain the traffic of shards, which is therefore not counted apart. Without timings of
    degree 2 and more, ring coefficients and overlap stay.

    Noise can make a term vanish, and a plan that ignores attention is worthless: then it is held at
    `LEAST_SHARE` of what `cost` says of it beside the other, unless the timings contradict that.

    Raises:
        ValueError: fewer than three timings of degree 1, or one that is not positive.
    """
    local = [timing for timing in timings if timing.degree == 1]
    if len(local) < 3 or any(timing.seconds <= 0 for timing in timings):
        raise ValueError(f"timings of degree 1 are {len(local)}, must be at least 3 and positive; measure more shapes")
    start = cost.with_coefficients(shard_s=0.0, reduce_s=0.0, exposed_s=0.0)
    fixed_s, linear_s, attention_s = _least_squares(np.array([_local_features(each) for each in local]), local)
    start = start.with_coefficients(fixed_s=fixed_s, linear_s_per_token=linear_s, attention_s_per_cell=attention_s)
    if linear_s == 0.0 or attention_s == 0.0:
        start = _without_vanished(start, cost, local=local)
    rings = [timing for timing in timings if timing.degree > 1]
    fits = [_fit_rings(start, rings, overlap=overlap) for overlap in overlaps] if rings else [start]
    best = min(fits, key=lambda fitted: _mean_error(fitted, timings))
    return Fit(cost=best, mean_error=_mean_error(best, timings))


def _without_vanished(fitted: CostModel, guess: CostModel, *, local: Sequence[Timing]) -> CostModel:
    """`fitted` with its vanished term at `LEAST_SHARE` of the guess, if that explains the timings about as well."""
    vanished = "linear_s_per_token" if fitted.linear_s_per_token == 0.0 else "attention_s_per_cell"
    held = guess.with_coefficients(**{vanished: LEAST_SHARE * getattr(guess, vanished)})
    computed_s = [held.compute_s(timing.num_cells, timing.num_tokens) for timing in local]
    fixed_s, scale = _least_squares(np.array([(1.0, each) for each in computed_s]), local)
    least = fitted.with_coefficients(
        fixed_s=fixed_s,
        linear_s_per_token=scale * held.linear_s_per_token,
        attention_s_per_cell=scale * held.attention_s_per_cell,
    )
    return least if _mean_error(least, local) <= ABOUT * _mean_error(fitted, local) + 0.01 else fitted


def predicted_s(cost: CostModel, timing: Timing) -> float:
    """What the model says of a timed pass."""
    return float(cost.group_s(timing.num_cells, timing.num_tokens, degree=timing.degree))


def _fit_rings(cost: CostModel, rings: Sequence[Timing], *, overlap: float) -> CostModel:
    """Ring coefficients from what the computation of a ring does not explain."""
    cost = cost.with_coefficients(overlap=overlap)
    hidden_s = np.zeros(len(rings))
    for _ in range(2):
        features = np.array([_ring_features(timing) for timing in rings])
        computed_s = np.array([_compute_s(cost, timing) for timing in rings])
        attention_s = np.array([cost.attention_s_per_cell * each.num_cells / each.degree for each in rings])
        measured_s = np.array([timing.seconds for timing in rings])
        ring_s = np.maximum(measured_s - computed_s + hidden_s, 1e-9)
        weights = 1.0 / measured_s
        scale = np.abs(features).max(axis=0)
        solution, _ = nnls(features / scale * weights[:, None], ring_s * weights)
        per_token_s, per_round_s = (float(value) for value in solution / scale)
        cost = cost.with_coefficients(
            ring_intra_s_per_token=per_token_s, ring_inter_s_per_token=per_token_s, ring_s_per_round=per_round_s
        )
        hidden_s = overlap * np.minimum(features @ (per_token_s, per_round_s), attention_s)
    return cost


def _compute_s(cost: CostModel, timing: Timing) -> float:
    share = 1.0 / timing.degree
    return cost.fixed_s + cost.compute_s(timing.num_cells * share, timing.num_tokens * share)


def _local_features(timing: Timing) -> tuple[float, float, float]:
    return (1.0, timing.num_tokens, timing.num_cells)


def _ring_features(timing: Timing) -> tuple[float, float]:
    hops = timing.degree - 1
    return (hops * timing.num_tokens / timing.degree, hops)


def _least_squares(features: npt.NDArray[np.float64], timings: Sequence[Timing]) -> tuple[float, ...]:
    weights = 1.0 / np.array([timing.seconds for timing in timings])
    scale = np.abs(features).max(axis=0)
    solution, _ = nnls(features / scale * weights[:, None], np.ones(len(timings)))
    return tuple(float(value) for value in solution / scale)


def _mean_error(cost: CostModel, timings: Sequence[Timing]) -> float:
    errors = [abs(predicted_s(cost, timing) - timing.seconds) / timing.seconds for timing in timings]
    return sum(errors) / len(errors)
