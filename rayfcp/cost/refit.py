"""Refitting while training: the cost model's coefficients follow what steps really took.

Which coefficients measured seconds can tell apart: those of attention, linear layers and the fixed cost, as soon
as groups differ in cells per token; a ring's transfer only where the model says that it is exposed, for what hides
behind attention adds nothing to any time. A coefficient that nothing measured depends on keeps its profiled value.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from rayfcp.cost.model import CostModel
from rayfcp.values import Primitive

COEFFICIENTS = (
    "attention_s_per_cell",
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
"""What is refitted, the last as its product with the first: seconds a token are linear in that. Overlap is the
device's nature; measured passes have the traffic of shards in their fixed cost, and what it is in the way of in the
rest."""

PRIOR_ERROR = 1.0  # relative, of a profiled coefficient: what the first steps may well contradict
TIMING_ERROR = 0.02  # relative, of one measured group in the best case
FIRST_ERROR = 0.2  # the usual one before anything was seen, and the most: beyond, a step would teach too little
FORGETTING = 0.9  # what a step counts for after one more: about ten steps are remembered
LEAST_SHARE = 0.1  # of the profiled value: no term vanishes, for a plan that ignores one is worthless
HUBER = 2.0  # residuals beyond so many times the usual one count in proportion less
LEAST_WEIGHT = 0.05  # of an outlier: one that comes again every step is none, and must be learned from
SETTLED = 1e-4  # a change of the multiples that needs no further round
ROUNDS = 6  # of telling outliers, and which of ring and attention is longer
MANY = 8  # observations from which the usual residual of a step can be told
NUDGE = 1e-4  # relative step of the numeric derivative, exact where T is linear

Vector = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one group had to do in one microbatch: tokens and mask cells of all its sequences together.
    `crosses`: its ranks are on several nodes."""

    num_tokens: int
    num_cells: float
    degree: int = 1
    primitive: Primitive = Primitive.RING
    crosses: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds of forward and backward of `parts` one after the other: of a group in one microbatch,
    or, where only steps can be timed, of the groups that decide each of its microbatches."""

    parts: tuple[Part, ...]
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """The cost model after all steps so far, and what they taught: a value, `after` gives the next one.

    Recursive least squares over multiples of the profiled coefficients, seconds as multiples of the profiled ones:
    `information` (k x k) and `moment` (k) sum up the steps, each weighing `FORGETTING` times what it weighed a step
    before; the profiled coefficients stay a prior of `PRIOR_ERROR` that nothing forgets. Coefficients stay at or above
    `LEAST_SHARE` of the profiled; one that is 0 stays 0. The usual residual (`usual_error`,
    relative) says how far to trust observations; within a step, what is beyond it weighs less (Huber).
    """

    profiled: CostModel
    cost: CostModel
    information: tuple[tuple[float, ...], ...]
    moment: tuple[float, ...]
    usual_error: float
    num_steps: int = 0

    @classmethod
    def start(cls, profiled: CostModel) -> "Refit":
        """Before the first step: the profiled coefficients."""
        profiled, size = profiled.apart(), len(COEFFICIENTS)
        return cls(
            profiled=profiled,
            cost=profiled,
            information=((0.0,) * size,) * size,
            moment=(0.0,) * size,
            usual_error=FIRST_ERROR,
        )

    def after(self, observations: Sequence[Observation]) -> "Refit":
        """One more step. The same observations in the same order give the same coefficients.

        Raises:
            ValueError: seconds that are not positive and finite, or no parts.
        """
        if not observations:
            return self
        measured_s = _measured(observations)
        information = FORGETTING * np.array(self.information)
        moment = FORGETTING * np.array(self.moment)
        columns = _Columns(observations)
        expected_s = columns.rows(self.profiled, unit=self.profiled).sum(axis=1)
        targets = measured_s / expected_s
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
            weights = 1.0 / np.clip(beyond, 1.0, 1.0 / LEAST_WEIGHT)
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


def _measured(observations: Sequence[Observation]) -> Vector:
    for index, each in enumerate(observations):
        if not (math.isfinite(each.seconds) and each.seconds > 0 and each.parts):
            raise ValueError(
                f"observation {index} has {len(each.parts)} parts in {each.seconds} s, must have at least 1 in more "
                "than 0 s; leave it out"
            )
    return np.array([each.seconds for each in observations])


class _Columns:
    """The parts of all observations as arrays, by primitive."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        parts = [part for each in observations for part in each.parts]
        self._num_observations, self._num_parts = len(observations), len(parts)
        self._owners = np.repeat(np.arange(len(observations)), [len(each.parts) for each in observations])
        self._held: list[tuple[Primitive, Index, Vector, Vector, Index, Index]] = []
        for primitive in Primitive:
            at = [index for index, part in enumerate(parts) if part.primitive is primitive]
            if at:
                self._held.append(
                    (
                        primitive,
                        np.array(at),
                        np.array([parts[index].num_cells for index in at], np.float64),
                        np.array([parts[index].num_tokens for index in at], np.float64),
                        np.array([parts[index].degree for index in at]),
                        np.array([parts[index].crosses for index in at]),
                    )
                )

    def rows(self, cost: CostModel, *, unit: CostModel) -> Vector:
        """[observations, coefficients]: seconds that each coefficient of `unit` explains, on the piece of T where
        `cost` lies.

        T is piecewise linear in the coefficients and has no constant, so it is the sum of each coefficient
        times its derivative.
        """
        rows = np.zeros((self._num_observations, len(COEFFICIENTS)))
        here_s = self._seconds(cost)
        for column, (name, multiple) in enumerate(zip(COEFFICIENTS, _multiples(cost, unit=unit), strict=True)):
            if multiple > 0.0:
                slope_s = np.maximum(self._seconds(_nudged(cost, name)) - here_s, 0.0) / (NUDGE * multiple)
                rows[:, column] = np.bincount(self._owners, slope_s, minlength=self._num_observations)
        return rows

    def _seconds(self, cost: CostModel) -> Vector:
        seconds = np.empty(self._num_parts)
        for primitive, at, cells, tokens, degrees, crosses in self._held:
            seconds[at] = cost.group_s(cells, tokens, degree=degrees, primitive=primitive, crosses=crosses)
        return seconds


def _solve(information: Vector, moment: Vector, *, error: float) -> Vector:
    """Multiples of the profiled coefficients that explain the steps, each observation with a relative `error`, and
    the prior best, all at least `LEAST_SHARE`."""
    prior = (error / PRIOR_ERROR) ** 2
    whole = information + prior * np.eye(len(moment))
    root = np.linalg.cholesky(whole)
    target = np.linalg.solve(root, moment + prior - whole @ np.full(len(moment), LEAST_SHARE))
    above, _ = nnls(root.T, target)
    return np.asarray(above + LEAST_SHARE)


def _usual(errors: Vector, *, before: float) -> float:
    """The usual relative residual: the spread of this step's where it has many, else what it was, slowly following.

    What all residuals have in common is a machine that changed, not noise.
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
    over["attention_half_tokens"] *= over["attention_s_per_cell"]
    return list(over.values())


def _nudged(cost: CostModel, name: str) -> CostModel:
    """A little more of one coefficient and no other; see `COEFFICIENTS` on the first and the last."""
    changed = {name: getattr(cost, name) * (1 + NUDGE)}
    if name == "attention_s_per_cell":
        changed["attention_half_tokens"] = cost.attention_half_tokens / (1 + NUDGE)
    return cost.with_coefficients(**changed)


def _scaled(unit: CostModel, multiples: Vector) -> CostModel:
    """The cost model whose `_multiples` these are."""
    values = {name: float(m) * getattr(unit, name) for name, m in zip(COEFFICIENTS, multiples, strict=True)}
    values["attention_half_tokens"] /= float(multiples[0])
    return unit.with_coefficients(**values)
