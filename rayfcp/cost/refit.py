"""Refitting while training: the cost model's coefficients follow measured step times.

Measured seconds identify the coefficients of attention, linear layers and the fixed cost as soon as groups differ in
pairs per token; that of a ring's transfer only where it is exposed, since what hides behind attention adds nothing to
any time. A coefficient on which no measurement depends keeps its profiled value.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from rayfcp.cost.model import CostModel
from rayfcp.values import Group, Primitive, SequenceSpec
from rayfcp.values.arrays import Floats

COEFFICIENTS = (
    "attention_s_per_pair",
    "linear_s_per_token",
    "fixed_s",
    "ring_intra_s_per_token",
    "ring_inter_s_per_token",
    "ring_s_per_round",
    "ulysses_intra_s_per_token",
    "ulysses_inter_s_per_token",
    "ulysses_s",
    "attention_half_tokens",
)
"""Coefficients that are refitted, the last as its product with the first, in which seconds per token are linear.
Overlap is a property of the device; measured passes contain the traffic of shards in their fixed cost."""

PRIOR_ERROR = 1.0  # relative error of a profiled coefficient: the first steps may well contradict it
TIMING_ERROR = 0.02  # relative error of one measured group in the best case
FIRST_ERROR = 0.2  # usual error before any step, and the most: beyond, a step would teach too little
FORGETTING = 0.9  # weight of a step after one more: about ten steps are remembered
MIN_SHARE = 0.1  # of the profiled value: no term vanishes, since a plan that ignores one is worthless
HUBER = 2.0  # residuals beyond this multiple of the usual one weigh less in proportion
MIN_WEIGHT = 0.05  # of an outlier: one that returns in every step must be learned from
SETTLED = 1e-4  # change of the multiples that ends the iteration
ROUNDS = 6  # iterations over outliers, and over which of ring and attention is longer
MANY = 8  # observations from which a step's usual residual is estimated
NUDGE = 1e-4  # relative step of the numeric derivative, exact where T is linear


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """Tokens and visible pairs of all sequences of one group in one microbatch. `crosses`: its ranks are on several
    nodes."""

    num_tokens: int
    num_pairs: float
    num_sequences: int = 1
    degree: int = 1
    primitive: Primitive = Primitive.RING
    crosses: bool = False

    @classmethod
    def of(cls, group: Group, sequences: Sequence[SequenceSpec], *, crosses: bool) -> "GroupWork":
        """That of a group of a plan with its `sequences`."""
        return cls(
            num_tokens=sum(each.num_tokens for each in sequences),
            num_pairs=sum(each.attention_pairs for each in sequences),
            num_sequences=len(sequences),
            degree=group.degree,
            primitive=group.primitive,
            crosses=crosses,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds of forward and backward of `groups` one after the other: of a group in one microbatch, or, where
    only steps can be timed, of the slowest group of each microbatch."""

    groups: tuple[GroupWork, ...]
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """The cost model after all steps so far and their statistics; `after` gives the next value.

    Recursive least squares over multiples of the profiled coefficients, seconds as multiples of the profiled ones:
    `information` (k x k) and `moment` (k) sum up the steps, each weighing `FORGETTING` times what it weighed a step
    before; the profiled coefficients stay a prior of `PRIOR_ERROR` that is never forgotten. Coefficients stay at or
    above `MIN_SHARE` of the profiled; one that is 0 stays 0. Within a step, residuals beyond the usual one
    (`usual_error`, relative) weigh less (Huber).
    """

    profiled: CostModel
    cost: CostModel
    information: tuple[tuple[float, ...], ...]
    moment: tuple[float, ...]
    usual_error: float
    num_steps: int = 0

    @classmethod
    def start(cls, profiled: CostModel) -> "Refit":
        """The profiled coefficients, before the first step."""
        size = len(COEFFICIENTS)
        return cls(
            profiled=profiled,
            cost=profiled,
            information=((0.0,) * size,) * size,
            moment=(0.0,) * size,
            usual_error=FIRST_ERROR,
        )

    def after(self, observations: Sequence[Observation]) -> "Refit":
        """Learn from one more step. The same observations in the same order give the same coefficients.

        Raises:
            ValueError: seconds that are not positive and finite, or no groups.
        """
        observations = _by_device(observations, self.profiled)
        if not observations:
            return self
        for index, each in enumerate(observations):
            if not (math.isfinite(each.seconds) and each.seconds > 0 and each.groups):
                raise ValueError(
                    f"observation {index} has {len(each.groups)} groups in {each.seconds} s, must have at least 1 in "
                    "more than 0 s; leave it out"
                )
        information, moment = FORGETTING * np.array(self.information), FORGETTING * np.array(self.moment)
        columns = _Columns(observations)
        expected_s = columns.rows(self.profiled, unit=self.profiled).sum(axis=1)
        targets = np.array([each.seconds for each in observations]) - columns.unexplained_s(self.profiled)
        targets = np.maximum(targets, 0.0) / expected_s
        cost, usual = self.cost, self.usual_error
        weights = np.ones(len(observations))
        rows = np.zeros((len(observations), len(COEFFICIENTS)))
        solution = np.ones(len(COEFFICIENTS))
        for _ in range(ROUNDS):
            rows, before = columns.rows(cost, unit=self.profiled) / expected_s[:, None], solution
            scaled = weights[:, None] * rows
            solution = _solve(information + rows.T @ scaled, moment + scaled.T @ targets, error=usual)
            cost = _scaled(self.profiled, solution)
            errors = targets / np.maximum(rows @ solution, 1e-12) - 1.0
            usual = _usual(errors, before=self.usual_error)
            beyond = np.abs(errors - np.median(errors)) / (HUBER * usual)
            weights = 1.0 / np.clip(beyond, 1.0, 1.0 / MIN_WEIGHT)
            if np.abs(solution - before).max() < SETTLED:
                break
        scaled = weights[:, None] * rows
        return dataclasses.replace(
            self,
            cost=cost,
            information=tuple(tuple(row) for row in (information + rows.T @ scaled).tolist()),
            moment=tuple((moment + scaled.T @ targets).tolist()),
            usual_error=usual,
            num_steps=self.num_steps + 1,
        )


class _Columns:
    """Groups of all observations as arrays, by primitive."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        groups = [group for each in observations for group in each.groups]
        self._num_observations = len(observations)
        self._owners = np.repeat(np.arange(len(observations)), [len(each.groups) for each in observations])
        self._pairs, self._tokens, self._sequences = (
            np.array([getattr(group, f"num_{name}") for group in groups], np.float64)
            for name in ("pairs", "tokens", "sequences")
        )
        self._degrees = np.array([group.degree for group in groups])
        self._crosses = np.array([group.crosses for group in groups])
        self._of = {each: np.array([group.primitive is each for group in groups]) for each in Primitive}

    def rows(self, cost: CostModel, *, unit: CostModel) -> Floats:
        """Seconds that each coefficient of `unit` explains, [observations, coefficients], on the piece of T where
        `cost` lies. T is piecewise linear in the coefficients and has no constant, so it is the sum of each coefficient
        times its derivative."""
        rows = np.zeros((self._num_observations, len(COEFFICIENTS)))
        at_cost_s = self._seconds(cost)
        for column, (name, multiple) in enumerate(zip(COEFFICIENTS, _multiples(cost, unit=unit), strict=True)):
            if multiple > 0.0:
                slope_s = np.maximum(self._seconds(_nudged(cost, name)) - at_cost_s, 0.0) / (NUDGE * multiple)
                rows[:, column] = np.bincount(self._owners, slope_s, minlength=self._num_observations)
        return rows

    def unexplained_s(self, cost: CostModel) -> Floats:
        """Seconds of states of recurrent layers and of groups that the host bounds, which no coefficient explains, by
        observation."""
        if cost.host_s:
            return np.asarray(self.seconds(cost) - self.rows(cost, unit=cost).sum(axis=1))
        if cost.scan is None:
            return np.zeros(self._num_observations)
        more_s = self._seconds(cost) - self._seconds(cost.without_states())
        return np.bincount(self._owners, more_s, minlength=self._num_observations).astype(np.float64)

    def seconds(self, cost: CostModel) -> Floats:
        """Seconds of observations by a cost model."""
        each_s = self._seconds(cost)
        return np.bincount(self._owners, each_s, minlength=self._num_observations).astype(np.float64)

    def _seconds(self, cost: CostModel) -> Floats:
        seconds = np.zeros(len(self._pairs))
        for primitive, at in self._of.items():
            if at.any():
                seconds[at] = cost.group_s(
                    self._pairs[at],
                    self._tokens[at],
                    degree=self._degrees[at],
                    primitive=primitive,
                    crosses=self._crosses[at],
                    num_sequences=self._sequences[at],
                )
        return seconds


def _by_device(observations: Sequence[Observation], cost: CostModel) -> Sequence[Observation]:
    """Those of which coefficients explain at least half: passes that the host bounds say nothing about the device."""
    if not cost.host_s or not observations:
        return observations
    columns = _Columns(observations)
    shown = columns.rows(cost, unit=cost).sum(axis=1) >= columns.seconds(cost) / 2
    return [each for each, is_shown in zip(observations, shown, strict=True) if is_shown]


def _solve(information: Floats, moment: Floats, *, error: float) -> Floats:
    """Multiples of the profiled coefficients, at least `MIN_SHARE`, that explain best the steps, whose observations
    have a relative `error`, and the prior."""
    prior = (error / PRIOR_ERROR) ** 2
    whole = information + prior * np.eye(len(moment))
    root = np.linalg.cholesky(whole)
    target = np.linalg.solve(root, moment + prior - whole @ np.full(len(moment), MIN_SHARE))
    above, _ = nnls(root.T, target)
    return np.asarray(above + MIN_SHARE)


def _usual(errors: Floats, *, before: float) -> float:
    """The usual relative residual: the spread of this step's residuals where it has many, else their running mean.

    A shift common to all residuals is a machine that changed, not noise.
    """
    if len(errors) >= MANY:
        usual = 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
    else:
        usual = (before + float(np.median(np.abs(errors)))) / 2
    return min(max(usual, TIMING_ERROR), FIRST_ERROR)


def _multiples(cost: CostModel, *, unit: CostModel) -> list[float]:
    """Each coefficient of `cost` over that of `unit`; 0 where that is 0."""
    over = {
        name: getattr(cost, name) / getattr(unit, name) if getattr(unit, name) > 0 else 0.0 for name in COEFFICIENTS
    }
    over["attention_half_tokens"] *= over["attention_s_per_pair"]
    return list(over.values())


def _nudged(cost: CostModel, name: str) -> CostModel:
    """`cost` with a little more of one coefficient; the first changes alone if the last, a factor of it, makes up."""
    changed = {name: getattr(cost, name) * (1 + NUDGE)}
    if name == "attention_s_per_pair":
        changed["attention_half_tokens"] = cost.attention_half_tokens / (1 + NUDGE)
    return cost.with_coefficients(**changed)


def _scaled(unit: CostModel, multiples: Floats) -> CostModel:
    """The cost model whose `_multiples` these are."""
    values = {name: float(m) * getattr(unit, name) for name, m in zip(COEFFICIENTS, multiples, strict=True)}
    values["attention_half_tokens"] /= float(multiples[0])
    return unit.with_coefficients(**values)
