"""Sums over (query, key) pairs as values of polynomials at a random point, in a field of 2^61 - 1 elements.

Sums over `[start, stop)` are times x - 1 and y - 1, which spares divisions.
"""

from itertools import accumulate, repeat

import numpy as np
import numpy.typing as npt

from rayfcp.values.arrays import Ints

Residues = npt.NDArray[np.uint64]

PRIME = 2**61 - 1

HALF = (1 << 32) - 1


class Point:
    """Values of tokens at a random point: of query q of sequence s a = r(s) x^q, of key k of it b = t(s) y^k; for
    sequences from `lowest` to `highest` and up to `most` tokens."""

    def __init__(self, *, lowest: int, highest: int, most: int) -> None:
        rng = np.random.default_rng(0)
        x, y = rng.integers(2, PRIME, 2).tolist()
        self._x, self._y = _Powers(x, most=most + 1), _Powers(y, most=most + 1)
        self._lowest = lowest
        self._r, self._t = rng.integers(1, PRIME, (2, highest - lowest + 1), np.uint64)
        self._slope = np.uint64((x - 1) * pow(x * y - 1, -1, PRIME) % PRIME)

    def queries(self, sequence: Ints, *, start: Ints, stop: Ints) -> Residues:
        """The sum of a over tokens."""
        return times(self._r[sequence - self._lowest], less(self._x.at(stop), self._x.at(start)))

    def keys(self, sequence: Ints, *, start: Ints, stop: Ints) -> Residues:
        """The sum of b over tokens."""
        return times(self._t[sequence - self._lowest], less(self._y.at(stop), self._y.at(start)))

    def moving(self, sequence: Ints, *, start: Ints, stop: Ints, key: Ints, of: Ints) -> Residues:
        """The sum over queries of a times the sum of b over the keys of sequence `of` from `key` on: none for the first
        query, and one more for each."""
        x, y, begin = self._x.at(stop), self._y.at(key + stop - start), self._y.at(key)
        first = self._x.at(start)
        ends = times(less(times(x, y), times(first, begin)), self._slope)
        both = times(self._r[sequence - self._lowest], self._t[of - self._lowest])
        return times(both, less(ends, times(less(x, first), begin)))

    def upto(self, sequence: Ints, *, start: Ints, stop: Ints, keys: Ints) -> Residues:
        """The sum over queries of a times the sum of b over the first keys of the same sequence, `keys` for the first
        query, and one more for each."""
        still = times(
            self.queries(sequence, start=start, stop=stop), self.keys(sequence, start=np.zeros_like(keys), stop=keys)
        )
        return folded(still + self.moving(sequence, start=start, stop=stop, key=keys, of=sequence))


class _Powers:
    """Powers of a number, up to `most`: products of two from short tables."""

    def __init__(self, base: int, *, most: int) -> None:
        self._bits = (most.bit_length() + 1) // 2
        self._low = _powers(base, 1 << self._bits)
        self._high = _powers(pow(base, 1 << self._bits, PRIME), (most >> self._bits) + 1)

    def at(self, exponent: Ints) -> Residues:
        return times(self._low[exponent & ((1 << self._bits) - 1)], self._high[exponent >> self._bits])


def _powers(base: int, count: int) -> Residues:
    return np.array(list(accumulate(repeat(base, count - 1), lambda one, by: one * by % PRIME, initial=1)), np.uint64)


def folded(values: Residues) -> Residues:
    """Residues of any numbers."""
    values = (values & PRIME) + (values >> 61)
    return np.where(values >= PRIME, values - PRIME, values)


def less(one: Residues, other: Residues) -> Residues:
    """Differences."""
    return folded(one + (PRIME - other))


def times(one: Residues, other: Residues | np.uint64) -> Residues:
    """Products, of halves of 32 bits; 2^61 is 1."""
    high, low, other_high, other_low = one >> 32, one & HALF, other >> 32, other & HALF
    middle = high * other_low + low * other_high  # below 2^62
    rest = (high * other_high << 3) + (middle >> 29) + ((middle & ((1 << 29) - 1)) << 32)
    return folded(folded(low * other_low) + rest)


def _of_halves(low: Residues, high: Residues) -> Residues:
    """Residues of low + 2^32 high, of any numbers."""
    return folded(folded(low) + times(folded(high), np.uint64(1 << 32)))


def prefix_sums(values: Residues) -> Residues:
    """The sum of the values before each, and of all."""
    return np.append(np.uint64(0), _of_halves(np.cumsum(values & HALF), np.cumsum(values >> 32)))


class Totals:
    """Sums by number, below `count`."""

    def __init__(self, count: int) -> None:
        self._low, self._high = np.zeros((2, count), np.uint64)

    def add(self, number: Ints, values: Residues) -> None:
        """Add each value to the sum of its number."""
        np.add.at(self._low, number, values & HALF)
        np.add.at(self._high, number, values >> 32)

    def sums(self) -> Residues:
        """All sums."""
        return _of_halves(self._low, self._high)
