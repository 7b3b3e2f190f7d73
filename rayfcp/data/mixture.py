"""Mixtures: which source, and which sample of it, stands at a place of a run; a function of the place alone.

Sample i of a segment (a stretch of the run in which weights stay the same) has the number `u_i = i P mod 2^64`, with P
2^64 over the golden ratio: a sequence of Kronecker and Weyl, whose points spread nearly as evenly as a grid, so that
any stretch has each source in its share, to a few samples. The source is the one whose interval of cumulative weights
holds u_i; how often it stood before is a difference of sums of floors, which the Euclidean algorithm finds in some 64
steps. So batches need no state and no table, and any of them is found at once.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data.index import LengthIndex
from rayfcp.data.sampler import Sampler, shuffled
from rayfcp.values import GlobalBatch

_MODULUS = 1 << 64
_STEP = 11400714819323198485
"""2^64 over the golden ratio, made odd."""
_FAR = 1 << 62
"""More samples than any run has."""

Weights = Sequence[Fraction]


def floor_sum(count: int, *, modulus: int, factor: int, offset: int) -> int:
    """Sum of floor((factor i + offset) / modulus) over i in `[0, count)`, for any integers.

    >>> floor_sum(4, modulus=3, factor=2, offset=-1), [(2 * i - 1) // 3 for i in range(4)]
    (1, [-1, 0, 1, 1])
    """
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (factor // modulus) + count * (offset // modulus)
        factor, offset = factor % modulus, offset % modulus
        last = factor * count + offset
        count, offset, modulus, factor = last // modulus, last % modulus, factor, modulus
    return total


def num_below(count: int, bound: int) -> int:
    """How many of the first `count` numbers u_i are less than `bound`, in `[0, 2^64]`."""
    whole = floor_sum(count, modulus=_MODULUS, factor=_STEP, offset=0)
    return whole - floor_sum(count, modulus=_MODULUS, factor=_STEP, offset=-bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Samples of a run from `first` on. `cuts`: limits of the sources' intervals, from 0 to 2^64; `taken`: samples of
    each source before `first`."""

    first: int
    cuts: tuple[int, ...]
    taken: tuple[int, ...]

    def counts(self, count: int) -> list[int]:
        """Samples of each source among the first `count` of the segment."""
        below = [num_below(count, cut) for cut in self.cuts]
        return [high - low for low, high in pairwise(below)]

    def place(self, first: int, *, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source of each of `count` samples from place `first` of the segment on, and its number among the samples of
        its source in the run, from 0."""
        with np.errstate(over="ignore"):  # modulo 2^64
            points = (np.arange(count, dtype=np.uint64) + np.uint64(first)) * np.uint64(_STEP)
        # A source without weight has an empty interval; the last cut is no number of 64 bits.
        inner = np.array([min(cut, _MODULUS - 1) for cut in self.cuts[1:-1]], dtype=np.uint64)
        full = np.array([cut == _MODULUS for cut in self.cuts[1:-1]], dtype=bool)
        sources = (points[:, None] >= inner[None, :]) & ~full[None, :]
        chosen = sources.sum(axis=1).astype(np.int64)
        numbers = np.empty(count, dtype=np.int64)
        for source, before in enumerate(self.counts(first)):
            own = np.flatnonzero(chosen == source)
            numbers[own] = self.taken[source] + before + np.arange(own.size)
        return chosen, numbers


def make_segments(
    stretches: Sequence[tuple[int, Weights]], *, limits: Sequence[int | None]
) -> tuple[tuple[Segment, ...], int]:
    """Segments of a run, and its number of samples.

    `stretches`: first sample and weights of each part of the schedule. `limits`: samples that a source may give; when
    it has, a new segment begins, with the weights of the others.
    """
    segments: list[Segment] = []
    taken = [0] * len(limits)
    stops = [*(start for start, _ in stretches[1:]), _FAR]
    first = 0
    for (_, weights), stop in zip(stretches, stops, strict=True):
        while first < stop:
            left = [None if limit is None else limit - have for limit, have in zip(limits, taken, strict=True)]
            usable = [Fraction(0) if room == 0 else weight for weight, room in zip(weights, left, strict=True)]
            if not sum(usable):
                return tuple(segments), first
            segment = Segment(first=first, cuts=_cuts(usable), taken=tuple(taken))
            segments.append(segment)
            num_samples = _until_one_ends(segment, left, stop=stop - first)
            taken = [have + more for have, more in zip(taken, segment.counts(num_samples), strict=True)]
            first += num_samples
    return tuple(segments), _FAR


def _cuts(weights: Weights) -> tuple[int, ...]:
    total, sums = sum(weights), [Fraction(0)]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return tuple(int(each * _MODULUS / total) for each in sums)


def _until_one_ends(segment: Segment, left: Sequence[int | None], *, stop: int) -> int:
    """Samples of the segment up to the last one of the first source that has given all it may, at most `stop`."""

    def has_ended(count: int) -> bool:
        given = segment.counts(count)
        return any(room and more >= room for room, more in zip(left, given, strict=True))

    if all(not room for room in left):
        return stop
    low, high = 0, 1
    while high < stop and not has_ended(high):
        low, high = high, 2 * high
    high = min(high, stop)
    if not has_ended(high):
        return stop
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_ended(middle) else (middle, high)
    return high


class MixtureSampler(Sampler):
    """Global batches of several sources by the weights of `data`. Each source is taken epoch after epoch, each in an
    order of its own, so that no sample of it comes again before all others have."""

    def __init__(self, index: LengthIndex, data: DataConfig, *, seed: int) -> None:
        super().__init__(index, seed=seed, global_batch=data.global_batch_sequences)
        self._places = index.sources
        if empty := [name for name, (start, stop) in self._places.items() if start == stop]:
            raise ConfigError(
                f"data.sources.{empty[0]} has no sample, must have one of at most data.max_seqlen ({data.max_seqlen}) "
                "tokens; leave it out"
            )
        self._description = _described(data)
        per_draw = index.samples_per_draw
        sizes = [(stop - start) // per_draw for start, stop in self._places.values()]
        tokens = [int(index.lengths[start:stop].sum()) for start, stop in self._places.values()]
        epochs = [data.sources[name].epochs for name in self._places]
        limits = [
            None if passes is None else max(1, int(Fraction(str(passes)) * size))
            for passes, size in zip(epochs, sizes, strict=True)
        ]
        self._places = {name: (start // per_draw, stop // per_draw) for name, (start, stop) in self._places.items()}
        self._segments, self.num_samples = make_segments(
            stretches_of(data, names=tuple(self._places), sizes=sizes, tokens=tokens, batch=self._global_batch),
            limits=limits,
        )
        self._seeds = [
            int.from_bytes(hashlib.blake2b(f"rayfcp source {seed} {name}".encode(), digest_size=8).digest(), "little")
            for name in self._places
        ]

    @property
    def num_steps(self) -> int:
        """Full batches until the sources have given all that their epochs allow."""
        return self.num_samples // self._global_batch

    def _batch(self, step: int, *, first: int) -> GlobalBatch:
        if step > self.num_steps:
            raise ValueError(f"step is {step}, must be at most {self.num_steps}: sources have no more epochs")
        sources, numbers = self._placed(first)
        positions, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for source, (start, stop) in enumerate(self._places.values()):
            own = np.flatnonzero(sources == source)
            positions[own] = start + shuffled(numbers[own], size=stop - start, seed=self._seeds[source])
            epochs[own] = numbers[own] // (stop - start)
        return GlobalBatch(
            step=step,
            epoch=int(epochs[0]),
            samples=self._index.samples(positions),
            sources=tuple(self._places),
            source_of=tuple(np.repeat(sources, self._index.samples_per_draw).tolist()),
        )

    def _placed(self, first: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sources of the batch's samples, and their numbers among the samples of their source."""
        stop, found = first + self._global_batch, []
        ends = [*(segment.first for segment in self._segments[1:]), self.num_samples]
        for segment, end in zip(self._segments, ends, strict=True):
            start, last = max(first, segment.first), min(stop, end)
            if start < last:
                found.append(segment.place(start - segment.first, count=last - start))
        sources, numbers = zip(*found, strict=True)
        return np.concatenate(sources), np.concatenate(numbers)

    def state(self, step: int) -> dict[str, Any]:
        return {**super().state(step), "mixture": self._description}


def stretches_of(
    data: DataConfig, *, names: Sequence[str], sizes: Sequence[int], tokens: Sequence[int], batch: int
) -> list[tuple[int, Weights]]:
    """First sample and weights of each part of the schedule: weights count samples, shares count tokens. A step takes
    `batch` samples; pairs count as one."""

    def of_samples(shares: Mapping[str, Any], *, by_tokens: bool) -> Weights:
        given = [Fraction(str(shares.get(name, 0))) for name in names]
        if not by_tokens:
            return given
        return [share * size / count for share, size, count in zip(given, sizes, tokens, strict=True)]

    weights = {name: source.weight for name, source in data.sources.items()}
    shares = {name: source.share for name, source in data.sources.items()}
    by_tokens = None in weights.values()
    if None in shares.values() and by_tokens:
        # Ten digits: powers differ in their last ones between machines.
        powers = [f"{count ** (1.0 / data.temperature):.10g}" for count in tokens]
        shares = dict(zip(names, map(float, powers), strict=True))
    stretches = [(0, of_samples(shares if by_tokens else weights, by_tokens=by_tokens))]
    for part in data.schedule:
        first = (part.from_step - 1) * batch
        stretches.append((first, of_samples(part.shares or part.weights, by_tokens=bool(part.shares))))
    return stretches


def _described(data: DataConfig) -> str:
    """Everything of the configuration that a mixture depends on, in one line."""
    values = {
        "sources": {
            name: source.model_dump(include={"weight", "share", "epochs"}, exclude_none=True)
            for name, source in data.sources.items()
        },
        "temperature": data.temperature,
        "schedule": [part.model_dump(exclude_defaults=True) for part in data.schedule],
    }
    return json.dumps(values, sort_keys=True)
