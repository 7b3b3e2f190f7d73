"""Time that sequences add to groups of every degree, and take alone there: the material of `spans`."""

import dataclasses
import itertools

import numpy as np

from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec
from rayfcp.values.arrays import Bools, Floats, Ints

Sums = tuple[int, int]  # of forward and of backward

FIRST: Sums = (0, 0)
PAIRS: tuple[Sums, ...] = (FIRST, (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))  # of forward the third is the second


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The longest sequences one by one, the longest first; then two for each run of others, of a rank's tokens with
    the fewest and with the most pairs per token in the run.

    A choice is a degree, a primitive and whether nodes are crossed. `degrees` [choices]; `fixed` [choices, 2 passes,
    3 sums]: s that a group takes whatever it holds; `added` [choices, 2, 3, items]: s that an item adds, times the
    degree; `alone` [choices, 2, items]: s of a group of it alone (in a run: of its fewest tokens and pairs), infinite
    where memory forbids it. `rooms` [items]: tokens over those that a rank holds. `once`: of every item the rows that
    it counts in and how much; `totals`: what these rows sum to over a plan.
    """

    degrees: Ints
    fixed: Floats
    added: Floats
    alone: Floats
    rooms: Floats
    rooms_least: Floats
    num_single: int
    once: tuple[tuple[tuple[int, float], ...], ...]
    totals: tuple[float, ...]

    @property
    def together(self) -> Floats:
        """[choices, items]: both passes of a group of it alone."""
        found: Floats = self.alone.sum(axis=1)
        return found

    def least(self, sums: Sums, permitted: Bools) -> Floats:
        """[items]: what it adds at least to both passes at a permitted choice ([choices, items])."""
        return _least(self.of_both(sums), permitted)

    def of_both(self, sums: Sums) -> Floats:
        """[choices, items]: what it adds to both passes."""
        found: Floats = self.added[:, 0, sums[0]] + self.added[:, 1, sums[1]]
        return found

    def least_of(self, at: int, permitted: Bools) -> Floats:
        """The same of one pass, by its first sum."""
        return _least(self.added[:, at, 0], permitted)

    def fixed_s(self, sums: Sums) -> Floats:
        """[choices]: of both passes."""
        found: Floats = self.fixed[:, 0, sums[0]] + self.fixed[:, 1, sums[1]]
        return found


def _least(values: Floats, permitted: Bools) -> Floats:
    found: Floats = np.where(permitted, values, np.inf).min(axis=0)
    return found


def items_of(
    sequences: list[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: tuple[Primitive, ...],
    single: int,
    runs: int,
) -> Items:
    """`single` sequences one by one, the others in `runs` of about as many tokens each."""
    ordered = sorted(sequences, key=lambda each: (-each.num_tokens, -each.attention_pairs))
    tokens = np.array([each.num_tokens for each in ordered], np.float64)
    pairs = np.array([each.attention_pairs for each in ordered], np.float64)
    room, count = float(cluster.max_tokens_per_rank), min(single, len(ordered))
    amounts, fewest = [np.stack([tokens, pairs])[:, :count]], [np.stack([tokens, pairs])[:, :count]]
    once: list[tuple[tuple[int, float], ...]] = [((at, 1.0),) for at in range(count)]
    totals = [1.0] * count
    for run in _runs(tokens, count, runs):
        dense = pairs[run] / tokens[run]
        rates = np.array([dense.min() * (1 - 1e-12), dense.max() * (1 + 1e-12)])
        amounts.append(np.stack([[room, room], rates * room]))
        fewest.append(np.repeat([[tokens[run].min()], [pairs[run].min()]], 2, axis=1))
        row, all_pairs = len(totals), float(pairs[run].sum())
        once += [((row, 1.0), (row + 1, float(rate) * room / all_pairs)) for rate in rates]
        totals += [float(tokens[run].sum()) / room, 1.0]
    degrees, each, fixed = _choices(cost, cluster.num_ranks, primitives)
    least = _shares(each, *np.concatenate(fewest, axis=1)) + fixed[..., None]
    fits = np.concatenate(fewest, axis=1)[0] <= degrees[:, None] * room
    held = np.concatenate(amounts, axis=1)
    return Items(
        degrees=degrees,
        fixed=fixed,
        added=_shares(each, *held) * degrees[:, None, None, None],
        alone=np.where(fits[:, None], least.max(axis=2), np.inf),
        rooms=held[0] / room,
        rooms_least=np.concatenate(fewest, axis=1)[0] / room,
        num_single=count,
        once=tuple(once),
        totals=tuple(totals),
    )


def _runs(tokens: Floats, first: int, count: int) -> list[Ints]:
    """Numbers of the sequences from `first` on."""
    numbers = np.arange(first, len(tokens))
    before = np.cumsum(tokens[numbers]) - tokens[numbers]
    cuts = np.searchsorted(before, np.arange(1, count) / count * tokens[numbers].sum())
    return [run for run in np.split(numbers, cuts) if len(run)]


def _shares(each: Floats, tokens: Floats, pairs: Floats) -> Floats:
    """[choices, 2, 3, items]."""
    found: Floats = each[..., 0, None] * pairs + each[..., 1, None] * tokens
    return found


def _choices(cost: CostModel, num_ranks: int, primitives: tuple[Primitive, ...]) -> tuple[Ints, Floats, Floats]:
    """Degrees; [choices, passes, sums, 2]: s per pair and s per token; [choices, passes, sums]: s whatever it holds."""
    degrees = np.arange(1, num_ranks + 1)
    found = []
    for primitive, always in itertools.product(primitives, (False, True)):
        crosses = np.ones(num_ranks, np.bool_) if always else degrees > cost.ranks_per_node
        passes = []
        for terms in cost.terms(degrees, primitive=primitive, crosses=crosses):
            passes.append([[np.broadcast_to(v, num_ranks) for v in each] for each in terms.lines()])
        may = np.isfinite(np.array(passes)).all(axis=(0, 1, 2)) & ~(always & (degrees > cost.ranks_per_node))
        found.append((degrees[may], np.array(passes)[..., may]))
    every = np.concatenate([each for _, each in found], axis=-1).transpose(3, 0, 1, 2)
    return np.concatenate([each for each, _ in found]), every[..., :2], every[..., 2]
