"""The order of samples: a bijection in every epoch, a function of seed and position alone."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.data.sampler import Sampler, permute
from rayfcp.values import Sample
from tests.data.makers import few_examples

sizes, seeds = st.integers(1, 400), st.integers(0, 2**70)


@dataclass
class Numbered:
    """An index of samples that are their own positions."""

    size: int
    max_seqlen: int = 8
    long_sequences: str = "cut"
    fingerprint: str = "f"
    tokenizer_fingerprint: str = "t"
    samples_per_draw: int = 1

    @property
    def num_draws(self) -> int:
        return self.size

    def __len__(self) -> int:
        return self.size

    def samples(self, positions: np.ndarray) -> tuple[Sample, ...]:
        return tuple(Sample(id=int(each), shard=0, row=int(each), start=0, stop=1, num_targets=0) for each in positions)


def taken(size: int, *, seed: int, global_batch: int, num_samples: int) -> list[int]:
    sampler = Sampler(Numbered(size), seed=seed, global_batch=global_batch)
    steps = range(1, -(-num_samples // global_batch) + 1)
    return [sample.id for step in steps for sample in sampler.batch(step).samples][:num_samples]


@few_examples
@given(size=sizes, seed=seeds, epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(size))


@few_examples
@given(size=st.integers(1, 2**62), seed=seeds, data=st.data())
def test_any_position_of_a_huge_data_set_is_found_alone(size: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=5, unique=True)), dtype=np.int64)
    together = permute(positions, size=size, seed=seed, epoch=3)
    alone = [int(permute(positions[i : i + 1], size=size, seed=seed, epoch=3)[0]) for i in range(positions.size)]
    assert together.tolist() == alone
    assert len(set(alone)) == positions.size
    assert all(0 <= position < size for position in alone)


def test_permutation_stays_what_it_was() -> None:
    """Golden values: runs of an older version must resume with the same samples."""
    assert permute(np.arange(8), size=1000, seed=7, epoch=2).tolist() == [554, 909, 49, 74, 359, 729, 465, 578]


def test_orders_are_spread_evenly() -> None:
    counts = np.zeros((5, 5))
    for seed in range(1000):
        counts[np.arange(5), permute(np.arange(5), size=5, seed=seed, epoch=0)] += 1
    # Standard deviation of each pair: sqrt(1000 * 0.2 * 0.8) = 12.6.
    assert np.abs(counts - 200).max() < 65


def test_position_outside_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 5\)"):
        permute(np.array([5]), size=5, seed=0, epoch=0)


@few_examples
@given(size=st.integers(1, 40), seed=seeds, first=st.integers(1, 50), second=st.integers(1, 50))
def test_order_does_not_depend_on_the_batch_size(size: int, seed: int, first: int, second: int) -> None:
    one = taken(size, seed=seed, global_batch=first, num_samples=100)
    assert one == taken(size, seed=seed, global_batch=second, num_samples=100)


@few_examples
@given(size=st.integers(1, 30), seed=seeds, global_batch=st.integers(1, 70))
def test_each_epoch_takes_each_sample_once(size: int, seed: int, global_batch: int) -> None:
    order = taken(size, seed=seed, global_batch=global_batch, num_samples=3 * size)
    epochs = [order[start : start + size] for start in range(0, 3 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permute(np.arange(50), size=50, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_batches_are_full_and_know_their_epoch() -> None:
    sampler = Sampler(Numbered(10), seed=0, global_batch=4)
    batches = [sampler.batch(step) for step in (1, 2, 3, 4)]
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1]
    assert [batch.step for batch in batches] == [1, 2, 3, 4]
    assert all(len(batch.samples) == 4 for batch in batches)
    with pytest.raises(ValueError, match="step is 0"):
        sampler.batch(0)


def test_state_fits_its_own_run_only() -> None:
    state = Sampler(Numbered(10), seed=3, global_batch=4).state(6)
    assert (state["step"], state["epoch"]) == (6, 2)
    Sampler(Numbered(10), seed=3, global_batch=4).check_state(state)
    others = {
        "run.seed is 4, must be 3": Sampler(Numbered(10), seed=4, global_batch=4),
        "data.global_batch_sequences is 5, must be 4": Sampler(Numbered(10), seed=3, global_batch=5),
        "data.max_seqlen is 9, must be 8": Sampler(Numbered(10, max_seqlen=9), seed=3, global_batch=4),
        "data.long_sequences is 'drop'": Sampler(Numbered(10, long_sequences="drop"), seed=3, global_batch=4),
        "data.paths": Sampler(Numbered(10, fingerprint="g"), seed=3, global_batch=4),
        "data.processor": Sampler(Numbered(10, fingerprint="g", tokenizer_fingerprint="u"), seed=3, global_batch=4),
    }
    for words, sampler in others.items():
        with pytest.raises(ValueError, match=words):
            sampler.check_state(state)
    # The same tokens by another tokenizer, e.g. one that also reads pictures, are the same data.
    Sampler(Numbered(10, tokenizer_fingerprint="u"), seed=3, global_batch=4).check_state(state)
