"""Samples of the data set and the global batches that the sampler makes of them."""

import hashlib
from dataclasses import dataclass

from rayfcp.values.sequence import Images


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Tokens `[start, stop)` of one row of one shard. `id` is the position in the length index. `images` count from
    `start`."""

    id: int
    shard: int
    row: int
    start: int
    stop: int
    num_targets: int
    images: tuple[Images, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Samples of one step in sampler order. Sequence id in a plan = position in `samples`. `sources`: names of the
    sources of a mixture; `source_of`: number of each sample's source in it. `reference`: sums of the loss's terms of
    each sample by the reference model, if the loss has one."""

    step: int
    epoch: int
    samples: tuple[Sample, ...]
    sources: tuple[str, ...] = ()
    source_of: tuple[int, ...] = ()
    reference: tuple[float, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_targets(self) -> int:
        return sum(sample.num_targets for sample in self.samples)

    @property
    def by_source(self) -> dict[str, tuple[int, int, int]]:
        """Sequences, tokens and targets of each source of a mixture, by name."""
        found = {name: (0, 0, 0) for name in self.sources}
        for number, sample in zip(self.source_of, self.samples, strict=False):
            count, tokens, targets = found[self.sources[number]]
            found[self.sources[number]] = (count + 1, tokens + sample.num_tokens, targets + sample.num_targets)
        return found

    @property
    def samples_hash(self) -> str:
        """16 hex digits over the sample ids in sampler order, whatever the number of ranks."""
        text = ",".join(str(sample.id) for sample in self.samples)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
