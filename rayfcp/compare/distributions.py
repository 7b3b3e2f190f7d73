"""Synthetic length distributions, each from what a paper states of its data set. Seeded; integers of tokens.

A paper states a few quantiles, never the whole distribution: a comment at each one says how the rest was filled in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.cost.profiles import pick

Lengths = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
"""Returns as many independent values as requested, before rounding."""

K = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Lengths from `draw`, rounded and clipped to `[shortest, longest]`."""

    draw: Draw
    shortest: int
    longest: int

    def sample(self, count: int, *, seed: int) -> Lengths:
        """Return `count` independent lengths; the same arguments give the same lengths."""
        lengths = self.draw(np.random.default_rng(seed), count)
        return np.clip(np.rint(lengths), self.shortest, self.longest).astype(np.int64)


def lognormal(mean: float, *, sigma: float) -> Draw:
    """Lognormal with standard deviation `sigma` of its logarithm and the given mean."""
    return lambda rng, count: rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


def mixture(*parts: tuple[float, Draw]) -> Draw:
    """Each value from one of the parts `(weight, draw)`."""
    weights, draws = zip(*parts, strict=True)

    def draw(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        which = rng.choice(len(draws), size=count, p=weights)
        drawn = np.stack([part(rng, count) for part in draws])
        return np.asarray(drawn[which, np.arange(count)], np.float64)

    return draw


def between(low: float, high: float, *, part: Draw) -> Draw:
    """`part` restricted to `[low, high)` by drawing again what falls outside."""

    def draw(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        values = part(rng, count)
        while (outside := (values < low) | (values >= high)).any():
            values[outside] = part(rng, int(outside.sum()))
        return values

    return draw


def pareto(low: float, high: float, *, alpha: float) -> Draw:
    """P(value > x) falls as x^-alpha from `low`, truncated at `high`."""
    kept = 1 - (high / low) ** -alpha
    return lambda rng, count: np.asarray(low * (1 - kept * rng.random(count)) ** (-1 / alpha), np.float64)


def quantiles(values: Sequence[float], *, shares: Sequence[float]) -> Draw:
    """Logarithms of values interpolated linearly between quantiles."""
    logarithms = np.log(values)
    return lambda rng, count: np.asarray(np.exp(np.interp(rng.random(count), shares, logarithms)), np.float64)


# P(> 8K) = 8.5 % and P(> 64K) = 0.6 % fix alpha = ln(8.5 / 0.6) / ln 8. With it the tail to 512K holds 21.6 % of all
# tokens when those up to 8K are 1,852 long in the mean, which this body gives.
_GITHUB_ALPHA = float(np.log(0.085 / 0.006) / np.log(8))
_SHARES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.984, 0.99, 0.995, 0.999, 0.9999, 1)
_WIKIPEDIA = (16, 39, 67, 87, 145, 345, 860, 2098, 3716, 8192, 10801, 15622, 37189, 98680, 269428)

DISTRIBUTIONS = {
    # FCP with blocks (Zhao et al.), appendix A.4, less long-tailed: s = 0.7, expected length 16K, between 1K and 512K.
    "lognormal": Distribution(draw=lognormal(16 * K, sigma=0.7), shortest=K, longest=512 * K),
    # FCP with blocks, appendix A.4, bimodal: s = 0.5 with an average of 16K and s = 0.5 with an average of 64K, between
    # 1K and 512K; equal parts, assumed.
    "bimodal": Distribution(
        draw=mixture((0.5, lognormal(16 * K, sigma=0.5)), (0.5, lognormal(64 * K, sigma=0.5))),
        shortest=K,
        longest=512 * K,
    ),
    # FCP with blocks, sections 2.1 and 3.1: about lognormal, up to 512K, sequences below 4K hold about half of the
    # tokens (stated of the volume of a ring over all ranks, which is proportional to tokens); s = 1.5, assumed, as
    # source files have.
    "long-tail": Distribution(
        draw=lognormal(4 * K * float(np.exp(-(1.5**2) / 2)), sigma=1.5), shortest=16, longest=512 * K
    ),
    # InfiniPipe, section 1: 91.5 % up to 8K, 0.6 % over 64K with 21.6 % of the tokens; lognormal below 8K with s = 1.2,
    # assumed; above, the power law that both shares lie on, to 512K.
    "github": Distribution(
        draw=mixture(
            (0.915, between(1, 8 * K, part=lognormal(2807, sigma=1.2))),
            (0.079, pareto(8 * K, 64 * K, alpha=_GITHUB_ALPHA)),
            (0.006, pareto(64 * K + 1, 512 * K, alpha=_GITHUB_ALPHA)),
        ),
        shortest=1,
        longest=512 * K,
    ),
    # Flexible Context Parallelism (Niu et al.), appendix A.1, in words only: longer than Wikipedia, shorter-tailed than
    # GitHub; lognormal with a mean between theirs (1.0K and 4K) and s = 1.45, assumed.
    "commoncrawl": Distribution(draw=lognormal(1700, sigma=1.45), shortest=16, longest=512 * K),
    # Quantiles from 1 to 99.99 % of the first 200,000 article lengths that were published with the code of FlexSP
    # (Wang et al., ASPLOS 2025).
    "wikipedia": Distribution(draw=quantiles(_WIKIPEDIA, shares=_SHARES), shortest=16, longest=269428),
}


def distribution(name: str) -> Distribution:
    """Return the distribution of that name.

    Raises:
        ValueError: An unknown name; the message has the nearest known one.
    """
    return DISTRIBUTIONS[pick(name, DISTRIBUTIONS, what="distribution")]
