"""What a stage loads of a microbatch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfcp.data import TokenReader
from rayfcp.execute.device import moved
from rayfcp.execute.interfaces import IGNORED, PictureSource, Pixels, Tokens, TokenSource
from rayfcp.program import Encode, Load, Piece
from rayfcp.values import GlobalBatch

PADDING_TOKEN = 0


class BatchTokens:
    """Tokens of one global batch, read from the shards as they are asked for; see `TokenSource`. A sample of which no
    target counts has none."""

    def __init__(self, reader: TokenReader, batch: GlobalBatch) -> None:
        self._reader, self._batch = reader, batch

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        sample = self._batch.samples[sequence]
        tokens, targets = self._reader.read(sample, start=start, stop=stop)
        return tokens, targets if sample.num_targets else np.full_like(targets, IGNORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Each `[tokens]`, int64; positions `[3, tokens]` where they have so many axes. The first stage has ids, the last
    one targets, every stage positions."""

    ids: Tensor | None
    positions: Tensor
    targets: Tensor | None


def load(
    item: Load,
    tokens: TokenSource,
    *,
    pictures: PictureSource | None = None,
    is_first: bool,
    is_last: bool,
    device: torch.device,
) -> Inputs:
    """Read the pieces of a load, in its order; stages between the ends read nothing. Without `pictures` tokens stand at
    their places in their sequences."""

    def joined(rows: list[np.ndarray]) -> Tensor:
        return moved(np.concatenate(rows, axis=-1), dtype=torch.int64, device=device)

    positions = [_positions(piece, pictures) for piece in item.pieces] or [np.array([0])]
    if not is_first and not is_last:
        return Inputs(ids=None, positions=joined(positions), targets=None)
    read = [_read(piece, tokens) for piece in item.pieces] or [(np.array([PADDING_TOKEN]), np.array([IGNORED]))]
    ids, targets = (list(column) for column in zip(*read, strict=True))
    return Inputs(
        ids=joined(ids) if is_first else None,
        positions=joined(positions),
        targets=joined(targets) if is_last else None,
    )


def pixels_of(item: Encode, pictures: PictureSource | None) -> Pixels | None:
    """Of the pictures that a rank encodes, in order; None if it encodes none.

    Raises:
        ValueError: nobody gives pictures.
    """
    if pictures is None:
        raise ValueError("encode: the program encodes pictures, but there is no source of them; give pictures=")
    read = [pictures.pixels(each.sequence, first=each.first, last=each.last) for each in item.pictures]
    if not read:
        return None
    return Pixels(
        values=np.concatenate([each.values for each in read]), grids=np.concatenate([each.grids for each in read])
    )


def _positions(piece: Piece, pictures: PictureSource | None) -> Tokens:
    if pictures is None:
        return np.arange(piece.start, piece.stop)
    return pictures.positions(piece.sequence, start=piece.start, stop=piece.stop)


def _read(piece: Piece, tokens: TokenSource) -> tuple[np.ndarray, np.ndarray]:
    return tokens.read(piece.sequence, start=piece.start, stop=piece.stop)
