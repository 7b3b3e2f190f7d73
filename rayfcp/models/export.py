"""From a checkpoint to a folder that `from_pretrained` opens, one file in memory at a time, without process groups."""

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
from rayfcp.data.hub import locate
from rayfcp.models.build import DTYPES
from rayfcp.models.describe import model_config
from rayfcp.models.lazy import LazyTensor, Source, read, read_whole
from rayfcp.models.pretrained import aliases_of, library_on_meta
from rayfcp.values.state import Box

_PREFIX = "model.model."
"""Prefix of the library's names in a checkpoint: the state's section, and the attribute of `CausalLM`."""
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
FILE_BYTES = 4 << 30
"""Size of a file: as many tensors as fit, at least one."""


class StoredTensors:
    """The model's tensors in the checkpoint `folder`, written by any number of ranks and stages. The last tensor read
    stays in memory, since parts of it are often read one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        self._known = {name: each for name, each in known.items() if isinstance(each, TensorStorageMetadata)}
        self._held: tuple[str, Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return _PREFIX + name in self._known

    def tensor(self, name: str) -> LazyTensor:
        """A tensor by the library's name.

        Raises:
            KeyError: The checkpoint lacks it.
        """
        return _StoredTensor(self, name, known=self._known[_PREFIX + name])

    def whole(self, name: str) -> Tensor:
        """All elements of a tensor."""
        if self._held is None or self._held[0] != name:
            self._held = None
            known = self._known[_PREFIX + name]
            tensor = torch.empty(known.size, dtype=known.properties.dtype)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({_PREFIX + name: tensor}, checkpoint_id=self._folder, no_dist=True)
            self._held = name, tensor
        return self._held[1]


class _StoredTensor(LazyTensor):
    def __init__(self, stored: StoredTensors, name: str, *, known: TensorStorageMetadata) -> None:
        self._stored, self._name = stored, name
        super().__init__(shape=known.size, dtype=known.properties.dtype)

    def read(self, box: Box) -> Tensor:
        return read(self._stored.whole(self._name), box)


def export_checkpoint(config: Config, checkpoint: str | Path, *, out_dir: str | Path, vocab_size: int) -> None:
    """Write the model (safetensors, in `model.dtype`), its configuration, and the tokenizer or processor if it has
    files. Needs memory for one file and one tensor of the checkpoint.

    Raises:
        ConfigError: `out_dir` is not empty.
    """
    target = Path(out_dir)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"OUT_DIR is {out_dir}, must be empty or absent; give another folder")
    library = library_on_meta(model_config(config.model, vocab_size=vocab_size))
    target.mkdir(parents=True, exist_ok=True)
    _write_weights(_as_in_files(library, StoredTensors(Path(checkpoint))), target, dtype=DTYPES[config.model.dtype])
    library.config.architectures, library.config.dtype = [type(library).__name__], config.model.dtype
    library.config.save_pretrained(target)
    if library.can_generate():
        library.generation_config.save_pretrained(target)
    tokenizer = config.data.processor or config.data.tokenizer
    if tokenizer not in (None, "bytes"):
        _copy_tokenizer(tokenizer, target, is_processor=config.data.processor is not None)


def _copy_tokenizer(name: str, target: Path, *, is_processor: bool) -> None:
    """Save the tokenizer, and copy the further files of a processor."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    source, local_only = locate(name, key="data.processor" if is_processor else "data.tokenizer")
    options = {"local_files_only": local_only, "_raise_exceptions_for_missing_entries": False}
    options["_raise_exceptions_for_connection_errors"] = False
    AutoTokenizer.from_pretrained(source, local_files_only=local_only).save_pretrained(target)
    for file in _PROCESSOR_FILES if is_processor else ():
        found = cached_file(source, file, **options)
        if found is not None:
            shutil.copyfile(found, target / file)


def _as_in_files(library: Any, stored: StoredTensors) -> dict[str, Source]:
    """Tensors by name and layout in files: the reverse of the conversions of loading. A tied matrix occurs once."""
    state: dict[str, Any] = {}
    for name, names in aliases_of(library).items():
        if not names & state.keys():
            state[name] = stored.tensor(next((each for each in (name, *sorted(names)) if each in stored), name))
    try:
        return revert_weight_conversion(library, dict(state))  # type: ignore[no-any-return]
    except Exception:
        # A conversion with operations that `LazyTensor` lacks.
        whole = {name: read_whole(source).clone() for name, source in state.items()}
        return revert_weight_conversion(library, whole)  # type: ignore[no-any-return]


def _write_weights(sources: Mapping[str, Source], folder: Path, *, dtype: torch.dtype) -> None:
    parts = list(_files(sources, itemsize=dtype.itemsize))
    file_of: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        stem, suffix = SAFE_WEIGHTS_NAME.rsplit(".", 1)
        file = SAFE_WEIGHTS_NAME if len(parts) == 1 else f"{stem}-{number:05}-of-{len(parts):05}.{suffix}"
        tensors = {}
        for name in names:
            value = read_whole(sources[name])
            kept = dtype if value.is_floating_point() else value.dtype
            tensors[name] = torch.empty(value.shape, dtype=kept).copy_(value)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(parts) > 1:
        total = sum(source.shape.numel() for source in sources.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(sources: Mapping[str, Source], *, itemsize: int) -> Iterator[list[str]]:
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
