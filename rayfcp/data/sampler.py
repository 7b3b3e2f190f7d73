"""Which samples a step trains on: a function of seed and step, whatever the ranks, the plan or what ran before."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.data.permutation import permute
from rayfcp.values import GlobalBatch, Sample

# What a checkpoint's state calls it, and what the user can set to get it back.
_REMEDIES = {
    "seed": "run.seed",
    "global_batch_sequences": "data.global_batch_sequences",
    "max_seqlen": "data.max_seqlen",
    "long_sequences": "data.long_sequences",
    "data": "data.paths (their content)",
}


class SampleIndex(Protocol):
    """What the sampler needs of a `LengthIndex`."""

    max_seqlen: int
    long_sequences: Any

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def samples(self, positions: npt.NDArray[np.int64]) -> tuple[Sample, ...]: ...


class Sampler:
    """Global batches of `global_batch` samples. Every epoch takes each sample once, in an order of its own; batches run
    on across epochs, so that all are full."""

    def __init__(self, index: SampleIndex, *, seed: int, global_batch: int) -> None:
        if global_batch < 1 or not len(index):
            raise ValueError(
                f"global batch is {global_batch} of {len(index)} samples, both must be at least 1; add data"
            )
        self._index, self._seed, self._global_batch = index, seed, global_batch

    def batch(self, step: int) -> GlobalBatch:
        """The batch of `step`, counted from 1; its epoch, from 0, is that of its first sample.

        Raises:
            ValueError: `step` is less than 1.
        """
        if step < 1:
            raise ValueError(f"step is {step}, must be at least 1; steps count from 1")
        size = len(self._index)
        taken = np.arange((step - 1) * self._global_batch, step * self._global_batch, dtype=np.int64)
        epochs, positions = np.divmod(taken, size)
        chosen = [
            permute(positions[epochs == epoch], size=size, seed=self._seed, epoch=int(epoch))
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ]
        return GlobalBatch(step=step, epoch=int(epochs[0]), samples=self._index.samples(np.concatenate(chosen)))

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` keeps: all that the order depends on, and how far it went."""
        return {
            "step": step,
            "epoch": step * self._global_batch // len(self._index),
            "seed": self._seed,
            "global_batch_sequences": self._global_batch,
            "max_seqlen": self._index.max_seqlen,
            "long_sequences": self._index.long_sequences,
            "data": self._index.fingerprint,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Whether a run that left `state` goes on with the same samples here.

        Raises:
            ConfigError: What is not the same, with both values and the key to set.
        """
        now = self.state(0)
        for name, remedy in _REMEDIES.items():
            if state.get(name) != now[name]:
                raise ConfigError(
                    f"{remedy} is {now[name]!r}, must be {state.get(name)!r} as in the checkpoint; "
                    "set it back, or start a new run"
                )
