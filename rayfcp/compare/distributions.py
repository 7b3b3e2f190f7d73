"""Synthetic length distributions, each from what a paper states of its data set. Seeded; integers of tokens.

A paper states a few quantiles, never the whole distribution: what fills the space between them is said at each one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.cost.profiles import pick

Lengths = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]

K = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """`draw(rng, count)` gives lengths before rounding; `source` says what is stated and what was filled in."""

    name: str
    draw: Draw
    shortest: int
    longest: int
    source: str

    def sample(self, count: int, *, seed: int) -> Lengths:
        """`count` independent lengths in `[shortest, longest]`; the same arguments give the same lengths."""
        lengths = self.draw(np.random.default_rng(seed), count)
        return np.clip(np.rint(lengths), self.shortest, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lognormal with the standard deviation `sigma` of its logarithm and the given mean, before clipping."""

    mean_tokens: float
    sigma: float

    def __call__(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        return rng.lognormal(np.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Each length from one of `parts`, chosen with its weight."""

    weights: tuple[float, ...]
    parts: tuple[Draw, ...]

    def __call__(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        which = rng.choice(len(self.parts), size=count, p=self.weights)
        drawn = np.stack([part(rng, count) for part in self.parts])
        return np.asarray(drawn[which, np.arange(count)], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """`part` given that it lies in `[low, high)`: what falls outside is drawn again."""

    part: Draw
    low: float
    high: float

    def __call__(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        lengths = self.part(rng, count)
        while (outside := (lengths < self.low) | (lengths >= self.high)).any():
            lengths[outside] = self.part(rng, int(outside.sum()))
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """P(length > x) falls as x^-alpha from `low`, cut at `high`."""

    alpha: float
    low: float
    high: float

    def __call__(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        kept = 1 - (self.high / self.low) ** -self.alpha
        return np.asarray(self.low * (1 - kept * rng.random(count)) ** (-1 / self.alpha), np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Logarithms of lengths interpolated linearly between quantiles `(share, tokens)`."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        shares, tokens = zip(*self.points, strict=True)
        return np.asarray(np.exp(np.interp(rng.random(count), shares, np.log(tokens))), np.float64)


# P(> 8K) = 8.5 % and P(> 64K) = 0.6 % fix alpha = ln(8.5 / 0.6) / ln 8. With it the tail to 512K holds 21.6 % of all
# tokens when those up to 8K are 1,852 long in the mean, which this body gives.
_GITHUB_ALPHA = float(np.log(0.085 / 0.006) / np.log(8))
_GITHUB = Mixture(
    weights=(0.915, 0.079, 0.006),
    parts=(
        Between(part=Lognormal(mean_tokens=2807, sigma=1.2), low=1, high=8 * K),
        Pareto(alpha=_GITHUB_ALPHA, low=8 * K, high=64 * K),
        Pareto(alpha=_GITHUB_ALPHA, low=64 * K + 1, high=512 * K),
    ),
)

_WIKIPEDIA = Quantiles(
    points=(
        (0.0, 16),
        (0.01, 39),
        (0.05, 67),
        (0.1, 87),
        (0.25, 145),
        (0.5, 345),
        (0.75, 860),
        (0.9, 2098),
        (0.95, 3716),
        (0.984, 8192),
        (0.99, 10801),
        (0.995, 15622),
        (0.999, 37189),
        (0.9999, 98680),
        (1.0, 269428),
    )
)

DISTRIBUTIONS = {
    each.name: each
    for each in (
        Distribution(
            name="lognormal",
            draw=Lognormal(mean_tokens=16 * K, sigma=0.7),
            shortest=K,
            longest=512 * K,
            source="FCP with blocks (Zhao et al.), appendix A.4, less long-tailed: s = 0.7, expected length 16K, "
            "between 1K and 512K",
        ),
        Distribution(
            name="bimodal",
            draw=Mixture(
                weights=(0.5, 0.5),
                parts=(Lognormal(mean_tokens=16 * K, sigma=0.5), Lognormal(mean_tokens=64 * K, sigma=0.5)),
            ),
            shortest=K,
            longest=512 * K,
            source="FCP with blocks (Zhao et al.), appendix A.4, bimodal: s = 0.5 with an average of 16K and s = 0.5 "
            "with an average of 64K, between 1K and 512K; equal parts, assumed",
        ),
        Distribution(
            name="long-tail",
            draw=Lognormal(mean_tokens=4 * K * float(np.exp(-(1.5**2) / 2)), sigma=1.5),
            shortest=16,
            longest=512 * K,
            source="FCP with blocks (Zhao et al.), sections 2.1 and 3.1: about lognormal, up to 512K, sequences below "
            "4K hold about half of the tokens (said of the volume of a ring over all ranks, which goes with tokens); "
            "s = 1.5, assumed, as source files have",
        ),
        Distribution(
            name="github",
            draw=_GITHUB,
            shortest=1,
            longest=512 * K,
            source="InfiniPipe, section 1: 91.5 % up to 8K, 0.6 % over 64K with 21.6 % of the tokens; lognormal below "
            "8K with s = 1.2, assumed; above, the power law that both shares lie on, to 512K",
        ),
        Distribution(
            name="commoncrawl",
            draw=Lognormal(mean_tokens=1700, sigma=1.45),
            shortest=16,
            longest=512 * K,
            source="Flexible Context Parallelism (Niu et al.), appendix A.1, in words only: longer than Wikipedia, "
            "shorter-tailed than GitHub; lognormal with a mean between theirs (1.0K and 4K) and s = 1.45, assumed",
        ),
        Distribution(
            name="wikipedia",
            draw=_WIKIPEDIA,
            shortest=16,
            longest=269428,
            source="quantiles from 1 to 99.99 % of the first 200,000 article lengths "
            "that were published with the code of FlexSP (Wang et al., ASPLOS 2025)",
        ),
    )
}


def distribution(name: str) -> Distribution:
    """The distribution of that name.

    Raises:
        ValueError: unknown; names the nearest known one.
    """
    return DISTRIBUTIONS[pick(name, DISTRIBUTIONS, what="distribution")]
