"""The samples of each step: a function of seed and step alone, whatever the ranks, the plan or what ran before.

The shuffled order needs no table: position in, sample out, for data of any size.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.data.index import LengthIndex
from rayfcp.values import GlobalBatch

_NUM_ROUNDS = 8


def permute(positions: npt.NDArray[np.int64], *, size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Images of positions under the permutation of `[0, size)` given by (seed, epoch).

    A balanced Feistel network of 8 rounds permutes `[0, 4^k)`, the least such range that holds `size`; a result
    beyond `size` is sent through again until it falls inside ("cycle walking", Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, method 2). The round function is the 64-bit finaliser of SplitMix64 (Steele, Lea
    and Flood 2014) over half + key, its keys are BLAKE2b of (seed, epoch). All of it is integer arithmetic modulo
    2^64: the same on every platform and in every version of numpy.

    Raises:
        ValueError: A position outside of `[0, size)`.

    >>> permute(np.arange(6), size=6, seed=0, epoch=0).tolist()
    [2, 1, 3, 5, 0, 4]
    """
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < size:
        raise ValueError(f"positions reach from {positions.min()} to {positions.max()}, must lie in [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    values = positions.astype(np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _feistel(values[outside], keys=keys, half_bits=half_bits)
        outside = outside[values[outside] >= np.uint64(size)]
    return values.astype(np.int64)


def shuffled(numbers: npt.NDArray[np.int64], *, size: int, seed: int) -> npt.NDArray[np.int64]:
    """Positions in `[0, size)` of the samples that are drawn at `numbers`, ascending from 0 on: epoch after epoch, each
    in an order of its own."""
    epochs, positions = np.divmod(numbers, size)
    chosen = [
        permute(positions[epochs == epoch], size=size, seed=seed, epoch=int(epoch)) for epoch in np.unique(epochs)
    ]
    return np.concatenate([np.empty(0, dtype=np.int64), *chosen])


def with_reference(batch: GlobalBatch, sums: npt.NDArray[np.float64] | None) -> GlobalBatch:
    """The batch with the sums of its samples by the reference model, of those by sample; as it is if there are none.

    Raises:
        RuntimeError: the sum of a sample is not known.
    """
    if sums is None:
        return batch
    own = sums[[each.id for each in batch.samples]]
    if np.isnan(own).any():
        sample = batch.samples[int(np.flatnonzero(np.isnan(own))[0])].id
        raise RuntimeError(
            f"batch {batch.step}: sample {sample} has no sum by the reference model; start the run again"
        )
    return replace(batch, reference=tuple(own.tolist()))


def _keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"rayfcp order {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: npt.NDArray[np.uint64], *, keys: npt.NDArray[np.uint64], half_bits: int) -> npt.NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for round_number in range(_NUM_ROUNDS):
        left, right = right, left ^ (_mix(right + keys[round_number : round_number + 1]) & mask)
    return (left << bits) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Keys of a checkpoint's state, and the configuration that sets them.
_REMEDIES = {
    "seed": "run.seed",
    "global_batch_sequences": "data.global_batch_sequences",
    "max_seqlen": "data.max_seqlen",
    "long_sequences": "data.long_sequences",
    "mixture": "the mixture of data.sources, data.temperature and data.schedule",
    "data": "data.paths (their content)",
}
_OTHER_TOKENS = {"data": "data.tokenizer or data.processor (its content, which makes other tokens of the rows)"}


class Sampler:
    """Global batches of `global_batch` samples, drawn one by one or in pairs. Every epoch takes each sample once, in an
    order of its own; batches continue across epochs, so that all are full. `reference`: sums of the loss's terms by the
    reference model, by sample, for losses that have one."""

    def __init__(self, index: LengthIndex, *, seed: int, global_batch: int) -> None:
        if global_batch < 1 or not len(index):
            raise ValueError(
                f"global batch is {global_batch} of {len(index)} samples, both must be at least 1; add data"
            )
        self._index, self._seed = index, seed
        self._global_batch = global_batch // index.samples_per_draw
        self.reference: npt.NDArray[np.float64] | None = None

    def batch(self, step: int) -> GlobalBatch:
        """The batch of `step`, counted from 1. Its epoch, from 0, is that of its first sample.

        Raises:
            ValueError: `step` is less than 1.
        """
        if step < 1:
            raise ValueError(f"step is {step}, must be at least 1; steps count from 1")
        return with_reference(self._batch(step, first=(step - 1) * self._global_batch), self.reference)

    def _batch(self, step: int, *, first: int) -> GlobalBatch:
        """The batch of the run's draws from `first` on."""
        numbers = np.arange(first, first + self._global_batch, dtype=np.int64)
        size = self._index.num_draws
        positions = shuffled(numbers, size=size, seed=self._seed)
        return GlobalBatch(step=step, epoch=first // size, samples=self._index.samples(positions))

    def state(self, step: int) -> dict[str, Any]:
        """State for a checkpoint after `step`: everything that the order depends on, and the progress in it."""
        return {
            "step": step,
            "epoch": step * self._global_batch // self._index.num_draws,
            "seed": self._seed,
            "global_batch_sequences": self._global_batch * self._index.samples_per_draw,
            "max_seqlen": self._index.max_seqlen,
            "long_sequences": self._index.long_sequences,
            "data": self._index.fingerprint,
            "tokenizer": self._index.tokenizer_fingerprint,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: A run that saved `state` would not continue with the same samples here.
        """
        now = self.state(0)
        is_other = state.get("tokenizer") not in (None, now["tokenizer"])
        for name, remedy in (_REMEDIES | (_OTHER_TOKENS if is_other else {})).items():
            if state.get(name) != now.get(name):
                raise ConfigError(
                    f"{remedy} is {now.get(name)!r}, must be {state.get(name)!r} as in the checkpoint; "
                    "set it back, or start a new run"
                )
