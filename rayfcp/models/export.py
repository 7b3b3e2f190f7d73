"""Tensors of a run's checkpoint, read one by one in one process, without process groups.

From a run's last checkpoint to a folder that `from_pretrained` opens, one file in memory at a time.
"""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rayfcp.config import Config, ConfigError
from rayfcp.models.build import DTYPES
from rayfcp.models.describe import model_config
from rayfcp.models.lazy import LazyTensor, read
from rayfcp.models.pretrained import aliases_of, library_on_meta
from rayfcp.values.state import Box

_PREFIX = "model.model."
"""Of the library's names: the part of the state, and where a `CausalLM` holds the library's model."""


class StoredTensors:
    """The model's tensors in the checkpoint `folder`, written by any number of ranks and stages. Of what was read last
    one whole tensor stays in memory, since parts of it are often read one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        self._known = {name: each for name, each in known.items() if isinstance(each, TensorStorageMetadata)}
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


_RULES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)

FILE_BYTES = 4 << 30
"""A file holds as many tensors as fit, one at least."""


def export_checkpoint(config: Config, checkpoint: str | Path, *, out_dir: str | Path, vocab_size: int) -> None:
    """Write model (safetensors, in `model.dtype`), its configuration, and the tokenizer or processor if it has files.

    Needs memory for one file and one tensor of the checkpoint; no process group.

    Raises:
        ConfigError: `out_dir` holds something already.
    """
    target = Path(out_dir)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"OUT_DIR is {out_dir}, must be empty or not there yet; give another folder")
    library = library_on_meta(model_config(config.model, vocab_size=vocab_size))
    target.mkdir(parents=True, exist_ok=True)
    _write_weights(_as_in_files(library, StoredTensors(Path(checkpoint))), target, dtype=DTYPES[config.model.dtype])
    library.config.architectures, library.config.dtype = [type(library).__name__], config.model.dtype
    library.config.save_pretrained(target)
    if library.can_generate():
        library.generation_config.save_pretrained(target)
    tokenizer = config.data.processor or config.data.tokenizer
    if tokenizer != "bytes":
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(target)
    if config.data.processor is not None:
        _copy_rules(config.data.processor, target)


def _copy_rules(processor: str, target: Path) -> None:
    """What a processor has beside its tokenizer, as it is."""
    from transformers.utils import cached_file

    for name in _RULES:
        found = cached_file(processor, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copyfile(found, target / name)


def _as_in_files(library: Any, stored: StoredTensors) -> dict[str, LazyTensor | Tensor]:
    """By names of files, in their layout: what loading converts, the other way round. A tied matrix comes once."""
    state: dict[str, Any] = {}
    for name, names in aliases_of(library).items():
        if not names & state.keys():
            state[name] = stored.tensor(next((each for each in (name, *sorted(names)) if each in stored), name))
    try:
        return revert_weight_conversion(library, dict(state))  # type: ignore[no-any-return]
    except Exception:
        # A conversion that asks more of its tensors than `LazyTensor` knows.
        whole = {name: source.whole().clone() for name, source in state.items() if isinstance(source, LazyTensor)}
        return revert_weight_conversion(library, whole)  # type: ignore[no-any-return]


def _write_weights(sources: Mapping[str, LazyTensor | Tensor], folder: Path, *, dtype: torch.dtype) -> None:
    parts = list(_files(sources, itemsize=dtype.itemsize))
    file_of: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        stem, suffix = SAFE_WEIGHTS_NAME.rsplit(".", 1)
        file = SAFE_WEIGHTS_NAME if len(parts) == 1 else f"{stem}-{number:05}-of-{len(parts):05}.{suffix}"
        save_file({name: _own_copy(sources[name], dtype) for name in names}, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(parts) > 1:
        total = sum(source.shape.numel() for source in sources.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(sources: Mapping[str, LazyTensor | Tensor], *, itemsize: int) -> Iterator[list[str]]:
    """Names of each file, in order."""
    names: list[str] = []
    num_bytes = 0
    for name, source in sources.items():
        size = source.shape.numel() * itemsize
        if names and num_bytes + size > FILE_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    yield names


def _own_copy(source: LazyTensor | Tensor, dtype: torch.dtype) -> Tensor:
    """In memory of its own; numbers that are not floating-point keep their kind."""
    value = source.whole() if isinstance(source, LazyTensor) else source
    kept = dtype if value.is_floating_point() else value.dtype
    return torch.empty(value.shape, dtype=kept).copy_(value)
