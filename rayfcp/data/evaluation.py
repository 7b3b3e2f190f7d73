"""Evaluation sets as numbered batches: which samples are in a batch depends on nothing but the set and the number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.config import Config, ConfigError
from rayfcp.data.index import LengthIndex
from rayfcp.data.sampler import permute
from rayfcp.values import GlobalBatch

_SEED = 0
"""Of the order of samples: the first batches of a set are the same in every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """A set `name` in a prepared `folder`; `num_batches` of it are evaluated. `reference`: as of `Sampler`."""

    name: str
    folder: str
    index: LengthIndex
    num_batches: int
    reference: npt.NDArray[np.float64] | None = None


class EvalBatches:
    """The batches of all sets, one set after the other, numbered from 1. Each has `batch_sequences` samples, the last
    one of a set what is left."""

    def __init__(self, sets: Sequence[EvalSet], *, batch_sequences: int) -> None:
        self.sets, self._batch_sequences = tuple(sets), batch_sequences
        self._ends = np.cumsum([each.num_batches for each in sets])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.sets else 0

    def set_of(self, number: int) -> EvalSet:
        """The set of batch `number`."""
        return self.sets[int(np.searchsorted(self._ends, number))]

    def batch(self, number: int) -> GlobalBatch:
        """Batch `number`, which is its `step`.

        Raises:
            ValueError: there is no such batch.
        """
        if not 1 <= number <= len(self):
            raise ValueError(f"evaluation batch is {number}, must be in [1, {len(self)}]; count over all sets")
        own = self.set_of(number)
        first = (number - 1 - int(self._ends[self.sets.index(own)]) + own.num_batches) * self._batch_draws(own)
        size = own.index.num_draws
        taken = np.arange(first, min(first + self._batch_draws(own), size), dtype=np.int64)
        samples = own.index.samples(permute(taken, size=size, seed=_SEED, epoch=0))
        known = () if own.reference is None else tuple(own.reference[[each.id for each in samples]].tolist())
        return GlobalBatch(step=number, epoch=0, samples=samples, reference=known)

    def _batch_draws(self, own: EvalSet) -> int:
        return self._batch_sequences // own.index.samples_per_draw


def open_sets(config: Config, folders: Mapping[str, str], *, vocab_size: int) -> EvalBatches:
    """The batches of `eval.sets`, prepared in `folders` by name, for a model of that vocabulary.

    Raises:
        ConfigError: not a complete prepared folder, too many bad rows, or no sample or target in a set.
    """
    size, found = config.data.global_batch_sequences, []
    for name, each in config.eval.sets.items():
        data = each.source(config.data)
        try:
            index = LengthIndex.open(
                folders[name],
                max_seqlen=data.max_seqlen,
                long_sequences=data.long_sequences,
                vocab_size=vocab_size,
                max_bad_fraction=data.max_bad_fraction,
            )
        except ConfigError as error:
            raise ConfigError(f"eval.sets.{name}: {error}") from error
        if not int(index.num_targets.sum()):
            raise ConfigError(
                f"eval.sets.{name} has no target in {len(index)} sequences, must have one; give sequences of at least "
                "2 tokens"
            )
        num_batches = min(-(-len(index) // size), config.eval.batches or len(index))
        found.append(EvalSet(name=name, folder=folders[name], index=index, num_batches=num_batches))
    return EvalBatches(found, batch_sequences=size)
