"""Single parts of a pass as they were timed, and the lines through them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

Points = tuple[tuple[int, float], ...]
"""(tokens or bytes, seconds)."""

MOST_HALF_TOKENS = 4096.0
"""Beyond, what was timed is no kernel that fills up, but noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimings:
    """Seconds of one layer's attention over a causal sequence and of its matrix products, forward and backward, by
    tokens; of one round of a ring over all ranks and of a gather, by bytes (none on one rank)."""

    attention_s: Points
    linear_s: Points
    message_s: Points
    gather_s: Points


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`constant_s` + `per_unit_s` x units, both at least 0."""

    constant_s: float
    per_unit_s: float

    @property
    def units_per_s(self) -> float:
        return 1.0 / self.per_unit_s if self.per_unit_s > 0 else float("inf")


def slowest(timings: Sequence[PartTimings]) -> PartTimings:
    """Of the ranks that timed together, the longest time of each part."""

    def longest(name: str) -> Points:
        return tuple(
            max(points, key=lambda point: point[1]) for points in zip(*(getattr(t, name) for t in timings), strict=True)
        )

    return PartTimings(
        attention_s=longest("attention_s"),
        linear_s=longest("linear_s"),
        message_s=longest("message_s"),
        gather_s=longest("gather_s"),
    )


def line(points: Points) -> Line:
    """The line with the least squares of relative errors.

    Raises:
        ValueError: no points.
    """
    constant_s, per_unit_s = _weighted([(1.0, units) for units, _ in points], [seconds for _, seconds in points])
    return Line(constant_s=constant_s, per_unit_s=per_unit_s)


def half_tokens(points: Points) -> float:
    """`HardwareProfile.linear_half_tokens`: tokens whose time a product takes beside that of its own."""
    found = line(points)
    return min(found.constant_s / found.per_unit_s, MOST_HALF_TOKENS) if found.per_unit_s > 0 else 0.0


def attention_half_tokens(points: Points) -> float:
    """`CostModel.attention_half_tokens`: n tokens take as long as n (n + 1) / 2 cells and that / 2 more a token.

    A constant for each call of the kernel is fitted beside it and left to the fixed cost.
    """
    rows = [(1.0, tokens / 2, tokens * (tokens + 1) / 2) for tokens, _ in points]
    _, per_token_s, per_cell_s = _weighted(rows, [seconds for _, seconds in points])
    return min(per_token_s / per_cell_s, MOST_HALF_TOKENS) if per_cell_s > 0 else 0.0


def _weighted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares of relative errors."""
    if not rows:
        raise ValueError("no points were timed, must be at least 1; time more sizes")
    features = np.array(rows, np.float64)
    scale = features.max(axis=0)
    solution, _ = nnls(features / scale / np.array(seconds)[:, None], np.ones(len(rows)))
    fitted: list[float] = (solution / scale).tolist()
    return fitted
