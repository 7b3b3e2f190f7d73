"""Evaluation sets as numbered batches: which samples are in a batch depends on nothing but the set and the number."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rayfcp.config import Config, ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.config.evaluation import EvalSetConfig
from rayfcp.data.index import LengthIndex
from rayfcp.data.sampler import permute, with_reference
from rayfcp.values import GlobalBatch

_SEED = 0
"""Of the order of samples: the first batches of a set are the same in every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """A set `name` in a prepared `folder`, of which the `draws` of the index are evaluated, in this order. `reference`:
    as of `Sampler`. `max_bad_fraction`: tolerated fraction of evaluated rows with broken images."""

    name: str
    folder: str
    index: LengthIndex
    draws: npt.NDArray[np.int64]
    reference: npt.NDArray[np.float64] | None = None
    max_bad_fraction: float = 1.0

    @property
    def num_samples(self) -> int:
        """Samples that are evaluated."""
        return self.draws.size * self.index.samples_per_draw


class EvalBatches:
    """The batches of all sets, one set after the other, numbered from 1. Each has `batch_sequences` samples, the last
    one of a set what is left."""

    def __init__(self, sets: Sequence[EvalSet], *, batch_sequences: int) -> None:
        self.sets, self._batch_sequences = tuple(sets), batch_sequences
        self._ends = np.cumsum([0, *(-(-len(each.draws) // self._draws_per_batch(each)) for each in sets)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def set_of(self, number: int) -> EvalSet:
        """The set of batch `number`."""
        return self.sets[self._place(number)]

    def batch(self, number: int) -> GlobalBatch:
        """Batch `number`, which is its `step`.

        Raises:
            ValueError: there is no such batch.
        """
        if not 1 <= number <= len(self):
            raise ValueError(f"evaluation batch is {number}, must be in [1, {len(self)}]; count over all sets")
        place = self._place(number)
        own, size = self.sets[place], self._draws_per_batch(self.sets[place])
        first = (number - 1 - int(self._ends[place])) * size
        samples = own.index.samples(own.draws[first : first + size])
        return with_reference(GlobalBatch(step=number, epoch=0, samples=samples), own.reference)

    def only(self, draws: Mapping[str, npt.NDArray[np.int64]]) -> "EvalBatches":
        """Batches of these draws of the sets that are named."""
        own = [replace(each, draws=draws[each.name]) for each in self.sets if each.name in draws]
        return EvalBatches(own, batch_sequences=self._batch_sequences)

    def with_references(self, references: Mapping[str, npt.NDArray[np.float64]]) -> "EvalBatches":
        """The same batches with the reference model's sums, by the name of the set."""
        own = [replace(each, reference=references[each.name]) for each in self.sets]
        return EvalBatches(own, batch_sequences=self._batch_sequences)

    def _place(self, number: int) -> int:
        return int(np.searchsorted(self._ends, number)) - 1

    def _draws_per_batch(self, own: EvalSet) -> int:
        return self._batch_sequences // own.index.samples_per_draw


def open_sets(
    config: Config,
    folders: Mapping[str, str],
    *,
    vocab_size: int,
    sources: Mapping[str, DataConfig] | None = None,
) -> EvalBatches:
    """Return the batches of `sources`, those of `eval.sets` if it is None, prepared in `folders`; both by name. The
    model has a vocabulary of `vocab_size`.

    Raises:
        ConfigError: not a complete prepared folder, too many bad rows, or no sample or target in a set.
    """
    if sources is None:
        sources = {name: each.source(config.data) for name, each in config.eval.sets.items()}
    size, most = config.data.global_batch_sequences, config.eval.batches
    found = []
    for name, data in sources.items():
        try:
            index = LengthIndex.open(
                folders[name],
                max_seqlen=data.max_seqlen,
                long_sequences=data.long_sequences,
                vocab_size=vocab_size,
                max_bad_fraction=data.max_bad_fraction,
            )
            index.check_targets("paths")
        except ConfigError as error:
            raise ConfigError(f"eval.sets.{name}: {named_keys(str(error), name)}") from error
        count = min((most or len(index)) * (size // index.samples_per_draw), index.num_draws)
        draws = permute(np.arange(count, dtype=np.int64), size=index.num_draws, seed=_SEED, epoch=0)
        if not int(index.num_targets.reshape(index.num_draws, -1)[draws].sum()):
            raise ConfigError(f"eval.batches is {most}, must give eval.sets.{name} a sequence with targets; raise it")
        bound = data.max_bad_fraction
        found.append(EvalSet(name=name, folder=folders[name], index=index, draws=draws, max_bad_fraction=bound))
    return EvalBatches(found, batch_sequences=size)


def named_keys(text: str, name: str) -> str:
    """Return `text` with the keys of evaluation set `name` in place of those of `data`.

    >>> named_keys("raise data.max_seqlen", "val")
    'raise eval.sets.val.max_seqlen'
    """
    return re.sub(rf"\bdata\.(?=({'|'.join(EvalSetConfig.model_fields)})\b)", f"eval.sets.{name}.", text)
