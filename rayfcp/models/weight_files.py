"""The safetensors files of a model: which tensors they hold, and parts of these, read one by one."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rayfcp.config import ConfigError
from rayfcp.models.lazy import LazyTensor
from rayfcp.values.state import Box

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightFiles:
    """Of a folder, or of a name that the Hugging Face hub knows, whose files are fetched when they are needed.

    Opens files and reads their headers; elements only where a tensor is read. `bytes_read`: of elements so far.

    Args:
        path: `model.path`.
        headers_only: tensors have shapes, but reading one gives no elements (it is on the meta device).

    Raises:
        ConfigError: there are no safetensors, or the index is broken.
    """

    def __init__(self, path: str, *, headers_only: bool = False) -> None:
        self.path = path
        self.headers_only = headers_only
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        index = self._find(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            self._file_of: dict[str, str] = _weight_map(index)
        elif self._find(SAFE_WEIGHTS_NAME) is not None:
            self._file_of = dict.fromkeys(self._handle(SAFE_WEIGHTS_NAME).keys(), SAFE_WEIGHTS_NAME)
        else:
            raise ConfigError(
                f"model.path is {path!r}, neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME} is there; save the "
                "model as safetensors, or set model.init=random"
            )

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._file_of.keys()

    def tensor(self, name: str) -> "FileTensor":
        """
        Raises:
            ConfigError: its file is missing, damaged, or lacks it, or it does not hold plain floating-point numbers.
        """
        file = self._file_of[name]
        try:
            part = self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise ConfigError(
                f"model.path is {self.path!r}, {file} lacks {name}, which its index says it has; fetch both again"
            ) from error
        dtype = _DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ConfigError(
                f"model.path is {self.path!r}, {name} holds {part.get_dtype()}, must be one of {', '.join(_DTYPES)}; "
                "give weights that are not quantised"
            )
        return FileTensor(self, part, dtype=dtype)

    def _find(self, file: str) -> Path | None:
        """None if it is not there."""
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            return folder / file if (folder / file).is_file() else None
        try:
            found = cached_file(self.path, file, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            first = str(error).splitlines()[0]
            raise ConfigError(f"model.path is {self.path!r}, no weights are there ({first}); give a folder") from error
        return Path(found) if found else None

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._find(file)
            if path is None:
                raise ConfigError(
                    f"model.path is {self.path!r}, {file} is missing, which its index names; fetch the file"
                )
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                first = (str(error).splitlines() or [""])[0]
                raise ConfigError(
                    f"model.path is {self.path!r}, {file} is damaged ({first}); fetch it again"
                ) from error
        return self._open[file]


class FileTensor(LazyTensor):
    """One tensor of a file."""

    def __init__(self, files: WeightFiles, part: Any, *, dtype: torch.dtype) -> None:
        self._files, self._part = files, part
        super().__init__(shape=part.get_shape(), dtype=dtype)

    def read(self, box: Box) -> Tensor:
        if self._files.headers_only:
            return torch.empty(box.sizes, dtype=self.dtype, device="meta")
        self._files.bytes_read += box.num_elements * self.dtype.itemsize
        ranges = zip(box.offsets, box.sizes, strict=True)
        found: Tensor = self._part[tuple(slice(start, start + size) for start, size in ranges) or ...]
        return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"model.path has a broken {index.name} ({type(error).__name__}); fetch it again") from error
