"""What one microbatch can hold at most, by its slowest forward and slowest backward: linear constraints, and how far
prices of sequences are from what these permit."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from ahead import Ahead
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, Primitive

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

OFFERED = (0, 1, 2, 3, 4, 5, 7, 10)  # degrees less one that every class of sequences is offered
LONGEST = 10  # the least degrees of so many classes are offered too


class Kind(NamedTuple):
    """Seconds of the slowest forward and of the slowest backward of a microbatch."""

    forward_s: float
    backward_s: float


class Cell(NamedTuple):
    """Microbatches of `start_s` to `stop_s` seconds, of which forward has a share from `low` to `high`."""

    start_s: float
    stop_s: float
    low: float
    high: float

    @property
    def far(self) -> Kind:
        """No kind of the cell has more of either."""
        return Kind(self.stop_s * self.high, self.stop_s * (1 - self.low))

    def corners(self) -> list[Kind]:
        """The cell is their convex hull."""
        pairs = itertools.product((self.start_s, self.stop_s), (self.low, self.high))
        return [Kind(seconds * share, seconds * (1 - share)) for seconds, share in pairs]

    def halves(self) -> tuple["Cell", "Cell"]:
        """Across the longer side: a share counts as much as several times its part of the seconds."""
        if self.stop_s / self.start_s - 1 >= 4 * (self.high - self.low):
            middle = (self.start_s + self.stop_s) / 2
            return self._replace(stop_s=middle), self._replace(start_s=middle)
        middle = (self.low + self.high) / 2
        return self._replace(high=middle), self._replace(low=middle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Classes of `count` like sequences. [class, degree - 1]: `forward_s`, `backward_s` that one adds to its group at
    least, `alone_forward_s`, `alone_backward_s` of a group of it alone, infinite where memory forbids it. `rooms`: its
    tokens over those that a rank holds. [degree - 1]: `forward_fixed_s`, `backward_fixed_s` of a group. `ahead`: of any
    microbatch."""

    count: Floats
    rooms: Floats
    forward_s: Floats
    backward_s: Floats
    alone_forward_s: Floats
    alone_backward_s: Floats
    forward_fixed_s: Floats
    backward_fixed_s: Floats
    ahead: Ahead

    @property
    def degrees(self) -> Floats:
        return np.arange(1.0, self.forward_s.shape[1] + 1)

    def fits(self, kind: Kind) -> Bools:
        """[class, degree - 1]: alone it is within the kind."""
        found: Bools = (
            (self.alone_forward_s <= kind.forward_s * (1 + 1e-12))
            & (self.alone_backward_s <= kind.backward_s * (1 + 1e-12))
            & (self.forward_fixed_s < kind.forward_s)
            & (self.backward_fixed_s < kind.backward_s)
        )
        return found


def loads_of(
    tokens: Floats,
    cells: Floats,
    count: Floats,
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: tuple[Primitive, ...],
) -> Loads:
    """Of groups that span as few nodes as may be, by whichever primitive takes less."""
    degrees = np.arange(1, cluster.num_ranks + 1)
    tokens, cells = tokens[:, None], cells[:, None]
    least: list[Floats] = []
    nearness = degrees > cost.ranks_per_node, np.ones(len(degrees), np.bool_)
    for primitive, crosses in itertools.product(primitives, nearness):
        found: list[Floats] = []
        for terms in cost.terms(degrees, primitive=primitive, crosses=crosses):
            never = ~np.isfinite(terms.moved_s)
            cell, token, fixed_s = terms.sums()[0]
            no_room = tokens > degrees * cluster.max_tokens_per_rank
            found += [
                np.where(never, np.inf, cell * cells + token * tokens),
                np.where(never, np.inf, fixed_s),
                np.where(no_room | never, np.inf, terms.seconds(cells, tokens)),
            ]
        least = [np.minimum(*pair) for pair in zip(least, found, strict=True)] if least else found
    return Loads(
        count=count,
        rooms=tokens[:, 0] / cluster.max_tokens_per_rank,
        forward_s=least[0],
        forward_fixed_s=least[1],
        alone_forward_s=least[2],
        backward_s=least[3],
        backward_fixed_s=least[4],
        alone_backward_s=least[5],
        ahead=Ahead(cost.ahead, cost.ahead_s),
    )


def weights(loads: Loads, prices: Floats, kind: Kind) -> Floats:
    """[3, degree - 1]: how much forward, backward and memory of a group count where a microbatch gets the most of
    `prices`, in the solution of the linear programme; nothing (not a number) for degrees that it does not tell."""
    fits, num_ranks = loads.fits(kind), len(loads.degrees)
    least = np.where(fits.any(axis=1), fits.argmax(axis=1), -1)
    offered = np.zeros(num_ranks, np.bool_)
    offered[[each for each in OFFERED if each < num_ranks]] = True
    offered[least[:LONGEST][least[:LONGEST] >= 0]] = True
    at, degree = np.nonzero(fits & offered)
    found = np.full((3, num_ranks), np.nan)
    if not len(at):
        return found
    used = np.unique(degree)
    place, size, pairs, degrees = np.searchsorted(used, degree), len(used), len(at), loads.degrees[used]
    spans = kind.forward_s - loads.forward_fixed_s[used], kind.backward_s - loads.backward_fixed_s[used]
    own, groups = np.arange(pairs), np.arange(size)
    rows = [place, size + place, 2 * size + place, groups, size + groups, 2 * size + groups]
    rows += [np.full(size, 3 * size), 3 * size + 1 + at]
    columns = [own, own, own, pairs + groups, pairs + groups, pairs + groups, pairs + groups, own]
    values = [loads.forward_s[at, degree], loads.backward_s[at, degree], loads.rooms[at]]
    values += [-spans[0], -spans[1], -degrees, degrees, np.ones(pairs)]
    solved = linprog(
        np.r_[-prices[at], np.zeros(size)],
        A_ub=csr_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))),
        b_ub=np.r_[np.zeros(3 * size), num_ranks, loads.count[: at.max() + 1]],
        method="highs-ds",
    )
    if solved.status == 0:
        dual = np.maximum(-solved.ineqlin.marginals[: 3 * size].reshape(3, size), 0.0)
        dual *= np.array([spans[0] / degrees, spans[1] / degrees, np.ones(size)])
        known = dual.sum(axis=0) > 1e-9
        found[:, used[known]] = dual[:, known] / dual[:, known].sum(axis=0)
    return found


def excess_s(loads: Loads, prices: Floats, cell: Cell, hints: Floats) -> float:
    """By how much prices may exceed the seconds of a microbatch in the cell, at most; `hints` of `weights`.

    Weak duality (`certified`): the value is an upper bound whatever the weights are.
    """
    far, degrees = cell.far, loads.degrees
    fits = loads.fits(far)
    if not fits.any():
        return -cell.start_s * (1 - loads.ahead.share)
    spans = np.array([far.forward_s - loads.forward_fixed_s, far.backward_s - loads.backward_fixed_s])
    with np.errstate(divide="ignore", invalid="ignore"):
        each_s = loads.forward_s, loads.backward_s
        shares = [*(degrees * each / span for each, span in zip(each_s, spans, strict=True)), loads.rooms[:, None]]
    chosen = _complete(hints)
    taken = sum(np.where(fits, share, 0.0) * weight for share, weight in zip(shares, chosen, strict=True))
    rate, left = _best_rate(prices, np.where(fits, taken, np.inf).min(axis=1), len(degrees))
    worst = -np.inf
    used = fits.any(axis=0)
    for corner in cell.corners():
        short = chosen[0] * (far.forward_s - corner.forward_s) / spans[0]
        short = short + chosen[1] * (far.backward_s - corner.backward_s) / spans[1]
        ranks_s = max(rate * float((1 - short)[used].max()), 0.0) * len(degrees)
        worst = max(worst, ranks_s + left - loads.ahead.makespan_s(*corner))
    return worst


def _complete(hints: Floats) -> Floats:
    """Degrees that hints leave open weigh as the next smaller one that they tell: what a sequence takes grows with the
    degree, so that none takes less there."""
    known = np.flatnonzero(~np.isnan(hints[0]))
    if not len(known):
        return np.full(hints.shape, 1 / len(hints))
    nearest = np.maximum(np.searchsorted(known, np.arange(hints.shape[1]), side="right") - 1, 0)
    return hints[:, known[nearest]]


def _best_rate(prices: Floats, taken: Floats, num_ranks: int) -> tuple[float, float]:
    """The price of a rank at which prices of sequences bring the least beyond that of all ranks; what they bring."""
    can = np.isfinite(taken) & (prices > 0)
    value, size = prices[can], np.maximum(taken[can], 1e-300)
    order = np.argsort(-value / size)
    full = int(np.searchsorted(np.cumsum(size[order]), num_ranks))
    rate = float(value[order[full]] / size[order[full]]) if full < len(order) else 0.0
    return rate, float(np.maximum(value - rate * size, 0.0).sum())
