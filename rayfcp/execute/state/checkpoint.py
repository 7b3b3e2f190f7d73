"""Sharded checkpoints of torch.distributed.checkpoint: made of parts that others wrote; read by any number of devices.

The state has the names and keys of `get_state_dict` with the options `_BY_NAME`.
"""

import functools
import io
import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from rayfcp.config.models import TrainConfig
from rayfcp.execute.optimization import is_decayed, options_of
from rayfcp.execute.reports import FileSum, SavedPart, SavedTensor, sum_files
from rayfcp.values.state import BUFFER, PARAMETER, Box

_BY_NAME = StateDictOptions(strict=True, flatten_optimizer_state_dict=True)
"""Optimizer state is keyed by parameter name, not by its position in groups, which differ between stages. What two
stages hold has one name, and is written once."""

Key = tuple[str, str]
"""Section of the state, and key in it."""

_OPTIONS = "param_groups."
"""Prefix of the optimizer's keys for options of a parameter, such as its weight decay."""

COMMON, METADATA = "__common_0.distcp", ".metadata"
"""Files besides those of shards: what is the same for all parameters, and the index of all files."""


def write_index(folder: Path, parts: Sequence[SavedPart], *, step: int, config: TrainConfig) -> tuple[FileSum, ...]:
    """Complete a checkpoint of the state after `step`, whose parts are on disk; return the sums of its further files.

    Raises:
        ValueError: the parts do not hold each tensor once.
        OSError: it cannot be written.
    """
    shards: dict[tuple[str, str], list[SavedTensor]] = defaultdict(list)
    for each in (tensor for part in parts for tensor in part.tensors):
        shards[each.entry.name, each.entry.kind].append(each)
    scalars = {name: value for part in parts for name, value in part.scalars.items()}
    index, options = _Index(), functools.cache(functools.partial(options_of, config, step=step))
    trained: set[str] = set()
    for (name, kind), tensors in shards.items():
        if kind in (PARAMETER, BUFFER):
            index.add_shards(("model", name), tensors)
            continue
        index.add_shards(("optimizer", f"state.{name}.{kind}"), tensors)
        if name not in trained:
            trained.add(name)
            for scalar, value in scalars.items():
                index.add_scalar(("optimizer", f"state.{name}.{scalar}"), value)
            decayed = is_decayed(name, num_dimensions=len(tensors[0].entry.box.sizes))
            for option, value in options(decayed=decayed).items():
                index.add_object(("optimizer", f"{_OPTIONS}{name}.{option}"), value)
    index.write(folder)
    return sum_files(folder, [COMMON, METADATA])


class _Index:
    """Metadata of a checkpoint, and its small values, each of which is written once, whatever has it."""

    def __init__(self) -> None:
        self._common = bytearray()
        self._places: dict[str, _StorageInfo] = {}
        self._state: dict[str, Any] = {}
        self._paths: dict[str, Key] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def add_shards(self, path: Key, saved: Sequence[SavedTensor]) -> None:
        boxes = {tensor.entry.box: tensor for tensor in saved}
        ends = [[at + size for at, size in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
        sizes = tuple(map(max, zip(*ends, strict=True)))
        if prod(sizes) != sum(box.num_elements for box in boxes):
            raise ValueError(
                f"{path[1]} has {prod(sizes)} elements, parts hold {sum(box.num_elements for box in boxes)}"
            )
        key = self._add(path, _tensor(saved[0].entry.dtype, sizes, boxes))
        for number, (box, tensor) in enumerate(boxes.items()):
            place = _StorageInfo(tensor.file, tensor.start_byte, tensor.num_bytes)
            self._storage[MetadataIndex(key, box.offsets, number)] = place

    def add_scalar(self, path: Key, value: float) -> None:
        """Add a number that the optimizer holds as a tensor."""
        key = self._add(path, _tensor("float32", (), [Box(offsets=(), sizes=())]))
        self._storage[MetadataIndex(key, (), 0)] = self._place_of(torch.tensor(value, dtype=torch.float32))

    def add_object(self, path: Key, value: object) -> None:
        key = self._add(path, BytesStorageMetadata())
        self._storage[MetadataIndex(key)] = self._place_of(value)

    def write(self, folder: Path) -> None:
        meta = StorageMeta(checkpoint_id=folder)
        content = Metadata(self._state, self._paths, self._storage, meta, CURRENT_DCP_VERSION)
        for name, data in ((COMMON, bytes(self._common)), (METADATA, pickle.dumps(content))):
            with (folder / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def _add(self, path: Key, described: Any) -> str:
        key = ".".join(path)
        self._state[key], self._paths[key] = described, path
        return key

    def _place_of(self, value: object) -> _StorageInfo:
        if (written := self._places.get(repr(value))) is None:
            stream = io.BytesIO()
            torch.save(value, stream)
            data = stream.getvalue()
            written = self._places[repr(value)] = _StorageInfo(COMMON, len(self._common), len(data))
            self._common += data
        return written


def _tensor(dtype: str, sizes: tuple[int, ...], boxes: Iterable[Box]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, dtype)),
        size=torch.Size(sizes),
        chunks=[ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in boxes],
    )


def load(folder: Path, module: nn.Module, *, optimizer: torch.optim.Optimizer | None, group: dist.ProcessGroup) -> None:
    """Fill a sharded model, and its optimizer unless that is None, from `folder`, written by any number of ranks;
    parameters that are not trained are in no checkpoint, and stay. One before the first update has no optimizer state,
    and leaves none. Options of the optimizer's groups stay too, since `folder` has those of the run that wrote it.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    frozen = {name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad}
    held = get_model_state_dict(module, options=_BY_NAME)
    state: dict[str, Any] = {"model": {name: value for name, value in held.items() if name not in frozen}}
    has_state = any(key.startswith("optimizer.") for key in keys)
    own: dict[str, Any] = {}
    if optimizer is not None and has_state:
        own = get_optimizer_state_dict(module, optimizer, options=_BY_NAME)
        state["optimizer"] = {key: value for key, value in own.items() if not key.startswith(_OPTIONS)}
    try:
        dcp.load(state, checkpoint_id=folder, process_group=group)
    except dcp.api.CheckpointException as error:
        raise ValueError(f"checkpoint {os.fspath(folder)} does not fit this model; {error}") from error
    set_model_state_dict(module, state["model"], options=replace(_BY_NAME, strict=not frozen))
    if optimizer is not None and has_state:
        set_optimizer_state_dict(module, optimizer, own | state["optimizer"], options=_BY_NAME)
    elif optimizer is not None:
        optimizer.state.clear()


def changed_options(folder: Path, *, step: int, config: TrainConfig) -> list[str]:
    """Describe the optimizer options that differ between a checkpoint after `step` and a run with `config`.

    Options that only one of them has, e.g. from another version of torch, are left out.
    """
    changes: dict[tuple[str, Any, Any], list[str]] = defaultdict(list)
    had: Counter[tuple[str, Any]] = Counter()
    options_now = functools.cache(functools.partial(options_of, config, step=step))
    for name, (num_dimensions, options) in _saved_options(folder).items():
        now = options_now(decayed=is_decayed(name, num_dimensions=num_dimensions))
        for option, then in options.items():
            had[option, then] += 1
            if now.get(option, then) != then:
                changes[option, then, now[option]].append(name)
    found = []
    for (option, then, value), names in changes.items():
        example = names[0].removeprefix("model.")  # its name in transformers
        some = "" if len(names) == had[option, then] else f" of {len(names)} parameters, such as {example}"
        found.append(f"{option} {_shown(then)} -> {_shown(value)}{some}")
    return found


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _saved_options(folder: Path) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return the number of dimensions and the options of each parameter with optimizer state, keyed by name."""
    index = dcp.FileSystemReader(folder).read_metadata()
    places = {key.fqn: place for key, place in index.storage_data.items()}
    read = functools.cache(functools.partial(_read_object, folder))  # few distinct values, each stored once
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for key, (section, path) in index.planner_data.items():
        if section == "optimizer" and path.startswith(_OPTIONS):
            name, _, option = path.removeprefix(_OPTIONS).rpartition(".")
            place, weight = places[key], index.state_dict_metadata[f"model.{name}"]
            assert isinstance(weight, TensorStorageMetadata), "parameters are tensors"
            _, options = found.setdefault(name, (len(weight.size), {}))
            options[option] = read(place.relative_path, place.offset, place.length)
    return found


def _read_object(folder: Path, name: str, start_byte: int, num_bytes: int) -> Any:
    with (folder / name).open("rb") as file:
        file.seek(start_byte)
        return torch.load(io.BytesIO(file.read(num_bytes)), weights_only=True)
