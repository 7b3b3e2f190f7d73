"""Pictures of a global batch on one device: their pixels, made ready ahead or here, and which rows fall out."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfcp.data import TokenReader
from rayfcp.data.vision.decoding import Decoded, PictureDecoder, Positions, Wanted
from rayfcp.data.vision.loading import load_processor
from rayfcp.execute.inputs import BatchTokens
from rayfcp.execute.interfaces import Pixels, Tokens
from rayfcp.program import RankProgram
from rayfcp.program.encode import wanted_pictures
from rayfcp.values import GlobalBatch

Ready = Mapping[Wanted, Decoded]
"""Pictures that a program encodes."""


class BatchPictures:
    """See `PictureSource`."""

    def __init__(self, batch: GlobalBatch, *, decoded: Ready, positions: Positions) -> None:
        self._batch, self._decoded, self._positions = batch, decoded, positions

    def pixels(self, sequence: int, *, first: int, last: int) -> Pixels:
        found = self._decoded[sequence, first, last]
        return Pixels(values=found.values, grids=found.grids)

    def positions(self, sequence: int, *, start: int, stop: int) -> Tokens:
        return self._positions.of(self._batch.samples[sequence], start=start, stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A batch without targets of broken rows, its tokens, its pictures (None: the run has none), and what is broken
    among this device's own. Losses are multiplied by `loss_scale`."""

    batch: GlobalBatch
    tokens: BatchTokens
    pictures: BatchPictures | None = None
    broken: tuple[str, ...] = ()

    @property
    def loss_scale(self) -> float:
        return 1.0 / max(self.batch.num_targets, 1)


class Sight:
    """Makes what the interpreter asks of pictures from a batch; nothing without a `processor`.

    A picture that cannot be decoded is grey, and no target of its row counts: all devices agree on these rows, whoever
    found them.
    """

    def __init__(self, reader: TokenReader, processor: str | None, *, device: torch.device) -> None:
        self._reader, self._device, self._decoder = reader, device, None
        if processor is not None:
            loaded = load_processor(processor)
            self._decoder, self._positions = PictureDecoder(reader, loaded), Positions(reader, loaded)

    def look(
        self,
        program: RankProgram,
        batch: GlobalBatch,
        *,
        decoded: Ready | None,
        sum_over: Callable[[Tensor], Tensor],
    ) -> Seen:
        """Every device must call it for a batch. `decoded`: what the program encodes, made ready elsewhere; None: it is
        decoded here. `sum_over` sums a tensor of this device over all."""
        if self._decoder is None:
            return Seen(batch=batch, tokens=BatchTokens(self._reader, batch))
        if decoded is None:
            decoded = self._decoder.decode(batch, wanted_pictures(program.instructions))
        pictures = BatchPictures(batch, decoded=decoded, positions=self._positions)
        if not any(sample.pictures for sample in batch.samples):
            return Seen(batch=batch, tokens=BatchTokens(self._reader, batch), pictures=pictures)
        flags = torch.zeros(len(batch.samples))
        flags[[sequence for (sequence, *_), found in decoded.items() if found.broken]] = 1.0
        broken = frozenset(sum_over(flags.to(self._device)).nonzero().flatten().tolist())
        names = dict.fromkeys(name for found in decoded.values() for name in found.broken)
        batch = _without_targets(batch, broken)
        return Seen(batch=batch, tokens=BatchTokens(self._reader, batch), pictures=pictures, broken=tuple(names))


def _without_targets(batch: GlobalBatch, sequences: frozenset[int]) -> GlobalBatch:
    if not sequences:
        return batch
    samples = (
        dataclasses.replace(sample, num_targets=0) if number in sequences else sample
        for number, sample in enumerate(batch.samples)
    )
    return dataclasses.replace(batch, samples=tuple(samples))
