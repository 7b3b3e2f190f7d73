"""From a checkpoint to a folder that `from_pretrained` opens, one file in memory at a time, without process groups."""

import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rayfcp.config import Config, ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.config.models import ModelConfig
from rayfcp.data.hub import locate
from rayfcp.models.build import DTYPES, first_buffers, random_model
from rayfcp.models.describe import configured_model
from rayfcp.models.library import has_reward_head, lora_module, remove_padding, text_of
from rayfcp.models.multimodal import TextPart, part_at
from rayfcp.models.pretrained import Source, aliases_of, library_on_meta, other_weights

_PREFIX = "model.model."
"""Prefix of the library's names in a checkpoint: the state's section, and the attribute of `CausalLM`."""
_LAYER = re.compile(r"^.*?\.\d+\.")
"""Beginning of the names of a layer's tensors, which follow each other."""
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
FILE_BYTES = 4 << 30
"""Size of a file: as many tensors as fit, at least one."""


def export_checkpoint(
    config: Config, checkpoint: str | Path, *, out_dir: str | Path, vocab_size: int, merge: bool = False
) -> None:
    """Write the model (safetensors, in `model.dtype`), its configuration, and the tokenizer or processor if it has
    files; of a run with adapters these alone, in PEFT's format, or with `merge` the model with them added in. Needs
    memory for one file and one layer, but for the whole model where parameters that were not trained are written.

    Raises:
        ConfigError: `out_dir` is not empty, or there are no adapters to `merge`.
    """
    target, has_adapters = Path(out_dir), config.model.lora.rank is not None
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"OUT_DIR is {out_dir}, must be empty or absent; give another folder")
    if merge and not has_adapters:
        raise ConfigError("--merge is given, the run has no adapters (model.lora.rank); leave it out")
    described, run = configured_model(config, vocab_size=vocab_size), config.model
    part = _part_of(run, described)
    library = library_on_meta(described) if part is None else part.whole
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = _copied_tokenizer(config.data, target)
    if has_reward_head(library.config):
        _set_padding(library.config, tokenizer)
    if not has_adapters or merge:
        held: Mapping[str, Source] = _held(config, described, Path(checkpoint), whole=merge or run.freeze_vision)
        if part is not None:
            held = {part.outer(name) or name: each for name, each in held.items()} | other_weights(part, str(run.path))
            _copy_processor(str(run.path), target, key="model.path")
        _write_weights(_as_in_files(library, Path(checkpoint), dtype=DTYPES[run.dtype], held=held, part=part), target)
        library.config.architectures = [type(library).__name__]
        library.config.dtype = text_of(library.config).dtype = run.dtype
        library.config.save_pretrained(target)
        if library.can_generate():
            library.generation_config.save_pretrained(target)
    else:
        _write_adapters(config, library, Path(checkpoint), target, part=part)


def _part_of(run: ModelConfig, described: PreTrainedConfig) -> TextPart | None:
    """Place of the trained model in the multimodal one at `model.path`, whose other weights an export has too; None if
    there are none, or the trained model is a reward model."""
    if run.path is None or run.init != "pretrained" or has_reward_head(described):
        return None
    return part_at(run.path, described)


def _set_padding(config: PreTrainedConfig, tokenizer: Any) -> None:
    """Name the token that pads batches: a reward is that of the last other token, and without one the library refuses
    batches. None if the tokenizer pads with what ends its sequences, whose reward would be that of the token before."""
    pad, end = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or pad == end or pad >= config.vocab_size:
        remove_padding(config)
    else:
        config.pad_token_id = pad


def _copied_tokenizer(data: DataConfig, target: Path) -> Any:
    """Save the tokenizer, and copy the further files of a processor; return the tokenizer, None if it has no files."""
    name, is_processor = data.processor or data.tokenizer, data.processor is not None
    if name in (None, "bytes"):
        return None
    from transformers import AutoTokenizer

    key = "data.processor" if is_processor else "data.tokenizer"
    source, local_only = locate(name, key=key)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local_only)
    tokenizer.save_pretrained(target)
    if is_processor:
        _copy_processor(name, target, key=key)
    return tokenizer


def _copy_processor(name: str, target: Path, *, key: str) -> None:
    """Copy the files of a processor that its tokenizer does not write."""
    source, local_only = locate(name, key=key)
    options = {"local_files_only": local_only, "_raise_exceptions_for_missing_entries": False}
    options["_raise_exceptions_for_connection_errors"] = False
    for file in _PROCESSOR_FILES:
        found = cached_file(source, file, **options)
        if found is not None and not (target / file).exists():
            shutil.copyfile(found, target / file)


def _write_adapters(config: Config, library: Any, checkpoint: Path, folder: Path, *, part: TextPart | None) -> None:
    """Adapters in the precision in which they were trained; the model's configuration, where it is not the base's."""
    if config.model.rope.type is not None:
        library.config.save_pretrained(folder)
    settings = lora_module().inject(library, config.model.lora)
    dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
    trained = {name: each for name, each in library.named_parameters() if each.requires_grad}
    tensors = {name: torch.empty(each.shape, dtype=dtype) for name, each in trained.items()}
    _load({_PREFIX + _own_name(name, part): each for name, each in tensors.items()}, checkpoint)
    base = config.model.path if config.model.init == "pretrained" else None
    lora_module().save(library, tensors, settings=settings, folder=folder, base=base)


def _held(config: Config, library: PreTrainedConfig, checkpoint: Path, *, whole: bool) -> dict[str, Tensor]:
    """What is not taken from the checkpoint as it is there: with `whole` everything, otherwise buffers, which none
    has."""
    if whole:
        return _whole_state(config, library, checkpoint)
    run = config.model
    return first_buffers(library, dtype=run.dtype, path=run.path if run.init == "pretrained" else None)


def _whole_state(config: Config, library: PreTrainedConfig, checkpoint: Path) -> dict[str, Tensor]:
    """Weights by the library's names: those that were trained from the checkpoint, adapters added in, and the others
    where the run had them from."""
    run = config.model
    model = random_model(
        library,
        dtype=run.dtype,
        seed=config.run.seed,
        freeze_vision=run.freeze_vision,
        lora=run.lora,
        path=run.path if run.init == "pretrained" else None,
    )
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    _load({f"model.{name}": each.data for name, each in trained}, checkpoint)
    return lora_module().merged(model.model) if run.lora.rank is not None else dict(model.model.state_dict())


def _load(state: dict[str, Tensor], checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)


def _write_weights(tensors_in_order: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    names: list[list[str]] = []
    total_bytes = 0
    for number, tensors in enumerate(_files(tensors_in_order)):
        save_file(tensors, folder / f"{number}.part", metadata={"format": "pt"})
        names.append(list(tensors))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(names) == 1:
        (folder / "0.part").rename(folder / SAFE_WEIGHTS_NAME)
        return
    file_of: dict[str, str] = {}
    stem, suffix = SAFE_WEIGHTS_NAME.rsplit(".", 1)
    for number, own in enumerate(names):
        file = f"{stem}-{number + 1:05}-of-{len(names):05}.{suffix}"
        (folder / f"{number}.part").rename(folder / file)
        file_of |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Tensors of each file, in order."""
    own: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if own and num_bytes + tensor.nbytes > FILE_BYTES:
            yield own
            own, num_bytes = {}, 0
        own[name] = tensor.contiguous()
        num_bytes += tensor.nbytes
    yield own


def _own_name(name: str, part: TextPart | None) -> str:
    """Name in the model that is trained of a tensor of the library's, which may have other parts."""
    return name if part is None else part.inner(name) or name


def _as_in_files(
    library: Any, checkpoint: Path, *, dtype: torch.dtype, held: Mapping[str, Source], part: TextPart | None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name and layout in files, layer by layer: the reverse of the conversions of loading, none of which
    joins tensors of several layers. A tied matrix occurs once. `held`: weights instead of the checkpoint's."""
    known = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    aliases, state = aliases_of(library), library.state_dict()
    unique = [name for name in state if name == aliases[name][0]]
    for _, names in groupby(unique, key=_LAYER.findall):
        layer, stored = {}, {}
        for name in names:
            kind = dtype if state[name].is_floating_point() else state[name].dtype
            given = next((held[each] for each in aliases[name] if each in held), None)
            if given is not None:
                layer[name] = given.to(kind)
            elif part is None or part.inner(name):  # otherwise the files do not have it either
                layer[name] = torch.empty(state[name].shape, dtype=kind)
                own = [_PREFIX + _own_name(each, part) for each in aliases[name]]
                stored[next((each for each in own if each in known), own[0])] = layer[name]
        if stored:
            _load(stored, checkpoint)
        yield from revert_weight_conversion(library, layer).items()
