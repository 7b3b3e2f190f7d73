"""Weights of safetensors files, directly into a model that may be sharded: each device reads its own part.

Names and layouts in files are those of a family's first release; the library renames tensors, and fuses or splits
them, when it opens a model. Here its conversions run on `LazyTensor`s of memory-mapped files: a device reads and holds
its own parts, except where a conversion needs whole tensors. (The reader of torch.distributed.checkpoint for these
files knows no conversions.)
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rayfcp.config import ConfigError
from rayfcp.config.models import WEIGHT_SUFFIXES
from rayfcp.data.hub import locate
from rayfcp.execute.parallel.sharding import local_shard
from rayfcp.execute.reports import ReadWeight
from rayfcp.execute.state.copying import own_box
from rayfcp.execute.state.identity import contents_of, read_weight
from rayfcp.models.library import (
    QUANTIZATION,
    REWARD_HEAD,
    has_reward_head,
    is_saved_classifier,
    kept_buffers,
    library_name,
    make_library_model,
    text_of,
)
from rayfcp.models.multimodal import TextPart, check_text_alone, part_at
from rayfcp.models.nf4 import Nf4Linear
from rayfcp.values.state import Box

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter


logger = logging.getLogger(__name__)

_OLD_TABLES = r"rotary_emb\.inv_freq$"
"""Tables that older releases stored, and that are computed."""

_LAYER = re.compile(r"\blayers\.(\d+)\.")

_MAX_NAMED = 3
"""Tensor names in an error message."""

_FITTING = "give weights and configuration of one model"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES_OF_FILES = frozenset(_DTYPES.values())
"""Types of plain weights."""


class LazyTensor:
    """Tensors end to end along `dim`, of which only the parts that are needed are copied.

    The library stacks and concatenates the tensors of files to make parameters, with plain torch functions. Of
    `LazyTensor`s these give another one and copy nothing; any other function gets the whole tensor, so that every
    conversion works and the common ones need no memory.
    """

    def __init__(self, parts: "Sequence[Source]", dim: int = 0) -> None:
        self._parts, self._dim = tuple(parts), dim
        self.dtype: torch.dtype = parts[0].dtype
        self.shape: torch.Size = parts[0].shape
        if len(parts) > 1:
            around = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
            if len(around) > 1:
                raise ValueError(f"{[tuple(part.shape) for part in parts]} cannot be joined along dimension {dim}")
            size = sum(part.shape[dim] for part in parts)
            self.shape = torch.Size((*self.shape[:dim], size, *self.shape[dim + 1 :]))

    def read(self, box: Box) -> Tensor:
        """The elements in `box`, which is not empty, in its shape."""
        if len(self._parts) == 1:
            return read(self._parts[0], box)
        dim, found = self._dim, []
        start, stop = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        for part in self._parts:
            first, last = max(start, 0), min(stop, part.shape[dim])
            if first < last:
                offsets = (*box.offsets[:dim], first, *box.offsets[dim + 1 :])
                sizes = (*box.sizes[:dim], last - first, *box.sizes[dim + 1 :])
                found.append(read(part, Box(offsets=offsets, sizes=sizes)))
            start, stop = start - part.shape[dim], stop - part.shape[dim]
        return torch.cat(found, dim)

    def whole(self) -> Tensor:
        """All elements."""
        return self.read(Box(offsets=(0,) * len(self.shape), sizes=tuple(self.shape)))

    def __getattr__(self, name: str) -> Any:
        """A method of the whole tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.cat:
            return _cat(*args, **(kwargs or {}))
        if function is torch.stack:
            return _stack(*args, **(kwargs or {}))
        args, keywords = tree_map(
            lambda value: value.whole() if isinstance(value, LazyTensor) else value, (tuple(args), kwargs or {})
        )
        return function(*args, **keywords)


Source = LazyTensor | Tensor


def read(source: Source, box: Box) -> Tensor:
    """The elements of `source` in `box`; of a tensor a view."""
    if isinstance(source, LazyTensor):
        return source.read(box)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        source = source.narrow(dim, offset, size)
    return source


def _cat(parts: Sequence[Source], dim: int = 0) -> LazyTensor:
    return LazyTensor(parts, dim % len(parts[0].shape))


def _stack(parts: Sequence[Source], dim: int = 0) -> LazyTensor:
    return LazyTensor([part.unsqueeze(dim) for part in parts], dim % (len(parts[0].shape) + 1))


class WeightFiles:
    """The safetensors files of a folder, or of a hub repository, fetched when they are needed.

    Args:
        path: `model.path`.
        headers_only: Tensors are on the meta device; no elements are read.

    Raises:
        ConfigError: There are no safetensors, or the index is broken.
    """

    def __init__(self, path: str, *, headers_only: bool = False) -> None:
        self.path = path
        self._source, self._local_only = locate(path, key="model.path")
        self.headers_only = headers_only
        self._open: dict[str, Any] = {}
        self._file_of = self._files_by_tensor()

    def _files_by_tensor(self) -> dict[str, str]:
        """Return the file name of each tensor. A single file takes precedence over an index, as in the library."""
        if self._find(SAFE_WEIGHTS_NAME) is not None:
            return dict.fromkeys(self._handle(SAFE_WEIGHTS_NAME).keys(), SAFE_WEIGHTS_NAME)
        if (index := self._find(SAFE_WEIGHTS_INDEX_NAME)) is not None:
            return self._weight_map(index)
        folder = Path(self._source)
        others = sorted(folder.iterdir()) if folder.is_dir() else []
        found = listed([each.name for each in others if each.suffix in WEIGHT_SUFFIXES])
        raise self.error(
            f"neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME} is there{f', but {found}' if found else ''}; "
            "save the model as safetensors, or set model.init=random"
        )

    def error(self, problem: str) -> ConfigError:
        """An error about these files."""
        return ConfigError(f"model.path is {self.path!r}, {' '.join(problem.split())}")

    def misfit(self, problem: str, *, remedy: str = _FITTING) -> ConfigError:
        """Return the error of tensors that do not fit the model, or of quantization if the configuration has it."""
        if (method := self.quantization) is not None:
            problem = f"whose weights are quantized ({QUANTIZATION} {method!r} in its config.json): {problem}"
            remedy = "give the weights before quantization; model.lora.quantize=nf4 packs them when they are loaded"
        return self.error(f"{problem}; {remedy}")

    @property
    def quantization(self) -> str | None:
        """Return the quantization method in `config.json`; None if there is none."""
        file = self._find("config.json")
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
        parts = (each for each in (found, *found.values()) if isinstance(each, dict))
        settings = next((each[QUANTIZATION] for each in parts if each.get(QUANTIZATION)), None)
        return None if settings is None else str(settings.get("quant_method") or "of no named method")

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def tensor(self, name: str) -> LazyTensor:
        """A tensor in the file's memory map: elements are read where they are used.

        Raises:
            ConfigError: Its file is missing, damaged, or lacks it, or it does not hold plain floating-point numbers.
        """
        file = self._file_of[name]
        try:
            part = self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise self.error(f"{file} lacks {name}, which its index says it has; fetch both again") from error
        dtype = _DTYPES.get(part.get_dtype())
        if dtype is None:
            raise self.misfit(
                f"{name} holds {part.get_dtype()}, must be one of {', '.join(_DTYPES)}",
                remedy="give weights that are not quantized",
            )
        if self.headers_only:
            return LazyTensor([torch.empty(part.get_shape(), dtype=dtype, device="meta")])
        return LazyTensor([self._handle(file).get_tensor(name)])

    def stored(self, name: str) -> Tensor:
        """Return a tensor as stored, of any dtype."""
        found: Tensor = self._handle(self._file_of[name]).get_tensor(name)
        return found

    def _find(self, file: str) -> Path | None:
        """The file in the folder or the hub's cache, None if there is none."""
        options = {"local_files_only": self._local_only, "_raise_exceptions_for_missing_entries": False}
        try:
            found = cached_file(self._source, file, **options)
        except OSError as error:
            raise self.error(f"no weights are there ({error}); give a folder") from error
        return Path(found) if found else None

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._find(file)
            if path is None:
                raise self.error(f"{file} is missing, which its index names; fetch the file")
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self.error(f"{file} is damaged ({error}); fetch it again") from error
        return self._open[file]

    def _weight_map(self, index: Path) -> dict[str, str]:
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in found.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise self.error(f"it has a broken {index.name} ({type(error).__name__}); fetch it again") from error


def library_on_meta(config: PreTrainedConfig) -> Any:
    """The whole model on the meta device, with a copy of the configuration, since the library's models write into
    theirs."""
    with torch.device("meta"):
        return make_library_model(copy.deepcopy(config))


def check_weights(path: str, config: PreTrainedConfig) -> None:
    """Compare the headers of a folder's files with the model's configuration. Files on the hub are compared where they
    are fetched, by the devices. Of a multimodal model there, text must pass the text part alone.

    Raises:
        ConfigError: Tensors are missing, of another shape, or have no place in the model, or text passes other parts.
    """
    if (part := part_at(path, config)) is not None:
        check_text_alone(part.whole.config, config)
        kind, text = part.whole.config.model_type, config.model_type
        logger.warning("%s is a %s, of which only the text part, %s, is used: images are refused", path, kind, text)
    if Path(path).expanduser().is_dir():
        library = library_on_meta(config)
        own = dict((*library.named_parameters(), *library.named_buffers()))
        files = WeightFiles(path, headers_only=True)
        _fill(own, config, files)
        if (method := files.quantization) is not None:
            logger.warning("%s of %s (%r) is dropped: its weights are not quantized", QUANTIZATION, path, method)


@torch.no_grad()
def fill_pretrained(
    model: nn.Module, path: str, *, config: PreTrainedConfig, only_frozen: bool = False
) -> tuple[ReadWeight, ...]:
    """Overwrite the parameters of `model`, a library model or a stage of one, and the buffers that its files hold; of
    sharded tensors this device's part; not those of adapters, nor a reward model's head if the files are of a causal
    LM. No communication. `only_frozen`: of the parameters, only those that are not trained. Return
    the contents of weights that are not trained.

    Raises:
        ConfigError: The files do not fit, as in `check_weights`, or hold a tied matrix twice with different values.
    """
    held = ((name, each) for name, each in model.named_parameters() if not (only_frozen and each.requires_grad))
    packed = {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, Nf4Linear)}
    own: dict[str, Tensor | Nf4Linear] = {**dict(held), **packed}
    own |= kept_buffers(model)
    return _fill(own, config, WeightFiles(path)) if own else ()


def contents_at(path: str, config: PreTrainedConfig) -> dict[str, str]:
    """Return the contents of all weights at `path` for a model of `config`, each read once; by the library's names.

    Raises:
        ConfigError: As `fill_pretrained`.
    """
    library = library_on_meta(config).requires_grad_(False)
    return contents_of(_fill({**dict(library.named_parameters()), **kept_buffers(library)}, config, WeightFiles(path)))


def other_weights(part: TextPart, path: str) -> dict[str, Source]:
    """Weights of a multimodal model at `path` beside its text part, by their names in the whole model."""
    return dict(_sources(WeightFiles(path), part.whole, wanted=part.others(), part=part))


def carried_weights(path: str, library: Any, *, part: TextPart | None) -> tuple[dict[str, Tensor], list[str]]:
    """Return what the files at `path` hold beside the model's own tensors.

    First the tensors that the library ignores, by their names in the files, such as layers for speculative decoding and
    parts of models with sound; then names of tensors that cannot go with the model: tables that are computed, and in a
    reward model the head for tokens.
    """
    files = WeightFiles(path)
    found = _contents(files, library, part)
    return {name: files.stored(name) for name in found.ignored}, found.useless


def _fill(
    own: Mapping[str, Tensor | Nf4Linear], config: PreTrainedConfig, files: WeightFiles
) -> tuple[ReadWeight, ...]:
    """Overwrite tensors, and packed weights, by their names in the model of `config`; those that the library's model
    lacks are left alone. Return the contents of weights that are not trained, also for tensors on the meta device."""
    part = part_at(files.path, config)
    library = library_on_meta(config) if part is None else part.whole
    named = ((library_name(name), each) for name, each in own.items())
    placed = ((name if part is None else part.outer(name), each) for name, each in named)
    aliases = aliases_of(library)
    wanted = {alias: each for name, each in placed for alias in aliases.get(name or "", ())}
    shapes = {name: tuple(tensor.shape) for name, tensor in library.state_dict().items()}
    filled: dict[int, str] = {}
    frozen = []
    for name, source in _sources(files, library, wanted=wanted.keys(), part=part):
        if tuple(source.shape) != shapes[name]:
            shape, wanted_shape = list(source.shape), list(shapes[name])
            raise files.misfit(f"{name} has shape {shape} there, must be {wanted_shape} by its config.json")
        target = wanted[name]
        first = filled.setdefault(id(target), name)
        if isinstance(target, Nf4Linear):
            box, local, is_trained = target.box, local_shard(target.codes), False
        else:
            box, local, is_trained = own_box(target), local_shard(target), target.requires_grad
        if files.headers_only or not box.num_elements:
            continue
        value = read(source, box)
        value = value if local.is_meta else value.to(local.device)
        if first == name and not is_trained:
            frozen.append(read_weight(aliases[name][0], value, box=box))
        if isinstance(target, Nf4Linear):
            target.pack(value)
        elif first == name:
            local.copy_(value)
        elif not local.is_meta and not torch.equal(local, value.to(local)):
            raise files.error(
                f"{name} and {first} differ, but its config.json ties them; set tie_word_embeddings to false there"
            )
    if missing := _needed((name for name, tensor in wanted.items() if id(tensor) not in filled), library.config):
        raise files.misfit(f"its files lack {listed(missing)}")
    return tuple(frozen)


def _needed(names: Iterable[str], config: PreTrainedConfig) -> list[str]:
    is_drawn = has_reward_head(config) and not is_saved_classifier(config)
    return sorted(name for name in names if not (is_drawn and name.startswith(f"{REWARD_HEAD}.")))


def aliases_of(library: Any) -> dict[str, list[str]]:
    """All names of the same tensor, in order, by each name in the model's state."""
    state = library.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in state.items()}


@dataclass(slots=True)
class _Recipe:
    """Tensors of the files, by name and matched pattern, that become one or more of the model's."""

    converter: "WeightConverter | None"
    parts: list[tuple[str, str]] = field(default_factory=list)

    def may_make(self, name: str, wanted: Iterable[str]) -> bool:
        """True if it may produce something in `wanted`. `name`: its first target."""
        patterns = self.converter.target_patterns if self.converter else [name]
        if len(patterns) == 1:
            return name in wanted
        return patterns[0] not in name or any(name.replace(patterns[0], each) in wanted for each in patterns)


def _sources(
    files: WeightFiles, library: Any, *, wanted: Iterable[str], part: TextPart | None
) -> Iterator[tuple[str, Source]]:
    """Names in `wanted` of the library's model, each with its source.

    Raises:
        ConfigError: A tensor of the files, of which we run the text `part`, has no place there, or cannot be converted.
    """
    for name, recipe in _contents(files, library, part).recipes.items():
        if recipe.may_make(name, wanted):
            made = _converted(name, recipe, files, library)
            yield from ((each, source) for each, source in made.items() if each in wanted)


@dataclass(slots=True)
class _Contents:
    """Tensors of files. `recipes` are the model's own by first target, in the library's order, in which parts are
    stacked; `ignored` are names that the library ignores, `useless` names that no model like it needs."""

    recipes: dict[str, _Recipe] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    useless: list[str] = field(default_factory=list)


def _contents(files: WeightFiles, library: Any, part: TextPart | None) -> _Contents:
    """
    Raises:
        ConfigError: See `_sources`.
    """
    from transformers.core_model_loading import dot_natural_key

    found = _Contents()
    unexpected, own, causal = [], _Naming(library), _causal_naming(library)
    for key in sorted(files.names, key=dot_natural_key):
        name, pattern = own.of(key)
        if name in own.state:
            recipe = found.recipes.setdefault(name, _Recipe(own.converter_of[pattern] if pattern else None))
            recipe.parts.append((key, pattern or key))
        elif re.search(_OLD_TABLES, key) or (causal and causal.of(key)[0] in causal.state):
            found.useless.append(key)
        elif _is_ignored(key, name, library) or (part is not None and part.inner(name) is None):
            found.ignored.append(key)  # the last case: parts that the library lacks, and ignores with a warning
        else:
            unexpected.append(key)
    if unexpected:
        raise files.misfit(f"{type(library).__name__} has no place for {listed(unexpected)} of its files")
    return found


class _Naming:
    """Names in the library's model of tensors in files, by the renamings and conversions of its family."""

    def __init__(self, library: Any) -> None:
        # Imported here: models with random weights need none of these recent parts of the library.
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(library)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self.converter_of = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self.state, self._prefix = library.state_dict(), library.base_model_prefix

    def of(self, key: str) -> tuple[str, str | None]:
        """Name of a file's tensor, and the pattern of its conversion if it has one."""
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self.state)
        return (key, None) if name not in self.state and key in self.state else (name, pattern)


def _causal_naming(library: Any) -> _Naming | None:
    """Names in the causal LM of a reward model; None of any other model."""
    if not has_reward_head(library.config):
        return None
    config = copy.deepcopy(library.config)
    config.num_labels = 2
    return _Naming(library_on_meta(config))


def _is_ignored(key: str, name: str, library: Any) -> bool:
    """True for tensors that the library ignores too, such as layers that only decoding uses. Some families name these
    by the number that they have in the published sizes; in others it follows from the configuration."""
    text, layer = text_of(library.config), _LAYER.search(key)
    first, count = text.num_hidden_layers, getattr(text, "num_nextn_predict_layers", None) or 0
    if layer is not None and first <= int(layer[1]) < first + count:
        return True
    patterns = library._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, each) for pattern in patterns for each in (key, name))


def _converted(name: str, recipe: _Recipe, files: WeightFiles, library: Any) -> dict[str, Source]:
    if recipe.converter is None:
        return {name: files.tensor(recipe.parts[0][0])}
    converter = copy.deepcopy(recipe.converter)
    for key, pattern in recipe.parts:
        part: Any = files.tensor(key)
        converter.add_tensor(name, key, pattern, part)
    try:
        found = converter.convert(name, model=library, config=library.config)
    except Exception as error:  # whatever a family's conversion raises
        names = listed([key for key, _ in recipe.parts])
        raise files.misfit(f"{name} cannot be made of {names} ({type(error).__name__}: {error})") from error
    return {each: value[0] if isinstance(value, list) else value for each, value in found.items()}


def listed(names: list[str]) -> str:
    """The first names in a line, and the number of others."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
