"""What timed passes show: which of them the host bounds, and which coefficients noise hides.

The host enqueues a pass layer by layer, in about the same time whatever the tokens. Passes with less work than that all
take as long as the host, and say nothing about the device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from rayfcp.cost.model import CostModel
from rayfcp.cost.terms import EXCHANGES
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
CLEARER = 0.65
"""Share of the error that may be left where passes are said to be bound by the host."""
ABOUT = 1.25
"""How much larger an error counts as about the same."""
EQUAL = 1.5
"""How much larger an error counts as equal where all passes may be bound by the host: with 1.25 one noisy pass made the
device eight times too slow in 1 of 40 fits of such passes."""
SIGNIFICANT = 3.0
"""Multiples of noise that a part of the seconds is at least."""
LEAST_BOUND = 2
"""Passes that show a constant."""
UNKNOWNS = 3
"""Fixed cost, linear layers and attention."""
ITERATIONS = 3

UNTOLD = "these passes do not tell whether the host bounds those of few tokens; time more rounds or more tokens"
SCALED = (
    "{left} of {all} passes on one rank are not bound by the host, too few to fit attention and linear layers apart: "
    "both are analytic, scaled to these passes; time more tokens to measure them"
)

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
) -> tuple[CostModel, tuple[str, ...]]:
    """Return the fit of passes on one rank that explains them best, all by the device, or those of least work by a host
    that takes `host_s` for each; and what the passes could not tell.

    Where `UNKNOWNS` passes or fewer are left to the device, they scale `guess`. A host must leave less than `CLEARER`
    of the error per degree of freedom, unless seconds do not show the device's work at all. Cores that both compute and
    enqueue (`overlap` is 0) do one after the other: there the host is part of the fixed cost.
    """
    ordered = sorted(local, key=lambda each: _work_s(guess, each))

    def error(cost: CostModel, unknowns: int) -> float:
        squares = sum(each**2 for each in errors_of(cost, local))
        return float(np.sqrt(squares / (len(local) - unknowns)))

    usual = fit_device(local)
    if guess.overlap == 0.0:
        return usual, ()
    if len(local) <= UNKNOWNS + LEAST_BOUND:
        return usual, (UNTOLD,)
    usual_error = error(usual, UNKNOWNS)
    hidden = _hides_device(usual, guess, timings=local, noise=max(usual_error, NOISE))
    if usual_error < NOISE and not hidden:
        return usual, ()
    found = []
    for count in range(LEAST_BOUND, len(local) + 1):
        rest, fitted = ordered[count:], len(local) - count > UNKNOWNS
        device = fit_device(rest) if fitted else _scaled(guess, rest, hidden=ordered[-1])
        host_s = _constant([each.seconds for each in ordered[:count]])
        found.append((dataclasses.replace(device, host_s=host_s), 2 + (UNKNOWNS if fitted else bool(rest)), len(rest)))
    best, unknowns, left = min(found, key=lambda each: error(*each[:2]))
    if hidden and error(*found[-1][:2]) <= EQUAL * error(best, unknowns):
        best, unknowns, left = found[-1]
    best_error = error(best, unknowns)
    if best_error < (ABOUT if hidden else CLEARER) * usual_error:
        return best, () if left > UNKNOWNS else (SCALED.format(left=left, all=len(local)),)
    return usual, (UNTOLD,) if best_error < usual_error / ABOUT else ()


def _work_s(cost: CostModel, timing: Timed) -> float:
    return cost.compute_s(timing.num_pairs, float(timing.num_tokens))


def _constant(seconds: Sequence[float], parts: Sequence[float] = ()) -> float:
    """The multiple of `parts` (default: 1 each) with the least squares of errors relative to `seconds`."""
    per = np.array(parts or [1.0] * len(seconds)) / seconds
    return float(per.sum() / (per @ per))


def _hides_device(usual: CostModel, guess: CostModel, *, timings: Sequence[Timed], noise: float) -> bool:
    """Return whether seconds hardly grow with the device's work, though by `guess` that is clearly more of them."""
    shown, due = (max(_work_s(cost, each) / each.seconds for each in timings) for cost in (usual, guess))
    return shown < min(SIGNIFICANT * noise, CLEARER * due)


def _scaled(guess: CostModel, passes: Sequence[Timed], *, hidden: Timed) -> CostModel:
    """`guess` with its computation scaled to explain `passes`; without any, to take no longer than the pass `hidden`,
    which the host bounds."""
    used = passes or [hidden]
    scale = _constant([each.seconds for each in used], [guess.fixed_s + _work_s(guess, each) for each in used])
    names = ("attention_s_per_pair", "linear_s_per_token", "fixed_s")
    scale = scale if passes else min(scale, 1.0)
    return guess.with_coefficients(**{name: scale * getattr(guess, name) for name in names})


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
    rounds = timing.degree - 1 if timing.primitive is Primitive.RING else EXCHANGES * (timing.degree > 1)
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
