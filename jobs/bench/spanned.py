"""Constraints of a kind of microbatches, as a block of rows of a linear program: (1) to (3) of `spans`."""

import dataclasses
import itertools
from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

import numpy as np
from ahead import Ahead
from items import FIRST, PAIRS, Items
from milp import Block, Rows
from scipy import sparse

from rayfcp.values.arrays import Bools, Floats, Ints

BESIDE = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 21, 25, 33, 65)  # degrees with which classes begin
NARROW = 1.03  # ratio of ends: at less, and if the longest's degree is known, classes beside it are told apart
ONE_EACH, WHOLE = (
    5,
    12,
)  # longest sequences of which x_j <= y, and m >= a degree, is asked: of others it follows, nearly
NONE = np.array([-1])
NEAR = 1 + 1e-9


class Kind(NamedTuple):
    """Microbatches of `low` to `high` s of which item `longest` is the longest, on `first` to `last` ranks; `last` is 0
    where nothing is known of the longest."""

    low: float
    high: float
    longest: int = -1
    first: int = 0
    last: int = 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """A batch on `num_ranks`."""

    items: Items
    num_ranks: int
    fixed_s: float
    exposed_s: float
    ahead: Ahead

    @cached_property
    def once(self) -> sparse.csc_matrix:
        """[totals, items]."""
        found = [(row, item, value) for item, rows in enumerate(self.items.once) for row, value in rows]
        rows, items, values = zip(*found, strict=True)
        return sparse.csc_matrix((values, (rows, items)), shape=(len(self.items.totals), len(self.items.once)))


def block_of(setting: Setting, kind: Kind) -> Block | None:
    """Its columns: how many microbatches (y), their seconds (z), then items; None where the longest takes more."""
    if not kind.last:
        rows, (y, z) = _begun(kind, NONE)
        _anything(rows, setting, kind, y, z)
        return rows.block(setting.once, [setting.exposed_s, 1.0])
    items = setting.items
    alone = items.together[:, kind.longest]
    own = (items.degrees >= kind.first) & (items.degrees <= kind.last) & (alone <= kind.high * NEAR)
    if not own.any():
        return None
    kind = kind._replace(low=min(max(kind.low, float(alone[own].min())), kind.high))
    rows, (y, z) = _begun(kind, np.array([kind.longest]))
    _Holding(setting, kind, own, rows, y, z).add()
    return rows.block(setting.once, [setting.exposed_s, 1.0])


def _begun(kind: Kind, longest: Ints) -> tuple[Rows, tuple[Ints, Ints]]:
    rows = Rows()
    y, z = rows.columns(longest), rows.columns(NONE)
    rows.add((y, kind.low), (z, -1.0))
    rows.add((y, -kind.high), (z, 1.0))
    return rows, (y, z)


def _anything(rows: Rows, setting: Setting, kind: Kind, y: Ints, z: Ints) -> None:
    """(1) and (2)."""
    items = setting.items
    added = items.least(FIRST, items.together <= kind.high * NEAR)
    numbers = np.flatnonzero(np.isfinite(added))
    columns = rows.columns(numbers)
    rows.add((columns, added[numbers]), (z, -setting.num_ranks), (y, setting.num_ranks * setting.fixed_s))
    rows.add((columns, items.rooms[numbers]), (y, -setting.num_ranks))
    for column, number in zip(columns, numbers.tolist(), strict=True):
        if number < min(ONE_EACH, items.num_single):
            rows.add((np.array([column]), 1.0), (y, -1.0))


@dataclasses.dataclass(frozen=True)
class _Holding:
    """(1) to (3) where the longest is known; `own` [choices]: the longest may have these."""

    setting: Setting
    kind: Kind
    own: Bools
    rows: Rows
    y: Ints
    z: Ints

    def add(self) -> None:
        items, setting = self.setting.items, self.setting
        columns = self._joined()
        added = items.least(FIRST, self.own[:, None])
        waits = float((items.degrees * (items.fixed_s(FIRST) - setting.fixed_s))[self.own].min())
        used: list[tuple[Ints, Floats | float]] = [
            (self.y, float(added[self.kind.longest]) + waits + setting.num_ranks * setting.fixed_s)
        ]
        used.append((columns, added[self._items_of(columns)]))
        places: defaultdict[int, list[int]] = defaultdict(list)
        for beside, seconds in [(columns, None), *self._beside()]:
            if seconds is not None:
                used.append((beside, seconds))
            for number, column in zip(self._items_of(beside).tolist(), beside.tolist(), strict=True):
                places[number].append(column)
        self.rows.add((self.z, -setting.num_ranks), *used)
        for number, own in places.items():
            if number < min(ONE_EACH, items.num_single):
                self.rows.add((np.array(own), 1.0), (self.y, -1.0))

    def _items_of(self, columns: Ints) -> Ints:
        return np.array(self.rows.items, np.int64)[columns]

    def _shorter(self, seconds: Floats) -> Ints:
        """Items after the longest that have finite seconds."""
        return np.flatnonzero(np.isfinite(seconds[self.kind.longest + 1 :])) + self.kind.longest + 1

    def _joined(self) -> Ints:
        """Those in the group of the longest."""
        items, longest, most = self.setting.items, self.kind.longest, self.setting.items.degrees[self.own].max()
        fits = items.rooms_least + items.rooms[longest] <= most * (1 + 1e-12)
        numbers = self._shorter(np.where(fits, 0.0, np.inf))
        columns = self.rows.columns(numbers)
        self.rows.add((columns, items.rooms[numbers]), (self.y, float(items.rooms[longest] - most)))
        for sums in PAIRS:
            shares = items.of_both(sums)[self.own] / items.degrees[self.own, None]
            taken = float((shares[:, longest] + items.fixed_s(sums)[self.own]).min())
            self.rows.add((columns, shares.min(axis=0)[numbers]), (self.y, taken), (self.z, -1.0))
        return columns

    def _beside(self) -> list[tuple[Ints, Floats]]:
        """Columns of those in other groups and their seconds of (1), by class of degrees."""
        items, kind = self.setting.items, self.kind
        ranks = self.setting.num_ranks - int(items.degrees[self.own].min())
        before = self._before()
        may = (items.together <= kind.high * NEAR) & (items.alone <= (kind.high - before)[:, None] * NEAR).all(axis=1)
        may &= items.degrees[:, None] <= ranks
        apart = kind.first == kind.last and kind.high < NARROW * kind.low
        found, groups = [], []
        begins = [first for first in BESIDE if first <= ranks] if apart else [1]
        for first, after in itertools.pairwise([*begins, ranks + 1]):
            permitted = may & ((items.degrees >= first) & (items.degrees < after))[:, None]
            numbers = self._shorter(items.least(FIRST, permitted))
            if not len(numbers):
                continue
            columns = self.rows.columns(numbers)
            found.append((columns, items.least(FIRST, permitted)[numbers]))
            if apart:
                groups.append(self.rows.columns(NONE))
                self._whole(groups[-1], columns, permitted)
            self._class(columns, permitted, before, groups[-1] if apart else None, ranks)
        if groups:
            self.rows.add((np.concatenate(groups), 1.0), (self.y, -ranks))
        return found

    def _before(self) -> Floats:
        """Of every pass by how much any group's is shorter than the microbatch, at least."""
        forward_s, backward_s = self.setting.items.alone[self.own, :, self.kind.longest].min(axis=0).tolist()
        ahead = self.setting.ahead
        most_s = ahead.backward_s(self.kind.high - forward_s)
        return np.array([backward_s - ahead.of(backward_s), forward_s - ahead.of(most_s)])

    def _whole(self, group: Ints, columns: Ints, permitted: Bools) -> None:
        """m is at least the least degree of each of the longest."""
        items = self.setting.items
        for number, column in zip(self._items_of(columns).tolist(), columns, strict=True):
            if number < min(WHOLE, items.num_single):
                least = float(items.degrees[permitted[:, number]].min())
                self.rows.add((np.array([column]), least), (group, -1.0))

    def _class(self, columns: Ints, permitted: Bools, before: Floats, group: Ints | None, ranks: int) -> None:
        """Memory, pairs of sums, and forward and backward of groups beside the longest."""
        items, there, numbers = self.setting.items, permitted.any(axis=1), self._items_of(columns)
        rows, kind = self.rows, self.kind
        rows.add((columns, items.rooms[numbers]), (self.y, -ranks) if group is None else (group, -1.0))

        def within(added: Floats, fixed_s: float, other_s: float) -> None:
            if group is None:
                taken = other_s + min(fixed_s, max(kind.low - other_s, 0.0))
                rows.add((columns, added[numbers]), (self.z, -ranks), (self.y, ranks * taken))
            else:
                rows.add((columns, added[numbers]), (group, fixed_s + other_s - kind.high))

        for sums in PAIRS:
            within(items.least(sums, permitted), float(items.fixed_s(sums)[there].min()), 0.0)
        for at, other_s in enumerate(before):
            within(items.least_of(at, permitted), float(items.fixed[there, at, 0].min()), float(other_s))
