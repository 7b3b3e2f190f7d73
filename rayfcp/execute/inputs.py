"""What a stage loads of a microbatch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfcp.data import TokenReader
from rayfcp.execute.device import moved
from rayfcp.execute.interfaces import IGNORED, Tokens, TokenSource
from rayfcp.program import Load, Piece
from rayfcp.values import GlobalBatch

PADDING_TOKEN = 0


class BatchTokens:
    """Tokens of one global batch, read from the shards as they are asked for; see `TokenSource`."""

    def __init__(self, reader: TokenReader, batch: GlobalBatch) -> None:
        self._reader, self._batch = reader, batch

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        return self._reader.read(self._batch.samples[sequence], start=start, stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Each `[tokens]`, int64. The first stage has ids, the last one targets, every stage positions."""

    ids: Tensor | None
    positions: Tensor
    targets: Tensor | None


def load(item: Load, tokens: TokenSource, *, is_first: bool, is_last: bool, device: torch.device) -> Inputs:
    """Read the pieces of a load, in its order; stages between the ends read nothing."""

    def joined(rows: list[np.ndarray]) -> Tensor:
        return moved(np.concatenate(rows), dtype=torch.int64, device=device)

    positions = [np.arange(piece.start, piece.stop) for piece in item.pieces] or [np.array([0])]
    if not is_first and not is_last:
        return Inputs(ids=None, positions=joined(positions), targets=None)
    read = [_read(piece, tokens) for piece in item.pieces] or [(np.array([PADDING_TOKEN]), np.array([IGNORED]))]
    ids, targets = (list(column) for column in zip(*read, strict=True))
    return Inputs(
        ids=joined(ids) if is_first else None,
        positions=joined(positions),
        targets=joined(targets) if is_last else None,
    )


def _read(piece: Piece, tokens: TokenSource) -> tuple[np.ndarray, np.ndarray]:
    return tokens.read(piece.sequence, start=piece.start, stop=piece.stop)
