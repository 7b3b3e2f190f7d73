"""What timed passes show: which of them the host bounds, and which coefficients noise hides.

The host enqueues a pass layer by layer, in about the same time whatever the tokens. Passes with less work than that all
take as long as the host, and say nothing about the device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from rayfcp.cost.model import CostModel
from rayfcp.values import Primitive


class Timed(Protocol):
    """A timed pass (`rayfcp.cost.fit.Timing`)."""

    @property
    def degree(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_pairs(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def primitive(self) -> Primitive: ...


AnyTimed = TypeVar("AnyTimed", bound=Timed)

NOISE = 0.02
"""Relative error of a timed pass in the best case."""
MOST_NOISE = 0.1
"""A fit whose error is larger is wrong, which is no reason to keep a coefficient."""
CLEARER = 0.5
"""Share of the error that may be left where passes are said to be bound by the host."""
LEAST_BOUND = 2
"""Passes that show a constant."""
UNKNOWNS = 3
"""Fixed cost, linear layers and attention."""
ITERATIONS = 3

COEFFICIENTS: dict[str, Primitive | None] = {
    "linear_s_per_token": None,
    "attention_s_per_pair": None,
    "ring_intra_s_per_token": Primitive.RING,
    "ring_s_per_round": Primitive.RING,
    "ulysses_intra_s_per_token": Primitive.ULYSSES,
    "ulysses_s": Primitive.ULYSSES,
}
"""Fitted coefficients, and the primitive whose passes show them: of all passes where it is None."""


def seconds_of(cost: CostModel, timing: Timed) -> float:
    """Seconds of a pass without its images."""
    return float(cost.group_s(timing.num_pairs, timing.num_tokens, degree=timing.degree, primitive=timing.primitive))


def errors_of(cost: CostModel, timings: Sequence[Timed]) -> list[float]:
    return [abs(seconds_of(cost, each) / each.seconds - 1.0) for each in timings]


def with_host(
    guess: CostModel, local: Sequence[AnyTimed], *, fit_device: Callable[[Sequence[AnyTimed]], CostModel]
) -> CostModel:
    """The fit of passes on one rank that explains them best: all of them by the device, or those of least work by a
    host that takes `host_s` for each. The latter only if it leaves less than `CLEARER` of the error per degree of
    freedom, and if more passes than unknowns are left to the device."""
    ordered = sorted(local, key=lambda each: guess.compute_s(each.num_pairs, float(each.num_tokens)))

    def error(cost: CostModel, unknowns: int) -> float:
        squares = sum(each**2 for each in errors_of(cost, local))
        return float(np.sqrt(squares / (len(local) - unknowns)))

    usual = fit_device(local)
    if len(local) <= UNKNOWNS + LEAST_BOUND or error(usual, UNKNOWNS) < NOISE:
        return usual
    found = []
    for count in range(LEAST_BOUND, len(local) - UNKNOWNS):
        per = np.array([1.0 / each.seconds for each in ordered[:count]])
        host_s = float(per.sum() / (per @ per))  # least squares of relative errors
        found.append(dataclasses.replace(fit_device(ordered[count:]), host_s=host_s))
    best = min(found, key=lambda each: error(each, UNKNOWNS + 2))
    return best if error(best, UNKNOWNS + 2) < CLEARER * error(usual, UNKNOWNS) else usual


def with_rounds(cost: CostModel, rings: Sequence[Timed]) -> CostModel:
    """Add the host's seconds per further round, from rings whose computation takes less than the host."""
    if not cost.host_s:
        return cost
    for _ in range(ITERATIONS):
        bound = [each for each in rings if is_bound(cost, each)]
        if not bound:
            break
        rounds = np.array([(each.degree - 1) / each.seconds for each in bound])
        left = np.array([1.0 - cost.host_s / each.seconds for each in bound])
        cost = dataclasses.replace(cost, host_s_per_round=max(float(rounds @ left / (rounds @ rounds)), 0.0))
    return cost


def is_bound(cost: CostModel, timing: Timed) -> bool:
    """Whether the host takes longer to enqueue a pass than the device to compute it."""
    rounds = timing.degree - 1 if timing.primitive is Primitive.RING else 0
    computed_s = cost.fixed_s + cost.compute_s(timing.num_pairs, float(timing.num_tokens)) / timing.degree
    return computed_s < cost.host_s + rounds * cost.host_s_per_round


def kept_where_hidden(
    fitted: CostModel, guess: CostModel, *, timings: Sequence[Timed]
) -> tuple[CostModel, tuple[str, ...]]:
    """`fitted` with the coefficients of `guess` that no pass shows, and their names: fitted and guessed, their part of
    every pass is less than the fit's error."""
    errors = errors_of(fitted, timings)
    noise, kept = min(float(np.mean(errors)), MOST_NOISE), {}
    for name, primitive in COEFFICIENTS.items():
        shown = [each for each in timings if primitive is None or (each.degree > 1 and each.primitive is primitive)]
        if shown and all(_part(fitted, name, value=getattr(by, name), timings=shown) < noise for by in (fitted, guess)):
            kept[name] = getattr(guess, name)
    whole = {name.replace("intra", "inter"): getattr(guess, name.replace("intra", "inter")) for name in kept}
    return fitted.with_coefficients(**(kept | whole)), tuple(kept)


def _part(cost: CostModel, name: str, *, value: float, timings: Sequence[Timed]) -> float:
    """The largest part of a pass that a coefficient of this value is."""
    names = dict.fromkeys({name, name.replace("intra", "inter")})
    tiny = cost.with_coefficients(**dict.fromkeys(names, value * 1e-9))
    whole = cost.with_coefficients(**dict.fromkeys(names, value))
    return max((seconds_of(whole, each) - seconds_of(tiny, each)) / each.seconds for each in timings)
