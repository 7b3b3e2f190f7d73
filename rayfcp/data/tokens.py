"""From the place of a token to the token: what a rank reads of the shards."""

import threading
from collections import OrderedDict
from typing import Self

import numpy as np
import numpy.typing as npt

from rayfcp.data.manifest import PreparedManifest, read_manifest
from rayfcp.data.rows import IGNORED
from rayfcp.data.shard_reader import ShardReader
from rayfcp.data.vision.layout import Item
from rayfcp.values import Sample

_OPEN_SHARDS = 64


class TokenReader:
    """Tokens and targets of samples, from the shards of a prepared folder. Thread-safe."""

    def __init__(self, manifest: PreparedManifest) -> None:
        self._manifest = manifest
        self._shards: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: str) -> Self:
        """The reader of a prepared folder or URL.

        Raises:
            ConfigError: Not a whole prepared folder.
        """
        return cls(read_manifest(folder))

    def read(self, sample: Sample, *, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and targets `[stop - start]` of positions `[start, stop)`, counted from the sample's first token.

        The target of a position is the label of the next one (its token where the data has no labels); the last
        position of a sample has none (-100). So any cut of a sample gives the targets of the whole.

        Raises:
            ValueError: Positions outside of the sample.
        """
        if not 0 <= start <= stop <= sample.num_tokens:
            raise ValueError(
                f"positions are [{start}, {stop}), must lie in [0, {sample.num_tokens}) of sample {sample.id}"
            )
        shard = self._shard(sample.shard)
        tokens = shard.tokens(sample.row)[sample.start + start : sample.start + stop].astype(np.int64)
        targets = np.full(stop - start, IGNORED, dtype=np.int64)
        following = shard.labels(sample.row)[sample.start + start + 1 : min(sample.start + stop + 1, sample.stop)]
        targets[: following.size] = following
        return tokens, targets

    def items(self, sample: Sample) -> list[tuple[Item, npt.NDArray[np.int64]]]:
        """The images and videos of a sample, their tokens counted from its first one, each with the places `[parts, 2]`
        of its files; see `ShardReader.part`."""
        shard = self._shard(sample.shard)
        found, taken = [], 0
        for item in shard.items(sample.row):
            if sample.start <= item.start < sample.stop:
                own = item._replace(start=item.start - sample.start, stop=item.stop - sample.start)
                found.append((own, shard.parts(sample.row)[taken : taken + item.parts]))
            taken += item.parts
        return found

    def part(self, sample: Sample, *, first: int, num_bytes: int) -> bytes:
        """Bytes of a picture of the sample."""
        return self._shard(sample.shard).part(first, num_bytes)

    def name_of(self, sample: Sample) -> str:
        """Where its row is, for people."""
        return f"{self._manifest.shards[sample.shard].name} row {sample.row}"

    def _shard(self, shard: int) -> ShardReader:
        with self._lock:
            if shard not in self._shards:
                self._shards[shard] = ShardReader(self._manifest, shard)
                if len(self._shards) > _OPEN_SHARDS:
                    self._shards.popitem(last=False)
            self._shards.move_to_end(shard)
            return self._shards[shard]
