"""Tensors of a run's checkpoint, read one by one in one process, without process groups."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rayfcp.models.lazy import LazyTensor, read
from rayfcp.values.state import Box

_PREFIX = "model.model."
"""Of the library's names: the part of the state, and where a `CausalLM` holds the library's model."""


class StoredTensors:
    """The model's tensors in the checkpoint `folder`, written by any number of ranks and stages. Of what was read last
    one whole tensor stays in memory, since parts of it are often read one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        self._held: tuple[str, Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return _PREFIX + name in self._known

    def tensor(self, name: str) -> LazyTensor:
        """By the library's name.

        Raises:
            KeyError: the checkpoint lacks it.
        """
        return _Stored(self, name, known=self._known[_PREFIX + name])

    def whole(self, name: str) -> Tensor:
        """All elements, read if they are not at hand."""
        if self._held is None or self._held[0] != name:
            self._held = None
            known = self._known[_PREFIX + name]
            tensor = torch.empty(known.size, dtype=known.properties.dtype)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({_PREFIX + name: tensor}, checkpoint_id=self._folder, no_dist=True)
            self._held = name, tensor
        return self._held[1]


class _Stored(LazyTensor):
    def __init__(self, stored: StoredTensors, name: str, *, known: TensorStorageMetadata) -> None:
        self._stored, self._name = stored, name
        super().__init__(shape=known.size, dtype=known.properties.dtype)

    def read(self, box: Box) -> Tensor:
        return read(self._stored.whole(self._name), box)
