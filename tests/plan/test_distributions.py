"""Distributions against what their papers state of them."""

import numpy as np
import pytest

from rayfcp.compare.distributions import DISTRIBUTIONS, K, distribution

COUNT = 400_000


def sample(name: str, *, seed: int = 0) -> np.ndarray:
    return distribution(name).sample(COUNT, seed=seed)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_samples_are_seeded_and_within_bounds(name: str) -> None:
    given = distribution(name)
    first, again, other = given.sample(2_000, seed=3), given.sample(2_000, seed=3), given.sample(2_000, seed=4)
    assert first.dtype == np.int64 and np.array_equal(first, again) and not np.array_equal(first, other)
    lengths = sample(name)
    assert given.shortest <= lengths.min() and lengths.max() <= given.longest


def test_github_has_the_stated_quantiles() -> None:
    lengths = sample("github")
    assert (lengths <= 8 * K).mean() == pytest.approx(0.915, abs=0.002)
    assert (lengths > 64 * K).mean() == pytest.approx(0.006, abs=0.0005)
    assert lengths[lengths > 64 * K].sum() / lengths.sum() == pytest.approx(0.216, abs=0.012)


def test_lognormal_and_bimodal_have_the_stated_moments() -> None:
    lengths = sample("lognormal")
    assert lengths.mean() == pytest.approx(16 * K, rel=0.01)
    assert np.log(lengths).std() == pytest.approx(0.7, abs=0.01)
    both = sample("bimodal")
    assert both.mean() == pytest.approx(40 * K, rel=0.01)
    middle = 28 * K
    assert np.median(both[both < middle]) == pytest.approx(14 * K, rel=0.1)
    assert np.median(both[both > middle]) == pytest.approx(60 * K, rel=0.1)


def test_long_tail_has_half_of_its_tokens_below_4k() -> None:
    lengths = sample("long-tail")
    assert lengths[lengths < 4 * K].sum() / lengths.sum() == pytest.approx(0.5, abs=0.02)
    assert lengths.max() > 128 * K


def test_wikipedia_has_the_published_lengths_quantiles() -> None:
    lengths = sample("wikipedia")
    for share, tokens in ((5, 67), (25, 145), (50, 345), (75, 860), (95, 3716), (99, 10801)):
        assert np.percentile(lengths, share) == pytest.approx(tokens, rel=0.03)
    assert (lengths <= 8 * K).mean() == pytest.approx(0.984, abs=0.002)


def test_text_corpora_are_ordered_as_the_papers_say() -> None:
    tails = [(sample(name) > 32 * K).mean() for name in ("wikipedia", "commoncrawl", "github")]
    assert tails == sorted(tails) and tails[0] < tails[2] / 5


def test_unknown_distributions_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"distribution is 'bimodel', must be one of .*did you mean 'bimodal'"):
        distribution("bimodel")
