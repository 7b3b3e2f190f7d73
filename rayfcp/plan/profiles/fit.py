"""Coefficients of the cost model from timed passes: non-negative least squares on relative errors.

Source: Flexible Context Parallelism, section 5, "Profiler Integration and Cost Modeling": times over lengths and
degrees, then a functional relationship (Eq. 8-10); how it is fitted is not said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.profiles.pictures import pictures_s
from rayfcp.plan.profiles.timing import Timing
from rayfcp.values import Primitive

OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of communication hidden behind attention that a fit tries."""

LEAST_SHARE = 0.25
"""Of the analytic ratio of attention to linear seconds, or of its inverse."""

ABOUT = 1.25
"""How much larger an error counts as about the same."""

ROUNDS = 6
"""Of telling in which passes the ring is longer than the attention beside it."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cost model and the mean of |predicted - measured| / measured over the timings that it was fitted to."""

    cost: CostModel
    mean_error: float


def fit_cost(cost: CostModel, timings: Sequence[Timing], *, overlaps: Sequence[float] = OVERLAPS) -> Fit:
    """Replace the coefficients of `cost` by those that explain `timings` best.

    With a given overlap every timing is linear in fixed cost, tokens, cells, ring volume and rounds (Eq. 8-10), as long
    as it is known in which passes the ring is longer than the attention beside it; so each overlap is fitted again and
    again with what the last fit says of that, from both extremes, and the best is taken. Timed passes contain the
    traffic of shards and what it is in the way of, which are therefore not counted again. Without timings of rings,
    ring coefficients and overlap stay, without timings of Ulysses groups theirs; `attention_half_tokens` and the shares
    of forward always do.

    Noise can make a term vanish, and a plan that ignores attention is worthless: then it is held at
    `LEAST_SHARE` of what `cost` says of it beside the other, unless the timings contradict that.

    Raises:
        ValueError: fewer than three timings of degree 1, or one that is not positive.
    """
    local = [timing for timing in timings if timing.degree == 1]
    if len(local) < 3 or any(timing.seconds <= 0 for timing in timings):
        raise ValueError(f"timings of degree 1 are {len(local)}, must be at least 3 and positive; measure more shapes")
    start = cost.apart().with_coefficients(shard_s=0.0, reduce_s=0.0, exposed_s=0.0, reduce_exposed_s=0.0)
    fixed_s, linear_s, attention_s = _least_squares(
        np.array([_local_features(each, half_tokens=cost.attention_half_tokens) for each in local]), local
    )
    start = start.with_coefficients(fixed_s=fixed_s, linear_s_per_token=linear_s, attention_s_per_cell=attention_s)
    if linear_s == 0.0 or attention_s == 0.0:
        start = _without_vanished(start, cost, local=local)
    exchanges = [timing for timing in timings if timing.degree > 1 and timing.primitive is Primitive.ULYSSES]
    rings = [timing for timing in timings if timing.degree > 1 and timing.primitive is Primitive.RING]
    fits = [each for overlap in overlaps for each in _fit_rings(start, rings, overlap=overlap)] if rings else [start]
    best = min(fits, key=lambda fitted: mean_error(fitted, [*local, *rings]))
    best = _with_exchanges(best, exchanges) if exchanges else best
    return Fit(cost=best, mean_error=mean_error(best, timings))


def _with_exchanges(cost: CostModel, exchanges: Sequence[Timing]) -> CostModel:
    """Coefficients of Ulysses from what computation does not explain of its passes. A transfer that vanished in noise
    is held at `LEAST_SHARE` of what `cost` said of it: nothing that moves bytes is free."""

    def moved_s(per_token_s: float, latency_s: float) -> npt.NDArray[np.float64]:
        unit = cost.with_coefficients(
            ulysses_intra_s_per_token=per_token_s, ulysses_inter_s_per_token=per_token_s, ulysses_s=latency_s
        )
        return np.array([predicted_s(unit, timing) for timing in exchanges])

    measured_s = np.array([timing.seconds for timing in exchanges])
    both_s = moved_s(1.0, 1.0)
    features = np.stack((moved_s(2.0, 1.0) - both_s, moved_s(1.0, 2.0) - both_s), axis=1)
    computed_s = both_s - features.sum(axis=1)
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    left_s = np.maximum(measured_s - computed_s, 0.0)
    solution, _ = nnls(features / scale / measured_s[:, None], left_s / measured_s)
    per_token_s, latency_s = (float(value) for value in solution / scale)
    if per_token_s == 0.0:
        per_token_s = LEAST_SHARE * cost.ulysses_intra_s_per_token
    return cost.with_coefficients(
        ulysses_intra_s_per_token=per_token_s, ulysses_inter_s_per_token=per_token_s, ulysses_s=latency_s
    )


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
    return least if mean_error(least, local) <= ABOUT * mean_error(fitted, local) + 0.01 else fitted


def predicted_s(cost: CostModel, timing: Timing) -> float:
    """What the model says of a timed pass."""
    cells, tokens = timing.num_cells, timing.num_tokens
    language_s = float(cost.group_s(cells, tokens, degree=timing.degree, primitive=timing.primitive))
    return language_s + pictures_s(cost.encoder, timing)


def mean_error(cost: CostModel, timings: Sequence[Timing]) -> float:
    """Mean of |predicted - measured| / measured; 0 without timings."""
    errors = [abs(predicted_s(cost, timing) - timing.seconds) / timing.seconds for timing in timings]
    return sum(errors) / len(errors) if errors else 0.0


def _fit_rings(cost: CostModel, rings: Sequence[Timing], *, overlap: float) -> Iterator[CostModel]:
    """Ring coefficients from what the computation of a ring does not explain: all fits on the way."""
    cost = cost.with_coefficients(overlap=overlap)
    parts = _RingParts(cost, rings)
    measured_s = np.array([timing.seconds for timing in rings])
    for extreme in (1, 0):
        limit = np.full(parts.moved.shape[:2], extreme)
        for _ in range(ROUNDS if overlap > 0 else 1):
            features, hidden_s = parts.linear(limit, overlap=overlap)
            ring_s = np.maximum(measured_s - parts.computed_s + hidden_s, 1e-9)
            scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
            solution, _ = nnls(features / scale / measured_s[:, None], ring_s / measured_s)
            per_token_s, per_round_s = (float(value) for value in solution / scale)
            yield cost.with_coefficients(
                ring_intra_s_per_token=per_token_s, ring_inter_s_per_token=per_token_s, ring_s_per_round=per_round_s
            )
            found = parts.limits(per_token_s, per_round_s)
            if np.array_equal(limit, found):
                break
            limit = found


class _RingParts:
    """Rings' passes as the cost model has them: `computed_s[timing]`; what `moved[pass, timing, coefficient]`, in units
    of the two coefficients of a ring. What hides is the least of three: `can_hide[limit, pass, timing, coefficient]` in
    these units, and `covered_s[limit, pass, timing]` of attention."""

    def __init__(self, cost: CostModel, rings: Sequence[Timing]) -> None:
        degrees = [timing.degree for timing in rings]
        tokens = np.array([timing.num_tokens for timing in rings], np.float64)
        cells = np.array([timing.num_cells for timing in rings], np.float64)
        passes = cost.terms(degrees)
        attention_s = np.stack(
            [each.attention_s_per_cell * cells + each.attention_s_per_token * tokens for each in passes]
        )
        self.computed_s = attention_s.sum(axis=0) + sum(
            (each.linear_s_per_token * tokens + each.fixed_s for each in passes), np.zeros(len(rings))
        )
        none = np.zeros_like(attention_s)
        covered_s = np.stack([each.cover for each in passes]) * attention_s
        self.covered_s = np.stack([none, covered_s, np.stack([each.steady for each in passes]) * attention_s])
        moved, tail, edges = [], [], []
        for per_token_s, per_round_s in ((1.0, 0.0), (0.0, 1.0)):
            unit = cost.with_coefficients(
                ring_intra_s_per_token=per_token_s, ring_inter_s_per_token=per_token_s, ring_s_per_round=per_round_s
            ).terms(degrees)
            moved.append([each.moved_s_per_token * tokens + each.moved_s for each in unit])
            tail.append([each.tail_s_per_token * tokens + each.tail_s for each in unit])
            edges.append([each.edges_s_per_token * tokens + each.edges_s for each in unit])
        self.moved, last, edge = (np.moveaxis(np.array(each), 0, -1) for each in (moved, tail, edges))
        self.can_hide = np.stack([self.moved - last, np.zeros_like(edge), edge])

    def limits(self, per_token_s: float, per_round_s: float) -> npt.NDArray[np.int64]:
        """`[pass, timing]`: which of the three is the least."""
        can_hide_s = self.can_hide[..., 0] * per_token_s + self.can_hide[..., 1] * per_round_s
        return np.asarray(np.argmin(can_hide_s + self.covered_s, axis=0))

    def linear(self, limit: npt.NDArray[np.int64], *, overlap: float) -> tuple[Matrix, Matrix]:
        """Features of each timing, and seconds of attention behind which the ring hides, where these count."""
        passes, timings = np.indices(limit.shape)
        shown = self.moved - overlap * self.can_hide[limit, passes, timings]
        return shown.sum(axis=0), overlap * self.covered_s[limit, passes, timings].sum(axis=0)


def _local_features(timing: Timing, *, half_tokens: float) -> tuple[float, float, float]:
    return (1.0, timing.num_tokens, timing.num_cells + half_tokens * timing.num_tokens / 2)


def _least_squares(features: npt.NDArray[np.float64], timings: Sequence[Timing]) -> tuple[float, ...]:
    weights = 1.0 / np.array([timing.seconds for timing in timings])
    scale = np.abs(features).max(axis=0)
    solution, _ = nnls(features / scale * weights[:, None], np.ones(len(timings)))
    return tuple(float(value) for value in solution / scale)
