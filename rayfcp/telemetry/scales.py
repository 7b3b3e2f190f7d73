"""From values to places on a chart: round ticks, linear scales, thinning of long series."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps `[low, high]` of values onto `[start, stop]` of pixels; a range of no width maps to the middle."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        if self.high <= self.low:
            return (self.start + self.stop) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def ticks(low: float, high: float, *, count: int = 4) -> tuple[float, ...]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) whose ends cover `[low, high]`.

    >>> ticks(0.0, 0.93)
    (0.0, 0.5, 1.0)
    >>> ticks(3.1, 5.6)
    (3.0, 4.0, 5.0, 6.0)
    """
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-100):
        high = low + (abs(low) if size > 1e-100 else 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1.0, 2.0, 5.0, 10.0) if unit * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return tuple(round(index * step, digits) for index in range(first, last + 1))


def runs_of(values: Sequence[T], *, limit: int) -> list[Sequence[T]]:
    """Cut into at most `limit` runs of equal length, but for the last.

    >>> runs_of((1, 2, 3, 4, 5), limit=3)
    [(1, 2), (3, 4), (5,)]
    """
    run = max(1, math.ceil(len(values) / limit))
    return [values[start : start + run] for start in range(0, len(values), run)]


def thin(values: Sequence[float], *, limit: int) -> tuple[float, ...]:
    """Means of equal runs so that at most `limit` values are left; non-finite values stay out of a mean.

    >>> thin((1.0, 3.0, 5.0, 7.0), limit=2)
    (2.0, 6.0)
    """
    chunks = runs_of(values, limit=limit)
    return tuple(_mean([value for value in chunk if math.isfinite(value)]) for chunk in chunks)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
